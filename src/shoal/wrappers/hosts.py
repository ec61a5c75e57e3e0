"""Puts transforms around a pool, or around any Gymnasium vector env."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, create_empty_array

from shoal.batch import Batch
from shoal.memory.messages import RESTART_INFO
from shoal.pool import Pool
from shoal.support.checks import Ids, check_ids
from shoal.support.deadline import CLOSE_TIMEOUT
from shoal.wrappers.base import Array, Bound, Rows, Transform, added_infos, bind_all, map_parts, put_rows, take_rows


def wrap(envs: Any, *transforms: Transform) -> Any:
    """Wrap a Pool or any Gymnasium vector env: its batches go through these transforms, in this order.

    Args:
        envs: a `shoal.Pool`, a vector env of `shoal.make`, or any other of Gymnasium's.
        *transforms: the first is next to the envs.

    Raises:
        TypeError: it is neither a pool nor a vector env, or a transform is not one.
    """
    for transform in transforms:
        if not isinstance(transform, Transform):
            raise TypeError(f"expected transforms such as FrameStack(4), found {transform!r}")
    if isinstance(envs, Pool | WrappedPool):
        return WrappedPool(envs, transforms)
    if isinstance(envs, gymnasium.vector.VectorEnv):
        return WrappedVectorEnv(envs, transforms)
    raise TypeError(f"expected a Pool or a Gymnasium vector env, found {envs!r}; for others see shoal.dialects")


class _Transformed:
    """Envs with transforms."""

    def _bind(self, envs: Any, transforms: Sequence[Transform], *facts: Any) -> None:
        """Bind the transforms to the envs; the facts are those that Bound has after the spaces."""
        self.transforms = tuple(transforms)
        bound = Bound(envs.num_envs, envs.single_observation_space, envs.single_action_space, *facts)
        self.single_observation_space: Space[Any] = bind_all(self.transforms, bound)
        self.observation_space: Space[Any] = batch_space(self.single_observation_space, envs.num_envs)
        self._all_ids = np.arange(envs.num_envs)

    def _show(self, actions: Any, ids: Ids) -> None:
        for transform in self.transforms:
            transform.send(actions, ids)

    def _change(self, rows: Rows) -> None:
        for transform in self.transforms:
            transform.apply(rows)

    def _close(self, close_envs: Callable[[], None]) -> None:
        """Close the transforms, then the envs, even if one raises."""
        with contextlib.ExitStack() as closing:
            closing.callback(close_envs)
            for transform in reversed(self.transforms):
                closing.callback(transform.close)


class WrappedPool(_Transformed):
    """A pool with transforms: all batches, partial ones too, go through them. Other attributes are the pool's own.

    `send`, `recv`, `step` and `reset` are called as the pool's.
    """

    def __init__(self, pool: Any, transforms: Sequence[Transform]):
        self.pool = pool
        self._bind(pool, transforms, lambda ids: pool.render(ids), pool.specs.metadata, pool.specs.render_mode)

    def __getattr__(self, name: str) -> Any:
        if name == "pool":  # not there yet
            raise AttributeError(name)
        if name in ("wait", "exchange", "wait_reset", "data"):
            raise AttributeError(f"{name} knows nothing of transforms: it is the pool's own, envs.pool.{name}")
        return getattr(self.pool, name)

    def restore(self, *_: Any, **__: Any) -> Batch:
        """Not supported, as transforms cannot return to an earlier state."""
        raise NotImplementedError(
            "restore: what transforms have seen is no part of a snapshot; restore the pool inside (envs.pool.restore), "
            "and wrap it again"
        )

    def send(self, actions: Any, env_ids: Any = None) -> None:
        """As `Pool.send`: the transforms see the actions of these `env_ids` first."""
        self._show(actions, self._all_ids if env_ids is None else check_ids(env_ids, self.pool.num_envs))
        self.pool.send(actions, env_ids)

    def recv(self, timeout: float | None = None, min_batch: int | None = None) -> Batch:
        """As `Pool.recv`, with its timeout and min_batch: the batch has gone through the transforms."""
        return self._transformed(self.pool.recv(timeout, min_batch))

    def step(self, actions: Any, timeout: float | None = None) -> Batch:
        """As `Pool.step`, with its timeout: actions and batch go through the transforms."""
        self._show(actions, self._all_ids)
        return self._transformed(self.pool.step(actions, timeout))

    def reset(self, env_ids: Any = None, **options: Any) -> Batch:
        """As `Pool.reset`, of these `env_ids` and with its options: the batch goes through the transforms."""
        return self._transformed(self.pool.reset(env_ids, **options))

    def close(self, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """Close the transforms, and the pool."""
        self._close(lambda: self.pool.close(timeout))

    def __enter__(self) -> WrappedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"WrappedPool({self.pool!r}, {', '.join(type(one).__name__ for one in self.transforms)})"

    def _transformed(self, batch: Batch) -> Batch:
        if batch.mask.all():
            return self._apply(batch)
        # Transforms see rows of envs only, not the empty rows of a padded batch.
        at, count = np.flatnonzero(batch.mask), len(batch.mask)
        if not len(at):
            return batch._replace(obs=create_empty_array(self.single_observation_space, count, np.zeros))
        fields = {name: getattr(batch, name)[at] for name in batch._fields if name not in ("obs", "info")}
        obs = take_rows(self.pool.single_observation_space, batch.obs, at)
        info = {env_id: info for env_id, info in batch.info.items() if env_id in fields["env_id"]}
        found = self._apply(Batch(obs=obs, info=info, **fields))

        def spread(part: Array) -> Array:
            whole = np.zeros((count, *part.shape[1:]), part.dtype)
            whole[at] = part
            return whole

        flat = {name: spread(getattr(found, name)) for name in ("reward", "terminated", "truncated")}
        obs = map_parts(spread, self.single_observation_space, found.obs)
        return batch._replace(obs=obs, **flat, info={**batch.info, **found.info})

    def _apply(self, batch: Batch) -> Batch:
        # Transforms look at the infos of these rows only, and those of all rows would take long to make.
        turned = np.flatnonzero(batch.terminated | batch.truncated | batch.began).tolist() if batch.info else []
        given = {row: batch.info.get(int(batch.env_id[row]), {}) for row in turned}
        finals = {row: info["final_obs"] for row, info in given.items() if "final_obs" in info}
        # If an episode has ended, transforms see its last info, not that of the next episode's reset.
        shown = {row: _last_info(info) for row, info in given.items() if info}
        rows = Rows(
            batch.env_id, len(batch.env_id) == self.pool.num_envs, batch.obs, batch.reward, batch.terminated,
            batch.truncated, batch.began, finals, {row: dict(info) for row, info in shown.items()},
        )  # fmt: skip
        self._change(rows)
        infos = batch.info
        for row in sorted(rows.infos):
            env_id = int(batch.env_id[row])
            infos[env_id] = {**infos.get(env_id, {}), **added_infos(shown.get(row, {}), rows.infos[row])}
            if row in rows.final_obs:
                infos[env_id]["final_obs"] = rows.final_obs[row]
        if rows.infos:
            infos = dict(sorted(infos.items()))
        return batch._replace(
            obs=rows.obs, reward=rows.reward, terminated=rows.terminated, truncated=rows.truncated, info=infos
        )


class WrappedVectorEnv(_Transformed, gymnasium.vector.VectorWrapper):
    """A Gymnasium vector env, Shoal's or any other, with transforms: its batches go through them."""

    def __init__(self, env: Any, transforms: Sequence[Transform]):
        super().__init__(env)
        self._bind(env, transforms, self._images, env.metadata, getattr(env, "render_mode", None))
        self._mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._ended = np.zeros(env.num_envs, np.bool_)
        self._last_obs: Any = None
        self._shown: dict[int, dict[str, Any]] = {}

    def _images(self, ids: Ids) -> list[Any]:
        pictures = self.env.render()
        return [None] * len(ids) if pictures is None else [pictures[i] for i in ids.tolist()]

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or those of `options["reset_mask"]`.

        Args:
            seed, options: as for Gymnasium's vector env.
        """
        mask = None if options is None else options.get("reset_mask")  # now, as Gymnasium removes it
        obs, infos = self.env.reset(seed=seed, options=options)
        ids = self._all_ids if mask is None else np.flatnonzero(mask)
        whole = len(ids) == self.num_envs
        nothing = np.zeros(len(ids), np.bool_)
        part = obs if whole else take_rows(self.env.single_observation_space, obs, ids)
        rows = self._apply(part, np.zeros(len(ids)), nothing, nothing, ~nothing, infos, ids)
        self._ended[ids] = False
        if not whole:  # the other envs keep their observations
            rest = self._last_obs
            if rest is None:
                rest = create_empty_array(self.single_observation_space, self.num_envs, np.zeros)
            rows.obs = put_rows(self.single_observation_space, rest, rows.obs, ids)
        self._last_obs = rows.obs
        return rows.obs, self._infos(infos, rows)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._show(actions, self._all_ids)
        obs, reward, terminated, truncated, infos = self.env.step(actions)
        done = terminated | truncated
        if self._mode is AutoresetMode.SAME_STEP:
            began = done
        elif self._mode is AutoresetMode.NEXT_STEP:
            began, self._ended = self._ended, done
        else:
            began = np.zeros(self.num_envs, np.bool_)
        rows = self._apply(obs, reward, terminated, truncated, began, infos, self._all_ids)
        self._last_obs = rows.obs
        return rows.obs, rows.reward, rows.terminated, rows.truncated, self._infos(infos, rows)

    def _apply(
        self, obs: Any, reward: Any, terminated: Any, truncated: Any, began: Any, infos: dict[str, Any], ids: Ids
    ) -> Rows:
        finals: dict[int, Any] = {}
        if self._mode is AutoresetMode.SAME_STEP and "final_obs" in infos:
            has = np.flatnonzero(infos["_final_obs"])
            finals = {int(row): infos["final_obs"][row] for row in has}
        whole = len(ids) == self.num_envs
        rows = Rows(ids, whole, obs, reward, terminated, truncated, began, finals, {}, with_rest=not whole)
        ended = terminated | truncated
        if ended.any():  # transforms look at the infos of these rows only
            self._shown = {row: _row_of(infos, int(ids[row])) for row in np.flatnonzero(ended).tolist()}
            rows.infos = {row: dict(info) for row, info in self._shown.items()}
        self._change(rows)
        return rows

    def _infos(self, infos: dict[str, Any], rows: Rows) -> dict[str, Any]:
        if rows.final_obs:
            finals = np.array(infos["final_obs"], dtype=object, copy=True)
            for row, final in rows.final_obs.items():
                finals[row] = final
            infos = {**infos, "final_obs": finals}
        for row, info in rows.infos.items():
            added = added_infos(self._shown.get(row, {}), info)
            if added:
                # Copies, so that the envs' own arrays do not change.
                own = {key: copy.deepcopy(infos[key]) for name in added for key in (name, f"_{name}") if key in infos}
                infos = self.env.unwrapped._add_info({**infos, **own}, added, int(rows.ids[row]))
        return infos

    def close(self, **options: Any) -> None:
        self._close(lambda: self.env.close(**options))


def _last_info(info: dict[str, Any]) -> dict[str, Any]:
    """The info of the step that ended an episode. The news of a restart comes with the next episode's first info."""
    if "final_info" not in info or RESTART_INFO not in info:
        return info.get("final_info", info)  # type: ignore[no-any-return]
    return {**info["final_info"], RESTART_INFO: info[RESTART_INFO]}


def _row_of(infos: dict[str, Any], row: int) -> dict[str, Any]:
    """One env's info from Gymnasium's arrays; under same-step autoreset, that of the step that ended its episode."""
    own: dict[str, Any] = {}
    if "final_info" in infos and infos.get("_final_info", [False] * (row + 1))[row]:
        if RESTART_INFO in infos and infos[f"_{RESTART_INFO}"][row]:  # see _last_info
            own[RESTART_INFO] = _row_of(infos[RESTART_INFO], row)
        infos = infos["final_info"]
        if not isinstance(infos, dict):
            return {**own, **(infos[row] or {})}
    for key, values in infos.items():
        if key.startswith("_") or key == "final_obs":
            continue
        mask = infos.get(f"_{key}")
        if mask is not None and mask[row]:
            own[key] = _row_of(values, row) if isinstance(values, dict) else values[row]
    return own

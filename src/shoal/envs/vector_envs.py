"""Envs that are batches already, as envs with several lanes: Gymnasium's vector envs, EnvPools and PufferLib's envs.

EnvPool and PufferLib need not be installed: their envs are recognized by their attributes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.envs.group import Answers, GroupAdapter, Infos
from shoal.errors import BadEnv, BadObservation
from shoal.memory.copies import own_copy
from shoal.spaces.leaves import Array, get_path

# The buffers that PufferLib's envs take as `buf`, and have as attributes.
PUFFER_BUFFERS = ("observations", "rewards", "terminals", "truncations", "masks", "actions", "teacher_actions")
# For each mode of a vector env, the modes in which a pool can use it. One that leaves resets to the caller can be reset
# at once by this adapter.
USABLE = {
    AutoresetMode.NEXT_STEP: ("next_step",),
    AutoresetMode.SAME_STEP: ("same_step",),
    AutoresetMode.DISABLED: ("disabled", "same_step"),
}


def as_lanes(env: Any) -> Any:
    """Return the env with its rows as lanes; None if it is no batch."""
    if all(hasattr(env, name) for name in ("async_reset", "recv", "send", "config")):  # some are vector envs as well
        return EnvPoolLanes(env)
    if isinstance(env, VectorEnv):
        return VectorLanes(env)
    if all(hasattr(env, name) for name in ("single_observation_space", "single_action_space", "num_agents")):
        return PufferLanes(env)
    return None


class _BatchLanes(GroupAdapter):
    """What these adapters have in common: all rows are stepped at once, and observations are copied into the batch."""

    def _begin_all(self, obs: Any, out: Answers) -> None:
        self._write(out.obs, obs)
        self._episodes.begun(slice(None), out)

    def step(self, rows: Array, actions: Any, out: Answers) -> Infos:
        infos = self._step_all(actions, out)
        self._episodes.note(out)
        return self._infos(infos, rows)

    def _infos(self, infos: Any, rows: Array) -> Infos:
        """Split the env's infos into a dict for each row."""
        return _by_lane(infos, rows)

    def _step_all(self, actions: Any, out: Answers) -> Any:
        """Step the env, write its answer, and return its infos as they are."""
        own = own_copy(actions)  # which the env may keep
        obs, out.reward[:], out.terminated[:], out.truncated[:], infos = self.env.step(own)
        self._write(out.obs, obs)
        return infos

    def _write(self, targets: Sequence[Array], obs: Any, at: Any = ..., rows: Any = ...) -> None:
        """Write these rows of a batch of observations to the places `at`."""
        for leaf, target in zip(self._leaves, targets, strict=True):
            array, expected = np.asarray(get_path(obs, leaf.path)), (self.num_lanes, *leaf.shape)
            if array.shape != expected or not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
                raise BadObservation(
                    f"observation{leaf.name}: expected {leaf.dtype} of shape {expected}, one row for each lane, "
                    f"found {array.dtype} of shape {array.shape}"
                )
            target[at] = array[rows]


class VectorLanes(_BatchLanes):
    """A Gymnasium vector env. One that leaves resets to the caller can be used with "same_step" as well."""

    def __init__(self, env: VectorEnv[Any, Any, Any]):
        own_mode = AutoresetMode((env.metadata or {}).get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self.modes = USABLE[own_mode]
        self.resets_alone = own_mode == AutoresetMode.DISABLED
        super().__init__(env, env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self, rows: Array, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        if len(rows) < self.num_lanes:  # of a vector env that leaves resets to the caller
            options = {**(options or {}), "reset_mask": self._mask(rows)}
        return self._begin(rows, seeds, options, out, slice(None))

    def _begin(self, rows: Array, seeds: Any, options: Any, out: Answers, at: Any) -> Infos:
        """Begin an episode in these rows; `at` are their places in `out`."""
        given = None if all(seed is None for seed in seeds) else self._all_seeds(rows, seeds)
        obs, infos = self.env.reset(seed=given, options=options)
        self._write(out.obs, obs, at, rows)
        self._episodes.begun(rows, out, at)
        return _by_lane(infos, rows)

    def step(self, rows: Array, actions: Any, out: Answers) -> Infos:
        if self.resets_alone:
            return self._episodes.step(
                rows, out,
                lambda some, _: _by_lane(self._step_all(actions, out), some),
                lambda some, at: self._begin(some, [None] * len(some), {"reset_mask": self._mask(some)}, out, at),
            )  # fmt: skip
        infos = self._step_all(actions, out)
        self._episodes.note(out)
        if not self._episodes.rule.resets_at_once:
            return _by_lane(infos, rows)
        finals = infos.get("final_obs")
        for row in np.flatnonzero(out.began).tolist():
            if finals is not None and finals[row] is not None:
                out.has_final[row] = True
                for leaf, target in zip(self._leaves, out.final, strict=True):
                    target[row] = get_path(finals[row], leaf.path)
        return _by_lane({name: infos[name] for name in infos if name not in ("final_obs", "_final_obs")}, rows)


class EnvPoolLanes(_BatchLanes):
    """An EnvPool, or an env with the same methods, in its synchronous mode."""

    modes = ("next_step",)

    def __init__(self, env: Any):
        count = int(env.config["num_envs"])
        if int(env.config.get("batch_size") or count) != count:
            raise BadEnv(f"{env!r} answers in batches below num_envs: make it with batch_size=num_envs")
        super().__init__(env, count, env.observation_space, env.action_space)

    def reset(self, rows: Array, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        obs, infos = self.env.reset()  # an EnvPool gets its seeds when it is made, and not here
        self._begin_all(obs, out)
        return self._infos(infos, rows)

    def _infos(self, infos: Any, rows: Array) -> Infos:
        """Each name has a column. The ids of envs are left out."""
        ids = ("env_id", "players", "elapsed_step")
        kept = {name: value for name, value in infos.items() if name not in ids and np.ndim(value)}
        return _by_lane({name: column for name, column in kept.items() if len(column) == len(rows)}, rows)


class PufferLanes(_BatchLanes):
    """An env of PufferLib's kind: it has a row for each agent, arrays of its own, and begins episodes at once.

    Such envs do not say what the last observation of an episode was. If the pool has just one frame and the env takes
    `buf`, the env writes its observations into the batch, and nothing is copied.
    """

    modes = ("same_step",)

    def __init__(self, env: Any):
        super().__init__(env, env.num_agents, env.single_observation_space, env.single_action_space)
        self._in_place = False  # whether its observations are the batch's own memory

    def move_into(self, out: Answers, env_fn: Callable[..., Any]) -> PufferLanes:
        """Build the env anew with the arrays of `out`, which never change; return `self` if the env takes no arrays."""
        own = {name: getattr(self.env, name) for name in PUFFER_BUFFERS if hasattr(self.env, name)}
        fits = len(self._leaves) == 1 and "observations" in own and own["observations"].dtype == out.obs[0].dtype
        if not fits or not _takes(env_fn, "buf"):
            return self
        self.close()
        buffers = {name: array.copy() for name, array in own.items()}
        moved = PufferLanes(env_fn(buf={**buffers, "observations": out.obs[0]}))
        moved._in_place = np.shares_memory(moved.env.observations, out.obs[0])
        return moved

    def _write(self, targets: Sequence[Array], obs: Any, at: Any = ..., rows: Any = ...) -> None:
        if not self._in_place or obs is not self.env.observations:
            super()._write(targets, obs, at, rows)

    def reset(self, rows: Array, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        result = self.env.reset(seeds[0]) if seeds[0] is not None else self.env.reset()
        obs, infos = result if isinstance(result, tuple) else (result, [])
        self._begin_all(obs, out)
        return self._infos(infos, rows)

    def close(self) -> None:
        with contextlib.suppress(NotImplementedError):  # the `close` of PufferLib's base class
            super().close()

    def _infos(self, infos: Any, rows: Array) -> Infos:
        """Sort the infos: a list of dicts about anything, or one dict for each agent."""
        given = [info for info in infos if info] if infos else []
        if not given:
            return None
        if len(infos) == self.num_lanes:
            return [dict(info) for info in infos]
        return [{"infos": list(given)}, *({} for _ in range(self.num_lanes - 1))]


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def _by_lane(infos: Mapping[str, Any], rows: Array) -> Infos:
    """Split a vector env's infos into a dict for each row: each name has a column, and `_name` marks its rows."""
    if not infos:
        return None
    found: list[dict[str, Any]] = [{} for _ in rows]
    for name, column in infos.items():
        if name.startswith("_") and name[1:] in infos:
            continue
        has_it = infos.get(f"_{name}")
        for i, row in enumerate(rows.tolist()):
            if has_it is None or has_it[row]:
                found[i][name] = _cell(column, row)
    return found


def _cell(column: Any, row: int) -> Any:
    if isinstance(column, Mapping):
        inner = _by_lane(column, np.array([row]))
        return inner[0] if inner else {}
    return column[row]

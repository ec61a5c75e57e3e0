"""Envs that are batches already, as envs with several lanes: Gymnasium's vector envs, EnvPools and PufferLib's envs.

None of them is asked for by its class but Gymnasium's: none need be installed.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.envs.group import Answers, Infos
from shoal.errors import BadEnv, BadObservation
from shoal.spaces.leaves import Leaf, flatten, get_path

__all__ = ["EnvPoolLanes", "PufferLanes", "VectorLanes", "as_lanes"]

Array = npt.NDArray[Any]

# What such envs take as `buf`, and have as attributes.
PUFFER_BUFFERS = ("observations", "rewards", "terminals", "truncations", "masks", "actions", "teacher_actions")
MODES = {
    AutoresetMode.NEXT_STEP: ("next_step",),
    AutoresetMode.SAME_STEP: ("same_step",),
    AutoresetMode.DISABLED: ("disabled", "same_step"),
}


def as_lanes(env: Any) -> Any:
    """The env with its rows as lanes; None if it is no batch."""
    if all(hasattr(env, name) for name in ("async_reset", "recv", "send", "config")):  # some are vector envs as well
        return EnvPoolLanes(env)
    if isinstance(env, VectorEnv):
        return VectorLanes(env)
    if all(hasattr(env, name) for name in ("single_observation_space", "single_action_space", "num_agents")):
        return PufferLanes(env)
    return None


class _Lanes:
    """What they have in common: all rows are stepped at once, and observations are copied from where the env has them.

    Attributes:
        env: the batch itself.
    """

    lane_names = None
    together, resets_alone, can_be_absent = True, False, False
    modes: Sequence[str]

    def __init__(self, env: Any, count: int, observation_space: Space[Any], action_space: Space[Any]):
        self.env, self.num_lanes = env, int(count)
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self._leaves = flatten(observation_space)
        self._mode = self.modes[0]

    def use(self, autoreset: str) -> None:
        """See GroupEnv."""
        self._mode = autoreset

    def _write(self, targets: Sequence[Array], obs: Any, at: Any = slice(None)) -> None:
        for leaf, target in zip(self._leaves, targets, strict=True):
            target[at] = _checked(leaf, get_path(obs, leaf.path), self.num_lanes)[at]

    def close(self) -> None:
        """See GroupEnv."""
        if hasattr(self.env, "close"):
            self.env.close()


def _checked(leaf: Leaf, value: Any, count: int) -> Array:
    array = np.asarray(value)
    if array.shape != (count, *leaf.shape) or not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
        raise BadObservation(
            f"observation{leaf.name}: expected {leaf.dtype} of shape {(count, *leaf.shape)}, one row for each lane, "
            f"found {array.dtype} of shape {array.shape}"
        )
    return array


class VectorLanes(_Lanes):
    """A Gymnasium vector env. One whose autoreset is disabled can be used with "same_step" as well."""

    def __init__(self, env: VectorEnv[Any, Any, Any]):
        self._own_mode = (env.metadata or {}).get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self.modes = MODES[AutoresetMode(self._own_mode)]
        self.resets_alone = self._own_mode == AutoresetMode.DISABLED
        super().__init__(env, env.num_envs, env.single_observation_space, env.single_action_space)
        self._ended = np.zeros(self.num_lanes, np.bool_)

    def reset(self, rows: Array, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        """See GroupEnv."""
        if len(rows) < self.num_lanes:
            return self._reset_some(rows, seeds, options, out, slice(None))
        given = None if all(seed is None for seed in seeds) else list(seeds)
        obs, infos = self.env.reset(seed=given, options=options)
        self._write(out.obs, obs)
        out.began[:] = True
        self._ended[:] = False
        return _by_lane(infos, rows)

    def _reset_some(self, rows: Array, seeds: Any, options: Any, out: Answers, at: Any) -> Infos:
        """Of a vector env that resets when it is told to; `at` are the places of these rows in `out`."""
        mask = np.zeros(self.num_lanes, np.bool_)
        mask[rows] = True
        whole: list[int | None] = [None] * self.num_lanes
        for row, seed in zip(rows.tolist(), seeds, strict=True):
            whole[row] = seed
        given = None if all(seed is None for seed in whole) else whole
        obs, infos = self.env.reset(seed=given, options={**(options or {}), "reset_mask": mask})
        for leaf, target in zip(self._leaves, out.obs, strict=True):
            target[at] = _checked(leaf, get_path(obs, leaf.path), self.num_lanes)[rows]
        out.began[at] = True
        self._ended[rows] = False
        return _by_lane(infos, rows)

    def step(self, rows: Array, actions: Any, out: Answers) -> Infos:
        """See GroupEnv."""
        obs, reward, terminated, truncated, infos = self.env.step(_copied(actions))
        out.reward[:], out.terminated[:], out.truncated[:] = reward, terminated, truncated
        over = out.terminated | out.truncated
        self._write(out.obs, obs)
        finals = None
        if self._own_mode == AutoresetMode.NEXT_STEP:
            out.began[:] = self._ended
        elif self._own_mode == AutoresetMode.SAME_STEP:
            out.began[:] = over
            finals, infos = _take_finals(infos)
        found = _by_lane(infos, rows)
        self._ended = over.copy()
        if self._mode == "same_step" and over.any():
            found = self._finish(rows, over, obs, finals, found, out)
        return found

    def _finish(self, rows: Array, over: Array, obs: Any, finals: Any, infos: Infos, out: Answers) -> Infos:
        """Under same_step: put the last observations where they belong, and begin anew if that is left to us."""
        found = [dict(info) for info in infos] if infos is not None else [{} for _ in rows]
        ended = np.flatnonzero(over)
        if self._own_mode == AutoresetMode.SAME_STEP:
            for row in ended.tolist():
                if finals is not None and finals[row] is not None:
                    out.has_final[row] = True
                    for leaf, target in zip(self._leaves, out.final, strict=True):
                        target[row] = get_path(finals[row], leaf.path)
            return found
        self._write(out.final, obs, over)
        out.has_final[over] = True
        last = [found[row] for row in ended.tolist()]
        first = self._reset_some(ended, [None] * len(ended), None, out, over)
        for i, row in enumerate(ended.tolist()):
            found[row] = {**({"final_info": last[i]} if last[i] else {}), **(first[i] if first is not None else {})}
        return found


class EnvPoolLanes(_Lanes):
    """An EnvPool, or what speaks like one, in its synchronous mode: episodes begin with the step after an end."""

    modes = ("next_step",)

    def __init__(self, env: Any):
        count = int(env.config["num_envs"])
        if int(env.config.get("batch_size") or count) != count:
            raise BadEnv(f"{env!r} answers in batches below num_envs: make it with batch_size=num_envs")
        super().__init__(env, count, env.observation_space, env.action_space)
        self._ended = np.zeros(count, np.bool_)

    def reset(self, rows: Array, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        """See GroupEnv. Seeds are given to an EnvPool when it is made, and not here."""
        obs, infos = self.env.reset()
        self._write(out.obs, obs)
        out.began[:] = True
        self._ended[:] = False
        return _columns(infos, self.num_lanes)

    def step(self, rows: Array, actions: Any, out: Answers) -> Infos:
        """See GroupEnv."""
        obs, out.reward[:], out.terminated[:], out.truncated[:], infos = self.env.step(_copied(actions))
        self._write(out.obs, obs)
        out.began[:] = self._ended
        self._ended = out.terminated | out.truncated
        return _columns(infos, self.num_lanes)


class PufferLanes(_Lanes):
    """An env of PufferLib's kind: has a row for each agent, arrays of its own, and begins episodes by itself at once.

    Where a pool has just one frame, and the env takes `buf`, its observations are the batch's, and nothing is copied.
    """

    modes = ("same_step",)

    def __init__(self, env: Any):
        super().__init__(env, env.num_agents, env.single_observation_space, env.single_action_space)
        self._in_place = False  # whether its observations are the batch's own memory

    def move_into(self, out: Answers, env_fn: Callable[..., Any]) -> PufferLanes:
        """The same, built anew upon these arrays, which are always the same ones; itself where it takes none."""
        own = {name: getattr(self.env, name) for name in PUFFER_BUFFERS if hasattr(self.env, name)}
        fits = len(self._leaves) == 1 and "observations" in own and own["observations"].dtype == out.obs[0].dtype
        if not fits or not _takes(env_fn, "buf"):
            return self
        self.close()
        buffers = {name: array.copy() for name, array in own.items()}
        moved = PufferLanes(env_fn(buf={**buffers, "observations": out.obs[0]}))
        moved._in_place = np.shares_memory(moved.env.observations, out.obs[0])
        return moved

    def _show(self, out: Answers, obs: Any) -> None:
        if not self._in_place or obs is not self.env.observations:
            self._write(out.obs, obs)

    def reset(self, rows: Array, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        """See GroupEnv."""
        result = self.env.reset(seeds[0]) if seeds[0] is not None else self.env.reset()
        obs, infos = result if isinstance(result, tuple) else (result, [])
        self._show(out, obs)
        out.began[:] = True
        return self._infos(infos)

    def step(self, rows: Array, actions: Any, out: Answers) -> Infos:
        """See GroupEnv. Such envs do not say what the last observation of an episode was."""
        obs, out.reward[:], out.terminated[:], out.truncated[:], infos = self.env.step(_copied(actions))
        self._show(out, obs)
        np.logical_or(out.terminated, out.truncated, out=out.began)
        return self._infos(infos)

    def close(self) -> None:
        """See GroupEnv. Their base class has a close that only says that there is none."""
        with contextlib.suppress(NotImplementedError):
            super().close()

    def _infos(self, infos: Any) -> Infos:
        """They are a list of dicts about anything, or one for each agent."""
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


def _copied(actions: Any) -> Any:
    """A batch of actions that an env may keep."""
    if isinstance(actions, Mapping):
        return {key: _copied(value) for key, value in actions.items()}
    if isinstance(actions, tuple):
        return tuple(_copied(value) for value in actions)
    return actions.copy()


def _take_finals(infos: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The last observations out of a vector env's infos, and the others."""
    rest = {name: value for name, value in infos.items() if name not in ("final_obs", "_final_obs")}
    return infos.get("final_obs"), rest


def _by_lane(infos: Mapping[str, Any], rows: Array) -> Infos:
    """A vector env's infos, in which each name has a column and `_name` says for whom, as a dict for each row."""
    if not infos:
        return None
    found: list[dict[str, Any]] = [{} for _ in rows]
    for name, column in infos.items():
        if name.startswith("_") and name[1:] in infos:
            continue
        who = infos.get(f"_{name}")
        for i, row in enumerate(rows.tolist()):
            if who is None or who[row]:
                found[i][name] = _cell(column, row)
    return found


def _cell(column: Any, row: int) -> Any:
    if isinstance(column, Mapping):
        inner = _by_lane(column, np.array([row]))
        return inner[0] if inner else {}
    return column[row]


def _columns(infos: Mapping[str, Any], count: int) -> Infos:
    """An EnvPool's infos, in which each name has a column; what only says which env is which is left out."""
    kept = {
        name: column
        for name, column in infos.items()
        if name not in ("env_id", "players", "elapsed_step") and np.ndim(column) and len(column) == count
    }
    return [{name: column[row] for name, column in kept.items()} for row in range(count)] if kept else None

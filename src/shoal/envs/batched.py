"""Envs that step any rows of a batch at once, such as those on a device, as one group of lanes.

Autoreset is done here, so that such envs behave like all others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium import Space

from shoal.envs.group import Answers, Infos
from shoal.spaces.leaves import assemble, flatten, get_path

__all__ = ["BatchedEnv", "RowsEnv"]

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
ENDED = "shoal_ended"  # among the saved arrays


class BatchedEnv(Protocol):
    """Many envs in one object. Arrays have one row for each; rows where a mask is False stay as they are.

    May have a `group_size`: so many neighbouring rows are the agents of one env, and are asked together; and `fields`,
    names of attributes that each row has for itself, with `get_rows(name, rows)` and `set_rows(name, rows, values)`.
    """

    num_envs: int
    single_observation_space: Space[Any]
    single_action_space: Space[Any]

    def reset(self, mask: Mask, seeds: Sequence[int | None]) -> Any:
        """Begin an episode where the mask is True: observations, valid in those rows. One seed for each row."""
        ...

    def step(self, mask: Mask, actions: Any) -> tuple[Any, Array, Array, Array]:
        """Step where the mask is True: observations, rewards, terminated, truncated, valid in those rows. Never resets
        by itself."""
        ...

    def save(self) -> dict[str, Array]:
        """The state as arrays with a row for each env."""
        ...

    def load(self, saved: dict[str, Array], mask: Mask) -> None:
        """The counterpart of `save`, for the rows where the mask is True."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class RowsEnv:
    """A BatchedEnv as a GroupEnv whose lanes may be stepped and reset one by one."""

    can_be_absent = False

    def __init__(self, env: BatchedEnv):
        self.env, self.num_lanes = env, env.num_envs
        self.group_size = getattr(env, "group_size", 1)
        self.together, self.resets_alone = self.group_size > 1, self.group_size == 1
        self.lane_names = list(range(self.group_size)) if self.together else None
        self.single_observation_space, self.single_action_space = env.single_observation_space, env.single_action_space
        self._leaves = flatten(env.single_observation_space)
        self._action_leaves = flatten(env.single_action_space)
        self._ended = np.zeros(self.num_lanes, np.bool_)
        self._mode = "next_step"
        self.reset_ns = 0  # what resets have taken, since somebody asked

    def use(self, autoreset: str) -> None:
        """Any mode will do."""
        self._mode = autoreset

    def reset(self, rows: Array, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        """See GroupEnv."""
        if options:
            raise ValueError(f"options: envs that are stepped as one batch take none, found {options!r:.100}")
        self._begin(rows, seeds, out, slice(None))
        return None

    def step(self, rows: Array, actions: Any, out: Answers) -> Infos:
        """See GroupEnv."""
        due = self._ended[rows] if self._mode == "next_step" else np.zeros(len(rows), np.bool_)
        if due.any():
            self._begin(rows[due], [None] * int(due.sum()), out, due)
        at = ~due
        if at.any():
            self._step(rows[at], self._spread(rows, actions), out, at)
        return None

    def _step(self, rows: Array, actions: Any, out: Answers, at: Mask) -> None:
        obs, *results = self.env.step(self._mask(rows), actions)
        out.reward[at], out.terminated[at], out.truncated[at] = (np.asarray(result)[rows] for result in results)
        over = at & (out.terminated | out.truncated)
        self._write(out.obs, at, obs, rows)
        if self._mode == "same_step":
            if over.any():
                ended = rows[over[at]]
                self._write(out.final, over, obs, ended)
                out.has_final[over] = True
                self._begin(ended, [None] * len(ended), out, over)
        else:
            self._ended[rows] = over[at]

    def _begin(self, rows: Array, seeds: Sequence[int | None], out: Answers, at: Any) -> None:
        began_ns = time.monotonic_ns()
        given: list[int | None] = [None] * self.num_lanes
        for row, seed in zip(rows.tolist(), seeds, strict=True):
            given[row] = seed
        self._write(out.obs, at, self.env.reset(self._mask(rows), given), rows)
        self.reset_ns += time.monotonic_ns() - began_ns
        out.began[at] = True
        self._ended[rows] = False

    def _write(self, targets: Sequence[Array], at: Any, obs: Any, rows: Array) -> None:
        for leaf, target in zip(self._leaves, targets, strict=True):
            target[at] = np.asarray(get_path(obs, leaf.path))[rows]

    def _spread(self, rows: Array, actions: Any) -> Any:
        """A batch of actions for all rows, from those of some."""
        if len(rows) == self.num_lanes:
            return actions
        whole = []
        for leaf in self._action_leaves:
            whole.append(np.zeros((self.num_lanes, *leaf.shape), leaf.dtype))
            whole[-1][rows] = get_path(actions, leaf.path)
        return assemble(self.single_action_space, whole)

    def _mask(self, rows: Array) -> Mask:
        mask = np.zeros(self.num_lanes, np.bool_)
        mask[rows] = True
        return mask

    def save_rows(self, rows: Sequence[int]) -> list[dict[str, Array]]:
        """The states of these lanes, each on its own."""
        saved = {**self.env.save(), ENDED: self._ended}
        return [{name: np.array(array[row]) for name, array in saved.items()} for row in rows]

    def load_rows(self, rows: Sequence[int], states: Sequence[dict[str, Array]]) -> None:
        """The counterpart of `save_rows`."""
        at = np.array(rows)
        whole = {}
        for name in states[0]:
            parts = np.stack([state[name] for state in states])
            whole[name] = np.zeros((self.num_lanes, *parts.shape[1:]), parts.dtype)
            whole[name][at] = parts
        self._ended[at] = whole.pop(ENDED)[at]
        self.env.load(whole, self._mask(at))

    def close(self) -> None:
        """See GroupEnv."""
        self.env.close()

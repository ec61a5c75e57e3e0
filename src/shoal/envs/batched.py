"""Envs that step any rows of a batch at once, such as those on a device, as one group of lanes.

`RowsEnv` adds autoreset to them, so that they behave like all other envs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from gymnasium import Space

from shoal.envs.autoreset import Mask
from shoal.envs.group import Answers, GroupAdapter, Infos
from shoal.errors import DataError
from shoal.spaces.leaves import Array, assemble, flatten, get_path

ENDED = "shoal_ended"  # among the saved arrays


class BatchedEnv(Protocol):
    """Many envs in one object. Arrays have one row for each env; rows where a mask is False stay as they are.

    It may have a `group_size`: so many neighbouring rows are the agents of one env, and are asked together. It may have
    `fields`: names of attributes of which each row has its own, with `get_rows(name, rows)` and
    `set_rows(name, rows, values)`.
    """

    num_envs: int
    single_observation_space: Space[Any]
    single_action_space: Space[Any]

    def reset(self, mask: Mask, seeds: Sequence[int | None]) -> Any:
        """Begin an episode where the mask is True: observations, valid in those rows. One seed for each row."""

    def step(self, mask: Mask, actions: Any) -> tuple[Any, Array, Array, Array]:
        """Step where the mask is True: observations, rewards, terminated, truncated, valid in those rows. It never
        resets an env."""

    def save(self) -> dict[str, Array]:
        """The state as arrays with a row for each env."""

    def load(self, saved: dict[str, Array], mask: Mask) -> None:
        """The counterpart of `save`, for the rows where the mask is True."""

    def close(self) -> None:
        """Release all resources."""


class RowsEnv(GroupAdapter):
    """A BatchedEnv as a GroupEnv; its lanes may be stepped and reset one by one."""

    def __init__(self, env: BatchedEnv):
        super().__init__(env, env.num_envs, env.single_observation_space, env.single_action_space)
        self.group_size = getattr(env, "group_size", 1)
        self.together, self.resets_alone = self.group_size > 1, self.group_size == 1
        self.lane_names = list(range(self.group_size)) if self.together else None
        self._action_leaves = flatten(env.single_action_space)
        self.reset_ns = 0  # the time that resets have taken; the stepper counts it and sets it back

    def reset(self, rows: Array, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        if options:
            raise ValueError(f"options: envs that are stepped as one batch take none, found {options!r:.100}")
        self._begin(rows, seeds, out, slice(None))
        return None

    def step(self, rows: Array, actions: Any, out: Answers) -> Infos:

        def step(some: Array, at: Mask) -> None:
            obs, *results = self.env.step(self._mask(some), self._spread(rows, actions))
            out.reward[at], out.terminated[at], out.truncated[at] = (np.asarray(result)[some] for result in results)
            self._write(out.obs, at, obs, some)

        def begin(some: Array, at: Mask) -> None:
            self._begin(some, [None] * len(some), out, at)

        return self._episodes.step(rows, out, step, begin)

    def _begin(self, rows: Array, seeds: Sequence[int | None], out: Answers, at: Any) -> None:
        began_ns = time.monotonic_ns()
        obs = self.env.reset(self._mask(rows), self._all_seeds(rows, seeds))
        self._write(out.obs, at, obs, rows)
        self.reset_ns += time.monotonic_ns() - began_ns
        self._episodes.begun(rows, out, at)

    def _write(self, targets: Sequence[Array], at: Any, obs: Any, rows: Array) -> None:
        for leaf, target in zip(self._leaves, targets, strict=True):
            target[at] = np.asarray(get_path(obs, leaf.path))[rows]

    def _spread(self, rows: Array, actions: Any) -> Any:
        """Spread the actions of some rows over a batch of all rows."""
        if len(rows) == self.num_lanes:
            return actions
        whole = []
        for leaf in self._action_leaves:
            whole.append(np.zeros((self.num_lanes, *leaf.shape), leaf.dtype))
            whole[-1][rows] = get_path(actions, leaf.path)
        return assemble(self.single_action_space, whole)

    def save_rows(self, rows: Sequence[int]) -> list[dict[str, Array]]:
        """Return the states of these lanes, one for each."""
        saved = {**self.env.save(), ENDED: self._episodes.ended}
        return [{name: np.array(array[row]) for name, array in saved.items()} for row in rows]

    def load_rows(self, rows: Sequence[int], states: Sequence[dict[str, Array]]) -> None:
        """The counterpart of `save_rows`. Raises DataError if these are not its states."""
        at = np.array(rows)
        whole = {}
        try:
            for name in states[0]:
                parts = np.stack([state[name] for state in states])
                whole[name] = np.zeros((self.num_lanes, *parts.shape[1:]), parts.dtype)
                whole[name][at] = parts
            self._episodes.ended[at] = whole.pop(ENDED)[at]
            self.env.load(whole, self._mask(at))
        except Exception as error:  # a file may say anything
            raise DataError(f"the state does not fit ({type(error).__name__}: {error!s:.200})") from error

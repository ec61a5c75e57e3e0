"""The protocol of an env that has several lanes. Adapters of vector envs, of envs with many agents and of envs on
devices implement it, and `shoal.worker.grouped` runs it.

A lane is one row of the batch. All lanes of such an env, its **group**, are neighbours and belong to one worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from gymnasium import Space

from shoal.envs.autoreset import MODES, Episodes, Infos, Mask
from shoal.spaces.leaves import Array, flatten

__all__ = ["MODES", "Answers", "GroupAdapter", "GroupEnv", "Infos", "is_group"]

_FLAGS = ("terminated", "truncated", "began", "present", "has_final")


@dataclass
class Answers:
    """The arrays into which an env writes the answers of some of its lanes: one row for each lane, in their order.

    Wherever possible these arrays are the batch's own memory, so an env writes in place. It gets them filled with zeros
    (`present` with True), except `obs` and `final`, which may hold anything.

    Attributes:
        obs: one array for each leaf of the observation space, as `shoal.spaces.leaves.flatten` orders them.
        reward: float64.
        terminated, truncated: whether the step has ended the lane's episode.
        began: whether `obs` is the first observation of an episode.
        present: whether the lane has an agent; rows of absent agents should be zeros.
        final: like `obs`, for the last observations of episodes where `obs` already has the first one of the next
            episode; an empty list if the autoreset mode does not need it.
        has_final: where `final` was written.
    """

    obs: list[Array]
    reward: Array
    terminated: Mask
    truncated: Mask
    began: Mask
    present: Mask
    final: list[Array]
    has_final: Mask

    @classmethod
    def scratch(cls, leaves: Sequence[Any], count: int, finals: bool = False) -> Answers:
        """Make arrays of so many rows, outside of any batch; `leaves` are those of the observation space."""
        return cls(
            obs=[np.zeros((count, *leaf.shape), leaf.dtype) for leaf in leaves],
            final=[np.zeros((count, *leaf.shape), leaf.dtype) for leaf in leaves if finals],
            reward=np.zeros(count),
            **{name: np.zeros(count, np.bool_) for name in _FLAGS},
        )

    def part(self, start: int, stop: int) -> Answers:
        """Return views of some of the rows."""
        return Answers(
            obs=[array[start:stop] for array in self.obs],
            final=[array[start:stop] for array in self.final],
            **{name: getattr(self, name)[start:stop] for name in ("reward", *_FLAGS)},
        )

    def clear(self) -> None:
        """Fill the arrays as an env gets them."""
        for array in (self.reward, self.terminated, self.truncated, self.began, self.has_final):
            array.fill(0)
        self.present.fill(True)


class GroupEnv(Protocol):
    """An env with several lanes. It does its own resets, by the autoreset mode that `use` has set.

    `modes` and `resets_alone` may be left out: then the env can do all modes, and `resets_alone` is False.

    An env may have `lane(row)`, which returns an object that the caller's calls and attributes of one lane are meant
    for; then it also has `lanes_changed(rows)`, which is called after them, and `set_rows(name, rows, values)`, which
    sets an attribute. It may return `shoal.memory.info_columns.InfoColumns` as infos.
    """

    num_lanes: int
    single_observation_space: Space[Any]  # of one lane
    single_action_space: Space[Any]
    lane_names: Sequence[Any] | None  # of agents, one for each lane; None where lanes have no names
    together: bool  # whether all lanes must be stepped at once
    resets_alone: bool  # whether lanes that are stepped together can still be reset one by one
    can_be_absent: bool  # whether `present` is ever False
    modes: Sequence[str]  # the autoreset modes that it can do

    @property
    def env(self) -> Any:
        """The object that the caller's calls and attributes are meant for."""

    def use(self, autoreset: str) -> None:
        """Set how lanes go on after an episode's end: one of MODES. `shoal.envs.autoreset` has the rules, and a class
        `Episodes` that applies them."""

    def reset(self, rows: Array, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        """Begin an episode in these lanes, counted from 0; one seed for each of them."""

    def step(self, rows: Array, actions: Any, out: Answers) -> Infos:
        """Step these lanes. `actions` are a batch of the action space with a row for each of `rows`; an env that keeps
        them must copy them."""

    def close(self) -> None:
        """Release all resources."""


def is_group(env: Any) -> bool:
    """Tell whether an env implements this protocol."""
    return isinstance(getattr(env, "num_lanes", None), int) and hasattr(env, "use")


class GroupAdapter:
    """A GroupEnv around `env`: what the adapters of this package have in common, with autoreset by `Episodes`."""

    lane_names: Any = None
    together, resets_alone, can_be_absent = True, False, False
    modes: Sequence[str] = MODES

    def __init__(self, env: Any, lanes: int, observation_space: Space[Any], action_space: Space[Any]):
        self.env, self.num_lanes = env, int(lanes)
        self.single_observation_space, self.single_action_space = observation_space, action_space
        self._leaves = flatten(observation_space)
        self._episodes = Episodes(self.num_lanes, self.modes[0])

    def use(self, autoreset: str) -> None:
        self._episodes.use(autoreset)

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()

    def _mask(self, rows: Array) -> Mask:
        mask = np.zeros(self.num_lanes, np.bool_)
        mask[rows] = True
        return mask

    def _all_seeds(self, rows: Array, seeds: Sequence[int | None]) -> list[int | None]:
        """Return a seed for each lane: None for lanes that are not among `rows`."""
        given: list[int | None] = [None] * self.num_lanes
        for row, seed in zip(rows.tolist(), seeds, strict=True):
            given[row] = seed
        return given

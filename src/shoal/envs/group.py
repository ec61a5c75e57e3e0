"""An env that has several lanes: the protocol that adapters of vector envs, of envs with many agents and of envs on
devices speak, and that `shoal.worker.grouped` runs.

A lane is one row of the batch. All lanes of such an env, its **group**, are neighbours, and belong to one worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium import Space

__all__ = ["MODES", "Answers", "GroupEnv", "Infos", "is_group"]

Array = npt.NDArray[Any]
Flags = npt.NDArray[np.bool_]

MODES = ("next_step", "same_step", "disabled")
_FLAGS = ("terminated", "truncated", "began", "present", "has_final")

# One dict for each row of the Answers, or None where all of them are empty.
Infos = Sequence[dict[str, Any]] | None


@dataclass
class Answers:
    """Where an env writes what some of its lanes answer: one row for each, in their order.

    These are the batch's own memory wherever possible, so write in place. They come as zeros (`present` as True), but
    for `obs` and `final`, which hold anything.

    Attributes:
        obs: one array for each leaf of the observation space, as `shoal.spaces.leaves.flatten` orders them.
        reward: float64.
        terminated, truncated: whether the step has ended the lane's episode.
        began: whether `obs` is the first observation of an episode.
        present: whether there is anybody in this lane; rows of the absent should be zeros.
        final: like `obs`, for the last observations of episodes where `obs` has the first one of the next already; has
            no arrays where the autoreset mode does without.
        has_final: where `final` was written.
    """

    obs: list[Array]
    reward: Array
    terminated: Flags
    truncated: Flags
    began: Flags
    present: Flags
    final: list[Array]
    has_final: Flags

    @classmethod
    def scratch(cls, leaves: Sequence[Any], count: int, finals: bool = False) -> Answers:
        """Room for so many rows that is no batch's; `leaves` are those of the observation space."""
        return cls(
            obs=[np.zeros((count, *leaf.shape), leaf.dtype) for leaf in leaves],
            final=[np.zeros((count, *leaf.shape), leaf.dtype) for leaf in leaves if finals],
            reward=np.zeros(count),
            **{name: np.zeros(count, np.bool_) for name in _FLAGS},
        )

    def part(self, start: int, stop: int) -> Answers:
        """Some of the rows, as views."""
        arrays = {name: getattr(self, name)[start:stop] for name in _FLAGS}
        return Answers(
            obs=[array[start:stop] for array in self.obs],
            final=[array[start:stop] for array in self.final],
            reward=self.reward[start:stop],
            **arrays,
        )

    def clear(self) -> None:
        """As an env gets them."""
        for array in (self.reward, self.terminated, self.truncated, self.began, self.has_final):
            array.fill(0)
        self.present.fill(True)


class GroupEnv(Protocol):
    """An env with several lanes. Resets by itself, as the autoreset mode says that it was told of.

    `modes` and `resets_alone` may be left out: it can do all of them then, and False.
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
        """What calls and attributes of the caller are meant for."""
        ...

    def use(self, autoreset: str) -> None:
        """How lanes go on after an episode's end: "next_step" (the next step begins an episode, whatever its action),
        "same_step" (at once: `obs` is the first observation, `final` the last) or "disabled" (the caller resets)."""
        ...

    def reset(self, rows: Array, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        """Begin an episode in these lanes, counted from 0; one seed for each of them."""
        ...

    def step(self, rows: Array, actions: Any, out: Answers) -> Infos:
        """Step these lanes. `actions` are a batch of the action space with a row for each of `rows`; they must be
        copied where they are kept."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


def is_group(env: Any) -> bool:
    """Whether an env speaks this protocol."""
    return isinstance(getattr(env, "num_lanes", None), int) and hasattr(env, "use")

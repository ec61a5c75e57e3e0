"""FrozenLake-v1: cross the ice from S to G without falling into a hole, where you may slip to either side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from shoal import compiled

MAPS = {
    "4x4": ("SFFF", "FHFH", "FFFH", "HFFG"),
    "8x8": (
        "SFFFFFFF", "FFFFFFFF", "FFFHFFFF", "FFFFFHFF",
        "FFFHFFFF", "FHHFFFHF", "FHFFHFHF", "FFFHFFFG",
    ),
}  # fmt: skip
FROZEN, HOLE, GOAL = 0, 1, 2


def board_of(desc: Any) -> Any:
    """Return the letters of a map, given by rows, as an array [rows, columns] of bytes."""
    rows = [str(row) if isinstance(row, str) else "".join(np.asarray(row, str)) for row in desc]
    if len({len(row) for row in rows}) != 1 or not any("S" in row for row in rows):
        raise ValueError(f"desc: expected rows of the same length with an 'S' among them, found {desc!r}")
    return np.asarray(rows, dtype="c")


class FrozenLake(compiled.Env):
    """Gymnasium's FrozenLake, with its arguments.

    Args:
        desc: rows of S (start), F (frozen), H (hole) and G (goal); by default the map that `map_name` names.
        map_name: "4x4" or "8x8".
        is_slippery: whether a step may go to either side.
        success_rate: how often it goes ahead if the ice is slippery.
        reward_schedule: the rewards for reaching a goal, a hole, and anything else.
    """

    action_space = spaces.Discrete(4)
    max_episode_steps = 100
    state = {"cell": int}

    def __init__(
        self,
        desc: Sequence[str] | None = None,
        map_name: str = "4x4",
        is_slippery: bool = True,
        success_rate: float = 1.0 / 3.0,
        reward_schedule: tuple[float, float, float] = (1, 0, 0),
    ):
        if desc is None and map_name not in MAPS:
            raise ValueError(f"map_name: expected {' or '.join(map(repr, MAPS))}, found {map_name!r}; or give a desc")
        letters = board_of(MAPS[map_name] if desc is None else desc)
        rows, columns = letters.shape
        goal, hole, frozen = map(float, reward_schedule)
        self.observation_space = spaces.Discrete(rows * columns)
        self.params = {
            "board": np.select([letters == b"H", letters == b"G"], [HOLE, GOAL], FROZEN).astype(np.int8).ravel(),
            "rows": rows,
            "columns": columns,
            "starts": np.flatnonzero(letters.ravel() == b"S"),
            "rewards": np.array([frozen, hole, goal]),
            # The chances of slipping to the left, and of not slipping to the right.
            "left": (1.0 - success_rate) / 2.0 if is_slippery else 0.0,
            "not_right": (1.0 - success_rate) / 2.0 + success_rate if is_slippery else 1.0,
        }

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.cell = state.starts[compiled.integer(rng, 0, len(state.starts))]

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        if state.board[state.cell] != FROZEN:  # already at an end
            return 0.0, True
        direction = action  # 0 left, 1 down, 2 right, 3 up
        if state.not_right < 1.0:
            drawn = compiled.uniform(rng)
            if drawn < state.left:
                direction = (action - 1) % 4
            elif drawn >= state.not_right:
                direction = (action + 1) % 4
        row, column = state.cell // state.columns, state.cell % state.columns
        if direction == 0:
            column = max(column - 1, 0)
        elif direction == 1:
            row = min(row + 1, state.rows - 1)
        elif direction == 2:
            column = min(column + 1, state.columns - 1)
        else:
            row = max(row - 1, 0)
        state.cell = row * state.columns + column
        tile = state.board[state.cell]
        return state.rewards[tile], tile != FROZEN

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0] = state.cell


class FrozenLake8x8(FrozenLake):
    """The same on the larger map, with more time, unless told otherwise."""

    max_episode_steps = 200

    def __init__(self, desc: Sequence[str] | None = None, map_name: str = "8x8", **kwargs: Any):
        super().__init__(desc, map_name, **kwargs)

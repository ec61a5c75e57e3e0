"""CliffWalking-v1: walk along a cliff to the goal; a step over the edge costs 100, and leads back to the start."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from shoal import compiled

ROWS, COLUMNS = 4, 12
START = (ROWS - 1) * COLUMNS
GOAL = ROWS * COLUMNS - 1


class CliffWalking(compiled.Env):
    """Gymnasium's CliffWalking; if it is slippery, a step goes to either side as often as ahead."""

    observation_space = spaces.Discrete(ROWS * COLUMNS)
    action_space = spaces.Discrete(4)
    max_episode_steps = None
    state = {"row": int, "column": int}
    params = {"is_slippery": False}

    def __init__(self, is_slippery: bool = False):
        self.params = {"is_slippery": bool(is_slippery)}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.row = ROWS - 1
        state.column = 0

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        direction = action  # 0 up, 1 right, 2 down, 3 left
        if state.is_slippery:
            direction = (action + compiled.integer(rng, -1, 2)) % 4
        row, column = state.row, state.column
        if direction == 0:
            row = max(row - 1, 0)
        elif direction == 1:
            column = min(column + 1, COLUMNS - 1)
        elif direction == 2:
            row = min(row + 1, ROWS - 1)
        else:
            column = max(column - 1, 0)
        fell = row == ROWS - 1 and 0 < column < COLUMNS - 1
        if fell:
            column = 0
        state.row, state.column = row, column
        return -100.0 if fell else -1.0, row * COLUMNS + column == GOAL

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0] = state.row * COLUMNS + state.column


class CliffWalkingSlippery(CliffWalking):
    """The same, slippery unless told otherwise."""

    params = {"is_slippery": True}

    def __init__(self, is_slippery: bool = True):
        super().__init__(is_slippery)

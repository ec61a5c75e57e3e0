"""shoal/Orchard-v0: several agents pick apples, which grow only where apples are left."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from shoal import compiled
from shoal.compiled.library.helpers import fill

SIDE = 16  # cells
CELL = 4  # pixels
LOOKS = 8  # cells in which an apple may grow in a step
APPLE_SHADE, OTHER_SHADE, OWN_SHADE = 90, 170, 255


@compiled.function
def apples_around(apples: Any, row: int, column: int) -> Any:
    """Count the apples in the eight cells around a cell."""
    found = 0
    for i in range(max(row - 1, 0), min(row + 2, SIDE)):
        for j in range(max(column - 1, 0), min(column + 2, SIDE)):
            found += apples[i, j]
    return found - apples[row, column]


@compiled.function
def is_taken(state: Any, row: int, column: int) -> Any:
    """Say whether an agent stands in a cell."""
    for k in range(len(state.row)):  # noqa: SIM110, a compiler has no any()
        if state.row[k] == row and state.column[k] == column:
            return True
    return False


class Orchard(compiled.Env):
    """Each apple gives a point. The episode ends for all when none is left, because none can grow any more.

    An agent cannot step into a cell with another one, and each step another agent moves first. The more apples are
    around an empty cell, the sooner one grows in it: agents that take all apples soon have none. Observations are the
    orchard in shades of grey; the agent's own place is the brightest. Actions: stay, up, right, down, left.

    Args:
        num_agents: how many agents pick.
    """

    num_agents = 4
    observation_space = spaces.Box(0, 255, (SIDE * CELL, SIDE * CELL), np.uint8)
    action_space = spaces.Discrete(5)
    max_episode_steps = 500

    def __init__(self, num_agents: int = 4):
        if not 2 <= num_agents <= SIDE:
            raise ValueError(f"num_agents: expected 2 to {SIDE}, found {num_agents!r}")
        self.num_agents = num_agents
        self.state = {
            "apples": (np.uint8, (SIDE, SIDE)), "left": int, "first": int,
            "row": (int, (num_agents,)), "column": (int, (num_agents,)),
        }  # fmt: skip

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        agents = len(state.row)
        for k in range(agents):
            state.row[k] = compiled.integer(rng, 0, SIDE)
            state.column[k] = (k * SIDE) // agents  # a column for each agent, so that no two share a cell
        state.left = 0
        for i in range(SIDE):
            for j in range(SIDE):
                # Trees form a grid, with room to walk between them.
                grows = i % 4 != 0 and j % 4 != 0 and compiled.uniform(rng) < 0.5 and not is_taken(state, i, j)
                state.apples[i, j] = 1 if grows else 0
                state.left += 1 if grows else 0
        state.first = 0

    @staticmethod
    def step(state: Any, action: Any, reward: Any, rng: Any) -> Any:
        agents = len(state.row)
        for turn in range(agents):
            k = (state.first + turn) % agents
            row, column = state.row[k], state.column[k]
            if action[k] == 1:
                row = max(row - 1, 0)
            elif action[k] == 2:
                column = min(column + 1, SIDE - 1)
            elif action[k] == 3:
                row = min(row + 1, SIDE - 1)
            elif action[k] == 4:
                column = max(column - 1, 0)
            if not is_taken(state, row, column):
                state.row[k], state.column[k] = row, column
            row, column = state.row[k], state.column[k]
            reward[k] = state.apples[row, column]
            state.left -= state.apples[row, column]
            state.apples[row, column] = 0
        state.first = (state.first + 1) % agents

        for _ in range(LOOKS):
            row, column = compiled.integer(rng, 0, SIDE), compiled.integer(rng, 0, SIDE)
            chance = apples_around(state.apples, row, column) / 16
            empty = state.apples[row, column] == 0 and not is_taken(state, row, column)
            if empty and compiled.uniform(rng) < chance:
                state.apples[row, column] = 1
                state.left += 1
        return state.left == 0

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        agents = len(state.row)
        for k in range(agents):
            for i in range(SIDE):
                for j in range(SIDE):
                    if state.apples[i, j] == 1:
                        fill(obs[k], i * CELL, j * CELL, CELL, CELL, APPLE_SHADE)
            for other in range(agents):
                shade = OWN_SHADE if other == k else OTHER_SHADE
                fill(obs[k], state.row[other] * CELL, state.column[other] * CELL, CELL, CELL, shade)

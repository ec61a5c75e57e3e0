"""Taxi-v3: fetch a passenger at one of four places in a small town, and bring them to another."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from shoal import compiled

SIZE = 5
IN_TAXI = 4
PLACE_ROW = np.array([0, 0, 4, 4])
PLACE_COLUMN = np.array([0, 4, 0, 3])
# Whether there is a wall to the east of a cell; the town's edge is one.
WALL_EAST = np.array(
    [
        [0, 1, 0, 0, 1],
        [0, 1, 0, 0, 1],
        [0, 0, 0, 0, 1],
        [1, 0, 1, 0, 1],
        [1, 0, 1, 0, 1],
    ]
)
SOUTH, NORTH, EAST, WEST, PICK_UP, DROP_OFF = range(6)
LEFT_OF = np.array([EAST, WEST, NORTH, SOUTH])
RIGHT_OF = np.array([WEST, EAST, SOUTH, NORTH])


@compiled.function
def may_drive(row: int, column: int, direction: int) -> Any:
    """Say whether neither a wall nor the edge is in the way."""
    if direction == SOUTH:
        return row < SIZE - 1
    if direction == NORTH:
        return row > 0
    if direction == EAST:
        return WALL_EAST[row, column] == 0
    return column > 0 and WALL_EAST[row, column - 1] == 0


@compiled.function
def place_at(row: int, column: int) -> int:
    """Return the number of the place in a cell, or -1."""
    for place in range(4):
        if PLACE_ROW[place] == row and PLACE_COLUMN[place] == column:
            return place
    return -1


class Taxi(compiled.Env):
    """Gymnasium's Taxi-v4, which is its Taxi-v3 with two options of chance.

    Args:
        is_rainy: whether the taxi may skid to either side.
        fickle_passenger: whether passengers may change their mind, once, on the first move after they got in.
        rainy_probability: how often the taxi goes ahead in the rain.
        fickle_probability: what part of the passengers changes its mind.
    """

    observation_space = spaces.Discrete(500)
    action_space = spaces.Discrete(6)
    max_episode_steps = 200
    state = {"row": int, "column": int, "passenger": int, "destination": int, "fickle": bool}
    params = {"is_rainy": False, "rainy_probability": 0.8, "fickle_probability": 0.0}

    def __init__(
        self,
        is_rainy: bool = False,
        fickle_passenger: bool = False,
        rainy_probability: float = 0.8,
        fickle_probability: float = 0.3,
    ):
        self.params = {
            "is_rainy": bool(is_rainy),
            "rainy_probability": float(rainy_probability),
            "fickle_probability": float(fickle_probability) if fickle_passenger else 0.0,
        }

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.row = compiled.integer(rng, 0, SIZE)
        state.column = compiled.integer(rng, 0, SIZE)
        state.passenger = compiled.integer(rng, 0, 4)
        state.destination = (state.passenger + compiled.integer(rng, 1, 4)) % 4
        state.fickle = compiled.uniform(rng) < state.fickle_probability

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        place = place_at(state.row, state.column)
        if action == PICK_UP:
            if place == state.passenger:
                state.passenger = IN_TAXI
                return -1.0, False
            return -10.0, False
        if action == DROP_OFF:
            if state.passenger != IN_TAXI or place < 0:
                return -10.0, False
            state.passenger = place
            arrived = place == state.destination
            return 20.0 if arrived else -1.0, arrived

        direction = action
        if not may_drive(state.row, state.column, direction):
            return -1.0, False
        if state.is_rainy:
            drawn = compiled.uniform(rng)
            if drawn >= state.rainy_probability + (1.0 - state.rainy_probability) / 2.0:
                direction = RIGHT_OF[action]
            elif drawn >= state.rainy_probability:
                direction = LEFT_OF[action]
            if not may_drive(state.row, state.column, direction):
                return -1.0, False
        if direction == SOUTH:
            state.row += 1
        elif direction == NORTH:
            state.row -= 1
        elif direction == EAST:
            state.column += 1
        else:
            state.column -= 1
        if state.fickle and state.passenger == IN_TAXI:
            state.fickle = False
            state.destination = (state.destination + compiled.integer(rng, 1, 4)) % 4
        return -1.0, False

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0] = ((state.row * SIZE + state.column) * 5 + state.passenger) * 4 + state.destination

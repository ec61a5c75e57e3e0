"""Shoal's own games, with observations of pixels: Bricks, and Orchard for several agents."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from shoal import compiled
from shoal.compiled.library.toy_text import moved


@compiled.function
def fill(image: Any, top: int, first: int, height: int, width: int, shade: int) -> None:
    """Paint a rectangle of an image [rows, columns]."""
    # Loops rather than slices: compiled, they are several times as fast for rectangles of a few pixels.
    for i in range(top, top + height):
        for j in range(first, first + width):
            image[i, j] = shade


# ---- Bricks: keep a ball in play with a paddle, and break a wall of bricks with it -----------------------------

SIZE = 64
ROWS, COLUMNS = 6, 8
BRICK_HEIGHT, BRICK_WIDTH = 3, SIZE // COLUMNS
WALL_TOP = 8
WALL_BOTTOM = WALL_TOP + ROWS * BRICK_HEIGHT
BALL = 2
PADDLE_ROW, PADDLE_HEIGHT, PADDLE_WIDTH = 60, 2, 10
PADDLE_SPEED = 2
MAX_SLANT = 1.5  # columns of a step, if the ball hits an end of the paddle
LIVES = 3
BRICK_SHADE, BRICK_SHADE_STEP, PADDLE_SHADE, BALL_SHADE = 80, 16, 200, 255


@compiled.function
def serve(state: Any, rng: Any) -> None:
    """Let a ball fall from below the wall."""
    state.ball_row = WALL_BOTTOM + 4.0
    state.ball_column = compiled.uniform(rng, 8.0, SIZE - 8.0 - BALL)
    state.down = 1.0
    state.right = compiled.uniform(rng, -1.0, 1.0)


@compiled.function
def hits_brick(state: Any, row: float, column: float) -> Any:
    """Break the brick at a point, and say whether there was one."""
    if row < WALL_TOP or row >= WALL_BOTTOM:
        return False
    i, j = int(row - WALL_TOP) // BRICK_HEIGHT, int(column) // BRICK_WIDTH
    if state.bricks[i, j] == 0:
        return False
    state.bricks[i, j] = 0
    state.left -= 1
    return True


class Bricks(compiled.Env):
    """Each brick gives a point. The episode ends when three balls are lost or all bricks are gone.

    The farther from the paddle's middle the ball hits it, the more slanted it flies on. It gets faster with each
    quarter of the wall that is gone. Observations are the screen in shades of grey. Actions: stay, left, right.
    """

    observation_space = spaces.Box(0, 255, (SIZE, SIZE), np.uint8)
    action_space = spaces.Discrete(3)
    max_episode_steps = 3000
    state = {
        "bricks": (np.uint8, (ROWS, COLUMNS)), "left": int, "lives": int, "paddle": int,
        "ball_row": float, "ball_column": float, "down": float, "right": float,
    }  # fmt: skip

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        for i in range(ROWS):
            for j in range(COLUMNS):
                state.bricks[i, j] = 1
        state.left = ROWS * COLUMNS
        state.lives = LIVES
        state.paddle = (SIZE - PADDLE_WIDTH) // 2
        serve(state, rng)

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        if action == 1:
            state.paddle = max(state.paddle - PADDLE_SPEED, 0)
        elif action == 2:
            state.paddle = min(state.paddle + PADDLE_SPEED, SIZE - PADDLE_WIDTH)
        speed = 1.0 + 0.25 * ((ROWS * COLUMNS - state.left) * 4 // (ROWS * COLUMNS))
        reward = 0.0

        # The ball moves in one direction after the other, so that it is known which side of a brick was hit.
        column = state.ball_column + state.right
        if column < 0.0 or column > SIZE - BALL:
            state.right = -state.right
            column = min(max(column, 0.0), 1.0 * (SIZE - BALL))
        if hits_brick(state, state.ball_row + 0.5 * BALL, column + 0.5 * BALL):
            reward = reward + 1.0
            state.right = -state.right
            column = state.ball_column
        state.ball_column = column

        row = state.ball_row + state.down * speed
        if row < 0.0:
            state.down = 1.0
            row = 0.0
        if hits_brick(state, row + 0.5 * BALL, column + 0.5 * BALL):
            reward = reward + 1.0
            state.down = -state.down
            row = state.ball_row
        if state.down > 0.0 and state.ball_row <= PADDLE_ROW - BALL < row:
            offset = (column + 0.5 * BALL) - (state.paddle + 0.5 * PADDLE_WIDTH)
            reach = 0.5 * (PADDLE_WIDTH + BALL)
            if -reach <= offset <= reach:
                state.down = -1.0
                state.right = MAX_SLANT * offset / reach
                row = 1.0 * (PADDLE_ROW - BALL)
        state.ball_row = row
        if row > SIZE - BALL:
            state.lives -= 1
            serve(state, rng)
        return reward, state.lives == 0 or state.left == 0

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        for i in range(ROWS):
            for j in range(COLUMNS):
                if state.bricks[i, j] == 1:
                    top, first, shade = WALL_TOP + i * BRICK_HEIGHT, j * BRICK_WIDTH, BRICK_SHADE + i * BRICK_SHADE_STEP
                    # A dark line below each brick and to its right keeps it apart from the next.
                    fill(obs, top, first, BRICK_HEIGHT - 1, BRICK_WIDTH - 1, shade)
        fill(obs, PADDLE_ROW, state.paddle, PADDLE_HEIGHT, PADDLE_WIDTH, PADDLE_SHADE)
        fill(obs, int(state.ball_row), int(state.ball_column), BALL, BALL, BALL_SHADE)


# ---- Orchard: several agents pick apples, which grow only where apples are left --------------------------------

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
            if action[k] > 0:
                row, column = moved(row, column, action[k] - 1, SIDE, SIDE)
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

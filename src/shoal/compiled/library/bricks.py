"""shoal/Bricks-v0: keep a ball in play with a paddle, and break a wall of bricks with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from shoal import compiled
from shoal.compiled.library.helpers import fill

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

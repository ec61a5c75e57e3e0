"""The two games: their rules hold, their screens show their state, and playing well pays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiled.library.kit import chi_square_is_ordinary, ours
from shoal.compiled.library import games

STAY, LEFT, RIGHT = 0, 1, 2


def follow(env: Any, ahead: float = 0.0) -> int:
    """Keep the paddle under the ball, or a little beside it."""
    away = env.state.ball_column + games.BALL / 2 + ahead - (env.state.paddle + games.PADDLE_WIDTH / 2)
    return RIGHT if away > 1 else LEFT if away < -1 else STAY


def shown_bricks(screen: Any) -> Any:
    """Return where the screen has bricks: [rows, columns]."""
    top = games.WALL_TOP
    corners = screen[top : games.WALL_BOTTOM : games.BRICK_HEIGHT, :: games.BRICK_WIDTH]
    return (corners >= games.BRICK_SHADE) & (corners < games.PADDLE_SHADE)


def test_a_game_of_bricks() -> None:
    env = ours("shoal/Bricks-v0")
    screen, _ = env.reset(seed=0)
    assert shown_bricks(screen).all()
    total, steps, over = 0.0, 0, False
    while not over:
        before = int(env.state.left)
        screen, reward, terminated, truncated, _ = env.step(follow(env, 3 * np.sin(steps / 7)))
        assert env.observation_space.contains(screen)
        assert reward == before - env.state.left == before - env.state.bricks.sum()
        assert screen[int(env.state.ball_row), int(env.state.ball_column)] == games.BALL_SHADE
        assert (screen[games.PADDLE_ROW] == games.PADDLE_SHADE).sum() == games.PADDLE_WIDTH
        if env.state.ball_row > games.WALL_BOTTOM:
            assert (shown_bricks(screen) == (env.state.bricks == 1)).all()
        total, steps, over = total + reward, steps + 1, terminated or truncated
    assert total >= 40


def test_who_does_not_move_loses_three_balls() -> None:
    env = ours("shoal/Bricks-v0")
    env.reset(seed=2)
    lives, over, steps = [3], False, 0
    while not over:
        env.state.paddle = 0 if env.state.ball_column > games.SIZE / 2 else games.SIZE - games.PADDLE_WIDTH
        _, reward, over, truncated, _ = env.step(STAY)
        assert reward == 0
        assert not truncated
        if env.state.lives != lives[-1]:
            lives.append(int(env.state.lives))
        steps += 1
    assert lives == [3, 2, 1, 0]


def test_the_last_brick_ends_the_game() -> None:
    env = ours("shoal/Bricks-v0")
    env.reset(seed=0)
    env.state.bricks[:] = 0
    env.state.bricks[5, 3] = 1
    env.state.left = 1
    env.state.ball_row, env.state.ball_column = games.WALL_BOTTOM, 3.5 * games.BRICK_WIDTH
    env.state.down, env.state.right = -1.0, 0.0
    reward, terminated = env.step(STAY)[1:3]
    assert (reward, terminated) == (1.0, True)


@pytest.mark.parametrize(("place", "sign"), [(0.0, -1), (games.PADDLE_WIDTH - games.BALL, 1)])
def test_the_ends_of_the_paddle_slant_the_ball(place: float, sign: int) -> None:
    env = ours("shoal/Bricks-v0")
    env.reset(seed=0)
    env.state.ball_row, env.state.ball_column = games.PADDLE_ROW - games.BALL, env.state.paddle + place
    env.state.down, env.state.right = 1.0, 0.0
    env.step(STAY)
    assert env.state.down == -1.0
    assert np.sign(env.state.right) == sign
    assert abs(env.state.right) <= games.MAX_SLANT


def test_the_paddle_stays_on_the_screen() -> None:
    env = ours("shoal/Bricks-v0")
    env.reset(seed=0)
    for action, end in ((LEFT, 0), (RIGHT, games.SIZE - games.PADDLE_WIDTH)):
        for _ in range(40):
            env.state.lives = 3
            env.step(action)
        assert env.state.paddle == end


# ---- the orchard


def toward_nearest(env: Any, k: int) -> int:
    """Return the action that brings an agent nearer to an apple."""
    here = np.array([env.state.row[k], env.state.column[k]])
    apples = np.argwhere(env.state.apples)
    down, right = apples[np.abs(apples - here).sum(1).argmin()] - here
    return 1 if down < 0 else 3 if down > 0 else 2 if right > 0 else 4


def assert_screens_show(env: Any, screens: Any) -> None:
    cells = screens[:, :: games.CELL, :: games.CELL]
    assert (np.repeat(np.repeat(cells, games.CELL, 1), games.CELL, 2) == screens).all()
    expected = np.where(env.state.apples == 1, games.APPLE_SHADE, 0)
    expected[env.state.row, env.state.column] = games.OTHER_SHADE
    for k, cell in enumerate(cells):
        own = expected.copy()
        own[env.state.row[k], env.state.column[k]] = games.OWN_SHADE
        assert (cell == own).all()


@pytest.mark.parametrize("agents", [2, 4, 7, 16])
def test_a_season_in_the_orchard(agents: int) -> None:
    env = ours("shoal/Orchard-v0", num_agents=agents)
    rng = np.random.default_rng(0)
    screens, _ = env.reset(seed=1)
    assert_screens_show(env, screens)
    for _ in range(60):
        before = env.state.apples.copy()
        screens, reward, terminated, _, _ = env.step(rng.integers(0, 5, agents))
        assert env.observation_space.contains(screens)
        assert_screens_show(env, screens)
        places = set(zip(env.state.row.tolist(), env.state.column.tolist(), strict=True))
        assert len(places) == agents
        assert env.state.left == env.state.apples.sum()
        assert (reward == [before[place] for place in zip(env.state.row, env.state.column, strict=True)]).all()
        assert not terminated


def test_who_takes_all_has_none() -> None:
    env = ours("shoal/Orchard-v0")
    env.reset(seed=0)
    terminated, steps = False, 0
    while not terminated:
        _, _, terminated, truncated, _ = env.step(np.array([toward_nearest(env, k) for k in range(4)]))
        assert not truncated
        steps += 1
    assert steps < 200
    assert env.state.left == 0


def test_apples_grow_next_to_apples_only() -> None:
    env = ours("shoal/Orchard-v0")
    env.reset(seed=0)
    env.state.apples[:] = 0
    env.state.apples[7:10, 7:10] = 1
    env.state.left = 9
    env.state.row[:], env.state.column[:] = 0, np.arange(4)
    for _ in range(250):
        before = env.state.apples.copy()
        env.step(np.zeros(4, int))
        for row, column in np.argwhere(env.state.apples > before):
            around = env.state.apples[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2]
            assert around.sum() >= 2  # itself, and another
    assert env.state.left > 18


def test_apples_do_not_grow_where_somebody_stands() -> None:
    env = ours("shoal/Orchard-v0")
    env.reset(seed=0)
    for _ in range(50):
        env.state.apples[:] = 1
        env.state.row[:], env.state.column[:] = 0, np.arange(4)
        env.step(np.zeros(4, int))
        assert not env.state.apples[0, :4].any()


def test_nobody_is_always_first() -> None:
    """Two agents that want the same cell get it in turns."""
    env = ours("shoal/Orchard-v0", num_agents=2)
    env.reset(seed=0)
    taken = []
    for _ in range(10):
        env.state.apples[:] = 0
        env.state.apples[5, 5], env.state.apples[15, 15], env.state.left = 1, 1, 2
        env.state.row[:], env.state.column[:] = 5, [4, 6]
        taken.append(env.step(np.array([2, 4]))[1].tolist())
    assert taken == [[1.0, 0.0], [0.0, 1.0]] * 5


def test_about_half_of_the_places_for_apples_have_one_at_first() -> None:
    env = ours("shoal/Orchard-v0")
    env.reset(seed=3)
    counts = np.zeros(2)
    for _ in range(20):
        env.reset()
        free = np.delete(np.delete(env.state.apples, np.s_[::4], 0), np.s_[::4], 1)
        counts += [free.sum(), free.size - free.sum()]
        assert not env.state.apples[::4].any()
        assert not env.state.apples[:, ::4].any()
    assert chi_square_is_ordinary(counts, [0.5, 0.5])


@pytest.mark.parametrize("agents", [0, 17])
def test_so_many_agents_are_refused(agents: int) -> None:
    with pytest.raises(ValueError, match=f"num_agents: expected 2 to 16, found {agents}"):
        ours("shoal/Orchard-v0", num_agents=agents)

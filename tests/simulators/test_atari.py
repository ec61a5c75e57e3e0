"""Batches of Atari games: the same observations, rewards and infos as Gymnasium's wrappers give, and what differs."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal

ale_py = pytest.importorskip("ale_py", reason="the extra `atari` is not installed")
pytest.importorskip("ale_py.vector_env")
pytest.importorskip("cv2", reason="Gymnasium's wrapper needs OpenCV")
ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
gymnasium.register_envs(ale_py)


def single(game: str, stack: int = 4, padding: str = "reset", make: Any = None, **preprocessing: Any) -> Any:
    made = {"frameskip": 1, "repeat_action_probability": 0.0, **(make or {})}
    env = gymnasium.make(f"ALE/{game}-v5", **made)
    env = gymnasium.wrappers.AtariPreprocessing(env, **{"noop_max": 0, **preprocessing})
    return gymnasium.wrappers.FrameStackObservation(env, stack, padding_type=padding)


def compare(games: Any, envs: list[Any], steps: int = 60) -> int:
    """Compare whole episodes of games with those of single envs; return how many have ended."""
    obs, infos = games.reset(seed=1)
    for row, env in enumerate(envs):
        first, info = env.reset(seed=1 + row)
        np.testing.assert_array_equal(obs[row], first)
        assert (infos["lives"][row], infos["frame_number"][row]) == (info["lives"], info["frame_number"])
    rng, over, ended = np.random.default_rng(0), [False] * len(envs), 0
    for step in range(steps):
        actions = rng.integers(games.single_action_space.n, size=len(envs))
        obs, rewards, terminated, truncated, infos = games.step(actions)
        for row, env in enumerate(envs):
            if over[row]:
                (expected, info), rest = env.reset(), (0.0, False, False)
            else:
                expected, *rest, info = env.step(int(actions[row]))
            np.testing.assert_array_equal(obs[row], expected, err_msg=f"step {step} of game {row}")
            assert (rewards[row], terminated[row], truncated[row]) == tuple(rest), f"step {step} of game {row}"
            assert infos["lives"][row] == info["lives"]
            assert infos["episode_frame_number"][row] == info["episode_frame_number"]
            over[row] = rest[1] or rest[2]
            ended += over[row]
    return ended


@pytest.mark.parametrize("game", ["Pong", "Breakout"])
def test_observations_are_those_of_the_wrappers(game: str) -> None:
    games = shoal.atari.make(game, 2, noop_max=0)
    assert games.pool.plan.backend == "batched"
    ended = compare(games, [single(game) for _ in range(2)], 200 if game == "Breakout" else 40)
    assert ended > 0 or game == "Pong"
    games.close()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"padding": "zero"}, {"padding": "zero"}),
        ({"stack": 2, "frame_skip": 3}, {"stack": 2, "frame_skip": 3}),
        ({"stack": 1}, {"stack": 1}),
        ({"screen_size": (50, 60)}, {"screen_size": (60, 50)}),  # there it is width and height
        ({"grayscale": False}, {"grayscale_obs": False}),
        ({"episodic_life": True}, {"terminal_on_life_loss": True}),
        ({"full_action_space": True}, {"make": {"full_action_space": True}}),
        ({"max_frames": 60}, {"make": {"max_num_frames_per_episode": 60}}),
    ],
    ids=lambda found: next(iter(found)),
)
def test_options_are_those_of_the_wrappers(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    games = shoal.atari.make("breakout", 1, noop_max=0, **ours)
    compare(games, [single("Breakout", **theirs)], 50)
    games.close()


def test_rewards_are_clipped_and_statistics_are_whole() -> None:
    games = shoal.atari.make("ms_pacman", 2, noop_max=0, clip_rewards=True)
    env = gymnasium.wrappers.RecordEpisodeStatistics(single("MsPacman"))
    env.reset(seed=1)
    games.reset(seed=1)
    rng, info = np.random.default_rng(0), {}
    while "episode" not in info:
        actions = rng.integers(9, size=2)
        _, rewards, terminated, _, infos = games.step(actions)
        _, reward, over, _, info = env.step(int(actions[0]))
        assert rewards[0] == np.clip(reward, -1, 1)
        assert terminated[0] == over
        if over:
            break
    assert infos["_episode"][0]
    assert infos["episode"]["r"][0] == info["episode"]["r"]
    assert infos["episode"]["l"][0] == info["episode"]["l"]
    games.close()


def test_episodes_that_begin_in_the_same_step() -> None:
    games = shoal.atari.make("breakout", 2, noop_max=0, max_frames=80, autoreset="same_step")
    env = single("Breakout", make={"max_num_frames_per_episode": 80})
    games.reset(seed=1)
    env.reset(seed=1)
    for step in range(45):
        obs, _, _, truncated, infos = games.step(np.zeros(2, np.int64))
        expected, _, _, over, _ = env.step(0)
        assert truncated[0] == over
        if over:
            np.testing.assert_array_equal(infos["final_obs"][0], expected)
            assert infos["final_info"]["episode"]["l"][0] == step % 20 + 1
            expected, _ = env.reset()
        np.testing.assert_array_equal(obs[0], expected)
    games.close()


def test_seeds_give_the_same_games_again() -> None:
    """The number of frames without an action is drawn by ALE, and not as Gymnasium's wrapper draws it."""
    found = []
    for seed in (3, 3, 4):
        games = shoal.atari.make("pong", 2, seed=0)
        _, infos = games.reset(seed=seed)
        found.append(infos["frame_number"].tolist())
        games.close()
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_ids_by_name_and_not_under_auto() -> None:
    with shoal.Pool("ALE/Pong-v5", 2, backend="batched", env_kwargs={"stack": 3}) as pool:
        assert pool.single_observation_space.shape == (3, 84, 84)
        pool.reset(seed=1)
    with shoal.Pool("ALE/Pong-v5", 2) as pool:
        assert pool.plan.backend != "batched"
        assert pool.single_observation_space.shape == (210, 160, 3)


def test_groups_make_partial_batches() -> None:
    games = shoal.atari.make("pong", 4, groups=2, api="pool", noop_max=0, batch_size=2)
    whole = shoal.atari.make("pong", 4, noop_max=0)
    games.reset(seed=1)
    whole.reset(seed=1)
    expected, *_ = whole.step(np.full(4, 3))
    games.send(np.full(4, 3), np.arange(4))
    seen: list[int] = []
    for _ in range(2):
        batch = games.recv()
        np.testing.assert_array_equal(batch.obs, expected[batch.env_id])
        seen += batch.env_id.tolist()
    assert sorted(seen) == [0, 1, 2, 3]
    games.close()
    whole.close()


@pytest.mark.parametrize(
    ("game", "options", "message"),
    [("no_such_game", {}, "there is no Atari game 'no_such_game'"), ("pong", {"padding": "x"}, "padding"),
     ("pong", {"groups": 3}, "cannot be split"), ("pong", {"batch_size": 1}, "batch_size"),
     ("pong", {"autoreset": "disabled"}, "disabled")],
)  # fmt: skip
def test_mistakes_are_named(game: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, shoal.ShoalError), match=message):
        shoal.atari.make(game, 4, **options)


def test_snapshots_say_why_not() -> None:
    games = shoal.atari.make("pong", 2)
    games.reset(seed=1)
    with pytest.raises(shoal.ShoalError, match="cannot be saved"):
        games.pool.snapshot()
    games.close()

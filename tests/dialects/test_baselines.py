"""The words of OpenAI Baselines: vector envs, wrappers, make_vec_env."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from envs import CountEnv, SpaceEnv
from envs.test_old_gym import OldEnv
from shoal.dialects import baselines

VEC_ENVS = [
    (baselines.DummyVecEnv, {}),
    (baselines.SubprocVecEnv, {"context": "forkserver"}),
    (baselines.ShmemVecEnv, {"context": "fork"}),
]


def fns(count: int, **options: Any) -> list[Any]:
    return [lambda i=i: CountEnv(length=2 + i, **options) for i in range(count)]


@pytest.mark.parametrize(("cls", "options"), VEC_ENVS)
def test_four_values_and_resets_of_its_own(cls: Any, options: Any) -> None:
    """Each env resets when it is done, with nobody waiting, and its last observation is not lost."""
    envs = cls(fns(3), **options)
    assert envs.num_envs == 3
    assert envs.observation_space == spaces.Box(-1, 2**40, (3,), np.int64)
    envs.seed(7)
    obs = envs.reset()
    assert obs.tolist() == [[7, 0, 0], [8, 0, 0], [9, 0, 0]]
    obs, rewards, dones, infos = envs.step([1, 0, 0])
    assert rewards.tolist() == [101, 1, 1]
    obs, rewards, dones, infos = envs.step([0, 0, 0])
    assert dones.tolist() == [True, False, False]
    assert obs.tolist() == [[7, 1, 0], [8, 0, 2], [9, 0, 2]]
    assert infos[0]["terminal_observation"].tolist() == [7, 0, 2]
    assert infos[0]["TimeLimit.truncated"] is False
    assert "terminal_observation" not in infos[1]
    envs.close()
    envs.close()


@pytest.mark.parametrize(("cls", "options"), VEC_ENVS)
def test_everything_behind_the_pipe_can_be_reached(cls: Any, options: Any) -> None:
    envs = cls(fns(3), **options)
    assert envs.get_attr("length") == [2, 3, 4]
    envs.set_attr("value", [1, 2], indices=[0, -1])
    assert envs.get_attr("value") == [[1, 2], "untouched", [1, 2]]
    assert envs.env_method("add", 1, b=2, indices=1) == [3]
    with pytest.raises(KeyError, match="no such fish"):
        envs.env_method("complain")
    envs.close()


def test_steps_in_two_halves() -> None:
    envs = baselines.SubprocVecEnv(fns(2), context="forkserver")
    envs.reset()
    with pytest.raises(baselines.NotSteppingError):
        envs.step_wait()
    envs.step_async([0, 0])
    with pytest.raises(baselines.AlreadySteppingError):
        envs.step_async([0, 0])
    assert envs.step_wait()[1].tolist() == [1, 1]
    envs.step_async([0, 0])
    assert envs.reset().tolist() == [[-1, 2, 0], [-1, 1, 0]]  # the step was cancelled
    with pytest.raises(baselines.NotSteppingError):
        envs.step_wait()
    envs.step_async([0, 0])
    envs.close()


@pytest.mark.parametrize(("in_series", "workers"), [(2, 3), (3, 2), (6, 1)])
def test_envs_in_series(in_series: int, workers: int) -> None:
    envs = baselines.SubprocVecEnv(fns(6), context="forkserver", in_series=in_series)
    assert len(set(envs.env_method("pid"))) == workers
    envs.close()


@pytest.mark.parametrize("in_series", [4, 0, True, 1.5])
def test_series_that_do_not_come_out_even(in_series: Any) -> None:
    with pytest.raises(ValueError, match="divides the 6 envs"):
        baselines.SubprocVecEnv(fns(6), in_series=in_series)


def test_spaces_that_were_promised() -> None:
    right = (CountEnv().observation_space, CountEnv().action_space)
    baselines.SubprocVecEnv(fns(2), right, context="forkserver").close()
    with pytest.raises(ValueError, match="spaces: the envs have"):
        baselines.ShmemVecEnv(fns(2), (right[0], spaces.Discrete(9)), context="forkserver")


def test_old_envs_are_taken_as_they_are() -> None:
    envs = baselines.SubprocVecEnv([OldEnv] * 3, context="forkserver")
    envs.seed(3)
    assert envs.reset()[:, 0].tolist() == [3, 4, 5]
    for _ in range(3):
        _, rewards, dones, infos = envs.step([2, 1, 0])
    assert rewards.tolist() == [2, 1, 0]
    assert dones.all()
    assert infos[0]["TimeLimit.truncated"] is True
    assert infos[1]["action"] == 1
    envs.close()


def test_tiles() -> None:
    envs = baselines.DummyVecEnv(fns(3, render_mode="rgb_array"))
    envs.reset()
    envs.step([0, 0, 0])
    image = envs.render(mode="rgb_array")
    assert image.shape == (4, 6, 3)
    assert image[:2].min() == 1  # two envs side by side, then one, then black
    assert image[2:, :3].min() == 1
    assert image[2:, 3:].max() == 0
    assert [frame.shape for frame in envs.get_images()] == [(2, 3, 3)] * 3
    envs.close()


# ---- wrappers ------------------------------------------------------------------------------------------------


def test_frame_stack() -> None:
    envs = baselines.VecFrameStack(baselines.DummyVecEnv(fns(2)), nstack=2)
    assert envs.observation_space.shape == (6,)
    envs.seed(0)
    assert envs.reset().tolist() == [[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]]
    envs.step([0, 0])
    obs, _, dones, infos = envs.step([0, 0])
    assert dones.tolist() == [True, False]
    assert obs.tolist() == [[0, 0, 0, 0, 1, 0], [1, 0, 1, 1, 0, 2]]
    assert infos[0]["terminal_observation"].tolist() == [0, 0, 1, 0, 0, 2]
    envs.close()


def test_normalize() -> None:
    """Against mean and variance of all that was seen, taken in one go."""
    envs = baselines.VecNormalize(baselines.DummyVecEnv(fns(3)), clipob=1.5, cliprew=2.0, gamma=0.9)
    plain = baselines.DummyVecEnv(fns(3))
    for one in (envs, plain):
        one.seed(0)
    seen = [plain.reset()]
    out = envs.reset()
    for _ in range(20):
        obs, *_ = plain.step([0, 1, 2])
        seen.append(obs)
        out, rewards, *_ = envs.step([0, 1, 2])
    everything = np.concatenate(seen).astype(np.float64)
    assert np.allclose(envs.ob_rms.mean, everything.mean(0), atol=1e-3)
    assert np.allclose(envs.ob_rms.var, everything.var(0), atol=1e-2)
    expected = np.clip((seen[-1] - envs.ob_rms.mean) / np.sqrt(envs.ob_rms.var + 1e-8), -1.5, 1.5)
    assert np.allclose(out, expected, atol=1e-6)
    assert np.abs(rewards).max() <= 2.0
    envs.close()
    plain.close()


def test_without_normalization_there_are_no_statistics() -> None:
    envs = baselines.VecNormalize(baselines.DummyVecEnv(fns(2)), ob=False, ret=False)
    assert envs.ob_rms is None
    envs.seed(4)
    assert envs.reset().tolist() == [[4, 0, 0], [5, 0, 0]]
    assert envs.step([1, 0])[1].tolist() == [101, 1]
    envs.close()


def test_vec_monitor(tmp_path: Path) -> None:
    envs = baselines.VecMonitor(baselines.DummyVecEnv(fns(2)), str(tmp_path / "all"), keep_buf=2)
    envs.reset()
    episodes = [info["episode"] for _ in range(6) for info in envs.step([0, 1])[3] if "episode" in info]
    assert [(one["r"], one["l"]) for one in episodes] == [(3, 2), (306, 3), (3, 2), (3, 2), (306, 3)]
    assert (list(envs.epret_buf), list(envs.eplen_buf), envs.epcount) == ([3, 306], [2, 3], 5)
    envs.close()
    with open(tmp_path / "all.monitor.csv") as file:
        assert "t_start" in json.loads(file.readline()[1:])
        rows = list(csv.DictReader(file))
    assert [row["l"] for row in rows] == ["2", "3", "2", "2", "3"]


def test_one_part_of_a_dict() -> None:
    space = spaces.Dict(a=spaces.Box(0, 1, (2,), np.float32), b=spaces.Discrete(3))
    envs = baselines.VecExtractDictObs(baselines.DummyVecEnv([lambda: SpaceEnv(space)] * 2), "b")
    assert envs.observation_space == spaces.Discrete(3)
    assert envs.reset().shape == (2,)
    envs.close()


def test_an_observation_wrapper_of_ones_own() -> None:
    class Negated(baselines.VecEnvObservationWrapper):
        def process(self, obs: Any) -> Any:
            return -obs

    envs = Negated(baselines.DummyVecEnv(fns(2)))
    envs.seed(5)
    assert envs.reset()[:, 0].tolist() == [-5, -6]
    assert envs.step([0, 0])[0][:, 2].tolist() == [-1, -1]
    assert envs.get_attr("length") == [2, 3]
    envs.close()


def test_monitor(tmp_path: Path) -> None:
    env = baselines.Monitor(CountEnv(length=2), str(tmp_path / "one"), info_keywords=())
    env.reset()
    with pytest.raises(RuntimeError, match="allow_early_resets"):
        env.reset()
    env.step(1)
    *_, info = env.step(0)
    assert (info["episode"]["r"], info["episode"]["l"]) == (103, 2)
    with pytest.raises(RuntimeError, match="over"):
        env.step(0)
    env.close()
    lines = (tmp_path / "one.monitor.csv").read_text().splitlines()
    assert lines[0].startswith("#{")
    assert lines[1:2] == ["r,l,t"]
    assert lines[2].startswith("103.0,2,")


# ---- making them ---------------------------------------------------------------------------------------------


class Recorder:
    """An initializer that leaves a trace where it ran."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, *, mpi_rank: int, subrank: int) -> None:
        (self.folder / f"{mpi_rank}.{subrank}").write_text(str(os.getpid()))


@pytest.mark.parametrize("force_dummy", [True, False])
def test_make_vec_env(tmp_path: Path, force_dummy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Monitored, clipped and scaled, made where they live, seeded by rank."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "2")
    envs = baselines.make_vec_env(
        "Pendulum-v1", "classic_control", 3, 5, start_index=1, reward_scale=0.5, initializer=Recorder(tmp_path),
        force_dummy=force_dummy, env_kwargs={"g": 9.0},
    )  # fmt: skip
    assert isinstance(envs, baselines.DummyVecEnv if force_dummy else baselines.SubprocVecEnv)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.1", "2.2", "2.3"]
    assert ((tmp_path / "2.1").read_text() == str(os.getpid())) == force_dummy
    assert envs.get_attr("g") == [9.0] * 3
    assert envs.env_is_wrapped(baselines.Monitor) == [True] * 3
    obs = envs.reset()
    assert envs.get_attr("np_random_seed") == [20006, 20007, 20008]
    out_of_bounds = np.array([[99.0], [np.nan], [-0.5]], np.float32)
    obs, rewards, _, _ = envs.step(out_of_bounds)
    reference = gymnasium.make("Pendulum-v1", g=9.0)
    for i, action in enumerate([2.0, 0.0, -0.5]):
        reference.reset(seed=20006 + i)
        expected, reward, *_ = reference.step(np.array([action], np.float32))
        assert np.allclose(obs[i], expected)
        assert rewards[i] == pytest.approx(0.5 * reward)
    for _ in range(199):
        *_, infos = envs.step(out_of_bounds)
    assert all(info["TimeLimit.truncated"] and info["episode"]["l"] == 200 for info in infos)
    envs.close()


def test_dict_observations_are_flattened() -> None:
    space = spaces.Dict(a=spaces.Box(0, 1, (2,), np.float32), b=spaces.Discrete(3))

    def make() -> Any:
        return SpaceEnv(space)

    envs = baselines.make_vec_env(make, "robotics", 2, None, force_dummy=True)
    assert envs.observation_space.shape == (5,)
    envs.close()
    envs = baselines.make_vec_env(make, "robotics", 2, None, flatten_dict_observations=False, force_dummy=True)
    assert set(envs.reset()) == {"a", "b"}
    envs.close()


def test_the_rank_of_other_mpis(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert baselines.mpi_rank() == 0
    monkeypatch.setenv("PMI_RANK", "3")
    assert baselines.mpi_rank() == 3
    with baselines.clear_mpi_env_vars():
        assert baselines.mpi_rank() == 0
    assert baselines.mpi_rank() == 3


def test_workers_do_not_see_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that imports mpi4py would take itself for the rank that has started it, and hang."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    envs = baselines.SubprocVecEnv(fns(2), context="spawn")
    assert envs.pool.apply(lambda env: __import__("os").environ.get("OMPI_COMM_WORLD_RANK")) == [None, None]
    assert os.environ["OMPI_COMM_WORLD_RANK"] == "1"
    envs.close()


def test_global_seeds() -> None:
    baselines.set_global_seeds(3)
    first = np.random.random()
    baselines.set_global_seeds(3)
    baselines.set_global_seeds(None)
    assert np.random.random() == first


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"env_type": "retro"}, "gym-retro"),
        ({"env_type": "mujoco", "wrapper_kwargs": {"frame_stack": True}}, "only env_type=\"atari\""),
    ],
)  # fmt: skip
def test_what_cannot_be_made(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        baselines.make_vec_env("CartPole-v1", num_env=1, seed=0, **arguments)


def test_make_with_api() -> None:
    with shoal.make(fns(2), api="baselines", backend="serial") as envs:
        assert isinstance(envs, baselines.BaselinesVecEnv)
        assert envs.reset().shape == (2, 3)


# ---- Atari ---------------------------------------------------------------------------------------------------

BREAKOUT = "ale_py:BreakoutNoFrameskip-v4"


def test_atari_a_life_is_an_episode_and_a_game_is_a_line() -> None:
    pytest.importorskip("ale_py", reason="Atari games come with the extra `atari`")
    envs = baselines.make_vec_env(BREAKOUT, "atari", 2, 0, force_dummy=True)
    assert envs.observation_space == spaces.Box(0, 255, (84, 84, 1), np.uint8)
    envs.reset()
    ends, games, rewards = 0, [], set()
    for _ in range(300):
        _, reward, dones, infos = envs.step([3, 2])
        rewards |= set(reward.tolist())
        ends += int(dones[0])
        games += [infos[0]["episode"]["l"]] if "episode" in infos[0] else []
    assert games
    assert ends >= 5 * len(games)  # five lives to a game
    assert rewards <= {-1.0, 0.0, 1.0}
    envs.close()


def test_atari_with_all_it_can_have() -> None:
    pytest.importorskip("ale_py", reason="Atari games come with the extra `atari`")
    options = {"frame_stack": True, "scale": True, "episode_life": False, "clip_rewards": False}
    envs = baselines.make_vec_env(BREAKOUT, "atari", 2, 0, wrapper_kwargs=options, context="forkserver")
    obs = envs.reset()
    assert (obs.shape, obs.dtype) == ((2, 84, 84, 4), np.float32)
    assert 0 < obs.max() <= 1
    assert envs.observation_space.contains(obs[0])
    envs.close()

"""Side by side with Stable-Baselines3: its trainers, callbacks and wrappers over its VecEnvs and over ours."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("stable_baselines3", reason="these tests train with Stable-Baselines3")

import stable_baselines3 as algorithms
from stable_baselines3.common import callbacks
from stable_baselines3.common import vec_env as sb3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

from contract.lockstep import assert_same
from dialects.sb3_envs import ENVS, RGB, ReachEnv, short
from dialects.sb3_kit import plain
from dialects.test_sb3_same import MaskedEnv, WholeEnv
from shoal.dialects import sb3 as face

SIDES = (face, sb3)
SMALL: dict[str, Any] = {"seed": 0, "device": "cpu", "policy_kwargs": {"net_arch": [8]}}
PPO: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 1}
OFF_POLICY: dict[str, Any] = {"learning_starts": 20, "batch_size": 8, "buffer_size": 500, "train_freq": 8}


def processes(module: Any, fns: list[Any]) -> Any:
    """The envs in processes."""
    return module.SubprocVecEnv(fns, start_method="fork")


def weights(model: Any) -> dict[str, Any]:
    """What was learnt."""
    return {name: value.numpy() for name, value in model.get_parameters()["policy"].items()}


def small(**more: Any) -> dict[str, Any]:
    """Arguments of a small model. SB3 writes into policy_kwargs: each needs its own."""
    return {**SMALL, "policy_kwargs": dict(SMALL["policy_kwargs"]), **more}


# ---- trainers -------------------------------------------------------------------------------------------------


def masked(venv: Any) -> Any:
    return contrib().MaskablePPO("MlpPolicy", venv, **small(**PPO))


def contrib() -> Any:
    """The algorithms of sb3-contrib, where it is installed."""
    return pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed")


TRAININGS: dict[str, tuple[Any, Any]] = {
    "PPO": (short("CartPole-v1"), lambda venv: algorithms.PPO("MlpPolicy", venv, **small(**PPO))),
    "PPO, integer Box": (WholeEnv, lambda venv: algorithms.PPO("MlpPolicy", venv, **small(**PPO))),
    "SAC": (short("Pendulum-v1"), lambda venv: algorithms.SAC("MlpPolicy", venv, **small(**OFF_POLICY))),
    "HER": (
        partial(ReachEnv, False),
        lambda venv: algorithms.SAC(
            "MultiInputPolicy", venv, replay_buffer_class=algorithms.HerReplayBuffer, **small(**OFF_POLICY)
        ),
    ),
    "RecurrentPPO": (
        short("CartPole-v1"),
        lambda venv: contrib().RecurrentPPO("MlpLstmPolicy", venv, **small(**PPO)),
    ),
    "MaskablePPO": (MaskedEnv, masked),
    "TQC": (short("Pendulum-v1"), lambda venv: contrib().TQC("MlpPolicy", venv, **small(**OFF_POLICY))),
}


@pytest.mark.parametrize("where", ["here", "processes", "normalized, in processes"])
@pytest.mark.parametrize("name", TRAININGS)
def test_the_same_is_learnt(name: str, where: str) -> None:
    env, make_model = TRAININGS[name]
    learnt = []
    for module in SIDES:
        venv = module.DummyVecEnv([env] * 2) if where == "here" else processes(module, [env] * 2)
        venv = module.VecMonitor(venv)
        venv = module.VecNormalize(venv) if where.startswith("normalized") else venv
        model = make_model(venv).learn(128)
        learnt.append((weights(model), [float(episode["r"]) for episode in model.ep_info_buffer]))
        venv.close()
    (ours, our_returns), (theirs, their_returns) = learnt
    assert our_returns == their_returns
    for part, found in theirs.items():
        if where.startswith("normalized"):  # sums of statistics are rounded in another order
            np.testing.assert_allclose(ours[part], found, rtol=1e-2, atol=1e-3, err_msg=part)
        else:
            np.testing.assert_array_equal(ours[part], found, part)


# ---- callbacks, evaluation, saving ----------------------------------------------------------------------------


def test_callbacks(tmp_path: Path) -> None:
    """Evaluation with a stop at a reward, checkpoints, and a stop after episodes."""
    found = []
    for module in SIDES:
        folder = tmp_path / module.__name__
        venv = module.VecNormalize(make_vec_env("CartPole-v1", 2, seed=1, vec_env_cls=module.DummyVecEnv))
        evaluated = module.VecNormalize(
            make_vec_env("CartPole-v1", 2, seed=9, vec_env_cls=module.DummyVecEnv), training=False, norm_reward=False
        )
        episodes = callbacks.StopTrainingOnMaxEpisodes(6)
        best = callbacks.StopTrainingOnRewardThreshold(1e9)
        every = [
            callbacks.EvalCallback(
                evaluated, callback_on_new_best=best, n_eval_episodes=3, eval_freq=16, verbose=0, log_path=str(folder)
            ),
            callbacks.CheckpointCallback(16, str(folder), save_vecnormalize=True, save_replay_buffer=True),
            episodes,
        ]
        model = algorithms.PPO("MlpPolicy", venv, **small(**PPO)).learn(1000, callback=every)
        lengths = np.load(folder / "evaluations.npz")["ep_lengths"]
        found.append((sorted(file.name for file in folder.iterdir()), model.num_timesteps, lengths.shape))
        # What one side has saved, the other one goes on with.
        other = sb3 if module is face else face
        last = max(folder.glob("*vecnormalize*"), key=lambda file: file.stat().st_mtime_ns)
        again = other.VecNormalize.load(str(last), make_vec_env("CartPole-v1", 2, vec_env_cls=other.DummyVecEnv))
        model.save(folder / "model")
        loaded = algorithms.PPO.load(folder / "model", env=again)
        loaded.learn(32)
        loaded.set_env(again)
        assert loaded.get_vec_normalize_env() is again
        venv.close()
        evaluated.close()
    assert_same(*found)


@pytest.mark.parametrize("kind", ["DummyVecEnv", "SubprocVecEnv"])
def test_evaluate_policy(kind: str) -> None:
    found = []
    for module in SIDES:
        cls = getattr(module, kind)
        venv = make_vec_env(
            "CartPole-v1", 3, seed=4, vec_env_cls=cls,
            vec_env_kwargs={"start_method": "fork"} if kind == "SubprocVecEnv" else None,
        )  # fmt: skip
        model = algorithms.PPO("MlpPolicy", venv, **small(**PPO))
        found.append(evaluate_policy(model, venv, n_eval_episodes=7, return_episode_rewards=True))
        venv.close()
    assert_same(*found)


# ---- wrappers, ours and theirs around each other ---------------------------------------------------------------

AROUND: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    "VecMonitor": ("VecMonitor", "CartPole", ()),
    "VecFrameStack": ("VecFrameStack", "Pendulum", (3,)),
    "VecFrameStack of images": ("VecFrameStack", "image", (2,)),
    "VecFrameStack of dicts": ("VecFrameStack", "images", (2,)),
    "VecTransposeImage": ("VecTransposeImage", "image", ()),
    "VecTransposeImage of dicts": ("VecTransposeImage", "images", ()),
    "VecCheckNan": ("VecCheckNan", "Pendulum", ()),
    "VecExtractDictObs": ("VecExtractDictObs", "images", ("speed",)),
}


def walk(venv: Any) -> Any:
    """A short run, and what the layers say."""
    venv.seed(3)
    own = venv.action_space
    own.seed(5)
    found: list[Any] = [plain(venv.reset())]
    for _ in range(20):
        obs, rewards, dones, infos = venv.step(np.array([own.sample() for _ in range(2)]))
        for info in infos:
            info.get("episode", {}).pop("t", None)
        found.append(plain((obs, rewards, dones, list(infos))))
    found += [venv.num_envs, venv.observation_space, venv.get_attr("render_mode", [1]), venv.has_attr("nothing")]
    found += [list(venv.seed(1)), venv.unwrapped.num_envs]
    venv.close()
    return found


@pytest.mark.parametrize("kind", ["DummyVecEnv", "SubprocVecEnv"])
@pytest.mark.parametrize("name", AROUND)
def test_wrappers_around_each_others_envs(name: str, kind: str) -> None:
    wrapper, env, arguments = AROUND[name]

    def made(of: Any, around: Any) -> Any:
        inner = of.DummyVecEnv([ENVS[env]] * 2) if kind == "DummyVecEnv" else processes(of, [ENVS[env]] * 2)
        outer = getattr(around, wrapper)(inner, *arguments)
        for module in SIDES:
            assert module.is_vecenv_wrapped(outer, sb3.VecEnvWrapper)
            assert module.unwrap_vec_normalize(outer) is None
            assert module.unwrap_vec_wrapper(outer, sb3.VecEnvWrapper) is outer
        return walk(outer)

    theirs = made(sb3, sb3)
    for of, around in ((face, face), (face, sb3), (sb3, face)):
        assert_same(made(of, around), theirs, f"{around.__name__} around {of.__name__}")


def test_videos(tmp_path: Path) -> None:
    pytest.importorskip("moviepy", reason="SB3's recorder needs moviepy")
    for of in SIDES:
        for around in SIDES:
            folder = tmp_path / f"{of.__name__} in {around.__name__}"
            venv = around.VecVideoRecorder(of.DummyVecEnv([RGB] * 2), str(folder), lambda step: step == 0, 5)
            venv.reset()
            for _ in range(8):
                venv.step(np.zeros(2, np.int64))
            venv.close()
            assert [file.name for file in folder.glob("*.mp4")] == ["rl-video-step-0-to-step-5.mp4"]


def test_modules_that_users_import_from_are_complete() -> None:
    theirs = import_module("stable_baselines3.common.vec_env")
    assert [name for name in theirs.__all__ if not hasattr(face, name)] == []

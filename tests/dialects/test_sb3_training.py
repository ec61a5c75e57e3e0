"""Stable-Baselines3 itself on our VecEnvs: its algorithms, callbacks and evaluation really run."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("stable_baselines3", reason="these tests train with Stable-Baselines3")

import stable_baselines3 as algorithms
from stable_baselines3.common import vec_env as sb3
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, EvalCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

import dialects.sb3_kit  # noqa: F401  for its one thread of torch
import shoal
from dialects.sb3_envs import ENVS, IMAGES, ReachEnv, SumEnv, TroubledEnv, short
from envs import SPACES, FailEnv
from shoal.dialects import sb3 as face

PPO: dict[str, Any] = {"n_steps": 16, "batch_size": 16, "n_epochs": 1}
OFF_POLICY: dict[str, Any] = {
    "learning_starts": 20,
    "batch_size": 8,
    "buffer_size": 500,
    "train_freq": 8,
    "gradient_steps": 1,
}


def model_of(algorithm: Any, policy: str, venv: Any, **arguments: Any) -> Any:
    """A small one. SB3 writes into policy_kwargs: each needs its own."""
    return algorithm(policy, venv, seed=0, device="cpu", policy_kwargs={"net_arch": [8]}, **arguments)


def small(space: Any = SPACES["box"], actions: Any = None) -> Any:
    return partial(SumEnv, space, actions)


# algorithm, policy, env, its arguments
RUNS: dict[str, tuple[Any, str, Any, dict[str, Any]]] = {
    "PPO": (algorithms.PPO, "MlpPolicy", ENVS["CartPole"], PPO),
    "A2C": (algorithms.A2C, "MlpPolicy", ENVS["CartPole"], {"n_steps": 5}),
    "A2C, boxes": (algorithms.A2C, "MlpPolicy", ENVS["Pendulum"], {"n_steps": 5}),
    "DQN": (algorithms.DQN, "MlpPolicy", ENVS["CartPole"], OFF_POLICY),
    "SAC": (algorithms.SAC, "MlpPolicy", ENVS["Pendulum"], OFF_POLICY),
    "TD3": (algorithms.TD3, "MlpPolicy", ENVS["Pendulum"], OFF_POLICY),
    "PPO, dicts": (algorithms.PPO, "MultiInputPolicy", small(SPACES["dict"]), PPO),
    "PPO, discrete": (algorithms.PPO, "MlpPolicy", ENVS["FrozenLake"], PPO),
    "PPO, multi discrete": (algorithms.PPO, "MlpPolicy", small(actions=SPACES["multi discrete"]), PPO),
    "PPO, multi binary": (algorithms.PPO, "MlpPolicy", small(actions=SPACES["multi binary"]), PPO),
}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_learning_is_the_same_as_on_their_envs(run: Any) -> None:
    """Not only does it run: seeds and streams are the same, so the learnt weights are."""
    algorithm, policy, env, arguments = run
    weights = []
    for cls in (face.DummyVecEnv, sb3.DummyVecEnv):
        venv = cls([env] * 2)
        model = model_of(algorithm, policy, venv, **arguments)
        assert model.get_env() is venv
        model.learn(200)
        weights.append(model.get_parameters()["policy"])
        venv.close()
    for name, found in weights[0].items():
        assert (found == weights[1][name]).all(), name


def test_learning_on_processes() -> None:
    venv = face.VecMonitor(face.SubprocVecEnv([ENVS["CartPole"]] * 4, num_workers=2))
    model = model_of(algorithms.PPO, "MlpPolicy", venv, **PPO).learn(200)
    assert len(model.ep_info_buffer or ()) > 0
    venv.close()


def test_images_are_transposed_by_theirs() -> None:
    space = gymnasium.spaces.Box(0, 255, (36, 36, 1), np.uint8)
    venv = face.VecFrameStack(face.DummyVecEnv([small(space)] * 2), 2)
    model = model_of(algorithms.A2C, "CnnPolicy", venv, n_steps=5)
    assert isinstance(model.get_env(), sb3.VecTransposeImage)
    model.learn(20)
    model.set_env(face.VecTransposeImage(face.VecFrameStack(face.DummyVecEnv([small(space)] * 2), 2)))
    assert isinstance(model.get_env(), face.VecTransposeImage), "not transposed twice"
    model.learn(20)
    venv.close()


@pytest.mark.parametrize("normalized", [False, True], ids=["bare", "normalized"])
@pytest.mark.parametrize("name", ["DQN", "SAC"])
def test_hindsight(name: str, normalized: bool) -> None:
    """Goals are chosen anew from what was achieved, and the envs asked for their rewards, in their processes."""
    hindsight = {"replay_buffer_class": algorithms.HerReplayBuffer, "replay_buffer_kwargs": {"n_sampled_goal": 2}}
    weights = []
    for of in (face, sb3):
        fns = [partial(ReachEnv, name == "DQN")] * 2
        venv = of.DummyVecEnv(fns) if of is sb3 else face.SubprocVecEnv(fns, num_workers=1)
        venv = of.VecNormalize(venv) if normalized else venv
        model = model_of(getattr(algorithms, name), "MultiInputPolicy", venv, **hindsight, **OFF_POLICY)
        model.learn(120)
        weights.append({name: value.numpy() for name, value in model.get_parameters()["policy"].items()})
        venv.close()
    for part, found in weights[0].items():
        np.testing.assert_allclose(found, weights[1][part], rtol=1e-2, atol=1e-3, err_msg=part)


# ---- VecNormalize -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["PPO", "DQN", "SAC"])
def test_the_normalizer_is_found_and_used(name: str) -> None:
    """Off-policy buffers hold what the envs said, not what the normalizer made of it."""
    algorithm, policy, env, arguments = RUNS[name]
    found: list[Any] = []
    for of in (face, sb3):
        venv = of.VecNormalize(of.VecMonitor(of.DummyVecEnv([env] * 2)))
        model = model_of(algorithm, policy, venv, **arguments)
        assert model.get_vec_normalize_env() is venv
        model.learn(120)
        if name != "PPO":
            buffer = model.replay_buffer
            found.append((buffer.observations, buffer.next_observations, buffer.rewards, buffer.dones))
        found.append((venv.obs_rms.mean, venv.obs_rms.var, venv.ret_rms.mean))
        venv.close()
    half = len(found) // 2
    for ours, theirs in zip(found[:half], found[half:], strict=True):
        for our, their in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(our, their, rtol=1e-3, atol=1e-4)


def test_checkpoints_save_the_normalizer(tmp_path: Path) -> None:
    venv = face.VecNormalize(face.DummyVecEnv([ENVS["CartPole"]] * 2), gamma=0.9)
    model = model_of(algorithms.PPO, "MlpPolicy", venv, **PPO)
    model.learn(64, callback=CheckpointCallback(16, str(tmp_path), save_vecnormalize=True, save_replay_buffer=True))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["rl_model_32_steps.zip", "rl_model_64_steps.zip"] + [
        f"rl_model_vecnormalize_{n}_steps.pkl" for n in (32, 64)
    ]
    loaded = face.VecNormalize.load(tmp_path / files[-1], face.DummyVecEnv([ENVS["CartPole"]]))
    assert loaded.gamma == 0.9
    np.testing.assert_allclose(loaded.obs_rms.mean, venv.obs_rms.mean)
    again = algorithms.PPO.load(tmp_path / files[1], env=loaded)
    assert again.get_vec_normalize_env() is loaded
    again.learn(32)
    venv.close()


@pytest.mark.parametrize("of", [face, sb3], ids=["ours", "theirs"])
def test_evaluation_while_training(tmp_path: Path, of: Any) -> None:
    """The envs of evaluation may be ours or SB3's; their statistics follow those of training."""
    fns = [lambda: Monitor(ENVS["CartPole"]())] * 2
    venv = face.VecNormalize(face.DummyVecEnv(fns))
    evaluated = of.VecNormalize(of.DummyVecEnv(fns[:1]), training=False, norm_reward=False)
    model = model_of(algorithms.PPO, "MlpPolicy", venv, **PPO)
    callback = EvalCallback(evaluated, n_eval_episodes=3, eval_freq=16, log_path=str(tmp_path), verbose=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Training and eval env are not of the same type")
        model.learn(64, callback=callback)
    assert 1 <= callback.last_mean_reward <= 14
    np.testing.assert_allclose(evaluated.obs_rms.mean, venv.obs_rms.mean, rtol=0.5, atol=0.5)
    assert evaluated.obs_rms.count > 32
    assert np.load(tmp_path / "evaluations.npz")["ep_lengths"].shape == (2, 3)
    venv.close()


# ---- evaluation and models ----------------------------------------------------------------------------------

MONITORED: dict[str, Any] = {
    "their Monitor": lambda: face.DummyVecEnv([lambda: Monitor(short("CartPole-v1")())] * 2),
    "our Monitor": lambda: face.make_vec_env("CartPole-v1", 2, env_kwargs={"max_episode_steps": 9}),
    "our Monitor, processes": lambda: face.make_vec_env(
        "CartPole-v1", 2, env_kwargs={"max_episode_steps": 9}, vec_env_cls=partial(face.SubprocVecEnv, num_workers=1)
    ),
    "our VecMonitor": lambda: face.VecMonitor(face.DummyVecEnv([short("CartPole-v1")] * 2)),
}


@pytest.mark.filterwarnings("error:Evaluation environment is not wrapped")
@pytest.mark.parametrize("make", MONITORED.values(), ids=MONITORED)
def test_evaluate_policy(make: Any) -> None:
    venv = make()
    model = model_of(algorithms.PPO, "MlpPolicy", venv, **PPO)
    rewards, lengths = evaluate_policy(model, venv, n_eval_episodes=5, return_episode_rewards=True)
    assert len(rewards) == 5  # type: ignore[arg-type]
    assert rewards == lengths
    venv.close()


def test_a_model_that_was_trained_on_their_envs(tmp_path: Path) -> None:
    fns = [ENVS["CartPole"]] * 2
    theirs, ours = (of.VecFrameStack(of.DummyVecEnv(fns), 2) for of in (sb3, face))
    model = model_of(algorithms.PPO, "MlpPolicy", theirs, **PPO)
    model.save(tmp_path / "model")
    loaded = algorithms.PPO.load(tmp_path / "model", env=ours)
    assert loaded.get_env() is ours
    loaded.learn(32)
    ours.close()


def test_a_loop_of_ones_own() -> None:
    venv = face.make_vec_env("CartPole-v1", 3, seed=1)
    model = model_of(algorithms.A2C, "MlpPolicy", venv)
    obs = venv.reset()
    for _ in range(30):
        actions, _ = model.predict(obs)
        obs, _, dones, infos = venv.step(actions)
        assert all("terminal_observation" in infos[i] and "episode" in infos[i] for i in np.flatnonzero(dones))
    venv.close()


# ---- faults -------------------------------------------------------------------------------------------------


class Watch(BaseCallback):
    """Keeps what it sees of restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        self.seen += [info["shoal_restart"] for info in self.locals["infos"] if "shoal_restart" in info]
        return True


@pytest.mark.parametrize("dies", [False, True], ids=["raises", "dies"])
@pytest.mark.parametrize("name", ["PPO", "DQN"])
def test_training_goes_on_after_a_loss(tmp_path: Path, name: str, dies: bool) -> None:
    fns = [partial(TroubledEnv, str(tmp_path / str(i)), dies) for i in range(2)]
    venv = face.VecNormalize(face.VecMonitor(face.SubprocVecEnv(fns, num_workers=2, on_error="restart")))
    algorithm, policy, _, arguments = RUNS[name]
    watch = Watch()
    model_of(algorithm, policy, venv, **arguments).learn(100, callback=watch)
    assert sorted(report["culprit"] for report in watch.seen) == [0, 1]
    assert {report["cause"] for report in watch.seen} == {"died" if dies else "raised"}
    venv.close()


def test_training_without_restarts_stops_with_the_envs_own_error() -> None:
    venv = face.DummyVecEnv([partial(FailEnv, "step")] * 2)
    model = model_of(algorithms.PPO, "MlpPolicy", venv, **PPO)
    with pytest.raises(ValueError, match="bad joint") as caught:
        model.learn(200)
    assert isinstance(caught.value, shoal.EnvError)
    venv.close()


def test_a_part_of_a_dict_normalized() -> None:
    venv = face.VecExtractDictObs(face.VecNormalize(face.DummyVecEnv([small(IMAGES)] * 2)), "speed")
    model_of(algorithms.A2C, "MlpPolicy", venv, n_steps=5).learn(40)
    venv.close()


# ---- the first thing that people try ------------------------------------------------------------------------


USES: dict[str, Any] = {
    "algorithm": lambda envs, model: algorithms.PPO("MlpPolicy", envs),
    "another env": lambda envs, model: model.set_env(envs),
    "evaluation": lambda envs, model: evaluate_policy(model, envs),
    "DummyVecEnv": lambda envs, model: sb3.DummyVecEnv([lambda: envs]),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_gymnasium_vector_env_is_refused_with_what_to_write(use: Any) -> None:
    envs = shoal.make("CartPole-v1", 2, backend="serial")
    right = shoal.make("CartPole-v1", 2, backend="serial", api="sb3")
    model = model_of(algorithms.PPO, "MlpPolicy", right, **PPO).learn(32)
    with pytest.raises(ValueError, match=r'shoal\.make\(\.\.\., api="sb3"\)'):
        use(envs, model)
    assert "sb3" not in repr(type(envs))
    envs.close()
    right.close()

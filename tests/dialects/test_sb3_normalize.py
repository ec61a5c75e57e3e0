"""VecNormalize of the Stable-Baselines3 face: its statistics, files, pickles, and its dealings with SB3's."""

from __future__ import annotations

import pickle
import pickletools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("stable_baselines3", reason="these tests compare with Stable-Baselines3")

from stable_baselines3.common import vec_env as sb3

from contract.lockstep import assert_same
from dialects.sb3_envs import ENVS
from dialects.sb3_kit import assert_close
from envs import SPACES, SpaceEnv
from shoal.dialects import sb3 as face
from shoal.errors import DataError

SETTINGS = ("training", "norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon", "norm_obs_keys")
ODD: dict[str, Any] = {"clip_obs": 3.0, "clip_reward": 2.0, "gamma": 0.9, "epsilon": 1e-3}
# env, arguments
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "box": ("CartPole", ODD),
    "dict": ("images", {"norm_obs_keys": ["speed"], **ODD}),
    "rewards only": ("Pendulum", {"norm_obs": False}),
    "observations only": ("Pendulum", {"norm_reward": False, "training": True}),
}


def envs(of: Any, name: str) -> Any:
    return of.DummyVecEnv([ENVS[name]] * 3)


def learn(venv: Any, steps: int = 20, seed: int = 0) -> Any:
    """Let it see something; the last result."""
    venv.seed(seed)
    result = venv.reset()
    venv.action_space.seed(seed)
    for _ in range(steps):
        result = venv.step(np.array([venv.action_space.sample() for _ in range(venv.num_envs)]))
    return result


def made(of: Any, kind: str) -> Any:
    env, arguments = KINDS[kind]
    venv = of.VecNormalize(envs(of, env), **arguments)
    learn(venv)
    return venv


def moments(statistics: Any) -> Any:
    if statistics is None:
        return None
    if isinstance(statistics, dict):
        return {key: moments(value) for key, value in statistics.items()}
    return np.asarray(statistics.mean), np.asarray(statistics.var), float(statistics.count)


def assert_same_normalizer(one: Any, other: Any) -> None:
    """Settings, statistics, and what they make of the same observation."""
    for name in SETTINGS:
        assert getattr(one, name) == getattr(other, name), name
    assert_close(moments(one.ret_rms), moments(other.ret_rms))
    if one.norm_obs:
        assert_close(moments(one.obs_rms), moments(other.obs_rms))
    obs = one.unwrapped.reset()
    rewards = np.array([1.0, -2.0, 0.5], np.float32)
    for name, value in (("obs", obs), ("reward", rewards)):
        assert_close(getattr(one, f"normalize_{name}")(value), getattr(other, f"normalize_{name}")(value))
        assert_close(getattr(one, f"unnormalize_{name}")(value), getattr(other, f"unnormalize_{name}")(value))


# ---- statistics ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_what_theirs_learns(kind: str) -> None:
    assert_same_normalizer(made(face, kind), made(sb3, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_originals(kind: str) -> None:
    env, _ = KINDS[kind]
    ours, theirs, bare = made(face, kind), made(sb3, kind), envs(face, env)
    last = learn(bare)
    for venv in (ours, theirs):
        obs, rewards = venv.get_original_obs(), venv.get_original_reward()
        assert_close(obs, last[0])
        assert_close(rewards, last[1])
        for kept in (venv.old_obs, venv.old_reward):
            assert kept is not None
        rewards[:] = 7
        assert_close(venv.get_original_reward(), last[1])


@pytest.mark.parametrize("kind", KINDS)
def test_what_callers_do_to_results_does_not_change_the_originals(kind: str) -> None:
    for of in (sb3, face):
        venv = made(of, kind)
        obs, rewards, *_ = venv.step(np.array([venv.action_space.sample() for _ in range(3)]))
        before = venv.get_original_obs(), venv.get_original_reward()
        for array in (*(obs.values() if isinstance(obs, dict) else [obs]), rewards):
            array[:] = 7
        assert_same((venv.get_original_obs(), venv.get_original_reward()), before)


def test_original_rewards_are_those_of_the_last_step() -> None:
    for of in (sb3, face):
        venv = of.VecNormalize(of.DummyVecEnv([ENVS["counting"]] * 2))
        venv.reset()
        assert venv.get_original_reward().tolist() == []
        venv.step(np.ones(2, np.int64))
        venv.reset()
        assert venv.get_original_reward().tolist() == [101, 101]


def test_training_can_be_switched() -> None:
    for of in (face, sb3):
        venv = made(of, "box")
        venv.training = venv.norm_reward = False
        before = moments(venv.obs_rms), moments(venv.ret_rms)
        learn(venv, 3)
        assert_same((moments(venv.obs_rms), moments(venv.ret_rms)), before)
        assert venv.step(np.zeros(3, np.int64))[1].tolist() == [1, 1, 1]


def test_statistics_can_be_replaced() -> None:
    one, other = made(face, "box"), face.VecNormalize(envs(face, "CartPole"), **ODD)
    other.obs_rms, other.ret_rms = one.obs_rms, one.ret_rms
    assert_same_normalizer(one, other)


def test_images_become_numbers() -> None:
    for env in ("image", "images"):
        ours, theirs = (of.VecNormalize(envs(of, env), clip_obs=4.0) for of in (face, sb3))
        assert ours.observation_space == theirs.observation_space
    inner = envs(face, "images")
    face.VecNormalize(inner)
    assert inner.observation_space == ENVS["images"]().observation_space, "the envs' own space is left alone"


@pytest.mark.parametrize(
    ("env", "arguments"),
    [
        ("tuple", {}),
        ("discrete", {}),
        ("dict", {}),
        ("dict", {"norm_obs_keys": ["b"]}),
        ("CartPole", {"norm_obs_keys": ["a"]}),
    ],
    ids=str,
)
def test_observations_that_cannot_be_normalized(env: str, arguments: dict[str, Any]) -> None:
    for of in (face, sb3):
        with pytest.raises(ValueError):
            of.VecNormalize(envs(of, env), **arguments)


# ---- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", [face, sb3], ids=["our file", "their file"])
def test_save_and_load(tmp_path: Path, kind: str, by: Any) -> None:
    saved = made(by, kind)
    path = tmp_path / "vecnormalize.pkl"
    saved.save(str(path))
    loaded = face.VecNormalize.load(str(path), envs(face, KINDS[kind][0]))
    assert isinstance(loaded, face.VecNormalize)
    assert_same_normalizer(loaded, saved)
    assert_close(learn(loaded, seed=3), learn(saved, seed=3))
    assert loaded.num_envs == 3


@pytest.mark.parametrize("name", ["text", "multi discrete", "one of", "nested"])
def test_their_files_with_any_action_space_and_generators_in_it(tmp_path: Path, name: str) -> None:
    fn = partial(SpaceEnv, SPACES["box"], SPACES[name])
    theirs = sb3.VecNormalize(sb3.DummyVecEnv([fn] * 2))
    theirs.observation_space.sample()
    theirs.action_space.seed(3)
    theirs.reset()
    theirs.save(str(tmp_path / "file.pkl"))
    loaded = face.VecNormalize.load(str(tmp_path / "file.pkl"), face.DummyVecEnv([fn] * 2))
    assert_close(moments(loaded.obs_rms), moments(theirs.obs_rms))


def test_a_file_for_other_envs(tmp_path: Path) -> None:
    made(face, "box").save(tmp_path / "file")
    for env in ("Pendulum", "images"):
        with pytest.raises(ValueError, match="statistics"):
            face.VecNormalize.load(tmp_path / "file", envs(face, env))


class Evil:
    """What no file may do."""

    def __reduce__(self) -> Any:
        return print, ("this must never run",)


@pytest.mark.parametrize("content", [b"", b"hello", pickle.dumps(Evil()), pickle.dumps({"a": 1})], ids=str)
def test_files_that_are_none(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file.pkl"
    path.write_bytes(content)
    with pytest.raises(DataError):
        face.VecNormalize.load(str(path), envs(face, "CartPole"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", KINDS)
def test_running_averages(tmp_path: Path, kind: str) -> None:
    env, arguments = KINDS[kind]
    saved, other = made(face, kind), face.VecNormalize(envs(face, env), **arguments)
    saved.save_running_average(str(tmp_path / "deep" / "folder"))
    other.load_running_average(str(tmp_path / "deep" / "folder"))
    assert_same_normalizer(other, saved)
    with pytest.raises(FileNotFoundError):
        other.load_running_average(str(tmp_path / "deep"))


def test_running_averages_of_stable_baselines_2(tmp_path: Path) -> None:
    theirs = made(sb3, "box")
    for name in ("obs_rms", "ret_rms"):
        (tmp_path / f"{name}.pkl").write_bytes(pickle.dumps(getattr(theirs, name)))
    ours = face.VecNormalize(envs(face, "CartPole"), **ODD)
    ours.load_running_average(tmp_path)
    assert_same_normalizer(ours, theirs)


def test_running_averages_of_other_envs_are_refused(tmp_path: Path) -> None:
    made(face, "box").save_running_average(tmp_path)
    other = face.VecNormalize(envs(face, "Pendulum"))
    with pytest.raises(ValueError, match="statistics"):
        other.load_running_average(tmp_path)
    other.reset()  # nothing has changed


# ---- pickles ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_pickle_and_set_venv(kind: str) -> None:
    env, _ = KINDS[kind]
    saved = made(face, kind)
    copied = pickle.loads(pickle.dumps(saved))
    assert copied.clip_obs == saved.clip_obs
    copied.set_venv(face.SubprocVecEnv([ENVS[env]] * 5, num_workers=2))
    assert copied.num_envs == 5
    assert copied.observation_space == saved.observation_space
    with pytest.raises(ValueError, match="already"):
        copied.set_venv(envs(face, env))
    assert_close(moments(copied.ret_rms), moments(saved.ret_rms))
    learn(copied, 4)
    copied.close()


def test_one_that_has_no_envs_says_so() -> None:
    copied = pickle.loads(pickle.dumps(made(face, "box")))
    assert copied.venv is None
    with pytest.raises(AttributeError):
        _ = copied.no_such_thing


def test_set_venv_with_other_envs_can_be_tried_again() -> None:
    for of in (sb3, face):
        copied = pickle.loads(pickle.dumps(made(of, "box")))
        with pytest.raises((ValueError, AssertionError)):
            copied.set_venv(envs(of, "Pendulum"))
    copied.set_venv(envs(face, "CartPole"))
    learn(copied, 2)


# ---- with theirs --------------------------------------------------------------------------------------------

PAIRS = {"ours to ours": (face, face), "ours to theirs": (face, sb3), "theirs to ours": (sb3, face)}


@pytest.mark.parametrize("sync", [face.sync_envs_normalization, sb3.sync_envs_normalization], ids=["by ours", "by SB3"])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("kind", KINDS)
def test_sync(kind: str, pair: tuple[Any, Any], sync: Any) -> None:
    env, arguments = KINDS[kind]
    source, of = made(pair[0], kind), pair[1]
    target = of.VecNormalize(envs(of, env), **arguments)
    sync(source, target)
    assert_same_normalizer(source, target)
    learn(source, 3, seed=8)
    if source.norm_obs:
        one, other = (next(iter(s.values())) if isinstance(s := venv.obs_rms, dict) else s for venv in (source, target))
        assert one.count > other.count, "a copy, which goes its own way"
    obs, rewards, *_ = learn(target, 3)
    assert np.isfinite(rewards).all()
    assert all(np.isfinite(part).all() for part in (obs.values() if isinstance(obs, dict) else [obs]))


def test_sync_of_what_is_not_wrapped_alike() -> None:
    with pytest.raises((ValueError, AssertionError)):
        face.sync_envs_normalization(made(face, "box"), envs(face, "CartPole"))


@pytest.mark.parametrize("of", [face, sb3], ids=["ours", "theirs"])
def test_unwrapping(of: Any) -> None:
    inner = made(of, "box")
    outer = face.VecMonitor(inner)
    for module in (face, sb3):
        assert module.unwrap_vec_normalize(outer) is inner
        assert module.unwrap_vec_normalize(inner.venv) is None
        assert module.is_vecenv_wrapped(outer, sb3.VecNormalize)


# ---- one file for both --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("by", [face, sb3], ids=["our file", "their file"])
def test_theirs_reads_every_file(tmp_path: Path, kind: str, by: Any) -> None:
    saved, path = made(by, kind), str(tmp_path / "vecnormalize.pkl")
    saved.save(path)
    loaded = sb3.VecNormalize.load(path, envs(sb3, KINDS[kind][0]))
    assert type(loaded) is sb3.VecNormalize
    assert_same_normalizer(loaded, saved)
    assert_close(loaded.get_original_obs(), saved.get_original_obs())
    assert loaded.observation_space == saved.observation_space
    assert_close(learn(loaded, seed=3), learn(saved, seed=3))
    loaded.save(path)
    assert_same_normalizer(face.VecNormalize.load(path, envs(face, KINDS[kind][0])), loaded)


class OwnSpace(spaces.Box):
    """A space that no reader of files knows."""


def test_a_file_for_a_space_of_the_users_own(tmp_path: Path) -> None:
    fn = partial(SpaceEnv, SPACES["box"], OwnSpace(-1.0, 1.0, (2,), np.float32))
    path = str(tmp_path / "file.pkl")
    face.VecNormalize(face.DummyVecEnv([fn])).save(path)
    for of in (face, sb3):
        loaded = of.VecNormalize.load(path, of.DummyVecEnv([fn]))
        assert isinstance(loaded.action_space, OwnSpace)
        loaded.reset()


def test_the_file_of_a_checkpoint_is_theirs(tmp_path: Path) -> None:
    venv = made(face, "box")
    venv.save(tmp_path / "new folder" / "file.pkl")
    names = {name for _, name, _ in pickletools.genops((tmp_path / "new folder" / "file.pkl").read_bytes())}
    assert "stable_baselines3.common.vec_env.vec_normalize VecNormalize" in names
    assert not any("shoal" in str(name) for name in names)

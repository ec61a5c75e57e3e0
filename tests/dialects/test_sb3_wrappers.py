"""The wrappers of the Stable-Baselines3 face against SB3's of the same names, on the same stream."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("stable_baselines3", reason="these tests compare with Stable-Baselines3")

from stable_baselines3.common import vec_env as sb3

import shoal
from contract.lockstep import assert_same
from dialects.sb3_envs import ENVS, RGB, NanEnv, NoteworthyEnv
from dialects.sb3_kit import assert_close, assert_lockstep
from envs import CountEnv
from shoal.dialects import sb3 as face

# name of the wrapper, env, its arguments
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("VecFrameStack", "image", {"n_stack": 3}),
    ("VecFrameStack", "image, channels first", {"n_stack": 3}),
    ("VecFrameStack", "image", {"n_stack": 2, "channels_order": "first"}),
    ("VecFrameStack", "images", {"n_stack": 2}),
    ("VecFrameStack", "images", {"n_stack": 2, "channels_order": {"camera": "first", "speed": "last"}}),
    ("VecFrameStack", "counting", {"n_stack": 4}),
    ("VecFrameStack", "infos", {"n_stack": 1}),
    ("VecFrameStack", "CartPole", {"n_stack": 4}),
    ("VecNormalize", "CartPole", {}),
    ("VecNormalize", "Pendulum", {"gamma": 0.9, "clip_obs": 0.5, "clip_reward": 0.3, "epsilon": 1e-2}),
    ("VecNormalize", "Pendulum", {"norm_obs": False}),
    ("VecNormalize", "Pendulum", {"norm_reward": False}),
    ("VecNormalize", "Pendulum", {"training": False}),
    ("VecNormalize", "images", {"norm_obs_keys": ["speed"]}),
    ("VecNormalize", "image", {}),
    ("VecNormalize", "dict", {"norm_obs_keys": ["a"]}),
    ("VecNormalize", "counting", {}),
    ("VecNormalize", "number", {}),
    ("VecMonitor", "CartPole", {}),
    ("VecMonitor", "infos", {}),
    ("VecTransposeImage", "image", {}),
    ("VecTransposeImage", "images", {}),
    ("VecTransposeImage", "image", {"skip": True}),
    ("VecExtractDictObs", "dict", {"key": "b"}),
    ("VecExtractDictObs", "images", {"key": "camera"}),
    ("VecCheckNan", "tuple", {}),
    ("VecCheckNan", "images", {"raise_exception": True}),
]
# Which of them are ours: (the wrapper, the envs in it).
MIXTURES: dict[str, tuple[Any, Any]] = {
    "both": (face, face),
    "our wrapper on their envs": (face, sb3),
    "their wrapper on our envs": (sb3, face),
}


def without_times(infos: Any) -> None:
    """Takes out when an episode ended, and rounds its return as files do."""
    for info in infos:
        if "episode" in info:
            info["episode"] = {"r": np.float32(info["episode"]["r"]), "l": int(info["episode"]["l"])}


@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize(("name", "env", "arguments"), CASES, ids=[f"{n}-{e}-{a}" for n, e, a in CASES])
def test_same_as_theirs(name: str, env: str, arguments: dict[str, Any], mixture: tuple[Any, Any]) -> None:
    wrapping, inner = mixture
    ours = getattr(wrapping, name)(inner.DummyVecEnv([ENVS[env]] * 3), **arguments)
    theirs = getattr(sb3, name)(sb3.DummyVecEnv([ENVS[env]] * 3), **arguments)
    assert isinstance(ours, getattr(sb3, name))
    assert_lockstep(ours, theirs, same=assert_close, tidy=without_times)


def test_a_stack_of_them_on_processes() -> None:
    def stacked(of: Any, venv: Any) -> Any:
        return of.VecMonitor(of.VecNormalize(of.VecFrameStack(of.VecTransposeImage(venv), 2), gamma=0.9))

    fns = [ENVS["image"]] * 5
    ours, theirs = stacked(face, face.SubprocVecEnv(fns, num_workers=2)), stacked(sb3, sb3.DummyVecEnv(fns))
    assert_lockstep(ours, theirs, same=assert_close, tidy=without_times)


@pytest.mark.parametrize("order", [(face, sb3), (sb3, face)], ids=["ours outside", "theirs outside"])
def test_ours_and_theirs_in_turn(order: tuple[Any, Any]) -> None:
    outer, inner = order
    fns = [ENVS["CartPole"]] * 3
    ours = outer.VecMonitor(inner.VecNormalize(outer.VecCheckNan(face.DummyVecEnv(fns))))
    theirs = sb3.VecMonitor(sb3.VecNormalize(sb3.VecCheckNan(sb3.DummyVecEnv(fns))))
    assert ours.unwrapped is ours.venv.venv.venv
    assert_lockstep(ours, theirs, same=assert_close, tidy=without_times)


@pytest.mark.parametrize("name", ["VecFrameStack", "VecNormalize", "VecMonitor", "VecCheckNan"])
def test_halves_of_a_step(name: str) -> None:
    arguments = {"n_stack": 2} if name == "VecFrameStack" else {}
    whole, halves = (getattr(face, name)(face.DummyVecEnv([CountEnv] * 2), **arguments) for _ in range(2))
    for venv in (whole, halves):
        venv.seed(0)
        venv.reset()
    for step in range(12):
        actions = np.full(2, step % 3)
        halves.step_async(actions)
        expected, found = whole.step(actions), halves.step_wait()
        for infos in (expected[3], found[3]):
            without_times(infos)
        assert_same(found, expected)


# ---- what wrappers pass on ----------------------------------------------------------------------------------


def wrapped(of: Any) -> Any:
    return of.VecMonitor(of.VecNormalize(of.VecFrameStack(of.DummyVecEnv([RGB] * 3), 2)))


def test_calls_go_through() -> None:
    ours, theirs = wrapped(face), wrapped(sb3)
    said = []
    for venv in (ours, theirs):
        venv.seed(3)
        venv.set_options({"level": 2})
        venv.reset()
        venv.step(np.zeros(3, np.int64))
        venv.set_attr("value", 5, [0, -1])
        said.append(
            (
                venv.get_attr("value"),
                venv.get_attr("options_given", 1),
                venv.env_method("add", 1, b=2, indices=[2]),
                venv.env_is_wrapped(sb3.VecEnv, 0),
                venv.has_attr("value"),
                venv.has_attr("no_such_thing"),
                venv.render_mode,
                venv.num_envs,
                venv.render(),
                list(venv.get_images()),
            )
        )
        assert venv.unwrapped is venv.venv.venv.venv
    assert_same(*said)
    ours.close()
    with pytest.raises(shoal.errors.PoolClosed):
        ours.reset()


@pytest.mark.parametrize(
    "name",
    ["obs_rms", "ret_rms", "training", "clip_obs", "gamma", "returns", "episode_returns", "episode_count", "envs"],
)
def test_attributes_are_found_through_layers(name: str) -> None:
    ours, theirs = (of.VecCheckNan(wrapped(of)) for of in (face, sb3))
    for venv in (ours, theirs):
        venv.reset()
        venv.step(np.zeros(3, np.int64))
    found, expected = getattr(ours, name), getattr(theirs, name)
    if name.endswith("rms"):
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-5)
        np.testing.assert_allclose(found.var, expected.var, rtol=1e-5)
    elif name == "envs":
        assert len(found) == len(expected)
    else:
        np.testing.assert_allclose(found, expected)
    ours.close()


@pytest.mark.parametrize("name", ["normalize_obs", "unnormalize_obs", "get_original_obs", "normalize_reward", "save"])
def test_methods_are_found_through_layers(name: str) -> None:
    for of in (sb3, face):
        venv = of.VecCheckNan(wrapped(of))
        assert callable(getattr(venv, name))
        venv.close()


def test_an_attribute_of_two_layers_is_ambiguous() -> None:
    for of in (sb3, face):
        venv = of.VecCheckNan(of.VecNormalize(of.VecNormalize(of.DummyVecEnv([CountEnv]))))
        with pytest.raises(AttributeError, match="ambiguous"):
            _ = venv.obs_rms
        assert venv.getattr_depth_check("obs_rms", already_found=True).endswith("VecNormalize")
        assert venv.getattr_depth_check("no_such_thing", already_found=True) is None
        assert venv.venv.obs_rms is not venv.venv.venv.obs_rms
        with pytest.raises(AttributeError, match="no_such_thing"):
            _ = venv.no_such_thing
        venv.close()


def test_closed_is_that_of_the_envs() -> None:
    venv = face.VecMonitor(face.SubprocVecEnv([CountEnv], num_workers=1))
    assert not venv.closed
    venv.close()
    venv.close()
    assert venv.closed


def test_reset_infos_are_those_of_the_envs() -> None:
    venv = face.VecMonitor(face.DummyVecEnv([lambda: NoteworthyEnv({})] * 2))
    venv.reset()
    assert venv.reset_infos == [{"fresh": 1}] * 2
    venv.close()


@pytest.mark.parametrize("base", [face.DummyVecEnv, sb3.DummyVecEnv], ids=["ours", "theirs"])
def test_wrappers_of_users(base: Any) -> None:
    class Doubled(face.VecEnvWrapper):
        scale = 2

        def reset(self) -> Any:
            return self.venv.reset()

        def step_wait(self) -> Any:
            obs, rewards, dones, infos = self.venv.step_wait()
            return obs, rewards * self.scale, dones, infos

    venv = Doubled(base([RGB] * 2))
    assert isinstance(venv, sb3.VecEnvWrapper)
    assert face.is_vecenv_wrapped(venv, Doubled)
    assert sb3.is_vecenv_wrapped(venv, Doubled)
    outer = face.VecMonitor(sb3.VecFrameStack(venv, 2))
    assert outer.scale == 2
    outer.reset()
    assert outer.step(np.zeros(2, np.int64))[1].tolist() == [2, 2]
    assert outer.render_mode == "rgb_array"
    assert face.unwrap_vec_wrapper(outer, Doubled) is venv
    assert sb3.unwrap_vec_wrapper(outer, Doubled) is venv
    assert face.unwrap_vec_wrapper(outer, face.VecNormalize) is None
    outer.close()


def test_a_wrapper_needs_reset_and_step_wait() -> None:
    class Half(face.VecEnvWrapper):
        def reset(self) -> Any:
            return self.venv.reset()

    venv = face.DummyVecEnv([CountEnv])
    with pytest.raises(TypeError, match="step_wait"):
        Half(venv)  # type: ignore[abstract]
    venv.close()


# ---- VecFrameStack ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "arguments"),
    [
        ("discrete", {"n_stack": 2}),
        ("tuple", {"n_stack": 2}),
        ("dict", {"n_stack": 2}),
        ("counting", {"n_stack": 0}),
        ("counting", {"n_stack": 2, "channels_order": "middle"}),
        ("counting", {"n_stack": 2, "channels_order": {"a": "first"}}),
    ],
    ids=str,
)
def test_stacks_that_cannot_be(env: str, arguments: dict[str, Any]) -> None:
    venv = face.DummyVecEnv([ENVS[env]])
    with pytest.raises((ValueError, TypeError)):
        face.VecFrameStack(venv, **arguments)
    venv.close()


# ---- VecTransposeImage, VecExtractDictObs -------------------------------------------------------------------


@pytest.mark.parametrize("env", ["counting", "image, channels first"])
def test_what_cannot_be_transposed(env: str) -> None:
    venv = face.DummyVecEnv([ENVS[env]])
    with pytest.raises(ValueError, match="TransposeImage"):
        face.VecTransposeImage(venv)
    venv.close()


def test_helpers_of_transpose() -> None:
    image = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    for batch in (image, image[None]):
        assert_same(face.VecTransposeImage.transpose_image(batch), sb3.VecTransposeImage.transpose_image(batch))
    space: Any = ENVS["image"]().observation_space
    assert face.VecTransposeImage.transpose_space(space) == sb3.VecTransposeImage.transpose_space(space)
    venvs = [of.VecTransposeImage(of.DummyVecEnv([ENVS["images"]])) for of in (face, sb3)]
    obs = venvs[0].venv.reset()
    assert_same(*(venv.transpose_observations(obs) for venv in venvs))


@pytest.mark.parametrize(("env", "key"), [("counting", "a"), ("dict", "z")])
def test_parts_that_are_not_there(env: str, key: str) -> None:
    venv = face.DummyVecEnv([ENVS[env]])
    with pytest.raises(ValueError, match=key):
        face.VecExtractDictObs(venv, key)
    venv.close()


# ---- VecCheckNan --------------------------------------------------------------------------------------------

NANS: dict[str, Any] = {
    "action": [[0, np.nan, 0], [0, 0, 0]],
    "infinite action": [[0, 0, 0], [0, np.inf, 0]],
    "reward": [[0, 0, 0], [0.25, 0, 0]],
    "observation": [[0, 0, 0], [0.5, 0, 0]],
    "infinite observation": [[0.75, 0, 0], [0, 0, 0]],
    "first observation": [[0, 0, 0], [-1, 0, 0]],
}
FORMS: dict[str, Callable[[Any], Any]] = {
    "array": lambda actions: np.array(actions, np.float32),
    "list": lambda actions: actions,
    "list of arrays": lambda actions: [np.array(action, np.float32) for action in actions],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("actions", NANS.values(), ids=NANS)
def test_nan_is_found_as_theirs_does(actions: Any, form: Callable[[Any], Any]) -> None:
    for of in (sb3, face):
        venv = of.VecCheckNan(of.DummyVecEnv([NanEnv] * 2), raise_exception=True)
        venv.reset()
        venv.step(form([[0, 0, 0], [0, 0, 0]]))
        with pytest.raises(ValueError, match=r"nan|inf"):
            venv.step(form(actions))
        venv.close()


@pytest.mark.parametrize("warn_once", [True, False])
def test_nan_warnings(warn_once: bool) -> None:
    for of in (sb3, face):
        venv = of.VecCheckNan(of.DummyVecEnv([NanEnv] * 2), warn_once=warn_once)
        venv.reset()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                venv.step(np.array(NANS["reward"], np.float32))
        assert len(caught) == (1 if warn_once else 3)
        venv.close()


def test_infinite_values_may_pass() -> None:
    for of in (sb3, face):
        venv = of.VecCheckNan(of.DummyVecEnv([NanEnv] * 2), raise_exception=True, check_inf=False)
        venv.reset()
        venv.step(np.array(NANS["infinite observation"], np.float32))
        venv.close()


def test_nan_names_the_env_and_the_culprit() -> None:
    venv = face.VecCheckNan(face.DummyVecEnv([NanEnv] * 2), raise_exception=True)
    venv.reset()
    with pytest.raises(shoal.errors.BadObservation, match=r"the observation of env 1 is nan at \[1\].*the env itself"):
        venv.step(np.array(NANS["observation"], np.float32))
    with pytest.raises(shoal.errors.BadObservation, match=r"the action of env 0 is nan.*the policy"):
        venv.step(np.array(NANS["action"], np.float32))
    venv.close()


# ---- VecMonitor ---------------------------------------------------------------------------------------------


def rows(file: Path) -> tuple[dict[str, Any], list[str], list[list[str]]]:
    about, header, *lines = file.read_text().splitlines()
    return json.loads(about[1:]), header.split(","), [line.split(",") for line in lines]


@pytest.mark.parametrize("given", ["run", "run.monitor.csv", "."])
def test_monitor_files(tmp_path: Path, given: str) -> None:
    found = []
    for of, folder in ((face, tmp_path / "ours"), (sb3, tmp_path / "theirs")):
        folder.mkdir()
        fns = [lambda length=length: NoteworthyEnv({"score": 4}, length) for length in (2, 3)]
        venv = of.VecMonitor(of.DummyVecEnv(fns), str(folder / given), info_keywords=("score",))
        venv.reset()
        for step in range(7):
            venv.step(np.array([step % 2, 0]))
        venv.close()
        (file,) = folder.iterdir()
        about, header, lines = rows(file)
        assert about["t_start"] > 0
        found.append((file.name, header, [(float(r), int(n), score) for r, n, _, score in lines]))
    assert found[0] == found[1]
    assert len(found[0][2]) == 5


def test_a_reset_begins_episodes_anew() -> None:
    for of in (sb3, face):
        venv = of.VecMonitor(of.DummyVecEnv([CountEnv] * 2))
        venv.reset()
        for _ in range(3):
            venv.step(np.ones(2, np.int64))
        venv.reset()
        infos = [venv.step(np.zeros(2, np.int64))[3] for _ in range(5)][-1]
        assert [(float(info["episode"]["r"]), int(info["episode"]["l"])) for info in infos] == [(15.0, 5)] * 2
        assert venv.episode_count == 2
        venv.close()


def test_a_monitor_of_monitored_envs_warns() -> None:
    for of in (sb3, face):
        venv = face.make_vec_env(CountEnv)
        with pytest.warns(UserWarning, match="Monitor"):
            of.VecMonitor(venv)
        venv.close()


def test_a_keyword_that_no_info_has() -> None:
    venv = face.VecMonitor(face.DummyVecEnv([lambda: CountEnv(1)]), info_keywords=("score",))
    venv.reset()
    with pytest.raises(KeyError, match="score"):
        venv.step(np.zeros(1, np.int64))
    venv.close()


# ---- VecVideoRecorder ---------------------------------------------------------------------------------------


def test_videos(tmp_path: Path) -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="videos need an encoder")

    class LargeEnv(CountEnv):
        def render(self) -> Any:
            return np.full((32, 48, 3), 20 * self.steps, np.uint8)

    inner = face.VecNormalize(face.DummyVecEnv([lambda: LargeEnv(render_mode="rgb_array")] * 3))
    venv = face.VecVideoRecorder(inner, str(tmp_path / "videos"), lambda step: step in (0, 20), 6, "fish")
    assert isinstance(venv, sb3.VecVideoRecorder)
    venv.reset()
    for _ in range(30):
        venv.step(np.zeros(3, np.int64))
    venv.close()
    files = sorted((tmp_path / "videos").iterdir())
    assert [file.name for file in files] == ["fish-step-0-to-step-6.mp4", "fish-step-20-to-step-26.mp4"]
    for file in files:
        frames, seconds = ffmpeg.count_frames_and_secs(str(file))
        assert frames == 7
        assert frames / seconds == pytest.approx(CountEnv.metadata["render_fps"], rel=0.05)
        size = next(ffmpeg.read_frames(str(file)))["size"]
        assert size == (96, 64)


def test_videos_need_images(tmp_path: Path) -> None:
    venv = face.DummyVecEnv([CountEnv])
    with pytest.raises(ValueError, match="rgb_array"):
        face.VecVideoRecorder(venv, str(tmp_path), lambda step: True)
    venv.close()

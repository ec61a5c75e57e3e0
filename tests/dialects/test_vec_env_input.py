"""What new users pass in: errors that say what to do, and nothing that is tried out behind their backs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from envs import CountEnv
from shoal.dialects import baselines, sb3
from shoal.wrappers import Normalize, RecordVideo, wrap


class Noted(CountEnv):
    """Leaves a trace of every env that is made and of every step."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder
        self.note("made")

    def note(self, what: str) -> None:
        with open(self.folder / what, "a") as file:
            file.write("x")

    def step(self, action: Any) -> Any:
        self.note("stepped")
        return super().step(action)


@pytest.mark.parametrize("cls", [sb3.SubprocVecEnv, sb3.DummyVecEnv, baselines.SubprocVecEnv])
def test_nothing_is_tried_out_behind_ones_back(cls: Any, tmp_path: Path) -> None:
    envs = cls([lambda: Noted(tmp_path)] * 3)
    assert (tmp_path / "made").read_text() == "xxx"
    assert not (tmp_path / "stepped").exists()
    envs.close()


class Mortal(CountEnv):
    """Raises at its third step."""

    def step(self, action: Any) -> Any:
        if self.steps == 2:
            raise RuntimeError("simulator lost")
        return super().step(action)


@pytest.mark.parametrize("options", [{"on_error": "restart"}, {"step_timeout": 30.0}, {"recycle_after": 1 << 30}])
def test_auto_does_not_try_out_what_may_fail(options: dict[str, Any]) -> None:
    """The env would raise while it is measured."""
    with shoal.Pool(Mortal, 2, **options) as pool:
        assert pool.plan.backend == "processes"
        assert pool.plan.measured is None


@pytest.mark.parametrize("cls", [sb3.SubprocVecEnv, sb3.DummyVecEnv, baselines.SubprocVecEnv, baselines.DummyVecEnv])
@pytest.mark.parametrize("what", ["CartPole-v1", None, 5])
def test_no_list_of_functions(cls: Any, what: Any) -> None:
    with pytest.raises(TypeError, match="expected a list of functions"):
        cls(what)


@pytest.mark.parametrize(
    "make", [lambda env: sb3.make_vec_env(env, 2), lambda env: baselines.make_vec_env(env, "mujoco", 2, 0)]
)
def test_an_env_that_is_made_already(make: Any) -> None:
    with pytest.raises(shoal.BadEnv, match="cannot stand for several"):
        make(CountEnv())


@pytest.mark.parametrize("wrapper", [sb3.VecNormalize, sb3.VecCheckNan, sb3.VecMonitor, baselines.VecNormalize])
@pytest.mark.parametrize("what", [None, CountEnv, 5])
def test_no_vec_env(wrapper: Any, what: Any) -> None:
    with pytest.raises(TypeError, match="goes around a VecEnv"):
        wrapper(what)


def test_a_gymnasium_vector_env_is_no_vec_env() -> None:
    envs = shoal.make("CartPole-v1", num_envs=2, backend="serial")
    with pytest.raises(TypeError, match=r"use shoal\.wrappers\.wrap"):
        sb3.VecFrameStack(envs, 2)
    with pytest.raises(TypeError, match="goes around a VecEnv"):
        sb3.VecNormalize(gymnasium.make("CartPole-v1"))
    envs.close()


@pytest.mark.parametrize("api", ["gymnasium", "sb3", "baselines"])
def test_arguments_for_the_env(api: str) -> None:
    with pytest.raises(TypeError, match=r"unknown option 'render_mode'.*env_kwargs=\{'render_mode': ...\}"):
        shoal.make(CountEnv, num_envs=2, api=api, render_mode="rgb_array")
    envs = shoal.make(CountEnv, num_envs=2, api=api, backend="serial", env_kwargs={"render_mode": "rgb_array"})
    assert envs.render_mode == "rgb_array"
    envs.close()


def test_videos_of_envs_that_make_no_images(tmp_path: Path) -> None:
    envs = shoal.make(CountEnv, num_envs=2, backend="serial")
    with pytest.raises(ValueError, match="env_kwargs="):
        wrap(envs, RecordVideo(tmp_path, lambda step: True))
    envs.close()


def test_a_descriptor_is_no_path() -> None:
    """`open` would take its number, and close it."""
    reader, writer = os.pipe()
    with pytest.raises(TypeError):
        Normalize.load(reader)  # type: ignore[arg-type]
    os.write(writer, b"x")
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    os.close(writer)


def test_other_shapes_get_no_hint_about_bounds() -> None:
    class Wide(CountEnv):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)

    with pytest.raises(shoal.SpaceMismatch, match="env 1") as caught:
        sb3.DummyVecEnv([CountEnv, Wide])
    assert "observation_mode" not in str(caught.value)

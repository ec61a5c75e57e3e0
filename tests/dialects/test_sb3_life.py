"""The Stable-Baselines3 face from the first step to the end: what is pending, what fails, and what is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("stable_baselines3", reason="these tests compare with Stable-Baselines3")

from stable_baselines3.common import vec_env as sb3

import shoal
from contract.lockstep import assert_same
from dialects.sb3_envs import (
    RGB,
    FragileEnv,
    short,
)
from dialects.sb3_kit import EnvFn, zeros
from envs import SPACES, CountEnv, FailEnv, SpaceEnv
from shoal.dialects import sb3 as face

# ---- the state of a step ------------------------------------------------------------------------------------


def test_reset_cancels_a_step(make: Callable[[list[EnvFn]], Any]) -> None:
    venv = make([CountEnv] * 3)
    venv.seed(1)
    venv.reset()
    venv.step_async(zeros() + 1)
    venv.seed(20)
    assert venv.reset().tolist() == [[20, 0, 0], [21, 0, 0], [22, 0, 0]]
    if not isinstance(venv, face.DummyVecEnv):  # which steps when it is waited for, as SB3's does
        with pytest.raises(shoal.errors.NothingPending):
            venv.step_wait()
    assert venv.step(zeros())[1].tolist() == [1, 1, 1]
    venv.close()


def test_a_second_step_while_one_is_pending(venv: Any) -> None:
    venv.reset()
    venv.step_async(zeros())
    # A DummyVecEnv takes the last actions, as SB3's does.
    for again in () if isinstance(venv, face.DummyVecEnv) else (venv.step_async, venv.step):
        with pytest.raises(shoal.ShoalError, match="step_wait"):
            again(zeros())
    assert venv.step_wait()[1].tolist() == [1, 1, 1]


def test_a_step_before_the_first_reset(make: Callable[[list[EnvFn]], Any]) -> None:
    venv = make([short("CartPole-v1")] * 2)
    with pytest.raises(gymnasium.error.ResetNeeded):
        venv.step(zeros(2))
    venv.reset()
    venv.step(zeros(2))
    venv.close()


class Louder:
    """Half of a step, overridden: rewards a thousand higher."""

    def step_wait(self) -> Any:
        obs, rewards, dones, infos = super().step_wait()  # type: ignore[misc]
        return obs, rewards + 1000, dones, infos


class Bolder:
    """The other half: all take action 1."""

    def step_async(self, actions: Any) -> None:
        super().step_async(np.ones_like(actions))  # type: ignore[misc]


@pytest.mark.parametrize("half", [Louder, Bolder])
def test_subclasses_that_override_half_of_a_step(half: type) -> None:
    rewards = []
    for base in (face.DummyVecEnv, sb3.DummyVecEnv):
        venv = type("Mine", (half, base), {})([CountEnv] * 2)
        venv.reset()
        rewards.append(venv.step(zeros(2))[1].tolist())
        venv.close()
    assert rewards[0] == rewards[1]


# ---- the end ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left_behind")
def test_one_that_is_let_go_closes_itself(make: Callable[[list[EnvFn]], Any]) -> None:
    venv = face.VecNormalize(face.VecFrameStack(make([CountEnv] * 3), 2))
    venv.reset()
    del venv
    gc.collect()


# ---- faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dies", [False, True], ids=["raises", "dies"])
def test_restart(dies: bool) -> None:
    fns = [FragileEnv] * 3 + [partial(FragileEnv, dies)]
    venv = face.SubprocVecEnv(fns, num_workers=4, on_error="restart")
    venv.seed(0)
    venv.reset()
    before, *_ = venv.step(zeros(4))
    obs, rewards, dones, infos = venv.step(np.array([0, 0, 0, 3]))
    assert dones.tolist() == [False, False, False, True]
    assert rewards.tolist() == [2, 2, 2, 0]
    lost = infos[3]
    assert lost["TimeLimit.truncated"] is True
    np.testing.assert_array_equal(lost["terminal_observation"], before[3])
    assert lost["shoal_restart"]["cause"] == ("died" if dies else "raised")
    assert lost["shoal_restart"]["culprit"] == 3
    assert obs[3, 1:].tolist() == [0, 0]
    assert all("shoal_restart" not in info for info in (*infos[:3], *venv.reset_infos))
    assert venv.step(zeros(4))[1].tolist() == [3, 3, 3, 1]
    venv.close()


# ---- bad input ----------------------------------------------------------------------------------------------


def same_env_for_all() -> list[EnvFn]:
    env = CountEnv()
    return [CountEnv, lambda: env, lambda: env, CountEnv]


def same_env_behind_wrappers() -> list[EnvFn]:
    env = CountEnv()
    wrapped = [partial(gymnasium.wrappers.TimeLimit, env, steps) for steps in (3, 4)]
    return [CountEnv, *wrapped, CountEnv]


@pytest.mark.parametrize("fns", [same_env_for_all, same_env_behind_wrappers])
def test_envs_that_are_one_and_the_same(fns: Callable[[], list[EnvFn]]) -> None:
    with pytest.raises(ValueError):
        sb3.DummyVecEnv(fns())
    with pytest.raises(ValueError, match="env 2 is the same object as env 1") as caught:
        face.DummyVecEnv(fns())
    assert isinstance(caught.value, shoal.errors.BadEnv)
    assert getattr(caught.value, "env_id", 2) == 2


@pytest.mark.usefixtures("nothing_left_behind")
def test_render_modes_that_differ(make: Callable[[list[EnvFn]], Any]) -> None:
    with pytest.raises(ValueError, match="env 1 has render_mode"):
        make([CountEnv, RGB])


@pytest.mark.parametrize(
    ("fns", "error"),
    [
        ([], (shoal.errors.BadEnv, IndexError)),  # each as SB3's class
        ([CountEnv()], shoal.errors.BadEnv),
        ([CountEnv, None], shoal.errors.BadEnv),
        ([lambda: None], (TypeError, AttributeError)),
        ([partial(FailEnv, "constructor")], shoal.EnvError),
    ],
    ids=["none", "an env", "None", "no env", "raises"],
)
@pytest.mark.usefixtures("nothing_left_behind")
def test_bad_functions(make: Callable[[list[EnvFn]], Any], fns: Any, error: Any) -> None:
    with pytest.raises(error):
        make(fns)


@pytest.mark.parametrize(
    "options",
    [{"start_method": "telepathy"}, {"autoreset": "next_step"}, {"batch_size": 1}, {"on_error": "shrug"}],
    ids=str,
)
@pytest.mark.usefixtures("nothing_left_behind")
def test_options_that_a_vec_env_cannot_have(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        face.SubprocVecEnv([CountEnv] * 2, num_workers=1, **options)


def test_actions_as_a_list_and_out_of_a_boxs_bounds() -> None:
    fns = [short("Pendulum-v1")] * 2
    ours, theirs = face.DummyVecEnv(fns), sb3.DummyVecEnv(fns)
    for venv in (ours, theirs):
        venv.seed(0)
        venv.reset()
    for actions in ([[0.5], [1.5]], np.array([[7.0], [-9.0]], np.float64)):
        assert_same(ours.step(actions)[:3], theirs.step(actions)[:3])
    ours.close()


def test_policies_answer_multi_binary_with_floats() -> None:
    fns = [partial(SpaceEnv, SPACES["box"], SPACES["multi binary"])] * 2
    ours, theirs = face.DummyVecEnv(fns), sb3.DummyVecEnv(fns)
    actions = np.array([[0, 1, 0, 1], [1, 1, 0, 0]], np.float32)
    for venv in (ours, theirs):
        venv.seed(0)
        venv.reset()
        assert venv.step(actions)[0].shape == (2, 3)
    with pytest.raises(shoal.errors.BadAction):
        ours.step(actions / 2)
    ours.close()

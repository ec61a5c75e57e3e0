"""What is wrong with a class is said in the user's own words and lines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import shoal
from compiled.envs import CartPole
from shoal import compiled

needs_numba = pytest.importorskip("numba", reason="compiled envs need numba")

HERE = Path(__file__)


def line_of(text: str) -> str:
    """file:line of the only line here that ends with this comment."""
    lines = HERE.read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return f"{HERE}:{number}"


def make(env: Any, **options: Any) -> shoal.Pool:
    return shoal.Pool(env, 4, backend="compiled", **options)


def unmarked(x: float) -> float:
    return x + 1.0


@compiled.function
def faulty_helper(x: float) -> Any:
    return x + "text"  # type: ignore[operator]  # in a helper


class NoField(CartPole):
    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        state.speed += 1.0  # no such field
        return 1.0, False


class BadType(CartPole):
    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.x = "left" + 1.0  # type: ignore[operator]  # no such sum


class NotMarked(CartPole):
    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0] = unmarked(state.x)  # not marked


class InHelper(CartPole):
    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0] = faulty_helper(state.x)


class NoName(CartPole):
    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        return nowhere, False  # type: ignore[name-defined]  # noqa: F821  # no such name


class OnlyReward(CartPole):
    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        return 1.0


class ThreeThings(CartPole):
    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        return 1.0, False, False


CONFIG = {"force": 10.0}


class BadGlobal(CartPole):
    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        return CONFIG["force"], False  # a dict


@pytest.mark.parametrize(
    ("env", "message", "where"),
    [
        (
            NoField,
            "NoField.step cannot be compiled: the state has no field 'speed', its fields are x,",
            "no such field",
        ),
        (BadType, "BadType.reset cannot be compiled: ", "no such sum"),
        (NotMarked, "it calls 'unmarked', which is no compiled function: put @compiled.function above", "not marked"),
        (InHelper, "InHelper.observe cannot be compiled: there is no add(float64, str)", "in a helper"),
        (NoName, "there is no name 'nowhere'", "no such name"),
        (BadGlobal, "'CONFIG' is a dict, which compiled code cannot use", "a dict"),
    ],
)
def test_a_line_that_cannot_be_compiled_is_shown(env: Any, message: str, where: str) -> None:
    with pytest.raises(shoal.BadEnv, match=re.escape(message)) as caught:
        make(env)
    text = str(caught.value)
    assert line_of(where) in text
    assert "\n" not in text
    assert len(text) < 500


@pytest.mark.parametrize("env", [OnlyReward, ThreeThings])
def test_a_wrong_return_is_named(env: Any) -> None:
    with pytest.raises(shoal.BadEnv, match=r"step must return \(reward, terminated\), a number and a bool, found"):
        make(env)
    plain = compiled.as_gymnasium(env)
    plain.reset(seed=0)
    with pytest.raises(shoal.BadEnv, match=r"step must return \(reward, terminated\), found"):
        plain.step(0)


def without(name: str) -> Any:
    body = {key: value for key, value in vars(CartPole).items() if key != name and not key.startswith("__")}
    return type("Partial", (compiled.Env,), body)


@pytest.mark.parametrize("method", ["reset", "step", "observe"])
def test_a_missing_method_is_named(method: str) -> None:
    with pytest.raises(shoal.BadEnv, match=rf"Partial has no {method}: it needs a static method {method}\(state"):
        make(without(method))
    with pytest.raises(shoal.BadEnv, match=f"Partial has no {method}"):
        shoal.Pool(without(method), 2, backend="serial")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": lambda state, action, rng: (1.0, False)}, "put @staticmethod above it"),
        ({"step": staticmethod(lambda state, action: (1.0, False))}, r"expected step\(state, action, rng\)"),
        ({"observation_space": None}, "observation_space: expected a Gymnasium space"),
        ({"action_space": spaces.Text(3)}, "holds numbers"),
        ({"num_agents": 0}, "num_agents: expected a whole number"),
        ({"max_episode_steps": -1}, "max_episode_steps"),
        ({"state": {"x": "words"}}, r"state\['x'\]: expected float"),
        ({"state": {"data": float}}, "a field cannot be named 'data'"),
        ({"params": {"x": 1.0}}, "'x' is in `state` and in `params`"),
        ({"params": {"who": "me"}}, r"params\['who'\]: expected a number"),
    ],
)
def test_what_a_class_says_is_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(shoal.BadEnv, match=message):
        make(type("Odd", (CartPole,), change))


def test_no_class_at_all() -> None:
    with pytest.raises(shoal.BadEnv, match=r"derive from shoal.compiled.Env"):
        make(lambda: None)


class Reaches(CartPole):
    """Writes beyond its arrays when told so."""

    state = {"cells": (int, 3), "x": float}
    params = {"at": 0}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.cells[0] = 1

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        if action == 1:
            state.cells[state.at] = 2  # beyond
        return 1.0, False

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0 if state.at < 100 else state.at] = 1.0


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_debug_mode_finds_what_is_out_of_range(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"env_kwargs": {"debug": True}} if by == "argument" else {}
    if by == "environment":
        monkeypatch.setenv("SHOAL_COMPILED_DEBUG", "1")
    with make(Reaches, **options) as pool:
        pool.reset(seed=0)
        assert pool.step(np.ones(4, int)).reward.tolist() == [1.0] * 4
        pool.set_attr("at", [0, 1, 7, 2])
        with pytest.raises(shoal.EnvError, match="env 2") as caught:
            pool.step(np.ones(4, int))
        assert isinstance(caught.value, IndexError)
        assert "state.cells[state.at] = 2" in caught.value.remote_traceback
        pool.set_attr("at", 0)
        pool.reset([2])
        assert pool.step(np.ones(4, int)).reward.tolist() == [1.0] * 4
        pool.set_attr("at", [0, 0, 0, 100])
        with pytest.raises(shoal.EnvError, match=r"env 3.* observe"):
            pool.step(np.zeros(4, int))


class Raises(CartPole):
    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        if action == 1:
            raise ValueError("enough")
        return 1.0, False


@pytest.mark.parametrize("num_workers", [1, 3])
def test_an_env_that_raises_is_named_and_the_others_go_on(num_workers: int) -> None:
    with make(Raises, num_workers=num_workers) as pool:
        pool.reset(seed=0)
        with pytest.raises(shoal.EnvError, match=r"env 1.*debug"):
            pool.step(np.array([0, 1, 1, 0]))
        with pytest.raises(shoal.ResetNeeded):
            pool.step(np.zeros(4, int))
        pool.reset([1, 2])
        assert pool.step(np.zeros(4, int)).episode_length.tolist() == [2, 1, 1, 2]
        pool.send(np.array([1, 0]), [0, 3])
        with pytest.raises(shoal.EnvError, match="env 0"):
            pool.wait_reset([0, 3])
    with make(Raises, env_kwargs={"debug": True}) as pool:
        pool.reset(seed=0)
        with pytest.raises(ValueError, match="enough"):
            pool.step(np.array([0, 1, 1, 0]))


class NotANumber(CartPole):
    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0] = state.gravity


def test_check_nan() -> None:
    with make(NotANumber, check_nan=True) as pool:
        pool.reset(seed=0)
        pool.set_attr("gravity", [1.0, np.nan, 1.0, 1.0])
        with pytest.raises(shoal.EnvError, match="env 1: observation is nan"):
            pool.step(np.zeros(4, int))

"""The plan of a pool says whether lanes are stepped together, and which line stopped that."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import shoal
from shoal import compiled

pytest.importorskip("numba", reason="compiled envs need numba")


class Base(compiled.Env):
    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)
    max_episode_steps = 10
    state = {"x": float}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.x = compiled.uniform(rng)

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        state.x = state.x + 0.1 * action
        return state.x, False

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0] = state.x


class Loops(Base):
    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        while state.x > 0.5:  # the line
            state.x = state.x - 0.3
        return state.x, False


class Raises(Base):
    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        if state.x > 100.0:
            raise ValueError("too far")
        return state.x, False


class Board(Base):
    state = {"x": float, "cells": (int, (3,))}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (Base, r"single precision, \d+ lanes at once"),
        (Loops, "lane by lane: Loops.step has a loop of unknown length \\(.*test_report.py:"),
        (Raises, "lane by lane: Raises.step may raise \\(.*raise ValueError"),
        (Board, "lane by lane: the field 'cells' is an array"),
    ],
)
def test_the_plan_names_the_line(env: Any, words: str) -> None:
    with shoal.Pool(env, 20, backend="compiled", env_kwargs={"precision": "single"}) as pool:
        assert re.search(words, pool.plan.reason), pool.plan.reason
        pool.reset(seed=0)
        for _ in range(10):
            answer = pool.step(np.ones(20, int))
        assert answer.truncated.all()

"""Envs of every shape, written to be compiled."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from shoal import compiled

LIMIT = 0.20943951023931953


class CartPole(compiled.Env):
    """Numbers as state, an array observed, params."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)
    max_episode_steps = 30
    state = {"x": float, "v": float, "theta": float, "omega": float}
    params = {"gravity": 9.8, "length": 0.5}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.x = compiled.uniform(rng, -0.05, 0.05)
        state.v = compiled.uniform(rng, -0.05, 0.05)
        state.theta = compiled.uniform(rng, -0.05, 0.05)
        state.omega = compiled.uniform(rng, -0.05, 0.05)

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        force = 10.0 if action == 1 else -10.0
        cos, sin = math.cos(state.theta), math.sin(state.theta)
        pole = 0.1 * state.length
        temp = (force + pole * state.omega * state.omega * sin) / 1.1
        alpha = (state.gravity * sin - cos * temp) / (state.length * (4.0 / 3.0 - 0.1 * cos * cos / 1.1))
        state.x += 0.02 * state.v
        state.v += 0.02 * (temp - pole * alpha * cos / 1.1)
        state.theta += 0.02 * state.omega
        state.omega += 0.02 * alpha
        return 1.0, abs(state.x) > 2.4 or abs(state.theta) > LIMIT

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0] = state.x
        obs[1] = state.v
        obs[2] = state.theta
        obs[3] = state.omega


@compiled.function
def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


@compiled.function
def swing(angle: float, torque: float) -> float:
    return 0.1 * math.sin(angle) + clip(torque, -1.0, 1.0) * 0.05


class Nested(compiled.Env):
    """Nested spaces, arrays in the state, helpers, every kind of random number, no limit of steps."""

    observation_space = spaces.Dict(
        {
            "count": spaces.Discrete(1000),
            "grid": spaces.Box(0, 255, (3, 2), np.uint8),
            "number": spaces.Box(-np.inf, np.inf, (), np.float64),
        }
    )
    action_space = spaces.Tuple((spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(3), spaces.MultiBinary(2)))
    state = {"angle": float, "grid": (np.uint8, (3, 2)), "count": int, "odd": bool, "small": np.int16}
    params = {"weights": np.array([1.0, 2.0, 0.0, 0.5])}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.angle = compiled.normal(rng, 1.0, 0.5)
        for i in range(3):
            for j in range(2):
                state.grid[i, j] = compiled.integer(rng, 0, 256)

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        push, choice, bits = action
        state.angle += swing(state.angle, push[0] * push[1])
        state.count += 1
        state.small = compiled.choice(rng, state.weights)
        state.odd = bits[0]
        state.grid[choice, 0] = state.small
        return state.angle * 0.5, compiled.uniform(rng) < 0.1

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        count, grid, number = obs
        count[0] = state.count
        number[0] = state.angle + (1.0 if state.odd else 0.0)
        for i in range(3):
            for j in range(2):
                grid[i, j] = state.grid[i, j]


class Tag(compiled.Env):
    """Three agents on a line; the first is to be caught."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3)
    max_episode_steps = 12
    num_agents = 3
    state = {"at": (float, 3)}
    params = {"speed": 0.25}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        for i in range(3):
            state.at[i] = compiled.uniform(rng, -2.0, 2.0)

    @staticmethod
    def step(state: Any, action: Any, reward: Any, rng: Any) -> Any:
        caught = False
        for i in range(3):
            state.at[i] += (action[i] - 1) * state.speed
        for i in range(1, 3):
            distance = abs(state.at[i] - state.at[0])
            reward[i] = -distance
            if distance < 0.1:
                caught = True
        reward[0] = -1.0 if caught else 0.1
        return caught

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        for i in range(3):
            obs[i, 0] = state.at[i]
            obs[i, 1] = state.at[0] - state.at[i]


class Sized(compiled.Env):
    """Spaces and state by its arguments; Box actions without a shape."""

    def __init__(self, size: int = 3):
        self.size = size
        self.observation_space = spaces.MultiDiscrete([size + 1] * size)
        self.action_space = spaces.Box(-1.0, 1.0, (), np.float32)
        self.state = {"cells": (int, size), "total": float}  # type: ignore[assignment]
        self.max_episode_steps = 4 * size

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.cells[0] = 1

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        for i in range(len(state.cells) - 1, 0, -1):
            state.cells[i] = state.cells[i - 1]
        state.cells[0] = compiled.integer(rng, 0, len(state.cells) + 1)
        state.total += action * 0.1
        return action, state.total > 0.5

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        for i in range(len(state.cells)):
            obs[i] = state.cells[i]


ALL = (CartPole, Nested, Tag, Sized)

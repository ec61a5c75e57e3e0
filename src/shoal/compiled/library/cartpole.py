"""CartPole-v1: a pole on a cart, pushed left or right so that it stays upright."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from shoal import compiled

POLE_MASS = 0.1
MASS = POLE_MASS + 1.0
TAU = 0.02
X_LIMIT = 2.4
THETA_LIMIT = 12 * 2 * math.pi / 360
HIGH = np.array([2 * X_LIMIT, np.inf, 2 * THETA_LIMIT, np.inf], np.float32)


class CartPole(compiled.Env):
    """Gymnasium's CartPole. `length` is half of the pole's. `sutton_barto_reward`: 0 for a step, -1 for the last."""

    observation_space = spaces.Box(-HIGH, HIGH, dtype=np.float32)
    action_space = spaces.Discrete(2)
    max_episode_steps = 500
    state = {"x": float, "v": float, "theta": float, "omega": float}
    params = {"gravity": 9.8, "length": 0.5, "force_mag": 10.0, "step_reward": 1.0, "last_reward": 1.0}

    def __init__(self, sutton_barto_reward: bool = False):
        if sutton_barto_reward:
            self.params = {**self.params, "step_reward": 0.0, "last_reward": -1.0}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.x = compiled.uniform(rng, -0.05, 0.05)
        state.v = compiled.uniform(rng, -0.05, 0.05)
        state.theta = compiled.uniform(rng, -0.05, 0.05)
        state.omega = compiled.uniform(rng, -0.05, 0.05)

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        force = state.force_mag if action == 1 else -state.force_mag
        pole_moment = POLE_MASS * state.length
        x, v, theta, omega = state.x, state.v, state.theta, state.omega
        cos, sin = math.cos(theta), math.sin(theta)
        push = (force + pole_moment * (omega * omega) * sin) / MASS
        turn = (state.gravity * sin - cos * push) / (state.length * (4.0 / 3.0 - POLE_MASS * (cos * cos) / MASS))
        pull = push - pole_moment * turn * cos / MASS

        x = x + TAU * v
        v = v + TAU * pull
        theta = theta + TAU * omega
        omega = omega + TAU * turn
        state.x, state.v, state.theta, state.omega = x, v, theta, omega

        terminated = x < -X_LIMIT or x > X_LIMIT or theta < -THETA_LIMIT or theta > THETA_LIMIT
        return state.last_reward if terminated else state.step_reward, terminated

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0], obs[1], obs[2], obs[3] = state.x, state.v, state.theta, state.omega

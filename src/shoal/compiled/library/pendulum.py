"""Pendulum-v1: swing a pendulum up by a torque that is too weak to lift it, and hold it there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from shoal import compiled
from shoal.compiled.library.helpers import square, square_single

MAX_SPEED = 8.0
MAX_TORQUE = np.float32(2.0)
TORQUE_COST = np.float32(0.001)
TORQUE_GAIN = np.float32(3.0)
DT = 0.05
HIGH = np.array([1.0, 1.0, MAX_SPEED], np.float32)


class Pendulum(compiled.Env):
    """Gymnasium's Pendulum; `g` is the gravity."""

    observation_space = spaces.Box(-HIGH, HIGH, dtype=np.float32)
    action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)
    max_episode_steps = 200
    state = {"theta": float, "omega": float}
    params = {"g": 10.0}

    def __init__(self, g: float = 10.0):
        self.params = {"g": float(g)}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.theta = compiled.uniform(rng, -math.pi, math.pi)
        state.omega = compiled.uniform(rng, -1.0, 1.0)

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        theta, omega = state.theta, state.omega
        torque = min(max(np.float32(action[0]), -MAX_TORQUE), MAX_TORQUE)
        angle = ((theta + math.pi) % (2 * math.pi)) - math.pi
        # Gymnasium's torque is a float32, and so are the products with it.
        torque_cost = TORQUE_COST * square_single(torque)
        cost = square(angle) + 0.1 * square(omega) + torque_cost

        omega = omega + (3.0 * state.g / 2.0 * math.sin(theta) + TORQUE_GAIN * torque) * DT
        omega = min(max(omega, -MAX_SPEED), MAX_SPEED)
        state.theta = theta + omega * DT
        state.omega = omega
        return -cost, False

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0], obs[1], obs[2] = math.cos(state.theta), math.sin(state.theta), state.omega

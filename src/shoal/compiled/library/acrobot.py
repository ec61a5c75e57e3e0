"""Acrobot-v1: two links in a chain, swung up by a torque at the joint between them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from shoal import compiled
from shoal.compiled.library.helpers import single, square

DT = 0.2
GRAVITY = 9.8
CENTER = 0.5  # of a link; its length, mass and moment of inertia are all 1
MAX_OMEGA_1, MAX_OMEGA_2 = 4 * math.pi, 9 * math.pi
HIGH = np.array([1.0, 1.0, 1.0, 1.0, MAX_OMEGA_1, MAX_OMEGA_2], np.float32)


@compiled.function
def accelerations(theta1: float, theta2: float, omega1: float, omega2: float, torque: float) -> Any:
    """Return the accelerations of the two angles, by the equations of Sutton and Barto's book."""
    cos2, sin2 = math.cos(theta2), math.sin(theta2)
    d1 = 0.25 + (1.25 + cos2) + 1.0 + 1.0
    d2 = (0.25 + CENTER * cos2) + 1.0
    phi2 = CENTER * GRAVITY * math.cos(theta1 + theta2 - math.pi / 2)
    phi1 = -CENTER * square(omega2) * sin2 - omega2 * omega1 * sin2
    phi1 = phi1 + 1.5 * GRAVITY * math.cos(theta1 - math.pi / 2) + phi2
    alpha2 = (torque + d2 / d1 * phi1 - CENTER * square(omega1) * sin2 - phi2) / (0.25 + 1.0 - square(d2) / d1)
    alpha1 = -(d2 * alpha2 + phi1) / d1
    return alpha1, alpha2


@compiled.function
def wrapped(angle: float) -> float:
    """Return the angle between -pi and pi."""
    while angle > math.pi:
        angle = angle - 2 * math.pi
    while angle < -math.pi:
        angle = angle + 2 * math.pi
    return angle


@compiled.function
def combined(start: float, k1: float, k2: float, k3: float, k4: float) -> float:
    """Return the end of a Runge-Kutta step from its four slopes."""
    return start + DT / 6.0 * (k1 + 2.0 * k2 + 2.0 * k3 + k4)


class Acrobot(compiled.Env):
    """Gymnasium's Acrobot, with the equations of the book and without noise."""

    observation_space = spaces.Box(-HIGH, HIGH, dtype=np.float32)
    action_space = spaces.Discrete(3)
    max_episode_steps = 500
    state = {"theta1": float, "theta2": float, "omega1": float, "omega2": float}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.theta1 = single(compiled.uniform(rng, -0.1, 0.1))
        state.theta2 = single(compiled.uniform(rng, -0.1, 0.1))
        state.omega1 = single(compiled.uniform(rng, -0.1, 0.1))
        state.omega2 = single(compiled.uniform(rng, -0.1, 0.1))

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        torque = action - 1.0
        half = DT / 2.0
        # Four slopes of a Runge-Kutta step: v are those of the angles, a those of the speeds.
        t1, t2, v1, v2 = state.theta1, state.theta2, state.omega1, state.omega2
        a1, a2 = accelerations(t1, t2, v1, v2, torque)
        v1b, v2b = v1 + half * a1, v2 + half * a2
        a1b, a2b = accelerations(t1 + half * v1, t2 + half * v2, v1b, v2b, torque)
        v1c, v2c = v1 + half * a1b, v2 + half * a2b
        a1c, a2c = accelerations(t1 + half * v1b, t2 + half * v2b, v1c, v2c, torque)
        v1d, v2d = v1 + DT * a1c, v2 + DT * a2c
        a1d, a2d = accelerations(t1 + DT * v1c, t2 + DT * v2c, v1d, v2d, torque)

        theta1 = wrapped(combined(t1, v1, v1b, v1c, v1d))
        theta2 = wrapped(combined(t2, v2, v2b, v2c, v2d))
        state.theta1, state.theta2 = theta1, theta2
        state.omega1 = min(max(combined(v1, a1, a1b, a1c, a1d), -MAX_OMEGA_1), MAX_OMEGA_1)
        state.omega2 = min(max(combined(v2, a2, a2b, a2c, a2d), -MAX_OMEGA_2), MAX_OMEGA_2)

        # While the first link hangs below the bar, which is most often so, the second cannot reach it.
        terminated = abs(theta1) > 1.5 and -math.cos(theta1) - math.cos(theta2 + theta1) > 1.0
        return 0.0 if terminated else -1.0, terminated

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0], obs[1] = math.cos(state.theta1), math.sin(state.theta1)
        obs[2], obs[3] = math.cos(state.theta2), math.sin(state.theta2)
        obs[4], obs[5] = state.omega1, state.omega2

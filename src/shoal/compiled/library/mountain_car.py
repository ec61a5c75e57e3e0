"""MountainCar-v0: a car in a valley, too weak to drive out of it without a run-up."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from shoal import compiled

__all__ = ["MountainCar"]

MIN_POSITION, MAX_POSITION = -1.2, 0.6
MAX_SPEED = 0.07
GOAL = 0.5
FORCE = 0.001
GRAVITY = 0.0025
LOW = np.array([MIN_POSITION, -MAX_SPEED], np.float32)
HIGH = np.array([MAX_POSITION, MAX_SPEED], np.float32)


class MountainCar(compiled.Env):
    """As Gymnasium's; `goal_velocity` is the speed that the car must have at the goal."""

    observation_space = spaces.Box(LOW, HIGH, dtype=np.float32)
    action_space = spaces.Discrete(3)
    max_episode_steps = 200
    state = {"position": float, "velocity": float}
    params = {"goal_velocity": 0.0}

    def __init__(self, goal_velocity: float = 0.0):
        self.params = {"goal_velocity": float(goal_velocity)}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.position = compiled.uniform(rng, -0.6, -0.4)
        state.velocity = 0.0

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        position = state.position
        velocity = state.velocity + ((action - 1) * FORCE + math.cos(3.0 * position) * -GRAVITY)
        velocity = min(max(velocity, -MAX_SPEED), MAX_SPEED)
        position = min(max(position + velocity, MIN_POSITION), MAX_POSITION)
        if position == MIN_POSITION and velocity < 0.0:
            velocity = 0.0
        state.position, state.velocity = position, velocity
        return -1.0, position >= GOAL and velocity >= state.goal_velocity

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0], obs[1] = state.position, state.velocity

"""MountainCar-v0 and MountainCarContinuous-v0: a car in a valley, too weak to drive out of it without a run-up."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from shoal import compiled
from shoal.compiled.library.helpers import single

MIN_POSITION, MAX_POSITION = -1.2, 0.6
MAX_SPEED = 0.07
GOAL, CONTINUOUS_GOAL = 0.5, 0.45
FORCE, POWER = 0.001, 0.0015
GRAVITY = 0.0025
LOW = np.array([MIN_POSITION, -MAX_SPEED], np.float32)
HIGH = np.array([MAX_POSITION, MAX_SPEED], np.float32)


class MountainCar(compiled.Env):
    """Gymnasium's MountainCar; `goal_velocity` is the speed that the car must have at the goal."""

    observation_space = spaces.Box(LOW, HIGH, dtype=np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(3)
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


class MountainCarContinuous(MountainCar):
    """Gymnasium's MountainCarContinuous: the same car with a pedal in place of a switch.

    With NumPy 2, Gymnasium has a float64 state until the first step of an episode is done, and a float32 state from
    then on; `wide` says which. A force within its bounds is a float32, and one that was cut a float64.
    """

    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    max_episode_steps = 999
    state = {"position": float, "velocity": float, "wide": bool}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.position = compiled.uniform(rng, -0.6, -0.4)
        state.velocity = 0.0
        state.wide = True

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        wide, position, velocity = state.wide, state.position, state.velocity
        force = np.float64(action[0])

        slope = GRAVITY * math.cos(3.0 * position if wide else single(3.0 * position))
        if -1.0 <= force <= 1.0:
            gain = single(single(force * single(POWER)) - single(slope))
        else:
            gain = math.copysign(POWER, force) - slope
            gain = gain if wide else single(gain)

        # Bounds have the type of the state, too.
        top_speed = MAX_SPEED if wide else single(MAX_SPEED)
        left, right = (MIN_POSITION, MAX_POSITION) if wide else (single(MIN_POSITION), single(MAX_POSITION))
        velocity = velocity + gain if wide else single(velocity + gain)
        velocity = min(max(velocity, -top_speed), top_speed)
        position = position + velocity if wide else single(position + velocity)
        position = min(max(position, left), right)
        if position == left and velocity < 0.0:
            velocity = 0.0

        goal = CONTINUOUS_GOAL if wide else single(CONTINUOUS_GOAL)
        goal_velocity = state.goal_velocity if wide else single(state.goal_velocity)
        terminated = position >= goal and velocity >= goal_velocity
        state.position, state.velocity, state.wide = single(position), single(velocity), False
        return (100.0 if terminated else 0.0) - force * force * 0.1, terminated

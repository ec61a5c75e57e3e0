"""Gymnasium's classic control: CartPole, Pendulum, MountainCar, Acrobot. They round as Gymnasium's, to the last bit."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from shoal import compiled

# If a square lies so close to the middle of two floats that pow may round either way (within 0.015 units in the last
# place; glibc's pow errs by less than 0.01), then its rounding error times this reaches the next float.
CLOSE = 1.0 + 2.0**-5


def same(x: Any) -> Any:
    """Return x: in single precision it is a float32 already."""
    return x


def product(x: Any) -> Any:
    """Return the square of x."""
    return x * x


@compiled.function(single=same)
def single(x: float) -> Any:
    """Return the float32 nearest to x, as a float64.

    A sum or product of two such numbers, rounded once more, is that of float32 arithmetic: float64 is wide enough for
    the first rounding to do no harm.
    """
    return np.float64(np.float32(x))


@compiled.function(single=product)
def square(x: float) -> Any:
    """Return x ** 2 as the C library's pow rounds it, which once in a thousand times is not as x * x rounds.

    They differ only if the exact square lies about in the middle of two floats. The rounding error shows that, and only
    then pow is called, which is slow.
    """
    product = x * x
    high = single(x)  # its square is exact
    lost = (high * high - product) + (x - high) * (x + high)
    if product + CLOSE * lost == product:
        return product
    return x ** (2.0 + 0.0 * x)  # a compiler would make x * x of a constant exponent


@compiled.function(single=product)
def square_single(x: Any) -> Any:
    """Return the square of a float32, in float32."""
    return x ** (np.float32(2.0) + np.float32(0.0) * x)


def box(*high: float) -> spaces.Box:
    """Return the space of float32 between these bounds and their negatives."""
    bounds = np.array(high, np.float32)
    return spaces.Box(-bounds, bounds, dtype=np.float32)


# ---- CartPole: a pole on a cart, pushed left or right so that it stays upright ---------------------------------

POLE_MASS = 0.1
MASS = POLE_MASS + 1.0
TAU = 0.02
X_LIMIT = 2.4
THETA_LIMIT = 12 * 2 * math.pi / 360


class CartPole(compiled.Env):
    """Gymnasium's CartPole. `length` is half of the pole's. `sutton_barto_reward`: 0 for a step, -1 for the last."""

    observation_space = box(2 * X_LIMIT, np.inf, 2 * THETA_LIMIT, np.inf)
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


# ---- Pendulum: swing it up by a torque that is too weak to lift it, and hold it there --------------------------

TOP_SPEED = 8.0
MAX_TORQUE = np.float32(2.0)
TORQUE_COST = np.float32(0.001)
TORQUE_GAIN = np.float32(3.0)
PENDULUM_DT = 0.05


class Pendulum(compiled.Env):
    """Gymnasium's Pendulum; `g` is the gravity."""

    observation_space = box(1.0, 1.0, TOP_SPEED)
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

        omega = omega + (3.0 * state.g / 2.0 * math.sin(theta) + TORQUE_GAIN * torque) * PENDULUM_DT
        omega = min(max(omega, -TOP_SPEED), TOP_SPEED)
        state.theta = theta + omega * PENDULUM_DT
        state.omega = omega
        return -cost, False

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0], obs[1], obs[2] = math.cos(state.theta), math.sin(state.theta), state.omega


# ---- MountainCar: a car in a valley, too weak to drive out of it without a run-up ------------------------------

MIN_POSITION, MAX_POSITION = -1.2, 0.6
MAX_SPEED = 0.07
GOAL, CONTINUOUS_GOAL = 0.5, 0.45
FORCE, POWER = 0.001, 0.0015
SLOPE = 0.0025
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
        velocity = state.velocity + ((action - 1) * FORCE + math.cos(3.0 * position) * -SLOPE)
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

        slope = SLOPE * math.cos(3.0 * position if wide else single(3.0 * position))
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


# ---- Acrobot: two links in a chain, swung up by a torque at the joint between them -----------------------------

DT = 0.2
GRAVITY = 9.8
CENTER = 0.5  # of a link; its length, mass and moment of inertia are all 1
MAX_OMEGA_1, MAX_OMEGA_2 = 4 * math.pi, 9 * math.pi


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


def wrapped_at_once(angle: Any) -> Any:
    """Do as `wrapped`, without a loop."""
    return angle - 2 * math.pi * math.floor(angle / (2 * math.pi) + 0.5)


@compiled.function(single=wrapped_at_once)
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

    observation_space = box(1.0, 1.0, 1.0, 1.0, MAX_OMEGA_1, MAX_OMEGA_2)
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

"""CartPole, Pendulum, the mountain cars and Acrobot: bit for bit as Gymnasium's, from any state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiled.library.kit import (
    PHYSICS,
    SAME_SINES,
    Physics,
    assert_same_numbers,
    chi_square_is_ordinary,
    ours,
    set_fields,
    theirs,
)
from shoal.compiled.library.classic_control import square, square_single

STATES = 2000
each = pytest.mark.parametrize("physics", PHYSICS, ids=lambda physics: physics.env_id)


def assert_same_step(physics: Physics, mine: Any, gym: Any, action: Any) -> tuple[bool, bool]:
    """Step both, and compare all that comes of it."""
    before = dict(zip(mine.state.dtype.names, mine.state.tolist(), strict=True))
    told = f"from {before} by {action}"
    obs, reward, terminated, truncated, _ = mine.step(action)
    gym_obs, gym_reward, gym_terminated, gym_truncated, _ = gym.step(action)
    assert_same_numbers(obs, gym_obs, told)
    assert_same_numbers(float(reward), float(gym_reward), told)
    assert (terminated, truncated) == (gym_terminated, gym_truncated), told
    after = physics.get(gym.unwrapped)
    for name, value in after.items():
        assert_same_numbers(np.float64(mine.state[name]), np.float64(value), f"{name}, {told}")
    if not SAME_SINES:
        set_fields(mine, after)  # so that small differences do not grow
    return terminated, truncated


@each
def test_steps_from_random_states(physics: Physics) -> None:
    rng = np.random.default_rng(0)
    mine, gym = ours(physics.env_id), theirs(physics.env_id).unwrapped
    mine.reset(seed=0)
    gym.reset(seed=0)
    ended = 0
    for _ in range(STATES):
        fields = physics.draw(rng)
        mine.reset()
        set_fields(mine, fields)
        physics.put(gym, fields)
        ended += assert_same_step(physics, mine, gym, physics.action(rng))[0]
    assert physics.env_id == "Pendulum-v1" or 0 < ended < STATES


@each
def test_whole_episodes(physics: Physics) -> None:
    rng = np.random.default_rng(1)
    mine, gym = ours(physics.env_id), theirs(physics.env_id)
    for seed in range(3):
        gym.reset(seed=seed)
        mine.reset(seed=seed)
        set_fields(mine, physics.get(gym.unwrapped))
        over = False
        while not over:
            over = any(assert_same_step(physics, mine, gym, physics.action(rng)))


@each
def test_spaces_and_length_are_gymnasiums(physics: Physics) -> None:
    mine, gym = ours(physics.env_id), theirs(physics.env_id)
    assert mine.observation_space == gym.observation_space
    assert mine.action_space == gym.action_space
    assert mine.definition.max_episode_steps == gym.spec.max_episode_steps


RESETS = {
    "CartPole-v1": dict.fromkeys(("x", "v", "theta", "omega"), (-0.05, 0.05)),
    "Pendulum-v1": {"theta": (-np.pi, np.pi), "omega": (-1, 1)},
    "MountainCar-v0": {"position": (-0.6, -0.4), "velocity": (0, 0)},
    "MountainCarContinuous-v0": {"position": (-0.6, -0.4), "velocity": (0, 0)},
    "Acrobot-v1": dict.fromkeys(("theta1", "theta2", "omega1", "omega2"), (-0.1, 0.1)),
}


@pytest.mark.parametrize("env_id", RESETS)
def test_first_states_are_uniform(env_id: str) -> None:
    mine = ours(env_id)
    mine.reset(seed=3)
    states = []
    for _ in range(1000):
        obs, _ = mine.reset()
        assert mine.observation_space.contains(obs)
        states.append(mine.state.copy())
    for name, (low, high) in RESETS[env_id].items():
        values = np.array([state[name] for state in states])
        if low == high:
            assert (values == low).all()
            continue
        counts, _ = np.histogram(values, 20, (low, high))
        assert counts.sum() == 1000
        assert chi_square_is_ordinary(counts, np.full(20, 1 / 20))


def test_acrobot_begins_in_float32() -> None:
    mine = ours("Acrobot-v1")
    mine.reset(seed=0)
    assert all(np.float32(value) == value for value in mine.state.tolist())


def test_mountain_car_continuous_is_wide_for_one_step() -> None:
    mine = ours("MountainCarContinuous-v0")
    mine.reset(seed=0)
    assert mine.state.wide
    mine.step(np.array([0.3], np.float32))
    assert not mine.state.wide
    mine.reset()
    assert mine.state.wide


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        ("CartPole-v1", {"sutton_barto_reward": True}),
        ("Pendulum-v1", {"g": 9.81}),
        ("MountainCar-v0", {"goal_velocity": 0.02}),
        ("MountainCarContinuous-v0", {"goal_velocity": 0.02}),
    ],
)
def test_arguments_are_gymnasiums(env_id: str, kwargs: dict[str, Any]) -> None:
    rng = np.random.default_rng(2)
    physics = next(one for one in PHYSICS if one.env_id == env_id)
    mine, gym = ours(env_id, **kwargs), theirs(env_id, **kwargs).unwrapped
    mine.reset(seed=0)
    gym.reset(seed=0)
    for _ in range(1000):
        fields = physics.draw(rng)
        mine.reset()
        set_fields(mine, fields)
        physics.put(gym, fields)
        assert_same_step(physics, mine, gym, physics.action(rng))


def test_params_change_a_cartpole_as_its_attributes_change_gymnasiums() -> None:
    rng = np.random.default_rng(4)
    physics = PHYSICS[0]
    mine, gym = ours("CartPole-v1"), theirs("CartPole-v1").unwrapped
    mine.reset(seed=0)
    gym.reset(seed=0)
    for _ in range(200):
        for name, value in {"gravity": 9.8, "length": 0.5, "force_mag": 10.0}.items():
            changed = value * rng.uniform(0.5, 2)
            setattr(mine, name, changed)
            setattr(gym, name, changed)
        gym.polemass_length = gym.masspole * gym.length
        fields = physics.draw(rng)
        mine.reset()
        set_fields(mine, fields)
        physics.put(gym, fields)
        assert_same_step(physics, mine, gym, physics.action(rng))


def test_squares_are_those_of_pow() -> None:
    """Where they are not those of multiplication too: such numbers are rare, and are looked for."""
    values = np.random.default_rng(0).uniform(-10, 10, 40_000)
    singles = values.astype(np.float32)
    differ = [value for value in values if value**2 != value * value]
    differ_single = [value for value in singles if value**2 != value * value]
    for value in [*differ, *values[:2000]]:
        assert square(value) == value**2
    for value in [*differ_single, *singles[:2000]]:
        assert type(square_single(value)) is np.float32
        assert square_single(value) == value**2

"""What the tests of the library share: how to set the same state in Gymnasium's env and in Shoal's, and chi-square."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from shoal import compiled
from shoal.compiled import library

Fields = dict[str, Any]

# Where a processor has wide vectors, numpy may have a sine and a cosine of its own, which are less exact than those of
# the C library. Gymnasium's bits are numpy's then, and ours are close to them.
_SOME = np.random.default_rng(0).uniform(-10, 10, 5000)
SAME_SINES = all(np.cos(x) == math.cos(x) and np.sin(x) == math.sin(x) for x in _SOME)


def assert_same_numbers(found: Any, expected: Any, told: str = "") -> None:
    """Compare bit by bit, which takes 0.0 and -0.0 for two; only nearly, where numpy has sines of its own."""
    found, expected = np.asarray(found), np.asarray(expected)
    if SAME_SINES:
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes(), f"{found} is not {expected}, {told}"
    else:
        np.testing.assert_allclose(found, expected, 1e-6, 1e-9, err_msg=told)


def ours(env_id: str, **kwargs: Any) -> Any:
    """Return the library's env as plain Python."""
    return compiled.as_gymnasium(library.find(env_id), **kwargs)


def theirs(env_id: str, **kwargs: Any) -> Any:
    """Return Gymnasium's, less the wrappers that only check."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return gymnasium.make(env_id.replace("Taxi-v3", "Taxi-v4"), disable_env_checker=True, **kwargs)


@dataclass(frozen=True)
class Physics:
    """An env of floats: its random states, and how Gymnasium's takes and gives them."""

    env_id: str
    draw: Callable[[np.random.Generator], Fields]
    put: Callable[[Any, Fields], None]
    get: Callable[[Any], Fields]

    def action(self, rng: np.random.Generator) -> Any:
        """Return a random action; of a box also its bounds, and beyond them."""
        space = library.find(self.env_id).action_space
        if isinstance(space, gymnasium.spaces.Discrete):
            return int(rng.integers(space.n))
        if rng.random() < 0.2:
            return np.array([rng.choice([-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0])], np.float32)
        return rng.uniform(1.5 * space.low, 1.5 * space.high).astype(np.float32)


def _arrays(*names: str, dtype: type = np.float64) -> dict[str, Any]:
    def put(env: Any, fields: Fields) -> None:
        env.state = np.array([fields[name] for name in names], dtype)

    def get(env: Any) -> Fields:
        return dict(zip(names, env.state, strict=True))

    return {"put": put, "get": get}


def _put_cartpole(env: Any, fields: Fields) -> None:
    env.state = np.array(list(fields.values()))
    env.steps_beyond_terminated = None


def _put_pedal_car(env: Any, fields: Fields) -> None:
    env.state = np.array([fields["position"], fields["velocity"]], np.float64 if fields["wide"] else np.float32)


def _draw_pedal_car(rng: np.random.Generator) -> Fields:
    fields = _draw_car(rng)
    if rng.random() < 0.3:
        return {**fields, "wide": True}
    return {name: np.float64(np.float32(value)) for name, value in fields.items()} | {"wide": False}


def _draw_car(rng: np.random.Generator) -> Fields:
    position = rng.choice([rng.uniform(-1.2, 0.6), rng.uniform(-1.2, -1.15), rng.uniform(0.4, 0.6), -1.2, 0.6])
    return {"position": position, "velocity": rng.choice([rng.uniform(-0.07, 0.07), -0.07, 0.07, 0.0])}


PHYSICS = [
    Physics(
        "CartPole-v1",
        lambda rng: dict(zip(("x", "v", "theta", "omega"), rng.normal(0, (1.5, 2, 0.15, 2)), strict=True)),
        _put_cartpole,
        _arrays("x", "v", "theta", "omega")["get"],
    ),
    Physics(
        "Pendulum-v1",
        lambda rng: {"theta": rng.choice([rng.uniform(-4, 4), rng.uniform(-50, 50)]), "omega": rng.uniform(-8, 8)},
        **_arrays("theta", "omega"),
    ),
    Physics("MountainCar-v0", _draw_car, **_arrays("position", "velocity")),
    Physics(
        "MountainCarContinuous-v0",
        _draw_pedal_car,
        _put_pedal_car,
        lambda env: {**_arrays("position", "velocity")["get"](env), "wide": env.state.dtype == np.float64},
    ),
    Physics(
        "Acrobot-v1",
        lambda rng: dict(
            zip(("theta1", "theta2", "omega1", "omega2"), rng.uniform(-1, 1, 4) * np.pi * [1, 1, 4, 9], strict=True)
        ),
        **_arrays("theta1", "theta2", "omega1", "omega2"),
    ),
]


def set_fields(env: Any, fields: Fields) -> None:
    """Set fields of the state of Shoal's env."""
    for name, value in fields.items():
        env.state[name] = value


def chi_square_is_ordinary(counts: Any, chances: Any) -> bool:
    """Whether counts are such as come of these chances in all but one of some million cases."""
    counts, chances = np.asarray(counts, float), np.asarray(chances, float)
    assert (counts[chances == 0] == 0).all(), "something happened that cannot"
    expected = counts.sum() * chances[chances > 0]
    assert expected.min() >= 5, "too few draws to say anything"
    freedom = len(expected) - 1
    statistic = float(((counts[chances > 0] - expected) ** 2 / expected).sum())
    # Wilson and Hilferty: the cube root of it is nearly normal.
    deviation = math.sqrt(2 / (9 * freedom))
    return (statistic / freedom) ** (1 / 3) < 1 - deviation**2 + 5 * deviation


class Forced:
    """Gymnasium's generator, saying what it is told."""

    def __init__(self, numbers: Iterator[float]):
        self._numbers = numbers

    def random(self) -> float:
        """Return the next number."""
        return next(self._numbers)

    def choice(self, options: Any) -> Any:
        """Return the option that stands at the next number, from 0 to 1."""
        return options[int(next(self._numbers) * len(options))]

"""The math functions of 32 bits, against those of 64 bits, over all exponents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

numba = pytest.importorskip("numba", reason="compiled envs need numba")

from shoal.compiled.single import functions, math32  # noqa: E402

# One in some thousand of all finite floats, of both signs, down to the smallest and up to the largest.
EVERY = np.arange(0, 2**32, 2**15 + 37, dtype=np.uint64).astype(np.uint32).view(np.float32)
EVERY = EVERY[np.isfinite(EVERY)]
NEAR = np.random.default_rng(0).uniform(-100.0, 100.0, 100_000).astype(np.float32)
ODD = np.array([0, -0.0, 1, -1, 0.5, -0.5, 2, -2, 3, -3, np.inf, -np.inf, np.nan, 2.5, -2.5, 1e-40, -1e-40], np.float32)
# Function, its model, largest error in units in the last place, and where that holds.
ONE: dict[str, tuple[Any, Any, float, Callable[[Any], Any]]] = {
    "tan": (math32.tan, np.tan, 3.5, lambda x: np.abs(x) < 1e5),
    "exp": (math32.exp, np.exp, 2.0, np.isfinite),
    "log": (math32.log, np.log, 2.0, np.isfinite),
    "log2": (math32.log2, np.log2, 2.0, np.isfinite),
    "log10": (math32.log10, np.log10, 2.0, np.isfinite),
    "sqrt": (math32.sqrt, np.sqrt, 0.5001, np.isfinite),
    "atan": (math32.atan, np.arctan, 4.0, np.isfinite),
    "asin": (math32.asin, np.arcsin, 4.0, np.isfinite),
    "acos": (math32.acos, np.arccos, 4.0, np.isfinite),
    "tanh": (math32.tanh, np.tanh, 4.0, np.isfinite),
}


def computed(function: Any, *args: Any) -> Any:
    """What a function makes of arrays."""
    loop = numba.vectorize(nopython=True)((lambda x: function(x)) if len(args) == 1 else (lambda x, y: function(x, y)))
    return loop(*args)


def errors(found: Any, model: Any, *args: Any) -> Any:
    """Errors in units in the last place; nan and inf must be where the model has them."""
    with np.errstate(all="ignore"):
        exact = model(*(arg.astype(np.float64) for arg in args))
        narrow = exact.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(narrow))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(narrow))
    fine = np.isfinite(narrow)
    unit = np.spacing(np.maximum(np.abs(narrow[fine]), np.float32(2.0**-126))).astype(np.float64)
    return np.abs(found[fine].astype(np.float64) - exact[fine]) / unit


@pytest.mark.parametrize("name", ONE)
def test_functions_of_one_number(name: str) -> None:
    function, model, most, where = ONE[name]
    for numbers in (EVERY, NEAR, NEAR / 100, 1 + NEAR / 1000):
        given = numbers[where(numbers)].astype(np.float32)
        assert errors(computed(function, given), model, given).max() <= most


@pytest.mark.parametrize(("function", "model"), [(math32.sin, np.sin), (math32.cos, np.cos)])
def test_sine_and_cosine(function: Any, model: Any) -> None:
    given = np.concatenate([EVERY[np.abs(EVERY) <= 2.0**30], NEAR])
    found = computed(function, given)
    exact = model(given.astype(np.float64))
    assert np.abs(found - exact).max() < 1e-7
    large = np.abs(exact) >= 0.5
    assert errors(found[large], model, given[large]).max() <= 1.6
    assert np.isnan(computed(function, np.array([2.0**31, -1e30, np.inf, np.nan], np.float32))).all()


@pytest.mark.parametrize(
    ("function", "model", "most"),
    [(math32.pow, np.power, 1.0), (math32.atan2, np.arctan2, 4.0), (math32.hypot, np.hypot, 1.0)],
)
def test_functions_of_two_numbers(function: Any, model: Any, most: float) -> None:
    rng = np.random.default_rng(1)
    a, b = (rng.permutation(EVERY)[:100_000] for _ in range(2))
    near, other = NEAR, rng.permutation(NEAR)
    for x, y in ((a, b), (near, other), (np.abs(near), other / 5), (near, np.rint(other / 5)), (1 + near / 1e4, near)):
        given = x.astype(np.float32), y.astype(np.float32)
        assert errors(computed(function, *given), model, *given).max() <= most


def test_odd_numbers() -> None:
    x, y = (grid.ravel().copy() for grid in np.meshgrid(ODD, ODD))
    with np.errstate(all="ignore"):
        for function, model in ((math32.pow, np.power), (math32.atan2, np.arctan2)):
            np.testing.assert_allclose(computed(function, x, y), model(x, y), rtol=1e-6, atol=1e-38)
        for name, (function, model, _, _) in ONE.items():
            np.testing.assert_allclose(computed(function, ODD), model(ODD), rtol=1e-6, atol=1e-38, err_msg=name)


def test_remainders_are_pythons() -> None:
    rng = np.random.default_rng(2)
    a = (rng.normal(size=50_000) * 10.0 ** rng.integers(-3, 6, 50_000)).astype(np.float32)
    b = (rng.normal(size=50_000) * 10.0 ** rng.integers(-2, 3, 50_000)).astype(np.float32)
    found = computed(functions._remainder, a, b)
    exact = np.mod(a.astype(np.float64), b.astype(np.float64))
    apart = np.abs(found - exact)
    assert np.minimum(apart, np.abs(np.abs(b) - apart)).max() <= 1e-6 * np.abs(b).max()
    assert ((found == 0) | (np.sign(found) == np.sign(b))).all()


def test_small_spans_have_exact_remainders() -> None:
    bits = np.random.default_rng(3).integers(0, 2**64, 50_000, np.uint64)
    bits[:4] = 0, 2**64 - 1, 2**32 - 1, 2**32
    for span in (1, 2, 3, 7, 10, 1000, 2**20 - 3, 2**20, 2**20 + 1, 2**40 + 5):
        spans = np.full_like(bits, span)
        np.testing.assert_array_equal(computed(functions.modulo, bits, spans), (bits % spans).astype(np.int64))

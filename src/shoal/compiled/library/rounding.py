"""Arithmetic that rounds as Gymnasium's does, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal import compiled

__all__ = ["single", "square", "square_single"]

# What rounding took away, times this, reaches the next float where a square is so close to the middle of two that
# pow may go either way: within 0.015 units in the last place. glibc's pow errs by less than 0.01.
CLOSE = 1.0 + 2.0**-5


@compiled.function
def single(x: float) -> Any:
    """Return the float32 nearest to x, as a float64.

    A sum or product of two such numbers, rounded once more, is that of float32 arithmetic: float64 is wide enough for
    the first rounding to do no harm.
    """
    return np.float64(np.float32(x))


@compiled.function
def square(x: float) -> Any:
    """Return x ** 2 as the C library's pow rounds it, which once in a thousand times is not as x * x rounds.

    They differ only where the square, before it is rounded, lies about in the middle of two floats. What rounding took
    away tells, and only there pow, which is slow, is asked.
    """
    product = x * x
    high = single(x)  # whose own square is exact
    lost = (high * high - product) + (x - high) * (x + high)
    if product + CLOSE * lost == product:
        return product
    return x ** (2.0 + 0.0 * x)  # a compiler would make x * x of an exponent that it can see


@compiled.function
def square_single(x: Any) -> Any:
    """Return the same of a float32, in float32."""
    return x ** (np.float32(2.0) + np.float32(0.0) * x)

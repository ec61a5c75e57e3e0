"""Arithmetic that rounds as Gymnasium's does, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal import compiled

__all__ = ["single", "square", "square_single"]

SPLIT = 2.0**27 + 1.0  # halves the bits of a float64
POW_ERROR = 2.0**-58  # at most, relative and before rounding; glibc's is about half of it


@compiled.function
def square(x: float) -> Any:
    """Return x ** 2 as the C library's pow rounds it, which once in a thousand times is not as x * x rounds.

    They differ only where x * x, before it is rounded, lies about in the middle of two floats. What rounding took away
    tells (Dekker's product), and only there pow, which is slow, is asked.
    """
    product = x * x
    scaled = SPLIT * x
    high = scaled - (scaled - x)
    low = x - high
    lost = ((high * high - product) + 2.0 * high * low) + low * low
    doubt = product * POW_ERROR
    if product + (lost + doubt) == product and product + (lost - doubt) == product:
        return product
    return x ** (2.0 + 0.0 * x)  # a compiler would make x * x of an exponent that it can see


@compiled.function
def square_single(x: Any) -> Any:
    """Return the same of a float32, in float32."""
    return x ** (np.float32(2.0) + np.float32(0.0) * x)


@compiled.function
def single(x: float) -> Any:
    """Return the float32 nearest to x, as a float64.

    A sum or product of two such numbers, rounded once more, is that of float32 arithmetic: float64 is wide enough for
    the first rounding to do no harm.
    """
    return np.float64(np.float32(x))

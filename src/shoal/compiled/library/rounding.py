"""Arithmetic that rounds as Gymnasium's does, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal import compiled

__all__ = ["single", "square", "square_single"]


@compiled.function
def square(x: Any) -> Any:
    """Return x ** 2 as the C library's pow rounds it, which once in a thousand times is not as x * x rounds.

    A compiler makes x * x of a power of 2 that it can see, so the exponent is hidden from it.
    """
    return x ** (2.0 + 0.0 * x)


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

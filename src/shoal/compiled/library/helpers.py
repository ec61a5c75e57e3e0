"""What several envs use: arithmetic that rounds as Gymnasium's does, to the last bit, and drawing."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal import compiled

# If a square lies so close to the middle of two floats that pow may round either way (within 0.015 units in the last
# place; glibc's pow errs by less than 0.01), then its rounding error times this reaches the next float.
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

    They differ only if the exact square lies about in the middle of two floats. The rounding error shows that, and only
    then pow is called, which is slow.
    """
    product = x * x
    high = single(x)  # its square is exact
    lost = (high * high - product) + (x - high) * (x + high)
    if product + CLOSE * lost == product:
        return product
    return x ** (2.0 + 0.0 * x)  # a compiler would make x * x of a constant exponent


@compiled.function
def square_single(x: Any) -> Any:
    """Return the square of a float32, in float32."""
    return x ** (np.float32(2.0) + np.float32(0.0) * x)


@compiled.function
def fill(image: Any, top: int, first: int, height: int, width: int, shade: int) -> None:
    """Paint a rectangle of an image [rows, columns]."""
    # Loops rather than slices: compiled, they are several times as fast for rectangles of a few pixels.
    for i in range(top, top + height):
        for j in range(first, first + width):
            image[i, j] = shade

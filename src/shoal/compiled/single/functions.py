"""What single precision puts in the place of functions that the user's code calls: Python's, math's, numpy's and ours.

`versions` is the table. It is for the user's functions alone; our own are compiled as they are.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from shoal.compiled import random
from shoal.compiled.single import math32
from shoal.compiled.single.arithmetic import is_number, is_single
from shoal.compiled.single.intrinsics import OPTIONS, inlined

ONE_ARGUMENT: dict[Any, tuple[Any, ...]] = {
    math32.sin: (math.sin, np.sin), math32.cos: (math.cos, np.cos), math32.tan: (math.tan, np.tan),
    math32.exp: (math.exp, np.exp), math32.log: (math.log, np.log), math32.log2: (math.log2, np.log2),
    math32.log10: (math.log10, np.log10), math32.sqrt: (math.sqrt, np.sqrt), math32.atan: (math.atan, np.arctan),
    math32.asin: (math.asin, np.arcsin), math32.acos: (math.acos, np.arccos), math32.tanh: (math.tanh, np.tanh),
}  # fmt: skip
TWO_ARGUMENTS: dict[Any, tuple[Any, ...]] = {
    math32.atan2: (math.atan2, np.arctan2), math32.pow: (math.pow, pow, np.power),
    math32.hypot: (math.hypot, np.hypot),
}  # fmt: skip
MOST_MULTIPLICATIONS = 16  # of a power with a whole exponent that is written in the code


@functools.cache
def versions() -> dict[Any, Any]:
    """Return what replaces what."""
    table: dict[Any, Any] = {random.uniform: uniform, random.integer: integer}
    for own, replaced in ONE_ARGUMENT.items():
        table.update((one, _of_one(own, one)) for one in replaced)
    for own, replaced in TWO_ARGUMENTS.items():
        table.update((one, _of_two(own, one)) for one in replaced)
    floats = {float: np.float32, np.float64: np.float32}
    return {**table, **floats, min: _extreme(operator.lt, min), max: _extreme(operator.gt, max)}


def _of_one(own: Any, replaced: Any) -> Any:
    def stub(x: Any) -> Any: ...

    @overload(stub, strict=False, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
    def implement(x: Any) -> Any:
        return (lambda x: own(np.float32(x))) if is_number(x) else (lambda x: replaced(x))

    return stub


def _of_two(own: Any, replaced: Any) -> Any:
    def stub(x: Any, y: Any) -> Any: ...

    @overload(stub, strict=False, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
    def implement(x: Any, y: Any) -> Any:
        if is_number(x) and is_number(y):
            return lambda x, y: own(np.float32(x), np.float32(y))
        return lambda x, y: replaced(x, y)

    return stub


def _extreme(better: Any, replaced: Any) -> Any:
    """Make min or max of two to four numbers."""
    choose = math32.choose

    def stub(a: Any, b: Any = None, c: Any = None, d: Any = None) -> Any: ...

    @inlined
    def of_two(a: Any, b: Any) -> Any:
        return choose(better(b, a), b, a)

    @overload(stub, strict=False, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
    def implement(a: Any, b: Any = None, c: Any = None, d: Any = None) -> Any:
        given = [kind for kind in (a, b, c, d) if is_number(kind)]
        kind = np.float32 if is_single(given) else np.int64
        if len(given) == 2:
            return lambda a, b=None, c=None, d=None: of_two(kind(a), kind(b))
        if len(given) == 3:
            return lambda a, b=None, c=None, d=None: of_two(of_two(kind(a), kind(b)), kind(c))
        if len(given) == 4:
            return lambda a, b=None, c=None, d=None: of_two(of_two(of_two(kind(a), kind(b)), kind(c)), kind(d))
        return lambda a, b=None, c=None, d=None: replaced(a)

    return stub


# ---- operators -------------------------------------------------------------------------------------------------


@inlined
def _remainder(a: Any, b: Any) -> Any:
    """Return a % b as Python defines it; quotients up to 2**53 are exact."""
    x, y = np.float64(a), np.float64(b)
    rest = math32.fma(-np.floor(x / y), y, x)
    rest = math32.choose((rest != 0.0) & ((rest < 0.0) != (y < 0.0)), rest + y, rest)
    return np.float32(math32.choose(abs(rest) >= abs(y), 0.0, rest))


@inlined
def _floor_divided(a: Any, b: Any) -> Any:
    x, y = np.float64(a), np.float64(b)
    return np.float32(np.floor(x / y))


def _by_kind(own: Any, replaced: Any) -> Any:
    """Make an operator that is `own` for floats, and `replaced` for others."""

    def stub(a: Any, b: Any) -> Any: ...

    @overload(stub, strict=False, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
    def implement(a: Any, b: Any) -> Any:
        if is_single((types.unliteral(a), types.unliteral(b))):
            return lambda a, b: own(np.float32(a), np.float32(b))
        return lambda a, b: replaced(a, b)

    return stub


@functools.cache
def remainder() -> Any:
    """Return what `%` becomes."""
    return _by_kind(_remainder, operator.mod)


@functools.cache
def floor_divided() -> Any:
    """Return what `//` becomes."""
    return _by_kind(_floor_divided, operator.floordiv)


@functools.cache
def power() -> Any:
    """Return what `**` becomes: products, where the exponent is a whole number in the code."""

    def stub(a: Any, b: Any) -> Any: ...

    @overload(stub, strict=False, jit_options=OPTIONS, prefer_literal=True)  # type: ignore[untyped-decorator]
    def implement(a: Any, b: Any) -> Any:
        if not is_single((types.unliteral(a), types.unliteral(b))):
            return lambda a, b: operator.pow(a, b)
        if isinstance(b, types.IntegerLiteral) and abs(b.literal_value) <= MOST_MULTIPLICATIONS:
            times, inverted = abs(b.literal_value), b.literal_value < 0

            def repeated(a: Any, b: Any) -> Any:
                product = np.float32(1.0)
                for _ in range(times):
                    product = product * np.float32(a)
                return np.float32(1.0) / product if inverted else product

            return repeated
        return lambda a, b: math32.pow(np.float32(a), np.float32(b))

    return stub


# ---- random numbers: the same bits as in double precision, as many of them as a float of 32 bits has -----------

BITS_32, BITS_40, MASK_32 = np.uint64(32), np.uint64(40), np.uint64(2**32 - 1)
UNIT_24 = np.float32(2.0**-24)
SMALL_SPAN = np.uint64(2**20)


@inlined
def _mix(z: Any) -> Any:
    z = (z ^ (z >> np.uint64(30))) * random.MIX_1_64
    z = (z ^ (z >> np.uint64(27))) * random.MIX_2_64
    return z ^ (z >> np.uint64(31))


@inlined
def _drawn(rng: Any) -> Any:
    z = rng[0] + random.GAMMA_64
    rng[0] = z
    return _mix(z)


@inlined
def uniform(rng: Any, low: Any = 0.0, high: Any = 1.0) -> Any:
    """See random.uniform."""
    first, last = np.float32(low), np.float32(high)
    return first + (last - first) * (np.float32(np.int32(_drawn(rng) >> BITS_40)) * UNIT_24)


@inlined
def _modulo_small(x: Any, span: Any) -> Any:
    """Return x % span of whole numbers up to 2**52 in floats of 64 bits."""
    rest = x - np.floor(x * (1.0 / span)) * span
    rest = math32.choose(rest < 0.0, rest + span, rest)
    return math32.choose(rest >= span, rest - span, rest)


@inlined
def modulo(bits: Any, span: Any) -> Any:
    """Return bits % span. Processors have no vector instruction for this, so small spans go by floats, in two parts."""
    if span > SMALL_SPAN:
        return np.int64(bits % span)
    size = np.float64(np.int64(span))
    high = _modulo_small(np.float64(np.int64(bits >> BITS_32)), size)
    return np.int64(_modulo_small(high * 4294967296.0 + np.float64(np.int64(bits & MASK_32)), size))


@inlined
def integer(rng: Any, low: Any, high: Any) -> Any:
    """See random.integer: it draws the same numbers."""
    return np.int64(low) + modulo(_drawn(rng), np.uint64(np.int64(high) - np.int64(low)))

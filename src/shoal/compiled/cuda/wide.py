"""Stores of several numbers at once: a GPU writes a row of four floats by one instruction in place of four.

With a store for each number a warp would touch the same pieces of memory again and again.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from shoal.compiled.cuda.build import driver, simulated

WIDEST = 16  # bytes of a store


def numbers_at_once(size: int, dtype: np.dtype[Any]) -> int:
    """Return how many numbers of a row one store writes: rows of so many numbers must all begin where it may."""
    at_once = WIDEST // dtype.itemsize if dtype.kind in "fiu" else 1
    while at_once > 1 and size % at_once:
        at_once //= 2
    return max(at_once, 1)


@functools.cache
def store_wide(at_once: int) -> Any:
    """Make a function (array, index, values...) that writes so many numbers from an index of the flat array on."""
    names = [f"v{i}" for i in range(at_once)]
    if simulated() or at_once == 1:
        text = [f"def store(array, index, {', '.join(names)}):", "    flat = array.reshape(array.size)"]
        text += [f"    flat[index + {i}] = {name}" for i, name in enumerate(names)]
        found: dict[str, Any] = {}
        exec("\n".join(text), found)
        return driver().jit(device=True)(found["store"])
    found = {"build": _build}
    text = [f"def store(typing_context, array, index, {', '.join(names)}):"]
    text += [f"    return build(array, index, ({', '.join(names)},))"]
    exec("\n".join(text), found)
    from numba.cuda.extending import intrinsic

    return intrinsic(found["store"])


def _build(array: Any, index: Any, values: tuple[Any, ...]) -> Any:
    from llvmlite import ir
    from numba import types
    from numba.cuda.np.arrayobj import make_array

    kind = array.dtype

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        item, item_size = context.get_data_type(kind), kind.bitwidth // 8
        vector = ir.Constant(ir.VectorType(item, len(values)), ir.Undefined)
        for i, (value, given) in enumerate(zip(args[2:], values, strict=True)):
            converted = context.cast(builder, value, given, kind)
            vector = builder.insert_element(vector, converted, ir.IntType(32)(i))
        place = builder.gep(make_array(array)(context, builder, args[0]).data, [args[1]])
        builder.store(vector, builder.bitcast(place, vector.type.as_pointer()), align=len(values) * item_size)
        return context.get_dummy_value()

    return types.void(array, index, *values), generate

"""Memory of a block of lanes: room on the stack, and copies from there to large arrays, past the caches if these are.

A store past the caches (non-temporal) writes whole lines without reading them first, which halves the traffic. It is
for arrays that are larger than the caches, so that they would be driven out before anything reads them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from shoal.compiled.single.intrinsics import inlined, on_stack

LINE = 64  # bytes of a cache line
WORD = 16  # numbers of 32 bits in it


def room(size: int) -> Any:
    """Make a function without arguments that returns the address of so many bytes on the stack."""

    def place(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            memory = on_stack(builder, ir.ArrayType(ir.IntType(8), size))
            return builder.ptrtoint(memory, ir.IntType(64))

        return types.int64(), generate

    return intrinsic(place)


@intrinsic  # type: ignore[untyped-decorator]
def copy(typing_context: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy bytes between addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(
            builder, builder.inttoptr(args[0], byte), builder.inttoptr(args[1], byte), args[2], itemsize=1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def stream_line(typing_context: Any, target: Any, source: Any) -> Any:
    """Copy one cache line past the caches. The target is the beginning of a line."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(32), WORD)
        loaded = builder.load(builder.inttoptr(args[1], line.as_pointer()), align=4, typ=line)
        stored = builder.store(loaded, builder.inttoptr(args[0], line.as_pointer()), align=LINE)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def fence(typing_context: Any) -> Any:
    """Let what was written past the caches be seen before all that is written after this."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@inlined
def keep(target: Any, source: Any, size: Any, streams: Any) -> None:
    """Copy bytes; past the caches if `streams`, and there are enough of them."""
    if not streams or size < 8 * LINE:
        copy(target, source, size)
        return
    head = (-target) & np.int64(LINE - 1)
    copy(target, source, head)
    lines = (size - head) // LINE
    for i in range(lines):
        stream_line(target + head + i * LINE, source + head + i * LINE)
    done = head + lines * LINE
    copy(target + done, source + done, size - done)

"""What compiled code has of LLVM directly: memory by address and index, a lane's own record and arrays, bits, FMA.

LLVM turns a loop over lanes into vector code if it knows that the arrays do not overlap, and that nothing but numbers
passes from one line to the next. So each array has a scope of its own (`accessors`), and what a lane works on lies on
the stack (`local_record`, `local_array`), from where LLVM takes it into registers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np

C = TypeVar("C", bound=Callable[..., Any])

DOMAIN = "shoal arrays"
_numbers = itertools.count()
OPTIONS = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True}


def inlined(function: C) -> C:
    """Compile a function by Numba's own rules, as a part of what calls it."""
    made: C = numba.njit(**OPTIONS)(function)
    return made


class Scopes:
    """The arrays of one kernel, each with the claim that it overlaps none of the others.

    An array that is read and written at places which LLVM cannot compare may have two names, one for each: then the
    caller vouches that no lane reads what another one writes.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._number = next(_numbers)

    def accessors(self, name: str, dtype: np.dtype[Any]) -> dict[str, Any]:
        """Make get_NAME(address, index) and set_NAME(address, index, value)."""
        self._names.append(name)
        return {f"get_{name}": self._getter(name, dtype), f"set_{name}": self._setter(name, dtype)}

    def _mark(self, module: Any, instruction: Any, name: str) -> None:
        # Metadata that are equal are one node in LLVM, so that each function may make them anew.
        domain = module.add_metadata([f"{DOMAIN} {self._number}"])
        scopes = {one: module.add_metadata([f"{DOMAIN} {self._number} {one}", domain]) for one in self._names}
        instruction.set_metadata("alias.scope", module.add_metadata([scopes[name]]))
        instruction.set_metadata("noalias", module.add_metadata([scopes[one] for one in self._names if one != name]))

    def _getter(self, name: str, dtype: np.dtype[Any]) -> Any:
        from numba import from_dtype
        from numba.extending import intrinsic

        kind = from_dtype(dtype)

        def get(typing_context: Any, address: Any, index: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                item, place = _place(context, builder, kind, signature, args)
                loaded = builder.load(place, align=dtype.alignment, typ=item)
                self._mark(builder.module, loaded, name)
                return context.data_model_manager[kind].from_data(builder, loaded)

            return kind(address, index), generate

        return intrinsic(get)

    def _setter(self, name: str, dtype: np.dtype[Any]) -> Any:
        from numba import from_dtype, types
        from numba.extending import intrinsic

        kind = from_dtype(dtype)

        def put(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                _, place = _place(context, builder, kind, signature, args)
                converted = context.cast(builder, args[2], signature.args[2], kind)
                stored = context.data_model_manager[kind].as_data(builder, converted)
                self._mark(builder.module, builder.store(stored, place, align=dtype.alignment), name)
                return context.get_dummy_value()

            return types.void(address, index, value), generate

        return intrinsic(put)


def _place(context: Any, builder: Any, kind: Any, signature: Any, args: Any) -> tuple[Any, Any]:
    from numba import types

    item = context.get_data_type(kind)
    base = builder.inttoptr(args[0], item.as_pointer())
    index = context.cast(builder, args[1], signature.args[1], types.int64)
    return item, builder.gep(base, [index], inbounds=True, source_etype=item)


def on_stack(builder: Any, kind: Any) -> Any:
    """Reserve memory on the stack. Numba's own function fills it with zeros one by one, which is slow to compile."""
    with builder.goto_entry_block():
        place = builder.alloca(kind)
    place.align = 64
    return place


def local_record(dtype: np.dtype[Any]) -> Any:
    """Make a function without arguments that returns a record on the stack, always the same one."""
    from numba import from_dtype
    from numba.extending import intrinsic

    kind = from_dtype(dtype)

    def record(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return on_stack(builder, context.get_data_type(kind))

        return kind(), generate

    return intrinsic(record)


def local_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Make a function without arguments that returns an array on the stack, always the same one."""
    from llvmlite import ir
    from numba import from_dtype, types
    from numba.core import cgutils
    from numba.extending import intrinsic
    from numba.np.arrayobj import make_array, populate_array

    kind = types.Array(from_dtype(dtype), len(shape), "C")
    size = int(np.prod(shape))
    steps = [int(np.prod(shape[i + 1 :])) * dtype.itemsize for i in range(len(shape))]

    def array(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            item = context.get_data_type(kind.dtype)
            place = on_stack(builder, ir.ArrayType(item, size))
            made = make_array(kind)(context, builder)
            numbers = [[context.get_constant(types.intp, one) for one in some] for some in (shape, steps)]
            populate_array(
                made, data=builder.bitcast(place, item.as_pointer()), shape=cgutils.pack_array(builder, numbers[0]),
                strides=cgutils.pack_array(builder, numbers[1]),
                itemsize=context.get_constant(types.intp, dtype.itemsize), meminfo=None,
            )  # fmt: skip
            return made._getvalue()

        return kind(), generate

    return intrinsic(array)


@functools.cache
def bit_functions() -> dict[str, Any]:
    """Return bits_of(float32) -> int32, float_of(int32) -> float32, fma(a, b, c), nearest(x) and choose(c, a, b)."""
    from numba import types
    from numba.extending import intrinsic

    def converter(source: Any, target: Any) -> Any:
        def convert(typing_context: Any, value: Any) -> Any:
            def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                return builder.bitcast(args[0], context.get_value_type(target))

            return target(source), generate

        return intrinsic(convert)

    @intrinsic  # type: ignore[untyped-decorator]
    def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.fma(*args)

        return a(a, a, a), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def nearest(typing_context: Any, x: Any) -> Any:
        """Round to the nearest whole number, as a float."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            function = builder.module.declare_intrinsic("llvm.rint", [context.get_value_type(x)])
            return builder.call(function, args)

        return x(x), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def choose(typing_context: Any, condition: Any, a: Any, b: Any) -> Any:
        """Return a where the condition holds, else b; both are computed."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.select(*args)

        return a(types.boolean, a, a), generate

    return {
        "bits_of": converter(types.float32, types.int32), "float_of": converter(types.int32, types.float32),
        "wide_float_of": converter(types.int64, types.float64), "fma": fma, "nearest": nearest, "choose": choose,
    }  # fmt: skip

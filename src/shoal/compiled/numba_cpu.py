"""Compiling for the CPU by Numba: source that calls a user's functions becomes machine code."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple

from shoal.compiled.cache import Machine
from shoal.compiled.numba_random import VERSIONS
from shoal.compiled.rebuild import Rebuilder

_NUMBAS_OWN = ("NRT_", "numba_", "Py", "_Py")  # how the names of functions begin that exist only where Numba runs


class Source(NamedTuple):
    """What is to be compiled.

    Attributes:
        entry: the name of the function in the text that is to be called.
        functions: the user's functions that it calls, by the names that it has for them.
        values: all else that it needs, by name.
        debug: whether the user's functions check indices.
    """

    entry: str
    text: str
    functions: Mapping[str, Any]
    values: Mapping[str, Any]
    debug: bool


def available() -> bool:
    """Say whether Numba is installed."""
    return importlib.util.find_spec("numba") is not None


def compile_source(source: Source) -> Machine:
    """Compile source. Raises what Numba raises."""
    from numba import types

    rebuild = Rebuilder(jit(source.debug), VERSIONS)
    functions = {name: rebuild(one) for name, one in source.functions.items()}
    names = {**source.values, "array_at": array_at(), **functions}
    exec(compile(source.text, f"<shoal {source.entry}>", "exec"), names)
    function = jit(False)(names[source.entry])  # its own indices need no checks
    function.compile((types.int64,) * 4)
    found = function.overloads[(types.int64,) * 4]
    library = found.library
    outside = [one.name for one in library._final_module.functions if one.is_declaration]
    needs_numba = any(name.startswith(_NUMBAS_OWN) for name in outside)
    return Machine(found.fndesc.llvm_func_name, needs_numba, library._get_compiled_object())


def jit(debug: bool) -> Any:
    """Return the decorator that compiles for the CPU; not with fastmath, so that results equal plain Python's."""
    import numba

    # Wrappers for calls from Python would take longer to compile than the functions themselves.
    return numba.njit(error_model="numpy", boundscheck=debug, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@functools.cache
def array_at() -> Any:
    """Make the function array_at(address, shape, dtype) of compiled code. Numba's own carray takes long to compile."""
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic
    from numba.np.arrayobj import make_array, populate_array

    def build(typing_context: Any, address: Any, shape: Any, dtype: Any) -> Any:
        array_type = types.Array(dtype.dtype, len(shape), "C")

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sizes = [
                context.cast(builder, size, kind, types.intp)
                for size, kind in zip(cgutils.unpack_tuple(builder, args[1]), shape, strict=True)
            ]
            item_type = context.get_data_type(array_type.dtype)
            item_size = context.get_constant(types.intp, context.get_abi_sizeof(item_type))
            strides: list[Any] = [item_size]
            for size in reversed(sizes[1:]):
                strides.insert(0, builder.mul(strides[0], size))
            array = make_array(array_type)(context, builder)
            populate_array(
                array, data=builder.inttoptr(args[0], item_type.as_pointer()), shape=cgutils.pack_array(builder, sizes),
                strides=cgutils.pack_array(builder, strides), itemsize=item_size, meminfo=None,
            )  # fmt: skip
            return array._getvalue()

        return array_type(address, shape, dtype), generate

    return intrinsic(build)

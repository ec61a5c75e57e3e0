"""Kernels for the CPU, by Numba."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.compiled import cache, random
from shoal.compiled.env import Definition
from shoal.compiled.fingerprint import fingerprint
from shoal.compiled.machine import load_machine
from shoal.compiled.rebuild import Rebuilder
from shoal.compiled.template import constants, kernel_source, policy_source
from shoal.support.optional_dependencies import install

__all__ = ["available", "kernel_address", "policy_address"]

Names = Mapping[str, Any]
_OURS = ("NRT_", "numba_", "Py", "_Py")  # how the names of functions begin that only a running Numba has


def available() -> bool:
    """Whether Numba is installed."""
    return importlib.util.find_spec("numba") is not None


def kernel_address(definition: Definition, debug: bool) -> int:
    """The address of the kernel that steps envs of this class; see native/task.h.

    Raises:
        BadEnv: what Numba cannot compile, in the user's own lines.
        ImportError: Numba is not installed.
    """
    if not available():
        raise ImportError(f'backend="compiled" needs Numba: {install("compiled")}')
    functions = {"reset": definition.reset, "step": definition.step, "observe": definition.observe}
    functions["begin_stream"] = random.begin_stream
    source, values = kernel_source(definition, debug), constants(definition)

    def explain(error: Exception) -> Exception:
        from shoal.compiled.diagnosis import explain_env

        return explain_env(definition, debug, error)

    return _address(definition.name, "kernel", source, functions, values, debug, explain)


def policy_address(definition: Definition, policy: Any, params: Sequence[Any]) -> int:
    """The address of the kernel that lets a policy choose the actions of lanes."""
    values = {**constants(definition), **{f"T_param_{i}": param.dtype for i, param in enumerate(params)}}

    def explain(error: Exception) -> Exception:
        from shoal.compiled.diagnosis import explain_policy

        return explain_policy(definition, policy, params, error)

    source = policy_source(definition, params)
    return _address(policy.__name__, "policy_kernel", source, {"policy": policy}, values, False, explain)


def _address(name: str, entry: str, source: str, functions: Names, values: Names, debug: bool, explain: Any) -> int:
    """The address of the function `entry` of some source, from the cache or compiled now.

    Args:
        name: of the class or policy, for messages and files.
        functions: the user's functions that it calls, by the names that it has for them.
        values: all else that it needs, by name.
        explain: what to raise where Numba gives up.
    """
    key = fingerprint(source, functions, values, debug)
    machine = cache.load(name, key)
    if machine is None:
        machine = _compile_and_keep(name, key, entry, source, functions, values, debug, explain)
    return load_machine(machine)


def _compile_and_keep(name: str, key: str, *args: Any) -> cache.Machine:
    *given, explain = args
    _say(f"shoal: compiling {name} ...")
    began = time.perf_counter()
    try:
        machine = _compile(*given)
    except Exception as error:
        _say(" failed\n")
        raise explain(error) from None
    except BaseException:
        _say(" interrupted\n")
        raise
    seconds = time.perf_counter() - began
    trouble = cache.save(name, key, machine)
    where = f"cached in {cache.cache_folder()}" if trouble is None else f"not cached: {trouble}"
    _say(f" {seconds:.1f} s, {where}\n")
    return machine


def _say(text: str) -> None:
    if sys.stderr is not None and os.environ.get("SHOAL_QUIET") != "1":
        sys.stderr.write(text)
        sys.stderr.flush()


def _compile(entry: str, source: str, functions: Names, values: Names, debug: bool) -> cache.Machine:
    from numba import types

    compiler = jit(debug)
    rebuild = Rebuilder(compiler, numba_versions())
    names = {**values, "array_at": array_at(), **{name: rebuild(one) for name, one in functions.items()}}
    exec(compile(source, f"<shoal {entry}>", "exec"), names)
    function = jit(False)(names[entry])  # whose own indices need no checks
    function.compile((types.int64,) * 4)
    found = function.overloads[(types.int64,) * 4]
    library = found.library
    outside = [one.name for one in library._final_module.functions if one.is_declaration]
    needs_numba = any(name.startswith(_OURS) for name in outside)
    return cache.Machine(found.fndesc.llvm_func_name, needs_numba, library._get_compiled_object())


def numba_versions() -> Mapping[Any, Any]:
    """Functions of `shoal.compiled.random`, and those that stand for them here."""
    from shoal.compiled.numba_random import VERSIONS

    return VERSIONS


def jit(debug: bool) -> Any:
    """The decorator that compiles for the CPU. Never with fastmath: results are those of plain Python, bit by bit."""
    import numba

    # Python's wrappers around each function would take longer to compile than the functions.
    return numba.njit(error_model="numpy", boundscheck=debug, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@functools.cache
def array_at() -> Any:
    """The function array_at(address, shape, dtype) of compiled code. Numba's own carray takes long to compile."""
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

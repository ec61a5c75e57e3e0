"""The compiled code of a class or a policy as an address: loaded from the cache, or compiled now and kept there.

The cache (see `cache`) is a folder with one file for each kernel, named by the hash of all that it depends on. LLVM
alone loads object code where that is possible, so that later starts need no Numba.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.compiled import cache, random
from shoal.compiled.definition import Definition
from shoal.compiled.fingerprint import fingerprint
from shoal.compiled.mlp import Mlp
from shoal.compiled.narrow import in_columns
from shoal.compiled.numba_cpu import Machine, Source, compile_source, explain, explain_env
from shoal.compiled.single import source as single_source
from shoal.compiled.single.rollout_source import rollout_source, widest_layer
from shoal.compiled.template import constants, kernel_source, policy_source
from shoal.support.optional_dependencies import install

_lanes: dict[int, int] = {}  # what is known of kernels, by their addresses


def available() -> bool:
    """Say whether Numba is installed."""
    return importlib.util.find_spec("numba") is not None


def kernel_address(definition: Definition, debug: bool) -> int:
    """See Env.__shoal_kernel__. A BadEnv names the user's own line."""
    if not available():
        raise ImportError(f'backend="compiled" needs Numba: {install("compiled")}')
    functions = {"reset": definition.reset, "step": definition.step, "observe": definition.observe}
    functions["begin_stream"] = random.begin_stream
    if in_columns(definition) and not debug:
        text, values = single_source.kernel_source(definition), single_source.constants(definition)
    else:
        text, values = kernel_source(definition, debug), constants(definition)
    source = Source("kernel", text, functions, values, debug, definition if definition.single else None)
    return _address(definition.name, source, lambda error: explain_env(definition, debug, error))


def policy_address(definition: Definition, policy: Any, params: Sequence[Any]) -> int:
    """Return the address of the kernel that lets a policy choose the actions of lanes."""
    values = {**constants(definition), **{f"T_param_{i}": param.dtype for i, param in enumerate(params)}}
    source = Source("policy_kernel", policy_source(definition, params), {"policy": policy}, values, False)
    return _address(policy.__name__, source, lambda error: explain(definition, policy.__name__, policy, error))


def rollout_address(definition: Definition, policy: Any, params: Sequence[Any]) -> int:
    """Return the address of the kernel that makes whole rollouts of a class in single precision (`in_columns`)."""
    functions = {"reset": definition.reset, "step": definition.step, "observe": definition.observe}
    functions["begin_stream"] = random.begin_stream
    name = type(policy).__name__
    if not isinstance(policy, Mlp):
        functions["policy"], name = policy, policy.__name__
    types = {f"T_param_{i}": param.dtype for i, param in enumerate(params)}
    values = {**single_source.constants(definition), **types, "WIDEST": widest_layer(definition, policy, params)}
    text = rollout_source(definition, policy, params)
    source = Source("rollout_kernel", text, functions, values, False, definition)
    return _address(f"{definition.name}-{name}", source, lambda error: explain(definition, name, policy, error))


def _address(name: str, source: Source, explained: Callable[[Exception], Exception]) -> int:
    """Return the address of compiled source. `name` is for messages and files; `explained` makes errors of Numba's."""
    key = fingerprint(source.text, source.functions, {**source.values, **source.kind}, source.debug)
    path = cache.cache_folder() / f"{name}-{key}.kernel"
    machine = cache.read(path) or _compile_and_keep(name, path, source, explained)
    address = int(_engine(machine).get_function_address(machine.symbol))
    _lanes[address] = machine.lanes
    return address


def lanes_at_once(address: int) -> int:
    """Return how many envs a compiled kernel steps by one instruction."""
    return _lanes.get(address, 1)


def _compile_and_keep(name: str, path: Path, source: Source, explained: Callable[[Exception], Exception]) -> Machine:
    _say(f"shoal: compiling {name} ...")
    began = time.perf_counter()
    try:
        machine = compile_source(source)
    except Exception as error:
        _say(" failed\n")
        raise explained(error) from None
    except BaseException:
        _say(" interrupted\n")
        raise
    seconds = time.perf_counter() - began
    try:
        cache.write(path, machine)
        where = f"cached in {path.parent}"
    except OSError as error:
        where = f"not cached: {error}"
    _say(f" {seconds:.1f} s, {where}\n")
    return machine


def _say(text: str) -> None:
    if sys.stderr is not None and os.environ.get("SHOAL_QUIET") != "1":
        sys.stderr.write(text)
        sys.stderr.flush()


# ---- in memory -------------------------------------------------------------------------------------------------


@functools.cache
def _engine(machine: Machine) -> Any:
    """Load a compiled function. It stays loaded until the process ends."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if machine.needs_numba:  # Numba makes its own functions known to LLVM
        from numba.core.registry import cpu_target
        from numba.core.runtime import rtsys

        rtsys.initialize(cpu_target.target_context)
    target = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    engine.add_object_file(llvm.ObjectFileRef.from_data(machine.code))
    engine.finalize_object()
    return engine

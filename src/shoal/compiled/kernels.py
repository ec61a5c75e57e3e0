"""The compiled code of a class or a policy as an address: loaded from the cache, or compiled now and kept there."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal.compiled import cache, random
from shoal.compiled.definition import Definition
from shoal.compiled.diagnosis import explain_env, explain_policy
from shoal.compiled.fingerprint import fingerprint
from shoal.compiled.machine import load_machine
from shoal.compiled.numba_cpu import Source, available, compile_source
from shoal.compiled.template import constants, kernel_source, policy_source
from shoal.support.optional_dependencies import install

__all__ = ["available", "kernel_address", "policy_address"]


def kernel_address(definition: Definition, debug: bool) -> int:
    """Return the address of the kernel that steps envs of this class; see native/task.h.

    Raises:
        BadEnv: Numba cannot compile it; the error names the user's own line.
        ImportError: Numba is not installed.
    """
    if not available():
        raise ImportError(f'backend="compiled" needs Numba: {install("compiled")}')
    functions = {"reset": definition.reset, "step": definition.step, "observe": definition.observe}
    functions["begin_stream"] = random.begin_stream
    source = Source("kernel", kernel_source(definition, debug), functions, constants(definition), debug)
    return _address(definition.name, source, lambda error: explain_env(definition, debug, error))


def policy_address(definition: Definition, policy: Any, params: Sequence[Any]) -> int:
    """Return the address of the kernel that lets a policy choose the actions of lanes."""
    values = {**constants(definition), **{f"T_param_{i}": param.dtype for i, param in enumerate(params)}}
    source = Source("policy_kernel", policy_source(definition, params), {"policy": policy}, values, False)
    return _address(policy.__name__, source, lambda error: explain_policy(definition, policy, error))


def _address(name: str, source: Source, explain: Callable[[Exception], Exception]) -> int:
    """Return the address of compiled source.

    Args:
        name: of the class or policy, for messages and files.
        explain: makes the error to raise out of Numba's own.
    """
    key = fingerprint(source.text, source.functions, source.values, source.debug)
    machine = cache.load(name, key)
    if machine is None:
        machine = _compile_and_keep(name, key, source, explain)
    return load_machine(machine)


def _compile_and_keep(name: str, key: str, source: Source, explain: Callable[[Exception], Exception]) -> cache.Machine:
    _say(f"shoal: compiling {name} ...")
    began = time.perf_counter()
    try:
        machine = compile_source(source)
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

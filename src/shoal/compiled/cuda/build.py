"""Compiling kernels for GPUs by numba-cuda, or for Numba's simulator of a GPU (NUMBA_ENABLE_CUDASIM=1)."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import numpy as np

from shoal.compiled import random
from shoal.compiled.cuda.source import KernelKind, constants, kernel_source, launch_bounds
from shoal.compiled.definition import Definition, single_versions
from shoal.compiled.narrow import narrow, narrow_constant
from shoal.compiled.numba_cpu import explain_env
from shoal.compiled.rebuild import Rebuilder, unchanged
from shoal.errors import BadEnv
from shoal.support.optional_dependencies import install


def simulated() -> bool:
    """Say whether Numba only simulates a GPU: very slowly, but it finds mistakes."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


def missing() -> str:
    """Say what this machine lacks, and how to get it; "" for nothing."""
    if importlib.util.find_spec("numba") is None or importlib.util.find_spec("numba_cuda") is None:
        return f'backend="cuda" needs numba-cuda: {install("cuda")}'
    if simulated():
        return ""
    try:
        cuda = driver()
        if cuda.is_available() and len(cuda.gpus) > 0:
            return ""
    except Exception as error:  # a broken driver may raise anything
        return f'backend="cuda" needs a working NVIDIA driver, and Numba says: {error}'
    return 'backend="cuda" needs an NVIDIA GPU and its driver, and found none; use backend="compiled" on this machine'


def check() -> None:
    """Raise ImportError where this machine cannot run envs on a GPU."""
    trouble = missing()
    if trouble:
        raise ImportError(trouble)


@functools.cache
def driver() -> Any:
    """Return the module numba.cuda."""
    if not hasattr(np, "row_stack"):  # numba-cuda 0.30 uses it, and numpy 2.5 does not have it any more
        np.row_stack = np.vstack
    from numba import cuda

    return cuda


def build(definition: Definition, kind: KernelKind, precision: str, policy: Any = None, debug: bool = False) -> Any:
    """Build the kernel of a class, to be launched as `kernel[blocks, threads, stream](...)`.

    Numba compiles it at its first launch: `explained` says what is wrong if that fails.
    """
    from shoal.compiled.cuda import registers, wide

    cuda, single = driver(), precision == "single"
    dtype = narrow(definition.dtype) if single else definition.dtype
    functions = {"reset": definition.reset, "step": definition.step, "observe": definition.observe}
    functions["begin_stream"] = random.begin_stream
    if policy is not None:
        functions["policy"] = policy
    options = {"debug": True, "opt": False} if debug else {}
    rebuild = Rebuilder(cuda.jit(device=True, **options), _versions(single), narrow_constant if single else unchanged)
    names = {**constants(definition, dtype), **{name: rebuild(one) for name, one in functions.items()}}
    names.update(cuda=cuda, T_NUMBER=np.float32 if single else np.float64)
    if simulated():
        names.update(T_STATE=dtype, record_at=_simulated_item)
    else:
        from numba import from_dtype

        names.update(T_STATE=from_dtype(dtype), record_at=cuda.jit(device=True)(lambda states, index: states[index]))
    text, bounds = kernel_source(definition, kind), {"launch_bounds": launch_bounds(definition)}
    if kind.does == "rollout" and registers.fits(definition):
        text, bounds = registers.kernel_source(definition, kind), {}  # it mostly computes, and needs its registers
        names.update(registers.locals_of(definition), **{f"store_{n}": wide.store_wide(n) for n in (2, 4, 8, 16)})
    exec(compile(text, "<shoal kernel>", "exec"), names)
    # With fastmath, divisions and roots of 32 bits need not be exact to the last bit. The user's functions are compiled
    # without it, so what they call (sin, exp) stays precise.
    return cuda.jit(fastmath=single, **({} if simulated() or debug else bounds), **options)(names["kernel"])


def explained(definition: Definition, error: Exception) -> Exception:
    """Say why a class cannot be compiled, by compiling it for the CPU, where Numba's errors say more."""
    found = explain_env(definition, False, error)
    text = str(found)
    return BadEnv(text if text.startswith(definition.name) else f"{definition.name} on a GPU: {text}")


def _versions(single: bool) -> Any:
    # The simulator runs plain Python, where integers do not wrap around.
    versions = {one: one for one in random.VERSIONS} if simulated() else random.VERSIONS
    return {**versions, random.uniform: _uniform_single, **single_versions} if single else versions


SHIFT_40, UNIT_24 = np.uint64(40), np.float32(2.0**-24)


def _uniform_single(rng: Any, low: Any = 0.0, high: Any = 1.0) -> Any:
    """See random.uniform; it uses as many of the same bits as a float of 32 bits has."""
    return low + (high - low) * (np.float32(random.next_bits(rng) >> SHIFT_40) * UNIT_24)


def _simulated_item(states: Any, index: Any) -> Any:
    """Return one of the states; records of plain numpy have no attributes."""
    while not isinstance(states, np.ndarray):  # unwrap the simulator's own classes
        states = states._item if "_item" in vars(states) else states._ary
    return states.view(np.recarray)[index]

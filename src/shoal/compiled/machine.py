"""Object code in this process. LLVM alone loads it where that is possible, so that later starts need no Numba."""

from __future__ import annotations

import functools
from typing import Any

from shoal.compiled.cache import Machine

_loaded: dict[tuple[str, int], tuple[Any, int]] = {}


def load_machine(machine: Machine) -> int:
    """Return the address of a compiled function. It stays loaded until the process ends."""
    key = (machine.symbol, hash(machine.code))
    if key not in _loaded:
        _loaded[key] = _load(machine)
    return _loaded[key][1]


def _load(machine: Machine) -> tuple[Any, int]:
    import llvmlite.binding as llvm

    _prepare()
    if machine.needs_numba:  # Numba makes its own functions known to LLVM
        from numba.core.registry import cpu_target
        from numba.core.runtime import rtsys

        rtsys.initialize(cpu_target.target_context)
    target = llvm.Target.from_default_triple().create_target_machine(jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    engine.add_object_file(llvm.ObjectFileRef.from_data(machine.code))
    engine.finalize_object()
    return engine, engine.get_function_address(machine.symbol)


@functools.cache
def _prepare() -> None:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()

"""Chooses the C core or its Python twin: `KIND` says which one runs, SHOAL_NATIVE=0 asks for the twin."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from shoal.native import layout, twin, twin_kernel

__all__ = [
    "AUTORESET", "COLLECT_ALARM", "COLLECT_TIMEOUT", "IN_USE", "KIND", "MIXED_SLOTS", "NOT_TAKEN", "OP_RESET",
    "OP_RESTART", "OP_STEP", "STAT_AT", "STAT_SINCE_NS", "STAT_STEPS", "Block", "Kernel", "Lanes", "merge",
    "outside", "standardize", "write_rows",
]  # fmt: skip

AUTORESET, MIXED_SLOTS = layout.AUTORESET, layout.MIXED_SLOTS
OP_STEP, OP_RESET, OP_RESTART = layout.OP_STEP, layout.OP_RESET, layout.OP_RESTART
STAT_STEPS, STAT_AT, STAT_SINCE_NS = layout.STAT_STEPS, layout.STAT_AT, layout.STAT_SINCE_NS
COLLECT_TIMEOUT, COLLECT_ALARM = layout.COLLECT_TIMEOUT, layout.COLLECT_ALARM
IN_USE, NOT_TAKEN = layout.IN_USE, layout.NOT_TAKEN

core: Any = None
if os.environ.get("SHOAL_NATIVE", "1") != "0":
    try:
        from shoal.native import _core as core  # type: ignore[attr-defined,no-redef]
    except ImportError:
        core = None

KIND = "twin" if core is None else "native"

_functions: Any = twin if TYPE_CHECKING or core is None else core
outside, merge, standardize = _functions.outside, _functions.merge, _functions.standardize
write_rows = _functions.write_rows


def Lanes(*args: Any, **kwargs: Any) -> Any:
    """The learner's side of the slab; see twin.Lanes for the contract."""
    return twin.Lanes(*args, **kwargs) if core is None else twin.native_lanes(core, *args, **kwargs)


def Block(*args: Any, **kwargs: Any) -> Any:
    """The worker's side of the slab; see twin.Block for the contract."""
    return twin.Block(*args, **kwargs) if core is None else twin.native_block(core, *args, **kwargs)


def Kernel(*args: Any) -> Any:
    """Envs in compiled code; see twin_kernel.Kernel for the contract."""
    return twin_kernel.Kernel(*args) if core is None else core.Kernel(*args)

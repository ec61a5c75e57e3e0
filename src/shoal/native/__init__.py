"""The engine's inner loop: posts requests in the slab, steps a block, collects answers; in C, with a twin in Python.

`KIND` says which of the two runs; SHOAL_NATIVE=0 asks for the twin. May import `errors` and `support`. Read `layout`
first, which has the table of all that lies in the slab, then `twin` for what Lanes and Block promise.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.errors import SlowCoreWarning
from shoal.native import layout, twin, twin_kernel
from shoal.support.frames import caller_level

__all__ = [
    "AUTORESET", "COLLECT_ALARM", "COLLECT_TIMEOUT", "IN_USE", "KIND", "MISSING", "MIXED_SLOTS", "NOT_TAKEN",
    "OP_BEGIN", "OP_RESET", "OP_RESTART", "OP_STEP", "REMEDY", "STAT_AT", "STAT_SINCE_NS", "STAT_STEPS", "Block",
    "Kernel", "Lanes", "Turn", "merge", "outside", "standardize", "take_infos", "write_rows",
]  # fmt: skip

AUTORESET, MIXED_SLOTS = layout.AUTORESET, layout.MIXED_SLOTS
OP_STEP, OP_RESET, OP_RESTART, OP_BEGIN = layout.OP_STEP, layout.OP_RESET, layout.OP_RESTART, layout.OP_BEGIN
STAT_STEPS, STAT_AT, STAT_SINCE_NS = layout.STAT_STEPS, layout.STAT_AT, layout.STAT_SINCE_NS
COLLECT_TIMEOUT, COLLECT_ALARM = layout.COLLECT_TIMEOUT, layout.COLLECT_ALARM
IN_USE, NOT_TAKEN = layout.IN_USE, layout.NOT_TAKEN

core: Any = None
MISSING: str | None = None  # why the C core does not run, unless SHOAL_NATIVE=0 asks for the twin
if os.environ.get("SHOAL_NATIVE", "1") != "0":
    try:
        from shoal.native import _core as core  # type: ignore[attr-defined,no-redef]
    except ImportError as error:
        built = importlib.util.find_spec("shoal.native._core") is not None
        MISSING = f"it cannot be loaded ({error})" if built else "it was not built when Shoal was installed"
    else:
        if getattr(core, "LAYOUT_FINGERPRINT", None) != layout.FINGERPRINT:
            core, MISSING = None, "it was built from other sources than those that are installed"

KIND = "twin" if core is None else "native"
# Figures of benchmarks/twin.py, for 1 to 64 envs under the serial backend.
REMEDY = (
    "Steps of envs that do nothing take 1.9 to 2.4 times as long, those of CartPole 1.1 to 1.6. On Linux and macOS, "
    "install a wheel, or a C compiler and Python's headers, and then Shoal again from its folder (pip install "
    "--force-reinstall --no-deps .). "
    "Elsewhere there is no C core. SHOAL_NATIVE=0 says that the twin is wanted"
)

_warned = False
_functions: Any = twin if TYPE_CHECKING or core is None else core
outside, merge, standardize = _functions.outside, _functions.merge, _functions.standardize
write_rows, take_infos = _functions.write_rows, _functions.take_infos


def Lanes(*args: Any, **kwargs: Any) -> Any:
    """The learner's side of the slab; see twin.Lanes for the contract. Warns once where the C core is missing."""
    global _warned
    if MISSING is not None and not _warned:
        _warned = True
        text = f"Shoal runs without its C core: {MISSING}. {REMEDY}."
        warnings.warn(text, SlowCoreWarning, stacklevel=caller_level())
    return twin.Lanes(*args, **kwargs) if core is None else twin.native_lanes(core, *args, **kwargs)


def Block(*args: Any, **kwargs: Any) -> Any:
    """The worker's side of the slab; see twin.Block for the contract."""
    return twin.Block(*args, **kwargs) if core is None else twin.native_block(core, *args, **kwargs)


def Kernel(*args: Any) -> Any:
    """Envs in compiled code; see twin_kernel.Kernel for the contract."""
    return twin_kernel.Kernel(*args) if core is None else core.Kernel(*args)


def Turn(refusal: Callable[[], BaseException]) -> Any:
    """Keeps other threads out; see twin.Turn for the contract."""
    return twin.Turn(refusal) if core is None else core.Turn(refusal)

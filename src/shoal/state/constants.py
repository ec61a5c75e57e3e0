"""Constants in the attributes of envs: classes, modules, enum members, and functions that hold no state.

They are the same after the env was built anew. So they are not saved: they are described, and found again, by name.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import hashlib
import random
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import Space

from shoal.state.datafile import CannotSave

ADVICE = "give the env get_state() and set_state(state), which return and take plain data"
MISSING = object()
ATOMS = (type(None), bool, int, float, complex, str, bytes)
_NUMPY_FUNCTIONS: tuple[Any, ...] = (np.ufunc, type(np.mean))
_HARMLESS = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)


class Constants:
    """Describes the constants in the layers of an env, and finds them again."""

    def __init__(self, layers: Sequence[Any]):
        self._layers = layers
        classes = {cls for layer in layers for cls in type(layer).__mro__}
        self._classes = [cls for cls in classes if cls.__module__ not in sys.stdlib_module_names]

    def describe(self, value: Any) -> list[str] | None:
        """Kind, module and name of a constant, and a mark if the name is not enough; None if the value is no constant.

        Raises CannotSave if it has state. A pickle would lose that as well, since it holds the name only, too.
        """
        if isinstance(value, enum.Enum):
            cls = type(value)
            member = ["member", cls.__module__, cls.__qualname__, str(value.name)]
            return member if self._member(*member[1:]) is value else None
        if isinstance(value, types.ModuleType):
            if value is random or value is np.random:
                raise CannotSave(
                    f"the module {value.__name__} draws for all: give the env a generator of its own", True
                )
            return ["module", value.__name__, "", ""]
        if isinstance(value, type):
            return ["class", value.__module__, value.__qualname__, ""]
        if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType | None):
            return ["builtin", value.__module__, value.__qualname__, ""]
        if isinstance(value, _NUMPY_FUNCTIONS) and value is getattr(np, name := str(value.__name__), None):
            return ["builtin", "numpy", name, ""]
        return self._describe_function(value) if isinstance(value, types.FunctionType) else None

    def find(self, description: Sequence[str]) -> Any:
        """What is described, if it is harmless or of the env's own modules: a file must not make an env call others."""
        kind, module, name, _ = description
        if kind == "member":
            return self._member(*description[1:])
        for found in self.named(module, name):
            harmless = isinstance(found, type) and (found in _HARMLESS or issubclass(found, np.generic))
            own = any(cls.__module__ == module for cls in self._classes)
            with contextlib.suppress(CannotSave):
                if (own or harmless) and self.describe(found) == list(description):
                    return found
        return MISSING

    def named(self, module: str, name: str) -> Iterator[Any]:
        """All objects with this name in this module. Nothing is imported or called."""
        spaces: list[Any] = [vars(sys.modules[module])] if module in sys.modules else []
        # A class from a script came to the worker by value: only its own methods know the names beside it.
        methods = [f for cls in self._classes if cls.__module__ == module for f in vars(cls).values()]
        spaces += [f.__globals__ for f in methods if isinstance(f, types.FunctionType) and f.__module__ == module]
        for space in spaces:
            found: Any = None
            for part in name.split("."):
                found = space.get(part)
                space = vars(found) if isinstance(found, type) else {}
            if getattr(found, "__module__", None) == module and getattr(found, "__qualname__", None) == name:
                yield found

    def _member(self, module: str, name: str, member: str) -> Any:
        enums = [found for found in self.named(module, name) if isinstance(found, enum.EnumMeta)]
        return next((found.__members__[member] for found in enums if member in found.__members__), MISSING)

    def _describe_function(self, function: types.FunctionType) -> list[str] | None:
        named = any(found is function for found in self.named(function.__module__, function.__qualname__))
        mark = self._mark_function(function, ())
        if mark is None and named:
            raise CannotSave(f"the function {function.__qualname__} holds state of its own: {ADVICE}", final=True)
        # A function that is found by its name may change between two runs. Others must be the same to the letter.
        return None if mark is None else ["function", function.__module__, function.__qualname__, "" if named else mark]

    def _mark_function(self, function: types.FunctionType, within: tuple[Any, ...]) -> str | None:
        """A text that differs for different functions; None if the function holds anything that may change."""
        if function in within:
            return "itself"
        try:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # still empty
            return None
        kept = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]
        trusted = function.__module__.partition(".")[0] == "gymnasium"  # its functions change nothing that they hold
        marks = [self._mark(value, trusted, (*within, function)) for value in kept]
        code, shared = function.__code__, function.__code__.co_freevars
        if None in marks or function.__dict__.keys() - {"__wrapped__"} or _rebinds(code, shared):
            return None
        return hashlib.sha256(f"{_code_text(code)} {marks}".encode()).hexdigest()[:16]

    def _mark(self, value: Any, trusted: bool, within: tuple[Any, ...]) -> str | None:
        if type(value) in ATOMS or (isinstance(value, np.generic | np.dtype) and not isinstance(value, np.void)):
            return f"{type(value).__name__} {value!r}"
        for i, layer in enumerate(self._layers):
            if value is layer:
                return f"layer {i}"
        if type(value) is tuple or (trusted and type(value) is list):
            marks = [self._mark(item, trusted, within) for item in value]
            return None if None in marks else str(marks)
        if isinstance(value, types.FunctionType):
            return self._mark_function(value, within)
        if trusted and type(value) is np.ndarray:
            return f"{value.dtype} {value.shape} {value.tobytes()!r}"
        if trusted and isinstance(value, Space):
            return repr(value)
        description = self.describe(value)
        return None if description is None else str(description)


def _code_text(value: Any) -> str:
    """A function's code, or a constant in it, as text."""
    if isinstance(value, types.CodeType):
        consts = [_code_text(const) for const in value.co_consts]
        return f"{value.co_code!r} {value.co_names} {value.co_varnames} {value.co_freevars} {consts}"
    # A set has another order in each process.
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _rebinds(code: types.CodeType, names: Sequence[str]) -> bool:
    """Whether a function, or one within it, assigns to variables that it shares with others."""
    steps = [step for step in dis.get_instructions(code) if step.opname in ("STORE_DEREF", "DELETE_DEREF")]
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return any(step.argval in names for step in steps) or any(_rebinds(part, names) for part in inner)

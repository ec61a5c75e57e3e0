"""A user's function made again for a compiler: the same code, with its names bound to what the compiler knows.

A target (Numba on the CPU, on a GPU) provides a decorator that compiles a function, and its versions of the functions
of `shoal.compiled.random`.
"""

from __future__ import annotations

import builtins
import dis
import types
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from shoal.compiled.definition import is_helper, single_versions

Function = Callable[..., Any]


def names_of(code: types.CodeType) -> set[str]:
    """Return all names that code uses, in functions inside it too: globals, attributes and others."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*(names_of(one) for one in inner))


def named_values(function: Any) -> Iterator[tuple[str, Any]]:
    """Return the globals and closed-over variables that a function uses."""
    code = function.__code__
    for name in sorted(names_of(code)):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not set yet
            continue


def is_namespace(value: Any) -> bool:
    """Say whether its attributes may be functions or constants: it is a module, or the class of an env."""
    return isinstance(value, types.ModuleType) or (isinstance(value, type) and hasattr(value, "__shoal_kernel__"))


def all_functions(function: Any) -> list[Any]:
    """Return a function, and the helpers that it calls, and those that these call."""
    found = [function]
    for one in found:
        values = [value for _, value in named_values(one)]
        values += [getattr(value, name) for value in values if is_namespace(value) for name in names_of(one.__code__)
                   if hasattr(value, name)]  # fmt: skip
        found += [value for value in dict.fromkeys(filter(is_helper, values)) if value not in found]
    return found


def may_raise(function: Any) -> bool:
    """Say whether a function or one of its helpers has a `raise` or an `assert`, in single precision."""
    codes = [single_versions.get(one, one).__code__ for one in all_functions(function)]
    return any(one.opname == "RAISE_VARARGS" for code in codes for one in dis.get_instructions(code))


def unchanged(value: Any) -> Any:
    """Return a constant as it is."""
    return value


class Rebuilder:
    """Rebuilds functions, each once.

    Args:
        compiler: turns a function into one that compiled code can call.
        versions: the target's own functions, by the functions that they replace; they are rebuilt, too.
        constant: converts a constant of the user's functions.
        given: what the user's functions get in place of other functions and types, builtins among them; as it is.
    """

    def __init__(
        self,
        compiler: Function,
        versions: Mapping[Any, Any],
        constant: Function = unchanged,
        given: Mapping[Any, Any] | None = None,
    ):
        self._compiler, self._versions, self._constant = compiler, versions, constant
        self._given = given or {}
        self._done: dict[Any, Any] = {}

    def __call__(self, function: Any) -> Any:
        """Return the function in a form that compiled code can call."""
        if function in self._done:
            return self._done[function]
        source = self._versions.get(function, function)
        names: dict[str, Any] = {"__builtins__": source.__globals__.get("__builtins__", {})}
        names["__name__"] = source.__globals__.get("__name__", "shoal.compiled")
        cells = tuple(types.CellType() for _ in source.__closure__ or ())
        made = types.FunctionType(self._code(source.__code__), names, source.__name__, None, cells or None)
        made.__defaults__ = self._constant(source.__defaults__)
        if source.__kwdefaults__:
            made.__kwdefaults__ = {name: self._constant(value) for name, value in source.__kwdefaults__.items()}
        made.__qualname__ = source.__qualname__
        result = self._done[function] = self._compiler(made)
        # The names are bound after the function was made, because it may call itself.
        used = names_of(source.__code__)
        own = {name: getattr(builtins, name) for name in used if hasattr(builtins, name)}
        names.update((name, self._given[one]) for name, one in own.items() if callable(one) and one in self._given)
        names.update((name, self._bound(value, used)) for name, value in named_values(source))
        for cell, old in zip(cells, source.__closure__ or (), strict=True):
            cell.cell_contents = self._bound(old.cell_contents, used)
        return result

    def _code(self, code: types.CodeType) -> types.CodeType:
        constants = tuple(
            self._code(value) if isinstance(value, types.CodeType) else self._constant(value)
            for value in code.co_consts
        )
        same = all(one is other for one, other in zip(constants, code.co_consts, strict=True))
        return code if same else code.replace(co_consts=constants)

    def _bound(self, value: Any, used: set[str]) -> Any:
        if callable(value) and isinstance(value, Hashable) and value in self._given:
            return self._given[value]
        if isinstance(value, types.FunctionType) and self._is_ours(value):
            return self(value)
        if not is_namespace(value):
            return self._constant(value)
        attributes = {name: getattr(value, name) for name in used if hasattr(value, name)}
        bound = {name: self._bound(one, used - {name}) for name, one in attributes.items()}
        if isinstance(value, types.ModuleType) and all(bound[name] is one for name, one in attributes.items()):
            return value  # compilers know modules such as math
        stand_in = types.ModuleType(value.__name__)
        vars(stand_in).update(bound)
        return stand_in

    def _is_ours(self, value: Any) -> bool:
        if not isinstance(value, types.FunctionType):
            return False
        return is_helper(value) or value in self._versions or value in self._versions.values()

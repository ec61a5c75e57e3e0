"""One hash of everything that compiled code depends on: any change gives another hash, so stale code is never run."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pickle
import platform
import secrets
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.compiled.rebuild import is_namespace, named_values, names_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def fingerprint(source: str, functions: Mapping[str, Any], values: Mapping[str, Any], debug: bool) -> str:
    """Hash a kernel's source, the functions that it calls with all that these use, and the tools that compile it."""
    digest = hashlib.sha256()
    walker = _Walker(digest.update)
    for part in (source, debug, *_tools(), *sorted(values.items()), *sorted(functions.items())):
        walker.add(part)
    return digest.hexdigest()[:32]


def _tools() -> Iterable[str]:
    """Name the versions of all tools that compile, and this processor."""
    import llvmlite.binding

    yield from (importlib.metadata.version(name) for name in ("numba", "llvmlite", "numpy"))
    yield from (sys.version, platform.machine(), llvmlite.binding.get_host_cpu_name())
    yield llvmlite.binding.get_host_cpu_features().flatten()
    yield from (f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NUMBA_"))
    here = Path(__file__).parent
    for path in sorted([*here.glob("*.py"), *here.glob("single/*.py")]):
        yield path.read_text()


class _Walker:
    """Gives the bytes of values and functions to `update`, each function once."""

    def __init__(self, update: Any):
        self._update = update
        self._seen: dict[Any, int] = {}
        self._kept: list[Any] = []  # so that no other object gets the id of one of these meanwhile

    def add(self, value: Any, used: frozenset[str] = frozenset()) -> None:
        """Add a value. `used` are the names in the code that uses it: of a module, only these attributes matter."""
        self._update(f"|{type(value).__module__}.{type(value).__qualname__}:".encode())
        if isinstance(value, _PLAIN):
            self._update(repr(value).encode())
        elif isinstance(value, np.ndarray | np.generic | np.dtype):
            self._add_numpy(value)
        elif isinstance(value, tuple | list | frozenset | set):
            for one in value if isinstance(value, tuple | list) else sorted(value, key=repr):
                self.add(one, used)
        elif isinstance(value, dict):
            for key, one in value.items():
                self.add(key, used)
                self.add(one, used)
        elif isinstance(value, types.CodeType):
            self._add_code(value)
        elif is_namespace(value):
            self._add_namespace(value, used)
        elif self._is_new(value):
            self._add_object(value)

    def _is_new(self, value: Any, name: str = "") -> bool:
        place = self._seen.setdefault((id(value), name), len(self._seen))
        self._kept.append(value)
        self._update(str(place).encode())
        return place == len(self._seen) - 1

    def _add_numpy(self, value: Any) -> None:
        if isinstance(value, np.dtype):
            self._update(repr((value.descr, value.itemsize, value.fields)).encode())
        else:
            self._update(repr((value.dtype.descr, value.shape)).encode())
            self._update(np.ascontiguousarray(value).tobytes())

    def _add_code(self, code: types.CodeType) -> None:
        self.add((code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_argcount))
        self.add(code.co_consts)
        self.add(getattr(code, "co_exceptiontable", b""))

    def _add_namespace(self, value: Any, used: frozenset[str]) -> None:
        self._update(value.__name__.encode())
        for name in sorted(used):
            if hasattr(value, name) and self._is_new(value, name):
                self.add(name)
                self.add(getattr(value, name), used - {name})

    def _add_object(self, value: Any) -> None:
        function = getattr(value, "py_func", value)  # the Python function, if Numba has wrapped it
        if isinstance(function, types.FunctionType):
            self._add_function(function)
        elif isinstance(value, type | types.BuiltinFunctionType | np.ufunc):
            self._update(f"{getattr(value, '__module__', '')}.{getattr(value, '__name__', value)}".encode())
        else:
            self._add_unknown(value)

    def _add_function(self, function: types.FunctionType) -> None:
        self._update(f"{function.__module__}.{function.__qualname__}".encode())
        if (function.__module__ or "").split(".")[0] in ("numpy", "math", "numba"):
            return  # the versions of these packages are in the hash already
        self.add(function.__code__)
        self.add((function.__defaults__, function.__kwdefaults__))
        used = frozenset(names_of(function.__code__))
        for name, value in named_values(function):
            self.add(name)
            self.add(value, used)

    def _add_unknown(self, value: Any) -> None:
        try:
            self._update(pickle.dumps(value))
        except Exception:  # it cannot be compared: such code is compiled each time
            self._update(secrets.token_bytes(16))

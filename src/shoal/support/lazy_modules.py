"""Imports the modules of a package on first use: `shoal.dialects.sb3` works after `import shoal`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType


def modules_of(package: str) -> Callable[[str], ModuleType]:
    """A `__getattr__` for a package. An error in a module's import, such as an extra that is missing, is passed on."""

    def get(name: str) -> ModuleType:
        path = f"{package}.{name}"
        if name.startswith("_") or importlib.util.find_spec(path) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(path)

    return get

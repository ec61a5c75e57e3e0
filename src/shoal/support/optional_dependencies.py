"""Imports on first use: modules of Shoal, and packages that only a part of it needs, with how to install those."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any


def require(module: str, need: str, extra: str) -> Any:
    """Import a module of an extra. Raises ImportError with what needs it, as in "videos need ...", and the remedy."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{need}: {install(extra)}") from error


def install(extra: str) -> str:
    """The command that installs what an extra of Shoal needs.

    It names the packages themselves, which works wherever Shoal came from: Shoal is on no package index.
    """
    import importlib.metadata  # takes long, and is needed for this message alone

    try:
        requires = importlib.metadata.requires("shoal") or []
    except importlib.metadata.PackageNotFoundError:
        requires = []
    needed = []
    for one in requires:
        requirement, _, marker = one.partition(";")
        if re.search(rf"extra == ['\"]{re.escape(extra)}['\"]", marker):
            needed.append(f'"{requirement.strip()}"')
    if not needed:  # it runs from a clone that is not installed
        return f'pip install ".[{extra}]" in the folder of Shoal'
    return f"pip install {' '.join(needed)}"


def modules_of(package: str) -> Callable[[str], ModuleType]:
    """A `__getattr__` for a package: `shoal.dialects.sb3` works after `import shoal`.

    An error in a module's import, such as an extra that is missing, is passed on.
    """

    def get(name: str) -> ModuleType:
        path = f"{package}.{name}"
        if name.startswith("_") or importlib.util.find_spec(path) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(path)

    return get

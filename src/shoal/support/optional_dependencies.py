"""Packages that only a part of Shoal needs: imports them, and says how to install those that are missing."""

from __future__ import annotations

import importlib
import re
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

"""What is to be installed where a part of Shoal needs a package that is missing."""

from __future__ import annotations

import re

__all__ = ["install"]


def install(extra: str) -> str:
    """The command that installs what an extra of Shoal needs.

    It names the packages themselves, which works wherever Shoal came from: Shoal is on no package index.
    """
    import importlib.metadata  # which takes its time, and is for those who lack something

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

"""Imports on first use: modules of Shoal, and packages that only a part of it needs, with how to install those."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def require(module: str, need: str, extra: str) -> Any:
    """Import a module of an extra. Raises ImportError with what needs it, as in "videos need ...", and the remedy."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{need}: {install(extra)}") from error


def install(extra: str) -> str:
    """The command that installs what an extra of Shoal needs, for the way in which Shoal itself was installed.

    From a folder or a file it names that. Otherwise it names the packages of the extra: on package indexes the name may
    be another project's.
    """
    url, editable = _source()
    path = _path_of(url)
    if path is not None and path.exists():
        return f'pip install {"--editable " if editable else ""}"{path}[{extra}]"'
    needed = _packages_of(extra)
    if not needed:  # it runs from a clone that is not installed
        return f'pip install ".[{extra}]" in the folder of Shoal'
    return f"pip install {' '.join(needed)}"


def installation() -> str:
    """How Shoal was installed, in a few words."""
    url, editable = _source()
    if url is None:
        return "from a package index" if _packages_of("plot") else "run from its source"
    return f"{'editable from' if editable else 'from'} {_path_of(url) or url}"


def _source() -> tuple[str | None, bool]:
    """Where pip has installed Shoal from, unless by its name from an index; and whether that is editable."""
    import importlib.metadata  # takes long, and is needed for messages alone

    try:
        text = importlib.metadata.distribution("shoal").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None, False
    about = json.loads(text) if text else {}
    return about.get("url"), bool(about.get("dir_info", {}).get("editable"))


def _path_of(url: str | None) -> Path | None:
    if url is None or not url.startswith("file:"):
        return None
    from urllib.parse import urlsplit  # takes long, too
    from urllib.request import url2pathname

    return Path(url2pathname(urlsplit(url).path))


def _packages_of(extra: str) -> list[str]:
    import importlib.metadata

    try:
        requires = importlib.metadata.requires("shoal") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    named = [one.partition(";") for one in requires]
    wanted = re.compile(rf"extra == ['\"]{re.escape(extra)}['\"]")
    return [f'"{requirement.strip()}"' for requirement, _, marker in named if wanted.search(marker)]


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

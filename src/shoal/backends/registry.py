"""The names of the backends, where their classes are, and where batches of envs are. `shoal/__init__.py` fills it.

A class is imported when a pool asks for it, because some need a package that is an extra. This module knows no backend
itself, so that those above it (`remote`, `graph`) can be named without an import that points up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from shoal.backends.backend import Backend
from shoal.errors import StartError
from shoal.support.system import system

NEEDS_PROCESSES = ("processes", "hybrid", "ray", "mpi")
_places: dict[str, str] = {}
_batches: dict[str, str] = {}


def register(name: str, place: str) -> None:
    """Give a backend its name; `place` is "module:Class"."""
    _places[name] = place


def names() -> tuple[str, ...]:
    """The names of all backends."""
    return tuple(_places)


def find(name: str) -> type[Backend]:
    """The class of a backend. Raises StartError for one that this system cannot run."""
    if name in NEEDS_PROCESSES and not system.has_processes:
        raise StartError(
            f'backend="{name}" runs envs in worker processes, which Shoal has on Linux, macOS and WSL, and not on '
            f'{system.name}: use "serial", "threads" or "compiled"'
        )
    module, _, class_name = _places[name].partition(":")
    found: type[Backend] = getattr(importlib.import_module(module), class_name)
    return found


def is_batched(name: str | None) -> bool:
    """Whether this is the name of a backend with one env object for all lanes."""
    return name in names() and find(str(name)).batched


def register_batches(module: str, place: str) -> None:
    """Say what makes batches of the envs of a package; `place` is "module:function", see `find_batch`."""
    _batches[module] = place


def find_batch(entry_point: object) -> Callable[..., Any] | None:
    """What makes many envs of a registered class as one object, if there is something; see `backends.batch_native`."""
    for module, place in _batches.items():
        if isinstance(entry_point, str) and entry_point.startswith(module):
            name, _, function = place.partition(":")
            found: Callable[..., Any] = getattr(importlib.import_module(name), function)
            return found
    return None

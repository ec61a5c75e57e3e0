"""Compiled code on disk: one file for each kernel, named by the hash of all that it depends on."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from shoal.support.files import replacing

MAGIC = b"shoal kernel 1\n"


@dataclass(frozen=True)
class Machine:
    """A compiled function.

    Attributes:
        symbol: its name in the object code.
        needs_numba: whether it calls functions that only Numba has.
        code: an object file.
    """

    symbol: str
    needs_numba: bool
    code: bytes


def cache_folder() -> Path:
    """SHOAL_CACHE_DIR, or Shoal's folder in the user's cache: ~/.cache/shoal on Linux."""
    from platformdirs import user_cache_path  # takes 3 ms, and most programs compile nothing

    given = os.environ.get("SHOAL_CACHE_DIR")
    return Path(given) if given else user_cache_path("shoal", appauthor=False)


def load(name: str, key: str) -> Machine | None:
    """What was saved under this key; None if nothing was, or the file is damaged."""
    try:
        data = _path(name, key).read_bytes()
        head, _, code = data.removeprefix(MAGIC).partition(b"\n")
        about = json.loads(head)
        if not data.startswith(MAGIC) or hashlib.sha256(code).hexdigest() != about["sha256"]:
            return None
        return Machine(about["symbol"], about["needs_numba"], code)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save(name: str, key: str, machine: Machine) -> str | None:
    """Keep it. Several processes may do so at once. If it cannot be kept, return the reason."""
    digest = hashlib.sha256(machine.code).hexdigest()
    about = {"symbol": machine.symbol, "needs_numba": machine.needs_numba, "sha256": digest}
    path = _path(name, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with replacing(path) as file:
            file.write(MAGIC + json.dumps(about).encode() + b"\n" + machine.code)
    except OSError as error:
        return str(error)
    return None


def _path(name: str, key: str) -> Path:
    return cache_folder() / f"{name}-{key}.kernel"

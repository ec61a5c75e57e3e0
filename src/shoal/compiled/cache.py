"""Compiled code on disk: one file for each kernel, named by the hash of all that it depends on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Machine", "cache_folder", "load", "save"]

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
    """SHOAL_CACHE_DIR, or a folder in the user's cache."""
    given = os.environ.get("SHOAL_CACHE_DIR")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal"


def load(name: str, key: str) -> Machine | None:
    """What was saved under this key; None if nothing was, or not all of it is there."""
    try:
        data = _path(name, key).read_bytes()
    except OSError:
        return None
    head, _, rest = data.removeprefix(MAGIC).partition(b"\n")
    try:
        about = json.loads(head)
        if not data.startswith(MAGIC) or hashlib.sha256(rest).hexdigest() != about["sha256"]:
            return None
        return Machine(about["symbol"], about["needs_numba"], rest)
    except (ValueError, KeyError, TypeError):
        return None


def save(name: str, key: str, machine: Machine) -> str | None:
    """Keep it; several processes may do so at once. Why not, in words, where it cannot be kept."""
    about = {
        "symbol": machine.symbol, "needs_numba": machine.needs_numba,
        "sha256": hashlib.sha256(machine.code).hexdigest(),
    }  # fmt: skip
    path = _path(name, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(MAGIC + json.dumps(about).encode() + b"\n" + machine.code)
            os.replace(temporary, path)  # whole or not at all
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        return str(error)
    return None


def _path(name: str, key: str) -> Path:
    return cache_folder() / f"{name}-{key}.kernel"

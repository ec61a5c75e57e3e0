"""The folder of compiled code. What lies in it is run, so nothing is used that another user could have written.

A file's hash shows that it is whole, not where it is from: a file is used only if it and its folder belong to the
user of this process, and no other user may write to them. Nothing in a file is unpickled.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
import warnings
from pathlib import Path

from shoal.compiled.numba_cpu import Machine
from shoal.support.files import replacing

MAGIC = b"shoal kernel 1\n"


def cache_folder() -> Path:
    """SHOAL_CACHE_DIR, or Shoal's folder in the user's cache: ~/.cache/shoal on Linux."""
    from platformdirs import user_cache_path  # takes 3 ms, and most programs compile nothing

    given = os.environ.get("SHOAL_CACHE_DIR")
    return Path(given) if given else user_cache_path("shoal", appauthor=False)


def read(path: Path) -> Machine | None:
    """Return what was written; None if nothing was, the file is damaged, or another user could have written it."""
    try:
        if _is_foreign(path.parent, os.stat(path.parent)):
            return None
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NOFOLLOW", 0))) as file:
            # Asked of what is open, so that it cannot be another file by now.
            if _is_foreign(path, os.fstat(file.fileno())):
                return None
            data = file.read()
        head, _, code = data.removeprefix(MAGIC).partition(b"\n")
        about = json.loads(head)
        if not data.startswith(MAGIC) or hashlib.sha256(code).hexdigest() != about["sha256"]:
            return None
        return Machine(about["symbol"], about["needs_numba"], code, about["lanes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(path: Path, machine: Machine) -> None:
    """Keep it. Several processes may do so at once. Raises OSError if it cannot be kept, or the folder is not safe."""
    digest = hashlib.sha256(machine.code).hexdigest()
    about = {"symbol": machine.symbol, "needs_numba": machine.needs_numba, "sha256": digest, "lanes": machine.lanes}
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if _is_foreign(path.parent, os.stat(path.parent)):
        raise PermissionError(f"{path.parent} is not this user's alone")
    with replacing(path, private=True) as file:
        file.write(MAGIC + json.dumps(about).encode() + b"\n" + machine.code)


def _is_foreign(path: Path, found: os.stat_result) -> bool:
    """Whether another user could have written this. If so, it warns."""
    if not hasattr(os, "geteuid"):
        return False  # a system without such owners, where the folder lies in the user's own profile
    if found.st_uid != os.geteuid():
        _warn(path, f"it belongs to the user with the number {found.st_uid}", "")
        return True
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _warn(path, f"others may write to it (mode {stat.S_IMODE(found.st_mode):o})", f"run `chmod go-w {path}`, or ")
        return True
    return False


@functools.cache  # once for each of them
def _warn(path: Path, reason: str, remedy: str) -> None:
    warnings.warn(
        f"shoal does not use {path}: {reason}, so that code in it may be another's. The env is compiled anew; to keep "
        f"what is compiled, {remedy}set SHOAL_CACHE_DIR to a folder of your own",
        RuntimeWarning,
        stacklevel=2,
    )

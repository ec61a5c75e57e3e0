"""Envs that are shared libraries: shoal_env.h, in the folder of this file, is their interface."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from shoal import native
from shoal.compiled.definition import Definition, Env
from shoal.errors import BadEnv

VERSION = 1
TYPES = {"f": np.float32, "d": np.float64, "B": np.uint8, "i": np.int32, "q": np.int64}
MOST_DIMENSIONS = 8


class _Space(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_char), ("dimensions", ctypes.c_int32), ("shape", ctypes.c_int64 * MOST_DIMENSIONS),
        ("low", ctypes.c_double), ("high", ctypes.c_double), ("discrete", ctypes.c_int64),
    )  # fmt: skip


class _Interface(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int32), ("num_agents", ctypes.c_int32), ("name", ctypes.c_char_p),
        ("state_size", ctypes.c_int64), ("max_episode_steps", ctypes.c_int64), ("observation", _Space),
        ("action", _Space),
        ("reset", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)),
        ("step", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)),
        ("observe", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)),
    )  # fmt: skip


def include_folder() -> str:
    """Return the folder of shoal_env.h, for a compiler's -I."""
    return str(Path(__file__).parent)


class LibraryEnv(Env):
    """The base of the classes that `from_library` makes.

    Attributes:
        library: the path of the shared library.
    """

    library: str

    @property
    def library_address(self) -> int:
        """Return the address of the library's interface in this process."""
        return ctypes.addressof(_interface(self.library))

    @classmethod
    def __shoal_missing__(cls) -> str:
        return (
            ""
            if native.core is not None
            else "Shoal's C core was not built, and it calls the library: install a C compiler"
        )

    @classmethod
    def __shoal_kernel__(cls, definition: Definition, debug: bool) -> int:
        if native.core is None:
            raise BadEnv(f'backend="compiled": {cls.__shoal_missing__()}, and Shoal anew')
        return int(native.core.library_kernel())


def from_library(path: str | os.PathLike[str]) -> type[LibraryEnv]:
    """Make a class of the env in a shared library, for `shoal.make` and `shoal.Pool`.

    With backend="compiled" C code alone calls the library; other backends call it from Python.

    Raises:
        BadEnv: it cannot be loaded, or its interface is not complete.
    """
    library = os.path.abspath(path)
    about = _interface(library)
    name = (about.name or b"").decode(errors="replace") or Path(library).stem
    observation, action = _space(library, "observation", about.observation), _space(library, "action", about.action)
    wide = 8 * -(-about.state_size // 8)  # rounded up as in native/library.h

    # The class is sent to other processes, so it keeps nothing but the path.
    def reset(state: Any, rng: Any) -> None:
        _interface(library).reset(state.bytes.ctypes.data, rng.ctypes.data)

    def step_of_agents(state: Any, action: Any, reward: Any, rng: Any) -> Any:
        return _step(library, state, action, reward, rng)

    def step_of_one(state: Any, action: Any, rng: Any) -> Any:
        reward = np.zeros(1)
        over = _step(library, state, action, reward, rng)
        return float(reward[0]), over

    def observe(state: Any, obs: Any) -> None:
        _interface(library).observe(state.bytes.ctypes.data, obs.ctypes.data)

    body = {
        "library": library, "observation_space": observation, "action_space": action,
        "num_agents": int(about.num_agents), "max_episode_steps": int(about.max_episode_steps) or None,
        "state": {"bytes": (np.uint8, (wide,))}, "reset": staticmethod(reset), "observe": staticmethod(observe),
        "step": staticmethod(step_of_one if about.num_agents == 1 else step_of_agents),
    }  # fmt: skip
    return type(name, (LibraryEnv,), body)


def _step(library: str, state: Any, action: Any, reward: Any, rng: Any) -> bool:
    about = _interface(library)
    # Plain Python has numbers of 64 bits; the library expects the type of its space.
    dtype = np.int64 if about.action.discrete else TYPES[about.action.type.decode()]
    given = np.ascontiguousarray(action, dtype)
    return bool(about.step(state.bytes.ctypes.data, given.ctypes.data, reward.ctypes.data, rng.ctypes.data))


@functools.cache
def _interface(library: str) -> _Interface:
    try:
        function = ctypes.CDLL(library).shoal_env_v1
    except (OSError, AttributeError) as error:
        raise BadEnv(f"{library}: no library with a function shoal_env_v1, see shoal_env.h: {error}") from None
    function.restype, function.argtypes = ctypes.POINTER(_Interface), []
    found: _Interface = function().contents
    if found.version != VERSION:
        raise BadEnv(
            f"{library}: made for version {found.version} of shoal_env.h, and this is {VERSION}: compile it anew"
        )
    for what, value, least in (("state_size", found.state_size, 1), ("num_agents", found.num_agents, 1)):
        if value < least:
            raise BadEnv(f"{library}: {what} is {value}, and must be at least {least}")
    for what in ("reset", "step", "observe"):
        if not getattr(found, what):
            raise BadEnv(f"{library}: it has no {what}")
    return found


def _space(library: str, what: str, about: _Space) -> Space[Any]:
    if about.discrete > 0:
        return spaces.Discrete(about.discrete)
    kind = about.type.decode(errors="replace")
    if kind not in TYPES or not 0 <= about.dimensions <= MOST_DIMENSIONS:
        raise BadEnv(f"{library}: {what} has the type {kind!r} and {about.dimensions} dimensions: see shoal_space")
    dtype: Any = TYPES[kind]
    return spaces.Box(dtype(about.low), dtype(about.high), tuple(about.shape[: about.dimensions]), dtype)

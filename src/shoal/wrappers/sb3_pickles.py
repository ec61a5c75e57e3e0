"""Reads and writes the pickle of Stable-Baselines' VecNormalize, without running it and without Stable-Baselines.

Of a pickle's names, none but those of this module are ever called. numpy's own are not: its types and arrays take over
whatever state a pickle gives them, addresses of objects included. Python's slow unpickler reads it, as the quick one
lets a file of ten bytes take gigabytes.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from shoal.errors import DataError
from shoal.state.sizes import check_content, check_key, count_parts
from shoal.support.files import replacing

PLAIN = re.compile(r"[<>=|]?[biufc](1|2|4|8|16)")  # types of numbers and truth values, as pickles name them


class _VecNormalize:
    """Stands for Stable-Baselines' VecNormalize: its attributes."""


class _Statistics:
    """Stands for Stable-Baselines' RunningMeanStd: its attributes mean, var and count."""


class _Inert:
    """Stands for parts that are not needed: spaces, random generators. It takes any arguments and any state."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _Type:
    """Stands for numpy's dtype."""

    def __init__(self, name: Any = "", *_: Any):
        self._name: Any = name
        self._order: Literal["<", ">", "="] = "="

    def __setstate__(self, state: Any) -> None:
        self._order = ">" if state[1] == ">" else "<" if state[1] == "<" else "="

    def made(self) -> np.dtype[Any] | None:
        """The type, if it is one of plain numbers."""
        if type(self._name) is not str or not PLAIN.fullmatch(self._name):
            return None
        made: np.dtype[Any] = np.dtype(self._name).newbyteorder(self._order)
        return made


class _Array:
    """Stands for numpy's ndarray. `value` is the array, None for one that is not of plain numbers."""

    value: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_columns, data = state
        self.value = _array(data, kind, shape, "F" if by_columns else "C")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _from_buffer(data: Any, kind: Any, shape: Any, order: Any, *_: Any) -> _Array:
    made = _Array()
    made.value = _array(data, kind, shape, order)
    return made


def _scalar(kind: Any, data: Any = None) -> Any:
    made = _array(data, kind, (), "C")
    return _Inert() if made is None else made[()]


def _array(data: Any, kind: Any, shape: Any, order: Any) -> Any:
    dtype = kind.made() if isinstance(kind, _Type) else None
    if dtype is None:
        return None
    whole = isinstance(data, bytes | bytearray) and type(shape) is tuple and order in ("C", "F")
    if not whole or not all(type(size) is int and size >= 0 for size in shape):
        raise DataError("it is damaged: an array has no shape or no content")
    return check_content(np.frombuffer(data, dtype).reshape(shape, order=order).copy())


def _encode(text: Any, coding: Any = "") -> bytes:
    if type(text) is not str or coding != "latin1":
        raise DataError("it is damaged: bytes are written in a way that no pickle has")
    return text.encode("latin1")


def _empty(*_: Any) -> dict[Any, Any]:
    return {}


_NUMPY: dict[str, Any] = {"_reconstruct": _reconstruct, "scalar": _scalar, "_frombuffer": _from_buffer}
_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array, ("numpy", "dtype"): _Type, ("_codecs", "encode"): _encode,
    ("collections", "OrderedDict"): _empty,  # its items are put into it later
    **{(f"{core}.{module}", name): made for core in ("numpy.core", "numpy._core") for name, made in _NUMPY.items()
       for module in ("multiarray", "numeric")},
}  # fmt: skip
_INERT = re.compile(r"(gym|gymnasium)\.spaces(\.\w+)*|numpy\.random\.\w+")


def read_pickle(data: bytes) -> dict[str, Any]:
    """The attributes of the VecNormalize, or of the statistics, in a pickle: arrays, numbers, and dicts of statistics.

    Raises DataError if it holds anything else.
    """
    try:
        found = _Unpickler(io.BytesIO(data)).load()
        if isinstance(found, _Statistics):
            return _statistics(found)
        if not isinstance(found, _VecNormalize):
            raise DataError(f"it holds a {type(found).__name__}")
        count_parts(vars(found))
        return {"obs_rms": None, "ret_rms": None, **{name: _plain(value) for name, value in vars(found).items()}}
    except Exception as error:
        text = f"it is no normalization of Stable-Baselines ({type(error).__name__}: {error!s:.200})"
        raise DataError(text) from error


def _statistics(found: _Statistics) -> dict[str, Any]:
    kept = vars(found)
    return {"mean": _plain(kept["mean"]), "var": _plain(kept["var"]), "count": float(_plain(kept["count"]))}


def _plain(value: Any) -> Any:
    """A value, with arrays and statistics in place of what stands for them."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return _statistics(value) if isinstance(value, _Statistics) else value.value if type(value) is _Array else value


class _Unpickler(pickle._Unpickler):
    """Makes the parts of a VecNormalize that are needed, and nothing else."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]
    append: Callable[[Any], None]
    read: Callable[[int], bytes]

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a name."""
        if name in ("VecNormalize", "RunningMeanStd"):
            return _VecNormalize if name == "VecNormalize" else _Statistics
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if _INERT.fullmatch(module) and "." not in name:
            return _Inert
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")

    def _build(self) -> None:
        """Set the state of an object; not of a class or a function, which would stay so for all."""
        state = self.stack.pop()
        made: Any = self.stack[-1]
        if isinstance(made, _Array | _Type | _Inert):
            made.__setstate__(state)
        elif isinstance(made, _VecNormalize | _Statistics) and all(type(name) is str for name in state):
            vars(made).update(state)
        else:
            raise pickle.UnpicklingError(f"the state of a {type(made).__name__} has no place in it")

    def _bytearray(self) -> None:
        # Not of the size that the file says: it may say anything.
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))


def _checking_keys(load: Callable[[Any], None], first: Callable[[list[Any]], list[Any]]) -> Callable[[Any], None]:
    def checked(unpickler: Any) -> None:
        for key in first(unpickler.stack):
            check_key(key)
        load(unpickler)

    return checked


_Unpickler.dispatch[pickle.BUILD[0]] = _Unpickler._build
_Unpickler.dispatch[pickle.BYTEARRAY8[0]] = _Unpickler._bytearray
for _code, _keys in (
    (pickle.SETITEM[0], lambda stack: stack[-2:-1]),
    (pickle.SETITEMS[0], lambda stack: stack[::2]),
    (pickle.DICT[0], lambda stack: stack[::2]),
    (pickle.ADDITEMS[0], lambda stack: stack),
    (pickle.FROZENSET[0], lambda stack: stack),
):
    _Unpickler.dispatch[_code] = _checking_keys(_Unpickler.dispatch[_code], _keys)


# ---- writing -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Instance:
    """What becomes an object of this class, which need not be installed, with this state."""

    module: str
    name: str
    state: dict[str, Any]


class _Pickler(pickle._Pickler):
    """Writes instances of classes by their names alone."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)
    write: Callable[[bytes], None]
    save: Callable[[Any], None]
    memoize: Callable[[Any], None]

    def _instance(self, obj: _Instance) -> None:
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode() + pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.memoize(obj)
        self.save(obj.state)
        self.write(pickle.BUILD)


_Pickler.dispatch[_Instance] = _Pickler._instance
_THEIRS = "stable_baselines3.common"


def write_pickle(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write the attributes of a VecNormalize as Stable-Baselines3 does; statistics are given as data.

    What `read_pickle` would refuse, such as a space of the user's own class, is left out: a VecNormalize of
    Stable-Baselines3 asks its envs for it then.
    """
    state = {name: value for name, value in content.items() if value is not None or name == "norm_obs_keys"}
    for name in ("old_obs", "observation_space", "action_space", "metadata", "render_mode"):
        if name in state and not _is_plain(state[name]):
            del state[name]
    for name in {"obs_rms", "ret_rms"} & set(state):
        state[name] = _as_theirs(state[name])
    target = Path(path).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as file:
        _Pickler(file, 4).dump(_Instance(f"{_THEIRS}.vec_env.vec_normalize", "VecNormalize", state))


def _as_theirs(data: Any) -> Any:
    if isinstance(data.get("count"), float):
        return _Instance(f"{_THEIRS}.running_mean_std", "RunningMeanStd", data)
    return {key: _as_theirs(part) for key, part in data.items()}


def _is_plain(value: Any) -> bool:
    try:
        _Unpickler(io.BytesIO(pickle.dumps(value, 4))).load()
    except Exception:  # whatever an object of the user's raises while it is pickled
        return False
    return True

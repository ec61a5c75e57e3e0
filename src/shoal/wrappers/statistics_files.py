"""Files with the statistics of Normalize: our own, and the pickles of Stable-Baselines, read without running them."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np

from shoal.state.datafile import DataError, read_document, read_file, write_document
from shoal.wrappers.base import Array
from shoal.wrappers.running import RunningMeanStd

KIND, VERSION = "shoal normalization", 2
SETTINGS = ("training", "norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon", "norm_obs_keys")


def write_statistics(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write settings and statistics (as data) to a file: JSON, and arrays beside it. Missing folders are made."""
    Path(path).absolute().parent.mkdir(parents=True, exist_ok=True)
    arrays: list[Array] = []

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(value)
            return {"array": len(arrays) - 1}
        return value.item()  # numpy's numbers

    text = json.dumps(content, default=plain)
    write_document(path, {"what": KIND, "version": VERSION, "value": text}, arrays)


def read_statistics(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `write_statistics` wrote, or Stable-Baselines' VecNormalize or RunningMeanStd in its pickle.

    Such a pickle is read without Stable-Baselines, and nothing but arrays, numbers and spaces is made from it: a file
    with anything else in it is refused.

    Raises:
        DataError: it is neither.
    """
    with open(os.fspath(path), "rb") as file:
        start = file.read(4)
    content: Any = None
    if start[:2] == b"PK":
        content = _read_document(path)
    elif start[:1] == b"\x80":
        content = _read_pickle(path)
    if not isinstance(content, dict):
        raise DataError(f"{os.fspath(path)} has no normalization in it: expected a file that save() has written")
    return content


def _read_document(path: str | os.PathLike[str]) -> Any:
    header, arrays = read_document(path, KIND, VERSION)
    if header["version"] == 1:  # the first format, which is that of env states
        return read_file(path, KIND)

    def restored(node: dict[str, Any]) -> Any:
        return arrays[node["array"]] if node.keys() == {"array"} and type(node["array"]) is int else node

    try:
        return json.loads(header["value"], object_hook=restored)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise DataError(f"{os.fspath(path)} is damaged: {error}") from error


def _read_pickle(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        found = _Unpickler(io.BytesIO(Path(path).read_bytes())).load()
    except Exception as error:
        raise DataError(f"{os.fspath(path)} is no normalization of Stable-Baselines: {error}") from error
    if isinstance(found, RunningMeanStd):
        return found.as_data()
    if not isinstance(found, _VecNormalize):
        raise DataError(f"{os.fspath(path)} holds a {type(found).__name__}, no VecNormalize")
    content = {name: getattr(found, name) for name in SETTINGS if hasattr(found, name)}
    return content | {name: data_of(getattr(found, name, None)) for name in ("obs_rms", "ret_rms")}


def data_of(statistics: Any) -> Any:
    """Statistics as data: ours, or others with mean, var and count, also by key; None for None."""
    if statistics is None:
        return None
    if isinstance(statistics, dict):
        return {key: data_of(value) for key, value in statistics.items()}
    return RunningMeanStd.as_data(statistics)


class _VecNormalize:
    """Stands for Stable-Baselines' VecNormalize."""


class _Inert:
    """Stands for parts that are not needed: spaces, random generators. It takes any arguments and any state."""

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# The only names that a pickle may use as they are.
_HARMLESS = {
    ("numpy", "ndarray"), ("numpy", "dtype"), ("collections", "OrderedDict"), ("builtins", "set"),
    ("builtins", "frozenset"), ("_codecs", "encode"),
    *((f"{core}.{module}", name) for core in ("numpy.core", "numpy._core")
      for module, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))),
}  # fmt: skip
_INERT = re.compile(r"(gym|gymnasium)\.spaces(\.\w+)*|numpy\.random\.\w+")


class _Unpickler(pickle.Unpickler):
    """Makes the parts of a VecNormalize that are needed, and nothing else."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        # Classes for this file alone, as a pickle may set attributes of classes, too.
        bases = (("VecNormalize", _VecNormalize), ("RunningMeanStd", RunningMeanStd), ("_Inert", _Inert))
        self._own: dict[str, Any] = {name: type(name, (base,), {}) for name, base in bases}

    def find_class(self, module: str, name: str) -> Any:
        if name in ("VecNormalize", "RunningMeanStd"):
            return self._own[name]
        if (module, name) in _HARMLESS:
            return super().find_class(module, name)
        if _INERT.fullmatch(module) and "." not in name:
            return self._own["_Inert"]
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")

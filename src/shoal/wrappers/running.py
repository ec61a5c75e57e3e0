"""Mean and variance of everything seen so far, and files that hold them."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal import native
from shoal.ranks import Ranks
from shoal.state.datafile import DataError, read_document, read_file, write_document
from shoal.wrappers.base import Array

__all__ = ["RunningMeanStd", "merge_ranks", "read_statistics", "standardized", "write_statistics"]

KIND, VERSION = "shoal normalization", 2


class RunningMeanStd:
    """Mean and variance over the first axis of all batches, merged by the parallel algorithm.

    Args:
        epsilon: how many observations the start, mean 0 and variance 1, counts for.
        shape: of one observation.
    """

    # Where ranks merge what they have seen: what all had after the last merge, and what this one has seen since.
    _common: RunningMeanStd | None = None
    _fresh: RunningMeanStd | None = None

    def __init__(self, epsilon: float = 1e-4, shape: tuple[int, ...] = ()):
        self.mean: Array = np.zeros(shape, np.float64)
        self.var: Array = np.ones(shape, np.float64)
        self.count = float(epsilon)

    def update(self, batch: Any) -> None:
        """Take in a batch [n, ...]."""
        values = _plain(batch, np.shape(self.mean))
        # New arrays: somebody may hold the old ones.
        mean, var = np.array(self.mean, np.float64), np.array(self.var, np.float64)
        self.count = native.merge(values.dtype.kind, values, mean, var, self.count)
        self.mean, self.var = mean, var
        if self._fresh is not None:
            self._fresh.update(values)

    def standardize(self, values: Any, epsilon: float, limit: float) -> Array:
        """Values [..., *shape] brought to mean 0 and variance 1, and into [-limit, limit], as float32."""
        return standardized(values, self.mean, self.var, epsilon, limit)

    def update_from_moments(self, mean: Any, var: Any, count: float) -> None:
        """Take in a batch of which only this is known."""
        if not count:
            return  # nothing, also to one that has seen nothing: 0 / 0
        total = self.count + count
        delta = mean - self.mean
        share, rest = count / total, self.count / total  # 1 - share would lose what a small count has to say
        self.var = self.var * rest + var * share + delta * delta * (share * rest)
        self.mean = self.mean + delta * share
        self.count = total
        if self._fresh is not None:
            self._fresh.update_from_moments(mean, var, count)

    def combine(self, other: RunningMeanStd) -> None:
        """Take in all that another one has seen."""
        self.update_from_moments(other.mean, other.var, other.count)

    def keep_apart(self) -> None:
        """Note from now on what is new, for `merge_ranks`; what is known already is what all ranks have in common."""
        if self._common is None:
            self._common, self._fresh = self.copy(), RunningMeanStd(0.0, np.shape(self.mean))

    def copy(self) -> RunningMeanStd:
        """Another one that has seen the same."""
        twin = type(self)(shape=np.shape(self.mean))
        twin.mean, twin.var, twin.count = np.copy(self.mean), np.copy(self.var), self.count
        return twin

    def as_data(self) -> dict[str, Any]:
        """What `from_data` reads."""
        return {"mean": np.asarray(self.mean), "var": np.asarray(self.var), "count": float(self.count)}

    @classmethod
    def from_data(cls, data: Any) -> RunningMeanStd:
        """Raises DataError if these are no statistics."""
        try:
            new = cls()
            new.mean, new.var = np.array(data["mean"], np.float64), np.array(data["var"], np.float64)
            new.count = float(data["count"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"these are no statistics: {error}") from error
        if new.mean.shape != new.var.shape or not new.count > 0 or not (new.var >= 0).all():
            raise DataError("these are no statistics: mean, variance and count do not fit each other")
        return new

    def __repr__(self) -> str:
        return f"RunningMeanStd(shape={np.shape(self.mean)}, count={self.count:g})"


def merge_ranks(statistics: Sequence[RunningMeanStd], ranks: Ranks) -> None:
    """Let these statistics be those of all that all ranks have seen: all ranks call it, with the same ones.

    What is new since the last merge is gathered and taken in rank by rank, so that all ranks get the same bits, and
    nothing counts twice, the start included. What they knew before `keep_apart` was called must be the same everywhere.

    Raises:
        ValueError: on every rank, if they had different statistics to begin with.
    """
    for one in statistics:
        one.keep_apart()
    common = [_as_row(one._common) for one in statistics]
    fresh = [_as_row(one._fresh) for one in statistics]
    rows = ranks.allgather(np.concatenate([*common, *fresh]))
    width = rows.shape[1] // 2
    for rank, row in enumerate(rows[:, :width]):
        if row.tobytes() != rows[0, :width].tobytes():
            raise ValueError(
                f"merge_ranks: rank {rank} began with other statistics than rank 0: load the same file on every rank"
            )
    ends = np.cumsum([len(row) for row in fresh])[:-1]
    shares = [np.split(row, ends) for row in rows[:, width:]]  # by rank, then by statistics
    for i, one in enumerate(statistics):
        _take_in(one, [share[i] for share in shares])


def _as_row(moments: RunningMeanStd | None) -> Array:
    assert moments is not None
    return np.concatenate([[moments.count], np.ravel(moments.mean), np.ravel(moments.var)])


def _take_in(statistics: RunningMeanStd, shares: Sequence[Array]) -> None:
    merged, shape = statistics._common, np.shape(statistics.mean)
    assert merged is not None
    for share in shares:
        mean, var = share[1:].reshape(2, *shape)
        if share[0] > 0:
            merged.update_from_moments(mean, var, float(share[0]))
    statistics.mean, statistics.var, statistics.count = np.copy(merged.mean), np.copy(merged.var), merged.count
    statistics._common = statistics._fresh = None
    statistics.keep_apart()


def _plain(batch: Any, shape: tuple[int, ...]) -> Array:
    """As the core takes it: rows of this shape."""
    values = batch if type(batch) is np.ndarray else np.asarray(batch)
    if values.shape[values.ndim - len(shape) :] != shape:
        raise ValueError(f"expected values of shape {shape}, found {values.shape}")
    if values.dtype.char not in "fdB" or not values.dtype.isnative:
        values = values.astype(np.float64)
    return values if values.flags.c_contiguous else np.asarray(values, order="C")


def standardized(values: Any, mean: Any, var: Any, epsilon: float, limit: float) -> Array:
    """See RunningMeanStd.standardize; for any statistics, Stable-Baselines' own among them."""
    mean, var = np.asarray(mean, np.float64, order="C"), np.asarray(var, np.float64, order="C")
    plain = _plain(values, mean.shape)
    out = np.empty(plain.shape, np.float32)
    native.standardize(plain.dtype.kind, plain, mean, var, epsilon, limit, out)
    return out


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
    if not isinstance(found, _Saved):
        raise DataError(f"{os.fspath(path)} holds a {type(found).__name__}, no VecNormalize")
    content = {name: getattr(found, name) for name in SETTINGS if hasattr(found, name)}
    for name in ("obs_rms", "ret_rms"):
        content[name] = _as_data(getattr(found, name, None))
    return content


SETTINGS = ("training", "norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon", "norm_obs_keys")


def _as_data(statistics: Any) -> Any:
    if isinstance(statistics, dict):
        return {key: _as_data(value) for key, value in statistics.items()}
    return statistics.as_data() if isinstance(statistics, RunningMeanStd) else None


class _Saved:
    """Stands for Stable-Baselines' VecNormalize."""


class _Inert:
    """Stands for what nobody needs: spaces, random generators. Takes everything, and does nothing with it."""

    def __new__(cls, *_: Any, **__: Any) -> _Inert:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# All that is made from a pickle as it is, by its full name.
_HARMLESS = {
    ("numpy", "ndarray"), ("numpy", "dtype"), ("collections", "OrderedDict"), ("builtins", "set"),
    ("builtins", "frozenset"), ("_codecs", "encode"),
    *((f"{core}.{module}", name) for core in ("numpy.core", "numpy._core")
      for module, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))),
}  # fmt: skip
_INERT = re.compile(r"(gym|gymnasium)\.spaces(\.\w+)*|numpy\.random\.\w+")


class _Unpickler(pickle.Unpickler):
    """Makes the parts of a VecNormalize that we need, and nothing else."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        # Of this file alone: a pickle may set attributes of classes too.
        self._saved: Any = type("_Saved", (_Saved,), {})
        self._statistics: Any = type("RunningMeanStd", (RunningMeanStd,), {})
        self._inert: Any = type("_Inert", (_Inert,), {})

    def find_class(self, module: str, name: str) -> Any:
        if name == "VecNormalize":
            return self._saved
        if name == "RunningMeanStd":
            return self._statistics
        if (module, name) in _HARMLESS:
            return super().find_class(module, name)
        if _INERT.fullmatch(module) and "." not in name:
            return self._inert
        raise pickle.UnpicklingError(f"{module}.{name} has no place in it")

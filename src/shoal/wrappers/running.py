"""Mean and variance of all values seen so far, in this process or in all ranks, and the files of Normalize.

The files are our own, and the pickles of Stable-Baselines, which are read without running them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal import native
from shoal.errors import DataError
from shoal.ranks import Ranks
from shoal.state.datafile import read_document, read_file, write_document
from shoal.wrappers.base import Array
from shoal.wrappers.sb3_pickles import read_pickle

KIND, VERSION = "shoal normalization", 2
SETTINGS = ("training", "norm_obs", "norm_reward", "clip_obs", "clip_reward", "gamma", "epsilon", "norm_obs_keys")


class RunningMeanStd:
    """Mean and variance over the first axis of all batches, merged by the parallel algorithm.

    Args:
        epsilon: how many observations the start (mean 0, variance 1) counts for.
        shape: of one observation.
    """

    # For merging ranks: the statistics that all had after the last merge, and those of what this rank saw since.
    _common: RunningMeanStd | None = None
    _fresh: RunningMeanStd | None = None

    def __init__(self, epsilon: float = 1e-4, shape: tuple[int, ...] = ()):
        self.mean: Array = np.zeros(shape, np.float64)
        self.var: Array = np.ones(shape, np.float64)
        self.count = float(epsilon)

    def update(self, batch: Any) -> None:
        """Add a batch [n, ...]."""
        values = _plain(batch, np.shape(self.mean))
        # New arrays, as callers may hold the old ones.
        mean, var = np.array(self.mean, np.float64), np.array(self.var, np.float64)
        self.count = native.merge(values.dtype.kind, values, mean, var, self.count)
        self.mean, self.var = mean, var
        if self._fresh is not None:
            self._fresh.update(values)

    def standardize(self, values: Any, epsilon: float, limit: float) -> Array:
        """The values [..., *shape] by (values - mean) / sqrt(var + epsilon), within [-limit, limit], as float32."""
        return standardized(values, self.mean, self.var, epsilon, limit)

    def update_from_moments(self, mean: Any, var: Any, count: float) -> None:
        """Add a batch of which only mean, variance (var) and size (count) are known."""
        if not count:
            return  # if this has seen nothing either, the sums below would be 0 / 0
        total = self.count + count
        delta = mean - self.mean
        share, rest = count / total, self.count / total  # 1 - share would be inexact for small counts
        self.var = self.var * rest + var * share + delta * delta * (share * rest)
        self.mean = self.mean + delta * share
        self.count = total
        if self._fresh is not None:
            self._fresh.update_from_moments(mean, var, count)

    def combine(self, other: RunningMeanStd) -> None:
        """Add all that another one has seen."""
        self.update_from_moments(other.mean, other.var, other.count)

    def keep_apart(self) -> None:
        """From now on, also keep the statistics of new values alone, for `merge_ranks`. All ranks must be equal now."""
        if self._common is None:
            self._common, self._fresh = self.copy(), RunningMeanStd(0.0, np.shape(self.mean))

    def copy(self) -> RunningMeanStd:
        """Return a copy that shares nothing with this one."""
        copied = type(self)(shape=np.shape(self.mean))
        copied.mean, copied.var, copied.count = np.copy(self.mean), np.copy(self.var), self.count
        return copied

    def as_data(self) -> dict[str, Any]:
        """The statistics as data, which `from_data` reads."""
        return {"mean": np.asarray(self.mean), "var": np.asarray(self.var), "count": float(self.count)}

    @classmethod
    def from_data(cls, data: Any) -> RunningMeanStd:
        """The statistics that `as_data` returned. Raises DataError if these are none."""
        new = cls()
        try:
            mean, var = np.asarray(data["mean"]), np.asarray(data["var"])
            if mean.dtype.kind not in "biuf" or var.dtype.kind not in "biuf":
                raise DataError(f"these are no statistics: they are of {mean.dtype} and {var.dtype}")
            new.mean, new.var, new.count = np.array(mean, np.float64), np.array(var, np.float64), float(data["count"])
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise DataError(f"these are no statistics: {error!s:.200}") from error
        finite = np.isfinite(new.mean).all() and np.isfinite(new.var).all() and np.isfinite(new.count)
        if not finite or new.mean.shape != new.var.shape or not new.count > 0 or not (new.var >= 0).all():
            raise DataError("these are no statistics: mean, variance and count do not fit each other")
        return new

    def __repr__(self) -> str:
        return f"RunningMeanStd(shape={np.shape(self.mean)}, count={self.count:g})"


def merge_ranks(statistics: Sequence[RunningMeanStd], ranks: Ranks) -> None:
    """Merge the statistics of all ranks into these. All ranks must call it, with statistics of the same shapes.

    Each rank gathers what all ranks have seen since the last merge, and adds it rank by rank. So all ranks get the same
    bits, and nothing counts twice. What they had when `keep_apart` was called must be the same everywhere.

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
        merged: Any = one._common
        for share in shares:
            count, moments = float(share[i][0]), share[i][1:].reshape(2, *np.shape(one.mean))
            merged.update_from_moments(*moments, count)
        one.mean, one.var, one.count = np.copy(merged.mean), np.copy(merged.var), merged.count
        one._common = one._fresh = None
        one.keep_apart()


def _as_row(moments: Any) -> Array:
    return np.concatenate([[moments.count], np.ravel(moments.mean), np.ravel(moments.var)])


def _plain(batch: Any, shape: tuple[int, ...]) -> Array:
    """The batch as the core takes it: rows of this shape, contiguous, float32, float64 or uint8."""
    values = batch if type(batch) is np.ndarray else np.asarray(batch)
    if values.shape[values.ndim - len(shape) :] != shape:
        raise ValueError(f"expected values of shape {shape}, found {values.shape}")
    if values.dtype.char not in "fdB" or not values.dtype.isnative:
        values = values.astype(np.float64)
    return values if values.flags.c_contiguous else np.asarray(values, order="C")


def standardized(values: Any, mean: Any, var: Any, epsilon: float, limit: float) -> Array:
    """As RunningMeanStd.standardize, for any mean and variance."""
    mean, var = np.asarray(mean, np.float64, order="C"), np.asarray(var, np.float64, order="C")
    plain = _plain(values, mean.shape)
    out = np.empty(plain.shape, np.float32)
    native.standardize(plain.dtype.kind, plain, mean, var, epsilon, limit, out)
    return out


# ---- files ---------------------------------------------------------------------------------------------------


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
    _check_settings(content, os.fspath(path))
    return content


def _check_settings(content: dict[str, Any], name: str) -> None:
    """Raise DataError for settings that Normalize takes as they are; it checks its numbers itself."""
    switches = [content[switch] for switch in ("training", "norm_obs", "norm_reward") if switch in content]
    if not all(isinstance(switch, bool | np.bool_) for switch in switches):
        raise DataError(f"{name} is damaged: its switches are not all true or false")
    keys = content.get("norm_obs_keys")
    if keys is not None and not (isinstance(keys, list | tuple) and all(type(key) is str for key in keys)):
        raise DataError(f"{name} is damaged: norm_obs_keys is no list of texts")


def _read_document(path: str | os.PathLike[str]) -> Any:
    header, arrays = read_document(path, KIND, VERSION)
    if header["version"] == 1:  # the first format, which is that of env states
        return read_file(path, KIND)

    def restored(node: dict[str, Any]) -> Any:
        return arrays[node["array"]] if node.keys() == {"array"} and type(node["array"]) is int else node

    try:
        return json.loads(header["value"], object_hook=restored)
    except (KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise DataError(f"{os.fspath(path)} is damaged: {error!s:.200}") from error


def _read_pickle(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        return read_pickle(Path(path).read_bytes())
    except DataError as error:
        raise DataError(f"{os.fspath(path)}: {error}") from error


def data_of(statistics: Any) -> Any:
    """Statistics as data: ours, or others with mean, var and count, also by key; None for None."""
    if statistics is None:
        return None
    if isinstance(statistics, dict):
        return {key: data_of(value) for key, value in statistics.items()}
    return RunningMeanStd.as_data(statistics)

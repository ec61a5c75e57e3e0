"""The core's functions on arrays in plain Python: bounds of actions, running moments, rows of agents and of infos."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.native.layout import STATUS_INFO

__all__ = ["merge", "outside", "standardize", "take_infos", "write_rows"]

Array = npt.NDArray[Any]


def outside(kind: str, values: Array, low: Array, high: Array) -> int:
    """The flat index of the first value outside its bounds (a NaN is outside), -1 for none."""
    inside = (values >= low) & (values <= high)
    return -1 if inside.all() else int(np.argmin(inside))


def merge(kind: str, values: Array, mean: Array, var: Array, count: float) -> float:
    """Take the rows of `values` into a running mean and variance, in place, of `count` rows so far; the new count."""
    rows = values.reshape(-1, *mean.shape)
    if len(rows) == 0:
        return count
    total = count + len(rows)
    share = len(rows) / total
    fresh = np.add.reduce(rows, 0, np.float64) / len(rows)
    centred = rows - fresh
    delta = fresh - mean
    spread = np.add.reduce(centred * centred, 0) / len(rows)
    var[...] = var * (1.0 - share) + spread * share + delta * delta * (share * (1.0 - share))
    mean += delta * share
    return total


def standardize(kind: str, values: Array, mean: Array, var: Array, epsilon: float, limit: float, out: Array) -> None:
    """Write (values - mean) / sqrt(var + epsilon), within [-limit, limit], into `out`."""
    result = (values.reshape(-1, *mean.shape) - mean) / np.sqrt(var + epsilon)
    out[...] = np.maximum(np.minimum(result, limit), -limit).reshape(out.shape)


def take_infos(flags: Array, rows: Array, head: bytes, words: Array) -> bool:
    """Copy rows of infos, uint8 [n, bytes], so that each of their words of eight bytes becomes a row of `words`.

    Returns:
        Whether all lanes have a row that begins with `head`, and nothing beside it, as their flags say. Otherwise
        `words` holds nothing of use.
    """
    if (flags != STATUS_INFO).any() or rows[:, : len(head)].tobytes() != head * len(rows):
        return False
    words[...] = rows.view(np.float64)[:, : len(words)].T
    return True


def write_rows(
    names: tuple[Any, ...],
    rows: tuple[int, ...],
    observations: Any,
    rewards: Any,
    terminated: Any,
    truncated: Any,
    reward: Array,
    targets: tuple[Array, ...],
    paths: tuple[tuple[Any, ...], ...],
) -> bool:
    """Write what agents answer, given as dicts by agent, into these rows of a batch.

    Args:
        reward: of the batch, and so are `targets`, one for each leaf of the observations; `paths` lead to the leaves.

    Returns:
        False where one of them has ended, or anything is not exactly as the batch has it; some may have been written.
    """
    try:
        for name, row in zip(names, rows, strict=True):
            if terminated.get(name) or truncated.get(name):
                return False
            reward[row] = rewards[name]
            for target, path in zip(targets, paths, strict=True):
                value = observations[name]
                for key in path:
                    value = value[key]
                if not _fits_row(value, target):
                    return False
                target[row] = value
    except Exception:
        return False  # the caller then writes row by row, and says what is wrong
    return True


def _fits_row(value: Any, target: Array) -> bool:
    if target.ndim == 1:
        return target.dtype == np.int64 and isinstance(value, int | np.integer)
    return isinstance(value, np.ndarray) and value.dtype == target.dtype and value.shape == target.shape[1:]

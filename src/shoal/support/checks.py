"""Checks of arguments. Each error names the argument, what was expected, and what was found."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import BadAction

Ids = npt.NDArray[np.int64]
Options = dict[str, Any] | Sequence[dict[str, Any] | None] | None
Seed = int | Sequence[int | None] | npt.NDArray[Any] | None


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise ValueError unless the value is one of the allowed words."""
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, found {value!r}")


def check_names(name: str, given: Iterable[Any], known: Sequence[str]) -> None:
    """Raise ValueError if any of the given names is unknown; the error suggests the closest known name."""
    unknown = sorted(map(str, set(given) - set(known)))
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f": did you mean {close[0]}?" if close else ""
        raise ValueError(f"{name}: expected {', '.join(known)}, found {', '.join(unknown)}{hint}")


def truth(name: str, value: Any) -> bool:
    """Whether a flag of an env is true. Raises TypeError for a text, of which "False" would be true."""
    if value and isinstance(value, str | bytes):
        raise TypeError(f"{name} must be a bool, got {value!r}")
    return bool(value)


def refuse_pickling(what: object) -> Any:
    """Raise TypeError, as the `__reduce__` of a pool and of its faces."""
    raise TypeError(
        f"a {type(what).__name__} of Shoal cannot be pickled or copied: its envs, workers and shared memory belong to "
        "this process. Pass the function that makes it, and call that where it is needed; for the state of the envs "
        "there is Pool.snapshot"
    )


def whole_number(name: str, value: Any, low: int, high: int) -> int:
    """The value as an int. Raises ValueError unless it is a whole number from `low` to `high`."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or not low <= value <= high:
        raise ValueError(f"{name}: expected a whole number from {low} to {high}, found {value!r}")
    return int(value)


def positive_number(name: str, value: Any) -> float:
    """The value as a float. Raises ValueError unless it is a number above 0."""
    if not _is_number(value) or not value > 0:
        raise ValueError(f"{name}: expected a number above 0, or None, found {value!r}")
    return float(value)


def number(name: str, value: Any, low: float, high: float) -> float:
    """The value as a float. Raises ValueError unless it is a number from `low` to `high`."""
    if not _is_number(value) or not low <= value <= high:
        raise ValueError(f"{name}: expected a number from {low:g} to {high:g}, found {value!r}")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def spread_seed(seed: Seed, ids: Ids) -> list[int | None]:
    """One seed for each env id, as Gymnasium gives them out."""
    if seed is None:
        return [None] * len(ids)
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
        return [int(seed) + lane for lane in ids.tolist()]
    if isinstance(seed, str) or not isinstance(seed, Sequence | np.ndarray):
        raise TypeError(f"seed: expected an int, a list of ints or None, found {seed!r}")
    if len(seed) != len(ids):
        raise ValueError(f"seed: expected {len(ids)} seeds, one per env, found {len(seed)}")
    for one in seed:
        if one is not None and (isinstance(one, bool | np.bool_) or not isinstance(one, int | np.integer)):
            raise TypeError(f"seed: expected ints, found {one!r} among them")
    return [None if one is None else int(one) for one in seed]


@dataclass(frozen=True)
class OptionsForAll:
    """Options of whatever kind, for every env as they are."""

    options: Any


def spread_options(options: Options | OptionsForAll, count: int) -> Sequence[dict[str, Any] | None]:
    """The options of each of `count` envs."""
    if isinstance(options, OptionsForAll):
        return [options.options] * count
    if options is None or isinstance(options, dict):
        return [options] * count
    if isinstance(options, str) or not isinstance(options, Sequence):
        raise TypeError(f"options: expected a dict, a list of dicts or None, found {type(options).__name__}")
    if len(options) != count:
        raise ValueError(f"options: expected {count} of them, one per env, found {len(options)}")
    for one in options:
        if one is not None and not isinstance(one, dict):
            raise TypeError(f"options: expected dicts, found {one!r} among them")
    return options


def check_ids(env_ids: Any, count: int) -> Ids:
    """Env ids as an array. Raises BadAction unless they are a list of different envs from 0 to `count` - 1."""
    try:
        ids = np.atleast_1d(np.asarray(env_ids))
    except ValueError as error:
        raise BadAction(f"env_ids cannot be made into an array: {error}") from error
    if ids.dtype.kind not in "iu" or ids.ndim != 1 or len(ids) == 0:
        raise BadAction(f"env_ids: expected a list of whole numbers, at least one, found {env_ids!r}")
    ids = np.ascontiguousarray(ids, np.int64)
    wrong = ids[(ids < 0) | (ids >= count)]
    if len(wrong):
        raise BadAction(f"env_ids: there is no env {wrong[0]}; this pool has envs 0 to {count - 1}")
    unique, counts = np.unique(ids, return_counts=True)
    if len(unique) != len(ids):
        raise BadAction(f"env_ids: env {unique[counts > 1][0]} is named more than once")
    return ids

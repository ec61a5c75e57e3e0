"""What a send is given, in plain Python: which lanes, and a batch of actions of whatever type. The twin of actions.h.

What is refused here is left to `spaces.leaves.read_actions`, which takes it after all or says what is wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def cast_actions(actions: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
    """The actions as an array of this type and shape; None where they need a second look."""
    try:
        array = np.asarray(actions)
    except Exception:  # which may be anything, as this may run code of others
        return None
    if array.shape != shape or not array.dtype.isnative:
        return None
    if array.dtype == dtype:
        return array
    kind = array.dtype.kind
    if dtype.kind == "f":
        taken = kind in "fiub" and dtype.itemsize >= 4 and array.dtype.itemsize <= 8
    else:
        taken = dtype.kind in "iu" and kind in "iub"
    if not taken:
        return None
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if dtype.kind == "f":  # what is too large for a float is left to NumPy, which warns
        lost = bool(np.isinf(cast).any()) and not bool(np.isinf(array[np.isinf(cast)]).all())
    else:  # 300 must not become 44 in a uint8
        lost = not np.array_equal(cast, array)
    return None if lost else cast


def are_lanes(ids: Any, count: int, leader: Any) -> bool:
    """Whether these are ids of different lanes, and whole groups in their order; `leader` is a slice for no groups."""
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1 or not 0 < len(ids) <= count:
        return False
    if ids.min() < 0 or ids.max() >= count or len(np.unique(ids)) != len(ids):
        return False
    if isinstance(leader, slice):
        return True
    ends = leader[ids] == ids
    begins = np.append(True, ends[:-1])  # where a group must begin
    first = (ids == 0) | (leader[ids - 1] == ids - 1)
    return bool(ends[-1] and first[begins].all() and (np.diff(ids)[~begins[1:]] == 1).all())

"""What a file may not do to its reader: fill the memory, take for ever, or hold bytes that numpy does not expect."""

from __future__ import annotations

import os
import zipfile
from typing import Any, BinaryIO, TypeVar

import numpy as np

from shoal.errors import DataError

MOST_PARTS_OF_A_KEY = 1000  # the hash of a tuple goes through all its parts, and through a shared one again and again
MOST_PARTS, MOST_DEEP = 1_000_000, 100  # of an info, or of objects in an observation

T = TypeVar("T")


def check_zip(file: BinaryIO) -> None:
    """Raise DataError unless all members are stored as they are, so that they take no more room than the file."""
    size = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as members:
        found = members.infolist()
    plain = all(one.compress_type == zipfile.ZIP_STORED for one in found)
    if not plain or sum(one.file_size for one in found) > size or len({one.filename for one in found}) < len(found):
        raise DataError("its parts are compressed, or larger than the file, or have one name")
    file.seek(0)


def check_key(key: T) -> T:
    """The key. Raises DataError if it has so many parts that its hash would take long."""
    if type(key) is tuple:
        count_parts(key, MOST_PARTS_OF_A_KEY)
    return key


def count_parts(value: Any, most: int = MOST_PARTS, deepest: int = MOST_DEEP) -> None:
    """Raise DataError if a value has too many parts, shared ones counted each time, or is nested too deeply."""
    rest = [(value, 0)]
    while rest:
        one, depth = rest.pop()
        most -= 1
        if most < 0 or depth > deepest:
            raise DataError("the data are damaged: a value has too many parts, or is nested too deeply")
        if isinstance(one, dict):
            rest += [(part, depth + 1) for pair in one.items() for part in pair]
        elif isinstance(one, list | tuple | set | frozenset) or type(one).__name__ == "deque":
            rest += [(part, depth + 1) for part in one]


def check_content(array: Any) -> Any:
    """The array. Raises DataError if it holds bytes that its type does not have: numpy takes them for granted."""
    if array.dtype.hasobject:
        raise DataError("the data are damaged: an array of objects")
    for part in _plain_parts(array):
        if part.dtype.kind == "b" and part.size and part.view(np.uint8).max() > 1:
            raise DataError("the data are damaged: a truth value is neither 0 nor 1")
        if part.dtype.kind == "U" and part.size and part.dtype.itemsize:
            points = np.ascontiguousarray(part).view(part.dtype.byteorder.replace("|", "=") + "u4")
            if points.max() > 0x10FFFF:
                raise DataError("the data are damaged: a text has a character that there is not")
    return array


def _plain_parts(array: Any) -> list[Any]:
    if array.dtype.names is None:
        return [array]
    return [part for name in array.dtype.names for part in _plain_parts(array[name])]

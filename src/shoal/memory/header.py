"""The slab's first bytes: what it is and where its counters lie, for readers in other processes.

    magic (8 bytes) | version (uint32) | length (uint32) | JSON of that length

The JSON names every field and column that may be read, so that one version of Shoal can look at the pools of another.
VERSION changes only where an older reader would misunderstand.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.native.layout import HEADER_BYTES

MAGIC = b"shoal\0\r\n"
VERSION = 1
SIZE = HEADER_BYTES  # of the whole header in the slab
_HEAD = struct.Struct("<8sII")
Page = npt.NDArray[np.uint8]


class NoHeader(Exception):
    """No pool's slab, or not any more, or one that is just being made."""


class OtherVersion(Exception):
    """A pool of a version of Shoal that writes another kind of header."""


def write(page: Page, facts: Mapping[str, Any]) -> None:
    """Put the header into the first SIZE bytes of a slab; the magic last, so that it shows that the rest is there."""
    text = json.dumps(facts).encode()
    data = _HEAD.pack(MAGIC, VERSION, len(text)) + text
    if len(data) > SIZE:
        raise ValueError(f"a header of {len(data)} bytes does not fit into {SIZE}")
    page[len(MAGIC) : len(data)] = np.frombuffer(data[len(MAGIC) :], np.uint8)
    page[: len(MAGIC)] = np.frombuffer(MAGIC, np.uint8)


def withdraw(page: Page) -> None:
    """The pool is closed: readers shall not take it for a running one, though arrays of it may live on."""
    page[: len(MAGIC)] = 0


def read(data: bytes) -> dict[str, Any]:
    """The facts in the first SIZE bytes of a slab. Raises NoHeader or OtherVersion."""
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        raise NoHeader("there is no header")
    _, version, length = _HEAD.unpack_from(data)
    if version != VERSION:
        raise OtherVersion(f"its header has version {version}, and this Shoal reads version {VERSION}")
    try:
        facts = json.loads(data[_HEAD.size : _HEAD.size + length])
    except (ValueError, RecursionError) as error:
        raise NoHeader(f"its header is torn: {error}") from error
    if not isinstance(facts, dict):
        raise NoHeader("its header is no header")
    return facts

"""Schemas of infos: which keys the infos of an env have, and where the values lie in a row of the slab.

What an env returns as info settles after a few steps: numbers and small arrays under fixed keys, and dicts of such. Its
worker learns the keys, in their order, as a schema. From then on the core writes infos into rows (`native/infos.h`),
and the caller reads them as columns (`memory.infos`). A key that turns up later makes a new schema, which has the old
keys too. A row begins with the id of its schema, so old and new rows can lie side by side, and no side waits for the
other. What has no room in a row (texts, objects, arrays that are large or change their shape) travels as a note.

Each worker writes its schemas into a part of the slab of its own, one after the other, and never changes them. So the
caller can read them at any time, and a worker that is started again goes on with them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.memory.messages import RESTART_INFO
from shoal.memory.slab import Slab
from shoal.native import layout

__all__ = ["NUMBERS", "Entry", "InfoLearner", "Schema", "read_schemas"]

# The types of NumPy's numbers, as the core gets them: the i-th has the tag INFO_NUMBER + i.
NUMBERS = (
    np.float64, np.float32, np.int64, np.bool_, np.int32, np.uint8, np.int8, np.int16, np.uint16, np.uint32, np.uint64,
    np.float16,
)  # fmt: skip
NUMBER, DICT = chr(layout.INFO_KIND_NUMBER), chr(layout.INFO_KIND_DICT)
OBJECT, SKIPPED = chr(layout.INFO_KIND_OBJECT), chr(layout.INFO_KIND_SKIPPED)
KEPT = ("final_obs", "final_info", RESTART_INFO)  # what Shoal itself puts into infos, and no option leaves out
DEEPEST = 8  # dicts inside of dicts; what lies deeper travels as a note
MOST_ENTRIES = 200
MOST_FAILURES = 100  # infos that no schema can be made for; then it is not tried any more
HEAD = np.dtype([("count", "<u4"), ("used", "<u4")])  # of a worker's part of `info_schemas`


class Entry(NamedTuple):
    """One key of a schema. Entries of a nested dict follow that of their parent.

    Attributes:
        end: the number of the entry after the last one below this one.
        kind: "n" for a number, "d" for dicts only, "o" for what travels as a note, "x" for what is not wanted, or the
            type of an array, in NumPy's notation.
        shape: of an array.
        offset: where the value lies in a row.
    """

    key: str
    end: int
    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def is_array(self) -> bool:
        """Whether it is an array, if it is anything."""
        return len(self.kind) > 1

    @property
    def nbytes(self) -> int:
        """Size of the value in a row."""
        if self.is_array:
            return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.kind).itemsize
        return 8 if self.kind == NUMBER else 0

    def described(self) -> tuple[Any, ...]:
        """The entry as the core wants it: (key, end, (offset, itemsize, nbytes, code, shape, path, stride))."""
        code, itemsize = self.kind, 8
        if self.is_array:
            dtype = np.dtype(self.kind)
            code, itemsize = dtype.kind, dtype.itemsize
        return self.key, self.end, (self.offset, itemsize, self.nbytes, code, self.shape, (), self.nbytes)


@dataclass(frozen=True)
class Node:
    """One key of a schema that is being made, and the keys below it."""

    key: str
    kind: str
    shape: tuple[int, ...] = ()
    below: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Schema:
    """The keys of infos, and where their values lie.

    Attributes:
        id: the same for equal schemas, in every worker and process; never 0.
        names: what the value of each entry is called in notes and errors: its key, or its path of keys if it is nested.
        row_bytes: how much of a row it uses, in whole words of eight bytes.
    """

    nodes: tuple[Node, ...]
    entries: tuple[Entry, ...] = field(init=False, compare=False)
    names: tuple[Any, ...] = field(init=False, compare=False)
    id: int = field(init=False, compare=False)
    row_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        flat = list(_flat(self.nodes, 0))
        offset, entries = _words(layout.INFO_TAGS + len(flat)), []
        for node, end in flat:
            entry = Entry(node.key, end, node.kind, node.shape, offset)
            entries.append(entry)
            offset += _words(entry.nbytes)
        digest = hashlib.blake2b(self.text().encode(), digest_size=8).digest()
        object.__setattr__(self, "entries", tuple(entries))
        object.__setattr__(self, "names", tuple(p[0] if len(p) == 1 else p for p in _paths(self.nodes, ())))
        object.__setattr__(self, "row_bytes", offset)
        object.__setattr__(self, "id", int.from_bytes(digest, "little", signed=True) or 1)

    def text(self) -> str:
        """The schema as it lies in the slab."""
        return json.dumps(_listed(self.nodes), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Schema:
        """The counterpart of `text`."""
        return cls(_nodes(json.loads(text)))

    @property
    def fits(self) -> bool:
        """Whether its rows have room in the slab."""
        return self.row_bytes <= layout.INFO_BYTES and len(self.entries) <= MOST_ENTRIES

    def includes(self, other: Schema) -> bool:
        """Whether it has all keys of another schema, as that has them."""
        return _includes(self.nodes, other.nodes)

    def extended(self, info: dict[str, Any], wanted: Collection[str] | None) -> Schema | None:
        """A schema that has the keys of this info too; None where none can be made, as for keys in another order."""
        for arrays in (True, False):
            nodes = _merged(self.nodes, info, wanted, arrays, 1)
            if nodes is None:
                return None
            if (found := Schema(nodes)).fits:
                return found
        return None


def _includes(nodes: Sequence[Node], others: Sequence[Node]) -> bool:
    own = {node.key: node for node in nodes}
    return all(
        (node := own.get(other.key)) is not None
        and (node.kind, node.shape) == (other.kind, other.shape)
        and _includes(node.below, other.below)
        for other in others
    )


def _merged(
    nodes: tuple[Node, ...], info: dict[Any, Any], wanted: Collection[str] | None, arrays: bool, depth: int
) -> tuple[Node, ...] | None:
    """The nodes with those for the keys of this info; None where they are no texts, or come in another order.

    Args:
        wanted: the keys to keep; None for all.
        arrays: whether new arrays get room in rows.
        depth: how deep in the info this dict lies, from 1 on.
    """
    found, at = list(nodes), 0
    for key, value in info.items():
        if type(key) is not str:
            return None
        place = next((i for i, node in enumerate(found) if node.key == key), None)
        if place is None:
            found.insert(at, _new_node(key, value, wanted, arrays, depth))
        elif place < at:
            return None
        else:
            at = place
        node = found[at]
        if type(value) is dict and node.kind not in (OBJECT, SKIPPED):
            inner = wanted if key == "final_info" and depth == 1 else None
            below = _merged(node.below, value, inner, arrays, depth + 1) if depth < DEEPEST else None
            found[at] = replace(node, kind=OBJECT, below=()) if below is None else replace(node, below=below)
        at += 1
    return tuple(found)


def _new_node(key: str, value: Any, wanted: Collection[str] | None, arrays: bool, depth: int) -> Node:
    if depth == 1 and key == "final_obs":
        return Node(key, OBJECT)  # Gymnasium wants it as it is
    if wanted is not None and key not in wanted and not (depth == 1 and key in KEPT):
        return Node(key, SKIPPED)
    if type(value) is dict:
        return Node(key, DICT)
    if type(value) is np.ndarray:
        plain = value.dtype.kind in "fiub" and value.dtype.isnative and value.dtype.itemsize <= 8
        small = plain and arrays and value.nbytes <= layout.INFO_BYTES // 2 and value.ndim <= 8
        return Node(key, value.dtype.str, value.shape) if small else Node(key, OBJECT)
    return Node(key, NUMBER)


def _flat(nodes: Sequence[Node], first: int) -> Iterator[tuple[Node, int]]:
    """All nodes, each before those below it, with the number of the one after the last below it."""
    for node in nodes:
        below = list(_flat(node.below, first + 1))
        end = first + 1 + len(below)
        yield node, end
        yield from below
        first = end


def _paths(nodes: Sequence[Node], above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The keys that lead to each node, in the order of `_flat`."""
    for node in nodes:
        yield (*above, node.key)
        yield from _paths(node.below, (*above, node.key))


def _listed(nodes: Sequence[Node]) -> list[Any]:
    return [[node.key, node.kind, list(node.shape), _listed(node.below)] for node in nodes]


def _nodes(lists: list[Any]) -> tuple[Node, ...]:
    return tuple(Node(key, kind, tuple(shape), _nodes(below)) for key, kind, shape, below in lists)


def _words(nbytes: int) -> int:
    """The size in whole words of eight bytes."""
    return -(-nbytes // 8) * 8


EMPTY = Schema(())

# ---- where they lie ------------------------------------------------------------------------------------------------


def read_schemas(region: npt.NDArray[np.uint8]) -> list[Schema]:
    """The schemas of one worker, oldest first."""
    head = region[: HEAD.itemsize].view(HEAD)[0]
    data, found = region[HEAD.itemsize :].tobytes(), []
    for _ in range(int(head["count"])):
        size = int.from_bytes(data[:4], "little")
        found.append(Schema.parse(data[4 : 4 + size].decode()))
        data = data[4 + size :]
    return found


def _append_schema(region: npt.NDArray[np.uint8], schema: Schema) -> bool:
    """Write a schema after those of this worker; False where there is no room."""
    head, data = region[: HEAD.itemsize].view(HEAD), schema.text().encode()
    record = len(data).to_bytes(4, "little") + data
    start = HEAD.itemsize + int(head["used"][0])
    if start + len(record) > len(region):
        return False
    region[start : start + len(record)] = np.frombuffer(record, np.uint8)
    head["used"] += len(record)
    head["count"] += 1  # last: what is not counted is not read
    return True


class InfoLearner:
    """Learns the schema of the infos of one worker's envs. `wanted`: the keys that the caller wants; None for all."""

    def __init__(self, worker: int, wanted: Collection[str] | None):
        self._worker, self._wanted = worker, wanted
        self._failures, self._schema = 0, EMPTY

    def attach(self, slab: Slab, use: Callable[[tuple[Any, ...]], None]) -> None:
        """Write schemas into this slab, and hand them to the core by `use`."""
        self._regions: npt.NDArray[Any] = slab.array("info_schemas")
        self._own, self._use = self._regions[self._worker], use
        known = read_schemas(self._own)
        if known:
            self._schema = known[-1]
            self._hand_over()

    def learn(self, info: dict[str, Any]) -> bool:
        """Look for a schema that this info fits, and give it to the core; False where there is none.

        Those of other workers come first, so that all write their rows alike.
        """
        if self._failures > MOST_FAILURES:
            return False
        self._failures += 1
        found = self._schema.extended(info, self._wanted)
        for other in self._newest_of_others():
            if other.includes(self._schema) and other.extended(info, self._wanted) == other:
                found = other
                break
        if found is None or found == self._schema or not _append_schema(self._own, found):
            return False
        self._failures -= 1
        self._schema = found
        self._hand_over()
        return True

    def _newest_of_others(self) -> Iterator[Schema]:
        for worker, region in enumerate(self._regions):
            if worker != self._worker and region[: HEAD.itemsize].any():
                with contextlib.suppress(ValueError):  # a text that is just being written
                    yield from read_schemas(region)[-1:]  # its owner may be writing the first one

    def _hand_over(self) -> None:
        entries = tuple(entry.described() for entry in self._schema.entries)
        self._use((self._schema.id, entries, NUMBERS, np.ndarray))

    @property
    def schema(self) -> Schema:
        """The newest one."""
        return self._schema

    def named(self, objects: dict[int, Any]) -> dict[Any, Any]:
        """What has no room in a row, given by number of its entry, by name."""
        return {self._schema.names[entry]: value for entry, value in objects.items()}

    def wanted(self, info: dict[str, Any]) -> dict[str, Any]:
        """Those parts of an info that the caller wants to have, for infos that travel as notes."""
        if self._wanted is None:
            return info
        found = {key: value for key, value in info.items() if key in self._wanted or key in KEPT}
        if type(found.get("final_info")) is dict:
            found["final_info"] = {key: value for key, value in found["final_info"].items() if key in self._wanted}
        return found

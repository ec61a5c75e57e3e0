"""Infos of many rows as columns: one array for each key, for envs that step whole batches.

An env with many lanes has its infos as arrays already. `InfoColumns` carries them as they are to the slab, where
`ColumnWriter` writes each key of all lanes at once into the rows of infos (`memory.info_schema`). To code that looks at
single rows, it is a sequence of dicts like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.memory.info_schema import DICT, NUMBER, NUMBERS, SKIPPED, InfoLearner, Schema
from shoal.memory.messages import STATUS_INFO
from shoal.memory.slab import Slab
from shoal.native import layout

__all__ = ["ColumnWriter", "InfoColumns"]

Array = npt.NDArray[Any]
Columns = Mapping[str, Any]  # each value is an array with a row for each lane, or a mapping of such
_TAGS: dict[type[Any], int] = {kind: layout.INFO_NUMBER + i for i, kind in enumerate(NUMBERS)}


class Part(NamedTuple):
    """Columns of some rows: `rows` are their numbers, or None for all."""

    rows: Array | None
    columns: Columns


class InfoColumns(Sequence[dict[str, Any]]):
    """The infos of `count` rows. Parts that come later replace those of the same rows before them."""

    def __init__(self, count: int, parts: Sequence[Part]):
        self._count, self.parts = count, list(parts)

    @classmethod
    def of(cls, columns: Columns, count: int) -> InfoColumns | None:
        """The infos of rows that have the same keys; None where there is no key."""
        return cls(count, [Part(None, columns)]) if columns else None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(self._count))]
        for rows, columns in reversed(self.parts):
            if rows is None:
                return _cells(columns, row)
            found = np.flatnonzero(rows == row)
            if len(found):
                return _cells(columns, int(found[0]))
        return {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(self._count))

    def take(self, mask: Array) -> InfoColumns:
        """The infos of the rows where a mask is True, copied."""
        parts, chosen = [], np.flatnonzero(mask)
        for rows, columns in self.parts:
            if rows is None:
                parts.append(Part(None, _taken(columns, chosen)))
            else:
                _, places, own = np.intersect1d(chosen, rows, return_indices=True)
                parts.append(Part(places, _taken(columns, own)))
        return InfoColumns(len(chosen), parts)

    def at(self, mask: Array) -> list[Part]:
        """The parts, where these infos are those of the rows of a larger batch where a mask is True."""
        places = np.flatnonzero(mask)
        return [Part(places if rows is None else places[rows], columns) for rows, columns in self.parts]

    def with_final(self, last: InfoColumns | None) -> InfoColumns:
        """These infos with the last ones of the episodes before, under "final_info"."""
        if last is None:
            return self
        own = self.parts[0].columns if self.parts else {}  # a reset gives all rows the same keys
        finals = [
            Part(rows, {"final_info": columns, **(own if rows is None else _taken(own, rows))})
            for rows, columns in last.parts
        ]
        return InfoColumns(self._count, [*self.parts, *finals])


def _cells(columns: Columns, row: int) -> dict[str, Any]:
    return {key: _cells(column, row) if isinstance(column, Mapping) else column[row] for key, column in columns.items()}


def _taken(columns: Columns, rows: Array) -> dict[str, Any]:
    return {key: _taken(one, rows) if isinstance(one, Mapping) else one[rows] for key, one in columns.items()}


class Place(NamedTuple):
    """Where a column lies in a row of the slab."""

    path: tuple[str, ...]
    offset: int
    nbytes: int


class ColumnWriter:
    """Writes columns into the rows of infos of one slab."""

    def __init__(self, slab: Slab, learner: InfoLearner):
        self._rows: Array = slab.array("info_rows")
        self._words: Array = self._rows.view(np.float64)
        self._status: Array = slab.array("status")
        self._learner = learner
        self._known: dict[Any, tuple[Array, list[Place]] | None] = {}

    def write(self, infos: InfoColumns, slot: int, lanes: Array) -> bool:
        """Write the infos of these lanes into a frame; False where one of them has no room in rows."""
        plans = [self._plan(columns) for _, columns in infos.parts]
        if any(plan is None for plan in plans):
            return False
        for (rows, columns), plan in zip(infos.parts, plans, strict=True):
            assert plan is not None
            head, places = plan
            at = _run(lanes if rows is None else lanes[rows])
            if not len(places) and not head[layout.INFO_TAGS :].any():  # there are none, or none that are wanted
                self._status[slot, at] &= ~np.uint8(STATUS_INFO)
                continue
            self._rows[slot][at, : len(head)] = head
            words = self._words[slot]
            for path, offset, nbytes in places:
                column = columns[path[0]]
                for key in path[1:]:
                    column = column[key]
                if column.dtype == np.float64 and column.ndim == 1:
                    words[at, offset // 8] = column
                else:
                    self._rows[slot][at, offset : offset + nbytes] = _bytes_of(column)
            self._status[slot, at] |= STATUS_INFO
        return True

    def _plan(self, columns: Columns) -> tuple[Array, list[Place]] | None:
        """The first bytes of each row, and where the columns go; None where they have no room."""
        kinds = (self._learner.schema.id, _kinds(columns))
        if kinds not in self._known:
            found = _layout(self._learner.schema, columns)
            if found is None and self._learner.learn(_cells(columns, 0)):
                kinds = (self._learner.schema.id, kinds[1])
                found = _layout(self._learner.schema, columns)
            self._known[kinds] = found
        return self._known[kinds]


def _run(lanes: Array) -> Any:
    """Neighbouring lanes as a slice, which is quicker; else as they are."""
    if len(lanes) and int(lanes[-1]) - int(lanes[0]) == len(lanes) - 1:
        return slice(int(lanes[0]), int(lanes[-1]) + 1)
    return lanes


def _bytes_of(column: Array) -> Array:
    return np.ascontiguousarray(column).reshape(len(column), -1).view(np.uint8)


def _kinds(columns: Columns) -> Any:
    """What the places of columns depend on: keys, types and shapes."""
    try:
        return tuple([(key, one.dtype, one.shape[1:]) for key, one in columns.items()])
    except AttributeError:  # there is a mapping among them
        return tuple([
            (key, _kinds(one)) if isinstance(one, Mapping) else (key, one.dtype, one.shape[1:])
            for key, one in columns.items()
        ])  # fmt: skip


def _layout(schema: Schema, columns: Columns) -> tuple[Array, list[Place]] | None:
    tags = np.zeros(len(schema.entries), np.uint8)
    places: list[Place] = []
    if not _lay_out(schema, columns, 0, len(tags), (), tags, places):
        return None
    head = np.concatenate([np.array([schema.id], np.int64).view(np.uint8), tags])
    return head, places


def _lay_out(
    schema: Schema, columns: Columns, first: int, end: int, path: tuple[str, ...], tags: Array, places: list[Place]
) -> bool:
    """Find the entry of each key, in their order; False for a key that the schema has no room for."""
    at = first
    for key, column in columns.items():
        while at < end and schema.entries[at].key != key:
            at = schema.entries[at].end
        if at >= end:
            return False
        entry = schema.entries[at]
        if isinstance(column, Mapping):
            tags[at] = layout.INFO_DICT
            if entry.kind not in (DICT, NUMBER) or not _lay_out(
                schema, column, at + 1, entry.end, (*path, key), tags, places
            ):
                return False
        elif entry.kind != SKIPPED:
            is_number = column.ndim == 1 and entry.kind == NUMBER and column.dtype.type in _TAGS
            if not is_number and (entry.kind, entry.shape) != (column.dtype.str, column.shape[1:]):
                return False
            tags[at] = _TAGS[column.dtype.type] if is_number else layout.INFO_ARRAY
            nbytes = column.dtype.itemsize * int(np.prod(column.shape[1:], dtype=np.int64))
            places.append(Place((*path, key), entry.offset, nbytes))
        at = entry.end
    return True

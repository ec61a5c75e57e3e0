"""The infos of a batch: rows of the slab and notes, made into what callers want when they look.

Most infos lie in rows of the slab, by a schema (`memory.info_schema`). Rows are copied as **words**: float64 [w, n], of
which row i has the i-th eight bytes of all n lanes, so that a key whose values are numbers is one row of them. Lanes
whose rows have the same schema and the same tags are one group: for them, each key is one column, and all columns are
made by a few calls of NumPy, whatever the number of lanes. `Infos` is a dict of the infos by lane, which is filled when
it is first looked at. `Infos.stacked` makes Gymnasium's dict of arrays from the same groups.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.memory.info_schema import NUMBERS, Schema, read_schemas
from shoal.memory.slab import Slab
from shoal.native import layout, take_infos

__all__ = ["InfoReader", "Infos", "stacked", "stacked_numbers", "with_final"]

Array = npt.NDArray[Any]
AddInfo = Callable[[dict[str, Any], dict[str, Any], int], dict[str, Any]]
ID_BYTES = layout.INFO_TAGS
# The tags of numbers, each of which has a word of eight bytes in a row, and the types of arrays of them.
_TYPES = {layout.INFO_FLOAT: np.dtype(float), layout.INFO_INT: np.dtype(np.int64), layout.INFO_BOOL: np.dtype(bool)} | {
    layout.INFO_NUMBER + i: np.dtype(kind) for i, kind in enumerate(NUMBERS)
}
NUMPY_BOOL = layout.INFO_NUMBER + NUMBERS.index(np.bool_)
DOUBLES = [tag for tag, dtype in _TYPES.items() if dtype == np.float64]  # as they lie in words
MOST_RECIPES = 1000  # that are kept
MOST_RUNS = 256  # of neighbouring lanes, whose views are kept


class Column(NamedTuple):
    """One key of a group of lanes, and how to read it.

    Attributes:
        tag: what kind of values these are.
        name: what it is called in the schema; None for last observations of episodes.
        offset: where the values lie in the rows.
        dtype, shape: of an array.
        below: the columns of a nested dict.
    """

    key: str
    tag: int
    name: Any = None
    offset: int = 0
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()
    below: tuple[Column, ...] = ()


class Recipe:
    """How to read rows that have one schema and the same tags: the columns, in the order of their keys.

    Attributes:
        head: how these rows begin: the schema's id, and a tag for each of its entries.
        words: how many words such a row has.
        plain: (key, key of its mask, word, tag) of each column, if all values are numbers under keys of their own,
            which is the rule; else None. The tag is 0 for numbers that are what they are in a word.
    """

    def __init__(self, schema: Schema, head: bytes):
        self.head, self.words = head, schema.row_bytes // 8
        self.columns = tuple(_columns(schema, head[ID_BYTES:], 0, len(schema.entries)))
        # Gymnasium takes np.bool_ for objects.
        odd = any(c.tag not in _TYPES or c.tag == NUMPY_BOOL or c.key.startswith("_") for c in self.columns)
        self._ones = np.ones(0, np.bool_)  # a mask to copy
        plain = [(c.key, f"_{c.key}", c.offset // 8, 0 if c.tag in DOUBLES else c.tag) for c in self.columns]
        self.plain = None if odd else plain

    def arrays(self, words: Array) -> dict[str, Any]:
        """Gymnasium's dict of arrays for all lanes, where all values are plain; the caller's own."""
        assert self.plain is not None
        found: dict[str, Any] = {}
        own, ones = words.copy(), self._ones
        if len(ones) != words.shape[1]:
            ones = self._ones = np.ones(words.shape[1], np.bool_)
        for key, mask_key, word, tag in self.plain:
            found[key] = _numbers(own[word], tag) if tag else own[word]
            found[mask_key] = ones.copy()
        return found


def _numbers(words: Array, tag: int) -> Array:
    """The numbers of this kind that lie in words of eight bytes, each at the beginning of its word."""
    if tag == layout.INFO_BOOL:
        flags: Array = words.view(np.int64) != 0
        return flags
    dtype = _TYPES[tag]
    return words.view(dtype) if dtype.itemsize == 8 else words.view(dtype)[:: 8 // dtype.itemsize].copy()


def _words(rows: Array) -> Array:
    """Rows, uint8 [n, bytes], as words: float64 [w, n]."""
    words: Array = rows.view(np.float64).T.copy()
    return words


def _rows(words: Array) -> Array:
    """The counterpart of `_words`."""
    rows: Array = words.T.copy().view(np.uint8)
    return rows


class Group:
    """Lanes whose infos have the same keys with the same types of values.

    Args:
        words: float64 [w, n], the rows of the lanes; its own memory.
        lanes: int64 [n], ascending.
        objects: by lane, what its info has beside its row, by its name in the schema.
        finals: the last observations of the lanes' episodes; None where none of them ended one.
    """

    def __init__(self, words: Array, lanes: Array, columns: Sequence[Column], objects: Mapping[int, Any], finals: Any):
        self.lanes, self.columns, self._finals = lanes, columns, finals
        self._words, self._objects = words, objects
        if finals is not None:
            own = (
                []
                if any(column.key == "final_info" for column in columns)
                else [Column("final_info", layout.INFO_DICT)]
            )
            self.columns = [Column("final_obs", layout.INFO_OBJECT), *own, *columns]

    def array(self, column: Column) -> Array | None:
        """The values of a key as one array, which is the caller's own; None where they are objects."""
        if column.tag in _TYPES:
            return _numbers(self._words[column.offset // 8], column.tag)
        if column.dtype is None:
            return None
        size = int(np.prod(column.shape, dtype=np.int64)) * column.dtype.itemsize
        part = _rows(self._words)[:, column.offset : column.offset + size].copy()
        found: Array = part.view(column.dtype).reshape(len(self.lanes), *column.shape)
        return found

    def values(self, column: Column) -> list[Any]:
        """The values of a key, one for each lane, as the envs returned them."""
        if column.tag == layout.INFO_DICT:
            return self.dicts(column.below)
        if column.tag == layout.INFO_NONE:
            return [None] * len(self.lanes)
        if column.tag == layout.INFO_OBJECT:
            if column.name is None:
                return list(self._finals)
            return [self._objects[lane][column.name] for lane in self.lanes.tolist()]
        array = self.array(column)
        assert array is not None
        if column.tag == layout.INFO_ARRAY:
            return [np.array(row) for row in array]
        return list(array) if column.tag >= layout.INFO_NUMBER else array.tolist()

    def dicts(self, columns: Sequence[Column] | None = None) -> list[dict[str, Any]]:
        """The infos, one for each lane."""
        columns = self.columns if columns is None else columns
        if not columns:
            return [{} for _ in range(len(self.lanes))]
        keys = [column.key for column in columns]
        return [dict(zip(keys, row, strict=True)) for row in zip(*map(self.values, columns), strict=True)]

    def add_to(self, found: dict[str, Any], count: int, add: AddInfo, columns: Sequence[Column] | None = None) -> Any:
        """Add the infos to a dict of arrays, as Gymnasium's `VectorEnv._add_info` does it lane by lane.

        Args:
            count: of all lanes.
            add: that method, for values that it must look at one by one.
        """
        every = len(self.lanes) == count
        for column in self.columns if columns is None else columns:
            key, mask_key = column.key, f"_{column.key}"
            array = self.array(column)
            if column.tag == layout.INFO_DICT:
                found[key] = self.add_to(found.get(key, {}), count, add, column.below)
            elif array is None or column.tag == NUMPY_BOOL or (key in found and _differ(found[key], array)):
                for lane, value in zip(self.lanes.tolist(), self.values(column), strict=True):
                    add(found, {key: value}, lane)
            elif every:
                found[key] = array
            else:
                if key not in found:
                    found[key] = np.zeros((count, *array.shape[1:]), array.dtype)
                found[key][self.lanes] = array
            if every:
                found[mask_key] = np.ones(count, np.bool_)
            else:
                if mask_key not in found:
                    found[mask_key] = np.zeros(count, np.bool_)
                found[mask_key][self.lanes] = True
        return found


def _differ(array: Any, other: Array) -> bool:
    """Whether values of one array cannot simply be copied into the other."""
    return not isinstance(array, np.ndarray) or array.dtype != other.dtype or array.shape[1:] != other.shape[1:]


class InfoReader:
    """Reads rows of infos for the caller's side of one slab."""

    def __init__(self, slab: Slab):
        self._rows: Array = slab.array("info_rows")
        self._flags: Array = slab.array("status")
        self._regions: Array = slab.array("info_schemas")
        self._schemas: dict[int, Schema] = {}
        self._widest = ID_BYTES
        self._recipes: dict[bytes, Recipe] = {}
        self._last: Recipe | None = None
        self._runs: dict[tuple[int, int, int], tuple[Array, Array]] = {}  # flags and rows of runs of lanes

    def take_run(self, slot: int, first: int, count: int) -> tuple[Array, Recipe] | None:
        """As `take`, of neighbouring lanes in one frame, if all have infos that look as the last ones did: the rule.

        None also where a lane has anything beside its row, as its flags say.
        """
        recipe = self._last
        if recipe is None:
            return None
        run = self._runs.get((slot, first, count))
        if run is None:
            if len(self._runs) >= MOST_RUNS:
                self._runs.clear()
            lanes = slice(first, first + count)
            run = self._runs[slot, first, count] = self._flags[slot, lanes], self._rows[slot, lanes]
        words = np.empty((recipe.words, count))
        return (words, recipe) if take_infos(*run, recipe.head, words) else None

    def take(self, ids: Any, slots: Any) -> tuple[Array, Recipe | None]:
        """A copy of the rows of lanes as words, and how to read all of them; None where rows differ.

        Args:
            ids: the lanes, or a slice of them.
            slots: the frame of each, or of all of them.
        """
        while True:
            found: Array = self._rows[slots, ids, : self._widest].copy()
            known = set(self._ids(found))
            if known <= self._schemas.keys():
                break
            for region in self._regions:
                for schema in read_schemas(region):
                    self._schemas[schema.id] = schema
                    self._widest = max(self._widest, schema.row_bytes)
        if len(known) > 1:
            return _words(found), None
        schema = self._schemas[known.pop()]
        size = ID_BYTES + len(schema.entries)
        heads: bytes = found[:, :size].tobytes()
        if heads != heads[:size] * len(found):
            return _words(found), None
        self._last = self._recipe(schema, heads[:size])
        return _words(found), self._last

    @staticmethod
    def _ids(rows: Array) -> list[int]:
        """The ids of the rows' schemas."""
        ids: list[int] = rows[:, :ID_BYTES].copy().view(np.int64)[:, 0].tolist()
        return ids

    def recipes(self, words: Array) -> list[Recipe]:
        """How to read each of these rows: the same object for those that have the same schema and the same tags."""
        data, width = _rows(words).tobytes(), 8 * len(words)
        found = []
        for start in range(0, len(data), width):
            schema = self._schemas[int.from_bytes(data[start : start + ID_BYTES], sys.byteorder, signed=True)]
            found.append(self._recipe(schema, data[start : start + ID_BYTES + len(schema.entries)]))
        return found

    def _recipe(self, schema: Schema, head: bytes) -> Recipe:
        """How to read rows that begin so."""
        found = self._recipes.get(head)
        if found is None:
            if len(self._recipes) > MOST_RECIPES:
                self._recipes.clear()
            found = self._recipes[head] = Recipe(schema, head)
        return found


def _columns(schema: Schema, tags: bytes, first: int, end: int) -> Iterator[Column]:
    while first < end:
        entry, tag = schema.entries[first], tags[first]
        if tag == layout.INFO_DICT:
            yield Column(entry.key, tag, below=tuple(_columns(schema, tags, first + 1, entry.end)))
        elif tag == layout.INFO_ARRAY:
            yield Column(entry.key, tag, None, entry.offset, np.dtype(entry.kind), entry.shape)
        elif tag != layout.INFO_ABSENT:
            yield Column(entry.key, tag, schema.names[first], entry.offset)
        first = entry.end


class Infos(dict[int, dict[str, Any]]):
    """The infos of a batch that are not empty, by lane. It is filled when it is first looked at.

    Args:
        reader: has read `words`.
        words: the rows of the lanes whose infos lie in the slab, a copy.
        recipe: how to read all of them; None where they differ.
        lanes: int64 [n], these lanes, ascending.
        notes: by lane, what came as a note: the whole info, or, for one of `lanes`, its objects by name.
        finals: by lane, the last observation of an episode that the step has ended.
    """

    def __init__(
        self,
        reader: InfoReader,
        words: Array,
        recipe: Recipe | None,
        lanes: Array,
        notes: dict[int, Any],
        finals: dict[int, Any],
    ):
        # A key in the dict, so that what looks at its bare size does not take it for empty.
        super().__init__({-1: {}})
        self._parts: Any = reader, words, recipe, lanes, notes, finals

    def __bool__(self) -> bool:
        return self._parts is not None or dict.__len__(self) > 0

    def groups(self) -> list[Group]:
        """The lanes that have rows, as groups, ordered by the first lane of each."""
        reader, words, recipe, lanes, notes, finals = self._parts
        if recipe is not None and not finals:
            return [Group(words, lanes, recipe.columns, notes, None)]
        rows_of: dict[tuple[Recipe, bool], list[int]] = {}
        every = lanes.tolist()
        for row, (lane, of_lane) in enumerate(zip(every, reader.recipes(words), strict=True)):
            rows_of.setdefault((of_lane, lane in finals), []).append(row)
        return [
            Group(words.take(rows, 1), lanes[rows], of_group.columns, notes,
                  [finals[every[row]] for row in rows] if ended else None)
            for (of_group, ended), rows in rows_of.items()
        ]  # fmt: skip

    def _others(self) -> dict[int, dict[str, Any]]:
        """The infos of lanes that have no row."""
        _, _, _, lanes, notes, finals = self._parts
        found: dict[int, dict[str, Any]] = {}
        if not notes and not finals:
            return found
        with_row = set(lanes.tolist())
        for lane in sorted({*notes, *finals} - with_row):
            info = notes.get(lane, {})
            found[lane] = with_final(finals[lane], info) if lane in finals else info
        return found

    def stacked_numbers(self, count: int) -> dict[str, Any] | None:
        """As the function of this name, while nothing was looked at."""
        if self._parts is None:
            return None
        _, words, recipe, lanes, notes, finals = self._parts
        if recipe is None or recipe.plain is None or len(lanes) != count or notes or finals:
            return None
        arrays: dict[str, Any] = recipe.arrays(words)
        return arrays

    def alone(self, count: int) -> list[dict[str, Any]] | None:
        """The infos of so many lanes, where all of them lie in the slab with the same keys; None otherwise."""
        if self._parts is None:
            return None
        _, rows, recipe, lanes, notes, finals = self._parts
        if recipe is None or finals or len(lanes) != count:
            return None
        return Group(rows, lanes, recipe.columns, notes, None).dicts()

    def stacked(self, count: int, add: AddInfo) -> dict[str, Any] | None:
        """As the function of this name, while nothing was looked at."""
        if self._parts is None:
            return None
        numbers = self.stacked_numbers(count)
        if numbers is not None:
            return numbers
        groups = self.groups()
        if any(column.key.startswith("_") for group in groups for column in group.columns):
            return None  # a key that Gymnasium may take for the mask of another one
        found: dict[str, Any] = {}
        parts: list[tuple[int, Any]] = [(int(group.lanes[0]), group) for group in groups]
        others = self._others()
        for lane, part in sorted([*parts, *others.items()], key=lambda one: one[0]) if others else parts:
            if lane in others:
                add(found, part, lane)
            else:
                part.add_to(found, count, add)
        return found

    def fill(self) -> None:
        """Make the infos of all lanes."""
        if self._parts is None:
            return
        found, groups = self._others(), self.groups()
        for group in groups:
            found.update(zip(group.lanes.tolist(), group.dicts(), strict=True))
        self._parts = None
        dict.clear(self)
        dict.update(self, found if len(groups) == 1 and len(groups[0].lanes) == len(found) else sorted(found.items()))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def listed(infos: dict[int, dict[str, Any]], ids: Array) -> list[dict[str, Any]]:
    """The info of each of these lanes, all that have answered, ascending; an empty one where there is none."""
    if not infos:
        return [{} for _ in range(len(ids))]
    if isinstance(infos, Infos):
        alone = infos.alone(len(ids))
        if alone is not None:
            return alone
    return [infos.get(lane, {}) for lane in ids.tolist()]


def with_final(observation: Any, info: dict[str, Any]) -> dict[str, Any]:
    """The info of a step that has ended an episode and begun the next one, with the last observation of the old one."""
    return {"final_obs": observation, "final_info": {}, **info}


def stacked(infos: dict[int, dict[str, Any]], count: int, add: AddInfo) -> dict[str, Any] | None:
    """The infos of `count` lanes as a dict of arrays, as Gymnasium adds them up one by one.

    None where that was not tried, or has failed: then it must be done lane by lane, to learn which one does not fit.

    Args:
        add: Gymnasium's `_add_info`, which adds the info of one lane.
    """
    try:
        return infos.stacked(count, add) if isinstance(infos, Infos) else stacked_numbers(infos, count)
    except Exception:
        return None


def stacked_numbers(infos: dict[int, dict[str, Any]], count: int) -> dict[str, Any] | None:
    """As `stacked`, for infos of plain numbers, of which an array is the same in all versions of Gymnasium.

    Each lane must have an info, all with the same keys in one order, none of which has a meaning of its own to
    Gymnasium, and a key's values must be of one type. Else None.
    """
    if isinstance(infos, Infos):
        return infos.stacked_numbers(count)
    rows = [infos[lane] for lane in range(count)] if len(infos) == count else [{}]
    keys, found, mask = list(rows[0]), dict[str, Any](), np.ones(count, np.bool_)
    if not keys or any(list(row) != keys for row in rows):
        return None
    for key in keys:
        values = [row[key] for row in rows]
        kinds = set(map(type, values))
        if len(kinds) > 1 or not kinds <= {bool, int, float} or key == "final_obs" or str(key).startswith("_"):
            return None
        found[key], found[f"_{key}"] = np.array(values, *kinds), mask.copy()
    return found


def _filled(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def call(self: Infos, *args: Any, **kwargs: Any) -> Any:
        self.fill()
        return method(self, *args, **kwargs)

    call.__name__, call.__doc__ = name, method.__doc__
    return call


for _name in (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__", "__or__"),
    *("__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop", "popitem"),
    *("setdefault", "update", "values"),
):
    setattr(Infos, _name, _filled(_name))

"""Emulation: nested observations and actions as one flat row for each env, and back, in numpy and torch.

It is for trainers that know flat batches only. A row of observations is laid out like a C struct: every leaf keeps its
type and is aligned, so that the way back needs views only, and no copies.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np
from gymnasium import Space, spaces

from shoal.errors import BadAction, BadEnv, BadObservation
from shoal.spaces.flat_rows import FlatRows, NumpyArrays
from shoal.spaces.leaves import Array, Leaf, Path, assemble, get_path, row_layout

_MOST = 2**63 - 1  # whole numbers of actions are checked as int64


class ActionPart(NamedTuple):
    """One leaf of the action space, as a policy must know it to build its head.

    Attributes:
        path: the keys and indices that lead to the leaf in a nested action.
        kind: "discrete" for Discrete, MultiDiscrete and MultiBinary, "continuous" for Box.
        columns: of the leaf in a row: `row[..., part.columns]`.
        choices: how many values each discrete column has, from 0 up; empty for a continuous part, which has the bounds
            of `flat_space` in its columns.
        dtype: of the leaf. If it is an integer type, also the columns of a Box must hold whole numbers.
    """

    path: Path
    kind: Literal["discrete", "continuous"]
    columns: slice
    choices: tuple[int, ...]
    dtype: np.dtype[Any]


class Emulation(FlatRows):
    """Turns nested observations into flat rows, and back without a copy.

    A row has the leaves' own type if they have one type in common, and else consists of bytes (uint8). Nothing is cast:
    a Discrete stays an integer, and a float64 a float64.

    Args:
        space: of one env's observation: Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them.

    Attributes:
        dtype: of a row as one numpy record, with one field for each leaf, called like `['camera'][0]` ("value" for a
            space without parts): `rows.view(emulation.dtype)` of contiguous rows.
        row_bytes: size of a row, a multiple of the largest item in it, so that rows can lie next to each other.
        flat_space: the Box of one row.
    """

    _what = "observation"
    _error = BadObservation
    flat_space: spaces.Box

    def __init__(self, space: Space[Any]):
        super().__init__(space)
        self._starts, self.row_bytes = row_layout(self.leaves)
        stops = [start + leaf.nbytes for start, leaf in zip(self._starts, self.leaves, strict=True)]
        gaps = zip([0, *stops], [*self._starts, self.row_bytes], strict=True)
        self._gaps = [slice(start, stop) for start, stop in gaps if stop > start]
        layout: Any = {
            "names": [leaf.name or "value" for leaf in self.leaves],
            "formats": [np.dtype((leaf.dtype, leaf.shape)) for leaf in self.leaves],
            "offsets": self._starts,
            "itemsize": self.row_bytes,
        }
        self.dtype: np.dtype[Any] = np.dtype(layout, align=True)
        self.flat_space = self._box()
        step = np.dtype(self.flat_space.dtype).itemsize
        self._slices = [slice(start // step, stop // step) for start, stop in zip(self._starts, stops, strict=True)]

    def _box(self) -> spaces.Box:
        types = {leaf.dtype for leaf in self.leaves}
        if len(types) != 1:
            return spaces.Box(0, 255, (self.row_bytes,), np.uint8)
        dtype: Any = types.pop()
        low, high = (
            np.concatenate([np.asarray(bound).reshape(-1) for bound in bounds])
            for bounds in zip(*((leaf.low, leaf.high) for leaf in self.leaves), strict=True)
        )
        return spaces.Box(low, high, dtype=dtype)

    def flatten(self, batch: Any, out: Any = None) -> Any:
        """Gather a nested batch into rows.

        This takes one copy, or none if the batch lies in such rows already, as the observations of a pool with
        `flat_rows=True` do; then the rows are valid as long as the batch is.

        Args:
            batch: nested like the space, with leaves [..., *shape] of one batch shape, also () for one observation:
                all numpy arrays (or what numpy makes into such) or all torch tensors.
            out: rows to write into, of the type of `flat_space`. By default new ones, of the batch's library.

        Returns:
            Array [..., size], `out` if that was given. Bytes between the leaves are zero. A space without leaves has no
            batch shape but that of `out`.

        Raises:
            BadObservation: a leaf does not fit, or has values that its type cannot hold exactly.
        """
        if out is None:
            found = self._as_it_lies(batch)
            if found is not None:
                return found
        library, values, rows = self._gathered(batch, out)
        exact = [self._exact(library, leaf, value) for leaf, value in zip(self.leaves, values, strict=True)]
        for view, value in zip(self._views(library, rows), exact, strict=True):  # only after all leaves fit
            view[...] = value
        for gap in self._gaps:
            rows[..., gap] = 0
        return rows

    def _as_it_lies(self, batch: Any) -> Any:
        """The rows that this very batch is a view of; None if its leaves lie elsewhere, or do not fit the space."""
        try:
            values = [get_path(batch, leaf.path) for leaf in self.leaves]
        except (KeyError, IndexError, TypeError):
            return None
        if not values or not all(type(value) is np.ndarray for value in values):
            return None
        lead = values[0].ndim - len(self.leaves[0].shape)
        where = set()
        for leaf, value, start in zip(self.leaves, values, self._starts, strict=True):
            one_piece = np.zeros(leaf.shape, leaf.dtype).strides
            if value.dtype != leaf.dtype or value.shape[lead:] != leaf.shape or value.strides[lead:] != one_piece:
                return None
            where.add((value.__array_interface__["data"][0] - start, value.shape[:lead], value.strides[:lead]))
        if len(where) != 1 or values[0].size == 0:
            return None
        (address, shape, strides) = where.pop()
        memory = values[0]
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        try:
            rows: Any = np.ndarray(
                (*shape, self.row_bytes), np.uint8, memory, address - memory.__array_interface__["data"][0],
                (*strides, 1),
            )  # fmt: skip
        except (ValueError, TypeError):  # they do not reach to the end of a row
            return None
        return rows.view(self.flat_space.dtype)

    def unflatten(self, rows: Any) -> Any:
        """View rows as the nested batch that they hold. Nothing is copied: writing to a leaf writes to its row.

        Args:
            rows: numpy array or torch tensor [..., size] with any number of batch axes, such as [n, size] and
                [time, n, size]. The batch axes may be strided; a row of bytes must lie in one piece.

        Returns:
            Dicts and tuples like the space's, with leaves [..., *shape] of their own types, valid as long as `rows`.

        Raises:
            BadObservation: the rows have another type or length, or cannot be viewed without a copy.
        """
        library = self._checked_rows(rows)
        self._check_type(library, rows)
        return assemble(self.space, self._views(library, rows))

    def _views(self, library: NumpyArrays, rows: Any) -> list[Any]:
        lead = tuple(rows.shape[:-1])
        if 0 in lead:  # there is nothing to view, and torch may refuse strides of 0
            return [library.empty(lead + leaf.shape, leaf.dtype, rows) for leaf in self.leaves]
        views = []
        for leaf, where in zip(self.leaves, self._slices, strict=True):
            part, name = rows[..., where], self._what + leaf.name
            dtype = library.type(leaf.dtype, name)
            if part.dtype != dtype:
                try:
                    part = part.view(dtype)
                except (ValueError, RuntimeError) as error:
                    raise BadObservation(
                        f"{name}: rows of shape {tuple(rows.shape)} that are strided cannot be viewed as "
                        f"{leaf.dtype} without a copy: give contiguous ones"
                    ) from error
            views.append(part.reshape(lead + leaf.shape))  # splits the last axis, which never needs a copy
        return views

    def _exact(self, library: NumpyArrays, leaf: Leaf, value: Any) -> Any:
        if value.dtype == library.type(leaf.dtype, self._what + leaf.name):
            return value
        found = f"found {value.dtype}"
        if isinstance(value, np.ndarray):
            kinds = value.dtype.kind + leaf.dtype.kind
            if np.can_cast(value.dtype, leaf.dtype, "same_kind") or kinds == "iu":
                with np.errstate(over="ignore"):
                    cast = library.cast(value, leaf.dtype)
                # There and back: numpy compares an integer with a float by making it a float.
                if _equal(cast, value) and _equal(library.cast(cast, value.dtype), value):
                    return cast
                found += " with values that do not fit exactly"
        raise BadObservation(f"{self._what}{leaf.name}: expected type {leaf.dtype}, {found}")


def _equal(a: Array, b: Array) -> bool:
    return np.array_equal(a, b, equal_nan=b.dtype.kind == "f")


class ActionEmulation(FlatRows):
    """Turns nested actions into flat rows of one type, and back.

    A discrete leaf has a column for each of its numbers, counted from 0 whatever its start is; a Box has a column for
    each of its values. The type of a row depends on the leaves:

    - discrete leaves only: a MultiDiscrete of int64;
    - Boxes only: a Box of the narrowest type that holds all of theirs;
    - both: a Box of such a type, at least float32 if one of the Boxes has floats and else int64. The discrete columns
      hold whole numbers, exactly.

    Args:
        space: of one env's action: Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them.

    Attributes:
        parts: the kind and the columns of each leaf, for a policy to build its heads.

    Raises:
        BadEnv: the space has texts or objects, or whole numbers that the row's type does not hold exactly.
    """

    _what = "actions"
    _error = BadAction
    flat_space: spaces.Box | spaces.MultiDiscrete

    def __init__(self, space: Space[Any]):
        super().__init__(space)
        self.parts: list[ActionPart] = []
        self._starts: list[Array | None] = []
        lows, highs = [], []
        at = 0
        for leaf in self.leaves:
            low, high = np.asarray(leaf.low).reshape(-1), np.asarray(leaf.high).reshape(-1)
            columns = slice(at, at + low.size)
            at += low.size
            # As Python's own integers: the leaf's type may be too narrow for the number of choices.
            choices = tuple(int(b) - int(a) + 1 for a, b in zip(low, high, strict=True)) if leaf.discrete else ()
            self.parts.append(
                ActionPart(leaf.path, "discrete" if leaf.discrete else "continuous", columns, choices, leaf.dtype)
            )
            self._starts.append(low.astype(np.int64) if leaf.discrete and low.any() else None)
            lows.append(np.zeros(low.size, np.int64) if leaf.discrete else low)
            highs.append(np.array(choices, np.int64) - 1 if leaf.discrete else high)
        self.flat_space = self._flat_space(lows, highs)
        self._bounds = [
            None if leaf.dtype.kind == "f" else (low.astype(np.int64), high.astype(np.int64))
            for leaf, low, high in zip(self.leaves, lows, highs, strict=True)
        ]

    def _flat_space(self, lows: list[Array], highs: list[Array]) -> spaces.Box | spaces.MultiDiscrete:
        if all(leaf.discrete for leaf in self.leaves):
            choices = [n for part in self.parts for n in part.choices]
            return spaces.MultiDiscrete(np.array(choices, np.int64), dtype=np.int64)
        dtype: Any = self._row_type(lows, highs)
        low, high = (np.concatenate([bound.astype(dtype) for bound in bounds]) for bounds in (lows, highs))
        return spaces.Box(low, high, dtype=dtype)

    def _row_type(self, lows: list[Array], highs: list[Array]) -> np.dtype[Any]:
        # The whole number furthest from 0 that each leaf puts into a row.
        largest = [
            0 if leaf.dtype.kind == "f" else max((abs(int(b)) for b in (*low, *high)), default=0)
            for leaf, low, high in zip(self.leaves, lows, highs, strict=True)
        ]
        types = [leaf.dtype for leaf in self.leaves if not leaf.discrete]
        if len(types) < len(self.leaves):
            types.append(np.dtype(np.float32 if any(dtype.kind == "f" for dtype in types) else np.int64))
        row = np.result_type(*types)
        if row.kind == "u" and row.itemsize == 8:
            row = np.dtype(np.int64)
        if row.kind == "f" and max(largest) > _most_exact(row):
            row = np.result_type(row, np.float64)
        for leaf, number in zip(self.leaves, largest, strict=True):
            if number > _most_exact(row):
                raise BadEnv(
                    f"actions{leaf.name} has whole numbers up to {number}, and a row of {row}, which all of "
                    f"{self.space} would share, holds those up to {_most_exact(row)} exactly: give it closer bounds "
                    "by a wrapper around the env"
                )
        return row

    def flatten(self, batch: Any, out: Any = None) -> Any:
        """Gather a nested batch of actions into rows.

        Args:
            batch: nested like the space, with leaves [..., *shape] of one batch shape, also () for one action: all
                numpy arrays (or what numpy makes into such) or all torch tensors.
            out: rows to write into, of the type of `flat_space`. By default new ones, of the batch's library.

        Returns:
            Array [..., size], `out` if that was given.

        Raises:
            BadAction: a leaf does not fit, or has a whole number out of bounds.
        """
        library, values, rows = self._gathered(batch, out)
        lead = tuple(rows.shape[:-1])
        checked = []
        for i, (leaf, value) in enumerate(zip(self.leaves, values, strict=True)):
            columns = value.reshape((*lead, math.prod(leaf.shape)))
            start, bounds = self._starts[i], self._bounds[i]
            if bounds is None:
                columns = library.cast(columns, leaf.dtype)  # as the env will get it, even if rows have a wider type
            elif start is None:
                self._check_whole(library, leaf, columns, *bounds)
            else:
                self._check_whole(library, leaf, columns, bounds[0] + start, bounds[1] + start)
                columns = library.cast(columns, np.dtype(np.int64)) - library.constant(start, columns)
            checked.append(columns)
        for part, columns in zip(self.parts, checked, strict=True):
            rows[..., part.columns] = columns
        return rows

    def unflatten(self, rows: Any, check: bool = True) -> Any:
        """Take rows apart into the nested batch of actions that envs expect.

        Args:
            rows: numpy array or torch tensor [..., size] of numbers, with any number of batch axes.
            check: whether to look for whole numbers out of bounds. On a GPU this waits for the rows. Floats of a Box
                are never checked here: the pool does that, if it is told to.

        Returns:
            Dicts and tuples like the space's, with leaves [..., *shape] of their own types. Leaves that the rows hold
            as they are, of the same type and with no start to add, are views of them.

        Raises:
            BadAction: the rows do not fit, or a whole number is out of bounds.
        """
        library = self._checked_rows(rows)
        if not library.is_number(rows):
            raise BadAction(f"actions: expected rows of type {self.flat_space.dtype}, found {rows.dtype}")
        lead = tuple(rows.shape[:-1])
        values = []
        for i, (leaf, part) in enumerate(zip(self.leaves, self.parts, strict=True)):
            columns = rows[..., part.columns]
            start, bounds = self._starts[i], self._bounds[i]
            if bounds is not None and check:
                self._check_whole(library, leaf, columns, *bounds)
            if start is not None:
                columns = library.cast(columns, np.dtype(np.int64)) + library.constant(start, columns)
            values.append(library.cast(columns, leaf.dtype).reshape(lead + leaf.shape))
        return assemble(self.space, values)

    def _check_whole(self, library: NumpyArrays, leaf: Leaf, columns: Any, low: Array, high: Array) -> None:
        """Columns [..., size of the leaf] must be whole numbers from low to high, both of [size of the leaf]."""
        whole = library.cast(columns, np.dtype(np.int64))
        lowest, highest = (library.constant(bound.astype(np.int64), columns) for bound in (low, high))
        wrong = (whole < lowest) | (whole > highest)
        if "float" in str(columns.dtype):
            wrong = wrong | (whole != columns)  # fractions, and NaN
        if not bool(wrong.any()):
            return
        first = tuple(int(i) for i in np.argwhere(np.array(wrong.tolist()))[0])
        row, column = first[:-1], first[-1]
        inside = "".join(f"[{int(i)}]" for i in np.unravel_index(column, leaf.shape)) if leaf.shape else ""
        where = f" in row {row[0] if len(row) == 1 else row}" if row else ""
        raise BadAction(
            f"actions{leaf.name}{inside}{where}: expected a whole number from {low[column]} to {high[column]}, found "
            f"{columns[first].item()}"
        )


def _most_exact(dtype: np.dtype[Any]) -> int:
    """The largest number up to which a type of rows holds all whole numbers."""
    return _MOST if dtype.kind != "f" else int(2 ** (np.finfo(dtype).nmant + 1))

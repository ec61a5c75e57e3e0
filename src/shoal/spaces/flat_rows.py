"""What flat rows of observations and of actions have in common: their checks, in numpy and torch alike."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from gymnasium import Space

from shoal.errors import BadEnv, ShoalError
from shoal.spaces.leaves import Array, Leaf, array_leaves, as_array, part_of


class NumpyArrays:
    """The few operations that numpy and torch have under different names."""

    kind: str = "numpy array"
    array_type: Any = np.ndarray

    def type(self, dtype: np.dtype[Any], name: str) -> Any:
        """The library's own type; `name` is for the error message if it has none."""
        return dtype

    def is_number(self, array: Any) -> bool:
        """Whether the array holds whole numbers, floats or bools."""
        return array.dtype.kind in "fiub"

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], like: Any) -> Any:
        """A new array, on the device of `like`."""
        return np.empty(shape, dtype)

    def cast(self, array: Any, dtype: np.dtype[Any]) -> Any:
        """The array with another type."""
        with np.errstate(invalid="ignore"):  # a NaN becomes some whole number, and the caller checks the result
            return array.astype(dtype, copy=False)

    def constant(self, value: Array, like: Any) -> Any:
        """A numpy array as an array of the library, on the device of `like`."""
        return value


class _TorchArrays(NumpyArrays):
    """The same for PyTorch, which is never imported here: if the caller passes a tensor, it is there already."""

    kind = "torch tensor"

    def __init__(self, torch: Any):
        self._torch, self.array_type = torch, torch.Tensor

    def type(self, dtype: np.dtype[Any], name: str) -> Any:
        found = getattr(self._torch, dtype.name, None) if dtype.isnative else None
        if not isinstance(found, self._torch.dtype):
            raise BadEnv(f"{name} is of type {dtype.str} ({dtype}), which PyTorch does not have: use numpy arrays")
        return found

    def is_number(self, array: Any) -> bool:
        return not array.is_complex()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], like: Any) -> Any:
        return self._torch.empty(shape, dtype=self.type(dtype, "a row"), device=None if like is None else like.device)

    def cast(self, array: Any, dtype: np.dtype[Any]) -> Any:
        return array.to(self.type(dtype, "a part"))

    def constant(self, value: Array, like: Any) -> Any:
        return self._torch.as_tensor(value, device=like.device)


_NUMPY = NumpyArrays()


def _library(value: Any) -> NumpyArrays:
    torch = sys.modules.get("torch")
    return _TorchArrays(torch) if torch is not None and isinstance(value, getattr(torch, "Tensor", ())) else _NUMPY


class FlatRows:
    """A space, its leaves, and the checks of nested batches and of rows.

    Attributes:
        space: of one value.
        leaves: the innermost parts of the space, in the order in which they lie in a row.
        flat_space: of one row.
    """

    _what: str
    _error: type[ShoalError]
    flat_space: Any

    def __init__(self, space: Space[Any]):
        self.space = space
        self.leaves = array_leaves(self._what.removesuffix("s"), space, "a flat row")

    @property
    def size(self) -> int:
        """Length of a row, in elements of `flat_space`."""
        return int(self.flat_space.shape[0])

    def _checked_rows(self, rows: Any) -> NumpyArrays:
        library = _library(rows)
        if not isinstance(rows, library.array_type):
            raise self._error(
                f"{self._what}: expected rows in a numpy array or a torch tensor, found {type(rows).__name__}"
            )
        if not rows.shape or rows.shape[-1] != self.size:
            raise self._error(
                f"{self._what}: expected rows of shape [..., {self.size}] for {self.space}, found {tuple(rows.shape)}"
            )
        return library

    def _gathered(self, batch: Any, out: Any) -> tuple[NumpyArrays, list[Any], Any]:
        """The library of a nested batch, its leaves as arrays of one common batch shape, and rows to put them into."""
        given = [part_of(batch, leaf, self._what, self._error) for leaf in self.leaves]
        library = _library(out if out is not None else given[0] if given else None)
        values: list[Any] = []
        lead = None
        if out is not None:
            self._checked_rows(out)
            self._check_type(library, out)
            lead = tuple(out.shape[:-1])
        for leaf, value in zip(self.leaves, given, strict=True):
            array = self._read(library, leaf, value)
            split = len(array.shape) - len(leaf.shape)
            if split < 0 or tuple(array.shape[split:]) != leaf.shape:
                raise self._error(
                    f"{self._what}{leaf.name}: expected shape [..., {', '.join(map(str, leaf.shape))}], "
                    f"found {tuple(array.shape)}"
                )
            lead = tuple(array.shape[:split]) if lead is None else lead
            if tuple(array.shape[:split]) != lead:
                raise self._error(
                    f"{self._what}{leaf.name}: expected shape {(*lead, *leaf.shape)}, the batch shape {lead} as in "
                    f"{'out' if out is not None else 'the first leaf'}, found {tuple(array.shape)}"
                )
            values.append(array)
        if out is None:
            dtype = np.dtype(self.flat_space.dtype)
            out = library.empty((*(lead or ()), self.size), dtype, values[0] if values else None)
        return library, values, out

    def _check_type(self, library: NumpyArrays, rows: Any) -> None:
        expected = np.dtype(self.flat_space.dtype)
        if rows.dtype != library.type(expected, self._what):
            raise self._error(
                f"{self._what}: expected rows of type {expected}, found {rows.dtype}: rows must not be cast, only "
                "their leaves may"
            )

    def _read(self, library: NumpyArrays, leaf: Leaf, value: Any) -> Any:
        if library is _NUMPY and _library(value) is _NUMPY:
            value = as_array(value, leaf, self._what, self._error)
        if not isinstance(value, library.array_type):
            raise self._error(
                f"{self._what}{leaf.name}: expected a {library.kind} like the rest, found {type(value).__name__}"
            )
        if not library.is_number(value):
            raise self._error(f"{self._what}{leaf.name}: expected type {leaf.dtype}, found {value.dtype}")
        return value

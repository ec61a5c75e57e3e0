"""The states of many envs as columns: an array for each field, which looks much like a record array."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.compiled.definition import Definition


class Columns:
    """The states of many envs. `states["x"]` and `states.x` are the field x of all envs, as an array to read and write.

    `states[i]` is a copy of one env's state, a record; `states[i] = record` writes it; `np.asarray(states)` copies all.

    Attributes:
        dtype: of one state.
        addresses: where the columns are, in the order of the fields.
    """

    def __init__(self, definition: Definition, count: int):
        self.dtype, self._count = definition.dtype, count
        names = definition.dtype.names or ()
        self._columns = {name: np.full(count, definition.defaults[name], definition.dtype[name]) for name in names}
        self.addresses = np.array([column.ctypes.data for column in self._columns.values()] or [0], np.int64)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self._count))

    def __getattr__(self, name: str) -> npt.NDArray[Any]:
        columns = self.__dict__.get("_columns", {})
        if name not in columns:
            raise AttributeError(f"the state has no field {name!r}, its fields are {', '.join(columns)}")
        return columns[name]  # type: ignore[no-any-return]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        record = np.zeros((), self.dtype)
        for name, column in self._columns.items():
            record[name] = column[key]
        return record[()]

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, str):
            self._columns[key][:] = value
            return
        record = np.asarray(value, self.dtype)
        for name, column in self._columns.items():
            column[key] = record[name]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy is False:
            raise ValueError("the states lie in columns: they cannot be one array without a copy")
        whole = np.zeros(self._count, self.dtype)
        for name, column in self._columns.items():
            whole[name] = column
        return whole if dtype is None else whole.astype(dtype)

    def __repr__(self) -> str:
        return f"Columns({self._count} states, {self.dtype})"

"""The slab: one anonymous shared region that holds every field of every lane, and where each field lies.

A header says to other processes what this is. Control fields (one entry a lane or a worker) follow, then the actions,
then the frames: `frames` copies of everything that a step writes. Workers write one frame while the learner still reads
the one before. Under same_step, frames also have room for the last observations of episodes, because
the first ones of the next episodes stand in their place.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import StartError
from shoal.memory import header
from shoal.native import layout as table
from shoal.spaces.leaves import Kind, Leaf, row_layout
from shoal.support import processes
from shoal.support.system import system

# The fields that a worker writes with every answer, beside the observation; all pools have them.
FRAME_FIELDS = tuple(row.name for row in table.FIELDS if row.shape == ("frames", "lanes") and row.name != "present")
# The plain fields that a lane has once, in no frame.
LANE_FIELDS = tuple(row.name for row in table.FIELDS if row.shape == ("lanes",))


@dataclass(frozen=True)
class Field:
    """Where an array lies in the slab."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    row_bytes: int = 0  # where it is a part of the rows that `obs_rows` has: the size of one

    @property
    def nbytes(self) -> int:
        """Size of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Where everything lies. Goes to the workers as it is."""

    lanes: int
    frames: int
    workers: int
    fields: dict[str, Field]
    size: int

    @classmethod
    def plan(
        cls,
        obs_leaves: Sequence[Leaf],
        action_leaves: Sequence[Leaf],
        lanes: int,
        frames: int,
        workers: int,
        finals: bool = False,
        absences: bool = False,
        rows: bool = False,
        infos: bool = False,
    ) -> Layout:
        """Lay out the fields for these spaces one after the other.

        With `finals` come the last observations of episodes, with `absences` a flag whether the agent of a lane is
        there, with `rows` all leaves of a lane's observation lie in one piece, one row for each lane, and with `infos`
        lanes have rows for their infos.
        """
        starts, row_bytes = row_layout(obs_leaves) if rows else ([], 0)
        sizes = {"lanes": lanes, "frames": frames, "workers": workers, "row_bytes": row_bytes}
        leaves = {"action.i": action_leaves, "obs.i": () if rows else obs_leaves, "final.i": ()}
        if finals and all(leaf.kind is Kind.ARRAY for leaf in obs_leaves):
            leaves["final.i"] = obs_leaves
        left_out = {"present": not absences, "obs_rows": not rows, "info_rows": not infos, "info_schemas": not infos}
        wanted: list[tuple[str, Any, tuple[int, ...]]] = []
        for row in table.FIELDS:
            shape = tuple(_axis(axis, sizes) for axis in row.shape if axis != "...")
            for i, leaf in enumerate(leaves.get(row.name, ())):
                if leaf.kind is not Kind.OBJECT:
                    wanted.append((f"{row.name[:-1]}{i}", leaf.dtype, (*shape, *leaf.shape)))
            if row.name not in leaves and not left_out.get(row.name):
                wanted.append((row.name, row.dtype, shape))
        fields, offset = {}, 0
        for name, dtype, shape in wanted:
            fields[name] = Field(offset, np.dtype(dtype), shape)
            offset += -(-fields[name].nbytes // table.LINE) * table.LINE
        for i, (leaf, start) in enumerate(zip(obs_leaves, starts, strict=False)):
            shape = (frames, lanes, *leaf.shape)
            fields[f"obs.{i}"] = Field(fields["obs_rows"].offset + start, leaf.dtype, shape, row_bytes)
        return cls(lanes, frames, workers, fields, max(offset, table.LINE))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each field of the table begins that has a name of its own; -1 for those that this slab lacks."""
        names = [row.name for row in table.FIELDS if not row.name.endswith(".i")]
        return tuple(self.fields[name].offset if name in self.fields else -1 for name in names)


class Slab:
    """The mapped region and numpy arrays on its fields.

    `fd` is the region's only handle: no name in any file system, so that nothing is left behind when a process dies.
    Other processes of the user may look at the region by it.
    """

    def __init__(self, layout: Layout, memory: Any, fd: int | None):
        self.layout = layout
        self.memory = memory
        self.fd = fd
        _mapped_here.add(self)
        self.late_counters: weakref.WeakSet[Any] = weakref.WeakSet()  # what has counts that are not written yet

    @classmethod
    def create(cls, layout: Layout, shared: bool) -> Slab:
        """Make a region; `shared` if other processes will map it, which takes a descriptor."""
        _check_room(layout)
        fd = None
        try:
            fd = system.shared_memory("shoal", layout.size)
            return cls(layout, system.map_shared(fd, layout.size), fd)
        except (OSError, StartError) as error:
            if fd is not None:
                os.close(fd)
            if not shared:  # for want of a descriptor, say: other processes cannot look at this one
                return cls(layout, system.map_private(layout.size), None)
            raise StartError(
                f"no room for {layout.size:,} bytes of shared memory ({error}): use fewer envs or frames"
            ) from error

    @classmethod
    def attach(cls, layout: Layout, fd: int) -> Slab:
        """Map a region that another process made; takes over the descriptor and closes it."""
        own = None
        try:
            own = os.dup(fd)  # which programs that are started here do not inherit
            return cls(layout, system.map_shared(own, layout.size), own)
        except BaseException:
            if own is not None:
                os.close(own)
            raise
        finally:
            os.close(fd)

    def introduce(self, facts: Mapping[str, Any]) -> None:
        """Say to other processes of the user what this is, and where the fields are that they may read."""
        shown = {row.name: self.layout.fields[row.name] for row in table.FIELDS if row.shown}
        fields = {name: [field.offset, field.dtype.str, field.shape] for name, field in shown.items()}
        header.write(self.array("header"), {**facts, "fields": fields, "columns": table.COLUMNS})

    def settle(self) -> None:
        """Have all counts of this process written, for those who read them."""
        for counters in list(self.late_counters):
            counters.settle()

    def withdraw(self) -> None:
        """Say no more that this is a running pool's: arrays of it, and so the region, may outlive the pool."""
        header.withdraw(self.array("header"))

    def array(self, name: str) -> npt.NDArray[Any]:
        """A view of a field; it lives as long as the region."""
        field = self.layout.fields[name]
        if field.row_bytes:
            start = field.offset - self.layout.fields["obs_rows"].offset
            size = math.prod(field.shape[2:]) * field.dtype.itemsize
            return self.array("obs_rows")[..., start : start + size].view(field.dtype).reshape(field.shape)
        flat: npt.NDArray[Any] = np.frombuffer(self.memory, field.dtype, math.prod(field.shape), field.offset)
        return flat.reshape(field.shape)

    def leaf_arrays(self, prefix: str, leaves: Sequence[Leaf]) -> list[npt.NDArray[Any] | None]:
        """The arrays of a space's leaves; None for those that have none, such as objects."""
        fields = self.layout.fields
        return [self.array(f"{prefix}.{i}") if f"{prefix}.{i}" in fields else None for i, _ in enumerate(leaves)]

    def describe(self, prefix: str, leaves: Sequence[Leaf]) -> tuple[tuple[Any, ...], ...]:
        """The leaves as the native core wants them: (offset, itemsize, nbytes of a lane, code, shape, path, stride)."""
        rows = []
        for i, leaf in enumerate(leaves):
            field = self.layout.fields.get(f"{prefix}.{i}")
            offset = 0 if field is None else field.offset
            stride = (field and field.row_bytes) or leaf.nbytes
            rows.append((offset, leaf.dtype.itemsize, leaf.nbytes, leaf.code, leaf.shape, leaf.path, stride))
        return tuple(rows)

    def part(self) -> None:
        """In a forked child: see the region as it is, and keep to this process what is written into it from now on."""
        if self.fd is not None:
            system.unshare(self.memory, self.fd)
            self.close()

    def close(self) -> None:
        """Give up the descriptor. The memory itself goes when the last array on it does."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def __del__(self) -> None:
        self.close()


def _axis(axis: str, sizes: Mapping[str, int]) -> int:
    """How long an axis of the layout table is in this slab."""
    return sizes[axis] if axis in sizes else table.CONSTANTS.get(axis) or int(axis)


def _part_all() -> None:
    for slab in list(_mapped_here):
        slab.part()


_mapped_here: weakref.WeakSet[Slab] = weakref.WeakSet()
system.after_fork(_part_all)


def _check_room(layout: Layout) -> None:
    """Refuse what cannot fit: the kernel would grant it now and kill a process later."""
    available = processes.available_memory()
    if available is not None and layout.size > available:
        raise StartError(
            f"{layout.lanes} envs in {layout.frames} frames need {layout.size:,} bytes of shared memory, "
            f"and {available:,} are available: use fewer envs, fewer frames or smaller observations"
        )

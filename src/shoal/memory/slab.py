"""The slab: one anonymous shared region that holds every field of every lane, and where each field lies.

A header says to other processes what this is. Control fields (one entry a lane or a worker) follow, then the actions,
then the frames: `frames` copies of everything that a step writes. Workers write one frame while the learner still reads
the one before. Under same_step, frames also have room for the last observations of episodes, whose place the first ones
of the next have taken.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.errors import StartError
from shoal.memory import header
from shoal.native import counters
from shoal.spaces.leaves import Kind, Leaf, row_layout
from shoal.support import processes

__all__ = ["Field", "Layout", "Slab", "anonymous_file"]

LINE = 64  # bytes in a cache line; every field starts on one
BELL_WORDS = LINE // 4

# Per lane, in one copy. pending, requested, op and slot are the learner's to write; the rest is the worker's.
LANE_FIELDS = {
    "pending": np.uint8,
    "requested": np.uint64,
    "answered": np.uint64,
    "op": np.uint8,
    "slot": np.uint8,
    "done_ns": np.int64,
    "ended": np.uint8,
    "run_return": np.float64,
    "run_length": np.int64,
}
# What other processes may read by the header, as `shoal top` does.
SHOWN = ("roster", "stats", "episode_sums", "pool_stats", "pending", "requested", "answered")
# Per frame and lane, written by the worker with every answer.
FRAME_FIELDS = {
    "reward": np.float64,
    "terminated": np.bool_,
    "truncated": np.bool_,
    "began": np.bool_,
    "status": np.uint8,
    "episode_return": np.float64,
    "episode_length": np.int64,
}


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
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


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
    ) -> Layout:
        """Lay out the fields for these spaces one after the other.

        Args:
            finals: with the last observations of episodes.
            absences: with a flag whether there is anybody in a lane.
            rows: with all leaves of a lane's observation in one piece, one row for each lane.
        """
        wanted: list[tuple[str, Any, tuple[int, ...]]] = [
            ("header", np.uint8, (header.SIZE,)),
            ("pool_bell", np.uint32, (BELL_WORDS,)),
            ("worker_bells", np.uint32, (workers, BELL_WORDS)),
            ("mail", np.uint32, (workers, BELL_WORDS)),
            ("stats", np.int64, (workers, LINE // 8)),
            ("roster", np.int64, (workers, 3)),
            ("episode_sums", np.float64, (workers, LINE // 8)),
            ("step_times", np.int64, (workers, counters.TIME_BUCKETS)),
            ("pool_stats", np.int64, (2 * LINE // 8,)),
            ("lane_stats", np.int64, (lanes, counters.LANE_STATS)),
        ]
        wanted += [(name, dtype, (lanes,)) for name, dtype in LANE_FIELDS.items()]
        for i, leaf in enumerate(action_leaves):
            if leaf.kind is not Kind.OBJECT:
                wanted.append((f"action.{i}", leaf.dtype, (lanes, *leaf.shape)))
        wanted += [(name, dtype, (frames, lanes)) for name, dtype in FRAME_FIELDS.items()]
        if absences:
            wanted.append(("present", np.bool_, (frames, lanes)))
        starts, row_bytes = row_layout(obs_leaves) if rows else ([], 0)
        if rows:
            wanted.append(("obs_rows", np.uint8, (frames, lanes, row_bytes)))
        for i, leaf in enumerate(obs_leaves):
            if leaf.kind is not Kind.OBJECT and not rows:
                wanted.append((f"obs.{i}", leaf.dtype, (frames, lanes, *leaf.shape)))
        if finals and all(leaf.kind is Kind.ARRAY for leaf in obs_leaves):
            for i, leaf in enumerate(obs_leaves):
                wanted.append((f"final.{i}", leaf.dtype, (frames, lanes, *leaf.shape)))
        fields, offset = {}, 0
        for name, dtype, shape in wanted:
            fields[name] = Field(offset, np.dtype(dtype), shape)
            offset += -(-fields[name].nbytes // LINE) * LINE
        for i, (leaf, start) in enumerate(zip(obs_leaves, starts, strict=False)):
            shape = (frames, lanes, *leaf.shape)
            fields[f"obs.{i}"] = Field(fields["obs_rows"].offset + start, leaf.dtype, shape, row_bytes)
        return cls(lanes, frames, workers, fields, max(offset, LINE))

    def offset(self, name: str, *index: int) -> int:
        """Byte offset of a field, or of one entry along its first axes."""
        field = self.fields[name]
        offset, stride = field.offset, field.nbytes
        for i, n in zip(index, field.shape, strict=False):
            stride //= n
            offset += i * stride
        return offset


class Slab:
    """The mapped region and numpy arrays on its fields.

    `fd` is the region's only handle: no name in any file system, so that nothing is left behind whoever dies. Other
    processes of the user may look at the region by it.
    """

    def __init__(self, layout: Layout, memory: Any, fd: int | None):
        self.layout = layout
        self.memory = memory
        self.fd = fd

    @classmethod
    def create(cls, layout: Layout, shared: bool) -> Slab:
        """Make a region; `shared` if other processes will map it, which takes a descriptor."""
        _check_room(layout)
        fd = None
        try:
            fd = anonymous_file("shoal")
            os.ftruncate(fd, layout.size)
            return cls(layout, _mapped(fd, layout.size), fd)
        except OSError as error:
            if fd is not None:
                os.close(fd)
            if not shared:  # for want of a descriptor, say: nobody can look at this one
                return cls(layout, mmap.mmap(-1, layout.size), None)
            raise StartError(
                f"no room for {layout.size:,} bytes of shared memory ({error}): use fewer envs or frames"
            ) from error

    @classmethod
    def attach(cls, layout: Layout, fd: int) -> Slab:
        """Map a region that another process made; takes over the descriptor and closes it."""
        try:
            return cls(layout, _mapped(fd, layout.size), None)
        finally:
            os.close(fd)

    def introduce(self, facts: Mapping[str, Any]) -> None:
        """Say to other processes of the user what this is, and where the fields are that they may read."""
        shown = {name: self.layout.fields[name] for name in SHOWN}
        fields = {name: [field.offset, field.dtype.str, field.shape] for name, field in shown.items()}
        header.write(self.array("header"), {**facts, "fields": fields, "columns": counters.COLUMNS})

    def withdraw(self) -> None:
        """Say no more that this is a running pool's: arrays of it, and so the region, may outlive the pool."""
        header.withdraw(self.array("header"))

    def array(self, name: str) -> npt.NDArray[Any]:
        """A view of a field; it lives as long as the region."""
        field = self.layout.fields[name]
        if field.row_bytes:
            start = field.offset - self.layout.fields["obs_rows"].offset
            size = int(np.prod(field.shape[2:], dtype=np.int64)) * field.dtype.itemsize
            return self.array("obs_rows")[..., start : start + size].view(field.dtype).reshape(field.shape)
        flat: npt.NDArray[Any] = np.frombuffer(
            self.memory, field.dtype, int(np.prod(field.shape, dtype=np.int64)), field.offset
        )
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
            nbytes = leaf.dtype.itemsize * int(np.prod(leaf.shape, dtype=np.int64))
            rows.append((offset, leaf.dtype.itemsize, nbytes, leaf.code, leaf.shape, leaf.path,
                         field.row_bytes if field is not None and field.row_bytes else nbytes))  # fmt: skip
        return tuple(rows)

    def close(self) -> None:
        """Give up the descriptor. The memory itself goes when the last array on it does."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def __del__(self) -> None:
        self.close()


def _mapped(fd: int, size: int) -> Any:
    """The file as memory, which is unmapped when the last array on it is gone.

    Not by `mmap.mmap`: that keeps a descriptor of its own for as long, in threads that hang and arrays that users hold.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_char * size).from_address(address)
    # At the interpreter's exit others may still be at work on it.
    weakref.finalize(memory, libc.munmap, address, size).atexit = False
    return memory


def anonymous_file(label: str) -> int:
    """A descriptor of a new file without a name; the label is what /proc shows of it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(label, os.MFD_CLOEXEC)
    # Elsewhere: a file that is unlinked before anybody could see it.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _check_room(layout: Layout) -> None:
    """Refuse what cannot fit: the kernel would grant it now and kill somebody later."""
    available = processes.available_memory()
    if available is not None and layout.size > available:
        raise StartError(
            f"{layout.lanes} envs in {layout.frames} frames need {layout.size:,} bytes of shared memory, "
            f"and {available:,} are available: use fewer envs, fewer frames or smaller observations"
        )

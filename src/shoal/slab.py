"""The slab: one anonymous shared region that holds every field of every lane, and where each field lies.

Control fields (one entry a lane or a worker) come first, then the actions, then the frames: `frames` copies of
everything that a step writes. Workers write one frame while the learner still reads the one before. Under same_step,
frames also have room for the last observations of episodes, whose place the first ones of the next have taken.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal import procs
from shoal.errors import StartError
from shoal.spaces import Kind, Leaf

__all__ = ["Field", "Layout", "Slab", "anonymous_file"]

LINE = 64  # bytes in a cache line; every field starts on one
BELL_WORDS = LINE // 4

# Per lane, in one copy. requested, op and slot are the learner's to write; the rest is the worker's.
LANE_FIELDS = {
    "requested": np.uint64,
    "answered": np.uint64,
    "op": np.uint8,
    "slot": np.uint8,
    "done_ns": np.int64,
    "ended": np.uint8,
    "run_return": np.float64,
    "run_length": np.int64,
}
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
    ) -> Layout:
        """Lay out the fields for these spaces one after the other.

        Args:
            finals: with the last observations of episodes.
            absences: with a flag whether there is anybody in a lane.
        """
        wanted: list[tuple[str, Any, tuple[int, ...]]] = [
            ("pool_bell", np.uint32, (BELL_WORDS,)),
            ("worker_bells", np.uint32, (workers, BELL_WORDS)),
            ("mail", np.uint32, (workers, BELL_WORDS)),
            ("stats", np.int64, (workers, LINE // 8)),
        ]
        wanted += [(name, dtype, (lanes,)) for name, dtype in LANE_FIELDS.items()]
        for i, leaf in enumerate(action_leaves):
            if leaf.kind is not Kind.OBJECT:
                wanted.append((f"action.{i}", leaf.dtype, (lanes, *leaf.shape)))
        wanted += [(name, dtype, (frames, lanes)) for name, dtype in FRAME_FIELDS.items()]
        if absences:
            wanted.append(("present", np.bool_, (frames, lanes)))
        for i, leaf in enumerate(obs_leaves):
            if leaf.kind is not Kind.OBJECT:
                wanted.append((f"obs.{i}", leaf.dtype, (frames, lanes, *leaf.shape)))
        if finals and all(leaf.kind is Kind.ARRAY for leaf in obs_leaves):
            for i, leaf in enumerate(obs_leaves):
                wanted.append((f"final.{i}", leaf.dtype, (frames, lanes, *leaf.shape)))
        fields, offset = {}, 0
        for name, dtype, shape in wanted:
            fields[name] = Field(offset, np.dtype(dtype), shape)
            offset += -(-fields[name].nbytes // LINE) * LINE
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

    `fd` is the region's only handle: no name in any file system, so that nothing is left behind whoever dies.
    """

    def __init__(self, layout: Layout, memory: mmap.mmap, fd: int | None):
        self.layout = layout
        self.memory = memory
        self.fd = fd

    @classmethod
    def create(cls, layout: Layout, shared: bool) -> Slab:
        """Make a region; `shared` if other processes will map it."""
        _check_room(layout)
        if not shared:
            return cls(layout, mmap.mmap(-1, layout.size), None)
        fd = anonymous_file()
        try:
            os.ftruncate(fd, layout.size)
            return cls(layout, mmap.mmap(fd, layout.size), fd)
        except OSError as error:
            os.close(fd)
            raise StartError(
                f"no room for {layout.size:,} bytes of shared memory ({error}): use fewer envs or frames"
            ) from error

    @classmethod
    def attach(cls, layout: Layout, fd: int) -> Slab:
        """Map a region that another process made; takes over the descriptor and closes it."""
        try:
            return cls(layout, mmap.mmap(fd, layout.size), None)
        finally:
            os.close(fd)

    def array(self, name: str) -> npt.NDArray[Any]:
        """A view of a field; it lives as long as the region."""
        field = self.layout.fields[name]
        flat: npt.NDArray[Any] = np.frombuffer(
            self.memory, field.dtype, int(np.prod(field.shape, dtype=np.int64)), field.offset
        )
        return flat.reshape(field.shape)

    def leaf_arrays(self, prefix: str, leaves: Sequence[Leaf]) -> list[npt.NDArray[Any] | None]:
        """The arrays of a space's leaves; None for those that have none, such as objects."""
        fields = self.layout.fields
        return [self.array(f"{prefix}.{i}") if f"{prefix}.{i}" in fields else None for i, _ in enumerate(leaves)]

    def describe(self, prefix: str, leaves: Sequence[Leaf]) -> tuple[tuple[Any, ...], ...]:
        """The leaves as the native core wants them: (offset, itemsize, nbytes of a lane, code, shape, path)."""
        rows = []
        for i, leaf in enumerate(leaves):
            offset = 0 if leaf.kind is Kind.OBJECT else self.layout.offset(f"{prefix}.{i}")
            nbytes = leaf.dtype.itemsize * int(np.prod(leaf.shape, dtype=np.int64))
            rows.append((offset, leaf.dtype.itemsize, nbytes, leaf.code, leaf.shape, leaf.path))
        return tuple(rows)

    def close(self) -> None:
        """Give up the descriptor. The memory itself goes when the last array on it does."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        # BufferError: arrays that the user still holds keep the mapping alive, which is what they expect.
        with contextlib.suppress(BufferError):
            self.memory.close()


def anonymous_file() -> int:
    """A descriptor of a new file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("shoal", os.MFD_CLOEXEC)
    # Elsewhere: a file that is unlinked before anybody could see it.
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _check_room(layout: Layout) -> None:
    """Refuse what cannot fit: the kernel would grant it now and kill somebody later."""
    available = procs.available_memory()
    if available is not None and layout.size > available:
        raise StartError(
            f"{layout.lanes} envs in {layout.frames} frames need {layout.size:,} bytes of shared memory, "
            f"and {available:,} are available: use fewer envs, fewer frames or smaller observations"
        )

"""The lanes of one pool: their fields in the slab, which are busy, which are one env's, and how actions get there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal import native
from shoal.engine.workers import Workers
from shoal.errors import BadCall, BadEnv, NothingPending
from shoal.memory.answers import Frames
from shoal.memory.messages import LaneGroup
from shoal.memory.slab import Slab
from shoal.spaces.leaves import Check, Kind, Leaf, read_actions
from shoal.support.checks import Ids


class LaneTable:
    """The lanes of one slab, as the caller sees them.

    Attributes:
        owner: int32 [lanes], the worker of each lane.
        busy: which lanes are busy.
        window: 0, or how many neighbours are always received together.
        core: the core's Lanes, which posts requests and collects answers; its `with` keeps other threads out.
        slot, op, status, requested, answered, done_ns: fields of the slab.
    """

    def __init__(self, slab: Slab, workers: Workers, answers: Frames, groups: LaneGroups, window: int):
        self.slab, self.workers, self.answers, self.groups, self.window = slab, workers, answers, groups, window
        self.count, self.frame_count = slab.layout.lanes, slab.layout.frames
        self.all_ids = np.arange(self.count, dtype=np.int64)
        self.owner = workers.owner_of_lanes()
        pending = slab.array("pending")
        self.busy = BusyLanes(pending)
        self.core: Any = native.Lanes(slab, pending, self.owner, *workers.bells(), groups.leader, window)
        self.slot, self.op, self.status = slab.array("slot"), slab.array("op"), slab.array("status")
        self.requested, self.answered = slab.array("requested"), slab.array("answered")
        self.done_ns = slab.array("done_ns")

    def worker_of(self, lane: int) -> Any:
        """The worker that owns a lane."""
        return self.workers[int(self.owner[lane])]


@dataclass(frozen=True)
class HeldRequest:
    """A request that waits: what was asked for, and when it may be posted at the earliest."""

    op: int
    seed: int | None = None
    options: dict[str, Any] | None = None
    objects: list[Any] | None = None  # the parts of the action that have no array
    not_before_ns: int = 0


class BusyLanes:
    """The busy lanes of one pool: asked for something that was not received yet.

    A busy lane is either **posted** (its request lies in the slab, and its byte in `pending` is 1) or **held** (its
    request waits here, because its worker is being replaced or must rest). The core sets and clears the bytes of posted
    lanes by itself when it posts and collects. They are the truth, and are counted when they are asked for, so that
    no interrupt can come between what the core did and a note of it.

    Attributes:
        held: the requests that wait, by lane.
        sent_at: int64 [lanes + 1], each lane's place in the order of sends, and the number of all sends.
    """

    def __init__(self, posted: Any):
        self._posted = posted  # uint8 [lanes], the slab's `pending`
        self.held: dict[int, HeldRequest] = {}
        self.sent_at = np.zeros(len(posted) + 1, np.int64)

    @property
    def count(self) -> int:
        """How many are busy."""
        posted = int(np.count_nonzero(self._posted))
        return posted + sum(not self._posted[lane] for lane in self.held) if self.held else posted

    def all(self) -> Ids:
        """The busy lanes, ascending."""
        posted = np.flatnonzero(self._posted)
        return np.union1d(posted, list(self.held)).astype(np.int64) if self.held else posted

    def among(self, ids: Ids) -> Any:
        """Bool [n]: which of these lanes are busy."""
        posted = self._posted[ids] != 0
        return posted | np.isin(ids, list(self.held)) if self.held else posted

    def posted_among(self, ids: Ids) -> Ids:
        """Those of the lanes that their workers know of: requests that are held wait for the caller alone."""
        found: Ids = ids[self._posted[ids] != 0]
        return found

    def part_of_window(self, size: int, least: int | None) -> Ids | None:
        """The lanes to wait for where no window of so many neighbours can become whole, as parts of several were sent
        to; None where one can.

        Raises NothingPending unless `least` will do.
        """
        if self._posted.reshape(-1, size).all(axis=1).any():
            return None
        pending = self.all()
        counts = np.bincount(pending // size)
        if (most := int(counts.max())) == size:
            return None
        if least is None or most < least:
            raise NothingPending(
                f"recv waits for {size} neighbours, and no such batch was sent to as a whole: send to the rest "
                f"of one, or give min_batch; pending are {pending[:8].tolist()}"
            )
        found: Ids = pending[pending // size == counts.argmax()]
        return found

    def in_order(self, ids: Ids) -> Ids:
        """The lanes as they were sent to, first to last."""
        return ids[np.argsort(self.sent_at[ids], kind="stable")]

    def sent(self, ids: Ids) -> None:
        """Note the order in which lanes were sent to."""
        sends = int(self.sent_at[-1])
        self.sent_at[ids] = np.arange(sends, sends + len(ids))
        self.sent_at[-1] = sends + len(ids)

    def put_back(self, ids: Ids) -> None:
        """Lanes that are not busy have answers that wait to be received."""
        self._posted[ids] = 1

    def hold(self, lane: int, request: HeldRequest) -> None:
        """Keep the request of a lane; one that is posted is taken back."""
        self._posted[lane] = 0
        self.held[lane] = request

    def held_and_posted(self) -> list[int]:
        """The lanes that were held and have been posted: an interrupt may come between a post and a note of it."""
        return [lane for lane in self.held if self._posted[lane]]

    def drop_held(self, lane: int) -> None:
        """Forget what is held for a lane, if anything is."""
        self.held.pop(lane, None)


class LaneGroups:
    """Which lanes of a pool are one env's: they are asked, answered and lost together. Where envs have one lane each,
    there are no groups.

    Attributes:
        some: whether there are any.
        apart: whether each env has one lane, and is stepped by itself.
        size: lanes in a group; 0 where they differ.
        leader: int64 [lanes]: the last lane of each one's group; None where there are none.

    Args:
        replaces: whether lost envs are replaced: with all of their lanes, so that these can only be asked together.
    """

    def __init__(self, groups: Sequence[LaneGroup], replaces: bool = False):
        if replaces and any(lanes.size > 1 and not lanes.together for lanes in groups):
            raise BadEnv("on_error and recycle_after: the lanes of these envs are asked one by one, and lost together")
        self._groups = list(groups)
        bound = [lanes.size for lanes in groups if lanes.together]
        self.some, self.apart = bool(bound), not groups
        counts = np.array([lanes.size for lanes in groups] if self.some else [], np.int64)
        self.size = int(counts[0]) if self.some and (counts == counts[0]).all() else 0
        stops = np.cumsum(counts)
        self.leader: Any = np.repeat(stops - 1, counts) if self.some else None
        self._first: Any = np.repeat(stops - counts, counts) if self.some else None
        self._resets_alone = all(lanes.resets_alone for lanes in groups) and not replaces

    def last_of(self, lane: int) -> int:
        """The last lane of the group: once it has answered, all of them have."""
        return int(self.leader[lane]) if self.some else lane

    def of(self, lane: int) -> Ids:
        """All lanes of this one's group."""
        return np.arange(self._first[lane], self.leader[lane] + 1) if self.some else np.array([lane])

    def check_whole(self, ids: Ids, what: str) -> None:
        """Raise BadCall unless these are whole groups, each in its order."""
        if not self.some or (what == "reset" and self._resets_alone):
            return
        i = 0
        while i < len(ids):
            own = self.of(int(ids[i]))
            if not np.array_equal(ids[i : i + len(own)], own):
                raise BadCall(
                    f"{what}: lanes {own[0]} to {own[-1]} are those of one env, which takes all of them at once: give "
                    f"them together and in order, found {ids[:8].tolist()}"
                )
            i += len(own)

    def check_none_stays(self, ids: Ids, busy: Ids, what: str) -> None:
        """Raise BadCall where only some of the busy lanes of an env are among these."""
        if not self.some:
            return
        taken = np.isin(busy, ids)
        cut = np.intersect1d(self.leader[busy[taken]], self.leader[busy[~taken]])
        if len(cut):
            own = self.of(int(cut[0]))
            raise BadCall(
                f"{what}: lanes {own[0]} to {own[-1]} are those of one env, and answer together: give all of them, "
                f"found {ids[:8].tolist()}"
            )

    def lanes_of(self, envs: int, lanes: int) -> int:
        """How many lanes so many envs have. Raises ValueError where that depends on which."""
        if envs == len(self._groups) or not self._groups:
            return lanes if self._groups else envs
        sizes = {group.size for group in self._groups}
        if len(sizes) > 1:
            raise ValueError("batch_envs: envs have different numbers of lanes, so batches must have all of them")
        return envs * sizes.pop()

    def check_batch(self, batch_size: int, lanes: int) -> None:
        """Raise ValueError for batches that would cut a group in two."""
        if not self.some or batch_size == lanes:
            return
        if not self.size:
            raise ValueError("batch_size: envs have different numbers of lanes, so batches must have all of them")
        if batch_size % self.size:
            raise ValueError(
                f"batch_size: expected a multiple of {self.size}, the lanes of one env, found {batch_size}"
            )


class ActionWriter:
    """Checks batches of actions, and writes them into the slab. `check`: which must be within their bounds."""

    def __init__(self, table: LaneTable, leaves: Sequence[Leaf], check: Check):
        self._leaves, self._check = leaves, check
        self._arrays = table.slab.leaf_arrays("action", leaves)
        self._has_objects = any(leaf.kind is Kind.OBJECT for leaf in leaves)
        leaf = leaves[0] if len(leaves) == 1 else None
        if leaf is not None and leaf.kind is Kind.ARRAY and not leaf.path:
            # The common case: the core checks and copies one array by itself.
            bounds = (leaf.low, leaf.high) if leaf.is_checked(check) else (np.zeros(0), np.zeros(0))
            table.core.use_action(table.slab.describe("action", leaves)[0], *bounds)

    def write(self, actions: Any, lanes: Ids) -> list[Any]:
        """Write the actions of these lanes, or raise BadAction; returns the columns of parts that have no array."""
        values = read_actions(self._leaves, actions, lanes, self._check)
        for array, value in zip(self._arrays, values, strict=True):
            if array is not None:
                array[lanes] = value
        if not self._has_objects:
            return []
        return [value for value, array in zip(values, self._arrays, strict=True) if array is None]

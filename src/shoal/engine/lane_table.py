"""What the parts of the engine share about the lanes of one pool: their fields in the slab, their owners, the core."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal import native
from shoal.engine.busy import BusyLanes
from shoal.engine.lane_groups import LaneGroups
from shoal.engine.workers import Workers
from shoal.memory.answers import Frames
from shoal.memory.slab import Slab


class LaneTable:
    """The lanes of one slab, as the caller sees them.

    Attributes:
        slab, workers, answers, groups: as given.
        count, frame_count: how many lanes and frames there are.
        all_ids: int64 [lanes], 0 up to count.
        owner: int32 [lanes], the worker of each lane.
        busy: which lanes are busy.
        core: the core's Lanes, which posts requests and collects answers; its `with` keeps other threads out.
        slot, op, status, requested, answered, done_ns: fields of the slab.

    Args:
        window: 0, or how many neighbours are always received together.
    """

    def __init__(self, slab: Slab, workers: Workers, answers: Frames, groups: LaneGroups, window: int):
        self.slab, self.workers, self.answers, self.groups = slab, workers, answers, groups
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

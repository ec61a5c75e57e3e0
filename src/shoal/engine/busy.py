"""Which lanes are busy: asked for something that was not received yet. The only place that changes this.

A busy lane is either **posted** (its request lies in the slab, and its byte in `pending` is 1) or **held** (its request
waits here, because its worker is being replaced or must rest). The core sets and clears the bytes of posted lanes by
itself when it posts and collects; this class is told of the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.support.checks import Ids


@dataclass(frozen=True)
class HeldRequest:
    """A request that waits: what was asked for, and when it may be posted at the earliest.

    `objects`: the parts of the action that have no array; None for none.
    """

    op: int
    seed: int | None = None
    options: dict[str, Any] | None = None
    objects: list[Any] | None = None
    not_before_ns: int = 0


class BusyLanes:
    """The busy lanes of one pool.

    Attributes:
        count: how many there are.
        held: the requests that wait, by lane.

    Args:
        posted: uint8 [lanes], the slab's `pending`.
    """

    def __init__(self, posted: Any):
        self._posted = posted
        self.count = 0
        self.held: dict[int, HeldRequest] = {}
        self._sent_at = np.zeros(len(posted), np.int64)  # each lane's place in the order of sends
        self._sends = 0

    # ---- questions ---------------------------------------------------------------------------------------------

    def all(self) -> Ids:
        """The busy lanes, ascending."""
        posted = np.flatnonzero(self._posted)
        return np.union1d(posted, list(self.held)).astype(np.int64) if self.held else posted

    def among(self, ids: Ids) -> Any:
        """Bool [n]: which of these lanes are busy."""
        posted = self._posted[ids] != 0
        return posted | np.isin(ids, list(self.held)) if self.held else posted

    def is_posted(self, lane: int) -> bool:
        """Whether the lane's request lies in the slab."""
        return bool(self._posted[lane])

    def posted_among(self, ids: Ids) -> Ids:
        """Those of the lanes that their workers know of: requests that are held wait for the caller alone."""
        found: Ids = ids[self._posted[ids] != 0]
        return found

    def has_whole_window(self, size: int) -> bool:
        """Whether all lanes of one window of so many neighbours are posted."""
        return bool(self._posted.reshape(-1, size).all(axis=1).any())

    def in_order(self, ids: Ids) -> Ids:
        """The lanes as they were sent to, first to last."""
        return ids[np.argsort(self._sent_at[ids], kind="stable")]

    # ---- changes -----------------------------------------------------------------------------------------------

    def sent(self, ids: Ids) -> None:
        """Note the order in which lanes were sent to."""
        self._sent_at[ids] = np.arange(self._sends, self._sends + len(ids))
        self._sends += len(ids)

    def posted(self, count: int) -> None:
        """The core has posted the requests of so many lanes, which were not busy."""
        self.count += count

    def taken(self, count: int) -> None:
        """The core has collected the answers of so many lanes."""
        self.count -= count

    def put_back(self, ids: Ids) -> None:
        """Lanes that were taken are to be received once more."""
        self._posted[ids] = 1
        self.count += len(ids)

    def hold(self, lane: int, request: HeldRequest) -> None:
        """Keep the request of a lane that was not busy."""
        self.held[lane] = request
        self.count += 1

    def hold_again(self, lane: int, request: HeldRequest) -> None:
        """Take back the request of a lane that is posted, and hold it instead."""
        self._posted[lane] = 0
        self.held[lane] = request

    def released(self, lane: int) -> HeldRequest:
        """The request of a held lane was posted."""
        return self.held.pop(lane)

    def drop_held(self, lane: int) -> None:
        """Forget what is held for a lane, if anything is."""
        if self.held.pop(lane, None) is not None:
            self.count -= 1

    def __enter__(self) -> None:
        """For a call of the core and the note of it: an interrupt in between makes this count anew."""

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:
            self.recount()

    def recount(self) -> None:
        """Believe the core: an interrupt may have come between what it did and a note of it."""
        self.count = int(self._posted.sum()) + sum(not self._posted[lane] for lane in self.held)

    def resume(self, ids: Ids) -> None:
        """After a restore, while no lane is busy: these lanes have answers that wait to be received, in this order."""
        self._posted[ids] = 1
        self.count = len(ids)
        self.sent(ids)

"""A short way between processes of one node: small messages in shared memory, by the channels of Ray's compiled graphs.

A call takes Ray about a millisecond; a message that is written here is found within a tenth of that. Ray's own `read`
spins for as long as there is nothing, so both sides look without waiting, when they are rung for (Bell), or often where
bells do not reach, and give up their core in between (PollBackoff).
Calls remain for everything else: other nodes, large messages, the start and the end.
"""

from __future__ import annotations

import collections
import sys
from typing import Any

from shoal.remote.poll_backoff import PollBackoff

__all__ = ["AGAIN", "MOST", "SLOT", "SLOTS", "TOO_LARGE", "Ring", "looks", "make_ring"]

SLOT = 1 << 15  # bytes of the largest message that goes this way
TOO_LARGE = b""  # in the place of answers that must be fetched by a call
SLOTS = 4  # messages that may be under way
MOST = 256  # rings that a process makes: Ray keeps the memory of each for as long as it is connected
PATIENCE = 1.0  # seconds for a slot that must be free already, in case that a reader was killed in the middle of a read
AGAIN = 0.1  # seconds until even who will be woken looks again
_made: collections.Counter[str] = collections.Counter()  # by cluster


def looks() -> PollBackoff:
    """How often to look for messages."""
    return PollBackoff(soon=0.9, spin=100e-6, longest=20e-3)


def make_ring(ray: Any, reader: Any, node: str) -> Ring | None:
    """A way from this process to another one, or None where there is none.

    Args:
        reader: an actor; for one that ends in no actor, any will do.
        node: of the reader, as Ray calls it.
    """
    here = ray.get_runtime_context()
    if sys.platform != "linux" or here.get_node_id() != node or _made[here.gcs_address] >= MOST:
        return None
    _made[here.gcs_address] += 1
    try:
        from ray.experimental.channel.shared_memory_channel import Channel
        from ray.experimental.channel.utils import get_self_actor

        return Ring([Channel(get_self_actor(), [(reader, node)], SLOT + 1024) for _ in range(SLOTS)])
    except Exception:  # not in this version of Ray, or no room in its object store: there are calls
        return None


class Ring:
    """Messages of one process to another, each with its copy of this.

    Channels have no buffer: one can be written again when it was read. So there are several, and whoever writes must
    know by other means that no more than SLOTS messages are unread.
    """

    def __init__(self, slots: list[Any]):
        self._slots, self._next = slots, 0

    def put(self, data: bytes) -> bool:
        """Send a message: whether it was."""
        try:
            self._slots[self._next].write(data, PATIENCE)
        except Exception:  # the reader is dead
            return False
        self._next = (self._next + 1) % SLOTS
        return True

    def take(self) -> bytes | None:
        """The next message, if there is one. Raises one of Ray's errors when Ray is gone."""
        from ray.exceptions import RayChannelTimeoutError

        try:
            data: bytes = self._slots[self._next].read(0)
        except RayChannelTimeoutError:
            return None
        self._next = (self._next + 1) % SLOTS
        return data

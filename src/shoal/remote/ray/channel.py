"""A short way between two processes of one node: small messages in shared memory, by Ray's compiled-graph channels.

A call of an actor takes Ray about a millisecond, and a message in a channel is found within a tenth of that. Ray's own
`read` spins until there is a message. So both sides look without waiting: when the other side rings (MachineBells), or
often where there are no bells (PollBackoff). Calls carry everything else: messages to other nodes, large messages, the
start and the end.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import sys
from typing import Any

from shoal.remote.poll_backoff import PollTimes

SLOT_BYTES = 1 << 15  # the size of the largest message
TOO_LARGE = b""  # in place of answers that must be fetched by a call
SLOTS = 4  # the number of messages that can be unread at a time
MAX_CHANNELS = 256  # of one process: Ray keeps the memory of each for as long as the process is connected
SLOT_TIMEOUT = 1.0  # seconds; a slot must be free already, unless the reader was killed in the middle of a read
TIMES = PollTimes(soon=0.9, spin=100e-6, longest=20e-3, woken=0.1)
_opened: collections.Counter[str] = collections.Counter()  # by cluster


def import_channels() -> None:
    """Import Ray's channels, if this version of Ray has them.

    Call it before other threads of Ray's can do so: the modules import each other, and if two threads begin with
    different ones, one of the threads gets an ImportError.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("ray.experimental.channel")


def open_channel(ray: Any, reader: Any, node: str) -> RayChannel | None:
    """Make a channel from this process to another one; None if that is not possible.

    Args:
        reader: the actor that reads. If the reader is not an actor, any actor will do.
        node: Ray's id of the reader's node.
    """
    here = ray.get_runtime_context()
    if sys.platform != "linux" or here.get_node_id() != node or _opened[here.gcs_address] >= MAX_CHANNELS:
        return None
    _opened[here.gcs_address] += 1
    try:
        from ray.experimental.channel.shared_memory_channel import Channel
        from ray.experimental.channel.utils import get_self_actor

        return RayChannel([Channel(get_self_actor(), [(reader, node)], SLOT_BYTES + 1024) for _ in range(SLOTS)])
    except Exception:  # this version of Ray has none, or its object store is full: calls will do
        return None


class RayChannel:
    """Carries messages of one process to another. Each of the two has a copy of it.

    Ray's channels have no buffer: one can be written again only after it was read. So there are several of them, used
    in turn, and the writer must know that no more than SLOTS messages are unread.
    """

    def __init__(self, slots: list[Any]):
        self._slots, self._next = slots, 0

    def put(self, data: bytes) -> bool:
        """Send a message. Returns False if the reader is dead."""
        try:
            self._slots[self._next].write(data, SLOT_TIMEOUT)
        except Exception:
            return False
        self._next = (self._next + 1) % SLOTS
        return True

    def take(self) -> bytes | None:
        """The next message, or None. Raises one of Ray's errors if Ray has ended."""
        from ray.exceptions import RayChannelTimeoutError

        try:
            data: bytes = self._slots[self._next].read(0)
        except RayChannelTimeoutError:
            return None
        self._next = (self._next + 1) % SLOTS
        return data

"""What every worker is to the pool: a contiguous block of lanes, a bell, and a side channel."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal import native
from shoal.envs.functions import pickle_env_fns
from shoal.errors import ShoalError, StartError, StepTimeout, WorkerDied
from shoal.memory.messages import BlockSummary, Note, Reply, StepperConfig
from shoal.memory.slab import Slab
from shoal.support.deadline import Deadline
from shoal.worker.building import BuildError

TICKETS = itertools.count(1)  # of commands that are replied to


def split(count: int, parts: int) -> list[tuple[int, int]]:
    """Cut `count` lanes into contiguous blocks of nearly equal size: (start, stop) for each."""
    size, rest = divmod(count, parts)
    starts = [i * size + min(i, rest) for i in range(parts + 1)]
    return list(itertools.pairwise(starts))


@dataclass(frozen=True)
class BlockSpec:
    """A run of neighbouring envs that one worker has: their numbers `start` up to `stop`, and what builds them."""

    index: int  # of the worker
    start: int
    stop: int
    env_fns: Sequence[Any]


class Worker(ABC):
    """The caller's handle of one worker. Starts in two phases, so that all workers build their envs at once.

    launch() -> built() gives the BlockSummary -> attach(slab) -> attached(); then run until close().
    """

    isolated = False  # whether the envs live in another process
    recyclable = False  # whether it can be replaced when its memory has grown too much
    torn = False  # whether an interrupt has cut a message to or from it in two
    condemned = ""  # why the caller has ended it
    node = ""  # the machine that it is on; "" for this one
    explains = False  # whether a close that has to force it says, in `hung`, what it was doing
    hung = ""
    memory: int | None = None  # resident bytes when last looked at
    memory_at_start: int | None = None

    def __init__(self, block: BlockSpec):
        self.index, self.start, self.stop = block.index, block.start, block.stop
        self._state = "starting"
        self._stats: Any = None  # of this worker in the slab, once it is attached
        self._notes: dict[int, Note] = {}
        self._replies: dict[int, Reply] = {}

    @property
    def env_ids(self) -> range:
        """The envs that it owns."""
        return range(self.start, self.stop)

    @property
    def pid(self) -> int | None:
        """Process id, None where it lives in the caller's process."""
        return None

    @property
    def building(self) -> int | None:
        """The env that it builds; None before the first, and where that cannot be known."""
        return None

    @property
    def at_work(self) -> int | None:
        """The env that it is running, or was running when it died."""
        lane = 0 if self._stats is None else int(self._stats[native.STAT_AT])
        return abs(lane) - 1 if lane else None

    @property
    def replaceable(self) -> bool:
        """Whether another one can take its place, once it is gone."""
        return True

    @property
    def state(self) -> str:
        """ "starting", "running", "dead" or "closed"."""
        return self._state

    @property
    @abstractmethod
    def bell(self) -> Any:
        """What the twin rings to wake it."""

    @abstractmethod
    def launch(self, deadline: Deadline) -> None:
        """Begin to build the envs; does not wait for them."""

    def built(self, deadline: Deadline) -> BlockSummary:
        """Wait until the envs are built. Raises the env's own error, or WorkerDied."""
        summary: BlockSummary = self._first_words(deadline)
        return summary

    def _first_words(self, deadline: Deadline) -> Any:
        """Its answer while it is being started. Raises the error of the env that it names instead."""
        answer = self.receive(deadline)
        if isinstance(answer, BuildError):
            raise answer.error.unpack(answer.env_id, self.index) from answer.__cause__
        if isinstance(answer, StartError):
            raise answer
        return answer

    @abstractmethod
    def attach(self, slab: Slab, config: StepperConfig, pool_bell: Any) -> None:
        """Give it the slab."""

    @abstractmethod
    def attached(self, deadline: Deadline) -> None:
        """Wait until it is ready to step."""

    @abstractmethod
    def send(self, *message: Any) -> None:
        """Put a command into the side channel and make the worker read it."""

    @abstractmethod
    def receive(self, deadline: Deadline) -> Any:
        """The next message of its side channel. Raises StepTimeout, or WorkerDied if none will come."""

    def ask_to_close(self) -> None:  # noqa: B027
        """Tell it that close() will follow, so that all workers leave at the same time."""

    @abstractmethod
    def close(self, deadline: Deadline) -> list[tuple[int, Any]]:
        """Ask it to close its envs and leave; force it at the deadline. Errors of envs' close, by env id."""

    def use_ringer(self, ring: Callable[[int], None]) -> None:  # noqa: B027
        """How the pool rings this worker when it has commands without a request."""

    def look_at_memory(self) -> None:  # noqa: B027
        """Note how much memory it takes now."""

    @property
    def growth(self) -> int:
        """By how many bytes its memory has grown since its start."""
        return (self.memory or 0) - (self.memory_at_start or 0)

    def abandon(self) -> None:  # noqa: B027
        """Let go without waiting: in a forked child, where the worker is not ours."""

    def stack(self) -> str:
        """What it is doing, as Python prints its stack; "" where that cannot be known."""
        return ""

    def cut(self) -> ShoalError:
        """The error for a worker that is torn."""
        raise NotImplementedError

    # ---- where the envs live in another process ----------------------------------------------------------------

    def condemn(self, why: str) -> None:
        """End it at once; `why` is what its death will be put down to."""
        raise NotImplementedError

    def death(self) -> WorkerDied:
        """What became of it, in words."""
        raise NotImplementedError

    def reap(self) -> None:
        """After its death: see that it writes nothing any more, take in its last messages, give everything back."""
        raise NotImplementedError

    # ---- commands ----------------------------------------------------------------------------------------------

    def call(self, command: str, lanes: Sequence[int], *args: Any) -> int:
        """Send a command that will be replied to; returns the ticket for `reply`."""
        ticket = next(TICKETS)
        self.send(command, ticket, list(lanes), *args)
        return ticket

    def reply(self, ticket: int, deadline: Deadline) -> list[Any]:
        """Wait for the values of a command."""
        while ticket not in self._replies:
            self._file(self.receive(deadline))
        return self._replies.pop(ticket).values

    def take_note(self, lane: int, sequence: int, deadline: Deadline) -> Note:
        """The note of a lane's answer. A note of an older answer that was not taken is dropped."""
        while True:
            note = self._notes.get(lane)
            if note is not None and note.sequence == sequence:
                return self._notes.pop(lane)
            self._file(self.receive(deadline))

    def keep_note(self, note: Note) -> None:
        """Put a note back, for the next recv."""
        self._notes[note.lane] = note

    def has_note(self, lane: int, sequence: int) -> bool:
        """Whether the note of a lane's answer is here, and is no error."""
        note = self._notes.get(lane)
        return note is not None and note.sequence == sequence and note.error is None

    def inherit(self, other: Worker) -> None:
        """Take over the notes of another worker of this block that were not taken yet."""
        self._notes = other._notes

    def _file(self, message: Any) -> None:
        if isinstance(message, Reply):
            self._replies[message.ticket] = message
        elif isinstance(message, list):
            self._notes.update((note.lane, note) for note in message)

    def describe_hang(self) -> str:
        """What it is doing, while it should have left, and where."""
        pid = "" if self.pid is None else f" (pid {self.pid})"
        stack, at = self.stack(), self.at_work
        doing = "is running no env" if at is None else f"is running env {at}"
        return f"worker {self.index}{pid} {doing}" + (f":\n{stack}" if stack else "")

    def describe_late_start(self) -> str:
        """What is known of a worker whose envs are not all built in time."""
        if self.building is None:
            return f"worker {self.index} (envs {self.start} to {self.stop - 1}) has not begun to build envs"
        return f"worker {self.index} is still building env {self.building}"

    def _timed_out(self, deadline: Deadline) -> StepTimeout:
        return StepTimeout(
            f"worker {self.index} (envs {self.start} to {self.stop - 1}) did not answer within {deadline.seconds} s",
            self.env_ids,
        )


def pickle_blocks(blocks: Sequence[BlockSpec]) -> dict[int, list[bytes]]:
    """The env functions of each block as bytes, by the block's index. What several envs share is pickled once. Raises
    BadEnv for one that cannot be pickled."""
    env_fns = [env_fn for block in blocks for env_fn in block.env_fns]
    pickled = iter(pickle_env_fns(env_fns, blocks[0].start if blocks else 0))
    return {block.index: [next(pickled) for _ in block.env_fns] for block in blocks}

"""What a pool and a block of envs that lives elsewhere say to each other: whole messages, each one piece of memory.

A message begins with its kind. REQUEST and ANSWER have the rows of some lanes, field after field, so that a batch of a
host is one message however many envs it has; everything else is a pickled tuple. Both sides know the fields from the
spaces, and the rows from the lanes: neighbours are told by the first of them, others stand in the message.
"""

from __future__ import annotations

import itertools
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import numpy.typing as npt

from shoal.memory.messages import STATUS_FINAL
from shoal.memory.slab import FRAME_FIELDS, Slab
from shoal.native import counters

__all__ = ["ANSWER", "REQUEST", "Request", "Wire", "WireAnswer", "WireRows", "is_words", "pack_words", "unpack_words"]

Array = npt.NDArray[Any]

WORDS, REQUEST, ANSWER = b"w", b"r", b"a"
# Words of a host that was asked what it is doing: (this, env or 0, the number of its request, ns since when, stack).
HOST_LIVES = "lives"
COUNTERS = ("stats", "episode_sums", "step_times")  # of a host as a whole
# What a lane's worker keeps from one request to the next. It travels both ways, so that the pool's slab always has all
# there is to know of a lane, and a restored snapshot or a new host need nothing else.
KEPT = ("ended", "run_return", "run_length")
# Kind, number, how many lanes, the first of them, bytes of mail at the end, busy_ns. What follows is aligned.
HEAD = struct.Struct("<c7x5q")
SCATTERED = -1  # instead of the first: the lanes are no neighbours, and follow
MOST_KNOWN = 256  # runs of lanes to keep views of; with partial batches there may be any number


def pack_words(*words: Any) -> bytes:
    """A message that is no request and no answer. By value: the other side may not have the caller's script."""
    packed: bytes = cloudpickle.dumps(words)
    return WORDS + packed


def is_words(data: Any) -> bool:
    """Whether a message is such a tuple."""
    return bytes(data[:1]) == WORDS


def unpack_words(data: Any) -> tuple[Any, ...]:
    """What was packed."""
    words: tuple[Any, ...] = cloudpickle.loads(memoryview(data)[1:])
    return words


class WireRows:
    """What travels of some lanes, field after field.

    Attributes:
        lanes: ascending.
        at: an index of theirs: a slice where they are neighbours.
        frame: an index of their rows in the frames; None if none of these travel.

    Args:
        fields: arrays, and by which index each has the lanes' rows.
        pieces: whether the rows of each field lie side by side. They are then copied as bytes.
    """

    def __init__(self, lanes: Array, at: Any, frame: Any, fields: Sequence[tuple[Array, Any]], pieces: bool):
        self.lanes, self.at, self.frame, self._fields = lanes, at, frame, fields
        self._pieces: list[Any] | None = None
        if pieces:
            self._pieces = [memoryview(array[index].reshape(-1).view(np.uint8)) for array, index in fields]
            stops = list(itertools.accumulate(map(len, self._pieces)))
            self._places = list(zip(self._pieces, [0, *stops], stops, strict=False))

    def parts(self) -> list[Any]:
        """What the slab has, as buffers."""
        if self._pieces is not None:
            return self._pieces
        return [np.ascontiguousarray(array[index]) for array, index in self._fields]

    def fill(self, data: memoryview) -> memoryview:
        """Write what a message has, of which this is the rest from there on, into the slab. Returns what follows."""
        if self._pieces is None:
            for array, index in self._fields:
                data = _put(array, index, data)
            return data
        stop = 0
        for piece, start, stop in self._places:
            piece[:] = data[start:stop]
        return data[stop:]


class Request(NamedTuple):
    """What lanes are asked.

    Attributes:
        number: counts the messages to one host, from 0: they are taken in this order, however they arrive, and once.
        sequences: of the lanes' requests.
        values: to be filled in to the rows.
        commands: what a worker is told beside the slab, (name, ...) each, pickled by value.
    """

    number: int
    rows: WireRows
    sequences: Array
    values: memoryview
    commands: list[bytes]


class WireAnswer(NamedTuple):
    """What lanes have answered.

    Attributes:
        number: that of the request.
        busy_ns: how long the host has had it.
        values: to be filled in to the rows, of which the first are the counters of the whole host.
        mail: messages as a worker's side channel has them, each packed on its own.
    """

    number: int
    busy_ns: int
    rows: WireRows
    values: memoryview
    mail: list[bytes]


class Wire:
    """Packs and unpacks the rows of one pool's lanes.

    Args:
        slab: the one on this side; both sides have the same fields, though not as many lanes.
        worker: the one of the slab whose counters travel; None for those of all workers together.
        shift: by how much the number of a lane is greater in messages than in this slab.
        stats: of that worker, in place of the slab's: to be looked at before others see them.
    """

    def __init__(self, slab: Slab, worker: int | None, shift: int = 0, stats: Array | None = None):
        fields = slab.layout.fields
        self.arrays = {name: slab.array(name) for name in fields}
        self._shift = shift
        obs = ["obs_rows"] if "obs_rows" in fields else [name for name in fields if name.startswith("obs.")]
        self._asked = ["op", *KEPT, *(name for name in fields if name.startswith("action."))]
        self._answered = [*FRAME_FIELDS, *(name for name in ("present",) if name in fields), *obs]
        self._finals = [name for name in fields if name.startswith("final.")]
        self._sums = {name: np.zeros_like(self.arrays[name][:1]) for name in COUNTERS} if worker is None else {}
        self._counters: list[tuple[Array, Any]] = [
            (self._sums.get(name, self.arrays[name]), worker or 0) for name in COUNTERS
        ]
        if stats is not None:
            self._counters[COUNTERS.index("stats")] = stats, ...
        self._known: dict[Any, WireRows] = {}  # views cost more than what is copied

    def request(self, number: int, at: Any, sequences: Array, commands: Sequence[bytes]) -> bytes:
        """What lanes of the slab are asked, as a message; `at` as `run_of` has it."""
        rows = self._asked_rows(at)
        mail = pickle.dumps(list(commands)) if commands else b""
        return b"".join([self._head(REQUEST, number, rows, mail, 0), sequences.tobytes(), *rows.parts(), mail])

    def read_request(self, data: Any) -> Request:
        """What `request` has packed."""
        number, count, at, mail, _, data = self._read_head(data)
        sequences = np.ndarray(count, np.uint64, data)
        return Request(number, self._asked_rows(at), sequences, data[sequences.nbytes :], mail)

    def answer(self, number: int, busy_ns: int, rows: WireRows, mail: Sequence[bytes]) -> bytes:
        """What lanes of the slab have answered, as a message."""
        letters = pickle.dumps(list(mail)) if mail else b""
        if self._sums:
            self._sum_up()
        parts = rows.parts() + [np.ascontiguousarray(self.arrays[name][index]) for name, index in self._finals_of(rows)]
        return b"".join([self._head(ANSWER, number, rows, letters, busy_ns), *parts, letters])

    def read_answer(self, data: Any) -> WireAnswer:
        """What `answer` has packed."""
        number, _, at, mail, busy_ns, values = self._read_head(data)
        return WireAnswer(number, busy_ns, self.answered_rows(at), values, mail)

    def write_answer(self, answer: WireAnswer) -> None:
        """Put it where whoever reads the slab looks for it."""
        data = answer.rows.fill(answer.values)
        for name, index in self._finals_of(answer.rows):
            data = _put(self.arrays[name], index, data)

    def last_rows(self, slot: int, lane: int) -> dict[str, Array]:
        """What a lane has answered in a frame, for a new env that shall repeat it."""
        return {name: self.arrays[name][slot, lane].copy() for name in self._answered}

    def _head(self, kind: bytes, number: int, rows: WireRows, mail: bytes, busy_ns: int) -> bytes:
        run = isinstance(rows.at, slice)
        first = rows.at.start + self._shift if run else SCATTERED
        head = HEAD.pack(kind, number, len(rows.lanes), first, len(mail), busy_ns)
        return head if run else head + (rows.lanes + self._shift).tobytes()

    def _read_head(self, data: Any) -> tuple[int, int, Any, list[bytes], int, memoryview]:
        """(number, how many lanes, an index of theirs, mail, busy_ns, what follows)."""
        _, number, count, first, mail_size, busy_ns = HEAD.unpack_from(data)
        data = memoryview(data)
        mail: list[bytes] = pickle.loads(data[len(data) - mail_size :]) if mail_size else []
        data = data[HEAD.size :]
        if first != SCATTERED:
            return number, count, slice(first - self._shift, first - self._shift + count), mail, busy_ns, data
        lanes = np.ndarray(count, np.int64, data) - self._shift
        return number, count, lanes, mail, busy_ns, data[lanes.nbytes :]

    def _asked_rows(self, at: Any) -> WireRows:
        key = (at.start, at.stop, -1) if isinstance(at, slice) else None
        known = self._known.get(key)
        return known or self._made(key, at, None, [(self.arrays[name], at) for name in self._asked])

    def answered_rows(self, at: Any) -> WireRows:
        """What lanes of the slab have answered; `at` as `run_of` has it."""
        slots = self.arrays["slot"][at].tobytes()
        together = isinstance(at, slice) and slots.count(slots[0]) == len(slots)
        key = (at.start, at.stop, slots[0]) if together else None
        if (known := self._known.get(key)) is not None:
            return known
        lanes = np.arange(at.start, at.stop) if isinstance(at, slice) else at
        frame = (slots[0], at) if together else (self.arrays["slot"][lanes], lanes)
        fields = [*((name, at) for name in ("lane_stats", *KEPT)), *((name, frame) for name in self._answered)]
        return self._made(key, at, frame, self._counters + [(self.arrays[name], index) for name, index in fields])

    def _made(self, key: tuple[int, int, int] | None, at: Any, frame: Any, fields: list[tuple[Array, Any]]) -> WireRows:
        lanes = np.arange(at.start, at.stop) if isinstance(at, slice) else at
        rows = WireRows(lanes, at, frame, fields, pieces=key is not None)
        if key is not None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[key] = rows
        return rows

    def _finals_of(self, rows: WireRows) -> list[tuple[str, Any]]:
        """The fields of last observations, with an index of the rows that have one: their status says so."""
        if not self._finals:
            return []
        ended = (self.arrays["status"][rows.frame] & STATUS_FINAL) != 0
        if not ended.any():
            return []
        lanes = rows.lanes[ended]
        return [(name, (self.arrays["slot"][lanes], lanes)) for name in self._finals]

    def _sum_up(self) -> None:
        """The counters of all workers of a slab together; a host is busy when its workers are, on average."""
        for name, total in self._sums.items():
            self.arrays[name].sum(axis=0, out=total[0])
        self._sums["stats"][0, [counters.STAT_BUSY_NS, counters.STAT_RESET_NS]] //= len(self.arrays["stats"])


def run_of(lanes: Array) -> Any:
    """An index for these lanes, which ascend: a slice where they are neighbours."""
    if len(lanes) and (first := int(lanes[0])) + len(lanes) - 1 == (last := int(lanes[-1])):
        return slice(first, last + 1)
    return lanes


def _put(array: Array, index: Any, data: memoryview) -> memoryview:
    """Write rows from the beginning of a message's rest into an array; what follows."""
    rows = array[index]
    array[index] = np.ndarray(rows.shape, rows.dtype, data)
    return data[rows.nbytes :]

"""The messages between a pool and the hosts of its envs. Each message is one piece of memory.

There are two kinds, and the first byte tells which. A message of rows holds fields of some lanes, one field after the
other, so a batch of one host is one message for any number of envs. It is a request (pool to host) or an answer (host
to pool). Every other message is a pickled tuple ("words"). Both sides derive the fields from the spaces. Neighbouring
lanes are given by the first lane and their number; other lanes are listed in the message.
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
from shoal.memory.slab import FRAME_FIELDS, LANE_FIELDS, Slab
from shoal.native import counters

Array = npt.NDArray[Any]

WORDS, ROWS = b"w", b"r"
# The words with which a host says what it is doing: (this, env or 0, number of its request, ns since it began, stack).
HOST_LIVES = "lives"
COUNTERS = ("stats", "episode_sums", "step_times")  # fields with one row for each worker
# Of `stats`: averaged over a host's workers, not summed.
AVERAGED = [counters.STAT_BUSY_NS, counters.STAT_RESET_NS, counters.STAT_IDLE_NS, counters.STAT_IDLE_SPREAD_NS]
# Fields of a lane that are not copied: each side has its own. `op` is part of a request only, and so are the numbers of
# the requests, which must not be in the host's slab before the rest is.
NOT_COPIED = ("pending", "requested", "answered", "op", "slot", "done_ns")
# What a worker remembers of a lane between requests. It travels both ways, so the pool's slab always has the current
# values, and neither a restored snapshot nor a new host needs them from anywhere else.
KEPT = tuple(name for name in LANE_FIELDS if name not in NOT_COPIED)
# The head of a message of rows: kind, number, number of lanes, first lane, bytes of mail at the end, busy_ns. Its size
# keeps what follows aligned.
HEAD = struct.Struct("<c7x5q")
SCATTERED = -1  # as the first lane: the lanes are not neighbours, and are listed after the head
MAX_KNOWN = 256  # runs of lanes for which views are kept; partial batches can have any number of different runs


def pack_words(*words: Any) -> bytes:
    """Pack a tuple as a message. It is pickled by value, because the other side may not have the caller's script."""
    packed: bytes = cloudpickle.dumps(words)
    return WORDS + packed


def is_words(data: Any) -> bool:
    return bytes(data[:1]) == WORDS


def unpack_words(data: Any) -> tuple[Any, ...]:
    words: tuple[Any, ...] = cloudpickle.loads(memoryview(data)[1:])
    return words


class WireRows:
    """The rows of some lanes in a slab, one field after the other, as a message holds them.

    `at` is an index of the lanes, a slice if they are neighbours; `frame` one of their rows in the frames, None in a
    request, which has no such rows. Each field is an array and the index of the lanes' rows in it. If these rows are
    contiguous, they are copied as bytes.
    """

    def __init__(self, at: Any, frame: Any, fields: Sequence[tuple[Array, Any]], contiguous: bool):
        self.at, self.frame, self._fields = at, frame, fields
        self.lanes: Array = _listed(at)
        self._pieces: list[Any] | None = None
        if contiguous:
            self._pieces = [memoryview(array[index].reshape(-1).view(np.uint8)) for array, index in fields]
            stops = list(itertools.accumulate(map(len, self._pieces)))
            self._places = list(zip(self._pieces, [0, *stops], stops, strict=False))

    def parts(self) -> list[Any]:
        """The rows in the slab, as a list of buffers."""
        return self._pieces or [np.ascontiguousarray(array[index]) for array, index in self._fields]

    def fill(self, data: memoryview) -> memoryview:
        """Copy rows from the beginning of `data` into the slab; return the rest of `data`."""
        if self._pieces is None:
            for array, index in self._fields:
                data = _copy_rows(array, index, data)
            return data
        stop = 0
        for piece, start, stop in self._places:
            piece[:] = data[start:stop]
        return data[stop:]


class RowsMessage(NamedTuple):
    """A request or an answer, as it was read.

    Requests to one host are counted from 0 and are carried out in this order, each once, in whatever order they arrive.
    """

    number: int  # of the request
    busy_ns: int  # in an answer, the time from the arrival of the request to its answer
    rows: WireRows  # where the values belong
    values: memoryview  # to be given to `rows.fill`; those of a request follow the lanes' sequence numbers
    # In a request, commands for the worker, (name, ...) each, pickled by value; in an answer, messages of the worker's
    # side channel, each packed on its own.
    mail: list[bytes]

    def sequences(self) -> Array:
        """In a request: the sequence number of each lane's request."""
        found: Array = np.ndarray(len(self.rows.lanes), np.uint64, self.values)
        return found


class Wire:
    """Packs and unpacks rows of the slab on this side.

    The other side's has the same fields, but may have another number of lanes: `shift` is added to the number of a lane
    here to get its number in messages. The counters of one worker travel, or if None is given, of all workers together.
    `stats` is used in place of the worker's row of that name.
    """

    def __init__(self, slab: Slab, worker: int | None, shift: int = 0, stats: Array | None = None):
        fields = slab.layout.fields
        self.arrays = {name: slab.array(name) for name in fields}
        self._shift = shift
        observation = ["obs_rows"] if "obs_rows" in fields else [name for name in fields if name.startswith("obs.")]
        self._asked = ["op", *KEPT, *(name for name in fields if name.startswith("action."))]
        self._answered = [*FRAME_FIELDS, *(name for name in ("present",) if name in fields), *observation]
        self._finals = [name for name in fields if name.startswith("final.")]
        self._sums = {name: np.zeros_like(self.arrays[name][:1]) for name in COUNTERS} if worker is None else {}
        self._counters: list[tuple[Array, Any]] = [
            (self._sums.get(name, self.arrays[name]), worker or 0) for name in COUNTERS
        ]
        if stats is not None:
            self._counters[COUNTERS.index("stats")] = stats, ...
        self._known: dict[Any, WireRows] = {}  # by run of lanes: making views takes longer than copying the rows

    def request(self, number: int, at: Any, sequences: Array, commands: Sequence[bytes]) -> bytes:
        """Pack a request to lanes; `at` is what `lanes_index` returns for them."""
        rows = self._asked_rows(at)
        return self._packed(number, 0, rows, [sequences.tobytes(), *rows.parts()], commands)

    def read_request(self, data: Any) -> RowsMessage:
        return self._read(data, self._asked_rows)

    def write_request(self, request: RowsMessage) -> None:
        request.rows.fill(request.values[request.sequences().nbytes :])

    def answer(self, number: int, busy_ns: int, rows: WireRows, mail: Sequence[bytes]) -> bytes:
        """Pack the lanes' answer to a request."""
        for name, total in self._sums.items():
            self.arrays[name].sum(axis=0, out=total[0])
        if self._sums:
            self._sums["stats"][0, AVERAGED] //= len(self.arrays["stats"])
        finals = [np.ascontiguousarray(array[index]) for array, index in self._finals_of(rows)]
        return self._packed(number, busy_ns, rows, [*rows.parts(), *finals], mail)

    def read_answer(self, data: Any) -> RowsMessage:
        return self._read(data, self.answered_rows)

    def write_answer(self, answer: RowsMessage) -> None:
        data = answer.rows.fill(answer.values)
        for array, index in self._finals_of(answer.rows):
            data = _copy_rows(array, index, data)

    def last_rows(self, slot: int, lane: int) -> dict[str, Array]:
        """What a lane has answered in a frame. A new env repeats it to end the episode of the old env."""
        return {name: self.arrays[name][slot, lane].copy() for name in self._answered}

    def _packed(self, number: int, busy_ns: int, rows: WireRows, parts: Sequence[Any], mail: Sequence[bytes]) -> bytes:
        run, packed_mail = isinstance(rows.at, slice), pickle.dumps(list(mail)) if mail else b""
        first = rows.at.start + self._shift if run else SCATTERED
        head = HEAD.pack(ROWS, number, len(rows.lanes), first, len(packed_mail), busy_ns)
        lanes = b"" if run else (rows.lanes + self._shift).tobytes()
        return b"".join([head, lanes, *parts, packed_mail])

    def _read(self, data: Any, rows_of: Any) -> RowsMessage:
        """Read a message; `rows_of` finds the rows of its lanes."""
        _, number, count, first, mail_size, busy_ns = HEAD.unpack_from(data)
        data = memoryview(data)
        mail: list[bytes] = pickle.loads(data[len(data) - mail_size :]) if mail_size else []
        data = data[HEAD.size :]
        at: Any = slice(first - self._shift, first - self._shift + count)
        if first == SCATTERED:
            at = np.ndarray(count, np.int64, data) - self._shift
            data = data[at.nbytes :]
        return RowsMessage(number, busy_ns, rows_of(at), data, mail)

    def _asked_rows(self, at: Any) -> WireRows:
        key = (at.start, at.stop, -1) if isinstance(at, slice) else None
        return self._known.get(key) or self._made(key, at, None, [(self.arrays[name], at) for name in self._asked])

    def answered_rows(self, at: Any) -> WireRows:
        """The rows that lanes have answered; `at` is what `lanes_index` returns for them."""
        slots = self.arrays["slot"][at].tobytes()
        together = isinstance(at, slice) and slots.count(slots[0]) == len(slots)
        key = (at.start, at.stop, slots[0]) if together else None
        if (known := self._known.get(key)) is not None:
            return known
        frame = (slots[0], at) if together else (self.arrays["slot"][at].copy(), _listed(at))
        fields = [*((name, at) for name in ("lane_stats", *KEPT)), *((name, frame) for name in self._answered)]
        return self._made(key, at, frame, self._counters + [(self.arrays[name], index) for name, index in fields])

    def _made(self, key: tuple[int, int, int] | None, at: Any, frame: Any, fields: list[tuple[Array, Any]]) -> WireRows:
        rows = WireRows(at, frame, fields, contiguous=key is not None)
        if key is not None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = rows
        return rows

    def _finals_of(self, rows: WireRows) -> list[tuple[Array, Any]]:
        """The arrays of last observations, and the index of the rows that have one; the status of a row says so."""
        if not self._finals:
            return []
        ended = (self.arrays["status"][rows.frame] & STATUS_FINAL) != 0
        if not ended.any():
            return []
        lanes = rows.lanes[ended]
        return [(self.arrays[name], (self.arrays["slot"][lanes], lanes)) for name in self._finals]


def _listed(at: Any) -> Array:
    """The lanes of an index that `lanes_index` has returned."""
    return np.arange(at.start, at.stop) if isinstance(at, slice) else at


def lanes_index(lanes: Array) -> Any:
    """An index of ascending lanes: a slice if they are neighbours, else the lanes themselves."""
    if len(lanes) and (first := int(lanes[0])) + len(lanes) - 1 == (last := int(lanes[-1])):
        return slice(first, last + 1)
    return lanes


def _copy_rows(array: Array, index: Any, data: memoryview) -> memoryview:
    """Copy rows from the beginning of `data` into an array; return the rest of `data`."""
    rows = array[index]
    array[index] = np.ndarray(rows.shape, rows.dtype, data)
    return data[rows.nbytes :]

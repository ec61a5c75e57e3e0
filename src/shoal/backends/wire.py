"""What a pool and a block of envs that lives elsewhere say to each other: whole messages, each one piece of memory.

A message begins with its kind. REQUEST and ANSWER have the rows of some lanes, field after field, so that a batch of a
host is one message however many envs it has; everything else is a pickled tuple. Both sides know the fields from the
spaces, and the rows from the lanes that stand in the message.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import numpy.typing as npt

from shoal.messages import STATUS_FINAL
from shoal.native import counters
from shoal.slab import FRAME_FIELDS, Slab

__all__ = ["ANSWER", "REQUEST", "Answer", "Request", "Wire", "is_words", "pack_words", "unpack_words"]

Array = npt.NDArray[Any]

WORDS, REQUEST, ANSWER = b"w", b"r", b"a"
HOST_LIVES = "lives"  # words of a host that was asked what it is doing: (this, env or 0, ns since when, stack)
COUNTERS = ("stats", "episode_sums", "step_times")  # of a host as a whole
# What a lane's worker keeps from one request to the next. It travels both ways, so that the pool's slab always has all
# there is to know of a lane, and a restored snapshot or a new host need nothing else.
KEPT = {"ended": np.uint8, "run_return": np.float64, "run_length": np.int64}


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


class Request(NamedTuple):
    """What lanes are asked.

    Attributes:
        number: counts the messages to one host, from 0: they are taken in this order, however they arrive.
        sequences: of the lanes' requests; one that the host has seen already is not carried out again.
        kept: the fields of KEPT, a row for each lane; `actions` are those of the slab.
        commands: what a worker is told beside the slab, (name, ...) each, pickled by value.
    """

    number: int
    lanes: Array
    sequences: Array
    ops: Array
    kept: dict[str, Array]
    actions: dict[str, Array]
    commands: list[bytes]


class Answer(NamedTuple):
    """What lanes have answered.

    Attributes:
        number: that of the request.
        busy_ns: how long the host has had it.
        rows: a field of the frame each; `finals` has rows for those lanes only whose status says so.
        lane_stats: a row for each lane; `counters` has those of the whole host.
        mail: messages as a worker's side channel has them, each packed on its own.
    """

    number: int
    busy_ns: int
    lanes: Array
    kept: dict[str, Array]
    rows: dict[str, Array]
    finals: dict[str, Array]
    lane_stats: Array
    counters: dict[str, Array]
    mail: list[bytes]


class Wire:
    """Packs and unpacks the rows of one pool's lanes.

    Args:
        slab: the one on this side; both sides have the same fields, though not as many lanes.
    """

    def __init__(self, slab: Slab):
        fields = slab.layout.fields
        # Made once: views cost more than what is copied.
        self.arrays = {name: slab.array(name) for name in fields}
        self._workers = slab.layout.workers
        one_piece = "obs_rows" in fields
        obs = ["obs_rows"] if one_piece else [name for name in fields if name.startswith("obs.")]
        names = [*FRAME_FIELDS, *(name for name in ("present",) if name in fields), *obs]
        self._kept = {name: (np.dtype(dtype), ()) for name, dtype in KEPT.items()}
        self._actions = {n: (f.dtype, f.shape[1:]) for n, f in fields.items() if n.startswith("action.")}
        self.rows = {name: (fields[name].dtype, fields[name].shape[2:]) for name in names}
        self._finals = {n: (f.dtype, f.shape[2:]) for n, f in fields.items() if n.startswith("final.")}
        self._counters = {name: (fields[name].dtype, fields[name].shape[1:]) for name in COUNTERS}

    def request(self, number: int, lanes: Array, sequences: Array, commands: Sequence[bytes]) -> bytes:
        """What these lanes of the slab are asked, as a message."""
        at = run_of(lanes)
        mail = pickle.dumps(list(commands)) if commands else b""
        return _joined(REQUEST, (number, len(lanes), len(mail)), [
            lanes, sequences, self.arrays["op"][at],
            *(self.arrays[name][at] for name in (*self._kept, *self._actions)),
            mail,
        ])  # fmt: skip

    def read_request(self, data: Any) -> Request:
        """What `request` has packed."""
        reader = _Reader(data, 3)
        number, count, mail_size = reader.numbers
        lanes, sequences = reader.take(np.int64, count), reader.take(np.uint64, count)
        ops = reader.take(np.uint8, count)
        kept, actions = reader.take_all(self._kept, count), reader.take_all(self._actions, count)
        mail: list[bytes] = pickle.loads(reader.rest(mail_size)) if mail_size else []
        return Request(number, lanes, sequences, ops, kept, actions, mail)

    def answer(self, number: int, busy_ns: int, lanes: Array, mail: Sequence[bytes], shift: int) -> bytes:
        """What these lanes of the slab have answered, as a message; `shift` is added to their numbers."""
        arrays, at = self.arrays, run_of(lanes)
        slots, frame_at = self.frame_of(lanes, at)
        ended = (arrays["status"][frame_at] & STATUS_FINAL) != 0 if self._finals else np.zeros(0, np.bool_)
        finals = [arrays[name][slots[ended], lanes[ended]] for name in self._finals] if ended.any() else []
        letters = pickle.dumps(list(mail)) if mail else b""
        return _joined(ANSWER, (number, len(lanes), len(letters), busy_ns), [
            lanes + shift, *(arrays[name][at] for name in self._kept), *(arrays[name][frame_at] for name in self.rows),
            *finals, arrays["lane_stats"][at], *(self._summed(name) for name in COUNTERS),
            letters,
        ])  # fmt: skip

    def read_answer(self, data: Any) -> Answer:
        """What `answer` has packed."""
        reader = _Reader(data, 4)
        number, count, mail_size, busy_ns = reader.numbers
        lanes = reader.take(np.int64, count)
        kept, rows = reader.take_all(self._kept, count), reader.take_all(self.rows, count)
        ended = int(np.count_nonzero(rows["status"] & STATUS_FINAL)) if self._finals else 0
        finals = reader.take_all(self._finals, ended) if ended else {}
        lane_stats = reader.take(np.int64, count, (counters.LANE_STATS,))
        sums = {name: reader.take(dtype, 1, shape)[0] for name, (dtype, shape) in self._counters.items()}
        mail = pickle.loads(reader.rest(mail_size)) if mail_size else []
        return Answer(number, busy_ns, lanes, kept, rows, finals, lane_stats, sums, mail)

    def write_answer(self, answer: Answer) -> None:
        """Put it where whoever reads the slab looks for it."""
        arrays, lanes = self.arrays, answer.lanes
        at = run_of(lanes)
        slots, frame_at = self.frame_of(lanes, at)
        for name, values in answer.kept.items():
            arrays[name][at] = values
        for name, values in answer.rows.items():
            arrays[name][frame_at] = values
        if answer.finals:
            ended = (answer.rows["status"] & STATUS_FINAL) != 0
            for name, values in answer.finals.items():
                arrays[name][slots[ended], lanes[ended]] = values

    def frame_of(self, lanes: Array, at: Any) -> tuple[Array, Any]:
        """The slots of these lanes, and an index of their rows in the frames."""
        slots = self.arrays["slot"][at]
        return slots, (int(slots[0]), at) if len(lanes) and (slots == slots[0]).all() else (slots, lanes)

    def last_rows(self, slot: int, lane: int) -> dict[str, Array]:
        """What a lane has answered in a frame, for a new env that shall repeat it."""
        return {name: self.arrays[name][slot, lane].copy() for name in self.rows}

    def _summed(self, name: str) -> Array:
        """The counters of all workers of a slab together; a host is busy when its workers are, on average."""
        if self._workers == 1:
            return self.arrays[name][0]  # type: ignore[no-any-return]
        found: Array = self.arrays[name].sum(axis=0)
        if name == "stats":
            found[[counters.STAT_BUSY_NS, counters.STAT_RESET_NS]] //= self._workers
        return found


def run_of(lanes: Array) -> Any:
    """An index for these lanes, which ascend: a slice where they are neighbours."""
    if len(lanes) and (first := int(lanes[0])) + len(lanes) - 1 == (last := int(lanes[-1])):
        return slice(first, last + 1)
    return lanes


def _joined(kind: bytes, numbers: Sequence[int], parts: Sequence[Any]) -> bytes:
    head = kind + np.array(numbers, np.int64).tobytes()
    pieces: list[Any] = [part if isinstance(part, bytes) else np.ascontiguousarray(part) for part in parts]
    return b"".join([head, *pieces])


class _Reader:
    """Takes a message apart from its beginning; arrays are views of it."""

    def __init__(self, data: Any, numbers: int):
        self._data, self._at = data, 1
        self.numbers: list[int] = self.take(np.int64, numbers).tolist()

    def take(self, dtype: Any, count: int, shape: tuple[int, ...] = ()) -> Array:
        found: Array = np.ndarray((count, *shape), dtype, self._data, self._at)
        self._at += found.nbytes
        return found

    def take_all(self, fields: Mapping[str, tuple[Any, tuple[int, ...]]], count: int) -> dict[str, Array]:
        return {name: self.take(dtype, count, shape) for name, (dtype, shape) in fields.items()}

    def rest(self, size: int) -> Any:
        return memoryview(self._data)[self._at : self._at + size]

"""How messages of a worker process are pickled, so that a value which cannot be pickled costs only its own env.

Most messages hold nothing but Python's and numpy's own types: one pickle, and done. Where another class turns up, it
may refuse to be pickled, or pickle well and refuse to be loaded by the caller; there every value travels sealed on its
own, and one that does not arrive becomes an error of its env, which says what it was.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle

from shoal.memory.messages import Note, Reply
from shoal.memory.packed_errors import PackedError, dumps, pack_error

_TRUSTED = ("numpy", "shoal")


class _Watchful(pickle.Pickler):
    """Notices classes that are neither Python's own containers and numbers nor numpy's."""

    foreign = False

    def reducer_override(self, value: Any) -> Any:
        # Called by pickle for everything but the plainest types.
        module = getattr(value, "__module__", None) or type(value).__module__
        if str(module).partition(".")[0] not in _TRUSTED:
            self.foreign = True
        return NotImplemented


class _Sealed(NamedTuple):
    """A value that was pickled on its own."""

    kind: str
    content: bytes


class _Careful(NamedTuple):
    """A message with sealed values."""

    message: Any


def pack(message: Any) -> bytes:
    """Pickle a Reply, a list of Notes or anything of Shoal's own."""
    buffer = io.BytesIO()
    pickler = _Watchful(buffer, pickle.HIGHEST_PROTOCOL)
    with contextlib.suppress(Exception):  # something refuses: what it is turns out below
        pickler.dump(message)
        if not pickler.foreign:
            return buffer.getvalue()
    if isinstance(message, Reply):
        return dumps(_Careful(Reply(message.ticket, [_seal(value, "its result") for value in message.values])))
    return dumps(_Careful([(note.lane, note.sequence, _seal_note(note)) for note in message]))


def unpack(data: bytes) -> Any:
    """Load what `pack` has pickled."""
    message = cloudpickle.loads(data)
    if not isinstance(message, _Careful):
        return message
    inner = message.message
    if isinstance(inner, Reply):
        return Reply(inner.ticket, [_open(value, "its result") for value in inner.values])
    return [_open_note(*parts) for parts in inner]


def _seal_note(note: Note) -> bytes:
    try:
        return dumps(_each_part(note, _seal))
    except Exception as error:  # a key of its info
        return dumps(Note(note.lane, note.sequence, {}, [], _refused("its info", "dict", error)))


def _open_note(lane: int, sequence: int, data: bytes) -> Note:
    try:
        return _each_part(cloudpickle.loads(data), _open)
    except Exception as error:
        return Note(lane, sequence, {}, [], _refused("its info", "dict", error))


def _each_part(note: Note, change: Callable[[Any, str], Any]) -> Note:
    info = {key: change(value, f"info[{key!r}]") for key, value in note.info.items()}
    objects = [change(value, "its observation") for value in note.objects]
    for value in [*info.values(), *objects]:
        if isinstance(value, PackedError):
            return Note(note.lane, note.sequence, {}, [], value)
    return Note(note.lane, note.sequence, info, objects, note.error)


def _seal(value: Any, what: str) -> Any:
    if isinstance(value, PackedError):
        return value
    kind = type(value).__name__
    try:
        return _Sealed(kind, dumps(value))
    except Exception as error:
        return _refused(what, kind, error)


def _open(value: Any, what: str) -> Any:
    if isinstance(value, PackedError):
        return value
    try:
        return cloudpickle.loads(value.content)
    except Exception as error:
        return _refused(what, value.kind, error)


def _refused(what: str, kind: str, error: Exception) -> PackedError:
    wrapped = TypeError(f"{what}, a {kind}, cannot be sent to the caller: {type(error).__name__}: {error}")
    return pack_error(wrapped, f"sending {what}")

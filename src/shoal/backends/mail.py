"""How messages to and from worker processes are pickled, so that a value which does not arrive costs only its own env.

Most messages of a worker hold nothing but Python's and numpy's own types: one pickle, and done. Where another class
turns up, it may refuse to be pickled, or pickle well and refuse to be loaded by the caller; there every value travels
sealed on its own, and one that does not arrive becomes an error of its env, which says what it was. A command of the
caller is two pickles: whom it concerns, which always loads, and what it says.
"""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import cloudpickle

from shoal.errors import BadCall, BadEnv
from shoal.memory.messages import BlockSummary, Lost, Note, Reply
from shoal.memory.packed_errors import PackedError, dumps, loads, pack_error
from shoal.support.foreign_code import guarded
from shoal.worker.building import BuildError

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


class _SealedSummary(NamedTuple):
    """What a worker tells of its envs, of which `env_id` is the first."""

    env_id: int
    content: bytes


def pack(message: Any) -> bytes:
    """Pickle a Reply, a list of Notes or anything of Shoal's own."""
    buffer = io.BytesIO()
    pickler = _Watchful(buffer, pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(message)
        if not pickler.foreign:
            return buffer.getvalue()
    except BaseException:  # something refuses: what it is turns out below. Ctrl-C does not come to a worker.
        pass
    if isinstance(message, Reply):
        return dumps(_Careful(Reply(message.ticket, [_seal(value, "its result") for value in message.values])))
    return dumps(_Careful([(note.lane, note.sequence, _seal_note(note)) for note in message]))


def unpack(data: bytes) -> Any:
    """Load what `pack` or `pack_summary` has pickled."""
    message = cloudpickle.loads(data)
    if isinstance(message, _SealedSummary):
        return _open_summary(message)
    if not isinstance(message, _Careful):
        return message
    inner = message.message
    if isinstance(inner, Reply):
        return Reply(inner.ticket, [_open(value, "its result") for value in inner.values])
    return [_open_note(*parts) for parts in inner]


# ---- the start -----------------------------------------------------------------------------------------------


def dumps_summary(summary: BlockSummary) -> bytes:
    """Pickle what a worker tells about its envs."""
    try:
        return dumps(summary)
    except Exception:
        # Specs and metadata may hold anything; the spaces are what is needed.
        return dumps(replace(summary, metadata={}, spec=None))


def pack_summary(summary: BlockSummary, env_id: int) -> bytes:
    """Pickle it so that `unpack` gives a BuildError where the spaces do not arrive; `env_id` is the first env."""
    try:
        return dumps(_SealedSummary(env_id, dumps_summary(summary)))
    except Exception as error:
        return dumps(bad_spaces(env_id, error))


def _open_summary(sealed: _SealedSummary) -> Any:
    try:
        return loads(sealed.content)
    except Exception as error:
        return bad_spaces(sealed.env_id, error)


def bad_spaces(env_id: int, error: Exception) -> BuildError:
    """What is said where the spaces of an env cannot be pickled, or loaded by the other side."""
    wrapped = BadEnv(
        f"its spaces cannot be sent between processes: {_described(error)}; make spaces that can be pickled, or use "
        'backend="serial" or "threads"'
    )
    return BuildError(env_id, pack_error(wrapped, "sending its spaces"))


# ---- commands ------------------------------------------------------------------------------------------------


def pack_command(message: Sequence[Any]) -> bytes:
    """Pickle a command of the caller. Raises BadCall if something in it cannot be pickled."""
    try:
        content: bytes = guarded(cloudpickle.dumps, tuple(message))
    except Exception as error:
        raise BadCall(
            f"{_named(message)}: what it is given cannot be sent to a worker process: {_described(error)}; pass what "
            'can be pickled, or use backend="serial" or "threads"'
        ) from error
    return pickle.dumps((_named(message), *_concerned(message)), pickle.HIGHEST_PROTOCOL) + content


def unpack_command(data: bytes) -> tuple[Any, ...]:
    """Load a command. One that does not load becomes the command "lost", which says whom it concerned, and why."""
    buffer = io.BytesIO(data)
    name, ticket, lanes = pickle.load(buffer)
    try:
        return tuple(guarded(pickle.load, buffer))
    except Exception as error:
        wrapped = BadCall(
            f"{name}: what it is given cannot be loaded in the worker process: {_described(error)}; pass what can be "
            'loaded there, or use backend="serial" or "threads"'
        )
        return ("lost", Lost(ticket, lanes, wrapped))


def _named(message: Sequence[Any]) -> str:
    """What a command is called in words: its method for a call."""
    name = message[0]
    return f"{name} of {message[3]!r}" if name in ("call", "set") else str(name)


def _concerned(message: Sequence[Any]) -> tuple[int | None, list[int]]:
    """The ticket of a command, None if it is not replied to, and its lanes."""
    name, *rest = message
    if name in ("reset", "restart"):
        return None, [int(one[0]) for one in rest[0]]
    if name == "actions":
        return None, list(rest[0])
    return (rest[0], list(rest[1])) if rest else (None, [])


# ---- sealed values -------------------------------------------------------------------------------------------


def _seal_note(note: Note) -> bytes:
    try:
        return dumps(_each_part(note, _seal))
    except Exception as error:  # a key of its info
        return dumps(Note(note.lane, note.sequence, {}, [], _refused("its info", "dict", error)))


def _open_note(lane: int, sequence: int, data: bytes) -> Note:
    try:
        return _each_part(loads(data), _open)
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
        return loads(value.content)
    except Exception as error:
        return _refused(what, value.kind, error)


def _refused(what: str, kind: str, error: Exception) -> PackedError:
    wrapped = TypeError(f"{what}, a {kind}, cannot be sent to the caller: {_described(error)}")
    return pack_error(wrapped, f"sending {what}")


def _described(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).strip()

"""What workers send: everything that arrives arrives as it was, and what cannot is an error of its own env."""

from __future__ import annotations

import collections
import datetime
import io
import pickle
import threading
from typing import Any

import numpy as np
import pytest

from shoal.backends.mail import _Watchful, pack, unpack
from shoal.memory.messages import Note, Reply
from shoal.memory.packed_errors import PackedError, pack_error


class Grump:
    """Pickles, and refuses to be loaded."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise RuntimeError("not at home here")


PLAIN: list[Any] = [
    {},
    {"a": 1, "b": 2.5, "c": None, "d": "text", "e": b"bytes", "f": True},
    {"array": np.arange(6).reshape(2, 3), "number": np.float32(2), "flag": np.bool_(True)},
    {"deep": [{"x": (1, [2, {3}])}]},
]
FOREIGN: list[Any] = [
    {"when": datetime.date(2020, 2, 2)},
    {"counts": collections.Counter("abca"), "n": 1},
    {"objects": np.array([datetime.date(2020, 2, 2), 3], dtype=object)},
    {"function": len, "kind": int},
    {"local": (lambda: 5)()},
]


def same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)


@pytest.mark.parametrize("info", [*PLAIN, *FOREIGN], ids=repr)
def test_notes_and_replies_arrive_as_they_were(info: dict[str, Any]) -> None:
    notes = [Note(3, 7, info, [info], None), Note(4, 8, {}, [], None)]
    arrived = unpack(pack(notes))
    assert all(isinstance(note, Note) for note in arrived)
    assert same(arrived, notes)
    reply = unpack(pack(Reply(12, [info, None, 5])))
    assert isinstance(reply, Reply)
    assert same(reply, Reply(12, [info, None, 5]))


@pytest.mark.parametrize("info", PLAIN, ids=repr)
def test_what_is_plain_is_pickled_once(info: dict[str, Any]) -> None:
    assert pack([Note(0, 1, info, [], None)]) == pickle.dumps([Note(0, 1, info, [], None)], pickle.HIGHEST_PROTOCOL)


@pytest.mark.parametrize(("thing", "why"), [(threading.Lock(), "pickle"), (Grump(), "not at home")])
def test_what_cannot_be_sent_costs_its_own_env_only(thing: Any, why: str) -> None:
    good, bad = Note(0, 1, {"fine": 1}, [], None), Note(1, 1, {"fine": 1, "thing": thing}, [], None)
    first, second = unpack(pack([good, bad]))
    assert first == good
    assert isinstance(second.error, PackedError)
    assert (second.lane, second.sequence, second.info, second.objects) == (1, 1, {}, [])
    assert f"info['thing'], a {type(thing).__name__}, cannot be sent" in second.error.summary
    assert why in second.error.summary
    values = unpack(pack(Reply(5, [1, thing, 3]))).values
    assert (values[0], values[2]) == (1, 3)
    assert "its result" in values[1].summary
    [observed] = unpack(pack([Note(2, 1, {}, [thing], None)]))
    assert "its observation" in observed.error.summary


def test_errors_travel_beside_values_that_need_care() -> None:
    error = pack_error(ValueError("bad joint"), "step")
    notes = [Note(0, 1, {}, [], error), Note(1, 1, {"thing": Grump()}, [], None)]
    assert unpack(pack(notes))[0].error == error
    assert unpack(pack(Reply(5, [error, Grump()]))).values[0] == error
    assert unpack(pack(("closed", [(0, error)]))) == ("closed", [(0, error)])


class ShyKey:
    """A key that refuses to be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("no pickling")


class GrumpyKey(Grump):
    """A key that refuses to be loaded."""


@pytest.mark.parametrize("key", [ShyKey(), GrumpyKey()], ids=["pickling", "loading"])
def test_a_key_that_cannot_be_sent_costs_its_own_env_only(key: Any) -> None:
    good, bad = Note(0, 1, {"fine": 1}, [], None), Note(1, 1, {key: 1}, [], None)
    first, second = unpack(pack([good, bad]))
    assert first == good
    assert (second.lane, second.sequence, second.info) == (1, 1, {})
    assert "its info, a dict, cannot be sent" in second.error.summary


def test_the_watchful_pickler_knows_a_stranger() -> None:
    for infos, foreign in ((PLAIN, False), (FOREIGN[:4], True)):
        for info in infos:
            pickler = _Watchful(io.BytesIO(), pickle.HIGHEST_PROTOCOL)
            pickler.dump(info)
            assert pickler.foreign is foreign, info

"""Messages are pickled whatever is in them, if it can be; errors always arrive in some form."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest

from shoal.memory.packed_errors import PackedError, dumps, pack_error


class HasLock:
    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize("message", [None, 5, "x", {"a": [1, (2, 3)]}, b"raw"], ids=repr)
def test_plain_messages(message: Any) -> None:
    assert pickle.loads(dumps(message)) == message


def test_what_pickle_cannot_do_cloudpickle_may() -> None:
    class Local:
        value = 5

    assert pickle.loads(dumps(lambda x: x + 1))(1) == 2
    assert pickle.loads(dumps(Local())).value == 5


def test_what_nobody_can_pickle_is_refused() -> None:
    with pytest.raises(TypeError):
        dumps(HasLock())


def test_the_traceback_is_formatted_where_it_was_caught() -> None:
    def deep() -> None:
        raise ValueError("bad joint")

    try:
        deep()
    except ValueError as error:
        packed = pack_error(error, "reset")
    assert packed.summary == "ValueError: bad joint"
    assert "in deep" in packed.traceback
    assert packed.during == "reset"
    error = packed.unpack(2, 0)
    assert "env 2 raised in reset (worker 0): ValueError: bad joint" in str(error)
    assert error.remote_traceback == packed.traceback


def test_an_error_that_holds_what_cannot_be_pickled() -> None:
    error = ValueError("held", HasLock())
    packed = pack_error(error, "step")
    assert packed.exception is None
    found = pickle.loads(pickle.dumps(packed)).unpack(0, 0)
    assert isinstance(found, ValueError)
    assert found.original is None


def test_bytes_that_do_not_load_cost_the_original_only() -> None:
    found = PackedError(b"nonsense", b"nonsense", "Odd: x", "Traceback ...", "step").unpack(1, 2)
    assert str(found) == "env 1 raised in step (worker 2): Odd: x\n\nTraceback ..."
    assert found.original is None


def test_a_multi_line_message_is_kept() -> None:
    assert "first\nsecond" in str(pack_error(ValueError("first\nsecond"), "step").unpack(0, 0))

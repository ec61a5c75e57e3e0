"""The core's send and recv, on the C core and its twin: which lanes are taken, in which order, and what is refused."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from native.rig import Rig, ids
from shoal.errors import BadAction
from shoal.native import MIXED_SLOTS
from shoal.native.layout import COLLECT_ALARM, COLLECT_TIMEOUT, NOT_TAKEN, OP_RESET, OP_STEP, POST_OK
from shoal.spaces.leaves import read_actions

pytestmark = pytest.mark.timeout(60)


def ready_rig(kind: str, **options: Any) -> Rig:
    rig = Rig(kind, **options)
    rig.use_action()
    return rig


def recv(rig: Rig, need: int, run: Any = None, patience_ns: int = 0) -> tuple[int, list[int]]:
    """What recv says, and the ids that it wrote. By default it does not wait."""
    out = np.full(need, -1, np.int64)
    code = rig.lanes.recv(need, None if need == rig.lane_count else out, run, 0, patience_ns)
    return code, out.tolist()


def everything(rig: Rig) -> list[Any]:
    return [rig.snapshot(), rig.array("action.0").tolist(), rig.array("pending").tolist()]


# ---- send ----------------------------------------------------------------------------------------------------


def test_send_writes_the_actions_of_its_lanes_and_asks_them(kind: str) -> None:
    rig = ready_rig(kind, lanes=4, frames=3)
    assert rig.lanes.send(np.array([7, 9]), ids(3, 1)) == POST_OK
    assert rig.array("action.0").tolist() == [0, 9, 0, 7]
    assert rig.state.tolist() == [0, 1, 0, 1]
    assert rig.array("requested").tolist() == [0, 1, 0, 1]
    assert rig.array("slot").tolist() == [0, 1, 0, 1]
    assert rig.lanes.send(np.array([5, 6]), ids(0, 2)) == POST_OK
    assert rig.block.run() == 4
    assert rig.array("obs.0")[1, :, 0].tolist() == [5, 9, 6, 7]


def test_send_to_all(kind: str) -> None:
    rig = ready_rig(kind, lanes=3, workers=3)
    rig.array("op")[:] = OP_RESET
    assert rig.lanes.send([1, 2, 3], None) == POST_OK
    assert rig.array("op").tolist() == [OP_STEP] * 3
    assert [block.wait(0, 0) for block in rig.blocks] == [True] * 3
    assert [block.run() for block in rig.blocks] == [1, 1, 1]


@pytest.mark.parametrize(
    ("actions", "lanes"),
    [
        ([1], ids(2)),  # which is busy
        ([1, 1], ids(0, 2)),
        ([1] * 4, None),
        ([1, 1], ids(0, 0)),
        ([1], ids(4)),
        ([1], ids(-1)),
        ([1] * 5, ids(0, 1, 3, 0, 1)),
        ([], ids()),
        ([1], np.array([0], np.int32)),
        ([1], np.array([0], ">i8")),
        ([1], np.array([0], np.uint64)),
        ([1], np.array([0.0])),
        ([1], np.array([[0]])),
        ([1], [0]),
        ([1], 0),
        ([1], b"\0" * 8),
        ([1], ids(0, 1)),
        ([1, 2], ids(0)),
        (np.array([1, 2, 3, 4]), ids(0, 1)),  # as many as all lanes
        ([100], ids(0)),
        ([1, -1], ids(0, 1)),
        ([0.5], ids(0)),
        (None, ids(0)),
    ],
    ids=repr,
)
def test_a_send_that_needs_a_second_look_touches_nothing(kind: str, actions: Any, lanes: Any) -> None:
    rig = ready_rig(kind, lanes=4, workers=2)
    rig.lanes.use_order(np.zeros(5, np.int64))
    assert rig.lanes.send([3], ids(2)) == POST_OK
    before = everything(rig)
    assert rig.lanes.send(actions, lanes) == NOT_TAKEN
    assert everything(rig) == before
    assert rig.lanes.send([1, 2, 3], ids(3, 0, 1)) == POST_OK  # no lane is still marked


def test_without_an_array_of_actions_nothing_is_taken(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    before = everything(rig)
    assert rig.lanes.send(np.array([1, 2]), None) == NOT_TAKEN
    assert everything(rig) == before


@pytest.mark.parametrize(
    ("lanes", "whole"),
    [
        ((0, 1), True), ((2,), True), ((3, 4, 5), True), ((3, 4, 5, 0, 1), True), ((2, 0, 1), True),
        ((0,), False), ((1,), False), ((1, 0), False), ((0, 1, 3), False), ((3, 5, 4), False), ((4, 5), False),
        ((0, 2, 1), False), ((3, 4, 2, 5), False), ((0, 1, 2, 3, 4), False),
    ],
)  # fmt: skip
def test_lanes_of_one_env_are_sent_to_together(kind: str, lanes: tuple[int, ...], whole: bool) -> None:
    rig = ready_rig(kind, lanes=6, leader=np.array([1, 1, 2, 5, 5, 5]))
    assert (rig.lanes.send(np.zeros(len(lanes), int), ids(*lanes)) == POST_OK) == whole


def test_send_takes_what_another_thread_must_not(kind: str) -> None:
    rig = ready_rig(kind, lanes=2)
    with rig.lanes:
        before = everything(rig)
        assert rig.lanes.send([1, 2], None) < 0
        assert recv(rig, 2)[0] < 0
        assert everything(rig) == before


# ---- recv ----------------------------------------------------------------------------------------------------


def test_recv_takes_the_first_done_ascending(kind: str) -> None:
    rig = ready_rig(kind, lanes=5)
    rig.lanes.send(np.zeros(5, int), None)
    for lane, at_ns in enumerate((50, 10, 40, 10, 20)):
        rig.answer(lane, at_ns=at_ns, status=lane)
    assert recv(rig, 3) == (MIXED_SLOTS | 7 << 8 | 1 << 16, [1, 3, 4])  # status 1 | 3 | 4
    assert rig.state.tolist() == [1, 0, 1, 0, 0]
    assert recv(rig, 2) == (MIXED_SLOTS | 2 << 8, [0, 2])
    assert not rig.state.any()


def test_recv_says_where_one_run_in_one_frame_is(kind: str) -> None:
    rig = ready_rig(kind, lanes=4, frames=3)
    rig.lanes.send(np.zeros(4, int), None)
    rig.answer(1, 2)
    assert recv(rig, 2) == (1 | 1 << 16, [1, 2])
    rig.answer(0, 3)
    assert recv(rig, 2) == (MIXED_SLOTS, [0, 3])
    rig.lanes.send(np.zeros(1, int), ids(1))
    rig.answer(1)
    recv(rig, 1)
    rig.lanes.send(np.zeros(2, int), ids(1, 2))
    rig.answer(1, 2)
    assert recv(rig, 2) == (MIXED_SLOTS | 1 << 16, [1, 2])  # neighbours in two frames


def test_recv_of_all_needs_no_room(kind: str) -> None:
    rig = ready_rig(kind, lanes=3)
    rig.lanes.send([4, 5, 6], None)
    assert rig.lanes.recv(3, None, rig.block.run, 0, -1) == 1
    assert rig.array("obs.0")[1, :, 0].tolist() == [4, 5, 6]
    assert not rig.state.any()


def test_recv_of_what_was_not_sent_touches_nothing(kind: str) -> None:
    rig = ready_rig(kind, lanes=4, window=2)
    rig.lanes.send([1, 1], ids(1, 2))
    rig.answer(1, 2)
    before = everything(rig)
    assert recv(rig, 2)[0] == NOT_TAKEN  # no whole window
    assert recv(rig, 3)[0] == NOT_TAKEN
    assert recv(rig, 4)[0] == NOT_TAKEN
    assert everything(rig) == before


def test_recv_takes_the_window_that_was_whole_first(kind: str) -> None:
    rig = ready_rig(kind, lanes=6, window=2)
    rig.lanes.send(np.zeros(6, int), None)
    for lane, at_ns in enumerate((1, 50, 30, 30, 10, 40)):
        rig.answer(lane, at_ns=at_ns)
    assert [recv(rig, 2) for _ in range(3)] == [
        (1 | 2 << 16, [2, 3]),
        (1 | 4 << 16, [4, 5]),
        (1, [0, 1]),
    ]


def test_recv_in_the_order_of_sends(kind: str) -> None:
    rig = ready_rig(kind, lanes=5)
    sent_at = np.zeros(6, np.int64)
    rig.lanes.use_order(sent_at)
    rig.lanes.send([0, 0], ids(4, 2))
    rig.lanes.send([0, 0, 0], ids(0, 3, 1))
    assert sent_at.tolist() == [2, 4, 1, 3, 0, 5]
    rig.answer(0, 1, 3, 4)
    assert recv(rig, 2)[0] == COLLECT_TIMEOUT  # lane 2 is first, and not done
    assert recv(rig, 1)[1] == [4]
    rig.answer(2)
    assert recv(rig, 2)[1] == [0, 2]
    rig.lanes.send([0], ids(4))
    rig.answer(4)
    assert recv(rig, 2)[1] == [1, 3]
    assert recv(rig, 1)[1] == [4]


@pytest.mark.parametrize("fifo", [False, True])
def test_recv_takes_the_first_of_many(kind: str, fifo: bool) -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        count = int(rng.integers(2, 90))
        need = int(rng.integers(1, count + 1))
        rig = ready_rig(kind, lanes=count)
        if fifo:
            rig.lanes.use_order(np.zeros(count + 1, np.int64))
        sends = rng.permutation(count)
        rig.lanes.send(np.zeros(count, int), sends)
        times = rng.integers(0, rng.choice([1, 5, 10**6]) + 1, count)  # with many that are equal, or few
        if rng.random() < 0.3:
            times.sort()
        for lane, at_ns in enumerate(times.tolist()):
            rig.answer(lane, at_ns=at_ns)
        rank = np.argsort(sends) if fifo else times
        expected = sorted(np.lexsort((np.arange(count), rank))[:need].tolist())
        code, found = recv(rig, need)
        assert code >= 0
        assert found == expected or need == count
        assert rig.state.sum() == count - need


def test_recv_ends_with_an_alarm_or_its_patience(kind: str) -> None:
    rig = ready_rig(kind, lanes=2)
    rig.lanes.send([1, 2], None)
    assert recv(rig, 1)[0] == COLLECT_TIMEOUT
    assert recv(rig, 1, patience_ns=2_000_000)[0] == COLLECT_TIMEOUT
    rig.lanes.alarm()
    assert recv(rig, 1, patience_ns=-1)[0] == COLLECT_ALARM
    rig.lanes.heard()
    assert recv(rig, 2, rig.block.run)[0] == 1


def test_what_the_callers_own_block_raises_leaves_all_pending(kind: str) -> None:
    rig = ready_rig(kind, lanes=3)
    rig.lanes.send([1, 2, 3], None)
    rig.results[1] = KeyboardInterrupt()
    rig.raising["failed"] = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        recv(rig, 2, rig.block.run)
    assert rig.state.all()
    rig.results.clear()
    rig.raising.clear()
    assert recv(rig, 3, rig.block.run)[0] >= 0


def test_wrong_arguments_are_refused() -> None:
    try:
        rig = ready_rig("native", lanes=3)
    except ImportError as error:
        pytest.skip(f"the C extension was not built here ({error})")
    for wrong in (0, 4, -1):
        with pytest.raises(ValueError, match="need"):
            rig.lanes.recv(wrong, None, None, 0, 0)
    for room in (None, np.zeros(1, np.int64), np.zeros(3, np.int64)):
        with pytest.raises(ValueError, match="room"):
            rig.lanes.recv(2, room, None, 0, 0)
    for call in (rig.lanes.send, rig.lanes.recv, rig.lanes.step):
        with pytest.raises(TypeError):
            call(1)
    with pytest.raises(ValueError, match="one more"):
        rig.lanes.use_order(np.zeros(3, np.int64))
    rig.lanes.use_order(np.zeros(4, np.int64))
    with pytest.raises(RuntimeError):
        rig.lanes.use_order(np.zeros(4, np.int64))


# ---- actions of any type -------------------------------------------------------------------------------------

INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
FLOATS = ["f2", "f4", "f8"]
SPACES: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(5, start=-1),
    "many discrete": spaces.MultiDiscrete([3, 300]),
    "binary": spaces.MultiBinary(3),
    "box of no axis": spaces.Box(-2, 2, (), np.float32),
    "box": spaces.Box(-2, 2, (2, 3), np.float32),
    "wide box": spaces.Box(-2, 2, (2,), np.float64),
    "small box": spaces.Box(-2, 2, (2,), np.float16),
    "unbounded box": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "bytes": spaces.Box(0, 255, (2,), np.uint8),
    "words": spaces.Box(-(2**15), 2**15 - 1, (2,), np.int16),
    "unsigned": spaces.Box(0, 2**64 - 1, (2,), np.uint64),
    "flags": spaces.Box(0, 1, (2,), np.bool_),
}  # fmt: skip


def samples(shape: tuple[int, ...], dtype: str) -> list[Any]:
    """Arrays of this type: small ones, the ends of the type, and what is not a number."""
    rng = np.random.default_rng(1)
    kind = np.dtype(dtype).kind
    if kind == "b":
        return [rng.integers(0, 2, shape).astype(bool)]
    values: list[Any] = [0, 1, 2, 3, 200, 299, 300]
    values += [-1, -2, -3] if kind != "u" else []
    if kind == "f":
        values += [0.1, -1.9999, 6e-8, 2.0001, np.inf, -np.inf, np.nan] + (
            [1e39, -1e300, 1e-42] if dtype == "f8" else []
        )
    else:
        values += [np.iinfo(dtype).min, np.iinfo(dtype).max]
    fitting = [value for value in values if kind == "f" or np.iinfo(dtype).min <= value <= np.iinfo(dtype).max]
    found = [np.full(shape, value, dtype) for value in fitting]
    found += [np.array(rng.integers(0, 2, shape), dtype) for _ in range(2)]
    found.append(np.resize(np.array(fitting, dtype), shape))
    return found


def layouts(array: Any) -> dict[str, Any]:
    """The same numbers, lying otherwise."""
    wide = np.zeros((*array.shape[:-1], array.shape[-1] * 3), array.dtype)
    wide[..., ::3] = array
    unaligned = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    unaligned[...] = array
    frozen = array.copy()
    frozen.flags.writeable = False
    return {
        "plain": array, "strided": wide[..., ::3], "backwards": array[::-1].copy()[::-1],
        "columns": np.asfortranarray(array), "unaligned": unaligned, "frozen": frozen,
        "other bytes": array.astype(array.dtype.newbyteorder()), "subclass": array.view(np.recarray),
        "masked": np.ma.masked_array(array, mask=np.zeros(array.shape, bool)), "list": array.tolist(),
        "object": array.astype(object), "one more axis": array[..., None], "memory": memoryview(array),
    }  # fmt: skip


# Those layouts that the core reads by itself.
ALIKE = {"plain", "strided", "backwards", "columns", "unaligned", "frozen", "subclass", "masked"}


def can_be_cast(dtype: Any, target: Any) -> bool:
    """What the core must take by itself, unless a value does not fit."""
    whole = dtype.kind in "iub" and target.kind in "iu"
    return dtype == target or whole or (target.kind == "f" and target.itemsize > 2 and dtype.kind in "fiub")


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, "?"])
@pytest.mark.parametrize("name", SPACES)
@pytest.mark.filterwarnings("ignore:overflow")
def test_what_is_taken_is_what_the_slow_path_makes_of_it(kind: str, name: str, dtype: str) -> None:
    rig = ready_rig(kind, lanes=7, action=SPACES[name])
    leaves, lanes = rig.action_leaves, ids(5, 0, 3)
    written = rig.array("action.0")
    for array in samples((3, *leaves[0].shape), dtype):
        for layout, actions in layouts(array).items():
            try:
                [expected] = read_actions(leaves, actions, lanes, check="all")
            except BadAction:
                expected = None
            before = everything(rig)
            code = rig.lanes.send(actions, lanes)
            if code == NOT_TAKEN:
                plain = layout in ALIKE
                special = name in ("small box", "flags") or (dtype == "u8" and array.max() > 2**63 - 1)
                must = expected is not None and plain and can_be_cast(array.dtype, leaves[0].dtype) and not special
                lost = must and leaves[0].dtype.kind == "f" and np.isinf(expected).any() and not np.isinf(array).any()
                assert not must or lost, (layout, array)
                assert everything(rig) == before, (layout, array)
            else:
                assert expected is not None, (layout, array)
                same = np.array_equal(written[lanes], expected, equal_nan=expected.dtype.kind == "f")
                assert same, (layout, array, written, expected)
                rig.answer(*lanes.tolist())
                assert recv(rig, 3)[1] == [0, 3, 5]


def test_a_cast_of_many_rows(kind: str) -> None:
    rig = ready_rig(kind, lanes=301, action=spaces.Box(-10, 10, (7,), np.float32))
    actions = np.random.default_rng(0).uniform(-9, 9, (301, 14))[:, ::2]
    assert rig.lanes.send(actions, None) == POST_OK
    assert (rig.array("action.0") == actions.astype(np.float32)).all()
    rig.answer(*range(301))
    recv(rig, 301)
    actions[300, 6] = 10.1
    before = everything(rig)
    assert rig.lanes.send(actions, None) == NOT_TAKEN
    assert everything(rig) == before


def test_half_precision_is_read_to_the_last_bit(kind: str) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    rig = Rig(kind, lanes=2**16, action=spaces.Box(-1, 1, (), np.float64))
    rig.use_action(checked=False)
    assert rig.lanes.send(every, None) == POST_OK
    np.testing.assert_array_equal(rig.array("action.0"), every.astype(np.float64))


class Strange:
    """Has an array, and does something on the way to it."""

    def __init__(self, what: Any):
        self.what = what

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.what()


def test_what_becomes_an_array_may_run_any_code(kind: str) -> None:
    rig = ready_rig(kind, lanes=2)
    assert rig.lanes.send(Strange(lambda: np.array([1, 2])), None) == POST_OK
    rig.answer(0, 1)
    recv(rig, 2)

    def fails() -> Any:
        raise RuntimeError("no array today")

    def sends() -> Any:
        assert rig.lanes.send([5, 6], None) == POST_OK
        return np.array([1, 2])

    before = everything(rig)
    assert rig.lanes.send(Strange(fails), None) == NOT_TAKEN
    assert everything(rig) == before
    assert rig.lanes.send(Strange(sends), None) == NOT_TAKEN  # they are busy by then
    assert rig.array("action.0").tolist() == [5, 6]

    def interrupts() -> Any:
        raise KeyboardInterrupt

    rig.answer(0, 1)
    recv(rig, 2)
    with pytest.raises(KeyboardInterrupt):
        rig.lanes.send(Strange(interrupts), None)
    assert not rig.state.any()


def test_nothing_is_kept_of_actions(kind: str) -> None:
    rig = ready_rig(kind, lanes=2)
    for actions in (np.array([1, 2]), np.array([1, 2], np.int8), [1, 2], np.array([1, 100]), np.array([1.5, 2]), "ab"):
        lanes = ids(1, 0)
        rig.lanes.send(actions, lanes)  # the first one fills caches
        rig.answer(0, 1)
        recv(rig, 2)
        before = sys.getrefcount(actions), sys.getrefcount(lanes)
        for _ in range(50):
            if rig.lanes.send(actions, lanes) == POST_OK:
                rig.answer(0, 1)
                recv(rig, 2)
        assert (sys.getrefcount(actions), sys.getrefcount(lanes)) == before
        if isinstance(actions, np.ndarray):
            actions.resize(3, refcheck=False)  # no buffer is held

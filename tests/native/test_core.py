"""One suite over the C core and its Python twin: each test runs with both, whichever the package would choose."""

from __future__ import annotations

import functools
import gc
import itertools
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from native.rig import Rig, ids, load
from shoal.errors import BadObservation
from shoal.native import MIXED_SLOTS, twin
from shoal.native.counters import LANE_NS, LANE_STEPS, STAT_AT, STAT_BUSY_NS, STAT_PASSES, STAT_STEPS
from shoal.native.layout import (
    COLLECT_ALARM,
    COLLECT_TIMEOUT,
    IN_USE,
    LANE_IDLE,
    LANE_PENDING,
    NOT_TAKEN,
    OP_RESET,
    OP_STEP,
    POST_BUSY_LANE,
    POST_OK,
)

pytestmark = pytest.mark.timeout(60)
NEVER = -1


def soon(seconds: float = 20.0) -> int:
    """A deadline for waits that end long before it."""
    return time.monotonic_ns() + int(seconds * 1e9)


# ---- Lanes: post ---------------------------------------------------------------------------------------------


def test_post_to_all_moves_every_lane_on(kind: str) -> None:
    rig = Rig(kind, lanes=4, frames=3)
    assert rig.lanes.post(None, OP_RESET) == POST_OK
    assert rig.state.tolist() == [LANE_PENDING] * 4
    assert rig.array("requested").tolist() == [1] * 4
    assert rig.array("slot").tolist() == [1] * 4
    assert rig.array("op").tolist() == [OP_RESET] * 4


def test_post_to_some_touches_those_only(kind: str) -> None:
    rig = Rig(kind, lanes=4)
    assert rig.lanes.post(ids(3, 1), OP_STEP) == POST_OK
    assert rig.state.tolist() == [0, 1, 0, 1]
    assert rig.array("requested").tolist() == [0, 1, 0, 1]
    assert rig.array("slot").tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("frames", [2, 3, 255])
def test_slots_go_round(kind: str, frames: int) -> None:
    rig = Rig(kind, lanes=1, frames=frames)
    for turn in range(2 * frames + 1):
        assert rig.lanes.post(None, OP_STEP) == POST_OK
        assert rig.array("slot")[0] == (turn + 1) % frames
        rig.answer(0)
        assert rig.collect(1)[0][:3] == (1, 0, (turn + 1) % frames)


@pytest.mark.parametrize("second", [None, (2,), (0, 1, 2)], ids=["all", "the busy one", "some idle, one busy"])
def test_a_busy_lane_is_refused_and_nothing_is_touched(kind: str, second: tuple[int, ...] | None) -> None:
    rig = Rig(kind, lanes=4, workers=2)
    rig.lanes.post(ids(2), OP_STEP)
    before = rig.snapshot()
    assert rig.lanes.post(None if second is None else ids(*second), OP_RESET) == POST_BUSY_LANE
    assert rig.snapshot() == before


def test_post_rings_the_workers_concerned(kind: str) -> None:
    rig = Rig(kind, lanes=6, workers=3)
    rig.lanes.post(ids(4, 5), OP_STEP)
    assert rig.blocks[2].wait(soon(), 0) is True
    for block in rig.blocks[:2]:
        assert block.wait(time.monotonic_ns() + 5_000_000, 0) is False


def test_one_post_rings_a_worker_once(kind: str) -> None:
    rig = Rig(kind, lanes=4, workers=1)
    rig.lanes.post(None, OP_STEP)
    assert rig.block.wait(soon(), 0) is True
    assert rig.block.run() == 4
    assert rig.block.wait(time.monotonic_ns() + 5_000_000, 0) is False


def test_ring_wakes_one_worker(kind: str) -> None:
    rig = Rig(kind, lanes=4, workers=2)
    rig.lanes.ring(1)
    assert rig.blocks[1].wait(soon(), 1000) is True
    assert rig.blocks[0].wait(time.monotonic_ns() + 5_000_000, 0) is False
    with pytest.raises(IndexError):
        rig.lanes.ring(2)


# ---- Lanes: collect ------------------------------------------------------------------------------------------


def test_collect_takes_the_first_done_and_writes_them_in_order(kind: str) -> None:
    rig = Rig(kind, lanes=5)
    rig.lanes.post(None, OP_STEP)
    for lane, at_ns in enumerate([50, 10, 40, 20, 30]):
        rig.answer(lane, at_ns=at_ns)
    assert rig.collect(2) == ((2, 1, -1, 0), [1, 3])
    assert rig.state.tolist() == [1, 0, 1, 0, 1]
    assert rig.collect(2)[1] == [2, 4]
    assert rig.collect(1)[1] == [0]
    assert rig.state.tolist() == [LANE_IDLE] * 5


def test_equal_times_are_taken_by_lane(kind: str) -> None:
    rig = Rig(kind, lanes=6)
    rig.lanes.post(None, OP_STEP)
    rig.answer(*range(6), at_ns=7)
    assert rig.collect(3)[1] == [0, 1, 2]
    assert rig.collect(3)[1] == [3, 4, 5]


def test_only_answers_to_the_last_request_count(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    rig.lanes.post(None, OP_STEP)
    rig.answer(0)
    assert rig.collect(1)[1] == [0]
    rig.lanes.post(ids(0), OP_STEP)  # answered is now one behind
    assert rig.collect(1)[0][0] == COLLECT_TIMEOUT
    rig.array("answered")[1] = 7  # a number that was never asked for
    assert rig.collect(1)[0][0] == COLLECT_TIMEOUT
    rig.answer(0)
    assert rig.collect(1)[1] == [0]


def test_idle_lanes_are_never_collected(kind: str) -> None:
    rig = Rig(kind, lanes=3)  # requested == answered == 0 everywhere
    assert rig.collect(1)[0][0] == COLLECT_TIMEOUT
    rig.lanes.post(ids(1), OP_STEP)
    rig.answer(1)
    assert rig.collect(2)[0][0] == COLLECT_TIMEOUT
    assert rig.collect(1)[1] == [1]


def test_a_group_is_ready_when_its_last_lane_is(kind: str) -> None:
    rig = Rig(kind, lanes=5, leader=ids(1, 1, 4, 4, 4))
    rig.lanes.post(None, OP_STEP)
    rig.answer(0, 2, 3, at_ns=1)  # half of either
    assert rig.collect(2)[0][0] == COLLECT_TIMEOUT
    rig.answer(1, at_ns=1)
    assert rig.collect(2) == ((2, 0, 1, 0), [0, 1])
    assert rig.collect(1)[0][0] == COLLECT_TIMEOUT
    rig.answer(4, at_ns=9)
    assert rig.collect(3, ids(2, 3, 4)) == ((3, 2, 1, 0), [2, 3, 4])


def test_a_window_is_taken_when_it_is_whole(kind: str) -> None:
    rig = Rig(kind, lanes=6, window=2)
    rig.lanes.post(None, OP_STEP)
    rig.answer(0, 3, 5, at_ns=1)
    assert rig.collect(2)[0][0] == COLLECT_TIMEOUT
    rig.answer(1, at_ns=30)
    rig.answer(4, at_ns=20)
    assert rig.collect(2) == ((2, 4, 1, 0), [4, 5])  # the one that was whole first
    assert rig.collect(2) == ((2, 0, 1, 0), [0, 1])
    assert rig.collect(1)[1] == [3]  # other numbers are of any lanes
    assert rig.state.tolist() == [0, 0, 1, 0, 0, 0]


def test_a_waiter_is_woken_when_a_window_is_whole(kind: str) -> None:
    rig = Rig(kind, lanes=4, workers=2, window=2)
    rig.lanes.post(None, OP_STEP)
    thread = in_thread(lambda: (time.sleep(0.02), rig.blocks[1].run()))
    assert rig.collect(2, deadline_ns=soon())[1] == [2, 3]
    thread.join()


@pytest.mark.parametrize("lane", [1, 3])
def test_publish_answers_what_was_asked(kind: str, lane: int) -> None:
    rig = Rig(kind, lanes=4, workers=2)
    out = np.full(2, -1, np.int64)
    assert rig.block.asked(out) == 0
    rig.lanes.post(ids(lane), OP_STEP)
    block = rig.blocks[lane // 2]
    assert block.asked(out) == 1
    assert out[0] == lane
    block.enter(lane)
    assert rig.array("stats")[lane // 2, STAT_AT] == lane + 1
    time.sleep(0.001)
    block.leave(lane)
    assert rig.array("lane_stats")[lane, LANE_STEPS] == 1
    assert rig.array("lane_stats")[lane, LANE_NS] >= 1_000_000
    before = time.monotonic_ns()
    block.publish(ids(lane), before - 1000)
    assert rig.collect(1, deadline_ns=soon())[1] == [lane]
    assert before <= rig.array("done_ns")[lane] <= time.monotonic_ns()
    stats = rig.array("stats")[lane // 2]
    assert (stats[STAT_STEPS], stats[STAT_PASSES], stats[STAT_AT]) == (1, 1, 0)
    assert stats[STAT_BUSY_NS] >= 1000
    assert block.asked(out) == 0


def test_wanted_lanes_only(kind: str) -> None:
    rig = Rig(kind, lanes=4)
    rig.lanes.post(None, OP_STEP)
    rig.answer(0, 1, 3)
    assert rig.collect(2, ids(2, 3))[0][0] == COLLECT_TIMEOUT
    assert rig.collect(2, ids(3, 0)) == ((2, 0, -1, 0), [0, 3])
    assert rig.state.tolist() == [0, 1, 1, 0]


def test_a_timeout_takes_nothing(kind: str) -> None:
    rig = Rig(kind, lanes=3)
    rig.lanes.post(None, OP_STEP)
    rig.answer(0, 2)
    before = rig.snapshot()
    for deadline in (0, time.monotonic_ns() + 20_000_000):
        assert rig.collect(3, deadline_ns=deadline) == ((COLLECT_TIMEOUT, 0, -1, 0), [])
    assert rig.snapshot() == before
    rig.answer(1)
    assert rig.collect(3)[1] == [0, 1, 2]


@pytest.mark.parametrize(
    ("lanes", "slots", "expected"),
    [
        ([0, 1, 2, 3], [1, 1, 1, 1], (0, 1)),
        ([1, 2], [0, 1, 1, 0], (1, 1)),
        ([2], [0, 0, 1, 0], (2, 1)),
        ([0, 2], [1, 1, 1, 1], (0, -1)),
        ([0, 1, 3], [1, 1, 1, 1], (0, -1)),
        ([1, 2], [0, 1, 0, 0], (1, -1)),
        ([0, 1, 2, 3], [1, 1, 1, 0], (0, -1)),
    ],
)
def test_one_run_in_one_slot_is_reported(
    kind: str, lanes: list[int], slots: list[int], expected: tuple[int, int]
) -> None:
    rig = Rig(kind, lanes=4)
    rig.lanes.post(ids(*lanes), OP_STEP)
    rig.array("slot")[:] = slots
    rig.answer(*lanes)
    (count, first, slot, _), got = rig.collect(len(lanes))
    assert (count, got) == (len(lanes), lanes)
    assert (first, slot) == expected


def test_status_is_all_bits_of_the_lanes_taken(kind: str) -> None:
    rig = Rig(kind, lanes=4)
    rig.lanes.post(None, OP_STEP)
    for lane, status in enumerate([0, 1, 2, 64]):
        rig.answer(lane, status=status, at_ns=lane)
    rig.array("status")[0] = 0x80  # the other frame's is nobody's business
    assert rig.collect(1)[0][3] == 0
    assert rig.collect(2)[0][3] == 3
    assert rig.collect(1)[0][3] == 64


def test_an_alarm_is_returned_until_it_is_heard(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    rig.lanes.post(None, OP_STEP)
    rig.lanes.alarm()
    for deadline in (NEVER, 0):
        assert rig.collect(2, deadline_ns=deadline)[0] == (COLLECT_ALARM, 0, -1, 0)
    rig.answer(0)
    assert rig.collect(1, deadline_ns=NEVER)[0][0] == COLLECT_ALARM, "also where somebody is ready"
    rig.lanes.heard()
    assert rig.collect(1)[1] == [0]
    assert rig.collect(1)[0][0] == COLLECT_TIMEOUT
    rig.lanes.alarm()
    assert rig.collect(1)[0][0] == COLLECT_ALARM


def test_the_c_core_never_goes_out_of_bounds() -> None:
    """The C core writes through pointers: what could go out of bounds is refused."""
    try:
        rig = Rig("native", lanes=3)
    except ImportError as error:
        pytest.skip(f"the C extension was not built here ({error})")
    rig.lanes.post(None, OP_STEP)
    rig.answer(0, 1, 2)
    before = rig.snapshot()
    for need, wanted, out in [
        (0, None, rig.out),
        (4, None, rig.out),
        (-1, None, rig.out),
        (2, ids(1), rig.out),
        (3, None, np.zeros(2, np.int64)),
    ]:
        with pytest.raises(ValueError):
            rig.lanes.collect(need, wanted, 0, 0, out, None)
    for strange in (ids(3), ids(-1), ids(0, 2**40)):
        assert rig.lanes.post(strange, OP_STEP) == POST_BUSY_LANE
    read_only = np.zeros(3, np.int64)
    read_only.flags.writeable = False
    for args in [(None, "x"), (None,), (1.5, OP_STEP), (None, 256), (None, -1)]:
        with pytest.raises((TypeError, OverflowError)):
            rig.lanes.post(*args)
    with pytest.raises((BufferError, ValueError)):
        rig.lanes.collect(3, None, 0, 0, read_only, None)
    assert rig.snapshot() == before


# ---- Lanes: waiting ------------------------------------------------------------------------------------------


def in_thread(action: Any) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("spin_ns", [0, 50_000])
@pytest.mark.parametrize("publish_each", [False, True])
def test_a_waiter_is_woken_by_the_block(kind: str, publish_each: bool, spin_ns: int) -> None:
    rig = Rig(kind, lanes=4, workers=2, publish_each=publish_each)
    stop = threading.Event()

    def work(block: Any) -> None:
        while not stop.is_set():
            if block.wait(time.monotonic_ns() + 100_000_000, spin_ns):
                block.run()

    threads = [in_thread(lambda block=block: work(block)) for block in rig.blocks]
    for turn in range(200):
        rig.array("action.0")[:] = turn % 100
        assert rig.lanes.post(None, OP_STEP) == POST_OK
        count, first, slot, _ = rig.lanes.collect(4, None, soon(), spin_ns, rig.out, None)
        assert (count, first) == (4, 0)
        assert (rig.array("obs.0")[slot, :, 0] == turn % 100).all()
    stop.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert rig.array("stats")[:, 0].tolist() == [400, 400]


def test_a_waiter_is_woken_when_enough_are_done(kind: str) -> None:
    """Two of four lanes are enough, and the other two never answer."""
    rig = Rig(kind, lanes=4, workers=2, publish_each=True)
    rig.lanes.post(None, OP_STEP)
    thread = in_thread(lambda: (time.sleep(0.05), rig.blocks[1].run()))
    assert rig.collect(2, deadline_ns=soon())[1] == [2, 3]
    thread.join(10)
    assert rig.state.tolist() == [1, 1, 0, 0]


def test_a_waiter_is_woken_by_an_alarm(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    rig.lanes.post(None, OP_STEP)
    for _ in range(3):
        thread = in_thread(lambda: (time.sleep(0.05), rig.lanes.alarm()))
        assert rig.collect(2, deadline_ns=NEVER)[0][0] == COLLECT_ALARM
        thread.join(10)
        rig.lanes.heard()


def test_a_waiter_lets_other_threads_run(kind: str) -> None:
    rig = Rig(kind, lanes=1)
    rig.lanes.post(None, OP_STEP)
    ran = []
    thread = in_thread(lambda: (ran.append(1), rig.block.run()))
    assert rig.collect(1, deadline_ns=soon())[1] == [0]
    thread.join(10)
    assert ran == [1]


@pytest.mark.parametrize("raises", [True, False], ids=["handler raises", "handler returns"])
def test_a_signal_interrupts_the_waiter(kind: str, raises: bool) -> None:
    """A handler that raises ends the wait with its exception; one that returns lets it go on until the answer."""
    number = "SIGINT" if raises else "SIGUSR1"
    script = f"""
        import signal, threading, time
        from native.rig import Rig
        rig = Rig({kind!r}, lanes=1)
        rig.lanes.post(None, 0)
        handled = []
        signal.signal(signal.SIGUSR1, lambda *_: handled.append(1))
        def poke():
            time.sleep(0.3)
            for _ in range(3):
                signal.pthread_kill(threading.main_thread().ident, signal.{number})
                time.sleep(0.1)
            rig.block.run()
        try:
            threading.Thread(target=poke, daemon=True).start()
            print("collected", rig.collect(1, deadline_ns=-1)[1], len(handled))
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            print("interrupted", rig.state.tolist())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert done.stdout.strip() == ("interrupted [1]" if raises else "collected [0] 3"), done.stderr


@pytest.mark.parametrize("spin_ns", [0, 50_000])
def test_a_signal_that_came_just_before_the_sleep_is_not_lost(kind: str, spin_ns: int) -> None:
    """Its handler is due, and no system call will be interrupted any more: the waiter must look by itself."""

    class Due(Exception):
        pass

    def due(*_: Any) -> None:
        raise Due

    rig = Rig(kind, lanes=1)
    rig.lanes.post(None, OP_STEP)
    busy_in_c = functools.partial(sum, itertools.repeat(1, 30_000_000))  # during which the timer goes off
    before = signal.signal(signal.SIGVTALRM, due)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.01)
        deadline = soon(50.0)
        with pytest.raises(Due):
            rig.lanes.collect(1, None, deadline, spin_ns, rig.out, busy_in_c)
        assert time.monotonic_ns() < deadline, "it slept until its deadline"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_the_pools_bell_wraps(kind: str) -> None:
    """The bell counts modulo 2^32: nothing happens at the turn."""
    rig = Rig(kind, lanes=3, workers=3, publish_each=True)
    rig.array("pool_bell")[0] = 2**32 - 4
    for _ in range(4):
        rig.lanes.post(None, OP_STEP)
        threads = [in_thread(lambda b=block: (time.sleep(0.02), b.run())) for block in rig.blocks]
        assert rig.collect(3, deadline_ns=soon())[1] == [0, 1, 2]
        for thread in threads:
            thread.join(10)
    if kind == "native":
        assert rig.array("pool_bell")[0] == 8


def test_a_workers_bell_wraps(kind: str) -> None:
    rig = Rig(kind, lanes=1)
    bell = rig.array("worker_bells")[0]
    for count in (2**31 - 1, 2**32 - 2):  # lead its memory up to the turn: at most half the circle at a time
        bell[0] = count - 1
        rig.lanes.ring(0)
        assert rig.block.wait(soon(), 0) is True
    for _ in range(4):
        assert rig.block.wait(time.monotonic_ns() + 5_000_000, 0) is False
        thread = in_thread(lambda: (time.sleep(0.02), rig.lanes.ring(0)))
        assert rig.block.wait(soon(), 0) is True
        thread.join(10)
    if kind == "native":
        assert bell[0] == 2


def test_alarms_wrap(kind: str) -> None:
    rig = Rig(kind, lanes=1)
    rig.array("pool_bell")[3] = 2**32 - 2
    rig.lanes.heard()
    rig.lanes.post(None, OP_STEP)
    for _ in range(4):
        assert rig.collect(1)[0][0] == COLLECT_TIMEOUT
        rig.lanes.alarm()
        assert rig.collect(1)[0][0] == COLLECT_ALARM
        rig.lanes.heard()


# ---- Lanes: one thread at a time, the caller's own block, the short cut ---------------------------------------


def test_a_second_thread_is_refused(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    rig.lanes.post(ids(0), OP_STEP)
    waiter = in_thread(lambda: rig.lanes.collect(1, None, soon(), 0, np.zeros(2, np.int64), None))
    out = np.zeros(2, np.int64)
    while rig.lanes.collect(1, None, 0, 0, out, None)[0] != IN_USE:
        time.sleep(0.005)
    before = rig.snapshot()
    assert rig.lanes.post(ids(1), OP_STEP) == IN_USE
    assert rig.snapshot() == before
    rig.block.run()
    waiter.join(10)
    assert not waiter.is_alive()
    assert rig.lanes.post(ids(1), OP_STEP) == POST_OK, "free again"


def test_collect_runs_the_callers_own_block_first(kind: str) -> None:
    rig = Rig(kind, lanes=4, workers=2)
    rig.lanes.post(None, OP_STEP)
    thread = in_thread(lambda: (time.sleep(0.02), rig.blocks[1].run()))
    assert rig.collect(4, deadline_ns=soon(), run=rig.blocks[0].run)[1] == [0, 1, 2, 3]
    thread.join(10)


def test_what_the_callers_own_block_raises_comes_out(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    rig.lanes.post(None, OP_STEP)

    def interrupted() -> int:
        raise KeyboardInterrupt

    before = rig.snapshot()
    with pytest.raises(KeyboardInterrupt):
        rig.collect(2, run=interrupted)
    assert rig.snapshot() == before
    assert rig.collect(2, run=rig.block.run)[1] == [0, 1], "usable afterwards"


def c_rig(**options: Any) -> Rig:
    """The short cut `step` is the C core's alone: the twin never takes it."""
    try:
        rig = Rig("native", **options)
    except ImportError as error:
        pytest.skip(f"the C extension was not built here ({error})")
    rig.use_action()
    return rig


def test_the_twin_takes_no_short_cut() -> None:
    rig = Rig("twin", lanes=2)
    rig.use_action()
    before = rig.snapshot()
    assert rig.lanes.step(np.array([1, 2]), rig.block.run, 0, -1) == NOT_TAKEN
    assert rig.snapshot() == before


def test_the_short_cut_steps_all_lanes() -> None:
    rig = c_rig(lanes=3, frames=2)
    for turn in range(1, 5):
        assert rig.lanes.step(np.full(3, turn), rig.block.run, 0, -1) == turn % 2
        assert rig.array("obs.0")[turn % 2, :, 0].tolist() == [turn] * 3
        assert not rig.state.any()


def test_the_short_cut_reports_status_and_mixed_slots() -> None:
    rig = c_rig(lanes=2)
    special = rig.block.run

    def run() -> int:
        done = special()
        rig.array("status")[:] = [[1], [3]]
        return int(done)

    assert rig.lanes.step(np.array([1, 2]), run, 0, -1) == 1 | 3 << 8
    rig.lanes.post(ids(0), OP_STEP)
    rig.block.run()
    rig.collect(1)
    assert rig.lanes.step(np.array([1, 2]), rig.block.run, 0, -1) == MIXED_SLOTS


@pytest.mark.parametrize(
    "actions",
    [
        np.array([1, 2, 3]),
        np.array([1]),
        np.array([[1, 2]]),
        np.array([1, 100], np.int32),
        np.array([1, 2], ">i8"),
        np.array([1, 2**63], np.uint64),
        np.array([1.0, 2.0]),
        np.array([1, 100]),
        np.array([-1, 1]),
        np.array([1, 0, 100])[::2],
        [1, 100],
        [1.0, 2.0],
        b"\1\2",
        None,
        "ab",
    ],
    ids=repr,
)
def test_the_short_cut_leaves_the_rest_alone(actions: Any) -> None:
    rig = c_rig(lanes=2)
    before = rig.snapshot(), rig.array("action.0").tolist()
    assert rig.lanes.step(actions, rig.block.run, 0, -1) == NOT_TAKEN
    assert (rig.snapshot(), rig.array("action.0").tolist()) == before


@pytest.mark.parametrize("checked", [True, False])
def test_the_short_cut_checks_boxes_when_asked(checked: bool) -> None:
    try:
        rig = Rig("native", lanes=2, action=spaces.Box(-1, 1, (3,), np.float32))
    except ImportError as error:
        pytest.skip(f"the C extension was not built here ({error})")
    rig.use_action(checked)
    with pytest.raises(RuntimeError):
        rig.use_action(checked)
    actions = np.zeros((2, 3), np.float32)
    assert rig.lanes.step(actions, rig.block.run, 0, -1) == 1
    for strange in (2.0, np.nan):
        actions[1, 2] = strange
        assert (rig.lanes.step(actions, rig.block.run, 0, -1) == NOT_TAKEN) == checked


def test_the_short_cut_with_a_busy_lane_an_alarm_and_an_error() -> None:
    rig = c_rig(lanes=2)
    rig.lanes.post(ids(1), OP_STEP)
    before = rig.snapshot()
    assert rig.lanes.step(np.array([1, 2]), rig.block.run, 0, -1) == NOT_TAKEN
    assert rig.snapshot() == before
    rig.block.run()
    rig.collect(1)
    rig.lanes.alarm()
    assert rig.lanes.step(np.array([1, 2]), None, 0, -1) == COLLECT_ALARM
    rig.lanes.heard()
    assert rig.collect(2, run=rig.block.run)[1] == [0, 1]
    rig.results[0] = KeyboardInterrupt()
    rig.raising["failed"] = KeyboardInterrupt()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        rig.lanes.step(np.array([1, 2]), rig.block.run, 0, -1)
    rig.results.clear()
    assert rig.collect(2, run=rig.block.run)[1] == [0, 1]


# ---- Block: the fast path ------------------------------------------------------------------------------------


def test_run_writes_a_plain_step_into_the_frame(kind: str) -> None:
    rig = Rig(kind, lanes=3)
    rig.array("action.0")[:] = [5, 6, 7]
    rig.array("status")[:] = 9
    rig.array("began")[:] = True
    rig.lanes.post(ids(0, 2), OP_STEP)
    assert rig.block.run() == 2
    assert rig.block.run() == 0, "nothing is stepped twice"
    (count, _, _, status), got = rig.collect(2)
    assert (count, status, got) == (2, 0, [0, 2])
    assert rig.array("obs.0")[1].tolist() == [[5, 0, 0], [0, 0, 0], [7, 0, 0]]
    assert rig.array("reward")[1].tolist() == [1.5, 0, 1.5]
    assert rig.array("began")[1].tolist() == [False, True, False]
    assert rig.array("status")[1].tolist() == [0, 9, 0]
    assert rig.array("episode_length")[1].tolist() == [1, 0, 1]
    assert rig.array("stats")[0, 0] == 2
    assert rig.array("stats")[0, 1] > 0
    assert (rig.array("done_ns")[[0, 2]] > 0).all()
    assert not rig.events("special", "finish", "note", "failed")


def test_returns_and_lengths_add_up(kind: str) -> None:
    rig = Rig(kind, lanes=1)
    for turn in range(1, 5):
        rig.lanes.post(None, OP_STEP)
        rig.block.run()
        (_, _, slot, _), _ = rig.collect(1)
        assert rig.array("episode_return")[slot, 0] == 1.5 * turn
        assert rig.array("episode_length")[slot, 0] == turn
    assert (rig.array("run_return")[0], rig.array("run_length")[0]) == (6.0, 4)


def test_scalar_actions_are_numpy_integers(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    rig.array("action.0")[:] = [3, 4]
    rig.lanes.post(None, OP_STEP)
    rig.block.run()
    assert [type(action) for action in rig.seen_actions] == [np.int64, np.int64]
    assert rig.seen_actions == [3, 4]


def test_row_actions_are_the_envs_own(kind: str) -> None:
    rig = Rig(kind, lanes=2, action=spaces.Box(0, 9, (2,), np.float32))
    rig.array("action.0")[:] = [[1, 2], [3, 4]]
    rig.lanes.post(None, OP_STEP)
    rig.block.run()
    rig.array("action.0")[:] = 0
    assert [action.tolist() for action in rig.seen_actions] == [[1, 2], [3, 4]]
    rig.seen_actions[0][:] = 9  # an env may change its action, which is no other env's
    assert [action.tolist() for action in rig.seen_actions] == [[9, 9], [3, 4]]
    assert rig.array("action.0").tolist() == [[0, 0], [0, 0]]


def test_a_lane_that_is_asked_during_a_pass_gets_its_newest_action(kind: str) -> None:
    rig = Rig(kind, lanes=3, action=spaces.Box(0, 9, (2,), np.float32))
    rig.array("action.0")[:] = [[1, 1], [2, 2], [3, 3]]

    def ask_the_last(action: Any) -> Any:
        rig.array("action.0")[2] = 8
        rig.lanes.post(ids(2), OP_STEP)
        return np.zeros(3, np.float32), 0.0, False, False, {}

    rig.results[0] = ask_the_last
    rig.lanes.post(ids(0, 1), OP_STEP)
    assert rig.block.run() + rig.block.run() == 3  # in the same pass, or in the next
    assert [action.tolist() for action in rig.seen_actions] == [[1, 1], [2, 2], [8, 8]]


@pytest.mark.parametrize("action_raises", [False, True])
def test_actions_by_call(kind: str, action_raises: bool) -> None:
    rig = Rig(kind, lanes=2)

    def action_of(lane: int) -> Any:
        if action_raises:
            raise LookupError("no action")
        return {"lane": lane}

    rig.results = dict.fromkeys(range(2), lambda action: (np.zeros(3, np.float32), action["lane"], False, False, {}))
    block = rig._make(
        "block", rig.slab, 0, 0, 2, 0, False, twin.ACTION_CALL, (), [rig._step(0), rig._step(1)], action_of,
        rig.callbacks(), rig.bell, rig.bells[0],
    )  # fmt: skip
    rig.lanes.post(None, OP_STEP)
    assert block.run() == 2
    if action_raises:
        assert [type(entry[3]) for entry in rig.events("failed")] == [LookupError, LookupError]
    else:
        assert rig.array("reward")[1].tolist() == [0, 1]


REWARDS = [(2, 2.0), (True, 1.0), (np.float32(0.5), 0.5), (np.int64(-3), -3.0), (np.array(2.5), 2.5), (-1.0, -1.0)]


@pytest.mark.parametrize(("reward", "stored"), REWARDS)
def test_rewards_of_many_types(kind: str, reward: Any, stored: float) -> None:
    rig = Rig(kind, lanes=1)
    rig.results[0] = (np.zeros(3, np.float32), reward, False, False, {})
    rig.lanes.post(None, OP_STEP)
    rig.block.run()
    assert not rig.events("failed")
    assert rig.array("reward")[1, 0] == stored


@pytest.mark.parametrize("flag", [1, np.True_, np.array(True), np.array([7]), [0]], ids=repr)
def test_flags_are_by_truth(kind: str, flag: Any) -> None:
    rig = Rig(kind, lanes=1)
    rig.results[0] = (np.zeros(3, np.float32), 0.0, flag, False, {})
    rig.lanes.post(None, OP_STEP)
    rig.block.run()
    assert rig.array("terminated")[1, 0] == True  # noqa: E712
    assert rig.array("truncated")[1, 0] == False  # noqa: E712


@pytest.mark.parametrize("flags", [("no", False), (False, "False"), (True, b"0")], ids=repr)
def test_flags_that_are_texts_are_refused(kind: str, flags: tuple[Any, Any]) -> None:
    """A text is true whatever it says."""
    rig = Rig(kind, lanes=1)
    rig.results[0] = (np.zeros(3, np.float32), 0.0, *flags, {})
    rig.lanes.post(None, OP_STEP)
    rig.block.run()
    ((*_, error),) = rig.events("failed")
    assert isinstance(error, TypeError)
    name, value = ("terminated", flags[0]) if flags[0] == "no" else ("truncated", flags[1])
    assert str(error) == f"{name} must be a bool, got {value!r}"


# ---- Block: observations -------------------------------------------------------------------------------------

BOX = spaces.Box(-100, 100, (2, 3), np.float32)
F32 = np.arange(6, dtype=np.float32).reshape(2, 3)
READ_ONLY = F32.copy()
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (BOX, F32),
        (BOX, READ_ONLY),
        (spaces.Box(0, 255, (4,), np.uint8), np.arange(4, dtype=np.uint8)),
        (spaces.Box(-9, 9, (2,), np.int16), np.array([-5, 5], np.int16)),
        (spaces.Box(0, 1, (2,), np.bool_), np.array([True, False])),
        (spaces.Box(-1, 1, (2,), np.float16), np.array([0.5, -0.5], np.float16)),
        (spaces.Box(-1, 1, (), np.float64), np.float64(0.25)),
        (spaces.Box(0, 1, (0,), np.float32), np.zeros(0, np.float32)),
        (spaces.Discrete(9), 5),
        (spaces.Discrete(9), np.int64(5)),
        (spaces.Discrete(9), np.uint8(5)),
        (spaces.Discrete(9), np.array(5)),
        (spaces.Discrete(9, start=-4), -3),
        (spaces.MultiDiscrete([3, 4]), np.array([2, 3])),
        (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8)),
    ],
    ids=lambda value: repr(value).replace("\n", ""),
)
def test_the_fast_path_takes_it(kind: str, space: Any, value: Any) -> None:
    rig = Rig(kind, lanes=2, obs=space)
    rig.results[1] = (value, 0.0, False, False, {})
    rig.lanes.post(ids(1), OP_STEP)
    rig.block.run()
    if kind == "native":
        assert not rig.events("store")
    assert not rig.events("failed")
    assert rig.array("obs.0")[1, 1].tolist() == np.asarray(value).tolist()
    assert not rig.array("obs.0")[:, 0].any(), "the neighbour's row is untouched"


def test_nested_observations(kind: str) -> None:
    space = spaces.Dict(a=spaces.Tuple((spaces.Discrete(9), BOX)), b=spaces.MultiBinary(2))
    rig = Rig(kind, lanes=2, obs=space)
    rig.results[1] = ({"b": np.array([1, 0], np.int8), "a": (7, F32), "more": None}, 0.0, False, False, {})
    rig.lanes.post(ids(1), OP_STEP)
    rig.block.run()
    assert not rig.events("failed")
    if kind == "native":
        assert not rig.events("store")
    assert rig.array("obs.0")[1].tolist() == [0, 7]
    assert rig.array("obs.1")[1, 1].tolist() == F32.tolist()
    assert rig.array("obs.2")[1, 1].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (BOX, F32.astype(np.float64)),
        (BOX, F32.astype(">f4")),
        (BOX, np.asfortranarray(F32)),
        (BOX, np.repeat(F32, 2, axis=1)[:, ::2]),
        (BOX, F32[::-1]),
        (BOX, F32.tolist()),
        (BOX, np.arange(6).reshape(2, 3)),
        (spaces.Box(-1, 1, (), np.float32), 0.5),
        (spaces.Discrete(9), np.array(5, ">i8")),
        (spaces.MultiBinary(2), np.array([True, False])),
    ],
    ids=lambda value: repr(value).replace("\n", ""),
)
def test_what_can_be_cast_goes_through_store(kind: str, space: Any, value: Any) -> None:
    rig = Rig(kind, lanes=1, obs=space)
    rig.results[0] = (value, 0.0, False, False, {})
    rig.lanes.post(None, OP_STEP)
    rig.block.run()
    assert not rig.events("failed")
    assert rig.array("obs.0")[1, 0].tolist() == np.asarray(value).tolist()


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (BOX, F32.T),
        (BOX, F32.ravel()),
        (BOX, F32[None]),
        (BOX, F32[:1]),
        (BOX, F32.astype(np.complex64)),
        (BOX, None),
        (BOX, "text"),
        (BOX, [[1, 2, 3], [4, 5]]),
        (BOX, object()),
        (spaces.Box(0, 255, (4,), np.uint8), np.array([0, 1, 2, 300])),
        (spaces.Box(0, 255, (4,), np.uint8), np.array([-1, 0, 1, 2], np.int8)),
        (spaces.Box(0, 255, (4,), np.uint8), b"abcd"),
        (spaces.Box(0, 255, (8,), np.uint8), np.array(1.0)),
        (spaces.Box(-9, 9, (2,), np.int16), np.array([0.5, 1.5], np.float16)),
        (spaces.Discrete(9), 2.0),
        (spaces.Discrete(9), np.array([2])),
        (spaces.Discrete(9), 2**70),
        (spaces.Discrete(9), 2**63),
        (spaces.Discrete(9), None),
        (spaces.Discrete(9), "3"),
        (spaces.Dict(a=spaces.Discrete(2)), {"b": 1}),
        (spaces.Dict(a=spaces.Discrete(2)), 1),
        (spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2))), (1,)),
    ],
    ids=lambda value: repr(value).partition(" at 0x")[0].replace("\n", ""),
)
def test_what_does_not_fit_is_the_envs_fault(kind: str, space: Any, value: Any) -> None:
    """The core asks `store`, which raises; `failed` gets that error, and the lane is answered all the same."""
    rig = Rig(kind, lanes=2, obs=space)
    rig.results[0] = (value, 0.0, False, False, {})
    rig.lanes.post(None, OP_STEP)
    assert rig.block.run() == 2
    assert [(entry[0], entry[1]) for entry in rig.events("failed")][:1] == [("failed", 0)]
    assert type(rig.events("failed")[0][3]).__name__ == "BadObservation"
    assert rig.collect(2)[1] == [0, 1]


def test_spaces_without_arrays_always_go_through_store(kind: str) -> None:
    space = spaces.Dict(a=spaces.Discrete(3), g=spaces.Sequence(spaces.Discrete(2)))
    rig = Rig(kind, lanes=1, obs=space)
    rig.results[0] = ({"a": 2, "g": (1, 0)}, 0.0, False, False, {})
    rig.lanes.post(None, OP_STEP)
    rig.block.run()
    assert [entry[:3] for entry in rig.events("store")] == [("store", 0, 1)]
    assert rig.array("obs.0")[1, 0] == 2
    assert rig.log[-1] == ("flush",)


# ---- Block: callbacks ----------------------------------------------------------------------------------------


def ends(terminated: bool = True, info: Any = None) -> tuple[Any, ...]:
    return np.ones(3, np.float32), 1.0, terminated, not terminated, {} if info is None else info


def test_resets_go_to_special(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    rig.lanes.post(ids(1), OP_RESET)
    assert rig.block.run() == 1
    assert rig.log == [("special", 1, 1, OP_RESET), ("flush",)]
    assert not rig.seen_actions


@pytest.mark.parametrize("terminated", [True, False], ids=["terminated", "truncated"])
def test_next_step_resets_in_the_step_after_the_end(kind: str, terminated: bool) -> None:
    rig = Rig(kind, lanes=1, autoreset="next_step")
    rig.results[0] = ends(terminated)
    rig.lanes.post(None, OP_STEP)
    rig.block.run()
    assert rig.array("ended")[0] == 1
    assert (rig.array("terminated")[1, 0], rig.array("truncated")[1, 0]) == (terminated, not terminated)
    rig.collect(1)
    rig.lanes.post(None, OP_STEP)
    rig.block.run()
    assert rig.events("special") == [("special", 0, 0, OP_STEP)]
    assert len(rig.seen_actions) == 1
    rig.array("ended")[0] = 0  # which `special` does
    rig.collect(1)
    rig.lanes.post(None, OP_STEP)
    rig.block.run()
    assert len(rig.seen_actions) == 2


def test_same_step_goes_to_finish(kind: str) -> None:
    rig = Rig(kind, lanes=1, autoreset="same_step")
    rig.results[0] = ends(info={"a": 1})
    rig.lanes.post(None, OP_STEP)
    rig.block.run()
    [(_, lane, slot, observation, info)] = rig.events("finish")
    assert (lane, slot, observation.tolist(), info) == (0, 1, [1, 1, 1], {"a": 1})
    assert not rig.events("store", "note", "special")
    assert rig.array("ended")[0] == 0
    assert rig.array("terminated")[1, 0]


def test_disabled_steps_on(kind: str) -> None:
    rig = Rig(kind, lanes=1, autoreset="disabled")
    rig.results[0] = ends()
    for _ in range(2):
        rig.lanes.post(None, OP_STEP)
        rig.block.run()
        rig.collect(1)
    assert len(rig.seen_actions) == 2
    assert not rig.events("special", "finish")


@pytest.mark.parametrize("info", [{"a": 1}, None, [], "x", 0], ids=repr)
def test_infos_that_are_not_empty_dicts_are_noted(kind: str, info: Any) -> None:
    rig = Rig(kind, lanes=1)
    rig.results[0] = (np.ones(3, np.float32), 1.0, False, False, info)
    rig.lanes.post(None, OP_STEP)
    rig.block.run()
    assert rig.events("note") == [("note", 0, 1, info)]
    assert rig.log[-1] == ("flush",)


class DictSubclass(dict[str, Any]):
    pass


@pytest.mark.parametrize("info", [{}, DictSubclass()], ids=["dict", "subclass"])
def test_empty_infos_are_not_noted(kind: str, info: Any) -> None:
    rig = Rig(kind, lanes=1)
    rig.results[0] = (np.ones(3, np.float32), 1.0, False, False, info)
    rig.lanes.post(None, OP_STEP)
    rig.block.run()
    assert not rig.events("note")


@pytest.mark.parametrize("publish_each", [False, True])
def test_flush_comes_after_the_ring(kind: str, publish_each: bool) -> None:
    """A full side channel may block in flush: the answer must be out by then."""
    rig = Rig(kind, lanes=3, publish_each=publish_each)
    rig.results = dict.fromkeys(range(3), (np.ones(3, np.float32), 1.0, False, False, {"a": 1}))
    answered = []
    flush = rig.callbacks()[5]

    def watching_flush() -> None:
        flush()
        answered.append((rig.array("answered") == 1).sum())

    callbacks = (*rig.callbacks()[:5], watching_flush)
    block = rig._make(
        "block", rig.slab, 0, 0, 3, 0, publish_each, twin.ACTION_SCALAR, (), [rig._step(i) for i in range(3)],
        rig.array("action.0"), callbacks, rig.bell, rig.bells[0],
    )  # fmt: skip
    rig.lanes.post(None, OP_STEP)
    block.run()
    assert answered[:3] == ([1, 2, 3] if publish_each else [3])


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (ValueError("bad joint"), ValueError),
        (SystemExit(3), SystemExit),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (None, TypeError),
        ((1, 2, 3, 4), TypeError),
        ((1, 2, 3, 4, 5, 6), TypeError),
        ([np.ones(3, np.float32), 1.0, False, False, {}], TypeError),
        ((np.ones(3, np.float32), None, False, False, {}), TypeError),
        ((np.ones(3, np.float32), "1.5", False, False, {}), TypeError),
        ((np.ones(3, np.float32), "x", False, False, {}), (TypeError, ValueError)),
        ((np.ones(3, np.float32), np.ones(2), False, False, {}), (TypeError, ValueError)),
        ((np.ones(3, np.float32), 1.0, np.ones(2), False, {}), ValueError),
        ((np.ones(3, np.float32), 1.0, False, np.ones(2), {}), ValueError),
    ],
    ids=lambda value: repr(value).replace("\n", "")[:60],
)
def test_a_fault_of_one_env_is_reported_and_the_others_step_on(kind: str, result: Any, error: Any) -> None:
    rig = Rig(kind, lanes=3)
    rig.results[1] = (lambda action: result) if not isinstance(result, BaseException) else result
    rig.lanes.post(None, OP_STEP)
    assert rig.block.run() == 3
    [(_, lane, slot, found)] = rig.events("failed")
    assert (lane, slot) == (1, 1)
    assert isinstance(found, error)
    assert rig.collect(3)[1] == [0, 1, 2]
    assert rig.log[-1] == ("flush",)
    if isinstance(result, BaseException):
        assert found is result
        assert found.__traceback__ is not None, "the message to the user is made from it"


@pytest.mark.parametrize("name", ["note", "finish", "special"])
def test_what_a_callback_raises_is_the_lanes_fault(kind: str, name: str) -> None:
    rig = Rig(kind, lanes=2, autoreset="same_step")
    rig.raising[name] = RuntimeError("callback")
    rig.results[0] = ends(info={"a": 1}) if name == "finish" else (np.ones(3, np.float32), 0, False, False, {"a": 1})
    rig.lanes.post(None, OP_RESET if name == "special" else OP_STEP)
    assert rig.block.run() == 2
    assert [type(entry[3]) for entry in rig.events("failed")] == [RuntimeError] * (2 if name == "special" else 1)


def test_what_failed_raises_ends_the_pass(kind: str) -> None:
    """Ctrl-C in the caller's own process: lanes before it are answered, it and those after it are not."""
    rig = Rig(kind, lanes=3)
    rig.results[1] = KeyboardInterrupt()
    rig.raising["failed"] = KeyboardInterrupt()  # type: ignore[assignment]
    rig.lanes.post(None, OP_STEP)
    with pytest.raises(KeyboardInterrupt):
        rig.block.run()
    assert rig.array("answered").tolist() == [1, 0, 0]
    rig.results.clear()
    assert rig.block.run() == 2, "the next pass does the rest"
    assert rig.collect(3)[1] == [0, 1, 2]


def test_what_flush_raises_comes_out(kind: str) -> None:
    rig = Rig(kind, lanes=1)
    rig.raising["flush"] = BrokenPipeError()
    rig.results[0] = (np.ones(3, np.float32), 0.0, False, False, {"a": 1})
    rig.lanes.post(None, OP_STEP)
    with pytest.raises(BrokenPipeError):
        rig.block.run()
    assert rig.collect(1)[1] == [0]


def test_a_block_steps_its_own_lanes_only(kind: str) -> None:
    rig = Rig(kind, lanes=5, workers=2)
    rig.lanes.post(None, OP_STEP)
    assert [block.run() for block in rig.blocks] == [3, 2]
    assert rig.collect(5)[1] == [0, 1, 2, 3, 4]
    assert rig.array("stats")[:, 0].tolist() == [3, 2]


def test_wait_ends_at_its_deadline(kind: str) -> None:
    rig = Rig(kind)
    assert rig.block.wait(0, 0) is False
    deadline = time.monotonic_ns() + 20_000_000
    assert rig.block.wait(deadline, 1000) is False
    assert time.monotonic_ns() >= deadline


# ---- memory --------------------------------------------------------------------------------------------------


def test_nothing_is_leaked(kind: str) -> None:
    rig = Rig(kind, lanes=2, obs=spaces.Dict(a=spaces.Discrete(2), b=BOX))
    observation, info, error = {"a": 1, "b": F32}, {"x": object()}, ValueError("again")
    rig.results = {0: (observation, 1.0, False, False, info), 1: error}
    watched = [observation, info, F32, rig.array("action.0"), info["x"]]

    def turn() -> None:
        rig.lanes.post(None, OP_STEP)
        rig.block.run()
        rig.collect(2)
        rig.log.clear()
        rig.seen_actions.clear()
        error.__traceback__ = None

    turn()
    before = [sys.getrefcount(value) for value in watched]
    for _ in range(50):
        turn()
    assert [sys.getrefcount(value) for value in watched] == before


def test_blocks_in_cycles_are_collected(kind: str) -> None:
    """The stepper holds the block, whose callbacks hold the stepper."""
    rig = Rig(kind)
    gone = weakref.ref(rig)
    del rig
    gc.collect()
    assert gone() is None


def test_bad_construction_is_refused() -> None:
    try:
        core = load("native")
    except ImportError as error:
        pytest.skip(f"the C extension was not built here ({error})")
    rig = Rig("native", lanes=2)
    memory, state, owner = rig.slab.memory, rig.state, rig.owner
    offsets = tuple([0] * 8)
    for args in [
        (),
        (memory, state[:1], owner, 2, 2, 1, offsets),
        (memory, state, owner[:1], 2, 2, 1, offsets),
        (b"read only", state, owner, 2, 2, 1, offsets),
        (memory, state, owner, 2, 2, 1, offsets[1:]),
    ]:
        with pytest.raises((TypeError, ValueError, BufferError)):
            core.Lanes(*args)
    steps, calls = [abs, abs], rig.callbacks()
    leaf = (0, 4, 12, "f", (3,), ())
    good: dict[str, Any] = {"leaves": (leaf,), "steps": steps, "callbacks": calls}
    for change in [
        {"leaves": (leaf[:3],)},
        {"leaves": ((*leaf[:4], ("x",), ()),)},
        {"leaves": ((*leaf[:5], "path"),)},
        {"leaves": [leaf]},
        {"steps": [abs]},
        {"steps": (abs, abs)},
        {"callbacks": calls[:5]},
    ]:
        a = {**good, **change}
        with pytest.raises((TypeError, ValueError)):
            core.Block(memory, 2, 0, 2, 0, False, 0, tuple([0] * 18), a["leaves"], a["steps"], None, a["callbacks"])


# ---- bounds --------------------------------------------------------------------------------------------------

NUMBERS = ["f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]


@pytest.fixture
def outside(kind: str) -> Any:
    return twin.outside if kind == "twin" else load(kind).outside


@pytest.mark.parametrize("dtype", NUMBERS)
def test_outside_finds_the_first(outside: Any, dtype: str) -> None:
    low, high = np.array([1, 10], dtype), np.array([5, 20], dtype)
    values = np.array([[1, 10], [5, 20], [3, 15]], dtype)
    letter = values.dtype.kind
    assert outside(letter, values, low, high) == -1
    for row, column, wrong in [(0, 0, 0), (0, 1, 9), (1, 0, 6), (2, 1, 21), (2, 0, 10)]:
        bad = values.copy()
        bad[row, column] = wrong
        assert outside(letter, bad, low, high) == 2 * row + column
    both = values.copy()
    both[1, 1] = both[2, 0] = 0
    assert outside(letter, both, low, high) == 3


@pytest.mark.parametrize("dtype", NUMBERS)
def test_outside_at_the_ends_of_the_type(outside: Any, dtype: str) -> None:
    about = np.iinfo(dtype) if dtype[0] in "iu" else np.finfo(dtype)
    values = np.array([about.min, 0, about.max], dtype)
    low, high = np.array(about.min, dtype), np.array(about.max, dtype)
    letter = values.dtype.kind
    assert outside(letter, values, low, high) == -1
    assert outside(letter, values, low, high - 1 if dtype[0] in "iu" else np.nextafter(high, low)) == 2
    if about.min < 0:
        assert outside(letter, values, np.zeros((), dtype), high) == 0


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_outside_with_nan_and_infinity(outside: Any, dtype: str) -> None:
    low, high = np.array(-np.inf, dtype), np.array(np.inf, dtype)
    assert outside("f", np.array([-np.inf, 0, np.inf], dtype), low, high) == -1
    assert outside("f", np.array([0, np.nan], dtype), low, high) == 1
    assert outside("f", np.array([np.inf], dtype), low, np.array(1, dtype)) == 0
    assert outside("f", np.array([-0.0], dtype), np.array(0, dtype), high) == -1


def test_outside_of_nothing(outside: Any) -> None:
    assert outside("f", np.zeros((0, 2)), np.zeros(2), np.ones(2)) == -1
    assert outside("f", np.zeros((3, 0)), np.zeros(0), np.ones(0)) == -1


def test_outside_says_what_it_cannot_do() -> None:
    try:
        core = load("native")
    except ImportError as error:
        pytest.skip(f"the C extension was not built here ({error})")
    half = np.zeros(3, np.float16)
    assert core.outside("f", half, half, half) == -2
    assert core.outside("b", half.astype(bool), half.astype(bool), half.astype(bool)) == -2
    assert core.outside("i", np.zeros(3, np.int64), np.zeros(3, np.int32), np.zeros(3, np.int32)) == -2
    assert core.outside("i", np.zeros(3, np.int64), np.zeros(3, np.int64), np.zeros(2, np.int64)) == -2
    assert core.outside("f", np.zeros(3), np.zeros(0), np.zeros(0)) == -2
    unaligned = np.zeros(17, np.uint8)[1:].view(np.int64)
    assert core.outside("i", unaligned, np.array(0), np.array(1)) == -2
    with pytest.raises((BufferError, ValueError)):
        core.outside("f", np.zeros(6)[::2], np.zeros(3), np.zeros(3))
    for args in [("f",), ("ff", half, half, half), ("f", None, half, half)]:
        with pytest.raises(TypeError):
            core.outside(*args)


# ---- the beginning of an episode -----------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [True, False])
def test_begin_writes_the_first_observation(kind: str, fresh: bool) -> None:
    rig = Rig(kind, lanes=3, frames=2)
    names = ("reward", "terminated", "truncated", "episode_return", "episode_length")
    for name in names:
        rig.array(name)[1, 2] = 1
    rig.array("status")[1, 2] = 3
    for name in ("ended", "run_return", "run_length"):
        rig.array(name)[2] = 1
    rig.block.begin(2, 1, np.array([1, 2, 3], np.float32), {}, fresh)
    assert rig.targets[0][1, 2].tolist() == [1, 2, 3]
    assert rig.array("began")[1].tolist() == [0, 0, 1]
    assert [rig.array(name)[1, 2] for name in names] == ([0] * 5 if fresh else [1] * 5)
    assert rig.array("status")[1, 2] == (0 if fresh else 3)
    assert [rig.array(name)[2] for name in ("ended", "run_return", "run_length")] == [0, 0, 0]
    assert rig.array("stats")[0, 2] == 1
    assert rig.events("note") == []


def test_begin_passes_on_what_store_and_note_say(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    rig.block.begin(0, 0, np.array([1, 2, 3], np.float64), {"a": 1}, True)
    assert rig.targets[0][0, 0].tolist() == [1, 2, 3]
    assert rig.events("note") == [("note", 0, 0, {"a": 1})]
    with pytest.raises(BadObservation):
        rig.block.begin(0, 0, np.zeros(4), {}, True)
    rig.raising["note"] = TypeError("info must be a dict")
    with pytest.raises(TypeError, match="info must be"):
        rig.block.begin(0, 0, np.zeros(3, np.float32), None, True)
    with pytest.raises(IndexError):
        rig.block.begin(2, 0, np.zeros(3, np.float32), {}, True)

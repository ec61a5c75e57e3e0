"""What the core counts, in C and in its twin: steps, episodes and where time goes. Times are compared, never judged."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from native.rig import Rig, ids
from shoal.native import counters
from shoal.native.counters import (
    LANE_LONGEST_NS,
    LANE_NS,
    LANE_STEPS,
    POOL_BATCHES,
    POOL_BEGAN_NS,
    POOL_CALLER_NS,
    POOL_COPY_NS,
    POOL_SINCE_NS,
    POOL_STRAGGLER_NS,
    POOL_WAIT_NS,
    POOL_WAKE_NS,
    POSTED_NS,
    STAT_BUSY_NS,
    STAT_PASSES,
    STAT_RESET_NS,
    STAT_STEPS,
    STAT_WAKE_NS,
    SUM_ENDED,
    SUM_LENGTH,
    SUM_RETURN,
    TIME_BUCKETS,
    bucket,
    bucket_edges,
)
from shoal.native.layout import IN_USE, OP_RESET, OP_STEP, POST_BUSY_LANE

pytestmark = pytest.mark.timeout(60)
MS = 1_000_000
OBS = np.zeros(3, np.float32)


def step_of(seconds: float) -> Any:
    def step(action: Any) -> Any:
        time.sleep(seconds)
        return OBS, 1.0, False, False, {}

    return step


def pool(rig: Rig) -> Any:
    return rig.array("pool_stats")


# ---- buckets -------------------------------------------------------------------------------------------------


def test_every_time_is_in_its_bucket() -> None:
    edges = bucket_edges()
    assert len(edges) == TIME_BUCKETS + 1
    assert (np.diff(edges) > 0).all()
    for ns in [*range(70), 1023, 1024, 1279, 1280, 10**6, 10**9, 2**36 - 1]:
        assert edges[bucket(ns)] <= ns < edges[bucket(ns) + 1]
    assert bucket(2**36) == bucket(2**60) == TIME_BUCKETS - 1


def test_a_bucket_is_no_wider_than_a_quarter_of_its_time() -> None:
    edges = bucket_edges()[4:]
    assert (np.diff(edges) <= edges[:-1] / 4).all()


@pytest.mark.parametrize("seconds", [0.0, 50e-6, 1e-3, 7e-3])
def test_a_step_is_counted_in_the_bucket_of_its_time(kind: str, seconds: float) -> None:
    rig = Rig(kind, lanes=3)
    rig.results[1] = step_of(seconds)
    rig.lanes.post(ids(1), OP_STEP)
    rig.block.run()
    steps, ns, longest = rig.array("lane_stats")[1].tolist()
    assert steps == 1
    assert ns == longest >= seconds * 1e9
    assert np.flatnonzero(rig.array("step_times")[0]).tolist() == [bucket(ns)]
    assert not rig.array("lane_stats")[[0, 2]].any()


# ---- the worker ----------------------------------------------------------------------------------------------


def test_steps_of_a_lane_add_up_and_the_longest_stays(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    for seconds in (0.0, 3e-3, 0.0):
        rig.results[0] = step_of(seconds)
        rig.lanes.post(None, OP_STEP)
        rig.block.run()
        rig.collect(2)
    lane_stats, stats = rig.array("lane_stats"), rig.array("stats")[0]
    assert lane_stats[:, LANE_STEPS].tolist() == [3, 3]
    assert 3 * MS <= lane_stats[0, LANE_LONGEST_NS] < lane_stats[0, LANE_NS]
    assert lane_stats[0, LANE_LONGEST_NS] > lane_stats[1, LANE_LONGEST_NS]
    assert rig.array("step_times")[0].sum() == stats[STAT_STEPS] == 6
    assert stats[STAT_PASSES] == 3
    assert lane_stats[:, LANE_NS].sum() <= stats[STAT_BUSY_NS]


def test_each_worker_counts_in_its_own_row(kind: str) -> None:
    rig = Rig(kind, lanes=7, workers=3)
    rig.lanes.post(ids(0, 1, 6), OP_STEP)
    for block in rig.blocks:
        block.run()
    assert rig.array("stats")[:, STAT_STEPS].tolist() == [2, 0, 1]
    assert rig.array("stats")[:, STAT_PASSES].tolist() == [1, 0, 1]
    assert rig.array("step_times").sum(axis=1).tolist() == [2, 0, 1]
    assert rig.array("lane_stats")[:, LANE_STEPS].tolist() == [1, 1, 0, 0, 0, 0, 1]


def test_resets_that_were_asked_for_are_no_steps(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    rig.lanes.post(None, OP_RESET)
    rig.block.run()
    stats = rig.array("stats")[0]
    assert stats[STAT_STEPS] == 2
    assert not rig.array("step_times").any()
    assert not rig.array("lane_stats").any()
    assert 0 < stats[STAT_RESET_NS] <= stats[STAT_BUSY_NS]


def test_an_automatic_reset_is_a_step_and_a_reset(kind: str) -> None:
    rig = Rig(kind, lanes=1)
    rig.results[0] = (OBS, 1.0, True, False, {})
    for turn in range(2):
        rig.lanes.post(None, OP_STEP)
        rig.block.run()
        assert (rig.array("stats")[0, STAT_RESET_NS] > 0) == (turn == 1)
        rig.collect(1)
    assert rig.array("lane_stats")[0, LANE_STEPS] == 2


def test_under_same_step_the_reset_is_part_of_the_step(kind: str) -> None:
    rig = Rig(kind, lanes=2, autoreset="same_step")
    rig.results[0] = (OBS, 1.0, False, True, {})
    rig.lanes.post(None, OP_STEP)
    rig.block.run()
    assert 0 < rig.array("stats")[0, STAT_RESET_NS] < rig.array("lane_stats")[0, LANE_NS]


@pytest.mark.parametrize("autoreset", ["next_step", "same_step", "disabled"])
def test_ended_episodes_are_summed_up(kind: str, autoreset: str) -> None:
    rig = Rig(kind, lanes=3, autoreset=autoreset)
    for reward, ends in [(1.0, False), (0.25, True)]:
        rig.results[0] = (OBS, reward, ends, False, {})
        rig.results[1] = (OBS, 2 * reward, False, ends, {})
        rig.lanes.post(None, OP_STEP)
        rig.block.run()
        rig.collect(3)
    sums = rig.array("episode_sums")[0]
    assert (sums[SUM_ENDED], sums[SUM_RETURN], sums[SUM_LENGTH]) == (2, 1.25 + 2.5, 4)


def test_waking_is_from_the_post_to_the_pass(kind: str) -> None:
    rig = Rig(kind, lanes=4, workers=2)
    rig.lanes.post(ids(0), OP_STEP)
    posted = rig.array("worker_bells").view(np.int64)[:, POSTED_NS]
    assert posted[0] > 0
    assert posted[1] == 0
    time.sleep(0.005)
    rig.block.run()
    assert posted[0] == 0
    assert rig.array("stats")[0, STAT_WAKE_NS] >= 5 * MS
    assert rig.array("stats")[1, STAT_WAKE_NS] == 0


def test_a_request_during_a_pass_waits_from_its_end_at_the_earliest(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    times = []

    def asks_for_the_other(action: Any) -> Any:
        times.append(time.monotonic_ns())
        rig.lanes.post(ids(1), OP_STEP)
        time.sleep(0.005)
        times.append(time.monotonic_ns())
        return OBS, 1.0, False, False, {}

    rig.results[0] = asks_for_the_other
    posted = time.monotonic_ns()
    rig.lanes.post(ids(0), OP_STEP)
    rig.block.run()
    rig.block.run()  # what the ring during the pass leads to; the C core has answered already
    began, ended = times
    assert rig.array("stats")[0, STAT_STEPS] == 2
    assert rig.array("worker_bells").view(np.int64)[0, POSTED_NS] == 0
    assert rig.array("stats")[0, STAT_WAKE_NS] <= (began - posted) + (time.monotonic_ns() - ended)


def test_a_pass_without_a_request_is_none(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    assert rig.block.run() == 0
    assert not rig.array("stats").any()


# ---- the caller ----------------------------------------------------------------------------------------------


def test_the_pool_begins_when_it_is_made(kind: str) -> None:
    before = time.monotonic_ns()
    rig = Rig(kind)
    assert before <= pool(rig)[POOL_BEGAN_NS] == pool(rig)[POOL_SINCE_NS] <= time.monotonic_ns()
    assert not pool(rig)[2:].any()


def test_the_callers_time_is_what_lies_between_its_calls(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    time.sleep(0.004)
    rig.lanes.arrive()
    rig.lanes.post(None, OP_STEP)
    assert pool(rig)[POOL_CALLER_NS] >= 4 * MS
    before = int(pool(rig)[POOL_CALLER_NS])
    rig.block.run()
    rig.collect(2)
    time.sleep(0.004)
    rig.lanes.handed()
    assert pool(rig)[POOL_COPY_NS] >= 4 * MS
    assert pool(rig)[POOL_CALLER_NS] == before
    time.sleep(0.004)
    rig.lanes.arrive()
    assert pool(rig)[POOL_CALLER_NS] >= before + 4 * MS
    assert pool(rig)[POOL_BATCHES] == 1


def test_copying_is_counted_once(kind: str) -> None:
    rig = Rig(kind, lanes=1)
    rig.lanes.handed()
    assert pool(rig)[POOL_COPY_NS] == 0
    rig.lanes.post(None, OP_STEP)
    rig.block.run()
    rig.collect(1)
    rig.lanes.handed()
    copied = int(pool(rig)[POOL_COPY_NS])
    assert copied > 0
    rig.lanes.handed()
    assert pool(rig)[POOL_COPY_NS] == copied


def test_a_wait_is_counted_whatever_it_brings(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    rig.lanes.post(None, OP_STEP)
    assert rig.collect(2, deadline_ns=time.monotonic_ns() + 50 * MS)[0][0] < 0
    assert pool(rig)[POOL_WAIT_NS] >= 4 * MS
    assert pool(rig)[POOL_BATCHES] == 0
    rig.results[0] = step_of(0.005)
    before = int(pool(rig)[POOL_WAIT_NS])
    rig.collect(2, run=rig.block.run)
    assert pool(rig)[POOL_WAIT_NS] - before >= 5 * MS
    assert pool(rig)[POOL_BATCHES] == 1
    assert 0 < pool(rig)[POOL_WAKE_NS] < pool(rig)[POOL_WAIT_NS]


def finish(rig: Rig, **at: int) -> Any:
    """Let lanes be done at these times, in ms after now; collect runs it as the caller's own block."""

    def run() -> int:
        now = time.monotonic_ns()
        for name, ms in at.items():
            rig.answer(int(name[1:]), at_ns=now + ms * MS)
        return len(at)

    return run


def test_stragglers_are_who_is_done_later_than_the_mean(kind: str) -> None:
    rig = Rig(kind, lanes=6, workers=3)
    rig.lanes.post(None, OP_STEP)
    rig.collect(6, run=finish(rig, l0=1, l1=10, l2=5, l3=40, l4=5, l5=70))  # workers: 10, 40, 70
    assert pool(rig)[POOL_STRAGGLER_NS] == 30 * MS


def test_one_worker_alone_waits_for_nobody(kind: str) -> None:
    rig = Rig(kind, lanes=3)
    rig.lanes.post(None, OP_STEP)
    rig.collect(3, run=finish(rig, l0=1, l1=2, l2=90))
    assert pool(rig)[POOL_STRAGGLER_NS] == 0


def test_nobody_straggles_while_others_have_work_to_do(kind: str) -> None:
    rig = Rig(kind, lanes=4, workers=2)
    rig.lanes.post(None, OP_STEP)
    rig.collect(2, run=finish(rig, l0=1, l2=60))
    assert pool(rig)[POOL_STRAGGLER_NS] == 0
    rig.collect(2, run=finish(rig, l1=1, l3=61))
    assert pool(rig)[POOL_STRAGGLER_NS] == 30 * MS


def test_nobody_straggles_before_the_caller_waits(kind: str) -> None:
    rig = Rig(kind, lanes=2, workers=2)
    rig.lanes.post(None, OP_STEP)
    rig.answer(0, at_ns=time.monotonic_ns() - 50 * MS)
    rig.answer(1, at_ns=time.monotonic_ns() - 10 * MS)
    rig.collect(2)
    assert pool(rig)[POOL_STRAGGLER_NS] == 0


def test_what_is_refused_is_not_counted(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    rig.lanes.post(None, OP_STEP)
    before = pool(rig).tolist()
    assert rig.lanes.post(None, OP_STEP) == POST_BUSY_LANE
    with rig.lanes:
        rig.lanes.arrive()
        assert rig.collect(1)[0][0] == IN_USE
    assert pool(rig).tolist() == before


def test_the_short_cut_counts_as_the_long_way_does() -> None:
    pytest.importorskip("shoal.native._core")
    rig = Rig("native", lanes=4)
    rig.use_action()
    time.sleep(0.004)
    rig.results[2] = step_of(0.005)
    rig.lanes.step(np.zeros(4, np.int64), rig.block.run, 0, -1)
    counts = pool(rig)
    assert counts[POOL_CALLER_NS] >= 4 * MS
    assert counts[POOL_WAIT_NS] >= 5 * MS
    assert counts[POOL_BATCHES] == 1
    assert rig.array("stats")[0, STAT_WAKE_NS] > 0
    rig.lanes.handed()
    assert counts[POOL_COPY_NS] > 0


def test_the_rows_have_room_for_all_that_is_counted() -> None:
    rig = Rig("twin", lanes=2, workers=2)
    assert rig.array("stats").shape == (2, counters.STAT_WIDTH)
    assert rig.array("step_times").shape == (2, TIME_BUCKETS)
    assert rig.array("lane_stats").shape == (2, counters.LANE_WIDTH)
    assert len(pool(rig)) > counters.POOL_RESTARTS

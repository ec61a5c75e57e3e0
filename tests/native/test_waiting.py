"""Whether waits spin is decided for all sides together; and no wake-up is lost, however waits begin."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from native.rig import Rig, ids, load
from shoal.native import layout, twin
from shoal.native.twin_spinning import (
    CALLER_SPINS,
    FIRST_GUESS_NS,
    FIRST_PATIENCE,
    HOLD_NS,
    LONGEST_SPUN_NS,
    MOST_PATIENCE,
    WINDOW_BATCHES,
    WINDOW_NS,
    WORKERS_SPIN,
    Trials,
)

pytestmark = pytest.mark.timeout(120)
US, MS = 1_000, 1_000_000
BOTH = CALLER_SPINS | WORKERS_SPIN


def new(way: int = BOTH, possible: int = BOTH) -> Trials:
    return possible, way, way, 0, 0, (0, 0, 0, 0), 0, FIRST_PATIENCE, 0, 0


@pytest.fixture
def core(kind: str) -> Any:
    return load(kind) or twin


@pytest.fixture
def native() -> str:
    pytest.importorskip("shoal.native._core")
    return "native"


# ---- the decision --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parties", "cores", "expected"),
    [
        (1, 1, BOTH),
        (2, 2, BOTH),
        (16, 16, BOTH),
        (3, 2, WORKERS_SPIN),  # a caller that sleeps leaves its core to a worker
        (17, 16, WORKERS_SPIN),
        (32, 16, WORKERS_SPIN),
        (33, 16, 0),  # far more workers than cores
        (3, 1, 0),
    ],
)
def test_who_spins_at_first(core: Any, parties: int, cores: int, expected: int) -> None:
    assert core.first_way(parties, cores) == expected


def test_a_long_wait_that_always_takes_the_same_is_slept_through_but_for_its_end(core: Any) -> None:
    rest_ns, spin_ns = core.rest_for(5 * MS, 50 * US, 0)
    assert 4 * MS < rest_ns < 5 * MS
    assert rest_ns + spin_ns > 5 * MS
    assert spin_ns < MS
    assert core.rest_for(5 * MS, 50 * US, 500 * US) == (0, 0)  # wake-ups are dear here
    assert core.rest_for(5 * MS, MS, 0) == (0, 0)  # so irregular that none can be foreseen


def usual_after(core: Any, waits: list[int]) -> int:
    estimate = 0, 0
    for ns in waits:
        estimate = core.learn(*estimate, ns)
    return int(estimate[0])


def test_stalls_of_some_milliseconds_do_not_make_waits_long(core: Any) -> None:
    waits = [50 * MS if i % 10 == 9 else 50 * US for i in range(1000)]
    assert 40 * US < usual_after(core, waits) < 150 * US


def test_waits_that_have_become_long_or_short_are_found_to_be_so(core: Any) -> None:
    assert usual_after(core, [50 * US] * 50 + [5 * MS] * 100) > 4 * MS
    assert usual_after(core, [5 * MS] * 100 + [50 * US] * 100) < 60 * US
    assert usual_after(core, []) == 0
    assert usual_after(core, [10 * MS]) <= 2 * FIRST_GUESS_NS


def test_the_twin_decides_as_the_core_does() -> None:
    compiled = pytest.importorskip("shoal.native._core")
    rng = random.Random(0)
    for possible in range(4):
        estimate, trials = (0, 0), new(rng.randrange(4) & possible, possible)
        for _ in range(20_000):
            ns = int(10 ** rng.uniform(0, 9)) if rng.random() < 0.2 else int(10 ** rng.uniform(4, 6))
            assert compiled.learn(*estimate, ns) == twin.learn(*estimate, ns)
            assert compiled.try_way(trials, ns) == twin.try_way(trials, ns)
            estimate, trials = twin.learn(*estimate, ns), twin.try_way(trials, ns)
            wake_ns = rng.randrange(100_000)
            assert compiled.rest_for(*estimate, wake_ns) == twin.rest_for(*estimate, wake_ns)
    for parties, cores in itertools.product(range(1, 40), range(1, 20)):
        assert compiled.first_way(parties, cores) == twin.first_way(parties, cores)


# ---- trials --------------------------------------------------------------------------------------------------


def ways(core: Any, cost: Callable[[int], float], batches: int, trials: Trials) -> tuple[list[int], Trials]:
    """The ways that so many batches went, each of which costs what `cost` says of its way."""
    gone = []
    for _ in range(batches):
        gone.append(trials[1])
        trials = core.try_way(trials, int(cost(trials[1])))
    return gone, trials


@pytest.mark.parametrize("best", range(4))
@pytest.mark.parametrize("first", range(4))
def test_the_fastest_way_is_kept_and_the_others_rarely_tried(core: Any, best: int, first: int) -> None:
    gone, _ = ways(core, lambda way: 400 * US if way == best else MS, 50_000, new(first))
    assert set(gone) == {0, 1, 2, 3}
    assert gone[-25_000:].count(best) > 24_500


@pytest.mark.parametrize("possible", range(4))
def test_only_sides_whose_waits_are_short_spin(core: Any, possible: int) -> None:
    gone, _ = ways(core, lambda way: MS - 100 * US * way, 20_000, new(possible, possible))
    assert set(gone) == {way for way in range(4) if not way & ~possible}
    assert gone[-10_000:].count(possible) > 9_500


def test_a_pool_whose_threads_lose_their_cores_sleeps(core: Any) -> None:
    gone, trials = ways(core, lambda way: 4 * MS if way else MS, 50_000, new())
    assert gone.count(0) > 47_000
    # and spins again when it has them
    gone, _ = ways(core, lambda way: (MS, 900 * US, 800 * US, 400 * US)[way], 50_000, trials)
    assert gone[-20_000:].count(BOTH) > 19_500


def test_noise_does_not_decide(core: Any) -> None:
    """Some batches take twenty times as long, and every few milliseconds the machine is slower or faster for all."""
    rng, batches, weather = random.Random(0), itertools.count(), 1.0

    def cost(way: int) -> float:
        nonlocal weather
        if next(batches) % 60 == 0:
            weather = rng.uniform(0.7, 1.4)
        return (200 * US if way == WORKERS_SPIN else 300 * US) * (20 if rng.random() < 0.02 else weather)

    gone, _ = ways(core, cost, 400_000, new())
    assert gone[-200_000:].count(WORKERS_SPIN) > 180_000


def test_a_way_that_was_better_than_the_best_is_now_is_tried_soon(core: Any) -> None:
    cost = (500 * US, 2 * MS, 2 * MS, 400 * US)
    _, trials = ways(core, lambda way: cost[way], 50_000, new())
    assert trials[2] == BOTH
    _, trials = ways(core, lambda way: MS if way == BOTH else cost[way], 900, trials)  # far fewer than its patience
    assert trials[2] == 0


def test_a_trial_that_is_hopeless_is_cut_short(core: Any) -> None:
    gone, _ = ways(core, lambda way: 400 * US if way == BOTH else 40 * MS, 50_000, new())
    trials = sum(one != BOTH and one != before for before, one in itertools.pairwise(gone))
    window = WINDOW_NS / (400 * US)  # batches
    assert 5 < trials <= 8 + len(gone) / window / MOST_PATIENCE + np.log2(MOST_PATIENCE)
    assert len(gone) - gone.count(BOTH) == trials * WINDOW_BATCHES / 4


# ---- bells ---------------------------------------------------------------------------------------------------


def soon() -> int:
    return time.monotonic_ns() + 60 * 10**9


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def sleeps(rig: Rig, worker: int = 0) -> int:
    return int(rig.array("stats")[worker, layout.STAT_SLEEPS])


def is_asleep(rig: Rig, worker: int) -> bool:
    return bool(rig.array("worker_bells")[worker, 2])


def test_a_request_to_all_workers_is_one_ring(native: str) -> None:
    rig = Rig(native, lanes=6, workers=3)
    rig.lanes.post(None, layout.OP_STEP)
    assert rig.array("crowd")[:2].tolist() == [1, 1]
    assert not rig.array("worker_bells").any()
    for block in rig.blocks:
        assert block.wait(soon(), 0) is True
        assert block.run() == 2
        assert block.wait(time.monotonic_ns() + MS, 0) is False


def test_sleepers_that_are_not_meant_sleep_on(kind: str) -> None:
    rig = Rig(kind, lanes=40, workers=40)  # more than there are bits to call them by
    woken: list[int] = []
    threads = [in_thread(lambda w=w: woken.append(w) if rig.blocks[w].wait(soon(), 0) else None) for w in range(40)]
    if kind == "native":
        until(lambda: all(is_asleep(rig, worker) for worker in range(40)))
    rig.lanes.post(ids(3, 38), layout.OP_STEP)
    until(lambda: len(woken) == 2)
    assert sorted(woken) == [3, 38]
    rig.lanes.ring(35)  # shares a bit with 3
    until(lambda: len(woken) == 3)
    assert woken[2] == 35
    for worker in range(40):
        rig.lanes.ring(worker)
    for thread in threads:
        thread.join(60)
    assert sorted(woken) == list(range(40))


def test_a_waiter_that_has_missed_often_spins_all_the_same(native: str) -> None:
    rig = Rig(native, lanes=1)
    for _ in range(20):
        assert rig.block.wait(time.monotonic_ns() + 20 * US, 10 * US) is False
    heard: list[bool] = []
    thread = in_thread(lambda: heard.append(rig.block.wait(soon(), 10**11)))
    rig.lanes.ring(0)
    thread.join(60)
    assert heard == [True]
    assert sleeps(rig) == 0


def test_sleeps_are_counted(kind: str) -> None:
    rig = Rig(kind, lanes=1)
    bell, lies_down = rig.bells[0], threading.Event()
    sleep, bell.sleep = bell.sleep, lambda timeout: (lies_down.set(), sleep(timeout))  # type: ignore[assignment]
    for count in (1, 2):
        lies_down.clear()
        thread = in_thread(lambda: rig.block.wait(soon(), 0))
        until(lambda: is_asleep(rig, 0) if kind == "native" else lies_down.is_set())
        rig.lanes.post(None, layout.OP_STEP)
        thread.join(60)
        assert sleeps(rig) == count
        rig.block.run()
        rig.collect(1)
    assert rig.block.wait(time.monotonic_ns() + MS, 0) is False
    assert sleeps(rig) == 2


def test_prepare_wakes_workers_which_then_spin(native: str) -> None:
    rig = Rig(native, lanes=2, workers=2)
    heard: list[bool] = []
    threads = [in_thread(lambda b=block: heard.append(b.wait(soon(), 0))) for block in rig.blocks]
    until(lambda: is_asleep(rig, 0) and is_asleep(rig, 1))
    rig.lanes.prepare(10**11)
    until(lambda: not is_asleep(rig, 0) and not is_asleep(rig, 1))
    assert not heard
    rig.lanes.post(None, layout.OP_STEP)
    for thread in threads:
        thread.join(60)
    assert heard == [True, True]
    assert (sleeps(rig, 0), sleeps(rig, 1)) == (0, 0)


def test_after_prepare_workers_fall_asleep_again(native: str) -> None:
    rig = Rig(native, lanes=1)
    thread = in_thread(lambda: rig.block.wait(soon(), 0))
    until(lambda: is_asleep(rig, 0))
    rig.lanes.prepare(MS)
    until(lambda: is_asleep(rig, 0))
    rig.lanes.ring(0)
    thread.join(60)
    assert not thread.is_alive()


def test_prepare_is_harmless(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    rig.lanes.prepare(0)
    assert rig.block.wait(time.monotonic_ns() + MS, 0) is False
    rig.lanes.post(None, layout.OP_STEP)
    rig.lanes.prepare(MS)
    assert rig.block.wait(soon(), 0) is True
    assert rig.block.run() == 2
    assert rig.collect(2)[1] == [0, 1]


def test_the_time_between_passes_is_learnt(kind: str) -> None:
    rig = Rig(kind, lanes=2)
    for _ in range(60):
        rig.lanes.post(None, layout.OP_STEP)
        assert rig.block.wait(soon(), 0) is True
        rig.block.run()
        rig.collect(2)
        time.sleep(0.002)
    assert rig.array("stats")[0, layout.STAT_IDLE_NS] > MS


def test_where_the_cores_do_not_suffice_nothing_spins(native: str) -> None:
    rig = Rig(native, lanes=4, workers=4)
    spin = rig.array("waiting")
    assert spin.tolist() == [0] * len(spin)
    rig.lanes.use_cores(4, 4)
    assert spin[layout.WAITING_SPIN_NS] == HOLD_NS
    rig.lanes.use_cores(6, 4)
    assert spin[layout.WAITING_SPIN_NS] == HOLD_NS
    rig.lanes.use_cores(9, 4)
    assert spin[layout.WAITING_SPIN_NS] == 0


def test_workers_whose_waits_are_long_sleep(native: str) -> None:
    rig = Rig(native, lanes=2, workers=2)
    rig.lanes.use_cores(2, 2)
    assert rig.array("waiting")[layout.WAITING_SPIN_NS] == HOLD_NS
    rig.array("stats")[:, layout.STAT_IDLE_NS] = 2 * LONGEST_SPUN_NS + 1
    rig.array("stats")[:, layout.STAT_IDLE_SPREAD_NS] = LONGEST_SPUN_NS
    rig.lanes.use_cores(2, 2)  # decides anew
    assert rig.array("waiting")[: layout.WAITING_SPIN_NS + 1].tolist() == [0, 0]
    rig.array("stats")[:, layout.STAT_IDLE_SPREAD_NS] = 0
    rig.lanes.use_cores(2, 2)
    assert rig.array("waiting")[layout.WAITING_REST_NS] > LONGEST_SPUN_NS  # all the same time: it can be foreseen


def test_a_deadline_ends_a_spin(native: str) -> None:
    rig = Rig(native, lanes=1)
    rig.lanes.post(None, layout.OP_STEP)
    assert rig.lanes.collect(1, None, 0, 10**11, rig.out, None)[0] == layout.COLLECT_TIMEOUT
    assert rig.lanes.collect(1, None, time.monotonic_ns() + MS, 10**11, rig.out, None)[0] == layout.COLLECT_TIMEOUT
    assert rig.block.wait(soon(), 0) is True
    rig.lanes.prepare(10**11)
    assert rig.block.wait(time.monotonic_ns() + MS, 10**11) is False


@pytest.mark.parametrize("spin_ns", [-1, 0, 100_000])
def test_no_wake_up_is_lost(kind: str, spin_ns: int) -> None:
    """Many short waits with random delays on both sides; a lost wake-up would be a wait for ever."""
    rig = Rig(kind, lanes=6, workers=3)
    rig.lanes.use_cores(3, 3)
    over = threading.Event()

    def work(worker: int) -> None:
        rng, block = random.Random(worker), rig.blocks[worker]
        while not over.is_set():
            if block.wait(-1, spin_ns):
                if rng.random() < 0.2:
                    time.sleep(rng.random() * 3e-4)
                block.run()

    threads = [in_thread(lambda w=w: work(w)) for w in range(3)]
    rng = random.Random(9)
    for turn in range(600):
        if rng.random() < 0.2:
            time.sleep(rng.random() * 5e-4)
        if rng.random() < 0.1:
            rig.lanes.prepare(rng.randrange(500_000))
        wanted = None if turn % 3 else ids(*sorted(rng.sample(range(6), rng.randint(1, 6))))
        assert rig.lanes.post(wanted, layout.OP_STEP) == layout.POST_OK
        need = 6 if wanted is None else len(wanted)
        assert rig.lanes.collect(need, None, soon(), spin_ns, rig.out, None)[0] == need
    over.set()
    for worker in range(3):
        rig.lanes.ring(worker)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()

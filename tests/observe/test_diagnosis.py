"""Shares, quantiles and the verdict, on counters made up for the purpose."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shoal.errors import SlowPoolWarning
from shoal.native import counters as c
from shoal.observe import diagnosis as words
from shoal.observe.review import REVIEWED, WARM_UP, Review
from shoal.observe.stats import Counts, PoolStats, quantile
from shoal.observe.words import duration

SECOND = 10**9


def made(
    *,
    wait: float = 0.9,
    caller: float = 0.0,
    copying: float = 0.0,
    infos: float = 0.0,
    stragglers: float = 0.0,
    waking: float = 0.0,
    resets: float = 0.0,
    batches: int = 1000,
    blocks: tuple[int, ...] = (4, 4),
    batch_size: int | None = None,
    backend: str = "processes",
    step_ms: Any = 0.1,
    slow: dict[int, float] | None = None,
    wakes: float = 0.0,
    sleeps: float = 0.0,
    busy: float | None = None,
) -> PoolStats:
    """Ten seconds of a pool: fractions of them, `step_ms` for each step (a list: in turn), `slow` for some envs."""
    total, lanes = 10 * SECOND, sum(blocks)
    pool = np.zeros(16, np.int64)
    for place, share in (
        (c.POOL_WAIT_NS, wait), (c.POOL_CALLER_NS, caller), (c.POOL_COPY_NS, copying),
        (c.POOL_STRAGGLER_NS, stragglers), (c.POOL_WAKE_NS, waking), (c.POOL_INFO_NS, infos),
    ):  # fmt: skip
        pool[place] = share * total
    pool[c.POOL_BATCHES] = batches
    workers = np.zeros((len(blocks), c.STAT_WIDTH), np.int64)
    workers[:, c.STAT_STEPS] = np.array(blocks) * batches
    workers[:, c.STAT_PASSES] = batches
    workers[:, c.STAT_BUSY_NS] = (wait - stragglers - waking if busy is None else busy) * total
    workers[:, c.STAT_SLEEPS] = sleeps * batches
    workers[:, c.STAT_RESET_NS] = resets * workers[:, c.STAT_BUSY_NS]
    workers[:, c.STAT_WAKE_NS] = wakes * total
    times = np.zeros((len(blocks), c.TIME_BUCKETS), np.int64)
    for ms in np.atleast_1d(step_ms):
        times[:, c.bucket(int(ms * 1e6))] += 100
    lane_stats = np.zeros((lanes, 3), np.int64)
    lane_stats[:, c.LANE_STEPS] = batches
    for lane in range(lanes):
        mean = (slow or {}).get(lane, float(np.mean(step_ms)))
        lane_stats[lane, c.LANE_NS] = mean * 1e6 * batches
    starts = np.cumsum([0, *blocks])
    ids = [list(range(start, start + size)) for start, size in zip(starts, blocks, strict=False)]
    counts = Counts(workers, np.zeros((len(blocks), 8)), times, lane_stats, pool)
    return PoolStats(10.0, backend, batch_size or lanes, ids, counts)


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "usable_cores", lambda: 2)


# ---- figures -------------------------------------------------------------------------------------------------


def test_shares_make_up_the_whole() -> None:
    shares = made(wait=0.6, caller=0.2, copying=0.1, stragglers=0.1, waking=0.05, resets=0.5, wakes=0.05).shares
    assert shares.stragglers == pytest.approx(0.1)
    assert shares.waking == pytest.approx(0.1)  # the caller's, and a worker's on average
    assert shares.resets == pytest.approx(0.2)
    assert shares.envs == pytest.approx(0.2)
    assert (shares.copying, shares.caller) == pytest.approx((0.1, 0.2))
    assert (shares.pool, shares.infos) == pytest.approx((0.1, 0.0))
    assert sum(vars(shares).values()) == pytest.approx(1)


def test_infos_are_no_part_of_copying() -> None:
    shares = made(wait=0.6, copying=0.3, infos=0.2).shares
    assert (shares.copying, shares.infos) == pytest.approx((0.1, 0.2))
    assert made(wait=0.6, copying=0.3, infos=0.9).shares.copying == 0.0
    assert sum(vars(shares).values()) == pytest.approx(1)


def test_a_part_is_never_more_than_the_whole() -> None:
    shares = made(wait=0.1, stragglers=0.3, waking=0.5, wakes=0.9, caller=0.9).shares
    assert (shares.stragglers, shares.waking, shares.envs) == pytest.approx((0.1, 0.0, 0.0))
    assert sum(vars(shares).values()) == pytest.approx(1)


@pytest.mark.parametrize("scale", [300, 10**4, 10**6, 10**9])
def test_quantiles_are_within_ten_percent(scale: int) -> None:
    times = np.random.default_rng(0).lognormal(0.0, 0.7, 5000) * scale
    row = np.zeros(c.TIME_BUCKETS, np.int64)
    for ns in times:
        row[c.bucket(int(ns))] += 1
    for q in (0.1, 0.5, 0.99):
        assert quantile(row, q) == pytest.approx(np.quantile(times, q) * 1e-9, rel=0.1)


def test_quantile_of_equal_times_and_of_none() -> None:
    row = np.zeros(c.TIME_BUCKETS, np.int64)
    assert quantile(row, 0.5) == 0.0
    row[c.bucket(1000)] = 7
    assert quantile(row, 0.5) == pytest.approx(1e-6, rel=0.13)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 ns"), (85e-9, "85 ns"), (1e-6, "1.0 us"), (4.12e-6, "4.1 us"), (42e-6, "42 us"), (0.00093, "930 us"),
     (0.012, "12 ms"), (0.99999, "1.0 s"), (75.0, "75 s")],
)  # fmt: skip
def test_durations_have_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ---- words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"batches": 9}, ["9 batches are too few"]),
        ({"caller": 0.9, "wait": 0.05}, ["the caller's own work takes 90%", "faster envs will not help"]),
        ({"caller": 0.7, "wait": 0.3}, ["takes 70%", "could step meanwhile: use batch_size < num_envs"]),
        ({"caller": 0.35, "wait": 0.6}, ["take turns: 35% and 60%", "batch_size < num_envs"]),
        (
            {"stragglers": 0.41, "slow": {3: 12.0}, "step_ms": 0.9},
            ["stragglers: 41% of the time; the slowest env is 3 (12 ms a step on average against 900 us)",
             "use batch_size < num_envs"],
        ),
        ({"stragglers": 0.41, "slow": {3: 12.0}, "batch_size": 6}, ["use a smaller batch_size"]),
        ({"stragglers": 0.3, "step_ms": [0.1] * 98 + [2.0] * 2}, ["steps vary (99th percentile 2", "median 1"]),
        ({"stragglers": 0.3, "blocks": (3, 2, 2), "step_ms": 5.0}, ["2 to 3 envs: use a multiple of 3"]),
        ({"stragglers": 0.3, "blocks": (2,) * 4}, ["4 workers share 2 cores: use fewer workers"]),
        ({"stragglers": 0.3}, ["something else using the cores?"]),
        ({"waking": 0.4}, ["waking takes 40%", "use more envs, fewer workers", '"hybrid" or "serial"']),
        ({"waking": 0.4, "backend": "hybrid"}, ['or backend="serial"']),
        ({"waking": 0.4, "wakes": 0.05}, ["takes 500 us to wake up: is something else using the cores?"]),
        ({"waking": 0.4, "blocks": (1,) * 5}, ["5 workers share 2 cores: use fewer workers"]),
        ({"copying": 0.3, "wait": 0.6}, ["copying takes 30%", "copy=False"]),
        ({"copying": 0.3, "infos": 0.25, "wait": 0.6}, ["infos take 25%", "numbers under the same keys"]),
        ({"wait": 0.6}, ["Shoal's own work takes 40%", "larger batches"]),
        ({"resets": 0.5}, ["resets take 45% of the time, the steps 45%"]),
        ({}, ["the envs take 90% of the time: faster envs or more cores will help"]),
        ({"slow": {6: 9.0}}, ["the envs take 90%", "the slowest env is 6 (9.0 ms"]),
        ({"blocks": (8,), "backend": "serial"}, ["on 1 of 2 cores", 'use backend="hybrid" or "processes"']),
        ({"blocks": (8,)}, ["use num_workers=2"]),
        ({"blocks": (1,), "backend": "serial"}, ["faster envs or more cores"]),
        ({"blocks": (8,), "backend": "jax"}, ["faster envs or more cores"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_the_verdict_names_what_matters_most(figures: dict[str, Any], says: list[str]) -> None:
    verdict = made(**figures).verdict
    for part in says:
        assert part in verdict
    assert "\n" not in verdict


def on_cores(monkeypatch: pytest.MonkeyPatch, cores: int, threads: int = 0) -> None:
    monkeypatch.setattr(words, "usable_cores", lambda: cores)
    monkeypatch.setattr(words, "torch_threads", lambda: threads)


SIXTEEN = {"blocks": (4,) * 16, "backend": "hybrid"}


@pytest.mark.parametrize(
    ("threads", "figures", "says"),
    [
        # Cores that differ: the others go on. Other programs: fewer workers leave them room.
        (0, {**SIXTEEN, "stragglers": 0.3}, ["some cores are slower", "use batch_size < num_envs, so that the others"]),
        (0, {**SIXTEEN, "stragglers": 0.3}, ["something else using the cores?; num_workers=12 leaves it room"]),
        (0, {**SIXTEEN, "waking": 0.3, "wakes": 0.1}, ["takes 1.0 ms to wake up", "num_workers=12 leaves it room"]),
        # More workers than cores.
        (0, {"blocks": (4,) * 20, "waking": 0.3}, ["20 workers share 16 cores: use fewer workers"]),
        # Twelve of sixteen may be just right.
        (0, {"blocks": (4,) * 12}, ["faster envs or more cores will help"]),
        (0, {"blocks": (4,) * 8}, ["on 8 of 16 cores: use num_workers=16"]),
        # The learner's threads.
        (16, {**SIXTEEN, "wait": 0.7, "stragglers": 0.3, "caller": 0.2}, ["torch's 16 threads and 16 workers share"]),
        (16, {**SIXTEEN, "wait": 0.7, "waking": 0.3, "caller": 0.2}, ["use torch.set_num_threads(1), or fewer"]),
        (4, {"blocks": (4,) * 12, "wait": 0.7, "waking": 0.3, "caller": 0.2}, ["before it sleeps again"]),
        (16, {**SIXTEEN, "stragglers": 0.3}, ["something else using the cores?"]),  # it does not compute at all
        # Workers that sleep while the caller computes.
        (0, {**SIXTEEN, "wait": 0.4, "waking": 0.15, "caller": 0.6, "sleeps": 1.0},
         ["waking takes 15%", "workers sleep while the caller is away for 6.0 ms: call pool.prepare()"]),
        (0, {**SIXTEEN, "wait": 0.4, "waking": 0.15, "caller": 0.6}, ["the caller's own work takes 60%"]),
        # Envs that are too cheap for workers.
        (0, {**SIXTEEN, "wait": 0.9, "waking": 0.6, "busy": 0.02},
         ["waits 9.0 ms for each batch, whose steps take 3.2 ms in all", 'backend="serial" would be faster']),
    ],
)  # fmt: skip
def test_the_verdict_of_many_cores(
    monkeypatch: pytest.MonkeyPatch, threads: int, figures: dict[str, Any], says: list[str]
) -> None:
    on_cores(monkeypatch, 16, threads)
    verdict = made(**figures).verdict
    for part in says:
        assert part in verdict


@pytest.mark.parametrize(
    "figures", [{"backend": "serial"}, {"backend": "ray"}, {"batch_size": 6}, {"busy": 0.4}, {"wait": 0.1}]
)
def test_where_serial_would_not_be_faster_that_is_not_said(figures: dict[str, Any]) -> None:
    given: dict[str, Any] = {"wait": 0.9, "busy": 0.1}
    assert "would be faster" in made(**given).verdict
    assert "would be faster" not in made(**{**given, **figures}).verdict


class Frames:
    """What a review is part of."""

    def __init__(self) -> None:
        self.count = 0

    def handed(self) -> None:
        self.count += 1


@pytest.mark.parametrize("busy", [0.1, 0.8])
def test_a_pool_that_is_slower_than_serial_says_so_once(busy: float) -> None:
    earlier, later = replace(made(wait=0.0, busy=0.0, batches=0), seconds=1e-3), made(wait=0.9, busy=busy)
    frames, figures = Frames(), iter([earlier, later])
    Review(frames, lambda: next(figures))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2 * (WARM_UP + REVIEWED)):
            frames.handed()
    assert frames.count == 2 * (WARM_UP + REVIEWED)
    assert [w.category for w in caught] == [SlowPoolWarning] * (busy == 0.1)
    assert frames.handed.__func__ is Frames.handed


def test_an_env_that_is_slower_by_next_to_nothing_is_not_blamed() -> None:
    assert "slowest env" not in made(step_ms=0.004, slow={0: 0.040}).verdict


def test_the_table_has_a_row_for_each_share_and_worker() -> None:
    text = str(made(blocks=(3, 2, 2), stragglers=0.2))
    assert text.startswith("7 envs, processes with 3 workers, batches of 7: 7,000 steps in 10 s, 700 steps/s\n\n")
    lines = text.splitlines()
    assert any(line.split() == ["waiting", "for", "stragglers", "20.0%", "2.0", "ms"] for line in lines)
    assert any(line.startswith(("0 ", "2 ")) and " 5..6 " in line for line in lines)
    assert lines[-1] == made(blocks=(3, 2, 2), stragglers=0.2).verdict
    assert all(len(line) <= 100 for line in lines[:-1])


def test_the_table_of_many_workers_is_cut() -> None:
    text = str(made(blocks=(1,) * 40))
    assert "(24 more workers" in text
    assert text.count("\n") < 40

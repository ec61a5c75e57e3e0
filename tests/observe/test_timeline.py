"""The time line of a pool: which env stepped when, in which worker; and the page that shows it."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.observe import timeline
from shoal.observe.html_report import page
from shoal.observe.timeline import Timeline

BATCHES = 20


def recorded(pool: shoal.Pool, batches: int = BATCHES) -> Timeline:
    recorder = pool.recorder()
    for _ in range(batches + 1):
        recorder.note()
        pool.step(np.zeros(pool.num_envs, int))
    recorder.note()
    return recorder.timeline


@pytest.mark.parametrize(("backend", "workers"), [("serial", 1), ("threads", 2), ("processes", 2), ("hybrid", 2)])
def test_every_step_is_a_bar_of_its_worker(backend: str, workers: int) -> None:
    with shoal.Pool("CartPole-v1", 7, backend=backend, num_workers=workers) as pool:
        pool.reset(seed=0)
        pool.step(np.zeros(7, int))
        began = time.monotonic_ns()
        found = recorded(pool)
        ended = time.monotonic_ns()
        blocks = [set(worker.env_ids) for worker in pool.workers]
    assert Counter(bar.env for bar in found.bars) == Counter(dict.fromkeys(range(7), BATCHES + 1))
    for worker, block in enumerate(blocks):
        own = sorted((bar for bar in found.bars if bar.worker == worker), key=lambda bar: bar.end)
        assert {bar.env for bar in own} == block
        assert all(began <= bar.start < bar.end <= ended for bar in own)
        assert all(earlier.end <= later.start for earlier, later in pairwise(own)), "a worker does one thing at a time"


def test_partial_batches_lose_no_step() -> None:
    with shoal.Pool("CartPole-v1", 6, batch_size=3, backend="processes", num_workers=2) as pool:
        pool.async_reset(seed=0)
        for _ in range(2):  # the answers to the resets
            batch = pool.recv()
            pool.send(np.zeros(3, int), batch.env_id)
        recorder, received = pool.recorder(), 0
        recorder.note()
        for _ in range(BATCHES):
            batch = pool.recv()
            recorder.note()
            received += len(batch.env_id)
            pool.send(np.zeros(3, int), batch.env_id)
    # What was received has a bar, unless it was done before the first note; some that are done were not received yet.
    assert received - 6 <= len(recorder.timeline.bars) <= received + 6


def test_many_lanes_are_shown_by_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "MOST_LANES", 4)
    with shoal.Pool("CartPole-v1", 8, backend="processes", num_workers=2) as pool:
        pool.reset(seed=0)
        found = recorded(pool)
    assert {(bar.worker, bar.env) for bar in found.bars} == {(0, -1), (1, -1)}
    assert len(found.bars) == 2 * (BATCHES + 1)


def test_a_closed_pool_has_no_recorder() -> None:
    pool = shoal.Pool("CartPole-v1", 1, backend="serial")
    pool.close()
    with pytest.raises(shoal.PoolClosed):
        pool.recorder()


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r"^const data = (.*);$", text, re.MULTILINE)
    assert found
    return dict(json.loads(found.group(1)))


def test_the_page_has_the_figures_and_needs_nothing_else() -> None:
    with shoal.Pool("CartPole-v1", 5, backend="processes", num_workers=2) as pool:
        pool.reset(seed=0)
        before = pool.stats()
        found = recorded(pool)
        stats = pool.stats() - before
    text = page("<b>CartPole</b></script>", "a plan & why", stats, found, {"cores": 2})
    assert not re.search(r"\[\[[A-Z]+\]\]", text)
    assert "<b>CartPole" not in text
    assert "&lt;b&gt;CartPole" in text
    assert not re.search(r"(src|href)\s*=\s*[\"'](?!data:)|https?://|@import|fetch\(", text)
    data = data_of(text)
    assert data["timeline"]["batches"] == BATCHES + 1
    assert [len(worker["bars"]) for worker in data["timeline"]["workers"]] == [
        3 * 3 * (BATCHES + 1),
        3 * 2 * (BATCHES + 1),
    ]
    assert sum(share["share"] for share in data["shares"]) == pytest.approx(1.0)
    assert len(data["envs"]) == 5
    assert [env[1] for env in data["envs"]] == sorted((env[1] for env in data["envs"]), reverse=True)


def test_a_page_without_a_time_line_is_a_page() -> None:
    with shoal.Pool("CartPole-v1", 2, backend="serial") as pool:
        pool.reset(seed=0)
        stats = pool.stats()
    assert data_of(page("x", "", stats, Timeline(), {}))["timeline"]["length"] == 0

"""Trials of plans with stand-ins: what "auto" makes of them, and that they run and change nothing of the user's."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from shoal.planning import building, probe
from shoal.planning.plan import Plan, _choose, _tried, predict
from shoal.planning.trials import PlanTrials
from shoal.worker.measurement import Measurement
from shoal.worker.stand_ins import Playback

COMPUTES = Measurement((6e-6,) * 100, 6e-6)
HEAVY = Measurement((500e-6,) * 100, 500e-6)
WAITS = Measurement((100e-6, 900e-6) * 50, 20e-6)
SPACES: Any = gymnasium.spaces.Box(-1, 1, (4,), np.float32), gymnasium.spaces.Discrete(2)


def tried(took: dict[tuple[str, int], float | None], count: int = 64, cores: int = 16, **options: Any) -> Plan:
    """The plan for envs that compute for a short time, if trials take so many seconds; others fail."""
    given = shoal.options.PoolOptions(**options)
    plan = _choose(COMPUTES, count, count, cores, given.num_workers, given.isolate)
    return _tried(plan, lambda *one: took.get(one), count, cores, given)


def test_the_trial_decides_between_numbers_of_workers() -> None:
    assert tried({("hybrid", 16): 90e-6, ("hybrid", 15): 50e-6, ("hybrid", 12): 80e-6}).num_workers == 15
    plan = tried({("hybrid", 16): 60e-6, ("hybrid", 12): 59.5e-6, ("processes", 15): 90e-6})
    assert (plan.backend, plan.num_workers) == ("hybrid", 12)
    assert plan.expected == pytest.approx(64 / 59.5e-6)
    assert "expected 1,075,630 steps/s" in plan.reason


def test_serial_is_chosen_where_workers_are_tried_and_slow() -> None:
    plan = tried({("hybrid", workers): 10e-3 for workers in (12, 15, 16)})
    assert (plan.backend, plan.num_workers) == ("serial", 1)
    assert plan.expected == pytest.approx(64 / predict(COMPUTES, "serial", 1, 64, 64, 16))
    assert tried({("processes", 16): 10e-3}, isolate=True).backend == "processes"


def test_where_no_trial_could_be_run_the_prediction_stays() -> None:
    assert tried({}) == _choose(COMPUTES, 64, 64, 16, None, False)


@pytest.mark.parametrize(
    ("measured", "count", "cores"), [(HEAVY, 64, 16), (WAITS, 64, 2), (Measurement((1e-6,), 1e-6), 2, 2)]
)
def test_long_batches_waiting_envs_and_serial_pools_are_not_tried(
    measured: Measurement, count: int, cores: int
) -> None:
    def run(backend: str, workers: int) -> float:
        raise AssertionError("this must not be tried")

    plan = _choose(measured, count, count, cores, None, False)
    assert _tried(plan, run, count, cores, shoal.options.PoolOptions()) is plan


def test_stand_ins_run_in_every_backend_and_leave_the_users_generators_alone() -> None:
    recording = probe.Recording(SPACES, [(np.zeros(4, np.float32), {"x": 1.0}), (np.ones(4, np.float32), {})])
    random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    trials = PlanTrials(recording, Measurement((1e-6, 5e-6), 3e-6), 5, shoal.options.PoolOptions(), building.Opened)
    for backend in ("serial", "hybrid", "processes"):
        seconds = trials.seconds(backend, 1 if backend == "serial" else 2)
        assert seconds is not None
        assert seconds > 0
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]


def test_what_cannot_be_run_has_no_time() -> None:
    recording = probe.Recording(SPACES, [(np.zeros(7, np.float32), {})])  # no observation of this space
    trials = PlanTrials(recording, COMPUTES, 2, shoal.options.PoolOptions(), building.Opened)
    assert trials.seconds("serial", 1) is None


def test_stand_ins_give_the_answers_in_their_order() -> None:
    answers = [(np.full(4, i, np.float32), {"i": i}) for i in range(3)]
    env = Playback(SPACES, answers, (0.0, 1e-6))
    assert [env.step(0)[4]["i"] for _ in range(5)] == [0, 1, 2, 0, 1]

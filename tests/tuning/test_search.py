"""The search of `shoal.tune`, over a lab in which every rate is known."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gymnasium
import pytest

from shoal.tuning.candidates import Candidate, EnvCost, Limits, all_candidates, in_order, neighbours
from shoal.tuning.lab import LabLost
from shoal.tuning.result import TuneResult
from shoal.tuning.search import Search
from shoal.worker.measurement import Measurement

MIB = 2**20
COMPUTES = EnvCost(Measurement((5e-6,) * 50, 5e-6), 1e-4, 1e-3, 20 * MIB, MIB)
WAITS = EnvCost(Measurement((1e-3,) * 50, 20e-6), 1e-4, 1e-3, 20 * MIB, MIB)
SLOW = EnvCost(Measurement((5.0,) * 3, 5.0), 1.0, 2.0, 20 * MIB, MIB)
ALL = ("serial", "threads", "processes", "hybrid")


def limits(num_envs: int | None = None, batch_size: Any = None, backends: Any = ALL, cores: int = 2) -> Limits:
    return Limits(num_envs, batch_size, backends, 0.0, None, cores)


class KnownLab:
    """Answers at once with the rate that a function gives for the candidate; raises what that raises."""

    def __init__(self, cost: EnvCost, rate: Callable[[Candidate], float]):
        self.cost, self.rate = cost, rate
        self.open: dict[int, Candidate] = {}
        self.most_memory, self.runs, self.closed = 0, 0, False

    def prepare(self) -> None:
        """It has no process to start."""

    def call(self, name: str, *arguments: Any, timeout: float) -> Any:
        try:
            return getattr(self, name)(*arguments)
        except LabLost:
            self.open.clear()
            raise

    def measure(self) -> EnvCost:
        return self.cost

    def start(self, number: int, candidate: Candidate) -> float:
        self.open[number] = candidate
        self.most_memory = max(self.most_memory, sum(one.memory(self.cost) for one in self.open.values()))
        return 0.001

    def time(self, number: int, warm: float, seconds: float) -> float | str:
        self.runs += 1
        try:
            return self.rate(self.open[number])
        except ValueError as error:
            return str(error)

    def end(self, number: int) -> None:
        self.open.pop(number, None)

    def close(self, at_once: bool = False) -> None:
        self.closed = True


def search(
    rate: Callable[[Candidate], float], cost: EnvCost = COMPUTES, num_envs: int | None = 8, **options: Any
) -> tuple[TuneResult, KnownLab]:
    """Run a search in a known lab."""
    made = Search(lambda: gymnasium.make("CartPole-v1"), num_envs, **options)
    lab = KnownLab(cost, rate)
    made._lab = lab  # type: ignore[assignment]
    made.limits = replace(made.limits, cores=2)  # whatever this machine has
    made.run()
    assert lab.closed
    return made.result(), lab


def chosen(result: TuneResult) -> tuple[Any, ...]:
    plan = result.plan
    return plan.backend, plan.num_workers, plan.num_envs, plan.batch_size, plan.spin


# ---- candidates ----------------------------------------------------------------------------------------------


def test_what_the_user_fixes_is_kept() -> None:
    found = all_candidates(WAITS, limits(7, 3, ("processes", "threads")))
    assert {(one.num_envs, one.batch_size) for one in found} == {(7, 3)}
    assert {one.backend for one in found} == {"processes", "threads"}
    assert {one.num_workers for one in found if one.backend == "threads"} == {1, 2, 4, 7}
    assert {one.num_envs for one in all_candidates(COMPUTES, limits(batch_size=6))} == {6, 12, 24}
    assert not any(one.partial for one in all_candidates(COMPUTES, limits(batch_size="all")))


@pytest.mark.parametrize("cores", [1, 2, 3, 16, 2000])
@pytest.mark.parametrize("num_envs", [None, 1, 2, 7])
def test_candidates_can_be_plans(cores: int, num_envs: int | None) -> None:
    for cost in (COMPUTES, WAITS):
        found = all_candidates(cost, limits(num_envs, cores=cores))
        assert Candidate("serial", 1, num_envs or cores, num_envs or cores) in found
        for one in found:
            plan = one.plan()
            assert 1 <= plan.num_workers <= one.num_envs
            assert one.backend != "hybrid" or plan.num_workers > 1
            assert one.rate(cost, limits(num_envs, cores=cores)) > 0


def test_kinds_take_turns_and_the_most_promising_of_each_comes_first() -> None:
    some = limits(64)
    found = all_candidates(WAITS, some)
    ordered = in_order(found, lambda one: one.rate(WAITS, some))
    assert sorted(ordered, key=str) == sorted(found, key=str)
    kinds = len({(one.backend, one.batch_size) for one in found})
    assert len({(one.backend, one.batch_size) for one in ordered[:kinds]}) == kinds
    first = ordered[0]
    assert first.rate(WAITS, some) > 10 * Candidate("serial", 1, 64, 64).rate(WAITS, some)


def test_neighbours_differ_in_one_number() -> None:
    found = all_candidates(COMPUTES, limits())
    near = set(neighbours(Candidate("processes", 2, 64, 32), found))
    assert Candidate("processes", 2, 128, 64) in near  # the same part of twice as many
    assert Candidate("processes", 2, 32, 16) in near
    assert Candidate("processes", 4, 64, 32) in near
    assert Candidate("processes", 2, 64, 64) in near
    assert near <= set(found)


def test_a_policy_costs_less_where_envs_go_on_meanwhile() -> None:
    slow = Limits(8, None, ALL, 0.01, None, 2)
    partial, full = Candidate("processes", 2, 8, 4), Candidate("processes", 2, 8, 8)
    heavy = EnvCost(Measurement((2e-3,) * 9, 2e-3), 0.0, 0.0, 0, 0)
    assert partial.rate(heavy, slow) > 1.2 * 4 / 8 * full.rate(heavy, slow)
    assert full.rate(heavy, slow) < full.rate(heavy, limits(8))


# ---- the search ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("best", [("serial", 1, 8), ("threads", 2, 4), ("processes", 4, 2), ("hybrid", 2, 8)])
def test_the_best_is_found_whatever_was_expected(best: tuple[str, int, int]) -> None:
    result, _ = search(lambda one: 1500.0 if (one.backend, one.num_workers, one.batch_size) == best else 1000.0)
    backend, workers, batch = best
    assert chosen(result) == (backend, workers, 8, batch if batch < 8 else None, None)
    assert "tuned: 1,500 steps/s" in result.plan.reason
    assert result.table[0].candidate.backend == backend
    assert result.plan.measured == COMPUTES.measured


def test_among_equals_the_simplest_is_chosen() -> None:
    result, _ = search(lambda one: 1000.0)
    assert chosen(result) == ("serial", 1, 8, None, None)


def test_fewer_envs_are_preferred_where_more_gain_next_to_nothing() -> None:
    gains = {2: 0.5, 4: 0.9, 8: 0.985, 16: 0.99}
    result, _ = search(lambda one: 1000 * gains.get(one.num_envs, 1.0), num_envs=None, batch_size="all")
    assert result.plan.num_envs == 8


def test_spinning_is_changed_only_where_that_gains_something() -> None:
    result, _ = search(lambda one: 1000.0 * (1 + (one.backend == "hybrid")) * (1.1 if one.spin == (0, 0) else 1.0))
    assert chosen(result)[0] == "hybrid"
    assert result.plan.spin == (0, 0)
    result, _ = search(lambda one: 1000.0 * (1 + (one.backend == "hybrid")) * (1.01 if one.spin == (0, 0) else 1.0))
    assert result.plan.spin is None


def test_noise_does_not_pick_a_loser() -> None:
    noise = random.Random(1)

    def rate(one: Candidate) -> float:
        good = one.backend == "processes" and not one.partial
        return (1300.0 if good else 1000.0) * (0.3 if noise.random() < 0.25 else noise.uniform(0.95, 1.0))

    for _ in range(5):
        result, _ = search(rate, backends=("serial", "processes"))
        assert (result.plan.backend, result.plan.batch_size) == ("processes", None)


def test_who_fails_is_out_and_says_why() -> None:
    def rate(one: Candidate) -> float:
        if one.backend == "hybrid":
            raise LabLost("its process died (SIGSEGV)")
        if one.backend == "threads":
            raise ValueError("RuntimeError: only in the main thread")
        return 1000.0 if one.backend == "processes" else 10.0

    result, _ = search(rate)
    assert result.plan.backend == "processes"
    failed = [trial for trial in result.table if trial.state == "failed"]
    notes = {trial.candidate.backend: trial.note for trial in failed}
    assert notes == {"hybrid": "its process died (SIGSEGV)", "threads": "RuntimeError: only in the main thread"}
    assert "x" in str(result.map())


def test_a_backend_that_costs_the_lab_its_life_again_and_again_is_left_alone() -> None:
    def rate(one: Candidate) -> float:
        if one.backend == "threads":
            raise LabLost("no answer within 4 s")
        return 1000.0

    result, _ = search(rate, WAITS)
    states = [trial.state for trial in result.table if trial.candidate.backend == "threads"]
    assert states.count("failed") == 2
    assert set(states) == {"failed", "not tried"}


def test_who_fails_late_is_out_too() -> None:
    left = 3

    def rate(one: Candidate) -> float:
        nonlocal left
        if one.backend == "hybrid":
            left -= 1
            if left < 0:
                raise LabLost("died at last")
            return 5000.0
        return 1000.0

    result, _ = search(rate, backends=("serial", "hybrid"))
    assert result.plan.backend == "serial"


def test_a_limit_of_memory_keeps_candidates_from_being_started() -> None:
    started = []
    result, lab = search(lambda one: started.append(one) or 1000.0 * one.num_workers, max_memory=50 * MIB)
    assert max(one.processes for one in started) == 2
    assert {trial.candidate.processes for trial in result.table if trial.state == "too large"} == {4, 8}
    assert lab.most_memory <= 50 * MIB
    with pytest.raises(ValueError, match="max_memory: 5 MiB is too little, the smallest plan takes 27 MiB"):
        search(lambda one: 1.0, max_memory=5 * MIB)


def test_who_is_late_because_the_time_is_over_has_not_failed() -> None:
    made = Search(lambda: gymnasium.make("CartPole-v1"), 8, backends=("serial", "hybrid"), batch_size="all")
    finals = 0

    def rate(one: Candidate) -> float:
        nonlocal finals
        finals += bool(made._finals)
        if one.backend == "hybrid" and finals:
            made._seconds = 0.0  # as if it had taken all the time that was left
            raise LabLost("no answer within 1 s")
        return 2000.0 if one.backend == "hybrid" else 1000.0

    lab = KnownLab(COMPUTES, rate)
    made._lab = lab  # type: ignore[assignment]
    made.limits = replace(made.limits, cores=2)
    made.run()
    assert made.result().plan.backend == "hybrid"
    assert {trial.state for trial in made.result().table if trial.rates} == {"ran"}


def test_what_takes_too_long_is_only_predicted() -> None:
    result, lab = search(lambda one: 1.0, SLOW, 64, seconds=3.0)
    assert lab.runs == 0
    assert "no time to try it" in result.plan.reason
    assert result.plan.num_envs == 64
    assert result.plan.backend in ("processes", "hybrid")


def test_when_nothing_runs_it_says_so() -> None:
    def rate(one: Candidate) -> float:
        raise ValueError("RuntimeError: no display")

    with pytest.raises(RuntimeError, match=r"no trial came to an end\. .*no display"):
        search(rate)


def test_an_interrupt_leaves_what_was_found() -> None:
    runs = 0

    def rate(one: Candidate) -> float:
        nonlocal runs
        runs += 1
        if runs > 4:
            raise KeyboardInterrupt
        return 100.0 * runs

    made = Search(lambda: gymnasium.make("CartPole-v1"), 8)
    lab = KnownLab(COMPUTES, rate)
    made._lab = lab  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert lab.closed
    result = made.result()
    assert "tuned: 400 steps/s" in result.plan.reason
    assert sum(trial.state == "waiting" for trial in result.table) > 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_envs": 0}, "num_envs"),
        ({"batch_size": 9}, "batch_size"),
        ({"batch_size": "some"}, "batch_size"),
        ({"backends": ()}, "backends"),
        ({"backends": "serial"}, "backends"),
        ({"backends": ("jax",)}, "backends"),
        ({"backends": ("serial",), "isolate": True}, "isolate"),
        ({"policy_latency": -1.0}, "policy_latency"),
        ({"max_memory": 0}, "max_memory"),
        ({"seconds": 0}, "seconds"),
    ],
    ids=str,
)
def test_senseless_limits_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Search("CartPole-v1", **{"num_envs": 8, **options})


def test_the_map_shows_batches_or_envs() -> None:
    result, _ = search(lambda one: 1000.0 if one.partial else 500.0)
    text = str(result.map())
    assert "envs in a batch     2     4     8" in text
    assert "processes x2      100   100    50" in text
    result, _ = search(lambda one: 10.0 * one.num_envs, num_envs=None, backends=("serial",), batch_size="all")
    rows = [line.split() for line in str(result.map()).splitlines()]
    assert ["envs", *map(str, sorted({t.candidate.num_envs for t in result.table}))] in rows
    assert next(row for row in rows if row[:1] == ["serial"])[-1] == "100"

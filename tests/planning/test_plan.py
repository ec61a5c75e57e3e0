"""The plan: what "auto" chooses from a measurement, and what is taken as asked for."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import shoal
from shoal.backends import registry
from shoal.backends.backend import BackendSetup
from shoal.backends.threads import MOST_THREADS
from shoal.envs.adapt import adapt
from shoal.planning import building, probe
from shoal.planning.plan import LATE, Plan, _choose, fixed_plan, predict, worker_counts
from shoal.support.cores import cores_beside, torch_fills_cores, usable_cores
from shoal.worker import measurement
from shoal.worker.measurement import KEPT, Measurement, Overhead, _thinned, time_steps

COMPUTES = Measurement((6e-6,) * 100, 6e-6)
HEAVY = Measurement((500e-6,) * 100, 500e-6)
WAITS = Measurement(tuple(np.random.default_rng(0).lognormal(-7.4, 1.0, 200).tolist()), 20e-6)


class Napping(gymnasium.Env[np.ndarray, np.int64]):
    """Waits in each step."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.002)
        return np.zeros(2, np.float32), 1.0, False, False, {}


class OneShot(Napping):
    """Its episodes have one step, and another one is refused."""

    over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.over = False
        return super().reset(seed=seed)

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert not self.over, "reset was due"
        self.over = True
        return np.zeros(2, np.float32), 1.0, True, False, {}


class Broken(Napping):
    """Raises in its first step."""

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        raise ZeroDivisionError("in the probe")


@pytest.mark.parametrize(
    ("measured", "count", "cores", "isolate", "backend", "workers"),
    [
        (COMPUTES, 1, 2, False, "serial", 1),
        (COMPUTES, 8, 2, False, "hybrid", 2),
        (COMPUTES, 1024, 2, False, "hybrid", 2),
        (COMPUTES, 1024, 16, False, "hybrid", 16),
        (COMPUTES, 8, 1, False, "serial", 1),
        (COMPUTES, 64, 2, True, "processes", 2),
        (HEAVY, 8, 2, False, "hybrid", 2),
        (HEAVY, 3, 8, False, "hybrid", 3),
        (HEAVY, 1, 8, True, "processes", 1),
    ],
)
def test_envs_that_compute_get_a_worker_for_each_core(
    measured: Measurement, count: int, cores: int, isolate: bool, backend: str, workers: int
) -> None:
    plan = _choose(measured, count, count, cores, None, isolate)
    assert (plan.backend, plan.num_workers) == (backend, workers)


@pytest.mark.parametrize("count", [8, 64, 1024])
@pytest.mark.parametrize("isolate", [False, True])
def test_envs_that_wait_get_more_workers_than_cores(count: int, isolate: bool) -> None:
    plan = _choose(WAITS, count, count, 2, None, isolate)
    assert plan.backend in (("processes",) if isolate else ("threads", "processes"))
    assert plan.num_workers >= min(count, 8)
    serial = predict(WAITS, "serial", 1, count, count, 2)
    assert predict(WAITS, plan.backend, plan.num_workers, count, count, 2) < serial / 2


@pytest.mark.parametrize(("count", "cores", "workers"), [(64, 2, 2), (1024, 16, 16), (3, 8, 3)])
def test_without_the_gil_envs_that_compute_get_threads(
    monkeypatch: pytest.MonkeyPatch, count: int, cores: int, workers: int
) -> None:
    monkeypatch.setattr("sys._is_gil_enabled", lambda: False, raising=False)
    plan = _choose(HEAVY, count, count, cores, None, False)
    assert (plan.backend, plan.num_workers) == ("threads", workers)
    assert "without the GIL, so threads compute side by side" in plan.reason
    assert _choose(HEAVY, count, count, cores, None, True).backend == "processes"
    assert registry.find("threads").spin_times() == registry.find("processes").spin_times()
    assert _choose(COMPUTES, 1, 1, cores, None, False).backend == "serial"
    monkeypatch.setattr("sys._is_gil_enabled", lambda: True)
    assert _choose(HEAVY, count, count, cores, None, False).backend == "hybrid"
    assert registry.find("threads").spin_times() == (0, 0)


def test_a_given_number_of_workers_is_kept() -> None:
    assert _choose(HEAVY, 64, 64, 2, 5, False).num_workers == 5
    assert _choose(HEAVY, 3, 3, 2, 5, True).num_workers == 3


def test_the_measurement_tells_waiting_from_computing() -> None:
    assert time_steps(Napping()).waiting > 0.8
    computing = time_steps(gymnasium.make("CartPole-v1"))
    assert computing.waiting < 0.2
    assert len(computing.wall) > 100


def test_auto_measures_in_a_process_and_says_what_it_chose() -> None:
    with shoal.Pool(Napping, 6) as pool:
        assert pool.plan.backend in ("threads", "processes")
        assert pool.plan.measured is not None
        assert pool.plan.measured.mean > 0.0015
        assert pool.plan.expected is not None
        assert f"expected {pool.plan.expected:,.0f} steps/s" in pool.plan.reason
        assert "waiting" in str(pool.plan)
        assert pool.plan.num_workers == 6
        pool.reset(seed=0)
        assert pool.step(np.zeros(6, np.int64)).reward.tolist() == [1.0] * 6


class Guarded(Napping):
    """Refuses to be reset without options."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if options is None:
            raise KeyError("level")
        return super().reset(seed=seed)


class Crashing(Napping):
    """Ends its process in its first step."""

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        os._exit(3)


@pytest.mark.parametrize(("kind", "says"), [(Broken, "in the probe"), (Guarded, "level"), (Crashing, "exit code 3")])
def test_an_env_that_cannot_be_measured_is_run_in_processes(kind: type[Napping], says: str) -> None:
    with shoal.Pool(kind, 4) as pool:
        assert pool.plan.backend == "processes"
        assert pool.plan.num_workers == min(usable_cores(), 4)
        assert pool.plan.reason.startswith("it could not be measured")
        assert says in pool.plan.reason
        if kind is Guarded:
            pool.reset(options={"level": 1})
            assert pool.step(np.zeros(4, np.int64)).reward.tolist() == [1.0] * 4


def test_an_env_that_raises_is_told_of_when_the_user_steps_it() -> None:
    with shoal.Pool(Broken, 4) as pool:
        pool.reset()
        with pytest.raises(ZeroDivisionError, match="in the probe"):
            pool.step(np.zeros(4, np.int64))


def test_the_first_env_is_not_the_one_that_is_measured(tmp_path: Path) -> None:
    def first() -> Any:
        (tmp_path / str(os.getpid())).touch()  # as a script that records a video of env 0
        return gymnasium.make("CartPole-v1")

    def other() -> Any:
        return gymnasium.make("CartPole-v1")

    with shoal.Pool([first, other, other]) as pool:
        assert pool.plan.measured is not None
        assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("isolate", [False, True])
def test_a_single_env_is_not_measured(isolate: bool) -> None:
    with shoal.Pool(Napping, 1, isolate=isolate) as pool:
        assert pool.plan == Plan("processes" if isolate else "serial", 1, "there is one env")


def test_auto_runs_in_this_process_what_cannot_be_sent_to_another() -> None:
    lock = __import__("threading").Lock()
    with shoal.Pool(lambda: (lock, Napping())[1], 2) as pool:
        assert pool.plan.backend == "serial"
        assert "lock" in pool.plan.reason
    with pytest.raises(shoal.BadEnv, match="lock"):
        shoal.Pool(lambda: (lock, Napping())[1], 2, isolate=True)


@pytest.mark.parametrize(
    ("backend", "workers", "count", "expected"),
    [
        ("serial", 7, 4, Plan("serial", 1, "as asked for")),
        ("processes", 3, 7, Plan("processes", 3, "as asked for")),
        ("processes", 9, 7, Plan("processes", 7, "as asked for")),
        ("hybrid", 2, 1, Plan("hybrid", 1, "as asked for")),
        ("threads", None, 5, Plan("threads", 5, "as asked for")),
        ("threads", None, 5000, Plan("threads", MOST_THREADS, "as asked for")),
    ],
)
def test_a_named_backend_is_taken_as_asked_for(backend: str, workers: int | None, count: int, expected: Plan) -> None:
    made = registry.find(backend)(BackendSetup(count, workers))
    assert fixed_plan(made, count) == expected


@pytest.mark.parametrize("workers", [0, -1, 2.5, True, "two"])
def test_a_senseless_number_of_workers_is_refused(workers: Any) -> None:
    with pytest.raises(ValueError, match="num_workers: expected a whole number"):
        shoal.Pool(Napping, 2, backend="processes", num_workers=workers)


def test_an_env_whose_first_step_is_its_last_can_be_measured() -> None:
    assert len(time_steps(OneShot()).wall) > 1


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_a_vector_env_can_be_measured(mode: AutoresetMode) -> None:
    env = SyncVectorEnv([OneShot] * 2, autoreset_mode=mode)
    assert len(time_steps(adapt(env)).wall) > 1


class LongReset(Napping):
    """Its episodes have 50 steps of no time, or 40 and 60 in turn, and resets that sleep."""

    resets = left = 0

    def __init__(self, uneven: bool = False):
        self.uneven = uneven

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.resets, self.left = self.resets + 1, 50 + self.uneven * (10 if self.resets % 2 else -10)
        time.sleep(0.02)
        return np.zeros(2, np.float32), {}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return np.zeros(2, np.float32), 1.0, self.left == 0 and self.uneven, self.left == 0 and not self.uneven, {}


@pytest.mark.parametrize("uneven", [False, True])
def test_resets_have_their_weight_in_the_measurement(uneven: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "SECONDS", 100.0)
    monkeypatch.setattr(measurement, "MOST", 400)  # steps end it, not the time
    env = LongReset(uneven)
    measured = time_steps(env)
    assert env.resets > 4
    assert measured.mean >= 0.02 / 61  # at least one turn of a lane in 61 is a reset
    # Episodes that end by a limit of steps end together, so their resets keep no worker waiting for another.
    assert (max(measured.wall) >= 0.02) == uneven


@pytest.mark.parametrize("uneven", [False, True])
def test_several_envs_are_stepped_in_turn(uneven: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "SECONDS", 100.0)
    monkeypatch.setattr(measurement, "MOST", 400)
    envs = [LongReset(uneven) for _ in range(3)]
    measured = time_steps(*envs)
    assert measured.mean >= 0.02 / 61
    assert all(2 < env.resets < 6 for env in envs)
    assert all(env.left for env in envs)  # each is within an episode


def test_those_beside_the_measured_env_are_the_last_but_never_the_first() -> None:
    names: Any = [str(i) for i in range(20)]
    assert probe.Subject.among(names, 2) == ("19", 19, names[12:19])
    assert probe.Subject.among(names[:6], 2) == ("5", 5, ["3", "4"])
    assert probe.Subject.among(names[:2], 1) == ("1", 1, [])


def test_an_env_that_can_exist_only_once_is_measured_alone() -> None:
    def refuse() -> Any:
        raise RuntimeError("the port is taken")

    envs = [OneShot()]
    found = measurement.probe(envs, [OneShot, refuse, OneShot])
    assert len(envs) == 2
    assert found.measurement.mean > 0
    assert found.answers


def test_samples_are_thinned_without_a_change_of_their_mean() -> None:
    times = np.array([1e-6] * 5000 + [1e-2])
    thinned = _thinned(times)
    assert len(thinned) == KEPT
    assert np.mean(thinned) == pytest.approx(times.mean())
    assert max(thinned) > 1e-4
    assert _thinned(np.array([2e-6])) == (2e-6,)


# ---- what Shoal adds -----------------------------------------------------------------------------------------


class Telling(Napping):
    """Returns an info at each step."""

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 1.0, False, False, {f"key_{i}": str(i) for i in range(20)}


class Quiet(Napping):
    """The same without infos."""

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 1.0, False, False, {}


class Private(Napping):
    """Returns what no other process can load."""

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 1.0, False, False, {"lock": threading.Lock()}


def test_infos_are_a_part_of_the_measurement() -> None:
    def added(kind: type[Napping]) -> Overhead:
        with shoal.Pool(kind, 8, isolate=True) as pool:
            assert pool.plan.measured is not None
            assert pool.plan.measured.overhead is not None
            return pool.plan.measured.overhead

    telling, quiet = added(Telling), added(Quiet)
    assert telling.pack > 0 < telling.unpack
    assert quiet.pack == quiet.unpack == 0
    assert quiet.lane > 0 < quiet.caller


def test_what_cannot_be_recorded_leaves_the_usual_overhead() -> None:
    with shoal.Pool(Private, 2, isolate=True) as pool:
        assert pool.plan.measured is not None
        assert pool.plan.measured.overhead is None


class Mistaken(Napping):
    """Returns observations that are not of its space."""

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(7, np.float32), 1.0, False, False, {}


def test_answers_that_a_pool_refuses_are_told_of_when_the_user_steps() -> None:
    with shoal.Pool(Mistaken, 2, isolate=True) as pool:
        assert pool.plan.measured is not None
        assert pool.plan.measured.overhead is None
        pool.reset()
        with pytest.raises(shoal.BadObservation):
            pool.step(np.zeros(2, np.int64))


def test_stand_ins_of_large_observations_are_few() -> None:
    def lanes(*shape: int) -> int:
        return probe._lanes_that_fit(gymnasium.spaces.Box(0, 255, shape, np.uint8))

    assert lanes(4) == probe.MOST_LANES
    assert lanes(1024, 1024) == 64
    assert lanes(10_000, 10_000) == 1


def test_warnings_of_the_pool_of_stand_ins_point_to_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(*_: Any) -> Any:
        frame: Any = sys._getframe(1)
        while frame.f_globals["__name__"].startswith("shoal"):
            frame = frame.f_back
        seen.append(frame.f_code.co_filename)  # what `caller_level` would point to
        raise InterruptedError

    monkeypatch.setattr(building, "with_plan", look)
    with pytest.raises(InterruptedError), building.Opened([Napping], shoal.options.PoolOptions(backend="serial")):
        pass
    assert seen == [__file__]


def test_messages_make_processes_dear() -> None:
    silent = Measurement((10e-6,) * 10, 10e-6, Overhead(4e-6, 0.3e-6))
    telling = replace(silent, overhead=Overhead(4e-6, 0.3e-6, 10e-6, 10e-6))
    assert _choose(silent, 64, 64, 2, None, False).backend == "hybrid"
    assert _choose(telling, 64, 64, 2, None, False).backend == "serial"
    for backend in ("hybrid", "processes"):
        assert predict(telling, backend, 2, 64, 64, 2) > predict(silent, backend, 2, 64, 64, 2) + 64 * 5e-6
    assert predict(telling, "serial", 1, 64, 64, 2) == predict(silent, "serial", 1, 64, 64, 2)


def test_isolation_and_a_backend_without_it_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="isolate"):
        shoal.Pool(Napping, 2, backend="hybrid", isolate=True)


# ---- plans that users keep -----------------------------------------------------------------------------------

OVERHEAD = {"caller": 1.0, "lane": 1.0, "pack": 1.0, "unpack": 1.0}
MEASURED = Plan("serial", 1, "measured", Measurement((1e-6, 2e-6), 1e-6, Overhead(4e-6, 1e-6, 2e-6, 3e-6)))
TUNED = Plan("processes", 3, "tuned", Measurement((1e-6, 2.5e-6), 1.5e-6), 7, 5, (0, 300_000))


@pytest.mark.parametrize("plan", [TUNED, MEASURED, Plan("serial", 1), Plan("threads", 2, num_envs=2)], ids=str)
def test_a_plan_survives_its_file(plan: Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["backend"] == plan.backend


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"backend": "magic"}, "backend: expected one of"),
        ({"backend": "auto"}, "backend: expected one of"),
        ({"num_workers": 0}, "num_workers"),
        ({"num_workers": "two"}, "num_workers"),
        ({"backend": "serial"}, "num_workers of 'serial'"),
        ({"num_envs": 2.5}, "num_envs"),
        ({"batch_size": 8}, "batch_size: expected a whole number from 1 to 7, found 8"),
        ({"spin": [1]}, "spin"),
        ({"spin": [-1, 0]}, "spin of the pool"),
        ({"spin": 5}, "spin"),
        ({"reason": 5}, "reason"),
        ({"measured": {"wall": [], "cpu": 1.0}}, "measured.wall"),
        ({"measured": {"wall": [1.0]}}, "measured"),
        ({"measured": {"wall": ["a"], "cpu": 1.0}}, "measured.wall"),
        ({"measured": {"wall": [1.0], "cpu": 1.0, "overhead": {"caller": 1}}}, "measured.overhead"),
        ({"measured": {"wall": [1.0], "cpu": 1.0, "overhead": {**OVERHEAD, "lane": "a"}}}, "measured.overhead.lane"),
        ({"expected": "fast"}, "expected"),
        ({"version": 99}, "version 1, found 99"),
        ({"what": "shoal snapshot"}, "shoal plan"),
        ({"colour": "blue"}, "unknown: colour"),
    ],
    ids=lambda value: str(value),
)
def test_a_file_that_is_no_plan_says_what_is_wrong(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    TUNED.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=r"plan\.json.* is not a plan") as caught:
        Plan.load(path)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "no json", "[" * 100_000, '{"what": "shoal plan", "version": 1, "backend": "serial"}'],
    ids=["nothing", "a list", "no json", "too deep", "incomplete"],
)
def test_a_damaged_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match="is not a plan"):
        shoal.Pool(Napping, 2, plan=tmp_path / "plan.json")


def test_a_plan_is_applied(tmp_path: Path) -> None:
    TUNED.save(tmp_path / "plan.json")
    for plan in (TUNED, str(tmp_path / "plan.json")):
        with shoal.Pool(Napping, plan=plan) as pool:
            assert (pool.num_envs, pool.batch_size, len(pool.workers)) == (7, 5, 3)
            assert pool.plan == TUNED
            pool.async_reset(seed=0)
            assert len(pool.recv().env_id) == 5
    with shoal.make(Napping, plan=Plan("hybrid", 2, num_envs=3)) as envs:
        assert envs.num_envs == 3
        assert envs.reset(seed=0)[0].shape == (3, 2)


def test_a_plan_for_any_number_of_envs_has_no_more_workers_than_these() -> None:
    with shoal.Pool(Napping, 2, plan=Plan("processes", 5), batch_size=1) as pool:
        assert (pool.num_envs, pool.batch_size, pool.plan.num_workers) == (2, 1, 2)
    with shoal.Pool([Napping] * 3, plan=Plan("threads", 2, num_envs=3), num_workers=2, backend="threads") as pool:
        assert len(pool.workers) == 2


def test_batches_beside_a_plan_are_in_lanes_or_in_envs_as_their_names_say() -> None:
    def pair() -> Any:
        return SyncVectorEnv([Napping] * 2)

    for options in ({"batch_envs": 2}, {"batch_size": 4}):
        with shoal.Pool(pair, 3, plan=Plan("serial", 1), **options) as pool:
            assert (pool.num_envs, pool.batch_size) == (6, 4)
    with shoal.Pool(pair, plan=Plan("serial", 1, num_envs=3, batch_size=2), batch_size=4) as pool:
        assert pool.batch_size == 4
    with pytest.raises(ValueError, match="batch_size: 2 was asked for, and the plan says 4"):
        shoal.Pool(pair, plan=Plan("serial", 1, num_envs=3, batch_size=2), batch_size=2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_envs": 8}, "num_envs: 8 was asked for, and the plan says 7"),
        ({"backend": "threads"}, "backend: 'threads' was asked for, and the plan says 'processes'"),
        ({"num_workers": 2}, "num_workers: 2"),
        ({"batch_size": 7}, "batch_size: 7"),
        ({"batch_envs": 3}, "batch_envs: 3 was asked for, and the plan says 5"),
    ],
)
def test_options_beside_a_plan_must_not_contradict_it(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        shoal.Pool(Napping, plan=TUNED, **options)
    assert says in str(caught.value)


def test_what_a_plan_does_not_allow_is_refused() -> None:
    with pytest.raises(ValueError, match="num_envs: 2 was asked for"):
        shoal.Pool([Napping] * 2, plan=TUNED)
    with pytest.raises(ValueError, match="isolate"):
        shoal.Pool(Napping, plan=replace(TUNED, backend="hybrid"), isolate=True)
    with pytest.raises(ValueError, match="step_timeout"):
        shoal.Pool(Napping, plan=replace(TUNED, backend="hybrid"), step_timeout=1.0)
    with pytest.raises(ValueError, match="batch_size"):
        shoal.Pool(Napping, plan=Plan("threads", 2, num_envs=4), batch_size=2)
    with pytest.raises(ValueError, match="Pool"):
        shoal.make(Napping, plan=TUNED)
    with pytest.raises(TypeError, match="plan"):
        shoal.Pool(Napping, plan=7)  # type: ignore[arg-type]


def test_the_plan_says_why_nothing_was_measured() -> None:
    with shoal.Pool(Napping, 2, on_error="restart") as pool:
        assert pool.plan.backend == "processes"
        assert pool.plan.reason.startswith("not measured")


def test_a_misspelt_option_is_told_with_the_one_that_was_meant() -> None:
    with pytest.raises(TypeError, match="unknown option 'num_worker': did you mean num_workers"):
        shoal.Pool(Napping, 2, num_worker=1)


@pytest.mark.parametrize("make", [shoal.Pool, shoal.make])
def test_a_file_that_is_not_there_or_no_plan_is_told_by_its_option(make: Any, tmp_path: Path) -> None:
    missing = str(tmp_path / "nofile.json")
    with pytest.raises(FileNotFoundError, match=r"plan='.*nofile\.json' cannot be read, .*: expected a shoal\.Plan"):
        make("CartPole-v1", plan=missing)
    with pytest.raises(IsADirectoryError, match="plan='"):
        make("CartPole-v1", plan=tmp_path)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(shoal.DataError, match=r"plan='.*other\.json': .*is not a plan"):
        make("CartPole-v1", plan=tmp_path / "other.json")


@pytest.mark.parametrize(("cores", "counts"), [(16, [12, 15, 16]), (8, [6, 7, 8]), (2, [1, 2]), (1, [1])])
def test_a_worker_for_each_core_and_fewer_are_compared(cores: int, counts: list[int]) -> None:
    assert worker_counts(1024, cores) == counts
    assert worker_counts(2, 16) == [2]


def test_a_caller_that_has_a_core_meets_its_workers_sooner() -> None:
    plan = _choose(COMPUTES, 64, 64, 16, None, isolate=True)
    assert (plan.backend, plan.num_workers) == ("processes", 15)
    plan = _choose(HEAVY, 64, 64, 16, None, isolate=True)
    assert (plan.backend, plan.num_workers) == ("processes", 16)


class Torch:
    """What a loaded torch looks like."""

    def __init__(self, threads: int, cuda: bool = False):
        self.get_num_threads = lambda: threads
        self.cuda = SimpleNamespace(is_initialized=lambda: cuda)


@pytest.mark.parametrize(
    ("asked", "torch", "left"),
    [(None, None, 16), (4, None, 12), (0, 4, 16), (None, 4, 12), (None, 16, 16), (None, 1, 16), (16, None, 1)],
)
def test_cores_are_left_for_the_learners_threads(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, torch: int | None, left: int
) -> None:
    monkeypatch.setattr("shoal.support.cores.usable_cores", lambda: 16)
    monkeypatch.setitem(sys.modules, "torch", None if torch is None else Torch(torch))
    assert cores_beside(asked) == left


def test_auto_leaves_cores_to_the_learner() -> None:
    with shoal.Pool("CartPole-v1", 8, learner_threads=10**6) as pool:
        assert pool.plan.num_workers == 1
        assert "on 1 cores" in pool.plan.reason
    with pytest.raises(ValueError, match="learner_threads"):
        shoal.Pool("CartPole-v1", 8, learner_threads=-1)


@pytest.mark.parametrize(
    ("torch", "fills"), [(None, False), (Torch(16), True), (Torch(15), False), (Torch(16, cuda=True), False)]
)
def test_torch_fills_the_cores_by_default(monkeypatch: pytest.MonkeyPatch, torch: Torch | None, fills: bool) -> None:
    monkeypatch.setattr("shoal.support.cores.usable_cores", lambda: 16)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert torch_fills_cores() is fills


def test_workers_that_come_late_are_for_slow_envs() -> None:
    assert _choose(COMPUTES, 16, 16, 16, None, False).backend != "serial"
    assert _choose(COMPUTES, 16, 16, 16, None, False, late=LATE).backend == "serial"
    assert _choose(HEAVY, 64, 64, 16, None, False, late=LATE).backend != "serial"
    assert _choose(COMPUTES, 16, 16, 16, None, True, late=LATE).backend == "processes"


def test_auto_stays_in_one_process_beside_a_torch_that_takes_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.support.cores.usable_cores", lambda: 16)
    monkeypatch.setitem(sys.modules, "torch", Torch(16))
    with shoal.Pool("CartPole-v1", 64) as pool:
        assert pool.plan.backend == "serial"
        assert "torch.set_num_threads(1) would make room for" in pool.plan.reason
    with shoal.Pool("CartPole-v1", 64, learner_threads=0) as pool:
        assert "torch" not in pool.plan.reason

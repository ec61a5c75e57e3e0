"""Chooses the backend and the number of workers: as asked for, or from a measurement of the env.

The choice is the smallest of a few predictions. Each says how long a batch will take on one backend with some
number of workers, from the measured steps, from what Shoal itself was measured to add to them (`planning.probe`), and
from what a hand-over costs there (constants below, measured on two cores; only their order of magnitude matters).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.backends import registry
from shoal.backends.backend import Backend
from shoal.backends.threads import MOST_THREADS
from shoal.engine.timeouts import Patience
from shoal.envs.functions import EnvFn
from shoal.errors import BadEnv, DataError, ShoalError, StepTimeout
from shoal.options import PoolOptions
from shoal.planning.probe import Open, Subject, measure
from shoal.planning.trials import LONGEST_BATCH, PlanTrials
from shoal.support.checks import check_choice, number, whole_number
from shoal.support.cores import cores_beside, torch_fills_cores, usable_cores
from shoal.support.gil import gil_enabled
from shoal.worker.measurement import Measurement, Overhead

WHAT, VERSION = "shoal plan", 1  # what a saved plan says of itself

CALLER = 4e-6  # the caller's own work per batch, where it was not measured
LANE = 0.3e-6  # per env and batch, on any backend, likewise
LATE = 1e-3  # how late workers get a core that torch's threads spin on
HYBRID = 3e-6  # meeting workers that spin beside a caller that does
PROCESSES = 25e-6  # sleeping and waking up again
PROCESS_TURN = 12e-6  # CPU for each worker process that takes a turn, where they outnumber the cores
THREAD_TURN = 40e-6  # the same for a thread, under the GIL
MOST_PROCESSES = 128
WAITS = 0.2  # an env waits if it does so for more than this part of a step
TRIED = ("hybrid", "processes")  # backends that are tried with stand-ins,
MOST_TRIALS = 4  # so many of them at most,
PROMISING = 1.4  # if they are predicted to take less than so many times as long as the best
MARGIN = 0.97  # a more complicated choice must be predicted to take less than this of a simpler one


@dataclass(frozen=True)
class Plan:
    """How envs are run, and why so. `shoal.make` and `shoal.Pool` take one, or the file of one, as `plan`.

    Attributes:
        backend: its name, as `shoal.Pool` takes it.
        num_workers: at most; a pool of fewer envs has fewer.
        reason: in words.
        measured: what a step of the env cost, where that was measured.
        num_envs: what the plan is for; None for any number.
        batch_size: how many envs `recv` waits for; None for all.
        spin: nanoseconds for which (the pool, a worker) looks for an answer before it sleeps; None to have that decided
            while the pool runs.
        expected: steps per second that were predicted, resets counted as steps; None where nothing was.
    """

    backend: str
    num_workers: int
    reason: str = "as asked for"
    measured: Measurement | None = None
    num_envs: int | None = None
    batch_size: int | None = None
    spin: tuple[int, int] | None = None
    expected: float | None = None

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, registry.names())
        most = 1 if registry.find(self.backend).one_worker else 2**20
        whole_number(f"num_workers of {self.backend!r}", self.num_workers, 1, most)
        if self.num_envs is not None:
            whole_number("num_envs", self.num_envs, 1, 2**40)
        if self.batch_size is not None:
            whole_number("batch_size", self.batch_size, 1, self.num_envs or 2**40)
        if self.spin is not None:
            if not isinstance(self.spin, tuple) or len(self.spin) != 2:
                raise ValueError(f"spin: expected (ns of the pool, ns of a worker) or None, found {self.spin!r}")
            for name, value in zip(("spin of the pool", "spin of a worker"), self.spin, strict=True):
                whole_number(name, value, 0, 10**10)
        if self.expected is not None:
            number("expected", self.expected, 0, 1e15)

    @property
    def envs_in_a_batch(self) -> int | None:
        """How many envs `recv` waits for; None where the plan does not say."""
        return self.num_envs if self.batch_size is None else self.batch_size

    def __str__(self) -> str:
        words = f"{self.backend} with {self.num_workers} worker" + "s" * (self.num_workers != 1)
        words += "" if self.num_envs is None else f" for {self.num_envs} envs"
        if self.batch_size not in (None, self.num_envs):
            words += f" in batches of {self.batch_size}"
        return f"{words}: {self.reason}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, as JSON."""
        document = {"what": WHAT, "version": VERSION, **asdict(self)}
        lines = [f"  {json.dumps(name)}: {json.dumps(value, default=int)}" for name, value in document.items()]
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read what `save` has written.

        Raises:
            DataError: it is no plan, or one that cannot be.
            OSError: it cannot be read.
        """
        try:
            return cls._from_document(json.loads(Path(path).read_text()))
        except (ValueError, RecursionError) as error:  # what is no JSON, or no text, is a ValueError too
            raise DataError(f"{str(path)!r} is not a plan that can be used: {error!s:.500}") from error

    @classmethod
    def _from_document(cls, document: Any) -> Plan:
        if not isinstance(document, dict) or document.get("what") != WHAT:
            raise ValueError(f'expected a JSON object with "what": "{WHAT}", as Plan.save writes it')
        fields = {name: value for name, value in document.items() if name not in ("what", "version")}
        if document.get("version") != VERSION:
            raise ValueError(f"expected version {VERSION}, found {document.get('version')!r}")
        unknown = sorted(set(fields) - set(cls.__dataclass_fields__))
        missing = sorted({"backend", "num_workers"} - set(fields))
        if unknown or missing:
            raise ValueError(f"unknown: {', '.join(unknown)}" if unknown else f"missing: {', '.join(missing)}")
        if not isinstance(fields.setdefault("reason", ""), str):
            raise ValueError(f"reason: expected a text, found {fields['reason']!r}")
        if isinstance(fields.get("spin"), list):
            fields["spin"] = tuple(fields["spin"])
        if fields.get("measured") is not None:
            fields["measured"] = _measurement(fields["measured"])
        return cls(**fields)


def _measurement(document: Any) -> Measurement:
    if not isinstance(document, dict) or not {"wall", "cpu"} <= set(document) <= {"wall", "cpu", "overhead"}:
        raise ValueError('measured: expected {"wall": [seconds, ...], "cpu": seconds, "overhead": {...} or null}')
    if not isinstance(document["wall"], list) or not document["wall"]:
        raise ValueError("measured.wall: expected a list of at least one step")
    wall = tuple(number("measured.wall", one, 0, 1e9) for one in document["wall"])
    cpu, overhead = number("measured.cpu", document["cpu"], 0, 1e9), document.get("overhead")
    if overhead is None:
        return Measurement(wall, cpu)
    names = Overhead.__dataclass_fields__
    if not isinstance(overhead, dict) or set(overhead) != set(names):
        raise ValueError(f"measured.overhead: expected seconds of {', '.join(names)}, found {overhead!r:.200}")
    seconds = {name: number(f"measured.overhead.{name}", value, 0, 1e9) for name, value in overhead.items()}
    return Measurement(wall, cpu, Overhead(**seconds))


def with_plan(options: PoolOptions, env: Any, num_envs: int | None) -> tuple[PoolOptions, int | None]:
    """The options with what the plan says that the caller gives, and the number of envs.

    A batch size in lanes is not compared: how many lanes the envs have is known when they are built.
    """
    if options.plan is None:
        return options, num_envs
    plan = _from_file(options.plan) if isinstance(options.plan, str | os.PathLike) else options.plan
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected a shoal.Plan or the file of one, found {plan!r}")
    kind = registry.find(plan.backend)
    beside = {
        "backend": (None if options.backend == "auto" else options.backend, plan.backend),
        "num_workers": (options.num_workers, plan.num_workers),
        "batch_envs": (options.batch_envs, plan.envs_in_a_batch),
    }
    for name, (value, planned) in beside.items():
        if value is not None and planned is not None and value != planned:
            raise contradiction(name, value, planned)
    if options.isolate and not kind.isolates:
        raise ValueError(
            f'isolate=True keeps envs out of this process: the plan with backend="{plan.backend}" does not'
        )
    if options.batch_envs is not None:
        plan = replace(plan, batch_size=options.batch_envs)
    batch: dict[str, Any] = {}
    if options.batch_size is None:
        # Under a batched backend one env has all lanes.
        batch = {"batch_size" if kind.batched else "batch_envs": plan.batch_size}
    if num_envs is None and (isinstance(env, str) or not isinstance(env, Sequence)):
        num_envs = plan.num_envs
    return replace(options, backend=plan.backend, num_workers=plan.num_workers, plan=plan, **batch), num_envs


def _from_file(path: str | os.PathLike[str]) -> Plan:
    try:
        return Plan.load(path)
    except DataError as error:
        raise DataError(f"plan={str(path)!r}: {error}") from error
    except OSError as error:  # it stays of its own type, such as FileNotFoundError
        advice = "expected a shoal.Plan, or the name of a file that Plan.save or `shoal tune` has written"
        raise OSError(error.errno, f"plan={str(path)!r} cannot be read, {error.strerror}: {advice}") from error


def contradiction(name: str, value: Any, planned: Any) -> ValueError:
    """What is raised for an option that is not what the plan says."""
    return ValueError(
        f"{name}: {value!r} was asked for, and the plan says {planned!r}: leave {name} out, or tune again"
    )


def fixed_plan(backend: Backend, envs: int) -> Plan:
    """The plan for a backend that was asked for, with as many workers as asked for, or as it likes."""
    if backend.one_worker:
        return Plan(backend.name, 1)
    workers = int(backend.num_workers or backend.default_workers(envs, usable_cores()))
    return Plan(backend.name, workers if backend.batched else min(workers, envs))


def measured_plan(
    env_fns: Sequence[EnvFn], options: PoolOptions, batch_size: int, patience: Patience, open_pool: Open
) -> Plan:
    """Measure an env in a process of its own, and choose the backend that is predicted to be the fastest.

    An env that cannot be measured, because it raises or wants something first, is one for processes.
    """
    count, cores = len(env_fns), cores_beside(options.learner_threads)
    if count == 1:
        return Plan("processes" if options.isolate else "serial", 1, "there is one env")
    try:
        measured, recording = measure(Subject.among(env_fns, cores), batch_size, options, patience, open_pool)
    except BadEnv as error:
        if options.isolate:
            raise
        return Plan("serial", 1, f"no process can run it: {error}")
    except ShoalError as error:
        if isinstance(error, StepTimeout) and patience.deadline.passed:
            raise
        text = str(error).strip().partition("\n")[0]
        return Plan("processes", min(int(options.num_workers or cores), count), f"it could not be measured: {text}")
    alone = _choose(measured, count, batch_size, cores, options.num_workers, options.isolate)
    if options.learner_threads is None and torch_fills_cores():
        beside = _choose(measured, count, batch_size, cores, options.num_workers, options.isolate, late=LATE)
        if beside.backend != alone.backend:
            advice = (
                f"torch.set_num_threads(1) would make room for {alone.backend!r} ({alone.expected or 0:,.0f} steps/s)"
            )
            return replace(beside, reason=f"{beside.reason}; torch's threads take all cores: {advice}")
    if recording is None or batch_size < count:
        return alone
    trials = PlanTrials(recording, measured, count, options, open_pool)
    return _tried(alone, trials.seconds, count, cores, options)


def _tried(plan: Plan, run: Callable[[str, int], float | None], count: int, cores: int, options: PoolOptions) -> Plan:
    """The plan, or a better one of those that are predicted to be about as fast: as trials with stand-ins tell.

    Only where a batch is short and workers have a part in it: what they add to longer ones is predicted well enough.
    Stand-ins compute, so envs that wait are not tried.

    Args:
        run: tries a backend with a number of workers; the seconds of a batch, None where it could not.
    """
    measured, expected = plan.measured, plan.expected
    assert measured is not None
    assert expected is not None
    if plan.backend not in TRIED or measured.waiting > WAITS or count / expected > LONGEST_BATCH:
        return plan
    found = _candidates(count, cores, options.num_workers, options.isolate, measured)
    predicted = {one: predict(measured, *one, count, count, cores) for one in found}
    close = [one for one in found if one[0] in TRIED and predicted[one] * expected < PROMISING * count]
    trials = sorted(close, key=lambda one: predicted[one])[:MOST_TRIALS]
    took = {one: seconds for one in trials if (seconds := run(*one)) is not None}
    if not took:
        return plan
    if ("serial", 1) in predicted:
        took["serial", 1] = predicted["serial", 1]
    best: tuple[str, int] | None = None
    for one in [one for one in found if one in took]:  # from the simplest on
        if best is None or took[one] < took[best] * MARGIN:
            best = one
    assert best is not None
    return _explained(best, measured, count / took[best], cores)


def _choose(
    measured: Measurement,
    count: int,
    batch_size: int,
    cores: int,
    num_workers: int | None,
    isolate: bool,
    late: float = 0.0,
) -> Plan:
    """Choose the backend that is predicted to be the fastest, where a batch of workers comes so many seconds late."""
    best: tuple[float, str, int] | None = None
    for backend, workers in _candidates(count, cores, num_workers, isolate, measured):
        seconds = predict(measured, backend, workers, count, batch_size, cores)
        cost = seconds if backend == "serial" else seconds + late
        if best is None or cost < best[0] * MARGIN:
            best, expected = (cost, backend, workers), batch_size / seconds
    assert best is not None
    return _explained(best[1:], measured, expected, cores)


def _explained(choice: tuple[str, int], measured: Measurement, expected: float, cores: int) -> Plan:
    """The plan for a backend and a number of workers, with so many steps per second expected."""
    reason = f"a step takes {measured.mean * 1e6:,.1f} us, {measured.waiting:.0%} of it waiting"
    reason += f"; expected {expected:,.0f} steps/s on {cores} cores"
    if choice[0] == "threads" and not gil_enabled():
        reason += "; Python runs without the GIL, so threads compute side by side"
    return Plan(*choice, reason, measured, expected=expected)


def _candidates(
    count: int, cores: int, num_workers: int | None, isolate: bool, measured: Measurement
) -> list[tuple[str, int]]:
    """From the simplest to the most complicated."""
    waits = measured.waiting > WAITS
    few = worker_counts(count, cores) if num_workers is None else [min(int(num_workers), count)]
    many = few[-1:]
    while waits and num_workers is None and many[-1] < count:
        many.append(min(2 * many[-1], count))
    processes = [("processes", w) for w in dict.fromkeys([*few, *many]) if w <= MOST_PROCESSES]
    if isolate:
        return processes
    hybrid = [("hybrid", w) for w in few if w > 1]
    if not gil_enabled():
        threads = [("threads", w) for w in dict.fromkeys([*few, *many]) if 1 < w <= MOST_THREADS]
        return [("serial", 1), *threads, *hybrid, *processes]
    # Threads share the GIL: they are for envs that wait.
    threads = [("threads", w) for w in many if w <= MOST_THREADS] if waits else []
    return [("serial", 1), *hybrid, *threads, *processes]


def worker_counts(count: int, cores: int) -> list[int]:
    """Numbers of workers for so many envs that compute, ascending: one for each core, and fewer.

    Fewer workers leave a core to the caller, and some to other programs, so that a batch waits for none of them.
    """
    return sorted({min(number, count) for number in (cores, max(1, cores - 1), max(1, cores * 3 // 4))})


def predict(measured: Measurement, backend: str, workers: int, count: int, batch_size: int, cores: int) -> float:
    """Seconds for one batch."""
    share = batch_size / count
    added = measured.overhead or Overhead(CALLER, LANE)
    if backend == "serial":
        return added.caller + batch_size * (measured.mean + added.lane)
    # With a partial batch no worker waits for the slowest: all are busy all the time.
    even = measured.mean * batch_size / workers
    block = even if batch_size < count else _slowest_block(measured, workers, count)
    turns = workers * share
    if backend == "threads" and gil_enabled():
        gil = batch_size * (measured.cpu + added.lane) + turns * THREAD_TURN
        return added.caller + max(block + THREAD_TURN, gil)
    turn_cost = turns * PROCESS_TURN if workers > cores else 0.0
    computing = (batch_size * (measured.cpu + added.lane) + turn_cost) / cores
    # A caller that has a core spins for the answers.
    together = HYBRID if backend == "hybrid" or workers < cores else PROCESSES
    # Messages come after the answers, so they are waited for once more. Workers pack them side by side, and the caller
    # reads one after the other. Its own block sends none.
    told = batch_size * (1 - 1 / workers) if backend == "hybrid" else batch_size
    messages = PROCESSES + added.pack * batch_size / workers + added.unpack * told if added.pack else 0.0
    if backend == "threads":  # without the GIL: as processes, but nothing is packed
        messages = 0.0
    return added.caller + together + max(block + added.lane * count / workers, computing) + messages


def _slowest_block(measured: Measurement, workers: int, count: int) -> float:
    """How long the slowest of the workers takes for its block, drawn from the measured steps.

    The mean says little about envs that sometimes take long, because the batch waits for the longest.
    """
    size = -(-count // workers)
    rng = np.random.default_rng(0)
    samples = np.asarray(measured.wall)
    if workers == 1 or samples.std() < 0.05 * samples.mean():
        return size * float(samples.mean())
    repeats = max(1, min(64, 200_000 // (size * workers)))
    draws = rng.choice(samples, (repeats, workers, size))
    return float(draws.sum(axis=2).max(axis=1).mean())


def spin_times(plan: Plan) -> tuple[int, int]:
    """How long (the pool, a worker) looks for an answer before it sleeps, in ns; negative for what the core decides."""
    return plan.spin or registry.find(plan.backend).spin_times()

"""Measures contenders in interleaved rounds, and computes rates and ratios.

In every round every contender runs for the same time, in an order that changes from round to round, with a run of the
limit just before and just after it. A ratio is taken against these two runs: a machine that slows down for a while
slows down both sides of it. Two contenders are compared by their ratios. The median of the rounds is reported with the
quartiles, because many short rounds say more than a few long ones. A run from which the hypervisor took more than a
little CPU time is repeated, whatever its figure: on a shared machine this causes most of the noise.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from shoal.cli.contender_process import ContenderLost, ContenderProcess
from shoal.cli.contenders import Contender, Opened, Role, limits, shoals
from shoal.cli.work import Work, check_batch_size, look_here, probe
from shoal.observe.progress import Notify, progress
from shoal.support.cores import usable_cores
from shoal.support.processes import stolen_seconds
from shoal.tuning.result import quartiles


@dataclass(frozen=True)
class Settings:
    """How long and how often each contender runs, and how long to wait for its answers."""

    seconds: float = 1.0
    rounds: int = 5
    start_patience: float = 180.0
    patience: float = 60.0  # for a run, in addition to its length
    seed: int = 0
    theft: float = 0.05  # cores; a run from which other machines took more is repeated,
    tries: int = 4  # at most so often, and the least disturbed try counts
    limit: float | None = None  # seconds after which no round is begun; one is run in any case

    @property
    def warm(self) -> float:
        """How long a contender steps untimed before each timed run: until caches are full and waits are settled."""
        return min(0.2, self.seconds)


class RateSummary(NamedTuple):
    """The median of several rounds and their spread."""

    median: float
    low: float  # the lower quartile
    high: float  # the upper quartile
    lowest: float
    highest: float


def summary(values: Sequence[float]) -> RateSummary | None:
    """Return median and spread of the values; None if there are none."""
    if not values:
        return None
    low, median, high = quartiles(values)
    return RateSummary(median, low, high, min(values), max(values))


@dataclass
class Row:
    """The figures of one contender for one env and one number of envs."""

    contender: Contender
    status: str = "ok"  # or "skipped", "failed"
    note: str = ""
    rates: list[float | None] = field(default_factory=list)  # steps/s, one per round
    limits: list[float | None] = field(default_factory=list)  # steps/s of the limit around each of them
    starts: list[Opened] = field(default_factory=list)
    thefts: list[float] = field(default_factory=list)  # cores that other machines took, one per round

    @property
    def name(self) -> str:
        return self.contender.name

    @property
    def rate(self) -> RateSummary | None:
        """Steps per second over the rounds."""
        return summary([rate for rate in self.rates if rate is not None])

    @property
    def startup(self) -> float | None:
        """Median seconds for constructor and first reset."""
        return statistics.median(one.seconds for one in self.starts) if self.starts else None

    @property
    def ratios(self) -> list[float | None]:
        """The rates as fractions of the limit; the rates themselves if no limit was measured."""
        if not any(self.limits):
            return self.rates
        pairs = zip(self.rates, self.limits, strict=True)
        return [rate / limit if rate and limit else None for rate, limit in pairs]

    def over(self, other: Row) -> RateSummary | None:
        """Return this row's rate as a multiple of another's, round by round."""
        pairs = zip(self.ratios, other.ratios, strict=False)
        return summary([mine / theirs for mine, theirs in pairs if mine and theirs])


@dataclass
class Result:
    """The rows of all contenders for one env and one number of envs."""

    work: Work
    settings: Settings
    rows: list[Row]

    @property
    def limit(self) -> Row | None:
        return next((row for row in self.rows if row.contender.role is Role.LIMIT), None)

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)

    def of_limit(self, row: Row) -> RateSummary | None:
        """Return a row's rate as a fraction of the limit's."""
        return summary([ratio for ratio in row.ratios if ratio]) if self.limit else None

    def best(self, wanted: Callable[[Contender], bool]) -> Row | None:
        """Return the fastest row of the contenders that are wanted."""
        found = [row for row in self.rows if wanted(row.contender) and row.rate]
        return max(found, key=lambda row: row.rate.median if row.rate else 0.0, default=None)

    def best_shoal(self) -> Row | None:
        return self.best(lambda one: one.role is Role.SHOAL)

    def best_python_peer(self) -> Row | None:
        """Return the fastest peer that runs the user's own Python env."""
        return self.best(lambda one: one.role is Role.PEER and one.runner.python)

    def as_dict(self) -> dict[str, Any]:
        return {
            "env": self.work.env,
            "num_envs": self.work.num_envs,
            "seconds": self.settings.seconds,
            "rounds": self.settings.rounds,
            "limit": self.limit.name if self.limit else None,
            "best_python_peer": peer.name if (peer := self.best_python_peer()) else None,
            "rows": [self._row_dict(row) for row in self.rows],
        }

    def _row_dict(self, row: Row) -> dict[str, Any]:
        peer = self.best_python_peer()
        start = row.starts[-1] if row.starts else None
        figures = {
            "steps_per_s": row.rate, "of_limit": self.of_limit(row),
            "of_best_python_peer": row.over(peer) if peer else None,
        }  # fmt: skip
        return {
            "name": row.name,
            "role": row.contender.role.value,
            "python": row.contender.runner.python,
            "status": row.status,
            "note": row.note,
            **{name: figure and figure._asdict() for name, figure in figures.items()},
            "rates": row.rates,
            "cores_stolen": row.thefts,
            "startup_s": row.startup,
            **{name: getattr(start, name, None) for name in ("workers", "worker_pss", "total_pss")},
        }


class _Entry:
    """One contender in a measurement: its processes while they run, and its row."""

    def __init__(self, contender: Contender, work: Work, settings: Settings) -> None:
        self.row = Row(contender)
        self._work, self._settings = work, settings
        self._copies: list[ContenderProcess] = []
        if reason := contender.unfit(work):
            self._drop(ContenderLost("skipped", reason))

    @property
    def active(self) -> bool:
        return self.row.status == "ok"

    def open(self) -> None:
        if not self.active:
            return
        contender = self.row.contender
        try:
            for _ in range(contender.copies):
                copy = ContenderProcess()
                self._copies.append(copy)
                opened = copy.open(contender, self._work, self._settings.start_patience)
                self.row.starts.append(opened)
                self.row.note = opened.note
        except ContenderLost as lost:
            self._drop(lost)

    def run(self) -> float | None:
        """Run one round, add its rate to the row and return it; None if the contender was dropped."""
        rate = None
        if self.active and not self._copies:
            self.open()
        if self.active:
            try:
                rate = self._least_disturbed()
            except ContenderLost as lost:
                self._drop(lost)
        self.row.rates.append(rate)
        if self.row.contender.runner.spins_when_idle:
            self.end()
        return rate

    def _least_disturbed(self) -> float:
        settings = self._settings
        patience = settings.patience + settings.warm + settings.seconds
        tries: list[tuple[float, float]] = []
        while len(tries) < settings.tries and (not tries or tries[-1][0] > settings.theft):
            before, began = stolen_seconds(), time.perf_counter()
            for copy in self._copies:
                copy.ask("run", settings.warm, settings.seconds)
            tallies = [copy.answer(patience) for copy in self._copies]
            rate = sum(tally.steps / tally.seconds for tally in tallies)
            tries.append(((stolen_seconds() - before) / (time.perf_counter() - began), rate))
        theft, rate = min(tries)
        self.row.thefts.append(theft)
        return rate

    def end(self, gently: bool = True) -> None:
        copies, self._copies = self._copies, []
        for copy in copies:
            copy.end(gently)

    def _drop(self, lost: ContenderLost) -> None:
        self.row.status, self.row.note = lost.word, str(lost)
        self.end(gently=False)


def measure(
    work: Work, contenders: Sequence[Contender], settings: Settings | None = None, notify: Notify = lambda text: None
) -> Result:
    """Run all contenders on this work; call `notify` with one line before each of `ticks` moves."""
    settings = settings or Settings()
    order = random.Random(settings.seed)
    entries = [_Entry(contender, work, settings) for contender in contenders]
    try:
        for entry in entries:
            notify(f"{work.num_envs} x {work.env}: start {entry.row.name}")
            if not entry.row.contender.runner.spins_when_idle:
                entry.open()
        limit = next((entry for entry in entries if entry.row.contender.role is Role.LIMIT), None)
        others = [entry for entry in entries if entry is not limit]
        began = time.monotonic()
        for number in range(settings.rounds):
            if number and settings.limit is not None and time.monotonic() - began > settings.limit:
                break
            around = [limit.run()] if limit else []
            shuffled = order.sample(others, len(others))
            for entry in shuffled:
                notify(f"{work.num_envs} x {work.env}: round {number + 1}, {entry.row.name}")
                entry.run()
                around += [limit.run()] if limit else []
            for entry, before, after in zip(shuffled, around, around[1:], strict=False):
                entry.row.limits.append((before + after) / 2 if before and after else None)
        if limit:
            limit.row.limits = limit.row.rates
    except BaseException:
        # After an interrupt, processes are killed at once. Otherwise the user would need a second Ctrl-C.
        for entry in entries:
            entry.end(gently=False)
        raise
    for entry in entries:
        entry.end()
    return Result(work, settings, [entry.row for entry in entries])


def ticks(contenders: Sequence[Contender], settings: Settings) -> int:
    """Return how often `measure` calls `notify`."""
    rounds = len(contenders) - any(one.role is Role.LIMIT for one in contenders)
    return len(contenders) + rounds * settings.rounds


def run(options: argparse.Namespace) -> int:
    from shoal.cli import doctor, peers, report  # `report` needs this module

    output = report.Output(options)
    numbers = list(dict.fromkeys(options.num_envs))
    check_batch_size(options.batch_size, min(numbers))
    look_here(options.env)
    probed = probe(options.env)
    cores = usable_cores()
    contenders = [
        *limits(cores),
        *shoals(list(dict.fromkeys(options.backends)), options.workers, options.batch_size, options.lend),
        *peers.gymnasiums(),
        *(peers.others(cores) if options.peers else []),
    ]
    settings = Settings(seconds=options.seconds, rounds=options.rounds)
    with progress(len(numbers) * ticks(contenders, settings)) as notify:
        results = [measure(replace(probed, num_envs=number), contenders, settings, notify) for number in numbers]
    output.write(
        lambda: report.as_dict(results, doctor.facts()),
        lambda console: report.show(results, console),
        lambda path: report.plot(results, path),
    )
    return 0

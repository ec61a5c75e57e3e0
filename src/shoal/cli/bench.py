"""Measures contenders in interleaved rounds, and computes rates and ratios.

In every round every contender runs for the same time, in an order that changes from round to round, with a run of the
limit just before and just after it. A ratio is taken against these two runs: a machine that slows down for a while
slows down both sides of it. Two contenders are compared by their ratios. The median of the rounds is reported with the
quartiles, because many short rounds say more than a few long ones. A run from which the hypervisor took more than a
little CPU time is repeated, whatever its figure: on a shared machine this causes most of the noise.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.cli.contender_process import ContenderLost, ContenderProcess, run_together
from shoal.cli.contenders import Contender, Opened, Role
from shoal.cli.work import Work
from shoal.support.processes import stolen_seconds
from shoal.tuning.result import quartiles

Notify = Callable[[str], None]


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

    @property
    def warm(self) -> float:
        """How long a contender steps untimed before each timed run."""
        return min(0.2, 0.2 * self.seconds)


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
        """The contender's name."""
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
        """The row of the limit, if there is one."""
        found = [row for row in self.rows if row.contender.role is Role.LIMIT]
        return found[0] if found else None

    def row(self, name: str) -> Row:
        """Return the row of that name."""
        return next(row for row in self.rows if row.name == name)

    def of_limit(self, row: Row) -> RateSummary | None:
        """Return a row's rate as a fraction of the limit's."""
        return summary([ratio for ratio in row.ratios if ratio]) if self.limit else None

    def best(self, wanted: Callable[[Contender], bool]) -> Row | None:
        """Return the fastest row of the contenders that are wanted."""
        found = [row for row in self.rows if wanted(row.contender) and row.rate]
        return max(found, key=lambda row: row.rate.median if row.rate else 0.0, default=None)

    def best_shoal(self) -> Row | None:
        """Return the fastest of Shoal's backends."""
        return self.best(lambda one: one.role is Role.SHOAL)

    def best_python_peer(self) -> Row | None:
        """Return the fastest peer that runs the user's own Python env."""
        return self.best(lambda one: one.role is Role.PEER and one.runner.python)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
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
        rate, of_limit = row.rate, self.of_limit(row)
        peer = self.best_python_peer()
        of_peer = row.over(peer) if peer else None
        start = row.starts[-1] if row.starts else None
        return {
            "name": row.name,
            "role": row.contender.role.value,
            "python": row.contender.runner.python,
            "status": row.status,
            "note": row.note,
            "steps_per_s": rate._asdict() if rate else None,
            "of_limit": of_limit._asdict() if of_limit else None,
            "of_best_python_peer": of_peer._asdict() if of_peer else None,
            "rates": row.rates,
            "cores_stolen": row.thefts,
            "startup_s": row.startup,
            "workers": start.workers if start else None,
            "worker_pss": start.worker_pss if start else None,
            "total_pss": start.total_pss if start else None,
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
        """Start the contender, unless it was dropped."""
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
            rate = run_together(self._copies, settings.warm, settings.seconds, patience)
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
    work: Work,
    contenders: Sequence[Contender],
    settings: Settings | None = None,
    notify: Notify = lambda text: None,
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
        for number in range(settings.rounds):
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

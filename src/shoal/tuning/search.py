"""The search: expectations give an order, short trials sort it, and the better ones are tried again, interleaved.

Three rungs. On the first everybody whom time allows gets one short run, in the order of expectation. On the second are
the best of these, what differs from the leaders in one number and was not tried yet, and the leaders with other
times of spinning; on the third the best of all. There everybody runs in every round, in changing order, and is compared
with the others of the same round, so that a machine that is busy for a while slows all of them down.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from shoal.envs.functions import EnvFn, as_env_fns, pickle_env_fns
from shoal.errors import BadEnv, EnvError, StartError, StepTimeout
from shoal.support import processes
from shoal.support.checks import check_choice, number, positive_number, whole_number
from shoal.support.cores import usable_cores
from shoal.tuning import BACKENDS
from shoal.tuning.candidates import (
    CLOSE,
    Candidate,
    EnvCost,
    Limits,
    all_candidates,
    in_order,
    neighbours,
    size,
    spin_variants,
    steps_in_words,
)
from shoal.tuning.lab import LabHere, LabLost, LabProcess
from shoal.tuning.result import Trial, TuneResult

__all__ = ["Search"]

Notify = Callable[[str], None]

FIRST, SECOND = 0.45, 0.5  # the part of the time that is left for each of these rungs; the third has the rest
KEPT, LEADERS, FINALISTS = 8, 2, 5
ALMOST = 1.05  # how far behind the best one may be on the way to the last rung, if it has fewer envs
ROUNDS, MOST_ROUNDS = 3, 25  # on the second rung, and on the third at most
RUN = 0.1  # seconds of a trial, where so many batches
BATCHES = 3  # fit in
MOST_LOSSES = 2  # of a backend, each of which may have taken seconds to be noticed
CLOSING = 0.3  # seconds that are kept for the end
HOPELESS = 0.02  # of the best rate: such candidates are not tried, whatever time is left


class Search:
    """One search, from limits to a result. The arguments are those of `shoal.tune`."""

    def __init__(
        self,
        env: Any,
        num_envs: int | None = None,
        *,
        batch_size: int | Literal["all"] | None = None,
        backends: Sequence[str] = BACKENDS,
        policy_latency: float = 0.0,
        max_memory: int | None = None,
        isolate: bool = False,
        seconds: float = 20.0,
        env_kwargs: Mapping[str, Any] | None = None,
    ):
        many = isinstance(env, Sequence) and not isinstance(env, str)
        self._env_fns = as_env_fns(env, num_envs if many else 1, env_kwargs)
        self._seconds = positive_number("seconds", seconds)
        self.limits = _checked_limits(
            len(self._env_fns) if many else num_envs, batch_size, backends, policy_latency, max_memory, isolate
        )
        self._lab, self.limits = _make_lab(self._env_fns, self.limits, bool(isolate))
        self._order = random.Random(0)
        self._trials: dict[Candidate, Trial] = {}
        self._finals: list[dict[Trial, float]] = []  # the rates of each round of the last rung
        self._open: dict[Trial, int] = {}  # trials whose pools are in the lab, by number; the last used last
        self._count = 0
        self._losses: Counter[str] = Counter()  # how often a backend has cost the lab its life
        self.cost: EnvCost | None = None
        self._notify: Notify = lambda text: None

    @property
    def tried(self) -> list[Trial]:
        """Those that have run."""
        return [trial for trial in self._trials.values() if trial.state == "ran"]

    # ---- the rungs -------------------------------------------------------------------------------------------

    def run(self, notify: Notify = lambda text: None) -> None:
        """Measure and search; `notify` hears what is being done. After an interrupt, `result` has what was found."""
        self._began = time.monotonic()
        self._notify = notify
        try:
            self._measure()
            self._look_for_candidates()
            self._first_rung()
            self._second_rung()
            self._third_rung()
            notify("closing")
            self._lab.close()
        except BaseException:
            self._lab.close(at_once=True)
            raise
        finally:
            self._took = time.monotonic() - self._began

    @property
    def _left(self) -> float:
        return self._began + self._seconds - CLOSING - time.monotonic()

    def _measure(self) -> None:
        self._notify("measuring a step")
        try:
            self.cost = self._lab.call("measure", timeout=self._seconds)
        except LabLost as lost:
            if lost.__cause__ is not None:  # what became of its process
                raise lost.__cause__ from None
            raise StepTimeout(
                f"the env could not be built and stepped twice within {self._seconds:g} s: give tune more seconds"
            ) from None

    def _look_for_candidates(self) -> None:
        cost, limits = self._cost, self.limits
        for one in all_candidates(cost, limits):
            trial = self._trials[one] = Trial(one, one.rate(cost, limits))
            if limits.max_memory is not None and one.memory(cost) > limits.max_memory:
                trial.out("too large", f"needs about {size(one.memory(cost))}")
        if all(trial.state == "too large" for trial in self._trials.values()):
            least = min(one.memory(cost) for one in self._trials)
            raise ValueError(
                f"max_memory: {size(limits.max_memory or 0)} is too little, the smallest plan takes {size(least)}: "
                f"{size(cost.process_memory)} for a process with one env, {size(cost.env_memory)} for each further one"
            )

    @property
    def _cost(self) -> EnvCost:
        assert self.cost is not None
        return self.cost

    def _first_rung(self) -> None:
        """One short run of each, in the order of expectation."""
        until = time.monotonic() + FIRST * self._left
        allowed = [one for one, trial in self._trials.items() if trial.state == "waiting"]
        for one in in_order(allowed, lambda one: self._trials[one].expected):
            trial = self._trials[one]
            # Who is the first may take the time of later rungs, too.
            room = until - time.monotonic() if self.tried else self._left
            if self._losses[one.backend] >= MOST_LOSSES:
                trial.out("not tried", "others of its backend died or hung")
            elif trial.expected < HOPELESS * max((other.rate for other in self.tried), default=0.0):
                trial.out("not tried", "little was expected")
            elif self._seconds_for(trial) > room:
                trial.out("not tried", "there was no time")
            else:
                self._run(trial)
                self._close(trial)

    def _second_rung(self) -> None:
        """The best again, and what may be better than the leaders."""
        best, known = self._best(KEPT), list(self._trials)
        leaders = best[:LEADERS]
        near = [self._trials[one] for leader in leaders for one in neighbours(leader.candidate, known)]
        spinning = [(leader, one) for leader in leaders for one in spin_variants(leader.candidate)]
        near += [self._trials.setdefault(one, Trial(one, leader.expected)) for leader, one in spinning]
        near = [trial for trial in near if trial.state in ("waiting", "not tried")]
        playing = list(dict.fromkeys([*leaders, *self._favourites(), *best, *near]))
        self._rounds(playing, ROUNDS, SECOND * self._left)

    def _third_rung(self) -> None:
        """The best of all, and of those that are almost as good the one with the fewest envs."""
        finalists = self._best(FINALISTS)
        good = [trial for trial in self.tried if trial.rate * ALMOST > finalists[0].rate] if finalists else []
        finalists += sorted(good, key=lambda trial: trial.candidate.simplicity)[:1] + self._favourites()[:1]
        finalists = list(dict.fromkeys(finalists))
        for trial in [trial for trial in self._open if trial not in finalists]:
            self._close(trial)
        self._rounds(finalists, MOST_ROUNDS, self._left, self._finals)

    def _best(self, count: int) -> list[Trial]:
        return sorted(self.tried, key=lambda trial: -trial.rate)[:count]

    def _favourites(self) -> list[Trial]:
        """Those of whom the most was expected: one bad moment of the machine must not cost them their place."""
        return sorted(self.tried, key=lambda trial: -trial.expected)[:LEADERS]

    def _rounds(
        self, trials: list[Trial], rounds: int, seconds: float, keep: list[dict[Trial, float]] | None = None
    ) -> None:
        """Let all run in every round, as long as whole rounds fit into the time; `keep` gets the rates of each round.

        Where not even one fits, those that were added last are left out.
        """
        until = time.monotonic() + seconds
        playing = list(trials)
        while playing and sum(map(self._seconds_for, playing)) > until - time.monotonic():
            out = playing.pop()
            if out.state != "ran":
                out.out("not tried", "there was no time")
        for _ in range(rounds):
            if not playing or sum(map(self._seconds_for, playing)) > until - time.monotonic():
                return
            rates = {trial: self._run(trial) for trial in self._order.sample(playing, len(playing))}
            playing = [trial for trial in playing if trial.state == "ran"]
            whole = {trial: rate for trial, rate in rates.items() if rate is not None and trial in playing}
            if keep is not None and len(whole) == len(playing):
                keep.append(whole)

    # ---- one trial -------------------------------------------------------------------------------------------

    def _seconds_for(self, trial: Trial) -> float:
        """How long a run is expected to take, with its start."""
        start = 0.0
        if trial not in self._open:
            start = trial.start or trial.candidate.start_seconds(self._cost, self.limits)
        # A batch to get warm, and the one that is under way when the time is over.
        return start + 2 * trial.batch_seconds + self._run_seconds(trial)

    def _run_seconds(self, trial: Trial) -> float:
        """Several batches, unless they take so long that nobody else would get a turn."""
        return max(RUN, min(BATCHES * trial.batch_seconds, self._left / 20))

    def _run(self, trial: Trial) -> float | None:
        """One run; its steps per second, None for a trial that has failed."""
        self._notify(str(trial.candidate))
        try:
            if trial not in self._open:
                self._make_room(trial)
                self._count += 1
                trial.start = self._ask(trial, "start", self._count, trial.candidate)
                self._open[trial] = self._count
            rate = self._ask(trial, "time", self._open[trial], 0.2 * RUN, self._run_seconds(trial))
        except LabLost as lost:
            self._open.clear()
            self._lose(trial, str(lost))
            return None
        except _Failed as failed:
            self._close(trial)
            trial.out("failed", str(failed))
            return None
        self._open[trial] = self._open.pop(trial)
        trial.ran(rate)
        return rate

    def _lose(self, trial: Trial, why: str) -> None:
        """Note that a trial has cost the lab its life, unless it has run before and the time is over."""
        if self._left > 0 or trial.state != "ran":
            self._losses[trial.candidate.backend] += 1
            trial.out("failed", why)

    def _ask(self, trial: Trial, name: str, *arguments: Any) -> float:
        expected, left = self._seconds_for(trial), self._left
        # Who hangs takes half of the time that is left, at most; who is slow may take what was expected twice.
        patience = min(5.0 + 10.0 * expected, max(1.0, left / 2, min(2.0 * expected, left + 1.0)))
        try:
            answer = self._lab.call(name, *arguments, timeout=patience)
        except EnvError as error:  # the lab itself was left by what is no Exception, such as sys.exit
            raise _Failed(str(error)) from error
        if isinstance(answer, str):
            raise _Failed(answer)
        return float(answer)

    def _close(self, trial: Trial) -> None:
        count = self._open.pop(trial, None)
        if count is not None:
            try:
                self._lab.call("end", count, timeout=max(1.0, self._left))
            except LabLost:
                self._open.clear()

    def _make_room(self, trial: Trial) -> None:
        """Close the pools that were used longest ago, until this one fits in beside the others."""
        room = self.limits.max_memory or (processes.available_memory() or 2**40) // 2
        needed = trial.candidate.memory(self._cost)
        while self._open and needed + sum(one.candidate.memory(self._cost) for one in self._open) > room:
            self._close(next(iter(self._open)))

    # ---- the end ---------------------------------------------------------------------------------------------

    def result(self) -> TuneResult:
        """What was found so far.

        Raises:
            StartError: nothing was.
        """
        cost, trials = self._cost, sorted(self._trials.values(), key=lambda trial: trial.place)
        chosen = self._choose()
        if chosen.state == "ran":
            others = len(self.tried) - 1
            reason = f"tuned: {chosen.rate:,.0f} steps/s ({chosen.low:,.0f} to {chosen.high:,.0f})"
            reason += f", the best of {others + 1} that were tried" if others else ", and nothing else was tried"
        else:
            reason = f"{chosen.expected:,.0f} steps/s are expected; there was no time to try it"
        plan = chosen.candidate.plan(f"{reason}; {steps_in_words(cost)}", cost.measured)
        return TuneResult(plan, cost, trials, self.limits, self._took)

    def _choose(self) -> Trial:
        scores = self._scores()
        if scores:
            best = max(scores.values())
            good = [trial for trial, score in scores.items() if score * CLOSE >= best]
            return min(good, key=lambda trial: trial.candidate.simplicity)
        untried = [trial for trial in self._trials.values() if trial.state in ("waiting", "not tried")]
        if untried:
            return max(untried, key=lambda trial: trial.expected)
        reasons = "; ".join(f"{trial.candidate}: {trial.note}" for trial in list(self._trials.values())[:5])
        raise StartError(f"no trial came to an end. {reasons}")

    def _scores(self) -> dict[Trial, float]:
        """Of the finalists against their own rounds; of all by their rates where there were no finals."""
        lasting = [trial for trial in self.tried if self._finals and all(trial in rates for rates in self._finals)]
        if not lasting:
            return {trial: trial.rate for trial in self.tried}
        means = [statistics.fmean(rates[trial] for trial in lasting) for rates in self._finals]
        pairs = list(zip(self._finals, means, strict=True))
        return {trial: statistics.median(rates[trial] / mean for rates, mean in pairs) for trial in lasting}


class _Failed(Exception):
    """A trial came to nothing; the text says why."""


def _checked_limits(
    num_envs: Any, batch_size: Any, backends: Any, policy_latency: Any, max_memory: Any, isolate: bool
) -> Limits:
    if num_envs is not None:
        num_envs = whole_number("num_envs", num_envs, 1, 2**20)
    if batch_size not in (None, "all"):
        batch_size = whole_number("batch_size", batch_size, 1, num_envs or 2**20)
    if isinstance(backends, str) or not backends:
        raise ValueError(f"backends: expected a list of some of {', '.join(BACKENDS)}, found {backends!r}")
    for backend in backends:
        check_choice("backends", backend, BACKENDS)
    kept = tuple(backend for backend in dict.fromkeys(backends) if backend == "processes" or not isolate)
    if not kept:
        raise ValueError(f"isolate=True keeps envs out of this process, which none of {', '.join(backends)} does")
    if max_memory is not None:
        max_memory = whole_number("max_memory", max_memory, 1, 2**60)
    latency = number("policy_latency", policy_latency, 0, 3600)
    return Limits(num_envs, batch_size, kept, latency, max_memory, usable_cores())


def _make_lab(env_fns: list[EnvFn], limits: Limits, isolate: bool) -> tuple[LabProcess | LabHere, Limits]:
    """A lab in a process of its own where the env can be sent there; else one here, for what can run here."""
    try:
        pickle_env_fns(env_fns)
        return LabProcess(env_fns, limits.policy_latency), limits
    except BadEnv:
        here = tuple(backend for backend in limits.backends if backend in ("serial", "threads"))
        if isolate or not here:
            raise
        return LabHere(env_fns, limits.policy_latency), replace(limits, backends=here)

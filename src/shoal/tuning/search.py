"""Searches for the fastest way to run an env, in three stages.

In the first stage each candidate gets one short run, in the order of expectation, while there is time. The second stage
has the best of these, the untried candidates that differ from the leaders in one number, and the leaders with other
times of spinning. The third has the best of all. From the second stage on all candidates run in every round, in
changing order, and are compared within a round: then a machine that is busy for a while slows all of them alike.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.envs.functions import EnvFn, as_env_fns, pickle_env_fns
from shoal.errors import BadEnv, EnvError, StartError, StepTimeout
from shoal.observe.progress import Notify
from shoal.observe.words import size
from shoal.support import processes
from shoal.support.checks import check_choice, number, positive_number, whole_number
from shoal.support.cores import cores_beside
from shoal.tuning import BACKENDS
from shoal.tuning.candidates import CLOSE, Candidate, EnvCost, Limits, all_candidates, in_order, neighbours, other_spins
from shoal.tuning.lab import LabLost, LabPool
from shoal.tuning.result import Trial, TuneResult, quartiles

FIRST, SECOND = 0.45, 0.5  # the parts of the remaining time for the first two stages; the third has the rest
KEPT, LEADERS, FINALISTS = 8, 2, 5
ALMOST = 1.05  # a simpler candidate reaches the third stage if the best is at most so many times as fast
ROUNDS, MOST_ROUNDS = 3, 25  # in the second stage, and at most in the third
RUN = 0.1  # seconds of a run, if this many batches
BATCHES = 3  # fit into it
MOST_LOSSES = 2  # a backend is not tried again after so many of its trials have ended the lab
CLOSING = 0.3  # seconds that are kept for the end
HOPELESS = 0.02  # candidates with a lower part of the best rate are not tried


class Search:
    """One search, from limits to a result. The arguments are those of `shoal.tune`; `limits` are the others of them."""

    def __init__(
        self, env: Any, num_envs: int | None = None, *, seconds: float = 20.0, isolate: bool = False,
        env_kwargs: Mapping[str, Any] | None = None, **limits: Any,
    ):  # fmt: skip
        many = isinstance(env, Sequence) and not isinstance(env, str)
        self._env_fns = as_env_fns(env, num_envs if many else 1, env_kwargs)
        self._seconds = positive_number("seconds", seconds)
        checked = _checked_limits(len(self._env_fns) if many else num_envs, isolate=isolate, **limits)
        self._lab, self.limits = _make_lab(self._env_fns, checked, bool(isolate))
        self._order = random.Random(0)
        self._trials: dict[Candidate, Trial] = {}
        self._finals: list[dict[Trial, float]] = []  # the rates of each round of the third stage
        self._open: dict[Trial, int] = {}  # trials with a pool in the lab, and its number; the last used last
        self._count = 0
        self._losses: Counter[str] = Counter()  # how often a trial of a backend has ended the lab
        self.cost: EnvCost  # known once the env was measured
        self._notify: Notify = lambda text: None

    @property
    def tried(self) -> list[Trial]:
        return [trial for trial in self._trials.values() if trial.state == "ran"]

    # ---- the stages ---------------------------------------------------------------------------------------

    def run(self, notify: Notify = lambda text: None) -> None:
        """Measure and search; call `notify` with what is done next. After an interrupt, `result` has what was found."""
        self._began = time.monotonic()
        self._notify = notify
        try:
            notify("starting")
            self._lab.prepare()
            self._began = time.monotonic()  # `seconds` are for the envs: the start of a process is none of their time
            self._measure()
            self._look_for_candidates()
            self._first_stage()
            self._second_stage()
            self._third_stage()
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
            if lost.__cause__ is not None:  # the error that ended its process
                raise lost.__cause__ from None
            raise StepTimeout(
                f"the env could not be built and stepped twice within {self._seconds:g} s: give tune more seconds"
            ) from None

    def _look_for_candidates(self) -> None:
        cost, limits = self.cost, self.limits
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

    def _first_stage(self) -> None:
        """Run each candidate once for a short time, in the order of expectation."""
        until = time.monotonic() + FIRST * self._left
        allowed = [one for one, trial in self._trials.items() if trial.state == "waiting"]
        for one in in_order(allowed, lambda one: self._trials[one].expected):
            trial = self._trials[one]
            # The first trial may take the time of later stages, too.
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

    def _second_stage(self) -> None:
        """Run the best again, and what may be better than the leaders."""
        best, known = self._best(KEPT), list(self._trials)
        leaders = best[:LEADERS]
        near = [self._trials[one] for leader in leaders for one in neighbours(leader.candidate, known)]
        spinning = [(leader, one) for leader in leaders for one in other_spins(leader.candidate)]
        near += [self._trials.setdefault(one, Trial(one, leader.expected)) for leader, one in spinning]
        near = [trial for trial in near if trial.state in ("waiting", "not tried")]
        trials = list(dict.fromkeys([*leaders, *self._favourites(), *best, *near]))
        self._rounds(trials, ROUNDS, SECOND * self._left)

    def _third_stage(self) -> None:
        """Run the best of all, and the simplest of those that are almost as good."""
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
        """Return the trials with the highest expectation. They stay in the search even if one run was disturbed."""
        return sorted(self.tried, key=lambda trial: -trial.expected)[:LEADERS]

    def _rounds(
        self, trials: list[Trial], rounds: int, seconds: float, keep: list[dict[Trial, float]] | None = None
    ) -> None:
        """Run all trials in every round, while whole rounds fit into the time; add the rates of each round to `keep`.

        If not even one round fits, the last trials of the list are left out.
        """
        until = time.monotonic() + seconds
        active = list(trials)
        while active and sum(map(self._seconds_for, active)) > until - time.monotonic():
            left_out = active.pop()
            if left_out.state != "ran":
                left_out.out("not tried", "there was no time")
        for _ in range(rounds):
            if not active or sum(map(self._seconds_for, active)) > until - time.monotonic():
                return
            rates = {trial: self._run(trial) for trial in self._order.sample(active, len(active))}
            active = [trial for trial in active if trial.state == "ran"]
            whole = {trial: rate for trial, rate in rates.items() if rate is not None and trial in active}
            if keep is not None and len(whole) == len(active):
                keep.append(whole)

    # ---- one trial -------------------------------------------------------------------------------------------

    def _seconds_for(self, trial: Trial) -> float:
        """Return the expected time of a run, with its start."""
        start = 0.0
        if trial not in self._open:
            start = trial.start or trial.candidate.start_seconds(self.cost, self.limits)
        # One batch warms up, and one is under way when the time is over.
        return start + 2 * trial.batch_seconds + self._run_seconds(trial)

    def _run_seconds(self, trial: Trial) -> float:
        """Return the time for several batches, unless they are so long that other trials would get no time."""
        return max(RUN, min(BATCHES * trial.batch_seconds, self._left / 20))

    def _run(self, trial: Trial) -> float | None:
        """Run a trial once; return its steps per second, None if it failed."""
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
            if self._left > 0 or trial.state != "ran":  # else the time was over, and it has run before
                self._losses[trial.candidate.backend] += 1
                trial.out("failed", str(lost))
            return None
        except _Failed as failed:
            self._close(trial)
            trial.out("failed", str(failed))
            return None
        self._open[trial] = self._open.pop(trial)
        trial.ran(rate)
        return rate

    def _ask(self, trial: Trial, name: str, *arguments: Any) -> float:
        expected, left = self._seconds_for(trial), self._left
        # A trial that hangs may take half of the remaining time at most; a slow one may take twice its expected time.
        patience = min(5.0 + 10.0 * expected, max(1.0, left / 2, min(2.0 * expected, left + 1.0)))
        try:
            answer = self._lab.call(name, *arguments, timeout=patience)
        except EnvError as error:  # the trial raised what is no Exception, such as SystemExit, through the lab
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
        """Close the pools that were used longest ago, until the memory is enough for this one."""
        room = self.limits.max_memory or (processes.available_memory() or 2**40) // 2
        needed = trial.candidate.memory(self.cost)
        while self._open and needed + sum(one.candidate.memory(self.cost) for one in self._open) > room:
            self._close(next(iter(self._open)))

    # ---- the end ---------------------------------------------------------------------------------------------

    def result(self) -> TuneResult:
        """Return what was found so far. Raises StartError if no trial has run, and none is left that could."""
        cost, trials = self.cost, sorted(self._trials.values(), key=lambda trial: trial.place)
        chosen = self._choose()
        if chosen.state == "ran":
            others = len(self.tried) - 1
            low, median, high = quartiles(chosen.rates)
            reason = f"tuned: {median:,.0f} steps/s ({low:,.0f} to {high:,.0f})"
            reason += f", the best of {others + 1} that were tried" if others else ", and nothing else was tried"
        else:
            reason = f"{chosen.expected:,.0f} steps/s are expected; there was no time to try it"
        plan = chosen.candidate.plan(f"{reason}; {cost.step_text}", cost.measured)
        return TuneResult(plan, cost, trials, self.limits, self._took)

    def _choose(self) -> Trial:
        if scores := self._scores():
            best = max(scores.values())
            good = [trial for trial, score in scores.items() if score * CLOSE >= best]
            return min(good, key=lambda trial: trial.candidate.simplicity)
        untried = [trial for trial in self._trials.values() if trial.state in ("waiting", "not tried")]
        if untried:
            return max(untried, key=lambda trial: trial.expected)
        reasons = "; ".join(f"{trial.candidate}: {trial.note}" for trial in list(self._trials.values())[:5])
        raise StartError(f"no trial came to an end. {reasons}")

    def _scores(self) -> dict[Trial, float]:
        """Return the rates of the finalists relative to their rounds; of all trials, if there was no third stage."""
        lasting = [trial for trial in self.tried if self._finals and all(trial in rates for rates in self._finals)]
        if not lasting:
            return {trial: trial.rate for trial in self.tried}
        means = [statistics.fmean(rates[trial] for trial in lasting) for rates in self._finals]
        pairs = list(zip(self._finals, means, strict=True))
        return {trial: statistics.median(rates[trial] / mean for rates, mean in pairs) for trial in lasting}


class _Failed(Exception):
    """A trial failed; the text says why."""


def _checked_limits(
    num_envs: Any = None, batch_size: Any = None, backends: Any = BACKENDS, policy_latency: Any = 0.0,
    max_memory: Any = None, isolate: bool = False, learner_threads: Any = None,
) -> Limits:  # fmt: skip
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
    if learner_threads is not None:
        learner_threads = whole_number("learner_threads", learner_threads, 0, 2**20)
    return Limits(num_envs, batch_size, kept, latency, max_memory, cores_beside(learner_threads))


def _make_lab(env_fns: list[EnvFn], limits: Limits, isolate: bool) -> tuple[LabPool, Limits]:
    """Make a lab in a process of its own if the env can be pickled; else here, for the backends that can run here."""
    try:
        pickle_env_fns(env_fns)
        return LabPool(env_fns, limits.policy_latency, "processes"), limits
    except BadEnv:
        here = tuple(backend for backend in limits.backends if backend in ("serial", "threads"))
        if isolate or not here:
            raise
        return LabPool(env_fns, limits.policy_latency, "serial"), replace(limits, backends=here)

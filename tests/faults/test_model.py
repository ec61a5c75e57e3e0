"""Random programs against a model of the pool: what each lane may answer, and which call is refused and moves nothing.

The model keeps, for each lane, all the states that it may be in. Without faults that is always one, and every answer is
foretold to the last bit. Where a worker was killed nobody knows what it still had to say: then there are several, and
each answer rules some of them out. A lane that is left with none has answered what it must not.

A program is drawn before it is run, and is read by the state that it meets: "send to lanes 2 and 5" becomes a send to
those of them that can be sent to, most of the time. So every program says something, whatever luck does to it.
SHOAL_EXAMPLES=10 runs ten times as many; SHOAL_SHRINK=1 makes the one that fails smaller, best with `-k serial`.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from faults.kit import ISOLATED, DeedEnv, alive, eventually
from shoal import (
    BadAction,
    BadCall,
    Batch,
    CallPending,
    EnvError,
    NothingPending,
    Pool,
    PoolClosed,
    ResetNeeded,
    StepTimeout,
    WorkerDied,
)

EXAMPLES = float(os.environ.get("SHOAL_EXAMPLES", "1"))  # times as many as usual
MOST_ACTIONS = 4**7  # two bits for each of seven lanes
LONG, HANGS = 10.0, 15.0  # seconds: longer than any line of a program takes

SHRINK = os.environ.get("SHOAL_SHRINK", "0") != "0"  # make a program that fails smaller, however long that takes

# Against what hangs there is a watchdog for each line. This one is for programs as many as they are, on a busy machine.
pytestmark = pytest.mark.timeout(0 if SHRINK else 300 * max(1.0, EXAMPLES))

Obs = tuple[int, int, int]
Program = list[tuple[str, dict[str, Any]]]  # (name, what was drawn for it)


# ---- one env -------------------------------------------------------------------------------------------------


class Raised(Exception):
    """The modelled env has raised; it is left as `toy`."""

    def __init__(self, toy: Toy):
        self.toy = toy


@dataclass(frozen=True)
class Toy:
    """A DeedEnv: a CountEnv that raises in the method named by `deed`."""

    length: int
    truncates: bool
    seed: int = -1
    episode: int = -1
    steps: int = 0
    options: Any = "never reset"
    value: Any = "untouched"
    deed: str = ""

    @property
    def obs(self) -> Obs:
        return self.seed, self.episode, self.steps

    def reset(self, seed: int | None, options: Any = None) -> Toy:
        if self.deed == "reset":
            raise Raised(self)
        episode = 0 if seed is not None else self.episode + 1
        return replace(self, seed=self.seed if seed is None else seed, episode=episode, steps=0, options=options)

    def step(self) -> Toy:
        if self.deed == "step":
            raise Raised(self)
        return replace(self, steps=self.steps + 1)


# ---- one lane ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One row of a batch; `total` and `length` are of the episode so far, `report` is (cause, count)."""

    obs: Obs
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    began: bool = False
    total: float = 0.0
    length: int = 0
    final_obs: Obs | None = None
    report: tuple[str, int] | None = None

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated

    @property
    def noted(self) -> bool:
        """Whether it has an info."""
        return self.final_obs is not None or self.report is not None

    @classmethod
    def of(cls, batch: Batch, row: int) -> Answer:
        info = dict(batch.info.get(int(batch.env_id[row]), {}))
        final, report = info.pop("final_obs", None), info.pop("shoal_restart", None)
        assert info == ({} if final is None else {"final_info": {}}), info
        assert report is None or (set(report) == {"cause", "count", "culprit", "message"} and report["message"])
        return cls(
            tuple(batch.obs[row].tolist()), float(batch.reward[row]), bool(batch.terminated[row]),
            bool(batch.truncated[row]), bool(batch.began[row]), float(batch.episode_return[row]),
            int(batch.episode_length[row]), None if final is None else tuple(final.tolist()),
            None if report is None else (report["cause"], report["count"]),
        )  # fmt: skip


def derived(seed: int | None, count: int) -> int | None:
    """The seed of an env that was restarted so many times."""
    return None if seed is None else int(np.random.SeedSequence([seed, count]).generate_state(1)[0])


NOBODY: frozenset[Any] = frozenset()


@dataclass(frozen=True)
class Lane:
    """One state that a lane may be in. What it was asked is carried out at once; only the answer waits.

    Attributes:
        fresh: what its env is when it is built.
        mode: autoreset.
        restarts: whether the pool restarts envs.
        total, length: of the running episode.
        over: the env's episode is over, and it was not reset since.
        stale: it must be reset by the user before it is stepped.
        seen: what was last delivered.
        given: the last seed of the caller's.
        next_seed: for the next reset of an env that was restarted.
        count: how many envs were lost here.
        due: why the last of them was, if that is still to be told (after the answer that waits, if there is one).
        asked: "step", "reset" or "" for nothing.
        wish: the seed and options that the reset was asked with.
        answer: to what was asked; None where the env raised, and the caller will get its error.
        undone: what the lane may be if what was asked is dropped before it could tell of a loss.
        raising: what was asked has cost an env.
    """

    toy: Toy
    fresh: Toy
    mode: str
    restarts: bool
    total: float = 0.0
    length: int = 0
    over: bool = False
    stale: bool = True
    seen: Answer | None = None
    given: int | None = None
    next_seed: int | None = None
    count: int = 0
    due: str = ""
    asked: str = ""
    wish: tuple[int | None, Any] = (None, None)
    answer: Answer | None = None
    undone: frozenset[Lane] = NOBODY
    raising: bool = False

    # ---- requests ----

    def step(self, action: int) -> set[Lane]:
        """Ask for a step."""
        asked = replace(self, asked="step", wish=(None, None))
        if self.due:
            return asked.tell(self.due, {self})
        try:
            if self.over and self.mode == "next_step":
                return {asked.begin(self.toy.reset(self.next_seed))}
            return {asked.go_on(self.toy.step(), action)}
        except Raised as error:
            return asked.fail({self}, error.toy)

    def reset(self, seed: int | None, options: Any) -> set[Lane]:
        """Ask for a reset."""
        before = replace(self, stale=False, given=self.given if seed is None else seed)
        asked = replace(before, asked="reset", wish=(seed, options))
        if self.due:
            return asked.tell(self.due, {before})
        try:
            return {asked.begin(self.toy.reset(self.next_seed if seed is None else seed, options))}
        except Raised as error:
            return asked.fail({before}, error.toy)

    def go_on(self, toy: Toy, action: int) -> Lane:
        """One step of the episode."""
        reward = toy.steps + 100.0 * action
        ended = toy.steps >= toy.length
        answer = Answer(
            toy.obs, reward, ended and not toy.truncates, ended and toy.truncates, False, self.total + reward,
            self.length + 1,
        )  # fmt: skip
        if not ended:
            return replace(self, toy=toy, answer=answer, total=answer.total, length=answer.length)
        if self.mode != "same_step":
            return replace(self, toy=toy, answer=answer, over=True)
        begun = toy.reset(None)
        return replace(
            self, toy=begun, total=0.0, length=0, answer=replace(answer, obs=begun.obs, began=True, final_obs=toy.obs)
        )

    def begin(self, toy: Toy, report: tuple[str, int] | None = None) -> Lane:
        """The first observation of an episode."""
        answer = Answer(toy.obs, began=True, report=report)
        return replace(self, toy=toy, answer=answer, total=0.0, length=0, over=False, next_seed=None)

    def fail(self, before: set[Lane], toy: Toy) -> set[Lane]:
        """The env raised over what was asked; `before`: what the lane was until then."""
        if not self.restarts:
            return {replace(self, toy=toy, answer=None)}
        undone = {replace(one, toy=toy, count=self.count + 1, due="raised") for one in before}
        found = replace(self, toy=self.fresh, count=self.count + 1).tell("raised", undone, guilty=True)
        return {replace(one, raising=True) for one in found}

    # ---- losses ----

    def tell(self, cause: str, undone: set[Lane], guilty: bool = False) -> set[Lane]:
        """The answers that may tell of a loss.

        Args:
            undone: what the lane may be if they are dropped.
            guilty: the env was lost over this very request. A seed that came with it is not tried again.
        """
        # Who died was replaced at once, and may have been told something since; who raised is replaced now.
        lane = replace(self, due="", toy=self.toy if cause == "died" else self.fresh, undone=frozenset(undone))
        seeds = {derived(self.given, self.count)}
        if self.asked == "reset" and not guilty and self.wish[0] is not None:
            seeds.add(self.wish[0])  # a seed that was asked for after the loss
        found: set[Lane] = set()
        for seed in seeds:
            for answer in lane._ways_to_tell():
                try:
                    found.add(answer((cause, self.count), seed))
                except Raised as error:  # the new env, in its turn
                    found |= {replace(one, undone=one.undone | undone) for one in lane.fail(undone, error.toy)}
        return found

    def _ways_to_tell(self) -> list[Callable[[tuple[str, int], int | None], Lane]]:
        ways: list[Callable[[tuple[str, int], int | None], Lane]] = []
        running = self.seen is not None and (self.mode == "same_step" or not self.seen.ended)
        if self.asked == "reset" or not running or self.over:
            ways.append(lambda report, seed: self.begin(self.toy.reset(seed, self.wish[1]), report))
        if self.asked == "step" and (running or self.seen is None):
            ways.append(self._cut_short)
        return ways

    def _cut_short(self, report: tuple[str, int], seed: int | None) -> Lane:
        """The end of the episode that was running: what was delivered last, once more."""
        last = self.seen or Answer((0, 0, 0))
        if self.mode == "same_step" and last.ended:
            last = replace(last, total=0.0, length=0)  # a new one was running already
        answer = Answer(last.obs, truncated=True, total=last.total, length=last.length, report=report)
        if self.mode != "same_step":
            return replace(self, answer=answer, over=True, next_seed=seed)
        begun = self.toy.reset(seed)
        answer = replace(answer, obs=begun.obs, began=True, final_obs=last.obs)
        return replace(self, toy=begun, answer=answer, total=0.0, length=0, over=False)

    def killed(self, answered: bool) -> set[Lane]:
        """Its worker was, when it had answered all that it was asked, or not. Nobody knows about what it had to add."""
        lost = replace(self, toy=self.fresh, due="died", count=self.count + 1, next_seed=None)
        if not self.asked:
            return {lost}
        undone = {replace(one, toy=self.fresh, due="died", count=one.count + 1) for one in self.undone}
        kept = replace(lost, undone=frozenset(undone))
        if answered and self.answer is not None and not self.answer.noted:
            return {kept}
        found = {kept} if answered else set()
        # It has to be asked again; and if the env had raised, perhaps nobody had heard of that.
        for count in (lost.count, self.count) if self.raising else (lost.count,):
            idle = replace(lost, count=count, asked="", answer=None, undone=NOBODY, raising=False)
            found |= replace(lost, count=count, raising=False).tell("died", {idle})
        return found

    # ---- answers ----

    def delivered(self) -> Lane:
        """The caller has its answer."""
        assert self.answer is not None
        stale = self.mode == "disabled" and self.answer.ended
        return replace(self, asked="", seen=self.answer, answer=None, undone=NOBODY, raising=False, stale=stale)

    def dropped(self, stirred: bool) -> set[Lane]:
        """Nobody wants its answer. `stirred`: the pool has looked at the lane since it was asked."""
        if not self.asked:
            return {self}
        ended = self.answer is None or (self.mode == "disabled" and self.answer.ended)
        forgotten = replace(self, asked="", answer=None, undone=NOBODY, raising=False, stale=self.stale or ended)
        # A report that was not yet on its way comes with the next answer. So does one whose answer was there already
        # and was dropped, but by then the new env has been reset once.
        again = {replace(one, toy=self.toy) for one in self.undone if one.due}
        if stirred or not self.undone or any(one.due == "died" for one in self.undone):
            return {*self.undone, *again, forgotten}
        return {*self.undone, *again}

    def failed(self) -> Lane:
        """The caller has its error."""
        return replace(self, asked="", answer=None, stale=True)


# ---- the pool ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """A pool to be opened; `batch` is cut down to the number of envs."""

    size: tuple[int, int]  # envs, workers
    batch: int
    mode: Any
    order: Any
    frames: int
    copy: bool
    length: int
    truncates: bool
    seed: int | None
    reset: bool  # at once: who does not mostly hears that a reset is needed


class Machine:
    """One pool and its model. Its public methods are what a program consists of."""

    def __init__(self, backend: str, restarts: bool, setup: Setup):
        self.backend, self.fifo = backend, setup.order == "fifo"
        self.count, workers = setup.size
        self.batch = 1 + setup.batch % self.count
        self.contiguous = setup.order == "contiguous"
        if self.contiguous and self.count % self.batch:
            self.batch = 1
        # The window is too short for two restarts, so that they follow each other without a delay.
        faults = {"on_error": "restart", "max_restarts": 10**6, "restart_window": 1e-6} if restarts else {}
        self.pool = Pool(
            functools.partial(DeedEnv, length=setup.length, truncates=setup.truncates), self.count, num_workers=workers,
            backend=backend, batch_size=self.batch, autoreset=setup.mode, order=setup.order, frames=setup.frames,  # type: ignore[arg-type]
            copy=setup.copy, seed=setup.seed, **faults,  # type: ignore[arg-type]
        )  # fmt: skip
        toy = Toy(setup.length, setup.truncates)
        self.lanes = [{Lane(toy, toy, setup.mode, restarts)} for _ in range(self.count)]
        self.first_seeds = [None if setup.seed is None else setup.seed + lane for lane in range(self.count)]
        self.queue: list[int] = []  # lanes that are pending, in the order in which they were sent
        self.stirred: set[int] = set()  # those that the pool may have looked at since
        self.doomed: set[int] = set()  # workers that were killed, and the pool may not know
        self.owner = {lane: worker.index for worker in self.pool.workers for lane in worker.env_ids}
        self.valid_for = 10**9 if setup.copy else setup.frames - 1
        self.uses = np.zeros(self.count, int)
        self.kept: list[tuple[Any, Any, Any, Any]] = []  # batches that must stay as they are: obs, copy, ids, uses
        self.log: list[str] = []

    def run(self, name: str, drawn: dict[str, Any]) -> None:
        """One line of a program, and what holds after every line."""
        self.log.append(f"{name}({', '.join(f'{key}={value!r}' for key, value in drawn.items())})")
        getattr(self, name)(**drawn)
        assert self.pool.pending.tolist() == sorted(self.queue)
        assert not self.pool.closed
        self._see_that_arrays_stay()

    def _see_that_arrays_stay(self) -> None:
        kept = []
        for obs, copy, ids, uses in self.kept:
            valid = self.uses[ids] - uses <= self.valid_for
            assert (obs[valid] == copy[valid]).all(), f"envs {ids}: expected {copy}, found {obs}, valid {valid}"
            if valid.any():
                kept.append((obs, copy, ids, uses))
        self.kept = kept[-4:]

    def end(self) -> None:
        """Close it, in whatever state it is; nothing can be done with it any more."""
        self.pool.close()
        self.pool.close()
        assert self.pool.closed
        zeros = np.zeros(self.count, int)
        for use in (
            lambda: self.pool.send(zeros), self.pool.recv, lambda: self.pool.step(zeros), self.pool.reset,
            self.pool.async_reset, self.pool.wait_reset, self.pool.drop_pending, lambda: self.pool.call("add", 1),
            lambda: self.pool.get_attr("steps"), lambda: self.pool.set_attr("value", 1), self.pool.stats,
        ):  # fmt: skip
            with pytest.raises(PoolClosed):
                use()

    # ---- what the model knows ----

    def _named(self, lanes: list[int] | None) -> list[int] | None:
        """Lanes as drawn for seven envs, in as many as there are."""
        return None if lanes is None else list(dict.fromkeys(lane % self.count for lane in lanes))

    def _all(self, ids: list[int] | None) -> list[int]:
        return list(range(self.count)) if ids is None else ids

    def _busy(self, ids: Iterable[int]) -> list[int]:
        return [lane for lane in ids if lane in self.queue]

    def _idle(self, lane: int) -> int:
        """The next lane that is idle, if any is."""
        following = [(lane + more) % self.count for more in range(self.count)]
        return next((one for one in following if one not in self.queue), lane % self.count)

    def _foreseen(self, ids: Iterable[int]) -> set[Any]:
        """What a step of these lanes may raise; None for nothing."""
        ids = list(ids)
        if self._busy(ids):
            return {CallPending}
        certain = any(all(state.stale for state in self.lanes[lane]) for lane in ids)
        possible = any(state.stale for lane in ids for state in self.lanes[lane])
        return {ResetNeeded} if certain else {ResetNeeded, None} if possible else {None}

    def _raising(self, ids: Iterable[int]) -> list[int]:
        """Those of the lanes whose envs have raised, which the caller is yet to hear."""
        return [lane for lane in ids if any(one.asked and one.answer is None for one in self.lanes[lane])]

    def _attempt(self, allowed: set[Any], act: Callable[[], Any]) -> Any:
        """What it returns, or the error; either must be among what is allowed."""
        try:
            result = act()
        except Exception as error:
            self.log.append(f"  {type(error).__name__}")
            if not any(kind is not None and isinstance(error, kind) for kind in allowed):
                raise
            return error
        assert None in allowed, f"expected one of {allowed}, found {result}"
        return result

    def _move(self, lane: int, found: set[Lane]) -> None:
        """The states that a lane may be in now."""
        assert found, f"env {lane} cannot be so"
        assert len(found) < 200, "the model has lost its way"
        self.lanes[lane] = found

    def _ask(self, lane: int, states: set[Lane]) -> None:
        self._move(lane, states)
        self.queue.append(lane)
        self.stirred.discard(lane)

    def _ask_steps(self, ids: list[int], actions: Any) -> None:
        for lane, action in zip(ids, actions.tolist(), strict=True):
            ready = [one for one in self.lanes[lane] if not one.stale]
            self._ask(lane, {state for one in ready for state in one.step(action)})
            self.uses[lane] += 1

    def _ask_resets(self, ids: list[int], seed: Any, options: Any) -> None:
        self._forget(ids)
        self._stir()
        for row, lane in enumerate(ids):
            one = seed if seed is None else seed + lane if isinstance(seed, int) else seed[row]
            one = self.first_seeds[lane] if one is None else one
            self.first_seeds[lane] = None
            self._ask(lane, {state for before in self.lanes[lane] for state in before.reset(one, options)})
        self.uses += 1  # a reset of some counts as a send of all

    def _forget(self, ids: Iterable[int]) -> None:
        """What these lanes answer is dropped."""
        for lane in self._busy(ids):
            stirred = lane in self.stirred
            self._move(lane, {state for one in self.lanes[lane] for state in one.dropped(stirred)})
            self.queue.remove(lane)

    def _stir(self) -> None:
        """The pool has looked around."""
        self.stirred |= set(self.queue)

    def _take(self, batch: Batch, ids: list[int] | None) -> None:
        """Check what was delivered; `ids`: of exactly these lanes."""
        found = batch.env_id.tolist()
        assert found == sorted(set(found))
        assert set(found) <= set(self.queue)
        assert ids is None or found == sorted(ids), f"expected {sorted(ids)}, found {found}"
        assert batch.mask.all()
        assert set(batch.info) <= set(found)
        for row, lane in enumerate(found):
            answer = Answer.of(batch, row)
            self.log.append(f"  env {lane}: {answer}")
            states = {one.delivered() for one in self.lanes[lane] if one.answer == answer}
            assert states, f"env {lane}: expected one of {[one.answer for one in self.lanes[lane]]}, found {answer}"
            self._move(lane, states)
            self.queue.remove(lane)
            if answer.report is not None:
                if not any(one.due == "died" for one in states):  # it may be older than the last death
                    self.doomed.discard(self.owner[lane])
                culprit = batch.info[lane]["shoal_restart"]["culprit"]
                # Who was killed from outside may have been busy with an env of its own.
                assert culprit == lane or (
                    answer.report[0] == "died" and self.owner.get(culprit) in (None, self.owner[lane])
                )
        self.kept.append((batch.obs, batch.obs.copy(), batch.env_id, self.uses[batch.env_id].copy()))

    def _mourn(self, error: EnvError, among: Iterable[int]) -> None:
        """The caller was told of an env that raised."""
        assert error.env_id in self._raising(among)
        self._move(error.env_id, {one.failed() for one in self.lanes[error.env_id] if one.answer is None})
        self.queue.remove(error.env_id)

    # ---- steps ----

    def nothing(self) -> None:
        """What a program shrinks to."""

    def send(self, lanes: list[int] | None, drawn: int, tame: bool) -> None:
        ids = self._named(lanes)
        if tame:
            ids = [lane for lane in self._all(ids) if None in self._foreseen([lane])]
            if not ids:
                return
        whom = self._all(ids)
        actions = _actions(drawn, whom)
        given = _as_they_come(drawn, actions), ids if ids is None else _ids_as_they_come(drawn, ids)
        if self._attempt(self._foreseen(whom), lambda: self.pool.send(*given)) is None:
            self._ask_steps(whom, actions)

    def recv(self, patient: bool, limit: bool = True) -> None:
        timeout = 0 if not patient else LONG if limit else None
        windows = self._windows()
        if len(windows if self.contiguous else self.queue) < (1 if self.contiguous else self.batch):
            self._attempt({NothingPending}, lambda: self.pool.recv(timeout))
            return
        among = self.queue[: self.batch] if self.fifo else list(self.queue)
        if self.contiguous:
            among = [lane for window in windows for lane in window]
        raising = self._raising(among)
        allowed: set[Any] = {EnvError} if raising else {None}
        if len(among) > self.batch and not (self.contiguous and all(map(self._raising, windows))):
            allowed.add(None)  # of others
        result = self._attempt(allowed | self._late(patient), lambda: self.pool.recv(timeout))
        if isinstance(result, EnvError):
            self._mourn(result, among)
        elif isinstance(result, Batch):
            assert len(result.env_id) == self.batch
            assert not self.contiguous or result.env_id.tolist() in windows
            self._take(result, among if len(among) == self.batch else None)
        self._stir()

    def _windows(self) -> list[list[int]]:
        """The batches of neighbours of which all are pending."""
        found = [list(range(first, first + self.batch)) for first in range(0, self.count, self.batch)]
        return [window for window in found if set(window) <= set(self.queue)]

    def _late(self, patient: bool) -> set[Any]:
        return set() if patient or self.backend == "serial" else {StepTimeout}

    def turn(self, lanes: list[int] | None, drawn: int) -> None:
        """Reset who must be, send to who can be, receive: a good learner's."""
        stale = [lane for lane in self._all(self._named(lanes)) if self._foreseen([lane]) == {ResetNeeded}]
        if stale:
            self.async_reset(stale, None, None)
        self.send(lanes, drawn, True)
        if self._windows() if self.contiguous else len(self.queue) >= self.batch:
            self.recv(True, False)

    def step(self, drawn: int, patient: bool, tame: bool) -> None:
        if tame and self.queue:
            self.wait_reset(None, True)
        whom = self._all(None)
        actions, allowed = _actions(drawn, whom), self._foreseen(whom)
        given = _as_they_come(drawn, actions)
        before = list(self.lanes), list(self.queue), self.uses.copy()
        if None in allowed:
            self._ask_steps(whom, actions)
            allowed = (allowed - {None}) | ({EnvError} if self._raising(whom) else {None}) | self._late(patient)
        result = self._attempt(allowed, lambda: self.pool.step(given, None if patient else 0))
        if isinstance(result, Batch):
            self._take(result, whom)
        elif isinstance(result, EnvError):
            self._mourn(result, whom)
            self._stir()
            self._forget(set(self.queue) - (set() if patient else set(self.pool.pending.tolist())))
        elif not isinstance(result, StepTimeout):
            self.lanes, self.queue, self.uses = before
        self._stir()

    def drop(self, lanes: list[int] | None) -> None:
        ids = self._named(lanes)
        self.pool.drop_pending(ids, LONG)
        self._forget(self._all(ids))
        self._stir()

    # ---- resets ----

    def reset(self, lanes: list[int] | None, seed: Any, options: Any) -> None:
        ids = self._named(lanes)
        whom, seeds = self._all(ids), _cut(seed, ids, self.count)
        self._ask_resets(whom, seeds, options)
        again = functools.partial(self.pool.reset, ids, seed=seeds, options=_pack(options), timeout=LONG)
        result = self._attempt({EnvError} if self._raising(whom) else {None}, again)
        if isinstance(result, EnvError):
            self._mourn(result, whom)
            self._forget(whom)
        else:
            self._take(result, whom)
        self._stir()

    def async_reset(self, lanes: list[int] | None, seed: Any, options: Any) -> None:
        ids = self._named(lanes)
        seeds = _cut(seed, ids, self.count)
        self.pool.async_reset(ids, seed=seeds, options=_pack(options))
        self._ask_resets(self._all(ids), seeds, options)

    def wait_reset(self, lanes: list[int] | None, tame: bool) -> None:
        ids = self._named(lanes)
        if tame:
            ids = self._busy(self._all(ids))
            if not ids:
                return
        whom = self._all(ids)
        allowed: set[Any] = {EnvError} if self._raising(whom) else {None}
        if len(self._busy(whom)) < len(whom):
            allowed = {NothingPending}
        result = self._attempt(allowed, lambda: self.pool.data.batch(self.pool.wait_reset(ids, LONG)))
        if isinstance(result, EnvError):
            self._mourn(result, whom)
        elif isinstance(result, Batch):
            self.uses += 1  # as at any reset of some
            self._take(result, whom)
        self._stir()

    # ---- commands ----

    def _command(self, ids: list[int] | None, kinds: set[Any], act: Callable[[], Any]) -> Any:
        """Its values, or the error that refused it."""
        whom = self._all(ids)
        owners = {self.owner[lane] for lane in whom}
        if self._busy(whom):
            kinds = {CallPending}
        elif self.doomed & owners:
            kinds = kinds | {WorkerDied}
        result = self._attempt(kinds, act)
        if not isinstance(result, CallPending | WorkerDied):
            self.doomed -= owners
        self._stir()
        return result

    def call(self, lanes: list[int] | None, number: int) -> None:
        ids = self._named(lanes)
        act = functools.partial(self.pool.call, "add", number, b=2, env_ids=ids, timeout=LONG)
        self._learn(ids, self._command(ids, {None}, act), lambda toy: number + 2 + toy.steps)

    def get_attr(self, lanes: list[int] | None, name: str) -> None:
        ids = self._named(lanes)
        values = self._command(ids, {None}, lambda: self.pool.get_attr(name, ids))
        if name == "options_given" and isinstance(values, list):
            values = [one["number"] if isinstance(one, dict) else one for one in values]
        own = {"seed_given": "seed", "options_given": "options"}.get(name, name)
        self._learn(ids, values, lambda toy: getattr(toy, own))

    def _learn(self, ids: list[int] | None, values: list[Any] | Exception, say: Callable[[Toy], Any]) -> None:
        """The envs have said something about themselves, if they were asked."""
        if isinstance(values, Exception):
            return
        for lane, value in zip(self._all(ids), values, strict=True):
            states = {one for one in self.lanes[lane] if say(one.toy) == value}
            assert states, f"env {lane}: expected one of {[say(one.toy) for one in self.lanes[lane]]}, found {value}"
            self._move(lane, states)

    def set_attr(self, lane: int, name: str, number: int) -> None:
        self._alter(lane, name, number, {name: number})

    def misbehave(self, lane: int, where: str) -> None:
        """From now on this env raises in this method; one that is rebuilt does not."""
        self._alter(self._idle(lane), "deeds", {where: "raise"} if where else {}, {"deed": where})

    def _alter(self, lane: int, name: str, value: Any, changes: dict[str, Any]) -> None:
        lane %= self.count
        # One lane at a time: nobody could say which of several were told before a worker was found dead.
        refused = self._command([lane], {None}, lambda: self.pool.set_attr(name, [value], [lane]))
        if not refused:
            self._move(lane, {replace(one, toy=replace(one.toy, **changes)) for one in self.lanes[lane]})

    # ---- what is refused ----

    def bad_ids(self, bad: Any) -> None:
        pool = self.pool
        for use in (
            lambda: pool.send(np.zeros(len(bad), int), bad), lambda: pool.reset(bad), lambda: pool.async_reset(bad),
            lambda: pool.drop_pending(bad), lambda: pool.wait_reset(bad), lambda: pool.call("add", 1, env_ids=bad),
            lambda: pool.get_attr("steps", bad), lambda: pool.set_attr("value", "bad", bad),
        ):  # fmt: skip
            self._attempt({BadAction}, use)

    def bad_actions(self, lanes: list[int] | None, drawn: int, how: str, by_step: bool) -> None:
        ids = None if by_step else self._named(lanes)
        whom = self._all(ids)
        allowed = {BadAction if kind is None else kind for kind in self._foreseen(whom)}
        bad = BAD_ACTIONS[how](_actions(drawn, whom))
        given = None if ids is None else _ids_as_they_come(drawn, ids)
        self._attempt(allowed, (lambda: self.pool.step(bad)) if by_step else (lambda: self.pool.send(bad, given)))

    def bad_reset(self, which: int, lanes: list[int] | None) -> None:
        options, kind = BAD_RESETS[which]
        self._attempt({kind}, lambda: self.pool.reset(self._named(lanes), **options))

    def bad_command(self, lanes: list[int] | None) -> None:
        ids = self._named(lanes)
        too_many = ["x"] * (len(self._all(ids)) + 1)
        self._attempt({BadCall}, lambda: self.pool.call("step", 0, env_ids=ids))
        self._attempt({BadCall}, lambda: self.pool.set_attr("value", too_many, ids))
        self._attempt({ValueError}, lambda: self.pool.recv(timeout=float("nan")))
        self._command(ids, {KeyError}, lambda: self.pool.call("complain", env_ids=ids))
        self._command(ids, {AttributeError}, lambda: self.pool.get_attr("no_such_thing", ids))

    # ---- faults ----

    def kill(self, worker: int) -> None:
        workers = self.pool.workers
        worker %= len(workers)
        pid = workers[worker].pid
        if pid is None or not alive(pid):
            return  # it is the caller itself, or is being replaced
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not alive(pid))
        self.doomed.add(worker)
        # Nobody but the slab knows how far it had come, and now that is settled.
        requested, answered = (self.pool._slab.array(name) for name in ("requested", "answered"))
        for lane in workers[worker].env_ids:
            whole = bool(requested[lane] == answered[lane])
            self._move(lane, {state for one in self.lanes[lane] for state in one.killed(whole)})


def _actions(drawn: int, ids: list[int]) -> Any:
    """Two bits for each lane."""
    return np.array([drawn >> 2 * lane & 3 for lane in ids])


# The same actions and ids, as callers have them: some are taken in one call of the core, others step by step.
FORMS: list[Callable[[Any], Any]] = [
    *[lambda plain: plain] * 3, lambda plain: plain.astype(np.int32), lambda plain: plain.astype(">i8"),
    lambda plain: plain.tolist(), lambda plain: np.repeat(plain, 2)[::2], lambda plain: plain.astype(np.uint8),
]  # fmt: skip


def _as_they_come(drawn: int, actions: Any) -> Any:
    return FORMS[drawn // MOST_ACTIONS % len(FORMS)](actions)


def _ids_as_they_come(drawn: int, ids: list[int]) -> Any:
    return FORMS[drawn // MOST_ACTIONS // len(FORMS)](np.array(ids))


def _cut(seed: Any, ids: list[int] | None, count: int) -> Any:
    """As many seeds as there are ids."""
    return seed[: count if ids is None else len(ids)] if isinstance(seed, list) else seed


def _pack(options: int | None) -> Any:
    return None if options is None else {"number": options}


# ---- programs ------------------------------------------------------------------------------------------------

BAD_IDS: list[Any] = [[0, 0], [-1], [99], [], [0.5], ["0"], [[0]], [True]]
BAD_ACTIONS: dict[str, Callable[[Any], Any]] = {
    "too large": lambda good: good + 4,
    "below": lambda good: good - 4,
    "one more": lambda good: np.append(good, 0),
    "none": lambda good: good[:0],
    "fractions": lambda good: good + 0.5,
    "text": lambda good: ["x"] * len(good),
    "nested": lambda good: good[None],
}
BAD_RESETS: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"seed": [1] * 50}, ValueError),
    ({"seed": "seven"}, TypeError),
    ({"seed": 1.5}, TypeError),
    ({"seed": True}, TypeError),
    ({"options": 1}, TypeError),
    ({"timeout": -1}, ValueError),
]

mostly = st.sampled_from([True, True, True, False])
lanes = st.sampled_from(
    [None, [0], [1], [2], [3], [4], [5], [6], [0, 1], [1, 0], [2, 3], [6, 0], [5, 3], [0, 2, 4, 6], [1, 3, 5],
     [3, 2, 1], [6, 5, 4, 3], [4, 5, 6], None, [6, 5, 4, 3, 2, 1, 0], None]
)  # fmt: skip
actions = st.integers(0, MOST_ACTIONS * len(FORMS) ** 2 - 1)  # and in which form they and the ids are given
seeds = st.sampled_from([None, 3, 4, None, [None, 3, 4, 5, None, 3, 4], [9, 8, 7, 6, 5, 4, 3]])
options = st.sampled_from([None, 1, 2])

# What is drawn for each line.
LINES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "send": {"lanes": lanes, "drawn": actions, "tame": mostly},
    "recv": {"patient": mostly, "limit": st.booleans()},
    "turn": {"lanes": lanes, "drawn": actions},
    "step": {"drawn": actions, "patient": mostly, "tame": mostly},
    "drop": {"lanes": lanes},
    "reset": {"lanes": lanes, "seed": seeds, "options": options},
    "async_reset": {"lanes": lanes, "seed": seeds, "options": options},
    "wait_reset": {"lanes": lanes, "tame": mostly},
    "call": {"lanes": lanes, "number": st.integers(0, 9)},
    "get_attr": {"lanes": lanes, "name": st.sampled_from(["seed_given", "episode", "value", "options_given"])},
    "set_attr": {"lane": st.integers(0, 6), "name": st.sampled_from(["length", "value"]), "number": st.integers(1, 4)},
    "misbehave": {"lane": st.integers(0, 6), "where": st.sampled_from(["step", "step", "reset", ""])},
    "bad_ids": {"bad": st.sampled_from(BAD_IDS)},
    "bad_actions": {"lanes": lanes, "drawn": actions, "how": st.sampled_from(sorted(BAD_ACTIONS)),
                    "by_step": st.booleans()},
    "bad_reset": {"which": st.integers(0, len(BAD_RESETS) - 1), "lanes": lanes},
    "bad_command": {"lanes": lanes},
    "kill": {"worker": st.integers(0, 2)},
}  # fmt: skip
# How often each is drawn. A program that has only a few kinds of lines comes to more of what they do to each other.
THEMES: list[dict[str, int]] = [
    {"send": 8, "recv": 8, "turn": 8, "step": 5, "drop": 3, "reset": 3, "async_reset": 3, "wait_reset": 2, "call": 1,
     "get_attr": 1, "set_attr": 1, "misbehave": 4, "kill": 3, "bad_ids": 1, "bad_actions": 1, "bad_reset": 1,
     "bad_command": 1},
    {"send": 4, "recv": 1, "turn": 2, "drop": 4, "misbehave": 3, "kill": 2},
    {"send": 4, "recv": 4, "async_reset": 2, "wait_reset": 2, "misbehave": 2, "kill": 1},
    {"step": 4, "reset": 2, "misbehave": 3, "drop": 1, "kill": 1},
]  # fmt: skip

setups = st.builds(
    Setup, size=st.sampled_from([(4, 2), (1, 1), (7, 3), (2, 2), (3, 3)]), batch=st.integers(0, 6),
    mode=st.sampled_from(["next_step", "same_step", "disabled"]), frames=st.sampled_from([2, 3]),
    order=st.sampled_from(["ready", "fifo", "contiguous"]), copy=st.booleans(), length=st.integers(1, 4),
    truncates=st.booleans(), seed=st.sampled_from([None, 40]), reset=mostly,
)  # fmt: skip


def programs(restarts: bool, kills: bool) -> Any:
    """Lists of (name, what was drawn for it)."""
    # An env that nobody replaces raises until it is told not to.
    at_most = {"misbehave": 4 if restarts else 1, "kill": 3 if kills else 0}
    draws = {name: st.tuples(st.just(name), st.fixed_dictionaries(drawn)) for name, drawn in LINES.items()}

    def of(theme: dict[str, int]) -> Any:
        names = [name for name, weight in theme.items() for _ in range(min(weight, at_most.get(name, weight)))]
        return st.lists(st.sampled_from(["nothing", *names]).flatmap(draws.__getitem__), min_size=25, max_size=60)

    return st.sampled_from(THEMES).flatmap(of)


def run(backend: str, restarts: bool, setup: Setup, program: Program) -> None:
    machine = Machine(backend, restarts, setup)
    first: Program = [("reset", {"lanes": None, "seed": 10, "options": None})] if setup.reset else []
    try:
        with Watchdog(HANGS) as dog:
            for name, drawn in first + program:
                dog.next_line()
                machine.run(name, drawn)
    except Exception as error:
        # Where luck has a part in it, a program cannot be run again to see what went before.
        log = [line for line in machine.log if line != "nothing()"]
        raise AssertionError("\n".join([f"{type(error).__name__}: {error}", "after", *log])) from error
    finally:
        machine.end()


class Watchdog:
    """Ctrl-C, if a line takes longer: nothing else gets through to a caller who steps envs itself, for ever.

    One thread watches all lines of a program. To start one for each would take longer than most lines do.
    """

    def __init__(self, seconds: float):
        self._seconds, self._began = seconds, time.monotonic()
        self._over, self._fired = threading.Event(), False
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(max(0.0, self._began + self._seconds - time.monotonic())):
            if time.monotonic() >= self._began + self._seconds:
                self._fired = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return

    def next_line(self) -> None:
        self._began = time.monotonic()

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._over.set()
        self._thread.join()
        if self._fired and kind is KeyboardInterrupt:
            raise TimeoutError(f"it was not done after {self._seconds:g} s") from None


def test_who_hangs_is_interrupted() -> None:
    with pytest.raises(TimeoutError, match=r"not done after 0\.2 s"), Watchdog(0.2):
        threading.Event().wait(LONG)


def check(backend: str, restarts: bool, examples: int) -> None:
    """Run so many programs."""
    failed: dict[str, Exception] = {}

    @settings(
        max_examples=max(1, int(examples * EXAMPLES)), deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink] if SHRINK else [Phase.generate],
    )  # fmt: skip
    @given(setups, programs(restarts, kills=restarts and backend in ISOLATED))
    def one(setup: Setup, program: Program) -> None:
        key = repr((setup, program))
        try:
            if key in failed:
                raise failed[key]  # not run again: it may hang, or have more luck
            run(backend, restarts, setup, program)
        except Exception as error:
            failed[key] = error
            raise

    one()


# Many where a pool costs nothing, few where it costs processes.
EXAMPLES_FOR = [("serial", 150), ("threads", 80), ("processes", 20), ("hybrid", 20)]


@pytest.mark.parametrize(("backend", "examples"), EXAMPLES_FOR)
def test_the_pool_does_as_the_model_says(backend: str, examples: int) -> None:
    check(backend, False, examples)


@pytest.mark.parametrize(("backend", "examples"), EXAMPLES_FOR)
def test_so_it_does_while_envs_are_lost(backend: str, examples: int) -> None:
    check(backend, True, examples)

"""Random faults under load, for as long as one likes: kills, stops, crashes and hangs workers, and checks every answer.

    .venv/bin/python tests/faults/soak.py --minutes 10 --seed 0

Every lane is followed by a plain copy of its env, so that each row it delivers is known beforehand, to the last bit,
whether its env was replaced or not. Lanes that are spared must deliver what a run without any fault does. Beside each
pool, another thread uses it too, and another program with a pool is killed (soak_beside). Exit status:
0, or 1 if anything was wrong, or 2 if nothing was delivered for minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import gc
import itertools
import logging
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/, as pytest has it

from envs import CountEnv
from faults.kit import Traces, alive, children, is_helper, no_descriptor
from faults.soak_beside import OPENING, TAG, Intruder, KilledCaller, is_tagged, tagged, told
from shoal import Batch, ConcurrentUse, Pool, StepTimeout

SILENCE = 180.0  # seconds without any answer until we give up: a launcher starts slowly on a busy machine
HARM_AT_ONCE = 8  # faults without an answer between them: on a busy machine, more would outrun the restarts
SLICE = 15.0  # seconds that one pool lives
GROWTH = 150 << 20  # bytes that this process may grow by
STEP_TIMEOUT = 0.5
COOL_DOWN = 30  # answers of each lane after the last fault

# What an action above 3 makes an env do: fault * 4 + the action proper.
RAISES = ("raise", "raise at reset", "raise what exits when pickled")
CHILDREN = ("child", "child that runs away", "child that hides", "fork and return")
LETHAL = ("exit", "hang", "hang with the lock")
BAD_INFO = "info that exits when loaded"
FAULTS = ("", *RAISES, *LETHAL, *CHILDREN, BAD_INFO)
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "SIGSTOP": signal.SIGSTOP}
# What may happen to the caller's side. One kind for each pool: a child that hides is found by the launcher alone, and
# one that runs away by the launcher, or by a caller that can open files.
DEEDS = ("launcher killed", "launcher stopped", "no descriptor")


# ---- envs ----------------------------------------------------------------------------------------------------


class SoakEnv(gymnasium.Env[Any, Any]):
    """Observation [seed, episode, step], `width` times over, so that a row of two halves shows; faults as it is told.

    Episodes differ in length, some end by truncation, and some steps have an info.
    """

    def __init__(self, width: int = 1, nap: float = 0.0):
        self.observation_space = spaces.Box(-1, 2**62, (width, 3), np.int64)
        self.action_space = spaces.Discrete(4 * len(FAULTS))
        self.width, self.nap = width, nap
        self.seed_given, self.episode, self.steps, self.length = -1, -1, 0, 0
        self.bomb = self.poison = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if self.bomb:
            self.be_lost("raise")
        if seed is not None:
            self.seed_given, self.episode = seed, -1
        self.episode += 1
        self.steps = 0
        self.length = 3 + mixed(self.seed_given, self.episode) % 25
        return self.observe(), {"episode": self.episode} if self.episode % 3 == 1 else {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        fault, proper = divmod(int(action), 4)
        self.misbehave(FAULTS[fault])
        if self.nap:
            time.sleep(self.nap * (mixed(self.steps, self.seed_given) % 4))
        self.steps += 1
        ended, cut = self.steps >= self.length, self.length % 2 == 1
        info: dict[str, Any] = {"steps": self.steps} if self.steps % 7 == 0 else {}
        if self.poison:
            info["poison"] = ExitsWhenPickled()
        return self.observe(), self.steps + 100.0 * proper, ended and not cut, ended and cut, info

    def observe(self) -> Any:
        observation = np.empty((self.width, 3), np.int64)
        observation[:] = self.seed_given, self.episode, self.steps
        return observation

    def misbehave(self, fault: str) -> None:
        if fault == "raise at reset":
            self.bomb = True
        elif fault in CHILDREN:
            self.start_child(fault)
        elif fault == BAD_INFO:
            self.be_poisoned()
        elif fault:
            self.be_lost(fault)

    def be_poisoned(self) -> None:
        self.poison = True

    def echo(self, value: Any) -> Any:
        """Something to call."""
        return value

    def start_child(self, fault: str) -> None:
        # Nobody waits for it, and it outlives everything that does not end it.
        if fault == "fork and return":
            os.fork()
        elif fault == "child that hides":  # it has a session of its own, and was not marked by an exec
            if not os.fork():
                os.setsid()
                time.sleep(1000)
        else:
            subprocess.Popen(["sleep", "1000"], start_new_session=fault != "child", stdin=subprocess.DEVNULL)

    def be_lost(self, fault: str) -> None:
        if fault == "exit":
            os._exit(3)
        if fault == "hang":
            time.sleep(1000)
        if fault == "hang with the lock":
            ctypes.PyDLL(None).sleep(1000)
        raise ExitsWhenPickled if fault == "raise what exits when pickled" else RuntimeError("as it was told")


class ExitsWhenPickled(Exception):
    """Takes along the process that loads it."""

    def __reduce__(self) -> Any:
        return sys.exit, (7,)


class Lost(Exception):
    """The env that a lane is compared with is gone."""


class TameEnv(SoakEnv):
    """What a lane is compared with: does no harm, and says when it would be lost."""

    def start_child(self, fault: str) -> None:
        pass

    def be_poisoned(self) -> None:
        raise Lost(BAD_INFO)

    def be_lost(self, fault: str) -> None:
        raise Lost(fault)


def mixed(*numbers: int) -> int:
    """A number that looks random, and is the same everywhere."""
    return zlib.crc32(struct.pack(f"{len(numbers)}q", *numbers))


def action_of(seed: int, lane: int, index: int) -> int:
    """What a lane does in its own step of this index: nobody else's business."""
    return mixed(seed, lane, index) % 4


# ---- one lane ------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One answer of a lane."""

    obs: Any
    reward: float
    terminated: bool
    truncated: bool
    began: bool
    total: float
    length: int
    info: dict[str, Any]

    @classmethod
    def of(cls, batch: Batch, row: int, lane: int) -> Row:
        return cls(
            batch.obs[row], float(batch.reward[row]), bool(batch.terminated[row]), bool(batch.truncated[row]),
            bool(batch.began[row]), float(batch.episode_return[row]), int(batch.episode_length[row]),
            batch.info.get(lane, {}),
        )  # fmt: skip

    def differs(self, other: Row) -> bool:
        if self[1:7] != other[1:7] or set(self.info) != set(other.info):
            return True
        pairs = [(self.obs, other.obs), *((self.info[key], other.info[key]) for key in self.info)]
        return any(not np.array_equal(a, b) if isinstance(a, np.ndarray) else a != b for a, b in pairs)

    def __str__(self) -> str:
        info = {key: value[0].tolist() if isinstance(value, np.ndarray) else value for key, value in self.info.items()}
        rows = np.unique(self.obs, axis=0).tolist()
        return f"obs {rows} reward {self.reward:g} flags {self[2:5]} episode {self[5:7]} info {info}"


@dataclass
class Stream:
    """What a lane has delivered, in sum."""

    rows: int = 0
    episodes: int = 0
    rewards: float = 0.0
    digest: int = 0

    def add(self, row: Row) -> None:
        self.rows += 1
        self.episodes += row.terminated or row.truncated
        self.rewards += row.reward
        facts = struct.pack("d???", row.reward, row.terminated, row.truncated, row.began)
        self.digest = zlib.crc32(facts, zlib.crc32(row.obs.tobytes(), self.digest))


def reference(seed: int, lane: int, mode: str, width: int, rows: int) -> Stream:
    """The stream of a lane without shoal and without faults."""
    stream, env, index, over = Stream(), TameEnv(width), 0, False
    obs, _ = env.reset(seed=seed + lane)
    stream.add(Row(obs, 0.0, False, False, True, 0.0, 0, {}))
    while stream.rows < rows:
        action = action_of(seed, lane, index)
        index += 1
        if over:
            over = False
            stream.add(Row(env.reset()[0], 0.0, False, False, True, 0.0, 0, {}))
            continue
        obs, reward, terminated, truncated, _ = env.step(action)
        began = (terminated or truncated) and mode == "same_step"
        over = (terminated or truncated) and not began
        stream.add(Row(env.reset()[0] if began else obs, reward, terminated, truncated, began, 0.0, 0, {}))
    return stream


@dataclass
class Follower:
    """Foretells a lane's next answer, and complains about any other."""

    seed: int  # the lane's own
    lane: int
    mode: str
    width: int
    stream: Stream = field(default_factory=Stream)
    index: int = 0  # of the lane's next step
    reports: int = 0
    count: int = 0  # of the last report
    causes: Counter[str] = field(default_factory=Counter)
    action: int = 0
    over: bool = False
    next_seed: int | None = None
    total: float = 0.0
    length: int = 0
    last: Row | None = None
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.env = TameEnv(self.width)
        self.next_seed, self.over = self.seed, True  # a first reset is like any other

    def take(self, row: Row) -> None:
        """The lane has answered."""
        report = row.info.get("shoal_restart")
        try:
            expected = self._go_on() if report is None else self._start_again(report)
            if row.differs(expected):
                self._complain(f"expected {expected}, found {row}")
        except Lost as error:
            self._complain(f"expected a report after {error}, found {row}")
        self.stream.add(row)
        self.last = row._replace(obs=row.obs.copy())

    def _complain(self, what: str) -> None:
        if len(self.wrong) < 3:  # all that follows is wrong as well
            self.wrong.append(f"env {self.lane}, answer {self.stream.rows}, action {self.action}: {what}")

    def _begin(self, info: dict[str, Any]) -> Row:
        obs, own = self.env.reset(seed=self.next_seed)
        self.next_seed, self.over, self.total, self.length = None, False, 0.0, 0
        return Row(obs, 0.0, False, False, True, 0.0, 0, {**own, **info})

    def _go_on(self) -> Row:
        if self.over:
            return self._begin({})
        obs, reward, terminated, truncated, info = self.env.step(self.action)
        self.total, self.length = self.total + reward, self.length + 1
        row = Row(obs, reward, terminated, truncated, False, self.total, self.length, info)
        self.over = terminated or truncated
        return self._with_next(row, info) if self.over and self.mode == "same_step" else row

    def _with_next(self, row: Row, final_info: dict[str, Any]) -> Row:
        """The end of an episode and the beginning of the next in one."""
        begun = self._begin({"final_obs": row.obs, "final_info": final_info})
        return row._replace(obs=begun.obs, began=True, info={**begun.info, **_only_report(row.info)})

    def _start_again(self, report: dict[str, Any]) -> Row:
        self.reports += 1
        self.causes[str(report["cause"])] += 1
        if report["count"] <= self.count or report["cause"] not in ("raised", "died", "timed out"):
            self._complain(f"expected a count above {self.count} and a cause, found {report}")
        self.count = report["count"]
        self.env = TameEnv(self.width)
        self.next_seed = int(np.random.SeedSequence([self.seed, self.count]).generate_state(1)[0])
        if self.over:
            return self._begin({"shoal_restart": report})
        assert self.last is not None
        row = Row(self.last.obs, 0.0, False, True, False, self.total, self.length, {"shoal_restart": report})
        self.over = True
        return self._with_next(row, {}) if self.mode == "same_step" else row


def _only_report(info: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in info.items() if key == "shoal_restart"}


# ---- pools ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """One kind of pool, and what may be done to it.

    `spared`: lanes that no fault may touch; the other lanes of their workers are only made to raise.
    """

    name: str
    backend: str
    envs: int
    workers: int
    spared: tuple[int, ...]
    signals: tuple[str, ...] = ("SIGKILL", "SIGKILL", "SIGSEGV", "SIGSEGV", "SIGSTOP")
    faults: tuple[str, ...] = FAULTS[1:]
    batch: int | None = None
    mode: str = "next_step"
    width: int = 1
    nap: float = 0.0
    by_step: bool = False  # by `step` rather than by send and recv
    options: tuple[tuple[str, Any], ...] = ()

    def open(self, seed: int) -> Pool:
        options: dict[str, Any] = dict(self.options)
        if self.backend == "processes":
            options["step_timeout"] = STEP_TIMEOUT
        # The window is short, so that the delays between restarts are as well.
        return Pool(
            SoakEnv, self.envs, backend=self.backend, num_workers=self.workers, batch_size=self.batch,  # type: ignore[arg-type]
            autoreset=self.mode, on_error="restart", max_restarts=10**9, restart_window=0.05, seed=seed,  # type: ignore[arg-type]
            env_kwargs={"width": self.width, "nap": self.nap}, **options,
        )  # fmt: skip


CRASHES = ("SIGKILL", "SIGSEGV")
IN_PART = (*RAISES, "exit", *CHILDREN, BAD_INFO)  # the caller steps some envs itself: nobody can end one that hangs
SETUPS = (
    Setup("processes, full, next_step", "processes", 12, 4, (9, 10, 11), by_step=True),
    Setup("processes, full, same_step, wide", "processes", 8, 4, (0, 1), mode="same_step", width=2000,
          options=(("copy", True),)),
    Setup("processes, async, next_step", "processes", 14, 5, (3, 4), batch=4, nap=2e-4),
    Setup("processes, async, fifo, same_step", "processes", 7, 3, (5, 6), batch=3, mode="same_step", nap=2e-4,
          options=(("order", "fifo"), ("frames", 3))),
    Setup("hybrid, full, next_step", "hybrid", 9, 3, (0, 6, 7, 8), CRASHES, IN_PART, by_step=True),
    Setup("hybrid, async, same_step", "hybrid", 8, 4, (1, 2, 3), CRASHES, IN_PART, batch=5, mode="same_step"),
    Setup("threads, async, next_step", "threads", 8, 3, (0, 4), (), RAISES, batch=3, nap=1e-4),
    Setup("threads, full, same_step", "threads", 6, 2, (0, 5), (), RAISES, mode="same_step"),
)  # fmt: skip


@dataclass
class Tally:
    """What came of all pools of one setup."""

    rows: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    causes: Counter[str] = field(default_factory=Counter)
    visits: Counter[str] = field(default_factory=Counter)  # what another thread did, or was told
    merged: int = 0  # losses that were reported together with a later one


# ---- processes -----------------------------------------------------------------------------------------------


def is_ours(pid: int) -> bool:
    """Whether it was started from here, by whomever, and whoever its parent is now."""
    return is_tagged(pid, os.environ[TAG])


def ours() -> set[int]:
    """All processes that were started from here; this one is not among them."""
    return tagged(os.environ[TAG]) - {os.getpid()}


def launchers() -> set[int]:
    """What has started the workers: it stays, by design."""
    return {pid for pid in children(os.getpid()) if is_helper(pid) and alive(pid)}


def end_all(pids: set[int]) -> None:
    """Kill them."""
    send_to(pids, signal.SIGKILL)


def send_to(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


# ---- faults --------------------------------------------------------------------------------------------------


class Injector(threading.Thread):
    """Does harm at random moments, beside the thread that steps.

    Signals are sent from here. What an env shall do is left in `plots` for the lane's next action.
    """

    def __init__(self, setup: Setup, pool: Pool, seed: int):
        super().__init__(name="injector", daemon=True)
        self.setup, self.random = setup, random.Random(seed)
        self.deed = self.random.choice(("", *DEEDS)) if setup.signals else ""
        hidden = self.deed == "launcher killed"
        self.faults = [fault for fault in setup.faults if not (hidden and fault == "child that hides")]
        self.plots: dict[int, str] = {}
        self.done: Counter[str] = Counter()
        self.harm = Counter[int]()  # by lane: how often it may have been lost
        self.pids: dict[int, int] = {}
        self.unanswered = 0  # faults since the last answer
        self._stop_it = threading.Event()
        blocks = {worker.index: worker.env_ids for worker in pool.workers}
        own = {worker.index for worker in pool.workers if worker.pid is None}
        sheltered = {index for index, lanes in blocks.items() if index in own or set(lanes) & set(setup.spared)}
        self.targets = {index: lanes for index, lanes in blocks.items() if index not in sheltered}
        self.mates = {lane: lanes for lanes in blocks.values() for lane in lanes}
        self.lanes = [lane for lane in range(setup.envs) if lane not in setup.spared]
        self.tough = {lane for lanes in self.targets.values() for lane in lanes}  # those whose process may be lost

    def run(self) -> None:
        while not self._stop_it.wait(self.random.expovariate(8.0)):
            if self.unanswered >= HARM_AT_ONCE:
                continue
            self.unanswered += 1
            if self.deed and self.random.random() < 0.05:
                self._do_deed()
            elif self.setup.signals and self.random.random() < 0.5:
                self._signal()
            else:
                self._plot()

    def stop(self) -> None:
        self._stop_it.set()
        self.join()
        self.plots.clear()

    def _signal(self, starve: bool = False) -> None:
        index, name = self.random.choice(sorted(self.targets)), self.random.choice(self.setup.signals)
        pid = self.pids.get(index)
        with contextlib.suppress(ProcessLookupError):
            # By a descriptor: nobody else can get this process's number between the look and the kill.
            if pid is None:
                return
            handle = os.pidfd_open(pid)
            try:
                if is_ours(pid):
                    self.harm.update(self.targets[index])
                    with self._starved() if starve else contextlib.nullcontext():
                        signal.pidfd_send_signal(handle, SIGNALS[name])
                    self.done[name] += 1
            finally:
                os.close(handle)

    @contextlib.contextmanager
    def _starved(self) -> Iterator[None]:
        """This process can open nothing in the block, and for a while after it."""
        with OPENING, no_descriptor():
            yield
            self._stop_it.wait(self.random.random())

    def _do_deed(self) -> None:
        self.done[self.deed] += 1
        if self.deed == "no descriptor":
            self._signal(starve=True)
        elif self.deed == "launcher killed":
            end_all(launchers())  # one is started again with the next worker
        else:
            stopped = launchers()
            send_to(stopped, signal.SIGSTOP)
            self._stop_it.wait(2 * self.random.random())
            send_to(stopped, signal.SIGCONT)

    def _plot(self) -> None:
        lane, fault = self.random.choice(self.lanes), self.random.choice(self.faults)
        if lane not in self.tough and fault not in RAISES:
            fault = "raise"
        self.plots[lane] = fault

    def corrupt(self, lane: int, action: int) -> int:
        """The action that a lane really takes."""
        fault = self.plots.pop(lane, "") if self.plots else ""
        if fault:
            self.done[fault] += 1
            self.harm.update(self.mates[lane] if fault in LETHAL else [lane])
        return action + 4 * FAULTS.index(fault)


# ---- one pool ------------------------------------------------------------------------------------------------


class Run:
    """One pool's life: load, faults, a while without them, the end."""

    def __init__(self, setup: Setup, seed: int, watch: Watchdog):
        self.setup, self.seed, self.watch = setup, seed, watch
        self.followers = [Follower(seed + lane, lane, setup.mode, setup.width) for lane in range(setup.envs)]
        self.problems: list[str] = []

    def live(self, seconds: float, tally: Tally) -> None:
        began = time.monotonic()
        with self.setup.open(self.seed) as pool:
            self.injector = Injector(self.setup, pool, self.seed)
            self._take(pool.reset())
            turns = self._full(pool) if self.setup.batch is None else self._partial(pool)
            self.injector.start()
            intruder = Intruder(pool, self.seed, self.setup.by_step)
            intruder.start()
            try:
                while time.monotonic() - began < seconds and not self._is_wrong:
                    next(turns)
            finally:
                self.injector.stop()
                intruder.stop()
                self.problems += intruder.problems
                tally.visits += intruder.done
            enough = [one.stream.rows + COOL_DOWN for one in self.followers]
            while not self._is_wrong and not self._have(enough):
                next(turns)
        self._judge()
        self._count(tally, time.monotonic() - began)

    def _have(self, rows: list[int]) -> bool:
        return all(one.stream.rows >= enough for one, enough in zip(self.followers, rows, strict=True))

    @property
    def _is_wrong(self) -> bool:
        return any(one.wrong for one in self.followers)

    def _full(self, pool: Pool) -> Iterator[None]:
        """Step all lanes, again and again."""
        while True:
            actions = self._actions(range(self.setup.envs))
            if self.setup.by_step:
                self._take(self._alone(pool.step, actions))
            else:
                self._alone(pool.send, actions)
                self._take(self._recv(pool))
            self._look(pool)
            yield

    def _partial(self, pool: Pool) -> Iterator[None]:
        """Send to whoever has answered."""
        self._alone(pool.send, self._actions(range(self.setup.envs)))
        while True:
            batch = self._recv(pool)
            ids = batch.env_id.tolist()
            self._take(batch)
            self._alone(pool.send, self._actions(ids), ids)
            self._look(pool)
            yield

    def _recv(self, pool: Pool) -> Batch:
        while True:  # a deadline that passes must not do any harm either
            with contextlib.suppress(StepTimeout):
                return self._alone(pool.recv, 0.1)

    @staticmethod
    def _alone(method: Any, *args: Any) -> Any:
        """Once the other thread is out: what was refused has changed nothing."""
        while True:
            with contextlib.suppress(ConcurrentUse):
                return method(*args)
            time.sleep(0.0005)

    def _actions(self, ids: Any) -> Any:
        actions = np.empty(len(ids), np.int64)
        for row, lane in enumerate(ids):
            one = self.followers[lane]
            one.action = actions[row] = self.injector.corrupt(lane, action_of(self.seed, lane, one.index))
            one.index += 1
        return actions

    def _take(self, batch: Batch) -> None:
        self.watch.seen()
        self.injector.unanswered = 0
        for row, lane in enumerate(batch.env_id.tolist()):
            self.followers[lane].take(Row.of(batch, row, lane))

    def _look(self, pool: Pool) -> None:
        """Tell the injector who is there; only this thread may use the pool."""
        if self.watch.is_time("look", 0.02):
            self.injector.pids = {worker.index: worker.pid for worker in pool.workers if worker.pid is not None}

    def _judge(self) -> None:
        for one in self.followers:
            self.problems += one.wrong
            if one.count > self.injector.harm[one.lane]:
                self.problems.append(
                    f"env {one.lane} was restarted {one.count} times for {self.injector.harm[one.lane]} faults: "
                    f"{dict(one.causes)}"
                )
        for lane in self.setup.spared:
            one = self.followers[lane]
            expected = reference(self.seed, lane, self.setup.mode, self.setup.width, one.stream.rows)
            if one.reports or one.stream != expected:
                self.problems.append(f"env {lane} was spared: expected {expected}, found {one.stream}, {one.causes}")

    def _count(self, tally: Tally, seconds: float) -> None:
        tally.seconds += seconds
        tally.faults += self.injector.done
        for one in self.followers:
            tally.rows += one.stream.rows
            tally.causes += one.causes
            tally.merged += one.count - one.reports


# ---- the whole -----------------------------------------------------------------------------------------------


class Watchdog(threading.Thread):
    """Ends everything when nothing is delivered any more."""

    def __init__(self) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._last = time.monotonic()
        self._times: dict[str, float] = {}

    def seen(self) -> None:
        """Something was delivered."""
        self._last = time.monotonic()

    def is_time(self, what: str, every: float) -> bool:
        """Whether so many seconds have passed since it last was."""
        now = time.monotonic()
        if now - self._times.get(what, 0.0) < every:
            return False
        self._times[what] = now
        return True

    def run(self) -> None:
        while time.monotonic() - self._last < SILENCE:
            # In case that whoever hangs also keeps every Python thread from running.
            faulthandler.dump_traceback_later(2 * SILENCE, exit=True)
            time.sleep(1.0)
        print(f"nothing was delivered for {SILENCE:g} s", file=sys.stderr)
        faulthandler.dump_traceback(all_threads=True)
        end_all(ours())
        os._exit(2)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class Soak:
    """All runs, one after the other, and what was found."""

    def __init__(self, minutes: float, seed: int, console: Console):
        self.seconds, self.seed, self.console = 60.0 * minutes, seed, console
        self.tallies = {setup.name: Tally() for setup in SETUPS}
        self.problems: list[str] = []
        self.callers: Counter[str] = Counter()  # those that were killed
        self.memory: list[int] = []
        os.environ[TAG] = uuid.uuid4().hex
        os.environ["TMPDIR"] = self.folder = tempfile.mkdtemp(prefix="shoal-soak-")

    def run(self) -> None:
        with Pool(CountEnv, 2, backend="processes", num_workers=2) as pool:
            pool.reset()  # the launcher stays until the end, by design
        watch = Watchdog()
        watch.start()
        self.before, self.processes = Traces.of_this_process(), ours()
        self.memory.append(resident())
        rounds = max(1, round(self.seconds / (SLICE * len(SETUPS))))
        plan = list(itertools.product(range(rounds), range(len(SETUPS))))
        columns = (TextColumn("{task.description:38}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task("", total=len(plan))
            for turn, which in plan:
                progress.update(task, description=SETUPS[which].name)
                self._one(SETUPS[which], self.seed * 10_007 + turn * 101 + which, self.seconds / len(plan), watch)
                progress.advance(task)

    def _one(self, setup: Setup, seed: int, seconds: float, watch: Watchdog) -> None:
        run, caller = Run(setup, seed, watch), KilledCaller(seed)
        caller.start()
        try:
            run.live(seconds, self.tallies[setup.name])
        except Exception:
            run.problems.append(traceback.format_exc())
        caller.join()
        run.problems += caller.problems
        self.callers[caller.kind] += 1
        left = self._left()
        if left:
            run.problems.append(f"left behind: {left}")
            self._clear_away()
        self.problems += [f"{setup.name}, seed {seed}: {problem}" for problem in run.problems]
        watch.seen()
        self.memory.append(resident())

    def _left(self) -> list[str]:
        """What is there and was not at the start; what is about to go has some seconds."""
        until = time.monotonic() + 10.0
        while True:
            gc.collect()
            left = Traces.of_this_process().beyond(self.before)
            left += [f"process {pid}" for pid in ours() - self.processes - launchers()]
            left += [f"the file {name}" for name in os.listdir(self.folder)]
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.1)

    def _clear_away(self) -> None:
        """What was left is told of once, and does not outlive us."""
        end_all(ours() - self.processes - launchers())
        self.before = Traces.of_this_process()

    def judge(self) -> int:
        """The exit status, after a summary."""
        start, middle, end = self.memory[0], self.memory[len(self.memory) // 2], self.memory[-1]
        if end - start > GROWTH:
            self.problems.append(f"this process has grown by {(end - start) >> 20} MiB")
        out = Console(width=max(150, Console().width))
        out.print(self._table())
        out.print("memory: " + ", ".join(f"{one / 2**20:.0f} MiB" for one in (start, middle, end)), highlight=False)
        out.print(f"{self.callers.total()} other callers were killed: {told(self.callers)}", highlight=False)
        for problem in self.problems:
            out.print(f"WRONG: {problem}", style="red", markup=False, highlight=False, soft_wrap=True)
        out.print("nothing was wrong" if not self.problems else f"{len(self.problems)} things were wrong")
        return 1 if self.problems else 0

    def _table(self) -> Table:
        columns = ("pool", "steps", "steps/s", "faults", "reports", "merged", "another thread")
        table = Table(*columns, title=f"seed {self.seed}")
        for name, tally in self.tallies.items():
            table.add_row(
                name, f"{tally.rows:,}", f"{tally.rows / max(tally.seconds, 1e-9):,.0f}", told(tally.faults),
                told(tally.causes), str(tally.merged), told(tally.visits),
            )  # fmt: skip
        return table


def main() -> int:
    """Soak, and say what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    faulthandler.enable()
    logging.getLogger("shoal").setLevel(logging.ERROR)  # restarts are what we are here for
    soak = Soak(options.minutes, options.seed, Console(stderr=True))
    soak.run()
    os.rmdir(soak.folder)
    return soak.judge()


if __name__ == "__main__":
    sys.exit(main())

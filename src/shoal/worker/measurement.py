"""Measures what a step of an env costs, and keeps a few of its answers to measure Shoal's own work with."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector.utils import batch_space

from shoal.envs.adapt import adapt
from shoal.envs.autoreset import MODES, RULES
from shoal.envs.group import Answers, GroupEnv, is_group
from shoal.memory.packed_errors import dumps
from shoal.spaces.leaves import flatten
from shoal.support.system import system

MEASURING = "SHOAL_MEASURING"  # in the environment of a process that only measures an env, and leaves no traces

BUILDING = 0.1  # seconds for the envs that are stepped beside the one that is measured
SECONDS = 0.15  # how long the env is stepped;
LONGER = 0.6  # if its resets take long and no episode has ended by then;
LONGEST = 1.0  # on a machine so busy that it has its core for a part of the time only
FEWEST, MOST = 3, 4000  # steps, whatever their time,
SLOW = 0.5  # unless one takes more seconds than this: then one will do
QUICK = 50e-6  # steps that take less are timed CHUNK at a time: to read the clocks takes a good part of a microsecond
CHUNK = 16
ACTIONS = 61  # different ones: a prime, so that no env gets the same again and again
KEPT = 512  # samples that are kept
BLOCKS = 0.1  # a step that waits gives up its core; of steps that are timed together, at least so many
LONG_RESET = 0.1  # a reset is long if it takes this part of the time of all steps so far
ANSWERS = 8  # that are recorded,
MOST_BYTES = 4 << 20  # or fewer, if they are large,
HEAVY = 10e-3  # and none if a step takes more seconds than this: what Shoal adds does not matter then


@dataclass(frozen=True)
class Overhead:
    """What Shoal adds to the steps of one batch under "serial", measured with recorded answers; in seconds.

    Attributes:
        caller: for the whole batch, outside of the workers: actions checked, answers and infos handed out.
        lane: for each env, where it is stepped: its action read, its answer written.
        pack, unpack: for each env, to pack what travels as a message to another process, and to read it there; 0 where
            all lies in shared memory.
    """

    caller: float
    lane: float
    pack: float = 0.0
    unpack: float = 0.0


@dataclass(frozen=True)
class Measurement:
    """What a step of the env costs.

    Attributes:
        wall: seconds of measured steps and resets, each on its own, as a lane of a pool takes one or the other in a
            turn; without the time in which an env that only computes waited for its core. Sorted and thinned out: the
            mean is that of all.
        cpu: mean CPU seconds of a step; well below the mean of `wall` for an env that waits.
        overhead: what Shoal adds; None where that was not measured.
    """

    wall: tuple[float, ...]
    cpu: float
    overhead: Overhead | None = None

    @property
    def mean(self) -> float:
        """Mean wall-clock seconds of a step."""
        return sum(self.wall) / len(self.wall)

    @property
    def waiting(self) -> float:
        """The fraction of a step in which the env does not compute."""
        return max(0.0, 1.0 - self.cpu / self.mean)


class Probe(NamedTuple):
    """What a worker tells of its first env: a measurement, and some of its answers, packed; b"" for none."""

    measurement: Measurement
    answers: bytes


class _Stopwatch:
    """Collects the times of steps and resets. A sample stands for `count` of them."""

    def __init__(self) -> None:
        self._wall: list[float] = []
        self._cpu: list[float] = []
        self._counts: list[int] = []
        self._resets: list[int] = []  # places of resets among the samples
        self.total, self.steps, self.whole = 0.0, 0, 0

    def start(self) -> None:
        self._blocked, self._began, self._cpu_began = system.times_blocked(), time.perf_counter(), time.process_time()

    def stop(self, count: int) -> float:
        """End a sample; return its seconds."""
        cpu, wall = time.process_time() - self._cpu_began, time.perf_counter() - self._began
        # What never blocks only seems to wait when other processes have the core: count only its computing.
        waited = system.times_blocked() - self._blocked >= BLOCKS * count
        counted = wall if waited else cpu
        self._wall.append(counted / count)
        self._cpu.append(cpu / count)
        self._counts.append(count)
        self.total += counted
        self.steps += count
        return wall

    def was_reset(self, first: bool) -> None:
        """The last sample was a reset. `first`: it was that of the first env, which comes after those of the others."""
        self._resets.append(len(self._counts) - 1)
        if first:
            self.whole = len(self._counts)

    def measurement(self, together: bool) -> Measurement:
        """What the samples say.

        `together`: all envs are reset at the same time, so no worker waits for the resets of another. Then their time
        is a part of every step.
        """
        # Whole episodes only, if there were any, so that resets have their proper weight.
        end = self.whole or len(self._counts)
        counts, wall, cpu = (np.array(column[:end]) for column in (self._counts, self._wall, self._cpu))
        mean_wall, mean_cpu = (float(np.average(times, weights=counts)) for times in (wall, cpu))
        if together:
            counts[[place for place in self._resets if place < end]] = 0
            wall = wall * (mean_wall / np.average(wall, weights=counts))
        return Measurement(_thinned(np.repeat(wall, counts)), mean_cpu)


def time_steps(*envs: Any) -> Measurement:
    """Step envs in turn with random actions, and leave each within an episode. Runs where they are, in a worker.

    Several are stepped as a pool does it: what one of them keeps in the caches, the others drive out.
    """
    ones = [as_one(env) for env in envs]
    actions = itertools.cycle([ones[0].action_space.sample() for _ in range(ACTIONS)])
    clock, watch, numbers = time.perf_counter, _Stopwatch(), range(len(ones))
    began = clock()
    ones[0].reset()
    reset_took = clock() - began
    for env in ones[1:]:
        env.reset()
    began = clock()
    done = [_is_over(env.step(next(actions))) for env in ones]  # loads and compiles things
    fewest = FEWEST if clock() - began < SLOW * len(ones) else 1
    steps, by_limit, passes = [env.step for env in ones], True, [[i] for i in numbers]
    began = clock()
    while watch.steps < fewest or _has_time(watch, reset_took, clock() - began):
        for i in reversed(numbers):
            if done[i]:
                watch.start()
                ones[i].reset()
                reset_took, done[i] = watch.stop(1), False
                watch.was_reset(first=i == 0)
        for turn in passes:
            count = 0
            watch.start()
            for i in turn:
                if not done[i]:
                    _, _, terminated, truncated, _ = steps[i](next(actions))
                    count += 1
                    if terminated or truncated:
                        done[i], by_limit = True, by_limit and not terminated
            quick = count and watch.stop(count) < QUICK * count
        passes = [[*numbers] * max(1, CHUNK // len(ones))] if quick else [[i] for i in numbers]
    for i in numbers:
        if done[i]:
            ones[i].reset()
    # Episodes that end by a limit of steps alone are equally long.
    return watch.measurement(together=by_limit)


def _is_over(answer: tuple[Any, ...]) -> bool:
    return bool(answer[2] or answer[3])


def _has_time(watch: _Stopwatch, reset_took: float, since: float) -> bool:
    """Whether there is time for more steps. Episodes with long resets are worth it to be seen to their end."""
    unknown = not watch.whole and reset_took > LONG_RESET * watch.total
    enough = watch.total >= LONGER if unknown else watch.total >= SECONDS or watch.steps >= MOST
    return not enough and since < max(LONGEST, SECONDS)


def _thinned(times: np.ndarray[Any, Any]) -> tuple[float, ...]:
    """At most KEPT samples, with the mean of all, and the longest not lost among the many."""
    parts = np.array_split(np.sort(times), min(KEPT, len(times)))
    # Parts differ in size by one at most, and the mean of their means is put right.
    means = np.array([part.mean() for part in parts])
    return tuple((means * (times.mean() / means.mean() if means.mean() else 1.0)).tolist())


def probe(envs: list[Any], more: Iterable[Callable[[], Any]]) -> Probe:
    """Measure the env in the list, and record some of its answers. Runs in a worker.

    `more` builds others, which are stepped beside it and added to the list, as long as that takes no time.
    """
    first, began = envs[0], time.perf_counter()
    with contextlib.suppress(Exception):  # some can exist only once
        for build in () if is_group(first) else more:
            envs.append(adapt(build()))
            if time.perf_counter() - began > BUILDING:
                break
    measured = time_steps(*envs)
    return Probe(measured, b"" if is_group(first) or measured.mean > HEAVY else _record(first))


def _record(env: Any) -> bytes:
    """What some steps return: packed at once, as an env may write over its own arrays.

    b"" where something does not let itself be packed.
    """
    answers: list[bytes] = []
    try:
        while len(answers) < ANSWERS and sum(map(len, answers)) < MOST_BYTES:
            obs, _, terminated, truncated, info = env.step(env.action_space.sample())
            answers.append(dumps((obs, info)))
            if terminated or truncated:
                env.reset()
        return dumps(answers)
    except Exception:
        return b""


def as_one(env: Any) -> Any:
    """Return an env with several lanes as one that can be reset, stepped and closed; any other env as it is."""
    return _AsOne(env) if is_group(env) else env


class _AsOne:
    """An env with several lanes, with the methods that the measurement needs. It resets by itself, if it can."""

    def __init__(self, env: GroupEnv):
        self._env, self._rows = env, np.arange(env.num_lanes)
        modes = getattr(env, "modes", MODES)
        self._rule = next((RULES[mode] for mode in modes if not RULES[mode].user_resets), RULES[modes[0]])
        env.use(self._rule.name)
        self._out = Answers.scratch(flatten(env.single_observation_space), env.num_lanes, finals=True)
        self.action_space = batch_space(env.single_action_space, env.num_lanes)

    def reset(self, seed: int | None = None) -> None:
        self._out.clear()
        seeds = [None if seed is None else seed + row for row in range(len(self._rows))]
        self._env.reset(self._rows, seeds, None, self._out)

    def step(self, actions: Any) -> Any:
        self._out.clear()
        self._env.step(self._rows, actions, self._out)
        over = self._rule.user_resets and bool((self._out.terminated | self._out.truncated).any())
        return None, 0.0, over, False, None

    def close(self) -> None:
        self._env.close()

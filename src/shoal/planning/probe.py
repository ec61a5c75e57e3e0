"""Measures for "auto": an env in a process of its own, and Shoal's own work with what that env has answered.

No env of the user's runs in the caller's process here. The recorded answers are played back by stand-ins in a small
serial pool, so that infos, observations and flags take the very way that they will take.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import batch_space

from shoal.backends.base import BlockSpec
from shoal.backends.mail import pack, unpack
from shoal.engine.scheduler import Scheduler
from shoal.engine.timeouts import Patience
from shoal.envs.functions import EnvFn, pickle_env_fns, registry_additions
from shoal.memory.infos import stacked
from shoal.memory.messages import STATUS_NOTE, Note
from shoal.memory.packed_errors import loads
from shoal.native import layout
from shoal.options import PoolOptions
from shoal.spaces.leaves import flatten
from shoal.support.deadline import NEVER, Deadline
from shoal.worker.measurement import MEASURING, Measurement, Overhead, Probe
from shoal.worker.stand_ins import Answer, Playback

SIDE_BY_SIDE = 8  # envs that are stepped in turn, at most,
QUICK_START = 1.0  # if the first one is there after so many seconds
MOST_LANES = 256  # of the pool of stand-ins; what more would cost follows from these
MOST_BYTES = 64 << 20  # of their observations
# How often Shoal's own work is measured, and for how many seconds at least. The best round counts: a short one is not
# cut in two by other programs.
ROUNDS, ROUND = 20, 1e-3
PACKED = 16  # notes in a message, to measure what a message costs for each

Opened = AbstractContextManager[Scheduler]
Open = Callable[[Sequence[EnvFn], PoolOptions], Opened]


class Subject(NamedTuple):
    """The env that is measured: what builds it, its number among the user's envs, and what builds some others."""

    env_fn: EnvFn
    env_id: int
    others: Sequence[EnvFn]

    @classmethod
    def among(cls, env_fns: Sequence[EnvFn], cores: int) -> Subject:
        """The last of the envs, and as many of those before it as a worker will have; never the first one.

        Scripts give the first one what must happen once, such as a video.
        """
        last = len(env_fns) - 1
        block = min(-(-len(env_fns) // cores), SIDE_BY_SIDE)
        return cls(env_fns[last], last, env_fns[max(1, last + 1 - block) : last])


class Recording(NamedTuple):
    """The spaces of an env, of observations and of actions, and some of its answers."""

    spaces: tuple[Space[Any], Space[Any]]
    answers: Sequence[Answer]


def measure(
    subject: Subject, lanes: int, options: PoolOptions, patience: Patience, open_pool: Open
) -> tuple[Measurement, Recording | None]:
    """What a step costs: the env's own time, and what Shoal adds for a batch of so many lanes; and some answers.

    `open_pool` builds a pool in this process and closes it again.
    """
    spaces, probe = _in_a_process(subject, options.start_method, patience)
    if not probe.answers:
        return probe.measurement, None
    try:
        recording = Recording(spaces, [loads(answer) for answer in loads(probe.answers)])
        overhead = _overhead(recording, lanes, options, open_pool)
    except Exception:  # classes that only the worker has, or answers that the pool will refuse: then it says why
        return probe.measurement, None
    return replace(probe.measurement, overhead=overhead), recording


def _in_a_process(
    subject: Subject, start_method: str, patience: Patience
) -> tuple[tuple[Space[Any], Space[Any]], Probe]:
    """Build one env in a process of its own, step it for a moment, end the process."""
    assert sys.platform != "win32"  # see building.choose_backend
    from shoal.backends.processes import ProcessWorker

    env_fn, env_id, others = subject
    spec = BlockSpec(0, env_id, env_id + 1, pickle_env_fns([env_fn], env_id))
    worker = ProcessWorker(spec, registry_additions(), start_method, {MEASURING: "1"})
    what = 'to be measured for backend="auto"'
    try:
        began = time.monotonic()
        worker.launch(patience.deadline)
        summary = patience.wait(worker.built, worker, lambda: f"{worker.describe_late_start()}, {what}")
        # What is quick to build is stepped beside others, as in a pool.
        more = pickle_env_fns(others, env_id - len(others)) if time.monotonic() - began < QUICK_START else []
        worker.ask_for_measurement(more)
        probe = patience.wait(worker.measured, worker, lambda: f"env {env_id} is stepped, {what}")
        return summary.spaces[summary.which[0]], probe
    finally:
        worker.close(Deadline.after(1.0))


def _overhead(recording: Recording, lanes: int, options: PoolOptions, open_pool: Open) -> Overhead:
    """Step stand-ins in this process, and see what the pool's caller and its worker take."""
    spaces, answers = recording
    count = min(lanes, _lanes_that_fit(spaces[0]))
    serial = for_stand_ins(options, "serial", None)
    with open_pool([functools.partial(Playback, spaces, answers)] * count, serial) as scheduler:
        ids = scheduler.table.all_ids
        scheduler.reset(ids, [None] * count, [None] * count, NEVER)
        scheduler.wait_for(ids, NEVER)
        step = step_once(scheduler, batch_space(spaces[1], count))
        _, caller, lane = min(_timed(scheduler, step) for _ in range(ROUNDS))
        table = scheduler.table
        noted = table.status[table.slot, table.all_ids] & STATUS_NOTE != 0
    packed, unpacked = _message(answers) if noted.any() else (0.0, 0.0)
    share = float(noted.mean())
    return Overhead(caller * lanes / count, lane, packed * share, unpacked * share)


def _lanes_that_fit(observation_space: Space[Any]) -> int:
    sizes = [leaf.dtype.itemsize * int(np.prod(leaf.shape)) for leaf in flatten(observation_space)]
    return max(1, min(MOST_LANES, MOST_BYTES // max(1, sum(sizes))))


def for_stand_ins(options: PoolOptions, backend: str, workers: int | None) -> PoolOptions:
    """The options of a pool of stand-ins: the user's, but for those that say which envs, and how many of them."""
    return replace(
        options, backend=backend, num_workers=workers, batch_size=None, batch_envs=None, order="ready", isolate=False,
        seed=None, observation_mode="same", env_kwargs=None, plan=None,
    )  # fmt: skip


def step_once(scheduler: Scheduler, action_space: Space[Any]) -> Callable[[], None]:
    """A function that does once what the face of a pool does in a step; actions are samples of the space."""
    actions, answers = itertools.cycle([action_space.sample() for _ in range(8)]), scheduler.table.answers
    joiner: Any = gymnasium.vector.VectorEnv()  # joins infos as the face of a pool does
    joiner.num_envs = count = scheduler.table.count

    def step() -> None:
        ready = scheduler.exchange(next(actions), NEVER)
        answers.take_step(ready)
        if ready.infos:
            stacked(ready.infos, count, joiner._add_info)

    return step


def _timed(scheduler: Scheduler, step: Callable[[], None]) -> tuple[float, float, float]:
    """Seconds of a batch, the part of them outside of the worker, and those of a lane in it."""
    table = scheduler.table
    stats, count = table.slab.array("stats")[0], table.count
    table.slab.settle()
    busy, batches, clock = int(stats[layout.STAT_BUSY_NS]), 0, time.perf_counter
    began = now = clock()
    while now - began < ROUND:
        step()
        step()
        batches += 2
        now = clock()
    took = (now - began) / batches
    table.slab.settle()
    stepping = (int(stats[layout.STAT_BUSY_NS]) - busy) * 1e-9 / batches
    return took, took - stepping, stepping / count


def _message(answers: Sequence[tuple[Any, dict[str, Any]]]) -> tuple[float, float]:
    """Seconds to pack and send the note of one lane, and to receive and unpack it, through a real channel."""
    notes = [Note(lane, 1, answers[lane % len(answers)][1], [], None) for lane in range(PACKED)]
    here, there = Pipe(duplex=True)
    try:
        times = [_sent(notes, here, there) for _ in range(ROUNDS)]
    finally:
        here.close()
        there.close()
    packed, unpacked = np.min(times, axis=0) / PACKED
    return float(packed), float(unpacked)


def _sent(notes: list[Note], here: Any, there: Any) -> tuple[float, float]:
    clock = time.perf_counter
    began = clock()
    data = pack(notes)
    fits = len(data) < 60_000  # a larger one would wait for its reader
    if fits:
        here.send_bytes(data)
    packed = clock()
    if fits:
        data = there.recv_bytes()
    for _ in unpack(data):
        pass
    return packed - began, clock() - packed

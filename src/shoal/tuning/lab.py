"""Where trials are run: many pools in turn, in this process or in one of their own.

A process of its own keeps a crash, a hang and the memory of a trial away from the caller. It is the worker of a pool of
one env, the lab itself, whose methods are called from here: so it is supervised, ended and cleaned up after like any.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space

from shoal.envs.adapt import adapt
from shoal.envs.functions import EnvFn
from shoal.errors import ShoalError, SlowEnvWarning, StepTimeout
from shoal.pool import Pool
from shoal.support import processes
from shoal.tuning.candidates import Candidate, EnvCost
from shoal.worker.building import spaces_of
from shoal.worker.measurement import MEASURING, as_one, time_steps

__all__ = ["Lab", "LabHere", "LabLost", "LabProcess"]

ACTIONS = 16  # batches of sampled actions that are used again and again
SOME_BYTES = bytes(4096)  # what the stand-in of a policy chews on


class LabLost(Exception):
    """The lab's process is gone, with all its pools; the text says why."""


class Lab:
    """Builds, runs and closes pools by number.

    Args:
        env_fns: one for each env, or a single one that is used for all.
        policy_latency: seconds of computing between two batches.
    """

    # A pool takes it for an env.
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(1)

    def __init__(self, env_fns: Sequence[EnvFn], policy_latency: float):
        self._env_fns, self._latency = list(env_fns), policy_latency
        self._trials: dict[int, _Trial] = {}

    def reset(self, **arguments: Any) -> Any:
        """Nobody calls it: a lab is only called by its other methods."""
        raise NotImplementedError

    step = reset

    def measure(self) -> EnvCost:
        """Build an env, step it for a moment, and look how much it takes."""
        before = _memory()
        envs = []
        try:
            began = time.perf_counter()
            envs.append(self._build())
            first_build = time.perf_counter() - began
            measured = time_steps(envs[0])
            with_one = _memory()
            build, more = first_build, with_one - before
            if first_build < 1.0 and measured.mean < 1.0:
                # The second one shows what an env takes that brings nothing along. Some can exist only once.
                with contextlib.suppress(Exception):
                    began = time.perf_counter()
                    envs.append(self._build())
                    build = time.perf_counter() - began
                    envs[1].step(envs[1].action_space.sample())
                    more = _memory() - with_one
            return EnvCost(measured, build, first_build, with_one, max(0, more))
        finally:
            for env in envs:
                with contextlib.suppress(Exception):
                    env.close()
            envs.clear()
            gc.collect()

    def _build(self) -> Any:
        env = adapt(self._env_fns[0]())
        spaces_of(env)
        env = as_one(env)
        env.reset(seed=0)
        return env

    def start(self, number: int, candidate: Candidate) -> float | str:
        """Make a pool and reset it; the seconds that this took, or why it failed."""
        fns = self._env_fns * candidate.num_envs if len(self._env_fns) == 1 else self._env_fns
        began = time.perf_counter()
        try:
            self._trials[number] = _Trial(fns, candidate, self._latency)
        except Exception as error:
            return _say(error)
        return time.perf_counter() - began

    def time(self, number: int, warm: float, seconds: float) -> float | str:
        """Steps per second over about so many seconds, one batch at least; or why it failed."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SlowEnvWarning)
                self._trials[number].run(warm)
                return self._trials[number].run(seconds)
        except Exception as error:
            return _say(error)

    def end(self, number: int) -> None:
        """Close a pool."""
        trial = self._trials.pop(number, None)
        if trial is not None:
            with contextlib.suppress(Exception):  # an env that raises in close does not spoil the others' trials
                trial.pool.close()

    def close(self) -> None:
        """Close all pools."""
        for number in list(self._trials):
            self.end(number)


class _Trial:
    """One pool with its actions."""

    def __init__(self, env_fns: Sequence[EnvFn], candidate: Candidate, latency: float):
        self.pool = Pool(list(env_fns), plan=candidate.plan())
        try:
            self._policy: Callable[[], None] = functools.partial(_compute, latency) if latency else _nothing
            self._turn = self._turn_partial if candidate.partial else self._turn_full
            self._envs = candidate.batch_size
            space = batch_space(self.pool.single_action_space, self.pool.batch_size)
            space.seed(0)
            self._actions: Iterator[Any] = itertools.cycle([space.sample() for _ in range(ACTIONS)])
            if candidate.partial:
                self.pool.async_reset(seed=0)
            else:
                self.pool.reset(seed=0)
        except BaseException:
            self.pool.close()
            raise

    def run(self, seconds: float) -> float:
        """Steps of envs per second, however many lanes each has."""
        turn, clock, turns = self._turn, time.perf_counter, 0
        began = now = clock()
        while turns == 0 or now - began < seconds:
            turn()
            turns += 1
            now = clock()
        return turns * self._envs / (now - began)

    def _turn_full(self) -> None:
        self._policy()
        self.pool.step(next(self._actions))

    def _turn_partial(self) -> None:
        batch = self.pool.recv()
        self._policy()
        self.pool.send(next(self._actions), batch.env_id)


def _compute(seconds: float) -> None:
    """What a policy does to others: takes a core, and leaves the GIL alone."""
    clock = time.perf_counter
    end = clock() + seconds
    while clock() < end:
        hashlib.blake2b(SOME_BYTES)


def _nothing() -> None:
    pass


def _memory() -> int:
    """Bytes of this process, shared ones by their share."""
    found = processes.pss([os.getpid()])
    return found[0] if found else processes.resident(os.getpid()) or 0


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class LabProcess:
    """A lab in a process of its own, which is started again when a trial has cost it its life."""

    def __init__(self, env_fns: Sequence[EnvFn], policy_latency: float):
        self._make = functools.partial(_lab_elsewhere, list(env_fns), policy_latency)
        self._pool: Pool | None = None

    def call(self, name: str, *arguments: Any, timeout: float) -> Any:
        """Call a method of the lab.

        Raises:
            LabLost: no answer within so many seconds, or the process died.
            EnvError: the method raised.
        """
        try:
            if self._pool is None:
                self._pool = Pool([self._make], backend="processes", start_timeout=timeout)
            return self._pool.call(name, *arguments, timeout=timeout)[0]
        except StepTimeout:
            self.close(at_once=True)
            raise LabLost(f"no answer within {timeout:.3g} s") from None
        except ShoalError as error:
            if self._pool is None or not self._pool.closed:
                raise
            self._pool = None
            raise LabLost(_say(error)) from error

    def close(self, at_once: bool = False) -> None:
        """End the process and all that it has started."""
        pool, self._pool = self._pool, None
        if pool is not None:
            with contextlib.suppress(ShoalError):
                pool.close(0.0 if at_once else 2.0)


def _lab_elsewhere(env_fns: Sequence[EnvFn], policy_latency: float) -> Lab:
    os.environ[MEASURING] = "1"  # the trials' envs shall leave no traces
    return Lab(env_fns, policy_latency)


class LabHere:
    """A lab in this process, for envs that cannot be sent to another. Nothing can end what hangs here."""

    def __init__(self, env_fns: Sequence[EnvFn], policy_latency: float):
        self._lab = Lab(env_fns, policy_latency)
        self._before = os.environ.get(MEASURING)
        os.environ[MEASURING] = "1"

    def call(self, name: str, *arguments: Any, timeout: float) -> Any:
        """Call a method of the lab."""
        return getattr(self._lab, name)(*arguments)

    def close(self, at_once: bool = False) -> None:
        """Close all pools."""
        self._lab.close()
        os.environ.pop(MEASURING, None)
        if self._before is not None:
            os.environ[MEASURING] = self._before

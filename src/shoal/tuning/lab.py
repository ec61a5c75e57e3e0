"""Runs the trials: many pools in turn, in a process of their own or in this one.

A process of its own keeps crashes, hangs and the memory of trials away from the caller. It is the worker of a pool with
one env, the lab itself, and the search calls that env's methods. So the pool supervises and ends it like any worker.
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
from collections.abc import Callable, Sequence
from typing import Any, Literal

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

START = 60.0  # seconds for the lab's process, and for the import of the module that the env is from
ACTIONS = 16  # batches of sampled actions that are used again and again
SOME_BYTES = bytes(4096)  # data for the stand-in of a policy to compute on


class LabLost(Exception):
    """The lab's process has ended, with all its pools; the text says why."""


class PoolDriver:
    """Drives a pool as a training loop does, in full or in partial batches as the pool has them.

    The batches of actions are used in turn again and again. `policy` is what the caller does with each batch.
    """

    def __init__(self, pool: Pool, actions: Sequence[Any], policy: Callable[[], object] | None = None, seed: int = 0):
        self.pool, self.policy = pool, policy
        self._actions = itertools.cycle(actions)
        if pool.batch_size < pool.num_envs:
            self._turn = self._partial_turn
            pool.async_reset(seed=seed)
        else:
            self._turn = self._full_turn
            pool.reset(seed=seed)

    def run(self, seconds: float) -> tuple[int, float]:
        """Take batches for about so long, at least one; return their number and the seconds that they took."""
        turn, clock, turns = self._turn, time.perf_counter, 0
        began = now = clock()
        while turns == 0 or now - began < seconds:
            turn()
            turns += 1
            now = clock()
        return turns, now - began

    def take(self, batches: int) -> None:
        """Take so many batches."""
        for _ in range(batches):
            self._turn()

    def _full_turn(self) -> None:
        if self.policy is not None:
            self.policy()
        self.pool.step(next(self._actions))

    def _partial_turn(self) -> None:
        batch = self.pool.recv()
        if self.policy is not None:
            self.policy()
        self.pool.send(next(self._actions), batch.env_id)


class Lab:
    """Builds, runs and closes pools, each known by a number. Envs have a function each, or a single one for all."""

    # A pool takes the lab for an env, so it needs spaces.
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(1)

    def __init__(self, env_fns: Sequence[EnvFn], policy_latency: float):
        self._env_fns, self._latency = list(env_fns), policy_latency
        self._drivers: dict[int, tuple[PoolDriver, int]] = {}  # and how many envs a batch of each pool has
        os.environ[MEASURING] = "1"  # envs of trials must not leave files behind

    def reset(self, **arguments: Any) -> Any:
        """Refuse: the lab is an env only so that a pool can run it."""
        raise NotImplementedError

    step = reset

    def measure(self) -> EnvCost:
        """Build an env, step it for a moment, and measure its time and memory."""
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
                # A second env shows the cost without imports. Some envs can exist only once in a process.
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
        """Make a pool and reset it; return the seconds that this took, or why it failed."""
        fns = self._env_fns * candidate.num_envs if len(self._env_fns) == 1 else self._env_fns
        began = time.perf_counter()
        try:
            pool = Pool(fns, plan=candidate.plan())
            try:
                space = batch_space(pool.single_action_space, pool.batch_size)
                space.seed(0)
                policy = functools.partial(_compute, self._latency) if self._latency else None
                driver = PoolDriver(pool, [space.sample() for _ in range(ACTIONS)], policy)
            except BaseException:
                pool.close()
                raise
        except Exception as error:
            return _describe(error)
        self._drivers[number] = driver, candidate.batch_size
        return time.perf_counter() - began

    def time(self, number: int, warm: float, seconds: float) -> float | str:
        """Step a pool for about so many seconds; return its steps of envs per second, or why it failed."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SlowEnvWarning)
                driver, batch = self._drivers[number]
                driver.run(warm)
                turns, took = driver.run(seconds)
        except Exception as error:
            return _describe(error)
        return turns * batch / took

    def end(self, number: int) -> None:
        if number in self._drivers:
            with contextlib.suppress(Exception):  # an env that raises in close must not spoil other trials
                self._drivers.pop(number)[0].pool.close()

    def close(self) -> None:
        for number in list(self._drivers):
            self.end(number)


def _compute(seconds: float) -> None:
    """Use a core and leave the GIL free, as a policy does."""
    clock = time.perf_counter
    end = clock() + seconds
    while clock() < end:
        hashlib.blake2b(SOME_BYTES)


def _memory() -> int:
    """Return the bytes of this process; of shared memory, its share."""
    found = processes.pss([os.getpid()])
    return found[0] if found else processes.resident(os.getpid()) or 0


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


class LabPool:
    """A pool of one env, the lab. The next call after its process was lost starts a new one.

    With "serial" the lab is in this process, for envs that cannot be pickled. Here a trial that hangs cannot be ended.
    """

    def __init__(self, env_fns: Sequence[EnvFn], policy_latency: float, backend: Literal["processes", "serial"]):
        self._make, self._backend = functools.partial(Lab, list(env_fns), policy_latency), backend
        self._pool: Pool | None = None
        self._before = os.environ.get(MEASURING)

    def prepare(self) -> Pool:
        """Start the lab's process, unless it runs. It imports the env's module, and builds no env yet."""
        if self._pool is None:
            self._pool = Pool([self._make], backend=self._backend, start_timeout=START)
        return self._pool

    def call(self, name: str, *arguments: Any, timeout: float) -> Any:
        """Call a method of the lab. Raises LabLost if no answer comes in time or the process dies, else EnvError."""
        try:
            return self.prepare().call(name, *arguments, timeout=timeout)[0]
        except StepTimeout:
            self.close(at_once=True)
            raise LabLost(f"no answer within {timeout:.3g} s") from None
        except ShoalError as error:
            if self._pool is None or not self._pool.closed:
                raise
            self._pool = None
            raise LabLost(_describe(error)) from error

    def close(self, at_once: bool = False) -> None:
        """End the lab and everything that it has started."""
        pool, self._pool = self._pool, None
        if pool is not None:
            with contextlib.suppress(ShoalError):
                pool.close(0.0 if at_once else 2.0)
        os.environ.pop(MEASURING, None)
        if self._before is not None:
            os.environ[MEASURING] = self._before

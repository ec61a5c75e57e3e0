"""Contenders that only benchmarks use; the processes in which they run import this module."""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import signal
from dataclasses import replace
from typing import Any

import numpy as np

import shoal
from shoal import Plan
from shoal.cli.contenders import Runner, ShoalAsync, ShoalPool, ShoalVector, Tally, VectorRunner
from shoal.cli.work import Work


class LoopsInStep(VectorRunner):
    """Plain loops that wait for each other after each batch: a limit for every library that waits for all envs.

    The loops share nothing but a turn number, and they wait by spinning. What they lose against loops that never wait
    is lost to waiting, and to stepping many envs instead of one.
    """

    spins_when_idle = True

    def __init__(self, work: Work, cores: int = 2) -> None:
        super().__init__(work)
        make = work.env_fn()
        shares = [range(core, work.num_envs, cores) for core in range(cores)]
        self.turns = memoryview(mmap.mmap(-1, 64 * cores)).cast("q")  # each on a cache line of its own
        self.turn, self.others = 0, [8 * core for core in range(1, cores)]
        self.pids = []
        for core in range(1, cores):
            if pid := os.fork():
                self.pids.append(pid)
            else:
                self._follow(8 * core, [make() for _ in shares[core]])
        self.envs = [make() for _ in shares[0]]
        self.over = [True] * len(self.envs)
        self.step = self._step

    def reset(self) -> None:
        """Nothing to do: an env whose episode has not begun begins one in its first step."""

    def _step(self, actions: Any) -> None:
        turns = self.turns
        self.turn += 1
        turns[0] = self.turn
        step_all(self.envs, self.over, actions)
        for other in self.others:
            while turns[other] < self.turn:
                pass

    def _follow(self, place: int, envs: list[Any]) -> None:
        over, parent = [True] * len(envs), os.getppid()
        try:
            for turn, actions in enumerate(itertools.cycle(self.actions), 1):
                while self.turns[0] < turn:
                    if os.getppid() != parent:
                        return
                step_all(envs, over, actions)
                self.turns[place] = turn
        finally:
            os._exit(0)

    def close(self) -> None:
        """End the others."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def step_all(envs: list[Any], over: list[bool], actions: Any) -> None:
    """Step each env once; a reset takes the place of a step."""
    for i, env in enumerate(envs):
        if over[i]:
            env.reset()
            over[i] = False
        else:
            _, _, terminated, truncated, _ = env.step(actions[i])
            over[i] = terminated or truncated


class ShoalSB3(ShoalVector):
    """Shoal's VecEnv, as `shoal.make(..., api="sb3")` gives it; it resets within the step that ended an episode."""

    make = staticmethod(functools.partial(shoal.make, api="sb3"))

    def __init__(self, work: Work, backend: str = "auto", **options: Any) -> None:
        super().__init__(work, backend, **options)
        self.step = self._step

    def reset(self) -> None:
        """Reset all envs."""
        self.envs.seed(self.work.seed)
        self.envs.reset()

    def _step(self, actions: Any) -> None:
        _, _, dones, _ = self.envs.step(actions)
        self.extra_resets += int(np.count_nonzero(dones))


class ShoalPlanned(Runner):
    """Shoal's pool by a plan; the plan's number of envs counts, not that of the work."""

    def __init__(self, work: Work, plan: Plan) -> None:
        work = replace(work, num_envs=plan.num_envs or work.num_envs)
        super().__init__(work)
        self.inner: ShoalPool
        if plan.batch_size in (None, work.num_envs):
            self.inner = ShoalPool(work, plan.backend, plan=plan)
        else:
            self.inner = ShoalAsync(work, plan.backend, plan.batch_size, plan=plan)

    def reset(self) -> None:
        """Reset all envs."""
        self.inner.reset()

    def run(self, seconds: float) -> Tally:
        """Step for about so long."""
        return self.inner.run(seconds)

    def close(self) -> None:
        """Close the pool."""
        self.inner.close()

"""What a step of an env costs: the measurement, and how it is taken."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector.utils import batch_space

from shoal.group import MODES, Answers, GroupEnv, is_group
from shoal.spaces import flatten

__all__ = ["MEASURING", "Measurement", "time_steps"]

MEASURING = "SHOAL_MEASURING"  # set in the environment of a process whose env is only measured: it leaves no traces

SECONDS = 0.15  # how long the env is stepped
FEWEST, MOST = 3, 4000  # steps, whatever their time,
SLOW = 0.5  # unless one takes more seconds than this: then one will do
KEPT = 512  # samples that are kept
BLOCKS = 0.1  # an env that waits gives up its core at least so often a step


@dataclass(frozen=True)
class Measurement:
    """What a step of the env costs.

    Attributes:
        wall: seconds of each measured step, resets at episode ends included; without the time in which an env
            that only computes was kept from its core.
        cpu: mean CPU seconds of a step; well below the mean of `wall` for an env that waits.
    """

    wall: tuple[float, ...]
    cpu: float

    @property
    def mean(self) -> float:
        """Mean wall-clock seconds of a step."""
        return sum(self.wall) / len(self.wall)

    @property
    def waiting(self) -> float:
        """The fraction of a step in which the env does not compute."""
        return max(0.0, 1.0 - self.cpu / self.mean)


def time_steps(env: Any) -> Measurement:
    """Step an env with random actions. Runs where the env is, in a worker."""
    if is_group(env):
        env = _AsOne(env)
    actions = [env.action_space.sample() for _ in range(16)]
    wall: list[float] = []
    cpu: list[float] = []
    clock, cpu_clock = time.perf_counter, time.process_time
    env.reset()
    began = clock()
    _, _, terminated, truncated, _ = env.step(actions[0])  # the first one loads and compiles things
    fewest = FEWEST if clock() - began < SLOW else 1
    switches, end, done = _times_blocked(), clock() + SECONDS, terminated or truncated
    while len(wall) < fewest or (len(wall) < MOST and clock() < end):
        began, cpu_began = clock(), cpu_clock()
        if done:
            env.reset()
        _, _, terminated, truncated, _ = env.step(actions[len(wall) % 16])
        done = terminated or truncated
        cpu.append(cpu_clock() - cpu_began)
        wall.append(clock() - began)
    # An env that never blocks only seems to wait when others have the core: count its computing alone.
    if (_times_blocked() - switches) < BLOCKS * len(wall):
        wall = cpu
    stride = -(-len(wall) // KEPT)
    return Measurement(tuple(wall[::stride]), sum(cpu) / len(cpu))


class _AsOne:
    """An env with several lanes, as far as it takes to measure it. Its lanes go on by themselves."""

    def __init__(self, env: GroupEnv):
        self._env, self._rows = env, np.arange(env.num_lanes)
        env.use(next(iter(getattr(env, "modes", MODES))))
        self._out = Answers.scratch(flatten(env.single_observation_space), env.num_lanes, finals=True)
        self.action_space = batch_space(env.single_action_space, env.num_lanes)

    def reset(self) -> None:
        self._out.clear()
        self._env.reset(self._rows, [None] * len(self._rows), None, self._out)

    def step(self, actions: Any) -> Any:
        self._out.clear()
        self._env.step(self._rows, actions, self._out)
        return None, 0.0, False, False, None


def _times_blocked() -> int:
    """How often this process gave its core up because it had to wait."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw

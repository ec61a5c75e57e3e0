"""Measures what a step of an env costs."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector.utils import batch_space

from shoal.envs.autoreset import MODES, RULES
from shoal.envs.group import Answers, GroupEnv, is_group
from shoal.spaces.leaves import flatten

MEASURING = "SHOAL_MEASURING"  # in the environment of a process that only measures an env, and leaves no traces

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
            that only computes waited for its core.
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
    env = as_one(env)
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
    # An env that never blocks only seems to wait when other processes have the core: count only its computing.
    if (_times_blocked() - switches) < BLOCKS * len(wall):
        wall = cpu
    stride = -(-len(wall) // KEPT)
    return Measurement(tuple(wall[::stride]), sum(cpu) / len(cpu))


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


def _times_blocked() -> int:
    """Return how often this process gave its core up because it had to wait."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw

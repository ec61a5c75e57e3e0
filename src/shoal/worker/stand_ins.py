"""Stand-ins for envs: they return recorded answers, at once or after the time that a step of the env takes."""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
from gymnasium import Space

Answer = tuple[Any, dict[str, Any]]  # an observation and an info


class Playback(gymnasium.Env[Any, Any]):
    """Returns recorded answers, and does nothing else.

    Args:
        seconds: how long steps shall compute, one after the other, from anywhere among them on; none for no time.
    """

    def __init__(self, spaces: tuple[Space[Any], Space[Any]], answers: Sequence[Answer], seconds: Sequence[float] = ()):
        self.observation_space, self.action_space = spaces
        self._first = answers[0]
        steps = itertools.cycle([(obs, 0.0, False, False, info) for obs, info in answers])
        if seconds:
            steps = computing(steps, seconds)
        # A call of `next` costs less than one of a method. The action is its default, which is never returned.
        self.step = functools.partial(next, steps)  # type: ignore[method-assign]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._first


def computing(steps: Iterator[Any], seconds: Sequence[float]) -> Any:
    """Give these steps, each after one of the times, which are spent on the core."""
    # A generator of its own: that of the module is the user's, where the caller itself steps envs.
    clock, at = time.perf_counter, random.Random().randrange(len(seconds))
    for took in itertools.cycle([*seconds[at:], *seconds[:at]]):
        until = clock() + took
        while clock() < until:
            pass
        yield next(steps)

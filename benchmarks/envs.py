"""The environments of the benchmark: large observations, heavy steps, and steps that wait.

Plain Gymnasium envs without any knowledge of who runs them. Together with CartPole-v1 they cover
what decides how envs should be run: cheap steps, bytes to move, CPU to share, time to overlap.
"""

from __future__ import annotations

import math
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

Reset = tuple[np.ndarray, dict[str, Any]]
Step = tuple[np.ndarray, float, bool, bool, dict[str, Any]]


class Image84(gymnasium.Env[np.ndarray, np.int64]):
    """Catch a falling ball, seen as the last four frames of 84x84 grey pixels."""

    size, frames, episode = 84, 4, 200
    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = spaces.Discrete(3)
    column: int
    drift: int

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Drop the first ball onto four equal frames."""
        super().reset(seed=seed)
        self.steps, self.paddle = 0, self.size // 2
        self._drop()
        self.stack = np.repeat(self._frame()[..., None], self.frames, axis=-1)
        return self.stack, {}

    def step(self, action: np.int64) -> Step:
        """Move the paddle and the ball; the new frame pushes the oldest out of the stack."""
        self.steps += 1
        self.paddle = min(max(self.paddle + 4 * (int(action) - 1), 6), self.size - 7)
        self.row += 4
        self.column = (self.column + self.drift) % self.size
        reward = 0.0
        if self.row >= self.size - 4:
            reward = 1.0 if abs(self.column - self.paddle) <= 6 else -1.0
            self._drop()
        # A new array each time, as a frame-stacking wrapper makes: who keeps it may keep it.
        self.stack = np.concatenate((self.stack[..., 1:], self._frame()[..., None]), axis=-1)
        return self.stack, reward, False, self.steps >= self.episode, {}

    def _drop(self) -> None:
        self.row = 2
        self.column, self.drift = self.np_random.integers((0, -2), (self.size, 3)).tolist()

    def _frame(self) -> np.ndarray:
        frame = np.zeros((self.size, self.size), np.uint8)
        frame[self.row - 2 : self.row + 2, max(0, self.column - 2) : self.column + 2] = 255
        frame[-3:, self.paddle - 6 : self.paddle + 7] = 128
        return frame


class Frames84(gymnasium.Env[np.ndarray, np.int64]):
    """Observations as large as Image84's that are copied from memory: moving them is most of the work."""

    episode = 200
    observation_space = spaces.Box(0, 255, (84, 84, 4), np.uint8)
    action_space = spaces.Discrete(3)
    # Few enough to stay in the cache, as a frame that was rendered just now is.
    stacks = np.random.default_rng(0).integers(0, 256, (4, 84, 84, 4), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin anywhere."""
        super().reset(seed=seed)
        self.steps, self.at = 0, int(self.np_random.integers(4))
        return self.stacks[self.at].copy(), {}

    def step(self, action: np.int64) -> Step:
        """Show the next frames."""
        self.steps += 1
        self.at = (self.at + int(action) + 1) % 4
        return self.stacks[self.at].copy(), float(action), False, self.steps >= self.episode, {}


class Busy500us(gymnasium.Env[np.ndarray, np.int64]):
    """A step takes 500 microseconds of CPU, whoever else wants the core meanwhile."""

    cpu, episode = 500e-6, 200
    observation_space = spaces.Box(-np.inf, np.inf, (8,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin at random numbers."""
        super().reset(seed=seed)
        self.steps = 0
        self.state = self.np_random.standard_normal(8)
        return self.state, {}

    def step(self, action: np.int64) -> Step:
        """Compute until this thread's own clock has seen the time pass.

        The wall clock would let two envs that share a core each finish in 500 microseconds, and
        reward whoever starts too many workers.
        """
        stop = time.thread_time() + self.cpu
        value = float(self.state[0])
        while time.thread_time() < stop:
            for _ in range(20):
                value = math.sin(value) + 0.5
        self.steps += 1
        self.state = np.roll(self.state, 1)
        self.state[0] = value + int(action)
        return self.state, value, False, self.steps >= self.episode, {}


class Busy1ms(Busy500us):
    """The same for a millisecond."""

    cpu = 1e-3


class LogNormalSleep(gymnasium.Env[np.ndarray, np.int64]):
    """A step waits for a log-normal time of mean 1 ms: a simulator or a game server elsewhere."""

    mean, sigma, episode = 1e-3, 1.0, 200
    observation_space = spaces.Box(0, np.inf, (4,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin; this takes no time."""
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: np.int64) -> Step:
        """Sleep, and show how long it was meant to be."""
        # The mean of a log-normal is exp(mu + sigma^2 / 2), so mu is set below log(mean).
        mu = math.log(self.mean) - self.sigma**2 / 2
        pause = self.np_random.lognormal(mu, self.sigma)
        time.sleep(pause)
        self.steps += 1
        return np.full(4, pause, np.float32), 1.0, False, self.steps >= self.episode, {}


class Sleep1ms(LogNormalSleep):
    """A step waits for a millisecond, always."""

    sigma = 0.0


class NoWork(gymnasium.Env[np.ndarray, np.int64]):
    """A step does nothing: what is left is what the vector env costs."""

    episode = 200
    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(2)
    nothing = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Begin."""
        super().reset(seed=seed)
        self.steps = 0
        return self.nothing.copy(), {}

    def step(self, action: np.int64) -> Step:
        """Count."""
        self.steps += 1
        return self.nothing.copy(), 1.0, False, self.steps >= self.episode, {}


class FiveInfos(NoWork):
    """The same with five numbers as an info at each step, as MuJoCo's envs and most simulators have them."""

    def step(self, action: np.int64) -> Step:
        """Count, and tell."""
        self.steps += 1
        at = 0.5 * self.steps
        info = {"x_position": at, "x_velocity": 1.5, "reward_forward": at, "reward_ctrl": -0.25, "steps": self.steps}
        return self.nothing.copy(), 1.0, False, self.steps >= self.episode, info


class KeptInfos(FiveInfos):
    """Makes the same numbers and keeps them: what infos add to a step is what they add to this one's."""

    def step(self, action: np.int64) -> Step:
        """Count, and tell nothing."""
        self.steps += 1
        at = 0.5 * self.steps
        self.info = {
            "x_position": at,
            "x_velocity": 1.5,
            "reward_forward": at,
            "reward_ctrl": -0.25,
            "steps": self.steps,
        }
        return self.nothing.copy(), 1.0, False, self.steps >= self.episode, {}


class LongReset(NoWork):
    """A step takes 20 microseconds of CPU, and a reset 5 milliseconds: a level is generated, a scene is loaded."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        """Compute for a while."""
        _compute(5e-3)
        return super().reset(seed=seed, options=options)

    def step(self, action: np.int64) -> Step:
        """Compute for a moment."""
        _compute(20e-6)
        return super().step(action)


def _compute(seconds: float) -> None:
    stop = time.thread_time() + seconds
    while time.thread_time() < stop:
        pass


class _WithoutInfos(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes the infos away."""

    def step(self, action: Any) -> Any:
        """Step, and tell nothing."""
        return (*self.env.step(action)[:4], {})


def bare_cheetah() -> Any:
    """Return a HalfCheetah-v5 whose steps have no infos."""
    return _WithoutInfos(gymnasium.make("HalfCheetah-v5"))


# name on the command line -> what `shoal.cli.work.env_fn` takes
ALL = {
    "CartPole": "CartPole-v1",
    "Image84": "envs:Image84",
    "Busy500us": "envs:Busy500us",
    "LogNormalSleep": "envs:LogNormalSleep",
}

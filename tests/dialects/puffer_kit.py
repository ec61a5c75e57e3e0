"""What the tests with PufferLib share: creators as its users write them, and a run of a vectorizer as plain data."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pufferlib
import pufferlib.emulation
from gymnasium import spaces
from pufferlib.pufferlib import EpisodeStats


class Told(gymnasium.Env[Any, Any]):
    """Has an info at each step, ends by both flags, and draws its episodes' lengths."""

    observation_space: Any = spaces.Box(-100, 100, (2,), np.float64)
    action_space: Any = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left, self.steps = int(self.np_random.integers(2, 7)), 0
        return self.look(), {"begun": self.left}

    def look(self) -> Any:
        return np.array([self.left, self.steps], np.float64)

    def step(self, action: Any) -> Any:
        self.left, self.steps = self.left - 1, self.steps + 1
        over, even = self.left <= 0, self.steps % 2 == 0
        return self.look(), 0.1 * self.steps + float(action), over and even, over and not even, {"left": self.left}


class Nested(Told):
    """Nested observations and actions, which PufferLib flattens."""

    observation_space = spaces.Dict(
        image=spaces.Box(0, 255, (2, 3), np.uint8), more=spaces.Tuple([spaces.Discrete(9), Told.observation_space])
    )
    action_space = spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Discrete(2)})

    def look(self) -> Any:
        image = np.full((2, 3), self.left % 256, np.uint8)
        return {"image": image, "more": (self.steps % 9, np.array([self.left, self.steps], np.float64))}

    def step(self, action: Any) -> Any:
        return super().step(action["a"] + 10 * action["b"])


class Images(Told):
    observation_space = spaces.Box(0, 255, (4, 5, 3), np.uint8)

    def look(self) -> Any:
        return np.full((4, 5, 3), self.left % 256, np.uint8)


class Moves(Told):
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def step(self, action: Any) -> Any:
        return super().step(float(action @ np.array([1.0, 0.5])))


class Team:
    """As PettingZoo's parallel envs: three agents, of which some leave before the end."""

    possible_agents = ["a", "b", "c"]
    metadata: dict[str, Any] = {}
    render_mode = None

    def __init__(self) -> None:
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-100, 100, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(4)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents, self.steps = list(self.possible_agents), 0
        self.lasts = {agent: int(self.random.integers(1, 6)) for agent in self.agents}
        return self.look(), {agent: {} for agent in self.agents}

    def look(self) -> Any:
        return {agent: np.array([self.lasts[agent], self.steps], np.float32) for agent in self.agents}

    def step(self, actions: Any) -> Any:
        self.steps += 1
        rewards = {agent: float(actions[agent]) + 0.1 for agent in self.agents}
        terminated = {agent: self.steps >= self.lasts[agent] for agent in self.agents}
        truncated = {agent: self.steps >= 5 and not terminated[agent] for agent in self.agents}
        infos = {agent: {"end": self.steps} if terminated[agent] else {} for agent in self.agents}
        obs = self.look()
        self.agents = [agent for agent in self.agents if not terminated[agent] and not truncated[agent]]
        return obs, rewards, terminated, truncated, infos

    def render(self) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Release nothing."""


class Native(pufferlib.PufferEnv):
    """Two agents that begin their episodes by themselves; a teacher, where this PufferLib has them."""

    def __init__(self, buf: Any = None, seed: int = 0):
        self.single_observation_space = spaces.Box(0, 1000, (3,), np.float32)
        self.single_action_space = spaces.Discrete(4)
        self.num_agents, self.made_with = 2, seed
        super().__init__(buf)

    def reset(self, seed: int | None = None) -> Any:
        self.count = np.array([0, 1])
        self.observations[:] = [self.made_with, seed or 0, 0]
        self.rewards[:], self.terminals[:], self.truncations[:] = 0, False, False
        return self.observations, []

    def step(self, actions: Any) -> Any:
        self.count += 1
        self.rewards[:], self.terminals[:] = self.count + actions, self.count >= 4
        self.masks[:] = self.count != 3
        if hasattr(self, "teacher_actions"):
            self.teacher_actions[:] = self.count % 4
        infos = [{"score": float(self.count.sum())}] if self.terminals.any() else []
        self.count[self.terminals] = 0
        self.observations[:, 2] = self.count
        return self.observations, self.rewards, self.terminals, self.truncations, infos

    def close(self) -> None:
        """Release nothing."""


def solo(kind: Any = Told, buf: Any = None, seed: int = 0) -> Any:
    """The standard creator."""
    env = gymnasium.make(kind) if isinstance(kind, str) else kind()
    return pufferlib.emulation.GymnasiumPufferEnv(env=env, buf=buf, seed=seed)


def counted(buf: Any = None, seed: int = 0) -> Any:
    """The standard creator, with an info at each episode's end."""
    return pufferlib.emulation.GymnasiumPufferEnv(env=EpisodeStats(gymnasium.make("CartPole-v1")), buf=buf, seed=seed)


def team(buf: Any = None, seed: int = 0) -> Any:
    """The standard creator of a team."""
    return pufferlib.emulation.PettingZooPufferEnv(env=Team(), buf=buf, seed=seed)


def run(envs: Any, steps: int, seed: int | None = 3) -> list[Any]:
    """Receive and send so often, with actions by chance; return copies of all that was received."""
    chance = np.random.default_rng(0)
    found: list[Any] = []
    envs.async_reset(seed)
    space = envs.single_action_space
    for _ in range(steps):
        received = envs.recv()
        *arrays, infos, env_ids, masks = received
        found.append([*(np.array(array) for array in arrays), plain(infos), np.array(env_ids), np.array(masks)])
        rows = len(masks)
        if isinstance(space, spaces.Box):
            actions: Any = chance.uniform(-1, 1, (rows, *space.shape)).astype(space.dtype)
        elif isinstance(space, spaces.MultiDiscrete):
            actions = (chance.integers(0, 1000, (rows, len(space.nvec))) % space.nvec).astype(np.int32)
        else:
            actions = chance.integers(0, space.n, rows).astype(np.int32)
        envs.send(actions)
    return found


def plain(infos: Any) -> Any:
    """Infos without those that say nothing."""
    return [info for info in infos if any(value not in ({}, []) for value in info.values())]


def compare(theirs: list[Any], ours: list[Any]) -> None:
    """Check that two runs received the same: values, types and shapes."""
    assert len(theirs) == len(ours)
    for turn, (expected, found) in enumerate(zip(theirs, ours, strict=True)):
        assert len(expected) == len(found), turn
        for place, (one, other) in enumerate(zip(expected, found, strict=True)):
            if isinstance(one, list):
                assert one == other, (turn, place)
            else:
                assert (one.dtype, one.shape) == (other.dtype, other.shape), (turn, place)
                np.testing.assert_array_equal(one, other, f"turn {turn}, place {place}")

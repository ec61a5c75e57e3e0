"""Envs with many agents, written by hand: none of them needs PettingZoo."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space, spaces


class Parallel:
    """What all of them have: spaces by agent, and agents that were there last."""

    metadata: dict[str, Any] = {"name": "by hand", "render_modes": []}
    render_mode = None
    observation_by_agent: dict[str, Space[Any]]
    action_by_agent: dict[str, Space[Any]]

    def __init__(self) -> None:
        self.possible_agents = list(self.observation_by_agent)
        self.agents: list[str] = []
        self.closed = 0

    def observation_space(self, agent: str) -> Space[Any]:
        return self.observation_by_agent[agent]

    def action_space(self, agent: str) -> Space[Any]:
        return self.action_by_agent[agent]

    def close(self) -> None:
        self.closed += 1


class Crowd(Parallel):
    """Agents that come, end and come back by chance; everything that happens follows from the seed and the actions.

    An observation is (agent, time, what it did last, sum of all that was done so far). All that is given is random:
    rewards, both kinds of ends, infos. Whoever gets an action without living, or none though living, breaks it.
    """

    def __init__(self, size: int = 4, length: int = 12, come_back: bool = True, infos: bool = True):
        names = [f"agent_{i}" for i in range(size)]
        self.observation_by_agent = {name: spaces.Box(-1e6, 1e6, (4,), np.float32) for name in names}
        self.action_by_agent = {name: spaces.Discrete(5) for name in names}
        super().__init__()
        self.length, self.come_back, self.with_infos = length, come_back, infos
        self.rng = np.random.default_rng(0)
        self.options: Any = None
        self.seeds: list[int | None] = []

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        self.options = options
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.time, self.total = 0, 0
        self.agents = [name for name in self.possible_agents if self.rng.random() < 0.8] or self.possible_agents[:1]
        self.waiting = [name for name in self.possible_agents if name not in self.agents]
        return {name: self._observe(name, 0) for name in self.agents}, self._infos(self.agents)

    def _observe(self, name: str, action: int) -> Any:
        return np.array([self.possible_agents.index(name), self.time, action, self.total], np.float32)

    def _infos(self, names: list[str]) -> dict[str, Any]:
        return {
            name: {"time": self.time, "of": name} if self.with_infos and self.rng.random() < 0.3 else {}
            for name in names
        }

    def step(self, actions: dict[str, Any]) -> Any:
        assert set(actions) == set(self.agents), (actions, self.agents)
        assert all(isinstance(action, int | np.integer) for action in actions.values())
        self.time += 1
        self.total += sum(int(action) for action in actions.values())
        ended = {name: self.rng.random() for name in self.agents}
        terminated = {name: chance < 0.08 for name, chance in ended.items()}
        truncated = {name: 0.05 < chance < 0.12 or self.time >= self.length for name, chance in ended.items()}
        rewards = {name: float(self.rng.normal()) for name in self.agents}
        seen = {name: self._observe(name, int(actions[name])) for name in self.agents}
        left = [name for name in self.agents if terminated[name] or truncated[name]]
        self.agents = [name for name in self.agents if name not in left]
        if self.agents:
            for name in [name for name in self.waiting if self.rng.random() < 0.15]:
                self.waiting.remove(name)
                self.agents.append(name)
                seen[name] = self._observe(name, 0)
                rewards[name], terminated[name], truncated[name] = 0.0, False, False
        if self.come_back:
            self.waiting += left
        return seen, rewards, terminated, truncated, self._infos(list(seen))


class Scripted(Parallel):
    """Plays back what it is told: a list of (agents afterwards, observations, rewards, terminated, truncated, infos).

    An observation is one number, and so is given here as one.
    """

    def __init__(self, first: Any, script: list[Any], names: str = "ab"):
        self.observation_by_agent = {name: spaces.Box(-100, 100, (1,), np.float64) for name in names}
        self.action_by_agent = {name: spaces.Discrete(3) for name in names}
        super().__init__()
        self.first, self.script, self.given = first, script, []

    @staticmethod
    def _arrays(observations: dict[str, float]) -> dict[str, Any]:
        return {name: np.array([value], np.float64) for name, value in observations.items()}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.at = 0
        agents, observations = self.first
        self.agents = list(agents)
        return self._arrays(observations), {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.given.append(dict(actions))
        agents, observations, *rest = self.script[self.at]
        self.at += 1
        self.agents = list(agents)
        return self._arrays(observations), *({**part} for part in rest)


class Unequal(Parallel):
    """Three agents with boxes of different sizes, different numbers of choices, and one of ten steps' length."""

    observation_by_agent = {
        "small": spaces.Box(-1, 1, (2,), np.float32),
        "large": spaces.Box(-2, 0.5, (5,), np.float32),
        "middle": spaces.Box(0, 3, (3,), np.float32),
    }
    action_by_agent = {"small": spaces.Discrete(2), "large": spaces.Discrete(5), "middle": spaces.Discrete(3, start=-1)}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.time = list(self.possible_agents), 0
        self.acted: list[dict[str, Any]] = []
        return self._observe(), {}

    def _observe(self) -> dict[str, Any]:
        own = {name: self.observation_by_agent[name] for name in self.agents}
        self.last = {name: self.rng.uniform(box.low, box.high).astype(box.dtype) for name, box in own.items()}
        return self.last

    def step(self, actions: dict[str, Any]) -> Any:
        for name, action in actions.items():
            assert self.action_by_agent[name].contains(action), (name, action)
        self.acted.append(dict(actions))
        self.time += 1
        rewards = {name: float(actions[name]) for name in self.agents}
        ended = {name: self.time >= 10 or (name == "small" and self.time >= 4) for name in self.agents}
        result = self._observe(), rewards, ended, dict.fromkeys(self.agents, False), {}
        self.agents = [name for name in self.agents if not ended[name]]
        return result


class Masked(Parallel):
    """Observations with a mask of legal actions, and Box actions; ends together after five steps."""

    observation_by_agent = {
        name: spaces.Dict(
            {
                "observation": spaces.Box(0, 255, (2, 3), np.uint8),
                "action_mask": spaces.Box(0, 1, (4,), np.int8),
                "turn": spaces.Discrete(7),
            }
        )
        for name in ("x", "y")
    }
    action_by_agent = {name: spaces.Box(-1, 1, (2,), np.float32) for name in ("x", "y")}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.time, self.kept = list(self.possible_agents), 0, []
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        return {name: self._observe() for name in self.agents}, {}

    def _observe(self) -> dict[str, Any]:
        return {
            "observation": self.rng.integers(0, 256, (2, 3), np.uint8),
            "action_mask": self.rng.integers(0, 2, 4, np.int8),
            "turn": int(self.rng.integers(7)),
        }

    def step(self, actions: dict[str, Any]) -> Any:
        self.kept.append(actions)  # as envs do: what is in there must not change later
        self.time += 1
        rewards = {name: float(actions[name].sum()) for name in self.agents}
        over, never = dict.fromkeys(self.agents, self.time >= 5), dict.fromkeys(self.agents, False)
        result = {name: self._observe() for name in self.agents}, rewards, never, over, {}
        if self.time >= 5:
            self.agents = []
        return result

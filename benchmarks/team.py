"""A PettingZoo parallel env with eight agents: who takes part in `puffer.py --agents`."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

AGENTS = [f"player_{i}" for i in range(8)]
MOVES = np.array([(0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)], np.float32)

Each = dict[str, Any]


class Team(ParallelEnv[str, np.ndarray, int]):
    """Eight players on a field run for a flag; each sees itself, the flag, and where the others are.

    All stay to the end, so that a step is eight lanes of work for whoever runs it.
    """

    metadata = {"name": "team_v0"}
    possible_agents = AGENTS
    episode = 200
    _observation = spaces.Box(-np.inf, np.inf, (2 + 2 + 2 * 8,), np.float32)
    _action = spaces.Discrete(5)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """Return what this player sees: its place, the flag's, everybody's, as seen from it."""
        return self._observation

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """Return the moves: stay, or a step to one of four sides."""
        return self._action

    def reset(self, seed: int | None = None, options: Each | None = None) -> tuple[Each, Each]:
        """Scatter the players and the flag."""
        if seed is not None or not hasattr(self, "rng"):
            self.rng = np.random.default_rng(seed)
        self.agents = self.possible_agents[:]
        self.steps = 0
        self.places = self.rng.uniform(-10, 10, (8, 2)).astype(np.float32)
        self.flag = self.rng.uniform(-10, 10, 2).astype(np.float32)
        return self._seen(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> tuple[Each, Each, Each, Each, Each]:
        """Move everybody; nearer the flag is better; the episode ends for all at once, by its length."""
        self.steps += 1
        self.places += MOVES[[actions[agent] for agent in AGENTS]]
        far = np.abs(self.places - self.flag).sum(axis=1)
        over = self.steps >= self.episode
        seen = self._seen()
        rewards = dict(zip(AGENTS, (-far).tolist(), strict=True))
        self.agents = [] if over else self.agents
        return seen, rewards, dict.fromkeys(AGENTS, False), dict.fromkeys(AGENTS, over), {agent: {} for agent in AGENTS}

    def _seen(self) -> Each:
        seen = np.empty((8, 2 + 2 + 2 * 8), np.float32)
        seen[:, :2] = self.places
        seen[:, 2:4] = self.flag - self.places
        seen[:, 4:] = (self.places[None] - self.places[:, None]).reshape(8, 16)
        return dict(zip(AGENTS, seen, strict=True))

    def render(self) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Keep nothing."""

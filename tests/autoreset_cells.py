"""What each autoreset mode answers, cell by cell, and one small env in the forms in which Shoal can step it.

The env counts its steps: the observation is 10 + t, the reward t. Action 1 terminates; the third step truncates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from agent_envs import Parallel
from shoal import compiled

GO, END, RESET = 0, 1, None  # actions, and a reset that the caller asks for
LIMIT = 3
OBSERVATIONS, ACTIONS = spaces.Box(0, 99, (1,), np.float32), spaces.Discrete(2)


class Cell(NamedTuple):
    """The answer of one lane. A None is left out of comparisons, except that of `final`."""

    obs: float
    reward: float | None
    terminated: bool | None
    truncated: bool | None
    began: bool | None
    final: float | None
    episode_return: float | None
    episode_length: int | None


def _cell(obs: int, reward: int, ends: str, began: bool, final: int | None, total: int, length: int) -> Cell:
    return Cell(obs, reward, ends == "terminated", ends == "truncated", began, final, total, length)


# An answer that only begins an episode, and steps one and two of an episode.
BEGIN = _cell(10, 0, "", True, None, 0, 0)
ONE, TWO = _cell(11, 1, "", False, None, 1, 1), _cell(12, 2, "", False, None, 3, 2)
# The ends of episodes: with the last observation, and with the first one of the next episode.
END_AT_ONE, END_AT_TWO = _cell(11, 1, "terminated", False, None, 1, 1), _cell(12, 2, "terminated", False, None, 3, 2)
CUT_AT_THREE = _cell(13, 3, "truncated", False, None, 6, 3)
END_AT_ONE_ANEW, END_AT_TWO_ANEW = (
    _cell(10, 1, "terminated", True, 11, 1, 1),
    _cell(10, 2, "terminated", True, 12, 3, 2),
)
CUT_AT_THREE_ANEW = _cell(10, 3, "truncated", True, 13, 6, 3)

# What happens after a first reset: actions, and the answer to each.
TABLE: dict[str, dict[str, list[tuple[int | None, Cell]]]] = {
    "next_step": {
        "steps": [(GO, ONE), (GO, TWO)],
        "termination": [(GO, ONE), (END, END_AT_TWO), (GO, BEGIN), (GO, ONE)],
        "truncation": [(GO, ONE), (GO, TWO), (GO, CUT_AT_THREE), (GO, BEGIN), (GO, ONE)],
        "end at the first step": [(END, END_AT_ONE), (GO, BEGIN), (GO, ONE)],
        "reset after the end": [(GO, ONE), (END, END_AT_TWO), (RESET, BEGIN), (GO, ONE)],
        "two ends in a row": [(END, END_AT_ONE), (END, BEGIN), (END, END_AT_ONE), (END, BEGIN), (GO, ONE)],
    },
    "same_step": {
        "steps": [(GO, ONE), (GO, TWO)],
        "termination": [(GO, ONE), (END, END_AT_TWO_ANEW), (GO, ONE)],
        "truncation": [(GO, ONE), (GO, TWO), (GO, CUT_AT_THREE_ANEW), (GO, ONE)],
        "end at the first step": [(END, END_AT_ONE_ANEW), (GO, ONE)],
        "reset after the end": [(GO, ONE), (END, END_AT_TWO_ANEW), (RESET, BEGIN), (GO, ONE)],
        "two ends in a row": [(END, END_AT_ONE_ANEW), (END, END_AT_ONE_ANEW), (GO, ONE)],
    },
    "disabled": {
        "steps": [(GO, ONE), (GO, TWO)],
        "termination": [(GO, ONE), (END, END_AT_TWO), (RESET, BEGIN), (GO, ONE)],
        "truncation": [(GO, ONE), (GO, TWO), (GO, CUT_AT_THREE), (RESET, BEGIN), (GO, ONE)],
        "end at the first step": [(END, END_AT_ONE), (RESET, BEGIN), (GO, ONE)],
        "reset after the end": [(GO, ONE), (END, END_AT_TWO), (RESET, BEGIN), (GO, ONE)],
        "two ends in a row": [(END, END_AT_ONE), (RESET, BEGIN), (END, END_AT_ONE), (RESET, BEGIN), (GO, ONE)],
    },
}
CELLS = [(mode, script) for mode, scripts in TABLE.items() for script in scripts]


def check(mode: str, script: str, reset: Callable[[], list[Cell]], step: Callable[[int], list[Cell]]) -> None:
    """Play a script, and compare the cells of all lanes with the table."""
    for turn, (action, expected) in enumerate([(RESET, BEGIN), *TABLE[mode][script]]):
        for lane, found in enumerate(reset() if action is None else step(action)):
            assert found.final == expected.final, (turn, lane, found, expected)
            for name, value in found._asdict().items():
                assert value is None or value == getattr(expected, name), (turn, lane, name, found, expected)


# ---- the env, in all its forms ---------------------------------------------------------------------------------


class Counter(gymnasium.Env[Any, Any]):
    """As a Gymnasium env."""

    observation_space, action_space = OBSERVATIONS, ACTIONS

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.time = 0
        return np.float32([10]), {}

    def step(self, action: Any) -> Any:
        self.time += 1
        return np.float32([10 + self.time]), self.time, action == END, self.time >= LIMIT, {}


class Rows:
    """As many envs that are stepped as rows."""

    single_observation_space, single_action_space = OBSERVATIONS, ACTIONS

    def __init__(self, num_envs: int = 2):
        self.num_envs, self.time = num_envs, np.zeros(num_envs)

    def _obs(self) -> Any:
        return (10 + self.time[:, None]).astype(np.float32)

    def reset(self, mask: Any, seeds: Any) -> Any:
        self.time[mask] = 0
        return self._obs()

    def step(self, mask: Any, actions: Any) -> Any:
        self.time[mask] += 1
        return self._obs(), self.time, actions == END, self.time >= LIMIT

    def close(self) -> None:
        pass


class Team(Parallel):
    """As a team of two agents, which end together."""

    observation_by_agent = {"a": OBSERVATIONS, "b": OBSERVATIONS}
    action_by_agent = {"a": ACTIONS, "b": ACTIONS}

    def _all(self, value: Any) -> dict[str, Any]:
        return dict.fromkeys(self.possible_agents, value)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.time, self.agents = 0, list(self.possible_agents)
        return self._all(np.float32([10])), {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.time += 1
        ends, cut = actions["a"] == END, self.time >= LIMIT
        if ends or cut:
            self.agents = []
        obs = self._all(np.float32([10 + self.time]))
        return obs, self._all(self.time), self._all(ends), self._all(cut), self._all({})


class Kernel(compiled.Env):
    """As a class to be compiled."""

    observation_space, action_space = OBSERVATIONS, ACTIONS
    max_episode_steps = LIMIT
    state = {"time": int}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.time = 0

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        state.time += 1
        return float(state.time), action == 1

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0] = 10 + state.time


class KernelTeam(Kernel):
    """The same with two agents."""

    num_agents = 2

    @staticmethod
    def step(state: Any, action: Any, reward: Any, rng: Any) -> Any:  # type: ignore[override]
        state.time += 1
        reward[0] = state.time
        reward[1] = state.time
        return action[0] == 1

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0, 0] = 10 + state.time
        obs[1, 0] = 10 + state.time

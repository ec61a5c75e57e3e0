"""skrl's PPO over Gymnasium's vector env and over Shoal's, and its IPPO over one PettingZoo env and over many."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import torch
from ladder import OURS, Cell, Clock, Training, climb
from mpe2 import simple_spread_v3
from skrl.agents.torch.ppo import PPO
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model
from skrl.multi_agents.torch.ippo import IPPO
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed
from torch import nn

import shoal
from shoal.dialects.gymnasium import AsyncVectorEnv, SyncVectorEnv

NUM_ENVS, STEPS = 16, 128
Kwargs = dict[str, Any]


def layers(inputs: int, outputs: int) -> nn.Sequential:
    """Return a small network."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class Choices(CategoricalMixin, Model):  # type: ignore[misc]
    """A policy for discrete actions."""

    def __init__(self, **spaces: Any):
        Model.__init__(self, **spaces)
        CategoricalMixin.__init__(self)
        self.net = layers(self.num_observations, self.num_actions)

    def compute(self, inputs: Kwargs, role: str) -> tuple[torch.Tensor, Kwargs]:
        return self.net(inputs["observations"]), {}


class Forces(GaussianMixin, Model):  # type: ignore[misc]
    """A policy for continuous actions."""

    def __init__(self, **spaces: Any):
        Model.__init__(self, **spaces)
        GaussianMixin.__init__(self)
        self.net = layers(self.num_observations, self.num_actions)
        self.log_std = nn.Parameter(torch.zeros(self.num_actions))

    def compute(self, inputs: Kwargs, role: str) -> tuple[torch.Tensor, Kwargs]:
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Value(DeterministicMixin, Model):  # type: ignore[misc]
    """A critic."""

    def __init__(self, **spaces: Any):
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)
        self.net = layers(self.num_observations, 1)

    def compute(self, inputs: Kwargs, role: str) -> tuple[torch.Tensor, Kwargs]:
        return self.net(inputs["observations"]), {}


def models(observation_space: Any, action_space: Any) -> dict[str, Model]:
    """Return a policy and a critic."""
    spaces = {"observation_space": observation_space, "action_space": action_space, "device": "cpu"}
    policy = Choices if isinstance(action_space, gymnasium.spaces.Discrete) else Forces
    return {"policy": policy(**spaces), "value": Value(**spaces)}


QUIET = {"write_interval": 0, "checkpoint_interval": 0}
CONFIG = {"rollouts": STEPS, "learning_epochs": 4, "mini_batches": 4, "learning_rate": 3e-4, "experiment": QUIET}


class PPOWithReturns(PPO):  # type: ignore[misc]
    """skrl's PPO, which also notes the return of each episode as the envs report it."""

    def record_transition(self, **transition: Any) -> None:
        infos = transition["infos"]
        if "episode" in infos:
            self.found += infos["episode"]["r"][infos["_episode"]].tolist()
        super().record_transition(**transition)


class IPPOWithReturns(IPPO):  # type: ignore[misc]
    """skrl's IPPO, which also notes the return of each episode, summed over agents."""

    def record_transition(self, **transition: Any) -> None:
        rewards = torch.stack(list(transition["rewards"].values())).sum(0)[:, 0]
        self.running = rewards if self.running is None else self.running + rewards
        ended = next(iter(transition["truncated"].values()))[:, 0]
        self.found += self.running[ended].tolist()
        self.running = torch.where(ended, 0.0, self.running)
        super().record_transition(**transition)


def learn(env: Any, agent: Any, rollouts: int, warm_up: int = 1) -> Training:
    """Train an agent for some rollouts, and take the time of all but the first ones."""
    agent.found, agent.running = [], None
    options = {"headless": True, "disable_progressbar": True, "close_environment_at_exit": False}
    steps = rollouts * STEPS
    SequentialTrainer(env=env, agents=agent, cfg={**options, "timesteps": warm_up * STEPS}).train()
    trainer = SequentialTrainer(env=env, agents=agent, cfg={**options, "timesteps": steps})
    with Clock() as clock:
        trainer.train()
    return Training(agent.found, steps * env.num_envs, clock.seconds)


def make_env(env_id: str) -> Any:
    """Return an env that reports the return of each episode."""
    return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(env_id))


def train(env_id: str, rollouts: int, ours: Any, who: str, seed: int) -> Training:
    """Train PPO over this class of ours, or over Gymnasium's."""
    set_seed(seed)
    kind = ours if who == OURS else gymnasium.vector.SyncVectorEnv
    env = wrap_env(kind([functools.partial(make_env, env_id)] * NUM_ENVS), verbose=False)
    try:
        agent = PPOWithReturns(
            models=models(env.observation_space, env.action_space),
            memory=RandomMemory(memory_size=STEPS, num_envs=NUM_ENVS, device="cpu"),
            observation_space=env.observation_space,
            action_space=env.action_space,
            device="cpu",
            cfg=CONFIG,
        )
        return learn(env, agent, rollouts)
    finally:
        env.close()


def make_team() -> Any:
    """Return three agents that must cover three places."""
    return simple_spread_v3.parallel_env(continuous_actions=False)


def train_team(rollouts: int, count: int, who: str, seed: int, **options: Any) -> Training:
    """Train IPPO: over the env itself, of which skrl takes only one, or over `count` of them."""
    set_seed(seed)
    env = wrap_env(shoal.make(make_team, count, api="agents", **options) if who == OURS else make_team(), verbose=False)
    names = env.possible_agents
    # skrl wants these by agent even where they are empty.
    kinds = ("learning_rate_scheduler", "observation_preprocessor", "state_preprocessor", "value_preprocessor")
    empty = {f"{kind}_kwargs": {name: {} for name in names} for kind in kinds}
    try:
        agent = IPPOWithReturns(
            possible_agents=names,
            models={name: models(env.observation_space(name), env.action_space(name)) for name in names},
            memories={name: RandomMemory(memory_size=STEPS, num_envs=env.num_envs, device="cpu") for name in names},
            observation_spaces=env.observation_spaces,
            state_spaces=env.state_spaces,
            action_spaces=env.action_spaces,
            device="cpu",
            cfg={**CONFIG, **empty},
        )
        return learn(env, agent, rollouts)
    finally:
        env.close()


if __name__ == "__main__":
    torch.set_num_threads(1)  # networks this small gain nothing from more
    team = {"theirs": "one env", "ours": 'shoal.make(..., 16, api="agents")'}
    cells = [
        Cell(
            *("PPO", env_id, "SyncVectorEnv", f"shoal.dialects.gymnasium.{ours.__name__}"),
            train=functools.partial(train, env_id, rollouts, ours),
        )
        for env_id, rollouts, ours in [("CartPole-v1", 20, SyncVectorEnv), ("HalfCheetah-v5", 10, AsyncVectorEnv)]
    ]
    cells.append(
        Cell("IPPO", "simple_spread_v3", **team, train=functools.partial(train_team, 5, NUM_ENVS), exact=False)
    )
    climb("skrl", ["skrl", "gymnasium", "torch", "mpe2", "pettingzoo"], cells)

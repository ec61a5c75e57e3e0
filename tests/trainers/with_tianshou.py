"""tianshou's PPO and DQN over its own best vector env and over Shoal's, on CartPole and HalfCheetah."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import gymnasium
import numpy as np
import torch
from ladder import OURS, Cell, Clock, Training, climb
from tianshou.algorithm import DQN, PPO
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy, ProbabilisticActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, CollectStats, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams, OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

from shoal.dialects import tianshou

NUM_ENVS, STEPS, HIDDEN = 16, 128, (64, 64)
Gaussian = torch.distributions.Independent


class Recorder(Collector):  # type: ignore[type-arg]
    """Keeps the returns of all episodes."""

    def collect(self, *args: Any, **kwargs: Any) -> CollectStats:
        """Collect, and note the returns."""
        stats = super().collect(*args, **kwargs)
        self.found = [*getattr(self, "found", []), *stats.returns.tolist()]
        return stats


def normal(parameters: tuple[torch.Tensor, torch.Tensor]) -> Gaussian:
    """Return the distribution of continuous actions."""
    return Gaussian(torch.distributions.Normal(*parameters), 1)


def make_ppo(env: Any) -> PPO:
    """Return a PPO for this env's spaces."""
    shape, adam = env.observation_space.shape, AdamOptimizerFactory(lr=3e-4)
    actor_net, critic_net = (Net(state_shape=shape, hidden_sizes=HIDDEN) for _ in range(2))
    spaces = {"action_space": env.action_space, "observation_space": env.observation_space}
    if isinstance(env.action_space, gymnasium.spaces.Discrete):
        actor = DiscreteActor(preprocess_net=actor_net, action_shape=env.action_space.n)
        policy: Any = DiscreteActorPolicy(actor=actor, **spaces)
        return PPO(policy=policy, critic=DiscreteCritic(preprocess_net=critic_net), optim=adam)
    mean = ContinuousActorProbabilistic(preprocess_net=actor_net, action_shape=env.action_space.shape, unbounded=True)
    policy = ProbabilisticActorPolicy(actor=mean, dist_fn=normal, **spaces)
    return PPO(policy=policy, critic=ContinuousCritic(preprocess_net=critic_net), optim=adam)


def make_dqn(env: Any) -> DQN:
    """Return a DQN for this env's spaces."""
    model = Net(state_shape=env.observation_space.shape, action_shape=env.action_space.n, hidden_sizes=HIDDEN)
    policy = DiscreteQLearningPolicy(model=model, action_space=env.action_space, eps_training=0.1)
    return DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3), target_update_freq=320)


def train(trainer: str, env_id: str, our_envs: Any, rollouts: int, who: str, seed: int) -> Training:
    """Train for some rollouts."""
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    np.random.seed(seed)
    envs = (our_envs if who == OURS else DummyVectorEnv)([functools.partial(gymnasium.make, env_id)] * NUM_ENVS)
    envs.seed(seed)
    total = rollouts * NUM_ENVS * STEPS
    env = gymnasium.make(env_id)
    algorithm: Any = make_ppo(env) if trainer == "PPO" else make_dqn(env)
    collector = Recorder(algorithm, envs, VectorReplayBuffer(20000, NUM_ENVS), exploration_noise=trainer == "DQN")
    common = {
        "training_collector": collector, "max_epochs": 1, "epoch_num_steps": total, "verbose": False,
        "show_progress": False,
    }  # fmt: skip
    params: Any
    if trainer == "PPO":
        params = OnPolicyTrainerParams(
            **common, collection_step_num_env_steps=NUM_ENVS * STEPS, batch_size=512, update_step_num_repetitions=4
        )
    else:
        params = OffPolicyTrainerParams(
            **common, collection_step_num_env_steps=NUM_ENVS * 4, update_step_num_gradient_steps_per_sample=1 / 32
        )
    collector.reset()
    collector.collect(n_step=NUM_ENVS * STEPS)
    collector.reset()
    with Clock() as clock:
        algorithm.run_training(params)
    collector.close()
    return Training(collector.found, total, clock.seconds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serial, processes = tianshou.DummyVectorEnv, tianshou.SubprocVectorEnv

    def cell(trainer: str, env_id: str, envs: Any, rollouts: int) -> Cell:
        """Return a cell that trains over tianshou's DummyVectorEnv and over these envs."""
        ours = f"shoal.dialects.tianshou.{envs.__name__}"
        return Cell(trainer, env_id, "DummyVectorEnv", ours, functools.partial(train, trainer, env_id, envs, rollouts))

    cells = [
        cell("PPO", "CartPole-v1", serial, 8),
        cell("DQN", "CartPole-v1", serial, 8),
        cell("PPO", "HalfCheetah-v5", processes, 9),
    ]
    climb("tianshou", ["tianshou", "gymnasium", "torch"], cells)

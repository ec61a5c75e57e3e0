"""PPO in one file, in the manner of CleanRL, for vector envs of Gymnasium 0.29 and of 1.x.

`with_cleanrl.py` runs it over Gymnasium's vector env and over Shoal's: `--vector-env module:Class` says which.
It prints one line of JSON: the returns of the episodes, the steps, and how long they took.
"""

import argparse
import importlib
import json
import time

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical, Independent, Normal


def make_env(env_id):
    def thunk():
        env = gym.make(env_id)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        if isinstance(env.action_space, gym.spaces.Box):
            env = gym.wrappers.ClipAction(env)
        return env

    return thunk


def network(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        size = int(np.prod(envs.single_observation_space.shape))
        space = envs.single_action_space
        self.discrete = isinstance(space, gym.spaces.Discrete)
        outputs = int(space.n) if self.discrete else int(np.prod(space.shape))
        self.critic, self.actor = network(size, 1), network(size, outputs)
        self.log_std = nn.Parameter(torch.zeros(outputs))

    def distribution(self, obs):
        out = self.actor(obs)
        return Categorical(logits=out) if self.discrete else Independent(Normal(out, self.log_std.exp()), 1)


def finished(infos):
    """The returns of the episodes that ended, as each age of Gymnasium reports them."""
    if "final_info" in infos:  # 0.29
        found = [info["episode"]["r"] for info in infos["final_info"] if info and "episode" in info]
    elif "episode" in infos:  # 1.x
        found = infos["episode"]["r"][infos["_episode"]]
    else:
        found = []
    return [float(np.ravel(one)[0]) for one in found]


def advantages_of(rewards, values, dones, next_value, next_done, gamma=0.99, gae_lambda=0.95):
    found, last = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        alive = 1.0 - (next_done if t == len(rewards) - 1 else dones[t + 1])
        after = next_value if t == len(rewards) - 1 else values[t + 1]
        delta = rewards[t] + gamma * after * alive - values[t]
        found[t] = last = delta + gamma * gae_lambda * alive * last
    return found


def update(agent, optimizer, obs, actions, logprobs, advantages, returns, epochs=4, minibatches=4):
    count = len(obs)
    for _ in range(epochs):
        for rows in torch.randperm(count).split(count // minibatches):
            distribution = agent.distribution(obs[rows])
            ratio = (distribution.log_prob(actions[rows]) - logprobs[rows]).exp()
            wanted = advantages[rows]
            wanted = (wanted - wanted.mean()) / (wanted.std() + 1e-8)
            policy_loss = -torch.min(wanted * ratio, wanted * ratio.clamp(0.8, 1.2)).mean()
            value_loss = 0.5 * ((agent.critic(obs[rows]).flatten() - returns[rows]) ** 2).mean()
            loss = policy_loss + 0.5 * value_loss - 0.01 * distribution.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--vector-env", default="gymnasium.vector:SyncVectorEnv")
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--num-steps", type=int, default=128)
    parser.add_argument("--iterations", type=int, default=21)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # networks this small gain nothing from more

    module, _, name = args.vector_env.partition(":")
    envs = getattr(importlib.import_module(module), name)([make_env(args.env_id) for _ in range(args.num_envs)])
    agent = Agent(envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, eps=1e-5)

    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(shape + envs.single_observation_space.shape)
    actions = torch.zeros(shape + envs.single_action_space.shape)
    logprobs, rewards, dones, values = (torch.zeros(shape) for _ in range(4))
    episodes, running, seconds = [], np.zeros(args.num_envs), 0.0

    next_obs, _ = envs.reset(seed=args.seed)
    next_obs, next_done = torch.tensor(next_obs, dtype=torch.float32), torch.zeros(args.num_envs)
    for iteration in range(args.iterations):
        began = time.perf_counter()
        for step in range(args.num_steps):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                distribution = agent.distribution(next_obs)
                action = distribution.sample()
                values[step] = agent.critic(next_obs).flatten()
            actions[step], logprobs[step] = action, distribution.log_prob(action)
            next_obs, reward, terminations, truncations, infos = envs.step(action.numpy())
            rewards[step] = torch.tensor(reward)
            next_obs = torch.tensor(next_obs, dtype=torch.float32)
            next_done = torch.tensor(np.logical_or(terminations, truncations), dtype=torch.float32)
            running += reward
            ended = np.logical_or(terminations, truncations)
            # Gymnasium 0.29 reports returns in single precision: they are compared by their own sums.
            assert np.allclose(finished(infos), running[ended], rtol=1e-3, atol=1e-3)
            episodes += running[ended].tolist()
            running[ended] = 0.0
        with torch.no_grad():
            advantages = advantages_of(rewards, values, dones, agent.critic(next_obs).flatten(), next_done)
        flat = [one.flatten(0, 1) for one in (obs, actions, logprobs, advantages, advantages + values)]
        update(agent, optimizer, *flat)
        seconds += (time.perf_counter() - began) if iteration else 0.0  # the first one warms up
    envs.close()
    steps = (args.iterations - 1) * args.num_steps * args.num_envs
    print(json.dumps({"returns": episodes, "steps": steps, "seconds": seconds, "gymnasium": gym.__version__}))

"""A DDPG-style loop over many envs, with the two old problems of parallel sampling solved.

    python examples/baselines_ddpg_noise.py

1. Each env resets when its episode is over, and nobody waits for it. No transition that never happened is stored: where
   an episode has ended, the next observation is `info["terminal_observation"]`, not the first one of the next episode.
   The exploration noise is reset for exactly the lanes whose next action is the first of an episode.
2. What is behind the pipe can be reached: attributes and methods of the envs, and their infos.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.dialects.baselines import make_vec_env


class OrnsteinUhlenbeck:
    """Noise with a memory, one for each env: at the start of an episode it is 0, and wanders off from there."""

    def __init__(self, count: int, size: int, sigma: float, rng: np.random.Generator):
        self.state = np.zeros((count, size))
        self.sigma, self.rng = sigma, rng

    def reset(self, which: Any) -> None:
        self.state[which] = 0.0

    def __call__(self) -> Any:
        self.state += -0.15 * self.state + self.sigma * self.rng.normal(size=self.state.shape)
        return self.state


class Replay:
    """The last transitions."""

    def __init__(self, size: int, obs_size: int, action_size: int):
        self.size, self.count = size, 0
        self.obs, self.next_obs = np.zeros((2, size, obs_size), np.float32)
        self.action = np.zeros((size, action_size), np.float32)
        self.reward, self.terminated = np.zeros((2, size, 1), np.float32)

    def store(self, *fields: Any) -> None:
        where = (self.count + np.arange(len(fields[0]))) % self.size
        names = ("obs", "action", "reward", "next_obs", "terminated")
        for name, values in zip(names, fields, strict=True):
            getattr(self, name)[where] = values
        self.count += len(where)

    def sample(self, count: int, rng: np.random.Generator) -> list[torch.Tensor]:
        which = rng.integers(0, min(self.count, self.size), count)
        names = ("obs", "action", "reward", "next_obs", "terminated")
        return [torch.as_tensor(getattr(self, name)[which]) for name in names]


class DDPG:
    """Actor and critic, each with a slow copy of itself."""

    def __init__(self, obs_size: int, action_size: int, limit: float):
        def net(inputs: int, outputs: int, *last: nn.Module) -> nn.Sequential:
            return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                                 nn.Linear(64, outputs), *last)  # fmt: skip

        self.limit = limit
        self.actor, self.slow_actor = (net(obs_size, action_size, nn.Tanh()) for _ in range(2))
        self.critic, self.slow_critic = (net(obs_size + action_size, 1) for _ in range(2))
        self.slow_actor.load_state_dict(self.actor.state_dict())
        self.slow_critic.load_state_dict(self.critic.state_dict())
        self.actor_adam = torch.optim.Adam(self.actor.parameters(), 1e-3)
        self.critic_adam = torch.optim.Adam(self.critic.parameters(), 1e-3)

    @torch.no_grad()
    def act(self, obs: Any) -> Any:
        return self.limit * self.actor(torch.as_tensor(obs)).numpy()

    def learn(self, obs: Any, action: Any, reward: Any, next_obs: Any, terminated: Any, gamma: float = 0.98) -> None:
        with torch.no_grad():
            next_action = self.limit * self.slow_actor(next_obs)
            value = self.slow_critic(torch.cat([next_obs, next_action], 1))
            target = reward + gamma * (1 - terminated) * value
        loss = nn.functional.mse_loss(self.critic(torch.cat([obs, action], 1)), target)
        self.critic_adam.zero_grad()
        loss.backward()
        self.critic_adam.step()
        loss = -self.critic(torch.cat([obs, self.limit * self.actor(obs)], 1)).mean()
        self.actor_adam.zero_grad()
        loss.backward()
        self.actor_adam.step()
        for slow, fast in ((self.slow_actor, self.actor), (self.slow_critic, self.critic)):
            for ours, theirs in zip(slow.parameters(), fast.parameters(), strict=True):
                ours.data.lerp_(theirs.data, 0.01)


def train(steps: int, num_env: int, seed: int) -> tuple[Replay, list[float]]:
    """The loop itself; the transitions, and the returns of all episodes."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    envs = make_vec_env("Pendulum-v1", "classic_control", num_env, seed)
    limit = float(envs.action_space.high[0])
    # Behind the pipe: any attribute, any method.
    print("gravity in each env:", envs.get_attr("g"))
    print("max_torque in env 0:", envs.get_attr("max_torque", indices=0)[0])

    obs_size, action_size = envs.observation_space.shape[0], envs.action_space.shape[0]
    replay, agent = Replay(50_000, obs_size, action_size), DDPG(obs_size, action_size, limit)
    noise = OrnsteinUhlenbeck(num_env, action_size, 0.2 * limit, rng)
    returns: list[float] = []
    obs = envs.reset()
    for step in range(steps):
        action = np.clip(agent.act(obs) + noise(), -limit, limit).astype(np.float32)
        next_obs, reward, done, infos = envs.step(action)
        last_obs = next_obs.copy()
        for lane in np.flatnonzero(done):
            last_obs[lane] = infos[lane]["terminal_observation"]
            returns.append(infos[lane]["episode"]["r"])
        # An episode that was cut by time did not end: its last state has a value.
        ended = done & ~np.array([info["TimeLimit.truncated"] for info in infos])
        replay.store(obs, action, reward[:, None] / 10, last_obs, ended[:, None])
        noise.reset(done)  # exactly the lanes whose next action is the first of an episode
        obs = next_obs
        if step * num_env > 1000:
            for _ in range(2):
                agent.learn(*replay.sample(128, rng))
    envs.close()
    return replay, returns


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=4000, help="of all envs at once")
    parser.add_argument("--envs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    replay, returns = train(options.steps, options.envs, options.seed)
    first, last = np.mean(returns[: options.envs]), np.mean(returns[-2 * options.envs :])
    print(f"{replay.count} transitions, {len(returns)} episodes; mean return {first:.0f} at first, {last:.0f} at last")


if __name__ == "__main__":
    main()

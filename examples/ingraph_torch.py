"""Train CartPole with a policy and its envs in one compiled PyTorch graph.

    python examples/ingraph_torch.py

`torch.compile(fullgraph=True)` turns sixteen steps of the policy and of all envs into one graph: the steps of the envs
are operators in it, and stay where they are. What is learned from them is a plain actor-critic with clipped updates.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.graph.torch import TorchEnv

STEPS = 16  # in one graph
GAMMA, LAMBDA, CLIP, EPOCHS, LEARNING_RATE = 0.98, 0.9, 0.2, 8, 3e-3


class ActorCritic(nn.Module):
    """One number for each action, and one for the state."""

    def __init__(self, inputs: int, actions: int):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, actions))
        self.critic = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-chances of the actions, and the value."""
        return torch.log_softmax(self.actor(obs), -1), self.critic(obs)[..., 0]


def make_rollout(env: TorchEnv, model: ActorCritic) -> Callable[[Tensor], Any]:
    """Return the function to compile: a few steps of all envs, and what they are worth."""

    def rollout(obs: Tensor) -> Any:
        seen, actions, chosen, values, rewards, done = [], [], [], [], [], []
        for _ in range(STEPS):
            chances, value = model(obs)
            action = torch.multinomial(chances.exp(), 1)
            step = env.step(action[:, 0])
            for column, item in zip(
                (seen, actions, chosen, values, rewards, done),
                (obs, action, chances.gather(1, action), value, step.reward, step.done),
                strict=True,
            ):
                column.append(item)
            obs = step.obs
        next_value, advantage, advantages = model(obs)[1], torch.zeros(env.num_envs), []
        for t in reversed(range(STEPS)):
            error = rewards[t] + GAMMA * next_value * ~done[t] - values[t]
            advantage = error + GAMMA * LAMBDA * advantage * ~done[t]
            advantages.append(advantage)
            next_value = values[t]
        columns = (seen, actions, chosen, values, advantages[::-1], rewards, done)
        return obs, tuple([torch.stack(column) for column in columns])

    return rollout


def learn(model: ActorCritic, optimizer: torch.optim.Optimizer, played: tuple[Tensor, ...]) -> None:
    """Make good actions more likely, not too far from what they were."""
    obs, actions, before, values, advantages, *_ = played
    worth = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
    for _ in range(EPOCHS):
        chances, guess = model(obs)
        ratio = (chances.gather(2, actions) - before).exp()[..., 0]
        gain = torch.min(ratio * worth, ratio.clamp(1 - CLIP, 1 + CLIP) * worth).mean()
        entropy = -(chances * chances.exp()).sum(-1).mean()
        loss = nn.functional.smooth_l1_loss(guess, values + advantages) - gain - 0.01 * entropy
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=250, help=f"of {STEPS} steps each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=["inductor", "aot_eager", "eager"], default="inductor")
    parser.add_argument("--no-compile", action="store_true", help="the same code, step by step")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # the network is small, and the cores are for the envs

    # Under "same_step" an env that is done begins again at once: each row is a step that the policy has chosen.
    env = TorchEnv(shoal.make("CartPole-v1", num_envs=options.envs, autoreset="same_step"))
    model = ActorCritic(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    rollout = make_rollout(env, model)
    if not options.no_compile:
        rollout = torch.compile(rollout, fullgraph=True, dynamic=False, backend=options.backend)

    start = time.perf_counter()
    obs, running = env.reset(seed=options.seed), torch.zeros(options.envs)
    returns: list[float] = []
    for iteration in range(1, options.iterations + 1):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - iteration / (options.iterations + 1))
        with torch.no_grad():
            obs, played = rollout(obs)
        learn(model, optimizer, played)
        for reward, done in zip(*played[-2:], strict=True):
            running += reward
            returns += running[done].tolist()
            running[done] = 0
        if iteration == 1:
            print(f"first iteration after {time.perf_counter() - start:.1f} s, compiler included", flush=True)
        if iteration % (options.iterations // 10 or 1) == 0:
            steps, mean = iteration * STEPS * options.envs, sum(returns) / max(len(returns), 1)
            print(f"{steps:7,d} steps, {time.perf_counter() - start:3.0f} s: mean return {mean:.1f}", flush=True)
            returns.clear()
    env.close()


if __name__ == "__main__":
    main()

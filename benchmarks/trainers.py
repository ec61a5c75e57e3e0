"""Whole trainings: PPO of Stable-Baselines3 and a single-file PPO, over their own vector envs and over Shoal's `auto`.

CartPole-v1 and HalfCheetah-v5, 16 envs each; steps/s of the whole training, policy and updates included. Everybody
trains in turns, with the same seeds, threads and steps in a round. `python benchmarks/trainers.py --only sb3` for one,
`--threads 1` to leave the cores to the envs.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from rich.console import Console
from rich.table import Table

import common
import shoal
from shoal.cli.contenders import installed
from shoal.observe.progress import progress

NUM_ENVS, STEPS = 16, 128  # envs, and steps of each between two updates
EPOCHS, MINIBATCHES = 4, 4
ROLLOUT = NUM_ENVS * STEPS
WARM_UP = 2 * ROLLOUT  # steps that are trained before the clock starts
AUTO = "Shoal auto"


class Work(NamedTuple):
    """An env, how many steps of it a training has, and how many in a quick one."""

    env: str
    total: int
    quick: int


ENVS = {
    "CartPole": Work("CartPole-v1", 40 * ROLLOUT, 8 * ROLLOUT),
    "HalfCheetah": Work("HalfCheetah-v5", 16 * ROLLOUT, 4 * ROLLOUT),
}


def with_statistics(env_id: str) -> Any:
    """Return an env that sums its episodes up, as trainers want it."""
    return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(env_id))


def with_clipped_actions(env_id: str) -> Any:
    """Return the same with actions clipped, where they have bounds, as scripts in CleanRL's style have it."""
    env = with_statistics(env_id)
    return gymnasium.wrappers.ClipAction(env) if isinstance(env.action_space, gymnasium.spaces.Box) else env


# ---- Stable-Baselines3 -------------------------------------------------------------------------------------------


def sb3_envs(name: str, env_id: str) -> Any:
    """Return 16 envs as a VecEnv."""
    from stable_baselines3.common import vec_env

    make = functools.partial(with_statistics, env_id)
    if name == "SB3 DummyVecEnv":
        return vec_env.DummyVecEnv([make] * NUM_ENVS)
    if name == "SB3 SubprocVecEnv":
        # Forked workers start in no time, and run the same.
        return vec_env.SubprocVecEnv([make] * NUM_ENVS, start_method="fork")
    return shoal.make(make, NUM_ENVS, api="sb3")


def train_sb3(envs: Any, total: int, seed: int) -> float:
    """Train by Stable-Baselines3's PPO; return steps/s."""
    from stable_baselines3 import PPO

    sizes = {"n_steps": STEPS, "batch_size": ROLLOUT // MINIBATCHES, "n_epochs": EPOCHS}
    model = PPO("MlpPolicy", envs, **sizes, seed=seed, device="cpu")
    model.learn(WARM_UP)
    began = time.perf_counter()
    model.learn(total)
    return total / (time.perf_counter() - began)


# ---- a single file, in the manner of CleanRL ---------------------------------------------------------------------


def single_file_envs(name: str, env_id: str) -> Any:
    """Return 16 envs as a Gymnasium vector env."""
    fns = [functools.partial(with_clipped_actions, env_id)] * NUM_ENVS
    if name == "Gymnasium Sync":
        return gymnasium.vector.SyncVectorEnv(fns)
    if name == "Gymnasium Async":
        return gymnasium.vector.AsyncVectorEnv(fns)
    return shoal.make(fns)


def agent_for(envs: Any) -> Any:
    """Return the actor and the critic, two layers of 64 each."""
    import torch
    from torch import nn

    inputs = int(np.prod(envs.single_observation_space.shape))
    discrete = isinstance(envs.single_action_space, gymnasium.spaces.Discrete)
    outputs = int(envs.single_action_space.n) if discrete else int(np.prod(envs.single_action_space.shape))

    def layers(last: int) -> Any:
        return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, last))

    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = layers(outputs), layers(1)
            self.log_std = nn.Parameter(torch.zeros(outputs))

        def forward(self, obs: Any, action: Any = None) -> tuple[Any, ...]:
            mean = self.actor(obs)
            if discrete:
                policy: Any = torch.distributions.Categorical(logits=mean)
            else:
                normal = torch.distributions.Normal(mean, self.log_std.exp())
                policy = torch.distributions.Independent(normal, 1)
            action = policy.sample() if action is None else action
            return action, policy.log_prob(action), policy.entropy(), self.critic(obs).squeeze(-1)

    return Agent()


def train_single_file(envs: Any, total: int, seed: int, gamma: float = 0.99, trace: float = 0.95) -> float:
    """Train by PPO, all of it here; return steps/s."""
    import torch

    torch.manual_seed(seed)
    agent = agent_for(envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    obs, actions, log_probs, rewards, dones, values = [], [], [], [], [], []
    next_obs, _ = envs.reset(seed=seed)
    next_obs, next_done = torch.as_tensor(next_obs, dtype=torch.float32), torch.zeros(NUM_ENVS)
    began, done_steps = 0.0, -WARM_UP
    while done_steps < total:
        if done_steps == 0:
            began = time.perf_counter()
        for kept in (obs, actions, log_probs, rewards, dones, values):
            kept.clear()
        for _ in range(STEPS):
            with torch.no_grad():
                action, log_prob, _, value = agent(next_obs)
            obs.append(next_obs), dones.append(next_done), values.append(value)
            actions.append(action), log_probs.append(log_prob)
            found, reward, terminated, truncated, _ = envs.step(action.numpy())
            rewards.append(torch.as_tensor(reward, dtype=torch.float32))
            next_obs = torch.as_tensor(found, dtype=torch.float32)
            next_done = torch.as_tensor(terminated | truncated, dtype=torch.float32)
        with torch.no_grad():
            last = agent(next_obs)[3]
        advantages = estimate_advantages(rewards, [*dones[1:], next_done], [*values, last], gamma, trace)
        rollout = [torch.stack(kept).flatten(0, 1) for kept in (obs, actions, log_probs)]
        update(agent, optimizer, *rollout, advantages.flatten(), (advantages + torch.stack(values)).flatten())
        done_steps += ROLLOUT
    return total / (time.perf_counter() - began)


def estimate_advantages(rewards: list[Any], dones: list[Any], values: list[Any], gamma: float, trace: float) -> Any:
    """Return generalized advantage estimates, [steps, envs]; `values` has one more, that of the last observation."""
    import torch

    found, running = torch.zeros(len(rewards), NUM_ENVS), torch.zeros(NUM_ENVS)
    for t in reversed(range(len(rewards))):
        goes_on = 1.0 - dones[t]
        delta = rewards[t] + gamma * values[t + 1] * goes_on - values[t]
        found[t] = running = delta + gamma * trace * goes_on * running
    return found


def update(agent: Any, optimizer: Any, obs: Any, actions: Any, log_probs: Any, advantages: Any, returns: Any) -> None:
    """Take EPOCHS passes of gradient steps over a rollout."""
    import torch

    for _ in range(EPOCHS):
        for rows in torch.randperm(ROLLOUT).chunk(MINIBATCHES):
            _, log_prob, entropy, value = agent(obs[rows], actions[rows])
            ratio = (log_prob - log_probs[rows]).exp()
            weights = advantages[rows]
            weights = (weights - weights.mean()) / (weights.std() + 1e-8)
            policy_loss = torch.max(-weights * ratio, -weights * ratio.clamp(0.8, 1.2)).mean()
            loss = policy_loss - 0.01 * entropy.mean() + 0.25 * ((value - returns[rows]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


# ---- in turns ----------------------------------------------------------------------------------------------------

Train = Callable[[Any, int, int], float]
TRAINERS: dict[str, tuple[Callable[[str, str], Any], Train, list[str]]] = {
    "sb3": (sb3_envs, train_sb3, ["SB3 DummyVecEnv", "SB3 SubprocVecEnv", AUTO]),
    "single file": (single_file_envs, train_single_file, ["Gymnasium Sync", "Gymnasium Async", AUTO]),
}


def cell(trainer: str, work: Work, options: Any, notify: Callable[[str], None]) -> dict[str, Any]:
    """Train over each vector env in turns; return the rates, and those of `auto` over the best of the others."""
    make, train, names = TRAINERS[trainer]
    total, rounds = (work.quick, min(3, options.rounds)) if options.quick else (work.total, options.rounds)
    total = options.steps or total
    rates: dict[str, list[float]] = {name: [] for name in names}
    plan = ""
    for number, name in common.in_turns(names, rounds, options.limit):
        notify(f"{trainer}, {work.env}, round {number + 1}: {name}")
        envs = make(name, work.env)
        plan = str(envs.pool.plan) if name == AUTO else plan
        gc.collect()
        rates[name].append(train(envs, total, number))
        envs.close()
    best = max(names[:-1], key=lambda name: float(np.median(rates[name])))
    over = [mine / theirs for mine, theirs in zip(rates[AUTO], rates[best], strict=True)]
    return {
        "trainer": trainer, "env": work.env, "num_envs": NUM_ENVS, "steps": total, "plan": plan, "best": best,
        "steps_per_s": {name: common.quartiles(values) for name, values in rates.items()},
        "of_best": common.quartiles(over), "rates": rates,
    }  # fmt: skip


def table(cells: list[dict[str, Any]]) -> Table:
    """Lay the trainings out."""
    grid = Table(
        "trainer", "env", "", "steps/s", "auto / the best of its own", title="PPO, 16 envs", title_justify="left"
    )
    for one in cells:
        for name, (low, middle, high) in one["steps_per_s"].items():
            ratio = "{1:.2f} ({0:.2f}..{2:.2f})".format(*one["of_best"]) if name == AUTO else ""
            grid.add_row(one["trainer"], one["env"], name, f"{middle:,.0f} ({low:,.0f}..{high:,.0f})", ratio)
    return grid


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser(str(__doc__).partition("\n")[0], 0.0, 7)
    common.quick_option(parser)
    parser.add_argument("--only", nargs="+", choices=list(TRAINERS), metavar="TRAINER", help=", ".join(TRAINERS))
    parser.add_argument("--envs", nargs="+", choices=list(ENVS), default=list(ENVS))
    parser.add_argument("--threads", type=int, help="of torch, for everybody; torch's own default is one for each core")
    parser.add_argument("--steps", type=int, help="of each training, in place of its own number")
    options = parser.parse_args()
    trainers = options.only or list(TRAINERS)
    needed = ["torch", *["stable_baselines3"] * ("sb3" in trainers), *["mujoco"] * ("HalfCheetah" in options.envs)]
    missing = [name for name in needed if not installed(name)]
    if missing:
        parser.error(f"needs {', '.join(missing)}: pip install '.[peers]'")
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    chosen = [(trainer, ENVS[name]) for trainer in trainers for name in options.envs]
    with progress(len(chosen) * options.rounds * 3) as notify:
        cells = [cell(trainer, work, options, notify) for trainer, work in chosen]
    Console().print(table(cells))
    for one in cells:
        Console().print(f"  {one['trainer']}, {one['env']}, auto: {one['plan']}", style="dim")
    common.write(options, "trainers", {"trainings": cells})


if __name__ == "__main__":
    main()

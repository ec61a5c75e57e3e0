"""TorchRL's PPO, with its collector, over its own best vector env and over Shoal's, on CartPole and HalfCheetah.

Its own best is GymWrapper over Gymnasium's vector env without autoreset: SerialEnv and ParallelEnv take two and more
times as long for envs like these.
"""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import torch
from ladder import OURS, Cell, Clock, Training, climb
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import Compose, DoubleToFloat, GymWrapper, RewardSum, StepCounter, TransformedEnv
from torchrl.modules import OneHotCategorical, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from shoal.torchrl import ShoalEnv

NUM_ENVS, STEPS = 16, 128
DISABLED = gymnasium.vector.AutoresetMode.DISABLED


def make_envs(env_id: str, who: str) -> Any:
    """Return 16 envs, with the return of the running episode."""
    if who == OURS:
        base = ShoalEnv(env_id, NUM_ENVS)
    else:
        made = [functools.partial(gymnasium.make, env_id)] * NUM_ENVS
        base = GymWrapper(gymnasium.vector.SyncVectorEnv(made, autoreset_mode=DISABLED))
    casts = (
        [DoubleToFloat(in_keys=["observation"])] if base.observation_spec["observation"].dtype is torch.float64 else []
    )
    return TransformedEnv(base, Compose(*casts, StepCounter(), RewardSum()))


def mlp(inputs: int, outputs: int, *more: nn.Module) -> nn.Sequential:
    """Return a small network."""
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs), *more)


def make_agent(env: Any) -> tuple[Any, Any]:
    """Return an actor and a critic."""
    inputs, action = env.observation_spec["observation"].shape[-1], env.action_spec_unbatched
    size = action.shape[-1]
    if action.domain == "discrete":
        net = TensorDictModule(mlp(inputs, size), in_keys=["observation"], out_keys=["logits"])
        heads, kind, bounds = ["logits"], OneHotCategorical, {}
    else:
        whole = mlp(inputs, 2 * size, NormalParamExtractor())
        net = TensorDictModule(whole, in_keys=["observation"], out_keys=["loc", "scale"])
        heads, kind = ["loc", "scale"], TanhNormal
        bounds = {"low": action.space.low, "high": action.space.high}
    actor = ProbabilisticActor(
        net, spec=env.full_action_spec_unbatched, in_keys=heads, distribution_class=kind, distribution_kwargs=bounds,
        return_log_prob=True,
    )  # fmt: skip
    return actor, ValueOperator(mlp(inputs, 1), in_keys=["observation"])


def train(env_id: str, rollouts: int, who: str, seed: int) -> Training:
    """Train PPO for some rollouts; the first one is not timed."""
    torch.manual_seed(seed)
    env = make_envs(env_id, who)
    env.reset(seed=seed)  # and not by set_seed, which spreads seeds in another way over GymWrapper
    actor, critic = make_agent(env)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=True)
    loss = ClipPPOLoss(actor, critic, entropy_coeff=0.0)
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-4)
    batch = NUM_ENVS * STEPS
    collector = Collector(env, actor, frames_per_batch=batch, total_frames=(rollouts + 1) * batch)
    returns: list[float] = []

    def learn(data: Any) -> None:
        over = data["next", "done"]
        returns.extend(data["next", "episode_reward"].transpose(0, 1)[over.transpose(0, 1)].tolist())
        for _ in range(4):
            with torch.no_grad():
                advantage(data)
            flat = data.reshape(-1)
            for rows in torch.randperm(batch).split(512):
                found = loss(flat[rows])
                total = found["loss_objective"] + found["loss_critic"]
                optimizer.zero_grad()
                total.backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()

    data = iter(collector)
    learn(next(data))
    with Clock() as clock:
        for one in data:
            learn(one)
    collector.shutdown()
    return Training(returns, rollouts * batch, clock.seconds)


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = {"theirs": "GymWrapper over SyncVectorEnv", "ours": "shoal.torchrl.ShoalEnv"}
    cells = [
        Cell("PPO", "CartPole-v1", **names, train=functools.partial(train, "CartPole-v1", 15)),
        Cell("PPO", "HalfCheetah-v5", **names, train=functools.partial(train, "HalfCheetah-v5", 10)),
    ]
    climb("TorchRL", ["torchrl", "tensordict", "gymnasium", "torch"], cells)

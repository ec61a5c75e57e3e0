"""Training by PPO: steps/s with learning, and seconds to a mean return of 475, of Shoal's ways and of other trainers.

    python benchmarks/training.py                  CartPole: rates and times to 475, everybody in turns
    python benchmarks/training.py --only speed     rates alone
    python benchmarks/training.py --only idle      how long workers wait, with envs that take 1 ms
    python benchmarks/training.py --only curves    learning curves beside the plain single-file PPO
    python benchmarks/training.py --only cheetah   HalfCheetah-v5, one million steps

All trainers have the same network (two of 64-64, tanh), epochs, minibatches, batch and learning rate. "single file" is
below: a PPO in the style of CleanRL over Gymnasium's SyncVectorEnv. On a GPU: benchmarks/training_cuda.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import common
import shoal
from shoal.learn.averages import Together
from shoal.learn.logs import RecentEpisodes
from shoal.learn.ways import Setup, build
from shoal.ranks import Ranks
from shoal.tuning.result import new_figure

Point = tuple[float, int, float]  # seconds, steps, mean return of the last 100 episodes


@dataclass(frozen=True)
class Work:
    """What everybody trains, with the same settings."""

    env: str = "CartPole-v1"
    num_envs: int = 64
    steps: int = 32
    epochs: int = 4
    minibatches: int = 4
    learning_rate: float = 1e-3
    gamma: float = 0.98
    trace: float = 0.9
    entropy: float = 0.0
    normalize: bool = False
    clip_values: bool = False
    anneal: bool = False
    total: int = 500_000

    @property
    def batch(self) -> int:
        return self.num_envs * self.steps

    def settings(self) -> dict[str, Any]:
        """Return the settings by Shoal's names."""
        names = (
            "steps",
            "epochs",
            "minibatches",
            "learning_rate",
            "gamma",
            "trace",
            "entropy",
            "clip_values",
            "anneal",
        )
        own = {name: getattr(self, name) for name in names}
        return {**own, "normalize_obs": self.normalize, "normalize_reward": self.normalize, "total_steps": self.total}


# ---- Shoal -------------------------------------------------------------------------------------------------------


def train_shoal(work: Work, seed: int, threads: int | None, **setup: Any) -> Iterator[Point]:
    """Train over Shoal; yields a point after each update."""
    given = Setup(work.env, work.num_envs, work.settings(), seed=seed, learner_threads=threads, **setup)
    built = build(given, Together(Ranks(), None))
    recent, steps, began = RecentEpisodes(), 0, time.perf_counter()
    try:
        while True:
            built.learner.set_progress(steps / work.total)
            turn = built.turn()
            steps += built.way.lanes * work.steps
            recent.add(turn.episodes, turn.return_sum, turn.length_sum)
            yield time.perf_counter() - began, steps, recent.mean_return if recent.count >= 100 else np.nan
    finally:
        built.close()


# ---- Stable-Baselines3 ---------------------------------------------------------------------------------------------


def train_sb3(work: Work, seed: int, threads: int | None, own: str) -> Iterator[Point]:
    """Train by Stable-Baselines3's PPO, over its own VecEnv or Shoal's."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    torch.set_num_threads(threads or common.cores())
    if own == "shoal":
        envs = shoal.make(partial(with_monitor, work.env), work.num_envs, api="sb3")
    else:
        kind = DummyVecEnv if own == "dummy" else SubprocVecEnv
        envs = make_vec_env(work.env, work.num_envs, seed=seed, vec_env_cls=kind)
    model = PPO(
        "MlpPolicy", envs, n_steps=work.steps, batch_size=work.batch // work.minibatches, n_epochs=work.epochs,
        learning_rate=work.learning_rate, gamma=work.gamma, gae_lambda=work.trace, ent_coef=work.entropy, seed=seed,
        device="cpu",
    )  # fmt: skip
    _, callback = model._setup_learn(10**9)
    began = time.perf_counter()
    try:
        while True:
            model.collect_rollouts(model.env, callback, model.rollout_buffer, work.steps)
            model.train()
            found = model.ep_info_buffer or []
            returns = [one["r"] for one in found]
            yield time.perf_counter() - began, model.num_timesteps, np.mean(returns) if len(returns) >= 100 else np.nan
    finally:
        envs.close()


def with_monitor(env_id: str) -> Any:
    """Return an env as Stable-Baselines3 makes it."""
    from stable_baselines3.common.monitor import Monitor

    return Monitor(gymnasium.make(env_id))


# ---- a plain PPO in one file -----------------------------------------------------------------------------------------


def plain_env(env_id: str, normalize: bool, gamma: float) -> Any:
    """Return an env with the wrappers that CleanRL's scripts have."""
    env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(env_id))
    if isinstance(env.action_space, gymnasium.spaces.Box):
        env = gymnasium.wrappers.ClipAction(env)
    if normalize:
        env = gymnasium.wrappers.NormalizeObservation(env)
        box = gymnasium.spaces.Box(-10, 10, env.observation_space.shape)
        env = gymnasium.wrappers.TransformObservation(env, lambda obs: np.clip(obs, -10, 10), box)
        env = gymnasium.wrappers.NormalizeReward(env, gamma=gamma)
        env = gymnasium.wrappers.TransformReward(env, lambda reward: np.clip(reward, -10, 10))
    return env


class PlainAgent(nn.Module):
    """Two networks of two layers."""

    def __init__(self, inputs: int, space: Any):
        super().__init__()
        self.discrete = isinstance(space, gymnasium.spaces.Discrete)
        outputs = int(space.n) if self.discrete else int(np.prod(space.shape))
        self.actor, self.critic = self._layers(inputs, outputs, 0.01), self._layers(inputs, 1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(outputs))

    def _layers(self, inputs: int, outputs: int, gain: float) -> Any:
        made = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
        for one, scale in zip(made[::2], (2**0.5, 2**0.5, gain), strict=True):
            nn.init.orthogonal_(one.weight, scale)  # type: ignore[arg-type]
            nn.init.zeros_(one.bias)  # type: ignore[arg-type]
        return nn.Sequential(*made)

    def forward(self, obs: Any, action: Any = None) -> tuple[Any, ...]:
        mean = self.actor(obs)
        policy: Any = torch.distributions.Categorical(logits=mean)
        if not self.discrete:
            policy = torch.distributions.Independent(torch.distributions.Normal(mean, self.log_std.exp()), 1)
        action = policy.sample() if action is None else action
        return action, policy.log_prob(action), policy.entropy(), self.critic(obs).squeeze(-1)


def train_plain(work: Work, seed: int, threads: int | None) -> Iterator[Point]:
    """Train by a PPO as people write it in one file."""
    torch.set_num_threads(threads or common.cores())
    torch.manual_seed(seed)
    np.random.seed(seed)
    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    envs = gymnasium.vector.SyncVectorEnv(
        [partial(plain_env, work.env, work.normalize, work.gamma)] * work.num_envs, autoreset_mode=mode
    )
    agent = PlainAgent(int(np.prod(envs.single_observation_space.shape)), envs.single_action_space)
    optimizer = torch.optim.Adam(agent.parameters(), lr=work.learning_rate, eps=1e-5)
    recent, steps, began = RecentEpisodes(), 0, time.perf_counter()
    obs = torch.as_tensor(envs.reset(seed=seed)[0], dtype=torch.float32)
    try:
        while True:
            if work.anneal:
                optimizer.param_groups[0]["lr"] = work.learning_rate * max(0.0, 1 - steps / work.total)
            rows: list[list[Any]] = []
            for _ in range(work.steps):
                with torch.no_grad():
                    action, log_prob, _, value = agent(obs)
                found, reward, terminated, truncated, info = envs.step(action.numpy())
                done = terminated | truncated
                rows.append(
                    [obs, action, log_prob, value, torch.as_tensor(reward, dtype=torch.float32), torch.as_tensor(done)]
                )
                obs = torch.as_tensor(found, dtype=torch.float32)
                if done.any():
                    last = info["final_info"]["episode"]
                    recent.add(int(done.sum()), float(last["r"][done].sum()), float(last["l"][done].sum()))
            _plain_update(agent, optimizer, rows, obs, work)
            steps += work.batch
            yield time.perf_counter() - began, steps, recent.mean_return if recent.count >= 100 else np.nan
    finally:
        envs.close()


def _plain_update(agent: Any, optimizer: Any, rows: list[list[Any]], obs: Any, work: Work) -> None:
    seen, actions, log_probs, values, rewards, dones = (torch.stack(column) for column in zip(*rows, strict=True))
    with torch.no_grad():
        later, running = agent(obs)[3], torch.zeros(work.num_envs)
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(work.steps)):
        goes_on = 1.0 - dones[t].float()
        delta = rewards[t] + work.gamma * later * goes_on - values[t]
        advantages[t] = running = delta + work.gamma * work.trace * goes_on * running
        later = values[t]
    returns = (advantages + values).flatten()
    flat = [x.flatten(0, 1) for x in (seen, actions, log_probs, advantages, values)]
    for _ in range(work.epochs):
        for rows_now in torch.randperm(work.batch).chunk(work.minibatches):
            one_obs, action, old, weight, old_value = (x[rows_now] for x in flat)
            _, log_prob, entropy, value = agent(one_obs, action)
            ratio = (log_prob - old).exp()
            weight = (weight - weight.mean()) / (weight.std() + 1e-8)
            policy_loss = torch.max(-weight * ratio, -weight * ratio.clamp(0.8, 1.2)).mean()
            error = (value - returns[rows_now]) ** 2
            if work.clip_values:
                near = old_value + (value - old_value).clamp(-0.2, 0.2)
                error = torch.max(error, (near - returns[rows_now]) ** 2)
            loss = policy_loss + 0.25 * error.mean() - work.entropy * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


# ---- PuffeRL -----------------------------------------------------------------------------------------------------


def missing_puffer() -> str:
    """Say why PuffeRL cannot take part; "" if it can."""
    try:
        import pufferlib.pufferl  # noqa: F401
    except Exception as error:
        return f"PuffeRL cannot be imported: {type(error).__name__}: {error!s:.120}"
    return ""


# ---- in turns ----------------------------------------------------------------------------------------------------

Trainer = Callable[[Work, int, int | None], Iterator[Point]]
TRAINERS: dict[str, Trainer] = {
    "Shoal, host": partial(train_shoal, backend="auto"),
    "Shoal, compiled": partial(train_shoal, backend="compiled"),
    "SB3, its DummyVecEnv": partial(train_sb3, own="dummy"),
    "SB3, its SubprocVecEnv": partial(train_sb3, own="subproc"),
    "SB3, Shoal's VecEnv": partial(train_sb3, own="shoal"),
    "single file": train_plain,
}


def rate(train: Trainer, work: Work, seed: int, threads: int | None, seconds: float) -> float:
    """Return steps/s after a warm-up of two updates."""
    points = train(work, seed, threads)
    try:
        first: Point | None = None
        for number, point in enumerate(points):
            first = point if number == 2 else first
            if first is not None and point[0] - first[0] >= seconds:
                return (point[1] - first[1]) / (point[0] - first[0])
    finally:
        points.close()  # type: ignore[attr-defined]
    return 0.0


def run_speed(options: Any, names: list[str]) -> dict[str, Any]:
    """Measure rates in turns."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for number, name in common.in_turns(names, options.rounds, options.limit):
        found[name].append(rate(TRAINERS[name], options.work, number, options.threads, options.seconds))
        print(f"round {number + 1}: {name}: {found[name][-1]:,.0f} steps/s", flush=True)
    table = Table("trainer", "trained steps/s", "quartiles", title=f"{options.work}", title_justify="left")
    told = {name: common.quartiles(values) for name, values in found.items() if values}
    for name, (low, middle, high) in told.items():
        table.add_row(name, f"{middle:,.0f}", f"{low:,.0f} to {high:,.0f}")
    Console().print(table)
    return {"steps_per_s": told, "rates": found}


def run_solve(options: Any, names: list[str]) -> dict[str, Any]:
    """Train until the mean of 100 episodes is 475, with several seeds; failures are counted."""
    found: dict[str, list[float | None]] = {name: [] for name in names}
    curves: dict[str, list[list[Point]]] = {name: [] for name in names}
    for seed, name in common.in_turns(names, options.seeds, options.limit):
        points, curve, solved = TRAINERS[name](options.work, seed, options.threads), [], None
        for point in points:
            curve.append(point)
            if point[2] >= 475:
                solved = point[0]
            if solved is not None or point[0] > options.most:
                break
        points.close()  # type: ignore[attr-defined]
        found[name].append(solved)
        curves[name].append(curve)
        told = "not solved" if solved is None else f"{solved:.2f} s"
        print(f"seed {seed}: {name}: {told} after {curve[-1][1]:,} steps", flush=True)
    table = Table("trainer", "seconds to 475, median", "steps, median", "failures", title=f"{options.work}")
    for name in names:
        done = [one for one in found[name] if one is not None]
        steps = [curve[-1][1] for curve, one in zip(curves[name], found[name], strict=True) if one is not None]
        middle = [f"{np.median(done):.2f}", f"{np.median(steps):,.0f}"] if done else ["-", "-"]
        table.add_row(name, *middle, f"{len(found[name]) - len(done)} of {len(found[name])}")
    Console().print(table)
    plot_curves(options, {name: curves[name] for name in names}, "training")
    return {"seconds": found, "curves": curves}


def plot_curves(options: Any, curves: dict[str, list[list[Point]]], file: str) -> None:
    """Draw return against wall time."""
    try:
        figure = new_figure(7.0, 4.0)
    except ImportError:
        return
    axes = figure.subplots()
    for number, (name, runs) in enumerate(curves.items()):
        for k, curve in enumerate(runs):
            seconds, _, returns = zip(*curve, strict=True)
            axes.plot(seconds, returns, color=f"C{number}", alpha=0.7, label=name if k == 0 else None)
    axes.set_xlabel("seconds")
    axes.set_ylabel("mean return of 100 episodes")
    axes.legend()
    options.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.out / f"{file}.png")


# ---- idle workers --------------------------------------------------------------------------------------------------


class SlowEnv(gymnasium.Env[Any, Any]):
    """Takes 1 ms for a step, of waiting as a simulator elsewhere would."""

    observation_space = gymnasium.spaces.Box(-1, 1, (8,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(8, np.float32), {}

    def step(self, action: Any) -> Any:
        until = time.perf_counter() + 1e-3
        time.sleep(0.8e-3)
        while time.perf_counter() < until:
            pass
        self.at += 1
        return np.full(8, self.at / 100, np.float32), 1.0, False, self.at == 100, {}


def run_idle(options: Any, names: list[str]) -> dict[str, Any]:
    """Measure how long workers wait while a policy is trained over envs of 1 ms."""
    work, found = replace(options.work, steps=64), {}
    for overlap in (True, False):
        setup = Setup(
            SlowEnv, 32, work.settings(), backend="processes", overlap=overlap, learner_threads=2,
            options={"num_workers": 2},
        )  # fmt: skip
        built = build(setup, Together(Ranks(), None))
        built.turn()
        before, began = built.way.pool.stats(), time.perf_counter()
        while time.perf_counter() - began < options.seconds:
            built.turn()
        spent, stats = time.perf_counter() - began, built.way.pool.stats() - before
        busy = stats.steps * 1e-3 / 2
        found["overlap" if overlap else "by turns"] = {"idle": 1 - busy / spent, "steps_per_s": stats.steps / spent}
        print(f"overlap={overlap}: workers idle {1 - busy / spent:.1%}, {stats.steps / spent:,.0f} steps/s", flush=True)
        built.close()
    return found


# ---- learning curves -------------------------------------------------------------------------------------------------

CURVES = {
    "CartPole": Work("CartPole-v1", 4, 128, 4, 4, 2.5e-4, 0.99, 0.95, 0.01, False, True, True, 200_000),
    "Acrobot": Work("Acrobot-v1", 4, 128, 4, 4, 2.5e-4, 0.99, 0.95, 0.01, False, True, True, 200_000),
    "Pendulum": Work("Pendulum-v1", 4, 512, 10, 32, 1e-3, 0.9, 0.95, 0.0, True, False, True, 300_000),
    "MountainCarContinuous": Work(
        "MountainCarContinuous-v0", 4, 512, 10, 32, 3e-4, 0.99, 0.95, 0.0, True, True, True, 100_000
    ),
}


def last_returns(train: Trainer, work: Work, seed: int, threads: int | None) -> float:
    """Train to the end, and return the mean return of the last episodes."""
    points, found = train(work, seed, threads), np.nan
    for _, steps, mean in points:
        found = mean
        if steps >= work.total:
            break
    points.close()  # type: ignore[attr-defined]
    return float(found)


def run_curves(options: Any, names: list[str]) -> dict[str, Any]:
    """Train Shoal's PPO and the plain one to the same number of steps, with CleanRL's defaults."""
    table = Table("env", "steps", "Shoal: mean (std) of seeds", "single file", title="mean return at the end")
    told: dict[str, Any] = {}
    shoals = partial(train_shoal, backend="serial") if options.host else partial(train_shoal, backend="compiled")
    for name in options.envs or CURVES:
        work = CURVES[name]
        found: dict[str, list[float]] = {"Shoal": [], "single file": []}
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            for who, train in (("Shoal", shoals), ("single file", train_plain)):
                found[who].append(last_returns(train, work, seed, options.threads or 1))
                print(f"{name}, seed {seed}: {who}: {found[who][-1]:.1f}", flush=True)
        cells = [f"{np.mean(values):.1f} ({np.std(values):.1f})" for values in found.values()]
        table.add_row(name, f"{work.total:,}", *cells)
        told[name] = found
    Console().print(table)
    return told


def run_cheetah(options: Any, names: list[str]) -> dict[str, Any]:
    """Train HalfCheetah-v5 for a million steps."""
    work = Work("HalfCheetah-v5", 16, 128, 10, 32, 3e-4, 0.99, 0.95, 0.0, True, False, True, 1_000_000)
    found = {}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        began = time.perf_counter()
        found[seed] = last_returns(partial(train_shoal, backend="auto"), work, seed, options.threads)
        print(f"HalfCheetah-v5, seed {seed}: {found[seed]:.0f} in {time.perf_counter() - began:.0f} s", flush=True)
    return {"returns": found}


PARTS = {"speed": run_speed, "solve": run_solve, "idle": run_idle, "curves": run_curves, "cheetah": run_cheetah}


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser(str(__doc__).partition("\n")[0], 4.0, 5)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=["speed", "solve"])
    # 64 processes that each import torch take a minute to start, and are slower than the DummyVecEnv on few cores.
    usual = [name for name in TRAINERS if name != "SB3, its SubprocVecEnv"]
    parser.add_argument("--trainers", nargs="+", choices=list(TRAINERS), default=usual, metavar="NAME")
    parser.add_argument("--threads", type=int, help="of torch, for everybody (default: each trainer's own choice)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--most", type=float, default=60.0, help="seconds until a training counts as failed")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--rollout", type=int, default=32, help="steps of each env between updates")
    parser.add_argument("--host", action="store_true", help="curves over Gymnasium's own envs, not compiled ones")
    parser.add_argument("--envs", nargs="+", choices=list(CURVES), help="of the curves")
    options = parser.parse_args()
    options.work = Work(num_envs=options.num_envs, steps=options.rollout)
    if "speed" in options.only and (why := missing_puffer()):
        print(f"without PuffeRL: {why}", flush=True)
    document = {name: PARTS[name](options, options.trainers) for name in options.only}
    common.write(options, "training", document)


if __name__ == "__main__":
    main()

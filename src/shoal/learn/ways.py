"""Chooses how experience is made, by what the env is, and builds it: envs, policy and learner."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from gymnasium import Space, spaces

from shoal.compiled.definition import Env as CompiledEnv
from shoal.compiled.definition import find_class
from shoal.learn.averages import Together
from shoal.learn.compiled import CompiledWay, can_be_compiled, with_clipped_actions
from shoal.learn.host import HostWay
from shoal.learn.ppo import Experience, Hyperparameters, Learner, Policy
from shoal.pool import Pool
from shoal.ranks import rank_seed
from shoal.support.cores import usable_cores

SLOW_STEP = 200e-6  # seconds of an env's step from which on rollouts are made while the learner learns


@dataclass(frozen=True)
class Setup:
    """What is trained, and on what.

    Attributes:
        env: a Gymnasium id, a function or class that makes an env, a compiled class, or a list.
        num_envs: of this process.
        hyperparameters: settings of PPO in place of the defaults for the kind of actions, by name; or all of them.
        backend: of the pool. "compiled" also for ids of Shoal's library; "cuda" for compiled envs on a GPU.
        device: of the policy: "cpu", "cuda", or "auto": the GPU where the envs are on one, else the CPU.
        learner_threads: of torch while it learns; None to measure how many are best.
        overlap: whether rollouts are made while the learner learns, by the policy of before; None to decide that by
            what a step of the env takes.
        groups: into how many groups a pool's lanes are cut; None for 2 where envs are in workers.
        options: more options for the pool, such as on_error, plan or env_kwargs.
    """

    env: Any
    num_envs: int = 64
    hyperparameters: Mapping[str, Any] | Hyperparameters | None = None
    backend: str = "auto"
    device: str = "auto"
    seed: int = 0
    learner_threads: int | None = None
    overlap: bool | None = None
    groups: int | None = None
    options: Mapping[str, Any] | None = None


class Turn(NamedTuple):
    """A rollout and what was learned from it: the episodes that ended, the losses, and where the seconds went."""

    episodes: int
    return_sum: float
    length_sum: float
    losses: dict[str, float]
    stepping: float
    learning: float


@dataclass
class Built:
    """Envs, policy and learner, ready to go, and why they are so."""

    way: Any
    policy: Policy
    learner: Learner
    threads: int
    reason: str

    def turn(self) -> Turn:
        """Make a rollout, and learn from it."""
        began = time.perf_counter()
        torch.set_num_threads(1)
        seen, episodes, return_sum, length_sum = self.way.collect()
        made = time.perf_counter()
        torch.set_num_threads(self.threads)
        losses = self.learner.learn(seen, self.way.poll)
        return Turn(episodes, return_sum, length_sum, losses, made - began, time.perf_counter() - made)

    def close(self) -> None:
        """Close the envs."""
        self.way.close()


def settings_for(space: Space[Any], given: Any, num_envs: int) -> Hyperparameters:
    """Return the hyperparameters: those given, over CleanRL's defaults for this kind of actions."""
    if isinstance(given, Hyperparameters):
        return given
    changes = dict(given or {})
    if isinstance(space, spaces.Box):
        changes.setdefault("steps", max(16, 2048 // num_envs))  # CleanRL has 2048 steps of one env
        return Hyperparameters.continuous(**changes)
    return Hyperparameters(**changes)


def compiled_class(setup: Setup) -> Any:
    """Return the compiled class that is meant; None for an env of any other kind."""
    if isinstance(setup.env, type) and issubclass(setup.env, CompiledEnv):
        return setup.env if setup.backend in ("auto", "compiled", "cuda") else None
    return find_class(setup.env) if setup.backend in ("compiled", "cuda") else None


def build(setup: Setup, together: Together) -> Built:
    """Choose the way, and build everything."""
    env_class = compiled_class(setup)
    device = _device(setup, env_class)
    if env_class is not None and device.type == "cuda":
        from shoal.learn.cuda import build_cuda

        if together.ranks.size > 1:
            raise ValueError("envs on a GPU are trained by one process: give the ranks backend='compiled', or one each")
        return build_cuda(setup, env_class)
    torch.manual_seed(setup.seed)
    # Envs of different ranks must differ; the policy's first weights must not.
    seed = int(rank_seed(setup.seed, together.ranks) or 0)
    if env_class is not None:
        return _build_compiled(setup, env_class, together, seed)
    return _build_host(setup, together, seed, device, None)


def _device(setup: Setup, env_class: Any) -> torch.device:
    if setup.device != "auto":
        return torch.device(setup.device)
    return torch.device("cuda" if env_class is not None and setup.backend == "cuda" else "cpu")


def _build_compiled(setup: Setup, env_class: Any, together: Together, seed: int) -> Built:
    clipped = with_clipped_actions(env_class) if getattr(env_class, "num_agents", 1) == 1 else env_class
    options = {"seed": seed, **(setup.options or {})}
    pool = Pool(clipped, setup.num_envs, backend="compiled", **options)
    try:
        settings = settings_for(pool.single_action_space, setup.hyperparameters, pool.num_envs)
        policy = Policy(pool.single_observation_space, pool.single_action_space, settings)
        if not can_be_compiled(policy):
            return _host_with(
                setup, pool, policy, together, seed, torch.device("cpu"), "compiled envs, policy in torch"
            )
        learner, threads = _learner(setup, policy, pool.num_envs, seed, together)
        way = CompiledWay(pool, policy, seed)
        reason = (
            f"compiled: envs and policy run in one compiled loop on {usable_cores()} cores; {threads} torch threads"
        )
        return Built(way, policy, learner, threads, reason)
    except BaseException:
        pool.close()
        raise


def _build_host(setup: Setup, together: Together, seed: int, device: torch.device, pool: Any) -> Built:
    torch.set_num_threads(1)  # while "auto" measures: torch's threads are for learning, and workers have the cores then
    given = dict(setup.options or {})
    grouped = setup.num_envs % 2 == 0 and setup.num_envs >= 4 and setup.backend not in ("serial", "threads")
    groups = setup.groups or (2 if grouped else 1)
    if groups > 1:
        given.update(batch_envs=setup.num_envs // groups, order="contiguous")
    pool = Pool(
        setup.env,
        setup.num_envs,
        **{"backend": setup.backend, "seed": seed, "infos": "drop", "learner_threads": 0, **given},
    )
    try:
        settings = settings_for(pool.single_action_space, setup.hyperparameters, pool.num_envs)
        policy = Policy(pool.single_observation_space, pool.single_action_space, settings).to(device)
        return _host_with(setup, pool, policy, together, seed, device, f"host: {pool.plan}")
    except BaseException:
        pool.close()
        raise


def _host_with(
    setup: Setup, pool: Pool, policy: Policy, together: Together, seed: int, device: torch.device, words: str
) -> Built:
    """Finish what is the same for all pools."""
    learner, threads = _learner(setup, policy, pool.num_envs, seed, together)
    groups = pool.num_envs // pool.batch_size
    overlap = setup.overlap
    if overlap is None:
        far = pool.plan.backend in ("ray", "mpi")
        measured = pool.plan.measured
        slow = measured is not None and sum(measured.wall) / len(measured.wall) > SLOW_STEP
        overlap = (far or slow) and pool.plan.backend != "serial"
    way = HostWay(pool, policy, seed, groups, overlap, device)
    words += f"; {groups} groups in flight" if groups > 1 else ""
    words += "; rollouts while the learner learns" if overlap else ""
    return Built(way, policy, learner, threads, f"{words}; {threads} torch threads")


def _learner(setup: Setup, policy: Policy, lanes: int, seed: int, together: Together) -> tuple[Learner, int]:
    learner = Learner(policy, lanes, seed, together.ranks, together.reduce)
    threads = setup.learner_threads or best_threads(policy, lanes)
    return learner, threads


def best_threads(policy: Policy, lanes: int, trials: int = 3) -> int:
    """Measure with how many threads torch learns fastest from such rollouts: one, or all cores.

    Threads of torch spin while they wait for each other. If other programs use the cores, several may be slower than
    one by far.
    """
    cores = usable_cores()
    if cores == 1 or next(policy.parameters()).device.type != "cpu":
        return 1
    twin = Policy(*policy.spaces, replace(policy.settings, epochs=1))
    learner = Learner(twin, lanes)
    seen = Experience.empty(twin, policy.settings.steps, lanes)
    seen.valid.fill_(True)
    targets = learner.targets(seen)
    batch = next(learner.minibatches(targets))
    times: dict[int, float] = {}
    before = torch.get_num_threads()
    state = torch.get_rng_state()
    for trial in range(trials + 1):
        for threads in (1, cores):
            torch.set_num_threads(threads)
            began = time.perf_counter()
            learner.step(batch)
            if trial:  # the first one starts threads
                times[threads] = min(times.get(threads, 1e9), time.perf_counter() - began)
    torch.set_num_threads(before)
    torch.set_rng_state(state)
    return min(times, key=lambda threads: times[threads])

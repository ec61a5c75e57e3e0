"""What is fuzzed: for each loader some good files, and a way to load one and to use what was loaded."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

import shoal
from shoal.planning.plan import Plan
from shoal.worker.measurement import Measurement
from shoal.wrappers import Normalize, wrap

LANES = 2


class Drawing(gymnasium.Env[Any, Any]):
    """Has every kind of random generator, and draws from each in every step."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = spaces.Discrete(2)
        kinds = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
        self.generators = [np.random.Generator(getattr(np.random, kind)(i)) for i, kind in enumerate(kinds)]
        self.python, self.legacy = random.Random(1), np.random.RandomState(2)
        self.legacy.normal(), self.python.gauss(0.0, 1.0)
        self.position, self.table, self.kept = 0, np.arange(200.0), deque([(1, "a"), {2: b"b"}], 5)
        self.names, self.flags = {"x", "y"}, np.array([True, False, True])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.position = 0
        return self.np_random.random(3), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.position += 1
        drawn = 0.0
        for one in self.generators:
            drawn += one.random() + one.normal() + float(one.integers(9, dtype=np.int32)) + one.gamma(2.0)
        drawn += self.python.random() + self.python.gauss(0.0, 1.0) + self.python.randrange(10**6)
        drawn += self.legacy.normal() + self.legacy.randint(9) + self.action_space.sample()
        self.table[self.position % len(self.table)] += drawn
        obs = self.np_random.random(3) + self.table[:3] * self.flags
        return obs, drawn, self.position >= 20, False, {"position": self.position, "kept": list(self.kept)}


class Telling(gymnasium.Env[Any, Any]):
    """Is saved by its own pair, and its observations have texts and objects in them."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict({"t": spaces.Text(5), "s": spaces.Sequence(spaces.Discrete(4))})
        self.action_space = spaces.Box(-1.0, 1.0, (2,))
        self.count = 0

    def _obs(self) -> dict[str, Any]:
        return {"t": "abc"[: self.count % 4], "s": tuple([1, 2, 3][: self.count % 3])}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += int(self.np_random.integers(1, 3))
        return self._obs(), 1.0, self.count > 8, False, {"count": self.count, "more": {"a": [np.zeros(2)]}}

    def get_state(self) -> Any:
        return {"count": self.count}

    def set_state(self, state: Any) -> None:
        if type(state["count"]) is not int or not 0 <= state["count"] < 100:
            raise ValueError("count is out of range")
        self.count = state["count"]


POOLS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "drawing": (Drawing, {"autoreset": "same_step"}),
    "telling": (Telling, {"autoreset": "disabled"}),
    "cartpole": (lambda: gymnasium.make("CartPole-v1", max_episode_steps=7), {"autoreset": "next_step"}),
}


def _pool(kind: str) -> Any:
    env, options = POOLS[kind]
    return shoal.Pool(env, LANES, backend="serial", **options)


def _close(pool: Any) -> None:
    with contextlib.suppress(shoal.EnvError):  # an env that the file has made useless
        pool.close()


def make_snapshots(folder: Path) -> list[Path]:
    """One of each pool between two steps, and one with results that wait to be received."""
    made = []
    for kind in POOLS:
        with _pool(kind) as pool:
            pool.reset(seed=3)
            pool.step(np.stack([pool.single_action_space.sample() for _ in range(LANES)]))
            made += [folder / f"{kind}.idle", folder / f"{kind}.busy"]
            pool.snapshot(made[-2])
            pool.send(np.stack([pool.single_action_space.sample() for _ in range(LANES)]))
            pool.snapshot(made[-1])
    return made


def use_snapshot(path: Path, kind: str) -> str:
    """Restore, receive what waits, and go on; an env that the file has made useless may raise, and is reset."""
    with contextlib.ExitStack() as closing:
        pool = _pool(kind.partition(".")[0])
        closing.callback(_close, pool)
        pool.restore(path)
        outcome = "restored"
        for _ in range(3):
            try:
                if len(pool.pending):
                    pool.recv(timeout=60, min_batch=len(pool.pending))
                pool.step(np.stack([pool.single_action_space.sample() for _ in range(LANES)]), timeout=60)
            except (shoal.EnvError, shoal.ResetNeeded, shoal.NothingPending):
                outcome = "restored, an env raised"
                try:
                    pool.reset(seed=1)
                except shoal.EnvError:
                    return outcome
        return outcome


SPACES: dict[str, Any] = {
    "box": spaces.Box(-1, 1, (3,)),
    "dict": spaces.Dict({"a": spaces.Box(-1, 1, (3,)), "b": spaces.Box(-1, 1)}),
    "reward": spaces.Box(-1, 1, (3,)),
}


def make_normalizations(folder: Path) -> list[Path]:
    """Of one array, of a dict, without observations, and the pickle of Stable-Baselines3 where that is installed."""
    made = []
    for kind, options in (("box", {}), ("dict", {}), ("reward", {"norm_obs": False})):
        space = SPACES[kind]
        made.append(folder / f"{kind}.own")
        normalize = Normalize(**options)  # type: ignore[arg-type]
        _steps(space, normalize)
        normalize.save(made[-1])
    try:
        from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
    except ImportError:
        return made
    theirs = VecNormalize(DummyVecEnv([lambda: Still(SPACES["box"])] * LANES))
    theirs.reset()
    made.append(folder / "box.pickle")
    theirs.save(str(made[-1]))
    return made


class Still(gymnasium.Env[Any, Any]):
    """Has the given observation space."""

    def __init__(self, space: Any):
        self.observation_space, self.action_space = space, spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 1.0, False, False, {}


def _steps(space: Any, normalize: Normalize) -> None:
    with wrap(shoal.Pool(lambda: Still(space), LANES, backend="serial"), normalize) as envs:
        envs.reset(seed=1)
        for _ in range(3):
            envs.step(np.array([0, 1]))


def use_normalization(path: Path, kind: str) -> str:
    """Load, and normalize some steps; statistics of other observations are told when they are put around envs."""
    normalize = Normalize.load(path)
    space = SPACES[kind.partition(".")[0]]
    try:
        _steps(space, normalize)
    except ValueError as error:
        if not str(error).startswith("Normalize"):
            raise
        return "loaded, for other envs"
    obs = normalize.normalize_obs(space.sample())
    parts = obs.values() if isinstance(obs, dict) else [obs]
    assert all(np.isfinite(part).all() for part in parts) or normalize.epsilon == 0, obs
    return "loaded"


def make_plans(folder: Path) -> list[Path]:
    """Plans of each local backend."""
    plans = {
        "serial": Plan("serial", 1, "as asked for", Measurement((1e-5, 2e-5), 1e-5), 4),
        "threads": Plan("threads", 2, num_envs=4, batch_size=2, spin=(1000, 1000)),
        "hybrid": Plan("hybrid", 1, spin=(0, 0)),
    }
    for name, plan in plans.items():
        plan.save(folder / name)
    return [folder / name for name in plans]


def use_plan(path: Path, kind: str) -> str:
    """Load, and run a pool by it, if it is for a few envs; a pool of another number of envs is refused."""
    plan = Plan.load(path)
    str(plan), plan.measured and plan.measured.mean
    count = min(plan.num_envs or 4, 4)
    if plan.backend not in ("serial", "threads", "hybrid"):
        return "loaded, not run"  # each would start processes
    plan = replace(plan, backend="threads") if plan.backend == "hybrid" and plan.num_workers > 1 else plan
    try:
        pool = shoal.Pool([lambda: Still(SPACES["box"])] * count, plan=plan)
    except ValueError:
        if count == plan.num_envs and (plan.batch_size or 0) <= count:
            raise
        return "loaded, for more envs"
    with pool:
        pool.reset(seed=0)
        pool.send(np.zeros(count, int))
        while len(pool.pending):
            pool.recv(timeout=60, min_batch=min(pool.batch_size, len(pool.pending)))
    return "loaded"


class Target(NamedTuple):
    """A loader: makes good files; loads one that was made from the file with this name, and says what became of it."""

    make: Callable[[Path], list[Path]]
    use: Callable[[Path, str], str]


TARGETS = {
    "restore": Target(make_snapshots, use_snapshot),
    "normalize": Target(make_normalizations, use_normalization),
    "plan": Target(make_plans, use_plan),
}

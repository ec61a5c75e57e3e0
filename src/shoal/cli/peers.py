"""The libraries Shoal is measured against: one small adapter each, imported only when it runs."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from shoal.cli.contenders import Contender, VectorRunner
from shoal.cli.work import Work
from shoal.support import processes
from shoal.support.usage import Skip


class _Gymnasium(VectorRunner):
    kind: str

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        vector = importlib.import_module("gymnasium.vector")
        self.envs = getattr(vector, self.kind)([work.env_fn()] * work.num_envs)
        self.step = self.envs.step

    def reset(self) -> None:
        self.envs.reset(seed=self.work.seed)

    def close(self) -> None:
        self.envs.close()


class GymnasiumSync(_Gymnasium):
    """Gymnasium's loop over envs in the caller's process."""

    kind = "SyncVectorEnv"


class GymnasiumAsync(_Gymnasium):
    """Gymnasium's process for each env, with pipes and shared observations."""

    kind = "AsyncVectorEnv"
    process_per_env = True


class _StableBaselines(VectorRunner):
    requires = "stable_baselines3"
    kind: str

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        library = importlib.import_module("stable_baselines3.common.vec_env")
        options = self._options()
        self.envs = getattr(library, self.kind)([work.env_fn()] * work.num_envs, **options)
        self.step = self._step

    def _options(self) -> dict[str, Any]:
        return {}

    def reset(self) -> None:
        self.envs.seed(self.work.seed)
        self.envs.reset()

    def _step(self, actions: Any) -> None:
        _, _, dones, _ = self.envs.step(actions)
        self.extra_resets += int(np.count_nonzero(dones))

    def close(self) -> None:
        self.envs.close()


class SB3Dummy(_StableBaselines):
    """Stable-Baselines3's loop in the caller's process."""

    kind = "DummyVecEnv"


class SB3Subproc(_StableBaselines):
    """Stable-Baselines3's process for each env."""

    kind = "SubprocVecEnv"
    process_per_env = True
    worker_bytes = 300 << 20  # each worker imports torch again, unless it was forked
    forks = False

    def _options(self) -> dict[str, Any]:
        available = processes.available_memory()
        need = self.work.num_envs * self.worker_bytes
        self.forks = available is not None and need > available // 2
        return {"start_method": "fork"} if self.forks else {}

    def note(self) -> str:
        return "forked: its default start method needs too much memory here" if self.forks else ""


class _Tianshou(VectorRunner):
    requires = "tianshou"
    kind: str

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        library = importlib.import_module("tianshou.env")
        self.envs = getattr(library, self.kind)([work.env_fn()] * work.num_envs)
        self.step = self._step

    def reset(self) -> None:
        self.envs.seed(self.work.seed)
        self.envs.reset()

    def _step(self, actions: Any) -> None:
        # tianshou leaves resets to its collector, which does what is done here.
        _, _, terminated, truncated, _ = self.envs.step(actions)
        over = np.flatnonzero(terminated | truncated)
        if over.size:
            self.envs.reset(over)
            self.extra_resets += int(over.size)

    def close(self) -> None:
        self.envs.close()


class TianshouDummy(_Tianshou):
    """tianshou's loop in the caller's process."""

    kind = "DummyVectorEnv"


class TianshouSubproc(_Tianshou):
    """tianshou's process for each env."""

    kind = "SubprocVectorEnv"
    process_per_env = True


class TianshouShmem(_Tianshou):
    """The same with observations in shared memory."""

    kind = "ShmemVectorEnv"
    process_per_env = True


class _Puffer(VectorRunner):
    requires = "pufferlib"
    kind: str

    def __init__(self, work: Work, **options: Any) -> None:
        super().__init__(work)
        workers = options.get("num_workers", 1)
        if work.num_envs % workers:
            raise Skip(f"{work.num_envs} envs cannot be divided among {workers} workers")
        vector = importlib.import_module("pufferlib.vector")
        emulation = importlib.import_module("pufferlib.emulation")
        self.envs = vector.make(
            emulation.GymnasiumPufferEnv,
            env_kwargs={"env_creator": work.env_fn()},
            backend=getattr(vector, self.kind),
            num_envs=work.num_envs,
            **options,
        )
        self.step = self.envs.step

    def reset(self) -> None:
        self.envs.reset(seed=self.work.seed)

    def close(self) -> None:
        self.envs.close()


class PufferSerial(_Puffer):
    """PufferLib's loop in the caller's process."""

    kind = "Serial"


class PufferMultiprocessing(_Puffer):
    """PufferLib's workers, which wait for work by looking at a flag without pause."""

    kind = "Multiprocessing"
    spins_when_idle = True


class EnvPool(VectorRunner):
    """EnvPool's own C++ envs; only where it has one of the same name."""

    requires = "envpool"
    python = False

    def __init__(self, work: Work, num_threads: int) -> None:
        super().__init__(work)
        library = importlib.import_module("envpool")
        if work.env not in library.list_all_envs():
            raise Skip(f"has no {work.env} of its own")
        self.envs = library.make(
            work.env,
            env_type="gymnasium",
            num_envs=work.num_envs,
            num_threads=num_threads,
            seed=work.seed,
        )
        dtype = self.envs.action_space.dtype
        if dtype is not None and np.issubdtype(dtype, np.integer):
            dtype = np.int32  # its C++ side takes no other integers, whatever the space says
        self.actions = [np.asarray(row, dtype=dtype) for row in self.actions]
        self.step = self.envs.step

    def reset(self) -> None:
        self.envs.reset()

    def close(self) -> None:
        self.envs.close()


def gymnasiums() -> list[Contender]:
    """Return Gymnasium's own two, which are always there."""
    return [
        Contender("Gymnasium Sync", GymnasiumSync),
        Contender("Gymnasium Async", GymnasiumAsync),
    ]


def others(cores: int) -> list[Contender]:
    """Return every peer that Shoal knows of; those not installed become rows that say so."""
    found = [
        Contender("SB3 DummyVecEnv", SB3Dummy),
        Contender("SB3 SubprocVecEnv", SB3Subproc),
        Contender("tianshou Dummy", TianshouDummy),
        Contender("tianshou Subproc", TianshouSubproc),
        Contender("tianshou Shmem", TianshouShmem),
        Contender("PufferLib Serial", PufferSerial),
    ]
    for workers in sorted({1, cores}):
        # It refuses more workers than physical cores unless told that this is meant.
        options = {"num_workers": workers, "overwork": True}
        found.append(Contender(f"PufferLib mp x{workers}", PufferMultiprocessing, options))
    found.append(Contender("EnvPool (C++)", EnvPool, {"num_threads": cores}))
    return found

"""The libraries that Shoal is measured against: one small adapter each, which imports its library when it runs."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import numpy as np

from shoal.cli.contenders import Contender, VectorRunner
from shoal.cli.work import Work
from shoal.support import processes
from shoal.support.usage import Skip


class _PeerRunner(VectorRunner):
    """A vector env `kind` of the module `library`, made from a list of functions that each make an env."""

    library: ClassVar[str]
    kind: ClassVar[str]

    def __init__(self, work: Work, **options: Any) -> None:
        super().__init__(work)
        self.envs = self.make(importlib.import_module(self.library), **options)

    def make(self, library: Any, **options: Any) -> Any:
        return getattr(library, self.kind)([self.work.env_fn()] * self.work.num_envs, **options)


class GymnasiumSync(_PeerRunner):
    """Gymnasium's loop over envs in the caller's process."""

    library, kind = "gymnasium.vector", "SyncVectorEnv"


class GymnasiumAsync(GymnasiumSync):
    """Gymnasium's process for each env, with pipes and shared observations."""

    kind, process_per_env = "AsyncVectorEnv", True


class _CountingPeer(_PeerRunner):
    """A peer with a method of its own for seeds. Its `step` counts the resets that it or its trainer makes within."""

    def reset(self) -> None:
        self.envs.seed(self.work.seed)
        self.envs.reset()


class SB3Dummy(_CountingPeer):
    """Stable-Baselines3's loop in the caller's process."""

    requires = "stable_baselines3"
    library, kind = "stable_baselines3.common.vec_env", "DummyVecEnv"

    def step(self, actions: Any) -> None:
        _, _, dones, _ = self.envs.step(actions)
        self.extra_resets += int(np.count_nonzero(dones))


class SB3Subproc(SB3Dummy):
    """Stable-Baselines3's process for each env."""

    kind, process_per_env = "SubprocVecEnv", True
    worker_bytes = 300 << 20  # each worker imports torch again, unless it was forked
    forks = False

    def make(self, library: Any, **options: Any) -> Any:
        """Fork the workers if the default start method needs too much memory."""
        available = processes.available_memory()
        self.forks = available is not None and self.work.num_envs * self.worker_bytes > available // 2
        return super().make(library, **({"start_method": "fork"} if self.forks else options))

    def note(self) -> str:
        return "forked: its default start method needs too much memory here" if self.forks else ""


class TianshouDummy(_CountingPeer):
    """tianshou's loop in the caller's process."""

    requires = "tianshou"
    library, kind = "tianshou.env", "DummyVectorEnv"

    def step(self, actions: Any) -> None:
        # tianshou's collector resets the envs. It does what is done here.
        _, _, terminated, truncated, _ = self.envs.step(actions)
        over = np.flatnonzero(terminated | truncated)
        if over.size:
            self.envs.reset(over)
            self.extra_resets += int(over.size)


class TianshouSubproc(TianshouDummy):
    kind, process_per_env = "SubprocVectorEnv", True


class TianshouShmem(TianshouDummy):
    kind, process_per_env = "ShmemVectorEnv", True


class PufferSerial(_PeerRunner):
    """PufferLib's loop in the caller's process."""

    requires = "pufferlib"
    library, kind = "pufferlib.vector", "Serial"

    def make(self, library: Any, **options: Any) -> Any:
        """Make the vector env, if the envs can be divided among the workers."""
        work, workers = self.work, options.get("num_workers", 1)
        if work.num_envs % workers:
            raise Skip(f"{work.num_envs} envs cannot be divided among {workers} workers")
        emulated = importlib.import_module("pufferlib.emulation").GymnasiumPufferEnv
        backend, creator = getattr(library, self.kind), {"env_creator": work.env_fn()}
        return library.make(emulated, env_kwargs=creator, backend=backend, num_envs=work.num_envs, **options)


class PufferMultiprocessing(PufferSerial):
    """PufferLib's workers, which wait for work by reading a flag without pause."""

    kind, spins_when_idle = "Multiprocessing", True


class EnvPoolRunner(_PeerRunner):
    """EnvPool's own C++ envs, if it has one of the same name."""

    requires = library = "envpool"
    python = False

    def make(self, library: Any, **options: Any) -> Any:
        """Make the envs and give the actions the type that they take."""
        work = self.work
        if work.env not in library.list_all_envs():
            raise Skip(f"has no {work.env} of its own")
        envs = library.make(work.env, env_type="gymnasium", num_envs=work.num_envs, seed=work.seed, **options)
        dtype = envs.action_space.dtype
        if dtype is not None and np.issubdtype(dtype, np.integer):
            dtype = np.int32  # the C++ side takes no other integers, though the space may say so
        self.actions = [np.asarray(row, dtype=dtype) for row in self.actions]
        return envs

    def reset(self) -> None:
        self.envs.reset()


def gymnasiums() -> list[Contender]:
    """Return Gymnasium's own two vector envs, which are always installed."""
    return [Contender("Gymnasium Sync", GymnasiumSync), Contender("Gymnasium Async", GymnasiumAsync)]


def others(cores: int) -> list[Contender]:
    """Return every peer that Shoal knows; those that are not installed become rows that say so."""
    found = [
        Contender("SB3 DummyVecEnv", SB3Dummy),
        Contender("SB3 SubprocVecEnv", SB3Subproc),
        Contender("tianshou Dummy", TianshouDummy),
        Contender("tianshou Subproc", TianshouSubproc),
        Contender("tianshou Shmem", TianshouShmem),
        Contender("PufferLib Serial", PufferSerial),
    ]
    for workers in sorted({1, cores}):
        # PufferLib refuses more workers than physical cores without `overwork`.
        options = {"num_workers": workers, "overwork": True}
        found.append(Contender(f"PufferLib mp x{workers}", PufferMultiprocessing, options))
    found.append(Contender("EnvPool (C++)", EnvPoolRunner, {"num_threads": cores}))
    return found

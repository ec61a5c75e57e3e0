"""Several processes that learn one policy: sums of gradients by torch.distributed, which is set up where it is not.

`torchrun` and `mpiexec` start the processes. Each has its own envs; `shoal.ranks` says which one it is.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal import ranks as rank_module
from shoal.ranks import MpiRanks, Ranks, TorchRanks


class Together(NamedTuple):
    """The ranks, and what sums a tensor over all of them in place; None for a process alone."""

    ranks: Ranks
    reduce: Callable[[Tensor], Any] | None


def join() -> Together:
    """Join the other processes that a launcher has started; without a launcher this process is alone."""
    distributed = torch.distributed
    if not distributed.is_available():
        return Together(Ranks(), None)
    if not distributed.is_initialized():
        told = rank_module.told_by_launcher()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # torchrun
            distributed.init_process_group("gloo")
        elif told is not None and (told[1] or 1) > 1:
            _meet_by_mpi()
        else:
            return Together(Ranks(), None)
    ranks = TorchRanks()
    return Together(ranks, _sum if ranks.size > 1 else None)


def _sum(values: Tensor) -> None:
    torch.distributed.all_reduce(values)


def _meet_by_mpi() -> None:
    """Let the ranks of mpiexec meet at a port of rank 0, which tells it to all."""
    mpi = MpiRanks()
    with socket.socket() as probe:
        probe.bind(("", 0))
        place = (socket.gethostname(), probe.getsockname()[1])
    host, port = mpi.comm.bcast(place, root=0)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=mpi.rank, world_size=mpi.size)

"""The caller's side of backend="mpi": rank 0 drives a pool, and the other ranks of the MPI job run its envs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from shoal.backends.base import split
from shoal.remote.mpi.driver import MpiLink, driver_of
from shoal.remote.mpi.start import MEET_TIMEOUT
from shoal.remote.options import checked, host_backend, seconds, worker_count
from shoal.remote.transport import Deliver


@dataclass(frozen=True)
class MpiOptions:
    """`backend_options` of backend="mpi".

    Attributes:
        local_backend: how a rank runs its envs: "serial" (the default), "threads", "processes", "compiled", "cuda" or
            "jax".
        local_workers: the number of workers of a rank; by default its number of cores, which it shares with the other
            ranks of its machine.
        comm: a communicator of mpi4py with rank 0 as the driver; by default that of all ranks. `shoal.serve` needs the
            same one.
        meet_timeout: seconds until all ranks must serve.
    """

    local_backend: Annotated[str, host_backend] = "serial"
    local_workers: Annotated[int | None, worker_count] = None
    comm: Any = None
    meet_timeout: Annotated[float, seconds] = MEET_TIMEOUT


class MpiTransport:
    """Runs each block of a pool in a serving rank. It uses the ranks that serve the fewest blocks already."""

    def __init__(self, options: dict[str, Any], num_envs: int, num_workers: int | None):
        given = checked(MpiOptions, options)
        if num_workers is not None:
            worker_count("num_workers", num_workers)
        self._driver = driver_of(given.comm, given.meet_timeout)
        self._driver.check(num_envs, num_workers)
        self._driver.meet(given.meet_timeout)
        self.num_workers = min(num_envs, num_workers or len(self._driver.peers))
        self.local_backend = given.local_backend
        self.local_workers = given.local_workers or self._driver.cores_each()
        # A rank can end its worker processes. The rank itself cannot be ended without ending the job.
        self.ends_hung_envs = given.local_backend == "processes"
        self._ranks = self._driver.least_busy(self.num_workers)
        self._blocks = [range(*block) for block in split(num_envs, self.num_workers)]

    def start(self, index: int, deliver: Deliver) -> MpiLink:
        """See Transport. A block that was lost gets a new host in the same rank."""
        return self._driver.open(self._ranks[index], index, self._blocks[index], deliver)

    def close(self) -> None:
        """See Transport. The ranks go on, and wait for the next pool."""

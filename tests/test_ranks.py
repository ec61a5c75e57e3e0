"""Ranks for real: under mpiexec, with torch.distributed and with Ray, each rank a process of its own."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from remote.mpi.mpiexec import launcher, need, start

JOBS = Path(__file__).with_name("rank_jobs.py")
EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.timeout(600)  # mpiexec and Ray are slow to start on a busy machine


def run(command: Sequence[str]) -> list[Any]:
    """What the ranks of a job have said, by rank."""
    done = start(command)
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(said, key=lambda one: one.get("rank", 0))


def mpi(count: int, *job: str) -> list[Any]:
    found = run([*launcher(count), sys.executable, str(JOBS), *job])
    assert len(found) == count
    return found


@pytest.mark.parametrize("count", [1, 3])
def test_a_rank_knows_who_it_is_before_mpi_is_imported(count: int) -> None:
    for rank, found in enumerate(mpi(count, "find")):
        assert (found["rank"], found["size"], found["kind"]) == (rank, count, "MpiRanks")
        assert (found["seed"], found["path"]) == (5 + 10_000 * rank, f"logs/{rank}.monitor")
        assert (found["imported"], found["imported_then"]) == (False, True)
        assert found["seen"] == [[other, count] for other in range(count)]


def assert_all_the_same(digests: list[Any]) -> None:
    assert all(one == digests[0] for one in digests)


@pytest.mark.parametrize("count", [2, 3])
def test_statistics_are_those_of_the_pooled_data_with_mpi(count: int) -> None:
    found = mpi(count, "merge")
    assert {one["kind"] for one in found} == {"MpiRanks"}
    assert_all_the_same([one["digests"] for one in found])


def test_statistics_are_those_of_the_pooled_data_with_torch(tmp_path: Path) -> None:
    need("torch")
    commands = [[sys.executable, str(JOBS), "torch", str(rank), "2", str(tmp_path / "meeting")] for rank in range(2)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
        for command in commands
    ]
    try:
        said = [rank.communicate(timeout=500) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    found = [json.loads(out) for out, _ in said]
    assert [(one["kind"], one["rank"]) for one in found] == [("TorchRanks", 0), ("TorchRanks", 1)]
    assert_all_the_same([one["digests"] for one in found])


def test_statistics_are_those_of_the_pooled_data_with_ray() -> None:
    need("ray", "torch")
    (said,) = run([sys.executable, str(JOBS), "ray", "2"])
    assert [found[:2] for found in said["found"]] == [["RayRanks", 0], ["RayRanks", 1]]
    assert_all_the_same([found[2:] for found in said["found"]])
    assert "in no group 'nobody'" in said["lost"]
    assert "init_collective_group" in said["lost"]


def test_ranks_that_do_not_fit_each_other_all_say_so() -> None:
    for found in mpi(2, "mismatch"):
        shapes, loaded = found["errors"]
        assert re.search(r"the ranks have \[20, 24\] values", shapes)
        assert "rank 1 began with other statistics than rank 0: load the same file" in loaded


def test_seeds_and_files_of_baselines_envs_are_by_rank(tmp_path: Path) -> None:
    found = mpi(2, "files", str(tmp_path))
    assert [one["seeds"] for one in found] == [[5, 6], [10_005, 10_006]]
    assert found[0]["chance"] != found[1]["chance"]
    names = {f"{rank}.{env}.monitor.csv" for rank in range(2) for env in range(2)}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in names:
        with open(tmp_path / name) as file:
            file.readline()
            assert len(list(csv.DictReader(file))) > 1


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_workers_know_nothing_of_mpiexec(method: str) -> None:
    """Neither they nor what they start: one that took itself for a rank would hang, or end the job."""
    for found in mpi(2, "workers", method):
        assert found["variables"] == [["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"]] * 2
        assert found["child_sees"] == [[], []]
        if method == "fork":  # MPI is there already, and is the parent's
            assert all("forked from an MPI rank" in answer for answer in found["world"])
        else:
            assert found["world"] == [1, 1]
        assert found["together"] == 2


@pytest.mark.parametrize("when", ["before MPI is imported", "later"])
def test_a_rank_that_fails_ends_the_job_with_its_error(when: str) -> None:
    done = start([*launcher(3), sys.executable, str(JOBS), "fail", when], timeout=150)
    assert done.returncode != 0
    assert done.stderr.count("ValueError: no such fish") == 1
    assert ("rank 1 of 3 has failed" in done.stderr) == (when == "later")
    assert done.stdout == ""


@pytest.mark.parametrize(("count", "backend", "updates"), [(2, "processes", 16), (3, "serial", 12)])
def test_ppo_on_ranks_learns(count: int, backend: str, updates: int, tmp_path: Path) -> None:
    need("torch")
    example = [str(EXAMPLES / "mpi_ppo.py"), "--updates", str(updates), "--backend", backend, "--logs", str(tmp_path)]
    done = start([*launcher(count), sys.executable, *example])
    assert done.returncode == 0, done.stderr
    returns = [float(found) for found in re.findall(rf"mean return ([\d.]+) on {count} ranks", done.stdout)]
    assert len(returns) == 2  # of rank 0 alone
    assert returns[-1] > 40  # chance gets 22
    # Each rank has seen 8 envs' first observations and 64 more for each update.
    assert f"statistics of {count * 8 * (1 + 64 * updates)} observations are the same on all ranks" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {f"{rank}.monitor.csv" for rank in range(count)}

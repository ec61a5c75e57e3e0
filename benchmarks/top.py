"""What being watched costs: 64 CartPoles with `shoal top` attached and without, in turns, in one run.

`shoal top PID` runs on a terminal of its own at its default interval. It is stopped (SIGSTOP) for every other turn, in
the order attached, alone, alone, attached, so that a machine that gets slower hits both alike. The CPU that it takes is
read as well: where nobody has a core to spare, that is what it costs. On a busy machine, the CPU that a step takes
under "serial" says more than the speed.

python benchmarks/top.py --rounds 40
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

NUM_ENVS, WORKERS = 64, 2
BACKENDS = ("serial", "hybrid", "processes")


class Guest:
    """An interpreter with a pool, which steps for so many seconds when asked."""

    def __init__(self, backend: str):
        command = [sys.executable, __file__, "--guest", backend]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.run(0.1)

    def run(self, seconds: float) -> tuple[float, float]:
        """Steps per second of time, and of the caller's own CPU time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        by_time, by_cpu = json.loads(self._process.stdout.readline())
        return by_time, by_cpu

    def close(self) -> None:
        """Let it go."""
        self._process.communicate()


class Watcher:
    """`shoal top` on a terminal that somebody reads."""

    def __init__(self, pid: int):
        self._terminal, theirs = pty.openpty()
        command = [sys.executable, "-m", "shoal.cli.main", "top", str(pid)]
        environ = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "50"}
        self._process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
        os.close(theirs)
        self._seen = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        while not self._seen:
            time.sleep(0.1)

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # it has left
            while data := os.read(self._terminal, 65536):
                self._seen += len(data)

    def attach(self, attached: bool) -> None:
        """Let it look, or not."""
        self._process.send_signal(signal.SIGCONT if attached else signal.SIGSTOP)

    def cpu_seconds(self) -> float:
        """What it has taken so far."""
        return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[0]) / 1e9

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        os.close(self._terminal)


def guest(backend: str) -> None:
    """Step whenever a line comes in."""
    import numpy as np

    import shoal

    envs: Any = shoal.make("CartPole-v1", num_envs=NUM_ENVS, backend=backend, num_workers=WORKERS)
    envs.reset(seed=0)
    actions = [np.random.default_rng(i).integers(0, 2, NUM_ENVS) for i in range(64)]
    for line in sys.stdin:
        seconds, calls, start, cpu = float(line), 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - start < seconds:
            envs.step(actions[calls % 64])
            calls += 1
        taken = time.perf_counter() - start, time.process_time() - cpu
        print(json.dumps([calls * NUM_ENVS / each for each in taken]), flush=True)
    envs.close()


def measure(backend: str, seconds: float, rounds: int, notify: Any) -> dict[str, Any]:
    """Steps/s attached and alone, by turns, and the CPU that the watcher has taken in a second."""
    subject = Guest(backend)
    watcher = Watcher(subject.pid)
    rates: dict[str, list[tuple[float, float]]] = {"attached": [], "alone": []}
    subject.run(seconds)
    taken, watched = 0.0, 0.0
    for turn in range(rounds):
        for name in ("attached", "alone") if turn % 2 == 0 else ("alone", "attached"):
            notify(f"{backend}: {name}")
            watcher.attach(name == "attached")
            before, began = watcher.cpu_seconds(), time.monotonic()
            rates[name].append(subject.run(seconds))
            if name == "attached":
                taken, watched = taken + watcher.cpu_seconds() - before, watched + time.monotonic() - began
    watcher.attach(True)
    watcher.close()
    subject.close()
    return {"rates": rates, "cpu_share": taken / watched}


def main() -> None:
    """Run what the command line asks for."""
    import common
    from shoal.cli import doctor
    from shoal.observe.progress import progress
    from supervision import interval

    parser = common.parser(str(__doc__).partition("\n")[0], 2.0, 40)
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS), metavar="NAME")
    parser.add_argument("--guest", help="for the script's own use")
    options = parser.parse_args()
    if options.guest:
        guest(options.guest)
        return
    with progress(len(options.backends) * options.rounds * 2) as notify:
        found = {name: measure(name, options.seconds, options.rounds, notify) for name in options.backends}
    grid = Table(title=f"{NUM_ENVS} CartPoles, {WORKERS} workers, watched by shoal top", title_justify="left")
    for head in ("", "steps/s alone", "attached / alone", "the same by CPU time", "CPU of shoal top"):
        grid.add_column(head, justify="right" if head else "left")
    for name, result in found.items():
        rates = result["rates"]
        told = []
        for which in (0, 1) if name == "serial" else (0,):  # others wait, and some of them by spinning
            each = [mine[which] / theirs[which] for mine, theirs in zip(rates["attached"], rates["alone"], strict=True)]
            low, high = interval(each)
            first, middle, third = common.quartiles(each)
            result.setdefault("ratios", []).append([low, middle, high])
            told.append(f"{middle:.4f} ({low:.4f}..{high:.4f})\nquartiles {first:.3f}..{third:.3f}")
        speed = statistics.median(by_time for by_time, _ in rates["alone"])
        grid.add_row(
            name, f"{speed:,.0f}", told[0], told[1] if told[1:] else "", f"{result['cpu_share']:.2%} of a core"
        )
    Console().print(grid)
    options.out.mkdir(parents=True, exist_ok=True)
    document = {"machine": doctor.facts(), "results": found}
    (options.out / "top.json").write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()

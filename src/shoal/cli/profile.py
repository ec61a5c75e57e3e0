"""Where the time goes: runs a pool with random actions, and shows its stats, a plot and a flame graph."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from shoal import Pool
from shoal.cli import report, work
from shoal.errors import ShoalError
from shoal.observe.stats import EDGES, LABELS, PoolStats
from shoal.support.optional_dependencies import install
from shoal.support.usage import UsageError

SCHEMA = 1
WARM_UP = 0.3  # seconds, in which caches fill and waiters learn whether to spin
TICK = 0.25  # seconds between two moves of the progress bar
SLACK = 30.0  # seconds that py-spy may take longer than it was asked to
COLOURS = {
    "envs": "#0072b2", "resets": "#56b4e9", "stragglers": "#d55e00", "waking": "#e69f00", "copying": "#cc79a7",
    "pool": "#009e73", "caller": "#999999",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What to run.

    Attributes:
        policy_ms: how long the caller waits after each batch, as for a policy on a device.
        flame: where to save a flame graph; None for none.
    """

    env: str
    num_envs: int
    backend: str = "auto"
    workers: int | None = None
    batch_size: int | None = None
    policy_ms: float = 0.0
    seconds: float = 5.0
    flame: Path | None = None

    @property
    def ticks(self) -> int:
        """How often the progress bar moves."""
        return round(self.seconds / TICK) + (round(self.flame_seconds / TICK) if self.flame else 0) + 1

    @property
    def flame_seconds(self) -> int:
        """How long py-spy looks on; it knows whole seconds only."""
        return max(1, round(self.seconds))


@dataclass(frozen=True)
class Profile:
    """What came of it."""

    run: Run
    plan: str
    stats: PoolStats

    def __str__(self) -> str:
        return f"{self.run.env}: {self.stats}"

    def as_json(self, machine: dict[str, Any]) -> str:
        """With the machine that it was measured on."""
        found = {
            "schema": SCHEMA, "machine": machine, "env": self.run.env, "plan": self.plan,
            "policy_ms": self.run.policy_ms, **self.stats.as_dict(),
        }  # fmt: skip
        return json.dumps(found, indent=2) + "\n"


def check(run: Run) -> work.Work:
    """Refuse, with a UsageError, what would fail later; what is to be run."""
    if run.flame is not None:
        find_spy(run.flame)
    if run.batch_size and run.batch_size > run.num_envs:
        raise UsageError(f"a batch of {run.batch_size} is more than {run.num_envs} envs")
    return work.probe(run.env, run.num_envs)


def profile(run: Run, probed: work.Work, notify: Callable[[str], None]) -> Profile:
    """Run the pool; the flame graph is taken afterwards, because whoever is looked at so closely is slower.

    Args:
        probed: what `check` has returned.
        notify: called every TICK seconds with what is being done.

    Raises:
        UsageError: one sentence about what went wrong.
    """
    try:
        with Pool(
            probed.env_fn(), run.num_envs, backend=run.backend, num_workers=run.workers, batch_size=run.batch_size,
        ) as pool:  # fmt: skip
            batches = play(pool, probed.actions(pool.batch_size), run.policy_ms / 1e3)
            notify("warming up")
            last_for(WARM_UP, batches)
            before = pool.stats()
            last_for(run.seconds, batches, lambda: notify("measuring"))
            stats = pool.stats() - before
            if run.flame is not None:
                take_flame(find_spy(run.flame), run, pool, batches, notify)
            return Profile(run, str(pool.plan), stats)
    except ShoalError as error:
        raise UsageError(f"{run.env!r} cannot be run: {report.first_line(str(error))}") from error


def play(pool: Pool, actions: list[Any], pause: float) -> Iterator[None]:
    """Step for ever; each turn is one batch, after which the caller has its pause."""
    rows = cycle(actions)
    if pool.batch_size == pool.num_envs:
        pool.reset(seed=0)
        while True:
            pool.step(next(rows))
            if pause:
                time.sleep(pause)
            yield
    pool.async_reset(seed=0)
    while True:
        ids = pool.recv().env_id
        if pause:
            time.sleep(pause)
        pool.send(next(rows), ids)
        yield


def last_for(seconds: float, batches: Iterator[None], tick: Callable[[], None] = lambda: None) -> None:
    """Take batches for so long."""
    start = next_tick = time.monotonic()
    while (now := time.monotonic()) - start < seconds:
        if now >= next_tick:
            tick()
            next_tick += TICK
        next(batches)


# ---- flame graph -----------------------------------------------------------------------------------------------


def find_spy(flame: Path) -> str:
    """The command py-spy. Raises UsageError where it is not installed, or its picture cannot be saved."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise UsageError(f"a flame graph needs py-spy: {install('profile')}")
    report.check_file(flame)
    if flame.suffix.lower() != ".svg":
        raise UsageError(f"the flame graph is an SVG, so name it .svg and not {flame.name!r}")
    return found


def take_flame(spy: str, run: Run, pool: Pool, batches: Iterator[None], notify: Callable[[str], None]) -> None:
    """Let py-spy look at the first worker process, or at this one where there is none, while the pool goes on."""
    pid = next((worker.pid for worker in pool.workers if worker.pid is not None), os.getpid())
    command = [spy, "record", "--output", str(run.flame), "--pid", str(pid), "--duration", str(run.flame_seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until = time.monotonic() + run.flame_seconds + SLACK
    try:
        while process.poll() is None and time.monotonic() < until:
            notify("drawing the flame graph")
            last_for(TICK, batches)
    finally:
        process.kill()
        said = process.communicate()[0]
    if process.returncode != 0:
        lines = [line.removeprefix("Error: ") for line in said.splitlines() if line.startswith("Error")]
        what = lines[0] if lines else report.first_line(said) or "it did not end in time"
        raise UsageError(f"py-spy could not look at process {pid}: {what} (it may need root, or CAP_SYS_PTRACE)")


# ---- plot ------------------------------------------------------------------------------------------------------


def plot(found: Profile, path: Path) -> None:
    """Draw the shares as one bar, and how long steps take as a curve for each worker; save a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, height_ratios=[1, 3])
    _plot_shares(top, found.stats)
    _plot_times(bottom, found.stats)
    head = f"{found.run.env}: {str(found.stats).partition(chr(10))[0]}"
    figure.suptitle("\n".join([*textwrap.wrap(head, 110), *textwrap.wrap(found.stats.verdict, 110)]), fontsize=9)
    figure.savefig(path, dpi=150)


def _plot_shares(axis: Any, stats: PoolStats) -> None:
    left = 0.0
    for name, share in vars(stats.shares).items():
        axis.barh(0, share, left=left, color=COLOURS[name], label=f"{LABELS[name]} {share:.0%}")
        left += share
    axis.set_xlim(0, 1)
    axis.set_axis_off()
    axis.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, 0.0), fontsize=8, frameon=False)


def _plot_times(axis: Any, stats: PoolStats) -> None:
    middles = (EDGES[1:] + EDGES[:-1]) / 2 * 1e3
    for worker, times in zip(stats.workers, stats.counts.step_times, strict=True):
        if not times.any():
            continue
        label = f"worker {worker.index}" if len(stats.blocks) <= 8 else None
        axis.step(middles, times / times.sum(), where="mid", linewidth=1, label=label)
    for value, name in ((stats.median, "median"), (stats.p99, "99th percentile")):
        axis.axvline(value * 1e3, color="#444444", linestyle="--", linewidth=1)
        axis.text(value * 1e3, 1.0, f" {name}", fontsize=8, va="top", transform=axis.get_xaxis_transform())
    used = middles[stats.counts.step_times.any(axis=0)]
    if len(used):
        axis.set_xlim(used[0] / 2, used[-1] * 2)
    axis.set_xscale("log")
    axis.set_xlabel("milliseconds for a step of one env, autoresets included", fontsize=8)
    axis.set_ylabel("share of the steps", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    if 1 < len(stats.blocks) <= 8:
        axis.legend(fontsize=8, frameon=False)

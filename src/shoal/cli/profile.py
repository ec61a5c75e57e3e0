"""`shoal profile`: runs a pool with random actions, and shows its stats, a plot and a flame graph."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import Pool
from shoal.cli import report, work
from shoal.errors import ShoalError
from shoal.observe.stats import EDGES, LABELS, PoolStats
from shoal.support.optional_dependencies import install
from shoal.support.usage import UsageError
from shoal.tuning.driver import PoolDriver

SCHEMA = 1
WARM_UP = 0.3  # seconds in which caches fill and the pool learns whether to spin
TICK = 0.25  # seconds between two moves of the progress bar
SLACK = 30.0  # seconds that py-spy may take in addition
COLOURS = {
    "envs": "#0072b2", "resets": "#56b4e9", "stragglers": "#d55e00", "waking": "#e69f00", "copying": "#cc79a7",
    "pool": "#009e73", "caller": "#999999",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What to run.

    Attributes:
        policy_ms: the time that the caller waits after each batch, as for a policy on a GPU.
        flame: the file for a flame graph; None for none.
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
    def parts(self) -> int:
        """The number of parts of the run; the progress bar moves before each."""
        return max(1, round(self.seconds / TICK))

    @property
    def ticks(self) -> int:
        """The number of moves of the progress bar."""
        return 1 + self.parts + (round(self.flame_seconds / TICK) if self.flame else 0)

    @property
    def flame_seconds(self) -> int:
        """The time for which py-spy records; it takes whole seconds only."""
        return max(1, round(self.seconds))


@dataclass(frozen=True)
class Profile:
    """The result of a run."""

    run: Run
    plan: str
    stats: PoolStats

    def __str__(self) -> str:
        return f"{self.run.env}: {self.stats}"

    def as_dict(self, machine: dict[str, Any]) -> dict[str, Any]:
        """Return all figures, with the machine on which they were measured, as plain values."""
        return {
            "schema": SCHEMA, "machine": machine, "env": self.run.env, "plan": self.plan,
            "policy_ms": self.run.policy_ms, **self.stats.as_dict(),
        }  # fmt: skip


def check(run: Run) -> work.Work:
    """Build the env once and return what is to be run. Raises UsageError for what would fail later."""
    if run.flame is not None:
        find_spy(run.flame)
    return work.probe(run.env, run.num_envs)


def profile(run: Run, probed: work.Work, notify: Callable[[str], None]) -> Profile:
    """Run the pool, and then draw the flame graph if there is to be one, because py-spy slows a process down.

    Args:
        probed: what `check` has returned.
        notify: called about every TICK seconds with what is done next.

    Raises:
        UsageError: one sentence about what went wrong.
    """
    pause = functools.partial(time.sleep, run.policy_ms / 1e3) if run.policy_ms else None
    try:
        with Pool(
            probed.env_fn(), run.num_envs, backend=run.backend, num_workers=run.workers, batch_size=run.batch_size,
        ) as pool:  # fmt: skip
            notify("warming up")
            driver = PoolDriver(pool, probed.actions(pool.batch_size), pause)
            driver.run(WARM_UP)
            before = pool.stats()
            for _ in range(run.parts):
                notify("measuring")
                driver.run(run.seconds / run.parts)
            stats = pool.stats() - before
            if run.flame is not None:
                take_flame(find_spy(run.flame), run, driver, notify)
            return Profile(run, str(pool.plan), stats)
    except ShoalError as error:
        raise UsageError(f"{run.env!r} cannot be run: {report.first_line(str(error))}") from error


# ---- flame graph -----------------------------------------------------------------------------------------------


def find_spy(flame: Path) -> str:
    """Return the command py-spy. Raises UsageError if it is not installed, or its picture cannot be saved."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise UsageError(f"a flame graph needs py-spy: {install('profile')}")
    report.check_file(flame)
    if flame.suffix.lower() != ".svg":
        raise UsageError(f"the flame graph is an SVG, so name it .svg and not {flame.name!r}")
    return found


def take_flame(spy: str, run: Run, driver: PoolDriver, notify: Callable[[str], None]) -> None:
    """Let py-spy record the first worker process, or this process if there is none, while the pool steps on."""
    pid = next((worker.pid for worker in driver.pool.workers if worker.pid is not None), os.getpid())
    command = [spy, "record", "--output", str(run.flame), "--pid", str(pid), "--duration", str(run.flame_seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until = time.monotonic() + run.flame_seconds + SLACK
    try:
        while process.poll() is None and time.monotonic() < until:
            notify("drawing the flame graph")
            driver.run(TICK)
    finally:
        process.kill()
        said = process.communicate()[0]
    if process.returncode != 0:
        lines = [line.removeprefix("Error: ") for line in said.splitlines() if line.startswith("Error")]
        what = lines[0] if lines else report.first_line(said) or "it did not end in time"
        raise UsageError(f"py-spy could not look at process {pid}: {what} (it may need root, or CAP_SYS_PTRACE)")


# ---- plot ------------------------------------------------------------------------------------------------------


def plot(found: Profile, path: Path) -> None:
    """Draw the shares as one bar, and the times of steps as a curve for each worker; save a PNG."""
    figure = report.new_figure(10, 5.5)
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

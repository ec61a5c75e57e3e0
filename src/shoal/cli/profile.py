"""`shoal profile`: runs a pool with random actions, and shows its stats, a plot, a page and a flame graph."""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal import Pool
from shoal.cli import doctor, report, work
from shoal.errors import ShoalError
from shoal.observe.html_report import page
from shoal.observe.progress import progress
from shoal.observe.stats import COLOURS, EDGES, LABELS, PoolStats
from shoal.observe.timeline import Timeline
from shoal.support.optional_dependencies import install
from shoal.support.usage import UsageError
from shoal.tuning.lab import PoolDriver
from shoal.tuning.result import new_figure

SCHEMA = 1
WARM_UP = 0.3  # seconds in which caches fill and the pool learns whether to spin
TICK = 0.25  # seconds between two moves of the progress bar
BATCHES = 100  # of the time line
SLACK = 30.0  # seconds that py-spy may take in addition


def run(options: argparse.Namespace) -> int:
    """Run `shoal profile`. The flame graph comes after the measurement, because py-spy slows a process down."""
    output = report.Output(options)
    work.check_batch_size(options.batch_size, options.num_envs)
    spy = find_spy(options.flame) if options.flame else ""
    if options.html:
        report.check_file(options.html, "the report is HTML")
    work.look_here(options.env)
    probed = work.probe(options.env, options.num_envs)
    pause = functools.partial(time.sleep, options.policy_ms / 1e3) if options.policy_ms else None
    parts = max(1, round(options.seconds / TICK))
    with (
        work.refusing(f"{options.env!r} cannot be run", ShoalError),
        progress(1 + (2 if spy else 1) * parts) as notify,
        Pool(
            probed.env_fn(), options.num_envs, backend=options.backend, num_workers=options.workers,
            batch_size=options.batch_size,
        ) as pool,
    ):  # fmt: skip
        notify("warming up")
        driver = PoolDriver(pool, probed.actions(pool.batch_size), pause)
        driver.run(WARM_UP)
        before = pool.stats()
        for _ in range(parts):
            notify("measuring")
            driver.run(options.seconds / parts)
        plan, stats = str(pool.plan), pool.stats() - before
        timeline = take_timeline(driver) if options.html else Timeline()
        if spy:
            take_flame(spy, options.flame, max(1, round(options.seconds)), driver, notify)
    about = {"env": options.env, "plan": plan, "policy_ms": options.policy_ms}
    output.write(
        lambda: {"schema": SCHEMA, "machine": doctor.facts(), **about, **stats.as_dict()},
        lambda console: print(f"{options.env}: {stats}"),
        lambda path: plot(options.env, stats, path),
    )
    if options.html:
        options.html.write_text(page(options.env, plan, stats, timeline, doctor.facts()), encoding="utf-8")
        print(f"report saved to {options.html}", file=sys.stderr)
    if spy:
        print(f"flame graph saved to {options.flame}", file=sys.stderr)
    return 0


def take_timeline(driver: PoolDriver) -> Timeline:
    """Let the pool go on for some batches, and note which env steps when."""
    recorder, policy = driver.pool.recorder(), driver.policy
    driver.policy = functools.partial(recorder.note, policy)
    driver.take(BATCHES + 1)
    driver.policy = policy
    return recorder.timeline


def find_spy(flame: Path) -> str:
    """Return the command py-spy. Raises UsageError if it is not installed, or its picture cannot be saved."""
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise UsageError(f"a flame graph needs py-spy: {install('profile')}")
    report.check_file(flame, "the flame graph is an SVG")
    return found


def take_flame(spy: str, flame: Path, seconds: int, driver: PoolDriver, notify: Callable[[str], None]) -> None:
    """Let py-spy record the first worker process, or this process if there is none, while the pool steps on."""
    pid = next((worker.pid for worker in driver.pool.workers if worker.pid is not None), os.getpid())
    command = [spy, "record", "--output", str(flame), "--pid", str(pid), "--duration", str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until = time.monotonic() + seconds + SLACK
    try:
        while process.poll() is None and time.monotonic() < until:
            notify("drawing the flame graph")
            driver.run(TICK)
    finally:
        process.kill()
        said = process.communicate()[0]
    if process.returncode != 0:
        lines = [line.removeprefix("Error: ") for line in said.splitlines() if line.startswith("Error")]
        what = lines[0] if lines else work.first_line(said) or "it did not end in time"
        raise UsageError(f"py-spy could not look at process {pid}: {what} (it may need root, or CAP_SYS_PTRACE)")


def plot(env: str, stats: PoolStats, path: Path) -> None:
    """Draw the shares as one bar, and the times of steps as a curve for each worker; save a PNG."""
    figure = new_figure(10, 5.5)
    top, bottom = figure.subplots(2, 1, height_ratios=[1, 3])
    _plot_shares(top, stats)
    _plot_times(bottom, stats)
    head = f"{env}: {work.first_line(str(stats))}"
    figure.suptitle("\n".join([*textwrap.wrap(head, 110), *textwrap.wrap(stats.verdict, 110)]), fontsize=9)
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

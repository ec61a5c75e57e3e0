"""`shoal doctor`: what this machine and this installation offer, and what is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import os
import platform
import shutil
import time
from typing import Any

from rich.markup import escape
from rich.table import Table

from shoal import native
from shoal.cli import report, work
from shoal.cli.contenders import installed
from shoal.errors import ShoalError
from shoal.pool import Pool
from shoal.support import cores, processes

NUM_ENVS, SECONDS = 4096, 0.5  # of a measurement of a compiled class
INTEGRATIONS = (
    "stable_baselines3", "pufferlib", "envpool", "tianshou", "torch", "tensorflow", "tf_agents", "jax", "ray", "mpi4py",
    "numba", "numba_cuda", "pettingzoo", "dm_env", "matplotlib",
)  # fmt: skip


def run(options: argparse.Namespace) -> int:
    output = report.Output(options)
    if getattr(options, "env", None):
        found = precisions(options.env)
        output.write(lambda: found, lambda console: console.print(precision_table(options.env, found)))
        return 0
    known = facts()
    output.write(lambda: known, lambda console: console.print(table(known)))
    return 0


def facts() -> dict[str, Any]:
    """Return everything the doctor knows, as plain values."""
    offered = multiprocessing.get_all_start_methods()
    return {
        "shoal": version("shoal"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gymnasium": version("gymnasium"),
        "numpy": version("numpy"),
        "cores": {
            "usable": cores.usable_cores(),
            "affinity": cores.affinity_cores(),
            "cgroup_quota": cores.cgroup_quota(),
            "machine": os.cpu_count(),
        },
        "native": str(native.KIND),  # "native" for the C core, "twin" for the pure-Python one
        "native_missing": native.MISSING,
        "start_method": {
            "shoal": "forkserver" if "forkserver" in offered else offered[0],
            "python": multiprocessing.get_start_method(allow_none=True) or offered[0],
            "offered": offered,
        },
        "memory_available": processes.available_memory(),
        "dev_shm": dev_shm(),
        "integrations": {name: find(name, name.replace("_", "-")) for name in INTEGRATIONS},
    }


def precisions(name: str) -> dict[str, Any]:
    """Measure a compiled class in double and in single precision: steps per second, and how its lanes are stepped."""
    found: dict[str, Any] = {}
    work.look_here(name)
    with work.refusing(f"{name!r} cannot be compiled", ShoalError, ImportError):
        for precision in ("double", "single"):
            env = work.env_fn(name) if ":" in name else name
            options: dict[str, Any] = {"backend": "compiled", "env_kwargs": {"precision": precision}}
            with Pool(env, NUM_ENVS, seed=0, **options) as pool:
                pool.reset()
                actions = pool.action_space.sample()
                pool.step(actions)
                steps, began = 0, time.perf_counter()
                while time.perf_counter() - began < SECONDS:
                    pool.step(actions)
                    steps += pool.num_envs
                rate = steps / (time.perf_counter() - began)
                found[precision] = {"steps_per_s": rate, "plan": pool.plan.reason}
    return found


def precision_table(name: str, found: dict[str, Any]) -> Table:
    grid = Table("precision", "M steps/s", "plan", title=f"{name}, {NUM_ENVS} envs", title_justify="left")
    for precision, told in found.items():
        grid.add_row(precision, f"{told['steps_per_s'] / 1e6:.3g}", escape(told["plan"]))
    return grid


def version(distribution: str) -> str | None:
    """Return an installed distribution's version; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def find(module: str, distribution: str) -> str | None:
    """Return a module's version without importing it; "unknown" if it has none to tell."""
    if not installed(module):
        return None
    found = version(distribution)
    if found is None:
        others = importlib.metadata.packages_distributions().get(module, [])
        found = next((version(other) for other in others), None)
    return found or "unknown"


def dev_shm() -> dict[str, int] | None:
    """Return size and free room of /dev/shm in bytes; Shoal needs none of it, peers do."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return {"size": usage.total, "free": usage.free}


def table(known: dict[str, Any]) -> Table:
    grid = Table(title="shoal doctor", title_justify="left", show_header=False)
    grid.add_column(style="bold")
    grid.add_column()
    for label, value in _machine_lines(known):
        grid.add_row(label, value)
    for name, found in known["integrations"].items():
        grid.add_row(name, f"[green]{found}" if found else "[dim]not found")
    return grid


def _machine_lines(known: dict[str, Any]) -> list[tuple[str, str]]:
    count, methods, shm = known["cores"], known["start_method"], known["dev_shm"]
    quota = "none" if count["cgroup_quota"] is None else f"{count['cgroup_quota']:g}"
    return [
        ("cores usable", f"[bold green]{count['usable']}"),
        ("  of the machine", str(count["machine"])),
        ("  by affinity", str(count["affinity"])),
        ("  by cgroup quota", quota),
        ("core", _core_line(known)),
        ("start method", f"{methods['shoal']} (Python's own default: {methods['python']})"),
        ("memory available", _size(known["memory_available"])),
        ("/dev/shm", f"{_size(shm['size'])}, {_size(shm['free'])} free" if shm else "none"),
        ("shoal", known["shoal"] or "not installed, run from source"),
        ("python", f"{known['python']} on {known['platform']}"),
        ("gymnasium, numpy", f"{known['gymnasium']}, {known['numpy']}"),
    ]


def _core_line(known: dict[str, Any]) -> str:
    if known["native"] == "native":
        return "native (C)"
    if known["native_missing"] is None:
        return "[yellow]twin (pure Python, slower), since SHOAL_NATIVE=0 asks for it"
    text = f"twin (pure Python): the C core is missing: {known['native_missing']}. {native.REMEDY}"
    return f"[yellow]{escape(text)}"


def _size(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"

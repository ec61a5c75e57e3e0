"""`shoal doctor`: what this machine and this installation offer, what is missing, and whether each backend works."""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import os
import platform
import shutil
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shoal import native
from shoal.cli import report, self_test, work
from shoal.cli.contenders import installed
from shoal.compiled.cache import cache_folder
from shoal.errors import ShoalError
from shoal.pool import Pool
from shoal.support import cores, processes
from shoal.support.gil import gil_enabled
from shoal.support.optional_dependencies import installation
from shoal.support.system import system

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
    known["self_test"] = {} if options.no_test else {name: self_test.run(name) for name in self_test.BACKENDS}
    show: Callable[[Console], None] = lambda console: console.print(table(known))  # noqa: E731
    if options.text:
        show = lambda console: print(as_text(known))  # noqa: E731
    output.write(lambda: known, show)
    return 1 if any(found["ok"] is False for found in known["self_test"].values()) else 0


def facts() -> dict[str, Any]:
    """Return everything the doctor knows, as plain values."""
    return {
        "shoal": version("shoal"),
        "installed": installation(),
        "python": platform.python_version(),
        "gil": gil_enabled(),
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
        "sleeps_by": getattr(native.core, "SLEEPS", None),
        "start_method": {
            "shoal": system.start_methods[0] if system.has_processes else None,
            "python": multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
            "offered": list(system.start_methods) if system.has_processes else [],
        },
        "memory_available": processes.available_memory(),
        "cache": cache(),
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


def cache() -> dict[str, Any]:
    """Return where compiled code is kept, and how much there is."""
    folder = cache_folder()
    found = [path.stat().st_size for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    return {"folder": str(folder), "files": len(found), "bytes": sum(found), "writable": os.access(nearest, os.W_OK)}


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
    for name, tried in known["self_test"].items():
        colour = {True: "green", False: "bold red", None: "dim"}[tried["ok"]]
        grid.add_row(f"self-test: {name}", f"[{colour}]{escape(_tried(tried))}")
    return grid


def as_text(known: dict[str, Any]) -> str:
    """Everything as plain lines, for a bug report."""
    rows = [(label.strip(), Text.from_markup(value).plain) for label, value in _machine_lines(known)]
    rows += [(name, found) for name, found in known["integrations"].items() if found]
    rows += [(f"self-test: {name}", _tried(tried)) for name, tried in known["self_test"].items()]
    return "\n".join(["```", *(f"{label}: {value}" for label, value in rows), "```"])


def _tried(tried: dict[str, Any]) -> str:
    if tried["ok"]:
        return f"works: {tried['steps_per_second']:,} steps/s, started in {tried['start_seconds']:.2f} s"
    return f"not here: {tried['why']}" if tried["ok"] is None else f"FAILED: {tried['why']}"


def _machine_lines(known: dict[str, Any]) -> list[tuple[str, str]]:
    count, methods, shm = known["cores"], known["start_method"], known["dev_shm"]
    quota = "none" if count["cgroup_quota"] is None else f"{count['cgroup_quota']:g}"
    return [
        ("cores usable", f"[bold green]{count['usable']}"),
        ("  of the machine", str(count["machine"])),
        ("  by affinity", str(count["affinity"])),
        ("  by cgroup quota", quota),
        ("core", _core_line(known)),
        ("start method", f"{methods['shoal'] or 'none'} (Python's own default: {methods['python']})"),
        ("memory available", _size(known["memory_available"])),
        ("/dev/shm", f"{_size(shm['size'])}, {_size(shm['free'])} free" if shm else "none"),
        ("cache", escape(_cache_line(known["cache"]))),
        ("shoal", escape(f"{known['shoal'] or 'not installed'}, {known['installed']}")),
        ("python", f"{known['python']}{'' if known['gil'] else ', without the GIL'} on {known['platform']}"),
        ("gymnasium, numpy", f"{known['gymnasium']}, {known['numpy']}"),
    ]


def _core_line(known: dict[str, Any]) -> str:
    if known["native"] == "native":
        return f"native (C), sleeps by {known['sleeps_by']}"
    if known["native_missing"] is None:
        return "[yellow]twin (pure Python, slower), since SHOAL_NATIVE=0 asks for it"
    text = f"twin (pure Python): the C core is missing: {known['native_missing']}. {native.REMEDY}"
    return f"[yellow]{escape(text)}"


def _cache_line(found: dict[str, Any]) -> str:
    state = "" if found["writable"] else "; it cannot be written: set SHOAL_CACHE_DIR to a folder of your own"
    return f"{found['folder']}: {found['files']} files, {found['bytes'] / 2**20:.1f} MiB{state}"


def _size(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"

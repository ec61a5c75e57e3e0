"""`shoal doctor`: what this machine and this installation offer, and what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import multiprocessing
import os
import platform
import shutil
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shoal import native
from shoal.support import processes

# module -> the distribution that carries it
INTEGRATIONS = {
    "stable_baselines3": "stable-baselines3",
    "pufferlib": "pufferlib-core",
    "envpool": "envpool",
    "tianshou": "tianshou",
    "torch": "torch",
    "tensorflow": "tensorflow",
    "tf_agents": "tf-agents",
    "jax": "jax",
    "ray": "ray",
    "mpi4py": "mpi4py",
    "numba": "numba",
    "numba_cuda": "numba-cuda",
    "pettingzoo": "pettingzoo",
    "dm_env": "dm-env",
    "matplotlib": "matplotlib",
}


def facts() -> dict[str, Any]:
    """Return everything the doctor knows, as plain values."""
    from shoal.support import cores

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
        "native": native_kind(),
        "native_missing": native.MISSING,
        "start_method": start_method(),
        "memory_available": processes.available_memory(),
        "dev_shm": dev_shm(),
        "integrations": {name: find(name, dist) for name, dist in INTEGRATIONS.items()},
    }


def version(distribution: str) -> str | None:
    """Return an installed distribution's version; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def find(module: str, distribution: str) -> str | None:
    """Return a module's version without importing it; "unknown" if it has none to tell."""
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except (ImportError, ValueError):
        return None
    found = version(distribution)
    if found is None:
        others = importlib.metadata.packages_distributions().get(module, [])
        found = next((version(other) for other in others), None)
    return found or "unknown"


def native_kind() -> str:
    """Return "native" for the C core, "twin" for the pure-Python one."""
    return str(native.KIND)


def start_method() -> dict[str, Any]:
    """Return how worker processes start: Shoal's way and Python's own default."""
    offered = multiprocessing.get_all_start_methods()
    return {
        "shoal": "forkserver" if "forkserver" in offered else offered[0],
        "python": multiprocessing.get_start_method(allow_none=True) or offered[0],
        "offered": offered,
    }


def dev_shm() -> dict[str, int] | None:
    """Return size and free room of /dev/shm in bytes; Shoal needs none of it, peers do."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return {"size": usage.total, "free": usage.free}


def table(known: dict[str, Any]) -> Table:
    """Lay the facts out for reading."""
    grid = Table(title="shoal doctor", title_justify="left", show_header=False)
    grid.add_column(style="bold")
    grid.add_column()
    for label, value in [*_machine_lines(known), *_integration_lines(known)]:
        grid.add_row(label, value)
    return grid


def _machine_lines(known: dict[str, Any]) -> list[tuple[str, str]]:
    cores, methods, shm = known["cores"], known["start_method"], known["dev_shm"]
    quota = "none" if cores["cgroup_quota"] is None else f"{cores['cgroup_quota']:g}"
    return [
        ("cores usable", f"[bold green]{cores['usable']}"),
        ("  of the machine", str(cores["machine"])),
        ("  by affinity", str(cores["affinity"])),
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


def _integration_lines(known: dict[str, Any]) -> list[tuple[str, str]]:
    found = known["integrations"]
    return [(name, f"[green]{found[name]}" if found[name] else "[dim]not found") for name in found]


def _size(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"


def show(known: dict[str, Any], console: Console) -> None:
    """Print the table."""
    console.print(table(known))

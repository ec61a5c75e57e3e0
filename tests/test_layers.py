"""Imports point down only, lazy ones too; nothing below the dialects knows a framework; `import shoal` stays light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parent

# Packages and the modules at the top, from the bottom up. Each may import what stands before it, and itself.
LAYERS = (
    "errors", "batch", "support", "ranks", "native", "spaces", "memory", "envs", "state", "worker", "backends",
    "compiled", "mujoco", "options", "engine", "planning", "remote", "observe", "rollout", "pool", "wrappers",
    "graph", "dialects", "torchrl", "make", "atari", "emulation", "group", "tuning", "scaling", "__init__", "learn",
    "cli", "__main__",
)  # fmt: skip
RANK = {name: rank for rank, name in enumerate(LAYERS)}
MOST_AT_THE_TOP = 10
FRAMEWORKS = {
    "stable_baselines3", "tensorflow", "tf_agents", "torch", "jax", "flax", "ray", "mpi4py", "numba", "envpool",
    "tianshou", "pufferlib", "matplotlib", "pettingzoo", "dm_env", "torchrl", "tensordict",
}  # fmt: skip
MAY_IMPORT_FRAMEWORKS = {"dialects", "graph", "cli", "tuning", "compiled", "remote", "learn"}
HEAVY = sorted(FRAMEWORKS | {"scipy", "pandas", "rich", "pygame", "IPython"})


def part(module: str) -> str:
    """shoal.backends.base -> backends; shoal itself -> __init__."""
    return module.split(".")[1] if "." in module else "__init__"


FILES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("shoal", *(p for p in parts if p != "__init__")))


MODULES = {name_of(path) for path in FILES}


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions and by names in texts too; not those for type checkers."""
    tree = ast.parse(path.read_text())
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            # `from shoal import native` imports shoal.native; `from shoal.errors import X` imports shoal.errors.
            yield from names if node.module == "shoal" else [str(node.module)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A module that is named in a text is imported by importlib, now or later: "shoal.x.y" or "shoal.x.y:Z".
            module = node.value.partition(":")[0]
            if module in MODULES and module != "shoal":
                yield module


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_imports_point_down(path: Path) -> None:
    here = part(name_of(path))
    assert here in RANK, f"{here} has no place in LAYERS: give it one"
    for module in imports(path):
        if module.split(".")[0] == "shoal":
            there = part(module)
            if there not in RANK:
                there = "__init__"  # a name of the package itself, as in `from shoal import Pool`
            assert RANK[there] <= RANK[here], f"{name_of(path)} imports {module}, which stands above it"


def test_few_modules_lie_at_the_top() -> None:
    top = sorted(path.stem for path in ROOT.glob("*.py") if path.stem not in ("__init__", "__main__"))
    assert len(top) <= MOST_AT_THE_TOP, top


def test_every_package_says_what_it_is() -> None:
    for path in ROOT.rglob("__init__.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring is not None, f"{path}: has no docstring"
        if path.parent.parent == ROOT:
            assert "import" in docstring, f"{path}: its docstring says what it may import"
            assert "first" in docstring, f"{path}: its docstring says what to read first"


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_frameworks_are_for_dialects_and_tools(path: Path) -> None:
    if part(name_of(path)) not in MAY_IMPORT_FRAMEWORKS:
        found = {module.split(".")[0] for module in imports(path)} & FRAMEWORKS
        assert not found, f"{name_of(path)} imports {found}"


@pytest.mark.parametrize(
    "module",
    [
        "shoal",
        "shoal.backends.worker_main",
        "shoal.dialects.gymnasium",
        "shoal.dialects.sb3",
        "shoal.dialects.baselines",
        "shoal.wrappers",
        "shoal.graph",
        "shoal.emulation",
        "shoal.compiled",
        "shoal.dialects.envpool",
        "shoal.dialects.puffer",
        "shoal.dialects.agents",
        "shoal.learn",
    ],
)
def test_import_stays_light(module: str) -> None:
    script = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    loaded = {name.split(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & set(HEAVY)
    assert "shoal.cli" not in json.loads(done.stdout)


def test_modules_are_there_when_asked_for() -> None:
    script = """
import importlib.util, shoal
assert shoal.dialects.sb3.SubprocVecEnv
assert shoal.graph.own_errors
assert shoal.wrappers.wrap
if importlib.util.find_spec("torch"):
    assert shoal.graph.torch.TorchEnv
for package in (shoal, shoal.dialects, shoal.graph):
    try:
        package.nonsense
    except AttributeError as error:
        assert str(error) == f"module {package.__name__!r} has no attribute 'nonsense'", error
    else:
        raise AssertionError(package)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_import_starts_nothing_and_says_nothing() -> None:
    script = """
import os, threading
before = len(os.listdir("/dev/fd"))
import shoal
assert threading.active_count() == 1, threading.enumerate()
assert len(os.listdir("/dev/fd")) == before
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_picture_of_packages_is_that_of_the_code() -> None:
    script = ROOT.parent.parent / "docs" / "pictures.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")

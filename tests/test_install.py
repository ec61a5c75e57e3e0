"""Installing works without a compiler; the Python twin is used then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
TREE = ("src", "setup.py", "pyproject.toml", "README.md", "LICENSE")
SCRIPT = """
import shoal, shoal.native, sys
assert shoal.__file__.startswith(sys.argv[1]), shoal.__file__
with shoal.Pool("CartPole-v1", 2, backend="processes", num_workers=2) as pool:
    pool.reset(seed=0)
    assert pool.step(pool.action_space.sample()).obs.shape == (2, 4)
print(shoal.native.KIND)
"""


def install(tmp_path: Path, **environ: str) -> tuple[Path, str]:
    """Install a copy of the source (a build in the real tree would be in the way) into a folder, without network."""
    pytest.importorskip("setuptools", "77", reason="setuptools of this age is needed to build here")
    pytest.importorskip("wheel", reason="the package wheel is needed to build here")
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    ignore = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", "build")
    for name in TREE:
        if (REPO / name).is_dir():
            shutil.copytree(REPO / name, source / name, ignore=ignore)
        elif (REPO / name).exists():
            shutil.copy(REPO / name, source / name)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir",
         "--disable-pip-version-check", "-v", "--target", str(target), str(source)],
        capture_output=True, text=True, timeout=100, env={**os.environ, **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return target, done.stdout + done.stderr


def kind_of(target: Path) -> str:
    environ = {**os.environ, "PYTHONPATH": str(target)}
    environ.pop("SHOAL_NATIVE", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(target)],
        capture_output=True, text=True, timeout=60, env=environ, cwd=target,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("compiler", ["/bin/false", "/no/such/compiler"])
def test_without_a_compiler(tmp_path: Path, compiler: str) -> None:
    target, _ = install(tmp_path, CC=compiler)
    assert not list(target.rglob("*.so"))
    assert (target / "shoal" / "py.typed").exists()
    assert kind_of(target) == "twin"


@pytest.mark.timeout(200)
@pytest.mark.skipif(sys.platform != "linux", reason="the C core is for Linux")
def test_with_a_compiler(tmp_path: Path) -> None:
    if shutil.which(os.environ.get("CC", "gcc")) is None:
        pytest.skip("there is no C compiler here")
    target, _ = install(tmp_path)
    assert list(target.rglob("_core*.so"))
    assert kind_of(target) == "native"

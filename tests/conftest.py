"""Shared fixtures. This directory is on sys.path in a run: tests say `from envs import CountEnv`."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest

import core
import repeats
import shoal
import suites
from envs import CountEnv
from shoal import native
from shoal.backends import launch

# What cannot even be imported in each environment. TensorFlow and TF-Agents pin much, and gymnax wants an older
# Gymnasium than the other tests: `make test-tf` runs these files, in an environment of its own. JAX is not for
# Python 3.10.
NEEDS = {
    "dialects/test_puffer_theirs.py": ["pufferlib"],
    "dialects/test_puffer_trains.py": ["pufferlib"],
    "dialects/test_tf_agents.py": ["tf_agents"],
    "dialects/test_tf_agents_same.py": ["tf_agents"],
    "envs/test_quick_time_steps.py": ["tf_agents"],
    "examples/test_tensorflow.py": ["tf_agents"],
    "graph/test_tensorflow.py": ["tensorflow"],
    "simulators/test_others.py": ["minigrid", "dm_control"],  # `make test-simulators` has them
    "graph/test_torch.py": ["torch"],
    "graph/test_torch_cuda.py": ["torch"],
    "graph/jax/test_bind.py": ["jax"],
    "graph/test_jax_backend.py": ["jax"],
    "graph/jax/test_functional.py": ["jax", "gymnax", "flax"],
}
collect_ignore = [name for name, modules in NEEDS.items() if not all(map(importlib.util.find_spec, modules))]

BACKENDS = ("serial", "threads", "processes", "hybrid")

# A runner in the background ignores Ctrl-C, and what it starts would inherit that; these tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported, here and in scripts: with a thread for each core it is slow beside other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# TorchRL, when it is imported, makes "spawn" the way in which all of this process starts others, unless it was settled
# before. The processes of other libraries, which tests compare with, would import torch and more, for seconds each.
multiprocessing.get_start_method()

# A worker imports the module that its env's class is from. Where that is a test, most of it would be these.
launch.PRELOAD += [
    "pytest",
    "hypothesis.strategies",
    "gymnasium.wrappers",
    "shoal.dialects.gymnasium",
    "envs",
    "faults.kit",
]

# A worker whose env is of TF-Agents imports it, for seconds: the forkserver of the tests has it already. That of a
# script has not, and its workers import it as those of users do.
if importlib.util.find_spec("tf_agents"):
    os.environ["TF_USE_LEGACY_KERAS"] = "1"  # before TensorFlow is imported: TF-Agents is written for Keras 2
    launch.PRELOAD.append("tf_agents.environments")
if importlib.util.find_spec("pufferlib"):
    launch.PRELOAD.append("pufferlib.vector")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core", action="store_true", help="only the core of every suite: see tests/core.py")
    parser.addoption("--suite", choices=["engine", "frameworks"], help="one half of the tests: see tests/suites.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --core, files that have no row there are not even imported; with --suite, those of the other one."""
    if not collection_path.name.startswith("test_"):
        return None
    if config.getoption("--core") and core.row_of(collection_path) is None:
        return True
    suite = config.getoption("--suite")
    return True if suite and suites.suite_of(collection_path) != suite else None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if native.KIND == "twin":
        for item in items:
            if (why := repeats.of_the_twin(item.path, item.name)) is not None:
                item.add_marker(pytest.mark.repeats(why))
    if config.getoption("--core"):
        left_out = [item for item in items if not core.is_core(item.path, item.name)]
        items[:] = [item for item in items if core.is_core(item.path, item.name)]
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Thousands of tests and whole frameworks are there to stay: no later collection looks through them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Every local backend in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for the session, of all processes that run its tests."""
    root = tmp_path_factory.getbasetemp()
    return root.parent if "PYTEST_XDIST_WORKER" in os.environ else root


@pytest.fixture(scope="session", autouse=True)
def caches(shared_folder: Path) -> Iterator[None]:
    """What tests, and the scripts that they run, compile or log is kept in the session's folder, and compiled once."""
    caches = {
        "SHOAL_CACHE_DIR": str(shared_folder / "shoal-cache"),
        "JAX_COMPILATION_CACHE_DIR": str(shared_folder / "jax-cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "SB3_LOGDIR": str(shared_folder / "sb3-logs"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in caches.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file that GateEnv waits for; opened at the end in any case, so that no worker stays behind it."""
    path = tmp_path / "gate"
    yield path
    path.touch()


def descendants() -> set[int]:
    """All processes below this one, by the system's word; those that only wait to be reaped do not count."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # gone in the meantime
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


def open_descriptors() -> int:
    return int(psutil.Process().num_fds())


@pytest.fixture(scope="session")
def _forkserver() -> None:
    """Started once: it and its descriptors stay until the interpreter leaves, and are nobody's leak."""
    shoal.Pool(CountEnv, 1, backend="processes").close()
    resource_tracker.ensure_running()  # Python's own, for tests that use its shared memory


@pytest.fixture
def nothing_left_behind(_forkserver: None) -> Iterator[None]:
    """Fails the test if it leaves processes, threads or descriptors behind."""

    def held() -> tuple[set[int], set[threading.Thread], int]:
        gc.collect()
        return descendants(), set(threading.enumerate()), open_descriptors()

    processes, threads, descriptors = held()
    gc.freeze()  # other tests have imported whole frameworks: to look through them takes longer than most tests
    yield
    for _ in range(100):  # the kernel may need a moment to take an ended process off its list
        if descendants() <= processes:
            break
        time.sleep(0.02)
    now = held()
    assert now[0] <= processes, "processes were left behind"
    assert now[1] <= threads, "threads were left behind"
    assert now[2] <= descriptors, "descriptors were left behind"

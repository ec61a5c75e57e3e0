"""Every test here must leave nothing behind: no worker, no descriptor, no thread, no shared memory with a name."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from multiprocessing import resource_tracker
from typing import Any

import pytest

from envs import CountEnv
from faults.kit import RELEASE, Traces, eventually
from shoal import Pool

failed = pytest.StashKey[bool]()
REPEATS = int(os.environ.get("SHOAL_REPEATS", "1"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`make faults` runs everything here many times."""
    if REPEATS > 1:
        metafunc.fixturenames.append("_repeat")
        metafunc.parametrize("_repeat", range(REPEATS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    report = yield
    item.stash[failed] = item.stash.get(failed, False) or report.failed
    return report


@pytest.fixture(scope="session", autouse=True)
def forkserver() -> None:
    """Started before anything is counted: it stays for the whole session, by design."""
    with Pool(CountEnv, 2, backend="processes", num_workers=2) as pool:
        pool.reset()
    resource_tracker.ensure_running()  # Python's own, for tests that use its shared memory


@pytest.fixture(autouse=True)
def nothing_stays(request: pytest.FixtureRequest, forkserver: None) -> Iterator[None]:
    gc.collect()
    gc.freeze()  # other tests have imported whole frameworks: to look through them takes longer than most tests
    RELEASE.clear()
    before = Traces.of_this_process()
    yield
    RELEASE.set()
    gc.collect()
    if not request.node.stash.get(failed, False):  # a failed test's traceback holds what it had
        left = lambda: Traces.of_this_process().beyond(before)  # noqa: E731
        eventually(lambda: left() == [], left)

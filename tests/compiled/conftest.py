"""Compiled code of these tests is kept for the session, in a folder of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # of all workers
    old = os.environ.get("SHOAL_CACHE_DIR")
    os.environ["SHOAL_CACHE_DIR"] = str(root / "shoal-cache")
    yield
    if old is None:
        del os.environ["SHOAL_CACHE_DIR"]
    else:
        os.environ["SHOAL_CACHE_DIR"] = old


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"

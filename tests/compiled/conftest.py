"""A cache of its own, for tests of the cache."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"

"""What users are told to install can be installed: Shoal itself is on no package index."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from shoal.support.optional_dependencies import install

REPO = Path(__file__).parents[1]


@pytest.mark.parametrize("extra", ["ray", "mpi", "cuda", "tf-agents", "jax", "learn"])
def test_the_packages_of_an_extra_are_named(extra: str) -> None:
    found = re.findall(r'"([^"]+)"', install(extra))
    assert install(extra) == "pip install " + " ".join(f'"{one}"' for one in found)
    declared = (REPO / "pyproject.toml").read_text()
    assert all(re.split(r"[<>=\[]", one)[0] in declared for one in found)
    assert not any("shoal" in one or ";" in one for one in found)


def test_a_clone_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert install("ray") == 'pip install ".[ray]" in the folder of Shoal'


def test_nobody_is_sent_to_another_project_of_this_name() -> None:
    files = [REPO / "README.md", *(REPO / "docs").glob("*.md")]
    files += [path for folder in ("src", "examples", "benchmarks") for path in (REPO / folder).rglob("*.py")]
    assert [path for path in files if re.search(r"pip install ['\"]?shoal", path.read_text())] == []

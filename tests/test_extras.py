"""What users are told to install can be installed: Shoal itself is on no package index."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import shoal
from shoal.support.optional_dependencies import install, installation

REPO = Path(__file__).parents[1]
REQUIRES = importlib.metadata.requires("shoal")


class Installed:
    """How pip says that it has installed Shoal: PEP 610."""

    def __init__(self, **about: object):
        self._text = json.dumps(about) if about else None
        self.requires = REQUIRES

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._text


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def be(**about: object) -> None:
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Installed(**about))

    return be


@pytest.mark.parametrize("extra", ["ray", "mpi", "cuda", "tf-agents", "jax", "learn"])
def test_the_packages_of_an_extra_are_named(extra: str, installed: Callable[..., None]) -> None:
    installed()  # by its name
    found = re.findall(r'"([^"]+)"', install(extra))
    assert install(extra) == "pip install " + " ".join(f'"{one}"' for one in found)
    declared = (REPO / "pyproject.toml").read_text()
    assert all(re.split(r"[<>=\[]", one)[0] in declared for one in found)
    assert not any("shoal" in one or ";" in one for one in found)
    assert installation() == "from a package index"


def test_an_editable_checkout_names_its_folder(installed: Callable[..., None], tmp_path: Path) -> None:
    folder = tmp_path / "a checkout"
    folder.mkdir()
    installed(url=folder.as_uri(), dir_info={"editable": True})
    assert install("ray") == f'pip install --editable "{folder}[ray]"'
    assert installation() == f"editable from {folder}"


def test_a_wheel_is_named_if_it_is_still_there(installed: Callable[..., None], tmp_path: Path) -> None:
    wheel = tmp_path / "shoal-0.2.0-cp312-abi3-manylinux_2_34_x86_64.whl"
    installed(url=wheel.as_uri(), archive_info={})
    assert install("plot") == 'pip install "matplotlib>=3.7"'
    wheel.touch()
    assert install("plot") == f'pip install "{wheel}[plot]"'
    assert installation() == f"from {wheel}"


def test_what_came_from_the_web_names_the_packages(installed: Callable[..., None]) -> None:
    installed(url="https://example.org/shoal.whl", archive_info={})
    assert install("plot") == 'pip install "matplotlib>=3.7"'
    assert installation() == "from https://example.org/shoal.whl"


def test_a_clone_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    assert install("ray") == 'pip install ".[ray]" in the folder of Shoal'
    assert installation() == "run from its source"


def test_the_version_is_written_in_one_place() -> None:
    assert importlib.metadata.version("shoal") == shoal.__version__
    assert shoal.__version__ not in (REPO / "pyproject.toml").read_text()


def test_nobody_is_sent_to_another_project_of_this_name() -> None:
    files = [REPO / "README.md", *(REPO / "docs").rglob("*.md")]
    files += [path for folder in ("src", "examples", "benchmarks") for path in (REPO / folder).rglob("*.py")]
    assert [path for path in files if re.search(r"pip install ['\"]?shoal", path.read_text())] == []

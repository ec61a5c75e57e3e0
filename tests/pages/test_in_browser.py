"""The built site in a browser: `make docs` runs these after it has built it. Pictures are kept in build/screenshots."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pages.browser import CHROMIUM, Tab, browser, served

ROOT = Path(__file__).parents[2]
SITE, PICTURES = ROOT / "build" / "site", ROOT / "build" / "screenshots"
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="needs the site: make docs builds it first"),
]
PHONE = 390


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    PICTURES.mkdir(parents=True, exist_ok=True)
    with served(SITE) as address:
        yield address


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as one:
        yield one


@pytest.fixture(autouse=True)
def no_complaints(tab: Tab, site: str) -> Iterator[None]:
    tab.complaints.clear()
    tab.requests.clear()
    yield
    assert tab.complaints == []
    elsewhere = [url for url in tab.requests if not url.startswith((site, "data:", "blob:"))]
    assert elsewhere == [], "the site must work without a network"


def test_the_start_page(tab: Tab, site: str) -> None:
    tab.open(f"{site}/")
    assert "Shoal" in tab.run("document.title")
    chart = "document.querySelector('img[src*=\"speed.svg\"]')"
    assert tab.until(f"{chart}.naturalWidth > 0 && {chart}.clientWidth > 300")
    tabs = tab.run("[...document.querySelectorAll('.md-tabs__link')].map(one => one.textContent.trim())")
    assert tabs == ["Start", "Migrate", "Guides", "Reference", "Explanation", "Contributing"]
    tab.picture(PICTURES / "start.png")


def test_search_finds_the_guide(tab: Tab, site: str) -> None:
    tab.open(f"{site}/")
    tab.until("document.querySelector('.md-search__input') !== null")
    tab.run("document.querySelector('#__search').click()")
    tab.run("document.querySelector('.md-search__input').focus()")
    tab.tell("Input.insertText", text="restart")
    tab.until("document.querySelectorAll('.md-search-result__link').length > 2")
    found = tab.run("[...document.querySelectorAll('.md-search-result__link')].map(one => one.getAttribute('href'))")
    assert "guides/faults/" in found[0], found
    tab.picture(PICTURES / "search.png")


def test_a_page_on_a_phone(tab: Tab, site: str) -> None:
    for name in ("guides/faults", "migrate/stable_baselines3", "reference/errors", "explanation/architecture"):
        tab.open(f"{site}/{name}/", PHONE, 844)
        tab.picture(PICTURES / f"phone-{name.replace('/', '-')}.png")
        assert tab.run("document.documentElement.scrollWidth") <= PHONE, f"{name} is wider than a phone"


def test_every_picture_is_there(tab: Tab, site: str) -> None:
    for page in (
        "guides/async",
        "guides/tuning",
        "explanation/architecture",
        "explanation/benchmarks",
        "start/backends",
    ):
        tab.open(f"{site}/{page}/")
        broken = "[...document.images].filter(one => one.complete && !one.naturalWidth).map(one => one.src)"
        assert tab.until(
            "[...document.images].every(one => one.complete || one.loading == 'lazy') && document.images.length"
        )
        assert tab.run(broken) == []
        tab.picture(PICTURES / f"{page.replace('/', '-')}.png")


def test_reference_pages_have_what_they_name(tab: Tab, site: str) -> None:
    for page, names in {
        "make": ["shoal.make.make"],
        "pool": ["shoal.pool.Pool.recv", "shoal.pool.Pool.snapshot"],
        "errors": ["shoal.errors.EnvError", "shoal.errors.WorkerDied"],
        "wrappers": ["shoal.wrappers.hosts.wrap"],
    }.items():
        tab.open(f"{site}/reference/{page}/")
        for name in names:
            assert tab.run(f"document.getElementById({name!r}) !== null"), name
        tab.picture(PICTURES / f"reference-{page}.png")


def test_the_report_of_a_profile(tab: Tab, site: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    command = [sys.executable, "-m", "shoal.cli.main", "profile", "CartPole-v1", "-n", "16", "--backend", "processes"]
    sizes = ["--workers", "2", "--seconds", "0.5", "--html", str(path)]
    subprocess.run([*command, *sizes], check=True, capture_output=True, timeout=200)
    with served(tmp_path) as address:
        tab.open(f"{address}/report.html")
        assert len(tab.run("document.getElementById('verdict').textContent")) > 20
        assert tab.run("document.querySelectorAll('#envs tr').length") == 11
        inked = "new Set(pen.getImageData(0, 0, canvas.width, canvas.height).data).size"
        assert tab.run(inked) > 5, "nothing is drawn"
        before = tab.run("to - from")
        tab.run("document.getElementById('in').click()")
        assert tab.run("to - from") < before
        tab.picture(PICTURES / "report.png")
        tab.open(f"{address}/report.html", PHONE, 844)
        assert tab.run("document.documentElement.scrollWidth") <= PHONE
        tab.picture(PICTURES / "phone-report.png")
        tab.requests[:] = [url for url in tab.requests if not url.startswith(address)]

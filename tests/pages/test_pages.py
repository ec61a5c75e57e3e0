"""What can be said of the pages without building them: links, examples, pictures, and what code says of pages."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

from shoal.cli.arguments import COMMANDS
from site_blocks import BLOCKS, PAGES, README, ROOT

LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
TEXTS = [README, ROOT / "CONTRIBUTING.md", *PAGES]
NAMED = re.compile(r"(?<![\w/.])docs/[\w/]+\.(?:md|json|svg|png|py)\b")


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    outside = {"CHANGELOG.md", "contributing/index.md", "contributing/changelog.md"}  # made when the site is built
    dead = []
    for target in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if "://" not in target and not (page.parent / target).exists() and target not in outside:
            dead.append(target)
    assert dead == []


def test_every_page_is_in_the_nav() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    missing = [
        str(page.relative_to(ROOT / "docs")) for page in PAGES if str(page.relative_to(ROOT / "docs")) not in nav
    ]
    assert missing == [], "add these to the nav in mkdocs.yml"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_examples_are_python(block: object) -> None:
    ast.parse(block.text)  # type: ignore[attr-defined]


def test_pages_that_are_named_elsewhere_exist() -> None:
    files = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    folders = ("src", "tests", "tools", "benchmarks", "examples", "Makefile", "CONTRIBUTING.md", "README.md")
    texts = [
        ROOT / name for name in files if name.startswith(folders) and os.path.splitext(name)[1] in (".py", ".md", "")
    ]
    wrong = {
        (str(path.relative_to(ROOT)), name)
        for path in texts
        if path.exists()
        for name in NAMED.findall(path.read_text())
        if not (ROOT / name).exists()
    }
    assert wrong == set()


def test_every_command_is_in_the_reference() -> None:
    page = (ROOT / "docs/reference/command_line.md").read_text()
    assert sorted(re.findall(r"<!-- options of shoal (\w+) -->", page)) == sorted(COMMANDS)

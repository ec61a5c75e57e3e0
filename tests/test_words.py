"""The house's words: docstrings, comments and messages say who does what, and none of these words ever does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*") if path.suffix in (".py", ".c", ".h"))
AVOIDED = re.compile(r"\b([Ww]hoever|[Nn]obody|[Ss]omebody|[Ee]verybody|[Ww]ho (?:is|has|wants|waits|comes|keeps))\b")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_words_that_hide_who_acts(path: Path) -> None:
    # A message that the fault suite, which is frozen, asks for word by word.
    lines = path.read_text().replace("if nobody else has sent it", "").splitlines()
    found = [f"{path}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if AVOIDED.search(line)]
    assert not found, "say which part of Shoal, or that it is the caller:\n" + "\n".join(found)

"""The examples of README and site, as scripts.

"```python" is a whole script. A word after it names a module without which the example cannot run: "```python jax". A
"```diff MODULE" is two whole scripts, before and after the change; a "```diff" without a word is a fragment, which no
test runs.
"""

from __future__ import annotations

import functools
import re
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
FENCE = re.compile(r"^```(python|diff)(?: (\w+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TENSORFLOW = ("tensorflow", "tf_agents")
# A module that only those have who have installed all that the first word needs.
TELLING = {"rllib": "lz4", "cupy": "cupy", "tf_agents": "tf_agents"}


class Block(NamedTuple):
    """One script. `module` is what it needs, "" for nothing that the tests do not need themselves."""

    page: Path
    line: int
    module: str
    text: str
    side: str = ""

    @property
    def name(self) -> str:
        """Where it stands, as the name of a test and of a file: guides-async-12."""
        page = self.page.relative_to(ROOT).with_suffix("")
        place = "-".join(page.parts[1:] if page.parts[0] == "docs" else page.parts)
        return "-".join([place, str(self.line), *([self.side] if self.side else [])])

    @property
    def can_run(self) -> bool:
        """Whether its module is installed here."""
        return not self.module or installed(self.module)


@functools.cache
def installed(module: str) -> bool:
    return find_spec(TELLING.get(module, module)) is not None


def side_of(diff: str, sign: str) -> str:
    """The script before ("-") or after ("+") a change."""
    return "".join(line[1:] + "\n" for line in diff.splitlines() if not line or line[0] in f" {sign}")


def blocks_of(page: Path) -> list[Block]:
    text, found = page.read_text(), []
    for fence in FENCE.finditer(text):
        language, module, code = fence.groups()
        line = text.count("\n", 0, fence.start()) + 1
        if language == "python":
            found.append(Block(page, line, module or "", code))
        elif module:
            found += [Block(page, line, module, side_of(code, "-"), "before"),
                      Block(page, line, module, side_of(code, "+"), "after")]  # fmt: skip
    return found


BLOCKS = [block for page in [README, *PAGES] for block in blocks_of(page)]

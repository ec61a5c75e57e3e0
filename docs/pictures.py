"""Draws the packages of Shoal for docs/explanation/architecture.md, from the imports in the code.

python docs/pictures.py           writes the picture into docs/explanation/architecture.md
python docs/pictures.py --check   says whether the picture there is the one that the code gives
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "shoal"
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
BEGIN, END = "<!-- packages: made by python docs/pictures.py -->", "<!-- packages: end -->"
# Small modules that nearly everything imports would hide the picture.
LEFT_OUT = {"__init__", "errors", "batch", "support", "emulation", "group"}


def part_of(module: str) -> str:
    """The package of a module, or the module itself where it lies at the top: shoal.envs.group -> envs."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path) -> set[str]:
    """The parts of Shoal that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "shoal":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("shoal."):
            found.add(part_of(str(node.module)))
    return found


def edges() -> dict[str, set[str]]:
    """What each part imports directly."""
    parts = {path.stem if path.is_file() else path.name for path in PACKAGE.iterdir()} - LEFT_OUT
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if part in parts:
            found.setdefault(part, set()).update((imports(path) & parts) - {part})
    return found


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that follow from others."""

    def below(part: str) -> set[str]:
        return graph[part] | {deeper for one in graph[part] for deeper in below(one)}

    return {part: {one for one in ones if not any(one in below(other) for other in ones - {one})}
            for part, ones in graph.items()}  # fmt: skip


def picture() -> str:
    """The block of Mermaid."""
    arrows = [f"    {part} --> {one}" for part, ones in sorted(reduced(edges()).items()) for one in sorted(ones)]
    return "\n".join(["```mermaid", "flowchart TD", *arrows, "```"])


def page() -> str:
    """The page with the picture that the code gives."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{picture()}\n{END}{after}"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.read_text() == page() else "docs/explanation/architecture.md: run python docs/pictures.py")
    PAGE.write_text(page())

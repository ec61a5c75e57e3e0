"""What mkdocs calls while it builds the site: pages that are made of other files, and links that leave docs/.

A link from a page to a file of the repository (an example, a script) leads to a page with the text of that file, so
that the site is whole without a network. Tables of errors and of commands are made of the code that they describe.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

import shoal.errors
from shoal.cli.arguments import COMMANDS, add_options

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?\)")
BLOCK = re.compile(r"^( *```)(python|diff) [\w ]+$", re.MULTILINE)  # the word after it says where a test runs it
MARK = re.compile(r"<!-- (errors|options of shoal (\w+)) -->")
# Files of the repository that are pages of the site under another name.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing/index.md",
    "CHANGELOG.md": "contributing/changelog.md",
}
LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".toml": "toml", ".txt": "text"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of files outside of docs/."""
    for source, page in PAGES.items():
        if source != "README.md":
            files.append(File.generated(config, page, content=_moved((ROOT / source).read_text(), source, page)))
    linked = {target for page in (ROOT / "docs").rglob("*.md") for target in _outside(page)}
    for target in sorted(linked - set(PAGES)):
        text = _listing(target) if (ROOT / target).is_dir() else _text_of(target)
        inclusion = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, f"source/{target}.md", content=text, inclusion=inclusion))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Fill in tables, plain fences, and links into the repository."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    markdown = BLOCK.sub(r"\1\2", MARK.sub(_table, markdown))
    return markdown if uri in PAGES.values() and uri != "index.md" else _moved(markdown, f"docs/{uri}", uri)


def _outside(page: Path) -> set[str]:
    """The files of the repository outside of docs/ that a page links to."""
    found = set()
    for _, target, _ in LINK.findall(page.read_text()):
        path = os.path.normpath(os.path.join(page.parent.relative_to(ROOT), target))
        if "://" not in target and not path.startswith(("docs", "..")) and (ROOT / path).exists():
            found.add(path)
    return found


def _moved(text: str, source: str, page: str) -> str:
    """The text of a file as a page elsewhere: its links lead to pages of the site."""

    def link(found: re.Match[str]) -> str:
        begin, target, anchor = found.groups()
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        if "://" in target or not (ROOT / path).exists():
            return found.group(0)
        inside = path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path, f"source/{path}.md")
        return f"{begin}{os.path.relpath(inside, os.path.dirname(page))}{anchor or ''})"

    return LINK.sub(link, text)


def _text_of(path: str) -> str:
    """A page that shows a file."""
    text = (ROOT / path).read_text()
    head = f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n"
    if path.endswith(".md"):
        return head + LINK.sub(r"](\2)", _unlinked(text))
    return f"{head}`````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}\n`````\n"


def _unlinked(text: str) -> str:
    """A text without links and without its first heading."""
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).partition("\n")[2]


def _listing(path: str) -> str:
    """A page that shows the files of a folder."""
    shown = sorted(one for one in (ROOT / path).iterdir() if one.suffix in LANGUAGES)
    texts = [f"## {one.name}\n\n`````{LANGUAGES[one.suffix]}\n{one.read_text()}\n`````" for one in shown]
    return "\n\n".join([f"---\nsearch:\n  exclude: true\n---\n# {path}", *texts])


def _table(found: re.Match[str]) -> str:
    return _errors() if found.group(1) == "errors" else _options(found.group(2))


def _errors() -> str:
    """A row for each error and warning: what it means, and what to do."""
    rows = ["| error | is also a | what it means | what to do |", "|---|---|---|---|"]
    for name in shoal.errors.__all__:
        kind = getattr(shoal.errors, name)
        meaning, _, rest = " ".join((kind.__doc__ or "").split("Attributes:")[0].split()).partition("What to do: ")
        bases = [base.__name__ for base in kind.__bases__ if base.__module__ == "builtins" and base is not Exception]
        rows.append(
            f"| [`{name}`][shoal.errors.{name}] | {', '.join(f'`{one}`' for one in bases)} | {meaning} | {rest} |"
        )
    return "\n".join(rows)


def _options(command: str) -> str:
    """A row for each option of a command of `shoal`."""
    importlib.import_module("shoal.cli.main")
    parser = argparse.ArgumentParser(prog=f"shoal {command}")
    add_options(parser, COMMANDS[command][1])
    rows = ["| option | what it does |", "|---|---|"]
    for action in parser._actions[1:]:  # the first is --help
        names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        value = f" {action.metavar}" if action.option_strings and isinstance(action.metavar, str) else ""
        rows.append(f"| `{names}{value}` | {(action.help or '').replace('|', '/')} |")
    return "\n".join(rows) if len(rows) > 2 else "No options."

"""The sizes of the house: functions, constructors, files, and what lies at the top of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
LONGEST_FUNCTION = 60  # lines, docstring and comments counted
MOST_ARGUMENTS = 6  # of a constructor in the engine, without self
LONGEST_FILE = 500  # lines
MODULES_AT_THE_TOP = 10  # without __init__
ENGINE = ("engine", "backends", "worker", "remote")

module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
Function = ast.FunctionDef | ast.AsyncFunctionDef


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


@module
def test_functions_fit_on_a_screen(path: Path) -> None:
    found = {
        node.name: lines
        for node in nodes(path)
        if isinstance(node, Function) and (lines := (node.end_lineno or 0) - node.lineno + 1) > LONGEST_FUNCTION
    }
    assert not found, f"these functions have more than {LONGEST_FUNCTION} lines: {found}"


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.relative_to(ROOT).parts[0] in ENGINE], ids=lambda path: path.stem
)
def test_constructors_of_the_engine_take_few_arguments(path: Path) -> None:
    found = {}
    for node in nodes(path):
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    given = method.args
                    count = len([*given.posonlyargs, *given.args, *given.kwonlyargs]) - 1
                    if count > MOST_ARGUMENTS:
                        found[node.name] = count
    assert not found, f"these constructors take more than {MOST_ARGUMENTS} arguments: {found}"


@module
def test_files_are_of_one_topic(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST_FILE, f"{path} has {lines} lines: which part of it is a topic of its own?"


def test_few_modules_lie_at_the_top() -> None:
    at_the_top = [path.name for path in ROOT.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    assert len(at_the_top) <= MODULES_AT_THE_TOP, sorted(at_the_top)


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.name == "__init__.py"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_package_says_what_it_does(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path}: what does this package do, what may it import?"

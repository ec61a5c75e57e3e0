"""Public names say what they do, what they take and what they raise: what `help` and the reference show."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest

import shoal
from shoal import errors
from shoal.options import PoolKeywords, PoolOptions

# Modules whose `__all__` is public, and what must be installed for each.
MODULES = {
    "shoal": "", "shoal.wrappers": "", "shoal.compiled": "numba", "shoal.compiled.cuda": "numba", "shoal.ranks": "",
    "shoal.emulation": "", "shoal.graph.jax": "jax", "shoal.graph.torch": "torch",
    "shoal.graph.tensorflow": "tensorflow", "shoal.torchrl": "torchrl", "shoal.scaling": "",
    **{f"shoal.dialects.{name}": "" for name in
       ("gymnasium", "gymnasium029", "sb3", "baselines", "puffer", "envpool", "sample_factory", "batch_env")},
    "shoal.dialects.agents": "pettingzoo", "shoal.dialects.dm_env": "dm_env", "shoal.dialects.tianshou": "tianshou",
    "shoal.dialects.torchrl": "torchrl", "shoal.dialects.tf_agents": "tf_agents",
}  # fmt: skip
# Methods that do what the other library says, and stand in its own reference.
THEIRS = re.compile(r"shoal\.(dialects|torchrl)\.")
OBVIOUS = {"self", "cls", "args", "kwargs", "_"}


def public() -> Iterator[Any]:
    for module, needs in MODULES.items():
        skipped = pytest.mark.skipif(bool(needs) and not _installed(needs), reason=f"needs {needs}")
        yield pytest.param(module, id=module, marks=skipped)


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def names_of(module: str) -> Iterator[tuple[str, Any]]:
    """The public classes and functions of a module that are Shoal's own."""
    found = importlib.import_module(module)
    for name in found.__all__:
        value = getattr(found, name)
        if callable(value) and str(getattr(value, "__module__", "")).startswith("shoal"):
            yield f"{module}.{name}", value


def functions_of(module: str) -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Public functions, constructors and methods of a module, with the docstring that is to explain each."""
    for name, value in names_of(module):
        if not inspect.isclass(value):
            yield name, value, inspect.getdoc(value) or ""
            continue
        about = inspect.getdoc(value) or ""
        if "__init__" in vars(value) and not issubclass(value, BaseException):
            yield name, value.__init__, about + "\n" + (vars(value)["__init__"].__doc__ or "")
        for inner, method in vars(value).items():
            if inspect.isfunction(method) and not inner.startswith("_") and not THEIRS.match(name):
                yield f"{name}.{inner}", method, inspect.getdoc(method) or ""


@pytest.mark.parametrize("module", public())
def test_everything_says_what_it_does(module: str) -> None:
    silent = [name for name, value in names_of(module) if not _first_sentence(value.__doc__)]
    silent += [name for name, _, text in functions_of(module) if not _first_sentence(text)]
    assert silent == []


def _first_sentence(text: str | None) -> bool:
    first = (text or "").strip().partition("\n")[0]
    return len(first.split()) >= 3 and bool(re.search(r"[.:;!?)]", text or ""))


@pytest.mark.parametrize("module", public())
def test_every_argument_is_explained(module: str) -> None:
    missing = {}
    for name, function, text in functions_of(module):
        known = {field.name for field in fields(PoolOptions)} if "PoolOptions" in text else set()
        arguments = [one for one in _arguments(function) if one not in OBVIOUS | known and not one.startswith("_")]
        unsaid = [one for one in arguments if not re.search(rf"\b{re.escape(one)}\b", text)]
        # One argument of a clear name that the sentence is about needs no list.
        if unsaid and (len(arguments) > 1 or "Args:" in text):
            missing[name] = unsaid
    assert missing == {}


def _arguments(function: Callable[..., Any]) -> list[str]:
    code = inspect.unwrap(function)
    return list(inspect.signature(code, follow_wrapped=False).parameters) if inspect.isfunction(code) else []


@pytest.mark.parametrize("module", public())
def test_what_is_explained_is_an_argument(module: str) -> None:
    wrong = {}
    for name, function, text in functions_of(module):
        arguments, section = set(_arguments(function)), re.search(r"\bArgs:\n((?:    .*\n|\n)*)", text + "\n")
        told = re.findall(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \(.*\))?:", section.group(1), re.M) if section else []
        options = bool(arguments & {"options", "pool_options", "kwargs", "settings"}) or "PoolOptions" in text
        found = {one.strip("* ") for names in told for one in names.split(",")}
        if not options and found - arguments:
            wrong[name] = sorted(found - arguments)
    assert wrong == {}


@pytest.mark.parametrize("module", public())
def test_what_is_raised_is_said(module: str) -> None:
    silent = {}
    for name, function, text in functions_of(module):
        raised = _raised(function)
        if raised and not re.search(r"[Rr]aise|[Rr]efuse|[Ee]rror|must|[Ii]f it is not", text):
            silent[name] = sorted(raised)
    assert silent == {}


def _raised(function: Callable[..., Any]) -> set[str]:
    """The classes that a function raises itself, by their names in its source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError):
        return set()
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return {ast.unparse(call.func) for call in calls} - {"NotImplementedError", "AttributeError", "KeyError"}


def test_every_error_says_what_it_means_and_what_to_do() -> None:
    for name in errors.__all__:
        text = inspect.getdoc(getattr(errors, name)) or ""
        meaning, found, advice = text.partition("What to do: ")
        assert found, f"{name}: what shall a user do?"
        assert meaning.strip().endswith("."), name
        assert advice.partition("\n\n")[0].strip().endswith("."), name


def test_help_gets_a_user_going() -> None:
    text = inspect.getdoc(shoal.make) or ""
    for needed in ("shoal.make(", "reset(", "step(", "close()", "backend", "on_error", "num_envs", "Raises:"):
        assert needed in text
    for api in importlib.import_module("shoal.make")._APIS:
        assert f'"{api}"' in text, api


def test_options_are_told_by_topic_and_all_of_them() -> None:
    text = inspect.getdoc(PoolOptions) or ""
    topics = text.partition("Attributes:")[0]
    for field in fields(PoolOptions):
        assert re.search(rf"\b{field.name}\b", topics), f"{field.name} belongs to no topic"
        assert re.search(rf"^    {field.name}: ", text, re.MULTILINE), f"{field.name} is not explained"
    told = re.findall(r"^    (\w+): ", text.partition("Attributes:")[2], re.MULTILINE)
    assert told == [field.name for field in fields(PoolOptions)]


def test_type_checkers_know_the_same_options() -> None:
    typed = {name: hint.__forward_arg__ for name, hint in PoolKeywords.__annotations__.items()}
    assert typed == {field.name: field.type for field in fields(PoolOptions)}

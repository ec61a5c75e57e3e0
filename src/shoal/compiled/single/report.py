"""Says whether LLVM has turned the loop over lanes into vector code, and which line of the class stopped it if not."""

from __future__ import annotations

import dis
import linecache
import re
from typing import Any

from shoal.compiled.definition import Definition, single_versions
from shoal.compiled.narrow import MOST_COLUMNS
from shoal.compiled.rebuild import all_functions

# Functions of math and numpy that have no form for many lanes, and are called lane by lane.
SLOW = frozenset(
    {
        "sinh", "cosh", "asinh", "acosh", "atanh", "erf", "erfc", "gamma", "lgamma", "fmod", "expm1", "log1p", "cbrt",
        "exp2", "remainder", "arcsinh", "arccosh", "arctanh", "nextafter", "ldexp", "frexp",
    }
)  # fmt: skip
SHORT_LOOP = 16  # turns of a loop that LLVM writes out


def lanes_at_once(text: str) -> int:
    """Return how many lanes are stepped by one instruction, by the text of a kernel: how many rewards one stores."""
    scopes = re.findall(r'^(!\d+) = (?:distinct )?!\{!"shoal arrays \d+ reward", ', text, re.MULTILINE)
    lists = [one for scope in scopes for one in re.findall(rf"^(!\d+) = !\{{{scope}\}}", text, re.MULTILINE)]
    stores = re.findall(r"store <(\d+) x double> %[^\n]*!alias\.scope (!\d+)", text)
    return max((int(width) for width, scope in stores if scope in lists), default=1)


def why_one_by_one(definition: Definition) -> str:
    """Say what keeps the lanes of a class from being stepped together, with its line where it has one."""
    if definition.num_agents > 1:
        return "it has several agents"
    names = definition.dtype.names or ()
    arrays = [name for name in names if definition.dtype[name].shape]
    if arrays:
        return f"the field {arrays[0]!r} is an array: only fields that are numbers lie in registers"
    if len(names) > MOST_COLUMNS:
        return f"it has {len(names)} fields, and {MOST_COLUMNS} at most lie in registers"
    methods = ("step", "reset", "observe")
    found = [(rank, where) for method in methods for rank, where in _obstacles(definition, method)]
    return min(found, default=(9, "LLVM gives no reason"))[1]


def _obstacles(definition: Definition, method: str) -> list[tuple[int, str]]:
    """Return what may stop the vectorizer in a method and its helpers, with ranks: the lowest is the likeliest."""
    found = []
    for function in all_functions(getattr(definition, method)):
        code = single_versions.get(function, function).__code__
        what = f"{definition.name}.{method}" if function is getattr(definition, method) else function.__name__
        line, ranges = code.co_firstlineno, _short_loops(code)
        starts = {start: number for start, _, number in code.co_lines()}
        for one in dis.get_instructions(code):
            line = starts.get(one.offset) or line
            place = f"({code.co_filename}:{line}: {linecache.getline(code.co_filename, line).strip()})"
            if one.opname == "RAISE_VARARGS":
                found.append((0, f"{what} may raise {place}"))
            elif "JUMP_BACKWARD" in one.opname and method != "reset":
                short = one.argval in ranges
                kind = "a loop, which may end early" if short else "a loop of unknown length"
                found.append((3 if short else 1, f"{what} has {kind} {place}"))
            elif one.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL") and one.argval in SLOW:
                found.append((2, f"{what} calls {one.argval}, which has no form for many lanes {place}"))
    return found


def _short_loops(code: Any) -> set[int]:
    """Return where loops over `range` of a few turns, written in the code, begin: LLVM writes them out."""
    instructions, found = list(dis.get_instructions(code)), set()
    for i, one in enumerate(instructions):
        if one.opname != "FOR_ITER":
            continue
        numbers = [back.argval for back in instructions[max(0, i - 7) : i] if back.opname == "LOAD_CONST"]
        calls = [back.argval for back in instructions[max(0, i - 9) : i] if back.opname == "LOAD_GLOBAL"]
        if "range" in calls and numbers and all(isinstance(n, int) and abs(n) <= SHORT_LOOP for n in numbers):
            found.add(one.offset)
    return found


def remark(definition: Definition, lanes: int) -> str:
    """Say in words how the class is stepped."""
    if lanes > 1:
        return f"single precision, {lanes} lanes at once"
    return f"single precision, lane by lane: {why_one_by_one(definition)}; `shoal doctor ENV` measures what that costs"

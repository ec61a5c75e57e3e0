"""Why Numba cannot compile a class or a policy, with the user's own lines and names."""

from __future__ import annotations

import dis
import inspect
import linecache
import re
from typing import Any

from shoal.compiled.definition import Definition, is_helper
from shoal.compiled.numba_cpu import jit
from shoal.compiled.numba_random import VERSIONS
from shoal.compiled.rebuild import Rebuilder, named_values
from shoal.compiled.source_parts import wide_type
from shoal.errors import BadEnv

_PLACE = re.compile(r"^During: .* at ([^\n]+) \((\d+)\)$", re.MULTILINE)
_FIELD = re.compile(r"Unknown attribute '(\w+)' of type Record")
_NAME = re.compile(r"Untyped global name '(\w+)'.*?Cannot determine Numba type of <class '([^']+)'>", re.DOTALL)
_UNDEFINED = re.compile(r"NameError: name '(\w+)' is not defined")
_NO_MATCH = re.compile(r"No implementation of function .*? found for signature:\s+>>> ([^\n]+)")
_NOISE = re.compile(
    r"Failed in \w+ mode pipeline|During:|File \"|<source|raised from|^-+\^?|Overload|^\s*>>>|There are \d+ candidate"
    r"|Of which \d+|With argument|Rejected as|^\s*$|def \w+\(|Enable logging"
)


def explain_env(definition: Definition, debug: bool, error: Exception) -> BadEnv:
    """Find the method that cannot be compiled, and say what is wrong in it."""
    from numba import types

    for method in ("reset", "step", "observe"):
        unknown = _unknown_field(definition, method)
        if unknown is not None:
            return unknown
    rebuild = Rebuilder(jit(debug), VERSIONS)
    for method, given in _signatures(definition).items():
        function = rebuild(getattr(definition, method))
        try:
            function.compile(given)
        except Exception as found:
            return _translate(definition, f"{definition.name}.{method}", getattr(definition, method), found)
        result = function.overloads[given].signature.return_type
        if method == "step" and not _is_right(result, definition.num_agents, types):
            wanted = "(reward, terminated), a number and a bool" if definition.num_agents == 1 else "terminated, a bool"
            where = _place(definition.step.__code__.co_filename, definition.step.__code__.co_firstlineno)
            return BadEnv(f"{definition.name}.step must return {wanted}, found {result} ({where})")
    return BadEnv(f"{definition.name} cannot be compiled: {_reason(str(error))}")


def explain_policy(definition: Definition, policy: Any, error: Exception) -> BadEnv:
    """Say what is wrong with a policy."""
    return _translate(definition, policy.__name__, policy, error)


def _signatures(definition: Definition) -> dict[str, tuple[Any, ...]]:
    """Return the types that the methods are called with."""
    from numba import from_dtype, types

    agents = (1,) if definition.num_agents > 1 else ()
    state, rng = from_dtype(definition.dtype), types.Array(types.uint64, 1, "C")

    def array(leaf: Any, dtype: Any, least: int) -> Any:
        return types.Array(from_dtype(dtype), max(len(leaf.shape) + len(agents), least), "C")

    obs = [array(leaf, leaf.dtype, 1) for leaf in definition.obs_leaves]
    action = [
        array(leaf, wide_type(leaf), 1) if leaf.shape or agents else from_dtype(wide_type(leaf))
        for leaf in definition.action_leaves
    ]
    seen = types.Tuple(obs) if definition.nested_obs else obs[0]
    given = types.Tuple(action) if definition.nested_action else action[0]
    rewards = (types.Array(types.float64, 1, "C"),) if agents else ()
    return {"reset": (state, rng), "step": (state, given, *rewards, rng), "observe": (state, seen)}


def _is_right(result: Any, agents: int, types: Any) -> bool:
    """Say whether `step` returns what it should."""
    plain = (types.Number, types.Boolean)
    if agents > 1:
        return isinstance(result, plain)
    return isinstance(result, types.BaseTuple) and len(result) == 2 and all(isinstance(one, plain) for one in result)


def _unknown_field(definition: Definition, method: str) -> BadEnv | None:
    """Find a field that a method uses, and the state does not have: Numba has no useful message for some of these."""
    code = getattr(definition, method).__code__
    state, fields = code.co_varnames[0], definition.dtype.names or ()
    lines = [(start, line) for start, _, line in code.co_lines()]
    on_state = False
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_ATTR", "STORE_ATTR") and on_state and one.argval not in fields:
            line = [number for start, number in lines if start <= one.offset and number is not None][-1]
            what = _no_field(definition, one.argval)
            return BadEnv(f"{definition.name}.{method} cannot be compiled: {what} ({_place(code.co_filename, line)})")
        last = one.argval[-1] if isinstance(one.argval, tuple) and one.argval else one.argval
        # `state.x += 1` copies the state between these two instructions.
        on_state = (one.opname.startswith("LOAD_FAST") and last == state) or (
            on_state and one.opname in ("COPY", "DUP_TOP")
        )
    return None


def _no_field(definition: Definition, name: str) -> str:
    return f"the state has no field {name!r}, its fields are {', '.join(definition.dtype.names or ())}"


def _translate(definition: Definition, what: str, function: Any, error: Exception) -> BadEnv:
    text = str(error)
    code = function.__code__
    places = [(file, int(line)) for file, line in _PLACE.findall(text) if file in _files(function)]
    location = getattr(error, "loc", None)
    if not places and location is not None and location.filename == code.co_filename:
        places = [(location.filename, location.line)]
    # If the mistake is in a helper, the helper's line is the one to name.
    own_lines = {line for _, _, line in code.co_lines()}
    inside = [place for place in places if place[0] != code.co_filename or place[1] not in own_lines]
    file, line = inside[0] if inside else places[-1] if places else (code.co_filename, code.co_firstlineno)
    return BadEnv(f"{what} cannot be compiled: {_in_words(definition, text)} ({_place(file, line)})")


def _files(function: Any) -> set[str]:
    """Return the files of a function and of its helpers."""
    files, left = set(), [function]
    seen: set[Any] = set()
    while left:
        one = left.pop()
        if one in seen:
            continue
        seen.add(one)
        files.add(one.__code__.co_filename)
        left += [value for _, value in named_values(one) if is_helper(value)]
    return files


def _place(file: str, line: int) -> str:
    source = linecache.getline(file, line).strip()
    return f"{file}:{line}: {source}" if source else f"{file}:{line}"


def _in_words(definition: Definition, text: str) -> str:
    field = _FIELD.search(text)
    if field:
        return _no_field(definition, field[1])
    undefined = _UNDEFINED.search(text)
    if undefined:
        return f"there is no name {undefined[1]!r}"
    name = _NAME.search(text)
    if name and name[2] == "function":
        return f"it calls {name[1]!r}, which is no compiled function: put @compiled.function above its definition"
    if name:
        return f"{name[1]!r} is a {name[2]}, which compiled code cannot use: numbers, tuples and numpy arrays it can"
    return _reason(text)


def _reason(text: str) -> str:
    """Return Numba's own reason, in one sentence."""
    call = _NO_MATCH.search(text)
    if call:
        return "there is no " + re.sub(r"Literal\[(\w+)\]\([^)]*\)", r"\1", call[1])
    lines = [inspect.cleandoc(line) for line in text.splitlines() if not _NOISE.search(line)]
    useful = [line.strip() for line in lines if line.strip()]
    return " ".join(useful[:2]).removesuffix(":") or "Numba gives no reason"

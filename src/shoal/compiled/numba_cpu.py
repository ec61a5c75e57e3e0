"""Compiling for the CPU by Numba: source that calls a user's functions becomes machine code.

Where it cannot, the reason is found, with the user's own lines and names.
"""

from __future__ import annotations

import dis
import functools
import inspect
import linecache
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from shoal.compiled.definition import Definition, is_helper, single_versions
from shoal.compiled.random import VERSIONS
from shoal.compiled.rebuild import Rebuilder, all_functions, named_values
from shoal.compiled.template import wide_type
from shoal.errors import BadEnv

_NUMBAS_OWN = ("NRT_", "numba_", "Py", "_Py")  # how the names of functions begin that exist only where Numba runs
# What Numba's own errors say.
_PLACE = re.compile(r"^During: .* at ([^\n]+) \((\d+)\)$", re.MULTILINE)
_FIELD = re.compile(r"Unknown attribute '(\w+)' of type Record")
_NAME = re.compile(r"Untyped global name '(\w+)'.*?Cannot determine Numba type of <class '([^']+)'>", re.DOTALL)
_UNDEFINED = re.compile(r"NameError: name '(\w+)' is not defined")
_NO_MATCH = re.compile(r"No implementation of function .*? found for signature:\s+>>> ([^\n]+)")
_NOISE = re.compile(
    r"Failed in \w+ mode pipeline|During:|File \"|<source|raised from|^-+\^?|Overload|^\s*>>>|There are \d+ candidate"
    r"|Of which \d+|With argument|Rejected as|^\s*$|def \w+\(|Enable logging"
)


class Source(NamedTuple):
    """What is to be compiled.

    Attributes:
        entry: the name of the function in the text that is to be called.
        functions: the user's functions that it calls, by the names that it has for them.
        values: all else that it needs, by name.
        debug: whether the user's functions check indices.
        single: the class, if it is to be compiled in single precision.
    """

    entry: str
    text: str
    functions: Mapping[str, Any]
    values: Mapping[str, Any]
    debug: bool
    single: Definition | None = None

    @property
    def kind(self) -> dict[str, Any]:
        """Return what the compiled code depends on beside text, functions and values."""
        if self.single is None:
            return {}
        used = [helper for one in self.functions.values() for helper in all_functions(one)]
        return {"single precision": self.single.dtype, "versions": [single_versions.get(one) for one in used]}


class Machine(NamedTuple):
    """A compiled function.

    Attributes:
        symbol: its name in the object code.
        needs_numba: whether it calls functions that only Numba has.
        code: an object file.
        lanes: how many envs it steps at once, where that can be more than one.
    """

    symbol: str
    needs_numba: bool
    code: bytes
    lanes: int = 1


def compile_source(source: Source) -> Machine:
    """Compile source. Raises what Numba raises."""
    from numba import types

    rebuild, names = Rebuilder(jit(source.debug), VERSIONS), {**source.values, "array_at": array_at()}
    if source.single is not None:
        from shoal.compiled.single.build import local_names, rebuilder

        rebuild = rebuilder(source.debug)
        names.update(local_names(source.single, source.entry, source.values.get("WIDEST", 0)))
    names.update((name, rebuild(one)) for name, one in source.functions.items())
    exec(compile(source.text, f"<shoal {source.entry}>", "exec"), names)
    function = jit(False)(names[source.entry])  # its own indices need no checks
    function.compile((types.int64,) * 4)
    found = function.overloads[(types.int64,) * 4]
    library = found.library
    outside = [one.name for one in library._final_module.functions if one.is_declaration]
    needs_numba = any(name.startswith(_NUMBAS_OWN) for name in outside)
    lanes = 1
    if source.single is not None:
        from shoal.compiled.single.report import lanes_at_once

        lanes = lanes_at_once(library.get_llvm_str())
    return Machine(found.fndesc.llvm_func_name, needs_numba, library._get_compiled_object(), lanes)


def jit(debug: bool) -> Any:
    """Return the decorator that compiles for the CPU; not with fastmath, so that results equal plain Python's."""
    import numba

    # Wrappers for calls from Python would take longer to compile than the functions themselves.
    return numba.njit(error_model="numpy", boundscheck=debug, no_cpython_wrapper=True, no_cfunc_wrapper=True)


@functools.cache
def array_at() -> Any:
    """Make the function array_at(address, shape, dtype) of compiled code. Numba's own carray takes long to compile."""
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic
    from numba.np.arrayobj import make_array, populate_array

    def build(typing_context: Any, address: Any, shape: Any, dtype: Any) -> Any:
        array_type = types.Array(dtype.dtype, len(shape), "C")

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sizes = [
                context.cast(builder, size, kind, types.intp)
                for size, kind in zip(cgutils.unpack_tuple(builder, args[1]), shape, strict=True)
            ]
            item_type = context.get_data_type(array_type.dtype)
            item_size = context.get_constant(types.intp, context.get_abi_sizeof(item_type))
            strides: list[Any] = [item_size]
            for size in reversed(sizes[1:]):
                strides.insert(0, builder.mul(strides[0], size))
            array = make_array(array_type)(context, builder)
            populate_array(
                array, data=builder.inttoptr(args[0], item_type.as_pointer()), shape=cgutils.pack_array(builder, sizes),
                strides=cgutils.pack_array(builder, strides), itemsize=item_size, meminfo=None,
            )  # fmt: skip
            return array._getvalue()

        return array_type(address, shape, dtype), generate

    return intrinsic(build)


# ---- errors ----------------------------------------------------------------------------------------------------


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
            return explain(definition, f"{definition.name}.{method}", getattr(definition, method), found)
        result = function.overloads[given].signature.return_type
        if method == "step" and not _is_right(result, definition.num_agents, types):
            wanted = "(reward, terminated), a number and a bool" if definition.num_agents == 1 else "terminated, a bool"
            where = _place(definition.step.__code__.co_filename, definition.step.__code__.co_firstlineno)
            return BadEnv(f"{definition.name}.step must return {wanted}, found {result} ({where})")
    return BadEnv(f"{definition.name} cannot be compiled: {_reason(str(error))}")


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


def explain(definition: Definition, what: str, function: Any, error: Exception) -> BadEnv:
    """Say what is wrong with a function that Numba cannot compile; `what` is its name."""
    text = str(error)
    code = function.__code__
    files = _files(function, set())
    places = [(file, int(line)) for file, line in _PLACE.findall(text) if file in files]
    location = getattr(error, "loc", None)
    if not places and location is not None and location.filename == code.co_filename:
        places = [(location.filename, location.line)]
    # If the mistake is in a helper, the helper's line is the one to name.
    own_lines = {line for _, _, line in code.co_lines()}
    inside = [place for place in places if place[0] != code.co_filename or place[1] not in own_lines]
    file, line = inside[0] if inside else places[-1] if places else (code.co_filename, code.co_firstlineno)
    return BadEnv(f"{what} cannot be compiled: {_in_words(definition, text)} ({_place(file, line)})")


def _files(function: Any, seen: set[Any]) -> set[str]:
    """Return the files of a function and of its helpers, except those seen already."""
    seen.add(function)
    files = {function.__code__.co_filename}
    for _, value in named_values(function):
        if is_helper(value) and value not in seen:
            files |= _files(value, seen)
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

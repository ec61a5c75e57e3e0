"""The state of one env as data: saved from a running env, loaded into a freshly built one.

An env is taken as its layers: the wrappers from the outside in, and the env within. Each is saved in one of two ways:

- "own": by its get_state() and set_state(state), if its class has both and the state is plain data. It speaks for what
  lies in itself; its random generators and those of its spaces are saved beside it, as they are often forgotten.
- "fields": by its attributes, if they are plain data (see datafile), spaces, references to the layers and their
  methods, or constants: classes, modules, enum members, and functions that hold no state. Constants are known by name.

A layer below an "own" one is saved by its own pair or its fields too, so that a wrapper's pair need not know of it. If
it has neither, the wrapper's pair is taken to speak for it. Loading calls set_state from the inside out, then sets the
generators, then the fields of the other layers.

Where this is not possible the whole env is pickled ("pickle"), and loading executes what the pickle says. An env whose
pickle is known to lose state is refused. State that is in no attribute, in a module's variables or behind a number that
stands for something in a library, can be known to get_state() only.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import hashlib
import inspect
import io
import json
import random
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import EzPickle, RecordConstructorArgs

from shoal.state import datafile
from shoal.state.datafile import CannotSave, DataError, Decoder, Encoder, Place

__all__ = ["CannotSave", "EnvState", "load_env", "save_env"]

ADVICE = "give the env get_state() and set_state(state), which return and take plain data"
_MISSING = object()
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_NUMPY_FUNCTIONS: tuple[Any, ...] = (np.ufunc, type(np.mean))
_ATOMS = (type(None), bool, int, float, complex, str, bytes)
_HARMLESS = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)


@dataclass(frozen=True)
class EnvState:
    """What save_env found.

    Attributes:
        kind: "own" or "fields" for data, "own" if any layer's get_state() was used; "pickle".
        content: plain data for datafile; the bytes of a pickle.
    """

    kind: str
    content: Any


def save_env(env: Any) -> EnvState:
    """The state of an env at this moment, which does not change when the env goes on; the env is left as it is.

    Raises:
        CannotSave: with the reason in words, if what was saved could not be relied on.
    """
    layers = _layers(env)
    try:
        return _save_as_data(layers)
    except CannotSave as error:
        reasons = [error, *(reason for i in range(len(layers)) if (reason := _why_not_fields(layers, i)))]
    for reason in reasons:
        if reason.final:
            raise reason
    return EnvState("pickle", _pickled(env, layers, str(reasons[0])))


def load_env(state: EnvState, env: Any) -> Any:
    """The env to use from now on: the given one with its state set, or that of a pickle, and the given one is to close.

    Args:
        env: freshly built by the function that built the saved one. Its attributes are replaced, its spaces too: look
            them up again. Not to be used if this raises.

    Raises:
        ValueError: if the state does not fit it.
    """
    layers = _layers(env)
    if state.kind == "pickle":
        try:
            loaded = cloudpickle.loads(state.content)
        except Exception as error:
            raise DataError(f"the pickled env does not load ({type(error).__name__}: {error})") from error
        _check_chain(_chain(_layers(loaded)), layers)
        return loaded
    if state.kind not in ("own", "fields"):
        raise DataError(f"the state is of kind {state.kind!r}, which is unknown")
    try:
        document, decoder = json.loads(state.content["document"]), _EnvDecoder(state.content["arrays"], layers)
        _check_chain(document["layers"], layers)
        parts = [document[name] for name in ("random", "own", "fields")]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise DataError(f"the state is damaged ({type(error).__name__}: {error})") from error
    _load_data(parts, decoder, layers)
    return env


def _layers(env: Any) -> list[Any]:
    layers = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    return layers


def _chain(layers: Sequence[Any]) -> list[str]:
    return [f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in layers]


def _check_chain(saved: list[str], layers: Sequence[Any]) -> None:
    if saved != _chain(layers):
        raise DataError(f"the state is of {' over '.join(saved)}, and the env is {' over '.join(_chain(layers))}")


def _save_as_data(layers: list[Any]) -> EnvState:
    states = _own_states(layers)
    below = range(min(states, default=len(layers)), len(layers))
    spoken_for = [i for i in below if i in states or _why_not_fields(layers, i)]
    encoder = _EnvEncoder(layers)
    document = {
        "layers": _chain(layers),
        # In this order also at loading: what comes later may refer to what came before.
        "random": [[i, encoder.node(_generators(layers[i]), _name(layers, i))] for i in spoken_for],
        "own": [[i, encoder.node(state, f"{_name(layers, i)} get_state()")] for i, state in states.items()],
        "fields": [[i, encoder.fields(i)] for i in range(len(layers)) if i not in spoken_for],
    }
    encoded = encoder.finish(document)
    content = {"document": json.dumps(encoded.document, allow_nan=False), "arrays": encoded.arrays}
    return EnvState("own" if states else "fields", content)


def _load_data(parts: Sequence[Any], decoder: _EnvDecoder, layers: list[Any]) -> None:
    saved_random, saved_own, saved_fields = parts
    generators = [(i, decoder.decode(node)) for i, node in saved_random]
    states = [(i, decoder.decode(node)) for i, node in saved_own]
    for i, state in reversed(states):
        layers[i].set_state(state)
    for i, found in generators:
        _set_generators(layers[i], found, decoder)
    fields = [(i, decoder.fields(i, nodes)) for i, nodes in saved_fields]
    for i, values in fields:
        _set_fields(layers[i], values)


def _own_states(layers: list[Any]) -> dict[int, Any]:
    """What get_state() returned, of those layers whose class has the pair and where it is plain data."""
    found = {}
    for i, layer in enumerate(layers):
        if not (_can_call(layer, "get_state") and _can_call(layer, "set_state", None)):
            continue
        try:
            state = layer.get_state()
            _EnvEncoder(layers).node(state, "")
        except NotImplementedError:
            continue
        except CannotSave as error:
            if error.final:
                raise
            continue
        except Exception as error:
            text = f"{_name(layers, i)} get_state() raised {type(error).__name__}: {error}"
            raise CannotSave(text, final=True) from error
        found[i] = state
    return found


def _can_call(layer: Any, name: str, *args: Any) -> bool:
    # Of the class: a wrapper may pass on what it is asked for. With these arguments: set_state(qpos, qvel) is another.
    if not callable(getattr(type(layer), name, None)):
        return False
    with contextlib.suppress(ValueError):  # no signature to be had: written in C
        try:
            inspect.signature(getattr(layer, name)).bind(*args)
        except TypeError:
            return False
    return True


def _why_not_fields(layers: list[Any], index: int) -> CannotSave | None:
    try:
        _EnvEncoder(layers).fields(index)
    except CannotSave as error:
        return error
    return None


def _name(layers: Sequence[Any], index: int) -> str:
    return "its" if index == len(layers) - 1 else f"its wrapper {type(layers[index]).__name__}'s"


def _is_fixed(layer: Any, name: str, value: Any) -> bool:
    """Whether an attribute is a link or was set once and for all: the freshly built env has it."""
    return (
        isinstance(value, EnvSpec)
        or (isinstance(layer, gymnasium.Wrapper) and name in ("env", "_cached_spec"))
        or (isinstance(layer, RecordConstructorArgs) and name == "_saved_kwargs")
        or (isinstance(layer, EzPickle) and name in ("_ezpickle_args", "_ezpickle_kwargs"))
    )


def _slots(kind: type) -> dict[str, Any]:
    members = [item for cls in reversed(kind.__mro__) for item in vars(cls).items()]
    return {name: member for name, member in members if isinstance(member, types.MemberDescriptorType)}


def _attributes(thing: Any) -> dict[str, Any]:
    found = dict(getattr(thing, "__dict__", {}))
    for name, slot in _slots(type(thing)).items():
        with contextlib.suppress(AttributeError):  # not set
            found[name] = slot.__get__(thing)
    return found


def _put(thing: Any, values: dict[str, Any]) -> None:
    """Set attributes, past any __setattr__."""
    slots = _slots(type(thing))
    for name, value in values.items():
        if name in slots:
            slots[name].__set__(thing, value)
        else:
            vars(thing)[name] = value


def _set_fields(layer: Any, values: dict[str, Any]) -> None:
    """Leave the layer with these attributes and no others."""
    fresh = _attributes(layer)
    kept = {name: value for name, value in fresh.items() if _is_fixed(layer, name, value)}
    slots = _slots(type(layer))
    for name in fresh.keys() & slots.keys():
        slots[name].__delete__(layer)
    getattr(layer, "__dict__", {}).clear()
    _put(layer, kept | values)


def _hides_state(kind: type) -> bool:
    """Whether instances have room for more than their attributes, as those of classes written in C do."""
    while kind is not object:
        base: type = kind.__base__ or object
        slots = kind.__dict__.get("__slots__", ())
        room = 1 if isinstance(slots, str) else len(tuple(slots))
        room += (kind.__dictoffset__ != base.__dictoffset__) + (kind.__weakrefoffset__ != base.__weakrefoffset__)
        if kind.__basicsize__ - base.__basicsize__ > room * 8 or kind.__itemsize__:
            return True
        kind = base
    return False


def _spaces_in(value: Any) -> Iterator[Space[Any]]:
    """A space and those within it, always in the same order."""
    if isinstance(value, Space):
        yield value
        value = vars(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for item in items:
        yield from _spaces_in(item)


def _generators(layer: Any) -> dict[str, Any]:
    """The random generators in a layer's attributes, and lists of those in its spaces."""
    found: dict[str, Any] = {}
    for name, value in _attributes(layer).items():
        if isinstance(value, Space):
            found[name] = [vars(space).get("_np_random") for space in _spaces_in(value)]
        elif isinstance(value, _GENERATORS) or name == "_np_random_seed":
            found[name] = value
    return found


def _set_generators(layer: Any, found: dict[str, Any], decoder: Decoder) -> None:
    for name, saved in found.items():
        present = _attributes(layer).get(name)
        if not isinstance(saved, list):
            _put(layer, {name: _revived(present, saved, decoder)})
            continue
        spaces = list(_spaces_in(present))
        if len(spaces) != len(saved):
            raise DataError(f"the env's attribute {name!r} is not the space that was saved")
        for space, generator in zip(spaces, saved, strict=True):
            vars(space)["_np_random"] = _revived(vars(space).get("_np_random"), generator, decoder)


def _revived(present: Any, saved: Any, decoder: Decoder) -> Any:
    """The present generator in the saved state: others may share it. The saved one where the two are not alike."""
    if type(saved) not in _GENERATORS or type(present) is not type(saved):
        return saved
    if type(saved) is random.Random:
        present.setstate(saved.getstate())
    else:
        bits, saved_bits = present._bit_generator, saved._bit_generator
        if type(bits) is not type(saved_bits):
            return saved
        bits.state = saved_bits.state
        if type(saved) is np.random.RandomState:
            present.set_state(saved.get_state(legacy=False))
        decoder.replace(saved_bits, bits)
    decoder.replace(saved, present)
    return present


class _Constants:
    """Things that are the same after building anew and hold no state. They are described, and found again, by name."""

    def __init__(self, layers: Sequence[Any]):
        self._layers = layers
        classes = {cls for layer in layers for cls in type(layer).__mro__}
        self._classes = [cls for cls in classes if cls.__module__ not in sys.stdlib_module_names]

    def describe(self, value: Any) -> list[str] | None:
        """What tells it from others: kind, module, name, and more if the name does not say it all; None if it is none.

        Raises:
            CannotSave: if it has state that pickle would lose as well, since it is only named there too.
        """
        if isinstance(value, enum.Enum):
            cls = type(value)
            member = ["member", cls.__module__, cls.__qualname__, str(value.name)]
            return member if self._member(*member[1:]) is value else None
        if isinstance(value, types.ModuleType):
            if value is random or value is np.random:
                raise CannotSave(
                    f"the module {value.__name__} draws for all: give the env a generator of its own", True
                )
            return ["module", value.__name__, "", ""]
        if isinstance(value, type):
            return ["class", value.__module__, value.__qualname__, ""]
        if isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType | None):
            return ["builtin", value.__module__, value.__qualname__, ""]
        if isinstance(value, _NUMPY_FUNCTIONS) and value is getattr(np, name := str(value.__name__), None):
            return ["builtin", "numpy", name, ""]
        return self._describe_function(value) if isinstance(value, types.FunctionType) else None

    def find(self, description: Sequence[str]) -> Any:
        """What is described, if it is of the env's own modules: data must not make an env call what they please."""
        kind, module, name, _ = description
        if kind == "member":
            return self._member(*description[1:])
        for found in self.named(module, name):
            harmless = isinstance(found, type) and (found in _HARMLESS or issubclass(found, np.generic))
            own = any(cls.__module__ == module for cls in self._classes)
            with contextlib.suppress(CannotSave):
                if (own or harmless) and self.describe(found) == list(description):
                    return found
        return _MISSING

    def named(self, module: str, name: str) -> Iterator[Any]:
        """All that goes by this name in this module. Nothing is imported or called for it."""
        spaces: list[Any] = [vars(sys.modules[module])] if module in sys.modules else []
        # What came to a worker by value, from a script, is known to the methods that came along only.
        methods = [f for cls in self._classes if cls.__module__ == module for f in vars(cls).values()]
        spaces += [f.__globals__ for f in methods if isinstance(f, types.FunctionType) and f.__module__ == module]
        for space in spaces:
            found: Any = None
            for part in name.split("."):
                found = space.get(part)
                space = vars(found) if isinstance(found, type) else {}
            if getattr(found, "__module__", None) == module and getattr(found, "__qualname__", None) == name:
                yield found

    def _member(self, module: str, name: str, member: str) -> Any:
        enums = [found for found in self.named(module, name) if isinstance(found, enum.EnumMeta)]
        return next((found.__members__[member] for found in enums if member in found.__members__), _MISSING)

    def _describe_function(self, function: types.FunctionType) -> list[str] | None:
        named = any(found is function for found in self.named(function.__module__, function.__qualname__))
        mark = self._mark_function(function, ())
        if mark is None and named:
            raise CannotSave(f"the function {function.__qualname__} holds state of its own: {ADVICE}", final=True)
        # A function that is found by its name may be mended between the runs; others must be the same to the letter.
        return None if mark is None else ["function", function.__module__, function.__qualname__, "" if named else mark]

    def _mark_function(self, function: types.FunctionType, within: tuple[Any, ...]) -> str | None:
        """A text that tells the function from others, None if it holds anything that may change."""
        if function in within:
            return "itself"
        try:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # still empty
            return None
        kept = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells]
        trusted = function.__module__.partition(".")[0] == "gymnasium"  # whose functions change nothing that they hold
        marks = [self._mark(value, trusted, (*within, function)) for value in kept]
        code, shared = function.__code__, function.__code__.co_freevars
        if None in marks or function.__dict__.keys() - {"__wrapped__"} or _rebinds(code, shared):
            return None
        return hashlib.sha256(f"{_code_text(code)} {marks}".encode()).hexdigest()[:16]

    def _mark(self, value: Any, trusted: bool, within: tuple[Any, ...]) -> str | None:
        if type(value) in _ATOMS or (isinstance(value, np.generic | np.dtype) and not isinstance(value, np.void)):
            return f"{type(value).__name__} {value!r}"
        for i, layer in enumerate(self._layers):
            if value is layer:
                return f"layer {i}"
        if type(value) is tuple or (trusted and type(value) is list):
            marks = [self._mark(item, trusted, within) for item in value]
            return None if None in marks else str(marks)
        if isinstance(value, types.FunctionType):
            return self._mark_function(value, within)
        if trusted and type(value) is np.ndarray:
            return f"{value.dtype} {value.shape} {value.tobytes()!r}"
        if trusted and isinstance(value, Space):
            return repr(value)
        description = self.describe(value)
        return None if description is None else str(description)


def _code_text(code: types.CodeType) -> str:
    consts = [
        _code_text(const) if isinstance(const, types.CodeType) else _const_text(const) for const in code.co_consts
    ]
    return f"{code.co_code!r} {code.co_names} {code.co_varnames} {code.co_freevars} {consts}"


def _const_text(const: Any) -> str:
    # The order of a set is another in each process.
    return str(sorted(map(repr, const))) if isinstance(const, frozenset) else repr(const)


def _rebinds(code: types.CodeType, names: Sequence[str]) -> bool:
    """Whether a function, or one within it, assigns to variables that it shares with others."""
    steps = [step for step in dis.get_instructions(code) if step.opname in ("STORE_DEREF", "DELETE_DEREF")]
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return any(step.argval in names for step in steps) or any(_rebinds(part, names) for part in inner)


def _is_record(kind: type) -> bool:
    """Whether objects of this class are no more than their attributes, and may be made without calling the class."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return (issubclass(kind, Space) or name == "gymnasium.wrappers.utils.RunningMeanStd") and not _hides_state(kind)


class _EnvEncoder(Encoder):
    """Knows the layers of an env, constants, and spaces."""

    def __init__(self, layers: Sequence[Any]):
        super().__init__()
        self._layers, self._constants = layers, _Constants(layers)
        self._attribute: Place = None

    def fields(self, index: int) -> Any:
        """All attributes of a layer that are state."""
        layer = self._layers[index]
        whose = _name(self._layers, index)
        if _hides_state(type(layer)):
            raise CannotSave(f"{whose} class {type(layer).__name__} is written in C and hides its state")
        nodes, errors = [], []
        for name, value in _attributes(layer).items():
            if _is_fixed(layer, name, value):
                continue
            self._attribute = f"{whose} attribute {name!r}"
            try:
                nodes.append([name, self.node(value, self._attribute)])
            except CannotSave as error:
                errors.append(error)
        self._attribute = None
        if errors:  # the first, but one that is final tells more
            raise next((error for error in errors if error.final), errors[0])
        return nodes

    def other(self, value: Any, place: Place) -> Any:
        kind = type(value)
        for i, layer in enumerate(self._layers):
            if value is layer:
                return ["layer", i]
            if kind is types.MethodType and value.__self__ is layer:
                name = value.__func__.__name__
                if getattr(type(layer), name, None) is value.__func__:
                    return ["method", i, name]
        if _is_record(kind) and kind in self._constants.named(kind.__module__, kind.__qualname__):
            self.number(value)
            pairs = [(name, self.node(item, (place, name))) for name, item in _attributes(value).items()]
            return ["record", kind.__module__, kind.__qualname__, *(part for pair in pairs for part in pair)]
        try:
            description = self._constants.describe(value)
        except CannotSave as error:
            raise CannotSave(f"{datafile.words(place)}: {error}", error.final) from None
        # An attribute of the fresh env can be compared; within a container there may be nothing to compare with.
        if description and (place is self._attribute or self._constants.find(description) is value):
            return ["constant", *description]
        return super().other(value, place)


class _EnvDecoder(Decoder):
    """The counterpart, for the layers of the fresh env."""

    def __init__(self, arrays: Sequence[Any], layers: Sequence[Any]):
        super().__init__(arrays)
        self._layers, self._constants = layers, _Constants(layers)

    def fields(self, index: int, nodes: Any) -> dict[str, Any]:
        """The attributes that the layer is to have."""
        fresh = _attributes(self._layers[index])
        return {name: self._field(node, fresh.get(name)) for name, node in nodes}

    def _field(self, node: Any, fresh: Any) -> Any:
        if isinstance(node, list) and node[0] == "constant":
            with contextlib.suppress(CannotSave):
                if self._constants.describe(fresh) == node[1:]:
                    return fresh
        return self.decode(node)

    def other(self, tag: str, parts: list[Any]) -> Any:
        if tag == "layer":
            return self._layers[parts[0]]
        if tag == "method":
            layer = self._layers[parts[0]]
            found = getattr(type(layer), parts[1], None)
            if isinstance(found, types.FunctionType):
                return types.MethodType(found, layer)
            raise DataError(f"the state needs a method {parts[1]!r}, and {type(layer).__name__} has none")
        if tag == "constant":
            found = self._constants.find(parts)
            if found is _MISSING:
                raise DataError(
                    f"the state needs the {parts[0]} {parts[1]}.{parts[2]}, and the env has another or none there"
                )
            return found
        if tag == "record":
            return self._record(*parts)
        return super().other(tag, parts)

    def _record(self, module: str, name: str, *parts: Any) -> Any:
        kind = next((found for found in self._constants.named(module, name) if isinstance(found, type)), None)
        if kind is None or not _is_record(kind):
            raise DataError(f"the state needs the class {module}.{name}, which is not there or no space")
        made: Any = object.__new__(kind)
        self.number(made)
        _put(made, {key: self.value(node) for key, node in zip(parts[::2], parts[1::2], strict=True)})
        return made


class _Watcher(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles, and sees everything on its way."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self._arrays: list[tuple[str, Any]] = []
        self._buffers: list[bytearray] = []

    def persistent_id(self, value: Any) -> None:
        """Called for each object that is pickled."""
        if isinstance(value, EzPickle) and _keeps_arguments_only(type(value)):
            name = type(value).__name__
            raise CannotSave(
                f"{name} is a gymnasium.utils.EzPickle, of which pickle keeps the constructor's arguments alone"
            )
        if isinstance(value, np.ndarray):
            self._arrays.append((f"an array of {value.dtype} {value.shape}", value))
        elif isinstance(value, bytearray):
            self._buffers.append(value)

    def check(self) -> None:
        """Refuse arrays that would come back without what they share their memory with."""
        for name, array in self._arrays:
            datafile.check_owner(array, name)
            if any(datafile.memory_owner(array) is buffer for buffer in self._buffers):
                raise CannotSave(f"{name} lies in the memory of a bytearray of the env", final=True)
        datafile.check_overlap(self._arrays)


def _keeps_arguments_only(kind: Any) -> bool:
    own = kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__
    return kind.__getstate__ is EzPickle.__getstate__ and not own


def _pickled(env: Any, layers: list[Any], reason: str) -> bytes:
    """The whole env as bytes that were seen to load again."""
    file = io.BytesIO()
    watcher = _Watcher(file)
    try:
        watcher.dump(env)
        watcher.check()
        loaded = _layers(cloudpickle.loads(file.getvalue()))
    except CannotSave as error:
        raise CannotSave(f"{reason}; it cannot be pickled instead, as {error}: {ADVICE}", final=True) from None
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise CannotSave(f"{reason}; it cannot be pickled instead ({cause}): {ADVICE}", final=True) from error
    if lost := _lost(layers, loaded):
        raise CannotSave(f"{reason}; it cannot be pickled instead, as that loses {lost}: {ADVICE}", final=True)
    return file.getvalue()


def _lost(layers: list[Any], loaded: list[Any]) -> str:
    """What a class's own way of pickling leaves out or changes, among what is easily compared; "" if nothing."""
    if _chain(layers) != _chain(loaded):
        return "its wrappers"
    for i, pair in enumerate(zip(layers, loaded, strict=True)):
        before, after = map(_attributes, pair)
        for name, value in before.items():
            if name not in after or _print(value) not in (None, _print(after[name])):
                return f"{_name(layers, i)} attribute {name!r}"
    return ""


def _print(value: Any) -> Any:
    """A simple value in a form that can be compared: arrays and nan cannot; None for others."""
    if not isinstance(value, (*_ATOMS, *_GENERATORS, np.generic, np.ndarray)):
        return None
    with contextlib.suppress(CannotSave):
        encoded = datafile.encode(value)
        return json.dumps(encoded.document), [array.tobytes() for array in encoded.arrays]

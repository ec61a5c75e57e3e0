"""The state of one env as data: saved from a running env, loaded into a freshly built one.

An env is taken as its layers: the wrappers, and the env within. Each is saved in one of two ways:

- "own": by its get_state() and set_state(state), if its class has both and the state is plain data. The pair speaks for
  the layer alone. The layer's random generators, and those of its spaces, are saved too, as pairs often forget them.
- "fields": by its attributes, if they are plain data (see `datafile`), spaces, references to the layers and their
  methods, or constants (see `constants`).

A layer below an "own" one is saved by its own pair or its fields too, so that a wrapper's pair need not know of it. If
it has neither, the wrapper's pair is taken to speak for it. Loading calls set_state from the inside out, then sets the
generators, then the fields of the other layers.

If this is not possible, the whole env is pickled ("pickle"), and loading executes the pickle. A pickle that is known to
lose state is refused. State that is in no attribute (in a module's variables, or inside of a library) is saved by
get_state() only.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import random
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import Space, Wrapper
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import EzPickle, RecordConstructorArgs

from shoal.envs.wrapper_layers import layers_of, name_of
from shoal.errors import DataError
from shoal.state import datafile
from shoal.state.constants import ADVICE, ATOMS, MISSING, Constants
from shoal.state.datafile import GENERATORS, CannotSave, Decoder, Encoder, Place


@dataclass(frozen=True)
class EnvState:
    """The state of one env.

    Attributes:
        kind: "own" or "fields" for data ("own" if any layer's get_state() was used), or "pickle".
        content: plain data for `datafile`, or the bytes of a pickle.
    """

    kind: str
    content: Any


def save_env(env: Any) -> EnvState:
    """The state of an env at this moment, which stays as it is. Raises CannotSave if it would not be complete."""
    layers = layers_of(env)
    try:
        return _save_as_data(layers)
    except CannotSave as error:
        reasons = [error, *(reason for i in range(len(layers)) if (reason := _why_not_fields(layers, i)))]
    for reason in reasons:
        if reason.final:
            raise reason
    return EnvState("pickle", _pickle_env(env, str(reasons[0])))


def load_env(state: EnvState, env: Any) -> Any:
    """Return the env to use from now on: the given one in the saved state, or one from a pickle; then close the given.

    The given env is freshly built by the function that built the saved one. Its attributes are replaced, and its spaces
    too: look them up again. Do not use it if this raises, which is a ValueError if the state does not fit.
    """
    layers = layers_of(env)
    if state.kind == "pickle":
        try:
            loaded = cloudpickle.loads(state.content)
        except Exception as error:
            raise DataError(f"the pickled env does not load ({type(error).__name__}: {error})") from error
        _check_classes(class_names(layers_of(loaded)), layers)
        return loaded
    if state.kind not in ("own", "fields"):
        raise DataError(f"the state is of kind {state.kind!r}, which is unknown")
    try:
        _load_data(state.content, layers)
    except DataError:
        raise
    except Exception as error:  # a file may say anything, so anything may go wrong
        raise DataError(f"the state is damaged ({type(error).__name__}: {error})") from error
    return env


def _load_data(content: Any, layers: Sequence[Any]) -> None:
    document, decoder = json.loads(content["document"]), _EnvDecoder(content["arrays"], layers)
    _check_classes(document["layers"], layers)
    saved_random, saved_own, saved_fields = (document[name] for name in ("random", "own", "fields"))
    saved_generators = [(i, decoder.decode(node)) for i, node in saved_random]
    states = [(i, decoder.decode(node)) for i, node in saved_own]
    for i, own in reversed(states):
        try:
            layers[i].set_state(own)
        except Exception as error:
            text = f"{possessive(layers, i)} set_state(state) raised {type(error).__name__}: {error}"
            raise DataError(f"the state does not fit: {text}") from error
    for i, found in saved_generators:
        _set_generators(layers[i], found, decoder)
    fields = [(i, decoder.fields(i, nodes)) for i, nodes in saved_fields]
    for i, values in fields:
        replace_attributes(layers[i], values)


def _check_classes(saved: list[str], layers: Sequence[Any]) -> None:
    if saved != class_names(layers):
        raise DataError(f"the state is of {' over '.join(saved)}, and the env is {' over '.join(class_names(layers))}")


def _save_as_data(layers: list[Any]) -> EnvState:
    states = _own_states(layers)
    below = range(min(states, default=len(layers)), len(layers))
    spoken_for = [i for i in below if i in states or _why_not_fields(layers, i)]
    encoder = _EnvEncoder(layers)
    document = {
        "layers": class_names(layers),
        # In this order also at loading: what comes later may refer to what came before.
        "random": [[i, encoder.node(generators(layers[i]), possessive(layers, i))] for i in spoken_for],
        "own": [[i, encoder.node(state, f"{possessive(layers, i)} get_state()")] for i, state in states.items()],
        "fields": [[i, encoder.fields(i)] for i in range(len(layers)) if i not in spoken_for],
    }
    encoded = encoder.finish(document)
    content = {"document": json.dumps(encoded.document, allow_nan=False), "arrays": encoded.arrays}
    return EnvState("own" if states else "fields", content)


def _own_states(layers: list[Any]) -> dict[int, Any]:
    """What get_state() returned, for each layer that has the pair and returns plain data."""
    found = {}
    for i, layer in enumerate(layers):
        if not (_can_call(layer, "get_state") and _can_call(layer, "set_state", None)):
            continue
        try:
            state = layer.get_state()
            _EnvEncoder(layers).node(state, "")
            found[i] = state
        except NotImplementedError:
            pass
        except CannotSave as error:
            if error.final:
                raise
        except Exception as error:
            text = f"{possessive(layers, i)} get_state() raised {type(error).__name__}: {error}"
            raise CannotSave(text, final=True) from error
    return found


def _can_call(layer: Any, name: str, *args: Any) -> bool:
    # The class is asked, as a wrapper may pass attributes on. MuJoCo's set_state(qpos, qvel) takes other arguments.
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


def _set_generators(layer: Any, found: dict[str, Any], decoder: Decoder) -> None:
    for name, saved in found.items():
        present = attributes(layer).get(name)
        if not _are_generators(name, saved):
            raise DataError(f"the state is damaged: {name!r:.40} of {type(layer).__name__} is no random generator")
        if not isinstance(saved, list):
            put_attributes(layer, {name: _revived(present, saved, decoder)})
            continue
        spaces = list(spaces_in(present))
        if len(spaces) != len(saved):
            raise DataError(f"the env's attribute {name!r} is not the space that was saved")
        for space, generator in zip(spaces, saved, strict=True):
            vars(space)["_np_random"] = _revived(vars(space).get("_np_random"), generator, decoder)


def _are_generators(name: str, saved: Any) -> bool:
    """Whether this is what `generators` finds: it is put into spaces that the caller draws from, too."""
    if isinstance(saved, list):
        return all(isinstance(one, np.random.Generator | None) for one in saved)
    return isinstance(saved, int | None) if name == "_np_random_seed" else isinstance(saved, GENERATORS)


def _revived(present: Any, saved: Any, decoder: Decoder) -> Any:
    """The present generator in the saved state, as others may share it; the saved one if the two differ in kind."""
    if type(saved) not in GENERATORS or type(present) is not type(saved):
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


def _is_record(kind: type) -> bool:
    """Whether objects of this class are no more than their attributes, and may be made without calling the class."""
    mean = "gymnasium.wrappers.utils.RunningMeanStd"
    return (issubclass(kind, Space) or name_of(kind) == mean) and not hides_state(kind)


class _EnvEncoder(Encoder):
    """An encoder that also knows the layers of an env, constants, and spaces."""

    def __init__(self, layers: Sequence[Any]):
        super().__init__()
        self._layers, self._constants = layers, Constants(layers)
        self._attribute: Place = None

    def fields(self, index: int) -> Any:
        """The nodes of all attributes of a layer, but for the fixed ones."""
        layer = self._layers[index]
        its = possessive(self._layers, index)
        if hides_state(type(layer)):
            raise CannotSave(f"{its} class {type(layer).__name__} is written in C and hides its state")
        nodes, errors = [], []
        for name, value in attributes(layer).items():
            if is_fixed(layer, name, value):
                continue
            self._attribute = f"{its} attribute {name!r}"
            try:
                nodes.append([name, self.node(value, self._attribute)])
            except CannotSave as error:
                errors.append(error)
        self._attribute = None
        if errors:  # a final one tells more than the first
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
            pairs = [(name, self.node(item, (place, name))) for name, item in attributes(value).items()]
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
    """The counterpart of `_EnvEncoder`, for the layers of the fresh env."""

    def __init__(self, arrays: Sequence[Any], layers: Sequence[Any]):
        super().__init__(arrays)
        self._layers, self._constants = layers, Constants(layers)

    def fields(self, index: int, nodes: Any) -> dict[str, Any]:
        """The attributes that the layer is to have."""
        layer = self._layers[index]
        fresh = attributes(layer)
        for name, _ in nodes:
            if type(name) is not str or is_fixed(layer, name, None):
                raise DataError(f"the state is damaged: it sets the attribute {name!r:.40} of {type(layer).__name__}")
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
            if found is MISSING:
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
        if not all(type(key) is str for key in parts[::2]):
            raise DataError(f"the state is damaged: an attribute of a {name} has no name")
        made: Any = object.__new__(kind)
        self.number(made)
        put_attributes(made, {key: self.value(node) for key, node in zip(parts[::2], parts[1::2], strict=True)})
        if isinstance(made, Space) and not isinstance(vars(made).get("_np_random"), np.random.Generator | None):
            raise DataError(f"the state is damaged: a {name} has no random generator")
        return made


def _pickle_env(env: Any, reason: str) -> bytes:
    """The whole env as bytes, which were loaded once as a check; `reason` is why it cannot be saved as data."""
    file = io.BytesIO()
    pickler = _CheckingPickler(file)
    try:
        pickler.dump(env)
        pickler.check()
        loaded = layers_of(cloudpickle.loads(file.getvalue()))
        _check_loss(layers_of(env), loaded)
    except CannotSave as error:
        raise CannotSave(f"{reason}; it cannot be pickled instead, as {error}: {ADVICE}", final=True) from None
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise CannotSave(f"{reason}; it cannot be pickled instead ({cause}): {ADVICE}", final=True) from error
    return file.getvalue()


class _CheckingPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles, and checks every object that it pickles."""

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
        """Refuse arrays that share their memory with something: they would come back without it."""
        for name, array in self._arrays:
            datafile.check_owner(array, name)
            if any(datafile.memory_owner(array) is buffer for buffer in self._buffers):
                raise CannotSave(f"{name} lies in the memory of a bytearray of the env", final=True)
        datafile.check_overlap(self._arrays)


def _keeps_arguments_only(kind: Any) -> bool:
    own = kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__
    return kind.__getstate__ is EzPickle.__getstate__ and not own


def _check_loss(layers: list[Any], loaded: list[Any]) -> None:
    """Raise CannotSave if a class's own way of pickling leaves out or changes what is easily compared."""
    if class_names(layers) != class_names(loaded):
        raise CannotSave("that loses its wrappers")
    for i, pair in enumerate(zip(layers, loaded, strict=True)):
        before, after = map(attributes, pair)
        for name, value in before.items():
            if name not in after or _comparable(value) not in (None, _comparable(after[name])):
                raise CannotSave(f"that loses {possessive(layers, i)} attribute {name!r}")


def _comparable(value: Any) -> Any:
    """A simple value in a form that == compares, unlike arrays and nan; None for other values."""
    if not isinstance(value, (*ATOMS, *GENERATORS, np.generic, np.ndarray)):
        return None
    with contextlib.suppress(CannotSave):
        encoded = datafile.encode(value)
        return json.dumps(encoded.document), [array.tobytes() for array in encoded.arrays]
    return None


# ---- the attributes of layers ----------------------------------------------------------------------------------


def class_names(layers: Sequence[Any]) -> list[str]:
    """The full names of the layers' classes."""
    return [name_of(type(layer)) for layer in layers]


def possessive(layers: Sequence[Any], index: int) -> str:
    """How messages begin that speak of a part of a layer: "its", or "its wrapper TimeLimit's"."""
    return "its" if index == len(layers) - 1 else f"its wrapper {type(layers[index]).__name__}'s"


def is_fixed(layer: Any, name: str, value: Any) -> bool:
    """Whether an attribute is a link to another layer or never changes: the freshly built env has it, too."""
    return (
        isinstance(value, EnvSpec)
        or (isinstance(layer, Wrapper) and name in ("env", "_cached_spec"))
        or (isinstance(layer, RecordConstructorArgs) and name == "_saved_kwargs")
        or (isinstance(layer, EzPickle) and name in ("_ezpickle_args", "_ezpickle_kwargs"))
    )


def _slots(kind: type) -> dict[str, Any]:
    members = [item for cls in reversed(kind.__mro__) for item in vars(cls).items()]
    return {name: member for name, member in members if isinstance(member, types.MemberDescriptorType)}


def attributes(thing: Any) -> dict[str, Any]:
    """All attributes of an object, those in slots included."""
    found = dict(getattr(thing, "__dict__", {}))
    for name, slot in _slots(type(thing)).items():
        with contextlib.suppress(AttributeError):  # not set
            found[name] = slot.__get__(thing)
    return found


def put_attributes(thing: Any, values: dict[str, Any]) -> None:
    """Set attributes, without calling the class's __setattr__."""
    slots = _slots(type(thing))
    for name, value in values.items():
        if name in slots:
            slots[name].__set__(thing, value)
        else:
            vars(thing)[name] = value


def replace_attributes(layer: Any, values: dict[str, Any]) -> None:
    """Give the layer these attributes. Of the others, it keeps the fixed ones only."""
    fresh = attributes(layer)
    kept = {name: value for name, value in fresh.items() if is_fixed(layer, name, value)}
    slots = _slots(type(layer))
    for name in fresh.keys() & slots.keys():
        slots[name].__delete__(layer)
    getattr(layer, "__dict__", {}).clear()
    put_attributes(layer, kept | values)


def hides_state(kind: type) -> bool:
    """Whether instances have room for more than their attributes, as those of classes written in C have."""
    while kind is not object:
        base: type = kind.__base__ or object
        slots = kind.__dict__.get("__slots__", ())
        room = 1 if isinstance(slots, str) else len(tuple(slots))
        room += (kind.__dictoffset__ != base.__dictoffset__) + (kind.__weakrefoffset__ != base.__weakrefoffset__)
        if kind.__basicsize__ - base.__basicsize__ > room * 8 or kind.__itemsize__:
            return True
        kind = base
    return False


def spaces_in(value: Any) -> Iterator[Space[Any]]:
    """A space and those within it, always in the same order."""
    if isinstance(value, Space):
        yield value
        value = vars(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for item in items:
        yield from spaces_in(item)


def generators(layer: Any) -> dict[str, Any]:
    """The random generators in a layer's attributes; for each attribute that is a space, a list of those in it."""
    found: dict[str, Any] = {}
    for name, value in attributes(layer).items():
        if isinstance(value, Space):
            found[name] = [vars(space).get("_np_random") for space in spaces_in(value)]
        elif isinstance(value, GENERATORS) or name == "_np_random_seed":
            found[name] = value
    return found

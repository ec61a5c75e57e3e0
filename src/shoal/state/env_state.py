"""The state of one env as data: saved from a running env, loaded into a freshly built one.

An env is taken as its layers (see `layers`). Each is saved in one of two ways:

- "own": by its get_state() and set_state(state), if its class has both and the state is plain data. The pair speaks for
  the layer alone. The layer's random generators, and those of its spaces, are saved too, as pairs often forget them.
- "fields": by its attributes, if they are plain data (see `datafile`), spaces, references to the layers and their
  methods, or constants (see `constants`).

A layer below an "own" one is saved by its own pair or its fields too, so that a wrapper's pair need not know of it. If
it has neither, the wrapper's pair is taken to speak for it. Loading calls set_state from the inside out, then sets the
generators, then the fields of the other layers.

If this is not possible, the whole env is pickled ("pickle", see `pickled`), and loading executes the pickle. State that
is in no attribute (in a module's variables, or inside of a library) is saved by get_state() only.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import random
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import Space

from shoal.state import datafile
from shoal.state.constants import MISSING, Constants
from shoal.state.datafile import CannotSave, DataError, Decoder, Encoder, Place
from shoal.state.layers import (
    GENERATORS,
    attributes,
    class_names,
    generators,
    hides_state,
    is_fixed,
    layers_of,
    possessive,
    put_attributes,
    replace_attributes,
    spaces_in,
)
from shoal.state.pickled import pickle_env


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
    """The state of an env at this moment. It does not change when the env goes on; the env itself is not changed.

    Raises:
        CannotSave: with the reason in words, if the state would not be complete.
    """
    layers = layers_of(env)
    try:
        return _save_as_data(layers)
    except CannotSave as error:
        reasons = [error, *(reason for i in range(len(layers)) if (reason := _why_not_fields(layers, i)))]
    for reason in reasons:
        if reason.final:
            raise reason
    return EnvState("pickle", pickle_env(env, str(reasons[0])))


def load_env(state: EnvState, env: Any) -> Any:
    """Return the env to use from now on: the given one in the saved state, or one from a pickle; then close the given.

    Args:
        env: freshly built by the function that built the saved one. Its attributes are replaced, and its spaces too:
            look them up again. Do not use it if this raises.

    Raises:
        ValueError: if the state does not fit it.
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
        document, decoder = json.loads(state.content["document"]), _EnvDecoder(state.content["arrays"], layers)
        _check_classes(document["layers"], layers)
        parts = [document[name] for name in ("random", "own", "fields")]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise DataError(f"the state is damaged ({type(error).__name__}: {error})") from error
    _load_data(parts, decoder, layers)
    return env


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


def _load_data(parts: Sequence[Any], decoder: _EnvDecoder, layers: list[Any]) -> None:
    saved_random, saved_own, saved_fields = parts
    saved_generators = [(i, decoder.decode(node)) for i, node in saved_random]
    states = [(i, decoder.decode(node)) for i, node in saved_own]
    for i, state in reversed(states):
        layers[i].set_state(state)
    for i, found in saved_generators:
        _set_generators(layers[i], found, decoder)
    fields = [(i, decoder.fields(i, nodes)) for i, nodes in saved_fields]
    for i, values in fields:
        replace_attributes(layers[i], values)


def _own_states(layers: list[Any]) -> dict[int, Any]:
    """What get_state() returned, for each layer that has the pair and returns plain data."""
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
            text = f"{possessive(layers, i)} get_state() raised {type(error).__name__}: {error}"
            raise CannotSave(text, final=True) from error
        found[i] = state
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
        if not isinstance(saved, list):
            put_attributes(layer, {name: _revived(present, saved, decoder)})
            continue
        spaces = list(spaces_in(present))
        if len(spaces) != len(saved):
            raise DataError(f"the env's attribute {name!r} is not the space that was saved")
        for space, generator in zip(spaces, saved, strict=True):
            vars(space)["_np_random"] = _revived(vars(space).get("_np_random"), generator, decoder)


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
    name = f"{kind.__module__}.{kind.__qualname__}"
    return (issubclass(kind, Space) or name == "gymnasium.wrappers.utils.RunningMeanStd") and not hides_state(kind)


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
        fresh = attributes(self._layers[index])
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
        made: Any = object.__new__(kind)
        self.number(made)
        put_attributes(made, {key: self.value(node) for key, node in zip(parts[::2], parts[1::2], strict=True)})
        return made

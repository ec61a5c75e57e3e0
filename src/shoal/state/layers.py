"""An env as its layers: the wrappers from the outside in, and the env within. Reads and sets their attributes."""

from __future__ import annotations

import contextlib
import random
import types
from collections.abc import Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import EzPickle, RecordConstructorArgs

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


def layers_of(env: Any) -> list[Any]:
    """The layers, the outermost first."""
    layers = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    return layers


def class_names(layers: Sequence[Any]) -> list[str]:
    """The full names of the layers' classes."""
    return [f"{type(layer).__module__}.{type(layer).__qualname__}" for layer in layers]


def possessive(layers: Sequence[Any], index: int) -> str:
    """How messages begin that speak of a part of a layer: "its", or "its wrapper TimeLimit's"."""
    return "its" if index == len(layers) - 1 else f"its wrapper {type(layers[index]).__name__}'s"


def is_fixed(layer: Any, name: str, value: Any) -> bool:
    """Whether an attribute is a link to another layer or never changes: the freshly built env has it, too."""
    return (
        isinstance(value, EnvSpec)
        or (isinstance(layer, gymnasium.Wrapper) and name in ("env", "_cached_spec"))
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

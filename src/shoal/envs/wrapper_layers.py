"""Finds attributes and classes in the wrappers around one env. These functions run in the process of the env."""

from __future__ import annotations

from typing import Any

import gymnasium


def get_attr(env: Any, name: str) -> Any:
    """The attribute of the outermost layer (wrapper or env) that has it."""
    return env.get_wrapper_attr(name) if hasattr(env, "get_wrapper_attr") else getattr(env, name)


def has_attr(env: Any, name: str) -> bool:
    """Whether any layer has the attribute."""
    try:
        get_attr(env, name)
    except AttributeError:
        return False
    return True


def call_method(env: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the outermost layer that has it."""
    return get_attr(env, name)(*args, **kwargs)


def name_of(wrapper_class: type) -> str:
    """The full name of a class. It is sent by name, so that a worker need not import a class that no env of it has."""
    if not isinstance(wrapper_class, type):
        raise TypeError(f"expected a class, found {wrapper_class!r}")
    return f"{wrapper_class.__module__}.{wrapper_class.__qualname__}"


def is_wrapped(env: Any, name: str) -> bool:
    """Whether one of the wrappers around an env is of the class of this name, or has it among its `also_known_as`."""
    layer = env
    while isinstance(layer, gymnasium.Wrapper):
        for cls in type(layer).__mro__:
            if name in (name_of(cls), *cls.__dict__.get("also_known_as", ())):
                return True
        layer = layer.env
    return False

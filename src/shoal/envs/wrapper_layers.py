"""An env as its layers: the wrappers from the outside in, and the env within. Finds attributes and classes in them.

These functions run in the process of the env. `ForeignEnv` is the layer around an env of another library.
"""

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


def set_attr(env: Any, name: str, value: Any) -> None:
    """Set an attribute of the outermost layer; of an env of another library, its own."""
    setattr(env.env if isinstance(env, ForeignEnv) else env, name, value)


def call_method(env: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the outermost layer that has it."""
    return get_attr(env, name)(*args, **kwargs)


def name_of(wrapper_class: type) -> str:
    """The full name of a class. It is sent by name, so that a worker need not import a class that no env of it has."""
    if not isinstance(wrapper_class, type):
        raise TypeError(f"expected a class, found {wrapper_class!r}")
    return f"{wrapper_class.__module__}.{wrapper_class.__qualname__}"


def layers_of(env: Any) -> list[Any]:
    """The layers, the outermost first."""
    layers = [env]
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    return layers


def is_wrapped(env: Any, name: str) -> bool:
    """Whether one of the wrappers around an env is of the class of this name, or has it among its `also_known_as`."""
    classes = [cls for layer in layers_of(env)[:-1] for cls in type(layer).__mro__]
    return any(name in (name_of(cls), *cls.__dict__.get("also_known_as", ())) for cls in classes)


class ForeignEnv(gymnasium.Env[Any, Any]):
    """An env of another library as a Gymnasium env. Attributes that Gymnasium's API does not have are the env's own."""

    def __init__(self, env: Any):
        self.env = env

    @property
    def unwrapped(self) -> Any:
        return getattr(self.env, "unwrapped", self.env)

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("__"):  # while this object is unpickled, `env` is not there yet
            raise AttributeError(name)
        return getattr(self.env, name)

    def has_wrapper_attr(self, name: str) -> bool:
        return hasattr(self, name)

    def get_wrapper_attr(self, name: str) -> Any:
        return getattr(self, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        setattr(self.env, name, value)
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.env!r})"

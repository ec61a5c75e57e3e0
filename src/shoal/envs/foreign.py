"""The base class of the Gymnasium envs that stand for an env of another library."""

from __future__ import annotations

from typing import Any

import gymnasium


class ForeignEnv(gymnasium.Env[Any, Any]):
    """An env of another library as a Gymnasium env. Attributes that Gymnasium's API does not have are the env's own.

    Attributes:
        env: the env itself.
    """

    def __init__(self, env: Any):
        self.env = env

    @property
    def unwrapped(self) -> Any:
        """The innermost env."""
        return getattr(self.env, "unwrapped", self.env)

    def close(self) -> None:
        """Close the env, if it has a method for that."""
        if hasattr(self.env, "close"):
            self.env.close()

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("__"):  # while this object is unpickled, `env` is not there yet
            raise AttributeError(name)
        return getattr(self.env, name)

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether this object or the env in it has an attribute."""
        return hasattr(self, name)

    def get_wrapper_attr(self, name: str) -> Any:
        """An attribute of this object or of the env in it."""
        return getattr(self, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of the env in it."""
        setattr(self.env, name, value)
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.env!r})"

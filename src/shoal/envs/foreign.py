"""What an env of another library has in common with others of its kind once it is a Gymnasium env."""

from __future__ import annotations

from typing import Any

import gymnasium

__all__ = ["ForeignEnv"]


class ForeignEnv(gymnasium.Env[Any, Any]):
    """An env of another library as a Gymnasium env. Everything else than Gymnasium's API is reached through, by name.

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
        """Close it, if it can be."""
        if hasattr(self.env, "close"):
            self.env.close()

    def __getattr__(self, name: str) -> Any:
        if name == "env" or name.startswith("__"):  # not there yet: this object is being unpickled
            raise AttributeError(name)
        return getattr(self.env, name)

    def has_wrapper_attr(self, name: str) -> bool:
        """Whether it, or the env in it, has this attribute."""
        return hasattr(self, name)

    def get_wrapper_attr(self, name: str) -> Any:
        """An attribute of it, or of the env in it."""
        return getattr(self, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Set an attribute of the env in it."""
        setattr(self.env, name, value)
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.env!r})"

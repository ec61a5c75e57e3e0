"""The options of functional envs, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax

from shoal.errors import BadCall

__all__ = ["FunctionalOptions", "check_one_of"]

Autoreset = Literal["next_step", "same_step", "disabled"]
Rng = Literal["threefry", "fast"]
Resets = Literal["auto", "prepared", "fused"]


@dataclass(frozen=True)
class FunctionalOptions:
    """How functional envs run.

    Attributes:
        autoreset: what happens to a lane after the end of an episode. "next_step": its next step is a reset;
            "same_step": it is reset at once; "disabled": it stays as it is, with reward 0, until `reset_rows`.
        params: of the env; its default ones if None.
        max_episode_steps: truncates episodes, in addition to what the env does itself.
        rng: "threefry", JAX's own, or "fast": a hash with a fifth of its cost, good enough for starts and noise. All
            that the env draws by `jax.random` comes from it.
        resets: "fused": the start of a new episode is computed in every step, for all lanes, and mostly not used;
            "prepared": only when a lane needs one, and in rollouts for all lanes at once, ahead. "auto" is "prepared"
            on CPUs and "fused" elsewhere.

    Raises:
        BadCall: an option has a value that it cannot have.
    """

    autoreset: Autoreset = "next_step"
    params: Any = None
    max_episode_steps: int | None = None
    rng: Rng = "threefry"
    resets: Resets = "auto"

    def __post_init__(self) -> None:
        for name, allowed in (("autoreset", Autoreset), ("rng", Rng), ("resets", Resets)):
            check_one_of(name, getattr(self, name), get_args(allowed))
        if self.max_episode_steps is not None and self.max_episode_steps < 1:
            raise BadCall(f"max_episode_steps: expected at least 1 or None, found {self.max_episode_steps}")

    @property
    def prepares(self) -> bool:
        """Say whether starts of episodes are computed only when a lane needs one."""
        return self.resets == "prepared" or (self.resets == "auto" and jax.default_backend() == "cpu")


def check_one_of(what: str, found: Any, allowed: Sequence[str]) -> None:
    """Raise BadCall unless the value is one of the allowed words."""
    if found not in allowed:
        raise BadCall(f"{what}: expected one of {', '.join(allowed)}, found {found!r}")

"""Envs that come with Shoal and can be compiled, by id.

From the same state, those with Gymnasium's ids step exactly as Gymnasium's do; their random numbers are Shoal's own.
The envs may import `shoal.compiled` and nothing else of Shoal's. Read `classic_control` first.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

__all__ = ["find", "ids"]

# Each module is imported when one of its envs is needed.
_CLASSES = {
    "CartPole-v1": ("classic_control", "CartPole"),
    "Pendulum-v1": ("classic_control", "Pendulum"),
    "MountainCar-v0": ("classic_control", "MountainCar"),
    "MountainCarContinuous-v0": ("classic_control", "MountainCarContinuous"),
    "Acrobot-v1": ("classic_control", "Acrobot"),
    "FrozenLake-v1": ("toy_text", "FrozenLake"),
    "FrozenLake8x8-v1": ("toy_text", "FrozenLake8x8"),
    "Taxi-v3": ("toy_text", "Taxi"),
    "Taxi-v4": ("toy_text", "Taxi"),
    "CliffWalking-v1": ("toy_text", "CliffWalking"),
    "CliffWalkingSlippery-v1": ("toy_text", "CliffWalkingSlippery"),
    "Blackjack-v1": ("toy_text", "Blackjack"),
    "shoal/Bricks-v0": ("games", "Bricks"),
    "shoal/Orchard-v0": ("games", "Orchard"),
}


def ids() -> list[str]:
    """Return the ids of all envs of the library."""
    return list(_CLASSES)


def find(env_id: str) -> Any:
    """Return the class of an id, with the defaults of that id.

    Raises:
        LookupError: there is none; the error names a similar id, or all of them.
    """
    if env_id not in _CLASSES:
        close = difflib.get_close_matches(env_id, _CLASSES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(_CLASSES)}"
        raise LookupError(
            f"{env_id!r} is no env of shoal.compiled.library: {hint} "
            "An env of your own is given as its class, see shoal.compiled.Env"
        )
    module, name = _CLASSES[env_id]
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)

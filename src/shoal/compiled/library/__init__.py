"""Envs that come with Shoal and can be compiled, by id.

From the same state, those with Gymnasium's ids step exactly as Gymnasium's do; their random numbers are Shoal's own.
The envs may import `shoal.compiled` and nothing else of Shoal's. Read `cartpole` first.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

__all__ = ["find", "ids"]

# Each module is imported when one of its envs is needed.
_CLASSES = {
    "CartPole-v1": ("cartpole", "CartPole"),
    "Pendulum-v1": ("pendulum", "Pendulum"),
    "MountainCar-v0": ("mountain_car", "MountainCar"),
    "MountainCarContinuous-v0": ("mountain_car", "MountainCarContinuous"),
    "Acrobot-v1": ("acrobot", "Acrobot"),
    "FrozenLake-v1": ("frozen_lake", "FrozenLake"),
    "FrozenLake8x8-v1": ("frozen_lake", "FrozenLake8x8"),
    "Taxi-v3": ("taxi", "Taxi"),
    "Taxi-v4": ("taxi", "Taxi"),
    "CliffWalking-v1": ("cliff_walking", "CliffWalking"),
    "CliffWalkingSlippery-v1": ("cliff_walking", "CliffWalkingSlippery"),
    "Blackjack-v1": ("blackjack", "Blackjack"),
    "shoal/Bricks-v0": ("bricks", "Bricks"),
    "shoal/Orchard-v0": ("orchard", "Orchard"),
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

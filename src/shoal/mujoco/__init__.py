"""MuJoCo: many simulations as one env, with physics in threads of the C core and the rest in NumPy over all lanes.

`BatchedMujocoEnv` is a model and three functions over arrays; Gymnasium's eleven envs of version 5 are made of it, and
`shoal.make("HalfCheetah-v5", 64)` takes them by itself. May import `compiled` and what lies below. Read `batch` first,
then `gymnasium_envs` for examples; `simulations` is what steps.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BatchedMujocoEnv", "LaneModels", "SimulationError"]

_PLACES = {"BatchedMujocoEnv": "batch", "LaneModels": "models", "SimulationError": "simulations"}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)

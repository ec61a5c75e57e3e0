"""One env of each simulator, made as its users make it; worker processes import this module."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def lunar_lander(**kwargs: Any) -> Any:
    return gymnasium.make("LunarLander-v3", **kwargs)


def bipedal_walker(**kwargs: Any) -> Any:
    return gymnasium.make("BipedalWalker-v3", **kwargs)


def minigrid(**kwargs: Any) -> Any:
    import minigrid

    gymnasium.register_envs(minigrid)
    return minigrid.wrappers.ImgObsWrapper(gymnasium.make("MiniGrid-DoorKey-6x6-v0", **kwargs))


def dm_control_by_shimmy(**kwargs: Any) -> Any:
    import shimmy

    gymnasium.register_envs(shimmy)
    return gymnasium.make("dm_control/cheetah-run-v0", **kwargs)


def dm_control() -> Any:
    from dm_control import suite

    return suite.load("cheetah", "run", task_kwargs={"random": 3})


def metaworld(**kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import metaworld as package

        gymnasium.register_envs(package)
        return gymnasium.make("Meta-World/MT1", env_name="reach-v3", seed=3, **kwargs)


def vizdoom(**kwargs: Any) -> Any:
    import vizdoom.gymnasium_wrapper as package

    gymnasium.register_envs(package)
    return gymnasium.make("VizdoomBasic-v1", **kwargs)


def simple_spread() -> Any:
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(max_cycles=10)


# Each with the module that it needs.
SINGLE: dict[str, tuple[Callable[..., Any], str]] = {
    "LunarLander": (lunar_lander, "Box2D"),
    "BipedalWalker": (bipedal_walker, "Box2D"),
    "MiniGrid": (minigrid, "minigrid"),
    "dm_control by Shimmy": (dm_control_by_shimmy, "shimmy"),
    "dm_control": (dm_control, "dm_control"),
    "MetaWorld": (metaworld, "metaworld"),
    "ViZDoom": (vizdoom, "vizdoom"),
}

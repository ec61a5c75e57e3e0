"""How games are made: what a name means, which options are the preprocessing's, and how games are split into groups."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from shoal.atari.lanes import AtariLanes
from shoal.backends.batch_native import NoBatch
from shoal.make import make
from shoal.pool import Pool
from shoal.support.checks import whole_number
from shoal.support.cores import usable_cores

PREPROCESSING = frozenset(inspect.signature(AtariLanes).parameters) - {"game", "num_envs", "num_threads"}


def make_games(game: str, num_envs: int, groups: int, api: str, options: dict[str, Any]) -> Any:
    """As `shoal.atari.make`."""
    num_envs = whole_number("num_envs", num_envs, 1, 2**20)
    if num_envs % whole_number("groups", groups, 1, num_envs):
        raise ValueError(f"groups: {num_envs} games cannot be split into {groups} groups of one size")
    chosen = {name: options.pop(name) for name in PREPROCESSING & set(options)}
    games: Callable[..., Any] = functools.partial(AtariLanes, rom_name(game), **chosen)
    made: Callable[..., Any] = Pool if api == "pool" else functools.partial(make, api=api)
    if groups == 1:
        return made(games, num_envs, **{"backend": "batched", **options})
    threads = max(1, usable_cores() // groups)
    one = functools.partial(games, num_envs=num_envs // groups, num_threads=threads)
    return made([one] * groups, **{"backend": "processes", **options})


def rom_name(game: str) -> str:
    """The name of a game's file, of any name of the game: "ALE/MsPacman-v5" is "ms_pacman"."""
    plain = re.sub(r"(NoFrameskip|Deterministic|-ram)?-v\d+$", "", game.rpartition("/")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", plain).lower()


def find(spec: Any, kwargs: dict[str, Any], exact: bool = True) -> Callable[..., Any]:
    """What makes a batch of the games of an id; `kwargs` are options of `AtariLanes`.

    Raises:
        NoBatch: an exact copy of the single envs is wanted, which have no preprocessing.
    """
    if exact:
        raise NoBatch("ALE's batches are preprocessed, and the envs of the id are not: ask for them by name")
    return functools.partial(AtariLanes, rom_name(str(spec.kwargs.get("game", spec.id))), **kwargs)

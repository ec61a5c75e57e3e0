"""Atari: many games as one env, played by ALE's own threads, with the standard preprocessing as options of one call.

`shoal.atari.make("pong", 64)` gives what `AtariPreprocessing` and `FrameStackObservation` give over single envs. May
import everything up to `make`. Read `lanes` first.
"""

from __future__ import annotations

from typing import Any

__all__ = ["AtariLanes", "make"]


def make(game: str, num_envs: int, *, groups: int = 1, api: str = "gymnasium", **options: Any) -> Any:
    """Make many Atari games as one vector env.

    Args:
        game: a name ("pong", "MsPacman") or an id ("ALE/Pong-v5").
        num_envs: how many games.
        groups: into how many batches the games are split, each in a process of its own. One is the fastest on few
            cores; several allow partial batches (`batch_size`), whole groups at a time.
        api: as for `shoal.make`, or "pool" for a `shoal.Pool`, which partial batches need.
        **options: those of `AtariLanes`, the preprocessing; all others as for `shoal.make`.
    """
    from shoal.atari.making import make_games

    return make_games(game, num_envs, groups, api, options)


def __getattr__(name: str) -> Any:
    if name == "AtariLanes":
        from shoal.atari.lanes import AtariLanes

        return AtariLanes
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

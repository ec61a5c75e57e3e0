"""The reference for one lane: the env stepped by hand, with autoreset as the documentation has it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple


class Row(NamedTuple):
    """What a pool must say about one lane at one time."""

    obs: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    began: bool
    episode_return: float
    episode_length: int


def plain_loop(
    make_env: Callable[[], Any], seed: int | None, action_at: Callable[[int], Any], steps: int, autoreset: str
) -> list[Row]:
    """Reset, then `steps` sends; under "disabled" a send to an env whose episode is over is a reset."""
    env = make_env()
    obs, info = env.reset(seed=seed)
    rows = [Row(copy.deepcopy(obs), 0.0, False, False, info, True, 0.0, 0)]
    total, length = 0.0, 0
    for t in range(steps):
        if autoreset != "same_step" and (rows[-1].terminated or rows[-1].truncated):
            obs, info = env.reset()
            total, length = 0.0, 0
            rows.append(Row(copy.deepcopy(obs), 0.0, False, False, info, True, 0.0, 0))
            continue
        obs, reward, terminated, truncated, info = env.step(action_at(t))
        total, length = total + float(reward), length + 1
        row = Row(copy.deepcopy(obs), float(reward), terminated, truncated, info, False, total, length)
        if autoreset == "same_step" and (terminated or truncated):
            final = {"final_obs": row.obs, "final_info": info}
            obs, info = env.reset()
            row = row._replace(obs=copy.deepcopy(obs), info={**final, **info}, began=True)
            total, length = 0.0, 0
        rows.append(row)
    env.close()
    return rows

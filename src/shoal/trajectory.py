"""What has happened in many steps of many lanes, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

__all__ = ["Rollout"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Rollout:
    """What has happened in `steps` steps of all lanes. All arrays are the caller's own.

    Attributes:
        obs: [steps + 1, lanes, ...], nested as the space is: `obs[t]` is what the policy saw when it chose
            `actions[t]`, and the last one is where it all ended.
        actions: [steps, lanes, ...], nested as the space is.
        reward, terminated, truncated, episode_return, episode_length: [steps, lanes], the answers to `actions[t]`.
        began: bool [steps + 1, lanes], where `obs[t]` is the first of an episode. Under `autoreset="next_step"`, the
            action before it was ignored.
        final_obs: [steps, lanes, ...] under `autoreset="same_step"`, else None: the last observation of each episode
            that `actions[t]` ended, and zeros elsewhere.
    """

    obs: Any
    actions: Any
    reward: Array
    terminated: Array
    truncated: Array
    began: Array
    episode_return: Array
    episode_length: Array
    final_obs: Any

"""What a pool gives its caller: `Batch`, the answers of one `recv`, and `Rollout`, those of many steps.

Imports nothing of Shoal, because every layer hands these on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Batch", "Rollout"]

Array = npt.NDArray[Any]


class Batch(NamedTuple):
    """The answers of some lanes, one row each, in ascending order of env id.

    Arrays belong to the pool and stay valid for `frames - 1` further sends of their lanes, unless the pool was made
    with `copy=True`, or the lanes were not contiguous: then they are the caller's own.

    Attributes:
        obs: array [n, ...], or dicts and tuples of such as the space is nested; a tuple of n objects for
            text and for spaces that have no arrays.
        reward: float64 [n].
        terminated, truncated: bool [n].
        info: the infos that are not empty, by env id.
        env_id: int64 [n]; read-only where these are all lanes, and the pool's own.
        mask: bool [n], True where the lane has an agent; always True for single-agent envs, and read-only then.
        began: bool [n], True where `obs` is the first of an episode.
        episode_return: float64 [n], the sum of rewards of the episode so far, complete where it ended here.
        episode_length: int64 [n], its number of steps so far.
    """

    obs: Any
    reward: npt.NDArray[np.float64]
    terminated: npt.NDArray[np.bool_]
    truncated: npt.NDArray[np.bool_]
    info: dict[int, dict[str, Any]]
    env_id: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    began: npt.NDArray[np.bool_]
    episode_return: npt.NDArray[np.float64]
    episode_length: npt.NDArray[np.int64]

    @property
    def done(self) -> npt.NDArray[np.bool_]:
        """Bool [n], True where an episode ended."""
        return self.terminated | self.truncated

    @property
    def final_obs(self) -> dict[int, Any]:
        """Under `autoreset="same_step"`: the last observation of each episode that ended, by env id."""
        return {env_id: info["final_obs"] for env_id, info in self.info.items() if "final_obs" in info}


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

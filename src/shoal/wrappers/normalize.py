"""Normalize: observations and rewards of mean 0 and variance 1, by what was seen so far."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from shoal.errors import DataError
from shoal.ranks import Ranks
from shoal.support.checks import number, positive_number
from shoal.wrappers import running
from shoal.wrappers.base import Array, Bound, Part, Rows, Transform, box_parts, part_of, put_rows, with_parts
from shoal.wrappers.observations import is_image

NO_MEAN = np.zeros(())  # rewards are scaled, but not shifted


class Normalize(Transform):
    """Normalizes observations by their running mean and variance, and rewards by the variance of discounted returns.

    Args:
        training: whether to update the statistics; switch it off to evaluate.
        norm_obs, norm_reward: what to normalize.
        clip_obs, clip_reward: the largest absolute values afterwards.
        gamma: discount of the returns.
        epsilon: added to variances, so that none is 0.
        norm_obs_keys: which parts of Dict observations; None: all, which must be Boxes then.
        ranks: `shoal.ranks.current()`, if several processes train one policy, each with its own envs: `sync` merges
            their statistics. None: this process is alone.
        sync_every: call `sync` after every so many batches of training. All ranks must have equally many batches.

    Attributes:
        obs_rms, ret_rms: the statistics; for Dict observations, `obs_rms` has one for each key.
        old_obs, old_reward: the last batch as it came from the envs.
        statistics: the class of the statistics, RunningMeanStd or one that inherits from it.
    """

    statistics = running.RunningMeanStd

    def __init__(
        self,
        training: bool = True,
        norm_obs: bool = True,
        norm_reward: bool = True,
        clip_obs: float = 10.0,
        clip_reward: float = 10.0,
        gamma: float = 0.99,
        epsilon: float = 1e-8,
        norm_obs_keys: Sequence[str] | None = None,
        ranks: Ranks | None = None,
        sync_every: int | None = None,
    ):
        self.training, self.norm_obs, self.norm_reward = training, norm_obs, norm_reward
        self.clip_obs = positive_number("clip_obs", clip_obs)
        self.clip_reward = positive_number("clip_reward", clip_reward)
        self.gamma, self.epsilon = number("gamma", gamma, 0.0, 1.0), number("epsilon", epsilon, 0.0, np.inf)
        self.norm_obs_keys = None if norm_obs_keys is None else list(norm_obs_keys)
        if ranks is not None and not isinstance(ranks, Ranks):
            raise TypeError(f"ranks: expected shoal.ranks.current() or another of its Ranks, found {ranks!r}")
        whole = hasattr(sync_every, "__index__") and not isinstance(sync_every, bool)
        if sync_every is not None and (ranks is None or not whole or sync_every < 1):
            raise ValueError(f"sync_every: expected 1 or more, together with ranks, found {sync_every!r}, {ranks!r}")
        self.ranks, self.sync_every = ranks, sync_every
        self.batches_since_sync = 0
        self.obs_rms: Any = None  # RunningMeanStd, by key where observations are dicts; None without norm_obs
        self.ret_rms: Any = self.statistics()
        self.returns: Array = np.zeros(0)
        self.old_obs: Any = None
        self.old_reward: Array = np.zeros(0)

    def bind(self, bound: Bound) -> Space[Any]:
        """The same space, but images become numbers from -clip_obs to clip_obs."""
        space = super().bind(bound)
        self.returns = np.zeros(bound.num_envs)
        if not self.norm_obs:
            return space
        parts = box_parts(space, self.norm_obs_keys, "Normalize")
        if isinstance(space, spaces.Dict):
            self.norm_obs_keys = [str(key) for key in parts]
        if self.obs_rms is None:
            fresh = {part: self.statistics(shape=box.shape) for part, box in parts.items()}
            self.obs_rms = fresh.get(None, fresh)
        _check_shapes(_by_part(self.obs_rms), parts)
        limit = self.clip_obs
        images = {p: spaces.Box(-limit, limit, box.shape, np.float32) for p, box in parts.items() if is_image(box)}
        return with_parts(space, images) if images else space

    # ---- batches ---------------------------------------------------------------------------------------------

    def apply(self, rows: Rows) -> None:
        """Update the statistics by the rows, and normalize the rows."""
        if self.ranks is not None:
            for statistics in self._all_statistics():
                statistics.keep_apart()
        before = self.old_obs
        self.old_obs = self._kept(rows.obs)
        if rows.with_rest and before is not None:
            self.old_obs = put_rows(self.bound.observation_space, before, rows.obs, rows.ids)
        self.old_reward = rows.reward
        if self.norm_obs:
            if self.training:
                for part, statistics in _by_part(self.obs_rms).items():
                    statistics.update(part_of(rows.obs, part))
            rows.map_obs(self.normalize_obs)
        if self.training:
            self._update_returns(rows)
        rows.reward = self.normalize_reward(rows.reward)
        over = rows.began | rows.done
        self.returns[over if rows.whole else rows.ids[over]] = 0.0
        if self.sync_every is not None and self.training:
            self.batches_since_sync += 1
            if self.batches_since_sync >= self.sync_every:
                self.sync()

    def _all_statistics(self) -> list[Any]:
        return [*(rms for _, rms in sorted(_by_part(self.obs_rms).items(), key=str)), self.ret_rms]

    def sync(self) -> None:
        """Merge the statistics of all ranks, exactly, so that each has the same afterwards. All ranks must call it.

        Raises:
            ValueError: there are no ranks, or they normalize different things.
        """
        if self.ranks is None:
            raise ValueError("sync: which ranks? Make it by Normalize(ranks=shoal.ranks.current())")
        running.merge_ranks(self._all_statistics(), self.ranks)
        self.batches_since_sync = 0

    def _update_returns(self, rows: Rows) -> None:
        if rows.whole:
            self.returns *= self.gamma
            self.returns += rows.reward
            returns = self.returns
        else:
            returns = self.returns[rows.ids] * self.gamma + rows.reward
            self.returns[rows.ids] = returns
        if rows.all_stepped:
            self.ret_rms.update(returns)
        elif rows.stepped.any():
            self.ret_rms.update(returns[rows.stepped])

    def _kept(self, obs: Any) -> Any:
        """The originals. Parts that are not normalized are copied, as the caller gets the same arrays."""
        if not self.norm_obs:
            return copy.deepcopy(obs)
        if isinstance(obs, dict):
            return {key: part if key in self.obs_rms else copy.deepcopy(part) for key, part in obs.items()}
        return obs

    def normalize_obs(self, obs: Any) -> Any:
        """Normalize one observation or a batch by the present statistics, without updating them."""
        return self._with_each(
            obs, lambda x, rms: running.standardized(x, rms.mean, rms.var, self.epsilon, self.clip_obs)
        )

    def _with_each(self, obs: Any, function: Callable[[Any, Any], Any]) -> Any:
        """The observations, with each part that is normalized replaced by `function(part, its statistics)`."""
        if not self.norm_obs:
            return copy.copy(obs)
        known = _by_part(self.obs_rms)
        return with_parts(obs, {part: function(part_of(obs, part), rms) for part, rms in known.items()})

    def normalize_reward(self, reward: Any) -> Array:
        """Normalize rewards by the present statistics, without updating them."""
        if not self.norm_reward:
            return np.asarray(reward).astype(np.float32)
        return running.standardized(reward, NO_MEAN, self.ret_rms.var, self.epsilon, self.clip_reward)

    def unnormalize_obs(self, obs: Any) -> Any:
        """The counterpart of `normalize_obs`; clipped values stay clipped."""
        return self._with_each(obs, lambda x, rms: x * np.sqrt(rms.var + self.epsilon) + rms.mean)

    def unnormalize_reward(self, reward: Any) -> Any:
        """The counterpart of `normalize_reward`; clipped values stay clipped."""
        return reward * np.sqrt(self.ret_rms.var + self.epsilon) if self.norm_reward else reward

    def get_original_obs(self) -> Any:
        """The last batch of observations as it came from the envs."""
        return copy.deepcopy(self.old_obs)

    def get_original_reward(self) -> Array:
        """The last batch of rewards as it came from the envs."""
        return np.array(self.old_reward)

    # ---- files -----------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write settings and statistics to a file. It holds data, and no code."""
        content = {name: getattr(self, name) for name in running.SETTINGS}
        content |= {"obs_rms": running.data_of(self.obs_rms), "ret_rms": running.data_of(self.ret_rms)}
        running.write_statistics(path, content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Normalize:
        """Read what `save` wrote, or the pickle of Stable-Baselines' VecNormalize. Runs no code of the file.

        Raises:
            DataError: it is neither.
        """
        content = running.read_statistics(path)
        try:
            new = cls(**{name: content[name] for name in running.SETTINGS if name in content})
            new.set_statistics(content["obs_rms"], content["ret_rms"])
            keys = new.norm_obs_keys
            if keys is not None and isinstance(new.obs_rms, dict) and new.obs_rms.keys() != set(keys):
                raise ValueError(f"its statistics are not those of norm_obs_keys, which are {keys}")
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise DataError(f"{os.fspath(path)} has no normalization in it: {error!s:.200}") from error
        return new

    def set_statistics(self, obs_rms: Any, ret_rms: Any) -> None:
        """Replace the statistics by others, given as data. Raises ValueError, and keeps the old, if they do not fit.

        Args:
            obs_rms: data of the statistics of observations.
            ret_rms: the same for returns.
        """
        if not isinstance(obs_rms, dict | None):
            raise DataError(f"these are no statistics: {obs_rms!r:.100}")
        new: Any = obs_rms
        from_data = self.statistics.from_data
        if obs_rms is not None:
            one = isinstance(obs_rms.get("count"), float)
            new = from_data(obs_rms) if one else {key: from_data(value) for key, value in obs_rms.items()}
        returns = from_data(ret_rms)
        if returns.mean.shape:
            raise DataError(f"returns are numbers, and these statistics have the shape {returns.mean.shape}")
        if hasattr(self, "bound") and self.norm_obs:
            parts = box_parts(self.bound.observation_space, self.norm_obs_keys, "Normalize")
            _check_shapes(_by_part(new), parts)
        self.obs_rms, self.ret_rms = new, returns


def _by_part(statistics: Any) -> dict[Part, Any]:
    if statistics is None:
        return {}
    return statistics if isinstance(statistics, dict) else {None: statistics}


def _check_shapes(known: dict[Part, Any], parts: dict[Part, Any]) -> None:
    if set(known) != set(parts):
        raise ValueError(f"Normalize: it has statistics of {sorted(map(str, known))}, and the envs have {parts}")
    for part, box in parts.items():
        if np.shape(known[part].mean) != box.shape:
            raise ValueError(
                f"Normalize: its statistics have the shape {np.shape(known[part].mean)}, and observations "
                f"{box.shape}{'' if part is None else f' at {part!r}'}"
            )

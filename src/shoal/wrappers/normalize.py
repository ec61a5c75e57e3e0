"""Normalize: observations and rewards of mean 0 and variance 1, as far as is known by now."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from shoal.ranks import Ranks
from shoal.state.datafile import DataError
from shoal.support.checks import number, positive_number
from shoal.wrappers.base import Array, Bound, Part, Rows, Transform, box_parts, put_rows, with_parts
from shoal.wrappers.frame_stack import is_image
from shoal.wrappers.running import (
    SETTINGS,
    RunningMeanStd,
    merge_ranks,
    read_statistics,
    standardized,
    write_statistics,
)

__all__ = ["Normalize", "data_of"]

NO_MEAN = np.zeros(())  # rewards are scaled, but not shifted


class Normalize(Transform):
    """Normalizes observations by their running mean and variance, and rewards by the variance of discounted returns.

    Args:
        training: whether the statistics go on; switch it off to evaluate.
        norm_obs, norm_reward: what to normalize.
        clip_obs, clip_reward: the largest absolute values afterwards.
        gamma: discount of the returns.
        epsilon: keeps variances away from 0.
        norm_obs_keys: which parts of Dict observations; None for all, which must be Boxes then.
        ranks: `shoal.ranks.current()`, where several processes train one policy, each with its own envs: `sync` makes
            the statistics those of all that all of them have seen. None: this process is alone.
        sync_every: call `sync` after each so many batches of training, which all ranks must have equally many of.

    Attributes:
        obs_rms, ret_rms: the statistics; for Dict observations, `obs_rms` has one for each key.
        old_obs, old_reward: the last batch as it came from the envs.
        statistics: what the statistics are made of, RunningMeanStd or a class that inherits from it.
    """

    statistics = RunningMeanStd

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
        self.clip_obs, self.clip_reward = (
            positive_number("clip_obs", clip_obs),
            positive_number("clip_reward", clip_reward),
        )
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
        """The same space, but for images, which are numbers from -clip_obs to clip_obs then."""
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
        self._check_shapes(parts)
        images = {part: box for part, box in parts.items() if is_image(box)}
        if not images:
            return space
        limits = {p: spaces.Box(-self.clip_obs, self.clip_obs, box.shape, np.float32) for p, box in images.items()}
        return with_parts(space, limits)  # type: ignore[no-any-return]

    def _check_shapes(self, parts: dict[Part, Any]) -> None:
        known = self._by_part()
        if set(known) != set(parts):
            raise ValueError(f"Normalize: it has statistics of {sorted(map(str, known))}, and the envs have {parts}")
        for part, box in parts.items():
            if np.shape(known[part].mean) != box.shape:
                raise ValueError(
                    f"Normalize: its statistics have the shape {np.shape(known[part].mean)}, and observations "
                    f"{box.shape}{'' if part is None else f' at {part!r}'}"
                )

    def _by_part(self) -> dict[Part, Any]:
        if self.obs_rms is None:
            return {}
        return self.obs_rms if isinstance(self.obs_rms, dict) else {None: self.obs_rms}

    # ---- batches ---------------------------------------------------------------------------------------------

    def apply(self, rows: Rows) -> None:
        """Learn from the rows, and normalize them."""
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
                for part, statistics in self._by_part().items():
                    statistics.update(rows.obs if part is None else rows.obs[part])
            rows.obs = self.normalize_obs(rows.obs)
            if rows.final_obs:
                rows.final_obs = {row: self.normalize_obs(final) for row, final in rows.final_obs.items()}
        if self.training:
            self._learn_returns(rows)
        rows.reward = self.normalize_reward(rows.reward)
        over = rows.began | rows.done
        self.returns[over if rows.whole else rows.ids[over]] = 0.0
        if self.sync_every is not None and self.training:
            self.batches_since_sync += 1
            if self.batches_since_sync >= self.sync_every:
                self.sync()

    def _all_statistics(self) -> list[Any]:
        return [*(rms for _, rms in sorted(self._by_part().items(), key=str)), self.ret_rms]

    def sync(self) -> None:
        """Make the statistics those of all that all ranks have seen, exactly, and the same on each. All must call it.

        Raises:
            ValueError: there are no ranks, or they normalize different things.
        """
        if self.ranks is None:
            raise ValueError("sync: which ranks? Make it by Normalize(ranks=shoal.ranks.current())")
        merge_ranks(self._all_statistics(), self.ranks)
        self.batches_since_sync = 0

    def _learn_returns(self, rows: Rows) -> None:
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
        """The originals, apart from what the caller gets, which is the same array where nothing is normalized."""
        if not self.norm_obs:
            return copy.deepcopy(obs)
        if isinstance(obs, dict):
            return {key: part if key in self.obs_rms else copy.deepcopy(part) for key, part in obs.items()}
        return obs

    def normalize_obs(self, obs: Any) -> Any:
        """Observations, one or a batch, by what is known now; nothing is learnt."""
        if not self.norm_obs:
            return copy.copy(obs)
        rms = self.obs_rms
        if not isinstance(rms, dict):
            return standardized(obs, rms.mean, rms.var, self.epsilon, self.clip_obs)
        return {**obs, **{key: standardized(obs[key], one.mean, one.var, self.epsilon, self.clip_obs)
                          for key, one in rms.items()}}  # fmt: skip

    def normalize_reward(self, reward: Any) -> Array:
        """Rewards by what is known now; nothing is learnt."""
        if not self.norm_reward:
            return np.asarray(reward).astype(np.float32)
        return standardized(reward, NO_MEAN, self.ret_rms.var, self.epsilon, self.clip_reward)

    def unnormalize_obs(self, obs: Any) -> Any:
        """The counterpart of `normalize_obs`, but for what was clipped."""
        if not self.norm_obs:
            return copy.copy(obs)
        known = self._by_part()
        return with_parts(obs, {p: (obs if p is None else obs[p]) * np.sqrt(rms.var + self.epsilon) + rms.mean
                                for p, rms in known.items()})  # fmt: skip

    def unnormalize_reward(self, reward: Any) -> Any:
        """The counterpart of `normalize_reward`, but for what was clipped."""
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
        content = {name: getattr(self, name) for name in SETTINGS}
        content |= {"obs_rms": data_of(self.obs_rms), "ret_rms": data_of(self.ret_rms)}
        write_statistics(path, content)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Normalize:
        """What `save` wrote, or the pickle of Stable-Baselines' VecNormalize; runs no code of the file's.

        Raises:
            DataError: it is neither.
        """
        content = read_statistics(path)
        try:
            new = cls(**{name: content[name] for name in SETTINGS if name in content})
            new.set_statistics(content["obs_rms"], content["ret_rms"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{os.fspath(path)} has no normalization in it: {error}") from error
        return new

    def set_statistics(self, obs_rms: Any, ret_rms: Any) -> None:
        """Go on with other statistics, given as data. Raises ValueError, and goes on as before, if they do not fit."""
        before = self.obs_rms
        new: Any = None
        if obs_rms is not None and not isinstance(obs_rms, dict):
            raise DataError(f"these are no statistics: {obs_rms!r:.100}")
        if obs_rms is not None and isinstance(obs_rms.get("count"), float):
            new = self.statistics.from_data(obs_rms)
        elif obs_rms is not None:
            new = {key: self.statistics.from_data(value) for key, value in obs_rms.items()}
        returns = self.statistics.from_data(ret_rms)
        self.obs_rms = new
        if hasattr(self, "bound") and self.norm_obs:
            try:
                self._check_shapes(box_parts(self.bound.observation_space, self.norm_obs_keys, "Normalize"))
            except BaseException:
                self.obs_rms = before
                raise
        self.ret_rms = returns


def data_of(statistics: Any) -> Any:
    """Statistics as data: ours, or others with mean, var and count."""
    if statistics is None:
        return None
    if isinstance(statistics, dict):
        return {key: data_of(value) for key, value in statistics.items()}
    return RunningMeanStd.as_data(statistics)

"""The pool as an env of TorchRL: `ShoalEnv`, in place of ParallelEnv and SerialEnv over GymEnv."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.dialects.base import PoolFace
from shoal.errors import BadEnv, EnvError
from shoal.memory.answers import Ready
from shoal.support.checks import Ids
from shoal.support.optional_dependencies import require

require("torchrl", "ShoalEnv needs TorchRL", "torchrl")
import torch  # noqa: E402
from gymnasium.vector import VectorEnv  # noqa: E402
from tensordict import TensorDict, TensorDictBase  # noqa: E402
from torchrl.data import Categorical, Composite, Unbounded  # noqa: E402
from torchrl.envs import EnvBase, GymLikeEnv, default_info_dict_reader  # noqa: E402

from shoal.dialects.torchrl_async import AsyncWords  # noqa: E402
from shoal.dialects.torchrl_specs import action_codec, observation_codec  # noqa: E402

__all__ = ["ShoalEnv"]

FRAMES = 130  # so many can be held without a copy, if they are large: rollouts of 128 steps, and the step before


class ShoalEnv(EnvBase, AsyncWords, PoolFace):  # type: ignore[misc]
    """Many envs as one env of TorchRL, whose batch size is their number.

    Keys, specs and seeds are those of a ParallelEnv or SerialEnv of as many GymEnvs. An env is reset when TorchRL asks
    for it, by the entry "_reset", and is stepped unless the entry "_step" says otherwise: the others are not touched.

    Args:
        env, num_envs: as for `shoal.Pool`.
        device: where tensors are; None, as for GymEnv, for the CPU, without a device in the TensorDicts.
        categorical_action_encoding: whether choices are numbers; by default they are one-hot, as in GymEnv.
        run_type_checks, allow_done_after_reset: as for `torchrl.envs.EnvBase`.
        **pool_options: as for `shoal.Pool`. By default (`copy="lend"`, `frames=130`) large observations are the pool's
            own memory, and what a TensorDict holds is never written again. With `copy=False` all are views, which are
            overwritten after `frames - 1` further steps or resets.

    Attributes:
        pool: the `shoal.Pool` below, which has all else: `stats`, `call`, `get_attr`, `set_attr`, `snapshot`, ...
        num_envs: how many envs there are.
    """

    _api, _mode = "a TorchRL env", "disabled"

    def __init__(
        self,
        env: Any,
        num_envs: int | None = None,
        *,
        device: Any = None,
        categorical_action_encoding: bool = False,
        run_type_checks: bool = False,
        allow_done_after_reset: bool = False,
        **pool_options: Any,
    ):
        super().__init__(device=device, run_type_checks=run_type_checks, allow_done_after_reset=allow_done_after_reset)
        self._categorical = categorical_action_encoding
        self._info_readers: list[Any] = []
        if pool_options.setdefault("copy", "lend") == "lend":
            pool_options.setdefault("frames", FRAMES)
        # TorchRL lets envs be stepped whose episodes are over: FrameSkipTransform does. The env must know.
        pool_options.setdefault("check_reset", "none")
        self._open(env, num_envs, pool_options)
        self.is_closed = False

    def _learn(self) -> None:
        pool = self.pool
        if pool.lanes_per_env != 1 or pool.lane_names is not None:
            raise BadEnv(
                "ShoalEnv resets each row alone, and these envs have several rows each: use shoal.make for vector "
                'envs, and shoal.make(api="agents") for several agents'
            )
        self.num_envs = count = pool.num_envs
        self._observations = observation_codec(pool.single_observation_space, self._categorical)
        self._actions = action_codec(pool.single_action_space, self._categorical)
        self.batch_size = torch.Size([count])
        device = self.device
        flag = Categorical(2, dtype=torch.bool, shape=(count, 1), device=device)
        names = ("done", "terminated", "truncated")
        self.observation_spec = self._on_device(self._observations.spec)
        self.full_action_spec = self._on_device(self._actions.spec)
        self.full_done_spec = Composite({name: flag.clone() for name in names}, shape=(count,), device=device)
        self.reward_spec = Unbounded((count, 1), device=device)
        self._start_async()

    def _on_device(self, spec: Any) -> Any:
        """Expand the spec of one env to that of all."""
        whole = spec.expand(self.num_envs)
        return whole if self.device is None else whole.to(self.device)

    # ---- steps and resets --------------------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        asked = tensordict.get("_step", None)
        mask = None if asked is None else self._as_mask(asked)
        with self.pool.turn:
            self._begin()
            if mask is None or mask.all():
                return self._answer(self._exchange(self._actions.decode(tensordict)))
            return self._step_some(tensordict, np.flatnonzero(mask))

    def _step_some(self, tensordict: TensorDictBase, ids: Ids) -> TensorDictBase:
        """Step some envs. The rows of the others are as they were, with a reward of 0."""
        rows = torch.from_numpy(ids)
        self.pool.send(self._actions.decode(tensordict[rows]), ids)
        found = self._answer(self._collect(self.pool.wait_reset, ids, env_ids=ids))
        whole = found.new_zeros(self.batch_size)
        whole.update(tensordict.select(*found.keys(True, True), strict=False).clone())
        whole[rows] = found
        return whole

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        asked = None if tensordict is None else tensordict.get("_reset", None)
        mask = np.ones(self.num_envs, np.bool_) if asked is None else self._as_mask(asked)
        ids = np.flatnonzero(mask)
        each = kwargs.pop("list_of_kwargs", None)
        if each is not None:  # as ParallelEnv takes it: what each env's reset gets
            kwargs |= {name: [one.get(name) for one in each] for name in ("seed", "options")}
        with self.pool.turn:
            self._begin()
            ready = Ready(ids, 0, -1, {})
            if len(ids):
                ready = self._restart(ids, **kwargs)
            return self._first_answer(ready if len(ids) == self.num_envs else self.pool.data.whole(ready))

    def _restart(self, ids: Ids, seed: Any = None, options: Any = None) -> Ready:
        """Reset some envs; seeds and options may be lists with one for each env of the pool."""

        def chosen(given: Any) -> Any:
            several = isinstance(given, Sequence | np.ndarray) and not isinstance(given, str)
            return [given[i] for i in ids.tolist()] if several else given

        try:
            return self.pool.restart(ids, chosen(seed), chosen(options))
        except EnvError:
            raise
        except BaseException:
            self._late = True
            raise

    def _as_mask(self, asked: torch.Tensor) -> npt.NDArray[np.bool_]:
        mask: npt.NDArray[np.bool_] = asked.reshape(self.num_envs, -1).any(-1).cpu().numpy()
        return mask

    def _begin(self) -> None:
        self._check_none_flies()
        self._drop_late()

    def set_seed(self, seed: int | None = None, static_seed: bool = False) -> int | None:
        """Reset all envs with seeds, which follow from each other as those of ParallelEnv's envs do.

        Returns:
            the seed for a next env.
        """
        self._seeds: list[int | None] = []
        for _ in range(self.num_envs):
            seed = super().set_seed(seed, static_seed)  # notes it by `_set_seed`, and returns the next one
        self.reset(seed=self._seeds)
        return seed

    def _set_seed(self, seed: int | None) -> None:
        self._seeds.append(seed)

    # ---- answers -----------------------------------------------------------------------------------------------

    def _answer(self, ready: Ready) -> TensorDictBase:
        """Make a TensorDict of the answers to a step, one row for each env of `ready`."""
        obs, reward, terminated, truncated = self.pool.data.take_step(ready)
        values = self._observations.encode(obs)
        values["reward"] = torch.from_numpy(reward).to(torch.float32).unsqueeze(-1)
        return self._finished(values, terminated, truncated, ready)

    def _first_answer(self, ready: Ready) -> TensorDictBase:
        """Make a TensorDict of the answers to a reset."""
        data = self.pool.data
        values = self._observations.encode(data.take_obs(ready))
        return self._finished(values, data.take(ready, "terminated"), data.take(ready, "truncated"), ready)

    def _finished(self, values: dict[str, Any], terminated: Any, truncated: Any, ready: Ready) -> TensorDictBase:
        size = torch.Size([len(ready.ids)])
        values["done"] = torch.from_numpy(terminated | truncated).unsqueeze(-1)
        values["terminated"] = torch.from_numpy(terminated).unsqueeze(-1)
        values["truncated"] = torch.from_numpy(truncated).unsqueeze(-1)
        found = _tensordict(values, size)
        if self._info_readers:
            infos = self._infos(ready)
            for reader in self._info_readers:
                read = reader(infos, found)
                found = found if read is None else read
        return found if self.device is None else found.to(self.device)

    # ---- infos -------------------------------------------------------------------------------------------------

    _add_info = VectorEnv._add_info  # how Gymnasium joins infos

    def _infos(self, ready: Ready) -> dict[str, Any]:
        """Join the infos of envs to a dict of arrays, with a row for each env of `ready`."""
        joined = self._join_infos(ready.infos)
        if len(ready.ids) == self.num_envs:
            return joined
        return {key: value[ready.ids] if isinstance(value, np.ndarray) else value for key, value in joined.items()}

    @property
    def info_dict_reader(self) -> list[Any]:
        """The readers that were set."""
        return self._info_readers

    def set_info_dict_reader(self, info_dict_reader: Any = None, ignore_private: bool = True) -> ShoalEnv:
        """Read entries of infos into the TensorDicts, as GymEnv does. Specs may be those of one env."""
        spec = getattr(info_dict_reader, "info_spec", None)
        if type(info_dict_reader) is default_info_dict_reader and spec is not None and not spec.shape:
            spec = Composite({key: one.expand(self.num_envs, *one.shape) for key, one in spec.items()})
            info_dict_reader = default_info_dict_reader(info_dict_reader.keys, spec, info_dict_reader.ignore_private)
        GymLikeEnv.set_info_dict_reader(self, info_dict_reader, ignore_private)
        return self

    auto_register_info_dict = GymLikeEnv.auto_register_info_dict

    # ---- life --------------------------------------------------------------------------------------------------

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close all envs and end all workers. May be called again."""
        self.is_closed = True
        self.pool.close()

    def __repr__(self) -> str:
        return f"ShoalEnv({self.pool!r}, batch_size={self.batch_size}, device={self.device})"


def _tensordict(values: dict[str, Any], size: torch.Size) -> TensorDict:
    """Make a TensorDict of tensors that are known to fit, as TorchRL's own wrappers do: checks take long."""
    for key, value in values.items():
        if isinstance(value, dict):
            values[key] = _tensordict(value, size)
    return TensorDict._new_unsafe(values, batch_size=size)

"""Vector envs as envs with several lanes: Gymnasium's, and EnvPools.

EnvPool need not be installed: its envs are recognized by their attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from shoal.envs.batch_lanes import BatchLanes, by_lane
from shoal.envs.group import Answers, Infos
from shoal.errors import BadEnv
from shoal.spaces.leaves import Array, get_path

# For each mode of a vector env, the modes in which a pool can use it. One that leaves resets to the caller can be reset
# at once by this adapter.
USABLE = {
    AutoresetMode.NEXT_STEP: ("next_step",),
    AutoresetMode.SAME_STEP: ("same_step",),
    AutoresetMode.DISABLED: ("disabled", "same_step"),
}


def as_lanes(env: Any) -> Any:
    """Return the env with its rows as lanes; None if it is no batch."""
    if all(hasattr(env, name) for name in ("async_reset", "recv", "send", "config")):  # some are vector envs as well
        return EnvPoolLanes(env)
    return VectorLanes(env) if isinstance(env, VectorEnv) else None


class VectorLanes(BatchLanes):
    """A Gymnasium vector env. One that leaves resets to the caller can be used with "same_step" as well."""

    def __init__(self, env: VectorEnv[Any, Any, Any]):
        own_mode = AutoresetMode((env.metadata or {}).get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self.modes = USABLE[own_mode]
        self.resets_alone = own_mode == AutoresetMode.DISABLED
        super().__init__(env, env.num_envs, env.single_observation_space, env.single_action_space)

    def reset(self, rows: Array, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        if len(rows) < self.num_lanes:  # of a vector env that leaves resets to the caller
            options = {**(options or {}), "reset_mask": self._mask(rows)}
        return self._begin(rows, seeds, options, out, slice(None))

    def _begin(self, rows: Array, seeds: Any, options: Any, out: Answers, at: Any) -> Infos:
        """Begin an episode in these rows; `at` are their places in `out`."""
        given = None if all(seed is None for seed in seeds) else self._all_seeds(rows, seeds)
        obs, infos = self.env.reset(seed=given, options=options)
        self._write(out.obs, obs, at, rows)
        self._episodes.begun(rows, out, at)
        return by_lane(infos, rows)

    def step(self, rows: Array, actions: Any, out: Answers) -> Infos:
        if self.resets_alone:
            return self._episodes.step(
                rows, out,
                lambda some, _: by_lane(self._step_all(actions, out), some),
                lambda some, at: self._begin(some, [None] * len(some), {"reset_mask": self._mask(some)}, out, at),
            )  # fmt: skip
        infos = self._step_all(actions, out)
        self._episodes.note(out)
        if not self._episodes.rule.resets_at_once:
            return by_lane(infos, rows)
        finals = infos.get("final_obs")
        for row in np.flatnonzero(out.began).tolist():
            if finals is not None and finals[row] is not None:
                out.has_final[row] = True
                for leaf, target in zip(self._leaves, out.final, strict=True):
                    target[row] = get_path(finals[row], leaf.path)
        return by_lane({name: infos[name] for name in infos if name not in ("final_obs", "_final_obs")}, rows)


class EnvPoolLanes(BatchLanes):
    """An EnvPool, or an env with the same methods, in its synchronous mode."""

    modes = ("next_step",)

    def __init__(self, env: Any):
        count = int(env.config["num_envs"])
        if int(env.config.get("batch_size") or count) != count:
            raise BadEnv(f"{env!r} answers in batches below num_envs: make it with batch_size=num_envs")
        super().__init__(env, count, env.observation_space, env.action_space)

    def reset(self, rows: Array, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        obs, infos = self.env.reset()  # an EnvPool gets its seeds when it is made, and not here
        self._begin_all(obs, out)
        return self._infos(infos, rows)

    def _infos(self, infos: Any, rows: Array) -> Infos:
        """Each name has a column. The ids of envs are left out."""
        ids = ("env_id", "players", "elapsed_step")
        kept = {name: value for name, value in infos.items() if name not in ids and np.ndim(value)}
        return by_lane({name: column for name, column in kept.items() if len(column) == len(rows)}, rows)

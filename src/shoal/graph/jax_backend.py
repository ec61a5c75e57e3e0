"""The backend "jax": one functional env, stepped for all lanes at once on a device.

It lies beside the package `jax`, which needs JAX: what the backend can do is asked on machines without it, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.backends.inline import RowsBackend
from shoal.errors import BadEnv

Array = npt.NDArray[Any]


class JaxBackend(RowsBackend):
    """Its state stays on the device; answers are copied from there."""

    name = "jax"

    @staticmethod
    def make_envs(env: Any, num_envs: int, kwargs: Mapping[str, Any]) -> DeviceEnvs:
        """Make the envs of a pool.

        Args:
            env: a functional env, a class or function that makes one, or a pair (env, params), as `gymnax.make` gives
                it.
            kwargs: for that class or function; `params`, `max_episode_steps` and `rng` are for BatchedFunctionalEnv.
        """
        from shoal.graph.jax import BatchedFunctionalEnv

        kwargs = dict(kwargs)
        options = {name: kwargs.pop(name) for name in ("params", "max_episode_steps", "rng") if name in kwargs}
        if isinstance(env, str):
            raise BadEnv(f'backend="jax" takes a functional env or a function that makes one, found the id {env!r}')
        if isinstance(env, type) or (callable(env) and not hasattr(env, "reset") and not hasattr(env, "initial")):
            env = env(**kwargs)
        elif kwargs:
            raise BadEnv(
                f"env_kwargs are for a class or function that makes the env, found {sorted(kwargs)} for {env!r}"
            )
        if isinstance(env, tuple) and len(env) == 2:
            env, options["params"] = env[0], options.get("params", env[1])
        if isinstance(env, BatchedFunctionalEnv):
            raise BadEnv("a BatchedFunctionalEnv is a batch already: pass the functional env in it, as its `env`")
        return DeviceEnvs(BatchedFunctionalEnv(env, num_envs, autoreset="disabled", **options))


class DeviceEnvs:
    """A BatchedFunctionalEnv and its state, as a pool steps them: see `shoal.envs.batched.BatchedEnv`.

    The `state` of all envs may be taken out and put back between two steps.
    """

    render_mode = None

    def __init__(self, functional: Any):
        self.functional, self.num_envs = functional, functional.num_envs
        self.name = type(functional.env).__name__
        self.single_observation_space, self.single_action_space = functional.observation_space, functional.action_space
        self.state: Any = None
        self._unseeded = np.ones(self.num_envs, np.bool_)  # lanes that have no stream of their own yet

    def reset(self, mask: Array, seeds: Sequence[int | None]) -> Any:
        if self.state is None:
            self.state, _ = self.functional.init(0)
        numbers = np.array([0 if seed is None else seed for seed in seeds], np.uint64)
        seeded = np.array([seed is not None for seed in seeds])
        chance = mask & self._unseeded & ~seeded  # reset without a seed, now and before
        numbers[chance] = np.random.default_rng().integers(0, 2**63, int(chance.sum()), np.uint64)
        seeded |= chance
        self._unseeded &= ~mask
        given = (numbers, seeded) if seeded.any() else ()
        self.state, obs = self.functional.reset_rows(self.state, mask, *given)
        return obs

    def step(self, mask: Array, actions: Any) -> tuple[Any, Any, Any, Any]:
        self.state, out = self.functional.step(self.state, actions, None if mask.all() else mask)
        return out.obs, out.reward, out.terminated, out.truncated

    def save(self) -> dict[str, Array]:
        if self.state is None:
            self.state, _ = self.functional.init(0)
        saved = self.functional.save(self.state)
        return {**saved, "rng": np.repeat(saved["rng"], self.num_envs), "unseeded": self._unseeded.copy()}

    def load(self, saved: dict[str, Array], mask: Array) -> None:
        merged = {
            name: np.where(mask.reshape(-1, *[1] * (old.ndim - 1)), saved[name], old)
            for name, old in self.save().items()
        }
        self._unseeded = merged.pop("unseeded")
        self.state = self.functional.load({**merged, "rng": merged["rng"][np.argmax(mask)]})

    def close(self) -> None:
        self.state = None  # frees the device's memory

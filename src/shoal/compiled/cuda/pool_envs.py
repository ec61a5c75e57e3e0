"""`backend="cuda"`: a pool of compiled envs on a GPU. Their state stays there; answers are copied to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.compiled.cuda.envs import CudaEnvs
from shoal.spaces.leaves import assemble, flatten, get_path

Array = npt.NDArray[Any]
OPTIONS = ("precision", "debug")  # those of env_kwargs that are not for the class


class PoolEnvs:
    """CudaEnvs as a pool steps them, see `shoal.envs.batched.BatchedEnv`. Rows are lanes.

    Attributes:
        cuda: the envs themselves; their arrays are on the GPU.
    """

    render_mode = None

    def __init__(self, envs: CudaEnvs):
        self.cuda, self.group_size, self.num_envs = envs, envs.num_agents, envs.num_lanes
        self.single_observation_space, self.single_action_space = (
            envs.single_observation_space, envs.single_action_space,
        )  # fmt: skip
        self._leaves = flatten(self.single_observation_space)

    @property
    def fields(self) -> tuple[str, ...]:
        """Name what each env has for itself: the fields of its state, with its params."""
        return self.cuda.definition.dtype.names or ()

    def get_rows(self, name: str, rows: Sequence[int]) -> list[Any]:
        """See BatchedEnv."""
        return list(self.cuda.get(name)[np.asarray(rows) // self.group_size])

    def set_rows(self, name: str, rows: Sequence[int], values: Sequence[Any]) -> None:
        """See BatchedEnv."""
        whole = self.cuda.get(name)
        for row, value in zip(rows, values, strict=True):
            whole[row // self.group_size] = value
        self.cuda.set(name, whole)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the class itself, such as its metadata."""
        if name.startswith("_") or name == "cuda":
            raise AttributeError(name)
        return getattr(self.cuda.definition.env, name)

    def reset(self, mask: Array, seeds: Sequence[int | None]) -> Any:
        """See BatchedEnv. The seed of an env is that of its first lane."""
        self.cuda.reseed(seeds[:: self.group_size])
        self.cuda.reset(mask=mask[:: self.group_size])
        return self._obs()

    def step(self, mask: Array, actions: Any) -> tuple[Any, Array, Array, Array]:
        """See BatchedEnv."""
        envs = self.cuda
        if mask.all():
            envs.step(actions)
        else:
            envs.step_rows(mask[:: self.group_size], actions)
        return self._obs(), envs.reward.numpy(), envs.terminated.numpy(), envs.truncated.numpy()

    def _obs(self) -> Any:
        leaves = [get_path(self.cuda.obs, leaf.path).numpy() for leaf in self._leaves]
        return assemble(self.single_observation_space, leaves)

    def save(self) -> dict[str, Array]:
        """See BatchedEnv."""
        return {name: np.repeat(array, self.group_size, axis=0) for name, array in self.cuda.save().items()}

    def load(self, saved: dict[str, Array], mask: Array) -> None:
        """See BatchedEnv."""
        rows = {name: array[:: self.group_size] for name, array in saved.items()}
        self.cuda.load(rows, mask[:: self.group_size])

    def close(self) -> None:
        """See BatchedEnv."""
        self.cuda.close()


def make_envs(env: Any, num_envs: int, env_kwargs: Mapping[str, Any]) -> PoolEnvs:
    """Make the envs of a pool."""
    kwargs = dict(env_kwargs)
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    return PoolEnvs(CudaEnvs(env, num_envs, autoreset="disabled", env_kwargs=kwargs, **options))

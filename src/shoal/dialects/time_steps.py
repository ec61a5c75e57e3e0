"""What dm_env and TF-Agents have in common: a pool that answers with batched TimeSteps, and describes them by specs.

Both libraries keep step type, reward, discount and observation in this order. In both, the last step of an episode is
followed by the first of the next, which ignores its action: the pool's own "next_step".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces

from shoal.dialects.base import PoolFace, open_pool
from shoal.envs.time_steps import FIRST, LAST, MID, TimeStepEnv, is_leaf, map_spec
from shoal.errors import BadEnv
from shoal.memory.answers import Ready
from shoal.spaces.leaves import Kind, assemble, flatten

__all__ = ["MakeSpec", "Parts", "Specs", "TimeStepFace", "spec_of"]

Array = npt.NDArray[Any]
Parts = tuple[Array, Array, Array, Any]  # a batched TimeStep: step type, reward, discount, observation
MakeSpec = Callable[[Any, Any, Any, Any, str], Any]  # (shape, type, minimum, maximum, name) -> a library's own spec


class Specs(NamedTuple):
    """The specs of one env; `observation` and `action` may be nested."""

    observation: Any
    action: Any
    reward: Any
    discount: Any


class TimeStepFace(PoolFace):
    """A pool that answers with batched TimeSteps. `_open` must be called first.

    Attributes:
        infos: those that came with the last TimeStep and are not empty, by env.
    """

    def _open(
        self,
        env: Any,
        num_envs: int | None,
        make_spec: MakeSpec,
        pool_options: dict[str, Any],
        partial: bool = False,
    ) -> None:
        """Make the pool, and find out the specs.

        Args:
            env, num_envs, pool_options: as for `shoal.Pool`; autoreset is "next_step", as both libraries have it.
            make_spec: makes a spec of the library's own.
            partial: whether a TimeStep may have rows of some envs only.
        """
        self.pool = open_pool(env, num_envs, pool_options, "an env with TimeSteps", "next_step", partial)
        self.infos: dict[int, dict[str, Any]] = {}
        try:
            self._specs = specs = self._agree(make_spec)
        except BaseException:
            self.pool.close()
            raise
        self._reward_type, self._discount_type = np.dtype(specs.reward.dtype), np.dtype(specs.discount.dtype)
        self._bools = "b" in {np.dtype(leaf.dtype).kind for leaf in _leaves(specs.action)}
        obs_type = self.pool.single_observation_space.dtype
        self._same_type = is_leaf(specs.observation) and obs_type == np.dtype(specs.observation.dtype)

    def _agree(self, make_spec: MakeSpec) -> Specs:
        """The specs of the first env. Raises ValueError if those of another env differ."""
        found = self.pool.apply(_specs_of)
        self._has_specs = [specs is not None for specs in found]
        own = [specs for specs in found if specs is not None]
        self._all_have_specs = len(own) == len(found)
        for env_id, specs in enumerate(found):
            if specs is not None and specs != own[0]:
                raise ValueError(f"env {env_id} has the specs {specs}, and the first has {own[0]}: they must be equal")
        derived = Specs(
            spec_of(self.pool.single_observation_space, make_spec, "observation"),
            spec_of(self.pool.single_action_space, make_spec, "action"),
            make_spec((), np.float32, None, None, "reward"),
            make_spec((), np.float32, 0.0, 1.0, "discount"),
        )
        if not own:
            return derived
        return Specs(*(
            other if spec is None else map_spec(lambda leaf: _translated(leaf, make_spec), spec)
            for spec, other in zip(own[0], derived, strict=True)
        ))  # fmt: skip

    def _first_step(self, seed: Any = None) -> Parts:
        """Begin a new episode in every env."""
        batch = self.pool.reset(seed=seed)
        self.infos = batch.info
        count = self.pool.num_envs
        step_type, reward = np.full(count, FIRST, np.int32), np.zeros(count, self._reward_type)
        return step_type, reward, np.ones(count, self._discount_type), self._typed(batch.obs)

    def _next_step(self, actions: Any) -> Parts:
        """Step every env, and begin a new episode where the last answer ended one."""
        if self._bools:  # spaces have no arrays of bool
            actions = map_spec(_as_int, self._specs.action, actions)
        return self._read_step(self.pool.exchange(actions))

    def _read_step(self, ready: Ready) -> Parts:
        """The answer of these envs as a batched TimeStep."""
        data = self.pool.data
        obs, reward, terminated, truncated = data.take_step(ready)
        step_type = np.full(len(reward), MID, np.int32)
        step_type[data.take(ready, "began")] = FIRST
        step_type[terminated | truncated] = LAST
        discount = (~terminated).astype(self._discount_type)
        self.infos = ready.infos
        for env_id, info in ready.infos.items():
            if "discount" in info and self._has_specs[env_id]:
                discount[ready.ids == env_id] = info["discount"]
        return step_type, reward.astype(self._reward_type, copy=False), discount, self._typed(obs)

    def _typed(self, obs: Any) -> Any:
        """The observation nested and typed as the spec says, if spaces cannot express that."""
        if self._same_type:
            return obs
        return map_spec(
            lambda leaf, value: np.asarray(value).astype(leaf.dtype, copy=False), self._specs.observation, obs
        )

    def observation_spec(self) -> Any:
        """Of one env."""
        return self._specs.observation

    def action_spec(self) -> Any:
        """Of one env."""
        return self._specs.action

    def reward_spec(self) -> Any:
        """Of one env."""
        return self._specs.reward

    def discount_spec(self) -> Any:
        """Of one env."""
        return self._specs.discount


def _leaves(spec: Any) -> list[Any]:
    found: list[Any] = []
    map_spec(found.append, spec)
    return found


def _as_int(spec: Any, value: Any) -> Any:
    array = np.asarray(value)
    return array.astype(np.int8) if array.dtype.kind == "b" else array


def _specs_of(env: Any) -> Specs | None:
    """In the worker: the env's own specs; None for an env that has spaces."""
    if not isinstance(env, TimeStepEnv):
        return None
    own = env.env
    reward, discount = (
        getattr(own, name)() if callable(getattr(own, name, None)) else None
        for name in ("reward_spec", "discount_spec")
    )
    return Specs(own.observation_spec(), own.action_spec(), reward, discount)


def _translated(leaf: Any, make_spec: MakeSpec) -> Any:
    """A spec as one of the library that asks."""
    low, high = getattr(leaf, "minimum", None), getattr(leaf, "maximum", None)
    return make_spec(tuple(leaf.shape), np.dtype(leaf.dtype), low, high, getattr(leaf, "name", None) or "")


def spec_of(space: Space[Any], make_spec: MakeSpec, name: str) -> Any:
    """The spec of a Gymnasium space. A part of a Dict is named by its key, a part of a Tuple by its place."""
    specs = []
    for leaf in flatten(space):
        if leaf.kind is not Kind.ARRAY:
            raise BadEnv(
                f"the {name} space {space} has no spec: TimeSteps hold numbers only, and {name}{leaf.name} is a "
                f"{leaf.kind.value}; leave it out by a wrapper"
            )
        part, inside = name, space
        for key in leaf.path:
            part = str(key) if isinstance(inside, spaces.Dict) else f"{part}_{key}"
            inside = inside[key]  # type: ignore[index]
        specs.append(make_spec(leaf.shape, leaf.dtype, leaf.low, leaf.high, part))
    return assemble(space, specs)

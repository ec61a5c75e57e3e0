"""What dm_env and TF-Agents have in common: a pool whose answers are batched TimeSteps, described by specs.

Both libraries keep step type, reward, discount and observation in this order, and both go on after the last step of an
episode with the first of the next, for which the action is ignored: the pool's own "next_step".
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

__all__ = ["MakeSpec", "Parts", "Specs", "TimeStepFace", "TimeStepPool", "spec_of"]

Array = npt.NDArray[Any]
MakeSpec = Callable[[Any, Any, Any, Any, str], Any]  # (shape, type, minimum, maximum, name) -> a library's own spec


class Specs(NamedTuple):
    """What one env says about itself; `observation` and `action` may be nested."""

    observation: Any
    action: Any
    reward: Any
    discount: Any


class Parts(NamedTuple):
    """A batched TimeStep, as both libraries have it."""

    step_type: Array
    reward: Array
    discount: Array
    observation: Any


class TimeStepPool:
    """A pool that answers with batched TimeSteps.

    Args:
        env, num_envs: as for `shoal.Pool`.
        make_spec: makes a spec of the library's own.
        pool_options: as for `shoal.Pool`; autoreset is "next_step", as both libraries have it.
        partial: whether a TimeStep may have rows of some envs only.

    Attributes:
        specs: of one env, without the batch dimension.
        foreign: whether all envs describe themselves by specs, rather than by spaces.
        infos: those of the last answer that are not empty, by env.
    """

    def __init__(
        self,
        env: Any,
        num_envs: int | None,
        make_spec: MakeSpec,
        pool_options: dict[str, Any],
        partial: bool = False,
    ):
        self.pool = open_pool(env, num_envs, pool_options, "an env with TimeSteps", "next_step", partial)
        self.infos: dict[int, dict[str, Any]] = {}
        try:
            self.specs = self._agree(make_spec)
        except BaseException:
            self.pool.close()
            raise
        self._reward_type, self._discount_type = np.dtype(self.specs.reward.dtype), np.dtype(self.specs.discount.dtype)
        self._bools = "b" in {np.dtype(leaf.dtype).kind for leaf in _leaves(self.specs.action)}
        observation, space = self.specs.observation, self.pool.single_observation_space
        self._as_it_is = is_leaf(observation) and space.dtype == np.dtype(observation.dtype)

    def _agree(self, make_spec: MakeSpec) -> Specs:
        """The specs of the first env. Raises ValueError if those of another env differ."""
        found = self.pool.apply(_specs_of)
        self._has_specs = [specs is not None for specs in found]
        own = [specs for specs in found if specs is not None]
        self.foreign = len(own) == len(found)
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

    def reset(self, seed: Any = None) -> Parts:
        """Begin a new episode in every env."""
        batch = self.pool.reset(seed=seed)
        self.infos = batch.info
        count = self.pool.num_envs
        return Parts(
            np.full(count, FIRST, np.int32), np.zeros(count, self._reward_type), np.ones(count, self._discount_type),
            self._restored(batch.obs),
        )  # fmt: skip

    def step(self, actions: Any) -> Parts:
        """Step every env, and begin a new episode where the last answer ended one."""
        if self._bools:  # spaces have no arrays of bool
            actions = map_spec(_as_int, self.specs.action, actions)
        return self.read(self.pool.exchange(actions))

    def read(self, ready: Ready) -> Parts:
        """What the pool has answered."""
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
        return Parts(step_type, reward.astype(self._reward_type, copy=False), discount, self._restored(obs))

    def _restored(self, obs: Any) -> Any:
        """The observation nested and typed as the spec says, where spaces have no word for that."""
        return obs if self._as_it_is else map_spec(_typed, self.specs.observation, obs)


class TimeStepFace(PoolFace):
    """A dialect that has its TimeStepPool as `_steps`."""

    _steps: TimeStepPool

    @property
    def infos(self) -> dict[int, dict[str, Any]]:
        """The infos that came with the last TimeStep and are not empty, by env."""
        return self._steps.infos

    def observation_spec(self) -> Any:
        """Of one env."""
        return self._steps.specs.observation

    def action_spec(self) -> Any:
        """Of one env."""
        return self._steps.specs.action

    def reward_spec(self) -> Any:
        """Of one env."""
        return self._steps.specs.reward

    def discount_spec(self) -> Any:
        """Of one env."""
        return self._steps.specs.discount


def _leaves(spec: Any) -> list[Any]:
    found: list[Any] = []
    map_spec(found.append, spec)
    return found


def _as_int(spec: Any, value: Any) -> Any:
    array = np.asarray(value)
    return array.astype(np.int8) if array.dtype.kind == "b" else array


def _typed(spec: Any, value: Any) -> Any:
    return np.asarray(value).astype(spec.dtype, copy=False)


def _specs_of(env: Any) -> Specs | None:
    """Where the env lives: its own specs, None for an env that has spaces."""
    if not isinstance(env, TimeStepEnv):
        return None
    own = env.env
    reward, discount = (
        getattr(own, name)() if callable(getattr(own, name, None)) else None
        for name in ("reward_spec", "discount_spec")
    )
    return Specs(own.observation_spec(), own.action_spec(), reward, discount)


def _translated(leaf: Any, make_spec: MakeSpec) -> Any:
    """A spec in the words of the library that asks."""
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

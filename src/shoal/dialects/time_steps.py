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

from shoal.dialects.base import PoolFace
from shoal.envs.time_steps import FIRST, LAST, MID, TimeStepEnv, is_leaf, map_spec
from shoal.errors import BadEnv
from shoal.memory.answers import Ready
from shoal.spaces.leaves import Kind, assemble, flatten

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
    """A pool that answers with batched TimeSteps.

    Attributes:
        infos: those that came with the last TimeStep and are not empty, by env.
    """

    _api, _mode = "an env with TimeSteps", "next_step"
    _make_spec: MakeSpec  # makes a spec of the library's own
    _own_specs: tuple[type, ...] = ()  # specs that are the library's own already

    def _learn(self) -> None:
        self.infos: dict[int, dict[str, Any]] = {}
        self._specs = specs = self._agree()
        self._reward_type, self._discount_type = np.dtype(specs.reward.dtype), np.dtype(specs.discount.dtype)
        kinds: list[str] = []
        map_spec(lambda leaf: kinds.append(np.dtype(leaf.dtype).kind), specs.action)
        self._bools = "b" in kinds
        obs_type = self.pool.single_observation_space.dtype
        self._same_type = is_leaf(specs.observation) and obs_type == np.dtype(specs.observation.dtype)

    def _agree(self) -> Specs:
        """The specs of the first env, in the library's own words. Raises ValueError if those of another env differ."""
        make_spec = self._make_spec
        found = self.pool.apply(_specs_of)
        self._has_specs = [specs is not None for specs in found]
        self._all_have_specs = all(self._has_specs)
        own = [specs for specs in found if specs is not None]
        for env_id, specs in enumerate(found):
            if specs is not None and specs != own[0]:
                what = "action spec" if specs.action != own[0].action else "time_step_spec"
                raise ValueError(
                    f"All environments must have the same {what}: env {env_id} has the specs {specs}, and the first "
                    f"has {own[0]}"
                )
        derived = Specs(
            spec_of(self.pool.single_observation_space, make_spec, "observation"),
            spec_of(self.pool.single_action_space, make_spec, "action"),
            make_spec((), np.float32, None, None, "reward"),
            make_spec((), np.float32, 0.0, 1.0, "discount"),
        )
        if not own:
            return derived

        def translated(leaf: Any) -> Any:
            if isinstance(leaf, self._own_specs):
                return leaf
            low, high = getattr(leaf, "minimum", None), getattr(leaf, "maximum", None)
            return make_spec(tuple(leaf.shape), np.dtype(leaf.dtype), low, high, getattr(leaf, "name", None) or "")

        return Specs(*(
            other if spec is None else map_spec(translated, spec)
            for spec, other in zip(own[0], derived, strict=True)
        ))  # fmt: skip

    def _first_step(self, seed: Any = None) -> Parts:
        """Begin a new episode in every env."""
        with self.pool.turn:
            self.pool.async_reset(seed=seed)
            return self._read_step(self._collect(self.pool.wait_reset))

    def _next_step(self, actions: Any) -> Parts:
        """Step every env, and begin a new episode where the last answer ended one."""
        if self._bools:  # spaces have no arrays of bool
            actions = map_spec(_as_int, self._specs.action, actions)
        with self.pool.turn:
            if self._late:
                self._drop_late()
            return self._read_step(self._exchange(actions))

    def _read_step(self, ready: Ready) -> Parts:
        """The answer of these envs as a batched TimeStep."""
        data = self.pool.data
        obs, reward, terminated, truncated = data.take_step(ready)
        step_type = np.full(len(reward), MID, np.int32)
        step_type[data.take(ready, "began")] = FIRST
        step_type[terminated | truncated] = LAST
        discount = (~terminated).astype(self._discount_type)
        self.infos = ready.infos
        for env_id, info in ready.infos.items() if any(self._has_specs) else ():
            if "discount" in info and self._has_specs[env_id]:
                discount[ready.ids == env_id] = info["discount"]
        if not self._same_type:  # nested and typed as the spec says, which spaces cannot express
            obs = map_spec(
                lambda leaf, value: np.asarray(value).astype(leaf.dtype, copy=False), self._specs.observation, obs
            )
        return step_type, reward.astype(self._reward_type, copy=False), discount, obs

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

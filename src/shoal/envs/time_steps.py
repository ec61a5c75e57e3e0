"""Envs of dm_env and TF-Agents, which answer with TimeSteps and describe themselves by specs, as Gymnasium envs.

Neither library is imported: such an env is recognized by its specs, and a spec has a shape, a type and maybe bounds.

TF-Agents' own `restart`, `transition`, `truncation` and `termination` are replaced by faster versions (`quicken`): they
search their arguments for tensors, in which a cheap PyEnvironment spends nine tenths of its step. If an observation is
a numpy array and a reward is a number, ours make the same TimeStep at once; everything else they pass on to the
originals.

LAST with a discount of 0 becomes `terminated`, LAST with any other becomes `truncated`. A discount that these flags do
not express (within an episode one other than 1, at its end one other than 0 and 1) is in the info, as "discount".
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
from gymnasium import Space, spaces

from shoal.envs.guarded_pickles import dumps
from shoal.envs.seeding import generators_of, seed_generators
from shoal.envs.wrapper_layers import ForeignEnv
from shoal.errors import BadEnv

FIRST, MID, LAST = 0, 1, 2
MOST_CHOICES = 1 << 20  # a whole number with more values than this becomes a Box, not a Discrete
_NUMBERS = (float, int, np.float32, np.float64)
_TF_AGENTS = ("tf_agents.trajectories.time_step", "tf_agents.trajectories")  # the second imports them by name
_ONE, _ZERO = np.ones((), np.float32), np.zeros((), np.float32)


def has_specs(env: Any) -> bool:
    """Whether an env describes itself by specs, rather than by spaces."""
    described = all(callable(getattr(env, name, None)) for name in ("observation_spec", "action_spec"))
    return described and not isinstance(env, type | ForeignEnv) and hasattr(env, "step") and hasattr(env, "reset")


def is_leaf(spec: Any) -> bool:
    """Whether a spec describes one array."""
    return hasattr(spec, "shape") and hasattr(spec, "dtype")


def map_spec(function: Callable[..., Any], spec: Any, *values: Any) -> Any:
    """Call `function(leaf, *values)` for each array of a nested spec; the results are nested like the spec.

    The values are nested in the same way, and each call gets the parts with the same keys and indices.
    """
    if is_leaf(spec):
        return function(spec, *values)
    if isinstance(spec, Mapping):
        kind: Any = type(spec)
        return kind({key: map_spec(function, part, *(value[key] for value in values)) for key, part in spec.items()})
    if isinstance(spec, tuple | list):
        kind = type(spec)
        parts = [map_spec(function, part, *(value[i] for value in values)) for i, part in enumerate(spec)]
        return kind._make(parts) if hasattr(kind, "_make") else kind(parts)
    raise BadEnv(f"expected a spec with a shape and a type, or a dict, tuple or list of such, found {spec!r:.200}")


def space_of(spec: Any) -> Space[Any]:
    """The Gymnasium space of a nested spec. Raises BadEnv if there is none."""
    return _as_space(map_spec(_leaf_space, spec))


def _as_space(parts: Any) -> Space[Any]:
    if isinstance(parts, Space):
        return parts
    if isinstance(parts, Mapping):
        return spaces.Dict({key: _as_space(part) for key, part in parts.items()})
    return spaces.Tuple([_as_space(part) for part in parts])


def _leaf_space(spec: Any) -> Space[Any]:
    shape, dtype = tuple(spec.shape), np.dtype(spec.dtype)
    if dtype.kind == "b":
        return spaces.MultiBinary(shape) if shape else spaces.Discrete(2)
    if dtype.kind not in "iuf":
        raise BadEnv(f"{spec!r} is of type {dtype}, and only numbers can be stepped in batches")
    low, high = getattr(spec, "minimum", None), getattr(spec, "maximum", None)
    if low is None or high is None:
        whole = np.iinfo(dtype) if dtype.kind != "f" else None
        low, high = (-np.inf, np.inf) if whole is None else (whole.min, whole.max)
        return spaces.Box(low, high, shape, dtype.type)
    low, high = (np.broadcast_to(np.asarray(bound, dtype), shape) for bound in (low, high))
    if not shape and dtype.kind in "iu" and 0 <= int(high) - int(low) < MOST_CHOICES:
        return spaces.Discrete(int(high) - int(low) + 1, start=int(low))
    return spaces.Box(low, high, shape, dtype.type)


class TimeStepEnv(ForeignEnv):
    """A dm_env environment or a PyEnvironment of TF-Agents as a Gymnasium env.

    A seed for reset goes to the env's own `seed` method, or, if it has none, to the generators of NumPy that the env or
    its task keeps. If there are none of these either, its metadata say so: "takes_seeds" is False.
    """

    def __init__(self, env: Any):
        super().__init__(env)
        if getattr(env, "batched", False):
            raise BadEnv(f"{env!r} is batched already: return single envs")
        quicken()  # in the process where the env lives
        self._action_spec = env.action_spec()
        self._one_action = is_leaf(self._action_spec)
        self._action_type = np.dtype(self._action_spec.dtype).type if self._one_action else None
        self._is_scalar = self._one_action and not tuple(self._action_spec.shape)
        self.observation_space, self.action_space = self._spaces()
        self._casts = self._one_action and self.action_space.dtype != self._action_type  # spaces have no arrays of bool
        self._check_rewards()
        self.metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}
        if not callable(getattr(env, "seed", None)) and not generators_of(env):
            self.metadata["takes_seeds"] = False
        self.render_mode = "rgb_array"

    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        return space_of(self.env.observation_spec()), space_of(self._action_spec)

    def _check_rewards(self) -> None:
        reward = self.env.reward_spec() if callable(getattr(self.env, "reward_spec", None)) else None
        if reward is not None and not (is_leaf(reward) and tuple(reward.shape) == ()):
            raise BadEnv(
                f"its reward_spec is {reward!r:.200}, and only rewards of one number can be stepped in batches"
            )

    def __reduce__(self) -> Any:
        return _load, (type(self), dumps(self.__dict__))  # the env may have wrappers that need it

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: its first observation, and an empty info."""
        return self._restart(seed).observation, {}

    def _restart(self, seed: int | None) -> Any:
        """Begin an episode: its first TimeStep."""
        if seed is not None:
            self._seed(seed)
        result = self._begun()
        if not hasattr(result, "step_type"):
            raise TypeError(f"reset must return a TimeStep, such as restart(observation), got {result!r:.200}")
        return result

    def _begun(self) -> Any:
        return self.env.reset()

    def _own_action(self, action: Any) -> Any:
        """An action of the space as the spec has it."""
        if self._is_scalar:
            return self._action_type(action)  # type: ignore[misc]
        if self._casts:
            return action.astype(self._action_type)
        return action if self._one_action else map_spec(_cast, self._action_spec, action)

    def _seed(self, seed: int) -> None:
        if callable(getattr(self.env, "seed", None)):
            with contextlib.suppress(NotImplementedError):  # TF-Agents raises it for envs that take no seed
                self.env.seed(seed)
        else:
            seed_generators(self.env, seed)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env, and turn its TimeStep into Gymnasium's five values."""
        return self._five(self.env.step(self._own_action(action)))

    def _five(self, result: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        try:
            kind, reward, discount, observation = result  # both libraries have them in this order
            kind, discount = int(kind), 1.0 if discount is None else float(discount)
        except (TypeError, ValueError):
            raise TypeError(f"step must return a TimeStep, such as transition(...), got {result!r:.200}") from None
        if kind == MID:
            return observation, reward, False, False, {} if discount == 1.0 else {"discount": discount}
        if kind == LAST:
            info = {} if discount in (0.0, 1.0) else {"discount": discount}
            return observation, reward, discount == 0.0, discount != 0.0, info
        raise ValueError("step returned the first TimeStep of an episode: only reset may begin one")

    def render(self) -> Any:
        """An image of the env. Raises NotImplementedError if it cannot make one."""
        if hasattr(self.env, "render"):
            return self.env.render()
        if hasattr(self.env, "physics"):  # as envs of dm_control have it
            return self.env.physics.render()
        raise NotImplementedError(f"{self.env!r} cannot be rendered")

    def get_state(self) -> Any:
        """The env's own state, and of a PyEnvironment also the last TimeStep, which each of its layers keeps."""
        try:
            own = self.env.get_state()
        except AttributeError as error:  # there is no such method, or it does not work
            raise NotImplementedError(str(error)) from error
        kept = [layer._current_time_step for layer in self._layers()]
        return {"own": own, "time_steps": [None if step is None else list(step) for step in kept]}

    def set_state(self, state: Any) -> None:
        """Continue from a state that `get_state` returned."""
        self.env.set_state(state["own"])
        for layer, parts in zip(self._layers(), state["time_steps"], strict=True):
            make = sys.modules[_TF_AGENTS[0]].TimeStep
            layer._current_time_step = None if parts is None else make(*parts)

    def _layers(self) -> list[Any]:
        """A PyEnvironment and those that it wraps; an empty list for other envs."""
        found, layer = [], self.env
        while "_current_time_step" in getattr(layer, "__dict__", {}):
            found.append(layer)
            layer = getattr(layer, "_env", None)
        return found


def _load(kind: type[TimeStepEnv], state: bytes) -> Any:
    env = object.__new__(kind)
    env.__dict__.update(cloudpickle.loads(state))
    return env


def _cast(spec: Any, value: Any) -> Any:
    return np.asarray(value, spec.dtype) if tuple(spec.shape) else np.dtype(spec.dtype).type(value)


def quicken() -> None:
    """Put the fast functions in place of the originals, if this process has imported TF-Agents."""
    module = sys.modules.get(_TF_AGENTS[0])
    if module is not None and not hasattr(module.transition, "__wrapped__"):
        _put({name: functools.wraps(getattr(module, name))(quick) for name, quick in _quick_functions(module).items()})


def slow_down() -> None:
    """Undo `quicken`."""
    module = sys.modules.get(_TF_AGENTS[0])
    if module is not None and hasattr(module.transition, "__wrapped__"):
        names = ("restart", "transition", "truncation", "termination")
        _put({name: getattr(module, name).__wrapped__ for name in names})


def _put(functions: dict[str, Any]) -> None:
    for name in _TF_AGENTS:
        vars(sys.modules[name]).update(functions)


def _is_plain(observation: Any) -> bool:
    kind = type(observation)
    if kind is dict:
        return bool(observation) and all(type(part) is np.ndarray for part in observation.values())
    return kind is np.ndarray


def _is_number(value: Any) -> bool:
    return (type(value) in _NUMBERS or (type(value) is np.ndarray and value.shape == ())) and not math.isnan(value)


def _quick_functions(module: ModuleType) -> dict[str, Callable[..., Any]]:
    first, last, make = module.StepType.FIRST, module.StepType.LAST, module.TimeStep
    slow_restart, slow_termination = module.restart, module.termination

    def restart(observation: Any, batch_size: Any = None, reward_spec: Any = None) -> Any:
        if batch_size is None and reward_spec is None and _is_plain(observation):
            return make(first, _ZERO.copy(), _ONE.copy(), observation)
        return slow_restart(observation, batch_size, reward_spec)

    def with_discount(kind: Any, slow: Any) -> Callable[..., Any]:
        def transition(observation: Any, reward: Any, discount: Any = 1.0, outer_dims: Any = None) -> Any:
            if outer_dims is None and _is_plain(observation) and _is_number(reward) and _is_number(discount):
                return make(kind, np.asarray(reward, np.float32), np.asarray(discount, np.float32), observation)
            return slow(observation, reward, discount, outer_dims)

        return transition

    def termination(observation: Any, reward: Any, outer_dims: Any = None) -> Any:
        if outer_dims is None and _is_plain(observation) and _is_number(reward):
            return make(last, np.asarray(reward, np.float32), _ZERO.copy(), observation)
        return slow_termination(observation, reward, outer_dims)

    transition = with_discount(module.StepType.MID, module.transition)
    truncation = with_discount(last, module.truncation)
    return {"restart": restart, "transition": transition, "truncation": truncation, "termination": termination}

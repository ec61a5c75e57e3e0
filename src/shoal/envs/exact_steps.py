"""PyEnvironments of TF-Agents whose TimeSteps arrive as they were made, also those that spaces cannot express.

A pool's fields hold what the specs promise. An env may answer otherwise: a list of one number for a scalar, another
type, a reward of several numbers, a last step twice in a row. TF-Agents hands such TimeSteps on, so they travel whole,
in the info as "time_step". The fields then hold the same observation as far as it fits.

In TF-Agents an env begins its next episode by itself, in the step after the last one. So it is stepped there, with its
action, and not reset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from shoal.envs.side_by_side import Place, SideBySide
from shoal.envs.time_steps import FIRST, LAST, MID, TimeStepEnv, has_specs, is_leaf, space_of
from shoal.errors import BadEnv

TIME_STEP = "time_step"  # the key of the info
INT32 = np.dtype(np.int32)
ARRAY = (np.ndarray, np.generic)


def make_exact(make: Callable[..., Any], lenient: bool, /, **kwargs: Any) -> Any:
    """Make an env; a PyEnvironment becomes an `ExactStepEnv`, any other stays as it is."""
    env = make(**kwargs)
    is_py_environment = has_specs(env) and hasattr(env, "time_step_spec") and hasattr(env, "current_time_step")
    return ExactStepEnv(env, lenient) if is_py_environment else env


class ExactStepEnv(TimeStepEnv):
    """A PyEnvironment as a Gymnasium env.

    Args:
        lenient: pass on actions that are out of the spec's bounds (the space of a whole number is then a Box, whose
            bounds a pool need not check), and take observations that do not fit the spec in any way. The fields of
            such an observation are zeros, so this is for those who read "time_step".
    """

    def __init__(self, env: Any, lenient: bool):
        self._lenient = lenient
        super().__init__(env)
        self._observation_spec = env.observation_spec()
        numbers = env.reward_spec(), env.discount_spec()
        # Where not even the specs fit into a pool's fields, every TimeStep travels whole.
        self._fits = all(map(is_leaf, numbers)) and not isinstance(self.observation_space, NoSpace)
        self._number_types = tuple(np.dtype(spec.dtype) for spec in numbers) if self._fits else (None, None)
        self._one_array: tuple[Any, Any] | None = None  # type and shape of an observation that is one array
        if is_leaf(self._observation_spec):
            self._one_array = np.dtype(self._observation_spec.dtype), tuple(self._observation_spec.shape)

    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        action_space = space_of(self._action_spec)
        if self._lenient and isinstance(action_space, spaces.Discrete) and self._action_type is not np.bool_:
            low, high = int(action_space.start), int(action_space.start + action_space.n - 1)
            action_space = spaces.Box(low, high, (), self._action_type)  # type: ignore[arg-type]
        spec = self.env.observation_spec()
        try:
            return (space_of(spec) if list(_flat(spec)) else _nothing()), action_space
        except BadEnv:  # of no numbers: all of its TimeSteps travel whole
            if not self._lenient:
                raise
            return _nothing(), action_space

    def _check_rewards(self) -> None:
        """Rewards of any form are welcome."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: its first observation, and an info that is empty unless it holds the TimeStep."""
        return self._first(self._restart(seed))

    def begin_next(self, action: Any) -> tuple[Any, dict[str, Any]]:
        """Step the env after its last TimeStep, which begins the next episode."""
        return self._first(self._stepped(action))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env, and turn its TimeStep into Gymnasium's five values."""
        result = self._stepped(action)
        kind, reward, discount, observation = _parts(result)
        if self._is_exact(kind, reward, discount, observation):
            which = int(kind)  # as a number of Python: numpy takes ten times as long to compare
            if which == MID:
                value = float(discount)
                return observation, reward, False, False, {} if value == 1.0 else {"discount": value}
            if which == LAST:
                return self._five(result)
        last = bool(np.all(kind == LAST))
        ended = last and bool(np.all(discount == 0))
        info = {TIME_STEP: result}
        return self._fitted(observation), _as_number(reward), ended, last and not ended, info

    def _stepped(self, action: Any) -> Any:
        """The env's own answer to an action of the space."""
        return self.env.step(self._own_action(action))

    def _first(self, result: Any) -> tuple[Any, dict[str, Any]]:
        kind, reward, discount, observation = _parts(result)
        if self._is_exact(kind, reward, discount, observation) and kind == FIRST and reward == 0 and discount == 1:
            return observation, {}
        return self._fitted(observation), {TIME_STEP: result}

    def _is_exact(self, kind: Any, reward: Any, discount: Any, observation: Any) -> bool:
        """Whether every part has the type and form that its spec promises."""
        types = self._number_types
        try:  # one type is one object: to compare them any more would take longer than a cheap env's step
            if kind.dtype is not INT32 or reward.dtype is not types[0] or discount.dtype is not types[1]:
                return False
            if kind.shape or reward.shape or discount.shape:
                return False
            if self._one_array is not None and type(observation) is np.ndarray:
                return self._fits and (observation.dtype, observation.shape) == self._one_array
        except AttributeError:  # a number of Python, or none
            return False
        return self._fits and _is_as_promised(observation, self._observation_spec)

    def _fitted(self, observation: Any) -> Any:
        """The observation in the form of its space. If it has no such form, zeros, or itself for the pool to refuse."""
        if isinstance(self.observation_space, NoSpace):
            return np.zeros((), np.uint8)
        values, specs = list(_flat(observation)), list(_flat(self._observation_spec))
        try:
            pairs = zip(values, specs, strict=True)
            fitted = [np.asarray(value).astype(spec.dtype).reshape(spec.shape) for value, spec in pairs]
        except (TypeError, ValueError):
            if not self._lenient:
                return observation
            fitted = [np.zeros(spec.shape, spec.dtype) for spec in specs]
        return _packed(self._observation_spec, iter(fitted))


class GivenEnv(ExactStepEnv):
    """A PyEnvironment that its user has made. It is given the user's own actions, which a pool would cast.

    They lie in the calls of a `SideBySide`, which also lets envs that wait do so at the same time. A step or a reset
    that is not there was asked for in another way, and is carried out as in any other env.
    """

    _place: Place | None = None

    def use(self, calls: SideBySide, index: int) -> GivenEnv:
        """Find the user's actions there, at this index."""
        calls.envs[index] = self.env
        self._place = calls.places[index]
        return self

    @property
    def unwrapped(self) -> Any:
        """Itself: one env may be there twice, as in TF-Agents."""
        return self

    def _stepped(self, action: Any) -> Any:
        place = self._place
        return place.result(self.env) if place is not None and place.expects(step_env) else super()._stepped(action)

    def _begun(self) -> Any:
        place = self._place
        return place.result(self.env) if place is not None and place.expects(reset_env) else super()._begun()

    def close(self) -> None:
        """Close the env."""
        if self._place is not None and self._place.expects(close_env):
            self._place.result(self.env)
        else:
            super().close()


def step_env(env: Any, action: Any) -> Any:
    """Step an env."""
    return env.step(action)


def reset_env(env: Any, _: Any) -> Any:
    """Reset an env."""
    return env.reset()


def close_env(env: Any, _: Any) -> None:
    """Close an env."""
    env.close()


class NoSpace(spaces.Box):
    """Stands in the place of observations that have no space."""


def _nothing() -> Space[Any]:
    return NoSpace(0, 255, (), np.uint8)


def _parts(result: Any) -> Any:
    if not isinstance(result, tuple) or len(result) != 4 or not hasattr(result, "step_type"):
        raise TypeError(f"expected a TimeStep, such as restart(observation) or transition(...), got {result!r:.200}")
    return result


def _is_array(value: Any, dtype: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, ARRAY) and value.dtype == dtype and value.shape == shape


def _is_as_promised(value: Any, spec: Any) -> bool:
    if is_leaf(spec):
        return _is_array(value, spec.dtype, tuple(spec.shape))
    if type(value) is not type(spec) or len(value) != len(spec):
        return False
    if isinstance(spec, Mapping):
        return all(key in value and _is_as_promised(value[key], part) for key, part in spec.items())
    return all(map(_is_as_promised, value, spec))


def _flat(nest: Any) -> Iterator[Any]:
    """The leaves of a nest, in TensorFlow's order: dicts by their sorted keys."""
    if isinstance(nest, Mapping):
        for key in sorted(nest):
            yield from _flat(nest[key])
    elif isinstance(nest, tuple | list):
        for part in nest:
            yield from _flat(part)
    else:
        yield nest


def _packed(spec: Any, leaves: Iterator[Any]) -> Any:
    """Leaves in TensorFlow's order, nested as the space of a spec is."""
    if is_leaf(spec):
        return next(leaves)
    if isinstance(spec, Mapping):
        return {key: _packed(spec[key], leaves) for key in sorted(spec)}
    return tuple(_packed(part, leaves) for part in spec)


def _as_number(reward: Any) -> float:
    """The reward for the pool's own counts of returns: the sum, where it is several numbers."""
    try:
        return float(sum(float(np.sum(part)) for part in _flat(reward)))
    except (TypeError, ValueError):
        return 0.0

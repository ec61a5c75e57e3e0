"""One functional env of any protocol in one form: how it starts, how it steps, and what its spaces are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import Space, spaces

from shoal.errors import BadAction, BadCall, BadEnv, CannotSnapshot
from shoal.spaces.leaves import Kind, Leaf, assemble, flatten, get_path, part_of

Tree = Any  # arrays, nested


class _Protocol(NamedTuple):
    """An env of any protocol in one form."""

    start: Callable[[Any], tuple[Tree, Tree]]  # (key) -> state, obs
    advance: Callable[..., Any]  # (key, state, action) -> state, obs, reward, terminated, truncated, info
    observation_space: Any  # the env's own; None if it is to be found from its observations
    action_space: Any


class Lane:
    """One env with fixed types: `start` and `advance` return the same ones, as a loop of JAX needs."""

    def __init__(self, env: Any, params: Any, key: Any):
        self.key = key
        self._speaks = _protocol(env, params)
        self._name = type(env).__name__
        self.action_space = _space(self._speaks.action_space, f"{self._name}'s action space")
        self.action_leaves = flatten(self.action_space)
        action = assemble(self.action_space, [shaped(a.shape, device_type(a)) for a in self.action_leaves])
        state, obs = self._traced("reset", self._speaks.start, key)
        self._state = jax.tree.map(lambda x: shaped(x.shape, x.dtype), state)
        later = self._settle(action)
        self.observation_space = self._observations(obs, later)
        self.obs_leaves = flatten(self.observation_space)
        self._traced("reset", self.start, key)
        self._traced("step", self.advance, key, self._state, action)

    def start(self, key: Any) -> tuple[Tree, Tree]:
        """Return the state and the first observation of an episode."""
        state, obs = self._speaks.start(key)
        return self._cast_state(state), self._cast_obs(obs)

    def advance(self, key: Any, state: Tree, action: Tree) -> tuple[Tree, Tree, Any, Any, Any, Tree]:
        """Step once, and return state, observation, reward, terminated, truncated, info."""
        state, obs, reward, terminated, truncated, info = self._speaks.advance(key, state, action)
        reward = jnp.asarray(reward, jnp.float32).reshape(())
        terminated, truncated = (jnp.asarray(x, bool).reshape(()) for x in (terminated, truncated))
        return self._cast_state(state), self._cast_obs(obs), reward, terminated, truncated, info

    def _traced(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            return jax.eval_shape(function, *args)
        except (BadEnv, BadCall):
            raise
        except Exception as error:
            raise BadEnv(
                f"{self._name}'s {what} cannot be traced by JAX for one env (not batched already, no Python branches "
                f"on values): {type(error).__name__}: {error}"
            ) from error

    def _settle(self, action: Tree) -> Tree:
        """Widen the state's types until a step keeps them: many envs begin with ints and go on with floats.

        Return the observations of such a step.
        """
        for _ in range(3):
            after, obs, *_ = self._traced("step", self._speaks.advance, self.key, self._state, action)
            found, expected = (str(jax.tree.structure(tree)) for tree in (after, self._state))
            if found != expected:
                raise BadEnv(
                    f"{self._name}'s step must return a state like the one of its reset: {found} instead of {expected}"
                )
            for (name, mine), theirs in zip(named(self._state), jax.tree.leaves(after), strict=True):
                if mine.shape != theirs.shape:
                    raise BadEnv(
                        f"{self._name}'s step must keep the shapes of its state: {name or 'it'} is {theirs.shape} "
                        f"after a step, and {mine.shape} after a reset"
                    )
            wider = jax.tree.map(_widest, self._state, after)
            if wider == self._state:
                return obs
            self._state = wider
        raise BadEnv(f"{self._name}'s step gives its state other types in each step: cast them to fixed ones")

    def _cast_state(self, state: Tree) -> Tree:
        return jax.tree.map(lambda x, fixed: _cast(x, fixed.dtype), state, self._state)

    def _observations(self, obs: Tree, later: Tree) -> Space[Any]:
        """Return the space of observations; if reset and step give different types, it has the wider ones."""
        given, what = self._speaks.observation_space, f"{self._name}'s observation space"
        space = _space_of(obs, what) if given is None else _space(given, what)
        leaves = flatten(space)
        for leaf in leaves:
            for call, seen in (("reset", obs), ("step", later)):
                shape = tuple(self._part(seen, leaf).shape)
                if shape != leaf.shape:
                    raise BadEnv(
                        f"{what}{leaf.name} has shape {leaf.shape}, and the observations of its {call} {shape}"
                    )
        pairs = [(self._part(obs, leaf).dtype, self._part(later, leaf).dtype) for leaf in leaves]
        return _retyped(space, [np.dtype(jnp.promote_types(*pair)) for pair in pairs])

    def _cast_obs(self, obs: Tree) -> Tree:
        parts = [_cast(self._part(obs, leaf), device_type(leaf)) for leaf in self.obs_leaves]
        return assemble(self.observation_space, parts)

    def _part(self, obs: Tree, leaf: Leaf) -> Any:
        return part_of(obs, leaf, f"an observation of {self._name}, unlike its space,", BadEnv)


def _protocol(env: Any, params: Any) -> _Protocol:
    params = getattr(env, "default_params", None) if params is None else params
    if all(callable(getattr(env, name, None)) for name in ("initial", "transition", "observation", "terminal")):
        return _func_env(env, params)
    kind = type(env)
    if callable(getattr(kind, "step_env", None)) and callable(getattr(kind, "reset_env", None)):
        return _gymnax(env, params, env.reset_env, env.step_env)
    if hasattr(env, "func_env") or hasattr(getattr(env, "unwrapped", None), "func_env"):
        raise BadEnv(f"{kind.__name__} runs a functional env: give that one, env.unwrapped.func_env")
    if isinstance(env, type):
        raise BadEnv(f"expected an env, found the class {env.__name__}: give {env.__name__}(...)")
    if not callable(getattr(env, "reset", None)) or not callable(getattr(env, "step", None)):
        raise BadEnv(
            f"{kind.__name__} is no functional env: expected the methods of gymnax (reset_env, step_env), of Brax "
            "(reset, step) or of Gymnasium's FuncEnv (initial, transition, observation, reward, terminal)"
        )
    if hasattr(env, "step_env"):
        raise BadEnv(
            f"{kind.__name__} wraps an env that resets itself, which Shoal does: give the env inside, or give the "
            "wrapper reset_env and step_env of its own"
        )
    if _takes(env.step) == 2:
        return _brax(env)
    if _takes(env.step) >= 3 and "seed" not in inspect.signature(env.reset).parameters:
        return _gymnax(env, params, env.reset, env.step)
    raise BadEnv(
        f"{kind.__name__} is no functional env: its step should be step(key, state, action, params), or "
        "step(state, action)"
    )


def _func_env(env: Any, params: Any) -> _Protocol:
    def call(name: str, *args: Any) -> Any:
        # Without params, the method's own default is used: some methods have a class there.
        return _call(getattr(env, name), *args, *(() if params is None else (params,)))

    def start(key: Any) -> tuple[Tree, Tree]:
        first, second = jax.random.split(key)
        state = call("initial", first)
        return state, call("observation", state, second)

    def advance(key: Any, state: Tree, action: Tree) -> Any:
        moves, sees, gains, ends = jax.random.split(key, 4)
        after = call("transition", state, action, moves)
        obs, reward = call("observation", after, sees), call("reward", state, action, after, gains)
        info = call("transition_info", state, action, after) if hasattr(env, "transition_info") else {}
        return after, obs, reward, call("terminal", after, ends), False, info

    return _Protocol(start, advance, _own_space(env, "observation", params), _own_space(env, "action", params))


def _gymnax(env: Any, params: Any, reset: Callable[..., Any], step: Callable[..., Any]) -> _Protocol:
    limit = getattr(params, "max_steps_in_episode", None)

    def start(key: Any) -> tuple[Tree, Tree]:
        obs, state = _call(reset, key, params)
        return state, obs

    def advance(key: Any, state: Tree, action: Tree) -> Any:
        result = _call(step, key, state, action, params)
        if len(result) == 6:
            obs, state, *answer = result
            return state, obs, *answer
        if len(result) != 5:
            raise BadEnv(
                f"{type(env).__name__}'s step should return (obs, state, reward, done, info), or terminated and "
                f"truncated instead of done; it returns {len(result)} values"
            )
        obs, state, reward, done, info = result
        done = jnp.asarray(done, bool)
        if hasattr(env, "is_truncated"):
            return state, obs, reward, done, env.is_truncated(state, params), info
        if limit is None or not hasattr(state, "time"):
            return state, obs, reward, done, False, info
        late = state.time >= limit
        return state, obs, reward, done & ~late, done & late, info

    return _Protocol(start, advance, _own_space(env, "observation", params), _own_space(env, "action", params))


def _brax(env: Any) -> _Protocol:
    def start(key: Any) -> tuple[Tree, Tree]:
        state = env.reset(key)
        missing = [name for name in ("obs", "reward", "done") if not hasattr(state, name)]
        if missing:
            raise BadEnv(
                f"{type(env).__name__}'s reset should return a state as Brax has it, with {', '.join(missing)}"
            )
        if any(str(name).startswith("first_") for name in getattr(state, "info", ())):
            raise BadEnv(
                f"{type(env).__name__} resets itself, which Shoal does: make it without Brax's AutoResetWrapper "
                "(brax.envs.get_environment(name), or create(name, auto_reset=False))"
            )
        return state, state.obs

    def advance(key: Any, state: Tree, action: Tree) -> Any:
        state = env.step(state, action)
        done = jnp.asarray(state.done) > 0
        late = done & (jnp.asarray(getattr(state, "info", {}).get("truncation", 0)) > 0)
        return state, state.obs, state.reward, done & ~late, late, dict(getattr(state, "metrics", {}))

    if hasattr(env, "action_space"):
        action = _own_space(env, "action", None)
    elif hasattr(env, "action_size"):
        action = spaces.Box(-1.0, 1.0, (int(env.action_size),), np.float32)
    else:
        raise BadEnv(f"{type(env).__name__} has no action_size, nor an action_space")
    return _Protocol(start, advance, None, action)


def _takes(function: Callable[..., Any]) -> int:
    """Count the values that a function takes by position."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 100
    return sum(kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function with as many of these values as it takes."""
    return function(*args[: _takes(function)])


# ---- spaces ------------------------------------------------------------------------------------------------------


def _own_space(env: Any, which: str, params: Any) -> Any:
    space = getattr(env, f"{which}_space", None)
    if space is None:
        raise BadEnv(f"{type(env).__name__} has no {which}_space: give it one, a Gymnasium space will do")
    return _call(space, params) if callable(space) and not isinstance(space, Space) else space


def _space(space: Any, what: str) -> Space[Any]:
    """Return a Gymnasium space of arrays, given one, or a space of another library with the same name."""
    if isinstance(space, Space):
        for leaf in flatten(space):
            if leaf.kind is not Kind.ARRAY:
                raise BadEnv(f"{what}{leaf.name} is no space of arrays, and JAX holds nothing else: {space}")
        return space
    name = type(space).__name__
    if name == "Discrete" and hasattr(space, "n"):
        return spaces.Discrete(int(space.n), start=int(getattr(space, "start", 0)))
    if name == "Box" and hasattr(space, "low"):
        dtype = np.dtype(space.dtype)
        low, high = (np.broadcast_to(np.asarray(x, dtype), space.shape) for x in (space.low, space.high))
        return spaces.Box(low, high, tuple(space.shape), dtype.type)
    if name == "Dict" and hasattr(space, "spaces"):
        return spaces.Dict({key: _space(sub, f"{what}[{key!r}]") for key, sub in space.spaces.items()})
    if name == "Tuple" and hasattr(space, "spaces"):
        return spaces.Tuple([_space(sub, f"{what}[{i}]") for i, sub in enumerate(space.spaces)])
    raise BadEnv(
        f"{what} is a {type(space).__module__}.{name}: expected Box, Discrete, Dict or Tuple, or Gymnasium's own"
    )


def _space_of(obs: Tree, what: str) -> Space[Any]:
    """Make a space out of the shapes and types of observations."""
    if isinstance(obs, dict):
        return spaces.Dict({key: _space_of(sub, f"{what}[{key!r}]") for key, sub in obs.items()})
    if isinstance(obs, tuple | list):
        return spaces.Tuple([_space_of(sub, f"{what}[{i}]") for i, sub in enumerate(obs)])
    if not hasattr(obs, "dtype"):
        raise BadEnv(f"{what} cannot be told from observations of type {type(obs).__name__}: use dicts and tuples")
    dtype = np.dtype(obs.dtype)
    low, high = {"f": (-np.inf, np.inf), "b": (0, 1)}.get(dtype.kind) or (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(low, high, tuple(obs.shape), dtype.type)


def _retyped(space: Space[Any], found: Sequence[np.dtype[Any]]) -> Space[Any]:
    """Return the space with Boxes of floats for Boxes of ints where observations are floats: a cast would lose some."""
    types = iter(found)

    def visit(space: Space[Any]) -> Space[Any]:
        if isinstance(space, spaces.Dict):
            return spaces.Dict({key: visit(sub) for key, sub in space.spaces.items()})
        if isinstance(space, spaces.Tuple):
            return spaces.Tuple([visit(sub) for sub in space.spaces])
        dtype = next(types)
        if isinstance(space, spaces.Box) and dtype.kind == "f" and space.dtype.kind != "f":
            return spaces.Box(space.low.astype(dtype), space.high.astype(dtype), space.shape, dtype.type)
        return space

    return visit(space)


def device_type(leaf: Leaf) -> Any:
    """Return the type that JAX has for a leaf's type."""
    return jax.dtypes.canonicalize_dtype(leaf.dtype)


def read_leaf(action: Tree, leaf: Leaf, count: int) -> jax.Array:
    """Return one leaf of the actions of so many envs in its own type, or raise BadAction."""
    try:
        value = jnp.asarray(get_path(action, leaf.path))
    except (KeyError, IndexError, TypeError) as error:
        raise BadAction(f"actions{leaf.name}: expected an array for {count} envs: {error}") from error
    if value.shape != (count, *leaf.shape):
        raise BadAction(
            f"actions{leaf.name}: expected shape {(count, *leaf.shape)}, one row for each of {count} envs, found "
            f"{value.shape}"
        )
    allowed = "fiu" if leaf.dtype.kind == "f" else "b" if leaf.dtype.kind == "b" else "iu"
    if value.dtype.kind not in allowed and value.dtype != device_type(leaf):
        raise BadAction(f"actions{leaf.name}: expected type {leaf.dtype}, found {value.dtype}")
    return value.astype(device_type(leaf))


# ---- nested arrays ----------------------------------------------------------------------------------------


def where(mask: Any, yes: Tree, no: Tree) -> Tree:
    """Choose rows of one tree or of the other; a scalar is used for all rows."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(jnp.reshape(mask, mask.shape + (1,) * (b.ndim - mask.ndim)), a, b)

    return jax.tree.map(choose, yes, no)


def zeros(shapes: Tree) -> Tree:
    """Make arrays of zeros, and keys of zeros, for a tree of shapes."""

    def make(leaf: Any) -> Any:
        plain = jax.eval_shape(key_data, leaf)
        return _as_keys(jnp.zeros(plain.shape, plain.dtype), leaf)

    return jax.tree.map(make, shapes)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_keys(data: Any, leaf: Any) -> Any:
    """Return keys of the same kind as in the leaf, which may be only a shape; the data itself if it has no keys."""
    if not _is_key(leaf):
        return data
    found: list[Any] = []
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), leaf)
    return jax.random.wrap_key_data(data, impl=found[0])


def shaped(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _widest(mine: Any, theirs: Any) -> Any:
    same = mine.dtype == theirs.dtype
    return shaped(mine.shape, mine.dtype if same else jnp.promote_types(mine.dtype, theirs.dtype))


def _cast(value: Any, dtype: Any) -> Any:
    return value if jnp.issubdtype(dtype, jax.dtypes.extended) else jax.lax.convert_element_type(value, dtype)


def named(tree: Tree) -> list[tuple[str, Any]]:
    """Return the leaves with their paths as names, such as inner/x, in the tree's own order."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def key_data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def restored(name: str, value: Any, leaf: Any) -> Any:
    plain = jax.eval_shape(key_data, leaf)
    value = np.asarray(value)
    if value.shape != plain.shape or value.dtype != plain.dtype:
        raise CannotSnapshot(
            f"the state does not fit: {name} is {value.dtype} {value.shape}, and here it is {plain.dtype} {plain.shape}"
        )
    return _as_keys(jnp.asarray(value), leaf)

"""The base class of envs that can be compiled, and what a class has, read and checked: a `Definition`."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import numpy as np
from gymnasium import Space

from shoal.errors import BadEnv
from shoal.spaces.leaves import Leaf, array_leaves
from shoal.support.optional_dependencies import install

F = TypeVar("F", bound=Callable[..., Any])
TAKEN = frozenset(dir(np.record))  # attributes of every record, which would hide a field of the same name

_helpers: set[Any] = set()
single_versions: dict[Any, Any] = {}  # helpers that have another form for single precision, and that form


@overload
def function(helper: F) -> F: ...


@overload
def function(*, single: Callable[..., Any]) -> Callable[[F], F]: ...


def function(helper: Any = None, *, single: Callable[..., Any] | None = None) -> Any:
    """Mark a function that `reset`, `step` or `observe` calls, so that it is compiled with them.

    In plain Python it is called as it is.

    Args:
        helper: the function.
        single: a function that is compiled in its place in single precision: without loops and rare cases that matter
            to the last bits of 64 alone, so that many lanes can be stepped at once. `@compiled.function(single=...)`.

    Raises:
        TypeError: it is not a plain function.
    """
    if helper is None:
        return functools.partial(function, single=single)
    for one in (helper, *[single] * (single is not None)):
        if not inspect.isfunction(one):
            raise TypeError(f"compiled.function: expected a function, found {one!r}")
    _helpers.add(helper)
    if single is not None:
        single_versions[helper] = single
    return helper


def is_helper(value: Any) -> bool:
    """Say whether this function was marked by `function`."""
    return inspect.isfunction(value) and value in _helpers


class Env:
    """The base of envs that can be compiled. A subclass has these attributes and static methods.

    `__init__` may set attributes in place of the class's, from `env_kwargs`.

    Attributes:
        observation_space, action_space: of one agent. Made of arrays: Box, Discrete, MultiDiscrete, MultiBinary, and
            Dict and Tuple of these.
        max_episode_steps: steps after which an episode is truncated; None for no limit.
        state: the fields of an env's state: float, int, bool, a numpy dtype, or (one of these, shape). All are zero
            when `reset` is called.
        params: more fields, with their defaults: numbers or arrays. They stay as they are, and can be set for each env
            while a pool runs (`pool.set_attr`).
        num_agents: how many agents one env has. They end together, and each is a lane of the pool.

    Methods, all static:
        reset(state, rng): begin an episode.
        step(state, action, rng): one step; returns (reward, terminated). The action is an int (Discrete), a number (a
            Box without a shape) or an array; if the space is nested, a tuple of these, one for each leaf. Its numbers
            have 64 bits, whatever the space says. With several agents step(state, action, reward, rng): `action` has a
            row for each of them, `step` writes `reward` and returns `terminated`.
        observe(state, obs): write the observation into `obs`, which is all zeros: the array of one env (of one element,
            if the space has no shape), with a row for each agent if there are several; a tuple of such arrays if the
            space is nested.
    """

    observation_space: Space[Any]
    action_space: Space[Any]
    max_episode_steps: int | None = None
    state: Mapping[str, Any] = {}
    params: Mapping[str, Any] = {}
    num_agents: int = 1
    metadata: Mapping[str, Any] = {"render_modes": []}
    render_mode: str | None = None

    @classmethod
    def __shoal_env__(cls, **kwargs: Any) -> Any:
        """Make an env that steps this class as plain Python; every backend but "compiled" and "cuda" runs it.

        Each agent has a lane, if there are several.
        """
        from shoal.compiled.plain import PlainEnv, PlainGroup

        kwargs.pop("debug", None)  # it is for compiled code
        env = PlainEnv(define(cls, kwargs))
        return env if env.definition.num_agents == 1 else PlainGroup(env)

    @classmethod
    def __shoal_missing__(cls) -> str:
        """Say what this machine lacks to compile it, and how to get it; "" for nothing."""
        from shoal.compiled import kernels

        return "" if kernels.available() else f"Numba is not installed: {install('compiled')}"

    @classmethod
    def __shoal_kernel__(cls, definition: Definition, debug: bool) -> int:
        """Return the address of the code that steps many envs of this class; see native/task.h.

        Raises:
            BadEnv: it cannot be compiled.
            ImportError: Numba is not installed.
        """
        from shoal.compiled.kernels import kernel_address

        return kernel_address(definition, debug)


def find_class(env: Any) -> type[Env]:
    """Return the class that is meant: itself, or the library's class of this id."""
    if isinstance(env, type) and issubclass(env, Env):
        return env
    if isinstance(env, str):
        library = importlib.import_module("shoal.compiled.library")
        try:
            return library.find(env)  # type: ignore[no-any-return]
        except LookupError as error:
            raise BadEnv(str(error)) from None
    raise BadEnv(
        f'backend="compiled" runs classes that derive from shoal.compiled.Env, found {env!r}: see '
        "docs/guides/compiled.md, or use another backend"
    )


@dataclass(frozen=True)
class Definition:
    """What a class that can be compiled has, checked.

    Attributes:
        env: an instance of the class, which has these attributes.
        dtype: the type of one env's state: first the fields of `state`, then those of `params`.
        cleared: how many bytes at the beginning of a state are set to zero before `reset`.
        defaults: a state that holds the defaults of the params.
        params: the names of the params.
        single: whether it is computed in single precision; `dtype` has no floats of 64 bits then.
    """

    env: Any
    name: str
    observation_space: Space[Any]
    action_space: Space[Any]
    obs_leaves: tuple[Leaf, ...]
    action_leaves: tuple[Leaf, ...]
    max_episode_steps: int | None
    num_agents: int
    dtype: np.dtype[Any]
    cleared: int
    defaults: np.ndarray[Any, Any]
    params: tuple[str, ...]
    reset: Callable[..., Any]
    step: Callable[..., Any]
    observe: Callable[..., Any]
    single: bool = False

    @property
    def nested_obs(self) -> bool:
        """Say whether `observe` gets a tuple."""
        return not self.obs_leaves or bool(self.obs_leaves[0].path)

    @property
    def nested_action(self) -> bool:
        """Say whether `step` gets a tuple."""
        return not self.action_leaves or bool(self.action_leaves[0].path)

    def new_states(self, count: int) -> np.ndarray[Any, Any]:
        """Make the states of so many envs, with the default params in them."""
        states = np.zeros(count, self.dtype)
        states[:] = self.defaults
        return states


def define(env_class: type[Any], kwargs: Mapping[str, Any]) -> Definition:
    """Read a class and check it.

    Raises:
        BadEnv: something is missing or wrong.
    """
    name, env = env_class.__name__, env_class(**kwargs)
    observation_space, action_space = _space(env, "observation_space"), _space(env, "action_space")
    agents, limit = env.num_agents, env.max_episode_steps
    if not _is_count(agents):
        raise BadEnv(f"{name}.num_agents: expected a whole number of at least 1, found {agents!r}")
    if limit is not None and not _is_count(limit):
        raise BadEnv(f"{name}.max_episode_steps: expected a whole number of at least 1, or None, found {limit!r}")
    dtype, cleared, defaults = _record(name, env.state, env.params)
    return Definition(
        env=env,
        name=name,
        observation_space=observation_space,
        action_space=action_space,
        obs_leaves=array_leaves("observation", observation_space, name),
        action_leaves=array_leaves("action", action_space, name),
        max_episode_steps=limit,
        num_agents=agents,
        dtype=dtype,
        cleared=cleared,
        defaults=defaults,
        params=tuple(env.params),
        reset=_method(env, "reset(state, rng)"),
        step=_method(env, f"step(state, action, {'reward, ' if agents > 1 else ''}rng)"),
        observe=_method(env, "observe(state, obs)"),
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _space(env: Any, which: str) -> Space[Any]:
    space = getattr(env, which, None)
    if not isinstance(space, Space):
        raise BadEnv(f"{type(env).__name__}.{which}: expected a Gymnasium space, found {space!r}")
    return space


def _record(
    name: str, state: Mapping[str, Any], params: Mapping[str, Any]
) -> tuple[np.dtype[Any], int, np.ndarray[Any, Any]]:
    """Return the dtype of a state, how many of its bytes are cleared, and the defaults."""
    for which, fields in (("state", state), ("params", params)):
        if not isinstance(fields, Mapping):
            raise BadEnv(f"{name}.{which}: expected a dict of fields, found {fields!r}")
        for field in fields:
            if not isinstance(field, str) or not field.isidentifier() or field.startswith("_") or field in TAKEN:
                raise BadEnv(
                    f"{name}.{which}: a field cannot be named {field!r}: expected a name without a leading underscore "
                    "that numpy records do not use themselves"
                )
    twice = set(state) & set(params)
    if twice:
        raise BadEnv(f"{name}: {sorted(twice)[0]!r} is in `state` and in `params`: leave one of them out")
    described = [(field, *_field(name, field, kind)) for field, kind in state.items()]
    values = {field: _param(name, field, value) for field, value in params.items()}
    described += [(field, value.dtype, value.shape) for field, value in values.items()]
    dtype = np.dtype(described or [("nothing", np.dtype(np.uint8), ())], align=True)
    defaults = np.zeros((), dtype)
    for field, value in values.items():
        defaults[field] = value
    return dtype, cleared_bytes(dtype, values), defaults


def cleared_bytes(dtype: np.dtype[Any], params: Iterable[str]) -> int:
    """Return how many bytes of a state come before its params."""
    places: Mapping[str, Any] = dtype.fields or {}
    return int(min((places[name][1] for name in params), default=dtype.itemsize))


def _field(name: str, field: str, kind: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    try:
        scalar, shape = kind if isinstance(kind, tuple) else (kind, ())
        shape = (int(shape),) if isinstance(shape, int | np.integer) else tuple(int(size) for size in shape)
        found: np.dtype[Any] = np.dtype({float: np.float64, int: np.int64, bool: np.bool_}.get(scalar, scalar))
    except (TypeError, ValueError):
        found, shape = np.dtype(object), ()
    if found.kind not in "fiub" or found.itemsize > 8 or (found.kind == "f" and found.itemsize < 4):
        kinds = "float, int, bool, a numpy dtype of numbers or (dtype, shape)"
        raise BadEnv(f"{name}.state[{field!r}]: expected {kinds}, found {kind!r}")
    return found, shape


def _param(name: str, field: str, value: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise BadEnv(f"{name}.params[{field!r}]: expected a number or an array of numbers, found {value!r:.100}")
    return array


def _method(env: Any, wanted: str) -> Callable[..., Any]:
    name, method = type(env).__name__, wanted.partition("(")[0]
    found = env.__dict__.get(method, inspect.getattr_static(type(env), method, None))
    if found is None:
        raise BadEnv(f"{name} has no {method}: it needs a static method {wanted}")
    if isinstance(found, staticmethod):
        found = found.__func__
    elif inspect.isfunction(found) and method not in env.__dict__:
        raise BadEnv(f"{name}.{method} is no static method: put @staticmethod above it, and write it as {wanted}")
    if not inspect.isfunction(found):
        raise BadEnv(f"{name}.{method}: expected a function {wanted}, found {found!r}")
    if len(inspect.signature(found).parameters) != wanted.count(",") + 1:
        raise BadEnv(f"{name}.{method}{inspect.signature(found)}: expected {wanted}")
    return found

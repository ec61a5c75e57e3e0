"""Turns what a user calls an env (an id, a spec, a class, a function, or a list of them) into functions that make one.

An env function takes no arguments and returns a new env. Worker processes get it pickled, and call it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.envs import registration
from gymnasium.envs.registration import EnvSpec, registry

from shoal.envs.adapt import adapt
from shoal.errors import BadEnv

EnvFn = Callable[[], Any]


@dataclass(frozen=True)
class FromSpec:
    """Makes an env from its registered spec. The spec is pickled whole, so a worker need not have registered the id."""

    spec: EnvSpec
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        return gymnasium.make(self.spec, **self.kwargs)


def as_env_fns(env: Any, num_envs: int | None, env_kwargs: Mapping[str, Any] | None = None) -> list[EnvFn]:
    """A list of env functions, one for each env; `num_envs` is None for as many as the list has, or for one.

    Raises BadEnv if `env` is no id, spec, class, function or list of them, or if `num_envs` does not fit it.
    """
    kwargs = dict(env_kwargs or {})
    is_whole = num_envs is None or (hasattr(num_envs, "__index__") and not isinstance(num_envs, bool))
    if not isinstance(env, Sequence) or isinstance(env, str):
        if not is_whole or (num_envs is not None and num_envs < 1):
            raise BadEnv(f"num_envs must be a whole number of at least 1, found {num_envs!r}")
        return [_single(env, kwargs)] * (1 if num_envs is None else int(num_envs))
    if len(env) == 0:
        raise BadEnv("the list of env functions is empty: at least one env is needed")
    if not is_whole or num_envs not in (None, len(env)):
        raise BadEnv(f"num_envs is {num_envs!r}, and {len(env)} env functions were given: leave num_envs out")
    fns = []
    for i, item in enumerate(env):
        try:
            fns.append(_single(item, kwargs))
        except BadEnv as error:
            raise BadEnv(f"entry {i} of the list: {error}") from error.__cause__
    return fns


def _single(env: Any, kwargs: dict[str, Any]) -> EnvFn:
    if isinstance(env, str):
        try:
            spec = find_spec(env)
        except (gymnasium.error.Error, ImportError) as error:
            raise BadEnv(f"there is no registered env {env!r}: {error}") from error
        return FromSpec(spec, kwargs)
    if isinstance(env, EnvSpec):
        return FromSpec(env, kwargs)
    if not isinstance(env, type) and hasattr(env, "step") and hasattr(env, "reset"):
        functional = "" if hasattr(env, "close") else '; one that is made of JAX functions needs backend="jax"'
        raise BadEnv(
            f"{env!r} is an env already made; a pool makes its own, so pass a function that makes one, "
            f"such as `lambda: MyEnv()`{functional}"
        )
    if isinstance(env, type) and hasattr(env, "__shoal_env__"):  # the class itself says how to make an env of it
        env = env.__shoal_env__
    if callable(env):
        return functools.partial(env, **kwargs) if kwargs else env
    raise BadEnv(f"expected an env id, a spec, or a function that makes an env, found {type(env).__name__}: {env!r}")


def find_spec(env_id: str) -> EnvSpec:
    """The spec of an id; of "module:id" after importing the module, as `gymnasium.make` does."""
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    return gymnasium.spec(name)


def with_time_limit(env_fn: EnvFn, steps: int) -> EnvFn:
    """An env function with another time limit than the env's own."""
    if isinstance(env_fn, FromSpec):
        return FromSpec(env_fn.spec, {**env_fn.kwargs, "max_episode_steps": steps})
    return functools.partial(_make_limited, env_fn, steps)


def _make_limited(env_fn: EnvFn, steps: int) -> Any:
    return gymnasium.wrappers.TimeLimit(adapt(env_fn()), steps)


def pickle_env_fns(env_fns: Sequence[EnvFn], first: int = 0) -> list[bytes]:
    """Pickle each function. One that is there many times is pickled once; `first` is the id of the first env.

    If one cannot be pickled, BadEnv names its env, and the variable in it that is to blame.
    """
    done: dict[int, bytes] = {}
    for i, env_fn in enumerate(env_fns):
        if id(env_fn) in done:
            continue
        try:
            done[id(env_fn)] = cloudpickle.dumps(env_fn)
        except Exception as error:
            raise BadEnv(
                f"the env function of env {first + i} cannot be sent to a worker process: {_culprit(env_fn)}({error}). "
                'Make that object inside the function, or use backend="serial" or "threads"'
            ) from error
    return [done[id(env_fn)] for env_fn in env_fns]


def _culprit(env_fn: Any) -> str:
    """Which captured variable, attribute or argument cannot be pickled, in words for the message."""
    inner = env_fn.func if isinstance(env_fn, functools.partial) else env_fn
    parts: dict[str, Any] = dict(getattr(inner, "__dict__", {}))
    closure = getattr(inner, "__closure__", None)
    for name, cell in zip(inner.__code__.co_freevars, closure, strict=True) if closure else ():
        with contextlib.suppress(ValueError):  # a cell that is still empty
            parts[name] = cell.cell_contents
    if hasattr(inner, "__globals__"):
        parts |= {n: inner.__globals__[n] for n in inner.__code__.co_names if n in inner.__globals__}
    for keyword in ("args", "keywords", "kwargs"):
        value = getattr(env_fn, keyword, None)
        if isinstance(value, Mapping):
            parts |= dict(value)
        elif isinstance(value, tuple):
            parts |= {f"argument {i}": v for i, v in enumerate(value)}
    for name, value in parts.items():
        if not _can_be_pickled(value):
            return f"its {name!r}, a {type(value).__name__}, cannot be pickled "
    return ""


def registry_additions() -> bytes | None:
    """The envs that this process registered beyond Gymnasium's own, pickled, so that workers can make them by id."""
    added = {
        name: spec
        for name, spec in registry.items()
        if not (isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium.envs."))
        and spec.entry_point is not None
    }
    if not added:
        return None
    try:
        return cloudpickle.dumps(added)  # type: ignore[no-any-return]
    except Exception:  # leave out those that cannot be pickled: if a worker makes one, `gymnasium.make` says so
        return cloudpickle.dumps({n: s for n, s in added.items() if _can_be_pickled(s)})  # type: ignore[no-any-return]


def _can_be_pickled(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


_filled: dict[str, EnvSpec] = {}  # what `install_registry` has put into the registry


def install_registry(data: bytes | None) -> None:
    """In a worker: fill in what the caller had registered, and what is missing here.

    Most packages register their envs when they are imported, which may come later, with the first env. What a package
    registers then takes the place of what was filled in, and no warning is given.
    """
    if data is None:
        return
    told = cloudpickle.loads(data)  # which imports some packages
    missing = {name: spec for name, spec in told.items() if name not in registry}
    if missing and not _filled:  # for packages that are imported from now on
        registration.register = gymnasium.register = _registering(registration.register)
    registry.update(missing)
    _filled.update(missing)


def _registering(register: Callable[..., None]) -> Callable[..., None]:
    """Gymnasium's `register`, which first takes away what was only filled in under the same name."""

    @functools.wraps(register)
    def registering(id: str, *args: Any, **kwargs: Any) -> None:
        for name in (id, f"{registration.current_namespace}/{id}"):
            if name in _filled and registry.get(name) is _filled.pop(name):
                del registry[name]
        register(id, *args, **kwargs)

    return registering

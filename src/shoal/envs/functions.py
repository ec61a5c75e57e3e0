"""Turns what a user calls an env (id, spec, class, function, list of functions) into a list of env functions."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec, registry

from shoal.errors import BadEnv

__all__ = ["EnvFn", "as_env_fns", "find_spec", "install_registry", "pickle_env_fns", "registry_additions"]

EnvFn = Callable[[], Any]


@dataclass(frozen=True)
class FromSpec:
    """Builds an env from its registered spec, which travels whole: a worker need not have registered the id."""

    spec: EnvSpec
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Any:
        return gymnasium.make(self.spec, **self.kwargs)


@dataclass(frozen=True)
class FromCallable:
    """Builds an env by a user's function with fixed keyword arguments."""

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.function(**self.kwargs)


def as_env_fns(env: Any, num_envs: int | None, env_kwargs: Mapping[str, Any] | None = None) -> list[EnvFn]:
    """A list of functions that build one env each.

    Raises:
        BadEnv: if it is none of the things that can be made into envs, or the numbers do not match.
    """
    kwargs = dict(env_kwargs or {})
    if isinstance(env, Sequence) and not isinstance(env, str):
        return _from_list(env, num_envs, kwargs)
    count = 1 if num_envs is None else num_envs
    if isinstance(count, bool) or not hasattr(count, "__index__") or count < 1:
        raise BadEnv(f"num_envs must be a whole number of at least 1, found {num_envs!r}")
    return [_single(env, kwargs)] * int(count)


def _from_list(env: Sequence[Any], num_envs: int | None, kwargs: dict[str, Any]) -> list[EnvFn]:
    if len(env) == 0:
        raise BadEnv("the list of env functions is empty: at least one env is needed")
    if num_envs is not None and (
        isinstance(num_envs, bool) or not hasattr(num_envs, "__index__") or num_envs != len(env)
    ):
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
    if isinstance(env, type) and hasattr(env, "__shoal_env__"):  # a class that says by itself how an env is made of it
        env = env.__shoal_env__
    if callable(env):
        return FromCallable(env, kwargs) if kwargs else env
    raise BadEnv(f"expected an env id, a spec, or a function that makes an env, found {type(env).__name__}: {env!r}")


def find_spec(env_id: str) -> EnvSpec:
    """The spec of an id; of "module:id" after importing the module, as `gymnasium.make` does."""
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    return gymnasium.spec(name)


def pickle_env_fns(env_fns: Sequence[EnvFn], first: int = 0) -> list[bytes]:
    """Each function pickled once, also if it stands in many places; `first` is the id of the first env.

    Raises:
        BadEnv: naming the first index that cannot be pickled, and the variable in it that is to blame.
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
    """Which captured variable or attribute refuses to be pickled, in words for the message."""
    inner = env_fn.function if isinstance(env_fn, FromCallable) else env_fn
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
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f"its {name!r}, a {type(value).__name__}, cannot be pickled "
    return ""


def registry_additions() -> bytes | None:
    """The envs that this process registered beyond Gymnasium's own, so that `gymnasium.make` finds them in workers."""
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
    except Exception:
        return cloudpickle.dumps(_picklable(added))  # type: ignore[no-any-return]


def _picklable(specs: dict[str, EnvSpec]) -> dict[str, EnvSpec]:
    kept = {}
    for name, spec in specs.items():
        try:
            cloudpickle.dumps(spec)
        except Exception:
            continue  # an env that cannot travel is no fault unless somebody makes it; then `make` says so
        kept[name] = spec
    return kept


def install_registry(data: bytes | None) -> None:
    """In a worker: register what the caller had registered."""
    if data is not None:
        for name, spec in cloudpickle.loads(data).items():
            registry.setdefault(name, spec)

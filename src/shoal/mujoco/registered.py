"""Which registered ids have a batch in `mujoco.gymnasium_envs`, and how it is made."""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

from shoal import native
from shoal.backends.batch_native import NoBatch
from shoal.support.optional_dependencies import install

_OF_MAKE = ("disable_env_checker",)  # arguments of `gymnasium.make`, which change no result


def find(spec: Any, kwargs: dict[str, Any], exact: bool = True) -> Callable[..., Any]:
    """What makes a batch of the envs of a spec of Gymnasium's, which is always exact; `kwargs` are those of
    `gymnasium.make`.

    Raises:
        NoBatch: there is none, or it would not give the same results.
    """
    if importlib.util.find_spec("mujoco") is None:
        raise NoBatch(f"MuJoCo is not installed: {install('mujoco')}")
    from shoal.mujoco.gymnasium_envs import CLASSES

    found = CLASSES.get(str(spec.entry_point))
    if found is None:
        raise NoBatch("only version 5 of Gymnasium's MuJoCo envs has a batch")
    if spec.additional_wrappers:
        raise NoBatch("the spec has wrappers, which work on single envs")
    if native.core is None:
        raise NoBatch("Shoal's C core is missing, which steps batches in threads")
    arguments = {**spec.kwargs, **kwargs}
    limit = arguments.pop("max_episode_steps", None)
    limit = spec.max_episode_steps if limit is None else limit
    for name in _OF_MAKE:
        arguments.pop(name, None)
    if arguments.get("render_mode") == "human":
        raise NoBatch('render_mode="human" opens a window for each env')
    return functools.partial(_make, found, copy.deepcopy(spec), None if limit == -1 else limit, arguments)


def _make(
    kind: Callable[..., Any], spec: Any, limit: int | None, arguments: dict[str, Any], num_envs: int,
    num_threads: int | None = None,
) -> Any:  # fmt: skip
    env = kind(num_envs, max_episode_steps=limit, num_threads=num_threads, **arguments)
    spec.kwargs = arguments
    env.spec = spec
    return env

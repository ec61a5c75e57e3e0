"""Faster versions of TF-Agents' `restart`, `transition`, `truncation` and `termination`, for envs without tensors.

A cheap PyEnvironment spends nine tenths of its step in these functions, which search their arguments for tensors. If an
observation is a numpy array and a reward is a number, the versions here make the same TimeStep at once; everything else
they pass on to the original functions. TF-Agents itself is not imported.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

_NUMBERS = (float, int, np.float32, np.float64)
_MODULES = ("tf_agents.trajectories.time_step", "tf_agents.trajectories")  # the second imports them by name
_ONE, _ZERO = np.ones((), np.float32), np.zeros((), np.float32)


def quicken() -> None:
    """Put the fast functions in place of the originals, if this process has imported TF-Agents."""
    module = sys.modules.get(_MODULES[0])
    if module is not None and not hasattr(module.transition, "__wrapped__"):
        _put({name: make(module, getattr(module, name)) for name, make in _MAKERS.items()})


def slow_down() -> None:
    """Undo `quicken`."""
    module = sys.modules.get(_MODULES[0])
    if module is not None and hasattr(module.transition, "__wrapped__"):
        _put({name: getattr(module, name).__wrapped__ for name in _MAKERS})


def _put(functions: dict[str, Any]) -> None:
    for name in _MODULES:
        vars(sys.modules[name]).update(functions)


def _is_plain(observation: Any) -> bool:
    kind = type(observation)
    if kind is dict:
        return bool(observation) and all(type(part) is np.ndarray for part in observation.values())
    return kind is np.ndarray


def _is_number(value: Any) -> bool:
    return (type(value) in _NUMBERS or (type(value) is np.ndarray and value.shape == ())) and not math.isnan(value)


def _restart(module: ModuleType, before: Any) -> Callable[..., Any]:
    first, make = module.StepType.FIRST, module.TimeStep

    @functools.wraps(before)
    def restart(observation: Any, batch_size: Any = None, reward_spec: Any = None) -> Any:
        if batch_size is None and reward_spec is None and _is_plain(observation):
            return make(first, _ZERO.copy(), _ONE.copy(), observation)
        return before(observation, batch_size, reward_spec)

    return restart


def _with_discount(step_type: str, module: ModuleType, before: Any) -> Callable[..., Any]:
    kind, make = getattr(module.StepType, step_type), module.TimeStep

    @functools.wraps(before)
    def transition(observation: Any, reward: Any, discount: Any = 1.0, outer_dims: Any = None) -> Any:
        if outer_dims is None and _is_plain(observation) and _is_number(reward) and _is_number(discount):
            return make(kind, np.asarray(reward, np.float32), np.asarray(discount, np.float32), observation)
        return before(observation, reward, discount, outer_dims)

    return transition


def _termination(module: ModuleType, before: Any) -> Callable[..., Any]:
    last, make = module.StepType.LAST, module.TimeStep

    @functools.wraps(before)
    def termination(observation: Any, reward: Any, outer_dims: Any = None) -> Any:
        if outer_dims is None and _is_plain(observation) and _is_number(reward):
            return make(last, np.asarray(reward, np.float32), _ZERO.copy(), observation)
        return before(observation, reward, outer_dims)

    return termination


_MAKERS: dict[str, Callable[[ModuleType, Any], Callable[..., Any]]] = {
    "restart": _restart,
    "transition": functools.partial(_with_discount, "MID"),
    "truncation": functools.partial(_with_discount, "LAST"),
    "termination": _termination,
}

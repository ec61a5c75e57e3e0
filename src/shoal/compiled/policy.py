"""Policies that can be compiled: they choose the action of one lane at a time, inside a rollout."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from shoal.compiled.definition import function
from shoal.compiled.mlp import Mlp
from shoal.compiled.random import begin_stream_64, integer, normal, uniform
from shoal.spaces.leaves import Leaf

F = TypeVar("F", bound=Callable[..., Any])
STREAM = 2**62  # the "episode" of a policy's streams, so that they differ from those of the envs

_policies: set[Any] = set()


def policy(choose: F) -> F:
    """Mark a function (obs, action, rng, *params) that chooses actions, so that rollouts can compile it.

    `obs` and `action` are those of one lane: arrays (of one element, if the space has no shape), or tuples of these if
    the space is nested. The function writes `action`. `params` are the arrays that `rollout` got.

    Raises:
        TypeError: it is not a plain function.
    """
    if not inspect.isfunction(choose):
        raise TypeError(f"compiled.policy: expected a function, found {choose!r}")
    _policies.add(choose)
    return choose


def is_policy(value: Any) -> bool:
    """Say whether this is an MLP, or a function that was marked by `policy`."""
    return isinstance(value, Mlp) or (inspect.isfunction(value) and value in _policies)


def streams(seed: int, lanes: int) -> npt.NDArray[np.uint64]:
    """Return the beginnings of the lanes' streams for a policy: lane i has the seed `seed + i`."""
    rngs: npt.NDArray[Any] = np.zeros((1, lanes), np.uint64)
    begin_stream_64(rngs, np.arange(lanes, dtype=np.uint64) + np.uint64(seed), np.array([STREAM]))
    return np.ascontiguousarray(rngs.T)


@function
def draw(rng: Any, low: float, high: float) -> float:
    """Draw as `Box.sample` does: uniform between two bounds, normal without any, half a normal beyond one bound."""
    if math.isinf(low):
        return normal(rng) if math.isinf(high) else high - abs(normal(rng))
    return low + abs(normal(rng)) if math.isinf(high) else uniform(rng, low, high)


@policy
def random_integers(obs: Any, action: Any, rng: Any, low: Any, high: Any) -> None:
    """Choose any action of a space of whole numbers."""
    flat = action.reshape(action.size)
    for i in range(flat.size):
        flat[i] = integer(rng, low[i], high[i] + 1)


@policy
def random_floats(obs: Any, action: Any, rng: Any, low: Any, high: Any) -> None:
    """Choose any action of a Box of floats."""
    flat = action.reshape(action.size)
    for i in range(flat.size):
        flat[i] = draw(rng, low[i], high[i])


def random_policy(leaf: Leaf) -> tuple[Any, tuple[npt.NDArray[Any], ...]]:
    """Return a policy that chooses at random in a space with this one leaf, and its params."""
    assert leaf.low is not None
    assert leaf.high is not None
    floats = leaf.dtype.kind == "f"
    bounds = [np.array(bound, np.float64 if floats else np.int64).reshape(-1) for bound in (leaf.low, leaf.high)]
    return (random_floats if floats else random_integers), tuple(bounds)


def random_policy_within(leaf: Leaf) -> Any:
    """Return a policy that chooses as that of `random_policy`, with the bounds as numbers in its code.

    A compiler can make more of numbers that it knows: a remainder by 2 is a bit.
    """
    _, bounds = random_policy(leaf)
    return _random_within(leaf.shape or (1,), *(tuple(bound.tolist()) for bound in bounds), leaf.dtype.kind == "f")


@functools.lru_cache(maxsize=64)
def _random_within(shape: tuple[int, ...], low: tuple[Any, ...], high: tuple[Any, ...], floats: bool) -> Any:
    lines = ["def choose(obs, action, rng):"]
    names: dict[str, Any] = {"draw": draw, "integer": integer, "inf": math.inf}
    for place, first, last in zip(np.ndindex(*shape), low, high, strict=True):
        drawn = f"draw(rng, {first!r}, {last!r})" if floats else f"integer(rng, {first}, {last + 1})"
        lines.append(f"    action[{', '.join(map(str, place))}] = {drawn}")
    exec("\n".join(lines), names)
    return names["choose"]


def act_on_lanes(
    choose: Any, obs: Sequence[Any], action: Sequence[Any], nested: tuple[bool, bool], rngs: Any, params: Sequence[Any]
) -> None:
    """Let a policy choose for all lanes, in plain Python; `obs` and `action` are arrays [lanes, ...] for each leaf."""
    for lane in range(len(rngs)):
        rows = [[_row(array, lane) for array in arrays] for arrays in (obs, action)]
        given = [tuple(row) if is_nested else row[0] for row, is_nested in zip(rows, nested, strict=True)]
        choose(*given, rngs[lane], *params)


def _row(array: Any, lane: int) -> Any:
    return array[lane] if array.ndim > 1 else array[lane : lane + 1]

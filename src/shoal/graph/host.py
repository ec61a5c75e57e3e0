"""A pool as a graph sees it: flat tuples of arrays in and out, and env errors that outlive a framework's wrapping."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from shoal.dialects.vec_env import VecEnvWrapper
from shoal.errors import BadEnv, PoolClosed
from shoal.pool import Pool
from shoal.spaces.leaves import Leaf, array_leaves, assemble, get_path
from shoal.wrappers.hosts import WrappedPool

__all__ = ["Arrays", "GraphHost", "kept_errors", "own_errors", "pool_of"]

Arrays = tuple[npt.NDArray[Any], ...]

_KEPT = 64  # errors that nobody has asked for; a program that ignores them must not collect them for ever
_kept: dict[str, BaseException] = {}
_numbers = itertools.count(1)


class GraphHost:
    """The caller's side of the callbacks in a graph.

    An answer is one flat tuple: the leaves of the observation in the space's own order, then reward (float32),
    terminated and truncated (bool). All arrays are the graph's own, however long it keeps them.

    Args:
        envs: a Pool, or what stands on one and has it as `pool`, such as a vector env of `shoal.make`.
        canonical: the type that the framework has for a numpy type; the same one by default.

    Attributes:
        obs_leaves, action_leaves: one for each array of an observation and of an action.
        obs_types: of the arrays that a graph gets.
    """

    def __init__(self, envs: Any, canonical: Callable[[np.dtype[Any]], np.dtype[Any]] = lambda dtype: dtype):
        self.pool = pool_of(envs)
        self.num_envs = self.pool.num_envs
        self.observation_space, self.action_space = self.pool.single_observation_space, self.pool.single_action_space
        self.obs_leaves = array_leaves("observation", self.observation_space, "a graph")
        self.action_leaves = array_leaves("action", self.action_space, "a graph")
        self.obs_types = [np.dtype(canonical(leaf.dtype)) for leaf in self.obs_leaves]
        self._one_obs = len(self.obs_leaves) == 1 and not self.obs_leaves[0].path
        self._one_action = len(self.action_leaves) == 1 and not self.action_leaves[0].path
        self._casts = any(leaf.dtype != kind for leaf, kind in zip(self.obs_leaves, self.obs_types, strict=True))

    # ---- shapes ------------------------------------------------------------------------------------------------

    def nest(self, leaves: Sequence[Any]) -> Any:
        """One value for each leaf of the observation, nested as the space is."""
        return assemble(self.observation_space, leaves)

    def flat_actions(self, actions: Any) -> list[Any]:
        """One value for each leaf of the action, out of a batch that is nested as the space is."""
        return [get_path(actions, leaf.path) for leaf in self.action_leaves]

    # ---- callbacks ---------------------------------------------------------------------------------------------

    def step(self, *actions: Any) -> Arrays:
        """Step all envs with the leaves of an action."""
        with kept_errors():
            return self.exchange(actions)

    def exchange(self, actions: Sequence[Any]) -> Arrays:
        """Like step, for frameworks that let errors pass as they are."""
        return self._answer(self.pool.exchange(self._nested(actions)))

    def send(self, ids: Any, *actions: Any) -> None:
        """Start a step of these envs; None for all."""
        with kept_errors():
            self.pool.send(self._nested(actions), None if ids is None else np.asarray(ids))

    def recv(self) -> tuple[npt.NDArray[np.int64], Arrays]:
        """The next batch: env ids, and their answer."""
        with kept_errors():
            ready = self.pool.wait()
            return ready.ids.copy(), self._answer(ready)

    def reset(self, ids: Any = None, seed: Any = None) -> Arrays:
        """Reset envs (None: all): the leaves of their first observations, in the order of `ids`."""
        with kept_errors():
            wanted = None if ids is None else np.asarray(ids)
            obs = self._leaves(self.pool.reset(wanted, seed=seed).obs)
            if wanted is None:
                return obs
            order = np.argsort(np.argsort(wanted))  # batches are ascending
            return tuple(leaf[order] for leaf in obs)

    def _nested(self, actions: Sequence[Any]) -> Any:
        if self._one_action and len(actions) == 1:
            return _widened(np.asarray(actions[0]), self.action_leaves[0])
        values = [_widened(np.asarray(a), leaf) for a, leaf in zip(actions, self.action_leaves, strict=True)]
        return assemble(self.action_space, values)

    def _answer(self, ready: Any) -> Arrays:
        obs, reward, terminated, truncated = self.pool.data.take_step(ready)
        return (*self._leaves(obs), reward.astype(np.float32), terminated, truncated)

    def _leaves(self, obs: Any) -> Arrays:
        leaves = (obs,) if self._one_obs else tuple(get_path(obs, leaf.path) for leaf in self.obs_leaves)
        if not self.pool.copy:
            return tuple(leaf.astype(kind) for leaf, kind in zip(leaves, self.obs_types, strict=True))
        if self._casts:
            return tuple(leaf.astype(kind, copy=False) for leaf, kind in zip(leaves, self.obs_types, strict=True))
        return leaves


def pool_of(envs: Any) -> Pool:
    """The pool below a vector env, or the pool itself.

    Raises:
        BadEnv: there is none, or something in between.
        PoolClosed: it is closed already.
    """
    if isinstance(envs, WrappedPool | gymnasium.vector.VectorWrapper | VecEnvWrapper):
        raise BadEnv(
            f"{envs!r:.100} has wrappers, which a graph would step past: wrap the single envs instead, or do in the "
            "graph what the wrapper does"
        )
    # Its own one: wrappers of other libraries pass on what they are asked for.
    pool = envs if isinstance(envs, Pool) else getattr(envs, "__dict__", {}).get("pool")
    if not isinstance(pool, Pool):
        raise BadEnv(f"expected a shoal.Pool or a vector env of Shoal's, found {type(envs).__name__}: {envs!r:.100}")
    if pool.closed:
        raise PoolClosed(f"{envs!r:.100}: make a new one")
    return pool


def _widened(array: npt.NDArray[Any], leaf: Leaf) -> npt.NDArray[Any]:
    """Of the leaf's own type where that loses nothing, which the core takes fastest; the pool checks the rest."""
    if array.dtype != leaf.dtype and np.can_cast(array.dtype, leaf.dtype, "safe"):
        return array.astype(leaf.dtype)
    return array


# ---- errors ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def kept_errors() -> Iterator[None]:
    """Keep what is raised inside of a callback, under a number that the framework's own error will quote."""
    try:
        yield
    except BaseException as error:
        token = f"[shoal error {next(_numbers)}]"
        while len(_kept) >= _KEPT:
            del _kept[next(iter(_kept))]
        _kept[token] = error.with_traceback(None)  # whose frames would keep the envs
        raise RuntimeError(f"{type(error).__name__}: {error} {token}") from error


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Around the call of a graph with envs in it: raises their own errors, instead of what the framework makes of them.

    Example:
        with shoal.graph.own_errors():
            state = train(state)
    """
    try:
        yield
    except Exception as error:
        found = re.findall(r"\[shoal error \d+\]", str(error))
        own = next((_kept.pop(token) for token in found if token in _kept), None)
        if own is None:
            raise
        raise own from None

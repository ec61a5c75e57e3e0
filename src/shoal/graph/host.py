"""A pool as a graph sees it: flat tuples of arrays in and out, and env errors that a framework cannot hide."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import numpy.typing as npt

from shoal.errors import BadAction, BadEnv, PoolClosed
from shoal.pool import Pool
from shoal.spaces.leaves import Leaf, array_leaves, assemble, get_path
from shoal.wrappers.hosts import WrappedPool

Arrays = tuple[npt.NDArray[Any], ...]

_KEPT = 64  # at most so many errors are kept: a program that ignores them must not collect them for ever
_kept: dict[str, BaseException] = {}
_numbers = itertools.count(1)


class StepAnswer(NamedTuple):
    """The answers of all envs as the framework's arrays, one row for each env.

    Attributes:
        obs: array [n, ...], or dicts and tuples of arrays, nested as the space is.
        reward: float32 [n].
        terminated, truncated: bool [n].
    """

    obs: Any
    reward: Any
    terminated: Any
    truncated: Any

    @property
    def done(self) -> Any:
        """Bool [n], True where an episode ended."""
        return self.terminated | self.truncated


class Received(NamedTuple):
    """The answers of some envs, as in StepAnswer; `env_id`, an integer [n], says which, in ascending order."""

    obs: Any
    reward: Any
    terminated: Any
    truncated: Any
    env_id: Any

    @property
    def done(self) -> Any:
        """Bool [n], True where an episode ended."""
        return self.terminated | self.truncated


class FlatBatch:
    """A batch of envs with flat observations and actions: one array for each leaf of the space.

    Attributes:
        obs_leaves, action_leaves: one for each array of an observation and of an action.
    """

    def __init__(self, num_envs: int, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]):
        self.num_envs, self.observation_space, self.action_space = num_envs, observation_space, action_space
        self.obs_leaves = array_leaves("observation", observation_space, "a graph")
        self.action_leaves = array_leaves("action", action_space, "a graph")

    def nest(self, leaves: Sequence[Any]) -> Any:
        """Nest one value for each leaf of the observation as the space is nested."""
        return assemble(self.observation_space, leaves)

    def flat_actions(self, actions: Any) -> list[Any]:
        """Return one value for each leaf of the action, out of a batch that is nested as the space is."""
        found = []
        for leaf in self.action_leaves:
            try:
                found.append(get_path(actions, leaf.path))
            except (KeyError, IndexError, TypeError) as error:
                raise BadAction(
                    f"actions have no part {leaf.name}: expected actions that are nested as {self.action_space}, "
                    f"found {actions!r:.200}"
                ) from error
        return found

    def types(self, framework: str, type_of: Callable[[np.dtype[Any]], Any]) -> tuple[list[Any], list[Any]]:
        """Return the framework's types of the observation's and of the action's leaves.

        Raises:
            BadEnv: the framework has no such type; `type_of` raises TypeError or ValueError then.
        """

        def typed(what: str, leaf: Leaf) -> Any:
            try:
                return type_of(leaf.dtype)
            except (TypeError, ValueError) as error:
                raise BadEnv(
                    f"the {what} space{leaf.name} is of {leaf.dtype}, and {framework} has no type for {leaf.dtype}: "
                    "cast it by a wrapper around the env"
                ) from error

        obs, actions = self.obs_leaves, self.action_leaves
        return [typed("observation", leaf) for leaf in obs], [typed("action", leaf) for leaf in actions]


class GraphHost(FlatBatch):
    """The caller's side of the callbacks in a graph.

    An answer is one flat tuple: the leaves of the observation in the space's own order, then reward (float32),
    terminated and truncated (bool).

    Args:
        envs: a Pool, or an object that has one as `pool`, such as a vector env of `shoal.make`.
        canonical: gives the type that the framework has for a numpy type; the same one by default.
        keeps: whether the framework keeps the arrays that a call returns. If it does not, but copies them before the
            callback returns, they may be the pool's own memory.

    Attributes:
        obs_types: the types of the arrays that a graph gets.
    """

    def __init__(
        self, envs: Any, canonical: Callable[[np.dtype[Any]], np.dtype[Any]] = lambda dtype: dtype, keeps: bool = True
    ):
        self.pool = pool_of(envs)
        super().__init__(self.pool.num_envs, self.pool.single_observation_space, self.pool.single_action_space)
        self.obs_types = [np.dtype(canonical(leaf.dtype)) for leaf in self.obs_leaves]
        self._one_obs = len(self.obs_leaves) == 1 and not self.obs_leaves[0].path
        self._one_action = len(self.action_leaves) == 1 and not self.action_leaves[0].path
        self._copies = keeps and not self.pool.copy
        self._casts = any(leaf.dtype != kind for leaf, kind in zip(self.obs_leaves, self.obs_types, strict=True))

    # ---- callbacks ---------------------------------------------------------------------------------------------

    def step(self, *actions: Any) -> Arrays:
        """Step all envs with the leaves of an action."""
        try:
            return self.exchange(actions)
        except BaseException as error:  # `kept_errors` would cost every step a microsecond
            raise _keep(error) from error

    def exchange(self, actions: Sequence[Any]) -> Arrays:
        """Do what `step` does, for frameworks that let errors pass as they are."""
        with self.pool.turn:
            return self._answer(self.pool.exchange(self._nested(actions)))

    def send(self, ids: Any, *actions: Any) -> None:
        """Start a step of these envs; None for all."""
        with kept_errors():
            self.pool.send(self._nested(actions), None if ids is None else np.asarray(ids))

    def recv(self) -> tuple[npt.NDArray[np.int64], Arrays]:
        """Wait for the next batch, and return its env ids and its answer."""
        with kept_errors(), self.pool.turn:
            ready = self.pool.wait()
            return ready.ids.copy(), self._answer(ready)

    def reset(self, ids: Any = None, seed: Any = None) -> Arrays:
        """Reset envs (None: all), and return the leaves of their first observations, in the order of `ids`."""
        with kept_errors():
            wanted = None if ids is None else np.asarray(ids)
            obs = self._leaves(self.pool.reset(wanted, seed=seed).obs)
            if wanted is None:
                return obs
            order = np.argsort(np.argsort(wanted))  # a batch has its envs in ascending order
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
        if not self._copies and not self._casts:
            return leaves
        kinds = zip(leaves, self.obs_types, strict=True)
        return tuple(leaf.astype(kind, copy=self._copies) for leaf, kind in kinds)


def pool_of(envs: Any) -> Pool:
    """Return the pool below a vector env, or the pool itself.

    Raises:
        BadEnv: there is none, or wrappers stand between the envs and the pool.
        PoolClosed: it is closed already.
    """
    # A vector env of Shoal's has the pool as an attribute of its own. A wrapper of another kind than those named below
    # passes on the attribute of the env in it.
    own = envs if isinstance(envs, Pool) else getattr(envs, "__dict__", {}).get("pool")
    passes_on = own is None and isinstance(getattr(envs, "pool", None), Pool)
    if passes_on or isinstance(envs, WrappedPool | gymnasium.vector.VectorWrapper):
        raise BadEnv(
            f"{envs!r:.100} has wrappers, which a graph would step past: wrap the single envs instead, or do in the "
            "graph what the wrapper does"
        )
    if not isinstance(own, Pool):
        raise BadEnv(f"expected a shoal.Pool or a vector env of Shoal's, found {type(envs).__name__}: {envs!r:.100}")
    if own.closed:
        raise PoolClosed(f"{envs!r:.100}: make a new one")
    return own


def _widened(array: npt.NDArray[Any], leaf: Leaf) -> npt.NDArray[Any]:
    """Cast to the leaf's own type, which the core takes fastest, where that loses nothing; the pool checks the rest."""
    if array.dtype != leaf.dtype and np.can_cast(array.dtype, leaf.dtype, "safe"):
        return array.astype(leaf.dtype)
    return array


# ---- errors ----------------------------------------------------------------------------------------------------


def _keep(error: BaseException) -> RuntimeError:
    """Keep an error under a number, and return one that quotes the number."""
    token = f"[shoal error {next(_numbers)}]"
    while len(_kept) >= _KEPT:
        del _kept[next(iter(_kept))]
    _kept[token] = error.with_traceback(None)  # the frames of a traceback would keep the envs alive
    return RuntimeError(f"{type(error).__name__}: {error} {token}")


@contextlib.contextmanager
def kept_errors() -> Iterator[None]:
    """Keep what is raised inside a callback, under a number that the framework's own error will quote."""
    try:
        yield
    except BaseException as error:
        raise _keep(error) from error


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Raise the envs' own errors from a call of a graph, instead of the framework's errors about them.

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

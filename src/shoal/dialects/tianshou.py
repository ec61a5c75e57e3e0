"""The pool as a vector env of tianshou, for its Collector and AsyncCollector: change the import, keep the script.

    from shoal.dialects.tianshou import SubprocVectorEnv

tianshou resets envs itself, so a step of an env whose episode is over goes to the env, as any other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces

from shoal.dialects import tianshou_envs as beside_envs
from shoal.dialects.base import PoolFace, as_list, in_turn
from shoal.dialects.tianshou_envs import Anything, MakeEnv
from shoal.errors import BadEnv, EnvError, NothingPending, StepTimeout
from shoal.memory.answers import Ready
from shoal.memory.infos import listed
from shoal.spaces.leaves import Kind, flatten
from shoal.support.checks import Ids, check_ids
from shoal.support.optional_dependencies import install

try:
    from tianshou import env as theirs
except ImportError as error:
    raise ImportError(f"the tianshou dialect needs tianshou: {install('tianshou')}") from error

__all__ = ["DummyVectorEnv", "PoolVectorEnv", "RayVectorEnv", "ShmemVectorEnv", "SubprocVectorEnv"]

Array = npt.NDArray[Any]
Step = tuple[Array, Array, Array, Array, Array]
MOST_SEEN = 1000  # sets of ids that are kept


class _Rows(NamedTuple):
    """The envs of one call: ids as they were given, and the same for the pool.

    Attributes:
        names: as they were given, one for each row.
        ids: ascending; None for all.
        order: the place of each row among `ids`; None where they were given ascending.
        sorting: the row of each of `ids`; None as well.
    """

    names: list[Any]
    ids: Ids | None
    order: Ids | None = None
    sorting: Ids | None = None


class _OfEnvs:
    """An attribute that each env has: reading it gives a list of them. What is assigned to it is never read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, envs: Any, owner: type | None = None) -> Any:
        return self if envs is None else envs.get_env_attr(self._name)

    def __set__(self, envs: Any, value: Any) -> None:
        envs.__dict__[self._name] = value


class PoolVectorEnv(PoolFace, theirs.BaseVectorEnv):  # type: ignore[misc]
    """A pool as a BaseVectorEnv of tianshou, with all backends; `shoal.make(..., api="tianshou")` makes it.

    Args:
        env, num_envs: as for `shoal.Pool`.
        wait_num: a step waits for so many envs, and returns those that are done; None for all.
        timeout: seconds that such a step waits; then those that are done will do, at least one.
        as_objects: whether observations, rewards and actions travel as they are, whatever the spaces say, which takes
            longer; None for envs that need it: tianshou's PettingZooEnv, and actions that are dicts or tuples.
        **pool_options: as for `shoal.Pool`. An asynchronous one has a worker for each env, unless they say otherwise.

    Attributes:
        env_num, wait_num, timeout, is_async, is_closed: as in tianshou.
        waiting_id, ready_id: the envs that are being stepped, and all others.
    """

    _api, _mode, _partial = "a vector env of tianshou", "disabled", True
    _get: Callable[[Any, str], Any] = staticmethod(beside_envs.get_or_none)
    _seed: Callable[[Any, Any], Any] = staticmethod(beside_envs.seed_in_worker)
    _turns: list[int] | None = None  # the order in which lanes that are done are returned; None for ascending
    # tianshou's own looks at the name of every attribute that is read, which takes long.
    __getattribute__ = object.__getattribute__
    metadata, reward_range, spec = _OfEnvs(), _OfEnvs(), _OfEnvs()
    action_space, observation_space = _OfEnvs(), _OfEnvs()

    def __init__(
        self,
        env: Any,
        num_envs: int | None = None,
        *,
        wait_num: int | None = None,
        timeout: float | None = None,
        as_objects: bool | None = None,
        **pool_options: Any,
    ):
        several = isinstance(env, Sequence) and not isinstance(env, str)
        self.env_num = count = len(env) if several else 1 if num_envs is None else num_envs
        self._env_fns = env if several else [env] * count
        self.wait_num, self.timeout = wait_num or count, timeout
        assert 1 <= self.wait_num <= count, f"wait_num should be in [1, {count}], but got {wait_num}"
        assert timeout is None or timeout > 0, f"timeout is {timeout}, it should be positive if provided!"
        self.is_async = self.wait_num != count or timeout is not None
        if self.is_async:
            pool_options = {"batch_size": self.wait_num, **pool_options}
            if pool_options.get("backend") == "processes":
                pool_options.setdefault("num_workers", count)
        made: dict[int, Any] = {}
        fns = [made.setdefault(id(fn), _maker(fn, as_objects)) for fn in (env if several else [env])]
        self.waiting_id: list[Any] = []
        self.ready_id: list[Any] = list(range(count))
        self.is_closed = False
        self._error: EnvError | None = None  # of an env that was done besides those that a step waited for
        self._everyone = _Rows(list(range(count)), None)
        self._seen: dict[bytes, _Rows] = {}  # by the ids that were given
        options = {"check_reset": "none", **pool_options}
        self._open(fns if several else fns[0], None if several else num_envs, options)

    def _learn(self) -> None:
        if self.pool.num_envs != self.env_num:
            raise BadEnv(
                f"{self.env_num} envs have {self.pool.num_envs} lanes: tianshou steps one agent of an env at a time; "
                "wrap envs with several agents in its PettingZooEnv"
            )
        self._space = self.pool.single_observation_space
        leaves = flatten(self._space)
        self._objects = isinstance(self.pool.single_action_space, Anything)
        self._plain = len(leaves) == 1 and not leaves[0].path and leaves[0].kind is Kind.ARRAY

    # ---- stepping --------------------------------------------------------------------------------------------

    def reset(self, env_id: Any = None, **kwargs: Any) -> tuple[Array, Array]:
        """Reset envs (None: all), each with these arguments: their first observations and infos."""
        self._assert_is_not_closed()
        rows = self._rows(env_id)
        if self.is_async:
            self._assert_id(rows.names)
        with self.pool.turn:
            self._drop_late()
            if kwargs.keys() - {"seed", "options"}:
                answers = self.pool.apply(beside_envs.reset_env, kwargs, env_ids=self._as_given(rows))
                firsts = _stacked(_no_tuples([answer[0] for answer in answers]))
                return firsts, _object_array([answer[1] for answer in answers])
            if kwargs:
                ids = np.arange(self.env_num) if rows.ids is None else rows.ids
                self.pool.async_reset(ids, seed=[kwargs.get("seed")] * len(ids), options=kwargs.get("options"))
                ready = self._collect(self.pool.wait_reset, ids, env_ids=ids)
            else:
                ready = self.pool.begin(rows.ids)
            obs = self.pool.data.take_obs(ready)
            lanes = ready.ids.tolist()
            infos = [ready.infos.get(lane, {}) for lane in lanes] if ready.infos else [{} for _ in lanes]
        if not self._plain:
            unpacked = _unpacked(self._space, obs)
            obs = _stacked(_no_tuples([one[0] for one in unpacked] if self._objects else unpacked))
        found = _object_array(infos)
        return (obs, found) if rows.order is None else (obs[rows.order], found[rows.order])

    def step(self, action: Any, id: Any = None) -> Step:
        """Step envs (None: all), each by its row of the actions. Their answers are in the order of the ids.

        An asynchronous one starts these steps, if there are actions, and returns the answers of envs that are done: as
        `wait_num` and `timeout` say. `info["env_id"]` says which they are.
        """
        if self.is_closed:
            self._assert_is_not_closed()
        if self.is_async:
            return self._step_some(action, id)
        if action is None:
            raise ValueError("action must be not-None for non-async")
        rows = self._rows(id)
        assert len(action) == len(rows.names)
        with self.pool.turn:
            if self._late:
                self._drop_late()
            return self._answer(self._exchange(self._actions(action, rows), rows.ids), rows.names, rows.order)

    @in_turn
    def _step_some(self, action: Any, id: Any) -> Step:
        if action is not None:
            rows = self._rows(id)
            self._assert_id(rows.names)
            assert len(action) == len(rows.names)
            self.pool.send(self._actions(action, rows), rows.ids)
            self.waiting_id += rows.names
            self.ready_id = [one for one in self.ready_id if one not in rows.names]
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if not self.waiting_id:
            raise NothingPending("no env is being stepped, so there is nothing to wait for: give actions and ids")
        names = {range(self.env_num)[name]: name for name in self.waiting_id}
        try:
            ready = self._wait()
        except EnvError as error:
            self._is_done(names[error.env_id])
            raise
        lanes = ready.ids.tolist() if self._turns is None else self._turns
        found = [names[lane] for lane in lanes]
        for name in found:
            self._is_done(name)
        return self._answer(ready, found, None if self._turns is None else np.searchsorted(ready.ids, lanes))

    def _is_done(self, name: Any) -> None:
        self.waiting_id.remove(name)
        self.ready_id.append(name)

    def _wait(self) -> Ready:
        """Wait for `wait_num` of the envs that are being stepped, and take all that are done."""
        waiting, pool = len(self.waiting_id), self.pool
        if self.timeout is None:
            ready = pool.wait() if waiting >= self.wait_num else pool.wait(min_batch=waiting)
        else:
            ready = self._wait_in_time()
        if len(ready.ids) == waiting or not len(done := pool.done):
            return ready
        try:
            more = pool.wait_reset(done)
        except EnvError as error:  # those that are fine come first
            self._error = error
            self._is_done(next(name for name in self.waiting_id if range(self.env_num)[name] == error.env_id))
            return ready
        return Ready(np.sort(np.concatenate([ready.ids, more.ids])), 0, -1, {**ready.infos, **more.infos})

    def _wait_in_time(self) -> Ready:
        while True:
            began = time.monotonic()
            try:
                return self.pool.wait(self.timeout, min_batch=1)
            except StepTimeout:
                # None is done yet; or one has taken longer than the pool's own limit allows, which comes sooner.
                if time.monotonic() - began < self.timeout:  # type: ignore[operator]
                    raise

    # ---- what goes in and out --------------------------------------------------------------------------------

    def _rows(self, given: Any) -> _Rows:
        """The envs of a call. tianshou's collectors name the same ones again and again."""
        if given is None:
            return self._everyone
        if type(given) is not np.ndarray or given.dtype != np.int64 or given.ndim != 1:
            return self._sorted_out(given)
        found = self._seen.get(key := given.tobytes())
        if found is None:
            if len(self._seen) >= MOST_SEEN:
                self._seen.clear()
            found = self._seen[key] = self._sorted_out(given)
        return found

    def _sorted_out(self, given: Any) -> _Rows:
        names = list(self._wrap_id(given))
        lanes = check_ids([range(self.env_num)[name] for name in names], self.env_num)
        ids = None if len(lanes) == self.env_num else np.sort(lanes)
        if (np.diff(lanes) > 0).all():
            return _Rows(names, ids)
        sorting = np.argsort(lanes)
        return _Rows(names, ids, np.argsort(sorting), sorting)

    def _as_given(self, rows: _Rows) -> Ids:
        ids = np.arange(self.env_num) if rows.ids is None else rows.ids
        return ids if rows.order is None else ids[rows.order]

    def _actions(self, action: Any, rows: _Rows) -> Any:
        """Actions as the pool takes them, in ascending order of the envs."""
        if self._objects:
            each = list(action)
            return each if rows.sorting is None else [each[row] for row in rows.sorting]
        return action if rows.sorting is None else np.asarray(action)[rows.sorting]

    def _answer(self, ready: Ready, names: list[Any], order: Ids | None) -> Step:
        """What a step returns, of these lanes. `order` is as in _Rows."""
        obs, reward, terminated, truncated = self.pool.data.take_step(ready)
        if not self._plain:
            each = _unpacked(self._space, obs)
            if self._objects:
                reward = np.stack([one[1] for one in each])
                each = [one[0] for one in each]
            obs = _stacked(each)
        if order is not None:
            obs, reward, terminated, truncated = obs[order], reward[order], terminated[order], truncated[order]
        if not ready.infos:
            return obs, reward, terminated, truncated, _object_array([{"env_id": name} for name in names])
        found = listed(ready.infos, ready.ids)
        infos = found if order is None else [found[row] for row in order.tolist()]
        for info, name in zip(infos, names, strict=True):
            info["env_id"] = name
        return obs, reward, terminated, truncated, _object_array(infos)

    # ---- the envs themselves ---------------------------------------------------------------------------------

    def get_env_attr(self, key: str, id: Any = None) -> list[Any]:
        """An attribute of each of these envs (None: all)."""
        self._assert_is_not_closed()
        return self.pool.apply(self._get, key, env_ids=self._checked(id))

    def set_env_attr(self, key: str, value: Any, id: Any = None) -> None:
        """Set an attribute of each of these envs (None: all), within all wrappers."""
        self._assert_is_not_closed()
        self.pool.apply(beside_envs.set_env_attr, key, value, env_ids=self._checked(id))

    def _checked(self, id: Any) -> Ids:
        rows = self._rows(id)
        if self.is_async:
            self._assert_id(rows.names)
        return self._as_given(rows)

    def seed(self, seed: Any = None) -> list[Any]:
        """Seed all envs: an int gives env i `seed + i`; a list gives each its own."""
        self._assert_is_not_closed()
        if seed is None or isinstance(seed, int):
            seed = [None if seed is None else seed + i for i in range(self.env_num)]
        pairs = list(zip(range(self.env_num), seed, strict=True))
        return [self.pool.apply(self._seed, one, env_ids=[env_id])[0] for env_id, one in pairs]

    def render(self, **kwargs: Any) -> list[Any]:
        """What each env's render returns."""
        self._assert_is_not_closed()
        if self.is_async and self.waiting_id:
            raise RuntimeError(f"Environments {self.waiting_id} are still stepping, cannot render them now.")
        return self.pool.apply(beside_envs.render_env, kwargs)

    def close(self) -> None:
        """Close all envs; once only, as in tianshou."""
        self._assert_is_not_closed()
        self.is_closed = True
        super().close()

    def __exit__(self, *_: object) -> None:
        if not self.is_closed:
            self.close()


class DummyVectorEnv(PoolVectorEnv, theirs.DummyVectorEnv):  # type: ignore[misc]
    """Drop-in for tianshou's: the envs live in this process, and are stepped one after another.

    As tianshou's own, an asynchronous one answers with every second of the envs that are being stepped.

    Args:
        env_fns: a list of functions that make one env each.
        wait_num, timeout: as for tianshou's: some envs at a time.
        **options: options of a `shoal.Pool`.
    """

    _get = staticmethod(beside_envs.get_of_innermost)
    _seed = staticmethod(beside_envs.seed_in_place)

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        wait_num: int | None = None,
        timeout: float | None = None,
        **options: Any,
    ):
        options.setdefault("backend", "serial")
        super().__init__(as_list(env_fns), wait_num=wait_num, timeout=timeout, **options)

    def _wait(self) -> Ready:
        self._turns = [range(self.env_num)[name] for name in self.waiting_id[::2]]
        return self.pool.wait_reset(self._turns)


class SubprocVectorEnv(PoolVectorEnv, theirs.SubprocVectorEnv):  # type: ignore[misc]
    """Drop-in for tianshou's: the envs live in worker processes, several to each unless it is asynchronous.

    Args:
        env_fns: a list of functions that make one env each.
        wait_num, timeout: as for tianshou's: some envs at a time.
        **options: options of a `shoal.Pool`.
        share_memory: changes nothing, because all arrays are in shared memory.
        context: the start method; None for "forkserver".
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        wait_num: int | None = None,
        timeout: float | None = None,
        share_memory: bool = False,
        context: Any = None,
        **options: Any,
    ):
        if hasattr(context, "get_start_method"):
            context = context.get_start_method()
        options = {"backend": "processes", "start_method": context, **options}
        super().__init__(as_list(env_fns), wait_num=wait_num, timeout=timeout, **options)


class ShmemVectorEnv(PoolVectorEnv, theirs.ShmemVectorEnv):  # type: ignore[misc]
    """Drop-in for tianshou's; the same as SubprocVectorEnv here.

    Args:
        env_fns: a list of functions that make one env each.
        wait_num, timeout: as for tianshou's: some envs at a time.
        **options: options of a `shoal.Pool`.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        wait_num: int | None = None,
        timeout: float | None = None,
        **options: Any,
    ):
        options.setdefault("backend", "processes")
        super().__init__(as_list(env_fns), wait_num=wait_num, timeout=timeout, **options)


class RayVectorEnv(PoolVectorEnv, theirs.RayVectorEnv):  # type: ignore[misc]
    """Drop-in for tianshou's: the envs live in actors of a Ray cluster, several to each.

    Args:
        env_fns: a list of functions that make one env each.
        wait_num, timeout: as for tianshou's: some envs at a time.
        **options: options of a `shoal.Pool`.
    """

    _get = staticmethod(beside_envs.get_of_outermost)
    _seed = staticmethod(beside_envs.seed_in_actor)

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        wait_num: int | None = None,
        timeout: float | None = None,
        **options: Any,
    ):
        options.setdefault("backend", "ray")
        super().__init__(as_list(env_fns), wait_num=wait_num, timeout=timeout, **options)


def _maker(env: Any, as_objects: bool | None) -> Any:
    """What makes the env; ids, specs and classes that can be compiled stay as they are, for the backends."""
    if as_objects is None and (not callable(env) or hasattr(env, "__shoal_env__")):
        return env
    return MakeEnv(env, as_objects)


def _object_array(items: list[Any]) -> Array:
    # Not by assignment, for which numpy asks each item whether it is an array.
    return np.fromiter(items, object, len(items))


def _no_tuples(each: list[Any]) -> list[Any]:
    """Raise TypeError for observations that are tuples, as tianshou does."""
    if isinstance(each[0], tuple):
        raise TypeError("Tuple observation space is not supported. ", "Please change it to array or dict space")
    return each


def _unpacked(space: Space[Any], obs: Any) -> list[Any]:
    """A batch of observations, nested as the space is, as a list of single ones."""
    if isinstance(space, spaces.Dict):
        parts = [_unpacked(part, obs[key]) for key, part in space.spaces.items()]
        return [dict(zip(space.spaces, one, strict=True)) for one in zip(*parts, strict=True)]
    if isinstance(space, spaces.Tuple):
        parts = [_unpacked(part, one) for part, one in zip(space.spaces, obs, strict=True)]
        return list(zip(*parts, strict=True))
    return list(obs)


def _stacked(each: list[Any]) -> Array:
    """Single observations as one array, of objects where they are dicts or differ in shape."""
    if isinstance(each[0], dict):
        return _object_array(each)
    try:
        return np.stack(each)
    except ValueError:
        return np.array(each, dtype=object)

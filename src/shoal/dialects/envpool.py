"""The pool in EnvPool's words, for any env: change `import envpool` to `from shoal.dialects import envpool`.

It differs from EnvPool in a few points. Asynchronous batches have their rows in ascending order of env id. An env that
is busy cannot be sent to, and a recv without enough sends raises an error instead of waiting for ever. Floats for
discrete actions are refused. `reset(seed=...)` seeds, and the options of a reset reach the envs. An episode may be
terminated and truncated at once. The discount of a TimeStep is 0 where an episode was terminated, and stays 1 where it
was truncated, as in dm_env.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector.vector_env import AutoresetMode

from shoal import dialects
from shoal.backends.registry import is_batched
from shoal.dialects.base import PoolFace, in_turn, split_reset_mask
from shoal.dialects.envpool_task import EnvPoolTask, EnvSpec, named_state, read_task
from shoal.dialects.time_steps import TimeStepFace
from shoal.errors import BadAction
from shoal.memory.answers import Ready
from shoal.pool import Pool
from shoal.support.checks import Ids, check_choice, check_ids

__all__ = [
    "DMEnvPool", "EnvPool", "EnvSpec", "GymnasiumEnvPool", "list_all_envs", "make", "make_dm", "make_gym",
    "make_gymnasium", "make_spec", "register",
]  # fmt: skip

_OWN_INFOS = ("env_id", "players", "elapsed_step")
_NOT_ACTIONS = ("env_id", "players", "players.env_id")


def make(task_id: Any, env_type: str = "gymnasium", **options: Any) -> Any:
    """Make many envs as one, as `envpool.make` does.

    Args:
        task_id: as for `shoal.Pool`: a Gymnasium id or spec, a function or class that makes an env, or a list.
        env_type: "gymnasium" (or "gym", which is the same in EnvPool), or "dm".
        num_envs: how many; 1 by default. Leave it out if you pass a list.
        batch_size: how many envs `recv` waits for; by default, and for 0, all.
        num_threads: the pool's `num_workers`; by default, and for 0, one for each core.
        seed: an int gives env i `seed + i`, a list each its own (as `env_seed` does); 42 by default, as in EnvPool.
        max_episode_steps: a time limit in place of the env's own.
        thread_affinity_offset, base_path: accepted, and without effect.
        **options: as for `shoal.Pool`: backend, copy (True by default), on_error, ...; all others are for the env.
    """
    check_choice("env_type", env_type, ("gymnasium", "gym", "dm"))
    task = read_task(task_id, options)
    return DMEnvPool(task) if env_type == "dm" else GymnasiumEnvPool(task)


make_gymnasium = make_gym = functools.partial(make, env_type="gymnasium")  # five values for each step
make_dm = functools.partial(make, env_type="dm")  # TimeSteps of dm_env


def make_spec(task_id: Any, **options: Any) -> EnvSpec:
    """The spec that the envs would have. One of them is made for a moment, to read its spaces.

    Args:
        task_id, **options: as for `make`.
    """
    task = read_task(task_id, options)
    backend = task.pool_options.get("backend")
    if backend is not None and is_batched(backend):
        pool = Pool(task.env, 1, backend=backend, env_kwargs=task.pool_options["env_kwargs"])
    else:
        pool = Pool(task.env[:1], backend="serial")
    with pool:
        return task.spec(pool)


def list_all_envs() -> list[str]:
    """The ids that are registered with Gymnasium; functions and classes need none."""
    return [name for name, spec in gymnasium.registry.items() if spec.entry_point is not None]


def register(
    task_id: str, env: Any, *, aliases: Sequence[str] = (), max_episode_steps: int | None = None, **env_kwargs: Any
) -> None:
    """Give an env a name, by registering it with Gymnasium.

    Args:
        task_id: the name.
        aliases: more names of it.
        max_episode_steps: a time limit.
        env: a class or function that makes it, or "module:name".
        **env_kwargs: keyword arguments for it.

    Raises:
        TypeError: an argument is for EnvPool's own C++ envs.
    """
    foreign = [name for name in ("spec_cls", "dm_cls", "gymnasium_cls") if name in env_kwargs]
    if foreign:
        raise TypeError(f"{foreign[0]} is for EnvPool's C++ envs: register(task_id, MyEnv) takes a class or function")
    for name in (task_id, *aliases):
        gymnasium.register(name, entry_point=env, max_episode_steps=max_episode_steps, kwargs=dict(env_kwargs))


class EnvPool(PoolFace):
    """EnvPool's methods on a `shoal.Pool`. `make` returns one of its subclasses.

    If `batch_size` is `num_envs`, an answer has a row for each env that was sent to, in the order of the sends. If it
    is less (`is_async`), an answer has the first `batch_size` envs that are done, in ascending order of their ids.

    An action for an env with an episode that has ended, or one that was never reset, resets the env and is ignored.

    Attributes:
        config: what `make` was given, defaults included.
        spec: an EnvSpec.
    """

    _api, _mode, _partial = "EnvPool", "next_step", True

    def __init__(self, task: EnvPoolTask):
        self._open(task.env, task.num_envs, task.pool_options)
        pool = self.pool
        self.config: dict[str, Any] = dict(task.config)
        self.spec: Any = task.spec(pool, getattr(self, "_specs", None))
        self._all_ids = np.arange(pool.num_envs)
        self._sent_at = np.zeros(pool.num_envs, np.int64)  # each env's place in the order of sends
        self._sends = 0
        self._fresh = np.ones(pool.num_envs, np.bool_)  # those that were never reset
        self._some_fresh = True

    def _answer(self, ready: Ready, reset: bool) -> Any:
        """The answers of the envs of `ready`, as the env type has them."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self.pool.num_envs

    @property
    def all_env_ids(self) -> npt.NDArray[np.int32]:
        """Int32 [num_envs]."""
        return self._all_ids.astype(np.int32)

    @property
    def is_async(self) -> bool:
        """Whether batches have fewer rows than there are envs."""
        return self.pool.batch_size != self.pool.num_envs

    def send(self, action: Any, env_id: Any = None) -> None:
        """Start a step of these envs (None: all), and return at once.

        Args:
            action: a batch of actions, one row for each env id, in their order; or a dict with "action" and "env_id".

        Raises:
            BadAction: nothing was sent.
            CallPending: one of the envs is still busy; nothing was sent.
        """
        with self.pool.turn:
            if self.is_async and not self._some_fresh and not isinstance(action, dict):
                self.pool.send(action, env_id)  # which checks both; the order of sends is not needed
            else:
                self._send(*self._read(action, env_id))

    def recv(self, reset: bool = False, return_info: bool = True) -> Any:
        """Wait for the next batch.

        Args:
            reset: return the same as `reset`: observations and info only.
            return_info: without effect, as in EnvPool.

        Raises:
            NothingPending: fewer envs than that were sent to.
            EnvError: an env raised; the others come with the next recv, and it must be reset before it is sent to.
            WorkerDied: a worker is gone; the pool is closed (with on_error="restart": its budget is spent).
        """
        with self.pool.turn:
            return self._answer(self._wait(), reset)

    def step(self, action: Any, env_id: Any = None) -> Any:
        """Send, then recv. After an EnvError, the other envs' results are dropped, unless batches are asynchronous."""
        with self.pool.turn:
            actions, ids = self._read(action, env_id)
            if ids is None and not self.is_async and not self._some_fresh:
                return self._answer(self.pool.exchange(actions), False)
            self._send(actions, ids)
            return self.recv() if self.is_async else self._answer(self._collect(self._wait), False)

    @in_turn
    def async_reset(self) -> None:
        """Start a reset of all envs; their first observations come with recv."""
        self._start_reset(None)

    @in_turn
    def reset(self, env_id: Any = None, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        """Reset envs and wait for them. The answer to a pending step of theirs is dropped.

        Args:
            env_id: which envs; all by default. If all are reset and batches are asynchronous, this waits for the first
                `batch_size` envs, and the others come with recv.
            seed: an int gives env i `seed + i`; a list gives each of the env ids its own. By default, envs keep the
                generators that `make` has seeded.
            options: for the reset of every env, except for "reset_mask": bool [num_envs], in place of `env_id`.
        """
        if options is not None and "reset_mask" in options:
            if env_id is not None:
                raise ValueError("reset: expected env_id or options['reset_mask'], found both")
            given = {**options, "reset_mask": np.asarray(options["reset_mask"])}
            try:
                env_id, options = split_reset_mask(given, len(self))
            except (TypeError, ValueError) as error:  # in Gymnasium's words
                raise type(error)(f"{error}: expected {len(self)} bools, of which at least one is True") from None
        ids = self._start_reset(env_id, seed, options or None)
        if env_id is None and self.is_async:
            return self.recv(reset=True)
        ready = self._collect(self.pool.wait_reset, ids, env_ids=ids)
        return self._answer(_in_order(ready, ids), True)

    def _start_reset(self, env_id: Any, seed: Any = None, options: Any = None) -> Ids:
        ids = self._all_ids if env_id is None else check_ids(env_id, len(self))
        self.pool.async_reset(ids, seed=seed, options=options)
        self._fresh[ids] = False
        self._some_fresh = bool(self._fresh.any())
        self._note(ids)
        return ids

    def _read(self, action: Any, env_id: Any) -> tuple[Any, Ids | None]:
        """The actions, and the ids that they are for; None, which is faster, for all envs in their own order."""
        space = self.pool.single_action_space
        if isinstance(action, dict):
            parts = space.spaces if isinstance(space, spaces.Dict) else {}
            extra = {name: action[name] for name in _NOT_ACTIONS if name in action and name not in parts}
            env_id = extra.get("env_id") if env_id is None else env_id
            action = {name: value for name, value in action.items() if name not in extra}
            if not isinstance(space, spaces.Dict):
                if list(action) != ["action"]:
                    raise BadAction(f"a dict of actions: expected 'action' and 'env_id', found {list(action)}")
                action = action["action"]
        if env_id is None or (isinstance(env_id, np.ndarray) and self._are_all(env_id)):
            return action, None
        ids = check_ids(env_id, len(self))
        return action, None if self._are_all(ids) else ids

    def _are_all(self, ids: npt.NDArray[Any]) -> bool:
        return ids.shape == self._all_ids.shape and ids.dtype.kind in "iu" and bool((ids == self._all_ids).all())

    def _send(self, actions: Any, ids: Ids | None) -> None:
        lanes = self._all_ids if ids is None else ids
        if self._some_fresh and self._fresh[lanes].all():
            self._start_reset(lanes)
            return
        self.pool.send(actions, ids)
        self._note(lanes)

    def _note(self, ids: Ids) -> None:
        self._sent_at[ids] = np.arange(self._sends, self._sends + len(ids))
        self._sends += len(ids)

    def _wait(self) -> Ready:
        if self.is_async:
            return self.pool.wait()
        pending = self.pool.pending
        if len(pending) == 0:
            return self.pool.wait()  # raises an error that says why not
        return _in_order(self.pool.wait_reset(pending), pending[np.argsort(self._sent_at[pending])])

    def seed(self, seed: Any = None) -> None:
        """Only warns, as in EnvPool: `make` and `reset` take seeds."""
        warnings.warn("seed() does nothing: pass seed= to make or to reset", stacklevel=2)

    def render(self, env_ids: Any = None) -> npt.NDArray[Any] | None:
        """Frames [n, height, width, 3] of these envs, of env 0 by default; None if the envs show them in a window."""
        if self.pool.specs.render_mode is None:
            raise RuntimeError('render: the envs have no render mode; pass render_mode="rgb_array" to make')
        frames = self.pool.render([0] if env_ids is None else env_ids)
        return None if frames[0] is None else np.stack(frames)

    def close(self, **_: Any) -> None:
        self.pool.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.config.items())})"

    __str__ = __repr__


class GymnasiumEnvPool(EnvPool, gymnasium.vector.VectorEnv[Any, Any, Any], gymnasium.Env[Any, Any]):  # type: ignore[misc]
    """Answers with observations, rewards (float32), terminated, truncated and info; to a reset with the first and last.

    `info` has `env_id` and `elapsed_step` (int32 [n]) and `players["env_id"]`. The envs' own infos are in it as in
    Gymnasium's vector envs: for each key an array with a row for each env, and a mask `_key` of the envs that have it.
    `observation_space` and `action_space` are those of one env, as in EnvPool.
    """

    def __init__(self, task: EnvPoolTask):
        super().__init__(task)
        self.num_envs = self.pool.num_envs
        self.observation_space = self.single_observation_space = self.pool.single_observation_space
        self.action_space = self.single_action_space = self.pool.single_action_space
        self.metadata = {**self.pool.specs.metadata, "autoreset_mode": AutoresetMode.NEXT_STEP}
        self.render_mode = self.pool.specs.render_mode

    is_vector_env = True

    def _answer(self, ready: Ready, reset: bool) -> Any:
        data = self.pool.data
        info = self._infos(ready) if ready.infos else {}
        ids = ready.ids.astype(np.int32)
        info["env_id"], info["players"] = ids, {"env_id": ids.copy()}
        info["elapsed_step"] = data.take(ready, "episode_length").astype(np.int32)
        if reset:
            return data.take_obs(ready), info
        obs, reward, terminated, truncated = data.take_step(ready)
        return obs, reward.astype(np.float32), terminated, truncated, info

    def _infos(self, ready: Ready) -> dict[str, Any]:
        infos = self._join_infos(ready.infos)
        infos = {key: value for key, value in infos.items() if key.removeprefix("_") not in _OWN_INFOS}
        return infos if len(ready.ids) == self.num_envs and ready.slot >= 0 else _rows(infos, ready.ids)

    def xla(self) -> tuple[Any, Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
        """`handle, recv, send, step` for use inside of JAX functions: those of `shoal.graph.jax.bind`.

        Their info has the env ids only. Where batches are not asynchronous, `recv` waits for all envs.
        """
        from shoal.graph.jax import bind

        handle, recv, send, step = bind(self.pool)

        def told(handle: Any, answer: Any) -> tuple[Any, Any]:
            *values, env_id = answer
            return handle, (*values, {"env_id": env_id, "players": {"env_id": env_id}})

        def take(handle: Any) -> tuple[Any, Any]:
            return told(*recv(handle))

        def go(handle: Any, action: Any, env_id: Any = None) -> tuple[Any, Any]:
            if env_id is None and not self.is_async:
                return told(*step(handle, action))
            return take(send(handle, action, env_id))

        return handle, take, send, go

    def __del__(self) -> None:
        # The pool closes itself when it is garbage collected.
        return None


class DMEnvPool(TimeStepFace, EnvPool):
    """Answers with TimeSteps of dm_env. The observation is a named tuple.

    Its fields are `env_id` (int32 [n]), `players`, and `obs`, or, where observations are dicts, their keys. A TimeStep
    has no info: those that came with the last one are in `infos`, by env.
    """

    def __init__(self, task: EnvPoolTask):
        dm: Any = dialects.dm_env  # where dm_env is not installed, an ImportError says what to do
        self._make_spec, self._time_step = dm.make_spec, dm.dm_env.TimeStep
        super().__init__(task)
        dm.dm_env.Environment.register(DMEnvPool)  # so that isinstance checks pass

    def _answer(self, ready: Ready, reset: bool) -> Any:
        *others, obs = self._read_step(ready)
        return self._time_step(*others, named_state(ready.ids.astype(np.int32), obs))

    def observation_spec(self) -> Any:
        """Of one env, as a named tuple."""
        return self.spec.observation_spec()

    def xla(self) -> Any:
        """Refused: JAX functions have no TimeSteps."""
        raise NotImplementedError('xla: TimeSteps cannot be made inside of JAX functions; use env_type="gymnasium"')


def _in_order(ready: Ready, ids: Ids) -> Ready:
    """The same rows in the order of `ids`."""
    return ready if (ready.ids == ids).all() else ready._replace(ids=ids, slot=-1)


def _rows(infos: dict[str, Any], ids: Ids) -> dict[str, Any]:
    """The rows of some envs, from infos that have a row for each env."""
    return {key: _rows(value, ids) if isinstance(value, dict) else value[ids] for key, value in infos.items()}

"""The pool in EnvPool's words, for any env: change `import envpool` to `from shoal.dialects import envpool`.

What differs from EnvPool: asynchronous batches have their rows in ascending order of env id; an env that is busy cannot
be sent to, and a recv without enough sends raises instead of waiting for ever; floats for discrete actions are refused;
`reset(seed=...)` seeds, and the options of a reset reach the envs; an episode may be terminated and truncated at once;
the discount of a TimeStep is 0 where an episode was terminated, and stays 1 where it was truncated, as dm_env has it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import keyword
import re
import warnings
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces
from gymnasium.vector.vector_env import AutoresetMode

from shoal.backends.registry import is_batched
from shoal.dialects.time_steps import SpecMethods, Specs, TimeStepPool, spec_of
from shoal.envs.adapt import adapt
from shoal.envs.functions import EnvFn, FromSpec, as_env_fns
from shoal.errors import BadAction, EnvError, ShoalError
from shoal.memory.answers import Ready
from shoal.pool import Pool
from shoal.support.checks import Ids, check_choice, check_ids, whole_number

__all__ = [
    "DMEnvPool", "EnvPool", "EnvSpec", "GymnasiumEnvPool", "list_all_envs", "make", "make_dm", "make_gym",
    "make_gymnasium", "make_spec", "register",
]  # fmt: skip

_POOL_OPTIONS = frozenset(inspect.signature(Pool.__init__).parameters) - {"self", "env", "num_envs", "env_kwargs"}
_OWN_INFOS = ("env_id", "players", "elapsed_step")
_NOT_ACTIONS = ("env_id", "players", "players.env_id")
_DEFAULT_SEED = 42  # EnvPool's

# What EnvPool does inside of its own envs, and what does it here. Names that envs of Gymnasium have as well (mode,
# difficulty, frame_skip, ...) are not among them: they go to the env.
_ENVPOOL_ONLY = {
    "stack_num": "gymnasium.wrappers.FrameStackObservation",
    "img_height": "gymnasium.wrappers.AtariPreprocessing",
    "img_width": "gymnasium.wrappers.AtariPreprocessing",
    "gray_scale": "gymnasium.wrappers.AtariPreprocessing",
    "noop_max": "gymnasium.wrappers.AtariPreprocessing",
    "episodic_life": "gymnasium.wrappers.AtariPreprocessing",
    "zero_discount_on_life_loss": "gymnasium.wrappers.AtariPreprocessing",
    "use_inter_area_resize": "gymnasium.wrappers.AtariPreprocessing",
    "use_fire_reset": "a wrapper",
    "reward_clip": "gymnasium.wrappers.TransformReward",
    "from_pixels": "gymnasium.wrappers.AddRenderObservation",
}


# ---- making them -------------------------------------------------------------------------------------------------


def make(task_id: Any, env_type: str = "gymnasium", **options: Any) -> Any:
    """Many envs as one, as `envpool.make` gives them.

    Args:
        task_id: as for `shoal.Pool`: a Gymnasium id or spec, a function or class that makes an env, or a list of such.
        env_type: "gymnasium" (or "gym", which is the same in EnvPool), or "dm".
        num_envs: how many; 1 by default, left out when a list was given.
        batch_size: how many envs `recv` waits for; by default, and for 0, all.
        num_threads: the pool's `num_workers`; by default, and for 0, one for each core.
        seed: an int gives env i `seed + i`, a list each its own (as `env_seed` does); 42 by default, as in EnvPool.
        max_episode_steps: a time limit in place of the env's own.
        thread_affinity_offset, base_path: taken, and make no difference.
        **options: as for `shoal.Pool`: backend, copy (True by default), on_error, ...; all others are for the env.
    """
    check_choice("env_type", env_type, ("gymnasium", "gym", "dm"))
    task = _read_task(task_id, options)
    return DMEnvPool(task) if env_type == "dm" else GymnasiumEnvPool(task)


def make_gymnasium(task_id: Any, **options: Any) -> GymnasiumEnvPool:
    """`make` with five values for each step."""
    return make(task_id, "gymnasium", **options)  # type: ignore[no-any-return]


def make_gym(task_id: Any, **options: Any) -> GymnasiumEnvPool:
    """The same as `make_gymnasium`, as it is in EnvPool."""
    return make_gymnasium(task_id, **options)


def make_dm(task_id: Any, **options: Any) -> DMEnvPool:
    """`make` with TimeSteps of dm_env."""
    return make(task_id, "dm", **options)  # type: ignore[no-any-return]


def make_spec(task_id: Any, **options: Any) -> EnvSpec:
    """The spec that the envs would have; one of them is made for a moment to see its spaces."""
    task = _read_task(task_id, options)
    backend = task.pool_options.get("backend")
    if is_batched(backend):
        pool = Pool(task.env, 1, backend=backend, env_kwargs=task.pool_options["env_kwargs"])
    else:
        pool = Pool(task.env[:1], backend="serial")
    with pool:
        return EnvSpec(task.name, task.named_config(), pool.single_observation_space, pool.single_action_space)


def list_all_envs() -> list[str]:
    """The ids that are registered with Gymnasium; functions and classes need none."""
    return [name for name, spec in gymnasium.registry.items() if spec.entry_point is not None]


def register(
    task_id: str, env: Any, *, aliases: Sequence[str] = (), max_episode_steps: int | None = None, **env_kwargs: Any
) -> None:
    """Give an env a name, by registering it with Gymnasium.

    Args:
        env: a class or function that makes it, or "module:name".
        **env_kwargs: keyword arguments for it.
    """
    foreign = [name for name in ("spec_cls", "dm_cls", "gymnasium_cls") if name in env_kwargs]
    if foreign:
        raise TypeError(f"{foreign[0]} is for EnvPool's C++ envs: register(task_id, MyEnv) takes a class or function")
    for name in (task_id, *aliases):
        gymnasium.register(name, entry_point=env, max_episode_steps=max_episode_steps, kwargs=dict(env_kwargs))


@dataclass(frozen=True)
class EnvSpec:
    """What the envs are: their spaces, and the config that they were made with.

    Attributes:
        id: the task id, or the name of the class or function.
        config: a named tuple of what `make` was given, defaults included.
        observation_space, action_space: of one env.
        specs: the same in words of dm_env, where the envs have such of their own.
    """

    id: str
    config: Any
    observation_space: Space[Any]
    action_space: Space[Any]
    specs: Specs | None = field(default=None, repr=False)

    @property
    def num_envs(self) -> int:
        """How many envs."""
        return int(self.config.num_envs)

    @property
    def batch_size(self) -> int:
        """How many of them `recv` waits for."""
        return int(self.config.batch_size)

    @property
    def reward_threshold(self) -> float | None:
        """The return at which the task counts as solved, None for no such."""
        return self.config.reward_threshold  # type: ignore[no-any-return]

    @property
    def gymnasium_observation_space(self) -> Space[Any]:
        """The same as `observation_space`."""
        return self.observation_space

    @property
    def gymnasium_action_space(self) -> Space[Any]:
        """The same as `action_space`."""
        return self.action_space

    def observation_spec(self) -> Any:
        """Of one row of an observation of `env_type="dm"`, as a named tuple; needs dm_env."""
        make_spec = _dm()._make_spec
        found = spec_of(self.observation_space, make_spec, "obs") if self.specs is None else self.specs.observation
        env_id = make_spec((), np.int32, 0, self.num_envs - 1, "env_id")
        return _state(env_id, found)

    def action_spec(self) -> Any:
        """Of one action; needs dm_env."""
        if self.specs is not None:
            return self.specs.action
        return spec_of(self.action_space, _dm()._make_spec, "action")


# ---- what all of them do -----------------------------------------------------------------------------------------


class EnvPool:
    """EnvPool's calls on a `shoal.Pool`. `make` makes them.

    Where `batch_size` is `num_envs`, an answer has a row for each env that was sent to, in the order of the sends.
    Where it is less (`is_async`), it has the first `batch_size` envs that are done, in ascending order of their ids.

    An env whose episode has ended is reset by its next action, which it does not see; so is one that was never reset.

    Attributes:
        pool: the pool itself.
        config: what `make` was given, defaults included.
        spec: an EnvSpec.
    """

    def __init__(self, pool: Pool, task: _Task, specs: Specs | None = None):
        self.pool = pool
        self.config: dict[str, Any] = dict(task.config)
        self.spec: Any = EnvSpec(
            task.name, task.named_config(), pool.single_observation_space, pool.single_action_space, specs
        )
        self._all_ids = np.arange(pool.num_envs)
        self._sent_at = np.zeros(pool.num_envs, np.int64)  # each env's place in the order of sends
        self._sends = 0
        self._fresh = np.ones(pool.num_envs, np.bool_)  # those that were never reset
        self._some_fresh = True

    def _answer(self, ready: Ready, reset: bool) -> Any:
        """What the envs of `ready` have answered, in the words of the env type."""
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

    # ---- stepping ----------------------------------------------------------------------------------------------

    def send(self, action: Any, env_id: Any = None) -> None:
        """Start a step of these envs (None: all), and return at once.

        Args:
            action: a batch of actions, one row for each env id, in their order; or a dict with "action" and "env_id".

        Raises:
            BadAction: nothing was sent.
            CallPending: one of the envs is still busy; nothing was sent.
        """
        if self.is_async and not self._some_fresh and not isinstance(action, dict):
            self.pool.send(action, env_id)  # which checks them, and whose order nobody asks for
        else:
            self._send(*self._read(action, env_id))

    def recv(self, reset: bool = False, return_info: bool = True) -> Any:
        """Wait for the next batch.

        Args:
            reset: give what `reset` gives: observations and info only.
            return_info: without effect, as in EnvPool.

        Raises:
            NothingPending: fewer envs than that were sent to.
            EnvError: an env raised; the others come with the next recv, and it must be reset before it is sent to.
            WorkerDied: a worker is gone; the pool is closed (with on_error="restart": its budget is spent).
        """
        return self._answer(self._wait(), reset)

    def step(self, action: Any, env_id: Any = None) -> Any:
        """Send, then recv. After an EnvError, the other envs' results are dropped, unless batches are asynchronous."""
        actions, ids = self._read(action, env_id)
        if ids is None and not self.is_async and not self._some_fresh:
            return self._answer(self.pool.exchange(actions), False)
        self._send(actions, ids)
        try:
            return self.recv()
        except EnvError:
            if not self.is_async:
                with contextlib.suppress(ShoalError):  # the env's own error is what matters
                    self.pool.drop_pending()
            raise

    def async_reset(self) -> None:
        """Start a reset of all envs; their first observations come with recv."""
        self._start_reset(None)

    def reset(self, env_id: Any = None, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        """Reset envs and wait for them. A step of theirs that is pending is waited for and dropped.

        Args:
            env_id: which; all by default. Of all, where batches are asynchronous, the first `batch_size` are waited
                for, and the others come with recv.
            seed: an int gives env i `seed + i`; a list gives each of the env ids its own. By default, envs go on with
                the generators that `make` has seeded.
            options: handed to every env's reset, except for "reset_mask": bool [num_envs], instead of `env_id`.
        """
        if options is not None and "reset_mask" in options:
            options = dict(options)
            if env_id is not None:
                raise ValueError("reset: expected env_id or options['reset_mask'], found both")
            env_id = _masked(options.pop("reset_mask"), len(self))
        ids = self._start_reset(env_id, seed, options or None)
        if env_id is None and self.is_async:
            return self.recv(reset=True)
        try:
            return self._answer(_in_order(self.pool.wait_reset(ids), ids), True)
        except EnvError:
            with contextlib.suppress(ShoalError):
                self.pool.drop_pending(ids)
            raise

    def _start_reset(self, env_id: Any, seed: Any = None, options: Any = None) -> Ids:
        ids = self._all_ids if env_id is None else check_ids(env_id, len(self))
        self.pool.async_reset(ids, seed=seed, options=options)
        self._fresh[ids] = False
        self._some_fresh = bool(self._fresh.any())
        self._note(ids)
        return ids

    def _read(self, action: Any, env_id: Any) -> tuple[Any, Ids | None]:
        """The actions, and the ids that they are for: None for all in their own order, which is the fast way."""
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
            return self.pool.wait()  # which says why not
        return _in_order(self.pool.wait_reset(pending), pending[np.argsort(self._sent_at[pending])])

    # ---- the rest ----------------------------------------------------------------------------------------------

    def seed(self, seed: Any = None) -> None:
        """Does nothing but warn, as in EnvPool: `make` and `reset` take seeds."""
        warnings.warn("seed() does nothing: pass seed= to make or to reset", stacklevel=2)

    def render(self, env_ids: Any = None) -> npt.NDArray[Any] | None:
        """Frames [n, height, width, 3] of these envs, of env 0 by default; None where the envs show them themselves."""
        if self.pool.specs.render_mode is None:
            raise RuntimeError('render: the envs have no render mode; pass render_mode="rgb_array" to make')
        frames = self.pool.render([0] if env_ids is None else env_ids)
        return None if frames[0] is None else np.stack(frames)

    def close(self, **_: Any) -> None:
        """Close all envs and end all workers. May be called again."""
        self.pool.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self.pool.closed

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.config.items())})"

    __str__ = __repr__


# ---- one class for each env type ---------------------------------------------------------------------------------


class GymnasiumEnvPool(EnvPool, gymnasium.vector.VectorEnv[Any, Any, Any], gymnasium.Env[Any, Any]):  # type: ignore[misc, override]
    """Answers with observations, rewards (float32), terminated, truncated and info; to a reset with the first and last.

    `info` has `env_id` and `elapsed_step` (int32 [n]) and `players["env_id"]`, and what the envs say themselves as
    Gymnasium's vector envs have it: for each key an array with a row for each env, and `_key`, which says who has it.
    `observation_space` and `action_space` are those of one env, as in EnvPool.
    """

    def __init__(self, task: _Task):
        super().__init__(Pool(task.env, task.num_envs, **task.pool_options), task)
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
        infos: dict[str, Any] = {}
        for env_id in sorted(ready.infos):
            own = {key: value for key, value in ready.infos[env_id].items() if key not in _OWN_INFOS}
            infos = self._add_info(infos, own, env_id)
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
        # The pool closes itself when it is collected.
        return None


class DMEnvPool(SpecMethods, EnvPool):
    """Answers with TimeSteps of dm_env whose observation is a named tuple.

    Its fields are `env_id` (int32 [n]), `players`, and `obs`, or, where observations are dicts, their keys. A TimeStep
    has no info: what the envs have said beside the last one is in `infos`, by env.
    """

    def __init__(self, task: _Task):
        dm = _dm()
        steps = TimeStepPool(task.env, task.num_envs, dm._make_spec, dict(task.pool_options), partial=True)
        super().__init__(steps.pool, task, steps.specs)
        self._steps, self._time_step = steps, dm.dm_env.TimeStep
        dm.dm_env.Environment.register(DMEnvPool)  # so that code which asks takes it for one

    def _answer(self, ready: Ready, reset: bool) -> Any:
        parts = self._steps.read(ready)
        return self._time_step(*parts[:3], _state(ready.ids.astype(np.int32), parts.observation))

    @property
    def infos(self) -> dict[int, dict[str, Any]]:
        """What the envs have said beside the last TimeStep, by env."""
        return self._steps.infos

    def observation_spec(self) -> Any:
        """Of one env, as a named tuple."""
        return self.spec.observation_spec()

    def xla(self) -> Any:
        """Refused: JAX functions have no TimeSteps."""
        raise NotImplementedError('xla: TimeSteps cannot be made inside of JAX functions; use env_type="gymnasium"')


# ---- inside ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """What `make` was asked for: the env, its pool's options, and what `config` tells."""

    name: str
    env: Any
    num_envs: int | None
    pool_options: dict[str, Any]
    config: dict[str, Any]

    def named_config(self) -> Any:
        """The config as a named tuple."""
        return _tuple_type("Config", tuple(self.config))(*self.config.values())


def _read_task(task_id: Any, options: Mapping[str, Any]) -> _Task:
    """Sort the keywords of `make`: EnvPool's, the pool's, the env's."""
    left = dict(options)
    config = _read_config(left)
    env_kwargs = left.pop("env_kwargs", None) or {}
    pool_options = {name: left.pop(name) for name in sorted(_POOL_OPTIONS & set(left))}
    _refuse_envpool_only(left)
    env_kwargs = {**left, **env_kwargs}
    threads, steps = config["num_threads"], config["max_episode_steps"]
    if threads and pool_options.setdefault("num_workers", threads) != threads:
        raise ValueError("num_threads and num_workers are the same: leave one out")
    if pool_options.setdefault("autoreset", "next_step") != "next_step":
        raise ValueError('autoreset: EnvPool knows only "next_step"; for another one use shoal.make or shoal.Pool')
    pool_options.setdefault("check_actions", "discrete")
    pool_options.setdefault("copy", True)

    env, num_envs, backend = task_id, config["num_envs"], pool_options.get("backend")
    if is_batched(backend):
        if steps is not None:
            raise ValueError(f'max_episode_steps: backend="{backend}" steps all envs as one: give it to the env itself')
        count = num_envs = whole_number("num_envs", 1 if num_envs is None else num_envs, 1, 2**40)
        pool_options["env_kwargs"] = env_kwargs
    else:
        fns = as_env_fns(env, num_envs, env_kwargs)
        count, num_envs = len(fns), None
        if isinstance(fns[0], FromSpec):
            _fill(config, max_episode_steps=fns[0].spec.max_episode_steps)
            _fill(config, reward_threshold=fns[0].spec.reward_threshold)
        limited = {id(fn): fn if steps is None else _limited(fn, steps) for fn in fns}  # one for many stays one
        env = [limited[id(fn)] for fn in fns]
    config["num_envs"] = count
    _fill(config, batch_size=count)
    pool_options["batch_size"] = whole_number("batch_size", config["batch_size"], 1, count)
    pool_options["seed"] = config["env_seed"] or config["seed"]
    config |= {name: value for name, value in env_kwargs.items() if name not in config}
    name = (
        task_id
        if isinstance(task_id, str)
        else getattr(task_id, "id", getattr(task_id, "__name__", type(task_id).__name__))
    )
    return _Task(str(name), env, num_envs, pool_options, config)


def _read_config(left: dict[str, Any]) -> dict[str, Any]:
    """Take EnvPool's own options out of `left`; None where the env or the pool must tell."""
    seed, seeds = left.pop("seed", _DEFAULT_SEED), left.pop("env_seed", None)
    if seeds is None and isinstance(seed, Sequence | np.ndarray) and not isinstance(seed, str):
        seed, seeds = 0, seed
    steps = left.pop("max_episode_steps", None)
    config = {
        "num_envs": left.pop("num_envs", None),
        "batch_size": left.pop("batch_size", None) or None,
        "num_threads": whole_number("num_threads", left.pop("num_threads", 0), 0, 2**20),
        "max_num_players": left.pop("max_num_players", 1),
        "thread_affinity_offset": left.pop("thread_affinity_offset", -1),
        "base_path": left.pop("base_path", ""),
        "seed": seed,
        "env_seed": [] if seeds is None else list(seeds),
        "gym_reset_return_info": left.pop("gym_reset_return_info", True),
        "max_episode_steps": None if steps is None else whole_number("max_episode_steps", steps, 1, 2**31 - 1),
        "reward_threshold": left.pop("reward_threshold", None),
    }
    if config["max_num_players"] != 1:
        raise ValueError(f"max_num_players: envs here have one player, found {config['max_num_players']!r}")
    if not config["gym_reset_return_info"]:
        raise ValueError("gym_reset_return_info: a reset always returns an info, as in EnvPool: leave it out")
    return config


def _fill(config: dict[str, Any], **defaults: Any) -> None:
    config.update({name: value for name, value in defaults.items() if config[name] is None})


def _refuse_envpool_only(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in _ENVPOOL_ONLY:
            raise TypeError(
                f"{name} is for EnvPool's own envs, such as its Atari: wrap the env instead ({_ENVPOOL_ONLY[name]}), "
                f"or, where its constructor takes it, say env_kwargs={{{name!r}: ...}}"
            )


def _limited(fn: EnvFn, steps: int) -> EnvFn:
    """The env function with another time limit than its own."""
    if isinstance(fn, FromSpec):
        return FromSpec(fn.spec, {**fn.kwargs, "max_episode_steps": steps})
    return functools.partial(_time_limited, fn, steps)


def _time_limited(fn: EnvFn, steps: int) -> Any:
    return gymnasium.wrappers.TimeLimit(adapt(fn()), steps)


def _in_order(ready: Ready, ids: Ids) -> Ready:
    """The same rows in the order of `ids`."""
    return ready if (ready.ids == ids).all() else ready._replace(ids=ids, slot=-1)


def _masked(mask: Any, count: int) -> Ids:
    found = np.asarray(mask)
    if found.shape != (count,) or found.dtype != np.bool_ or not found.any():
        raise ValueError(f"reset_mask: expected {count} bools, of which at least one is True, found {mask!r}")
    return np.flatnonzero(found)


def _rows(infos: dict[str, Any], ids: Ids) -> dict[str, Any]:
    """The rows of some envs out of infos that have one for each."""
    return {key: _rows(value, ids) if isinstance(value, dict) else value[ids] for key, value in infos.items()}


def _state(env_id: Any, obs: Any) -> Any:
    """An observation, or its spec, as EnvPool has it in TimeSteps."""
    parts = dict(obs) if isinstance(obs, Mapping) else {"obs": obs}
    return _named("State", {"env_id": env_id, "players": {"env_id": env_id}}, parts)


def _named(name: str, *parts: Mapping[str, Any]) -> Any:
    """Nested mappings as nested named tuples. Keys that are no names, or are taken, become `_0`, `_1`, ..."""
    items = [item for part in parts for item in part.items()]
    kind = _tuple_type(name, tuple(str(key) for key, _ in items))
    return kind(*(_named(str(key), value) if isinstance(value, Mapping) else value for key, value in items))


@functools.lru_cache
def _tuple_type(name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    words = [re.sub(r"\W", "_", word) for word in fields]
    plain = name.isidentifier() and not keyword.iskeyword(name)
    return namedtuple(name if plain else "State", words, rename=True)


def _dm() -> Any:
    """Shoal's dm_env face, which needs dm_env and says so."""
    from shoal.dialects import dm_env

    return dm_env

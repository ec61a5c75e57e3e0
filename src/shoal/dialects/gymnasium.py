"""The pool as a Gymnasium vector env: `VectorEnv`, and drop-ins for `SyncVectorEnv` and `AsyncVectorEnv`."""

from __future__ import annotations

import contextlib
import copy as copying
import multiprocessing
import sys
import time
from abc import ABCMeta
from collections.abc import Callable, Iterator, Sequence, Sized
from operator import methodcaller
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space
from gymnasium.error import AlreadyPendingCallError, ClosedEnvironmentError, NoAsyncCallError
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import batch_differing_spaces, iterate
from gymnasium.vector.vector_env import AutoresetMode

from shoal.dialects.base import PoolFace, in_turn, split_reset_mask
from shoal.envs.functions import as_env_fns, with_time_limit
from shoal.errors import BadAction, BadCall, EnvError, ShoalError, SpaceMismatch, StepTimeout
from shoal.memory.answers import Ready
from shoal.options import refuse_unknown_options
from shoal.support.checks import OptionsForAll, spread_seed
from shoal.support.deadline import CLOSE_TIMEOUT

__all__ = ["AsyncVectorEnv", "SyncVectorEnv", "VectorEnv", "entry_point", "install", "uninstall"]

_MODES = {mode.name.lower(): mode for mode in AutoresetMode}  # by Shoal's names


class WaitTimeout(StepTimeout, multiprocessing.TimeoutError):
    """A StepTimeout that is also of the type that Gymnasium raises."""


class _Named(ABCMeta):
    """Says in the error of Stable-Baselines3, which takes VecEnvs alone and quotes the type, what to write for it.

    The two APIs share method names and differ in what these return, so that no object can be of both.
    """

    def __format__(cls, spec: str) -> str:
        name = format(repr(cls), spec)
        return f'{name} (for a VecEnv: shoal.make(..., api="sb3"))' if "stable_baselines3" in sys.modules else name


class VectorEnv(gymnasium.vector.VectorEnv[Any, Any, Any], PoolFace, metaclass=_Named):
    """A pool that speaks Gymnasium's vector API, with all of its backends.

    Args:
        env: as for `shoal.Pool`.
        copy: True (the default, as in Gymnasium) gives arrays that are the caller's own.
        autoreset_mode: Gymnasium's enum, its string, or Shoal's name for it; `autoreset` is another name of this
            argument. None for Gymnasium's default, "next_step", or, for envs that are batches themselves, their own.
        **pool_options: as for `shoal.Pool`.
        num_envs, observation_mode: as for `shoal.Pool`.
    """

    _api = "a Gymnasium vector env"

    def __init__(
        self,
        env: Any,
        num_envs: int | None = None,
        *,
        copy: bool = True,
        autoreset_mode: str | AutoresetMode | None = None,
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
        **pool_options: Any,
    ):
        mode = pool_options.pop("autoreset", autoreset_mode)
        self.copy, self.observation_mode = copy, observation_mode
        asked = None if mode is None else _autoreset_mode(mode).name.lower()
        pool_options |= {"copy": copy, "autoreset": asked, "observation_mode": observation_mode}
        self._open(env, num_envs, pool_options)
        self.autoreset_mode = _autoreset_mode(self.pool.autoreset)
        specs = self.pool.specs
        self.num_envs = self.pool.num_envs
        self.single_observation_space, self.observation_space = specs.single_observation_space, specs.observation_space
        self.single_action_space, self.action_space = specs.single_action_space, specs.action_space
        self.metadata = {**specs.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = specs.render_mode
        self._state = AsyncState.DEFAULT
        self._call: Any = None

    np_random_seed = property(methodcaller("get_attr", "np_random_seed"), doc="The seed of each env's own generator.")
    np_random = property(
        methodcaller("get_attr", "np_random"), doc="Each env's own generator; a copy if the env is in another process."
    )

    @in_turn
    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all envs, or those of `options["reset_mask"]`."""
        self.reset_async(seed=seed, options=options)
        return self.reset_wait()

    @in_turn
    def reset_async(
        self, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> None:
        """Start a reset; its result comes with `reset_wait`."""
        self._begin("reset_async")
        if isinstance(seed, Sized) and len(seed) != self.num_envs:
            raise ValueError(
                f"If seeds are passed as a list the length must match num_envs={self.num_envs} but got "
                f"length={len(seed)}."
            )
        seeds = spread_seed(int(seed) if isinstance(seed, bool) else seed, np.arange(self.num_envs))
        self._reset_ids, rest = split_reset_mask(options, self.num_envs)
        if options is not None and self._reset_ids is not None:
            seeds = [seeds[i] for i in self._reset_ids]
            del options["reset_mask"]  # from the caller's own dict, as Gymnasium does
        self.pool.async_reset(self._reset_ids, seed=seeds, options=OptionsForAll(rest))
        self._state = AsyncState.WAITING_RESET

    @in_turn
    def reset_wait(self, timeout: float | None = None) -> tuple[Any, dict[str, Any]]:
        """The observations and infos of the reset that was started."""
        with self._finishing(AsyncState.WAITING_RESET, timeout):
            ready = self._collect(self.pool.wait_reset, self._reset_ids, timeout)
            if self._reset_ids is not None:
                ready = self.pool.data.whole(ready)
            return self.pool.data.take_obs(ready), self._join_infos(ready.infos)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        with self.pool.turn:
            if self._state is not AsyncState.DEFAULT or self._late or self.pool.closed:
                self._begin("step_async")
            try:
                ready = self._exchange(actions)
                infos = self._infos(ready) if ready.infos else {}
            except ShoalError as error:
                raise self._told(error, actions) from error.__cause__
            return (*self.pool.data.take_step(ready), infos)

    @in_turn
    def step_async(self, actions: Any) -> None:
        """Start a step; its result comes with `step_wait`."""
        self._begin("step_async")
        try:
            self.pool.send(actions)
        except BadAction as error:
            raise self._told(error, actions) from error.__cause__
        self._state = AsyncState.WAITING_STEP

    @in_turn
    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """The result of the step that was started."""
        with self._finishing(AsyncState.WAITING_STEP, timeout):
            ready = self._collect(self.pool.wait, timeout)
            infos = self._infos(ready)
            return (*self.pool.data.take_step(ready), infos)

    @in_turn
    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method, or get an attribute, of each env."""
        self.call_async(name, *args, **kwargs)
        return self.call_wait()

    @in_turn
    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Start a call; its results come with `call_wait`."""
        self._begin("call_async")
        self._call = self.pool.start_call(name, args, kwargs)
        self._state = AsyncState.WAITING_CALL

    @in_turn
    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """The results of the call that was started, one per env."""
        with self._finishing(AsyncState.WAITING_CALL, timeout):
            return tuple(self.pool.finish_call(self._call, timeout))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of each env."""
        return self.call(name)

    @in_turn
    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of each env: a list or tuple gives each its own."""
        self._begin("set_attr")
        if isinstance(values, list | tuple) and len(values) != self.num_envs:
            raise ValueError(
                "Values must be a list or tuple with length equal to the number of environments. "
                f"Got `{len(values)}` values for {self.num_envs} environments."
            )
        try:
            self.pool.set_attr(name, values)
        except EnvError as error:
            raise self._told(error) from error.__cause__

    def render(self) -> tuple[Any, ...]:
        return self.call("render")

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Close the envs, by force after `timeout` seconds (3 by default), or at once with `terminate`."""
        if self._state is not AsyncState.DEFAULT:
            gymnasium.logger.warn(
                f"Calling `close` while waiting for a pending call to `{self._state.value}` to complete."
            )
        self.pool.close(0.0 if terminate else CLOSE_TIMEOUT if timeout is None else timeout)

    def __del__(self) -> None:
        # The pool closes itself when it is garbage collected.
        return None

    def _check_open(self) -> None:
        if self.closed or self.pool.closed:
            reason = "" if self.closed else f" ({self.pool.why_closed})"
            raise ClosedEnvironmentError(
                f"Trying to operate on `{type(self).__name__}`, after a call to `close()`.{reason}"
            )

    def _begin(self, name: str) -> None:
        self._check_open()
        if self._state is not AsyncState.DEFAULT:
            stop = "" if name == "reset_async" else "."  # to the letter
            raise AlreadyPendingCallError(
                f"Calling `{name}` while waiting for a pending call to `{self._state.value}` to complete{stop}",
                str(self._state.value),
            )
        self._drop_late()

    @contextlib.contextmanager
    def _finishing(self, state: AsyncState, timeout: float | None) -> Iterator[None]:
        """Wait for a call that was started, the one of this state, in the words of Gymnasium's errors."""
        self._check_open()
        name = str(state.value)
        if self._state is not state:
            raise NoAsyncCallError(f"Calling `{name}_wait` without any prior call to `{name}_async`.", name)
        self._state = AsyncState.DEFAULT
        try:
            yield
        except StepTimeout as error:
            message = f"The call to `{name}_wait` has timed out after {timeout} second(s)."
            raise WaitTimeout(message, error.env_ids) from error
        except EnvError as error:
            raise self._told(error) from error.__cause__

    def _told(self, error: Exception, actions: Any = None) -> Exception:
        """What to raise for an error of the pool; `actions` are those of the step. It may set the error's cause."""
        return super()._told(error)

    def _infos(self, ready: Ready) -> dict[str, Any]:
        began_ns = time.monotonic_ns()
        infos = self._join_infos(ready.infos)
        self.pool.data.spent_on_infos(began_ns)
        return infos


class _DropIn(VectorEnv):
    """What the two drop-ins share. They check nothing that Gymnasium leaves to the envs, and use its words for errors.

    An env's error has the env's own text, and what Shoal has to say of it is its cause.
    """

    _quotes = True
    _mismatches: dict[str, str]  # the texts for spaces that differ

    def _build(self, env_fns: Any, observation_mode: Any, autoreset_mode: Any, options: dict[str, Any]) -> None:
        """Check the arguments, and make the pool."""
        self.env_fns = env_fns
        for env_fn in (env_fns[0], *env_fns):  # an empty list is an IndexError
            if not callable(env_fn):
                raise TypeError(f"{type(env_fn).__name__!r} object is not callable")
        mode = autoreset_mode if autoreset_mode in tuple(_MODES) else AutoresetMode(autoreset_mode)
        _check_observation_mode(observation_mode)
        options = {"check_actions": "none", **options}
        if not options["copy"] and not {"on_error", "recycle_after"} & set(options):
            options.setdefault("frames", 1)  # there is one array, which each step writes anew
        try:
            VectorEnv.__init__(self, list(env_fns), observation_mode=observation_mode, autoreset_mode=mode, **options)
        except SpaceMismatch as error:
            raise self._mismatch(error, observation_mode) from error
        except EnvError as error:
            raise self._told(error) from error.__cause__

    def _mismatch(self, error: SpaceMismatch, mode: Any) -> Exception:
        if error.what == "observation" and mode == "different":
            try:
                batch_differing_spaces([error.expected, error.found])
            except (ValueError, TypeError, AssertionError) as theirs:
                return theirs
        key = error.what if error.what == "action" or mode == "same" else "shape"
        text = self._mismatches[key].format(expected=error.expected, found=error.found)
        return SpaceMismatch(text, error.what, error.expected, error.found)

    def _told(self, error: Exception, actions: Any = None) -> Exception:
        if isinstance(error, BadAction):
            try:
                sum(1 for _ in iterate(self.action_space, actions))
            except TypeError as theirs:  # it is no batch at all
                theirs.__cause__ = error
                return theirs
        return super()._told(error)


def _check_observation_mode(mode: Any) -> None:
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, Space) for space in mode):
            raise TypeError(
                f"Expected both elements of observation_mode to be Spaces, got {type(mode[0])} and {type(mode[1])}"
            )
    elif mode not in ("same", "different"):
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
            f"space, actual got {mode}"
        )


class SyncVectorEnv(_DropIn, gymnasium.vector.SyncVectorEnv):
    """Drop-in for `gymnasium.vector.SyncVectorEnv`: the envs live in the caller's process, in `envs`.

    Args:
        env_fns: a list of functions that make one env each.
        copy, observation_mode, autoreset_mode: as for Gymnasium's class.
    """

    _mismatches = {
        "observation": "SyncVectorEnv(..., observation_mode='same') however the sub-environments observation spaces "
        "are not equivalent. single_observation_space={expected}, sub-environment observation_space={found}. If this "
        "is intentional, use `observation_mode='different'` instead.",
        "shape": "SyncVectorEnv(..., observation_mode='different' or custom space) however the sub-environments "
        "observation spaces do not share a common shape and dtype, single_observation_space={expected}, "
        "sub-environment observation space={found}",
        "action": "Sub-environment action space doesn't make the `single_action_space`, action_space={found}, "
        "single_action_space={expected}",
    }

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        copy: bool = True,
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
    ):
        options = {"copy": copy, "backend": "serial", "check_reset": "ended"}
        self._build(env_fns, observation_mode, autoreset_mode, options)
        self.envs = self.pool.local_envs

    def __reduce__(self) -> Any:
        # A copy makes envs of its own, and goes on from the same state.
        arguments = (self.env_fns, self.copy, self.observation_mode, self.autoreset_mode)
        return _revived, (type(self), arguments, self.spec, self.pool.snapshot())

    def close_extras(self, **kwargs: Any) -> None:  # type: ignore[override]
        """Close the envs."""
        super().close_extras(**kwargs)

    @in_turn
    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method, or get an attribute, of each env; also those that have a method of their own here."""
        if name not in ("reset", "step", "close"):
            return super().call(name, *args, **kwargs)
        self._begin("call_async")
        try:
            return tuple(self.pool.apply(methodcaller(name, *args, **kwargs)))
        except EnvError as error:
            raise self._told(error) from error.__cause__


class AsyncVectorEnv(_DropIn, gymnasium.vector.AsyncVectorEnv):  # type: ignore[misc]
    """Drop-in for `gymnasium.vector.AsyncVectorEnv`: the envs live in worker processes, several to each.

    There are as many workers as cores, and no more than envs. No env is stepped or reset before the caller does so.
    As in Gymnasium, the first function makes one env in the caller's process, which is closed at once: what such a
    call downloads or compiles is there when the workers begin.

    `shared_memory` and `daemon` are accepted and change nothing: all arrays are in shared memory, and envs may start
    processes. `context` is the start method, `max_concurrency` the number of workers. `worker` is refused, because a
    worker of Shoal has several envs. `pool_options` are Shoal's own, such as `num_workers`, or `backend`.

    Args:
        env_fns: a list of functions that make one env each.
        copy, observation_mode, autoreset_mode: as for Gymnasium's class.
    """

    _mismatches = {
        "observation": "AsyncVectorEnv(..., observation_mode='same') however some of the sub-environments observation "
        "spaces are not equivalent. If this is intentional, use `observation_mode='different'` instead.",
        "shape": "AsyncVectorEnv(..., observation_mode='different' or custom space) however the sub-environment's "
        "observation spaces do not share a common shape and dtype.",
        "action": "Some environments have an action space different from `{expected}`. In order to batch actions, the "
        "action spaces from all environments must be equal.",
    }

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        shared_memory: bool = True,
        copy: bool = True,
        context: str | None = None,
        daemon: bool = True,
        worker: Callable[..., None] | None = None,
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_concurrency: int | None = None,
        **pool_options: Any,
    ):
        if worker is not None:
            raise ValueError("Shoal's workers run several envs each and cannot be replaced: leave `worker` out")
        if max_concurrency is not None:
            pool_options.setdefault("num_workers", _concurrency(max_concurrency))
        multiprocessing.get_context(context)  # which raises for one that there is not
        self.shared_memory, self.context, self.daemon = shared_memory, context, daemon
        self.worker, self.max_concurrency = worker, max_concurrency
        # A plan has a backend of its own.
        backend = pool_options.setdefault("backend", "auto" if "plan" in pool_options else "processes")
        given = {"isolate": backend == "auto", "check_reset": "none", "start_method": context}
        self._build(env_fns, observation_mode, autoreset_mode, {**given, "copy": copy, **pool_options})

    def _open(self, env: Any, num_envs: int | None, options: dict[str, Any]) -> None:
        refuse_unknown_options(options)
        env[0]().close()
        super()._open(env, num_envs, options)

    @in_turn
    def call_async(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Start a call; its results come with `call_wait`."""
        if name in ("reset", "step", "close", "_setattr", "_check_spaces"):
            raise BadCall(f"Trying to call function `{name}` with `call`, use `{name}` directly instead.")
        super().call_async(name, *args, **kwargs)


def _revived(cls: type[SyncVectorEnv], arguments: tuple[Any, ...], spec: Any, snapshot: Any) -> SyncVectorEnv:
    """A SyncVectorEnv that was pickled or copied."""
    envs = cls(*arguments)
    envs.spec = spec
    envs.pool.restore(snapshot)
    return envs


def _concurrency(number: Any) -> int:
    if not isinstance(number, int | np.integer):
        raise ValueError(f"`max_concurrency` must be an integer or None, got {type(number)}.")
    if number < 1:
        raise ValueError(f"`max_concurrency` must be a positive or None, got {number}.")
    return int(number)


def _autoreset_mode(mode: str | AutoresetMode) -> AutoresetMode:
    try:
        return _MODES[mode] if mode in tuple(_MODES) else AutoresetMode(mode)
    except ValueError:
        raise ValueError(f"autoreset: expected one of {', '.join(map(repr, _MODES))}, found {mode!r}") from None


def entry_point(env: Any, **pool_options: Any) -> Callable[..., VectorEnv]:
    """A `vector_entry_point` for `gymnasium.register`, so that `gymnasium.make_vec` gives a Shoal env.

    Example:
        gymnasium.register("My-v0", entry_point=MyEnv, vector_entry_point=shoal.entry_point(MyEnv))

    Args:
        pool_options: options of a pool, for all vector envs that are made this way.
    """

    def create(num_envs: int = 1, max_episode_steps: int | None = None, **env_kwargs: Any) -> VectorEnv:
        (env_fn,) = as_env_fns(env, 1, env_kwargs)
        limited = env_fn if max_episode_steps is None else with_time_limit(env_fn, max_episode_steps)
        return VectorEnv(limited, num_envs, **pool_options)

    return create


_replaced: dict[str, Any] = {}


def install() -> None:
    """Put Shoal's classes in place of Gymnasium's two, in `gymnasium.vector` and for `make_vec`, until `uninstall`."""
    if not _replaced:
        for name, cls in (("SyncVectorEnv", SyncVectorEnv), ("AsyncVectorEnv", AsyncVectorEnv)):
            _replaced[name] = getattr(gymnasium.vector, name)
            setattr(gymnasium.vector, name, cls)


def uninstall() -> None:
    """Undo `install`: Gymnasium's own classes are back in their places."""
    for name, original in _replaced.items():
        setattr(gymnasium.vector, name, original)
    _replaced.clear()


def with_spec(envs: VectorEnv, spec: Any) -> VectorEnv:
    """Note the spec that the envs were made from, as `gymnasium.make_vec` does."""
    envs.spec = copying.deepcopy(spec)
    envs.spec.kwargs = {**spec.kwargs, "num_envs": envs.num_envs}
    return envs


if "shoal/Env-v0" not in gymnasium.registry:  # for gymnasium.make_vec("shoal/Env-v0", env="CartPole-v1", num_envs=8)
    gymnasium.register("shoal/Env-v0", vector_entry_point="shoal.dialects.gymnasium:VectorEnv")

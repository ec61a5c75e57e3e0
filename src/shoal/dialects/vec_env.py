"""The VecEnv that Baselines began and Stable-Baselines carried on: step returns (obs, rewards, dones, infos).

Both dialects build on the classes here: the abstract VecEnv, the one on a pool, the base of its wrappers, and the
wrapper that holds a transform.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium import Space, spaces

from shoal.dialects.base import PoolFace, VecEnvBase, in_turn
from shoal.envs import wrapper_layers
from shoal.errors import BadCall, EnvError, NothingPending, RenderModesDiffer
from shoal.memory.answers import Ready
from shoal.memory.infos import listed
from shoal.memory.messages import RESTART_INFO
from shoal.spaces.leaves import batched
from shoal.wrappers.base import Bound, Rows, Transform, bind_all
from shoal.wrappers.observations import ExtractDictObs
from shoal.wrappers.video import show_image, tile_images

Indices = None | int | Iterable[int]
StepReturn = tuple[Any, Any, Any, Any]
Method = TypeVar("Method", bound=Callable[..., Any])


class VecEnv(VecEnvBase):
    """Many envs as one. When an episode ends, its env begins the next one in the same step.

    The env's info then has the last observation of the old episode as `terminal_observation`.

    Args:
        num_envs, observation_space, action_space: how many envs, and the spaces of one.

    Attributes:
        reset_infos: the info of each env's last reset.
    """

    closed = False

    # Functions that are called whenever a VecEnv is made. A dialect uses them to tell its library of our classes.
    when_made: list[Callable[[], None]] = []

    def __init__(self, num_envs: int, observation_space: Space[Any], action_space: Space[Any]):
        for tell in VecEnv.when_made:
            tell()
        self.num_envs, self.observation_space, self.action_space = num_envs, observation_space, action_space
        self.reset_infos: list[dict[str, Any]] = [{} for _ in range(num_envs)]
        self._seeds: list[int | None] = [None] * num_envs
        self._options: list[dict[str, Any]] = [{} for _ in range(num_envs)]
        self.render_mode = self._find_render_mode()
        modes = ["human", "rgb_array"] if self.render_mode == "rgb_array" else [self.render_mode]
        self.metadata: dict[str, Any] = {"render_modes": [] if self.render_mode is None else modes}

    def _find_render_mode(self) -> str | None:
        try:
            modes = self.get_attr("render_mode")
        except AttributeError:
            warnings.warn("the envs have no attribute `render_mode`, so it is taken for None", stacklevel=3)
            return None
        for env_id, mode in enumerate(modes):
            if mode != modes[0]:
                raise RenderModesDiffer(
                    f"render_mode mode should be the same for all environments: env {env_id} has render_mode {mode!r}, "
                    f"and env 0 has {modes[0]!r}"
                )
        return modes[0]  # type: ignore[no-any-return]

    @abstractmethod
    def reset(self) -> Any:
        """Reset all envs, with the seeds and options that were set; their observations. Cancels a step under way."""

    @abstractmethod
    def step_async(self, actions: Any) -> None:
        """Start a step."""

    @abstractmethod
    def step_wait(self) -> StepReturn:
        """The result of the step that was started: obs, rewards, dones, infos."""

    @abstractmethod
    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """An attribute of each env, through its wrappers."""

    @abstractmethod
    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of each env to the same value."""

    @abstractmethod
    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of each env, through its wrappers."""

    @abstractmethod
    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Whether each env is wrapped in this class."""

    def step(self, actions: Any) -> StepReturn:
        """Step all envs: obs, rewards, dones, infos."""
        self.step_async(actions)
        return self.step_wait()

    def has_attr(self, attr_name: str) -> bool:
        """Whether all envs have this attribute."""
        try:
            self.get_attr(attr_name)
        except AttributeError:
            return False
        return True

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Seeds for the next reset: env i gets `seed + i`. None draws one."""
        # From numpy's global generator: a script that seeds it gets the same envs again.
        first = int(np.random.randint(0, 2**32 - 1, dtype=np.uint32)) if seed is None else int(seed)
        self._seeds = [first + i for i in range(self.num_envs)]
        return self._seeds

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Options for the next reset: one dict for all envs, or a list with one for each."""
        self._options = copy.deepcopy(options if isinstance(options, list | tuple) else [options or {}] * self.num_envs)

    def get_images(self) -> Sequence[Any]:
        """An image of each env; None where they make none."""
        if self.render_mode == "rgb_array":
            return self.env_method("render")
        warnings.warn(
            f'the envs have render_mode {self.render_mode!r}; for images make them with render_mode="rgb_array"',
            stacklevel=2,
        )
        return [None] * self.num_envs

    def render(self, mode: str | None = None) -> Any:
        """All envs' images as one, in a grid ("rgb_array"), or on the screen ("human")."""
        shown = mode or self.render_mode
        if shown is None:
            warnings.warn("there is nothing to render: the envs were made without a render_mode", stacklevel=2)
        elif shown != self.render_mode and (shown, self.render_mode) != ("human", "rgb_array"):
            warnings.warn(
                f"cannot render as {shown!r}: the envs were made with render_mode={self.render_mode!r}", stacklevel=2
            )
        elif self.render_mode != "rgb_array":
            self.env_method("render")
        else:
            image = tile_images(self.get_images())
            return image if shown == "rgb_array" else show_image(image)
        return None

    @property
    def unwrapped(self) -> VecEnv:
        """The innermost VecEnv, around which all others are wrapped."""
        return self

    def getattr_depth_check(self, name: str, already_found: bool) -> str | None:
        """The class that has this attribute, if an outer layer has the same one and so hides it."""
        return wrapper_layers.name_of(type(self)) if already_found and hasattr(self, name) else None

    def _get_indices(self, indices: Indices) -> Iterable[int]:
        if indices is None:
            return range(self.num_envs)
        return [indices] if isinstance(indices, int) else indices

    def _reset_seeds(self) -> None:
        self._seeds = [None] * self.num_envs

    def _reset_options(self) -> None:
        self._options = [{} for _ in range(self.num_envs)]

    def _splits_step(self, cls: type[VecEnv]) -> bool:
        """Whether a subclass of `cls` has its own step_async or step_wait, which `step` must then call."""
        own = type(self)
        return own.step_async is not cls.step_async or own.step_wait is not cls.step_wait


class PoolVecEnv(PoolFace, VecEnv):
    """A pool as a VecEnv.

    Args:
        env, num_envs, pool_options: as for `shoal.Pool`. Autoreset is always "same_step"; a step may come
            before the first reset and after an error, and `lenient` is the default.
    """

    _api, _mode = "a VecEnv", "same_step"
    _reward_type: type = np.float32
    _already_stepping: type[Exception] = BadCall
    _not_stepping: type[Exception] = NothingPending

    def __init__(self, env: Any, num_envs: int | None = None, **pool_options: Any):
        self.waiting = False  # whether step_async was called, and step_wait was not
        self._open(env, num_envs, {"lenient": True, "check_reset": "none", **pool_options})
        kinds = {spaces.MultiBinary: self._as_bits, spaces.Dict: self._as_batch, spaces.Tuple: self._as_batch}
        found = [convert for kind, convert in kinds.items() if isinstance(self.action_space, kind)]
        self._convert: Callable[[Any], Any] | None = found[0] if found else None

    def _learn(self) -> None:
        specs = self.pool.specs
        VecEnv.__init__(self, self.pool.num_envs, specs.single_observation_space, specs.single_action_space)
        self.metadata = {**specs.metadata, **self.metadata}

    envs = property(attrgetter("pool.local_envs"), doc="The envs that live in this process.")

    @in_turn
    def reset(self) -> Any:
        self.waiting = self._late = False  # pool.reset drops what is under way
        if len(self._options) < self.num_envs:
            raise IndexError(f"set_options was given {len(self._options)} dicts, and there are {self.num_envs} envs")
        options = [one or None for one in self._options[: self.num_envs]]
        try:
            batch = self.pool.reset(seed=self._seeds, options=options if any(options) else None)
        except EnvError as error:
            raise self._told(error) from error.__cause__
        self.reset_infos = [batch.info.get(env_id, {}) for env_id in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return batch.obs

    def step(self, actions: Any) -> StepReturn:
        if self._splits_step(PoolVecEnv):
            return super().step(actions)
        return self._step_now(actions)

    def _step_now(self, actions: Any) -> StepReturn:
        with self.pool.turn:
            if self.waiting or self._late:
                self._begin()
            return self._result(self._exchange(actions if self._convert is None else self._convert(actions)))

    @in_turn
    def step_async(self, actions: Any) -> None:
        self._begin()
        self.pool.send(actions if self._convert is None else self._convert(actions))
        self.waiting = True

    def _as_batch(self, actions: Any) -> Any:
        """Turn one action for each env, each a dict or a tuple, into a batch; a dict is one already."""
        return actions if isinstance(actions, Mapping) else batched(self.action_space, actions)

    @staticmethod
    def _as_bits(actions: Any) -> Any:
        """Turn 0.0 and 1.0, which policies of Stable-Baselines3 return for a space of bits, into integers."""
        array = np.asarray(actions)
        whole = array.dtype.kind == "f" and bool(((array == 0) | (array == 1)).all())
        return array.astype(np.int8) if whole else array

    @in_turn
    def step_wait(self) -> StepReturn:
        if not self.waiting and not self.closed:
            raise self._not_stepping("step_wait was called without step_async before it")
        self.waiting = False
        return self._result(self._collect(self.pool.wait))

    def _begin(self) -> None:
        if self.waiting:
            raise self._already_stepping("step_async was called twice: call step_wait before the next step")
        self._drop_late()

    def _result(self, ready: Ready) -> StepReturn:
        obs, reward, terminated, truncated = self.pool.data.take_step(ready)
        dones = terminated | truncated
        infos = listed(ready.infos, ready.ids)
        for env_id in np.flatnonzero(dones).tolist():
            found = infos[env_id]
            infos[env_id] = info = found.pop("final_info")
            info["terminal_observation"] = found.pop("final_obs")
            if RESTART_INFO in found:
                info[RESTART_INFO] = found.pop(RESTART_INFO)
            self.reset_infos[env_id] = found
        for info, late in zip(infos, (truncated & ~terminated).tolist(), strict=True):
            info["TimeLimit.truncated"] = late
        return obs, reward.astype(self._reward_type), dones, infos

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        return self._apply(wrapper_layers.get_attr, indices, attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        self._apply(wrapper_layers.set_attr, indices, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        return self._apply(wrapper_layers.call_method, indices, method_name, *method_args, **method_kwargs)

    def has_attr(self, attr_name: str) -> bool:
        return all(self._apply(wrapper_layers.has_attr, None, attr_name))

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        return self._apply(wrapper_layers.is_wrapped, indices, wrapper_layers.name_of(wrapper_class))

    @in_turn
    def _apply(self, function: Callable[..., Any], indices: Indices, *args: Any, **kwargs: Any) -> list[Any]:
        ids = self._ids(indices)
        rounds = [ids] if len(set(ids)) == len(ids) else [[i] for i in ids]  # an env that is named twice is asked twice
        try:
            return [v for each in rounds if each for v in self.pool.apply(function, *args, env_ids=each, **kwargs)]
        except EnvError as error:
            raise self._told(error) from error.__cause__

    def _ids(self, indices: Indices) -> list[int]:
        """Env ids; negative ones are counted from the end. Raises IndexError for an env that is not there."""
        ids = [int(i) for i in self._get_indices(indices)]
        for i in ids:
            if not -self.num_envs <= i < self.num_envs:
                raise IndexError(f"there is no env {i}: there are envs 0 to {self.num_envs - 1}")
        return [i % self.num_envs for i in ids]

    def close(self) -> None:
        self.waiting = False
        super().close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.pool!r})"


def check_vec_env(venv: Any, who: str) -> None:
    """Raise TypeError unless it is a VecEnv."""
    missing = [name for name in ("num_envs", "step_async", "step_wait", "reset", "get_attr") if not hasattr(venv, name)]
    if missing or isinstance(venv, gymnasium.vector.VectorEnv):
        raise TypeError(
            f"{who} goes around a VecEnv, found {venv!r}: make one with DummyVecEnv, SubprocVecEnv or "
            'shoal.make(..., api="sb3"); around a Gymnasium vector env or a pool, use shoal.wrappers.wrap'
        )


def _passed_on(method: Method) -> Method:
    """The method of a wrapper that calls the same method of the VecEnv in it."""

    @functools.wraps(method, updated=())  # not the mark of an abstract method
    def pass_on(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.venv, method.__name__)(*args, **kwargs)

    return pass_on  # type: ignore[return-value]


class VecEnvWrapper(VecEnv):
    """Base of users' own wrappers: it passes every call on to the VecEnv in it, unless a subclass overrides it.

    Args:
        observation_space, action_space: by default those of `venv`.
    """

    def __init__(self, venv: Any, observation_space: Space[Any] | None = None, action_space: Space[Any] | None = None):
        check_vec_env(venv, type(self).__name__)
        self.venv = venv
        super().__init__(venv.num_envs, observation_space or venv.observation_space, action_space or venv.action_space)
        self.metadata = {**(getattr(venv, "metadata", None) or {}), **self.metadata}
        self.class_attributes = dict(inspect.getmembers(type(self)))

    def step_async(self, actions: Any) -> None:
        self.venv.step_async(actions)

    def render(self, mode: str | None = None) -> Any:
        return self.venv.render(mode=mode)

    close = _passed_on(VecEnv.close)
    seed = _passed_on(VecEnv.seed)
    set_options = _passed_on(VecEnv.set_options)
    get_images = _passed_on(VecEnv.get_images)
    has_attr = _passed_on(VecEnv.has_attr)
    get_attr = _passed_on(VecEnv.get_attr)
    set_attr = _passed_on(VecEnv.set_attr)
    env_method = _passed_on(VecEnv.env_method)
    env_is_wrapped = _passed_on(VecEnv.env_is_wrapped)

    unwrapped = property(attrgetter("venv.unwrapped"), doc="The innermost VecEnv.")

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """Whether the envs were closed."""
        return bool(getattr(self.venv, "closed", False))

    def __getattr__(self, name: str) -> Any:
        """Find the attribute in an inner layer. If two of the layers have it, it is not clear which one is meant."""
        if name.startswith("__") or "venv" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        if self.venv is None:
            raise AttributeError(f"{type(self).__name__} has no envs, so no {name!r}: call set_venv first")
        hidden = self.getattr_depth_check(name, already_found=False)
        if hidden is not None:
            raise AttributeError(
                f"{name!r} of {wrapper_layers.name_of(type(self))} is ambiguous: it is hidden in {hidden}; use "
                f"getattr(venv.venv, {name!r}) there"
            )
        return self.getattr_recursive(name)

    def getattr_recursive(self, name: str) -> Any:
        """The attribute of the outermost layer that has it."""
        if name in self._get_all_attributes():
            return getattr(self, name)
        if hasattr(self.venv, "getattr_recursive"):
            return self.venv.getattr_recursive(name)
        return getattr(self.venv, name)

    def getattr_depth_check(self, name: str, already_found: bool) -> str | None:
        own = name in self._get_all_attributes()
        if own and already_found:
            return wrapper_layers.name_of(type(self))
        return self.venv.getattr_depth_check(name, own or already_found)  # type: ignore[no-any-return]

    def _get_all_attributes(self) -> dict[str, Any]:
        return {**self.__dict__, **self.__dict__.get("class_attributes", {})}


class TransformWrapper(VecEnvWrapper):
    """A VecEnv with a transform that every batch passes. The transform's attributes are this wrapper's as well."""

    def __init__(self, venv: Any, transform: Transform):
        check_vec_env(venv, type(self).__name__)
        self.venv = venv
        self.transform = transform
        self._all_ids = np.arange(venv.num_envs)
        self._nothing = np.zeros(venv.num_envs, np.bool_)

        def images(ids: Any) -> Sequence[Any]:
            pictures = venv.get_images()
            return [pictures[i] for i in ids.tolist()]

        render_mode, metadata = getattr(venv, "render_mode", None), getattr(venv, "metadata", None) or {}
        bound = Bound(venv.num_envs, venv.observation_space, venv.action_space, images, metadata, render_mode)
        super().__init__(venv, observation_space=bind_all([transform], bound))

    def step_async(self, actions: Any) -> None:
        self.transform.send(actions, self._all_ids)
        self.venv.step_async(actions)

    def reset(self) -> Any:
        obs = self.venv.reset()
        rows = Rows(
            self._all_ids, True, obs, np.zeros(self.num_envs, np.float32), self._nothing, self._nothing, ~self._nothing,
            {}, {},
        )  # fmt: skip
        self.transform.apply(rows)
        self.reset_infos = self.venv.reset_infos
        return rows.obs

    def step_wait(self) -> StepReturn:
        return self._apply(*self.venv.step_wait())

    def step(self, actions: Any) -> StepReturn:
        if self._splits_step(TransformWrapper):
            return super().step(actions)
        self.transform.send(actions, self._all_ids)
        return self._apply(*self.venv.step(actions))

    def _apply(self, obs: Any, rewards: Any, dones: Any, infos: Any) -> StepReturn:
        ended = np.flatnonzero(dones).tolist() if dones.any() else ()
        finals = {i: infos[i]["terminal_observation"] for i in ended if "terminal_observation" in infos[i]}
        # Every end passes for `terminated` here. Infos say which one was a truncation, and transforms do not ask.
        rows = Rows(
            self._all_ids, True, obs, rewards, dones, self._nothing, dones, finals, {i: infos[i] for i in ended}
        )
        self.transform.apply(rows)
        for i, final in rows.final_obs.items():
            infos[i]["terminal_observation"] = final
        return rows.obs, rows.reward, dones, infos

    def close(self) -> None:
        """Close the transform, then the envs."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.venv.close)
            self.transform.close()

    def _is_transforms(self, name: str) -> bool:
        transform = self.__dict__.get("transform")
        return transform is not None and not hasattr(Transform, name) and hasattr(transform, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transform, name) if self._is_transforms(name) else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_transforms(name):
            setattr(self.transform, name, value)
        else:
            super().__setattr__(name, value)

    def _get_all_attributes(self) -> dict[str, Any]:
        public = {name: None for name in dir(type(self.transform)) if name[0] != "_" and not hasattr(Transform, name)}
        return {**public, **vars(self.transform), **super()._get_all_attributes()}


class VecExtractDictObs(TransformWrapper):
    """The part `key` of the Dict observations of `venv` in place of all of them; the same in both dialects."""

    def __init__(self, venv: Any, key: str):
        super().__init__(venv, ExtractDictObs(key))

"""The VecEnv that Baselines began and Stable-Baselines carried on: step returns (obs, rewards, dones, infos).

Both dialects stand on what is here: the abstract VecEnv, the one on a pool, and the wrapper that holds a transform.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces

from shoal.envs import wrapper_layers
from shoal.envs.adapt import adapt
from shoal.errors import BadCall, BadEnv, EnvError, NothingPending
from shoal.memory.answers import Ready
from shoal.memory.messages import RESTART_INFO
from shoal.options import refuse_unknown_options
from shoal.pool import Pool
from shoal.wrappers.base import Bound, Rows, Transform, bind_all
from shoal.wrappers.video import tile_images

__all__ = ["Indices", "PoolVecEnv", "TransformWrapper", "VecEnv", "VecEnvWrapper", "as_list", "check_maker", "make_one"]

Indices = None | int | Iterable[int]
StepReturn = tuple[Any, Any, Any, Any]


class VecEnv(ABC):
    """Many envs as one. Whose episode ends begins the next at once; `terminal_observation` in its info is the last one.

    Attributes:
        reset_infos: the info of each env's last reset.
    """

    closed = False

    # Called whenever one is made: a dialect whose library must be told of our classes has it here.
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
                raise ValueError(f"env {env_id} has render_mode {mode!r}, and env 0 has {modes[0]!r}: they must agree")
        found: str | None = modes[0]
        return found

    # ---- what others must have -------------------------------------------------------------------------------

    @abstractmethod
    def reset(self) -> Any:
        """Reset all envs; their observations. A step that is under way is cancelled."""

    @abstractmethod
    def step_async(self, actions: Any) -> None:
        """Start a step."""

    @abstractmethod
    def step_wait(self) -> StepReturn:
        """The result of the step that was started: obs, rewards, dones, infos."""

    @abstractmethod
    def close(self) -> None:
        """Close all envs."""

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

    # ---- what follows from it --------------------------------------------------------------------------------

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
        # By the global generator: whoever has seeded that gets the same envs again.
        first = int(np.random.randint(0, 2**32 - 1, dtype=np.uint32)) if seed is None else int(seed)
        self._seeds = [first + i for i in range(self.num_envs)]
        return self._seeds

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Options for the next reset: the same for all, or one for each."""
        each = [options or {}] * self.num_envs if not isinstance(options, list | tuple) else list(options)
        if len(each) != self.num_envs:
            raise ValueError(f"set_options: expected {self.num_envs} of them, one per env, found {len(each)}")
        self._options = copy.deepcopy(each)

    def get_images(self) -> Sequence[Any]:
        """An image of each env; None where they make none."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f'the envs have render_mode {self.render_mode!r}; for images make them with render_mode="rgb_array"',
                stacklevel=2,
            )
            return [None] * self.num_envs
        return self.env_method("render")

    def render(self, mode: str | None = None) -> Any:
        """All envs' images as one, in a grid ("rgb_array"), or on the screen ("human")."""
        shown = mode or self.render_mode
        if shown is None:
            warnings.warn("there is nothing to render: the envs were made without a render_mode", stacklevel=2)
            return None
        possible = shown == self.render_mode or (shown == "human" and self.render_mode == "rgb_array")
        if not possible:
            warnings.warn(
                f"cannot render as {shown!r}: the envs were made with render_mode={self.render_mode!r}", stacklevel=2
            )
            return None
        if self.render_mode != "rgb_array":
            self.env_method("render")
            return None
        image = tile_images(self.get_images())
        if shown == "rgb_array":
            return image
        _show(image)
        return None

    @property
    def unwrapped(self) -> VecEnv:
        """The innermost of them."""
        return self

    def getattr_depth_check(self, name: str, already_found: bool) -> str | None:
        """The class that has this attribute, if it is hidden behind another that has it as well."""
        return f"{type(self).__module__}.{type(self).__name__}" if already_found and hasattr(self, name) else None

    def _get_indices(self, indices: Indices) -> Iterable[int]:
        if indices is None:
            return range(self.num_envs)
        return [indices] if isinstance(indices, int) else indices

    def _reset_seeds(self) -> None:
        self._seeds = [None] * self.num_envs

    def _reset_options(self) -> None:
        self._options = [{} for _ in range(self.num_envs)]

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _show(image: Any) -> None:
    try:
        import cv2
    except ImportError as error:
        raise ImportError('render(mode="human") shows a window by OpenCV: pip install opencv-python') from error
    cv2.imshow("vecenv", image[:, :, ::-1])
    cv2.waitKey(1)


class PoolVecEnv(VecEnv):
    """A pool as a VecEnv.

    Args:
        env, num_envs, pool_options: as for `shoal.Pool`. Autoreset is always "same_step".
    """

    def __init__(self, env: Any, num_envs: int | None = None, **pool_options: Any):
        if pool_options.setdefault("autoreset", "same_step") != "same_step":
            raise ValueError(
                'autoreset: a VecEnv resets in the step that ends an episode ("same_step"); for others use shoal.Pool'
            )
        refuse_unknown_options(pool_options)
        pool_options.setdefault("copy", True)
        pool_options.setdefault("check_actions", "discrete")
        self.pool = Pool(env, num_envs, **pool_options)
        try:
            if self.pool.batch_size != self.pool.num_envs:
                raise ValueError("a VecEnv steps all envs at once: for batch_size below num_envs use shoal.Pool")
            specs = self.pool.specs
            super().__init__(self.pool.num_envs, specs.single_observation_space, specs.single_action_space)
            self.metadata = {**specs.metadata, **self.metadata}
        except BaseException:
            self.pool.close()
            raise
        self.waiting = False
        self._late = False  # whether answers may still come that nobody waits for
        self._bits = isinstance(self.action_space, spaces.MultiBinary)

    @property
    def envs(self) -> list[Any]:
        """The envs that live in this process."""
        return self.pool.local_envs

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """Whether it was closed, by the user or after a worker's death."""
        return self.pool.closed

    # ---- reset and step --------------------------------------------------------------------------------------

    def reset(self) -> Any:
        """Reset all envs, with the seeds and options that were set; their observations."""
        self.waiting = self._late = False  # pool.reset drops what is under way
        options = [one or None for one in self._options]
        batch = self.pool.reset(seed=self._seeds, options=options if any(options) else None)
        self.reset_infos = [batch.info.get(env_id, {}) for env_id in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return batch.obs

    def step(self, actions: Any) -> StepReturn:
        """Step all envs: obs, rewards, dones, infos."""
        cls = type(self)
        if cls.step_async is not PoolVecEnv.step_async or cls.step_wait is not PoolVecEnv.step_wait:
            return super().step(actions)  # somebody has overridden a half of it
        if self.waiting or self._late:
            self._begin()
        try:
            ready = self.pool.exchange(self._as_bits(actions) if self._bits else actions)
        except BaseException:
            self._late = True
            raise
        return self._result(ready)

    def step_async(self, actions: Any) -> None:
        """Start a step."""
        self._begin()
        self.pool.send(self._as_bits(actions) if self._bits else actions)
        self.waiting = True

    @staticmethod
    def _as_bits(actions: Any) -> Any:
        """Policies of Stable-Baselines3 answer with 0.0 and 1.0 where the space has bits."""
        array = np.asarray(actions)
        whole = array.dtype.kind == "f" and bool(((array == 0) | (array == 1)).all())
        return array.astype(np.int8) if whole else array

    def step_wait(self) -> StepReturn:
        """The result of the step that was started."""
        if not self.waiting and not self.closed:
            raise self._not_stepping()
        self.waiting = False
        try:
            ready = self.pool.wait()
        except EnvError:
            self.pool.drop_pending()
            raise
        except BaseException:
            self._late = True
            raise
        return self._result(ready)

    def _begin(self) -> None:
        if self.waiting:
            raise self._already_stepping()
        if self._late:
            self.pool.drop_pending()
            self._late = False

    def _already_stepping(self) -> Exception:
        return BadCall("step_async was called twice: call step_wait before the next step")

    def _not_stepping(self) -> Exception:
        return NothingPending("step_wait was called without step_async before it")

    def _result(self, ready: Ready) -> StepReturn:
        obs, reward, terminated, truncated = self.pool.data.take_step(ready)
        dones = terminated | truncated
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        for env_id, found in ready.infos.items():
            info = infos[env_id]
            if dones[env_id]:
                found = dict(found)
                info.update(found.pop("final_info"))
                info["TimeLimit.truncated"] = bool(truncated[env_id] and not terminated[env_id])
                info["terminal_observation"] = found.pop("final_obs")
                if RESTART_INFO in found:
                    info[RESTART_INFO] = found.pop(RESTART_INFO)
                self.reset_infos[env_id] = found
            else:
                info.update(found)
                info["TimeLimit.truncated"] = False
        return obs, reward.astype(np.float32), dones, infos

    # ---- the envs --------------------------------------------------------------------------------------------

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """An attribute of each env, through its wrappers."""
        return self._apply(wrapper_layers.get_attr, indices, attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of each env to the same value."""
        ids = sorted(set(self._ids(indices)))
        if ids:
            self.pool.set_attr(attr_name, [value] * len(ids), ids)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of each env, through its wrappers."""
        if method_name in ("step", "reset", "close"):
            raise BadCall(f"env_method: use the VecEnv's own {method_name}, which keeps the envs in step")
        return self._apply(wrapper_layers.call_method, indices, method_name, *method_args, **method_kwargs)

    def has_attr(self, attr_name: str) -> bool:
        """Whether all envs have this attribute."""
        return all(self._apply(wrapper_layers.has_attr, None, attr_name))

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Whether each env is wrapped in this class."""
        return self._apply(wrapper_layers.is_wrapped, indices, wrapper_layers.name_of(wrapper_class))

    def _apply(self, function: Callable[..., Any], indices: Indices, *args: Any, **kwargs: Any) -> list[Any]:
        ids = self._ids(indices)
        values: list[Any] = [None] * len(ids)
        left = list(range(len(ids)))
        while left:  # an env that is named twice is asked twice, in rounds of different envs
            now = {ids[place]: place for place in reversed(left)}
            answers = self.pool.apply(function, *args, env_ids=list(now), **kwargs)
            for place, answer in zip(now.values(), answers, strict=True):
                values[place] = answer
            left = [place for place in left if now[ids[place]] != place]
        return values

    def _ids(self, indices: Indices) -> list[int]:
        """Env ids, counted from the end where negative; IndexError for those that are not there."""
        ids = [int(i) for i in self._get_indices(indices)]
        for i in ids:
            if not -self.num_envs <= i < self.num_envs:
                raise IndexError(f"there is no env {i}: there are envs 0 to {self.num_envs - 1}")
        return [i % self.num_envs for i in ids]

    def close(self) -> None:
        """Close all envs and end all workers; may be called again, and at any time."""
        self.waiting = False
        self.pool.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.pool!r})"


def as_list(env_fns: Any) -> list[Any]:
    """Env functions as a list. Raises TypeError for what is none, such as an id."""
    if isinstance(env_fns, str) or not isinstance(env_fns, Iterable):
        raise TypeError(
            f"expected a list of functions that make one env each, found {env_fns!r}; for an id: make_vec_env"
        )
    return list(env_fns)


def check_maker(env_id: Any) -> None:
    """Raise BadEnv unless it is an id, or can make an env."""
    if not isinstance(env_id, str) and not callable(env_id):
        raise BadEnv(
            f"expected an id, or a function or class that makes an env, found {env_id!r}; an env that is made already "
            "cannot stand for several"
        )


def make_one(env_id: Any, env_kwargs: Mapping[str, Any]) -> Any:
    """One env by its id, with images if it can make some, or by a function or class."""
    if not isinstance(env_id, str):
        return adapt(env_id(**env_kwargs))
    try:
        return gymnasium.make(env_id, **{"render_mode": "rgb_array", **env_kwargs})
    except TypeError:  # an env that does not render
        return gymnasium.make(env_id, **env_kwargs)


def check_vec_env(venv: Any, who: str) -> None:
    """Raise TypeError unless it is a VecEnv."""
    missing = [name for name in ("num_envs", "step_async", "step_wait", "reset", "get_attr") if not hasattr(venv, name)]
    if missing or isinstance(venv, gymnasium.vector.VectorEnv):
        raise TypeError(
            f"{who} goes around a VecEnv, and found {venv!r}: make one with DummyVecEnv, SubprocVecEnv or "
            'shoal.make(..., api="sb3"); around a Gymnasium vector env or a pool, use shoal.wrappers.wrap'
        )


class VecEnvWrapper(VecEnv):
    """Base of users' own wrappers: everything goes to the VecEnv in it, unless it is overridden.

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
        """Start a step."""
        self.venv.step_async(actions)

    @abstractmethod
    def reset(self) -> Any:
        """Reset all envs."""

    @abstractmethod
    def step_wait(self) -> StepReturn:
        """The result of the step that was started."""

    def close(self) -> None:
        """Close all envs."""
        self.venv.close()

    def seed(self, seed: int | None = None) -> Sequence[int | None]:
        """Seeds for the next reset."""
        seeds: Sequence[int | None] = self.venv.seed(seed)
        return seeds

    def set_options(self, options: list[dict[str, Any]] | dict[str, Any] | None = None) -> None:
        """Options for the next reset."""
        self.venv.set_options(options)

    def render(self, mode: str | None = None) -> Any:
        """All envs' images as one."""
        return self.venv.render(mode=mode)

    def get_images(self) -> Sequence[Any]:
        """An image of each env."""
        images: Sequence[Any] = self.venv.get_images()
        return images

    def has_attr(self, attr_name: str) -> bool:
        """Whether all envs have this attribute."""
        return bool(self.venv.has_attr(attr_name))

    def get_attr(self, attr_name: str, indices: Indices = None) -> list[Any]:
        """An attribute of each env."""
        return list(self.venv.get_attr(attr_name, indices))

    def set_attr(self, attr_name: str, value: Any, indices: Indices = None) -> None:
        """Set an attribute of each env."""
        self.venv.set_attr(attr_name, value, indices)

    def env_method(
        self, method_name: str, *method_args: Any, indices: Indices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Call a method of each env."""
        return list(self.venv.env_method(method_name, *method_args, indices=indices, **method_kwargs))

    def env_is_wrapped(self, wrapper_class: type, indices: Indices = None) -> list[bool]:
        """Whether each env is wrapped in this class."""
        return list(self.venv.env_is_wrapped(wrapper_class, indices=indices))

    @property
    def unwrapped(self) -> Any:
        """The innermost VecEnv."""
        return self.venv.unwrapped

    @property
    def closed(self) -> bool:  # type: ignore[override]
        """Whether the envs were closed."""
        return bool(getattr(self.venv, "closed", False))

    def __getattr__(self, name: str) -> Any:
        """Find it further in, unless two of the layers have it: then nobody knows which is meant."""
        if name.startswith("__") or "venv" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        if self.venv is None:
            raise AttributeError(f"{type(self).__name__} has no envs, so no {name!r}: call set_venv first")
        hidden = self.getattr_depth_check(name, already_found=False)
        if hidden is not None:
            own = f"{type(self).__module__}.{type(self).__name__}"
            raise AttributeError(
                f"{name!r} of {own} is ambiguous: it is hidden in {hidden}; use getattr(venv.venv, {name!r}) there"
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
        """The class that has this attribute, if it is hidden behind another that has it as well."""
        own = name in self._get_all_attributes()
        if own and already_found:
            return f"{type(self).__module__}.{type(self).__name__}"
        found: str | None = self.venv.getattr_depth_check(name, own or already_found)
        return found

    def _get_all_attributes(self) -> dict[str, Any]:
        return {**self.__dict__, **self.__dict__.get("class_attributes", {})}


class TransformWrapper(VecEnvWrapper):
    """A VecEnv whose batches go through a transform, whose attributes are this wrapper's as well."""

    def __init__(self, venv: Any, transform: Transform):
        check_vec_env(venv, type(self).__name__)
        self.venv = venv
        self.transform = transform
        super().__init__(venv, observation_space=self._bind(venv))

    def _bind(self, venv: Any) -> Space[Any]:
        def images(ids: Any) -> Sequence[Any]:
            pictures = venv.get_images()
            return [pictures[i] for i in ids.tolist()]

        self._all_ids = np.arange(venv.num_envs)
        self._nothing = np.zeros(venv.num_envs, np.bool_)
        metadata = getattr(venv, "metadata", None) or {}
        return bind_all(
            [self.transform],
            Bound(
                venv.num_envs,
                venv.observation_space,
                venv.action_space,
                images,
                metadata,
                getattr(venv, "render_mode", None),
            ),
        )

    def step_async(self, actions: Any) -> None:
        """Start a step."""
        self.transform.send(actions, self._all_ids)
        self.venv.step_async(actions)

    def reset(self) -> Any:
        """Reset all envs."""
        obs = self.venv.reset()
        rows = Rows(
            self._all_ids, True, obs, np.zeros(self.num_envs, np.float32), self._nothing, self._nothing, ~self._nothing,
            {}, {},
        )  # fmt: skip
        self.transform.apply(rows)
        self.reset_infos = self.venv.reset_infos
        return rows.obs

    def step_wait(self) -> StepReturn:
        """The result of the step that was started."""
        return self._apply(*self.venv.step_wait())

    def step(self, actions: Any) -> StepReturn:
        """Step all envs."""
        cls = type(self)
        if cls.step_async is not TransformWrapper.step_async or cls.step_wait is not TransformWrapper.step_wait:
            return super().step(actions)  # somebody has overridden a half of it
        self.transform.send(actions, self._all_ids)
        return self._apply(*self.venv.step(actions))

    def _apply(self, obs: Any, rewards: Any, dones: Any, infos: Any) -> StepReturn:
        ended = np.flatnonzero(dones).tolist() if dones.any() else ()
        finals = {i: infos[i]["terminal_observation"] for i in ended if "terminal_observation" in infos[i]}
        # An end is an end here, whether by time or not: infos say which, and transforms do not ask.
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

    # What the transform has, this wrapper has, to be read, called and set.

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

"""The pool as a Stable-Baselines3 VecEnv, with its wrappers: change the import, keep the script.

    from shoal.dialects.sb3 import SubprocVecEnv, VecNormalize, make_vec_env

Works without Stable-Baselines3. Where it is installed, the classes here pass its `isinstance` checks, so that its
algorithms, callbacks and own wrappers accept them.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
import sys
import uuid
import warnings
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space

from shoal.dialects.base import check_maker, make_one
from shoal.dialects.sb3_vec_envs import DummyVecEnv, SubprocVecEnv
from shoal.dialects.vec_env import (
    PoolVecEnv,
    TransformWrapper,
    VecEnv,
    VecEnvWrapper,
    VecExtractDictObs,
    check_vec_env,
)
from shoal.ranks import Ranks
from shoal.wrappers import (
    CheckNan,
    FrameStack,
    Monitor,
    MonitorEpisodes,
    Normalize,
    RecordVideo,
    RunningMeanStd,
    TransposeImage,
)
from shoal.wrappers.base import Bound, Rows
from shoal.wrappers.observations import transpose, transposed_space
from shoal.wrappers.running import SETTINGS, data_of, read_statistics, write_statistics
from shoal.wrappers.sb3_pickles import write_pickle
from shoal.wrappers.video import tile_images

__all__ = [
    "DummyVecEnv", "Monitor", "PoolVecEnv", "SubprocVecEnv", "VecCheckNan", "VecEnv", "VecEnvWrapper",
    "VecExtractDictObs", "VecFrameStack", "VecMonitor", "VecNormalize", "VecTransposeImage", "VecVideoRecorder",
    "is_vecenv_wrapped", "make_vec_env", "pass_for_sb3", "sync_envs_normalization", "tile_images",
    "unwrap_vec_normalize", "unwrap_vec_wrapper",
]  # fmt: skip


@functools.cache
def pass_for_sb3() -> None:
    """Register our classes with those of Stable-Baselines3, if it is installed, for its `isinstance` checks."""
    try:
        theirs = importlib.import_module("stable_baselines3.common.vec_env")
    except ImportError:  # it is not installed, or its torch is not
        return
    for name in __all__:
        if isinstance(getattr(theirs, name, None), ABCMeta):
            getattr(theirs, name).register(globals()[name])


VecEnv.when_made.append(pass_for_sb3)


def __getattr__(name: str) -> Any:
    """Hand out those of Stable-Baselines3's own classes that nothing of ours takes the place of."""
    if name in ("CloudpickleWrapper", "StackedObservations"):
        return getattr(importlib.import_module("stable_baselines3.common.vec_env"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def statistics_class() -> type[RunningMeanStd]:
    """The class of statistics: where Stable-Baselines3 is installed, one that its VecNormalize accepts too."""
    try:
        theirs = importlib.import_module("stable_baselines3.common.running_mean_std").RunningMeanStd
    except ImportError:
        return RunningMeanStd
    reduce = {"__reduce__": lambda self: (_statistics, (self.as_data(),))}
    return type("RunningMeanStd", (RunningMeanStd, theirs), reduce)


def _statistics(data: Any) -> RunningMeanStd:
    return statistics_class().from_data(data)


class _SB3Normalize(Normalize):
    """Normalizes with statistics that Stable-Baselines3 accepts, and leaves `old_reward` alone in a reset."""

    def apply(self, rows: Rows) -> None:
        """Learn from the rows, and normalize them."""
        before = self.old_reward
        super().apply(rows)
        if not rows.all_stepped and not rows.stepped.any():
            self.old_reward = before

    @property
    def statistics(self) -> Any:  # type: ignore[override]
        """The class of the statistics."""
        return statistics_class()


class _SB3Episodes(MonitorEpisodes):
    """Sums up in the types of SB3's VecMonitor, so that returns are the same to the last bit."""

    def bind(self, bound: Bound) -> Space[Any]:
        space = super().bind(bound)
        self.episode_returns = np.zeros(bound.num_envs, np.float32)
        self.episode_lengths = np.zeros(bound.num_envs, np.int32)
        return space

    def _sums(self, env_id: int) -> tuple[Any, Any]:
        return self.episode_returns[env_id], self.episode_lengths[env_id]


class VecFrameStack(TransformWrapper):
    """Stacks the last observations of each env.

    Args:
        venv: a VecEnv.
        n_stack: how many.
        channels_order: "first", "last" or None to find out; a dict of them for Dict observations.
    """

    def __init__(self, venv: Any, n_stack: int, channels_order: Any = None):
        super().__init__(venv, FrameStack(n_stack, channels_order, sb3_bounds=True))


class VecNormalize(TransformWrapper):
    """Normalizes observations and rewards by running statistics; the arguments are those of `shoal.wrappers.Normalize`.

    `save` writes the same file as that of SB3, and either reads what the other one wrote. SB3's `load` unpickles the
    file; ours runs no code of it.

    Args:
        venv: a VecEnv.
        training, norm_obs, norm_reward, clip_obs, clip_reward, gamma, epsilon, norm_obs_keys, ranks, sync_every: as for
            `shoal.wrappers.Normalize`.
    """

    def __init__(
        self,
        venv: Any,
        training: bool = True,
        norm_obs: bool = True,
        norm_reward: bool = True,
        clip_obs: float = 10.0,
        clip_reward: float = 10.0,
        gamma: float = 0.99,
        epsilon: float = 1e-8,
        norm_obs_keys: Sequence[str] | None = None,
        ranks: Ranks | None = None,
        sync_every: int | None = None,
    ):
        super().__init__(
            venv,
            _SB3Normalize(
                training, norm_obs, norm_reward, clip_obs, clip_reward, gamma, epsilon, norm_obs_keys, ranks, sync_every
            ),
        )  # fmt: skip

    @classmethod
    def load(cls, load_path: str | os.PathLike[str], venv: Any) -> VecNormalize:
        """Wrap `venv` with the settings and statistics of a file."""
        new = cls.__new__(cls)
        TransformWrapper.__init__(new, venv, _SB3Normalize.load(load_path))
        return new

    def save(self, save_path: str | os.PathLike[str]) -> None:
        """Write settings and statistics to a file that SB3's VecNormalize.load reads too."""
        transform: Any = self.transform
        write_pickle(save_path, {
            **{name: getattr(transform, name) for name in SETTINGS},
            "obs_rms": data_of(transform.obs_rms), "ret_rms": data_of(transform.ret_rms),
            "old_obs": transform.old_obs, "old_reward": np.array(transform.old_reward),
            "observation_space": self.observation_space, "action_space": self.action_space,
            "num_envs": self.num_envs, "render_mode": self.render_mode, "metadata": self.metadata,
        })  # fmt: skip

    def save_running_average(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics alone into a folder, as Stable-Baselines 2 did."""
        for name in ("obs_rms", "ret_rms"):
            content = data_of(getattr(self.transform, name))
            if content is not None:
                write_statistics(os.path.join(path, f"{name}.npz"), content)

    def load_running_average(self, path: str | os.PathLike[str]) -> None:
        """Continue with the statistics that `save_running_average` wrote, here or in Stable-Baselines 2."""
        found = {}
        for name in ("obs_rms", "ret_rms"):
            files = [os.path.join(path, f"{name}.{ending}") for ending in ("npz", "pkl")]
            there = next((file for file in files if os.path.exists(file)), None)
            found[name] = None if there is None else read_statistics(there)
        if found["ret_rms"] is None:
            raise FileNotFoundError(f"{os.fspath(path)} has no ret_rms.npz in it: nothing was saved there")
        self.transform.set_statistics(found["obs_rms"], found["ret_rms"])  # type: ignore[attr-defined]

    def set_venv(self, venv: Any) -> None:
        """Wrap these envs. It is for a VecNormalize that was unpickled, which has none."""
        if self.__dict__.get("venv") is not None:
            raise ValueError("this VecNormalize has envs already: load its file, or make another, for others")
        try:
            TransformWrapper.__init__(self, venv, self.transform)
        except BaseException:
            self.__dict__["venv"] = None
            raise

    def __getstate__(self) -> dict[str, Any]:
        of_this_process = ("bound", "returns", "ranks", "sync_every")
        state = {name: value for name, value in vars(self.transform).items() if name not in of_this_process}
        return {"transform": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        transform = _SB3Normalize()
        vars(transform).update(state["transform"])
        self.__dict__.update(transform=transform, venv=None)


class VecCheckNan(TransformWrapper):
    """Warns of a NaN, or of infinity too (`check_inf`), in `venv`: env, part, step and cause; once (`warn_once`).

    Raises:
        ValueError: there is one, and `raise_exception` is True.
    """

    def __init__(self, venv: Any, raise_exception: bool = False, warn_once: bool = True, check_inf: bool = True):
        super().__init__(venv, CheckNan(raise_exception, warn_once, check_inf))


class VecMonitor(TransformWrapper):
    """Sums up episodes of `venv`: `info["episode"]` with `info_keywords`, and in `filename` a CSV that SB3 reads."""

    def __init__(self, venv: Any, filename: str | None = None, info_keywords: Sequence[str] = ()):
        check_vec_env(venv, "VecMonitor")
        if any(venv.env_is_wrapped(Monitor)):
            warnings.warn(
                "the envs have a Monitor each already: VecMonitor's `episode` takes the place of theirs", stacklevel=2
            )
        env_id = None
        if venv.has_attr("spec"):
            env_id = getattr(venv.get_attr("spec", [0])[0], "id", None)
        super().__init__(venv, _SB3Episodes(filename, info_keywords, env_id=env_id))


class VecTransposeImage(TransformWrapper):
    """Images of `venv` as [channels, height, width]; `skip` leaves everything as it is."""

    def __init__(self, venv: Any, skip: bool = False):
        super().__init__(venv, TransposeImage(skip))

    def transpose_observations(self, observations: Any) -> Any:
        """A batch of observations, transposed."""
        return self.transform.turn(observations)  # type: ignore[attr-defined]

    transpose_image = staticmethod(transpose)

    @staticmethod
    def transpose_space(observation_space: Any, key: str = "") -> Space[Any]:
        """The space of transposed images."""
        return transposed_space(observation_space)


class VecVideoRecorder(TransformWrapper):
    """Records mp4 videos of all envs of `venv`; arguments and errors are those of `shoal.wrappers.RecordVideo`.

    Args:
        video_folder, record_video_trigger, video_length, name_prefix: as there; a venv that renders no images is
            refused.
    """

    def __init__(
        self,
        venv: Any,
        video_folder: str,
        record_video_trigger: Callable[[int], bool],
        video_length: int = 200,
        name_prefix: str = "rl-video",
    ):
        check_vec_env(venv, "VecVideoRecorder")
        if venv.render_mode != "rgb_array":
            raise ValueError(
                f'VecVideoRecorder: the envs have render_mode {venv.render_mode!r}, and it needs "rgb_array"'
            )
        super().__init__(venv, RecordVideo(video_folder, record_video_trigger, video_length, name_prefix))


def _make_monitored(
    env_id: Any,
    rank: int,
    seed: int | None,
    monitor_dir: str | None,
    env_kwargs: Mapping[str, Any],
    monitor_kwargs: Mapping[str, Any],
    wrap: Callable[[Any], Any] | None,
) -> Any:
    """Make one env as SB3's make_vec_env does: with a Monitor, then the user's wrapper around it."""
    env = make_one(env_id, env_kwargs)
    if seed is not None:
        env.action_space.seed(seed + rank)
    path = None if monitor_dir is None else os.path.join(monitor_dir, str(rank))
    env = Monitor(env, path, **monitor_kwargs)
    return env if wrap is None else wrap(env)


def make_vec_env(
    env_id: str | Callable[..., Any],
    n_envs: int = 1,
    seed: int | None = None,
    start_index: int = 0,
    monitor_dir: str | None = None,
    wrapper_class: Callable[..., Any] | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    vec_env_cls: Any = None,
    vec_env_kwargs: Mapping[str, Any] | None = None,
    monitor_kwargs: Mapping[str, Any] | None = None,
    wrapper_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Make many monitored envs as one VecEnv, as SB3's function of this name does.

    Args:
        env_id: an id, or a function or class that makes an env.
        seed: for the first reset: env i gets `seed + i`.
        start_index: rank of the first env, which its seed and the name of its monitor file depend on.
        monitor_dir: folder for the monitor files; None writes none.
        wrapper_class: a wrapper for each env, around its Monitor.
        vec_env_cls: DummyVecEnv (default), SubprocVecEnv, or any other that takes a list of functions.
        n_envs, env_kwargs, vec_env_kwargs, monitor_kwargs, wrapper_kwargs: as for SB3's.
    """
    check_maker(env_id)
    monitoring = {"run": uuid.uuid4().hex, **(monitor_kwargs or {})}
    wrap = wrapper_class and functools.partial(wrapper_class, **(wrapper_kwargs or {}))
    fns = [
        functools.partial(_make_monitored, env_id, rank, seed, monitor_dir, env_kwargs or {}, monitoring, wrap)
        for rank in range(start_index, start_index + n_envs)
    ]
    if monitor_dir is not None:
        os.makedirs(monitor_dir, exist_ok=True)
    envs = (vec_env_cls or DummyVecEnv)(fns, **(vec_env_kwargs or {}))
    envs.seed(seed)
    return envs


def unwrap_vec_wrapper(env: Any, vec_wrapper_class: Any) -> Any:
    """The layer of `env` that is a `vec_wrapper_class`, from the outside in; None if there is none."""
    while env is not None:
        if isinstance(env, vec_wrapper_class):
            return env
        env = env.__dict__.get("venv")
    return None


def unwrap_vec_normalize(env: Any) -> VecNormalize | None:
    """The layer that normalizes; None if there is none."""
    theirs = sys.modules.get("stable_baselines3.common.vec_env")
    kinds = (VecNormalize,) if theirs is None else (VecNormalize, theirs.VecNormalize)
    return unwrap_vec_wrapper(env, kinds)  # type: ignore[no-any-return]


def is_vecenv_wrapped(env: Any, vec_wrapper_class: Any) -> bool:
    """Whether one of the layers of `env` is of the class `vec_wrapper_class`."""
    return unwrap_vec_wrapper(env, vec_wrapper_class) is not None


def sync_envs_normalization(env: Any, eval_env: Any) -> None:
    """Give the statistics of `env`, of training, to `eval_env`, of evaluation, which must be wrapped alike."""
    source, target = unwrap_vec_normalize(env), unwrap_vec_normalize(eval_env)
    if (source is None) != (target is None):
        raise ValueError("one of the envs is wrapped in VecNormalize, and the other is not")
    if source is not None and target is not None:
        if getattr(source, "obs_rms", None) is not None:
            target.obs_rms = copy.deepcopy(source.obs_rms)
        target.ret_rms = copy.deepcopy(source.ret_rms)

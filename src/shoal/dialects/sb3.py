"""The pool as a Stable-Baselines3 VecEnv, with its wrappers: change the import, keep the script.

    from shoal.dialects.sb3 import SubprocVecEnv, VecNormalize, make_vec_env

Works without Stable-Baselines3. Where it is installed, what is made here passes its `isinstance` checks, so that its
algorithms, callbacks and own wrappers take it for theirs.
"""

from __future__ import annotations

import copy
import functools
import importlib
import os
import sys
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gymnasium import Space

from shoal.dialects.vec_env import (
    PoolVecEnv,
    TransformWrapper,
    VecEnv,
    VecEnvWrapper,
    as_list,
    check_maker,
    check_vec_env,
    make_one,
)
from shoal.ranks import Ranks
from shoal.wrappers import (
    CheckNan,
    ExtractDictObs,
    FrameStack,
    Monitor,
    MonitorEpisodes,
    Normalize,
    RecordVideo,
    RunningMeanStd,
    TransposeImage,
)
from shoal.wrappers.base import Rows
from shoal.wrappers.observations import transpose, transposed_space
from shoal.wrappers.statistics_files import data_of, read_statistics, write_statistics
from shoal.wrappers.video import tile_images

__all__ = [
    "DummyVecEnv", "Monitor", "SubprocVecEnv", "VecCheckNan", "VecEnv", "VecEnvWrapper", "VecExtractDictObs",
    "VecFrameStack", "VecMonitor", "VecNormalize", "VecTransposeImage", "VecVideoRecorder", "is_vecenv_wrapped",
    "make_vec_env", "pass_for_sb3", "sync_envs_normalization", "tile_images", "unwrap_vec_normalize",
    "unwrap_vec_wrapper",
]  # fmt: skip


@functools.cache
def pass_for_sb3() -> None:
    """Let Stable-Baselines3, if it is installed, take our classes for its own."""
    try:
        theirs = importlib.import_module("stable_baselines3.common.vec_env")
    except ImportError:  # not there, or without its torch
        return
    for cls in (
        VecEnv, VecEnvWrapper, DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize, VecCheckNan, VecMonitor,
        VecTransposeImage, VecVideoRecorder, VecExtractDictObs,
    ):  # fmt: skip
        getattr(theirs, cls.__name__).register(cls)


VecEnv.when_made.append(pass_for_sb3)


@functools.cache
def statistics_class() -> type[RunningMeanStd]:
    """Statistics that are Stable-Baselines3's as well, where it is installed: its VecNormalize insists on its own."""
    try:
        theirs = importlib.import_module("stable_baselines3.common.running_mean_std").RunningMeanStd
    except ImportError:
        return RunningMeanStd

    def reduce(self: RunningMeanStd) -> Any:
        return _statistics, (self.as_data(),)

    return type("RunningMeanStd", (RunningMeanStd, theirs), {"__reduce__": reduce})


def _statistics(data: Any) -> RunningMeanStd:
    return statistics_class().from_data(data)


class _Normalize(Normalize):
    """With statistics that Stable-Baselines3 takes for its own, and rewards of steps alone."""

    def apply(self, rows: Rows) -> None:
        """Learn from the rows, and normalize them."""
        before = self.old_reward
        super().apply(rows)
        if not rows.all_stepped and not rows.stepped.any():
            self.old_reward = before

    @property
    def statistics(self) -> Any:  # type: ignore[override]
        """What the statistics are made of."""
        return statistics_class()


class DummyVecEnv(PoolVecEnv):
    """Drop-in for SB3's: the envs live in this process, in `envs`, and are stepped one after the other.

    Args:
        env_fns: one function per env.
        pool_options: as for `shoal.Pool`.
    """

    def __init__(self, env_fns: Sequence[Callable[[], Any]], **pool_options: Any):
        pool_options.setdefault("backend", "serial")
        super().__init__(as_list(env_fns), **pool_options)
        self.metadata = self.pool.specs.metadata


class SubprocVecEnv(PoolVecEnv):
    """Drop-in for SB3's: the envs live in worker processes, several to each.

    Args:
        env_fns: one function per env.
        start_method: "forkserver" (default), "spawn" or "fork".
        pool_options: as for `shoal.Pool`: num_workers, on_error="restart", step_timeout, ...; with backend="hybrid" the
            caller steps some of the envs itself, which is faster and not isolated.
    """

    def __init__(self, env_fns: Sequence[Callable[[], Any]], start_method: str | None = None, **pool_options: Any):
        super().__init__(as_list(env_fns), start_method=start_method, **{"backend": "processes", **pool_options})


def vec_env(env: Any, num_envs: int | None = None, **pool_options: Any) -> PoolVecEnv:
    """What `shoal.make(..., api="sb3")` calls."""
    return PoolVecEnv(env, num_envs, **pool_options)


# ---- wrappers ------------------------------------------------------------------------------------------------


class VecFrameStack(TransformWrapper):
    """Stacks the last observations of each env.

    Args:
        n_stack: how many.
        channels_order: "first", "last" or None to find out; a dict of them for Dict observations.
    """

    def __init__(self, venv: Any, n_stack: int, channels_order: Any = None):
        super().__init__(venv, FrameStack(n_stack, channels_order, sb3_bounds=True))


class VecNormalize(TransformWrapper):
    """Normalizes observations and rewards by running statistics; the arguments are those of `shoal.wrappers.Normalize`.

    What `save` writes is data, and `load` runs no code; it reads what SB3's VecNormalize has saved as well.
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
            _Normalize(
                training, norm_obs, norm_reward, clip_obs, clip_reward, gamma, epsilon, norm_obs_keys, ranks, sync_every
            ),
        )  # fmt: skip

    @classmethod
    def load(cls, load_path: str | os.PathLike[str], venv: Any) -> VecNormalize:
        """Wrap `venv` with the settings and statistics of a file."""
        new = cls.__new__(cls)
        TransformWrapper.__init__(new, venv, _Normalize.load(load_path))
        return new

    def save_running_average(self, path: str | os.PathLike[str]) -> None:
        """Write the statistics alone into a folder, as Stable-Baselines 2 did."""
        for name in ("obs_rms", "ret_rms"):
            content = data_of(getattr(self.transform, name))
            if content is not None:
                write_statistics(os.path.join(path, f"{name}.npz"), content)

    def load_running_average(self, path: str | os.PathLike[str]) -> None:
        """Go on with the statistics of a folder: of `save_running_average`, here or in Stable-Baselines 2."""
        found = {}
        for name in ("obs_rms", "ret_rms"):
            files = [os.path.join(path, f"{name}.{ending}") for ending in ("npz", "pkl")]
            there = next((file for file in files if os.path.exists(file)), None)
            found[name] = None if there is None else read_statistics(there)
        if found["ret_rms"] is None:
            raise FileNotFoundError(f"{os.fspath(path)} has no ret_rms.npz in it: nothing was saved there")
        self.transform.set_statistics(found["obs_rms"], found["ret_rms"])  # type: ignore[attr-defined]

    def set_venv(self, venv: Any) -> None:
        """Wrap these envs: for one that was unpickled, which has none."""
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
        transform = _Normalize()
        vars(transform).update(state["transform"])
        self.__dict__.update(transform=transform, venv=None)


class VecCheckNan(TransformWrapper):
    """Warns, or raises, at the first NaN or infinite value: which env, which part, which step, and whose fault."""

    def __init__(self, venv: Any, raise_exception: bool = False, warn_once: bool = True, check_inf: bool = True):
        super().__init__(venv, CheckNan(raise_exception, warn_once, check_inf))


class VecMonitor(TransformWrapper):
    """Sums up episodes: `info["episode"]`, and a CSV file that SB3's `load_results` reads."""

    def __init__(self, venv: Any, filename: str | None = None, info_keywords: Sequence[str] = ()):
        check_vec_env(venv, "VecMonitor")
        if any(venv.env_is_wrapped(Monitor)):
            warnings.warn(
                "the envs have a Monitor each already: VecMonitor's `episode` takes the place of theirs", stacklevel=2
            )
        env_id = None
        if venv.has_attr("spec"):
            env_id = getattr(venv.get_attr("spec", [0])[0], "id", None)
        super().__init__(venv, MonitorEpisodes(filename, info_keywords, env_id=env_id))


class VecTransposeImage(TransformWrapper):
    """Images as [channels, height, width]."""

    def __init__(self, venv: Any, skip: bool = False):
        super().__init__(venv, TransposeImage(skip))

    def transpose_observations(self, observations: Any) -> Any:
        """A batch of observations, transposed."""
        return self.transform.turn(observations)  # type: ignore[attr-defined]

    @staticmethod
    def transpose_image(image: Any) -> Any:
        """An image, or a batch of them."""
        return transpose(image)

    @staticmethod
    def transpose_space(observation_space: Any, key: str = "") -> Space[Any]:
        """The space of such images."""
        return transposed_space(observation_space)


class VecVideoRecorder(TransformWrapper):
    """Records mp4 videos of all envs side by side."""

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


class VecExtractDictObs(TransformWrapper):
    """One part of Dict observations instead of all of it."""

    def __init__(self, venv: Any, key: str):
        super().__init__(venv, ExtractDictObs(key))


# ---- making them ---------------------------------------------------------------------------------------------


class MonitoredEnv:
    """Makes one env as SB3's make_vec_env does: with a Monitor, then the user's wrapper around it."""

    def __init__(
        self,
        env_id: Any,
        rank: int,
        seed: int | None,
        monitor_dir: str | None,
        wrapper_class: Callable[..., Any] | None,
        env_kwargs: Mapping[str, Any],
        monitor_kwargs: Mapping[str, Any],
        wrapper_kwargs: Mapping[str, Any],
        run: str,
    ):
        self.env_id, self.rank, self.seed, self.monitor_dir = env_id, rank, seed, monitor_dir
        self.wrapper_class, self.env_kwargs = wrapper_class, dict(env_kwargs)
        self.monitor_kwargs, self.wrapper_kwargs = {"run": run, **monitor_kwargs}, dict(wrapper_kwargs)

    def __call__(self) -> Any:
        env = make_one(self.env_id, self.env_kwargs)
        if self.seed is not None:
            env.action_space.seed(self.seed + self.rank)
        path = None if self.monitor_dir is None else os.path.join(self.monitor_dir, str(self.rank))
        env = Monitor(env, path, **self.monitor_kwargs)
        return env if self.wrapper_class is None else self.wrapper_class(env, **self.wrapper_kwargs)


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
    """As SB3's: monitored envs as one.

    Args:
        env_id: an id, or a function or class that makes an env.
        seed: for the first reset: env i gets `seed + i`.
        start_index: rank of the first env, for its seed's sake and its monitor file's name.
        monitor_dir: folder for the monitor files; None writes none.
        wrapper_class: put around each env, outside of its Monitor.
        vec_env_cls: DummyVecEnv (default), SubprocVecEnv, or any other that takes a list of functions.
    """
    check_maker(env_id)
    run = uuid.uuid4().hex
    fns = [
        MonitoredEnv(
            env_id, start_index + i, seed, monitor_dir, wrapper_class, env_kwargs or {}, monitor_kwargs or {},
            wrapper_kwargs or {}, run,
        )
        for i in range(n_envs)
    ]  # fmt: skip
    if monitor_dir is not None:
        os.makedirs(monitor_dir, exist_ok=True)
    envs = (vec_env_cls or DummyVecEnv)(fns, **(vec_env_kwargs or {}))
    envs.seed(seed)
    return envs


def unwrap_vec_wrapper(env: Any, vec_wrapper_class: Any) -> Any:
    """The layer of this class, from the outside in; None if there is none."""
    while env is not None:
        if isinstance(env, vec_wrapper_class):
            return env
        env = env.__dict__.get("venv")
    return None


def unwrap_vec_normalize(env: Any) -> VecNormalize | None:
    """The layer that normalizes; None if there is none."""
    theirs = sys.modules.get("stable_baselines3.common.vec_env")
    kinds = (VecNormalize,) if theirs is None else (VecNormalize, theirs.VecNormalize)
    found: VecNormalize | None = unwrap_vec_wrapper(env, kinds)
    return found


def is_vecenv_wrapped(env: Any, vec_wrapper_class: Any) -> bool:
    """Whether one of the layers is of this class."""
    return unwrap_vec_wrapper(env, vec_wrapper_class) is not None


def sync_envs_normalization(env: Any, eval_env: Any) -> None:
    """Give the statistics of training to the envs of evaluation, which must be wrapped alike."""
    source, target = unwrap_vec_normalize(env), unwrap_vec_normalize(eval_env)
    if (source is None) != (target is None):
        raise ValueError("one of the envs is wrapped in VecNormalize, and the other is not")
    if source is not None and target is not None:
        if getattr(source, "obs_rms", None) is not None:
            target.obs_rms = copy.deepcopy(source.obs_rms)
        target.ret_rms = copy.deepcopy(source.ret_rms)

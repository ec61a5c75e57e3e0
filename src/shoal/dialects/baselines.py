"""The pool in the words of OpenAI Baselines: `make_vec_env`, its vector envs, its Monitor and its wrappers.

    from shoal.dialects.baselines import make_vec_env

Step returns four values, over Gymnasium envs and envs of the old `gym` alike. Baselines itself is not needed. Shoal
adds `env_method`, `get_attr`, `set_attr`, and the last observation of each episode as `info["terminal_observation"]`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces as gym_spaces

from shoal.dialects.base import as_list, check_maker, make_one
from shoal.dialects.vec_env import PoolVecEnv, TransformWrapper, VecEnv, VecEnvWrapper, VecExtractDictObs
from shoal.envs.adapt import adapt
from shoal.ranks import LAUNCHER_VARIABLES, Ranks, current, mpi_rank, rank_seed
from shoal.wrappers import FrameStack, MonitorEpisodes, Normalize
from shoal.wrappers.monitor import Monitor as _Monitor
from shoal.wrappers.video import tile_images

__all__ = [
    "AlreadySteppingError", "BaselinesVecEnv", "DummyVecEnv", "Monitor", "NotSteppingError", "ShmemVecEnv",
    "SubprocVecEnv", "VecEnv", "VecEnvObservationWrapper", "VecEnvWrapper", "VecExtractDictObs", "VecFrameStack",
    "VecMonitor", "VecNormalize", "clear_mpi_env_vars", "make_env", "make_vec_env", "mpi_rank", "set_global_seeds",
    "tile_images",
]  # fmt: skip


class AlreadySteppingError(Exception):
    """step_async was called while a step is under way."""


class NotSteppingError(Exception):
    """step_wait was called without step_async before it."""


class BaselinesVecEnv(PoolVecEnv):
    """A pool as Baselines' VecEnv; the base of the three below.

    Args:
        env, num_envs, pool_options: as for `shoal.Pool`.
        spaces: (observation space, action space), which the envs must have; None for any.
    """

    _already_stepping, _not_stepping = AlreadySteppingError, NotSteppingError

    def __init__(self, env: Any, num_envs: int | None = None, spaces: Any = None, **pool_options: Any):
        super().__init__(env, num_envs, **pool_options)
        self.spec = self.pool.specs.spec
        if spaces is not None and tuple(spaces) != (self.observation_space, self.action_space):
            self.close()
            raise ValueError(
                f"spaces: the envs have {(self.observation_space, self.action_space)}, not {tuple(spaces)}"
            )

    def render(self, mode: str | None = "human") -> Any:
        """All envs' images as one: shown in a window ("human"), or returned ("rgb_array")."""
        return super().render(mode)


class DummyVecEnv(BaselinesVecEnv):
    """The envs live in this process, in `envs`, and are stepped one after another.

    Args:
        env_fns: a list of functions that make one env each.
        **pool_options: options of a `shoal.Pool`: num_workers, on_error, step_timeout, ...
    """

    def __init__(self, env_fns: Sequence[Callable[[], Any]], **pool_options: Any):
        pool_options.setdefault("backend", "serial")
        super().__init__(as_list(env_fns), **pool_options)


class SubprocVecEnv(BaselinesVecEnv):
    """The envs live in worker processes.

    Args:
        env_fns: a list of functions that make one env each.
        spaces: (observation space, action space), which the envs must have; None for any.
        context: how processes start, "spawn", "forkserver" or "fork".
        in_series: how many envs one process steps, one after another. With 1, Shoal chooses: one process for each core.
        pool_options: as for `shoal.Pool`.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], Any]],
        spaces: Any = None,
        context: str = "spawn",
        in_series: int = 1,
        **pool_options: Any,
    ):
        count = len(as_list(env_fns))
        if isinstance(in_series, bool) or not isinstance(in_series, int) or in_series < 1 or count % in_series:
            raise ValueError(f"in_series: expected a number that divides the {count} envs, found {in_series!r}")
        if in_series > 1:
            pool_options.setdefault("num_workers", count // in_series)
        super().__init__(
            as_list(env_fns), spaces=spaces, start_method=context, **{"backend": "processes", **pool_options}
        )


class ShmemVecEnv(SubprocVecEnv):
    """The same as SubprocVecEnv: Shoal always keeps observations and actions in shared memory."""


class Monitor(_Monitor):
    """Sums up the episodes of one env: `info["episode"]` = {"r", "l", "t"} at each end, and a line in a CSV file.

    Args:
        filename: where the CSV file goes; None for no file.
        allow_early_resets: whether an episode may be reset before its end.
        reset_keywords, info_keywords: what else of resets and infos each line has.
        run: a number of the run, for the file's name.
    """

    def __init__(
        self,
        env: Any,
        filename: str | os.PathLike[str] | None,
        allow_early_resets: bool = False,
        reset_keywords: Sequence[str] = (),
        info_keywords: Sequence[str] = (),
        run: str | None = None,
    ):
        super().__init__(adapt(env), filename, allow_early_resets, reset_keywords, info_keywords, run=run)


class VecEnvObservationWrapper(VecEnvWrapper):
    """Base of users' own wrappers that change observations alone, in `process`."""

    def process(self, obs: Any) -> Any:
        """A batch of observations, changed."""
        raise NotImplementedError

    def reset(self) -> Any:
        return self.process(self.venv.reset())

    def step_wait(self) -> tuple[Any, Any, Any, Any]:
        obs, rewards, dones, infos = self.venv.step_wait()
        return self.process(obs), rewards, dones, infos


class VecFrameStack(TransformWrapper):
    """Stacks the last `nstack` observations of `venv` along the last axis."""

    def __init__(self, venv: Any, nstack: int):
        super().__init__(venv, FrameStack(nstack, "last"))
        self.nstack = nstack


class VecNormalize(TransformWrapper):
    """Normalizes observations (`ob`) and rewards (`ret`) by running statistics. `use_tf` has no effect.

    Args:
        venv: a VecEnv.
        clipob, cliprew, gamma, epsilon, ranks, sync_every: clip_obs, clip_reward and so on of
            `shoal.wrappers.Normalize`.
    """

    def __init__(
        self,
        venv: Any,
        ob: bool = True,
        ret: bool = True,
        clipob: float = 10.0,
        cliprew: float = 10.0,
        gamma: float = 0.99,
        epsilon: float = 1e-8,
        use_tf: bool = False,
        ranks: Ranks | None = None,
        sync_every: int | None = None,
    ):
        super().__init__(
            venv,
            Normalize(
                norm_obs=ob, norm_reward=ret, clip_obs=clipob, clip_reward=cliprew, gamma=gamma, epsilon=epsilon,
                ranks=ranks, sync_every=sync_every,
            ),
        )  # fmt: skip

    ob_rms = property(attrgetter("transform.obs_rms"), doc="Mean and variance of observations; None without them.")


class VecMonitor(TransformWrapper):
    """Sums up the episodes of all envs; `keep_buf` of them stay in `epret_buf` and `eplen_buf`.

    Args:
        venv: a VecEnv.
        filename, info_keywords: as for Monitor.
    """

    def __init__(self, venv: Any, filename: str | None = None, keep_buf: int = 0, info_keywords: Sequence[str] = ()):
        super().__init__(venv, MonitorEpisodes(filename, info_keywords, keep=keep_buf))
        self.epret_buf, self.eplen_buf = self.transform.last_returns, self.transform.last_lengths  # type: ignore[attr-defined]

    epcount = property(attrgetter("transform.episode_count"), doc="How many episodes have ended.")


@contextlib.contextmanager
def clear_mpi_env_vars() -> Iterator[None]:
    """Hide mpirun from the processes that are started inside of the `with` block: importing mpi4py would hang there.

    Shoal's own workers never see mpirun.
    """
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(LAUNCHER_VARIABLES)}
    try:
        yield
    finally:
        os.environ.update(hidden)


def set_global_seeds(seed: int | None) -> None:
    """Seed the global generators of Python and numpy. Each rank adds 1000 times its number; None does nothing."""
    if seed is not None:
        seed += 1000 * current().rank
        random.seed(seed)
        np.random.seed(seed % 2**32)


def make_vec_env(
    env_id: Any,
    env_type: str,
    num_env: int,
    seed: int | None,
    wrapper_kwargs: Mapping[str, Any] | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    start_index: int = 0,
    reward_scale: float = 1.0,
    flatten_dict_observations: bool = True,
    initializer: Callable[..., Any] | None = None,
    force_dummy: bool = False,
    logger_dir: str | None = None,
    **pool_options: Any,
) -> SubprocVecEnv | DummyVecEnv:
    """Make many monitored envs as one VecEnv, in worker processes if there are several.

    Args:
        env_id: an id, or a function or class that makes an env.
        env_type: "atari" adds the usual preprocessing, which `wrapper_kwargs` is for; all others add nothing.
        seed: env i gets `seed + start_index + i`, and 10000 more for each rank (see `shoal.ranks.current`).
        reward_scale: a factor for all rewards.
        flatten_dict_observations: Dict observations as one array.
        initializer: called as `initializer(mpi_rank=..., subrank=...)` before each env is made, in the same process.
        force_dummy: keep the envs in this process.
        logger_dir: folder for the monitor files `<rank>.<start_index + i>.monitor.csv`; None writes none.
        pool_options: as for `shoal.Pool`.
        num_env, env_kwargs: how many, and arguments for each env.
    """
    check_maker(env_id)
    ranks = current()
    seed = rank_seed(seed, ranks)
    make_one_env = functools.partial(
        make_env, env_id, env_type, ranks.rank, seed=seed, reward_scale=reward_scale,
        flatten_dict_observations=flatten_dict_observations, wrapper_kwargs=wrapper_kwargs, env_kwargs=env_kwargs,
        logger_dir=logger_dir, initializer=initializer, run=uuid.uuid4().hex,
    )  # fmt: skip
    fns = [functools.partial(make_one_env, subrank=start_index + i) for i in range(num_env)]
    set_global_seeds(seed)
    alone = force_dummy or num_env == 1
    envs = DummyVecEnv(fns, **pool_options) if alone else SubprocVecEnv(fns, **pool_options)
    if seed is not None:
        envs.seed(seed + start_index)
    return envs


def make_env(
    env_id: Any,
    env_type: str,
    mpi_rank: int = 0,
    subrank: int = 0,
    seed: int | None = None,
    reward_scale: float = 1.0,
    gamestate: Any = None,
    flatten_dict_observations: bool = True,
    wrapper_kwargs: Mapping[str, Any] | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    logger_dir: str | None = None,
    initializer: Callable[..., Any] | None = None,
    run: str | None = None,
) -> Any:
    """Make one env, by its id or by a function or class, with a Monitor.

    Args:
        env_id, env_type, seed, reward_scale, flatten_dict_observations, wrapper_kwargs, env_kwargs: as for
            `make_vec_env`.
        gamestate: for "retro", which is not supported.
        logger_dir: folder for the monitor file `<mpi_rank>.<subrank>.monitor.csv`.
        initializer: called as `initializer(mpi_rank=..., subrank=...)` first.
        run: a name for the run. An env that is built again continues its file, if that is of the same run.

    Raises:
        ValueError: `env_type` is "retro", or `wrapper_kwargs` are given for another type than "atari".
    """
    if initializer is not None:
        initializer(mpi_rank=mpi_rank, subrank=subrank)
    if env_type == "retro" or gamestate is not None:
        raise ValueError("env_type: gym-retro has no Gymnasium envs; pass a function that makes one of yours as env_id")
    wrapping = dict(wrapper_kwargs or {})
    env = make_one(env_id, env_kwargs or {})
    if env_type == "atari":
        env = gymnasium.wrappers.AtariPreprocessing(
            env, noop_max=30, frame_skip=4, screen_size=84, terminal_on_life_loss=False, grayscale_newaxis=True
        )
    elif wrapping:
        raise ValueError(f'wrapper_kwargs: only env_type="atari" takes them, found {sorted(wrapping)} for {env_type!r}')
    if flatten_dict_observations and isinstance(env.observation_space, gym_spaces.Dict):
        env = gymnasium.wrappers.FlattenObservation(env)
    if seed is not None:
        env.action_space.seed(seed + subrank)
    path = None if logger_dir is None else os.path.join(logger_dir, f"{mpi_rank}.{subrank}")
    env = Monitor(env, path, allow_early_resets=True, run=run)
    if env_type == "atari":
        env = _wrap_deepmind(env, **wrapping)
    if isinstance(env.action_space, gym_spaces.Box):
        env = ClipActions(env)
    return env if reward_scale == 1 else RewardScaler(env, reward_scale)


class ClipActions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Brings actions into the bounds of their space; NaN becomes 0."""

    def step(self, action: Any) -> Any:
        space: Any = self.env.action_space
        return self.env.step(np.clip(np.nan_to_num(action), space.low, space.high).astype(space.dtype))


class RewardScaler(gymnasium.RewardWrapper[Any, Any]):
    """Multiplies rewards by a factor."""

    def __init__(self, env: Any, scale: float = 0.01):
        super().__init__(env)
        self.scale = scale

    def reward(self, reward: Any) -> Any:
        return reward * self.scale


def _wrap_deepmind(
    env: Any, episode_life: bool = True, clip_rewards: bool = True, frame_stack: bool = False, scale: bool = False
) -> Any:
    """Wrap an Atari env as DeepMind's agents see it: a life is an episode, rewards are signs, frames may be stacked."""
    if episode_life:
        env = EpisodicLife(env)
    if "FIRE" in env.unwrapped.get_action_meanings():
        env = FireReset(env)
    if scale:
        space = gym_spaces.Box(0.0, 1.0, env.observation_space.shape, np.float32)
        env = gymnasium.wrappers.TransformObservation(env, lambda obs: obs.astype(np.float32) / 255.0, space)
    if clip_rewards:
        env = gymnasium.wrappers.TransformReward(env, lambda reward: np.sign(float(reward)))
    if frame_stack:
        env = gymnasium.wrappers.FrameStackObservation(env, 4)
        frames: Any = env.observation_space
        count, height, width, channels = frames.shape
        stacked = gym_spaces.Box(frames.low.min(), frames.high.max(), (height, width, count * channels), frames.dtype)
        env = gymnasium.wrappers.TransformObservation(env, lambda each: np.concatenate(list(each), axis=-1), stacked)
    return env


class EpisodicLife(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Ends the episode when a life is lost. The next reset continues the game, unless it is over."""

    def __init__(self, env: Any):
        super().__init__(env)
        self.lives, self.was_real_done = 0, True

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.was_real_done = bool(terminated or truncated)
        lives = self.env.unwrapped.ale.lives()  # type: ignore[attr-defined]
        terminated = terminated or 0 < lives < self.lives
        self.lives = lives
        return observation, reward, terminated, truncated, info

    def reset(self, **kwargs: Any) -> Any:
        if self.was_real_done or kwargs.get("seed") is not None:
            observation, info = self.env.reset(**kwargs)
        else:  # an empty step leads past the lost life
            observation, _, terminated, truncated, info = self.env.step(0)
            if terminated or truncated:
                observation, info = self.env.reset(**kwargs)
        self.was_real_done = False
        self.lives = self.env.unwrapped.ale.lives()  # type: ignore[attr-defined]
        return observation, info


class FireReset(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Fires after each reset, for games that begin only then."""

    def reset(self, **kwargs: Any) -> Any:
        self.env.reset(**kwargs)
        observation, _, terminated, truncated, info = self.env.step(1)
        return self.env.reset(**kwargs) if terminated or truncated else (observation, info)

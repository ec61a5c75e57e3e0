"""What EnvPool's `make` was given, sorted and checked, and the spec that describes the envs."""

from __future__ import annotations

import functools
import keyword
import re
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import numpy as np
from gymnasium import Space

from shoal import dialects
from shoal.backends.registry import is_batched
from shoal.dialects.time_steps import Specs, spec_of
from shoal.envs.functions import FromSpec, as_env_fns, with_time_limit
from shoal.options import PoolOptions
from shoal.pool import Pool
from shoal.support.checks import whole_number

_POOL_OPTIONS = {option.name for option in fields(PoolOptions)} - {"env_kwargs"}
_DEFAULT_SEED = 42  # EnvPool's

# Options of EnvPool's own envs, each with the wrapper that does the same for an env of Gymnasium. Options that envs of
# Gymnasium take as well (mode, difficulty, frame_skip, ...) are not here: they go to the env.
_OF_ATARI = (
    "img_height", "img_width", "gray_scale", "noop_max", "episodic_life", "zero_discount_on_life_loss",
    "use_inter_area_resize",
)  # fmt: skip
_ENVPOOL_ONLY = {
    **dict.fromkeys(_OF_ATARI, "gymnasium.wrappers.AtariPreprocessing"),
    "stack_num": "gymnasium.wrappers.FrameStackObservation",
    "use_fire_reset": "a wrapper",
    "reward_clip": "gymnasium.wrappers.TransformReward",
    "from_pixels": "gymnasium.wrappers.AddRenderObservation",
}


@dataclass(frozen=True)
class EnvPoolTask:
    """What `make` was given, sorted: the env, the options of its pool, and the config."""

    name: str
    env: Any
    num_envs: int | None
    pool_options: dict[str, Any]
    config: dict[str, Any]

    def spec(self, pool: Pool, specs: Specs | None = None) -> EnvSpec:
        """The spec of envs with the spaces of this pool."""
        config = _tuple_type("Config", tuple(self.config))(*self.config.values())
        return EnvSpec(self.name, config, pool.single_observation_space, pool.single_action_space, specs)


def read_task(task_id: Any, options: Mapping[str, Any]) -> EnvPoolTask:
    """Sort the keywords of `make` into those of EnvPool, of the pool and of the env."""
    left = dict(options)
    config = _read_config(left)
    env_kwargs = left.pop("env_kwargs", None) or {}
    pool_options = {name: left.pop(name) for name in sorted(_POOL_OPTIONS & set(left))}
    for name in left:
        if name in _ENVPOOL_ONLY:
            raise TypeError(
                f"{name} is for EnvPool's own envs, such as its Atari: wrap the env instead ({_ENVPOOL_ONLY[name]}), "
                f"or, where its constructor takes it, say env_kwargs={{{name!r}: ...}}"
            )
    env_kwargs = {**left, **env_kwargs}
    threads, steps = config["num_threads"], config["max_episode_steps"]
    if threads and pool_options.setdefault("num_workers", threads) != threads:
        raise ValueError("num_threads and num_workers are the same: leave one out")
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
            spec = fns[0].spec
            _fill(config, max_episode_steps=spec.max_episode_steps, reward_threshold=spec.reward_threshold)
        # A function that makes many envs stays one object.
        limited = {id(fn): fn if steps is None else with_time_limit(fn, steps) for fn in fns}
        env = [limited[id(fn)] for fn in fns]
    config["num_envs"] = count
    _fill(config, batch_size=count)
    config["batch_size"] = pool_options["batch_size"] = whole_number("batch_size", config["batch_size"], 1, count)
    pool_options["seed"] = config["env_seed"] or config["seed"]
    config |= {name: value for name, value in env_kwargs.items() if name not in config}
    own_name = getattr(task_id, "id", getattr(task_id, "__name__", type(task_id).__name__))
    return EnvPoolTask(task_id if isinstance(task_id, str) else str(own_name), env, num_envs, pool_options, config)


def _read_config(left: dict[str, Any]) -> dict[str, Any]:
    """Take EnvPool's own options out of `left`. A value of None is filled in when the env or the pool is known."""
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


@dataclass(frozen=True)
class EnvSpec:
    """The spaces of the envs, and the config that they were made with.

    Attributes:
        id: the task id, or the name of the class or function.
        config: a named tuple of what `make` was given, defaults included.
        observation_space, action_space: of one env.
        specs: the specs of dm_env, for envs that have some of their own.
    """

    id: str
    config: Any
    observation_space: Space[Any]
    action_space: Space[Any]
    specs: Specs | None = field(default=None, repr=False)

    num_envs = property(attrgetter("config.num_envs"), doc="How many envs.")
    batch_size = property(attrgetter("config.batch_size"), doc="How many of them `recv` waits for.")
    reward_threshold = property(
        attrgetter("config.reward_threshold"), doc="The return at which the task counts as solved, or None."
    )
    gymnasium_observation_space = property(attrgetter("observation_space"), doc="The same as `observation_space`.")
    gymnasium_action_space = property(attrgetter("action_space"), doc="The same as `action_space`.")

    def observation_spec(self) -> Any:
        """Of one row of an observation of `env_type="dm"`, as a named tuple; needs dm_env."""
        make_spec = dialects.dm_env.make_spec
        found = spec_of(self.observation_space, make_spec, "obs") if self.specs is None else self.specs.observation
        env_id = make_spec((), np.int32, 0, self.num_envs - 1, "env_id")
        return named_state(env_id, found)

    def action_spec(self) -> Any:
        """Of one action; needs dm_env."""
        make_spec = dialects.dm_env.make_spec
        return spec_of(self.action_space, make_spec, "action") if self.specs is None else self.specs.action


def named_state(env_id: Any, obs: Any) -> Any:
    """An observation, or its spec, as the named tuple that EnvPool has in TimeSteps."""
    parts = dict(obs) if isinstance(obs, Mapping) else {"obs": obs}
    return _named("State", {"env_id": env_id, "players": {"env_id": env_id}}, parts)


def _named(name: str, *parts: Mapping[str, Any]) -> Any:
    """Nested mappings as nested named tuples. A key that is no name, or is there twice, becomes `_0`, `_1`, ..."""
    items = [item for part in parts for item in part.items()]
    kind = _tuple_type(name, tuple(str(key) for key, _ in items))
    return kind(*(_named(str(key), value) if isinstance(value, Mapping) else value for key, value in items))


@functools.lru_cache
def _tuple_type(name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    words = [re.sub(r"\W", "_", word) for word in fields]
    plain = name.isidentifier() and not keyword.iskeyword(name)
    return namedtuple(name if plain else "State", words, rename=True)

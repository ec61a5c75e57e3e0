"""The compiled envs of a pool: their states, and what steps all of them (`shoal.compiled.worker`)."""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from shoal.compiled.definition import Definition, define
from shoal.compiled.env import Env
from shoal.envs.group import MODES
from shoal.errors import BadEnv
from shoal.support.cores import usable_cores

__all__ = ["CompiledEnvs", "make_envs"]


def make_envs(env: Any, num_envs: int, env_kwargs: Mapping[str, Any], num_workers: int | None) -> CompiledEnvs:
    """Compile a class, or load what was compiled before, and make so many envs of it.

    Raises:
        BadEnv: it is no class for that, or cannot be compiled, for reasons in the user's own lines.
        ImportError: Numba is not installed.
    """
    kwargs = dict(env_kwargs)
    debug = bool(kwargs.pop("debug", os.environ.get("SHOAL_COMPILED_DEBUG", "") not in ("", "0")))
    env_class = find_class(env)
    definition = define(env_class, kwargs)
    function = env_class.__shoal_kernel__(definition, debug)
    return CompiledEnvs(definition, num_envs, function, num_workers or usable_cores(), debug)


def find_class(env: Any) -> type[Env]:
    """The class that is meant: itself, or the library's of this id."""
    if isinstance(env, type) and issubclass(env, Env):
        return env
    if isinstance(env, str):
        library = importlib.import_module("shoal.compiled.library")
        try:
            found: type[Env] = library.find(env)
        except LookupError as error:
            raise BadEnv(str(error)) from None
        return found
    raise BadEnv(
        f'backend="compiled" runs classes that derive from shoal.compiled.Env, found {env!r}: see docs/compiled.md, '
        "or use another backend"
    )


class CompiledEnvs:
    """Many envs of one class, as a group whose lanes may be stepped and reset one by one.

    Attributes:
        states: one record for each env; may be looked at and changed between steps.
    """

    can_be_absent, modes = False, MODES

    def __init__(self, definition: Definition, num_envs: int, function: int, threads: int, debug: bool):
        self.definition, self.num_envs, self.function = definition, num_envs, function
        self.threads, self.debug = threads, debug
        self.group_size = definition.num_agents
        self.num_lanes = num_envs * self.group_size
        self.together, self.resets_alone = self.group_size > 1, self.group_size == 1
        self.lane_names = list(range(self.group_size)) if self.together else None
        self.single_observation_space, self.single_action_space = definition.observation_space, definition.action_space
        self.states = definition.new_states(num_envs).view(np.recarray)
        self.seeds = np.frombuffer(secrets.token_bytes(8 * num_envs), np.uint64).copy()
        self.episodes = np.full(num_envs, -1, np.int64)
        self.rngs = np.zeros((num_envs, 1), np.uint64)
        self.autoreset = "next_step"

    @property
    def env(self) -> CompiledEnvs:
        """What calls of the caller are meant for."""
        return self

    def __getattr__(self, name: str) -> Any:
        """What the class itself says: its metadata and whatever else."""
        if name.startswith("_") or name == "definition":
            raise AttributeError(name)
        return getattr(self.definition.env, name)

    def use(self, autoreset: str) -> None:
        """Any mode will do."""
        self.autoreset = autoreset

    def make_stepper(self, *args: Any, **options: Any) -> Any:
        """What steps them in a worker's block."""
        from shoal.compiled.worker import CompiledStepper

        return CompiledStepper(*args, **options)

    def close(self) -> None:
        """Nothing to give back: the stepper ends its threads."""

"""The compiled envs of a pool: their states. `shoal.compiled.worker` steps them."""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.compiled.definition import Definition, define
from shoal.compiled.env import Env
from shoal.envs.autoreset import KERNEL_MODES
from shoal.errors import BadEnv
from shoal.support.cores import usable_cores


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
    """Return the class that is meant: itself, or the library's class of this id."""
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
    """Many envs of one class, as a group; its lanes may be stepped and reset one by one.

    Attributes:
        states: one record for each env; may be looked at and changed between steps.
    """

    can_be_absent, modes = False, KERNEL_MODES

    def __init__(self, definition: Definition, num_envs: int, function: int, threads: int, debug: bool):
        self.definition, self.num_envs, self.function = definition, num_envs, function
        self.threads, self.debug = threads, debug
        self.group_size = definition.num_agents
        self.num_lanes = num_envs * self.group_size
        self.together, self.resets_alone = self.group_size > 1, self.group_size == 1
        self.lane_names = list(range(self.group_size)) if self.together else None
        self.single_observation_space, self.single_action_space = definition.observation_space, definition.action_space
        self.states = definition.new_states(num_envs).view(np.recarray)
        self.fields = (*(definition.dtype.names or ()), "state")  # what each env has for itself
        self._bytes = np.asarray(self.states).view(np.uint8).reshape(num_envs, -1)
        self.seeds = np.frombuffer(secrets.token_bytes(8 * num_envs), np.uint64).copy()
        self.episodes = np.full(num_envs, -1, np.int64)
        self.rngs = np.zeros((num_envs, 1), np.uint64)

    @property
    def env(self) -> CompiledEnvs:
        """The object that the caller's functions get."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the class itself, such as its metadata."""
        if name.startswith("_") or name == "definition":
            raise AttributeError(name)
        return getattr(self.definition.env, name)

    def use(self, autoreset: str) -> None:
        """See GroupEnv. The kernel gets the mode from the stepper."""

    def make_stepper(self, *args: Any) -> Any:
        """Make the stepper that runs them in a worker's block."""
        from shoal.compiled.worker import KernelStepper

        return KernelStepper(*args)

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of the class that the lanes share."""
        if not hasattr(self.definition.env, name):
            raise AttributeError(f"{self.definition.name} has no attribute {name!r}")
        return getattr(self.definition.env, name)

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Refuse to set anything but fields."""
        fields = ", ".join(self.fields[:-1])
        raise AttributeError(f"{self.definition.name} has no field {name!r} to set: its fields are {fields}")

    # ---- rows: each lane is one row; the agents of an env share its state --------------------------------------

    def get_rows(self, name: str, rows: Sequence[int]) -> list[Any]:
        """Return copies of a field, or of the whole state, for these lanes."""
        column = self.states if name == "state" else self.states[name]
        values = [column[row // self.group_size] for row in rows]
        return [value.copy() if name == "state" or isinstance(value, np.ndarray) else value for value in values]

    def set_rows(self, name: str, rows: Sequence[int], values: Sequence[Any]) -> None:
        """Set a field, or the whole state, of these lanes."""
        column = self.states if name == "state" else self.states[name]
        for row, value in zip(rows, values, strict=True):
            column[row // self.group_size] = value

    def save_rows(self, rows: Sequence[int]) -> list[dict[str, Any] | None]:
        """Return the states of these lanes; None for a lane that was saved with the first lane of its env."""
        return [None if row % self.group_size else self._save(row // self.group_size) for row in rows]

    def _save(self, env: int) -> dict[str, Any]:
        return {
            "state": self._bytes[env].copy(), "rng": self.rngs[env].copy(), "seed": self.seeds[env : env + 1].copy(),
            "episode": self.episodes[env : env + 1].copy(),
        }  # fmt: skip

    def load_rows(self, rows: Sequence[int], states: Sequence[Any]) -> None:
        """Load what `save_rows` has returned."""
        for row, state in zip(rows, states, strict=True):
            env, agent = divmod(row, self.group_size)
            if agent:
                continue
            if not isinstance(state, dict) or set(state) != {"state", "rng", "seed", "episode"}:
                raise ValueError('the state was not saved by backend="compiled", and cannot be loaded by it')
            self._bytes[env], self.rngs[env] = state["state"], state["rng"]
            self.seeds[env], self.episodes[env] = state["seed"][0], state["episode"][0]

    def close(self) -> None:
        """Do nothing: the stepper ends its threads."""

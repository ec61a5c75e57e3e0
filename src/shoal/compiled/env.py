"""The base class of envs that are written in Python and can be compiled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium import Space

from shoal.compiled import kernels
from shoal.compiled.definition import Definition
from shoal.compiled.plain import plain_env
from shoal.support.optional_dependencies import install


class Env:
    """The base of envs that can be compiled. A subclass has these attributes and static methods.

    `__init__` may set attributes in place of the class's, from `env_kwargs`.

    Attributes:
        observation_space, action_space: of one agent. Made of arrays: Box, Discrete, MultiDiscrete, MultiBinary, and
            Dict and Tuple of these.
        max_episode_steps: steps after which an episode is truncated; None for no limit.
        state: the fields of an env's state: float, int, bool, a numpy dtype, or (one of these, shape). All are zero
            when `reset` is called.
        params: more fields, with their defaults: numbers or arrays. They stay as they are, and can be set for each env
            while a pool runs (`pool.set_attr`).
        num_agents: how many agents one env has. They end together, and each is a lane of the pool.

    Methods, all static:
        reset(state, rng): begin an episode.
        step(state, action, rng): one step; returns (reward, terminated). The action is an int (Discrete), a number (a
            Box without a shape) or an array; if the space is nested, a tuple of these, one for each leaf. Its numbers
            have 64 bits, whatever the space says. With several agents step(state, action, reward, rng): `action` has a
            row for each of them, `step` writes `reward` and returns `terminated`.
        observe(state, obs): write the observation into `obs`, which is all zeros: the array of one env (of one element,
            if the space has no shape), with a row for each agent if there are several; a tuple of such arrays if the
            space is nested.
    """

    observation_space: Space[Any]
    action_space: Space[Any]
    max_episode_steps: int | None = None
    state: Mapping[str, Any] = {}
    params: Mapping[str, Any] = {}
    num_agents: int = 1
    metadata: Mapping[str, Any] = {"render_modes": []}
    render_mode: str | None = None

    @classmethod
    def __shoal_env__(cls, **kwargs: Any) -> Any:
        """Make an env that steps this class as plain Python; every backend but "compiled" and "cuda" runs it."""
        return plain_env(cls, kwargs)

    @classmethod
    def __shoal_missing__(cls) -> str:
        """Say what this machine lacks to compile it, and how to get it; "" for nothing."""
        return "" if kernels.available() else f"Numba is not installed: {install('compiled')}"

    @classmethod
    def __shoal_kernel__(cls, definition: Definition, debug: bool) -> int:
        """Return the address of the code that steps many envs of this class; see native/task.h.

        Raises:
            BadEnv: it cannot be compiled.
            ImportError: Numba is not installed.
        """
        return kernels.kernel_address(definition, debug)

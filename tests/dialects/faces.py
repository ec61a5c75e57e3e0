"""One adapter for each dialect: how it says what all of them say. Workers import this module: nothing heavy here.

A `Face` opens envs in its dialect and speaks to them; `test_face_contract.py` asks the same of all faces. A new dialect
is one more class here, and one more entry in FACES.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np

import shoal
from agent_envs import Parallel
from shoal.dialects.baselines import NotSteppingError

EnvFn = Callable[[], Any]
Step = tuple[Any, Any, Any]  # observations, rewards, whether the episode is over; a row for each env


class Face:
    """What the contract needs to know of a dialect; most answer with Gymnasium's five values."""

    api = ""
    autoreset = "next_step"
    in_halves = True  # whether a step can be begun and waited for
    lists_of_seeds = True
    begins_by_itself = False  # whether a step before any reset is one
    noted = False  # whether errors of envs are the envs' very own, with a note, in place of EnvErrors
    closed: type[Exception] = shoal.PoolClosed  # raised after close
    nothing_pending: type[Exception] = shoal.NothingPending  # raised where no step was begun
    mismatch: type[Exception] = shoal.SpaceMismatch  # raised for envs that do not fit together
    bounds_may_differ = False  # whether envs may have spaces of other bounds than the first one
    options: dict[str, Any] = {}

    def open(self, fns: Sequence[EnvFn], backend: str = "serial", **options: Any) -> Any:
        workers = {} if backend == "serial" else {"num_workers": 2}
        return shoal.make(list(fns), api=self.api, backend=backend, **{**self.options, **workers, **options})

    def count(self, envs: Any) -> int:
        return int(envs.num_envs)

    def spaces(self, envs: Any) -> tuple[Any, Any]:
        """Of one env: (shape, type) of observations and of actions."""
        return _described(envs.single_observation_space), _described(envs.single_action_space)

    def reset(self, envs: Any, seed: Any = None) -> Any:
        return envs.reset(seed=seed)[0]

    def step(self, envs: Any, actions: Any) -> Step:
        return _joined(envs.step(actions))

    def begin(self, envs: Any, actions: Any) -> None:
        envs.step_async(actions)

    def wait(self, envs: Any) -> Step:
        return _joined(envs.step_wait())

    def pool(self, envs: Any) -> Any:
        return envs.pool

    def other_uses(self, envs: Any) -> list[Callable[[], Any]]:
        """What else must be refused after close."""
        return []


class GymnasiumFace(Face):
    api = "gymnasium"
    closed = gymnasium.error.ClosedEnvironmentError
    nothing_pending = gymnasium.error.NoAsyncCallError

    def other_uses(self, envs: Any) -> list[Callable[[], Any]]:
        return [lambda: envs.call("pid"), lambda: envs.get_attr("value"), lambda: envs.set_attr("value", 1)]


class OldGymnasiumFace(GymnasiumFace):
    api = "gymnasium029"
    autoreset = "same_step"


class Sb3Face(Face):
    api = "sb3"
    autoreset = "same_step"
    lists_of_seeds = False
    bounds_may_differ = True

    def spaces(self, envs: Any) -> tuple[Any, Any]:
        return _described(envs.observation_space), _described(envs.action_space)

    def reset(self, envs: Any, seed: Any = None) -> Any:
        if seed is not None:
            envs.seed(seed)
        return envs.reset()

    def step(self, envs: Any, actions: Any) -> Step:
        return envs.step(actions)[:3]  # type: ignore[no-any-return]

    def wait(self, envs: Any) -> Step:
        return envs.step_wait()[:3]  # type: ignore[no-any-return]

    def other_uses(self, envs: Any) -> list[Callable[[], Any]]:
        return [
            envs.step_wait,
            lambda: envs.get_attr("value"),
            lambda: envs.set_attr("value", 1),
            lambda: envs.env_method("pid"),
            lambda: envs.env_is_wrapped(gymnasium.Wrapper),
        ]


class BaselinesFace(Sb3Face):
    api = "baselines"
    nothing_pending = NotSteppingError


class SampleFactoryFace(Face):
    api = "sample_factory"
    autoreset = "same_step"
    in_halves = False

    def count(self, envs: Any) -> int:
        return int(envs.num_agents)

    def spaces(self, envs: Any) -> tuple[Any, Any]:
        return _described(envs.observation_space), _described(envs.action_space)


class EnvPoolFace(Face):
    begins_by_itself = True

    def open(self, fns: Sequence[EnvFn], backend: str = "serial", **options: Any) -> Any:
        from shoal.dialects import envpool

        workers = {} if backend == "serial" else {"num_workers": 2}
        return envpool.make_gymnasium(list(fns), backend=backend, **{**workers, **options})

    def count(self, envs: Any) -> int:
        return len(envs)

    def spaces(self, envs: Any) -> tuple[Any, Any]:
        return _described(envs.observation_space), _described(envs.action_space)

    def begin(self, envs: Any, actions: Any) -> None:
        envs.send(actions)

    def wait(self, envs: Any) -> Step:
        return _joined(envs.recv())

    def other_uses(self, envs: Any) -> list[Callable[[], Any]]:
        return [envs.recv, envs.async_reset, lambda: envs.send(np.zeros(3, np.int64))]


class PufferFace(Face):
    lists_of_seeds = False

    def open(self, fns: Sequence[EnvFn], backend: str = "serial", **options: Any) -> Any:
        from shoal.dialects import puffer

        if backend == "serial":
            return puffer.make(list(fns), backend=puffer.Serial, copy=True, **options)
        return puffer.make(list(fns), backend=puffer.Multiprocessing, num_workers=2, zero_copy=False, **options)

    def begin(self, envs: Any, actions: Any) -> None:
        envs.send(actions)

    def wait(self, envs: Any) -> Step:
        return _joined(envs.recv()[:5])

    def other_uses(self, envs: Any) -> list[Callable[[], Any]]:
        return [envs.recv, envs.async_reset]


class DmEnvFace(Face):
    api = "dm_env"
    in_halves = False
    begins_by_itself = True

    def count(self, envs: Any) -> int:
        return int(envs.batch_size)

    def spaces(self, envs: Any) -> tuple[Any, Any]:
        return _described(envs.observation_spec()), _described(envs.action_spec())

    def reset(self, envs: Any, seed: Any = None) -> Any:
        return envs.reset(seed=seed).observation

    def step(self, envs: Any, actions: Any) -> Step:
        found = envs.step(actions)
        return found.observation, found.reward, found.step_type == 2


class TfAgentsFace(DmEnvFace):
    api = "tf_agents"
    lists_of_seeds = False
    mismatch = ValueError  # as TF-Agents has it

    def reset(self, envs: Any, seed: Any = None) -> Any:
        if seed is not None:
            envs.seed(seed)
        return envs.reset().observation


class Solo(Parallel):
    """An env as one with many agents, of which there is one."""

    def __init__(self, fn: EnvFn):
        self.env = fn()
        self.observation_by_agent = {"solo": self.env.observation_space}
        self.action_by_agent = {"solo": self.env.action_space}
        super().__init__()

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = ["solo"]
        return tuple({"solo": part} for part in self.env.reset(seed=seed, options=options))

    def step(self, actions: dict[str, Any]) -> Any:
        found = self.env.step(actions["solo"])
        if found[2] or found[3]:
            self.agents = []
        return tuple({"solo": part} for part in found)

    def pid(self) -> int:
        return int(self.env.pid())


class AgentsFace(Face):
    api = "agents"
    options = {"copy": True}

    def open(self, fns: Sequence[EnvFn], backend: str = "serial", **options: Any) -> Any:
        return super().open([partial(Solo, fn) if callable(fn) else fn for fn in fns], backend, **options)

    def spaces(self, envs: Any) -> tuple[Any, Any]:
        return _described(envs.observation_space("solo")), _described(envs.action_space("solo"))

    def reset(self, envs: Any, seed: Any = None) -> Any:
        return envs.reset(seed=seed)[0]["solo"]

    def step(self, envs: Any, actions: Any) -> Step:
        return _joined([part["solo"] for part in envs.step({"solo": actions})[:4]])

    def begin(self, envs: Any, actions: Any) -> None:
        envs.send({"solo": actions}, np.arange(envs.num_envs))

    def wait(self, envs: Any) -> Step:
        return _joined([part["solo"] for part in envs.recv()[:4]])

    def other_uses(self, envs: Any) -> list[Callable[[], Any]]:
        return [envs.recv, envs.async_reset]


class BatchEnvFace(Face):
    """Its envs are made beforehand, here or in processes; it resets none by itself."""

    autoreset = "disabled"
    in_halves = False
    noted = True

    def open(self, fns: Sequence[EnvFn], backend: str = "serial", **options: Any) -> Any:
        from shoal.dialects.batch_env import BatchEnv, ExternalProcess

        return BatchEnv([fn() if backend == "serial" else ExternalProcess(fn) for fn in fns], blocking=False, **options)

    def count(self, envs: Any) -> int:
        return len(envs)

    def spaces(self, envs: Any) -> tuple[Any, Any]:
        return _described(envs.observation_space), _described(envs.action_space)

    def reset(self, envs: Any, seed: Any = None) -> Any:
        return envs.reset(seed=seed)

    def step(self, envs: Any, actions: Any) -> Step:
        return envs.step(actions)[:3]  # type: ignore[no-any-return]


def _joined(found: Sequence[Any]) -> Step:
    obs, rewards, terminated, truncated = found[:4]
    return obs, rewards, np.asarray(terminated) | np.asarray(truncated)


def _described(space: Any) -> tuple[Any, Any]:
    return tuple(space.shape), np.dtype(space.dtype)


# TF-Agents pins much, and has an environment of its own: `make test-tf` runs its face there, and the others run here.
FACES: dict[str, Face] = (
    {"tf_agents": TfAgentsFace()}
    if find_spec("tf_agents")
    else {
        "gymnasium": GymnasiumFace(),
        "gymnasium029": OldGymnasiumFace(),
        "sb3": Sb3Face(),
        "baselines": BaselinesFace(),
        "sample_factory": SampleFactoryFace(),
        "envpool": EnvPoolFace(),
        "puffer": PufferFace(),
        **({"dm_env": DmEnvFace()} if find_spec("dm_env") else {}),
        "agents": AgentsFace(),
        "batch_env": BatchEnvFace(),
    }
)

"""Many envs with many agents, by agent: PettingZoo's parallel API, with a row for each env.

    envs = shoal.make(make_parallel_env, num_envs=32, api="agents")
    observations, infos = envs.reset(seed=0)
    observations, rewards, terminations, truncations, infos = envs.step({"knight": actions, "archer": actions})

Each is a dict {agent: array [num_envs, ...]} in the agent's own spaces. An agent may be absent from some envs:
`envs.present[agent]` says in which it is there. A trainer with one policy for all agents is faster with the lanes of
`shoal.Pool` or `shoal.make`, where every agent of every env is one row.

Where PettingZoo is installed, it is one of its `ParallelEnv`s, too, so that trainers of such envs recognize it.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space

from shoal.batch import Batch
from shoal.dialects.base import PoolFace
from shoal.envs.pettingzoo import is_aec_env, is_parallel_env
from shoal.errors import BadAction, BadCall, BadEnv
from shoal.pool import Pool
from shoal.spaces.leaves import assemble, get_path, read_actions
from shoal.spaces.shared import SharedSpace
from shoal.support.checks import check_ids

__all__ = ["BatchedParallelEnv"]

Array = npt.NDArray[Any]
ByAgent = dict[Any, Any]
Step = tuple[ByAgent, ByAgent, ByAgent, ByAgent, ByAgent]


class BatchedParallelEnv(PoolFace):
    """Many parallel envs as one.

    Arrays are views of one batch of all agents if the agent's space allows it. The caller owns them, unless
    `copy=False` is given.

    Args:
        env: a function or class that makes a PettingZoo env (parallel, or AEC, which is converted), a list of them, or
            a pool.
        num_envs: how many. Leave it out if you pass a list or a pool.
        **pool_options: as for `shoal.Pool`; `batch_envs` is how many envs `recv` waits for.

    Attributes:
        pool: the pool, which has a lane for each agent of each env.
        num_envs: how many envs.
        agents, possible_agents: the names of all agents that an env may have.
        observation_spaces, action_spaces: by agent, the spaces of one env.
        state_space: of one env; only where the envs have one.
        present: by agent, bool [envs of the last answer], True if the agent is in the env.
        began: by agent, bool [envs of the last answer], True if its observation is the first of an episode.

    Raises:
        TypeError: options were given beside a pool that is made already.
    """

    _api, _partial = "agents", True

    def __new__(cls, *_: Any, **__: Any) -> BatchedParallelEnv:
        return super().__new__(_of_pettingzoo(cls))

    def __init__(self, env: Any, num_envs: int | None = None, **pool_options: Any):
        if isinstance(env, Pool) or hasattr(env, "lane_names"):
            if num_envs is not None or pool_options:
                raise TypeError("num_envs and options are for making a pool, and one was given")
            self.pool = env
            self._learn()
        else:
            self._open(env, num_envs, {"check_actions": "all", **pool_options})

    def _learn(self) -> None:
        self.agents: list[Any] = list(self.pool.lane_names or ())
        if not self.agents:
            raise BadEnv("these envs have no agents with names: use shoal.make without api, or shoal.Pool")
        self.possible_agents = self.agents
        self._lanes = {agent: lane for lane, agent in enumerate(self.agents)}
        self.num_envs = self.pool.num_envs // self.num_agents
        whole = self.pool.single_observation_space, self.pool.single_action_space
        own, state_space = self.pool.apply(_own_spaces, env_ids=np.arange(self.num_agents))[0]
        if state_space is not None:
            self.state_space = state_space
        pairs = [whole] * self.num_agents if own is None else own
        self._observations = SharedSpace("observation", self.agents, [pair[0] for pair in pairs])
        self._actions = SharedSpace("action", self.agents, [pair[1] for pair in pairs])
        self.observation_spaces: dict[Any, Space[Any]] = dict(zip(self.agents, self._observations.own, strict=True))
        self.action_spaces: dict[Any, Space[Any]] = dict(zip(self.agents, self._actions.own, strict=True))
        # An action that is legal for every agent, for those that are left out.
        self._idle = [np.clip(np.zeros(leaf.shape, leaf.dtype), leaf.low, leaf.high) for leaf in self._actions.leaves]
        self._lives = np.zeros((self.num_envs, self.num_agents), np.bool_)  # agents that act in the next step
        self.present: ByAgent = {agent: np.zeros(self.num_envs, np.bool_) for agent in self.agents}
        self.began: ByAgent = dict(self.present)

    @property
    def num_agents(self) -> int:
        """How many agents an env may have."""
        return len(self.agents)

    max_num_agents = num_agents

    def observation_space(self, agent: Any) -> Space[Any]:
        """Of one agent in one env."""
        return self.observation_spaces[agent]

    def action_space(self, agent: Any) -> Space[Any]:
        """Of one agent in one env."""
        return self.action_spaces[agent]

    def state(self) -> Array:
        """The state of each env as a whole, [num_envs, ...]. Raises what an env raises that has none."""
        return np.stack(self.pool.call("state", env_ids=self._first_lanes()))

    def render(self) -> tuple[Any, ...]:
        """A frame of each env, as its render mode says."""
        return tuple(self.pool.render(env_ids=self._first_lanes()))

    def reset(self, seed: Any = None, options: Any = None, env_ids: Any = None) -> tuple[ByAgent, ByAgent]:
        """Begin a new episode in these envs (None: all): observations and infos.

        Args:
            seed: an int gives env i `seed + i`; a list gives each of the envs its own.
            options: handed to every env's reset; a list gives each of the envs its own.
        """
        batch = self.pool.reset(self._lanes_of(env_ids), **self._for_lanes(seed, options, env_ids))
        observations, *_, infos = self._by_agent(batch)
        return observations, infos

    def async_reset(self, seed: Any = None, options: Any = None, env_ids: Any = None) -> None:
        """Start a reset of these envs (None: all); their first observations come with `recv`."""
        self.pool.async_reset(self._lanes_of(env_ids), **self._for_lanes(seed, options, env_ids))

    def step(self, actions: Mapping[Any, Any]) -> Step:
        """Step all envs: observations, rewards, terminations, truncations and infos, by agent.

        Args:
            actions: by agent, a batch of its action space with a row for each env. Rows where it is absent are ignored,
                and an agent that is absent everywhere may be left out. Choices may be a column, [n, 1], and a single
                env's action may come without the row, as trainers of single envs give it.

        Returns:
            arrays by agent; infos are dicts {env: info} of those that are not empty. Where an agent is absent, its rows
            are zeros.
        """
        return self._by_agent(self.pool.step(self._joined(actions, np.arange(self.num_envs))))

    def send(self, actions: Mapping[Any, Any], env_ids: Any = None) -> None:
        """Start a step of these envs (None: all), and return at once; `actions` have a row for each of them."""
        envs = self._envs(env_ids)
        self.pool.send(self._joined(actions, envs), self._lanes_of(env_ids))

    def recv(self, timeout: float | None = None, min_batch: int | None = None) -> tuple[Any, ...]:
        """Wait for the next envs that are done: what `step` returns, and the envs' ids, [n]."""
        batch = self.pool.recv(timeout, min_batch)
        return (*self._by_agent(batch), batch.env_id[:: self.num_agents] // self.num_agents)

    def _envs(self, env_ids: Any) -> Array:
        return np.arange(self.num_envs) if env_ids is None else check_ids(env_ids, self.num_envs)

    def _first_lanes(self) -> Array:
        return np.arange(self.num_envs) * self.num_agents

    def _lanes_of(self, env_ids: Any) -> Array | None:
        if env_ids is None:
            return None
        return (self._envs(env_ids)[:, None] * self.num_agents + np.arange(self.num_agents)).ravel()

    def _for_lanes(self, seed: Any, options: Any, env_ids: Any) -> dict[str, Any]:
        """Seeds and options for each lane, from those for each env."""
        envs = self._envs(env_ids)
        if seed is not None and not isinstance(seed, Sequence | np.ndarray):
            seed = [seed + int(env) for env in envs]
        given = {"seed": seed, "options": options}
        for name, values in given.items():
            if isinstance(values, Sequence | np.ndarray):
                if len(values) != len(envs):
                    raise BadCall(f"{name}: expected {len(envs)}, one for each env, found {len(values)}")
                given[name] = [value for value in values for _ in self.agents]
        return given

    def _joined(self, actions: Mapping[Any, Any], envs: Array) -> Any:
        """A batch of actions with a row for each lane of these envs."""
        if not isinstance(actions, Mapping):
            raise BadAction(f"actions: expected a dict with a batch for each agent, found {type(actions).__name__}")
        unknown = [agent for agent in actions if agent not in self._lanes]
        if unknown:
            raise BadAction(f"actions: there is no agent {unknown[0]!r}; the agents are {self.agents}")
        joined = [np.full((len(envs), self.num_agents, *idle.shape), idle, idle.dtype) for idle in self._idle]
        for agent, lane in self._lanes.items():
            if agent in actions:
                try:
                    given = _with_rows(self._actions.own[lane].shape, actions[agent], len(envs))
                    own = read_actions(self._actions.own_leaves[lane], given, envs, check="discrete")
                except BadAction as error:
                    raise BadAction(f"agent {agent!r}: {error}") from error
                self._actions.put_actions(lane, own, [array[:, lane] for array in joined])
            elif self._lives[envs, lane].any():
                raise BadAction(f"actions: agent {agent!r} is left out, and it is present in some of the envs")
        return assemble(self._actions.space, [array.reshape(-1, *array.shape[2:]) for array in joined])

    def _by_agent(self, batch: Batch) -> Step:
        count = self.num_agents
        leaves = self._observations.leaves
        obs = [np.asarray(get_path(batch.obs, leaf.path)).reshape(-1, count, *leaf.shape) for leaf in leaves]
        observations = {
            agent: self._observations.take(lane, [array[:, lane] for array in obs])
            for agent, lane in self._lanes.items()
        }
        self.present, self.began = self._columns(batch.mask), self._columns(batch.began)
        lives = batch.mask & (batch.began | ~(batch.terminated | batch.truncated))
        self._lives.ravel()[batch.env_id] = lives
        infos: ByAgent = {agent: {} for agent in self.agents}
        for row, info in batch.info.items():
            env, lane = divmod(row, count)
            if "final_obs" in info:
                final = [np.asarray(get_path(info["final_obs"], leaf.path)) for leaf in leaves]
                info = {**info, "final_obs": self._observations.take(lane, final)}
            infos[self.agents[lane]][env] = info
        flags = self._columns(batch.terminated), self._columns(batch.truncated)
        return observations, self._columns(batch.reward), *flags, infos

    def _columns(self, values: Array) -> ByAgent:
        columns = values.reshape(-1, self.num_agents)
        return {agent: columns[:, lane] for agent, lane in self._lanes.items()}


@functools.cache
def _of_pettingzoo(kind: type[BatchedParallelEnv]) -> type[BatchedParallelEnv]:
    """The class with PettingZoo's ParallelEnv as a further base, if it is installed. To import it takes a while: that
    is done where an env is made, not where this module is imported."""
    try:
        parallel = importlib.import_module("pettingzoo.utils.env").ParallelEnv
    except ImportError:
        return kind
    about = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    return types.new_class(kind.__name__, (kind, parallel), exec_body=lambda names: names.update(about))


def _with_rows(shape: tuple[int, ...] | None, actions: Any, count: int) -> Any:
    """A batch of `count` actions of this shape, where it is a column of numbers or one action without its row."""
    found = None if shape is None else np.shape(actions)
    if shape == () and found == (count, 1):
        return np.asarray(actions)[:, 0]
    return np.asarray(actions)[None] if count == 1 and found is not None and found == shape else actions


def _own_spaces(env: Any) -> tuple[list[tuple[Space[Any], Space[Any]]] | None, Space[Any] | None]:
    """In the worker: the spaces of each agent of an env (None if they do not depend on the agent), and of its state."""
    if not (is_parallel_env(env) or is_aec_env(env)):
        return None, None
    state_space = getattr(env, "state_space", None)
    own = [(env.observation_space(agent), env.action_space(agent)) for agent in env.possible_agents]
    return own, state_space if isinstance(state_space, Space) else None

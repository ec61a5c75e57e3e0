"""The ways to run a class, for comparisons: compiled, plain, in single precision, on a GPU; all step a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector.utils import concatenate, create_empty_array

from shoal.compiled.cuda.build import missing
from shoal.compiled.definition import Definition
from shoal.compiled.plain import PlainEnv
from shoal.spaces.leaves import assemble, get_path


class Answers(NamedTuple):
    """What all lanes have answered."""

    names: list[str]
    values: list[Any]
    terminated: Any
    truncated: Any


class Side:
    """One way to run the envs. Lanes reset in the step after their end."""

    def __init__(self, name: str, definition: Definition, envs: int):
        self.name, self.definition, self.envs = name, definition, envs
        self.lanes = envs * definition.num_agents

    def _answers(self, obs: Any, reward: Any, terminated: Any, truncated: Any) -> Answers:
        leaves = self.definition.obs_leaves
        names = [f"obs{leaf.name}" for leaf in leaves] + ["reward", "terminated", "truncated"]
        values = [np.array(get_path(obs, leaf.path)) for leaf in leaves]
        values = [value.reshape(self.lanes, -1) for value in values]
        return Answers(names, [*values, *map(np.array, (reward, terminated, truncated))], terminated, truncated)

    def _batch(self, actions: Sequence[Any]) -> Any:
        space = self.definition.action_space
        room: Any = create_empty_array(space, len(actions))
        return concatenate(space, actions, room)

    def reset(self, seed: int) -> Answers:
        """Begin with seeds from this one on."""
        raise NotImplementedError

    def step(self, actions: Sequence[Any]) -> Answers:
        """Step all lanes."""
        raise NotImplementedError

    def states(self) -> Any:
        """Return a copy of all states, as records."""
        raise NotImplementedError

    def put_states(self, states: Any) -> None:
        """Overwrite all states."""

    def close(self) -> None:
        """Free what it has."""


class CompiledSide(Side):
    """A pool of compiled envs."""

    def __init__(self, name: str, definition: Definition, envs: int, pool: Any):
        super().__init__(name, definition, envs)
        self._pool = pool
        self._envs = pool.local_envs[0]

    def reset(self, seed: int) -> Answers:
        return self._of(self._pool.reset(seed=seed))

    def step(self, actions: Sequence[Any]) -> Answers:
        return self._of(self._pool.step(self._batch(actions)))

    def _of(self, batch: Any) -> Answers:
        return self._answers(batch.obs, batch.reward, batch.terminated.copy(), batch.truncated.copy())

    def states(self) -> Any:
        return np.array(self._envs.states)

    def put_states(self, states: Any) -> None:
        for name in states.dtype.names or ():
            self._envs.states[name][...] = states[name]

    def close(self) -> None:
        self._pool.close()


class PlainSide(Side):
    """Envs in plain Python, one after the other."""

    def __init__(self, definition: Definition, envs: int):
        super().__init__("plain Python", definition, envs)
        self._plain = [PlainEnv(definition) for _ in range(envs)]
        self._over = np.zeros(envs, bool)

    def reset(self, seed: int) -> Answers:
        agents = self.definition.num_agents
        obs = [env.reset(seed=seed + i * agents)[0] for i, env in enumerate(self._plain)]
        self._over[:] = False
        return self._of([(one, np.zeros(agents), False, False) for one in obs])

    def step(self, actions: Sequence[Any]) -> Answers:
        agents, rows = self.definition.num_agents, []
        for i, env in enumerate(self._plain):
            if self._over[i]:
                rows.append((env.reset()[0], np.zeros(agents), False, False))
            else:
                given = actions[i] if agents == 1 else np.array(actions[i * agents : (i + 1) * agents])
                rows.append(env.step(given)[:4])
            self._over[i] = rows[-1][2] or rows[-1][3]
        return self._of(rows)

    def _of(self, rows: Sequence[Any]) -> Answers:
        leaves, agents = self.definition.obs_leaves, self.definition.num_agents
        names = [f"obs{leaf.name}" for leaf in leaves] + ["reward", "terminated", "truncated"]
        parts = [np.array([get_path(row[0], leaf.path) for row in rows]) for leaf in leaves]
        ends = [np.repeat([bool(row[place]) for row in rows], agents) for place in (2, 3)]
        reward = np.concatenate([np.reshape(row[1], -1) for row in rows]).astype(np.float64)
        values = [part.reshape(self.lanes, -1) for part in parts]
        return Answers(names, [*values, reward, *ends], *ends)

    def states(self) -> Any:
        return np.concatenate([np.asarray(env._states) for env in self._plain])


class GpuSide(Side):
    """Envs on a GPU."""

    def __init__(self, definition: Definition, env: Any, envs: int, kwargs: Any):
        from shoal.compiled.cuda.envs import CudaEnvs

        super().__init__("a GPU", definition, envs)
        self._cuda = CudaEnvs(env, envs, env_kwargs=kwargs)

    def reset(self, seed: int) -> Answers:
        self._cuda.reset(seed=seed)
        zeros = np.zeros(self.lanes)
        return self._of(zeros, zeros.astype(bool), zeros.astype(bool))

    def step(self, actions: Sequence[Any]) -> Answers:
        cuda = self._cuda
        cuda.step(self._batch(actions))
        return self._of(cuda.reward.numpy(), cuda.terminated.numpy(), cuda.truncated.numpy())

    def _of(self, reward: Any, terminated: Any, truncated: Any) -> Answers:
        leaves = [get_path(self._cuda.obs, leaf.path).numpy() for leaf in self.definition.obs_leaves]
        obs = assemble(self.definition.observation_space, leaves)
        return self._answers(obs, reward.reshape(-1), terminated.reshape(-1), truncated.reshape(-1))

    def states(self) -> Any:
        whole = self.definition.new_states(self.envs)
        for name in self.definition.dtype.names or ():
            whole[name] = self._cuda.get(name)
        return whole

    def put_states(self, states: Any) -> None:
        for name in states.dtype.names or ():
            if name not in self.definition.params:
                self._cuda.set(name, states[name])

    def close(self) -> None:
        self._cuda.close()


def sides(definition: Definition, env: Any, kwargs: Any, envs: int, seed: int) -> tuple[list[Side], list[str]]:
    """Return all ways that this machine has, compiled code first, and why others are left out."""
    from shoal.compiled.pools import make_pool

    lacks = env.__shoal_missing__()
    if lacks:
        raise ImportError(f"check: {lacks}")
    found: list[Side] = [CompiledSide("compiled", definition, envs, make_pool(env, envs, kwargs))]
    found.append(PlainSide(definition, envs))
    found.append(CompiledSide("single", definition, envs, make_pool(env, envs, {**kwargs, "precision": "single"})))
    without = missing()
    if without:
        return found, [without]
    return [*found, GpuSide(definition, env, envs, kwargs)], []

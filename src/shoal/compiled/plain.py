"""Compiled envs as plain Python: for debugging, for machines without a compiler, and for all other backends."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils import batch_space

from shoal.compiled.definition import Definition, define
from shoal.compiled.random import begin_stream
from shoal.compiled.template import wide_type
from shoal.envs.group import Answers, GroupAdapter, Infos
from shoal.errors import BadEnv
from shoal.spaces.leaves import assemble, get_path


def as_gymnasium(env_class: type[Any], **kwargs: Any) -> PlainEnv:
    """Make a Gymnasium env that steps the class as plain Python, to the same bits as `backend="compiled"`.

    With several agents, observations, actions and rewards have a row for each of them.
    """
    return PlainEnv(define(env_class, kwargs))


class PlainEnv(gymnasium.Env[Any, Any]):
    """One env as plain Python.

    The fields of its state, params among them, are attributes too, to get and to set.

    Attributes:
        state: the record that `reset`, `step` and `observe` work on; its fields may be changed at any time.
    """

    metadata = {"render_modes": []}

    def __init__(self, definition: Definition):
        # Set through `vars`, because __setattr__ needs these two.
        vars(self).update(_fields=frozenset(definition.dtype.names or ()), definition=definition)
        self._agents = () if definition.num_agents == 1 else (definition.num_agents,)
        self.observation_space = self._joint(definition.observation_space)
        self.action_space = self._joint(definition.action_space)
        self._states = definition.new_states(1).view(np.recarray)
        vars(self)["state"] = self._states[0]
        self._bytes = np.asarray(self._states).view(np.uint8)
        self._rng = np.zeros(1, np.uint64)
        self._seed, self._episode, self._steps = secrets.randbits(63), -1, 0
        self._reward = np.zeros(self._agents)

    def _joint(self, space: Any) -> Any:
        return batch_space(space, self._agents[0]) if self._agents else space

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_fields", ()):
            return self.state[name]
        definition: Any = self.__dict__.get("definition")
        if name.startswith("_") or not hasattr(definition, "env") or not hasattr(definition.env, name):
            raise AttributeError(f"{getattr(definition, 'name', 'the env')} has no attribute {name!r}")
        return getattr(definition.env, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._fields:
            self.state[name] = value
        elif name == "state":
            self._states[0] = value
        else:
            super().__setattr__(name, value)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: the next one of the seed, or the first one of a new seed."""
        super().reset(seed=seed)
        if seed is not None:
            self._seed, self._episode = int(seed) % 2**64, -1
        self._episode += 1
        self._steps = 0
        begin_stream(self._rng, self._seed, self._episode)
        self._bytes[: self.definition.cleared] = 0
        self.definition.reset(self.state, self._rng)
        return self.observe_now(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Call the class's `step`, then `observe`."""
        definition = self.definition
        self._steps += 1
        if self._agents:
            self._reward[:] = 0.0
            terminated = definition.step(self.state, self._read(action), self._reward, self._rng)
            reward: Any = self._reward.copy()
        else:
            reward, terminated = self._checked(definition.step(self.state, self._read(action), self._rng))
        limit = definition.max_episode_steps
        return self.observe_now(), reward, bool(terminated), limit is not None and self._steps >= limit, {}

    def observe_now(self) -> Any:
        """Return the observation of the present state."""
        leaves, alone = self.definition.obs_leaves, (1,) if not self._agents else ()
        rows = [np.zeros((*self._agents, *(leaf.shape or alone)), leaf.dtype) for leaf in leaves]
        self.definition.observe(self.state, tuple(rows) if self.definition.nested_obs else rows[0])
        values = [
            row if leaf.shape or self._agents else row[0] if leaf.scalar else row.reshape(())
            for leaf, row in zip(leaves, rows, strict=True)
        ]
        return assemble(self.definition.observation_space, values)

    def _read(self, action: Any) -> Any:
        """Convert an action to what `step` gets: numbers of 64 bits, whatever the space's type is."""
        values = []
        for leaf in self.definition.action_leaves:
            value = np.asarray(get_path(action, leaf.path), leaf.dtype).astype(wide_type(leaf))
            values.append(value if value.ndim else value.item())
        return tuple(values) if self.definition.nested_action else values[0]

    def _checked(self, result: Any) -> tuple[float, bool]:
        try:
            reward, terminated = result
            return float(reward), bool(terminated)
        except (TypeError, ValueError):
            raise BadEnv(f"{self.definition.name}.step must return (reward, terminated), found {result!r}") from None

    def get_state(self) -> dict[str, Any]:
        """Return the state, for snapshots."""
        return {
            "state": self._bytes.copy(), "rng": int(self._rng[0]), "seed": self._seed, "episode": self._episode,
            "steps": self._steps,
        }  # fmt: skip

    def set_state(self, saved: dict[str, Any]) -> None:
        self._bytes[:] = saved["state"]
        self._rng[0] = saved["rng"]
        self._seed, self._episode, self._steps = saved["seed"], saved["episode"], saved["steps"]


class PlainGroup(GroupAdapter):
    """An env with several agents, one lane each."""

    def __init__(self, env: PlainEnv):
        definition = env.definition
        super().__init__(env, definition.num_agents, definition.observation_space, definition.action_space)
        self.lane_names = list(range(self.num_lanes))

    def reset(self, rows: Any, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        """See GroupEnv. The seed of an env is that of its first agent."""
        self._begin(seeds[0], out)
        return None

    def step(self, rows: Any, actions: Any, out: Answers) -> Infos:
        def step(*rows_and_places: Any) -> None:
            obs, out.reward[:], out.terminated[:], out.truncated[:], _ = self.env.step(actions)
            self._write(out.obs, obs)

        return self._episodes.step(rows, out, step, lambda *_: self._begin(None, out))

    def _begin(self, seed: int | None, out: Answers) -> None:
        obs, _ = self.env.reset(seed=seed)
        self._write(out.obs, obs)
        self._episodes.begun(slice(None), out)

    def _write(self, targets: Sequence[Any], obs: Any) -> None:
        for leaf, target in zip(self._leaves, targets, strict=True):
            target[:] = get_path(obs, leaf.path)

    def get_state(self) -> dict[str, Any]:
        return {**self.env.get_state(), "ended": bool(self._episodes.ended[0])}

    def set_state(self, saved: dict[str, Any]) -> None:
        self.env.set_state(saved)
        self._episodes.ended[:] = saved["ended"]

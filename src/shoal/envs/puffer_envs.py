"""PufferLib's envs: its native ones, and its `GymnasiumPufferEnv` and `PettingZooPufferEnv` around envs of others.

They have a row for each agent, and arrays for their answers: `observations`, `rewards`, `terminals`, `truncations` and
`masks`. A native env begins its episodes by itself. One around an env of others says `done` after an episode's last
step, and must be reset then.

PufferLib need not be installed: its envs are recognized by their attributes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from shoal.envs.autoreset import MODES, keep_finals, with_final_info
from shoal.envs.batch_lanes import BatchLanes
from shoal.envs.group import Answers, Infos
from shoal.envs.wrapper_layers import ForeignEnv
from shoal.errors import ResetNeeded
from shoal.memory.copies import own_copy
from shoal.spaces.leaves import Array

# The buffers that these envs take as `buf`, and have as attributes.
BUFFERS = ("observations", "rewards", "terminals", "truncations", "masks", "actions", "teacher_actions")
# Infos about an env, and not about one of its agents, stand under this name in the info of its first lane.
ENV_INFOS = "infos"
# The action that a teacher would have taken stands under this name in the info of the agent's lane.
TEACHER = "teacher_action"


def is_puffer_env(env: Any) -> bool:
    """Tell whether an env is of PufferLib's kind."""
    return all(hasattr(env, name) for name in ("single_observation_space", "single_action_space", "num_agents"))


def adapt_puffer_env(env: Any) -> Any:
    """Return an env of PufferLib's as a Gymnasium env, or as one with a lane for each of its agents."""
    waits_for_reset = hasattr(env, "done") and bool(getattr(env, "emulated", False))
    if not waits_for_reset:
        return PufferLanes(env)
    if env.num_agents == 1 and isinstance(env, gymnasium.Env):
        return PufferSoloEnv(env)
    return PufferTeamLanes(env)


def takes_buffers(creator: Any) -> bool:
    """Tell whether a function that makes an env takes `buf`, as PufferLib asks of them."""
    return takes(creator, "buf")


def takes(function: Callable[..., Any], name: str) -> bool:
    """Tell whether a function has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def action_type(space: Any) -> Any:
    """Return the type in which PufferLib's vectorizers hand actions to envs."""
    return space.dtype if isinstance(space, spaces.Box) else np.dtype(np.int32)


def _adds_nothing(env: Any) -> bool:
    """Tell whether a step of a GymnasiumPufferEnv is just a step of the env inside: nothing is flattened."""
    known = (type(env).__module__, type(env).__name__) == ("pufferlib.emulation", "GymnasiumPufferEnv")
    return known and not env.is_obs_emulated and not env.is_atn_emulated and len(env.action_space.shape) < 2


class PufferSoloEnv(ForeignEnv):
    """A GymnasiumPufferEnv, whose answers have a row for its only agent, as a Gymnasium env without that row."""

    def __init__(self, env: Any):
        super().__init__(env)
        self.observation_space, self.action_space = env.single_observation_space, env.single_action_space
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.spec = getattr(env.env, "spec", None)
        self._type = action_type(self.action_space)
        self._adds_nothing = _adds_nothing(env)
        self._passes_by = False

    @property
    def render_mode(self) -> Any:  # type: ignore[override]
        """That of the env inside."""
        return getattr(self.env, "render_mode", None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode: its first observation, and an info."""
        given: dict[str, Any] = {"seed": seed, "options": options}
        info = self.env.reset(**{name: value for name, value in given.items() if value is not None})[1]
        return self.env.observations[0], info if type(info) is dict else _one_info(info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the env with an array of one action, or the env inside, where that is the same."""
        env = self.env
        if self._passes_by:
            obs, reward, terminated, truncated, info = env.env.step(action)
            if type(reward) is np.ndarray or type(terminated) is np.ndarray or type(truncated) is np.ndarray:
                reward, terminated, truncated = np.sum(reward), np.any(terminated), np.any(truncated)
            if terminated or truncated:
                env.done = True
            return obs, reward, terminated, truncated, info if type(info) is dict else _one_info(info)
        _, reward, terminated, truncated, info = env.step(np.array([action], self._type))
        self._passes_by = self._adds_nothing  # now that it has checked an observation and an action
        return env.observations[0], reward, terminated, truncated, info if type(info) is dict else _one_info(info)

    def render(self) -> Any:
        """What the env inside renders."""
        return self.env.render()


class PufferLanes(BatchLanes):
    """A native env of PufferLib's: it has a row for each agent, arrays of its own, and begins episodes at once.

    Such envs do not say what the last observation of an episode was. If the pool has just one frame and the env takes
    `buf`, the env writes its observations into the batch, and nothing is copied.
    """

    modes: Sequence[str] = ("same_step",)

    def __init__(self, env: Any):
        super().__init__(env, env.num_agents, env.single_observation_space, env.single_action_space)
        self.can_be_absent = hasattr(env, "masks")
        self._in_place = False  # whether its observations are the batch's own memory

    def move_into(self, out: Answers, env_fn: Callable[..., Any]) -> PufferLanes:
        """Build the env anew with the arrays of `out`, which never change; return `self` if the env takes no arrays."""
        own = {name: getattr(self.env, name) for name in BUFFERS if hasattr(self.env, name)}
        fits = len(self._leaves) == 1 and "observations" in own and own["observations"].dtype == out.obs[0].dtype
        if not fits or not takes_buffers(env_fn):
            return self
        self.close()
        buffers = {name: array.copy() for name, array in own.items()}
        moved = type(self)(env_fn(buf={**buffers, "observations": out.obs[0]}))
        moved._in_place = np.shares_memory(moved.env.observations, out.obs[0])
        return moved

    def _write(self, targets: Sequence[Array], obs: Any, at: Any = ..., rows: Any = ...) -> None:
        if not self._in_place or obs is not self.env.observations:
            super()._write(targets, obs, at, rows)

    def reset(self, rows: Array, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        result = self.env.reset(seeds[0]) if seeds[0] is not None else self.env.reset()
        obs, infos = result if isinstance(result, tuple) else (result, [])
        self._begin_all(obs, out)
        self._show_agents(out)
        return self._infos(infos, rows)

    def _step_all(self, actions: Any, out: Answers) -> Any:
        infos = super()._step_all(actions, out)
        self._show_agents(out)
        return infos

    def _show_agents(self, out: Answers) -> None:
        if self.can_be_absent:
            out.present[:] = self.env.masks

    def close(self) -> None:
        with contextlib.suppress(NotImplementedError):  # the `close` of PufferLib's base class
            super().close()

    def _infos(self, infos: Any, rows: Array) -> Infos:
        """Sort the infos: a list of dicts about anything, one dict for each agent, or one for all."""
        given = [infos] if isinstance(infos, Mapping) else list(infos or ())
        found: list[dict[str, Any]] = [{} for _ in range(self.num_lanes)]
        if any(given) and len(given) == self.num_lanes:
            found = [dict(info) for info in given]
        elif any(given):
            found[0] = {ENV_INFOS: [info for info in given if info]}
        teacher = getattr(self.env, "teacher_actions", None)
        if teacher is not None and teacher.any():
            for info, action in zip(found, teacher, strict=True):
                info[TEACHER] = np.array(action)
        return found if any(found) else None


class PufferTeamLanes(PufferLanes):
    """A PettingZooPufferEnv: lane i is `possible_agents[i]`. The team is reset when the env says that it is done.

    A lane is absent in steps in which its agent has no observation.
    """

    modes = MODES

    def __init__(self, env: Any):
        super().__init__(env)
        self.lane_names = list(getattr(env, "possible_agents", None) or range(self.num_lanes))
        self._type = action_type(self.single_action_space)
        self._over = True  # the env waits for a reset

    def reset(self, rows: Array, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        return self._begin(out, seeds[0])

    def _begin(self, out: Answers, seed: int | None) -> Infos:
        self._over = True  # if the reset raises, there is no episode
        infos = (self.env.reset() if seed is None else self.env.reset(seed=seed))[1]
        self._over = False
        self._write(out.obs, self.env.observations)
        out.began[:], out.present[:] = True, self.env.masks
        return self._infos(infos, out.began)

    def step(self, rows: Array, actions: Any, out: Answers) -> Infos:
        if self._over:
            if self._episodes.rule.user_resets:
                raise ResetNeeded("the team's episode is over, or none has begun: reset the env before a step")
            return self._begin(out, None)
        infos = self._infos(self.env.step(np.array(actions, self._type))[4], rows)
        self._write(out.obs, self.env.observations)
        out.reward[:], out.present[:] = self.env.rewards, self.env.masks
        # PufferLib marks all agents that are absent as terminated, at every step.
        np.logical_and(self.env.terminals, self.env.masks, out=out.terminated)
        np.logical_and(self.env.truncations, self.env.masks, out=out.truncated)
        self._over = bool(self.env.done)
        if self._episodes.rule.resets_at_once:
            return self._finish(infos, out)
        return infos

    def _finish(self, last: Infos, out: Answers) -> Infos:
        """Keep the last observations, and begin the next episode at once if this one is over."""
        ended = out.terminated | out.truncated
        keep_finals(out, ended)
        if not self._over:
            return last
        kept = own_copy(list(last)) if last else [{}] * self.num_lanes  # the env may use its infos again in reset
        first = self._begin(out, None) or [{}] * self.num_lanes
        out.present[ended] = True
        joined = [with_final_info(*pair) for pair in zip(kept, first, strict=True)]
        return joined if any(joined) else None

    def _infos(self, infos: Any, rows: Array) -> Infos:
        """The infos of all agents stand together in that of the first lane, as the env has given them."""
        told = any(infos.values()) if isinstance(infos, Mapping) else bool(infos)
        others: list[dict[str, Any]] = [{} for _ in range(self.num_lanes - 1)]
        return [_one_info(infos), *others] if told else None


def _one_info(infos: Any) -> dict[str, Any]:
    """Return what an env says beside its answers as one info: a dict, or a list of dicts."""
    if not infos:
        return {}
    return {ENV_INFOS: [dict(infos)] if isinstance(infos, Mapping) else list(infos)}

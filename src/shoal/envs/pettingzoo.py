"""PettingZoo's parallel envs as envs with a lane for each possible agent. AEC envs are converted to parallel envs.

Envs are recognized by their methods: PettingZoo is imported only to convert an AEC env.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from shoal import native
from shoal.envs.autoreset import keep_finals, with_final_info
from shoal.envs.group import Answers, GroupAdapter, Infos
from shoal.errors import BadEnv, ResetNeeded
from shoal.memory.copies import own_copy
from shoal.spaces.leaves import Array, get_path
from shoal.spaces.shared import SharedSpace
from shoal.support.checks import truth
from shoal.support.optional_dependencies import install


def is_parallel_env(env: Any) -> bool:
    """Tell whether an env steps all its agents at once, as PettingZoo's parallel envs do."""
    # The spaces of single-agent envs are attributes, and cannot be called.
    return _has(env, "step", "reset", "observation_space", "action_space") and not is_aec_env(env)


def is_aec_env(env: Any) -> bool:
    """Tell whether an env steps one agent after the other, as PettingZoo's AEC envs do."""
    return _has(env, "step", "reset", "observation_space", "action_space", "agent_iter", "last")


def _has(env: Any, *methods: str) -> bool:
    return not isinstance(env, type) and all(callable(getattr(env, name, None)) for name in methods)


def parallel_from_aec(env: Any) -> Any:
    """Convert an env with PettingZoo's own function. In an env that is not marked as parallelizable, such as a board
    game, each step takes only the action of the agent that has the turn."""
    try:
        conversions = importlib.import_module("pettingzoo.utils.conversions")
    except ImportError as error:
        raise ImportError(f"AEC envs are converted by PettingZoo: {install('pettingzoo')}") from error
    if (getattr(env, "metadata", None) or {}).get("is_parallelizable", False):
        return conversions.aec_to_parallel(env)
    return conversions.turn_based_aec_to_parallel(env)


class ParallelLanes(GroupAdapter):
    """A parallel env as a GroupEnv: lane i is `possible_agents[i]`.

    A lane is present while its agent has an observation. The step in which an agent ends has its last observation
    (zeros if the env gives none) and its flags; afterwards its lane is absent until the agent comes back or the team
    begins its next episode. The team's episode is over when no agent is left. An agent that leaves `agents` without a
    flag has terminated. A reward that comes without an observation is added to that of the agent's next observation.

    Attributes:
        env: the env as it was given.
        observations, actions: the spaces that all agents share, and how the agents' own values lie in them.
        agent_spaces: (observation space, action space) of each agent.
    """

    can_be_absent = True

    def __init__(self, env: Any):
        self._parallel = parallel_from_aec(env) if is_aec_env(env) else env
        self.lane_names = names = _possible_agents(self._parallel)
        self.observations = SharedSpace("observation", names, [self._parallel.observation_space(n) for n in names])
        self.actions = SharedSpace("action", names, [self._parallel.action_space(n) for n in names])
        super().__init__(env, len(names), self.observations.space, self.actions.space)
        own = zip(self.observations.own, self.actions.own, strict=True)
        self.agent_spaces = dict(zip(names, own, strict=True))
        self._paths = tuple(leaf.path for leaf in self.observations.leaves)
        leaf = self.actions.leaves[0] if len(self.actions.leaves) == 1 and self.actions.same else None
        self._one_array_of_actions = leaf is not None and not leaf.path
        self._copies_actions = leaf is not None and bool(leaf.shape)
        self._over = True  # no agent is left, or no episode has begun yet
        self._live = [False] * self.num_lanes
        self._unseen: set[int] = set()  # lanes that are live and have had no observation yet
        self._owed: dict[int, float] = {}  # rewards that came without an observation
        self._list_live_agents()

    def close(self) -> None:
        if hasattr(self._parallel, "close"):
            self._parallel.close()

    # ---- reset -------------------------------------------------------------------------------------------------

    def reset(self, rows: Array, seeds: Sequence[int | None], options: dict[str, Any] | None, out: Answers) -> Infos:
        """Begin an episode of the whole team; the env gets the seed of the first lane."""
        given = {"seed": seeds[0], "options": options}
        return self._begin(out, {name: value for name, value in given.items() if value is not None})

    def _begin(self, out: Answers, given: dict[str, Any]) -> Infos:
        self._over = True  # if the reset raises, no agent lives
        result = self._parallel.reset(**given)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"reset must return a tuple (observations, infos), got {result!r:.200}")
        observations, infos = result
        agents = set(self._parallel.agents)
        self._live = [name in agents for name in self.lane_names]
        self._unseen = {lane for lane, live in enumerate(self._live) if live}
        self._owed.clear()
        for lane, name in enumerate(self.lane_names):
            if self._live[lane] and name in observations:
                self._show(lane, observations[name], out)
            else:
                self._hide(lane, out)
        self._list_live_agents()
        return self._infos(infos)

    # ---- step --------------------------------------------------------------------------------------------------

    def step(self, rows: Array, actions: Any, out: Answers) -> Infos:
        """Step all lanes, with the actions of the agents that live."""
        if self._over:
            if self._episodes.rule.user_resets:
                raise ResetNeeded("all agents' episodes are over, or none has begun: reset the env before a step")
            return self._begin(out, {})
        result = self._parallel.step(self._own_actions(actions))
        try:
            observations, rewards, terminated, truncated, infos = result
        except (TypeError, ValueError):
            raise TypeError(
                "step must return five dicts (observations, rewards, terminations, truncations, infos), got "
                f"{result!r:.200}"
            ) from None
        if not self._step_steadily(observations, rewards, terminated, truncated, out):
            ended = self._step_one_by_one(observations, rewards, terminated, truncated, out)
            if ended and self._episodes.rule.resets_at_once:
                return self._finish(ended, infos, out)
        return self._infos(infos) if any(infos.values()) else None

    def _own_actions(self, actions: Any) -> dict[Any, Any]:
        """Return the actions of the agents that live, by agent."""
        if self._one_array_of_actions:
            # Copied once for all agents, because they may keep their rows.
            own = actions.copy() if self._copies_actions else actions
            if not self._absent:
                return dict(zip(self.lane_names, own, strict=True))
            return {name: own[lane] for lane, name in zip(self._live_lanes, self._live_names, strict=True)}
        values = [get_path(actions, leaf.path) for leaf in self.actions.leaves]
        lives = zip(self._live_lanes, self._live_names, strict=True)
        return {name: self.actions.take_action(lane, values, lane) for lane, name in lives}

    def _step_steadily(self, observations: Any, rewards: Any, terminated: Any, truncated: Any, out: Answers) -> bool:
        """Answer quickly a step in which no agent came, left or ended; return False if there was more to do."""
        if not self.observations.same or self._unseen or self._owed or list(self._parallel.agents) != self._live_names:
            return False
        for lane in self._absent:
            self._hide(lane, out)
        written: bool = native.write_rows(
            self._row_names, self._rows, observations, rewards, terminated, truncated, out.reward, tuple(out.obs),
            self._paths,
        )  # fmt: skip
        return written

    def _step_one_by_one(
        self, observations: Any, rewards: Any, terminated: Any, truncated: Any, out: Answers
    ) -> list[int]:
        """Answer any step, note the agents that come and leave, and return the lanes that have ended."""
        agents, ended = set(self._parallel.agents), []
        out.reward[:] = 0  # the quick way may have written some of them
        for lane, name in enumerate(self.lane_names):
            dead, cut = truth("terminated", terminated.get(name)), truth("truncated", truncated.get(name))
            was, stays = self._live[lane], name in agents and not (dead or cut)
            self._live[lane] = stays
            if stays and not was:
                self._unseen.add(lane)
            if stays:
                self._go_on(lane, observations.get(name), rewards.get(name, 0.0), out)
            elif was and self._end(lane, observations.get(name), rewards.get(name, 0.0), out):
                out.terminated[lane], out.truncated[lane] = dead or not cut, cut
                ended.append(lane)
            elif not was:
                self._hide(lane, out)
        self._list_live_agents()
        return ended

    def _finish(self, ended: list[int], infos: Mapping[Any, Any], out: Answers) -> Infos:
        """Keep the last observations, and begin the next episode at once if no agent is left."""
        keep_finals(out, ended)
        last = self._infos(infos)
        if not self._over:
            return last
        # Copied: an env may use its infos again in reset.
        kept = {lane: own_copy(last[lane]) for lane in ended} if last else {}
        first = self._begin(out, {})
        out.present[ended] = True
        if not kept:
            return first
        return [with_final_info(kept.get(i, {}), info) for i, info in enumerate(first or [{}] * self.num_lanes)]

    # ---- one lane ----------------------------------------------------------------------------------------------

    def _go_on(self, lane: int, observation: Any, reward: Any, out: Answers) -> None:
        """Write the answer of an agent that lives."""
        earned = 0.0 if lane in self._unseen else self._owed.pop(lane, 0.0) + float(reward)
        if observation is None:
            self._owed[lane] = earned
            self._hide(lane, out)
        else:
            out.reward[lane] = earned
            self._show(lane, observation, out)

    def _end(self, lane: int, observation: Any, reward: Any, out: Answers) -> bool:
        """Write the last answer of an agent; return False if it never had an observation."""
        owed = self._owed.pop(lane, 0.0)
        if observation is None and lane in self._unseen:
            self._unseen.discard(lane)
            self._hide(lane, out)
            return False
        out.reward[lane] = owed + float(reward)
        self._show(lane, observation, out)
        return True

    def _show(self, lane: int, observation: Any, out: Answers) -> None:
        if lane in self._unseen:
            self._unseen.discard(lane)
            out.began[lane] = True
        if observation is None:
            self._hide(lane, out)  # but for its presence
        else:
            self.observations.write(lane, observation, out.obs, lane)
        out.present[lane] = True  # it may have been absent in the step that this reset follows

    def _hide(self, lane: int, out: Answers) -> None:
        out.present[lane] = False
        for target in out.obs:
            target[lane] = 0

    def _list_live_agents(self) -> None:
        self._live_lanes = [lane for lane, live in enumerate(self._live) if live]
        self._live_names = [self.lane_names[lane] for lane in self._live_lanes]
        self._absent = [lane for lane, live in enumerate(self._live) if not live]
        self._row_names, self._rows = tuple(self._live_names), tuple(self._live_lanes)
        self._over = not self._live_lanes

    def _infos(self, infos: Mapping[Any, Any]) -> Infos:
        """Return one info for each lane."""
        found = [infos.get(name) or {} for name in self.lane_names]
        for name, info in zip(self.lane_names, found, strict=True):
            if not isinstance(info, dict):
                raise TypeError(f"agent {name!r}: info must be a dict, got {type(info).__name__}")
        return found if any(found) else None


def _possible_agents(env: Any) -> list[Any]:
    names = list(getattr(env, "possible_agents", None) or ())
    if not names:
        raise BadEnv(
            f"{env!r} has no possible_agents, and each of them gets a lane of its own: give the env a list with the "
            "names of all agents that may ever come"
        )
    if len(set(names)) != len(names):
        raise BadEnv(f"possible_agents of {env!r} has a name twice: {names}")
    return names

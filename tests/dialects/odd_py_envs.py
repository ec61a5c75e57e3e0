"""PyEnvironments that answer otherwise than their specs promise, or that TF-Agents' wrappers go around."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Any

import numpy as np
from tf_agents.environments import py_environment, wrappers
from tf_agents.specs import array_spec
from tf_agents.trajectories import time_step as ts

from dialects.py_envs import CountPyEnv, NestedPyEnv


class ScalarEnv(CountPyEnv):
    """A scalar for its scalar spec."""

    def observation_spec(self) -> Any:
        return array_spec.BoundedArraySpec((), np.int32, 0, 1000, "count")

    def observation(self, action: Any) -> Any:
        return np.array(self.count, np.int32)


class ListEnv(ScalarEnv):
    """A list of one number for its scalar spec: a nest, as TF-Agents sees it."""

    def observation(self, action: Any) -> Any:
        return [self.count]


class RowEnv(ScalarEnv):
    """An array of one number for its scalar spec."""

    def observation(self, action: Any) -> Any:
        return np.array([self.count], np.int32)


class ListForRowEnv(CountPyEnv):
    """A list of numbers where its spec says an array."""

    def observation(self, action: Any) -> Any:
        return [float(self.number), self.episode, self.count, action]


class OtherTypeEnv(CountPyEnv):
    """Arrays of float64 where its spec says float32."""

    def observation(self, action: Any) -> Any:
        return super().observation(action).astype(np.float64) + 0.1


class PythonNumbersEnv(ScalarEnv):
    """Numbers of Python everywhere, in TimeSteps that it makes itself."""

    def observation(self, action: Any) -> Any:
        return self.count

    def _step(self, action: Any) -> ts.TimeStep:
        step = super()._step(action)
        return step if step.is_first() else ts.TimeStep(int(step.step_type), float(step.reward), 1.0, self.count)


class OtherNestEnv(NestedPyEnv):
    """Nests its observations otherwise than its spec: an OrderedDict for a dict, a tuple for a list."""

    def observation(self, action: Any) -> Any:
        found = super().observation(action)
        return OrderedDict(parts=tuple(found["parts"]), image=found["image"])


class ByTurnsEnv(CountPyEnv):
    """As promised at every other step only."""

    def observation(self, action: Any) -> Any:
        found = super().observation(action)
        return found if (self.count + self.number) % 2 else found.astype(np.float64)


class NeverResetsEnv(CountPyEnv):
    """Goes on after its last step, as if nothing had happened."""

    def _step(self, action: Any) -> ts.TimeStep:
        self.count += 1
        make = ts.termination if self.count % self.length == 0 else ts.transition
        return make(self.observation(action), float(self.count))


class BeginsAnywhereEnv(CountPyEnv):
    """Begins an episode in the middle of one."""

    def _step(self, action: Any) -> ts.TimeStep:
        self.count += 1
        return self.reset() if self.count == 2 else ts.transition(self.observation(action), 1.0)


class OddFirstEnv(CountPyEnv):
    """Its first TimeSteps have rewards and discounts of their own."""

    def _reset(self) -> ts.TimeStep:
        return super()._reset()._replace(reward=np.float32(5), discount=np.float32(0.5))


class HandledEnv(CountPyEnv):
    """Leaves the resets to its base class."""

    def __init__(self, number: int = 0):
        super().__init__(number)
        self._handle_auto_reset = True


class TwoRewardsEnv(CountPyEnv):
    """A reward of two numbers."""

    def reward_spec(self) -> Any:
        return array_spec.ArraySpec((2,), np.float32, "reward")

    def _reset(self) -> ts.TimeStep:
        self.episode, self.count = self.episode + 1, 0
        return ts.restart(self.observation(-1), reward_spec=self.reward_spec())

    def _step(self, action: Any) -> ts.TimeStep:
        if self._current_time_step.is_last():
            return self.reset()
        self.count += 1
        kind = ts.StepType.LAST if self.count == self.length else ts.StepType.MID
        reward = np.array([self.count, action], np.float32)
        return ts.TimeStep(kind, reward, np.float32(0.9), self.observation(action))


class WordsEnv(CountPyEnv):
    """Observations that are words."""

    def observation_spec(self) -> Any:
        return {"word": array_spec.ArraySpec((), np.dtype("<U8"), "word")}

    def observation(self, action: Any) -> Any:
        return {"word": np.array(f"{self.number}:{self.count}", "<U8")}


class PushEnv(CountPyEnv):
    """Its action is one array of floats."""

    def action_spec(self) -> Any:
        return array_spec.BoundedArraySpec((2,), np.float32, [-1, -2], [1, 2], "push")

    def _step(self, action: Any) -> ts.TimeStep:
        if self._current_time_step.is_last():
            return self.reset()
        self.count += 1
        make = ts.transition if self.count < self.length else ts.termination
        return make(self.observation(action.sum()), float(action[0]))


class OwnStepSpecEnv(CountPyEnv):
    """Describes its TimeSteps otherwise than its other specs say."""

    def time_step_spec(self) -> Any:
        spec = super().time_step_spec()
        return spec._replace(discount=array_spec.BoundedArraySpec((), np.float32, 0.0, 0.5, "less"))


class TalkingEnv(CountPyEnv):
    """Renders by mode; by default it gives no image."""

    def render(self, mode: str = "human") -> Any:
        return None if mode == "human" else np.full((2, 2, 3), self.number, np.uint8)


class MuteEnv(CountPyEnv):
    """Cannot be rendered, seeded or asked for infos."""

    seed = py_environment.PyEnvironment.seed
    render = py_environment.PyEnvironment.render
    get_info = py_environment.PyEnvironment.get_info


class CalledEnv(CountPyEnv):
    """Remembers what is called, in the order of the calls."""

    def __init__(self, number: int = 0):
        super().__init__(number)
        self.calls: list[str] = []

    def _reset(self) -> ts.TimeStep:
        self.calls.append("reset")
        return super()._reset()

    def _step(self, action: Any) -> ts.TimeStep:
        self.calls.append("step")
        return super()._step(action)

    def close(self) -> None:
        self.calls.append("close")


class TellingEnv(CountPyEnv):
    """Keeps what it was given."""

    given_action: Any = None

    def _step(self, action: Any) -> ts.TimeStep:
        self.given_action = action
        return ts.transition(self.observation(0), 1.0)


PLAIN = (CountPyEnv, NestedPyEnv, ScalarEnv, PushEnv, HandledEnv, OwnStepSpecEnv)
ODD = (
    ListEnv, RowEnv, ListForRowEnv, OtherTypeEnv, PythonNumbersEnv, OtherNestEnv, ByTurnsEnv, NeverResetsEnv,
    BeginsAnywhereEnv, OddFirstEnv, TwoRewardsEnv, WordsEnv,
)  # fmt: skip


def _wrap(name: str, env: Any) -> Any:
    around = {
        "TimeLimit": lambda: wrappers.TimeLimit(env, 2),
        "FixedLength": lambda: wrappers.FixedLength(env, 6),
        "ActionRepeat": lambda: wrappers.ActionRepeat(env, 2),
        "RunStats": lambda: wrappers.RunStats(env),
        "ObservationFilter": lambda: wrappers.ObservationFilterWrapper(env, idx=[2, 1]),
        "History": lambda: wrappers.HistoryWrapper(env, 3, include_actions=True),
        "OneHotAction": lambda: wrappers.OneHotActionWrapper(env),
        "ActionDiscretize": lambda: wrappers.ActionDiscretizeWrapper(env, np.array([3, 5])),
        "ActionClip": lambda: wrappers.ActionClipWrapper(env),
        "ActionOffset": lambda: wrappers.ActionOffsetWrapper(env),
        "FlattenAction": lambda: wrappers.FlattenActionWrapper(env),
        "FlattenObservations": lambda: wrappers.FlattenObservationsWrapper(env),
        "several": lambda: wrappers.RunStats(wrappers.TimeLimit(wrappers.ActionRepeat(env, 2), 3)),
    }
    return around[name]()


class LooseEnv(CountPyEnv):
    """Takes actions of any type and shape that hold one number."""

    def _step(self, action: Any) -> ts.TimeStep:
        return super()._step(np.int32(np.asarray(action).item()))


class NumberedProcessEnv(LooseEnv):
    """Knows its process."""

    def _process_id(self) -> int:
        return os.getpid()


class Numbered(CountPyEnv):
    """Its actions count from 1."""

    def action_spec(self) -> Any:
        return array_spec.BoundedArraySpec((), np.int32, 1, 3, "action")


class FloatDictEnv(CountPyEnv):
    """A dict of arrays of one type, which can be flattened."""

    def observation_spec(self) -> Any:
        return {name: array_spec.ArraySpec((2,), np.float32, name) for name in ("a", "b")}

    def observation(self, action: Any) -> Any:
        return {"b": np.array([self.count, action], np.float32), "a": np.full(2, self.number, np.float32)}


WRAPPED = {
    "TimeLimit": CountPyEnv, "FixedLength": CountPyEnv, "ActionRepeat": CountPyEnv, "RunStats": CountPyEnv,
    "ObservationFilter": CountPyEnv, "History": CountPyEnv, "OneHotAction": LooseEnv,
    "ActionDiscretize": PushEnv, "ActionClip": PushEnv, "ActionOffset": Numbered,
    "FlattenAction": PushEnv, "FlattenObservations": FloatDictEnv, "several": CountPyEnv,
}  # fmt: skip


def make(name: str, number: int) -> Any:
    """An env by the name of its class, or of a wrapper, which then goes around a fitting env."""
    if name in WRAPPED:
        return _wrap(name, WRAPPED[name](number))
    return globals()[name](number)

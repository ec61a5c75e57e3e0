"""More behaviours of Gymnasium's two vector envs: calls, errors of envs, half calls, ends, wrappers around them."""

# ruff: noqa: B023, as a note calls its function at once

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import time
import warnings
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import vector as wrappers

from dialects.gymnasium_behaviours import CARTPOLE, PENDULUM, RGB, Note, behaviour, only_async, only_sync, play, zeros
from envs import SPACES, CountEnv, FailEnv, InfoEnv, SpaceEnv

# ---- calls --------------------------------------------------------------------------------------------------


@behaviour
def calls(cls: Any, note: Note) -> None:
    envs = cls([RGB] * 3)
    envs.reset(seed=0)
    envs.step(zeros())
    note("method", lambda: envs.call("add", 1))
    note("with a keyword", lambda: envs.call("add", 1, b=4))
    note("attribute", lambda: envs.call("length"))
    note("attribute with arguments", lambda: envs.call("length", 1, b=2))
    note("get", lambda: envs.get_attr("length"))
    note("render", envs.render)
    note("render by call", lambda: envs.call("render"))
    note("space", lambda: envs.get_attr("observation_space"))
    note("metadata", lambda: envs.get_attr("metadata"))
    note("spec", lambda: envs.get_attr("spec"))
    note("step", lambda: envs.step(zeros()))
    envs.close()


@behaviour
def calls_through_wrappers(cls: Any, note: Note) -> None:
    envs = cls([CARTPOLE] * 3)
    envs.reset(seed=0)
    note("gravity", lambda: envs.get_attr("gravity"))
    note("set", lambda: envs.set_attr("gravity", 1.5))
    note("set", lambda: envs.get_attr("gravity"))
    note("each", lambda: envs.set_attr("gravity", [1.0, 2.0, 3.0]))
    note("each", lambda: envs.get_attr("gravity"))
    note("has", lambda: envs.call("has_wrapper_attr", "gravity"))
    note("get_wrapper_attr", lambda: envs.call("get_wrapper_attr", "gravity"))
    note("set_wrapper_attr", lambda: envs.call("set_wrapper_attr", "gravity", 4.0))
    note("set by call", lambda: envs.get_attr("gravity"))
    note("new", lambda: envs.set_attr("not_there_before", 1))
    note("new", lambda: envs.get_attr("not_there_before"))
    note("step", lambda: envs.step(zeros()))
    envs.close()


@behaviour
def attributes_of_the_envs(cls: Any, note: Note) -> None:
    envs = cls([CountEnv] * 3)
    values: list[Any] = ["text", 1, None, [1, 2, 3], ("a", None, ["c"]), {"a": 1}, np.arange(3), np.arange(2)]
    for value in values:
        note(f"set {value!r}", lambda: envs.set_attr("value", value))
        note(f"get {value!r}", lambda: envs.get_attr("value"))
    for value in ([1, 2], (1, 2, 3, 4), []):
        note(f"set {value!r}", lambda: envs.set_attr("value", value))
    note("unchanged", lambda: envs.get_attr("value"))
    envs.close()


@behaviour
def calls_that_fail(cls: Any, note: Note) -> None:
    uses = {
        "no such attribute": lambda envs: envs.get_attr("no_such_thing"),
        "a method that raises": lambda envs: envs.call("complain"),
        "wrong arguments": lambda envs: envs.call("add"),
        "no text": lambda envs: envs.call(3),
    }
    for name, use in uses.items():
        envs = cls([CountEnv] * 3)
        envs.reset(seed=0)
        note(name, lambda: use(envs))
        with contextlib.suppress(Exception):
            envs.close(terminate=True)


@only_async
def calls_of_what_has_a_method_of_its_own(cls: Any, note: Note) -> None:
    for name in ("reset", "step", "close", "_setattr", "_check_spaces"):
        envs = cls([CountEnv] * 2)
        note(name, lambda: envs.call(name))
        envs.close(terminate=True)


# ---- errors of envs -----------------------------------------------------------------------------------------


@behaviour
def envs_that_raise(cls: Any, note: Note) -> None:
    errors = [ValueError("bad joint"), KeyError("key"), AssertionError(), OSError(2, "nothing here"),
              RuntimeError("a", 1),
              gymnasium.error.ResetNeeded("reset"), StopIteration("over"), ZeroDivisionError("zero")]  # fmt: skip
    for error in errors:
        envs = cls([CountEnv, partial(FailEnv, "step", error)])
        envs.reset(seed=0)
        note(f"step {error!r}", lambda: envs.step([0, 3]))
        envs.close()
        envs = cls([CountEnv, partial(FailEnv, "reset", error)])
        note(f"reset {error!r}", lambda: envs.reset(seed=0))
        envs.close()


@behaviour
def a_partial_reset_that_fails(cls: Any, note: Note) -> None:
    envs = cls([CountEnv, partial(FailEnv, "reset")])
    note("mask", lambda: envs.reset(options={"reset_mask": np.array([False, True])}))
    envs.close()


@behaviour
def a_partial_reset_before_any_other(cls: Any, note: Note) -> None:
    envs = cls([CARTPOLE] * 3)
    note("mask", lambda: envs.reset(seed=1, options={"reset_mask": np.array([True, True, False])}))
    envs.close()


class BadAnswers(CountEnv):
    """Answers one thing that does not fit."""

    def __init__(self, which: str):
        super().__init__()
        self.which = which

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        odd = {
            "shape": (np.zeros(5, np.int64), reward, terminated, truncated, info),
            "reward None": (obs, None, terminated, truncated, info),
            "reward array": (obs, np.array([2.5]), terminated, truncated, info),
            "reward 0-d": (obs, np.array(2.5, np.float32), terminated, truncated, info),
            "reward int": (obs, 3, terminated, truncated, info),
            "four values": (obs, reward, terminated, info),
            "flags 0 and 1": (obs, reward, 0, 1, info),
            "numpy flags": (obs, reward, np.bool_(True), np.bool_(False), info),
            "a list": (obs.tolist(), reward, terminated, truncated, info),
            "another type": (obs.astype(np.int32), reward, terminated, truncated, info),
            "no info": (obs, reward, terminated, truncated, None),
            "a list for the answer": [obs, reward, terminated, truncated, info],
        }
        return odd[self.which]


def odd_answers(which: str, cls: Any, note: Note) -> None:
    """An answer that Gymnasium takes, or not."""
    envs = cls([partial(BadAnswers, which)] * 2)
    envs.reset(seed=0)
    note(which, lambda: envs.step(zeros(2)))
    with contextlib.suppress(Exception):
        envs.close(terminate=True)  # theirs may wait for a worker that has left


GOOD_ANSWERS = ["reward 0-d", "reward int", "flags 0 and 1", "numpy flags", "a list", "another type"]
ODD_ANSWERS = ["shape", "reward None", "reward array", "reward 0-d", "reward int", "four values", "flags 0 and 1",
               "numpy flags", "a list", "another type", "no info", "a list for the answer"]  # fmt: skip


# ---- half calls ---------------------------------------------------------------------------------------------

HALVES: dict[str, Any] = {
    "reset_async": lambda envs: envs.reset_async(seed=1),
    "step_async": lambda envs: envs.step_async(zeros()),
    "call_async": lambda envs: envs.call_async("add", 1),
    "reset": lambda envs: envs.reset(seed=1),
    "step": lambda envs: envs.step(zeros()),
    "call": lambda envs: envs.call("add", 1),
    "get_attr": lambda envs: envs.get_attr("length"),
    "set_attr": lambda envs: envs.set_attr("length", 9),
    "render": lambda envs: envs.render(),
    "reset_wait": lambda envs: envs.reset_wait(),
    "step_wait": lambda envs: envs.step_wait(),
    "call_wait": lambda envs: envs.call_wait(),
    "reset_wait in time": lambda envs: envs.reset_wait(timeout=5),
    "step_wait in time": lambda envs: envs.step_wait(timeout=5),
    "call_wait in time": lambda envs: envs.call_wait(timeout=5),
}


@only_async
def halves_in_order(cls: Any, note: Note) -> None:
    envs = cls([CountEnv] * 3)
    for name in ("reset", "step", "call", "step", "reset", "call"):
        note(f"{name}_async", lambda: HALVES[f"{name}_async"](envs))
        note(f"{name} state", lambda: envs._state)
        note(f"{name}_wait", lambda: HALVES[f"{name}_wait"](envs))
        note(f"{name}_async", lambda: HALVES[f"{name}_async"](envs))
        note(f"{name}_wait in time", lambda: HALVES[f"{name}_wait in time"](envs))
    note("positional", lambda: envs.reset_async(4, {"a": 1}))
    note("positional wait", lambda: envs.reset_wait(5.0))
    envs.close()


def misused(pending: str, cls: Any, note: Note) -> None:
    """Any other call while one is pending ("" for none)."""
    envs = cls([RGB] * 3)
    envs.reset(seed=0)
    if pending:
        HALVES[f"{pending}_async"](envs)
    for name, use in HALVES.items():
        if not (pending and name.startswith(f"{pending}_wait")) and (
            pending or name.partition(" ")[0].endswith("_wait")
        ):
            note(name, lambda: use(envs))
    if pending:
        note("at last", lambda: HALVES[f"{pending}_wait"](envs))
    note("step", lambda: envs.step(zeros()))
    envs.close()


class Sleepy(CountEnv):
    """Takes a while where it is told to."""

    def step(self, action: Any) -> Any:
        time.sleep(0.4 if action == 3 else 0.0)
        return super().step(action)

    def nap(self) -> str:
        """Takes a while."""
        time.sleep(0.4)
        return "rested"

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        time.sleep(0.4 if options else 0.0)
        return super().reset(seed=seed, options=options)


@only_async
def waits_that_time_out(cls: Any, note: Note) -> None:
    starts: dict[str, Any] = {
        "step": lambda envs: envs.step_async([3, 3]),
        "call": lambda envs: envs.call_async("nap"),
        "reset": lambda envs: envs.reset_async(options={"slow": 1}),
    }
    for name, start in starts.items():
        for timeout in (0.05, 0):
            envs = cls([Sleepy] * 2)
            envs.reset(seed=0)
            start(envs)
            note(f"{name} {timeout}", lambda: getattr(envs, f"{name}_wait")(timeout=timeout))
            note(f"{name} again", lambda: getattr(envs, f"{name}_wait")())
            envs.close(terminate=True)


# ---- ends ---------------------------------------------------------------------------------------------------


@behaviour
def closing(cls: Any, note: Note) -> None:
    envs = cls([RGB] * 2)
    envs.reset(seed=0)
    note("close", envs.close)
    note("closed", lambda: envs.closed)
    note("again", envs.close)
    for name in ("num_envs", "observation_space", "metadata", "render_mode"):
        note(name, lambda: getattr(envs, name))
    note("repr", lambda: repr(envs))


@only_async
def use_after_close(cls: Any, note: Note) -> None:
    envs = cls([RGB] * 3)
    envs.reset(seed=0)
    envs.close()
    for name, use in HALVES.items():
        note(name, lambda: use(envs))
    note("np_random", lambda: envs.np_random)


@behaviour
def arguments_of_close(cls: Any, note: Note) -> None:
    for kwargs in ({"timeout": 5}, {"terminate": True}, {"timeout": 1, "terminate": True}):
        envs = cls([CountEnv] * 2)
        note(f"{kwargs}", lambda: envs.close(**kwargs))
        note("closed", lambda: envs.closed)
    envs = cls([CountEnv] * 2)
    note("by position", lambda: envs.close(1))
    envs.close()
    envs = cls([CountEnv] * 2)
    note("extras", lambda: envs.close_extras())


@only_async
def closing_while_something_is_pending(cls: Any, note: Note) -> None:
    for name in ("reset", "step", "call"):
        for kwargs in ({}, {"timeout": 2}, {"terminate": True}):
            envs = cls([CountEnv] * 3)
            envs.reset(seed=0)
            HALVES[f"{name}_async"](envs)
            note(f"{name} {kwargs}", lambda: warned(envs.close, **kwargs))
            note("closed", lambda: envs.closed)


def warned(function: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **kwargs)
    return [(one.category.__name__, str(one.message)) for one in caught]


@behaviour
def quiet_at_the_start(cls: Any, note: Note) -> None:
    made: list[Any] = []
    note("warnings", lambda: warned(lambda: made.append(cls([CARTPOLE] * 3))))
    note("reset", lambda: warned(made[0].reset, seed=1))
    note("step", lambda: warned(made[0].step, zeros()))
    note("close", lambda: warned(made[0].close))


@behaviour
def let_go(cls: Any, note: Note) -> None:
    envs = cls([CountEnv] * 2)
    envs.reset(seed=0)

    def let() -> None:
        nonlocal envs
        del envs
        gc.collect()

    note("del", let)


@only_sync  # a copy of theirs that fails halfway closes descriptors that are not its own
def copies_of_itself(cls: Any, note: Note) -> None:
    for mode in AutoresetMode:
        envs = cls([CARTPOLE] * 2, autoreset_mode=mode)
        for steps in (0, 1, 8):
            if steps:
                play(envs, note, steps)
            for way in (lambda: pickle.loads(pickle.dumps(envs)), lambda: copy.deepcopy(envs)):
                again = way()
                note("itself", lambda: (again.num_envs, again.autoreset_mode, again.closed, repr(again)))
                note("goes on", lambda: again.step(zeros(2)) if steps else None)
                note("its seeds", lambda: again.np_random_seed if steps else None)
                play(again, note, 12, None if steps else 5)
                again.close()
        note("the first one", lambda: envs.reset())
        envs.close()


@only_sync
def calls_of_what_has_a_method(cls: Any, note: Note) -> None:
    envs = cls([CountEnv] * 2)
    note("reset", lambda: envs.call("reset", seed=3))
    note("step", lambda: envs.call("step", 1))
    note("close", lambda: envs.call("close"))
    note("closes", lambda: envs.get_attr("closes"))
    envs.close()


@only_sync
def an_error_and_on(cls: Any, note: Note) -> None:
    envs = cls([CountEnv, partial(FailEnv, "step")])
    envs.reset(seed=0)
    note("error", lambda: envs.step([0, 3]))
    note("next", lambda: envs.step([0, 0]))
    envs.close()


# ---- arguments of AsyncVectorEnv ----------------------------------------------------------------------------

ASYNC_ARGUMENTS: list[dict[str, Any]] = [
    {"shared_memory": False}, {"shared_memory": True}, {"daemon": False}, {"daemon": True}, {"copy": False},
    {"context": None}, {"context": "forkserver"}, {"context": "spawn"}, {"context": "fork"}, {"max_concurrency": 1},
    {"max_concurrency": np.int64(2)}, {"max_concurrency": 99}, {"worker": None},
    {"shared_memory": False, "copy": False}, {"autoreset_mode": AutoresetMode.SAME_STEP, "shared_memory": False},
]  # fmt: skip
BAD: dict[str, tuple[str, Any]] = {
    "no concurrency": ("max_concurrency", 0), "less than that": ("max_concurrency", -2),
    "half an env": ("max_concurrency", 1.5), "a text": ("max_concurrency", "2"),
    "worker": ("worker", lambda: None), "context": ("context", "teleport"),
}  # fmt: skip


def async_arguments(arguments: dict[str, Any], cls: Any, note: Note) -> None:
    """Each is kept as an attribute, and changes nothing of the results."""
    envs = cls([partial(InfoEnv, "everything")] * 3, **arguments)
    for name in ("shared_memory", "daemon", "copy", "context", "max_concurrency", "worker", "observation_mode"):
        note(name, lambda: getattr(envs, name))
    play(envs, note)
    envs.close()


def bad_async_arguments(name: str, value: Any, cls: Any, note: Note) -> None:
    """Refused with their words."""
    note("refused", lambda: cls([CountEnv] * 2, **{name: value}))


@only_async
def objects_in_shared_memory(cls: Any, note: Note) -> None:
    note("a graph", lambda: cls([partial(SpaceEnv, SPACES["graph"])] * 2).close())


# ---- wrappers -----------------------------------------------------------------------------------------------


class NoClock(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
    """Takes the wall-clock time out of RecordEpisodeStatistics: it is never the same twice."""

    def step(self, actions: Any) -> Any:
        result = super().step(actions)
        for key in ("t", "_t"):
            result[4].get("episode", {}).pop(key, None)
        return result


IMAGE, DICT = (partial(SpaceEnv, SPACES[name]) for name in ("image", "dict"))
WRAPPERS: dict[str, tuple[Any, Any]] = {
    "DictInfoToList": (partial(InfoEnv, "everything"), wrappers.DictInfoToList),
    "NormalizeObservation": (CARTPOLE, wrappers.NormalizeObservation),
    "NormalizeReward": (PENDULUM, wrappers.NormalizeReward),
    "ClipAction": (PENDULUM, wrappers.ClipAction),
    "RescaleAction": (PENDULUM, lambda envs: wrappers.RescaleAction(envs, -1.0, 1.0)),
    "TransformAction": (CARTPOLE, lambda envs: wrappers.TransformAction(envs, lambda actions: 1 - actions)),
    "ClipReward": (PENDULUM, lambda envs: wrappers.ClipReward(envs, -1.0, 0.0)),
    "TransformReward": (PENDULUM, lambda envs: wrappers.TransformReward(envs, lambda rewards: 2 * rewards)),
    "TransformObservation": (CARTPOLE, lambda envs: wrappers.TransformObservation(envs, lambda obs: 2 * obs)),
    "FilterObservation": (DICT, lambda envs: wrappers.FilterObservation(envs, ["a"])),
    "FlattenObservation": (DICT, wrappers.FlattenObservation),
    "GrayscaleObservation": (IMAGE, wrappers.GrayscaleObservation),
    "ResizeObservation": (IMAGE, lambda envs: wrappers.ResizeObservation(envs, (4, 4))),
    "ReshapeObservation": (IMAGE, lambda envs: wrappers.ReshapeObservation(envs, (6, 24))),
    "DtypeObservation": (CARTPOLE, lambda envs: wrappers.DtypeObservation(envs, np.float64)),
    "NumpyToTorch": (CARTPOLE, lambda envs: wrappers.NumpyToTorch(envs)),
    "HumanRendering": (RGB, wrappers.HumanRendering),
    "RecordVideo": (RGB, lambda envs: wrappers.RecordVideo(envs, "/nonexistent/of/course", lambda episode: False)),
    "RecordEpisodeStatistics": (CARTPOLE, lambda envs: NoClock(wrappers.RecordEpisodeStatistics(envs))),
}


def wrapped(name: str, cls: Any, note: Note) -> None:
    """One of Gymnasium's wrappers around it."""
    make, wrap = WRAPPERS[name]
    envs = cls([make] * 3)
    around = note("made", lambda: wrap(envs))
    if around is not None:
        for space in ("observation_space", "single_observation_space", "action_space", "single_action_space"):
            note(space, lambda: getattr(around, space))
        note("repr", lambda: repr(around))
        note("unwrapped", lambda: around.unwrapped is envs)
        note("attribute", lambda: around.env is envs)
        if name not in ("NumpyToTorch", "HumanRendering"):
            play(around, note)
    envs.close()

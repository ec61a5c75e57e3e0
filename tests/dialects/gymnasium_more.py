"""Still more behaviours of Gymnasium's two vector envs: their signatures, their lists, the type of what they return."""

# ruff: noqa: B023, as a note calls its function at once

from __future__ import annotations

import contextlib
import inspect
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from dialects.gymnasium_behaviours import CARTPOLE, PENDULUM, RGB, Note, behaviour, only_async, only_sync, play, zeros
from envs import CountEnv, FailEnv, InfoEnv

METHODS = ("reset", "step", "call", "get_attr", "set_attr", "render", "close", "close_extras")


def signatures(name: str, cls: Any, note: Note) -> None:
    """The arguments that a method takes, and their kinds and defaults."""
    found = inspect.signature(getattr(cls, name)).parameters.values()
    note(name, lambda: [(one.name, one.kind, one.default) for one in found])


@behaviour
def types_of_what_is_returned(cls: Any, note: Note) -> None:
    envs = cls([CARTPOLE] * 3)
    reset = envs.reset(seed=0)
    note("reset", lambda: (type(reset), [type(part) for part in reset], reset[0].flags.writeable))
    for i in range(12):
        result = envs.step(zeros())
        note(f"step {i}", lambda: (type(result), [type(part) for part in result], result[0].flags.writeable))
        note(f"types {i}", lambda: [part.dtype for part in result[:4]])
    note("attributes", lambda: type(envs.get_attr("spec")))
    note("call", lambda: type(envs.call("has_wrapper_attr", "x")))
    envs.close()


@behaviour
def arrays_that_the_caller_changes(cls: Any, note: Note) -> None:
    envs = cls([InfoEnv] * 3)
    first, info = envs.reset(seed=0)
    first[:] = 0
    info.clear()
    for i in range(4):
        obs, rewards, ended, cut, info = envs.step(zeros())
        note(f"step {i}", lambda: (obs, rewards, ended, cut, info))
        rewards[:], ended[:], cut[:] = 7, True, True
        obs[:] = 0
    envs.close()


@behaviour
def actions_that_the_caller_changes(cls: Any, note: Note) -> None:
    envs = cls([CountEnv] * 3)
    envs.reset(seed=0)
    actions = np.array([0, 1, 2])
    for i in range(3):
        note(f"step {i}", lambda: envs.step(actions))
        actions += 1
    envs.close()


@behaviour
def continuous_actions_of_other_types(cls: Any, note: Note) -> None:
    for name, actions in {
        "float64": np.full((3, 1), 0.1), "int64": np.ones((3, 1), np.int64), "list": [[0.1], [0.2], [0.3]],
    }.items():  # fmt: skip
        envs = cls([PENDULUM] * 3)
        envs.reset(seed=0)
        note(name, lambda: envs.step(actions))
        envs.close()


@behaviour
def two_at_a_time(cls: Any, note: Note) -> None:
    one, other = cls([CARTPOLE] * 2), cls([CARTPOLE] * 3)
    play(one, note)
    play(other, note)
    one.close()
    note("the other one", lambda: other.step(zeros()))
    other.close()


@behaviour
def closed_by_a_with_block(cls: Any, note: Note) -> None:
    with contextlib.ExitStack() as stack:
        envs = cls([CountEnv] * 2)
        stack.callback(envs.close)
        note("reset", lambda: envs.reset(seed=3))
    note("closed", lambda: envs.closed)


@behaviour
def functions_that_make_several_kinds(cls: Any, note: Note) -> None:
    fns = [CARTPOLE, partial(gymnasium.make, "CartPole-v1", max_episode_steps=4), lambda: CARTPOLE()]
    for mode in AutoresetMode:
        envs = cls(fns, autoreset_mode=mode)
        play(envs, note, 14)
        envs.close()


@behaviour
def by_make_vec(cls: Any, note: Note) -> None:
    kept = getattr(gymnasium.vector, cls.__name__)
    setattr(gymnasium.vector, cls.__name__, cls)
    try:
        mode = "sync" if cls.__name__ == "SyncVectorEnv" else "async"
        envs = gymnasium.make_vec("CartPole-v1", 3, mode, vector_kwargs={"copy": True}, max_episode_steps=6)
        note("spec", lambda: envs.spec)
        note("class", lambda: type(envs).__name__)
        play(envs, note, 14)
        envs.close()
    finally:
        setattr(gymnasium.vector, cls.__name__, kept)


@only_sync
def the_list_of_envs(cls: Any, note: Note) -> None:
    envs = cls([RGB, RGB])
    envs.reset(seed=0)
    note("length", lambda: len(envs.envs))
    note("kinds", lambda: [type(env).__name__ for env in envs.envs])
    note("itself", lambda: envs.envs[0].unwrapped is envs.get_attr("unwrapped")[0])
    envs.envs[0].length = 2
    note("an attribute", lambda: envs.get_attr("length"))
    envs.envs[1] = gymnasium.wrappers.TimeLimit(CountEnv(9, render_mode="rgb_array"), 2)
    note("another env", lambda: envs.get_attr("length"))
    note("its reset", lambda: envs.reset(seed=4))
    for i in range(5):
        note(f"its steps {i}", lambda: envs.step(zeros(2)))
    envs.close()


@only_sync
def use_of_a_closed_one(cls: Any, note: Note) -> None:
    envs = cls([RGB] * 2)
    envs.reset(seed=0)
    envs.close()
    note("reset", lambda: envs.reset(seed=0))
    note("step", lambda: envs.step(zeros(2)))
    note("call", lambda: envs.call("add", 1))
    note("get_attr", lambda: envs.get_attr("length"))
    note("set_attr", lambda: envs.set_attr("length", 4))
    note("render", envs.render)


@only_async
def what_only_theirs_has(cls: Any, note: Note) -> None:
    envs = cls([CountEnv] * 3)
    for name in ("processes", "parent_pipes", "error_queue"):
        note(name, lambda: len(getattr(envs, name)) if name != "error_queue" else getattr(envs, name) is not None)
    envs.close()


@only_async
def an_error_of_a_worker_and_on(cls: Any, note: Note) -> None:
    note("constructor", lambda: cls([CountEnv, partial(FailEnv, "constructor")]))
    envs = cls([CountEnv, partial(FailEnv, "step")])
    envs.reset(seed=0)
    note("error", lambda: envs.step([0, 3]))
    note("next", lambda: envs.reset(seed=1))
    envs.close(terminate=True)

"""What users of Gymnasium's two vector envs rely on: one short script for each behaviour.

A script is given a class and a `note`. `note(what, function)` keeps what the function returns or raises, so that the
notes of two classes can be compared.
"""

# ruff: noqa: B023, as a note calls its function at once

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from envs import SPACES, CountEnv, FailEnv, InfoEnv, SpaceEnv

Note = Callable[[str, Callable[[], Any]], Any]
Script = Callable[[Any, Note], None]
RGB = partial(CountEnv, render_mode="rgb_array")
CARTPOLE, PENDULUM = (partial(gymnasium.make, name, max_episode_steps=9) for name in ("CartPole-v1", "Pendulum-v1"))
MODES = list(AutoresetMode)

BOTH: dict[str, Script] = {}  # for SyncVectorEnv and AsyncVectorEnv
SYNC: dict[str, Script] = {}  # for SyncVectorEnv alone
ASYNC: dict[str, Script] = {}  # for AsyncVectorEnv alone


def behaviour(script: Script, table: dict[str, Script] | None = None, name: str = "") -> Script:
    """Put a script into a table, under its own name."""
    (BOTH if table is None else table)[name or script.__name__.replace("_", " ")] = script
    return script


def only_async(script: Script) -> Script:
    """The same for what only AsyncVectorEnv has."""
    return behaviour(script, ASYNC)


def only_sync(script: Script) -> Script:
    """The same for what only SyncVectorEnv can do."""
    return behaviour(script, SYNC)


def zeros(count: int = 3) -> Any:
    """Actions of so many counting envs."""
    return np.zeros(count, np.int64)


def play(envs: Any, note: Note, steps: int = 12, seed: Any = 5) -> None:
    """Reset and step, with resets by mask where the user must reset."""
    note("reset", lambda: envs.reset(seed=seed))
    space = deepcopy(envs.action_space)
    space.seed(3)
    for i in range(steps):
        result = note(f"step {i}", lambda: envs.step(space.sample()))
        if result is None:
            return
        done = result[2] | result[3]
        if envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED and done.any():
            note(f"reset after {i}", lambda: envs.reset(options={"reset_mask": done}))


# ---- what it says of itself ---------------------------------------------------------------------------------


@behaviour
def attributes(cls: Any, note: Note) -> None:
    env_fns = [RGB] * 3
    envs = cls(env_fns)
    for name in (
        "num_envs", "metadata", "render_mode", "spec", "closed", "autoreset_mode", "copy", "observation_mode",
        "single_observation_space", "observation_space", "single_action_space", "action_space",
    ):  # fmt: skip
        note(name, lambda: getattr(envs, name))
    note("repr", lambda: repr(envs))
    note("str", lambda: str(envs))
    note("unwrapped", lambda: envs.unwrapped is envs)
    note("env_fns", lambda: envs.env_fns is env_fns)
    note("class metadata", lambda: CountEnv.metadata)
    note("is a vector env", lambda: isinstance(envs, gymnasium.vector.VectorEnv))
    note("is an env", lambda: isinstance(envs, gymnasium.Env))
    note("unknown", lambda: envs.no_such_thing)
    note("length", lambda: len(envs))
    note("iterates", lambda: iter(envs))
    envs.close()


@behaviour
def is_an_instance_of_theirs(cls: Any, note: Note) -> None:
    envs = cls([CountEnv] * 2)
    note("sync", lambda: isinstance(envs, gymnasium.vector.SyncVectorEnv))
    note("async", lambda: isinstance(envs, gymnasium.vector.AsyncVectorEnv))
    note(
        "classes", lambda: [issubclass(cls, getattr(gymnasium.vector, n)) for n in ("SyncVectorEnv", "AsyncVectorEnv")]
    )
    note("name", lambda: type(envs).__name__)
    envs.close()


@behaviour
def generators(cls: Any, note: Note) -> None:
    envs = cls([CountEnv] * 3)
    for seed in (5, [7, None, 9], None):
        envs.reset(seed=seed)
        note(f"seeds after {seed}", lambda: envs.np_random_seed)
        note(f"draws after {seed}", lambda: [one.random() for one in envs.np_random])
    note("set", lambda: setattr(envs, "np_random", np.random.default_rng(0)))
    envs.close()


@behaviour
def spaces_can_be_sampled_and_seeded(cls: Any, note: Note) -> None:
    envs = cls([CARTPOLE] * 3)
    envs.action_space.seed(4)
    note("sample", envs.action_space.sample)
    envs.single_action_space.seed(4)
    note("sample of one", envs.single_action_space.sample)
    note("contains", lambda: envs.observation_space.contains(envs.reset(seed=1)[0]))
    envs.close()


@behaviour
def the_first_env_speaks_for_all(cls: Any, note: Note) -> None:
    envs = cls([partial(CountEnv, render_mode="rgb_array"), CountEnv])
    note("render_mode", lambda: envs.render_mode)
    envs.close()
    envs = cls([CARTPOLE, partial(gymnasium.make, "CartPole-v1", sutton_barto_reward=True)])
    note("metadata", lambda: envs.metadata)
    note("spec", lambda: envs.spec)
    play(envs, note)
    envs.close()


# ---- construction -------------------------------------------------------------------------------------------


@behaviour
def no_envs(cls: Any, note: Note) -> None:
    note("empty list", lambda: cls([]))


@behaviour
def other_collections_of_functions(cls: Any, note: Note) -> None:
    for kind in (tuple, list):
        envs = cls(kind([CountEnv] * 2))
        note(kind.__name__, lambda: envs.reset(seed=1))
        envs.close()


@behaviour
def one_env(cls: Any, note: Note) -> None:
    envs = cls([CountEnv])
    play(envs, note)
    envs.close()


@behaviour
def seven_envs(cls: Any, note: Note) -> None:
    envs = cls([CARTPOLE] * 7)
    play(envs, note, 40)
    envs.close()


@behaviour
def what_is_no_function(cls: Any, note: Note) -> None:
    note("an env", lambda: cls([CountEnv()]))
    note("an id", lambda: cls(["CartPole-v1"]))


@behaviour
def a_constructor_that_raises(cls: Any, note: Note) -> None:
    note("first", lambda: cls([partial(FailEnv, "constructor")] * 2))


@behaviour
def unknown_arguments(cls: Any, note: Note) -> None:
    note("argument", lambda: cls([CountEnv], no_such_argument=1))


@behaviour
def autoreset_modes_by_name(cls: Any, note: Note) -> None:
    for mode in (*MODES, *(mode.value for mode in MODES)):
        envs = cls([CountEnv], autoreset_mode=mode)
        note(str(mode), lambda: (envs.autoreset_mode, envs.metadata))
        envs.close()
    note("unknown", lambda: cls([CountEnv], autoreset_mode="sometimes"))
    note("None", lambda: cls([CountEnv], autoreset_mode=None))


def bounded(high: float, actions: int = 3, dtype: Any = np.float32, size: int = 2) -> SpaceEnv:
    """An env of other spaces for each argument."""
    return SpaceEnv(spaces.Box(-high, high, (size,), dtype), spaces.Discrete(actions))


@behaviour
def spaces_that_differ(cls: Any, note: Note) -> None:
    one = partial(bounded, 1.0)
    others = {
        "bounds": partial(bounded, 2.0), "shape": partial(bounded, 1.0, size=3),
        "type": partial(bounded, 1.0, dtype=np.float64), "actions": partial(bounded, 1.0, 4),
    }  # fmt: skip
    custom = (spaces.Box(-3, 3, (2, 2), np.float32), spaces.Box(-3, 3, (2,), np.float32))
    for name, other in others.items():
        for mode in ("same", "different", custom):
            note(
                f"{name} {mode}", lambda: (e := cls([one, other], observation_mode=mode)).close() or e.observation_space
            )


@behaviour
def observation_modes_that_are_none(cls: Any, note: Note) -> None:
    box = spaces.Box(-1, 1, (2,), np.float32)
    for mode in ("all", None, 3, (box,), (box, box, box), (box, "box"), ("a", "b"), box):
        note(f"{mode}", lambda: cls([partial(bounded, 1.0)] * 2, observation_mode=mode))


@behaviour
def observation_mode_different(cls: Any, note: Note) -> None:
    envs = cls([partial(bounded, high) for high in (1.0, 2.0, 3.0)], observation_mode="different")
    note("spaces", lambda: (envs.observation_space, envs.single_observation_space))
    play(envs, note)
    envs.close()


@behaviour
def a_pair_of_observation_spaces(cls: Any, note: Note) -> None:
    pair = (spaces.Box(-9, 9, (3, 2), np.float32), spaces.Box(-9, 9, (2,), np.float32))
    envs = cls([partial(bounded, high) for high in (1.0, 2.0, 3.0)], observation_mode=pair)
    note("spaces", lambda: (envs.observation_space, envs.single_observation_space, envs.observation_mode))
    play(envs, note)
    envs.close()


# ---- reset --------------------------------------------------------------------------------------------------


@behaviour
def seeds(cls: Any, note: Note) -> None:
    envs = cls([CARTPOLE] * 3)
    for seed in (5, 0, [1, 2, 3], [4, None, 6], (7, 8, 9), range(3), True):
        note(f"{seed!r}", lambda: envs.reset(seed=seed))
    envs.close()


@behaviour
def seeds_that_are_none(cls: Any, note: Note) -> None:
    bad: list[Any] = [[1, 2], [1, 2, 3, 4], [], (), "ab", 1.5, {}, -1, [1, -1, 2], "abc", [1.5, 2, 3], ["a", "b", "c"]]
    for seed in (*bad, np.array([1, 2, 3]), np.int64(4)):
        envs = cls([CARTPOLE] * 3)
        note(f"{seed!r}", lambda: envs.reset(seed=seed))
        envs.close()


@behaviour
def seed_is_a_keyword(cls: Any, note: Note) -> None:
    envs = cls([CountEnv] * 2)
    note("by position", lambda: envs.reset(5))
    note("unknown", lambda: envs.reset(sed=5))
    envs.close()


@behaviour
def a_second_reset(cls: Any, note: Note) -> None:
    envs = cls([CARTPOLE] * 3)
    for i, seed in enumerate((1, None, [None, 3, None], None)):
        note(f"reset {i}", lambda: envs.reset(seed=seed))
        note(f"step {i}", lambda: envs.step(zeros()))
    envs.close()


@behaviour
def options_of_a_reset(cls: Any, note: Note) -> None:
    envs = cls([CountEnv] * 3)
    for options in (
        {"level": 3},
        {},
        None,
        {"nested": {"a": [1]}},
        "text",
        3,
        [1, 2, 3],
        [{"a": 1}, {"a": 2}, {"a": 3}],
    ):
        note(f"{options!r}", lambda: envs.reset(options=options))
        note(f"{options!r} given", lambda: envs.get_attr("options_given"))
    given = {"reset_mask": np.array([True, False, True]), "level": 1}
    note("mask", lambda: envs.reset(options=given))
    note("options afterwards", lambda: given)
    note("given", lambda: envs.get_attr("options_given"))
    envs.close()


class NeedsOptions(CountEnv):
    """Cannot be reset without options, nor be stepped before it was given something."""

    needed: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if not options and self.episode < 0:
            raise ValueError("options are needed")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if self.needed is None:
            raise RuntimeError("set needed first")
        return super().step(action)


@behaviour
def envs_that_need_something_first(cls: Any, note: Note) -> None:
    envs = cls([NeedsOptions] * 3)
    note("steps so far", lambda: envs.get_attr("steps"))
    note("episodes so far", lambda: envs.get_attr("episode"))
    note("set", lambda: envs.set_attr("needed", 1))
    note("reset", lambda: envs.reset(options={"level": 1}))
    note("step", lambda: envs.step(zeros()))
    envs.close()


def reset_masks(mode: AutoresetMode, cls: Any, note: Note) -> None:
    """Masks at any time, also while the autoreset of others is still to come."""
    envs = cls([partial(CountEnv, length) for length in (2, 3, 4, 50, 50)], autoreset_mode=mode)
    note("reset", lambda: envs.reset(seed=0))
    for i, bits in enumerate(([1, 0, 0, 0, 0], [1, 1, 0, 1, 0], [1, 1, 1, 0, 1], [1] * 5)):
        note(f"step {i}", lambda: envs.step(zeros(5)))
        options = {"reset_mask": np.array(bits, np.bool_)}
        note(f"mask {i}", lambda: envs.reset(seed=[10 * i + lane for lane in range(5)], options=options))
        note(f"step {i} after", lambda: envs.step(zeros(5)))
    envs.close()


@behaviour
def masks_that_are_none(cls: Any, note: Note) -> None:
    envs = cls([CountEnv] * 3)
    envs.reset(seed=0)
    bad = [[True, False, False], np.array([1, 0, 0]), np.array([True, False]), np.array([[True, False, False]]),
           np.zeros(3, np.bool_), None, "mask", True]  # fmt: skip
    for mask in bad:
        note(f"{mask!r}", lambda: envs.reset(options={"reset_mask": mask}))
    note("step", lambda: envs.step(zeros()))
    envs.close()


@behaviour
def a_reset_in_the_middle(cls: Any, note: Note) -> None:
    envs = cls([CountEnv] * 3)
    envs.reset(seed=0)
    for _ in range(7):
        envs.step(zeros())
    note("reset", envs.reset)
    note("step", lambda: envs.step(zeros()))
    envs.close()


# ---- step ---------------------------------------------------------------------------------------------------


@behaviour
def step_before_reset(cls: Any, note: Note) -> None:
    envs = cls([CountEnv] * 3)
    note("own env", lambda: envs.step(zeros()))
    envs.close()
    envs = cls([CARTPOLE] * 3)
    note("with OrderEnforcing", lambda: envs.step(zeros()))
    envs.close()


ACTIONS: dict[str, Any] = {
    "list": [0, 1, 2], "tuple": (1, 1, 0), "int32": np.array([0, 1, 1], np.int32),
    "uint8": np.array([0, 1, 1], np.uint8),
    "strided": np.array([0, 9, 1, 9, 0, 9])[::2], "bools": np.array([True, False, True]), "out of range": [0, 99, -7],
    "numpy ints": [np.int64(1), np.int32(2), np.uint8(0)],
    "a number": 0, "numpy number": np.int64(0), "None": None, "too few": [0, 1], "too many": [0, 1, 0, 1],
    "nothing": [],
    "text": "abc", "object array": np.array([0, 1, 2], object), "a dict": {0: 1},
}  # fmt: skip


def discrete_actions(given: Any, cls: Any, note: Note) -> None:
    """Actions that are no array of the space, too."""
    envs = cls([CountEnv] * 3)
    envs.reset(seed=0)
    note("step", lambda: envs.step(given))
    note("next", lambda: envs.step(zeros()))
    envs.close()


@behaviour
def actions_that_an_autoreset_ignores(cls: Any, note: Note) -> None:
    envs = cls([partial(CARTPOLE.func, "CartPole-v1", max_episode_steps=2)] * 3)
    envs.reset(seed=0)
    for i, action in enumerate(([0, 1, 0], [1, 0, 1], [-1, 99, 7], [0, 0, 0])):
        note(f"step {i}", lambda: envs.step(np.array(action)))
    envs.close()


@behaviour
def an_action_that_the_env_refuses(cls: Any, note: Note) -> None:
    envs = cls([CARTPOLE] * 3)
    envs.reset(seed=0)
    note("step", lambda: envs.step(np.array([0, 5, 1])))
    envs.close()


@behaviour
def continuous_actions(cls: Any, note: Note) -> None:
    for name, actions in {
        "float32": np.full((3, 1), 0.5, np.float32), "out of bounds": np.full((3, 1), 50.0, np.float32),
        "transposed": np.zeros((1, 3), np.float32).T,
    }.items():  # fmt: skip
        envs = cls([PENDULUM] * 3)
        envs.reset(seed=0)
        note(name, lambda: envs.step(actions))
        note(f"{name} afterwards", lambda: actions)
        envs.close()


def every_mode(mode: AutoresetMode, cls: Any, note: Note) -> None:
    """Ends of both kinds under an autoreset mode."""
    for make in (CARTPOLE, partial(CountEnv, 3), partial(CountEnv, 3, truncates=True), partial(InfoEnv, "everything")):
        envs = cls([make] * 3, autoreset_mode=mode)
        play(envs, note, 25)
        envs.close()


@behaviour
def stepping_past_the_end_when_resets_are_disabled(cls: Any, note: Note) -> None:
    envs = cls([partial(CountEnv, 2)] * 3, autoreset_mode=AutoresetMode.DISABLED)
    envs.reset(seed=0)
    for i in range(2):
        note(f"step {i}", lambda: envs.step(zeros()))
    note("past the end", lambda: envs.step(zeros()))
    envs.close()


@behaviour
def copies(cls: Any, note: Note) -> None:
    for copy in (True, False):
        envs = cls([CountEnv] * 3, copy=copy)
        first, _ = envs.reset(seed=0)
        kept = [first, *(envs.step(zeros())[0] for _ in range(3))]
        note(f"copy={copy}", lambda: kept[-1])
        if copy:
            note("earlier ones", lambda: kept)
            kept[-1][:] = 0
            note("the caller's own", lambda: envs.step(zeros()))
        envs.close()


def every_space(name: str, cls: Any, note: Note) -> None:
    """Observations and actions of a space."""
    kwargs = {"shared_memory": False} if cls.__name__ == "AsyncVectorEnv" else {}
    envs = cls([partial(SpaceEnv, SPACES[name])] * 3, **kwargs)
    note("spaces", lambda: (envs.observation_space, envs.single_observation_space))
    play(envs, note)
    envs.close()
    envs = cls([partial(SpaceEnv, SPACES["box"], SPACES[name])] * 3)
    note("action spaces", lambda: (envs.action_space, envs.single_action_space))
    if name != "empty dict":  # of which Gymnasium cannot take actions apart
        play(envs, note)
    envs.close()


def every_info(kind: str, cls: Any, note: Note) -> None:
    """Infos of a kind, under each mode."""
    for mode in MODES:
        envs = cls([partial(InfoEnv, kind)] * 3, autoreset_mode=mode)
        play(envs, note)
        envs.close()

"""Side by side with Stable-Baselines3: each behaviour is tried on its VecEnv and on ours, and both must say the same.

A behaviour is a function of a `Side`, ours or theirs, that returns what a user could observe.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("stable_baselines3", reason="these tests compare with Stable-Baselines3")

from stable_baselines3.common import monitor as sb3_monitor
from stable_baselines3.common import vec_env as sb3

from contract.lockstep import assert_same
from dialects.deviations import documented_rows
from dialects.sb3_envs import ENVS, RGB, NoteworthyEnv, TallyEnv, short
from envs import SPACES, CountEnv, SpaceEnv
from shoal.dialects import sb3 as face


@dataclass
class Side:
    """Who is tried: ours or theirs, in one process or in several."""

    module: Any
    processes: bool

    def make(self, *fns: Any) -> Any:
        """A VecEnv over these functions."""
        if not self.processes:
            return self.module.DummyVecEnv(list(fns))
        return self.module.SubprocVecEnv(list(fns), start_method="fork")


class EchoEnv(SpaceEnv):
    """Says in its infos what it was given, and how often it was reset and stepped."""

    resets = steps = 0

    def reset(self, **kwargs: Any) -> Any:
        self.resets += 1
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        obs, _, terminated, truncated, _ = super().step(action)
        self.steps += 1
        return obs, float(self.steps), terminated, truncated, {"given": copy.deepcopy(action), "resets": self.resets}

    def counts(self) -> tuple[int, int]:
        """How often it was reset and stepped."""
        return self.resets, self.steps


class BareEnv(gymnasium.Env[Any, Any]):
    """Can be stepped at once: no wrapper asks for a reset first."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-9.0, 9.0, (2,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.at = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = 0
        return np.zeros(2, np.float32), {"fresh": True}

    def step(self, action: Any) -> Any:
        self.at += 1
        obs = np.full(2, self.at, np.float32)
        return obs, 0.1 * self.at, self.at == 4, False, {"at": self.at}


class MaskedEnv(BareEnv):
    """Some of its actions are allowed."""

    def action_masks(self) -> Any:
        """Which actions are allowed now."""
        return np.array([True, self.at % 2 == 0, True])


class WideEnv(BareEnv):
    """One of several whose bounds differ."""

    def __init__(self, high: float) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-high, high, (2,), np.float32)


class WholeEnv(BareEnv):
    """Takes a Box of integers, and says what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(-5, 5, (2,), np.int64)

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = super().step(0)
        return obs, reward, terminated, truncated, {"given": np.array(action)}


@dataclass(eq=False)
class Raised:
    """An error; equal to one of which it is a kind, with the same text."""

    kind: type
    text: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Raised) and issubclass(self.kind, other.kind) and self.text == other.text


@dataclass(eq=False)
class May:
    """A value that may differ, as a row of the table of docs/migrate/index.md says."""

    row: str
    value: Any

    def __post_init__(self) -> None:
        assert self.row in documented_rows(), self.row

    def __eq__(self, other: object) -> bool:
        return True

    def __deepcopy__(self, memo: Any) -> May:
        return self


kept = copy.deepcopy


def told(result: Any, whole: bool = False) -> Any:
    """All that a step says, as it is. `whole`: the envs' rewards are whole numbers, which ours casts in processes."""
    obs, rewards, dones, infos = result
    return kept((obs, (rewards.astype(np.float64), May("answers", rewards.dtype)) if whole else rewards, dones, infos))


def said(act: Callable[[], Any], own_text: bool = False) -> Any:
    """What an act returns, or its error, with its text, unless ours has one of its own."""
    try:
        return kept(act())
    except Exception as error:
        return Raised(type(error), May("texts", str(error)) if own_text else str(error))


def warned(act: Callable[[], Any]) -> Any:
    """What an act returns, and how it has warned."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = said(act)
    return result, [
        (one.category, May("texts", str(one.message))) for one in caught if issubclass(one.category, UserWarning)
    ]


def wrapped(fn: Any) -> Any:
    """The env in two wrappers."""
    return gymnasium.wrappers.OrderEnforcing(gymnasium.wrappers.TimeLimit(fn(), 9))


# ---- behaviours -----------------------------------------------------------------------------------------------

BEHAVIOURS: dict[str, Callable[[Side], Any]] = {}


def behaviour(function: Callable[[Side], Any]) -> Callable[[Side], Any]:
    """Put a function on the list."""
    BEHAVIOURS[function.__name__] = function
    return function


def over(name: str, **kinds: Any) -> Callable[[Any], Any]:
    """Put a function on the list once for each kind of its second argument."""

    def listed(function: Any) -> Any:
        for kind, value in kinds.items():
            BEHAVIOURS[f"{name} {kind}"] = lambda side, value=value: function(side, value)
        return function

    return listed


@behaviour
def nobody_steps_an_env_before_the_user(side: Side) -> Any:
    venv = side.make(*[partial(EchoEnv, SPACES["box"])] * 5)
    before = venv.env_method("counts")
    venv.reset()
    return before, venv.env_method("counts"), venv.close()


NESTED = {
    "dict": SPACES["dict"],
    "tuple": SPACES["tuple"],
    "nested": SPACES["nested"],
    "pair": spaces.Tuple([spaces.Discrete(3), spaces.Discrete(3)]),
    "box": SPACES["box"],
    "discrete": SPACES["discrete"],
    "multi_discrete": SPACES["multi discrete"],
    "multi_binary": SPACES["multi binary"],
}


@over("actions", **NESTED)
def a_sample_for_each_env(side: Side, space: Any) -> Any:
    own = copy.deepcopy(space)
    own.seed(3)
    venv = side.make(*[partial(EchoEnv, SPACES["box"], space)] * 3)
    venv.seed(1)
    venv.reset()
    steps = [told(venv.step([own.sample() for _ in range(3)])) for _ in range(4)]
    venv.step_async([own.sample() for _ in range(3)])
    return steps, told(venv.step_wait()), venv.close()


@over(
    "integer box",
    whole=np.array([[1.0, -2.0]] * 2),
    broken=np.array([[0.5, -2.7]] * 2),
    single=np.array([[0.5, -2.7]] * 2, np.float32),
    integers=np.array([[1, -2]] * 2),
    beyond=np.array([[100, -2]] * 2),
)
def actions_of_integer_boxes(side: Side, actions: Any) -> Any:
    venv = side.make(WholeEnv, WholeEnv)
    venv.reset()
    return told(venv.step(actions)), told(venv.step(actions)), venv.close()


@behaviour
def a_step_before_the_first_reset(side: Side) -> Any:
    venv = side.make(BareEnv, BareEnv)
    results = [told(venv.step(np.zeros(2, np.int64))) for _ in range(6)]
    return results, kept(venv.reset_infos), venv.reset(), venv.close()


@behaviour
def spaces_whose_bounds_differ(side: Side) -> Any:
    venv = side.make(*[partial(WideEnv, high) for high in (3.0, 4.0)])
    venv.reset()
    return venv.observation_space, told(venv.step(np.zeros(2, np.int64))), venv.close()


@over("stream", **{name.replace(" ", "_").replace(",", ""): env for name, env in ENVS.items()})
def a_stream_with_its_types(side: Side, env: Any) -> Any:
    venv = side.make(env, env)
    own = copy.deepcopy(venv.action_space)
    own.seed(2)
    seeds = venv.seed(11)
    first = kept(venv.reset()), kept(venv.reset_infos)
    whole = side.processes and env is ENVS["FrozenLake"]
    results = [told(venv.step(np.array([own.sample() for _ in range(2)])), whole) for _ in range(24)]
    return seeds, first, results, kept(venv.reset_infos), venv.close()


@behaviour
def envs_can_be_reset_one_by_one(side: Side) -> Any:
    venv = side.make(BareEnv, BareEnv, BareEnv)
    venv.reset()
    venv.step(np.zeros(3, np.int64))
    alone = venv.env_method("reset", indices=1)
    return kept(alone), told(venv.step(np.zeros(3, np.int64))), venv.close()


@behaviour
def one_env_can_be_stepped_alone(side: Side) -> Any:
    venv = side.make(BareEnv, BareEnv)
    venv.reset()
    return kept(venv.env_method("step", 0, indices=[1])), told(venv.step(np.zeros(2, np.int64))), venv.close()


@behaviour
def set_attr_sets_the_outermost_layer(side: Side) -> Any:
    venv = side.make(*[partial(wrapped, TallyEnv)] * 2)
    venv.reset()
    venv.set_attr("asked", 10)
    venv.set_attr("value", [1, 2], indices=[0])
    found = venv.get_attr("asked"), venv.env_method("ask"), venv.get_attr("value")
    return found, [env.asked for env in venv.get_attr("unwrapped")], venv.close()


@behaviour
def action_masks(side: Side) -> Any:
    venv = side.make(MaskedEnv, MaskedEnv)
    venv.reset()
    found = [venv.has_attr("action_masks"), np.stack(venv.env_method("action_masks"))]
    venv.step(np.zeros(2, np.int64))
    return found, np.stack(venv.env_method("action_masks")), venv.close()


@behaviour
def what_is_not_there(side: Side) -> Any:
    if side.processes:  # theirs ends the worker, and everything with it
        return None
    venv = side.make(CountEnv, CountEnv)
    return (
        said(lambda: venv.get_attr("nothing")), said(lambda: venv.env_method("nothing")), venv.has_attr("nothing"),
        said(lambda: venv.get_attr("value", 5), own_text=True), said(lambda: venv.no_such_thing), venv.close(),
    )  # fmt: skip


@behaviour
def attributes_of_a_vec_env(side: Side) -> Any:
    venv = side.make(RGB, RGB)
    names = ("num_envs", "observation_space", "action_space", "render_mode")
    first = [getattr(venv, name) for name in names], kept(venv.reset_infos), venv.unwrapped is venv
    depth = [venv.getattr_depth_check(name, found) is None for name in ("num_envs", "x") for found in (True, False)]
    indices = [list(venv._get_indices(which)) for which in (None, 1, [0], range(2))]
    return first, depth, indices, venv._seeds, venv._options, venv.close()


@behaviour
def options_and_seeds(side: Side) -> Any:
    venv = side.make(RGB, RGB)
    np.random.seed(4)
    drawn = kept(venv.seed())
    venv.set_options({"level": 2})
    venv.reset()
    asked = [venv.get_attr("options_given"), venv.get_attr("seed_given")]
    venv.set_options([{"level": 1}, {}])
    venv.reset()
    more = [venv.get_attr("options_given"), venv.get_attr("seed_given"), venv._options, venv._seeds]
    return drawn, kept(asked), kept(more), venv.close()


@over("render", none=None, rgb="rgb_array", human="human", ansi="ansi")
def rendering(side: Side, mode: str | None) -> Any:
    if mode == "human":
        return None  # opens a window
    images, silent = side.make(RGB, RGB, RGB), side.make(CountEnv)
    images.reset()
    found = warned(lambda: images.render(mode)), warned(lambda: silent.render(mode)), warned(silent.get_images)
    return found, [np.array(image) for image in images.get_images()], images.close(), silent.close()


@behaviour
def closing(side: Side) -> Any:
    venv = side.make(CountEnv, CountEnv)
    venv.reset()
    return venv.close(), venv.close()


@behaviour
def closing_in_the_middle_of_a_step(side: Side) -> Any:
    venv = side.make(CountEnv, CountEnv)
    venv.reset()
    venv.step_async(np.zeros(2, np.int64))
    return venv.close()


@behaviour
def wrapped_in(side: Side) -> Any:
    venv = side.make(partial(sb3_monitor.Monitor, CountEnv()), partial(wrapped, CountEnv))
    kinds = (sb3_monitor.Monitor, gymnasium.Wrapper, gymnasium.wrappers.TimeLimit, CountEnv)
    return [[venv.env_is_wrapped(kind), venv.env_is_wrapped(kind, [1])] for kind in kinds], venv.close()


@behaviour
def an_unknown_start_method(side: Side) -> Any:
    try:
        side.module.SubprocVecEnv([CountEnv], start_method="telepathy")
    except Exception as error:
        return type(error).__name__, str(error)
    return None


@behaviour
def one_env_for_all(side: Side) -> Any:
    if side.processes:
        return None  # each worker has a copy
    env = CountEnv()
    return said(lambda: side.make(lambda: env, lambda: env), own_text=True)


# ---- more of what can be observed ------------------------------------------------------------------------------


class WrongEnv(BareEnv):
    """Raises in one of its calls."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__()
        self.where, self.error = where, error

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.where == "reset":
            raise self.error
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        if self.where == "step":
            raise self.error
        return super().step(action)

    def complain(self) -> None:
        """Raises always."""
        raise self.error


@over("error", value=ValueError("bad joint"), key=KeyError("k"), os=OSError(2, "gone"), own=AssertionError())
def errors_of_envs(side: Side, error: Exception) -> Any:
    if side.processes:
        return None  # theirs ends the worker, and all later calls fail: row "errors"
    found = []
    for where, act in {
        "reset": lambda venv: venv.reset(),
        "step": lambda venv: venv.reset() is None or venv.step(np.zeros(2, np.int64)),
        "call": lambda venv: venv.env_method("complain"),
    }.items():
        venv = side.make(BareEnv, partial(WrongEnv, where, error))
        found.append(said(lambda venv=venv, act=act: act(venv)))  # type: ignore[misc]
        venv.close()
    return found


@behaviour
def constructors_that_raise(side: Side) -> Any:
    if side.processes:
        return None  # theirs dies with EOFError or BrokenPipeError: row "errors"
    return said(lambda: side.make(BareEnv, partial(int, "x")))


@behaviour
def no_functions(side: Side) -> Any:
    return said(lambda: side.make(), own_text=True)


@over("options", none=None, empty={}, one={"level": 1}, each=[{"level": 1}, {}, {"level": 3}], few=[{"level": 1}],
      many=[{"level": i} for i in range(5)], pair=({"level": 1}, {"level": 2}, {}))  # fmt: skip
def options_of_a_reset(side: Side, options: Any) -> Any:
    venv = side.make(*[CountEnv] * 3)
    told_of = said(lambda: venv.set_options(options)), kept(venv._options)
    if side.processes and isinstance(options, list) and len(options) == 1:
        result: Any = None  # theirs has asked an env and waits for it no more
    else:
        result = said(lambda: venv.reset() is None, own_text=True), venv.get_attr("options_given")
        if isinstance(options, list) and len(options) == 1:
            result = result[0], May("actions", result[1])  # theirs has reset the first env by then
    return told_of, result, said(lambda: venv.set_options()), kept(venv._options), venv.close()


@over("seed", none=0, one=7, numpy=np.int64(7), truth=True)
def seeds_of_a_reset(side: Side, seed: Any) -> Any:
    venv = side.make(*[short("CartPole-v1")] * 3)
    given = said(lambda: [int(one) for one in venv.seed(seed)])
    if isinstance(seed, np.integer):
        return given, venv.close()  # theirs hands it to Gymnasium, which refuses it: row "more"
    return given, venv.reset(), venv._seeds, venv.reset(), venv.close()


@behaviour
def render_modes_that_differ(side: Side) -> Any:
    return said(lambda: side.make(RGB, CountEnv), own_text=True)


@behaviour
def env_methods_with_indices(side: Side) -> Any:
    venv = side.make(*[TallyEnv] * 3)
    found = [
        venv.env_method("ask"), venv.env_method("ask", 2, indices=[0, 2]), venv.env_method("ask", step=3, indices=1),
        venv.env_method("ask", indices=[]), venv.get_attr("asked", [2, 0]), venv.get_attr("asked", range(2)),
        venv.get_attr("asked", [-1]), venv.env_method("ask", indices=[1, 1]), venv.set_attr("asked", 7, [1]),
        venv.get_attr("asked"), venv.set_attr("asked", None), venv.get_attr("asked", 0), venv.has_attr("asked"),
    ]  # fmt: skip
    return found, said(lambda: venv.get_attr("asked", [7]), own_text=True), venv.close()


@behaviour
def results_are_the_callers_own(side: Side) -> Any:
    venv = side.make(*[ENVS["infos"]] * 2)
    venv.seed(1)
    first = venv.reset()
    steps = [venv.step(np.zeros(2, np.int64)) for _ in range(4)]
    before = kept((first, steps))
    for obs, rewards, dones, infos in steps[:1]:
        obs[:], rewards[:], dones[:] = 0, 0, True
        infos[0]["mine"] = 1
    venv.step(np.zeros(2, np.int64))
    return before, kept(steps[1:]), venv.close()


@behaviour
def steps_by_halves(side: Side) -> Any:
    venv = side.make(*[BareEnv] * 2)
    venv.reset()
    venv.step_async(np.zeros(2, np.int64))
    first = told(venv.step_wait())
    venv.step_async([1, 1])
    return first, told(venv.step_wait()), side.processes and venv.waiting, venv.close()


@behaviour
def the_base_class_and_its_names(side: Side) -> Any:
    venv = side.make(BareEnv)
    names = [name for name in dir(side.module.VecEnv) if not name.startswith("_")]
    here = [name for name in names if hasattr(venv, name)]
    return sorted(set(here) & set(dir(sb3.VecEnv))), isinstance(venv, sb3.VecEnv), venv.metadata, venv.close()


@behaviour
def wrong_numbers_of_actions(side: Side) -> Any:
    """Both refuse too few; ours also too many, and says so before an env has moved."""
    if side.processes:
        return None  # theirs has stepped some of the envs, and loses count of their answers
    venv = side.make(*[BareEnv] * 2)
    venv.reset()
    few = said(lambda: venv.step([0]))
    return May("actions", few), May("actions", said(lambda: venv.step([0, 0, 0]))), venv.close()


@behaviour
def use_after_close(side: Side) -> Any:
    venv = side.make(BareEnv, BareEnv)
    venv.reset()
    venv.close()
    return [May("closed", said(act)) for act in (venv.reset, lambda: venv.step([0, 0]), lambda: venv.get_attr("at"))]


# ---- what only a DummyVecEnv has -------------------------------------------------------------------------------


@behaviour
def buffers(side: Side) -> Any:
    if side.processes:
        return None
    found = []
    for env in (short("CartPole-v1", 3), ENVS["dict"], ENVS["tuple"]):
        venv = side.make(env, env)
        venv.seed(1)
        own = copy.deepcopy(venv.action_space)
        own.seed(0)
        empty = kept((venv.buf_obs, venv.buf_rews, venv.buf_dones, venv.buf_infos, list(venv.keys)))
        venv.reset()
        reset = kept((venv.buf_obs, venv.buf_rews, venv.buf_dones))
        steps = []
        for _ in range(5):
            venv.step(np.array([own.sample() for _ in range(2)]))
            steps.append(kept((venv.buf_obs, venv.buf_rews, venv.buf_dones, venv.buf_infos, venv.actions)))
        found.append((empty, reset, steps, venv.close()))
    return found


@behaviour
def a_subclass_with_a_step_of_its_own(side: Side) -> Any:
    """As research code has it: the loop of SB3 with one line changed."""
    if side.processes:
        return None

    class Mine(side.module.DummyVecEnv):  # type: ignore[misc, name-defined]
        def step_wait(self) -> Any:
            for i in range(self.num_envs):
                obs, self.buf_rews[i], self.buf_dones[i], _, self.buf_infos[i] = self.envs[i].step(self.actions[i])
                if self.buf_dones[i]:
                    self.buf_infos[i]["terminal_observation"] = obs
                    obs, self.reset_infos[i] = self.envs[i].reset()
                self._save_obs(i, obs)
            return self._obs_from_buf(), self.buf_rews + 5, np.copy(self.buf_dones), copy.deepcopy(self.buf_infos)

    venv = Mine([BareEnv, BareEnv])
    venv.reset()
    return [told(venv.step(np.zeros(2, np.int64))) for _ in range(6)], venv.close()


@behaviour
def steps_that_are_asked_for_twice(side: Side) -> Any:
    if side.processes:
        return None
    venv = side.make(BareEnv, BareEnv)
    venv.reset()
    venv.step_async(np.zeros(2, np.int64))
    venv.step_async(np.ones(2, np.int64))
    return told(venv.step_wait()), told(venv.step_wait()), venv.close()


@behaviour
def envs_are_at_hand(side: Side) -> Any:
    if side.processes:
        return None
    venv = side.make(CountEnv, CountEnv)
    same = [one is other for one, other in zip(venv.get_attr("unwrapped"), venv.envs, strict=True)]
    venv.envs[1].value = ["own"]
    return same, venv.get_attr("value")[1] is venv.envs[1].value, venv.metadata, venv.close()


@behaviour
def another_env_in_the_list(side: Side) -> Any:
    if side.processes:
        return None
    venv = side.make(CountEnv, CountEnv)
    venv.seed(1)
    first = venv.reset()
    venv.envs[1] = gymnasium.wrappers.TimeLimit(CountEnv(9), 2)
    found = [venv.get_attr("length"), venv.seed(3), venv.reset()]
    steps = [told(venv.step(np.zeros(2, np.int64))) for _ in range(5)]
    venv.envs[0].reset()
    venv.envs = [CountEnv(4), CountEnv(5)]
    return first, found, steps, venv.get_attr("length"), venv.reset()[:, 1:], venv.close()


@over("copy", deepcopy=copy.deepcopy, pickle=lambda venv: pickle.loads(cloudpickle.dumps(venv)))
def copies_of_itself(side: Side, again: Any) -> Any:
    if side.processes:
        return None  # neither can be copied
    venv = side.make(*[short("CartPole-v1")] * 2)
    venv.seed(3)
    venv.reset()
    actions = np.ones(2, np.int64)
    venv.step(actions)
    other = again(venv)
    found = [told(venv.step(actions)) for _ in range(12)]
    both = found, [told(other.step(actions)) for _ in range(12)]
    return both, other.num_envs, other.reset_infos, other._seeds, venv.close(), other.close()


@behaviour
def processes_cannot_be_copied(side: Side) -> Any:
    if not side.processes:
        return None
    venv = side.make(BareEnv)
    result = said(lambda: pickle.dumps(venv), own_text=True)
    venv.close()
    return isinstance(result, Raised)


@behaviour
def notes_that_look_like_ours(side: Side) -> Any:
    venv = side.make(partial(NoteworthyEnv, {"final_obs": 1, "episode": {"r": 1.0}}))
    venv.reset()
    return [told(venv.step(np.zeros(1, np.int64))) for _ in range(7)], venv.close()


@pytest.mark.parametrize("processes", [False, True], ids=["DummyVecEnv", "SubprocVecEnv"])
@pytest.mark.parametrize("name", BEHAVIOURS)
def test_same(name: str, processes: bool) -> None:
    ours, theirs = (BEHAVIOURS[name](Side(module, processes)) for module in (face, sb3))
    assert_same(ours, theirs)

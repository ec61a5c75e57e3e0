"""The Stable-Baselines3 face: DummyVecEnv and SubprocVecEnv say what SB3's say, call by call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("stable_baselines3", reason="these tests compare with Stable-Baselines3")

from stable_baselines3.common import monitor as sb3_monitor
from stable_baselines3.common import vec_env as sb3

from contract.lockstep import assert_same
from dialects.sb3_envs import (
    ENVS,
    RGB,
    NoteworthyEnv,
    SeedOnlyEnv,
    UnsendableEnv,
    short,
    tally,
)
from dialects.sb3_kit import EnvFn, assert_lockstep, zeros
from envs import CountEnv, ReusedInfoEnv
from shoal.dialects import sb3 as face

SIZES = {"1 env": (1, 1), "7 envs, 3 workers": (7, 3)}

# ---- the same stream ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("env", ENVS.values(), ids=ENVS)
def test_same_as_their_dummy(env: EnvFn, size: tuple[int, int]) -> None:
    num_envs, workers = size
    fns = [env] * num_envs
    assert_lockstep(face.DummyVecEnv(fns), sb3.DummyVecEnv(fns))
    assert_lockstep(face.SubprocVecEnv(fns, num_workers=workers), sb3.DummyVecEnv(fns))


@pytest.mark.parametrize("name", ["CartPole", "dict", "infos"])
def test_same_as_their_subproc(name: str) -> None:
    fns = [ENVS[name]] * 2
    assert_lockstep(face.SubprocVecEnv(fns, num_workers=2), sb3.SubprocVecEnv(fns, start_method="fork"))


@pytest.mark.parametrize("options", [{}, {"backend": "threads"}, {"backend": "hybrid", "num_workers": 2}], ids=str)
def test_other_backends_say_the_same(options: dict[str, Any]) -> None:
    fns = [ENVS["infos"]] * 4
    assert_lockstep(face.SubprocVecEnv(fns, **options), sb3.DummyVecEnv(fns))


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_start_methods(method: str) -> None:
    assert_lockstep(face.SubprocVecEnv([CountEnv] * 2, method), sb3.DummyVecEnv([CountEnv] * 2), steps=6)


@pytest.mark.parametrize(
    "note",
    [
        {"TimeLimit.truncated": True},
        {"final_obs": 1},
        {"final_obs": 1, "final_info": {"a": 2}},
        {"final_info": 2},
        {"terminal_observation": 3},
        {"episode": {"r": 1.0}},
    ],
    ids=str,
)
def test_infos_that_use_our_words(note: dict[str, Any]) -> None:
    fns = [partial(NoteworthyEnv, note)] * 2
    assert_lockstep(face.DummyVecEnv(fns), sb3.DummyVecEnv(fns), steps=7)


def test_a_reset_without_options() -> None:
    assert_lockstep(face.DummyVecEnv([SeedOnlyEnv] * 2), sb3.DummyVecEnv([SeedOnlyEnv] * 2), steps=7)


def test_results_are_the_callers_own(venv: Any) -> None:
    first = venv.reset()
    kept = first.copy()
    results = [venv.step(zeros()) for _ in range(4)]
    np.testing.assert_array_equal(first, kept)
    assert [result[0][0, 2] for result in results] == [1, 2, 3, 4]
    for array in (first, *results[0][:3]):
        array[:] = 0
    results[0][3][0]["mine"] = True
    assert "mine" not in venv.step(zeros())[3][0]
    rewards = np.float32 if isinstance(venv, face.DummyVecEnv) else np.float64
    assert [array.dtype for array in results[0][:3]] == [np.int64, rewards, np.bool_]


def test_infos_are_kept_apart_from_envs_that_reuse_theirs(make: Callable[[list[EnvFn]], Any]) -> None:
    venv = make([ReusedInfoEnv] * 2)
    venv.reset()
    first = venv.reset_infos[0]
    infos = [venv.step(zeros(2))[3][0] for _ in range(4)]
    assert [info["numbers"].tolist() for info in (first, *infos)] == [[n, n] for n in (-1, 1, 2, 3, 1)]
    assert [info["inner"]["value"] for info in infos] == [1, 2, 3, 1]
    assert ["terminal_observation" in info for info in infos] == [False, False, True, False]
    venv.close()


# ---- what it is ---------------------------------------------------------------------------------------------

THEIR_OWN = ("CloudpickleWrapper", "StackedObservations")


@pytest.mark.parametrize("name", THEIR_OWN)
def test_what_is_theirs_can_be_imported_from_ours(name: str) -> None:
    assert getattr(face, name) is getattr(sb3, name)


@pytest.mark.parametrize("name", [name for name in sb3.__all__ if name not in THEIR_OWN])
def test_every_method_with_its_arguments(name: str) -> None:
    theirs, ours = getattr(sb3, name), getattr(face, name)
    if not isinstance(theirs, type):
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
        return
    assert issubclass(ours, theirs)
    for method, function in inspect.getmembers(theirs, callable):
        # What a transform has is reached through an instance: see the next test.
        if method.startswith("_") or not hasattr(ours, method):
            continue
        wanted = list(inspect.signature(function).parameters)
        found = inspect.signature(getattr(ours, method)).parameters
        assert [p for p in found if p in wanted] == [p for p in wanted if p != "self" or "self" in found], method
    wanted = list(inspect.signature(theirs.__init__).parameters)
    assert list(inspect.signature(ours.__init__).parameters)[: len(wanted)] == wanted


WRAPPERS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "VecFrameStack": ("counting", (2,)),
    "VecNormalize": ("counting", ()),
    "VecCheckNan": ("counting", ()),
    "VecMonitor": ("counting", ()),
    "VecTransposeImage": ("image", ()),
    "VecExtractDictObs": ("dict", ("a",)),
}


@pytest.mark.parametrize("name", ["DummyVecEnv", "SubprocVecEnv", *WRAPPERS])
def test_instances_have_every_public_method(name: str) -> None:
    if name in WRAPPERS:
        env, arguments = WRAPPERS[name]
        ours: Any = getattr(face, name)(face.DummyVecEnv([ENVS[env]]), *arguments)
    else:
        ours = getattr(face, name)([CountEnv])
    wanted = [m for m, _ in inspect.getmembers(getattr(sb3, name), callable) if not m.startswith("_")]
    wanted = [method for method in wanted if method != "check_array_value"]  # of no use to anybody else
    assert [method for method in wanted if not hasattr(ours, method)] == []
    assert isinstance(ours, sb3.VecEnv)
    assert isinstance(ours, getattr(sb3, name))
    ours.close()


@pytest.mark.parametrize("env", [CountEnv, RGB, short("CartPole-v1")], ids=["no images", "images", "CartPole"])
def test_attributes(make: Callable[[list[EnvFn]], Any], env: EnvFn) -> None:
    ours, theirs = make([env] * 3), sb3.DummyVecEnv([env] * 3)
    for name in ("num_envs", "observation_space", "action_space", "render_mode", "reset_infos"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.metadata.get("render_fps") == theirs.metadata.get("render_fps")
    assert ours.unwrapped is ours
    ours.close()
    theirs.close()


def test_metadata_is_the_envs_own_in_a_dummy() -> None:
    for env in (CountEnv, RGB):
        ours, theirs = face.DummyVecEnv([env]), sb3.DummyVecEnv([env])
        assert ours.metadata == theirs.metadata
        ours.close()


def test_the_envs_of_a_dummy_are_at_hand() -> None:
    venv = face.DummyVecEnv([CountEnv] * 2)
    venv.envs[1].value = "touched"
    assert venv.get_attr("value") == ["untouched", "touched"]
    venv.close()


def test_envs_that_say_nothing_of_render_mode() -> None:
    class Bare(CountEnv):
        def __getattribute__(self, name: str) -> Any:
            if name == "render_mode":
                raise AttributeError(name)
            return super().__getattribute__(name)

    with pytest.warns(UserWarning, match="render_mode"):
        venv = face.DummyVecEnv([Bare])
    assert venv.render_mode is None
    venv.close()


# ---- seeds and options --------------------------------------------------------------------------------------


def test_seeds_and_options_are_for_one_reset(venv: Any) -> None:
    theirs = sb3.DummyVecEnv([RGB] * 3)
    for either in (venv, theirs):
        assert list(either.seed(4)) == [4, 5, 6]
        either.set_options([{"level": 1}, {}, {"level": 3}])
        either.reset()
        assert either.get_attr("options_given") == [{"level": 1}, None, {"level": 3}]
        assert either.get_attr("seed_given") == [4, 5, 6]
        given = {"level": [9]}
        either.set_options(given)
        given["level"].append(10)
        either.reset()
        assert either.get_attr("options_given") == [{"level": [9]}] * 3
        assert either.get_attr("episode") == [1, 1, 1]  # no seed: the same stream goes on
        either.reset()
        assert either.get_attr("options_given") == [None] * 3
        either.set_options({"level": 1})
        either.set_options()
        either.reset()
        assert either.get_attr("options_given") == [None] * 3


def test_a_seed_that_is_drawn_follows_the_global_generator(venv: Any) -> None:
    theirs = sb3.DummyVecEnv([RGB] * 3)
    seeds = []
    for either in (venv, theirs):
        np.random.seed(3)
        seeds.append(list(either.seed()))
    assert seeds[0] == seeds[1], "scripts that seed numpy, as set_random_seed does, would not be reproducible"


def test_options_of_the_wrong_number(venv: Any) -> None:
    venv.set_options([{}, {}])
    with pytest.raises(IndexError, match="given 2 dicts, and there are 3 envs"):
        venv.reset()


# ---- the envs -----------------------------------------------------------------------------------------------

INDICES: dict[str, Any] = {
    "None": None,
    "int": 1,
    "negative": -1,
    "list": [2, 0],
    "negative list": [-3, -1],
    "tuple": (1,),
    "range": range(1, 3),
    "array": np.array([2, 1]),
    "nobody": [],
    "twice": [1, 1],
    "twice by two names": [1, -2],
}


@pytest.mark.parametrize("indices", INDICES.values(), ids=INDICES)
def test_indices(make: Callable[[list[EnvFn]], Any], indices: Any) -> None:
    ours, theirs = make([tally] * 3), sb3.DummyVecEnv([tally] * 3)
    said = []
    for venv in (ours, theirs):
        venv.seed(10)
        venv.reset()
        venv.set_attr("value", ["a", "list"], indices)
        said.append(
            (
                venv.get_attr("value"),
                venv.get_attr("value", indices),
                venv.env_method("ask", indices=indices),
                venv.env_method("ask", 2, indices=indices),
                venv.env_method("ask", step=3),
                venv.get_attr("asked"),
                venv.env_is_wrapped(gymnasium.wrappers.TimeLimit, indices),
                venv.env_is_wrapped(sb3_monitor.Monitor, indices=indices),
            )
        )
    assert_same(*said)
    ours.close()


@pytest.mark.parametrize("indices", [3, -4, [0, 3]], ids=str)
def test_an_env_that_is_not_there(venv: Any, indices: Any) -> None:
    for use in (
        lambda: venv.get_attr("value", indices),
        lambda: venv.set_attr("value", 1, indices),
        lambda: venv.env_method("pid", indices=indices),
        lambda: venv.env_is_wrapped(gymnasium.Wrapper, indices),
    ):
        with pytest.raises(IndexError):
            use()
    assert venv.get_attr("value") == ["untouched"] * 3


def test_attributes_that_are_there_and_are_not(venv: Any) -> None:
    theirs = sb3.DummyVecEnv([RGB] * 3)
    for either in (venv, theirs):
        assert either.has_attr("value")
        assert not either.has_attr("no_such_thing")
        with pytest.raises(AttributeError, match="no_such_thing"):
            either.get_attr("no_such_thing")
        with pytest.raises(AttributeError, match="no_such_thing"):
            either.env_method("no_such_thing")
        with pytest.raises(KeyError, match="no such fish"):
            either.env_method("complain")
        either.set_attr("no_such_thing", 7, 0)
        assert not either.has_attr("no_such_thing")  # one of three
        either.set_attr("no_such_thing", 7)
        assert either.has_attr("no_such_thing")


def test_has_attr_of_what_cannot_be_pickled() -> None:
    venv = face.SubprocVecEnv([UnsendableEnv] * 2, num_workers=2)
    assert venv.has_attr("secret")
    venv.close()


def test_env_is_wrapped_looks_at_wrappers_only() -> None:
    class OwnMonitor(sb3_monitor.Monitor):  # type: ignore[type-arg]
        pass

    fns: list[EnvFn] = [
        CountEnv,
        lambda: sb3_monitor.Monitor(CountEnv()),
        lambda: OwnMonitor(CountEnv()),
        lambda: gymnasium.wrappers.TimeLimit(sb3_monitor.Monitor(CountEnv()), 3),
    ]
    ours, theirs = face.DummyVecEnv(fns), sb3.DummyVecEnv(fns)
    for cls in (sb3_monitor.Monitor, OwnMonitor, gymnasium.Wrapper, gymnasium.wrappers.TimeLimit, CountEnv):
        assert ours.env_is_wrapped(cls) == theirs.env_is_wrapped(cls), cls
    ours.close()


# ---- images -------------------------------------------------------------------------------------------------


def test_images(venv: Any) -> None:
    theirs = sb3.DummyVecEnv([RGB] * 3)
    for either in (venv, theirs):
        either.seed(0)
        either.reset()
        either.step(np.array([0, 1, 2]))
        either.set_attr("steps", 200, 2)
    assert_same(list(venv.get_images()), list(theirs.get_images()))
    assert_same(venv.render(), theirs.render())
    assert_same(venv.render("rgb_array"), theirs.render("rgb_array"))


@pytest.mark.parametrize("mode", [None, "rgb_array", "human", "ansi"])
def test_nothing_to_render(mode: str | None) -> None:
    for either in (face.DummyVecEnv([CountEnv] * 2), sb3.DummyVecEnv([CountEnv] * 2)):
        with pytest.warns(UserWarning, match="render"):
            assert either.render(mode) is None
        with pytest.warns(UserWarning, match="render"):
            assert list(either.get_images()) == [None, None]
        either.close()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_tiles(count: int) -> None:
    from stable_baselines3.common.vec_env.base_vec_env import tile_images

    images = [np.full((2, 3, 3), i + 1, np.uint8) for i in range(count)]
    assert_same(face.tile_images(images), tile_images(images))

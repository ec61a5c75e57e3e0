"""Whatever a user calls an env becomes a list of env functions, or an error that says which entry is wrong."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

from envs import CountEnv
from shoal.envs.functions import as_env_fns, install_registry, pickle_env_fns, registry_additions
from shoal.errors import BadEnv


def make_count(length: int = 5) -> CountEnv:
    return CountEnv(length)


class Maker:
    def __init__(self, thing: Any = None):
        self.thing = thing

    def __call__(self) -> CountEnv:
        return CountEnv()

    def method(self) -> CountEnv:
        return CountEnv()


CARTPOLE = gymnasium.spec("CartPole-v1")

INPUTS: list[tuple[str, Any, int | None, int]] = [
    ("id", "CartPole-v1", 3, 3),
    ("id, one", "CartPole-v1", None, 1),
    ("spec", CARTPOLE, 2, 2),
    ("class", CountEnv, 2, 2),
    ("function", make_count, 2, 2),
    ("lambda", lambda: CountEnv(), 2, 2),
    ("partial", functools.partial(make_count, 3), 2, 2),
    ("callable object", Maker(), 2, 2),
    ("bound method", Maker().method, 2, 2),
    ("list", [make_count, CountEnv], None, 2),
    ("tuple", (make_count,) * 3, 3, 3),
    ("mixed list", ["CartPole-v1", CARTPOLE, lambda: gymnasium.make("CartPole-v1")], None, 3),
    ("numpy count", make_count, np.int64(2), 2),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("env", "num_envs", "count"), [row[1:] for row in INPUTS], ids=[row[0] for row in INPUTS])
def test_every_kind_of_input(env: Any, num_envs: Any, count: int) -> None:
    fns = as_env_fns(env, num_envs)
    assert len(fns) == count
    for fn in fns:
        made = fn()
        assert hasattr(made, "step")
        made.close()
    assert len(pickle_env_fns(fns)) == count


def test_keyword_arguments_reach_the_constructor() -> None:
    assert as_env_fns(CountEnv, 1, {"length": 9})[0]().length == 9
    assert as_env_fns(make_count, 1, {"length": 9})[0]().length == 9
    assert as_env_fns([make_count, make_count], None, {"length": 9})[1]().length == 9
    assert as_env_fns("CartPole-v1", 1, {"render_mode": "rgb_array"})[0]().render_mode == "rgb_array"
    assert as_env_fns(CARTPOLE, 1, {"max_episode_steps": 7})[0]().spec.max_episode_steps == 7


NONSENSE: list[tuple[str, Any, Any, list[str]]] = [
    ("unknown id", "NoSuchFish-v0", 2, ["NoSuchFish-v0"]),
    ("unknown version", "CartPole-v99", 2, ["CartPole-v99"]),
    ("unknown module", "no_such_module:Fish-v0", 2, ["no_such_module"]),
    ("empty id", "", 2, ["''"]),
    ("an env", CountEnv(), 2, ["already made", "function"]),
    ("a number", 5, 2, ["int", "5"]),
    ("None", None, 2, ["NoneType"]),
    ("bytes", b"CartPole-v1", None, ["entry 0"]),
    ("dict", {"a": make_count}, 2, ["dict"]),
    ("set", {make_count}, 2, ["set"]),
    ("generator", (make_count for _ in range(2)), 2, ["generator"]),
    ("empty list", [], None, ["empty"]),
    ("empty list, none asked for", [], 0, ["empty"]),
    ("env in a list", [make_count, CountEnv()], None, ["entry 1", "already made"]),
    ("nonsense in a list", [make_count, make_count, 7], None, ["entry 2", "int"]),
    ("unknown id in a list", [make_count, "NoSuchFish-v0"], None, ["entry 1", "NoSuchFish-v0"]),
    ("too few", [make_count], 2, ["num_envs is 2", "1 env functions"]),
    ("no envs", make_count, 0, ["at least 1", "0"]),
    ("negative", make_count, -3, ["at least 1", "-3"]),
    ("true", make_count, True, ["True"]),
    ("float", make_count, 2.5, ["2.5"]),
    ("whole float", make_count, 2.0, ["2.0"]),
    ("text", make_count, "2", ["'2'"]),
    ("nan", make_count, float("nan"), ["nan"]),
    ("true for a list", [make_count], True, ["True"]),
    ("float for a list", [make_count, make_count], 2.0, ["2.0"]),
]


@pytest.mark.parametrize(("env", "num_envs", "words"), [row[1:] for row in NONSENSE], ids=[row[0] for row in NONSENSE])
def test_nonsense_is_refused_by_name(env: Any, num_envs: Any, words: list[str]) -> None:
    with pytest.raises(BadEnv) as caught:
        as_env_fns(env, num_envs)
    for word in words:
        assert word in str(caught.value)


class JaxFunctions:
    """An env of the kind that backend="jax" takes."""

    def reset(self, key: Any) -> Any:
        raise NotImplementedError

    def step(self, key: Any, state: Any, action: Any) -> Any:
        raise NotImplementedError


def test_who_forgets_the_jax_backend_is_told_of_it() -> None:
    with pytest.raises(BadEnv, match='needs backend="jax"'):
        as_env_fns(JaxFunctions(), 2)
    with pytest.raises(BadEnv) as caught:
        as_env_fns(CountEnv(), 2)
    assert "jax" not in str(caught.value)


def test_a_vector_env_is_refused() -> None:
    vector = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")
    with pytest.raises(BadEnv, match="already made"):
        as_env_fns(vector, 2)
    vector.close()


# ---- pickling ------------------------------------------------------------------------------------------------

a_global_lock = threading.Lock()


def closure_over(the_lock: Any) -> Callable[[], Any]:
    return lambda: (CountEnv(), the_lock)[0]


def closure_with_an_empty_cell(the_lock: Any) -> Callable[[], Any]:
    def make() -> Any:
        return the_lock, later

    if the_lock is None:
        later = 1
    return make


def by_value(function: Callable[[], Any]) -> Callable[[], Any]:
    """As if it were from the user's own script, which workers do not import."""
    function.__module__ = "__main__"
    return function


LOCK = threading.Lock()
UNPICKLABLE: list[tuple[str, Any, str]] = [
    ("closure", closure_over(LOCK), "the_lock"),
    ("global", by_value(lambda: (CountEnv(), a_global_lock)[0]), "a_global_lock"),
    ("partial, keyword", functools.partial(make_count, length=LOCK), "length"),  # type: ignore[arg-type]
    ("partial, position", functools.partial(make_count, LOCK), "argument 0"),  # type: ignore[arg-type]
    ("attribute", Maker(LOCK), "thing"),
    ("keyword argument", as_env_fns(CountEnv, 1, {"length": LOCK})[0], "length"),
    ("beside an empty cell", closure_with_an_empty_cell(LOCK), "the_lock"),
    ("bound method", Maker(LOCK).method, ""),
]


@pytest.mark.parametrize(("env_fn", "name"), [row[1:] for row in UNPICKLABLE], ids=[row[0] for row in UNPICKLABLE])
def test_what_cannot_be_pickled_is_named(env_fn: Any, name: str) -> None:
    with pytest.raises(BadEnv) as caught:
        pickle_env_fns([make_count, make_count, env_fn], first=10)
    text = str(caught.value)
    assert "env 12" in text
    assert "lock" in text
    if name:
        assert f"its '{name}', a lock," in text
    assert 'backend="serial"' in text


def test_one_function_for_many_envs_is_pickled_once() -> None:
    dumped = 0

    class Counting(Maker):
        def __reduce__(self) -> Any:
            nonlocal dumped
            dumped += 1
            return Maker, ()

    data = pickle_env_fns(as_env_fns(Counting(), 100))
    assert dumped == 1
    assert len(data) == 100
    assert len({id(one) for one in data}) == 1
    assert isinstance(cloudpickle.loads(data[0])(), CountEnv)


# ---- registry ------------------------------------------------------------------------------------------------


@pytest.fixture
def registered() -> Any:
    """Registers envs for one test."""
    before = dict(gymnasium.registry)
    yield gymnasium.register
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


def test_what_the_caller_registered_goes_along(registered: Any) -> None:
    registered("shoal-test/Count-v0", entry_point=CountEnv)
    registered("shoal-test/Stuck-v0", entry_point=Maker(threading.Lock()))
    data = registry_additions()
    assert data is not None
    names = cloudpickle.loads(data)
    assert "shoal-test/Count-v0" in names
    assert "shoal-test/Stuck-v0" not in names, "one that cannot travel keeps none of the others back"
    assert "CartPole-v1" not in names
    gymnasium.registry.pop("shoal-test/Count-v0")
    install_registry(data)
    assert isinstance(gymnasium.make("shoal-test/Count-v0").unwrapped, CountEnv)
    install_registry(None)


def test_a_worker_keeps_its_own(registered: Any) -> None:
    registered("shoal-test/Count-v0", entry_point=CountEnv)
    data = registry_additions()
    mine = EnvSpec("shoal-test/Count-v0", entry_point=make_count)
    gymnasium.registry["shoal-test/Count-v0"] = mine
    install_registry(data)
    assert gymnasium.registry["shoal-test/Count-v0"] is mine


def test_an_unregistered_id_is_resolved_before_it_travels(registered: Any) -> None:
    registered("shoal-test/Count-v0", entry_point=CountEnv)
    [data] = pickle_env_fns(as_env_fns("shoal-test/Count-v0", 1))
    gymnasium.registry.pop("shoal-test/Count-v0")
    assert isinstance(cloudpickle.loads(data)().unwrapped, CountEnv)

"""Reaching the envs: `apply`, options for each env, one env in two places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shoal
from envs import CountEnv


def describe(env: Any, word: str, times: int = 1) -> str:
    return f"{word * times} {env.unwrapped.length}"


def fns(count: int) -> list[Any]:
    return [lambda i=i: CountEnv(length=10 + i) for i in range(count)]


def test_apply_runs_where_the_envs_are(backend: str) -> None:
    with shoal.Pool(fns(5), backend=backend, **({} if backend == "serial" else {"num_workers": 3})) as pool:
        assert pool.apply(describe, "a", times=2) == [f"aa {10 + i}" for i in range(5)]
        assert pool.apply(lambda env: env.unwrapped.pid(), env_ids=[4, 1]) == [
            pool.call("pid", env_ids=[4])[0], pool.call("pid", env_ids=[1])[0]
        ]  # fmt: skip
        with pytest.raises(KeyError, match="no such fish") as caught:
            pool.apply(lambda env: env.unwrapped.complain(), env_ids=[3])
        assert isinstance(caught.value, shoal.EnvError)
        assert caught.value.env_id == 3
        assert pool.reset(seed=0).obs[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_apply_of_no_function(backend: str) -> None:
    with shoal.Pool(fns(2), backend=backend) as pool, pytest.raises(shoal.BadCall, match="expected a function"):
        pool.apply("length")  # type: ignore[arg-type]


def test_each_env_has_its_own_options(backend: str) -> None:
    with shoal.Pool(fns(5), backend=backend, **({} if backend == "serial" else {"num_workers": 3})) as pool:
        pool.reset(options=[{"n": i} for i in range(5)])
        assert pool.get_attr("options_given") == [{"n": i} for i in range(5)]
        pool.reset([4, 0], options=[{"x": 1}, None])
        assert pool.get_attr("options_given", [0, 3, 4]) == [None, {"n": 3}, {"x": 1}]
        pool.reset(options={"all": True})
        assert pool.get_attr("options_given") == [{"all": True}] * 5


def test_options_survive_a_restart() -> None:
    """The reset that a lost env is owed is carried out with its own options."""
    with shoal.Pool(fns(4), backend="processes", num_workers=2, on_error="restart") as pool:
        pool.reset(seed=0)
        pool.apply(_die_at_reset, env_ids=[3])
        pool.reset(options=[{"n": i} for i in range(4)], timeout=20)
        # Env 2 had answered before their worker died: it learns of its loss at its next step.
        assert pool.get_attr("options_given", [0, 1, 3]) == [{"n": 0}, {"n": 1}, {"n": 3}]


def _die_at_reset(env: Any) -> None:
    import os

    env.unwrapped.reset = lambda **_: os._exit(1)


def test_one_env_in_two_places_is_refused(backend: str) -> None:
    """By its index; in worker processes, where each gets a copy, only if one process has it twice."""
    shared = CountEnv()
    places = [CountEnv, lambda: shared, CountEnv, lambda: shared]
    if backend in ("processes", "hybrid"):
        places = [CountEnv, CountEnv, *[lambda: shared] * 2]
    expected = "env 3 is the same object as env (1|2).*make it inside the function"
    with pytest.raises(shoal.BadEnv, match=expected):
        shoal.Pool(places, backend=backend, **({} if backend == "serial" else {"num_workers": 2}))


@pytest.mark.parametrize("kind", ["float32", "int64 scalar", "dict", "0-d", "float64 for float32"])
def test_final_observations_by_either_way(backend: str, kind: str) -> None:
    """Through the slab where they are of exactly their space's type, through the side channel elsewhere."""
    from gymnasium import spaces

    made: dict[str, tuple[Any, Any]] = {
        "float32": (spaces.Box(-9, 9, (2,), np.float32), lambda n: np.full(2, n, np.float32)),
        "int64 scalar": (spaces.Discrete(99), lambda n: np.int64(n)),
        "dict": (spaces.Dict(a=spaces.Box(0, 99, (), np.float64), b=spaces.Discrete(99)),
                 lambda n: {"a": np.array(float(n)), "b": np.int64(n)}),
        "0-d": (spaces.Box(0, 99, (), np.float32), lambda n: np.array(n, np.float32)),
        "float64 for float32": (spaces.Box(-9, 9, (2,), np.float32), lambda n: np.full(2, float(n))),
    }  # fmt: skip
    space, value = made[kind]

    class Env(CountEnv):
        def __init__(self, length: int):
            super().__init__(length)
            self.observation_space = space

        def _observation(self) -> Any:
            return value(self.steps)

    with shoal.Pool([lambda i=i: Env(2 + i) for i in range(3)], backend=backend, autoreset="same_step") as pool:
        pool.reset(seed=0)
        seen = [dict(pool.step(np.zeros(3, np.int64)).final_obs) for _ in range(4)]
    expected: list[dict[int, Any]] = [{}, {0: value(2)}, {1: value(3)}, {0: value(2), 2: value(4)}]
    assert str(seen) == str(expected)
    first, wanted = seen[1][0], value(2)
    assert type(first) is type(wanted)
    if kind != "dict":
        assert first.dtype == wanted.dtype

"""What users get wrong: a typed error that names the env and what was expected, before anything has moved."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from envs import CountEnv, GateEnv
from faults.kit import (
    ISOLATED,
    BoxActionEnv,
    ClosingEnv,
    DeedEnv,
    DictEnv,
    NoSpaceEnv,
    OtherSpaceEnv,
    WrongEnv,
    assert_usable,
    eventually,
    fail,
    in_thread,
    open_pool,
)
from shoal import Pool

pytestmark = pytest.mark.timeout(50)  # less than what hangs lasts, and enough on a busy machine

ZEROS = np.zeros(4, np.int64)


def refused(error: type[BaseException], *words: str) -> Any:
    """The call raises exactly this kind of error, with these words in its message."""
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{word})" for word in words))


# ---- arguments -----------------------------------------------------------------------------------------------

# what is wrong, the call, the error, words of the message
BAD_CALLS: list[tuple[str, Callable[[Pool], Any], type[BaseException], list[str]]] = [
    ("too few actions", lambda p: p.step(ZEROS[:3]), shoal.BadAction, [r"\(4,\)", r"\(3,\)"]),
    ("too many actions", lambda p: p.step(np.zeros(5, int)), shoal.BadAction, [r"\(4,\)", r"\(5,\)"]),
    ("one action", lambda p: p.step(1), shoal.BadAction, [r"\(4,\)", r"\(\)"]),
    ("no action", lambda p: p.step(None), shoal.BadAction, ["object"]),
    ("actions of two axes", lambda p: p.step(ZEROS[:, None]), shoal.BadAction, [r"\(4, 1\)"]),
    ("float actions", lambda p: p.step(ZEROS.astype(float)), shoal.BadAction, ["int64", "float64"]),
    ("complex actions", lambda p: p.step(ZEROS.astype(complex)), shoal.BadAction, ["int64", "complex128"]),
    ("text actions", lambda p: p.step(["a"] * 4), shoal.BadAction, ["int64", "<U1"]),
    ("an action too large", lambda p: p.step([0, 0, 4, 0]), shoal.BadAction, ["env 2", "0.* to .*3", "found 4"]),
    ("an action too small", lambda p: p.step(np.array([0, -1, 0, 0])), shoal.BadAction, ["env 1", "found -1"]),
    ("ragged actions", lambda p: p.step([[1], [1, 2], [1], [1]]), shoal.BadAction, ["one array"]),
    ("send: range, for some", lambda p: p.send([0, 9], [3, 1]), shoal.BadAction, ["env 1", "found 9"]),
    ("send: more actions than ids", lambda p: p.send(ZEROS, [0, 1]), shoal.BadAction, [r"\(2,\)", r"\(4,\)"]),
    ("an unknown env", lambda p: p.send([0], [4]), shoal.BadAction, ["no env 4", "0 to 3"]),
    ("a negative env", lambda p: p.send([0], [-1]), shoal.BadAction, ["no env -1"]),
    ("an env twice", lambda p: p.send([0, 0, 0], [2, 1, 2]), shoal.BadAction, ["env 2", "more than once"]),
    ("a float env", lambda p: p.send([0], [1.0]), shoal.BadAction, ["whole numbers", "1.0"]),
    ("a bool env", lambda p: p.send([0], [True]), shoal.BadAction, ["whole numbers"]),
    ("a text env", lambda p: p.send([0], ["1"]), shoal.BadAction, ["whole numbers"]),
    ("a None env", lambda p: p.send([0], [None]), shoal.BadAction, ["whole numbers"]),
    ("no envs", lambda p: p.send([], []), shoal.BadAction, ["at least one"]),
    ("a table of envs", lambda p: p.send([0, 0], [[0, 1]]), shoal.BadAction, ["list of whole numbers"]),
    ("ragged envs", lambda p: p.send([0, 0], [[0], [1, 2]]), shoal.BadAction, ["env_ids"]),
    ("reset of an unknown env", lambda p: p.reset([7]), shoal.BadAction, ["no env 7"]),
    ("reset of an env twice", lambda p: p.reset([1, 1]), shoal.BadAction, ["env 1", "more than once"]),
    ("a float seed", lambda p: p.reset(seed=1.5), TypeError, ["seed", "1.5"]),
    ("a text seed", lambda p: p.reset(seed="1234"), TypeError, ["seed", "1234"]),
    ("a bool seed", lambda p: p.reset(seed=True), TypeError, ["seed"]),
    ("too few seeds", lambda p: p.reset(seed=[1, 2]), ValueError, ["4 seeds", "found 2"]),
    ("float seeds", lambda p: p.reset(seed=[1.5, 2, 3, 4]), TypeError, ["seed", "1.5"]),
    ("too few seeds for some", lambda p: p.reset([0, 1], seed=[1]), ValueError, ["2 seeds", "found 1"]),
    ("options that are no dict", lambda p: p.reset(options=1), TypeError, ["options", "int"]),
    ("options that are no dicts", lambda p: p.reset(options=[1, {}, {}, {}]), TypeError, ["options", "found 1 among"]),
    ("options for too few", lambda p: p.reset(options=[{}, {}]), ValueError, ["4 of them", "found 2"]),
    ("a negative timeout, recv", lambda p: p.recv(timeout=-1), ValueError, ["timeout", "-1"]),
    ("a negative timeout, step", lambda p: p.step(ZEROS, timeout=-1), ValueError, ["timeout", "-1"]),
    ("a negative timeout, reset", lambda p: p.reset(timeout=-1), ValueError, ["timeout", "-1"]),
    ("a negative timeout, call", lambda p: p.call("add", 1, timeout=-1), ValueError, ["timeout", "-1"]),
    ("a text timeout", lambda p: p.step(ZEROS, timeout="1"), ValueError, ["timeout", "'1'"]),
    ("recv of nothing", lambda p: p.recv(), shoal.NothingPending, ["4 envs and 0", "async_reset or send first"]),
    ("call of step", lambda p: p.call("step", 0), shoal.BadCall, ["step", "pool's own"]),
    ("call of reset", lambda p: p.call("reset"), shoal.BadCall, ["reset"]),
    ("call of close", lambda p: p.call("close"), shoal.BadCall, ["close"]),
    ("call of no name", lambda p: p.call(5), shoal.BadCall, ["5"]),
    ("call of an unknown name", lambda p: p.call("swim"), AttributeError, ["env 0", "swim"]),
    ("get of an unknown name", lambda p: p.get_attr("fins", [2]), AttributeError, ["env 2", "fins"]),
    ("call with wrong arguments", lambda p: p.call("add"), TypeError, ["env 0", "add"]),
    ("call of an unknown env", lambda p: p.call("pid", env_ids=[4]), shoal.BadAction, ["no env 4"]),
    ("set: too few values", lambda p: p.set_attr("value", [1, 2]), shoal.BadCall, ["4 values", "found 2"]),
    ("set: too many, for some", lambda p: p.set_attr("value", (1, 2), [0]), shoal.BadCall, ["1 values", "found 2"]),
    ("set of an unknown env", lambda p: p.set_attr("value", 1, [9]), shoal.BadAction, ["no env 9"]),
]


def assert_refused(pool: Pool, act: Callable[[Pool], Any], error: type[BaseException], words: list[str]) -> None:
    """The call raises, and the envs are as they were: at their first step."""
    pool.reset(seed=0)
    pool.step(ZEROS)
    episodes = pool.get_attr("episode")
    with refused(error, *words):
        act(pool)
    assert len(pool.pending) == 0
    assert pool.get_attr("steps") == [1] * 4, "nothing was stepped"
    assert pool.get_attr("episode") == episodes, "nothing was reset"
    assert pool.get_attr("value") == ["untouched"] * 4
    assert pool.step(ZEROS).obs[:, 2].tolist() == [2] * 4


@pytest.mark.parametrize("backend", ["serial", "processes"])
@pytest.mark.parametrize(("act", "error", "words"), [row[1:] for row in BAD_CALLS], ids=[row[0] for row in BAD_CALLS])
def test_bad_arguments_are_refused_before_anything_moves(
    backend: str, act: Callable[[Pool], Any], error: type[BaseException], words: list[str]
) -> None:
    with open_pool(CountEnv, backend=backend) as pool:
        assert_refused(pool, act, error, words)
        assert_usable(pool)


@pytest.mark.parametrize("backend", ["threads", "hybrid"])
def test_bad_arguments_one_after_the_other(backend: str) -> None:
    with open_pool(CountEnv, backend=backend) as pool:
        for _, act, error, words in BAD_CALLS:
            assert_refused(pool, act, error, words)
        assert_usable(pool)


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (np.full((4, 2), 1.5, np.float32), ["env 0", "-1.0 to 1.0", "1.5"]),
        ([[0, 0], [0, np.nan], [0, 0], [0, 0]], ["env 1", "nan"]),
        (np.array([[0, 0]] * 3 + [[0, np.nan]], np.float32), ["env 3", "nan"]),
        (np.array([[0, 0]] * 3 + [[-np.inf, 0]], np.float32), ["env 3", "-inf"]),
        (np.zeros((2, 4), np.float32), [r"\(4, 2\)", r"\(2, 4\)"]),
        (np.zeros((4, 2), complex), ["float32", "complex"]),
    ],
)
def test_box_actions_out_of_bounds(backend: str, actions: Any, words: list[str]) -> None:
    with open_pool(BoxActionEnv, backend=backend) as pool:
        pool.reset(seed=0)
        for act in (pool.step, pool.send):
            with refused(shoal.BadAction, *words):
                act(actions)
        assert pool.get_attr("steps") == [0] * 4
        assert pool.step(np.zeros((4, 2), np.float32)).obs[:, 2].tolist() == [1] * 4


def test_a_refused_reset_does_not_use_the_seed_up() -> None:
    with open_pool(CountEnv, backend="serial", seed=5) as pool:
        with pytest.raises(TypeError):
            pool.reset(options="x")  # type: ignore[arg-type]
        assert pool.reset().obs[:, 0].tolist() == [5, 6, 7, 8]


def test_an_endless_timeout_is_no_error(backend: str) -> None:
    with open_pool(CountEnv, backend=backend) as pool:
        pool.reset(timeout=1e10)
        assert pool.step(ZEROS, timeout=1e300).obs[:, 2].tolist() == [1] * 4


# ---- the order of calls --------------------------------------------------------------------------------------


def test_step_before_reset(backend: str) -> None:
    with open_pool(CountEnv, backend=backend) as pool:
        for act in (lambda: pool.step(ZEROS), lambda: pool.send([0], [2])):
            with refused(shoal.ResetNeeded, "env [02]", "reset"):
                act()
        pool.reset([0, 1])
        with refused(shoal.ResetNeeded, "env 2"):
            pool.step(ZEROS)
        assert_usable(pool)


def test_recv_before_send(backend: str) -> None:
    with open_pool(CountEnv, backend=backend) as pool:
        pool.reset()
        pool.send([0, 0], [0, 1])
        with refused(shoal.NothingPending, "4 envs and 2"):
            pool.recv()
        pool.send([0, 0], [2, 3])
        assert pool.recv().obs[:, 2].tolist() == [1] * 4
        assert_usable(pool)


PENDING: list[tuple[str, Callable[[Pool], Any]]] = [
    ("send to all", lambda p: p.send(ZEROS)),
    ("send to one", lambda p: p.send([0], [1])),
    ("step", lambda p: p.step(ZEROS)),
    ("step with a timeout", lambda p: p.step(ZEROS, timeout=5)),
    ("call", lambda p: p.call("pid")),
    ("get_attr", lambda p: p.get_attr("steps", [1])),
    ("set_attr", lambda p: p.set_attr("value", 5)),
    ("render", lambda p: p.render()),
]


@pytest.mark.parametrize("act", [row[1] for row in PENDING], ids=[row[0] for row in PENDING])
def test_while_a_step_is_pending(backend: str, act: Callable[[Pool], Any]) -> None:
    with open_pool(CountEnv, backend=backend) as pool:
        pool.reset(seed=0)
        pool.send(ZEROS + 1)
        with refused(shoal.CallPending, r"\b1\b", "recv"):
            act(pool)
        assert pool.pending.tolist() == [0, 1, 2, 3]
        assert pool.recv().reward.tolist() == [101.0] * 4, "the step that was sent first"
        assert pool.get_attr("value") == ["untouched"] * 4
        assert_usable(pool)


def test_a_reset_drops_what_is_pending(backend: str) -> None:
    with open_pool(CountEnv, backend=backend) as pool:
        pool.reset(seed=0)
        pool.send(ZEROS)
        assert pool.reset([1], seed=7).obs.tolist() == [[8, 0, 0]]
        assert pool.pending.tolist() == [0, 2, 3]
        assert_usable(pool)


# ---- after close ---------------------------------------------------------------------------------------------

CLOSED: list[tuple[str, Callable[[Pool], Any]]] = [
    ("send", lambda p: p.send(ZEROS)),
    ("recv", lambda p: p.recv()),
    ("step", lambda p: p.step(ZEROS)),
    ("reset", lambda p: p.reset()),
    ("async_reset", lambda p: p.async_reset()),
    ("call", lambda p: p.call("pid")),
    ("get_attr", lambda p: p.get_attr("steps")),
    ("set_attr", lambda p: p.set_attr("value", 1)),
    ("render", lambda p: p.render()),
    ("stats", lambda p: p.stats()),
]


def test_use_after_close(backend: str) -> None:
    pool = open_pool(CountEnv, backend=backend)
    kept = pool.reset(seed=3).obs
    pool.send(ZEROS)
    pool.close()
    for _, act in CLOSED:
        with refused(shoal.PoolClosed, "closed"):
            act(pool)
    assert pool.closed
    assert "closed" in repr(pool)
    assert [worker.state for worker in pool.workers] == ["closed"] * len(pool.workers)
    assert kept[:, 0].tolist() == [3, 4, 5, 6], "arrays that the user holds stay readable"
    pool.close()
    with pool:
        pass


def test_use_in_a_forked_child(backend: str) -> None:
    with open_pool(CountEnv, backend=backend) as pool:
        pool.reset(seed=0)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for _, act in CLOSED:
                    with refused(shoal.WrongProcess, "fork"):
                        act(pool)
                pool.close()
                with open_pool(CountEnv, backend=backend) as own:
                    assert_usable(own)
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert_usable(pool)


# ---- threads -------------------------------------------------------------------------------------------------


def inside(pool: Pool) -> None:
    """Wait until another thread is in the pool."""
    eventually(lambda: len(pool.pending) == pool.num_envs)
    time.sleep(0.05)


@pytest.mark.parametrize("first", ["step", "recv"])
def test_two_threads_at_once(backend: str, gate: Path, first: str) -> None:
    with open_pool(functools.partial(GateEnv, gate), backend=backend) as pool:
        pool.reset(seed=0)
        if first == "recv":
            pool.send(ZEROS + 3)
        with in_thread(lambda: pool.recv() if first == "recv" else pool.step(ZEROS + 3)) as outcome:
            inside(pool)
            for act in (
                lambda: pool.recv(timeout=1),
                lambda: pool.step(ZEROS, timeout=1),
                lambda: pool.send(ZEROS),
                lambda: pool.send([0], [2]),
                lambda: pool.reset(timeout=1),
                lambda: pool.call("pid", timeout=1),
            ):
                with pytest.raises((shoal.ConcurrentUse, shoal.CallPending)):
                    act()
            with pytest.raises(shoal.ConcurrentUse):
                pool.recv(timeout=1)
            gate.touch()
        assert outcome[0].reward.tolist() == [301.0] * 4
        assert_usable(pool)


def test_two_threads_in_calls(backend: str, gate: Path) -> None:
    """Both wait on the same channels: the second is refused, and the first gets its own answer."""
    with open_pool(functools.partial(GateEnv, gate), backend=backend) as pool:
        pool.reset(seed=0)
        with in_thread(lambda: pool.call("wait")) as outcome:
            time.sleep(0.3)
            for act in (lambda: pool.call("pid", timeout=1), lambda: pool.step(ZEROS, timeout=1)):
                with pytest.raises((shoal.ConcurrentUse, shoal.CallPending)):
                    act()
            gate.touch()
        assert outcome == [["open"] * 4]
        assert_usable(pool)


# ---- envs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["observation", "action"])
@pytest.mark.parametrize("index", [1, 3])
def test_spaces_that_differ(backend: str, what: str, index: int) -> None:
    fns: list[Any] = [CountEnv] * 4
    fns[index] = functools.partial(OtherSpaceEnv, what)
    with refused(shoal.SpaceMismatch, f"env {index}", f"{what} space"):
        open_pool(fns, None, backend)


def test_spaces_that_differ_in_an_env_that_cannot_close(backend: str, tmp_path: Path) -> None:
    fns = [functools.partial(ClosingEnv, tmp_path, raises=True), functools.partial(OtherSpaceEnv, "action")]
    with refused(shoal.SpaceMismatch, "env 1"):
        open_pool(fns, None, backend)
    eventually(lambda: len(list(tmp_path.iterdir())) == 1)


@pytest.mark.parametrize("backend", ISOLATED)
def test_an_env_function_that_cannot_be_pickled(backend: str) -> None:
    lock = threading.Lock()

    def with_lock() -> Any:
        return CountEnv() if lock else None

    with refused(shoal.BadEnv, "env 3", "'lock', a lock", "serial"):
        open_pool([CountEnv, CountEnv, CountEnv, with_lock], None, backend)


@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_one_process_needs_no_pickles(backend: str) -> None:
    lock = threading.Lock()
    with open_pool(lambda: CountEnv() if lock else None, backend=backend) as pool:
        assert_usable(pool)


def vector_env() -> Any:
    return gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync")


def none() -> Any:
    return None


def text() -> Any:
    return "CartPole-v1"


def raises_value_error() -> Any:
    raise ValueError("bad joint")


def raises_unpicklable() -> Any:
    return DeedEnv({"constructor": "raise unpicklable"})


def a_lambda_that_fails() -> Any:
    return fail(ZeroDivisionError("by zero"))


BAD_MAKERS: list[tuple[Callable[[], Any], type[BaseException], list[str]]] = [
    (none, shoal.BadEnv, ["None", "no Gymnasium env"]),
    (text, shoal.BadEnv, ["CartPole-v1", "no step"]),
    (object, shoal.BadEnv, ["no Gymnasium env"]),
    (vector_env, shoal.BadEnv, ["several lanes", "give each kind a pool"]),
    (raises_value_error, ValueError, ["constructor", "bad joint"]),
    (raises_unpicklable, Exception, ["constructor", "Unpicklable", "lock"]),
    (a_lambda_that_fails, ZeroDivisionError, ["constructor"]),
    (NoSpaceEnv, OSError, ["simulator is not running"]),
]


PLACED = [(3, *row) for row in BAD_MAKERS] + [(index, *BAD_MAKERS[row]) for index in (0, 1) for row in (0, 4, -1)]


@pytest.mark.parametrize(
    ("index", "maker", "error", "words"), PLACED, ids=[f"{row[1].__name__} at {row[0]}" for row in PLACED]
)
def test_an_env_function_that_makes_no_env(
    backend: str, tmp_path: Path, index: int, maker: Any, error: type[BaseException], words: list[str]
) -> None:
    fns: list[Any] = [functools.partial(ClosingEnv, tmp_path)] * 4
    fns[index] = maker
    with refused(error, rf"env {index}\b", *words) as caught:
        open_pool(fns, None, backend)
    assert isinstance(caught.value, shoal.EnvError)
    assert caught.value.env_id == index
    # What this worker had built before is closed again; others may not have got as far.
    built = index if backend == "serial" else index % 2
    eventually(lambda: len(list(tmp_path.iterdir())) >= built)


def test_a_constructor_that_raises_beside_a_close_that_raises(backend: str, tmp_path: Path) -> None:
    fns = [functools.partial(ClosingEnv, tmp_path, raises=True), raises_value_error]
    with refused(ValueError, "env 1", "bad joint"):
        open_pool(fns, None, backend, num_workers=1)


def test_an_env_instead_of_a_function(backend: str) -> None:
    for env in (CountEnv(), [CountEnv(), CountEnv()], vector_env()):
        with refused(shoal.BadEnv, "already made", "function"):
            open_pool(env, None, backend)


BAD_OPTIONS: list[tuple[dict[str, Any], type[BaseException], list[str]]] = [
    ({"backend": "foo"}, ValueError, ["backend", "'serial'", "'foo'"]),
    ({"backend": None}, ValueError, ["backend", "None"]),
    ({"batch_size": 0}, ValueError, ["batch_size", "1 to 4", "0"]),
    ({"batch_size": 5}, ValueError, ["batch_size", "1 to 4", "5"]),
    ({"batch_size": True}, ValueError, ["batch_size", "True"]),
    ({"batch_size": 2.0}, ValueError, ["batch_size", "2.0"]),
    ({"frames": 0}, ValueError, ["frames", "1 to 255", "0"]),
    ({"frames": 1, "on_error": "restart"}, ValueError, ["frames", "2 to 255", "1"]),
    ({"frames": 256}, ValueError, ["frames", "256"]),
    ({"frames": 2.5}, ValueError, ["frames", "2.5"]),
    ({"num_envs": 0}, shoal.BadEnv, ["num_envs", "0"]),
    ({"num_envs": -1}, shoal.BadEnv, ["num_envs", "-1"]),
    ({"num_envs": True}, shoal.BadEnv, ["num_envs", "True"]),
    ({"num_envs": 2.5}, shoal.BadEnv, ["num_envs", "2.5"]),
    ({"num_envs": "4"}, shoal.BadEnv, ["num_envs", "'4'"]),
    ({"num_workers": 0}, ValueError, ["num_workers", "0"]),
    ({"num_workers": -1}, ValueError, ["num_workers", "-1"]),
    ({"num_workers": True}, ValueError, ["num_workers", "True"]),
    ({"num_workers": 1.5}, ValueError, ["num_workers", "1.5"]),
    ({"autoreset": "never"}, ValueError, ["autoreset", "'next_step'", "'never'"]),
    ({"order": "random"}, ValueError, ["order", "'fifo'", "'random'"]),
    ({"check_actions": "some"}, ValueError, ["check_actions", "'some'"]),
    ({"check_reset": "some"}, ValueError, ["check_reset", "'some'"]),
    ({"start_method": "teleport"}, ValueError, ["start_method", "'spawn'", "'teleport'"]),
    ({"start_timeout": -1}, ValueError, ["timeout", "-1"]),
    ({"observation_mode": "sideways"}, ValueError, ["observation_mode", "'sideways'"]),
    ({"observation_mode": (1, 2)}, TypeError, ["observation_mode"]),
    ({"seed": "x"}, TypeError, ["seed", "'x'"]),
    ({"seed": [1, 2]}, ValueError, ["4 seeds", "2"]),
    ({"env_kwargs": {"fins": 2}}, TypeError, ["env 0", "fins"]),
]


@pytest.mark.parametrize(("options", "error", "words"), BAD_OPTIONS, ids=[str(row[0]) for row in BAD_OPTIONS])
def test_bad_options(options: dict[str, Any], error: type[BaseException], words: list[str]) -> None:
    everything: dict[str, Any] = {"num_envs": 4, "backend": "processes", "num_workers": 2, **options}
    with refused(error, *words):
        Pool(CountEnv, **everything).close()


def test_make_refuses_an_unknown_api_and_partial_batches() -> None:
    with refused(ValueError, "api", "'gymnasium'", "'fish'"):
        shoal.make(CountEnv, 2, api="fish")
    with refused(ValueError, "batch_size", "shoal.Pool"):
        shoal.make(CountEnv, 4, backend="processes", num_workers=2, batch_size=2)


# ---- what envs return ----------------------------------------------------------------------------------------

WRONG: list[tuple[str, type[BaseException], list[str]]] = [
    ("obs shape", shoal.BadObservation, [r"expected shape \(3,\)", r"found \(2,\)"]),
    ("obs type", shoal.BadObservation, ["expected type int64", "float64"]),
    ("obs None", shoal.BadObservation, ["observation"]),
    ("obs ragged", shoal.BadObservation, ["observation"]),
    ("info None", TypeError, ["info must be a dict", "NoneType"]),
    ("info list", TypeError, ["info must be a dict", "list"]),
]
WRONG_STEPS: list[tuple[str, type[BaseException], list[str]]] = [
    *WRONG,
    ("four values", TypeError, ["step must return a tuple", "terminated, truncated"]),
    ("a list", TypeError, ["step must return a tuple"]),
    ("nothing", TypeError, ["step must return a tuple", "None"]),
    ("reward None", TypeError, []),
    ("reward text", TypeError, []),
    ("reward array", TypeError, []),
    ("flag array", ValueError, []),
    ("flag text", TypeError, ["terminated must be a bool", "'False'"]),
    ("flag bytes", TypeError, ["truncated must be a bool", "b'False'"]),
]


@pytest.mark.parametrize(("wrong", "error", "words"), WRONG_STEPS, ids=[row[0] for row in WRONG_STEPS])
def test_a_wrong_step_names_the_env(backend: str, wrong: str, error: type[BaseException], words: list[str]) -> None:
    with open_pool(WrongEnv, backend=backend) as pool:
        pool.reset(seed=0)
        pool.set_attr("wrong", wrong, [2])
        with refused(error, "env 2 raised in step", *words) as caught:
            pool.step(ZEROS)
        assert isinstance(caught.value, shoal.EnvError)
        assert caught.value.env_id == 2
        with refused(shoal.ResetNeeded, "env 2"):
            pool.step(ZEROS)
        pool.set_attr("wrong", None)
        pool.reset([2], seed=0)
        assert pool.step(ZEROS).obs[:, 2].tolist() == [2, 2, 1, 2], "the others were stepped, and go on"
        assert_usable(pool)


@pytest.mark.parametrize(("wrong", "error", "words"), WRONG, ids=[row[0] for row in WRONG])
def test_a_wrong_reset_names_the_env(backend: str, wrong: str, error: type[BaseException], words: list[str]) -> None:
    with open_pool(functools.partial(WrongEnv, where="reset"), backend=backend) as pool:
        pool.set_attr("wrong", wrong, [1])
        with refused(error, "env 1 raised in reset", *words) as caught:
            pool.reset(seed=0)
        assert isinstance(caught.value, shoal.EnvError)
        assert (caught.value.env_id, caught.value.during) == (1, "reset")
        pool.set_attr("wrong", None)
        assert_usable(pool)


@pytest.mark.parametrize("wrong", ["info None", "info list"])
def test_a_wrong_info_at_the_end_of_an_episode(backend: str, wrong: str) -> None:
    """Under same_step the last info goes another way: it is checked there too."""
    with open_pool(WrongEnv, backend=backend, autoreset="same_step") as pool:
        pool.reset(seed=0)
        pool.set_attr("length", 1, [3])
        pool.set_attr("wrong", wrong, [3])
        with refused(TypeError, "env 3", "info must be a dict"):
            pool.step(ZEROS)
        pool.set_attr("wrong", None)
        pool.set_attr("length", 5)
        assert_usable(pool)


@pytest.mark.parametrize(("part", "leaf"), [("arm", r"\['arm'\]\['joint'\]"), ("joint", r"\['arm'\]\['joint'\]")])
def test_a_missing_part_of_an_observation_is_named(backend: str, part: str, leaf: str) -> None:
    with open_pool(DictEnv, backend=backend) as pool:
        pool.reset(seed=0)
        pool.set_attr("leave_out", part, [3])
        with refused(shoal.BadObservation, "env 3", leaf):
            pool.step(ZEROS)
        pool.set_attr("leave_out", None)
        assert pool.reset(seed=0).obs["arm"]["joint"].tolist() == [1] * 4


def test_two_envs_that_raise_in_one_step(backend: str) -> None:
    """Both must be reset before they are stepped again, also the one whose error was not the first."""
    with open_pool(DeedEnv, backend=backend) as pool:
        pool.reset(seed=0)
        pool.set_attr("deeds", [{}, {"step": "raise"}, {}, {"step": "raise"}])
        with refused(ValueError, "env 1"):
            pool.step(ZEROS)
        pool.set_attr("deeds", [{}] * 4)
        pool.reset([1])
        with refused(shoal.ResetNeeded, "env 3"):
            pool.step(ZEROS)
        assert_usable(pool)


def test_recv_after_an_env_raised_gives_the_others(backend: str) -> None:
    with open_pool(DeedEnv, backend=backend, batch_size=1) as pool:
        pool.reset(seed=0)
        pool.set_attr("deeds", [{}, {"step": "raise"}, {}, {}])
        pool.send(ZEROS)
        received, raised = [], 0
        for _ in range(4):
            try:
                received += pool.recv(timeout=20).env_id.tolist()
            except ValueError:
                raised += 1
        assert (sorted(received), raised) == ([0, 2, 3], 1)
        pool.set_attr("deeds", [{}] * 4)
        pool.reset([1])
        pool.send(ZEROS)
        assert len({int(pool.recv(timeout=20).env_id[0]) for _ in range(4)}) == 4


def test_a_full_batch_after_an_env_raised(backend: str) -> None:
    with open_pool(DeedEnv, backend=backend) as pool:
        pool.reset(seed=0)
        pool.set_attr("deeds", [{}, {"step": "raise"}, {}, {}])
        pool.send(ZEROS)
        with refused(ValueError, "env 1"):
            pool.recv()
        pool.set_attr("deeds", {}, [1])
        pool.async_reset([1], seed=30)
        batch = pool.recv()
        assert batch.obs.tolist() == [[0, 0, 1], [31, 0, 0], [2, 0, 1], [3, 0, 1]]
        assert_usable(pool)


# ---- not a number --------------------------------------------------------------------------------------------


class NanEnv(CountEnv):
    """Returns nan where it is told to."""

    def __init__(self, where: str = ""):
        super().__init__()
        self.observation_space = spaces.Dict(arm=spaces.Dict(joint=spaces.Box(-9, 9, (2, 2), np.float32)))
        self.where = where

    def _observation(self) -> Any:
        joint = np.full((2, 2), self.steps, np.float32)
        if self.where == "obs" or (self.where == "reset" and self.steps == 0):
            joint[1, 0] = np.nan
        return {"arm": {"joint": joint}}

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, np.nan if self.where == "reward" else reward, *rest


@pytest.mark.parametrize(
    ("where", "words"), [("obs", r"env 3: .*arm.*joint.* is nan at \[1, 0\]"), ("reward", "env 3: its reward is nan")]
)
def test_nan_is_refused_where_asked(backend: str, where: str, words: str) -> None:
    with open_pool(NanEnv, 4, backend, check_nan=True) as pool:
        pool.reset(seed=0)
        assert pool.step(np.zeros(4, np.int64)).reward.tolist() == [1.0] * 4
        pool.set_attr("where", where, [3])
        with pytest.raises(shoal.BadObservation, match=words):
            pool.step(np.zeros(4, np.int64))
        pool.set_attr("where", "", [3])
        pool.reset()
        assert pool.step(np.zeros(4, np.int64)).reward.tolist() == [1.0] * 4


def test_nan_passes_where_not_asked(backend: str) -> None:
    with open_pool(NanEnv, 4, backend) as pool:
        pool.set_attr("where", "obs", [3])
        pool.reset(seed=0)
        obs = pool.step(np.zeros(4, np.int64)).obs["arm"]["joint"]
        assert np.isnan(obs[3, 1, 0])
        assert np.isnan(obs).sum() == 1


def test_nan_in_a_reset_restarts(backend: str) -> None:
    fns = [NanEnv] * 3 + [functools.partial(NanEnv, "reset")]
    with open_pool(fns, None, backend, check_nan=True, on_error="restart", max_restarts=1) as pool:
        with pytest.raises(shoal.BadObservation, match=r"env 3.*max_restarts"):
            pool.reset(seed=0)

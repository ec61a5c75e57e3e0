"""Objects that fight back when they are pickled or loaded: each is an error of its own env, and all else goes on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from agent_envs import Scripted
from envs import CountEnv, EvenSpace
from faults.kit import LoadsBadly, assert_usable, fail, in_thread, open_pool
from shoal.support.foreign_code import NotAnException, guarded

pytestmark = pytest.mark.timeout(60)

ZEROS = np.zeros(4, np.int64)
BACKENDS = ("serial", "threads", "processes", "hybrid")


class Stop(BaseException):
    """No Exception."""


def stop() -> None:
    raise Stop("loaded")


def interrupt() -> None:
    raise KeyboardInterrupt


LEAVING: dict[str, Callable[[], Any]] = {"exit": partial(sys.exit, 7), "stop": stop, "interrupt": interrupt}


def leave(how: str) -> None:
    LEAVING[how]()


class LeavesWhenLoaded(Exception):
    """Pickles well, and leaves when it is loaded."""

    def __init__(self, how: str):
        super().__init__("bad joint")
        self.how = how

    def __reduce__(self) -> Any:
        return leave, (self.how,)


class LeavesWhenPickled(LeavesWhenLoaded):
    def __reduce__(self) -> Any:
        return leave(self.how)


class LeavesWhenMade(ValueError):
    """No error of its type can be made."""

    def __new__(cls, *args: Any) -> Any:
        if args != ("bad joint",):
            sys.exit(7)
        return super().__new__(cls, *args)


class LeavesWhenRead(ValueError):
    def __str__(self) -> str:
        sys.exit(7)


ERRORS: dict[str, Callable[[], BaseException]] = {
    **{f"loaded {how}": partial(LeavesWhenLoaded, how) for how in LEAVING},
    **{f"pickled {how}": partial(LeavesWhenPickled, how) for how in LEAVING},
    "made": partial(LeavesWhenMade, "bad joint"),
    "read": partial(LeavesWhenRead, "bad joint"),
}


class AwkwardEnv(CountEnv):
    """Raises, or has in its info, what it is told to make."""

    def __init__(self, error: str = "", info: str = ""):
        super().__init__()
        self.error, self.info = error, info

    def step(self, action: Any) -> Any:
        if self.error:
            raise ERRORS[self.error]()
        *rest, info = super().step(action)
        return (*rest, {"thing": ERRORS[self.info]()} if self.info else info)

    def give(self, what: str) -> Any:
        return ERRORS[what]()

    def take(self, thing: Any) -> str:
        return type(thing).__name__


# ---- what envs send ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_that_leaves_when_it_travels_is_an_env_error(backend: str) -> None:
    with open_pool(AwkwardEnv, backend=backend) as pool:
        for number, what in enumerate(ERRORS):
            env_id = (3, 0)[number % 2]  # hybrid: of a worker, and the caller's own
            pool.reset(seed=0)
            pool.set_attr("error", what, [env_id])
            with pytest.raises(shoal.EnvError) as caught:
                pool.step(ZEROS, timeout=30)
            assert caught.value.env_id == env_id
            assert f"env {env_id} raised in step" in str(caught.value)
            assert type(ERRORS[what]()).__name__ in str(caught.value)
            assert what == "read" or "bad joint" in str(caught.value)
            pool.set_attr("error", "", [env_id])
        assert_usable(pool)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_an_info_or_a_result_that_leaves_when_it_travels_is_an_env_error(method: str) -> None:
    with open_pool(AwkwardEnv, start_method=method) as pool:
        for what in ERRORS if method == "forkserver" else ["loaded exit", "pickled interrupt"]:
            if not what.startswith(("loaded", "pickled")):
                continue
            pool.reset(seed=0)
            pool.set_attr("info", what, [2])
            with pytest.raises(shoal.EnvError, match=r"env 2 .*info\['thing'\], a Leaves.*cannot be sent") as caught:
                pool.step(ZEROS, timeout=30)
            word = {"exit": "7", "stop": "loaded", "interrupt": "KeyboardInterrupt"}[what.split()[1]]
            assert word in str(caught.value)
            pool.set_attr("info", "", [2])
            with pytest.raises(shoal.EnvError, match=r"env 1 .*its result, a Leaves.*cannot be sent"):
                pool.call("give", what, env_ids=[1])
        assert_usable(pool)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_constructor_whose_error_leaves_when_it_travels(backend: str) -> None:
    def broken() -> Any:
        raise LeavesWhenPickled("exit")

    with pytest.raises(shoal.EnvError, match=r"env 3 raised in its constructor .*bad joint"):
        open_pool([AwkwardEnv, AwkwardEnv, AwkwardEnv, broken], None, backend=backend)


def test_an_env_function_that_leaves_when_it_is_loaded() -> None:
    class Leaves:
        def __reduce__(self) -> Any:
            return leave, ("exit",)

        def __call__(self) -> Any:
            return CountEnv()

    with pytest.raises(shoal.EnvError, match=r"env 2 raised in loading its env function .*7"):
        open_pool([CountEnv, CountEnv, Leaves(), CountEnv], None)


def test_ctrl_c_is_told_from_an_interrupt_that_an_object_raises() -> None:
    with pytest.raises(NotAnException, match="KeyboardInterrupt"):
        guarded(interrupt)
    with pytest.raises(NotAnException, match="SystemExit: 7"):
        guarded(sys.exit, 7)
    with pytest.raises(ValueError, match="plain"):
        guarded(fail, ValueError("plain"))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        guarded(signal.raise_signal, signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with in_thread(partial(guarded, interrupt)) as outcome:
        pass
    assert isinstance(outcome[0], NotAnException)


def test_a_program_that_leaves_by_a_signal_does_so_while_something_is_loaded() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    try:
        with pytest.raises(SystemExit):
            guarded(signal.raise_signal, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- what the caller sends -----------------------------------------------------------------------------------


class AwayFromHome:
    """Pickles here, and leaves when it is loaded anywhere."""

    def __reduce__(self) -> Any:
        return leave, ("exit",)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_an_argument_that_cannot_be_loaded_is_a_bad_call(method: str) -> None:
    with open_pool(AwkwardEnv, start_method=method) as pool:
        pool.reset(seed=0)
        pids = [worker.pid for worker in pool.workers]
        for thing, why in ((LoadsBadly(), "not at home"), (AwayFromHome(), "SystemExit: 7")):
            with pytest.raises(shoal.BadCall, match=f"(?s)env 0 .*call of 'take': what it is given.*{why}"):
                pool.call("take", thing)
            with pytest.raises(shoal.BadCall, match=f"(?s)env 3 .*set of 'value'.*{why}"):
                pool.set_attr("value", [thing], [3])
            with pytest.raises(shoal.BadCall, match=f"(?s)apply: .*{why}"):
                pool.apply(lambda env, thing: None, thing)
            with pytest.raises(shoal.BadCall, match=f"(?s)env 1 raised in reset .*{why}"):
                pool.reset([1], options={"thing": thing})
        assert pool.get_attr("value") == ["untouched"] * 4
        assert [worker.pid for worker in pool.workers] == pids, "no worker was lost over it"
        assert_usable(pool)


@pytest.mark.parametrize("thing", [threading.Lock(), LeavesWhenPickled("exit")], ids=["lock", "exit"])
def test_an_argument_that_cannot_be_pickled_is_a_bad_call(thing: Any) -> None:
    with open_pool(AwkwardEnv) as pool:
        pool.reset(seed=0)
        with pytest.raises(shoal.BadCall, match="call of 'take': what it is given cannot be sent"):
            pool.call("take", thing)
        with pytest.raises(shoal.BadCall, match="reset: what it is given cannot be sent"):
            pool.reset(options={"thing": thing})
        assert_usable(pool)


class ObjectActions(CountEnv):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = EvenSpace()  # type: ignore[assignment]

    def step(self, action: Any) -> Any:
        return super().step(0)


class HomelyInt(int):
    """A number that loads only where it was made."""

    def __reduce__(self) -> Any:
        return _homely, (int(self), os.getpid())


def _homely(number: int, home: int) -> HomelyInt:
    if home != os.getpid():
        raise RuntimeError("not at home here")
    return HomelyInt(number)


def test_an_action_that_cannot_be_loaded_costs_its_env() -> None:
    with open_pool(ObjectActions, 2) as pool:
        pool.reset(seed=0)
        with pytest.raises(shoal.EnvError, match=r"(?s)env 1 raised in step.*actions: what it is given.*not at home"):
            pool.step([2, HomelyInt(4)])
        pool.reset(seed=0)
        assert pool.step([2, 4]).obs[:, 2].tolist() == [1, 1]


# ---- spaces --------------------------------------------------------------------------------------------------


class LockedSpace(spaces.Discrete):
    def __init__(self) -> None:
        super().__init__(4)
        self.lock = threading.Lock()


class HomelySpace(spaces.Discrete):
    """Loads only where it was made."""

    def __reduce__(self) -> Any:
        return _homely_space, (os.getpid(),)


def _homely_space(home: int) -> HomelySpace:
    if home != os.getpid():
        sys.exit(7)
    return HomelySpace(4)


class OddSpaceEnv(CountEnv):
    def __init__(self, space: type[spaces.Discrete]):
        super().__init__()
        self.action_space = space() if space is LockedSpace else space(4)  # type: ignore[call-arg]


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize(("space", "why"), [(LockedSpace, "pickle"), (HomelySpace, "SystemExit: 7")])
def test_spaces_that_cannot_be_sent_are_a_bad_env(method: str, space: type[spaces.Discrete], why: str) -> None:
    with pytest.raises(shoal.BadEnv, match=f"(?s)env 0 .*its spaces cannot be sent between processes.*{why}"):
        open_pool(partial(OddSpaceEnv, space), start_method=method, start_timeout=50)
    with open_pool(partial(OddSpaceEnv, space), backend="serial") as pool:
        assert_usable(pool)


# ---- infos as arrays -----------------------------------------------------------------------------------------


class InfoShapes(CountEnv):
    """Its info is what it is told, a key of SHAPES."""

    def __init__(self, which: str = ""):
        super().__init__()
        self.which = which

    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        return (*rest, {"fine": 1, **SHAPES[self.which]()} if self.which else info)


def knot() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["self"] = found
    return {"deep": found}


SHAPES: dict[str, Callable[[], dict[str, Any]]] = {
    "two": lambda: {"map": np.ones(2)},
    "three": lambda: {"map": np.ones(3)},
    "number": lambda: {"map": 1},
    "text": lambda: {"map": "here"},
    "dict": lambda: {"map": {"x": 1}},
    "huge": lambda: {"map": 2**70},
    "knot": knot,
}
CONFLICTS = [(["two", "three"], "map"), (["number", "text"], "map"), (["two", "dict"], "map"),
             (["huge", "huge"], "map"), (["number", "huge"], "map")]  # fmt: skip


@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_infos_that_do_not_fit_together_name_env_and_key_and_the_step_is_not_lost(backend: str) -> None:
    with shoal.make(InfoShapes, 2, api="gymnasium", backend=backend, num_workers=1) as envs:
        for which, key in [*CONFLICTS, *([(["knot", "knot"], "deep")] if backend == "processes" else [])]:
            envs.reset(seed=0)
            envs.set_attr("which", which)
            with pytest.raises(Exception) as theirs:
                theirs_join([SHAPES[one]() for one in which])
            for turn, step in enumerate((envs.step, lambda actions: (envs.step_async(actions), envs.step_wait())), 1):
                with pytest.raises(shoal.EnvError, match=rf"env [01]: info\['{key}'\]") as caught:
                    step(np.zeros(2, np.int64))
                assert isinstance(caught.value, type(theirs.value)), "of the type that Gymnasium raises, too"
                assert envs.pool.last_answer().obs[:, 2].tolist() == [turn, turn]
                assert caught.value.infos[1]["fine"] == 1  # type: ignore[attr-defined]
            envs.set_attr("which", "")
            assert envs.step(np.zeros(2, np.int64))[0][:, 2].tolist() == [3, 3], "it goes on without a reset"


def theirs_join(infos: list[dict[str, Any]]) -> dict[str, Any]:
    """What Gymnasium itself makes of infos."""
    envs: Any = gymnasium.vector.VectorEnv()
    envs.num_envs, joined = len(infos), {}
    for env_id, info in enumerate(infos):
        joined = envs._add_info(joined, info, env_id)
    return joined


@pytest.mark.parametrize(
    "which", [["two", "two"], ["text", "number"], ["text", "two"], ["dict", "dict"], ["dict", "two"]]
)
def test_infos_that_gymnasium_joins_are_joined_alike(which: list[str]) -> None:
    with shoal.make(InfoShapes, 2, api="gymnasium", backend="serial") as envs:
        envs.reset(seed=0)
        envs.set_attr("which", which)
        joined = envs.step(np.zeros(2, np.int64))[4]
        expected = theirs_join([{"fine": 1, **SHAPES[one]()} for one in which])
        assert repr(joined) == repr(expected)


@pytest.mark.parametrize("backend", ["serial", "threads"])
def test_an_info_that_holds_itself_names_its_env_where_it_is_copied(backend: str) -> None:
    with open_pool(InfoShapes, backend=backend) as pool:
        pool.reset(seed=0)
        pool.set_attr("which", "knot", [2])
        with pytest.raises(shoal.EnvError, match="env 2 raised in step") as caught:
            pool.step(ZEROS)
        assert isinstance(caught.value, RecursionError)
        pool.set_attr("which", "", [2])
        assert_usable(pool)


def test_a_flag_of_an_agent_that_is_a_text_is_refused() -> None:
    flags = {"a": False, "b": False}
    script = [("ab", {"a": 1, "b": 2}, {"a": 0, "b": 0}, {**flags, "b": "False"}, flags, {})]
    with shoal.Pool(partial(Scripted, ("ab", {"a": 1, "b": 2}), script), 1, backend="serial") as pool:
        pool.reset()
        with pytest.raises(shoal.EnvError, match=r"env 0 .*terminated must be a bool, got 'False'"):
            pool.step(ZEROS[:2])

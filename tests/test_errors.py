"""EnvError is an instance of the env's own exception type, whatever that type looks like, and says what happened."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
import textwrap
from typing import Any

import gymnasium
import pytest

import shoal
from shoal import errors
from shoal.errors import EnvError, ShoalError
from shoal.memory.packed_errors import pack_error


class TwoArgs(Exception):
    def __init__(self, joint: str, force: float):
        super().__init__(f"{joint} at {force}")
        self.joint, self.force = joint, force


class KeywordOnly(Exception):
    def __init__(self, *, code: int):
        super().__init__(f"code {code}")
        self.code = code


class Slotted(Exception):
    __slots__ = ("joint",)

    def __init__(self, joint: str):
        super().__init__(joint)
        self.joint = joint


class NewWantsArguments(Exception):
    def __new__(cls, needed: int) -> NewWantsArguments:
        return super().__new__(cls, needed)


class Unpicklable(Exception):
    def __init__(self, text: str):
        super().__init__(text)
        self.handle = open(__file__)  # noqa: SIM115

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle this")


class LoadsBadly(Exception):
    """Pickles, and cannot be loaded: its __init__ wants more than `args` has."""

    def __init__(self, a: int, b: int):
        super().__init__(a)


class StrRaises(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Shadows(Exception):
    """Has attributes that EnvError uses too."""

    def __init__(self) -> None:
        super().__init__("shadow")
        self.env_id, self.worker, self.during, self._text = 99, 99, "nonsense", "nonsense"


class Diamond(ValueError, KeyError):
    pass


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    joint: str


class NoSubclasses(Exception):
    def __init_subclass__(cls) -> None:
        raise RuntimeError("nobody may inherit from this")


class Metaclass(type):
    pass


class WithMetaclass(Exception, metaclass=Metaclass):
    pass


def unicode_error() -> UnicodeDecodeError:
    try:
        b"\xff".decode()
    except UnicodeDecodeError as error:
        return error
    raise AssertionError


def travelled(error: BaseException, during: str = "step") -> EnvError:
    """As it comes out at the caller's."""
    try:
        raise error
    except BaseException as caught:
        packed = pack_error(caught, during)
    return pickle.loads(pickle.dumps(packed)).unpack(env_id=3, worker=1)  # type: ignore[no-any-return]


EXCEPTIONS: list[BaseException] = [
    ValueError("bad joint"),
    ValueError(),
    KeyError("no such fish"),
    IndexError(5),
    OSError(2, "No such file", "fish.txt"),
    FileNotFoundError(2, "No such file", "fish.txt"),
    ZeroDivisionError("division by zero"),
    StopIteration(4),
    RecursionError("deep"),
    MemoryError(),
    AssertionError("not so"),
    NotImplementedError(),
    AttributeError("no attribute", name="x", obj=None),
    ImportError("no module", name="fish"),
    SyntaxError("bad", ("file.py", 1, 2, "x =")),
    unicode_error(),
    json.JSONDecodeError("bad", "{", 1),
    gymnasium.error.ResetNeeded("reset first"),
    subprocess.CalledProcessError(3, ["fish"]),
    TwoArgs("hip", 3.5),
    KeywordOnly(code=7),
    Slotted("knee"),
    Unpicklable("with a file"),
    LoadsBadly(1, 2),
    StrRaises("x"),
    Shadows(),
    Diamond("both"),
    Frozen("elbow"),
    WithMetaclass("meta"),
    errors.BadObservation("wrong shape"),
]


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda e: type(e).__name__)
def test_an_env_error_is_of_the_envs_own_type(error: BaseException) -> None:
    found = travelled(error)
    assert isinstance(found, EnvError)
    assert isinstance(found, type(error))
    assert (found.env_id, found.worker, found.during) == (3, 1, "step")
    text = str(found)
    assert text.startswith("env 3 raised in step (worker 1): ")
    assert type(error).__name__ in text
    assert "Traceback (most recent call last)" in text
    assert "in travelled" in found.remote_traceback
    assert repr(found)
    with pytest.raises(type(error)):
        raise found
    with pytest.raises(ShoalError):
        raise found


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (TwoArgs("hip", 3.5), ["args"]),
        (Slotted("knee"), ["args", "joint"]),
        (OSError(2, "No such file", "fish.txt"), ["args", "errno", "strerror", "filename"]),
        (KeyError("no such fish"), ["args"]),
        (StopIteration(4), ["args", "value"]),
        (ImportError("no module", name="fish"), ["args", "name", "msg"]),
        (unicode_error(), ["args", "encoding", "start", "end", "object"]),
        (subprocess.CalledProcessError(3, ["fish"]), ["returncode", "cmd"]),
        (json.JSONDecodeError("bad", "{", 1), ["msg", "doc", "pos"]),
    ],
    ids=lambda e: type(e).__name__ if isinstance(e, BaseException) else "",
)
def test_its_attributes_are_the_originals(error: BaseException, names: list[str]) -> None:
    """Code that catches the env's own type reads that type's attributes."""
    found = travelled(error)
    if found.original is None:  # this Python cannot pickle it, so that only its type and text arrive
        assert isinstance(found, type(error))
        assert str(error) in str(found)
        return
    for name in names:
        assert getattr(found, name) == getattr(error, name), name


def test_the_original_is_there_where_it_could_be_brought() -> None:
    assert travelled(ValueError("bad joint")).original.args == ("bad joint",)  # type: ignore[union-attr]
    for error in (Unpicklable("x"), LoadsBadly(1, 2)):
        found = travelled(error)
        assert found.original is None
        assert str(error) in str(found)


@pytest.mark.parametrize("error", [NewWantsArguments(1), NoSubclasses("x")], ids=lambda e: type(e).__name__)
def test_a_type_that_refuses_is_at_least_named(error: Exception) -> None:
    found = travelled(error)
    assert isinstance(found, EnvError)
    assert type(error).__name__ in str(found)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()], ids=lambda e: type(e).__name__)
def test_an_env_that_wants_to_end_the_program_does_not_end_the_callers(error: BaseException) -> None:
    """`sys.exit()` in an env is the env's fault, and must not make the caller's script leave without a word."""
    found = travelled(error)
    assert isinstance(found, EnvError)
    assert not isinstance(found, type(error))
    assert type(error).__name__ in str(found)


def test_an_error_of_a_dynamic_class_arrives() -> None:
    local = type("Local", (ValueError,), {})
    found = travelled(local("here"))
    assert isinstance(found, ValueError)
    assert "Local" in str(found)


def test_chains_are_in_the_text() -> None:
    error = ValueError("outer")
    error.__cause__ = KeyError("inner")
    assert "KeyError: 'inner'" in str(travelled(error))


def test_env_errors_do_not_nest() -> None:
    again = travelled(travelled(ValueError("bad joint")))
    assert isinstance(again, EnvError)
    assert "bad joint" in str(again)


def test_env_errors_can_be_copied_and_pickled() -> None:
    """A trainer may send them on: concurrent.futures and multiprocessing pickle what a task raises."""
    found = travelled(TwoArgs("hip", 3.5))
    for again in (copy.copy(found), pickle.loads(pickle.dumps(found))):
        assert isinstance(again, EnvError)
        assert again.env_id == 3
        assert str(again) == str(found)


@pytest.mark.parametrize(
    "error",
    [
        errors.WorkerDied("worker 1 was ended by SIGKILL", 1, 4711, -9, [2, 3]),
        errors.StepTimeout("too late", [1, 2]),
        errors.BadAction("wrong"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_other_errors_can_be_pickled(error: ShoalError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


BASES = {
    "StepTimeout": TimeoutError,
    "BadAction": ValueError,
    "BadCall": ValueError,
    "BadObservation": ValueError,
    "SpaceMismatch": RuntimeError,
    "BadEnv": TypeError,
    "StartError": RuntimeError,
    "PoolClosed": RuntimeError,
    "CallPending": RuntimeError,
    "NothingPending": RuntimeError,
    "ResetNeeded": gymnasium.error.ResetNeeded,
    "WrongProcess": RuntimeError,
    "ConcurrentUse": RuntimeError,
    "CannotSnapshot": TypeError,
    "SlowCoreWarning": RuntimeWarning,
    "SlowPoolWarning": RuntimeWarning,
    "SlowEnvWarning": RuntimeWarning,
}


def test_the_tree_is_as_drawn() -> None:
    for name in errors.__all__:
        cls = getattr(errors, name)
        assert issubclass(cls, ShoalError | RuntimeWarning)
        assert getattr(shoal, name) is cls
        assert name in (errors.__doc__ or ""), f"{name} is not in the drawing"
        assert issubclass(cls, BASES.get(name, ShoalError))


def test_an_uncaught_env_error_tells_the_story() -> None:
    script = """
        from shoal.memory.packed_errors import pack_error
        try:
            raise KeyError("no such fish")
        except KeyError as error:
            packed = pack_error(error, "step")
        raise packed.unpack(3, 1)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr[done.stderr.index("shoal.EnvError") :]
    assert last.startswith("shoal.EnvError: env 3 raised in step (worker 1): KeyError: 'no such fish'")

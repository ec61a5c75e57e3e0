"""Envs that misbehave when told to, and what a test of faults asks about processes."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from envs import CountEnv, EvenSpace
from shoal import Pool

ISOLATED = ("processes", "hybrid")
HELPERS = ("import be_launcher", "multiprocessing.forkserver", "multiprocessing.resource_tracker")
# In /dev/shm, where other programs come and go as well: of shared_memory, multiprocessing's arrays and locks, tempfile.
NAMES_BY_PYTHON = ("psm_", "pym-", "sem.mp-", "tmp", "shoal")


# ---- processes -----------------------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """Direct children, by the kernel's word."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def workers_of(pid: int) -> list[int]:
    """All processes below this one, without multiprocessing's two helpers.

    Helpers are told by their command line, which the forkserver's children have as well: only direct children are some.
    """
    found = []
    for child in children(pid):
        if not is_helper(child):
            found.append(child)
        found += descendants_of(child)
    return found


def descendants_of(pid: int) -> list[int]:
    return [one for child in children(pid) for one in (child, *descendants_of(child))]


def is_helper(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return any(helper in command for helper in HELPERS)


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def held_by_others(names: Iterable[str]) -> set[str]:
    """Those names in /dev/shm that other programs use: processes that this one has not started have them mapped."""
    inodes: dict[str, str] = {}  # a semaphore is mapped under an older name of its file
    for name in names:
        with suppress(FileNotFoundError):
            inodes[str(os.stat(f"/dev/shm/{name}").st_ino)] = name
    if not inodes:
        return set()
    found: set[str] = set()
    own = {os.getpid(), *descendants_of(os.getpid())}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it is gone, or another user's
            if int(maps.parent.name) not in own:
                mapped = [line.split(None, 5)[4] for line in maps.read_text().splitlines() if "/dev/shm/" in line]
                found.update(inodes[inode] for inode in mapped if inode in inodes)
    return found


@dataclass(frozen=True)
class Traces:
    """What a process could leave behind."""

    workers: frozenset[int]
    descriptors: int
    threads: frozenset[int]
    shared: frozenset[str]

    @classmethod
    def of_this_process(cls) -> Traces:
        return cls(
            frozenset(workers_of(os.getpid())),
            len(os.listdir("/proc/self/fd")),
            frozenset(id(thread) for thread in threading.enumerate() if thread.name.startswith("shoal")),
            frozenset(name for name in os.listdir("/dev/shm") if name.startswith(NAMES_BY_PYTHON)),
        )

    def beyond(self, before: Traces) -> list[str]:
        """What is there now and was not then, in words."""
        left = [f"worker {pid}" for pid in self.workers - before.workers]
        left += [f"thread {ident}" for ident in self.threads - before.threads]
        shared = self.shared - before.shared
        left += [f"/dev/shm/{name}" for name in shared - held_by_others(shared)]
        if self.descriptors > before.descriptors:
            left.append(f"{self.descriptors - before.descriptors} descriptors")
        return left


def eventually(condition: Callable[[], bool], say: Callable[[], Any] = lambda: "", seconds: float = 30.0) -> None:
    """Fail unless it comes true in time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, say()
        time.sleep(0.02)


@contextmanager
def in_thread(action: Callable[[], Any]) -> Iterator[list[Any]]:
    """Runs it beside; the list gets its result or its exception by the end of the block."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(action())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield outcome
    thread.join(30)
    assert not thread.is_alive(), "it still waits"


@contextmanager
def no_descriptor(but: int = 0) -> Iterator[threading.Event]:
    """This process can open nothing, `but` so many, until the event is set or the block is over."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    over = threading.Event()

    def give_back() -> None:
        over.wait(40)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    giver = threading.Thread(target=give_back, daemon=True)
    giver.start()
    highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + but, hard))
        with suppress(OSError):  # too many open files
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(but):
            os.close(held.pop())
        yield over
    finally:
        over.set()
        giver.join()
        for fd in held:
            os.close(fd)


# ---- pools ---------------------------------------------------------------------------------------------------


def open_pool(env: Any, num_envs: int | None = 4, backend: str = "processes", **options: Any) -> Pool:
    """Two workers, two envs each."""
    options.setdefault("num_workers", 2)
    return Pool(env, num_envs, backend=backend, **options)  # type: ignore[arg-type]


def assert_usable(pool: Pool) -> None:
    """Reset and step give what CountEnv must give, from the start."""
    n = pool.num_envs
    assert not pool.closed
    assert pool.reset(seed=10).obs.tolist() == [[10 + i, 0, 0] for i in range(n)]
    for turn in (1, 2):
        batch = pool.step(np.arange(n) % 3)
        assert batch.obs.tolist() == [[10 + i, 0, turn] for i in range(n)]
        assert batch.reward.tolist() == [turn + 100.0 * (i % 3) for i in range(n)]


# ---- envs ----------------------------------------------------------------------------------------------------


class SeveralArgs(Exception):
    """Pickles, and does not load again."""

    def __init__(self, joint: str, force: float):
        super().__init__(f"{joint} gave way at {force}")


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("with a lock inside")
        self.lock = threading.Lock()


class LoadsBadly:
    """Pickles, and raises when it is loaded anywhere else than where it was made."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["home"] != os.getpid():
            raise RuntimeError("not at home here")
        self.__dict__.update(state)


RELEASE = threading.Event()  # ends what hangs in this process; nobody can in another one


def hang() -> None:
    """For longer than any test lasts, and not for ever: a failed test must not leave it."""
    RELEASE.wait(100)


def fail(error: BaseException) -> None:
    raise error


DEEDS: dict[str, Callable[[], Any]] = {
    "raise": lambda: fail(ValueError("bad joint")),
    "raise KeyError": lambda: fail(KeyError("no such fish")),
    "raise several": lambda: fail(SeveralArgs("hip", 3.5)),
    "raise unpicklable": lambda: fail(Unpicklable()),
    "exit politely": lambda: sys.exit(3),
    "interrupt": lambda: fail(KeyboardInterrupt()),
    "exit": lambda: os._exit(7),
    "exit well": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "really segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "hang": hang,
    "take a while": lambda: time.sleep(0.2),
}


class DeedEnv(CountEnv):
    """A CountEnv that does something terrible where it is told to: `deeds` maps a method's name to a key of DEEDS.

    Told by set_attr at any time, or by its constructor.
    """

    def __init__(self, deeds: dict[str, str] | None = None, **options: Any):
        super().__init__(**options)
        self.deeds = deeds or {}
        self.do("constructor")

    def do(self, where: str) -> None:
        if where in self.deeds:
            DEEDS[self.deeds[where]]()

    def step(self, action: Any) -> Any:
        self.do("step")
        return super().step(action)

    def reset(self, **kwargs: Any) -> Any:
        self.do("reset")
        return super().reset(**kwargs)

    def render(self) -> Any:
        self.do("render")
        return super().render()

    def answer(self) -> int:
        """Something to call."""
        self.do("call")
        return 42

    def give(self, what: str) -> Any:
        """Return something that is hard to send."""
        return AWKWARD[what]()

    def close(self) -> None:
        self.do("close")
        super().close()


AWKWARD: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "generator": lambda: (i for i in range(3)),
    "loads badly": LoadsBadly,
    "several args": lambda: SeveralArgs("hip", 3.5),
}


class InfoEnv(CountEnv):
    """A CountEnv whose infos, and attribute `thing`, are what it is told."""

    def __init__(self, thing: str = ""):
        super().__init__()
        self.what = thing

    @property
    def thing(self) -> Any:
        return AWKWARD[self.what]() if self.what else None

    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        return (*rest, {"fine": 1, "thing": self.thing} if self.what else info)


class BigEnv(CountEnv):
    """Actions are objects, and every info is larger than any pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = EvenSpace()  # type: ignore[assignment]

    def step(self, action: Any) -> Any:
        *rest, _ = super().step(0)
        return (*rest, {"big": bytes(4 << 20)})

    def swallow(self, big: bytes) -> int:
        return len(big)


class WrongEnv(CountEnv):
    """A CountEnv whose results are what `wrong` makes of them, a key of WRONGS; of its step or of its reset."""

    def __init__(self, wrong: str | None = None, where: str = "step"):
        super().__init__()
        self.wrong, self.where = wrong, where

    def step(self, action: Any) -> Any:
        result = super().step(action)
        return WRONGS[self.wrong](*result) if self.wrong and self.where == "step" else result

    def reset(self, **kwargs: Any) -> Any:
        observation, info = super().reset(**kwargs)
        if self.wrong and self.where == "reset":
            observation, _, _, _, info = WRONGS[self.wrong](observation, 0.0, False, False, info)
        return observation, info


WRONGS: dict[str, Callable[..., Any]] = {
    "obs shape": lambda o, *rest: (o[:2], *rest),
    "obs type": lambda o, *rest: (o + 0.5, *rest),
    "obs None": lambda o, *rest: (None, *rest),
    "obs ragged": lambda o, *rest: ([[1, 2], [3]], *rest),
    "info None": lambda *parts: (*parts[:4], None),
    "info list": lambda *parts: (*parts[:4], [("a", 1)]),
    "four values": lambda *parts: parts[:4],
    "a list": lambda *parts: list(parts),
    "nothing": lambda *parts: None,
    "reward None": lambda o, r, *rest: (o, None, *rest),
    "reward text": lambda o, r, *rest: (o, "1.5", *rest),
    "reward array": lambda o, r, *rest: (o, np.ones(2), *rest),
    "flag array": lambda o, r, t, *rest: (o, r, np.ones(2), *rest),
    "flag text": lambda o, r, t, *rest: (o, r, "False", *rest),
    "flag bytes": lambda o, r, t, u, info: (o, r, False, b"False", info),
}


class DictEnv(CountEnv):
    """A CountEnv with a nested observation, from which it may leave a part out."""

    def __init__(self, leave_out: str | None = None):
        super().__init__()
        self.observation_space = spaces.Dict(count=self.observation_space, arm=spaces.Dict(joint=spaces.Discrete(3)))
        self.leave_out = leave_out

    def _observation(self) -> Any:
        whole: dict[str, Any] = {"count": super()._observation(), "arm": {"joint": 1}}
        if self.leave_out == "joint":
            whole["arm"] = {"elbow": 1}
        elif self.leave_out == "arm":
            del whole["arm"]
        return whole


class BoxActionEnv(CountEnv):
    """A CountEnv with two numbers from -1 to 1 as its action."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def step(self, action: Any) -> Any:
        return super().step(int(action[0]))


class OtherSpaceEnv(CountEnv):
    """A CountEnv with another observation space, or another action space."""

    def __init__(self, what: str):
        super().__init__()
        if what == "observation":
            self.observation_space = spaces.Box(-1, 2**40, (4,), np.int64)
        else:
            self.action_space = spaces.Discrete(5)


class NoSpaceEnv(CountEnv):
    """Its observation_space is a property that raises."""

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(2)
        self.closes = 0

    @property  # type: ignore[override]
    def observation_space(self) -> Any:
        raise OSError("the simulator is not running")


class ClosingEnv(CountEnv):
    """Leaves a file when it is closed; its close may raise as well."""

    def __init__(self, folder: Path, raises: bool = False):
        super().__init__()
        self.folder, self.raises = folder, raises

    def close(self) -> None:
        (self.folder / f"closed-{id(self)}").touch()
        if self.raises:
            raise RuntimeError("cannot close")

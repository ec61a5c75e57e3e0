"""The matrix of faults: an env that misbehaves when told to, one entry per library, one entry per row.

A guest process plays one row with one library and prints a line of JSON for each thing it begins and each that ends.
Nothing here knows what comes out: `faults.py` watches the guest from outside and judges.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

NUM_ENVS = 4
BAD = 3  # the env that misbehaves; with two workers it is the second one of the second worker
HANG = 60.0
SCRATCH, DEED, IMPORTS = "SHOAL_FAULT_SCRATCH", "SHOAL_FAULT_DEED", "SHOAL_FAULT_IMPORTS"
# Guests end by themselves even when nobody watches: by the clock, and workers that spin without a parent by their CPU.
FUSE, CPU_FUSE = 150, 60


# ---- the env -------------------------------------------------------------------------------------------------


class Unpicklable(Exception):
    """Holds what cannot be sent."""

    def __init__(self) -> None:
        super().__init__("bad joint")
        self.lock = threading.Lock()


class TwoArguments(Exception):
    """Pickles, and does not load again: pickle calls it with its one message."""

    def __init__(self, joint: str, force: float) -> None:
        super().__init__(f"bad joint {joint}: {force}")


def note_fault(scratch: Path) -> None:
    """Write down when the fault happened, for rows in which workers take their time before it does."""
    with contextlib.suppress(FileExistsError), (scratch / "fired").open("x") as file:
        file.write(str(time.monotonic()))


def fail(error: Exception) -> None:
    """Raise, where only an expression is allowed."""
    raise error


def start_child(env: FaultyEnv) -> None:
    """Start what a simulator with a server of its own starts."""
    env.child = subprocess.Popen(["sleep", f"{HANG:g}"])


DEEDS: dict[str, Callable[[Any], Any]] = {
    "raise": lambda env: fail(ValueError("bad joint")),
    "raise unpicklable": lambda env: fail(Unpicklable()),
    "raise two arguments": lambda env: fail(TwoArguments("hip", 3.5)),
    "kill": lambda env: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda env: os.kill(os.getpid(), signal.SIGSEGV),
    "exit": lambda env: os._exit(0),
    "hang": lambda env: time.sleep(HANG),
    "take 0.5 s": lambda env: time.sleep(0.5),
    "take 2 s": lambda env: time.sleep(2.0),
    "take 20 ms": lambda env: time.sleep(0.02),
    "two numbers": lambda env: np.zeros(2, np.float32),
    "one number": lambda env: np.zeros(1, np.float32),
    "start a child": start_child,
}


class FaultyEnv(gymnasium.Env):
    """Observes its index, its steps since reset and its last action; BAD does its deed from the moment it is armed."""

    def __init__(self, index: int) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 100.0, (3,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self.index, self.steps = index, 0
        self.child: subprocess.Popen[bytes] | None = None
        self._where, _, self._deed = os.environ[DEED].partition(":")
        self._scratch = Path(os.environ[SCRATCH])
        (self._scratch / f"pid-{index}").write_text(str(os.getpid()))
        self._misbehave("constructor")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin to count."""
        super().reset(seed=seed)
        self._misbehave("reset")
        self.steps = 0
        return np.array([self.index, 0, -1], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Count; an observation that the deed gives replaces the right one."""
        self.steps += 1
        instead = self._misbehave("step")
        right = np.array([self.index, self.steps, int(action)], np.float32)
        return right if instead is None else instead, 1.0, False, False, {}

    def close(self) -> None:
        """Tidy up, as an env should."""
        self._misbehave("close")
        if self.child is not None:
            self.child.terminate()
            self.child.wait()

    def _misbehave(self, where: str) -> Any:
        if self.index == BAD and where == self._where and (self._scratch / "armed").exists():
            note_fault(self._scratch)
            return DEEDS[self._deed](self)
        return None


# ---- the libraries -------------------------------------------------------------------------------------------


class Unavailable(Exception):
    """This library has no such thing; the message says what."""


@dataclass(frozen=True)
class Stepped:
    """What a step or a reset gave, in the same words for all."""

    obs: Any
    ended: Any
    infos: Any
    env_ids: Sequence[int] = tuple(range(NUM_ENVS))


NOT_ENDED = (False,) * NUM_ENVS


class Library:
    """How a library is used, as its documentation says."""

    name: str
    package: str
    module: str
    start_methods: tuple[str, ...] = ()
    has_timeout = True
    envs: Any = None

    @property
    def parts(self) -> Any:
        """Its module."""
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as missing:
            raise Unavailable("not installed") from missing

    def make(self, fns: list[Any], timeout: float | None, pending: bool, start_method: str | None) -> None:
        """Start the envs. `timeout` and `pending` are for libraries that must know beforehand what is coming."""
        raise NotImplementedError

    def reset(self) -> Stepped:
        """Reset all and wait."""
        obs, infos = self.envs.reset()
        return Stepped(obs, NOT_ENDED, infos)

    def step(self, actions: Any) -> Stepped:
        """Step all and wait."""
        raise NotImplementedError

    def begin(self, actions: Any) -> None:
        """Return while a step is under way."""
        self.envs.step_async(actions)

    def step_within(self, actions: Any, seconds: float) -> Stepped:
        """Step under the library's own timeout."""
        raise NotImplementedError

    def settle(self) -> None:
        """Fetch what came too late, where the library has a way to."""

    def close(self) -> None:
        """End everything."""
        self.envs.close()


class GymnasiumAsync(Library):
    """`gymnasium.vector.AsyncVectorEnv`, and the API that Shoal shares with it."""

    name, package, module = "Gymnasium AsyncVectorEnv", "gymnasium", "gymnasium.vector"
    start_methods = ("spawn", "forkserver")

    def make(self, fns: list[Any], timeout: float | None, pending: bool, start_method: str | None) -> None:
        self.envs = self.parts.AsyncVectorEnv(fns, context=start_method)

    def step(self, actions: Any) -> Stepped:
        return self._stepped(self.envs.step(actions))

    def step_within(self, actions: Any, seconds: float) -> Stepped:
        self.envs.step_async(actions)
        return self._stepped(self.envs.step_wait(timeout=seconds))

    def _stepped(self, result: Any) -> Stepped:
        obs, _, terminated, truncated, infos = result
        return Stepped(obs, terminated | truncated, infos)


class Shoal(GymnasiumAsync):
    """`shoal.make` with worker processes."""

    name, package, module = "Shoal", "shoal", "shoal"
    options: dict[str, Any] = {}

    def make(self, fns: list[Any], timeout: float | None, pending: bool, start_method: str | None) -> None:
        make = self.parts.make
        try:
            self.envs = make(fns, backend="processes", num_workers=2, start_method=start_method, **self.options)
        except (TypeError, ValueError) as error:
            unknown = [option for option in self.options if option in str(error).partition("\n")[0]]
            if unknown:
                raise Unavailable(f"not available: {', '.join(unknown)}") from error
            raise


class ShoalRestart(Shoal):
    """The same, told to go on without what was lost."""

    name = "Shoal, restart"
    options = {"on_error": "restart"}


class SB3Subproc(Library):
    """Stable-Baselines3's `SubprocVecEnv`."""

    name, package, module = "SB3 SubprocVecEnv", "stable_baselines3", "stable_baselines3.common.vec_env"
    start_methods = ("spawn", "forkserver")
    has_timeout = False

    def make(self, fns: list[Any], timeout: float | None, pending: bool, start_method: str | None) -> None:
        self.envs = self.parts.SubprocVecEnv(fns, start_method=start_method)

    def reset(self) -> Stepped:
        return Stepped(self.envs.reset(), NOT_ENDED, self.envs.reset_infos)

    def step(self, actions: Any) -> Stepped:
        obs, _, dones, infos = self.envs.step(actions)
        return Stepped(obs, dones, infos)


class PufferMultiprocessing(Library):
    """PufferLib's `Multiprocessing`; it takes whatever start method Python has by default."""

    name, package, module = "PufferLib Multiprocessing", "pufferlib-core", "pufferlib.vector"
    has_timeout = False

    def make(self, fns: list[Any], timeout: float | None, pending: bool, start_method: str | None) -> None:
        vector = self.parts
        self.envs = vector.make(
            [vector.pufferlib.emulation.GymnasiumPufferEnv] * len(fns),
            env_args=[[]] * len(fns),
            env_kwargs=[{"env_creator": fn} for fn in fns],
            backend=vector.Multiprocessing,
            num_envs=len(fns),
            num_workers=2,
            overwork=True,  # a machine with fewer cores than workers is refused otherwise
        )

    def step(self, actions: Any) -> Stepped:
        obs, _, terminated, truncated, infos = self.envs.step(actions)
        return Stepped(np.array(obs), terminated | truncated, infos)

    def begin(self, actions: Any) -> None:
        self.envs.send(np.asarray(actions))


class TianshouSubproc(Library):
    """tianshou's `SubprocVectorEnv`, which leaves envs behind only where its constructor was told that it may."""

    name, package, module = "tianshou SubprocVectorEnv", "tianshou", "tianshou.env"
    start_methods = ("spawn",)

    def make(self, fns: list[Any], timeout: float | None, pending: bool, start_method: str | None) -> None:
        options = {"wait_num": NUM_ENVS - 1} if pending else {}
        self.envs = self.parts.SubprocVectorEnv(fns, timeout=timeout, context=start_method, **options)

    def step(self, actions: Any) -> Stepped:
        parts = [self.envs.step(actions)]
        while self.envs.waiting_id:
            parts.append(self.envs.step(None))
        return self._stepped(parts)

    def begin(self, actions: Any) -> None:
        self.envs.step(actions)

    def step_within(self, actions: Any, seconds: float) -> Stepped:
        return self._stepped([self.envs.step(actions)])  # the constructor was told the seconds

    def settle(self) -> None:
        while self.envs.waiting_id:
            self.envs.step(None)

    def _stepped(self, parts: list[Any]) -> Stepped:
        """One result from several, in the order of the envs."""
        obs, _, terminated, truncated, infos = (np.concatenate(each) for each in zip(*parts, strict=True))
        ids = [info.pop("env_id") for info in infos]
        order = np.argsort(ids)
        return Stepped(obs[order], (terminated | truncated)[order], infos[order], sorted(ids))


LIBRARIES: dict[str, type[Library]] = {
    "shoal": Shoal,
    "shoal-restart": ShoalRestart,
    "gymnasium": GymnasiumAsync,
    "sb3": SB3Subproc,
    "pufferlib": PufferMultiprocessing,
    "tianshou": TianshouSubproc,
}


# ---- the stage -----------------------------------------------------------------------------------------------


class Stage:
    """What a row does its play on: one library, and the words that the harness listens to."""

    def __init__(self, library: Library, row: Row, after: Iterable[str]) -> None:
        self.library, self.row, self.after = library, row, tuple(after)
        self.scratch = Path(os.environ[SCRATCH])
        self.usual: set[str] = set()  # the keys of infos when all is well

    def say(self, **words: Any) -> None:
        """One line; the harness believes only the guest itself, not a worker that runs the script once more."""
        print(json.dumps({"pid": os.getpid(), "t": time.monotonic(), **words}), flush=True)

    def arm(self) -> None:
        """From now on the env misbehaves."""
        (self.scratch / "armed").touch()

    def calm(self) -> None:
        """From now on it does not."""
        (self.scratch / "armed").unlink(missing_ok=True)

    def kill_worker(self) -> None:
        """Do to the bad env's worker what the system does when memory runs out."""
        os.kill(int((self.scratch / f"pid-{BAD}").read_text()), signal.SIGKILL)
        time.sleep(0.3)

    def open(self, timeout: float | None = None, pending: bool = False, start_method: str | None = None) -> None:
        """Make, and see that it works."""
        fns = [functools.partial(FaultyEnv, index) for index in range(NUM_ENVS)]
        self.library.make(fns, timeout, pending, start_method)
        self.check(3)

    def check(self, steps: int) -> None:
        """Reset, step, and compare with what must come out."""
        self._compare(self.library.reset().obs, [-1] * NUM_ENVS, 0)
        for turn in range(1, steps + 1):
            stepped = self.library.step(ACTIONS)
            self._compare(stepped.obs, ACTIONS, turn)
            self.usual = _keys(stepped.infos)

    def _compare(self, obs: Any, actions: Any, turn: int) -> None:
        wanted = [[float(index), float(turn), float(action)] for index, action in enumerate(actions)]
        if np.asarray(obs).tolist() != wanted:
            raise WrongData(f"expected {wanted}, found {np.asarray(obs).tolist()}")

    def fault(self, action: Callable[[], Any]) -> None:
        """The call in question."""
        self.attempt("fault", action)
        self.calm()

    def aftermath(self) -> None:
        """Whether it can be used once more, and closed."""
        if self.library.envs is None:
            return
        if "use" in self.after:
            self.attempt("use", self._use)
        if "close" in self.after:
            self.attempt("close", self.library.close)

    def _use(self) -> None:
        self.library.settle()
        self.check(2)

    def attempt(self, phase: str, action: Callable[[], Any], catch: bool = True) -> None:
        """Try, and say what came of it. An interrupt passes: a script does not catch it either."""
        self.say(phase=phase)
        began = time.monotonic()
        try:
            value = action()
        except Unavailable:
            raise
        except Exception as error:
            kind, words = type(error).__name__, _words(error)
            self.say(done=phase, seconds=time.monotonic() - began, raised=kind, message=words)
            if not catch:
                note_fault(self.scratch)
                raise
        else:
            self.say(done=phase, seconds=time.monotonic() - began, **self._findings(value))

    def _findings(self, value: Any) -> dict[str, Any]:
        """How a step that raised nothing told of the fault, if it did."""
        if not isinstance(value, Stepped):
            return {}
        told = [f"infos: {key}" for key in sorted(_keys(value.infos) - self.usual) if not key.startswith("_")]
        if BAD not in value.env_ids:
            told.append(f"gives {len(value.env_ids)} of {NUM_ENVS} envs")
        elif value.ended[BAD]:
            told.append("episode ended")
        obs = np.asarray(value.obs)
        plain = obs.shape == (NUM_ENVS, 3) and obs.dtype == np.float32
        return {
            "told": told,
            "obs": obs[BAD].tolist() if plain else None,
            "shape": f"{obs.dtype} array of shape {obs.shape}",
        }


class WrongData(Exception):
    """The library gave something else than the envs did."""


ACTIONS = np.arange(NUM_ENVS) % 2
OUT_OF_RANGE = np.where(np.arange(NUM_ENVS) == BAD, 7, ACTIONS)


def _keys(infos: Any) -> set[str]:
    if isinstance(infos, dict):
        return {str(key) for key in infos}
    return {str(key) for info in infos for key in info}


def _words(error: BaseException | None) -> str:
    """All that a user reads under the traceback."""
    lines = []
    while error is not None and len(lines) < 5:
        lines += [str(error), *getattr(error, "__notes__", [])]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(lines)[:4000]


# ---- the rows ------------------------------------------------------------------------------------------------


def in_step(stage: Stage) -> None:
    """The fault is in a step."""
    stage.open()
    stage.arm()
    stage.fault(lambda: stage.library.step(ACTIONS))
    stage.aftermath()


def in_reset(stage: Stage) -> None:
    """The fault is in a reset."""
    stage.open()
    stage.arm()
    stage.fault(stage.library.reset)
    stage.aftermath()


def in_start(stage: Stage) -> None:
    """The fault is in a constructor; some learn of it only with the first reset, which counts as well."""
    stage.arm()
    stage.fault(stage.open)
    stage.aftermath()


def killed_idle(stage: Stage) -> None:
    """The worker dies between two steps."""
    stage.arm()
    stage.open()
    stage.kill_worker()
    stage.fault(lambda: stage.library.step(ACTIONS))
    stage.aftermath()


def timed(stage: Stage) -> None:
    """The step takes longer than the library's own timeout allows."""
    if not stage.library.has_timeout:
        raise Unavailable("has no timeout")
    stage.open(timeout=1.0)
    stage.arm()
    stage.fault(lambda: stage.library.step_within(ACTIONS, 1.0))
    stage.aftermath()


def closing(stage: Stage) -> None:
    """The fault shows in close."""
    stage.arm()
    stage.open()
    stage.fault(stage.library.close)


def closing_twice(stage: Stage) -> None:
    """The first close is right, the second one too much."""
    stage.open()
    stage.library.close()
    stage.fault(stage.library.close)


def closing_pending(stage: Stage) -> None:
    """Close comes while a step is under way."""
    stage.open(pending=True)
    stage.arm()
    stage.library.begin(ACTIONS)
    stage.fault(stage.library.close)


def leaving_pending(stage: Stage) -> None:
    """The script ends while a step is under way."""
    stage.open(pending=True)
    stage.arm()
    stage.library.begin(ACTIONS)
    stage.say(phase="fault")


def stepping(stage: Stage) -> None:
    """Steps until a signal comes."""
    stage.open()
    stage.arm()
    stage.say(phase="fault")
    while True:
        stage.library.step(ACTIONS)


def too_few(stage: Stage) -> None:
    """Actions for three of four envs."""
    stage.open()
    stage.fault(lambda: stage.library.step(ACTIONS[:-1]))
    stage.aftermath()


def out_of_range(stage: Stage) -> None:
    """An action that the action space does not have."""
    stage.open()
    stage.fault(lambda: stage.library.step(OUT_OF_RANGE))
    stage.aftermath()


def unguarded(stage: Stage) -> None:
    """All of it, in a script that each worker would run again if it imported it."""
    method = stage.row.start_method
    if method not in stage.library.start_methods:
        raise Unavailable(f"does not offer {method}")
    # Uncaught, as in a script: what a worker raises when it runs this again must end it.
    stage.attempt("fault", lambda: stage.open(start_method=method), catch=False)
    stage.aftermath()


@dataclass(frozen=True)
class Row:
    """One fault."""

    title: str
    play: Callable[[Stage], None]
    deed: str = ""  # METHOD:DEED of the bad env, once it is armed
    cause: str = ""  # the words, as a pattern, of a message that names the cause; "" where there is none to name
    blames: bool = True  # whether a good message names the env as well
    after: Sequence[str] = ("use", "close")
    plain: str = ""  # how to call it when nothing is raised nor told; "" is silently wrong
    sends: signal.Signals | None = None  # what the harness sends once the guest steps
    to_group: bool = False  # to all processes, as a terminal does
    deadline: float = 0.0  # seconds, where it must be at least so long
    in_start: bool = False  # whether the fault is in the start, and its time counts from when a worker meets it
    linger: float = 3.0  # seconds until a process that is still there counts as left behind
    script: bool = False  # run as a script without a guard
    start_method: str | None = None


_KILLED = r"SIGKILL|signal 9|exit ?code:? -9"
_CLOSES = {"after": (), "plain": "returns in {seconds:.1f} s"}

ROWS: dict[str, Row] = {
    "raise": Row("step raises `ValueError`", in_step, "step:raise", "bad joint"),
    "unpicklable": Row(
        "step raises an exception that does not pickle", in_step, "step:raise unpicklable", "bad joint"
    ),
    "unloadable": Row(
        "step raises an exception that pickles and does not load", in_step, "step:raise two arguments", "bad joint"
    ),
    "constructor": Row(
        "constructor of one env raises", in_start, "constructor:raise", "bad joint", after=("close",), in_start=True
    ),
    "reset": Row("reset raises, every time", in_reset, "reset:raise", "bad joint", deadline=30),
    "sigkill": Row("SIGKILL in a step", in_step, "step:kill", _KILLED),
    "sigkill-idle": Row("SIGKILL from outside while idle, then a step", killed_idle, "", _KILLED),
    "sigsegv": Row(
        "SIGSEGV in a step", in_step, "step:segfault", r"SIGSEGV|signal 11|[Ss]egmentation|exit ?code:? -11"
    ),
    "exit": Row("`os._exit(0)` in a step", in_step, "step:exit", r"exit ?(code|status):? 0"),
    "hang-timeout": Row(
        "step hangs, the library's timeout is 1 s", timed, "step:hang", r"time[d ]*out|second", after=("close",)
    ),
    "late": Row("step takes 2 s, the library's timeout is 1 s", timed, "step:take 2 s", r"time[d ]*out|second"),
    "hang": Row("step hangs, no timeout", in_step, "step:hang", r"second|hang|wait", after=("close",), deadline=15),
    "close-hangs": Row("close of one env hangs", closing, "close:hang", **_CLOSES),
    "close-pending": Row("close while a step of 0.5 s is pending", closing_pending, "step:take 0.5 s", **_CLOSES),
    "close-hanging": Row("close while a step hangs", closing_pending, "step:hang", **_CLOSES),
    "close-twice": Row("close twice", closing_twice, **_CLOSES),
    "no-close": Row("script ends without close while a step hangs", leaving_pending, "step:hang"),
    "ctrl-c": Row("Ctrl-C during steps", stepping, "step:take 20 ms", sends=signal.SIGINT, to_group=True),
    "sigterm": Row("SIGTERM of the parent", stepping, "step:take 20 ms", sends=signal.SIGTERM, linger=5),
    "parent-killed": Row("SIGKILL of the parent", stepping, "step:take 20 ms", sends=signal.SIGKILL, linger=5),
    "too-few": Row("three actions for four envs", too_few, "", r"\b4\b.*\b3\b|\b3\b.*\b4\b", blames=False),
    "out-of-range": Row("action 7 for `Discrete(2)`", out_of_range, "", r"\b7\b", plain="goes on, env gets {obs[2]:g}"),
    "shape-2": Row("observation of shape (2,) for `Box(3,)`", in_step, "step:two numbers", "shape|broadcast"),
    "shape-1": Row("observation of shape (1,) for `Box(3,)`", in_step, "step:one number", "shape|broadcast"),
    "child-closed": Row("env has a child process, then close", closing, "constructor:start a child", **_CLOSES),
    "child-killed": Row(
        "env has a child process, its worker is killed", killed_idle, "constructor:start a child", _KILLED,
        after=("close",),
    ),
    "no-guard-spawn": Row(
        "script without `__main__` guard, spawn", unguarded, "", "__main__", False, ("close",), "works", in_start=True,
        script=True, start_method="spawn",
    ),
    "no-guard-forkserver": Row(
        "script without `__main__` guard, forkserver", unguarded, "", "__main__", False, ("close",), "works",
        in_start=True, script=True, start_method="forkserver",
    ),
}  # fmt: skip

# A script imports its library at the top: so do the guest and, where they import the script, its workers.
with contextlib.suppress(ImportError):
    importlib.import_module(os.environ.get(IMPORTS, "json"))

_kept: list[Stage] = []  # as a script's own variables, what a guest made lives until the interpreter leaves


def guest(library: str, row: str, *skip: str) -> None:
    """Play one row with one library in this process; `skip` names what is left out of the aftermath."""
    # Whoever starts the harness in the background may have had SIGINT ignored for all that comes from it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(FUSE)
    with contextlib.suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_FUSE, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    entry = ROWS[row]
    stage = Stage(LIBRARIES[library](), entry, [one for one in entry.after if one not in skip])
    _kept.append(stage)
    try:
        entry.play(stage)
    except Unavailable as reason:
        stage.say(unavailable=str(reason))
    if entry.play is not leaving_pending:
        stage.say(phase="exit")

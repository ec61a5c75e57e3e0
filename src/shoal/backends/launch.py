"""Starts worker processes: forkserver with preloaded imports by default, spawn or fork on request.

Unlike multiprocessing's own contexts, a worker never imports the caller's main script: env functions are
pickled by value. So a script needs no `if __name__ == "__main__"` for Shoal's sake, sixteen workers do not
import a learning framework sixteen times, and nothing of the caller's own multiprocessing set-up is touched.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing import forkserver, popen_fork, popen_forkserver, popen_spawn_posix, process, spawn
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

START_METHODS = tuple(m for m in ("forkserver", "spawn", "fork") if m in multiprocessing.get_all_start_methods())
DEFAULT_START_METHOD = START_METHODS[0]
PRELOAD = ["numpy", "gymnasium", "gymnasium.envs.classic_control", "cloudpickle", "shoal.backends.worker_main"]


class _ForkServer:
    """A forkserver of Shoal's own, started when the first worker is."""

    def __init__(self) -> None:
        self._server = forkserver.ForkServer()
        self._server.set_forkserver_preload(PRELOAD)
        self._lock = threading.Lock()

    def connect_to_new_process(self, fds: list[int]) -> tuple[int, int]:
        with self._lock:
            return self._server.connect_to_new_process(fds)


_server = _ForkServer()


def _renew_server() -> None:
    global _server
    _server = _ForkServer()


# A forked child must not talk to its parent's server: it starts one of its own.
os.register_at_fork(after_in_child=_renew_server)


def _preparation_without_main(name: str) -> dict[str, Any]:
    data: dict[str, Any] = spawn.get_preparation_data(name)
    data.pop("init_main_from_name", None)
    data.pop("init_main_from_path", None)
    return data


def _launcher(module: ModuleType) -> Callable[[Any, Any], None]:
    """The standard library's own `_launch`, seeing our preparation data and our forkserver."""
    names = dict(vars(module))
    connect = lambda fds: _server.connect_to_new_process(fds)  # noqa: E731  (looked up late: it may be renewed)
    # Modules with a function replaced, for this caller alone; the modules themselves stay as they are.
    names["spawn"] = SimpleNamespace(**{**vars(spawn), "get_preparation_data": _preparation_without_main})
    names["forkserver"] = SimpleNamespace(**{**vars(forkserver), "connect_to_new_process": connect})
    return FunctionType(module.Popen._launch.__code__, names)


class _ForkServerPopen(popen_forkserver.Popen):
    _launch = _launcher(popen_forkserver)


class _SpawnPopen(popen_spawn_posix.Popen):
    _launch = _launcher(popen_spawn_posix)


class _Process(process.BaseProcess):
    """A process that is started by one of the above; travels to the child as a plain BaseProcess."""

    _start_method = None  # the child keeps its own default for what it starts itself

    def __init__(self, popen: type, **kwargs: Any):
        super().__init__(**kwargs)
        self._Popen = popen

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {key: value for key, value in self.__dict__.items() if key not in ("_Popen", "_popen")}
        return _rebuild, (state,)


def _rebuild(state: dict[str, Any]) -> process.BaseProcess:
    worker = process.BaseProcess.__new__(process.BaseProcess)
    worker.__dict__.update(state, _popen=None, _start_method=None)
    return worker


_POPEN = {"forkserver": _ForkServerPopen, "spawn": _SpawnPopen, "fork": popen_fork.Popen}


def start_process(method: str, name: str, target: Callable[..., None], *args: Any) -> process.BaseProcess:
    """Start `target(*args)` in a new process; it is not a daemon, so that envs may have children."""
    worker = _Process(_POPEN[method], target=target, args=args, name=name, daemon=False)
    worker.start()
    # multiprocessing would join it at exit for as long as it takes; the pool's own exit hook closes it in time.
    process._children.discard(worker)  # type: ignore[attr-defined]
    return worker

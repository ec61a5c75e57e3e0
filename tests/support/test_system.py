"""What Shoal asks of the system: the portable way beside Linux's own, and systems that lack what Linux has."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shoal.support.system import System, linux, posix, windows

PORTABLE, LINUX = posix.Posix(), linux.Linux()
REPO = Path(__file__).parents[2]
both = pytest.mark.parametrize("system", [PORTABLE, LINUX], ids=["posix", "linux"])


@both
def test_shared_memory_is_zero_and_shared_by_its_descriptor(system: System) -> None:
    fd = system.shared_memory("shoal-test", 10_000)
    one, other = system.map_shared(fd, 10_000), system.map_shared(fd, 10_000)
    assert bytes(one) == bytes(10_000)
    one[5000] = b"x"
    assert other[5000] == b"x"
    os.close(fd)
    assert one[5000] == b"x"


@both
def test_a_forked_child_keeps_its_writes_to_itself(system: System) -> None:
    fd = system.shared_memory("shoal-test", 5000)
    memory = system.map_shared(fd, 5000)
    memory[7] = b"a"
    child = os.fork()
    if not child:
        system.unshare(memory, fd)
        seen = memory[7] == b"a"
        memory[7] = b"b"
        os._exit(0 if seen and memory[7] == b"b" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert memory[7] == b"a"
    os.close(fd)


@both
@pytest.mark.parametrize("size", [1, 100_000])
def test_requests_arrive_whole_and_in_order_with_their_descriptors(system: System, size: int) -> None:
    ours, theirs = system.request_channel()
    received: list[tuple[bytes, list[int]]] = []

    def serve() -> None:
        while (request := system.receive_request(theirs))[0]:
            received.append(request)

    thread = threading.Thread(target=serve)
    thread.start()
    reader, writer = os.pipe()
    for number in (1, 2, 3):
        system.send_request(ours, bytes([number]) * size, [writer] * number)
    os.close(writer)
    ours.close()
    thread.join()
    theirs.close()
    assert [(data, len(fds)) for data, fds in received] == [(bytes([n]) * size, n) for n in (1, 2, 3)]
    for _, fds in received:
        for fd in fds:
            os.write(fd, b"!")
            os.close(fd)
    assert os.read(reader, 100) == b"!" * 6
    os.close(reader)


def test_a_request_that_was_cut_off_counts_as_none() -> None:
    ours, theirs = PORTABLE.request_channel()
    ours.sendall(b"\x09\x00\x00\x00half")
    ours.close()
    assert PORTABLE.receive_request(theirs) == (b"", [])
    theirs.close()


def test_a_launcher_that_is_gone_is_noticed() -> None:
    ours, theirs = PORTABLE.request_channel()
    theirs.close()
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        PORTABLE.send_request(ours, b"hello", [])
    ours.close()


@both
def test_a_hangup_is_noticed(system: System) -> None:
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=system.wait_for_hangup, args=(ours.fileno(),), daemon=True)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    theirs.close()
    thread.join(60)
    assert not thread.is_alive()
    ours.close()


@both
def test_variables_of_other_processes(system: System) -> None:
    environ = {**os.environ, "SHOAL_TEST_VARIABLE": "found"}
    script = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert system.variable_of(child.pid, "SHOAL_TEST_VARIABLE") == "found"
        assert system.variable_of(child.pid, "SHOAL_OTHER") == ""
        child.communicate()
    assert system.variable_of(child.pid, "SHOAL_TEST_VARIABLE") == ""


def test_windows_has_memory_for_one_process() -> None:
    memory = windows.Windows().map_private(100)
    ctypes.c_char.from_buffer(memory).value = b"x"
    assert memory[0] == ord("x")
    assert windows.Windows().times_blocked() >= 0


# What other systems lack is taken away from a running Python, after the packages that Shoal imports have come.
LACKS = """
import sys, os, importlib, importlib.abc, pathlib
import gymnasium, gymnasium.vector, cloudpickle, psutil, platformdirs, rich.console, rich.live, rich.table
import multiprocessing.reduction, multiprocessing.connection, multiprocessing.util
import faulthandler, mmap, select, signal, socket, tempfile, threading, importlib.metadata, asyncio
import subprocess, shutil, urllib.request
try:
    import numba.core.registry
except ImportError:
    pass

EXTRAS = ("torch", "jax", "ray", "tensorflow", "mpi4py", "torchrl", "stable_baselines3", "tianshou", "pettingzoo")
MAY_LACK = (*EXTRAS, "numba", "llvmlite")  # in an environment with the core alone

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in MODULES or name.split(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def lack(platform, modules, names):
    global MODULES
    MODULES = modules
    for name in modules:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Missing())
    for module, missing in names.items():
        for name in missing.split():
            if hasattr(module, name):
                delattr(module, name)
    sys.platform = platform

def import_all(skipped=()):
    import shoal
    root = pathlib.Path(shoal.__file__).parent
    for path in sorted(root.rglob("*.py")):
        name = ".".join(("shoal", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        if name.startswith(tuple(skipped)) or name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            assert error.name.split(".")[0] in MAY_LACK, (name, error)
        except ImportError as error:
            assert "pip install" in str(error), (name, error)
"""

WINDOWS = (
    LACKS
    + """
lack("win32", ["resource", "fcntl", "termios", "tty", "pwd", "grp", "_posixshmem", "_posixsubprocess"], {
    os: "fork register_at_fork memfd_create pidfd_open getuid geteuid getsid setsid pread pwrite WNOHANG set_blocking "
        "sched_getaffinity sched_yield killpg",
    signal: "SIGKILL SIGCHLD SIGRTMAX SIGURG SIGCONT pthread_sigmask pidfd_send_signal set_wakeup_fd",
    socket: "AF_UNIX send_fds recv_fds SOCK_SEQPACKET", select: "poll epoll",
    mmap: "MAP_SHARED MAP_PRIVATE MAP_ANONYMOUS PROT_READ PROT_WRITE", faulthandler: "register",
})
os.environ["SHOAL_NATIVE"] = "0"  # there is no C core
import numpy as np
import shoal
import_all(["shoal.support.system.posix", "shoal.support.system.linux", "shoal.backends.launch",
            "shoal.backends.processes", "shoal.backends.process_backend", "shoal.backends.worker_main",
            "shoal.observe.top", "shoal.observe.running_pools", "shoal.remote", "shoal.compiled.cuda"])
assert shoal.native.KIND == "twin"
for backend in ("serial", "threads", "auto"):
    with shoal.Pool("CartPole-v1", 3, backend=backend) as pool:
        pool.reset(seed=1)
        for _ in range(20):
            batch = pool.step(np.ones(3, np.int64))
        assert batch.obs.shape == (3, 4)
        print(backend, pool.plan.backend)
envs = shoal.make("CartPole-v1", 2)
envs.reset(seed=0)
envs.step(np.zeros(2, np.int64))
envs.close()
for options in ({"backend": "processes"}, {"backend": "hybrid"}, {"on_error": "restart"}, {"isolate": True}):
    try:
        shoal.Pool("CartPole-v1", 2, **options)
    except shoal.StartError as error:
        assert "Linux, macOS and WSL, and not on Windows" in str(error), error
    else:
        raise AssertionError(options)
if importlib.util.find_spec("numba"):
    from shoal.compiled.library.classic_control import CartPole
    with shoal.Pool(CartPole, 8) as pool:
        pool.reset(seed=0)
        assert pool.step(np.ones(8, np.int64)).obs.shape == (8, 4)
        print("compiled", pool.plan.backend)
"""
)

MACOS = (
    LACKS
    + """
lack("darwin", [], {
    os: "memfd_create pidfd_open sched_getaffinity", signal: "SIGRTMAX SIGRTMIN pidfd_send_signal",
    socket: "SOCK_SEQPACKET", select: "epoll", mmap: "MAP_NORESERVE",
})
os.environ["SHOAL_PORTABLE"] = "1"  # for the workers, in which Python says again what system it is on
import numpy as np
import_all(["shoal.support.system.linux", "shoal.compiled.cuda"])
import shoal
from shoal.support.system import system
assert system.name == "macOS" and system.start_methods[0] == "spawn"
for options in ({"backend": "serial"}, {"backend": "processes", "num_workers": 2, "on_error": "restart"}):
    with shoal.Pool("CartPole-v1", 2, **options) as pool:
        pool.reset(seed=1)
        for _ in range(20):
            batch = pool.step(np.ones(2, np.int64))
        assert batch.obs.shape == (2, 4)
        print(pool.plan.backend)
"""
)


def run(script: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200, cwd=REPO)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split("\n")[:-1]


@pytest.mark.timeout(250)
def test_windows_has_the_backends_of_one_process() -> None:
    lines = run(WINDOWS)
    assert lines[:3] == ["serial serial", "threads threads", "auto serial"]
    assert lines[3:] in ([], ["compiled compiled"])


@pytest.mark.timeout(250)
def test_macos_has_processes_too() -> None:
    assert run(MACOS) == ["serial", "processes"]

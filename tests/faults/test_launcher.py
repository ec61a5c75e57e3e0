"""How worker processes start and end: no orphan outlives its caller, and a start that is impossible says why."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from faults.kit import alive, children, descendants_of, eventually, is_helper
from faults.test_scripts import TESTS, ends, next_line, program

pytestmark = pytest.mark.timeout(90)

METHODS = ("forkserver", "spawn", "fork")
READY = 'print("ready", flush=True); time.sleep(100)'


def wait_until_ready(process: subprocess.Popen[bytes]) -> None:
    assert next_line(process) == "ready\n"


def launcher_of(pid: int) -> int:
    [found] = [child for child in children(pid) if is_helper(child)]
    return found


# ---- orphans -------------------------------------------------------------------------------------------------

HOLDING = """
    import ctypes
    from envs import CountEnv
    class GripEnv(CountEnv):
        def step(self, action):
            ctypes.PyDLL(None).sleep(3600)  # keeps the interpreter's lock, as bad native code does
    pool = shoal.Pool(GripEnv, 2, backend={backend!r}, num_workers=2, start_method={method!r})
    pool.reset()
    print(*[worker.pid for worker in pool.workers if worker.pid], flush=True)
    pool.send([0, 0])
"""


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_that_holds_the_lock_ends_with_its_caller(method: str) -> None:
    body = textwrap.dedent(HOLDING.format(backend="processes", method=method))
    with program("processes", f"{body}\ntime.sleep(0.5)\n{READY}") as (process, pids):
        wait_until_ready(process)
        below = descendants_of(process.pid)
        assert set(pids) < set(below)
        process.kill()
        assert ends(process, below)[0] == -signal.SIGKILL


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_worker_ends_with_its_caller(method: str) -> None:
    with program("processes", f"pool = pool_of(start_method={method!r})\n{READY}") as (process, pids):
        wait_until_ready(process)
        below = descendants_of(process.pid)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        process.kill()
        assert ends(process, below)[0] == -signal.SIGKILL


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_launcher_ends_with_its_caller(method: str) -> None:
    with program("processes", f"pool = pool_of(start_method={method!r})\n{READY}") as (process, _):
        wait_until_ready(process)
        below = descendants_of(process.pid)
        launcher = launcher_of(process.pid)
        eventually(lambda: os.getsid(launcher) == launcher, seconds=30)  # until it has begun to serve
        os.kill(launcher, signal.SIGSTOP)
        process.kill()
        assert ends(process, below)[0] == -signal.SIGKILL


@pytest.mark.parametrize("method", METHODS)
def test_nothing_stays_of_a_program_that_ends_well(method: str) -> None:
    with program("processes", f"pool = pool_of(start_method={method!r})\nprint('ready', flush=True)\ninput()") as (
        process,
        _,
    ):
        wait_until_ready(process)
        below = descendants_of(process.pid)
        assert ends(process, below)[0] == 1  # input() has none


SHY = """
    from envs import CountEnv
    class ShyEnv(CountEnv):
        # Its child leaves session and parent, and is marked by nothing that was there at the last exec.
        def child(self):
            read, write = os.pipe()
            if not os.fork():
                os.setsid()
                if not os.fork():
                    os.write(write, str(os.getpid()).encode())
                    time.sleep(600)
                os._exit(0)
            return int(os.read(read, 20))
    pool = shoal.Pool(ShyEnv, 4, backend="processes", num_workers=2, start_method={method!r}, on_error="restart")
    pool.reset()
    print(*pool.call("child"), flush=True)
    first = pool.workers[0].pid
    os.kill(first, signal.SIGKILL)
    pool.step(zeros)
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_children_in_sessions_of_their_own_end_with_a_killed_worker(method: str) -> None:
    """Those of the worker that was killed, and no others."""
    with program("processes", textwrap.dedent(SHY.format(method=method))) as (process, shy):
        wait_until_ready(process)
        eventually(lambda: not alive(shy[0]) and not alive(shy[1]))
        assert alive(shy[2])
        assert alive(shy[3])
        process.kill()
        ends(process, shy)


# ---- starts that have no room --------------------------------------------------------------------------------


def run(body: str, before: Sequence[str] = (), **options: Any) -> subprocess.CompletedProcess[str]:
    text = "import os, sys, time\nimport numpy as np\nimport shoal\nfrom envs import CountEnv\n" + textwrap.dedent(body)
    options.setdefault("cwd", TESTS)
    return subprocess.run([*before, sys.executable, "-c", text], capture_output=True, text=True, timeout=60, **options)


USE = """
    with shoal.Pool(CountEnv, 4, backend={backend!r}, num_workers=2, start_method={method!r}) as pool:
        print(pool.reset(seed=3).obs[:, 0].tolist())
"""


@pytest.mark.parametrize("method", METHODS)
def test_a_long_tmpdir_is_no_matter_and_nothing_is_left_in_it(method: str, tmp_path: Path) -> None:
    folder = tmp_path / ("d" * 120)
    folder.mkdir()
    done = run(USE.format(backend="processes", method=method), env={**os.environ, "TMPDIR": str(folder)})
    assert done.stdout == "[3, 4, 5, 6]\n", done.stderr
    assert list(folder.iterdir()) == []


def test_a_killed_caller_leaves_no_temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with program("processes", f"pool = pool_of()\n{READY}") as (process, pids):
        wait_until_ready(process)
        process.kill()
        ends(process, pids)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", METHODS)
def test_a_removed_working_directory_is_no_matter(method: str) -> None:
    folder = tempfile.mkdtemp()
    body = "import shutil\n" + f"shutil.rmtree({folder!r})\n" + textwrap.dedent(USE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    done = run(body.format(backend="processes", method=method), cwd=folder, env=environment)
    shutil.rmtree(folder, ignore_errors=True)
    assert done.stdout == "[3, 4, 5, 6]\n", done.stderr


LIMITED = """
    import resource, threading
    used = len(os.listdir("/proc/self/task"))
    def descriptors():
        return len(os.listdir("/proc/self/fd"))
    for room in (0, 2, 5):
        if os.fork():
            os.wait()
            continue
        # Of this user are this process, its parent with its threads, and what is started from here on.
        resource.setrlimit(resource.RLIMIT_NPROC, (used + 1 + room, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
        before = descriptors()
        for _ in range(2):
            try:
                with shoal.Pool(CountEnv, 3, backend={backend!r}, num_workers=3, start_method={method!r}) as pool:
                    pool.reset()
                print("works")
            except shoal.StartError as error:
                lost = descriptors() - before - 1  # the launcher, if there is one, has a channel
                print("named" if "ulimit -u" in str(error) and lost <= 0 else f"lost {{lost}}, {{error}}")
        sys.stdout.flush()
        os._exit(0)
"""


@pytest.mark.skipif(shutil.which("setpriv") is None or os.geteuid() != 0, reason="needs root, and util-linux's setpriv")
@pytest.mark.parametrize(
    ("backend", "method"), [*(("processes", method) for method in METHODS), ("hybrid", "spawn"), ("threads", "spawn")]
)
def test_a_limit_of_processes_is_named_and_nothing_is_lost(backend: str, method: str) -> None:
    """As a user of whom nothing else runs, and who may still read this installation."""
    caps = "+dac_override,+dac_read_search"
    user = ["setpriv", "--reuid=54321", "--clear-groups", f"--inh-caps={caps}", f"--ambient-caps={caps}"]
    done = run(LIMITED.format(backend=backend, method=method), user)
    lines = done.stdout.splitlines()
    assert len(lines) == 6, done.stdout + done.stderr
    assert set(lines) <= {"works", "named"}, done.stdout + done.stderr
    assert "named" in lines


DAEMONIC = """
    import multiprocessing
    def use():
        with shoal.Pool(CountEnv, 4, backend={backend!r}, start_method={method!r}) as pool:
            return pool.reset(seed=3).obs[:, 0].tolist()
    if __name__ == "__main__":
        with multiprocessing.get_context("fork").Pool(1) as pool:
            print(pool.apply(use))
"""


@pytest.mark.parametrize(
    ("backend", "method"), [*(("processes", method) for method in METHODS), ("hybrid", "spawn"), ("auto", "forkserver")]
)
def test_inside_of_a_daemonic_process(backend: str, method: str) -> None:
    done = run(DAEMONIC.format(backend=backend, method=method))
    assert done.stdout == "[3, 4, 5, 6]\n", done.stderr


STOPPED = """
    import signal
    shoal.Pool(CountEnv, 1, backend="processes", start_method={method!r}).close()
    from faults.kit import children, is_helper
    [launcher] = [child for child in children(os.getpid()) if is_helper(child)]
    os.kill(launcher, signal.SIGSTOP)
    try:
        shoal.Pool(CountEnv, 4, backend="processes", num_workers=2, start_method={method!r}, start_timeout=1.0)
    except shoal.StepTimeout as error:
        print("launcher" in str(error))
    with shoal.Pool(CountEnv, 4, backend="processes", num_workers=2, start_method={method!r}) as pool:
        print(pool.reset(seed=3).obs[:, 0].tolist())
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_start_timeout_holds_while_the_launcher_is_stopped(method: str) -> None:
    """And the next pool has a new one."""
    done = run(STOPPED.format(method=method))
    assert done.stdout == "True\n[3, 4, 5, 6]\n", done.stderr


KILLED = """
    import signal
    from faults.kit import children, is_helper
    pool = shoal.Pool(CountEnv, 4, backend="processes", num_workers=2, start_method={method!r}, on_error="restart")
    pool.reset(seed=3)
    [launcher] = [child for child in children(os.getpid()) if is_helper(child)]
    os.kill(launcher, signal.SIGKILL)
    print(pool.step([0] * 4).obs[:, 2].tolist())
    os.kill(pool.workers[0].pid, signal.SIGKILL)
    print(pool.step([0] * 4).obs[2:, 2].tolist())
    print(pool.step([0] * 4).obs[2:, 2].tolist())
    pool.close()
"""


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_launcher_is_replaced_when_it_is_needed(method: str) -> None:
    done = run(KILLED.format(method=method))
    assert done.stdout == "[1, 1, 1, 1]\n[2, 2]\n[3, 3]\n", done.stderr


@pytest.mark.parametrize("method", METHODS)
def test_a_caller_that_ignores_the_deaths_of_children_learns_of_them(method: str) -> None:
    done = run(f"""
        import signal
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        pool = shoal.Pool(CountEnv, 4, backend="processes", num_workers=2, start_method={method!r})
        pool.reset(seed=3)
        pid = pool.workers[1].pid
        os.kill(pid, signal.SIGKILL)
        try:
            pool.step([0] * 4)
        except shoal.WorkerDied as error:
            print("SIGKILL" in str(error) or "has ended" in str(error), "does not leave" in str(error))
    """)
    assert done.stdout == "True False\n", done.stderr


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_ctrl_c_while_workers_start(method: str) -> None:
    """The whole group gets the signal, as from a terminal: one traceback, from the caller."""
    text = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import shoal
from envs import CountEnv
print("ready", flush=True)
shoal.Pool(CountEnv, 4, backend="processes", num_workers=2, start_method={method!r})
print("made", flush=True)
input()
"""
    for pause in (0.0, 0.05, 0.2):
        process = subprocess.Popen(
            [sys.executable, "-c", text], start_new_session=True, bufsize=0, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            wait_until_ready(process)
            signal.sigtimedwait([], pause) if pause else None
            below = descendants_of(process.pid)
            os.killpg(process.pid, signal.SIGINT)
            error = process.communicate(timeout=30)[1].decode()
        finally:
            process.kill()
        # The signal may come while Python handles another exception, inside of an import: then the report has both.
        handled = error.count("During handling of the above exception, another exception occurred")
        assert error.count("Traceback (most recent call last)") - handled == 1, error
        assert error.rstrip().endswith("KeyboardInterrupt"), error
        eventually(lambda: not any(map(alive, below)))  # noqa: B023


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_killed_launcher_does_not_stay_a_zombie(method: str) -> None:
    done = run(f"""
        import signal
        from faults.kit import children, is_helper
        with shoal.Pool(CountEnv, 2, backend="processes", num_workers=2, start_method={method!r}) as pool:
            pool.reset(seed=3)
            [launcher] = [child for child in children(os.getpid()) if is_helper(child)]
            os.kill(launcher, signal.SIGKILL)
            while os.waitid(os.P_PID, launcher, os.WEXITED | os.WNOWAIT) is None:
                pass
        print(launcher in children(os.getpid()))
    """)
    assert done.stdout == "False\n", done.stderr

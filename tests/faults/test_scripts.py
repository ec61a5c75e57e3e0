"""Whole programs: however they end, they end, and their workers with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faults.kit import ISOLATED, alive, eventually
from shoal import native

pytestmark = pytest.mark.timeout(60)

TESTS = Path(__file__).parents[1]
START = """
    import os, sys, time, signal
    import numpy as np
    import shoal
    from faults.kit import DeedEnv
    def pool_of(deeds=None, **options):
        options = {{"backend": {backend!r}, "num_workers": 2, **options}}
        pool = shoal.Pool(DeedEnv, 4, **options)
        pool.reset(seed=0)
        if deeds:
            pool.set_attr("deeds", [deeds], [3])
        print(*[worker.pid for worker in pool.workers if worker.pid], flush=True)
        return pool
    zeros = np.zeros(4, np.int64)
"""


@contextmanager
def program(backend: str, body: str) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Runs a script in a process group of its own; gives it and its workers' pids, once it has said them.

    Its output is not buffered here: `communicate` would not return what a buffered `readline` has read beyond the line.
    """
    text = textwrap.dedent(START).format(backend=backend) + textwrap.dedent(body)
    process = subprocess.Popen(
        [sys.executable, "-c", text], cwd=TESTS, start_new_session=True, bufsize=0,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        line = next_line(process)
        assert line, process.communicate(timeout=10)[1]
        yield process, [int(pid) for pid in line.split()]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=10)


def next_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode()


def ends(process: subprocess.Popen[bytes], pids: list[int], seconds: float = 20) -> tuple[int, str, str]:
    """Its exit status and what it wrote since the last line that was read; its workers are gone as well."""
    out, error = process.communicate(timeout=seconds)
    eventually(lambda: not any(alive(pid) for pid in pids), lambda: [pid for pid in pids if alive(pid)])
    return process.returncode, out.decode(), error.decode()


ALL = ("serial", "threads", "processes", "hybrid")


LIVES = {
    "idle": "pool = pool_of(); pool.step(zeros)",
    "pending": "pool = pool_of(); pool.send(zeros)",
    "close raises": "pool = pool_of({'close': 'raise'}); pool.step(zeros)",
    "three pools": "keep = [pool_of() for _ in range(3)]",
}


@pytest.mark.parametrize(
    ("backend", "life"), [*((b, "pending") for b in ALL), *(("processes", life) for life in LIVES if life != "pending")]
)
def test_without_close_the_interpreter_leaves(backend: str, life: str) -> None:
    with program(backend, LIVES[life]) as (process, pids):
        code, _, error = ends(process, pids)
        assert code == 0, error
        assert error == ""


@pytest.mark.parametrize("backend", ["threads", *ISOLATED])
@pytest.mark.parametrize("where", ["step", "close"])
def test_a_hanging_env_does_not_keep_the_interpreter(backend: str, where: str) -> None:
    body = f"""
        pool = pool_of({{{where!r}: 'hang'}})
        pool.send(zeros)
        time.sleep(0.2)
    """
    with program(backend, body) as (process, pids):
        assert ends(process, pids)[0] == 0


@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_an_uncaught_error_ends_the_program_with_one_story(backend: str) -> None:
    with program(backend, "pool = pool_of({'step': 'raise'}); pool.step(zeros)") as (process, pids):
        code, _, error = ends(process, pids)
        assert code == 1
        last = [line for line in error.splitlines() if line.startswith("shoal.EnvError")]
        assert last == ["shoal.EnvError: env 3 raised in step (worker "
                        f"{0 if backend == 'serial' else 1}): ValueError: bad joint"]  # fmt: skip


@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_sys_exit_in_an_env_is_not_the_programs(backend: str) -> None:
    with program(backend, "pool = pool_of({'step': 'exit politely'}); pool.step(zeros)") as (process, pids):
        code, _, error = ends(process, pids)
        assert code == 1
        assert "env 3" in error


@pytest.mark.parametrize(
    ("backend", "start_method", "doing", "how"),
    [
        ("processes", "forkserver", "idle", signal.SIGKILL),
        ("processes", "forkserver", "step", signal.SIGKILL),
        ("processes", "spawn", "step", signal.SIGKILL),
        ("processes", "fork", "idle", signal.SIGKILL),
        ("processes", "fork", "step", signal.SIGKILL),
        ("processes", "forkserver", "step", signal.SIGTERM),
        ("hybrid", "forkserver", "step", signal.SIGKILL),
    ],
)
def test_workers_leave_with_their_caller(backend: str, start_method: str, doing: str, how: signal.Signals) -> None:
    body = f"""
        pool = pool_of({{'step': 'hang'}} if {doing!r} == "step" else None, start_method={start_method!r})
        if {doing!r} == "step":
            pool.send(zeros)
        print("ready", flush=True)
        time.sleep(100)
    """
    with program(backend, body) as (process, pids):
        assert next_line(process) == "ready\n"
        assert all(alive(pid) for pid in pids)
        os.kill(process.pid, how)
        assert ends(process, pids)[0] == -how


DOINGS = ("pool.step(zeros)", "pool.call('pid')", "pool.reset()", "time.sleep(0.01)")


@pytest.mark.parametrize(
    ("backend", "doing"),
    [*(("processes", doing) for doing in DOINGS), *((b, DOINGS[0]) for b in ALL if b != "processes")],
)
def test_ctrl_c(backend: str, doing: str) -> None:
    """The whole group gets the signal, as from a terminal: one traceback, from the caller; workers say nothing."""
    body = f"""
        with pool_of() as pool:
            print("ready", flush=True)
            while True:
                {doing}
    """
    with program(backend, body) as (process, pids):
        assert next_line(process) == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        code, _, error = ends(process, pids)
        assert code == -signal.SIGINT
        assert error.count("Traceback (most recent call last)") == 1, error
        assert error.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("backend", ["threads", *ISOLATED])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_ctrl_c_while_a_step_hangs(backend: str, twice: bool) -> None:
    body = """
        with pool_of({'step': 'hang'}) as pool:
            print("ready", flush=True)
            pool.step(zeros)
    """
    with program(backend, body) as (process, pids):
        assert next_line(process) == "ready\n"
        time.sleep(0.5)  # until the step hangs for certain
        os.killpg(process.pid, signal.SIGINT)
        if twice:
            time.sleep(0.5)
            os.killpg(process.pid, signal.SIGINT)
        code, _, error = ends(process, pids)
        assert code == -signal.SIGINT
        assert "KeyboardInterrupt" in error


@pytest.mark.skipif(native.KIND == "twin", reason="only the C core posts and waits in one piece; the twin may be torn")
@pytest.mark.parametrize("backend", ALL)
def test_ctrl_c_can_be_caught_and_gone_on_from(backend: str) -> None:
    body = """
        pool = pool_of()
        try:
            print("ready", flush=True)
            while True:
                pool.step(zeros)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert pool.reset(seed=5).obs[:, 0].tolist() == [5, 6, 7, 8]
        assert pool.step(zeros).obs[:, 2].tolist() == [1] * 4
        pool.close()
        print("went on")
    """
    with program(backend, body) as (process, pids):
        assert next_line(process) == "ready\n"
        os.killpg(process.pid, signal.SIGINT)
        code, out, error = ends(process, pids)
        assert (code, out) == (0, "went on\n"), error


@pytest.mark.parametrize(
    ("backend", "start_method"),
    [("processes", "forkserver"), ("processes", "spawn"), ("processes", "fork"), ("hybrid", "forkserver")],
)
def test_a_script_needs_no_main_guard_and_catches_its_own_exceptions(
    backend: str, start_method: str, tmp_path: Path
) -> None:
    """Env and exception classes of the script itself travel by value, and come back as themselves."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(TESTS)!r})
        import numpy as np, shoal
        from envs import CountEnv
        print("script runs")
        class Tired(Exception):
            def __init__(self, joint):
                super().__init__(joint)
                self.joint = joint
        class Env(CountEnv):
            def step(self, action):
                raise Tired("knee")
        pool = shoal.Pool(Env, 4, backend={backend!r}, num_workers=2, start_method={start_method!r})
        pool.reset()
        try:
            pool.step(np.zeros(4, int))
        except Tired as error:
            print("caught", error.joint, error.env_id)
        pool.close()
    """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=40)
    assert done.stdout == "script runs\ncaught knee 0\n", done.stderr
    assert done.stderr == ""


SMALL_SHM = """
    mount -t tmpfs -o size=64k tmpfs /dev/shm || exit 77
    exec "$0" "$@"
"""


@pytest.mark.parametrize("backend", ISOLATED)
def test_a_small_dev_shm_is_no_matter(backend: str) -> None:
    """Containers often have 64 MiB there; Shoal's memory has no name, and does not live there."""
    body = textwrap.dedent(START).format(backend=backend) + textwrap.dedent("""
        from faults.test_restart import BigObsEnv
        with shoal.Pool(BigObsEnv, 4, backend=os.environ["BACKEND"], num_workers=2, frames=64) as pool:
            pool.reset(seed=0)
            pool.step(zeros)
            print(os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize, os.listdir("/dev/shm"))
    """)
    command = ["unshare", "--mount", "sh", "-c", SMALL_SHM, sys.executable, "-c", body]
    environment = {**os.environ, "BACKEND": backend}
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=40, env=environment)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a small /dev/shm cannot be made here: {done.stderr.strip()}")
    assert (done.returncode, done.stdout) == (0, "65536 []\n"), done.stderr


def test_a_crash_of_a_forked_worker_is_told_though_another_handler_took_the_signal() -> None:
    """A library of the caller's may have put its own handler in the place of faulthandler's, which is on already."""
    body = """
        import faulthandler
        faulthandler.enable()
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        pool = pool_of({"step": "really segfault"}, start_method="fork")
        try:
            pool.step(zeros)
        except shoal.WorkerDied as error:
            print(error, flush=True)
    """
    with program("processes", body) as (process, pids):
        code, out, _ = ends(process, pids)
    assert code == 0
    assert "Segmentation fault" in out

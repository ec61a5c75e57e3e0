"""`shoal top`: real pools in other processes, seen as they are; who may not look, and what vanishes meanwhile."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import shoal
from envs import CountEnv, GateEnv
from shoal.cli import main
from shoal.observe import running_pools
from shoal.observe.running_pools import Look, RunningPool
from shoal.observe.top import Screen, Watch

BACKENDS = ("serial", "threads", "processes", "hybrid")
STEPPING = """
import select
import sys

import numpy as np

import shoal
from envs import CountEnv

if __name__ == "__main__":
    made = [shoal.Pool(CountEnv, 7, backend=name, num_workers=3) for name in sys.argv[1:]]
    for pool in made:
        pool.reset(seed=0)
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        for pool in made:
            pool.step(np.ones(7, np.int64))
"""
TOP = [sys.executable, "-m", "shoal.cli.main", "top"]


@contextlib.contextmanager
def stepping(folder: Path, *backends: str) -> Iterator[subprocess.Popen[str]]:
    """A process with one pool for each backend, which it steps until the end of the block."""
    script = folder / "stepping.py"
    script.write_text(STEPPING)
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, str(script), *backends], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        leave(process)


def leave(process: subprocess.Popen[str]) -> None:
    """Have it close its pools and end."""
    assert process.stdin is not None
    process.stdin.close()
    process.wait(30)


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A process that steps four pools, one for each backend."""
    with stepping(tmp_path_factory.mktemp("busy"), *BACKENDS) as process:
        yield process


def top(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TOP, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def told(watch: Watch) -> running_pools.PoolRates:
    """What the one pool that is watched has done since the last look."""
    [found] = watch.look()
    return found


@pytest.fixture(autouse=True)
def no_pools_of_other_tests() -> None:
    """Pools that other tests of this process have let go, and that would be seen as well, are gone."""
    gc.collect()


# ---- what is seen --------------------------------------------------------------------------------------------


def test_pools_on_every_backend_are_seen_from_another_process(busy: subprocess.Popen[str]) -> None:
    done = top(busy.pid, "--once", "--json", "--interval", 0.5)
    assert (done.returncode, done.stderr) == (0, "")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["backend"] for one in found] == list(BACKENDS)  # each once, oldest first
    for one in found:
        assert (one["pid"], one["env"], one["envs"], one["batch_size"]) == (busy.pid, "CountEnv", 7, 7)
        assert 0.5 <= one["interval"] < one["seconds"]
        assert one["steps"] >= one["steps_per_second"] * one["interval"] > 0
        assert one["episodes"] >= one["episodes_per_second"] * one["interval"] > 0
        # Five steps of 101 to 105 each.
        assert (one["mean_return"], one["mean_length"], one["restarts"]) == (515.0, 5.0, 0)
        assert 0 <= one["done"] <= one["pending"] <= 7
        workers = one["workers"]
        assert [worker["envs"] for worker in workers] == ([[0, 6]] if len(workers) == 1 else [[0, 2], [3, 4], [5, 6]])
        assert all(0 < worker["busy"] <= 1 and worker["steps_per_second"] > 0 for worker in workers)
        assert sum(worker["steps_per_second"] for worker in workers) == pytest.approx(one["steps_per_second"])
        processes = {"processes": 3, "hybrid": 2}.get(one["backend"], 0)
        assert len({worker["pid"] for worker in workers} - {None}) == processes


def test_a_table_says_the_same_in_words(busy: subprocess.Popen[str]) -> None:
    done = top(busy.pid, "--once", "--interval", 0.2)
    assert (done.returncode, done.stderr) == (0, "")
    for words in (
        f"CountEnv, 7 envs, hybrid with 3 workers, process {busy.pid}, running for 0:00:", "serial with 1 worker,",
        "steps/s", "episodes/s with a mean return of 515 in 5 steps", "queue: ", "done and not yet received",
    ):  # fmt: skip
        assert words in done.stdout


def test_the_same_as_a_page(busy: subprocess.Popen[str], tmp_path: Path) -> None:
    path = tmp_path / "top.html"
    done = top(busy.pid, "--interval", "0.2", "--html", path)
    assert (done.returncode, done.stdout) == (0, "")
    text = path.read_text()
    assert f"process {busy.pid}" in text
    assert "steps/s" in text
    assert "http" not in text
    wrong = top(busy.pid, "--html", tmp_path / "top.txt")
    assert wrong.returncode == 2
    assert "the picture is HTML, so name it .html" in wrong.stderr


def test_all_pools_of_the_user_are_found_and_each_once(busy: subprocess.Popen[str]) -> None:
    found, refused = running_pools.find()
    assert sum(pool.pid == busy.pid for pool in found) == 4
    assert len({pool.inode for pool in found}) == len(found)
    assert busy.pid not in [one.pid for one in refused]


def test_a_workers_process_leads_to_its_pool(busy: subprocess.Popen[str]) -> None:
    everything = Watch(busy.pid).look()
    [hybrid] = [one for one in everything if one.backend == "hybrid"]
    assert running_pools.find_in(hybrid.workers[2].pid or 0) == ([], [])
    assert [one.backend for one in Watch(hybrid.workers[2].pid).look()] == ["hybrid"]


def test_the_queue_and_the_env_that_takes_long(gate: Path) -> None:
    with shoal.Pool(lambda: GateEnv(gate), 7, backend="threads", num_workers=3, batch_size=1) as pool:
        watch = Watch(os.getpid())
        pool.reset(seed=0)
        assert (told(watch).pending, told(watch).done) == (0, 0)
        pool.send(np.array([0, 3, 1]), [0, 4, 6])
        pool.recv()
        while (seen := told(watch)).done < 1 or seen.workers[1].env is None:
            time.sleep(0.01)
        assert (seen.pending, seen.done) == (2, 1)
        assert [worker.env for worker in seen.workers] == [None, 4, None]
        time.sleep(0.1)
        later = told(watch)
        assert later.workers[1].env_seconds >= seen.workers[1].env_seconds + 0.1
        # A pass that is not over counts as well.
        assert later.workers[1].busy > 0.9
        assert later.workers[0].busy == 0
        gate.touch()
        pool.recv()
        pool.recv()
        assert (told(watch).pending, told(watch).done) == (0, 0)


def test_restarts_are_counted_and_the_new_worker_is_shown() -> None:
    options: dict[str, Any] = {"backend": "processes", "num_workers": 2, "on_error": "restart"}
    with shoal.Pool(CountEnv, 3, **options) as pool:
        pool.reset(seed=0)
        watch = Watch(os.getpid())
        before = told(watch)
        assert [worker.pid for worker in before.workers] == [worker.pid for worker in pool.workers]
        os.kill(before.workers[0].pid or 0, signal.SIGKILL)
        for _ in range(3):
            pool.step(np.zeros(3, np.int64))
        after = told(watch)
        assert (before.restarts, after.restarts) == (0, 2)  # the two envs of that worker
        assert after.workers[0].pid not in (None, before.workers[0].pid)
        assert after.workers[1].pid == before.workers[1].pid
        assert not any(worker.away for worker in after.workers)


class SlowStartEnv(CountEnv):
    """Can only be built while the file is there."""

    def __init__(self, gate: Path):
        super().__init__()
        while not gate.exists():
            time.sleep(0.01)


def test_a_worker_that_is_being_replaced_is_away(gate: Path) -> None:
    gate.touch()
    options: dict[str, Any] = {"backend": "processes", "num_workers": 2, "on_error": "restart"}
    with shoal.Pool(lambda: SlowStartEnv(gate), 3, **options) as pool:
        pool.reset(seed=0)
        watch = Watch(os.getpid())
        gate.unlink()
        os.kill(told(watch).workers[1].pid or 0, signal.SIGKILL)
        pool.send(np.zeros(3, np.int64))
        while not (seen := told(watch)).workers[1].away:
            with pytest.raises(shoal.StepTimeout):
                pool.recv(timeout=0.05)
        assert [worker.pid is None for worker in seen.workers] == [False, True]
        gate.touch()
        pool.recv(timeout=60)
        assert [worker.away for worker in told(watch).workers] == [False, False]


# ---- what comes and goes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pool_that_is_closed_is_gone_though_its_arrays_are_held(backend: Any) -> None:
    pool = shoal.Pool(CountEnv, 3, backend=backend, num_workers=2)
    batch = pool.reset(seed=0)
    watch = Watch(os.getpid())
    [seen], _ = running_pools.find_in(os.getpid())
    assert len(watch.look()) == 1
    pool.close()
    assert watch.look() == []
    assert running_pools.find_in(os.getpid()) == ([], [])
    with pytest.raises(running_pools.Gone):
        running_pools.look(seen)
    assert batch.obs.shape == (3, 3)


def test_looking_leaves_nothing_open() -> None:
    with shoal.Pool(CountEnv, 3, backend="serial"):
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        watch = Watch()
        for _ in range(5):
            assert len(watch.look()) >= 1
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_that_is_killed_while_it_is_watched(tmp_path: Path) -> None:
    with stepping(tmp_path, "processes") as process:
        watch = Watch(process.pid)
        with subprocess.Popen(
            [*TOP, str(process.pid), "--json", "--interval", "0.05"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        ) as watcher:  # fmt: skip
            assert watcher.stdout is not None
            assert json.loads(watcher.stdout.readline())["steps"] > 0
            assert len(watch.look()) == 1
            process.kill()
            process.wait()
            _, errors = watcher.communicate(timeout=30)
            assert watcher.returncode == 0
            assert errors == f"process {process.pid} has no running pool\n"
        assert watch.look() == []


def test_processes_that_vanish_while_they_are_looked_at() -> None:
    with shoal.Pool(CountEnv, 2, backend="serial"):
        for _ in range(20):
            with subprocess.Popen(["sleep", "0.01"]), subprocess.Popen(["true"]):
                for _ in range(3):
                    assert os.getpid() in [pool.pid for pool in running_pools.find()[0]]


def test_a_descriptor_that_became_another_file_is_no_pool(tmp_path: Path) -> None:
    with shoal.Pool(CountEnv, 2, backend="serial"):
        [seen], _ = running_pools.find_in(os.getpid())
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe"):  # the second would be waited for, for ever
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            with pytest.raises(running_pools.Gone):
                running_pools.look(RunningPool(os.getpid(), fd, seen.inode, seen.about))
        finally:
            os.close(fd)


def test_memory_that_was_cut_off_is_no_pool() -> None:
    with shoal.Pool(CountEnv, 2, backend="serial") as pool:
        [seen], _ = running_pools.find_in(os.getpid())
        fd = os.memfd_create("shoal", os.MFD_CLOEXEC)
        try:
            os.write(fd, pool._slab.array("header").tobytes())
            with pytest.raises(running_pools.Gone, match="cut off"):
                running_pools.look(RunningPool(os.getpid(), fd, os.fstat(fd).st_ino, seen.about))
        finally:
            os.close(fd)


def test_a_fork_has_no_pools_of_its_own() -> None:
    with shoal.Pool(CountEnv, 2, backend="serial"):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)  # until the parent closes its end
            os._exit(0)
        os.close(read)
        try:
            assert running_pools.find_in(child) == ([], [])
            assert [pool.pid for pool in running_pools.find()[0]].count(os.getpid()) == 1
        finally:
            os.close(write)
            os.waitpid(child, 0)


# ---- who may not look, and where there is nothing -------------------------------------------------------------

AS_NOBODY = """
import os, sys
from shoal.cli import main
from shoal.observe import running_pools
from shoal.observe import top
os.setuid(65534)
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_sees_nothing_and_is_told_why() -> None:
    def as_nobody(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", AS_NOBODY, "top", *arguments, "--once", "--interval", "0.05"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    with shoal.Pool(CountEnv, 2, backend="serial"):
        asked = as_nobody(str(os.getpid()), "--json")
        assert (asked.returncode, asked.stdout) == (2, "")
        assert asked.stderr == (
            f"shoal top: process {os.getpid()} is another user's: only that user, or root, may look at its pools\n"
        )
        found = as_nobody()
        assert (found.returncode, found.stdout, found.stderr) == (1, "", "no pool of this user is running\n")


def test_a_process_without_a_pool(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        for arguments in ([], ["--once"], ["--json"]):
            assert main.main(["top", str(process.pid), *arguments]) == 1
            out, err = capsys.readouterr()
            assert (out, err) == ("", f"process {process.pid} has no running pool\n")
        process.kill()
        process.wait()
        assert main.main(["top", str(process.pid)]) == 2
        assert capsys.readouterr().err == f"shoal top: there is no process {process.pid}\n"


def test_no_pool_at_all(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_pools, "find", lambda: ([], []))  # others may run tests beside this one
    assert main.main(["top", "--once", "--json"]) == 1
    assert capsys.readouterr() == ("", "no pool of this user is running\n")


def test_a_pool_of_another_version_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with shoal.Pool(CountEnv, 2, backend="processes", num_workers=2) as pool:
        pool._slab.array("header")[8] = 99
        assert main.main(["top", str(os.getpid()), "--once"]) == 1
        assert capsys.readouterr().err == (
            f"process {os.getpid()} has a pool that cannot be shown: its header has version 99, and this Shoal reads "
            "version 1\n"
        )
        assert [one.pid for one in running_pools.find()[1]].count(os.getpid()) == 1


@pytest.mark.parametrize("arguments", [["x"], ["0"], ["--interval", "0"], ["--interval", "nan"]])
def test_bad_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main.main(["top", *arguments])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


# ---- the screen ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_a_terminal(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "60"}
    process = subprocess.Popen([*TOP, *arguments], stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    try:
        yield process, ours
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


def read_until(words: bytes, terminal: int, times: int = 1) -> bytes:
    seen = b""
    while seen.count(words) < times:
        assert select.select([terminal], [], [], 30)[0], seen
        seen += os.read(terminal, 65536)
    return seen


@pytest.mark.parametrize("way", ["q", "Ctrl-C"])
def test_it_looks_again_and_again_until_a_key_ends_it(busy: subprocess.Popen[str], way: str) -> None:
    with on_a_terminal(str(busy.pid), "--interval", "0.05") as (process, terminal):
        read_until(b"hybrid with 3 workers", terminal, times=3)
        if way == "q":
            os.write(terminal, b"q")
        else:
            process.send_signal(signal.SIGINT)
        while process.poll() is None:  # what it still has to say must be read
            if select.select([terminal], [], [], 0.05)[0]:
                os.read(terminal, 65536)
        assert process.returncode == 0


def test_it_leaves_when_the_one_process_has_ended(tmp_path: Path) -> None:
    with stepping(tmp_path, "serial") as pool_process:
        with on_a_terminal(str(pool_process.pid), "--interval", "0.05") as (process, terminal):
            read_until(b"serial with 1 worker", terminal)
            leave(pool_process)
            read_until(b"has ended", terminal)
            assert process.wait(30) == 0


def test_a_reader_that_has_seen_enough_is_no_error(busy: subprocess.Popen[str]) -> None:
    command = f"{' '.join(TOP)} {busy.pid} --json --interval 0.01 | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["pid"] == busy.pid
    assert done.stderr == ""


def look(workers: int, at_s: float, **columns: Any) -> Look:
    """A look at a pool with one lane for each worker; columns not given are 0."""
    roster = np.array([[100 + i, i, i + 1] for i in range(workers)])
    names = ("busy_ns", "at", "since_ns", "ended", "return", "length", "answers")
    given = {name: np.broadcast_to(np.asarray(columns.get(name, 0)), workers).copy() for name in names}
    idle = np.zeros(workers, bool)
    return Look(int(at_s * 1e9), given, columns.get("restarts", 0), given.pop("answers"), roster, idle, idle)


ABOUT = {"env": "Env", "backend": "processes", "envs": 4, "batch_size": 4, "began_ns": 0}
POOL = RunningPool(1, 2, 3, ABOUT)


def test_rates_are_those_of_the_interval() -> None:
    before = look(2, 10, answers=[50, 60], busy_ns=[9e9, 1e9], ended=[5, 6], length=[50, 60], **{"return": [1, 2]})
    now = look(2, 12, answers=[150, 60], busy_ns=[10e9, 1e9], ended=[9, 6], length=[90, 60], **{"return": [7, 2]})
    seen = running_pools.between(POOL, before, now)
    assert (seen.interval, seen.seconds, seen.steps, seen.steps_per_second) == (2.0, 12.0, 210, 50.0)
    assert (seen.episodes_per_second, seen.mean_return, seen.mean_length) == (2.0, 1.5, 10.0)
    assert [worker.busy for worker in seen.workers] == [0.5, 0.0]
    quiet = running_pools.between(POOL, now, now)
    assert (quiet.steps_per_second, quiet.mean_return, quiet.mean_length) == (0.0, None, None)


def test_counters_that_were_read_halfway_make_no_nonsense() -> None:
    high, low = look(1, 5, answers=9, busy_ns=9e9, ended=9), look(1, 6, answers=1, busy_ns=1e9, ended=1)
    seen = running_pools.between(POOL, high, low)
    assert (seen.steps_per_second, seen.episodes_per_second, seen.workers[0].busy) == (0.0, 0.0, 0.0)
    late = running_pools.between(POOL, look(1, 5), look(1, 6, at=1, since_ns=9e9, ended=2, **{"return": np.nan}))
    assert (late.workers[0].env, late.workers[0].env_seconds, late.mean_return) == (0, 0.0, None)
    assert running_pools.between(POOL, look(1, 5), look(1, 6, busy_ns=9e9)).workers[0].busy == 1.0


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize(("workers", "height", "rows"), [(3, 10, True), (300, 40, False), (300, None, True)])
def test_workers_that_do_not_fit_become_a_summary(encoding: str, workers: int, height: int | None, rows: bool) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=110, force_terminal=False)
    at = np.zeros(workers, int)
    at[2] = 3
    seen = running_pools.between(
        POOL, look(workers, 10), look(workers, 20, at=at, since_ns=13e9, busy_ns=np.arange(workers) * 1e8)
    )
    console.print(Screen(console).draw([(seen, [1.0, 2.0, 4.0])], height))
    file.flush()
    text = file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert "in env 2 for 7.0 s" in text
    assert ("median" in text) is not rows
    assert height is None or text.count("\n") <= height
    assert ("\n     2  102  2 " in text) is rows


def test_what_an_env_is_called_cannot_write_to_the_terminal() -> None:
    evil = type("\x1b[2Jevil\n", (CountEnv,), {})
    with shoal.Pool(evil, 1, backend="serial"):
        assert told(Watch(os.getpid())).env == "?[2Jevil?"

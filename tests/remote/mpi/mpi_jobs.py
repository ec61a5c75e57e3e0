"""What runs on the ranks in the tests of backend="mpi": started by mpiexec, the same on all of them.

    mpiexec -n 3 python mpi_jobs.py <job>

All ranks but 0 serve; what rank 0 has found it says in a line of JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from gymnasium import spaces

import shoal
from envs import CountEnv, FailEnv, GateEnv, InfoEnv, SpaceEnv
from faults.kit import DeedEnv
from rank_jobs import Reporter
from remote.kit import PlacedEnv, history
from shoal.remote.mpi import mailbox, serve

NESTED = spaces.Dict({"a": spaces.Tuple([spaces.Discrete(5), spaces.Text(4)]), "b": spaces.Box(-1, 1, ())})
IMAGE = spaces.Box(0, 255, (96, 96, 3), np.uint8)
COUNTS = functools.partial(CountEnv, length=5)
IMAGES = functools.partial(SpaceEnv, IMAGE, spaces.Discrete(3))
PROCESSES = {"local_backend": "processes", "local_workers": 2}
ZEROS = np.zeros(7, np.int64)
GO_ON = 99  # a tag of nobody else's


def say(**found: Any) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def pool_of(env: Any = PlacedEnv, num_envs: int | None = 7, **options: Any) -> shoal.Pool:
    return shoal.Pool(env, num_envs, backend="mpi", **options)


def assert_same(env: Any, num_envs: int, turns: int = 25, autoreset: Any = "next_step", **options: Any) -> None:
    here = history(env, num_envs, turns, backend="serial", autoreset=autoreset)
    assert history(env, num_envs, turns, backend="mpi", autoreset=autoreset, **options) == here


def refused(kind: type[BaseException], **options: Any) -> str:
    """The error of a pool that cannot be."""
    try:
        pool_of(**options).close()
    except kind as error:
        return str(error)
    return ""


# ---- the same as everybody else --------------------------------------------------------------------------------


def same() -> None:
    for mode in ("next_step", "same_step", "disabled"):
        assert_same(COUNTS, 7, autoreset=mode)
    assert_same(IMAGES, 5, turns=8, autoreset="same_step")
    say(workers=[worker.env_ids for worker in _described().workers])


def apart() -> None:
    """As if all ranks were on machines of their own, where none can wake another one."""
    del os.memfd_create
    same()


def _described() -> shoal.Pool:
    with pool_of() as pool:
        return pool


def more() -> None:
    """Other envs, other ways to run them, several pools at a time."""
    assert_same(functools.partial(SpaceEnv, NESTED, NESTED), 7)
    assert_same(InfoEnv, 3)
    assert_same(COUNTS, 1, num_workers=1)
    for local in ({"local_backend": "threads", "local_workers": 2}, PROCESSES):
        assert_same(COUNTS, 7, backend_options=local)
    partial_batches({})
    partial_batches(PROCESSES)
    assert at_the_same_time() == [3, 3]
    say(**variables(), idle=idle())


def partial_batches(local: dict[str, Any]) -> None:
    with pool_of(num_envs=8, batch_size=2, backend_options=local) as pool:
        pool.async_reset(seed=0)
        steps = np.full(8, -1)
        while steps.min() < 8:  # nobody is forgotten, however slow a rank is
            batch = pool.recv()
            steps[batch.env_id] += 1
            assert batch.obs[:, 0].tolist() == batch.env_id.tolist()
            assert batch.obs[:, 2].tolist() == (steps[batch.env_id] % 6).tolist()
            pool.send(np.zeros(len(batch.env_id), np.int64), batch.env_id)


def at_the_same_time() -> list[int]:
    """A pool for training, another one for evaluation; each has its own envs in the same ranks."""
    with (
        pool_of() as train,
        pool_of(num_envs=1, num_workers=1) as evaluate,
        pool_of(backend_options=PROCESSES) as other,
    ):
        for pool in (train, evaluate, other):
            pool.reset(seed=0)
        for _ in range(3):
            for pool in (train, other):
                pool.send(ZEROS)
            evaluate.step([0])
            first, last = other.recv(), train.recv()
        return [int(first.obs[6, 2]), int(last.obs[6, 2])]


def variables() -> dict[str, Any]:
    """What the worker processes of a serving rank know of mpiexec."""
    with shoal.Pool(Reporter, 2, backend="mpi", backend_options=PROCESSES) as pool:
        pool.reset()
        return {"variables": pool.call("variables"), "world": pool.call("use_mpi", timeout=30)}


def groups() -> None:
    """Two drivers with a server each, by communicators of the user's."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    comm = world.Split(world.Get_rank() // 2)
    if shoal.serve(comm, leave=False):
        return
    options = {"comm": comm}
    assert_same(COUNTS, 3, backend_options=options)
    with pool_of(num_envs=3, backend_options=options) as pool:
        say(rank=world.Get_rank(), node=pool.workers[0].node)


def idle() -> list[float]:
    """The seconds of CPU that ranks take while nobody steps for a second."""

    def taken(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    with pool_of() as pool:
        pool.reset(seed=0)
        ranks = [os.getpid(), *sorted(set(pool.call("home")))]
        before = [taken(pid) for pid in ranks]
        time.sleep(1.0)
        return [taken(pid) - earlier for pid, earlier in zip(ranks, before, strict=True)]


# ---- errors ----------------------------------------------------------------------------------------------------


def errors() -> None:
    """All of them leave the ranks as they were."""
    found: dict[str, Any] = {}
    with pool_of(FailEnv) as pool:
        pool.reset(seed=0)
        try:
            pool.step([0, 0, 0, 0, 0, 3, 0])
        except ValueError as error:
            found["step"] = [str(error), isinstance(error, shoal.EnvError)]
        assert pool.reset([5], seed=9).obs.tolist() == [[14, 0, 0]]
    found["constructor"] = refused(ValueError, env=functools.partial(FailEnv, "constructor"))
    found["spaces"] = refused(shoal.SpaceMismatch, env=[CountEnv] * 6 + [IMAGES], num_envs=None)
    pool = pool_of(DeedEnv)
    pool.set_attr("deeds", [{"close": "raise"}], [6])
    try:
        pool.close()
    except ValueError as error:
        found["close"] = str(error)
    with pool_of(DeedEnv, on_error="restart") as pool:
        pool.reset(seed=0)
        pool.set_attr("deeds", [{"step": "raise"}], [6])
        found["restarted"] = sorted(pool.step(ZEROS).info)
    found["few"] = refused(shoal.StartError, num_envs=1)
    found["many"] = refused(shoal.StartError, num_workers=3)
    found["options"] = refused(ValueError, backend_options={"local": "processes"})
    found["timeout"] = refused(ValueError, step_timeout=1.0, on_error="restart")
    found["recycle"] = refused(ValueError, recycle_after=1 << 20)
    assert_same(COUNTS, 7)
    say(**found)


def losses() -> None:
    """A worker process of a rank is replaced by its rank; an env that hangs is named."""
    found: dict[str, Any] = {}
    with pool_of(DeedEnv, on_error="restart", step_timeout=2.0, backend_options=PROCESSES) as pool:
        for deed in ("kill", "hang"):
            pool.reset(seed=0)
            pool.set_attr("deeds", [{"step": deed}], [6])
            infos = pool.step(ZEROS).info
            found[deed] = [sorted(infos), infos[6]["shoal_restart"]["message"]]
            pool.step(ZEROS)
    with tempfile.TemporaryDirectory() as folder:
        gate = Path(folder) / "gate"
        with pool_of(functools.partial(GateEnv, gate), step_timeout=2.0) as pool:
            pool.reset(seed=0)
            pool.send([0, 0, 0, 0, 0, 3, 0])
            try:
                pool.recv()
            except shoal.StepTimeout as error:
                found["timeout"] = error.env_ids
            gate.touch()
            assert pool.recv().obs[:, 2].tolist() == [1] * 7
    say(**found)


def raises() -> None:
    """Nobody catches what an env raises."""
    with pool_of(FailEnv) as pool:
        pool.reset(seed=0)
        pool.step([0, 0, 0, 0, 0, 3, 0])


def killed(how: str, on_error: Any = "raise") -> None:
    """A serving rank dies while rank 0 waits for it, or while it does something else."""
    with pool_of(on_error=on_error) as pool:
        pool.reset(seed=0)
        pid = pool.call("home")[6]
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        if how == "exits":
            pool.call("leave", env_ids=[6])
        os.kill(pid, signal.SIGKILL)
        while how == "waited for":
            pool.step(ZEROS)
        time.sleep(30)


def hangs() -> None:
    """Rank 0 closes a pool, one of whose envs does not return."""
    pool = pool_of(DeedEnv)
    pool.reset(seed=0)
    pool.set_attr("deeds", [{"step": "hang"}], [6])
    pool.send(ZEROS)
    with contextlib.suppress(shoal.StepTimeout):
        pool.recv(timeout=0.5)  # so that it has begun
    pool.close(timeout=0.5)
    time.sleep(30)


def silent() -> None:
    """Rank 1 does not serve."""
    pool_of(backend_options={"meet_timeout": 1.0})


def late() -> None:
    """Rank 1 serves when the first pool is refused, and rank 2 before."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Probe(2, mailbox.HELLO)
    error = refused(shoal.StartError, backend_options={"meet_timeout": 0.5})
    MPI.COMM_WORLD.send("go on", 1, GO_ON)
    with pool_of() as pool:
        say(error=error, obs=len(pool.reset(seed=0)[0]))


def again() -> None:
    """Pools one after the other, more than there are tags."""
    mailbox.LARGEST_TAG = mailbox.FIRST_HOST + 2
    found = []
    for _ in range(4):
        with pool_of(start_timeout=10) as pool:
            found.append(len(pool.reset(seed=0)[0]))
    say(obs=found)


def absent() -> None:
    """Rank 1 never starts MPI, and rank 0 waits for that in shoal.serve."""
    raise AssertionError("nobody is to get here")


def leaves(code: str) -> None:
    """Rank 0 makes no pool, or leaves one open."""
    if code != "0":
        pool_of().reset(seed=0)
    sys.exit(int(code))


def unthreaded() -> None:
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    say(error=refused(shoal.StartError))


JOBS = {
    "same": same, "apart": apart, "more": more, "groups": groups, "errors": errors, "losses": losses, "raises": raises,
    "killed": killed, "hangs": hangs, "silent": silent, "late": late, "again": again, "absent": absent,
    "leaves": leaves, "unthreaded": unthreaded,
    "refused": lambda: say(error=refused(shoal.StartError)), "everywhere": lambda: say(error=str(pool_of())),
}  # fmt: skip
WITHOUT_SERVING = ("groups", "silent", "unthreaded", "everywhere")

if __name__ == "__main__":
    serve.HUNG_TIMEOUT = 0.5
    if sys.argv[1] in ("silent", "late") and os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
        from mpi4py import MPI

        if sys.argv[1] == "late":
            MPI.COMM_WORLD.recv(None, 0, GO_ON)
        else:
            time.sleep(30)
    if sys.argv[1] == "absent":
        if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":
            time.sleep(60)
        shoal.serve(meet_timeout=2.0)
    if sys.argv[1] not in WITHOUT_SERVING or sys.argv[1] == "silent":
        shoal.serve()
    JOBS[sys.argv[1]](*sys.argv[2:])

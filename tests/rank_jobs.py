"""What runs on each rank in the tests of ranks: started by mpiexec, by torch or by Ray, once for each rank.

    mpiexec -n 2 python rank_jobs.py <job>

A job says what it has found in a line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import shoal
from shoal.dialects import baselines
from shoal.ranks import Ranks, RayRanks, current, rank_path, rank_seed
from shoal.wrappers import Normalize, RunningMeanStd, Transform, wrap
from shoal.wrappers.running import merge_ranks
from wrappers.kit import MANY, NoisyEnv

START = 1e-4  # so many observations of mean 0 and variance 1 were seen before the first
GAMMA = 0.9


def say(**found: Any) -> None:
    sys.stdout.write(json.dumps(found) + "\n")  # one call: lines of several ranks must not mix
    sys.stdout.flush()


# ---- merging -------------------------------------------------------------------------------------------------


class Notes(Transform):
    """Keeps what the envs have answered, as it was."""

    def __init__(self) -> None:
        self.obs: dict[str, list[Any]] = {}
        self.returns: list[float] = []
        self._running: dict[int, float] = {}

    def apply(self, rows: Any) -> None:
        for key, part in rows.obs.items():
            self.obs.setdefault(key, []).append(np.array(part, np.float64))
        for i, env_id in enumerate(rows.ids.tolist()):
            if not rows.began[i]:
                self._running[env_id] = self._running.get(env_id, 0.0) * GAMMA + float(rows.reward[i])
                self.returns.append(self._running[env_id])
            if rows.began[i] or rows.done[i]:
                self._running[env_id] = 0.0


def pooled(values: Any) -> tuple[Any, Any]:
    """Mean and variance of all values and the start, in two passes."""
    total = len(values) + START
    mean = values.sum(0) / total
    return mean, (((values - mean) ** 2).sum(0) + START * (1.0 + mean**2)) / total


def assert_pooled(statistics: RunningMeanStd, values: Any) -> None:
    mean, var = pooled(values)
    np.testing.assert_allclose(statistics.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(statistics.var, var, rtol=1e-11)
    np.testing.assert_allclose(statistics.count, len(values) + START, rtol=1e-14)


def of_all(values: list[float], ranks: Ranks) -> Any:
    """The values of all ranks, of which each may have another number."""
    padded = np.full(int(ranks.allgather([len(values)]).max()), np.nan)
    padded[: len(values)] = values
    found = ranks.allgather(padded).reshape(-1)
    return found[~np.isnan(found)]


def digest(statistics: list[RunningMeanStd]) -> str:
    parts = (np.asarray(value).tobytes() for one in statistics for value in (one.mean, one.var, one.count))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def check_statistics(ranks: Ranks) -> str:
    """Far from zero, of unequal sizes, some of them nothing, merged again and again."""
    generator = np.random.default_rng(ranks.rank)
    known, mine = RunningMeanStd(shape=(2, 3)), []
    known.keep_apart()
    for turn in range(5):
        for _ in range(turn + ranks.rank):
            mine.append(generator.normal(1e3 * ranks.rank, 1.0 + turn, (ranks.rank + turn, 2, 3)))
            known.update(mine[-1])
        merge_ranks([known], ranks)
        all_values = of_all(np.concatenate([np.ravel(one) for one in mine] or [np.zeros(0)]).tolist(), ranks)
        assert_pooled(known, all_values.reshape(-1, 2, 3))
        merge_ranks([known], ranks)  # there is nothing new
        assert_pooled(known, all_values.reshape(-1, 2, 3))
    return digest([known])


def check_normalize(ranks: Ranks) -> str:
    """Over a pool of this rank's own: dicts with images, rewards, and merges at unequal distances."""
    notes, normalize = Notes(), Normalize(gamma=GAMMA, ranks=ranks, sync_every=4)
    with wrap(shoal.Pool(partial(NoisyEnv, MANY), 3, backend="serial"), notes, normalize) as pool:
        pool.reset(seed=rank_seed(0, ranks))
        for turn in range(1, 12):
            pool.step(np.zeros((3, 2), np.float32))
            if turn == 5:
                normalize.sync()
        normalize.sync()
    for key, batches in notes.obs.items():
        shape = normalize.obs_rms[key].mean.shape
        assert_pooled(normalize.obs_rms[key], ranks.allgather(np.stack(batches)).reshape(-1, *shape))
    assert_pooled(normalize.ret_rms, of_all(notes.returns, ranks))
    return digest([*(normalize.obs_rms[key] for key in sorted(normalize.obs_rms)), normalize.ret_rms])


def merge(ranks: Ranks) -> None:
    say(rank=ranks.rank, kind=type(ranks).__name__, digests=[check_statistics(ranks), check_normalize(ranks)])


# ---- other jobs ----------------------------------------------------------------------------------------------


def find() -> None:
    """Who am I, without MPI; and what it says itself."""
    ranks = current()
    told = {"rank": ranks.rank, "size": ranks.size, "seed": rank_seed(5), "path": rank_path("logs/monitor")}
    imported = "mpi4py" in sys.modules
    seen = ranks.allgather([ranks.rank, ranks.size]).tolist()
    say(imported=imported, imported_then="mpi4py" in sys.modules, seen=seen, kind=type(ranks).__name__, **told)


def mismatch() -> None:
    """Ranks that normalize different things, or began differently: an error on every one of them."""
    ranks, errors = current(), []
    for shapes, loaded in (([(2,), (2 + ranks.rank,)], 0.0), ([(2,)], float(ranks.rank))):
        statistics = [RunningMeanStd(shape=shape) for shape in shapes]
        for one in statistics:
            one.mean = one.mean + loaded
        try:
            merge_ranks(statistics, ranks)
        except ValueError as error:
            errors.append(str(error))
    say(rank=ranks.rank, errors=errors)


def files(folder: str) -> None:
    """Baselines' envs on each rank: seeds and monitor files."""
    envs = baselines.make_vec_env("CartPole-v1", "classic_control", 2, 5, logger_dir=folder, context="forkserver")
    envs.reset()
    for _ in range(60):
        envs.step([0, 0])
    say(rank=current().rank, seeds=envs.get_attr("np_random_seed"), chance=np.random.random())
    envs.close()


class Reporter(gymnasium.Env[Any, Any]):
    """Tells what it sees of MPI where it lives."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), 0.0, False, False, {}

    def variables(self) -> list[str]:
        return sorted(name for name in os.environ if name.startswith(("OMPI_", "PMIX_", "PRTE_", "PMI_")))

    def child_sees(self) -> list[str]:
        import subprocess

        names = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout.splitlines()
        return sorted(name for name in names if name.startswith(("OMPI_COMM", "PMIX_", "PRTE_", "PMI_")))

    def use_mpi(self) -> Any:
        try:
            from mpi4py import MPI

            return MPI.COMM_WORLD.allreduce(1)
        except RuntimeError as error:
            return str(error)


def workers(method: str) -> None:
    """What the worker processes of a rank know of it; and whether the ranks are well afterwards."""
    from mpi4py import MPI

    ranks = current()
    with shoal.Pool(Reporter, 2, backend="processes", num_workers=2, start_method=method) as pool:  # type: ignore[arg-type]
        pool.reset()
        variables, child_sees = pool.call("variables"), pool.call("child_sees")
        world = pool.call("use_mpi", timeout=30)
    MPI.COMM_WORLD.Barrier()
    together = MPI.COMM_WORLD.allreduce(1)
    say(rank=ranks.rank, variables=variables, child_sees=child_sees, world=world, together=together)


def fail(when: str) -> None:
    """Rank 1 fails while the others wait for it."""
    ranks = current()
    if when == "later":
        ranks.allgather([1.0])
    with shoal.Pool(Reporter, 1, backend="processes") as pool:
        pool.reset()
        if ranks.rank == 1:
            raise ValueError("no such fish")
        ranks.allgather([1.0])
    say(rank=ranks.rank)


def torch_rank(rank: str, size: str, meeting: str) -> None:
    """One of torch's ranks: the arguments say which."""
    import torch.distributed

    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=int(size))
    merge(current())
    torch.distributed.destroy_process_group()


def ray_ranks(size: str) -> None:
    """All of Ray's ranks: actors with a group of Ray's own."""
    import ray
    from ray.util import collective

    class Rank:
        def join(self, size: int, rank: int) -> Any:
            collective.init_collective_group(size, rank, backend="gloo", group_name="fish", gloo_timeout=400_000)
            ranks = RayRanks("fish")
            return [type(ranks).__name__, ranks.rank, check_statistics(ranks), check_normalize(ranks)]

        def lost(self) -> str:
            try:
                return repr(RayRanks("nobody"))
            except ValueError as error:
                return str(error)

    paths = os.pathsep.join(sys.path)
    ray.init(address="local", num_cpus=int(size), include_dashboard=False, log_to_driver=False,
             runtime_env={"env_vars": {"PYTHONPATH": paths}})  # fmt: skip
    actors = [ray.remote(Rank).remote() for _ in range(int(size))]
    found = ray.get([actor.join.remote(int(size), rank) for rank, actor in enumerate(actors)], timeout=450)
    say(found=found, lost=ray.get(actors[0].lost.remote()))
    ray.shutdown()


JOBS = {
    "find": find, "merge": lambda: merge(current()), "mismatch": mismatch, "files": files, "workers": workers,
    "fail": fail, "torch": torch_rank, "ray": ray_ranks,
}  # fmt: skip

if __name__ == "__main__":
    JOBS[sys.argv[1]](*sys.argv[2:])

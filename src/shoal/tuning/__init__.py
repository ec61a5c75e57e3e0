"""`shoal.tune`: measures an env, tries ways to run it on this machine, and returns the plan of the fastest.

The package may import everything but `cli`, because a trial is a pool like any other. Read `search` first: it decides
what is tried and for how long. `candidates` lists what can be tried, `lab` runs the trials, `result` reports them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from shoal.tuning.result import TuneResult

__all__ = ["BACKENDS", "tune"]

BACKENDS = ("serial", "threads", "processes", "hybrid")


def tune(
    env: Any,
    num_envs: int | None = None,
    *,
    batch_size: int | Literal["all"] | None = None,
    backends: Sequence[str] = BACKENDS,
    policy_latency: float = 0.0,
    learner_threads: int | None = None,
    max_memory: int | None = None,
    isolate: bool = False,
    seconds: float = 20.0,
    progress: bool = True,
    env_kwargs: Mapping[str, Any] | None = None,
) -> TuneResult:
    """Find out how this env runs fastest here, by trying.

    The best plan gives its caller the most steps per second, with the caller's own policy included. Among plans within
    2 % of the best, `tune` chooses the one with the fewest envs, and among these the simplest: full batches before
    partial ones, then serial, hybrid, threads, processes, then the usual spinning.

    Trials run in a process of their own, interleaved: many short ones first, then the better ones again and again.
    An env that cannot be pickled is tried in this process, by serial and threads only.

    Args:
        env, env_kwargs: as for `shoal.Pool`.
        num_envs: the number of envs; None to find it out as well.
        batch_size: the number of envs that `recv` waits for; "all" for full batches, which `shoal.make` needs; None to
            find it out.
        backends: the backends to choose from.
        policy_latency: seconds that your policy takes for a batch; trials compute for so long between two batches.
        learner_threads: cores that are left to your learner; None for as many as `torch.set_num_threads` was told.
        max_memory: bytes that the envs and their processes may take together.
        isolate: envs must not run in the caller's process.
        seconds: the time that the search may take, once its process has started and the env's module is imported.
        progress: show a progress bar on stderr.

    Raises:
        ValueError: the limits make no sense, or no plan can keep them.
        EnvError, WorkerDied, BadEnv: the env does not run at all.
        StepTimeout: the env is too slow to be measured in that time.
        StartError: no trial came to an end.
    """
    # Imported here so that `import shoal` stays light.
    from shoal.observe.progress import progress as progress_bar
    from shoal.tuning.search import Search

    search = Search(
        env, num_envs, batch_size=batch_size, backends=backends, policy_latency=policy_latency, max_memory=max_memory,
        isolate=isolate, seconds=seconds, env_kwargs=env_kwargs, learner_threads=learner_threads,
    )  # fmt: skip
    with progress_bar(seconds, timed=True, shown=progress) as notify:
        search.run(notify)
    return search.result()

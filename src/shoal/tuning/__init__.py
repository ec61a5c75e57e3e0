"""`shoal.tune`: measures an env, tries ways to run it, and returns the plan of the best."""

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
    max_memory: int | None = None,
    isolate: bool = False,
    seconds: float = 20.0,
    progress: bool = True,
    env_kwargs: Mapping[str, Any] | None = None,
) -> TuneResult:
    """Find out how this env runs best here, by trying.

    The best is what gives its caller the most steps per second, the caller's own policy included. Among plans within
    2 % of the best, the one with the fewest envs is chosen, and among these the simplest: full batches before partial
    ones, then serial, hybrid, threads, processes, then the usual spinning.

    Trials run in a process of their own, interleaved: many short ones first, then the better ones again and again.
    An env that cannot be pickled is tried in this process, by serial and threads only.

    Args:
        env, env_kwargs: as for `shoal.Pool`.
        num_envs: how many there must be; None to find that out as well.
        batch_size: how many `recv` shall wait for; "all" for full batches, which `shoal.make` needs; None to find out.
        backends: those that may be chosen.
        policy_latency: seconds that your policy takes for a batch; trials compute for so long between two batches.
        max_memory: bytes that the envs and their processes may take together.
        isolate: envs must not run in the caller's process.
        seconds: how long the search may take.
        progress: show a bar on stderr.

    Raises:
        ValueError: limits that cannot be kept.
        EnvError, WorkerDied, BadEnv: the env does not run at all.
        StepTimeout: it is too slow to be measured in that time.
        StartError: no trial came to an end.
    """
    # The search is for those who ask for it; `import shoal` stays light.
    from shoal.tuning.progress import bar
    from shoal.tuning.search import Search

    search = Search(
        env, num_envs, batch_size=batch_size, backends=backends, policy_latency=policy_latency, max_memory=max_memory,
        isolate=isolate, seconds=seconds, env_kwargs=env_kwargs,
    )  # fmt: skip
    with bar(seconds, progress) as notify:
        search.run(notify)
    return search.result()

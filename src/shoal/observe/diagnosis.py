"""Says in words what takes the time of a pool, and what would help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.observe.words import duration, plural
from shoal.support.cores import usable_cores

if TYPE_CHECKING:
    from shoal.observe.stats import PoolStats

FEWEST_BATCHES = 10  # fewer batches say nothing
MUCH = 0.2  # a share of the time that is worth a change
MOST = 0.5
SLOW, SLOWER_BY = 1.5, 1e-4  # an env is slow if it takes so many times as long as usual, and so many seconds more
VARIED = 3.0  # steps vary if the 99th percentile is so many times the median
REMOTE = ("ray",)  # backends that send messages to their workers
LONG_WAKE = 1e-4  # seconds; on a free core a worker wakes up in less


def diagnosis(stats: PoolStats) -> str:
    """Return one or two sentences; the first names the largest cost."""
    if stats.batches < FEWEST_BATCHES:
        return f"verdict: {stats.batches} batches are too few to say anything"
    shares = stats.shares
    stepping = shares.envs + shares.resets
    overheads = {"stragglers": _stragglers, "waking": _waking, "copying": _copying, "infos": _infos, "pool": _pool}
    largest = max(overheads, key=lambda name: getattr(shares, name))
    if shares.caller >= MOST:
        text = _caller(stats)
    elif getattr(shares, largest) >= MUCH:
        text = overheads[largest](stats)
    elif _in_turns(stats) and min(shares.caller, stepping) >= MUCH:
        text = (
            f"the caller and the envs take turns: {shares.caller:.0%} and {stepping:.0%} of the time: use "
            "batch_size < num_envs, so that envs step while the caller works"
        )
    elif shares.resets >= max(MUCH, shares.envs / 2):
        text = f"resets take {shares.resets:.0%} of the time, the steps {shares.envs:.0%}: make resets cheaper"
    else:
        text = _envs(stats)
    return f"verdict: {text}"


def _in_turns(stats: PoolStats) -> bool:
    """Whether batches are full, so that no env steps while the caller works."""
    return stats.batch_size == stats.num_envs


def _caller(stats: PoolStats) -> str:
    shares = stats.shares
    text = f"the caller's own work takes {shares.caller:.0%} of the time: faster envs will not help"
    if _in_turns(stats) and shares.envs + shares.resets + shares.stragglers >= MUCH / 2:
        return f"{text}, but they could step meanwhile: use batch_size < num_envs"
    return text


def _stragglers(stats: PoolStats) -> str:
    text = f"waiting for stragglers: {stats.shares.stragglers:.0%} of the time"
    advice = "batch_size < num_envs" if _in_turns(stats) else "a smaller batch_size"
    sizes, workers = [len(block) for block in stats.blocks], len(stats.blocks)
    if slow := _slow_env(stats):
        return f"{text}; {slow}: use {advice}"
    if _from_uneven_blocks(stats) >= stats.shares.stragglers / 2:
        return f"{text}; workers have {min(sizes)} to {max(sizes)} envs: use a multiple of {workers} envs, or {advice}"
    if workers > usable_cores():
        return f"{text}; {_crowded(workers)}, or {advice}"
    if stats.p99 >= VARIED * stats.median:
        times = f"99th percentile {duration(stats.p99)}, median {duration(stats.median)}"
        return f"{text}; steps vary ({times}): use {advice}"
    return f"{text}, though all steps take about the same: is something else using the cores?"


def _from_uneven_blocks(stats: PoolStats) -> float:
    """Return the share of the time in which workers with fewer envs wait for the others, if all steps are alike."""
    sizes = [len(block) for block in stats.blocks]
    mean = sum(env.mean for env in stats.envs) / max(1, len(stats.envs))
    return (max(sizes) - sum(sizes) / len(sizes)) * mean * stats.batches / stats.seconds


def _slow_env(stats: PoolStats) -> str:
    """Name the env that is slower than the others; "" if none is."""
    slowest = stats.slowest_env
    if slowest is None:
        return ""
    usual = sorted(env.mean for env in stats.envs)[(len(stats.envs) - 1) // 2]
    if slowest.mean < max(SLOW * usual, usual + SLOWER_BY):
        return ""
    against = f"{duration(slowest.mean)} a step on average against {duration(usual)}"
    return f"the slowest env is {slowest.env_id} ({against})"


def _waking(stats: PoolStats) -> str:
    workers, passes = len(stats.blocks), max(1, sum(worker.passes for worker in stats.workers))
    wake = max(worker.waking for worker in stats.workers)
    if stats.backend in REMOTE:
        why = f"messages take {duration(wake)} there and back: use more envs for each worker, or a smaller batch_size"
    elif workers > usable_cores():
        why = _crowded(workers)
    elif wake >= LONG_WAKE:
        why = f"a worker takes {duration(wake)} to wake up: is something else using the cores?"
    else:
        busy = duration(sum(stats.busy) * stats.seconds / passes)
        use = 'backend="serial"' if stats.backend == "hybrid" else 'backend="hybrid" or "serial"'
        why = f"a worker is busy for {busy} only before it sleeps again: use more envs, fewer workers, or {use}"
    return f"waking takes {stats.shares.waking:.0%} of the time: {why}"


def _copying(stats: PoolStats) -> str:
    return (
        f"copying takes {stats.shares.copying:.0%} of the time: use shoal.Pool, or copy=False, to get views of arrays"
    )


def _infos(stats: PoolStats) -> str:
    return (
        f"infos take {stats.shares.infos:.0%} of the time: let the envs return fewer of them, and numbers under the "
        "same keys at each step rather than texts and objects"
    )


def _pool(stats: PoolStats) -> str:
    share, step = stats.shares.pool, duration(stats.median)
    return f"Shoal's own work takes {share:.0%} of the time: steps of {step} are cheap, so use larger batches"


def _envs(stats: PoolStats) -> str:
    text = f"the envs take {stats.shares.envs + stats.shares.resets:.0%} of the time"
    workers, cores = len(stats.blocks), usable_cores()
    if stats.backend in ("serial", "threads", "processes", "hybrid") and workers < min(cores, stats.num_envs):
        how = 'backend="hybrid" or "processes"' if stats.backend == "serial" else f"num_workers={cores}"
        return f"{text}, on {workers} of {plural(cores, 'core')}: use {how}"
    slow = _slow_env(stats)
    return f"{text}: faster envs or more cores will help" + (f"; {slow}" if slow else "")


def _crowded(workers: int) -> str:
    return f"{workers} workers share {plural(usable_cores(), 'core')}: use fewer workers"

"""A pool's stats in words: what takes the time, and what would help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.support.cores import usable_cores

if TYPE_CHECKING:
    from shoal.observe.stats import PoolStats

__all__ = ["duration", "verdict"]

FEWEST_BATCHES = 10  # less says nothing
MUCH = 0.2  # of the time: worth doing something about
MOST = 0.5
SLOW, SLOWER_BY = 1.5, 1e-4  # times as long as the others, and by so many seconds: that env is slow by itself
VARIED = 3.0  # the 99th percentile against the median
REMOTE = ("ray",)  # workers that a message must travel to
LONG_WAKE = 1e-4  # seconds; waking a sleeper takes less where a core is free for it


def verdict(stats: PoolStats) -> str:
    """One or two sentences; the first names what matters most."""
    if stats.batches < FEWEST_BATCHES:
        return f"verdict: {stats.batches} batches are too few to say anything"
    shares = stats.shares
    stepping = shares.envs + shares.resets
    overheads = {
        "stragglers": (shares.stragglers, _stragglers),
        "waking": (shares.waking, _waking),
        "copying": (shares.copying, _copying),
        "pool": (shares.pool, _pool),
    }
    worst, say = max(overheads.values(), key=lambda pair: pair[0])
    if shares.caller >= MOST:
        text = _caller(stats)
    elif worst >= MUCH:
        text = say(stats)
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
    return stats.batch_size == stats.num_envs


def _caller(stats: PoolStats) -> str:
    shares = stats.shares
    text = f"the caller's own work takes {shares.caller:.0%} of the time: faster envs will not help"
    if _in_turns(stats) and shares.envs + shares.resets + shares.stragglers >= MUCH / 2:
        return f"{text}, but they could step meanwhile: use batch_size < num_envs"
    return text


def _stragglers(stats: PoolStats) -> str:
    text = f"waiting for stragglers: {stats.shares.stragglers:.0%} of the time"
    advice = "use batch_size < num_envs" if _in_turns(stats) else "use a smaller batch_size"
    sizes, workers = [len(block) for block in stats.blocks], len(stats.blocks)
    if slow := _slow_env(stats):
        return f"{text}; {slow}: {advice}"
    if _from_uneven_blocks(stats) >= stats.shares.stragglers / 2:
        return (
            f"{text}; workers have {min(sizes)} to {max(sizes)} envs: use a multiple of {workers} envs, or {advice[4:]}"
        )
    if workers > usable_cores():
        return f"{text}; {workers} workers share {_cores()}: use fewer workers, or {advice[4:]}"
    if stats.p99 >= VARIED * stats.median:
        return f"{text}; steps vary (99th percentile {duration(stats.p99)}, median {duration(stats.median)}): {advice}"
    return f"{text}, though all steps take about the same: is something else using the cores?"


def _from_uneven_blocks(stats: PoolStats) -> float:
    """The part of the time that workers with fewer envs wait for those with more, if all steps take the same."""
    envs, sizes = stats.envs, [len(block) for block in stats.blocks]
    mean = sum(env.mean for env in envs) / max(1, len(envs))
    return (max(sizes) - sum(sizes) / len(sizes)) * mean * stats.batches / stats.seconds


def _slow_env(stats: PoolStats) -> str:
    """About an env that is slower than the others, "" where none is."""
    slowest = stats.slowest_env
    if slowest is None:
        return ""
    usual = sorted(env.mean for env in stats.envs)[(len(stats.envs) - 1) // 2]
    if slowest.mean < max(SLOW * usual, usual + SLOWER_BY):
        return ""
    against = f"{duration(slowest.mean)} a step on average against {duration(usual)}"
    return f"the slowest env is {slowest.env_id} ({against})"


def _waking(stats: PoolStats) -> str:
    text = f"waking takes {stats.shares.waking:.0%} of the time"
    if stats.backend in REMOTE:
        way = duration(max(worker.waking for worker in stats.workers))
        return f"{text}: messages take {way} there and back: use more envs for each worker, or a smaller batch_size"
    workers, passes = len(stats.blocks), max(1, sum(worker.passes for worker in stats.workers))
    if workers > usable_cores():
        return f"{text}: {workers} workers share {_cores()}: use fewer workers"
    wake = max(worker.waking for worker in stats.workers)
    if wake >= LONG_WAKE:
        return f"{text}: a worker takes {duration(wake)} to wake up: is something else using the cores?"
    busy = duration(sum(stats.busy) * stats.seconds / passes)
    others = '"serial"' if stats.backend == "hybrid" else '"hybrid" or "serial"'
    return (
        f"{text}: a worker is busy for {busy} only before it sleeps again: use more envs, fewer workers, or "
        f"backend={others}"
    )


def _copying(stats: PoolStats) -> str:
    return (
        f"copying takes {stats.shares.copying:.0%} of the time: use shoal.Pool, or copy=False, whose arrays are views; "
        "infos that are not empty are slow as well"
    )


def _pool(stats: PoolStats) -> str:
    return (
        f"Shoal's own work takes {stats.shares.pool:.0%} of the time: steps of {duration(stats.median)} are cheap, so "
        "use larger batches"
    )


def _envs(stats: PoolStats) -> str:
    stepping = stats.shares.envs + stats.shares.resets
    text = f"the envs take {stepping:.0%} of the time"
    workers, cores = len(stats.blocks), usable_cores()
    if stats.backend in ("serial", "threads", "processes", "hybrid") and workers < min(cores, stats.num_envs):
        how = 'backend="hybrid" or "processes"' if stats.backend == "serial" else f"num_workers={cores}"
        return f"{text}, on {workers} of {_cores()}: use {how}"
    slow = _slow_env(stats)
    return f"{text}: faster envs or more cores will help" + (f"; {slow}" if slow else "")


def _cores() -> str:
    cores = usable_cores()
    return f"{cores} core" + ("s" if cores != 1 else "")


def duration(seconds: float) -> str:
    """With the unit that fits: 850 ns, 4.1 us, 12 ms, 1.3 s."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.1f} {unit}"
    return f"{seconds * 1e9:.0f} ns"

"""Says in words what takes the time of a pool, and what would help."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.observe.words import duration, plural
from shoal.support.cores import torch_threads, usable_cores

if TYPE_CHECKING:
    from shoal.observe.stats import PoolStats

FEWEST_BATCHES = 10  # fewer batches say nothing
MUCH = 0.2  # a share of the time that is worth a change
MOST = 0.5
SLOW, SLOWER_BY = 1.5, 1e-4  # an env is slow if it takes so many times as long as usual, and so many seconds more
VARIED = 3.0  # steps vary if the 99th percentile is so many times the median
REMOTE = ("ray",)  # backends that send messages to their workers
LONG_WAKE = 1e-4  # seconds; on a free core a worker wakes up in less
LONG_AWAY = 1e-3  # seconds; workers fall asleep if the caller takes longer from one batch to the next
OFTEN = 0.5  # of all waits
LOCAL = ("threads", "processes", "hybrid")  # backends whose envs could run one after the other just as well
SLOWER = 1.25  # times as long as one env after the other would take
ENOUGH_CORES = 0.75  # of the cores: more workers may make a pool faster or slower, which only a trial tells


def diagnosis(stats: PoolStats) -> str:
    """Return one or two sentences; the first names the largest cost."""
    if stats.batches < FEWEST_BATCHES:
        return f"verdict: {stats.batches} batches are too few to say anything"
    shares = stats.shares
    stepping = shares.envs + shares.resets
    overheads = {"stragglers": _stragglers, "waking": _waking, "copying": _copying, "infos": _infos, "pool": _pool}
    largest = max(overheads, key=lambda name: getattr(shares, name))
    if text := slower_than_serial(stats):
        pass
    elif shares.caller >= MUCH and shares.waking >= MUCH * (1 - shares.caller) and _sleeps_meanwhile(stats):
        text = _waking(stats)
    elif shares.caller >= MOST:
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


def slower_than_serial(stats: PoolStats) -> str:
    """Say that the envs would be faster one after the other, in the caller; "" if not, or if that is not known."""
    wait, busy = stats.waits, sum(stats.busy) * stats.seconds
    if stats.backend not in LOCAL or not _in_turns(stats) or stats.batches < FEWEST_BATCHES:
        return ""
    if wait < max(SLOWER * busy, MUCH * stats.seconds):
        return ""
    times = f"{duration(wait / stats.batches)} for each batch, whose steps take {duration(busy / stats.batches)} in all"
    return f'the caller waits {times}: backend="serial" would be faster; more envs, or slower ones, need workers'


def _sleeps_meanwhile(stats: PoolStats) -> bool:
    """Whether workers fall asleep because the caller is away for so long."""
    return stats.sleeping >= OFTEN and stats.shares.caller * stats.seconds >= LONG_AWAY * stats.batches


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
    if threads := _learner(stats):
        return f"{text}; {threads}"
    if stats.p99 >= VARIED * stats.median:
        times = f"99th percentile {duration(stats.p99)}, median {duration(stats.median)}"
        return f"{text}; steps vary ({times}): use {advice}"
    return (
        f"{text}, though all steps take about the same: some cores are slower than others for a while; use {advice}, "
        f"so that the others go on; {_others(workers)}"
    )


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
    elif threads := _learner(stats):
        why = threads
    elif _sleeps_meanwhile(stats):
        away = duration(stats.shares.caller * stats.seconds / stats.batches)
        why = (
            f"workers sleep while the caller is away for {away}: call pool.prepare() just before the actions are ready"
        )
    elif wake >= LONG_WAKE:
        why = f"a worker takes {duration(wake)} to wake up: {_others(workers)}"
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
    few = workers < min(max(1.0, ENOUGH_CORES * cores), stats.num_envs)
    if stats.backend in ("serial", *LOCAL) and few:
        how = 'backend="hybrid" or "processes"' if stats.backend == "serial" else f"num_workers={cores}"
        return f"{text}, on {workers} of {plural(cores, 'core')}: use {how}"
    slow = _slow_env(stats)
    return f"{text}: faster envs or more cores will help" + (f"; {slow}" if slow else "")


def _learner(stats: PoolStats) -> str:
    """Say that the learner's threads take the workers' cores; "" if they do not."""
    threads, workers, cores = torch_threads(), len(stats.blocks), usable_cores()
    if threads < 2 or threads + workers <= cores or stats.shares.caller < MUCH / 4 or stats.backend not in LOCAL:
        return ""
    return (
        f"torch's {threads} threads and {plural(workers, 'worker')} share {plural(cores, 'core')}: use "
        "torch.set_num_threads(1), or fewer workers"
    )


def _others(workers: int) -> str:
    cores = usable_cores()
    fewer = int(ENOUGH_CORES * cores)
    advice = f"; num_workers={fewer} leaves it room" if fewer < workers and cores > 2 else ""
    return f"is something else using the cores?{advice}"


def _crowded(workers: int) -> str:
    return f"{workers} workers share {plural(usable_cores(), 'core')}: use fewer workers"

"""Decides whether waits spin, as the C core does it: spinning.h says why. The twin itself never spins.

Python that spins holds up the very threads that it waits for. So this is what the C core is compared with, and what
learns how long workers wait.
"""

from __future__ import annotations

__all__ = ["Trials", "learn", "spin_for", "try_way"]

FIRST_GUESS_NS = 10_000
USUAL_WAKE_NS, LEAST_WAKE_NS, MOST_WAKE_NS = 15_000, 5_000, 1_000_000
FEW_WAKES = 8
LONGEST_SPUN_NS, HOLD_NS, CROWDED_HOLD_NS = 1_000_000, 10_000_000, 300_000
TIMER_NS = 60_000
WINDOW_BATCHES, WINDOW_NS, SLOW_WINDOW_NS = 32, 30_000_000, 100_000_000
FIRST_PATIENCE, MOST_PATIENCE = 4, 128
HOPELESS = 2

# (way, trying, cost of way 0, cost of way 1, windows, patience, batches, ns)
Trials = tuple[int, int, int, int, int, int, int, int]


def learn(usual_ns: int, spread_ns: int, ns: int) -> tuple[int, int]:
    """How long a wait usually takes, and how far single ones are from that, with one more taken in; 0 for unknown."""
    usual = usual_ns or FIRST_GUESS_NS
    ns = min(max(ns, usual // 4), 2 * usual)
    moved = usual + _quotient(ns - usual, 8)
    return max(moved, 16), spread_ns + _quotient(abs(ns - usual) - spread_ns, 8)


def spin_for(usual_ns: int, spread_ns: int, spins: bool, wake_ns: int, parties: int, cores: int) -> tuple[int, int]:
    """How a wait shall go that usually takes `usual_ns`: (for how long it rests, for how long it then spins), in ns.

    Args:
        spread_ns: how far single waits are from the usual.
        spins: whether such waits spin now.
        wake_ns: what a wake-up costs; 0 for unknown.
        parties: how many wait or work, on so many cores.
    """
    if parties > 2 * cores:
        return 0, 0
    wake = min(max(wake_ns or USUAL_WAKE_NS, LEAST_WAKE_NS), MOST_WAKE_NS)
    crowded, limit = parties > cores, LONGEST_SPUN_NS
    if crowded:
        limit = min(FEW_WAKES * wake * max(1, cores // (2 * (parties - cores))), LONGEST_SPUN_NS)
    if usual_ns <= (2 * limit if spins else limit):
        return 0, min(max(2 * limit, CROWDED_HOLD_NS), HOLD_NS) if crowded else HOLD_NS
    early = 2 * spread_ns + wake + TIMER_NS
    if crowded or early > usual_ns // 8:
        return 0, 0
    return usual_ns - early, 3 * early


def try_way(trials: Trials, ns: int) -> Trials:
    """Of two ways to wait, 0 as `spin_for` says and 1 always asleep, keep the one that makes batches faster.

    Args:
        trials: what is known so far; at first (0, 0, 0, 0, 0, 0, 0, 0).
        ns: how long one more batch has taken, from its request to its answers.
    """
    way, trying, *costs, windows, patience, batches, total = trials
    batches, total, before = batches + 1, total + ns, costs[1 - way]
    some = batches >= WINDOW_BATCHES // 4
    early = some and (total >= SLOW_WINDOW_NS or (trying and total // batches > HOPELESS * before))
    if not early and (batches < WINDOW_BATCHES or total < WINDOW_NS):
        return way, trying, costs[0], costs[1], windows, patience, batches, total
    mean = total // batches
    costs[way] = costs[way] + _quotient(mean - costs[way], 2 if trying else 4) if costs[way] else mean
    if trying:
        better = 10 * costs[way] < (8 if way else 9) * before  # to sleep must clearly pay
        patience = FIRST_PATIENCE if better else min(max(2 * patience, FIRST_PATIENCE), MOST_PATIENCE)
        way, trying, windows = way if better else 1 - way, 0, 0
    else:
        windows += before != 0
        if before == 0 or windows > min(max(patience, FIRST_PATIENCE), MOST_PATIENCE):
            way, trying = 1 - way, 1
    return way, trying, costs[0], costs[1], windows, patience, 0, 0


def _quotient(number: int, by: int) -> int:
    """Divided as C does it, towards 0."""
    return number // by if number >= 0 else -(-number // by)

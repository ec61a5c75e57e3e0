"""Decides whether waits spin, as the C core does it: spinning.h says why. The twin itself never spins.

Python that spins holds up the very threads that it waits for. So this is what the C core is compared with, and what
learns how long workers wait.
"""

from __future__ import annotations

__all__ = ["CALLER_SPINS", "WORKERS_SPIN", "Trials", "first_way", "learn", "rest_for", "try_way"]

FIRST_GUESS_NS = 10_000
USUAL_WAKE_NS, LEAST_WAKE_NS, MOST_WAKE_NS = 15_000, 5_000, 1_000_000
LONGEST_SPUN_NS, HOLD_NS = 1_000_000, 10_000_000
TIMER_NS = 60_000
WINDOW_BATCHES, WINDOW_NS, SLOW_WINDOW_NS = 32, 20_000_000, 100_000_000
FIRST_PATIENCE, MOST_PATIENCE, ENOUGH_WINS = 8, 128, 4
HOPELESS, MOST = 2, 4
CALLER_SPINS, WORKERS_SPIN, WAYS = 1, 2, 4

# (possible, way, best, tried, wins, cost of each way, windows, patience, batches, ns)
Trials = tuple[int, int, int, int, int, tuple[int, int, int, int], int, int, int, int]


def learn(usual_ns: int, spread_ns: int, ns: int) -> tuple[int, int]:
    """How long a wait usually takes, and how far single ones are from that, with one more taken in; 0 for unknown."""
    usual = usual_ns or FIRST_GUESS_NS
    ns = min(max(ns, usual // 4), 2 * usual)
    moved = usual + _quotient(ns - usual, 8)
    return max(moved, 16), spread_ns + _quotient(abs(ns - usual) - spread_ns, 8)


def rest_for(usual_ns: int, spread_ns: int, wake_ns: int) -> tuple[int, int]:
    """How a long wait shall go: (for how long it rests, for how long it then spins), in ns.

    Args:
        usual_ns: how long such a wait usually takes.
        spread_ns: how far single waits are from that.
        wake_ns: what a wake-up costs; 0 for unknown.
    """
    early = 2 * spread_ns + min(max(wake_ns or USUAL_WAKE_NS, LEAST_WAKE_NS), MOST_WAKE_NS) + TIMER_NS
    return (0, 0) if early > usual_ns // 8 else (usual_ns - early, 3 * early)


def first_way(parties: int, cores: int) -> int:
    """Which sides spin at first, where so many wait or work on so many cores."""
    if parties > 2 * cores:
        return 0
    return WORKERS_SPIN if parties > cores else CALLER_SPINS | WORKERS_SPIN


def try_way(trials: Trials, ns: int) -> Trials:
    """Of all possible ways to wait, keep the one by which batches follow each other fastest.

    Args:
        trials: what is known so far.
        ns: how long one more batch has taken, since the one before it.
    """
    possible, way, best, tried, wins, known, windows, patience, batches, total = trials
    costs, batches = list(known), batches + 1
    total += min(ns, MOST * costs[best]) if costs[best] else ns
    hopeless = way != best and total // batches > HOPELESS * costs[best]
    early = batches >= WINDOW_BATCHES // 4 and (total >= SLOW_WINDOW_NS or hopeless)
    if not early and (batches < WINDOW_BATCHES or total < WINDOW_NS):
        return possible, way, best, tried, wins, known, windows, patience, batches, total
    mean = total // batches
    if way == best:
        costs[way] = costs[way] + _quotient(mean - costs[way], 2) if costs[way] else mean
        windows += 1
        way = tried if wins else _next(possible, best, tried, costs, windows, patience)
    else:
        costs[way], tried, windows = mean, way, 0
        wins = wins + 1 if _is_better(mean, costs[best]) else 0
        if not wins:
            patience = min(max(2 * patience, FIRST_PATIENCE), MOST_PATIENCE)
        elif wins == ENOUGH_WINS:
            best, wins, patience = way, 0, FIRST_PATIENCE
        way = best
    return possible, way, best, tried, wins, (costs[0], costs[1], costs[2], costs[3]), windows, patience, 0, 0


def _next(possible: int, best: int, tried: int, costs: list[int], windows: int, patience: int) -> int:
    """The way of the next window: the best one, or another one that is due for a trial."""
    turns = [(tried + i) % WAYS for i in range(1, WAYS + 1)]
    others = [way for way in turns if way != best and not way & ~possible]
    unknown = [way for way in others if costs[way] == 0]
    promising = [way for way in others if _is_better(costs[way], costs[best])]
    due = others if windows > patience else promising[-1:] if windows > FIRST_PATIENCE else []
    return [*unknown, *due, best][0]


def _is_better(cost: int, than: int) -> bool:
    return 10 * cost < 9 * than


def _quotient(number: int, by: int) -> int:
    """Divided as C does it, towards 0."""
    return number // by if number >= 0 else -(-number // by)

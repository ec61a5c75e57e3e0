"""Simulates a pool of remote workers, event by event: queues at the driver's CPU, the links and the actors' workers.

Only what meets at the driver needs events. An actor takes its messages in the order in which they were sent, so the
time of its answer is known when a message is sent. NumPy computes this for all messages of a batch at once: this is why
a thousand nodes take a fraction of a second. Of more lanes than LANES, a part is simulated that stands for all.
"""

from __future__ import annotations

import collections
import heapq
import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shoal.scaling.model import (
    ANSWER_LANE,
    ANSWER_MESSAGE,
    LARGE,
    REQUEST_LANE,
    REQUEST_MESSAGE,
    Setup,
    StepTime,
    bounds,
)

Array = npt.NDArray[np.float64]
Lanes = npt.NDArray[np.int64]

WARM_UP = 4  # circles of all lanes until the pattern of messages is stable
FEWEST_ROUNDS, MOST_ROUNDS = 6, 40  # circles of all lanes that count
MESSAGES = 2_500  # that are simulated, if the number of rounds allows
LANES = 2**13  # that are simulated; if there are more, one stands for several
ALIKE = 32  # the least number of lanes of a message, and of a worker, that are left then
BATCHES = 128  # in flight that are simulated; if there are more, round trips and the number of batches shrink
FEWEST_ACTORS, FEWEST_NODES, FEWEST_BATCHES = 64, 16, 8  # that are left in a part
ARRIVED, RECEIVED, DECIDED = range(3)  # at the driver's link, in the driver's memory, by the policy


@dataclass(frozen=True)
class Prediction:
    """How fast a pool will be, and how busy.

    Attributes:
        rate: steps per second of all envs.
        busy: the part of the time in which each resource is busy.
        messages: the number of messages to actors for a batch.
        circle: mean seconds from one step of an env to its next.
    """

    rate: float
    busy: dict[str, float]
    messages: float
    circle: float


def simulate(setup: Setup, seed: int = 0) -> Prediction:
    """Simulate the pool from its first reset until it is stable, and then for some circles that count.

    Args:
        setup: the pool, its machines and its policy.
        seed: of the drawn times.
    """
    whole, (setup, lanes, actors, flights) = setup, _part(setup)
    pool = _PoolSimulation(setup, seed)
    batches = math.ceil(setup.in_flight)
    few = batches > 2 * BATCHES  # rounds are enough, because each has many batches
    pool.run((2 if few else WARM_UP) * batches)
    before = pool.counted()
    rounds = min(MOST_ROUNDS, max(2 if few else FEWEST_ROUNDS, MESSAGES // (batches * setup.most_messages)))
    pool.run(rounds * batches)
    time, count, messages, *busy = np.subtract(pool.counted(), before).tolist()
    rate = count * setup.batch_size / time * lanes * actors
    names = ("envs", "driver", "driver's link", "nodes' links", "policy")
    workers, nodes = setup.actors * setup.workers_per_actor, math.ceil(setup.actors / setup.actors_per_node)
    among = (workers, 1, 1, nodes, 1)
    parts = {name: one / time / many for name, one, many in zip(names, busy, among, strict=True)}
    if whole.full and actors > 1:  # among all actors, the slowest is slower than in the part
        slower = min(1.0, min(bounds(whole).values()) / rate)
        rate, parts = rate * slower, {name: busy * slower for name, busy in parts.items()}
    messages = min(float(whole.most_messages), messages / count * actors / flights)
    return Prediction(rate, parts, messages, whole.envs / rate)


def _part(setup: Setup) -> tuple[Setup, float, float, float]:
    """Return a smaller pool that is as busy; and how many lanes, actors and batches each of its own stands for.

    If many batches are in flight, fewer of them on a shorter round trip give the same rate. Neighbouring lanes of a
    worker become one lane, with a step as long as all of theirs. Of many actors a few are left, and the driver becomes
    slower by the same factor; then fewer batches are in flight, or smaller ones if there are few.
    """
    setup = _shortened(setup)
    together = min(
        setup.envs // LANES, min(setup.batch_size, setup.envs_per_actor) // ALIKE,
        setup.envs_per_actor // setup.workers_per_actor // ALIKE,
    )  # fmt: skip
    lanes = 1.0
    if together > 1:
        per_actor = setup.envs_per_actor // together
        lanes = setup.envs_per_actor / per_actor
        costs, step = setup.costs, setup.step
        setup = replace(
            setup, envs_per_actor=per_actor, step=StepTime(step.mean * lanes, step.spread / math.sqrt(lanes)),
            batch_size=max(1, min(round(setup.batch_size / lanes), per_actor * setup.actors)),
            obs_bytes=lanes * setup.answer_bytes - ANSWER_LANE, action_bytes=lanes * setup.request_bytes - REQUEST_LANE,
            policy_lane=lanes * setup.policy_lane,
            costs=replace(costs, lane=lanes * setup.driver_lane, byte=0.0, host_lane=lanes * setup.host_lane,
                          host_byte=0.0),
        )  # fmt: skip
    nodes = setup.actors // setup.actors_per_node
    fewer = min(setup.envs // LANES, setup.actors // FEWEST_ACTORS, nodes // FEWEST_NODES)
    if fewer <= 1:
        return setup, lanes, 1.0, 1.0
    left = setup.actors_per_node * (nodes // fewer)
    actors = setup.actors / left
    flights = min(actors, max(1.0, setup.in_flight / FEWEST_BATCHES))
    size = setup.batch_size * flights / actors
    whole = setup.envs_per_actor if setup.batch_size >= setup.envs_per_actor else 1  # keep answers whole
    size = min(max(1, round(size / whole)) * whole, left * setup.envs_per_actor)
    costs = setup.costs.cheaper(1 / actors)
    part = replace(
        setup, actors=left, batch_size=size,
        driver_bandwidth=max(1.0, setup.driver_bandwidth / actors), policy=setup.policy * flights,
        policy_lane=setup.policy_lane * actors, costs=replace(costs, batch=setup.costs.batch * flights),
    )  # fmt: skip
    return part, lanes, actors, flights


def _shortened(setup: Setup) -> Setup:
    kept = max(
        4 * setup.workers_per_actor, 2 * min(setup.batch_size, setup.envs_per_actor),
        round(setup.envs_per_actor * BATCHES / setup.in_flight),
    )  # fmt: skip
    if kept >= setup.envs_per_actor:
        return setup
    shorter = kept / setup.envs_per_actor
    costs = replace(setup.costs, transport=setup.costs.transport * shorter)
    return replace(setup, envs_per_actor=kept, round_trip=setup.round_trip * shorter, costs=costs)


class _PoolSimulation:
    """All queues, and the time at which each is free again."""

    def __init__(self, setup: Setup, seed: int):
        self.setup, self._rng = setup, np.random.default_rng(seed)
        workers, per_actor = setup.workers_per_actor, setup.envs_per_actor
        self._workers, self._hosts = np.zeros(setup.actors * workers), np.zeros(setup.actors)
        self._nodes = np.zeros(math.ceil(setup.actors / setup.actors_per_node))
        # Each worker has a contiguous block of an actor's envs.
        lanes = np.arange(setup.envs)
        self._owner = lanes // per_actor * workers + lanes % per_actor * workers // per_actor
        self._cpu = self._link_in = self._link_out = 0.0
        self._cpu_busy = self._envs_busy = self._link_busy = self._nodes_busy = self._policy_busy = 0.0
        self._events: list[tuple[float, int, int, Lanes]] = []
        self._numbers = 0
        self._ready: collections.deque[Lanes] = collections.deque()
        self._count, self._deciding = 0, False
        self._batches = self._messages = 0
        self._post(lanes, 0.0)

    def counted(self) -> tuple[float, ...]:
        """Return the time, and what was done until then."""
        return (
            self._cpu, self._batches, self._messages, self._envs_busy, self._cpu_busy, self._link_busy,
            self._nodes_busy, self._policy_busy,
        )  # fmt: skip

    def run(self, batches: int) -> None:
        """Simulate until so many more batches were sent."""
        goal = self._batches + batches
        while self._batches < goal:
            now, kind, _, lanes = heapq.heappop(self._events)
            if kind == ARRIVED:
                self._arrived(now, lanes)
            elif kind == RECEIVED:
                self._received(now, lanes)
            else:
                self._decided(now, lanes)

    def _push(self, when: float, kind: int, lanes: Lanes) -> None:
        self._numbers += 1  # events of the same time keep their order
        heapq.heappush(self._events, (when, kind, self._numbers, lanes))

    # ---- the driver --------------------------------------------------------------------------------------------

    def _work(self, now: float, seconds: float) -> float:
        """Let the driver's CPU work as soon as it is free; return when it is done."""
        self._cpu = max(now, self._cpu) + seconds
        self._cpu_busy += seconds
        return self._cpu

    def _arrived(self, now: float, lanes: Lanes) -> None:
        size = len(lanes) * self.setup.answer_bytes + ANSWER_MESSAGE
        seconds = size / self.setup.driver_bandwidth
        self._link_in = max(now, self._link_in) + seconds
        self._link_busy += seconds
        self._push(self._link_in, RECEIVED, lanes)

    def _received(self, now: float, lanes: Lanes) -> None:
        """Read an answer, which costs half of the time of a message, and all of that of lanes."""
        setup = self.setup
        large = setup.costs.large if len(lanes) * setup.answer_bytes >= LARGE else 0.0
        self._work(now, setup.costs.message / 2 + large + len(lanes) * setup.driver_lane)
        self._ready.append(lanes)
        self._count += len(lanes)
        self._take(now)

    def _take(self, now: float) -> None:
        """Give the caller a batch, if it waits for one and enough lanes are ready."""
        size = self.setup.batch_size
        if self._deciding or self._count < size:
            return
        self._deciding = True
        self._count -= size
        parts = []
        while size > 0:
            lanes = self._ready.popleft()
            if len(lanes) > size:
                self._ready.appendleft(lanes[size:])
                lanes = lanes[:size]
            parts.append(lanes)
            size -= len(lanes)
        policy = self.setup.policy_batch
        self._policy_busy += policy
        self._push(self._work(now, self.setup.costs.batch) + policy, DECIDED, np.concatenate(parts))

    def _decided(self, now: float, lanes: Lanes) -> None:
        self._post(lanes, now)
        self._batches += 1
        self._deciding = False
        self._take(self._cpu)

    # ---- messages ----------------------------------------------------------------------------------------------

    def _post(self, lanes: Lanes, now: float) -> None:
        """Send one message to each actor, and compute when its answer arrives at the driver's link."""
        setup, costs = self.setup, self.setup.costs
        lanes = np.sort(lanes)
        owners = lanes // setup.envs_per_actor
        first = _firsts(owners)
        actors, counts = owners[first], np.diff(first, append=len(lanes))
        self._messages += len(actors)
        start = max(now, self._cpu)
        posted = start + costs.message / 2 * np.arange(1, len(actors) + 1, dtype=np.float64)
        self._work(now, costs.message / 2 * len(actors))
        sent = counts * setup.request_bytes + REQUEST_MESSAGE
        left = _queue(posted, sent / setup.driver_bandwidth, self._link_out)
        self._link_out = float(left[-1])
        there = left + setup.latency / 2 + sent / setup.node_bandwidth
        answers = counts * setup.answer_bytes + ANSWER_MESSAGE
        taking = costs.host_message + np.where(answers - ANSWER_MESSAGE >= LARGE, costs.host_large, 0.0)
        done = self._step(lanes, actors, first, there, taking)
        back = self._leave(actors, done, answers / setup.node_bandwidth) + setup.latency / 2
        start_of = [*first.tolist(), len(lanes)]
        for at, when in enumerate(back.tolist()):
            self._push(when, ARRIVED, lanes[start_of[at] : start_of[at + 1]])

    def _step(self, lanes: Lanes, actors: Lanes, first: Lanes, there: Array, taking: Array) -> Array:
        """Return when the last lane of each message is done.

        Workers step their lanes in the order of messages. Before that, the actor needs `taking` seconds to read one.
        """
        setup = self.setup
        taken = np.maximum(there, self._hosts[actors]) + taking
        seconds = setup.step.draw(self._rng, len(lanes)) + setup.host_lane
        owners = self._owner[lanes]
        begin = _firsts(owners)
        workers = owners[begin]
        work = np.add.reduceat(seconds, begin)
        message = np.searchsorted(first, begin, side="right") - 1
        ended = np.maximum(self._workers[workers], taken[message]) + work
        self._workers[workers] = ended
        self._envs_busy += float(work.sum())
        done: Array = np.maximum.reduceat(ended, _firsts(message))
        # A single worker is the actor's own thread, which reads the next message only when this one is done.
        self._hosts[actors] = done if setup.workers_per_actor == 1 else taken
        return done

    def _leave(self, actors: Lanes, done: Array, seconds: Array) -> Array:
        """Return when each answer has left its node, over a link that sends one after the other."""
        self._nodes_busy += float(seconds.sum())
        if math.isinf(self.setup.node_bandwidth):
            return done
        nodes = actors // self.setup.actors_per_node
        order = np.lexsort((done, nodes))
        nodes = nodes[order]
        ready = np.maximum(done[order], self._nodes[nodes])
        # All queues are computed as one, shifted so far apart in time that they cannot overlap.
        start = ready.min()
        shift = nodes * (ready.max() - start + seconds.sum()) - start
        left = np.empty_like(done)
        left[order] = _queue(ready + shift, seconds[order], -math.inf) - shift
        np.maximum.at(self._nodes, nodes, left[order])
        return left


def _firsts(ordered: Lanes) -> Lanes:
    """Return where each value begins in an array in which equal values are neighbours."""
    return np.concatenate(([0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1))


def _queue(ready: Array, seconds: Array, free: float) -> Array:
    """Return when each item is done, if they are served one after the other, in this order, from `free` on."""
    done = np.cumsum(seconds)
    waits = np.maximum.accumulate(np.maximum(ready, free) - (done - seconds))
    left: Array = done + waits
    return left

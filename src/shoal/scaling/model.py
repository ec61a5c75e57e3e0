"""Describes a pool of remote workers in numbers, and computes how fast it can be at most.

A lane goes in a circle. The caller takes a batch of the first lanes that are ready, runs its policy, and sends one
message to each actor that has lanes in the batch. The message takes half a round trip. The actor's workers step its
lanes, each worker its own, one after the other. When the last lane of the message is done, the answer goes back, and
the driver writes it into the slab. Each bound here is the rate that one part of that circle allows if all others took
no time (for `latency`: if no message had to wait in a queue). `simulation` has all parts at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shoal.support.checks import number, whole_number

Times = npt.NDArray[np.float64]

# What can be the limit. Of equal parts, the first is named.
PARTS = ("envs", "stragglers", "latency", "driver", "driver's link", "nodes' links", "policy")

# Bytes of a message beside observations and actions (remote/wire.py).
REQUEST_LANE, REQUEST_MESSAGE = 34, 48
ANSWER_LANE, ANSWER_MESSAGE = 77, 1328
LARGE = 1 << 16  # bytes; a larger answer goes through Ray's object store (remote/ray)
MOST_LANES = 2**24
LONGEST = 1e9  # seconds, of anything
LARGEST = 2**60  # bytes, of anything
DRAWS = 250_000  # steps that are drawn to find the slowest of many
MEASURED_ON = "Ray 2.60.0, Python 3.11.7, 2 cores"  # where the costs below were measured


@dataclass(frozen=True)
class StepTime:
    """The time of one step of an env.

    Attributes:
        mean: in seconds, resets included.
        spread: the standard deviation divided by the mean; steps are drawn from a log-normal distribution.
        samples: measured steps, in seconds, to draw from instead; `mean` and `spread` are those of the samples.
    """

    mean: float
    spread: float = 0.0
    samples: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        number("the mean time of a step, in seconds", self.mean, 0.0, LONGEST)
        number("the spread of a step's time, in parts of its mean", self.spread, 0.0, 100.0)

    @classmethod
    def measured(cls, samples: tuple[float, ...]) -> StepTime:
        """Return the time of steps that were measured."""
        if not samples:
            raise ValueError("samples: expected the seconds of at least one step, found none")
        mean = float(np.mean(samples))
        return cls(mean, float(np.std(samples)) / mean if mean else 0.0, samples)

    def draw(self, rng: np.random.Generator, count: int | tuple[int, ...]) -> Times:
        """Draw the times of `count` steps, in seconds, by the generator `rng`."""
        if not self.spread:
            return np.full(count, self.mean)
        if self.samples:
            return rng.choice(np.asarray(self.samples), count)
        variance = math.log1p(self.spread**2)
        return rng.lognormal(math.log(self.mean or 1e-300) - variance / 2, math.sqrt(variance), count)

    def faster(self, factor: float) -> StepTime:
        """Return the time of a step on a machine that is so many times as fast."""
        return StepTime(self.mean / factor, self.spread, tuple(one / factor for one in self.samples))

    def steady(self) -> StepTime:
        """Return the time of a step if all steps took the mean time."""
        return StepTime(self.mean)


@dataclass(frozen=True)
class Costs:
    """The seconds that Shoal itself takes, with Ray as its transport.

    Of the driver and of an actor, only the threads count that do one thing after the other. The time of Ray's other
    threads is in `transport`. `benchmarks/scaling_model.py --parts constants --save` has measured the values and
    writes them here; see docs/explanation/scaling.md.

    Attributes:
        batch: time of the driver's CPU for the recv and send of a batch.
        message: time of the driver's CPU for a message to an actor and its answer.
        large: additional time for a large answer, which goes through the object store.
        lane, byte: time of the driver's CPU for each lane, and for each byte of its observation and action.
        host_message, host_large, host_lane, host_byte: the same for an actor's CPU.
        transport: the time that the transport adds to the network's round trip on an idle machine.
    """

    batch: float = 9.5e-05
    message: float = 0.00031
    large: float = 0.00024
    lane: float = 1e-07
    byte: float = 2e-10
    host_message: float = 0.00039
    host_large: float = 0.00065
    host_lane: float = 6.7e-07
    host_byte: float = 3.6e-10
    transport: float = 0.00052

    @classmethod
    def none(cls) -> Costs:
        """Return costs of zero, to see the effect of everything else."""
        return cls(*[0.0] * len(fields(cls)))

    def cheaper(self, factor: float) -> Costs:
        """Return the same with the driver's own costs divided."""
        own = ("batch", "message", "large", "lane", "byte")
        return replace(self, **{name: getattr(self, name) / factor for name in own})


@dataclass(frozen=True)
class Setup:
    """A pool with a remote backend, its machines, and a policy.

    Attributes:
        step: the time of a step.
        actors: each has `envs_per_actor` envs, and `workers_per_actor` of them step at the same time.
        batch_size: the number of envs that `recv` waits for; envs / batch_size batches are in flight.
        actors_per_node: the number of actors that share a node's link.
        obs_bytes, action_bytes: sizes of one env's observation and action.
        round_trip: of the network, in seconds.
        driver_bandwidth, node_bandwidth: bytes a second, each way.
        policy: seconds for a batch, in which the caller does nothing else; `policy_lane` more for each env of it.
        costs: what the driver and the actors need for themselves.
    """

    step: StepTime
    actors: int
    envs_per_actor: int
    batch_size: int
    workers_per_actor: int = 1
    actors_per_node: int = 1
    obs_bytes: float = 0.0
    action_bytes: float = 8.0
    round_trip: float = 0.0
    driver_bandwidth: float = math.inf
    node_bandwidth: float = math.inf
    policy: float = 0.0
    policy_lane: float = 0.0
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        whole_number("actors", self.actors, 1, MOST_LANES)
        whole_number("envs_per_actor", self.envs_per_actor, 1, 2 * MOST_LANES // self.actors)  # some are rounded up
        whole_number("workers_per_actor", self.workers_per_actor, 1, self.envs_per_actor)
        whole_number("actors_per_node", self.actors_per_node, 1, self.actors)
        whole_number("batch_size", self.batch_size, 1, self.envs)
        for name in ("obs_bytes", "action_bytes"):
            number(name, getattr(self, name), 0.0, LARGEST)
        for name in ("round_trip", "policy", "policy_lane"):
            number(f"{name}, in seconds", getattr(self, name), 0.0, LONGEST)
        for name in ("driver_bandwidth", "node_bandwidth"):
            number(f"{name}, in bytes a second", getattr(self, name), 1.0, math.inf)

    @property
    def envs(self) -> int:
        """The number of envs of all actors together."""
        return self.actors * self.envs_per_actor

    @property
    def in_flight(self) -> float:
        """The number of batches under way, including the one that the policy has."""
        return self.envs / self.batch_size

    @property
    def full(self) -> bool:
        """Whether a batch is all envs, so that each step waits for the slowest."""
        return self.batch_size == self.envs

    @property
    def policy_batch(self) -> float:
        """The seconds of the policy for a batch."""
        return self.policy + self.policy_lane * self.batch_size

    @property
    def latency(self) -> float:
        """The round trip of an empty message."""
        return self.round_trip + self.costs.transport

    @property
    def fewest_messages(self) -> int:
        """The least number of messages of a batch: its lanes may belong to few actors."""
        return -(-self.batch_size // self.envs_per_actor)

    @property
    def most_messages(self) -> int:
        """The largest number of messages of a batch."""
        return min(self.batch_size, self.actors)

    @cached_property
    def answer_bytes(self) -> float:
        """The bytes of a lane in an answer."""
        return self.obs_bytes + ANSWER_LANE

    @cached_property
    def request_bytes(self) -> float:
        """The bytes of a lane in a request."""
        return self.action_bytes + REQUEST_LANE

    @cached_property
    def driver_lane(self) -> float:
        """The seconds of the driver's CPU for a lane."""
        return self.costs.lane + self.costs.byte * (self.obs_bytes + self.action_bytes)

    @cached_property
    def host_lane(self) -> float:
        """The seconds of an actor for a lane, without its step."""
        return self.costs.host_lane + self.costs.host_byte * (self.obs_bytes + self.action_bytes)

    @cached_property
    def driver_batch(self) -> float:
        """The least seconds of the driver's CPU for a batch: with the fewest messages, or with more that are small."""
        costs, size = self.costs, self.batch_size
        small = max(self.fewest_messages, min(size, size * self.answer_bytes / LARGE))
        few = self.fewest_messages * (costs.message + (costs.large if small > self.fewest_messages else 0.0))
        return costs.batch + min(few, small * costs.message) + size * self.driver_lane


def bounds(setup: Setup) -> dict[str, float]:
    """Return the steps per second that each part of the circle allows at most; the least of them can be reached.

    `stragglers` bounds full batches only, because partial batches do not wait for the slowest actor.
    """
    most = _quick_bounds(setup)
    if setup.full and setup.step.spread:
        most["stragglers"] = _over(setup.envs, _unhindered(setup) + slowest_block(setup))
    return most


def ceiling(setup: Setup) -> float:
    """Return the least of the bounds that need no random draws, which are all but that of stragglers."""
    return min(_quick_bounds(setup).values())


def _quick_bounds(setup: Setup) -> dict[str, float]:
    size, messages = setup.batch_size, setup.fewest_messages
    workers = setup.actors * setup.workers_per_actor
    circle = _unhindered(setup)
    fewest_steps = max(1.0, size / workers)  # of one worker for one message, if a batch is spread over all workers
    # An actor's only worker reads its messages itself, and steps nothing meanwhile.
    alone = setup.costs.host_message / min(size, setup.envs_per_actor) if setup.workers_per_actor == 1 else 0.0
    return {
        "envs": _over(workers, setup.step.mean + setup.host_lane + alone),
        "stragglers": math.inf,
        "latency": _over(setup.envs, circle + fewest_steps * (setup.step.mean + setup.host_lane)),
        "driver": _over(size, setup.driver_batch),
        "driver's link": min(
            setup.driver_bandwidth / (setup.answer_bytes + ANSWER_MESSAGE * messages / size),
            setup.driver_bandwidth / (setup.request_bytes + REQUEST_MESSAGE * messages / size),
        ),
        "nodes' links": setup.node_bandwidth * (setup.actors / setup.actors_per_node) / setup.answer_bytes,
        "policy": _over(size, setup.policy_batch + setup.costs.batch),
    }


def _unhindered(setup: Setup) -> float:
    """Return the seconds of a circle without its steps, if a lane never waits in a queue."""
    costs = setup.costs
    return setup.latency + setup.policy_batch + costs.batch + costs.message + costs.host_message


def slowest_block(setup: Setup, repeats: int = 64) -> float:
    """Return the mean seconds until the slowest worker of all has stepped all of its envs once.

    Of many workers only some are drawn, so that the result may be too small, but never too large.
    """
    rng = np.random.default_rng(0)
    size = -(-setup.envs_per_actor // setup.workers_per_actor)
    drawn = min(size, DRAWS // 16)
    workers = min(setup.actors * setup.workers_per_actor, DRAWS // drawn)
    repeats = max(4, min(repeats, 4 * DRAWS // (workers * drawn)))
    slowest = [setup.step.draw(rng, (workers, drawn)).sum(axis=1).max() for _ in range(repeats)]
    return float(np.mean(slowest)) + (size - drawn) * setup.step.mean + size * setup.host_lane


def _over(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else math.inf

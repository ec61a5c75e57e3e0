"""What a pool of far workers is made of, as numbers, and how fast it can be at most.

The life of a lane is a circle: the caller takes a batch of the first lanes that are ready, runs its policy, and sends
one message to each actor that has lanes in the batch; the message takes half a round trip; the actor's workers step its
lanes, each worker its own, one after the other; when the last lane of the message is done the answer goes back, and
the driver writes it down. Each bound here is one part of that circle, as if all others took no time (or, for `latency`,
as if nobody ever had to queue); `simulation` has them all at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shoal.scaling.measured import COSTS
from shoal.support.checks import number, whole_number

__all__ = ["PARTS", "Costs", "Setup", "StepTime", "bounds", "ceiling", "slowest_block"]

Times = npt.NDArray[np.float64]

# What can be the limit, in the order in which ties are told.
PARTS = ("envs", "stragglers", "latency", "driver", "driver's link", "nodes' links", "policy")

# Bytes that travel beside observation and action (backends/wire.py).
REQUEST_LANE, REQUEST_MESSAGE = 34, 48
ANSWER_LANE, ANSWER_MESSAGE = 77, 1264
LARGE = 1 << 16  # bytes from which a message goes by Ray's object store (far/ray_outpost.py)
MOST_LANES = 2**24
LONGEST = 1e9  # seconds, of anything
LARGEST = 2**60  # bytes, of anything
DRAWS = 250_000  # of steps, to find the slowest of many


@dataclass(frozen=True)
class StepTime:
    """How long one step of an env takes.

    Attributes:
        mean: in seconds, resets included.
        spread: the standard deviation in parts of the mean; a log-normal distribution is drawn from.
        samples: measured steps, in seconds, to draw from instead; `mean` and `spread` are theirs then.
    """

    mean: float
    spread: float = 0.0
    samples: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        number("the mean time of a step, in seconds", self.mean, 0.0, LONGEST)
        number("the spread of a step's time, in parts of its mean", self.spread, 0.0, 100.0)

    @classmethod
    def measured(cls, samples: tuple[float, ...]) -> StepTime:
        """By steps that were measured."""
        if not samples:
            raise ValueError("samples: expected the seconds of at least one step, found none")
        mean = float(np.mean(samples))
        return cls(mean, float(np.std(samples)) / mean if mean else 0.0, samples)

    def draw(self, rng: np.random.Generator, count: int | tuple[int, ...]) -> Times:
        """So many steps, in seconds."""
        if not self.spread:
            return np.full(count, self.mean)
        if self.samples:
            return rng.choice(np.asarray(self.samples), count)
        variance = math.log1p(self.spread**2)
        return rng.lognormal(math.log(self.mean or 1e-300) - variance / 2, math.sqrt(variance), count)

    def faster(self, factor: float) -> StepTime:
        """The same env on a machine so many times as fast."""
        return StepTime(self.mean / factor, self.spread, tuple(one / factor for one in self.samples))

    def steady(self) -> StepTime:
        """As if each step took the mean time."""
        return StepTime(self.mean)


@dataclass(frozen=True)
class Costs:
    """What this implementation takes by itself, in seconds, with Ray as its transport.

    Of the driver and of an actor only the time counts that cannot overlap: that of the threads that do one thing after
    the other. What Ray's other threads do meanwhile is in `transport`. The values that
    `benchmarks/scaling_model.py` has measured (`measured`); see docs/scaling.md.

    Attributes:
        batch: of the driver's CPU, for a batch: recv and send.
        message: of the driver's CPU, for a message to an actor and its answer.
        large: more of it for an answer that is large, and travels by way of the object store.
        lane, byte: of the driver's CPU, for each lane, and for each byte of its observation and action.
        host_message, host_large, host_lane, host_byte: the same of an actor's CPU.
        transport: what the transport adds to the network's round trip when there is nothing else to do.
    """

    batch: float = COSTS["batch"]
    message: float = COSTS["message"]
    large: float = COSTS["large"]
    lane: float = COSTS["lane"]
    byte: float = COSTS["byte"]
    host_message: float = COSTS["host_message"]
    host_large: float = COSTS["host_large"]
    host_lane: float = COSTS["host_lane"]
    host_byte: float = COSTS["host_byte"]
    transport: float = COSTS["transport"]

    @classmethod
    def none(cls) -> Costs:
        """Everything for nothing, to see what the rest does."""
        return cls(*[0.0] * len(fields(cls)))

    def cheaper(self, factor: float) -> Costs:
        """The driver's own costs, divided."""
        own = ("batch", "message", "large", "lane", "byte")
        return replace(self, **{name: getattr(self, name) / factor for name in own})


@dataclass(frozen=True)
class Setup:
    """A pool with a far backend, the machines that it has, and a policy.

    Attributes:
        step: the time of a step.
        actors: hosts of envs, each with `envs_per_actor`, stepped by `workers_per_actor` at the same time.
        batch_size: how many envs `recv` waits for; envs / batch_size batches are in flight.
        actors_per_node: that share a node's link.
        obs_bytes, action_bytes: of one env.
        round_trip: of the network, in seconds.
        driver_bandwidth, node_bandwidth: bytes a second, each way.
        policy: seconds for a batch, in which the caller does nothing else; `policy_lane` more for each env of it.
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
        """Of all actors together."""
        return self.actors * self.envs_per_actor

    @property
    def in_flight(self) -> float:
        """How many batches there are, of which one may be the policy's."""
        return self.envs / self.batch_size

    @property
    def full(self) -> bool:
        """Whether a batch is all envs, so that everybody waits for the slowest."""
        return self.batch_size == self.envs

    @property
    def policy_batch(self) -> float:
        """Seconds of the policy for a batch."""
        return self.policy + self.policy_lane * self.batch_size

    @property
    def latency(self) -> float:
        """The round trip of a message that nobody has to do anything for."""
        return self.round_trip + self.costs.transport

    @property
    def fewest_messages(self) -> int:
        """How many messages a batch is at least: its lanes may be those of few actors."""
        return -(-self.batch_size // self.envs_per_actor)

    @property
    def most_messages(self) -> int:
        """How many messages a batch is at most."""
        return min(self.batch_size, self.actors)

    @cached_property
    def answer_bytes(self) -> float:
        """Of a lane, on its way to the driver."""
        return self.obs_bytes + ANSWER_LANE

    @cached_property
    def request_bytes(self) -> float:
        """Of a lane, on its way to an actor."""
        return self.action_bytes + REQUEST_LANE

    @cached_property
    def driver_lane(self) -> float:
        """Seconds of the driver's CPU for a lane."""
        return self.costs.lane + self.costs.byte * (self.obs_bytes + self.action_bytes)

    @cached_property
    def host_lane(self) -> float:
        """Seconds of an actor for a lane, beside its step."""
        return self.costs.host_lane + self.costs.host_byte * (self.obs_bytes + self.action_bytes)

    @cached_property
    def driver_batch(self) -> float:
        """Seconds of the driver's CPU for a batch, at least: in the fewest messages, or in as many as are small."""
        costs, size = self.costs, self.batch_size
        small = max(self.fewest_messages, min(size, size * self.answer_bytes / LARGE))
        few = self.fewest_messages * (costs.message + (costs.large if small > self.fewest_messages else 0.0))
        return costs.batch + min(few, small * costs.message) + size * self.driver_lane


def bounds(setup: Setup) -> dict[str, float]:
    """Steps per second that each part of the circle allows at most; the least of them is what can be reached.

    `stragglers` is for full batches alone: who takes the first that are ready does not wait for the slowest actor.
    """
    most = _quick_bounds(setup)
    if setup.full and setup.step.spread:
        most["stragglers"] = _over(setup.envs, _unhindered(setup) + slowest_block(setup))
    return most


def ceiling(setup: Setup) -> float:
    """What nothing but a simulation can lower: the least of the bounds, without that of stragglers, which is drawn."""
    return min(_quick_bounds(setup).values())


def _quick_bounds(setup: Setup) -> dict[str, float]:
    size, messages = setup.batch_size, setup.fewest_messages
    workers = setup.actors * setup.workers_per_actor
    circle = _unhindered(setup)
    # An actor's only worker takes its messages in by itself, and steps nothing meanwhile.
    alone = setup.costs.host_message / min(size, setup.envs_per_actor) if setup.workers_per_actor == 1 else 0.0
    return {
        "envs": _over(workers, setup.step.mean + setup.host_lane + alone),
        "stragglers": math.inf,
        "latency": _over(setup.envs, circle + _fewest_steps(setup) * (setup.step.mean + setup.host_lane)),
        "driver": _over(size, setup.driver_batch),
        "driver's link": min(
            setup.driver_bandwidth / (setup.answer_bytes + ANSWER_MESSAGE * messages / size),
            setup.driver_bandwidth / (setup.request_bytes + REQUEST_MESSAGE * messages / size),
        ),
        "nodes' links": setup.node_bandwidth * (setup.actors / setup.actors_per_node) / setup.answer_bytes,
        "policy": _over(size, setup.policy_batch + setup.costs.batch),
    }


def _unhindered(setup: Setup) -> float:
    """Seconds of a circle besides the steps, if a lane never has to queue for anything."""
    costs = setup.costs
    return setup.latency + setup.policy_batch + costs.batch + costs.message + costs.host_message


def _fewest_steps(setup: Setup) -> float:
    """How many steps one worker makes for one message at least, where a batch is spread over as many as possible."""
    return max(1.0, setup.batch_size / (setup.actors * setup.workers_per_actor))


def slowest_block(setup: Setup, repeats: int = 64) -> float:
    """Seconds until the slowest worker of all has stepped all of its envs once, on average.

    Not all are drawn where they are many: it is no more than that, then.
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

"""Advises on a cluster: what limits a pool there, and how many nodes, actors and batches in flight it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shoal.observe.words import figure, plural
from shoal.scaling.model import ANSWER_LANE, LONGEST, MOST_LANES, PARTS, Costs, Setup, StepTime, bounds, ceiling
from shoal.scaling.simulation import Prediction, simulate
from shoal.support.checks import number, whole_number

DEPTHS = (1, 2, 3, 4, 6, 8, 16, 32, 64)  # numbers of batches in flight that are tried
MOST_DEPTH = 4096
MARGIN = 0.97  # more batches or actors are chosen only if fewer reach less than this part of their rate
PAYS = math.log2(1.1)  # twice as many nodes must bring so many doublings of the rate: a tenth more steps
IDLE = 0.02  # a part that is busy for less of the time is not the limit
CLOSE = 1.3  # if a limit that is twice as good gains less, another limit is close behind
ANY = 1.01  # smaller gains are not looked for
NOTICED = 1.05  # a part that gains less when it is twice as good is not the limit


@dataclass(frozen=True)
class Cluster:
    """Envs, machines and a policy. A `Setup` says how to run the envs on the machines.

    Attributes:
        step, envs: the time of a step, and the number of envs on all nodes together.
        nodes: the number of machines with envs.
        cores: of each node, and the number of workers that step its envs at the same time.
        latency: the round trip of the network, in seconds.
        bandwidth: of every machine's link, in bytes a second.
        obs_bytes, action_bytes: sizes of one env's observation and action.
        policy, policy_lane: its seconds for a batch, and for each env of it in addition.
        batch_size: as the learner needs it; None for the best.
        costs: what the driver and the actors need for themselves.
    """

    step: StepTime
    envs: int
    nodes: int
    cores: int
    obs_bytes: float = 0.0
    action_bytes: float = 8.0
    latency: float = 0.0
    bandwidth: float = math.inf
    policy: float = 0.0
    policy_lane: float = 0.0
    batch_size: int | None = None
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        whole_number("envs", self.envs, 1, MOST_LANES)
        whole_number("nodes", self.nodes, 1, 2**20)
        whole_number("cores", self.cores, 1, 2**16)
        if self.envs < self.nodes:
            raise ValueError(f"envs: expected at least one for each of {self.nodes} nodes, found {self.envs}")
        if self.batch_size is not None:
            whole_number("batch_size", self.batch_size, 1, self.envs)
        number("latency, in seconds", self.latency, 0.0, LONGEST)

    def setup(self, actors_per_node: int, in_flight: int) -> Setup:
        """Return a `Setup` of this cluster with so many actors_per_node, and so many batches in_flight."""
        actors = self.nodes * actors_per_node
        per_actor = -(-self.envs // actors)  # rounded up
        envs = per_actor * actors
        size = -(-envs // in_flight) if self.batch_size is None else self.batch_size
        return Setup(
            self.step, actors, per_actor, size, min(per_actor, max(1, self.cores // actors_per_node)), actors_per_node,
            self.obs_bytes, self.action_bytes, self.latency, self.bandwidth, self.bandwidth, self.policy,
            self.policy_lane, self.costs,
        )  # fmt: skip


@dataclass(frozen=True)
class Advice:
    """How to run it, how fast that will be, and what to change first.

    Attributes:
        setup: how to run it.
        nodes: the number of nodes to use: as many as pay. Twice as many must bring a tenth more steps.
        all_nodes: steps per second with all nodes, in the best way; an upper bound, if less than that of `prediction`.
        limit: one of PARTS.
        gains: how many times as fast it would be if each part were twice as good; for stragglers, if all steps took the
            mean time.
        most: the bound of each part, in steps per second.
        most_nodes: the number of such nodes that one driver can keep busy.
        apart: steps per second if each of all nodes ran a policy of its own, as fast as this one (data-parallel ranks).
        alone: steps per second of one such node with all envs and the policy, without a cluster.
    """

    cluster: Cluster
    setup: Setup
    prediction: Prediction
    nodes: int
    all_nodes: float
    limit: str
    gains: dict[str, float]
    most: dict[str, float]
    most_nodes: int
    apart: float
    alone: float

    @property
    def first(self) -> str:
        """What to change first, in a sentence."""
        setup, now, limit = self.setup, self.prediction, self.limit
        ranks = _about_ranks(self)
        larger = "have more envs and let it take larger batches" if setup.policy > setup.policy_batch / 2 else ""
        tell = {
            "envs": _about_envs(self),
            "stragglers": _about_stragglers(self),
            "latency": _about_latency(self, ranks),
            "driver": _about_driver(self, ranks),
            "driver's link": (
                f"The driver's link is the limit ({setup.obs_bytes + ANSWER_LANE:,.0f} bytes a step): send smaller "
                "observations (uint8, single frames that are stacked at the driver)"
                f"{_or('give it a faster link', ranks)}."
            ),
            "nodes' links": "The nodes' links are the limit: send smaller observations, or use more nodes.",
            "policy": (
                f"The policy is the limit ({now.busy['policy']:.0%} of the time, batches of {setup.batch_size:,}): "
                f"make it faster{_or(larger, ranks)}."
            ),
        }
        others = [name for name in now.busy if name not in (limit, "envs" * (limit == "stragglers"))]
        behind = max(others, key=lambda name: now.busy[name])
        if self.gains[limit] < CLOSE and now.busy[behind] > 0.6:
            are = "are" if behind.endswith("s") else "is"
            return f"{tell[limit]} Close behind {are} the {behind} ({now.busy[behind]:.0%} busy)."
        return tell[limit]


def advise(cluster: Cluster) -> Advice:
    """Simulate all sensible ways on as many nodes as pay; choose the simplest of those as fast as the fastest."""
    search = _NodeSearch(cluster)
    nodes = search.nodes_that_pay()
    setup, prediction = search.best(nodes)
    # If a part gets better, smaller batches may be better: one queue gets shorter, others get longer.
    sizes = [] if cluster.batch_size else [-(-setup.batch_size // 4)]
    limit, gains = limits(setup, prediction, sizes)
    most = bounds(setup)
    one_driver = min(most["driver"], most["driver's link"], most["policy"])
    room = math.floor(min(one_driver / most["envs"] * nodes, 2**53)) if most["envs"] < math.inf else nodes
    return Advice(
        cluster, setup, prediction, nodes, search.all_nodes(prediction.rate), limit, gains, most,
        nodes if nodes < cluster.nodes else max(nodes, room), _apart(cluster),
        _apart(replace(cluster, nodes=1)),
    )  # fmt: skip


class _NodeSearch:
    """Finds the best way to run the envs on each number of nodes that is worth a try."""

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._found: dict[int, tuple[Setup, Prediction]] = {}
        steps = (factor << power for power in range(20) for factor in (2, 3))
        counts = sorted({1, cluster.nodes, *(count for count in steps if count < cluster.nodes)})
        self._ways = {nodes: self._setups(nodes) for nodes in counts}
        self._ceilings = {nodes: max(ceiling(one) for one in ways) for nodes, ways in self._ways.items()}

    def _setups(self, nodes: int) -> list[Setup]:
        """Return the ways to use so many nodes, the simplest first."""
        cluster = replace(self._cluster, nodes=nodes)
        most = 1 if cluster.batch_size else min(cluster.envs, MOST_DEPTH)
        ways = sorted({1, cluster.cores} if cluster.envs >= nodes * cluster.cores else {1})
        # With the largest depth, each actor has two messages under way.
        depths = {way: sorted({*DEPTHS, 2 * nodes * way}) for way in ways}
        return [cluster.setup(way, depth) for way in ways for depth in depths[way] if depth <= most]

    def best(self, nodes: int) -> tuple[Setup, Prediction]:
        """Return the simplest way of those as fast as the fastest."""
        if nodes not in self._found:
            first, *others = self._ways[nodes]
            best = first, simulate(first)
            for setup in others:
                # A way with too low a bound need not be simulated.
                if ceiling(setup) * MARGIN > best[1].rate and (found := simulate(setup)).rate * MARGIN > best[1].rate:
                    best = setup, found
            self._found[nodes] = best
        return self._found[nodes]

    def nodes_that_pay(self) -> int:
        """Return the number of nodes beyond which more nodes bring too little."""
        best, most = 1, 0.0
        for nodes, high in sorted(self._ceilings.items(), key=lambda one: -one[1] / one[0] ** PAYS):
            if high / nodes**PAYS <= most:
                break
            value = self.best(nodes)[1].rate / nodes**PAYS
            if value > most:
                best, most = nodes, value
        return best

    def all_nodes(self, rate: float) -> float:
        """Return the steps per second with all nodes; an upper bound, if that is less than the known rate."""
        nodes = self._cluster.nodes
        return self._ceilings[nodes] if self._ceilings[nodes] < rate else self.best(nodes)[1].rate


def limits(setup: Setup, now: Prediction | None = None, sizes: Sequence[int] = ()) -> tuple[str, dict[str, float]]:
    """Find what limits the pool of a `setup` by making each part twice as good; return the best part, and all gains.

    If no part gains alone, the limit is the part that is busy for most of the time.

    Args:
        now: how fast the pool is, if that is known.
        sizes: other batch sizes that may be used once a part is better.
    """
    now = now or simulate(setup)
    better = {
        "envs": replace(setup, step=setup.step.faster(2.0)),
        "stragglers": replace(setup, step=setup.step.steady()),
        "latency": replace(
            setup, round_trip=setup.round_trip / 2, costs=replace(setup.costs, transport=setup.costs.transport / 2)
        ),
        "driver": replace(setup, costs=setup.costs.cheaper(2.0)),
        "driver's link": replace(setup, driver_bandwidth=setup.driver_bandwidth * 2),
        "nodes' links": replace(setup, node_bandwidth=setup.node_bandwidth * 2),
        "policy": replace(setup, policy=setup.policy / 2, policy_lane=setup.policy_lane / 2),
    }
    gains = {}
    for name, changed in better.items():
        idle = changed == setup or now.busy.get(name, 1.0) < IDLE
        tries = [replace(changed, batch_size=size) for size in ([] if idle else sorted({setup.batch_size, *sizes}))]
        rates = [simulate(one).rate for one in tries if ceiling(one) > now.rate * ANY]
        gains[name] = max([now.rate, *rates]) / now.rate
    limit = max(PARTS, key=lambda name: gains[name])
    if gains[limit] < NOTICED:  # two parts limit it together, and neither gains alone
        limit = max(now.busy, key=lambda name: now.busy[name])
    return limit, gains


def _apart(cluster: Cluster) -> float:
    """Return the rate if each node had its own pool and policy, with two halves of the envs that take turns."""
    envs, costs = cluster.envs / cluster.nodes, cluster.costs
    workers = min(cluster.cores, envs)
    lane = cluster.step.mean + costs.host_lane + costs.host_byte * (cluster.obs_bytes + cluster.action_bytes)
    stepping, deciding = envs / workers * lane, costs.batch + cluster.policy + cluster.policy_lane * envs / 2
    seconds = max(stepping, 2 * deciding)
    return cluster.nodes * envs / seconds if seconds > 0 else math.inf


def _about_ranks(advice: Advice) -> str:
    """Advise to move the policy to the nodes, if that is much faster; "" if not."""
    rate, nodes = advice.prediction.rate, advice.cluster.nodes
    if not 1.2 * rate < advice.apart < math.inf:
        return ""
    if nodes == 1:
        return f"run the policy on the node itself, without a cluster: at most {figure(advice.apart)} steps/s"
    alone = ""
    if rate < advice.alone < math.inf:
        alone = f"; one node alone, without a cluster, makes up to {figure(advice.alone)} that way"
    return (
        f"move the policy to the nodes: data-parallel ranks, at most {figure(advice.apart)} steps/s on all {nodes:,} "
        f"if each runs it as fast as the driver does (docs/guides/clusters.md){alone}"
    )


def _or(*ways: str) -> str:
    """Join further ways to the first: commas between them, and "or" before the last."""
    some = [way for way in ways if way]
    return "".join(f", {'or ' * (at == len(some))}{way}" for at, way in enumerate(some, 1))


def _about_envs(advice: Advice) -> str:
    if advice.setup.workers_per_actor == advice.setup.envs_per_actor:
        return "The envs' own time is the limit, and each has a core to itself: have more envs, or make a step cheaper."
    if advice.nodes < advice.cluster.nodes:
        return "The envs' own time is the limit, but more nodes bring little: make a step cheaper."
    return "The envs' own time is the limit: add nodes or cores, or make a step cheaper."


def _about_driver(advice: Advice, ranks: str) -> str:
    """Advise on the driver: larger messages, if their number is the limit, or less in them."""
    setup, now = advice.setup, advice.prediction
    what = f"{now.busy['driver']:.0%} busy, {plural(math.ceil(now.messages), 'message')} a batch"
    if now.messages * setup.costs.message > setup.batch_size * setup.driver_lane:
        larger = "a larger batch_size" if advice.cluster.batch_size and not setup.full else "more envs"
        first = f"have {larger}, so that each message carries more of them"
    else:
        first = "send less for each step" if setup.obs_bytes * setup.costs.byte > setup.costs.lane else ""
    ways = _or(first, ranks).removeprefix(", ").removeprefix("or ")
    return f"The driver's CPU is the limit ({what}): {ways or 'it can do no more'}."


def _about_stragglers(advice: Advice) -> str:
    if advice.setup.full and advice.cluster.batch_size:
        return "Each batch waits for the slowest env: use a batch_size of half the envs or less."
    return (
        f"Steps of unequal time are the limit (workers are {advice.prediction.busy['envs']:.0%} busy): give each "
        "worker more envs, so that the slow ones even out."
    )


def _about_latency(advice: Advice, ranks: str) -> str:
    """Advise on latency. By Little's law, a higher rate needs more envs under way."""
    setup, now = advice.setup, advice.prediction
    rest = min(rate for name, rate in advice.most.items() if name not in ("latency", "stragglers"))
    waiting = max(1.0, setup.envs * min(rest, 1e12) / now.rate)
    wanted = 2 ** math.ceil(math.log2(min(waiting, 2.0**40)))
    if advice.cluster.batch_size and setup.in_flight < 2:
        return "The round trip is the limit: use a smaller batch_size, so that several batches are in flight."
    return (
        f"The round trip is the limit ({1e3 * setup.latency:,.1f} ms of {1e3 * now.circle:,.1f} ms a step): have more "
        f"envs under way, about {wanted:,} instead of {setup.envs:,}, in batches of the same size{_or(ranks)}."
    )

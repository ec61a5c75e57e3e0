"""Places the actors of backend="ray" in a cluster; one actor runs one block of envs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from shoal.errors import StartError
from shoal.remote.delay import DelayedTransport
from shoal.remote.options import amount, checked, dictionary, host_backend, one_of, seconds, worker_count
from shoal.remote.ray.channel import import_channels
from shoal.remote.ray.cluster import cluster
from shoal.remote.ray.host import RayHost
from shoal.remote.ray.link import Listener, RayLink
from shoal.remote.transport import Deliver, Transport

ROOM_TIMEOUT = 5.0  # seconds until the cluster must know that the resources of a closed pool are free again
MAX_CALLS = 32  # of one actor at a time
UNLIMITED = 2**20  # the number of actors with room if they need nothing


def _resources(name: str, value: Any) -> None:
    dictionary(name, value)
    for resource, needed in value.items():
        amount(f"{name}: {resource}", needed)


def _address(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected a text, found {value!r}")
    if value.startswith("ray://"):
        raise ValueError(
            f"{name} {value!r} is one of Ray Client: run the script on a machine of the cluster, with its "
            '"host:port" or "auto"'
        )


@dataclass(frozen=True)
class RayOptions:
    """`backend_options` of backend="ray".

    Attributes:
        address: "host:port" or "auto" joins a running cluster; "local" starts one for this process alone; None leaves
            the choice to ray.init: RAY_ADDRESS, a cluster that this machine belongs to, or one for this process alone.
            A cluster that was started here ends with the last pool that uses it. If ray.init was called before, that
            cluster is used, and is not ended.
        num_cpus, num_gpus, resources: what each actor needs.
        placement: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD", as in Ray's placement groups; None leaves it to
            Ray.
        labels: actors go to nodes with these labels only.
        runtime_env: Ray's runtime environment of the actors.
        local_backend: how an actor runs its envs: "serial", "threads", "processes", "compiled", "cuda" or "jax". By
            default "processes" if it has several CPUs, else "serial".
        local_workers: the number of workers of an actor; by default its number of CPUs.
        place_timeout: seconds until Ray must have started an actor.
        delay: seconds by which every message is delayed, in both directions, to try out a slower network.
    """

    address: Annotated[str | None, _address] = None
    num_cpus: Annotated[float, amount] = 1
    num_gpus: Annotated[float, amount] = 0
    resources: Annotated[Mapping[str, float] | None, _resources] = None
    placement: Annotated[str | None, one_of("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")] = None
    labels: Annotated[Mapping[str, str] | None, dictionary] = None
    runtime_env: Annotated[Mapping[str, Any] | None, dictionary] = None
    local_backend: Annotated[str | None, host_backend] = None
    local_workers: Annotated[int | None, worker_count] = None
    place_timeout: Annotated[float, seconds] = 60.0
    delay: Annotated[float, amount] = 0.0

    @property
    def needs(self) -> dict[str, float]:
        """The resources that one actor takes."""
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus, **(self.resources or {})}
        return {name: needed for name, needed in wanted.items() if needed > 0}

    def room(self, resources: Mapping[str, float]) -> int:
        """The number of actors that these resources are enough for."""
        counts = (math.floor(resources.get(name, 0.0) / needed) for name, needed in self.needs.items())
        return min(counts, default=UNLIMITED)


def ray_transport(options: dict[str, Any], num_envs: int, num_workers: int | None) -> Transport:
    """Make the transport of backend="ray"."""
    given = checked(RayOptions, options)
    transport = RayTransport(given, num_envs, num_workers)
    return DelayedTransport(transport, given.delay) if given.delay else transport


class RayTransport:
    """Runs each block of a pool in an actor."""

    ends_hung_envs = True

    def __init__(self, options: RayOptions, num_envs: int, num_workers: int | None):
        self.options = options
        self.local_workers = options.local_workers or max(1, math.floor(options.num_cpus))
        self.local_backend = options.local_backend or ("processes" if self.local_workers > 1 else "serial")
        if num_workers is not None:
            worker_count("num_workers", num_workers)
        self._ray, self._cluster_address = cluster.enter(options.address)
        import_channels()
        self._closed, self._group = False, None
        self._listener = Listener()
        try:
            self.num_workers = min(num_envs, num_workers or self._free() or 1)
            self._each_env = num_workers is not None and num_workers > num_envs
            self._await_room(self.num_workers)
            if options.placement is not None:
                self._group = self._reserve(self.num_workers)
            self._actor = self._ray.remote(concurrency_groups={"mail": MAX_CALLS, "control": 2})(RayHost)
        except BaseException:
            self.close()
            raise

    # ---- room --------------------------------------------------------------------------------------------------

    def _free(self) -> int:
        """The number of actors that there is room for now."""
        return self.options.room(self._ray.available_resources())

    def _most(self) -> int:
        """The number of actors that there would be room for if nothing else ran in the cluster."""
        labels = (self.options.labels or {}).items()
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        fitting = [node for node in nodes if all((node.get("Labels") or {}).get(key) == value for key, value in labels)]
        return sum(self.options.room(node["Resources"]) for node in fitting)

    def _await_room(self, count: int) -> None:
        """Raise StartError if so many actors cannot be placed, rather than wait for another node."""
        most = self._most()
        if most < count:
            raise self._no_room(count, "has room for", most)
        deadline = time.monotonic() + ROOM_TIMEOUT
        while (free := self._free()) < count:
            if time.monotonic() > deadline:
                raise self._no_room(count, "has, beside what others use, room for", free)
            time.sleep(0.1)

    def _no_room(self, count: int, words: str, room: int) -> StartError:
        options = self.options
        needs = ", ".join(f"{needed:g} {name}" for name, needed in options.needs.items())
        labels = f" on nodes with the labels {dict(options.labels)}" if options.labels else ""
        each = " (one for each env)" * self._each_env
        actors = f"1 Ray actor with {needs}" if count == 1 else f"{count} Ray actors{each} with {needs} each"
        found = sorted(self._ray.cluster_resources().items())
        has = ", ".join(f"{there:g} {name}" for name, there in found if name in options.needs)
        return StartError(
            f"{actors}{labels} {'is' if count == 1 else 'are'} needed, and the cluster ({has or 'none of these'}) "
            f"{words} {room}: use fewer workers, close other pools, or ask for less by backend_options "
            "(num_cpus, num_gpus, resources)"
        )

    def _reserve(self, count: int) -> Any:
        """Make the placement group of the actors. Raises StartError if the nodes do not allow it."""
        from ray.util.placement_group import placement_group, remove_placement_group

        options = self.options
        labels = {"bundle_label_selector": [dict(options.labels)] * count} if options.labels else {}
        group = placement_group([options.needs or {"CPU": 0.001}] * count, strategy=options.placement, **labels)
        # If there are fewer nodes than actors that must be apart, Ray would wait for more nodes.
        nodes = sum(node["Alive"] for node in self._ray.nodes())
        possible = options.placement != "STRICT_SPREAD" or nodes >= count
        if not group.wait(options.place_timeout if possible else 1.0):
            remove_placement_group(group)
            raise StartError(
                f"Ray cannot place {count} actors with placement={options.placement!r} on the nodes that there "
                "are: use fewer workers, or another placement"
            )
        return group

    # ---- hosts -------------------------------------------------------------------------------------------------

    def start(self, index: int, deliver: Deliver) -> RayLink:
        if self._group is None and self._most() < 1:
            raise self._no_room(1, "has room for", 0)
        try:
            actor = self._actor.options(**self._actor_options(index)).remote()
        except Exception as error:
            raise StartError(f"Ray cannot start an actor: {type(error).__name__}: {error}") from error
        return RayLink(self._ray, actor, deliver, self.options.place_timeout, self._listener)

    def _actor_options(self, index: int) -> dict[str, Any]:
        """Ray's options of an actor. Older versions of Ray do not know all of them, so only those in use are given."""
        options = self.options
        given: dict[str, Any] = {
            "num_cpus": options.num_cpus, "num_gpus": options.num_gpus, "max_restarts": 0, "max_task_retries": 0,
            "resources": dict(options.resources or {}) or None,
        }  # fmt: skip
        if options.runtime_env is not None:
            given["runtime_env"] = dict(options.runtime_env)
        if self._group is not None:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            given["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, index)
        elif options.labels:
            given["label_selector"] = dict(options.labels)
        return given

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
        cluster.leave(self._cluster_address)

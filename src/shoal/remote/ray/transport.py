"""Connects this process to a Ray cluster and places the actors of backend="ray"; one actor runs one block of envs."""

from __future__ import annotations

import collections
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from shoal.errors import StartError
from shoal.remote.ray.link import Listener, RayHost, RayLink, import_channels
from shoal.remote.transport import Deliver, amount, checked, dictionary, host_backend, one_of, seconds, worker_count
from shoal.support.optional_dependencies import install

ROOM_TIMEOUT = 5.0  # seconds until the cluster must know that the resources of a closed pool are free again
MAX_CALLS = 32  # of one actor at a time
UNLIMITED = 2**20  # the number of actors with room if they need nothing
REACH_TIMEOUT = 3.0  # seconds until a cluster must answer at its address
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # every gRPC server answers it
NICENESS = "RAY_worker_niceness"


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
    """`backend_options` of backend="ray"."""

    # "host:port" or "auto" joins a running cluster; "local" starts one for this process alone; None leaves the choice
    # to ray.init: RAY_ADDRESS, a cluster that this machine belongs to, or one for this process alone. A cluster that
    # was started here ends with the last pool that uses it. If ray.init was called before, that cluster is used, and is
    # not ended.
    address: Annotated[str | None, _address] = None
    num_cpus: Annotated[float, amount] = 1  # this and the next two: what each actor needs
    num_gpus: Annotated[float, amount] = 0
    resources: Annotated[Mapping[str, float] | None, _resources] = None
    # As in Ray's placement groups; None leaves it to Ray.
    placement: Annotated[str | None, one_of("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")] = None
    labels: Annotated[Mapping[str, str] | None, dictionary] = None  # actors go to nodes with these labels only
    runtime_env: Annotated[Mapping[str, Any] | None, dictionary] = None  # Ray's runtime environment of the actors
    # How an actor runs its envs. By default "processes" if it has several CPUs, else "serial".
    local_backend: Annotated[str | None, host_backend] = None
    local_workers: Annotated[int | None, worker_count] = None  # of an actor; by default its number of CPUs
    place_timeout: Annotated[float, seconds] = 60.0  # until Ray must have started an actor
    delay: Annotated[float, amount] = 0.0  # seconds for every message, in both directions, to try out a slower network

    @property
    def needs(self) -> dict[str, float]:
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus, **(self.resources or {})}
        return {name: needed for name, needed in wanted.items() if needed > 0}

    def room(self, resources: Mapping[str, float]) -> int:
        """The number of actors that these resources are enough for."""
        counts = (math.floor(resources.get(name, 0.0) / needed) for name, needed in self.needs.items())
        return min(counts, default=UNLIMITED)


class Delay:
    """Hands messages over `seconds` later, as a slow network would.

    Messages do not wait for each other. All have the same delay, so one thread can hand them over in their order.
    """

    def __init__(self, seconds: float):
        self._seconds, self._closed = seconds, threading.Event()
        self._queue: queue.SimpleQueue[tuple[float, Callable[[Any], None], Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._main, name="shoal-delay", daemon=True).start()

    def later(self, act: Callable[[Any], None], data: Any) -> None:
        """Call `act(data)` after the delay."""
        self._queue.put((time.monotonic() + self._seconds, act, data))

    def close(self) -> None:
        self._closed.set()
        self._queue.put(None)

    def _main(self) -> None:
        while (entry := self._queue.get()) is not None:
            due, act, data = entry
            if self._closed.wait(max(0.0, due - time.monotonic())):
                return
            act(data)


class RayTransport:
    """Runs each block of a pool in an actor."""

    ends_hung_envs = True

    def __init__(self, given: dict[str, Any], num_envs: int, num_workers: int | None):
        self.options = options = checked(RayOptions, given)
        self.local_workers = options.local_workers or max(1, math.floor(options.num_cpus))
        self.local_backend = options.local_backend or ("processes" if self.local_workers > 1 else "serial")
        self._ray, self._cluster_address = cluster.enter(options.address)
        import_channels()
        self._closed, self._group = False, None
        self._listener = Listener()
        self._delay = Delay(options.delay) if options.delay else None
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

    def start(self, index: int, deliver: Deliver) -> RayLink:
        if self._group is None and self._most() < 1:
            raise self._no_room(1, "has room for", 0)
        try:
            actor = self._actor.options(**self._actor_options(index)).remote()
        except Exception as error:
            raise StartError(f"Ray cannot start an actor: {type(error).__name__}: {error}") from error
        if self._delay is None:
            return RayLink(self._ray, actor, deliver, self.options.place_timeout, self._listener)
        deliver = partial(self._delay.later, deliver)
        link = RayLink(self._ray, actor, deliver, self.options.place_timeout, self._listener)
        link.post = partial(self._delay.later, link.post)  # type: ignore[method-assign]
        return link

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
        if self._delay is not None:
            self._delay.close()
        self._listener.close()
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
        cluster.leave(self._cluster_address)


def import_ray() -> Any:
    """The ray module. Raises StartError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise StartError(f'backend="ray" needs Ray, which is not installed: {install("ray")}') from error
    return ray


class RayCluster:
    """Connects this process to Ray, and ends the cluster after its last user if it was started here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By address: users may shut Ray down and connect to a cluster of their own meanwhile.
        self._users: collections.Counter[str] = collections.Counter()
        self._ours: str | None = None

    def enter(self, address: str | None) -> tuple[Any, str]:
        """Connect, unless this process is connected. Returns the ray module, and the cluster's address for `leave`."""
        ray = import_ray()
        with self._lock:
            if not ray.is_initialized():
                connect(ray, address)
                self._ours = found = _address_of(ray)
            elif address not in (None, "auto", "local", found := _address_of(ray)):
                raise StartError(
                    f"Ray is connected to {found} in this process already, and backend_options ask for "
                    f"address={address!r}: call ray.shutdown() first, or leave the address out"
                )
            self._users[found] += 1
        return ray, found

    def leave(self, address: str) -> None:
        with self._lock:
            self._users[address] -= 1
            if self._users[address] == 0 and address == self._ours:
                self._ours, ray = None, import_ray()
                if ray.is_initialized() and _address_of(ray) == address:
                    ray.shutdown()


cluster = RayCluster()


def _address_of(ray: Any) -> str:
    return str(ray.get_runtime_context().gcs_address)


def connect(ray: Any, address: str | None) -> None:
    """Join the cluster at this address, or start one. Raises StartError if that is not possible."""
    joining = address not in (None, "local")
    _check_address(address)
    # The actors of a cluster that is started here get the niceness of this process. By default Ray gives them 15. Then
    # envs that compute get very little time beside any other process that does, for example a learner.
    given = os.environ.get(NICENESS)
    os.environ.setdefault(NICENESS, "0")
    try:
        ray.init(address=address, include_dashboard=None if joining else False, log_to_driver=False,
                 logging_level="ERROR", configure_logging=False)  # fmt: skip
    except Exception as error:
        if isinstance(error, ConnectionError) and address == "auto":
            raise StartError(
                'address="auto", but this machine belongs to no running Ray cluster: start one by "ray start '
                '--head", or leave the address out for one of this process alone'
            ) from error
        where = f"the cluster at address={address!r} cannot be joined" if joining else "Ray cannot be started here"
        said = str(error).strip().partition("\n")[0]
        raise StartError(f"{where}: {type(error).__name__}: {said}") from error
    finally:
        if given is None:
            del os.environ[NICENESS]


def _check_address(address: str | None) -> None:
    """Raise StartError unless a gRPC server answers there: Ray would wait for a long time, or without end."""
    given = f"backend_options: address={address!r}"
    if address in (None, "auto"):  # Ray itself looks there
        address = os.environ.get("RAY_ADDRESS") or "auto"
        given = f"RAY_ADDRESS={address!r} in the environment"
    if address in ("auto", "local"):
        return
    if ":" not in address or address.startswith("ray://"):
        raise StartError(f'{given} is neither "host:port", "auto" nor "local"')
    if os.environ.get("RAY_USE_TLS") == "1":
        return  # without the keys there is no answer
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), REACH_TIMEOUT) as probe:
            probe.settimeout(REACH_TIMEOUT)
            probe.sendall(HTTP2_HELLO)
            if probe.recv(4)[3:] != b"\x04":  # the type of a frame with settings
                raise OSError("what answers there does not speak gRPC")
    except (OSError, ValueError) as error:
        raise StartError(f"no Ray cluster answers at {given.removeprefix('backend_options: ')}: {error}") from error

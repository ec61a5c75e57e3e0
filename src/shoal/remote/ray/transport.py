"""Blocks of envs in the actors of a Ray cluster: one message each way, with one buffer, is a batch of an actor.

A message is a call of the actor, or goes by the short way of `ray_lane`. Several may be under way for one actor: the
next one comes while it still steps, which is how the network's time is hidden.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from shoal.errors import StartError
from shoal.remote.delay import DelayedTransport
from shoal.remote.dispatcher import Deliver, Transport
from shoal.remote.ray.host import RayHost
from shoal.remote.ray.link import Listener, RayLink
from shoal.support.checks import check_choice, check_names, number, positive_number, whole_number
from shoal.support.optional_dependencies import install

__all__ = ["RayOptions", "RayTransport"]

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
LOCAL_BACKENDS = ("serial", "threads", "processes", "jax", "compiled", "cuda")
ROOM_PATIENCE = 5.0  # seconds until what a closed pool has given back must be free again, as far as the cluster knows
REACH_TIMEOUT = 3.0  # seconds for a cluster's address to be answered at
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # answered by any gRPC server
MOST_CALLS = 32  # of one actor at a time


@dataclass(frozen=True)
class RayOptions:
    """`backend_options` of backend="ray".

    Attributes:
        address: of a running cluster, "host:port" or "auto"; "local" for one of this process alone; None for what
            ray.init takes by itself: RAY_ADDRESS, a cluster that this machine belongs to, or one of this process
            alone. What was started here ends with the last pool that uses it. Where ray.init was called before, that
            cluster is used, and left alone.
        num_cpus, num_gpus, resources: what each actor needs.
        placement: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD", as Ray's placement groups; None leaves it to Ray.
        labels: actors go to nodes with these labels only.
        runtime_env: of the actors, as Ray has it.
        local_backend: how an actor runs its envs: "serial", "threads", "processes", "compiled", "cuda" or "jax". By
            default "processes" where it has several CPUs, else "serial".
        local_workers: by how many workers; by default as many as it has CPUs.
        place_timeout: seconds until Ray must have started an actor.
        delay: seconds by which every message, there and back, is held up; to try out what a network would do.
    """

    address: str | None = None
    num_cpus: float = 1
    num_gpus: float = 0
    resources: Mapping[str, float] | None = None
    placement: str | None = None
    labels: Mapping[str, str] | None = None
    runtime_env: Mapping[str, Any] | None = None
    local_backend: str | None = None
    local_workers: int | None = None
    place_timeout: float = 60.0
    delay: float = 0.0

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> RayOptions:
        """Raises ValueError for those that make no sense."""
        check_names("backend_options", given, [one.name for one in fields(cls)])
        options = cls(**given)
        for name in ("num_cpus", "num_gpus", "delay"):
            number(f"backend_options: {name}", getattr(options, name), 0, 1e6)
        positive_number("backend_options: place_timeout", options.place_timeout)
        if options.placement is not None:
            check_choice("backend_options: placement", options.placement, PLACEMENTS)
        if options.local_backend is not None:
            check_choice("backend_options: local_backend", options.local_backend, LOCAL_BACKENDS)
        if options.local_workers is not None:
            whole_number("backend_options: local_workers", options.local_workers, 1, 2**20)
        for name in ("resources", "labels", "runtime_env"):
            if not isinstance(getattr(options, name), Mapping | None):
                raise ValueError(f"backend_options: {name}: expected a dict, found {getattr(options, name)!r}")
        for name, amount in (options.resources or {}).items():
            number(f"backend_options: resources: {name}", amount, 0, 1e6)
        if not isinstance(options.address, str | None):
            raise ValueError(f"backend_options: address: expected a text, found {options.address!r}")
        if options.address is not None and options.address.startswith("ray://"):
            raise ValueError(
                f"backend_options: address {options.address!r} is one of Ray Client: run the script on a machine of "
                'the cluster, with its "host:port" or "auto"'
            )
        return options

    @property
    def needs(self) -> dict[str, float]:
        """What one actor takes of a cluster."""
        wanted = {"CPU": self.num_cpus, "GPU": self.num_gpus, **(self.resources or {})}
        return {name: amount for name, amount in wanted.items() if amount > 0}


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise StartError(f'backend="ray" needs Ray, which is not installed: {install("ray")}') from error
    return ray


class _Cluster:
    """The connection of this process to Ray, and whether it is ours to end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Users may shut Ray down and connect to another cluster meanwhile, which is theirs.
        self._users: collections.Counter[str] = collections.Counter()
        self._ours: str | None = None

    def enter(self, address: str | None) -> tuple[Any, str]:
        """Connect, unless somebody has: the ray module, and where the cluster is, for `leave`."""
        ray = _ray()
        with self._lock:
            if ray.is_initialized():
                self._check(ray, address)
                found = self._address(ray)
            else:
                self._connect(ray, address)
                found = self._ours = self._address(ray)
            self._users[found] += 1
        return ray, found

    def leave(self, address: str) -> None:
        """The last one out shuts down what we have started."""
        with self._lock:
            self._users[address] -= 1
            if self._users[address] == 0 and address == self._ours:
                self._ours, ray = None, _ray()
                if ray.is_initialized() and self._address(ray) == address:
                    ray.shutdown()

    @staticmethod
    def _address(ray: Any) -> str:
        return str(ray.get_runtime_context().gcs_address)

    @staticmethod
    def _check(ray: Any, address: str | None) -> None:
        found = _Cluster._address(ray)
        if address not in (None, "auto", "local", found):
            raise StartError(
                f"Ray is connected to {found} in this process already, and backend_options ask for "
                f"address={address!r}: call ray.shutdown() first, or leave the address out"
            )

    @staticmethod
    def _connect(ray: Any, address: str | None) -> None:
        joining = address not in (None, "local")
        _check_address(address)
        try:
            with _nobody_nice():
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


_cluster = _Cluster()


@contextlib.contextmanager
def _nobody_nice() -> Iterator[None]:
    """Actors of a cluster that is started meanwhile have the niceness of this process. Ray would make it 15: whatever
    else computes here, a learner say, would leave next to nothing to envs that do."""
    name = "RAY_worker_niceness"
    given = os.environ.get(name)
    os.environ.setdefault(name, "0")
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]


def _check_address(address: str | None) -> None:
    """Raise StartError unless somebody speaks gRPC there: Ray would wait for a long time, or for ever."""
    told = f"backend_options: address={address!r}"
    if address in (None, "auto"):  # Ray itself looks there
        address = os.environ.get("RAY_ADDRESS") or "auto"
        told = f"RAY_ADDRESS={address!r} in the environment"
    if address in ("auto", "local"):
        return
    if ":" not in address or address.startswith("ray://"):
        raise StartError(f'{told} is neither "host:port", "auto" nor "local"')
    if os.environ.get("RAY_USE_TLS") == "1":
        return  # who does not know the keys gets no answer
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), REACH_TIMEOUT) as probe:
            probe.settimeout(REACH_TIMEOUT)
            probe.sendall(HTTP2_HELLO)
            if probe.recv(4)[3:] != b"\x04":  # the head of a frame with settings
                raise OSError("what answers there does not speak gRPC")
    except (OSError, ValueError) as error:
        raise StartError(f"no Ray cluster answers at {told.removeprefix('backend_options: ')}: {error}") from error


class RayTransport:
    """Actors of a cluster, one for each block."""

    ends_hung_envs = True

    def __new__(cls, options: dict[str, Any], num_envs: int, num_workers: int | None) -> Any:
        """With a delay, one that holds messages back."""
        transport = super().__new__(cls)
        delay = RayOptions.checked(options).delay
        if not delay:
            return transport
        transport.__init__(options, num_envs, num_workers)  # type: ignore[misc]
        inner: Transport = transport
        return DelayedTransport(inner, delay)

    def __init__(self, options: dict[str, Any], num_envs: int, num_workers: int | None):
        self.options = RayOptions.checked(options)
        self.local_workers = self.options.local_workers or max(1, math.floor(self.options.num_cpus))
        self.local_backend = self.options.local_backend or ("processes" if self.local_workers > 1 else "serial")
        if num_workers is not None:
            whole_number("num_workers", num_workers, 1, 2**20)
        self._ray, self._cluster_address = _cluster.enter(self.options.address)
        self._closed, self._group = False, None
        self._listener = Listener()
        try:
            self.num_workers = min(num_envs, num_workers or self._free() or 1)
            self._each_env = num_workers is not None and num_workers > num_envs
            self._await_room(self.num_workers)
            if self.options.placement is not None:
                self._group = self._reserve(self.num_workers)
            self._actor = self._ray.remote(concurrency_groups={"mail": MOST_CALLS, "control": 2})(RayHost)
            self._actor_options = {
                "num_cpus": self.options.num_cpus, "num_gpus": self.options.num_gpus,
                "resources": dict(self.options.resources or {}) or None, "max_restarts": 0, "max_task_retries": 0,
                **self._given(),
            }  # fmt: skip
        except BaseException:
            self.close()
            raise

    def _given(self) -> dict[str, Any]:
        """Options of an actor that older versions of Ray need not know."""
        given: dict[str, Any] = {}
        if self.options.runtime_env is not None:
            given["runtime_env"] = dict(self.options.runtime_env)
        if self.options.labels and self._group is None:
            given["label_selector"] = dict(self.options.labels)
        return given

    # ---- room --------------------------------------------------------------------------------------------------

    def _free(self) -> int:
        """How many actors there is room for now."""
        free = self._ray.available_resources()
        needs = self.options.needs
        return min((math.floor(free.get(name, 0.0) / amount) for name, amount in needs.items()), default=2**20)

    def _most(self) -> int:
        """How many there would be room for if nobody else were there."""
        total, labels = 0, (self.options.labels or {}).items()
        for node in self._ray.nodes():
            own = node.get("Labels") or {}
            if node["Alive"] and all(own.get(key) == value for key, value in labels):
                has, needs = node["Resources"], self.options.needs
                room = (math.floor(has.get(name, 0.0) / amount) for name, amount in needs.items())
                total += min(room, default=2**20)
        return total

    def _await_room(self, count: int) -> None:
        """Raise StartError where so many actors cannot be placed, rather than wait for somebody to add a node."""
        most = self._most()
        if most < count:
            raise self._no_room(count, "has room for", most)
        deadline = time.monotonic() + ROOM_PATIENCE
        while (free := self._free()) < count:
            if time.monotonic() > deadline:
                raise self._no_room(count, "has, beside what others use, room for", free)
            time.sleep(0.1)

    def _no_room(self, count: int, words: str, room: int) -> StartError:
        needs = ", ".join(f"{amount:g} {name}" for name, amount in self.options.needs.items())
        labels = f" on nodes with the labels {dict(self.options.labels)}" if self.options.labels else ""
        each = " (one for each env)" * self._each_env
        actors = f"1 Ray actor with {needs}" if count == 1 else f"{count} Ray actors{each} with {needs} each"
        has = ", ".join(
            f"{v:g} {k}" for k, v in sorted(self._ray.cluster_resources().items()) if k in self.options.needs
        )
        return StartError(
            f"{actors}{labels} {'is' if count == 1 else 'are'} needed, and the cluster ({has or 'none of these'}) "
            f"{words} {room}: use fewer workers, close other pools, or ask for less by backend_options "
            "(num_cpus, num_gpus, resources)"
        )

    def _reserve(self, count: int) -> Any:
        from ray.util.placement_group import placement_group, remove_placement_group

        labels = {"bundle_label_selector": [dict(self.options.labels)] * count} if self.options.labels else {}
        bundles = [self.options.needs or {"CPU": 0.001}] * count
        group = placement_group(bundles, strategy=self.options.placement, **labels)
        if not group.wait(self.options.place_timeout if self._fits_strictly(count) else 1.0):
            remove_placement_group(group)
            raise StartError(
                f"Ray cannot place {count} actors with placement={self.options.placement!r} on the nodes that there "
                "are: use fewer workers, or another placement"
            )
        return group

    def _fits_strictly(self, count: int) -> bool:
        """Whether nodes are enough for what is asked: Ray itself would wait for more of them."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        return self.options.placement != "STRICT_SPREAD" or len(alive) >= count

    # ---- hosts -------------------------------------------------------------------------------------------------

    def start(self, index: int, deliver: Deliver) -> RayLink:
        """See Transport."""
        options = dict(self._actor_options)
        if self._group is not None:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, index)
        elif self._most() < 1:
            raise self._no_room(1, "has room for", 0)
        try:
            actor = self._actor.options(**options).remote()
        except Exception as error:
            raise StartError(f"Ray cannot start an actor: {type(error).__name__}: {error}") from error
        return RayLink(self._ray, actor, deliver, self.options.place_timeout, self._listener)

    def close(self) -> None:
        """See Transport."""
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
        _cluster.leave(self._cluster_address)

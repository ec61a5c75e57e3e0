"""Blocks of envs in the actors of a Ray cluster: one message each way, with one buffer, is a batch of an actor.

A message is a call of the actor, or goes by the short way of `ray_lane`. Several may be under way for one actor: the
next one comes while it still steps, which is how the network's time is hidden.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from shoal.backends.far import Deliver, Lost, Transport
from shoal.checks import check_choice, check_names, number, positive_number, whole_number
from shoal.deadline import NEVER, Deadline
from shoal.errors import StartError
from shoal.extras import install
from shoal.far.delay import DelayedTransport
from shoal.far.host import Host
from shoal.far.ray_lane import SLOT, SLOTS, Pace, Ring, make_ring
from shoal.rows import BATCHED

__all__ = ["RayOptions", "RayTransport"]

PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
LOCAL_BACKENDS = ("serial", "threads", "processes", *BATCHED)
ROOM_PATIENCE = 5.0  # seconds until what a closed pool has given back must be free again, as far as the cluster knows
REACH_TIMEOUT = 3.0  # seconds for a cluster's address to be answered at
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # answered by any gRPC server
BY_BUFFER = 1 << 16  # bytes from which a message travels beside the pickle, without a copy
TOO_LARGE = b""  # in the place of answers that must be fetched by a call
MOST_CALLS = 32  # of one actor at a time
SWITCH_INTERVAL = 500e-6  # seconds for which an env that computes keeps those from the interpreter who bring messages
SHORTEST_LOOK = 50e-6  # seconds of a wait for local workers, until the next look for messages


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


class Outpost:
    """What an actor is: a host, and whoever brings it messages. They come as arguments of `serve`, whose results are
    the answers, or by the short way.

    Args:
        host: one for tests.
    """

    def __init__(self, host: Host | None = None) -> None:
        if host is None:
            host = Host(_here())
            sys.setswitchinterval(SWITCH_INTERVAL)
        self._host = host
        self._inbox: queue.SimpleQueue[_Letter | None] = queue.SimpleQueue()
        self._there: Ring | None = None
        self._back: Ring | None = None
        self._large: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()

    # ---- calls: each has a thread of Ray's ---------------------------------------------------------------------

    def serve(self, data: Any) -> list[Any]:
        """Take a message: an answer, of this or another one."""
        answers: Future[list[bytes]] = Future()
        self._inbox.put((data, answers.set_result))
        if not self._host.takes_turns:
            self._host.wake()
        return _light(answers.result())

    def fetch(self) -> list[Any]:
        """Answers that are too large for the short way."""
        return _light(self._large.get())

    def alive(self, node: str) -> Ring | None:
        """Returns once there is an actor: the short way back to the caller's node, if there is one."""
        ray = _ray()
        self._back = make_ring(ray, ray.get_runtime_context().current_actor, node)
        return self._back

    def listen(self, there: Ring) -> None:
        """From now on messages may come by the short way too."""
        self._there = there
        self._inbox.put(None)

    def peek(self) -> bytes:
        """What the envs are doing, asked while they are at it."""
        return self._host.peek()

    # ---- the thread that steps ---------------------------------------------------------------------------------

    def work(self) -> None:
        """Take messages and have them answered, for as long as there is an actor. Envs are built and stepped in this
        one thread, or by workers of their own, and messages come and go meanwhile."""
        pace = Pace()
        waiting: list[Callable[[list[bytes]], None]] = []
        while True:
            if self._host.idle or not self._host.takes_turns:
                while (letter := self._next(pace)) is not None:
                    pace.came()
                    data, reply = letter
                    waiting.append(reply)
                    self._host.admit(data)  # one that comes too early waits with the others: each has one answer
                    if self._host.takes_turns:
                        break
            if not self._host.idle:
                look = not self._host.takes_turns and self._there is not None
                for answer in self._host.poll(Deadline.after(max(pace.sleep, SHORTEST_LOOK)) if look else NEVER):
                    waiting.pop(0)([answer])
                    pace.restart()

    def _next(self, pace: Pace) -> _Letter | None:
        """The next message, and who wants its answer. Waits for it, for a while, where there is nothing else to do."""
        with contextlib.suppress(queue.Empty):
            return self._inbox.get_nowait()
        if self._there is None:
            return self._inbox.get() if self._host.idle else None
        data = self._there.take()
        if data is not None:
            return data, self._send
        if self._host.idle:
            seconds = pace.sleep
            if seconds > 0:
                with contextlib.suppress(queue.Empty):
                    return self._inbox.get(timeout=seconds)
            else:
                os.sched_yield()
        return None

    def _send(self, answers: list[bytes]) -> None:
        """Answer by the short way."""
        assert self._back is not None
        data = pickle.dumps(answers)
        if len(data) > SLOT:
            self._large.put(answers)
            data = TOO_LARGE
        if not self._back.put(data):
            raise RuntimeError("nobody takes its answers")


_Letter = tuple[Any, Callable[[list[bytes]], None]]


def _here() -> str:
    ray = _ray()
    node = ray.get_runtime_context().get_node_id()
    return f"{ray.util.get_node_ip_address()} ({node[:8]})"


def _light(answers: list[bytes]) -> list[Any]:
    """Large ones as arrays, which Ray neither copies nor pickles."""
    return [np.frombuffer(one, np.uint8) if len(one) >= BY_BUFFER else one for one in answers]


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
        if address is not None and joining and address != "auto":
            if ":" not in address:
                raise StartError(f'backend_options: address={address!r} is neither "host:port", "auto" nor "local"')
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


def _check_address(address: str) -> None:
    """Raise StartError unless somebody speaks gRPC there: Ray would wait for a long time, or for ever."""
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
        raise StartError(f"no Ray cluster answers at address={address!r}: {error}") from error


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
            self._actor = self._ray.remote(concurrency_groups={"mail": MOST_CALLS, "control": 2})(Outpost)
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
        has = ", ".join(
            f"{v:g} {k}" for k, v in sorted(self._ray.cluster_resources().items()) if k in self.options.needs
        )
        return StartError(
            f"{count} Ray actors{' (one for each env)' * self._each_env} with {needs} each{labels} are needed, and the "
            f"cluster ({has or 'none of these'}) "
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


class Listener:
    """The thread that looks for answers that come by the short way. It starts with the first link that has one."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[RayLink] = queue.SimpleQueue()
        self._links: list[RayLink] = []
        self._work = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None

    def welcome(self, link: RayLink) -> None:
        """Open its way there."""
        self._new.put(link)
        self.wake()
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="shoal-listener", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Something was sent."""
        self._work.set()

    def close(self) -> None:
        """End the thread."""
        self._over = True
        self.wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _main(self) -> None:
        pace = Pace()
        while not self._over:
            while not self._new.empty():
                link = self._new.get()
                link.open()
                self._links.append(link)
            if sum(link.look() for link in self._links):  # all of them
                pace.came()
            elif any(link.underway for link in self._links):
                if (seconds := pace.sleep) > 0:
                    time.sleep(seconds)
                else:
                    os.sched_yield()
            else:
                self._links = [link for link in self._links if not link.killed]
                self._work.wait()
                self._work.clear()
                pace.restart()


class RayLink:
    """One actor."""

    def __init__(self, ray: Any, actor: Any, deliver: Deliver, place_timeout: float, listener: Listener):
        self._ray, self._actor, self._deliver, self._listener = ray, actor, deliver, listener
        self._serve = actor.serve.options(concurrency_group="mail")
        self.killed = False
        self._there: Ring | None = None
        self._back: Ring | None = None
        self._sent = self._heard = 0
        self._placed = threading.Timer(place_timeout, self._give_up, (place_timeout,))
        self._placed.daemon = True
        self._placed.start()
        node = ray.get_runtime_context().get_node_id()
        alive = actor.alive.options(concurrency_group="control").remote(node)
        alive.future().add_done_callback(self._came_up)
        self._call(actor.work)  # ends with the actor, of which we hear

    def _came_up(self, future: Future[Ring | None]) -> None:
        """In a thread of Ray's own, where Ray must not be asked for anything."""
        self._placed.cancel()
        if future.exception() is None and future.result() is not None:
            self._back = future.result()
            self._listener.welcome(self)

    # ---- the short way -----------------------------------------------------------------------------------------

    @property
    def underway(self) -> int:
        """Messages that have gone by the short way and are not answered."""
        return 0 if self.killed else self._sent - self._heard

    def open(self) -> None:
        """Make the short way there."""
        try:
            there = make_ring(self._ray, self._actor, self._ray.get_runtime_context().get_node_id())
            if there is not None:
                self._actor.listen.options(concurrency_group="control").remote(there)
                self._there = there
        except Exception:
            return  # Ray was shut down

    def look(self) -> bool:
        """Deliver an answer, if one has come: whether it has."""
        if self._back is None or not self.underway:
            return False
        try:
            data = self._back.take()
        except Exception as error:  # Ray is gone
            self._heard, self._there = self._sent, None
            self._deliver(Lost(_story(error)))
            return False
        if data is None:
            return False
        self._heard += 1
        if data == TOO_LARGE:
            self._there = None  # as will be those that follow
            self._call(self._actor.fetch.options(concurrency_group="control"))
        else:
            for answer in pickle.loads(data):
                self._deliver(answer)
        return True

    # ---- messages ----------------------------------------------------------------------------------------------

    def post(self, data: bytes) -> None:
        """See Link."""
        there = self._there
        if there is not None and len(data) <= SLOT and self.underway < SLOTS:
            self._sent += 1  # before the listener can have an answer
            if there.put(data):
                self._listener.wake()
                return
            self._sent, self._there = self._sent - 1, None
        argument = np.frombuffer(data, np.uint8) if len(data) >= BY_BUFFER else data
        self._call(self._serve, argument)

    def peek(self) -> None:
        """See Link."""
        self._call(self._actor.peek.options(concurrency_group="control"))

    def _call(self, method: Any, *args: Any) -> None:
        try:
            method.remote(*args).future().add_done_callback(self._answered)
        except Exception as error:  # Ray was shut down under our feet, say
            self._deliver(Lost(_story(error)))

    def _answered(self, future: Future[Any]) -> None:
        """In a thread of Ray's own: hand over, and return."""
        if self.killed:
            return
        error = future.exception()
        if error is not None:
            self._deliver(Lost(_story(error)))
            return
        result = future.result()
        for answer in result if isinstance(result, list) else [result]:
            self._deliver(answer)

    def _give_up(self, seconds: float) -> None:
        self.kill()
        self._deliver(Lost(f"was not started by Ray within place_timeout={seconds:g} s"))

    def kill(self) -> None:
        """See Link."""
        self._placed.cancel()
        if not self.killed:
            self.killed = True
            try:
                self._ray.kill(self._actor, no_restart=True)
            except Exception:
                return  # it is gone, or Ray is
            finally:
                self._listener.wake()


def _story(error: BaseException) -> str:
    """Why an actor does not answer, to go on after its name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines)
    if "node has died" in text or "node died" in text or "NODE_DIED" in text:
        return "died with its node"
    if "running low on memory" in text:
        return "was ended by Ray because its node ran out of memory: use fewer envs, or larger nodes"
    if type(error).__name__ == "ActorUnavailableError":
        return "cannot be reached any more: its node, or the way there, is gone"
    if "connection error code 2" in text or "died unexpectedly" in text:
        return (
            "has ended without a word: somebody has killed it, the system for want of memory perhaps, native code of "
            "an env crashed, or an env has called os._exit"
        )
    details = [line for line in lines if "exit detail" in line or "exit type" in line or "killed" in line]
    found = " ".join(details) or (lines[0] if lines else "Ray gives no reason")
    return f"is gone: {type(error).__name__}: {found[:400]}"

"""What carries messages between a pool and its hosts: the protocols `Transport` and `Link`, and who implements them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, get_type_hints

from shoal.errors import WorkerDied
from shoal.support.checks import check_choice, check_names, number, positive_number, whole_number

Options = TypeVar("Options")
# The module and name that make the transport of a backend. It is imported on demand, as it needs a package of its own.
REMOTE = {"ray": ("shoal.remote.ray.transport", "RayTransport"), "mpi": ("shoal.remote.mpi.transport", "MpiTransport")}


@dataclass(frozen=True)
class HostLost:
    """Delivered in place of an answer when a host no longer exists."""

    why: str  # the end of a sentence that begins with the worker
    env_id: int | None = None  # the env that the host was running, if known
    for_good: bool = False  # whether the host cannot be replaced either


# Takes an answer (bytes or another buffer) or HostLost. Any thread may call it; it never waits.
Deliver = Callable[[Any], None]


class Link(Protocol):
    """The caller's end of the connection to one host.

    No method raises or waits for the host. One thread calls them all, except for `kill`: any thread may call it, more
    than once.
    """

    def post(self, data: bytes) -> None:
        """Send a message to the host's `admit`. Each answer of the host, or HostLost, is delivered later."""

    def peek(self) -> None:
        """Deliver what the host's `peek` returns, even while the host is stepping envs."""

    def kill(self) -> None:
        """End the host at once, with all its processes. After that nothing needs to be delivered."""


class Transport(Protocol):
    """Starts hosts elsewhere and carries messages to them. Each pool has one, made by `make_transport`.

    The constructor raises ShoalError or ValueError within seconds if it cannot work. On the host's side, the transport
    makes a `BlockHost`, gives it each message (`admit`) and sends back what its `poll` returns, until it is `over`.
    Messages may arrive in any order. A message may be lost only if HostLost is delivered. A host must not outlive the
    caller's process.
    """

    num_workers: int  # the number of hosts: as requested, or as many as there is room for
    local_backend: str  # the backend that a host runs its envs with
    local_workers: int  # and its number of workers
    ends_hung_envs: bool  # whether `kill` ends a host even if one of its envs does not return

    def start(self, index: int, deliver: Deliver) -> Link:
        """Begin to start the host of this index, or its replacement, without waiting for it.

        Raises StartError if there is no room for it.
        """
        ...

    def close(self) -> None:
        """Release everything, after all links were killed. May be called again."""


def make_transport(backend: str, options: Mapping[str, Any], num_envs: int, num_workers: int | None) -> Transport:
    """Make the transport of a backend. Raises ShoalError or ValueError if it cannot work."""
    if num_workers is not None:
        worker_count("num_workers", num_workers)
    module, name = REMOTE[backend]
    transport: Transport = getattr(importlib.import_module(module), name)(dict(options), num_envs, num_workers)
    return transport


def host_died(
    index: int, env_ids: range, node: str, pid: int | None, why: str, env_id: int | None = None
) -> WorkerDied:
    """The error for a worker that has lost its host; `why` ends the sentence, `env_id` is the env that was running."""
    place = f"on node {node}, pid {pid}, " if node else ""
    message = f"worker {index} ({place}{in_words(env_ids)}) {why}"
    return WorkerDied(message, index, pid, None, env_ids, env_id, node=node)


def in_words(env_ids: range) -> str:
    return f"env {env_ids.start}" if len(env_ids) == 1 else f"envs {env_ids.start} to {env_ids.stop - 1}"


def checked(kind: type[Options], given: Mapping[str, Any]) -> Options:
    """The given options as an object of this dataclass. Raises ValueError for those that make no sense.

    An option `name: Annotated[type, check]` is checked by `check(name, value)`, unless None is both given and its
    default.
    """
    hints = get_type_hints(kind, include_extras=True)
    check_names("backend_options", given, list(hints))
    for name, value in given.items():
        for check in getattr(hints[name], "__metadata__", ()):
            if value is not None or getattr(kind, name) is not None:
                check(f"backend_options: {name}", value)
    return kind(**given)


def one_of(*choices: str) -> Any:
    return partial(check_choice, allowed=choices)


def dictionary(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: expected a dict, found {value!r}")


amount = partial(number, low=0, high=1e6)
worker_count = partial(whole_number, low=1, high=2**20)
seconds = positive_number
host_backend = one_of("serial", "threads", "processes", "jax", "compiled", "cuda")  # what a host can run its envs with

"""The connection of this process to a Ray cluster."""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

from shoal.errors import StartError
from shoal.support.optional_dependencies import install

REACH_TIMEOUT = 3.0  # seconds until a cluster must answer at its address
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # every gRPC server answers it
NICENESS = "RAY_worker_niceness"


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
                self._ours = found = _address(ray)
            elif address not in (None, "auto", "local", found := _address(ray)):
                raise StartError(
                    f"Ray is connected to {found} in this process already, and backend_options ask for "
                    f"address={address!r}: call ray.shutdown() first, or leave the address out"
                )
            self._users[found] += 1
        return ray, found

    def leave(self, address: str) -> None:
        """End the use of a cluster."""
        with self._lock:
            self._users[address] -= 1
            if self._users[address] == 0 and address == self._ours:
                self._ours, ray = None, import_ray()
                if ray.is_initialized() and _address(ray) == address:
                    ray.shutdown()


cluster = RayCluster()


def _address(ray: Any) -> str:
    return str(ray.get_runtime_context().gcs_address)


def connect(ray: Any, address: str | None) -> None:
    """Join the cluster at this address, or start one. Raises StartError if that is not possible."""
    joining = address not in (None, "local")
    _check_address(address)
    try:
        with _same_niceness():
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


@contextlib.contextmanager
def _same_niceness() -> Iterator[None]:
    """Give the actors of a cluster that is started meanwhile the niceness of this process.

    By default Ray gives them 15. Then envs that compute get very little time beside any other process that does, for
    example a learner.
    """
    given = os.environ.get(NICENESS)
    os.environ.setdefault(NICENESS, "0")
    try:
        yield
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

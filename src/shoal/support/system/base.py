"""What Shoal asks of an operating system. What a system lacks is left as it is here."""

from __future__ import annotations

import mmap
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from shoal.errors import StartError


class System:
    """An operating system, as far as Shoal depends on it."""

    name = "this system"
    has_processes = False  # whether envs can run in worker processes
    start_methods: tuple[str, ...] = ("spawn",)  # how these can be started; the first one is the default
    has_pidfds = False  # whether a process can be held by a descriptor
    stack_signal: int | None = None  # has a worker write its Python stack down
    proc = Path("/no/proc")  # the table of processes as files; a folder that does not exist where there is none

    def _lacks(self, what: str) -> NoReturn:
        raise StartError(f"{self.name} has no {what} that Shoal could use: run on Linux, macOS or WSL")

    # ---- memory and files --------------------------------------------------------------------------------------

    def anonymous_file(self, label: str) -> int:
        """Return the descriptor of a new file without a name; the label is for those who look at the process."""
        self._lacks("files without a name")

    def shared_memory(self, label: str, size: int) -> int:
        """Return a descriptor of new memory, all zeros, that other processes can map if it is sent to them."""
        self._lacks("shared memory")

    def map_shared(self, fd: int, size: int) -> Any:
        """Return the memory behind a descriptor as a ctypes array, which is unmapped when it is freed."""
        self._lacks("shared memory")

    def map_private(self, size: int) -> Any:
        """Return new memory, all zeros, for this process alone."""
        return mmap.mmap(-1, size)

    def unshare(self, memory: Any, fd: int) -> None:
        """In a forked child: what is written into this shared memory from now on is for this process alone."""

    # ---- processes ---------------------------------------------------------------------------------------------

    def after_fork(self, in_child: Callable[[], None]) -> None:
        """Have a function called in each child that this process forks."""

    def open_process(self, pid: int) -> int:
        """Return a descriptor that becomes readable when the process ends; -1 where there is no such thing."""
        return -1

    def signal_process(self, handle: int, number: int) -> None:
        """Send a signal to the process of such a descriptor."""
        self._lacks("descriptors of processes")

    def variable_of(self, pid: int, name: str) -> str:
        """Return an environment variable that a process was started with; "" if it has none, or is gone."""
        return ""

    def inherit_orphans(self) -> None:
        """Become the parent of all descendants whose parents end."""

    def continue_without_parent(self) -> None:
        """Go on, even if stopped, when the parent has ended."""

    def wait_for_hangup(self, fd: int) -> None:
        """Return when the other end of a socket was closed. Data in it is left there."""
        self._lacks("such sockets")

    def times_blocked(self) -> int:
        """Return how often this process gave its core up because it had to wait."""
        return 0

    def sleep_sharply(self) -> None:
        """Let sleeps of this thread end on time, where they would end later to save power."""

    # ---- requests to the launcher ------------------------------------------------------------------------------

    def request_channel(self) -> tuple[socket.socket, socket.socket]:
        """Return two ends of a channel for requests: the caller's and the launcher's."""
        self._lacks("such sockets")

    def send_request(self, channel: socket.socket, data: bytes, fds: Sequence[int]) -> None:
        """Send a request with descriptors, which may be closed afterwards."""
        self._lacks("such sockets")

    def receive_request(self, channel: socket.socket) -> tuple[bytes, list[int]]:
        """Return the next request and its descriptors; no bytes when the other end is closed."""
        self._lacks("such sockets")

"""Linux: memory and processes as descriptors, a table of processes as files, and a launcher that inherits orphans."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if sys.platform != "linux":
    raise ImportError("this module is for Linux")

from shoal.support.system.posix import MAP_FIXED, MOST_FDS, Posix, map_memory

LARGEST_REQUEST = 1 << 20
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0)
PR_SET_PDEATHSIG, PR_SET_TIMERSLACK, PR_SET_CHILD_SUBREAPER = 1, 29, 36


class Linux(Posix):
    """What only Linux has."""

    name = "Linux"
    start_methods = ("forkserver", "spawn", "fork")
    has_pidfds = hasattr(os, "pidfd_open")
    stack_signal = signal.SIGRTMAX - 5
    proc = Path("/proc")

    def anonymous_file(self, label: str) -> int:
        if hasattr(os, "memfd_create"):
            return os.memfd_create(label, os.MFD_CLOEXEC)
        return super().anonymous_file(label)

    def shared_memory(self, label: str, size: int) -> int:
        fd = self.anonymous_file(label)
        try:
            os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def unshare(self, memory: Any, fd: int) -> None:
        flags = mmap.MAP_PRIVATE | MAP_FIXED | NO_RESERVE
        map_memory(fd, len(memory), flags, ctypes.addressof(memory))

    def open_process(self, pid: int) -> int:
        return os.pidfd_open(pid) if self.has_pidfds else -1

    def signal_process(self, handle: int, number: int) -> None:
        signal.pidfd_send_signal(handle, number)

    def variable_of(self, pid: int, name: str) -> str:
        # psutil reads whole environments into dicts, which takes three times as long for a table of processes.
        with contextlib.suppress(OSError):
            for entry in (self.proc / str(pid) / "environ").read_bytes().split(b"\0"):
                found, _, value = entry.partition(b"=")
                if found == name.encode():
                    return value.decode(errors="replace")
        return ""

    def inherit_orphans(self) -> None:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)

    def continue_without_parent(self) -> None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGCONT)

    def sleep_sharply(self) -> None:
        _prctl(PR_SET_TIMERSLACK, 1)  # it adds 50 us to sleeps of a thread unless told not to

    def wait_for_hangup(self, fd: int) -> None:
        poller = select.poll()
        poller.register(fd, 0)  # hang-up is reported without asking, and data does not wake us
        while not any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poller.poll()):
            continue

    def request_channel(self) -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def send_request(self, channel: socket.socket, data: bytes, fds: Sequence[int]) -> None:
        socket.send_fds(channel, [data], list(fds))

    def receive_request(self, channel: socket.socket) -> tuple[bytes, list[int]]:
        data, fds, _, _ = socket.recv_fds(channel, LARGEST_REQUEST, MOST_FDS)
        return data, fds


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)

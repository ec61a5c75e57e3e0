"""Any POSIX system, macOS first of all: no futexes, memfd, pidfd, /proc or prctl, and no packets between sockets.

New interpreters are the default for worker processes. A fork is dangerous on macOS, where the system's own libraries
start threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import signal
import socket
import struct
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from shoal.support.system.base import System

if sys.platform == "win32":
    raise ImportError("this module is for POSIX systems")

MAP_FIXED = 0x10  # as Linux and macOS have it; `mmap` does not know it
MOST_FDS = 8
LOOK_EACH = 0.25  # seconds between two looks whether the other end is closed
_LENGTH = struct.Struct("=I")
_RECEIVED = b"A"


class Posix(System):
    """What every POSIX system has."""

    name = "macOS" if sys.platform == "darwin" else "this system"
    has_processes = True
    start_methods: tuple[str, ...] = ("spawn", "forkserver", "fork")
    stack_signal: int | None = signal.SIGURG  # the one that is ignored where nothing handles it

    def anonymous_file(self, label: str) -> int:
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())

    def shared_memory(self, label: str, size: int) -> int:
        from _posixshmem import shm_open, shm_unlink  # type: ignore[import-not-found,unused-ignore]

        # macOS allows 31 characters. The name is gone before another process could use it.
        name = f"/{label}-{uuid.uuid4().hex[:16]}"
        fd: int = shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            shm_unlink(name)
            os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def map_shared(self, fd: int, size: int) -> Any:
        # Not by `mmap.mmap`: that keeps a descriptor of its own for as long, in threads that hang and arrays that
        # users hold.
        address = map_memory(fd, size, mmap.MAP_SHARED)
        memory = (ctypes.c_char * size).from_address(address)
        # At the interpreter's exit others may still be at work on it.
        weakref.finalize(memory, _libc().munmap, address, size).atexit = False
        return memory

    def map_private(self, size: int) -> Any:
        return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def unshare(self, memory: Any, fd: int) -> None:
        # macOS maps such memory shared or not at all: so it is copied.
        size, address = len(memory), ctypes.addressof(memory)
        copy = ctypes.string_at(address, size)
        map_memory(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED, address)
        ctypes.memmove(address, copy, size)

    def after_fork(self, in_child: Callable[[], None]) -> None:
        os.register_at_fork(after_in_child=in_child)

    def variable_of(self, pid: int, name: str) -> str:
        import psutil

        with contextlib.suppress(psutil.Error, OSError):
            return str(psutil.Process(pid).environ().get(name, ""))
        return ""

    def wait_for_hangup(self, fd: int) -> None:
        # The launcher, which is the parent, ends with the caller too. Data that the main thread has not read yet hides
        # the end of the channel, but not that of the parent.
        parent = os.getppid()
        with socket.socket(fileno=os.dup(fd)) as channel:
            while os.getppid() == parent and not _is_closed(channel):
                time.sleep(LOOK_EACH)

    def times_blocked(self) -> int:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw

    def request_channel(self) -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

    def send_request(self, channel: socket.socket, data: bytes, fds: Sequence[int]) -> None:
        socket.send_fds(channel, [_LENGTH.pack(len(data))], list(fds))
        channel.sendall(data)
        # On macOS, descriptors that are closed before they were received are lost.
        if channel.recv(1) != _RECEIVED:
            raise ConnectionResetError("the launcher is gone")

    def receive_request(self, channel: socket.socket) -> tuple[bytes, list[int]]:
        head, fds, _, _ = socket.recv_fds(channel, _LENGTH.size, MOST_FDS)
        if not head:
            return b"", fds
        blocking = channel.getblocking()
        channel.setblocking(True)  # the rest is on its way
        try:
            head += _read(channel, _LENGTH.size - len(head))
            data = _read(channel, *_LENGTH.unpack(head))
            channel.sendall(_RECEIVED)
            return data, fds
        except (EOFError, OSError):  # the caller has ended in the middle of the request
            return b"", fds
        finally:
            channel.setblocking(blocking)


def _read(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = channel.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _is_closed(channel: socket.socket) -> bool:
    try:
        return channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def map_memory(fd: int, size: int, flags: int, address: int | None = None) -> int:
    """Map a file, or new memory (-1), at an address of ours or anywhere; returns where it lies."""
    found = _libc().mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(found)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc

"""Kernels in plain Python: what runs envs of compiled code where the C core was not built."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.native import layout

__all__ = ["Kernel"]

Array = npt.NDArray[Any]

TALLY_BEGAN, TALLY_FAILED, TALLY_ENV, TALLY_PHASE = (
    layout.TALLY.index(name) for name in ("began", "failed", "env", "phase")
)
_KERNEL = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64
)


class Kernel:
    """Envs in compiled code. The twin has no threads of its own: the caller steps them all.

    Args:
        function: the address of a kernel; see native/task.h.
        task: int64, the kernel's table.
        envs, agents: how many envs, and lanes of each.
        threads: for the C core.
        stats: the worker's row of the slab's `stats`.
        failed: uint8 [envs], where it is noted which envs have failed, and in what.
        on_failed: called after a run in which some have.
    """

    def __init__(
        self,
        function: int,
        task: Array,
        envs: int,
        agents: int,
        threads: int,
        stats: Array,
        failed: Array,
        on_failed: Callable[[], None],
    ):
        self._function = _KERNEL(function)
        self._task, self._envs, self._agents, self._stats = task, envs, agents, stats
        self._failed, self._on_failed = failed, on_failed
        self._tally = np.zeros(8, np.int64)

    def run(self) -> int:
        """Answer all lanes that were asked; returns how many."""
        task, agents, lanes = self._task.copy(), self._agents, self._envs * self._agents
        names = ("requested", "answered", "op", "slots", "done_ns")
        requested, answered, op, slots, done_ns = (_lane_array(task, name, lanes) for name in names)
        asked = np.flatnonzero((requested != answered)[agents - 1 :: agents])
        kinds = np.stack([asked - np.arange(len(asked)), op[asked * agents], slots[asked * agents]])
        edges = np.flatnonzero((np.diff(kinds) != 0).any(axis=0)) + 1
        began = time.monotonic_ns()
        for run in np.split(asked, edges) if len(asked) else ():  # neighbours that do the same, into the same frame
            start, stop = int(run[0]), int(run[-1]) + 1
            task[layout.TASK_RESETS], task[layout.TASK_SLOT] = op[start * agents], slots[start * agents]
            self._step(task, start, stop)
            at = slice(start * agents, stop * agents)
            done_ns[at], answered[at] = began, requested[at]
        self._settle(len(asked) * agents, began)
        return len(asked) * agents

    def _step(self, task: Array, start: int, stop: int) -> None:
        result, error, at = ctypes.c_void_p(), ctypes.c_void_p(), start
        while at < stop:
            code = self._function(
                ctypes.byref(result), ctypes.byref(error), task.ctypes.data, at, stop, self._tally.ctypes.data
            )
            if code in (0, -2):
                break
            env, phase = self._tally[TALLY_ENV], self._tally[TALLY_PHASE]
            self._failed[env] = phase or layout.PHASE_UNKNOWN
            self._tally[TALLY_FAILED] += 1
            at = int(env) + 1
        self._finish(task, start, stop)

    def _settle(self, steps: int, began_ns: int) -> None:
        self._stats[layout.STAT_STEPS] += steps
        self._stats[layout.STAT_EPISODES] += self._tally[TALLY_BEGAN]
        self._stats[layout.STAT_BUSY_NS] += time.monotonic_ns() - began_ns
        failed = self._tally[TALLY_FAILED]
        self._tally[:] = 0
        if failed:
            self._on_failed()

    def _finish(self, task: Array, start: int, stop: int) -> None:
        """Fill in what follows from what the kernel has written; as in native/task.h."""
        agents, lanes = self._agents, int(task[layout.TASK_LANES])
        at = slice(start * agents, stop * agents)
        frame = {
            name: _lane_array(task, name, lanes, int(task[layout.TASK_SLOT]))[at] for name in layout.TASK_FRAME_FIELDS
        }
        ended, run_return, run_length = (
            _lane_array(task, name, lanes)[at] for name in ("ended", "run_return", "run_length")
        )
        for name in ("status", "terminated"):
            frame[name][:] = np.repeat(frame[name][::agents], agents)
        begins, fresh = frame["status"] == layout.MARK_BEGINS, frame["status"] != 0
        length = np.where(begins, 0, run_length + 1)
        total = np.where(begins, 0.0, run_return + frame["reward"])
        frame["truncated"][:] = length >= task[layout.TASK_LIMIT] if task[layout.TASK_LIMIT] > 0 else False
        frame["began"][:], frame["status"][:] = fresh, frame["status"] & (layout.MARK_BEGINS - 1)
        frame["episode_return"][:], frame["episode_length"][:] = total, length
        run_return[:], run_length[:] = np.where(fresh, 0.0, total), np.where(fresh, 0, length)
        ended[:] = (frame["terminated"] | frame["truncated"]) & ~fresh

    def rollout(self, task: Array, policy: int, steps: int, row_bytes: tuple[int, ...]) -> None:
        """Let a policy, which is a kernel too, choose actions for so many steps. Frame 0 has the first observations;
        actions are written, `row_bytes` for each leaf and step, and answers into the frames from 1 on."""
        choose, now = _KERNEL(policy), task.copy()
        result, error = ctypes.c_void_p(), ctypes.c_void_p()
        lanes = self._envs * self._agents
        now[layout.TASK_RESETS] = 0
        if not row_bytes:  # the policy makes the steps itself
            began, now[layout.TASK_SLOT], now[layout.TASK_UNTIL] = time.monotonic_ns(), 0, steps
            tally = self._tally.ctypes.data
            choose(ctypes.byref(result), ctypes.byref(error), now.ctypes.data, 0, self._envs, tally)
            self._settle(lanes * steps, began)
            return
        for t in range(steps):
            for leaf, nbytes in enumerate(row_bytes):
                place = layout.TASK_LEAVES + layout.LEAF_PLACES * leaf
                now[place] = task[place] + t * nbytes
            began, now[layout.TASK_SLOT] = time.monotonic_ns(), t
            choose(ctypes.byref(result), ctypes.byref(error), now.ctypes.data, 0, lanes, 0)
            now[layout.TASK_SLOT] = t + 1
            self._step(now, 0, self._envs)
            self._settle(lanes, began)

    def close(self) -> None:
        """Nothing to end."""


def _array_at(address: int, count: int, dtype: str) -> Array:
    """The memory at an address."""
    nbytes = count * np.dtype(dtype).itemsize
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, dtype)


def _lane_array(task: Array, name: str, lanes: int, frame: int = 0) -> Array:
    """A field of all lanes, in one frame if it has frames."""
    [dtype] = (row.dtype for row in layout.FIELDS if row.name == ("slot" if name == "slots" else name))
    address = int(task[layout.TASK.index(name)]) + frame * lanes * np.dtype(dtype).itemsize
    return _array_at(address, lanes, dtype.replace("?", "u1"))

"""Kernels in plain Python: what runs envs of compiled code where the C core was not built."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.native.counters import STAT_BUSY_NS, STAT_EPISODES, STAT_STEPS

__all__ = ["Kernel"]

Array = npt.NDArray[Any]

# Of native/task.h.
TASK_WHOLE, TASK_SLOT, TASK_NOW_NS, TASK_LANES = range(4)
TASK_LIMIT, TASK_LANE_FIELDS, TASK_LEAVES, LEAF_PLACES = 6, 8, 30, 4
MARK_BEGINS, PHASE_UNKNOWN = 128, 4
_KERNEL_TYPES = {
    "lanes": {"requested": "u8", "answered": "u8", "op": "u1", "slots": "u1", "done_ns": "i8", "ended": "u1",
              "run_return": "f8", "run_length": "i8"},
    "frames": {"reward": "f8", "terminated": "u1", "truncated": "u1", "began": "u1", "status": "u1",
               "episode_return": "f8", "episode_length": "i8"},
}  # fmt: skip
TALLY_ANSWERED, TALLY_BEGAN, TALLY_STATUS, TALLY_FAILED, TALLY_ENV, TALLY_PHASE = range(6)
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
        self._task[TASK_WHOLE], self._task[TASK_NOW_NS] = 0, time.monotonic_ns()
        return self._step(self._task)

    def _step(self, task: Array) -> int:
        began = time.monotonic_ns()
        result, error, start = ctypes.c_void_p(), ctypes.c_void_p(), 0
        self._tally[:] = 0
        failures = 0
        while start < self._envs:
            code = self._function(
                ctypes.byref(result), ctypes.byref(error), task.ctypes.data, start, self._envs, self._tally.ctypes.data
            )
            if code in (0, -2):
                break
            env, phase = self._tally[TALLY_ENV], self._tally[TALLY_PHASE]
            self._failed[env] = phase or PHASE_UNKNOWN
            failures, start = failures + 1, int(env) + 1
        self._finish(task)
        whole = task[TASK_WHOLE] != 0
        self._stats[STAT_STEPS] += self._envs * self._agents if whole else self._tally[TALLY_ANSWERED]
        self._stats[STAT_EPISODES] += self._tally[TALLY_BEGAN]
        self._stats[STAT_BUSY_NS] += time.monotonic_ns() - began
        if failures:
            self._on_failed()
        return int(self._tally[TALLY_ANSWERED])

    def _finish(self, task: Array) -> None:
        """Fill in what follows from what the kernel has written; as in native/task.h."""
        lanes, agents, whole = int(task[TASK_LANES]), self._agents, bool(task[TASK_WHOLE])
        slots, requested, answered = (_lane_array(task, name, lanes) for name in ("slots", "requested", "answered"))
        asked = np.ones(lanes, np.bool_) if whole else np.repeat((requested != answered)[agents - 1 :: agents], agents)
        at = np.flatnonzero(asked)
        if not len(at):
            return
        run_return, run_length = _lane_array(task, "run_return", lanes), _lane_array(task, "run_length", lanes)
        slot = np.full(len(at), task[TASK_SLOT]) if whole else slots[at].astype(np.int64)
        frame = {name: _Rows(task, name, lanes, slot, at) for name in _KERNEL_TYPES["frames"]}
        first = {name: np.repeat(frame[name].read()[::agents], agents) for name in ("status", "terminated")}
        begins, fresh = first["status"] == MARK_BEGINS, first["status"] != 0
        length = np.where(begins, 0, run_length[at] + 1)
        total = np.where(begins, 0.0, run_return[at] + frame["reward"].read())
        cut = ~begins & (length >= task[TASK_LIMIT]) if task[TASK_LIMIT] > 0 else np.zeros(len(at), np.bool_)
        over = first["terminated"].astype(np.bool_) | cut
        values = (first["terminated"], cut, fresh, first["status"] & (MARK_BEGINS - 1), total, length)
        names = ("terminated", "truncated", "began", "status", "episode_return", "episode_length")
        for name, value in zip(names, values, strict=True):
            frame[name].write(value)
        run_return[at], run_length[at] = np.where(fresh, 0.0, total), np.where(fresh, 0, length)
        _lane_array(task, "ended", lanes)[at] = over & ~fresh
        if not whole:
            _lane_array(task, "done_ns", lanes)[at] = task[TASK_NOW_NS]
            answered[at] = requested[at]
            self._tally[TALLY_ANSWERED] += len(at)

    def rollout(self, task: Array, policy: int, steps: int, row_bytes: tuple[int, ...]) -> None:
        """Let a policy, which is a kernel too, choose actions for so many steps. Frame 0 has the first observations;
        actions are written, `row_bytes` for each leaf and step, and answers into the frames from 1 on."""
        choose, now = _KERNEL(policy), task.copy()
        result, error = ctypes.c_void_p(), ctypes.c_void_p()
        now[TASK_WHOLE] = 1
        for t in range(steps):
            for leaf, nbytes in enumerate(row_bytes):
                place = TASK_LEAVES + LEAF_PLACES * leaf
                now[place] = task[place] + t * nbytes
            now[TASK_SLOT] = t
            lanes = self._envs * self._agents
            choose(ctypes.byref(result), ctypes.byref(error), now.ctypes.data, 0, lanes, 0)
            now[TASK_SLOT] = t + 1
            self._step(now)

    def close(self) -> None:
        """Nothing to end."""


def _array_at(address: int, count: int, dtype: str) -> Array:
    """The memory at an address."""
    nbytes = count * np.dtype(dtype).itemsize
    memory: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, dtype)


def _lane_array(task: Array, name: str, lanes: int) -> Array:
    names = list(_KERNEL_TYPES["lanes"])
    address = int(task[TASK_LANE_FIELDS + names.index(name)])
    return _array_at(address, lanes, _KERNEL_TYPES["lanes"][name])


class _Rows:
    """One field of some lanes, each in a frame of its own."""

    def __init__(self, task: Array, name: str, lanes: int, slots: Array, at: Array):
        names = list(_KERNEL_TYPES["frames"])
        dtype = np.dtype(_KERNEL_TYPES["frames"][name])
        address = int(task[TASK_LANE_FIELDS + len(_KERNEL_TYPES["lanes"]) + names.index(name)])
        first = int(slots.min())  # from here on: a rollout has no row before its first
        self._array = _array_at(
            address + first * lanes * dtype.itemsize, (int(slots.max()) + 1 - first) * lanes, dtype.str
        )
        self._places = (slots - first) * lanes + at

    def read(self) -> Array:
        found: Array = self._array[self._places]
        return found

    def write(self, values: Array) -> None:
        self._array[self._places] = values

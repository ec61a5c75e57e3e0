"""The native core's behaviour in plain Python: what runs without a compiler, and what the C core is tested against.

Where C sleeps on a futex, the twin sleeps on a `Bell` that its backend hands in (a pipe between processes, an
event between threads); everything else is the same, call by call. Read `Lanes` here, then `twin_block.Block`.
"""

from __future__ import annotations

import functools
import operator
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.native import layout
from shoal.native.counters import MOST_LATE, POSTED_NS, flat
from shoal.native.twin_actions import are_lanes, cast_actions
from shoal.native.twin_arrays import merge, outside, standardize, take_infos, write_rows
from shoal.native.twin_block import Bell, Block, seconds_left
from shoal.native.twin_spinning import first_way, learn, rest_for, try_way

__all__ = [
    "Bell", "Block", "Lanes", "Turn", "first_way", "learn", "merge", "native_block", "native_lanes", "outside",
    "rest_for", "standardize", "take_infos", "try_way", "write_rows",
]  # fmt: skip

Array = npt.NDArray[Any]
ACTION_SCALAR, ACTION_ROW, ACTION_CALL = layout.ACTION_SCALAR, layout.ACTION_ROW, layout.ACTION_CALL
AUTORESET = layout.AUTORESET
SLOW_NS = 1_000_000  # steps that take longer are counted at once
MOST_NUMBERS = 1024  # as many actions of a Discrete are kept


class Turn:
    """Lets one thread in, as often as it likes, and refuses all others until it has left.

    Args:
        refusal: makes the error for another thread.
    """

    def __init__(self, refusal: Callable[[], BaseException]):
        self._refusal = refusal
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(False):
            raise self._refusal()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Lanes:
    """The learner's side of the slab: posts requests to lanes and collects those that are done.

    Args:
        slab: a shoal.memory.slab.Slab.
        state: uint8 [lanes], 1 where a request is pending; the learner's own, kept here.
        owner: int32 [lanes], the worker of each lane.
        bells: one for each worker.
        bell: the learner's own.
        leader: int64 [lanes], the last lane of each one's group; None where each lane is its own.
        window: 0, or how many neighbours are always collected together: lanes 0 up to `window`, and so on.
    """

    def __init__(
        self,
        slab: Any,
        state: Array,
        owner: Array,
        bells: Sequence[Bell],
        bell: Bell,
        leader: Array | None = None,
        window: int = 0,
    ):
        self._leader: Any = slice(None) if leader is None else leader
        self._window = window
        self._state, self._owner, self._bells, self._bell = state, owner, bells, bell
        self._frames = slab.layout.frames
        self._requested, self._answered = slab.array("requested"), slab.array("answered")
        self._op, self._slot, self._done_ns = slab.array("op"), slab.array("slot"), slab.array("done_ns")
        self._status, self._memory = slab.array("status"), slab.memory
        self._posted_ns = slab.array("worker_bells").view(np.int64)[:, POSTED_NS]
        self._counts = flat(slab.array("pool_stats"))
        self._since = self._counts[layout.POOL_BEGAN_NS] = self._counts[layout.POOL_SINCE_NS] = time.monotonic_ns()
        self._late = [0] * layout.POOL_WIDTH  # what is not in `_counts` yet: Python's lists are quicker
        slab.late_counters.add(self)
        self._taken = self._slept = False
        self._alarmed = False
        # For `step`: whether the caller itself steps all lanes, so that it waits for no other thread.
        self._alone = len(bells) == 1 and getattr(bells[0], "silent", False)
        self._action = np.zeros((0,))
        self._action_is: tuple[Any, ...] = (self._action.dtype, ())
        self._bounds: tuple[Array, Array] | None = None
        self._number: Callable[[int], Any] | None = None
        self._sent_at: Array | None = None
        self._zeros, self._pending = bytes(len(state)), bytes((layout.LANE_PENDING,)) * len(state)
        self._slots = [bytes((slot,)) * len(state) for slot in range(self._frames)]
        self._state_bytes, self._slot_bytes, self._op_bytes = flat(state), flat(self._slot), flat(self._op)
        self._sequences, self._ones = flat(self._requested), np.ones(len(state), np.uint64)
        self._status_rows = [flat(row) for row in self._status]
        self._run: Any = None
        self._block: Block | None = None  # whose method `_run` is
        self._in_use = threading.Lock()
        self._refusal: Callable[[], BaseException] = lambda: RuntimeError("another thread is inside")

    def refuse_with(self, refusal: Callable[[], BaseException]) -> None:
        """A function that makes the error for a second thread."""
        self._refusal = refusal

    def __enter__(self) -> None:
        """Keep other threads out."""
        if not self._in_use.acquire(False):
            raise self._refusal()

    def __exit__(self, *_: object) -> None:
        self._in_use.release()

    def use_action(self, leaf: tuple[Any, ...], low: Array, high: Array) -> None:
        """Let `step` take actions that are one array; bounds of length 0 are not checked."""
        offset, itemsize, _, code, shape, _, _ = leaf
        dtype = np.dtype(f"{'i' if code == 'n' else code}{itemsize}")
        whole = (len(self._state), *shape)
        self._action = np.ndarray(whole, dtype, self._memory, offset)
        self._action_is = dtype, whole
        self._bounds = (low, high) if low.size else None
        if low.size == 1 and not shape and dtype.kind in "iu" and int(high) - int(low) < MOST_NUMBERS:
            # NumPy's numbers, each made once, since that takes long, and nothing can change it; none for others.
            self._number = {n: dtype.type(n) for n in range(int(low), int(high) + 1)}.__getitem__

    def use_order(self, sent_at: Array) -> None:
        """Let `recv` take lanes as they were sent to: int64 [lanes + 1], each one's place, and how many sends."""
        if len(sent_at) != len(self._state) + 1:
            raise ValueError("sent_at needs one entry per lane, and one more")
        self._sent_at = sent_at

    def use_kernel(self, kernel: Any) -> None:
        """For the C core's `step`."""

    def step(self, actions: Any, run: Callable[[], int] | None, spin_ns: int, patience_ns: int) -> int:
        """Send and recv of all lanes in one call: status << 8 | slot.

        NOT_TAKEN, with nothing touched, where the caller does not step all lanes itself, where the actions need a
        second look, or where the lanes are not all idle in one frame: `post` and `collect` do it then.
        """
        if self._in_use.locked():
            return layout.IN_USE
        slots = self._slot_bytes.tobytes()
        idle = self._state_bytes.tobytes() == self._zeros and slots == self._slots[slots[0]]
        plain = idle and self._alone and not self._alarmed and run is not None
        rows = self._read(actions, len(slots)) if plain else None
        chosen = None if rows is None else self._chosen(rows)
        if chosen is None:
            return layout.NOT_TAKEN
        if not self._in_use.acquire(False):
            return layout.IN_USE
        late, began = self._late, time.monotonic_ns()
        slot: int = (slots[0] + 1) % self._frames
        late[layout.POOL_CALLER_NS] += began - self._since
        self._action[...] = rows
        self._state_bytes[:] = self._pending
        if slot != slots[0]:
            self._slot_bytes[:] = self._slots[slot]
        if self._op_bytes.tobytes() != self._zeros:
            self._op_bytes[:] = self._zeros
        if len(slots) > 1:
            np.add(self._requested, self._ones, self._requested)
        else:  # for which NumPy takes several times as long
            self._sequences[0] += 1
        try:
            if run is not self._run:
                self._run, owner = run, getattr(run, "__self__", None)
                self._block = owner if isinstance(owner, Block) and owner.at_once else None
            if self._block is not None:
                self._block.run_all(slot, chosen, began)
            elif run() < len(slots):  # type: ignore[misc]
                return layout.COLLECT_TIMEOUT
        finally:
            self._since = now = time.monotonic_ns()
            late[layout.POOL_WAIT_NS] += now - began
            self._in_use.release()
        self._state_bytes[:] = self._zeros
        late[layout.POOL_WAKE_NS] += now - self._done_ns.item(-1)
        late[layout.POOL_BATCHES] += 1
        self._taken = True
        if now - began > SLOW_NS or late[layout.POOL_BATCHES] > MOST_LATE:
            self.settle()
        status: bytes = self._status_rows[slot].tobytes()
        return slot if status == self._zeros else slot | functools.reduce(operator.or_, set(status)) << 8

    def _read(self, actions: Any, count: int) -> Array | None:
        """So many actions in the space's own type; None where they need a second look."""
        dtype, whole = self._action_is
        shape = (count, *whole[1:])
        if type(actions) is np.ndarray and actions.dtype == dtype and actions.shape == shape:
            return actions
        return cast_actions(actions, dtype, shape) if whole else None

    def _chosen(self, actions: Array) -> Any:
        """The action of each env, the env's own; None where one is out of bounds."""
        if self._number is not None:
            try:
                return [*map(self._number, actions.tolist())]
            except KeyError:
                return None
        return actions.copy() if self._bounds is None or outside("", actions, *self._bounds) == -1 else None

    def send(self, actions: Any, ids: Any) -> int:
        """Ask lanes (None: all) for a step: POST_OK.

        NOT_TAKEN, with nothing touched, where anything needs a second look: the ids, what the lanes are doing, the
        actions. Lanes of one group must be named together and in order.
        """
        if self._in_use.locked():
            return layout.IN_USE
        self.arrive()
        if ids is not None and not are_lanes(ids, len(self._state), self._leader):
            return layout.NOT_TAKEN
        lanes: Any = slice(None) if ids is None else ids
        rows = self._read(actions, len(self._state) if ids is None else len(ids))
        if rows is None or self._state[lanes].any():
            return layout.NOT_TAKEN
        if self._bounds is not None and outside("", rows, *self._bounds) != -1:
            return layout.NOT_TAKEN
        self._action[lanes] = rows
        if self._sent_at is not None:
            sends = int(self._sent_at[-1])
            self._sent_at[:-1][lanes] = np.arange(sends, sends + len(rows))
            self._sent_at[-1] = sends + len(rows)
        return self.post(ids, layout.OP_STEP)

    def recv(self, need: int, out: Array | None, run: Callable[[], int] | None, spin_ns: int, patience_ns: int) -> int:
        """Collect the next `need` lanes, in the pool's order, write their ids, ascending, to `out` (None: all lanes).

        Returns:
            first << 16 | status << 8 | slot, with MIXED_SLOTS unless they are one run from `first` on in one frame; or
            what `collect` gives in place of a count, COLLECT_TIMEOUT after `patience_ns` (-1: never); NOT_TAKEN, with
            nothing touched, where fewer are pending, or no whole window where these are collected.
        """
        if self._in_use.locked():
            return layout.IN_USE
        self.arrive()
        pending = np.flatnonzero(self._state)
        if self._window and need == self._window:
            enough = bool(self._state.reshape(-1, need).all(axis=1).any())
        else:
            enough = len(pending) >= need
        if not enough:
            return layout.NOT_TAKEN
        wanted = None
        if self._sent_at is not None and need < len(self._state):
            wanted = np.sort(pending[np.argsort(self._sent_at[pending], kind="stable")[:need]])
        deadline = -1 if patience_ns < 0 else time.monotonic_ns() + patience_ns
        ids = np.empty(need, np.int64) if out is None else out
        count, first, slot, status = self.collect(need, wanted, deadline, spin_ns, ids, run)
        return count if count < 0 else (layout.MIXED_SLOTS if slot < 0 else slot) | status << 8 | first << 16

    def post(self, ids: Array | None, op: int) -> int:
        """Ask lanes (None: all) for an operation. layout.POST_BUSY_LANE, with nothing touched, if one was not idle."""
        if self._in_use.locked():
            return layout.IN_USE
        lanes: Any = slice(None) if ids is None else ids
        if self._state[lanes].any():
            return layout.POST_BUSY_LANE
        self._state[lanes] = layout.LANE_PENDING
        self._slot[lanes] = (self._slot[lanes] + 1) % self._frames
        self._op[lanes] = op
        self._requested[lanes] += np.uint64(1)
        now = time.monotonic_ns()
        for worker in np.unique(self._owner[lanes]):
            if not self._posted_ns[worker]:
                self._posted_ns[worker] = now
            self._bells[worker].ring()
        self._since = now
        self.settle()
        return layout.POST_OK

    def arrive(self) -> None:
        """The caller has come back: it was elsewhere since its last call ended."""
        if not self._in_use.locked():
            now = time.monotonic_ns()
            self._late[layout.POOL_CALLER_NS] += now - self._since
            self._since, self._taken = now, False
            self.settle()

    def handed(self) -> None:
        """What was taken is the caller's now: it was copied, or viewed, since it was taken."""
        if self._taken:
            late, now = self._late, time.monotonic_ns()
            late[layout.POOL_COPY_NS] += now - self._since
            self._since, self._taken = now, False
            if not late[layout.POOL_BATCHES]:
                self.settle()

    def settle(self) -> None:
        """Write what was counted into the slab, where others read it. After quick steps that is put off."""
        for counter, count in enumerate(self._late):
            if count:
                self._counts[counter] += count
        self._late[:] = [0] * layout.POOL_WIDTH
        self._counts[layout.POOL_SINCE_NS] = self._since

    def collect(
        self,
        need: int,
        wanted: Array | None,
        deadline_ns: int,
        spin_ns: int,
        out: Array,
        run: Callable[[], int] | None,
    ) -> tuple[int, int, int, int]:
        """Wait for `need` lanes (of `wanted`, if given), take those done first, write their ids to `out`.

        `run` steps the caller's own block first, if there is one.

        Returns:
            (count, first, slot, status): slot is -1 unless the lanes are one run from `first` in one frame slot;
            status is all their status bits together, 0 when nothing lies in the side channel; a negative count
            is COLLECT_TIMEOUT, COLLECT_ALARM or IN_USE. `spin_ns` is for the C core: Python that spins holds up
            the very threads it waits for.
        """
        if not self._in_use.acquire(False):
            return layout.IN_USE, 0, -1, 0
        began, self._slept = time.monotonic_ns(), False
        try:
            if run is not None:
                run()
            ready = self._wait(need, wanted, deadline_ns)
        finally:
            self._since = now = time.monotonic_ns()
            self._late[layout.POOL_WAIT_NS] += now - began
            self.settle()
            self._in_use.release()
        if isinstance(ready, int):
            return ready, 0, -1, 0
        if len(ready) > need:
            ready = np.sort(ready[np.argsort(self._done_ns[ready], kind="stable")[:need]])
        out[:need] = ready
        self._state[ready] = layout.LANE_IDLE
        self._count_batch(ready, began, now)
        first, slots = int(ready[0]), self._slot[ready]
        one_run = int(ready[-1]) - first == need - 1 and bool((slots == slots[0]).all())
        status = int(np.bitwise_or.reduce(self._status[slots, ready]))
        return need, first, int(slots[0]) if one_run else -1, status

    def _count_batch(self, ready: Array, began: int, now: int) -> None:
        """What a wait has brought was taken; see lanes.h for what is counted when."""
        done = np.maximum(self._done_ns[ready], began)
        owner = self._owner[ready]
        finished = [int(done[owner == worker].max()) for worker in np.unique(owner)]
        last = max(finished)
        if not self._state.any():
            self._late[layout.POOL_STRAGGLER_NS] += last - sum(finished) // len(finished)
        self._late[layout.POOL_WAKE_NS] += max(0, now - last)
        self._late[layout.POOL_BATCHES] += 1
        self._late[layout.POOL_SLEEPS] += self._slept
        self._taken = True
        self.settle()

    def _wait(self, need: int, wanted: Array | None, deadline_ns: int) -> Array | int:
        while True:
            if self._alarmed:  # first: while others are ready again and again, a loss must still be reported
                return layout.COLLECT_ALARM
            done = self._answered == self._requested
            # A lane that was reset alone has a leader that was asked nothing.
            ready = np.flatnonzero((self._state == layout.LANE_PENDING) & done & done[self._leader])
            if wanted is not None:
                ready = np.intersect1d(ready, wanted)
            elif self._window and need == self._window:
                ready = self._first_window(ready)
            if len(ready) >= need:
                return ready
            left = seconds_left(deadline_ns)
            if left == 0.0:
                return layout.COLLECT_TIMEOUT
            self._slept = True
            self._bell.sleep(left)

    def _first_window(self, ready: Array) -> Array:
        """The lanes of the window that was complete first; none where there is no such window."""
        windows, counts = np.unique(ready // self._window, return_counts=True)
        whole = windows[counts == self._window]
        if not len(whole):
            return ready[:0]
        times = self._done_ns[: len(self._done_ns) // self._window * self._window].reshape(-1, self._window).max(axis=1)
        first = whole[np.argmin(times[whole])] * self._window
        return np.arange(first, first + self._window)

    def alarm(self) -> None:
        """Wake the thread that waits in collect, which then returns COLLECT_ALARM until heard()."""
        self._alarmed = True
        self._bell.ring()

    def heard(self) -> None:
        """The alarm was dealt with."""
        self._alarmed = False

    def use_cores(self, parties: int, cores: int) -> None:
        """For the C core, which decides whether waits spin."""

    def ways(self) -> tuple[int, int, int, tuple[int, int, int, int]]:
        """Who may spin, who does, the best way so far, and what a batch takes by each: the twin never spins."""
        return 0, 0, 0, (0, 0, 0, 0)

    def prepare(self, ns: int) -> None:
        """For the C core, whose workers then spin for requests: the twin's would only fall asleep again."""

    def ring(self, worker: int) -> None:
        """For a message that lies in the worker's side channel."""
        self._bells[worker].ring()


def native_lanes(
    core: Any, slab: Any, state: Array, owner: Array, bells: Any, bell: Any, leader: Any = None, window: int = 0
) -> Any:
    """The C core's Lanes from the twin's arguments; futexes in the slab take the place of the bells."""
    plan = slab.layout
    return core.Lanes(slab.memory, state, owner, plan.lanes, plan.frames, plan.workers, plan.offsets, leader, window)


def native_block(
    core: Any, slab: Any, worker: int, start: int, stop: int, autoreset: int, publish_each: bool, action_kind: int,
    leaves: Any, steps: Any, actions: Any, callbacks: Any, pool_bell: Any, bell: Any,
) -> Any:  # fmt: skip
    """The C core's Block from the twin's arguments."""
    plan = slab.layout
    return core.Block(
        slab.memory, worker, plan.lanes, start, stop, autoreset, publish_each, action_kind, plan.offsets,
        leaves, steps, actions, callbacks,
    )  # fmt: skip

"""The native core's behaviour in plain Python: what runs without a compiler, and what the C core is tested against.

Where C sleeps on a futex, the twin sleeps on a `Bell` that its backend hands in (a pipe between processes, an
event between threads); everything else is the same, call by call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shoal.native.counters import (
    POOL_BATCHES,
    POOL_BEGAN_NS,
    POOL_CALLER_NS,
    POOL_COPY_NS,
    POOL_SINCE_NS,
    POOL_STRAGGLER_NS,
    POOL_WAIT_NS,
    POOL_WAKE_NS,
    POSTED_NS,
    STAT_AT,
    STAT_EPISODES,
    STAT_RESET_NS,
    STAT_SINCE_NS,
    WorkerCounters,
)

__all__ = ["Bell", "Block", "Lanes", "merge", "native_block", "native_lanes", "outside", "standardize"]

Array = npt.NDArray[Any]

OP_STEP, OP_RESET, OP_RESTART = 0, 1, 2
LANE_IDLE, LANE_PENDING = 0, 1
COLLECT_TIMEOUT, COLLECT_ALARM, IN_USE, NOT_TAKEN = -1, -2, -4, -5
POST_OK, POST_BUSY_LANE = 0, 1
AUTORESET = {"next_step": 0, "same_step": 1, "disabled": 2}
ACTION_SCALAR, ACTION_ROW, ACTION_CALL = 0, 1, 2

_LANE_OFFSETS = (
    "pool_bell", "worker_bells", "requested", "answered", "op", "slot", "done_ns", "status", "pool_stats",
)  # fmt: skip
_BLOCK_LANE_FIELDS = ("requested", "answered", "op", "slot", "done_ns", "ended", "run_return", "run_length")
_BLOCK_FRAME_FIELDS = (
    "reward", "terminated", "truncated", "began", "status", "episode_return", "episode_length",
)  # fmt: skip


class Bell(Protocol):
    """What the twin rings and sleeps on instead of a futex."""

    def ring(self) -> None:
        """Wake the sleeper, or make its next sleep return at once."""

    def sleep(self, timeout: float | None) -> None:
        """Return when rung, or after `timeout` seconds; may also return for no reason."""


def _seconds_left(deadline_ns: int) -> float | None:
    return None if deadline_ns < 0 else max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)


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
        self._status = slab.array("status")
        self._posted_ns = slab.array("worker_bells").view(np.int64)[:, POSTED_NS]
        self._counts = slab.array("pool_stats")
        self._counts[POOL_BEGAN_NS] = self._counts[POOL_SINCE_NS] = time.monotonic_ns()
        self._taken = False
        self._alarmed = False
        self._in_use = threading.Lock()
        self._refusal: Callable[[], BaseException] = lambda: RuntimeError("another thread is inside")

    def refuse_with(self, refusal: Callable[[], BaseException]) -> None:
        """A function that makes the error for a second thread."""
        self._refusal = refusal

    def __enter__(self) -> None:
        """Keep other threads out."""
        if not self._in_use.acquire(blocking=False):
            raise self._refusal()

    def __exit__(self, *_: object) -> None:
        self._in_use.release()

    def use_action(self, leaf: tuple[Any, ...], low: Array, high: Array) -> None:
        """For the C core's `step`; the twin has no such short cut."""

    def use_kernel(self, kernel: Any) -> None:
        """For the C core's `step`, too."""

    def step(self, actions: Any, run: Callable[[], int] | None, spin_ns: int, patience_ns: int) -> int:
        """Post and collect of all lanes in one call: slot | status << 8. NOT_TAKEN by the twin, always."""
        return NOT_TAKEN

    def post(self, ids: Array | None, op: int) -> int:
        """Ask lanes (None: all) for an operation. POST_BUSY_LANE, with nothing touched, if one was not idle."""
        if self._in_use.locked():
            return IN_USE
        lanes: Any = slice(None) if ids is None else ids
        if self._state[lanes].any():
            return POST_BUSY_LANE
        self._state[lanes] = LANE_PENDING
        self._slot[lanes] = (self._slot[lanes] + 1) % self._frames
        self._op[lanes] = op
        self._requested[lanes] += np.uint64(1)
        now = time.monotonic_ns()
        for worker in np.unique(self._owner[lanes]):
            if not self._posted_ns[worker]:
                self._posted_ns[worker] = now
            self._bells[worker].ring()
        self._counts[POOL_SINCE_NS] = now
        return POST_OK

    def arrive(self) -> None:
        """The caller has come back: it was elsewhere since its last call ended."""
        if not self._in_use.locked():
            now = time.monotonic_ns()
            self._counts[POOL_CALLER_NS] += now - self._counts[POOL_SINCE_NS]
            self._counts[POOL_SINCE_NS] = now
            self._taken = False

    def handed(self) -> None:
        """What was taken is the caller's now: it was copied, or viewed, since it was taken."""
        if self._taken:
            now = time.monotonic_ns()
            self._counts[POOL_COPY_NS] += now - self._counts[POOL_SINCE_NS]
            self._counts[POOL_SINCE_NS] = now
            self._taken = False

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
        if not self._in_use.acquire(blocking=False):
            return IN_USE, 0, -1, 0
        began = time.monotonic_ns()
        try:
            if run is not None:
                run()
            ready = self._wait(need, wanted, deadline_ns)
        finally:
            now = time.monotonic_ns()
            self._counts[POOL_WAIT_NS] += now - began
            self._counts[POOL_SINCE_NS] = now
            self._in_use.release()
        if isinstance(ready, int):
            return ready, 0, -1, 0
        if len(ready) > need:
            ready = np.sort(ready[np.argsort(self._done_ns[ready], kind="stable")[:need]])
        out[:need] = ready
        self._state[ready] = LANE_IDLE
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
            self._counts[POOL_STRAGGLER_NS] += last - sum(finished) // len(finished)
        self._counts[POOL_WAKE_NS] += max(0, now - last)
        self._counts[POOL_BATCHES] += 1
        self._taken = True

    def _wait(self, need: int, wanted: Array | None, deadline_ns: int) -> Array | int:
        while True:
            if self._alarmed:  # first: where others are always ready, nobody would ever hear of the one that is gone
                return COLLECT_ALARM
            done = self._answered == self._requested
            # A lane that was reset alone has a leader that was asked nothing.
            ready = np.flatnonzero((self._state == LANE_PENDING) & done & done[self._leader])
            if wanted is not None:
                ready = np.intersect1d(ready, wanted)
            elif self._window and need == self._window:
                ready = self._first_window(ready)
            if len(ready) >= need:
                return ready
            left = _seconds_left(deadline_ns)
            if left == 0.0:
                return COLLECT_TIMEOUT
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
        """Wake whoever waits in collect, which then returns COLLECT_ALARM until heard()."""
        self._alarmed = True
        self._bell.ring()

    def heard(self) -> None:
        """The alarm was dealt with."""
        self._alarmed = False

    def ring(self, worker: int) -> None:
        """For a message that lies in the worker's side channel."""
        self._bells[worker].ring()


class Block:
    """The worker's side of the slab: steps the envs of a contiguous run of lanes.

    Args:
        slab: a shoal.memory.slab.Slab.
        worker: index of this worker; its lanes are `start` up to `stop`.
        autoreset: a value of AUTORESET.
        publish_each: ring the pool for every lane (partial batches) instead of once a pass.
        action_kind: ACTION_SCALAR or ACTION_ROW of the array `actions`, or ACTION_CALL of a function.
        leaves: for each leaf of the observation (offset, itemsize, nbytes, code, shape, path, stride).
        steps: bound `env.step`, one for each lane.
        callbacks: special(lane, slot, op), finish(lane, slot, obs, info), note(lane, slot, info),
            store(lane, slot, obs), failed(lane, slot, error), flush().
        pool_bell, bell: the learner's and this worker's own.
    """

    def __init__(
        self,
        slab: Any,
        worker: int,
        start: int,
        stop: int,
        autoreset: int,
        publish_each: bool,
        action_kind: int,
        leaves: tuple[tuple[Any, ...], ...],
        steps: list[Callable[[Any], Any]],
        actions: Any,
        callbacks: tuple[Callable[..., None], ...],
        pool_bell: Bell,
        bell: Bell,
    ):
        self._start, self._stop, self._autoreset, self._publish_each = start, stop, autoreset, publish_each
        self._action_kind, self._actions, self._steps = action_kind, actions, steps
        self._special, self._finish, self._note, self._store, self._failed, self._flush = callbacks
        self._pool_bell, self._bell = pool_bell, bell
        self._requested, self._answered = slab.array("requested"), slab.array("answered")
        self._op, self._slot, self._done_ns = slab.array("op"), slab.array("slot"), slab.array("done_ns")
        self._ended, self._counters = slab.array("ended"), WorkerCounters(slab, worker)
        self._stats, self._was_reset, self._waking = self._counters.stats, False, 0
        self._run_return, self._run_length = slab.array("run_return"), slab.array("run_length")
        self._frame = {name: slab.array(name) for name in _BLOCK_FRAME_FIELDS}

    def wait(self, deadline_ns: int, spin_ns: int) -> bool:
        """Sleep until rung or asked for something (True), or the deadline (False)."""
        # Whoever reads the mail in the middle of a run takes the rings with it that lie there.
        if len(self._asked()):
            self._bell.sleep(0)  # this one's own ring
            return True
        self._bell.sleep(_seconds_left(deadline_ns))
        return _seconds_left(deadline_ns) != 0.0

    def _asked(self) -> Array:
        """The lanes that wait for an answer."""
        lanes = slice(self._start, self._stop)
        return np.flatnonzero(self._requested[lanes] != self._answered[lanes]) + self._start

    def asked(self, out: Array) -> int:
        """How many lanes wait for an answer; their ids, ascending, are written to `out`."""
        self._waking += self._counters.waking(time.monotonic_ns())
        found = self._asked()
        out[: len(found)] = found
        return len(found)

    def enter(self, lane: int) -> None:
        """The env of this lane is about to be stepped, by whoever steps it."""
        self._stats[STAT_SINCE_NS], self._stats[STAT_AT] = time.monotonic_ns(), lane + 1

    def leave(self, lane: int) -> None:
        """It was."""
        self._was_reset = self._op[lane] != OP_STEP
        self._count(lane, time.monotonic_ns() - int(self._stats[STAT_SINCE_NS]))

    def publish(self, ids: Array, began_ns: int) -> None:
        """These lanes, which were asked, have answered; for steppers that write the frames themselves.

        One after the other, as given: whoever looks at the last of them sees all.
        """
        now = time.monotonic_ns()
        self._done_ns[ids] = now
        for lane in ids.tolist():
            self._answered[lane] = self._requested[lane]
        self._stats[STAT_AT] = 0
        self._counters.passed(len(ids), self._waking, began_ns, now)
        self._waking = 0
        self._pool_bell.ring()

    def run(self) -> int:
        """Step every lane that was asked for; returns how many."""
        began = clock = time.monotonic_ns()
        waking = self._counters.waking(began)
        asked = self._asked()
        for lane in asked.tolist():
            sequence = self._requested[lane]
            self._stats[STAT_SINCE_NS], self._stats[STAT_AT] = clock, lane + 1
            try:
                self._step(lane, int(self._slot[lane]))
            except BaseException as error:
                self._failed(lane, int(self._slot[lane]), error)
            since = clock
            self._done_ns[lane] = clock = time.monotonic_ns()
            self._count(lane, clock - since)
            self._answered[lane] = sequence
            if self._publish_each:
                self._pool_bell.ring()
                self._flush()
                clock = time.monotonic_ns()  # the next env is not to blame for it
        if len(asked):
            self._stats[STAT_AT] = 0
            self._counters.passed(len(asked), waking, began, clock)
            if not self._publish_each:
                self._pool_bell.ring()
        self._flush()
        return len(asked)

    def _count(self, lane: int, ns: int) -> None:
        """A lane is about to answer. Resets that were asked for are no steps."""
        if self._was_reset:
            self._stats[STAT_RESET_NS] += ns
        if self._op[lane] == OP_STEP:
            self._counters.step(lane, ns)

    def _step(self, lane: int, slot: int) -> None:
        # The rules of autoreset have their model in shoal/envs/autoreset.py.
        op = int(self._op[lane])
        self._was_reset = op != OP_STEP or bool(self._ended[lane] and self._autoreset == AUTORESET["next_step"])
        if self._was_reset:
            self._special(lane, slot, op)
            return
        result = self._steps[lane - self._start](self._action(lane))
        if not isinstance(result, tuple) or len(result) != 5:
            raise TypeError(f"step must return a tuple (obs, reward, terminated, truncated, info), got {result!r}")
        observation, reward, terminated, truncated, info = result
        if isinstance(reward, str | bytes):  # which float() would read
            raise TypeError(f"reward must be a number, got {reward!r}")
        try:
            number = float(reward)
        except TypeError:
            raise TypeError(f"reward must be a number, got {reward!r}") from None
        reward, terminated, truncated = number, bool(terminated), bool(truncated)
        self._run_return[lane] = float(self._run_return[lane]) + reward
        self._run_length[lane] += 1
        values = (reward, terminated, truncated, False, 0, self._run_return[lane], self._run_length[lane])
        for array, value in zip(self._frame.values(), values, strict=True):
            array[slot, lane] = value
        if terminated or truncated:
            self._counters.episodes(1, float(self._run_return[lane]), int(self._run_length[lane]))
            if self._autoreset == AUTORESET["same_step"]:
                began = time.monotonic_ns()
                try:
                    self._finish(lane, slot, observation, info)
                finally:
                    self._stats[STAT_RESET_NS] += time.monotonic_ns() - began
                return
            self._ended[lane] = 1
        self._store(lane, slot, observation)
        if not isinstance(info, dict) or info:
            self._note(lane, slot, info)

    def begin(self, lane: int, slot: int, observation: Any, info: Any, fresh: bool) -> None:
        """The first observation of an episode.

        Args:
            fresh: the lane was asked for a reset, so that its reward and flags are none; otherwise they are those of
                the step that ended the last episode.

        Raises what `store` and `note` raise.
        """
        if not self._start <= lane < self._stop:
            raise IndexError("no lane of this block")
        if fresh:
            for array in self._frame.values():
                array[slot, lane] = 0
        self._frame["began"][slot, lane] = True
        self._ended[lane] = self._run_return[lane] = self._run_length[lane] = 0
        self._stats[STAT_EPISODES] += 1
        self._store(lane, slot, observation)
        if not isinstance(info, dict) or info:
            self._note(lane, slot, info)

    def _action(self, lane: int) -> Any:
        if self._action_kind == ACTION_CALL:
            return self._actions(lane)
        row = self._actions[lane]
        # A copy: envs keep and change their actions, and the slab will hold the next one.
        return row if self._action_kind == ACTION_SCALAR else row.copy()


def outside(kind: str, values: Array, low: Array, high: Array) -> int:
    """The flat index of the first value outside its bounds (a NaN is outside), -1 for none."""
    inside = (values >= low) & (values <= high)
    return -1 if inside.all() else int(np.argmin(inside))


def merge(kind: str, values: Array, mean: Array, var: Array, count: float) -> float:
    """Take the rows of `values` into a running mean and variance, in place, of `count` rows so far; the new count."""
    rows = values.reshape(-1, *mean.shape)
    if len(rows) == 0:
        return count
    total = count + len(rows)
    share = len(rows) / total
    fresh = np.add.reduce(rows, 0, np.float64) / len(rows)
    centred = rows - fresh
    delta = fresh - mean
    spread = np.add.reduce(centred * centred, 0) / len(rows)
    var[...] = var * (1.0 - share) + spread * share + delta * delta * (share * (1.0 - share))
    mean += delta * share
    return total


def standardize(kind: str, values: Array, mean: Array, var: Array, epsilon: float, limit: float, out: Array) -> None:
    """Write (values - mean) / sqrt(var + epsilon), within [-limit, limit], into `out`."""
    result = (values.reshape(-1, *mean.shape) - mean) / np.sqrt(var + epsilon)
    out[...] = np.maximum(np.minimum(result, limit), -limit).reshape(out.shape)


def write_rows(
    names: tuple[Any, ...],
    rows: tuple[int, ...],
    observations: Any,
    rewards: Any,
    terminated: Any,
    truncated: Any,
    reward: Array,
    targets: tuple[Array, ...],
    paths: tuple[tuple[Any, ...], ...],
) -> bool:
    """Write what agents answer, given as dicts by agent, into these rows of a batch.

    Args:
        reward: of the batch, and so are `targets`, one for each leaf of the observations; `paths` lead to the leaves.

    Returns:
        False where one of them has ended, or anything is not exactly as the batch has it; some may have been written.
    """
    try:
        for name, row in zip(names, rows, strict=True):
            if terminated.get(name) or truncated.get(name):
                return False
            reward[row] = rewards[name]
            for target, path in zip(targets, paths, strict=True):
                value = observations[name]
                for key in path:
                    value = value[key]
                if not _fits_row(value, target):
                    return False
                target[row] = value
    except Exception:
        return False  # whoever writes it with care will see why
    return True


def _fits_row(value: Any, target: Array) -> bool:
    if target.ndim == 1:
        return target.dtype == np.int64 and isinstance(value, int | np.integer)
    return isinstance(value, np.ndarray) and value.dtype == target.dtype and value.shape == target.shape[1:]


def native_lanes(
    core: Any, slab: Any, state: Array, owner: Array, bells: Any, bell: Any, leader: Any = None, window: int = 0
) -> Any:
    """The C core's Lanes from the twin's arguments; futexes in the slab take the place of the bells."""
    layout = slab.layout
    offsets = tuple(layout.offset(name) for name in _LANE_OFFSETS)
    return core.Lanes(slab.memory, state, owner, layout.lanes, layout.frames, layout.workers, offsets, leader, window)


def native_block(
    core: Any, slab: Any, worker: int, start: int, stop: int, autoreset: int, publish_each: bool, action_kind: int,
    leaves: Any, steps: Any, actions: Any, callbacks: Any, pool_bell: Any, bell: Any,
) -> Any:  # fmt: skip
    """The C core's Block from the twin's arguments."""
    layout = slab.layout
    offsets = (
        layout.offset("pool_bell"),
        layout.offset("worker_bells", worker),
        *(layout.offset(name) for name in _BLOCK_LANE_FIELDS),
        layout.offset("stats", worker),
        *(layout.offset(name) for name in _BLOCK_FRAME_FIELDS),
        *(layout.offset(name, worker) for name in ("episode_sums", "step_times")),
        layout.offset("lane_stats"),
    )
    return core.Block(
        slab.memory, layout.lanes, start, stop, autoreset, publish_each, action_kind, offsets,
        leaves, steps, actions, callbacks,
    )  # fmt: skip

"""The worker's side of the slab in plain Python; the C core's is step_block.h, and behaves alike, call by call.

The caller's own block steps all its lanes in one pass (`run_all`): it writes what all lanes have in common by
NumPy, and the rest by memoryviews, which read and write a number several times as fast as arrays do. Workers in other
threads and processes answer lane by lane (`_answer_each`), because the learner waits for each answer.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from shoal.native import layout
from shoal.native.counters import WorkerCounters, flat
from shoal.support.checks import truth

__all__ = ["Bell", "Block", "seconds_left"]

Array = npt.NDArray[Any]
STAT_AT = layout.STAT_AT
FEW = 4  # lanes below which loops in Python take less time than calls of NumPy


class Bell(Protocol):
    """What the twin rings and sleeps on instead of a futex. One that has a true attribute `silent` wakes no thread."""

    def ring(self) -> None:
        """Wake the sleeper, or make its next sleep return at once."""

    def sleep(self, timeout: float | None) -> None:
        """Return when rung, or after `timeout` seconds; may also return for no reason."""


class _Mute:
    """A bell that does not ring."""

    def ring(self) -> None:
        """Do nothing."""

    def sleep(self, timeout: float | None) -> None:
        """Do nothing."""


def seconds_left(deadline_ns: int) -> float | None:
    """How long until a deadline; None for a negative one, which is never."""
    return None if deadline_ns < 0 else max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)


class Block:
    """Steps the envs of a contiguous run of lanes.

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
        self._same_step = autoreset == layout.AUTORESET_SAME_STEP
        self._action_kind, self._actions, self._steps = action_kind, actions, steps
        self._special, self._finish, self._note, self._store, self._failed, self._flush = callbacks
        self._pool_bell, self._bell = pool_bell, bell
        self._lane_count = slab.layout.lanes
        self.at_once = getattr(bell, "silent", False) and action_kind != layout.ACTION_CALL
        arrays = {row.name: slab.array(row.name) for row in layout.FIELDS if row.name in slab.layout.fields}
        self._requested, self._answered = flat(arrays["requested"]), flat(arrays["answered"])
        self._op, self._slot, self._done_ns = (flat(arrays[name]) for name in ("op", "slot", "done_ns"))
        self._ended, self._run_return, self._run_length = (
            flat(arrays[name]) for name in ("ended", "run_return", "run_length")
        )
        self._reward, self._terminated, self._truncated, self._began, self._status = (
            flat(arrays[name]) for name in ("reward", "terminated", "truncated", "began", "status")
        )
        self._episode_return, self._episode_length = flat(arrays["episode_return"]), flat(arrays["episode_length"])
        self._counters = WorkerCounters(slab, worker, start, stop)
        self._stats = flat(self._counters.stats)
        self._was_reset, self._waking, self._noted = False, 0, False
        self._own = range(start, stop)
        self._prepare_leaves(slab, leaves)
        self._prepare_pass(slab, arrays)

    def _prepare_leaves(self, slab: Any, leaves: tuple[tuple[Any, ...], ...]) -> None:
        """Arrays [frames, lanes, ...] for the leaves; none where one of them is for the callback `store`."""
        self._plain = all(leaf[3] in "fiub" or (leaf[3] == "n" and leaf[1] == 8) for leaf in leaves)
        self._leaves: list[tuple[Any, Any, tuple[int, ...], Any]] = []
        frames, lanes = slab.layout.frames, slab.layout.lanes
        for offset, itemsize, _, code, shape, path, stride in leaves if self._plain else ():
            dtype = np.dtype(f"{'i' if code == 'n' else code}{itemsize}")
            inner = np.empty(shape, np.dtype(f"V{itemsize}")).strides
            array: Array = np.ndarray(
                (frames, lanes, *shape), dtype, slab.memory, offset, (lanes * stride, stride, *inner)
            )
            self._leaves.append((path, None if code == "n" else dtype, shape, list(array)))
        # Where the observation is one row of numbers: for each frame, the rows of this block's lanes. Python compares
        # type and length when a row is written. (Not of bytes, which would take a text of bytes for numbers.)
        nothing: tuple[Any, ...] = (), None, (), []
        path, dtype, shape, arrays = self._leaves[0] if len(self._leaves) == 1 else nothing
        rows = not path and dtype is not None and dtype != np.uint8 and len(shape) == 1
        no_rows = [None] * len(self._own)
        self._rows: list[list[Any]] = [no_rows] * frames
        if rows:
            self._rows = [[flat(array[lane]) for lane in self._own] for array in arrays]

    def _prepare_pass(self, slab: Any, arrays: dict[str, Array]) -> None:
        """Views of the lanes of this block, for passes over all of them: making a view costs more than using it."""
        own, count, frames = slice(self._start, self._stop), len(self._own), range(len(arrays["reward"]))
        self._zeros, self._ones = bytes(count), np.ones(count, np.int64)
        self._own_requested, self._own_answered = flat(arrays["requested"][own]), flat(arrays["answered"][own])
        self._own_done_ns = arrays["done_ns"][own]
        self._own_runs = arrays["run_return"][own], arrays["run_length"][own]
        self._run_views = [flat(runs) for runs in self._own_runs]
        self._own_ended = flat(arrays["ended"][own])
        self._own_op, self._own_slot = flat(arrays["op"][own]), flat(arrays["slot"][own])
        self._own_actions: Any = self._actions[own] if self.at_once else None
        totals = "episode_return", "episode_length"
        # The four flags follow each other in the layout's table, each as long as the others.
        first, second = (slab.layout.fields[name].offset for name in ("terminated", "truncated"))
        starts = [first + frame * self._lane_count + self._start for frame in frames]
        self._own_flags: list[Array] = [
            np.ndarray((4, count), np.uint8, slab.memory, start, (second - first, 1)) for start in starts
        ]
        self._places = [range(start, start + count) for start in (i * self._lane_count + self._start for i in frames)]
        self._own_rewards = list(arrays["reward"][:, own])
        self._own_totals = [[flat(arrays[name][i, own]) for name in totals] for i in frames]

    # ---- requests --------------------------------------------------------------------------------------------

    def wait(self, deadline_ns: int, spin_ns: int) -> bool:
        """Sleep until rung or asked for something (True), or the deadline (False)."""
        # A ring may already have been taken, by a reader of the side channel in the middle of a run.
        if self._asked():
            self._bell.sleep(0)  # takes the ring of the request that was found
            self._counters.waited(False)
            return True
        self._bell.sleep(seconds_left(deadline_ns))
        rung = seconds_left(deadline_ns) != 0.0
        if rung:
            self._counters.waited(True)
        return rung

    def _asked(self) -> Sequence[int]:
        """The lanes that wait for an answer."""
        requested, answered = self._own_requested.tolist(), self._own_answered.tolist()
        if all(map(operator.ne, requested, answered)):
            return self._own
        return [lane for lane, r, a in zip(self._own, requested, answered, strict=True) if r != a]

    def asked(self, out: Array) -> int:
        """How many lanes wait for an answer; their ids, ascending, are written to `out`."""
        self._waking += self._counters.waking(time.monotonic_ns())
        found = self._asked()
        out[: len(found)] = found
        return len(found)

    def enter(self, lane: int) -> None:
        """The env of this lane is about to be stepped, by a stepper that writes the frames itself."""
        self._show(lane + 1, time.monotonic_ns())

    def leave(self, lane: int) -> None:
        """The env of this lane was stepped."""
        self._was_reset = self._op[lane] != layout.OP_STEP
        self._count(lane, time.monotonic_ns() - int(self._stats[layout.STAT_SINCE_NS]))

    def publish(self, ids: Array, began_ns: int) -> None:
        """These lanes, which were asked, have answered; for steppers that write the frames themselves.

        They answer one after the other, as given: when the last of them has answered, all have.
        """
        now = time.monotonic_ns()
        for lane in ids.tolist():
            self._done_ns[lane] = now
            self._answered[lane] = self._requested[lane]
        self._counters.passed(len(ids), self._waking, began_ns, now)
        self._waking = 0
        self._pool_bell.ring()

    def part(self) -> None:
        """In a forked child, in the middle of a pass: do not ring, and end the pass with `flush`."""
        self._pool_bell, self._noted = _Mute(), True

    # ---- a pass ----------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Step every lane that was asked for; returns how many. Raises only what `failed` or `flush` raises."""
        began = time.monotonic_ns()
        waking, asked = self._counters.waking(began), self._asked()
        if self.at_once and self._is_whole(asked):
            self.run_all(self._slot[self._start], self._own_actions.copy(), began, waking)
        else:
            self._answer_each(asked, began, waking)
            if self._noted:
                self._send_notes()
        return len(asked)

    def _send_notes(self) -> None:
        self._flush()
        self._noted = False

    def _show(self, lane: int, since: int) -> None:
        """Say which lane is being stepped (`lane` + 1, 0 for none), and since when."""
        self._stats[layout.STAT_SINCE_NS], self._stats[layout.STAT_AT] = since, lane

    def _answer_each(self, asked: Sequence[int], began: int, waking: int) -> None:
        """Step lanes one by one; each answers at once."""
        clock, stepped = began, 0
        try:
            for lane in asked:
                sequence, slot = self._requested[lane], self._slot[lane]
                self._show(lane + 1, clock)
                try:
                    self._step(lane, slot)
                except BaseException as error:
                    self._fail(lane, slot, error)
                since = clock
                self._done_ns[lane] = clock = time.monotonic_ns()
                self._count(lane, clock - since)
                self._answered[lane] = sequence
                stepped += 1
                if self._publish_each:
                    self._pool_bell.ring()
                    if self._noted:
                        self._send_notes()
                    clock = time.monotonic_ns()  # the next env did not take that time
        finally:
            if stepped:
                self._counters.passed(stepped, waking, began, clock)
                if not self._publish_each:
                    self._pool_bell.ring()

    def _count(self, lane: int, ns: int) -> None:
        """A lane is about to answer. Resets that the caller asked for are no steps."""
        if self._was_reset:
            self._stats[layout.STAT_RESET_NS] += ns
        if self._op[lane] == layout.OP_STEP:
            self._counters.step(lane, ns)

    def _fail(self, lane: int, slot: int, error: BaseException) -> None:
        self._noted = True
        self._failed(lane, slot, error)

    def _step(self, lane: int, slot: int) -> None:
        # The rules of autoreset have their model in shoal/envs/autoreset.py.
        op, at = self._op[lane], slot * self._lane_count + lane
        self._was_reset = op != layout.OP_STEP or (
            self._autoreset == layout.AUTORESET_NEXT_STEP and self._ended[lane] != 0
        )
        if self._was_reset:
            self._noted = True
            self._special(lane, slot, op)
            return
        result = self._steps[lane - self._start](self._action(lane))
        self._terminated[at] = self._truncated[at] = self._began[at] = False
        self._status[at] = 0
        if self._accept(lane, slot, at, result):
            self._move_on(lane, at)

    def _action(self, lane: int) -> Any:
        if self._action_kind == layout.ACTION_CALL:
            return self._actions(lane)
        row = self._actions[lane]
        # A copy: envs keep and change their actions, and the slab will hold the next one.
        return row if self._action_kind == layout.ACTION_SCALAR else row.copy()

    def _accept(self, lane: int, slot: int, at: int, result: Any) -> bool:
        """Write what env.step has returned into the frame, where all flags are False.

        Returns:
            Whether return and length of the episode must still be moved on; not where another one has begun.
        """
        if not isinstance(result, tuple) or len(result) != 5:
            raise TypeError(f"step must return a tuple (obs, reward, terminated, truncated, info), got {result!r}")
        observation, reward, terminated, truncated, info = result
        try:
            self._reward[at] = reward
        except (TypeError, ValueError):
            self._reward[at] = _number(reward)
        if terminated or truncated:
            self._end(lane, at, terminated, truncated)
            if self._same_step:
                self._move_on(lane, at)
                self._reset(self._finish, lane, slot, observation, info)
                return False
        self._write(lane, slot, observation)
        if not isinstance(info, dict) or info:
            self._add_note(lane, slot, info)
        return True

    def _end(self, lane: int, at: int, terminated: Any, truncated: Any) -> None:
        """Note that a step, whose reward is written, has ended the episode."""
        flags = truth("terminated", terminated), truth("truncated", truncated)
        self._terminated[at], self._truncated[at] = flags
        self._counters.episodes(1, self._run_return[lane] + self._reward[at], self._run_length[lane] + 1)
        if not self._same_step:
            self._ended[lane] = 1

    def _reset(self, callback: Callable[..., None], *args: Any) -> None:
        """Begin an episode by a callback; its time is that of a reset."""
        self._noted, began = True, time.monotonic_ns()
        try:
            callback(*args)
        finally:
            self._stats[layout.STAT_RESET_NS] += time.monotonic_ns() - began

    def _move_on(self, lane: int, at: int) -> None:
        """Add the step to the episode's return and length."""
        self._episode_return[at] = self._run_return[lane] = self._run_return[lane] + self._reward[at]
        self._episode_length[at] = self._run_length[lane] = self._run_length[lane] + 1

    def _write(self, lane: int, slot: int, observation: Any) -> None:
        """Write an observation; the callback `store` does it where a leaf is not exactly as its space says."""
        try:
            self._rows[slot][lane - self._start][:] = observation
            return
        except (TypeError, ValueError, BufferError):
            pass
        if not self._plain:
            self._noted = True
        elif self._leaves_written(lane, slot, observation):
            return
        self._store(lane, slot, observation)

    def _leaves_written(self, lane: int, slot: int, observation: Any) -> bool:
        try:
            for path, dtype, shape, rows in self._leaves:
                value = observation
                for key in path:
                    value = value[key]
                if dtype is None:
                    value = operator.index(value)
                elif type(value) is not np.ndarray or value.dtype != dtype or value.shape != shape:
                    return False
                rows[slot][lane] = value
        except Exception:
            return False  # `store` says what is wrong
        return True

    def _add_note(self, lane: int, slot: int, info: Any) -> None:
        self._noted = True
        self._note(lane, slot, info)

    def note(self, lane: int, slot: int, info: Any) -> None:
        """Keep the info of an answer, for steppers that write the frames themselves."""
        self._add_note(lane, slot, info)

    def begin(self, lane: int, slot: int, observation: Any, info: Any, fresh: bool) -> None:
        """Write the first observation of an episode.

        Args:
            fresh: the lane was asked for a reset, so that its reward and flags are none; otherwise they are those of
                the step that ended the last episode.

        Raises what `store` and `note` raise.
        """
        if not self._start <= lane < self._stop:
            raise IndexError("no lane of this block")
        at = slot * self._lane_count + lane
        if fresh:
            self._reward[at] = self._episode_return[at] = 0.0
            self._terminated[at] = self._truncated[at] = False
            self._status[at] = self._episode_length[at] = 0
        self._began[at] = True
        self._ended[lane] = self._run_length[lane] = 0
        self._run_return[lane] = 0.0
        self._stats[layout.STAT_EPISODES] += 1
        self._write(lane, slot, observation)
        if not isinstance(info, dict) or info:
            self._add_note(lane, slot, info)

    # ---- all lanes at once -----------------------------------------------------------------------------------

    def _is_whole(self, asked: Sequence[int]) -> bool:
        """Whether all lanes were asked, and all to step into one frame."""
        slots = self._own_slot.tobytes()
        whole = len(asked) == len(self._own) and slots == slots[:1] * len(slots)
        return whole and self._own_op.tobytes() == self._zeros

    def run_all(self, slot: int, actions: Any, began: int, waking: int | None = None) -> None:
        """Step all lanes, which were asked for, into one frame; none answers before the pass is over, or interrupted.

        No bell is rung: the caller looks at its own block when this returns.

        Args:
            actions: one for each lane, the env's own.
            began, waking: when the pass began, and how long it was waited for; None where the caller has just asked.
        """
        stats, rewards = self._stats, self._reward
        self._own_flags[slot].fill(0)
        # Lanes that must be reset first; none where no episode has ended, or the caller resets.
        ended = self._own_ended.tobytes() if self._autoreset == layout.AUTORESET_NEXT_STEP else self._zeros
        # Envs may be so quick that to read the clock for each would matter.
        clocks = [began] if self._counters.slow or waking is not None else None
        done, apart = self._start, []  # apart: lanes that have moved on by themselves, or not at all
        stats[layout.STAT_SINCE_NS] = began
        try:
            for step, action, row, reset, at in zip(
                self._steps, actions, self._rows[slot], ended, self._places[slot], strict=True
            ):
                stats[STAT_AT] = done + 1
                try:
                    if reset:
                        self._reset(self._special, done, slot, layout.OP_STEP)
                        self._run_length[done] = -1  # to move on from, with a reward of 0
                    else:
                        result = step(action)
                        try:  # the common case; `_accept` does the same with more care
                            observation, reward, terminated, truncated, info = result
                            plain = type(info) is dict and type(result) is tuple
                            if plain:
                                rewards[at] = reward
                                row[:] = observation
                                if terminated or truncated:
                                    plain = not self._same_step
                                    if plain:
                                        self._end(done, at, terminated, truncated)
                        except (TypeError, ValueError, BufferError):
                            plain = False
                        if plain:
                            if info:
                                self._add_note(done, slot, info)
                        elif not self._accept(done, slot, at, result):
                            apart.append(done)
                except BaseException as error:
                    apart.append(done)
                    self._fail(done, slot, error)
                done += 1
                if clocks is not None:
                    stats[layout.STAT_SINCE_NS] = clock = time.monotonic_ns()
                    clocks.append(clock)
        finally:
            now = time.monotonic_ns()
            self._settle(slot, done - self._start, apart, now)
            self._counters.passed_over(done - self._start, waking or 0, began, now, clocks)
        if self._noted:
            self._send_notes()

    def _settle(self, slot: int, done: int, apart: list[int], now: int) -> None:
        """Move on the episodes of the lanes that were stepped, but for those that are `apart`; then they answer."""
        base = slot * self._lane_count
        if done < FEW or done < len(self._own):
            for lane in range(self._start, self._start + done):
                if lane not in apart:
                    self._move_on(lane, base + lane)
                self._done_ns[lane] = now
                self._answered[lane] = self._requested[lane]
            return
        kept = [(lane, self._run_return[lane], self._run_length[lane], self._episode_return[base + lane],
                 self._episode_length[base + lane]) for lane in apart]  # fmt: skip
        (run_return, run_length), (episode_return, episode_length) = self._own_runs, self._own_totals[slot]
        np.add(run_return, self._own_rewards[slot], run_return)
        np.add(run_length, self._ones, run_length)
        episode_return[:], episode_length[:] = self._run_views
        for lane, *values in kept:
            (self._run_return[lane], self._run_length[lane],
             self._episode_return[base + lane], self._episode_length[base + lane]) = values  # fmt: skip
        self._own_done_ns.fill(now)
        self._own_answered[:] = self._own_requested


def _number(reward: Any) -> float:
    """The reward as a number; not what a text says, which `float` would read."""
    if not isinstance(reward, str | bytes):
        try:
            return float(reward)
        except TypeError:
            pass
    raise TypeError(f"reward must be a number, got {reward!r}")

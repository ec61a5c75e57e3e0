"""Envs that have several lanes, as a worker's block: reads actions from the slab, lets the envs write into its frames.

The counterpart of `worker.single` for envs that are batches themselves (`envs.group`): one worker steps one or many.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal import native
from shoal.envs.adapt import adapt
from shoal.envs.batched import RowsEnv
from shoal.envs.group import Answers, GroupEnv, Infos, is_group
from shoal.errors import BadObservation, SpaceMismatch
from shoal.memory.messages import (
    NO_SEED,
    RESTART_INFO,
    STATUS_ERROR,
    STATUS_FINAL,
    STATUS_NOTE,
    Note,
    Order,
    Reply,
    StepperConfig,
)
from shoal.memory.packed_errors import PackedError, pack_error
from shoal.memory.slab import FRAME_FIELDS, Slab
from shoal.native import counters, twin
from shoal.spaces.leaves import assemble, flatten
from shoal.state.env_state import EnvState, load_env, save_env
from shoal.support.copies import own_copy
from shoal.worker.single import Stepper, close_envs, spaces_of

__all__ = ["GroupStepper", "make_stepper"]

Array = npt.NDArray[Any]
WITH_THE_FIRST = "group"  # the kind of the state of a lane that was saved with the first one of its group


def make_stepper(slab: Slab, worker: int, start: int, envs: list[Any], *args: Any, **options: Any) -> Any:
    """What steps these envs: see Stepper for the arguments."""
    kind: Any = GroupStepper if is_group(envs[0]) else Stepper
    if hasattr(envs[0], "make_stepper"):  # it brings its own
        kind = envs[0].make_stepper
    return kind(slab, worker, start, envs, *args, **options)


@dataclass
class _Group:
    """The lanes `start` up to `stop` of one env."""

    index: int
    env: GroupEnv
    start: int
    stop: int
    views: list[Answers]  # of all its lanes, for each frame
    rows: Array  # all of its lanes, counted from 0
    actions: Any  # of all its lanes, where they lie in the slab
    seeds: list[int | None] | None = None  # it must begin an episode with these before it is stepped

    @property
    def count(self) -> int:
        return self.stop - self.start


class GroupStepper:
    """The groups of one worker. Has what a Stepper has: `run`, `wait`, `handle` and `close`, and takes the same."""

    def __init__(
        self,
        slab: Slab,
        worker: int,
        start: int,
        envs: list[GroupEnv],
        env_fns: Sequence[Callable[[], Any]],
        config: StepperConfig,
        post: Callable[[Any], None],
        read_mail: Callable[[], None],
        pool_bell: Any,
        bell: Any,
        same_process: bool = False,
        interrupts: bool = False,
    ):
        self.envs, self._env_fns, self._post, self._read_mail = envs, env_fns, post, read_mail
        self._interrupts = interrupts
        self._own: Callable[[Any], Any] = own_copy if same_process else lambda value: value
        self._mode, self._check_nan, self._publish_each = config.autoreset, config.check_nan, config.publish_each
        self._action_space = config.action_space
        self._leaves = flatten(config.observation_space)
        self._obs = _there(slab.leaf_arrays("obs", self._leaves))
        self._finals = _there(slab.leaf_arrays("final", self._leaves))
        self._actions = _there(slab.leaf_arrays("action", flatten(config.action_space)))
        self._frame = {name: slab.array(name) for name in FRAME_FIELDS}
        self._present = slab.array("present") if "present" in slab.layout.fields else None
        self._op, self._slot, self._requested = slab.array("op"), slab.array("slot"), slab.array("requested")
        self._ended, self._counters = slab.array("ended"), counters.WorkerCounters(slab, worker)
        self._stats = self._counters.stats
        self._run_return, self._run_length = slab.array("run_return"), slab.array("run_length")
        self._resets: dict[int, tuple[int | None, dict[str, Any] | None]] = {}
        self._orders: dict[int, Order] = {}
        self._notes: list[Note] = []
        self._during = "step"
        stop = start + sum(env.num_lanes for env in envs)
        self._mine, self._lanes = slice(start, stop), np.arange(start, stop)
        self._whole = [self._view(slot, start, stop) for slot in range(slab.layout.frames)]
        self._groups = self._lay_out(start)
        self._edges = np.array([group.start for group in self._groups[1:]], np.int64)
        self._asked = np.zeros(stop - start, np.int64)
        for env in envs:
            env.use(self._mode)
        self._timed: list[Any] = [env for env in envs if hasattr(env, "reset_ns")]
        self.core = native.Block(
            slab, worker, start, stop, native.AUTORESET[config.autoreset], config.publish_each, twin.ACTION_CALL, (),
            [None] * (stop - start), None, (None,) * 6, pool_bell, bell,
        )  # fmt: skip
        self.wait = self.core.wait

    def _lay_out(self, start: int) -> list[_Group]:
        groups, first = [], start
        for index, env in enumerate(self.envs):
            stop = start + env.num_lanes
            views = [whole.part(start - first, stop - first) for whole in self._whole]
            if len(views) == 1 and hasattr(env, "move_into"):
                env = self.envs[index] = env.move_into(views[0], self._env_fns[index])
            actions = assemble(self._action_space, [array[start:stop] for array in self._actions])
            groups.append(_Group(index, env, start, stop, views, np.arange(stop - start), actions))
            start = stop
        return groups

    def _view(self, slot: int, start: int, stop: int) -> Answers:
        frame = {name: array[slot, start:stop] for name, array in self._frame.items()}
        return Answers(
            obs=[array[slot, start:stop] for array in self._obs],
            reward=frame["reward"], terminated=frame["terminated"], truncated=frame["truncated"], began=frame["began"],
            present=np.ones(stop - start, np.bool_) if self._present is None else self._present[slot, start:stop],
            final=[array[slot, start:stop] for array in self._finals],
            has_final=np.zeros(stop - start, np.bool_),
        )  # fmt: skip

    # ---- requests ----------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Answer every group that was asked; returns how many lanes."""
        count = int(self.core.asked(self._asked))
        if not count:
            self._flush()  # an interrupt may have come between answers and their notes
            return 0
        began_ns = time.monotonic_ns()
        slot = self._common_slot(count)
        if slot is not None:
            self._step_all(slot, began_ns)
            self._flush()
            return count
        asked = self._asked[:count].copy()
        done: list[Array] = []
        try:
            for group, lanes in self._by_group(asked):
                self.core.enter(int(lanes[0]))
                self._answer(group, lanes)
                self.core.leave(int(lanes[0]))
                done.append(lanes)
                if self._publish_each:
                    self._publish([done.pop()], began_ns)
                    began_ns = time.monotonic_ns()
        finally:  # an interrupt must not have groups stepped again that have answered
            if done:
                self._publish(done, began_ns)
        self._flush()
        return count

    def _common_slot(self, count: int) -> int | None:
        """The frame that all groups are to be stepped into; None where not all of them are asked for a step, and so."""
        slots = self._slot[self._mine]
        others = count < len(slots) or self._publish_each or self._check_nan or self._op[self._mine].any()
        if others or (slots != slots[0]).any() or any(group.seeds is not None for group in self._groups):
            return None
        return int(slots[0])

    def _step_all(self, slot: int, began_ns: int) -> None:
        """Step all groups into one frame, and keep the books of all lanes at once: envs may be many and quick."""
        self._whole[slot].clear()
        for name in ("status", "episode_return", "episode_length"):
            self._frame[name][slot, self._mine] = 0
        done, failed = 0, []
        try:
            for group in self._groups:
                self.core.enter(group.start)
                try:
                    infos = _checked(group.env.step(group.rows, group.actions, group.views[slot]), group.count)
                except BaseException as error:
                    self._let_through(error)
                    failed.append((group, error))
                else:
                    if infos is not None:
                        self._note(group.rows + group.start, np.full(group.count, slot), infos)
                self.core.leave(group.start)
                done += 1
        finally:  # an interrupt must not have groups stepped again that have answered
            answered = self._groups[:done]
            if done == len(self._groups) and not failed:
                self._keep_books(self._mine, slot, self._whole[slot])
            else:
                lost = [group for group, _ in failed]
                for group in answered:
                    if group not in lost:
                        self._keep_books(slice(group.start, group.stop), slot, group.views[slot])
            for group, raised in failed:
                self._fail(group.rows + group.start, np.full(group.count, slot), raised)
            if answered:
                self._publish([self._lanes[: answered[-1].stop - self._mine.start]], began_ns)

    def _by_group(self, asked: Array) -> list[tuple[_Group, Array]]:
        parts = [asked] if len(self._groups) == 1 else np.split(asked, np.searchsorted(asked, self._edges))
        # Where only some have been asked yet, the caller is about to ask the others, and rings after that.
        return [
            (group, lanes)
            for group, lanes in zip(self._groups, parts, strict=True)
            if len(lanes) and (len(lanes) == group.count or not self._needs_all(group, lanes))
        ]

    def _needs_all(self, group: _Group, lanes: Array) -> bool:
        if not group.env.together or len(lanes) % getattr(group.env, "group_size", group.count) == 0:
            return False
        return not (getattr(group.env, "resets_alone", False) and (self._op[lanes] == native.OP_RESET).all())

    def _answer(self, group: _Group, lanes: Array) -> None:
        ops = self._op[lanes]
        op = int(ops[0])
        if len(lanes) > 1 and not (ops == op).all():
            for one in np.unique(ops):
                self._answer(group, lanes[ops == one])
            return
        slots = self._slot[lanes]
        in_place = len(lanes) == group.count and bool((slots == slots[0]).all())
        # Rows that are not one piece of a frame are put there afterwards.
        out = group.views[slots[0]] if in_place else Answers.scratch(self._leaves, len(lanes), bool(self._finals))
        out.clear()
        for name in ("status", "episode_return", "episode_length"):
            self._frame[name][slots, lanes] = 0
        try:
            infos = _checked(self._act(group, lanes, op, out), len(lanes))
            self._during = "step"
            if self._check_nan:
                self._refuse_nan(lanes, out)
        except BaseException as error:
            self._let_through(error)
            self._fail(lanes, slots, error)
            return
        if not in_place:
            self._scatter(slots, lanes, out)
        self._keep_books(lanes, slots, out, op != native.OP_RESTART)
        self._note(lanes, slots, infos)

    def _act(self, group: _Group, lanes: Array, op: int, out: Answers) -> Infos:
        rows = lanes - group.start
        if op == native.OP_RESTART:
            return self._restart(group, lanes, out)
        if op == native.OP_RESET:
            self._read_mail()
            self._during = "reset"
            asked = [self._resets[lane] for lane in lanes.tolist()]
            first = group.seeds or [None] * group.count
            seeds = [first[row] if seed is None else seed for row, (seed, _) in zip(rows.tolist(), asked, strict=True)]
            infos = group.env.reset(rows, seeds, asked[0][1], out)
            for lane in lanes.tolist():
                del self._resets[lane]
            group.seeds = None
            return infos
        if group.seeds is not None:  # its env is a new one
            self._during = "reset"
            infos = group.env.reset(rows, group.seeds, None, out)
            group.seeds = None
            return infos
        whole = len(lanes) == group.count
        at = slice(group.start, group.stop) if whole else lanes
        return group.env.step(rows, assemble(self._action_space, [array[at] for array in self._actions]), out)

    def _scatter(self, slots: Array, lanes: Array, out: Answers) -> None:
        for name in ("reward", "terminated", "truncated", "began"):
            self._frame[name][slots, lanes] = getattr(out, name)
        if self._present is not None:
            self._present[slots, lanes] = out.present
        for targets, values in ((self._obs, out.obs), (self._finals, out.final)):
            for target, value in zip(targets, values, strict=True):
                target[slots, lanes] = value

    def _keep_books(self, lanes: Array | slice, slots: Array | int, out: Answers, steps: bool = True) -> None:
        """Keep the returns and lengths of the lanes' episodes, and who has ended. An episode that is cut short gets no
        further step."""
        began, over = out.began, out.terminated | out.truncated
        stepped = (over | ~began) & out.present
        returns = self._run_return[lanes] + np.where(stepped & steps, out.reward, 0.0)
        lengths = self._run_length[lanes] + (stepped & steps)
        self._frame["episode_return"][slots, lanes] = np.where(stepped, returns, 0.0)
        self._frame["episode_length"][slots, lanes] = np.where(stepped, lengths, 0)
        if over.any():
            self._counters.episodes(int(np.count_nonzero(over)), returns[over].sum(), lengths[over].sum())
        if began.any():
            returns[began] = lengths[began] = 0
            self._stats[counters.STAT_EPISODES] += np.count_nonzero(began)
        self._run_return[lanes], self._run_length[lanes] = returns, lengths
        self._ended[lanes] = over & ~began
        if out.has_final.any():
            self._frame["status"][slots, lanes] |= np.where(out.has_final, STATUS_FINAL, 0).astype(np.uint8)

    def _publish(self, parts: list[Array], began_ns: int) -> None:
        for env in self._timed:
            self._stats[counters.STAT_RESET_NS] += env.reset_ns
            env.reset_ns = 0
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self.core.publish(np.ascontiguousarray(ids), began_ns)
        if self._publish_each:
            self._flush()

    def _refuse_nan(self, lanes: Array, out: Answers) -> None:
        named = [(f"observation{leaf.name}", array) for leaf, array in zip(self._leaves, out.obs, strict=True)]
        for what, values in [*named, ("its reward", out.reward)]:
            if values.dtype.kind != "f":
                continue
            bad = np.isnan(values).reshape(len(lanes), -1).any(axis=1)
            if bad.any():
                raise BadObservation(f"env {lanes[np.argmax(bad)]}: {what} is nan, and check_nan was asked for")

    def _let_through(self, error: BaseException) -> None:
        """Ctrl-C is the caller's, in its own thread; elsewhere an env that wants to leave has failed."""
        if self._interrupts and isinstance(error, KeyboardInterrupt):
            raise error

    # ---- beside the slab ---------------------------------------------------------------------------------------

    def _note(self, lanes: Array, slots: Array, infos: Infos) -> None:
        for i, info in enumerate(infos or ()):
            if info:
                lane = int(lanes[i])
                self._notes.append(Note(lane, int(self._requested[lane]), self._own(info), [], None))
                self._frame["status"][slots[i], lane] |= STATUS_NOTE

    def _fail(self, lanes: Array, slots: Array, error: BaseException) -> None:
        """What goes wrong in an env goes wrong for all of its lanes that were asked."""
        during, self._during = self._during, "step"
        for name in ("terminated", "truncated"):
            self._frame[name][slots, lanes] = False
        self._frame["status"][slots, lanes] = STATUS_NOTE | STATUS_ERROR
        packed = pack_error(error, during)
        for lane in lanes.tolist():
            self._resets.pop(lane, None)
            self._orders.pop(lane, None)
            self._notes.append(Note(lane, int(self._requested[lane]), {}, [], packed))

    def _flush(self) -> None:
        """Send what was kept, after the bell was rung, so that a full channel blocks nobody."""
        if self._notes:
            self._post(self._notes)
            self._notes = []

    # ---- restarts ----------------------------------------------------------------------------------------------

    def _restart(self, group: _Group, lanes: Array, out: Answers) -> Infos:
        """Go on with a new env where the old one was lost; a group is lost as a whole."""
        self._during = "its constructor"
        self._read_mail()
        orders = [self._orders[lane] for lane in lanes.tolist()]
        if any(order.rebuild for order in orders):
            self._rebuild(group)
            for order in orders:  # an interrupted restart does not build twice
                self._orders[order.lane] = order._replace(rebuild=False)
        self._during = "reset"
        rows, seeds = lanes - group.start, [order.seed for order in orders]
        infos: Infos = None
        lived = self._lived(orders)
        between = self._mode == "next_step" and not lived.any()
        if between or all(order.begin for order in orders):
            infos = group.env.reset(rows, seeds, orders[0].options, out)
        elif self._mode == "same_step":
            infos = group.env.reset(rows, seeds, None, out)
            self._repeat(out.final, orders)
            out.has_final[:] = out.truncated[:] = lived
            out.present |= lived  # also where the new episode does without them
        else:
            self._repeat(out.obs, orders)
            out.present[:] = out.truncated[:] = lived
            for array in out.obs:
                array[~lived] = 0
            group.seeds = seeds
        self._go_back(orders)
        for lane in lanes.tolist():
            self._orders.pop(lane, None)
            self._resets.pop(lane, None)
        given = infos or [{}] * len(orders)
        return [{**info, RESTART_INFO: order.report} for info, order in zip(given, orders, strict=True)]

    def _repeat(self, targets: Sequence[Array], orders: Sequence[Order]) -> None:
        """What the caller has seen last, once more."""
        for i, order in enumerate(orders):
            for target, array in zip(targets, self._obs, strict=True):
                target[i] = array[order.last_slot, order.lane] if self._was_seen(order) else 0

    def _was_seen(self, order: Order) -> bool:
        """Whether the caller has seen any answer of this lane."""
        return order.last_slot < len(self._frame["reward"])

    def _lived(self, orders: Sequence[Order]) -> Any:
        """Whose episode the loss has cut short: not those who were absent, or whose end the caller has seen already."""
        if self._present is None:
            return np.ones(len(orders), np.bool_)
        slots = [min(order.last_slot, len(self._present) - 1) for order in orders]
        last = slots, [order.lane for order in orders]
        ended = (self._frame["terminated"][last] | self._frame["truncated"][last]) & ~self._frame["began"][last]
        return self._present[last] & ~ended

    def _go_back(self, orders: Sequence[Order]) -> None:
        """Returns and lengths are those that the caller has seen last: what came after that is lost."""
        for order in orders:
            last = (order.last_slot, order.lane)
            # Whose last answer ended an episode has not begun the one that is lost, or only just.
            running = self._was_seen(order) and not (self._frame["terminated"][last] or self._frame["truncated"][last])
            self._run_return[order.lane] = self._frame["episode_return"][last] if running else 0.0
            self._run_length[order.lane] = self._frame["episode_length"][last] if running else 0

    def _rebuild(self, group: _Group) -> None:
        old = [group.env]
        before = (group.env.num_lanes, *spaces_of(group.env))
        close_envs(old, group.start)
        env = adapt(self._env_fns[group.index]())
        if not is_group(env) or (env.num_lanes, *spaces_of(env)) != before:
            close_envs([env], group.start)
            raise SpaceMismatch("the env that was built anew has other lanes or spaces than the one before it")
        env.use(self._mode)
        group.env = self.envs[group.index] = env

    # ---- commands ----------------------------------------------------------------------------------------------

    def handle(self, message: tuple[Any, ...]) -> None:
        """Carry out a command from the caller: (name, ...)."""
        getattr(self, f"_on_{message[0]}")(*message[1:])

    def _on_reset(self, asked: Sequence[tuple[int, int | None, dict[str, Any] | None]]) -> None:
        self._resets.update((lane, (seed, options)) for lane, seed, options in asked)

    def _on_restart(self, orders: Sequence[Order]) -> None:
        self._orders.update((order.lane, order) for order in orders)

    def _on_call(self, ticket: int, lanes: Sequence[int], name: str, args: Any, kwargs: Any) -> None:
        def call(group: _Group, own: list[int]) -> list[Any]:
            if name in _fields(group.env):
                return list(group.env.env.get_rows(name, [lane - group.start for lane in own]))
            value = getattr(group.env.env, name)
            return [value(*args, **kwargs) if callable(value) else value] * len(own)

        self._reply(ticket, lanes, call, f"call of {name!r}")

    def _on_apply(self, ticket: int, lanes: Sequence[int], function: Any, args: Any, kwargs: Any) -> None:
        def apply(group: _Group, own: list[int]) -> list[Any]:
            return [function(group.env.env, *args, **kwargs)] * len(own)

        self._reply(ticket, lanes, apply, f"apply of {getattr(function, '__name__', function)!r}")

    def _on_set(self, ticket: int, lanes: Sequence[int], name: str, values: Sequence[Any]) -> None:
        given = dict(zip(lanes, values, strict=True))

        def assign(group: _Group, own: list[int]) -> list[Any]:
            if name in _fields(group.env):
                group.env.env.set_rows(name, [lane - group.start for lane in own], [given[lane] for lane in own])
            else:
                setattr(group.env.env, name, given[own[-1]])  # there is only one
            return [None] * len(own)

        self._reply(ticket, lanes, assign, f"set_attr of {name!r}")

    def _on_save(self, ticket: int, lanes: Sequence[int]) -> None:
        def save(group: _Group, own: list[int]) -> list[Any]:
            env: Any = group.env
            if hasattr(env, "save_rows"):
                rows = env.save_rows([lane - group.start for lane in own])
                return [(EnvState("own", row), NO_SEED) for row in rows]
            state = {group.start: save_env(env)}
            seeds: list[Any] = [NO_SEED] * group.count if group.seeds is None else list(group.seeds)
            return [(state.get(lane, EnvState(WITH_THE_FIRST, None)), seeds[lane - group.start]) for lane in own]

        self._reply(ticket, lanes, save, "saving its state")

    def _on_load(self, ticket: int, lanes: Sequence[int], saved: Sequence[tuple[EnvState, Any]]) -> None:
        given = dict(zip(lanes, saved, strict=True))

        def load(group: _Group, own: list[int]) -> list[Any]:
            if hasattr(group.env, "save_rows"):
                env: Any = group.env
                env.load_rows([lane - group.start for lane in own], [given[lane][0].content for lane in own])
            else:
                self._rebuild(group)  # a state is put into an env that has none yet
                group.env = self.envs[group.index] = load_env(given[group.start][0], group.env)
                seeds = [given[lane][1] for lane in own]
                group.seeds = None if NO_SEED in seeds else seeds
            return [None] * len(own)

        self._reply(ticket, lanes, load, "loading its state")

    def _reply(
        self, ticket: int, lanes: Sequence[int], act: Callable[[_Group, list[int]], list[Any]], during: str
    ) -> None:
        """Act once for each group: what an env says holds for all of its lanes."""
        values: dict[int, Any] = {}
        for group in self._groups:
            own = [lane for lane in lanes if group.start <= lane < group.stop]
            if not own:
                continue
            # Below 0: not stepping, but busy with this env all the same.
            self._stats[native.STAT_SINCE_NS], self._stats[native.STAT_AT] = time.monotonic_ns(), -own[0] - 1
            try:
                found = act(group, own)
            except BaseException as error:
                self._let_through(error)
                found = [pack_error(error, during)] * len(own)
            values.update(zip(own, found, strict=True))
        self._stats[native.STAT_AT] = 0
        self._post(Reply(ticket, [values[lane] for lane in lanes]))

    def close(self) -> list[tuple[int, PackedError]]:
        """Close the envs; the errors of those that raised, by the first lane of each."""
        self.envs.clear()
        return [error for group in self._groups for error in close_envs([group.env], group.start)]


def _fields(env: Any) -> Sequence[str]:
    """The attributes that each row of a batched env has for itself; those of other envs may mean anything."""
    return getattr(env.env, "fields", ()) if isinstance(env, RowsEnv) else ()


def _there(arrays: Sequence[Array | None]) -> list[Array]:
    return [array for array in arrays if array is not None]


def _checked(infos: Infos, count: int) -> Infos:
    if infos is not None and (len(infos) != count or not all(isinstance(info, dict) for info in infos)):
        raise TypeError(f"infos must be None or {count} dicts, one for each lane, got {infos!r:.100}")
    return infos

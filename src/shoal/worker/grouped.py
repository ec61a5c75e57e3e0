"""Steps envs with several lanes each (`envs.group`): vector envs, teams of agents, and batched envs (`envs.batched`).

The envs read their actions from the slab and write their answers into its frames.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal import native
from shoal.envs.group import Answers, Infos
from shoal.memory.info_columns import ColumnWriter, InfoColumns
from shoal.memory.messages import RESTART_INFO, STATUS_FINAL, Order
from shoal.native import counters, twin
from shoal.spaces.leaves import assemble
from shoal.worker.base import EnvBlock, EnvPlace, Stepper, WorkerChannel

Array = npt.NDArray[Any]
CLEARED = ("status", "episode_return", "episode_length")  # set to zero before each answer


@dataclass(eq=False)
class GroupPlace(EnvPlace):
    """One env of the block, and what it gets to be stepped with."""

    views: list[Answers] = field(default_factory=list)  # the answers of all its lanes, for each frame
    rows: Any = None  # all of its lanes, counted from 0
    actions: Any = None  # those of all its lanes, as they lie in the slab
    unit: int = 1  # how many neighbouring lanes must be asked together
    resets_alone: bool = False  # whether they can still be reset one by one


class GroupStepper(Stepper):
    """Runs envs with several lanes each."""

    place_type = GroupPlace

    def __init__(self, block: EnvBlock, channel: WorkerChannel):
        super().__init__(block, channel)
        slab, worker, start, stop = block.slab, block.worker, block.start, self._places[-1].stop
        all_arrays = (self._obs, self._finals, self._actions)
        self._obs, self._finals, self._actions = ([a for a in arrays if a is not None] for arrays in all_arrays)
        self._publish_each = block.config.publish_each
        self._present = slab.array("present") if "present" in slab.layout.fields else None
        self._op, self._slot = slab.array("op"), slab.array("slot")
        self._counters = counters.WorkerCounters(slab, worker)
        self._run_return, self._run_length = slab.array("run_return"), slab.array("run_length")
        self._mine, self._lanes = slice(start, stop), np.arange(start, stop)
        self._whole = [self._view(slot, start, stop) for slot in range(slab.layout.frames)]
        for place in self._places:
            self._equip(place)
        self._edges = np.array([place.start for place in self._places[1:]], np.int64)
        self._asked = np.zeros(stop - start, np.int64)
        plain = not (self._publish_each or self._check_nan or self._present is not None)
        self._core_keeps_books = plain and native.KIND == "native"
        self._timed: list[Any] = [env for env in self.envs if hasattr(env, "reset_ns")]
        core = native.Block(
            slab, worker, start, stop, self.rule.number, self._publish_each, twin.ACTION_CALL, (),
            [None] * (stop - start), None, (None, None, self.note, None, None, None), channel.pool_bell, channel.bell,
        )  # fmt: skip
        self._use_core(core, slab)
        self._columns = ColumnWriter(slab, self._infos) if "info_rows" in slab.layout.fields else None
        self.wait = self.core.wait

    def _equip(self, place: GroupPlace) -> None:
        env = place.env
        place.unit = getattr(env, "group_size", place.count) if env.together else 1
        place.resets_alone = getattr(env, "resets_alone", False)
        place.views = [whole.part(place.start - self.start, place.stop - self.start) for whole in self._whole]
        place.rows = np.arange(place.count)
        place.actions = assemble(self._action_space, [array[place.lanes] for array in self._actions])
        place.fresh_at = -1  # a state is always put into an env that has its own arrays
        if len(place.views) == 1 and hasattr(env, "move_into"):
            env = env.move_into(place.views[0], place.env_fn)
        self._prepare(env)
        self._put_env(place, env)

    def _view(self, slot: int, start: int, stop: int) -> Answers:
        frame = {name: array[slot, start:stop] for name, array in self._frame.items()}
        return Answers(
            obs=[array[slot, start:stop] for array in self._obs],
            reward=frame["reward"], terminated=frame["terminated"], truncated=frame["truncated"], began=frame["began"],
            present=np.ones(stop - start, np.bool_) if self._present is None else self._present[slot, start:stop],
            final=[array[slot, start:stop] for array in self._finals],
            has_final=np.zeros(stop - start, np.bool_),
        )  # fmt: skip

    def _prepare(self, env: Any) -> None:
        env.use(self.rule.name)

    # ---- requests ----------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Answer all groups that were asked; return the number of lanes."""
        began_ns = time.monotonic_ns()
        if self._core_keeps_books:
            slot = self.core.plain_slot()
            if slot >= 0 and all(group.seeds is None for group in self._places):
                self._step_all(slot, began_ns)
                self.flush()
                return len(self._lanes)
        count = int(self.core.asked(self._asked))
        if not count:
            self.flush()  # an interrupt may have come between answers and their notes
            return 0
        slot = None if self._core_keeps_books else self._common_slot(count)
        if slot is not None:
            self._step_all(slot, began_ns)
            self.flush()
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
        finally:  # after an interrupt, groups that have answered must not be stepped again
            if done:
                self._publish(done, began_ns)
        self.flush()
        return count

    def _common_slot(self, count: int) -> int | None:
        """Return the frame into which all groups are to be stepped; None if some are not asked for a plain step."""
        slots = self._slot[self._mine]
        others = count < len(slots) or self._publish_each or self._check_nan or self._op[self._mine].any()
        if others or (slots != slots[0]).any() or any(group.seeds is not None for group in self._places):
            return None
        return int(slots[0])

    def _step_all(self, slot: int, began_ns: int) -> None:
        """Step all groups into one frame, and keep the books of all lanes at once: envs may be many and quick."""
        if not self._core_keeps_books:
            self._whole[slot].clear()
            for name in CLEARED:
                self._frame[name][slot, self._mine] = 0
        elif self._finals:
            self._whole[slot].has_final.fill(False)
        done, lost = 0, []
        try:
            for group in self._places:
                self.core.enter(group.start)
                try:
                    infos = group.env.step(group.rows, group.actions, group.views[slot])
                    if infos is not None:
                        _check_infos(infos, group.count)
                        self._note(self._lanes[group.start - self.start : group.stop - self.start], slot, infos)
                except BaseException as error:
                    self.failed(group.rows + group.start, np.full(group.count, slot), error)
                    lost.append(group)
                self.core.leave(group.start)
                done += 1
        finally:  # after an interrupt, groups that have answered must not be stepped again
            answered = self._places[:done]
            if done == len(self._places) and not lost:
                self._keep_all_books(slot)
            else:
                for group in answered:
                    if group not in lost:
                        self._keep_books(group.lanes, slot, group.views[slot])
            if answered:
                self._publish([self._lanes[: answered[-1].stop - self.start]], began_ns)

    def _by_group(self, asked: Array) -> list[tuple[GroupPlace, Array]]:
        parts = [asked] if len(self._places) == 1 else np.split(asked, np.searchsorted(asked, self._edges))
        # If only some lanes of a group were asked, the caller is about to ask the others, and rings after that.
        return [
            (group, lanes)
            for group, lanes in zip(self._places, parts, strict=True)
            if len(lanes) and (len(lanes) == group.count or not self._needs_all(group, lanes))
        ]

    def _needs_all(self, group: GroupPlace, lanes: Array) -> bool:
        alone = group.resets_alone and (self._op[lanes] == native.OP_RESET).all()
        return len(lanes) % group.unit != 0 and not alone

    def _answer(self, group: GroupPlace, lanes: Array) -> None:
        ops = self._op[lanes]
        op = int(ops[0])
        if len(lanes) > 1 and not (ops == op).all():
            for one in np.unique(ops):
                self._answer(group, lanes[ops == one])
            return
        slots = self._slot[lanes]
        in_place = len(lanes) == group.count and bool((slots == slots[0]).all())
        # Rows that are not one piece of a frame are copied there afterwards.
        out = group.views[slots[0]] if in_place else Answers.scratch(self._leaves, len(lanes), bool(self._finals))
        out.clear()
        for name in CLEARED:
            self._frame[name][slots, lanes] = 0
        try:
            infos = self._act(group, lanes, op, out)
            if infos is not None:
                _check_infos(infos, len(lanes))
            self._during = "step"
            if self._check_nan:
                self._refuse_nan(lanes, out.obs, out.reward)
        except BaseException as error:
            self._let_through(error)
            self.failed(lanes, slots, error)
            return
        if not in_place:
            self._scatter(slots, lanes, out)
        self._keep_books(lanes, slots, out, op != native.OP_RESTART)
        if infos is not None:
            self._note(lanes, slots, infos)

    def _act(self, group: GroupPlace, lanes: Array, op: int, out: Answers) -> Infos:
        rows = lanes - group.start
        if op == native.OP_RESTART:
            restarted: Infos = self._restart(group, lanes.tolist(), out)
            return restarted
        if op == native.OP_RESET or group.seeds is not None:
            self._during = "reset"
            seeds, options = group.seeds, None
            if op == native.OP_RESET:
                seeds, options = self._asked_reset(group, lanes.tolist())
            infos: Infos = group.env.reset(rows, seeds, options, out)
            self._forget_commands(lanes.tolist())
            group.seeds = None
            return infos
        at = group.lanes if len(lanes) == group.count else lanes
        infos = group.env.step(rows, assemble(self._action_space, [array[at] for array in self._actions]), out)
        return infos

    def _scatter(self, slots: Array, lanes: Array, out: Answers) -> None:
        for name in ("reward", "terminated", "truncated", "began"):
            self._frame[name][slots, lanes] = getattr(out, name)
        if self._present is not None:
            self._present[slots, lanes] = out.present
        for targets, values in ((self._obs, out.obs), (self._finals, out.final)):
            for target, value in zip(targets, values, strict=True):
                target[slots, lanes] = value

    def _keep_books(self, lanes: Array | slice, slots: Array | int, out: Answers, steps: bool = True) -> None:
        """Keep the returns and lengths of the lanes' episodes, and which lanes have ended. `steps` is False for an
        episode that is cut short: it gets no further step."""
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
            self._status[slots, lanes] |= np.where(out.has_final, STATUS_FINAL, 0).astype(np.uint8)

    def _keep_all_books(self, slot: int) -> None:
        if not self._core_keeps_books:
            self._keep_books(self._mine, slot, self._whole[slot])
            return
        self.core.keep_books(slot)
        if self._finals:
            finals = self._whole[slot].has_final
            if finals.any():
                self._status[slot, self._mine] |= np.where(finals, STATUS_FINAL, 0).astype(np.uint8)

    def _publish(self, parts: list[Array], began_ns: int) -> None:
        for env in self._timed:
            self._stats[counters.STAT_RESET_NS] += env.reset_ns
            env.reset_ns = 0
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self.core.publish(np.ascontiguousarray(ids), began_ns)
        if self._publish_each:
            self.flush()

    def _note(self, lanes: Array, slots: Array | int, infos: Sequence[dict[str, Any]]) -> None:
        """Keep the infos of these lanes; `slots` are the frames of their answers, or the one of all."""
        if isinstance(infos, InfoColumns) and self._columns is not None:
            first = slots if isinstance(slots, int) else int(slots[0])
            one_frame = isinstance(slots, int) or bool((slots == first).all())
            if one_frame and self._columns.write(infos, first, lanes):
                return
        each = [slots] * len(lanes) if isinstance(slots, int) else slots.tolist()
        for lane, slot, info in zip(lanes.tolist(), each, infos, strict=True):
            if info:
                self.core.note(lane, slot, info)

    # ---- restarts ----------------------------------------------------------------------------------------------

    def _resume(self, place: EnvPlace, orders: list[Order], where: Answers) -> Infos:
        out, lived = where, self._lived(orders)
        rows, seeds = np.array([order.lane for order in orders]) - place.start, [order.seed for order in orders]
        infos: Infos = None
        next_seeds: list[int | None] | None = None
        if all(order.begin for order in orders) or (self.rule.begins_next and not lived.any()):
            infos = place.env.reset(rows, seeds, orders[0].options, out)
        elif self.rule.resets_at_once:
            infos = place.env.reset(rows, seeds, None, out)
            self._repeat(out.final, orders)
            out.has_final[:] = out.truncated[:] = lived
            out.present |= lived  # also agents that are absent in the new episode
        else:
            self._repeat(out.obs, orders)
            out.present[:] = out.truncated[:] = lived
            for array in out.obs:
                array[~lived] = 0
            next_seeds = seeds
        place.seeds = next_seeds
        self._go_back(orders)
        given = infos or [{}] * len(orders)
        return [{**info, RESTART_INFO: order.report} for info, order in zip(given, orders, strict=True)]

    def _repeat(self, targets: Sequence[Array], orders: Sequence[Order]) -> None:
        """Write the observations that the caller has seen last once more."""
        for i, order in enumerate(orders):
            for target, array in zip(targets, self._obs, strict=True):
                target[i] = array[order.last_slot, order.lane] if self._was_seen(order) else 0

    def _was_seen(self, order: Order) -> bool:
        """Tell whether the caller has seen any answer of this lane."""
        return order.last_slot < len(self._status)

    def _lived(self, orders: Sequence[Order]) -> Any:
        """Tell for each lane whether the loss cut its episode short: it was present, and the caller saw no end."""
        if self._present is None:
            return np.ones(len(orders), np.bool_)
        slots = [min(order.last_slot, len(self._present) - 1) for order in orders]
        last = slots, [order.lane for order in orders]
        ended = (self._frame["terminated"][last] | self._frame["truncated"][last]) & ~self._frame["began"][last]
        return self._present[last] & ~ended

    def _go_back(self, orders: Sequence[Order]) -> None:
        """Set returns and lengths to those that the caller has seen last: what came after that is lost."""
        for order in orders:
            last = (order.last_slot, order.lane)
            # If the last answer ended an episode, the one that is lost had no step yet.
            running = self._was_seen(order) and not (self._frame["terminated"][last] or self._frame["truncated"][last])
            self._run_return[order.lane] = self._frame["episode_return"][last] if running else 0.0
            self._run_length[order.lane] = self._frame["episode_length"][last] if running else 0


def _check_infos(infos: Any, count: int) -> None:
    if isinstance(infos, InfoColumns) and len(infos) == count:
        return
    if len(infos) != count or not all(isinstance(info, dict) for info in infos):
        raise TypeError(f"infos must be None or {count} dicts, one for each lane, got {infos!r:.100}")

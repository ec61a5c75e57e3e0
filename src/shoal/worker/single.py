"""Steps envs with one lane each. The core steps them; this module does what the core's fast path does not handle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal import native
from shoal.errors import BadObservation
from shoal.memory.copies import own_copy
from shoal.memory.messages import RESTART_INFO, STATUS_FINAL, STATUS_NOTE, Order
from shoal.memory.slab import Slab
from shoal.native import twin
from shoal.spaces.leaves import Kind, Leaf, assemble, write_observation
from shoal.worker.base import EnvBlock, EnvPlace, Stepper, WorkerChannel, check_info


class SingleStepper(Stepper):
    """Runs envs with one lane each: lane `start + i` is `envs[i]`."""

    def __init__(self, block: EnvBlock, channel: WorkerChannel):
        super().__init__(block, channel)
        self._has_action_objects = any(leaf.kind is Kind.OBJECT for leaf in self._action_leaves)
        self._action_objects: dict[int, list[Any]] = {}
        self._steps = [env.step for env in self.envs]
        kind, actions = self._action_source()
        core = native.Block(
            block.slab, block.worker, self.start, self.start + len(self.envs), self.rule.number,
            block.config.publish_each, kind, self._leaves_for_core(block.slab), self._steps, actions,
            (self.special, self.finish, self.note, self.store, self.failed, self.flush),
            channel.pool_bell, channel.bell,
        )  # fmt: skip
        self._use_core(core, block.slab)
        self.run = self.core.run
        self.wait = self.core.wait

    def _leaves_for_core(self, slab: Slab) -> tuple[tuple[Any, ...], ...]:
        described = slab.describe("obs", self._leaves)
        # For check_nan, each leaf gets a type that the core does not know, so that it leaves observations to `store`.
        return tuple((*leaf[:3], "?", *leaf[4:]) for leaf in described) if self._check_nan else described

    def _action_source(self) -> tuple[int, Any]:
        leaf = self._action_leaves[0] if len(self._action_leaves) == 1 else None
        if leaf is None or leaf.path or leaf.kind is not Kind.ARRAY:
            return twin.ACTION_CALL, self._action
        return (twin.ACTION_ROW if leaf.shape else twin.ACTION_SCALAR), self._actions[0]

    def _action(self, lane: int) -> Any:
        """Return the action of one lane, for nested spaces and for objects."""
        if self._has_action_objects:
            self._read_mail()
            self._refuse_lost([lane])
        objects = iter(self._action_objects.pop(lane, ()))
        values = [self._leaf_value(leaf, array, lane, objects) for leaf, array in
                  zip(self._action_leaves, self._actions, strict=True)]  # fmt: skip
        return assemble(self._action_space, values)

    @staticmethod
    def _leaf_value(leaf: Leaf, array: Any, lane: int, objects: Any) -> Any:
        if leaf.kind is Kind.OBJECT:
            return next(objects)
        if leaf.kind is Kind.TEXT:
            return str(array[lane])
        return array[lane].copy() if leaf.shape else array[lane]

    def _put_env(self, place: EnvPlace, env: Any) -> None:
        super()._put_env(place, env)
        self._steps[place.index] = env.step  # the core looks here at every step

    def part(self) -> None:
        super().part()
        if self._copied is not None:
            self._kept_steps = list(self._steps)
            self._steps[:] = [self._copied] * len(self._steps)

    def _on_actions(self, lanes: Sequence[int], objects: Sequence[list[Any]]) -> None:
        self._action_objects.update(zip(lanes, objects, strict=True))
        for lane in lanes if self._lost else ():
            self._lost.pop(lane, None)

    # ---- callbacks of the core -------------------------------------------------------------------------------

    def special(self, lane: int, slot: int, op: int) -> None:
        """Carry out a reset, asked for or automatic, or a restart."""
        place = self._place_of[lane - self.start]
        if op == native.OP_RESTART:
            self._restart(place, [lane], slot)
            return
        self._during = "reset"
        if op == native.OP_RESET:
            (seed,), options = self._asked_reset(place, [lane])
            observation, info = _checked(place.env.reset(seed=seed, **_given(options)))
        elif place.seeds is not None:
            observation, info = _checked(place.env.reset(seed=place.seeds[0]))
        else:
            observation, info = _checked(self._begin_next(place.env, lane))
        self.core.begin(lane, slot, observation, info, True)
        if self._resets or self._orders:
            self._forget_commands([lane])
        place.seeds = None
        self._during = "step"

    def _begin_next(self, env: Any, lane: int) -> Any:
        """Reset an env whose episode is over; one that begins its episodes in a step gets the action of its lane."""
        begin_next = getattr(type(env), "begin_next", None)
        return env.reset() if begin_next is None else begin_next(env, self._action(lane))

    def finish(self, lane: int, slot: int, observation: Any, info: dict[str, Any]) -> None:
        """End an episode and begin the next one at once: the last observation travels beside the first one."""
        check_info(info)
        # Copied: an env that reuses its arrays or its info would overwrite them in reset.
        final: dict[str, Any] = {}
        if self._keep_final(lane, slot, observation):
            if info:
                final = {"final_info": own_copy(info)}
        else:
            final = {"final_obs": own_copy(observation), "final_info": own_copy(info)}
        self._during = "reset"
        observation, reset_info = _checked(self.envs[lane - self.start].reset())
        self.core.begin(lane, slot, observation, {**final, **reset_info}, False)
        self._during = "step"

    def _keep_final(self, lane: int, slot: int, observation: Any) -> bool:
        """Write an episode's last observation into the slab, if each leaf has exactly the type of its field."""
        for leaf, target in zip(self._leaves, self._finals, strict=True):
            value = observation
            try:
                for key in leaf.path:
                    value = value[key]
            except (KeyError, IndexError, TypeError):
                return False
            if target is None or not _is_exactly(value, leaf):
                return False
            target[slot, lane] = value
        self._status[slot, lane] |= STATUS_FINAL
        return True

    def store(self, lane: int, slot: int, observation: Any) -> None:
        """Write an observation that has objects in it, or a leaf of another type than its field."""
        try:
            objects = write_observation(self._leaves, self._obs, (slot, lane), observation)
        except BadObservation as error:
            raise BadObservation(f"env {lane}: {error}; its observation_space must say what it returns") from None
        if self._check_nan:
            rows = slice(lane, lane + 1)
            written = [None if array is None else array[slot, rows] for array in self._obs]
            self._refuse_nan([lane], written, self._frame["reward"][slot, rows])
        if objects:
            self._add_note(lane, slot, STATUS_NOTE, objects=self._own(objects))

    # ---- restarts ----------------------------------------------------------------------------------------------

    def _resume(self, place: EnvPlace, orders: list[Order], where: int) -> None:
        (order,), slot = orders, where
        report = {RESTART_INFO: order.report}
        if order.begin:
            observation, info = _checked(place.env.reset(seed=order.seed, **_given(order.options)))
            self.core.begin(order.lane, slot, observation, {**info, **report}, True)
            place.seeds = None
            return
        self._cut_short(order, slot)
        if self.rule.resets_at_once:
            final = {"final_obs": self._last_observation(order), "final_info": {}}
            observation, info = _checked(place.env.reset(seed=order.seed))
            self.core.begin(order.lane, slot, observation, {**final, **info, **report}, False)
            place.seeds = None
        else:
            self._ended[order.lane] = 1
            place.seeds = [order.seed]
            self.core.note(order.lane, slot, report)

    def _cut_short(self, order: Order, slot: int) -> None:
        """End the episode of an env that was lost: the caller gets the last answer again, truncated."""
        lane, last = order.lane, (order.last_slot, order.lane)
        for array in [*self._obs, *self._frame.values()]:
            if array is not None:
                array[slot, lane] = array[last]
        if self.rule.resets_at_once and (self._frame["terminated"][last] or self._frame["truncated"][last]):
            # That answer ended one episode and began the one that is lost.
            self._frame["episode_return"][slot, lane] = self._frame["episode_length"][slot, lane] = 0
        for name, value in (("reward", 0), ("terminated", 0), ("truncated", 1), ("began", 0), ("status", 0)):
            self._frame[name][slot, lane] = value

    def _last_observation(self, order: Order) -> Any:
        objects = iter(order.last_objects)
        values = [self._leaf_value(leaf, None if array is None else array[order.last_slot], order.lane, objects)
                  for leaf, array in zip(self._leaves, self._obs, strict=True)]  # fmt: skip
        return assemble(self._observation_space, values)


def _given(options: dict[str, Any] | None) -> dict[str, Any]:
    """Return options as an argument of reset, if there are any: not every env takes them."""
    return {} if options is None else {"options": options}


def _checked(result: Any) -> tuple[Any, Any]:
    """What a reset returns."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"reset must return a tuple (obs, info), got {result!r:.200}")
    return result


def _is_exactly(value: Any, leaf: Leaf) -> bool:
    return isinstance(value, np.ndarray | np.generic) and value.dtype == leaf.dtype and value.shape == leaf.shape

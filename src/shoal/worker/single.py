"""The envs of one worker: builds them, resets them, keeps what the fast path of the core does not handle.

The same Stepper runs in the caller's process, in a thread and in a worker process, with the C core or the twin:
that is why results do not depend on the backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space

from shoal import native
from shoal.envs.adapt import adapt
from shoal.envs.group import MODES, is_group
from shoal.envs.wrapper_layers import get_attr
from shoal.errors import BadEnv, BadObservation, SpaceMismatch
from shoal.memory.messages import (
    NO_SEED,
    RESTART_INFO,
    STATUS_ERROR,
    STATUS_FINAL,
    STATUS_NOTE,
    BlockSummary,
    LaneGroup,
    Note,
    Order,
    Reply,
    StepperConfig,
)
from shoal.memory.packed_errors import PackedError, pack_error
from shoal.memory.slab import FRAME_FIELDS, Slab
from shoal.native import twin
from shoal.spaces.leaves import Kind, Leaf, array_leaves, assemble, flatten, write_observation
from shoal.state.env_state import EnvState, load_env, save_env
from shoal.support.copies import own_copy

__all__ = ["Stepper", "build_envs", "close_envs"]


@dataclass
class _LaneReset:
    """What an explicit reset of a lane was asked with."""

    seed: int | None = None
    options: dict[str, Any] | None = None


class _NoEnv:
    """Stands where an env was that could not be rebuilt."""

    def close(self) -> None:
        """Nothing to close."""

    def step(self, action: Any) -> Any:
        """Say why not."""
        raise RuntimeError("this env could not be built again")

    def reset(self, **_: Any) -> Any:
        """Say why not."""
        raise RuntimeError("this env could not be built again")


class BuildError(Exception):
    """The constructor of an env raised."""

    def __init__(self, env_id: int, error: PackedError):
        super().__init__(env_id, error)
        self.env_id = env_id
        self.error = error


def build_envs(
    env_fns: Sequence[Callable[[], Any]], start: int, interrupts: bool = False
) -> tuple[list[Any], BlockSummary]:
    """Call the env functions; `start` is the id of the first. Closes what was built if one of them raises."""
    envs: list[Any] = []
    pairs = []
    try:
        seen: dict[int, int] = {}
        for env_id, env_fn in enumerate(env_fns, start):
            envs.append(adapt(env_fn()))
            refuse_shared(seen, identity_of(envs[-1]), env_id)
            if is_group(envs[-1]) != is_group(envs[0]):
                one, other = ("several lanes", "just one")[:: 1 if is_group(envs[-1]) else -1]
                raise BadEnv(f"env {env_id} has {one}, and env {start} {other}: give each kind a pool of its own")
            pairs.append(spaces_of(envs[-1]))
        return envs, _summarize(envs, pairs)
    except BaseException as error:
        close_envs(envs, start)
        if interrupts and isinstance(error, KeyboardInterrupt):
            raise
        raise BuildError(start + min(len(pairs), len(env_fns) - 1), pack_error(error, "its constructor")) from error


def close_envs(envs: list[Any], start: int) -> list[tuple[int, PackedError]]:
    """Close them all, whatever one of them does; the errors of those that raised."""
    errors = []
    for env_id, env in enumerate(envs, start):
        try:
            if hasattr(env, "close"):
                env.close()
        except BaseException as error:
            errors.append((env_id, pack_error(error, "close")))
    envs.clear()
    return errors


def spaces_of(env: Any) -> tuple[Space[Any], Space[Any]]:
    """The (observation, action) spaces of an env, or of one of its lanes. Raises BadEnv if it is no env."""
    if is_group(env):
        pair = (env.single_observation_space, env.single_action_space)
        for what, space in zip(("observation", "action"), pair, strict=True):
            array_leaves(what, space, "a batch")
        return pair
    _check_env(env)
    return env.observation_space, env.action_space


def identity_of(env: Any) -> int:
    """Which object it is, whatever is wrapped around it."""
    return id(env.env if is_group(env) else getattr(env, "unwrapped", env))


def refuse_shared(seen: dict[int, int], identity: int, env_id: int) -> None:
    """Raise BadEnv if this env has been seen in another place; `seen` has the ids of those before it."""
    first = seen.setdefault(identity, env_id)
    if first != env_id:
        raise BadEnv(
            f"env {env_id} is the same object as env {first}: each env function must make an env of its own, so make "
            "it inside the function instead of returning one that was made before"
        )


def _check_env(env: Any) -> None:
    missing = [name for name in ("step", "reset", "observation_space", "action_space") if not hasattr(env, name)]
    if missing:
        raise BadEnv(f"the env function returned {env!r}, which is no Gymnasium env: it has no {', '.join(missing)}")


def _summarize(envs: Sequence[Any], pairs: list[tuple[Space[Any], Space[Any]]]) -> BlockSummary:
    found: list[tuple[Space[Any], Space[Any]]] = []
    which = []
    for pair in pairs:
        if pair not in found:
            found.append(pair)
        which.append(found.index(pair))
    groups = [env for env in envs if is_group(env)]
    lanes = [one for env in groups for one in _lanes_of(env)]
    if len(lanes) > len(which):  # one object with many envs in it
        which = [which[0]] * len(lanes)
    first = groups[0].env if groups else envs[0]
    return BlockSummary(
        found, which, dict(getattr(first, "metadata", None) or {}), getattr(first, "render_mode", None),
        getattr(first, "spec", None), [identity_of(env) for env in envs], lanes,
        name_of(first),
    )  # fmt: skip


def name_of(env: Any) -> str:
    """What people call it: its id, or its class below all wrappers."""
    spec_id = getattr(getattr(env, "spec", None), "id", None)
    own = [name for name in (spec_id, getattr(env, "name", None)) if isinstance(name, str)]
    return own[0] if own else type(getattr(env, "unwrapped", env)).__name__


def _lanes_of(env: Any) -> list[LaneGroup]:
    """What there is to tell about a group; about each of them, where one object has several."""
    names = None if env.lane_names is None else list(env.lane_names)
    size = env.group_size if env.together and hasattr(env, "group_size") else env.num_lanes
    modes = tuple(getattr(env, "modes", MODES))
    told = LaneGroup(size, env.together, bool(getattr(env, "resets_alone", False)), env.can_be_absent, modes, names)
    return [told] * (env.num_lanes // size)


class Stepper:
    """The lanes `start` to `start + len(envs)` of the slab, and the envs behind them.

    Args:
        env_fns: build the envs anew, one each.
        post: takes a list of Notes, or a Reply, to the caller.
        read_mail: handles the commands that lie in the side channel. A request may overtake the command that came
            before it, so whoever needs one reads the mail first: what lies here already may be older, from a request
            that was interrupted before it was posted.
        same_process: whether what is posted is seen by the caller as it is, rather than pickled.
        interrupts: whether Ctrl-C may end a pass halfway, which is so in the caller's own thread only.
    """

    def __init__(
        self,
        slab: Slab,
        worker: int,
        start: int,
        envs: list[Any],
        env_fns: Sequence[Callable[[], Any]],
        config: StepperConfig,
        post: Callable[[Any], None],
        read_mail: Callable[[], None],
        pool_bell: Any,
        bell: Any,
        same_process: bool = False,
        interrupts: bool = False,
    ):
        self.envs, self.start, self.worker = envs, start, worker
        self._env_fns, self._spaces = env_fns, [spaces_of(env) for env in envs]
        self._post, self._read_mail, self._interrupts = post, read_mail, interrupts
        self._own: Callable[[Any], Any] = own_copy if same_process else lambda value: value
        self._during = "step"
        self._observation_space, self._leaves = config.observation_space, flatten(config.observation_space)
        self._action_space, self._action_leaves = config.action_space, flatten(config.action_space)
        self._targets = slab.leaf_arrays("obs", self._leaves)
        self._finals = slab.leaf_arrays("final", self._leaves)
        self._actions = slab.leaf_arrays("action", self._action_leaves)
        self._has_action_objects = any(leaf.kind is Kind.OBJECT for leaf in self._action_leaves)
        self._action_objects: dict[int, list[Any]] = {}
        self._resets: dict[int, _LaneReset] = {}
        self._orders: dict[int, Order] = {}
        self._first_seeds: dict[int, int | None] = {}  # for the next reset of envs that were rebuilt
        self._notes: dict[int, Note] = {}
        self._requested, self._status = slab.array("requested"), slab.array("status")
        self._ended, self._stats = slab.array("ended"), slab.array("stats")[worker]
        self._frame = {name: slab.array(name) for name in FRAME_FIELDS}
        self._fresh_at = self._requested[start : start + len(envs)].astype(np.int64)  # requests before each was built
        self._check_nan = config.check_nan
        self._same_step = config.autoreset == "same_step"
        self._steps = [env.step for env in envs]
        kind, actions = self._action_source()
        self.core = native.Block(
            slab, worker, start, start + len(envs), native.AUTORESET[config.autoreset], config.publish_each, kind,
            self._leaves_for_core(slab), self._steps, actions,
            (self.special, self.finish, self.note, self.store, self.failed, self.flush), pool_bell, bell,
        )  # fmt: skip
        self.run = self.core.run
        self.wait = self.core.wait

    def _leaves_for_core(self, slab: Slab) -> tuple[tuple[Any, ...], ...]:
        described = slab.describe("obs", self._leaves)
        # A type that the core does not know, so that it leaves observations to `store`.
        return tuple((*leaf[:3], "?", *leaf[4:]) for leaf in described) if self._check_nan else described

    def _action_source(self) -> tuple[int, Any]:
        leaf = self._action_leaves[0] if len(self._action_leaves) == 1 else None
        if leaf is None or leaf.path or leaf.kind is not Kind.ARRAY:
            return twin.ACTION_CALL, self._action
        return (twin.ACTION_ROW if leaf.shape else twin.ACTION_SCALAR), self._actions[0]

    def _action(self, lane: int) -> Any:
        """The action of one lane, for nested spaces and for objects."""
        if self._has_action_objects:
            self._read_mail()
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

    # ---- callbacks of the core -------------------------------------------------------------------------------

    def special(self, lane: int, slot: int, op: int) -> None:
        """A reset, asked for or automatic, or a restart."""
        if op == native.OP_RESTART:
            self._restart(lane, slot)
            return
        env = self.envs[lane - self.start]
        self._during = "reset"
        if op == native.OP_RESET:
            self._read_mail()
            asked = self._resets[lane]
            seed = self._first_seeds.get(lane) if asked.seed is None else asked.seed
            observation, info = _reset(env, seed=seed, **_given(asked.options))
        elif lane in self._first_seeds:
            observation, info = _reset(env, seed=self._first_seeds[lane])
        else:
            observation, info = _reset(env)
        self.core.begin(lane, slot, observation, info, True)
        self._resets.pop(lane, None)  # only now: an interrupted reset is run again
        self._first_seeds.pop(lane, None)
        self._during = "step"

    def _restart(self, lane: int, slot: int) -> None:
        """Go on with a new env where the old one was lost."""
        self._during = "its constructor"
        self._read_mail()
        order = self._orders[lane]
        if order.rebuild:
            self._rebuild(lane - self.start)
            self._orders[lane] = order._replace(rebuild=False)  # an interrupted restart does not build twice
        self._during = "reset"
        if order.begin:
            observation, info = _reset(self.envs[lane - self.start], seed=order.seed, **_given(order.options))
            self.core.begin(lane, slot, observation, {**info, RESTART_INFO: order.report}, True)
        else:
            self._cut_short(lane, slot, order)
        if order.begin or self._same_step:
            self._first_seeds.pop(lane, None)
        self._orders.pop(lane, None)
        self._resets.pop(lane, None)
        self._during = "step"

    def _rebuild(self, index: int) -> None:
        old, self.envs[index] = self.envs[index], _NoEnv()
        close_envs([old], self.start + index)
        env = adapt(self._env_fns[index]())
        if spaces_of(env) != self._spaces[index]:
            close_envs([env], self.start + index)
            raise SpaceMismatch("the env that was built anew has other spaces than the one before it")
        self.replace_env(index, env)
        self._fresh_at[index] = self._requested[self.start + index]

    def replace_env(self, index: int, env: Any) -> None:
        """Step another env in this place from now on."""
        self.envs[index] = env
        self._steps[index] = env.step  # the core looks here at every step

    def _cut_short(self, lane: int, slot: int, order: Order) -> None:
        """End the episode of an env that was lost: what the caller has seen last, truncated."""
        last = (order.last_slot, lane)
        for array in [*self._targets, *self._frame.values()]:
            if array is not None:
                array[slot, lane] = array[last]
        if self._same_step and (self._frame["terminated"][last] or self._frame["truncated"][last]):
            # That answer ended one episode and began the one that is lost.
            self._frame["episode_return"][slot, lane] = self._frame["episode_length"][slot, lane] = 0
        for name, value in (("reward", 0.0), ("terminated", False), ("truncated", True), ("began", False)):
            self._frame[name][slot, lane] = value
        self._status[slot, lane] = 0
        if self._same_step:
            objects = iter(order.last_objects)
            values = [self._leaf_value(leaf, None if array is None else array[order.last_slot], lane, objects)
                      for leaf, array in zip(self._leaves, self._targets, strict=True)]  # fmt: skip
            final = {"final_obs": assemble(self._observation_space, values), "final_info": {}}
            observation, info = _reset(self.envs[lane - self.start], seed=order.seed)
            self.core.begin(lane, slot, observation, {**final, **info, RESTART_INFO: order.report}, False)
        else:
            self._ended[lane] = 1
            self._first_seeds[lane] = order.seed
            self.note(lane, slot, {RESTART_INFO: order.report})

    def finish(self, lane: int, slot: int, observation: Any, info: dict[str, Any]) -> None:
        """The end of an episode under same_step: reset now, and hand the last observation over beside the first."""
        _check_info(info)
        # Copied: an env that reuses its arrays or its info would overwrite them in reset.
        final: dict[str, Any] = {}
        if self._keep_final(lane, slot, observation):
            if info:
                final = {"final_info": own_copy(info)}
        else:
            final = {"final_obs": own_copy(observation), "final_info": own_copy(info)}
        self._during = "reset"
        observation, reset_info = _reset(self.envs[lane - self.start])
        self.core.begin(lane, slot, observation, {**final, **reset_info}, False)
        self._during = "step"

    def _keep_final(self, lane: int, slot: int, observation: Any) -> bool:
        """Write an episode's last observation into the slab, if all of it is exactly of its field's type."""
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
        """Write an observation that is not of exactly the field's type, or has objects in it."""
        try:
            objects = write_observation(self._leaves, self._targets, (slot, lane), observation)
            if self._check_nan:
                self._refuse_nan(lane, slot)
        except BadObservation as error:
            hint = "" if "check_nan" in str(error) else "; its observation_space must say what it returns"
            raise BadObservation(f"env {lane}: {error}{hint}") from None
        if objects:
            self._add_note(lane, slot, STATUS_NOTE, objects=self._own(objects))

    def _refuse_nan(self, lane: int, slot: int) -> None:
        for leaf, target in zip(self._leaves, self._targets, strict=True):
            if target is not None and target.dtype.kind == "f" and np.isnan(target[slot, lane]).any():
                where = np.argwhere(np.isnan(np.atleast_1d(target[slot, lane])))[0].tolist()
                raise BadObservation(f"{leaf.name} is nan at {where}, and check_nan was asked for")
        if np.isnan(self._frame["reward"][slot, lane]):
            raise BadObservation("its reward is nan, and check_nan was asked for")

    def note(self, lane: int, slot: int, info: dict[str, Any]) -> None:
        """Keep an info for the side channel."""
        _check_info(info)
        if info:
            self._add_note(lane, slot, STATUS_NOTE, info=self._own(info))

    def failed(self, lane: int, slot: int, error: BaseException) -> None:
        """An env raised: its lane answers with the error."""
        during, self._during = self._during, "step"
        self._let_through(error)
        self._frame["terminated"][slot, lane] = self._frame["truncated"][slot, lane] = False
        self._resets.pop(lane, None)
        self._orders.pop(lane, None)
        self._add_note(lane, slot, STATUS_NOTE | STATUS_ERROR, error=pack_error(error, during))

    def _let_through(self, error: BaseException) -> None:
        """Ctrl-C is the caller's, in its own thread; elsewhere an env that wants to leave has failed."""
        if self._interrupts and isinstance(error, KeyboardInterrupt):
            raise error

    def _add_note(self, lane: int, slot: int, status: int, **parts: Any) -> None:
        note = self._notes.get(lane) or Note(lane, int(self._requested[lane]), {}, [], None)
        self._notes[lane] = note._replace(**parts)
        self._status[slot, lane] |= status

    def flush(self) -> None:
        """Send what was kept; the core calls it after it has rung the bell, so that a full pipe blocks nobody."""
        if self._notes:
            # Posted first: an interrupt in between then posts them twice, which nobody notices, rather than never.
            self._post(list(self._notes.values()))
            self._notes = {}

    # ---- commands --------------------------------------------------------------------------------------------

    def handle(self, message: tuple[Any, ...]) -> None:
        """Carry out a command from the caller: (name, ...)."""
        getattr(self, f"_on_{message[0]}")(*message[1:])

    def _on_reset(self, asked: Sequence[tuple[int, int | None, dict[str, Any] | None]]) -> None:
        # The lanes' own requests carry it out: `special` looks here.
        for lane, seed, options in asked:
            self._resets[lane] = _LaneReset(seed, options)

    def _on_restart(self, orders: Sequence[Order]) -> None:
        self._orders.update((order.lane, order) for order in orders)

    def _on_actions(self, lanes: Sequence[int], objects: Sequence[list[Any]]) -> None:
        self._action_objects.update(zip(lanes, objects, strict=True))

    def _on_call(self, ticket: int, lanes: Sequence[int], name: str, args: Any, kwargs: Any) -> None:
        def call(env: Any, _: int) -> Any:
            value = get_attr(env, name)
            self._fresh_at[:] = -1  # who knows what it does
            return value(*args, **kwargs) if callable(value) else value

        self._reply(ticket, lanes, call, f"call of {name!r}")

    def _on_apply(self, ticket: int, lanes: Sequence[int], function: Any, args: Any, kwargs: Any) -> None:
        def apply(env: Any, _: int) -> Any:
            self._fresh_at[:] = -1
            return function(env, *args, **kwargs)

        self._reply(ticket, lanes, apply, f"apply of {getattr(function, '__name__', function)!r}")

    def _on_set(self, ticket: int, lanes: Sequence[int], name: str, values: Sequence[Any]) -> None:
        def assign(env: Any, i: int) -> None:
            self._fresh_at[:] = -1
            if hasattr(env, "set_wrapper_attr"):
                env.set_wrapper_attr(name, values[i])
            else:
                setattr(env, name, values[i])

        self._reply(ticket, lanes, assign, f"set_attr of {name!r}")

    def _on_save(self, ticket: int, lanes: Sequence[int]) -> None:
        def save(env: Any, i: int) -> Any:
            return save_env(env), self._first_seeds.get(lanes[i], NO_SEED)

        self._reply(ticket, lanes, save, "saving its state")

    def _on_load(self, ticket: int, lanes: Sequence[int], saved: Sequence[tuple[EnvState, Any]]) -> None:
        def load(env: Any, i: int) -> None:
            state, first_seed = saved[i]
            index = lanes[i] - self.start
            if self._fresh_at[index] != self._requested[lanes[i]]:
                self._rebuild(index)  # a state is put into an env that has none yet
                env = self.envs[index]
            self.replace_env(index, load_env(state, env))
            self._fresh_at[index] = -1
            self._first_seeds.pop(lanes[i], None)
            if first_seed != NO_SEED:
                self._first_seeds[lanes[i]] = first_seed

        self._reply(ticket, lanes, load, "loading its state")

    def _reply(self, ticket: int, lanes: Sequence[int], act: Callable[[Any, int], Any], during: str) -> None:
        values = []
        for i, lane in enumerate(lanes):
            # Below 0: not stepping, but busy with this env all the same.
            self._stats[native.STAT_SINCE_NS], self._stats[native.STAT_AT] = time.monotonic_ns(), -lane - 1
            try:
                values.append(act(self.envs[lane - self.start], i))
            except BaseException as error:
                self._let_through(error)
                values.append(pack_error(error, during))
        self._stats[native.STAT_AT] = 0
        self._post(Reply(ticket, values))

    def close(self) -> list[tuple[int, PackedError]]:
        """Close the envs; the errors of those that raised."""
        return close_envs(self.envs, self.start)


def _given(options: dict[str, Any] | None) -> dict[str, Any]:
    """Options as arguments of reset: not every env takes them."""
    return {} if options is None else {"options": options}


def _reset(env: Any, **arguments: Any) -> tuple[Any, Any]:
    result = env.reset(**arguments)
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"reset must return a tuple (obs, info), got {result!r:.200}")
    return result


def _is_exactly(value: Any, leaf: Leaf) -> bool:
    return isinstance(value, np.ndarray | np.generic) and value.dtype == leaf.dtype and value.shape == leaf.shape


def _check_info(info: Any) -> None:
    if not isinstance(info, dict):
        raise TypeError(f"info must be a dict, got {type(info).__name__}")

"""What all steppers have in common. A stepper runs the envs of one worker: its block.

`Stepper` carries out the caller's commands, keeps the notes that travel beside the slab, turns exceptions into answers,
checks for NaN, saves and loads states, and replaces envs that were lost. Each kind of block has a subclass that steps:
`worker.single` for envs with one lane, `worker.grouped` for envs with several lanes and for batched envs, and
`compiled.worker` for compiled kernels. The same steppers run in the caller's process, in threads and in worker
processes, with the C core or its Python twin, so results do not depend on the backend.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal import native
from shoal.envs.adapt import adapt
from shoal.envs.autoreset import RULES
from shoal.envs.group import is_group
from shoal.envs.wrapper_layers import get_attr
from shoal.errors import BadObservation, SpaceMismatch
from shoal.memory.copies import own_copy
from shoal.memory.info_schema import InfoLearner
from shoal.memory.messages import NO_SEED, STATUS_ERROR, STATUS_NOTE, Lost, Note, Order, Reply, StepperConfig
from shoal.memory.packed_errors import PackedError, pack_error
from shoal.memory.slab import FRAME_FIELDS, Slab
from shoal.spaces.leaves import flatten
from shoal.state.env_state import EnvState, load_env, save_env
from shoal.support.copies_of_process import EndsCopy
from shoal.support.system import system
from shoal.worker.building import close_envs, lanes_and_spaces, target_of

Array = npt.NDArray[Any]
WITH_THE_FIRST = "group"  # the kind of the state of a lane that was saved with the first lane of its env


@dataclass(frozen=True)
class EnvBlock:
    """The envs that one worker steps."""

    slab: Slab
    worker: int  # its index
    start: int  # the first lane
    envs: list[Any]  # in the order of their lanes
    env_fns: Sequence[Callable[[], Any]]  # what builds the envs anew, one each
    config: StepperConfig


@dataclass(frozen=True)
class WorkerChannel:
    """How a worker and the pool reach each other beside the slab.

    `read_mail` carries out the commands that lie in the side channel. A request may overtake the command that was sent
    before it, so a stepper that needs a command reads the mail first, even if it has an older command for the lane:
    that one may belong to a request that was interrupted before it was posted.
    """

    post: Callable[[Any], None]  # sends a list of Notes, or a Reply, to the caller
    read_mail: Callable[[], None]
    pool_bell: Any  # wakes the pool
    bell: Any  # wakes this worker
    same_process: bool = False  # whether the caller gets the very objects that are posted, and not pickled copies
    interrupts: bool = False  # whether Ctrl-C may end a pass halfway, which is so in the caller's own thread only


@dataclass(eq=False)
class EnvPlace:
    """One env of the block, and its lanes `start` up to `stop`."""

    index: int  # its place in the block
    env: Any
    env_fn: Callable[[], Any]
    start: int
    stop: int
    shape: tuple[Any, ...]  # lanes and spaces, which must stay the same when the env is built again
    fresh_at: int = -1  # how many requests its lanes had when the env was built; -1 once the env may have a state
    seeds: list[int | None] | None = None  # for a reset that must come before the next step, because the env is new

    @property
    def lanes(self) -> slice:
        """The lanes in arrays of the slab."""
        return slice(self.start, self.stop)

    @property
    def count(self) -> int:
        """The number of lanes."""
        return self.stop - self.start


class LostEnv:
    """Stands in the place of an env that could not be built again."""

    def step(self, *_: Any, **__: Any) -> Any:
        """Raise an error that says why there is no step, and no reset."""
        raise RuntimeError("this env could not be built again")

    reset = step


Act = Callable[[EnvPlace, list[int]], list[Any]]


class Stepper:
    """Runs the envs of one block. A subclass has `run`, which answers all lanes that were asked, and `wait`.

    `envs` is a list that the backend shares, and `rule` the autoreset mode.
    """

    place_type: type[EnvPlace] = EnvPlace
    core: Any = None  # steps the lanes, or waits for requests
    _copied: EndsCopy | None = None  # in a copy of the process that an env has forked: ends it

    def __init__(self, block: EnvBlock, channel: WorkerChannel):
        slab, config = block.slab, block.config
        self.envs, self.start, self.rule = block.envs, block.start, RULES[config.autoreset]
        self._post, self._read_mail, self._interrupts = channel.post, channel.read_mail, channel.interrupts
        self._own: Callable[[Any], Any] = own_copy if channel.same_process else lambda value: value
        self._check_nan = config.check_nan
        self._observation_space, self._leaves = config.observation_space, flatten(config.observation_space)
        self._action_space, self._action_leaves = config.action_space, flatten(config.action_space)
        self._obs: list[Any] = slab.leaf_arrays("obs", self._leaves)
        self._finals: list[Any] = slab.leaf_arrays("final", self._leaves)
        self._actions: list[Any] = slab.leaf_arrays("action", self._action_leaves)
        self._frame = {name: slab.array(name) for name in FRAME_FIELDS}
        self._status, self._requested = self._frame["status"], slab.array("requested")
        self._ended, self._stats = slab.array("ended"), slab.array("stats")[block.worker]
        self._during = "step"  # what the env is doing, for error messages
        self._notes: dict[int, Note] = {}
        self._infos = InfoLearner(block.worker, config.infos)
        self._resets: dict[int, tuple[int | None, dict[str, Any] | None]] = {}
        self._orders: dict[int, Order] = {}
        self._lost: dict[int, Exception] = {}  # why a lane did not get what its next request needs
        self._places: list[Any] = []
        for index, env in enumerate(block.envs):
            first = self._places[-1].stop if self._places else block.start
            last = first + (env.num_lanes if is_group(env) else 1)
            self._places.append(self.place_type(index, env, block.env_fns[index], first, last, lanes_and_spaces(env)))
        for place in self._places:
            place.fresh_at = self._requests_of(place)
        self._place_of = [place for place in self._places for _ in range(place.count)]  # by lane, from `start` on
        _steppers.add(self)

    # ---- hooks: how kinds of blocks differ ---------------------------------------------------------------------

    def _prepare(self, env: Any) -> None:
        """Make an env ready that has just been built."""

    def _put_env(self, place: EnvPlace, env: Any) -> None:
        """Step another env in this place from now on."""
        place.env = self.envs[place.index] = env

    def put(self, index: int, env: Any) -> None:
        """Step an env of the caller's from now on in the place of another one, which is not closed."""
        place = self._places[index]
        env = adapt(env)
        if lanes_and_spaces(env) != place.shape:
            raise SpaceMismatch(f"the env that is put into place {index} has other spaces than the one before it")
        self._prepare(env)
        self._put_env(place, env)
        place.fresh_at, place.seeds = -1, None

    def _resume(self, place: EnvPlace, orders: list[Order], where: Any) -> Any:
        """Answer for the lanes of an env that was lost, as their orders say, and set the place's `seeds`."""
        raise NotImplementedError

    # ---- notes and errors --------------------------------------------------------------------------------------

    def _add_note(self, lane: int, slot: int, status: int, **parts: Any) -> None:
        """Keep a part of an answer for the side channel, and mark the answer."""
        note = self._notes.get(lane)
        if note is None:  # as a rule, and quicker than to replace parts of an empty one
            get, sequence = parts.get, self._requested.item(lane)
            self._notes[lane] = Note(lane, sequence, get("info", {}), get("objects", []), get("error"))
        else:
            self._notes[lane] = note._replace(**parts)
        self._status[slot, lane] |= status

    def note(self, lane: int, slot: int, info: dict[str, Any]) -> None:
        """Keep an info for the side channel."""
        check_info(info)
        info = self._infos.wanted(info)
        if info:
            self._add_note(lane, slot, STATUS_NOTE, info=self._own(info))

    def note_parts(self, lane: int, slot: int, parts: dict[int, Any]) -> None:
        """Keep what an info has beside its row in the slab, for the side channel."""
        self._add_note(lane, slot, STATUS_NOTE, info=self._own(self._infos.named(parts)))

    def _use_core(self, core: Any, slab: Slab) -> None:
        """Step lanes, or wait for requests, by this core. It writes infos into the slab, if that has room for them."""
        self.core = core
        if "info_rows" in slab.layout.fields:
            core.use_infos(self._infos.learn, self.note_parts)
            self._infos.attach(slab, core.use_schema)

    def flush(self) -> None:
        """Send the notes. This happens after the pool's bell was rung, so that a full channel delays no answer."""
        if self._notes:
            # Posted first: if an interrupt comes in between, the notes are posted twice, which does no harm.
            self._post(list(self._notes.values()))
            self._notes = {}

    def failed(self, lanes: Any, slots: Any, error: BaseException) -> None:
        """Answer with an error: for one lane, or for all lanes of an env that were asked."""
        during, self._during = self._during, "step"
        self._let_through(error)
        self._frame["terminated"][slots, lanes] = self._frame["truncated"][slots, lanes] = False
        packed = pack_error(error, during)
        for lane, slot in zip(np.atleast_1d(lanes).tolist(), np.atleast_1d(slots).tolist(), strict=True):
            self._forget_commands([lane])
            self._add_note(lane, slot, STATUS_NOTE | STATUS_ERROR, error=packed)

    def _let_through(self, error: BaseException) -> None:
        """Raise Ctrl-C in the caller's own thread; elsewhere an env that raises KeyboardInterrupt has failed."""
        if self._copied is not None:
            self._copied()
        if self._interrupts and isinstance(error, KeyboardInterrupt):
            raise error

    def _nans(self, lanes: Any, obs: Sequence[Any], reward: Array) -> Iterator[tuple[int, BadObservation]]:
        """Find NaN in answers with a row for each of `lanes`: the lane and its error."""
        named = [(f"observation{leaf.name}", array) for leaf, array in zip(self._leaves, obs, strict=True)]
        for what, values in [*named, ("its reward", reward)]:
            if values is None or values.dtype.kind != "f":
                continue
            for row in np.unique(np.nonzero(np.isnan(values))[0]).tolist():
                place = f" at {np.argwhere(np.isnan(values[row]))[0].tolist()}" if values.ndim > 1 else ""
                text = f"env {lanes[row]}: {what} is nan{place}, and check_nan was asked for"
                yield lanes[row], BadObservation(text)

    def _refuse_nan(self, lanes: Any, obs: Sequence[Any], reward: Array) -> None:
        for _, error in self._nans(lanes, obs, reward):
            raise error

    def part(self) -> None:
        """In a child that an env has just forked: when the env returns there, the child ends.

        It must neither step the other envs nor answer, and what it writes into the slab is its own (`Slab.part`).
        Nothing is asked in each step for that: whatever comes after the env is replaced by what ends the process.
        """
        lane = abs(int(self._stats[native.STAT_AT])) - 1
        if lane < 0:
            return  # no env is running: the caller has forked, and knows what the child is for
        self._copied = ends = EndsCopy(f"env {lane}")
        # Kept, because envs that are let go may tell a simulator, which the parent uses, that they leave.
        self._kept = [place.env for place in self._places], self.envs, self._post
        for place in self._places:
            place.env = ends
        self.envs, self._post, self._notes = [ends] * len(self.envs), ends, {lane: Note(lane, 0, {}, [], None)}
        if self.core is not None:
            self.core.part()

    # ---- resets and restarts -----------------------------------------------------------------------------------

    def _asked_reset(self, place: EnvPlace, lanes: Sequence[int]) -> tuple[list[int | None], dict[str, Any] | None]:
        """Return the seeds, one for each lane, and the options of a reset that the caller has asked for."""
        self._read_mail()
        self._refuse_lost(lanes)
        asked = [self._resets[lane] for lane in lanes]
        first = place.seeds or [None] * place.count
        rows = zip(_rows(place, lanes), asked, strict=True)
        return [first[row] if seed is None else seed for row, (seed, _) in rows], asked[0][1]

    def _forget_commands(self, lanes: Sequence[int]) -> None:
        """Forget the resets and restarts of lanes that have carried them out: if interrupted, they are run again."""
        for lane in lanes:
            self._resets.pop(lane, None)
            self._orders.pop(lane, None)
            self._lost.pop(lane, None)

    def _restart(self, place: EnvPlace, lanes: Sequence[int], where: Any) -> Any:
        """Go on with a new env after the old one was lost with all of its lanes; `where` is for `_resume`."""
        self._during = "its constructor"
        self._read_mail()
        self._refuse_lost(lanes)
        orders = [self._orders[lane] for lane in lanes]
        if any(order.rebuild for order in orders):
            self._rebuild(place)
            for order in orders:  # a restart that is interrupted does not build twice
                self._orders[order.lane] = order._replace(rebuild=False)
        self._during = "reset"
        answer = self._resume(place, orders, where)
        place.fresh_at = -1  # it may have been reset
        self._forget_commands(lanes)
        self._during = "step"
        return answer

    def _rebuild(self, place: EnvPlace) -> None:
        """Replace the env by a new one."""
        old = place.env
        self.envs[place.index] = place.env = LostEnv()
        close_envs([old], place.start)
        env = adapt(place.env_fn())
        if lanes_and_spaces(env) != place.shape:
            close_envs([env], place.start)
            raise SpaceMismatch("the env that was built anew has other lanes or spaces than the one before it")
        self._prepare(env)
        self._put_env(place, env)
        place.fresh_at = self._requests_of(place)

    def _requests_of(self, place: EnvPlace) -> int:
        return int(self._requested[place.lanes].sum())

    # ---- commands ----------------------------------------------------------------------------------------------

    def handle(self, message: tuple[Any, ...]) -> None:
        """Carry out a command from the caller: (name, ...)."""
        if message[0] in ("call", "apply", "set"):
            for place in self._places:
                place.fresh_at = -1  # the caller's code runs, and may give any env a state
        getattr(self, f"_on_{message[0]}")(*message[1:])

    def _on_reset(self, asked: Sequence[tuple[int, int | None, dict[str, Any] | None]]) -> None:
        # The requests of the lanes, which follow, carry it out.
        for lane, _, _ in asked if self._lost else ():
            self._lost.pop(lane, None)  # of a request that was never posted
        self._resets.update((lane, (seed, options)) for lane, seed, options in asked)

    def _on_restart(self, orders: Sequence[Order]) -> None:
        self._orders.update((order.lane, order) for order in orders)

    def _on_lost(self, lost: Lost) -> None:
        """A command could not be loaded. Its reply says so, or the requests that it was meant for fail."""
        if lost.ticket is not None:
            self._post(Reply(lost.ticket, [pack_error(lost.error, "loading a command")] * len(lost.lanes)))
            return
        self._lost.update(dict.fromkeys(lost.lanes, lost.error))

    def _refuse_lost(self, lanes: Sequence[int]) -> None:
        """Raise if what the requests of these lanes need did not arrive."""
        for lane in lanes if self._lost else ():
            if lane in self._lost:
                raise self._lost[lane]

    def _on_call(self, ticket: int, lanes: Sequence[int], name: str, args: Any, kwargs: Any) -> None:
        def call_one(env: Any) -> Any:
            value = get_attr(env, name)
            return value(*args, **kwargs) if callable(value) else value

        def call(place: EnvPlace, own: list[int]) -> list[Any]:
            if _has_lane_envs(place.env):
                return _for_each_lane(place, own, call_one)
            env = target_of(place.env)
            if name in _fields(place.env):
                return list(env.get_rows(name, _rows(place, own)))
            return [call_one(env)] * len(own)

        self._reply(ticket, lanes, call, f"call of {name!r}")

    def _on_apply(self, ticket: int, lanes: Sequence[int], function: Any, args: Any, kwargs: Any) -> None:
        def apply(place: EnvPlace, own: list[int]) -> list[Any]:
            if _has_lane_envs(place.env):
                return _for_each_lane(place, own, lambda env: function(env, *args, **kwargs))
            return [function(target_of(place.env), *args, **kwargs)] * len(own)

        self._reply(ticket, lanes, apply, f"apply of {getattr(function, '__name__', function)!r}")

    def _on_set(self, ticket: int, lanes: Sequence[int], name: str, values: Sequence[Any]) -> None:
        given = dict(zip(lanes, values, strict=True))

        def assign(place: EnvPlace, own: list[int]) -> list[Any]:
            env, value = target_of(place.env), given[own[-1]]  # if all lanes share the attribute, the last value counts
            if name in _fields(place.env) or _has_lane_envs(place.env):
                env.set_rows(name, _rows(place, own), [given[lane] for lane in own])
            elif hasattr(env, "set_wrapper_attr"):
                env.set_wrapper_attr(name, value)
            else:
                setattr(env, name, value)
            return [None] * len(own)

        self._reply(ticket, lanes, assign, f"set_attr of {name!r}")

    def _on_save(self, ticket: int, lanes: Sequence[int]) -> None:
        def save(place: EnvPlace, own: list[int]) -> list[Any]:
            rows = _rows(place, own)
            seeds: Sequence[Any] = place.seeds or [NO_SEED] * place.count
            if _has_rows(place.env):
                states = [EnvState(WITH_THE_FIRST, None) if state is None else EnvState("own", state)
                          for state in place.env.save_rows(rows)]  # fmt: skip
            else:
                state = save_env(place.env)
                states = [EnvState(WITH_THE_FIRST, None) if row else state for row in rows]
            return [(state, seeds[row]) for state, row in zip(states, rows, strict=True)]

        self._reply(ticket, lanes, save, "saving its state")

    def _on_load(self, ticket: int, lanes: Sequence[int], saved: Sequence[tuple[EnvState, Any]]) -> None:
        given = dict(zip(lanes, saved, strict=True))

        def load(place: EnvPlace, own: list[int]) -> list[Any]:
            if _has_rows(place.env):
                place.env.load_rows(_rows(place, own), [given[lane][0].content for lane in own])
            else:
                if place.fresh_at != self._requests_of(place):
                    self._rebuild(place)  # a state is put into an env that has none yet
                self._put_env(place, load_env(given[place.start][0], place.env))
            place.fresh_at, seeds = -1, [given[lane][1] for lane in own]
            place.seeds = None if NO_SEED in seeds else seeds
            return [None] * len(own)

        self._reply(ticket, lanes, load, "loading its state")

    def _reply(self, ticket: int, lanes: Sequence[int], act: Act, during: str) -> None:
        """Act once for each env, and send the caller a value for each lane: errors too."""
        parts: dict[int, list[int]] = {}
        for lane in lanes:
            parts.setdefault(self._place_of[lane - self.start].index, []).append(lane)
        values: dict[int, Any] = {}
        for index, own in parts.items():
            self._show_command(own[0])
            try:
                found = act(self._places[index], own)
            except BaseException as error:
                self._let_through(error)
                found = [pack_error(error, during)] * len(own)
            values.update(zip(own, found, strict=True))
        self._stats[native.STAT_AT] = 0
        self._post(Reply(ticket, [values[lane] for lane in lanes]))

    def _show_command(self, lane: int) -> None:
        """Below 0: the worker does not step, but is busy with this env all the same."""
        self._stats[native.STAT_SINCE_NS], self._stats[native.STAT_AT] = time.monotonic_ns(), -lane - 1

    def close(self) -> list[tuple[int, PackedError]]:
        """Close the envs; return the errors of those that raised, by the first lane of each."""
        errors: list[tuple[int, PackedError]] = []
        for place in self._places:
            self._show_command(place.start)
            errors += close_envs([place.env], place.start)
        self._stats[native.STAT_AT] = 0
        self.envs.clear()
        return errors


_steppers: weakref.WeakSet[Stepper] = weakref.WeakSet()


def _part_all() -> None:
    for stepper in list(_steppers):
        stepper.part()


system.after_fork(_part_all)


def _rows(place: EnvPlace, lanes: Sequence[int]) -> list[int]:
    """Count lanes from the first one of their env."""
    return [lane - place.start for lane in lanes]


def check_info(info: Any) -> None:
    """Raise TypeError for an info that is no dict."""
    if not isinstance(info, dict):
        raise TypeError(f"info must be a dict, got {type(info).__name__}")


def _has_rows(env: Any) -> bool:
    """Tell whether each lane of the env has a state of its own."""
    return is_group(env) and hasattr(env, "save_rows")


def _has_lane_envs(env: Any) -> bool:
    """Tell whether a group has an object for each lane (`lane`), which calls of the caller are meant for."""
    return is_group(env) and hasattr(env, "lane")


def _for_each_lane(place: EnvPlace, lanes: Sequence[int], act: Callable[[Any], Any]) -> list[Any]:
    rows = _rows(place, lanes)
    try:
        return [act(place.env.lane(row)) for row in rows]
    finally:
        place.env.lanes_changed(rows)


def _fields(env: Any) -> Sequence[str]:
    """Return the names of attributes of which each lane of the env has its own."""
    return getattr(target_of(env), "fields", ()) if _has_rows(env) else ()

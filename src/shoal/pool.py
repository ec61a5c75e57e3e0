"""The pool: the scheduler that every dialect and wrapper stands on.

send checks everything first, writes the actions into the slab and rings the workers; recv waits until enough
lanes have answered and hands their rows out, as views where the lanes are one contiguous run in one frame.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import Space

from shoal import native
from shoal.adapters.gymnasium import as_env_fns
from shoal.backends.launch import DEFAULT_START_METHOD, START_METHODS
from shoal.batch import Batch
from shoal.block import STATUS_NOTE, Note, StepperConfig
from shoal.crew import BACKENDS, Crew
from shoal.deadline import NEVER, Deadline
from shoal.errors import (
    BadAction,
    BadCall,
    CallPending,
    ConcurrentUse,
    EnvError,
    NothingPending,
    PoolClosed,
    ResetNeeded,
    ShoalError,
    StepTimeout,
    WrongProcess,
)
from shoal.plan import Plan, make_plan, spin_times
from shoal.remote import PackedError
from shoal.slab import Layout, Slab
from shoal.spaces import Kind, assemble, flatten, read_actions
from shoal.specs import EnvSpecs, agree
from shoal.stats import PoolStats, WorkerInfo

__all__ = ["Pool", "Ready"]

Ids = npt.NDArray[np.int64]
Seed = int | Sequence[int | None] | npt.NDArray[Any] | None

_RESERVED = ("reset", "step", "close")  # what must go through the pool's own methods
_open_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


class Ready(NamedTuple):
    """Lanes that have answered: `ids` ascending; `slot` is -1 unless they are one run in one frame."""

    ids: Ids
    first: int
    slot: int
    infos: dict[int, dict[str, Any]]


class Pool:
    """Many envs as one.

    Args:
        env: a Gymnasium id or spec, a function or class that makes an env, or a list of such, one per env.
        num_envs: how many; left out when a list was given.
        backend: "serial", "threads", "processes", "hybrid" (the caller steps a block itself beside worker
            processes), or "auto", which measures the env and chooses; `pool.plan` says what and why.
        num_workers: by default the cores that this process may use.
        batch_size: how many lanes `recv` waits for; by default all.
        autoreset: "next_step", "same_step" (last observation in the info), or "disabled".
        frames: how many time slots the slab has; arrays stay valid for `frames - 1` further sends.
        copy: True gives arrays that are the caller's own.
        order: "ready" (the first lanes that are done) or "fifo" (strictly in the order in which they were sent).
        seed: for the first reset, where that is given none.
        isolate: never run an env in the caller's process, whatever "auto" thinks.
        observation_mode: "same": all observation spaces must be equal; "different": equal in shape and type;
            or a pair (batched space, single space).
        check_actions: "all", or "discrete" to let Box actions out of their bounds pass, as Gymnasium does.
        start_method: "forkserver" (default), "spawn" or "fork".
        start_timeout: seconds until the envs must be built.
        env_kwargs: keyword arguments for the env's constructor.
    """

    def __init__(
        self,
        env: Any,
        num_envs: int | None = None,
        *,
        backend: Literal["auto", "serial", "threads", "processes", "hybrid"] = "auto",
        num_workers: int | None = None,
        batch_size: int | None = None,
        autoreset: Literal["next_step", "same_step", "disabled"] = "next_step",
        frames: int = 2,
        copy: bool = False,
        order: Literal["ready", "fifo"] = "ready",
        seed: Seed = None,
        isolate: bool = False,
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
        check_actions: Literal["all", "discrete"] = "all",
        start_method: str | None = None,
        start_timeout: float | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
    ):
        self._fault: ShoalError | None = PoolClosed("the pool was never started")
        _check_choice("backend", backend, ("auto", *BACKENDS))
        _check_choice("autoreset", autoreset, tuple(native.AUTORESET))
        _check_choice("order", order, ("ready", "fifo"))
        _check_choice("check_actions", check_actions, ("all", "discrete"))
        self._start_method = start_method or DEFAULT_START_METHOD
        _check_choice("start_method", self._start_method, START_METHODS)
        env_fns = as_env_fns(env, num_envs, env_kwargs)
        self.num_envs = len(env_fns)
        self.batch_size = _whole("batch_size", self.num_envs if batch_size is None else batch_size, 1, self.num_envs)
        self.frames = _whole("frames", frames, 2, 255)
        self.autoreset, self.order, self.copy = autoreset, order, bool(copy)
        self._check_boxes = check_actions == "all"
        self._first_seed = seed
        deadline = Deadline.after(start_timeout)
        self.plan: Plan = make_plan(
            env_fns, backend, num_workers, self.batch_size, isolate, self._start_method, deadline
        )
        self._crew = Crew(env_fns, self.plan.backend, self.plan.num_workers, self._start_method)
        self.specs: EnvSpecs = self._start(observation_mode, deadline)
        self._fault = None
        _open_pools.add(self)

    # ---- start -----------------------------------------------------------------------------------------------

    def _start(self, observation_mode: Any, deadline: Deadline) -> EnvSpecs:
        summaries = self._crew.build(deadline)
        try:
            specs = agree(summaries, self.num_envs, observation_mode)
            self._obs_leaves = flatten(specs.single_observation_space)
            self._action_leaves = flatten(specs.single_action_space)
            workers = len(self._crew.workers)
            layout = Layout.plan(self._obs_leaves, self._action_leaves, self.num_envs, self.frames, workers)
            self._slab = Slab.create(layout, self._crew.shared)
        except BaseException:
            self._crew.dismiss(Deadline.after(1.0))
            raise
        spin_pool, spin_workers = spin_times(self.plan)
        config = StepperConfig(
            specs.single_observation_space, specs.single_action_space, self.autoreset,
            self.batch_size < self.num_envs, spin_workers,
        )  # fmt: skip
        self._crew.attach(self._slab, config, deadline)
        self._make_scheduler(spin_pool)
        self._make_views(specs)
        return specs

    def _make_scheduler(self, spin_ns: int) -> None:
        n = self.num_envs
        self._state = np.zeros(n, np.uint8)  # 1 where a request is pending; kept by the core
        self._owner = self._crew.owner_of_lanes()
        self._lanes: Any = native.Lanes(self._slab, self._state, self._owner, *self._crew.bells())
        self._crew.watch(self._lanes.ring, self._lanes.alarm)
        self._spin_ns = spin_ns
        self._pending = 0
        self._queue: deque[int] = deque()  # lanes in the order in which they were sent, for fifo
        self._out = np.zeros(n, np.int64)
        self._all_ids = np.arange(n, dtype=np.int64)
        self._must_reset = np.ones(n, np.bool_)
        self._some_must_reset = True
        self._lock = threading.Lock()
        self._began_ns = time.monotonic_ns()
        inline = self._crew.inline
        self._run_inline = None if inline is None else inline.run

    def _make_views(self, specs: EnvSpecs) -> None:
        """Arrays on the slab, made once: a view costs more than a small batch."""
        names = ("reward", "terminated", "truncated", "began", "episode_return", "episode_length")
        self._fields = {name: self._slab.array(name) for name in names}
        self._status, self._slot = self._slab.array("status"), self._slab.array("slot")
        self._requested = self._slab.array("requested")
        self._obs_arrays = self._slab.leaf_arrays("obs", self._obs_leaves)
        self._obs_objects: list[list[Any]] = [[None] * self.num_envs for _ in self._obs_leaves]
        self._action_arrays = self._slab.leaf_arrays("action", self._action_leaves)
        self._has_objects = any(leaf.kind is Kind.OBJECT for leaf in self._action_leaves)
        plain = all(leaf.kind is Kind.ARRAY for leaf in self._obs_leaves)
        space = specs.single_observation_space
        self._frame_obs = [
            assemble(space, [a[slot] for a in self._obs_arrays if a is not None]) if plain else None
            for slot in range(self.frames)
        ]
        self._frame_fields = [{name: a[slot] for name, a in self._fields.items()} for slot in range(self.frames)]
        self._one_array = plain and len(self._obs_leaves) == 1 and not self._obs_leaves[0].path
        leaf = self._action_leaves[0]
        simple = len(self._action_leaves) == 1 and leaf.kind is Kind.ARRAY and not leaf.path
        # For the common case: one array of actions, checked and copied in two calls.
        self._simple_action = (leaf, self._action_arrays[0], (self.num_envs, *leaf.shape)) if simple else None
        self._check_simple = leaf.discrete or self._check_boxes
        self._true = np.ones(self.num_envs, np.bool_)

    # ---- what it is ------------------------------------------------------------------------------------------

    @property
    def single_observation_space(self) -> Space[Any]:
        """Of one env."""
        return self.specs.single_observation_space

    @property
    def single_action_space(self) -> Space[Any]:
        """Of one env."""
        return self.specs.single_action_space

    @property
    def observation_space(self) -> Space[Any]:
        """Of all envs, batched as Gymnasium does."""
        return self.specs.observation_space

    @property
    def action_space(self) -> Space[Any]:
        """Of all envs, batched as Gymnasium does."""
        return self.specs.action_space

    @property
    def workers(self) -> list[WorkerInfo]:
        """Each worker's process id, env ids and state."""
        return [WorkerInfo(w.index, w.pid, list(w.env_ids), w.state) for w in self._crew.workers]

    @property
    def closed(self) -> bool:
        """Whether it was closed, by the user or after a worker's death."""
        return isinstance(self._fault, PoolClosed)

    @property
    def why_closed(self) -> str:
        """The reason, "" while it is open."""
        return "" if self._fault is None else str(self._fault)

    @property
    def local_envs(self) -> list[Any]:
        """The envs that live in the caller's process: all under serial, the caller's block under hybrid."""
        return [] if self._crew.inline is None else self._crew.inline.envs

    @property
    def pending(self) -> Ids:
        """The envs that were sent to and not yet received from."""
        return np.flatnonzero(self._state)

    def stats(self) -> PoolStats:
        """Counts and times since the start."""
        self._check_usable()
        return PoolStats.read(self._slab.array("stats"), self._began_ns)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.plan.backend}, {self.plan.num_workers} workers"
        return f"Pool({self.num_envs} envs, {state})"

    # ---- stepping --------------------------------------------------------------------------------------------

    def send(self, actions: Any, env_ids: Any = None) -> None:
        """Start a step of these envs (None: all), and return at once.

        Args:
            actions: a batch of `single_action_space`, one row for each env id, in their order.

        Raises:
            BadAction: nothing was sent.
            CallPending: one of the envs is still busy; nothing was sent.
        """
        if self._fault is not None or self._lock.locked():
            self._check_usable()
        if env_ids is None:
            ids = None
            if self._pending:
                raise self._busy(self._all_ids)
        else:
            ids = self._check_ids(env_ids)
            if self._state[ids].any():
                raise self._busy(ids)
        if self._some_must_reset:
            self._check_reset(ids)
        self._write_actions(actions, ids)
        self._post(ids, native.OP_STEP)

    def recv(self, timeout: float | None = None) -> Batch:
        """Wait for the next `batch_size` envs that are done.

        Raises:
            NothingPending: fewer envs than that were sent to.
            StepTimeout: they were not done in `timeout` seconds; recv may be called again.
            EnvError: an env raised; the others of the batch come with the next recv.
            WorkerDied: a worker is gone; the pool is closed.
        """
        return self.batch(self.wait(timeout))

    def step(self, actions: Any, timeout: float | None = None) -> Batch:
        """Step all envs and wait for them. After an EnvError, the other envs' results of this step are dropped."""
        self.send(actions)
        try:
            return self.batch(self._wait(self.num_envs, None, Deadline.after(timeout) if timeout else NEVER))
        except EnvError:
            self.drop_pending()
            raise

    def wait(self, timeout: float | None = None) -> Ready:
        """Like recv, but gives the lanes only: for dialects that take just the fields they need."""
        wanted = None
        if self.order == "fifo" and len(self._queue) >= self.batch_size:
            wanted = np.fromiter(self._queue, np.int64, self.batch_size) if self.batch_size < self.num_envs else None
        return self._wait(self.batch_size, wanted, NEVER if timeout is None else Deadline.after(timeout))

    def _post(self, ids: Ids | None, op: int) -> None:
        if self._lanes.post(ids, op):
            raise self._busy(self._all_ids if ids is None else ids)
        self._pending += self.num_envs if ids is None else len(ids)
        if self.order == "fifo":
            self._queue.extend(range(self.num_envs) if ids is None else ids.tolist())

    def _wait(self, need: int, wanted: Ids | None, deadline: Deadline) -> Ready:
        if self._fault is not None:
            self._check_usable()
        if self._pending < need:
            raise self._too_few(need)
        if not self._lock.acquire(blocking=False):
            raise ConcurrentUse("another thread is waiting on this pool: give each thread a pool of its own")
        try:
            if self._run_inline is not None:
                self._run_inline()
            out = self._out
            count, first, slot, status = self._lanes.collect(need, wanted, deadline.at_ns, self._spin_ns, out)
        finally:
            self._lock.release()
        if count < 0:
            raise self._wait_failed(count, deadline)
        self._pending -= count
        ids = self._all_ids if count == self.num_envs else out[:count].copy()
        infos = self._take_notes(ids) if status else {}
        if self.order == "fifo":
            self._forget_sent(ids)
        if self.autoreset == "disabled":
            self._note_ends(ids)
        return Ready(ids, first, slot, infos)

    def _forget_sent(self, ids: Ids) -> None:
        done = set(ids.tolist())
        self._queue = deque(lane for lane in self._queue if lane not in done)

    def _note_ends(self, ids: Ids) -> None:
        """Under autoreset="disabled", an env whose episode is over must be reset by the user."""
        slots = self._slot[ids]
        self._must_reset[ids] = self._fields["terminated"][slots, ids] | self._fields["truncated"][slots, ids]
        self._some_must_reset = bool(self._must_reset.any())

    # ---- what was received -----------------------------------------------------------------------------------

    def batch(self, ready: Ready) -> Batch:
        """All fields of the lanes."""
        take = self.take
        mask = self._true[: len(ready.ids)]
        return Batch(
            self.take_obs(ready), take(ready, "reward"), take(ready, "terminated"), take(ready, "truncated"),
            ready.infos, ready.ids.copy() if self.copy else ready.ids, mask.copy() if self.copy else mask,
            take(ready, "began"), take(ready, "episode_return"), take(ready, "episode_length"),
        )  # fmt: skip

    def take(self, ready: Ready, name: str) -> npt.NDArray[Any]:
        """One field of the lanes: a view where they are one run, else an array of its own."""
        ids, first, slot, _ = ready
        if slot < 0:
            field: npt.NDArray[Any] = self._fields[name]
            return field[self._slot[ids], ids]
        view = self._frame_fields[slot][name]
        if len(ids) != self.num_envs:
            view = view[first : first + len(ids)]
        return view.copy() if self.copy else view

    def take_obs(self, ready: Ready) -> Any:
        """The observations of the lanes, nested as the space is."""
        ids, _, slot, _ = ready
        if slot >= 0 and len(ids) == self.num_envs and self._frame_obs[slot] is not None:
            whole = self._frame_obs[slot]
            if not self.copy:
                return whole
            if self._one_array:
                return whole.copy()
        values = [self._take_leaf(i, ready) for i in range(len(self._obs_leaves))]
        return assemble(self.specs.single_observation_space, values)

    def _take_leaf(self, index: int, ready: Ready) -> Any:
        ids, first, slot, _ = ready
        array, leaf = self._obs_arrays[index], self._obs_leaves[index]
        if array is None:
            objects = self._obs_objects[index]
            return tuple(objects[lane] for lane in ids.tolist())
        if slot < 0:
            rows = array[self._slot[ids], ids]
        else:
            rows = array[slot, first : first + len(ids)]
            if self.copy:
                rows = rows.copy()
        return tuple(rows.tolist()) if leaf.kind is Kind.TEXT else rows

    def _take_notes(self, ids: Ids) -> dict[int, dict[str, Any]]:
        """Read what the lanes have in the side channel. Raises the first env's error, if one raised."""
        infos: dict[int, dict[str, Any]] = {}
        noted = ids[(self._status[self._slot[ids], ids] & STATUS_NOTE) != 0]
        notes: list[tuple[Any, Note]] = []
        for lane in noted.tolist():
            worker = self._crew.workers[self._owner[lane]]
            try:
                notes.append((worker, worker.take_note(lane, int(self._requested[lane]), NEVER)))
            except ShoalError as error:
                raise self._break(error) from None
        for worker, note in notes:
            if note.error is not None:
                self._put_back(ids, note.lane, notes)
                raise note.error.unpack(note.lane, worker.index)
            if note.info:
                infos[note.lane] = note.info
            objects = iter(note.objects)
            for leaf, stored in zip(self._obs_leaves, self._obs_objects, strict=True):
                if leaf.kind is Kind.OBJECT and note.objects:
                    stored[note.lane] = next(objects)
        return infos

    def _put_back(self, ids: Ids, failed: int, notes: list[tuple[Any, Note]]) -> None:
        """An env raised: its lane is idle and must be reset, the others wait for the next recv."""
        others = ids[ids != failed]
        self._state[others] = 1
        self._pending += len(others)
        for worker, note in notes:
            if note.lane != failed:
                worker.keep_note(note)
        self._must_reset[failed] = self._some_must_reset = True
        if self.order == "fifo":
            self._forget_sent(np.array([failed]))

    # ---- reset -----------------------------------------------------------------------------------------------

    def reset(
        self,
        env_ids: Any = None,
        *,
        seed: Seed = None,
        options: dict[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Batch:
        """Reset envs (None: all) and wait for them. A step of theirs that is pending is waited for and dropped.

        Args:
            seed: an int gives env i `seed + i`; a list gives each of the env ids its own.
            options: handed to every env's reset.
        """
        self.async_reset(env_ids, seed=seed, options=options)
        try:
            return self.batch(self.wait_reset(env_ids, timeout))
        except EnvError:
            self.drop_pending(env_ids)
            raise

    def async_reset(self, env_ids: Any = None, *, seed: Seed = None, options: dict[str, Any] | None = None) -> None:
        """Start a reset of envs (None: all); their first observations come with recv."""
        self._check_usable()
        ids = self._all_ids if env_ids is None else self._check_ids(env_ids)
        if seed is None:
            seed, self._first_seed = self._first_seed, None
        seeds = _spread_seed(seed, ids)
        if options is not None and not isinstance(options, dict):
            raise TypeError(f"options must be a dict or None, found {type(options).__name__}")
        self.drop_pending(ids)
        for worker, lanes, rows in self._by_worker(ids):
            self._tell(worker, "reset", lanes, [seeds[row] for row in rows], options)
        self._must_reset[ids] = False
        self._some_must_reset = bool(self._must_reset.any())
        self._post(None if env_ids is None else ids, native.OP_RESET)

    def wait_reset(self, env_ids: Any = None, timeout: float | None = None) -> Ready:
        """Wait for exactly these envs, which `async_reset` was called for."""
        ids = self._all_ids if env_ids is None else self._check_ids(env_ids)
        wanted = np.sort(ids) if len(ids) < self.num_envs else None
        ready = self._wait(len(ids), wanted, Deadline.after(timeout))
        if wanted is not None and not self._pending and self.batch_size == self.num_envs:
            self._realign(int(self._slot[ready.ids[0]]))
        return ready

    def whole(self, ready: Ready) -> Ready:
        """All lanes, where only some have just answered: the others have what they had last."""
        slot = int(self._slot[0]) if (self._slot == self._slot[0]).all() else -1
        return Ready(self._all_ids, 0, slot, ready.infos)

    def drop_pending(self, env_ids: Any = None, timeout: float | None = None) -> None:
        """Wait for those of the envs (None: all) that are busy, and forget what they answer."""
        self._check_usable()
        ids = self._all_ids if env_ids is None else self._check_ids(env_ids)
        busy = ids[self._state[ids] != 0]
        if not len(busy):
            return
        deadline = Deadline.after(timeout)
        if self._run_inline is not None:
            self._run_inline()
        busy = np.sort(busy)
        count, *_ = self._lanes.collect(len(busy), busy, deadline.at_ns, self._spin_ns, self._out)
        if count < 0:
            raise self._wait_failed(count, deadline)
        self._pending -= count
        if self.order == "fifo":
            self._forget_sent(busy)

    def _realign(self, slot: int) -> None:
        """After a reset of some envs, bring the others' last rows into the same frame.

        From then on full batches are views again instead of gathers.
        """
        others = np.flatnonzero(self._slot != slot)
        for array in [*self._fields.values(), *self._obs_arrays]:
            if array is not None:
                array[slot, others] = array[self._slot[others], others]
        self._slot[others] = slot

    # ---- commands --------------------------------------------------------------------------------------------

    def call(self, name: str, *args: Any, env_ids: Any = None, timeout: float | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of each env, through its wrappers; a plain attribute is returned as it is.

        Raises:
            EnvError: with the env's own exception type, AttributeError included; the pool goes on.
            CallPending: one of the envs is still busy with a step.
        """
        return self.finish_call(self.start_call(name, args, kwargs, env_ids), Deadline.after(timeout))

    def get_attr(self, name: str, env_ids: Any = None) -> list[Any]:
        """An attribute of each env, through its wrappers."""
        return self.call(name, env_ids=env_ids)

    def set_attr(self, name: str, values: Any, env_ids: Any = None) -> None:
        """Set an attribute of each env: a list or tuple gives each its own, anything else goes to all."""
        ids = self._idle_ids(env_ids)
        each = list(values) if isinstance(values, list | tuple) else [values] * len(ids)
        if len(each) != len(ids):
            raise BadCall(f"set_attr: expected {len(ids)} values, one per env, found {len(each)}")
        tickets = [
            (worker, worker.call("set", lanes, name, [each[row] for row in rows]), rows)
            for worker, lanes, rows in self._by_worker(ids)
        ]
        self.finish_call((ids, tickets))

    def render(self, env_ids: Any = None) -> list[Any]:
        """A frame of each env, as its render mode says."""
        return self.call("render", env_ids=env_ids)

    def start_call(self, name: str, args: Any, kwargs: Any, env_ids: Any = None) -> tuple[Ids, list[Any]]:
        """The first half of `call`: starts it and returns what `finish_call` needs."""
        if not isinstance(name, str) or name in _RESERVED:
            raise BadCall(f"call of {name!r}: expected the name of a method; use the pool's own {name} instead")
        ids = self._idle_ids(env_ids)
        return ids, [
            (worker, worker.call("call", lanes, name, args, kwargs), rows)
            for worker, lanes, rows in self._by_worker(ids)
        ]

    def finish_call(self, call: tuple[Ids, list[Any]], deadline: Deadline = NEVER) -> list[Any]:
        """The second half of `call`: waits for the results."""
        ids, tickets = call
        results: list[Any] = [None] * len(ids)
        owners = {}
        for worker, ticket, rows in tickets:
            try:
                values = worker.reply(ticket, deadline)
            except StepTimeout:
                raise
            except ShoalError as error:
                raise self._break(error) from None
            for row, value in zip(rows, values, strict=True):
                results[row], owners[row] = value, worker.index
        for row, value in enumerate(results):
            if isinstance(value, PackedError):
                raise value.unpack(int(ids[row]), owners[row])
        return results

    def _by_worker(self, ids: Ids) -> list[tuple[Any, list[int], list[int]]]:
        """The env ids grouped by worker: (worker, its lanes, their places in `ids`)."""
        groups: dict[int, tuple[list[int], list[int]]] = {}
        for row, lane in enumerate(ids.tolist()):
            lanes, rows = groups.setdefault(int(self._owner[lane]), ([], []))
            lanes.append(lane)
            rows.append(row)
        return [(self._crew.workers[w], lanes, rows) for w, (lanes, rows) in groups.items()]

    def _tell(self, worker: Any, *message: Any) -> None:
        try:
            worker.send(*message)
        except ShoalError as error:
            raise self._break(error) from None

    # ---- checks ----------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._fault is not None:
            raise self._fault
        if self._lock.locked():
            raise ConcurrentUse("another thread is waiting on this pool: give each thread a pool of its own")

    def _check_ids(self, env_ids: Any) -> Ids:
        try:
            ids = np.atleast_1d(np.asarray(env_ids))
        except ValueError as error:
            raise BadAction(f"env_ids cannot be made into an array: {error}") from error
        if ids.dtype.kind not in "iu" or ids.ndim != 1 or len(ids) == 0:
            raise BadAction(f"env_ids: expected a list of whole numbers, at least one, found {env_ids!r}")
        ids = np.ascontiguousarray(ids, np.int64)
        wrong = ids[(ids < 0) | (ids >= self.num_envs)]
        if len(wrong):
            raise BadAction(f"env_ids: there is no env {wrong[0]}; this pool has envs 0 to {self.num_envs - 1}")
        unique, counts = np.unique(ids, return_counts=True)
        if len(unique) != len(ids):
            raise BadAction(f"env_ids: env {unique[counts > 1][0]} is named more than once")
        return ids

    def _idle_ids(self, env_ids: Any) -> Ids:
        self._check_usable()
        ids = self._all_ids if env_ids is None else self._check_ids(env_ids)
        if self._pending and self._state[ids].any():
            raise self._busy(ids)
        return ids

    def _check_reset(self, ids: Ids | None) -> None:
        lanes = self._all_ids if ids is None else ids
        stale = lanes[self._must_reset[lanes]]
        if len(stale):
            raise ResetNeeded(
                f"env {stale[0]} must be reset before it is stepped: it was never reset, its episode is over "
                f"or it raised; call reset(env_ids={stale[:8].tolist()}) first"
            )

    def _write_actions(self, actions: Any, ids: Ids | None) -> None:
        simple = self._simple_action
        if simple is not None and ids is None and type(actions) is np.ndarray:
            leaf, target, shape = simple
            if actions.dtype == leaf.dtype and actions.shape == shape and actions.flags.c_contiguous:
                if not self._check_simple or native.outside(leaf.dtype.kind, actions, leaf.low, leaf.high) == -1:
                    target[:] = actions  # type: ignore[index]
                    return
        lanes = self._all_ids if ids is None else ids
        values = read_actions(self._action_leaves, actions, lanes, self._check_boxes)
        for array, value in zip(self._action_arrays, values, strict=True):
            if array is not None:
                array[lanes] = value
        if self._has_objects:
            objects = [value for value, array in zip(values, self._action_arrays, strict=True) if array is None]
            for worker, own, rows in self._by_worker(lanes):
                self._tell(worker, "actions", own, [[column[row] for column in objects] for row in rows])

    def _busy(self, ids: Ids) -> ShoalError:
        busy = ids[self._state[ids] != 0][:8].tolist()
        return CallPending(f"envs {busy} are still busy with an earlier send: recv their results first")

    def _too_few(self, need: int) -> ShoalError:
        return NothingPending(
            f"recv waits for {need} envs and {self._pending} were sent to: send to more, or make the pool with a "
            "smaller batch_size"
        )

    def _wait_failed(self, code: int, deadline: Deadline) -> ShoalError:
        if code == native.COLLECT_ALARM:
            self._lanes.heard()
            return self._break(self._crew.dead[0].death())
        late = self.pending[self._slab.array("answered")[self.pending] != self._requested[self.pending]].tolist()
        return StepTimeout(f"envs {late[:8]} did not answer within {deadline.seconds} s; recv may be tried again", late)

    # ---- end -------------------------------------------------------------------------------------------------

    def _break(self, error: ShoalError) -> ShoalError:
        """Close after a worker's death; later calls say why."""
        self._shut(1.0, PoolClosed(f"the pool was closed because {error}"))
        return error

    def close(self, timeout: float | None = 5.0) -> None:
        """Close all envs and end all workers: asks, and after `timeout` seconds forces. May be called again.

        Raises:
            EnvError: an env raised in its close; everything is closed all the same.
        """
        errors = self._shut(timeout, PoolClosed("the pool is closed: make a new one"))
        if errors:
            env_id, error = errors[0]
            raise error.unpack(env_id, int(self._owner[env_id]))

    def _shut(self, timeout: float | None, fault: ShoalError) -> list[tuple[int, Any]]:
        if self._fault is not None:
            return []
        self._fault = fault
        _open_pools.discard(self)
        errors = self._crew.dismiss(Deadline.after(timeout))
        self._run_inline = None
        self._slab.close()
        return errors

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fault", True) is None:
            self._shut(1.0, PoolClosed("the pool was garbage collected"))


def _check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, found {value!r}")


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not low <= value <= high:
        raise ValueError(f"{name}: expected a whole number from {low} to {high}, found {value!r}")
    return int(value)


def _spread_seed(seed: Seed, ids: Ids) -> list[int | None]:
    """One seed for each env id, as Gymnasium gives them out."""
    if seed is None:
        return [None] * len(ids)
    if isinstance(seed, int | np.integer) and not isinstance(seed, bool):
        return [int(seed) + lane for lane in ids.tolist()]
    if isinstance(seed, str) or not isinstance(seed, Sequence | np.ndarray):
        raise TypeError(f"seed: expected an int, a list of ints or None, found {seed!r}")
    if len(seed) != len(ids):
        raise ValueError(f"seed: expected {len(ids)} seeds, one per env, found {len(seed)}")
    return [None if one is None else int(one) for one in seed]


def _close_all() -> None:
    for pool in list(_open_pools):
        pool._shut(1.0, PoolClosed("the interpreter is leaving"))


def _disown_all() -> None:
    """In a forked child: the pools are the parent's."""
    for pool in list(_open_pools):
        pool._fault = WrongProcess(
            f"this pool belongs to process {os.getppid()}, of which this one is a fork: make a pool here"
        )
        pool._crew.abandon()
    _open_pools.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)

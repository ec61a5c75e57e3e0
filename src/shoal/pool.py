"""The pool: many envs as one. What every dialect and wrapper stands on."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

import numpy as np
from gymnasium import Space

from shoal import native
from shoal.backends.base import split
from shoal.backends.launch import DEFAULT_START_METHOD, START_METHODS
from shoal.batch import Batch
from shoal.engine.commands import Call
from shoal.engine.env_specs import EnvSpecs, agree
from shoal.engine.lane_groups import Groups, choose_mode
from shoal.engine.recovery import RecoveryPolicy
from shoal.engine.scheduler import Scheduler
from shoal.engine.workers import BACKENDS, Workers
from shoal.envs.batched import BATCHED, batched_env_fn, build_batched, can_be_compiled, choose_compiled
from shoal.envs.functions import as_env_fns
from shoal.errors import BadCall, CannotSnapshot, EnvError, PoolClosed, ShoalError, WrongProcess
from shoal.memory.answers import Frames, Ready, frames_to_lend
from shoal.memory.messages import StepperConfig
from shoal.memory.packed_errors import PackedError
from shoal.memory.slab import Layout, Slab
from shoal.observe.stats import PoolStats, WorkerInfo
from shoal.planning.plan import Plan, contradiction, given_plan, make_plan, spin_times
from shoal.remote.dispatcher import REMOTE, Transport, make_transport
from shoal.rollout import ANSWERS, Rollout, roll_out
from shoal.spaces.leaves import array_leaves, flatten
from shoal.state.snapshot import Snapshot, check_facts, check_fields, notes_of, read_fields, write_fields
from shoal.support import processes
from shoal.support.checks import (
    Ids,
    Options,
    Seed,
    check_choice,
    check_ids,
    positive_number,
    spread_options,
    spread_seed,
    whole_number,
)
from shoal.support.copies import own_copy
from shoal.support.deadline import NEVER, Deadline

__all__ = ["Pool", "refuse_unknown_options"]

_RESERVED = ("reset", "step", "close")  # what must go through the pool's own methods
_open_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


class Pool:
    """Many envs as one.

    Args:
        env: a Gymnasium id or spec, a function or class that makes an env, or a list of such, one per env.
        num_envs: how many; left out when a list was given.
        backend: "serial", "threads", "processes", "hybrid" (the caller steps a block itself beside worker
            processes), "jax" (one functional env, stepped for all lanes at once on a device), "compiled" (a class that
            derives from `shoal.compiled.Env`, stepped by compiled code in threads), "cuda" (such a class on a GPU;
            answers are copied to the host, and `shoal.compiled.cuda` leaves them there), or "auto", which measures the
            env and chooses ("compiled" where that can be; "processes", unmeasured, where on_error, step_timeout or
            recycle_after say that envs may do terrible things); `pool.plan` says what and why. "ray" runs blocks of
            envs in actors of a Ray cluster, "mpi" in the other ranks of an MPI job, which serve (`shoal.serve`);
            neither is ever chosen by "auto" (docs/distributed.md).
        num_workers: by default the cores that this process may use; under "ray", the actors that there is room for;
            under "mpi", the serving ranks.
        backend_options: for "mpi" those of `MpiOptions` (how each rank runs its envs, and which ranks), for "ray" those
            of `RayOptions` (address, resources and placement of actors, and how each runs its envs); see
            docs/distributed.md.
        batch_size: how many lanes `recv` waits for; by default all.
        batch_envs: the same in envs, where these have several lanes.
        autoreset: "next_step", "same_step" (last observation in the info), or "disabled"; None for "next_step", or for
            what envs do that step a whole batch and reset by themselves.
        frames: how many time slots the slab has; arrays stay valid for `frames - 1` further sends. With just 1, envs
            that take buffers to write into (PufferLib's) write straight into the batch. Without effect where `copy`
            is True.
        copy: True gives arrays that are the caller's own.
        flat_rows: all parts of a nested observation lie in one row, so that `shoal.emulation.Emulation.flatten` gives
            these rows without a copy; the parts are strided views of them then. For spaces of arrays only.
        order: "ready" (the first lanes that are done), "fifo" (strictly in the order in which they were sent) or
            "contiguous": batches are always the same neighbours, lanes 0 up to `batch_size` and so on, those first that
            are all done, so that arrays of partial batches are views, and nothing is copied.
        seed: for the first reset of each env, where that is given none.
        isolate: never run an env in the caller's process, whatever "auto" thinks.
        on_error: "raise", or "restart": an env that raised, died with its worker or took too long is built anew, with a
            seed derived from its own and the number of its restarts. Its lane is reported once as truncated, with
            `info["shoal_restart"]`, and so are the others of its worker, if that died.
        max_restarts, restart_window: how many restarts one env (or one worker, where no env is to blame) may cause in
            so many seconds; then the error is raised all the same. They follow each other at growing intervals.
        step_timeout: seconds that one env may take for a step or a reset. It is not for envs in the caller's own
            process, so not for serial and hybrid; threads cannot be ended, and raise StepTimeout in any case.
        recycle_after: bytes that a worker process may grow by; then it is replaced when one of its episodes ends. Its
            other envs move with their state where that can be saved, and are reported as truncated where not.
        observation_mode: "same": all observation spaces must be equal; "different": equal in shape and type;
            or a pair (batched space, single space).
        check_actions: "all", or "discrete" to let Box actions out of their bounds pass, as Gymnasium does.
        check_nan: refuse observations and rewards that are not a number, as BadObservation; takes time.
        start_method: "forkserver" (default), "spawn" or "fork"; a worker that is replaced is never forked from this
            process, which has threads by then.
        start_timeout: seconds until the envs must be built.
        env_kwargs: keyword arguments for the env's constructor.
        plan: a `shoal.Plan`, as `shoal.tune` finds it, or the file of one: backend, workers and, where it says so, the
            number of envs and the batch size. Options beside it must not contradict it.
    """

    def __init__(
        self,
        env: Any,
        num_envs: int | None = None,
        *,
        backend: Literal[
            "auto", "serial", "threads", "processes", "hybrid", "jax", "compiled", "cuda", "ray", "mpi"
        ] = "auto",
        num_workers: int | None = None,
        backend_options: Mapping[str, Any] | None = None,
        batch_size: int | None = None,
        batch_envs: int | None = None,
        autoreset: Literal["next_step", "same_step", "disabled"] | None = None,
        frames: int = 2,
        copy: bool = False,
        flat_rows: bool = False,
        order: Literal["ready", "fifo", "contiguous"] = "ready",
        seed: Seed = None,
        isolate: bool = False,
        on_error: Literal["raise", "restart"] = "raise",
        max_restarts: int = 10,
        restart_window: float = 600.0,
        step_timeout: float | None = None,
        recycle_after: int | None = None,
        observation_mode: str | tuple[Space[Any], Space[Any]] = "same",
        check_actions: Literal["all", "discrete"] = "all",
        check_nan: bool = False,
        start_method: str | None = None,
        start_timeout: float | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
    ):
        self._fault: ShoalError | None = PoolClosed("the pool was never started")
        check_choice("backend", backend, ("auto", *BACKENDS))
        if autoreset is not None:
            check_choice("autoreset", autoreset, tuple(native.AUTORESET))
        check_choice("order", order, ("ready", "fifo", "contiguous"))
        check_choice("check_actions", check_actions, ("all", "discrete"))
        self._start_method = start_method or DEFAULT_START_METHOD
        check_choice("start_method", self._start_method, START_METHODS)
        if plan is not None:
            plan = given_plan(plan, backend, num_workers, batch_envs, isolate)
            backend = plan.backend  # type: ignore[assignment]
            num_workers = plan.num_workers
            if backend in BATCHED and batch_size is None:
                batch_size = plan.batch_size  # one env has all lanes there
            elif batch_size is None:
                batch_envs = plan.batch_size
            if num_envs is None and (isinstance(env, str) or not isinstance(env, Sequence)):
                num_envs = plan.num_envs
        if not isinstance(backend_options, Mapping | None):
            raise ValueError(f"backend_options: expected a dict, found {backend_options!r}")
        reason = ""
        if backend == "auto" and can_be_compiled(env) and not (isolate or on_error == "restart" or step_timeout):
            backend, reason = choose_compiled(env)
        if backend in BATCHED:
            count = whole_number("num_envs", 1 if num_envs is None else num_envs, 1, 2**40)
            env_fns: list[Any] = [batched_env_fn(backend, env, count, env_kwargs, num_workers)]
        elif backend in REMOTE and (backend_options or {}).get("local_backend") in tuple(BATCHED):
            env_fns, count = [], whole_number("num_envs", 1 if num_envs is None else num_envs, 1, 2**40)
        else:
            env_fns = as_env_fns(env, num_envs, env_kwargs)
            count = len(env_fns)
        if plan is not None and plan.num_envs not in (None, count):
            raise contradiction("num_envs", count, plan.num_envs)
        self.order, self.copy, self._flat_rows = order, bool(copy), bool(flat_rows)
        self._check_boxes, self._check_nan = check_actions == "all", bool(check_nan)
        self.on_error = on_error
        self.step_timeout = None if step_timeout is None else positive_number("step_timeout", step_timeout)
        self._policy = RecoveryPolicy.checked(on_error, max_restarts, restart_window, recycle_after)
        # What the caller has seen last must outlive a torn write.
        self.frames = whole_number("frames", frames, 2 if self._policy.replaces else 1, 255)
        _check_limits(backend, on_error, step_timeout, recycle_after)
        # Who wants to survive what the envs do must not live with them, nor try one out first.
        survives = self._policy.replaces or step_timeout is not None
        if backend == "auto" and survives:
            backend = "processes"
        if backend_options is not None and backend not in REMOTE:
            raise ValueError(
                f'backend_options: backend="{backend}" takes none, only {" and ".join(map(repr, REMOTE))} do'
            )
        deadline = Deadline.after(start_timeout)
        transport = None
        if backend in REMOTE:
            transport = make_transport(backend, backend_options or {}, count, num_workers)
            num_workers = transport.num_workers
        try:
            if transport is not None:
                _check_far(backend, transport, on_error, step_timeout)
                if transport.local_backend in BATCHED:
                    env_fns = _batched_blocks(transport, env, count, env_kwargs)
            batch = _expected_batch(batch_size, batch_envs, len(env_fns))
            if plan is None:
                plan = make_plan(env_fns, backend, num_workers, batch, isolate, self._start_method, deadline)
            most = plan.num_workers if backend in BATCHED else len(env_fns)
            self.plan: Plan = replace(plan, num_workers=min(plan.num_workers, most))
            if reason:
                words = reason if backend == "compiled" else f"{self.plan.reason}; {reason}"
                self.plan = replace(self.plan, reason=words)
            self._workers = Workers(
                env_fns, self.plan.backend, self.plan.num_workers, self._start_method, start_timeout, transport
            )
        except BaseException:
            if transport is not None:
                transport.close()
            raise
        try:
            self.specs: EnvSpecs = self._start(autoreset, observation_mode, batch_size, batch_envs, seed, deadline)
        except BaseException:
            self._workers.dismiss(Deadline.after(1.0))  # a partial start is undone
            if hasattr(self, "_slab"):
                self._slab.close()
            raise
        self._fault = None
        _open_pools.add(self)
        if transport is not None:  # at exit, before the package that carries the messages leaves
            atexit.unregister(_close_all)
            atexit.register(_close_all)

    # ---- start -----------------------------------------------------------------------------------------------

    def _start(
        self,
        autoreset: str | None,
        observation_mode: Any,
        batch_size: int | None,
        batch_envs: int | None,
        seed: Seed,
        deadline: Deadline,
    ) -> EnvSpecs:
        summaries = self._workers.build(deadline)
        self.autoreset = choose_mode(autoreset, self._workers.groups)
        self._policy = replace(self._policy, same_step=self.autoreset == "same_step")
        self.num_envs = self._workers.blocks[-1][1]
        groups = Groups(self._workers.groups, self._policy.replaces)
        if batch_envs is not None:
            batch_size = groups.lanes_of(batch_envs, self.num_envs)
        elif batch_size is not None and (planned := self.plan.envs_in_a_batch) is not None:
            lanes = planned if self.plan.backend in BATCHED else groups.lanes_of(planned, self.num_envs)
            if batch_size != lanes:
                raise contradiction("batch_size", batch_size, lanes)
        self.batch_size = whole_number(
            "batch_size", self.num_envs if batch_size is None else batch_size, 1, self.num_envs
        )
        groups.check_batch(self.batch_size, self.num_envs)
        window = self._window()
        self._first_seeds = spread_seed(seed, np.arange(self.num_envs))
        specs = agree(summaries, self.num_envs, observation_mode)
        obs_leaves, action_leaves = flatten(specs.single_observation_space), flatten(specs.single_action_space)
        if self._flat_rows:
            array_leaves("observation", specs.single_observation_space, "a flat row")
            if self.plan.backend == "compiled" and len(obs_leaves) > 1:
                raise ValueError(
                    'flat_rows: backend="compiled" writes each part of an observation into an array of its own'
                )
        lend = False
        if self.copy:
            self.frames = frames_to_lend(obs_leaves, self.num_envs, self.autoreset)
            lend = self.frames > 1
            if self._policy.replaces:
                self.frames += 1  # what the caller has seen last must outlive a torn write
        layout = Layout.plan(
            obs_leaves, action_leaves, self.num_envs, self.frames, len(self._workers),
            finals=self.autoreset == "same_step",
            absences=any(lanes.can_be_absent for lanes in self._workers.groups), rows=self._flat_rows,
        )  # fmt: skip
        self._slab = Slab.create(layout, self._workers.shared)
        spin_pool, spin_workers = spin_times(self.plan)
        config = StepperConfig(
            specs.single_observation_space, specs.single_action_space, self.autoreset,
            self.batch_size < self.num_envs, spin_workers, self._check_nan,
        )  # fmt: skip
        self._workers.attach(self._slab, config, deadline)
        self.data = Frames(
            self._slab, specs.single_observation_space, self.copy, lend, spare=2 if self._policy.replaces else 1
        )
        # Of a team, only the env knows whether it goes on without those whose episodes are over.
        user_resets = self.autoreset == "disabled" and not any(lanes.can_be_absent for lanes in self._workers.groups)
        self._scheduler = Scheduler(
            self._slab, self._workers, self.data, action_leaves, self._check_boxes, user_resets,
            self.order == "fifo", spin_pool, self.step_timeout, self._policy, groups, window,
            self._break,
        )  # fmt: skip
        self._introduce(specs)
        return specs

    def _window(self) -> int:
        """How many neighbours are always received together; 0 for any lanes."""
        if self.order != "contiguous" or self.batch_size == self.num_envs:
            return 0
        if self.num_envs % self.batch_size:
            raise ValueError(
                f'order="contiguous" cuts {self.num_envs} lanes into batches of equal size, and batch_size='
                f"{self.batch_size} does not divide them"
            )
        return self.batch_size

    def _introduce(self, specs: EnvSpecs) -> None:
        """Let `shoal top` find the pool."""
        self._slab.introduce({
            "pid": os.getpid(), "started": processes.started(os.getpid()) or 0, "began_ns": time.monotonic_ns(),
            "env": specs.name[:100], "backend": self.plan.backend, "envs": self.num_envs,
            "batch_size": self.batch_size,
        })  # fmt: skip

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
    def lane_names(self) -> list[Any] | None:
        """The names of the agents of one env, one for each of its lanes; None where lanes have no names."""
        return self._workers.groups[0].names if self._workers.groups else None

    @property
    def lanes_per_env(self) -> int:
        """How many neighbouring lanes are one env's; 0 where envs differ in that."""
        counts = {lanes.size if lanes.together else 1 for lanes in self._workers.groups} or {1}
        return counts.pop() if len(counts) == 1 else 0

    @property
    def workers(self) -> list[WorkerInfo]:
        """Each worker's process id, env ids and state."""
        return [WorkerInfo(w.index, w.pid, list(w.env_ids), w.state, w.node) for w in self._workers]

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
        """The envs that live in the caller's process: all under serial, the caller's block under hybrid, and under a
        batched backend the one that steps all lanes."""
        return [] if self._workers.inline is None else self._workers.inline.envs

    @property
    def pending(self) -> Ids:
        """The envs that were sent to and not yet received from."""
        return self._scheduler.pending

    def stats(self) -> PoolStats:
        """Counts since the start, and where the time went; print it. For an interval, subtract an earlier one."""
        self._check_usable()
        blocks = [list(worker.env_ids) for worker in self._workers]
        return PoolStats.read(self._slab, self.plan.backend, self.batch_size, blocks)

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
        self._check_usable()
        ids = None if env_ids is None else check_ids(env_ids, self.num_envs)
        self._scheduler.send(actions, ids)

    def recv(self, timeout: float | None = None, min_batch: int | None = None) -> Batch:
        """Wait for the next `batch_size` envs that are done.

        Args:
            min_batch: how many will do when the timeout is over, or when fewer than `batch_size` were sent to.

        Raises:
            NothingPending: fewer envs than that were sent to.
            StepTimeout: they were not done in `timeout` seconds, or one took longer than `step_timeout`; recv may be
                called again.
            EnvError: an env raised; the others of the batch come with the next recv (which, for a full batch, waits
                for the env to be reset and sent to as well).
            WorkerDied: a worker is gone; the pool is closed (with on_error="restart": its budget is spent).
        """
        return self.data.batch(self.wait(timeout, min_batch))

    def wait(self, timeout: float | None = None, min_batch: int | None = None) -> Ready:
        """Like recv, but gives the lanes only: for dialects that take just the fields they need from `data`."""
        self._check_usable()
        least = None if min_batch is None else whole_number("min_batch", min_batch, 1, self.batch_size)
        return self._scheduler.wait_next(self.batch_size, Deadline.after(timeout), least)

    def step(self, actions: Any, timeout: float | None = None) -> Batch:
        """Step all envs and wait for them. After an EnvError, the other envs' results of this step are dropped."""
        return self.data.batch(self.exchange(actions, timeout))

    def exchange(self, actions: Any, timeout: float | None = None) -> Ready:
        """Like step, but gives the lanes only: for dialects that take just the fields they need from `data`."""
        if self._fault is not None:
            raise self._fault
        return self._scheduler.exchange(actions, NEVER if timeout is None else Deadline.after(timeout))

    # ---- rollouts --------------------------------------------------------------------------------------------

    def rollout(
        self,
        policy: Any,
        steps: int,
        *,
        params: Sequence[Any] = (),
        seed: int | None = None,
        out: Rollout | None = None,
    ) -> Rollout:
        """Step all envs so many times by a policy, and keep everything; goes on where the envs are.

        With backend="compiled" and a policy that can be compiled, or "random", no Python runs until it is over.

        Args:
            policy: a function of a batch of observations that returns a batch of actions; a `shoal.compiled.policy`; or
                "random".
            params: arrays that a `shoal.compiled.policy` gets.
            seed: for what such a policy, or "random", draws: lane i gets `seed + i`; None for anything.
            out: an earlier rollout of as many steps, whose arrays are written again, and which is returned: fresh
                memory costs more than quick envs take to fill it.

        Raises:
            EnvError: an env raised; under backend="compiled" all must be reset then.
        """
        self._check_usable()
        return roll_out(self, policy, whole_number("steps", steps, 1, 2**40), params, seed, out)

    def last_answer(self) -> Batch:
        """What all envs have answered last, none of which may be busy; those that were never reset are reset first."""
        if self._scheduler.some_must_reset:
            return self.reset()
        return self.data.batch(self.data.whole(Ready(np.arange(0), 0, -1, {})))

    def roll_compiled(self, record: Any, policy: Any, params: Sequence[Any], rngs: Any) -> bool:
        """Fill the record of a rollout without Python; False where that cannot be done."""
        if self.plan.backend != "compiled":
            return False
        from shoal.compiled.rolling import roll

        assert self._workers.inline is not None
        with self._scheduler.alone():
            if not roll(self._workers.inline.stepper, record, policy, params, rngs):
                return False
            slot = self._scheduler.move_on()
        last = {name: getattr(record, name)[-1] for name in (*ANSWERS, "began")}
        for name, values in (last | {f"obs.{i}": array[-1] for i, array in enumerate(record.obs)}).items():
            self._slab.array(name)[slot] = values
        self._slab.array("status")[slot] = 0
        return True

    # ---- reset -----------------------------------------------------------------------------------------------

    def reset(
        self,
        env_ids: Any = None,
        *,
        seed: Seed = None,
        options: Options = None,
        timeout: float | None = None,
    ) -> Batch:
        """Reset envs (None: all) and wait for them. A step of theirs that is pending is waited for and dropped.

        Args:
            seed: an int gives env i `seed + i`; a list gives each of the env ids its own.
            options: handed to every env's reset; a list gives each of the env ids its own.
        """
        deadline = Deadline.after(timeout)
        ids = self._start_reset(env_ids, seed, options, deadline)
        try:
            return self.data.batch(self._scheduler.wait_for(np.sort(ids), deadline))
        except EnvError:
            with contextlib.suppress(ShoalError):  # the env's own error is what matters
                self._scheduler.drop(ids, deadline)
            raise

    def async_reset(self, env_ids: Any = None, *, seed: Seed = None, options: Options = None) -> None:
        """Start a reset of envs (None: all); their first observations come with recv."""
        self._start_reset(env_ids, seed, options, NEVER)

    def _start_reset(self, env_ids: Any, seed: Seed, options: Options, deadline: Deadline) -> Ids:
        self._check_usable()
        ids = self._ids(env_ids)
        given = zip(spread_seed(seed, ids), ids.tolist(), strict=True)
        seeds = [self._first_seeds[lane] if one is None else one for one, lane in given]
        self._scheduler.reset(ids, seeds, spread_options(options, len(ids)), deadline)
        for lane in ids.tolist():
            self._first_seeds[lane] = None
        return ids

    def wait_reset(self, env_ids: Any = None, timeout: float | None = None) -> Ready:
        """Wait for exactly these envs, which `async_reset` was called for."""
        self._check_usable()
        return self._scheduler.wait_for(np.sort(self._ids(env_ids)), Deadline.after(timeout))

    def drop_pending(self, env_ids: Any = None, timeout: float | None = None) -> None:
        """Wait for those of the envs (None: all) that are busy, and forget what they answer."""
        self._check_usable()
        self._scheduler.drop(self._ids(env_ids), Deadline.after(timeout))

    # ---- commands --------------------------------------------------------------------------------------------

    def call(
        self, name: str, *args: Any, env_ids: Any = None, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method of each env, through its wrappers; a plain attribute is returned as it is.

        Raises:
            EnvError: with the env's own exception type, AttributeError included; the pool goes on.
            CallPending: one of the envs is still busy with a step.
            WorkerDied: the worker died over it. With on_error="restart" the pool goes on, and the envs' next step
                tells of their restart.
        """
        deadline = Deadline.after(timeout)
        return self._scheduler.commands.finish(self.start_call(name, args, kwargs, env_ids, deadline), deadline)

    def get_attr(self, name: str, env_ids: Any = None) -> list[Any]:
        """An attribute of each env, through its wrappers."""
        return self.call(name, env_ids=env_ids)

    def apply(self, function: Callable[..., Any], *args: Any, env_ids: Any = None, **kwargs: Any) -> list[Any]:
        """What `function(env, ...)` returns for each env, run where the env lives: for all that `call` cannot reach.

        Raises:
            EnvError, CallPending, WorkerDied: as `call` does.
        """
        return self._scheduler.commands.finish(self.start_apply(function, args, kwargs, env_ids), NEVER)

    def set_attr(self, name: str, values: Any, env_ids: Any = None) -> None:
        """Set an attribute of each env: a list or tuple gives each its own, anything else goes to all."""
        self._check_usable()
        ids = self._ids(env_ids)
        each = list(values) if isinstance(values, list | tuple) else [values] * len(ids)
        if len(each) != len(ids):
            raise BadCall(f"set_attr: expected {len(ids)} values, one per env, found {len(each)}")
        call = self._scheduler.start_call(ids, "set", lambda rows: (name, [each[row] for row in rows]))
        self._scheduler.commands.finish(call, NEVER)

    def render(self, env_ids: Any = None) -> list[Any]:
        """A frame of each env, as its render mode says."""
        return self.call("render", env_ids=env_ids)

    def start_call(self, name: str, args: Any, kwargs: Any, env_ids: Any = None, deadline: Deadline = NEVER) -> Call:
        """The first half of `call`: starts it and returns what `finish_call` needs."""
        if not isinstance(name, str) or name in _RESERVED:
            raise BadCall(f"call of {name!r}: expected the name of a method; use the pool's own {name} instead")
        self._check_usable()
        return self._scheduler.start_call(self._ids(env_ids), "call", lambda rows: (name, args, kwargs), deadline)

    def start_apply(self, function: Callable[..., Any], args: Any, kwargs: Any, env_ids: Any = None) -> Call:
        """The first half of `apply`: starts it and returns what `finish_call` needs."""
        if not callable(function):
            raise BadCall(f"apply: expected a function that takes an env, found {function!r}")
        self._check_usable()
        return self._scheduler.start_call(self._ids(env_ids), "apply", lambda rows: (function, args, kwargs))

    def finish_call(self, call: Call, timeout: float | None = None) -> list[Any]:
        """The second half of `call` and of `apply`: waits for the results. Several may be under way, in any order."""
        self._check_usable()
        return self._scheduler.commands.finish(call, Deadline.after(timeout))

    def _check_usable(self) -> None:
        if self._fault is not None:
            raise self._fault

    def _ids(self, env_ids: Any) -> Ids:
        return np.arange(self.num_envs) if env_ids is None else check_ids(env_ids, self.num_envs)

    # ---- snapshots -------------------------------------------------------------------------------------------

    def snapshot(self, path: str | os.PathLike[str] | None = None, timeout: float | None = None) -> Snapshot:
        """The state of all envs, random generators included, and of the pool; `restore` goes on from there.

        Envs are saved by their own `get_state()` and `set_state(state)`, by their attributes, or, where these are no
        plain data, by pickling them: `Snapshot.pickled` says which. What an env keeps elsewhere is not saved: variables
        of modules and classes, the global generators of `random` and `numpy.random`, files, servers.
        Steps that are under way are waited for first; their results stay to be received, here and after a restore.

        Args:
            path: a file to write it to as well.

        Raises:
            CannotSnapshot: naming the envs that cannot be saved, and why.
        """
        self._check_usable()
        deadline = Deadline.after(timeout)
        notes = self._scheduler.settle(deadline)
        ids = np.arange(self.num_envs)
        saved = self._scheduler.commands.command(ids, "save", lambda rows: (), deadline)
        failed = {env_id: value for env_id, value in enumerate(saved) if isinstance(value, PackedError)}
        if failed:
            first: dict[str, int] = {}
            for env_id, value in failed.items():
                first.setdefault(value.summary.partition(": ")[2], env_id)
            reasons = "; ".join(f"env {env_id}: {reason}" for reason, env_id in list(first.items())[:3])
            raise CannotSnapshot(f"{len(failed)} of {self.num_envs} envs cannot be saved. {reasons}", list(failed))
        found = Snapshot(
            self._about(), saved, read_fields(self._slab, self._obs_fields(), self._slab.array("slot")),
            [notes[lane].objects if lane in notes else self.data.objects_of(lane) for lane in range(self.num_envs)],
            {lane: own_copy(note.info) for lane, note in notes.items()},
            {**self._scheduler.facts(), "first_seeds": list(self._first_seeds)},
        )  # fmt: skip
        if path is not None:
            found.save(path)
        return found

    def restore(
        self, snapshot: Snapshot | str | os.PathLike[str], trusted: bool = False, timeout: float | None = None
    ) -> Batch:
        """Put a snapshot back, whatever the pool was doing: backend and number of workers may differ from before.

        Args:
            snapshot: what `snapshot` returned, or the file that it wrote.
            trusted: whether pickles in a file may be loaded, which runs code.

        Returns:
            the last answer of every env, so that a policy knows what it has seen. Arrays from before are not valid any
            more. Results that waited to be received in the snapshot wait again.
        """
        self._check_usable()
        if not isinstance(snapshot, Snapshot):
            snapshot = Snapshot.load(snapshot, trusted)
        snapshot.check(self._about())
        check_fields(self._slab, self._obs_fields(), snapshot.fields)
        check_facts(snapshot.scheduler, snapshot.notes, self.num_envs)
        if len(snapshot.envs) != self.num_envs or len(snapshot.objects) != self.num_envs:
            raise CannotSnapshot("the snapshot is damaged: it has another number of envs than it says")
        deadline = Deadline.after(timeout)
        ids = np.arange(self.num_envs)
        self._scheduler.drop(ids, deadline)
        try:
            return self._go_back(snapshot, ids, deadline)
        except BaseException as error:
            # Some envs may be elsewhere in time than others: nothing here can be relied on any more.
            self._shut(1.0, PoolClosed(f"the pool was closed because a restore failed: {error}"))
            raise

    def _go_back(self, snapshot: Snapshot, ids: Ids, deadline: Deadline) -> Batch:
        loaded = self._scheduler.commands.command(
            ids, "load", lambda rows: ([snapshot.envs[row] for row in rows],), deadline
        )
        for env_id, value in enumerate(loaded):
            if isinstance(value, PackedError):
                raise value.unpack(env_id, int(self._workers.owner_of_lanes()[env_id]))
        slot = self.data.free_slot() or 0
        write_fields(self._slab, snapshot.fields, slot)
        for lane, objects in enumerate(snapshot.objects):
            if objects:
                self.data.keep_objects(lane, objects)
        facts = dict(snapshot.scheduler)
        self._first_seeds = list(facts.pop("first_seeds"))
        notes = notes_of(snapshot.notes, snapshot.objects, self._slab.array("requested"))
        self._scheduler.resume(facts, notes, slot)
        return self.data.batch(Ready(ids, 0, slot, {}))

    def _about(self) -> dict[str, Any]:
        return {
            "num_envs": self.num_envs,
            "observation space": str(self.single_observation_space),
            "action space": str(self.single_action_space),
            "autoreset": self.autoreset,
            "order": self.order,
        }

    def _obs_fields(self) -> list[str]:
        return [name for name in self._slab.layout.fields if name.startswith(("obs.", "final.", "present"))]

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
            raise error.unpack(env_id, int(self._workers.owner_of_lanes()[env_id]))

    def _shut(self, timeout: float | None, fault: ShoalError) -> list[tuple[int, Any]]:
        if self._fault is not None:
            return []
        self._fault = fault
        _open_pools.discard(self)
        self._slab.withdraw()
        self._scheduler.end(fault)
        errors = self._workers.dismiss(Deadline.after(timeout))
        self._slab.close()
        return errors

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fault", True) is None:
            self._shut(1.0, PoolClosed("the pool was garbage collected"))


def refuse_unknown_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError for what is no option of a pool."""
    known = inspect.signature(Pool.__init__).parameters
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(
            f"unknown option {', '.join(map(repr, unknown))}; what is meant for the env itself goes into "
            f"env_kwargs={{{unknown[0]!r}: ...}}"
        )


def _expected_batch(batch_size: Any, batch_envs: Any, envs: int) -> int:
    """How many envs a batch will have at most, before it is known how many lanes each has."""
    if batch_size is not None and batch_envs is not None:
        raise ValueError("batch_size and batch_envs say the same: give one of them")
    if batch_envs is not None:
        return whole_number("batch_envs", batch_envs, 1, envs)
    # A batch_size is checked when the number of lanes is known.
    return min(max(1, batch_size), envs) if isinstance(batch_size, int) else envs


def _batched_blocks(transport: Transport, env: Any, count: int, env_kwargs: Mapping[str, Any] | None) -> list[Any]:
    """For hosts that step their whole block as one: what makes it, for each host."""
    backend, workers = transport.local_backend, transport.local_workers
    sizes = [stop - start for start, stop in split(count, transport.num_workers)]
    return [functools.partial(build_batched, backend, env, size, env_kwargs, workers) for size in sizes]


def _check_far(backend: str, transport: Transport, on_error: str, step_timeout: Any) -> None:
    """Raise ValueError for limits that envs elsewhere cannot keep."""
    if transport.local_backend in BATCHED:
        _check_limits(transport.local_backend, on_error, None, None)
    if step_timeout is not None and on_error == "restart" and not transport.ends_hung_envs:
        raise ValueError(
            f'step_timeout with on_error="restart": backend="{backend}" cannot end an env that hangs in a rank; use '
            'backend_options={"local_backend": "processes"}, or on_error="raise"'
        )


def _check_limits(backend: str, on_error: str, step_timeout: Any, recycle_after: Any) -> None:
    """Raise ValueError for limits that this backend cannot keep."""
    if on_error == "restart" and backend in BATCHED:
        raise ValueError(f'on_error: backend="{backend}" steps all envs as one, of which none can be restarted alone')
    if step_timeout is not None and backend in ("serial", "hybrid", *BATCHED):
        raise ValueError(
            f'step_timeout: backend="{backend}" steps envs in this very thread, which cannot be timed out; use '
            '"processes" or "threads"'
        )
    if recycle_after is not None and backend in ("serial", "threads", *BATCHED, *REMOTE):
        raise ValueError(f'recycle_after is for worker processes, and backend="{backend}" has none')


def _close_all() -> None:
    for pool in list(_open_pools):
        pool._shut(1.0, PoolClosed("the interpreter is leaving"))


def _disown_all() -> None:
    """In a forked child: the pools are the parent's."""
    for pool in list(_open_pools):
        pool._fault = WrongProcess(
            f"this pool belongs to process {os.getppid()}, of which this one is a fork: make a pool here"
        )
        pool._workers.abandon()
    _open_pools.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)

"""The pool: many envs as one. What every dialect and wrapper stands on."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal import native
from shoal.batch import Batch
from shoal.compiled import pools
from shoal.engine import open_pools, snapshots
from shoal.engine.collector import concurrent_use
from shoal.errors import ConcurrentUse, PoolClosed, ShoalError, SlowEnvWarning
from shoal.observe.review import Review
from shoal.observe.stats import PoolStats, WorkerInfo
from shoal.observe.timeline import Recorder
from shoal.options import PoolOptions, refuse_unknown_options, signature_with_options
from shoal.planning import building
from shoal.rollout import RollingOut
from shoal.state.snapshot import Snapshot
from shoal.support.checks import (
    Options,
    OptionsForAll,
    Seed,
    number,
    refuse_pickling,
)
from shoal.support.deadline import CLOSE_TIMEOUT, NEVER, Deadline
from shoal.support.frames import caller_level

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from shoal.options import PoolKeywords

__all__ = ["Pool"]


class Pool(RollingOut):
    """Many envs as one. Each env is a lane, a row of the batches; an env with several agents has a lane for each.

        with shoal.Pool("CartPole-v1", num_envs=64, batch_size=32) as pool:
            pool.async_reset(seed=0)
            for _ in range(1000):
                batch = pool.recv()  # the first 32 that are ready
                pool.send((batch.obs[:, 2] > 0).astype(int), batch.env_id)

    `step` sends actions to all envs and waits for them; `send` and `recv` do the two halves for some of them.

    Args:
        env: a Gymnasium id or spec, a function or class that makes an env, or a list of such, one per env.
        num_envs: how many; left out when a list was given.
        **options: the fields of `shoal.options.PoolOptions`, which says what each of them does. How to run: backend,
            num_workers, isolate, plan. The env: env_kwargs, seed, autoreset, infos. Batches: batch_size, order. Faults:
            on_error, step_timeout, recycle_after, check_nan. Memory: copy, frames. All others are for rare cases.

    Attributes:
        num_envs (int): how many lanes there are.
        batch_size (int): how many of them `recv` waits for.
        single_observation_space (Space): of one env, or of one of its lanes.
        single_action_space (Space): the same for actions.
        observation_space (Space): of all lanes, batched as Gymnasium does.
        action_space (Space): the same for actions.
        autoreset (str): what happens after the end of an episode.
        options (PoolOptions): all options as given.
        plan (Plan): the backend and the number of workers, and why.
        specs (Any): the spaces once more, metadata, render mode and spec.
        lane_names (list[str] | None): the names of the agents of one env, one for each of its lanes; None where lanes
            have no names.
        lanes_per_env (int): how many neighbouring lanes are one env's; 0 where envs differ in that.
        data (Frames): reads the answers of lanes: for dialects that take just the fields that they need.
        turn (Turn): `with pool.turn:` keeps other threads out for several calls: they get ConcurrentUse. Each call that
            uses the envs takes it; `close` does not, and may come from any thread.

    Raises:
        BadEnv: `env` cannot be made into envs.
        ValueError, TypeError: an option is not what it may be; the text says what is.
        EnvError: an env's constructor raised; all that was started is undone.
        SpaceMismatch: the envs have different spaces.
        StartError: workers could not be started.
        StepTimeout: the envs were not built within `start_timeout`.
    """

    def __init__(self, env: Any, num_envs: int | None = None, **options: Unpack[PoolKeywords]):
        self._fault: ShoalError | None = PoolClosed("the pool was never started")
        self.turn = native.Turn(concurrent_use)
        super().__init__()
        refuse_unknown_options(options)
        self.options = PoolOptions(**options)
        built = building.build(env, num_envs, self.options, self._break)
        self.plan, shape, self._scheduler, self._first_seeds = built
        # What `close` needs comes first: an interrupt leaves a pool that can be closed.
        table = self._scheduler.table
        self._workers, self._slab = table.workers, table.slab
        self._fault = None
        self._shape, self.data, self.specs = shape, table.answers, shape.specs
        self.num_envs, self.batch_size, self.frames = shape.lanes, shape.batch_size, shape.frames
        self.autoreset, self.lane_names, self.lanes_per_env = shape.autoreset, shape.lane_names, shape.lanes_per_env
        self.single_observation_space = self.specs.single_observation_space
        self.single_action_space = self.specs.single_action_space
        self.observation_space, self.action_space = self.specs.observation_space, self.specs.action_space
        self.order, self.copy, self.on_error = self.options.order, self.options.copy, self.options.on_error
        self.step_timeout = self.options.step_timeout
        self._takes_seeds = bool((self.specs.metadata or {}).get("takes_seeds", True))
        if not (self.options.isolate or self.options.survives_envs):
            blocks = [list(worker.env_ids) for worker in self._workers]
            Review(self.data, partial(PoolStats.read, self._slab, self.plan.backend, self.batch_size, blocks))
        open_pools.add(self, last=self._workers.backend.closes_last)

    # ---- what it is ------------------------------------------------------------------------------------------

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
        return str(self._fault or "")

    @property
    def local_envs(self) -> list[Any]:
        """The envs in the caller's process: all under serial, its block under hybrid, a batched backend's one env."""
        return [] if self._workers.inline is None else self._workers.inline.envs

    def stats(self) -> PoolStats:
        """Counts since the start, and where the time went; print it. For an interval, subtract an earlier one."""
        self._check_usable()
        blocks = [list(worker.env_ids) for worker in self._workers]
        return PoolStats.read(self._slab, self.plan.backend, self.batch_size, blocks)

    def recorder(self) -> Recorder:
        """Return what notes which env steps when, batch by batch; `shoal profile --html` draws it."""
        self._check_usable()
        return Recorder(self._slab, [list(worker.env_ids) for worker in self._workers])

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.plan.backend}, {self.plan.num_workers} workers"
        return f"Pool({self.num_envs} envs, {state})"

    # ---- stepping --------------------------------------------------------------------------------------------

    def send(self, actions: Any, env_ids: Any = None) -> None:
        """Start a step of these envs (None: all), and return at once.

        Args:
            actions: a batch of `single_action_space`, one row for each env id, in their order.
            env_ids: the envs, each once; None for all.

        Raises:
            BadAction: nothing was sent.
            CallPending: one of the envs is still busy; nothing was sent.
        """
        with self.turn:
            if self._fault is not None:  # as in `step`
                raise self._fault
            self._scheduler.send(actions, env_ids)

    def recv(self, timeout: float | None = None, min_batch: int | None = None) -> Batch:
        """Wait for the next `batch_size` envs that are done.

        Args:
            timeout: seconds to wait at most; None for as long as it takes.
            min_batch: how many will do when the timeout is over, or when fewer than `batch_size` were sent to.

        Raises:
            NothingPending: fewer envs than that were sent to.
            StepTimeout: they were not done in `timeout` seconds, or one took longer than `step_timeout`; recv may be
                called again.
            EnvError: an env raised; the others of the batch come with the next recv (which, for a full batch, waits
                for the env to be reset and sent to as well).
            WorkerDied: a worker is gone; the pool is closed (with on_error="restart": its budget is spent).
        """
        with self.turn:
            if timeout is not None or min_batch is not None:
                return self.data.batch(self.wait(timeout, min_batch))
            if self._fault is not None:  # as in `wait`, of which a call would cost every batch
                raise self._fault
            return self.data.batch(self._scheduler.wait_next(self.batch_size, NEVER))

    def step(self, actions: Any, timeout: float | None = None) -> Batch:
        """Step all envs and wait for them. After an EnvError, the other envs' results of this step are dropped.

        Args:
            actions: a batch of `single_action_space`, one row for each env.
            timeout: seconds to wait at most; None for as long as it takes.

        Raises:
            BadAction: an action does not fit; nothing was sent.
            CallPending: an env is still busy with an earlier `send`.
            ResetNeeded: an env must be reset first.
            StepTimeout: the envs were not done in time; their answers are dropped by the next reset.
            EnvError: an env raised.
            WorkerDied: a worker is gone; the pool is closed.
        """
        with self.turn:
            if self._fault is not None:  # as in `exchange`, of which a call would cost every step
                raise self._fault
            ready = self._scheduler.exchange(actions, NEVER if timeout is None else Deadline.after(timeout))
            return self.data.batch(ready)

    def prepare(self, within: float = 0.002) -> None:
        """Wake the workers for a step that follows soon: call it shortly before the actions are ready.

        Workers fall asleep while the caller computes for longer than about a millisecond. Those that are woken
        beforehand begin a step at once. It costs each worker a core for the time in between.

        Args:
            within: how many seconds workers look for the step before they sleep again, at most 0.1.
        """
        with self.turn:
            self._check_usable()
            self._scheduler.table.core.prepare(int(number("within", within, 0.0, 0.1) * 1e9))

    # ---- reset -----------------------------------------------------------------------------------------------

    def reset(
        self,
        env_ids: Any = None,
        *,
        seed: Seed = None,
        options: Options | OptionsForAll = None,
        timeout: float | None = None,
    ) -> Batch:
        """Reset envs (None: all) and wait for them. A step of theirs that is pending is waited for and dropped.

        Args:
            env_ids: the envs, each once; None for all.
            seed: an int gives env i `seed + i`; a list gives each of the env ids its own.
            options: handed to every env's reset; a list gives each of the env ids its own.
            timeout: seconds to wait at most; None for as long as it takes.

        Raises:
            EnvError: an env raised in its reset.
            StepTimeout: the envs were not done in time.
            WorkerDied: a worker is gone; the pool is closed.
        """
        with self.turn:
            return self.data.batch(self.restart(env_ids, seed, options, timeout))

    def async_reset(self, env_ids: Any = None, *, seed: Seed = None, options: Options | OptionsForAll = None) -> None:
        """Start a reset of envs (None: all); their first observations come with recv.

        Args:
            env_ids: the envs, each once; None for all.
            seed: as for `reset`.
            options: as for `reset`.
        """
        with self.turn:
            self._start_reset(env_ids, seed, options, NEVER)

    # ---- snapshots -------------------------------------------------------------------------------------------

    def snapshot(self, path: str | os.PathLike[str] | None = None, timeout: float | None = None) -> Snapshot:
        """The state of all envs, random generators included, and of the pool; `restore` goes on from there.

        Envs are saved by their own `get_state()` and `set_state(state)`, by their attributes, or, where these are no
        plain data, by pickling them: `Snapshot.pickled` says which. What an env keeps elsewhere is not saved: variables
        of modules and classes, the global generators of `random` and `numpy.random`, files, servers.
        Steps that are under way are waited for first; their results stay to be received, here and after a restore.

        Args:
            path: a file to write it to as well.
            timeout: seconds to wait at most for steps that are under way.

        Raises:
            CannotSnapshot: naming the envs that cannot be saved, and why.
        """
        with self.turn:
            self._check_usable()
            found = snapshots.take(
                self._scheduler, self._shape.identity(self.order), self._first_seeds, Deadline.after(timeout)
            )
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
            timeout: seconds to wait at most; None for as long as it takes.

        Returns:
            the last answer of every env, so that a policy knows what it has seen. Arrays from before are not valid any
            more. Results that waited to be received in the snapshot wait again.

        Raises:
            BadSnapshot: the file is damaged, does not fit this pool, or holds pickles that are not trusted; nothing was
                changed.
            EnvError: an env refused its state; the pool is closed.
        """
        self._check_usable()
        if not isinstance(snapshot, Snapshot):
            snapshot = Snapshot.load(snapshot, trusted)
        snapshot.check(self._shape.identity(self.order))
        snapshots.check(self._scheduler, snapshot)
        deadline = Deadline.after(timeout)
        with self.turn:
            self._scheduler.drop(np.arange(self.num_envs), deadline)
            try:
                ready, self._first_seeds = snapshots.restore(self._scheduler, snapshot, deadline)
            except BaseException as error:
                # Some envs may be elsewhere in time than others: nothing here can be relied on any more.
                self.shut(1.0, PoolClosed(f"the pool was closed because a restore failed: {error}"))
                raise
            return self.data.batch(ready)

    # ---- end -------------------------------------------------------------------------------------------------

    def _break(self, error: ShoalError) -> ShoalError:
        """Close after a worker's death; later calls say why."""
        self.shut(1.0, PoolClosed(f"the pool was closed because {error}"))
        return error

    def close(self, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """Close all envs and end all workers: asks, and after `timeout` seconds forces. May be called again.

        Warns of envs that had to be forced: a SlowEnvWarning says which they are, and where they hang.

        Args:
            timeout: seconds until workers that do not leave are ended by force.

        Raises:
            EnvError: an env raised in its close; everything is closed all the same.
        """
        was_open = self._fault is None
        errors = self.shut(timeout, PoolClosed("the pool is closed: make a new one"))
        if was_open and (hung := self._workers.hung()):
            text = f"close has waited {timeout:g} s for envs that hang, and gives them up\n"
            warnings.warn(text + "\n".join(hung), SlowEnvWarning, stacklevel=caller_level())
        if errors:
            env_id, error = errors[0]
            raise error.unpack(env_id, int(self._workers.owner_of_lanes()[env_id]))

    def shut(self, timeout: float | None, fault: ShoalError) -> list[tuple[int, Any]]:
        """Close everything, and let later calls raise this; the errors of envs' close, by env id.

        Args:
            timeout: as for `close`.
            fault: what later calls raise.
        """
        if self._fault is not None:
            return []
        self._fault = fault
        open_pools.discard(self)
        self._slab.withdraw()
        self._scheduler.end(fault)
        errors = self._workers.close(Deadline.after(timeout), self._until_alone)
        self._slab.close()
        return errors

    __reduce__ = refuse_pickling

    def _until_alone(self, deadline: Deadline) -> None:
        """Wait until the thread that has the turn leaves, which it does soon: those that come now are refused."""
        while not deadline.passed:
            with contextlib.suppress(ConcurrentUse), self.turn:
                return
            time.sleep(0.002)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def disown(self, why: ShoalError) -> None:
        """In a forked child, which has no workers: the pool is the parent's."""
        self._fault = why
        self._workers.abandon()

    def __del__(self) -> None:
        if getattr(self, "_fault", True) is None:
            self.shut(1.0, PoolClosed("the pool was garbage collected"))


Pool.__init__.__signature__ = signature_with_options(Pool.__init__)  # type: ignore[attr-defined]


pools.use(Pool)

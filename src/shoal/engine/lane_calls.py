"""The calls of a pool that give lanes rather than batches: what dialects are made of."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shoal.engine.env_commands import EnvCommands
from shoal.errors import EnvError, ShoalError
from shoal.memory.answers import Ready
from shoal.options import PoolOptions
from shoal.support.checks import (
    Ids,
    Options,
    OptionsForAll,
    Seed,
    spread_options,
    spread_seed,
    whole_number,
)
from shoal.support.deadline import NEVER, Deadline
from shoal.support.frames import caller_level


class LaneCalls(EnvCommands):
    """The part of a pool that steps and resets lanes, and says which have answered; `pool.data` reads the answers."""

    batch_size: int
    options: PoolOptions
    _first_seeds: list[int | None]
    _takes_seeds: bool

    @property
    def pending(self) -> Ids:
        """The envs that were sent to and not yet received from."""
        return self._scheduler.pending

    @property
    def done(self) -> Ids:
        """Those of the pending envs that have answered, ascending: a wait for them would return at once."""
        return self._scheduler.done

    # ---- stepping --------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None, min_batch: int | None = None) -> Ready:
        """Like recv, but gives the lanes only: for dialects that take just the fields they need from `data`."""
        with self.turn:
            self._check_usable()
            least = None if min_batch is None else whole_number("min_batch", min_batch, 1, self.batch_size)
            return self._scheduler.wait_next(self.batch_size, Deadline.after(timeout), least)

    def wait_any(self, least: int = 1, timeout: float | None = None) -> Ready:
        """Wait until at least so many envs are done, and take all that are: for dialects, as `wait` is.

        With `least=0` it does not wait, and may give no lanes.
        """
        with self.turn:
            self._check_usable()
            return self._scheduler.wait_any(whole_number("least", least, 0, self.num_envs), Deadline.after(timeout))

    def exchange(self, actions: Any, timeout: float | None = None, env_ids: Ids | None = None) -> Ready:
        """Like step, but gives the lanes only: for dialects that take just the fields they need from `data`.

        Args:
            env_ids: int64, ascending: step just these.
        """
        with self.turn:
            if self._fault is not None:
                raise self._fault
            deadline = NEVER if timeout is None else Deadline.after(timeout)
            if env_ids is None:
                return self._scheduler.exchange(actions, deadline)
            self._scheduler.send(actions, env_ids)
            return self._wait_or_drop(self._scheduler.wait_for, env_ids, deadline)

    @property
    def narrow_rollouts(self) -> bool:
        """Say whether rewards, returns and lengths of rollouts have 32 bits, as in single precision."""
        workers = self._scheduler.table.workers
        return workers.backend.narrow_rollouts(workers.inline)

    def roll_at_once(self, record: Any, policy: Any, params: Sequence[Any], rngs: Any) -> bool:
        """Fill the record of a rollout without Python; False where that cannot be done."""
        with self.turn:
            return self._scheduler.roll_at_once(record, policy, params, rngs)

    # ---- reset -----------------------------------------------------------------------------------------------

    def restart(
        self, env_ids: Any, seed: Seed = None, options: Options | OptionsForAll = None, timeout: float | None = None
    ) -> Ready:
        """Like reset, but gives the lanes only: for dialects that take just the fields they need from `data`."""
        deadline = Deadline.after(timeout)
        with self.turn:
            ids = np.sort(self._start_reset(env_ids, seed, options, deadline))
            return self._wait_or_drop(self._scheduler.wait_for, ids, deadline)

    def begin(self, env_ids: Ids | None = None) -> Ready:
        """Reset envs (ascending; None: all) without arguments, and wait for them; gives the lanes only, for dialects.

        Where each env has one lane, this is quicker than `reset`, and the env's own `reset` gets no argument at all.
        """
        with self.turn:
            self._check_usable()
            ids = np.arange(self.num_envs) if env_ids is None else env_ids
            if self.options.seed is not None:
                self._start_reset(ids, None, None, NEVER)
                return self._wait_or_drop(self._scheduler.wait_for, ids, NEVER)
            return self._wait_or_drop(self._scheduler.begin, ids, NEVER)

    def _wait_or_drop(self, wait: Callable[[Ids, Deadline], Ready], ids: Ids, deadline: Deadline) -> Ready:
        """Wait for these envs. After an env's error, the answers of the others are dropped."""
        try:
            return wait(ids, deadline)
        except EnvError:
            with contextlib.suppress(ShoalError):  # the env's own error is what matters
                self._scheduler.drop(ids, deadline)
            raise

    def _start_reset(self, env_ids: Any, seed: Seed, options: Options | OptionsForAll, deadline: Deadline) -> Ids:
        self._check_usable()
        ids = self._ids(env_ids)
        seeds = spread_seed(seed, ids)
        seeds = [self._first_seeds[lane] if one is None else one for one, lane in zip(seeds, ids.tolist(), strict=True)]
        if not self._takes_seeds and any(one is not None for one in seeds):
            self._takes_seeds = True  # said once
            text = "seeds change nothing: the envs have no `seed` method, and neither they nor their tasks keep one of"
            warnings.warn(f"{text} NumPy's generators", UserWarning, stacklevel=caller_level())
        self._scheduler.reset(ids, seeds, spread_options(options, len(ids)), deadline)
        for lane in ids.tolist():
            self._first_seeds[lane] = None
        return ids

    def wait_reset(self, env_ids: Any = None, timeout: float | None = None) -> Ready:
        """Wait for exactly these envs, which `async_reset` was called for."""
        with self.turn:
            self._check_usable()
            return self._scheduler.wait_for(np.sort(self._ids(env_ids)), Deadline.after(timeout))

    def drop_pending(self, env_ids: Any = None, timeout: float | None = None) -> None:
        """Wait for those of the envs (None: all) that are busy, and forget what they answer."""
        with self.turn:
            self._check_usable()
            self._scheduler.drop(self._ids(env_ids), Deadline.after(timeout))

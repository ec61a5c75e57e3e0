"""Who takes part in `puffer.py`: PufferLib and Shoal, each in a loop that receives, reads and sends.

In a module of its own: the process of a contender imports it by name.
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable
from typing import Any

from shoal.cli.contenders import Runner, Tally
from shoal.cli.work import Work
from shoal.support.usage import Skip

TEAM = "team:Team"  # the env with many agents


class SendAndReceive(Runner):
    """Receives a batch, reads it, sends the next actions; a row of the batch counts as a step."""

    rows: int  # of a batch
    receive: Callable[[], Any]  # -> observations
    send: Callable[[Any], None]

    def run(self, seconds: float) -> Tally:
        """Answer batches as they come; what is under way at the end stays under way."""
        receive, send, clock = self.receive, self.send, time.perf_counter
        batches = 0
        start = now = clock()
        for actions in itertools.cycle(self.actions):
            observations = receive()
            observations.reshape(self.rows, -1)[:, :16].sum()
            send(actions)
            batches += 1
            now = clock()
            if now - start >= seconds:
                break
        return Tally(batches * self.rows, now - start)

    def prepare(self, rows: int) -> None:
        """Sample actions for batches of so many rows."""
        self.rows, self.actions = rows, self.work.actions(rows)


class InPuffersWords(SendAndReceive):
    """Envs that speak as PufferLib's do."""

    def use(self, envs: Any) -> None:
        """Take these."""
        self.envs = envs
        self.prepare(envs.agents_per_batch)
        self.receive, self.send = lambda: envs.recv()[0], envs.send

    def reset(self) -> None:
        """Reset all envs and answer the first batch."""
        self.envs.async_reset(self.work.seed)
        self.run(0.0)

    def close(self) -> None:
        """End the workers."""
        self.envs.close()


class PufferLib(InPuffersWords):
    """PufferLib's Multiprocessing, whose workers and caller wait by looking at a flag without pause."""

    requires = "pufferlib"
    spins_when_idle = True

    def __init__(self, work: Work, **options: Any) -> None:
        super().__init__(work)
        if work.num_envs % options["num_workers"]:
            raise Skip(f"{work.num_envs} envs cannot be divided among {options['num_workers']} workers")
        vector = importlib.import_module("pufferlib.vector")
        emulation = importlib.import_module("pufferlib.emulation")
        envs = vector.make(
            emulation.PettingZooPufferEnv if work.env == TEAM else emulation.GymnasiumPufferEnv,
            env_kwargs={"env_creator": work.env_fn()},
            backend=vector.Multiprocessing,
            num_envs=work.num_envs,
            overwork=True,  # it refuses more workers than physical cores unless told that this is meant
            **options,
        )
        self.use(envs)


class ShoalPool(SendAndReceive):
    """Shoal's own interface."""

    def __init__(self, work: Work, **options: Any) -> None:
        super().__init__(work)
        import shoal

        self.pool = shoal.Pool(work.env_fn(), work.num_envs, **options)
        self.send = lambda actions: self.pool.send(actions, self.ids)
        self.receive = self._receive

    def _receive(self) -> Any:
        batch = self.pool.recv()
        self.ids = batch.env_id
        return batch.obs

    def reset(self) -> None:
        """Reset all envs and answer the first batch."""
        self.pool.async_reset(seed=self.work.seed)
        batch = self.pool.recv()
        self.prepare(len(batch.reward))
        self.pool.send(self.actions[0], batch.env_id)

    def note(self) -> str:
        """Say what was chosen and why."""
        return str(self.pool.plan) if self.pool.plan.measured else ""

    def close(self) -> None:
        """Close the pool."""
        self.pool.close()


class ShoalPuffer(InPuffersWords):
    """Shoal in PufferLib's words: what a user gets who changes the import."""

    def __init__(self, work: Work, **options: Any) -> None:
        super().__init__(work)
        puffer = importlib.import_module("shoal.dialects.puffer")
        envs = puffer.Multiprocessing(work.env_fn(), num_envs=work.num_envs, **options)
        self.use(envs)

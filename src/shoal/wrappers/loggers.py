"""Episodes as curves: transforms that log means of episodes, to TensorBoard, Weights & Biases or a log of your own."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium import Space

from shoal.memory.messages import RESTART_INFO
from shoal.wrappers.base import Bound, Rows, Transform
from shoal.wrappers.monitor import MonitorEpisodes

# Imported by name when a logger is made: `import shoal.wrappers` must import no framework.
SUMMARY_WRITERS = ("torch.utils.tensorboard", "tensorboardX")
WANDB = "wandb"


class EpisodeLogger(Transform):
    """Base class of loggers: calls `write(values, step)` with means over the episodes that ended since the last call.

    The values are "return" and "length" (means over those episodes), "episodes" and "restarts" (all so far), and
    "steps_per_second" (of all envs together, since the last call); `step` counts the steps of all envs. Batches pass
    unchanged.

    Args:
        every_seconds, every_steps: the least distance of two calls; 0 and 0: a call for each batch in which an episode
            ends. The rest is written when the envs are closed.
        prefix: of the values' names: "shoal" gives "shoal/return".

    Attributes:
        global_step: steps of all envs so far. Set it to continue an earlier run.
    """

    def __init__(self, every_seconds: float = 1.0, every_steps: int = 0, prefix: str = "shoal"):
        if not every_seconds >= 0 or not every_steps >= 0:
            raise ValueError(
                f"every_seconds, every_steps: expected 0 or more, found {every_seconds!r}, {every_steps!r}"
            )
        self.every_seconds, self.every_steps, self.prefix = every_seconds, every_steps, prefix
        self.global_step = 0

    def bind(self, bound: Bound) -> Space[Any]:
        space = super().bind(bound)
        self._monitor = MonitorEpisodes(keep=sys.maxsize)  # each entry of the log clears it
        self._monitor.bind(bound)
        self._restarts = np.zeros(bound.num_envs, np.int64)
        self._logged_at: float | None = None
        self._steps_since = 0
        return space

    @property
    def episodes(self) -> int:
        """How many episodes have ended."""
        return self._monitor.episode_count

    @property
    def restarts(self) -> int:
        """How many envs were lost and built anew, as their infos say."""
        return int(self._restarts.sum())

    def apply(self, rows: Rows) -> None:
        """Count, and write if it is time."""
        if self._logged_at is None:
            self._logged_at = time.perf_counter()
        steps = int(np.count_nonzero(rows.stepped))
        self.global_step += steps
        self._steps_since += steps
        for row, info in rows.infos.items():
            if RESTART_INFO in info:
                # The env counts itself, as transforms do not see all infos.
                self._restarts[rows.ids[row]] = info[RESTART_INFO]["count"]
        self._monitor.apply(replace(rows, infos={}))  # so that it does not change what the caller gets
        self._log(self.every_seconds, self.every_steps)

    def _log(self, seconds: float, steps: int) -> None:
        """Write, if an episode has ended and so many seconds and steps have passed."""
        returns, lengths = self._monitor.last_returns, self._monitor.last_lengths
        if not returns or self._logged_at is None or self._steps_since < steps:
            return
        now = time.perf_counter()
        if now - self._logged_at < seconds:
            return
        values = {
            "return": float(np.mean(returns)),
            "length": float(np.mean(lengths)),
            "episodes": self.episodes,
            "steps_per_second": self._steps_since / max(now - self._logged_at, 1e-9),
            "restarts": self.restarts,
        }
        for kept in (returns, lengths):
            kept.clear()
        self._logged_at, self._steps_since = now, 0
        self.write({f"{self.prefix}/{name}": value for name, value in values.items()}, self.global_step)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log the values; derived classes do it."""
        raise NotImplementedError

    def close(self) -> None:
        """Write the rest."""
        if hasattr(self, "bound"):
            self._log(0.0, 0)


class TensorBoardLogger(EpisodeLogger):
    """Logs episodes to TensorBoard; EpisodeLogger says what is logged.

    Args:
        folder_or_writer: a folder for a writer of torch or tensorboardX, which is closed with the envs; or any object
            with `add_scalar(tag, value, step)`, which stays open.

    Raises:
        ImportError: a folder was given, and neither is installed.
    """

    def __init__(self, folder_or_writer: Any, every_seconds: float = 1.0, every_steps: int = 0, prefix: str = "shoal"):
        super().__init__(every_seconds, every_steps, prefix)
        self._ours = isinstance(folder_or_writer, str | os.PathLike)
        if not self._ours and not callable(getattr(folder_or_writer, "add_scalar", None)):
            raise TypeError(f"expected a folder or an object with add_scalar, found {folder_or_writer!r}")
        self.writer = _summary_writer(os.fspath(folder_or_writer)) if self._ours else folder_or_writer

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._ours:
                self.writer.close()


class WandbLogger(EpisodeLogger):
    """Logs episodes to Weights & Biases; EpisodeLogger says what is logged.

    W&B takes no step before the last one: log other values to the same run with `step=logger.global_step`.

    Args:
        run: a run, or any object with `log(values, step=...)`, which stays open. None: the active run, or one that is
            made now and finished with the envs.
        **init: for `wandb.init`, which is called if there are any, even if a run is active.

    Raises:
        ImportError: no run was given, and wandb is not installed.
    """

    def __init__(
        self, run: Any = None, every_seconds: float = 1.0, every_steps: int = 0, prefix: str = "shoal", **init: Any
    ):
        super().__init__(every_seconds, every_steps, prefix)
        if run is not None and init:
            raise TypeError(f"{', '.join(init)}: for a run that is made, and one was given")
        run, self._ours = (run, False) if run is not None else _wandb_run(init)
        if not callable(getattr(run, "log", None)):
            raise TypeError(f"expected a run or an object with log, found {run!r}")
        self.run = run

    def write(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._ours:
                self._ours = False  # to finish a run twice is an error
                self.run.finish()


def _summary_writer(folder: str) -> Any:
    for name in SUMMARY_WRITERS:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name).SummaryWriter(folder)
    raise ImportError(
        "TensorBoardLogger: to write to a folder, pip install tensorboardX, or torch and tensorboard; or give it an "
        "object with add_scalar(tag, value, step)"
    )


def _wandb_run(init: Mapping[str, Any]) -> tuple[Any, bool]:
    """A run, and whether it was made here."""
    try:
        wandb = importlib.import_module(WANDB)
    except ImportError as error:
        raise ImportError(
            "WandbLogger: pip install wandb, or give it a run, which is any object with log(values, step=...)"
        ) from error
    active = wandb.run
    run = active if active is not None and not init else wandb.init(**init)
    return run, run is not active  # init may give the active one as well

"""Episodes as they end: in the infos, in CSV files that Stable-Baselines' tools read, and as curves in a log.

Monitor is for one env, MonitorEpisodes for all envs of a vector env. Loggers write means of episodes to TensorBoard,
Weights & Biases or a log of your own.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space

from shoal.memory.messages import RESTART_INFO
from shoal.worker.measurement import MEASURING
from shoal.wrappers.base import Bound, Rows, Transform

EXTENSION = "monitor.csv"
# Imported by name when a logger is made: `import shoal.wrappers` must import no framework.
SUMMARY_WRITERS = ("torch.utils.tensorboard", "tensorboardX")
WANDB = "wandb"


class ResultsWriter:
    """A CSV file of episodes: a line of JSON about the run, then r (return), l (length), t (seconds) and extra columns.

    Args:
        filename: the extension "monitor.csv" is added; in a folder, the file has that name.
        header: for the line of JSON.
        extra_keys: further columns.
        override_existing: overwrite an existing file, rather than append to it.
        run: append in any case to a file of this run: an env that was lost and built anew must not overwrite what it
            has written before.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str],
        header: dict[str, Any] | None = None,
        extra_keys: Sequence[str] = (),
        override_existing: bool = True,
        run: str | None = None,
    ):
        name = os.fspath(filename)
        if not name.endswith(EXTENSION):
            name = os.path.join(name, EXTENSION) if os.path.isdir(name) else f"{name}.{EXTENSION}"
        self.filename = os.path.realpath(name)
        Path(self.filename).parent.mkdir(parents=True, exist_ok=True)
        same_run = run is not None and _run_of(self.filename) == run
        new = not os.path.exists(self.filename) or (override_existing and not same_run)
        self.file_handler = open(self.filename, "w" if new else "a", newline="\n")  # noqa: SIM115
        self._writer = csv.DictWriter(self.file_handler, ("r", "l", "t", *extra_keys))
        if new:
            about = {**(header or {}), **({} if run is None else {"run": run})}
            self.file_handler.write(f"#{json.dumps(about)}\n")
            self._writer.writeheader()
        self.file_handler.flush()

    def write_row(self, episode: dict[str, Any]) -> None:
        """Write one episode, and flush, so that it is not lost if the process dies."""
        self._writer.writerow(episode)
        self.file_handler.flush()

    def close(self) -> None:
        self.file_handler.close()


def _run_of(filename: str) -> Any:
    """The run that a file belongs to; None for none, or if there is no such file."""
    try:
        with open(filename) as file:
            return json.loads(file.readline()[1:]).get("run")
    except (OSError, ValueError, AttributeError):
        return None


class Monitor(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Sums up the episodes of one env: `info["episode"]` at each end, and a line in a CSV file.

    Args:
        filename: of the CSV file, None for none.
        allow_early_resets: whether reset may be called before an episode is over.
        reset_keywords: arguments that reset must be given; they become columns.
        info_keywords: entries of the last info; they become columns.
        override_existing, run: see ResultsWriter.
    """

    EXT = EXTENSION
    # Classes that it counts as, for code that asks whether an env is wrapped in its own Monitor.
    also_known_as = ("stable_baselines3.common.monitor.Monitor", "baselines.bench.monitor.Monitor")

    def __init__(
        self,
        env: Any,
        filename: str | os.PathLike[str] | None = None,
        allow_early_resets: bool = True,
        reset_keywords: Sequence[str] = (),
        info_keywords: Sequence[str] = (),
        override_existing: bool = True,
        run: str | None = None,
    ):
        super().__init__(env)
        self.t_start = time.time()
        self.allow_early_resets = allow_early_resets
        self.reset_keywords, self.info_keywords = tuple(reset_keywords), tuple(info_keywords)
        self.results_writer: ResultsWriter | None = None
        if filename is not None and not os.environ.get(MEASURING):
            header = {"t_start": self.t_start, "env_id": getattr(getattr(env, "spec", None), "id", str(None))}
            extra = (*self.reset_keywords, *self.info_keywords)
            self.results_writer = ResultsWriter(filename, header, extra, override_existing, run)
        self.rewards: list[float] = []
        self.needs_reset = True
        self.total_steps = 0
        self.episode_returns: list[float] = []
        self.episode_lengths: list[int] = []
        self.episode_times: list[float] = []
        self.current_reset_info: dict[str, Any] = {}

    def reset(self, **kwargs: Any) -> Any:
        """Begin an episode; as the env's own reset.

        Raises:
            RuntimeError: the running episode is not over, and early resets are not allowed.
            ValueError: one of `reset_keywords` was not given.
        """
        if not self.allow_early_resets and not self.needs_reset:
            raise RuntimeError(
                "the env was reset before its episode was over: allow that by Monitor(..., allow_early_resets=True)"
            )
        for key in self.reset_keywords:
            value = kwargs.get(key)
            if value is None:
                raise ValueError(f"reset must be given {key!r}, which is among Monitor's reset_keywords")
            self.current_reset_info[key] = value
        self.rewards, self.needs_reset = [], False
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        """Step the env; at the end of an episode the info has its return, length and time.

        Raises:
            RuntimeError: the episode is over: reset first.
        """
        if self.needs_reset:
            raise RuntimeError("the episode is over: reset the env before its next step")
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.rewards.append(float(reward))
        self.total_steps += 1
        if terminated or truncated:
            self.needs_reset = True
            info["episode"] = self._summary(info)
        return observation, reward, terminated, truncated, info

    def _summary(self, info: dict[str, Any]) -> dict[str, Any]:
        total, length, seconds = sum(self.rewards), len(self.rewards), time.time() - self.t_start
        episode = {"r": round(total, 6), "l": length, "t": round(seconds, 6)}
        episode.update((key, info[key]) for key in self.info_keywords)
        self.episode_returns.append(total)
        self.episode_lengths.append(length)
        self.episode_times.append(seconds)
        episode.update(self.current_reset_info)
        if self.results_writer is not None:
            self.results_writer.write_row(episode)
        return episode

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self.results_writer is not None:
                self.results_writer.close()

    def get_total_steps(self) -> int:
        """Steps so far."""
        return self.total_steps

    def get_episode_rewards(self) -> list[float]:
        """Returns of all episodes."""
        return self.episode_returns

    def get_episode_lengths(self) -> list[int]:
        """Lengths of all episodes."""
        return self.episode_lengths

    def get_episode_times(self) -> list[float]:
        """Seconds from the start to the end of each episode."""
        return self.episode_times


class MonitorEpisodes(Transform):
    """Sums up the episodes of all envs: `info["episode"]` = {"r", "l", "t"} at each end, and a line in a CSV file.

    Args:
        filename: of the CSV file, None for none.
        info_keywords: entries of the last info; they become columns.
        keep: how many of the last episodes to keep in `last_returns` and `last_lengths`.
        env_id: for the file's first line.
    """

    def __init__(
        self,
        filename: str | os.PathLike[str] | None = None,
        info_keywords: Sequence[str] = (),
        keep: int = 100,
        env_id: str | None = None,
    ):
        self.t_start = time.time()
        self.info_keywords = tuple(info_keywords)
        self.last_returns: deque[float] = deque(maxlen=keep)
        self.last_lengths: deque[int] = deque(maxlen=keep)
        self.episode_count = 0
        self.results_writer: ResultsWriter | None = None
        if filename is not None:
            header = {"t_start": self.t_start, "env_id": str(env_id)}
            self.results_writer = ResultsWriter(filename, header, self.info_keywords)

    def bind(self, bound: Bound) -> Space[Any]:
        space = super().bind(bound)
        self.episode_returns = np.zeros(bound.num_envs)
        self.episode_lengths = np.zeros(bound.num_envs, np.int64)
        return space

    def apply(self, rows: Rows) -> None:
        """Add up rewards and lengths, and report the episodes that have ended."""
        ids: Any = slice(None) if rows.whole else rows.ids
        self.episode_returns[ids] += rows.reward
        self.episode_lengths[ids] += 1
        for row in np.flatnonzero(rows.done).tolist():
            rows.infos.setdefault(row, {})["episode"] = self._summary(int(rows.ids[row]), rows.infos.get(row, {}))
        over = rows.ids[rows.done | ~rows.stepped]
        self.episode_returns[over] = self.episode_lengths[over] = 0

    def _sums(self, env_id: int) -> tuple[Any, Any]:
        """Return and length of the episode that has ended, as its summary says them."""
        return round(float(self.episode_returns[env_id]), 6), int(self.episode_lengths[env_id])

    def _summary(self, env_id: int, info: dict[str, Any]) -> dict[str, Any]:
        total, length = self._sums(env_id)
        episode = {"r": total, "l": length, "t": round(time.time() - self.t_start, 6)}
        for key in self.info_keywords:
            if key not in info:
                raise KeyError(f"info_keywords: the last info of env {env_id} has no {key!r}, only {sorted(info)}")
            episode[key] = info[key]
        self.last_returns.append(float(self.episode_returns[env_id]))
        self.last_lengths.append(int(length))
        self.episode_count += 1
        if self.results_writer is not None:
            self.results_writer.write_row(episode)
        return episode

    def close(self) -> None:
        if self.results_writer is not None:
            self.results_writer.close()


# ---- curves --------------------------------------------------------------------------------------------------


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

    Raises:
        ValueError: `every_seconds` or `every_steps` is below 0.
    """

    def __init__(self, every_seconds: float = 1.0, every_steps: int = 0, prefix: str = "shoal"):
        if not every_seconds >= 0 or not every_steps >= 0:
            raise ValueError(
                f"every_seconds, every_steps: expected 0 or more, found {every_seconds!r}, {every_steps!r}"
            )
        self.every_seconds, self.every_steps, self.prefix = every_seconds, every_steps, prefix
        self.global_step = 0
        self._close_log: Callable[[], None] | None = None

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
        returns.clear()
        lengths.clear()
        self._logged_at, self._steps_since = now, 0
        self.write({f"{self.prefix}/{name}": value for name, value in values.items()}, self.global_step)

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log the values of this step, counted over all envs; derived classes do it."""
        raise NotImplementedError

    def close(self) -> None:
        """Write the rest, and close the log if it was opened here."""
        try:
            if hasattr(self, "bound"):
                self._log(0.0, 0)
        finally:
            if self._close_log is not None:
                close, self._close_log = self._close_log, None  # to finish a run twice is an error
                close()


class TensorBoardLogger(EpisodeLogger):
    """Logs episodes to TensorBoard; EpisodeLogger says what is logged.

    Args:
        folder_or_writer: a folder for a writer of torch or tensorboardX, which is closed with the envs; or any object
            with `add_scalar(tag, value, step)`, which stays open.
        every_seconds, every_steps, prefix: as for EpisodeLogger.

    Raises:
        ImportError: a folder was given, and neither is installed.
    """

    def __init__(self, folder_or_writer: Any, every_seconds: float = 1.0, every_steps: int = 0, prefix: str = "shoal"):
        super().__init__(every_seconds, every_steps, prefix)
        self.writer = folder_or_writer
        if isinstance(folder_or_writer, str | os.PathLike):
            self.writer = _summary_writer(os.fspath(folder_or_writer))
            self._close_log = self.writer.close
        elif not callable(getattr(folder_or_writer, "add_scalar", None)):
            raise TypeError(f"expected a folder or an object with add_scalar, found {folder_or_writer!r}")

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log the values of this step to TensorBoard, each as a scalar."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)


class WandbLogger(EpisodeLogger):
    """Logs episodes to Weights & Biases; EpisodeLogger says what is logged.

    W&B takes no step before the last one: log other values to the same run with `step=logger.global_step`.

    Args:
        run: a run, or any object with `log(values, step=...)`, which stays open. None: the active run, or one that is
            made now and finished with the envs.
        **init: for `wandb.init`, which is called if there are any, even if a run is active.
        every_seconds, every_steps, prefix: as for EpisodeLogger.

    Raises:
        ImportError: no run was given, and wandb is not installed.
    """

    def __init__(
        self, run: Any = None, every_seconds: float = 1.0, every_steps: int = 0, prefix: str = "shoal", **init: Any
    ):
        super().__init__(every_seconds, every_steps, prefix)
        if run is not None and init:
            raise TypeError(f"{', '.join(init)}: for a run that is made, and one was given")
        self.run, ours = (run, False) if run is not None else _wandb_run(init)
        if not callable(getattr(self.run, "log", None)):
            raise TypeError(f"expected a run or an object with log, found {self.run!r}")
        if ours:
            self._close_log = self.run.finish

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log the values of this step to the run of W&B."""
        self.run.log(dict(values), step=step)


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

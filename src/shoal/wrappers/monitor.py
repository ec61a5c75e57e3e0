"""Episodes as they end: returns and lengths in the infos and in CSV files that Stable-Baselines' tools read.

Monitor is for one env, MonitorEpisodes for all envs of a vector env.
"""

from __future__ import annotations

import csv
import json
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space

from shoal.worker.measurement import MEASURING
from shoal.wrappers.base import Bound, Rows, Transform

EXTENSION = "monitor.csv"


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
        """Close the file."""
        self.file_handler.close()


def _run_of(filename: str) -> Any:
    """The run that a file belongs to; None for none, or if there is no such file."""
    try:
        with open(filename) as file:
            return json.loads(file.readline()[1:]).get("run")
    except (OSError, ValueError, AttributeError):
        return None


def _episode(total: float, length: int, seconds: float) -> dict[str, Any]:
    return {"r": round(total, 6), "l": length, "t": round(seconds, 6)}


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
        """Begin an episode."""
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
        """Step, and sum up the episode if it ends."""
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
        episode = _episode(total, length, seconds)
        episode.update((key, info[key]) for key in self.info_keywords)
        self.episode_returns.append(total)
        self.episode_lengths.append(length)
        self.episode_times.append(seconds)
        episode.update(self.current_reset_info)
        if self.results_writer is not None:
            self.results_writer.write_row(episode)
        return episode

    def close(self) -> None:
        """Close the env and the file."""
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
        resets = ~rows.stepped
        self.episode_returns[ids] += rows.reward
        self.episode_lengths[ids] += 1
        for row in np.flatnonzero(rows.done).tolist():
            rows.infos.setdefault(row, {})["episode"] = self._summary(int(rows.ids[row]), rows.infos.get(row, {}))
        over = rows.ids[rows.done | resets]
        self.episode_returns[over] = self.episode_lengths[over] = 0

    def _summary(self, env_id: int, info: dict[str, Any]) -> dict[str, Any]:
        total, length = float(self.episode_returns[env_id]), int(self.episode_lengths[env_id])
        episode = _episode(total, length, time.time() - self.t_start)
        for key in self.info_keywords:
            if key not in info:
                raise KeyError(f"info_keywords: the last info of env {env_id} has no {key!r}, only {sorted(info)}")
            episode[key] = info[key]
        self.last_returns.append(total)
        self.last_lengths.append(length)
        self.episode_count += 1
        if self.results_writer is not None:
            self.results_writer.write_row(episode)
        return episode

    def close(self) -> None:
        """Close the file."""
        if self.results_writer is not None:
            self.results_writer.close()

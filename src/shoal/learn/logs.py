"""What a training tells: rows of a CSV always, TensorBoard and Weights & Biases where asked for, and a plot."""

from __future__ import annotations

import csv
import importlib.util
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.support.optional_dependencies import require

WINDOW = 100  # episodes, at least, that the mean return is taken over
COLUMNS = (
    "steps", "seconds", "return", "length", "episodes", "steps_per_s", "stepping", "learning", "policy_loss",
    "value_loss", "entropy", "kl", "clipped",
)  # fmt: skip


class RecentEpisodes:
    """The mean return and length of the last episodes: of the fewest last rollouts with 100 episodes among them."""

    def __init__(self, window: int = WINDOW):
        self.window, self.total = window, 0
        self._pieces: deque[tuple[int, float, float]] = deque()

    def add(self, count: int, return_sum: float, length_sum: float) -> None:
        """Add the episodes of a rollout."""
        if count:
            self.total += count
            self._pieces.append((count, return_sum, length_sum))
        while sum(piece[0] for piece in self._pieces) - (self._pieces[0][0] if self._pieces else 0) >= self.window:
            self._pieces.popleft()

    @property
    def count(self) -> int:
        """How many episodes the means are of."""
        return sum(piece[0] for piece in self._pieces)

    @property
    def mean_return(self) -> float:
        return sum(piece[1] for piece in self._pieces) / self.count if self._pieces else float("nan")

    @property
    def mean_length(self) -> float:
        return sum(piece[2] for piece in self._pieces) / self.count if self._pieces else float("nan")

    def state(self) -> list[list[float]]:
        return [[float(self.total), 0.0, 0.0], *(list(map(float, piece)) for piece in self._pieces)]

    def load(self, state: Sequence[Sequence[float]]) -> None:
        self.total = int(state[0][0])
        self._pieces = deque((int(count), returns, lengths) for count, returns, lengths in state[1:])


class Logs:
    """Writes each row to all places.

    Args:
        folder: for progress.csv and TensorBoard's files; None to write nothing.
        tensorboard: whether to write for TensorBoard; None: if it is installed.
        wandb: the name of a project of Weights & Biases; None for none.
    """

    def __init__(self, folder: Path | None, append: bool, tensorboard: bool | None = False, wandb: str | None = None):
        self._file: Any = None
        self._board: Any = None
        self._wandb: Any = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "progress.csv"
            fresh = not (append and path.exists())
            self._file = path.open("w" if fresh else "a", newline="")
            self._csv = csv.DictWriter(self._file, COLUMNS)
            if fresh:
                self._csv.writeheader()
            if tensorboard or (tensorboard is None and importlib.util.find_spec("tensorboard")):
                writer = require("torch.utils.tensorboard", "TensorBoard's logs need tensorboard", "learn")
                self._board = writer.SummaryWriter(str(folder))
        if wandb is not None:
            self._wandb = require("wandb", "logs of Weights & Biases need wandb", "learn")
            self._wandb.init(project=wandb, dir=None if folder is None else str(folder))

    def write(self, row: Mapping[str, float]) -> None:
        if self._file is not None:
            self._csv.writerow({name: f"{row[name]:.6g}" if name != "steps" else int(row[name]) for name in COLUMNS})
            self._file.flush()
        for name in COLUMNS[1:]:
            if self._board is not None:
                self._board.add_scalar(f"shoal/{name}", row[name], int(row["steps"]))
        if self._wandb is not None:
            self._wandb.log(dict(row), step=int(row["steps"]))

    def close(self) -> None:
        for one, method in ((self._file, "close"), (self._board, "close"), (self._wandb, "finish")):
            if one is not None:
                getattr(one, method)()


def plot(history: Sequence[Mapping[str, float]], path: Path, title: str, target: float | None = None) -> None:
    """Draw the learning curve: mean return against seconds, and against steps."""
    figures = require("matplotlib.figure", "a plot needs matplotlib", "plot")
    figure = figures.Figure(figsize=(9, 3.5), layout="constrained")
    known = [row for row in history if row["return"] == row["return"]]
    for axes, name, words in zip(
        figure.subplots(1, 2), ("seconds", "steps"), ("seconds", "steps of all envs"), strict=True
    ):
        axes.plot([row[name] for row in known], [row["return"] for row in known], color="#0072b2")
        if target is not None:
            axes.axhline(target, color="#888888", linestyle=":")
        axes.set_xlabel(words)
        axes.set_ylabel(f"mean return of {WINDOW} episodes")
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)

"""What the scripts of the trainers' ladder share: a training over two vector envs in turns, and their comparison.

A script of the ladder trains one library's own trainer: over the library's own vector env, and over Shoal's in its
place. It describes each training as a `Cell` and hands its cells to `climb`, which trains both sides in turns with the
same seeds, compares the returns of the episodes, and writes what it found. `run.py` runs all scripts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

THEIRS, OURS = "theirs", "ours"


@dataclass(frozen=True)
class Training:
    """One training: the returns of its episodes in the order of their ends, its steps, and how long these took."""

    returns: list[float]
    steps: int
    seconds: float


@dataclass(frozen=True)
class Cell:
    """A trainer on an env, over their vector env and over ours.

    `train` is called with THEIRS or OURS and a seed, and makes the vector env, trains, and closes it. `exact` says
    whether the library is deterministic: both sides then have the same returns, to the last bit.
    """

    trainer: str
    env: str
    theirs: str
    ours: str
    train: Callable[[str, int], Training]
    exact: bool = True


@dataclass
class Verdict:
    """What a cell's trainings showed."""

    trainer: str
    env: str
    theirs: str
    ours: str
    exact: bool
    episodes: int = 0
    same: bool = True
    returns: dict[str, list[float]] = field(default_factory=lambda: {THEIRS: [], OURS: []})
    steps_per_second: dict[str, list[float]] = field(default_factory=lambda: {THEIRS: [], OURS: []})

    @property
    def ratio(self) -> float:
        """Return how many times as fast ours was, as the median over rounds."""
        speeds = zip(self.steps_per_second[OURS], self.steps_per_second[THEIRS], strict=True)
        return statistics.median(ours / theirs for ours, theirs in speeds)

    def line(self) -> str:
        """Return the verdict in one line."""
        kind = "exactly the same returns" if self.same else "returns differ"
        if not self.exact:
            means = {who: statistics.fmean(found) if found else float("nan") for who, found in self.returns.items()}
            kind = f"mean return {means[THEIRS]:.1f} and {means[OURS]:.1f} (not deterministic)"
        speed = f"{self.ratio:.2f} times as fast over {self.ours} as over {self.theirs}"
        return f"{self.trainer}, {self.env}: {self.episodes} episodes, {kind}; {speed}"


class Clock:
    """Times a training, once its envs are started and warm: `with Clock() as clock: ...`, then `clock.seconds`."""

    seconds = 0.0

    def __enter__(self) -> Clock:
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self._began


def compare(cell: Cell, rounds: int) -> Verdict:
    """Train a cell in turns, each round with a seed of its own."""
    verdict = Verdict(cell.trainer, cell.env, cell.theirs, cell.ours, cell.exact)
    for seed in range(1, rounds + 1):
        found: dict[str, Training] = {}
        # Who begins changes from round to round: a machine may slow down or speed up meanwhile.
        for who in (THEIRS, OURS) if seed % 2 else (OURS, THEIRS):
            found[who] = cell.train(who, seed)
            verdict.returns[who] += found[who].returns
            verdict.steps_per_second[who].append(found[who].steps / found[who].seconds)
        verdict.same &= found[THEIRS].returns == found[OURS].returns
        verdict.episodes += len(found[OURS].returns)
    return verdict


def climb(library: str, distributions: Sequence[str], cells: Sequence[Cell]) -> None:
    """Compare all cells; print and write what was found. Exits with 1 where returns should be the same and are not."""
    parser = argparse.ArgumentParser(description=f"Train {library}'s own trainer over its vector env and over Shoal's.")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each side, each with a seed of its own")
    parser.add_argument("--only", default="", help="run the cells whose env or trainer has this in its name")
    parser.add_argument("--json", type=Path, help="write what was found here")
    options = parser.parse_args()
    verdicts = []
    for cell in cells:
        if options.only.lower() not in f"{cell.trainer} {cell.env}".lower():
            continue
        verdicts.append(compare(cell, options.rounds))
        print(verdicts[-1].line(), flush=True)
    if options.json:
        versions = {name: importlib.metadata.version(name) for name in distributions}
        found = [asdict(verdict) | {"ratio": verdict.ratio} for verdict in verdicts]
        options.json.write_text(json.dumps({"library": library, "versions": versions, "cells": found}, indent=1))
    idle = [verdict for verdict in verdicts if not verdict.episodes]
    wrong = [verdict for verdict in verdicts if verdict.exact and not verdict.same]
    for verdict in idle:
        print(f"no episode ended, so nothing was compared: {verdict.trainer}, {verdict.env}")
    if idle or wrong or not verdicts:
        raise SystemExit(1)

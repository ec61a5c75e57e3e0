"""Checkpoints: one file with the policy, the optimizer, all generators, statistics, and a snapshot of the envs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.errors import CannotSnapshot, DataError
from shoal.learn.ppo import Learner
from shoal.learn.ways import Built

KIND, VERSION = "shoal training", 1
NAME = "checkpoint.pt"


def save(path: Path, built: Built, progress: Mapping[str, Any]) -> str:
    """Write a checkpoint, all of it or nothing; returns why it cannot be resumed bit for bit, "" if it can.

    Args:
        progress: numbers and texts of the training itself.
    """
    built.way.settle()
    envs, trouble = _snapshot(built.way)
    document = {
        "what": KIND, "version": VERSION, "policy": built.policy.state_dict(), "learner": _learner_state(built.learner),
        "settings": asdict(built.policy.settings), "way": {"name": built.way.name, **built.way.state()},
        "threads": built.threads, "envs": envs, "overlap": built.way.overlap, **progress,
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".writing")
    torch.save(document, draft)
    os.replace(draft, path)
    return trouble


def _snapshot(way: Any) -> tuple[torch.Tensor | None, str]:
    """Return a snapshot of the envs as bytes, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "envs"
        try:
            way.snapshot(file)
        except CannotSnapshot as error:
            return None, f"the envs cannot be saved, and begin new episodes when it is resumed: {error}"
        return torch.from_numpy(np.frombuffer(file.read_bytes(), np.uint8).copy()), ""


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint. No code in it is run.

    Raises:
        DataError: it is none.
    """
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
        if document["what"] != KIND or document["version"] != VERSION:
            raise DataError(
                f"expected {KIND!r} of version {VERSION}, found {document['what']!r}, {document['version']!r}"
            )
    except DataError:
        raise
    except OSError:
        raise
    except Exception as error:
        raise DataError(f"{path} is no checkpoint of a training: {error!s:.200}") from error
    return dict(document)


def restore(document: Mapping[str, Any], built: Built, trusted: bool = False) -> None:
    """Put everything back, so that the training goes on as if it had not stopped."""
    if document["way"]["name"] != built.way.name:
        raise DataError(
            f"the checkpoint was made by the {document['way']['name']} way, and this training takes the "
            f"{built.way.name} way: give it the same env, backend and device"
        )
    built.policy.load_state_dict(document["policy"])
    _load_learner(built.learner, document["learner"])
    if document["envs"] is not None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "envs"
            file.write_bytes(document["envs"].numpy().tobytes())
            built.way.restore(file, trusted)
    built.way.load(document["way"])


def _learner_state(learner: Learner) -> dict[str, Any]:
    return {
        "optimizer": learner.optimizer.state_dict(), "generator": learner.generator.get_state(),
        "running": learner.running, "return_stats": learner.return_stats.state_dict(),
    }  # fmt: skip


def _load_learner(learner: Learner, state: Mapping[str, Any]) -> None:
    learner.optimizer.load_state_dict(state["optimizer"])
    learner.generator.set_state(state["generator"])
    learner.running.copy_(state["running"])
    learner.return_stats.load_state_dict(state["return_stats"])

"""Chooses what steps the envs of a block."""

from __future__ import annotations

from typing import Any

from shoal.envs.group import is_group
from shoal.worker.base import EnvBlock, Stepper, WorkerChannel
from shoal.worker.grouped import GroupStepper
from shoal.worker.single import SingleStepper


def make_stepper(block: EnvBlock, channel: WorkerChannel) -> Stepper:
    """Make the stepper of these envs. A group may bring its own: a method `make_stepper` with the same arguments."""
    first: Any = block.envs[0]
    if not is_group(first):
        return SingleStepper(block, channel)
    made: Stepper = getattr(first, "make_stepper", GroupStepper)(block, channel)
    return made

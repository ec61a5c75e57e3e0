"""Rollouts of compiled envs by policies that can be compiled: all steps without a return to Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.compiled.numba_cpu import available, policy_address
from shoal.compiled.policy import random_policy
from shoal.compiled.task import Task

__all__ = ["roll"]

FRAME_FIELDS = ("reward", "terminated", "truncated", "episode_return", "episode_length")


def roll(stepper: Any, record: Any, policy: Any, params: Sequence[Any], rngs: Any) -> bool:
    """Fill the record of a rollout, but for its first observations, which it has; False where that cannot be done here.

    Kernels answer into frames: the record's arrays are the frames. Those without a row for the beginning are told to
    begin one row earlier than they do.
    """
    definition = stepper.envs[0].definition
    if policy == "random":
        if len(definition.action_leaves) != 1:
            return False
        policy, params = random_policy(definition.action_leaves[0])
    if stepper.kernel is None or not available():
        return False
    key = (policy, *((param.dtype, param.shape) for param in params))
    if key not in stepper.policies:  # looking for it on the disk takes longer than many a rollout
        stepper.policies[key] = policy_address(definition, policy, params)
    address = stepper.policies[key]
    task = stepper.task.copy(1 + len(params))
    task.number("frames", record.steps + 1)
    for name in FRAME_FIELDS:
        _one_row_late(task, name, getattr(record, name))
    task.array("began", record.began)
    _one_row_late(task, "status", np.zeros((record.steps, record.lanes), np.uint8))
    for i, array in enumerate(record.obs):
        task.array(f"obs.{i}", array)
        if record.finals is not None:
            _one_row_late(task, f"final.{i}", record.finals[i])
    for i, array in enumerate(record.actions):
        task.array(f"action.{i}", array)
    for i, extra in enumerate((rngs, *params)):
        task.extra(i, extra)
    stepper.rollout(task, address, record.steps, tuple(array.strides[0] for array in record.actions))
    return True


def _one_row_late(task: Task, name: str, array: Any) -> None:
    task.array(name, array, offset=-array.strides[0])

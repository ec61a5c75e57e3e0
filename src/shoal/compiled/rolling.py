"""Rollouts of compiled envs by compiled policies: all steps are made without a return to Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.compiled.kernels import available, policy_address
from shoal.compiled.policy import random_policy
from shoal.compiled.task import Task

FRAME_FIELDS = ("reward", "terminated", "truncated", "episode_return", "episode_length")


def roll(stepper: Any, record: Any, policy: Any, params: Sequence[Any], rngs: Any) -> bool:
    """Fill the record of a rollout, except its first observations, which it has; return False if that is not possible.

    Kernels answer into frames, and the record's arrays serve as the frames. Frame 0 is the beginning of the rollout: an
    array that has no row for it gets an address one row before its first one.
    """
    definition = stepper.envs[0].definition
    if policy == "random":
        if len(definition.action_leaves) != 1:
            return False
        policy, params = random_policy(definition.action_leaves[0])
    if stepper.kernel is None or not available():
        return False
    key = (policy, *((param.dtype, param.shape) for param in params))
    if key not in stepper.policies:  # a look into the cache on disk takes longer than many rollouts
        stepper.policies[key] = policy_address(definition, policy, params)
    address = stepper.policies[key]
    task = stepper.task.copy(1 + len(params))
    task.number("frames", record.steps + 1)
    for name in FRAME_FIELDS:
        _without_first_row(task, name, getattr(record, name))
    task.array("began", record.began)
    _without_first_row(task, "status", np.zeros((record.steps, record.lanes), np.uint8))
    for i, array in enumerate(record.obs):
        task.array(f"obs.{i}", array)
        if record.finals is not None:
            _without_first_row(task, f"final.{i}", record.finals[i])
    for i, array in enumerate(record.actions):
        task.array(f"action.{i}", array)
    for i, extra in enumerate((rngs, *params)):
        task.extra(i, extra)
    stepper.rollout(task, address, record.steps, tuple(array.strides[0] for array in record.actions))
    return True


def _without_first_row(task: Task, name: str, array: Any) -> None:
    task.array(name, array, offset=-array.strides[0])

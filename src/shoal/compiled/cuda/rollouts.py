"""Rollouts on a GPU: many steps by a compiled policy in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.batch import Rollout
from shoal.compiled.cuda.memory import DeviceMemory
from shoal.compiled.policy import is_policy, random_policy
from shoal.errors import BadCall
from shoal.spaces.leaves import Leaf

__all__ = ["DeviceRollout", "choose_policy", "record_of"]


@dataclass(frozen=True)
class DeviceRollout(Rollout):
    """A rollout with its arrays on the GPU.

    Attributes:
        arrays: the same memory, as kernels write it.
        memory: of the envs that made it.
    """

    arrays: dict[str, Any]
    steps: int
    memory: DeviceMemory


def choose_policy(policy: Any, params: Sequence[Any], action_leaves: Sequence[Leaf]) -> tuple[Any, list[Any]]:
    """Return the function that chooses actions, and its params as arrays."""
    if isinstance(policy, str) and policy == "random":
        if len(action_leaves) != 1:
            raise BadCall('rollout: "random" is for action spaces of one part; write a compiled.policy for others')
        if len(params):
            raise BadCall('rollout: params are for a compiled.policy, and "random" takes none')
        policy, params = random_policy(action_leaves[0])
    elif not is_policy(policy):
        raise BadCall(f'rollout: expected a function marked by shoal.compiled.policy or "random", found {policy!r}')
    return policy, [param if hasattr(param, "shape") else np.atleast_1d(param) for param in params]


def record_of(memory: DeviceMemory, arrays: dict[str, Any], steps: int) -> DeviceRollout:
    """Make the record of a rollout out of its arrays."""
    tracked = ("episode_return", "episode_length")
    names = [name for name in ("reward", "terminated", "truncated", *tracked) if name in arrays]
    answers: dict[str, Any] = dict.fromkeys(tracked)
    answers.update({name: memory.view(name, arrays, steps) for name in names})
    return DeviceRollout(
        obs=memory.nested("obs", arrays, steps + 1),
        actions=memory.nested("action", arrays, steps),
        began=memory.view("began", arrays, steps + 1),  # type: ignore[arg-type]
        final_obs=memory.nested("final", arrays, steps) if "final_0" in arrays else None,
        **answers,
        arrays=arrays,
        steps=steps,
        memory=memory,
    )

"""What the scheduler of a pool is told: how lanes are asked and waited for, and what is done about losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.engine.recovery import RecoveryPolicy
from shoal.spaces.leaves import Leaf


@dataclass(frozen=True)
class SchedulerSettings:
    """How a pool wants its lanes asked and waited for.

    Attributes:
        action_leaves: those of the action space.
        check_boxes: whether Box actions must be within their bounds.
        user_resets: whether the user must reset an env after its episode, before it is stepped.
        fifo: whether lanes are received strictly in the order in which they were sent.
        window: 0, or how many neighbours are always received together.
        spin_ns: how long a wait spins before it sleeps.
        step_timeout: seconds that one env may take for a step or a reset.
        policy: what to do about envs and workers that are lost.
    """

    action_leaves: Sequence[Leaf]
    check_boxes: bool
    user_resets: bool
    fifo: bool
    window: int
    spin_ns: int
    step_timeout: float | None
    policy: RecoveryPolicy

"""Makes an env of any library that Shoal knows look like Gymnasium's."""

from __future__ import annotations

from typing import Any

from shoal.adapters.old_gym import OldGymEnv, is_old
from shoal.adapters.time_steps import TimeStepEnv, has_specs

__all__ = ["modern"]


def modern(env: Any) -> Any:
    """The env itself, or one that makes it look like Gymnasium's."""
    if has_specs(env):
        return TimeStepEnv(env)
    return OldGymEnv(env) if is_old(env) else env

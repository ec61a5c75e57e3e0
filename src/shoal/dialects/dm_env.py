"""The pool as a dm_env environment: its TimeSteps have a row for each env. It needs no TensorFlow."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.dialects.time_steps import TimeStepFace
from shoal.support.optional_dependencies import require

require("dm_env", 'api="dm_env" needs dm_env', "dm-env")
import dm_env  # noqa: E402
from dm_env import specs  # noqa: E402

__all__ = ["BatchedEnvironment", "make_spec"]


def make_spec(shape: Any, dtype: Any, minimum: Any, maximum: Any, name: str) -> Any:
    """A spec of this shape, dtype and name: discrete where it counts from 0, bounded by its minimum and maximum."""
    if minimum is None or maximum is None or np.dtype(dtype).kind == "b":
        return specs.Array(shape, dtype, name=name)
    whole = np.dtype(dtype).kind in "iu" and tuple(shape) == ()
    if whole and int(np.asarray(minimum)) == 0:
        return specs.DiscreteArray(int(np.asarray(maximum)) + 1, dtype=dtype, name=name)
    return specs.BoundedArray(shape, dtype, minimum, maximum, name=name)


class BatchedEnvironment(TimeStepFace, dm_env.Environment):  # type: ignore[misc]
    """Many envs as one dm_env environment.

    Its specs are those of one env; step type, reward, discount and observation of a TimeStep have a row for each. The
    last step of an episode is followed by the first of the next, which ignores its action. At a first step the reward
    is 0 and the discount 1; a single env of dm_env has None for both.

    Args:
        env, num_envs: as for `shoal.Pool`; dm_env environments, PyEnvironments of TF-Agents and Gymnasium envs.
        **pool_options: as for `shoal.Pool`.
    """

    _make_spec = staticmethod(make_spec)

    def __init__(self, env: Any, num_envs: int | None = None, **pool_options: Any):
        self._open(env, num_envs, pool_options)
        self.batch_size = self.pool.num_envs
        self._fresh = True

    def reset(self, seed: Any = None) -> dm_env.TimeStep:
        """Begin a new episode in every env; an int gives env i `seed + i`, a list gives each its own."""
        step = dm_env.TimeStep(*self._first_step(seed))
        self._fresh = False
        return step

    def step(self, action: Any) -> dm_env.TimeStep:
        """Step every env with its row of the action."""
        return self.reset() if self._fresh else dm_env.TimeStep(*self._next_step(action))

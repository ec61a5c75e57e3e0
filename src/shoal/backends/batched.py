"""One env that steps all lanes at once, in the caller's process."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from shoal.backends.inline import InlineWorker
from shoal.batched import BatchedEnv, BatchedStepper
from shoal.deadline import Deadline
from shoal.messages import StepperConfig, Summary
from shoal.remote import pack_error
from shoal.slab import Slab
from shoal.spaces import array_leaves

__all__ = ["BATCHED", "BatchedWorker", "batched_env_fn"]

# Who makes the envs of such a backend: a function (env, num_envs, env_kwargs). Imported when asked for: each needs a
# framework.
BATCHED = {"jax": ("shoal.graph.jax.pool_envs", "make_envs")}


def batched_env_fn(
    backend: str, env: Any, num_envs: int, env_kwargs: Mapping[str, Any] | None
) -> Callable[[], BatchedEnv]:
    """What makes the one env that steps all lanes."""
    module, name = BATCHED[backend]
    make = getattr(importlib.import_module(module), name)
    return functools.partial(make, env, num_envs, dict(env_kwargs or {}))


class BatchedWorker(InlineWorker):
    """The caller's own block, whose envs are one object. `make` builds it."""

    def __init__(self, index: int, start: int, stop: int, make: Callable[[], BatchedEnv]):
        super().__init__(index, start, stop, [])
        self._make = make

    def built(self, deadline: Deadline) -> Summary:
        try:
            env = self._make()
            pair = (env.single_observation_space, env.single_action_space)
            for what, space in zip(("observation", "action"), pair, strict=True):
                array_leaves(what, space, "a batch")
        except Exception as error:
            raise pack_error(error, "its constructor").unpack(self.start, self.index) from error
        self._envs = [env]
        return Summary([pair], [0] * env.num_envs, {}, None, None, [], getattr(env, "name", type(env).__name__))

    def attach(self, slab: Slab, config: StepperConfig, pool_bell: Any) -> None:
        self._use(BatchedStepper(slab, self.index, self.start, self._envs[0], config, self._outbox.append))

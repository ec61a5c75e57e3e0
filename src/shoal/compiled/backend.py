"""The backends "compiled" and "cuda": all envs of a pool in compiled code, on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal.backends.inline import BatchedBackend, RowsBackend
from shoal.envs.batched import BatchedEnv


class CompiledBackend(BatchedBackend):
    """A class that derives from `shoal.compiled.Env`, stepped by compiled code in threads without Python."""

    name = "compiled"
    one_worker = False  # its threads count as workers
    separate_leaves = True

    @classmethod
    def default_workers(cls, count: int, cores: int) -> int:
        return cores

    @classmethod
    def env_fn(cls, env: Any, num_envs: int, kwargs: Mapping[str, Any], num_workers: int | None) -> Callable[[], Any]:
        from shoal.compiled.worker import make_envs

        # Compiled now, in the caller: errors in the class are the caller's to see.
        envs = make_envs(env, num_envs, kwargs, num_workers)
        return lambda: envs

    def remark(self, source: Any) -> str:
        return str(source.env_fns[0]().remark)

    def narrow_rollouts(self, inline: Any) -> bool:
        return bool(inline.stepper.in_columns)

    def roll_out(self, inline: Any, record: Any, policy: Any, params: Sequence[Any], rngs: Any) -> bool:
        return inline.stepper.roll_out(record, policy, params, rngs)  # type: ignore[no-any-return]


class CudaBackend(RowsBackend):
    """Such a class on a GPU. Answers are copied to the host."""

    name = "cuda"

    @classmethod
    def env_fn(cls, env: Any, num_envs: int, kwargs: Mapping[str, Any], num_workers: int | None) -> Callable[[], Any]:
        from shoal.compiled.cuda.build import check

        check()  # that there is a GPU, before a worker is made
        return super().env_fn(env, num_envs, kwargs, num_workers)

    @staticmethod
    def make_envs(env: Any, num_envs: int, kwargs: Mapping[str, Any]) -> BatchedEnv:
        from shoal.compiled.cuda.envs import make_envs

        return make_envs(env, num_envs, kwargs)

"""Shoal: many reinforcement-learning environments as one."""

from __future__ import annotations

from shoal import errors
from shoal.backends import registry
from shoal.batch import Batch, Rollout
from shoal.dialects.gymnasium import entry_point, install, uninstall
from shoal.errors import *  # noqa: F403
from shoal.make import make
from shoal.observe.stats import PoolStats, WorkerInfo
from shoal.planning.plan import Plan
from shoal.pool import Pool
from shoal.remote.mpi.serve import serve
from shoal.state.snapshot import Snapshot
from shoal.support.optional_dependencies import modules_of
from shoal.tuning import tune

# Every backend, by the name that users give, and its class, which is imported when a pool asks for it.
for _name, _place in {
    "serial": "shoal.backends.inline:SerialBackend",
    "threads": "shoal.backends.threads:ThreadBackend",
    "processes": "shoal.backends.process_backend:ProcessBackend",
    "hybrid": "shoal.backends.process_backend:HybridBackend",
    "jax": "shoal.graph.jax_backend:JaxBackend",
    "batched": "shoal.backends.batch_native:BatchNativeBackend",
    "compiled": "shoal.compiled.backend:CompiledBackend",
    "cuda": "shoal.compiled.backend:CudaBackend",
    "ray": "shoal.remote.backend:RayBackend",
    "mpi": "shoal.remote.backend:MpiBackend",
}.items():
    registry.register(_name, _place)

# What makes batches of the envs of other packages, by the beginning of the entry points that they register.
for _name, _place in {
    "gymnasium.envs.mujoco.": "shoal.mujoco.registered:find",
    "ale_py.": "shoal.atari.making:find",
}.items():
    registry.register_batches(_name, _place)

__all__ = [
    "Batch", "Plan", "Pool", "PoolStats", "Rollout", "Snapshot", "WorkerInfo", "entry_point", "install", "make",
    "serve", "tune", "uninstall", *errors.__all__,
]  # fmt: skip
__version__ = "0.2.0"
__getattr__ = modules_of(__name__)

"""Shoal: many reinforcement-learning environments as one."""

from __future__ import annotations

from shoal import errors
from shoal.batch import Batch
from shoal.dialects.gymnasium import entry_point, install, uninstall
from shoal.errors import *  # noqa: F403
from shoal.make import make
from shoal.observe.stats import PoolStats, WorkerInfo
from shoal.planning.plan import Plan
from shoal.pool import Pool
from shoal.remote.mpi.serve import serve
from shoal.rollout import Rollout
from shoal.state.snapshot import Snapshot
from shoal.support.lazy_modules import modules_of
from shoal.tuning import tune

__all__ = [
    "Batch", "Plan", "Pool", "PoolStats", "Rollout", "Snapshot", "WorkerInfo", "entry_point", "install", "make",
    "serve", "tune", "uninstall", *errors.__all__,
]  # fmt: skip
__version__ = "0.1.0"
__getattr__ = modules_of(__name__)

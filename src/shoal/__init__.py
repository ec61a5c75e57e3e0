"""Shoal: many reinforcement-learning environments as one."""

from __future__ import annotations

from shoal import errors
from shoal.batch import Batch
from shoal.dialects.gymnasium import entry_point, install, uninstall
from shoal.errors import *  # noqa: F403
from shoal.far.mpi_serve import serve
from shoal.lazy import modules_of
from shoal.make import make
from shoal.plan import Plan
from shoal.pool import Pool
from shoal.rollout import Rollout
from shoal.snapshot import Snapshot
from shoal.stats import PoolStats, WorkerInfo
from shoal.tuning import tune

__all__ = [
    "Batch", "Plan", "Pool", "PoolStats", "Rollout", "Snapshot", "WorkerInfo", "entry_point", "install", "make",
    "serve", "tune", "uninstall", *errors.__all__,
]  # fmt: skip
__version__ = "0.1.0"
__getattr__ = modules_of(__name__)

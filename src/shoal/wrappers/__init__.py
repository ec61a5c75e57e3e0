"""Transforms of whole batches: frame stacks, normalization, episode logs, videos, checks.

    envs = wrap(shoal.make("CartPole-v1", num_envs=64), FrameStack(4), normalize := Normalize())

`wrap` puts them around a pool or a Gymnasium vector env; the dialects have their own hosts. The package may import
`pool` and all packages below it. Read `base` first: it says what a transform is.
"""

from __future__ import annotations

from shoal.wrappers.base import Bound, Rows, Transform
from shoal.wrappers.hosts import WrappedPool, WrappedVectorEnv, wrap
from shoal.wrappers.monitor import EpisodeLogger, Monitor, MonitorEpisodes, TensorBoardLogger, WandbLogger
from shoal.wrappers.nan import CheckNan
from shoal.wrappers.normalize import Normalize
from shoal.wrappers.observations import ExtractDictObs, FrameStack, TransposeImage
from shoal.wrappers.running import RunningMeanStd
from shoal.wrappers.video import RecordVideo

__all__ = [
    "Bound", "CheckNan", "EpisodeLogger", "ExtractDictObs", "FrameStack", "Monitor", "MonitorEpisodes", "Normalize",
    "RecordVideo", "Rows", "RunningMeanStd", "TensorBoardLogger", "Transform", "TransposeImage", "WandbLogger",
    "WrappedPool", "WrappedVectorEnv", "wrap",
]  # fmt: skip

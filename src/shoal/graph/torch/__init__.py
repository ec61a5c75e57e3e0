"""Envs inside PyTorch: `TorchEnv` steps a pool by operators that `torch.compile(fullgraph=True)` keeps in the graph.

It may import what `shoal.graph` may, and PyTorch. Read `env` first, then `carriers` (how arrays become tensors,
on the CPU and on a GPU).
"""

from __future__ import annotations

from shoal.support.optional_dependencies import require

require("torch", "shoal.graph.torch needs PyTorch", "torch")

from shoal.graph.host import Received, StepAnswer  # noqa: E402
from shoal.graph.torch.env import TorchEnv  # noqa: E402

__all__ = ["Received", "StepAnswer", "TorchEnv"]

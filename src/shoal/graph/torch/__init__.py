"""Envs inside PyTorch: `TorchEnv` steps a pool by operators that `torch.compile(fullgraph=True)` keeps in the graph.

It may import what `shoal.graph` may, and PyTorch. Read `env` first, then `operators` (what a compiler sees) and
`carriers` (how arrays become tensors, on the CPU and on a GPU).
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    from shoal.support.optional_dependencies import install

    raise ImportError(f"shoal.graph.torch needs PyTorch: {install('torch')}") from error

from shoal.graph.host import Received, StepAnswer
from shoal.graph.torch.env import TorchEnv

__all__ = ["Received", "StepAnswer", "TorchEnv"]

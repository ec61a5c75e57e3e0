"""Compiled envs on a GPU.

envs = CudaEnvs("CartPole-v1", 4096, seed=0)
obs, reward, terminated, truncated = (torch.from_dlpack(array) for array in (envs.reset(), envs.reward, ...))
for _ in range(1000):
    envs.step(policy(obs))

The package may import what `shoal.compiled` may. Read `envs` first, then `source` (what a kernel does) and `build` (how
it is compiled).
"""

from __future__ import annotations

from shoal.compiled.cuda.arrays import DeviceArray
from shoal.compiled.cuda.build import missing
from shoal.compiled.cuda.envs import CudaEnvs

__all__ = ["CudaEnvs", "DeviceArray", "missing"]

"""The public name of `shoal.dialects.torchrl`: `ShoalEnv`, many envs as one env of TorchRL.

May import `shoal.dialects`. Read `shoal.dialects.torchrl` first.
"""

from shoal.dialects.torchrl import ShoalEnv

__all__ = ["ShoalEnv"]

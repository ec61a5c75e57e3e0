"""Windows: pools in one process, that is serial, threads and compiled envs. Worker processes need WSL there."""

from __future__ import annotations

from shoal.support.system.base import System


class Windows(System):
    """What pools in one process need."""

    name = "Windows"

    def times_blocked(self) -> int:
        import psutil

        return int(psutil.Process().num_ctx_switches().voluntary)

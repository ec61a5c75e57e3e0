"""Install pufferlib-core beside the torch that is there: its wheels want another one, with CUDA."""

from __future__ import annotations

import os
import subprocess
import sys

PACKAGE = "pufferlib-core"
INSTALL = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]

if __name__ == "__main__":
    without_cuda = os.environ | {"PUFFERLIB_DISABLE_CUDA": "1"}
    subprocess.run([*INSTALL, "--no-binary", PACKAGE, f"{PACKAGE}==3.0.23"], check=True, env=without_cuda)

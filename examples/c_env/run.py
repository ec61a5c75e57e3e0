"""Steps an env that is a shared library, such as pursuit.c beside this file, and says how fast.

python run.py pursuit.so
"""

from __future__ import annotations

import sys
import time

import numpy as np

import shoal
from shoal import compiled


def main(path: str, num_envs: int = 4096, steps: int = 200) -> None:
    with shoal.Pool(compiled.from_library(path), num_envs, seed=0) as pool:
        batch = pool.reset()
        began, ended = time.perf_counter(), 0
        for _ in range(steps):
            # Towards the hare: what is seen first is the way there.
            batch = pool.step(np.clip(2.0 * batch.obs[:, :2], -1.0, 1.0))
            ended += int(batch.terminated.sum())
        seconds = time.perf_counter() - began
    print(f"{pool.plan}\n{ended} hares caught; {num_envs * steps / seconds:,.0f} steps/s")


if __name__ == "__main__":
    main(sys.argv[1])

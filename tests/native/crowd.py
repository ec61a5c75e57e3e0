"""Lets three threads use pools of this process at once, without pytest: what `sanitize.sh` runs under ThreadSanitizer.

python tests/native/crowd.py [seconds for each backend]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from envs import CountEnv
from faults.kit import open_pool
from faults.test_threads import POOL, Crowd

if __name__ == "__main__":
    # Worker processes would run under the sanitizer too, each in a memory of its own, where it sees nothing.
    for backend in ("serial", "threads"):
        with open_pool(CountEnv, 4, backend, copy=True) as pool:
            pool.reset(seed=0)
            crowd = Crowd(pool, POOL)
            crowd.leave(float(sys.argv[1]) if len(sys.argv) > 1 else 5.0)
            print(backend, dict(crowd.done))

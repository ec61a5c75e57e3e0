"""What several workers warn of is shown once."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import warnings
import gymnasium
import shoal

class Warns(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    made = 0

    def __init__(self):
        warnings.warn("this simulator is old")

    def reset(self, *, seed=None, options=None):
        warnings.warn(f"seed {seed}")
        return self.observation_space.low, {}

    def step(self, action):
        return self.observation_space.low, 0.0, False, False, {}

for _ in range(2):
    with shoal.Pool(Warns, 4, backend="processes", num_workers=4) as pool:
        pool.reset(seed=7)
"""


def test_what_all_workers_warn_of_is_shown_once() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("this simulator is old") >= 1
    said = [line for line in done.stderr.splitlines() if "UserWarning" in line]
    assert len([line for line in said if "old" in line]) <= 4  # workers of the first pool may come at the same moment
    assert sorted(line.rpartition(" ")[2] for line in said if "seed" in line) == ["10", "7", "8", "9"]


def test_the_memory_is_never_full() -> None:
    code = (
        "from shoal.support import shared_warnings as s\n"
        "s.SLOTS = 4\n"
        "s.share()\n"
        "print([s._is_new(str(i % 6)) for i in range(12)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str([True] * 6 + [False] * 4 + [True] * 2)

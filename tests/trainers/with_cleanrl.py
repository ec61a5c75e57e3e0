"""A PPO in the manner of CleanRL over Gymnasium's vector env and over Shoal's: as for Gymnasium 0.29, and for 1.x.

The 0.29 side needs two versions of Gymnasium. The old one is installed into a folder of its own, beside the packages of
this environment, and goes before them in the processes that train over it.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from ladder import OURS, Cell, Training, climb

SCRIPT = Path(__file__).with_name("cleanrl_ppo.py")
OLD = "gymnasium==0.29.1"
OLD_FOLDER = Path(sys.prefix) / "gymnasium029"


def old_gymnasium() -> Path:
    """Return the folder of Gymnasium 0.29.1; installs it where it is missing."""
    if not (OLD_FOLDER / "gymnasium").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(OLD_FOLDER), OLD], check=True)
    return OLD_FOLDER


def train(env_id: str, iterations: int, old: bool, theirs: str, ours: str, who: str, seed: int) -> Training:
    """Run the script in a process of its own, with the Gymnasium that the side needs."""
    environment = dict(os.environ)
    if old and who != OURS:
        environment["PYTHONPATH"] = os.pathsep.join([str(old_gymnasium()), environment.get("PYTHONPATH", "")])
    options = {
        "--vector-env": ours if who == OURS else theirs,
        "--env-id": env_id,
        "--iterations": str(iterations),
        "--seed": str(seed),
    }
    command = [sys.executable, str(SCRIPT), *(word for option in options.items() for word in option)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["gymnasium"].startswith("0.29." if old and who != OURS else "1."), found["gymnasium"]
    return Training(found["returns"], found["steps"], found["seconds"])


def cell(trainer: str, env_id: str, iterations: int, name: str, old: bool) -> Cell:
    """Return the cell of an age of Gymnasium, an env and our class of this name."""
    module = "shoal.dialects.gymnasium029" if old else "shoal.dialects.gymnasium"
    theirs = "gymnasium.vector:SyncVectorEnv"
    trained = functools.partial(train, env_id, iterations, old, theirs, f"{module}:{name}")
    label = "SyncVectorEnv of 0.29.1" if old else "SyncVectorEnv"
    return Cell(trainer, env_id, label, f"{module}.{name}", trained)


if __name__ == "__main__":
    cells = [
        cell("PPO, 0.29 style", "CartPole-v1", 21, "SyncVectorEnv", old=True),
        cell("PPO, 0.29 style", "HalfCheetah-v4", 11, "AsyncVectorEnv", old=True),
        cell("PPO, 1.x style", "CartPole-v1", 21, "SyncVectorEnv", old=False),
        cell("PPO, 1.x style", "HalfCheetah-v5", 11, "AsyncVectorEnv", old=False),
    ]
    climb("CleanRL", ["gymnasium", "torch", "numpy"], cells)

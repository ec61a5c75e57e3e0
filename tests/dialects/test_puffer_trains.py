"""PuffeRL, PufferLib's own trainer, over its vectorizers and over ours: the same returns, to the last bit.

Each training is a process of its own: PuffeRL changes what Ctrl-C does, and which warnings are errors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)

LADDER = Path(__file__).parents[1] / "trainers"

TRAIN = """
import json, sys, warnings
import shoal
sys.path.insert(0, sys.argv[1])
from puffer_cells import train

# PuffeRL makes an error of every RuntimeWarning, and a busy machine makes a start slow.
warnings.filterwarnings("ignore", category=shoal.SlowEnvWarning)

if __name__ == "__main__":
    given = json.loads(sys.argv[2])
    found = [train("CartPole-v1", given["vec"], 2, who, 5, given["rnn"]).returns for who in ("theirs", "ours")]
    print("RETURNS", json.dumps(found))
"""

EVALUATE = """
import gymnasium, pufferlib.emulation, pufferlib.models, torch
from pufferlib import pufferl
from shoal.dialects import puffer

class Enough(Exception):
    pass

class Seen(gymnasium.Wrapper):
    shown = []

    def render(self):
        self.shown.append(tuple(self.unwrapped.state))
        if len(self.shown) == 20:
            raise Enough
        return "x"

def make_env(buf=None, seed=0):
    env = Seen(gymnasium.make("CartPole-v1", render_mode="rgb_array"))
    env.unwrapped.render_mode = None
    return pufferlib.emulation.GymnasiumPufferEnv(env=env, buf=buf, seed=seed)

vecenv = puffer.make(make_env, backend="Serial", num_envs=1)
policy = pufferlib.models.Default(vecenv.driver_env)
args = {"train": {"device": "cpu", "use_rnn": False}, "save_frames": 0, "fps": 1000}
try:
    pufferl.eval("CartPole-v1", args=args, vecenv=vecenv, policy=policy)
except Enough:
    print("FRAMES", len(set(Seen.shown)))
"""


def run(script: str, folder: Path, *arguments: str) -> Any:
    """Run a script in a folder; return what its last line in capitals says.

    Skips where this PufferLib cannot train here.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=folder)
    if "pufferlib._C" in done.stderr or "No module named 'pyro'" in done.stderr:
        pytest.skip("this PufferLib was built without what its trainer needs")
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith(("RETURNS ", "FRAMES "))]
    return json.loads(lines[-1])


@pytest.mark.parametrize(
    ("vec", "rnn"),
    [
        ({"backend": "Serial"}, False),
        ({"backend": "Serial"}, True),
        ({"backend": "Multiprocessing", "num_workers": 2, "overwork": True}, False),
        ({"backend": "Multiprocessing", "num_workers": 2, "batch_size": 8, "overwork": True}, True),
    ],
    ids=["serial", "lstm", "workers", "half batches"],
)
def test_returns_are_the_same(vec: dict[str, Any], rnn: bool, tmp_path: Path) -> None:
    theirs, ours = run(TRAIN, tmp_path, str(LADDER), json.dumps({"vec": vec, "rnn": rnn}))
    assert len(theirs) > 10
    assert ours == theirs


def test_evaluation_shows_the_env_that_is_stepped(tmp_path: Path) -> None:
    assert run(EVALUATE, tmp_path) > 10

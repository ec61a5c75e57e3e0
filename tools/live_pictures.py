"""Pictures of running pools: what `shoal top` shows, and the report of a profile, as `docs/pictures.py --live` asks.

The report is photographed by Chromium. Both show what this machine does at the moment, so no test compares them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich import _export_format
from rich.console import Console

from shoal.observe.top import Screen, Watch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "pages"))

from browser import browser, served  # noqa: E402

LOOKS, WIDTH = 8, 100
TRAINING = """
import time, shoal
with shoal.Pool("CartPole-v1", num_envs=64, backend="processes", num_workers=2) as pool:
    pool.reset(seed=0)
    print("ready", flush=True)
    while True:
        batch = pool.step(pool.action_space.sample())
        time.sleep(0.001)  # a policy
"""
UNEVEN = """
import time
import gymnasium
import numpy as np

class Uneven(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32), gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.steps += 1
        time.sleep(float(self.np_random.lognormal(-7.5, 0.7)))
        return np.zeros(4, np.float32), 1.0, self.steps >= 50, False, {}
"""


def top() -> str:
    """What `shoal top` shows of a training, as an SVG of the terminal, without fonts from elsewhere."""
    training = subprocess.Popen([sys.executable, "-c", TRAINING], stdout=subprocess.PIPE, text=True)
    try:
        assert training.stdout is not None
        training.stdout.readline()
        watch = Watch(training.pid)
        for _ in range(LOOKS):
            watch.look()
            time.sleep(1.0)
        console = Console(record=True, width=WIDTH, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(Screen(console).draw(watch.history()))
    finally:
        training.kill()
        training.wait()
    plain = re.sub(r"@font-face \{\{.*?\}\}", "", _export_format.CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="shoal top", code_format=plain, unique_id="top")


def profile(path: Path) -> None:
    """The report of `shoal profile` over envs of unequal steps, as a picture of the page."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "uneven.py").write_text(UNEVEN)
        command = [sys.executable, "-m", "shoal.cli.main", "profile", "uneven:Uneven", "-n", "16", "--workers", "4"]
        settings = ["--backend", "processes", "--policy-ms", "1", "--seconds", "2", "--html", "report.html"]
        subprocess.run([*command, *settings], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        with served(Path(folder)) as address, browser() as tab:
            tab.open(f"{address}/report.html", 1000, 860)
            tab.run("look(0, time.length / 6)")
            tab.picture(path)


def draw(folder: Path) -> None:
    """Draw both into a folder."""
    (folder / "top.svg").write_text(top())
    profile(folder / "profile.png")

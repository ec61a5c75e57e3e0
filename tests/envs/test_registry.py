"""Workers know the envs that the caller has registered, and are not warned of packages that register their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = """
import gymnasium
from gymnasium.envs.registration import namespace, register

for i in range(20):
    gymnasium.register(f"Many/Env-v{i}", entry_point="many_envs:ManyEnv", kwargs={"number": i})
register(id="ManyMore-v0", entry_point="many_envs:ManyEnv", kwargs={"number": 20})
with namespace("Many"):
    register("Inner-v0", entry_point="many_envs:ManyEnv", kwargs={"number": 21})


class ManyEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 100, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, number):
        self.number = number

    def reset(self, *, seed=None, options=None):
        return self.observation_space.low + self.number, {}

    def step(self, action):
        return self.observation_space.low + self.number, 0.0, False, False, {}
"""
SCRIPT = """
import gymnasium, shoal
if __name__ == "__main__":
    import many_envs
    gymnasium.register("Own-v0", entry_point="many_envs:ManyEnv", kwargs={"number": 30})
    names = ["Many/Env-v3", "ManyMore-v0", "Many/Inner-v0", "Own-v0"]
    for envs in (
        shoal.make(names[0], 2, backend="BACKEND"),
        shoal.Pool([lambda name=name: gymnasium.make(name) for name in names], backend="BACKEND", num_workers=2),
        # Once its package was imported, an env that the script has registered is still known.
        shoal.Pool([lambda: (gymnasium.make(names[0]), gymnasium.make("Own-v0"))[1]] * 2, backend="BACKEND"),
    ):
        print((envs.reset()[0] if hasattr(envs, "pool") else envs.reset().obs)[:, 0].tolist())
        envs.close()
"""


def run(script: str, folder: Path) -> tuple[str, str]:
    """What a script writes to stdout and stderr."""
    (folder / "script.py").write_text(script)
    done = subprocess.run([sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("backend", ["processes", "auto"])
def test_no_warnings_of_packages_that_register_their_own(tmp_path: Path, backend: str) -> None:
    (tmp_path / "many_envs.py").write_text(PACKAGE)
    out, err = run(SCRIPT.replace("BACKEND", backend), tmp_path)
    assert out.splitlines() == ["[3.0, 3.0]", "[3.0, 20.0, 21.0, 30.0]", "[30.0, 30.0]"]
    assert err.count("Overriding") == 0, err[:2000]


@pytest.mark.skipif(importlib.util.find_spec("ale_py") is None, reason="needs ale-py")
@pytest.mark.parametrize("name", ["ALE/Pong-v5", "ale_py:ALE/Pong-v5"])
def test_no_warnings_of_atari(tmp_path: Path, name: str) -> None:
    script = f"""
import ale_py, shoal
if __name__ == "__main__":
    envs = shoal.make({name!r}, 2, backend="processes", num_workers=2)
    print(envs.reset(seed=0)[0].shape)
    envs.close()
"""
    out, err = run(script, tmp_path)
    assert out.splitlines()[-1] == "(2, 210, 160, 3)"
    assert err.count("WARN") == 0, err[:2000]

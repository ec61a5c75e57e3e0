"""Other simulators through the ordinary way, with every backend: seeds, infos, pictures, restarts, no stray output.

`make test-simulators` runs this, in an environment of its own.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from simulators import zoo

BACKENDS = ("serial", "threads", "processes", "hybrid")
PICTURES = ("LunarLander", "BipedalWalker", "MiniGrid", "ViZDoom")
# ViZDoom's engine draws its own random numbers and has one process for each game: only its shapes are compared.
OWN_CHANCE = ("ViZDoom",)
# MetaWorld draws its tasks from NumPy's global generator, which envs in several threads of one process share.
SHARED_CHANCE = ("MetaWorld", "threads")


def installed(name: str) -> Any:
    make, module = zoo.SINGLE[name]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: run this by `make test-simulators`")
    return make


def play(name: str, backend: str, steps: int = 12, **options: Any) -> list[Any]:
    """Make three envs, step them, and return all answers."""
    found: list[Any] = []
    with shoal.Pool(installed(name), 3, backend=backend, **options) as pool:
        batch = pool.reset(seed=5)
        pool.action_space.seed(1)
        for _ in range(steps):
            found.append((_copied(batch.obs), batch.reward.copy(), batch.terminated.copy(), str(dict(batch.info))))
            batch = pool.step(pool.action_space.sample())
    return found


def _copied(obs: Any) -> Any:
    return {key: np.array(one) for key, one in obs.items()} if isinstance(obs, dict) else {"": np.array(obs)}


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("name", zoo.SINGLE)
def test_every_backend_gives_the_same(name: str, backend: str) -> None:
    expected, found = play(name, "serial"), play(name, backend)
    chance = name in OWN_CHANCE or (name, backend) == SHARED_CHANCE
    for step, (one, two) in enumerate(zip(expected, found, strict=True)):
        assert one[0].keys() == two[0].keys()
        for key in one[0]:
            assert one[0][key].dtype == two[0][key].dtype
            if not chance:
                np.testing.assert_array_equal(one[0][key], two[0][key], err_msg=f"step {step}: {key}")
        if not chance:
            np.testing.assert_array_equal(one[1], two[1], err_msg=f"rewards of step {step}")
            assert one[3] == two[3], f"infos of step {step}"


@pytest.mark.parametrize("backend", ["serial", "processes"])
@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name: str, backend: str) -> None:
    make = installed(name)
    with shoal.Pool(make, 2, backend=backend, env_kwargs={"render_mode": "rgb_array"}) as pool:
        pool.reset(seed=1)
        frames = pool.render(env_ids=[1])
        assert frames[0].ndim == 3
        assert frames[0].dtype == np.uint8


@pytest.mark.parametrize("name", zoo.SINGLE)
def test_a_worker_that_dies_is_replaced(name: str) -> None:
    with shoal.Pool(installed(name), 2, backend="processes", num_workers=2, on_error="restart") as pool:
        pool.reset(seed=1)
        pool.action_space.seed(1)
        with pytest.raises(shoal.WorkerDied):
            pool.apply(lambda env: os._exit(3), env_ids=[1])
        seen = False
        for _ in range(3):
            batch = pool.step(pool.action_space.sample())
            seen |= "restart" in str(batch.info.get(1, {}))
        assert seen


@pytest.mark.parametrize("backend", BACKENDS)
def test_teams(backend: str) -> None:
    if importlib.util.find_spec("mpe2") is None:
        pytest.skip("mpe2 is not installed: run this by `make test-simulators`")
    with shoal.Pool(zoo.simple_spread, 2, backend=backend) as pool:
        first = pool.reset(seed=3)
        assert first.obs.shape == (6, 18)
        pool.action_space.seed(0)
        total = sum(pool.step(pool.action_space.sample()).reward.sum() for _ in range(12))
        assert total < 0


@pytest.mark.parametrize("name", zoo.SINGLE)
def test_no_stray_output(name: str) -> None:
    """Workers say nothing, and what the caller is warned of, it is warned of once."""
    installed(name)
    script = (
        "import shoal\n"
        "from simulators import zoo\n"
        "if __name__ == '__main__':\n"
        f"    pool = shoal.Pool(zoo.SINGLE[{name!r}][0], 4, backend='processes', num_workers=2)\n"
        "    pool.reset(seed=1)\n"
        "    pool.step(pool.action_space.sample())\n"
        "    pool.close()\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    said = [line for line in done.stderr.splitlines() if "Warning" in line or "WARN" in line]
    assert len(said) == len(set(said)), f"the same is said several times:\n{done.stderr}"

"""Tries each backend for a moment, in a process of its own: whether it gives what a plain loop gives, and how fast.

`shoal doctor` runs it. A backend that crashes or hangs is a line of the report, not the end of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import gymnasium
import numpy as np

from shoal.backends import registry
from shoal.cli.contenders import installed
from shoal.errors import ShoalError
from shoal.pool import Pool
from shoal.support.optional_dependencies import install

BACKENDS = ("serial", "threads", "processes", "hybrid", "compiled")
ENVS = 4
COMPARED = 50  # steps that are compared with a plain loop's
SECONDS = 0.5  # of steps that are counted
PATIENCE = 60.0  # seconds until a backend counts as hanging: a first compilation takes some


def run(backend: str) -> dict[str, Any]:
    """Try one backend: {"ok": True, "steps_per_second": ...}, or {"ok": False, "why": ...}; None for "not here"."""
    try:
        registry.find(backend)
    except ShoalError as error:
        return {"ok": None, "why": str(error)}
    if backend == "compiled" and not installed("numba"):
        return {"ok": None, "why": f"Numba is not installed: {install('compiled')}"}
    command = [sys.executable, "-m", "shoal.cli.self_test", backend]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return {"ok": False, "why": f"it was not done after {PATIENCE:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    last = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
    return {"ok": False, "why": f"its process ended with code {done.returncode}: {last[0]}"}


def try_backend(backend: str) -> dict[str, Any]:
    """What `run` has another process do."""
    env: Any = "CartPole-v1"
    if backend == "compiled":
        from shoal.compiled import library

        env = library.find("CartPole-v1")
    workers = None if backend in ("serial", "compiled") else 2
    began = time.perf_counter()
    with Pool(env, ENVS, backend=backend, num_workers=workers, autoreset="next_step") as pool:
        first = np.array(pool.reset(seed=1).obs)
        start = time.perf_counter() - began
        actions = np.random.default_rng(0).integers(0, 2, (COMPARED, ENVS))
        observations = [np.array(pool.step(row).obs) for row in actions]
        if backend != "compiled":  # which draws its own random numbers
            expected = _plain_loop(actions)
            if not np.array_equal(np.stack([first, *observations]), expected):
                return {"ok": False, "why": "its observations are not those of a plain loop"}
        if not np.isfinite(observations).all():
            return {"ok": False, "why": "its observations are not finite"}
        steps, since = 0, time.perf_counter()
        while (passed := time.perf_counter() - since) < SECONDS:
            pool.step(actions[steps % COMPARED])
            steps += 1
    return {"ok": True, "steps_per_second": round(steps * ENVS / passed), "start_seconds": round(start, 3)}


def _plain_loop(actions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The observations of the same envs, one after the other; an episode that has ended is reset in the next step."""
    columns = []
    for index in range(ENVS):
        env, over = gymnasium.make("CartPole-v1"), False
        column = [env.reset(seed=1 + index)[0]]
        for action in actions[:, index]:
            if over:
                (obs, _), over = env.reset(), False
            else:
                obs, _, terminated, truncated, _ = env.step(int(action))
                over = terminated or truncated
            column.append(obs)
        columns.append(column)
    return np.stack(columns, axis=1)


if __name__ == "__main__":
    print(json.dumps(try_backend(sys.argv[1])))

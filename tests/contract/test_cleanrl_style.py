"""Whole scripts, run as users run them: one import line changed, or nothing done for multiprocessing's sake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REINFORCE = '''
"""REINFORCE on CartPole, in the manner of CleanRL: one file, from top to bottom."""

import random

import gymnasium as gym
import numpy as np
from MODULE import CLASS as VectorEnv


def make_env(env_id, idx, gamma):
    def thunk():
        env = gym.make(env_id)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        env = gym.wrappers.NormalizeReward(env, gamma=gamma)
        env.action_space.seed(idx)
        return env

    return thunk


if __name__ == "__main__":
    seed, num_envs, num_steps, gamma, learning_rate = 1, 5, 32, 0.99, 0.05
    random.seed(seed)
    rng = np.random.default_rng(seed)

    envs = VectorEnv([make_env("CartPole-v1", i, gamma) for i in range(num_envs)])
    assert isinstance(envs.single_action_space, gym.spaces.Discrete), "only discrete action space is supported"

    weights = np.zeros((int(np.prod(envs.single_observation_space.shape)), envs.single_action_space.n))
    obs = np.zeros((num_steps, num_envs) + envs.single_observation_space.shape)
    actions = np.zeros((num_steps, num_envs) + envs.single_action_space.shape, dtype=np.int64)
    rewards = np.zeros((num_steps, num_envs))
    dones = np.zeros((num_steps, num_envs))

    global_step = 0
    next_obs, _ = envs.reset(seed=seed)
    next_done = np.zeros(num_envs)
    for iteration in range(1, 9):
        for step in range(num_steps):
            global_step += num_envs
            obs[step], dones[step] = next_obs, next_done
            logits = next_obs @ weights
            probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            actions[step] = (rng.random((num_envs, 1)) > probabilities.cumsum(1)).sum(1)
            next_obs, rewards[step], terminations, truncations, infos = envs.step(actions[step])
            next_done = np.logical_or(terminations, truncations)
            if "episode" in infos:
                for i in np.flatnonzero(infos["_episode"]):
                    episode = infos["episode"]
                    print(f"global_step={global_step}, env={i}, return={episode['r'][i]}, length={episode['l'][i]}")

        returns, total = np.zeros_like(rewards), np.zeros(num_envs)
        for t in reversed(range(num_steps)):
            total = rewards[t] + gamma * total * (1 - dones[t])
            returns[t] = total
        advantages = (returns - returns.mean()) / (returns.std() + 1e-8)
        logits = obs @ weights
        probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        gradient = np.eye(2)[actions] - probabilities
        weights += learning_rate * np.einsum("tni,tna,tn->ia", obs, gradient, advantages) / num_steps
        print(f"iteration={iteration}, weights={weights.tobytes().hex()}")
    envs.close()
'''

UNGUARDED = '''
import os
import sys

import gymnasium as gym
import numpy as np

import shoal

print("the script runs", flush=True)


class Drift(gym.Env):
    """Defined in the script itself, where no worker could import it."""

    observation_space = gym.spaces.Box(-100, 100, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, speed=1):
        self.speed = speed

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.random(2, dtype=np.float32)
        return self.place.copy(), {"mark": Mark(0)}

    def step(self, action):
        self.place = self.place + np.float32(self.speed * (2 * action - 1))
        return self.place.copy(), float(self.place.sum()), False, False, {"mark": Mark(int(action))}

    def where(self):
        return os.getpid()

    def fail(self):
        raise Lost("off the map", 7)


class Mark:
    """A class of the script's, which comes back in the infos."""

    def __init__(self, value):
        self.value = value


class Lost(Exception):
    """An exception of the script's, with more arguments than pickle likes."""

    def __init__(self, text, code):
        super().__init__(text)
        self.code = code


gym.register("Drift-v0", entry_point=Drift, max_episode_steps=4)
options = dict(backend="processes", num_workers=2, start_method=sys.argv[1])
reference = gym.vector.SyncVectorEnv([lambda: gym.make("Drift-v0", speed=3)] * 3)

for env in ("Drift-v0", lambda: gym.make("Drift-v0", speed=3), gym.spec("Drift-v0")):
    kwargs = {} if callable(env) else {"env_kwargs": {"speed": 3}}
    envs = shoal.make(env, 3, **options, **kwargs)
    assert os.getpid() not in envs.call("where")
    ours, theirs = envs.reset(seed=1)[0], reference.reset(seed=1)[0]
    assert (ours == theirs).all()
    for step in range(10):
        ours, theirs = envs.step(np.array([0, 1, 1])), reference.step(np.array([0, 1, 1]))
        assert all((a == b).all() for a, b in zip(ours[:4], theirs[:4]))
        assert [mark.value for mark in ours[4]["mark"]] == [mark.value for mark in theirs[4]["mark"]]
        assert type(ours[4]["mark"][0]).__name__ == "Mark"
    try:
        envs.call("fail")
    except shoal.EnvError as error:
        assert "off the map" in str(error) and error.env_id == 0
    envs.close()
    print("done", flush=True)
'''


def run_script(path: Path, source: str, *arguments: str) -> str:
    path.write_text(source)
    # The script's own folder and no other: nothing of this test is there to be imported.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        cwd=path.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def printed_by_gymnasium(tmp_path_factory: pytest.TempPathFactory) -> str:
    source = REINFORCE.replace("MODULE", "gymnasium.vector").replace("CLASS", "SyncVectorEnv")
    printed = run_script(tmp_path_factory.mktemp("theirs") / "reinforce.py", source)
    assert printed.count("iteration=") == 8
    assert printed.count("global_step=") > 20
    return printed


@pytest.mark.parametrize("name", ["SyncVectorEnv", "AsyncVectorEnv"])
def test_training_with_one_line_changed_prints_the_same(tmp_path: Path, name: str, printed_by_gymnasium: str) -> None:
    source = REINFORCE.replace("MODULE", "shoal.dialects.gymnasium").replace("CLASS", name)
    assert run_script(tmp_path / "reinforce.py", source) == printed_by_gymnasium


OLD_SCRIPT = Path(__file__).with_name("reinforce_029.py").read_text()
OLD_LINE = "from gymnasium.vector import SyncVectorEnv\n"
NEW_LINES = {
    "SyncVectorEnv": "from shoal.dialects.gymnasium029 import SyncVectorEnv\n",
    "AsyncVectorEnv": "from shoal.dialects.gymnasium029 import AsyncVectorEnv as SyncVectorEnv\n",
    "shoal.make": """
import functools

import shoal

SyncVectorEnv = functools.partial(shoal.make, api="gymnasium029", backend="processes", num_workers=2)
""",
}


@pytest.mark.parametrize("name", NEW_LINES)
def test_a_script_for_gymnasium_0_29_prints_what_it_printed_there(tmp_path: Path, name: str) -> None:
    assert OLD_SCRIPT.count(OLD_LINE) == 1
    printed = run_script(tmp_path / "reinforce.py", OLD_SCRIPT.replace(OLD_LINE, NEW_LINES[name]))
    assert printed == Path(__file__).with_name("printed_029.txt").read_text()
    assert printed.count("global_step=") > 40


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_a_script_without_a_main_guard(tmp_path: Path, start_method: str) -> None:
    """Its classes and its registered env are known to the workers, none of which runs it a second time."""
    assert run_script(tmp_path / "script.py", UNGUARDED, start_method) == "the script runs\n" + 3 * "done\n"


@pytest.mark.parametrize(
    ("arguments", "text"), [(["-", "forkserver"], UNGUARDED), (["-c", UNGUARDED, "spawn"], "")], ids=["stdin", "-c"]
)
def test_a_script_that_has_no_file(arguments: list[str], text: str) -> None:
    done = subprocess.run([sys.executable, *arguments], input=text, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "the script runs\n" + 3 * "done\n"), done.stderr

"""Envs that are written in Python once, and run as plain Python, compiled for all cores, or on a GPU.

class Walk(compiled.Env):
    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)
    max_episode_steps = 100
    state = {"x": float}

    @staticmethod
    def reset(state, rng):
        state.x = compiled.uniform(rng, -1.0, 1.0)

    @staticmethod
    def step(state, action, rng):
        state.x += 0.1 if action == 1 else -0.1
        return -abs(state.x), abs(state.x) > 2.0

    @staticmethod
    def observe(state, obs):
        obs[0] = state.x

envs = shoal.make(Walk, num_envs=4096)

The package may import `shoal.worker`, `shoal.state`, `shoal.envs` and the packages below those. Read
`definition` first (what a class has); then `template` and `kernels` (how it becomes machine code), and `worker` (how a
pool runs it). `cuda` does the same on a GPU, and `library` has envs that are ready to use.
"""

from __future__ import annotations

from shoal.compiled.checking import Check, check
from shoal.compiled.definition import Env, function
from shoal.compiled.library_env import from_library, include_folder
from shoal.compiled.mlp import Mlp
from shoal.compiled.plain import as_gymnasium
from shoal.compiled.policy import policy
from shoal.compiled.porting import Port, port
from shoal.compiled.random import choice, integer, normal, uniform

__all__ = [
    "Check", "Env", "Mlp", "Port", "as_gymnasium", "check", "choice", "from_library", "function", "include_folder",
    "integer", "normal", "policy", "port", "uniform",
]  # fmt: skip

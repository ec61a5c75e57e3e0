"""PPO as fast as envs step: `shoal.learn.train("CartPole-v1", num_envs=64, target_return=475)`.

One algorithm (`ppo`) and three ways to make its experience: `host` (any pool), `compiled` (the policy in the loop of
compiled envs) and `cuda` (all of it as CUDA graphs). `training` has the loop, checkpoints and logs. Needs torch (extra
`learn`). The package may import `make` and all packages below it; only `cli` imports it. Read `ppo` first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.support.optional_dependencies import modules_of, require

if TYPE_CHECKING:
    from shoal.learn.ppo import Hyperparameters, Learner, Policy
    from shoal.learn.training import Trained, load_policy, train

__all__ = ["Hyperparameters", "Learner", "Policy", "Trained", "load_policy", "train"]

_PLACES = {
    "Hyperparameters": "shoal.learn.ppo", "Learner": "shoal.learn.ppo", "Policy": "shoal.learn.ppo",
    "Trained": "shoal.learn.training", "load_policy": "shoal.learn.training", "train": "shoal.learn.training",
}  # fmt: skip
_module = modules_of(__name__)


def __getattr__(name: str) -> Any:
    """Import what is asked for: torch takes seconds to load."""
    if name not in _PLACES:
        return _module(name)
    require("torch", "shoal.learn needs torch", "learn")
    return getattr(require(_PLACES[name], "shoal.learn needs torch", "learn"), name)

"""The options of functional envs, and the pytrees that they take and return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax

from shoal.errors import BadCall

Tree = Any  # arrays, nested
Autoreset = Literal["next_step", "same_step", "disabled"]
Rng = Literal["threefry", "fast"]
Resets = Literal["auto", "prepared", "fused"]


@dataclass(frozen=True)
class FunctionalOptions:
    """How functional envs run.

    Attributes:
        autoreset: what happens to a lane after the end of an episode. "next_step": its next step is a reset;
            "same_step": it is reset at once; "disabled": it stays as it is, with reward 0, until `reset_rows`.
        params: of the env; its default ones if None.
        max_episode_steps: truncates episodes, in addition to what the env does itself.
        rng: "threefry", JAX's own, or "fast": a hash with a fifth of its cost, good enough for starts and noise. All
            that the env draws by `jax.random` comes from it.
        resets: "fused": the start of a new episode is computed in every step, for all lanes, and mostly not used;
            "prepared": only when a lane needs one, and in rollouts for all lanes at once, ahead. "auto" is "prepared"
            on CPUs and "fused" elsewhere.

    Raises:
        BadCall: an option has a value that it cannot have.
    """

    autoreset: Autoreset = "next_step"
    params: Any = None
    max_episode_steps: int | None = None
    rng: Rng = "threefry"
    resets: Resets = "auto"

    def __post_init__(self) -> None:
        for name, allowed in (("autoreset", Autoreset), ("rng", Rng), ("resets", Resets)):
            check_one_of(name, getattr(self, name), get_args(allowed))
        if self.max_episode_steps is not None and self.max_episode_steps < 1:
            raise BadCall(f"max_episode_steps: expected at least 1 or None, found {self.max_episode_steps}")

    @property
    def prepares(self) -> bool:
        """Say whether starts of episodes are computed only when a lane needs one."""
        return self.resets == "prepared" or (self.resets == "auto" and jax.default_backend() == "cpu")


def check_one_of(what: str, found: Any, allowed: Sequence[str]) -> None:
    """Raise BadCall unless the value is one of the allowed words."""
    if found not in allowed:
        raise BadCall(f"{what}: expected one of {', '.join(allowed)}, found {found!r}")


class Spare(NamedTuple):
    """The start of each lane's next episode, computed for all lanes at once and before most of them need it.

    Attributes:
        inner, obs: as in FunctionalState.
        fresh: bool [n], False where the lane has used it up.
    """

    inner: Tree
    obs: Tree
    fresh: jax.Array


class FunctionalState(NamedTuple):
    """The whole state of the envs, as a pytree; n is the number of lanes.

    Attributes:
        inner: the envs' own states, [n, ...].
        obs: the last observations, [n, ...], nested as the observation space is.
        keys: typed keys [n]; all random numbers of a lane come from its key.
        episode: int32 [n], from 0 since the lane was seeded.
        steps: int32 [n], of the running episode.
        over: uint8 [n], 0 while the episode runs; 1 terminated, 2 truncated, 3 both, until the lane is reset.
        rollouts: int32 [n], how many there were, the same for all lanes: each rollout draws other random actions.
        spare: None, or see `BatchedFunctionalEnv.prepare`.
    """

    inner: Tree
    obs: Tree
    keys: jax.Array
    episode: jax.Array
    steps: jax.Array
    over: jax.Array
    rollouts: jax.Array
    spare: Spare | None = None


class FunctionalStep(NamedTuple):
    """The answers of the envs to one step.

    Attributes:
        obs: [n, ...].
        reward: float32 [n].
        terminated, truncated: bool [n].
        began: bool [n], True where `obs` is the first of an episode.
        final_obs: None, and under `autoreset="same_step"` what `obs` would have been without the reset, [n, ...].
        info: the env's own, [n, ...]; zeros where a lane was reset instead of stepped.
    """

    obs: Tree
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    began: jax.Array
    final_obs: Tree
    info: Tree


class RolloutSummary(NamedTuple):
    """Sums over a rollout, one for each lane.

    Attributes:
        reward: float32 [n].
        episodes: int32 [n], how many ended.
        steps: int32 [n], the steps of the env; a reset in place of a step does not count.
    """

    reward: jax.Array
    episodes: jax.Array
    steps: jax.Array


class Trajectory(NamedTuple):
    """A rollout of T steps: arrays [T, n, ...], or None for what was not collected.

    Attributes:
        obs: the policy's observations, before the step.
        action: its actions.
        reward, terminated, truncated, began, final_obs, info: the answers, see FunctionalStep.
        summary: sums, which are always there.
    """

    obs: Tree
    action: Tree
    reward: jax.Array | None
    terminated: jax.Array | None
    truncated: jax.Array | None
    began: jax.Array | None
    final_obs: Tree
    info: Tree
    summary: RolloutSummary


COLLECTED = tuple(name for name in Trajectory._fields if name != "summary")

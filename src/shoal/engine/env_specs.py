"""What the envs of a pool have in common: their spaces, batched, and their metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium import Space
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from shoal.errors import SpaceMismatch
from shoal.memory.messages import BlockSummary


@dataclass(frozen=True)
class EnvSpecs:
    """Spaces of one env and of all, and what the first env says about itself."""

    single_observation_space: Space[Any]
    observation_space: Space[Any]
    single_action_space: Space[Any]
    action_space: Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any
    name: str = ""


def agree(summaries: Sequence[BlockSummary], num_envs: int, mode: str | tuple[Space[Any], Space[Any]]) -> EnvSpecs:
    """Compare all envs' spaces with the first one's.

    Raises:
        SpaceMismatch: naming the first env that differs.
    """
    pairs = [pair for summary in summaries for pair in _of_lanes(summary)]
    first_obs, first_action = pairs[0]
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, Space) for space in mode):
            raise TypeError(f"observation_mode: expected a pair of spaces, found {mode!r}")
        batched, single = mode
    elif mode == "same":
        single, batched = first_obs, batch_space(first_obs, num_envs)
    elif mode == "different":
        single = first_obs
    else:
        raise ValueError(f"observation_mode: expected 'same', 'different' or a pair of spaces, found {mode!r}")
    seen: set[tuple[int, int]] = set()  # spaces take long to compare, and most envs share them
    for env_id, (obs, action) in enumerate(pairs):
        if (id(obs), id(action)) not in seen:
            _compare(env_id, obs, action, single, first_action, mode)
            seen.add((id(obs), id(action)))
    if mode == "different":
        batched = batch_differing_spaces([obs for obs, _ in pairs])
    about = summaries[0]
    return EnvSpecs(
        single,
        batched,
        first_action,
        batch_space(first_action, num_envs),
        about.metadata,
        about.render_mode,
        about.spec,
        about.name,
    )


def _of_lanes(summary: BlockSummary) -> list[Any]:
    """The spaces of each lane."""
    pairs = [summary.spaces[which] for which in summary.which]
    if not summary.lanes:
        return pairs
    return [pair for pair, lanes in zip(pairs, summary.lanes, strict=True) for _ in range(lanes.size)]


def _compare(env_id: int, obs: Any, action: Any, single: Any, first_action: Any, mode: Any) -> None:
    if mode == "same" and obs != single:
        hint = '; if only the bounds differ, use observation_mode="different"'
        if not is_space_dtype_shape_equiv(obs, single):
            hint = ""
        raise SpaceMismatch(f"env {env_id} has the observation space {obs}, and env 0 has {single}{hint}")
    if mode != "same" and not is_space_dtype_shape_equiv(obs, single):
        raise SpaceMismatch(
            f"env {env_id} has the observation space {obs}, which differs from {single} in shape or type"
        )
    if action != first_action:
        raise SpaceMismatch(f"env {env_id} has the action space {action}, and env 0 has {first_action}")

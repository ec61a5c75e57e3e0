"""Which lanes of a pool are one env's: they are asked, answered and lost together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.envs.group import MODES
from shoal.errors import BadCall, BadEnv
from shoal.memory.messages import LaneGroup
from shoal.support.checks import Ids


def choose_mode(asked: str | None, groups: Sequence[LaneGroup]) -> str:
    """The autoreset mode of a pool: as asked for, or one that all of its envs can do.

    Raises:
        BadEnv: one of them cannot do what was asked for, or they have none in common.
    """
    common = [mode for mode in MODES if all(mode in lanes.modes for lanes in groups)]
    if not common:
        raise BadEnv("the envs reset by themselves, and not in the same way: give each kind a pool of its own")
    if asked is None:
        return common[0]
    if asked not in common:
        ways = " or ".join(f'autoreset="{mode}"' for mode in common)
        raise BadEnv(f'the envs reset by themselves, each all of its lanes: they need {ways}, found "{asked}"')
    return asked


class LaneGroups:
    """The groups of a pool's lanes; where envs have one lane each, there are none.

    Attributes:
        some: whether there are any.
        size: lanes in a group; 0 where they differ.
        leader: int64 [lanes]: the last lane of each one's group; None where there are none.

    Args:
        replaces: whether lost envs are replaced: with all of their lanes, so that these can only be asked together.
    """

    def __init__(self, groups: Sequence[LaneGroup], replaces: bool = False):
        if replaces and any(lanes.size > 1 and not lanes.together for lanes in groups):
            raise BadEnv("on_error and recycle_after: the lanes of these envs are asked one by one, and lost together")
        self._groups = list(groups)
        bound = [lanes.size for lanes in groups if lanes.together]
        self.some = bool(bound)
        counts = np.array([lanes.size for lanes in groups] if self.some else [], np.int64)
        self.size = int(counts[0]) if self.some and (counts == counts[0]).all() else 0
        stops = np.cumsum(counts)
        self.leader: Any = np.repeat(stops - 1, counts) if self.some else None
        self._first: Any = np.repeat(stops - counts, counts) if self.some else None
        self._resets_alone = all(lanes.resets_alone for lanes in groups) and not replaces

    def last_of(self, lane: int) -> int:
        """The last lane of the group: once it has answered, all of them have."""
        return int(self.leader[lane]) if self.some else lane

    def of(self, lane: int) -> Ids:
        """All lanes of this one's group."""
        return np.arange(self._first[lane], self.leader[lane] + 1) if self.some else np.array([lane])

    def check_whole(self, ids: Ids, what: str) -> None:
        """Raise BadCall unless these are whole groups, each in its order."""
        if not self.some or (what == "reset" and self._resets_alone):
            return
        i = 0
        while i < len(ids):
            own = self.of(int(ids[i]))
            if not np.array_equal(ids[i : i + len(own)], own):
                raise BadCall(
                    f"{what}: lanes {own[0]} to {own[-1]} are those of one env, which takes all of them at once: give "
                    f"them together and in order, found {ids[:8].tolist()}"
                )
            i += len(own)

    def check_none_stays(self, ids: Ids, busy: Ids, what: str) -> None:
        """Raise BadCall where only some of the busy lanes of an env are among these."""
        if not self.some:
            return
        taken = np.isin(busy, ids)
        cut = np.intersect1d(self.leader[busy[taken]], self.leader[busy[~taken]])
        if len(cut):
            own = self.of(int(cut[0]))
            raise BadCall(
                f"{what}: lanes {own[0]} to {own[-1]} are those of one env, and answer together: give all of them, "
                f"found {ids[:8].tolist()}"
            )

    def lanes_of(self, envs: int, lanes: int) -> int:
        """How many lanes so many envs have. Raises ValueError where that depends on which."""
        if envs == len(self._groups) or not self._groups:
            return lanes if self._groups else envs
        sizes = {group.size for group in self._groups}
        if len(sizes) > 1:
            raise ValueError("batch_envs: envs have different numbers of lanes, so batches must have all of them")
        return envs * sizes.pop()

    def check_batch(self, batch_size: int, lanes: int) -> None:
        """Raise ValueError for batches that would cut a group in two."""
        if not self.some or batch_size == lanes:
            return
        if not self.size:
            raise ValueError("batch_size: envs have different numbers of lanes, so batches must have all of them")
        if batch_size % self.size:
            raise ValueError(
                f"batch_size: expected a multiple of {self.size}, the lanes of one env, found {batch_size}"
            )

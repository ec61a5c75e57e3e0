"""What the adapters of envs that are batches already have in common: all rows are stepped at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.envs.group import Answers, GroupAdapter, Infos
from shoal.errors import BadObservation
from shoal.memory.copies import own_copy
from shoal.spaces.leaves import Array, get_path


class BatchLanes(GroupAdapter):
    """An env that is a batch: all rows are stepped at once, and observations are copied into the pool's batch."""

    def _begin_all(self, obs: Any, out: Answers) -> None:
        self._write(out.obs, obs)
        self._episodes.begun(slice(None), out)

    def step(self, rows: Array, actions: Any, out: Answers) -> Infos:
        infos = self._step_all(actions, out)
        self._episodes.note(out)
        return self._infos(infos, rows)

    def _infos(self, infos: Any, rows: Array) -> Infos:
        """Split the env's infos into a dict for each row."""
        return by_lane(infos, rows)

    def _step_all(self, actions: Any, out: Answers) -> Any:
        """Step the env, write its answer, and return its infos as they are."""
        own = own_copy(actions)  # which the env may keep
        obs, out.reward[:], out.terminated[:], out.truncated[:], infos = self.env.step(own)
        self._write(out.obs, obs)
        return infos

    def _write(self, targets: Sequence[Array], obs: Any, at: Any = ..., rows: Any = ...) -> None:
        """Write these rows of a batch of observations to the places `at`."""
        for leaf, target in zip(self._leaves, targets, strict=True):
            array, expected = np.asarray(get_path(obs, leaf.path)), (self.num_lanes, *leaf.shape)
            if array.shape != expected or not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
                raise BadObservation(
                    f"observation{leaf.name}: expected {leaf.dtype} of shape {expected}, one row for each lane, "
                    f"found {array.dtype} of shape {array.shape}"
                )
            target[at] = array[rows]


def by_lane(infos: Mapping[str, Any], rows: Array) -> Infos:
    """Split a vector env's infos into a dict for each row: each name has a column, and `_name` marks its rows."""
    if not infos:
        return None
    found: list[dict[str, Any]] = [{} for _ in rows]
    for name, column in infos.items():
        if name.startswith("_") and name[1:] in infos:
            continue
        has_it = infos.get(f"_{name}")
        for i, row in enumerate(rows.tolist()):
            if has_it is None or has_it[row]:
                found[i][name] = _cell(column, row)
    return found


def _cell(column: Any, row: int) -> Any:
    if isinstance(column, Mapping):
        inner = by_lane(column, np.array([row]))
        return inner[0] if inner else {}
    return column[row]

"""One space for agents with different spaces, and the way from an agent's own values to it and back.

Equal spaces stay as they are. Boxes are padded with zeros, Discretes get the widest range, and Dicts and Tuples of them
keep their keys. Observations that have nothing in common are flattened into rows, as Gymnasium does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from shoal.errors import BadAction, BadEnv, BadObservation
from shoal.spaces.leaves import Array, Leaf, array_leaves, assemble, flatten, get_path, write_observation

Crop = tuple[Any, ...]  # an index of the last dimensions: the part of the shared shape that a smaller array fills


class SharedSpace:
    """One space for all agents. Raises BadEnv if there is none.

    Args:
        what: "observation" or "action". Only observations may be flattened.

    Attributes:
        space: the one for all.
        own, own_leaves: the space of each agent, and its leaves.
        leaves: of `space`.
        same: whether the spaces of all agents are equal.
        flat: whether values are flattened rows.
    """

    def __init__(self, what: str, names: Sequence[Any], own: Sequence[Space[Any]]):
        self.own, self._names = list(own), list(names)
        self.own_leaves = [array_leaves(what, space, "a batch of agents") for space in self.own]
        joined = _join(self.own)
        self.same = all(space == self.own[0] for space in self.own)
        self.flat = joined is None
        if joined is None:
            if what == "action":
                raise BadEnv(
                    "the agents' action spaces cannot be brought together: "
                    + ", ".join(f"{name!r} has {space}" for name, space in zip(names, own, strict=True))
                    + ". Boxes of one type, or Discretes, can be: bring the others into such a form by a wrapper"
                )
            joined = _flat_space(self.own)
        self.space: Space[Any] = joined
        self.leaves: tuple[Leaf, ...] = array_leaves(what, joined, "a batch of agents")
        self._columns = [_columns(space) for space in self.own] if self.flat else []
        self._crops: list[list[Crop]] = [] if self.flat else [self._crops_of(leaves) for leaves in self.own_leaves]

    def _crops_of(self, own_leaves: Sequence[Leaf]) -> list[Crop]:
        pairs = zip(own_leaves, self.leaves, strict=True)
        return [() if own.shape == leaf.shape else (..., *map(slice, own.shape)) for own, leaf in pairs]

    def write(self, agent: int, value: Any, targets: Sequence[Array], row: int) -> None:
        """Write an agent's own observation into this row of an array for each leaf. Raises BadObservation."""
        try:
            if self.flat:
                self._write_flat(agent, value, targets[0][row])
                return
            parts = zip(self.own_leaves[agent], targets, self._crops[agent], strict=True)
            is_array = type(value) is np.ndarray
            for leaf, target, crop in parts:
                if crop:
                    target[row] = 0
                place = (row, *crop)
                if is_array and not leaf.path and value.dtype == leaf.dtype and value.shape == leaf.shape:
                    target[place] = value  # it needs no further check
                else:
                    write_observation([leaf], [target], place, value)
        except BadObservation as error:
            raise BadObservation(f"agent {self._names[agent]!r}: {error}") from error

    def _write_flat(self, agent: int, value: Any, row: Array) -> None:
        width = self._columns[agent][-1][1].stop if self._columns[agent] else 0
        try:
            flat = np.asarray(spaces.flatten(self.own[agent], value))
            row[:width] = flat.reshape(width)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise BadObservation(f"expected an observation of {self.own[agent]}, found {value!r:.200}") from error
        row[width:] = 0

    def take(self, agent: int, values: Sequence[Array]) -> Any:
        """An agent's own values, from one array for each leaf with the leaf's dimensions last.

        They are views, except for observations that were flattened.
        """
        if self.flat:
            rows = values[0]
            return assemble(self.own[agent], [_unflatten(space, rows[..., at]) for space, at in self._columns[agent]])
        parts = zip(self.own_leaves[agent], values, self._crops[agent], strict=True)
        own = [array[crop or ...].astype(leaf.dtype, copy=False) for leaf, array, crop in parts]
        return assemble(self.own[agent], own)

    def take_action(self, agent: int, values: Sequence[Array], row: int) -> Any:
        """An agent's own action, copied from a row of one array for each leaf. Raises BadAction."""
        own = []
        for leaf, array, crop in zip(self.own_leaves[agent], values, self._crops[agent], strict=True):
            value, low, high = array[row][crop] if crop else array[row], leaf.low, leaf.high
            if leaf.scalar and low is not None and high is not None and not low <= value <= high:
                raise BadAction(
                    f"agent {self._names[agent]!r}: its action space{leaf.name} has n={high - low + 1}, "
                    f"expected {low} to {high}, found {value}"
                )
            own.append(np.array(value, leaf.dtype) if leaf.shape else leaf.dtype.type(value))
        return assemble(self.own[agent], own)

    def put_actions(self, agent: int, actions: Sequence[Array], targets: Sequence[Array]) -> None:
        """Write a batch of an agent's own actions, one array for each leaf, into arrays of the shared space."""
        for array, target, crop in zip(actions, targets, self._crops[agent], strict=True):
            target[crop or ...] = array


def _join(own: Sequence[Any]) -> Space[Any] | None:
    """A space that holds the values of all of them, padded if they are smaller; None if there is none."""
    first: Space[Any] = own[0]
    if all(space == first for space in own):
        return first
    if any(type(space) is not type(first) for space in own):
        return None
    if isinstance(first, spaces.Dict | spaces.Tuple):
        keys = [list(space if isinstance(space, spaces.Dict) else range(len(space))) for space in own]
        if any(others != keys[0] for others in keys):
            return None
        parts: dict[Any, Any] = {key: _join([space[key] for space in own]) for key in keys[0]}
        if None in parts.values():
            return None
        return spaces.Dict(parts) if isinstance(first, spaces.Dict) else spaces.Tuple(list(parts.values()))
    if isinstance(first, spaces.Box):
        return _join_boxes(own)
    return _join_discretes(own) if isinstance(first, spaces.Discrete) else None


def _join_boxes(own: Sequence[Any]) -> Space[Any] | None:
    if len({(len(space.shape), space.dtype) for space in own}) != 1:
        return None
    shape = tuple(map(max, *(space.shape for space in own)))
    low = np.min([_padded(space.low, shape) for space in own], axis=0)
    high = np.max([_padded(space.high, shape) for space in own], axis=0)
    return spaces.Box(low, high, shape, own[0].dtype)


def _padded(array: Array, shape: tuple[int, ...]) -> Array:
    whole = np.zeros(shape, array.dtype)
    whole[tuple(map(slice, array.shape))] = array
    return whole


def _join_discretes(own: Sequence[Any]) -> Space[Any] | None:
    if len({space.dtype for space in own}) != 1:
        return None
    start, stop = min(int(space.start) for space in own), max(int(space.start) + int(space.n) for space in own)
    other_type = (
        {} if own[0].dtype == np.int64 else {"dtype": own[0].dtype}
    )  # older versions of Gymnasium know int64 only
    return spaces.Discrete(stop - start, start=start, **other_type)


def _flat_space(own: Sequence[Space[Any]]) -> Space[Any]:
    # float64 if float32 does not hold all numbers; a choice becomes zeros and a one.
    boxes = [leaf.dtype for space in own for leaf in flatten(space) if not leaf.discrete]
    width = max(spaces.flatdim(space) for space in own)
    return spaces.Box(-np.inf, np.inf, (width,), np.result_type(np.float32, *boxes).type)


def _columns(space: Space[Any]) -> list[tuple[Space[Any], slice]]:
    """The innermost parts of a space, and their columns in a flattened row."""
    leaves = [get_path(space, leaf.path) for leaf in flatten(space)]
    stops = np.cumsum([spaces.flatdim(leaf) for leaf in leaves]).tolist()
    return [(leaf, slice(start, stop)) for leaf, start, stop in zip(leaves, [0, *stops], stops, strict=False)]


def _unflatten(space: Space[Any], part: Array) -> Array:
    """One leaf from its columns in flattened rows. Of choices, the one with the largest number is taken."""
    if isinstance(space, spaces.Discrete):
        return np.asarray(part.argmax(-1) + space.start, space.dtype)
    if isinstance(space, spaces.MultiDiscrete):
        ends = np.cumsum(space.nvec.ravel())[:-1]
        chosen = np.stack([choices.argmax(-1) for choices in np.split(part, ends, axis=-1)], axis=-1)
        return (chosen.reshape(*part.shape[:-1], *space.shape) + space.start).astype(space.dtype)
    return part.reshape(*part.shape[:-1], *space.shape).astype(space.dtype, copy=False)  # type: ignore[misc]

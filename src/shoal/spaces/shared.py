"""One space for agents with different spaces, and the way from an agent's own values to it and back.

Equal spaces stay as they are. Boxes are padded with zeros, Discretes get the widest range, and Dicts and Tuples of them
keep their keys. Observations that have nothing in common are flattened into rows, as Gymnasium does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces

from shoal.errors import BadAction, BadEnv, BadObservation
from shoal.spaces.leaves import Leaf, array_leaves, assemble, write_observation

Array = npt.NDArray[Any]
Crop = tuple[Any, ...]  # an index of the last dimensions: the part of the shared shape that a smaller array fills


class _Column(NamedTuple):
    """The columns of a flattened row that hold one leaf of an agent's own space."""

    space: Space[Any]
    start: int
    stop: int


class SharedSpace:
    """One space for all agents.

    Args:
        what: "observation" or "action". Only observations may be flattened.
        names: of the agents.
        own: the space of each agent.

    Attributes:
        space: the one for all.
        own: the space of each agent.
        leaves: of `space`.
        same: whether the spaces of all agents are equal.
        flat: whether values are flattened rows.

    Raises:
        BadEnv: there is no space for all of them.
    """

    def __init__(self, what: str, names: Sequence[Any], own: Sequence[Space[Any]]):
        self.own, self._names = list(own), list(names)
        own_leaves = [array_leaves(what, space, "a batch of agents") for space in self.own]
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
        self._own_leaves = own_leaves
        self._columns = [_columns(space) for space in self.own] if self.flat else []
        self._crops: list[list[Crop]] = [] if self.flat else [self._crops_of(leaves) for leaves in own_leaves]

    def _crops_of(self, own_leaves: Sequence[Leaf]) -> list[Crop]:
        pairs = zip(own_leaves, self.leaves, strict=True)
        return [() if own.shape == leaf.shape else (..., *map(slice, own.shape)) for own, leaf in pairs]

    def write(self, agent: int, value: Any, targets: Sequence[Array], row: int) -> None:
        """Write an agent's own observation into this row of an array for each leaf.

        Raises:
            BadObservation: it does not fit the agent's own space.
        """
        try:
            if self.flat:
                self._write_flat(agent, value, targets[0][row])
                return
            parts = zip(self._own_leaves[agent], targets, self._crops[agent], strict=True)
            for leaf, target, crop in parts:
                if crop:
                    target[row] = 0
                place = (row, *crop)
                if not leaf.path and _is_exactly(value, leaf):
                    target[place] = value  # it needs no further check
                else:
                    write_observation([leaf], [target], place, value)
        except BadObservation as error:
            raise BadObservation(f"agent {self._names[agent]!r}: {error}") from error

    def _write_flat(self, agent: int, value: Any, row: Array) -> None:
        width = self._columns[agent][-1].stop if self._columns[agent] else 0
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
            return assemble(self.own[agent], [_unflatten(column, values[0]) for column in self._columns[agent]])
        parts = zip(self._own_leaves[agent], values, self._crops[agent], strict=True)
        own = [array[crop or ...].astype(leaf.dtype, copy=False) for leaf, array, crop in parts]
        return assemble(self.own[agent], own)

    def take_action(self, agent: int, values: Sequence[Array], row: int) -> Any:
        """An agent's own action, copied from a row of one array for each leaf.

        Raises:
            BadAction: it is not in the agent's own space.
        """
        own = []
        for leaf, array, crop in zip(self._own_leaves[agent], values, self._crops[agent], strict=True):
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

    def action_leaves(self, agent: int) -> tuple[Leaf, ...]:
        """The leaves of an agent's own space."""
        return self._own_leaves[agent]


def _is_exactly(value: Any, leaf: Leaf) -> bool:
    return type(value) is np.ndarray and value.dtype == leaf.dtype and value.shape == leaf.shape


def _join(own: Sequence[Space[Any]]) -> Space[Any] | None:
    """A space that holds the values of all of them, padded if they are smaller; None if there is none."""
    first = own[0]
    if all(space == first for space in own):
        return first
    if any(type(space) is not type(first) for space in own):
        return None
    if isinstance(first, spaces.Dict):
        if any(list(space) != list(first) for space in own):  # type: ignore[call-overload]
            return None
        parts = {key: _join([space[key] for space in own]) for key in first}  # type: ignore[index]
        return None if None in parts.values() else spaces.Dict(parts)  # type: ignore[arg-type]
    if isinstance(first, spaces.Tuple):
        if any(len(space) != len(first) for space in own):  # type: ignore[arg-type]
            return None
        items = [_join([space[i] for space in own]) for i in range(len(first))]  # type: ignore[index]
        return None if None in items else spaces.Tuple(items)  # type: ignore[arg-type]
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
    boxes = [leaf.dtype for space in own for leaf in _leaf_spaces(space) if isinstance(leaf, spaces.Box)]
    width = max(spaces.flatdim(space) for space in own)
    return spaces.Box(-np.inf, np.inf, (width,), np.result_type(np.float32, *boxes).type)


def _columns(space: Space[Any]) -> list[_Column]:
    found: list[_Column] = []
    for leaf in _leaf_spaces(space):
        start = found[-1].stop if found else 0
        found.append(_Column(leaf, start, start + spaces.flatdim(leaf)))
    return found


def _leaf_spaces(space: Space[Any]) -> Iterator[Space[Any]]:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for part in space.values() if isinstance(space, spaces.Dict) else space:
            yield from _leaf_spaces(part)
    else:
        yield space


def _unflatten(column: _Column, rows: Array) -> Array:
    """One leaf from flattened rows. Of choices, the one with the largest number is taken."""
    space, part = column.space, rows[..., column.start : column.stop]
    if isinstance(space, spaces.Discrete):
        return np.asarray(part.argmax(-1) + space.start, space.dtype)
    if isinstance(space, spaces.MultiDiscrete):
        ends = np.cumsum(space.nvec.ravel())[:-1]
        chosen = np.stack([choices.argmax(-1) for choices in np.split(part, ends, axis=-1)], axis=-1)
        return (chosen.reshape(*rows.shape[:-1], *space.shape) + space.start).astype(space.dtype)
    return part.reshape(*rows.shape[:-1], *space.shape).astype(space.dtype, copy=False)  # type: ignore[misc]

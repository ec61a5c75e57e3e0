"""Turns a Gymnasium space into the flat list of leaves that the slab stores, and nests values back into its shape.

A leaf is an array of fixed type and shape (Box, Discrete, MultiDiscrete, MultiBinary), a bounded text, or an object
(Graph, Sequence, OneOf, custom spaces), which workers send as a message instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces

from shoal import native
from shoal.errors import BadAction, BadEnv, BadObservation, ShoalError

Array = npt.NDArray[Any]
Path = tuple[Any, ...]
Check = Literal["all", "discrete", "none"]  # which actions must be within their bounds


class Kind(Enum):
    """How a leaf is stored."""

    ARRAY = "array"
    TEXT = "text"
    OBJECT = "object"


@dataclass(frozen=True)
class Leaf:
    """One innermost part of a space.

    Attributes:
        path: the keys and indices that lead to it from the outside; () if the space itself is a leaf.
        shape: of one env's value.
        dtype: of the field; `object` for a leaf that is sent in messages.
        low, high: inclusive bounds in the field's own type, broadcast to `shape`; None if there are none.
        discrete: whether values are numbers of choices. Many envs accept values out of bounds for a Box.
    """

    path: Path
    kind: Kind
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    discrete: bool = False
    scalar: bool = False
    low: Array | None = field(default=None, repr=False)
    high: Array | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Its name in messages, such as "['camera'][0]"."""
        return "".join(f"[{key!r}]" for key in self.path)

    @property
    def code(self) -> str:
        """The native core's letter for its type: f, i, u, b for arrays, n for one integer, o for the rest."""
        if self.kind is not Kind.ARRAY:
            return "o"
        return "n" if self.scalar else self.dtype.kind

    def is_checked(self, check: Check) -> bool:
        """Whether its values must be within their bounds."""
        return check == "all" or (check == "discrete" and self.discrete)

    @property
    def nbytes(self) -> int:
        """Size of one env's value in the slab."""
        return self.dtype.itemsize * math.prod(self.shape)


def flatten(space: Space[Any], path: Path = ()) -> tuple[Leaf, ...]:
    """The leaves of a space, in the order in which Gymnasium batches them."""
    if isinstance(space, spaces.Dict):
        return tuple(leaf for key, sub in space.spaces.items() for leaf in flatten(sub, (*path, key)))
    if isinstance(space, spaces.Tuple):
        return tuple(leaf for i, sub in enumerate(space.spaces) for leaf in flatten(sub, (*path, i)))
    return (_leaf(space, path),)


def _leaf(space: Space[Any], path: Path) -> Leaf:
    if isinstance(space, spaces.Box):
        return _array_leaf(path, space.shape, space.dtype, space.low, space.high)
    if isinstance(space, spaces.Discrete):
        start, n = int(space.start), int(space.n)
        return _array_leaf(path, (), space.dtype, start, start + n - 1, discrete=True, scalar=True)
    if isinstance(space, spaces.MultiDiscrete):
        low = np.asarray(space.start)
        return _array_leaf(path, space.shape, space.dtype, low, low + space.nvec - 1, discrete=True)
    if isinstance(space, spaces.MultiBinary):
        return _array_leaf(path, space.shape, space.dtype, 0, 1, discrete=True)
    if isinstance(space, spaces.Text) and "\0" not in space.character_set:
        return Leaf(path, Kind.TEXT, (), np.dtype(f"<U{space.max_length}"))
    return Leaf(path, Kind.OBJECT, (), np.dtype(object))


def _array_leaf(
    path: Path, shape: Any, dtype: Any, low: Any, high: Any, discrete: bool = False, scalar: bool = False
) -> Leaf:
    dtype = np.dtype(dtype)
    # Not ascontiguousarray, which gives a number an axis.
    bounds = [np.array(np.broadcast_to(np.asarray(b, dtype), shape), order="C") for b in (low, high)]
    return Leaf(path, Kind.ARRAY, tuple(shape), dtype, discrete, scalar, *bounds)


def array_leaves(what: str, space: Space[Any], where: str) -> tuple[Leaf, ...]:
    """The leaves of a space. Raises BadEnv if one is no array, which `where`, such as "a graph", cannot hold."""
    leaves = flatten(space)
    for leaf in leaves:
        if leaf.kind is not Kind.ARRAY:
            raise BadEnv(
                f"{where} holds numbers, and the {what} space{leaf.name} is a {leaf.kind.value} in {space}: leave it "
                "out by a wrapper around the env"
            )
    return leaves


class AsGiven(Space[Any]):
    """Stands for a space whose values are handed on as they are, of whatever type: its leaf is an object."""


def loosened(space: Space[Any]) -> Space[Any]:
    """The space of actions that may be of another type than they say: Boxes of integers take anything."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: loosened(sub) for key, sub in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([loosened(sub) for sub in space.spaces])
    whole = isinstance(space, spaces.Box) and np.dtype(space.dtype).kind in "iu"
    return AsGiven() if whole else space


def row_layout(leaves: Sequence[Leaf]) -> tuple[list[int], int]:
    """Lay leaves out in a row like a C struct, each aligned for its type.

    Returns the first byte of each leaf, and the size of a row: a multiple of the largest item, so that rows can lie
    next to each other.
    """
    starts: list[int] = []
    widest, end = 1, 0
    for leaf in leaves:
        item = max(leaf.dtype.itemsize, 1)
        starts.append(-(-end // item) * item)
        end = starts[-1] + leaf.nbytes
        widest = math.lcm(widest, item)
    return starts, -(-end // widest) * widest


def assemble(space: Space[Any], values: Sequence[Any]) -> Any:
    """Nest one value for each leaf like the space: dicts for Dict, tuples for Tuple."""
    return _assemble(space, iter(values))


def _assemble(space: Space[Any], values: Iterator[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _assemble(sub, values) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_assemble(sub, values) for sub in space.spaces)
    return next(values)


def batched(space: Space[Any], samples: Sequence[Any]) -> Any:
    """One sample of the space for each env as a batch of actions. Raises BadAction where one lacks a part."""
    parts = [[part_of(sample, leaf, "an action", BadAction) for sample in samples] for leaf in flatten(space)]
    return assemble(space, parts)


def get_path(value: Any, path: Path) -> Any:
    """Follow keys and indices into a nested value."""
    for key in path:
        value = value[key]
    return value


def part_of(value: Any, leaf: Leaf, what: str, error: type[ShoalError]) -> Any:
    """The part of a nested value that belongs to a leaf. Raises `error` if there is none."""
    try:
        return get_path(value, leaf.path)
    except (KeyError, IndexError, TypeError) as cause:
        keys = f"its keys are {sorted(map(str, value))}" if isinstance(value, Mapping) else ""
        raise error(f"{what} has no part {leaf.name}: {keys or f'it is of type {type(value).__name__}'}") from cause


def as_array(value: Any, leaf: Leaf, what: str, error: type[ShoalError]) -> Array:
    """The value of a leaf as an array. Raises `error` if it cannot be one."""
    try:
        return np.asarray(value)
    except ValueError as cause:
        raise error(f"{what}{leaf.name} cannot be made into one array: {cause}") from cause


def read_actions(leaves: Sequence[Leaf], actions: Any, ids: Sequence[int] | Array, check: Check) -> list[Any]:
    """Check a batch of actions and take it apart: one array [len(ids), ...] or list of objects for each leaf.

    Raises BadAction if one does not fit, which names the env, what was expected and what was found.
    """
    return [_read_leaf(leaf, actions, ids, check) for leaf in leaves]


def _read_leaf(leaf: Leaf, actions: Any, ids: Sequence[int] | Array, check: Check) -> Any:
    value = part_of(actions, leaf, "the batch of actions", BadAction)
    if leaf.kind is not Kind.ARRAY:
        return _read_objects(leaf, value, len(ids))
    array = _read_array(leaf, value, len(ids))
    if leaf.dtype.kind == "f":
        # Before the check: a bound of 0.7 in float32 is less than 0.7 in float64.
        array = array.astype(leaf.dtype, copy=False)
    if leaf.is_checked(check):
        _check_bounds(leaf, array, ids)
    if array.dtype == leaf.dtype:
        return array
    cast = array.astype(leaf.dtype)
    if leaf.dtype.kind in "iu" and not np.array_equal(cast, array):  # 300 must not become 44 in a uint8
        raise BadAction(f"actions{leaf.name}: expected numbers that fit into {leaf.dtype}, found {array}")
    return cast


def _read_objects(leaf: Leaf, value: Any, count: int) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
        raise BadAction(
            f"actions{leaf.name}: expected a sequence of {count} items, one per env, found {type(value).__name__}"
        )
    items = list(value)
    if len(items) != count:
        raise BadAction(f"actions{leaf.name}: expected {count} items, one per env, found {len(items)}")
    if leaf.kind is Kind.TEXT:
        return [_checked_text(leaf, item, f"actions{leaf.name}[{i}]", BadAction) for i, item in enumerate(items)]
    return items


def _read_array(leaf: Leaf, value: Any, count: int) -> Array:
    array = as_array(value, leaf, "actions", BadAction)
    allowed = {"f": "fiub", "b": "b"}.get(leaf.dtype.kind, "iub")
    if array.dtype.kind not in allowed and array.dtype != leaf.dtype:
        raise BadAction(f"actions{leaf.name}: expected type {leaf.dtype}, found {array.dtype}")
    expected = (count, *leaf.shape)
    if array.shape != expected:
        raise BadAction(
            f"actions{leaf.name}: expected shape {expected}, one row for each of {count} envs, found {array.shape}"
        )
    return array


def _check_bounds(leaf: Leaf, array: Array, ids: Sequence[int] | Array) -> None:
    assert leaf.low is not None
    assert leaf.high is not None
    at = -2
    if array.dtype == leaf.dtype:
        at = native.outside(leaf.dtype.kind, np.ascontiguousarray(array), leaf.low, leaf.high)
    if at == -2:  # the type is not the field's, or the C core does not know it (float16, bool)
        inside = (array >= leaf.low) & (array <= leaf.high)
        at = -1 if inside.all() else int(np.argmin(inside))
    if at < 0:
        return
    index = np.unravel_index(at, array.shape)
    low, high = leaf.low[index[1:]], leaf.high[index[1:]]
    where = "".join(f"[{int(i)}]" for i in index)
    raise BadAction(
        f"actions{leaf.name}{where} for env {int(ids[int(index[0])])}: expected {low} to {high}, found {array[index]}"
    )


def write_observation(leaves: Sequence[Leaf], targets: Sequence[Any], row: tuple[int, ...], obs: Any) -> list[Any]:
    """Write an env's observation into the arrays of its leaves at `row`, and cast it to their types.

    Returns the objects of the leaves that have no array. Raises BadObservation if it does not fit; the caller adds the
    env id to the message.
    """
    objects = []
    for leaf, target in zip(leaves, targets, strict=True):
        value = part_of(obs, leaf, "the observation", BadObservation)
        if leaf.kind is Kind.OBJECT:
            objects.append(value)
        elif leaf.kind is Kind.TEXT:
            target[row] = _checked_text(leaf, value, f"observation{leaf.name}", BadObservation)
        else:
            target[row] = _checked_array(leaf, value)
    return objects


def _checked_text(leaf: Leaf, value: Any, where: str, error: type[ShoalError]) -> str:
    limit = leaf.dtype.itemsize // 4
    if not isinstance(value, str) or len(value) > limit:
        raise error(f"{where}: expected a text of at most {limit}, found {value!r}")
    return value


def _checked_array(leaf: Leaf, value: Any) -> Array:
    array = as_array(value, leaf, "observation", BadObservation)
    if array.shape != leaf.shape:
        raise BadObservation(f"observation{leaf.name}: expected shape {leaf.shape}, found {array.shape}")
    if not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
        raise BadObservation(f"observation{leaf.name}: expected type {leaf.dtype}, found {array.dtype}")
    cast = array.astype(leaf.dtype)
    if leaf.dtype.kind in "iu" and not np.array_equal(cast, array):
        raise BadObservation(f"observation{leaf.name}: {array} does not fit into {leaf.dtype}")
    return cast

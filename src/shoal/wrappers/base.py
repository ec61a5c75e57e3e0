"""What a wrapper is: a Transform, which sees every batch on its way to the caller, and may change it.

Transforms know nothing of APIs. A host (`shoal.wrappers.hosts` for pools and Gymnasium's vector envs, the dialects for
their own) turns what its API returns into Rows, lets the transforms change them, and turns Rows back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces

from shoal.support.checks import Ids

Array = npt.NDArray[Any]
Part = str | None  # a key of a Dict space; None for a space that is no Dict


@dataclass(slots=True)
class Rows:
    """What some envs have answered, one row each.

    Attributes:
        ids: int64 [n], the envs; ascending, and all of them if `whole`.
        obs: a batch of observations.
        reward: float [n].
        terminated, truncated: bool [n], where an episode has ended.
        began: bool [n], where `obs` is the first of an episode. Under same-step autoreset, and only there, a row can
            end one episode and begin the next.
        final_obs: the last observation of each such row's episode, by row.
        infos: by row, where an episode has ended or begun; where it has ended, the info of its last step. The host
            copies what transforms change in them into the infos of its API.
        with_rest: whether the caller gets the rows of all envs; those that are not among these stay as they were.
    """

    ids: Ids
    whole: bool
    obs: Any
    reward: Array
    terminated: Array
    truncated: Array
    began: Array
    final_obs: dict[int, Any]
    infos: dict[int, dict[str, Any]]
    with_rest: bool = False

    @property
    def done(self) -> Array:
        """Bool [n], where an episode has ended."""
        return self.terminated | self.truncated

    @property
    def stepped(self) -> Array:
        """Bool [n], where the row answers a step, rather than a reset."""
        return ~self.began | self.done

    @property
    def all_stepped(self) -> bool:
        """Whether no row answers a reset. Hosts that reset within the step pass one array for ends and beginnings."""
        return self.began is self.terminated or bool(self.stepped.all())

    def map_obs(self, function: Callable[[Any], Any]) -> None:
        """Replace the observations, and the last ones of episodes, by what the function makes of them."""
        self.obs = function(self.obs)
        self.final_obs = {row: function(final) for row, final in self.final_obs.items()}


@dataclass(frozen=True)
class Bound:
    """What a transform works on.

    Attributes:
        num_envs, observation_space, action_space: how many envs, and the spaces of one.
        images: returns an image of each of these envs, which must be idle.
        metadata, render_mode: the envs' own.
    """

    num_envs: int
    observation_space: Space[Any]
    action_space: Space[Any]
    images: Callable[[Ids], Sequence[Any]]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    render_mode: str | None = None


class Transform:
    """Base class of all transforms. It changes nothing; derived classes override what they need."""

    bound: Bound

    def bind(self, bound: Bound) -> Space[Any]:
        """Called once, with what it works on. Returns the observation space of one env after this transform.

        Raises:
            ValueError: it belongs to other envs already, or is not for such spaces.
        """
        if hasattr(self, "bound"):
            raise ValueError(f"{type(self).__name__} already belongs to other envs: make one for each")
        self.bound = bound
        return bound.observation_space

    def send(self, actions: Any, ids: Ids) -> None:
        """Called with the actions of the envs `ids`, on their way to the envs."""

    def apply(self, rows: Rows) -> None:
        """Called with answers on their way to the caller. May replace arrays in them, and must not write to any."""

    def close(self) -> None:
        """Called before the envs are closed."""


def bind_all(transforms: Sequence[Transform], bound: Bound) -> Space[Any]:
    """Bind them one after the other. Returns the observation space after the last. If one raises, none is bound."""
    space = bound.observation_space
    done: list[Transform] = []
    for transform in transforms:
        fresh = not hasattr(transform, "bound")
        try:
            space = transform.bind(replace(bound, observation_space=space))
        except BaseException:
            for one in [*done, *([transform] if fresh else [])]:
                vars(one).pop("bound", None)
            raise
        done.append(transform)
    return space


def added_infos(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What transforms have put into an info, or changed in it."""
    return {key: value for key, value in after.items() if key not in before or before[key] is not value}


def box_parts(
    space: Space[Any], keys: Sequence[str] | None, who: str, hint: str = "name the keys that it is for"
) -> dict[Part, spaces.Box]:
    """The Box parts of a space that a transform works on: those of a Dict by key (None: all), or the Box itself.

    Raises ValueError, with the transform's name and a hint, if it is neither or a part that was asked for is no Box.
    """
    if isinstance(space, spaces.Dict):
        wanted = list(space.spaces) if keys is None else list(keys)
        for key in wanted:
            if not isinstance(space.spaces.get(key), spaces.Box):
                found = space.spaces.get(key, "not there")
                raise ValueError(f"{who} is for Box observations, and {key!r} is {found}: {hint}")
        return {key: space.spaces[key] for key in wanted}  # type: ignore[misc]
    if keys is not None:
        raise ValueError(f"{who}: keys are for Dict observations, and these are {space}")
    if not isinstance(space, spaces.Box):
        raise ValueError(f"{who} is for Box observations, and Dicts of them, not for {space}")
    return {None: space}


def with_parts(value: Any, parts: dict[Part, Any]) -> Any:
    """A copy of an observation, or of a Dict space, with some of its parts replaced."""
    if None in parts:
        return parts[None]
    if isinstance(value, spaces.Dict):
        return spaces.Dict({**value.spaces, **parts})  # type: ignore[dict-item]
    return type(value)({**value, **parts})  # an OrderedDict stays one


def arrays_of(value: Any, name: str = "") -> Iterator[tuple[str, Array]]:
    """All arrays in a nested batch, with names such as "['camera'][0]"."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from arrays_of(part, f"{name}[{key!r}]")
    elif isinstance(value, tuple | list) and not all(isinstance(part, int | float | np.number) for part in value):
        for i, part in enumerate(value):
            yield from arrays_of(part, f"{name}[{i}]")
    elif not isinstance(value, str | bytes):
        array = np.asarray(value)
        if array.dtype.kind in "fiubc":
            yield name, array


def part_of(value: Any, part: Part) -> Any:
    """One part of an observation."""
    return value if part is None else value[part]


def map_parts(function: Callable[..., Any], space: Space[Any], *batches: Any) -> Any:
    """Call the function with the parts of nested batches that belong together, and nest what it returns alike."""
    if isinstance(space, spaces.Dict):
        parts = {key: [batch[key] for batch in batches] for key in batches[0]}
        return {key: map_parts(function, space.spaces[key], *each) for key, each in parts.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(map_parts(function, *each) for each in zip(space.spaces, *batches, strict=True))
    return function(*batches)


def take_rows(space: Space[Any], value: Any, ids: Ids) -> Any:
    """Some rows of a nested batch."""

    def take(part: Any) -> Any:
        return part[ids] if isinstance(part, np.ndarray) else tuple(part[i] for i in ids.tolist())

    return map_parts(take, space, value)


def put_rows(space: Space[Any], value: Any, rows: Any, ids: Ids) -> Any:
    """A copy of a nested batch with some of its rows replaced."""

    def put(old: Any, new: Any) -> Any:
        if not isinstance(old, np.ndarray):
            swapped = dict(zip(ids.tolist(), new, strict=True))
            return tuple(swapped.get(i, one) for i, one in enumerate(old))
        result = np.array(old)
        result[ids] = new
        return result

    return map_parts(put, space, value, rows)

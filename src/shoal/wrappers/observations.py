"""Observations in another form: stacked frames, images with their channels first, one part of a Dict."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from gymnasium import Space, spaces

from shoal.support.checks import check_choice, whole_number
from shoal.wrappers.base import Array, Bound, Part, Rows, Transform, box_parts, part_of, with_parts

Order = Literal["first", "last"] | None


def is_image(space: Space[Any]) -> bool:
    """Whether a space is that of images: 8 bits from 0 to 255, height, width and channels."""
    return (
        isinstance(space, spaces.Box)
        and len(space.shape) == 3
        and space.dtype == np.uint8
        and bool((space.low == 0).all() and (space.high == 255).all())
    )


def is_image_channels_first(space: Space[Any]) -> bool:
    """Whether the channels of images come first: they are the smallest dimension."""
    assert space.shape is not None
    return int(np.argmin(space.shape)) == 0


class FrameStack(Transform):
    """Stacks the last observations along one axis, the newest last; places before the first of an episode are zero.

    Args:
        n_stack: how many.
        channels_order: "first" or "last" axis of an observation. None: the channels of images, else the last axis. For
            Dict observations a dict gives each key its own.
        padding: "zero", or "first" to repeat the first observation of an episode instead.
        sb3_bounds: repeat each entry of the space's bounds in its place, as Stable-Baselines3 does, rather than in the
            order of what is stacked. Models that were saved there need it.
    """

    def __init__(
        self,
        n_stack: int,
        channels_order: Order | Mapping[str, Order] = None,
        padding: Literal["zero", "first"] = "zero",
        sb3_bounds: bool = False,
    ):
        self.n_stack = whole_number("n_stack", n_stack, 1, 10_000)
        check_choice("padding", padding, ("zero", "first"))
        self.channels_order, self.padding, self.sb3_bounds = channels_order, padding, sb3_bounds
        self._axis: dict[Part, int] = {}
        self._history: dict[Part, list[Array]] = {}  # oldest first, each [num_envs, ...]

    def bind(self, bound: Bound) -> Space[Any]:
        """Return the space of stacked observations. Raises ValueError for spaces that cannot be stacked."""
        space = super().bind(bound)
        stacked: dict[Part, Space[Any]] = {}
        parts = box_parts(space, None, "FrameStack", "take it out, by ExtractDictObs or in the env")
        if isinstance(self.channels_order, Mapping) and (unknown := set(self.channels_order) - set(parts)):
            raise ValueError(f"channels_order: there is no {sorted(unknown)} in {space}")
        for part, box in parts.items():
            order = self.channels_order
            if isinstance(order, Mapping):
                order = order.get(part or "")
            if order not in (None, "first", "last"):
                raise ValueError(f"channels_order: expected 'first', 'last' or None, found {order!r}")
            if not box.shape:
                raise ValueError(f"FrameStack: an observation needs an axis to stack along, and {box} has none")
            first = order == "first" or (order is None and is_image(box) and is_image_channels_first(box))
            axis = self._axis[part] = 0 if first else len(box.shape) - 1
            low, high = (
                np.repeat(side, self.n_stack, axis) if self.sb3_bounds else np.concatenate([side] * self.n_stack, axis)
                for side in (box.low, box.high)
            )
            stacked[part] = spaces.Box(low, high, dtype=box.dtype.type)
            self._history[part] = [np.zeros((bound.num_envs, *box.shape), box.dtype) for _ in range(self.n_stack)]
        return with_parts(space, stacked)  # type: ignore[no-any-return]

    def apply(self, rows: Rows) -> None:
        began = np.flatnonzero(rows.began)
        # First the ends of episodes, before the histories go on to the next ones.
        rows.final_obs = {row: self._with_last(int(rows.ids[row]), final) for row, final in rows.final_obs.items()}
        pushed = {part: self._push(part, part_of(rows.obs, part), rows, began) for part in self._axis}
        rows.obs = with_parts(rows.obs, pushed)

    def _with_last(self, env_id: int, final: Any) -> Any:
        stacks: dict[Part, Any] = {}
        for part, axis in self._axis.items():
            older = [frame[env_id] for frame in self._history[part][1:]]
            stacks[part] = np.concatenate([*older, np.asarray(part_of(final, part))], axis)
        return with_parts(final, stacks)

    def _push(self, part: Part, new: Any, rows: Rows, began: Array) -> Array:
        history = self._history[part]
        if rows.whole:
            oldest = history.pop(0)
            np.copyto(oldest, new, casting="unsafe")
            history.append(oldest)
        else:
            for older, newer in itertools.pairwise(history):
                older[rows.ids] = newer[rows.ids]
            history[-1][rows.ids] = new
        if len(began):
            fresh = rows.ids[began]
            for frame in history[:-1]:
                frame[fresh] = history[-1][fresh] if self.padding == "first" else 0
        frames = history if rows.whole else [frame[rows.ids] for frame in history]
        return np.concatenate(frames, self._axis[part] + 1)


class TransposeImage(Transform):
    """Images as [channels, height, width], as convolutions in PyTorch need them. Other parts of a Dict stay as is.

    Args:
        skip: do nothing, for code that switches it on and off.
    """

    def __init__(self, skip: bool = False):
        self.skip = skip
        self._parts: list[Part] = []

    def bind(self, bound: Bound) -> Space[Any]:
        """Return the space with channels first. Raises ValueError where observations have no images."""
        space = super().bind(bound)
        if self.skip:
            return space
        parts: dict[Part, Space[Any]] = dict(space.spaces.items()) if isinstance(space, spaces.Dict) else {None: space}
        images = {part: one for part, one in parts.items() if is_image(one)}
        if None in parts and not images:
            raise ValueError(f"TransposeImage is for images (uint8, 0 to 255, three axes), not for {space}")
        for one in images.values():
            if is_image_channels_first(one):
                raise ValueError(f"TransposeImage: the channels of {one} come first already")
        self._parts = list(images)
        return with_parts(space, {part: transposed_space(one) for part, one in images.items()})  # type: ignore[no-any-return]

    def apply(self, rows: Rows) -> None:
        rows.map_obs(self.turn)

    def turn(self, observation: Any) -> Any:
        """One observation, or a batch of them, transposed."""
        if not self._parts:
            return observation
        return with_parts(observation, {part: transpose(part_of(observation, part)) for part in self._parts})


def transpose(image: Any) -> Array:
    """Channels first: a view of the image, or of a batch of images."""
    return np.moveaxis(np.asarray(image), -1, -3)


def transposed_space(space: Any) -> spaces.Box:
    """The space of such images."""
    height, width, channels = space.shape
    return spaces.Box(0, 255, (channels, height, width), space.dtype.type)


class ExtractDictObs(Transform):
    """One part of Dict observations instead of all of it."""

    def __init__(self, key: str):
        self.key = key

    def bind(self, bound: Bound) -> Space[Any]:
        """Return the space of the part. Raises ValueError where observations are no dicts, or have no such key."""
        space = super().bind(bound)
        if not isinstance(space, spaces.Dict) or self.key not in space.spaces:
            raise ValueError(f"ExtractDictObs: there is no part {self.key!r} in {space}")
        return space.spaces[self.key]

    def apply(self, rows: Rows) -> None:
        rows.map_obs(lambda observation: observation[self.key])

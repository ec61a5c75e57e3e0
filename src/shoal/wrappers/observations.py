"""TransposeImage moves the channels of images to the front; ExtractDictObs takes one part of Dict observations."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space, spaces

from shoal.wrappers.base import Array, Bound, Part, Rows, Transform, part_of, with_parts
from shoal.wrappers.frame_stack import is_image, is_image_channels_first


class TransposeImage(Transform):
    """Images as [channels, height, width], as convolutions in PyTorch need them. Other parts of a Dict stay as is.

    Args:
        skip: do nothing, for code that switches it on and off.
    """

    def __init__(self, skip: bool = False):
        self.skip = skip
        self._parts: list[Part] = []

    def bind(self, bound: Bound) -> Space[Any]:
        """The transposed space."""
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
        """Transpose the observations, and the last ones of episodes."""
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
        """The part's space."""
        space = super().bind(bound)
        if not isinstance(space, spaces.Dict) or self.key not in space.spaces:
            raise ValueError(f"ExtractDictObs: there is no part {self.key!r} in {space}")
        return space.spaces[self.key]

    def apply(self, rows: Rows) -> None:
        """Keep the part alone."""
        rows.map_obs(lambda observation: observation[self.key])

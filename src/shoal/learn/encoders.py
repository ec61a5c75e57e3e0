"""Layers, and the encoder that turns observations of any space into features: a CNN for images, one-hot choices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import Space
from torch import Tensor, nn

from shoal.spaces.emulation import Emulation
from shoal.spaces.leaves import Leaf, get_path

LIMIT = 10.0  # of normalized observations


class _QuickTanh(torch.autograd.Function):
    """tanh by way of the sigmoid: torch computes that an eighth of the time on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = (x + x).sigmoid_().mul_(2.0).sub_(1.0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.tanh_backward(gradient, y)  # type: ignore[no-any-return]


class Tanh(nn.Module):
    """tanh."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if x.is_cuda else _QuickTanh.apply(x)  # type: ignore[no-untyped-call]


def layer(inputs: int, outputs: int, gain: float = math.sqrt(2)) -> nn.Linear:
    """Make a linear layer with orthogonal weights."""
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.zeros_(made.bias)
    return made


def layers(inputs: int, hidden: Sequence[int]) -> nn.Sequential:
    """Make some layers with tanh after each."""
    pairs = zip([inputs, *hidden[:-1]], hidden, strict=True)
    return nn.Sequential(*[part for pair in pairs for part in (layer(*pair), Tanh())])


class ImageNet(nn.Module):
    """A small CNN for images of 8 bits: [height, width], with channels first or last."""

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.last = len(shape) == 3 and int(np.argmin(shape)) != 0
        self.flat = len(shape) == 2
        channels = 1 if self.flat else shape[2 if self.last else 0]
        side = sorted(shape)[-2:][0]
        large = [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
        small = [(16, 8, 4), (32, 4, 2)]
        tiny = [(16, 3, 1), (32, 3, 2)]
        plan = large if side >= 80 else small if side >= 36 else tiny
        self.width = 512 if side >= 80 else 256
        parts: list[nn.Module] = []
        for outputs, size, stride in plan:
            parts += [nn.Conv2d(channels, outputs, size, stride), nn.ReLU()]
            nn.init.orthogonal_(parts[-2].weight, math.sqrt(2))  # type: ignore[arg-type]
            nn.init.zeros_(parts[-2].bias)  # type: ignore[arg-type]
            channels = outputs
        self.convolutions = nn.Sequential(*parts, nn.Flatten())
        with torch.no_grad():
            inputs = self.convolutions(self._planes(torch.zeros(1, *shape))).shape[1]
        self.out = nn.Sequential(layer(inputs, self.width), nn.ReLU())

    def _planes(self, images: Tensor) -> Tensor:
        if self.flat:
            return images[:, None]
        return images.permute(0, 3, 1, 2) if self.last else images

    def forward(self, images: Tensor) -> Tensor:
        planes = self._planes(images)
        if not planes.is_cuda:
            return self.out(self.convolutions(planes.float() * (1.0 / 255.0)))  # type: ignore[no-any-return]
        with torch.autocast("cuda", torch.bfloat16):  # half of the bytes, and the fast units of the GPU
            scaled = planes.to(torch.bfloat16, memory_format=torch.channels_last) * (1.0 / 255.0)
            return self.out(self.convolutions(scaled)).float()  # type: ignore[no-any-return]


def is_picture(leaf: Leaf) -> bool:
    """Say whether a part of an observation is an image: bytes with a height and a width of at least 8."""
    return leaf.dtype == np.uint8 and len(leaf.shape) in (2, 3) and sorted(leaf.shape)[-2] >= 8 and not leaf.discrete


class Encoder(nn.Module):
    """Turns rows of observations, as Emulation lays them out, into features: images by a CNN, choices as one-hot."""

    mean: Tensor
    scale: Tensor

    def __init__(self, space: Space[Any], normalize: bool):
        super().__init__()
        self.emulation, self.normalize = Emulation(space), normalize
        self.leaves = self.emulation.leaves
        self.plain = len(self.leaves) == 1 and not self.leaves[0].discrete and not is_picture(self.leaves[0])
        self.numbers = sum(math.prod(leaf.shape) for leaf in self.leaves if self._is_number(leaf))
        self.pictures = nn.ModuleDict(
            {str(i): ImageNet(leaf.shape) for i, leaf in enumerate(self.leaves) if is_picture(leaf)}
        )
        choices = [np.ravel(leaf.high).astype(int) - np.ravel(leaf.low) + 1 for leaf in self.leaves if leaf.discrete]  # type: ignore[arg-type]
        self.width = self.numbers + int(sum(one.sum() for one in choices))
        self.width += sum(one.width for one in self.pictures.children() if isinstance(one, ImageNet))
        self.register_buffer("mean", torch.zeros(self.numbers))
        self.register_buffer("scale", torch.ones(self.numbers))

    @staticmethod
    def _is_number(leaf: Leaf) -> bool:
        return not leaf.discrete and not is_picture(leaf)

    def vector(self, rows: Tensor) -> Tensor:
        """Return the parts of rows that are plain numbers, as they came from the envs."""
        if self.plain:
            return rows if rows.dtype == torch.float32 else rows.float()
        nested = self.emulation.unflatten(rows)
        lead = rows.shape[:-1]
        parts = [
            get_path(nested, leaf.path).reshape(*lead, -1).float() for leaf in self.leaves if self._is_number(leaf)
        ]
        return torch.cat(parts, -1) if parts else torch.zeros(*lead, 0, device=rows.device)

    def forward(self, rows: Tensor) -> Tensor:
        vector = self.vector(rows)
        if self.normalize:
            vector = ((vector - self.mean) * self.scale).clamp(-LIMIT, LIMIT)
        if self.plain:
            return vector
        nested, found = self.emulation.unflatten(rows), [vector] if self.numbers else []
        for i, leaf in enumerate(self.leaves):
            value = get_path(nested, leaf.path)
            if str(i) in self.pictures:
                found.append(self.pictures[str(i)](value.reshape(-1, *leaf.shape)))
            elif leaf.discrete:
                low, high = np.ravel(leaf.low), np.ravel(leaf.high)  # type: ignore[arg-type]
                columns = value.reshape(len(rows), -1).long()
                found += [
                    F.one_hot(columns[:, k] - int(low[k]), int(high[k]) - int(low[k]) + 1) for k in range(len(low))
                ]
        return torch.cat([part.to(vector.dtype) for part in found], -1)

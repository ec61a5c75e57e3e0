"""Layers, and the encoder that turns observations of any space into features: a CNN for images, one-hot choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


class Layers(nn.Sequential):
    """Some layers with tanh after each; with `half` they compute in 16 bits on a GPU: half of the bytes to move."""

    def __init__(self, inputs: int, hidden: Sequence[int], half: bool):
        pairs = zip([inputs, *hidden[:-1]], hidden, strict=True)
        super().__init__(*[part for pair in pairs for part in (layer(*pair), Tanh())])
        self.half_precision = half

    def forward(self, x: Tensor) -> Tensor:
        if not (self.half_precision and x.is_cuda):
            return super().forward(x)  # type: ignore[no-any-return, no-untyped-call]
        with torch.autocast("cuda", torch.bfloat16):
            return super().forward(x).float()  # type: ignore[no-any-return, no-untyped-call]


def layers(inputs: int, hidden: Sequence[int], half: bool = False) -> Layers:
    """Make some layers with tanh after each."""
    return Layers(inputs, hidden, half)


class ImageNet(nn.Module):
    """A small CNN for images of 8 bits: [height, width], with channels first or last.

    Where sides can be divided by 4, blocks of 4 x 4 pixels become channels first. A convolution of 2 x 2 over those is
    one of 8 x 8 in steps of 4 over pixels, and computers are better at it.
    """

    def __init__(self, shape: tuple[int, ...]):
        super().__init__()
        self.last = len(shape) == 3 and int(np.argmin(shape)) != 0
        self.flat = len(shape) == 2
        channels = 1 if self.flat else shape[2 if self.last else 0]
        sides = shape if self.flat else shape[:2] if self.last else shape[1:]
        self.blocks = 4 if min(sides) >= 36 and not any(side % 4 for side in sides) else 1
        large = min(sides) >= 80
        first = (2, 1) if self.blocks == 4 else (8, 4) if min(sides) >= 36 else (3, 1)
        plan = [((32 if large else 16), *first), ((64 if large else 32), 4 if min(sides) >= 36 else 3, 2)]
        plan += [(64, 3, 1)] if large else []
        self.width = 512 if large else 256
        parts: list[nn.Module] = []
        channels *= self.blocks**2
        for outputs, size, stride in plan:
            convolution = nn.Conv2d(channels, outputs, size, stride)
            nn.init.orthogonal_(convolution.weight, math.sqrt(2))
            nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
            parts += [convolution, nn.ReLU()]
            channels = outputs
        self.convolutions = nn.Sequential(*parts, nn.Flatten())
        with torch.no_grad():
            inputs = self.convolutions(self._planes(torch.zeros(1, *shape))).shape[1]
        self.out = nn.Sequential(layer(inputs, self.width), nn.ReLU())

    def _planes(self, images: Tensor) -> Tensor:
        planes = images[:, None] if self.flat else images.permute(0, 3, 1, 2) if self.last else images
        return F.pixel_unshuffle(planes, self.blocks) if self.blocks > 1 else planes

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


class RunningMoments(nn.Module):
    """Mean and variance of all values so far, as `shoal.wrappers.RunningMeanStd` has them, where the values are.

    Nothing of it waits for a GPU.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.full((), 1e-4, dtype=torch.float64))

    def scale(self) -> Tensor:
        """Return what to multiply values by, so that their variance is 1."""
        return (1.0 / (self.var + 1e-8).sqrt()).float()

    @torch.no_grad()
    def add(self, values: Tensor, valid: Tensor, reduce: Callable[[Tensor], Any] | None = None) -> None:
        """Add the valid rows of values [steps, lanes, size]; `reduce` sums a tensor over all ranks, in place."""
        weight = valid.to(torch.float64)[..., None]
        shifted = (values - self.mean) * weight  # near 0, so that squares lose nothing
        sums = torch.stack([shifted.sum((0, 1)), (shifted * shifted).sum((0, 1)), weight.sum().expand_as(self.mean)])
        if reduce is not None:
            reduce(sums)
        count = sums[2].clamp(min=1.0)
        mean, total = sums[0] / count, self.count + sums[2]
        var = sums[1] / count - mean * mean
        share = sums[2] / total
        self.var.copy_(self.var * (1 - share) + var * share + mean * mean * share * (1 - share))
        self.mean.add_(mean * share)
        self.count.add_(sums[2][0] if len(sums[2]) else 0.0)


class Encoder(nn.Module):
    """Turns rows of observations, as Emulation lays them out, into features: images by a CNN, choices as one-hot."""

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
        self.stats = RunningMoments(self.numbers)

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
            vector = ((vector - self.stats.mean.float()) * self.stats.scale()).clamp(-LIMIT, LIMIT)
        if self.plain:
            return vector
        nested, found = self.emulation.unflatten(rows), [vector] if self.numbers else []
        for i, leaf in enumerate(self.leaves):
            value = get_path(nested, leaf.path)
            if str(i) in self.pictures:
                found.append(self.pictures[str(i)](value.reshape(-1, *leaf.shape)))
            elif leaf.discrete:
                low, high = np.ravel(leaf.low).astype(int), np.ravel(leaf.high).astype(int)  # type: ignore[arg-type]
                columns = value.reshape(len(rows), -1).long()
                for k, (first, last) in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
                    inside = (columns[:, k] - first).clamp(0, last - first)  # rows of absent agents are all zeros
                    found.append(F.one_hot(inside, last - first + 1))
        return torch.cat([part.to(vector.dtype) for part in found], -1)

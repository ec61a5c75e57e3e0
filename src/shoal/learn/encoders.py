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


def _tanh_layers(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Tensor]:
    """Return the input, and what each layer makes of the one before; tanh by way of the sigmoid.

    torch computes a sigmoid in an eighth of the time of a tanh on a CPU.
    """
    found = [x]
    for weight, bias in zip(weights, biases, strict=True):
        y = torch.addmm(bias, found[-1], weight.t())
        found.append(y.mul_(2.0).sigmoid_().mul_(2.0).sub_(1.0))
    return found


class _QuickLayers(torch.autograd.Function):
    """Layers with tanh, as one step of autograd: its own bookkeeping takes as long as small layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.weights = parameters[::2]
        ctx.kept = _tanh_layers(x, ctx.weights, parameters[1::2])
        return ctx.kept[-1]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found: list[Tensor | None] = []
        for k in reversed(range(len(ctx.weights))):
            gradient = torch.ops.aten.tanh_backward(gradient, ctx.kept[k + 1])
            before = ctx.kept[k]
            # With few inputs, the product is computed faster from the other side.
            few = before.shape[1] < 16
            found += [gradient.sum(0), (before.t() @ gradient).t() if few else gradient.t() @ before]
            if k > 0 or ctx.needs_input_grad[0]:
                gradient = gradient @ ctx.weights[k]
        return gradient if ctx.needs_input_grad[0] else None, *reversed(found)


def layer(inputs: int, outputs: int, gain: float = math.sqrt(2)) -> nn.Linear:
    """Make a linear layer with orthogonal weights."""
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.zeros_(made.bias)
    return made


class Layers(nn.Module):
    """Some layers with tanh after each."""

    def __init__(self, inputs: int, hidden: Sequence[int]):
        super().__init__()
        self.linear = nn.ModuleList(layer(*pair) for pair in zip([inputs, *hidden[:-1]], hidden, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            for one in self.linear:
                x = torch.tanh(one(x))
            return x
        if not torch.is_grad_enabled():
            weights, biases = ([getattr(one, name) for one in self.linear] for name in ("weight", "bias"))
            return _tanh_layers(x, weights, biases)[-1]
        return _QuickLayers.apply(x, *self.linear.parameters())  # type: ignore[no-untyped-call, no-any-return]


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


def as_one_vector(network: nn.Module) -> tuple[nn.Parameter, Tensor]:
    """Move all weights of a network into one vector, and their gradients into another."""
    parameters = list(network.parameters())
    weights = torch.cat([one.detach().reshape(-1) for one in parameters])
    gradient = torch.zeros_like(weights)
    at = 0
    for one in parameters:
        part = slice(at, at + one.numel())
        one.data, one.grad = weights[part].view_as(one), gradient[part].view_as(one)
        at = part.stop
    whole = nn.Parameter(weights)
    whole.grad = gradient
    return whole, gradient

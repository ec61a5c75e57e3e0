"""Spaces as specs of TorchRL, the same ones that its GymEnv has, and values between a pool's arrays and tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, MultiOneHot, OneHot, Unbounded

from shoal.errors import BadEnv
from shoal.spaces.leaves import array_leaves

__all__ = ["Codec", "action_codec", "codec_of", "observation_codec"]


class Codec(NamedTuple):
    """How values of one space are written in TorchRL.

    Attributes:
        spec: of one env.
        encode: makes a tensor of a batch of the space's arrays, or a dict of tensors of a dict of arrays.
        decode: makes arrays of what `encode` makes.
    """

    spec: Any
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def observation_codec(space: Space[Any], categorical: bool) -> Codec:
    """Return the codec of observations, whose spec is a Composite. A space that is no Dict gets the key of GymEnv."""
    array_leaves("observation", space, "TorchRL")
    codec = codec_of(space, categorical, rename=True)
    return codec if isinstance(codec.spec, Composite) else _under(_key_of(space), codec)


def action_codec(space: Space[Any], categorical: bool) -> Codec:
    """Return the codec of actions, whose spec is a Composite. A space that is no Dict gets the key "action"."""
    array_leaves("action", space, "TorchRL")
    codec = codec_of(space, categorical)
    return codec if isinstance(codec.spec, Composite) else _under("action", codec)


def _key_of(space: Space[Any]) -> str:
    """Return "pixels" for what GymEnv takes for an image, else "observation"."""
    image = (
        isinstance(space, spaces.Box)
        and len(space.shape) == 3
        and space.shape[-1] == 3
        and bool((space.low == 0).all() and (space.high == 255).all())
    )
    return "pixels" if image else "observation"


def _under(key: str, codec: Codec) -> Codec:
    """Put the only value of a space under a key."""
    encode, decode = codec.encode, codec.decode
    return Codec(Composite({key: codec.spec}), lambda value: {key: encode(value)}, lambda found: decode(found.get(key)))


def codec_of(space: Space[Any], categorical: bool, rename: bool = False) -> Codec:
    """Return the codec of a space.

    Args:
        categorical: whether choices are written as their numbers; otherwise they are one-hot.
        rename: call an entry "state" of a Dict "observation", unless it has one of this name too, as GymEnv does.
    """
    if isinstance(space, spaces.Dict):
        return _of_dict(space, categorical, rename)
    if isinstance(space, spaces.Tuple):
        return _of_tuple(space, categorical, rename)
    try:
        if isinstance(space, spaces.Box):
            return _of_box(space)
        if isinstance(space, spaces.Discrete):
            return _of_discrete(space, categorical)
        if isinstance(space, spaces.MultiDiscrete):
            return _of_multi_discrete(space, categorical)
        assert isinstance(space, spaces.MultiBinary)
        spec = Binary(shape=torch.Size(space.shape), dtype=_type_of(space))
        return Codec(spec, torch.from_numpy, _array)
    except TypeError as error:
        raise BadEnv(f"{space} has no spec in TorchRL, because {error}: cast it by a wrapper around the env") from error


def _of_dict(space: spaces.Dict, categorical: bool, rename: bool) -> Codec:
    renames = rename and "observation" not in space.spaces
    keys = {name: "observation" if renames and name == "state" else name for name in space.spaces}
    parts = {name: codec_of(sub, categorical, rename) for name, sub in space.spaces.items()}
    spec = Composite({keys[name]: part.spec for name, part in parts.items()})

    def encode(values: Mapping[str, Any]) -> dict[str, Any]:
        return {keys[name]: part.encode(values[name]) for name, part in parts.items()}

    def decode(found: Any) -> dict[str, Any]:
        return {name: part.decode(found.get(keys[name])) for name, part in parts.items()}

    return Codec(spec, encode, decode)


def _of_tuple(space: Any, categorical: bool, rename: bool) -> Codec:
    """Stack the parts, as GymEnv does: they must be of one kind."""
    parts = [codec_of(sub, categorical, rename) for sub in space.spaces]
    if not parts or any(isinstance(part.spec, Composite) or part.spec != parts[0].spec for part in parts):
        raise BadEnv(f"TorchRL has one tensor for a Tuple, and the parts of {space} differ: use a Dict")

    def encode(values: Any) -> Tensor:
        return torch.stack([part.encode(value) for part, value in zip(parts, values, strict=True)], 1)

    def decode(found: Tensor) -> tuple[Any, ...]:
        return tuple([part.decode(value) for part, value in zip(parts, found.unbind(1), strict=True)])

    return Codec(torch.stack([part.spec for part in parts], 0), encode, decode)


def _of_box(space: spaces.Box) -> Codec:
    kind = _type_of(space)
    low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
    unbounded = bool(low.isinf().all() and high.isinf().all())
    if not unbounded:
        least, most = _limits(kind)
        least_low, most_high = torch.as_tensor(least, dtype=kind), torch.as_tensor(most, dtype=kind)
        unbounded = bool(torch.isclose(low, least_low).all() and torch.isclose(high, most_high).all())
    shape = torch.Size(space.shape or (1,))
    spec = Unbounded(shape, dtype=kind) if unbounded else Bounded(low, high, shape, dtype=kind)
    if space.shape:
        return Codec(spec, torch.from_numpy, _array)
    return Codec(spec, lambda value: torch.from_numpy(value).unsqueeze(-1), lambda found: _array(found.reshape(-1)))


def _limits(kind: torch.dtype) -> tuple[Any, Any]:
    """Return the least and the greatest value of a type."""
    if kind is torch.bool:
        return False, True
    limits = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
    return limits.min, limits.max


def _of_discrete(space: spaces.Discrete, categorical: bool) -> Codec:
    count, start = int(space.n), int(space.start)

    def numbers(value: Any) -> Tensor:
        return torch.from_numpy(value) - start if start else torch.from_numpy(value)

    if categorical:
        return Codec(Categorical(count, dtype=_type_of(space)), numbers, lambda found: _array(found) + start)
    return Codec(
        OneHot(count, dtype=torch.long),
        lambda value: torch.nn.functional.one_hot(numbers(value).long(), count),
        lambda found: _array(_chosen(found)) + start,
    )


def _of_multi_discrete(space: spaces.MultiDiscrete, categorical: bool) -> Codec:
    """Numbers of different ranges lie in one row side by side, those of one range on an axis of their own."""
    counts, start = space.nvec, np.asarray(space.start)
    shift = torch.from_numpy(np.ascontiguousarray(start))
    differ = counts.ndim == 1 and len(np.unique(counts)) > 1
    if not differ and len(np.unique(counts)) > 1:
        raise BadEnv(f"TorchRL has no spec for {space}, which has several axes and different ranges: flatten it")

    def numbers(value: Any) -> Tensor:
        return torch.from_numpy(value) - shift

    count, kind = int(counts.reshape(-1)[0]), _type_of(space)
    if categorical:
        spec = MultiCategorical(counts, dtype=kind) if differ else Categorical(count, shape=counts.shape, dtype=kind)
        return Codec(spec, numbers, lambda found: _array(found) + start)
    one_hot = torch.nn.functional.one_hot
    if not differ:
        return Codec(
            OneHot(count, shape=(*counts.shape, count), dtype=torch.long),
            lambda value: one_hot(numbers(value).long(), count),
            lambda found: _array(_chosen(found)) + start,
        )
    sizes = [int(size) for size in counts]

    def encode(value: Any) -> Tensor:
        columns = numbers(value).long().unbind(-1)
        return torch.cat([one_hot(column, size) for column, size in zip(columns, sizes, strict=True)], -1)

    def decode(found: Tensor) -> Any:
        return _array(torch.stack([_chosen(part) for part in torch.split(found, sizes, -1)], -1)) + start

    return Codec(MultiOneHot(sizes, dtype=torch.long), encode, decode)


def _chosen(found: Tensor) -> Tensor:
    """Return which one is hot."""
    return (found.byte() if found.dtype is torch.bool else found).argmax(-1)


def _array(found: Tensor) -> Any:
    return found.detach().cpu().numpy()


def _type_of(space: Space[Any]) -> torch.dtype:
    """Return PyTorch's type for a space's. Raises TypeError where there is none."""
    return torch.from_numpy(np.zeros(0, space.dtype)).dtype

"""How arrays become tensors and back: in the same memory on the CPU, through pinned memory on a CUDA device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.errors import BadAction
from shoal.graph.host import GraphHost

ALIGNED = 16  # bytes; compiled code expects that the memory of what an operator returns begins at a multiple of this
BUFFERS = 2  # sets of pinned memory: one is filled while the other is still being copied

_untyped: Any = torch


@functools.lru_cache
def type_of(dtype: np.dtype[Any]) -> torch.dtype:
    """Return PyTorch's type for a numpy type. Raises TypeError or ValueError where there is none."""
    return torch.from_numpy(np.zeros(0, dtype)).dtype


def carrier_for(host: GraphHost, device: torch.device) -> OnHost | Pinned:
    """Choose the way between a pool's arrays and tensors on a device."""
    return OnHost(host.pool.data.lends) if device.type == "cpu" else Pinned(device, host.num_envs, Cuda(device))


class OnHost:
    """Makes tensors of arrays, and arrays of tensors, in the same memory."""

    def __init__(self, lends: bool):
        self._lends = lends  # whether arrays may be frames of the pool, which can begin at any address

    def tensors(self, arrays: Sequence[npt.NDArray[Any]]) -> tuple[Tensor, ...]:
        """Make tensors, which keep the arrays alive, and with them a frame that the pool has lent."""
        tensors = tuple(map(torch.from_numpy, arrays))
        if self._lends:
            return tuple([tensor.clone() if tensor.data_ptr() % ALIGNED else tensor for tensor in tensors])
        return tensors

    def arrays(self, tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
        """Make arrays, which are valid for as long as the tensors live."""
        try:
            return [tensor.numpy() for tensor in tensors]
        except (TypeError, RuntimeError):
            return [_array(tensor) for tensor in tensors]


class Pinned:
    """Copies to and from a CUDA device through pinned memory, in the order of the current stream.

    Args:
        rows: how many rows an array has at most.
        cuda: makes the memory and the events.
    """

    def __init__(self, device: torch.device, rows: int, cuda: Any):
        self._device, self._rows, self._cuda = device, rows, cuda
        self._outward = itertools.cycle([(cuda.event(), Buffers(rows, cuda)) for _ in range(BUFFERS)])
        self._inward, self._arrived = Buffers(rows, cuda), cuda.event()

    def tensors(self, arrays: Sequence[npt.NDArray[Any]]) -> tuple[Tensor, ...]:
        """Start the copy to the device: what this stream does with the tensors comes after it."""
        copied, buffers = next(self._outward)
        copied.synchronize()  # an earlier copy may still read these buffers; after two steps it rarely does
        made = []
        for i, array in enumerate(arrays):
            buffer = buffers.get(i, array.shape, type_of(array.dtype))
            np.copyto(buffer.numpy(), array)
            target = torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)
            made.append(target.copy_(buffer, non_blocking=True))
        copied.record(self._cuda.stream())
        return tuple(made)

    def arrays(self, tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
        """Copy from the device, and wait until the stream has done so; the arrays are valid until the next call."""
        if all(map(_is_on_host, tensors)):
            return [_array(tensor) for tensor in tensors]
        copies = []
        for i, tensor in enumerate(tensors):
            buffer = self._inward.get(i, tensor.shape, tensor.dtype)
            copies.append(buffer.copy_(tensor.detach(), non_blocking=True))
        self._arrived.record(self._cuda.stream())
        self._arrived.synchronize()
        return [_array(tensor) for tensor in copies]


class Buffers:
    """Pinned tensors, each made when it is first needed."""

    def __init__(self, rows: int, cuda: Any):
        self._rows, self._cuda = rows, cuda
        self._made: dict[Any, Tensor] = {}

    def get(self, place: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the same memory for the same place."""
        count, *rest = shape if len(shape) else (1,)
        key = (place, dtype, tuple(rest))
        if key not in self._made or count > len(self._made[key]):
            with torch.inference_mode(False):  # so that it can be written to outside inference mode
                self._made[key] = self._cuda.pinned((max(count, self._rows), *rest), dtype)
        whole = self._made[key]
        rows = whole if count == len(whole) else whole[:count]
        return rows if len(shape) else rows[0]


class Cuda:
    """The calls of CUDA that `Pinned` needs."""

    def __init__(self, device: torch.device):
        self._device = device

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Make memory that the device can copy by itself."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def event(self) -> Any:
        """Make an event; a wait for one that was never recorded ends at once."""
        return _untyped.cuda.Event()

    def stream(self) -> torch.cuda.Stream:
        """Return the stream that the caller works on."""
        return torch.cuda.current_stream(self._device)


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = (tensor.detach() if tensor.requires_grad else tensor).numpy()
    except (TypeError, RuntimeError) as error:
        raise BadAction(f"an action of {tensor.dtype} on {tensor.device} is no array for the envs: {error}") from error
    return array

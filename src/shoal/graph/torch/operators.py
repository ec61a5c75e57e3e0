"""The operators of a TorchEnv: what a compiler puts into its graph for a reset, a step, a send and a recv.

Each env has a handle, a small tensor that holds its number and counts its calls. Every operator declares that it
changes the handle: so a compiler keeps all calls of one env, in their order, whether or not their results are used.

An operator that changes an argument may return many tensors, but not a list of them: there is a set of operators for
each number of leaves. What a fake kernel must know about its outputs is part of the call, as the text `layout`:
compilers keep graphs on disk under the text of their calls, and in another program the env of the same number may have
other shapes.
"""

from __future__ import annotations

import ast
import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from shoal.errors import PoolClosed
from shoal.graph.host import GraphHost, own_errors
from shoal.graph.torch.carriers import OnHost, Pinned

_untyped: Any = torch
_numbers = itertools.count(1)
_bridges: dict[int, weakref.ref[Bridge]] = {}
_library = _untyped.library.Library("shoal", "FRAGMENT")


class Bridge:
    """The env that the operators find by the number in its handle."""

    def __init__(self, host: GraphHost, carrier: OnHost | Pinned):
        self.host, self.carrier = host, carrier
        number = next(_numbers)
        _bridges[number] = weakref.ref(self, lambda _: _bridges.pop(number, None))
        with torch.inference_mode(False):  # so that the handle can be used inside and outside inference mode
            self.handle = torch.tensor([number, 0], dtype=torch.int64, device="cpu")


def _bridge(handle: Tensor) -> Bridge:
    """Return the env of a handle, and count the call in the handle."""
    numbers = handle.numpy()
    found = _bridges.get(numbers.item(0))
    bridge = None if found is None else found()
    if bridge is None:
        raise PoolClosed("the TorchEnv of this graph is gone: keep it for as long as the graph is used")
    numbers[1] += 1
    return bridge


class OutputShapes(NamedTuple):
    """What operators return: for each leaf of the observation its type, and its shape for one env."""

    device: torch.device
    num_envs: int
    batch_size: int
    leaves: list[tuple[torch.dtype, tuple[int, ...]]]

    def fake_obs(self, rows: Any) -> tuple[Tensor, ...]:
        """Make empty observations."""
        return tuple([torch.empty((rows, *shape), dtype=dtype, device=self.device) for dtype, shape in self.leaves])

    def fake_answer(self, rows: int) -> tuple[Tensor, ...]:
        """Make empty observations, rewards and flags."""
        kinds = (torch.float32, torch.bool, torch.bool)
        return (*self.fake_obs(rows), *[torch.empty(rows, dtype=kind, device=self.device) for kind in kinds])


def describe_outputs(host: GraphHost, obs_types: Sequence[torch.dtype], device: torch.device) -> str:
    """Write the OutputShapes of an env as text."""
    names = [str(kind).removeprefix("torch.") for kind in obs_types]
    leaves = [(name, tuple(map(int, leaf.shape))) for name, leaf in zip(names, host.obs_leaves, strict=True)]
    return repr((str(device), host.num_envs, host.pool.batch_size, leaves))


@functools.lru_cache
def _read_outputs(text: str) -> OutputShapes:
    device, num_envs, batch_size, leaves = ast.literal_eval(text)
    typed = [(getattr(torch, kind), shape) for kind, shape in leaves]
    return OutputShapes(torch.device(device), num_envs, batch_size, typed)


# ---- kernels, and their fakes, which only say what shapes they return ------------------------------------------


def _reset(
    handle: Tensor, layout: str, seed: int | None, seeds: Sequence[int] | None, env_ids: Tensor | None
) -> Tensor | tuple[Tensor, ...] | None:
    bridge = _bridge(handle)
    with own_errors():
        obs = bridge.host.reset(_as_array(env_ids), seed if seeds is None else list(seeds))
        return _as_declared(bridge.carrier.tensors(obs))


def _fake_reset(handle: Tensor, layout: str, seed: Any, seeds: Any, env_ids: Tensor | None) -> Any:
    outputs = _read_outputs(layout)
    return _as_declared(outputs.fake_obs(outputs.num_envs if env_ids is None else env_ids.shape[0]))


def _as_array(env_ids: Tensor | None) -> npt.NDArray[Any] | None:
    return None if env_ids is None else env_ids.cpu().numpy()


def _as_declared(leaves: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...] | None:
    """Operators return a single tensor as it is, and None in place of no tensor."""
    return leaves if len(leaves) > 1 else leaves[0] if leaves else None


def _step(handle: Tensor, layout: str, actions: Sequence[Tensor]) -> tuple[Tensor, ...]:
    bridge = _bridge(handle)
    return bridge.carrier.tensors(bridge.host.exchange(bridge.carrier.arrays(actions)))


def _fake_step(handle: Tensor, layout: str, actions: Sequence[Tensor]) -> tuple[Tensor, ...]:
    outputs = _read_outputs(layout)
    return outputs.fake_answer(outputs.num_envs)


def _send(handle: Tensor, layout: str, env_ids: Tensor | None, actions: Sequence[Tensor]) -> None:
    bridge = _bridge(handle)
    with own_errors():
        bridge.host.send(_as_array(env_ids), *bridge.carrier.arrays(actions))


def _fake_send(handle: Tensor, layout: str, env_ids: Tensor | None, actions: Sequence[Tensor]) -> None:
    pass


def _recv(handle: Tensor, layout: str) -> tuple[Tensor, ...]:
    bridge = _bridge(handle)
    with own_errors():
        ids, answer = bridge.host.recv()
        return bridge.carrier.tensors((ids, *answer))


def _fake_recv(handle: Tensor, layout: str) -> tuple[Tensor, ...]:
    outputs = _read_outputs(layout)
    ids = torch.empty(outputs.batch_size, dtype=torch.int64, device=outputs.device)
    return (ids, *outputs.fake_answer(outputs.batch_size))


class Operators(NamedTuple):
    """The operators of envs with the same number of leaves in their observations."""

    reset: Any
    step: Any
    send: Any
    recv: Any


@functools.cache
def operators(leaves: int) -> Operators:
    """Define them, though not by `torch.library.custom_op`: its Python takes longer than a step of many small envs."""

    def define(name: str, arguments: str, returns: int, real: Any, fake: Any) -> Any:
        full = f"{name}_{leaves}"
        results = ", ".join(["Tensor"] * returns)
        # An operator that waits for envs cannot be part of a CUDA graph.
        tags = [getattr(torch.Tag, tag) for tag in ("cudagraph_unsafe",) if hasattr(torch.Tag, tag)]
        _library.define(f"{full}(Tensor(a!) handle, str layout{arguments}) -> ({results})", tags=tags)
        _library.impl(full, real, "CompositeExplicitAutograd")
        # Past autograd: actions may require a gradient, and get none from the envs.
        _library.impl(full, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"shoal::{full}", fake, lib=_library)
        return getattr(torch.ops.shoal, full).default

    return Operators(
        define("reset", ", SymInt? seed, SymInt[]? seeds, Tensor? env_ids", leaves, _reset, _fake_reset),
        define("step", ", Tensor[] actions", leaves + 3, _step, _fake_step),
        define("send", ", Tensor? env_ids, Tensor[] actions", 0, _send, _fake_send),
        define("recv", "", leaves + 4, _recv, _fake_recv),
    )

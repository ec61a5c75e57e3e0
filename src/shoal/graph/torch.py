"""Envs inside of PyTorch: a step is an operator, which `torch.compile(fullgraph=True)` keeps in the graph.

Each env has a handle, a small tensor that holds its number and counts its calls. Every operator says that it changes
the handle: so a compiler keeps all calls of one env, in their order, whether or not anybody looks at what they return.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import Space

from shoal.errors import BadAction, BadEnv, PoolClosed
from shoal.graph.host import GraphHost, own_errors
from shoal.spaces.leaves import Leaf

try:
    import torch
except ImportError as error:
    from shoal.support.optional_dependencies import install

    raise ImportError(f"shoal.graph.torch needs PyTorch: {install('torch')}") from error

from torch import Tensor

__all__ = ["Received", "Step", "TorchEnv"]

ALIGNED = 16  # bytes; compiled code takes it for granted that what an operator returns begins at a multiple
BUFFERS = 2  # sets of pinned memory: one is filled while the other is still being copied

_untyped: Any = torch
_numbers = itertools.count(1)
_bridges: dict[int, weakref.ref[Bridge]] = {}


class Step(NamedTuple):
    """The answers of all envs, one row each.

    Attributes:
        obs: tensor [n, ...], or dicts and tuples of such as the space is nested.
        reward: float32 [n].
        terminated, truncated: bool [n].
    """

    obs: Any
    reward: Tensor
    terminated: Tensor
    truncated: Tensor

    @property
    def done(self) -> Tensor:
        """Bool [n], True where an episode ended."""
        return self.terminated | self.truncated


class Received(NamedTuple):
    """The answers of `batch_size` envs, as in Step; `env_id`, int64 [n], says which, in ascending order."""

    obs: Any
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    env_id: Tensor

    @property
    def done(self) -> Tensor:
        """Bool [n], True where an episode ended."""
        return self.terminated | self.truncated


class TorchEnv:
    """A pool whose observations, rewards and actions are tensors, in eager code and in compiled graphs alike.

    On the CPU nothing is copied that the pool does not copy: with `copy=True`, as `shoal.make` has it, large
    observations are the pool's own memory, which it leaves alone for as long as the tensors live. For CUDA they go
    through pinned memory, on the current stream, and nobody waits for them. No gradient flows through an env.

    Args:
        envs: a Pool, or a vector env of `shoal.make`.
        device: "cpu", or a CUDA device: where the tensors are, and the actions should be.

    Attributes:
        single_observation_space, single_action_space: of one env.
        observation_space, action_space: of all envs, batched as Gymnasium does.

    Example:
        env = TorchEnv(shoal.make("CartPole-v1", num_envs=64))

        @torch.compile(fullgraph=True)
        def rollout(obs):
            for _ in range(8):
                obs, reward, terminated, truncated = env.step(policy(obs))
            return obs
    """

    def __init__(self, envs: Any, device: str | torch.device = "cpu"):
        host = GraphHost(envs)
        _check_types("observation", host.observation_space, host.obs_leaves)
        _check_types("action", host.action_space, host.action_leaves)
        self._envs, self.pool = envs, host.pool
        self.num_envs, self.batch_size = host.num_envs, host.pool.batch_size
        specs = host.pool.specs
        self.single_observation_space, self.observation_space = specs.single_observation_space, specs.observation_space
        self.single_action_space, self.action_space = specs.single_action_space, specs.action_space
        self.device = _checked_device(device)
        self._bridge = Bridge(host, _carrier(host, self.device))
        self._handle = self._bridge.handle
        # What compiled code does with the env goes by these plain values, and is the same for all envs that have the
        # same: no gymnasium space is looked at.
        self._layout = _layout_of(host, self.device)
        self._nesting = host.nest([None] * len(host.obs_leaves))
        self._action_paths = [leaf.path for leaf in host.action_leaves]
        self._ops = _operators(len(host.obs_leaves))

    def __repr__(self) -> str:
        return f"TorchEnv({self.pool!r}, device={str(self.device)!r})"

    def reset(self, seed: int | Sequence[int] | None = None, env_ids: Tensor | Sequence[int] | None = None) -> Any:
        """Reset envs (None: all): their first observations, in the order of `env_ids`.

        Args:
            seed: an int gives env i `seed + i`; a list gives each of the env ids its own.
        """
        one, several = _seeds(seed)
        leaves = self._ops.reset(self._handle, self._layout, one, several, _as_ids(env_ids))
        if leaves is None:
            leaves = ()
        elif isinstance(leaves, Tensor):
            leaves = (leaves,)
        return _nested(self._nesting, iter(leaves))

    def step(self, action: Any) -> Step:
        """Step all envs with a batch of `single_action_space`: one tensor, or dicts and tuples of such."""
        answer = self._ops.step(self._handle, self._layout, self._flat(action))
        *leaves, reward, terminated, truncated = answer
        return Step(_nested(self._nesting, iter(leaves)), reward, terminated, truncated)

    def send(self, action: Any, env_ids: Tensor | Sequence[int] | None = None) -> None:
        """Start a step of these envs (None: all), and return at once."""
        self._ops.send(self._handle, self._layout, _as_ids(env_ids), self._flat(action))

    def recv(self) -> Received:
        """Wait for the next `batch_size` envs that are done."""
        env_id, *leaves, reward, terminated, truncated = self._ops.recv(self._handle, self._layout)
        return Received(_nested(self._nesting, iter(leaves)), reward, terminated, truncated, env_id)

    def _flat(self, action: Any) -> list[Tensor]:
        try:
            return [_at(action, path) for path in self._action_paths]
        except (KeyError, IndexError, TypeError) as error:
            raise BadAction(f"actions do not have the parts of {self.single_action_space}: {error!r}") from error

    def close(self) -> None:
        """Close the envs. May be called again."""
        self._envs.close()

    def __enter__(self) -> TorchEnv:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def _seeds(seed: Any) -> tuple[int | None, list[int] | None]:
    """One seed for all, or one for each; what an operator can take."""
    if seed is None:
        return None, None
    several = list(seed) if isinstance(seed, Sequence | np.ndarray) and not isinstance(seed, str) else None
    found = [seed] if several is None else several
    for one in found:
        if not hasattr(one, "__index__") or not 0 <= int(one) < 1 << 63:
            raise BadAction(f"seed: expected whole numbers from 0 to 2**63 - 1, found {one!r}")
    return (int(seed), None) if several is None else (None, [int(one) for one in several])


def _nested(nesting: Any, leaves: Iterator[Any]) -> Any:
    """Like `spaces.assemble`, by a nesting of dicts and tuples in place of the space: compilers trace this."""
    if isinstance(nesting, dict):
        return {key: _nested(inner, leaves) for key, inner in nesting.items()}
    if isinstance(nesting, tuple):
        return tuple([_nested(inner, leaves) for inner in nesting])
    return next(leaves)


def _at(action: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        action = action[key]
    return action if isinstance(action, Tensor) else torch.as_tensor(action)


def _as_ids(env_ids: Any) -> Tensor | None:
    if env_ids is None or isinstance(env_ids, Tensor):
        return env_ids
    return torch.as_tensor(env_ids, dtype=torch.int64, device="cpu")


# ---- what is refused -------------------------------------------------------------------------------------------


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ValueError(f'device: expected "cpu" or "cuda" (or "cuda:1", ...), found {device!r}')
    if found.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f'device {device!r}: PyTorch finds no CUDA device here; use device="cpu"')
    index = torch.cuda.current_device() if found.index is None else found.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device {device!r}: PyTorch finds {torch.cuda.device_count()} CUDA devices here")
    return torch.device("cuda", index)


def _check_types(what: str, space: Space[Any], leaves: Sequence[Leaf]) -> None:
    for leaf in leaves:
        try:
            _type_of(leaf.dtype)
        except (TypeError, ValueError) as error:
            raise BadEnv(
                f"PyTorch has no type for {leaf.dtype}, which the {what} space{leaf.name} has in {space}: change it by "
                "a wrapper around the env"
            ) from error


@functools.lru_cache
def _type_of(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, dtype)).dtype


# ---- between arrays and tensors --------------------------------------------------------------------------------


class Bridge:
    """The env as the operators find it, by the number in its handle."""

    def __init__(self, host: GraphHost, carrier: OnHost | Pinned):
        self.host, self._carrier = host, carrier
        number = next(_numbers)
        _bridges[number] = weakref.ref(self, lambda _: _bridges.pop(number, None))
        with torch.inference_mode(False):  # of use everywhere, wherever it was made
            self.handle = torch.tensor([number, 0], dtype=torch.int64, device="cpu")

    def reset(self, seed: Any, env_ids: Tensor | None) -> tuple[Tensor, ...]:
        """The leaves of the first observations."""
        with own_errors():
            return self._carrier.tensors(self.host.reset(self._ids(env_ids), seed))

    def step(self, actions: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The leaves of the observation, reward, terminated, truncated."""
        return self._carrier.tensors(self.host.exchange(self._carrier.arrays(actions)))

    def send(self, env_ids: Tensor | None, actions: Sequence[Tensor]) -> None:
        """Start a step."""
        with own_errors():
            self.host.send(self._ids(env_ids), *self._carrier.arrays(actions))

    def recv(self) -> tuple[Tensor, ...]:
        """Env ids, and what `step` gives."""
        with own_errors():
            ids, answer = self.host.recv()
            return self._carrier.tensors((ids, *answer))

    def _ids(self, env_ids: Tensor | None) -> npt.NDArray[Any] | None:
        return None if env_ids is None else env_ids.cpu().numpy()


def _carrier(host: GraphHost, device: torch.device) -> OnHost | Pinned:
    return OnHost(host.pool.data.lends) if device.type == "cpu" else Pinned(device, host.num_envs, Cuda(device))


class OnHost:
    """Arrays as tensors, and tensors as arrays, of the same memory.

    Args:
        lends: whether arrays may be frames of the pool, which begin anywhere.
    """

    def __init__(self, lends: bool):
        self._lends = lends

    def tensors(self, arrays: Sequence[npt.NDArray[Any]]) -> tuple[Tensor, ...]:
        """The tensors hold the arrays, and with them a frame that the pool has lent."""
        tensors = tuple(map(torch.from_numpy, arrays))
        if self._lends:
            return tuple([tensor.clone() if tensor.data_ptr() % ALIGNED else tensor for tensor in tensors])
        return tensors

    def arrays(self, tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
        """For as long as the tensors live."""
        try:
            return [tensor.numpy() for tensor in tensors]
        except (TypeError, RuntimeError):
            return [_array(tensor) for tensor in tensors]


class Pinned:
    """To and from a CUDA device through pinned memory, in the order of the current stream.

    Args:
        rows: how many there are at most.
        cuda: makes the memory and the events.
    """

    def __init__(self, device: torch.device, rows: int, cuda: Any):
        self._device, self._rows, self._cuda = device, rows, cuda
        self._outward = itertools.cycle([(cuda.event(), Buffers(rows, cuda)) for _ in range(BUFFERS)])
        self._inward, self._arrived = Buffers(rows, cuda), cuda.event()

    def tensors(self, arrays: Sequence[npt.NDArray[Any]]) -> tuple[Tensor, ...]:
        """On their way to the device: what is done to them there on this stream comes after the copy."""
        copied, buffers = next(self._outward)
        copied.synchronize()  # the copy out of these buffers may not be over; two steps ago, it mostly is
        made = []
        for i, array in enumerate(arrays):
            buffer = buffers.get(i, array.shape, _type_of(array.dtype))
            np.copyto(buffer.numpy(), array)
            target = torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device)
            made.append(target.copy_(buffer, non_blocking=True))
        copied.record(self._cuda.stream())
        return tuple(made)

    def arrays(self, tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
        """What the device has computed, once this stream is there; valid until the next call."""
        if all(map(_is_here, tensors)):
            return [_array(tensor) for tensor in tensors]
        here = []
        for i, tensor in enumerate(tensors):
            buffer = self._inward.get(i, tensor.shape, tensor.dtype)
            here.append(buffer.copy_(tensor.detach(), non_blocking=True))
        self._arrived.record(self._cuda.stream())
        self._arrived.synchronize()
        return [_array(tensor) for tensor in here]


class Buffers:
    """Pinned tensors, made when they are first asked for."""

    def __init__(self, rows: int, cuda: Any):
        self._rows, self._cuda = rows, cuda
        self._made: dict[Any, Tensor] = {}

    def get(self, place: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The same memory for the same place."""
        count, *rest = shape if len(shape) else (1,)
        key = (place, dtype, tuple(rest))
        if key not in self._made or count > len(self._made[key]):
            with torch.inference_mode(False):  # it is written to again outside of that
                self._made[key] = self._cuda.pinned((max(count, self._rows), *rest), dtype)
        whole = self._made[key]
        rows = whole if count == len(whole) else whole[:count]
        return rows if len(shape) else rows[0]


class Cuda:
    """The calls of CUDA that `Pinned` needs."""

    def __init__(self, device: torch.device):
        self._device = device

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that the device copies by itself."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def event(self) -> Any:
        """One that was never recorded is over."""
        return _untyped.cuda.Event()

    def stream(self) -> torch.cuda.Stream:
        """The one that the caller works on."""
        return torch.cuda.current_stream(self._device)


def _is_here(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _array(tensor: Tensor) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = (tensor.detach() if tensor.requires_grad else tensor).numpy()
    except (TypeError, RuntimeError) as error:
        raise BadAction(f"an action of {tensor.dtype} on {tensor.device} is no array for the envs: {error}") from error
    return array


# ---- operators -------------------------------------------------------------------------------------------------
#
# An operator that changes an argument may return many tensors, and may not return a list of them: there is a set of
# operators for each number of leaves. What a fake kernel must know stands in the `layout` itself: graphs are kept on
# disk under the text of their calls, and another program's env of the same number has other shapes.


class Operators(NamedTuple):
    """Of envs with the same number of leaves in their observations."""

    reset: Any
    step: Any
    send: Any
    recv: Any


class Layout(NamedTuple):
    """What operators return: for each leaf of the observation its type, and its shape for one env."""

    device: torch.device
    num_envs: int
    batch_size: int
    leaves: tuple[tuple[torch.dtype, tuple[int, ...]], ...]

    def fake_obs(self, rows: Any) -> tuple[Tensor, ...]:
        """Empty observations."""
        return tuple([torch.empty((rows, *shape), dtype=dtype, device=self.device) for dtype, shape in self.leaves])

    def fake_answer(self, rows: int) -> tuple[Tensor, ...]:
        """Empty observations, rewards and flags."""
        kinds = (torch.float32, torch.bool, torch.bool)
        return (*self.fake_obs(rows), *[torch.empty(rows, dtype=kind, device=self.device) for kind in kinds])


def _layout_of(host: GraphHost, device: torch.device) -> str:
    types = [str(_type_of(kind)).removeprefix("torch.") for kind in host.obs_types]
    leaves = [f"{kind}{list(leaf.shape)}" for kind, leaf in zip(types, host.obs_leaves, strict=True)]
    return "; ".join([str(device), str(host.num_envs), str(host.pool.batch_size), *leaves])


@functools.lru_cache
def _read_layout(text: str) -> Layout:
    device, num_envs, batch_size, *leaves = text.split("; ")
    read = []
    for leaf in leaves:
        kind, _, shape = leaf.rstrip("]").partition("[")
        read.append((getattr(torch, kind), tuple(int(n) for n in shape.split(",") if n)))
    return Layout(torch.device(device), int(num_envs), int(batch_size), tuple(read))


def _bridge(handle: Tensor) -> Bridge:
    """The env of a handle, in which the call is counted."""
    numbers = handle.numpy()
    found = _bridges.get(numbers.item(0))
    bridge = None if found is None else found()
    if bridge is None:
        raise PoolClosed("the TorchEnv of this graph is gone: keep it for as long as the graph is used")
    numbers[1] += 1
    return bridge


def _reset(
    handle: Tensor, layout: str, seed: int | None, seeds: Sequence[int] | None, env_ids: Tensor | None
) -> Tensor | tuple[Tensor, ...] | None:
    return _as_declared(_bridge(handle).reset(seed if seeds is None else list(seeds), env_ids))


def _fake_reset(handle: Tensor, layout: str, seed: Any, seeds: Any, env_ids: Tensor | None) -> Any:
    read = _read_layout(layout)
    return _as_declared(read.fake_obs(read.num_envs if env_ids is None else env_ids.shape[0]))


def _as_declared(leaves: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...] | None:
    """Operators return one tensor as it is, and none as None."""
    return leaves if len(leaves) > 1 else leaves[0] if leaves else None


def _step(handle: Tensor, layout: str, actions: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return _bridge(handle).step(actions)


def _fake_step(handle: Tensor, layout: str, actions: Sequence[Tensor]) -> tuple[Tensor, ...]:
    read = _read_layout(layout)
    return read.fake_answer(read.num_envs)


def _send(handle: Tensor, layout: str, env_ids: Tensor | None, actions: Sequence[Tensor]) -> None:
    _bridge(handle).send(env_ids, actions)


def _fake_send(handle: Tensor, layout: str, env_ids: Tensor | None, actions: Sequence[Tensor]) -> None:
    pass


def _recv(handle: Tensor, layout: str) -> tuple[Tensor, ...]:
    return _bridge(handle).recv()


def _fake_recv(handle: Tensor, layout: str) -> tuple[Tensor, ...]:
    read = _read_layout(layout)
    ids = torch.empty(read.batch_size, dtype=torch.int64, device=read.device)
    return (ids, *read.fake_answer(read.batch_size))


_library = _untyped.library.Library("shoal", "FRAGMENT")


@functools.cache
def _operators(leaves: int) -> Operators:
    """Not by `torch.library.custom_op`, whose own Python takes longer than a step of many small envs."""

    def define(name: str, arguments: str, returns: int, real: Any, fake: Any) -> Any:
        full = f"{name}_{leaves}"
        results = ", ".join(["Tensor"] * returns)
        # What waits for envs cannot be part of a CUDA graph.
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

"""A pool with tensors for observations, rewards and actions, by operators that a compiler puts into its graph.

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
from collections import namedtuple
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.errors import BadAction, PoolClosed
from shoal.graph.host import GraphHost, Received, StepAnswer, own_errors
from shoal.graph.torch.carriers import carrier_for, type_of

_untyped: Any = torch
_numbers = itertools.count(1)
_envs: dict[int, weakref.ref[TorchEnv]] = {}
_library = _untyped.library.Library("shoal", "FRAGMENT")
_Operators = namedtuple("_Operators", "reset step send recv")
_ANSWER = (torch.float32, torch.bool, torch.bool)  # reward, terminated, truncated


class TorchEnv:
    """A pool with tensors for observations, rewards and actions, in eager code and in compiled graphs alike.

    On the CPU nothing is copied that the pool does not copy: with `copy=True`, as `shoal.make` has it, large
    observations are the pool's own memory, which the pool does not reuse while the tensors live. For CUDA they go
    through pinned memory on the current stream, without a wait. No gradient flows through an env.

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
        obs_types, _ = host.types("PyTorch", type_of)
        self._envs, self.pool = envs, host.pool
        self.num_envs, self.batch_size = host.num_envs, host.pool.batch_size
        specs = host.pool.specs
        self.single_observation_space, self.observation_space = specs.single_observation_space, specs.observation_space
        self.single_action_space, self.action_space = specs.single_action_space, specs.action_space
        self.device = _checked_device(device)
        self._host, self._carrier = host, carrier_for(host, self.device)
        number = next(_numbers)
        _envs[number] = weakref.ref(self, lambda _: _envs.pop(number, None))
        with torch.inference_mode(False):  # so that the handle can be used inside and outside inference mode
            self._handle = torch.tensor([number, 0], dtype=torch.int64, device="cpu")
        # Compiled code depends on these plain values, and not on Gymnasium spaces: so envs with the same values share
        # one compiled graph.
        names = [str(kind).removeprefix("torch.") for kind in obs_types]
        leaves = [(name, tuple(map(int, leaf.shape))) for name, leaf in zip(names, host.obs_leaves, strict=True)]
        self._layout = repr((str(self.device), self.num_envs, self.batch_size, leaves))
        self._nesting = host.nest([None] * len(host.obs_leaves))
        self._action_paths = [leaf.path for leaf in host.action_leaves]
        self._ops = _operators(len(host.obs_leaves))

    def __repr__(self) -> str:
        return f"TorchEnv({self.pool!r}, device={str(self.device)!r})"

    def reset(self, seed: int | Sequence[int] | None = None, env_ids: Tensor | Sequence[int] | None = None) -> Any:
        """Reset envs (None: all), and return their first observations, in the order of `env_ids`.

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

    def step(self, action: Any) -> StepAnswer:
        """Step all envs with a batch of `single_action_space`: one tensor, or dicts and tuples of tensors."""
        *leaves, reward, terminated, truncated = self._ops.step(self._handle, self._layout, self._flat(action))
        return StepAnswer(_nested(self._nesting, iter(leaves)), reward, terminated, truncated)

    def send(self, action: Any, env_ids: Tensor | Sequence[int] | None = None) -> None:
        """Start a step of these envs (None: all), and return at once.

        Args:
            action: a tensor, or nested ones, with a row for each env.
            env_ids: the envs; None for all.
        """
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

    def __exit__(self, *_: object) -> None:
        self.close()


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


def _seeds(seed: Any) -> tuple[int | None, list[int] | None]:
    """Return one seed for all envs, or one for each of them, in the two forms that an operator can take."""
    if seed is None:
        return None, None
    several = list(seed) if isinstance(seed, Sequence | np.ndarray) and not isinstance(seed, str) else None
    found = [seed] if several is None else several
    for one in found:
        if not hasattr(one, "__index__") or not 0 <= int(one) < 1 << 63:
            raise BadAction(f"seed: expected whole numbers from 0 to 2**63 - 1, found {one!r}")
    return (int(seed), None) if several is None else (None, [int(one) for one in several])


def _nested(nesting: Any, leaves: Iterator[Any]) -> Any:
    """Do what `spaces.assemble` does, with dicts and tuples in place of the space: compilers can trace this."""
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


# ---- operators: kernels, and their fakes, which only say what shapes they return ---------------------------------


def _env_of(handle: Tensor) -> TorchEnv:
    """Return the env of a handle, and count the call in the handle."""
    numbers = handle.numpy()
    found = _envs.get(numbers.item(0))
    env = None if found is None else found()
    if env is None:
        raise PoolClosed("the TorchEnv of this graph is gone: keep it for as long as the graph is used")
    numbers[1] += 1
    return env


class _Layout(NamedTuple):
    """What operators return: for each leaf of the observation its type, and its shape for one env."""

    device: torch.device
    num_envs: int
    batch_size: int
    leaves: list[tuple[torch.dtype, tuple[int, ...]]]

    def fake(self, rows: Any, before: Sequence[torch.dtype] = (), after: Sequence[torch.dtype] = ()) -> Any:
        """Make empty observations, and arrays of numbers before and after them."""
        kinds = [*[(kind, ()) for kind in before], *self.leaves, *[(kind, ()) for kind in after]]
        return tuple([torch.empty((rows, *shape), dtype=kind, device=self.device) for kind, shape in kinds])


@functools.lru_cache
def _read_layout(text: str) -> _Layout:
    device, num_envs, batch_size, leaves = ast.literal_eval(text)
    typed = [(getattr(torch, kind), shape) for kind, shape in leaves]
    return _Layout(torch.device(device), num_envs, batch_size, typed)


def _reset(
    handle: Tensor, layout: str, seed: int | None, seeds: Sequence[int] | None, env_ids: Tensor | None
) -> Tensor | tuple[Tensor, ...] | None:
    env = _env_of(handle)
    with own_errors():
        obs = env._host.reset(_as_array(env_ids), seed if seeds is None else list(seeds))
        return _as_declared(env._carrier.tensors(obs))


def _fake_reset(handle: Tensor, layout: str, seed: Any, seeds: Any, env_ids: Tensor | None) -> Any:
    outputs = _read_layout(layout)
    return _as_declared(outputs.fake(outputs.num_envs if env_ids is None else env_ids.shape[0]))


def _as_array(env_ids: Tensor | None) -> npt.NDArray[Any] | None:
    return None if env_ids is None else env_ids.cpu().numpy()


def _as_declared(leaves: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...] | None:
    """Operators return a single tensor as it is, and None in place of no tensor."""
    return leaves if len(leaves) > 1 else leaves[0] if leaves else None


def _step(handle: Tensor, layout: str, actions: Sequence[Tensor]) -> tuple[Tensor, ...]:
    env = _env_of(handle)
    return env._carrier.tensors(env._host.exchange(env._carrier.arrays(actions)))


def _fake_step(handle: Tensor, layout: str, actions: Sequence[Tensor]) -> Any:
    outputs = _read_layout(layout)
    return outputs.fake(outputs.num_envs, after=_ANSWER)


def _send(handle: Tensor, layout: str, env_ids: Tensor | None, actions: Sequence[Tensor]) -> None:
    env = _env_of(handle)
    with own_errors():
        env._host.send(_as_array(env_ids), *env._carrier.arrays(actions))


def _recv(handle: Tensor, layout: str) -> tuple[Tensor, ...]:
    env = _env_of(handle)
    with own_errors():
        ids, answer = env._host.recv()
        return env._carrier.tensors((ids, *answer))


def _fake_recv(handle: Tensor, layout: str) -> Any:
    outputs = _read_layout(layout)
    return outputs.fake(outputs.batch_size, before=(torch.int64,), after=_ANSWER)


@functools.cache
def _operators(leaves: int) -> _Operators:
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

    return _Operators(
        define("reset", ", SymInt? seed, SymInt[]? seeds, Tensor? env_ids", leaves, _reset, _fake_reset),
        define("step", ", Tensor[] actions", leaves + 3, _step, _fake_step),
        define("send", ", Tensor? env_ids, Tensor[] actions", 0, _send, lambda *_: None),
        define("recv", "", leaves + 4, _recv, _fake_recv),
    )

"""A pool with tensors for observations, rewards and actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import BadAction
from shoal.graph.host import GraphHost, Received, StepAnswer
from shoal.graph.torch.carriers import carrier_for, type_of
from shoal.graph.torch.operators import Bridge, describe_outputs, operators


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
        self._bridge = Bridge(host, carrier_for(host, self.device))
        self._handle = self._bridge.handle
        # Compiled code depends on these plain values, and not on Gymnasium spaces: so envs with the same values share
        # one compiled graph.
        self._layout = describe_outputs(host, obs_types, self.device)
        self._nesting = host.nest([None] * len(host.obs_leaves))
        self._action_paths = [leaf.path for leaf in host.action_leaves]
        self._ops = operators(len(host.obs_leaves))

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

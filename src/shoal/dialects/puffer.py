"""PufferLib's vectorization in its own words: `make`, `Serial`, `Multiprocessing`, `Ray`, over any env of Shoal's.

    from shoal.dialects import puffer

    envs = puffer.make(make_env, num_envs=256, num_workers=8, batch_size=128, backend=puffer.Multiprocessing)
    envs.async_reset(seed=0)
    while training:
        obs, rewards, terminals, truncations, infos, env_ids, masks = envs.recv()
        envs.send(policy(obs))                     # for the envs that were received last

In contrast to PufferLib, idle workers sleep, errors name a worker that has died, truncations stay truncations, and each
env has its own seed. An env with several agents (PufferLib's own kind, PettingZoo's, a vector env, another Serial) has
a row for each of them, and its rows always come together.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shoal.dialects.base import PoolFace, in_turn
from shoal.envs.adapt import adapt
from shoal.envs.functions import as_env_fns
from shoal.envs.group import is_group
from shoal.errors import BadEnv, NothingPending
from shoal.support.cores import usable_cores

__all__ = ["Multiprocessing", "Ray", "Reset", "Serial", "make"]

Array = npt.NDArray[Any]
Received = tuple[Any, Array, Array, Array, list[dict[str, Any]], Array, Array]


class Reset(tuple[Any, list[dict[str, Any]]]):
    """What `reset` returns: (observations, infos); as an array, it is the observations."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self[0], dtype=dtype, copy=bool(copy) or None)


class _Vectorized(PoolFace):
    """A pool with PufferLib's methods and attributes.

    Attributes:
        num_envs: how many envs there are.
        num_agents: rows of all envs together.
        agents_per_batch: rows of what `recv` returns.
        single_observation_space, single_action_space: of one row.
        observation_space, action_space: of a batch.
    """

    _api, _partial = "PufferLib", True

    def __init__(self, env_fns: Sequence[Callable[[], Any]], seed: int | None, pool_options: dict[str, Any]):
        self._driver: Any = None
        self._seed = seed
        self._last_ids: Array | None = None  # of the envs that were received, and not yet sent to
        self._open(list(env_fns), None, {"copy": False, **pool_options})
        self._first_env_fn = env_fns[0]
        self.num_envs = self.num_environments = len(env_fns)
        self.num_agents = self.pool.num_envs
        self.agents_per_batch = self.pool.batch_size
        self.num_workers = self.pool.plan.num_workers
        specs = self.pool.specs
        self.single_observation_space, self.observation_space = specs.single_observation_space, specs.observation_space
        self.single_action_space, self.action_space = specs.single_action_space, specs.action_space

    @property
    def driver_env(self) -> Any:
        """An env to inspect. It is made in this process when it is first asked for."""
        if self._driver is None:
            driver = adapt(self._first_env_fn())
            own = driver.env if is_group(driver) else None
            self._driver = own if hasattr(own, "single_observation_space") else driver
        return self._driver

    def seed(self, seed: int) -> None:
        """For the next reset: env i gets `seed + i`."""
        self._seed = seed

    @in_turn
    def async_reset(self, seed: int | None = None) -> None:
        """Start a reset of all envs; their observations come with `recv`."""
        if seed is not None:
            self._seed = seed
        self._last_ids = None
        self.pool.async_reset(seed=self._seed)
        self._seed = None

    def recv(self, timeout: float | None = None) -> Received:
        """The next batch: observations, rewards, terminals, truncations, infos, env ids, masks."""
        with self.pool.turn:
            batch = self.pool.recv(timeout)
            self._last_ids = batch.env_id
        infos: list[dict[str, Any]] = []
        for _, info in sorted(batch.info.items()):
            infos += info["infos"] if list(info) == ["infos"] else [dict(info)]
        return batch.obs, batch.reward, batch.terminated, batch.truncated, infos, batch.env_id, batch.mask

    def send(self, actions: Any) -> None:
        """Step the envs that were received last."""
        with self.pool.turn:
            if self._last_ids is None:
                raise NothingPending("send is for the envs that recv has returned last: call recv first")
            self.pool.send(actions, self._last_ids)
            self._last_ids = None

    @in_turn
    def reset(self, seed: int | None = None) -> Reset:
        """Reset all envs: the observations of the first batch, and its infos."""
        self.async_reset(seed)
        observations, _, _, _, infos, _, _ = self.recv()
        return Reset((observations, infos))

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, list[dict[str, Any]]]:
        """Step the envs that were received last, and receive the next batch."""
        with self.pool.turn:
            self.send(actions)
            return self.recv()[:5]

    def notify(self) -> None:
        """Does nothing: workers need no notice."""

    def close(self) -> None:
        """Close all envs."""
        if self._driver is not None and hasattr(self._driver, "close"):
            self._driver.close()
        self._driver = None
        super().close()


class Serial(_Vectorized):
    """Steps all envs in this thread, one after another.

    Args:
        env_creators: a function, class or Gymnasium id, or a list of them.
        env_args, env_kwargs: for each call of it; a list gives each env its own.
        num_envs: how many.
        seed: of the first reset; env i gets `seed + i`.
        **pool_options: as for `shoal.Pool`.
    """

    def __init__(
        self,
        env_creators: Any = None,
        env_args: Any = None,
        env_kwargs: Any = None,
        num_envs: int | None = None,
        seed: int | None = None,
        *,
        env_creator: Any = None,
        **pool_options: Any,
    ):
        env_fns = _env_fns(env_creators if env_creator is None else env_creator, env_args, env_kwargs, num_envs)
        super().__init__(env_fns, seed, {"backend": "serial", **pool_options})


class Multiprocessing(_Vectorized):
    """Steps envs in worker processes, several in each.

    Args:
        env_creators, env_args, env_kwargs, num_envs, seed: as for Serial.
        num_workers: worker processes; by default, and with "auto", the cores that this process may use.
        envs_per_worker: in place of num_workers, or of num_envs.
        batch_size: envs that `recv` waits for; all by default, half of them with "auto".
        zero_copy: return views of the shared memory, valid for one more send of their envs; False returns copies. If
            the batch size divides the number of envs, a batch with views always has the same neighbouring envs.
        sync_traj: receive the envs strictly in turn, rather than those that are done first.
        overwork: allow more workers than cores.
        **pool_options: as for `shoal.Pool`.
    """

    def __init__(
        self,
        env_creators: Any = None,
        env_args: Any = None,
        env_kwargs: Any = None,
        num_envs: int | None = None,
        num_workers: int | Literal["auto"] | None = None,
        batch_size: int | Literal["auto"] | None = None,
        zero_copy: bool = True,
        sync_traj: bool = False,
        overwork: bool = False,
        seed: int | None = None,
        *,
        env_creator: Any = None,
        envs_per_worker: int | None = None,
        **pool_options: Any,
    ):
        if num_workers == "auto":
            num_workers = None
        if envs_per_worker is not None:
            num_envs, num_workers = _from_envs_per_worker(num_envs, num_workers, envs_per_worker)
        env_fns = _env_fns(env_creators if env_creator is None else env_creator, env_args, env_kwargs, num_envs)
        if batch_size == "auto":
            batch_size = max(1, len(env_fns) // 2)
        if isinstance(num_workers, int) and usable_cores() < num_workers <= len(env_fns) and not overwork:
            warnings.warn(
                f"{num_workers} workers share {usable_cores()} cores, which helps only if envs wait for something; "
                "pass overwork=True to silence this warning",
                stacklevel=3,
            )
        neighbours = zero_copy and isinstance(batch_size, int) and batch_size > 0 and len(env_fns) % batch_size == 0
        super().__init__(
            env_fns,
            seed,
            {
                "backend": "processes", "num_workers": num_workers, "batch_envs": batch_size, "copy": not zero_copy,
                "order": "fifo" if sync_traj else "contiguous" if neighbours else "ready", **pool_options,
            },
        )  # fmt: skip


class Ray(Multiprocessing):
    """Steps envs in actors of a Ray cluster, several in each; see docs/distributed.md.

    Args:
        num_workers: actors; by default as many as the cluster has room for.
        batch_size: envs that `recv` waits for; all by default, half of them with "auto".
        **pool_options: as for Multiprocessing, and `backend_options` as for `shoal.Pool`.
    """

    def __init__(self, *args: Any, **options: Any):
        # Actors use the cores of the cluster, so the number of cores here does not matter.
        super().__init__(*args, **{"backend": "ray", "overwork": True, **options})


def make(
    env_creator_or_creators: Any,
    env_args: Any = None,
    env_kwargs: Any = None,
    backend: Any = None,
    num_envs: int | None = None,
    num_workers: int | Literal["auto"] | None = None,
    envs_per_worker: int | None = None,
    seed: int | None = None,
    **options: Any,
) -> Any:
    """Vectorize an env as PufferLib does.

    Args:
        env_creator_or_creators: a function or class that makes an env, a Gymnasium id, or a list of them.
        backend: Serial, Multiprocessing, Ray, or their names. None chooses Multiprocessing if a number of workers is
            given, and else the fastest backend of Shoal's.
        **options: those of the backend, and of `shoal.Pool`.
    """
    named = {"serial": Serial, "multiprocessing": Multiprocessing, "ray": Ray}
    chosen = named.get(backend.lower()) if isinstance(backend, str) else backend
    if backend is not None and chosen not in named.values():
        raise ValueError(f"backend: expected Serial, Multiprocessing or Ray, found {backend!r}")
    if chosen is Serial:
        return Serial(env_creator_or_creators, env_args, env_kwargs, num_envs, seed, **options)
    if chosen is None and num_workers is None and envs_per_worker is None:
        options.setdefault("backend", "auto")
    return (chosen or Multiprocessing)(
        env_creator_or_creators, env_args, env_kwargs, num_envs, num_workers, seed=seed,
        envs_per_worker=envs_per_worker, **options,
    )  # fmt: skip


def _env_fns(creators: Any, env_args: Any, env_kwargs: Any, num_envs: int | None) -> list[Callable[[], Any]]:
    if creators is None:
        raise BadEnv("expected a function, class or id that makes an env, found None")
    if not isinstance(creators, Sequence) or isinstance(creators, str):
        creators = [creators] * (1 if num_envs is None else num_envs)
    elif num_envs not in (None, len(creators)):
        raise BadEnv(f"num_envs is {num_envs}, and {len(creators)} env creators were given: leave num_envs out")
    args = _one_each("env_args", env_args, len(creators), (list, tuple), [])
    kwargs = _one_each("env_kwargs", env_kwargs, len(creators), (Mapping,), {})
    found: list[Callable[[], Any]] = []
    for creator, own_args, own_kwargs in zip(creators, args, kwargs, strict=True):
        if own_args and not callable(creator):
            raise BadEnv(f"env_args are for a function or class that makes an env, found {creator!r}")
        found += as_env_fns(functools.partial(creator, *own_args) if own_args else creator, 1, own_kwargs)
    return found


def _one_each(name: str, given: Any, count: int, kinds: tuple[type, ...], default: Any) -> list[Any]:
    """One value for each env: a list of values that are each of these kinds, or one value for all."""
    if given is None:
        return [default] * count
    if isinstance(given, list | tuple) and given and all(isinstance(one, kinds) for one in given):
        if len(given) != count:
            raise BadEnv(f"{name}: expected {count}, one for each env, found {len(given)}")
        return list(given)
    if isinstance(given, kinds):
        return [given] * count
    raise BadEnv(f"{name}: expected one for all envs, or a list with one for each, found {given!r:.100}")


def _from_envs_per_worker(num_envs: int | None, num_workers: int | None, each: int) -> tuple[int, int]:
    if num_envs is None and num_workers is None:
        raise ValueError("envs_per_worker: give num_envs or num_workers as well")
    envs = each * (num_workers or 0) if num_envs is None else num_envs
    workers = -(-envs // each) if num_workers is None else num_workers
    if num_workers is not None and each * workers != envs:
        raise ValueError(
            f"num_envs is {num_envs}, and {num_workers} workers with {each} envs each make {each * workers}: leave one "
            "of the three out"
        )
    return envs, workers

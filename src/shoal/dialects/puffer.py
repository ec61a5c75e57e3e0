"""PufferLib's vectorization in its own words: `make`, `Serial`, `Multiprocessing`, `Ray`, over any env of Shoal's.

    from shoal.dialects import puffer

    envs = puffer.make(make_env, num_envs=256, num_workers=8, batch_size=128, backend=puffer.Multiprocessing)
    envs.async_reset(seed=0)
    while training:
        obs, rewards, terminals, truncations, infos, env_ids, masks = envs.recv()
        envs.send(policy(obs))                     # for the envs that were received last

Works without PufferLib. Where it is installed, these classes are subclasses of its own, and `recv` returns as many
values as there: from pufferlib-core 3.0.16 on, the teachers' actions come before the infos.

An env with several agents (PufferLib's own kind, PettingZoo's, a vector env, another Serial) has a row for each of
them, and its rows always come together. docs/migrate/pufferlib.md says what differs.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import batch_space

from shoal.dialects.base import PoolFace, in_turn
from shoal.envs.adapt import adapt
from shoal.envs.functions import as_env_fns
from shoal.envs.group import is_group
from shoal.envs.puffer_envs import ENV_INFOS, TEACHER, action_type, is_puffer_env, takes, takes_buffers
from shoal.envs.wrapper_layers import ForeignEnv
from shoal.errors import BadEnv, NothingPending
from shoal.support.cores import usable_cores
from shoal.worker.building import spaces_of

__all__ = ["Multiprocessing", "Ray", "Reset", "Serial", "make"]

Array = npt.NDArray[Any]
RESET_SEED = 42  # that of PufferLib's `reset` where none is given
SERIAL_IGNORES = ("num_workers", "zero_copy", "sync_traj", "overwork")  # as PufferLib's does


class Reset(tuple[Any, list[dict[str, Any]]]):
    """What `reset` returns: (observations, infos); as an array, it is the observations."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self[0], dtype=dtype, copy=bool(copy) or None)


@functools.cache
def _theirs() -> Any:
    """PufferLib's own module; None where it is not installed, or what it needs is not."""
    try:
        return importlib.import_module("pufferlib.vector")
    except ImportError:
        return None


@functools.cache
def _as_theirs(ours: type[Any]) -> type[Any]:
    """A subclass of one of our classes, and of PufferLib's of the same name, for its `isinstance` checks."""
    theirs = getattr(_theirs(), ours.__name__, None)
    if theirs is None or issubclass(ours, theirs):
        return ours
    return type(ours.__name__, (ours, theirs), {"__doc__": ours.__doc__, "__module__": ours.__module__})


@functools.cache
def _has_teachers() -> bool:
    """Whether the `recv` of PufferLib's vectorizers returns teachers' actions."""
    theirs = _theirs()
    return theirs is not None and "teacher_actions" in theirs.Serial.recv.__code__.co_names


class _Vectorized(PoolFace):
    """A pool with PufferLib's methods and attributes.

    Attributes:
        num_environments: how many envs there are.
        num_agents: rows of all envs together.
        agents_per_batch, num_envs: rows of what `recv` returns.
        single_observation_space, single_action_space: of one row.
        observation_space, action_space: of a batch.
    """

    _api, _partial = "PufferLib", True
    _first_seed: int | None = None  # that of `async_reset` for envs of PufferLib's, where none is given

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Make it an instance of PufferLib's class too."""
        return super().__new__(_as_theirs(cls))

    def __init__(self, envs: _Envs, seed: int | None, pool_options: dict[str, Any]):
        self._made_driver: Any = None
        self._seed = None if envs.of_pufferlib else seed
        self._envs = envs
        self._last_ids: Array | None = None  # of the envs that were received, and not yet sent to
        self._open(list(envs.fns), None, {"copy": False, **pool_options})
        self.num_environments = len(envs.fns)
        self.num_agents = self.pool.num_envs
        self.agents_per_batch = self.pool.batch_size
        self.num_workers = self.pool.plan.num_workers
        specs = self.pool.specs
        self.single_observation_space, self.single_action_space = (
            specs.single_observation_space,
            specs.single_action_space,
        )
        self.observation_space, self.action_space = specs.observation_space, specs.action_space
        if self.agents_per_batch < self.num_agents:
            self.observation_space = batch_space(self.single_observation_space, self.agents_per_batch)
            self.action_space = batch_space(self.single_action_space, self.agents_per_batch)
        self.agent_ids = np.arange(self.num_agents)
        self._action_type = action_type(self.single_action_space)
        self._action_shape = self.single_action_space.shape or ()

    num_envs = property(lambda self: self.agents_per_batch, doc="Rows of what `recv` returns, as PufferLib has it.")
    emulated = property(
        lambda self: getattr(self.driver_env, "emulated", False),
        doc="How PufferLib has flattened observations; False where it has not.",
    )

    @property
    def driver_env(self) -> Any:
        """An env to inspect: the first one where envs live in this process, else one that is made when first asked for.

        It has what PufferLib's policies read, whatever kind of env it is.
        """
        if self.pool.plan.backend == "serial" and not self.pool.closed:
            return _as_driver(self.pool.local_envs[0])
        if self._made_driver is None:
            self._made_driver = _as_driver(adapt(self._envs.fns[0]()))
        return self._made_driver

    def seed(self, seed: int) -> None:
        """For the next reset: env i gets `seed + i`."""
        self._seed = seed

    @in_turn
    def async_reset(self, seed: int | None = None) -> None:
        """Start a reset of all envs; their observations come with `recv`."""
        own, self._seed = self._seed, None
        self._last_ids = None
        if seed is None:
            seed = own
        if seed is None and self._envs.of_pufferlib:
            seed = self._first_seed
        self.pool.async_reset(seed=self._envs.seeds(seed, self.pool))

    def recv(self, timeout: float | None = None) -> tuple[Any, ...]:
        """The next batch: observations, rewards, terminals, truncations, infos, env ids, masks.

        Where PufferLib has them, teachers' actions stand before the infos.
        """
        with self.pool.turn:
            batch = self.pool.recv(timeout)
            self._last_ids = batch.env_id
        terminals = batch.terminated
        if self.pool.lane_names is not None and not batch.mask.all():
            terminals = terminals | ~batch.mask  # as PufferLib has it for agents that are absent
        teachers = [np.zeros((len(terminals), *self._action_shape), self._action_type)] if _has_teachers() else []
        infos: list[dict[str, Any]] = []
        for lane, info in sorted(batch.info.items()):
            if TEACHER in info:
                for actions in teachers:
                    actions[np.searchsorted(batch.env_id, lane)] = info[TEACHER]
                info = {name: value for name, value in info.items() if name != TEACHER}
            infos += info[ENV_INFOS] if list(info) == [ENV_INFOS] else [info] if info else []
        rewards = batch.reward.astype(np.float32)
        return batch.obs, rewards, terminals, batch.truncated, *teachers, infos, batch.env_id, batch.mask

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
        if seed is None and self._seed is None and self._envs.of_pufferlib:
            seed = RESET_SEED
        self.async_reset(seed)
        observations, *_, infos, _, _ = self.recv()
        return Reset((observations, infos))

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, list[dict[str, Any]]]:
        """Step the envs that were received last, and receive the next batch."""
        with self.pool.turn:
            self.send(actions)
            observations, rewards, terminals, truncations, *_, infos, _, _ = self.recv()
            return observations, rewards, terminals, truncations, infos

    def notify(self) -> None:
        """Call the `notify` of all envs, if they are PufferLib's."""
        if self._envs.of_pufferlib:
            self.pool.call("notify")

    def close(self) -> None:
        """Close all envs."""
        if self._made_driver is not None and hasattr(self._made_driver, "close"):
            self._made_driver.close()
        self._made_driver = None
        super().close()


class Serial(_Vectorized):
    """Steps all envs in this thread, one after another.

    Args:
        env_creators, env_creator: a function, class or Gymnasium id, or a list of them; either name will do.
        env_args, env_kwargs: for each call of it; a list gives each env its own.
        num_envs: how many.
        seed: for creators that take `buf` and `seed`, as PufferLib's do: env i gets `seed + i`. For other envs it is
            that of the first reset.
        **pool_options: as for `shoal.Pool`. Those of Multiprocessing alone are ignored.
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
        creators = env_creators if env_creator is None else env_creator
        envs = _Envs(_env_fns(creators, env_args, env_kwargs, num_envs), seed)
        kept = {name: value for name, value in pool_options.items() if name not in SERIAL_IGNORES}
        super().__init__(envs, seed, {"backend": "serial", **kept})

    @property
    def envs(self) -> list[Any]:
        """The envs, as their creators made them."""
        return [_own(env) for env in self.pool.local_envs]


class Multiprocessing(_Vectorized):
    """Steps envs in worker processes, several in each.

    Args:
        env_creators, env_creator, env_args, env_kwargs, num_envs, seed: as for Serial.
        num_workers: worker processes; by default, and with "auto", the cores that this process may use.
        envs_per_worker: in place of num_workers, or of num_envs.
        batch_size: envs that `recv` waits for; all by default, half of them with "auto".
        zero_copy: return views of the shared memory, valid for one more send of their envs; False returns copies. If
            the batch size divides the number of envs, a batch with views always has the same neighbouring envs.
        sync_traj: receive the envs strictly in turn; False receives those that are done first.
        overwork: allow more workers than cores.
        **pool_options: as for `shoal.Pool`.
    """

    _first_seed = 0

    def __init__(
        self,
        env_creators: Any = None,
        env_args: Any = None,
        env_kwargs: Any = None,
        num_envs: int | None = None,
        num_workers: int | Literal["auto"] | None = None,
        batch_size: int | Literal["auto"] | None = None,
        zero_copy: bool = True,
        sync_traj: bool = True,
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
        envs = _Envs(env_fns, seed, num_workers)
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
            envs,
            seed,
            {
                "backend": "processes", "num_workers": num_workers, "batch_envs": batch_size, "copy": not zero_copy,
                "order": "fifo" if sync_traj else "contiguous" if neighbours else "ready", **pool_options,
            },
        )  # fmt: skip


class Ray(Multiprocessing):
    """Steps envs in actors of a Ray cluster, several in each; see docs/guides/clusters.md.

    Args:
        num_workers: actors; by default as many as the cluster has room for.
        batch_size: envs that `recv` waits for; all by default, half of them with "auto".
        **options: as for Multiprocessing, and `backend_options` as for `shoal.Pool`.
    """

    _first_seed = RESET_SEED

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
        env_args, env_kwargs, num_envs, num_workers, envs_per_worker, seed: as for PufferLib's `make`.
        **options: those of the backend, and of `shoal.Pool`.

    Raises:
        ValueError: the backend is not one of the three.
    """
    name = _name_of_backend(backend)
    chosen = {"serial": Serial, "multiprocessing": Multiprocessing, "ray": Ray}.get(name)
    if name == "pufferenv":  # an env that is a vector env by itself
        return env_creator_or_creators(*(env_args or ()), **(env_kwargs or {}))
    if backend is not None and chosen is None:
        raise ValueError(f"backend: expected Serial, Multiprocessing or Ray, found {backend!r}")
    if chosen is Serial:
        # As PufferLib has it, so that a batch keeps its size when the backend is changed.
        num_envs = options.pop("batch_size", None) or num_envs
        return Serial(env_creator_or_creators, env_args, env_kwargs, num_envs, seed, **options)
    if chosen is None and num_workers is None and envs_per_worker is None:
        options.setdefault("backend", "auto")
    return (chosen or Multiprocessing)(
        env_creator_or_creators, env_args, env_kwargs, num_envs, num_workers, seed=seed,
        envs_per_worker=envs_per_worker, **options,
    )  # fmt: skip


def _name_of_backend(backend: Any) -> str:
    """The name of a backend: our class, PufferLib's own, or a text; "" for anything else."""
    name = backend.__name__ if isinstance(backend, type) else backend
    return name.lower() if isinstance(name, str) else ""


class _Envs:
    """The functions that make the envs, and the seeds that PufferLib would give to them.

    Args:
        fns: one for each env.
        seed: for creators that take one.
        num_workers: as asked for. PufferLib gives env j of worker w the seed `s + w + j` for a reset.

    Attributes:
        of_pufferlib: whether all creators take `buf`, as PufferLib's must; its rules for seeds are for these.
    """

    def __init__(self, fns: list[Callable[..., Any]], seed: int | None, num_workers: int | None = None):
        self.of_pufferlib = all(takes_buffers(fn) for fn in fns)
        count = len(fns)
        whole = isinstance(num_workers, int) and num_workers > 0 and count % num_workers == 0
        each = count // num_workers if whole else 1  # type: ignore[operator]
        self._steps = [i // each + i % each for i in range(count)] if whole else list(range(count))
        self.fns: list[Callable[[], Any]] = fns
        if self.of_pufferlib and all(takes(fn, "seed") for fn in fns):
            # Theirs has (s + w) * each + j.
            own = [(seed or 0) * each + i for i in range(count)]
            self.fns = [_with_seed(fn, one) for fn, one in zip(fns, own, strict=True)]

    def seeds(self, seed: int | None, pool: Any) -> Any:
        """The seed of each row: by PufferLib's rule for its envs, else one seed from which the pool makes others."""
        if seed is None or not self.of_pufferlib or not pool.lanes_per_env:
            return seed
        return [seed + step for step in self._steps for _ in range(pool.lanes_per_env)]


def _with_seed(fn: Callable[..., Any], seed: int) -> Callable[[], Any]:
    """The function with a seed, unless it was given one."""
    given = fn.keywords if isinstance(fn, functools.partial) else {}
    return fn if "seed" in given else functools.partial(fn, seed=seed)


def _own(env: Any) -> Any:
    """The env that a creator made, without the adapter around it."""
    return env.env if is_group(env) or isinstance(env, ForeignEnv) else env


def _as_driver(env: Any) -> Any:
    """The env with what PufferLib's policies and trainer read of it."""
    own = _own(env)
    driver = own if is_puffer_env(own) or not is_group(env) else env
    lanes = env.num_lanes if is_group(env) else 1
    spaces = spaces_of(env)
    found = {"single_observation_space": spaces[0], "single_action_space": spaces[1], "num_agents": lanes}
    for name, value in {**found, "emulated": False}.items():
        if not hasattr(driver, name):
            setattr(driver, name, value)
    return driver


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

"""What the dialects have in common: how one opens its pool, takes its answers, and closes it."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import gymnasium
import numpy as np

from shoal.envs.adapt import adapt
from shoal.errors import BadEnv, EnvError, ShoalError, env_error
from shoal.memory.answers import Ready
from shoal.memory.infos import stacked
from shoal.options import refuse_unknown_options
from shoal.pool import Pool
from shoal.support.checks import Ids, refuse_pickling
from shoal.support.foreign_code import guarded

Method = TypeVar("Method", bound=Callable[..., Any])
Itself = TypeVar("Itself", bound="ClosedByWith")


def split_reset_mask(options: dict[str, Any] | None, count: int) -> tuple[Ids | None, dict[str, Any] | None]:
    """Take "reset_mask" out of the options of a reset: the ids of its envs (None without a mask), and the rest."""
    if options is None or "reset_mask" not in options:
        return None, options
    rest = dict(options)
    mask = rest.pop("reset_mask")
    name = "`options['reset_mask']` must"
    if not isinstance(mask, np.ndarray):
        raise TypeError(f"{name} be a numpy array, got {type(mask)}")
    if mask.shape != (count,):
        raise ValueError(f"{name} have shape `({count},)`, got {mask.shape}")
    if mask.dtype != np.bool_:
        raise TypeError(f"{name} have `dtype=np.bool_`, got {mask.dtype}")
    if not mask.any():
        raise ValueError(f"{name} contain a boolean array with at least one True value, got reset_mask={mask}")
    return np.flatnonzero(mask), rest


def as_list(env_fns: Any) -> list[Any]:
    """Env functions as a list. Raises TypeError for anything else, such as an id."""
    if isinstance(env_fns, str) or not isinstance(env_fns, Iterable):
        raise TypeError(
            f"expected a list of functions that make one env each, found {env_fns!r}; for an id: make_vec_env"
        )
    return list(env_fns)


def check_maker(env_id: Any) -> None:
    """Raise BadEnv unless it is an id, or a function or class."""
    if not isinstance(env_id, str) and not callable(env_id):
        raise BadEnv(
            f"expected an id, or a function or class that makes an env, found {env_id!r}; an env that is made already "
            "cannot stand for several"
        )


def make_one(env_id: Any, env_kwargs: Mapping[str, Any]) -> Any:
    """Make one env, by its id (with images, if it can render them) or by a function or class."""
    if not isinstance(env_id, str):
        return adapt(env_id(**env_kwargs))
    try:
        return gymnasium.make(env_id, **{"render_mode": "rgb_array", **env_kwargs})
    except TypeError:  # an env that does not render
        return gymnasium.make(env_id, **env_kwargs)


class ClosedByWith(ABC):
    """Closes itself at the end of a `with` block."""

    @abstractmethod
    def close(self) -> None:
        """Close all envs."""

    def __enter__(self: Itself) -> Itself:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv as TheirVecEnv

    class VecEnvBase(ClosedByWith, TheirVecEnv):
        """What VecEnvs of ours derive from for type checkers: when they run, `isinstance` alone says the same."""
else:
    VecEnvBase = ClosedByWith


def quoted(error: EnvError) -> EnvError:
    """The error with the env's own text. What Shoal has to say of it becomes its cause."""
    if error.original is not None and not isinstance(error.__cause__, EnvError):
        error.__cause__ = env_error(None, vars(error))
        with contextlib.suppress(Exception):  # the env's own class may not let itself be written
            error._text = guarded(str, error.original)
    return error


def in_turn(method: Method) -> Method:
    """Keep other threads out while this method of a PoolFace runs. Those that run at every step do it themselves."""

    @functools.wraps(method)
    def alone(self: PoolFace, *args: Any, **kwargs: Any) -> Any:
        with self.pool.turn:
            return method(self, *args, **kwargs)

    return alone  # type: ignore[return-value]


class PoolFace(ClosedByWith):
    """A pool that speaks the words of another library."""

    pool: Pool
    _late = False  # whether envs may still answer a step that no call waits for any more
    _api = ""  # what error messages call the dialect
    _mode: str | None = None  # the only autoreset mode that the dialect has; None if it has all of them
    _partial = False  # whether an answer may have rows of some envs only
    _quotes = False  # whether an env's error has the env's own text, as in a plain loop

    def _open(self, env: Any, num_envs: int | None, options: dict[str, Any]) -> None:
        """Make the pool. By default, arrays are the caller's own, and Box actions may leave their bounds."""
        refuse_unknown_options(options)
        options = {"copy": True, "check_actions": "discrete", **options}
        if self._mode is not None and options.setdefault("autoreset", self._mode) != self._mode:
            raise ValueError(
                f'autoreset: {self._api} knows only "{self._mode}", found {options["autoreset"]!r}; for other modes '
                "use shoal.Pool"
            )
        try:
            self.pool = pool = Pool(env, num_envs, **options)
        except EnvError as error:
            raise self._told(error) from error.__cause__
        try:
            if not self._partial and pool.batch_size != pool.num_envs:
                raise ValueError(
                    f"batch_size: {self._api} returns a row for each env at every step; for fewer rows use shoal.Pool, "
                    'or for a plan with all of them shoal.tune(..., batch_size="all")'
                )
            self._learn()
        except BaseException:
            pool.close()
            raise

    def _learn(self) -> None:
        """Take over from the pool what the dialect needs; if this raises, the pool is closed."""

    closed = property(attrgetter("pool.closed"), doc="Whether it was closed, by the user or after a worker's death.")

    def close(self) -> None:
        """Close all envs and end all workers. May be called again."""
        self.pool.close()

    __reduce__ = refuse_pickling

    def _join_infos(self, infos: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """The infos of envs as a dict of arrays, for a face that is a vector env of Gymnasium, by its own rules.

        Raises EnvError where that cannot be done; the step is done, and its arrays are in `pool.last_answer()`.
        """
        add: Any = self._add_info  # type: ignore[attr-defined]
        together = stacked(infos, self.pool.num_envs, add)
        if together is not None:
            return together
        joined: dict[str, Any] = {}
        for env_id in sorted(infos):
            try:
                joined = add(joined, infos[env_id], env_id)
            except Exception:
                for key, value in infos[env_id].items():
                    try:
                        joined = add(joined, {key: value}, env_id)
                    except Exception as error:
                        raise self._bad_info(infos, env_id, key, error) from error
        return joined

    def _bad_info(self, infos: dict[int, dict[str, Any]], env_id: int, key: Any, error: Exception) -> EnvError:
        worker = next((one.index for one in self.pool.workers if env_id in one.env_ids), -1)
        text = (
            f"env {env_id}: info[{key!r}] cannot be put into one array with those of the other envs: "
            f"{type(error).__name__}: {error}. Let all envs give one shape and type, or use shoal.Pool, which keeps "
            "the info of each env. The step itself is done: pool.last_answer() has its arrays, and this error's "
            "`infos` the infos by env"
        )
        attributes = {"env_id": env_id, "worker": worker, "during": "its info", "original": error, "infos": infos}
        return env_error(type(error), {**attributes, "_text": text})

    def _exchange(self, actions: Any, env_ids: Ids | None = None) -> Ready:
        """Step all envs, or these. After an interrupt or a timeout, answers that come later belong to no call."""
        try:
            return self.pool.exchange(actions, env_ids=env_ids)
        except BaseException as error:
            self._late = True
            if self._quotes and isinstance(error, EnvError):
                raise self._told(error) from error.__cause__
            raise

    def _collect(self, wait: Callable[..., Ready], *args: Any, env_ids: Any = None) -> Ready:
        """Wait for answers. After an env's error, the other answers of these envs (None: all) are dropped."""
        try:
            return wait(*args)
        except EnvError as error:
            with contextlib.suppress(ShoalError):  # the env's own error is what matters
                self.pool.drop_pending(env_ids)
            raise self._told(error) from error.__cause__
        except BaseException:
            self._late = True
            raise

    def _told(self, error: Exception) -> Exception:
        """What to raise for an error of the pool. It may set the error's cause."""
        return quoted(error) if self._quotes and isinstance(error, EnvError) else error

    def _drop_late(self) -> None:
        """Wait for late answers, and drop them: they must not be taken for those of the next step."""
        if self._late:
            self.pool.drop_pending()
            self._late = False

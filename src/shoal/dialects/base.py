"""What the dialects have in common: how one opens its pool, takes its answers, and closes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal.errors import EnvError, ShoalError
from shoal.memory.answers import Ready
from shoal.options import refuse_unknown_options
from shoal.pool import Pool
from shoal.support.checks import Ids

__all__ = ["ClosedByWith", "PoolFace", "open_pool", "split_reset_mask"]


def open_pool(
    env: Any, num_envs: int | None, options: dict[str, Any], api: str, mode: str | None = None, partial: bool = False
) -> Pool:
    """Make the pool of a dialect. By default, arrays are the caller's own, and Box actions may leave their bounds.

    Args:
        env, num_envs, options: what the user gave, as for `shoal.Pool`.
        api: what error messages call the dialect.
        mode: the only autoreset mode that the dialect has; None if it has all of them.
        partial: whether an answer may have rows of some envs only.

    Raises:
        TypeError: an option is unknown.
        ValueError: the dialect does not have this autoreset mode, or has no partial batches.
    """
    refuse_unknown_options(options)
    options = {"copy": True, "check_actions": "discrete", **options}
    if mode is not None and options.setdefault("autoreset", mode) != mode:
        raise ValueError(
            f'autoreset: {api} knows only "{mode}", found {options["autoreset"]!r}; for other modes use shoal.Pool'
        )
    pool = Pool(env, num_envs, **options)
    if not partial and pool.batch_size != pool.num_envs:
        pool.close()
        raise ValueError(
            f"batch_size: {api} returns a row for each env at every step; for fewer rows use shoal.Pool, or for a plan "
            'with all of them shoal.tune(..., batch_size="all")'
        )
    return pool


def split_reset_mask(options: dict[str, Any] | None, count: int) -> tuple[Ids | None, dict[str, Any] | None]:
    """Take "reset_mask" out of the options of a reset: the ids of its envs (None where there is no mask), and the rest.

    Raises:
        TypeError, ValueError: the mask is no array of `count` bools, or all of them are False.
    """
    if options is None or "reset_mask" not in options:
        return None, options
    rest = dict(options)
    mask = rest.pop("reset_mask")
    expected = f"`options['reset_mask']` must be a numpy array of {count} bools, of which at least one is True"
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
        raise TypeError(f"{expected}; got {mask!r}")
    if mask.shape != (count,) or not mask.any():
        raise ValueError(f"{expected}; got {mask!r}")
    return np.flatnonzero(mask), rest


class ClosedByWith:
    """Closes itself at the end of a `with` block."""

    def close(self) -> None:
        """Close all envs."""
        raise NotImplementedError

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PoolFace(ClosedByWith):
    """A pool that speaks the words of another library.

    Attributes:
        pool: the pool.
    """

    pool: Pool
    _late = False  # whether envs may still answer a step that no call waits for any more

    @property
    def closed(self) -> bool:
        """Whether it was closed, by the user or after a worker's death."""
        return self.pool.closed

    def close(self) -> None:
        """Close all envs and end all workers. May be called again."""
        self.pool.close()

    def _exchange(self, actions: Any) -> Ready:
        """Step all envs. After an interrupt or a timeout, the answers that come later belong to no call."""
        try:
            return self.pool.exchange(actions)
        except BaseException:
            self._late = True
            raise

    def _collect(self, wait: Callable[..., Ready], *args: Any, env_ids: Any = None) -> Ready:
        """Wait for answers. After an env's error, the other answers of these envs (None: all) are dropped."""
        try:
            return wait(*args)
        except EnvError:
            with contextlib.suppress(ShoalError):  # the env's own error is what matters
                self.pool.drop_pending(env_ids)
            raise
        except BaseException:
            self._late = True
            raise

    def _drop_late(self) -> None:
        """Wait for late answers, and drop them: they must not be taken for those of the next step."""
        if self._late:
            self.pool.drop_pending()
            self._late = False

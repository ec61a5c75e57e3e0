"""CheckNan: finds the first NaN or infinite value, and says where it came from."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from shoal.errors import BadObservation
from shoal.support.checks import Ids
from shoal.wrappers.base import Array, Bound, Rows, Transform, arrays_of


class CheckNan(Transform):
    """Looks for NaN, and for infinite values, in actions, observations and rewards.

    Args:
        raise_exception: raise BadObservation (which is a ValueError) rather than warn.
        warn_once: warn only the first time.
        check_inf: look for infinite values as well.
    """

    def __init__(self, raise_exception: bool = False, warn_once: bool = True, check_inf: bool = True):
        self.raise_exception, self.warn_once, self.check_inf = raise_exception, warn_once, check_inf
        self._warned = False
        self._actions: dict[str, Array] = {}

    def bind(self, bound: Bound) -> Space[Any]:
        space = super().bind(bound)
        self._steps = np.zeros(bound.num_envs, np.int64)  # since each env's last reset
        self._acted = np.zeros(bound.num_envs, np.bool_)
        return space

    def send(self, actions: Any, ids: Ids) -> None:
        """Look at the actions of the envs `ids`, and keep them: a bad action may cause bad observations."""
        self._acted[ids] = True
        if not isinstance(self.bound.action_space, spaces.Dict | spaces.Tuple):  # so a list is a batch
            try:
                actions = np.asarray(actions)
            except (ValueError, TypeError):
                return  # no array at all: the envs raise a better error
        for name, array in arrays_of(actions):
            if array.ndim == 0 or len(array) != len(ids):
                continue  # the envs raise a better error
            kept = self._actions.get(name)
            if kept is None or kept.shape[1:] != array.shape[1:] or kept.dtype != array.dtype:
                kept = self._actions[name] = np.zeros((self.bound.num_envs, *array.shape[1:]), array.dtype)
            kept[ids] = array
            self._look(f"the action{name}", array, ids, "the policy that chose it is to blame, not the env")

    def apply(self, rows: Rows) -> None:
        self._steps[rows.ids] += 1
        self._steps[rows.ids[rows.began & ~rows.done]] = 0
        # First the ends of episodes, then the beginnings of the next ones.
        self._look("the reward", rows.reward, rows.ids)
        for row, final in rows.final_obs.items():
            for name, array in arrays_of(final):
                self._look(f"the last observation{name}", array[None], rows.ids[row : row + 1])
        self._steps[rows.ids[rows.began]] = 0
        for name, array in arrays_of(rows.obs):
            if array.ndim and len(array) == len(rows.ids):
                self._look(f"the observation{name}", array, rows.ids)

    def _look(self, what: str, values: Array, ids: Ids, cause: str | None = None) -> None:
        if values.dtype.kind not in "fc":
            return
        # A sum is nan or infinite if any of its parts is. It reads each number once, and makes no array.
        with np.errstate(all="ignore"):
            total = np.add.reduce(values, axis=None)
        if np.isfinite(total):
            return
        bad = ~np.isfinite(values) if self.check_inf else np.isnan(values)
        if bad.any():
            self._report(what, values, bad, ids, cause)

    def _report(self, what: str, values: Array, bad: Array, ids: Ids, cause: str | None) -> None:
        places = np.argwhere(bad)
        row, *place = places[0].tolist()
        env_id = int(ids[row])
        others = np.unique(places[:, 0])[1:9]
        where = f" at {place}" if place else ""
        count = self._steps[env_id] + (cause is not None)  # an action is for the step to come
        step = f"step {count}" if count else "its reset"
        also = f" (and so in envs {ids[others].tolist()})" if len(others) else ""
        message = (
            f"{what} of env {env_id} is {values[tuple(places[0])]}{where}, in {step} of its episode{also}; "
            f"{cause or self._blame(env_id)}"
        )
        if self.raise_exception:
            raise BadObservation(message)
        if not (self.warn_once and self._warned):
            self._warned = True
            warnings.warn(message, UserWarning, stacklevel=3)

    def _blame(self, env_id: int) -> str:
        """The likely cause: the last action, if it is not finite, or the env."""
        if not self._acted[env_id] or not self._steps[env_id]:
            return "no action was taken before it: the env itself is to blame"
        for name, kept in self._actions.items():
            action = kept[env_id]
            if action.dtype.kind in "fc" and not np.isfinite(action).all():
                return f"its last action{name} was {action.tolist()}: that is the likely cause"
        shown = {name or "action": kept[env_id].tolist() for name, kept in self._actions.items()}
        return f"its last action was sound ({shown}): the env itself is to blame"

"""Autoreset: what a step of a lane becomes when the lane's episode is over. All Python code takes the rules from here.

| mode | the step that ends an episode answers | the next step of the lane |
|---|---|---|
| next_step | the last observation | begins an episode; its action is ignored, its reward and flags are zero |
| same_step | the first observation of the next episode; `final` holds the last one | is an ordinary step |
| disabled | the last observation | must be a reset, which the caller asks for |

An answer's flag `began` is set where its observation is the first of an episode: at every reset, at a step that only
begins an episode, and under same_step at the step that ends one. Return and length belong to the episode of the step:
under same_step they are those of the episode that has just ended; an answer that only begins an episode has zeros.

The C core (`native/step_block.h`, `native/twin.py`), kernels (`compiled/template.py`, `compiled/cuda/source.py`) and
JAX (`graph/jax/functional.py`) have their own forms. `tests/envs/test_autoreset.py` compares all with one table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shoal.memory.copies import own_copy
from shoal.memory.info_columns import InfoColumns
from shoal.native import AUTORESET
from shoal.spaces.leaves import Array

if TYPE_CHECKING:
    from shoal.envs.group import Answers

Mask = npt.NDArray[np.bool_]

# One dict for each row of the answers, or `InfoColumns`, which is quicker for many rows; None where all are empty.
Infos = Sequence[dict[str, Any]] | None
Act = Callable[[Array, Any], Infos]
EVERY = slice(None)


@dataclass(frozen=True)
class Autoreset:
    """One autoreset mode. Code asks for what a mode does, and not for its name.

    Attributes:
        begins_next: the first step after an episode's end begins the next episode.
        resets_at_once: the step that ends an episode also begins the next one, and needs room for the last observation.
        user_resets: the caller resets each lane that has ended.
        in_kernels: compiled code, on CPUs and GPUs, knows the mode; envs in kernels refuse it otherwise.
    """

    name: str
    begins_next: bool = False
    resets_at_once: bool = False
    user_resets: bool = False
    in_kernels: bool = False

    @property
    def number(self) -> int:
        """The mode's number in the C core and in kernels."""
        return AUTORESET[self.name]


RULES = {
    mode.name: mode
    for mode in (
        Autoreset("next_step", begins_next=True, in_kernels=True),
        Autoreset("same_step", resets_at_once=True, in_kernels=True),
        Autoreset("disabled", user_resets=True, in_kernels=True),
    )
}
MODES = tuple(RULES)
KERNEL_MODES = tuple(mode.name for mode in RULES.values() if mode.in_kernels)


class Episodes:
    """Applies a mode to the lanes of one env: remembers the lanes that have ended, and orders the resets."""

    def __init__(self, lanes: int, mode: str = MODES[0]):
        self.ended: Mask = np.zeros(lanes, np.bool_)  # the lane's episode is over, and the next one has not begun
        self.rule = RULES[mode]

    def use(self, mode: str) -> None:
        self.rule = RULES[mode]

    def begun(self, rows: Any, out: Answers, at: Any = slice(None)) -> None:
        """Mark that these lanes have begun an episode; `at` are their places in `out`."""
        out.began[at] = True
        self.ended[rows] = False

    def step(self, rows: Array, out: Answers, step: Act, begin: Act) -> Infos:
        """Step these lanes, and begin episodes where the mode says so.

        `step` is a function (rows, at) that steps some of the lanes, and writes the places `at` of `out`, a mask or
        EVERY; `begin` is one that resets some of the lanes, writes their observations, and calls `begun`.
        """
        infos: Infos = None
        over = None
        if self.rule.begins_next and self.ended.any() and (due := self.ended[rows]).any():
            infos = _put(None, due, begin(rows[due], due))
            at = ~due
            if not at.any():
                return infos
            infos = _put(infos, at, step(rows[at], at))
            over = at & (out.terminated | out.truncated)
        else:
            infos = step(rows, EVERY)
            over = out.terminated | out.truncated
        if not self.rule.resets_at_once:
            self.ended[rows] = over
        elif over.any():
            keep_finals(out, over)
            last = _last_infos(infos, over)
            infos = _put(infos, over, _joined(last, begin(rows[over], over), int(over.sum())))
        return infos

    def note(self, out: Answers) -> None:
        """Mark the beginnings in a step of all lanes, for an env that does its own resets by this mode."""
        if self.rule.resets_at_once:
            np.logical_or(out.terminated, out.truncated, out=out.began)
            return
        if self.rule.begins_next:
            out.began[:] = self.ended
        self.ended = out.terminated | out.truncated


def keep_finals(out: Answers, at: Any) -> None:
    """Copy the last observations of these rows to `final`, before the first ones of the next episodes replace them."""
    for final, obs in zip(out.final, out.obs, strict=True):
        final[at] = obs[at]
    out.has_final[at] = True


def with_final_info(last: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """Join the last info of an episode, and the first one of the next episode."""
    return {"final_info": last, **first} if last else first


def _last_infos(infos: Infos, over: Mask) -> Infos:
    """Copies of the infos of these rows: an env may use its infos again in reset."""
    if isinstance(infos, InfoColumns):
        return infos.take(over)
    return infos and [own_copy(infos[row]) for row in np.flatnonzero(over).tolist()]


def _joined(last: Infos, first: Infos, count: int) -> Infos:
    """Join the last infos of episodes and the first ones of the next."""
    if not last:
        return first
    if isinstance(last, InfoColumns) and (first is None or isinstance(first, InfoColumns)):
        return (first or InfoColumns(count, [])).with_final(last)
    none: list[dict[str, Any]] = [{}] * count
    return [with_final_info(*pair) for pair in zip(last, first or none, strict=True)]


def _put(infos: Infos, at: Mask, more: Infos) -> Infos:
    """Put the infos of some rows among those of all rows."""
    if more is None or at.all():
        return infos if more is None else more
    if isinstance(more, InfoColumns) and (infos is None or isinstance(infos, InfoColumns)):
        return InfoColumns(len(at), [*(infos.parts if infos else ()), *more.at(at)])
    found = [{} for _ in at] if infos is None else list(infos)
    for row, info in zip(np.flatnonzero(at).tolist(), more, strict=True):
        found[row] = info
    return found

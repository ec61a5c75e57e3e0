"""Each behaviour of Gymnasium's vector envs, over theirs and over ours: the same results, errors and texts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

from dialects import gymnasium_behaviours as behaviours
from dialects import gymnasium_life as life
from envs import INFO_KINDS, SPACES
from shoal.dialects import gymnasium as face

Outcome = tuple[str, str, Any]  # what was done, "gave" or "raised", and what


def scripts() -> list[Any]:
    """All behaviours, for each class that has them."""
    both = dict(behaviours.BOTH)
    for mode in behaviours.MODES:
        both[f"reset masks {mode.name}"] = partial(behaviours.reset_masks, mode)
        both[f"every mode {mode.name}"] = partial(behaviours.every_mode, mode)
    for name, given in behaviours.ACTIONS.items():
        both[f"actions: {name}"] = partial(behaviours.discrete_actions, given)
    both |= {f"space {name}": partial(behaviours.every_space, name) for name in SPACES}
    both |= {f"info {kind}": partial(behaviours.every_info, kind) for kind in INFO_KINDS}
    both |= {f"odd answer: {which}": partial(life.odd_answers, which) for which in life.ODD_ANSWERS}
    both |= {f"wrapper {name}": partial(life.wrapped, name) for name in life.WRAPPERS}
    alone = dict(behaviours.ASYNC)
    alone |= {f"misused while {name or 'idle'}": partial(life.misused, name) for name in ("", "reset", "step", "call")}
    alone |= {f"arguments {given}": partial(life.async_arguments, given) for given in life.ASYNC_ARGUMENTS}
    alone |= {f"bad arguments {given}": partial(life.bad_async_arguments, given) for given in life.BAD_ASYNC_ARGUMENTS}
    pairs = [("SyncVectorEnv", name, script) for name, script in both.items()]
    pairs += [("AsyncVectorEnv", name, script) for name, script in (both | alone).items()]
    return [pytest.param(cls, script, id=f"{cls[:-9]}-{name}") for cls, name, script in pairs]


def outcomes(cls: Any, script: behaviours.Script) -> list[Outcome]:
    """What a script notes of a class."""
    noted: list[Outcome] = []

    def note(what: str, function: Callable[[], Any]) -> Any:
        try:
            value = function()
        except Exception as error:
            noted.append((what, "raised", error))
            return None
        noted.append((what, "gave", value))
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script(cls, note)
    return noted

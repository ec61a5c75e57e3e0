"""Each behaviour of Gymnasium's vector envs, over theirs and over ours: the same results, errors and texts.

What differs must be in `DOCUMENTED`, under the name of its row in the table of docs/migrate/index.md.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

from contract.lockstep import assert_same
from dialects import gymnasium_behaviours as behaviours
from dialects import gymnasium_life as life
from dialects import gymnasium_more as more
from dialects.deviations import documented_rows
from envs import INFO_KINDS, SPACES
from shoal.dialects import gymnasium as face

Outcome = tuple[str, Exception | None, Any]  # what was done, and what it raised or gave

# The row of the table, and for each behaviour what of it may differ.
DOCUMENTED: dict[str, dict[str, set[str]]] = {
    "actions": {
        **{f"actions: {name}": {"step", "next"} for name in ("too few", "too many", "nothing", "text", "a dict")},
        "actions: object array": {"step", "next"},
        "continuous actions of other types": {"float64", "int64", "list"},
    },
    "more": {
        "seeds that are none": {"array([1, 2, 3])", "np.int64(4)", "'abc'", "1.5", "[1.5, 2, 3]", "['a', 'b', 'c']"},
        "a partial reset before any other": {"mask"},
        "objects in shared memory": {"a graph"},
    },
    "answers": {f"odd answer: {name}": {name} for name in life.ODD_ANSWERS if name not in life.GOOD_ANSWERS},
    "texts": {
        "unknown arguments": {"argument"},
        "calls that fail": {"no text"},
        "stepping past the end when resets are disabled": {"past the end"},
        "reset masks DISABLED": {"step 2"},
    },
    "workers": {
        "bad arguments worker": {"refused"},
        "what only theirs has": {"processes", "parent_pipes", "error_queue"},
    },
    "closed": {"use of a closed one": {"reset", "step", "call", "set_attr", "render", "get_attr"}},
    "errors": {"an error of a worker and on": {"constructor", "next"}},
}


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
    both |= {f"signature {name}": partial(more.signatures, name) for name in more.METHODS}
    alone = dict(behaviours.ASYNC)
    alone |= {f"misused while {name or 'idle'}": partial(life.misused, name) for name in ("", "reset", "step", "call")}
    alone |= {f"arguments {given}": partial(life.async_arguments, given) for given in life.ASYNC_ARGUMENTS}
    alone |= {f"bad arguments {name}": partial(life.bad_async_arguments, *given) for name, given in life.BAD.items()}
    pairs = [("SyncVectorEnv", name, script) for name, script in (both | behaviours.SYNC).items()]
    pairs += [("AsyncVectorEnv", name, script) for name, script in (both | alone).items()]
    return [pytest.param(cls, name, script, id=f"{cls[:-9]}-{name}") for cls, name, script in pairs]


def outcomes(cls: Any, script: behaviours.Script) -> list[Outcome]:
    """What a script notes of a class. What it gives is copied: later calls may write over it."""
    noted: list[Outcome] = []

    def note(what: str, function: Callable[[], Any]) -> Any:
        try:
            value = function()
        except Exception as error:
            noted.append((what, error, None))
            return None
        kept = behaviours.deepcopy(value) if isinstance(value, tuple | list | dict | np.ndarray) else value
        noted.append((what, None, kept))
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script(cls, note)
    return noted


def difference(ours: Outcome, theirs: Outcome) -> str:
    """How the two differ, in words; "" if they do not."""
    what, our_error, our = ours
    _, their_error, their = theirs
    if (our_error is None) != (their_error is None):
        return f"{what}: {our_error or our!r} is not {their_error or their!r}"
    if our_error is not None and their_error is not None:
        if not isinstance(our_error, type(their_error)):
            return f"{what}: {our_error!r} is no {type(their_error).__name__}"
        text = text_of(their_error)
        return "" if text_of(our_error) == text else f"{what}: {str(our_error)!r} is not {text!r}"
    try:
        assert_same(our, their, what)
    except AssertionError as error:
        # Some have no equality of their own.
        same = type(our) is type(their) and isinstance(our, gymnasium.vector.VectorWrapper) and repr(our) == repr(their)
        return "" if same else str(error)
    return ""


def text_of(error: Exception) -> str:
    """Their async class puts an env's exception into another one of its type."""
    if len(error.args) == 1 and isinstance(error.args[0], Exception):
        return str(error.args[0])
    return re.sub(r"A?[sS]yncVectorEnv\.reset", "VectorEnv.reset", str(error))


@pytest.mark.parametrize(("cls", "name", "script"), scripts())
def test_the_same(cls: str, name: str, script: behaviours.Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gymnasium.logger, "min_level", 50)  # theirs prints each env's traceback
    theirs, ours = (outcomes(getattr(place, cls), script) for place in (gymnasium.vector, face))
    assert [what for what, _, _ in ours] == [what for what, _, _ in theirs]
    may = {what for row in DOCUMENTED.values() for what in row.get(name, ())}
    pairs = list(zip(ours, theirs, strict=True))
    found = [text for our, their in pairs if our[0] not in may and (text := difference(our, their))]
    assert not found, "\n".join(found)


def test_what_differs_is_documented() -> None:
    assert not set(DOCUMENTED) - set(documented_rows())
    assert len(documented_rows()) <= 8
    named = {name for row in DOCUMENTED.values() for name in row}
    assert not named - {script.values[1] for script in scripts()}, "there are no such behaviours"

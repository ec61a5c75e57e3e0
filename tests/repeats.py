"""Slow repeats: cases that `make test` leaves to `make test-cross`.

A case is a repeat if another one, which `make test` runs, makes the same check over the same code. Most are the other
half of a product (rows of a table times backends times modes) of which `make test` takes a covering half: every row,
every backend and every mode, but not each with each. `repeat(reason)` marks such a case where it is written, and
`ON_THE_TWIN` names those of the twin's suite. `pytest` alone runs everything.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def repeat(reason: str, when: bool = True) -> list[pytest.MarkDecorator]:
    """Return the marks of a case: that of a repeat, or none."""
    return [pytest.mark.repeats(reason)] if when else []


def name_of(value: Any) -> str:
    return str(getattr(value, "name", getattr(value, "__name__", value)))


def product(names: str, *axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by all combinations of three lists or more; every other combination is a repeat.

    Those that are left still have each value of a list together with each value of any other list.
    """
    cases = []
    for numbered in itertools.product(*map(enumerate, axes)):
        numbers, values = zip(*numbered, strict=True)
        marks = repeat("the other half of a product", sum(numbers) % 2 == 1)
        cases.append(pytest.param(*values, marks=marks, id="-".join(map(name_of, values))))
    return pytest.mark.parametrize(names.split(), cases)


# What of tests/contract, tests/faults and tests/wrappers does the same with the twin as with the core, or does on a
# second backend what it has done on a first. Each row: how the file's path begins, what the test's name has, and why.
SAME_BLOCKS = "a block of the twin is the same code in a thread as in the caller, and under hybrid as in processes"
NO_CORE = "what it checks is no part of the core or of its twin"
ON_THE_TWIN = [
    ("contract/(?!test_pool|test_async)", r"threads|hybrid", SAME_BLOCKS),
    ("faults/test_(matrix|bad_input|never_hangs|restart|model)", r"hybrid", SAME_BLOCKS),
    ("faults/test_bad_input", r"threads", SAME_BLOCKS),
    ("faults/test_matrix", r"-(spawn|fork)-", "how a worker was started makes no difference to its block"),
    ("faults/test_scripts", r"^(?!.*ctrl_c)", NO_CORE),
    ("faults/test_(launcher|forks|traces|no_room|slow_start)", "", NO_CORE),
    ("wrappers/test_(loggers|video|monitor|frame_stack|observations|normalize_files)", "", NO_CORE),
    ("wrappers/", r"threads|processes|hybrid", SAME_BLOCKS),
    ("wrappers/", r"stable_baselines", "tests/native compares the numbers of the twin with those of the core"),
]


def of_the_twin(path: Path, test: str) -> str | None:
    """Why a test is a repeat on the twin, if it is one."""
    name = path.relative_to(HERE).as_posix()
    found = (why for where, what, why in ON_THE_TWIN if re.match(where, name) and re.search(what, test))
    return next(found, None)

"""Checks `backend_options`: the annotation of each field of a dataclass names the check of its values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar, get_type_hints

from shoal.support.checks import check_choice, check_names, number, positive_number, whole_number

Options = TypeVar("Options")


def checked(kind: type[Options], given: Mapping[str, Any]) -> Options:
    """The given options as an object of this dataclass. Raises ValueError for those that make no sense.

    An option `name: Annotated[type, check]` is checked by `check(name, value)`, unless None is both given and its
    default.
    """
    hints = get_type_hints(kind, include_extras=True)
    check_names("backend_options", given, list(hints))
    for name, value in given.items():
        for check in getattr(hints[name], "__metadata__", ()):
            if value is not None or getattr(kind, name) is not None:
                check(f"backend_options: {name}", value)
    return kind(**given)


def one_of(*choices: str) -> Any:
    """A check that a value is one of these."""
    return partial(check_choice, allowed=choices)


def dictionary(name: str, value: Any) -> None:
    """Raise ValueError unless the value is a dict."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: expected a dict, found {value!r}")


amount = partial(number, low=0, high=1e6)
worker_count = partial(whole_number, low=1, high=2**20)
seconds = positive_number
host_backend = one_of("serial", "threads", "processes", "jax", "compiled", "cuda")  # what a host can run its envs with

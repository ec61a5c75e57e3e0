"""Calls of TensorFlow graphs that raise the envs' own errors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar, cast

import tensorflow as tf

from shoal.errors import BadAction
from shoal.graph.host import kept_errors, own_errors

_F = TypeVar("_F", bound=Callable[..., Any])


def as_written(method: _F) -> _F:
    """Keep autograph from converting a method that has nothing to convert."""
    return cast(_F, tf.autograph.experimental.do_not_convert(method))


def eager_errors() -> AbstractContextManager[None]:
    """Raise the envs' own errors from a call outside any graph. Within one, errors go on to the graph's caller."""
    return own_errors() if tf.executing_eagerly() else contextlib.nullcontext()


def refuse(message: str) -> NoReturn:
    """Raise BadAction in a form that `own_errors` finds again: autograph wraps errors that are raised in tracing."""
    with kept_errors():
        raise BadAction(message)
    raise AssertionError("not reached")


class _Function:
    """A `tf.function` that raises the envs' own errors when it is called. All else is the `tf.function`'s."""

    def __init__(self, graph: Any):
        self._graph = graph
        functools.update_wrapper(self, graph.python_function)

    @as_written
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with own_errors():
            return self._graph(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else _Function(self._graph.__get__(instance, owner))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._graph, name)


def function(func: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a `tf.function`, with or without its options, that raises the errors of envs in it as they are.

    After a plain `tf.function`, or around a whole program, `own_errors` does the same.
    """
    if func is None:
        return functools.partial(function, **options)
    return _Function(tf.function(func, **options))

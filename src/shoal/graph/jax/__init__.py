"""Stepping inside of JAX functions: the envs of any pool by `bind`, envs that are JAX functions by `functional`."""

from __future__ import annotations

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    from shoal.support.optional_dependencies import install

    raise ImportError(f"shoal.graph.jax needs JAX: {install('jax')}") from error

from shoal.graph.jax.bind import Binding, bind, jit, own_errors
from shoal.graph.jax.functional import BatchedFunctionalEnv, functional

__all__ = ["BatchedFunctionalEnv", "Binding", "bind", "functional", "jit", "own_errors"]

"""Steps inside JAX functions: `bind` for the envs of any pool, `functional` for envs that are JAX functions themselves.

The package may import what `shoal.graph` may, and JAX. Read `bind` first for the former; for the latter `functional`,
then `protocols`, which reads envs in the styles of gymnax, Brax and Gymnasium. `pool_envs` is `backend="jax"`.
"""

from __future__ import annotations

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    from shoal.support.optional_dependencies import install

    raise ImportError(f"shoal.graph.jax needs JAX: {install('jax')}") from error

from shoal.graph.jax.bind import Binding, bind, jit, own_errors
from shoal.graph.jax.functional import BatchedFunctionalEnv, functional

__all__ = ["BatchedFunctionalEnv", "Binding", "bind", "functional", "jit", "own_errors"]

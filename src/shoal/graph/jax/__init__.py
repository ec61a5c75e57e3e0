"""Steps inside JAX functions: `bind` for the envs of any pool, `functional` for envs that are JAX functions themselves.

The package may import what `shoal.graph` may, and JAX. Read `bind` first for the former; for the latter `functional`,
then `protocols`, which reads envs in the styles of gymnax, Brax and Gymnasium.
"""

from __future__ import annotations

from shoal.support.optional_dependencies import require

require("jax", "shoal.graph.jax needs JAX", "jax")

from shoal.graph.jax.bind import Binding, bind, jit, own_errors  # noqa: E402
from shoal.graph.jax.functional import BatchedFunctionalEnv, functional  # noqa: E402

__all__ = ["BatchedFunctionalEnv", "Binding", "bind", "functional", "jit", "own_errors"]

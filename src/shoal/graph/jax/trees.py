"""Nested arrays: choosing between two, casting, and naming their leaves."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal.errors import CannotSnapshot

Tree = Any  # arrays, nested


def where(mask: Any, yes: Tree, no: Tree) -> Tree:
    """Choose rows of one tree or of the other; a scalar is used for all rows."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(jnp.reshape(mask, mask.shape + (1,) * (b.ndim - mask.ndim)), a, b)

    return jax.tree.map(choose, yes, no)


def zeros(shapes: Tree) -> Tree:
    """Make arrays of zeros, and keys of zeros, for a tree of shapes."""

    def zeros(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = jax.eval_shape(jax.random.key_data, leaf)
            return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=_impl_of(leaf))
        return jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree.map(zeros, shapes)


def _impl_of(leaf: Any) -> Any:
    """Return the kind of the keys in a leaf, which may be only a shape."""
    found: list[Any] = []
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), leaf)
    return found[0]


def shaped(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def strong(leaf: Any) -> Any:
    return shaped(leaf.shape, leaf.dtype)


def widest(mine: Any, theirs: Any) -> Any:
    same = mine.dtype == theirs.dtype
    return shaped(mine.shape, mine.dtype if same else jnp.promote_types(mine.dtype, theirs.dtype))


def cast(value: Any, dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return value  # type: ignore[no-any-return]
    return jax.lax.convert_element_type(value, dtype)


def named(tree: Tree) -> list[tuple[str, Any]]:
    """Return the leaves with their paths as names, such as inner/x, in the tree's own order."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def key_data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def restored(name: str, value: Any, leaf: Any) -> Any:
    plain = jax.eval_shape(key_data, leaf)
    value = np.asarray(value)
    if value.shape != plain.shape or value.dtype != plain.dtype:
        raise CannotSnapshot(
            f"the state does not fit: {name} is {value.dtype} {value.shape}, and here it is {plain.dtype} {plain.shape}"
        )
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.asarray(value)
    return jax.random.wrap_key_data(jnp.asarray(value), impl=_impl_of(leaf))

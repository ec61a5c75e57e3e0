"""Random actions, seeds as words, and a generator of random numbers that costs a fifth of JAX's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from shoal.errors import BadCall, BadEnv
from shoal.graph.jax.protocols import device_type
from shoal.spaces.leaves import Leaf


def draw(key: jax.Array, leaf: Leaf, count: int) -> Any:
    """Draw actions [count, ...] as Gymnasium samples them: uniform where the space is bounded."""
    low, high, dtype = leaf.low, leaf.high, device_type(leaf)
    assert low is not None
    assert high is not None
    shape = (count, *leaf.shape)
    if leaf.dtype.kind == "b":
        return jax.random.bernoulli(key, 0.5, shape)
    if leaf.dtype.kind in "iu":
        width = high.astype(np.int64) - low.astype(np.int64) + 1
        sizes = set(np.unique(width).tolist())
        if leaf.discrete and len(sizes) == 1 and (size := sizes.pop()) <= 1 << 16:
            return (_below(key, size, shape) + jnp.asarray(low, jnp.int32)).astype(dtype)
        if width.size and width.max() > np.iinfo(np.int32).max:
            raise BadEnv(f"the action space{leaf.name} is too wide for random actions: give a policy")
        top = jnp.asarray(low.astype(np.int64) + width, jnp.int32)
        return jax.random.randint(key, shape, jnp.asarray(low, jnp.int32), top).astype(dtype)
    below, above = np.isfinite(low), np.isfinite(high)
    if (below & above).all():
        return jax.random.uniform(key, shape, dtype, jnp.asarray(low, dtype), jnp.asarray(high, dtype))
    floor, ceiling = (jnp.asarray(np.where(known, x, 0), dtype) for known, x in ((below, low), (above, high)))
    keys = jax.random.split(key, 3)
    within = floor + (ceiling - floor) * jax.random.uniform(keys[0], shape, dtype)
    tail = jax.random.exponential(keys[1], shape, dtype)
    return jnp.select(
        [below & above, jnp.asarray(below), jnp.asarray(above)],
        [within, floor + tail, ceiling - tail],
        jax.random.normal(keys[2], shape, dtype),
    )


def _below(key: jax.Array, size: int, shape: tuple[int, ...]) -> Any:
    """Draw ints from 0 to `size` - 1 with few random bits: a threefry word costs more than a step of many envs."""
    bits = (size - 1).bit_length()
    if bits == 0:
        return jnp.zeros(shape, jnp.int32)
    count = int(np.prod(shape))
    if size == 1 << bits and 32 % bits == 0:
        each = 32 // bits
        words = jax.random.bits(key, (-(-count // each),), jnp.uint32)
        parts = words[:, None] >> jnp.arange(0, 32, bits, dtype=jnp.uint32)
        return (parts.reshape(-1)[:count] & jnp.uint32(size - 1)).astype(jnp.int32).reshape(shape)
    words = jax.random.bits(key, shape, jnp.uint32)  # the result is the high word of words * size
    high, low = words >> 16, words & jnp.uint32(0xFFFF)
    return ((high * jnp.uint32(size) + (low * jnp.uint32(size) >> 16)) >> 16).astype(jnp.int32)


def _mix(x: jax.Array) -> jax.Array:
    """Mix a uint32, so that every bit depends on all others."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _hash(key: jax.Array, count: jax.Array, purpose: int) -> jax.Array:
    return _mix(_mix(count ^ key[0] ^ jnp.uint32(purpose)) + key[1])


def _fast_seed(seed: jax.Array) -> jax.Array:
    seed = seed.astype(jnp.uint32)
    return jnp.stack([_mix(seed ^ jnp.uint32(0x243F6A88)), _mix(_mix(seed + jnp.uint32(0x85A308D3)))])


def _fast_fold_in(key: jax.Array, data: Any) -> jax.Array:
    data = jnp.asarray(data).astype(jnp.uint32)
    return jnp.stack([_hash(key, data, 0x13198A2E), _hash(key[::-1], data, 0x03707344)])


def _fast_split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    count = _counts(shape)
    return jnp.stack([_hash(key, count, 0xA4093822), _hash(key[::-1], count, 0x299F31D0)], -1)


def _fast_bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    bits = _hash(key, _counts(shape), 0)
    if width == 64:
        return bits.astype(jnp.uint64) << 32 | _hash(key, _counts(shape), 0x082EFA98).astype(jnp.uint64)
    return bits.astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[width])


def _counts(shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)


FAST = define_prng_impl(
    key_shape=(2,), seed=_fast_seed, split=_fast_split, random_bits=_fast_bits, fold_in=_fast_fold_in,
    name="shoal_fast", tag="shl",
)  # fmt: skip


def words_of(seeds: Any) -> Any:
    """Write ints as their low and high words, uint32 [..., 2]: JAX has no 64 bits by default."""
    if isinstance(seeds, jax.Array):
        return jnp.stack([seeds.astype(jnp.uint32), jnp.zeros(seeds.shape, jnp.uint32)], -1)
    given = np.asarray(seeds)
    if given.dtype.kind not in "iu" or (given.dtype.kind == "i" and given.size and given.min() < 0):
        raise BadCall(f"seeds: expected ints from 0 to 2**64 - 1, found {given.dtype}: {given!r:.100}")
    wide = given.astype(np.uint64)
    return np.stack([wide & np.uint64(0xFFFFFFFF), wide >> np.uint64(32)], -1).astype(np.uint32)

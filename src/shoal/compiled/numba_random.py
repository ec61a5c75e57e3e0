"""The random numbers of `shoal.compiled.random` for Numba: the same bits, in arithmetic of 64 bits.

These are plain functions, with types that Numba infers: each target compiles them with its own decorator.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.compiled import random

GAMMA, EPISODE = np.uint64(random.GAMMA), np.uint64(random.EPISODE)
MIX_1, MIX_2 = np.uint64(random.MIX_1), np.uint64(random.MIX_2)
SHIFT_11, SHIFT_27, SHIFT_30, SHIFT_31 = (np.uint64(bits) for bits in (11, 27, 30, 31))
UNIT = random.UNIT


def mix(z: Any) -> Any:
    """See random.mix."""
    z = (z ^ (z >> SHIFT_30)) * MIX_1
    z = (z ^ (z >> SHIFT_27)) * MIX_2
    return z ^ (z >> SHIFT_31)


def begin_stream(rng: Any, seed: Any, episode: Any) -> None:
    """See random.begin_stream."""
    rng[0] = mix(mix(seed + GAMMA) + np.uint64(episode) * EPISODE)


def next_bits(rng: Any) -> Any:
    """See random.next_bits."""
    z = rng[0] + GAMMA
    rng[0] = z
    return mix(z)


def uniform(rng: Any, low: Any = 0.0, high: Any = 1.0) -> Any:
    """See random.uniform."""
    return low + (high - low) * (np.float64(next_bits(rng) >> SHIFT_11) * UNIT)


def integer(rng: Any, low: Any, high: Any) -> Any:
    """See random.integer."""
    return np.int64(low) + np.int64(next_bits(rng) % np.uint64(np.int64(high) - np.int64(low)))


# The function of this module for each one of `shoal.compiled.random`. Those that only call others are compiled as they
# are.
VERSIONS = {
    random.mix: mix, random.begin_stream: begin_stream, random.next_bits: next_bits, random.uniform: uniform,
    random.normal: random.normal, random.integer: integer, random.choice: random.choice,
}  # fmt: skip

"""Random numbers of compiled envs, in plain Python. A stream depends on its seed and its episode alone.

A stream is one number of 64 bits, `rng[0]`. Each draw adds a constant to it and mixes the sum (SplitMix64). Compiled
code has its own versions of these functions (`shoal.compiled.numba_random`), which give the same bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
EPISODE = 0xD1342543DE82EF95
UNIT = 2.0**-53
TURN = 2.0 * math.pi


def mix(z: int) -> int:
    """Return a number of 64 bits in which every bit depends on all bits of `z`."""
    z = ((z ^ (z >> 30)) * MIX_1) & MASK
    z = ((z ^ (z >> 27)) * MIX_2) & MASK
    return z ^ (z >> 31)


def begin_stream(rng: Any, seed: int, episode: int) -> None:
    """Set `rng` to the beginning of the stream of this seed's episode."""
    rng[0] = np.uint64(mix((mix((seed + GAMMA) & MASK) + episode * EPISODE) & MASK))


def next_bits(rng: Any) -> int:
    """Draw the next 64 bits."""
    z = (int(rng[0]) + GAMMA) & MASK
    rng[0] = z
    return mix(z)


def uniform(rng: Any, low: float = 0.0, high: float = 1.0) -> float:
    """Draw a number from `low` up to `high`, which is excluded."""
    return low + (high - low) * ((next_bits(rng) >> 11) * UNIT)


def normal(rng: Any, mean: float = 0.0, std: float = 1.0) -> float:
    """Draw a number from a normal distribution."""
    radius = math.sqrt(-2.0 * math.log(1.0 - uniform(rng)))
    return mean + std * (radius * math.cos(TURN * uniform(rng)))


def integer(rng: Any, low: int, high: int) -> int:
    """Draw a whole number from `low` up to `high`, which is excluded."""
    return int(low) + next_bits(rng) % (int(high) - int(low))


def choice(rng: Any, weights: Any) -> int:
    """Draw an index of `weights` in proportion to them; they need not sum to 1."""
    total = 0.0
    for weight in weights:
        total += weight
    left = uniform(rng) * total
    last = 0
    for i in range(len(weights)):
        if weights[i] > 0.0:
            last = i
            if left < weights[i]:
                return i
        left -= weights[i]
    return last  # rounding may leave a rest

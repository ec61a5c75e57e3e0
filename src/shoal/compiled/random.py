"""Random numbers of compiled envs, in plain Python. A stream depends on its seed and its episode alone.

A stream is one number of 64 bits, `rng[0]`. Each draw adds a constant to it and mixes the sum (SplitMix64). Compiled
code has its own versions of these functions (`VERSIONS`), which give the same bits.
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
    rng[0] = np.uint64(mix((mix((int(seed) + GAMMA) & MASK) + int(episode) * EPISODE) & MASK))


def next_bits(rng: Any) -> int:
    """Draw the next 64 bits."""
    z = (int(rng[0]) + GAMMA) & MASK
    rng[0] = z
    return mix(z)


def uniform(rng: Any, low: float = 0.0, high: float = 1.0) -> float:
    """Draw a number from `low` up to `high`, which is excluded, by the `rng` of reset or step."""
    return low + (high - low) * ((next_bits(rng) >> 11) * UNIT)


def normal(rng: Any, mean: float = 0.0, std: float = 1.0) -> float:
    """Draw a number from a normal distribution of this mean and deviation (`std`), by the `rng` of reset or step."""
    radius = math.sqrt(-2.0 * math.log(1.0 - uniform(rng)))
    return mean + std * (radius * math.cos(TURN * uniform(rng)))


def integer(rng: Any, low: int, high: int) -> int:
    """Draw a whole number from `low` up to `high`, which is excluded, by the `rng` of reset or step."""
    return int(low) + next_bits(rng) % (int(high) - int(low))


def choice(rng: Any, weights: Any) -> int:
    """Draw an index of `weights` in proportion to them, by the `rng` of reset or step; they need not sum to 1."""
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


# ---- the same for Numba, in arithmetic of 64 bits --------------------------------------------------------------
# These are plain functions, with types that Numba infers: each target compiles them with its own decorator.

GAMMA_64, EPISODE_64, MIX_1_64, MIX_2_64 = (np.uint64(number) for number in (GAMMA, EPISODE, MIX_1, MIX_2))
SHIFT_11, SHIFT_27, SHIFT_30, SHIFT_31 = (np.uint64(bits) for bits in (11, 27, 30, 31))


def mix_64(z: Any) -> Any:
    z = (z ^ (z >> SHIFT_30)) * MIX_1_64
    z = (z ^ (z >> SHIFT_27)) * MIX_2_64
    return z ^ (z >> SHIFT_31)


def begin_stream_64(rng: Any, seed: Any, episode: Any) -> None:
    rng[0] = mix_64(mix_64(seed + GAMMA_64) + np.uint64(episode) * EPISODE_64)


def next_bits_64(rng: Any) -> Any:
    z = rng[0] + GAMMA_64
    rng[0] = z
    return mix_64(z)


def uniform_64(rng: Any, low: Any = 0.0, high: Any = 1.0) -> Any:
    return low + (high - low) * (np.float64(next_bits_64(rng) >> SHIFT_11) * UNIT)


def integer_64(rng: Any, low: Any, high: Any) -> Any:
    return np.int64(low) + np.int64(next_bits_64(rng) % np.uint64(np.int64(high) - np.int64(low)))


# Those that only call others are compiled as they are.
VERSIONS = {
    mix: mix_64, begin_stream: begin_stream_64, next_bits: next_bits_64, uniform: uniform_64, normal: normal,
    integer: integer_64, choice: choice,
}  # fmt: skip

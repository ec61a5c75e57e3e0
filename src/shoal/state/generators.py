"""Random generators made from data, each part of which is checked first.

A file may say anything, and numpy checks little of it: a position outside of a buffer crashes the process at the next
draw, and a state of zeros lets some draws go on for ever.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

from shoal.errors import DataError

BIT_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
# Each whole number in the states of these is less than:
_LIMITS = {
    "state": 2**128, "inc": 2**128, "pos": 625, "buffer_pos": 5, "has_uint32": 2, "uinteger": 2**32,
}  # fmt: skip
_MOST_BITS = 1 << 16  # of a number in a seed: numpy's time for one grows with the square of its length
_MOST_NUMBERS = 1 << 16  # in a seed
_WORDS = 624  # of a Mersenne Twister, beside its position


def make_bits(parts: list[Any]) -> np.random.BitGenerator:
    """The bit generator with this name, state, and state of its SeedSequence (None for none)."""
    name, state, seeds = parts
    if name not in BIT_GENERATORS:
        raise _damaged(f"numpy has no bit generator {name!r:.40}")
    made: np.random.BitGenerator = getattr(np.random, name)(0 if seeds is None else _seed_sequence(seeds))
    _check_like(state, made.state, name)
    inner: Any = state["state"]
    if name.startswith("PCG64") and inner["inc"] % 2 == 0:
        raise _damaged(f"the increment of a {name} is even")
    if name == "MT19937" and not inner["key"][1:].any():
        raise _damaged(f"the key of a {name} is all zeros")
    made.state = state
    return made


def make_random_state(parts: list[Any]) -> np.random.RandomState:
    """The legacy generator over this bit generator; one normal draw may be left over."""
    bits, has_gauss, gauss = parts
    if not isinstance(bits, np.random.BitGenerator) or type(has_gauss) is not int or has_gauss not in (0, 1):
        raise _damaged("a RandomState has no bit generator, or does not know whether a draw is left over")
    made = np.random.RandomState(bits)
    made.set_state({**bits.state, "has_gauss": has_gauss, "gauss": _draw(gauss)})
    return made


def make_generator(parts: list[Any]) -> np.random.Generator:
    """The generator over this bit generator."""
    (bits,) = parts
    if not isinstance(bits, np.random.BitGenerator):
        raise _damaged("a Generator has no bit generator")
    return np.random.Generator(bits)


def make_random(parts: list[Any]) -> random.Random:
    """Python's own generator, from what its getstate() returned."""
    ((version, words, gauss),) = parts
    whole = type(words) is tuple and len(words) == _WORDS + 1
    whole = whole and all(type(word) is int and 0 <= word < 2**32 for word in words)
    if version != 3 or not whole or words[-1] > _WORDS or not any(words[1:_WORDS]):
        raise _damaged(f"random.Random: expected version 3, {_WORDS} numbers below 2**32 and a position in them")
    made = random.Random(0)
    made.setstate((3, words, None if gauss is None else _draw(gauss)))
    return made


def _draw(gauss: Any) -> float:
    if type(gauss) is not float or not math.isfinite(gauss):
        raise _damaged("the normal draw that is left over in a random generator is no finite number")
    return gauss


def _check_like(state: Any, fresh: Any, name: str) -> None:
    """Raise DataError unless the state has the parts of a fresh one, of the same types and sizes, within the limits."""
    if not isinstance(state, dict) or state.keys() != fresh.keys():
        raise _damaged(f"the state of a {name} needs {', '.join(fresh)}")
    for key, good in fresh.items():
        value = state[key]
        if isinstance(good, dict):
            _check_like(value, good, name)
        elif isinstance(good, np.ndarray):
            same = isinstance(value, np.ndarray) and value.dtype == good.dtype and value.shape == good.shape
            if not same:
                raise _damaged(f"{key!r} of a {name}: expected an array of {good.dtype} {good.shape}")
        elif isinstance(good, str):
            if type(value) is not str or value != good:
                raise _damaged(f"{key!r} of a {name}: expected {good!r}")
        elif type(value) is not int or not 0 <= value < _LIMITS[key]:
            raise _damaged(f"{key!r} of a {name}: expected a whole number from 0 to {_LIMITS[key] - 1}")


def _seed_sequence(seeds: Any) -> np.random.SeedSequence:
    if not isinstance(seeds, dict) or seeds.keys() != {"entropy", "spawn_key", "pool_size", "n_children_spawned"}:
        raise _damaged("the seed of a random generator has other parts than numpy's")
    entropy = seeds["entropy"]
    numbers = entropy if isinstance(entropy, list | tuple) else [] if isinstance(entropy, np.ndarray) else [entropy]
    if isinstance(entropy, np.ndarray) and (entropy.dtype.kind not in "iu" or entropy.ndim != 1):
        raise _damaged("the entropy of a random generator's seed is no list of whole numbers")
    size, children, key = seeds["pool_size"], seeds["n_children_spawned"], seeds["spawn_key"]
    whole = type(size) is int and 4 <= size <= 1024 and type(children) is int and 0 <= children < 2**63
    whole = whole and type(key) is tuple and len(key) + np.size(numbers) <= _MOST_NUMBERS
    if not whole or not all(_is_seed(one) for one in (*numbers, *key)):
        raise _damaged("the seed of a random generator: expected whole numbers from 0 on, of a sensible size")
    return np.random.SeedSequence(**seeds)


def _is_seed(number: Any) -> bool:
    return isinstance(number, int | np.integer) and int(number) >= 0 and int(number).bit_length() <= _MOST_BITS


def _damaged(reason: str) -> DataError:
    return DataError(f"the data are damaged: {reason}")

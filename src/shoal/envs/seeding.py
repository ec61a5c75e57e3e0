"""Seeds for envs that have no method for it: NumPy's generators are found where such envs keep them.

An env of dm_control draws everything from one generator, which its task keeps (`suite`) or the env itself (`composer`).
Other envs keep one as an attribute too. Each such generator is seeded where it lies, so that all who hold it see that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

_WITHIN = ("_env", "env", "_environment", "environment", "_task", "task")  # where wrappers keep envs, and envs tasks
_DEEPEST = 32
Generator = np.random.RandomState | np.random.Generator


def generators_of(env: Any) -> list[Generator]:
    """The generators that an env, the envs within it, and its task keep as attributes; each once, outermost first."""
    found: dict[int, Generator] = {}
    for layer in _layers(env):
        for value in vars(layer).values():
            if isinstance(value, Generator):
                found.setdefault(id(value), value)
    return list(found.values())


def _layers(env: Any) -> Iterator[Any]:
    seen: set[int] = set()
    waiting = [env]
    while waiting and len(seen) < _DEEPEST:
        layer = waiting.pop(0)
        if id(layer) in seen or not hasattr(layer, "__dict__"):
            continue
        seen.add(id(layer))
        yield layer
        waiting += [vars(layer)[name] for name in _WITHIN if name in vars(layer)]


def seed_generators(env: Any, seed: int) -> bool:
    """Seed the generators of an env; False if it has none.

    One generator gets the seed as it is, as if the env had been made with it. Where there are several, the others get
    seeds of their own, so that they do not all draw the same numbers.
    """
    found = generators_of(env)
    for i, generator in enumerate(found):
        _seed(generator, [seed, i] if i else seed)
    for layer in _layers(env) if found else ():
        # dm_control's composer puts this back before each episode where the initial state is fixed.
        if "_fixed_random_state" in vars(layer) and isinstance(vars(layer).get("_random_state"), np.random.RandomState):
            layer._fixed_random_state = layer._random_state.get_state()
    return bool(found)


def _seed(generator: Generator, seed: int | list[int]) -> None:
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
        return
    # A RandomState takes words of 32 bits.
    words = [word for one in (seed if isinstance(seed, list) else [seed]) for word in _words(one)]
    generator.seed(words[0] if len(words) == 1 else words)


def _words(seed: int) -> list[int]:
    return [seed] if seed < 2**32 else [seed % 2**32, *_words(seed >> 32)]

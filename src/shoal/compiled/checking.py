"""`check`: the same class in plain Python, compiled, in single precision and on a GPU, side by side.

Plain Python and compiled code must give the same bits. Single precision and a GPU go on from the same state at each
step, and must come close to where double precision gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.compiled.definition import Definition, define, find_class
from shoal.compiled.side import Answers, PlainSide, Side, sides
from shoal.support.checks import whole_number

LANES = 50
MOST_STEPS = 20_000  # of one lane, if its episodes do not end


@dataclass
class Comparison:
    """How one way to run a class compares to another.

    Attributes:
        names: the two ways.
        episodes, steps: how many were compared.
        worst: the largest difference of a number of an observation or a reward; 0 for the same bits.
        difference: the first difference that should not be, in words; "" for none.
    """

    names: tuple[str, str]
    episodes: int = 0
    steps: int = 0
    worst: float = 0.0
    difference: str = ""

    def __str__(self) -> str:
        found = self.difference or ("the same bits" if self.worst == 0.0 else f"at most {self.worst:.2g} apart")
        return f"{self.names[0]} and {self.names[1]}, {self.episodes} episodes, {self.steps} steps: {found}"


@dataclass
class Check:
    """What `check` has found. `print(check(MyEnv))` shows it.

    Attributes:
        name: of the class.
        comparisons: one for each pair.
        left_out: what could not be run, and why.
    """

    name: str
    comparisons: list[Comparison] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def fine(self) -> bool:
        """Say whether nothing differs that should not."""
        return not any(one.difference for one in self.comparisons)

    def __str__(self) -> str:
        lines = [f"{self.name}: {'fine' if self.fine else 'there are differences'}"]
        return "\n".join([*lines, *map(str, self.comparisons), *(f"left out: {one}" for one in self.left_out)])


def check(env: Any, episodes: int = 1000, seed: int = 0, tolerance: float = 1e-4, **kwargs: Any) -> Check:
    """Run a class in every way that this machine has, with the same seeds and random actions, and compare.

    Args:
        env: a class that derives from `shoal.compiled.Env`, or the id of one in the library.
        episodes: how many.
        seed: of the envs and of the actions.
        tolerance: how far single precision may be from double precision after one step, in parts of the number or, if
            that is below 1, at all.
        kwargs: for the class.
    """
    definition = define(find_class(env), kwargs)
    episodes = whole_number("episodes", episodes, 1, 10**9)
    result = Check(definition.name)
    found, result.left_out = sides(definition, find_class(env), kwargs, min(LANES, episodes), seed)
    exact, others = found[0], found[1:]
    for other in others:
        same_bits = isinstance(other, PlainSide)
        compare = Comparison((exact.name, other.name))
        result.comparisons.append(compare)
        _compare(definition, exact, other, compare, (episodes, seed, 0.0 if same_bits else tolerance))
    for side in found:
        side.close()
    return result


def _compare(definition: Definition, exact: Side, other: Side, told: Comparison, how: tuple[int, int, float]) -> None:
    episodes, seed, tolerance = how
    space = definition.action_space
    space.seed(seed)
    a, b = exact.reset(seed), other.reset(seed)
    before, actions = exact.states(), None
    for _ in range(MOST_STEPS):
        for lane, what in _differences(a, b, tolerance, told):
            state = {name: before[name][lane // definition.num_agents] for name in before.dtype.names or ()}
            acted = "at its reset" if actions is None else f"by the action {_of_lane(actions, lane)}"
            told.difference = f"env {lane} differs {acted}, from the state {_shown(state)}: {what}"
            return
        told.episodes += int((a.terminated | a.truncated)[:: definition.num_agents].sum())
        if told.episodes >= episodes:
            return
        if tolerance > 0.0:  # both go on from a state that both can hold
            other.put_states(exact.states())
            exact.put_states(other.states())
        before = exact.states()
        actions = [space.sample() for _ in range(exact.lanes)]
        a, b = exact.step(actions), other.step(actions)
        told.steps += exact.lanes


def _differences(a: Answers, b: Answers, tolerance: float, told: Comparison) -> Iterator[tuple[int, str]]:
    """Find lanes that differ by more than they should; the largest difference of the others is written down."""
    for name, x, y in zip(a.names, a.values, b.values, strict=True):
        wide, narrow = np.asarray(x, np.float64), np.asarray(y, np.float64)
        with np.errstate(invalid="ignore"):
            apart = np.where((wide == narrow) | (np.isnan(wide) & np.isnan(narrow)), 0.0, np.abs(wide - narrow))
        allowed = tolerance * np.maximum(np.abs(wide), 1.0)
        wrong = np.any(~(apart <= allowed).reshape(len(wide), -1), axis=1)
        if wrong.any():
            lane = int(np.flatnonzero(wrong)[0])
            yield lane, f"{name} is {_shown(wide[lane])} and {_shown(narrow[lane])}"
        told.worst = max(told.worst, float(apart.max(initial=0.0)))


def _of_lane(actions: Any, lane: int) -> Any:
    return _shown(actions[lane])


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_shown(one)}" for name, one in value.items()) + "}"
    return str(np.asarray(value).tolist() if isinstance(value, np.ndarray | np.generic) else value)[:200]

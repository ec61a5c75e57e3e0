"""`port`: a checklist for writing a compiled class of a Gymnasium env, which runs both side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.compiled.definition import define
from shoal.compiled.plain import PlainEnv
from shoal.errors import BadEnv
from shoal.spaces.leaves import array_leaves, get_path

STEPS = 200  # that are looked at to tell state from constants


@dataclass(frozen=True)
class Item:
    """One entry of the checklist: what is to be done, and whether it is."""

    done: bool
    text: str


@dataclass
class Port:
    """What `port` has found. `print(port(env))` shows the list.

    Attributes:
        name: of the env's class.
        items: what is to be done, in order.
        state: fields that the class needs, with their types, by the names of the env's attributes that change.
        constants: numbers of the env that do not change: globals of the module, or params.
    """

    name: str
    items: list[Item] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Say whether nothing is left to do."""
        return all(item.done for item in self.items)

    def __str__(self) -> str:
        lines = [f"{self.name}: {'ported' if self.done else 'not ported yet'}"]
        return "\n".join([*lines, *(f"[{'x' if item.done else ' '}] {item.text}" for item in self.items)])

    def add(self, done: bool, text: str) -> bool:
        """Add an entry with this text; returns whether it is done."""
        self.items.append(Item(done, text))
        return done


def port(
    env: Any,
    env_class: type[Any] | None = None,
    copy: Callable[[Any, Any], None] | None = None,
    episodes: int = 20,
    seed: int = 0,
    tolerance: float = 1e-6,
    **kwargs: Any,
) -> Port:
    """Say what is still to be done until a compiled class does what a Gymnasium env does.

    Call it again and again while you write the class. Without a class it says what the class needs.

    Args:
        env: the Gymnasium env, as `gymnasium.make` returns it.
        env_class: the class so far.
        copy: copy(env, state) writes the env's state into a state of the class; by default each field gets the
            attribute of the same name.
        episodes: how many are run side by side. At each step both begin at the same state.
        seed: of the first episode, and of the actions.
        tolerance: how far an observation or a reward may be from the env's, as a part of it or, if that is below 1, at
            all.
        kwargs: for the class.
    """
    result = Port(type(env.unwrapped).__name__)
    _check_spaces(env, result)
    _find_fields(env, result, seed)
    if not result.add(env_class is not None, "write a class that derives from shoal.compiled.Env"):
        wanted = ", ".join(f'"{name}": {_kind(value)}' for name, value in result.state.items())
        result.add(False, f"its state: {{{wanted}}}" if wanted else "its state: the env has no numbers that change")
        if result.constants:
            numbers = ", ".join(f"{name} = {value!r}" for name, value in list(result.constants.items())[:20])
            result.add(False, f"its constants, as globals or params: {numbers}")
        return result
    try:
        plain = PlainEnv(define(env_class, kwargs))  # type: ignore[arg-type]
    except BadEnv as error:
        result.add(False, str(error))
        return result
    if _check_class(env, plain, result, copy):
        _run(env, plain, result, copy or _copy_by_name, (episodes, seed, tolerance))
    return result


def _check_spaces(env: Any, result: Port) -> None:
    for which in ("observation", "action"):
        space = getattr(env, f"{which}_space")
        try:
            array_leaves(which, space, "compiled code")
            result.add(True, f"the {which} space is made of arrays")
        except Exception as error:
            result.add(False, f"the {which} space {space} is none that compiled code has: {error}")


def _find_fields(env: Any, result: Port, seed: int) -> None:
    """Tell the numbers of the env that change from those that do not."""
    env.action_space.seed(seed)
    env.reset(seed=seed)
    inner, first, infos = env.unwrapped, _numbers(env.unwrapped), False
    changing: dict[str, Any] = {}
    for _ in range(STEPS):
        _, _, terminated, truncated, info = env.step(env.action_space.sample())
        infos = infos or bool(info)
        now = _numbers(inner)
        changing.update({name: now[name] for name in now if name not in first or not _same(now[name], first[name])})
        if terminated or truncated:
            env.reset()
    result.state = changing
    result.constants = {name: value for name, value in first.items() if name not in changing and np.ndim(value) == 0}
    if infos:
        result.add(True, "the env returns infos, and a compiled class has none: put what you need into the observation")
    limit = env.spec.max_episode_steps if env.spec is not None else None
    if limit is not None:
        result.add(True, f"the env's wrapper ends episodes after {limit} steps: max_episode_steps = {limit}")


def _numbers(inner: Any) -> dict[str, Any]:
    """Return the attributes of an env that are numbers, or arrays of numbers."""
    found = {}
    for name, value in vars(inner).items():
        if isinstance(value, tuple | list) and value and all(isinstance(one, int | float) for one in value):
            value = np.array(value)
        plain = isinstance(value, bool | int | float | np.generic)
        if not name.startswith("_") and (plain or (isinstance(value, np.ndarray) and value.dtype.kind in "fiub")):
            found[name] = np.array(value) if isinstance(value, np.ndarray) else value
    return found


def _same(a: Any, b: Any) -> bool:
    return np.shape(a) == np.shape(b) and bool(np.array_equal(a, b))


def _kind(value: Any) -> str:
    array = np.asarray(value)
    name = {"f": "float", "b": "bool"}.get(array.dtype.kind, "int")
    return name if not array.shape else f"({name}, {array.shape})"


def _check_class(env: Any, plain: PlainEnv, result: Port, copy: Any) -> bool:
    """Compare what can be compared without a step; returns whether both can be run side by side."""
    same = True
    for which in ("observation_space", "action_space"):
        ours, theirs = getattr(plain, which), getattr(env, which)
        text = f"{which} is the env's" if ours == theirs else f"{which}: expected {theirs}, found {ours}"
        same = result.add(ours == theirs, text) and same
    limit = env.spec.max_episode_steps if env.spec is not None else None
    ours = plain.definition.max_episode_steps
    result.add(ours == limit, f"max_episode_steps: expected {limit}, found {ours}" if ours != limit else
               "max_episode_steps is the env's")  # fmt: skip
    if copy is None:
        fields = [name for name in plain.definition.dtype.names or () if name not in plain.definition.params]
        lacking = [name for name in fields if not hasattr(env.unwrapped, name)]
        text = "each field of the state is an attribute of the env"
        if lacking:
            text = (
                f"the env has no attribute {lacking[0]!r}: give port a function copy(env, state) that fills the state"
            )
        same = result.add(not lacking, text) and same
    return same


def _copy_by_name(env: Any, state: Any) -> None:
    for name in state.dtype.names or ():
        if hasattr(env, name):
            state[name] = getattr(env, name)


def _run(env: Any, plain: PlainEnv, result: Port, copy: Any, how: tuple[int, int, float]) -> None:
    """Step both from the same state, and say where they part first."""
    episodes, seed, tolerance = how
    env.action_space.seed(seed)
    steps = 0
    for episode in range(episodes):
        obs, _ = env.reset(seed=seed + episode)
        plain.reset(seed=seed + episode)
        copy(env.unwrapped, plain.state)
        difference = _difference(plain, {"observation of a reset": (obs, plain.observe_now())}, tolerance)
        over = False
        while not over and not difference:
            copy(env.unwrapped, plain.state)
            before, action = _state(plain), env.action_space.sample()
            obs, reward, terminated, truncated, _ = env.step(action)
            ours = plain.step(action)
            pairs = {"observation": (obs, ours[0]), "reward": (reward, ours[1]), "terminated": (terminated, ours[2])}
            difference = _difference(plain, pairs, tolerance)
            if difference:
                difference += f", by the action {action} from the state {before}"
            over, steps = terminated or truncated, steps + 1
        if difference:
            result.add(False, f"after {steps} steps, {difference}")
            return
    result.add(True, f"{steps} steps of {episodes} episodes are the same")
    result.add(True, "run shoal.compiled.check(...) on the class next")


def _state(plain: PlainEnv) -> Mapping[str, Any]:
    return {name: np.asarray(plain.state[name]).tolist() for name in plain.definition.dtype.names or ()}


def _difference(plain: PlainEnv, pairs: Mapping[str, tuple[Any, Any]], tolerance: float) -> str:
    for what, (theirs, ours) in pairs.items():
        nested = what.startswith("observation")
        leaves = plain.definition.obs_leaves if nested else ()
        values = [(leaf.name, get_path(theirs, leaf.path), get_path(ours, leaf.path)) for leaf in leaves]
        for name, a, b in values or [("", theirs, ours)]:
            wide, found = np.asarray(a, np.float64), np.asarray(b, np.float64)
            if not np.allclose(found, wide, rtol=tolerance, atol=tolerance, equal_nan=True):
                return (
                    f"the {what}{name} is {np.asarray(a).tolist()} in the env and {np.asarray(b).tolist()} in the class"
                )
    return ""

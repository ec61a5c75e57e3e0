"""Seeds reach envs of dm_env that have no method for it, or the caller learns that they do not."""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.envs.seeding import generators_of, seed_generators

os.environ.setdefault("MUJOCO_GL", "disable")  # before dm_control is imported: nothing is rendered here

dm_env = pytest.importorskip("dm_env", reason="these are its environments")
specs = pytest.importorskip("dm_env.specs")


class Task:
    """Has the shape of a task of dm_control's suite: it keeps the generator."""

    def __init__(self, random: Any = None):
        self._random = random if isinstance(random, np.random.RandomState) else np.random.RandomState(random)


class Walk(dm_env.Environment):  # type: ignore[misc]
    """Draws all that happens from one generator; episodes have three steps."""

    def draw(self) -> Any:
        return np.random.random(2)

    def observation_spec(self) -> Any:
        return specs.Array((2,), np.float64, "place")

    def action_spec(self) -> Any:
        return specs.BoundedArray((1,), np.float64, -1, 1, "force")

    def reset(self) -> Any:
        self.count = 0
        return dm_env.restart(self.draw())

    def step(self, action: Any) -> Any:
        self.count += 1
        return (dm_env.transition if self.count < 3 else dm_env.termination)(1.0, self.draw())


class OfSuite(Walk):
    """As envs of `dm_control.suite`."""

    def __init__(self, random: Any = None):
        self._task = Task(random)

    def draw(self) -> Any:
        return self._task._random.random_sample(2)


class OfComposer(Walk):
    """As envs of `dm_control.composer`, with an initial state that may be fixed."""

    def __init__(self, random: Any = None, fixed: bool = False):
        self._random_state, self.fixed = np.random.RandomState(random), fixed
        self._fixed_random_state = self._random_state.get_state()

    def draw(self) -> Any:
        return self._random_state.random_sample(2)

    def reset(self) -> Any:
        if self.fixed:
            self._random_state.set_state(self._fixed_random_state)
        return super().reset()


class Modern(Walk):
    """Keeps a Generator."""

    def __init__(self, random: Any = None):
        self.rng = np.random.default_rng(random)

    def draw(self) -> Any:
        return self.rng.random(2)


class Wrapped(Walk):
    """A wrapper, as dm_control writes them."""

    def __init__(self, random: Any = None):
        self._env = OfSuite(random)

    def draw(self) -> Any:
        return self._env.draw()

    def __getattr__(self, name: str) -> Any:
        if name == "_env":
            raise AttributeError(name)
        return getattr(self._env, name)


KINDS = [OfSuite, OfComposer, Modern, Wrapped]


def episodes(envs: Any, steps: int = 9, **reset: Any) -> Any:
    """What the envs show from a reset on."""
    seen = [envs.reset(**reset)[0]]
    return np.array(seen + [envs.step(np.zeros((envs.num_envs, 1)))[0] for _ in range(steps)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, 7, 2**32 - 3, 2**40])
def test_a_seed_gives_the_same_episodes(kind: Any, seed: int, backend: str) -> None:
    workers = None if backend == "serial" else 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with shoal.make(kind, 3, backend=backend, num_workers=workers) as envs:
            first, again, other = (episodes(envs, seed=one) for one in (seed, seed, seed + 1))
        with shoal.make(kind, 3, backend="serial", seed=seed) as envs:
            elsewhere = episodes(envs)
    assert np.array_equal(first, again)
    assert np.array_equal(first, elsewhere)
    assert not np.isin(first[0], other[-1]).any()
    assert np.array_equal(first[0, 1:], other[0, :-1])  # env i has the seed + i
    assert not np.array_equal(first[0, 0], first[0, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_is_as_if_the_env_were_made_with_it(kind: Any) -> None:
    with shoal.make(kind, 1, backend="serial") as envs:
        seen = episodes(envs, steps=3, seed=11)[:, 0]
    alone = kind(11)
    alone_seen = [alone.reset().observation, *(alone.step(np.zeros(1)).observation for _ in range(3))]
    assert np.array_equal(seen, alone_seen)


def test_a_fixed_initial_state_is_that_of_the_seed() -> None:
    with shoal.make(functools.partial(OfComposer, fixed=True), 1, backend="serial") as envs:
        seen = episodes(envs, seed=3)
    assert np.array_equal(seen[0], seen[4])  # the first observations of two episodes
    assert np.array_equal(seen[0, 0], np.random.RandomState(3).random_sample(2))


def test_several_generators_draw_different_numbers() -> None:
    env = OfSuite()
    env.noise, env.more = np.random.RandomState(), np.random.default_rng()
    env.again = env.more
    assert generators_of(env) == [env.noise, env.more, env._task._random]
    assert seed_generators(env, 5)
    drawn = [one.random(3).tolist() for one in (env.noise, env.more, env._task._random)]
    assert len({tuple(one) for one in drawn}) == 3
    assert drawn[0] == np.random.RandomState(5).random_sample(3).tolist()
    assert seed_generators(env, 5)
    assert drawn == [one.random(3).tolist() for one in (env.noise, env.more, env._task._random)]


def test_an_env_within_itself_is_looked_at_once() -> None:
    env = OfSuite()
    env._env = env
    assert generators_of(env) == [env._task._random]


@pytest.mark.parametrize("given", ["reset", "pool"])
def test_seeds_that_change_nothing_are_named_once(given: str, backend: str) -> None:
    options = {"seed": 3} if given == "pool" else {}
    workers = None if backend == "serial" else 2
    with shoal.make(Walk, 3, backend=backend, num_workers=workers, **options) as envs:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            episodes(envs, **({"seed": 3} if given == "reset" else {}))
            episodes(envs, seed=4)
    assert [one.filename for one in found if "seeds change nothing" in str(one.message)] == [__file__]


def test_nobody_is_warned_who_gives_no_seed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with shoal.make(Walk, 2, backend="serial") as envs:
            episodes(envs)


# ---- dm_control itself, where it is installed ---------------------------------------------------------------


def load(domain: str, task: str, random: Any = None, noisy: bool = False) -> Any:
    """An env of dm_control's suite; nothing here calls for a picture."""
    from dm_control import suite
    from dm_control.suite.wrappers import action_noise

    env = suite.load(domain, task, task_kwargs={"random": random})
    return action_noise.Wrapper(env, 0.1) if noisy else env


def flat(observation: Any) -> Any:
    return np.concatenate([np.ravel(observation[key]) for key in sorted(observation)])


@pytest.mark.parametrize(
    ("domain", "task", "noisy"),
    [("cartpole", "swingup", False), ("walker", "walk", False), ("reacher", "easy", True), ("cheetah", "run", True)],
)
def test_dm_control_gives_the_episodes_of_the_seed(domain: str, task: str, noisy: bool) -> None:
    pytest.importorskip("dm_control", reason="its own envs are the judge")
    alone = load(domain, task, random=5, noisy=noisy)
    first = alone.reset()
    actions = np.zeros((20, *alone.action_spec().shape))
    expected = [flat(first.observation), *(flat(alone.step(action).observation) for action in actions)]
    expected.append(flat(alone.reset().observation))  # the next episode is drawn from the same generator
    make = functools.partial(load, domain, task, noisy=noisy)
    with shoal.make(make, 3, backend="processes", num_workers=2, autoreset="disabled") as envs:
        for _ in range(2):
            seen = [envs.reset(seed=4)[0]]
            seen += [envs.step(np.broadcast_to(action, envs.action_space.shape))[0] for action in actions]
            seen.append(envs.reset()[0])
            found = [flat({key: part[1] for key, part in one.items()}) for one in seen]
            assert np.array_equal(np.array(found), np.array(expected))

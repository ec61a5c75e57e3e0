"""skrl's wrappers and trainers over the Gymnasium face and over the face by agent."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from agent_envs import Crowd
from shoal.dialects.gymnasium import AsyncVectorEnv, SyncVectorEnv
from shoal.wrappers import CheckNan, wrap

pytest.importorskip("skrl", reason="it is their library that must accept ours")
torch = pytest.importorskip("torch")
wrap_env = pytest.importorskip("skrl.envs.wrappers.torch").wrap_env

CARTPOLE = functools.partial(gymnasium.make, "CartPole-v1")
PENDULUM = functools.partial(gymnasium.make, "Pendulum-v1")


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script of the trainers' ladder, which trains skrl's agents."""
    pytest.importorskip("mpe2", reason="the env of the multi-agent training")
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent.parent / "trainers"), *sys.path])
    import with_skrl

    monkeypatch.setattr(with_skrl, "NUM_ENVS", 3)
    return with_skrl


MAKERS: dict[str, Callable[[Any, int], Any]] = {
    "SyncVectorEnv": lambda env_fn, count: SyncVectorEnv([env_fn] * count),
    "AsyncVectorEnv": lambda env_fn, count: AsyncVectorEnv([env_fn] * count, max_concurrency=2),
    "shoal.make": lambda env_fn, count: shoal.make(env_fn, count, backend="threads", num_workers=2),
    "a wrapper of Gymnasium's": lambda env_fn, count: gymnasium.wrappers.vector.RecordEpisodeStatistics(
        SyncVectorEnv([env_fn] * count)
    ),
    "a wrapper of Shoal's": lambda env_fn, count: wrap(SyncVectorEnv([env_fn] * count), CheckNan()),
}


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("env_fn", [CARTPOLE, PENDULUM], ids=["CartPole", "Pendulum"])
@pytest.mark.parametrize("name", MAKERS)
def test_wrap_env_knows_it_and_steps_it_as_theirs(name: str, env_fn: Any, count: int) -> None:
    theirs = wrap_env(gymnasium.vector.SyncVectorEnv([env_fn] * count), verbose=False)
    ours = wrap_env(MAKERS[name](env_fn, count), verbose=False)
    try:
        assert type(ours) is type(theirs)
        assert (ours.num_envs, ours.observation_space, ours.action_space) == (
            theirs.num_envs, theirs.observation_space, theirs.action_space,
        )  # fmt: skip
        theirs._seed = ours._seed = 3
        assert torch.equal(ours.reset()[0], theirs.reset()[0])
        space = theirs._env.action_space
        space.seed(1)
        for _ in range(60):
            actions = torch.as_tensor(space.sample()).view(count, -1)
            for mine, their in zip(ours.step(actions)[:4], theirs.step(actions)[:4], strict=True):
                assert torch.equal(mine, their)
                assert mine.dtype == their.dtype
    finally:
        ours.close()
        theirs.close()


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_a_training_has_the_same_returns(ladder: Any, kind: Any) -> None:
    mine, their = (ladder.train("CartPole-v1", 1, kind, who, 5) for who in ("ours", "theirs"))
    assert mine.returns == their.returns
    assert len(mine.returns) > 10


def test_a_team_of_one_env_has_the_same_returns_as_the_env_itself(ladder: Any) -> None:
    """skrl resets a single env itself at the end of an episode, which is `same_step`."""
    options = {"backend": "serial", "autoreset": "same_step"}
    mine = ladder.train_team(1, 1, "ours", 5, **options)
    their = ladder.train_team(1, 1, "theirs", 5)
    assert mine.returns == their.returns
    assert len(mine.returns) == 10  # an episode takes 25 steps


@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_a_team_of_many_envs_trains(ladder: Any, backend: str) -> None:
    training = ladder.train_team(1, 5, "ours", 5, backend=backend, num_workers=None if backend == "serial" else 2)
    assert training.steps == 5 * ladder.STEPS
    assert np.isfinite(training.returns).all()
    assert (
        len(training.returns) == 5 * 8
    )  # an episode has 26 steps, of which the last begins the next one; there are two rollouts


def test_states_are_those_of_the_envs(ladder: Any) -> None:
    alone = [ladder.make_team() for _ in range(3)]
    with shoal.make(ladder.make_team, 3, api="agents", backend="processes", num_workers=2) as envs:
        wrapped = wrap_env(envs, verbose=False)
        wrapped._seed = 4
        observations, _ = wrapped.reset()
        for i, env in enumerate(alone):
            env.reset(seed=4 + i)
        assert envs.state_space == alone[0].state_space
        for _ in range(5):
            expected = np.stack([env.state() for env in alone])
            assert all(np.array_equal(state, expected) for state in wrapped.state().values())
            observations, *_ = wrapped.step({name: torch.ones(3, 1, dtype=torch.int64) for name in envs.agents})
            for i, env in enumerate(alone):
                found = env.step(dict.fromkeys(env.agents, 1))[0]
                assert all(np.array_equal(observations[name][i], found[name]) for name in found)


def test_an_env_without_a_state_says_so() -> None:
    with shoal.make(Crowd, 2, api="agents", backend="serial") as envs:
        envs.reset(seed=0)
        assert not hasattr(envs, "state_space")
        with pytest.raises(Exception, match="state"):
            envs.state()

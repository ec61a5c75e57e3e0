"""Many envs by agent: what each parallel env says by itself, with a row for each env."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import shoal
from agent_envs import Crowd, Masked, Parallel, Unequal
from envs import CountEnv
from shoal.dialects.agents import BatchedParallelEnv


def make(env: Any, backend: str = "serial", count: int = 3, **options: Any) -> BatchedParallelEnv:
    workers = None if backend == "serial" else 2
    made: BatchedParallelEnv = shoal.make(env, count, api="agents", backend=backend, num_workers=workers, **options)
    return made


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    return np.array_equal(one, other) and np.shape(one) == np.shape(other)


def row(batch: Any, env: int) -> Any:
    return {key: row(part, env) for key, part in batch.items()} if isinstance(batch, dict) else batch[env]


class Mixed(Parallel):
    """Agents that have nothing in common but their choice; each ends on its own time."""

    observation_by_agent = {
        "camera": spaces.Box(0, 255, (4, 3), np.uint8),
        "state": spaces.Dict(position=spaces.Box(-1, 1, (2,), np.float32), mode=spaces.Discrete(3, start=1)),
        "bits": spaces.MultiBinary(5),
    }
    action_by_agent = {name: spaces.Box(-n, n, (n,), np.float32) for n, name in enumerate(observation_by_agent, 1)}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.time = list(self.possible_agents), 0
        return self._observe(), {}

    def _observe(self) -> dict[str, Any]:
        rng = self.rng
        state = {"position": rng.uniform(-1, 1, 2).astype(np.float32), "mode": int(rng.integers(1, 4))}
        values = {
            "camera": rng.integers(0, 256, (4, 3), np.uint8),
            "state": state,
            "bits": rng.integers(0, 2, 5, np.int8),
        }
        return {name: values[name] for name in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self.time += 1
        assert all(self.action_by_agent[name].contains(action) for name, action in actions.items())
        rewards = {name: float(actions[name].sum()) for name in self.agents}
        ended = {name: self.time >= 3 + 2 * i for i, name in enumerate(self.possible_agents) if name in self.agents}
        result = self._observe(), rewards, dict.fromkeys(self.agents, False), ended, {}
        self.agents = [name for name in self.agents if not ended[name]]
        return result


@pytest.mark.parametrize("kind", [Unequal, Masked, Mixed, Crowd])
def test_each_row_is_what_its_env_says(kind: Callable[[], Any], backend: str) -> None:
    alone = [kind() for _ in range(3)]
    with make(kind, backend) as envs:
        assert envs.agents == alone[0].possible_agents
        assert (envs.num_envs, envs.num_agents) == (3, len(envs.agents))
        for agent in envs.agents:
            assert envs.observation_space(agent) == alone[0].observation_space(agent)
            assert envs.action_space(agent) == alone[0].action_space(agent)
            envs.action_space(agent).seed(1)
        observations, infos = envs.reset(seed=7)
        expected = [env.reset(seed=7 + i) for i, env in enumerate(alone)]
        began = 0
        for _ in range(40):
            for i, (seen, said) in enumerate(expected):
                for agent in envs.agents:
                    assert envs.present[agent][i] == (agent in seen)
                    if agent in seen:
                        assert same(row(observations[agent], i), seen[agent])
                    assert infos[agent].get(i, {}) == said.get(agent, {})
            actions = {agent: np.array([envs.action_space(agent).sample() for _ in alone]) for agent in envs.agents}
            observations, rewards, terminated, truncated, infos = envs.step(actions)
            expected = []
            for i, env in enumerate(alone):
                if not env.agents:
                    began += 1
                    expected.append(env.reset())
                    assert all(envs.began[agent][i] == (agent in env.agents) for agent in envs.agents)
                    continue
                seen, earned, dead, cut, said = env.step({agent: actions[agent][i] for agent in env.agents})
                expected.append((seen, said))
                for agent in seen:
                    assert rewards[agent][i] == earned[agent]
                    assert (terminated[agent][i], truncated[agent][i]) == (dead[agent], cut[agent])
        assert began > 2


def test_arrays_are_views_of_one_batch() -> None:
    with make(Unequal) as envs:
        observations, _ = envs.reset(seed=0)
        assert observations["small"].base is not None
        assert np.shares_memory(observations["small"].base, observations["large"].base)
        assert (observations["small"].shape, observations["large"].shape) == ((3, 2), (3, 5))


def test_last_observations_are_the_agents_own() -> None:
    with make(Unequal, autoreset="same_step", count=1) as envs:
        envs.reset(seed=0)
        alone = Unequal()
        alone.reset(seed=0)
        actions = {"small": [1], "large": [4], "middle": [-1]}
        for step in range(10):
            *_, infos = envs.step(actions)
            seen, *_ = alone.step({agent: actions[agent][0] for agent in alone.agents})
            ended = {3: ["small"], 9: ["large", "middle"]}.get(step, [])
            for agent in envs.agents:
                assert (0 in infos[agent]) == (agent in ended)
                if agent in ended:
                    assert same(infos[agent][0]["final_obs"], seen[agent])


def test_absent_agents_may_be_left_out() -> None:
    with make(Unequal, count=2) as envs:
        envs.reset(seed=0)
        all_three = {"small": [1, 1], "large": [4, 0], "middle": [-1, 1]}
        with pytest.raises(shoal.BadAction, match="'small' is left out"):
            envs.step({"large": [0, 0], "middle": [0, 0]})
        for _ in range(4):
            _, rewards, terminated, _, _ = envs.step(all_three)
        assert terminated["small"].all()
        _, rewards, _, _, _ = envs.step({"large": [0, 2], "middle": [1, 0]})
        assert not envs.present["small"].any()
        assert {agent: reward.tolist() for agent, reward in rewards.items()} == {
            "small": [0, 0], "large": [0, 2], "middle": [1, 0]
        }  # fmt: skip


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        ({"small": [0, 2], "large": [0, 0], "middle": [0, 0]}, r"agent 'small'.*env 1.*0 to 1, found 2"),
        ({"small": [0], "large": [0, 0], "middle": [0, 0]}, r"agent 'small'.*\(2,\).*\(1,\)"),
        ({"small": [0.5, 0.5], "large": [0, 0], "middle": [0, 0]}, r"agent 'small'.*int64.*float64"),
        ({"small": [0, 0], "large": [0, 0], "middle": [0, 0], "huge": [0, 0]}, r"no agent 'huge'.*'large'"),
        ([0, 0, 0], "expected a dict"),
    ],
)
def test_wrong_actions_are_refused_before_anything_moved(actions: Any, words: str) -> None:
    with make(Unequal, count=2) as envs:
        envs.reset(seed=0)
        with pytest.raises(shoal.BadAction, match=words):
            envs.step(actions)
        envs.step({"small": [0, 0], "large": [0, 0], "middle": [0, 0]})
        assert [len(acted) for acted in envs.pool.get_attr("acted")] == [1] * 6


def test_the_first_envs_that_are_ready(backend: str) -> None:
    with make(functools.partial(Crowd, 2), backend, 4, batch_envs=2) as envs:
        envs.async_reset(seed=[3, 1, 4, 1])
        counts = np.zeros(4, np.int64)
        for _ in range(30):
            observations, rewards, _, _, _, ids = envs.recv()
            assert ids.shape == rewards["agent_0"].shape == (2,)
            seen = envs.present["agent_1"]
            assert (observations["agent_1"][seen, 0] == 1).all()
            counts[ids] += 1
            envs.send({agent: np.zeros(2, np.int64) for agent in envs.agents}, ids)
        assert (counts > 0).all()


def test_some_envs_are_reset() -> None:
    with make(Crowd, autoreset="disabled") as envs:
        envs.reset(seed=[5, 6, 7], options=[{"n": i} for i in range(3)])
        assert [options["n"] for options in envs.pool.get_attr("options")[::4]] == [0, 1, 2]
        observations, _ = envs.reset(seed=[6], env_ids=[2])
        assert observations["agent_0"].shape == (1, 4)
        assert envs.pool.get_attr("seeds")[::4] == [[5], [6], [7, 6]]
        with pytest.raises(shoal.BadAction, match="envs 0 to 2"):
            envs.reset(env_ids=[3])
        with pytest.raises(ValueError, match="expected 3, one for each env, found 2"):
            envs.reset(seed=[1, 2])


def test_a_pool_that_is_there_already() -> None:
    with shoal.Pool(Crowd, 2, backend="serial") as pool:
        envs = BatchedParallelEnv(pool)
        assert envs.pool is pool
        assert envs.reset(seed=0)[0]["agent_0"].shape == (2, 4)
        with pytest.raises(TypeError, match="one was given"):
            BatchedParallelEnv(pool, 2)


def test_envs_without_agents_are_refused() -> None:
    with pytest.raises(shoal.BadEnv, match="no agents with names"):
        BatchedParallelEnv(CountEnv, 2, backend="serial")
    with shoal.Pool(CountEnv, 2, backend="serial") as pool:
        with pytest.raises(shoal.BadEnv, match="no agents with names"):
            BatchedParallelEnv(pool)
        pool.reset()
    with pytest.raises(TypeError, match="lenght"):
        BatchedParallelEnv(Crowd, 2, lenght=5)


class Whole(Unequal):
    """Has a state, and renders."""

    state_space = spaces.Box(-9, 9, (3,), np.float64)

    def state(self) -> Any:
        return np.full(3, len(self.agents), np.float64)

    def render(self) -> str:
        return "an image"


def test_states_and_images_of_whole_envs(backend: str) -> None:
    with make(Whole, backend) as envs:
        envs.reset(seed=0)
        assert envs.state_space == Whole.state_space
        assert same(envs.state(), np.full((3, 3), 3.0))
        assert envs.render() == ("an image",) * 3


@pytest.mark.parametrize("count", [1, 3])
def test_choices_may_be_a_column(count: int) -> None:
    with make(Crowd, count=count) as one, make(Crowd, count=count) as other:
        one.reset(seed=0)
        other.reset(seed=0)
        for turn in range(20):
            rows = np.arange(count) % 5 if turn % 2 else np.full(count, turn % 5)
            columns = rows[0] if count == 1 and turn % 3 else rows[:, None]
            answers = one.step(dict.fromkeys(one.agents, rows)), other.step(dict.fromkeys(other.agents, columns))
            assert all(same(*pair) for pair in zip(*(answer[:4] for answer in answers), strict=True))


def test_it_is_a_parallel_env_of_pettingzoo() -> None:
    parallel = pytest.importorskip("pettingzoo.utils.env").ParallelEnv
    with make(Unequal) as envs:
        assert isinstance(envs, parallel)
        assert parallel in type(envs).__bases__
        assert (envs.unwrapped, envs.num_agents, envs.max_num_agents) == (envs, 3, 3)
        assert envs.observation_spaces == {name: envs.observation_space(name) for name in envs.agents}
        assert envs.action_spaces == {name: envs.action_space(name) for name in envs.agents}

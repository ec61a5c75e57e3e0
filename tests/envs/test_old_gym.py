"""Envs of the old gym: what they look like, and how they are made adapt. No gym is installed for this."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from shoal.envs.adapt import adapt
from shoal.envs.old_gym import OldGymEnv, is_old, modern_space


class Box:
    """A space as gym 0.21 has it."""

    def __init__(self, low: float, high: float, shape: tuple[int, ...], dtype: Any = np.float32):
        self.low, self.high = np.full(shape, low, dtype), np.full(shape, high, dtype)
        self.shape, self.dtype = shape, np.dtype(dtype)


class Discrete:
    def __init__(self, n: int):
        self.n, self.dtype, self.shape = n, np.dtype(np.int64), ()


class OldEnv:
    """Four values from step, one from reset, `seed` as a method. Ends by time in odd episodes."""

    metadata = {"render.modes": ["human", "rgb_array"]}

    def __init__(self) -> None:
        self.observation_space, self.action_space = Box(-1e6, 1e6, (2,)), Discrete(3)
        self.seeded, self.steps, self.episode, self.closed = -1, 0, 0, False

    def seed(self, seed: int | None = None) -> list[int | None]:
        self.seeded = -1 if seed is None else seed
        return [seed]

    def reset(self) -> Any:
        self.steps, self.episode = 0, self.episode + 1
        return np.array([self.seeded, 0], np.float32)

    def step(self, action: Any) -> Any:
        self.steps += 1
        done = self.steps == 3
        info: dict[str, Any] = {"action": int(action)}
        if done and self.episode % 2:
            info["TimeLimit.truncated"] = True
        return np.array([self.seeded, self.steps], np.float32), float(action), done, info

    def render(self, mode: str = "human") -> Any:
        return np.full((2, 2, 3), self.steps, np.uint8) if mode == "rgb_array" else None

    def close(self) -> None:
        self.closed = True

    def secret(self) -> str:
        return f"fish {self.steps}"


class HalfOldEnv(gymnasium.Env[Any, Any]):
    pass


def test_what_is_old() -> None:
    assert is_old(OldEnv())
    assert not is_old(gymnasium.make("CartPole-v1"))
    assert not is_old(HalfOldEnv())
    assert not is_old("nonsense")
    new_style = SimpleNamespace(
        step=lambda a: None, reset=lambda seed=None, options=None: None, action_space=spaces.Discrete(2),
        observation_space=spaces.Discrete(2),
    )  # fmt: skip
    assert not is_old(new_style)
    env = gymnasium.make("CartPole-v1")
    assert adapt(env) is env


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (Box(-1, 2, (3, 2), np.float64), spaces.Box(-1, 2, (3, 2), np.float64)),
        (Box(0, 255, (4, 4, 3), np.uint8), spaces.Box(0, 255, (4, 4, 3), np.uint8)),
        (Discrete(7), spaces.Discrete(7)),
        (type("MultiDiscrete", (), {"nvec": [2, 3]})(), spaces.MultiDiscrete([2, 3])),
        (type("MultiBinary", (), {"n": 5})(), spaces.MultiBinary(5)),
        (type("Tuple", (), {"spaces": [Discrete(2)]})(), spaces.Tuple([spaces.Discrete(2)])),
        (type("Dict", (), {"spaces": {"a": Discrete(2)}})(), spaces.Dict(a=spaces.Discrete(2))),
        (spaces.Discrete(3), spaces.Discrete(3)),
    ],
)
def test_spaces(old: Any, new: Any) -> None:
    assert modern_space(old) == new


def test_a_space_that_nobody_knows() -> None:
    with pytest.raises(shoal.BadEnv, match="no space that Shoal knows"):
        modern_space(object())


def test_one_env() -> None:
    env = OldGymEnv(OldEnv())
    obs, info = env.reset(seed=5, options={"ignored": 1})
    assert (obs.tolist(), info) == ([5, 0], {})
    results = [env.step(2) for _ in range(3)]
    assert [result[2:4] for result in results] == [(False, False), (False, False), (False, True)]
    env.reset()
    assert [env.step(0)[2:4] for _ in range(3)][-1] == (True, False)
    assert env.secret() == "fish 3"
    assert env.render_mode == "rgb_array"
    assert env.render().tolist() == np.full((2, 2, 3), 3).tolist()
    env.close()
    assert env.unwrapped.closed


def test_in_a_pool(backend: str) -> None:
    """Two values from reset, five from step, and all its own attributes, on every backend."""
    with shoal.Pool([OldEnv] * 3, backend=backend, autoreset="same_step") as pool:
        assert pool.single_observation_space == spaces.Box(-1e6, 1e6, (2,), np.float32)
        batch = pool.reset(seed=10)
        assert batch.obs[:, 0].tolist() == [10, 11, 12]
        for _ in range(3):
            batch = pool.step(np.array([0, 1, 2]))
        assert batch.truncated.all()
        assert batch.reward.tolist() == [0, 1, 2]
        assert batch.final_obs[2].tolist() == [12, 3]
        assert batch.info[1]["final_info"] == {"action": 1, "TimeLimit.truncated": True}
        assert pool.call("secret") == ["fish 0"] * 3
        pool.set_attr("seeded", 7)
        assert pool.get_attr("seeded") == [7] * 3


def test_gymnasium_face() -> None:
    envs = shoal.make(OldEnv, num_envs=2, backend="serial")
    obs, _ = envs.reset(seed=1)
    assert obs[:, 0].tolist() == [1, 2]
    envs.close()


def test_an_old_env_that_returns_nonsense() -> None:
    class Odd(OldEnv):
        def step(self, action: Any) -> Any:
            return 1, 2, 3

    with shoal.Pool(Odd, 1, backend="serial") as pool:
        pool.reset()
        with pytest.raises(TypeError, match="obs, reward, done, info"):
            pool.step([0])


def test_an_old_env_whose_done_is_a_text() -> None:
    class Odd(OldEnv):
        def step(self, action: Any) -> Any:
            observation, reward, _, info = super().step(action)
            return observation, reward, "False", info

    with shoal.Pool(Odd, 1, backend="serial") as pool:
        pool.reset()
        with pytest.raises(TypeError, match=r"env 0 raised in step.*done must be a bool, got 'False'"):
            pool.step([0])

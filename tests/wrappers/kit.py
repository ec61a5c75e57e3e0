"""What the tests of wrappers share: envs full of noise, hosts to wrap, and the plain loop that says what is right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import shoal

MODES = ("next_step", "same_step", "disabled")
GYM_MODES = {
    "next_step": AutoresetMode.NEXT_STEP,
    "same_step": AutoresetMode.SAME_STEP,
    "disabled": AutoresetMode.DISABLED,
}

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float64)
IMAGE_LAST = spaces.Box(0, 255, (6, 5, 3), np.uint8)
IMAGE_FIRST = spaces.Box(0, 255, (2, 5, 6), np.uint8)
MANY = spaces.Dict(
    last=IMAGE_LAST,
    first=IMAGE_FIRST,
    vector=spaces.Box(-np.inf, np.inf, (2,), np.float32),
    matrix=spaces.Box(-np.inf, np.inf, (2, 3), np.float64),
)


class NoisyEnv(gymnasium.Env[Any, Any]):
    """Noise for observations and rewards, episodes of about three steps, an info at every turn; frames of one grey."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}

    def __init__(self, space: spaces.Space[Any] = VECTOR, render_mode: str | None = None):
        self.observation_space, self.render_mode = copy.deepcopy(space), render_mode
        self._drawn_from = space  # not the other one: Stable-Baselines3 writes into spaces of envs
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.steps = self.episodes = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.episodes = 0, self.episodes + 1
        return self._draw(self._drawn_from), {"born": self.episodes}

    def step(self, action: Any) -> Any:
        self.steps += 1
        luck = self.np_random.random()
        reward = float(self.np_random.normal(1.0, 5.0) + action.sum())
        return self._draw(self._drawn_from), reward, luck < 0.2, luck > 0.85, {"score": self.steps}

    def _draw(self, space: Any) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self._draw(part) for key, part in space.spaces.items()}
        if space.dtype == np.uint8:
            return self.np_random.integers(0, 256, space.shape, np.uint8)
        return np.asarray(self.np_random.normal(7.0, 3.0, space.shape)).astype(space.dtype)

    def render(self) -> Any:
        return np.full((16, 24, 3), 10 * self.steps, np.uint8)


def stable_baselines(module: str = "common.vec_env") -> Any:
    """A module of Stable-Baselines3, which leaves the other cores to others; skips the test without it."""
    reason = "Stable-Baselines3 is not installed, and there is nothing to compare with"
    found = pytest.importorskip(f"stable_baselines3.{module}", reason=reason)
    pytest.importorskip("torch", reason=reason).set_num_threads(1)
    return found


# ---- what is right -------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One answer of one env: what a plain loop gets."""

    obs: Any
    reward: float
    terminated: bool
    truncated: bool
    began: bool
    info: dict[str, Any]
    final_obs: Any = None
    final_info: dict[str, Any] | None = None

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


def action(env_id: int, turn: int) -> Any:
    """What an env is given after so many of its answers."""
    return np.array([np.sin(env_id + turn), np.cos(2 * env_id - turn)], np.float32)


def plain(make: Callable[[], Any], mode: str, env_id: int) -> Iterator[Row]:
    """One env alone, stepped by hand: all its answers, without end."""
    env = make()
    obs, info = env.reset(seed=env_id)
    yield Row(obs, 0.0, False, False, True, info)
    turn, ended = 1, False
    while True:
        if ended:
            obs, info = env.reset()
            row = Row(obs, 0.0, False, False, True, info)
        else:
            obs, reward, terminated, truncated, info = env.step(action(env_id, turn))
            row = Row(obs, reward, terminated, truncated, False, info)
            if mode == "same_step" and row.done:
                row.final_obs, row.final_info, row.began = row.obs, row.info, True
                row.obs, row.info = env.reset()
        ended = row.done and mode != "same_step"
        turn += 1
        yield row


# ---- hosts ---------------------------------------------------------------------------------------------------


def _gymnasium(make: Callable[[], Any], mode: str, count: int = 4) -> Any:
    return gymnasium.vector.SyncVectorEnv([make] * count, autoreset_mode=GYM_MODES[mode])


def _pool(make: Callable[[], Any], mode: str, count: int, **options: Any) -> Any:
    return shoal.Pool(make, count, autoreset=mode, **options)  # type: ignore[arg-type]


def _face(make: Callable[[], Any], mode: str) -> Any:
    return shoal.make(make, 3, autoreset=mode, backend="serial")


HOSTS: dict[str, Callable[[Callable[[], Any], str], Any]] = {
    "pool of one": partial(_pool, count=1, backend="serial"),
    "pool of 7 on 3 processes": partial(_pool, count=7, backend="processes", num_workers=3),
    "pool, 2 of 5": partial(_pool, count=5, backend="serial", batch_size=2),
    "pool, 2 of 5 on 2 processes": partial(_pool, count=5, backend="processes", num_workers=2, batch_size=2),
    "shoal.make": _face,
    "gymnasium": _gymnasium,
    "gymnasium, one": partial(_gymnasium, count=1),
}


def mode_of(envs: Any) -> str:
    if is_pool(envs):
        return str(envs.autoreset)
    found = envs.metadata["autoreset_mode"]
    return next(name for name, mode in GYM_MODES.items() if mode == found)


def is_pool(envs: Any) -> bool:
    return hasattr(envs, "recv")


# ---- playing -------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What a host has returned, one row for each of `ids`. `infos` are by row for pools, Gymnasium's for others."""

    ids: list[int]
    obs: Any
    reward: Any
    terminated: Any
    truncated: Any
    began: Any
    finals: dict[int, Any]
    infos: dict[Any, Any]


def play(envs: Any, turns: int) -> Iterator[Answer]:
    """Reset and step; envs whose episode is over are reset by hand where nobody else does."""
    if not is_pool(envs):
        yield from _play_vector_env(envs, turns)
    elif envs.batch_size == envs.num_envs:
        yield from _play_pool(envs, turns)
    else:
        yield from _play_partial(envs, turns)


def _of_batch(batch: Any) -> Answer:
    ids = batch.env_id.tolist()
    finals = {ids.index(env_id): final for env_id, final in batch.final_obs.items()}
    infos = {ids.index(env_id): info for env_id, info in batch.info.items()}
    return Answer(ids, batch.obs, batch.reward, batch.terminated, batch.truncated, batch.began, finals, infos)


def _play_pool(pool: Any, turns: int) -> Iterator[Answer]:
    seen = [1] * pool.num_envs
    yield _of_batch(pool.reset(seed=0))
    for _ in range(turns):
        batch = pool.step(np.stack([action(i, turn) for i, turn in enumerate(seen)]))
        seen = [turn + 1 for turn in seen]
        ended = np.flatnonzero(batch.done) if pool.autoreset == "disabled" else []
        yield _of_batch(batch)
        if len(ended):
            yield _of_batch(pool.reset(ended))
            for env_id in ended:
                seen[env_id] += 1


def _play_partial(pool: Any, turns: int) -> Iterator[Answer]:
    seen = [0] * pool.num_envs
    pool.async_reset(seed=0)
    for _ in range(turns):
        batch = pool.recv(timeout=60)
        ids, over = batch.env_id.tolist(), batch.done & (pool.autoreset == "disabled")
        for env_id in ids:
            seen[env_id] += 1
        ended = [i for i, it in zip(ids, over, strict=True) if it]
        going = [i for i, it in zip(ids, over, strict=True) if not it]
        yield _of_batch(batch)
        if ended:
            pool.async_reset(ended)
        if going:
            pool.send(np.stack([action(i, seen[i]) for i in going]), going)


def _play_vector_env(envs: Any, turns: int) -> Iterator[Answer]:
    count, mode = envs.num_envs, mode_of(envs)
    everybody, nothing = list(range(count)), np.zeros(count, np.bool_)
    obs, infos = envs.reset(seed=0)
    yield Answer(everybody, obs, np.zeros(count), nothing, nothing, None, {}, infos)
    seen = [1] * count
    for _ in range(turns):
        actions = np.stack([action(i, turn) for i, turn in enumerate(seen)])
        obs, reward, terminated, truncated, infos = envs.step(actions)
        seen = [turn + 1 for turn in seen]
        finals = {row: infos["final_obs"][row] for row in np.flatnonzero(infos.get("_final_obs", nothing)).tolist()}
        yield Answer(everybody, obs, reward, terminated, truncated, None, finals, infos)
        over = terminated | truncated
        if mode == "disabled" and over.any():
            before = copy.deepcopy(obs)
            obs, infos = envs.reset(options={"reset_mask": over})
            assert_same(take(obs, np.flatnonzero(~over)), take(before, np.flatnonzero(~over)))
            ended = np.flatnonzero(over).tolist()
            few = np.zeros(len(ended), np.bool_)
            yield Answer(ended, take(obs, ended), np.zeros(len(ended)), few, few, None, {}, infos)
            for env_id in ended:
                seen[env_id] += 1


def follow(envs: Any, make: Callable[[], Any], turns: int) -> Iterator[tuple[Answer, list[Row]]]:
    """Play, and say for each answer what the envs themselves have said; ends of episodes must agree."""
    alone = [plain(make, mode_of(envs), env_id) for env_id in range(envs.num_envs)]
    for answer in play(envs, turns):
        rows = [next(alone[env_id]) for env_id in answer.ids]
        assert answer.terminated.tolist() == [row.terminated for row in rows]
        assert answer.truncated.tolist() == [row.truncated for row in rows]
        assert answer.began is None or answer.began.tolist() == [row.began for row in rows]
        assert set(answer.finals) == {i for i, row in enumerate(rows) if row.final_obs is not None}
        yield answer, rows


def take(value: Any, rows: Any) -> Any:
    """Some rows (or, for a number, one) of a batch."""
    if isinstance(value, dict):
        return {key: take(part, rows) for key, part in value.items()}
    return value[rows]


def assert_same(one: Any, other: Any) -> None:
    """Equal to the bit, in type and shape as well."""
    if isinstance(other, dict):
        assert isinstance(one, dict)
        assert list(one) == list(other)
        for key in other:
            assert_same(one[key], other[key])
    else:
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)

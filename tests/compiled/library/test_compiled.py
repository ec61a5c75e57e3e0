"""The library under backend="compiled": the same bits as in plain Python, and from any state those of Gymnasium."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("numba", reason='these tests compile: pip install ".[compiled]"')

import shoal
from compiled.library.kit import PHYSICS, Physics, assert_same_numbers, chi_square_is_ordinary, theirs
from contract.lockstep import assert_same
from shoal.compiled import library


def lanes(env_id: str, num_envs: int, **options: Any) -> shoal.Pool:
    return shoal.Pool(library.find(env_id), num_envs, copy=True, **options)


def told(batch: shoal.Batch) -> tuple[Any, ...]:
    return batch.obs, batch.reward, batch.terminated, batch.truncated, batch.began


@pytest.mark.parametrize("env_id", [env_id for env_id in library.ids() if env_id != "Taxi-v4"])  # which is Taxi-v3
def test_compiled_lanes_are_those_of_plain_python(env_id: str) -> None:
    """Through several episodes of each lane, the times over included."""
    steps = 40 if env_id.startswith("shoal/") else 250
    with (
        lanes(env_id, 7, backend="compiled", num_workers=3) as compiled,
        lanes(env_id, 7, backend="serial") as plain,
    ):
        assert_same(told(compiled.reset(seed=11)), told(plain.reset(seed=11)), "reset")
        space = plain.action_space
        space.seed(0)
        for i in range(steps):
            actions = space.sample()
            assert_same(told(compiled.step(actions)), told(plain.step(actions)), f"step {i}")


@pytest.mark.parametrize("physics", PHYSICS, ids=lambda physics: physics.env_id)
def test_compiled_physics_are_gymnasiums_from_random_states(physics: Physics) -> None:
    rng = np.random.default_rng(6)
    count = 1500
    fields = [physics.draw(rng) for _ in range(count)]
    actions = [physics.action(rng) for _ in range(count)]
    gym = theirs(physics.env_id).unwrapped
    gym.reset(seed=0)
    expected = []
    for state, action in zip(fields, actions, strict=True):
        physics.put(gym, state)
        expected.append((*gym.step(action)[:3], physics.get(gym)))
    obs, reward, terminated, after = zip(*expected, strict=True)
    with lanes(physics.env_id, count, backend="compiled", num_workers=2, check_actions="discrete") as pool:
        pool.reset(seed=0)
        for name in fields[0]:
            pool.set_attr(name, [state[name] for state in fields])
        batch = pool.step(np.array(actions))
        assert_same_numbers(batch.obs, np.array(obs))
        assert_same_numbers(batch.reward, np.array(reward, float))
        assert (batch.terminated == terminated).all()
        for name in fields[0]:
            found, expected = pool.get_attr(name), [one[name] for one in after]
            assert_same_numbers(np.array(found, float), np.array(expected, float), name)


def cell_fields(env_id: str, cells: Any) -> dict[str, list[Any]]:
    """Return the fields of the states that Gymnasium gives these numbers."""
    if env_id.startswith("Taxi"):
        rest, destination = np.divmod(cells, 4)
        rest, passenger = np.divmod(rest, 5)
        row, column = np.divmod(rest, 5)
        found = {"row": row, "column": column, "passenger": passenger, "destination": destination}
    elif env_id.startswith("Cliff"):
        row, column = np.divmod(cells, 12)
        found = {"row": row, "column": column}
    else:
        found = {"cell": cells}
    return {name: values.tolist() for name, values in found.items()}


@pytest.mark.parametrize(
    ("env_id", "kwargs"), [("FrozenLake-v1", {"is_slippery": False}), ("Taxi-v3", {}), ("CliffWalking-v1", {})]
)
def test_compiled_tables_are_gymnasiums(env_id: str, kwargs: dict[str, Any]) -> None:
    table = theirs(env_id, **kwargs).unwrapped.P
    pairs = [(cell, action) for cell, row in table.items() for action in row]
    cells, actions = np.array(pairs).T
    with lanes(env_id, len(pairs), backend="compiled", num_workers=2, env_kwargs=kwargs) as pool:
        pool.reset(seed=0)
        for name, values in cell_fields(env_id, cells).items():
            pool.set_attr(name, values)
        batch = pool.step(actions)
    _, after, reward, terminated = zip(*(table[cell][action][0] for cell, action in pairs), strict=True)
    assert (batch.obs == after).all()
    assert (batch.reward == reward).all()
    assert (batch.terminated == terminated).all()


@pytest.mark.parametrize(
    ("env_id", "kwargs", "cell", "action"),
    [
        ("FrozenLake-v1", {}, 10, 1),
        ("CliffWalking-v1", {"is_slippery": True}, 30, 1),
        ("Taxi-v3", {"is_rainy": True}, 240, 2),
    ],
)
def test_compiled_slips_have_gymnasiums_chances(env_id: str, kwargs: dict[str, Any], cell: int, action: int) -> None:
    gym = theirs(env_id, **kwargs).unwrapped
    chances = np.zeros(gym.observation_space.n)
    for chance, after, _, _ in gym.P[cell][action]:
        chances[after] += chance
    with lanes(env_id, 4000, backend="compiled", num_workers=2, env_kwargs=kwargs) as pool:
        pool.reset(seed=0)
        for name, values in cell_fields(env_id, np.full(4000, cell)).items():
            pool.set_attr(name, values)
        after = pool.step(np.full(4000, action)).obs
    assert chi_square_is_ordinary(np.bincount(after, minlength=len(chances)), chances)


def test_compiled_first_cards_have_gymnasiums_chances() -> None:
    with lanes("Blackjack-v1", 4000, backend="compiled", num_workers=2) as pool:
        _, shown, _ = pool.reset(seed=0).obs
    assert chi_square_is_ordinary(np.bincount(shown, minlength=11), [0, *[1 / 13] * 9, 4 / 13])


def test_compiled_blackjack_earns_what_gymnasiums_does() -> None:
    """Who sticks at once: how often one wins, draws and loses, against as many games of Gymnasium's."""
    games = 4000
    with lanes("Blackjack-v1", games, backend="compiled", num_workers=2) as pool:
        pool.reset(seed=0)
        earned = pool.step(np.zeros(games, np.int64)).reward
    gym: gymnasium.Env[Any, Any] = theirs("Blackjack-v1")
    gym.reset(seed=0)
    expected = []
    for _ in range(games):
        gym.reset()
        expected.append(gym.step(0)[1])
    ours, chances = ([np.sum(np.equal(each, kind)) for kind in (-1.0, 0.0, 1.0)] for each in (earned, expected))
    # Both are counts, so they differ by twice the variance of one of them.
    spread = sum((a - b) ** 2 / (a + b) for a, b in zip(ours, chances, strict=True))
    assert spread < 25


def test_params_are_of_each_lane() -> None:
    with lanes("CartPole-v1", 6, backend="compiled", num_workers=2) as pool:
        pool.reset(seed=0)
        for name in ("x", "v", "theta", "omega"):
            pool.set_attr(name, 0.1)
        pool.set_attr("gravity", [1.0, 9.8, 20.0, 1.0, 9.8, 20.0])
        obs = pool.step(np.zeros(6, np.int64)).obs
    assert (obs[:3] == obs[3:]).all()
    assert len({row.tobytes() for row in obs}) == 3

"""FrozenLake, Taxi, CliffWalking and Blackjack: exactly as Gymnasium's for the same draws, with the same chances."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from compiled.library.kit import Forced, chi_square_is_ordinary, ours, theirs
from shoal import compiled
from shoal.compiled.library import toy_text

# A number in each part of (0, 1) that an outcome can stand for, and some that lie close to the bounds.
DRAWS = (0.0, 0.1, 0.3333, 0.33334, 0.5, 0.6666, 0.66667, 0.75, 0.8, 0.8001, 0.8999, 0.9001, 0.99)

LAKE_WITH_TWO_STARTS = ("SFHFF", "FFFFS", "HFGFX")  # an unknown letter is ice
TABLES: list[tuple[str, dict[str, Any]]] = [
    ("FrozenLake-v1", {}),
    ("FrozenLake-v1", {"is_slippery": False}),
    ("FrozenLake-v1", {"map_name": "8x8", "success_rate": 0.75, "reward_schedule": (10, -5, -0.5)}),
    ("FrozenLake-v1", {"desc": LAKE_WITH_TWO_STARTS}),
    ("FrozenLake-v1", {"desc": generate_random_map(6, seed=1), "success_rate": 1.0}),
    ("FrozenLake8x8-v1", {}),
    ("Taxi-v3", {}),
    ("Taxi-v4", {"is_rainy": True}),
    ("Taxi-v3", {"is_rainy": True, "rainy_probability": 0.5}),
    ("CliffWalking-v1", {}),
    ("CliffWalking-v1", {"is_slippery": True}),
    ("CliffWalkingSlippery-v1", {}),
]
each_table = pytest.mark.parametrize(("env_id", "kwargs"), TABLES, ids=lambda value: str(value)[:60])


def put(env: Any, cell: int) -> None:
    """Set the state that Gymnasium gives this number."""
    if "Taxi" in env.definition.name:
        rest, env.state.destination = divmod(cell, 4)
        rest, env.state.passenger = divmod(rest, 5)
        env.state.row, env.state.column = divmod(rest, 5)
    elif "Cliff" in env.definition.name:
        env.state.row, env.state.column = divmod(cell, 12)
    else:
        env.state.cell = cell


def force(monkeypatch: pytest.MonkeyPatch, draw: float) -> None:
    """Let all that is drawn by Shoal's env be this part of what is possible."""
    monkeypatch.setattr(compiled, "uniform", lambda rng, low=0.0, high=1.0: low + (high - low) * draw)
    monkeypatch.setattr(compiled, "integer", lambda rng, low, high: low + int((high - low) * draw))


@each_table
def test_every_step_of_every_state(env_id: str, kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    mine, gym = ours(env_id, **kwargs), theirs(env_id, **kwargs).unwrapped
    mine.reset(seed=0)
    slips = any(len(outcomes) > 1 for row in gym.P.values() for outcomes in row.values())
    draws = DRAWS if slips else (0.5,)
    if env_id.startswith("Taxi") and slips:
        draws = (0.2, 0.55, 0.78, 0.85, 0.95)
    for draw in draws:
        force(monkeypatch, draw)
        gym.reset(seed=0)
        gym.np_random = Forced(itertools.repeat(draw))
        for cell, action in itertools.product(gym.P, range(gym.action_space.n)):
            put(mine, cell)
            gym.s = cell
            told = f"from {cell} by {action}, drawn {draw}"
            found, expected = mine.step(action), gym.step(action)
            assert found[:3] == expected[:3], told
            assert type(found[1]) is float


@each_table
def test_spaces_and_length_are_gymnasiums(env_id: str, kwargs: dict[str, Any]) -> None:
    mine, gym = ours(env_id, **kwargs), theirs(env_id, **kwargs)
    assert mine.observation_space == gym.observation_space
    assert mine.action_space == gym.action_space
    assert mine.definition.max_episode_steps == gym.spec.max_episode_steps


@each_table
def test_first_states_have_gymnasiums_chances(env_id: str, kwargs: dict[str, Any]) -> None:
    mine, gym = ours(env_id, **kwargs), theirs(env_id, **kwargs).unwrapped
    chances = gym.initial_state_distrib
    mine.reset(seed=0)
    counts = np.zeros(len(chances))
    for _ in range(3000 if (chances > 0).sum() > 1 else 20):
        counts[mine.reset()[0]] += 1
    if (chances > 0).sum() > 1:
        assert chi_square_is_ordinary(counts, chances)
    else:
        assert counts[np.argmax(chances)] == counts.sum()


@pytest.mark.parametrize(
    ("env_id", "kwargs", "cell", "action"),
    [
        ("FrozenLake-v1", {}, 10, 1),
        ("FrozenLake-v1", {"success_rate": 0.75}, 0, 2),
        ("CliffWalking-v1", {"is_slippery": True}, 30, 1),
        ("CliffWalking-v1", {"is_slippery": True}, 0, 0),
        ("Taxi-v3", {"is_rainy": True}, 240, 2),
    ],
)
def test_slips_have_gymnasiums_chances(env_id: str, kwargs: dict[str, Any], cell: int, action: int) -> None:
    mine, gym = ours(env_id, **kwargs), theirs(env_id, **kwargs).unwrapped
    chances = np.zeros(gym.observation_space.n)
    for chance, after, _, _ in gym.P[cell][action]:
        chances[after] += chance
    counts = np.zeros_like(chances)
    mine.reset(seed=5)
    for _ in range(3000):
        put(mine, cell)
        counts[mine.step(action)[0]] += 1
    assert chi_square_is_ordinary(counts, chances)


def test_a_lake_without_a_start_or_with_ragged_rows_is_refused() -> None:
    for desc in (["FF", "FG"], ["SFF", "FG"]):
        with pytest.raises(ValueError, match="expected rows of the same length with an 'S'"):
            ours("FrozenLake-v1", desc=desc)
    with pytest.raises(ValueError, match="map_name: expected '4x4' or '8x8', found '9x9'"):
        ours("FrozenLake-v1", map_name="9x9")


# ---- fickle passengers


def with_passenger(destination: int) -> int:
    """Return the number of the state with a taxi in the middle of the town, and the passenger in it."""
    return ((2 * 5 + 2) * 5 + 4) * 4 + destination


def test_a_fickle_passenger_changes_their_mind_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all that can be drawn, destinations are Gymnasium's; the second move changes nothing."""
    kwargs = {"fickle_passenger": True, "fickle_probability": 1.0}
    mine, gym = ours("Taxi-v3", **kwargs), theirs("Taxi-v3", **kwargs).unwrapped
    for destination in range(4):
        seen: dict[str, set[Any]] = {"mine": set(), "gym": set()}
        for draw in (0.1, 0.5, 0.9):
            force(monkeypatch, draw)
            mine.reset(seed=0)
            gym.reset(seed=0)
            gym.np_random = Forced(itertools.repeat(draw))
            assert mine.state.fickle
            put(mine, with_passenger(destination))
            gym.s = with_passenger(destination)
            for action in (5, 0, 1):  # to drop off here is not allowed, and changes no mind
                found, expected = mine.step(action), gym.step(action)
                assert found[1:3] == expected[1:3]
                assert found[0] // 4 == expected[0] // 4
                seen["mine"].add((action, found[0]))
                seen["gym"].add((action, expected[0]))
            assert not mine.state.fickle
        assert seen["mine"] == seen["gym"]


def test_as_many_are_fickle_as_in_gymnasium() -> None:
    mine = ours("Taxi-v3", fickle_passenger=True)
    mine.reset(seed=1)
    fickle = []
    for _ in range(2000):
        mine.reset()
        fickle.append(bool(mine.state.fickle))
    assert chi_square_is_ordinary([sum(fickle), 2000 - sum(fickle)], [0.3, 0.7])
    mine = ours("Taxi-v3")
    assert not any(mine.reset() and mine.state.fickle for _ in range(50))


def test_nobody_is_fickle_before_they_are_in_the_taxi() -> None:
    mine = ours("Taxi-v3", fickle_passenger=True, fickle_probability=1.0)
    mine.reset(seed=0)
    for action in (0, 1, 2, 3) * 5:
        before = int(mine.state.destination)
        mine.step(action)
        assert mine.state.destination == before
        assert mine.state.fickle


# ---- Blackjack


@pytest.mark.parametrize(("natural", "sab"), [(False, False), (False, True), (True, False), (True, True)])
def test_blackjack_with_the_same_cards(natural: bool, sab: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole games, the cards of both taken from one pile."""
    rng = np.random.default_rng(0)
    mine, gym = ours("Blackjack-v1", natural=natural, sab=sab), theirs("Blackjack-v1", natural=natural, sab=sab)
    cards: Iterator[int] = iter(())
    monkeypatch.setattr(toy_text, "draw_card", lambda _: next(cards))

    class Pile:
        def choice(self, options: Any) -> Any:
            return next(gym_cards) if len(options) == 13 else options[0]

    rewards = set()
    for _ in range(1500):
        pile = np.minimum(rng.integers(1, 14, 40), 10).tolist()
        if rng.random() < 0.5:  # more often than chance would have it: naturals, of either or both
            pile[:4] = [pile[:2], [1, 10]][rng.integers(2)] + [pile[2:4], [10, 1]][rng.integers(2)]
        cards, gym_cards = iter(pile), iter(pile)
        gym.unwrapped.np_random = Pile()
        assert mine.reset()[0] == gym.reset()[0], pile
        over = False
        while not over:
            action = int(rng.random() < 0.6)
            found, expected = mine.step(action), gym.step(action)
            assert found[:4] == expected[:4], (pile, action)
            over = found[2]
        rewards.add(found[1])
    assert rewards == {-1.0, 0.0, 1.0} | ({1.5} if natural and not sab else set())


def test_cards_have_gymnasiums_chances() -> None:
    mine = ours("Blackjack-v1")
    mine.reset(seed=0)
    shown = np.zeros(11)
    first = np.zeros(32)
    for _ in range(4000):
        (total, card, usable), _ = mine.reset()
        shown[card] += 1
        first[total] += 1
        assert usable == (mine.state.player_ace and mine.state.player <= 11)
    cards = np.array([0, *[1 / 13] * 9, 4 / 13])
    assert chi_square_is_ordinary(shown, cards)
    totals = np.zeros(32)
    for a, b in itertools.product(range(1, 11), repeat=2):
        totals[a + b + (10 if 1 in (a, b) else 0)] += cards[a] * cards[b]
    assert chi_square_is_ordinary(first, totals)


def test_blackjack_has_gymnasiums_spaces_and_defaults() -> None:
    mine, gym = ours("Blackjack-v1"), theirs("Blackjack-v1")
    assert mine.observation_space == gym.observation_space
    assert mine.action_space == gym.action_space
    assert mine.definition.max_episode_steps is gym.spec.max_episode_steps is None
    assert (mine.natural, mine.sab) == (gym.unwrapped.natural, gym.unwrapped.sab)

"""Gymnasium's toy text: FrozenLake, CliffWalking, Taxi and Blackjack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from shoal import compiled


@compiled.function
def moved(row: int, column: int, direction: int, rows: int, columns: int) -> Any:
    """Return the cell next to one, or itself at an edge; 0 is up, 1 right, 2 down and 3 left."""
    if direction == 0:
        row = max(row - 1, 0)
    elif direction == 1:
        column = min(column + 1, columns - 1)
    elif direction == 2:
        row = min(row + 1, rows - 1)
    else:
        column = max(column - 1, 0)
    return row, column


# ---- FrozenLake: cross the ice from S to G without falling into a hole, where you may slip to either side ------

MAPS = {
    "4x4": ("SFFF", "FHFH", "FFFH", "HFFG"),
    "8x8": (
        "SFFFFFFF", "FFFFFFFF", "FFFHFFFF", "FFFFFHFF",
        "FFFHFFFF", "FHHFFFHF", "FHFFHFHF", "FFFHFFFG",
    ),
}  # fmt: skip
FROZEN, HOLE, GOAL = 0, 1, 2


def board_of(desc: Any) -> Any:
    """Return the letters of a map, given by rows, as an array [rows, columns] of bytes."""
    rows = [str(row) if isinstance(row, str) else "".join(np.asarray(row, str)) for row in desc]
    if len({len(row) for row in rows}) != 1 or not any("S" in row for row in rows):
        raise ValueError(f"desc: expected rows of the same length with an 'S' among them, found {desc!r}")
    return np.asarray(rows, dtype="c")


class FrozenLake(compiled.Env):
    """Gymnasium's FrozenLake, with its arguments.

    Args:
        desc: rows of S (start), F (frozen), H (hole) and G (goal); by default the map that `map_name` names.
        map_name: "4x4" or "8x8".
        is_slippery: whether a step may go to either side.
        success_rate: how often it goes ahead if the ice is slippery.
        reward_schedule: the rewards for reaching a goal, a hole, and anything else.
    """

    action_space = spaces.Discrete(4)
    max_episode_steps = 100
    state = {"cell": int}

    def __init__(
        self,
        desc: Sequence[str] | None = None,
        map_name: str = "4x4",
        is_slippery: bool = True,
        success_rate: float = 1.0 / 3.0,
        reward_schedule: tuple[float, float, float] = (1, 0, 0),
    ):
        if desc is None and map_name not in MAPS:
            raise ValueError(f"map_name: expected {' or '.join(map(repr, MAPS))}, found {map_name!r}; or give a desc")
        letters = board_of(MAPS[map_name] if desc is None else desc)
        rows, columns = letters.shape
        goal, hole, frozen = map(float, reward_schedule)
        self.observation_space = spaces.Discrete(rows * columns)
        self.params = {
            "board": np.select([letters == b"H", letters == b"G"], [HOLE, GOAL], FROZEN).astype(np.int8).ravel(),
            "rows": rows,
            "columns": columns,
            "starts": np.flatnonzero(letters.ravel() == b"S"),
            "rewards": np.array([frozen, hole, goal]),
            # The chances of slipping to the left, and of not slipping to the right.
            "left": (1.0 - success_rate) / 2.0 if is_slippery else 0.0,
            "not_right": (1.0 - success_rate) / 2.0 + success_rate if is_slippery else 1.0,
        }

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.cell = state.starts[compiled.integer(rng, 0, len(state.starts))]

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        if state.board[state.cell] != FROZEN:  # already at an end
            return 0.0, True
        direction = action  # 0 left, 1 down, 2 right, 3 up
        if state.not_right < 1.0:
            drawn = compiled.uniform(rng)
            if drawn < state.left:
                direction = (action - 1) % 4
            elif drawn >= state.not_right:
                direction = (action + 1) % 4
        row, column = state.cell // state.columns, state.cell % state.columns
        row, column = moved(row, column, 3 - direction, state.rows, state.columns)
        state.cell = row * state.columns + column
        tile = state.board[state.cell]
        return state.rewards[tile], tile != FROZEN

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0] = state.cell


class FrozenLake8x8(FrozenLake):
    """The same on the larger map, with more time, unless told otherwise."""

    max_episode_steps = 200

    def __init__(self, desc: Sequence[str] | None = None, map_name: str = "8x8", **kwargs: Any):
        super().__init__(desc, map_name, **kwargs)


# ---- CliffWalking: walk along a cliff to the goal; a step over the edge costs 100, and leads back to the start -

CLIFF_ROWS, CLIFF_COLUMNS = 4, 12
CLIFF_GOAL = CLIFF_ROWS * CLIFF_COLUMNS - 1


class CliffWalking(compiled.Env):
    """Gymnasium's CliffWalking; if it is slippery, a step goes to either side as often as ahead."""

    observation_space = spaces.Discrete(CLIFF_ROWS * CLIFF_COLUMNS)
    action_space = spaces.Discrete(4)
    max_episode_steps = None
    state = {"row": int, "column": int}
    params = {"is_slippery": False}

    def __init__(self, is_slippery: bool = False):
        self.params = {"is_slippery": bool(is_slippery)}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.row = CLIFF_ROWS - 1
        state.column = 0

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        direction = action  # 0 up, 1 right, 2 down, 3 left
        if state.is_slippery:
            direction = (action + compiled.integer(rng, -1, 2)) % 4
        row, column = moved(state.row, state.column, direction, CLIFF_ROWS, CLIFF_COLUMNS)
        fell = row == CLIFF_ROWS - 1 and 0 < column < CLIFF_COLUMNS - 1
        if fell:
            column = 0
        state.row, state.column = row, column
        return -100.0 if fell else -1.0, row * CLIFF_COLUMNS + column == CLIFF_GOAL

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0] = state.row * CLIFF_COLUMNS + state.column


class CliffWalkingSlippery(CliffWalking):
    """The same, slippery unless told otherwise."""

    params = {"is_slippery": True}

    def __init__(self, is_slippery: bool = True):
        super().__init__(is_slippery)


# ---- Taxi: fetch a passenger at one of four places in a small town, and bring them to another ------------------

TOWN = 5
IN_TAXI = 4
PLACE_ROW = np.array([0, 0, 4, 4])
PLACE_COLUMN = np.array([0, 4, 0, 3])
# Whether there is a wall to the east of a cell; the town's edge is one.
WALL_EAST = np.array(
    [
        [0, 1, 0, 0, 1],
        [0, 1, 0, 0, 1],
        [0, 0, 0, 0, 1],
        [1, 0, 1, 0, 1],
        [1, 0, 1, 0, 1],
    ]
)
SOUTH, NORTH, EAST, WEST, PICK_UP, DROP_OFF = range(6)
LEFT_OF = np.array([EAST, WEST, NORTH, SOUTH])
RIGHT_OF = np.array([WEST, EAST, SOUTH, NORTH])


@compiled.function
def may_drive(row: int, column: int, direction: int) -> Any:
    """Say whether neither a wall nor the edge is in the way."""
    if direction == SOUTH:
        return row < TOWN - 1
    if direction == NORTH:
        return row > 0
    if direction == EAST:
        return WALL_EAST[row, column] == 0
    return column > 0 and WALL_EAST[row, column - 1] == 0


@compiled.function
def place_at(row: int, column: int) -> int:
    """Return the number of the place in a cell, or -1."""
    for place in range(4):
        if PLACE_ROW[place] == row and PLACE_COLUMN[place] == column:
            return place
    return -1


class Taxi(compiled.Env):
    """Gymnasium's Taxi-v4, which is its Taxi-v3 with two options of chance.

    Args:
        is_rainy: whether the taxi may skid to either side.
        fickle_passenger: whether passengers may change their mind, once, on the first move after they got in.
        rainy_probability: how often the taxi goes ahead in the rain.
        fickle_probability: what part of the passengers changes its mind.
    """

    observation_space = spaces.Discrete(500)
    action_space = spaces.Discrete(6)
    max_episode_steps = 200
    state = {"row": int, "column": int, "passenger": int, "destination": int, "fickle": bool}
    params = {"is_rainy": False, "rainy_probability": 0.8, "fickle_probability": 0.0}

    def __init__(
        self,
        is_rainy: bool = False,
        fickle_passenger: bool = False,
        rainy_probability: float = 0.8,
        fickle_probability: float = 0.3,
    ):
        self.params = {
            "is_rainy": bool(is_rainy),
            "rainy_probability": float(rainy_probability),
            "fickle_probability": float(fickle_probability) if fickle_passenger else 0.0,
        }

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.row = compiled.integer(rng, 0, TOWN)
        state.column = compiled.integer(rng, 0, TOWN)
        state.passenger = compiled.integer(rng, 0, 4)
        state.destination = (state.passenger + compiled.integer(rng, 1, 4)) % 4
        state.fickle = compiled.uniform(rng) < state.fickle_probability

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        place = place_at(state.row, state.column)
        if action == PICK_UP:
            if place == state.passenger:
                state.passenger = IN_TAXI
                return -1.0, False
            return -10.0, False
        if action == DROP_OFF:
            if state.passenger != IN_TAXI or place < 0:
                return -10.0, False
            state.passenger = place
            arrived = place == state.destination
            return 20.0 if arrived else -1.0, arrived

        direction = action
        if not may_drive(state.row, state.column, direction):
            return -1.0, False
        if state.is_rainy:
            drawn = compiled.uniform(rng)
            if drawn >= state.rainy_probability + (1.0 - state.rainy_probability) / 2.0:
                direction = RIGHT_OF[action]
            elif drawn >= state.rainy_probability:
                direction = LEFT_OF[action]
            if not may_drive(state.row, state.column, direction):
                return -1.0, False
        if direction == SOUTH:
            state.row += 1
        elif direction == NORTH:
            state.row -= 1
        elif direction == EAST:
            state.column += 1
        else:
            state.column -= 1
        if state.fickle and state.passenger == IN_TAXI:
            state.fickle = False
            state.destination = (state.destination + compiled.integer(rng, 1, 4)) % 4
        return -1.0, False

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0] = ((state.row * TOWN + state.column) * 5 + state.passenger) * 4 + state.destination


# ---- Blackjack: draw cards up to a sum of 21, and have more than the dealer ------------------------------------


@compiled.function
def draw_card(rng: Any) -> Any:
    """Return a card's value: an ace is 1, and a jack, queen or king is 10; the deck has no end."""
    return min(compiled.integer(rng, 1, 14), 10)


@compiled.function
def has_usable_ace(total: int, ace: bool) -> Any:
    """Say whether an ace may count as 11."""
    return ace and total + 10 <= 21


@compiled.function
def worth(total: int, ace: bool) -> Any:
    """Return the value of a hand, given its sum with aces as 1."""
    return total + 10 if has_usable_ace(total, ace) else total


class Blackjack(compiled.Env):
    """Gymnasium's Blackjack, with the defaults of its id.

    Args:
        natural: whether a win with an ace and a ten as first cards pays 1.5; it has no effect with `sab`.
        sab: whether a natural wins unless the dealer has one too, as in Sutton and Barto's book.
    """

    observation_space = spaces.Tuple((spaces.Discrete(32), spaces.Discrete(11), spaces.Discrete(2)))
    action_space = spaces.Discrete(2)
    max_episode_steps = None
    # A hand is the sum of its cards with aces as 1, how many cards there are, and whether an ace is among them.
    state = {
        "player": int, "player_cards": int, "player_ace": bool,
        "dealer": int, "dealer_cards": int, "dealer_ace": bool, "dealer_shows": int,
    }  # fmt: skip
    params = {"natural": False, "sab": True}

    def __init__(self, natural: bool = False, sab: bool = True):
        self.params = {"natural": bool(natural), "sab": bool(sab)}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        shows, hidden = draw_card(rng), draw_card(rng)
        state.dealer, state.dealer_cards, state.dealer_shows = shows + hidden, 2, shows
        state.dealer_ace = shows == 1 or hidden == 1
        first, second = draw_card(rng), draw_card(rng)
        state.player, state.player_cards = first + second, 2
        state.player_ace = first == 1 or second == 1

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        if action == 1:
            card = draw_card(rng)
            state.player += card
            state.player_cards += 1
            state.player_ace = state.player_ace or card == 1
            bust = state.player > 21
            return -1.0 if bust else 0.0, bust

        while worth(state.dealer, state.dealer_ace) < 17:
            card = draw_card(rng)
            state.dealer += card
            state.dealer_cards += 1
            state.dealer_ace = state.dealer_ace or card == 1
        player = worth(state.player, state.player_ace) if state.player <= 21 else 0
        dealer = worth(state.dealer, state.dealer_ace) if state.dealer <= 21 else 0
        reward = 1.0 if player > dealer else (-1.0 if player < dealer else 0.0)
        if state.player_cards == 2 and player == 21:
            dealer_natural = state.dealer_cards == 2 and dealer == 21
            if state.sab and not dealer_natural:
                reward = 1.0
            elif state.natural and not state.sab and reward == 1.0:
                reward = 1.5
        return reward, True

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        usable = has_usable_ace(state.player, state.player_ace)
        obs[0][0] = state.player + 10 if usable else state.player
        obs[1][0] = state.dealer_shows
        obs[2][0] = 1 if usable else 0

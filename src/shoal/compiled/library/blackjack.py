"""Blackjack-v1: draw cards up to a sum of 21, and have more than the dealer."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from shoal import compiled


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

"""Self-play: one policy learns tic-tac-toe from both sides, and is measured against an opponent that plays at random.

Each player of each board is a lane, a row of the batch. The policy sees rows and does not care whose they are: it plays
for all lanes, against itself, and learns from all of them (PPO with a small network, in plain numpy).

Run: python examples/pettingzoo_selfplay.py        (needs pip install ".[pettingzoo]"; under a minute)
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # small matrices: threads would only take the cores from the boards

import numpy as np

import shoal


def make_board() -> Any:
    from pettingzoo.classic import tictactoe_v3

    return tictactoe_v3.env()  # players take turns; PettingZoo converts it, so that both are there at each step


class Policy:
    """From what lies on the board, one's own marks and the other's: the chances of the nine squares, and how the game
    will end for oneself."""

    def __init__(self, hidden: int, seed: int):
        rng = np.random.default_rng(seed)
        self.weights = [rng.normal(0, 0.3, (18, hidden)), np.zeros(hidden), np.zeros((hidden, 10)), np.zeros(10)]
        self._means, self._squares = ([np.zeros_like(w) for w in self.weights] for _ in range(2))
        self._updates = 0

    def _layers(self, boards: np.ndarray, legal: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        hidden = np.tanh(boards @ self.weights[0] + self.weights[1])
        out = hidden @ self.weights[2] + self.weights[3]
        scores = np.where(legal, out[:, :9], -1e9)
        chances = np.exp(scores - scores.max(1, keepdims=True)) * legal
        return hidden, chances / chances.sum(1, keepdims=True), out[:, 9]

    def chances(self, boards: np.ndarray, legal: np.ndarray) -> np.ndarray:
        """Of the nine squares; 0 for those that are not legal."""
        return self._layers(boards, legal)[1]

    def learn(self, boards: np.ndarray, legal: np.ndarray, moves: np.ndarray, gains: np.ndarray, rate: float) -> None:
        """Make moves more likely that gained more than was expected: PPO, with eight steps of Adam."""
        rows = np.arange(len(moves))
        _, chances, expected = self._layers(boards, legal)
        before, surplus = chances[rows, moves], gains - expected
        for _ in range(8):
            hidden, chances, expected = self._layers(boards, legal)
            ratio = chances[rows, moves] / before
            far = np.where(surplus > 0, ratio > 1.3, ratio < 0.7)  # enough learned from this move
            toward = np.zeros((len(moves), 10))  # gradients of what to increase, by the network's outputs
            toward[:, :9] = (np.eye(9)[moves] - chances) * (ratio * surplus * ~far)[:, None]
            log = np.log(chances + 1e-9)
            toward[:, :9] -= 0.2 * chances * (log - (chances * log).sum(1, keepdims=True))  # go on trying things out
            toward[:, 9] = gains - expected
            below = (toward @ self.weights[2].T) * (1 - hidden**2)
            self._climb([boards.T @ below, below.sum(0), hidden.T @ toward, toward.sum(0)], rate)

    def _climb(self, gradients: list[np.ndarray], rate: float) -> None:
        self._updates += 1
        for w, g, mean, square in zip(self.weights, gradients, self._means, self._squares, strict=True):
            mean += 0.1 * (g - mean)
            square += 0.01 * (g**2 - square)
            w += rate * mean / (1 - 0.9**self._updates) / (np.sqrt(square / (1 - 0.99**self._updates)) + 1e-8)


def look(batch: shoal.Batch) -> tuple[np.ndarray, np.ndarray]:
    """The boards as rows of 18 numbers, and the legal moves: none for the player who waits for the other."""
    return batch.obs["observation"].reshape(-1, 18).astype(np.float64), batch.obs["action_mask"].astype(bool)


def draw(chances: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return (chances.cumsum(1) > rng.random((len(chances), 1))).argmax(1)


def train(pool: shoal.Pool, policy: Policy, updates: int, steps: int, rate: float, seed: int) -> int:
    """Play and learn; the number of games."""
    rng, lanes, games = np.random.default_rng(seed), pool.num_envs, 0
    batch = pool.reset(seed=seed)
    for update in range(updates):
        boards, legal = np.zeros((steps, lanes, 18)), np.zeros((steps, lanes, 9), bool)
        moves, rewards = np.zeros((steps, lanes), np.int64), np.zeros((steps, lanes))
        moved, ended = np.zeros((steps, lanes), bool), np.zeros((steps, lanes), bool)
        for t in range(steps):
            boards[t], legal[t] = look(batch)
            # Where a game has ended just now, the next step sets up the board again and the move is ignored.
            moved[t] = legal[t].any(1) & batch.mask & ~batch.done
            moves[t][moved[t]] = draw(policy.chances(boards[t][moved[t]], legal[t][moved[t]]), rng)
            batch = pool.step(moves[t])
            rewards[t], ended[t] = batch.reward, batch.done

        # What a move has gained is what the game brought in the end; of games that still go on, nobody knows.
        gains, known = np.zeros((steps, lanes)), np.zeros((steps, lanes), bool)
        gain, is_known = np.zeros(lanes), np.zeros(lanes, bool)
        for t in reversed(range(steps)):
            gain, is_known = np.where(ended[t], rewards[t], gain), is_known | ended[t]
            gains[t], known[t] = gain, is_known
        games += int(ended.sum()) // 2
        chosen = moved & known
        policy.learn(boards[chosen], legal[chosen], moves[chosen], gains[chosen], rate * (1 - update / updates))
    return games


def against_random(pool: shoal.Pool, policy: Policy, steps: int, seed: int) -> tuple[float, float]:
    """The shares of games won and lost by the policy, which is the first player on every other board."""
    rng = np.random.default_rng(seed)
    lane = np.arange(pool.num_envs)
    mine = lane % 2 == (lane // 2) % 2
    batch, wins, losses, games = pool.reset(seed=seed), 0, 0, 0
    for _ in range(steps):
        boards, legal = look(batch)
        actions = draw(legal / np.maximum(legal.sum(1, keepdims=True), 1), rng)
        turn = mine & legal.any(1)
        actions[turn] = policy.chances(boards[turn], legal[turn]).argmax(1)
        batch = pool.step(actions)
        over = batch.done & mine
        games += int(over.sum())
        wins += int((batch.reward[over] > 0).sum())
        losses += int((batch.reward[over] < 0).sum())
    return wins / games, losses / games


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--steps", type=int, default=32, help="of each env, for one update")
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--backend", default="hybrid")  # not "auto", which would try random moves: most are illegal
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    policy = Policy(options.hidden, options.seed)
    with shoal.Pool(make_board, options.envs, backend=options.backend) as pool:
        print(f"{options.envs} boards, {pool.num_envs} lanes ({', '.join(pool.lane_names or [])}), {pool.plan.backend}")
        before = against_random(pool, policy, 40, options.seed + 1)
        start = time.perf_counter()
        games = train(pool, policy, options.updates, options.steps, options.rate, options.seed)
        seconds = time.perf_counter() - start
        after = against_random(pool, policy, 80, options.seed + 2)
    print(f"{games:,} games of self-play in {seconds:.1f} s")
    for when, (wins, losses) in (("before", before), ("after", after)):
        print(f"against a random player, {when}: {wins:.1%} won, {losses:.1%} lost")


if __name__ == "__main__":
    main()

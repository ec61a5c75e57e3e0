"""A loop over envs inside a graph, which asks an algorithm for actions and counts episodes."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from shoal.graph.tensorflow.envs import InGraphBatchEnv, as_written


class Algorithm:
    """The methods that `simulate` calls while it steps; override what you need. Any object with these four will do.

    The methods are traced into the graph, once: what they learn they keep in `tf.Variable`s.
    """

    @as_written
    def begin(self, indices: Any) -> None:
        """Episodes begin in these envs, int64 [k]; it is not called for none."""

    def perform(self, observ: Any) -> Any:
        """Return the actions for these observations [n, ...]."""
        raise NotImplementedError

    @as_written
    def experience(self, observ: Any, action: Any, reward: Any, done: Any, next_observ: Any) -> None:
        """A step was made in all envs, [n, ...] each."""

    @as_written
    def end(self, indices: Any) -> None:
        """Episodes have ended in these envs, int64 [k]; it is not called for none."""


class Progress(NamedTuple):
    """The episodes under way: `score`, the sum of rewards so far, float32 [n], and `length`, int32 [n]."""

    score: Any
    length: Any


class SimulationSummary(NamedTuple):
    """What `simulate` found.

    Attributes:
        episodes: how many have ended, int32 [].
        score: mean sum of rewards of those, float32 []; nan for none.
        length: their mean number of steps, float32 []; nan for none.
        state: the episodes that have not ended, for the next call of `simulate`.
    """

    episodes: Any
    score: Any
    length: Any
    state: Progress


def simulate(env: InGraphBatchEnv, policy: Any, steps: Any, state: Progress | None = None) -> SimulationSummary:
    """Run all envs for so many steps inside a graph; an env with an ended episode is reset before its next step.

    Episodes go on from one call to the next, through the variables of `env`. The very first call resets all envs.

    Args:
        env: of a pool with autoreset="disabled" ("next_step" works too, as envs are reset before it would).
        policy: an Algorithm, or a function from observations to actions.
        steps: how many, an int or a tensor.
        state: `SimulationSummary.state` of the call before, so that scores are of whole episodes; without it they
            count from here.

    Example:
        @function
        def collect(state):
            return simulate(envs, policy, 200, state)
    """
    if env.pool is not None and env.pool.autoreset == "same_step":
        raise ValueError('simulate resets envs itself, and the pool has autoreset="same_step": use "disabled"')
    algorithm: Any = policy
    if not hasattr(policy, "perform"):
        algorithm = Algorithm()
        algorithm.perform = policy
    zeros = Progress(tf.zeros([len(env)], tf.float32), tf.zeros([len(env)], tf.int32))
    start = zeros if state is None else Progress(*state)

    def advance(turn: Any, score: Any, length: Any, episodes: Any, scores: Any, lengths: Any) -> Any:
        fresh, reward, done = _advance(env, algorithm)
        score = tf.where(fresh, 0.0, score) + reward
        length = tf.where(fresh, 0, length) + 1
        episodes += tf.math.count_nonzero(done, dtype=tf.int32)
        scores += tf.reduce_sum(tf.where(done, score, 0.0))
        lengths += tf.reduce_sum(tf.where(done, length, 0))
        return turn + 1, score, length, episodes, scores, lengths

    steps = tf.cast(steps, tf.int32)
    none = tf.constant(0)
    _, score, length, episodes, scores, lengths = tf.while_loop(
        lambda turn, *_: turn < steps, advance, (none, *start, none, tf.constant(0.0), none)
    )
    count = tf.cast(episodes, tf.float32)
    return SimulationSummary(episodes, scores / count, tf.cast(lengths, tf.float32) / count, Progress(score, length))


def _advance(env: InGraphBatchEnv, algorithm: Any) -> tuple[Any, Any, Any]:
    """Step once: return which envs began an episode before the step, the rewards, and which episodes have ended."""

    def begin() -> None:
        indices = tf.where(env.done)[:, 0]
        env.reset(indices)
        algorithm.begin(indices)

    fresh = env.done.read_value()
    tf.cond(tf.reduce_any(fresh), begin, _nothing)
    observ = tf.nest.map_structure(tf.convert_to_tensor, env.observ)
    action = algorithm.perform(observ)
    next_observ, reward, done = env.step(action)
    algorithm.experience(observ, action, reward, done, next_observ)
    tf.cond(tf.reduce_any(done), lambda: algorithm.end(tf.where(done)[:, 0]), _nothing)
    return fresh, reward, done


def _nothing() -> None:
    """Do nothing, in the branch of a `tf.cond` that has nothing to do."""

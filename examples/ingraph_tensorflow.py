"""Learn CartPole by actor-critic, with the envs inside of the TensorFlow graph.

    python examples/ingraph_tensorflow.py

A whole iteration, 32 steps of all envs and the update that follows, is one call of one graph.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

import shoal
from shoal.graph.tensorflow import InGraphBatchEnv, function

STEPS, GAMMA, HIDDEN = 32, 0.99, 64
SCALE = 1 - GAMMA  # of rewards in learning: so that values are about 1


class Net:
    """Two layers for the policy's logits, and two for the value."""

    def __init__(self, inputs: int, actions: int):
        glorot = tf.keras.initializers.GlorotUniform(seed=0)
        shapes = [(inputs, HIDDEN), (HIDDEN, actions), (inputs, HIDDEN), (HIDDEN, 1)]
        self.weights = [tf.Variable(glorot(shape)) for shape in shapes]
        self.biases = [tf.Variable(tf.zeros(shape[1])) for shape in shapes]

    def __call__(self, observ: Any) -> tuple[Any, Any]:
        """Logits [..., actions] and values [...]."""
        layers = [lambda x, w=w, b=b: x @ w + b for w, b in zip(self.weights, self.biases, strict=True)]
        values = layers[3](tf.tanh(layers[2](observ)))
        return layers[1](tf.tanh(layers[0](observ))), values[..., 0]


class Learner:
    def __init__(self, envs: InGraphBatchEnv, iterations: int):
        self.envs = envs
        self.net = Net(envs.observation_space.shape[0], int(envs.action_space.n))
        self.variables = self.net.weights + self.net.biases
        rate = tf.keras.optimizers.schedules.PolynomialDecay(3e-3, iterations, 0.0)
        self.optimizer = tf.keras.optimizers.Adam(rate)
        self.optimizer.build(self.variables)
        self.score = tf.Variable(tf.zeros([len(envs)]), trainable=False)  # of the episodes under way

    @function
    def iteration(self) -> tuple[Any, Any]:
        """Collect, learn; returns (sum of the returns of the episodes that ended, their number)."""
        envs, n = self.envs, len(self.envs)
        observs, actions, rewards, dones = (
            tf.TensorArray(kind, STEPS) for kind in (tf.float32, tf.int64, tf.float32, tf.bool)
        )
        total, count = 0.0, 0.0
        for t in tf.range(STEPS):
            observ = envs.observ.read_value()
            action = tf.random.categorical(self.net(observ)[0], 1)[:, 0]
            next_observ, reward, done = envs.step(action)
            self.score.assign_add(reward)
            # An episode that was only cut by time goes on, as far as its value is concerned.
            reward = SCALE * reward + GAMMA * tf.where(envs.truncated, self.net(next_observ)[1], 0.0)
            observs, actions = observs.write(t, observ), actions.write(t, action)
            rewards, dones = rewards.write(t, reward), dones.write(t, done)
            if tf.reduce_any(done):
                total += tf.reduce_sum(tf.boolean_mask(self.score, done))
                count += tf.reduce_sum(tf.cast(done, tf.float32))
                self.score.assign(tf.where(done, 0.0, self.score))
                envs.reset(tf.where(done)[:, 0])

        returns = tf.TensorArray(tf.float32, STEPS)
        following = self.net(envs.observ)[1]
        for t in tf.range(STEPS - 1, -1, -1):
            following = rewards.read(t) + GAMMA * tf.where(dones.read(t), 0.0, following)
            returns = returns.write(t, following)
        self.learn(observs.stack(), actions.stack(), tf.ensure_shape(returns.stack(), [STEPS, n]))
        return total, count

    def learn(self, observs: Any, actions: Any, returns: Any) -> None:
        with tf.GradientTape() as tape:
            logits, values = self.net(observs)
            advantage = tf.stop_gradient(returns - values)
            advantage /= tf.math.reduce_std(advantage) + 0.01
            surprise = tf.nn.sparse_softmax_cross_entropy_with_logits(actions, logits)
            entropy = -tf.reduce_sum(tf.nn.softmax(logits) * tf.nn.log_softmax(logits), -1)
            loss = tf.reduce_mean(surprise * advantage + tf.square(returns - values) - 0.01 * entropy)
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.variables), 0.5)
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tf.random.set_seed(options.seed)

    with shoal.Pool("CartPole-v1", options.envs, autoreset="disabled", seed=options.seed) as pool:
        envs = InGraphBatchEnv(pool)
        envs.reset()
        learner = Learner(envs, options.iterations)
        total = count = 0.0
        for iteration in range(1, options.iterations + 1):
            more, ended = learner.iteration()
            total, count = total + float(more), count + float(ended)
            if iteration % max(1, options.iterations // 20) == 0:
                steps = iteration * STEPS * options.envs
                print(f"after {steps} steps: mean return {total / max(count, 1):.1f} of the last {count:.0f} episodes")
                total = count = 0.0


if __name__ == "__main__":
    main()

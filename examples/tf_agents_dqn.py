"""DQN of TF-Agents on CartPole-v1, with Shoal's envs below TFPyEnvironment and a driver.

Needs: pip install ".[tf-agents]" in the folder of Shoal. Run: python examples/tf_agents_dqn.py --envs 16
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # TF-Agents is written for Keras 2
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from tf_agents.agents.dqn import dqn_agent
from tf_agents.drivers import dynamic_step_driver
from tf_agents.environments import tf_py_environment
from tf_agents.networks import q_network
from tf_agents.policies import random_tf_policy
from tf_agents.replay_buffers import tf_uniform_replay_buffer
from tf_agents.utils import common

import shoal


def evaluate(env: Any, policy: Any, episodes: int = 10) -> float:
    """The mean return of the first episodes of as many envs."""
    step = env.reset()
    total, running = tf.zeros(episodes), tf.ones(episodes)
    while tf.reduce_any(running > 0):
        step = env.step(policy.action(step).action)
        total += running * step.reward
        running *= tf.cast(~step.is_last(), tf.float32)
    return float(tf.reduce_mean(total))


def train(num_envs: int, iterations: int, seed: int) -> float:
    """Train, and return the mean return at the end."""
    tf.random.set_seed(seed)
    with (
        shoal.make("CartPole-v1", num_envs, api="tf_agents", seed=seed) as train_envs,
        shoal.make("CartPole-v1", 10, api="tf_agents", seed=seed + 1000, backend="serial") as test_envs,
    ):
        env, test_env = tf_py_environment.TFPyEnvironment(train_envs), tf_py_environment.TFPyEnvironment(test_envs)
        agent = dqn_agent.DqnAgent(
            env.time_step_spec(), env.action_spec(),
            q_network=q_network.QNetwork(env.observation_spec(), env.action_spec(), fc_layer_params=(100, 50)),
            optimizer=tf.keras.optimizers.legacy.Adam(1e-3), td_errors_loss_fn=common.element_wise_squared_loss,
            target_update_period=200, gamma=0.99, epsilon_greedy=0.1,
        )  # fmt: skip
        agent.initialize()
        buffer = tf_uniform_replay_buffer.TFUniformReplayBuffer(agent.collect_data_spec, num_envs, 50_000 // num_envs)
        randomly = random_tf_policy.RandomTFPolicy(env.time_step_spec(), env.action_spec())
        dynamic_step_driver.DynamicStepDriver(env, randomly, [buffer.add_batch], num_steps=1000).run()
        collect = dynamic_step_driver.DynamicStepDriver(
            env, agent.collect_policy, [buffer.add_batch], num_steps=num_envs
        )
        batches = iter(buffer.as_dataset(sample_batch_size=64, num_steps=2).prefetch(3))
        agent.train = common.function(agent.train)
        collect.run = common.function(collect.run)
        policy = common.function(agent.policy.action)
        agent.policy.action = policy
        score = 0.0
        for i in range(1, iterations + 1):
            collect.run()
            experience, _ = next(batches)
            agent.train(experience)
            if i % 500 == 0 or i == iterations:
                score = evaluate(test_env, agent.policy)
                print(f"iteration {i:5d}  steps {1000 + i * num_envs:7d}  mean return {score:6.1f}", flush=True)
    return score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train(options.envs, options.iterations, options.seed)


if __name__ == "__main__":
    main()

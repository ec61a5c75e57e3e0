"""TF-Agents' PPO over its own best vector env and over Shoal's, on CartPole and HalfCheetah."""

from __future__ import annotations

import functools
import os
from typing import Any

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # TF-Agents is written for Keras 2
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import gymnasium
import numpy as np
import tensorflow as tf
from ladder import OURS, Cell, Clock, Training, climb
from tf_agents.agents.ppo import ppo_clip_agent
from tf_agents.drivers import dynamic_step_driver
from tf_agents.environments import (
    batched_py_environment,
    parallel_py_environment,
    py_environment,
    tf_py_environment,
    wrappers,
)
from tf_agents.networks import actor_distribution_network, value_network
from tf_agents.replay_buffers import tf_uniform_replay_buffer
from tf_agents.specs import array_spec
from tf_agents.system import system_multiprocessing
from tf_agents.trajectories import time_step as ts
from tf_agents.utils import common

from shoal.dialects import tf_agents

NUM_ENVS, STEPS = 16, 64


class GymnasiumEnv(py_environment.PyEnvironment):
    """A Gymnasium env as a PyEnvironment; TF-Agents' own suites know only the old gym."""

    def __init__(self, env_id: str, seed: int):
        super().__init__(handle_auto_reset=True)
        self._made, self._seed = gymnasium.make(env_id), seed
        self._discrete = isinstance(self._made.action_space, gymnasium.spaces.Discrete)

    def observation_spec(self) -> Any:
        """Return the spec of an observation."""
        return array_spec.ArraySpec(self._made.observation_space.shape, np.float32, "observation")

    def action_spec(self) -> Any:
        """Return the spec of an action."""
        space: Any = self._made.action_space
        if self._discrete:
            return array_spec.BoundedArraySpec((), np.int64, 0, int(space.n) - 1, "action")
        return array_spec.BoundedArraySpec(space.shape, np.float32, space.low, space.high, "action")

    def _reset(self) -> Any:
        seed, self._seed = self._seed, None
        return ts.restart(self._made.reset(seed=seed)[0].astype(np.float32))

    def _step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = self._made.step(int(action) if self._discrete else action)
        observation = observation.astype(np.float32)
        if terminated:
            return ts.termination(observation, reward)
        return ts.truncation(observation, reward) if truncated else ts.transition(observation, reward)


class Returns(wrappers.PyEnvironmentBaseWrapper):
    """Collects the returns of episodes as they end."""

    def __init__(self, env: Any):
        super().__init__(env)
        self.found: list[float] = []
        self._sums = np.zeros(NUM_ENVS, np.float64)

    def _step(self, action: Any) -> Any:
        step = self._env.step(action)
        self._sums += step.reward
        for i in np.flatnonzero(step.is_last()):
            self.found.append(float(self._sums[i]))
            self._sums[i] = 0.0
        return step


def make_envs(env_id: str, who: str, seed: int, parallel: bool) -> Any:
    """Return the envs as one, in TF-Agents' class or in ours."""
    if who != OURS:
        tf_agents.slow_down()  # ours makes TimeSteps by quick functions of its own, in the whole process
    makers = [functools.partial(GymnasiumEnv, env_id, 100 * seed + i) for i in range(NUM_ENVS)]
    if parallel:
        whose: Any = tf_agents if who == OURS else parallel_py_environment
        return whose.ParallelPyEnvironment(makers)
    whose = tf_agents if who == OURS else batched_py_environment
    return whose.BatchedPyEnvironment([make() for make in makers], multithreading=False)


def make_agent(env: Any, seed: int) -> Any:
    """Return a PPO agent."""
    layers = {"fc_layer_params": (64, 64), "activation_fn": tf.keras.activations.tanh}
    tf.keras.utils.set_random_seed(seed)
    agent = ppo_clip_agent.PPOClipAgent(
        env.time_step_spec(),
        env.action_spec(),
        optimizer=tf.keras.optimizers.legacy.Adam(3e-4),
        actor_net=actor_distribution_network.ActorDistributionNetwork(
            env.observation_spec(), env.action_spec(), **layers
        ),
        value_net=value_network.ValueNetwork(env.observation_spec(), **layers),
        importance_ratio_clipping=0.2,
        num_epochs=4,
        lambda_value=0.95,
    )
    agent.initialize()
    return agent


def train(env_id: str, parallel: bool, rollouts: int, who: str, seed: int) -> Training:
    """Train PPO for some rollouts."""
    envs = make_envs(env_id, who, seed, parallel)
    try:
        returns = Returns(envs)
        env = tf_py_environment.TFPyEnvironment(returns)
        agent = make_agent(env, seed)
        buffer = tf_uniform_replay_buffer.TFUniformReplayBuffer(agent.collect_data_spec, NUM_ENVS, STEPS + 1)
        driver = dynamic_step_driver.DynamicStepDriver(
            env, agent.collect_policy, [buffer.add_batch], num_steps=NUM_ENVS * STEPS
        )
        collect, update = common.function(driver.run), common.function(agent.train)
        step = env.reset()

        def rollout(step: Any) -> Any:
            step, _ = collect(step)
            update(experience=buffer.gather_all())
            buffer.clear()
            return step

        step = rollout(step)
        with Clock() as clock:
            for _ in range(rollouts):
                step = rollout(step)
    finally:
        envs.close()
    return Training(returns.found, rollouts * NUM_ENVS * STEPS, clock.seconds)


def cell(env_id: str, kind: str, rollouts: int) -> Cell:
    """Return PPO on an env, over TF-Agents' class of this name and over ours."""
    run = functools.partial(train, env_id, kind.startswith("Parallel"), rollouts)
    return Cell("PPO", env_id, kind, f"shoal.dialects.tf_agents.{kind}", run)


if __name__ == "__main__":
    system_multiprocessing.enable_interactive_mode()
    cells = [
        cell("CartPole-v1", "BatchedPyEnvironment", 16),
        cell("HalfCheetah-v5", "BatchedPyEnvironment", 16),
        cell("HalfCheetah-v5", "ParallelPyEnvironment", 16),
    ]
    climb("TF-Agents", ["tf-agents", "tensorflow-cpu", "gymnasium", "numpy"], cells)

"""REINFORCE with a baseline on CartPole, in the manner of CleanRL when it was written for Gymnasium 0.29.

An ordinary script of that age; tests change its import of the vector env, and compare what it prints.
`printed_029.txt` is what it printed with Gymnasium 0.29.1 itself.
"""

import random

import gymnasium as gym
import numpy as np
from gymnasium.vector import SyncVectorEnv


def make_env(env_id, idx, max_steps):
    def thunk():
        env = gym.make(env_id, max_episode_steps=max_steps)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        env.action_space.seed(idx)
        return env

    return thunk


if __name__ == "__main__":
    seed, num_envs, num_steps, gamma, learning_rate = 1, 5, 32, 0.99, 0.05
    random.seed(seed)
    rng = np.random.default_rng(seed)

    envs = SyncVectorEnv([make_env("CartPole-v1", i, 20 + 5 * i) for i in range(num_envs)])
    assert isinstance(envs.single_action_space, gym.spaces.Discrete), "only discrete action space is supported"

    size = int(np.prod(envs.single_observation_space.shape))
    weights, critic = np.zeros((size, envs.single_action_space.n)), np.zeros(size)
    obs = np.zeros((num_steps, num_envs, size))
    next_values = np.zeros((num_steps, num_envs))
    actions = np.zeros((num_steps, num_envs), dtype=np.int64)
    rewards = np.zeros((num_steps, num_envs))
    dones = np.zeros((num_steps, num_envs))
    ends = np.zeros((num_steps, num_envs))

    global_step = 0
    next_obs, _ = envs.reset(seed=seed)
    for iteration in range(1, 9):
        for step in range(num_steps):
            global_step += num_envs
            obs[step] = next_obs
            logits = next_obs @ weights
            probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            actions[step] = (rng.random((num_envs, 1)) > probabilities.cumsum(1)).sum(1)
            next_obs, rewards[step], terminations, truncations, infos = envs.step(actions[step])
            ends[step], dones[step] = terminations, np.logical_or(terminations, truncations)

            real_next_obs = next_obs.copy()
            for idx, done in enumerate(dones[step]):
                if done:
                    real_next_obs[idx] = infos["final_observation"][idx]
            next_values[step] = real_next_obs @ critic

            if "final_info" in infos:
                for i, info in enumerate(infos["final_info"]):
                    if info and "episode" in info:
                        episodic_return, length = (np.ravel(info["episode"][key])[0] for key in "rl")
                        print(f"global_step={global_step}, env={i}, return={episodic_return}, length={length}")
                assert infos["_final_info"].tolist() == infos["_final_observation"].tolist()

        returns, total = np.zeros_like(rewards), next_values[-1]
        for t in reversed(range(num_steps)):
            total = np.where(dones[t], next_values[t], total)
            total = returns[t] = rewards[t] + gamma * total * (1 - ends[t])
        advantages = returns - obs @ critic
        logits = obs @ weights
        probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        gradient = np.eye(2)[actions] - probabilities
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        weights += learning_rate * np.einsum("tni,tna,tn->ia", obs, gradient, scaled) / num_steps
        critic += 0.1 * np.einsum("tni,tn->i", obs, advantages) / num_steps
        print(f"iteration={iteration}, weights={np.round(weights, 6).tolist()}")
    envs.close()

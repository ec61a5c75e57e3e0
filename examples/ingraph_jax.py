"""Train CartPole in JAX alone: envs, policy and learning step are one compiled function.

    python examples/ingraph_jax.py

The envs are ordinary Gymnasium ones. `bind` makes their step a JAX function, so that a rollout is a `lax.scan`, and
`shoal.graph.jax.jit` is `jax.jit` that raises an env's error as it is.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp

import shoal
from shoal.graph.jax import bind, jit

STEPS, GAMMA, LAMBDA, RATE, EPOCHS, PARTS, CLIP = 32, 0.98, 0.8, 1e-3, 20, 4, 0.2


def layers(key: Any, sizes: tuple[int, ...]) -> Any:
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        (jax.random.normal(key, (a, b)) * jnp.sqrt(1 / a), jnp.zeros(b))
        for key, a, b in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def network(params: Any, x: Any) -> Any:
    for weights, bias in params[:-1]:
        x = jnp.tanh(x @ weights + bias)
    weights, bias = params[-1]
    return x @ weights + bias


def log_chance(params: Any, obs: Any, action: Any) -> Any:
    logits = jax.nn.log_softmax(network(params["policy"], obs))
    return jnp.take_along_axis(logits, action[..., None], -1)[..., 0]


def advantages(values: Any, last_value: Any, reward: Any, done: Any) -> Any:
    def back(carry: Any, row: Any) -> Any:
        ahead, value_ahead = carry
        value, reward, goes_on = row
        ahead = reward + GAMMA * value_ahead * goes_on - value + GAMMA * LAMBDA * goes_on * ahead
        return (ahead, value), ahead

    rows = (values, reward, 1.0 - done)
    return jax.lax.scan(back, (jnp.zeros_like(last_value), last_value), rows, reverse=True)[1]


def adam(params: Any, gradient: Any, moments: Any) -> Any:
    first, second, count = moments
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
    second = jax.tree.map(lambda m, g: 0.999 * m + 0.001 * g * g, second, gradient)
    count = count + 1
    rate = RATE * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, first, second)
    return params, (first, second, count)


def loss(params: Any, data: Any) -> Any:
    obs, action, old_chance, advantage, target, weight = data
    ratio = jnp.exp(log_chance(params, obs, action) - old_chance)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    miss = (network(params["value"], obs)[..., 0] - target) ** 2
    return ((0.5 * miss - gain) * weight).sum() / (weight.sum() + 1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    pool = shoal.Pool("CartPole-v1", num_envs=options.envs, backend="serial")
    binding = bind(pool)
    handle, _, _, step = binding

    def turn(carry: Any, key: Any) -> Any:
        handle, obs, fresh, returns, params = carry
        action = jax.random.categorical(key, network(params["policy"], obs))
        handle, out = step(handle, action)
        returns = returns + out.reward
        row = {
            "obs": obs, "action": action, "reward": out.reward, "done": out.done, "end": returns * out.done,
            "valid": ~fresh,  # the step after an episode's end begins the next one, whatever the action
        }  # fmt: skip
        return (handle, out.obs, out.done, returns * ~out.done, params), row

    @jit
    def iterate(state: Any, params: Any, moments: Any, key: Any) -> Any:
        """Step all envs, then learn from what they did."""
        state, rows = jax.lax.scan(turn, (*state, params), jax.random.split(key, STEPS))
        state = state[:-1]
        values = network(params["value"], rows["obs"])[..., 0]
        last = network(params["value"], state[1])[..., 0]
        advantage = advantages(values, last, rows["reward"], rows["done"])
        target, weight = advantage + values, rows["valid"].astype(jnp.float32)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        old_chance = log_chance(params, rows["obs"], rows["action"])
        data = (rows["obs"], rows["action"], old_chance, advantage, target, weight)

        data = jax.tree.map(lambda a: a.reshape(STEPS * options.envs, *a.shape[2:]), data)

        def learn(carry: Any, chosen: Any) -> Any:
            params, moments = carry
            part = jax.tree.map(lambda a: a[chosen], data)
            return adam(params, jax.grad(loss)(params, part), moments), None

        shuffles = [jax.random.permutation(k, STEPS * options.envs) for k in jax.random.split(key, EPOCHS)]
        chosen = jnp.concatenate(shuffles).reshape(EPOCHS * PARTS, -1)
        (params, moments), _ = jax.lax.scan(learn, (params, moments), chosen)
        return state, params, moments, rows["end"].sum(), rows["done"].sum()

    key, policy_key, value_key = jax.random.split(jax.random.key(options.seed), 3)
    params = {"policy": layers(policy_key, (4, 64, 2)), "value": layers(value_key, (4, 64, 1))}
    moments = (*[jax.tree.map(jnp.zeros_like, params)] * 2, jnp.zeros((), jnp.int32))
    handle, obs = binding.reset(handle, seed=options.seed)
    state = (handle, obs, jnp.zeros(options.envs, bool), jnp.zeros(options.envs))
    total, episodes = 0.0, 0
    for number in range(1, options.iterations + 1):
        state, params, moments, ends, count = iterate(state, params, moments, jax.random.fold_in(key, number))
        total, episodes = total + float(ends), episodes + int(count)
        if number % 10 == 0 or number == options.iterations:
            done = number * STEPS * options.envs
            print(f"{done:7d} steps: mean return {total / max(episodes, 1):.1f} of {episodes} episodes", flush=True)
            total, episodes = 0.0, 0
    pool.close()


if __name__ == "__main__":
    main()

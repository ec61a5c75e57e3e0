"""Experience from compiled envs on the CPU: the policy is compiled too, and runs in the loop of the envs' own kernel.

Its weights are handed over once for each rollout, in which no Python runs. It is for policies of plain layers over a
vector of numbers; others take the way of `host`, over the same compiled envs.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import nn

from shoal import compiled
from shoal.batch import Rollout
from shoal.learn.host import Gathered, PoolWay
from shoal.learn.ppo import Experience, Policy
from shoal.spaces.leaves import flatten


def _tanh_fraction(terms: int) -> tuple[tuple[np.float32, ...], tuple[np.float32, ...]]:
    """Return numerator and denominator, in powers of x * x from the highest on, of a fraction near tanh(x) / x.

    It is the continued fraction 1 / (1 + x * x / (3 + x * x / (5 + ...))), cut off after some terms.
    """
    tops, bottoms = (np.poly1d([0.0]), np.poly1d([1.0])), (np.poly1d([1.0]), np.poly1d([1.0]))
    square = np.poly1d([1.0, 0.0])
    for odd in range(3, 2 * terms, 2):
        tops = (tops[1], tops[1] * odd + tops[0] * square)
        bottoms = (bottoms[1], bottoms[1] * odd + bottoms[0] * square)
    scale = tops[1].c[-1]
    return tuple(map(np.float32, tops[1].c / scale)), tuple(map(np.float32, bottoms[1].c / scale))


# With 11 terms, in 32 bits, the fraction is within 4e-7 of tanh everywhere, if x is kept inside of the limit.
(P5, P4, P3, P2, P1, P0), (Q5, Q4, Q3, Q2, Q1, Q0) = _tanh_fraction(11)
TANH_LIMIT, ZERO = np.float32(7.45), np.float32(0.0)


@compiled.function
def tanh_in_place(x: Any) -> None:
    """Replace numbers by their tanh. There is no branch and no call in it, so the loop becomes vector instructions."""
    for i in range(x.size):
        v = min(max(x[i], -TANH_LIMIT), TANH_LIMIT)
        s = v * v
        top = ((((P5 * s + P4) * s + P3) * s + P2) * s + P1) * s + P0
        bottom = ((((Q5 * s + Q4) * s + Q3) * s + Q2) * s + Q1) * s + Q0
        x[i] = v * top / bottom


@compiled.function
def run_layers(x: Any, sizes: Any, weights: Any) -> Any:
    """Return the outputs of layers with tanh between them: for each a row of weights for each input, and the biases."""
    at = 0
    for k in range(sizes.size - 1):
        inputs, outputs = sizes[k], sizes[k + 1]
        y = np.empty(outputs, np.float32)
        y[:] = weights[at + inputs * outputs : at + inputs * outputs + outputs]
        for i in range(inputs):
            one = x[i]
            row = weights[at + i * outputs : at + (i + 1) * outputs]
            for j in range(outputs):
                y[j] += one * row[j]
        if k < sizes.size - 2:
            tanh_in_place(y)
        x = y
        at += (inputs + 1) * outputs
    return x


@compiled.function
def features(obs: Any, mean: Any, scale: Any) -> Any:
    """Return an observation as normalized numbers of 32 bits; without statistics, as it is."""
    flat = obs.reshape(obs.size)
    x = np.empty(flat.size, np.float32)
    if mean.size == 0 or scale.size == 0:
        for i in range(flat.size):
            x[i] = np.float32(flat[i])
    else:
        for i in range(flat.size):
            x[i] = min(max((np.float32(flat[i]) - mean[i]) * scale[i], np.float32(-10.0)), np.float32(10.0))
    return x


@compiled.policy
def choose_integers(
    obs: Any, action: Any, rng: Any, sizes: Any, weights: Any, mean: Any, scale: Any, counts: Any, lows: Any
) -> None:
    """Draw each column of an action by the softmax of its logits."""
    outputs = run_layers(features(obs, mean, scale), sizes, weights)
    flat = action.reshape(action.size)
    at = 0
    for k in range(counts.size):
        highest = outputs[at]
        for j in range(counts[k]):
            highest = max(highest, outputs[at + j])
        total = 0.0
        for j in range(counts[k]):
            outputs[at + j] = math.exp(outputs[at + j] - highest)
            total += outputs[at + j]
        left = compiled.uniform(rng, 0.0, 1.0) * total
        chosen = 0
        while chosen < counts[k] - 1 and left >= outputs[at + chosen]:
            left -= outputs[at + chosen]
            chosen += 1
        flat[k] = lows[k] + chosen
        at += counts[k]


@compiled.policy
def choose_floats(
    obs: Any, action: Any, rng: Any, sizes: Any, weights: Any, mean: Any, scale: Any, std: Any, nothing: Any
) -> None:
    """Draw each column of an action from a normal distribution."""
    outputs = run_layers(features(obs, mean, scale), sizes, weights)
    flat = action.reshape(action.size)
    for k in range(flat.size):
        flat[k] = outputs[k] + std[k] * compiled.normal(rng, 0.0, 1.0)


def can_be_compiled(policy: Policy) -> bool:
    """Say whether this policy can run in the kernel: plain layers over one vector, and one kind of action."""
    leaves = flatten(policy.spaces[1])
    one_kind = len(leaves) == 1 and not leaves[0].path and bool(policy.choices) != bool(policy.floats)
    whole_box = bool(policy.floats) and leaves[0].dtype.kind != "f"
    obs_path = policy.encoder.leaves[0].path
    return policy.encoder.plain and policy.cell is None and one_kind and not whole_box and not obs_path


@functools.cache
def with_clipped_actions(env_class: type[Any]) -> type[Any]:
    """Return a class whose `step` brings actions into their bounds first: a normal distribution knows none.

    The rollout keeps what was drawn. The bounds are those of the class's action space.
    """
    space: Space[Any] = env_class.action_space
    if not isinstance(space, spaces.Box) or np.dtype(space.dtype).kind != "f":
        return env_class
    inner = compiled.function(env_class.step)
    if space.shape == ():
        lowest, highest = float(space.low), float(space.high)

        def step(state: Any, action: Any, rng: Any) -> Any:
            return inner(state, min(max(action, lowest), highest), rng)

    else:
        low, high = (np.asarray(bound, np.float64).reshape(-1) for bound in (space.low, space.high))

        def step(state: Any, action: Any, rng: Any) -> Any:
            flat = action.reshape(action.size)
            for i in range(flat.size):
                flat[i] = min(max(flat[i], low[i]), high[i])
            return inner(state, action, rng)

    if getattr(env_class, "num_agents", 1) != 1:
        raise ValueError(f"{env_class.__name__}: continuous actions of several agents take the way of any pool")
    return type(env_class.__name__, (env_class,), {"step": staticmethod(step)})


class CompiledWay(PoolWay):
    """Makes experience with a pool of compiled envs; the policy is compiled."""

    name = "compiled"

    def __init__(self, pool: Any, policy: Policy, seed: int):
        self.pool, self.policy, self.lanes, self.steps = pool, policy, int(pool.num_envs), policy.settings.steps
        self.seed = seed
        self.rollouts = 0
        parts = (policy.body, policy.head) if policy.shared else (policy.actor,)
        actor = [one for part in parts for one in part.modules() if isinstance(one, nn.Linear)]
        self._layers = actor
        self._sizes = np.array([actor[0].in_features, *(one.out_features for one in actor)], np.int64)
        self._out: Rollout | None = None
        (leaf,) = flatten(policy.spaces[1])
        self._lows = np.asarray(leaf.low).reshape(-1).astype(np.int64) if policy.choices else np.zeros(1)
        self._memory = policy.first_memory(self.lanes)

    def _params(self) -> list[Any]:
        """Return the weights as the kernel reads them."""
        policy, encoder = self.policy, self.policy.encoder
        with torch.no_grad():
            parts = [part for one in self._layers for part in (one.weight.t().reshape(-1), one.bias)]
            weights = torch.cat(parts).cpu().numpy()
            std = policy.log_std.exp().cpu().numpy() if policy.floats else None
        nothing = np.zeros(1, np.float32)
        stats = [nothing[:0], nothing[:0]]
        if encoder.normalize:
            stats = [encoder.stats.mean.float().numpy(), encoder.stats.scale().numpy()]
        last = [np.array(policy.choices, np.int64), self._lows] if std is None else [std, nothing]
        return [self._sizes, weights, *stats, *last]

    def collect(self) -> Gathered:
        """Return the next rollout."""
        choose = choose_floats if self.policy.floats else choose_integers
        seed = (self.seed * 1_000_003 + self.rollouts) * self.lanes % 2**62
        out = self.pool.rollout(choose, self.steps, params=self._params(), seed=seed, out=self._out)
        self._out, self.rollouts = out, self.rollouts + 1
        done = out.terminated | out.truncated
        began = torch.from_numpy(out.began)
        columns = len(self.policy.columns) + len(self.policy.floats)
        actions = out.actions.reshape(self.steps, self.lanes, columns)
        if self.policy.choices:
            actions = actions - self._lows
        experience = Experience(
            obs=torch.from_numpy(out.obs.reshape(self.steps + 1, self.lanes, -1)),
            actions=torch.from_numpy(actions),
            reward=torch.from_numpy(out.reward).float(),
            terminated=torch.from_numpy(out.terminated),
            truncated=torch.from_numpy(out.truncated),
            began=began,
            valid=~began[1:],  # the pool's mode is next_step: such a step only began an episode
            memory=self._memory,
        )
        return Gathered(
            experience, int(done.sum()), float(out.episode_return[done].sum()), float(out.episode_length[done].sum())
        )

    def state(self) -> dict[str, Any]:
        """Return all that is not in the pool's snapshot."""
        return {"rollouts": self.rollouts}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.rollouts = int(state["rollouts"])

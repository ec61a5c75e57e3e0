"""PPO's parts against slow references: which steps count, what comes after an end, and what a policy says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from learn.kit import Nested, slow_advantages
from shoal.learn.encoders import Layers, RunningMoments
from shoal.learn.ppo import Experience, Hyperparameters, Learner, Policy, estimate_advantages
from shoal.wrappers import RunningMeanStd

BOX = spaces.Box(-1, 1, (3,), np.float32)


def test_advantages_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    steps, lanes = 40, 7
    reward, values = rng.normal(size=(steps, lanes)), rng.normal(size=(steps, lanes))
    next_values = rng.normal(size=(steps, lanes))
    terminated, truncated = rng.random((steps, lanes)) < 0.1, rng.random((steps, lanes)) < 0.1
    valid = rng.random((steps, lanes)) < 0.9
    flags = [torch.from_numpy(x) for x in (terminated, terminated | truncated, valid)]
    numbers = [torch.from_numpy(x) for x in (values, next_values)]
    found = estimate_advantages(torch.from_numpy(reward), *flags, *numbers, 0.9, 0.8)
    expected = slow_advantages(reward, terminated, truncated, valid, values, next_values, 0.9, 0.8)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-12)
    assert (found.numpy()[~valid] == 0).all()


@pytest.mark.parametrize("inputs", [3, 40])
def test_quick_layers_are_layers(inputs: int) -> None:
    torch.manual_seed(0)
    quick = Layers(inputs, (32, 16))
    plain = torch.nn.Sequential(*[part for one in quick.linear for part in (one, torch.nn.Tanh())])
    x = torch.randn(50, inputs, requires_grad=True)
    found = []
    for network in (quick, plain):
        quick.zero_grad()
        x.grad = None
        y = network(x)
        (y * torch.arange(16)).sum().backward()
        found.append([y.detach(), x.grad, *(one.grad.clone() for one in quick.parameters())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(quick(x), found[0][0])


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(4),
        spaces.Discrete(3, start=-1),
        spaces.MultiDiscrete([3, 2, 4]),
        spaces.MultiBinary(3),
        spaces.Box(-2, 2, (2,), np.float32),
        Nested.action_space,
    ],
    ids=str,
)
def test_probabilities_are_those_of_torch_distributions(space: Any) -> None:
    torch.manual_seed(0)
    policy = Policy(BOX, space, Hyperparameters())
    outputs = torch.randn(500, policy.outputs)
    with torch.no_grad():
        if policy.floats:
            policy.log_std.copy_(torch.linspace(-1, 0.5, len(policy.floats)))
        rows = policy.choose(outputs, policy.draw((500,)))
        log_prob, entropy = policy.judge(outputs, rows)
    expected, expected_entropy, at = torch.zeros(500), torch.zeros(500), 0
    for column, count in zip(policy.columns, policy.choices, strict=True):
        one = torch.distributions.Categorical(logits=outputs[:, at : at + count])
        expected, expected_entropy = expected + one.log_prob(rows[:, column]), expected_entropy + one.entropy()
        at += count
    if policy.floats:
        normal = torch.distributions.Normal(outputs[:, at:], policy.log_std.exp())
        expected = expected + normal.log_prob(rows[:, policy.floats]).sum(-1)
        expected_entropy = expected_entropy + normal.entropy().sum(-1)
    torch.testing.assert_close(log_prob, expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy.detach(), atol=1e-5, rtol=1e-5)


def test_choices_are_drawn_by_the_softmax() -> None:
    torch.manual_seed(0)
    policy = Policy(BOX, spaces.Discrete(3), Hyperparameters())
    outputs = torch.tensor([0.0, 1.0, -1.0]).expand(200_000, 3)
    counts = torch.bincount(policy.choose(outputs, policy.draw((200_000,)))[:, 0], minlength=3) / 200_000
    torch.testing.assert_close(counts, outputs[0].softmax(-1), atol=0.005, rtol=0)


@pytest.mark.parametrize("shape", [(84, 84), (4, 84, 84), (64, 64), (40, 48, 3), (13, 17, 3), (3, 50, 50)])
def test_images_of_many_sizes(shape: tuple[int, ...]) -> None:
    policy = Policy(spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(2), Hyperparameters())
    rows = torch.randint(0, 256, (5, math.prod(shape)), dtype=torch.uint8)
    outputs, values = policy.evaluate(rows, policy.first_memory(5), torch.zeros(5, dtype=torch.bool))
    assert (outputs.shape, values.shape) == ((5, 2), (5,))


def test_parts_of_nested_observations_all_matter() -> None:
    torch.manual_seed(0)
    env, policy = Nested(), Policy(Nested.observation_space, Nested.action_space, Hyperparameters())
    env.reset(seed=0)
    base = env._obs()
    changed = [
        base,
        {**base, "camera": base["camera"] + np.uint8(90)},
        {**base, "wanted": 5 + (base["wanted"] - 4) % 3},
        {**base, "numbers": base["numbers"] + 0.5},
        {**base, "switches": 1 - base["switches"]},
    ]
    batch = {name: np.stack([one[name] for one in changed]) for name in base}
    rows = torch.from_numpy(policy.encoder.emulation.flatten(batch))
    with torch.no_grad():
        values = policy.evaluate(rows, policy.first_memory(5), torch.zeros(5, dtype=torch.bool))[1].tolist()
    assert len(set(values)) == 5


def test_statistics_are_those_of_the_wrappers() -> None:
    rng = np.random.default_rng(0)
    mine, theirs = RunningMoments(3), RunningMeanStd(shape=(3,))
    for _ in range(5):
        values = rng.normal(5, 3, (20, 4, 3))
        valid = rng.random((20, 4)) < 0.7
        mine.add(torch.from_numpy(values), torch.from_numpy(valid))
        theirs.update(values[valid])
    np.testing.assert_allclose(mine.mean.numpy(), theirs.mean, rtol=1e-9)
    np.testing.assert_allclose(mine.var.numpy(), theirs.var, rtol=1e-9)
    assert float(mine.count) == pytest.approx(theirs.count)


def some_experience(policy: Policy, steps: int = 6, lanes: int = 4) -> Experience:
    torch.manual_seed(1)
    seen = Experience.empty(policy, steps, lanes)
    seen.obs.normal_()
    seen.reward.normal_()
    seen.valid.fill_(True)
    return seen


def test_a_step_that_does_not_count_changes_nothing() -> None:
    weights = []
    for reward in (0.0, 1e6):
        torch.manual_seed(0)
        policy = Policy(BOX, spaces.Discrete(2), Hyperparameters(epochs=2, minibatches=2))
        learner, seen = Learner(policy, 4), some_experience(policy)
        seen.valid[3, 2], seen.reward[3, 2], seen.actions[3, 2] = False, reward, int(reward > 0)
        learner.learn(seen)
        weights.append(learner.weights.detach().clone())
    assert torch.equal(*weights)


def test_one_update_is_that_of_a_slow_ppo() -> None:
    torch.manual_seed(0)
    settings = Hyperparameters(epochs=1, minibatches=1, max_gradient=1e6)
    policy = Policy(BOX, spaces.Discrete(2), settings)
    learner, seen = Learner(policy, 4), some_experience(policy)
    seen.truncated[2, 1] = seen.terminated[4, 0] = True
    twin = Policy(BOX, spaces.Discrete(2), settings)
    twin.load_state_dict(policy.state_dict())
    learner.learn(seen)
    outputs, values = twin.evaluate(seen.obs, seen.memory, seen.began)
    plain = values.detach().numpy()
    advantages = slow_advantages(
        seen.reward.numpy(), seen.terminated.numpy(), seen.truncated.numpy(), seen.valid.numpy(), plain[:-1], plain[1:],
        settings.gamma, settings.trace,
    )  # fmt: skip
    targets = torch.from_numpy(advantages + plain[:-1]).float().reshape(-1)
    weight = torch.from_numpy((advantages - advantages.mean()) / (advantages.std(ddof=1) + 1e-8)).float().reshape(-1)
    chosen = torch.distributions.Categorical(logits=outputs[:-1].reshape(-1, 2))
    log_prob = chosen.log_prob(seen.actions.reshape(-1))
    ratio = (log_prob - log_prob.detach()).exp()
    loss = -(weight * ratio).mean() + 0.5 * 0.5 * ((values[:-1].reshape(-1) - targets) ** 2).mean()
    (loss - 0.01 * chosen.entropy().mean()).backward()
    expected = torch.cat([one.grad.reshape(-1) for one in twin.parameters() if one.grad is not None])
    torch.testing.assert_close(learner.gradient, expected, atol=1e-6, rtol=1e-4)


def test_settings_that_cannot_be_are_refused() -> None:
    for wrong in ({"steps": 0}, {"gamma": 1.5}, {"memory": "elephant"}, {"hidden": ()}, {"learning_rate": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Hyperparameters(**wrong)  # type: ignore[arg-type]

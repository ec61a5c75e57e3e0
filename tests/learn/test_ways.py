"""The ways to make experience: what they bring, against plain loops over the envs themselves."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import shoal
from learn.kit import Counting, Nested, Recall, slow_advantages
from shoal.compiled.library import find
from shoal.learn.averages import Together
from shoal.learn.compiled import CompiledWay, can_be_compiled, tanh_in_place, with_clipped_actions
from shoal.learn.host import HostWay
from shoal.learn.ppo import Experience, Hyperparameters, Learner, Policy
from shoal.learn.ways import Setup, build, settings_for
from shoal.ranks import Ranks


def alone() -> Any:
    return Together(Ranks(), None)


def host(pool: Any, steps: int, groups: int = 1, overlap: bool = False, **settings: Any) -> HostWay:
    torch.manual_seed(0)
    policy = Policy(pool.single_observation_space, pool.single_action_space, Hyperparameters(steps=steps, **settings))
    return HostWay(pool, policy, seed=1, groups=groups, overlap=overlap)


def same(one: Experience, other: Experience) -> bool:
    return all(torch.equal(value, getattr(other, name)) for name, value in vars(one).items() if torch.is_tensor(value))


def check_edges(seen: Experience, policy: Policy, pool_mode: str) -> None:
    """Compare with what `Counting` must have answered, step by step."""
    steps, lanes = seen.reward.shape
    obs = seen.obs.numpy()
    for lane in range(lanes):
        for t in range(steps):
            episode, at = obs[t, lane]
            only_begins = pool_mode == "next_step" and at >= 3 + episode
            assert bool(seen.valid[t, lane]) == (not only_begins)
            if only_begins:
                assert obs[t + 1, lane].tolist() == [episode + 1, 0]
                assert bool(seen.began[t + 1, lane])
                continue
            over = at + 1 >= 3 + episode
            assert bool(seen.terminated[t, lane]) == (over and episode % 2 == 0)
            assert bool(seen.truncated[t, lane]) == (over and episode % 2 == 1)
            assert float(seen.reward[t, lane]) == at + 1 + int(seen.actions[t, lane, 0])
    last = dict(zip(seen.final_at, seen.final_obs, strict=True))
    values = policy.evaluate(seen.obs, seen.memory, seen.began)[1].detach()
    next_values = values[1:].clone().numpy()
    for t in range(steps):
        for lane in range(lanes):
            if seen.truncated[t, lane]:  # the value of the last observation of the episode, whatever the mode
                episode, at = obs[t, lane]
                final = torch.tensor([[[episode, at + 1]]])
                value = policy.evaluate(final, seen.memory[:, :1], torch.zeros(1, 1, dtype=torch.bool))[1]
                next_values[t, lane] = float(value.detach())
                assert (t * lanes + lane in last) == (pool_mode == "same_step")
    targets = Learner(policy, lanes).targets(seen)
    expected = slow_advantages(
        *(getattr(seen, name).numpy() for name in ("reward", "terminated", "truncated", "valid")), values[:-1].numpy(),
        next_values, 0.99, 0.95,
    )  # fmt: skip
    np.testing.assert_allclose(targets.numbers[2].numpy(), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_steps_and_ends_are_what_they_were(mode: Any) -> None:
    with shoal.Pool(Counting, 3, backend="serial", autoreset=mode) as pool:
        way = host(pool, 25)
        for _ in range(2):  # the second rollout goes on where the first has ended
            check_edges(way.collect().experience, way.policy, mode)


def test_a_lane_that_was_restarted_is_cut() -> None:
    options: Any = {"on_error": "restart", "env_kwargs": {"raises_at": 6}}
    with shoal.Pool(Counting, 2, backend="processes", num_workers=1, **options) as pool:
        way = host(pool, 12)
        seen = way.collect().experience
    # Steps 1 to 3 are an episode, the next step begins another one, and the third of that raises.
    (lost,) = {tuple(row) for row in np.argwhere(seen.truncated.numpy() & ~seen.valid.numpy())[:, :1].tolist()}
    t = lost[0]
    assert not seen.valid[t].any()
    targets = Learner(way.policy, 2).targets(seen)
    value = targets.numbers[1]
    assert (targets.numbers[2][t] == 0).all()
    before = seen.reward[t - 1] + 0.99 * way.policy.evaluate(seen.obs, seen.memory, seen.began)[1][t] - value[t - 1]
    assert t == 6
    assert seen.valid[t - 1].all()
    torch.testing.assert_close(targets.numbers[2][t - 1], before.detach(), atol=1e-4, rtol=1e-4)


def test_groups_and_backends_change_nothing() -> None:
    found = []
    for backend, groups in (("serial", 1), ("processes", 2), ("processes", 4)):
        options: Any = {} if groups == 1 else {"batch_size": 8 // groups, "order": "contiguous"}
        with shoal.Pool("CartPole-v1", 8, backend=backend, seed=3, infos="drop", **options) as pool:
            way = host(pool, 30, groups)
            found.append(copy.deepcopy(way.collect().experience))
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_overlap_acts_by_the_policy_of_before() -> None:
    with shoal.Pool("CartPole-v1", 4, backend="serial", seed=3, batch_size=2, order="contiguous") as pool:
        way = host(pool, 10, groups=2, overlap=True)
        way.collect()  # the second rollout is under way now
        before, noise = copy.deepcopy(way.policy), way._noise.clone()
        with torch.no_grad():
            for one in way.policy.parameters():
                one.add_(torch.randn_like(one))
        way.poll()
        second = copy.deepcopy(way.collect().experience)
    chosen = []
    for policy in (before, way.policy):
        outputs, _ = policy.evaluate(second.obs, second.memory, second.began)
        chosen.append(policy.choose(outputs[:-1], noise))
    assert torch.equal(second.actions, chosen[0])
    assert not torch.equal(second.actions, chosen[1])


def test_many_agents_are_lanes() -> None:
    with shoal.Pool(find("shoal/Orchard-v0"), 2, backend="compiled", seed=0) as pool:
        way = host(pool, 5)
        gathered = way.collect()
        assert gathered.experience.obs.shape == (6, 8, 64 * 64)
        Learner(way.policy, 8).learn(gathered.experience)


@pytest.mark.parametrize("env", [Nested, Recall])
def test_every_kind_of_space_is_learned(env: Any) -> None:
    settings: dict[str, Any] = {"steps": 32, "learning_rate": 5e-3, "anneal": False, "gamma": 0.9}
    if env is Recall:
        settings["memory"] = "gru"
    built = build(Setup(env, 16, settings, backend="serial", seed=1), alone())
    best = {Nested: 6.0, Recall: 0.8}[env]  # chance gives about 2 and 0
    returns: list[float] = []
    try:
        while len(returns) < 60 and not np.mean(returns[-4:] or [-9]) > best:
            turn = built.turn()
            if turn.episodes:
                returns.append(turn.return_sum / turn.episodes)
    finally:
        built.close()
    assert np.mean(returns[-4:]) > best


@pytest.mark.parametrize("memory", ["lstm", "gru"])
def test_memory_is_the_same_in_rollouts_and_in_learning(memory: str) -> None:
    with shoal.Pool(Counting, 4, backend="serial") as pool:
        way = host(pool, 12, memory=memory)
        way.collect()
        seen = way.collect().experience
        outputs, _ = way.policy.evaluate(seen.obs, seen.memory, seen.began)
        chosen = way.policy.choose(outputs[:-1], way._noise)
    assert torch.equal(chosen, seen.actions)


# ---- compiled ----------------------------------------------------------------------------------------------------


def test_the_compiled_tanh_is_tanh() -> None:
    x = np.linspace(-20, 20, 5001, dtype=np.float32)
    y = x.copy()
    tanh_in_place(y)
    np.testing.assert_allclose(y, np.tanh(x.astype(float)), atol=5e-7)


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "Acrobot-v1"])
def test_the_compiled_policy_draws_as_torch_says(env: str) -> None:
    torch.manual_seed(0)
    with shoal.Pool(with_clipped_actions(find(env)), 2048, backend="compiled", seed=0) as pool:
        settings = settings_for(pool.single_action_space, {"steps": 8, "normalize_obs": True}, 2048)
        policy = Policy(pool.single_observation_space, pool.single_action_space, settings)
        with torch.no_grad():
            policy.actor[-1].weight.mul_(400.0)  # type: ignore[union-attr, operator]
        way, learner = CompiledWay(pool, policy, seed=5), Learner(policy, 2048)
        learner.observe(way.collect().experience)  # so that there is something to normalize by
        seen = way.collect().experience
    outputs = policy.evaluate(seen.obs, seen.memory, seen.began)[0][:-1].detach()
    if policy.floats:
        noise = (seen.actions - outputs) / policy.log_std.exp().detach()
        assert abs(float(noise.mean())) < 0.03
        assert abs(float(noise.std()) - 1) < 0.03
        assert float(seen.actions.abs().max()) > 2.0  # what was drawn is kept, and the env gets it clipped
    else:
        expected = outputs.softmax(-1).reshape(-1, policy.outputs)
        drawn = torch.nn.functional.one_hot(seen.actions.reshape(-1).long(), policy.outputs).float()
        for k in range(policy.outputs):
            order = expected[:, k].argsort()
            for part in order.chunk(4):  # from the least probable quarter to the most probable one
                assert float(drawn[part, k].mean()) == pytest.approx(float(expected[part, k].mean()), abs=0.035)
            assert float(expected[order[-1], k] - expected[order[0], k]) > 0.2


def test_compiled_steps_are_those_of_the_envs() -> None:
    env_class = with_clipped_actions(find("Pendulum-v1"))
    with shoal.Pool(env_class, 3, backend="compiled", seed=7) as pool:
        settings = settings_for(pool.single_action_space, {"steps": 300}, 3)
        policy = Policy(pool.single_observation_space, pool.single_action_space, settings)
        seen = CompiledWay(pool, policy, seed=1).collect().experience
    with shoal.Pool(find("Pendulum-v1"), 3, backend="compiled", seed=7) as pool:
        batch = pool.reset(seed=7)
        for t in range(300):
            np.testing.assert_allclose(batch.obs, seen.obs[t].numpy(), atol=1e-5)
            batch = pool.step(np.clip(seen.actions[t].numpy(), -2, 2))
            assert (batch.began != seen.valid[t].numpy()).all()
            assert (batch.truncated == seen.truncated[t].numpy()).all()
            np.testing.assert_allclose(batch.reward, seen.reward[t].numpy(), atol=1e-4)


def test_what_cannot_be_compiled_takes_another_way() -> None:
    memory = Policy(find("CartPole-v1").observation_space, spaces.Discrete(2), Hyperparameters(memory="gru"))
    assert not can_be_compiled(memory)
    built = build(Setup("CartPole-v1", 4, {"steps": 4, "memory": "gru"}, backend="compiled"), alone())
    assert built.way.name == "host"
    built.turn()
    built.close()

"""Envs on a GPU, real or simulated by Numba, do what they do as plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shoal
from compiled.cuda.kit import assert_close, host, needs_cuda
from compiled.envs import CartPole, Nested, Sized, Tag
from shoal import compiled
from shoal.compiled.cuda import CudaEnvs

pytestmark = [needs_cuda, pytest.mark.timeout(300)]


@compiled.policy
def lean(obs: Any, action: Any, rng: Any, weights: Any) -> None:
    total = 0.0
    for i in range(4):
        total += obs[i] * weights[i]
    action[0] = 1 if total + compiled.uniform(rng, -0.1, 0.1) > 0.0 else 0


@pytest.mark.parametrize("precision", ["double", "single"])
@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("env", [CartPole, Nested, Tag])
def test_steps_as_plain_python_does(env: Any, mode: Any, precision: str) -> None:
    envs = CudaEnvs(env, 3, autoreset=mode, seed=7, precision=precision, track_episodes=True)
    with shoal.Pool(env, 3, backend="serial", autoreset=mode, seed=7) as pool:
        pool.action_space.seed(0)
        batch = pool.reset()
        assert_close(batch.obs, envs.reset(), precision)
        ended = 0
        for _ in range(35):
            actions = pool.action_space.sample()
            batch = pool.step(actions)
            obs, reward, terminated, truncated = envs.step(actions)
            assert_close(batch.obs, obs, precision)
            assert_close(batch.reward, reward, precision)
            np.testing.assert_array_equal(batch.terminated, terminated)
            np.testing.assert_array_equal(batch.truncated, truncated)
            assert_close(batch.episode_return, envs.episode_return, precision)
            np.testing.assert_array_equal(batch.episode_length, envs.episode_length)
            over = np.flatnonzero(batch.terminated | batch.truncated)
            ended += len(over)
            for lane in over if mode == "same_step" else []:
                last = [leaf[lane] for leaf in host(envs.final_obs)]
                assert_close(batch.final_obs[lane], last, precision)
        assert ended > 0
    envs.close()


def test_the_same_again_bit_for_bit() -> None:
    runs = []
    for _ in range(2):
        envs = CudaEnvs(Nested, 130, seed=1)  # more than one block
        envs.reset()
        for t in range(5):
            envs.step((np.full((130, 2), 0.5), np.full(130, t % 3), np.ones((130, 2), int)))
        runs.append(host((envs.obs, envs.reward)))
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_rollouts_are_steps(mode: Any) -> None:
    rolled, stepped = (CudaEnvs(CartPole, 3, autoreset=mode, seed=3, track_episodes=True) for _ in range(2))
    rolled.reset()
    stepped.reset()
    for _ in range(2):  # the second one goes on where the first one has ended
        record = rolled.rollout("random", 20, seed=5)
        assert record.obs.shape == (21, 3, 4)
        actions = np.asarray(record.actions)
        assert set(actions.flat) == {0, 1}
        for t in range(20):
            np.testing.assert_array_equal(np.asarray(record.obs)[t], np.asarray(stepped.obs))
            stepped.step(actions[t])
            np.testing.assert_array_equal(np.asarray(record.reward)[t], np.asarray(stepped.reward))
            np.testing.assert_array_equal(np.asarray(record.terminated)[t], np.asarray(stepped.terminated))
            np.testing.assert_array_equal(np.asarray(record.truncated)[t], np.asarray(stepped.truncated))
            np.testing.assert_array_equal(np.asarray(record.episode_return)[t], np.asarray(stepped.episode_return))
            np.testing.assert_array_equal(np.asarray(record.episode_length)[t], np.asarray(stepped.episode_length))
        np.testing.assert_array_equal(np.asarray(rolled.obs), np.asarray(stepped.obs))
        np.testing.assert_array_equal(np.asarray(rolled.episode_return), np.asarray(stepped.episode_return))
    with pytest.raises(shoal.BadCall, match="another autoreset"):
        CudaEnvs(CartPole, 2, autoreset="disabled").rollout("random", 2)
    with pytest.raises(shoal.BadCall, match="marked by"):
        rolled.rollout(lambda obs: obs, 2)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_rollouts_by_a_policy_as_on_the_cpu(mode: Any) -> None:
    weights = np.array([0.0, 0.1, 1.0, 0.3])
    envs = CudaEnvs(CartPole, 3, autoreset=mode, seed=3, precision="double", track_episodes=True)
    envs.reset()
    mine = envs.rollout(lean, 40, params=[weights], seed=9)
    with shoal.Pool(CartPole, 3, backend="serial", autoreset=mode, seed=3) as pool:
        pool.reset()
        theirs = pool.rollout(lean, 40, params=[weights], seed=9)
    np.testing.assert_array_equal(theirs.actions, mine.actions)
    np.testing.assert_array_equal(theirs.began, mine.began)
    for name in ("obs", "reward", "terminated", "truncated", "episode_return", "episode_length"):
        assert_close(getattr(theirs, name), getattr(mine, name))
    if mode == "same_step":
        assert_close(theirs.final_obs, mine.final_obs)


def test_after_a_rollout_the_envs_show_its_last_step() -> None:
    rolled, stepped = (CudaEnvs(CartPole, 3, autoreset="same_step", seed=3) for _ in range(2))
    rolled.reset()
    whole = rolled.rollout("random", 20, seed=5)
    steps = int(np.argwhere(np.asarray(whole.terminated))[0][0]) + 1  # so that the last one ends an episode
    rolled.reset(seed=3)
    stepped.reset()
    rolled.rollout("random", steps, seed=5)
    for actions in np.asarray(whole.actions)[:steps]:
        stepped.step(actions)
    over = np.asarray(stepped.terminated)
    assert over.any()
    np.testing.assert_array_equal(np.asarray(rolled.final_obs)[over], np.asarray(stepped.final_obs)[over])


def test_a_rollout_that_is_written_again_is_as_a_new_one() -> None:
    again, anew = (CudaEnvs(CartPole, 3, autoreset="same_step", seed=3) for _ in range(2))
    again.reset()
    anew.reset()
    out = again.rollout("random", 20, seed=5)
    anew.rollout("random", 20, seed=5)
    assert again.rollout("random", 20, seed=6, out=out) is out
    new = anew.rollout("random", 20, seed=6)
    for name in ("obs", "actions", "reward", "terminated", "truncated", "began", "final_obs"):
        np.testing.assert_array_equal(np.asarray(getattr(out, name)), np.asarray(getattr(new, name)))


def test_steps_of_some_count_in_their_episodes() -> None:
    envs = CudaEnvs(CartPole, 2, seed=3, track_episodes=True)
    envs.reset()
    envs.step(np.zeros(2, int))
    envs.step_rows(np.array([True, False]), np.zeros(2, int))
    assert np.asarray(envs.episode_length).tolist() == [2, 1]
    envs.step(np.zeros(2, int))
    assert np.asarray(envs.episode_length).tolist() == [3, 2]
    assert np.asarray(envs.episode_return).tolist() == [3.0, 2.0]


def test_many_agents_roll_too() -> None:
    envs = CudaEnvs(Tag, 3, seed=1, precision="double")
    envs.reset()
    mine = envs.rollout("random", 15, seed=2)
    with shoal.Pool(Tag, 3, backend="serial", seed=1) as pool:
        pool.reset()
        theirs = pool.rollout("random", 15, seed=2)
    np.testing.assert_array_equal(theirs.actions, mine.actions)
    np.testing.assert_array_equal(theirs.began, mine.began)
    assert_close(theirs.obs, mine.obs)
    assert_close(theirs.reward, mine.reward)


def test_params_of_each_env() -> None:
    envs = CudaEnvs(CartPole, 3, seed=0, precision="double")
    np.testing.assert_array_equal(envs.get("gravity"), [9.8] * 3)
    envs.set("gravity", [1.0, 9.8, 100.0])
    np.testing.assert_array_equal(envs.get("gravity"), [1.0, 9.8, 100.0])
    with shoal.Pool(CartPole, 3, backend="serial", seed=0) as pool:
        pool.set_attr("gravity", [1.0, 9.8, 100.0])
        assert_close(pool.reset().obs, envs.reset())
        for _ in range(8):
            assert_close(pool.step(np.zeros(3, int)).obs, envs.step(np.zeros(3, int))[0])
    with pytest.raises(AttributeError, match="no field 'mass'"):
        envs.set("mass", 1.0)


def test_states_are_taken_out_and_put_back() -> None:
    for env in (CartPole, Nested):
        envs = CudaEnvs(env, 3, seed=0, autoreset="same_step")
        envs.reset()
        if env is CartPole:
            envs.set("gravity", [5.0, 6.0, 7.0])
        saved = envs.save()
        other = CudaEnvs(env, 3, seed=99, autoreset="same_step")
        other.reset()
        other.load(saved)
        actions = [np.zeros((3, *leaf.shape), leaf.dtype) for leaf in envs.definition.action_leaves]
        given = actions[0] if len(actions) == 1 else tuple(actions)
        for _ in range(6):
            for one, two in zip(host(envs.step(given)), host(other.step(given)), strict=True):
                np.testing.assert_array_equal(one, two)


def test_reset_of_some() -> None:
    envs = CudaEnvs(CartPole, 3, seed=0, autoreset="disabled")
    first = np.asarray(envs.reset()).copy()
    envs.step(np.ones(3, int))
    stepped = np.asarray(envs.obs).copy()
    obs = np.asarray(envs.reset(mask=np.array([False, True, False])))
    np.testing.assert_array_equal(obs[[0, 2]], stepped[[0, 2]])
    assert not np.array_equal(obs[1], stepped[1])
    assert not np.array_equal(obs[1], first[1])  # the next episode of its stream
    np.testing.assert_array_equal(np.asarray(envs.reset(seed=0)), first)
    with pytest.raises(shoal.BadCall, match="goes without a mask"):
        envs.reset(seed=1, mask=np.ones(3, bool))
    with pytest.raises(shoal.BadCall, match="one for each of 3 envs"):
        envs.reset(mask=np.ones(4, bool))


def test_nonsense_is_refused_in_words() -> None:
    envs = CudaEnvs(CartPole, 3)
    envs.reset()
    with pytest.raises(shoal.BadAction, match=r"expected shape \(3,\), found \(4,\)"):
        envs.step(np.zeros(4, int))
    with pytest.raises(ValueError, match="precision"):
        CudaEnvs(CartPole, 3, precision="half")
    with pytest.raises(ValueError, match="autoreset"):
        CudaEnvs(CartPole, 3, autoreset="never")
    with pytest.raises(ValueError, match="num_envs"):
        CudaEnvs(CartPole, 0)
    with pytest.raises(shoal.BadEnv, match=r"derive from shoal\.compiled\.Env"):
        CudaEnvs(object, 3)
    with pytest.raises(ValueError, match="without a copy"):
        np.array(envs.obs, copy=False)


@pytest.mark.parametrize("steps", [0, -1, 2.5, True, None])
def test_rollouts_have_steps(steps: Any) -> None:
    envs = CudaEnvs(CartPole, 2)
    envs.reset()
    with pytest.raises(ValueError, match="steps: expected a whole number"):
        envs.rollout("random", steps)


def test_what_cannot_be_done_is_said() -> None:
    envs = CudaEnvs(CartPole, 2)
    with pytest.raises(shoal.BadCall, match=r"step: .* call reset\(\) first"):
        envs.step(np.zeros(2, int))
    with pytest.raises(shoal.BadCall, match=r"rollout: .* call reset\(\) first"):
        envs.rollout("random", 2)
    envs.reset()
    with pytest.raises(shoal.BadCall, match="params are for a"):
        envs.rollout("random", 2, params=[np.zeros(3)])
    assert envs.rollout("random", 2, seed=-5).obs.shape == (3, 2, 4)
    for saved in ({}, CudaEnvs(CartPole, 1).save(), CudaEnvs(CartPole, 3).save()):
        with pytest.raises(shoal.BadCall, match="load: expected what save"):
            envs.load(saved, np.ones(2, bool))
    envs.close()
    envs.close()
    for use in (envs.reset, envs.save, lambda: envs.step(np.zeros(2, int)), lambda: envs.get("x")):
        with pytest.raises(shoal.PoolClosed):
            use()
    nested = CudaEnvs(Nested, 2)
    nested.reset()
    with pytest.raises(shoal.BadAction, match="expected them nested as"):
        nested.step((np.zeros((2, 2)),))


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("env", [CartPole, Nested, Tag])
def test_below_a_pool(env: Any, mode: Any) -> None:
    options: dict[str, Any] = {"autoreset": mode, "seed": 4}
    with (
        shoal.Pool(env, 2, backend="cuda", env_kwargs={"precision": "double"}, **options) as mine,
        shoal.Pool(env, 2, backend="serial", **options) as theirs,
    ):
        assert mine.num_envs == theirs.num_envs
        theirs.action_space.seed(1)
        batches = mine.reset(), theirs.reset()
        for _ in range(25):
            assert_close(batches[0].obs, batches[1].obs)
            assert_close(batches[0][1:6], batches[1][1:6])
            over = batches[0].terminated | batches[0].truncated
            if mode == "disabled" and over.any():
                ids = np.flatnonzero(over)
                assert_close(mine.reset(ids).obs, theirs.reset(ids).obs)
            actions = theirs.action_space.sample()
            batches = mine.step(actions), theirs.step(actions)


def test_a_pool_in_parts() -> None:
    with (
        shoal.Pool(CartPole, 4, backend="cuda", batch_size=2, seed=0, env_kwargs={"precision": "double"}) as mine,
        shoal.Pool(CartPole, 4, backend="serial", batch_size=2, seed=0) as theirs,
    ):
        seen = theirs.reset().obs.copy()
        mine.async_reset()
        for _ in range(6):
            batch = mine.recv()
            assert len(batch.env_id) == 2
            assert_close(batch.obs, seen[batch.env_id])
            actions = batch.env_id % 2
            theirs.send(actions, batch.env_id)
            seen[batch.env_id] = theirs.recv().obs
            mine.send(actions, batch.env_id)


def test_snapshots_params_and_dialects_of_a_pool() -> None:
    with shoal.Pool(CartPole, 3, backend="cuda", seed=0) as pool:
        pool.reset()
        pool.set_attr("gravity", [1.0, 2.0, 3.0])
        pool.set_attr("length", 0.25, env_ids=[1])
        assert pool.get_attr("gravity") == [1.0, 2.0, 3.0]
        assert pool.get_attr("length") == [0.5, 0.25, 0.5]
        saved = pool.snapshot()
        after = [pool.step(np.ones(3, int)).obs.copy() for _ in range(20)]
        pool.restore(saved)
        for one in after:
            np.testing.assert_array_equal(one, pool.step(np.ones(3, int)).obs)
        with pytest.raises(shoal.EnvError, match="nothing"):
            pool.get_attr("nothing")
    envs = shoal.make("CartPole-v1", num_envs=3, backend="cuda")
    obs, _ = envs.reset(seed=0)
    assert obs.shape == (3, 4)
    assert obs.dtype == np.float32
    assert envs.step(np.zeros(3, int))[1].tolist() == [1.0] * 3
    envs.close()
    with pytest.raises(ValueError, match="on_error"):
        shoal.Pool(CartPole, 3, backend="cuda", on_error="restart")


def test_sizes_are_checked_by_the_class(capsys: pytest.CaptureFixture[str]) -> None:
    envs = CudaEnvs(Sized, 2, env_kwargs={"size": 5}, seed=0)
    assert np.asarray(envs.reset()).shape == (2, 5)

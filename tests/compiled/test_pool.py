"""Compiled envs are envs of a pool like all others: chosen, asked, set, wrapped, in any dialect."""

from __future__ import annotations

import os
import re
import threading
import warnings
from typing import Any

import numpy as np
import pytest

import shoal
from compiled.envs import CartPole, Nested, Sized, Tag
from shoal import compiled
from shoal.compiled import kernels
from shoal.support.optional_dependencies import install

pytest.importorskip("numba", reason="compiled envs need numba")


@pytest.fixture
def no_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: False)


def test_auto_takes_it_for_what_it_is() -> None:
    with shoal.Pool(CartPole, 3) as pool:
        assert str(pool.plan).startswith("compiled with ")
        assert pool.plan.reason == "the class can be compiled"
    with shoal.Pool(CartPole, 3, num_workers=2, on_error="restart") as pool:
        assert pool.plan.backend == "processes"  # which compiled envs cannot be restarted by


@pytest.mark.usefixtures("no_numba")
def test_without_numba() -> None:
    with pytest.raises(ImportError, match=re.escape('backend="compiled" needs Numba: ' + install("compiled")) + "$"):
        shoal.Pool(CartPole, 2, backend="compiled")
    with pytest.warns(
        RuntimeWarning, match=r"CartPole runs as plain Python, because Numba is not installed: pip install"
    ):
        pool = shoal.Pool(CartPole, 2)
    with pool:
        assert pool.plan.backend != "compiled"
        assert "Numba is not installed" in pool.plan.reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shoal.Pool(CartPole, 2, backend="serial").close()


@pytest.mark.parametrize("env", [CartPole, Sized])
def test_actions_of_another_type_are_cast_for_the_kernel(env: Any) -> None:
    """By step, which goes straight to it, and by send and recv."""
    kinds = ["i8", "i4", "u1"] if env is CartPole else ["f4", "f8", "i1"]
    with shoal.Pool(env, 40, backend="compiled") as ours, shoal.Pool(env, 40, backend="serial") as plain:
        ours.reset(seed=0)
        plain.reset(seed=0)
        rng = np.random.default_rng(0)
        for turn in range(30):
            actions = rng.integers(0, 2, 80).astype(kinds[turn % 3])[::2]
            expected = plain.step(actions.astype(plain.single_action_space.dtype))
            if turn % 2:
                ours.send(actions if turn % 3 else actions.tolist(), np.arange(40))
            found = ours.recv() if turn % 2 else ours.step(actions)
            np.testing.assert_array_equal(found.obs, expected.obs)
            np.testing.assert_array_equal(found.reward, expected.reward)
        wrong = np.full(40, 2, kinds[1])
        for refused in (ours.step, ours.send):
            with pytest.raises(shoal.BadAction, match="env 0"):
                refused(wrong)
        assert not len(ours.pending)


@pytest.mark.parametrize("backend", ["serial", "threads", "processes", "hybrid", "compiled"])
def test_params_can_be_got_and_set_while_it_runs(backend: Any) -> None:
    with shoal.Pool(CartPole, 3, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        assert pool.get_attr("gravity") == [9.8] * 3
        pool.set_attr("gravity", [1.0, 2.0, 3.0])
        pool.set_attr("length", 0.25, env_ids=[1])
        assert pool.get_attr("gravity") == [1.0, 2.0, 3.0]
        assert pool.get_attr("length") == [0.5, 0.25, 0.5]
        for _ in range(40):
            pool.step(np.ones(3, int))  # through resets
        assert pool.get_attr("gravity") == [1.0, 2.0, 3.0]
        with pytest.raises(shoal.EnvError, match="nothing"):
            pool.get_attr("nothing")


def test_params_change_what_happens_as_in_plain_python() -> None:
    outcomes = []
    for backend in ("serial", "compiled"):
        with shoal.Pool(CartPole, 3, backend=backend, seed=0) as pool:  # type: ignore[arg-type]
            pool.set_attr("gravity", [1.0, 9.8, 100.0])
            outcomes.append([pool.reset().obs.copy(), *(pool.step(np.zeros(3, int)).obs.copy() for _ in range(5))])
    np.testing.assert_array_equal(*outcomes)


def test_arrays_and_states_can_be_set() -> None:
    with shoal.Pool(Nested, 2, backend="compiled") as pool:
        pool.reset(seed=0)
        pool.set_attr("weights", [np.array([0.0, 0.0, 0.0, 1.0]), np.array([0.0, 1.0, 0.0, 0.0])])
        pool.step(pool.action_space.sample())
        assert pool.get_attr("small") == [3, 1]
        pool.set_attr("grid", np.full((3, 2), 7, np.uint8))
        assert (pool.get_attr("grid")[1] == 7).all()
        with pytest.raises(shoal.EnvError, match="broadcast"):
            pool.set_attr("weights", np.zeros(3))
        with pytest.raises(shoal.EnvError, match="has no field 'weight' to set: its fields are angle"):
            pool.set_attr("weight", 1.0)
        states = pool.get_attr("state")
        pool.set_attr("state", [states[1], states[0]])
        assert pool.get_attr("small") == [1, 3]
        assert pool.local_envs[0].states["small"].tolist() == [1, 3]


def test_arguments_of_the_class() -> None:
    for backend in ("serial", "compiled"):
        with shoal.Pool(Sized, 2, backend=backend, env_kwargs={"size": 5}) as pool:  # type: ignore[arg-type]
            assert pool.single_observation_space.shape == (5,)
            assert pool.reset(seed=0).obs.tolist() == [[1, 0, 0, 0, 0]] * 2
            assert pool.get_attr("size") == [5, 5]


def test_gymnasium_face() -> None:
    envs = shoal.make(CartPole, num_envs=4, backend="compiled")
    plain = shoal.make(CartPole, num_envs=4, backend="serial")
    for one, other in zip(envs.reset(seed=3), plain.reset(seed=3), strict=True):
        np.testing.assert_array_equal(one, other)
    for _ in range(50):
        actions = envs.action_space.sample()
        for one, other in zip(envs.step(actions), plain.step(actions), strict=True):
            np.testing.assert_array_equal(one, other)
    envs.close()
    plain.close()


@pytest.mark.parametrize("api", ["baselines", "sb3"])
def test_vec_env_faces(api: str) -> None:
    if api == "sb3":
        pytest.importorskip("stable_baselines3")
    envs = shoal.make(CartPole, num_envs=3, api=api, backend="compiled")
    assert envs.reset().shape == (3, 4)
    ends = 0
    for _ in range(40):
        _, _, done, infos = envs.step(np.ones(3, int))
        ends += int(done.sum())
        assert all(("terminal_observation" in info) == over for info, over in zip(infos, done, strict=True))
    assert ends > 0
    envs.close()


def test_wrappers_on_top() -> None:
    from shoal.wrappers import FrameStack, Normalize, wrap

    seen = []
    for backend in ("serial", "compiled"):
        with shoal.Pool(CartPole, 3, backend=backend) as pool:  # type: ignore[arg-type]
            wrapped: Any = wrap(pool, FrameStack(2), Normalize())
            wrapped.reset(seed=0)
            seen.append([np.array(wrapped.step(np.ones(3, int)).obs) for _ in range(40)])
    np.testing.assert_array_equal(*seen)
    assert seen[0][0].shape == (3, 8)


def test_lent_frames_stay_the_callers_own() -> None:
    with shoal.Pool(CartPole, 4096, backend="compiled", copy=True, num_workers=2) as pool:
        kept = [pool.reset(seed=0).obs]
        copies = [kept[0].copy()]
        for _ in range(6):
            kept.append(pool.step(np.ones(4096, int)).obs)
            copies.append(kept[-1].copy())
        for one, copy in zip(kept, copies, strict=True):
            np.testing.assert_array_equal(one, copy)


def test_bad_actions_touch_nothing() -> None:
    with shoal.Pool(CartPole, 3, backend="compiled") as pool, shoal.Pool(CartPole, 3, backend="compiled") as other:
        pool.reset(seed=0)
        other.reset(seed=0)
        for bad in (np.array([0, 2, 0]), np.zeros(2, int), np.zeros(3), np.array([0, -1, 0])):
            with pytest.raises(shoal.BadAction):
                pool.step(bad)
        np.testing.assert_array_equal(pool.step([1, 0, 1]).obs, other.step(np.array([1, 0, 1])).obs)


def test_options_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="steps all envs as one"):
        shoal.Pool(CartPole, 2, backend="compiled", on_error="restart")
    with pytest.raises(ValueError, match="step_timeout"):
        shoal.Pool(CartPole, 2, backend="compiled", step_timeout=1.0)
    with pytest.raises(ValueError, match="num_workers"):
        shoal.Pool(CartPole, 2, backend="compiled", num_workers=0)


def test_threads_end_with_the_pool() -> None:
    before = len(os.listdir("/proc/self/task"))
    pool = shoal.Pool(Tag, 20_000, backend="compiled", num_workers=3)
    pool.reset(seed=0)
    for _ in range(5):
        pool.step(np.ones(60_000, int))
    pool.close()
    assert len(os.listdir("/proc/self/task")) == before
    with pytest.raises(shoal.PoolClosed):
        pool.step(np.ones(60_000, int))


def test_a_fork_may_make_its_own() -> None:
    with shoal.Pool(CartPole, 20_000, backend="compiled", num_workers=2) as pool:
        pool.reset(seed=0)
        for _ in range(5):
            pool.step(np.ones(20_000, int))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(shoal.WrongProcess):
                    pool.step(np.ones(20_000, int))
                with shoal.Pool(CartPole, 20_000, backend="compiled", num_workers=2) as own:
                    own.reset(seed=0)
                    for _ in range(5):
                        own.step(np.ones(20_000, int))
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        pool.step(np.ones(20_000, int))


def test_two_pools_in_two_threads() -> None:
    results: dict[int, Any] = {}

    def run(seed: int) -> None:
        with shoal.Pool(CartPole, 3000, backend="compiled", num_workers=2) as pool:
            pool.reset(seed=0)
            results[seed] = [pool.step(np.ones(3000, int)).obs.copy() for _ in range(30)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(results[0], results[1])


def test_plain_python_is_an_env_of_its_own() -> None:
    from gymnasium.utils.env_checker import check_env

    check_env(compiled.as_gymnasium(Nested), skip_render_check=True)
    env = compiled.as_gymnasium(CartPole)
    env.reset(seed=1)
    env.unwrapped.state.theta = 0.2
    assert env.unwrapped.observe_now()[2] == np.float32(0.2)
    assert env.step(1)[2] in (True, False)
    tag = compiled.as_gymnasium(Tag)
    obs, _ = tag.reset(seed=0)
    assert obs.shape == (3, 2)
    assert tag.step(np.ones(3, int))[1].shape == (3,)


def test_many_actions_are_checked_by_all_threads() -> None:
    lanes = 200_001
    with shoal.Pool(CartPole, lanes, backend="compiled", num_workers=3, seed=0) as pool:
        pool.reset()
        actions = np.zeros(lanes, np.int64)
        pool.step(actions)
        for bad in (0, lanes // 2, lanes - 1):
            wrong = actions.copy()
            wrong[bad] = 2
            with pytest.raises(shoal.BadAction, match=rf"actions\[{bad}\] for env {bad}: expected 0 to 1, found 2"):
                pool.step(wrong)
        assert (pool.step(actions).episode_length == 2).all()  # the refused ones have stepped nobody


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.compiled.cuda import build

    monkeypatch.setattr(build, "missing", lambda: 'backend="cuda" needs something')
    with pytest.raises(ImportError, match=r'^backend="cuda" needs something$'):
        shoal.Pool(CartPole, 2, backend="cuda")

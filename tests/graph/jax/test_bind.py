"""Envs of a pool inside of JAX functions: the same steps as outside, in order, and errors that are the envs' own."""

from __future__ import annotations

import functools
import gc
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

pytest.importorskip("jax")
import jax
import jax.numpy as jnp

import shoal.graph
from envs import SPACES, CountEnv, EvenSpace, SpaceEnv
from faults.kit import DeedEnv, assert_usable
from shoal.graph.jax import bind, jit, own_errors
from shoal.support.optional_dependencies import install

TESTS = Path(__file__).parents[2]
STEPS = 9


@pytest.fixture(params=[True, False], ids=["ordered", "by handle"])
def ordered(request: pytest.FixtureRequest) -> bool:
    """Both ways to call the host."""
    return bool(request.param)


@pytest.fixture
def counting(ordered: bool) -> Iterator[tuple[shoal.Pool, Any]]:
    """Three CountEnvs, reset, and their binding."""
    with shoal.Pool(CountEnv, 3, backend="serial", env_kwargs={"length": 1000}) as pool:
        pool.reset(seed=0)
        yield pool, bind(pool, ordered=ordered)


def counts(pool: shoal.Pool) -> Any:
    """How often each env was stepped since its reset."""
    return pool.get_attr("steps")


class FloatEnv(gymnasium.Env[Any, Any]):
    """Observation and reward follow from a float action."""

    observation_space = spaces.Box(-100.0, 100.0, (2,), np.float32)
    action_space = spaces.Box(-10.0, 10.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.place = np.zeros(2, np.float32)
        return self.place, {}

    def step(self, action: Any) -> Any:
        self.place = self.place + action
        return self.place, float(action.sum()), False, False, {}


# ---- same as outside -----------------------------------------------------------------------------------------------


def recorded(pool: shoal.Pool, actions: Any) -> Any:
    """What the pool answers in Python, with arrays [steps, envs, ...]."""
    first = jax.tree.map(np.array, pool.reset(seed=7).obs)
    told = []
    for turn in range(STEPS):
        batch = pool.step(jax.tree.map(lambda rows: rows[turn], actions))  # noqa: B023
        told.append(jax.tree.map(np.array, (batch.obs, batch.reward, batch.terminated, batch.truncated)))
    return first, jax.tree.map(lambda *rows: np.stack(rows), *told)


def sampled(pool: shoal.Pool) -> Any:
    pool.action_space.seed(3)
    return jax.tree.map(lambda *rows: np.stack(rows), *[pool.action_space.sample() for _ in range(STEPS)])


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == jax.dtypes.canonicalize_dtype(theirs.dtype)
        np.testing.assert_array_equal(np.asarray(mine), theirs.astype(mine.dtype))


OBSERVATIONS = {
    "box": SPACES["box"], "0-d": SPACES["box 0-d"], "float64": SPACES["box float64"], "float16": SPACES["box float16"],
    "image": SPACES["image"], "bool": SPACES["box bool"], "nothing": SPACES["box of nothing"],
    "discrete": SPACES["discrete start"], "multi binary": SPACES["multi binary 2-d"], "tuple": SPACES["tuple"],
    "nested": spaces.Dict(
        z=spaces.Tuple((spaces.Dict(b=spaces.Discrete(3), a=SPACES["box 0-d"]), SPACES["image"])),
        a=SPACES["box float64"],
    ),
}  # fmt: skip
ACTIONS = {
    "discrete": spaces.Discrete(3), "box": SPACES["box"], "float64": SPACES["box float64"],
    "multi discrete": SPACES["multi discrete 2-d"],
    "nested": spaces.Dict(move=spaces.Tuple((SPACES["box"], SPACES["discrete start"])), grip=SPACES["multi binary"]),
}  # fmt: skip
CASES = [(name, "discrete") for name in OBSERVATIONS] + [("nested", name) for name in ACTIONS if name != "discrete"]


@pytest.mark.parametrize(("observation", "action"), CASES)
def test_a_scan_sees_what_python_sees_of_any_space(observation: str, action: str, ordered: bool) -> None:
    kwargs = {"observation_space": OBSERVATIONS[observation], "action_space": ACTIONS[action]}
    with shoal.Pool(SpaceEnv, 3, backend="serial", env_kwargs=kwargs) as pool:
        # As JAX sees them: rounded to 32 bits before anybody steps.
        actions = jax.tree.map(lambda a: np.asarray(jnp.asarray(a)), sampled(pool))
        first, told = recorded(pool, actions)
        binding = bind(pool, ordered=ordered)

        @jit
        def rollout(handle: Any, actions: Any) -> Any:
            handle, obs = binding.reset(handle, seed=7)
            handle, out = jax.lax.scan(binding.step, handle, actions)
            return obs, out

        obs, out = rollout(binding.handle, actions)
        assert_same(obs, first)
        rewards = told[1].astype(np.float32)
        assert_same((out.obs, out.reward, out.terminated, out.truncated), (told[0], rewards, *told[2:]))
        assert out.env_id.tolist() == [[0, 1, 2]] * STEPS
        assert out.done.tolist() == (told[2] | told[3]).tolist()


@pytest.mark.parametrize(("backend", "num_envs", "workers"), [
    ("serial", 1, 1), ("serial", 7, 1), ("threads", 7, 3), ("processes", 1, 1), ("processes", 7, 3), ("hybrid", 7, 2),
])  # fmt: skip
@pytest.mark.parametrize("copy", [True, False], ids=["copy", "views"])
def test_a_scan_sees_what_python_sees_on_every_backend(
    backend: Any, num_envs: int, workers: int, copy: bool, ordered: bool
) -> None:
    kwargs = {"observation_space": SPACES["box float64"]}
    with shoal.Pool(SpaceEnv, num_envs, backend=backend, num_workers=workers, copy=copy, env_kwargs=kwargs) as pool:
        actions = sampled(pool)
        first, told = recorded(pool, actions)
        binding = bind(pool, ordered=ordered)
        handle, obs = binding.reset(binding.handle, seed=7)
        assert_same(obs, first)
        _, out = jit(lambda h, a: jax.lax.scan(binding.step, h, a))(handle, actions)
        assert_same((out.obs, out.reward, out.terminated), (told[0], told[1].astype(np.float32), told[2]))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.uint8])
def test_smaller_integers_do_for_discrete_actions(counting: Any, dtype: Any) -> None:
    _, (handle, _, _, step) = counting
    _, out = jit(step)(handle, jnp.array([0, 1, 2], dtype))
    assert out.reward.tolist() == [1, 101, 201]


def test_floats_keep_64_bits_where_jax_has_them(ordered: bool) -> None:
    with shoal.Pool(SpaceEnv, 2, backend="serial", env_kwargs={"observation_space": SPACES["tuple"]}) as pool:
        first = jax.tree.map(np.array, pool.reset(seed=1).obs)
        with jax.enable_x64(True):
            binding = bind(pool, ordered=ordered)
            handle, obs = jit(binding.reset)(binding.handle, 1)
            assert [leaf.dtype for leaf in obs] == [np.int64, np.float64]
            assert_same(obs, first)
            _, out = jit(binding.step)(handle, jnp.zeros(2, int))
            assert out.env_id.dtype == np.int64
        binding = bind(pool, ordered=ordered)
        _, obs = jit(binding.reset)(binding.handle, 1)
        assert [leaf.dtype for leaf in obs] == [np.int32, np.float32]


def test_a_vector_env_of_make_will_do(ordered: bool) -> None:
    envs = shoal.make(CountEnv, 3, backend="serial")
    handle, _, _, step = binding = bind(envs, ordered=ordered)
    handle, _ = binding.reset(handle, seed=4)
    handle, out = step(handle, jnp.zeros(3, int))
    assert out.obs.tolist() == [[4, 0, 1], [5, 0, 1], [6, 0, 1]]
    envs.close()


# ---- partial batches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_recv_gives_batches_of_the_pools_size(backend: Any, ordered: bool) -> None:
    with shoal.Pool(
        CountEnv, 7, backend=backend, num_workers=1 if backend == "serial" else 3, batch_size=3,
        env_kwargs={"length": 1000},
    ) as pool:  # fmt: skip
        handle, recv, send, _ = bind(pool, ordered=ordered)
        pool.async_reset(seed=10)

        @jit
        def turns(handle: Any) -> Any:
            def turn(handle: Any, _: Any) -> Any:
                handle, out = recv(handle)
                return send(handle, out.env_id % 4, out.env_id), out

            return jax.lax.scan(turn, handle, length=20)

        handle, out = turns(handle)
        handle, more = turns(handle)
        assert out.obs.shape == (20, 3, 3)
        seen = dict.fromkeys(range(7), 0)
        for ids, obs, reward in zip(
            np.concatenate([out.env_id, more.env_id]), np.concatenate([out.obs, more.obs]),
            np.concatenate([out.reward, more.reward]), strict=True,
        ):  # fmt: skip
            assert sorted(set(ids.tolist())) == ids.tolist()
            for env_id, row, gain in zip(ids.tolist(), obs.tolist(), reward.tolist(), strict=True):
                assert row == [10 + env_id, 0, seen[env_id]]
                assert gain == (seen[env_id] + 100 * (env_id % 4) if seen[env_id] else 0)
                seen[env_id] += 1
        assert sum(seen.values()) == 120


def test_send_to_all_and_reset_of_some(counting: Any) -> None:
    _, binding = counting
    handle, recv, send, step = binding

    @jit
    def play(handle: Any) -> Any:
        handle = send(handle, jnp.array([0, 1, 2]))
        handle, out = recv(handle)
        handle, obs = binding.reset(handle, env_id=jnp.array([2, 0]), seed=jnp.array([50, 60]))
        handle, more = step(handle, jnp.array([0, 0, 0]))
        return handle, out, obs, more

    handle, out, obs, more = play(handle)
    assert int(handle) == 4
    assert out.reward.tolist() == [1, 101, 201]
    assert obs.tolist() == [[50, 0, 0], [60, 0, 0]]
    assert more.obs.tolist() == [[60, 0, 1], [1, 0, 2], [50, 0, 1]]


# ---- order ---------------------------------------------------------------------------------------------------------


def test_steps_whose_results_nobody_uses_are_made(counting: Any) -> None:
    pool, (handle, _, _, step) = counting

    @jit
    def twice(handle: Any) -> Any:
        handle, _ = step(handle, jnp.zeros(3, int))
        step(handle, jnp.zeros(3, int))
        return 5

    assert twice(handle) == 5
    assert counts(pool) == [2, 2, 2]


def test_a_scan_whose_results_nobody_uses_is_made(counting: Any) -> None:
    pool, (handle, _, _, step) = counting

    @jit
    def idle(handle: Any) -> Any:
        jax.lax.scan(lambda h, _: (step(h, jnp.zeros(3, int))[0], None), handle, length=6)

    idle(handle)
    assert counts(pool) == [6, 6, 6]


def test_equal_steps_are_not_made_one_and_keep_the_programs_order() -> None:
    """Also with one handle, where JAX keeps the order: its compiler turns calls without such a bond around."""
    with shoal.Pool(CountEnv, 3, backend="serial", env_kwargs={"length": 1000}) as pool:
        pool.reset(seed=0)
        handle, _, _, step = bind(pool, ordered=True)
        play = jit(lambda h: [step(h, jnp.full(3, i % 3))[1].reward[0] for i in range(12)])
        assert [float(reward) for reward in play(handle)] == [i + 1 + 100.0 * (i % 3) for i in range(12)]


def test_a_handle_that_was_used_is_refused_where_it_keeps_the_order() -> None:
    with shoal.Pool(CountEnv, 3, backend="serial", env_kwargs={"length": 1000}) as pool:
        pool.reset(seed=0)
        first, _, _, step = binding = bind(pool)
        zeros = jnp.zeros(3, int)
        handle, _ = jit(step)(first, zeros)
        with pytest.raises(shoal.errors.BadCall, match="give each call the handle that the one before it returned"):
            jit(step)(first, zeros)
        assert counts(pool) == [1, 1, 1]
        handle, _ = jit(step)(handle, zeros)
        with pytest.raises(shoal.errors.BadCall, match="handle"):
            jit(lambda h: (step(h, zeros), step(h, zeros)))(handle)
        handle, obs = jit(binding.reset)(first, 5)  # any will do
        assert obs.tolist() == [[5, 0, 0], [6, 0, 0], [7, 0, 0]]
        assert jit(step)(handle, zeros)[1].reward.tolist() == [1, 1, 1]


def test_the_handle_alone_keeps_the_order(counting: Any) -> None:
    _, (handle, _, _, step) = counting

    @jit
    def play(handle: Any) -> Any:
        rewards = []
        for i in range(12):
            handle, out = step(handle, jnp.full(3, i % 3))
            rewards.append(out.reward[0])
        return handle, jnp.stack(rewards)

    handle, first = play(handle)
    handle, second = play(handle)
    assert int(handle) == 24
    assert [*first.tolist(), *second.tolist()] == [i + 1 + 100.0 * (i % 12 % 3) for i in range(24)]


def test_every_kind_of_loop(counting: Any) -> None:
    pool, (handle, _, _, step) = counting
    zeros = jnp.zeros(3, jnp.int32)

    @jit
    def loops(handle: Any, skip: Any) -> Any:
        handle = jax.lax.fori_loop(0, 4, lambda i, h: step(h, zeros)[0], handle)
        handle, last = jax.lax.while_loop(
            lambda state: state[1] < 9, lambda state: (lambda h, out: (h, out.reward[0]))(*step(state[0], zeros)),
            (handle, jnp.float32(0)),
        )  # fmt: skip
        handle, then = jax.lax.cond(
            skip, lambda h: (h, last), lambda h: (lambda h, out: (h, out.reward[0]))(*step(h, zeros)), handle
        )
        return handle, last, then

    handle, last, then = loops(handle, False)
    assert (int(handle), float(last), float(then)) == (10, 9, 10)
    assert counts(pool) == [10, 10, 10]
    pool.reset(seed=0)
    loops(handle, True)
    assert counts(pool) == [9, 9, 9]


def test_calls_that_follow_each_other_without_waiting(counting: Any) -> None:
    _, (handle, _, _, step) = counting
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ x), x))

    @jax.jit
    def play(handle: Any, x: Any) -> Any:
        handle, out = step(handle, jnp.zeros(3, int) + (x[0, 0] > 2))
        return handle, out.reward[0]

    x, rewards = jnp.ones((200, 200)), []
    for _ in range(10):
        x = work(x)
        handle, reward = play(handle, x)
        rewards.append(reward)
    assert [float(reward) for reward in rewards] == list(range(1, 11))


# ---- transformations -----------------------------------------------------------------------------------------------


def test_vmap_is_refused_with_a_sentence(counting: Any) -> None:
    pool, binding = counting
    handle, recv, send, step = binding
    actions = jnp.zeros((2, 3), int)

    def scanned(action: Any) -> Any:
        return jax.lax.scan(lambda h, _: step(h, action), handle, length=4)

    for mapped in (
        lambda: jax.vmap(step, (None, 0))(handle, actions),
        lambda: jax.vmap(step)(jnp.zeros(2, jnp.uint32), actions),
        lambda: jit(jax.vmap(step, (None, 0)))(handle, actions),
        lambda: jax.vmap(jax.jit(step), (None, 0))(handle, actions),
        lambda: jax.vmap(scanned)(actions),
        lambda: jit(jax.vmap(scanned))(actions),
        lambda: jax.vmap(send, (None, 0))(handle, actions),
        lambda: jax.vmap(lambda h: recv(h)[1])(jnp.zeros(2, jnp.uint32)),
        lambda: jax.vmap(lambda s: binding.reset(handle, s))(jnp.arange(2)),
    ):
        with pytest.raises(shoal.errors.BadCall, match=r"vmap .* make the pool larger .* num_envs is the batch"):
            mapped()
    assert counts(pool) == [0, 0, 0]


def test_vmap_beside_the_envs_is_fine(counting: Any) -> None:
    _, (handle, _, _, step) = counting
    out = jit(jax.vmap(lambda x: x * step(handle, jnp.ones(3, int))[1].reward))(jnp.arange(2.0))
    assert out.tolist() == [[0] * 3, [101] * 3]


def test_no_gradient_goes_through_the_envs(ordered: bool) -> None:
    with shoal.Pool(FloatEnv, 2, backend="serial") as pool:
        pool.reset(seed=0)
        handle, _, _, step = bind(pool, ordered=ordered)

        def loss(weight: Any) -> Any:
            def one(carry: Any, _: Any) -> Any:
                handle, obs = carry
                handle, out = step(handle, weight * jnp.ones((2, 2)) + obs * 0)
                return (handle, out.obs), (out.reward + weight * out.reward).mean()

            (_, obs), values = jax.lax.scan(one, (handle, jnp.zeros((2, 2))), length=3)
            return values.sum() + obs.sum()

        value, gradient = jit(jax.value_and_grad(loss))(2.0)
        assert value == 3 * (4 + 2 * 4) + 4 * 3 * 2
        assert gradient == 3 * 4  # of `weight * reward`, with rewards as they are

        bindings = []

        def once(weight: Any) -> Any:
            bindings.append(bind(pool, ordered=ordered))  # a handle is for one call
            return bindings[-1].step(bindings[-1].handle, jnp.full((2, 2), weight))[1].reward

        assert jit(jax.grad(lambda weight: once(weight).sum()))(1.0) == 0
        assert jax.grad(lambda weight: once(weight).sum())(1.0) == 0
        _, tangent = jax.jvp(once, (1.0,), (1.0,))
        assert tangent.tolist() == [0, 0]


def test_a_policy_gradient_through_a_scan(counting: Any) -> None:
    pool, (handle, _, _, step) = counting

    def loss(weights: Any, handle: Any, key: Any) -> Any:
        def one(carry: Any, key: Any) -> Any:
            handle, obs = carry
            logits = jnp.tanh(obs.astype(jnp.float32)) @ weights
            action = jax.random.categorical(key, logits)
            chance = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
            handle, out = step(handle, action)
            return (handle, out.obs), -(chance * out.reward).mean()

        (handle, _), losses = jax.lax.scan(one, (handle, jnp.ones((3, 3), jnp.int32)), jax.random.split(key, 8))
        return losses.sum(), handle

    learn = jit(jax.value_and_grad(loss, has_aux=True))
    (_, handle), gradient = learn(jnp.zeros((3, 4)), handle, jax.random.key(0))
    assert counts(pool) == [8, 8, 8]  # once, not again for the gradient
    assert int(handle) == 8
    assert bool(jnp.isfinite(gradient).all())
    assert bool((gradient != 0).any())


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_an_envs_error_is_its_own_and_the_pool_goes_on(backend: Any, ordered: bool) -> None:
    with shoal.Pool(DeedEnv, 3, backend=backend, num_workers=1 if backend == "serial" else 2) as pool:
        pool.reset(seed=0)
        handle, _, _, step = bind(pool, ordered=ordered)
        rollout = jit(lambda h: jax.lax.scan(lambda h, _: step(h, jnp.zeros(3, int)), h, length=4))
        handle, _ = rollout(handle)
        for deed, kind in (("raise", ValueError), ("raise KeyError", KeyError)):
            pool.set_attr("deeds", {"step": deed}, env_ids=[1])
            with pytest.raises(kind) as caught:
                rollout(handle)
            assert isinstance(caught.value, shoal.errors.EnvError)
            assert (caught.value.env_id, caught.value.during) == (1, "step")
            assert caught.value.__cause__ is None
            pool.set_attr("deeds", {}, env_ids=[1])
            assert_usable(pool)
            pool.reset(seed=0)
            handle, out = rollout(handle)
            assert out.obs[:, :, 2].tolist() == [[i] * 3 for i in (1, 2, 3, 4)]


def test_an_error_that_comes_after_the_call_has_returned(ordered: bool) -> None:
    """JAX does not wait for inputs that are still computed, and a failed call's token would fail all later ones."""
    with shoal.Pool(DeedEnv, 3, backend="serial") as pool:
        pool.reset(seed=0)
        handle, _, _, step = bind(pool, ordered=ordered)
        late = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, x: jnp.tanh(x @ x), x))
        plain = jax.jit(lambda h, x: step(h, jnp.zeros(3, int) + (x[0, 0] > 2)))
        ours = jit(lambda h, x: step(h, jnp.zeros(3, int) + (x[0, 0] > 2)))
        x = jnp.ones((300, 300))
        handle, _ = plain(handle, x)
        handle, _ = ours(handle, x)
        jax.block_until_ready((late(x), handle))
        for _ in range(3):
            pool.set_attr("deeds", {"step": "raise"}, env_ids=[2])
            with pytest.raises(ValueError, match="bad joint"):
                ours(handle, late(x))
            pool.reset(seed=0)
            with pytest.raises(ValueError, match="bad joint"), own_errors():
                plain(handle, late(x))
            pool.set_attr("deeds", {}, env_ids=[2])
            pool.reset(seed=0)
            handle, out = plain(handle, x)
            assert out.reward.tolist() == [1, 1, 1]
            handle, out = ours(handle, late(x))
            assert out.reward.tolist() == [2, 2, 2]
            jax.effects_barrier()


def test_a_bad_action_says_so_and_nothing_moves(counting: Any) -> None:
    pool, (handle, _, send, step) = counting
    for bad in (jnp.array([0, 1, 7]), jnp.zeros(3), jnp.zeros((2,), int)):
        with pytest.raises(shoal.errors.BadAction):
            jit(step)(handle, bad)
    with pytest.raises(shoal.errors.BadAction, match="env"):
        jit(send)(handle, jnp.zeros(1, int), jnp.array([3]))
    assert counts(pool) == [0, 0, 0]
    assert jit(step)(handle, jnp.zeros(3, int))[1].reward.tolist() == [1, 1, 1]


def test_wrongly_nested_actions_are_refused_while_tracing(ordered: bool) -> None:
    kwargs = {"observation_space": SPACES["box"], "action_space": ACTIONS["nested"]}
    with shoal.Pool(SpaceEnv, 2, backend="serial", env_kwargs=kwargs) as pool:
        handle, _, _, step = bind(pool, ordered=ordered)
        with pytest.raises(shoal.errors.BadAction, match="nested as Dict"):
            jax.eval_shape(step, handle, {"move": jnp.zeros(2)})


def test_a_closed_pool_says_so(ordered: bool) -> None:
    pool = shoal.Pool(CountEnv, 2, backend="serial")
    handle, _, _, step = bind(pool, ordered=ordered)
    play = jit(step)
    pool.reset(seed=0)
    handle, _ = play(handle, jnp.zeros(2, int))
    pool.close()
    with pytest.raises(shoal.errors.PoolClosed):
        play(handle, jnp.zeros(2, int))


def test_recv_without_send_says_so(counting: Any) -> None:
    _, (handle, recv, _, _) = counting
    with pytest.raises(shoal.errors.NothingPending):
        jit(recv)(handle)


def test_errors_of_others_pass_as_they_are() -> None:
    with pytest.raises(ZeroDivisionError), own_errors():
        _ = 1 / 0

    def fail() -> Any:
        raise OSError("not an env")

    with pytest.raises(jax.errors.JaxRuntimeError, match="not an env"):
        jit(lambda: jax.experimental.io_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), ordered=True))()
    jax.effects_barrier()


def test_spaces_without_numbers_are_named() -> None:
    for what, space in (("observation", SPACES["text"]), ("action", EvenSpace())):
        kwargs = {"observation_space": SPACES["box"], f"{what}_space": spaces.Dict(inner=space)}
        with shoal.Pool(SpaceEnv, 1, backend="serial", env_kwargs=kwargs) as pool:
            with pytest.raises(shoal.errors.BadEnv, match=rf"{what} space\['inner'\]"):
                bind(pool)
    with pytest.raises(shoal.errors.BadEnv, match=r"expected a shoal\.Pool"):
        bind("CartPole-v1")


def run(script: str, timeout: float = 280) -> str:
    done = subprocess.run([sys.executable, "-c", script], cwd=TESTS, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_jax_one_sentence_says_what_to_do() -> None:
    said = run("""
import sys
sys.modules["jax"] = None
try:
    import shoal.graph.jax
except ImportError as error:
    print(error)
""")
    assert said == f"shoal.graph.jax needs JAX: {install('jax')}\n"


# ---- size ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
def test_large_arrays_on_one_core(ordered: bool) -> None:
    """Where callback and graph share a thread, nobody may wait for the other."""
    said = run(f"""
import os
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import jax, jax.numpy as jnp, numpy as np, shoal
from gymnasium import spaces
from envs import SpaceEnv
from shoal.graph.jax import bind, jit

kwargs = dict(
    observation_space=spaces.Box(0, 255, (84, 84, 4), np.uint8),
    action_space=spaces.Dict(big=spaces.Box(-1, 1, (84, 84, 3), np.float32), small=spaces.Discrete(2)),
)
with shoal.Pool(SpaceEnv, 8, backend="serial", env_kwargs=kwargs) as pool:
    binding = bind(pool, ordered={ordered})
    handle, obs = binding.reset(binding.handle, seed=0)

    def policy(weights, obs):
        hidden = jnp.tanh(obs.reshape(8, -1) / 255.0 @ weights)
        return dict(big=jnp.tanh(obs[..., :3] / 255.0 + hidden.mean()), small=(hidden[:, 0] > 0).astype(int))

    @jit
    def rollout(handle, obs, weights):
        def one(carry, _):
            handle, out = binding.step(carry[0], policy(weights, carry[1]))
            return (handle, out.obs), (out.reward, out.obs)
        return jax.lax.scan(one, (handle, obs), length=5)

    first = jax.random.normal(jax.random.key(0), (84 * 84 * 4, 64)) / 100
    late = jax.jit(lambda w: jax.lax.fori_loop(0, 9, lambda _, w: jnp.tanh(w @ (w.T @ w)), w))
    start = obs
    for _ in range(3):
        handle, _ = binding.reset(handle, seed=0)
        weights = late(first)  # still computed when the rollout is called, which then runs in JAX's own thread
        (handle, obs), (rewards, seen) = rollout(handle, start, weights)
    pool.reset(seed=0)
    obs = start
    for t in range(5):
        batch = pool.step(jax.tree.map(np.asarray, policy(weights, obs)))
        assert np.array_equal(batch.obs, seen[t]), t
        obs = jnp.array(batch.obs)
    print("done", rewards.shape)
""")
    assert said == "done (5, 8)\n"


# ---- jit -----------------------------------------------------------------------------------------------------------


def test_jit_is_jax_jit_to_whoever_uses_it(counting: Any) -> None:
    _, (handle, _, _, step) = counting

    @jit(static_argnames="times")
    def play(handle: Any, times: int = 2) -> Any:
        """Step a few times."""
        for _ in range(times):
            handle, out = step(handle, jnp.zeros(3, int))
        return handle, out.reward

    assert (play.__name__, play.__doc__) == ("play", "Step a few times.")
    handle, reward = play(handle)
    assert reward.tolist() == [2] * 3
    handle, reward = play(handle, times=3)
    assert reward.tolist() == [5] * 3
    assert "callback" in play.lower(handle).as_text()
    assert jax.eval_shape(play, handle)[1].shape == (3,)
    assert jit(lambda h: play(h)[1] + 1)(handle).tolist() == [8] * 3
    assert shoal.graph.own_errors is not own_errors


@pytest.mark.parametrize("seed", [3, np.int64(2**32 + 5), 2**62, [7, None, 2**40], np.array([1, 2, 2**33])])
def test_seeds_of_any_size_reach_the_envs(counting: Any, seed: Any) -> None:
    pool, binding = counting
    expected = pool.reset(seed=seed.tolist() if isinstance(seed, np.ndarray) else seed).obs.tolist()
    _, obs = binding.reset(binding.handle, seed=seed)
    for row, (found, given) in enumerate(zip(obs.tolist(), expected, strict=True)):
        if not (isinstance(seed, list) and seed[row] is None):
            assert found[0] == np.asarray(given[0]).astype(np.int32)
            assert found[1:] == [0, 0]
    _, obs = jit(binding.reset)(binding.handle, jnp.array([4, 5, 6]), jnp.array([0, 1, 2]))
    assert obs[:, 0].tolist() == [4, 5, 6]
    _, obs = binding.reset(binding.handle, env_id=1, seed=9)
    assert obs.tolist() == [[10, 0, 0]]
    with pytest.raises(shoal.errors.BadCall, match="seed"):
        binding.reset(binding.handle, seed=-1)


def test_a_refused_handle_stays_refused() -> None:
    with shoal.Pool(CountEnv, 2, backend="serial") as pool:
        pool.reset(seed=0)
        first, _, _, step = bind(pool)
        handle, _ = jit(step)(first, jnp.zeros(2, int))
        for _ in range(3):
            with pytest.raises(shoal.errors.BadCall, match="handle"):
                jit(step)(first, jnp.zeros(2, int))
        assert jit(step)(handle, jnp.zeros(2, int))[1].reward.tolist() == [2, 2]


def test_a_pool_is_collected_when_its_functions_are_gone(ordered: bool) -> None:
    pool = shoal.Pool(CountEnv, 2, backend="serial")
    handle, _, _, step = bind(pool, ordered=ordered)
    pool.reset(seed=0)
    play = jit(functools.partial(step, actions=jnp.zeros(2, int)))
    play(handle)
    kept = weakref.ref(pool)
    del pool, step, play, handle, _
    gc.collect()
    assert kept() is None


def test_the_example_learns() -> None:
    script = Path(__file__).parents[3] / "examples" / "ingraph_jax.py"
    done = subprocess.run([sys.executable, str(script), "--iterations=30"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    returns = [float(found) for found in re.findall(r"mean return ([\d.]+)", done.stdout)]
    assert returns[0] < 60
    assert returns[-1] > 150

"""Envs in PyTorch: the pool's own trajectories as tensors, whole graphs, every step once and in order."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import shoal
from envs import SPACES, CountEnv, FailEnv, SpaceEnv
from graph.plain_envs import PictureEnv, SteadyEnv, ThirdEnv
from repeats import repeat
from shoal import Pool

torch = pytest.importorskip("torch", reason="shoal.graph.torch needs PyTorch")

from shoal.graph.torch import TorchEnv, carriers  # noqa: E402
from shoal.graph.torch.env import _envs  # noqa: E402
from shoal.support.optional_dependencies import install  # noqa: E402

pytestmark = pytest.mark.timeout(600)  # compilers are slow on a busy machine

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., Any], backend: Any = "aot_eager") -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)


def counting(num_envs: int = 3, length: int = 1000, **options: Any) -> TorchEnv:
    options.setdefault("backend", "serial")
    return TorchEnv(Pool(CountEnv, num_envs, env_kwargs={"length": length}, **options))


def as_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: as_tensors(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(as_tensors(item) for item in value)
    return torch.from_numpy(np.asarray(value).copy())


def assert_same(found: Any, expected: Any) -> None:
    """Tensors as these arrays, in nesting, type, shape and value."""
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, tuple):
        assert isinstance(found, tuple)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found.numpy().dtype == expected.dtype
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found.numpy(), expected)


# ---- the same trajectories -----------------------------------------------------------------------------------

NUMBERS = {"a": spaces.Box(-1.0, 1.0, (2,), np.float32), "b": spaces.Discrete(3), "c": spaces.MultiBinary(2)}
NESTED = spaces.Dict(
    pair=spaces.Tuple(
        (spaces.Dict(z=spaces.MultiBinary(2), y=spaces.Discrete(4)), spaces.Box(0.0, 1.0, (), np.float64))
    ),
    image=spaces.Box(0, 255, (4, 5, 3), np.uint8),
    flags=spaces.Box(0, 1, (3,), np.bool_),
)
OBSERVATIONS = {
    **{name: SPACES[name] for name in ("box", "box 0-d", "box float64", "box bool", "image", "box of nothing")},
    **{name: SPACES[name] for name in ("discrete", "box float16", "box int8", "tuple", "deep", "empty dict")},
    "nested": NESTED,
}
SIZES = [("serial", 1, 1), ("serial", 7, 1), ("processes", 1, 1), ("processes", 7, 3)]


def assert_same_trajectories(make_env: Any, backend: str, num_envs: int, workers: int, steps: int = 12) -> None:
    options: dict[str, Any] = {"backend": backend, "num_workers": workers}
    with Pool(make_env, num_envs, **options) as pool, TorchEnv(Pool(make_env, num_envs, copy=True, **options)) as env:
        pool.action_space.seed(5)
        assert_same(env.reset(seed=3), pool.reset(seed=3).obs)
        for _ in range(steps):
            actions = pool.action_space.sample()
            expected = pool.step(actions)
            found = env.step(as_tensors(actions))
            assert_same(found.obs, expected.obs)
            assert_same(found.reward, expected.reward.astype(np.float32))
            assert_same(found.terminated, expected.terminated)
            assert_same(found.truncated, expected.truncated)
            assert_same(found.done, expected.done)


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_any_observations_are_those_of_the_pool(name: str) -> None:
    assert_same_trajectories(lambda: SpaceEnv(OBSERVATIONS[name]), "serial", 3, 1)


@pytest.mark.parametrize(("backend", "num_envs", "workers"), SIZES)
def test_any_number_of_envs_and_workers_gives_the_trajectories_of_the_pool(
    backend: str, num_envs: int, workers: int
) -> None:
    assert_same_trajectories(lambda: SpaceEnv(NESTED, spaces.Dict(NUMBERS)), backend, num_envs, workers)


@pytest.mark.parametrize(
    "action_space",
    [spaces.Box(-1.0, 1.0, (), np.float32), spaces.Tuple(tuple(NUMBERS.values())), SPACES["discrete start"], NESTED],
    ids=["0-d", "tuple", "discrete start", "nested"],
)
def test_any_actions_reach_the_envs(action_space: Any) -> None:
    assert_same_trajectories(lambda: SpaceEnv(SPACES["box"], action_space), "serial", 3, 1)


def test_an_int32_action_is_good_for_an_int64_discrete() -> None:
    with counting() as env:
        env.reset(seed=0)
        step = env.step(torch.tensor([0, 1, 2], dtype=torch.int32))
        assert step.reward.tolist() == [1, 101, 201]


def test_a_pool_that_lends_views_gives_tensors_of_their_own() -> None:
    with counting(copy=False) as env:
        first = env.reset(seed=4)
        kept = [first, *[env.step(torch.zeros(3, dtype=torch.int64)).obs for _ in range(6)]]
        assert [obs[1].tolist() for obs in kept] == [[5, 0, n] for n in range(7)]


def test_a_vector_env_will_do() -> None:
    envs = shoal.make(CountEnv, 2, backend="serial")
    env = TorchEnv(envs, device="cpu")
    assert (env.num_envs, env.batch_size, env.pool) == (2, 2, envs.pool)
    assert (env.single_observation_space, env.action_space) == (envs.single_observation_space, envs.action_space)
    assert (env.observation_space, env.single_action_space) == (envs.observation_space, envs.single_action_space)
    env.reset()
    env.close()
    env.close()
    assert envs.pool.closed


# ---- reset, send and recv ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
def test_reset_of_some_envs_is_in_the_order_of_their_ids(wrap: Any) -> None:
    with counting(4) as env:
        assert env.reset(seed=10)[:, 0].tolist() == [10, 11, 12, 13]
        several = wrap(lambda ids: env.reset(seed=[7, 5, 6], env_ids=ids))
        assert several(torch.tensor([3, 0, 2]))[:, 0].tolist() == [7, 5, 6]
        one = wrap(lambda: env.reset(seed=20, env_ids=[2]))
        assert one()[:, 0].tolist() == [22]
        assert env.step(torch.zeros(4, dtype=torch.int64)).obs[:, 0].tolist() == [5, 11, 22, 7]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_send_and_recv_in_one_graph(backend: str) -> None:
    with counting(5, batch_size=2, order="fifo") as env:

        def two_batches(ids: Any) -> Any:
            env.send(ids % 4, ids)
            first, second = env.recv(), env.recv()
            return first, second, first.done

        env.reset(seed=30)
        first, second, done = compiled(two_batches, backend)(torch.tensor([0, 1, 2, 3]))
        assert (first.env_id.tolist(), second.env_id.tolist()) == ([0, 1], [2, 3])
        assert first.env_id.dtype == torch.int64
        assert second.obs.tolist() == [[32, 0, 1], [33, 0, 1]]
        assert torch.cat([first.reward, second.reward]).tolist() == [1, 101, 201, 301]
        assert done.tolist() == [False, False]


def test_send_to_all_needs_no_ids() -> None:
    with counting(3, backend="processes", num_workers=2) as env:
        env.reset()
        env.send(torch.tensor([3, 2, 1]))
        assert env.recv().reward.tolist() == [301, 201, 101]


# ---- whole graphs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_steps_are_kept_in_order_and_none_is_dropped(backend: str) -> None:
    with counting(3) as env:

        def play(obs: Any) -> Any:
            env.step(obs[:, 2] * 0)  # nobody looks at this one
            first = env.step((obs[:, 2] + 1) % 4)
            for _ in range(8):
                env.step(first.obs[:, 2] * 0)
            return first.reward, env.step(first.obs[:, 2] % 4)

        graph = compiled(play, backend)
        obs = env.reset(seed=0)
        for round_number in range(3):  # the first one compiles, which steps no env
            begun = 11 * round_number
            first_reward, last = graph(obs)
            assert first_reward.tolist() == [begun + 2 + 100 * ((begun + 1) % 4)] * 3
            assert last.obs[:, 2].tolist() == [begun + 11] * 3
            assert last.reward.tolist() == [begun + 11 + 100 * ((begun + 2) % 4)] * 3
            obs = last.obs


def test_a_graph_of_steps_alone_returns_nothing_and_steps_all_the_same() -> None:
    with counting(1) as env:
        action = torch.zeros(1, dtype=torch.int64)

        def play() -> None:
            env.step(action)
            env.step(action)

        env.reset()
        graph = compiled(play)
        graph()
        graph()
        assert env.step(action).obs[0, 2] == 5


class Policy(torch.nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(inputs, 16), torch.nn.Tanh(), torch.nn.Linear(16, outputs))

    def forward(self, obs: Any) -> Any:
        return self.layers(obs)


def cartpoles(num_envs: int = 5) -> TorchEnv:
    return TorchEnv(shoal.make("CartPole-v1", num_envs, backend="serial"))


def reinforce_loss(policy: Any, env: TorchEnv, obs: Any, noise: Any) -> Any:
    """By the noise given, so that eager and compiled code act alike."""
    chances, rewards = [], []
    for t in range(3):
        logits = policy(obs)
        action = torch.argmax(logits.detach() + noise[t], dim=1)
        chances.append(torch.log_softmax(logits, dim=1).gather(1, action[:, None])[:, 0])
        step = env.step(action)
        obs = step.obs
        rewards.append(step.reward * ~step.done)
    future = torch.flip(torch.cumsum(torch.flip(torch.stack(rewards), [0]), 0), [0])
    return -(torch.stack(chances) * future).mean(), obs


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_policy_learns_through_the_graph_as_through_eager_code(backend: str) -> None:
    noise = torch.rand(3, 3, 5, 2, generator=torch.Generator().manual_seed(1))
    found = []
    for function in (reinforce_loss, compiled(reinforce_loss, backend)):
        policy = Policy(4, 2)
        optimizer = torch.optim.SGD(policy.parameters(), 0.1)
        with cartpoles() as env:
            obs, losses = env.reset(seed=2), []
            for part in noise:
                loss, obs = function(policy, env, obs, part)
                optimizer.zero_grad()
                loss.backward()  # a compiler may compute again what backward needs, but no step of an env
                optimizer.step()
                losses.append(loss.item())
            assert env._handle.tolist()[1] == 1 + 9
            found.append((losses, obs, [p.detach().clone() for p in policy.parameters()]))
    (losses, obs, weights), (their_losses, their_obs, their_weights) = found
    np.testing.assert_allclose(losses, their_losses, rtol=1e-4)
    torch.testing.assert_close(obs, their_obs, rtol=0, atol=0)
    for one, other in zip(weights, their_weights, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_policy_and_steps_without_gradients(mode: Any) -> None:
    policy = Policy(4, 2)
    with mode(), cartpoles() as env:

        def play(obs: Any) -> Any:
            obs = env.step(torch.argmax(policy(obs), 1)).obs
            return env.step(torch.argmax(policy(obs), 1)).obs

        eager = play(play(env.reset(seed=0)))
        graph = compiled(play)
        torch.testing.assert_close(graph(graph(env.reset(seed=0))), eager, rtol=0, atol=0)


def test_an_env_made_under_inference_mode_is_of_use_outside() -> None:
    with torch.inference_mode():
        env = counting(1)
    with env:
        env.reset()
        action = torch.zeros(1, dtype=torch.int64)
        assert compiled(lambda a: env.step(a).obs)(action)[0, 2] == 1
        assert env.step(action).obs[0, 2] == 2


def test_no_gradient_flows_through_an_env() -> None:
    with TorchEnv(Pool(lambda: SpaceEnv(SPACES["box"], NUMBERS["a"]), 2, backend="serial")) as env:
        env.reset(seed=0)
        action = torch.zeros(2, 2, requires_grad=True)
        for step in (env.step(action * 0.5), compiled(lambda a: env.step(a * 0.5))(action)):
            assert not step.obs.requires_grad
            assert not step.reward.requires_grad
        loss = (action * 2).sum() + env.step(action).reward.sum()
        loss.backward()
        assert action.grad.tolist() == [[2, 2], [2, 2]]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_nested_observations_and_actions_in_a_graph(backend: str) -> None:
    def make_env() -> Any:
        return SpaceEnv(NESTED, spaces.Dict(NUMBERS))

    with Pool(make_env, 3, backend="serial") as pool, TorchEnv(Pool(make_env, 3, backend="serial")) as env:

        def play(action: Any) -> Any:
            env.step(action)
            step = env.step({"c": action["c"], "b": action["b"], "a": action["a"] / 2})
            return step, step.obs["pair"][0]["y"] + 1

        action = pool.action_space.sample()
        env.reset(seed=1), pool.reset(seed=1)
        step, more = compiled(play, backend)(as_tensors(action))
        pool.step(action)
        expected = pool.step({**action, "a": action["a"] / 2})
        assert_same(step.obs, expected.obs)
        assert_same(step.reward, expected.reward.astype(np.float32))
        assert_same(more, expected.obs["pair"][0]["y"] + 1)


def test_two_envs_in_one_graph_do_not_mix() -> None:
    with counting(2) as one, TorchEnv(Pool(lambda: SpaceEnv(SPACES["box"]), 4, backend="serial")) as other:

        def play(action: Any) -> Any:
            first = one.step(action)
            away = other.step(torch.zeros(4, dtype=torch.int64))
            return first, away, one.step(first.obs[:, 2] % 4)

        one.reset(seed=7), other.reset(seed=1)
        first, away, second = compiled(play)(torch.tensor([2, 3]))
        assert first.reward.tolist() == [201, 301]
        assert second.obs.tolist() == [[7, 0, 2], [8, 0, 2]]
        assert away.obs.shape == (4, 3)
        assert (one._handle.tolist()[1], other._handle.tolist()[1]) == (3, 2)


def test_a_graph_serves_every_env_of_the_same_shape_and_is_compiled_once() -> None:
    from torch._dynamo.testing import CompileCounter  # of which nobody may have imported the module yet

    compiler = CompileCounter()
    graph = compiled(lambda env, action: env.step(action).obs, compiler)
    action = torch.zeros(2, dtype=torch.int64)
    with counting(2) as one, counting(2) as other, counting(3) as larger:
        one.reset(seed=1), other.reset(seed=11), larger.reset(seed=21)
        assert graph(one, action).tolist() == [[1, 0, 1], [2, 0, 1]]
        assert graph(other, action).tolist() == [[11, 0, 1], [12, 0, 1]]
        assert graph(one, action).tolist() == [[1, 0, 2], [2, 0, 2]]
        assert compiler.frame_count == 1
        assert graph(larger, torch.zeros(3, dtype=torch.int64))[:, 0].tolist() == [21, 22, 23]
        assert compiler.frame_count == 2


@pytest.mark.parametrize("needs_grad", [False, True])
def test_the_operators_pass_the_checks_of_torch(needs_grad: bool) -> None:
    with TorchEnv(Pool(SteadyEnv, 3, backend="serial")) as env:
        env.reset()
        action = torch.zeros(3, 2, requires_grad=needs_grad)
        ids = torch.tensor([2, 0])
        torch.library.opcheck(env._ops.step, (env._handle, env._layout, [action]))
        torch.library.opcheck(env._ops.reset, (env._handle, env._layout, 4, None, None))
        torch.library.opcheck(env._ops.reset, (env._handle, env._layout, None, [3, 4], ids))


# ---- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("workers", ["serial", "processes"])
def test_an_error_of_an_env_comes_as_it_is_and_the_pool_goes_on(backend: str | None, workers: Any) -> None:
    with TorchEnv(Pool(ThirdEnv, 3, backend=workers, num_workers=2 if workers == "processes" else None)) as env:

        def play(action: Any) -> Any:
            return env.step(action * 1), env.step(action * 0)

        graph = play if backend is None else compiled(play, backend)
        env.reset(seed=1)
        with pytest.raises(KeyError) as caught:
            graph(torch.tensor([0, 3, 0]))
        assert isinstance(caught.value, shoal.errors.EnvError)
        assert caught.value.env_id == 1
        assert "no such joint" in str(caught.value)
        assert env.reset(seed=5).tolist() == [[5, 0, 0], [6, 0, 0], [7, 0, 0]]
        first, second = graph(torch.tensor([0, 2, 0]))
        assert first.reward.tolist() == [1, 201, 1]
        assert second.obs[:, 2].tolist() == [2, 2, 2]


def test_an_error_in_a_graph_with_gradients_comes_as_it_is() -> None:
    policy = Policy(3, 4)
    with TorchEnv(Pool(ThirdEnv, 2, backend="serial")) as env:

        def play(obs: Any, shift: Any) -> Any:
            logits = policy(obs.float())
            step = env.step(torch.argmax(logits.detach(), 1) * 0 + shift)
            return logits.sum() * step.reward.sum()

        graph = compiled(play)
        obs = env.reset(seed=0)
        graph(obs, torch.tensor([0, 1])).backward()
        with pytest.raises(KeyError):
            graph(obs, torch.tensor([3, 1]))
        graph(env.reset(), torch.tensor([0, 1])).backward()


def test_an_error_of_a_reset_comes_as_it_is() -> None:
    with TorchEnv(Pool(FailEnv, 1, backend="serial", env_kwargs={"where": "reset"})) as env:
        for reset in (env.reset, compiled(env.reset)):
            with pytest.raises(ValueError, match="bad joint") as caught:
                reset()
            assert isinstance(caught.value, shoal.errors.EnvError)


@pytest.mark.parametrize(
    ("action", "say"),
    [
        (torch.zeros(2, dtype=torch.int64), "expected shape"),
        (torch.zeros(3), "expected type"),
        (torch.full((3,), 4), "expected 0 to 3"),
        (torch.zeros(3, dtype=torch.bfloat16), "bfloat16"),
    ],
    ids=["rows", "type", "range", "bfloat16"],
)
def test_a_bad_action_is_refused_and_nothing_moves(action: Any, say: str) -> None:
    with counting(3) as env:
        env.reset()
        for step in (env.step, compiled(env.step)):
            with pytest.raises(shoal.errors.BadAction, match=say):
                step(action)
        with pytest.raises(shoal.errors.BadAction, match=say):
            env.send(action)
        assert env.step(torch.zeros(3, dtype=torch.int64)).obs[:, 2].tolist() == [1, 1, 1]


def test_an_action_without_a_part_is_refused() -> None:
    with TorchEnv(Pool(lambda: SpaceEnv(SPACES["box"], spaces.Dict(NUMBERS)), 1, backend="serial")) as env:
        env.reset()
        with pytest.raises(shoal.errors.BadAction, match="'c'"):
            env.step({"a": torch.zeros(1, 2), "b": torch.zeros(1, dtype=torch.int64)})


def test_recv_without_send_says_so() -> None:
    with counting() as env:
        env.reset()
        with pytest.raises(shoal.errors.NothingPending):
            compiled(env.recv)()


def test_a_closed_env_in_an_old_graph_says_so() -> None:
    env = counting(1)
    env.reset()
    action = torch.zeros(1, dtype=torch.int64)
    graph = compiled(lambda a: env.step(a).obs)
    graph(action)
    env.close()
    for step in (graph, env.step):
        with pytest.raises(shoal.errors.PoolClosed, match="closed"):
            step(action)


def test_an_env_that_is_gone_is_missed_by_its_graph_and_by_nobody_else() -> None:
    env = counting(1)
    env.reset()
    number, step, layout = int(env._handle[0]), env._ops.step, env._layout
    handle, action = env._handle, torch.zeros(1, dtype=torch.int64)

    def play() -> Any:
        return step(handle, layout, [action])[0]

    graph = compiled(play)
    assert graph()[0, 2] == 1
    pool = env.pool
    assert number in graph_numbers()
    del env
    gc.collect()
    assert number not in graph_numbers()
    with pytest.raises(shoal.errors.PoolClosed, match="gone"):
        graph()
    assert not pool.closed  # it was not the TorchEnv's to close
    pool.close()


def graph_numbers() -> set[int]:
    return set(_envs)


# ---- memory --------------------------------------------------------------------------------------------------


def pictures(num_envs: int, backend: Any = "serial", **env_kwargs: Any) -> TorchEnv:
    workers = 3 if backend == "processes" else None
    return TorchEnv(shoal.make(PictureEnv, num_envs, backend=backend, num_workers=workers, env_kwargs=env_kwargs))


def in_slab(env: TorchEnv, tensor: Any) -> bool:
    whole = np.frombuffer(env.pool._slab.memory, np.uint8)
    begin = whole.ctypes.data
    return bool(begin <= tensor.data_ptr() < begin + whole.nbytes)


@pytest.mark.parametrize(("backend", "num_envs"), [("serial", 4), ("processes", 7)])
def test_large_observations_are_the_memory_that_the_envs_write(backend: str, num_envs: int) -> None:
    with pictures(num_envs, backend, size=50_000) as env:  # 200,000 bytes or more for all
        assert in_slab(env, env.reset())
        action = torch.zeros(num_envs, dtype=torch.int64)
        for count in range(1, 10):
            obs = env.step(action).obs
            assert in_slab(env, obs)
            assert (obs == count).all()
        graph = compiled(lambda a: env.step(a).obs)
        obs = graph(action)
        assert in_slab(env, obs)
        assert (obs == 10).all()


@pytest.mark.parametrize(("backend", "num_envs"), [("serial", 4), ("processes", 7)])
def test_observations_that_are_kept_never_change(backend: str, num_envs: int) -> None:
    env = pictures(num_envs, backend)
    action = torch.zeros(num_envs, dtype=torch.int64)
    graph = compiled(lambda a: env.step(a).obs)
    kept = [env.reset(), *[env.step(action).obs for _ in range(3)], *[graph(action) for _ in range(2)]]
    rows = [obs[1, 5:] for obs in kept[:3]]  # a part holds the whole
    del kept[:3]
    for _ in range(7):
        env.step(action)
        graph(action)
    assert [obs.unique().tolist() for obs in kept] == [[3], [4], [5]]
    assert [row.unique().tolist() for row in rows] == [[0], [1], [2]]
    newest = env.step(action).obs
    env.close()
    assert newest.unique().tolist() == [20]  # closing takes nobody's memory away


def test_what_is_done_to_an_observation_in_place_is_nobody_elses_business() -> None:
    with pictures(4) as env:
        action = torch.zeros(4, dtype=torch.int64)
        env.reset()
        for count in range(1, 8):
            obs = env.step(action).obs
            assert (obs == count).all()
            obs.fill_(200)


def test_frames_of_odd_sizes_are_aligned_as_compiled_code_expects() -> None:
    with pictures(3, size=50_001) as env:
        action = torch.zeros(3, dtype=torch.int64)
        env.reset()

        def play(action: Any) -> Any:
            first = env.step(action).obs
            second = env.step(action).obs
            return first, second, (first.float() + second.float()).mean()

        graph = compiled(play, "inductor")
        for begun in (0, 2, 4):
            first, second, mean = graph(action)
            assert (first.data_ptr() % 16, second.data_ptr() % 16) == (0, 0)
            assert (first == begun + 1).all()
            assert (second == begun + 2).all()
            assert float(mean) == pytest.approx(2 * begun + 3)


def test_actions_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with counting(3) as env:
        env.reset()
        seen: list[Any] = []
        exchange = env.pool.exchange

        def look(actions: Any) -> Any:
            seen.append(actions)
            return exchange(actions)

        monkeypatch.setattr(env.pool, "exchange", look)
        action = torch.tensor([1, 2, 3])
        assert env.step(action).reward.tolist() == [101, 201, 301]
        assert seen[0].ctypes.data == action.data_ptr()
        rows = torch.arange(6).reshape(3, 2) % 4
        assert env.step(rows[:, 1]).reward.tolist() == [102, 302, 102]  # not contiguous
        assert seen[1].ctypes.data == rows[:, 1].data_ptr()


# ---- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["text", "graph", "custom", "dict with objects"])
def test_spaces_without_arrays_are_named_at_once(name: str) -> None:
    for env in (SpaceEnv(SPACES[name]), SpaceEnv(SPACES["box"], SPACES[name])):
        with Pool(lambda env=env: env, 1, backend="serial") as pool:
            with pytest.raises(shoal.errors.BadEnv, match=r"(observation|action) space"):
                TorchEnv(pool)


def test_types_that_torch_lacks_are_named_at_once() -> None:
    wide = spaces.Dict(fine=SPACES["box"], wide=spaces.Box(0.0, 1.0, (2,), np.longdouble))
    with Pool(lambda: SpaceEnv(wide), 1, backend="serial") as pool:
        with pytest.raises(shoal.errors.BadEnv, match=r"observation space\['wide'\].*") as caught:
            TorchEnv(pool)
        assert str(np.dtype(np.longdouble)) in str(caught.value)


@pytest.mark.parametrize("device", ["meta", "nonsense", "mps", "cuda:99"])
def test_other_devices_are_refused(device: str) -> None:
    with Pool(CountEnv, 1, backend="serial") as pool:
        with pytest.raises(ValueError, match=device):
            TorchEnv(pool, device=device)
        TorchEnv(pool, device=torch.device("cpu"))


def test_what_is_no_pool_is_refused() -> None:
    with pytest.raises(shoal.errors.BadEnv, match=r"shoal\.Pool"):
        TorchEnv(CountEnv())


def test_without_torch_one_sentence_says_what_to_install() -> None:
    script = "import sys; sys.modules['torch'] = None; import shoal.graph; import shoal.graph.torch"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ImportError: shoal.graph.torch needs PyTorch: {install('torch')}"


# ---- pinned memory, without a device -------------------------------------------------------------------------


class PretendEvent:
    def __init__(self, log: list[Any], number: int):
        self.log, self.number = log, number

    def record(self, stream: Any) -> None:
        self.log.append(("record", self.number, stream))

    def synchronize(self) -> None:
        self.log.append(("wait", self.number))


class PretendCuda:
    """Ordinary memory, and events that are written down."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.events = 0
        self.made: list[Any] = []

    def pinned(self, shape: Any, dtype: Any) -> Any:
        self.made.append(torch.empty(tuple(shape), dtype=dtype))
        return self.made[-1]

    def event(self) -> Any:
        self.events += 1
        return PretendEvent(self.log, self.events)

    def stream(self) -> str:
        return "the stream"


def test_pinned_buffers_take_turns_and_are_waited_for_before_they_are_filled_again() -> None:
    cuda = PretendCuda()
    pinned = carriers.Pinned(torch.device("cpu"), 3, cuda)
    arrays = [np.arange(6, dtype=np.float32).reshape(3, 2), np.array([True, False, True])]
    tensors = [pinned.tensors([array + n if array.dtype != bool else array for array in arrays]) for n in range(5)]
    one, two = [("wait", 1), ("record", 1, "the stream")], [("wait", 2), ("record", 2, "the stream")]
    assert cuda.log == one + two + one + two + one
    assert len(cuda.made) == 4  # two sets of two
    for n, (numbers, flags) in enumerate(tensors):
        assert_same(numbers, arrays[0] + n)
        assert_same(flags, arrays[1])
        assert numbers.data_ptr() not in [buffer.data_ptr() for buffer in cuda.made]


def test_pinned_buffers_serve_fewer_rows_and_numbers_alone() -> None:
    cuda = PretendCuda()
    pinned = carriers.Pinned(torch.device("cpu"), 7, cuda)
    for rows in (7, 2, 5, 1, 7, 3):
        array = np.arange(4 * rows, dtype=np.int64).reshape(rows, 4)
        assert_same(pinned.tensors([array])[0], array)
    assert [tuple(buffer.shape) for buffer in cuda.made] == [(7, 4), (7, 4)]
    assert pinned.tensors([np.zeros((0, 4), np.int64)])[0].shape == (0, 4)


def test_actions_from_a_device_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = PretendCuda()
    pinned = carriers.Pinned(torch.device("cpu"), 2, cuda)
    actions = [torch.tensor([1, 2]), torch.tensor([[0.5], [1.5]], requires_grad=True)]
    assert_same(
        tuple(torch.from_numpy(a) for a in pinned.arrays(actions)), (np.array([1, 2]), np.float32([[0.5], [1.5]]))
    )
    assert cuda.log == []  # they were here already
    monkeypatch.setattr(carriers, "_is_on_host", lambda tensor: False)
    for _ in range(2):
        found = pinned.arrays(actions)
        assert_same(tuple(map(torch.from_numpy, found)), (np.array([1, 2]), np.float32([[0.5], [1.5]])))
    assert cuda.log == [("record", 3, "the stream"), ("wait", 3)] * 2
    assert len(cuda.made) == 2
    with pytest.raises(shoal.errors.BadAction, match="bfloat16"):
        pinned.arrays([torch.zeros(2, dtype=torch.bfloat16)])


def test_pinned_buffers_made_under_inference_mode_are_of_use_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carriers, "_is_on_host", lambda tensor: False)
    pinned = carriers.Pinned(torch.device("cpu"), 2, PretendCuda())
    array, action = np.array([1.0, 2.0]), torch.tensor([1, 2])
    with torch.inference_mode():
        for _ in range(2):
            pinned.tensors([array])
        pinned.arrays([action])
    assert_same(pinned.tensors([array])[0], array)
    assert pinned.arrays([action + 1])[0].tolist() == [2, 3]


def test_an_env_through_pinned_buffers_plays_as_ever() -> None:
    with counting(3) as env:
        env._carrier = carriers.Pinned(torch.device("cpu"), 3, PretendCuda())
        kept = [env.reset(seed=1)]
        graph_of_two = compiled(lambda a: (env.step(a).obs, env.step(a).obs))
        for _ in range(3):
            kept += graph_of_two(torch.zeros(3, dtype=torch.int64))
        assert [obs[2].tolist() for obs in kept] == [[3, 0, n] for n in range(7)]


# ---- the example ---------------------------------------------------------------------------------------------


LEARNING = repeat("a policy's weights through the graph are compared with those of eager code")


@pytest.mark.parametrize(
    ("how", "iterations"), [pytest.param("--no-compile", 75, marks=LEARNING), ("--backend=aot_eager", 2)]
)
def test_the_example_learns(how: str, iterations: int) -> None:
    script = Path(__file__).parents[2] / "examples" / "ingraph_torch.py"
    done = subprocess.run(
        [sys.executable, str(script), how, f"--iterations={iterations}"], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    means = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if "mean return" in line]
    assert means
    if iterations > 10:
        assert means[-1] > 2 * means[0]


def test_seeds_as_a_pool_takes_them() -> None:
    with TorchEnv(shoal.Pool(CountEnv, 3, backend="serial")) as env:
        assert env.reset(seed=np.int64(3))[:, 0].tolist() == [3, 4, 5]
        assert env.reset(seed=np.array([7, 8, 9]))[:, 0].tolist() == [7, 8, 9]
        for wrong in ([None, 1, 2], -1, 2**63, "seven", 1.5):
            with pytest.raises((ValueError, TypeError), match="seed"):
                env.reset(seed=wrong)

"""Envs in PyTorch on a CUDA device: pinned memory, one stream, and nobody waits for more than the actions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import shoal
from envs import SPACES, CountEnv, FailEnv, SpaceEnv
from shoal import Pool

torch = pytest.importorskip("torch", reason="shoal.graph.torch needs PyTorch")

from shoal.graph.torch import TorchEnv  # noqa: E402

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LONG = 400_000_000  # cycles: a fifth of a second and more
NESTED = spaces.Dict(
    pair=spaces.Tuple((spaces.Discrete(4), spaces.Box(0.0, 1.0, (), np.float64))),
    image=spaces.Box(0, 255, (4, 5, 3), np.uint8),
    flags=spaces.Box(0, 1, (3,), np.bool_),
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend, **options)


def counting(num_envs: int = 3, **options: Any) -> TorchEnv:
    options.setdefault("backend", "serial")
    return TorchEnv(Pool(CountEnv, num_envs, env_kwargs={"length": 1000}, **options), device="cuda")


def warm_up(env: TorchEnv) -> None:
    """Memory is taken, which may wait for the whole device, in the first calls on a stream."""
    for _ in range(3):
        env.reset()
        env.step(torch.zeros(env.num_envs, dtype=torch.int64, device="cuda"))
    torch.cuda.current_stream().synchronize()


def on_device(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: on_device(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(on_device(item) for item in value)
    return torch.from_numpy(np.asarray(value).copy()).cuda()


def assert_same(found: Any, expected: Any) -> None:
    """Tensors on the device as these arrays, in nesting, type, shape and value."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found.device.type == "cuda"
        here = found.cpu().numpy()
        assert here.dtype == expected.dtype
        assert here.shape == expected.shape
        np.testing.assert_array_equal(here, expected)


@pytest.mark.parametrize(("backend", "num_envs", "workers"), [("serial", 1, 1), ("processes", 7, 3)])
@pytest.mark.parametrize("name", ["box 0-d", "box float64", "image", "nested"])
def test_trajectories_are_those_of_the_pool(name: str, backend: Any, num_envs: int, workers: int) -> None:
    space = NESTED if name == "nested" else SPACES[name]

    def make_env() -> Any:
        return SpaceEnv(space, spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-1.0, 1.0, (2,), np.float32)))

    options: dict[str, Any] = {"backend": backend, "num_workers": workers}
    with Pool(make_env, num_envs, **options) as pool:
        with TorchEnv(Pool(make_env, num_envs, copy=True, **options), device="cuda") as env:
            assert env.device == torch.device("cuda", torch.cuda.current_device())
            pool.action_space.seed(5)
            assert_same(env.reset(seed=3), pool.reset(seed=3).obs)
            for _ in range(12):
                actions = pool.action_space.sample()
                found, expected = env.step(on_device(actions)), pool.step(actions)
                assert_same(found.obs, expected.obs)
                assert_same(found.reward, expected.reward.astype(np.float32))
                assert_same(found.terminated, expected.terminated)
                assert_same(found.truncated, expected.truncated)


def test_large_observations_that_are_kept_never_change() -> None:
    class PictureEnv(CountEnv):
        def __init__(self) -> None:
            super().__init__(length=1000)
            self.observation_space = spaces.Box(0, 255, (50_001,), np.uint8)

        def _observation(self) -> Any:
            return np.full(50_001, self.steps, np.uint8)

    with TorchEnv(shoal.make(PictureEnv, 4, backend="serial"), device="cuda") as env:
        action = torch.zeros(4, dtype=torch.int64, device="cuda")
        kept = [env.reset(), *[env.step(action).obs for _ in range(9)]]
        assert [obs.unique().tolist() for obs in kept] == [[n] for n in range(10)]


def test_the_buffers_are_pinned() -> None:
    with counting() as env:
        env.reset()
        env.step(torch.zeros(3, dtype=torch.int64, device="cuda"))
        carrier = env._carrier
        outward = [next(carrier._outward)[1] for _ in range(2)]
        buffers = [buffer for one in (*outward, carrier._inward) for buffer in one._made.values()]
        assert len(buffers) >= 6
        assert all(buffer.is_pinned() for buffer in buffers)


def test_observations_are_on_their_way_while_the_device_is_busy() -> None:
    stream = torch.cuda.Stream()
    with counting() as env, torch.cuda.stream(stream):
        warm_up(env)
        torch.cuda._sleep(LONG)
        obs = env.reset(seed=5)
        assert not stream.query(), "reset has waited for the device"
        doubled = obs * 2
        assert doubled[:, 0].tolist() == [10, 12, 14]


def test_buffers_are_not_filled_again_before_they_are_copied() -> None:
    with counting() as env:
        torch.cuda._sleep(LONG)
        kept = [env.reset(seed=seed) for seed in range(0, 60, 10)]
        assert [obs[:, 0].tolist() for obs in kept] == [[s, s + 1, s + 2] for s in range(0, 60, 10)]


def test_actions_are_waited_for_on_the_callers_stream_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with counting() as env:
        action, ones = torch.zeros(3, dtype=torch.int64, device="cuda"), torch.ones(3, dtype=torch.int64, device="cuda")
        other, own = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(own):
            warm_up(env)
            env.reset()
            (action + ones).tolist()
        torch.cuda.synchronize()

        def refuse(*_: Any) -> None:
            raise AssertionError("the whole device was waited for")

        monkeypatch.setattr(torch.cuda, "synchronize", refuse)
        with torch.cuda.stream(other):
            torch.cuda._sleep(20 * LONG)
        with torch.cuda.stream(own):
            torch.cuda._sleep(LONG // 8)
            action += ones  # late
            step = env.step(action)
            assert step.reward.tolist() == [101, 101, 101]
        assert not other.query(), "a stream of somebody else's was waited for"
        other.synchronize()


def test_actions_on_the_host_will_do() -> None:
    with counting() as env:
        env.reset()
        assert env.step(torch.tensor([1, 2, 3])).reward.tolist() == [101, 201, 301]
        assert env.step(torch.tensor([1, 2, 3], dtype=torch.int32, device="cuda")).reward.tolist() == [102, 202, 302]


def test_an_env_on_the_host_refuses_actions_on_the_device() -> None:
    with TorchEnv(Pool(CountEnv, 1, backend="serial")) as env:
        env.reset()
        with pytest.raises(shoal.errors.BadAction, match="cuda"):
            env.step(torch.zeros(1, dtype=torch.int64, device="cuda"))


def test_send_and_recv() -> None:
    with counting(5, batch_size=2, order="fifo") as env:
        env.reset(seed=30)
        ids = torch.tensor([0, 1, 2, 3], device="cuda")
        env.send(ids % 4, ids)
        first, second = env.recv(), env.recv()
        assert_same(first.env_id, np.array([0, 1]))
        assert_same(second.obs, np.array([[32, 0, 1], [33, 0, 1]]))
        assert_same(env.reset(seed=[7, 5], env_ids=torch.tensor([3, 0], device="cuda"))[:, 0], np.array([7, 5]))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_steps_in_a_graph_are_kept_in_order_and_none_is_dropped(backend: str) -> None:
    with counting(3) as env:

        def play(obs: Any) -> Any:
            env.step(obs[:, 2] * 0)
            first = env.step((obs[:, 2] + 1) % 4)
            for _ in range(8):
                env.step(first.obs[:, 2] * 0)
            return first.reward, env.step(first.obs[:, 2] % 4)

        graph = compiled(play, backend)
        obs = env.reset(seed=0)
        for round_number in range(3):
            begun = 11 * round_number
            first_reward, last = graph(obs)
            assert first_reward.tolist() == [begun + 2 + 100 * ((begun + 1) % 4)] * 3
            assert last.obs[:, 2].tolist() == [begun + 11] * 3
            obs = last.obs


def test_reduce_overhead_leaves_the_envs_out_of_cuda_graphs() -> None:
    with counting(3) as env:

        def play(obs: Any) -> Any:
            noise = torch.relu(obs.float() @ torch.ones(3, 4, device="cuda"))
            return env.step(noise.argmax(1) * 0).obs * 1

        graph = torch.compile(play, fullgraph=True, dynamic=False, mode="reduce-overhead")
        obs = env.reset(seed=0)
        for count in range(1, 6):
            obs = graph(obs).clone()
            assert obs[:, 2].tolist() == [count] * 3


def test_a_policy_learns_through_the_graph() -> None:
    policy = torch.nn.Linear(4, 2, device="cuda")
    with TorchEnv(shoal.make("CartPole-v1", 5, backend="serial"), device="cuda") as env:

        def loss(obs: Any) -> Any:
            total = 0.0
            for _ in range(4):
                logits = policy(obs)
                action = logits.detach().argmax(1)
                step = env.step(action)
                total = total - (torch.log_softmax(logits, 1).gather(1, action[:, None])[:, 0] * step.reward).mean()
                obs = step.obs
            return total, obs

        graph = compiled(loss, "inductor")
        obs = env.reset(seed=0)
        for _ in range(3):
            value, obs = graph(obs)
            value.backward()
        assert policy.weight.grad.abs().sum() > 0
        assert env._handle.tolist()[1] == 1 + 12


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_an_error_of_an_env_comes_as_it_is_and_the_pool_goes_on(backend: str | None) -> None:
    make_env = lambda: FailEnv(error=KeyError("no such joint"))  # noqa: E731
    with TorchEnv(Pool(make_env, 3, backend="serial"), device="cuda") as env:
        step = env.step if backend is None else compiled(env.step, backend)
        env.reset()
        with pytest.raises(KeyError) as caught:
            step(torch.tensor([0, 3, 0], device="cuda"))
        assert isinstance(caught.value, shoal.errors.EnvError)
        assert_same(env.reset(seed=5)[:, 0], np.array([5, 6, 7]))
        assert step(torch.tensor([0, 2, 0], device="cuda")).reward.tolist() == [1, 201, 1]


def test_a_default_device_changes_nothing() -> None:
    with torch.device("cuda"):
        env = counting(2)
        host_env = TorchEnv(Pool(CountEnv, 2, backend="serial"))
        with env, host_env:
            assert env.reset(seed=1, env_ids=[1]).tolist() == [[2, 0, 0]]
            assert host_env.reset(seed=1).device.type == "cpu"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_another_device_than_the_current_one() -> None:
    with TorchEnv(Pool(CountEnv, 2, backend="serial"), device="cuda:1") as env:
        env.reset(seed=1)
        step = env.step(torch.tensor([1, 2], device="cuda:1"))
        assert step.obs.device == torch.device("cuda", 1)
        assert step.reward.tolist() == [101, 201]

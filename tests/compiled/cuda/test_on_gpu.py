"""What only a real GPU has: memory that others see, streams, graphs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiled.cuda.kit import needs_gpu
from compiled.envs import CartPole, Nested
from shoal import compiled
from shoal.compiled import library
from shoal.compiled.cuda import CudaEnvs
from shoal.compiled.cuda.build import driver

pytestmark = [needs_gpu, pytest.mark.timeout(300)]


def pointer(array: Any) -> int:
    return int(array.__cuda_array_interface__["data"][0])


def test_torch_sees_the_same_memory() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    envs = CudaEnvs(CartPole, 5, seed=0)
    envs.reset()
    for array in (envs.obs, envs.reward, envs.terminated, envs.truncated):
        tensor = torch.from_dlpack(array)
        assert tensor.is_cuda
        assert tensor.data_ptr() == pointer(array)
        assert torch.as_tensor(array, device="cuda").data_ptr() == pointer(array)
    obs, reward = torch.from_dlpack(envs.obs), torch.from_dlpack(envs.reward)
    for _ in range(3):
        envs.step(torch.ones(5, dtype=torch.int64, device="cuda"))
        np.testing.assert_array_equal(obs.cpu().numpy(), np.asarray(envs.obs))
        np.testing.assert_array_equal(reward.cpu().numpy(), np.ones(5))


def test_jax_and_cupy_see_the_same_memory() -> None:
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    jax = pytest.importorskip("jax", reason="needs JAX")
    envs = CudaEnvs(Nested, 5, seed=0)
    envs.reset()
    for array in (*envs.obs.values(), envs.reward, envs.terminated):
        assert cupy.asarray(array).data.ptr == pointer(array)
        assert cupy.from_dlpack(array).data.ptr == pointer(array)
        if array.dtype != np.float64 and array.dtype != np.int64:  # which JAX does without by default
            assert jax.dlpack.from_dlpack(array).unsafe_buffer_pointer() == pointer(array)
            np.testing.assert_array_equal(np.asarray(jax.dlpack.from_dlpack(array)), np.asarray(array))


def test_actions_from_everybody_give_the_same() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    jax = pytest.importorskip("jax", reason="needs JAX")
    given = np.arange(300) % 2
    outcomes = []
    for make in (
        lambda: given,
        lambda: driver().to_device(given.astype(np.int8)),
        lambda: torch.as_tensor(given, device="cuda"),
        lambda: torch.as_tensor(given, device="cuda").bool(),
        lambda: cupy.asarray(given, cupy.int32),
        lambda: jax.numpy.asarray(given),
    ):
        envs = CudaEnvs(CartPole, 300, seed=0)
        envs.reset()
        for _ in range(12):
            envs.step(make())
        outcomes.append(np.asarray(envs.obs))
    for one in outcomes[1:]:
        np.testing.assert_array_equal(one, outcomes[0])


def test_a_step_waits_for_the_stream_of_its_actions() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    envs, other = CudaEnvs(CartPole, 100, seed=0), CudaEnvs(CartPole, 100, seed=0)
    envs.reset()
    other.reset()
    obs = torch.from_dlpack(envs.obs)
    actions = torch.zeros(100, dtype=torch.int64, device="cuda")
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    for t in range(10):
        with torch.cuda.stream(aside if t % 2 else torch.cuda.current_stream()):
            torch.cuda._sleep(20_000_000)  # whoever does not wait reads the old actions
            actions.fill_(t % 2)
            envs.step(actions)
            seen = obs.clone()
        torch.cuda.synchronize()
        other.step(np.full(100, t % 2))
        np.testing.assert_array_equal(seen.cpu().numpy(), np.asarray(other.obs))


def test_a_step_can_be_captured_with_the_policy_around_it() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    outcomes = []
    for captured in (False, True):
        envs = CudaEnvs(CartPole, 64, seed=0)
        envs.reset()
        obs, weights = torch.from_dlpack(envs.obs), torch.tensor([[0.0, 0.1, 1.0, 0.2]], device="cuda").T
        actions = torch.zeros(64, dtype=torch.int64, device="cuda")

        def body(envs: Any = envs, obs: Any = obs, actions: Any = actions, weights: Any = weights) -> None:
            actions.copy_((obs @ weights)[:, 0] > 0)
            envs.step(actions)

        for _ in range(3):
            body()
        torch.cuda.synchronize()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                body()
        for _ in range(50):
            graph.replay() if captured else body()
        torch.cuda.synchronize()
        outcomes.append(np.asarray(envs.obs))
    np.testing.assert_array_equal(*outcomes)


def test_graphs_are_kept_few_and_forgotten_when_params_change() -> None:
    envs, other = CudaEnvs(CartPole, 10, seed=0), CudaEnvs(CartPole, 10, seed=0)
    envs.reset()
    other.reset()
    batches = [driver().to_device(np.full(10, i % 2, np.int32)) for i in range(100)]
    for _ in range(3):
        for i, batch in enumerate(batches):
            envs.step(batch)
            other.step(np.full(10, i % 2))
        np.testing.assert_array_equal(np.asarray(envs.obs), np.asarray(other.obs))
    for one in (envs, other):
        one.set("gravity", 50.0)
    for _ in range(5):
        envs.step(batches[0])
        other.step(np.zeros(10, int))
    np.testing.assert_array_equal(np.asarray(envs.obs), np.asarray(other.obs))
    envs.close()


@pytest.mark.parametrize("name", library.ids())
def test_the_library_rolls_twice_alike(name: str) -> None:
    runs = []
    for _ in range(2):
        envs = CudaEnvs(name, 200, seed=1)
        envs.reset()
        record = envs.rollout("random", 50, seed=2)
        runs.append([np.asarray(record.obs), np.asarray(record.reward), np.asarray(record.began)])
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(one, other)


class Failing(compiled.Env):
    """Raises in its third step."""

    observation_space = CartPole.observation_space
    action_space = CartPole.action_space
    state = {"steps": int}

    @staticmethod
    def reset(state: Any, rng: Any) -> None:
        state.steps = 0

    @staticmethod
    def step(state: Any, action: Any, rng: Any) -> Any:
        state.steps += 1
        if state.steps == 3:
            raise ValueError("third step")
        return 0.0, False

    @staticmethod
    def observe(state: Any, obs: Any) -> None:
        obs[0] = state.steps


def test_exceptions_are_seen_in_debug_mode() -> None:
    envs = CudaEnvs(Failing, 2, debug=True)
    envs.reset()
    envs.step(np.zeros(2, int))
    envs.step(np.zeros(2, int))
    with pytest.raises(RuntimeError, match="Failing raised on the GPU; run it with backend"):
        envs.step(np.zeros(2, int))


def test_the_example_of_the_docs() -> None:
    pytest.importorskip("torch", reason="the example uses PyTorch")
    text = (Path(__file__).parents[3] / "docs" / "guides" / "gpu.md").read_text()
    (example,) = re.findall(r"```python cupy\n(.*?)```", text, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "[65, 4096, 4]" in done.stdout

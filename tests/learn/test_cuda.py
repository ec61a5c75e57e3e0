"""The way of envs on a GPU: on a real one, or eagerly in Numba's simulator (make test-gpu)."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
pytestmark = pytest.mark.skipif(
    not SIMULATED and not torch.cuda.is_available(), reason="needs a GPU, or NUMBA_ENABLE_CUDASIM=1"
)

from shoal.compiled.cuda import CudaEnvs  # noqa: E402
from shoal.learn import train  # noqa: E402
from shoal.learn.averages import Together  # noqa: E402
from shoal.learn.ways import Setup, build  # noqa: E402
from shoal.ranks import Ranks  # noqa: E402


@pytest.mark.parametrize("shared", [True, False])
def test_a_rollout_is_what_the_envs_answer(shared: bool) -> None:
    settings = {"steps": 12, "shared": shared}
    built = build(Setup("CartPole-v1", 3, settings, backend="cuda", seed=5), Together(Ranks(), None))
    built.way.begin_anew()
    built.way.envs.set("theta", np.array([0.2, 0.0, -0.2], np.float32))  # two of them end soon
    built.way._obs[:, 2] = torch.as_tensor([0.2, 0.0, -0.2])
    envs = CudaEnvs("CartPole-v1", 3, seed=5)
    envs.reset(seed=5)
    envs.set("theta", np.array([0.2, 0.0, -0.2], np.float32))
    built.way.roll()
    seen, ended = built.way.experience, np.zeros(3, bool)
    for t in range(12):
        envs.step(seen.actions[t, :, 0].cpu().numpy())
        assert np.array_equal(np.asarray(envs.obs), seen.obs[t + 1].cpu().numpy())
        assert np.array_equal(np.asarray(envs.reward), seen.reward[t].cpu().numpy())
        assert np.array_equal(seen.valid[t].cpu().numpy(), ~ended)
        assert np.array_equal(seen.began[t + 1].cpu().numpy(), ended)
        ended = np.asarray(envs.terminated) | np.asarray(envs.truncated)
        assert np.array_equal((seen.terminated | seen.truncated)[t].cpu().numpy(), ended)
    assert int(built.way.tally[0]) == int((seen.terminated | seen.truncated).sum()) >= 2
    if shared:
        outputs, values = built.policy.evaluate(seen.obs, seen.memory, seen.began)
        assert seen.outputs is not None
        assert seen.values is not None
        torch.testing.assert_close(seen.outputs, outputs[:-1].detach(), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(seen.values, values.detach(), atol=1e-3, rtol=1e-3)
    built.close()


def test_it_trains_and_goes_on(tmp_path) -> None:  # type: ignore[no-untyped-def]
    settings = {"backend": "cuda", "folder": tmp_path, "steps": 4, "minibatches": 2, "epochs": 1}
    first = train("CartPole-v1", 4, updates=2, **settings)
    second = train(folder=tmp_path, resume=True, updates=3)
    assert [row["steps"] for row in (*first.history, *second.history)] == [16, 32, 48]

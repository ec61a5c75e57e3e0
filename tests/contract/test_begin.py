"""`Pool.begin`, `Pool.exchange` of some envs and `check_reset="none"`, for dialects that reset envs themselves."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from conftest import BACKENDS

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_behind")]


class Heard(gymnasium.Env[Any, Any]):
    """Says in its info which arguments its reset got; ends its episode at once."""

    observation_space = spaces.Box(-100, 100, (1,), np.float64)
    action_space = spaces.Discrete(10)

    def reset(self, **kwargs: Any) -> Any:
        self.at = 0
        if kwargs.get("options") == {"fail": True}:
            raise ValueError("as asked")
        return np.zeros(1), {"got": sorted(kwargs)}

    def step(self, action: Any) -> Any:
        if action == 9:
            raise ValueError("nine")
        self.at = getattr(self, "at", 50) + 1
        return np.full(1, 10.0 * self.at + action), 1.0, True, False, {}


@pytest.fixture(params=BACKENDS)
def pool(request: pytest.FixtureRequest) -> Any:
    workers = {} if request.param == "serial" else {"num_workers": 2}
    options = {"autoreset": "disabled", "check_reset": "none", "copy": True, **workers}
    with shoal.Pool(Heard, 5, backend=request.param, **options) as pool:
        yield pool


def test_begin_resets_without_arguments(pool: Any) -> None:
    assert {env: info["got"] for env, info in pool.begin().infos.items()} == {env: [] for env in range(5)}
    ids = np.array([1, 4])
    ready = pool.begin(ids)
    assert ready.ids.tolist() == [1, 4]
    assert {env: info["got"] for env, info in ready.infos.items()} == {1: [], 4: []}
    assert "seed" in pool.reset([2]).info[2]["got"]


def test_some_are_stepped_and_the_others_are_not(pool: Any) -> None:
    pool.begin()
    for ids in ([0, 3], [2], [0, 1, 2, 3, 4], [0, 1]):
        ready = pool.exchange(np.array(ids), env_ids=np.array(ids))
        assert ready.ids.tolist() == ids
        assert (pool.data.take_obs(ready)[:, 0] % 10).tolist() == ids
    assert pool.get_attr("at") == [3, 2, 2, 2, 1]


def test_steps_before_a_reset_and_after_an_end_go_to_the_env(pool: Any) -> None:
    assert pool.step(np.zeros(5, np.int64)).obs[:, 0].tolist() == [510.0] * 5
    pool.begin()
    for at in (1, 2, 3):
        batch = pool.step(np.zeros(5, np.int64))
        assert batch.obs[:, 0].tolist() == [10.0 * at] * 5
        assert batch.terminated.all()


def test_begin_drops_a_step_that_is_pending(pool: Any) -> None:
    pool.begin()
    pool.send(np.arange(3), np.array([0, 1, 2]))
    ready = pool.begin(np.array([1, 3]))
    assert pool.data.take_obs(ready).tolist() == [[0.0], [0.0]]
    assert pool.pending.tolist() == [0, 2]
    while len(pool.done) < 2 and pool.plan.backend not in ("serial", "hybrid"):
        pass
    assert pool.wait_reset([0, 2]).ids.tolist() == [0, 2]


def test_an_error_among_some_leaves_none_pending(pool: Any) -> None:
    pool.begin()
    with pytest.raises(ValueError, match="nine"):
        pool.exchange(np.array([0, 9, 0]), env_ids=np.array([1, 2, 4]))
    assert len(pool.pending) == 0
    assert pool.exchange(np.array([1, 1]), env_ids=np.array([2, 3])).ids.tolist() == [2, 3]


def test_begin_uses_the_first_seed() -> None:
    with shoal.Pool("CartPole-v1", 2, backend="serial", autoreset="disabled", seed=5, copy=True) as pool:
        first = pool.data.take_obs(pool.begin())
        assert first[1].tolist() == gymnasium.make("CartPole-v1").reset(seed=6)[0].tolist()
        assert pool.data.take_obs(pool.begin()).tolist() != first.tolist()

"""The side channel under load: infos and options that are larger than a pipe must not make anybody wait for ever."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from envs import CountEnv

LARGE = 100_000  # more than a socket takes at once, together with a few others


class Talkative(gymnasium.Env[np.ndarray, np.int64]):
    """Says much in every info, and keeps the options of its reset."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(1000)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.kept = options
        return np.zeros(2, np.float32), {"first": np.zeros(LARGE, np.uint8)}

    def step(self, action: np.int64) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), float(action), False, False, {"frame": np.full(LARGE, action, np.uint8)}


@pytest.mark.parametrize("backend", ["threads", "processes", "hybrid"])
@pytest.mark.parametrize(("batch_size", "workers"), [(16, 1), (12, 1), (5, 2), (1, 3)])
def test_large_infos_with_partial_batches(backend: Any, batch_size: int, workers: int) -> None:
    with shoal.Pool(Talkative, 16, backend=backend, num_workers=workers, batch_size=batch_size) as pool:
        pool.async_reset(seed=0)
        expected: dict[int, int] = {}
        for turn in range(20):
            batch = pool.recv()
            for env_id in batch.env_id.tolist():
                info = batch.info[env_id]
                assert len(info) == 1
                value = next(iter(info.values()))
                assert value.shape == (LARGE,)
                assert (value == expected.get(env_id, 0)).all()
                expected[env_id] = turn
            pool.send(np.full(batch_size, turn), batch.env_id)


@pytest.mark.parametrize("backend", ["processes", "hybrid"])
def test_large_messages_in_both_directions_at_once(backend: Any) -> None:
    with shoal.Pool(Talkative, 16, backend=backend, num_workers=2) as pool:
        pool.reset(seed=0)
        pool.send(np.arange(16))
        # The steps' infos lie unread in the channel while the reset's options go the other way.
        batch = pool.reset(seed=1, options={"map": bytes(1_000_000)})
        assert set(batch.info) == set(range(16))
        assert all(set(info) == {"first"} for info in batch.info.values())
        assert pool.call("kept", env_ids=[15])[0] == {"map": bytes(1_000_000)}
        assert pool.step(np.arange(16)).info[7]["frame"][0] == 7


@pytest.mark.parametrize("where", ["sent", "received"])
def test_an_interrupt_that_cuts_a_message_closes_the_pool(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows would not be understood: nobody waits for it, and the pool says why."""
    pool = shoal.Pool(CountEnv, 2, backend="processes", num_workers=1)
    pool.reset(seed=0)
    name = "_wake" if where == "sent" else "receive"
    worker_type = type(pool._crew.workers[0])
    original = getattr(worker_type, name)

    def interrupted(self: Any, *args: Any) -> Any:
        if where == "received":
            with self._untorn():
                raise KeyboardInterrupt
        original(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker_type, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.call("pid")
    with pytest.raises(shoal.ShoalError, match="cut by an interrupt"):
        pool.call("pid", timeout=20)
    assert pool.closed
    pool.close()

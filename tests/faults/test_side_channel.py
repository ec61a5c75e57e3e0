"""The side channel under load: infos and options that are larger than a pipe must not make anybody wait for ever."""

from __future__ import annotations

import time
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
    worker_type = type(pool._workers[0])
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


class Sleepy(CountEnv):
    """Takes as long for a reset as its options say."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        time.sleep((options or {}).get("seconds", 0.0))
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("backend", ["threads", "processes", "hybrid"])
def test_a_request_that_comes_while_its_worker_reads_mail_for_another_is_heard(backend: Any) -> None:
    """A worker reads its mail before each reset, and finds what wakes it for other requests there as well."""
    with shoal.Pool(Sleepy, 6, backend=backend, num_workers=2, batch_size=1) as pool:
        pool.reset(seed=0)
        pool.async_reset([4, 5], options={"seconds": 0.3})
        time.sleep(0.1)  # it sleeps in the reset of env 4 now, and has yet to begin that of 5
        pool.send(np.array([1]), [3])
        assert {int(pool.recv(timeout=5).env_id[0]) for _ in range(3)} == {3, 4, 5}

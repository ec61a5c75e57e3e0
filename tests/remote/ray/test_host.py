"""What an actor of Ray does with the messages that reach it, without Ray: several calls at a time, in any order."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from envs import CountEnv
from faults.kit import eventually
from shoal import Pool
from shoal.remote import bell, transport
from shoal.remote.host import BlockHost
from shoal.remote.ray import transport as ray_transport
from shoal.remote.ray.link import TIMES, RayHost
from shoal.remote.ray.transport import RayOptions
from shoal.remote.transport import Deliver

pytestmark = pytest.mark.timeout(60)


class Link:
    """Calls `serve` in threads, as Ray does; of two messages in a row the second comes first, if a test says so."""

    swap = False

    def __init__(self, index: int, deliver: Deliver):
        self._actor = RayHost(BlockHost(f"post {index}"))
        threading.Thread(target=self._actor.work, daemon=True).start()
        self._deliver, self._calls = deliver, ThreadPoolExecutor(8)
        self._held: list[bytes] = []

    def post(self, data: bytes) -> None:
        if Link.swap and not self._held:
            self._held.append(data)
            return
        self._calls.submit(self._call, [data, *self._held])
        self._held.clear()

    def _call(self, messages: list[bytes]) -> None:
        """Hand them over in this order, and wait for none."""
        for data in messages:
            self._calls.submit(self._actor.serve, data).add_done_callback(self._answered)
            if data is not messages[-1]:
                eventually(lambda: self._actor._host._early)

    def _answered(self, future: Future[Any]) -> None:
        self._deliver(future.result())

    def peek(self) -> None:
        self._deliver(self._actor.peek())

    def kill(self) -> None:
        self._calls.shutdown(wait=False)


class Calls:
    """A transport of such links."""

    def __init__(self, options: dict[str, Any], num_envs: int, num_workers: int | None):
        self.num_workers, self.local_backend, self.local_workers = 1, options["local_backend"], 2

    def start(self, index: int, deliver: Deliver) -> Link:
        return Link(index, deliver)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("local", ["serial", "threads", "processes"])
def test_calls_that_overtake_each_other_are_all_answered(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transport.REMOTE, "ray", (__name__, "Calls"))
    with Pool(CountEnv, 4, backend="ray", batch_size=2, backend_options={"local_backend": local}) as pool:
        pool.async_reset(seed=0)
        pool.recv(timeout=10)
        pool.recv(timeout=10)
        monkeypatch.setattr(Link, "swap", True)
        for turn in range(1, 5):
            pool.send([0, 0], [0, 1])
            pool.send([0, 0], [2, 3])
            batches = [pool.recv(timeout=10) for _ in range(2)]
            assert sorted(np.concatenate([batch.env_id for batch in batches]).tolist()) == [0, 1, 2, 3]
            assert {step for batch in batches for step in batch.obs[:, 2].tolist()} == {turn}
        monkeypatch.setattr(Link, "swap", False)


def test_who_waits_looks_often_when_something_is_about_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(bell.time, "perf_counter", lambda: now)
    pace = bell.PollBackoff(TIMES)
    for _ in range(bell.MEMORY):
        pace.restart()
        now += 0.005
        pace.came()
    pace.restart()
    assert pace.sleep == bell.SELDOM, "the last waits were longer"
    now += 0.0035
    assert pace.sleep == pytest.approx(0.001)
    now += 0.00101
    assert pace.sleep == 0.0, "about now"
    now += 0.001
    assert pace.sleep == pytest.approx(0.0001, rel=0.1), "a tenth of the time for which it is late"
    now += 60.0
    assert pace.sleep == pace.times.longest
    pace.came()
    assert pace.sleep == 0.0, "others may follow at once"


NONSENSE: dict[str, Any] = {
    "address": 5, "resources": 5, "labels": "kind", "runtime_env": 3, "num_cpus": "many", "local_backend": ["serial"],
}  # fmt: skip


@pytest.mark.parametrize("name", NONSENSE)
def test_options_that_make_no_sense(name: str) -> None:
    with pytest.raises(ValueError, match=f"backend_options: {name}: expected"):
        transport.checked(RayOptions, {name: NONSENSE[name]})


def test_resources_are_numbers() -> None:
    with pytest.raises(ValueError, match="resources: simulator: expected a number"):
        transport.checked(RayOptions, {"resources": {"simulator": "one"}})
    with pytest.raises(ValueError, match="found 3"):
        transport.checked(RayOptions, {3: 4})  # type: ignore[dict-item]


class FakeRay:
    """As much of Ray as knows whether it is connected, and where."""

    def __init__(self) -> None:
        self.address, self.started = "", 0

    def is_initialized(self) -> bool:
        return bool(self.address)

    def init(self, **_: Any) -> None:
        self.started += 1
        self.address = f"cluster:{self.started}"

    def shutdown(self) -> None:
        self.address = ""

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(gcs_address=self.address)


def test_only_the_cluster_that_we_have_started_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay()
    monkeypatch.setattr(ray_transport, "import_ray", lambda: fake)
    cluster = ray_transport.RayCluster()
    _, ours = cluster.enter(None)
    cluster.enter(None)
    cluster.leave(ours)
    assert fake.is_initialized(), "somebody still uses it"
    fake.shutdown()
    fake.init()  # the caller's own
    _, theirs = cluster.enter(None)
    cluster.leave(ours)
    cluster.leave(theirs)
    assert fake.address == theirs
    fake.shutdown()
    _, again = cluster.enter(None)
    cluster.leave(again)
    assert not fake.is_initialized()

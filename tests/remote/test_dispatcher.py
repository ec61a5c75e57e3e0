"""Far workers over a transport within this process: the same results as any backend, whatever the network does."""

from __future__ import annotations

import functools
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from compiled.envs import CartPole
from envs import INFO_KINDS, CountEnv, FailEnv, GateEnv, InfoEnv, SpaceEnv
from faults.kit import DeedEnv, eventually
from remote import loopback
from remote.kit import history
from shoal import Pool
from shoal.dialects import puffer
from shoal.native import counters
from shoal.remote import transport
from shoal.remote.wire import Wire, unpack_words

pytestmark = pytest.mark.timeout(60)
ZEROS = np.zeros(7, np.int64)
LIMIT = 1.5  # seconds for a step; a busy machine may keep a healthy env waiting for one of them
MODES = ("next_step", "same_step", "disabled")
LOCAL = {
    "serial": {},
    "threads": {"local_backend": "threads", "local_workers": 2},
    "processes": {"local_backend": "processes", "local_workers": 2},
}
NESTED = spaces.Dict({"a": spaces.Tuple([spaces.Discrete(5), spaces.Text(4)]), "b": spaces.Box(-1, 1, ())})
SPACES = {
    "nested": (NESTED, NESTED),
    "image": (spaces.Box(0, 255, (16, 16, 3), np.uint8), spaces.Discrete(3)),
    "objects": (spaces.Sequence(spaces.Discrete(4)), spaces.Sequence(spaces.Discrete(4))),
    "float64": (spaces.Box(-1, 1, (2, 3), np.float64), spaces.MultiDiscrete([3, 4])),
}


@pytest.fixture(autouse=True)
def _loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(transport.REMOTE, "ray", ("remote.loopback", "LoopbackTransport"))


def pool_of(env: Any = CountEnv, num_envs: int | None = 7, num_workers: int = 3, **options: Any) -> Pool:
    return Pool(env, num_envs, backend="ray", num_workers=num_workers, **options)


# ---- the same as everybody else --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("num_envs", [1, 7])
def test_the_same_history_as_serial(num_envs: int, local: str, mode: Any) -> None:
    env = functools.partial(CountEnv, length=5)
    here = history(env, num_envs, backend="serial", autoreset=mode)
    there = history(env, num_envs, backend="ray", num_workers=3, backend_options=LOCAL[local], autoreset=mode)
    assert there == here


@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("local", LOCAL)
def test_the_same_for_all_kinds_of_spaces(kind: str, local: str) -> None:
    env = functools.partial(SpaceEnv, *SPACES[kind])
    here = history(env, 5, turns=12, backend="serial", autoreset="same_step")
    there = history(env, 5, turns=12, backend="ray", backend_options=LOCAL[local], autoreset="same_step")
    assert there == here


@pytest.mark.parametrize("network", ["swap", "twice"])
@pytest.mark.parametrize("local", LOCAL)
def test_messages_out_of_order_or_twice_change_nothing(network: str, local: str) -> None:
    env = functools.partial(CountEnv, length=5)
    options = {**LOCAL[local], network: True}
    here = history(env, 7, turns=25, backend="serial")
    assert history(env, 7, turns=25, backend="ray", num_workers=2, backend_options=options) == here
    assert not any(link.host._early for link in loopback.links), "nothing is kept of what came twice"


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_large_observations_in_frames_of_any_kind(copy: bool, flat: bool) -> None:
    space = spaces.Dict({"x": spaces.Box(0, 255, (80, 80), np.uint8), "y": spaces.Box(-1, 1, (3,))})
    env = functools.partial(SpaceEnv, space, spaces.Discrete(2))
    here = history(env, 4, turns=10, backend="serial", copy=copy, flat_rows=flat)
    assert history(env, 4, turns=10, backend="ray", copy=copy, flat_rows=flat) == here


def test_infos_of_every_kind() -> None:
    for kind in INFO_KINDS:
        env = functools.partial(InfoEnv, kind)
        assert history(env, 3, turns=12, backend="ray") == history(env, 3, turns=12, backend="serial")


def test_envs_with_several_lanes() -> None:
    env = functools.partial(gymnasium.make_vec, "CartPole-v1", 3, vectorization_mode="sync")
    here = history([env] * 3, None, turns=30, backend="serial", autoreset="next_step")
    assert history([env] * 3, None, turns=30, backend="ray", num_workers=2, autoreset="next_step") == here


@pytest.mark.timeout(300)  # compilers are slow on a busy machine
def test_hosts_that_step_compiled_envs() -> None:
    pytest.importorskip("numba", reason="compiled envs need Numba")
    here = history(CartPole, 7, turns=30, backend="compiled")
    options = {"local_backend": "compiled", "local_workers": 2}
    assert history(CartPole, 7, turns=30, backend="ray", num_workers=3, backend_options=options) == here
    with pool_of(CartPole, backend_options=options) as pool:
        pool.reset(seed=0)
        saved = pool.snapshot()
        first = pool.step(ZEROS).obs.copy()
        pool.restore(saved)
        assert pool.step(ZEROS).obs.tolist() == first.tolist()
    with pytest.raises(ValueError, match="of which none can be restarted alone"):
        pool_of(CartPole, backend_options=options, on_error="restart")


def test_snapshots_go_from_one_backend_to_another() -> None:
    env = functools.partial(CountEnv, length=6)
    with pool_of(env) as there, Pool(env, 7, backend="serial") as here:
        there.reset(seed=4)
        there.step(ZEROS)
        there.send(ZEROS)
        here.restore(there.snapshot())
        there.recv()
        here.recv()
        for _ in range(4):
            one, other = there.step(ZEROS), here.step(ZEROS)
            assert one.obs.tolist() == other.obs.tolist()
            assert one.episode_return.tolist() == other.episode_return.tolist()
        saved = here.snapshot()
        expected = [here.step(ZEROS) for _ in range(8)][-1]
        there.restore(saved)
        found = [there.step(ZEROS) for _ in range(8)][-1]
        assert found.obs.tolist() == expected.obs.tolist()
        assert found.episode_length.tolist() == expected.episode_length.tolist()


# ---- partial batches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", LOCAL)
def test_partial_batches_bring_every_lane_its_own(local: str) -> None:
    with pool_of(num_envs=8, num_workers=2, batch_size=3, backend_options=LOCAL[local]) as pool:
        pool.async_reset(seed=0)
        steps = np.full(8, -1)
        for _ in range(60):
            batch = pool.recv()
            steps[batch.env_id] += 1
            assert batch.obs[:, 0].tolist() == batch.env_id.tolist()
            assert batch.obs[:, 2].tolist() == (steps[batch.env_id] % 6).tolist()
            pool.send(np.zeros(len(batch.env_id), np.int64), batch.env_id)


def test_the_first_hosts_that_are_ready(gate: Path) -> None:
    env = functools.partial(GateEnv, gate)
    with pool_of(env, 4, 2, batch_size=2, backend_options={}) as pool:
        pool.async_reset(seed=0)
        for _ in range(2):
            pool.recv()
        pool.send([3, 0, 0, 0], [0, 1, 2, 3])
        for _ in range(3):
            batch = pool.recv()
            assert batch.env_id.tolist() == [2, 3]
            pool.send([0, 0], batch.env_id)
        gate.touch()
        assert sorted(pool.recv().env_id.tolist() + pool.recv().env_id.tolist()) == [0, 1, 2, 3]


# ---- commands and errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", LOCAL)
def test_calls_and_attributes(local: str) -> None:
    with pool_of(backend_options=LOCAL[local]) as pool:
        pool.reset(seed=0)
        pool.set_attr("value", list(range(7)))
        assert pool.get_attr("value") == list(range(7))
        assert pool.get_attr("value", [5, 1]) == [5, 1]
        assert pool.apply(lambda env, by: env.unwrapped.value * by, 3, env_ids=[6, 2]) == [18, 6]
        with pytest.raises(AttributeError, match="env 0 raised"):
            pool.call("nonsense")
        assert pool.step(ZEROS).obs[:, 2].tolist() == [1] * 7


@pytest.mark.parametrize("local", LOCAL)
def test_an_error_keeps_its_type_and_its_env(local: str) -> None:
    with pool_of(FailEnv, backend_options=LOCAL[local]) as pool:
        pool.reset(seed=0)
        with pytest.raises(ValueError, match="env 5 raised in step") as caught:
            pool.step([0, 0, 0, 0, 0, 3, 0])
        assert isinstance(caught.value, shoal.EnvError)
        assert caught.value.worker == 2
        assert "in step" in caught.value.remote_traceback
        assert pool.reset([5], seed=9).obs.tolist() == [[14, 0, 0]]


def test_an_error_in_a_constructor() -> None:
    def fail() -> Any:
        raise KeyError("no such fish")

    with pytest.raises(KeyError, match="env 3 raised in its constructor") as caught:
        pool_of([CountEnv] * 3 + [fail], None, 2)
    assert caught.value.env_id == 3
    assert all(link.killed for link in loopback.links)


def test_different_spaces_are_refused() -> None:
    other = functools.partial(SpaceEnv, spaces.Discrete(3), spaces.Discrete(2))
    with pytest.raises(shoal.SpaceMismatch, match="env 6"):
        pool_of([CountEnv] * 6 + [other], None)


# ---- losses ----------------------------------------------------------------------------------------------------


def test_a_lost_host_closes_the_pool_and_is_named() -> None:
    with pool_of() as pool:
        pool.reset(seed=0)
        loopback.links[1].lose()
        with pytest.raises(shoal.WorkerDied, match=r"worker 1 \(on node loop 1, .*envs 3 to 4\) was lost") as caught:
            pool.step(ZEROS)
        assert (caught.value.node, caught.value.env_ids) == ("loop 1", [3, 4])
        assert pool.closed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("local", LOCAL)
def test_a_lost_host_is_replaced(mode: Any, local: str) -> None:
    with pool_of(on_error="restart", autoreset=mode, backend_options=LOCAL[local]) as pool:
        pool.reset(seed=0)
        pool.step(ZEROS)
        loopback.links[1].lose()
        batch = pool.step(ZEROS)
        assert sorted(batch.info) == [3, 4]
        assert batch.info[4]["shoal_restart"]["cause"] == "died"
        assert "on node loop 1" in batch.info[4]["shoal_restart"]["message"]
        assert batch.truncated.tolist() == [False] * 3 + [True] * 2 + [False] * 2
        others = [0, 1, 2, 5, 6]
        assert batch.obs[others].tolist() == [[i, 0, 2] for i in others]
        last = [batch.final_obs[i].tolist() for i in (3, 4)] if mode == "same_step" else batch.obs[[3, 4]].tolist()
        assert last == [[3, 0, 1], [4, 0, 1]]
        seed = int(np.random.SeedSequence([4, 1]).generate_state(1)[0])
        if mode == "disabled":
            assert pool.reset([3, 4]).obs[1].tolist() == [seed, 0, 0]
        batch = pool.step(ZEROS)
        assert batch.obs[4, 0] == seed
        assert batch.obs[others, 2].tolist() == [3] * 5


def test_a_worker_process_of_a_host_dies() -> None:
    options = LOCAL["processes"]
    with pool_of(DeedEnv, 4, 2, on_error="restart", backend_options=options) as pool:
        pool.reset(seed=0)
        pool.set_attr("deeds", [{"step": "kill"}], [3])
        batch = pool.step(np.zeros(4, np.int64))
        assert sorted(batch.info) == [2, 3]
        assert "SIGKILL" in batch.info[3]["shoal_restart"]["message"]
        assert "running env 3" in batch.info[3]["shoal_restart"]["message"]


@pytest.mark.parametrize("deed", ["raise"])
def test_an_env_that_raises_is_rebuilt_by_its_host(deed: str) -> None:
    with pool_of(DeedEnv, 4, 2, on_error="restart") as pool:
        pool.reset(seed=0)
        pool.set_attr("deeds", [{"step": deed}], [3])
        batch = pool.step(np.zeros(4, np.int64))
        assert sorted(batch.info) == [3]
        assert batch.info[3]["shoal_restart"]["cause"] == "raised"
        assert len(loopback.links) == 2, "the host is still the same"


def test_an_env_that_takes_too_long_is_named(gate: Path) -> None:
    env = functools.partial(GateEnv, gate)
    with pool_of(env, 4, 2, step_timeout=LIMIT) as pool:
        pool.reset(seed=0)
        pool.send([0, 0, 0, 3])
        with pytest.raises(shoal.StepTimeout, match=r"envs \[3\] take longer"):
            pool.recv()
        gate.touch()
        assert pool.recv().obs[:, 2].tolist() == [1] * 4


def test_many_envs_may_take_longer_together() -> None:
    class Napping(CountEnv):
        def step(self, action: Any) -> Any:
            time.sleep(0.3 * LIMIT)
            return super().step(action)

    with pool_of(Napping, 6, 1, step_timeout=LIMIT) as pool:
        pool.reset(seed=0)
        assert pool.step(np.zeros(6, np.int64)).obs[:, 2].tolist() == [1] * 6


def test_many_envs_may_take_longer_together_beside_busy_neighbours() -> None:
    class Napping(CountEnv):
        def __init__(self, nap: float):
            super().__init__()
            self.nap = nap

        def step(self, action: Any) -> Any:
            time.sleep(self.nap)
            return super().step(action)

    slow, quick = functools.partial(Napping, 0.3 * LIMIT), functools.partial(Napping, 0.002)
    with pool_of([slow] * 6 + [quick] * 6, None, 2, step_timeout=LIMIT, batch_size=6) as pool:
        pool.async_reset(seed=0)
        steps = np.full(12, -1)
        while steps[0] < 2:  # the neighbours' messages never stop meanwhile
            batch = pool.recv()
            steps[batch.env_id] += 1
            pool.send(np.zeros(6, np.int64), batch.env_id)
        assert steps[6] > steps[0]


def test_what_an_env_was_doing_is_not_held_against_its_next_step(gate: Path) -> None:
    with pool_of(functools.partial(GateEnv, gate), 2, 1) as pool:
        (link,), (worker,) = loopback.links, pool._workers
        doing = pool._slab.array("stats")[0]

        def hear(words: bytes) -> int:
            link.deliver(words)
            worker._stacks.get(timeout=10)  # the dispatcher has dealt with it
            return int(doing[counters.STAT_AT])

        pool.reset(seed=0)
        pool.send([0, 3])
        eventually(lambda: unpack_words(link.host.peek())[1] == 2)
        late = link.host.peek()
        gate.touch()
        pool.recv()
        gate.unlink()
        pool.send([0, 3])
        assert hear(late) == 0
        eventually(lambda: unpack_words(link.host.peek())[1] == 2)
        assert hear(link.host.peek()) == 2
        gate.touch()
        pool.recv()


def test_a_host_that_cannot_be_told_something_is_lost_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(data: bytes) -> None:
        raise OSError("the line is cut")

    with pool_of(num_envs=4, num_workers=2, on_error="restart") as pool:
        pool.reset(seed=0)
        monkeypatch.setattr(loopback.links[1], "post", fail)
        with pytest.raises(shoal.WorkerDied, match=r"worker 1 .* could not be asked: OSError: the line is cut"):
            pool.call("nonsense", env_ids=[3])
        assert sorted(pool.step(np.zeros(4, np.int64)).info) == [2, 3]


def test_a_hanging_env_is_ended_and_replaced(gate: Path) -> None:
    env = functools.partial(GateEnv, gate)
    with pool_of(env, 4, 2, step_timeout=LIMIT, on_error="restart") as pool:
        pool.reset(seed=0)
        batch = pool.step([0, 0, 0, 3])
        assert {i: info["shoal_restart"]["cause"] for i, info in batch.info.items()} == dict.fromkeys(
            (2, 3), "timed out"
        )
        assert batch.info[2]["shoal_restart"]["culprit"] == 3


def test_what_a_wait_is_for(gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.engine.timeouts.PATIENCE_NS", 300_000_000)
    with pool_of(functools.partial(GateEnv, gate), 4, 2) as pool:
        pool.reset(seed=0)
        pool.send([0, 0, 0, 3])
        threading.Timer(1.0, gate.touch).start()
        with pytest.warns(shoal.SlowEnvWarning, match="(?s)worker 1 .* is running env 3:.*in step"):
            pool.recv()


# ---- end, and other words --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_left_behind")
def test_close_leaves_nothing_behind() -> None:
    pool = pool_of(backend_options=LOCAL["processes"])
    pool.reset(seed=0)
    pool.send(ZEROS)
    pool.close()
    for link in loopback.links:
        link.thread.join(5.0)
    with pytest.raises(shoal.PoolClosed):
        pool.step(ZEROS)


def test_a_close_that_raises() -> None:
    pool = pool_of(DeedEnv, 4, 2)
    pool.reset(seed=0)
    pool.set_attr("deeds", [{"close": "raise"}], [2])
    with pytest.raises(ValueError, match="env 2 raised in close"):
        pool.close()


def test_counters_are_those_of_the_hosts() -> None:
    with pool_of(functools.partial(CountEnv, length=5), backend_options=LOCAL["processes"]) as pool:
        pool.reset(seed=0)
        for _ in range(12):
            pool.step(ZEROS)
        stats = pool.stats()
        assert (stats.steps, stats.ended_episodes, stats.batches) == (7 * 13, 14, 13)
        assert [env.steps for env in stats.envs] == [12] * 7
        assert [worker.passes for worker in stats.workers] == [13] * 3, "a message is a pass"


def test_options_are_for_those_who_take_some() -> None:
    with pytest.raises(ValueError, match="backend=\"serial\" takes none, only 'ray' and 'mpi' do"):
        Pool(CountEnv, 2, backend="serial", backend_options={"address": "auto"})
    with pytest.raises(ValueError, match='recycle_after is for worker processes, and backend="ray" has none'):
        pool_of(recycle_after=1 << 20)


@pytest.mark.parametrize("options", ["address", 5, ["address"]])
def test_options_are_a_dict(options: Any) -> None:
    with pytest.raises(ValueError, match="backend_options: expected a dict"):
        pool_of(backend_options=options)


def test_a_pool_that_cannot_be_gives_its_transport_back(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(loopback.LoopbackTransport, "close", lambda transport: closed.append(transport))
    with pytest.raises(ValueError, match="batch_envs: expected a whole number"):
        pool_of(batch_envs=99)  # which is known only when the envs are counted
    assert len(closed) == 1


def test_puffers_ray() -> None:
    with puffer.make(CountEnv, num_envs=6, num_workers=2, backend=puffer.Ray) as envs:
        envs.async_reset(seed=3)
        observations, *_, ids, mask = envs.recv()
        assert observations[:, 0].tolist() == [3, 4, 5, 6, 7, 8]
        assert (ids.tolist(), mask.all()) == (list(range(6)), True)
        envs.send(np.zeros(6, np.int64))
        assert envs.recv()[0][:, 2].tolist() == [1] * 6
        assert envs.pool.plan.backend == "ray"


def test_nobody_sees_what_a_host_says_of_itself_by_its_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    doing = [counters.STAT_AT, counters.STAT_SINCE_NS]
    answer, write = Wire.answer, Wire.write_answer

    def busy_answer(wire: Wire, *args: Any) -> bytes:
        wire.arrays["stats"][:, doing] = 3, 1  # at env 2, since the machine was started
        message = answer(wire, *args)
        wire.arrays["stats"][:, doing] = 0
        return message

    seen = []

    def watched_write(wire: Wire, *args: Any) -> None:
        write(wire, *args)
        seen.append(wire.arrays["stats"][:, counters.STAT_AT].any())

    monkeypatch.setattr(Wire, "answer", busy_answer)
    monkeypatch.setattr(Wire, "write_answer", watched_write)
    with pool_of() as pool:
        pool.reset(seed=0)
        pool.step(ZEROS)
    assert len(seen) >= 6
    assert not any(seen)

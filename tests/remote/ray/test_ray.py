"""backend="ray" on a real cluster of several nodes: the same results as elsewhere, and nodes that die."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import shoal
from envs import CountEnv, FailEnv, GateEnv, SpaceEnv
from faults.kit import alive, eventually
from remote.kit import PlacedEnv, history
from repeats import repeat
from shoal import Pool
from shoal.dialects import puffer
from shoal.remote.bell import BellMemory
from shoal.remote.ray.transport import connect
from shoal.support.optional_dependencies import install

ray = pytest.importorskip("ray", reason='Ray is not installed: pip install ".[ray]"')

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("cluster")]
OTHER_MODES = repeat("tests/remote/test_dispatcher.py has every mode over a transport of its own, without Ray")
MODES = ["next_step", *(pytest.param(mode, marks=OTHER_MODES) for mode in ("same_step", "disabled"))]
NESTED = spaces.Dict({"a": spaces.Tuple([spaces.Discrete(5), spaces.Text(4)]), "b": spaces.Box(-1, 1, ())})
IMAGE = spaces.Box(0, 255, (96, 96, 3), np.uint8)
ZEROS = np.zeros(6, np.int64)


def pool_of(env: Any = PlacedEnv, num_envs: int | None = 6, num_workers: int = 2, **options: Any) -> Pool:
    placing = {"place_timeout": 200, **options.pop("backend_options", {})}  # a busy machine starts actors slowly
    return Pool(env, num_envs, backend="ray", num_workers=num_workers, backend_options=placing, **options)


def actors() -> int:
    """How many the cluster has that live."""
    from ray._private.state import actors as table

    return sum(one["State"] not in ("DEAD",) for one in table().values())


def step_on(pool: Pool) -> None:
    """Until something is raised, which takes Ray a while."""
    for _ in range(100_000):
        pool.step(np.zeros(pool.num_envs, np.int64))


def new_node(cluster: Any, **options: Any) -> Any:
    node = cluster.add_node(wait=True, **options)
    eventually(lambda: any(one["NodeID"] == node.node_id and one["Alive"] for one in ray.nodes()))
    return node


# ---- the same as everybody else --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_three_actors_for_seven_envs(mode: Any) -> None:
    env = functools.partial(CountEnv, length=5)
    here = history(env, 7, backend="serial", autoreset=mode)
    assert history(env, 7, backend="ray", num_workers=3, autoreset=mode) == here


def test_one_env_and_nested_spaces() -> None:
    env = functools.partial(SpaceEnv, NESTED, NESTED)
    assert history(env, 1, turns=15, backend="ray") == history(env, 1, turns=15, backend="serial")


def test_images_through_the_object_store() -> None:
    env = functools.partial(SpaceEnv, IMAGE, spaces.Discrete(3))
    here = history(env, 5, turns=15, backend="serial", autoreset="same_step")
    assert history(env, 5, turns=15, backend="ray", num_workers=2, autoreset="same_step") == here


def links(pool: Pool) -> tuple[Any, Any]:
    """To the actor on this node, and to the one elsewhere."""
    here = ray.get_runtime_context().get_node_id()[:8]
    mine, others = sorted(pool._workers, key=lambda worker: here not in worker.node)
    assert here in mine.node
    assert here not in others.node
    return mine._link, others._link  # type: ignore[attr-defined]


@pytest.mark.parametrize("bells", [True, False])
def test_small_messages_of_this_node_need_no_call(bells: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not bells:  # as where the system has none: both sides look for messages
        monkeypatch.setattr(BellMemory, "create", lambda home, ranks: BellMemory(home))
    with pool_of(backend_options={"placement": "STRICT_SPREAD"}) as pool:
        pool.reset(seed=0)
        mine, others = links(pool)
        eventually(lambda: mine._requests)
        assert mine.rings == bells
        for _ in range(10):
            pool.step(ZEROS)
        assert mine._sent == mine._answered >= 10
        assert others._sent == 0


def test_answers_that_are_too_large_for_the_short_way_are_fetched() -> None:
    env = functools.partial(SpaceEnv, IMAGE, spaces.Discrete(3))
    spread = {"placement": "STRICT_SPREAD"}
    with pool_of(env, 6, backend_options=spread) as pool, Pool(env, 6, backend="serial") as other:
        mine, _ = links(pool)
        eventually(lambda: mine._requests)
        assert (pool.reset(seed=0).obs == other.reset(seed=0).obs).all()
        assert mine._requests is None, "those that follow are calls at once"
        assert mine._sent == 1
        for _ in range(5):
            assert (pool.step(ZEROS).obs == other.step(ZEROS).obs).all()


@pytest.mark.parametrize("local", ["serial", "threads"])
def test_both_ways_at_a_time(local: str) -> None:
    """More messages than have room on the short way: the others are calls, and each lane has its results in order."""
    options = {"local_backend": local, "num_cpus": 1, "local_workers": 2}
    with pool_of(CountEnv, 12, 1, batch_size=1, autoreset="disabled", backend_options=options) as pool:
        pool.async_reset(seed=0)
        steps = np.full(12, -1)
        for _ in range(400):
            batch = pool.recv(timeout=30)
            lane = int(batch.env_id[0])
            steps[lane] += 1
            assert batch.obs[0, 2] == steps[lane]
            if batch.done[0]:
                steps[lane] = -1
                pool.async_reset([lane])
            else:
                pool.send([0], batch.env_id)


def test_actors_with_processes_of_their_own() -> None:
    env = functools.partial(CountEnv, length=5)
    options = {"num_cpus": 2}
    with pool_of(num_workers=1, backend_options=options) as pool:
        assert len(set(pool.call("home"))) == 2, "an actor with two CPUs has two worker processes"
    here = history(env, 7, turns=25, backend="serial")
    assert history(env, 7, turns=25, backend="ray", num_workers=2, backend_options=options) == here


def test_partial_batches() -> None:
    with pool_of(num_envs=8, batch_size=3) as pool:
        pool.async_reset(seed=0)
        steps = np.full(8, -1)
        for _ in range(60):
            batch = pool.recv()
            steps[batch.env_id] += 1
            assert batch.obs[:, 0].tolist() == batch.env_id.tolist()
            assert batch.obs[:, 2].tolist() == (steps[batch.env_id] % 6).tolist()
            pool.send(np.zeros(len(batch.env_id), np.int64), batch.env_id)


def test_snapshots_move_between_backends() -> None:
    with pool_of() as there, Pool(PlacedEnv, 6, backend="processes") as here:
        there.reset(seed=4)
        there.step(ZEROS)
        here.restore(there.snapshot())
        for _ in range(7):
            assert here.step(ZEROS).obs.tolist() == there.step(ZEROS).obs.tolist()
        there.restore(here.snapshot())
        assert here.step(ZEROS).obs.tolist() == there.step(ZEROS).obs.tolist()


def test_other_words_over_it() -> None:
    envs = shoal.make("CartPole-v1", 4, backend="ray", num_workers=2)
    plain = shoal.make("CartPole-v1", 4, backend="serial")
    assert envs.reset(seed=3)[0].tolist() == plain.reset(seed=3)[0].tolist()
    actions = np.array([0, 1, 0, 1])
    for _ in range(30):
        assert envs.step(actions)[0].tolist() == plain.step(actions)[0].tolist()
    envs.close()
    with puffer.make("CartPole-v1", num_envs=4, num_workers=2, backend="Ray") as envs:
        assert envs.reset(seed=3)[0].tolist() == plain.reset(seed=3)[0].tolist()
        assert envs.num_workers == 2
    plain.close()


def test_stable_baselines3_trains_on_it() -> None:
    sb3 = pytest.importorskip("stable_baselines3", reason="it is what is to be trained")
    envs = shoal.make("CartPole-v1", 4, api="sb3", backend="ray", num_workers=2)
    sb3.PPO("MlpPolicy", envs, n_steps=16, batch_size=32, n_epochs=1, device="cpu").learn(128)
    envs.close()


# ---- places ----------------------------------------------------------------------------------------------------


def test_actors_go_where_they_are_told() -> None:
    def nodes(**options: Any) -> list[str]:
        with pool_of(num_envs=2, backend_options=options) as pool:
            return [worker.node for worker in pool.workers]

    assert len(set(nodes(placement="STRICT_SPREAD"))) == 2
    assert len(set(nodes(placement="STRICT_PACK"))) == 1
    labelled = [one["NodeID"][:8] for one in ray.nodes() if one["Labels"].get("kind") == "simulator"]
    assert all(labelled[0] in node for node in nodes(labels={"kind": "simulator"}))


@pytest.mark.parametrize(
    ("workers", "options", "words"),
    [
        (5, {}, "5 Ray actors with 1 CPU each are needed, .* has room for 4"),
        (9, {"num_cpus": 2}, r"8 Ray actors \(one for each env\) with 2 CPU each are needed, .* has room for 2"),
        (1, {"num_gpus": 1}, "1 Ray actor with 1 CPU, 1 GPU is needed.* has room for 0"),
        (1, {"num_cpus": 3}, "3 CPU is needed.* has room for 0"),
        (1, {"resources": {"fish": 1}}, "1 fish is needed"),
        (1, {"labels": {"kind": "submarine"}}, "submarine.* has room for 0"),
        (3, {"placement": "STRICT_SPREAD"}, "cannot place 3 actors with placement='STRICT_SPREAD'"),
        (1, {"address": "10.0.0.1:6379"}, "Ray is connected to .* already"),
    ],
)
def test_too_much_is_refused_and_not_waited_for(workers: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(shoal.StartError, match=words):
        pool_of(num_envs=8, num_workers=workers, backend_options=options)
    assert actors() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"adress": "auto"}, r"expected address, .*found adress: did you mean address\?"),
        ({"placement": "NEAR"}, "placement"),
        ({"local_backend": "hybrid"}, "local_backend"),
        ({"address": "ray://head:10001"}, "Ray Client"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pool_of(backend_options=options)


# ---- errors and losses -----------------------------------------------------------------------------------------


def test_an_error_keeps_its_type_and_traceback() -> None:
    with pool_of(FailEnv) as pool:
        pool.reset(seed=0)
        with pytest.raises(ValueError, match="env 5 raised in step") as caught:
            pool.step([0, 0, 0, 0, 0, 3])
        assert isinstance(caught.value, shoal.EnvError)
        assert "raise self.error" in caught.value.remote_traceback
    with pytest.raises(ValueError, match="env 0 raised in its constructor"):
        pool_of(functools.partial(FailEnv, "constructor"))
    eventually(lambda: actors() == 0)


def leave(env: Any) -> None:
    os._exit(3)


def test_an_env_that_ends_its_actor_is_among_the_causes() -> None:
    with pool_of() as pool:
        pool.reset(seed=0)
        with pytest.raises(shoal.WorkerDied, match=r"os\._exit"):
            pool.apply(leave)


@pytest.mark.parametrize(
    ("address", "words"),
    [("auto", '^address="auto", but .* ray start --head'), ("head", "^backend_options: address='head' is neither")],
)
def test_an_address_of_no_cluster_is_refused_in_one_sentence(address: str, words: str) -> None:
    class Unconnected:
        @staticmethod
        def init(**options: Any) -> None:
            raise ConnectionError("Could not find any running Ray instance.\nPlease specify the one to connect to.")

    with pytest.raises(shoal.StartError, match=words.replace("ray start", '"ray start')) as caught:
        connect(Unconnected, address)
    assert "\n" not in str(caught.value)


def test_a_killed_actor_is_named() -> None:
    with pool_of() as pool:
        pool.reset(seed=0)
        node, pid = pool.workers[1].node, pool.call("home")[3]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(shoal.WorkerDied, match=rf"worker 1 \(on node .*pid {pid}, envs 3 to 5\)") as caught:
            step_on(pool)
        assert caught.value.node == node
        assert caught.value.env_ids == [3, 4, 5]
        assert pool.closed
    eventually(lambda: actors() == 0)


def test_an_env_that_ends_its_process_in_a_call() -> None:
    with pool_of(on_error="restart") as pool:
        pool.reset(seed=0)
        with pytest.raises(shoal.WorkerDied):
            pool.call("leave", env_ids=[4])
        batch = pool.step(ZEROS)
        assert sorted(batch.info) == [3, 4, 5]


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_actor_is_replaced(mode: Any) -> None:
    with pool_of(on_error="restart", autoreset=mode) as pool:
        pool.reset(seed=0)
        pool.step(ZEROS)
        pid = pool.call("home")[3]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not alive(pid))
        batch = pool.step(ZEROS)
        assert sorted(batch.info) == [3, 4, 5]
        assert batch.info[3]["shoal_restart"]["cause"] == "died"
        assert batch.truncated.tolist() == [False] * 3 + [True] * 3
        assert batch.obs[:3].tolist() == [[i, 0, 2] for i in range(3)]
        seed = int(np.random.SeedSequence([4, 1]).generate_state(1)[0])
        if mode == "disabled":
            pool.reset([3, 4, 5])
        assert pool.step(ZEROS).obs[4, 0] == seed


def test_a_node_that_is_killed_in_the_middle_of_a_run(cluster: Any) -> None:
    """Every lane outside of the killed block gets each of its results once, in order; those of the block go on."""
    node = new_node(cluster, num_cpus=1, labels={"kind": "doomed"}, resources={"doomed": 1})
    spread = {"placement": "SPREAD"}
    with pool_of(num_envs=9, num_workers=3, batch_size=3, on_error="restart", backend_options=spread) as pool:
        doomed = [w for w in pool.workers if node.node_id[:8] in w.node]
        assert doomed, "three nodes with room for it get one actor each"
        lost = {lane for worker in doomed for lane in worker.env_ids}
        pool.async_reset(seed=0)
        steps = np.full(9, -1)
        reported: list[int] = []
        turn, until = 0, time.monotonic() + 200
        while set(reported) != lost and time.monotonic() < until:
            turn += 1
            if turn == 60:
                threading.Thread(target=cluster.remove_node, args=(node, False)).start()
            batch = pool.recv()
            for row, lane in enumerate(batch.env_id.tolist()):
                if "shoal_restart" in batch.info.get(lane, {}):
                    reported.append(lane)
                if lane not in lost:
                    steps[lane] += 1
                    episode, step = divmod(steps[lane], 6)
                    assert batch.obs[row].tolist() == [lane, episode, step]
            pool.send(np.zeros(len(batch.env_id), np.int64), batch.env_id)
            if turn > 60:
                time.sleep(0.005)
        assert sorted(reported) == sorted(lost), "each of them is told of once"
        assert all(node.node_id[:8] not in worker.node for worker in pool.workers)


def test_a_node_that_is_killed_is_named(cluster: Any) -> None:
    node = new_node(cluster, num_cpus=1, resources={"doomed": 1})
    with pool_of(num_envs=2, num_workers=1, backend_options={"resources": {"doomed": 1}}) as pool:
        pool.reset(seed=0)
        cluster.remove_node(node, allow_graceful=False)
        with pytest.raises(shoal.WorkerDied, match=node.node_id[:8]):
            step_on(pool)


def test_an_env_that_takes_too_long(gate: Path) -> None:
    env = functools.partial(GateEnv, gate)
    with pool_of(env, 4, step_timeout=3.0, on_error="restart") as pool:
        pool.reset(seed=0)
        batch = pool.step([0, 0, 0, 3])
        assert {i: info["shoal_restart"]["cause"] for i, info in batch.info.items()} == {2: "timed out", 3: "timed out"}
        assert batch.info[2]["shoal_restart"]["culprit"] == 3


# ---- end -------------------------------------------------------------------------------------------------------


def test_close_leaves_no_actor_and_leaves_ray_alone() -> None:
    pool = pool_of(backend_options={"num_cpus": 2})
    pids = set(pool.call("home"))
    pool.reset(seed=0)
    pool.send(ZEROS)
    pool.close()
    assert ray.is_initialized()
    eventually(lambda: actors() == 0)
    eventually(lambda: not any(map(alive, pids)))


def test_an_env_that_hangs_does_not_hold_up_close(gate: Path) -> None:
    pool = pool_of(functools.partial(GateEnv, gate), 4)
    pool.reset(seed=0)
    pool.send([0, 0, 0, 3])
    pool.close(timeout=0.5)
    eventually(lambda: actors() == 0)


def run_script(text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(text)
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=250, check=False
    )


def test_a_script_that_dies_leaves_no_actor(cluster: Any) -> None:
    done = run_script(
        """
        import os, sys, shoal
        pool = shoal.Pool("CartPole-v1", 2, backend="ray", num_workers=1, backend_options={"address": sys.argv[1]})
        pool.reset(seed=0)
        os._exit(9)
        """,
        cluster.address,
    )
    assert done.returncode == 9, done.stderr
    eventually(lambda: actors() == 0, seconds=30)


def test_a_script_without_a_cluster_starts_and_ends_its_own() -> None:
    done = run_script(
        """
        import ray, shoal
        options = {"address": "local"}
        with shoal.Pool("CartPole-v1", 4, backend="ray", num_workers=1, backend_options=options) as pool:
            assert ray.is_initialized()
            print(pool.reset(seed=0).obs.shape, pool.plan)
        assert not ray.is_initialized()
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "(4, 4) ray with 1 worker: as asked for\n"


def test_actors_of_a_cluster_of_ours_are_no_nicer_than_we_are() -> None:
    """Beside anything else that computes, Ray's default of 15 would leave them next to nothing."""
    done = run_script(
        """
        import os, gymnasium, shoal

        class Env(gymnasium.Wrapper):
            def niceness(self):
                return os.nice(0)

        make = lambda: Env(gymnasium.make("CartPole-v1"))
        with shoal.Pool(make, 2, backend="ray", num_workers=1, backend_options={"address": "local"}) as pool:
            print(pool.call("niceness") == [os.nice(0)] * 2, "RAY_worker_niceness" in os.environ)
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True False\n"


def test_wrong_addresses_are_refused() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        done = run_script(
            """
            import sys, shoal
            for address in sys.argv[1:]:
                try:
                    shoal.Pool("CartPole-v1", 2, backend="ray", backend_options={"address": address})
                except shoal.StartError as error:
                    print(error)
            """,
            "127.0.0.1:1", f"127.0.0.1:{deaf.getsockname()[1]}", "nonsense:port",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no Ray cluster answers at address=") == 3


@pytest.mark.parametrize("address", [None, "auto"])
@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at RAY_ADDRESS='127.0.0.1:1' in the environment: "),
        ("garbage", "RAY_ADDRESS='garbage' in the environment is neither"),
    ],
)
def test_wrong_addresses_of_the_environment_are_refused(
    told: str, words: str, address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", told)
    with pytest.raises(shoal.StartError, match=f"^{words}"):
        connect(None, address)


def test_nodes_without_shoal(tmp_path: Path) -> None:
    (tmp_path / "shoal").mkdir()
    (tmp_path / "shoal" / "__init__.py").write_text("raise ModuleNotFoundError('No module named shoal')")
    env = {"env_vars": {"PYTHONPATH": str(tmp_path)}}
    words = r"its node has no Shoal, .*No module named shoal\): install it on every node"
    with pytest.raises(shoal.WorkerDied, match=words):
        pool_of(backend_options={"runtime_env": env})


def test_without_ray() -> None:
    done = run_script(
        """
        import sys
        sys.modules["ray"] = None
        import shoal
        try:
            shoal.Pool("CartPole-v1", 2, backend="ray")
        except shoal.StartError as error:
            print(error)
        """
    )
    assert done.stdout == f'backend="ray" needs Ray, which is not installed: {install("ray")}\n', done.stderr

"""The model of far pools: its limits, its bounds against its simulation, its advice, and `shoal estimate`."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal import Pool
from shoal.cli import main
from shoal.memory.slab import Layout, Slab
from shoal.remote.wire import Wire
from shoal.scaling import Cluster, Costs, Setup, StepTime, advise, bounds, limits, simulate, simulation
from shoal.scaling.advice import PAYS
from shoal.scaling.model import (
    ANSWER_LANE,
    ANSWER_MESSAGE,
    PARTS,
    REQUEST_LANE,
    REQUEST_MESSAGE,
    slowest_block,
)
from shoal.spaces.leaves import flatten

FREE = Costs.none()
# Of advice that must not change when the real ones are measured anew.
SOME = Costs(10e-6, 270e-6, 260e-6, 0.17e-6, 0.03e-9, 370e-6, 340e-6, 0.55e-6, 0.57e-9, 470e-6)
MS = 1e-3


def setup(
    step: float = MS, actors: int = 2, envs: int = 32, batch: int = 16, spread: float = 0.0, **more: Any
) -> Setup:
    """A pool that costs nothing but what a test says."""
    return Setup(StepTime(step, spread), actors, envs, batch, **{"costs": FREE, **more})


# ---- limits that are known ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3, 8])
@pytest.mark.parametrize("batch", [4, 16, 48])
def test_with_nothing_in_the_way_the_envs_set_the_rate(batch: int, workers: int) -> None:
    found = simulate(setup(batch=batch, workers_per_actor=workers, envs=24 * workers, action_bytes=0.0))
    assert found.rate == pytest.approx(2 * workers / MS, rel=0.05)
    assert found.busy["envs"] == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("in_flight", [1, 2, 4, 8])
def test_a_long_round_trip_is_shared_by_the_batches_in_flight(in_flight: int) -> None:
    pool = setup(step=0.0, envs=8 * in_flight, batch=16, round_trip=0.1)
    assert simulate(pool).rate == pytest.approx(in_flight * 16 / 0.1, rel=0.01)


def test_latency_is_hidden_as_soon_as_enough_batches_are_in_flight() -> None:
    """An actor steps a message of 8 for 8 ms: two more have to be under way for 16 ms."""
    rates = [simulate(setup(actors=1, envs=8 * depth, batch=8, round_trip=16 * MS)).rate for depth in (1, 2, 3, 4, 8)]
    assert rates == pytest.approx([1000 / 3, 2000 / 3, 1000, 1000, 1000], rel=0.01)


@pytest.mark.parametrize(("batch", "circle"), [(32, 48), (16, 32)])
def test_batches_in_flight_hide_nothing_while_an_actor_has_one_message(batch: int, circle: float) -> None:
    """Lanes that come in one answer leave together: two batches of two actors are all of one's envs each."""
    found = simulate(setup(batch=batch, round_trip=16 * MS))
    assert found.rate == pytest.approx(64 / (circle * MS), rel=0.01)
    assert found.messages == 1


def test_messages_bind_the_driver() -> None:
    costs = replace(FREE, message=2 * MS)
    pool = setup(step=1e-6, actors=50, envs=4, batch=100, costs=costs)
    assert simulate(pool).rate == pytest.approx(4 / (2 * MS), rel=0.02)  # a batch is 25 whole actors
    assert limits(pool)[0] == "driver"


def test_bytes_bind_the_drivers_link() -> None:
    pool = setup(step=1e-6, actors=4, envs=64, batch=64, obs_bytes=1e5, driver_bandwidth=1e8, node_bandwidth=1e9)
    assert simulate(pool).rate == pytest.approx(1e8 / (1e5 + ANSWER_LANE), rel=0.02)
    assert limits(pool)[0] == "driver's link"


@pytest.mark.parametrize("shared", [1, 2, 4])
def test_actors_of_one_node_share_its_link(shared: int) -> None:
    pool = setup(step=1e-6, actors=4, envs=64, batch=32, obs_bytes=1e5, node_bandwidth=1e7, actors_per_node=shared)
    assert simulate(pool).rate == pytest.approx(4 / shared * 1e7 / (1e5 + ANSWER_LANE), rel=0.05)
    assert limits(pool)[0] == "nodes' links"


def test_the_policy_binds_once_the_envs_keep_up() -> None:
    pool = setup(step=0.1 * MS, actors=8, envs=32, batch=64, policy=20 * MS, policy_lane=0.1 * MS)
    assert simulate(pool).rate == pytest.approx(64 / (20 * MS + 6.4 * MS), rel=0.02)
    assert limits(pool)[0] == "policy"


def test_full_batches_wait_for_the_slowest_and_partial_ones_do_not() -> None:
    full, partial = (setup(actors=32, envs=4, batch=batch, spread=1.5) for batch in (128, 32))
    assert simulate(full).rate == pytest.approx(full.envs / slowest_block(full), rel=0.1)
    assert limits(full)[0] == "stragglers"
    assert simulate(partial).rate > 1.5 * simulate(full).rate


def test_measured_steps_are_drawn_from() -> None:
    step = StepTime.measured((1 * MS,) * 9 + (11 * MS,))
    assert step.mean == pytest.approx(2 * MS)
    assert set(step.draw(np.random.default_rng(0), 1000)) == {1 * MS, 11 * MS}
    found = simulate(Setup(step, 1, 8, 2, costs=FREE))
    assert found.rate == pytest.approx(1 / (2 * MS), rel=0.2)


def test_draws_have_the_mean_and_the_spread_that_were_asked_for() -> None:
    draws = StepTime(3 * MS, 0.8).draw(np.random.default_rng(0), 200_000)
    assert draws.mean() == pytest.approx(3 * MS, rel=0.02)
    assert draws.std() == pytest.approx(2.4 * MS, rel=0.05)


# ---- bounds against simulation -----------------------------------------------------------------------------------

SETUPS = st.builds(
    lambda step, spread, actors, per_worker, workers, part, obs, trip, gbit, policy: Setup(
        StepTime(step, spread), actors, per_worker * workers, max(1, int(part * actors * per_worker * workers)),
        workers,
        obs_bytes=obs, round_trip=trip, driver_bandwidth=gbit * 1.25e8, node_bandwidth=gbit * 1.25e8, policy=policy,
    ),
    step=st.floats(1e-5, 2e-2), spread=st.sampled_from([0.0, 0.3, 1.0]), actors=st.integers(1, 20),
    per_worker=st.integers(1, 8), workers=st.integers(1, 6), part=st.floats(0.02, 1.0),
    obs=st.floats(0, 50_000), trip=st.floats(0, 0.05), gbit=st.floats(0.1, 100), policy=st.floats(0, 0.02),
)  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(SETUPS)
def test_no_simulation_beats_its_bounds(pool: Setup) -> None:
    found, most = simulate(pool), bounds(pool)
    slack = 1.02 if not pool.step.spread else 1.25  # few draws have a mean of their own
    assert found.rate <= slack * min(most.values())
    assert all(0.0 <= busy <= slack for busy in found.busy.values())
    assert pool.fewest_messages <= found.messages <= pool.most_messages


@settings(max_examples=30, deadline=None)
@given(SETUPS, st.sampled_from(["round_trip", "obs_bytes", "policy", "step", "driver_bandwidth"]))
def test_bounds_fall_when_anything_gets_worse(pool: Setup, what: str) -> None:
    worse: dict[str, Any] = {
        "round_trip": 2 * pool.round_trip + MS, "obs_bytes": 2 * pool.obs_bytes + 100, "policy": 2 * pool.policy + MS,
        "step": StepTime(2 * pool.step.mean, pool.step.spread), "driver_bandwidth": pool.driver_bandwidth / 2,
    }  # fmt: skip
    before, after = bounds(pool), bounds(replace(pool, **{what: worse[what]}))
    assert set(before) == set(PARTS)
    assert all(after[part] <= before[part] * 1.0001 for part in PARTS)


@settings(max_examples=15, deadline=None)
@given(SETUPS, st.floats(1.0, 4.0))
def test_everything_half_as_fast_is_half_as_fast(pool: Setup, factor: float) -> None:
    """Nothing in the simulation depends on the unit of time."""
    costs = Costs(*(factor * value for value in vars(pool.costs).values()))
    slower = replace(
        pool, step=StepTime(factor * pool.step.mean, pool.step.spread), round_trip=factor * pool.round_trip,
        policy=factor * pool.policy, driver_bandwidth=pool.driver_bandwidth / factor,
        node_bandwidth=pool.node_bandwidth / factor, costs=costs,
    )  # fmt: skip
    assert simulate(slower).rate == pytest.approx(simulate(pool).rate / factor, rel=0.05)


@settings(max_examples=10, deadline=None)
@given(SETUPS)
def test_full_batches_gain_by_whatever_gets_better(pool: Setup) -> None:
    """With one batch in flight nothing overtakes anything, so no part that gets better makes another one worse."""
    pool = replace(pool, batch_size=pool.envs, step=StepTime(pool.step.mean))
    now = simulate(pool).rate
    for better in (
        replace(pool, round_trip=pool.round_trip / 2), replace(pool, policy=pool.policy / 2),
        replace(pool, costs=pool.costs.cheaper(2.0)), replace(pool, step=pool.step.faster(2.0)),
    ):  # fmt: skip
        assert simulate(better).rate >= now * 0.999


def test_the_same_seed_gives_the_same_prediction() -> None:
    pool = setup(spread=1.0, actors=3, envs=7, batch=5, costs=Costs())
    assert simulate(pool) == simulate(pool)
    assert simulate(pool, seed=1) != simulate(pool)


def test_a_thousand_nodes_are_simulated_as_a_whole() -> None:
    pool = Setup(StepTime(50 * MS, 0.5), 1000, 64, 16_000, 32, obs_bytes=100, round_trip=MS, policy=5 * MS)
    found = simulate(pool)
    assert 0.5 * min(bounds(pool).values()) < found.rate < 1.05 * min(bounds(pool).values())


# ---- what the wire really carries --------------------------------------------------------------------------------


def test_bytes_beside_observations_are_those_of_the_wire() -> None:
    obs, action = gymnasium.spaces.Box(0, 255, (7,), np.uint8), gymnasium.spaces.Discrete(2)
    slab = Slab.create(Layout.plan(flatten(obs), flatten(action), 12, 2, 1), shared=False)
    try:
        wire = Wire(slab, 0)
        sizes = {}
        for count in (4, 12):
            lanes = np.arange(count)
            request = wire.request(0, lanes, lanes.astype(np.uint64), [])
            sizes[count] = len(request), len(wire.answer(0, 0, wire.answered_rows(lanes), []))
    finally:
        slab.close()
    per_lane = [(sizes[12][way] - sizes[4][way]) / 8 for way in (0, 1)]
    assert per_lane == [REQUEST_LANE + 8, ANSWER_LANE + 7]
    heads = [sizes[4][way] - 4 * per_lane[way] for way in (0, 1)]
    assert heads == [REQUEST_MESSAGE, ANSWER_MESSAGE]


# ---- advice ------------------------------------------------------------------------------------------------------


def cluster(**more: Any) -> Cluster:
    given: dict[str, Any] = {
        "step": StepTime(20 * MS, 0.3), "envs": 512, "nodes": 4, "cores": 8, "latency": MS, "costs": SOME,
    }  # fmt: skip
    return Cluster(**{**given, **more})


def test_advice_covers_all_envs_and_is_what_was_simulated() -> None:
    for envs in (4, 33, 100):
        found = advise(cluster(envs=envs))
        assert envs <= found.setup.envs < envs + found.setup.actors
        assert found.setup.workers_per_actor * found.setup.actors_per_node <= 8
        assert found.prediction == simulate(found.setup)
        assert found.limit in PARTS


CHEAP = {"step": StepTime(0.01 * MS), "obs_bytes": 16.0, "latency": 0.5 * MS, "bandwidth": 1.25e9}


def test_advice_uses_no_more_nodes_than_pay() -> None:
    """Messages of few envs cost the driver more than the other nodes bring."""
    found, alone = (advise(cluster(**CHEAP, envs=64, nodes=nodes)) for nodes in (16, 1))
    assert (found.nodes, found.setup.actors) == (1, 1)
    assert found.prediction == alone.prediction
    assert found.all_nodes < found.prediction.rate
    assert found.most_nodes == 1


@settings(max_examples=4, deadline=None)
@given(
    step=st.floats(1e-5, 2e-2), nodes=st.integers(2, 12), obs=st.floats(0, 50_000), policy=st.floats(0, 5e-3),
    per_node=st.integers(1, 32),
)  # fmt: skip
def test_no_other_number_of_nodes_is_faster_by_far(
    step: float, nodes: int, obs: float, policy: float, per_node: int
) -> None:
    given = cluster(
        step=StepTime(step), envs=nodes * per_node, nodes=nodes, obs_bytes=obs, policy=policy, bandwidth=1.25e9
    )
    found = advise(given)
    assert 1 <= found.nodes <= min(nodes, found.most_nodes)
    for other in {1, nodes}:
        rate = advise(replace(given, nodes=other)).prediction.rate
        assert rate <= found.prediction.rate * max(1.0, other / found.nodes) ** PAYS * 1.05
    assert found.all_nodes <= found.prediction.rate * (nodes / found.nodes) ** PAYS * 1.05


def test_advice_never_goes_against_its_own_plan() -> None:
    """It has as few actors as are good for the driver already."""
    found = advise(cluster(**CHEAP, envs=4096, nodes=16, cores=32))
    assert found.limit == "driver"
    assert "fewer actors" not in found.first
    assert found.prediction.rate > 1.5 * found.all_nodes


def test_many_nodes_are_advised_on_by_few_small_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes: list[int] = []

    class Seen(simulation._PoolSimulation):
        def __init__(self, setup: Setup, seed: int):
            lanes.append(setup.envs)
            super().__init__(setup, seed)

    monkeypatch.setattr(simulation, "_PoolSimulation", Seen)
    found = advise(cluster(step=StepTime(2 * MS, 0.5), envs=1_000_000, nodes=100_000))
    assert 1 < found.nodes < 10_000
    assert len(lanes) < 100
    assert max(lanes) <= 4 * simulation.LANES


@pytest.mark.parametrize(
    "pool",
    [
        Setup(StepTime(2 * MS, 0.5), 200, 128, 4096, 32, obs_bytes=100, round_trip=MS, policy=MS),
        Setup(StepTime(200 * MS, 1.0), 200, 128, 2048, 32, obs_bytes=1000, round_trip=MS, policy=MS),
        Setup(StepTime(20 * MS, 1.0), 1000, 16, 64, 1, obs_bytes=1000, round_trip=MS),
        Setup(StepTime(2 * MS, 0.5), 4, 8192, 4096, 8, obs_bytes=100, round_trip=500 * MS),
        Setup(StepTime(0.1 * MS), 2, 8192, 32, 4, obs_bytes=100, round_trip=20 * MS),
        Setup(StepTime(20 * MS, 1.0), 400, 40, 16_000, 8, obs_bytes=100, round_trip=MS),
    ],
    ids=["driver", "stragglers", "workers", "latency", "depth", "full"],
)
def test_a_part_that_is_simulated_stands_for_all(pool: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "LANES", 2**11)
    part = simulate(pool)
    monkeypatch.setattr(simulation, "LANES", 2**30)
    monkeypatch.setattr(simulation, "BATCHES", 2**30)
    whole = simulate(pool)
    assert part.rate == pytest.approx(whole.rate, rel=0.05 if not pool.full else 0.15)
    assert part.messages == pytest.approx(whole.messages, rel=0.1)


def test_envs_that_take_no_time_are_predicted_too() -> None:
    found = advise(cluster(step=StepTime(0.0), envs=64, nodes=2))
    assert 0 < found.apart < math.inf
    assert "inf" not in found.first
    free = advise(cluster(step=StepTime(0.0), envs=64, nodes=2, costs=replace(FREE, transport=MS)))
    assert "inf" not in free.first


def test_advice_keeps_the_batch_size_of_the_learner() -> None:
    assert advise(cluster(batch_size=100)).setup.batch_size == 100


def test_advice_puts_more_batches_in_flight_where_the_way_is_long() -> None:
    near, far = (advise(cluster(latency=latency, step=StepTime(5 * MS), envs=1024)) for latency in (0.0, 50 * MS))
    assert far.setup.in_flight >= near.setup.in_flight
    assert far.prediction.rate > 0.9 * near.prediction.rate


@pytest.mark.parametrize(
    ("changes", "limit", "says"),
    [
        ({}, "envs", "add nodes"),
        ({"step": StepTime(0.05 * MS), "cores": 64, "envs": 4096}, "driver", "data-parallel ranks"),
        ({"obs_bytes": 200_000.0, "bandwidth": 1e7}, "driver's link", "smaller observations"),
        ({"policy": 2.0}, "policy", "faster"),
        ({"latency": 5.0}, "latency", "more envs"),
        ({"step": StepTime(20 * MS, 3.0), "batch_size": 512}, "stragglers", "batch_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_advice_names_the_limit_and_what_to_do(changes: dict[str, Any], limit: str, says: str) -> None:
    found = advise(cluster(**changes))
    assert (found.limit, says in found.first) == (limit, True), (found.limit, found.first)
    assert found.gains[limit] == max(found.gains.values())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"envs": 3}, "at least one for each of 4 nodes"),
        ({"envs": 0}, "envs"),
        ({"cores": 2.5}, "cores"),
        ({"batch_size": 513}, "batch_size"),
        ({"latency": -1.0}, "latency"),
        ({"latency": math.nan}, "latency"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        advise(cluster(**changes))


# ---- the command -------------------------------------------------------------------------------------------------

NUMBERS = [
    "--env-ms", "2", "--spread", "0.5", "--obs-bytes", "28224", "--envs", "4096", "--nodes", "16", "--cores", "32",
    "--latency-ms", "0.5", "--gbit", "10", "--policy-ms", "3",
]  # fmt: skip
MACHINES = ["--envs", "64", "--nodes", "2", "--cores", "4"]


def test_estimate_says_how_fast_what_limits_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["estimate", *NUMBERS]) == 0
    out = capsys.readouterr().out
    for words in (
        "steps/s, limited by the driver's link",
        "of the 16 nodes are enough",
        "actors",
        "batch_size",
        "First: ",
        'backend="ray"',
    ):
        assert words in out, words


def test_estimate_as_json_is_the_same_and_has_no_infinities(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["estimate", *NUMBERS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    use = found["use"]
    assert use["actors"] * use["envs_per_actor"] >= 4096
    assert use["nodes"] < 16
    assert found["limit"] == "driver's link"
    assert found["steps_per_second"] == pytest.approx(1.25e9 / (28224 + ANSWER_LANE), rel=0.05)
    assert found["bounds"]["stragglers"] is None
    assert set(found["gains"]) == set(PARTS)


def test_estimate_measures_an_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["estimate", "--env", "CartPole-v1", *MACHINES, "--json"]) == 0
    env = json.loads(capsys.readouterr().out)["env"]
    assert (env["obs_bytes"], env["action_bytes"]) == (16, 8)
    assert env["mean_s"] > 0
    assert (
        main.main(["estimate", "--env", "CartPole-v1", "--spread", "0", "--obs-bytes", "5", *MACHINES, "--json"]) == 0
    )
    env = json.loads(capsys.readouterr().out)["env"]
    assert (env["obs_bytes"], env["spread"]) == (5, 0)


def test_under_its_old_name_it_works_and_says_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["estimate", *NUMBERS]) == 0
    now = capsys.readouterr()
    assert main.main(["plan", *NUMBERS]) == 0
    assert capsys.readouterr() == (now.out, "shoal plan is called shoal estimate now: use that name\n")


@pytest.mark.parametrize(
    "env",
    [
        ["--env", "CartPole-v1"],
        ["--env", "gymnasium.envs.classic_control:CartPoleEnv"],
        ["--env-ms", "1", "--obs-bytes", "16"],
    ],
    ids=lambda env: env[1],
)
def test_the_call_that_estimate_prints_makes_such_a_pool(
    env: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the cluster: the same words are taken by a Pool, which says what it lacks. Nothing else is needed."""
    assert main.main(["estimate", *env, *MACHINES, "--json"]) == 0
    call = json.loads(capsys.readouterr().out)["call"]
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        shoal, "Pool", lambda env, num_envs, **options: seen.update(options, env=env, num_envs=num_envs)
    )
    exec(call, {})
    seen["backend_options"]["place_timeout"] = "soon"  # refused last, before Ray is looked for
    with pytest.raises(ValueError, match="place_timeout"):
        Pool(**seen)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (MACHINES, "--env"),
        (["--env-ms", "1", *MACHINES], "--obs-bytes"),
        (["--env", "NoSuchEnv-v0", *MACHINES], "NoSuchEnv"),
        (["--env", "CartPole-v1", "--env-ms", "1", *MACHINES], "not allowed with"),
        (["--env-ms", "fast", "--obs-bytes", "4", *MACHINES], "fast"),
        (["--env-ms", "-1", "--obs-bytes", "4", *MACHINES], "-1"),
        (["--env-ms", "1", "--obs-bytes", "-4", *MACHINES], "-4"),
        (["--env-ms", "1", "--obs-bytes", "4", "--spread", "nan", *MACHINES], "nan"),
        (["--env-ms", "1", "--obs-bytes", "4", "--gbit", "0", *MACHINES], "Gbit/s"),
        (["--env-ms", "1", "--obs-bytes", "4", "--envs", "2", "--nodes", "4", "--cores", "1"], "4 nodes"),
        (["--env-ms", "1", "--obs-bytes", "4", "--batch-size", "65", *MACHINES], "batch_size"),
        (["--env-ms", "1", "--obs-bytes", "4", "--envs", "many", "--nodes", "4", "--cores", "1"], "many"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_estimate_refuses_nonsense_in_one_sentence(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main.main(["estimate", *arguments])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_estimate_says_what_to_give_for_observations_of_no_fixed_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_graph_env.py").write_text(
        "import gymnasium\n"
        "from gymnasium import spaces\n"
        "class Growing(gymnasium.Env):\n"
        "    observation_space = spaces.Sequence(spaces.Discrete(3))\n"
        "    action_space = spaces.Discrete(2)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return (), {}\n"
        "    def step(self, action):\n"
        "        return (1,), 0.0, False, False, {}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main.main(["estimate", "--env", "my_graph_env:Growing", *MACHINES]) == 2
    assert "--obs-bytes" in capsys.readouterr().err


@pytest.mark.parametrize("envs", [1, 2, 64])
@pytest.mark.parametrize(
    "numbers", [["--env-ms", "0"], ["--env-ms", "60000", "--spread", "100"]], ids=lambda one: one[1]
)
def test_estimate_reads_well_whatever_the_numbers(
    numbers: list[str], envs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main.main(["estimate", *numbers, "--obs-bytes", "16", "--envs", str(envs), "--nodes", "1", "--cores", "4"]) == 0
    )
    out = capsys.readouterr().out
    for wrong in (" inf", "nan", "e+0", "1 envs", "1 nodes", "1 messages", "1 batches", "1 workers", " 0 steps/s"):
        assert wrong not in out.replace("1e", ""), (wrong, out)

"""The benchmark scripts start, their envs are sound, and a tiny run writes what it promises."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = ("throughput", "latency_sleep", "startup", "auto", "counters", "puffer", "tune", "scaling_model", "turns")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports from the folder of the benchmarks."""
    names = ("common", "envs", "team", "puffer_runners", *SCRIPTS)
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}  # the tests have an `envs` too
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_explain_themselves(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0, done.stderr
    assert "--rounds" in done.stdout


@pytest.mark.parametrize("name", ["Image84", "Frames84", "Busy500us", "LogNormalSleep", "Busy1ms", "Sleep1ms"])
@pytest.mark.filterwarnings("ignore")
def test_envs_keep_gymnasiums_contract(name: str, module: Any) -> None:
    kind = getattr(module("envs"), name)
    check_env(kind(), skip_render_check=True)
    env = kind()
    env.reset(seed=0)
    ends = [env.step(env.action_space.sample())[3] for _ in range(kind.episode)]
    assert ends == [False] * (kind.episode - 1) + [True]


def test_image_pushes_the_oldest_frame_out(module: Any) -> None:
    env = module("envs").Image84()
    before, _ = env.reset(seed=0)
    kept = before.copy()
    after = env.step(2)[0]
    assert (after[..., :3] == kept[..., 1:]).all()
    assert (after[..., 3] != kept[..., 3]).any()
    assert (before == kept).all()  # an observation once given is never written again


def test_ceiling_of_batches_out_of_sleepers(module: Any) -> None:
    ceiling = module("latency_sleep").ceiling
    assert ceiling(16, 1, batches=4000) == pytest.approx(1.0, abs=0.1)
    assert ceiling(16, 16, batches=1000) < ceiling(16, 8, batches=2000) < ceiling(16, 4, batches=4000)


def test_the_grid_of_plans_is_full(module: Any) -> None:
    cells = module("tune").grid([8], 2)
    assert len(cells) == len(set(cells))
    assert {(one.backend, one.num_workers) for one in cells if one.backend == "hybrid"} == {
        ("hybrid", 2), ("hybrid", 4), ("hybrid", 8)
    }  # fmt: skip
    assert {one.batch_size for one in cells if one.backend == "threads"} == {None, 4, 2}
    assert {one.spin for one in cells if one.backend == "processes"} == {None, (0, 0), (2_000_000, 2_000_000)}
    assert {one.num_workers for one in module("tune").grid([7], 3) if one.backend == "processes"} == {1, 2, 3, 4, 7}


def test_a_tiny_run_writes_json_markdown_and_plot(tmp_path: Path) -> None:
    tiny = ["--only", "CartPole", "-n", "2", "--seconds", "0.02", "--rounds", "1", "--no-peers"]
    done = run("throughput", *tiny, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "Gymnasium Sync" in done.stdout
    (result,) = json.loads((tmp_path / "throughput.json").read_text())["results"]
    assert (result["env"], result["num_envs"]) == ("CartPole-v1", 2)
    assert "| Gymnasium Sync |" in (tmp_path / "throughput.md").read_text()
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")


def test_turns_measures_every_cell(tmp_path: Path) -> None:
    done = run("turns", "--rounds", "1", "--calls", "2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "turns.json").read_text())["cells"]
    assert {"recv, send: 4 of 8, fifo", "send, recv: 32 of 64, scattered", "step: int32"} <= {c["turn"] for c in cells}
    assert all(cell["us"][1] > 0 for cell in cells)


def test_puffer_goes_on_with_the_two_best_settings(module: Any) -> None:
    puffer, bench, work = module("puffer"), module("shoal.cli.bench"), module("shoal.cli.work")
    every = puffer.peers(64)
    assert len({one.name for one in every}) == len(every)
    rates: list[list[float | None]] = [[] for _ in every]
    rates[2], rates[5], rates[7] = [3.0, 1.0, 3.0], [2.0, 9.0, 2.0], [1.0, None, 1.0]
    rows = [bench.Row(one, rates=each) for one, each in zip(every, rates, strict=True)]
    settings = bench.Settings(rounds=3)
    tried = bench.Result(work.Work("CartPole-v1", 64, None), settings, rows)
    assert puffer.best_two(tried) == [every[5], every[2]]
    nobody = bench.Result(tried.work, settings, [bench.Row(one, "skipped") for one in every])
    assert puffer.best_two(nobody) == every[:1]


def test_puffer_without_pufferlib_says_so_and_measures_shoal(tmp_path: Path) -> None:
    if find_spec("pufferlib"):
        pytest.skip("PufferLib is installed")
    tiny = ["--only", "CartPole", "--seconds", "0.02", "--rounds", "1", "--try-rounds", "1"]
    done = run("puffer", *tiny, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "puffer.json").read_text())
    rows = {row["name"]: row for row in found["results"][0]["rows"]}
    assert rows["PufferLib x1, batch 64"]["note"] == "pufferlib is not installed"
    assert rows["Shoal puffer.Multiprocessing, processes"]["steps_per_s"]["median"] > 0
    assert found["ratios"] == []


def test_puffer_reads_each_batch_and_counts_rows(module: Any) -> None:
    runners, work = module("puffer_runners"), module("shoal.cli.work")
    for kind in (runners.ShoalPool, runners.ShoalPuffer):
        runner = kind(work.probe("CartPole-v1", 6), backend="serial", batch_size=3)
        runner.reset()
        steps, seconds = runner.run(0.02)
        runner.close()
        assert steps > 0
        assert steps % 3 == 0
        assert seconds >= 0.02


def test_team_keeps_pettingzoos_contract(module: Any) -> None:
    test = pytest.importorskip("pettingzoo.test")
    env = module("team").Team()
    test.parallel_api_test(env, num_cycles=2 * env.episode + 10)
    first, _ = env.reset(seed=3)
    again, _ = env.reset(seed=3)
    assert all((first[agent] == again[agent]).all() for agent in env.possible_agents)
    assert (env.reset()[0]["player_0"] != first["player_0"]).any()

"""The benchmark scripts start, their envs are sound, and a tiny run writes what it promises."""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gymnasium.utils.env_checker import check_env

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = (
    "throughput", "latency_sleep", "startup", "auto", "counters", "puffer", "tune", "scaling_model", "turns", "infos",
    "trainers", "simulators",
)  # fmt: skip


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports from the folder of the benchmarks."""
    names = ("common", "envs", "team", "puffer_runners", "runners", "plots", "quick", "fill_performance", *SCRIPTS)
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}  # the tests have an `envs` too
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(others)


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_explain_themselves(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0, done.stderr
    assert "--rounds" in done.stdout


ENVS = (
    "Image84", "Frames84", "Busy500us", "LogNormalSleep", "Busy1ms", "Sleep1ms", "NoWork", "FiveInfos", "LongReset",
)  # fmt: skip


@pytest.mark.parametrize("name", ENVS)
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


def test_turns_change_and_end(module: Any) -> None:
    in_turns = module("common").in_turns
    rounds = [[name for at, name in in_turns("abcd", 8) if at == number] for number in range(8)]
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1
    begun = []
    for number, _ in in_turns("ab", 1000, limit=0.01):
        begun.append(number)
        time.sleep(0.01)
    assert begun == [0, 0]  # a round that was begun is brought to its end


def test_infos_tells_what_five_numbers_add(tmp_path: Path) -> None:
    done = run("infos", "--parts", "added", "--rounds", "1", "--out", str(tmp_path), "--json", str(tmp_path / "x.json"))
    assert done.returncode == 0, done.stderr
    assert "they add" in done.stdout
    found = json.loads((tmp_path / "infos.json").read_text())["added"]
    assert set(found) == {"Gymnasium Sync", "Shoal serial", "Shoal processes"}
    low, middle, high = found["Shoal serial"]["without"]
    assert 0 < low <= middle <= high
    assert json.loads((tmp_path / "x.json").read_text())["added"] == found


def test_infos_says_what_is_missing(tmp_path: Path) -> None:
    if find_spec("mujoco"):
        pytest.skip("mujoco is installed")
    done = run("infos", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "pip install '.[mujoco]'" in done.stderr


def test_infos_counts_the_resets_within_steps(module: Any) -> None:
    work = module("shoal.cli.work")
    runner = module("runners").ShoalSB3(work.probe("CartPole-v1", 4), backend="serial")
    runner.reset()
    steps, _ = runner.run(0.05)
    runner.close()
    assert steps == runner.extra_resets + 4 * ((steps - runner.extra_resets) // 4)
    assert runner.extra_resets > 0


def test_auto_is_held_to_its_estimates(tmp_path: Path) -> None:
    done = run("auto", "--parts", "estimate", "--seconds", "0.02", "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    estimates = {one["name"]: one for one in json.loads((tmp_path / "auto.json").read_text())["estimates"]}
    assert {"CartPole", "five numbers as info", "84x84x4", "long resets", "1 ms of computing"} <= set(estimates)
    for one in estimates.values():
        ratio = one["expected"][1] / one["reached"][1]
        assert one["expected_over_reached"][1] == pytest.approx(ratio)


def test_a_training_over_each_vector_env(tmp_path: Path) -> None:
    if not find_spec("torch"):
        pytest.skip("torch is not installed")
    tiny = ["--only", "single file", "--envs", "CartPole", "--steps", "2048", "--rounds", "1"]
    done = run("trainers", *tiny, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads((tmp_path / "trainers.json").read_text())["trainings"]
    assert set(cell["rates"]) == {"Gymnasium Sync", "Gymnasium Async", "Shoal auto"}
    assert cell["best"] in ("Gymnasium Sync", "Gymnasium Async")
    assert cell["of_best"][1] == pytest.approx(cell["rates"]["Shoal auto"][0] / cell["rates"][cell["best"]][0])


def test_advantages_are_those_of_the_definition(module: Any) -> None:
    torch = pytest.importorskip("torch")
    trainers = module("trainers")
    n = trainers.NUM_ENVS
    rewards = [torch.full((n,), 1.0), torch.full((n,), 2.0)]
    dones = [torch.zeros(n), torch.ones(n)]  # the last step ends the episode: what follows is none of its business
    values = [torch.full((n,), 0.5), torch.full((n,), 0.25), torch.full((n,), 100.0)]
    found = trainers.estimate_advantages(rewards, dones, values, 0.9, 0.8)
    last = 2.0 - 0.25
    assert found[1].tolist() == pytest.approx([last] * n)
    assert found[0].tolist() == pytest.approx([1.0 + 0.9 * 0.25 - 0.5 + 0.9 * 0.8 * last] * n)


# ---- the page of figures -------------------------------------------------------------------------------------


def test_quick_writes_one_json_and_a_plot_for_each_part(tmp_path: Path, module: Any) -> None:
    quick = module("quick")
    document = {"added": {"Gymnasium Sync": {"added": [1.0, 2.0, 3.0]}, "Shoal serial": {"added": [0.5, 1.0, 1.5]}}}
    made = quick.added_by_infos(document)
    assert [(row["name"], row["role"], row["median"]) for row in made] == [
        ("Gymnasium Sync", "peer", 2.0), ("Shoal serial", "shoal", 1.0)
    ]  # fmt: skip
    about = quick.machine()
    assert {"date", "cores", "cpu", "python", "versions"} <= set(about)
    part = {"name": "added", "title": "t", "unit": "us", "command": "c", "rows": made}
    module("plots").draw(part, tmp_path / "added.png")
    assert (tmp_path / "added.png").read_bytes().startswith(b"\x89PNG")


def test_quick_says_which_parts_it_left_out(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = module("quick")

    def fails(part: Any, folder: Path, left: float) -> Any:
        raise RuntimeError("no such peer")

    monkeypatch.setattr(quick, "run", fails)
    said: list[str] = []
    assert quick.measure(quick.PARTS[:1], 10.0, said.append) == ([], ["cartpole: no such peer"])
    assert quick.measure(quick.PARTS[:1], 0.0, said.append) == ([], ["cartpole: the time was over"])


def test_a_part_that_was_measured_elsewhere_keeps_its_machine(module: Any) -> None:
    quick, fill = module("quick"), module("fill_performance")
    here = {"cores": 2, "cpu": "A", "system": "Linux 6", "python": "3", "versions": {}, "date": "2026-01-01", "load": 0}
    there = {**here, "cores": 16}
    rows = quick.many_cores({
        "facts": {"cores": 16},
        "cells": {"CartPole, 64 envs": {"limit": [2.0, 2.0], "rows": {
            "hybrid 16, spin usual": {"rates": [1.5], "ratios": [0.75]},
            "hybrid 16, spin 0": {"rates": [1], "ratios": [0.5]},
            "auto: hybrid 15": {"rates": [1.8], "ratios": [0.9]},
        }}},
    })  # fmt: skip
    assert [(row["name"], row["of_limit"]) for row in rows] == [
        ("16 plain loops", 1.0), ("Shoal auto: hybrid 15", 0.9), ("Shoal hybrid 16", 0.75)
    ]  # fmt: skip
    part = {"name": "many_cores", "title": "t", "unit": "steps/s", "command": "c", "rows": rows, "machine": there}
    before = {"schema": 1, "machine": here, "parts": [], "missing": ["many_cores: it needs 8 cores"]}
    found = quick.joined(before, {"schema": 1, "machine": there, "parts": [part], "missing": []})
    assert (found["machine"], found["missing"], found["parts"]) == (here, [], [part])
    text = fill.table(part, here)
    assert "| Shoal auto: hybrid 15 | 2 (2..2) | 0.90 |" in text
    assert "16 cores (A)" in text
    assert "16 cores (A)" not in fill.table({**part, "machine": here}, here)


def test_turns_become_rows_by_their_kind(module: Any) -> None:
    rows = module("quick").turns({"cells": [{"turn": "recv, send: 4 of 8, fifo", "us": [1.0, 2.0, 3.0]}]})
    assert (rows[0]["group"], rows[0]["name"], rows[0]["median"]) == ("recv, send", "4 of 8, fifo", 2.0)


def test_every_part_of_quick_runs_a_script_that_takes_its_options(module: Any) -> None:
    for part in module("quick").PARTS:
        script, *arguments = part.command
        if not (BENCHMARKS / script).exists():
            continue
        known = run(script.removesuffix(".py"), "--help").stdout
        limit = [] if part.limit is None else ["--limit"]
        for option in (*(one for one in arguments if one.startswith("--")), *limit, part.writes):
            assert option in known, f"{script} {option}"


def test_the_page_has_a_place_and_a_plot_for_each_part(module: Any) -> None:
    page = (ROOT / "docs" / "explanation" / "benchmarks.md").read_text()
    names = [part.name for part in module("quick").PARTS]
    assert sorted(re.findall(r"<!-- bench (\w+):", page)) == sorted(["machine", *names])
    pictures = re.findall(r"\(\.\./plots/(\w+)\.png\)", page)
    assert len(pictures) == len(set(pictures))
    assert set(pictures) <= set(names)
    assert all((ROOT / "docs" / "plots" / f"{name}.png").exists() for name in pictures)
    for command in re.findall(r"`python (benchmarks/\w+\.py)", page):
        assert (ROOT / command).exists()


def test_the_page_has_the_figures_of_the_json(module: Any) -> None:
    fill, path = module("fill_performance"), ROOT / "docs" / "plots" / "bench.json"
    document, page = json.loads(path.read_text()), (ROOT / "docs" / "explanation" / "benchmarks.md").read_text()
    assert fill.filled(page, document) == page, "run python tools/fill_performance.py"
    for part in document["parts"]:
        assert (path.parent / f"{part['name']}.png").stat().st_size < 100_000
    told = path.read_text()
    for private in (socket.gethostname(), os.path.expanduser("~"), str(ROOT)):
        assert private not in told


def test_figures_have_the_digits_that_matter(module: Any) -> None:
    amount = module("plots").amount
    assert [amount(one, "steps/s") for one in (1.3e6, 231_400, 23_140, 512)] == ["1.3 M", "231 k", "23.1 k", "512"]
    assert [amount(14.23, "us"), amount(1.234, "times as fast"), amount(0.371, "s")] == ["14.2", "1.23", "0.37"]


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

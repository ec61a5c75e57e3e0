"""`shoal.tune` and `shoal tune` with real envs: what runs, what fails in some backends, what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

import shoal
from shoal.cli import main, tune
from shoal.support import processes
from shoal.tuning import candidates, search

QUICK: dict[str, Any] = {"seconds": 15.0, "progress": False}


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search uses its time for more and more rounds. Here it ends early instead, but may take its time if it must."""
    for name, value in {"RUN": 0.02, "KEPT": 3, "ROUNDS": 1, "MOST_ROUNDS": 2}.items():
        monkeypatch.setattr(search, name, value)
    monkeypatch.setattr(candidates, "MOST_ENVS", 64)


class Small(gymnasium.Env[np.ndarray, np.int64]):
    """An env of nested spaces that does nothing."""

    observation_space = gymnasium.spaces.Dict(
        {"a": gymnasium.spaces.Box(-1, 1, (3,), np.float32), "b": gymnasium.spaces.Discrete(4)}
    )
    action_space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2), gymnasium.spaces.Box(-1, 1, (2,))])
    pause = 0.0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return {"a": np.zeros(3, np.float32), "b": 0}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.pause:
            time.sleep(self.pause)
        return {"a": np.zeros(3, np.float32), "b": 1}, 1.0, False, False, {}


class Slow(Small):
    """Takes a third of a second for a step, and counts as waiting."""

    pause = 0.3


class Napping(Small):
    """Waits a little."""

    pause = 0.01


class OnlyMainThread(Small):
    """Raises in any other thread."""

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("needs the main thread")


class DiesInThreads(Small):
    """Takes its process along in any thread but the main one."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class HangsInThreads(Small):
    """Never comes back from a step in any thread but the main one."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(1000)
        return super().step(action)


class LeavesThreads(Small):
    """Leaves instead of being built in any thread but the main one."""

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise SystemExit("not here")


class Broken(Small):
    """Raises in its first step."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        raise ZeroDivisionError("in the first step")


def test_the_plan_is_one_that_can_be_applied(tmp_path: Path) -> None:
    result = shoal.tune(Small, 3, batch_size="all", policy_latency=0.001, backends=("serial", "hybrid"), **QUICK)
    assert result.plan.num_envs == 3
    assert result.plan.batch_size is None
    assert len([trial for trial in result.table if trial.rates]) > 1
    assert result.cost.process_memory > 2**20
    with shoal.make(Small, plan=result.plan) as envs:
        assert envs.num_envs == 3
        envs.reset(seed=0)
        assert envs.step(envs.action_space.sample())[1].tolist() == [1.0] * 3
    result.plan.save(tmp_path / "plan.json")
    with shoal.Pool([Small] * 3, plan=tmp_path / "plan.json") as pool:
        assert pool.plan == result.plan
    result.plot(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(json.dumps(result.as_dict()))["plan"]["num_envs"] == 3
    assert processes.workers(os.getpid()) == []


def test_a_number_of_envs_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    result = shoal.tune("CartPole-v1", backends=("serial",), **QUICK)
    assert len({trial.candidate.num_envs for trial in result.table}) > 3
    with shoal.Pool("CartPole-v1", plan=result.plan) as pool:
        assert pool.num_envs == result.plan.num_envs
    assert capfd.readouterr() == ("", "")


def test_envs_with_several_lanes_are_tuned_as_envs() -> None:
    def pair() -> Any:
        return SyncVectorEnv([Small] * 2)

    result = shoal.tune(pair, 3, batch_size=2, backends=("threads",), **QUICK)
    assert (result.plan.num_envs, result.plan.batch_size) == (3, 2)
    assert any(trial.rates for trial in result.table)
    with shoal.Pool(pair, plan=result.plan) as pool:
        assert (pool.num_envs, pool.batch_size) == (6, 4)


def test_envs_that_differ_are_tuned_together() -> None:
    result = shoal.tune([Small, Napping, Small], batch_size=2, backends=("threads",), **QUICK)
    assert (result.plan.num_envs, result.plan.batch_size) == (3, 2)


def test_slow_envs_are_tried_as_far_as_time_allows() -> None:
    result = shoal.tune(Slow, 7, batch_size="all", seconds=4.0, progress=False)
    assert result.plan.backend in ("threads", "processes", "hybrid")
    assert result.plan.num_workers == 7
    notes = {trial.candidate.backend: trial.state for trial in result.table}
    assert notes["serial"] == "not tried"


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (OnlyMainThread, "needs the main thread"),
        (LeavesThreads, "not here"),
        (DiesInThreads, "SIGKILL"),
        (HangsInThreads, "no answer within"),
    ],
)
def test_what_fails_in_one_backend_runs_in_another(env: Any, says: str) -> None:
    result = shoal.tune(env, 2, batch_size="all", backends=("serial", "threads"), seconds=6.0, progress=False)
    assert result.plan.backend == "serial"
    failed = [trial for trial in result.table if trial.state == "failed"]
    assert failed
    assert {trial.candidate.backend for trial in failed} == {"threads"}
    assert all(says in trial.note for trial in failed)
    assert processes.workers(os.getpid()) == []


def test_what_cannot_be_pickled_is_tried_here() -> None:
    lock = threading.Lock()
    result = shoal.tune(lambda: (lock, Small())[1], 2, **QUICK)
    assert {trial.candidate.backend for trial in result.table} == {"serial", "threads"}
    assert "SHOAL_MEASURING" not in os.environ
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shoal-")]
    with pytest.raises(shoal.BadEnv, match="lock"):
        shoal.tune(lambda: (lock, Small())[1], 2, isolate=True, **QUICK)


def test_an_isolated_env_is_never_built_here() -> None:
    here = os.getpid()

    def elsewhere() -> Small:
        assert os.getpid() != here
        return Small()

    result = shoal.tune(elsewhere, 2, batch_size="all", isolate=True, **QUICK)
    assert {trial.candidate.backend for trial in result.table} == {"processes"}


def test_an_env_that_raises_anywhere_tells_so() -> None:
    with pytest.raises(ZeroDivisionError, match="in the first step") as caught:
        shoal.tune(Broken, 2, **QUICK)
    assert isinstance(caught.value, shoal.EnvError)
    with pytest.raises(shoal.BadEnv, match="no registered env"):
        shoal.tune("NoSuchEnv-v0", **QUICK)


def test_an_env_that_is_too_slow_to_be_measured_tells_so() -> None:
    with pytest.raises(shoal.StepTimeout, match=r"within 0\.5 s"):
        shoal.tune(lambda: time.sleep(60), 2, seconds=0.5, progress=False)
    assert processes.workers(os.getpid()) == []


def import_slowly() -> type[Small]:
    time.sleep(3.5)
    return Small


class FromASlowModule:
    """Makes envs whose module takes longer to import than the search may take."""

    def __reduce__(self) -> Any:
        return import_slowly, ()

    def __call__(self) -> Small:
        return Small()


def test_the_import_of_an_env_takes_none_of_the_searchs_time() -> None:
    found = shoal.tune(FromASlowModule(), 2, batch_size="all", backends=("serial",), seconds=3.0, progress=False)
    assert found.plan.num_envs == 2


# ---- the command ---------------------------------------------------------------------------------------------


def test_the_command_prints_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, picture, found = (str(tmp_path / name) for name in ("plan.json", "map.png", "found.json"))
    files = ["--save", plan, "--plot", picture, "--json", found]
    some = ["-n", "3", "--batch-size", "all", "--policy-ms", "0.1", "--max-memory", "4G", "--seconds", "15"]
    assert main.main(["tune", "CartPole-v1", *some, *files]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in ("a step takes", "of memory", "steps/s in % of the best", "serial", "tuned:"):
        assert words in out
    assert f"envs = shoal.make('CartPole-v1', plan={plan!r})" in out
    document = json.loads(Path(found).read_text())
    assert document["limits"]["max_memory"] == 4 * 2**30
    assert document["limits"]["policy_latency"] == 0.0001
    assert document["machine"]["cores"]["usable"] >= 1
    assert document["plan"]["backend"] == shoal.Plan.load(plan).backend
    assert Path(picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("env", ["CartPole-v1", "some_module:make_env", "some_module:Env-v0"])
def test_the_line_of_python_is_right(env: str) -> None:
    plan = shoal.Plan("processes", 2, num_envs=6, batch_size=3, spin=(0, 0))
    line = tune.apply_line(plan, env)
    made = "shoal.Plan('processes', 2, num_envs=6, batch_size=3, spin=(0, 0))"
    assert eval(made) == plan
    if env == "some_module:make_env":
        assert line == f"from some_module import make_env\nenvs = shoal.Pool(make_env, plan={made})"
    else:
        assert line == f"envs = shoal.Pool({env!r}, plan={made})"
    assert "shoal.make(" in tune.apply_line(shoal.Plan("serial", 1, num_envs=2), env)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["NoSuchEnv-v0"], "NoSuchEnv"),
        (["no_such_module_at_all:make"], "no_such_module_at_all"),
        (["CartPole-v1", "-n", "0"], "at least 1"),
        (["CartPole-v1", "-n", "4", "--batch-size", "5"], "batch_size"),
        (["CartPole-v1", "--batch-size", "some"], "some"),
        (["CartPole-v1", "--max-memory", "much"], "much"),
        (["CartPole-v1", "--max-memory", "1M", "--seconds", "15"], "max_memory"),
        (["CartPole-v1", "--policy-ms", "-1"], "-1"),
        (["CartPole-v1", "--backends", "auto"], "auto"),
        (["CartPole-v1", "--backends", "serial", "--isolate"], "isolate"),
        (["CartPole-v1", "--save", "no/such/folder/plan.json"], "no/such/folder"),
        (["CartPole-v1", "--plot", "map.pdf"], "map.pdf"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_refuses_nonsense_in_one_sentence(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main.main(["tune", *arguments])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_an_interrupted_command_prints_the_best_so_far_and_leaves_nothing() -> None:
    command = [sys.executable, "-m", "shoal.cli.main", "tune", "CartPole-v1", "-n", "4", "--seconds", "60"]
    script = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    family: list[processes.Process] = []
    ends = time.monotonic() + 60
    while len(processes.workers(script.pid)) < 3 and time.monotonic() < ends:  # the lab and a trial of its
        time.sleep(0.05)
    time.sleep(2.0)
    family = processes.descendants(script.pid)
    script.send_signal(signal.SIGINT)
    out, err = script.communicate(timeout=60)
    assert script.returncode == 130, err
    assert "shoal.make(" in out or "shoal.Pool(" in out
    assert "Traceback" not in err
    while any(map(processes.alive, family)) and time.monotonic() < ends:
        time.sleep(0.05)
    assert [process for process in family if processes.alive(process)] == []

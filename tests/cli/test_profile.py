"""`shoal profile`: what it prints and writes, the flame graph, and how it refuses."""

from __future__ import annotations

import html
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main, profile
from shoal.support.optional_dependencies import install

QUICK = ["--seconds", "0.2"]
ENV_MODULE = """
import time
import gymnasium

class Slow(gymnasium.Wrapper):
    def step(self, action):
        time.sleep(0.003)
        return super().step(action)

class Dies(gymnasium.Wrapper):
    def step(self, action):
        raise RuntimeError("no such simulator")

def slow():
    return Slow(gymnasium.make("CartPole-v1"))

def dies():
    return Dies(gymnasium.make("CartPole-v1"))
"""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder with a module of envs in it; sys.path is put back afterwards."""
    (tmp_path / "my_profile_envs.py").write_text(ENV_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_profile_envs", raising=False)
    return tmp_path


@pytest.fixture
def spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a script in the place of py-spy, and give what it was called with."""

    def install(script: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "py-spy").write_text(f'#!/bin/sh\necho "$@" >"{tmp_path}/called"\n{script}\n')
        (folder / "py-spy").chmod(0o755)
        (folder / "python").symlink_to(sys.executable)
        monkeypatch.setattr(sys, "executable", str(folder / "python"))
        return tmp_path / "called"

    return install


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must be refused and return the one sentence it says."""
    try:
        code: Any = main.main(["profile", *arguments])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.strip().count("\n") == 0
    assert "Traceback" not in err
    return err


def test_it_prints_shares_workers_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["CartPole-v1", "-n", "7", "--backend", "processes", "--workers", "3", *QUICK]
    assert main.main(["profile", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith("CartPole-v1: 7 envs, processes with 3 workers, batches of 7: ")
    for part in ("waiting for stragglers", "the caller", "99th percentile", "slowest env: ", "\nverdict: "):
        assert part in out
    assert out.endswith("\n")


def test_it_writes_nothing_but_json_to_stdout(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["my_profile_envs:slow", "-n", "4", "--backend", "threads", "--workers", "4", "--batch-size", "2"]
    assert main.main(["profile", *arguments, *QUICK, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["env"], found["backend"]) == ("my_profile_envs:slow", "threads")
    assert (found["num_envs"], found["batch_size"]) == (4, 2)
    assert found["steps"] > 0
    assert found["batches"] > 0
    assert found["median"] >= 0.0025
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert len(found["workers"]) == 4
    assert found["machine"]["cores"]["usable"] >= 1


def test_the_policy_takes_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["CartPole-v1", "-n", "2", "--backend", "serial", "--policy-ms", "10", "--seconds", "0.5", "--json"]
    assert main.main(["profile", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["policy_ms"] == 10
    assert found["shares"]["caller"] * found["seconds"] >= 0.01 * (found["batches"] - 1)


def test_it_saves_json_and_a_plot(tmp_path: Path) -> None:
    json_file, plot_file = tmp_path / "out.json", tmp_path / "out.png"
    files = ["--json", str(json_file), "--plot", str(plot_file)]
    assert main.main(["profile", "CartPole-v1", "-n", "3", "--backend", "serial", *QUICK, *files]) == 0
    assert json.loads(json_file.read_text())["num_envs"] == 3
    assert plot_file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("batch_size", ["4", "2"])
def test_it_saves_a_page(batch_size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.html"
    sizes = ["-n", "4", "--batch-size", batch_size, "--backend", "processes", "--workers", "2"]
    assert main.main(["profile", "CartPole-v1", *sizes, *QUICK, "--html", str(path)]) == 0
    out, err = capsys.readouterr()
    assert f"report saved to {path}" in err
    text = path.read_text()
    verdict = out.strip().splitlines()[-1].removeprefix("verdict: ")
    assert html.escape(verdict) in text
    found = re.search(r"^const data = (.*);$", text, re.MULTILINE)
    assert found
    times = json.loads(found.group(1))["timeline"]
    assert times["batches"] == 100
    assert all(worker["bars"] for worker in times["workers"])


def test_a_page_needs_a_name_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "CartPole-v1", "--html", "report.txt")
    assert "the report is HTML, so name it .html and not 'report.txt'" in said


@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_the_flame_graph_is_of_a_worker_or_of_the_caller(
    backend: str, spy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called = spy('sleep 0.3; while [ $# -gt 0 ]; do [ "$1" = --output ] && echo "<svg/>" >"$2"; shift; done')
    flame = tmp_path / "out.svg"
    arguments = ["CartPole-v1", "-n", "2", "--backend", backend, *QUICK, "--flame", str(flame)]
    assert main.main(["profile", *arguments]) == 0
    assert flame.read_text() == "<svg/>\n"
    assert f"flame graph saved to {flame}" in capsys.readouterr().err
    given = called.read_text().split()
    assert given[0] == "record"
    assert given[given.index("--duration") + 1] == "1"
    pid = int(given[given.index("--pid") + 1])
    assert (pid == os.getpid()) == (backend == "serial")


def test_a_real_flame_graph_shows_the_env(in_folder: Path) -> None:
    flame = in_folder / "out.svg"
    try:
        profile.find_spy(flame)
    except profile.UsageError as error:
        pytest.skip(str(error))
    if main.main(["profile", "my_profile_envs:slow", "-n", "2", "--backend", "serial", *QUICK, "--flame", str(flame)]):
        pytest.skip("py-spy may not look at processes here")
    assert "my_profile_envs" in flame.read_text()


def test_what_py_spy_complains_about_is_passed_on(spy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spy('echo "Error: Permission Denied: try again" >&2; echo "more" >&2; exit 1')
    said = refused(capsys, "CartPole-v1", "-n", "2", "--backend", "serial", *QUICK, "--flame", str(tmp_path / "a.svg"))
    assert "Permission Denied: try again (it may need root" in said


def test_without_py_spy_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install("profile") in refused(capsys, "CartPole-v1", "--flame", "a.svg")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["NoSuchEnv-v0"], "NoSuchEnv"),
        (["my_profile_envs:absent"], "absent"),
        (["my_profile_envs:dies", "-n", "2", "--backend", "serial"], "no such simulator"),
        (["my_profile_envs:dies", "-n", "2", "--backend", "processes"], "no such simulator"),
        (["CartPole-v1", "-n", "0"], "at least 1"),
        (["CartPole-v1", "--seconds", "nan"], "nan"),
        (["CartPole-v1", "--policy-ms", "-3"], "-3"),
        (["CartPole-v1", "--backend", "magic"], "magic"),
        (["CartPole-v1", "-n", "4", "--batch-size", "5"], "a batch of 5 is more than 4 envs"),
        (["CartPole-v1", "--plot", "plot.pdf"], "plot.pdf"),
        (["CartPole-v1", "--json", "no/such/folder/a.json"], "no/such/folder"),
        ([], "ENV"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nonsense_is_refused_in_one_sentence(
    arguments: list[str], says: str, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, *arguments)


@pytest.mark.parametrize(("flame", "says"), [("a.png", "a.png"), ("no/such/folder/a.svg", "no/such/folder")])
def test_a_flame_graph_that_cannot_be_saved_is_refused(
    flame: str, says: str, spy: Any, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spy("exit 0")
    assert says in refused(capsys, "CartPole-v1", "--flame", flame)

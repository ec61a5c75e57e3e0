"""The command line: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.cli import doctor, main, self_test
from shoal.support.optional_dependencies import install

TINY = ["-n", "2", "--seconds", "0.02", "--rounds", "2"]
ENV_MODULE = """
import gymnasium

def make():
    return gymnasium.make("CartPole-v1")

def broken():
    raise RuntimeError("no such simulator")

def number():
    return 42
"""


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder with a module of envs in it; sys.path is put back afterwards."""
    (tmp_path / "my_bench_envs.py").write_text(ENV_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_bench_envs", raising=False)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must be refused and return the one sentence it says."""
    try:
        code: Any = main.main(arguments)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err


def test_bench_prints_a_table_and_writes_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_file, plot_file = tmp_path / "out.json", tmp_path / "out.png"
    more = ["--backends", "serial", "processes", "--json", str(json_file), "--plot", str(plot_file)]
    assert main.main(["bench", "CartPole-v1", *TINY, *more]) == 0
    out = capsys.readouterr().out
    for name in ("plain loop", "Shoal serial", "Shoal processes", "Gymnasium Sync", "Gymnasium Async"):
        assert name in out
    document = json.loads(json_file.read_text())
    assert document["machine"]["cores"]["usable"] >= 1
    (result,) = document["results"]
    assert {row["name"]: row["note"] for row in result["rows"] if row["status"] != "ok"} == {}
    assert all(rate > 0 for row in result["rows"] for rate in row["rates"])
    assert all(row["of_limit"]["median"] > 0 for row in result["rows"])
    assert size_of_png(plot_file) > (600, 200)


def test_bench_writes_nothing_but_json_to_stdout(in_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--backends", "serial", "--json"]
    assert main.main(["bench", "my_bench_envs:make", *TINY, *more]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["env"] == "my_bench_envs:make"
    assert {row["status"] for row in result["rows"]} == {"ok"}


def test_bench_measures_batches_of_the_first_ready(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--backends", "processes", "--batch-size", "1", "--workers", "2", "--json"]
    assert main.main(["bench", "CartPole-v1", *TINY, *more]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    row = next(row for row in result["rows"] if row["role"] == "shoal")
    assert row["name"] == "Shoal processes x2, batch 1"
    assert row["status"] == "ok", row["note"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["NoSuchEnv-v0"], "NoSuchEnv"),
        (["CartPole-v77"], "v77"),
        (["no_such_module_at_all:make"], "no_such_module_at_all"),
        (["my_bench_envs:absent"], "absent"),
        (["my_bench_envs:broken"], "no such simulator"),
        (["my_bench_envs:number"], "no Gymnasium env"),
        (["CartPole-v1", "-n", "0"], "at least 1"),
        (["CartPole-v1", "-n", "many"], "many"),
        (["CartPole-v1", "--seconds", "nan"], "nan"),
        (["CartPole-v1", "--seconds", "-1"], "-1"),
        (["CartPole-v1", "--rounds", "0"], "at least 1"),
        (["CartPole-v1", "--backends", "magic"], "magic"),
        (["CartPole-v1", "-n", "4", "--batch-size", "5"], "5"),
        (["CartPole-v1", "--plot", "no/such/folder/a.png"], "no/such/folder"),
        (["CartPole-v1", "--plot", "plot.pdf"], "plot.pdf"),
        (["CartPole-v1", "--json", "no/such/folder/a.json"], "no/such/folder"),
        ([], "ENV"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bench_refuses_nonsense_in_one_sentence(
    arguments: list[str], says: str, in_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, "bench", *arguments)


def test_plot_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.cli.report.importlib.util.find_spec", lambda name: None)
    said = refused(capsys, "bench", "CartPole-v1", "--plot", "a.png")
    assert install("plot") in said


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "swim" in refused(capsys, "swim")


def test_doctor_json_has_every_fact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["doctor", "--json", "--no-test"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert set(known["cores"]) == {"usable", "affinity", "cgroup_quota", "machine"}
    assert 1 <= known["cores"]["usable"] <= known["cores"]["affinity"]
    assert known["native"] in ("native", "twin")
    assert known["start_method"]["shoal"] in known["start_method"]["offered"]
    assert {"python", "gymnasium", "numpy", "memory_available", "dev_shm", "installed", "gil", "cache"} <= set(known)
    assert set(known["integrations"]) == set(doctor.INTEGRATIONS)


def test_doctor_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(self_test, "BACKENDS", ("serial",))
    assert main.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for label in ("cores usable", "start method", "stable_baselines3", "self-test: serial", "works"):
        assert label in out


@pytest.mark.parametrize("backend", ["threads", "processes", "hybrid"])
def test_doctor_tries_backends(backend: str) -> None:
    tried = self_test.run(backend)
    assert tried["ok"] is True, tried
    assert tried["steps_per_second"] > 0


def test_doctor_says_what_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"serial": {"ok": False, "why": "it [crashed]"}, "threads": {"ok": None, "why": "no threads"}}
    monkeypatch.setattr(self_test, "BACKENDS", tuple(found))
    monkeypatch.setattr(self_test, "run", found.get)
    assert main.main(["doctor", "--text"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("```\n")
    assert "self-test: serial: FAILED: it [crashed]\nself-test: threads: not here: no threads\n```" in out


def test_a_backend_that_crashes_is_a_line_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert self_test.run("serial") == {"ok": False, "why": "its process ended with code 1: it said nothing"}


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "shoal", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"shoal {shoal.__version__}\n"


def test_doctor_finds_versions_without_importing() -> None:
    assert doctor.find("gymnasium", "gymnasium") == doctor.version("gymnasium")
    assert doctor.find("no_such_module_at_all", "nothing") is None


def test_help_needs_no_plotting_and_no_peers() -> None:
    code = (
        "import sys, shoal.cli.main, shoal.cli.peers, shoal.cli.report\n"
        "heavy = {'matplotlib', 'torch', 'stable_baselines3', 'tianshou', 'envpool', 'pufferlib'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def size_of_png(path: Path) -> tuple[int, int]:
    """Return width and height from a PNG's first chunk."""
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main.main(["--version"])
    assert (left.value.code, capsys.readouterr().out) == (0, f"shoal {shoal.__version__}\n")

"""make_vec_env of the Stable-Baselines3 face: against SB3's, and mixed with it; the monitors' files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

pytest.importorskip("stable_baselines3", reason="these tests compare with Stable-Baselines3")

from stable_baselines3.common import env_util as sb3_env_util
from stable_baselines3.common import monitor as sb3_monitor
from stable_baselines3.common import vec_env as sb3

from dialects.sb3_envs import (
    FragileEnv,
    NoteworthyEnv,
)
from dialects.sb3_kit import assert_lockstep, zeros
from envs import CountEnv
from shoal.dialects import sb3 as face

# ---- make_vec_env -------------------------------------------------------------------------------------------

MADE: dict[str, dict[str, Any]] = {
    "id": {"env_id": "CartPole-v1", "n_envs": 3, "seed": 5},
    "class": {"env_id": CountEnv, "n_envs": 2, "env_kwargs": {"length": 3}, "seed": 0},
    "wrapped": {
        "env_id": "CartPole-v1",
        "wrapper_class": gymnasium.wrappers.TimeLimit,
        "wrapper_kwargs": {"max_episode_steps": 6},
        "start_index": 2,
        "seed": 1,
    },
    "info keywords": {
        "env_id": NoteworthyEnv,
        "env_kwargs": {"note": {"score": 4}},
        "monitor_kwargs": {"info_keywords": ("score",)},
        "seed": 2,
    },
}
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "ours": (face.make_vec_env, {}),
    "ours, processes": (
        face.make_vec_env,
        {"vec_env_cls": face.SubprocVecEnv, "vec_env_kwargs": {"num_workers": 2}},
    ),
    "ours by theirs": (sb3_env_util.make_vec_env, {"vec_env_cls": face.DummyVecEnv}),
    "theirs by ours": (face.make_vec_env, {"vec_env_cls": sb3.DummyVecEnv}),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("arguments", MADE.values(), ids=MADE)
def test_make_vec_env(arguments: dict[str, Any], way: Any, tmp_path: Path) -> None:
    function, options = way
    ours = function(monitor_dir=str(tmp_path / "ours" / "deep"), **arguments, **options)
    theirs = sb3_env_util.make_vec_env(monitor_dir=str(tmp_path / "theirs"), **arguments)
    if options.get("vec_env_cls") is not sb3.DummyVecEnv:  # which takes its own Monitor alone for one
        assert ours.env_is_wrapped(sb3_monitor.Monitor) == [True] * ours.num_envs
    assert ours.render_mode == theirs.render_mode
    assert_lockstep(ours, theirs, tidy=drop_times, steps=60)
    assert episodes(tmp_path / "ours" / "deep") == episodes(tmp_path / "theirs")
    assert episodes(tmp_path / "theirs")


def drop_times(infos: Any) -> None:
    for info in infos:
        info.get("episode", {}).pop("t", None)


def episodes(folder: Path) -> dict[str, list[list[str]]]:
    """By file: the header and the rows of a monitor's CSV, without times."""
    found = {}
    for file in sorted(folder.glob("*.monitor.csv")):
        about, *lines = file.read_text().splitlines()
        assert about.startswith("#{")
        found[file.name] = [line.split(",")[:2] + line.split(",")[3:] for line in lines]
    return found


def test_our_processes_by_their_make_vec_env() -> None:
    options = {"vec_env_cls": face.SubprocVecEnv, "vec_env_kwargs": {"num_workers": 1}}
    ours, theirs = (sb3_env_util.make_vec_env("CartPole-v1", 2, seed=1, **o) for o in (options, {}))
    assert isinstance(ours, face.SubprocVecEnv)
    assert_lockstep(ours, theirs, tidy=drop_times)


def test_make_vec_env_without_a_monitor_file_or_a_seed() -> None:
    made = face.make_vec_env(CountEnv)
    assert made.num_envs == 1
    assert made.reset()[0, 0] >= 0  # a seed was drawn
    made.close()


def test_a_restart_goes_on_with_the_monitor_file(tmp_path: Path) -> None:
    made = face.make_vec_env(
        FragileEnv, 2, monitor_dir=str(tmp_path), vec_env_cls=face.SubprocVecEnv,
        vec_env_kwargs={"num_workers": 2, "on_error": "restart"},
    )  # fmt: skip
    made.reset()
    made.env_method("set_wrapper_attr", "length", 3)
    for _ in range(7):
        made.step(zeros(2))
    before = episodes(tmp_path)
    assert [len(lines) for lines in before.values()] == [3, 3]  # a header and two episodes
    assert "shoal_restart" in made.step(np.array([3, 0]))[3][0]
    made.step(zeros(2))
    made.close()
    for name, lines in before.items():
        assert episodes(tmp_path)[name][: len(lines)] == lines


@pytest.mark.parametrize("override", [True, False])
def test_measuring_the_envs_leaves_no_trace_in_their_monitor_files(tmp_path: Path, override: bool) -> None:
    made = face.make_vec_env(
        "CartPole-v1", 2, monitor_dir=str(tmp_path), vec_env_cls=face.SubprocVecEnv,
        monitor_kwargs={"override_existing": override},
    )  # fmt: skip
    made.close()
    assert list(episodes(tmp_path).values()) == [[["r", "l"]]] * 2

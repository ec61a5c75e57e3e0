"""Monitor and MonitorEpisodes: returns, lengths and the CSV file, read back with csv and json."""

from __future__ import annotations

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from envs import CountEnv
from shoal.wrappers import Monitor, MonitorEpisodes, Normalize, wrap
from wrappers.kit import HOSTS, MODES, NoisyEnv, follow, is_pool, play, stable_baselines


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The line of JSON and the episodes."""
    with open(path, newline="") as file:
        first = file.readline()
        assert first.startswith("#")
        return json.loads(first[1:]), list(csv.DictReader(file))


# ---- MonitorEpisodes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", HOSTS)
def test_episodes_are_summed_up_as_a_plain_loop_does(host: str, mode: str, tmp_path: Path) -> None:
    monitor = MonitorEpisodes(tmp_path / "run", info_keywords=("score",), keep=1000, env_id="Noisy-v0")
    envs = wrap(HOSTS[host](NoisyEnv, mode), monitor)
    sums: dict[int, tuple[float, int]] = {}
    episodes: list[tuple[float, int]] = []
    try:
        for answer, rows in follow(envs, NoisyEnv, 40):
            for i, (env_id, row) in enumerate(zip(answer.ids, rows, strict=True)):
                stepped = not row.began or row.done
                total, length = sums.get(env_id, (0.0, 0))
                sums[env_id] = (total + row.reward, length + 1) if stepped else (0.0, 0)
                said = episode_of(envs, answer, i)
                assert (said is not None) == row.done
                if said is not None:
                    assert said["r"] == pytest.approx(sums[env_id][0], abs=1e-5)
                    assert said["l"] == said["score"] == sums[env_id][1], "the last step's info, not the reset's"
                    assert said["t"] >= 0
                    episodes.append(sums[env_id])
                    sums[env_id] = (0.0, 0)
    finally:
        envs.close()
    assert len(episodes) > 3
    assert monitor.episode_count == len(episodes)
    assert list(monitor.last_lengths) == [length for _, length in episodes]
    np.testing.assert_allclose(list(monitor.last_returns), [total for total, _ in episodes])
    header, lines = read(tmp_path / "run.monitor.csv")
    assert header["env_id"] == "Noisy-v0"
    assert header["t_start"] > 0
    assert [int(line["l"]) for line in lines] == [int(line["score"]) for line in lines] == list(monitor.last_lengths)
    np.testing.assert_allclose([float(line["r"]) for line in lines], list(monitor.last_returns), atol=1e-5)
    times = [float(line["t"]) for line in lines]
    assert times == sorted(times)


def episode_of(envs: Any, answer: Any, row: int) -> dict[str, Any] | None:
    """What a host's infos say about an episode that ended in this row."""
    if is_pool(envs):
        found: dict[str, Any] | None = answer.infos.get(row, {}).get("episode")
        return found
    if not answer.infos.get("_episode", np.zeros(envs.num_envs))[row]:
        return None
    return {key: answer.infos["episode"][key][row] for key in ("r", "l", "t", "score")}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", ["pool of one", "shoal.make", "gymnasium"])
def test_what_envs_say_of_their_episodes_is_replaced(host: str, mode: str) -> None:
    """An env with statistics of its own knows its raw rewards; the monitor behind a Normalize knows others."""
    envs = wrap(HOSTS[host](partial(recorded, NoisyEnv), mode), Normalize(norm_obs=False), monitor := MonitorEpisodes())
    try:
        told = 0
        for answer, rows in follow(envs, NoisyEnv, 30):
            ended = [i for i, row in enumerate(rows) if row.done]
            for i, total in zip(
                ended, list(monitor.last_returns)[len(monitor.last_returns) - len(ended) :], strict=True
            ):
                said = answer.infos[i]["episode"]["r"] if is_pool(envs) else answer.infos["episode"]["r"][i]
                assert said == pytest.approx(total, abs=1e-5)
                told += 1
        assert told > 3
    finally:
        envs.close()


def recorded(make: Any) -> Any:
    return gymnasium.wrappers.RecordEpisodeStatistics(make())


def test_only_the_last_episodes_are_kept() -> None:
    with wrap(shoal.Pool(partial(CountEnv, 2), 3, backend="serial"), monitor := MonitorEpisodes(keep=4)) as pool:
        pool.reset(seed=0)
        for _ in range(9):
            pool.step([0, 0, 1])
        assert list(monitor.last_returns) == [203.0, 3.0, 3.0, 203.0]
        assert monitor.episode_count == 9


def test_a_reset_halfway_is_no_episode() -> None:
    with wrap(shoal.Pool(CountEnv, 2, backend="serial"), monitor := MonitorEpisodes()) as pool:
        pool.reset(seed=0)
        pool.step([0, 0])
        pool.reset([0])
        for _ in range(4):
            batch = pool.step([0, 0])
        assert batch.done.tolist() == [False, True]
        assert list(monitor.last_lengths) == [5]
        assert pool.step([0, 0]).info[0]["episode"]["l"] == 5


def test_keywords_that_no_info_has_are_said_to_be_missing() -> None:
    for mode in MODES:
        with wrap(shoal.Pool(NoisyEnv, 1, backend="serial", autoreset=mode), MonitorEpisodes(None, ("lost",))) as pool:  # type: ignore[arg-type]
            with pytest.raises(KeyError, match=r"'lost'.*score"):
                list(play(pool, 30))


# ---- Monitor -------------------------------------------------------------------------------------------------


def run(env: Any, episodes: int, **reset: Any) -> list[dict[str, Any]]:
    infos = []
    for _ in range(episodes):
        env.reset(**reset)
        ended = False
        while not ended:
            *_, terminated, truncated, info = env.step(np.zeros(2, np.float32))
            ended = terminated or truncated
            assert ("episode" in info) == ended
        infos.append(info["episode"])
    return infos


def test_a_single_env_writes_its_episodes(tmp_path: Path) -> None:
    env = Monitor(NoisyEnv(), tmp_path / "new folder" / "run", info_keywords=("score",))
    told = run(env, 5, seed=1)
    env.close()
    header, lines = read(tmp_path / "new folder" / "run.monitor.csv")
    assert set(header) == {"t_start", "env_id"}
    assert [float(line["r"]) for line in lines] == [episode["r"] for episode in told]
    assert [int(line["l"]) for line in lines] == [int(line["score"]) for line in lines] == env.get_episode_lengths()
    assert [float(line["t"]) for line in lines] == [episode["t"] for episode in told]
    np.testing.assert_allclose(env.get_episode_rewards(), [episode["r"] for episode in told], atol=1e-5)
    assert env.get_total_steps() == sum(env.get_episode_lengths())
    assert len(env.get_episode_times()) == 5


def test_lines_are_there_before_the_end(tmp_path: Path) -> None:
    """A run that is killed has lost nothing."""
    env = Monitor(NoisyEnv(), tmp_path / "run")
    run(env, 3)
    assert len(read(tmp_path / "run.monitor.csv")[1]) == 3
    env.close()


NAMES = {"": "monitor.csv", "run": "run.monitor.csv", "run.monitor.csv": "run.monitor.csv", "a/b": "a/b.monitor.csv"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["one", "many"])
def test_the_file_has_its_extension(name: str, kind: str, tmp_path: Path) -> None:
    path = f"{tmp_path}/{name}" if name else str(tmp_path)
    made: Any = Monitor(NoisyEnv(), path) if kind == "one" else MonitorEpisodes(path)
    made.close()
    assert (tmp_path / NAMES[name]).exists()


def test_a_file_is_begun_anew_or_gone_on_with(tmp_path: Path) -> None:
    for override, expected in ((True, 2), (False, 4), (True, 2)):
        env = Monitor(NoisyEnv(), tmp_path / "run", override_existing=override)
        run(env, 2)
        env.close()
        assert len(read(tmp_path / "run.monitor.csv")[1]) == expected


def test_arguments_of_reset_become_columns(tmp_path: Path) -> None:
    env = Monitor(NoisyEnv(), tmp_path / "run", reset_keywords=("seed",))
    with pytest.raises(ValueError, match=r"'seed'.*reset_keywords"):
        env.reset()
    assert [episode["seed"] for episode in run(env, 2, seed=7)] == [7, 7]
    env.close()
    assert [line["seed"] for line in read(tmp_path / "run.monitor.csv")[1]] == ["7", "7"]


def test_steps_and_resets_out_of_turn_are_refused() -> None:
    env = Monitor(CountEnv(2), allow_early_resets=False)
    with pytest.raises(RuntimeError, match="reset"):
        env.step(0)
    env.reset()
    with pytest.raises(RuntimeError, match="allow_early_resets=True"):
        env.reset()
    env.step(0), env.step(0)
    with pytest.raises(RuntimeError, match=r"over.*reset"):
        env.step(0)
    env.reset()
    env.close()


def test_an_early_reset_drops_the_episode() -> None:
    env = Monitor(CountEnv(2))
    env.reset()
    env.step(1)
    env.reset()
    assert env.step(0)[1] == 1.0
    assert env.step(0)[4]["episode"]["r"] == 3.0
    env.close()


@pytest.mark.parametrize("mode", MODES)
def test_monitored_envs_work_in_a_pool(mode: str) -> None:
    """Under same_step the episode is in the final info."""
    with shoal.Pool(lambda: Monitor(CountEnv(2)), 2, backend="serial", autoreset=mode) as pool:  # type: ignore[arg-type]
        pool.reset(seed=0)
        pool.step([0, 1])
        info = pool.step([0, 1]).info[1]
        assert info.get("final_info", info)["episode"]["r"] == 203.0


def test_stable_baselines_reads_the_files(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="Stable-Baselines3 reads such files with pandas")
    results = stable_baselines("common.monitor")
    one = Monitor(NoisyEnv(), tmp_path / "one", info_keywords=("score",))
    run(one, 3)
    one.close()
    with wrap(
        shoal.Pool(NoisyEnv, 2, backend="serial"), many := MonitorEpisodes(tmp_path / "many", ("score",))
    ) as pool:
        pool.reset(seed=0)
        for _ in range(30):
            pool.step(np.zeros((2, 2), np.float32))
    frame = results.load_results(str(tmp_path))
    assert len(frame) == 3 + many.episode_count
    assert sorted(frame["l"]) == sorted(frame["score"]) == sorted([*one.get_episode_lengths(), *many.last_lengths])


@pytest.mark.parametrize("keywords", [(), ("score",)])
def test_the_lines_are_those_of_stable_baselines(keywords: tuple[str, ...], tmp_path: Path) -> None:
    """But for the seconds."""
    theirs = stable_baselines("common.monitor").Monitor(NoisyEnv(), str(tmp_path / "theirs"), info_keywords=keywords)
    ours = Monitor(NoisyEnv(), tmp_path / "ours", info_keywords=keywords)
    for env in (theirs, ours):
        run(env, 4, seed=3)
        env.close()
    found = [read(tmp_path / f"{name}.monitor.csv") for name in ("ours", "theirs")]
    assert found[0][0].keys() == found[1][0].keys()
    assert found[0][0]["env_id"] == found[1][0]["env_id"]
    columns = [[{key: line[key] for key in line if key != "t"} for line in lines] for _, lines in found]
    assert columns[0] == columns[1]
    assert [list(lines[0]) for _, lines in found] == [["r", "l", "t", *keywords]] * 2
    ends = [(tmp_path / f"{name}.monitor.csv").read_bytes().count(b"\r\n") for name in ("ours", "theirs")]
    assert ends[0] == ends[1]

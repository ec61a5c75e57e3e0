"""EpisodeLogger and its kin: what they write is what a plain loop adds up, no more often than they were told to."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from envs import CountEnv, FailEnv
from shoal.wrappers import EpisodeLogger, Normalize, TensorBoardLogger, WandbLogger, monitor, wrap
from wrappers.kit import HOSTS, MODES, NoisyEnv, assert_same, follow, is_pool, play

NAMES = ("return", "length", "episodes", "steps_per_second", "restarts")
AT_ONCE: dict[str, Any] = {"every_seconds": 0, "every_steps": 0}


class Writer:
    """Takes what TensorBoard would: entries by step."""

    def __init__(self, *_: Any) -> None:
        self.entries: dict[int, dict[str, float]] = {}
        self.closes = 0

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        entry, name = self.entries.setdefault(step, {}), tag.removeprefix("shoal/")
        assert name not in entry, "each value once"
        entry[name] = value

    def close(self) -> None:
        self.closes += 1


class Run:
    """Takes what W&B would."""

    def __init__(self) -> None:
        self.entries: dict[int, dict[str, float]] = {}
        self.finished = 0

    def log(self, values: dict[str, float], step: int) -> None:
        assert all(step > earlier for earlier in self.entries), "W&B drops what lies before its last step"
        self.entries[step] = {name.removeprefix("shoal/"): value for name, value in values.items()}

    def finish(self) -> None:
        self.finished += 1


LOGGERS: dict[str, Any] = {
    "tensorboard": lambda **options: TensorBoardLogger(Writer(), **options),
    "wandb": lambda **options: WandbLogger(Run(), **options),
}


def entries_of(logger: Any) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = getattr(logger, "writer", getattr(logger, "run", None)).entries
    return found


# ---- what is written -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOGGERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", HOSTS)
def test_each_batch_with_an_end_is_one_entry_as_a_plain_loop_adds_it_up(host: str, mode: str, kind: str) -> None:
    logger = LOGGERS[kind](**AT_ONCE)
    envs = wrap(HOSTS[host](NoisyEnv, mode), logger)
    sums: dict[int, tuple[float, int]] = {}
    steps = episodes = 0
    expected: dict[int, tuple[float, float, int]] = {}
    try:
        for answer, rows in follow(envs, NoisyEnv, 40):
            ended = []
            for env_id, row in zip(answer.ids, rows, strict=True):
                stepped = row.done or not row.began
                total, length = sums.get(env_id, (0.0, 0))
                sums[env_id] = (total + row.reward, length + 1) if stepped else (0.0, 0)
                steps += stepped
                if row.done:
                    ended.append(sums[env_id])
                    sums[env_id] = (0.0, 0)
            episodes += len(ended)
            if ended:
                mean_return, mean_length = np.mean(ended, axis=0)
                expected[steps] = (mean_return, mean_length, episodes)
            assert logger.global_step == steps
            assert logger.episodes == episodes
            assert list(entries_of(logger)) == list(expected), "at once, and only where an episode has ended"
    finally:
        envs.close()
    assert episodes > 3
    for step, (mean_return, mean_length, count) in expected.items():
        entry = entries_of(logger)[step]
        assert set(entry) == set(NAMES)
        assert entry["return"] == pytest.approx(mean_return)
        assert entry["length"] == pytest.approx(mean_length)
        assert entry["episodes"] == count
        assert entry["steps_per_second"] > 0
        assert entry["restarts"] == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", ["pool of 7 on 3 processes", "shoal.make", "gymnasium"])
def test_batches_pass_as_they_are(host: str, mode: str) -> None:
    """Infos too: an env's own words about its episode stay."""
    raw, wrapped = HOSTS[host](recorded, mode), wrap(HOSTS[host](recorded, mode), TensorBoardLogger(Writer()))
    try:
        for one, other in zip(play(raw, 25), play(wrapped, 25), strict=True):
            assert one.ids == other.ids
            for name in ("obs", "reward", "terminated", "truncated"):
                assert_same(getattr(other, name), getattr(one, name))
            assert without_time(one.infos) == without_time(other.infos)
    finally:
        raw.close(), wrapped.close()


def recorded() -> Any:
    return gymnasium.wrappers.RecordEpisodeStatistics(NoisyEnv())  # type: ignore[type-var]


def without_time(value: Any) -> Any:
    """Comparable; how long an episode took is not."""
    if isinstance(value, dict):
        return {key: without_time(part) for key, part in value.items() if key not in ("t", "_t")}
    return value.tolist() if isinstance(value, np.ndarray) and value.dtype != object else repr(value)


def test_it_logs_the_rewards_that_pass_where_it_stands() -> None:
    first, last = TensorBoardLogger(Writer(), **AT_ONCE), TensorBoardLogger(Writer(), **AT_ONCE)
    with wrap(shoal.Pool(partial(CountEnv, 3), 2, backend="serial"), first, Normalize(), last) as pool:
        pool.reset(seed=0)
        for _ in range(3):
            pool.step(np.zeros(2, int))
    assert entries_of(first)[6]["return"] == 6.0
    assert entries_of(last)[6]["return"] != 6.0


def test_an_episode_that_is_reset_before_its_end_is_none() -> None:
    with wrap(shoal.Pool(CountEnv, 2, backend="serial"), logger := LOGGERS["wandb"](**AT_ONCE)) as pool:
        pool.reset(seed=0)
        pool.step(np.zeros(2, int))
        pool.reset([1])
        for _ in range(4):
            pool.step(np.zeros(2, int))
    assert {step: entry["length"] for step, entry in entries_of(logger).items()} == {10: 5.0}


def test_a_run_may_go_on_where_an_earlier_one_has_stopped() -> None:
    logger = LOGGERS["wandb"](**AT_ONCE)
    logger.global_step = 1000
    with wrap(shoal.Pool(partial(CountEnv, 2), 3, backend="serial"), logger) as pool:
        pool.reset()
        pool.step(np.zeros(3, int)), pool.step(np.zeros(3, int))
    assert list(entries_of(logger)) == [1006]


def test_names_carry_the_prefix_that_was_asked_for() -> None:
    logger = WandbLogger(Run(), every_seconds=0, prefix="eval")
    with wrap(shoal.Pool(partial(CountEnv, 1), 1, backend="serial"), logger) as pool:
        pool.reset()
        pool.step([0])
    assert {name for entry in entries_of(logger).values() for name in entry} == {f"eval/{name}" for name in NAMES}


def test_your_own_log_is_a_method() -> None:
    lines = []

    class PrintLogger(EpisodeLogger):
        def write(self, values: Any, step: int) -> None:
            lines.append((step, values["shoal/return"]))

    with wrap(shoal.Pool(partial(CountEnv, 2), 1, backend="serial"), PrintLogger(every_seconds=0)) as pool:
        pool.reset()
        pool.step([0]), pool.step([1])
    assert lines == [(2, 103.0)]


# ---- restarts ------------------------------------------------------------------------------------------------


def restarting(host: str, mode: str) -> Any:
    make = shoal.Pool if host == "pool" else shoal.make
    return make(FailEnv, 3, backend="serial", on_error="restart", autoreset=mode)


@pytest.mark.parametrize(
    "mode",
    [
        "next_step",
        "same_step",
        "disabled",
    ],
)
@pytest.mark.parametrize("host", ["pool", "vector env"])
def test_restarts_are_counted(host: str, mode: str) -> None:
    envs = wrap(restarting(host, mode), logger := LOGGERS["wandb"](**AT_ONCE))
    try:
        envs.reset(seed=0)
        for actions in ([0, 0, 0], [0, 3, 0], [0, 0, 0], [3, 3, 0]):
            answer = envs.step(np.array(actions))
            done = answer.done if is_pool(envs) else answer[2] | answer[3]
            if mode == "disabled" and done.any():
                envs.reset(np.flatnonzero(done)) if is_pool(envs) else envs.reset(options={"reset_mask": done})
    finally:
        envs.close()
    assert logger.restarts == 3
    assert [entry["restarts"] for entry in entries_of(logger).values()] == [1, 3]


# ---- how often -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["pool of one", "pool, 2 of 5", "gymnasium"])
def test_no_two_entries_are_nearer_than_asked_for_and_no_episode_is_lost(host: str) -> None:
    all_of_them, few = LOGGERS["wandb"](**AT_ONCE), LOGGERS["tensorboard"](every_seconds=0, every_steps=25)
    envs = wrap(HOSTS[host](NoisyEnv, "next_step"), all_of_them, few)
    list(play(envs, 80))
    before_the_end = list(entries_of(few))
    envs.close()
    assert (np.diff([0, *before_the_end]) >= 25).all()
    assert 1 < len(before_the_end) < len(entries_of(all_of_them))
    assert all(entry["episodes"] > 0 for entry in entries_of(few).values())
    assert sum_of(few) == pytest.approx(sum_of(all_of_them))
    assert few.episodes == all_of_them.episodes == list(entries_of(few).values())[-1]["episodes"]


def sum_of(logger: Any) -> tuple[float, float]:
    """All returns and lengths, from the means."""
    entries = list(entries_of(logger).values())
    counts = np.diff([0, *(entry["episodes"] for entry in entries)])
    return tuple(float(counts @ [entry[name] for entry in entries]) for name in ("return", "length"))  # type: ignore[return-value]


def test_seconds_are_waited_for_and_make_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(monitor, "time", SimpleNamespace(perf_counter=lambda: clock.now, time=time.time))
    logger = LOGGERS["wandb"](every_seconds=10.0)
    with wrap(shoal.Pool(partial(CountEnv, 2), 3, backend="serial", autoreset="same_step"), logger) as pool:
        pool.reset(seed=0)
        for _ in range(12):
            clock.now += 3.0
            pool.step(np.zeros(3, int))
    # The fourth step is the first with an end, 10 s after the first batch; what is left waits for the close.
    assert list(entries_of(logger)) == [4 * 3, 8 * 3, 12 * 3]
    assert [entry["steps_per_second"] for entry in entries_of(logger).values()] == [1.0, 1.0, 1.0]
    assert [entry["episodes"] for entry in entries_of(logger).values()] == [6, 12, 18]


@pytest.mark.parametrize("kind", LOGGERS)
def test_what_is_left_is_written_at_the_end_and_once(kind: str) -> None:
    logger = LOGGERS[kind](every_seconds=3600)
    envs = wrap(shoal.Pool(partial(CountEnv, 2), 2, backend="serial"), logger)
    envs.reset(seed=0)
    for actions in ([0, 0], [0, 1]):
        envs.step(actions)
    assert entries_of(logger) == {}
    envs.close()
    assert [len(entry) for entry in entries_of(logger).values()] == [len(NAMES)]
    assert entries_of(logger)[4]["return"] == (3.0 + 103.0) / 2
    logger.close()
    assert len(entries_of(logger)) == 1


@pytest.mark.parametrize("kind", LOGGERS)
def test_nothing_is_written_where_no_episode_has_ended(kind: str) -> None:
    logger = LOGGERS[kind](**AT_ONCE)
    with wrap(shoal.Pool(CountEnv, 2, backend="serial"), logger) as pool:
        pool.reset(seed=0)
        pool.step([0, 0])
    assert entries_of(logger) == {}
    LOGGERS[kind]().close()  # never bound to any envs


# ---- writers -------------------------------------------------------------------------------------------------


def play_a_little(logger: EpisodeLogger) -> None:
    with wrap(shoal.Pool(partial(CountEnv, 2), 2, backend="serial"), logger) as pool:
        pool.reset(seed=0)
        for _ in range(5):
            pool.step([0, 1])


def test_a_folder_gets_the_first_writer_that_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Writer))
    play_a_little(logger := TensorBoardLogger(tmp_path, **AT_ONCE))
    assert list(entries_of(logger)) == [4, 8]
    assert logger.writer.closes == 1, "who made it closes it"


def test_a_writer_that_was_given_is_left_open() -> None:
    play_a_little(logger := TensorBoardLogger(Writer(), **AT_ONCE))
    assert logger.writer.closes == 0


def test_who_has_no_writer_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in monitor.SUMMARY_WRITERS:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install tensorboardX"):
        TensorBoardLogger(str(tmp_path))


def test_torch_writes_what_tensorboard_reads(tmp_path: Path) -> None:
    pytest.importorskip("torch.utils.tensorboard", reason="needs torch and tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    play_a_little(TensorBoardLogger(tmp_path / "run", **AT_ONCE))
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {f"shoal/{name}" for name in NAMES}
    assert [(one.step, one.value) for one in events.Scalars("shoal/return")] == [(4, 103.0), (8, 103.0)]
    assert [(one.step, one.value) for one in events.Scalars("shoal/episodes")] == [(4, 2.0), (8, 4.0)]


def fake_wandb(monkeypatch: pytest.MonkeyPatch, active: Run | None = None, gives_active: bool = False) -> list[Any]:
    given: list[Any] = []

    def init(**options: Any) -> Run | None:
        given.append(options)
        return active if gives_active else Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=active, init=init))
    return given


def test_a_run_is_made_by_the_options_and_finished_with_the_envs(monkeypatch: pytest.MonkeyPatch) -> None:
    given = fake_wandb(monkeypatch)
    play_a_little(logger := WandbLogger(project="fish", mode="offline", **AT_ONCE))
    assert given == [{"project": "fish", "mode": "offline"}]
    assert list(entries_of(logger)) == [4, 8]
    assert logger.run.finished == 1
    logger.close()
    assert logger.run.finished == 1


@pytest.mark.parametrize("options", [{}, {"project": "fish"}])
def test_a_run_that_is_active_is_used_and_left_open(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wandb(monkeypatch, active := Run(), gives_active=True)
    play_a_little(logger := WandbLogger(**AT_ONCE, **options))
    assert logger.run is active
    assert active.finished == 0
    assert list(active.entries) == [4, 8]


def test_who_has_no_wandb_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb"):
        WandbLogger()


# ---- refusals ------------------------------------------------------------------------------------------------


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="add_scalar"):
        TensorBoardLogger(5)
    with pytest.raises(TypeError, match="object with log"):
        WandbLogger(5)
    with pytest.raises(TypeError, match="project"):
        WandbLogger(Run(), project="fish")
    for options in ({"every_seconds": -1}, {"every_seconds": float("nan")}, {"every_steps": -1}):
        with pytest.raises(ValueError, match="every_seconds, every_steps"):
            TensorBoardLogger(Writer(), **options)  # type: ignore[arg-type]


def test_one_logger_is_for_one_vector_env() -> None:
    logger = LOGGERS["wandb"]()
    with wrap(shoal.Pool(CountEnv, 1, backend="serial"), logger), shoal.Pool(CountEnv, 1, backend="serial") as other:
        with pytest.raises(ValueError, match="already belongs to other envs"):
            wrap(other, logger)

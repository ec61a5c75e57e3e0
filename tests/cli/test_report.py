"""Medians, spreads and ratios, on figures made up for the purpose."""

from __future__ import annotations

import json

import gymnasium
import pytest

from shoal.cli import report
from shoal.cli.bench import RateSummary, Result, Row, Settings, summary
from shoal.cli.contenders import Contender, Opened, PlainLoop, Role
from shoal.cli.peers import EnvPoolRunner, GymnasiumAsync
from shoal.cli.work import Work

LIMITS: list[float | None] = [100.0, 400.0, 200.0]


@pytest.fixture
def result() -> Result:
    work = Work("CartPole-v1", 8, gymnasium.spaces.Discrete(2))
    opened = Opened(0.5, workers=2, worker_pss=40 << 20, total_pss=90 << 20, note="")
    rows = [
        Row(Contender("slow", GymnasiumAsync), rates=[10.0, 20.0, 10.0], limits=LIMITS, starts=[opened]),
        Row(Contender("2 plain loops", PlainLoop, role=Role.LIMIT), rates=LIMITS, limits=LIMITS),
        Row(Contender("fast", PlainLoop, role=Role.SHOAL), rates=[90.0, 320.0, 170.0], limits=LIMITS, note="because"),
        Row(Contender("C++", EnvPoolRunner), rates=[200.0, 800.0, 400.0], limits=LIMITS),
        Row(Contender("broken", GymnasiumAsync), "failed", "no luck\nat all", rates=[None] * 3, limits=LIMITS),
    ]
    return Result(work, Settings(rounds=3), rows)


def test_summary_is_median_and_spread() -> None:
    assert summary([5.0, 1.0, 4.0, 2.0, 3.0]) == RateSummary(3.0, 2.0, 4.0, 1.0, 5.0)
    assert summary([1.0, 2.0]) == RateSummary(1.5, 1.25, 1.75, 1.0, 2.0)
    assert summary([7.0]) == RateSummary(7.0, 7.0, 7.0, 7.0, 7.0)
    assert summary([]) is None


def test_ratio_is_taken_within_each_round(result: Result) -> None:
    # Medians of the rates would give 170/200; the median of the rounds' ratios is what counts.
    assert result.of_limit(result.row("fast")) == pytest.approx(RateSummary(0.85, 0.825, 0.875, 0.8, 0.9))


def test_rounds_without_a_figure_are_left_out(result: Result) -> None:
    row = Row(Contender("half", GymnasiumAsync), rates=[50.0, None, None], limits=[100.0, None, 7.0])
    assert result.of_limit(row) == RateSummary(0.5, 0.5, 0.5, 0.5, 0.5)
    assert result.of_limit(result.row("broken")) is None


def test_best_peer_in_python_is_no_limit_no_shoal_no_cpp(result: Result) -> None:
    best = result.best_python_peer()
    assert best is not None
    assert best.name == "slow"


def test_rows_are_read_limit_first_then_fastest_then_those_out(result: Result) -> None:
    names = [row.name for row in report.ordered(result)]
    assert names == ["2 plain loops", "C++", "fast", "slow", "broken"]


def test_json_keeps_every_round(result: Result) -> None:
    document = json.loads(report.as_json(report.as_dict([result], {"python": "3"})))
    (found,) = document["results"]
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["fast"]["rates"] == [90.0, 320.0, 170.0]
    assert rows["fast"]["of_limit"]["median"] == pytest.approx(0.85)
    assert rows["slow"]["worker_pss"] == 40 << 20
    assert rows["slow"]["startup_s"] == 0.5
    assert rows["broken"]["steps_per_s"] is None
    assert rows["broken"]["note"] == "no luck\nat all"
    assert rows["C++"]["python"] is False


def test_a_table_has_a_line_for_each_figure_and_a_note_for_each_failure(result: Result) -> None:
    assert report.cells(result, result.row("slow")) == ("slow", "0.01 k", "0.05 (0.05..0.08)", "0.50 s", "2 x 40 MiB")
    assert "broken: failed: no luck" in report.notes(result)
    assert "fast: because" in report.notes(result)


def test_headline_compares_with_the_best_python_peer_round_by_round(result: Result) -> None:
    assert report.headline(result) == "fast: 0.85 of the limit, 16.0 x slow, the fastest Python peer here"

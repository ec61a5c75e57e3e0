"""Calls of a batch: who carries them out, what they give and raise, and how it is decided whether threads help."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.envs import side_by_side
from shoal.envs.side_by_side import LONGEST, TRIAL, Choice, SideBySide


class Counter:
    """Counts, in whichever thread."""

    def __init__(self, number: int):
        self.number, self.given, self.threads = number, [], set()  # type: ignore[var-annotated]

    def add(self, value: int) -> int:
        self.given.append(value)
        self.threads.add(threading.get_ident())
        return self.number + value


def add(env: Any, value: Any) -> Any:
    return env.add(value)


@pytest.fixture(params=[False, True], ids=["one thread", "threads"])
def calls(request: pytest.FixtureRequest) -> Iterator[SideBySide]:
    made = SideBySide([Counter(100 * i) for i in range(5)], request.param)
    yield made
    made.close()


def test_each_call_is_carried_out_once(calls: SideBySide) -> None:
    for turn in range(40):
        calls.begin(add, [turn + i for i in range(5)])
        assert [calls.result(i, env) for i, env in enumerate(calls.envs)] == [101 * i + turn for i in range(5)]
        assert calls.end() == set()
    assert [env.given for env in calls.envs] == [[turn + i for turn in range(40)] for i in range(5)]


def test_errors_are_those_of_their_calls(calls: SideBySide) -> None:
    calls.begin(add, [0, "x", 2, None, 4])
    results: list[Any] = []
    for i, env in enumerate(calls.envs):
        try:
            results.append(calls.result(i, env))
        except TypeError:
            results.append("error")
    assert results == [0, "error", 202, "error", 404]
    assert calls.end() == set()
    with pytest.raises(AttributeError, match="nothing"):
        calls.all(lambda env: env.nothing)
    assert calls.all(lambda env: env.number) == [0, 100, 200, 300, 400]


def test_what_was_not_asked_for_is_not_done_later(calls: SideBySide) -> None:
    """As after an interrupt."""
    calls.begin(add, [1] * 5)
    calls.result(0, calls.envs[0])
    left = calls.end()
    assert left == {1, 2, 3, 4}
    calls.begin(add, [2] * 5)
    assert [calls.result(i, env) for i, env in enumerate(calls.envs)] == [2, 102, 202, 302, 402]
    calls.end()
    for env in calls.envs:
        assert env.given[-1] == 2
        assert env.given[:-1] in ([], [1])


def test_another_env_takes_its_place(calls: SideBySide) -> None:
    calls.begin(add, [1] * 5)
    other = Counter(7)
    assert calls.result(2, other) == 8
    for i in (0, 1, 3, 4):
        calls.result(i, calls.envs[i])
    calls.end()
    assert calls.envs[2] is other
    assert other.given == [1]


def test_envs_that_wait_for_each_other_meet_whenever_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the threads are left asleep, which is chosen here for all batches."""
    monkeypatch.setattr(Choice, "wakes", property(lambda self: False, lambda self, value: None), raising=False)
    calls = SideBySide([threading.Barrier(3)] * 3, True)
    for _ in range(3):
        calls.begin(lambda barrier, _: barrier.wait(20), [None] * 3)
        assert sorted(calls.result(i, env) for i, env in enumerate(calls.envs)) == [0, 1, 2]
        calls.end()
        time.sleep(4 * side_by_side.PATIENCE)  # the watch goes to sleep in between
    calls.close()


def feed(choice: Choice, seconds: dict[bool, float], batches: int) -> list[bool]:
    """Batches that take so long with and without threads."""
    found = []
    for _ in range(batches):
        found.append(choice.wakes)
        choice.learn(seconds[choice.wakes])
    return found


@pytest.mark.parametrize("best", [False, True])
def test_what_takes_less_time_is_chosen(best: bool) -> None:
    choice = Choice()
    assert choice.wakes
    found = feed(choice, {best: 1.0, not best: 2.0}, 4 * LONGEST)
    assert found.count(not best) < 20 * TRIAL
    found = feed(choice, {best: 9.0, not best: 2.0}, 4 * LONGEST)  # and when that changes, the other one
    assert found.count(best) < 20 * TRIAL


def test_one_slow_batch_changes_nothing() -> None:
    choice = Choice()
    feed(choice, {True: 2.0, False: 1.0}, 100)
    for _ in range(50):
        feed(choice, {True: 2.0, False: 1.0}, 50)
        choice.learn(1000.0)
    assert feed(choice, {True: 2.0, False: 1.0}, LONGEST).count(True) < 10 * TRIAL

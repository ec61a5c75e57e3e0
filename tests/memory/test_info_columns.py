"""Infos as columns are to callers what dicts are, in every autoreset mode, with nested keys and wanted ones only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete

import shoal
from shoal.envs.group import Answers, GroupAdapter
from shoal.memory.info_columns import InfoColumns, Part


class Counts(GroupAdapter):
    """Lanes that count their steps, and end after 2, 3, 4, ... of them."""

    together, resets_alone = False, True

    def __init__(self, num_envs: int, columns: bool):
        super().__init__(self, num_envs, Box(0, 100, (1,), np.float64), Discrete(2))
        self.steps, self.columns = np.zeros(num_envs, np.int64), columns

    def reset(self, rows: Any, seeds: Any, options: Any, out: Answers) -> Any:
        return self._begin(rows, out, slice(None))

    def _begin(self, rows: Any, out: Answers, at: Any) -> Any:
        self.steps[rows] = 0
        out.obs[0][at] = 0
        self._episodes.begun(rows, out, at)
        return self.told({"lane": rows}, len(rows))

    def step(self, rows: Any, actions: Any, out: Answers) -> Any:
        def step(some: Any, at: Any) -> Any:
            self.steps[some] += 1
            now = self.steps[some]
            out.obs[0][at, 0], out.reward[at], out.terminated[at] = now, now * 0.5, now >= 2 + some
            infos = {
                "lane": some, "half": now / 2, "single": now.astype(np.float32), "pair": np.stack([now, -now], axis=1),
                "inner": {"deep": now * 2},
            }  # fmt: skip
            return self.told(infos, len(some))

        return self._episodes.step(rows, out, step, lambda some, at: self._begin(some, out, at))

    def told(self, columns: Any, count: int) -> Any:
        infos = InfoColumns.of(columns, count)
        return infos if self.columns else None if infos is None else list(infos)

    def close(self) -> None:
        """Nothing to close."""


def play(columns: bool, **options: Any) -> list[Any]:
    found = []
    envs = shoal.make(lambda num_envs: Counts(num_envs, columns), 4, backend="batched", **options)
    answers: Any = envs.reset(seed=1)
    for _ in range(12):
        found.append(answers)
        answers = envs.step(np.zeros(4, np.int64))
    stats = envs.pool.stats()
    found.append((stats.episodes, stats.steps))
    envs.close()
    return found


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("infos", ["all", "drop", ["half", "inner"]])
def test_columns_are_what_dicts_are(mode: str, infos: Any) -> None:
    for one, two in zip(play(True, autoreset=mode, infos=infos), play(False, autoreset=mode, infos=infos), strict=True):
        assert_same(one, two)


def assert_same(one: Any, two: Any) -> None:
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            assert_same(one[key], two[key])
    elif isinstance(one, tuple):
        for pair in zip(one, two, strict=True):
            assert_same(*pair)
    elif isinstance(one, np.ndarray) and one.dtype == object:
        assert [str(a) for a in one] == [str(b) for b in two]
    else:
        np.testing.assert_array_equal(one, two)
        if isinstance(one, np.ndarray):
            assert one.dtype == two.dtype


def test_partial_batches_have_the_infos_of_their_lanes() -> None:
    with shoal.Pool(lambda num_envs: Counts(num_envs, True), 4, backend="batched", batch_size=2) as pool:
        pool.reset(seed=1)
        pool.send(np.zeros(4, np.int64), np.arange(4))
        for _ in range(2):
            batch = pool.recv()
            assert {lane: info["lane"] for lane, info in batch.info.items()} == {int(i): i for i in batch.env_id}


def test_an_empty_part_takes_infos_away() -> None:
    class Sparse(Counts):
        def told(self, columns: Any, count: int) -> Any:
            odd = np.flatnonzero(columns["lane"] % 2)
            infos = InfoColumns(count, [Part(None, columns), Part(odd, {})])
            return infos if self.columns else list(infos)

    with shoal.Pool(lambda num_envs: Sparse(num_envs, True), 4, backend="batched") as pool:
        pool.reset(seed=1)
        assert set(pool.step(np.zeros(4, np.int64)).info) == {0, 2}


def test_later_parts_replace_earlier_ones() -> None:
    infos = InfoColumns(3, [Part(None, {"a": np.arange(3)}), Part(np.array([2, 0]), {"b": np.array([5, 6])})])
    assert list(infos) == [{"b": 6}, {"a": 1}, {"b": 5}]
    assert infos[1:] == [{"a": 1}, {"b": 5}]
    taken = infos.take(np.array([True, True, False]))
    assert list(taken) == [{"b": 6}, {"a": 1}]
    first = InfoColumns.of({"c": np.array([7, 8])}, 2)
    assert first is not None
    assert list(first.with_final(InfoColumns.of({"a": np.array([1, 2])}, 2))) == [
        {"final_info": {"a": 1}, "c": 7},
        {"final_info": {"a": 2}, "c": 8},
    ]
    assert InfoColumns.of({}, 2) is None

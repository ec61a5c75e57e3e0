"""Ranks in one process: threads that exchange by a barrier. What is merged is what one would have seen alone."""

from __future__ import annotations

import pickle
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from rank_jobs import assert_pooled
from shoal import ranks as shoal_ranks
from shoal.dialects import baselines, sb3
from shoal.ranks import MpiRanks, Ranks, current, rank_path, rank_seed, without_launcher
from shoal.support.optional_dependencies import install
from shoal.wrappers import Normalize, RunningMeanStd, wrap
from shoal.wrappers.running import merge_ranks
from wrappers.kit import MANY, VECTOR, NoisyEnv, assert_same, stable_baselines


class ThreadRanks(Ranks):
    """One of several threads."""

    def __init__(self, rank: int, size: int, table: list[Any], barrier: threading.Barrier):
        super().__init__(rank, size)
        self._table, self._barrier = table, barrier

    def exchange(self, values: Any) -> Any:
        self._table[self.rank] = np.array(values)
        self._barrier.wait(60)
        rows = np.stack(self._table) if len({len(row) for row in self._table}) == 1 else self._table[0][None]
        self._barrier.wait(60)
        return rows


def on_ranks(size: int, function: Callable[[Ranks], Any]) -> list[Any]:
    """What a function returns on each rank."""
    table, barrier = [None] * size, threading.Barrier(size)

    def call(rank: int) -> Any:
        try:
            return function(ThreadRanks(rank, size, table, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(call, range(size)))


# ---- statistics ----------------------------------------------------------------------------------------------

VALUES = st.lists(st.floats(-1e3, 1e3, allow_subnormal=False), max_size=6)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4).flatmap(lambda size: st.lists(st.lists(VALUES, min_size=size, max_size=size), max_size=5)))
def test_merged_statistics_are_those_of_the_pooled_data(rounds: list[list[list[float]]]) -> None:
    """However the data is spread over ranks and merges; nothing counts twice, the start included."""
    size = len(rounds[0]) if rounds else 1

    def play(ranks: Ranks) -> RunningMeanStd:
        known = RunningMeanStd()
        known.keep_apart()
        for values in rounds:
            known.update(values[ranks.rank][:3])
            known.update(values[ranks.rank][3:])
            merge_ranks([known], ranks)
        return known

    found = on_ranks(size, play)
    everything = np.array([value for values in rounds for part in values for value in part])
    mean, var = pooled_exactly(everything)
    for one in found:
        assert one.count == pytest.approx(len(everything) + 1e-4, rel=1e-12)
        assert one.mean == pytest.approx(mean, rel=1e-9, abs=1e-9)
        assert one.var == pytest.approx(var, rel=1e-9, abs=1e-9)
        assert_same(one.as_data(), found[0].as_data())


def pooled_exactly(values: Any) -> tuple[float, float]:
    """In fractions, without rounding."""
    from fractions import Fraction

    start, exact = Fraction(1e-4), [Fraction(float(value)) for value in values]
    total = start + len(exact)
    mean = sum(exact, Fraction(0)) / total
    var = (sum(((value - mean) ** 2 for value in exact), Fraction(0)) + start * (1 + mean**2)) / total
    return float(mean), float(var)


def test_what_is_merged_does_not_depend_on_how_often() -> None:
    data = np.random.default_rng(0).normal(1e4, 1.0, (3, 40, 2))

    def play(ranks: Ranks) -> list[RunningMeanStd]:
        often, once = RunningMeanStd(shape=(2,)), RunningMeanStd(shape=(2,))
        for one in (often, once):
            one.keep_apart()
        for batch in np.split(data[ranks.rank], 8):
            often.update(batch)
            once.update(batch)
            merge_ranks([often], ranks)
        merge_ranks([once], ranks)
        return [often, once]

    for found in on_ranks(3, play):
        for one in found:
            assert_pooled(one, data.reshape(-1, 2))


def test_moments_and_other_statistics_that_are_taken_in_count_too() -> None:
    data = np.random.default_rng(1).normal(5.0, 2.0, (2, 30, 3))

    def play(ranks: Ranks) -> RunningMeanStd:
        known = RunningMeanStd(shape=(3,))
        known.keep_apart()
        mine = data[ranks.rank]
        known.update(mine[:10])
        known.update_from_moments(mine[10:].mean(0), mine[10:].var(0), 20)
        merge_ranks([known], ranks)
        return known

    for one in on_ranks(2, play):
        assert_pooled(one, data.reshape(-1, 3))


# ---- Normalize -----------------------------------------------------------------------------------------------


def trained(ranks: Ranks, turns: int = 7, space: Any = VECTOR, **options: Any) -> Normalize:
    normalize = Normalize(ranks=ranks, **options)
    with wrap(shoal.Pool(partial(NoisyEnv, space), 2, backend="serial"), normalize) as pool:
        pool.reset(seed=rank_seed(0, ranks))
        for _ in range(turns):
            pool.step(np.zeros((2, 2), np.float32))
    return normalize


def data_of(normalize: Normalize) -> Any:
    parts = normalize.obs_rms if isinstance(normalize.obs_rms, dict) else {"obs": normalize.obs_rms}
    return {**{key: one.as_data() for key, one in parts.items()}, "returns": normalize.ret_rms.as_data()}


@pytest.mark.parametrize("space", [VECTOR, MANY, spaces.Box(0, 9, (), np.float64)], ids=["box", "dict", "no axes"])
def test_batches_are_merged_by_count(space: Any) -> None:
    """A reset and seven steps are eight batches: merged twice, if it is done every fourth time."""
    merged = on_ranks(3, lambda ranks: trained(ranks, space=space, sync_every=4))
    for one in merged[1:]:
        assert_same(data_of(one), data_of(merged[0]))
    apart = on_ranks(3, lambda ranks: trained(ranks, space=space, sync_every=5))
    assert data_of(apart[0])["returns"]["mean"] != data_of(apart[1])["returns"]["mean"]
    for key in set(data_of(merged[0])) - {"returns"}:
        assert data_of(merged[0])[key]["count"] == pytest.approx(3 * 2 * 8 + 1e-4, rel=1e-12)
        assert data_of(apart[0])[key]["count"] == pytest.approx(3 * 2 * 5 + 2 * 3 + 1e-4, rel=1e-12)


def test_without_training_nobody_waits_for_the_others() -> None:
    """One rank may evaluate alone."""

    def play(ranks: Ranks) -> int:
        normalize = trained(ranks, sync_every=8)
        normalize.training = False
        vars(normalize).pop("bound")
        if ranks.rank == 0:
            with wrap(shoal.Pool(NoisyEnv, 1, backend="serial"), normalize) as pool:
                pool.reset(seed=0)
                for _ in range(20):
                    pool.step(np.zeros((1, 2), np.float32))
        return normalize.batches_since_sync

    assert on_ranks(2, play) == [0, 0]


def test_alone_nothing_changes() -> None:
    one, other = trained(Ranks(), sync_every=2), trained(Ranks())
    for key, found in data_of(one).items():
        for name, value in found.items():
            np.testing.assert_allclose(value, data_of(other)[key][name], rtol=1e-12)


def test_statistics_of_a_file_are_the_common_start(tmp_path: Path) -> None:
    before = trained(Ranks())
    before.save(tmp_path / "file")

    def play(ranks: Ranks) -> Normalize:
        normalize = Normalize.load(tmp_path / "file")
        normalize.ranks = ranks
        values = np.arange(6.0).reshape(2, 3) + ranks.rank
        normalize.obs_rms.keep_apart()
        normalize.obs_rms.update(values)
        normalize.sync()
        return normalize

    expected = before.obs_rms.copy()
    expected.update(np.concatenate([np.arange(6.0).reshape(2, 3) + rank for rank in range(3)]))
    for one in on_ranks(3, play):
        np.testing.assert_allclose(one.obs_rms.mean, expected.mean, rtol=1e-12)
        np.testing.assert_allclose(one.obs_rms.var, expected.var, rtol=1e-12)
        assert one.obs_rms.count == pytest.approx(expected.count, rel=1e-14)


def test_the_vec_envs_merge_as_well() -> None:
    def play(ranks: Ranks) -> list[Any]:
        found = []
        for dialect in (sb3, baselines):
            envs = dialect.VecNormalize(dialect.DummyVecEnv([NoisyEnv] * 2), ranks=ranks, sync_every=3)
            envs.seed(rank_seed(3, ranks))
            envs.reset()
            for _ in range(4):
                envs.step(np.zeros((2, 2), np.float32))
            envs.sync()
            found.append([envs.obs_rms.as_data(), envs.ret_rms.as_data()])
            envs.close()
        return found

    one, other = on_ranks(2, play)
    for mine, theirs in zip(one, other, strict=True):
        for known, as_well in zip(mine, theirs, strict=True):
            assert_same(known, as_well)
        assert mine[0]["count"] == pytest.approx(2 * 2 * 5 + 1e-4)


def test_a_pickled_vec_normalize_forgets_its_ranks() -> None:
    stable_baselines()
    envs = sb3.VecNormalize(sb3.DummyVecEnv([NoisyEnv]), ranks=Ranks(), sync_every=2)
    envs.reset()
    again = pickle.loads(pickle.dumps(envs))
    assert again.transform.ranks is None
    assert again.transform.sync_every is None
    envs.close()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no ranks": ({"ranks": 3}, "ranks: expected shoal.ranks.current"),
    "nobody to merge with": ({"sync_every": 3}, "together with ranks"),
    "never": ({"ranks": Ranks(), "sync_every": 0}, "sync_every: expected 1 or more"),
    "some words": ({"ranks": Ranks(), "sync_every": "often"}, "sync_every: expected 1 or more"),
    "a part": ({"ranks": Ranks(), "sync_every": 1.5}, "sync_every: expected 1 or more"),
    "a yes": ({"ranks": Ranks(), "sync_every": True}, "sync_every: expected 1 or more"),
}


@pytest.mark.parametrize("name", BAD)
def test_options_that_make_no_sense(name: str) -> None:
    options, reason = BAD[name]
    with pytest.raises((TypeError, ValueError), match=reason):
        Normalize(**options)


def test_nothing_is_taken_in_as_nothing() -> None:
    known = RunningMeanStd(shape=(2,))
    known.keep_apart()
    known.combine(RunningMeanStd(0.0, (2,)))
    known.update(np.zeros((0, 2)))
    merge_ranks([known], Ranks())
    assert (known.mean.tolist(), known.var.tolist(), known.count) == ([0.0, 0.0], [1.0, 1.0], 1e-4)


def test_to_merge_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Normalize\(ranks=shoal\.ranks\.current\(\)\)"):
        Normalize().sync()


# ---- who am I ------------------------------------------------------------------------------------------------


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that nobody told of ranks."""
    for pair in shoal_ranks.RANK_AND_SIZE:
        for name in filter(None, pair):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(shoal_ranks, "_before_us", None)
    return monkeypatch


def test_alone(nobody: pytest.MonkeyPatch) -> None:
    assert (type(current()), current().rank, current().size) == (Ranks, 0, 1)
    assert current().allgather([[1, 2], [3, 4]]).tolist() == [[1, 2, 3, 4]]
    assert (rank_seed(7), rank_seed(None)) == (7, None)


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD", "PMI", "MV2_COMM_WORLD"])
def test_ranks_by_the_word_of_mpiexec(name: str, nobody: pytest.MonkeyPatch) -> None:
    nobody.setenv(f"{name}_RANK", "2")
    nobody.setenv(f"{name}_SIZE", "5")
    nobody.setitem(sys.modules, "mpi4py", None)  # an import of it fails
    ranks = current()
    assert (type(ranks), ranks.rank, ranks.size) == (MpiRanks, 2, 5)
    assert (rank_seed(7), rank_seed(None), rank_path("logs/")) == (20_007, None, "logs/2")
    with pytest.raises(ImportError, match="MPI ranks need mpi4py: " + re.escape(install("mpi"))):
        ranks.allgather([1.0])


def test_an_mpi4py_of_another_mpi_is_found_out(nobody: pytest.MonkeyPatch) -> None:
    nobody.setenv("OMPI_COMM_WORLD_RANK", "0")
    nobody.setenv("OMPI_COMM_WORLD_SIZE", "2")
    alone = ModuleType("mpi4py.MPI")
    alone.COMM_WORLD = SimpleNamespace(Get_size=lambda: 1, Get_rank=lambda: 0)  # type: ignore[attr-defined]
    nobody.setitem(sys.modules, "mpi4py", ModuleType("mpi4py"))
    nobody.setitem(sys.modules, "mpi4py.MPI", alone)
    with pytest.raises(RuntimeError, match="started 2 ranks and mpi4py knows of 1"):
        current().allgather([1.0])


def test_ranks_that_only_say_who(nobody: pytest.MonkeyPatch) -> None:
    ranks = Ranks(3, 4)
    assert (rank_seed(1, ranks), rank_path(Path("a/b.csv"), ranks), rank_path("b", ranks)) == (
        30_001,
        "a/3.b.csv",
        "3.b",
    )
    with pytest.raises(NotImplementedError, match="MpiRanks, TorchRanks or RayRanks"):
        ranks.allgather([1.0])
    for bad in ((4, 4), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="0 <= rank < size"):
            Ranks(*bad)


def test_ranks_of_unequal_data_all_say_so() -> None:
    def play(ranks: Ranks) -> str:
        with pytest.raises(ValueError, match=r"the ranks have \[1, 2\] values") as caught:
            ranks.allgather(np.zeros(ranks.rank + 1))
        return str(caught.value)

    assert len(set(on_ranks(2, play))) == 1


def test_what_workers_are_not_told() -> None:
    told = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "PRTE_LAUNCHED": "1", "PMI_FD": "9", "MPI_LOCALRANKID": "1"}
    own = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "HOME": "/", "PATH": "/bin"}
    assert without_launcher({**told, **own}) == own
    # Whoever is no rank may have settings for an mpiexec of his own.
    settings_alone = {"OMPI_MCA_btl": "self", "PRTE_MCA_x": "1", **own}
    assert without_launcher(settings_alone) == settings_alone

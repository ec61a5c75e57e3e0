"""The slab's header: what is written is read, and whatever else lies there is refused and never believed."""

from __future__ import annotations

import gc
import os
import struct
from typing import Any

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from envs import CountEnv
from shoal.memory import header
from shoal.native import layout
from shoal.observe import running_pools
from shoal.support.system import system


def page() -> Any:
    return np.zeros(header.SIZE, np.uint8)


def test_what_is_written_is_read_until_it_is_withdrawn() -> None:
    here = page()
    header.write(here, {"env": "Fisch-v0 \N{FISH}", "pid": 7})
    assert header.read(here.tobytes()) == {"env": "Fisch-v0 \N{FISH}", "pid": 7}
    header.withdraw(here)
    with pytest.raises(header.NoHeader):
        header.read(here.tobytes())


def test_another_version_is_refused_with_both_numbers() -> None:
    here = page()
    header.write(here, {})
    here[8:12] = np.frombuffer(struct.pack("<I", 77), np.uint8)
    with pytest.raises(header.OtherVersion, match=f"version 77, and this Shoal reads version {header.VERSION}"):
        header.read(here.tobytes())


@pytest.mark.parametrize(
    "text", [b'{"torn', b"[1, 2]", b"\xff\xfe", b"[" * 4000, b"7"], ids=["torn", "list", "bytes", "deep", "number"]
)
def test_what_is_no_header_is_none(text: bytes) -> None:
    gc.collect()  # at the depth of "deep", the finalizers of what other tests have left would fail
    data = header.MAGIC + struct.pack("<II", header.VERSION, len(text)) + text
    with pytest.raises(header.NoHeader):
        header.read(data)
    with pytest.raises(header.NoHeader):
        header.read(data[:12])


def test_what_does_not_fit_is_not_written() -> None:
    here = page()
    with pytest.raises(ValueError, match="does not fit"):
        header.write(here, {"env": "x" * header.SIZE})
    assert not here.any()


@pytest.mark.parametrize("table", list(layout.COLUMNS))
def test_columns_are_named_as_the_counters_are(table: str) -> None:
    prefix = {"stats": "STAT", "episode_sums": "SUM", "pool_stats": "POOL", "lane_stats": "LANE"}[table]
    numbers = [layout.CONSTANTS[f"{prefix}_{name.upper()}"] for name in layout.COLUMNS[table]]
    assert numbers == list(range(len(numbers)))


def about(pool: shoal.Pool) -> dict[str, Any]:
    return header.read(pool._slab.array("header").tobytes())


def test_a_pool_says_what_it_is() -> None:
    with shoal.Pool(CountEnv, 7, backend="threads", num_workers=3, batch_size=4) as pool:
        found = about(pool)
        assert (found["env"], found["backend"], found["envs"], found["batch_size"]) == ("CountEnv", "threads", 7, 4)
        assert found["pid"] == os.getpid()
        assert found["fields"]["stats"] == [pool._slab.layout.fields["stats"].offset, "<i8", [3, layout.STAT_WIDTH]]


class Wrapped(gymnasium.Wrapper[Any, Any, Any, Any]):
    pass


LONG = type("\N{FISH}" * 300, (CountEnv,), {})  # each character takes twelve in JSON


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ("CartPole-v1", "CartPole-v1"),
        (lambda: gymnasium.make("CartPole-v1"), "CartPole-v1"),
        (lambda: Wrapped(CountEnv()), "CountEnv"),
        ([CountEnv, lambda: CountEnv(3)], "CountEnv"),
        (LONG, "\N{FISH}" * 100),
    ],
    ids=["id", "function", "wrapped", "list", "long"],
)
@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_its_env_is_called_as_people_call_it(env: Any, name: str, backend: Any) -> None:
    with shoal.Pool(env, backend=backend) as pool:
        assert about(pool)["env"] == name


# ---- whatever lies there -------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["<i8", "pending"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def looked_at(pid: int) -> int:
    """How many pools are seen, all of which can be looked at or say why not."""
    found, _ = running_pools.find_in(pid)
    for pool in found:
        try:
            now = running_pools.look(pool)
        except running_pools.Gone:
            return 0
        running_pools.between(pool, running_pools.at_its_start(pool, now), now)
    return len(found)


@pytest.fixture(scope="module")
def victim() -> Any:
    if not system.proc.is_dir():
        pytest.skip("pools of other processes are found by /proc, which this system does not have")
    with shoal.Pool(CountEnv, 3, backend="serial") as pool:
        yield pool


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_header_that_lies_is_never_believed(victim: shoal.Pool, data: st.DataObject) -> None:
    facts = about(victim)
    where, key = facts, data.draw(st.sampled_from(sorted(facts)))
    while isinstance(where[key], dict | list) and data.draw(st.booleans()):
        where, below = where[key], where[key]
        key = data.draw(st.sampled_from(sorted(below) if isinstance(below, dict) else range(len(below))))
    where[key] = data.draw(JSON)
    here = victim._slab.array("header")
    kept = here.copy()
    try:
        header.write(here, facts)
        assert looked_at(os.getpid()) >= 0
    finally:
        here[:] = kept
    assert looked_at(os.getpid()) >= 1


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1500), st.binary(min_size=1, max_size=8))
def test_a_header_with_wrong_bytes_is_never_believed(victim: shoal.Pool, at: int, data: bytes) -> None:
    here = victim._slab.array("header")
    kept = here.copy()
    try:
        here[at : at + len(data)] = np.frombuffer(data, np.uint8)
        assert looked_at(os.getpid()) >= 0
    finally:
        here[:] = kept
    assert looked_at(os.getpid()) >= 1

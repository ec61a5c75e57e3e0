"""Random generators in a file that was tampered with: refused, since a draw from them would crash or never end."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from shoal.errors import DataError
from shoal.state.datafile import Encoded, decode, encode, read_file, write_file
from shoal.state.generators import BIT_GENERATORS

KEEP = object()


def bits_with(name: str, path: tuple[str, ...], value: Any) -> list[Any]:
    """The node of a bit generator, one field of which is another."""
    made = getattr(np.random, name)(5)
    state: Any = made.state
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return ["bits", name, encode(state).document, None]


def refused(document: Any) -> None:
    with pytest.raises(DataError):
        decode(Encoded(document, []))


NUMBERS = [-1, -900000000, 2**32, 2**62, 2**130, 0.5, "1", None, True]
FIELDS: dict[str, list[tuple[str, ...]]] = {
    "PCG64": [("state", "state"), ("state", "inc"), ("has_uint32",), ("uinteger",)],
    "PCG64DXSM": [("state", "state"), ("state", "inc"), ("has_uint32",), ("uinteger",)],
    "MT19937": [("state", "pos")],
    "Philox": [("buffer_pos",), ("has_uint32",), ("uinteger",)],
    "SFC64": [("has_uint32",), ("uinteger",)],
}
ARRAYS = [("MT19937", ("state", "key")), ("Philox", ("state", "counter")), ("Philox", ("state", "key")),
          ("Philox", ("buffer",)), ("SFC64", ("state", "state"))]  # fmt: skip


@pytest.mark.parametrize(("name", "path"), [(name, path) for name, paths in FIELDS.items() for path in paths])
def test_numbers_out_of_range_are_refused(name: str, path: tuple[str, ...]) -> None:
    wide = path[0] == "state" and name.startswith("PCG64")  # 128 bits
    for value in NUMBERS:
        if not (wide and value in (2**32, 2**62)) or path[-1] == "inc":  # an even increment is no good either
            refused(bits_with(name, path, value))


@pytest.mark.parametrize(("name", "path"), ARRAYS)
def test_arrays_of_another_size_or_type_are_refused(name: str, path: tuple[str, ...]) -> None:
    good = getattr(np.random, name)(5).state
    for key in path:
        good = good[key]
    for bad in (good[:-1], good.astype(np.float64), np.append(good, good), good.reshape(1, -1), [1, 2], None):
        refused(bits_with(name, path, bad.copy() if isinstance(bad, np.ndarray) else bad))


def test_states_that_always_give_zeros_are_refused() -> None:
    refused(bits_with("MT19937", ("state", "key"), np.zeros(624, np.uint32)))
    refused(bits_with("PCG64", ("state",), {"state": 0, "inc": 0}))
    version, words, gauss = random.Random(0).getstate()
    refused(["random", encode((version, (0,) * 624 + words[-1:], gauss)).document])


@pytest.mark.parametrize(
    "change",
    [{"pool_size": 2**60}, {"pool_size": 0}, {"entropy": None}, {"entropy": "a"}, {"entropy": -1},
     {"entropy": 1 << (1 << 20)}, {"spawn_key": [1]}, {"spawn_key": (-1,)}, {"spawn_key": (1,) * 10**5},
     {"n_children_spawned": -1}, {"n_children_spawned": 2**70}, {"more": 1}],
    ids=lambda change: str(next(iter(change))),
)  # fmt: skip
def test_seeds_that_cannot_be_are_refused(change: dict[str, Any]) -> None:
    made = np.random.PCG64(np.random.SeedSequence(5))
    seeds = dict(made.seed_seq.state) | change  # type: ignore[attr-defined]
    refused(["bits", "PCG64", encode(made.state).document, encode(seeds).document])


@pytest.mark.parametrize(
    "state",
    [(2, KEEP, None), (3, KEEP, "1"), (3, KEEP, float("nan")), (3, (1,) * 624, None), (3, (1,) * 624 + (625,), None),
     (3, (1,) * 624 + (-1,), None), (3, (2**32,) * 625, None), (3, ("1",) * 625, None), (3, [1] * 625, None)],
)  # fmt: skip
def test_states_of_pythons_own_are_checked(state: Any) -> None:
    words = random.Random(0).getstate()[1]
    refused(["random", encode(tuple(words if part is KEEP else part for part in state)).document])


@pytest.mark.parametrize("rest", [[2, 0.0], [-1, 0.0], [True, 0.0], [1, ["float", "7ff8000000000000"]], [1, "1"], [1]])
def test_legacy_generators_are_checked(rest: list[Any]) -> None:
    bits = encode(np.random.RandomState(0)).document[1]
    refused(["randomstate", bits, *rest])
    refused(["randomstate", 5, 0, 0.0])


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_good_ones_go_on_as_they_were(name: str) -> None:
    made = np.random.Generator(getattr(np.random, name)(np.random.SeedSequence([1, 2**40], spawn_key=(3,))))
    made.integers(5, dtype=np.int32), made.spawn(2)  # half of a word is left over
    again = decode(encode(made))
    assert [again.normal(), again.integers(9, dtype=np.int32)] == [made.normal(), made.integers(9, dtype=np.int32)]
    assert again.spawn(1)[0].random() == made.spawn(1)[0].random()


class Counting(gymnasium.Env[Any, Any]):
    """Draws from a Philox in each step."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)
        self.dice = np.random.Generator(np.random.Philox(3))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.array([self.dice.random()], np.float32), 1.0, False, False, {}


@pytest.mark.parametrize(
    "options",
    [{"backend": "serial"}, {"backend": "processes", "start_method": "forkserver"},
     {"backend": "processes", "start_method": "spawn"}, {"backend": "hybrid"}, {"backend": "threads"}],
    ids=lambda options: "-".join(options.values()),
)  # fmt: skip
def test_a_snapshot_that_would_crash_at_the_next_draw(options: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with shoal.Pool(Counting, 2, **options) as pool:
        pool.reset()
        pool.step(np.zeros(2, int))
        pool.snapshot(path)
        content = read_file(path)
        document = content["envs"][1][1]["document"]
        changed = document.replace('"buffer_pos", 1', '"buffer_pos", -900000000')
        assert changed != document
        content["envs"][1][1]["document"] = changed
        write_file(path, content)
        with pytest.raises(shoal.EnvError, match=r"env 1 raised in loading .*'buffer_pos' of a Philox") as caught:
            pool.restore(path)
    assert isinstance(caught.value, DataError)

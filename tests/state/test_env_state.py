"""An env that was saved and loaded goes on bit by bit as the one that was not; what cannot be saved is refused."""

from __future__ import annotations

import enum
import functools
import json
import math
import mmap
import pickle
import random
import socket
import struct
import subprocess
import sys
import threading
import types
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces, wrappers
from gymnasium.utils import EzPickle
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import SPACES, CountEnv, GateEnv, InfoEnv, ReusedBufferEnv, ReusedInfoEnv, SpaceEnv
from shoal.state import datafile
from shoal.state.datafile import CannotSave, Encoded, decode, encode, read_file, write_file
from shoal.state.env_state import EnvState, load_env, save_env

Make = Callable[[], Any]


def same(one: Any, other: Any) -> bool:
    """Equal to the last bit, in types and in the order of keys."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | np.generic):
        if (one.dtype, one.dtype.char, one.shape) != (other.dtype, other.dtype.char, other.shape):
            return False
        return one.tobytes() == other.tobytes() if not one.dtype.hasobject else same(one.tolist(), other.tolist())
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def through_json(encoded: Encoded) -> Encoded:
    return Encoded(json.loads(json.dumps(encoded.document, allow_nan=False)), encoded.arrays)


def again(value: Any) -> Any:
    """Encoded and decoded."""
    return decode(through_json(encode(value)))


# ---- plain values


def nan(payload: int) -> float:
    return float(struct.unpack(">d", struct.pack(">Q", 0x7FF8000000000000 | payload))[0])


RECORD = np.dtype([("name", "<U4"), ("place", "<f8", (2,)), ("count", ">i2")])
SCALARS: list[Any] = [
    np.float32(1 / 3), np.float64(-0.0), np.float16(2), np.longdouble(1) / 3, np.complex64(1 + 2j), np.bool_(True),
    *(np.dtype(letter).type(7) for letter in "bBhHiIlLqQ"), np.str_("é鱼"), np.str_(""), np.bytes_(b"\x00a"),
    np.datetime64("2020-01-01", "ns"), np.timedelta64(5, "s"), np.float64(nan(5)),
]  # fmt: skip
ARRAYS: dict[str, Any] = {
    "0-d": np.array(5, np.int8),
    "empty": np.zeros((3, 0, 2)),
    "small": np.arange(6.0).reshape(2, 3),
    "big": np.random.default_rng(0).random((50, 40)),
    "all the same": np.full((100, 100, 3), 255, np.uint8),
    "all nan": np.full(100, nan(3)),
    "signed zeros": np.array([0.0, -0.0] * 50),
    "fortran": np.asfortranarray(np.random.default_rng(0).random((30, 40))),
    "axes swapped": np.random.default_rng(0).random((5, 6, 70)).transpose(1, 2, 0),
    "every other": np.arange(400.0)[::2],
    "backwards": np.arange(10)[::-1],
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "bool": np.array([True, False]),
    "text": np.array(["a", "longer"]),
    "bytes": np.array([b"a", b"xyz"]),
    "dates": np.array(["2020-01-01", "NaT"], "datetime64[D]"),
    "big-endian": np.arange(5, dtype=">i4"),
    "long long": np.arange(5, dtype="q"),
    "many long longs": np.arange(500, dtype="q"),
    "big-endian long longs": np.arange(5, dtype=np.dtype("q").newbyteorder(">")).astype(">i8"),
    "structured": np.array([("ab", (1.0, -0.0), 3), ("", (nan(1), 2.0), -4)], RECORD),
    "structured empty": np.zeros(0, RECORD),
    "raw": np.array([b"abcd"], "V4"),
    "long double": np.array([1, 2], np.longdouble) / 3,
}
VALUES: list[Any] = [
    None, True, False, 0, -1, 2**63 - 1, 2**63, -(2**200), 0.1, -0.0, math.inf, -math.inf, math.nan, nan(1234), 5e-324,
    1 + 2j, complex(math.nan, -0.0), "", "鱼", "\ud800", "a\x00b", b"", b"\x00\xff", [], [1, [2]], (), (1, ("a", None)),
    {}, {1: "a", "b": 2.5, (1, None): [], None: {}, 0: 3, b"x": 4, frozenset({1}): 5, 2.5: 6}, {1, "a", (2, 3)},
    frozenset(), frozenset({1, 2}), deque(), deque([1, 2, 3]), deque([1], maxlen=4), deque(maxlen=0), np.dtype("f4"),
    np.dtype("U7"), np.dtype("U"), *SCALARS, *ARRAYS.values(),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_plain_values_come_back_to_the_last_bit(value: Any) -> None:
    found = again(value)
    assert same(found, value)
    if isinstance(value, deque):
        assert found.maxlen == value.maxlen


def test_all_values_go_through_a_file(tmp_path: Path) -> None:
    write_file(tmp_path / "values", VALUES)
    assert same(read_file(tmp_path / "values"), VALUES)


def test_an_integer_longer_than_python_reads() -> None:
    assert again([10**6000, -(10**6000)]) == [10**6000, -(10**6000)]


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_keep_their_layout(name: str) -> None:
    array = ARRAYS[name]
    found = again(array)
    assert found.flags.writeable == array.flags.writeable
    assert np.argsort([-s for s in found.strides], kind="stable").tolist() == (
        np.argsort([-abs(s) for s in array.strides], kind="stable").tolist()
    )
    if array.dtype.kind == "f" and array.flags.forc:
        assert same(found.sum(), array.sum())  # numpy adds up in the order of memory


def test_loaded_arrays_can_be_resized_and_changed() -> None:
    array = again(np.arange(4.0))
    array.resize(6, refcheck=False)
    array += 1
    assert array.tolist() == [1, 2, 3, 4, 1, 1]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.floats(), st.text()), inner, max_size=4)
        | st.builds(deque, st.lists(inner, max_size=3))
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(plain)
def test_any_nesting_comes_back(value: Any) -> None:
    assert same(again(value), value)


def test_one_object_stays_one() -> None:
    part, array, pair = [1], np.arange(3), ([],)
    found = again({"a": part, "b": [part, array], "c": {"d": array}, "e": pair, "f": pair})
    assert found["a"] is found["b"][0]
    assert found["b"][1] is found["c"]["d"]
    assert found["e"] is found["f"]


def test_equal_objects_stay_two() -> None:
    one, other = again([[1], [1]])
    assert one is not other


def test_cycles() -> None:
    ring: list[Any] = [1]
    ring.append({"ring": ring, "queue": deque([ring]), "pair": (ring, 5)})
    found = again(ring)
    assert found[1]["ring"] is found
    assert found[1]["queue"][0] is found
    assert found[1]["pair"][0] is found


def test_a_tuple_within_itself_is_refused() -> None:
    inner: list[Any] = []
    ring = (inner,)
    inner.append(ring)
    with pytest.raises(CannotSave, match=r"\[0\]\[0\] is a tuple that holds itself"):
        encode(ring)


def test_numbers_are_counted_over_keys_too() -> None:
    key, value = (1, 2), [3]
    found = again([{key: value, (key, 4): value}, key, value])
    assert next(iter(found[0])) is found[1]
    assert found[0][(1, 2)] is found[0][((1, 2), 4)] is found[2]


BIT_GENERATORS = [np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64]


@pytest.mark.parametrize("bits", BIT_GENERATORS)
def test_numpy_generators_go_on(bits: Any) -> None:
    generator = np.random.Generator(bits(5))
    generator.integers(10, dtype=np.int32)  # half a draw is kept for the next
    found = again(generator)
    assert same(found.random(5), generator.random(5))
    assert same(found.integers(10, size=5, dtype=np.int32), generator.integers(10, size=5, dtype=np.int32))


def test_a_generator_spawns_the_same_children() -> None:
    generator = np.random.default_rng(5)
    generator.spawn(3)
    found = again(generator)
    assert same(found.spawn(1)[0].random(3), generator.spawn(1)[0].random(3))


def test_old_generators_go_on() -> None:
    old, python = np.random.RandomState(5), random.Random(5)
    old.randn(), python.gauss(0, 1)  # both keep the second of a pair
    found, found_python = again([old, python])
    assert same(found.randn(3), old.randn(3))
    assert same([found_python.gauss(0, 1) for _ in range(3)], [python.gauss(0, 1) for _ in range(3)])


def test_generators_that_share_their_bits_still_do() -> None:
    bits = np.random.PCG64(1)
    one, other, shared = np.random.Generator(bits), np.random.Generator(bits), np.random.default_rng(3)
    found = again([one, other, bits, shared, shared])
    assert found[3] is found[4]
    assert same([found[0].random(), found[1].random(), found[0].random()], [one.random(), other.random(), one.random()])
    assert found[0].bit_generator is found[2]


class MyList(list[Any]):
    pass


class MyDict(dict[Any, Any]):
    pass


class MyInt(int):
    pass


class MyArray(np.ndarray[Any, Any]):
    pass


class MyRandom(random.Random):
    pass


Pair = namedtuple("Pair", "one other")
NOT_PLAIN: dict[str, Any] = {
    "lock": threading.Lock(), "object": object(), "list subclass": MyList(), "dict subclass": MyDict(),
    "ordered dict": OrderedDict(), "int subclass": MyInt(5), "array subclass": np.arange(3).view(MyArray),
    "object array": np.array([1, None]), "named tuple": Pair(1, 2), "range": range(3), "function": len, "class": int,
    "random subclass": MyRandom(3), "system random": random.SystemRandom(), "bytearray": bytearray(b"x"),
    "masked array": np.ma.masked_array([1, 2], [True, False]), "object record": np.zeros(1, [("a", "O")]),
    "array of nothing": np.ndarray((2,), np.dtype("<U0")),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_all_else_is_refused_with_its_place(name: str) -> None:
    with pytest.raises(CannotSave, match=r"^\['a'\]\[3\], an? .* is no plain data$") as found:
        encode({"a": [0, 1, 2, NOT_PLAIN[name]]})
    assert not found.value.final
    with pytest.raises(CannotSave, match=r"the value, an? "):
        encode(NOT_PLAIN[name])


def test_the_reason_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(CannotSave("its attribute 'sim'", final=True)))
    assert (str(error), error.final) == ("its attribute 'sim'", True)


@pytest.mark.skipif(not hasattr(np, "dtypes") or not hasattr(np.dtypes, "StringDType"), reason="numpy 2 only")
def test_text_outside_the_array_is_refused() -> None:
    with pytest.raises(CannotSave, match="is no plain data"):
        encode(np.array(["a", "b"], np.dtypes.StringDType()))


def test_what_nests_too_deeply_is_refused() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(CannotSave, match="nested too deeply"):
        encode(value)
    while value:  # or Python's own clean-up would nest as deeply
        value = value.pop()


BASE = np.arange(40.0)


@pytest.mark.parametrize(
    "views",
    [(BASE, BASE[3:5]), (BASE[:5], BASE[4:]), (BASE[::2], BASE[2:3]), (BASE, BASE[:]), (BASE[::-1], BASE[:1]),
     (BASE.reshape(4, 10)[:, 2], BASE[12:13])],
)  # fmt: skip
def test_overlapping_views_are_refused(views: tuple[Any, Any]) -> None:
    with pytest.raises(CannotSave, match=r"\['[ab]'\] and \['[ab]'\] are views of the same memory") as found:
        encode({"a": views[0], "b": views[1]})
    assert found.value.final


FIXED = np.arange(4.0)
FIXED.flags.writeable = False


@pytest.mark.parametrize(
    "views", [(BASE[:5], BASE[5:]), (BASE[::2], BASE[1::2]), (BASE[3:3], BASE), (FIXED, FIXED[1:])]
)
def test_views_that_never_change_together_are_fine(views: tuple[Any, Any]) -> None:
    assert same(again(views), views)


def test_memory_of_others_is_refused() -> None:
    with pytest.raises(CannotSave, match=r"\['w'\] is an array in the memory of a mmap") as found:
        encode({"w": np.frombuffer(mmap.mmap(-1, 16), np.float64)})
    assert found.value.final


def test_arrays_that_came_by_pickle_are_fine() -> None:
    array = pickle.loads(pickle.dumps(np.arange(5.0), 5))
    windows = np.lib.stride_tricks.sliding_window_view(np.arange(5.0), 2)
    assert same(again([array, windows]), [array, windows])


def test_what_was_encoded_does_not_change() -> None:
    value = {"small": np.zeros(3), "big": np.random.default_rng(0).random(1000), "list": [1]}
    before = pickle.loads(pickle.dumps(value))
    encoded = encode(value)
    value["small"] += 1
    value["big"] += 1
    value["list"].append(2)
    first = decode(encoded)
    assert same(first, before)
    first["big"] += 1
    first["list"].append(3)
    assert same(decode(encoded), before)


DAMAGED: list[Any] = [
    ["again", 0], ["again"], ["list", ["again", 5]], ["nothing"], [], {"a": 1}, ["int", "x"], ["float", "00"],
    ["bytes", "?"], ["dict", 1], ["dict", ["list"], 1], ["tuple", ["again", 0]], ["scalar", "f4", "AA=="],
    ["array", "f4", [2], [0], True, 3], ["array", "O", [1], [0], True, "AAAAAAAAAAA="], ["array", "f4"],
    ["bits", "Generator", {}, None], ["bits", "PCG64", 5, None], ["generator", 5], ["random", ["tuple", 1]],
    ["array", "f4", [2], [1], True, "AAAAAAAAAAA="], ["constant", "function", "os", "system", ""], ["layer", 0],
]  # fmt: skip


@pytest.mark.parametrize("document", DAMAGED, ids=json.dumps)
def test_damaged_documents_are_refused(document: Any) -> None:
    with pytest.raises(ValueError, match=r"damaged"):
        decode(Encoded(document, []))


# ---- the file


def test_a_file_replaces_the_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.shoal"
    write_file(path, {"step": 1})
    write_file(str(path), {"step": 2, "array": np.arange(1000)})
    assert read_file(str(path))["step"] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["run.shoal"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.shoal"
    write_file(path, 1)
    with pytest.raises(CannotSave):
        write_file(path, object())

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(datafile.np, "savez", full)
    with pytest.raises(OSError, match="no space left"):
        write_file(path, 2)
    assert read_file(path) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["run.shoal"]


def test_the_file_is_one_that_numpy_reads(tmp_path: Path) -> None:
    big = np.random.default_rng(0).random(1000)
    write_file(tmp_path / "f", {"big": big})
    with np.load(tmp_path / "f", allow_pickle=False) as members:
        assert sorted(members.files) == ["array_0", "document"]
        assert same(members["array_0"], big)
        document = json.loads(bytes(members["document"]))
    assert (document["what"], document["version"]) == ("shoal snapshot", 1)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_file(path, {"numbers": np.random.default_rng(0).random(200), "text": "x" * 200})
    data = path.read_bytes()
    for size in range(0, len(data), 97):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match="is damaged or no shoal snapshot"):
            read_file(path)
    rng = random.Random(0)
    for _ in range(200):
        place = rng.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :])
        try:
            found = read_file(path)
        except ValueError:
            continue
        assert found["text"] == "x" * 200  # a bit that nobody needs, such as a date
        assert same(found["numbers"], np.random.default_rng(0).random(200))


def save_members(path: Path, document: Any, **arrays: Any) -> None:
    with open(path, "wb") as file:
        np.savez(file, document=np.frombuffer(json.dumps(document).encode(), np.uint8), **arrays)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for data in (b"", b"hello", pickle.dumps({"a": 1}), b"PK\x03\x04"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="f is damaged or no shoal snapshot"):
            read_file(path)
    with open(path, "wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(ValueError, match="is damaged or no shoal snapshot"):
        read_file(path)
    save_members(path, {"weights": 5})
    with pytest.raises(ValueError, match="is damaged or no shoal snapshot"):
        read_file(path)
    save_members(path, {"what": "something else", "version": 1})
    with pytest.raises(ValueError, match="is no shoal snapshot"):
        read_file(path)
    save_members(path, {"what": "shoal snapshot", "version": 2, "value": 1})
    with pytest.raises(ValueError, match="format 2 of a newer Shoal, and this one reads up to format 1"):
        read_file(path)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "absent")


SPRUNG: list[str] = []


def spring() -> None:
    SPRUNG.append("unpickled")


class Trap:
    """Says so when it is unpickled."""

    def __reduce__(self) -> Any:
        return spring, ()


def test_reading_unpickles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "f"
    trap = np.array([Trap()], object)
    value = ["array", "", [1], [0], True, 0]
    save_members(path, {"what": "shoal snapshot", "version": 1, "value": value}, array_0=trap)
    with pytest.raises(ValueError, match=r"is damaged or no shoal snapshot"):
        read_file(path)
    with open(path, "wb") as file:
        np.savez(file, document=trap)
    with pytest.raises(ValueError, match="is damaged or no shoal snapshot"):
        read_file(path)
    assert SPRUNG == []
    pickle.loads(pickle.dumps(Trap()))
    assert SPRUNG.pop() == "unpickled"


# ---- envs


def run_on(env: Any, steps: int = 60) -> list[Any]:
    """All that an env gives, with actions of its own space's choice and resets without a seed."""
    seen: list[Any] = []
    for _ in range(steps):
        action = env.action_space.sample()
        *result, info = env.step(action)
        info.get("episode", {}).pop("t", None)  # a real time
        seen.append(pickle.loads(pickle.dumps((action, *result, info))))
        if result[2] or result[3]:
            seen.append(pickle.loads(pickle.dumps(env.reset())))
    return seen


def in_the_middle(make: Make, steps: int = 25) -> Any:
    """An env in the middle of an episode that is not its first, where it has so many."""
    env = make()
    env.reset(seed=7)
    env.action_space.seed(11)
    ended = False
    for _ in range(steps):
        *_, terminated, truncated, _ = env.step(env.action_space.sample())
        ended = terminated or truncated
        if ended:
            env.reset()
    if ended:
        env.step(env.action_space.sample())
    return env


def check_resume(make: Make, kind: str, tmp_path: Path | None = None) -> EnvState:
    """Save, go on, load twice: all three go on alike; and the same without saving."""
    undisturbed, env = in_the_middle(make), in_the_middle(make)
    state = save_env(env)
    assert state.kind == kind
    if tmp_path is not None:
        write_file(tmp_path / "state", {"kind": state.kind, "content": state.content})
        found = read_file(tmp_path / "state")
        state = EnvState(found["kind"], found["content"])
    expected = run_on(env)
    assert same(run_on(undisturbed), expected)
    for _ in range(2):
        fresh = make()
        loaded = load_env(state, fresh)
        assert (loaded is fresh) == (kind != "pickle")
        assert same(run_on(loaded), expected)
    used = in_the_middle(make, 3)
    assert same(run_on(load_env(state, used)), expected)  # whatever was there before
    return state


def cartpole() -> Any:
    return gymnasium.make("CartPole-v1")


def pendulum() -> Any:
    return gymnasium.make("Pendulum-v1", max_episode_steps=9)


SCALE = 2.5
ENVS: dict[str, Make] = {
    **{
        name: functools.partial(gymnasium.make, name, max_episode_steps=limit)
        for name, limit in (
            ("CartPole-v1", None), ("Pendulum-v1", 17), ("MountainCar-v0", 17), ("MountainCarContinuous-v0", 17),
            ("Acrobot-v1", 17), ("FrozenLake-v1", None), ("Blackjack-v1", None), ("CliffWalking-v1", 17),
            (next(name for name in ("Taxi-v4", "Taxi-v3") if name in gymnasium.registry), 17),
        )
    },
    "without checker": lambda: gymnasium.make("CartPole-v1", disable_env_checker=True),
    "statistics": lambda: wrappers.RecordEpisodeStatistics(cartpole(), buffer_length=3),
    "time limit": lambda: wrappers.TimeLimit(cartpole(), 9),
    "lambda": lambda: wrappers.TransformObservation(cartpole(), lambda obs: obs * SCALE, None),
    "lambda over a number": lambda: (lambda by: wrappers.TransformReward(cartpole(), lambda r: r * by))(3.5),
    "normalized": lambda: wrappers.NormalizeObservation(wrappers.NormalizeReward(cartpole())),
    "stacked frames": lambda: wrappers.FrameStackObservation(cartpole(), 3),
    "delayed": lambda: wrappers.DelayObservation(cartpole(), 2),
    "sticky": lambda: wrappers.StickyAction(cartpole(), 0.4),
    "max and skip": lambda: wrappers.MaxAndSkipObservation(cartpole(), 2),
    "rescaled action": lambda: wrappers.RescaleAction(pendulum(), -1.0, 1.0),
    "clipped action": lambda: wrappers.ClipAction(pendulum()),
    "flattened": lambda: wrappers.FlattenObservation(gymnasium.make("Blackjack-v1")),
    "other dtype": lambda: wrappers.DtypeObservation(cartpole(), np.float64),
    "many wrappers": lambda: wrappers.NormalizeReward(
        wrappers.FrameStackObservation(wrappers.TimeAwareObservation(wrappers.RecordEpisodeStatistics(cartpole())), 2)
    ),
    "count": CountEnv,
    "infos": InfoEnv,
    "reused buffer": ReusedBufferEnv,
    "reused info": ReusedInfoEnv,
    **{f"space {name}": functools.partial(SpaceEnv, space, space) for name, space in SPACES.items()},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ENVS)
def test_an_env_goes_on_as_if_nothing_had_been(name: str, tmp_path: Path) -> None:
    check_resume(ENVS[name], "fields", tmp_path)


def test_a_path_among_the_attributes_is_pickled(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    check_resume(lambda: GateEnv(gate), "pickle", tmp_path)


def test_an_env_that_was_never_reset() -> None:
    env = cartpole()
    fresh = load_env(save_env(env), cartpole())
    assert same(fresh.reset(seed=5), env.reset(seed=5))
    with pytest.raises(gymnasium.error.ResetNeeded):
        load_env(save_env(cartpole()), cartpole()).step(0)


def test_an_env_without_gymnasium() -> None:
    class Bare:
        observation_space = spaces.Discrete(5)

        def __init__(self) -> None:
            self.action_space, self.count, self.random = spaces.Discrete(5), 0, random.Random(4)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            self.count = 0
            return 0, {}

        def step(self, action: Any) -> Any:
            self.count += 1
            return self.random.randrange(5), self.random.gauss(0, 1), self.count == 7, False, {"count": self.count}

    check_resume(Bare, "fields")


class Custom(CountEnv):
    """A CountEnv whose constructor, step and observation are given: `prepare(env)`, `act(env) -> anything`."""

    def __init__(self, prepare: Callable[[Any], None], act: Callable[[Any], Any] = lambda env: None):
        super().__init__()
        type(self).acts[id(self)] = act  # not an attribute: it may be anything
        self.key = id(self)
        prepare(self)

    acts: dict[int, Callable[[Any], Any]] = {}

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, reward, terminated, truncated, {"seen": Custom.acts[self.key](self)}


def custom(prepare: Callable[[Any], None], act: Callable[[Any], Any] = lambda env: None) -> Make:
    return lambda: Custom(prepare, act)


def refusal(make: Make) -> str:
    env = make()
    env.reset(seed=1)
    env.step(0)
    with pytest.raises(CannotSave) as found:
        save_env(env)
    return str(found.value)


def test_shared_references_and_cycles() -> None:
    def prepare(env: Any) -> None:
        env.first = env.second = [0]
        env.ring = {"first": env.first, "array": np.zeros(3)}
        env.ring["ring"], env.array, env.me = env.ring, env.ring["array"], env

    def act(env: Any) -> Any:
        env.me.first[0] += 1
        env.array += env.second[0]
        return list(env.ring["first"]), env.ring["ring"]["array"].copy()

    check_resume(custom(prepare, act), "fields")


def test_sharing_between_layers() -> None:
    class Peeking(gymnasium.Wrapper[Any, Any, Any, Any]):
        def __init__(self, env: Any):
            super().__init__(env)
            self.base, self.rng, self.log = env.unwrapped, env.unwrapped.luck, env.unwrapped.log

        def step(self, action: Any) -> Any:
            *result, info = super().step(action)
            self.log.append(self.rng.random())
            return *result, {**info, "log": self.base.log[-3:], "luck": self.base.luck.random()}

    def prepare(env: Any) -> None:
        env.luck, env.log = np.random.default_rng(3), []

    check_resume(lambda: Peeking(custom(prepare)()), "fields")


class Phase(enum.Enum):
    WAIT, GO = 1, 2


class Mood(enum.Flag):
    CALM, BRAVE = 1, 2


def double(x: float) -> float:
    return 2 * x


def triple(x: float) -> float:
    return 3 * x


def test_constants_and_those_that_are_switched() -> None:
    def prepare(env: Any) -> None:
        env.kind, env.math, env.builtin, env.ufunc, env.numpy = np.float32, math, len, np.tanh, np.mean
        env.phase, env.phases, env.turn = Phase.WAIT, [Phase.GO], double
        env.handlers, env.handler, env.dtypes = {Phase.WAIT: env.pid}, env.pid, [np.int8, float]
        env.table, env.local = [double, triple, CountEnv], lambda x: x + 1

    def act(env: Any) -> Any:
        env.phase = Phase.GO if env.phase is Phase.WAIT else Phase.WAIT
        env.turn = triple if env.turn is double else double
        env.handler = env.complain if env.handler == env.pid else env.pid
        return env.phase.name, env.turn(3), env.handler.__name__, env.handler.__self__ is env, env.local(2)

    check_resume(custom(prepare, act), "fields")


def test_mixed_flags_are_pickled() -> None:
    env = Custom(lambda env: setattr(env, "mood", Mood.CALM | Mood.BRAVE))
    assert save_env(env).kind == "pickle"
    env.mood = Mood.CALM
    assert save_env(env).kind == "fields"


def adding(n: int) -> Callable[[int], int]:
    return lambda x: x + n


def local(which: int) -> Any:
    return [lambda x: x + 1, lambda x: x - 1, lambda x: x + 2, lambda y: y + 1, lambda x, y=1: x + 1,
            lambda x: [x + 1 for _ in "ab"], lambda x: [x + 1 for _ in "ac"]][which]  # fmt: skip


@pytest.mark.parametrize("which", range(7))
def test_a_function_that_changed_to_another_of_no_name_is_refused_at_loading(which: int) -> None:
    env = Custom(lambda env: setattr(env, "local", local(which)))
    state = save_env(env)
    assert load_env(state, Custom(lambda env: setattr(env, "local", local(which)))).local(5) == env.local(5)
    for other in {*range(7)} - {which}:
        fresh = Custom(lambda env, other=other: setattr(env, "local", local(other)))
        with pytest.raises(ValueError, match=r"the state needs the function .*<lambda>, and the env has another or no"):
            load_env(state, fresh)


@pytest.mark.parametrize("function", [math.sin, local(0), np.tanh, json], ids=["builtin", "local", "numpy", "module"])
def test_foreign_constants_within_containers_are_pickled(function: Any) -> None:
    # By its name alone data could have the env call anything, and there is nothing to compare with.
    assert save_env(Custom(lambda env: setattr(env, "function", function))).kind == "fields"
    assert save_env(Custom(lambda env: setattr(env, "functions", [function]))).kind == "pickle"


def test_a_closure_over_a_number_must_hold_the_same() -> None:
    state = save_env(Custom(lambda env: setattr(env, "local", adding(3))))
    assert load_env(state, Custom(lambda env: setattr(env, "local", adding(3)))).local(1) == 4
    with pytest.raises(ValueError, match=r"the state needs the function .*adding"):
        load_env(state, Custom(lambda env: setattr(env, "local", adding(4))))


def counting() -> Callable[[Any], Any]:
    calls = 0

    def count(obs: Any) -> Any:
        nonlocal calls
        calls += 1
        return obs * calls

    return count


def collecting(kept: list[Any]) -> Callable[[Any], Any]:
    def collect(obs: Any) -> Any:
        kept.append(1)
        return obs + len(kept)

    return collect


def with_default(obs: Any, kept: list[int] = []) -> Any:  # noqa: B006
    kept.append(1)
    return obs + len(kept)


@pytest.mark.parametrize("make_function", [counting, lambda: collecting([])], ids=["rebound", "mutable"])
def test_a_function_with_state_is_no_constant(make_function: Any) -> None:
    check_resume(lambda: wrappers.TransformObservation(cartpole(), make_function(), None), "pickle")


def test_a_local_function_with_a_mutable_default_is_pickled() -> None:
    def make() -> Any:
        def change(obs: Any, kept: list[int] = []) -> Any:  # noqa: B006
            kept.append(1)
            return obs + len(kept)

        return wrappers.TransformObservation(cartpole(), change, None)

    check_resume(make, "pickle")


def test_a_named_function_with_state_is_refused() -> None:
    # Pickle would only name it too.
    reason = refusal(lambda: wrappers.TransformObservation(cartpole(), with_default, None))
    assert "wrapper TransformObservation's attribute 'func': the function with_default holds state of its own" in reason


@pytest.mark.parametrize("pickled", [False, True])
def test_modules_with_a_generator_for_all_are_refused(pickled: bool) -> None:
    def prepare(env: Any) -> None:
        env.other, env.rng = Path("x") if pickled else 0, np.random

    reason = refusal(custom(prepare))
    assert "its attribute 'rng': the module numpy.random draws for all" in reason


def test_a_set_of_spaces_that_changes_with_the_episode() -> None:
    def act(env: Any) -> Any:
        env.action_space = spaces.Discrete(env.steps % 3 + 1, seed=env.steps)
        return env.action_space.n

    check_resume(custom(lambda env: None, act), "fields")


def a_generator() -> Iterator[int]:
    yield from range(100)


@pytest.mark.parametrize(
    "thing",
    [threading.Lock, a_generator, socket.socket, lambda: [threading.RLock()]],
    ids=["lock", "generator", "socket", "nested"],
)
def test_what_nobody_can_save_is_refused(thing: Callable[[], Any]) -> None:
    value = thing()
    reason = refusal(custom(lambda env: setattr(env, "thing", value)))
    assert reason.startswith("its attribute 'thing'")
    assert f"a {type(value[0] if isinstance(value, list) else value).__name__}, is no plain data" in reason
    assert "cannot be pickled instead" in reason
    assert "give the env get_state() and set_state(state)" in reason
    if isinstance(value, socket.socket):
        value.close()


def test_the_wrapper_to_blame_is_named() -> None:
    def make() -> Any:
        env = wrappers.TimeLimit(CountEnv(), 5)
        env.lock = threading.Lock()
        return env

    assert refusal(make).startswith("its wrapper TimeLimit's attribute 'lock', a lock, is no plain data")


def test_overlapping_views_are_refused_pickled_or_not() -> None:
    def prepare(env: Any) -> None:
        env.state = np.zeros(4)
        env.speed = env.state[2:]

    reason = refusal(custom(prepare))
    assert "its attribute 'state' and its attribute 'speed' are views of the same memory" in reason

    def prepare_object(env: Any) -> None:
        env.sim = types.SimpleNamespace(state=np.zeros(4))
        env.sim.speed = env.sim.state[2:]

    assert "are views of the same memory" in refusal(custom(prepare_object))

    def prepare_buffer(env: Any) -> None:
        env.buffer = bytearray(16)
        env.window = np.frombuffer(env.buffer)

    assert "lies in the memory of a bytearray of the env" in refusal(custom(prepare_buffer))


@pytest.mark.parametrize(
    "value",
    [np.array([1, None], object), MyDict(a=1), MyList([1]), np.arange(3).view(MyArray), Pair(1, [2]), OrderedDict(a=1),
     types.SimpleNamespace(array=np.asfortranarray(np.ones((3, 4))), other=np.ones((4, 3)).T)],
    ids=["object array", "dict", "list", "array", "named tuple", "ordered dict", "object"],
)  # fmt: skip
def test_subclasses_and_objects_are_pickled(value: Any) -> None:
    def prepare(env: Any) -> None:
        env.value = pickle.loads(pickle.dumps(value))

    def act(env: Any) -> Any:
        return type(env.value).__name__, repr(env.value)

    env = in_the_middle(custom(prepare, act))
    state = save_env(env)
    assert state.kind == "pickle"
    loaded = load_env(state, custom(prepare, act)())
    assert same(run_on(loaded), run_on(env))


def test_slots() -> None:
    class Slotted:
        __slots__ = ("__dict__", "__hidden", "count", "unset")
        observation_space = action_space = spaces.Discrete(3)

        def __init__(self) -> None:
            self.count, self.__hidden = 0, [1]

        def step(self, action: Any) -> Any:
            self.count += 1
            self.__hidden.append(self.count)
            return 0, 0.0, False, False, {"seen": (self.count, list(self.__hidden))}

    env = Slotted()
    env.step(0)
    env.extra = 5  # type: ignore[attr-defined]
    state = save_env(env)
    fresh = Slotted()
    fresh.unset = "gone after loading"  # type: ignore[misc]
    assert load_env(state, fresh) is fresh
    assert not hasattr(fresh, "unset")
    assert vars(fresh) == {"extra": 5}
    assert same(fresh.step(0), env.step(0))


def test_attributes_that_were_not_saved_are_deleted() -> None:
    env, fresh = CountEnv(), CountEnv()
    del env.value
    fresh.surplus = 1  # type: ignore[attr-defined]
    load_env(save_env(env), fresh)
    assert vars(fresh).keys() == vars(env).keys()


def test_state_hidden_in_c_is_not_overlooked() -> None:
    class Listed(list[Any]):
        observation_space = action_space = spaces.Discrete(3)

        def step(self, action: Any) -> Any:
            self.append(action)
            return 0, len(self), False, False, {}

    class Queued(deque[Any]):
        __reduce__ = None  # type: ignore[assignment]

    env = Listed()
    env.step(1)
    state = save_env(env)
    assert state.kind == "pickle"
    assert load_env(state, Listed()) == [1]
    with pytest.raises(CannotSave, match="its class Queued is written in C and hides its state"):
        save_env(Queued())


# ---- get_state and set_state


class Simulator:
    """Cannot be pickled nor looked into, and shares the env's generator."""

    def __init__(self, generator: Any):
        self.lock, self.generator, self.level = threading.Lock(), generator, 0.0

    def advance(self) -> float:
        self.level += self.generator.random()
        return self.level


class OwnEnv(CountEnv):
    """Its get_state forgets the generators."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(0.0, 1.0, (2,)))
        self.sim = Simulator(self.np_random)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        found = super().reset(seed=seed, options=options)
        self.sim = Simulator(self.np_random)
        return found

    def step(self, action: Any) -> Any:
        *result, _ = super().step(action["a"])
        return *result, {"level": self.sim.advance()}

    def get_state(self) -> Any:
        return {"level": self.sim.level, "counts": (self.seed_given, self.episode, self.steps)}

    def set_state(self, state: Any) -> None:
        self.sim.level = state["level"]
        self.seed_given, self.episode, self.steps = state["counts"]


def test_a_pair_of_its_own(tmp_path: Path) -> None:
    check_resume(OwnEnv, "own", tmp_path)


def test_a_pair_under_wrappers_with_state(tmp_path: Path) -> None:
    def make() -> Any:
        return wrappers.RecordEpisodeStatistics(wrappers.TimeLimit(wrappers.StickyAction(OwnEnv(), 0.5), 4))

    check_resume(make, "own", tmp_path)
    env = in_the_middle(make)
    elapsed = env.env._elapsed_steps
    fresh = load_env(save_env(env), make())
    assert elapsed > 0
    assert fresh.env._elapsed_steps == elapsed


def test_a_wrapper_that_shares_the_generator_of_a_pair() -> None:
    class Noisy(gymnasium.Wrapper[Any, Any, Any, Any]):
        def reset(self, **kwargs: Any) -> Any:
            found = super().reset(**kwargs)
            self.rng = self.unwrapped.np_random
            return found

        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            return observation, reward + self.rng.random(), *rest

    check_resume(lambda: Noisy(OwnEnv()), "own")


class Remembering(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A wrapper whose pair knows of itself only."""

    def __init__(self, env: Any):
        super().__init__(env)
        self.lock, self.total = threading.Lock(), 0.0

    def step(self, action: Any) -> Any:
        *result, info = super().step(action)
        self.total += float(result[1])
        return *result, {**info, "total": self.total}

    def get_state(self) -> Any:
        return self.total

    def set_state(self, state: Any) -> None:
        self.total = state


@pytest.mark.parametrize("inner", [cartpole, OwnEnv], ids=["over fields", "over another pair"])
def test_a_wrapper_with_a_pair_need_not_know_of_what_is_below(inner: Make) -> None:
    check_resume(lambda: wrappers.TimeLimit(Remembering(inner()), 50), "own")


def test_a_wrapper_speaks_for_what_has_no_other_voice() -> None:
    class Locked(CountEnv):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

        def step(self, action: Any) -> Any:
            *result, _ = super().step(action)
            return *result, {"luck": self.np_random.random()}

    class Speaker(gymnasium.Wrapper[Any, Any, Any, Any]):
        def get_state(self) -> Any:
            inner = self.unwrapped
            return [inner.steps, inner.episode, inner.seed_given]

        def set_state(self, state: Any) -> None:
            self.unwrapped.steps, self.unwrapped.episode, self.unwrapped.seed_given = state

    check_resume(lambda: Speaker(Locked()), "own")
    assert "its attribute 'lock', a lock" in refusal(Locked)


def test_pairs_that_are_none() -> None:
    class Physics(CountEnv):
        def get_state(self) -> Any:
            return self.steps

        def set_state(self, qpos: Any, qvel: Any) -> None:
            raise RuntimeError("not this one")

    class Abstract(CountEnv):
        def get_state(self) -> Any:
            raise NotImplementedError

        def set_state(self, state: Any) -> None:
            raise NotImplementedError

    class Odd(CountEnv):
        def get_state(self) -> Any:
            return object()

        def set_state(self, state: Any) -> None:
            raise RuntimeError("not this one")

    class Half(CountEnv):
        def get_state(self) -> Any:
            return self.steps

    for make in (Physics, Abstract, Odd, Half):
        check_resume(make, "fields")


def test_a_pair_is_not_looked_for_through_a_wrapper() -> None:
    class Passing(gymnasium.Wrapper[Any, Any, Any, Any]):
        def __getattr__(self, name: str) -> Any:
            return getattr(self.env, name)

        def step(self, action: Any) -> Any:
            self.count = vars(self).get("count", 0) + 1
            *result, info = super().step(action)
            return *result, {**info, "count": self.count}

    check_resume(lambda: Passing(OwnEnv()), "own")


def test_a_get_state_that_raises_is_told() -> None:
    class Broken(CountEnv):
        def get_state(self) -> Any:
            raise KeyError("joint")

        def set_state(self, state: Any) -> None:
            pass

    assert refusal(Broken) == "its get_state() raised KeyError: 'joint'"


def test_what_get_state_returned_is_copied() -> None:
    class Listing(CountEnv):
        def __init__(self) -> None:
            super().__init__()
            self.log: list[int] = []

        def step(self, action: Any) -> Any:
            self.log.append(int(action))
            *result, _ = super().step(action)
            return *result, {"log": list(self.log)}

        def get_state(self) -> Any:
            return [self.log, self.steps, self.episode, self.seed_given]

        def set_state(self, state: Any) -> None:
            self.log, self.steps, self.episode, self.seed_given = state

    check_resume(Listing, "own")


# ---- pickles that lose state


class EasyEnv(CountEnv, EzPickle):
    def __init__(self, extra: Any = None):
        super().__init__()
        EzPickle.__init__(self, extra)
        self.extra = extra


def test_an_ezpickle_env_of_plain_attributes_is_saved_by_them() -> None:
    check_resume(EasyEnv, "fields")


def test_an_ezpickle_env_is_never_pickled() -> None:
    reason = refusal(lambda: wrappers.TimeLimit(EasyEnv(types.SimpleNamespace()), 5))
    assert reason.startswith("its attribute 'extra', a SimpleNamespace, is no plain data")
    assert "EasyEnv is a gymnasium.utils.EzPickle, of which pickle keeps the constructor's arguments alone" in reason
    assert reason.endswith("give the env get_state() and set_state(state), which return and take plain data")


def test_an_ezpickle_env_inside_of_another_is_seen() -> None:
    assert "EasyEnv is a gymnasium.utils.EzPickle" in refusal(custom(lambda env: setattr(env, "inner", EasyEnv())))
    hidden = types.SimpleNamespace(envs=[EasyEnv()])
    assert "EasyEnv is a gymnasium.utils.EzPickle" in refusal(custom(lambda env: setattr(env, "inner", hidden)))


def test_an_ezpickle_env_that_pickles_properly_is_pickled() -> None:
    class Proper(EasyEnv):
        def __getstate__(self) -> Any:
            return vars(self)

        def __setstate__(self, state: Any) -> None:
            vars(self).update(state)

    check_resume(lambda: Proper(types.SimpleNamespace()), "pickle")


def test_an_ezpickle_env_with_a_pair_is_saved() -> None:
    class Paired(OwnEnv, EzPickle):
        def __init__(self) -> None:
            OwnEnv.__init__(self)
            EzPickle.__init__(self)

    check_resume(Paired, "own")


class Forgetful(CountEnv):
    """Pickled as a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.thing = types.SimpleNamespace()

    def __reduce__(self) -> Any:
        return Forgetful, ()


def test_a_pickle_that_forgets_is_refused() -> None:
    assert "as that loses its attribute " in refusal(Forgetful)


def test_a_pickle_that_does_not_load_is_refused() -> None:
    class Picky(Exception):
        def __init__(self, one: int, other: int):
            super().__init__("text")

    reason = refusal(custom(lambda env: setattr(env, "error", Picky(1, 2))))
    assert "its attribute 'error', a Picky, is no plain data; it cannot be pickled instead (TypeError" in reason


# ---- loading where it does not fit


def test_other_wrappers_do_not_fit() -> None:
    state = save_env(wrappers.TimeLimit(CountEnv(), 5))
    with pytest.raises(ValueError, match=r"the state is of gymnasium\..*TimeLimit over envs.CountEnv, and the env is "):
        load_env(state, CountEnv())
    with pytest.raises(ValueError, match=r"and the env is .*TimeLimit over envs.InfoEnv"):
        load_env(state, wrappers.TimeLimit(InfoEnv(), 5))
    pickled = save_env(Custom(lambda env: setattr(env, "path", Path("x"))))
    assert pickled.kind == "pickle"
    with pytest.raises(ValueError, match=r"and the env is envs.CountEnv"):
        load_env(pickled, CountEnv())


def test_a_space_of_another_make_does_not_fit() -> None:
    fresh = OwnEnv()
    fresh.action_space = spaces.Discrete(3)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="the env's attribute 'action_space' is not the space that was saved"):
        load_env(save_env(OwnEnv()), fresh)


def test_an_env_that_does_not_fit_is_left_alone() -> None:
    state = save_env(Custom(lambda env: setattr(env, "local", lambda x: x + 1)))
    fresh = Custom(lambda env: setattr(env, "local", 5))
    before = dict(vars(fresh))
    with pytest.raises(ValueError, match="the state needs the function"):
        load_env(state, fresh)
    assert vars(fresh) == before


@pytest.mark.parametrize(
    "state",
    [EnvState("own", {}), EnvState("fields", None), EnvState("fields", {"document": "{", "arrays": []}),
     EnvState("fields", {"document": '{"layers": []}', "arrays": []}), EnvState("pickle", b"no pickle"),
     EnvState("other", {})],
    ids=lambda state: f"{state.kind} {state.content}",
)  # fmt: skip
def test_damaged_states_are_refused(state: EnvState) -> None:
    with pytest.raises(ValueError, match=r"damaged|the state is of|does not load|unknown"):
        load_env(state, CountEnv())


@pytest.mark.parametrize(
    "node",
    [["constant", "function", "os", "system", ""], ["constant", "builtin", "posix", "system", ""],
     ["constant", "class", "subprocess", "Popen", ""], ["constant", "builtin", "builtins", "eval", ""],
     ["constant", "module", "os", "", ""],
     ["record", "subprocess", "Popen"], ["record", "gymnasium.spaces.box", "nothing"], ["method", 0, "metadata"],
     ["layer", 9], ["constant", "member", "enum", "Enum", "x"]],
    ids=lambda node: " ".join(map(str, node)),
)  # fmt: skip
def test_data_cannot_name_what_the_env_does_not_hold(node: Any) -> None:
    document = {"layers": ["envs.CountEnv"], "random": [], "own": [], "fields": [[0, [["value", node]]]]}
    env = CountEnv()
    with pytest.raises(ValueError, match=r"the state needs|damaged"):
        load_env(EnvState("fields", {"document": json.dumps(document), "arrays": []}), env)
    assert env.value == "untouched"


# ---- across processes

SCRIPT = """
import enum, hashlib, pickle, sys
import gymnasium, numpy as np
from gymnasium import spaces, wrappers
from shoal.state.datafile import read_file, write_file
from shoal.state.env_state import EnvState, load_env, save_env

class Phase(enum.Enum):
    CALM, WILD = 1, 2

def soft(x): return np.tanh(x)

class Script(gymnasium.Env):
    def __init__(self):
        self.observation_space = self.action_space = spaces.Box(-1.0, 1.0, (3,))
        self.phase, self.steps, self.functions = Phase.CALM, 0, [soft]
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample(), {}
    def step(self, action):
        self.steps += 1
        if self.np_random.random() < 0.2:
            self.phase = Phase.WILD if self.phase is Phase.CALM else Phase.CALM
        return self.functions[0](action), self.np_random.random(), self.steps == 9, False, {"phase": self.phase.name}

def make():
    return wrappers.NormalizeObservation(wrappers.TimeLimit(Script(), 8))

def run(env, steps):
    seen = []
    for _ in range(steps):
        seen.append(env.step(env.action_space.sample()))
        if seen[-1][2] or seen[-1][3]:
            seen.append(env.reset())
    return hashlib.sha256(pickle.dumps([repr(item) for item in seen])).hexdigest()

env = make()
if sys.argv[1] == "save":
    env.reset(seed=5)
    env.action_space.seed(6)
    run(env, 20)
    state = save_env(env)
    write_file(sys.argv[2], {"kind": state.kind, "content": state.content})
else:
    found = read_file(sys.argv[2])
    env = load_env(EnvState(found["kind"], found["content"]), env)
    assert found["kind"] == "fields"
print(run(env, 50))
"""


def test_another_process_goes_on_with_a_script_s_own_env(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def output(what: str) -> str:
        command = [sys.executable, str(script), what, str(tmp_path / "state")]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    assert output("save") == output("load")


def test_classes_that_came_by_value_are_found_by_their_methods() -> None:
    # As in a worker, where the caller's script is no module.
    module = types.ModuleType("caller_script")
    exec("from envs import CountEnv\nimport enum\nclass Phase(enum.Enum):\n    WAIT, GO = 1, 2\n"
         "class Theirs(CountEnv):\n"
         "    def __init__(self):\n        super().__init__()\n        self.phase = Phase.WAIT\n"
         "    def step(self, action):\n        self.phase = Phase.GO\n        *result, _ = super().step(action)\n"
         "        return *result, {'phase': self.phase.name}\n", vars(module))  # fmt: skip
    assert "caller_script" not in sys.modules
    check_resume(module.Theirs, "fields")

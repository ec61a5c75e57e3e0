"""Files that would take all memory, all time, or hold bytes that numpy does not expect, are refused."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from shoal.errors import BadSnapshot, CannotSnapshot, DataError
from shoal.state import datafile
from shoal.state.datafile import Encoded, decode, encode, read_document, read_file, write_file
from shoal.state.env_state import EnvState, load_env, save_env

ZEROS = ["all", "AAAAAAAAAAA="]
PAIRS = [["tuple", 1], *[["tuple", ["again", -2], ["again", -2]]] * 60]
CHAIN = [["tuple", 1], *[["tuple", ["again", -2]]] * 100_000]


def array(name: str, shape: Any, data: Any) -> list[Any]:
    return ["array", name, shape, list(range(len(shape))), True, data]


REFUSED = {
    "much from little": array("<f8", [2**31], ZEROS),
    "too much to count": array("<f8", [2**60], ZEROS),
    "much from many": ["list", *[array("<f8", [2**20], ZEROS)] * 9],
    "sizes below zero": array("<f8", [-1], "AAAAAAAAAAA="),
    "a size that is none": array("<f8", [True], "AAAAAAAAAAA="),
    "a key of 2**60 parts": ["list", *PAIRS, ["set", ["again", -2]]],
    "a frozen key of 2**60 parts": ["list", *PAIRS, ["frozenset", ["again", -2]]],
    "a deep key": ["list", *CHAIN, ["dict", ["again", -2], 1]],
    "a text of 2**60 parts": ["str_", ["list", *PAIRS]],
    "a truth value": array("|b1", [1], "/w=="),
    "a truth value alone": ["scalar", "|b1", "/w=="],
    "a character": array("<U1", [1], "////fw=="),
    "objects": array("|O", [1], "AAAAAAAAAAA="),
    "a type of many": ["dtype", "i4,f8"],
    "a type of a list": ["dtype", ["list", "i4"]],
    "nothing": array("|V0", [2**40], ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_documents_that_are_refused(name: str) -> None:
    with pytest.raises(DataError, match="damaged"):
        decode(Encoded(REFUSED[name], []))


def test_an_array_of_the_file_is_one_value() -> None:
    large = np.arange(1000.0)
    node = encode(large).document
    with pytest.raises(DataError, match="used twice"):
        decode(Encoded(["list", node, node], [large]))


def test_many_large_arrays_of_equal_entries_are_written_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datafile, "EQUAL_BYTES", 3000)
    arrays = [np.full(125, 1.5 + i) for i in range(5)]
    encoded = encode(arrays)
    assert len(encoded.arrays) == 2
    np.testing.assert_array_equal(decode(encoded), arrays)


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    header = {"what": "shoal snapshot", "version": 1, "value": 0}
    members = {"array_0": np.zeros(10**6), "document": np.frombuffer(json.dumps(header).encode(), np.uint8)}
    np.savez(tmp_path / "plain.npz", **members)
    np.savez_compressed(tmp_path / "packed.npz", **members)
    assert len(read_document(tmp_path / "plain.npz", "shoal snapshot", 1)[1]) == 1
    with pytest.raises(DataError, match="damaged"):
        read_file(tmp_path / "packed.npz")


def test_a_member_twice_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "file", np.arange(1000.0))
    with zipfile.ZipFile(tmp_path / "file", "a") as members, pytest.warns(UserWarning, match="Duplicate"):
        members.writestr("document.npy", b"")
    with pytest.raises(DataError, match="damaged"):
        read_file(tmp_path / "file")


# ---- env states and snapshots --------------------------------------------------------------------------------


class Pair(gymnasium.Env[Any, Any]):
    """Speaks for itself, and tells much."""

    observation_space, action_space = spaces.Box(0, 9, (1,)), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), 1.0, False, False, {"a": 1}

    def get_state(self) -> Any:
        return {"a": 1}

    def set_state(self, state: Any) -> None:
        if state["a"] != 1:
            raise RuntimeError("there is no such a")


def test_a_set_state_that_raises_is_told_as_a_data_error() -> None:
    state = save_env(Pair())
    changed = state.content["document"].replace('"a", 1', '"a", 2')
    with pytest.raises(DataError, match=r"its set_state\(state\) raised RuntimeError: there is no such a"):
        load_env(EnvState("own", {"document": changed, "arrays": []}), Pair())


def test_a_space_gets_no_generator_that_is_none() -> None:
    env = Pair()
    env.action_space = spaces.Discrete(2)
    state = save_env(env)
    for part in (
        '["random", [[0, ["dict", "action_space", ["list", 0.5]]]]]',
        '["random", [[0, ["dict", "dice", 0.5]]]]',
    ):
        document = json.loads(state.content["document"]) | dict([json.loads(part)])
        with pytest.raises(DataError, match="is no random generator"):
            load_env(EnvState("own", {"document": json.dumps(document), "arrays": []}), env)
    env.action_space.sample()


@pytest.mark.parametrize("fields", [[["env", 1]], [[5, 1]], [[["list"], 1]], [5], 5])
def test_links_between_layers_and_names_that_are_none_cannot_be_set(fields: Any) -> None:
    env = gymnasium.wrappers.TimeLimit(Pair(), 5)
    document = {"layers": [], "random": [], "own": [], "fields": [[0, fields]]}
    document["layers"] = json.loads(save_env(env).content["document"])["layers"]
    inner = env.env
    with pytest.raises(DataError, match="damaged"):
        load_env(EnvState("fields", {"document": json.dumps(document), "arrays": []}), env)
    assert env.env is inner


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    """A snapshot of two envs whose answers, each with an info, were not received yet."""
    with shoal.Pool(Pair, 2, backend="serial") as pool:
        pool.reset(seed=1)
        pool.send(np.zeros(2, int))
        pool.snapshot(tmp_path / "file")
    found: dict[str, Any] = read_file(tmp_path / "file")
    return found


def many(depth: int) -> Any:
    value: Any = (1,)
    for _ in range(depth):
        value = (value, value)
    return value


CHANGES: dict[str, Any] = {
    "an answer tells of a note that is not there": lambda c: c["notes"].pop(0),
    "a note that no answer tells of": lambda c: c["fields"]["status"].fill(0),
    "an answer that is an error": lambda c: c["fields"]["status"].__ior__(255),
    "an info that is none": lambda c: c["notes"].update({0: 5}),
    "an info of 2**60 parts": lambda c: c["notes"][0].update(a=many(60)),
    "counts below zero": lambda c: c["scheduler"].update(counts=[-1, 0]),
    "a loss that is none": lambda c: c["scheduler"].update(due=[(0, 1)]),
    "pending is no list": lambda c: c["scheduler"].update(pending={0: 1}),
    "a seed that is none": lambda c: c["envs"].__setitem__(0, (*c["envs"][0][:2], np.zeros(3))),
    "a kind that is none": lambda c: c["envs"].__setitem__(0, (np.zeros(3), *c["envs"][0][1:])),
    "a content of 2**60 parts": lambda c: c["envs"].__setitem__(0, ("own", {"document": many(60)}, None)),
    "an identity of 2**60 parts": lambda c: c["about"].update(num_envs=many(60)),
    "a number of envs that cannot be written": lambda c: c["about"].update(num_envs=10**5000),
    "objects where there are none": lambda c: c["objects"].__setitem__(0, [1, 2]),
    "objects that are none": lambda c: c["objects"].__setitem__(0, np.zeros(3)),
    "ended, and more": lambda c: c["fields"]["ended"].fill(7),
    "a name that is none": lambda c: c["fields"].update({5: np.zeros(2)}),
    "a part is missing": lambda c: c.pop("notes"),
    "a part more": lambda c: c.update(more=1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_snapshots_that_make_no_sense_are_refused(name: str, content: dict[str, Any], tmp_path: Path) -> None:
    CHANGES[name](content)
    write_file(tmp_path / "changed", content)
    with shoal.Pool(Pair, 2, backend="serial") as pool:
        with pytest.raises(BadSnapshot) as caught:
            pool.restore(tmp_path / "changed")
        pool.reset()  # nothing has happened to it
    assert isinstance(caught.value, CannotSnapshot | DataError)

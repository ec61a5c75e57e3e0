"""How a worker learns the keys of infos."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from shoal.memory.info_schema import EMPTY, HEAD, MOST_FAILURES, InfoLearner, Schema, read_schemas
from shoal.memory.slab import Layout, Slab
from shoal.native import layout
from shoal.spaces.leaves import flatten


def schema_of(*infos: dict[Any, Any], wanted: frozenset[str] | None = None) -> Schema:
    found = EMPTY
    for info in infos:
        extended = found.extended(info, wanted)
        assert extended is not None
        found = extended
    return found


def keys(schema: Schema) -> list[str]:
    return [entry.key for entry in schema.entries]


def test_keys_keep_their_order_where_some_come_later() -> None:
    schema = schema_of({"b": 1}, {"a": 1, "b": 2, "d": 3}, {"b": 1, "c": {"x": 1}, "d": 2}, {"c": {"w": 1, "x": 2}})
    assert keys(schema) == ["a", "b", "c", "w", "x", "d"]
    assert [entry.end for entry in schema.entries] == [1, 2, 5, 4, 5, 6]


def test_another_order_has_no_schema() -> None:
    assert schema_of({"a": 1, "b": 2}).extended({"b": 1, "a": 2}, None) is None


def test_a_nested_dict_in_another_order_travels_as_a_note() -> None:
    schema = schema_of({"n": {"a": 1, "b": 2}, "z": 1}, {"n": {"b": 1, "a": 2}})
    assert [(entry.key, entry.kind) for entry in schema.entries] == [("n", "o"), ("z", "n")]


@pytest.mark.parametrize("info", [{1: 2}, {("a",): 1}, {"a": 1, None: 2}], ids=repr)
def test_keys_that_are_no_texts_have_no_schema(info: dict[Any, Any]) -> None:
    assert EMPTY.extended(info, None) is None


def test_values_lie_on_words_of_their_own() -> None:
    schema = schema_of({"a": 1.0, "s": np.zeros(3, np.uint8), "n": {}, "b": 2, "i": np.zeros((2, 3))})
    places = [(entry.offset, entry.nbytes) for entry in schema.entries if entry.nbytes]
    assert places == [(16, 8), (24, 3), (32, 8), (40, 48)]
    assert schema.row_bytes == 88


def test_a_schema_survives_its_text_and_its_id_says_what_it_is() -> None:
    schema = schema_of({"ä": 1.0, "n": {"x": np.zeros((2, 0), np.float16)}})
    again = Schema.parse(schema.text())
    assert again == schema
    assert again.id == schema.id != schema_of({"ä": 1.0}).id


def test_what_is_too_large_gets_no_room() -> None:
    schema = schema_of({"small": np.zeros(8), "large": np.zeros(1000), "n": 1})
    assert [entry.kind for entry in schema.entries] == ["<f8", "o", "n"]
    schema = schema_of({f"a{i}": np.zeros(30) for i in range(4)})
    assert {entry.kind for entry in schema.entries} == {"o"}
    assert schema.row_bytes <= layout.INFO_BYTES
    assert EMPTY.extended({f"k{i}": i for i in range(300)}, None) is None


def test_only_wanted_keys_get_room() -> None:
    info = {"a": 1, "b": 2, "final_obs": np.zeros(2), "final_info": {"a": 1, "b": 2}, "n": {"b": 1}}
    schema = schema_of(info, wanted=frozenset({"a", "n"}))
    kinds = [(entry.key, entry.kind) for entry in schema.entries]
    assert kinds == [
        ("a", "n"), ("b", "x"), ("final_obs", "o"), ("final_info", "d"), ("a", "n"), ("b", "x"), ("n", "d"), ("b", "n"),
    ]  # fmt: skip


def test_a_dict_that_holds_itself_comes_to_an_end() -> None:
    info: dict[str, Any] = {"a": 1}
    info["self"] = info
    assert keys(schema_of(info)).count("self") < 20


class Workers:
    """Learners of several workers over one slab, and what each has handed to its core."""

    def __init__(self, count: int, wanted: frozenset[str] | None = None):
        leaves = flatten(spaces.Discrete(2))
        self.slab = Slab.create(Layout.plan(leaves, leaves, count, 2, count, infos=True), shared=False)
        self.used: list[list[Any]] = [[] for _ in range(count)]
        self.learners = [self.start(worker, wanted) for worker in range(count)]

    def start(self, worker: int, wanted: frozenset[str] | None = None) -> InfoLearner:
        learner = InfoLearner(worker, wanted)
        learner.attach(self.slab, self.used[worker].append)
        return learner

    def schemas(self, worker: int) -> list[Schema]:
        return read_schemas(self.slab.array("info_schemas")[worker])


def test_a_worker_takes_the_schema_of_another_one_where_that_has_what_it_needs() -> None:
    workers = Workers(2)
    assert workers.learners[0].learn({"a": 1})
    assert workers.learners[0].learn({"a": 1, "b": 2, "c": 3})
    assert workers.learners[1].learn({"a": 1, "c": 3})
    assert workers.schemas(1) == [workers.schemas(0)[-1]]
    assert workers.used[1][-1][0] == workers.used[0][-1][0]


def test_a_worker_that_is_just_writing_its_first_schema_has_none() -> None:
    workers = Workers(2)
    head = workers.slab.array("info_schemas")[0][: HEAD.itemsize].view(HEAD)
    head["used"] = 20  # and `count`, which follows, is still 0
    assert workers.learners[1].learn({"a": 1})
    assert keys(workers.schemas(1)[-1]) == ["a"]


def test_a_worker_keeps_its_own_keys_beside_those_of_another_one() -> None:
    workers = Workers(2)
    workers.learners[0].learn({"a": 1, "b": 1})
    workers.learners[1].learn({"x": 1})
    workers.learners[1].learn({"a": 1, "b": 1})
    assert set(keys(workers.schemas(1)[-1])) == {"x", "a", "b"}


def test_a_worker_that_is_started_again_goes_on_with_its_schemas() -> None:
    workers = Workers(1)
    workers.learners[0].learn({"a": 1})
    workers.start(0)
    assert len(workers.used[0]) == 2
    assert workers.used[0][0] == workers.used[0][1]


def test_learning_comes_to_an_end() -> None:
    workers = Workers(1)
    learner = workers.learners[0]
    learnt = sum(learner.learn({f"key {i}": i}) for i in range(5000))
    assert 10 < learnt < 200
    assert len(workers.schemas(0)) == learnt
    tries = 2 * MOST_FAILURES
    assert not any(learner.learn({"b": 1, 1: 2}) for _ in range(tries))
    assert learner._failures <= MOST_FAILURES + 1

"""The answers of Gymnasium 0.29: what its 0.29.1 was seen to say, and what scripts of that age do with it."""

from __future__ import annotations

import inspect
import json
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from dialects import answers_029
from envs import CountEnv
from shoal.dialects.gymnasium029 import AsyncVectorEnv, SyncVectorEnv, VectorEnv

RECORD = json.loads(answers_029.RECORD.read_text())
ARGUMENTS = {  # of the classes of 0.29.1, with their defaults
    SyncVectorEnv: {"env_fns": inspect.Parameter.empty, "observation_space": None, "action_space": None, "copy": True},
    AsyncVectorEnv: {
        "env_fns": inspect.Parameter.empty, "observation_space": None, "action_space": None, "shared_memory": True,
        "copy": True, "context": None, "daemon": True, "worker": None,
    },
}  # fmt: skip


def as_json(answers: Any) -> Any:
    return json.loads(json.dumps(answers))


@pytest.mark.parametrize("case", answers_029.CASES, ids=answers_029.name)
def test_every_answer_is_that_of_0_29(case: Any, backend: str) -> None:
    workers = None if backend == "serial" else min(3, case[2])
    fns = answers_029.env_fns(case)
    with shoal.make(fns, api="gymnasium029", backend=backend, num_workers=workers) as envs:
        found = as_json(answers_029.conversation(envs))
    expected = RECORD[answers_029.name(case)]
    assert len(found) == len(expected)
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert mine == theirs, f"answer {step}"


@pytest.mark.parametrize("case", answers_029.CASES[::3], ids=answers_029.name)
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_the_drop_ins_say_the_same(kind: Any, case: Any) -> None:
    with kind(answers_029.env_fns(case)) as envs:
        assert as_json(answers_029.conversation(envs)) == RECORD[answers_029.name(case)]


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_the_drop_ins_take_the_arguments_of_0_29(kind: Any) -> None:
    found = {
        one.name: one.default for one in inspect.signature(kind).parameters.values() if one.kind != one.VAR_KEYWORD
    }
    assert list(found.items()) == list(ARGUMENTS[kind].items())


def test_what_else_scripts_of_that_age_look_at() -> None:
    with SyncVectorEnv([CountEnv] * 3) as envs:
        assert envs.is_vector_env
        assert len(envs.envs) == len(envs.env_fns) == 3
        assert isinstance(envs, gymnasium.vector.SyncVectorEnv)
        assert isinstance(envs, gymnasium.vector.VectorEnv)
        assert envs.metadata == CountEnv.metadata


@pytest.mark.parametrize("which", ["observation_space", "action_space"])
@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
def test_spaces_that_are_given_must_be_those_of_the_envs(kind: Any, which: str) -> None:
    with kind([CountEnv] * 2) as envs:
        right = getattr(envs, f"single_{which}")
    kind([CountEnv] * 2, **{which: right}).close()
    with pytest.raises(RuntimeError, match=r"Some environments have an .* space different from"):
        kind([CountEnv] * 2, **{which: spaces.Box(-3, 3, (7,), np.float32)})


def test_other_modes_are_refused() -> None:
    with pytest.raises(ValueError, match='knows only "same_step"'):
        VectorEnv(CountEnv, 2, autoreset="next_step")


def test_it_has_the_spec_of_the_id() -> None:
    with shoal.make("CartPole-v1", 2, api="gymnasium029", backend="serial") as envs:
        assert envs.spec.id == "CartPole-v1"
        assert type(envs) is VectorEnv

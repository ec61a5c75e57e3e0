"""Envs inside of wrappers that pass on every attribute can be pickled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest

from shoal.envs.guarded_pickles import dumps


class Inner:
    def __init__(self) -> None:
        self.value = 3


class PassesOn:
    """Asks its env for everything that it does not have, also when it has no env yet."""

    def __init__(self, env: Any):
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)


class KnowsItself(PassesOn):
    def __init__(self, env: Any):
        super().__init__(env)
        self.note = "not kept"

    def __getstate__(self) -> Any:
        return {"_env": self._env}

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state, note="made anew")


@pytest.fixture
def _no_collection() -> Iterator[None]:
    """What other tests have left to the garbage collector cannot be finalized at the bottom of a deep recursion."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collection")
def test_a_wrapper_that_passes_everything_on_comes_back() -> None:
    with pytest.raises(RecursionError):
        cloudpickle.loads(cloudpickle.dumps(PassesOn(Inner())))
    wrapper = PassesOn(PassesOn(Inner()))
    found = cloudpickle.loads(dumps({"one": wrapper, "same": wrapper}))
    assert found["one"] is found["same"]
    assert found["one"].value == 3
    assert type(found["one"]._env) is PassesOn


def test_one_that_refers_to_itself_comes_back() -> None:
    wrapper = PassesOn(Inner())
    wrapper.me = wrapper
    found = cloudpickle.loads(dumps(wrapper))
    assert found.me is found


def test_a_class_that_knows_how_it_is_pickled_is_asked() -> None:
    found = cloudpickle.loads(dumps(KnowsItself(Inner())))
    assert found.note == "made anew"
    assert found.value == 3

"""What all dialects promise, asked of each in its own words: `faces.py` says how.

Steps are those of a plain loop, seeds are spread alike, what is wrong is refused before anything has moved, errors name
their env, and after close every call says so.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from contract.plain_loop import plain_loop
from dialects.faces import FACES, Face
from envs import CountEnv, FailEnv, GateEnv, ReusedBufferEnv, SpaceEnv

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left_behind")]

if "tf_agents" in FACES:
    import shoal.dialects.tf_agents  # what TensorFlow opens when it is imported is no test's leak

ZEROS = np.zeros(3, np.int64)
IN_HALVES = [pytest.param(face, id=name) for name, face in FACES.items() if face.in_halves]
NONE_HERE = pytest.param(None, marks=pytest.mark.skip(reason="no dialect of this environment has steps in two halves"))
halves = pytest.mark.parametrize("face", IN_HALVES or [NONE_HERE])


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> Face:
    """Every dialect in turn."""
    return FACES[request.param]


@pytest.fixture(params=["serial", "processes"])
def backend(request: pytest.FixtureRequest) -> str:
    """Envs of this process and of others: which backends there are is the pool's business, not a dialect's."""
    return str(request.param)


def assert_goes_on(face: Face, envs: Any) -> None:
    """Reset and step give what CountEnv must give, from the start."""
    assert face.reset(envs, seed=10).tolist() == [[10, 0, 0], [11, 0, 0], [12, 0, 0]]
    obs, rewards, ended = face.step(envs, np.array([0, 1, 2]))
    assert obs.tolist() == [[10, 0, 1], [11, 0, 1], [12, 0, 1]]
    assert rewards.tolist() == [1, 101, 201]
    assert not ended.any()


# ---- the same steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truncates", [False, True], ids=["terminates", "truncates"])
def test_steps_are_those_of_a_plain_loop(face: Face, backend: str, truncates: bool) -> None:
    turns = 12
    lengths = [2, 3, 4] if face.autoreset != "disabled" else [turns + 1] * 3
    fns = [partial(CountEnv, length, truncates) for length in lengths]
    actions = np.random.default_rng(0).integers(0, 4, (turns, 3))
    expected = [
        plain_loop(fn, 7 + i, lambda t, i=i: actions[t, i], turns, face.autoreset)  # type: ignore[misc]
        for i, fn in enumerate(fns)
    ]
    with face.open(fns, backend) as envs:
        assert face.reset(envs, seed=7).tolist() == [rows[0].obs.tolist() for rows in expected]
        for turn in range(turns):
            obs, rewards, ended = face.step(envs, actions[turn])
            now = [rows[turn + 1] for rows in expected]
            assert obs.tolist() == [row.obs.tolist() for row in now]
            assert rewards.tolist() == [row.reward for row in now]
            assert ended.tolist() == [row.terminated or row.truncated for row in now]


@halves
def test_halves_of_a_step_give_what_the_whole_gives(face: Face, backend: str) -> None:
    with face.open([CountEnv] * 3, backend) as one, face.open([CountEnv] * 3, backend) as other:
        face.reset(one, seed=5)
        face.reset(other, seed=5)
        for turn in range(12):
            face.begin(one, (ZEROS + turn) % 4)
            for found, expected in zip(face.wait(one), face.step(other, (ZEROS + turn) % 4), strict=True):
                np.testing.assert_array_equal(found, expected)


def test_seeds(face: Face) -> None:
    with face.open([CountEnv] * 3) as envs:
        assert face.reset(envs, seed=3)[:, 0].tolist() == [3, 4, 5]
        assert face.reset(envs)[:, :2].tolist() == [[3, 1], [4, 1], [5, 1]]  # none: the envs go on as they were
        if face.lists_of_seeds:
            assert face.reset(envs, seed=[9, 8, 1])[:, 0].tolist() == [9, 8, 1]


BEGINNERS = [pytest.param(face, id=name) for name, face in FACES.items() if face.begins_by_itself]


@pytest.mark.parametrize("face", BEGINNERS)
def test_a_step_before_any_reset_is_one(face: Face) -> None:
    with face.open([CountEnv] * 3) as envs:
        obs, rewards, ended = face.step(envs, ZEROS + 3)
        assert obs[:, 1:].tolist() == [[0, 0]] * 3
        assert rewards.tolist() == [0, 0, 0]
        assert not ended.any()
        assert face.step(envs, ZEROS)[1].tolist() == [1, 1, 1]


def test_sizes_and_spaces(face: Face) -> None:
    with face.open([CountEnv] * 3) as envs:
        assert face.count(envs) == 3
        assert face.spaces(envs) == (((3,), np.dtype(np.int64)), ((), np.dtype(np.int64)))
        assert type(envs).__name__ in repr(envs)


def test_arrays_are_the_callers_own(face: Face, backend: str) -> None:
    actions = np.full((3, 2), 0.5, np.float32)
    with face.open([partial(ReusedBufferEnv, 9)] * 3, backend) as envs:
        kept = [face.reset(envs, seed=0)]
        kept += [face.step(envs, actions)[0] for _ in range(4)]
        assert [obs[:, 1].tolist() for obs in kept] == [[turn] * 3 for turn in range(5)]
        assert (actions == 0.5).all()  # the env doubles what it gets
        kept[-1][:] = -5
        assert face.step(envs, actions)[0][:, 1].tolist() == [5, 5, 5]


# ---- what is refused -----------------------------------------------------------------------------------------

BAD_ACTIONS = {
    "too few": np.zeros(2, np.int64),
    "too many": np.zeros(4, np.int64),
    "out of range": np.array([0, 9, 0]),
    "halves": np.array([0.5, 0, 0]),
    "None": None,
    "words": np.array(["a", "b", "c"]),
}


@pytest.mark.parametrize("name", BAD_ACTIONS)
def test_bad_actions_move_nothing(face: Face, name: str) -> None:
    with face.open([CountEnv] * 3) as envs:
        face.reset(envs, seed=0)
        face.step(envs, ZEROS)
        for act in (face.step, face.begin) if face.in_halves else (face.step,):
            with pytest.raises(shoal.BadAction):
                act(envs, BAD_ACTIONS[name])
        assert face.step(envs, ZEROS)[0].tolist() == [[0, 0, 2], [1, 0, 2], [2, 0, 2]]


def boxed(high: float = 1.0, n: int = 3, size: int = 2) -> SpaceEnv:
    return SpaceEnv(spaces.Box(0.0, high, (size,), np.float32), spaces.Discrete(n))


@pytest.mark.parametrize(
    "odd", [partial(boxed, 2.0), partial(boxed, n=4), partial(boxed, size=3)], ids=["observations", "actions", "shapes"]
)
def test_spaces_that_differ(face: Face, odd: Any) -> None:
    if face.bounds_may_differ and "size" not in odd.keywords:
        face.open([boxed, boxed, odd]).close()
        return
    with pytest.raises(face.mismatch, match="env 2"):
        face.open([boxed, boxed, odd])


@pytest.mark.parametrize("fns", [[], [CountEnv, None]], ids=["none", "None"])
def test_what_is_no_env(face: Face, fns: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        face.open(fns)


def test_an_option_that_is_not_there(face: Face) -> None:
    with pytest.raises((TypeError, ValueError), match="lenght"):
        face.open([CountEnv] * 3, lenght=5)


@halves
def test_waiting_for_nothing(face: Face, backend: str) -> None:
    with face.open([CountEnv] * 3, backend) as envs:
        face.reset(envs, seed=0)
        with pytest.raises(face.nothing_pending):
            face.wait(envs)
        assert_goes_on(face, envs)


# ---- faults --------------------------------------------------------------------------------------------------


def assert_names(face: Face, error: BaseException, env_id: int) -> None:
    if face.noted:
        assert f"env {env_id}" in str(getattr(error, "__notes__", f"env {env_id}"))  # Python 3.10 has no notes
    else:
        assert isinstance(error, shoal.EnvError)
        assert error.env_id == env_id


def test_an_exception_of_an_env_keeps_its_type(face: Face, backend: str) -> None:
    with face.open([FailEnv] * 3, backend) as envs:
        face.reset(envs, seed=0)
        with pytest.raises(ValueError, match="bad joint") as caught:
            face.step(envs, np.array([0, 3, 0]))
        assert_names(face, caught.value, 1)
        assert_goes_on(face, envs)
        if face.in_halves:
            face.begin(envs, np.array([0, 0, 3]))
            with pytest.raises(ValueError, match="bad joint") as caught:
                face.wait(envs)
            assert_names(face, caught.value, 2)
            assert_goes_on(face, envs)


def test_a_constructor_that_raises(face: Face, backend: str) -> None:
    with pytest.raises(ValueError, match="bad joint") as caught:
        face.open([CountEnv, CountEnv, partial(FailEnv, "constructor")], backend)
    if not face.noted:  # its envs are made before it
        assert_names(face, caught.value, 2)


def step_on(face: Face, envs: Any) -> None:
    """Until something happens: the kernel may need a moment to end a process."""
    for _ in range(10_000):
        face.step(envs, ZEROS)


def test_a_worker_that_was_killed(face: Face) -> None:
    with face.open([CountEnv] * 3, "processes") as envs:
        face.reset(envs, seed=0)
        pid = envs[2].pid() if face.noted else face.pool(envs).call("pid")[2]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(shoal.WorkerDied) as caught:
            step_on(face, envs)
        assert list(caught.value.env_ids) == ([0] if face.noted else [2])  # a process knows one env only
        assert face.noted or face.pool(envs).closed


# ---- the end -------------------------------------------------------------------------------------------------


def test_close_twice_and_use_after_it(face: Face, backend: str) -> None:
    with face.open([CountEnv] * 3, backend) as envs:
        face.reset(envs, seed=0)
        envs.close()
        envs.close()
    uses = [lambda: face.step(envs, ZEROS)]
    if face.in_halves:
        uses.append(lambda: face.begin(envs, ZEROS))
    for use in (*uses, lambda: face.reset(envs), *face.other_uses(envs)):
        with pytest.raises(face.closed):
            use()


# A BatchEnv is a list of envs, each of which says for itself whether it can be pickled.
POOLS = [pytest.param(face, id=name) for name, face in FACES.items() if name != "batch_env"]


@pytest.mark.parametrize("face", POOLS)
def test_it_cannot_be_pickled_or_copied(face: Face, backend: str) -> None:
    with face.open([CountEnv] * 3, backend) as envs:
        face.reset(envs, seed=0)
        for act in (pickle.dumps, cloudpickle.dumps, copy.copy, copy.deepcopy):
            for one in (envs, face.pool(envs)):
                with pytest.raises(TypeError, match=r"cannot be pickled or copied.*the function that makes it"):
                    act(one)
        assert_goes_on(face, envs)


@halves
def test_close_while_a_step_is_pending(face: Face, backend: str) -> None:
    envs = face.open([CountEnv] * 3, backend)
    face.reset(envs)
    face.begin(envs, ZEROS)
    envs.close()
    assert face.pool(envs).closed


@halves
def test_close_while_a_step_hangs(face: Face, gate: Path) -> None:
    envs = face.open([partial(GateEnv, gate)] * 2, "processes")
    face.reset(envs)
    face.begin(envs, np.array([0, 3]))
    face.pool(envs).close(timeout=0.1)
    envs.close()
    assert face.pool(envs).closed


def test_one_that_is_let_go_closes_itself(face: Face, backend: str) -> None:
    envs = face.open([CountEnv] * 3, backend)
    face.reset(envs)
    del envs
    gc.collect()  # and nothing is left behind

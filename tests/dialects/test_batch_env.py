"""The words of the old TensorFlow agents: BatchEnv and ExternalProcess, without TensorFlow."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from envs import SPACES, CountEnv, EvenSpace, FailEnv, GateEnv, ReusedBufferEnv, ReusedInfoEnv, SpaceEnv
from envs.test_old_gym import OldEnv
from faults.kit import DEEDS, WRONGS, BoxActionEnv, ClosingEnv, DeedEnv, OtherSpaceEnv, WrongEnv, alive, in_thread
from shoal.dialects.batch_env import Async, BatchEnv, ExternalProcess, Promise

pytestmark = pytest.mark.timeout(60)

STRATEGIES = ("process", "thread")
KINDS = ("plain", *STRATEGIES)
MODES = [(kind, blocking) for kind in KINDS for blocking in (True, False)]


def make_env(kind: str, constructor: Callable[[], Any]) -> Any:
    return constructor() if kind == "plain" else ExternalProcess(constructor, kind)  # type: ignore[arg-type]


def make_batch(kind: str, constructors: list[Callable[[], Any]], blocking: bool = False) -> BatchEnv:
    return BatchEnv([make_env(kind, constructor) for constructor in constructors], blocking)


def notes_of(error: BaseException) -> list[str]:
    """What was noted on an error, once; Python 3.10 has no notes."""
    return getattr(error, "__notes__", []) if sys.version_info >= (3, 11) else ["this was env 1 of a BatchEnv"]


def row_of(stacked: Any, row: int, space: Any) -> Any:
    """One env's observation out of a batch."""
    if isinstance(space, spaces.Dict):
        return {key: row_of(stacked[key], row, part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(row_of(stacked[i], row, part) for i, part in enumerate(space.spaces))
    return stacked[row]


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Any:
    """A process or a thread."""
    return request.param


@pytest.fixture
def deed(strategy: Any) -> Iterator[Any]:
    """An env elsewhere that misbehaves when told to."""
    with ExternalProcess(DeedEnv, strategy) as process:
        yield process


# ---- a batch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 7])
@pytest.mark.parametrize(("kind", "blocking"), MODES)
def test_what_a_batch_returns(kind: str, blocking: bool, count: int) -> None:
    with make_batch(kind, [functools.partial(CountEnv, length=2 + i) for i in range(count)], blocking) as batch:
        assert len(batch) == count
        assert batch.blocking is blocking
        observ = batch.reset(seed=10)
        assert observ.tolist() == [[10 + i, 0, 0] for i in range(count)]
        assert observ.dtype == np.int64
        for turn in (1, 2, 3):
            observ, reward, done, infos = batch.step(np.arange(count) % 4)
            assert observ.tolist() == [[10 + i, 0, turn] for i in range(count)]  # nobody was reset
            assert observ.dtype == np.int64
            assert reward.tolist() == [turn + 100 * (i % 4) for i in range(count)]
            assert reward.dtype == np.float32
            assert done.tolist() == [turn >= 2 + i for i in range(count)]
            assert done.dtype == np.bool_
            assert infos == tuple({"TimeLimit.truncated": False} if ended else {} for ended in done)


@pytest.mark.parametrize(("kind", "blocking"), MODES)
def test_an_end_by_time_is_told(kind: str, blocking: bool) -> None:
    envs = [functools.partial(CountEnv, length=1, truncates=truncates) for truncates in (True, False)]
    with make_batch(kind, envs, blocking) as batch:
        batch.reset()
        _, _, done, infos = batch.step([0, 0])
        assert done.all()
        assert infos == ({"TimeLimit.truncated": True}, {"TimeLimit.truncated": False})


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("kind", ["plain", "thread"])
def test_observations_are_stacked_leaf_by_leaf(kind: str, name: str) -> None:
    check_against_lone_envs(kind, SPACES[name])


@pytest.mark.parametrize("name", ["nested", "image", "box 0-d", "box float64", "dict with objects", "text", "custom"])
def test_observations_from_processes(name: str) -> None:
    check_against_lone_envs("process", SPACES[name])


def check_against_lone_envs(kind: str, space: spaces.Space[Any]) -> None:
    alone = [SpaceEnv(space) for _ in range(3)]
    with make_batch(kind, [functools.partial(SpaceEnv, space)] * 3) as batch:
        observ = batch.reset(seed=3)
        expected = [env.reset(seed=3 + i)[0] for i, env in enumerate(alone)]
        for turn in range(4):
            for row, one in enumerate(expected):
                found = row_of(observ, row, space)
                np.testing.assert_equal(found, one)
            observ, reward, done, _ = batch.step([turn % 3] * 3)
            results = [env.step(np.int64(turn % 3)) for env in alone]
            expected = [result[0] for result in results]
            assert reward.tolist() == [np.float32(result[1]) for result in results]
            assert done.tolist() == [result[2] or result[3] for result in results]


def test_types_and_shapes_are_those_of_the_space() -> None:
    space = spaces.Dict(
        image=spaces.Box(0, 255, (8, 6, 3), np.uint8),
        pair=spaces.Tuple((spaces.Discrete(3), spaces.Box(-1.0, 1.0, (), np.float64))),
    )
    with make_batch("thread", [functools.partial(SpaceEnv, space)] * 7) as batch:
        observ = batch.reset()
    assert (observ["image"].dtype, observ["image"].shape) == (np.uint8, (7, 8, 6, 3))
    assert (observ["pair"][0].dtype, observ["pair"][0].shape) == (np.int64, (7,))
    assert (observ["pair"][1].dtype, observ["pair"][1].shape) == (np.float64, (7,))


@pytest.mark.parametrize("name", SPACES)
def test_any_action_space(name: str) -> None:
    """Envs see what they were given, in the space's own type."""
    space = SPACES[name]
    constructor = functools.partial(SpaceEnv, spaces.Discrete(2), space)
    with make_batch("plain", [constructor] * 3) as batch, make_batch("thread", [constructor] * 3) as other:
        batch.action_space.seed(1)
        alone = constructor()
        alone.reset(seed=0)
        for one in (batch, other):
            one.reset(seed=0)
        for _ in range(3):
            actions = [batch.action_space.sample() for _ in range(3)]
            reward = batch.step(actions)[1]
            assert reward.tolist() == other.step(actions)[1].tolist()
            # A number without axes arrives as a scalar, as it does from Gymnasium's own vector envs.
            seen = [action[()] if isinstance(action, np.ndarray) and not action.ndim else action for action in actions]
            assert reward.tolist() == [np.float32(alone.step(action)[1]) for action in seen]


def test_a_batch_of_dict_actions() -> None:
    space = spaces.Dict(arm=spaces.Box(-1.0, 1.0, (2,), np.float32), gear=spaces.Discrete(3))
    with make_batch("plain", [functools.partial(SpaceEnv, spaces.Discrete(2), space)] * 3) as batch:
        batch.reset(seed=0)
        arms, gears = np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2), np.arange(3)
        whole = batch.step({"arm": arms, "gear": gears})[1]
        each = batch.step([{"arm": arm, "gear": gear} for arm, gear in zip(arms, gears, strict=True)])[1]
        assert whole.tolist() == each.tolist()
        assert len(set(whole.tolist())) == 3
        with pytest.raises(shoal.BadAction, match="env 2"):
            batch.step({"arm": arms, "gear": gears + 1})


@pytest.mark.parametrize("kind", KINDS)
def test_old_envs(kind: str) -> None:
    with make_batch(kind, [OldEnv] * 3) as batch:
        assert batch.action_space == spaces.Discrete(3)
        assert batch.reset(seed=4).tolist() == [[4, 0], [5, 0], [6, 0]]
        for _ in range(3):
            observ, reward, done, infos = batch.step([2, 1, 0])
        assert observ.tolist() == [[4, 3], [5, 3], [6, 3]]
        assert observ.dtype == np.float32
        assert reward.tolist() == [2, 1, 0]
        assert done.all()
        assert [info["action"] for info in infos] == [2, 1, 0]
        assert all(info["TimeLimit.truncated"] is True for info in infos)
        assert batch[1].secret() == "fish 3"


class HalfModernEnv(OldEnv):
    """An old env whose reset takes anything, as wrappers of those days do, with modern spaces."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-1e6, 1e6, (2,), np.float32)  # type: ignore[assignment]
        self.action_space = spaces.Discrete(3)  # type: ignore[assignment]

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        return super().reset()


@pytest.mark.parametrize("kind", KINDS)
def test_old_envs_that_look_modern(kind: str) -> None:
    with make_batch(kind, [HalfModernEnv] * 2) as batch:
        assert batch.reset().tolist() == [[-1, 0], [-1, 0]]
        assert batch.step([2, 1])[1].tolist() == [2, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_infos_are_the_callers_own(kind: str) -> None:
    with make_batch(kind, [ReusedInfoEnv] * 2) as batch:
        batch.reset()
        infos = [batch.step([0, 0])[3] for _ in range(3)]
        assert [info[1]["value"] for info in infos] == [1, 2, 3]
        assert [info[1]["inner"]["value"] for info in infos] == [1, 2, 3]
        assert [info[1]["numbers"].tolist() for info in infos] == [[1, 1], [2, 2], [3, 3]]


# ---- resetting some ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_type", [list, tuple, np.array, lambda ids: np.array(ids, np.uint8)])
@pytest.mark.parametrize(("kind", "blocking"), MODES)
def test_some_are_reset_in_the_order_of_the_indices(kind: str, blocking: bool, as_type: Any) -> None:
    with make_batch(kind, [CountEnv] * 7, blocking) as batch:
        batch.reset(seed=0)
        batch.step([0] * 7)
        assert batch.reset(as_type([5, 0, 3])).tolist() == [[5, 1, 0], [0, 1, 0], [3, 1, 0]]
        assert batch.step([0] * 7)[0][:, 2].tolist() == [1, 2, 2, 1, 2, 1, 2]
        assert batch.reset(as_type([6, 2]), seed=[60, 20]).tolist() == [[60, 0, 0], [20, 0, 0]]


@pytest.mark.parametrize("nobody", [[], (), np.array([]), np.array([], np.int64), np.flatnonzero([False])])
def test_nobody_is_reset(nobody: Any) -> None:
    with make_batch("plain", [functools.partial(SpaceEnv, SPACES["nested"])] * 3) as batch:
        observ = batch.reset(nobody)
    assert observ["image"].shape == (0, 4, 4)
    assert observ["image"].dtype == np.uint8
    assert observ["pair"][0]["z"].shape == (0, 2)
    assert observ["word"] == ()


@pytest.mark.parametrize(
    ("indices", "named"),
    [
        ([0, 3], "no env 3"),
        ([-1], "no env -1"),
        ([1, 2, 1], "env 1 is named more than once"),
        ([0, True], "found True"),
        (np.array([False, True, True]), "found (np.)?False"),
        ([0.0], r"\[0.0\]"),
        ("0", "'0'"),
        ([[0, 1]], "0, 1"),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "thread"])
def test_bad_indices_reset_nobody(kind: str, indices: Any, named: str) -> None:
    with make_batch(kind, [CountEnv] * 3) as batch:
        with pytest.raises(ValueError, match=named) as caught:
            batch.reset(indices)
        assert isinstance(caught.value, shoal.BadAction)
        assert [env.episode for env in batch] == [-1, -1, -1]


# ---- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actions", "named"),
    [
        ([0, 7, 0], "index 1 is 7.*Discrete"),
        ([0, 0, -1], "index 2 is -1"),
        (np.array([4, 0, 0]), "index 0 is .*4"),
        ([0, 1.5, 0], "index 1 is 1.5"),
        ([0, None, 0], "index 1 is None"),
        ([0, [1, 2], 0], r"index 1 is \[1, 2\]"),
        ([0, "1", 0], "index 1 is '1'"),
        ([0, 0], "expected 3 actions.*found 2"),
        ([0, 0, 0, 0], "expected 3 actions.*found 4"),
        (np.zeros(0, int), "expected 3 actions.*found 0"),
        (1, "expected 3 actions.*found 1"),
        (None, "expected 3 actions.*found None"),
    ],
)
@pytest.mark.parametrize(("kind", "blocking"), [("plain", True), ("plain", False), ("thread", False)])
def test_bad_actions_step_nobody(kind: str, blocking: bool, actions: Any, named: str) -> None:
    with make_batch(kind, [CountEnv] * 3, blocking) as batch:
        batch.reset()
        with pytest.raises(ValueError, match=named) as caught:
            batch.step(actions)
        assert isinstance(caught.value, shoal.BadAction)
        assert [env.steps for env in batch] == [0, 0, 0]
        assert batch.step([3, 3, 3])[0][:, 2].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "bad", [[0.0, 1.5], [np.nan, 0.0], [0.0], [[0.0, 0.0]], 0.5, None], ids=["high", "nan", "short", "2-d", "0-d", "no"]
)
def test_bad_box_actions(bad: Any) -> None:
    with make_batch("plain", [BoxActionEnv] * 3) as batch:
        batch.reset()
        with pytest.raises(shoal.BadAction, match="index 2 is "):
            batch.step([[0.0, 0.0], np.ones(2, np.float64), bad])
        assert [env.steps for env in batch] == [0, 0, 0]


def test_bad_actions_of_other_spaces() -> None:
    space = spaces.Dict(number=EvenSpace(20), gear=spaces.Discrete(3))
    with make_batch("plain", [functools.partial(SpaceEnv, spaces.Discrete(2), space)] * 2) as batch:
        batch.reset()
        good = {"number": 4, "gear": 2}
        batch.step([good, good])
        for bad in ({"number": 5, "gear": 0}, {"number": 4, "gear": 3}, {"number": 4}, 4):
            with pytest.raises(shoal.BadAction, match="index 1 is "):
                batch.step([good, bad])


@pytest.mark.parametrize("what", ["observation", "action"])
@pytest.mark.parametrize("kind", ["plain", "thread"])
def test_spaces_must_be_equal(kind: str, what: str) -> None:
    envs = [make_env(kind, CountEnv), make_env(kind, CountEnv), make_env(kind, lambda: OtherSpaceEnv(what))]
    with pytest.raises(shoal.SpaceMismatch, match=f"env 2 has the {what}_space"):
        BatchEnv(envs)
    for env in envs:
        env.close()


def test_what_is_no_list_of_envs() -> None:
    with pytest.raises(ValueError, match="empty"):
        BatchEnv([])
    with pytest.raises(shoal.BadEnv, match="list of envs"):
        BatchEnv(CountEnv())  # type: ignore[arg-type]
    with pytest.raises(shoal.BadEnv, match="list of envs that are made already, found str"):
        BatchEnv("CartPole-v1")
    with pytest.raises(shoal.BadEnv, match=r"env 1 is .*made already"):
        BatchEnv([CountEnv(), CountEnv])
    with pytest.raises(shoal.BadEnv, match=r"env 0 is 'CartPole-v1'.*has no step"):
        BatchEnv(["CartPole-v1"])
    env = CountEnv()
    with pytest.raises(shoal.BadEnv, match="env 2 is the same object as env 0"):
        BatchEnv([env, CountEnv(), env])
    with ExternalProcess(CountEnv, "thread") as process, pytest.raises(shoal.BadEnv, match="same object"):
        BatchEnv([process, process])


@pytest.mark.parametrize("wrong", WRONGS)
@pytest.mark.parametrize("kind", ["plain", "thread"])
def test_results_that_make_no_sense(kind: str, wrong: str) -> None:
    with make_batch(kind, [WrongEnv, functools.partial(WrongEnv, wrong)]) as batch:
        batch.reset()
        with pytest.raises((TypeError, shoal.BadObservation), match="env 1: "):
            batch.step([0, 0])


# ---- what a batch is -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_env_speaks_for_all(kind: str) -> None:
    envs = [make_env(kind, CountEnv) for _ in range(3)]
    with BatchEnv(iter(envs)) as batch:
        assert batch.blocking is True
        assert list(batch) == envs
        assert batch[1] is envs[1]
        assert batch[-1] is envs[2]
        with pytest.raises(IndexError):
            batch[3]
        assert batch.observation_space == CountEnv().observation_space
        assert batch.action_space == spaces.Discrete(4)
        assert batch.metadata["kind"] == "counting"
        assert batch.length == 5
        assert not hasattr(batch, "no_such_thing")
        with pytest.raises(AttributeError, match="no_such_thing"):
            _ = batch.no_such_thing
        batch.reset()
        batch.step([0, 0, 0])
        assert batch[1].render().tolist() == np.full((2, 3, 3), 1).tolist()
        assert "3 envs" in repr(batch)
        assert "blocking=True" in repr(batch)
    assert "closed" in repr(batch)


def test_a_batch_of_plain_envs_can_be_copied() -> None:
    batch = BatchEnv([CountEnv(), CountEnv()])
    batch.reset(seed=1)
    for other in (copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert other.step([0, 0])[0].tolist() == [[1, 0, 1], [2, 0, 1]]
    assert [env.steps for env in batch] == [0, 0]


# ---- at the same time ----------------------------------------------------------------------------------------


class MeetingEnv(CountEnv):
    """Whose step and reset wait until all others have come to theirs."""

    def __init__(self, barrier: threading.Barrier):
        super().__init__()
        self.barrier = barrier

    def reset(self, **kwargs: Any) -> Any:
        self.barrier.wait(20)
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.barrier.wait(20)
        return super().step(action)


def test_threads_work_at_the_same_time() -> None:
    """One after the other, they would wait for each other in vain."""
    barrier = threading.Barrier(3)
    with make_batch("thread", [lambda: MeetingEnv(barrier)] * 3) as batch:
        batch.reset()
        for turn in (1, 2, 3):
            assert batch.step([0, 1, 2])[0][:, 2].tolist() == [turn] * 3


def test_an_env_of_this_process_works_meanwhile() -> None:
    barrier = threading.Barrier(3)
    envs = [make_env(kind, lambda: MeetingEnv(barrier)) for kind in ("thread", "plain", "thread")]
    with BatchEnv(envs, blocking=False) as batch:
        batch.reset()
        assert batch.step([0, 1, 2])[1].tolist() == [1, 101, 201]


class FileMeetingEnv(CountEnv):
    """The same for processes: each leaves a file, and waits for those of all."""

    def __init__(self, folder: Path, count: int):
        super().__init__()
        self.folder, self.count = folder, count

    def step(self, action: Any) -> Any:
        (self.folder / f"{self.steps}-{os.getpid()}").touch()
        until = time.monotonic() + 20
        while len(list(self.folder.glob(f"{self.steps}-*"))) < self.count:
            if time.monotonic() > until:
                raise TimeoutError("the others never came")
            time.sleep(0.005)
        return super().step(action)


def test_processes_work_at_the_same_time(tmp_path: Path) -> None:
    with make_batch("process", [functools.partial(FileMeetingEnv, tmp_path, 3)] * 3) as batch:
        batch.reset()
        for turn in (1, 2):
            assert batch.step([0, 0, 0])[0][:, 2].tolist() == [turn] * 3


@pytest.mark.parametrize("blocking", [True, False])
def test_envs_of_this_process_are_stepped_in_turn(blocking: bool) -> None:
    seen: list[int] = []

    class NotingEnv(CountEnv):
        def __init__(self, number: int):
            super().__init__()
            self.number = number

        def step(self, action: Any) -> Any:
            seen.append(self.number)
            return super().step(action)

    with BatchEnv([NotingEnv(i) for i in range(4)], blocking) as batch:
        batch.reset()
        batch.step([0] * 4)
        batch.step([0] * 4)
    assert seen == [0, 1, 2, 3] * 2


# ---- errors of envs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_names_its_env_and_the_batch_goes_on(kind: str) -> None:
    """Not blocking: all the others were stepped, and nothing of this step turns up in the next."""
    with make_batch(kind, [functools.partial(FailEnv, "step")] * 3) as batch:
        batch.reset(seed=0)
        with pytest.raises(ValueError, match="bad joint") as caught:
            batch.step([1, 3, 3])
        if kind == "plain":
            assert notes_of(caught.value) == ["this was env 1 of a BatchEnv"]
        else:
            assert isinstance(caught.value, shoal.EnvError)
            assert caught.value.env_id == 1
            assert "env 1 raised" in str(caught.value)
            assert "in step" in caught.value.remote_traceback
        observ, reward, _, _ = batch.step([1, 2, 0])
        assert observ[:, 2].tolist() == [2, 1, 1]
        assert reward.tolist() == [102, 201, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_blocking_stops_at_the_first_error(kind: str) -> None:
    with make_batch(kind, [functools.partial(FailEnv, "step")] * 3, blocking=True) as batch:
        batch.reset()
        with pytest.raises(ValueError, match="bad joint"):
            batch.step([1, 3, 1])
        assert [env.steps for env in batch] == [1, 0, 0]


def test_a_killed_process_in_a_batch(nothing_left_behind: None) -> None:
    with make_batch("process", [CountEnv] * 3) as batch:
        batch.reset()
        os.kill(batch[1].pid(), signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(shoal.WorkerDied, match="SIGKILL") as caught:
                batch.step([0, 0, 0])
            assert notes_of(caught.value) == ["this was env 1 of a BatchEnv"]
        with pytest.raises(shoal.WorkerDied):
            batch.reset()
        assert batch.reset([2, 0]).shape == (2, 3)


def test_a_death_that_the_call_itself_meets(monkeypatch: pytest.MonkeyPatch, nothing_left_behind: None) -> None:
    with make_batch("process", [CountEnv] * 3) as batch:
        batch.reset()

        def start_apply(*_: object) -> None:
            raise shoal.WorkerDied("worker 0 was killed by SIGKILL")

        monkeypatch.setattr(batch[1]._pool, "start_apply", start_apply)
        for _ in range(3):
            with pytest.raises(shoal.WorkerDied, match="SIGKILL") as caught:
                batch.step([0, 0, 0])
            assert notes_of(caught.value) == ["this was env 1 of a BatchEnv"]


# ---- the end of a batch --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_all_are_closed_also_if_one_raises(kind: str, tmp_path: Path, nothing_left_behind: None) -> None:
    folders = [tmp_path / str(i) for i in range(4)]
    for folder in folders:
        folder.mkdir()
    batch = make_batch(kind, [functools.partial(ClosingEnv, folder, folder.name in "12") for folder in folders])
    batch.reset()
    with pytest.raises(RuntimeError, match="cannot close"):
        batch.close()
    assert [len(list(folder.iterdir())) for folder in folders] == [1, 1, 1, 1]
    batch.close()
    for use in (batch.reset, lambda: batch.step([0] * 4)):
        with pytest.raises(shoal.PoolClosed, match="this BatchEnv is closed"):
            use()


def open_for_all(gate: Path) -> None:
    """Let threads go on that were stuck when they were closed: they cannot be ended, and leave by themselves now."""
    gate.touch()
    for thread in threading.enumerate():
        if re.fullmatch(r"shoal-\d+", thread.name):
            thread.join(10)


@pytest.mark.parametrize("kind", STRATEGIES)
def test_closing_envs_that_are_stuck_has_a_limit(kind: str, gate: Path, nothing_left_behind: None) -> None:
    batch = make_batch(kind, [functools.partial(GateEnv, gate)] * 2)
    batch.reset()
    promises = [env.step(3, blocking=False) for env in batch]
    batch.close(timeout=0.1)
    for promise in promises:
        with pytest.raises(shoal.PoolClosed):
            promise()
    open_for_all(gate)


# ---- promises ------------------------------------------------------------------------------------------------


def test_step_and_reset_of_one_env(strategy: Any) -> None:
    with ExternalProcess(CountEnv, strategy) as env:
        assert env.observation_space == CountEnv().observation_space
        assert env.action_space == spaces.Discrete(4)
        observation, info = env.reset(seed=4, options={"a": 1})
        assert (observation.tolist(), info) == ([4, 0, 0], {})
        assert env.options_given == {"a": 1}
        result = env.step(2)
        assert (result[0].tolist(), *result[1:]) == ([4, 0, 1], 201.0, False, False, {})
        promise = env.reset(blocking=False)
        assert isinstance(promise, Promise)
        assert promise()[0].tolist() == [4, 1, 0]
        assert env.step(0, blocking=False)()[1] == 1
        assert env.call("step", 1)()[1] == 102
        assert env.call("reset", seed=9)()[0].tolist() == [9, 0, 0]


def test_promises_are_kept_in_any_order_and_again(strategy: Any) -> None:
    with ExternalProcess(CountEnv, strategy) as env:
        promises = [env.reset(blocking=False, seed=1), *(env.step(i % 4, blocking=False) for i in range(6))]
        add = env.call("add", 10, b=5)
        assert "pending" in repr(add)
        assert add() == 21
        assert "kept" in repr(add)
        for turn, promise in reversed(list(enumerate(promises))):
            first = promise()
            assert first[0].tolist() == [1, 0, turn]
            assert promise() is first
        assert add() == 21
        assert [promise()[0].tolist() for promise in promises] == [[1, 0, turn] for turn in range(7)]
        assert env.steps == 6
    assert add() == 21  # it was kept before the end


def test_what_is_asked_is_copied(strategy: Any) -> None:
    """An action may be written over while it is on its way, and an observation while nobody has looked at it."""
    with ExternalProcess(ReusedBufferEnv, strategy) as env:
        env.reset()
        action = np.zeros(2, np.float32)
        promises = []
        for number in (0.1, 0.2, 0.3):
            action[:] = number
            promises.append(env.step(action, blocking=False))
        action[:] = 9.0
        results = [promise() for promise in promises]
        assert [result[0].tolist() for result in results] == [[0, 1], [0, 2], [0, 3]]
        assert [result[1] for result in results] == pytest.approx([0.4, 0.8, 1.2])


def test_errors_keep_their_type_and_the_process_goes_on(deed: Any) -> None:
    deed.reset()
    before, complaint, after = deed.call("add", 1), deed.call("complain"), deed.step(1, blocking=False)
    assert after()[1] == 101
    for _ in range(2):
        with pytest.raises(KeyError, match="no such fish") as caught:
            complaint()
        assert isinstance(caught.value, shoal.EnvError)
        assert "def complain" in caught.value.remote_traceback or "in complain" in caught.value.remote_traceback
        assert "raised in apply of 'complain'" in str(caught.value)
    assert "broken" in repr(complaint)
    assert before() == 2
    assert deed.step(2)[1] == 202


@pytest.mark.parametrize("name", ["raise", "raise KeyError", "raise several", "exit politely", "interrupt"])
def test_whatever_a_step_raises(deed: Any, name: str) -> None:
    deed.call("__setattr__", "deeds", {"step": name})()
    deed.reset()
    with pytest.raises(shoal.EnvError) as caught:
        deed.step(0)
    assert caught.value.env_id == 0
    deed.call("__setattr__", "deeds", {})()
    assert deed.step(1)[1] == 101


def test_results_that_cannot_travel() -> None:
    with ExternalProcess(DeedEnv) as env:
        with pytest.raises(TypeError, match="lock"):
            env.give("lock")
        assert env.answer() == 42
        with pytest.raises(TypeError):
            env.call("add", threading.Lock())
        assert env.answer() == 42


def test_a_promise_can_be_waited_for_again(strategy: Any, gate: Path, nothing_left_behind: None) -> None:
    with ExternalProcess(functools.partial(GateEnv, gate), strategy) as env:
        env.reset()
        step, add = env.step(3, blocking=False), env.call("add", 1)
        for promise in (add, step, add):
            with pytest.raises(shoal.StepTimeout):
                promise(0.01)
        with pytest.raises(TimeoutError):
            step(timeout=0)
        with pytest.raises(ValueError, match="timeout"):
            step(-1)
        gate.touch()
        assert add(20) == 3
        assert step(0)[1] == 301


class DyingEnv(GateEnv):
    def die(self, how: str) -> None:
        DEEDS[how]()


@pytest.mark.parametrize("how", ["kill", "exit", "exit well", "segfault"])
def test_a_process_that_dies(how: str, gate: Path, nothing_left_behind: None) -> None:
    """What was answered before is not lost; all else says what happened, and nothing waits."""
    env = ExternalProcess(functools.partial(DyingEnv, gate))
    env.reset()
    env.call("wait")  # so that all is asked before it dies
    first, fatal, last = env.call("add", 1), env.call("die", how), env.step(0, blocking=False)
    gate.touch()
    for promise in (last, fatal, last):
        with pytest.raises(shoal.WorkerDied, match="env 0"):
            promise()
    assert first() == 2
    for use in (lambda: env.step(0), env.reset, lambda: env.length, lambda: env.call("add", 1)):
        with pytest.raises(shoal.WorkerDied):
            use()
    assert env.observation_space == CountEnv().observation_space
    env.close()
    with pytest.raises(shoal.PoolClosed, match="this ExternalProcess is closed"):
        env.step(0)
    with pytest.raises(shoal.WorkerDied):
        fatal()


def test_a_process_that_is_killed_while_it_works(gate: Path, nothing_left_behind: None) -> None:
    with ExternalProcess(functools.partial(GateEnv, gate)) as env:
        env.reset()
        pid = env.pid()
        promises = [env.step(3, blocking=False), env.call("add", 1), env.reset(blocking=False)]
        with in_thread(promises[1]) as outcome:  # it waits already, most likely
            os.kill(pid, signal.SIGKILL)
        assert isinstance(outcome[0], shoal.WorkerDied)
        for promise in promises:
            with pytest.raises(shoal.WorkerDied, match="SIGKILL"):
                promise()
        assert not alive(pid)


def test_a_process_that_is_killed_while_nobody_waits(nothing_left_behind: None) -> None:
    with ExternalProcess(CountEnv) as env:
        pid = env.pid()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(shoal.WorkerDied, match=str(pid)):
            env.reset()


def test_close_with_promises_outstanding(strategy: Any, gate: Path, nothing_left_behind: None) -> None:
    env = ExternalProcess(functools.partial(GateEnv, gate), strategy)
    kept = env.call("add", 1)
    assert kept() == 2
    promises = [env.step(3, blocking=False), env.call("add", 1)]
    env.close(timeout=0.1)
    open_for_all(gate)
    for promise in promises * 2:
        with pytest.raises(shoal.PoolClosed, match="this ExternalProcess is closed"):
            promise()
    assert kept() == 2
    env.close()


def test_close_from_another_thread(strategy: Any, gate: Path, nothing_left_behind: None) -> None:
    env = ExternalProcess(functools.partial(GateEnv, gate), strategy)
    promises = [env.step(3, blocking=False), env.call("add", 1)]
    with in_thread(promises[1]) as outcome:
        env.close(timeout=0.2)
        open_for_all(gate)
    assert isinstance(outcome[0], shoal.PoolClosed)
    with pytest.raises(shoal.PoolClosed):
        promises[0]()


def test_promises_that_nobody_wants(strategy: Any, nothing_left_behind: None) -> None:
    """They are forgotten with the next one that somebody wants, and keep nothing alive."""
    env = ExternalProcess(CountEnv, strategy)
    env.reset()
    for _ in range(50):
        env.step(0, blocking=False)
        env.call("complain")
    assert env.step(0)[0].tolist()[2] == 51
    assert not env._asked
    env.step(0, blocking=False)
    env.close()
    assert not env._asked


def test_an_env_that_is_let_go_is_closed(nothing_left_behind: None) -> None:
    env = ExternalProcess(CountEnv)
    pid = env.pid()
    promise = env.call("add", 1)
    reference = weakref.ref(env)
    del env
    assert promise() == 2  # a promise keeps its env
    gc.disable()
    try:
        del promise
        assert reference() is None
    finally:
        gc.enable()
    gc.collect()
    assert not alive(pid)


# ---- one env elsewhere ---------------------------------------------------------------------------------------


def test_attributes_and_methods_by_name(strategy: Any) -> None:
    with ExternalProcess(lambda: gymnasium.wrappers.TimeLimit(CountEnv(length=7), 3), strategy) as env:
        assert env.length == 7
        assert env.value == "untouched"
        assert env.metadata["render_fps"] == 7
        assert env.add(1, b=2) == 3
        assert (env.pid() == os.getpid()) is (strategy == "thread")
        assert env.call("length")() == 7
        assert env.call("_max_episode_steps")() == 3
        assert env.unwrapped is env
        assert not hasattr(env, "no_such_thing")
        with pytest.raises(AttributeError, match="no_such_thing") as caught:
            _ = env.no_such_thing
        assert isinstance(caught.value, shoal.EnvError)
        with pytest.raises(AttributeError, match="_hidden") as hidden:
            _ = env._hidden
        assert not isinstance(hidden.value, shoal.EnvError)
        with pytest.raises(AttributeError, match="no_such_method"):
            env.call("no_such_method")()
        env.reset()
        assert [env.step(0)[3] for _ in range(3)] == [False, False, True]


def test_it_cannot_be_copied(strategy: Any) -> None:
    with ExternalProcess(CountEnv, strategy) as env:
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="pass its constructor"):
                attempt(env)
        assert env.add(1) == 2


def test_names_and_repr(strategy: Any) -> None:
    assert Async is ExternalProcess
    with ExternalProcess("CartPole-v1", strategy) as env:
        assert "Discrete(2)" in repr(env)
        assert strategy in repr(env)
        assert env.spec.id == "CartPole-v1"
    assert "closed" in repr(env)


def test_after_close(strategy: Any, nothing_left_behind: None) -> None:
    env = ExternalProcess(CountEnv, strategy)
    env.close()
    env.close()
    for use in (lambda: env.step(0), env.reset, lambda: env.call("add", 1), lambda: env.length, lambda: env.render()):
        with pytest.raises(shoal.PoolClosed, match="this ExternalProcess is closed: make a new one"):
            use()


def test_an_external_process_whose_close_raises(strategy: Any, nothing_left_behind: None) -> None:
    env = ExternalProcess(functools.partial(DeedEnv, {"close": "raise"}), strategy)
    with pytest.raises(ValueError, match="bad joint"):
        env.close()
    env.close()


def test_what_is_no_constructor(strategy: Any, nothing_left_behind: None) -> None:
    with pytest.raises(ValueError, match="bad joint") as caught:
        ExternalProcess(functools.partial(FailEnv, "constructor"), strategy)
    assert isinstance(caught.value, shoal.EnvError)
    with pytest.raises(KeyError, match="fish"):
        ExternalProcess(functools.partial(FailEnv, "constructor", KeyError("fish")), strategy)
    for wrong in (CountEnv(), 3, "NoSuchEnv-v0", [CountEnv, CountEnv]):
        with pytest.raises(shoal.BadEnv):
            ExternalProcess(wrong, strategy)
    with pytest.raises(ValueError, match="'process', 'thread', found 'fork'"):
        ExternalProcess(CountEnv, "fork")  # type: ignore[arg-type]


class NamingEnv(CountEnv):
    def rename(self, name: str, env: str = "") -> str:
        return name + env


def test_arguments_of_any_name(strategy: Any) -> None:
    with ExternalProcess(NamingEnv, strategy) as env:
        assert env.call("rename", name="cod", env="fish")() == "codfish"
        assert env.rename(name="cod", env="fish") == "codfish"


@pytest.mark.parametrize("name", ["close", 3, None])
def test_what_cannot_be_called(strategy: Any, name: Any) -> None:
    with ExternalProcess(CountEnv, strategy) as env:
        with pytest.raises(shoal.BadCall, match="name of a method"):
            env.call(name)
        assert env.closes == 0


# ---- as it was used ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_create_parallel_envs_and_reset_subset(kind: str) -> None:
    """A loop as agents of those days have it: many envs made, stepped together, and reset where they are done."""
    count, steps = 3, 7

    def create_parallel_envs() -> BatchEnv:
        base_envs = [make_env(kind, functools.partial(CountEnv, length=2 + i)) for i in range(count)]
        return BatchEnv(base_envs, blocking=False)

    def reset_subset(env: BatchEnv, indices: Any) -> Any:
        return env.reset(indices=indices)

    with create_parallel_envs() as env:
        observ = env.reset()
        episodes, alone = np.zeros(count, int), np.zeros(count, int)
        for _ in range(steps):
            observ, _, done, _ = env.step(np.zeros(count, np.int32))
            alone += 1
            assert observ[:, 2].tolist() == alone.tolist()
            observ[done] = reset_subset(env, np.flatnonzero(done))
            episodes[done], alone[done] = episodes[done] + 1, 0
            assert observ.tolist() == [[-1, episodes[i], alone[i]] for i in range(count)]
        assert episodes.tolist() == [steps // (2 + i) for i in range(count)]


# ---- what it needs of the pool -------------------------------------------------------------------------------


def test_apply_in_two_halves() -> None:
    with shoal.Pool(CountEnv, 3, backend="processes", num_workers=2) as pool:
        first = pool.start_apply(lambda env, a, b: (env.length, a, b), (1,), {"b": 2})
        second = pool.start_apply(lambda env: env.complain(), (), {}, [2])
        third = pool.start_apply(lambda env: env.length, (), {}, [2, 0])
        assert pool.finish_call(third) == [5, 5]
        with pytest.raises(KeyError):
            pool.finish_call(second)
        assert pool.finish_call(first) == [(5, 1, 2)] * 3
        with pytest.raises(shoal.BadCall, match="expected a function"):
            pool.start_apply("length", (), {})  # type: ignore[arg-type]

"""The tianshou dialect beside tianshou's own classes: what one does and says, the other does and says."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest

pytest.importorskip("tianshou", reason="tianshou is not installed; it wants Python 3.11")

import torch
from tianshou.data import AsyncCollector, Batch, Collector, VectorReplayBuffer
from tianshou.env import BaseVectorEnv, VectorEnvNormObs
from tianshou.env import DummyVectorEnv as TheirDummy
from tianshou.env import ShmemVectorEnv as TheirShmem
from tianshou.env import SubprocVectorEnv as TheirSubproc

import shoal
from dialects import tianshou_kit
from dialects.tianshou_kit import Ragged, Seeds, Walk
from shoal.dialects import tianshou as ours

pytestmark = [pytest.mark.timeout(180), pytest.mark.filterwarnings("ignore")]

PAIRS = {
    "dummy": (TheirDummy, ours.DummyVectorEnv),
    "subproc": (TheirSubproc, ours.SubprocVectorEnv),
    "shmem": (TheirShmem, ours.ShmemVectorEnv),
}
pairs = pytest.mark.parametrize("pair", list(PAIRS))
KINDS = (AssertionError, AttributeError, IndexError, TypeError, ValueError, RuntimeError, Exception)
BACKENDS = ["serial", "threads", "processes", "hybrid"]


def walks(count: int, *args: Any, **kwargs: Any) -> list[Callable[[], Any]]:
    return [functools.partial(Walk, *args, **kwargs) for _ in range(count)]


def plain(value: Any) -> Any:
    """A value with its types, in a form that can be compared."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]  # their ShmemVectorEnv has arrays in place of the numbers in dicts
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, [plain(one) for one in value.ravel().tolist()])
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return (type(value).__name__, [plain(one) for one in value])
    if isinstance(value, gymnasium.Space):
        return (repr(value), plain(value.np_random.bit_generator.state))
    return (type(value).__name__, value)


def outcome(act: Callable[[], Any], texts: bool) -> Any:
    """What a call returns; or what it raises: with its text, where that is the library's own."""
    try:
        return plain(act())
    except Exception as error:
        kind = next(kind for kind in KINDS if isinstance(error, kind))
        return ("raises", kind.__name__, str(error) if texts else "")


def acts(envs: Any) -> Iterator[tuple[str, Callable[[], Any], bool]]:
    """What is asked of three envs: a name, the call, and whether an error's text must be the same."""
    ids = np.array([0, 2])
    yield "len", lambda: len(envs), True
    yield "facts", lambda: [envs.env_num, envs.wait_num, envs.timeout, envs.is_async, envs.is_closed], True
    yield "whose turn", lambda: [envs.waiting_id, envs.ready_id], True
    yield "step before reset", lambda: [len(part) for part in envs.step(np.array([0, 1, 2]))], True
    yield "seed", lambda: envs.seed(5), True
    yield "seeds of spaces", lambda: envs.action_space, True
    yield "reset", envs.reset, True
    yield "step", lambda: envs.step(np.array([0, 1, 2])), True
    yield "step of a list", lambda: envs.step([3, 1, 0]), True
    yield "step of a tensor", lambda: envs.step(torch.tensor([0, 1, 2]))[0], True
    yield "some", lambda: envs.step(np.array([1, 2]), ids), True
    yield "the same again", lambda: envs.step(np.array([2, 1]), ids), True
    yield "some of a list", lambda: envs.step(np.array([1, 2]), [1, 2]), True
    yield "in another order", lambda: envs.step(np.array([1, 2, 3]), [2, 0, 1]), True
    yield "all by an array", lambda: envs.step(np.array([1, 2, 3]), np.arange(3)), True
    yield "one", lambda: envs.step(np.array([3]), 1), True
    yield "one of numpy", lambda: envs.step(np.array([3]), np.int64(2)), True
    yield "the last one", lambda: envs.step(np.array([3]), -1), True
    yield "after the end of an episode", lambda: envs.step(np.array([1, 2, 3])), True
    yield "reset of some", lambda: envs.reset(ids), True
    yield "reset of one", lambda: envs.reset(1), True
    yield "reset in another order", lambda: envs.reset([2, 0]), True
    yield "reset with one seed for all", lambda: envs.reset(seed=7), True
    yield "reset with options", lambda: envs.reset([1], options={"at": 2}), True
    yield "reset with seed and options", lambda: envs.reset(ids, seed=1, options={"at": 1}), True
    yield "reset with other arguments", lambda: envs.reset([2, 1], lift=2), True
    yield "step after that", lambda: envs.step(np.array([0, 0, 0])), True
    yield "seeds as a list", lambda: envs.seed([3, 1, 2]), True
    yield "too few seeds", lambda: envs.seed([3, 1]), False
    yield "no seed", lambda: len(envs.seed()), True
    yield "seeds again", lambda: envs.seed(11), True
    yield "reset after that", envs.reset, True
    yield "an attribute", lambda: envs.get_env_attr("length"), True
    yield "of one", lambda: envs.get_env_attr("length", 1), True
    yield "of some", lambda: envs.get_env_attr("draw", [2, 0]), True
    yield "set it", lambda: envs.set_env_attr("length", 3, ids), True
    yield "set another", lambda: envs.set_env_attr("speed", 2, 1), True
    yield "both", lambda: [envs.get_env_attr("length"), envs.get_env_attr("speed")], True
    yield "none of this name", lambda: envs.get_env_attr("nothing"), False
    yield "spaces", lambda: [repr(one) for one in envs.observation_space], True
    yield "metadata and spec", lambda: [envs.metadata, envs.spec], True
    yield "no such attribute", lambda: envs.nothing, True
    yield "is there one", lambda: [hasattr(envs, "nothing"), hasattr(envs, "metadata")], True
    yield "render", envs.render, True
    yield "render with arguments", lambda: envs.render(wide=True), True
    yield "no actions", lambda: envs.step(None), True
    yield "too few actions", lambda: envs.step(np.array([1])), True
    yield "too many actions", lambda: envs.step(np.array([1, 2]), [0]), True
    yield "no such env", lambda: envs.step(np.array([1]), [3]), False
    yield "reset of no such env", lambda: envs.reset(7), False
    yield "that changed nothing", lambda: envs.get_env_attr("at"), True
    yield "step at last", lambda: envs.step(np.array([1, 2, 3])), True
    yield "close", envs.close, True
    for name, late in {
        "step": lambda: envs.step(np.array([0, 1, 2])), "reset": envs.reset, "seed": lambda: envs.seed(1),
        "render": envs.render, "close": envs.close, "get": lambda: envs.get_env_attr("at"),
        "set": lambda: envs.set_env_attr("at", 1), "spaces": lambda: envs.action_space,
    }.items():  # fmt: skip
        yield f"{name} after close", late, True
    yield "facts after close", lambda: [len(envs), envs.is_closed], True


@pairs
@pytest.mark.parametrize("kind", ["float32", "float64", "image", "discrete", "dict"])
def test_the_same_transcript(pair: str, kind: str) -> None:
    found = []
    for cls in PAIRS[pair]:
        envs = cls(walks(3, kind))
        found.append({name: outcome(act, texts) for name, act, texts in acts(envs)})
    theirs, mine = found
    differ = {name: (theirs[name], mine[name]) for name in theirs if theirs[name] != mine[name]}
    assert not differ


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [1, 7])
def test_every_backend_steps_as_their_dummy(backend: str, count: int) -> None:
    workers = {} if backend == "serial" else {"num_workers": min(count, 3)}
    mine = shoal.make(walks(count), api="tianshou", backend=backend, **workers)
    theirs = TheirDummy(walks(count))
    rng = np.random.default_rng(0)
    try:
        theirs.seed(3)
        mine.seed(3)
        assert plain(theirs.reset()) == plain(mine.reset())
        for _ in range(60):
            ids = np.sort(rng.choice(count, rng.integers(1, count + 1), replace=False))
            actions = rng.integers(0, 4, len(ids))
            want, found = theirs.step(actions, ids), mine.step(actions, ids)
            assert plain(want) == plain(found)
            over = ids[want[2] | want[3]]
            if len(over):
                assert plain(theirs.reset(over)) == plain(mine.reset(over))
    finally:
        mine.close()


@pairs
def test_wrong_arguments(pair: str) -> None:
    for cls in PAIRS[pair]:
        with pytest.raises(AssertionError, match=r"wait_num should be in \[1, 2\], but got 3"):
            cls(walks(2), wait_num=3)
        with pytest.raises(AssertionError, match="timeout is -1, it should be positive if provided!"):
            cls(walks(2), timeout=-1)


@pairs
def test_is_one_of_theirs(pair: str) -> None:
    theirs, mine = PAIRS[pair]
    envs = mine(walks(2))
    assert isinstance(envs, BaseVectorEnv)
    assert isinstance(envs, theirs)
    envs.close()


@pairs
def test_a_seed_method_of_the_env(pair: str) -> None:
    found = []
    for cls in PAIRS[pair]:
        envs = cls([Seeds] * 2)
        found.append(plain([envs.seed(4), envs.reset(), envs.seed(None)]))
        envs.close()
    assert found[0] == found[1]


def test_errors_of_envs_name_the_env() -> None:
    for cls in (ours.DummyVectorEnv, ours.SubprocVectorEnv):
        with cls(walks(3)) as envs:
            envs.seed(1)
            envs.reset()
            with pytest.raises(ValueError, match="four is refused") as caught:
                envs.step(np.array([0, 4, 0]))
            assert isinstance(caught.value, shoal.EnvError)
            assert caught.value.env_id == 1
            with pytest.raises(ValueError, match="four is refused"):
                envs.step(np.array([4]), [2])
            assert envs.step(np.array([0, 0, 0]))[0].shape == (3, 3)


def test_arguments_that_reset_does_not_know() -> None:
    for cls in (TheirDummy, ours.DummyVectorEnv, ours.SubprocVectorEnv):
        envs = cls(walks(2))
        with pytest.raises(TypeError, match="unexpected keyword argument 'height'"):
            envs.reset(height=2)
        assert len(envs.reset()[0]) == 2
        envs.close()


def test_actions_are_checked_before_any_env_is_stepped() -> None:
    with ours.DummyVectorEnv(walks(2)) as envs:
        envs.reset()
        with pytest.raises(shoal.errors.BadAction):
            envs.step(np.array([0, 9]))
        with pytest.raises(shoal.errors.BadAction):
            envs.step(np.array([0, 0]), [1, 1])
        assert envs.get_env_attr("at") == [0, 0]


@pytest.mark.parametrize("pair", ["dummy", "subproc"])
def test_ragged_observations_and_dict_actions(pair: str) -> None:
    actions = np.array([{"a": 1}, {"a": 2}])
    found = []
    for cls in PAIRS[pair]:
        envs = cls([functools.partial(Ragged, 1), functools.partial(Ragged, 2)])
        found.append(plain([envs.reset()[0].tolist(), envs.step(actions), envs.step(actions[::-1], [1, 0])]))
        envs.close()
    assert found[0] == found[1]


# ---- asynchronous ----------------------------------------------------------------------------------------------


def test_asynchronous_dummy_is_as_theirs() -> None:
    found = []
    for cls in (TheirDummy, ours.DummyVectorEnv):
        envs, seen = cls(walks(5), wait_num=2), []
        envs.seed(2)
        envs.reset()
        ids = np.arange(5)
        for turn in range(12):
            step = envs.step(np.full(len(ids), turn % 4), ids)
            seen.append(plain([step, envs.waiting_id, envs.ready_id]))
            seen.append(outcome(lambda envs=envs: envs.reset(envs.waiting_id[:1]), True))
            seen.append(outcome(envs.render, True))
            seen.append(outcome(lambda envs=envs: envs.get_env_attr("at", envs.waiting_id), True))
            seen.append(outcome(lambda envs=envs: envs.step(np.zeros(1, int), envs.waiting_id[-1:]), True))
            ids = np.array([info["env_id"] for info in step[4]])
            over = ids[step[2] | step[3]]
            if len(over):
                seen.append(plain(envs.reset(over)))
        while envs.waiting_id:
            seen.append(plain(envs.step(None)))
        seen.append(plain(envs.reset()))
        envs.close()
        found.append(seen)
    assert found[0] == found[1]


@pytest.mark.parametrize("cls", [TheirSubproc, ours.SubprocVectorEnv, ours.ShmemVectorEnv])
def test_asynchronous_steps_return_those_that_are_done(cls: Any, gate: Path) -> None:
    gates = ["", "", "", str(gate)]
    envs = cls([functools.partial(Walk, length=100, gate=gate) for gate in gates], wait_num=3)
    envs.seed(0)
    envs.reset()
    assert envs.is_async
    obs, reward, terminated, truncated, infos = envs.step(np.array([0, 1, 2, 3]))
    assert sorted(info["env_id"] for info in infos) == [0, 1, 2]
    assert [reward[row] for row, info in enumerate(infos)] == [info["env_id"] for info in infos]
    assert obs.shape == (3, 3)
    assert terminated.dtype == truncated.dtype == bool
    assert envs.waiting_id == [3]
    assert sorted(envs.ready_id) == [0, 1, 2]
    with pytest.raises(AssertionError, match="Cannot interact with environment 3 which is stepping now"):
        envs.step(np.array([0]), [3])
    with pytest.raises(RuntimeError, match=r"Environments \[3\] are still stepping, cannot render them now"):
        envs.render()
    gate.touch()
    step = envs.step(None)
    assert [info["env_id"] for info in step[4]] == [3]
    assert envs.waiting_id == []
    envs.reset()
    envs.close()


@pytest.mark.parametrize("cls", [TheirSubproc, ours.SubprocVectorEnv])
def test_a_timeout_takes_what_is_done(cls: Any, gate: Path) -> None:
    gates = ["", "", str(gate)]
    envs = cls([functools.partial(Walk, length=100, gate=gate) for gate in gates], timeout=0.3)
    envs.reset()
    assert (envs.is_async, envs.wait_num) == (True, 3)
    done = [info["env_id"] for info in envs.step(np.array([0, 1, 2]))[4]]
    while len(done) < 2:  # on a busy machine the second is done after the first timeout
        done += [info["env_id"] for info in envs.step(None)[4]]
    assert sorted(done) == [0, 1]
    gate.touch()
    assert [info["env_id"] for info in envs.step(None)[4]] == [2]
    envs.close()


def test_an_asynchronous_error_leaves_the_others() -> None:
    with ours.SubprocVectorEnv(walks(4, length=50), wait_num=2) as envs:
        envs.seed(1)
        envs.reset()
        raised, seen = 0, []
        step_actions: Any = np.array([0, 4, 0, 0])
        for _ in range(10):
            try:
                step = envs.step(step_actions)
                seen += [info["env_id"] for info in step[4]]
            except ValueError:
                raised += 1
            step_actions = None
            if not envs.waiting_id and raised:
                break
        assert (raised, sorted(seen)) == (1, [0, 2, 3])
        assert sorted(envs.ready_id) == [0, 1, 2, 3]
        with pytest.raises(shoal.NothingPending):
            envs.step(None)


# ---- collectors ------------------------------------------------------------------------------------------------


class Sampler(torch.nn.Module):
    """As much of a policy as collectors need: actions that depend on the observations, and on torch's generator."""

    action_type = "discrete"

    def forward(self, batch: Batch, state: Any = None, **_: Any) -> Batch:
        numbers = np.abs(np.asarray(batch.obs, np.float64).sum(1) * 1000).astype(np.int64)
        count = np.zeros((len(numbers), 1)) if state is None else state + 1  # AsyncCollector wants a state
        return Batch(act=(numbers + torch.randint(0, 100, (len(numbers),)).numpy()) % 2, state=count)

    def map_action(self, act: Any) -> Any:
        return act

    map_action_inverse = map_action

    @property
    def is_within_training_step(self) -> bool:
        return False


def contents(buffer: VectorReplayBuffer) -> Any:
    """All that a buffer holds."""
    batch = buffer[buffer.sample_indices(0)]
    names = ("obs", "act", "rew", "terminated", "truncated", "obs_next")
    return {name: np.asarray(batch[name]).tolist() for name in names} | {"env_id": batch.info.env_id.tolist()}


def cartpoles(count: int) -> list[Callable[[], Any]]:
    return [functools.partial(gymnasium.make, "CartPole-v1")] * count


@pairs
@pytest.mark.parametrize("random", [False, True])
def test_collector_finds_the_same(pair: str, random: bool) -> None:
    found = []
    for cls in PAIRS[pair]:
        torch.manual_seed(0)
        envs = cls(cartpoles(5))
        envs.seed(9)
        collector = Collector(Sampler(), envs, VectorReplayBuffer(3000, 5))
        collector.reset()
        stats = [collector.collect(n_step=100, random=random), collector.collect(n_episode=8, random=random)]
        stats.append(collector.collect(n_episode=3, random=random, reset_before_collect=True))
        found.append(([(one.returns.tolist(), one.lens.tolist()) for one in stats], contents(collector.buffer)))
        collector.close()
    assert len(found[0][0][1][0]) == 8
    assert found[0] == found[1]


def test_async_collector_finds_the_same_over_dummies() -> None:
    found = []
    for cls in (TheirDummy, ours.DummyVectorEnv):
        torch.manual_seed(0)
        envs = cls(cartpoles(6), wait_num=3)
        envs.seed(9)
        collector = AsyncCollector(Sampler(), envs, VectorReplayBuffer(3000, 6))
        collector.reset()
        stats = [collector.collect(n_step=200), collector.collect(n_step=100)]
        found.append(([(one.returns.tolist(), one.lens.tolist()) for one in stats], contents(collector.buffer)))
        collector.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [{"wait_num": 2}, {"timeout": 0.01}, {"wait_num": 6, "timeout": 0.05}])
def test_async_collector_over_processes(options: dict[str, Any]) -> None:
    """Who is done first differs from run to run. What each env answers depends on its own steps alone."""
    envs = ours.SubprocVectorEnv(cartpoles(6), num_workers=3, **options)
    envs.seed(9)
    collector = AsyncCollector(Sampler(), envs, VectorReplayBuffer(6000, 6))
    collector.reset()
    stats = collector.collect(n_step=400)
    assert stats.n_collected_steps >= 400
    batch = collector.buffer[collector.buffer.sample_indices(0)]
    for env_id in range(6):
        own = batch[batch.info.env_id == env_id]
        env = gymnasium.make("CartPole-v1")
        env.reset(seed=9 + env_id)
        obs, _ = env.reset()
        for row in range(len(own)):
            assert own.obs[row].tolist() == obs.tolist()
            obs, reward, terminated, truncated, _ = env.step(int(own.act[row]))
            assert own.obs_next[row].tolist() == obs.tolist()
            assert (own.rew[row], own.terminated[row], own.truncated[row]) == (reward, terminated, truncated)
            if terminated or truncated:
                obs, _ = env.reset()
    collector.close()


@pairs
def test_normalization_goes_around(pair: str) -> None:
    found = []
    for cls in PAIRS[pair]:
        envs = VectorEnvNormObs(cls(walks(3)))
        envs.seed(2)
        seen = [plain(envs.reset())]
        for turn in range(6):
            step = envs.step(np.array([turn % 4, 1, 2]))
            seen.append(plain(step))
            if (step[2] | step[3]).any():
                seen.append(plain(envs.reset(np.flatnonzero(step[2] | step[3]))))
        seen.append(plain([envs.get_obs_rms().mean, envs.get_obs_rms().var, len(envs), envs.is_async]))
        seen.append([repr(space) for space in envs.action_space])
        envs.close()
        found.append(seen)
    assert found[0] == found[1]


# ---- several agents ----------------------------------------------------------------------------------------------


def tictactoe() -> Any:
    from pettingzoo.classic import tictactoe_v3
    from tianshou.env import PettingZooEnv

    return PettingZooEnv(tictactoe_v3.env())


@pytest.mark.parametrize("pair", ["dummy", "subproc"])
def test_pettingzoo_envs(pair: str) -> None:
    pytest.importorskip("pettingzoo.classic.tictactoe_v3", reason="needs pettingzoo[classic]", exc_type=ImportError)
    found = []
    for cls in PAIRS[pair]:
        envs, seen = cls([tictactoe] * 2), []
        envs.seed(1)
        seen.append(plain(envs.reset()))
        for move in range(9):
            step = envs.step(np.array([move, 8 - move]))
            seen.append(plain(step))
            if step[2].any():
                break
        seen.append(plain(envs.reset([1])))
        seen.append([repr(space) for space in envs.action_space])
        seen.append(plain(envs.get_env_attr("agents")))
        envs.close()
        found.append(seen)
    assert found[0] == found[1]


def test_envs_with_lanes_are_refused() -> None:
    from agent_envs import Crowd

    with pytest.raises(shoal.BadEnv, match="PettingZooEnv"):
        shoal.make([Crowd] * 2, api="tianshou", backend="serial")


# ---- make --------------------------------------------------------------------------------------------------------


def test_make_takes_ids() -> None:
    envs = shoal.make("CartPole-v1", 3, api="tianshou", backend="serial")
    envs.seed(1)
    assert envs.reset()[0].shape == (3, 4)
    assert len(envs.action_space) == len(envs) == 3
    assert [spec.id for spec in envs.spec] == ["CartPole-v1"] * 3
    envs.close()
    with pytest.raises(ValueError, match="autoreset"):
        shoal.make("CartPole-v1", 3, api="tianshou", backend="serial", autoreset="next_step")


def test_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setenv("RAY_ADDRESS", "local")  # and not a cluster that another test has started, and kills nodes of
    cloudpickle.register_pickle_by_value(tianshou_kit)  # actors do not find the tests
    want = TheirDummy(walks(3))
    envs = ours.RayVectorEnv(walks(3), num_workers=2)
    want.seed(4)
    assert envs.seed(4) == [None] * 3
    assert plain(want.reset()) == plain(envs.reset())
    for actions, ids in (([0, 1, 2], None), ([3, 1], [2, 0]), ([1], 1)):
        assert plain(want.step(np.array(actions), ids)) == plain(envs.step(np.array(actions), ids))
    assert envs.get_env_attr("at") == want.get_env_attr("at")
    envs.close()
    cloudpickle.unregister_pickle_by_value(tianshou_kit)

"""Actions of every type reach the envs as their space says, however they are sent; what is refused moves nothing."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from envs import CountEnv, GateEnv
from repeats import product
from shoal import BadAction, Batch, Pool
from shoal.spaces.leaves import flatten, read_actions

pytestmark = pytest.mark.timeout(120)
BACKENDS = ["serial", "processes"]
SPACES: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(5, start=-1),
    "many discrete": spaces.MultiDiscrete([3, 300]),
    "binary": spaces.MultiBinary(3),
    "number": spaces.Box(-2, 2, (), np.float32),
    "box": spaces.Box(-2, 2, (2, 3), np.float32),
    "wide box": spaces.Box(-2, 2, (2,), np.float64),
    "small box": spaces.Box(-2, 2, (2,), np.float16),
    "bytes": spaces.Box(0, 255, (2,), np.uint8),
    "flags": spaces.Box(0, 1, (2,), np.bool_),
}
DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "?"]


class EchoEnv(gymnasium.Env[Any, Any]):
    """Observes the number of its steps and the action that it was given; the reward says of what type that was."""

    def __init__(self, action_space: spaces.Space[Any]):
        self.action_space, [leaf] = action_space, flatten(action_space)
        self.size = int(np.prod(leaf.shape))
        self.observation_space = spaces.Box(-np.inf, np.inf, (1 + self.size,), np.float64)
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return np.zeros(1 + self.size), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        numbers = np.ravel(np.asarray(action, np.float64))
        return np.array([self.steps, *numbers]), float(action.dtype.num), False, False, {}


def numbers(shape: tuple[int, ...], dtype: str) -> list[Any]:
    """Actions of this type: some that every space here has, and some that none or few have."""
    small = np.resize(np.array([0, 1, 1, 0, 1], dtype), shape)
    if dtype == "?":
        return [small]
    odd = small.copy()
    odd.reshape(-1)[-1] = np.nan if dtype[0] == "f" else np.iinfo(dtype).max
    return [small, np.full(shape, 2, dtype), odd]


def as_they_come(array: Any) -> Iterator[Any]:
    """The same actions, as callers may have them."""
    frozen = array.copy()
    frozen.flags.writeable = False
    yield from (array, np.repeat(array, 2, axis=0)[::2], np.asfortranarray(array), frozen, array.tolist())
    yield from (array.astype(array.dtype.newbyteorder()), array.view(np.recarray), np.ma.masked_array(array))
    yield from (array.astype(object), tuple(array), array[:0], array[..., None], array[:-1])


def outcome(act: Any) -> Any:
    try:
        return act()
    except BadAction as error:
        return str(error)


def check(batch: Any, expected: Any, ids: Any, steps: Any, dtype: Any) -> None:
    """The envs of these ids have got the actions as expected, or all were refused with the same words."""
    if isinstance(expected, str):
        assert batch == expected
        return
    assert isinstance(batch, Batch), batch
    order = np.argsort(ids)
    steps[ids] += 1
    assert batch.env_id.tolist() == np.sort(ids).tolist()
    assert batch.obs[:, 0].tolist() == steps[np.sort(ids)].tolist()
    given = np.asarray(expected[0], np.float64).reshape(len(ids), -1)[order]
    np.testing.assert_array_equal(batch.obs[:, 1:], given)
    assert (batch.reward == dtype.num).all()


@pytest.mark.filterwarnings("ignore:overflow")
@product("backend name sizes", BACKENDS, SPACES, [(1, 1), (7, 3)])  # envs and workers
def test_actions_of_every_type(backend: Any, name: str, sizes: tuple[int, int]) -> None:
    space, (count, workers) = SPACES[name], sizes
    leaves = flatten(space)
    everyone, some = np.arange(count), np.array([5, 0, 2] if count > 1 else [0])
    with (
        Pool(functools.partial(EchoEnv, space), count, backend=backend,
             num_workers=None if backend == "serial" else workers, batch_size=len(some)) as parts,
        Pool(functools.partial(EchoEnv, space), count, backend="serial") as whole,
    ):  # fmt: skip
        parts.reset()
        whole.reset()
        steps = np.zeros(count, int), np.zeros(count, int)

        def turn(actions: Any) -> Batch:
            parts.send(actions, some)
            return parts.recv()

        for dtype in DTYPES:
            for array in numbers((count, *leaves[0].shape), dtype):
                for actions in as_they_come(array):
                    expected = outcome(functools.partial(read_actions, leaves, actions, everyone, "all"))
                    found = outcome(functools.partial(whole.step, actions))
                    check(found, expected, everyone, steps[0], leaves[0].dtype)
                for actions in as_they_come(array[: len(some)]):
                    expected = outcome(functools.partial(read_actions, leaves, actions, some, "all"))
                    found = outcome(functools.partial(turn, actions))
                    assert not len(parts.pending)
                    check(found, expected, some, steps[1], leaves[0].dtype)


@pytest.mark.parametrize("check_actions", ["all", "discrete"])
def test_bounds_are_of_the_value_that_the_env_gets(check_actions: Any) -> None:
    """0.7 in float32 is less than 0.7 in float64, and no less than itself."""
    space = spaces.Box(-0.7, 0.7, (1,), np.float32)
    with Pool(functools.partial(EchoEnv, space), 2, backend="serial", check_actions=check_actions) as pool:
        pool.reset()
        assert (pool.step(np.full((2, 1), 0.7)).obs[:, 1] == np.float32(0.7)).all()
        for wrong in (0.71, np.nan, np.inf):
            actions = np.array([[0.0], [wrong]])
            if check_actions == "all":
                with pytest.raises(BadAction, match="env 1"):
                    pool.step(actions)
            else:
                np.testing.assert_array_equal(pool.step(actions).obs[1, 1], np.float32(wrong))


def test_a_number_too_large_for_a_float_warns_as_numpy_does() -> None:
    space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    with Pool(functools.partial(EchoEnv, space), 1, backend="serial") as pool:
        pool.reset()
        with pytest.warns(RuntimeWarning, match="overflow"):
            assert pool.step(np.array([[1e39]])).obs[0, 1] == np.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_of_torch(backend: Any) -> None:
    torch = pytest.importorskip("torch")
    with Pool(functools.partial(CountEnv, 9), 3, backend=backend) as pool:
        pool.reset(seed=0)
        for turn, dtype in enumerate((torch.int64, torch.int32, torch.uint8, torch.int8), 1):
            batch = pool.step(torch.tensor([0, 1, 2], dtype=dtype))
            assert batch.reward.tolist() == [turn, turn + 100, turn + 200]
        pool.send(torch.tensor([[2, 9], [1, 9], [0, 9]])[:, 0], torch.tensor([2, 0, 1]))
        assert pool.recv().reward.tolist() == [5 + 100, 5, 5 + 200]
        with pytest.raises(BadAction, match=r"found float32"):
            pool.step(torch.zeros(3))
        with pytest.raises(BadAction, match=r"found 4"):
            pool.step(torch.tensor([0, 0, 4]))
        with pytest.raises(RuntimeError, match=r"grad"):
            pool.step(torch.zeros(3, requires_grad=True))
        assert pool.step(torch.zeros(3, dtype=torch.int64)).episode_length.tolist() == [6, 6, 6]


@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_of_jax(backend: Any) -> None:
    jnp = pytest.importorskip("jax.numpy")
    with Pool(CountEnv, 3, backend=backend) as pool:
        pool.reset(seed=0)
        assert pool.step(jnp.array([0, 1, 2])).reward.tolist() == [1, 101, 201]
        pool.send(jnp.array([2, 1], jnp.uint8), jnp.array([2, 0]))
        pool.send(jnp.array([0]), [1])
        assert pool.recv().reward.tolist() == [102, 2, 202]
        with pytest.raises(BadAction, match="found 4"):
            pool.step(jnp.array([0, 0, 4]))


def test_nested_actions_take_the_way_step_by_step() -> None:
    space = spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(-1, 1, (2,), np.float32))
    seen: list[Any] = []

    class Nested(CountEnv):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = space

        def step(self, action: Any) -> Any:
            seen.append(action)
            return super().step(action["a"])

    with Pool(Nested, 2, backend="serial", batch_size=1) as pool:
        pool.reset(seed=0)
        pool.send({"a": np.array([1, 2], np.int8), "b": [[0, 1], [1, 0.5]]}, np.array([1, 0]))
        assert [pool.recv().env_id.tolist(), pool.recv().env_id.tolist()] == [[0], [1]]
        assert [action["a"] for action in seen] == [2, 1]
        assert all(action["b"].dtype == np.float32 for action in seen)
        with pytest.raises(BadAction, match=r"\['b'\]"):
            pool.send({"a": [1], "b": [[0, 2]]}, np.array([1]))
        assert not len(pool.pending)


# ---- batches in one call -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("order", ["ready", "fifo", "contiguous"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_partial_batches_are_as_one_whole(backend: Any, order: Any, copy: bool) -> None:
    """Whatever is received when, each env makes the steps that it makes alone; arrays stay as long as they must."""
    envs, size, rng = 8, 4, np.random.default_rng(0)
    plain = [CountEnv() for _ in range(envs)]
    with Pool(CountEnv, envs, backend=backend, num_workers=None if backend == "serial" else 3, batch_size=size,
              order=order, copy=copy, frames=3) as pool:  # fmt: skip
        pool.async_reset(seed=0)
        expected = [env.reset(seed=lane)[0] for lane, env in enumerate(plain)]
        over = np.zeros(envs, bool)
        held: list[tuple[Any, Any]] = []
        for _ in range(60):
            batch = pool.recv()
            ids = batch.env_id
            assert (np.diff(ids) > 0).all()
            assert order != "contiguous" or ids.tolist() in ([0, 1, 2, 3], [4, 5, 6, 7])
            assert (batch.obs == [expected[lane] for lane in ids]).all()
            assert batch.env_id.flags.writeable
            held = [*held, (batch.obs, batch.obs.copy())][-2 if not copy else -9 :]
            assert all((array == kept).all() for array, kept in held[-1 if not copy else 0 :])
            order_of_send = rng.permutation(ids)
            actions = rng.integers(0, 3, size).astype(rng.choice(["i8", "i4", "u1"]))
            for lane, action in zip(order_of_send.tolist(), actions.tolist(), strict=True):
                if over[lane]:
                    expected[lane], over[lane] = plain[lane].reset()[0], False
                else:
                    expected[lane], _, terminated, truncated, _ = plain[lane].step(action)
                    over[lane] = terminated or truncated
            pool.send(actions, order_of_send)


@pytest.mark.parametrize("order", ["ready", "fifo", "contiguous"])
def test_runs_in_one_frame_are_views(order: Any) -> None:
    with Pool(CountEnv, 8, backend="serial", batch_size=4, order=order) as pool:
        pool.async_reset(seed=0)
        frame = pool._slab.array("obs.0")
        for _ in range(6):
            batch = pool.recv()
            assert np.shares_memory(batch.obs, frame)
            assert np.shares_memory(batch.reward, pool._slab.array("reward"))
            pool.send(np.zeros(4, int), batch.env_id)


@pytest.mark.parametrize("order", ["ready", "fifo", "contiguous"])
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_ctrl_c_while_a_batch_is_waited_for_leaves_it_to_the_next(backend: Any, order: Any, gate: Path) -> None:
    env = functools.partial(GateEnv, str(gate))
    with Pool(env, 4, backend=backend, num_workers=2, batch_size=2, order=order) as pool:
        pool.reset(seed=0)
        pool.send(np.array([3, 3], np.int32), np.array([0, 1]))  # both wait at the gate
        main = threading.main_thread().ident or 0

        def interrupted() -> None:
            timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
            timer.start()
            try:
                pool.recv()
            finally:
                timer.join()

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert pool.pending.tolist() == [0, 1]
        gate.touch()
        assert pool.recv().episode_length.tolist() == [1, 1]
        with pytest.raises(shoal.NothingPending):
            pool.recv()
        assert pool.step(np.zeros(4, np.uint8)).episode_length.tolist() == [2, 2, 1, 1]


def test_an_env_that_takes_long_is_found_while_others_are_ready(gate: Path) -> None:
    """Each recv is one call that never waits for long, and still the pool looks around."""
    env = functools.partial(GateEnv, str(gate))
    with Pool(env, 3, backend="threads", num_workers=3, batch_size=1, step_timeout=1.5) as pool:
        pool.reset(seed=0)
        pool.send([3], np.array([2]))
        pool.send([0, 0], np.array([0, 1]))

        def go_on() -> None:
            while True:
                pool.send(np.zeros(1, int), pool.recv().env_id)

        with pytest.raises(shoal.StepTimeout, match=r"\[2\]"):
            go_on()
        gate.touch()

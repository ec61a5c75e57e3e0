"""Functional envs in batches, against plain loops over single envs."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.phys2d.cartpole import CartPoleFunctional
from gymnasium.envs.phys2d.pendulum import PendulumFunctional
from gymnasium.envs.tabular.blackjack import BlackjackFunctional
from gymnasium.envs.tabular.cliffwalking import CliffWalkingFunctional
from gymnax.wrappers.purerl import LogWrapper

from shoal.errors import BadAction, BadCall, BadEnv, CannotSnapshot
from shoal.graph.jax.functional import BatchedFunctionalEnv, functional
from shoal.graph.jax.records import FunctionalState, FunctionalStep

MODES = ["next_step", "same_step", "disabled"]


class Count(NamedTuple):
    """Where a CountFunctional is."""

    time: Any
    length: Any
    draw: Any


class CountFunctional:
    """Counts up to a length drawn at its start, 1 to 4; odd lengths end by truncation. Steps draw noise as well."""

    observation_space = spaces.Dict(
        {"time": spaces.Box(0, 9, (), np.int32), "pair": spaces.Tuple([spaces.Discrete(9), spaces.Box(0, 9, (2,))])}
    )
    action_space = spaces.Discrete(5)

    def reset(self, key: Any) -> Any:
        length, draw = jax.random.randint(key, (), 1, 5), jax.random.uniform(jax.random.fold_in(key, 1))
        state = Count(0, length, draw)  # a Python int: types are settled by Shoal
        return self._obs(state), state

    def step(self, key: Any, state: Count, action: Any) -> Any:
        state = Count(state.time + 1, state.length, jax.random.uniform(key))
        over, odd = state.time >= state.length, state.length % 2 == 1
        reward = state.time + 100 * action
        return self._obs(state), state, reward, over & ~odd, over & odd, {"twice": 2 * state.time}

    def _obs(self, state: Count) -> Any:
        return {"time": state.time, "pair": (state.length, jnp.stack([state.draw, state.draw + 1]))}


@jax.jit
def _reset(key: Any, episode: Any) -> Any:
    return CountFunctional().reset(jax.random.fold_in(key, 2 * episode))


@jax.jit
def _step(key: Any, episode: Any, steps: Any, state: Any, action: Any) -> Any:
    key = jax.random.fold_in(jax.random.fold_in(key, 2 * episode + 1), steps)
    return CountFunctional().step(key, state, action)


class Plain:
    """One lane as a Python loop over the env itself."""

    def __init__(self, seed: int, lane: int, mode: str, limit: int | None = None):
        self.mode, self.limit = mode, limit
        self.key = jax.random.fold_in(jax.random.key(seed), lane)
        self.episode, self.over = -1, (False, False)
        self.begin()

    def begin(self) -> Any:
        self.episode, self.steps, self.over = self.episode + 1, 0, (False, False)
        self.obs, self.state = _reset(self.key, self.episode)
        return self.obs

    def step(self, action: int) -> Any:
        """obs, reward, terminated, truncated, began, final_obs."""
        if any(self.over) and self.mode == "next_step":
            return self.begin(), 0.0, False, False, True, None
        if any(self.over) and self.mode == "disabled":
            return self.obs, 0.0, *self.over, False, None
        self.obs, self.state, reward, terminated, truncated, _ = _step(
            self.key, self.episode, self.steps, self.state, action
        )
        self.steps += 1
        truncated = bool(truncated) or (self.limit is not None and self.steps >= self.limit)
        self.over, final = (bool(terminated), truncated), self.obs
        flags = self.over
        if any(flags) and self.mode == "same_step":
            return self.begin(), float(reward), *flags, True, final
        return self.obs, float(reward), *flags, False, final


def same(a: Any, b: Any) -> bool:
    """Whether two trees hold the same values, bit for bit."""
    plain = [jax.tree.leaves(host(tree)) for tree in (a, b)]
    return len(plain[0]) == len(plain[1]) and all(np.array_equal(x, y) for x, y in zip(*plain, strict=True))


def host(tree: Any) -> Any:
    """The tree in numpy, keys as their words."""
    return jax.tree.map(lambda leaf: np.asarray(_data(leaf)), tree)


def _data(leaf: Any) -> Any:
    typed = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if typed else leaf


def row(tree: Any, lane: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[lane], host(tree))


def actions(t: int, n: int) -> Any:
    return np.arange(n) * 3 % 5 * (t + 1) % 5


# ---- the three modes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resets", ["prepared", "fused", "in stock"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", [None, 3])
def test_lanes_are_what_plain_loops_are(mode: str, limit: int | None, resets: str) -> None:
    n = 3
    strategy = "fused" if resets == "fused" else "prepared"
    envs = BatchedFunctionalEnv(CountFunctional(), n, mode, max_episode_steps=limit, resets=strategy)
    plain = [Plain(5, lane, mode, limit) for lane in range(n)]
    state, obs = envs.init(5)
    if resets == "in stock":
        state = envs.prepare(state)
    for lane in range(n):
        assert same(row(obs, lane), plain[lane].obs)
    for t in range(12):
        given = actions(t, n)
        state, answer = envs.step(state, given)
        answer, episodes, steps = host(answer), state.episode.tolist(), state.steps.tolist()
        for lane in range(n):
            obs_, reward, terminated, truncated, began, final = plain[lane].step(int(given[lane]))
            assert same(row(answer.obs, lane), obs_)
            assert answer.reward[lane] == reward
            found = (answer.terminated[lane], answer.truncated[lane], answer.began[lane])
            assert tuple(map(bool, found)) == (terminated, truncated, began)
            if mode == "same_step":
                assert same(row(answer.final_obs, lane), final)
            assert (episodes[lane], steps[lane]) == (plain[lane].episode, plain[lane].steps)
        assert same(state.obs, answer.obs)
    assert (mode == "same_step") == (answer.final_obs is not None)
    assert int(state.episode.max()) > (2 if mode != "disabled" else -1)


def test_types_are_those_of_the_spaces() -> None:
    envs = functional(CountFunctional(), 2)
    state, _ = envs.init(0)
    _, answer = envs.step(state, np.zeros(2, np.int64))
    assert answer.obs["time"].dtype == np.int32
    assert answer.obs["pair"][1].dtype == np.float32
    assert isinstance(answer.obs["pair"], tuple)
    assert answer.reward.dtype == np.float32
    assert answer.terminated.dtype == bool
    assert answer.info["twice"].shape == (2,)


def test_infos_of_resets_are_zeros() -> None:
    envs = functional(CountFunctional(), 4, max_episode_steps=1)
    state, _ = envs.init(0)
    state, first = envs.step(state, np.zeros(4, int))
    state, second = envs.step(state, np.zeros(4, int))
    assert first.info["twice"].tolist() == [2] * 4
    assert second.info["twice"].tolist() == [0] * 4
    assert bool(second.began.all())


# ---- streams -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rng", ["threefry", "fast"])
@pytest.mark.parametrize("mode", MODES)
def test_a_lane_does_not_depend_on_the_number_of_lanes(mode: str, rng: str) -> None:
    kept = []
    for n in (3, 7):
        envs = functional(CountFunctional(), n, autoreset=mode, rng=rng)
        state, _ = envs.init(11)
        kept.append(envs.rollout(state, None, 20)[1])
    few, many = kept
    assert same(few, jax.tree.map(lambda x: x[:, :3] if x.ndim > 1 else x[:3], many))
    assert len(set(np.asarray(many.obs["pair"][1][0, :, 0]).tolist())) == 7


@pytest.mark.parametrize("rng", ["threefry", "fast"])
def test_seeds_and_keys_make_differences(rng: str) -> None:
    envs = functional(CountFunctional(), 2, rng=rng)
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63, jax.random.key(0), jax.random.key(1)]
    starts = [np.asarray(envs.init(seed)[1]["pair"][1][:, 0]) for seed in seeds]
    apart = {tuple(start.tolist()) for start in starts}
    # A key that was made of 0 is the seed 0, where both are of one kind.
    assert len(apart) == (len(seeds) - 2 if rng == "threefry" else len(seeds))
    assert same(envs.init(0), envs.init(np.int64(0)))


def test_old_keys_and_traced_seeds_work() -> None:
    envs = functional(CountFunctional(), 2)
    assert same(jax.jit(envs.init)(3), envs.init(3))
    assert same(jax.jit(envs.init)(jax.random.key(3)), envs.init(jax.random.key(3)))
    assert same(envs.init(jax.random.PRNGKey(3)), jax.jit(envs.init)(jax.random.PRNGKey(3)))


def test_fast_numbers_are_even_and_apart() -> None:
    envs = functional(CountFunctional(), 1, rng="fast")
    key = envs.init(0)[0].keys[0]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(4096))
    draws = np.asarray(jax.vmap(lambda k: jax.random.uniform(k, (8,)))(keys), np.float64)
    assert abs(draws.mean() - 0.5) < 0.01
    assert np.abs(np.corrcoef(draws.T) - np.eye(8)).max() < 0.08  # numbers of one key
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.08  # keys one after another
    counts = np.histogram(draws, 64, (0, 1))[0]
    assert ((counts - 512) ** 2 / 512).sum() < 130  # 63 degrees of freedom
    bits = np.asarray(jax.vmap(lambda k: jax.random.bits(k))(keys))
    ones = ((bits[:, None] >> np.arange(32, dtype=np.uint32)) & 1).mean(0)
    assert np.abs(ones - 0.5).max() < 0.05
    assert len(np.unique(bits)) > 4090
    assert np.asarray(jax.random.bits(key, (5,), "uint8")).dtype == np.uint8
    assert len({tuple(x) for x in np.asarray(jax.random.key_data(jax.random.split(key, (3, 4)))).reshape(12, 2)}) == 12


# ---- rollouts ----------------------------------------------------------------------------------------------------


def last_bit(params: Any, obs: Any, key: Any) -> Any:
    """A policy that looks and draws."""
    return (obs["time"] + params + jax.random.randint(key, (), 0, 5)) % 5


@pytest.mark.parametrize("resets", ["prepared", "fused"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", [None, last_bit])
def test_a_rollout_is_a_loop_of_steps(mode: str, policy: Any, resets: str) -> None:
    n, steps, key = 5, 13, jax.random.key(9)
    envs = functional(CountFunctional(), n, autoreset=mode, resets=resets)
    start, obs = envs.init(2)
    end, kept = envs.rollout(start, policy, steps, policy_params=2, key=key)
    kept = host(kept)
    state, rewards, ended, moved = start, 0, 0, 0
    for t in range(steps):
        mine = jax.random.fold_in(key, t)
        action = envs.sample(mine) if policy is None else policy(2, obs, mine)
        assert same(row(kept.obs, t), obs)
        assert same(row(kept.action, t), action)
        before = state.over != 0
        state, answer = envs.step(state, action)
        obs = answer.obs
        for name in ("reward", "terminated", "truncated", "began", "final_obs", "info"):
            assert same(row(getattr(kept, name), t), getattr(answer, name))
        stood = before if mode != "same_step" else jnp.zeros(n, bool)
        moved = moved + ~stood
        ended = ended + ((answer.terminated | answer.truncated) & ~stood)
        rewards = rewards + answer.reward
    assert same(end, state._replace(rollouts=end.rollouts))
    assert end.rollouts.tolist() == [1] * n
    assert same(kept.summary, (rewards, ended, moved))
    for collect in (False, ("truncated", "action")):
        other, some = envs.rollout(start, policy, steps, policy_params=2, key=key, collect=collect, unroll=2)
        assert same(other, end)
        assert same(some.summary, kept.summary)
        for name in ("reward", "truncated", "action", "obs"):
            assert same(getattr(some, name), getattr(kept, name) if name in (collect or ()) else None)


def test_one_step_is_a_rollout_too_and_the_next_one_draws_other_actions() -> None:
    envs = functional(CountFunctional(), 64)
    state, _ = envs.init(0)
    state, one = envs.rollout(state, None, 1, collect=("action",))
    state, two = envs.rollout(state, None, 1, collect=("action",))
    assert one.action.shape == (1, 64)
    assert not same(one.action, two.action)


def test_a_stock_of_starts_lasts_through_rollouts() -> None:
    envs = functional(CountFunctional(), 3)
    state = envs.prepare(envs.init(0)[0])
    for collect in (True, False):
        state, _ = envs.rollout(state, None, 7, collect=collect)
        assert state.spare is not None
        assert state.spare.obs is not None
    plain = envs.init(0)[0]
    for _ in range(2):
        plain, _ = envs.rollout(plain, None, 7)
    assert same(plain, state._replace(spare=None))


# ---- for pools ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_masked_lanes_stay(mode: str) -> None:
    n = 4
    envs = functional(CountFunctional(), n, autoreset=mode)
    whole, _ = envs.init(1)
    state, last = whole, None
    whole, first = envs.step(whole, actions(0, n))
    state, last = envs.step(state, actions(0, n))
    for t in range(1, 9):
        mask = np.array([True, t % 2 == 0, False, True])
        before = state
        state, answer = envs.step(state, actions(t, n), mask, last)
        free, unmasked = envs.step(before, actions(t, n))
        assert same(row(state, mask), row(free, mask))
        assert same(row(answer, mask), row(unmasked, mask))
        assert same(row(state, ~mask), row(before, ~mask))
        assert same(row(answer, ~mask), row(last, ~mask))
        last = answer
    assert same(row(answer, 2), row(first, 2))
    _, answer = envs.step(state, actions(0, n), np.zeros(n, bool))
    assert same(answer.obs, state.obs)
    assert not answer.reward.any()
    assert not answer.terminated.any()


@pytest.mark.parametrize("stock", [False, True])
def test_rows_are_reset_with_seeds_or_in_their_own_streams(stock: bool) -> None:
    n = 5
    envs = functional(CountFunctional(), n)
    state, _ = envs.init(0)
    state = envs.prepare(state) if stock else state
    for t in range(4):
        state, _ = envs.step(state, actions(t, n))
    mask, seeded = np.array([True, True, True, False, False]), np.array([True, False, True, True, False])
    seeds = np.array([2**40 + 7, 8, 2**40 + 7, 8, 8])
    after, obs = envs.reset_rows(state, mask, seeds, seeded)
    assert same(row(after, ~mask), row(state, ~mask))
    assert same(obs, after.obs)
    assert same(row(obs, 0), row(obs, 2)), "the same seed gives the same episode in every lane"
    assert after.episode[:3].tolist() == [0, int(state.episode[1]) + 1, 0]
    assert after.steps[:3].tolist() == [0, 0, 0]
    own = functional(CountFunctional(), 1).env.reset(jax.random.fold_in(state.keys[1], 2 * after.episode[1]))[0]
    assert same(row(obs, 1), own)
    for t in range(9):
        after, answer = envs.step(after, np.full(n, t % 5))
        assert same(row(answer, 0), row(answer, 2))
    everywhere, _ = envs.reset_rows(state, np.ones(n, bool), np.full(n, 4))
    assert len(np.unique(everywhere.inner.draw)) == 1
    traced = jax.jit(envs.reset_rows)(state, jnp.ones(n, bool), jnp.full(n, 4))[0]
    assert same(traced, everywhere)


@pytest.mark.parametrize("rng", ["threefry", "fast"])
@pytest.mark.parametrize("mode", MODES)
def test_saved_states_go_on_bit_by_bit(mode: str, rng: str, tmp_path: Any) -> None:
    envs = functional(CountFunctional(), 3, autoreset=mode, rng=rng)
    state, _ = envs.rollout(envs.init(4)[0], None, 9)
    np.savez(tmp_path / "state.npz", **envs.save(state))
    with np.load(tmp_path / "state.npz", allow_pickle=False) as file:
        loaded = functional(CountFunctional(), 3, autoreset=mode, rng=rng).load(dict(file))
    assert isinstance(loaded, FunctionalState)
    assert same(loaded, state)
    assert same(envs.rollout(loaded, None, 9), envs.rollout(state, None, 9))


def test_states_of_others_are_refused() -> None:
    envs = functional(CountFunctional(), 3)
    saved = envs.save(envs.init(0)[0])
    assert {"inner/time", "obs/time", "obs/pair/0", "keys", "episode", "rng"} <= set(saved)
    assert all(isinstance(value, np.ndarray) and value.dtype != object for value in saved.values())
    with pytest.raises(CannotSnapshot, match="rng"):
        functional(CountFunctional(), 3, rng="fast").load(saved)
    with pytest.raises(CannotSnapshot, match=r"\(3,\).*\(4,\)"):
        functional(CountFunctional(), 4).load(saved)
    with pytest.raises(CannotSnapshot, match="inner/time"):
        envs.load({name: value for name, value in saved.items() if name != "inner/time"})


class KeepsKey(CountFunctional):
    """An env that keeps a key in its state, as many do."""

    def reset(self, key: Any) -> Any:
        obs, state = super().reset(key)
        return obs, {"count": state, "key": key}

    def step(self, key: Any, state: Any, action: Any) -> Any:
        mine, use = jax.random.split(state["key"])
        obs, count, *rest = super().step(use, state["count"], action)
        return obs, {"count": count, "key": mine}, *rest


@pytest.mark.parametrize("rng", ["threefry", "fast"])
def test_envs_may_keep_keys_in_their_state(rng: str) -> None:
    envs = functional(KeepsKey(), 3, rng=rng)
    state, _ = envs.rollout(envs.init(0)[0], None, 9, collect=False)
    loaded = envs.load(envs.save(state))
    assert same(loaded, state)
    assert same(envs.rollout(loaded, None, 9), envs.rollout(state, None, 9))


# ---- transformations ---------------------------------------------------------------------------------------------


class Slope:
    """Differentiable: the state moves by the action, and the reward is minus its square."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,))
    action_space = spaces.Box(-1.0, 1.0, (1,))

    def reset(self, key: Any) -> Any:
        x = jax.random.uniform(key, (1,))
        return x, x

    def step(self, key: Any, x: Any, action: Any) -> Any:
        x = x + action
        return x, x, -(x[0] ** 2), False, {}


def linear(gain: Any, obs: Any, key: Any) -> Any:
    return gain * obs


@pytest.mark.parametrize("resets", ["prepared", "fused"])
def test_gradients_go_through_a_rollout(resets: str) -> None:
    envs = functional(Slope(), 3, max_episode_steps=3, resets=resets)
    state, obs = envs.init(0)

    def total(gain: Any) -> Any:
        return envs.rollout(state, linear, 3, gain, collect=False)[1].summary.reward.sum()

    found = jax.grad(total)(0.1)
    x = np.asarray(obs, np.float64)
    expected = sum(-2 * t * (x**2).sum() * (1 + 0.1) ** (2 * t - 1) for t in (1, 2, 3))
    assert found == pytest.approx(expected, rel=1e-4)


def test_everything_works_inside_of_jit_scan_and_vmap() -> None:
    envs = functional(CountFunctional(), 3)
    given = np.stack([actions(t, 3) for t in range(8)])

    @jax.jit
    def train(seed: Any) -> Any:
        state, _ = envs.init(seed)
        state, answers = jax.lax.scan(envs.step, state, jnp.asarray(given))
        state, obs = envs.reset_rows(state, jnp.array([True, False, True]))
        state, kept = envs.rollout(state, None, 4)
        return state, answers.reward, obs, kept

    def by_hand(seed: int) -> Any:
        state, _ = envs.init(seed)
        rewards = []
        for action in given:
            state, answer = envs.step(state, action)
            rewards.append(answer.reward)
        state, obs = envs.reset_rows(state, np.array([True, False, True]))
        state, kept = envs.rollout(state, None, 4)
        return state, jnp.stack(rewards), obs, kept

    assert same(train(7), by_hand(7))
    many = jax.vmap(train)(jnp.arange(3))
    assert same(row(many, 2), by_hand(2))


def test_a_policy_may_close_over_traced_values() -> None:
    envs = functional(Slope(), 2)
    state, _ = envs.init(0)

    @jax.jit
    def run(gain: Any) -> Any:
        return envs.rollout(state, lambda _, obs, key: gain * obs, 2, collect=False)[1].summary.reward

    assert same(run(0.5), envs.rollout(state, linear, 2, 0.5, collect=False)[1].summary.reward)


# ---- actions -----------------------------------------------------------------------------------------------------


class Takes:
    """Has the given action space; its observation is the sum of all that it was given."""

    observation_space = spaces.Box(-np.inf, np.inf, (), np.float32)

    def __init__(self, space: Any):
        self.action_space = space

    def reset(self, key: Any) -> Any:
        return jnp.float32(0), jnp.float32(0)

    def step(self, key: Any, state: Any, action: Any) -> Any:
        given = sum(jnp.sum(jnp.asarray(leaf, jnp.float32)) for leaf in jax.tree.leaves(action))
        return state + given, state + given, given, False, {}


SPACES = {
    "two": spaces.Discrete(2),
    "one": spaces.Discrete(1),
    "three": spaces.Discrete(3),
    "sixteen": spaces.Discrete(16, start=-4),
    "many": spaces.Discrete(100_000),
    "box": spaces.Box(np.array([-1, 0], np.float32), np.array([1, 9], np.float32)),
    "double": spaces.Box(-2.0, 2.0, (), np.float64),
    "half": spaces.Box(np.array([0, -np.inf, -np.inf], np.float32), np.array([np.inf, 0, np.inf], np.float32)),
    "bytes": spaces.Box(0, 255, (2, 3), np.uint8),
    "multi": spaces.MultiDiscrete([2, 7, 3]),
    "bits": spaces.MultiBinary(5),
    "nested": spaces.Dict({"b": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2,))]), "a": spaces.Discrete(2)}),
}


@pytest.mark.parametrize("name", list(SPACES))
@pytest.mark.parametrize("rng", ["threefry", "fast"])
def test_random_actions_fit_their_space(name: str, rng: str) -> None:
    n, space = 7, SPACES[name]
    envs = functional(Takes(space), n, rng=rng)
    _, kept = envs.rollout(envs.init(0)[0], None, 40)
    batches = jax.tree.map(np.asarray, kept.action)
    for t in range(0, 40, 3):
        for lane in range(n):
            one = jax.tree.map(lambda x: x[t, lane], batches)  # noqa: B023
            for leaf, found in zip(_leaves(space), _values(space, one), strict=True):
                assert leaf.contains(np.asarray(found, leaf.dtype))
    if space != spaces.Discrete(1):
        spread = [len(np.unique(leaf)) for leaf in jax.tree.leaves(batches)]
        assert min(spread) > 1
    if name in ("two", "three"):
        assert len(np.unique(batches)) == int(space.n)


def _leaves(space: Any) -> list[Any]:
    if isinstance(space, spaces.Dict):
        return [leaf for sub in space.spaces.values() for leaf in _leaves(sub)]
    if isinstance(space, spaces.Tuple):
        return [leaf for sub in space.spaces for leaf in _leaves(sub)]
    return [space]


def _values(space: Any, value: Any) -> list[Any]:
    if isinstance(space, spaces.Dict):
        return [x for key, sub in space.spaces.items() for x in _values(sub, value[key])]
    if isinstance(space, spaces.Tuple):
        return [x for sub, part in zip(space.spaces, value, strict=True) for x in _values(sub, part)]
    return [value]


def test_random_actions_are_even() -> None:
    for name, size in (("two", 2), ("three", 3), ("sixteen", 16)):
        envs = functional(Takes(SPACES[name]), 9600)
        counts = np.unique(envs.sample(jax.random.key(0)), return_counts=True)[1]
        assert len(counts) == size
        assert np.abs(counts / 9600 * size - 1).max() < 0.2


def test_nested_actions_arrive() -> None:
    envs = functional(Takes(SPACES["nested"]), 3)
    state, _ = envs.init(0)
    batch = {"a": np.array([0, 1, 0]), "b": (np.array([2, 0, 1]), np.full((3, 2), 0.25))}
    _, answer = envs.step(state, batch)
    assert answer.reward.tolist() == [2.5, 1.5, 1.5]


def test_actions_that_do_not_fit_are_refused() -> None:
    envs = functional(CountFunctional(), 3)
    state, _ = envs.init(0)
    with pytest.raises(BadAction, match=r"\(3,\).*\(2,\)"):
        envs.step(state, np.zeros(2, int))
    with pytest.raises(BadAction, match="float32"):
        envs.step(state, np.zeros(3, np.float32))
    with pytest.raises(BadAction, match=r"\(3,\)"):
        envs.rollout(state, lambda params, obs, key: jnp.zeros((), int), 2)
    nested = functional(Takes(SPACES["nested"]), 3)
    with pytest.raises(BadAction, match=r"\['b'\]\[0\]"):
        nested.step(nested.init(0)[0], {"a": np.zeros(3, int)})


# ---- protocols ---------------------------------------------------------------------------------------------------


def by_gymnasium(start: Any, given: Any) -> Any:
    """What Gymnasium's CartPole makes of a state."""
    env = gymnasium.make("CartPole-v1").unwrapped
    env.reset(seed=0)
    env.state = tuple(np.asarray(start, np.float64).tolist())
    for action in given:
        obs, _, terminated, _, _ = env.step(int(action))
        yield obs, terminated
        if terminated:
            return


@pytest.mark.parametrize("rng", ["threefry", "fast"])
def test_gymnax_cartpole_is_gymnasiums(rng: str) -> None:
    env, params = gymnax.make("CartPole-v1")
    envs = functional(env, 7, rng=rng, max_episode_steps=None)
    assert envs.action_space == spaces.Discrete(2)
    assert envs.observation_space.shape == (4,)
    state, obs = envs.init(0)
    assert np.abs(np.asarray(obs)).max() <= 0.05
    _, kept = envs.rollout(state, None, 60)
    ended = 0
    for lane in range(7):
        for t, (expected, terminated) in enumerate(by_gymnasium(obs[lane], np.asarray(kept.action[:, lane]))):
            if t + 1 < 60:
                np.testing.assert_allclose(kept.obs[t + 1, lane], expected, rtol=1e-4, atol=1e-5)
            assert bool(kept.terminated[t, lane]) == terminated
            ended += terminated
    assert ended > 3
    # And its own step, from the same state.
    action = jnp.zeros(7, int)
    after, answer = envs.step(state, action)
    step = jax.vmap(lambda s, a: env.step_env(jax.random.key(0), s, a, params))
    own_obs, own_state, own_reward, _, _ = step(state.inner, action)
    np.testing.assert_allclose(answer.obs, own_obs, rtol=1e-6)
    np.testing.assert_allclose(after.inner.theta, own_state.theta, rtol=1e-6)
    assert same(answer.reward, own_reward)


def test_gymnax_time_limits_truncate() -> None:
    env, params = gymnax.make("Pendulum-v1")
    envs = functional(env, 3, params=params.replace(max_steps_in_episode=4))
    _, kept = envs.rollout(envs.init(0)[0], None, 5)
    assert kept.truncated.all(1).tolist() == [False, False, False, True, False]
    assert not kept.terminated.any()
    assert bool(kept.began[4].all())


@pytest.mark.parametrize("name", ["Catch-bsuite", "Breakout-MinAtar", "FrozenLake-misc", "MountainCarContinuous-v0"])
def test_other_gymnax_envs_run(name: str) -> None:
    env, _ = gymnax.make(name)
    envs = functional(env, 3)
    _, kept = envs.rollout(envs.init(0)[0], None, 12)
    for t in (0, 11):
        assert envs.observation_space.contains(np.asarray(kept.obs[t, 1], envs.observation_space.dtype))


def test_gymnax_wrappers_that_reset_are_refused() -> None:
    env, _ = gymnax.make("CartPole-v1")
    with pytest.raises(BadEnv, match="LogWrapper wraps an env that resets itself"):
        functional(LogWrapper(env), 2)


class OldStyle:
    """gymnax before 1.0: one `done` for both, and spaces that are not Gymnasium's."""

    class Params(NamedTuple):
        max_steps_in_episode: int = 5

    class State(NamedTuple):
        time: Any
        goal: Any

    default_params = Params()

    def reset_env(self, key: Any, params: Any) -> Any:
        state = self.State(jnp.int32(0), jax.random.randint(key, (), 3, 9))
        return jnp.zeros(2), state

    def step_env(self, key: Any, state: Any, action: Any, params: Any) -> Any:
        state = state._replace(time=state.time + 1)
        done = (state.time >= state.goal) | (state.time >= params.max_steps_in_episode)
        return jnp.zeros(2), state, 1.0, done, {}

    def step(self, *_: Any) -> Any:
        raise AssertionError("its own reset must not be used")

    reset = step

    def observation_space(self, params: Any) -> Any:
        return type("Box", (), {"low": -1.0, "high": jnp.ones(2), "shape": (2,), "dtype": jnp.float32})()

    def action_space(self, params: Any) -> Any:
        return type("Tuple", (), {"spaces": [type("Discrete", (), {"n": 3})()]})()


def test_one_done_is_told_apart_by_the_time_limit() -> None:
    envs = functional(OldStyle(), 32)
    assert envs.observation_space == spaces.Box(-1, 1, (2,), np.float32)
    assert envs.action_space == spaces.Tuple([spaces.Discrete(3)])
    state, _ = envs.init(0)
    goals = np.asarray(state.inner.goal)
    _, kept = envs.rollout(state, None, 5)
    assert (goals < 5).any()
    assert (goals > 5).any()
    assert np.array_equal(np.asarray(kept.terminated).any(0), goals < 5)
    assert np.array_equal(np.asarray(kept.truncated[4]), goals >= 5)


class BraxState(NamedTuple):
    """As Brax has it."""

    pipeline_state: Any
    obs: Any
    reward: Any
    done: Any
    metrics: Any
    info: Any


class BraxLike:
    """A point that is pushed, in Brax's protocol."""

    observation_size, action_size = 3, 2

    def __init__(self, first: bool = False):
        self.first = first

    def reset(self, rng: Any) -> BraxState:
        q = jax.random.uniform(rng, (2,))
        info = {"truncation": jnp.float32(0), "steps": jnp.float32(0)} | ({"first_obs": q} if self.first else {})
        zero = jnp.float32(0)
        return BraxState({"q": q}, self._obs(q, zero), zero, zero, {"far": zero}, info)

    def step(self, state: BraxState, action: Any) -> BraxState:
        q, steps = state.pipeline_state["q"] + action, state.info["steps"] + 1
        far = jnp.max(jnp.abs(q))
        late = (steps >= 6).astype(jnp.float32)
        done = jnp.maximum((far > 3).astype(jnp.float32), late)
        info = state.info | {"steps": steps, "truncation": late * (far <= 3)}
        return BraxState({"q": q}, self._obs(q, steps), -far, done, {"far": far}, info)

    def _obs(self, q: Any, steps: Any) -> Any:
        return {"q": q, "more": (steps[None],)}


def test_brax_style_envs_run() -> None:
    envs = functional(BraxLike(), 5)
    assert envs.action_space == spaces.Box(-1, 1, (2,), np.float32)
    assert set(envs.observation_space.spaces) == {"q", "more"}
    state, obs = envs.init(3)

    def push(params: Any, obs: Any, key: Any) -> Any:
        return jnp.full((5, 2), 0.1).at[0].set(1.0)

    _, kept = envs.rollout(state, push, 8)
    ends = np.asarray(kept.truncated).argmax(0)
    assert ends.tolist()[1:] == [5] * 4
    assert np.asarray(kept.terminated).any(0).tolist() == [True, False, False, False, False]
    np.testing.assert_allclose(kept.obs["q"][3, 1], np.asarray(obs["q"][1]) + 0.3, rtol=1e-5)
    np.testing.assert_allclose(kept.info["far"][:5], -kept.reward[:5])
    assert kept.obs["more"][0][:, 1, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]


def test_brax_envs_that_reset_themselves_are_refused() -> None:
    with pytest.raises(BadEnv, match="AutoResetWrapper"):
        functional(BraxLike(first=True), 2)


FUNC_ENVS = {
    "cartpole": CartPoleFunctional,
    "pendulum": PendulumFunctional,
    "blackjack": BlackjackFunctional,
    "cliff": CliffWalkingFunctional,
}


@pytest.mark.parametrize("name", ["cartpole", "pendulum", "blackjack"])
def test_gymnasiums_functional_envs_run(name: str) -> None:
    env = FUNC_ENVS[name]()
    envs = functional(env, 3, autoreset="same_step", max_episode_steps=7)
    assert envs.observation_space == env.observation_space
    state, _ = envs.init(0)
    state, kept = envs.rollout(state, None, 15)
    assert int(kept.summary.episodes.min()) >= 2
    for t in (0, 7, 14):
        one = np.asarray(row(row(kept.obs, t), 1)).astype(env.observation_space.dtype)
        assert env.observation_space.contains(int(one) if one.ndim == 0 else one)


def test_a_functional_env_that_breaks_its_own_shapes_is_refused() -> None:
    with pytest.raises(BadEnv, match=r"fallen is \(1,\) after a step, and \(\) after a reset"):
        functional(FUNC_ENVS["cliff"](), 3)


def test_gymnasiums_functional_cartpole_moves_as_its_own_transition() -> None:
    env = FUNC_ENVS["cartpole"]()
    envs = functional(env, 4)
    state, obs = envs.init(0)
    after, answer = envs.step(state, np.array([0, 1, 1, 0]))
    own = jax.vmap(lambda s, a: env.transition(s, a, None, env.default_params))(obs, np.array([0, 1, 1, 0]))
    np.testing.assert_allclose(answer.obs, own, rtol=1e-6)
    assert same(after.inner, answer.obs)
    assert answer.reward.tolist() == [1.0] * 4


# ---- refusals ----------------------------------------------------------------------------------------------------


class Shrinks(CountFunctional):
    def step(self, key: Any, state: Any, action: Any) -> Any:
        obs, state, *rest = super().step(key, state, action)
        return obs, state._replace(draw=jnp.zeros(2)), *rest


class Branches(CountFunctional):
    def step(self, key: Any, state: Any, action: Any) -> Any:
        if state.time > 3:
            raise AssertionError
        return super().step(key, state, action)


class ThreeValues(CountFunctional):
    def step(self, key: Any, state: Any, action: Any) -> Any:
        return super().step(key, state, action)[:3]


class NoAction(CountFunctional):
    action_space = None  # type: ignore[assignment]


class OddSpace(CountFunctional):
    action_space = json.JSONDecoder()  # type: ignore[assignment]


class TextSpace(CountFunctional):
    action_space = spaces.Text(4)  # type: ignore[assignment]


class OtherShape(CountFunctional):
    observation_space = spaces.Dict({"time": spaces.Box(0, 9, (2,), np.int32)})


class StepsToOtherShape(CountFunctional):
    def step(self, key: Any, state: Any, action: Any) -> Any:
        obs, *rest = super().step(key, state, action)
        return jax.tree.map(lambda x: jnp.stack([x, x]), obs), *rest


class MissingPart(CountFunctional):
    observation_space = spaces.Dict({"speed": spaces.Box(0, 9, ())})


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (Shrinks(), r"keep the shapes of its state: draw"),
        (Branches(), "cannot be traced"),
        (ThreeValues(), "returns 3 values"),
        (NoAction(), "has no action_space"),
        (OddSpace(), r"action space is a json\.decoder\.JSONDecoder"),
        (TextSpace(), "no space of arrays"),
        (OtherShape(), r"\['time'\] has shape \(2,\), and the observations of its reset \(\)"),
        (StepsToOtherShape(), r"has shape \(.*\), and the observations of its step \(2,"),
        (MissingPart(), r"no part \['speed'\]"),
        (CountFunctional, "give CountFunctional"),
        (object(), "no functional env"),
        (gymnasium.make("CartPole-v1"), "no functional env"),
    ],
)
def test_what_does_not_work_is_refused_at_once(env: Any, says: str) -> None:
    with pytest.raises(BadEnv, match=says):
        functional(env, 2)


def test_an_env_around_a_functional_one_is_refused_with_a_hint() -> None:
    env = gymnasium.make("phys2d/CartPole-v1")
    with pytest.raises(BadEnv, match=r"unwrapped\.func_env"):
        functional(env, 2)
    assert functional(env.unwrapped.func_env, 2).num_envs == 2


def test_calls_that_make_no_sense_are_refused() -> None:
    for wrong in ({"autoreset": "sometimes"}, {"rng": "slow"}, {"resets": "never"}, {"max_episode_steps": 0}):
        with pytest.raises(BadCall, match=next(iter(wrong))):
            functional(CountFunctional(), 2, **wrong)
    with pytest.raises(BadCall, match="num_envs"):
        functional(CountFunctional(), 0)
    envs = functional(CountFunctional(), 2)
    state, _ = envs.init(0)
    with pytest.raises(BadCall, match="seed"):
        envs.init(-1)
    with pytest.raises(BadCall, match="seed"):
        envs.init(jnp.zeros(3))
    with pytest.raises(BadCall, match="collect"):
        envs.rollout(state, None, 3, collect=("rewards",))
    with pytest.raises(BadCall, match="steps"):
        envs.rollout(state, None, 0)
    with pytest.raises(BadCall, match="seeds"):
        envs.reset_rows(state, np.ones(2, bool), np.array([1, 2, 3]))
    with pytest.raises(BadCall, match="seeds"):
        envs.reset_rows(state, np.ones(2, bool), np.array([1, -2]))


def test_steps_and_states_are_pytrees() -> None:
    envs = functional(CountFunctional(), 2)
    state, _ = envs.init(0)
    _, answer = envs.step(state, np.zeros(2, int))
    assert isinstance(jax.tree.map(lambda x: x, state), FunctionalState)
    assert isinstance(jax.tree.map(lambda x: x, answer), FunctionalStep)

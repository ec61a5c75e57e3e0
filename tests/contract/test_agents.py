"""Many agents: the lanes say what a plain loop over the env says, whoever comes and goes, in every autoreset mode."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from agent_envs import Crowd, Masked, Parallel, Scripted, Unequal
from contract.lane_driver import Driver
from shoal.envs.pettingzoo import ParallelLanes, is_aec_env, is_parallel_env
from shoal.errors import BadAction, BadEnv, BadObservation, ResetNeeded
from shoal.support.optional_dependencies import install

MODES = ("next_step", "same_step", "disabled")


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    return bool(np.array_equal(one, other)) and np.shape(one) == np.shape(other)


def compare_reset(env: Any, driver: Driver, observations: Any, infos: Any, ended: Any = ()) -> None:
    """What the lanes say after a reset of the env beside them."""
    out = driver.out
    for lane, name in enumerate(driver.lanes.lane_names):
        there = name in env.agents
        assert out.began[lane] == there
        assert out.present[lane] == (there or name in ended)
        if there:
            assert same(driver.obs(lane), observations[name])
        else:
            assert all((array[lane] == 0).all() for array in out.obs)
        said = dict(driver.infos[lane]) if driver.infos else {}
        said.pop("final_info", None)
        assert said == infos.get(name, {})


def run_beside(make: Callable[[], Any], mode: str, steps: int, legal: Callable[[Any, Any], Any] | None = None) -> int:
    """Step the lanes of one env and a plain loop over another with the same seed and actions; episodes that ended."""
    env, driver, rng = make(), Driver(make(), mode), np.random.default_rng(5)
    names = driver.lanes.lane_names
    driver.reset(3)
    observations, infos = env.reset(seed=3)
    compare_reset(env, driver, observations, infos)
    episodes = 0
    for _ in range(steps):
        if not env.agents:
            episodes += 1
            observations, infos = env.reset()
            if mode == "disabled":
                driver.reset()
            else:
                assert mode == "next_step"
                driver.step(np.array([driver.lanes.single_action_space.sample() for _ in names]))
                assert not driver.out.reward.any()
                assert not (driver.out.terminated | driver.out.truncated).any()
            compare_reset(env, driver, observations, infos)
            continue
        before = list(env.agents)
        own = {name: legal(env, name) if legal else rng.integers(env.action_space(name).n) for name in before}
        rows = np.array([own.get(name, rng.integers(5)) for name in names])  # of the absent: anything
        observations, rewards, terminated, truncated, infos = env.step(own)
        out = driver.step(rows)
        ended = [name for name in before if terminated[name] or truncated[name]]
        over = not env.agents
        for lane, name in enumerate(names):
            assert out.terminated[lane] == (name in ended and terminated[name])
            assert out.truncated[lane] == (name in ended and truncated[name])
            assert out.reward[lane] == (rewards[name] if name in before else 0)
            assert out.has_final[lane] == (mode == "same_step" and name in ended)
            if out.has_final[lane]:
                assert same(driver.final(lane), observations[name])
            if over and mode == "same_step":
                continue
            assert out.present[lane] == (name in before or name in env.agents)
            assert out.began[lane] == (name in env.agents and name not in before)
            if out.present[lane]:
                assert same(driver.obs(lane), observations[name])
            else:
                assert all((array[lane] == 0).all() for array in out.obs)
            assert (driver.infos[lane] if driver.infos else {}) == infos.get(name, {})
        if over and mode == "same_step":
            episodes += 1
            for lane, name in enumerate(names):
                final_info = driver.infos[lane].get("final_info", {}) if driver.infos else {}
                assert final_info == (infos.get(name, {}) if name in ended else {})
            observations, infos = env.reset()
            compare_reset(env, driver, observations, infos, ended)
    return episodes


# ---- beside a plain loop -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1, 4, 8])
def test_agents_that_come_and_go(mode: str, size: int) -> None:
    assert run_beside(lambda: Crowd(size), mode, 1500) > 50


@pytest.mark.parametrize("mode", MODES)
def test_agents_that_end_for_good(mode: str) -> None:
    assert run_beside(lambda: Crowd(5, come_back=False, infos=False), mode, 800) > 50


@pytest.mark.parametrize("mode", MODES)
def test_agents_with_different_spaces(mode: str) -> None:
    def own(env: Any, name: str) -> Any:
        return env.action_space(name).sample()

    assert run_beside(Unequal, mode, 300, own) > 20


def zoo(name: str) -> Any:
    return pytest.importorskip(f"pettingzoo.classic.{name}", reason="PettingZoo and pygame are needed for this env")


@pytest.mark.parametrize("mode", MODES)
def test_pettingzoo_parallel(mode: str) -> None:
    """Rock, paper, scissors: one truncation for both after some rounds."""
    rps = zoo("rps_v2")
    assert run_beside(lambda: rps.parallel_env(max_cycles=7), mode, 200) > 20


@pytest.mark.parametrize("mode", MODES)
def test_pettingzoo_aec(mode: str) -> None:
    """The same from its AEC form, beside PettingZoo's parallel one."""
    rps = zoo("rps_v2")
    made = [lambda: rps.env(max_cycles=7), lambda: rps.parallel_env(max_cycles=7)]  # the lanes' comes second
    assert run_beside(lambda: made.pop()(), mode, 200) > 20


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["tictactoe_v3", "connect_four_v3"])
def test_pettingzoo_turn_by_turn(mode: str, name: str) -> None:
    """Board games: each step is the move of one player. Illegal moves end a game too."""
    game = zoo(name)
    conversions = pytest.importorskip("pettingzoo.utils.conversions")
    made = [game.env, lambda: conversions.turn_based_aec_to_parallel(game.env())]
    rng = np.random.default_rng(0)

    def move(env: Any, player: str) -> Any:
        mask = env.aec_env.observe(player)["action_mask"]
        return rng.choice(np.flatnonzero(mask)) if mask.any() and rng.random() < 0.97 else 0

    assert run_beside(lambda: made.pop()(), mode, 300, move) > 10


# ---- one rule at a time ------------------------------------------------------------------------------------------

NO = {"a": False, "b": False}


def scripted(mode: str, *script: Any, first: Any = ("ab", {"a": 1, "b": 2}), names: str = "ab") -> Driver:
    driver = Driver(Scripted(first, list(script), names), mode)
    driver.reset()
    return driver


def values(driver: Driver) -> list[float]:
    return [float(row[0]) for row in driver.out.obs[0]]


def test_an_agent_ends_and_its_lane_is_absent() -> None:
    driver = scripted(
        "next_step",
        ("b", {"a": 3, "b": 4}, {"a": 1.5, "b": 0.5}, {"a": True, "b": False}, NO, {}),
        ("b", {"b": 5}, {"b": 0.25}, {"b": False}, {"b": False}, {}),
        ("", {"b": 6}, {"b": 0.75}, {"b": False}, {"b": True}, {}),
    )
    out = driver.step(np.array([1, 2]))
    assert (values(driver), out.reward.tolist(), out.present.tolist()) == ([3, 4], [1.5, 0.5], [True, True])
    assert (out.terminated.tolist(), out.truncated.tolist()) == ([True, False], [False, False])
    out = driver.step(np.array([1, 2]))
    assert (values(driver), out.reward.tolist(), out.present.tolist()) == ([0, 5], [0, 0.25], [False, True])
    assert not (out.terminated | out.truncated | out.began).any()
    out = driver.step(np.array([0, 1]))
    assert (out.terminated.tolist(), out.truncated.tolist()) == ([False, False], [False, True])
    assert driver.lanes.env.given == [{"a": 1, "b": 2}, {"b": 2}, {"b": 1}]
    out = driver.step(np.array([0, 1]))
    assert (values(driver), out.began.tolist(), out.present.tolist()) == ([1, 2], [True, True], [True, True])
    assert len(driver.lanes.env.given) == 3, "the action of a reset is ignored"


def test_an_agent_comes_back() -> None:
    driver = scripted(
        "next_step",
        ("b", {"a": 3, "b": 4}, {"a": 1, "b": 1}, {"a": True, "b": False}, NO, {}),
        ("ab", {"a": 7, "b": 4}, {"a": 0, "b": 1}, NO, NO, {}),
        ("ab", {"a": 8, "b": 5}, {"a": 2, "b": 1}, NO, NO, {}),
    )
    driver.step(np.zeros(2, np.int64))
    out = driver.step(np.zeros(2, np.int64))
    assert (values(driver), out.began.tolist(), out.present.tolist()) == ([7, 4], [True, False], [True, True])
    out = driver.step(np.array([2, 1]))
    assert (values(driver), out.began.tolist(), out.reward.tolist()) == ([8, 5], [False, False], [2, 1])
    assert driver.lanes.env.given[-1] == {"a": 2, "b": 1}


def test_an_end_under_same_step_has_the_last_observation_in_final() -> None:
    driver = scripted(
        "same_step",
        ("b", {"a": 3, "b": 4}, {"a": 1, "b": 1}, {"a": True, "b": False}, NO, {}),
        ("", {"b": 9}, {"b": 1}, {"b": True}, {"b": False}, {"b": {"why": "fell"}}),
    )
    out = driver.step(np.zeros(2, np.int64))
    assert (out.has_final.tolist(), driver.final(0).tolist(), out.began.any()) == ([True, False], [3], False)
    out = driver.step(np.zeros(2, np.int64))
    assert (out.has_final.tolist(), driver.final(1).tolist()) == ([False, True], [9])
    assert (values(driver), out.began.tolist(), out.present.tolist()) == ([1, 2], [True, True], [True, True])
    assert out.terminated.tolist() == [False, True], "the lane that begins again was absent, and has not ended now"
    assert driver.infos == [{}, {"final_info": {"why": "fell"}}]


def test_one_that_is_not_in_the_next_episode() -> None:
    driver = scripted(
        "same_step", ("", {"a": 3}, {"a": 2}, {"a": True}, {"a": False}, {}), first=("a", {"a": 1}), names="ab"
    )
    driver.lanes.env.first = ("b", {"b": 5})
    out = driver.step(np.zeros(2, np.int64))
    assert (values(driver), out.began.tolist(), out.present.tolist()) == ([0, 5], [False, True], [True, True])
    assert (out.reward.tolist(), out.terminated.tolist(), driver.final(0).tolist()) == ([2, 0], [True, False], [3])


def test_both_flags_at_once_stay_both() -> None:
    yes = {"a": True, "b": True}
    driver = scripted("next_step", ("", {"a": 3, "b": 4}, {"a": 1, "b": 1}, yes, yes, {}))
    out = driver.step(np.zeros(2, np.int64))
    assert out.terminated.all()
    assert out.truncated.all()


def test_a_reward_without_an_observation_comes_with_the_next_one() -> None:
    driver = scripted(
        "next_step",
        ("ab", {"b": 4}, {"a": 1.5, "b": 1}, NO, NO, {}),
        ("ab", {"b": 5}, {"a": 0.5, "b": 1}, NO, NO, {}),
        ("ab", {"a": 6, "b": 7}, {"a": 0.25, "b": 1}, NO, NO, {}),
    )
    for _ in range(2):
        out = driver.step(np.zeros(2, np.int64))
        assert (out.present.tolist(), out.reward.tolist()) == ([False, True], [0, 1])
    out = driver.step(np.zeros(2, np.int64))
    assert (out.reward.tolist(), out.began.any(), values(driver)) == ([2.25, 1], False, [6, 7])
    assert all(set(given) == {"a", "b"} for given in driver.lanes.env.given), "it lives, and acts"


def test_an_end_without_an_observation_or_without_a_word() -> None:
    driver = scripted(
        "next_step",
        ("c", {"c": 6}, {"a": 1.5, "c": 1}, {"a": False, "c": False}, {"a": True, "c": False}, {}),
        first=("abc", {"a": 1, "b": 2, "c": 3}),
        names="abc",
    )
    out = driver.step(np.zeros(3, np.int64))
    assert (values(driver), out.present.tolist(), out.reward.tolist()) == ([0, 0, 6], [True] * 3, [1.5, 0, 1])
    assert out.truncated.tolist() == [True, False, False]
    assert out.terminated.tolist() == [False, True, False], "who leaves without a word has terminated"


def test_a_team_that_stays_in_its_list_after_all_have_ended() -> None:
    yes = {"a": True, "b": True}
    driver = scripted("next_step", ("ab", {"a": 3, "b": 4}, {"a": 1, "b": 1}, yes, NO, {}))
    driver.step(np.zeros(2, np.int64))
    assert driver.step(np.zeros(2, np.int64)).began.all()


def test_stepping_without_a_reset_is_refused_where_the_caller_resets() -> None:
    driver = scripted("disabled", ("", {"a": 3, "b": 4}, {"a": 1, "b": 1}, NO, {"a": True, "b": True}, {}))
    driver.step(np.zeros(2, np.int64))
    with pytest.raises(ResetNeeded, match="reset"):
        driver.step(np.zeros(2, np.int64))
    assert driver.reset().began.all()


# ---- what goes in ------------------------------------------------------------------------------------------------


def test_seeds_and_options() -> None:
    driver = Driver(Crowd(), "next_step")
    driver.reset(7, {"map": "small"})
    assert (driver.lanes.env.seeds, driver.lanes.env.options) == ([7], {"map": "small"})


def test_actions_are_copies_of_the_agents_own_type() -> None:
    driver = Driver(Masked(), "next_step")
    driver.reset(0)
    actions = np.array([[0.1, 0.2], [0.3, 0.4]], np.float32)
    driver.step(actions)
    actions[:] = 9
    kept = driver.lanes.env.kept[0]
    assert kept["y"].tolist() == pytest.approx([0.3, 0.4])
    assert (kept["x"].dtype, kept["x"].shape) == (np.float32, (2,))


def test_an_action_beyond_an_agents_own_is_refused_by_name() -> None:
    driver = Driver(Unequal(), "next_step")
    driver.reset(0)
    assert driver.lanes.single_action_space == spaces.Discrete(6, start=-1)
    with pytest.raises(BadAction, match=r"'small'.*n=2.*0 to 1.*found 4"):
        driver.step(np.array([4, 4, 0]))
    with pytest.raises(BadAction, match=r"'large'.*n=5.*found -1"):
        driver.step(np.array([0, -1, -1]))
    driver.step(np.array([1, 4, -1]))
    assert driver.lanes.env.acted == [{"small": 1, "large": 4, "middle": -1}]


# ---- spaces ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_masks_of_legal_actions_are_a_dict_like_any_other(mode: str) -> None:
    env, driver = Masked(), Driver(Masked(), mode)
    assert driver.lanes.single_observation_space == env.observation_space("x")
    driver.reset(1)
    observations, _ = env.reset(seed=1)
    actions = np.ones((2, 2), np.float32)
    for _ in range(4):
        for lane, name in enumerate("xy"):
            assert same(driver.obs(lane), observations[name])
        driver.step(actions)
        observations, *_ = env.step(dict(zip("xy", actions, strict=True)))


def test_padded_rows_are_zeros_beyond_an_agents_own() -> None:
    driver = Driver(Unequal(), "next_step")
    space = driver.lanes.single_observation_space
    assert (space.shape, space.dtype) == ((5,), np.float32)
    assert (space.low.tolist(), space.high.tolist()) == ([-2] * 5, [3, 3, 3, 0.5, 0.5])
    driver.reset(0)
    for _ in range(3):
        last = driver.lanes.env.last
        assert np.array_equal(driver.out.obs[0][0], [*last["small"], 0, 0, 0])
        assert np.array_equal(driver.out.obs[0][1], last["large"])
        driver.step(np.array([0, 0, 0]))
    assert driver.lanes.agent_spaces["middle"] == (Unequal.observation_by_agent["middle"], spaces.Discrete(3, start=-1))


class Odd(Crowd):
    """Gives what it is told to."""

    def __init__(self, value: Any):
        super().__init__(2, infos=False)
        self.value = value

    def _observe(self, name: str, action: int) -> Any:
        return self.value if self.time else super()._observe(name, action)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.zeros(1, np.float32), r"agent_\d'.*shape \(4,\).*\(1,\)"),
        (np.zeros((2, 4), np.float32), r"agent_\d'.*shape \(4,\).*\(2, 4\)"),
        (np.float32(1), r"agent_\d'.*shape \(4,\).*\(\)"),
        ("text", r"agent_\d'"),
        ({"a": 1}, r"agent_\d'"),
    ],
)
def test_an_observation_that_does_not_fit_is_refused_by_name(value: Any, words: str) -> None:
    driver = Driver(Odd(value), "next_step")
    driver.reset(0)
    with pytest.raises(BadObservation, match=words):
        driver.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("value", [np.arange(4.0), [0, 1, 2, 3], np.arange(4), np.arange(8, dtype=np.float32)[::2] / 2])
def test_an_observation_of_another_type_is_cast(value: Any) -> None:
    driver = Driver(Odd(value), "next_step")
    driver.reset(0)
    out = driver.step(np.zeros(2, np.int64))
    assert out.obs[0][out.present].tolist() == [[0, 1, 2, 3]] * int(out.present.sum())


# ---- what is an env of this kind ---------------------------------------------------------------------------------


def test_envs_are_known_by_their_methods() -> None:
    class Turns(Parallel):
        observation_by_agent = action_by_agent = {"a": spaces.Discrete(2)}

        def step(self, action: Any) -> None: ...
        def reset(self) -> None: ...
        def last(self) -> None: ...
        def agent_iter(self) -> None: ...

    class Single:
        observation_space = action_space = spaces.Discrete(2)

        def step(self, action: Any) -> None: ...
        def reset(self) -> None: ...

    assert (is_parallel_env(Crowd()), is_aec_env(Crowd())) == (True, False)
    assert (is_parallel_env(Turns()), is_aec_env(Turns())) == (False, True)
    assert not is_parallel_env(Single())
    assert not is_parallel_env(Crowd)
    assert not is_parallel_env(None)


def test_aec_envs_without_pettingzoo(monkeypatch: pytest.MonkeyPatch) -> None:
    class Turns(Crowd):
        def last(self) -> None: ...
        def agent_iter(self) -> None: ...

    monkeypatch.setitem(sys.modules, "pettingzoo.utils.conversions", None)
    with pytest.raises(ImportError, match=re.escape(install("pettingzoo"))):
        ParallelLanes(Turns())


def test_envs_that_cannot_have_lanes() -> None:
    nameless = Crowd()
    del nameless.possible_agents
    with pytest.raises(BadEnv, match="possible_agents"):
        ParallelLanes(nameless)
    twice = Crowd()
    twice.possible_agents = ["agent_0", "agent_0"]
    with pytest.raises(BadEnv, match="twice"):
        ParallelLanes(twice)
    mixed = Crowd(2)
    mixed.action_by_agent = {"agent_0": spaces.Discrete(2), "agent_1": spaces.Box(0, 1, (2,))}
    with pytest.raises(BadEnv, match=r"'agent_0' has Discrete\(2\).*wrapper"):
        ParallelLanes(mixed)
    graph = Crowd(2)
    graph.observation_by_agent = dict.fromkeys(graph.possible_agents, spaces.Graph(spaces.Discrete(2), None))
    with pytest.raises(BadEnv, match=r"observation space.*wrapper"):
        ParallelLanes(graph)


def test_close_and_env() -> None:
    driver = Driver(Crowd(), "next_step")
    env = driver.lanes.env
    driver.lanes.close()
    assert env.closed == 1

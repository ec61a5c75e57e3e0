"""CheckNan: says which env, which leaf, which step, and whether the action was the cause."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from shoal.wrappers import CheckNan, wrap
from wrappers.kit import GYM_MODES, MANY, MODES, NoisyEnv, play

LEAVES = spaces.Dict(
    numbers=spaces.Box(-np.inf, np.inf, (3,), np.float64),
    image=spaces.Box(0, 255, (2, 2, 3), np.uint8),
    pair=spaces.Tuple((spaces.Discrete(3), spaces.Box(-np.inf, np.inf, (2,), np.float32))),
)


class SickEnv(gymnasium.Env[Any, Any]):
    """Env `sick` (by its seed) has one wrong number in a leaf of one step of an episode; episodes have three steps."""

    def __init__(self, leaf: str = "", episode: int = 0, step: int = 0, sick: int = 1, value: float = np.nan):
        self.observation_space, self.action_space = LEAVES, spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.place, self.leaf, self.sick, self.value = (episode, step), leaf, sick, value
        self.me, self.episode = -1, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.me = self.me if seed is None else seed
        self.episode, self.steps = self.episode + 1, 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        reward = self.value if self._now("reward") else 1.0
        obs = self._observation()
        obs["numbers"][2] += action.sum()
        return obs, reward, self.steps == 3, False, {}

    def _now(self, leaf: str) -> bool:
        return self.me == self.sick and (self.episode, self.steps) == self.place and self.leaf == leaf

    def _observation(self) -> Any:
        numbers, others = np.zeros(3), np.zeros(2, np.float32)
        if self._now("numbers"):
            numbers[1] = self.value
        if self._now("pair"):
            others[0] = self.value
        return {"numbers": numbers, "image": np.zeros((2, 2, 3), np.uint8), "pair": (1, others)}


def step_on(envs: Any, mode: str, turns: int = 10) -> None:
    """Harmless actions; whose episode is over is reset."""
    still = np.zeros((envs.num_envs, 2), np.float32)
    envs.reset(seed=0)
    for _ in range(turns):
        answer = envs.step(still)
        over = np.flatnonzero(answer[2] | answer[3])
        if mode == "disabled" and len(over):
            if hasattr(envs, "recv"):
                envs.reset(over)
            else:
                envs.reset(options={"reset_mask": answer[2] | answer[3]})


# leaf, episode, step -> what must be said
PLACES: dict[str, tuple[tuple[str, int, int], str]] = {
    "a leaf": (("numbers", 0, 2), r"observation\['numbers'\] of env 1 is nan at \[1\], in step 2 of"),
    "a leaf in a tuple": (("pair", 0, 1), r"observation\['pair'\]\[1\] of env 1 is nan at \[0\], in step 1 of"),
    "the first reset": (("numbers", 0, 0), r"observation\['numbers'\] of env 1 is nan at \[1\], in its reset"),
    "the next reset": (("numbers", 1, 0), r"observation\['numbers'\] of env 1 is nan at \[1\], in its reset"),
    "the last observation": (("numbers", 0, 3), r"observation\['numbers'\] of env 1 is nan at \[1\], in step 3 of"),
    "the next episode": (("pair", 1, 1), r"observation\['pair'\]\[1\] of env 1 is nan at \[0\], in step 1 of"),
    "the reward": (("reward", 0, 2), r"reward of env 1 is nan, in step 2 of"),
    "the last reward": (("reward", 1, 3), r"reward of env 1 is nan, in step 3 of"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("host", ["pool", "gymnasium"])
def test_it_says_where_the_number_is(name: str, mode: str, host: str) -> None:
    place, text = PLACES[name]
    make = partial(SickEnv, *place)
    raw: Any
    if host == "pool":
        raw = shoal.Pool(make, 3, backend="serial", autoreset=mode)  # type: ignore[arg-type]
    else:
        raw = gymnasium.vector.SyncVectorEnv([make] * 3, autoreset_mode=GYM_MODES[mode])
    envs = wrap(raw, CheckNan(raise_exception=True))
    try:
        with pytest.raises(shoal.BadObservation, match=f"{text}.*the env itself is to blame"):
            step_on(envs, mode)
    finally:
        envs.close()


def test_a_reset_is_not_blamed_on_an_action() -> None:
    """Under same_step the new episode's first observation comes with the old one's last action."""
    make = partial(SickEnv, "numbers", 1, 0)
    with wrap(shoal.Pool(make, 2, backend="serial", autoreset="same_step"), CheckNan(raise_exception=True)) as pool:
        with pytest.raises(shoal.BadObservation, match=r"in its reset.*no action"):
            step_on(pool, "same_step")


def test_it_names_the_other_envs_too() -> None:
    """And no more than a few of them."""

    class AllSick(SickEnv):
        def _now(self, leaf: str) -> bool:
            return leaf == "numbers" and self.steps == 1 and self.me % 2 == 1

    with wrap(shoal.Pool(AllSick, 30, backend="serial"), CheckNan(raise_exception=True)) as pool:
        with pytest.raises(ValueError, match=r"of env 1 is .*envs \[3, 5, 7, 9, 11, 13, 15, 17\]"):
            step_on(pool, "next_step")


def test_partial_batches_name_the_right_env_and_step() -> None:
    make = partial(SickEnv, "numbers", 1, 2, sick=3)
    pool = shoal.Pool(make, 5, backend="processes", num_workers=2, batch_size=2)
    with wrap(pool, CheckNan(raise_exception=True)) as envs:
        envs.async_reset(seed=0)

        def go_on() -> None:
            for _ in range(100_000):  # the other worker may answer many times before this one is awake
                batch = envs.recv(timeout=60)
                envs.send(np.zeros((2, 2), np.float32), batch.env_id)

        with pytest.raises(shoal.BadObservation, match=r"'numbers'\] of env 3 is nan at \[1\], in step 2 of"):
            go_on()


# ---- actions -------------------------------------------------------------------------------------------------


def actions_for(count: int, bad: int, value: float = np.nan) -> Any:
    actions = np.zeros((count, 2), np.float32)
    actions[bad, 1] = value
    return actions


def test_a_bad_action_is_found_before_any_env_sees_it() -> None:
    with wrap(shoal.Pool(SickEnv, 3, backend="serial"), CheckNan(raise_exception=True)) as pool:
        pool.reset(seed=0)
        with pytest.raises(shoal.BadObservation, match=r"the action of env 2 is nan at \[1\].*policy"):
            pool.step(actions_for(3, 2))
        assert pool.step(actions_for(3, 2, 0.0)).episode_length.tolist() == [1, 1, 1], "nothing had moved"


@pytest.mark.parametrize("mode", MODES)
def test_a_bad_action_has_the_number_of_the_step_that_it_is_for(mode: str) -> None:
    """The first action is that of step 1, as is the observation that it leads to."""
    with wrap(shoal.Pool(SickEnv, 2, backend="serial", autoreset=mode), CheckNan(raise_exception=True)) as pool:  # type: ignore[arg-type]
        pool.reset(seed=0)
        with pytest.raises(shoal.BadObservation, match="in step 1 of"):
            pool.step(actions_for(2, 0))
        pool.step(actions_for(2, 0, 0.0))
        with pytest.raises(shoal.BadObservation, match="in step 2 of"):
            pool.step(actions_for(2, 0))


def test_an_action_is_said_to_be_the_cause() -> None:
    """A warning goes on; the env then answers with what it was given."""
    raw = shoal.Pool(SickEnv, 3, backend="serial", check_actions="discrete")
    with wrap(raw, CheckNan(warn_once=False)) as pool:
        pool.reset(seed=0)
        with pytest.warns(UserWarning, match="env 1 is nan") as caught:
            pool.step(actions_for(3, 1))
        texts = [str(one.message) for one in caught]
        assert len(texts) == 2
        assert "the action of env 1 is nan at [1]" in texts[0]
        assert "the observation['numbers'] of env 1 is nan at [2]" in texts[1]
        assert "its last action was [0.0, nan]: that is the likely cause" in texts[1]


def test_actions_given_as_a_list_are_known_by_their_env() -> None:
    """A pool takes a list of each env's own array, and so does its wrapper."""
    with wrap(shoal.Pool(SickEnv, 2, backend="serial"), CheckNan(raise_exception=True)) as pool:
        pool.reset(seed=0)
        pool.step([np.zeros(2, np.float32), np.zeros(2, np.float32)])
        with pytest.raises(shoal.BadObservation, match=r"the action of env 1 is nan at \[0\]"):
            pool.step([np.zeros(2, np.float32), np.array([np.nan, 0], np.float32)])


def test_actions_of_some_envs_are_known_by_their_env() -> None:
    with wrap(shoal.Pool(SickEnv, 4, backend="serial", batch_size=2), CheckNan(raise_exception=True)) as pool:
        pool.async_reset(seed=0)
        pool.recv(), pool.recv()
        with pytest.raises(shoal.BadObservation, match="the action of env 1 is nan"):
            pool.send(actions_for(2, 1), [3, 1])
        pool.send(actions_for(2, 1, 0.0), [3, 1])
        assert pool.recv().env_id.tolist() == [1, 3]


def test_actions_in_dicts_are_known_by_their_leaf() -> None:
    class DictActions(SickEnv):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = spaces.Dict(left=spaces.Box(-1.0, 1.0, (2,)), right=spaces.Discrete(3))  # type: ignore[assignment]

        def step(self, action: Any) -> Any:
            return super().step(action["left"])

    with wrap(shoal.Pool(DictActions, 2, backend="serial"), CheckNan(raise_exception=True)) as pool:
        pool.reset(seed=0)
        good = {"left": np.zeros((2, 2), np.float32), "right": np.zeros(2, np.int64)}
        pool.step(good)
        with pytest.raises(shoal.BadObservation, match=r"the action\['left'\] of env 0 is nan at \[1\]"):
            pool.step({**good, "left": actions_for(2, 0)})


WRONG: dict[str, tuple[Any, Any]] = {
    "a number for all": (0.0, None),
    "too few": (np.zeros((1, 2), np.float32), None),
    "no such env": (np.zeros((1, 2), np.float32), [7]),
    "an env below zero": (np.zeros((1, 2), np.float32), [-1]),
    "no number": (np.zeros((1, 2), np.float32), [0.5]),
    "words": ("left", None),
    "nothing": (None, None),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_actions_are_refused_as_without_it(name: str) -> None:
    """What is wrong with them is for the pool to say."""
    actions, ids = WRONG[name]
    with shoal.Pool(SickEnv, 2, backend="serial") as raw:
        raw.reset(seed=0)
        pool = wrap(raw, CheckNan(raise_exception=True))
        with pytest.raises(shoal.BadAction) as expected:
            raw.send(actions, ids)
        with pytest.raises(shoal.BadAction) as found:
            pool.send(actions, ids)
        assert str(found.value) == str(expected.value)


# ---- settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.inf, -np.inf])
@pytest.mark.parametrize("check_inf", [False, True])
@pytest.mark.parametrize("leaf", ["numbers", "reward"])
def test_infinite_values_are_looked_for_on_request(value: float, check_inf: bool, leaf: str) -> None:
    make = partial(SickEnv, leaf, 0, 1, value=value)
    with wrap(shoal.Pool(make, 3, backend="serial"), CheckNan(True, check_inf=check_inf)) as pool:
        if check_inf:
            with pytest.raises(shoal.BadObservation, match=f"of env 1 is {value}"):
                step_on(pool, "next_step", 2)
        else:
            step_on(pool, "next_step", 2)


@pytest.mark.parametrize(("once", "count"), [(True, 1), (False, 4)])
def test_warnings_come_once_or_always(once: bool, count: int) -> None:
    class AlwaysSick(SickEnv):
        def _now(self, leaf: str) -> bool:
            return leaf == "numbers" and self.me == 1

    with wrap(shoal.Pool(AlwaysSick, 3, backend="serial"), CheckNan(warn_once=once)) as pool:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step_on(pool, "next_step", 3)
        assert len(caught) == count


def test_large_numbers_are_no_infinite_ones() -> None:
    """Their sum may be."""

    class Large(NoisyEnv):
        def _draw(self, space: Any) -> Any:
            return np.full(space.shape, np.finfo(space.dtype).max)

    for dtype in (np.float16, np.float32, np.float64):
        make = partial(Large, spaces.Box(-np.inf, np.inf, (4,), dtype))
        with wrap(shoal.Pool(make, 2, backend="serial"), CheckNan(True)) as pool:
            list(play(pool, 3))


def test_sound_numbers_pass_untouched() -> None:
    with shoal.Pool(partial(NoisyEnv, MANY), 3, backend="serial", copy=True) as raw:
        pool = wrap(raw, CheckNan(True))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(list(play(pool, 10))) == 11
        assert pool.single_observation_space == raw.single_observation_space

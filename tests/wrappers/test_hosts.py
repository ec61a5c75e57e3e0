"""wrap: pools and vector envs stay what they were, but for what the transforms change."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from agent_envs import Crowd
from envs import INFO_KINDS, SPACES, CountEnv, FailEnv, InfoEnv, SpaceEnv
from shoal.wrappers import (
    CheckNan,
    FrameStack,
    MonitorEpisodes,
    Normalize,
    Rows,
    Transform,
    WrappedPool,
    WrappedVectorEnv,
    wrap,
)
from wrappers.kit import GYM_MODES, HOSTS, MODES, VECTOR, NoisyEnv, action, assert_same, follow, is_pool, play


class Seen(Transform):
    """Changes nothing, and keeps everything."""

    def __init__(self) -> None:
        self.rows: list[Rows] = []
        self.sent: list[tuple[Any, list[int]]] = []
        self.closed = 0

    def send(self, actions: Any, ids: Any) -> None:
        self.sent.append((copy.deepcopy(actions), ids.tolist()))

    def apply(self, rows: Rows) -> None:
        self.rows.append(copy.deepcopy(rows))

    def close(self) -> None:
        self.closed += 1


# ---- what transforms see -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", HOSTS)
def test_transforms_see_what_a_plain_loop_sees(host: str, mode: str) -> None:
    envs = wrap(HOSTS[host](NoisyEnv, mode), seen := Seen())
    try:
        for answer, rows in follow(envs, NoisyEnv, 25):
            found = seen.rows[-1]
            assert found.ids.tolist() == sorted(answer.ids) == answer.ids
            assert found.whole == (len(answer.ids) == envs.num_envs)
            assert found.reward.tolist() == [row.reward for row in rows]
            assert found.began.tolist() == [row.began for row in rows]
            assert found.done.tolist() == [row.done for row in rows]
            assert found.stepped.tolist() == [row.done or not row.began for row in rows]
            assert set(found.final_obs) == {i for i, row in enumerate(rows) if row.final_obs is not None}
            for i, row in enumerate(rows):
                assert_same(found.obs[i], row.obs)
                assert_same(answer.obs[i], row.obs)
                if i in found.final_obs:
                    assert_same(found.final_obs[i], row.final_obs)
    finally:
        envs.close()
    assert seen.closed == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", HOSTS)
def test_transforms_see_the_info_of_an_episodes_last_step(host: str, mode: str) -> None:
    """Whatever the API calls it: under same_step, the info of the row is that of the next episode's reset."""
    envs = wrap(HOSTS[host](NoisyEnv, mode), seen := Seen())
    try:
        for _, rows in follow(envs, NoisyEnv, 25):
            for i, row in enumerate(rows):
                if row.done:
                    assert seen.rows[-1].infos[i]["score"] == (row.final_info or row.info)["score"]
    finally:
        envs.close()


def test_transforms_see_actions_with_their_ids() -> None:
    with wrap(shoal.Pool(NoisyEnv, 4, backend="serial", batch_size=2), seen := Seen()) as pool:
        pool.async_reset(seed=0)
        pool.recv(), pool.recv()
        pool.send(np.ones((2, 2), np.float32), [3, 0])
        assert seen.sent[-1][1] == [3, 0]
        pool.send(np.zeros((1, 2), np.float32), 1)
        assert seen.sent[-1][1] == [1]


# ---- what stays ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [kind for kind in INFO_KINDS if kind != "empty"])
def test_infos_of_vector_envs_are_kept(kind: str, mode: str) -> None:
    """All of them, in the same arrays; the wrapper only adds."""
    make = partial(InfoEnv, kind)

    def made() -> Any:
        return gymnasium.vector.SyncVectorEnv([make] * 3, autoreset_mode=GYM_MODES[mode])

    raw, wrapped = made(), wrap(made(), FrameStack(2), MonitorEpisodes())
    raw.reset(seed=0), wrapped.reset(seed=0)
    for _ in range(12):
        *_, infos = raw.step(np.zeros(3, np.int64))
        *_, ours = wrapped.step(np.zeros(3, np.int64))
        assert set(ours) - {"episode", "_episode"} == set(infos)
        for key in set(infos) - {"final_obs"}:
            assert repr(ours[key]) == repr(infos[key]), key
        over = raw._terminations | raw._truncations
        if mode == "disabled" and over.any():
            for envs in (raw, wrapped):
                envs.reset(options={"reset_mask": over.copy()})
    raw.close(), wrapped.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_infos_of_pools_are_kept(mode: str, backend: str) -> None:
    options: dict[str, Any] = {"backend": backend, "num_workers": 2 if backend == "processes" else None}
    with (
        shoal.Pool(NoisyEnv, 3, autoreset=mode, **options) as raw,  # type: ignore[arg-type]
        wrap(shoal.Pool(NoisyEnv, 3, autoreset=mode, **options), Normalize(), MonitorEpisodes()) as wrapped,  # type: ignore[arg-type]
    ):
        for theirs, ours in zip(play(raw, 15), play(wrapped, 15), strict=True):
            assert set(ours.infos) == set(theirs.infos)
            for row, info in theirs.infos.items():
                added = set(ours.infos[row]) - set(info)
                assert added == ({"episode"} if theirs.terminated[row] or theirs.truncated[row] else set())
                for key in set(info) - {"final_obs"}:
                    assert ours.infos[row][key] == info[key]


def test_the_rest_of_a_batch_is_kept() -> None:
    with shoal.Pool(partial(CountEnv, 3), 3, backend="serial") as raw, \
            wrap(shoal.Pool(partial(CountEnv, 3), 3, backend="serial"), FrameStack(2)) as wrapped:  # fmt: skip
        raw.reset(seed=0), wrapped.reset(seed=0)
        for _ in range(9):
            one, other = raw.step([0, 1, 2]), wrapped.step([0, 1, 2])
            for name in ("reward", "terminated", "truncated", "env_id", "mask", "began", "episode_return"):
                assert_same(getattr(other, name), getattr(one, name))


def test_everything_else_is_the_pools_own() -> None:
    with wrap(shoal.Pool(CountEnv, 3, backend="serial", autoreset="same_step"), FrameStack(2)) as pool:
        assert isinstance(pool, WrappedPool)
        assert (pool.num_envs, pool.batch_size, pool.autoreset) == (3, 3, "same_step")
        pool.reset(seed=0)
        assert pool.call("add", 1) == [2, 2, 2]
        assert pool.single_action_space.n == 4
        assert "FrameStack" in repr(pool)
        with pytest.raises(AttributeError):
            pool.nothing_like_it  # noqa: B018
    assert pool.closed


def test_everything_else_is_the_vector_envs_own() -> None:
    envs = wrap(shoal.make(CountEnv, 2, backend="serial"), FrameStack(2))
    assert isinstance(envs, WrappedVectorEnv)
    assert isinstance(envs, gymnasium.vector.VectorEnv)
    assert (envs.num_envs, envs.single_action_space.n, envs.metadata["kind"]) == (2, 4, "counting")
    assert envs.observation_space.shape == (2, 6)
    assert envs.reset(seed=0)[0].shape == (2, 6)
    envs.close()
    assert envs.closed


def test_gymnasiums_own_wrappers_go_around_and_between() -> None:
    raw = gymnasium.vector.SyncVectorEnv([partial(CountEnv, 3)] * 2)
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(wrap(raw, FrameStack(2)))
    envs.reset(seed=0)
    for _ in range(3):
        *_, infos = envs.step(np.zeros(2, np.int64))
    assert infos["episode"]["l"].tolist() == [3, 3]
    again = wrap(gymnasium.wrappers.vector.RescaleAction(  # a wrapper in the middle
        gymnasium.vector.SyncVectorEnv([NoisyEnv] * 2), -1.0, 1.0), MonitorEpisodes(), FrameStack(2))  # fmt: skip
    assert again.reset(seed=0)[0].shape == (2, 6)
    for turn in range(20):
        *_, infos = again.step(np.stack([action(i, turn) for i in range(2)]))
        if "episode" in infos:
            break
    assert infos["_episode"].any()
    envs.close(), again.close()


@pytest.mark.parametrize("kind", ["pool", "gymnasium"])
def test_wrapped_envs_can_be_wrapped_again(kind: str) -> None:
    raw: Any = shoal.Pool(CountEnv, 2, backend="serial") if kind == "pool" else shoal.make(CountEnv, 2)
    first, second = Seen(), Seen()
    envs = wrap(wrap(raw, first, FrameStack(2)), FrameStack(3), second)
    assert envs.single_observation_space.shape == (18,)
    envs.reset(seed=0)
    envs.step(np.zeros(2, np.int64))
    assert (first.rows[-1].obs.shape, second.rows[-1].obs.shape) == ((2, 3), (2, 18))
    envs.close()
    assert (first.closed, second.closed) == (1, 1)


def test_no_transforms_change_nothing() -> None:
    with wrap(shoal.Pool(CountEnv, 2, backend="serial")) as pool:
        assert pool.reset(seed=5).obs.tolist() == [[5, 0, 0], [6, 0, 0]]


@pytest.mark.parametrize("space", ["nested", "tuple", "discrete", "text", "graph", "custom"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["pool", "gymnasium"])
def test_observations_of_any_space_pass_through(space: str, mode: str, kind: str) -> None:
    """Transforms that do not care for them, resets of some envs included."""
    make = partial(SpaceEnv, SPACES[space])

    def made() -> Any:
        if kind == "pool":
            return shoal.Pool(make, 3, backend="serial", autoreset=mode)  # type: ignore[arg-type]
        return gymnasium.vector.SyncVectorEnv([make] * 3, autoreset_mode=GYM_MODES[mode])

    raw, wrapped = made(), wrap(made(), CheckNan(True), MonitorEpisodes(), Normalize(norm_obs=False))
    for envs in (raw, wrapped):
        envs.seen = [repr(envs.reset(seed=0)[0])]
        for _ in range(8):
            obs, _, terminated, truncated, *_ = envs.step(np.ones(3, np.int64))
            envs.seen.append(repr(obs))
            over = terminated | truncated
            if mode == "disabled" and over.any():
                again = envs.reset(np.flatnonzero(over)) if is_pool(envs) else envs.reset(options={"reset_mask": over})
                envs.seen.append(repr(again[0]))
    assert wrapped.seen == raw.seen
    raw.close(), wrapped.close()


# ---- resets of some envs -------------------------------------------------------------------------------------


def masked(*which: bool) -> dict[str, Any]:
    return {"reset_mask": np.array(which)}


VECTOR_ENVS: dict[str, Any] = {
    "gymnasium": lambda make, mode: gymnasium.vector.SyncVectorEnv([make] * 3, autoreset_mode=GYM_MODES[mode]),
    "gymnasium, no copies": lambda make, mode: gymnasium.vector.SyncVectorEnv(
        [make] * 3, copy=False, autoreset_mode=GYM_MODES[mode]
    ),
    "shoal.make": lambda make, mode: shoal.make(make, 3, backend="serial", autoreset=mode),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", VECTOR_ENVS)
def test_a_masked_reset_leaves_the_other_envs_alone(host: str, mode: str) -> None:
    """Their stacks, returns and statistics go on."""
    monitor, stack = MonitorEpisodes(), FrameStack(2)
    envs = wrap(VECTOR_ENVS[host](partial(CountEnv, 4), mode), monitor, stack)
    envs.reset(seed=0)
    envs.step(np.zeros(3, np.int64))
    before = envs.step(np.zeros(3, np.int64))[0].copy()
    obs, _ = envs.reset(options=masked(False, True, False))
    assert obs[[0, 2]].tolist() == before[[0, 2]].tolist()
    assert obs[1].tolist() == [0, 0, 0, 1, 1, 0]
    obs = envs.step(np.zeros(3, np.int64))[0]
    assert obs.tolist() == [[0, 0, 2, 0, 0, 3], [1, 1, 0, 1, 1, 1], [2, 0, 2, 2, 0, 3]]
    *_, infos = envs.step(np.zeros(3, np.int64))
    assert infos["_episode"].tolist() == [True, False, True]
    assert list(monitor.last_lengths) == [4, 4]
    envs.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", VECTOR_ENVS)
def test_the_first_reset_may_have_a_mask(host: str, mode: str) -> None:
    envs = wrap(VECTOR_ENVS[host](CountEnv, mode), FrameStack(2))
    obs, _ = envs.reset(seed=3, options=masked(True, True, True))
    assert obs.tolist() == [[0, 0, 0, 3, 0, 0], [0, 0, 0, 4, 0, 0], [0, 0, 0, 5, 0, 0]]
    envs.close()


def test_a_mask_learns_from_nobody_else() -> None:
    raw = gymnasium.vector.SyncVectorEnv([partial(NoisyEnv, VECTOR)] * 3, autoreset_mode=GYM_MODES["disabled"])
    envs = wrap(raw, normalize := Normalize())
    envs.reset(seed=0)
    count = normalize.obs_rms.count
    envs.reset(options=masked(True, False, False))
    assert normalize.obs_rms.count == pytest.approx(count + 1)
    envs.close()


def test_a_wrong_mask_is_refused_by_the_envs() -> None:
    for make in VECTOR_ENVS.values():
        envs = wrap(make(CountEnv, "disabled"), FrameStack(2))
        envs.reset(seed=0)
        for mask in (np.zeros(3, np.bool_), np.ones(2, np.bool_), np.ones(3), [True, True, True]):
            with pytest.raises((TypeError, ValueError), match="reset_mask"):
                envs.reset(options={"reset_mask": mask})
        envs.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", VECTOR_ENVS)
def test_results_never_change_afterwards(host: str, mode: str) -> None:
    envs = wrap(VECTOR_ENVS[host](partial(CountEnv, 3), mode), FrameStack(2), Normalize(), MonitorEpisodes())
    held = [(answer, copy.deepcopy(answer)) for answer in play_counts(envs, 9)]
    envs.close()
    for answer, kept in held:
        assert repr(answer) == repr(kept)


def play_counts(envs: Any, turns: int) -> Any:
    mode = envs.metadata["autoreset_mode"]
    yield envs.reset(seed=0)
    for _ in range(turns):
        answer = envs.step(np.zeros(envs.num_envs, np.int64))
        yield answer
        over = answer[2] | answer[3]
        if mode == GYM_MODES["disabled"] and over.any():
            yield envs.reset(options={"reset_mask": over})


# ---- snapshots -----------------------------------------------------------------------------------------------


def test_what_restore_gives_goes_through_the_transforms() -> None:
    """Or restore is refused: a batch of another shape than the space says helps nobody."""
    with wrap(shoal.Pool(CountEnv, 2, backend="serial"), FrameStack(2)) as pool:
        pool.reset(seed=0)
        pool.step([0, 0])
        snapshot = pool.snapshot()
        try:
            batch = pool.restore(snapshot)
        except (NotImplementedError, shoal.ShoalError):
            return
        assert batch.obs.shape == pool.observation_space.shape


# ---- mistakes ------------------------------------------------------------------------------------------------


def test_what_cannot_be_wrapped_is_refused_with_a_reason() -> None:
    with pytest.raises(TypeError, match=r"Pool.*vector env.*CountEnv"):
        wrap(CountEnv(), FrameStack(2))
    with shoal.Pool(CountEnv, 1, backend="serial") as pool:
        with pytest.raises(TypeError, match=r"FrameStack\(4\)"):
            wrap(pool, FrameStack)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"FrameStack\(4\)"):
            wrap(pool, [FrameStack(2)])  # type: ignore[arg-type]


def test_a_transform_belongs_to_one_host() -> None:
    stack = FrameStack(2)
    with shoal.Pool(CountEnv, 1, backend="serial") as pool:
        wrap(pool, stack)
        with pytest.raises(ValueError, match="make one for each"):
            wrap(pool, stack)


def test_a_transform_that_was_refused_is_free() -> None:
    """A second try, with envs that fit, is nobody's mistake."""
    normalize = Normalize(norm_obs_keys=["a"])
    spaces = gymnasium.spaces.Dict(a=VECTOR)
    with shoal.Pool(CountEnv, 1, backend="serial") as wrong, shoal.Pool(partial(NoisyEnv, spaces), 1) as right:
        with pytest.raises(ValueError, match="Dict"):
            wrap(wrong, normalize)
        wrap(right, normalize).reset(seed=0)


@pytest.mark.parametrize("kind", ["pool", "gymnasium"])
def test_envs_are_closed_whatever_transforms_do(kind: str) -> None:
    class Refuses(Seen):
        def close(self) -> None:
            super().close()
            raise OSError("disk full")

    raw: Any = shoal.Pool(CountEnv, 1, backend="serial") if kind == "pool" else shoal.make(CountEnv, 1)
    transforms = Refuses(), Seen()
    envs = wrap(raw, *transforms)
    with pytest.raises(OSError, match="disk full"):
        envs.close()
    assert raw.closed
    assert [one.closed for one in transforms] == [1, 1]


def test_an_error_of_an_env_leaves_the_others_stacks_alone() -> None:
    with wrap(shoal.Pool(FailEnv, 2, backend="serial", batch_size=1), FrameStack(2)) as pool:
        pool.async_reset(seed=0)
        pool.recv(), pool.recv()
        pool.send([3], [0])
        with pytest.raises(shoal.EnvError, match="env 0"):
            pool.recv()
        pool.send([0], [1])
        assert pool.recv().obs.tolist() == [[1, 0, 0, 1, 0, 1]]
        assert pool.reset([0]).obs.tolist() == [[0, 0, 0, 0, 1, 0]]


@pytest.mark.parametrize("mode", MODES)
def test_an_env_that_is_restarted_begins_anew(mode: str) -> None:
    """Its lane is truncated once, with its last observation; the next one is the first of an episode."""
    options: dict[str, Any] = {"backend": "serial", "autoreset": mode, "on_error": "restart"}
    with wrap(shoal.Pool(FailEnv, 2, **options), FrameStack(2), monitor := MonitorEpisodes()) as pool:
        pool.reset(seed=0)
        pool.step([0, 0])
        batch = pool.step([3, 0])
        assert batch.truncated.tolist() == [True, False]
        assert batch.info[0]["shoal_restart"]["cause"] == "raised"
        assert batch.info[0]["episode"]["r"] == 1.0
        if mode == "next_step":
            batch = pool.step([0, 0])
        elif mode == "disabled":
            batch = pool.reset([0])
        assert batch.began[0]
        assert batch.obs[0, :3].tolist() == [0, 0, 0]
        assert batch.obs[0, 5] == 0
        assert monitor.episode_count == 1


# ---- agents that are absent ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_lanes_without_an_agent_are_nobodys_rows(mode: Any) -> None:
    """Statistics are those of the agents that were there, and the others' rows stay zeros."""
    pool = shoal.Pool(Crowd, 3, backend="serial", autoreset=mode, copy=True)
    episodes, returns, observations, absent = [], [], [], 0
    with wrap(pool, seen := Seen(), MonitorEpisodes(keep=1000), Normalize(norm_reward=False), FrameStack(2)) as envs:
        batches = [envs.reset(seed=0), *(envs.step(np.ones(12, int)) for _ in range(60))]
        monitor, normalize = envs.transforms[1:3]
        for batch, rows in zip(batches, seen.rows, strict=True):
            assert rows.ids.tolist() == batch.env_id[batch.mask].tolist()
            assert batch.obs.shape == (12, 8)
            assert not batch.obs[~batch.mask].any()
            assert not batch.reward[~batch.mask].any()
            absent += int((~batch.mask).sum())
            observations.append(rows.obs)
            episodes += batch.episode_length[batch.done].tolist()
            returns += batch.episode_return[batch.done].tolist()
            for row in np.flatnonzero(batch.done):
                assert batch.info[int(row)]["episode"]["l"] == batch.episode_length[row]
        assert absent > 50
        assert list(monitor.last_lengths) == episodes
        np.testing.assert_allclose(monitor.last_returns, returns)
        np.testing.assert_allclose(normalize.obs_rms.mean, np.concatenate(observations).mean(axis=0), rtol=1e-3)

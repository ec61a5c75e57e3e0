"""TransposeImage and ExtractDictObs: what they keep, what they refuse, and what Stable-Baselines3 makes of the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import shoal
from shoal.wrappers import ExtractDictObs, FrameStack, TransposeImage, wrap
from wrappers.kit import (
    HOSTS,
    IMAGE_FIRST,
    IMAGE_LAST,
    MANY,
    MODES,
    VECTOR,
    NoisyEnv,
    action,
    assert_same,
    follow,
    play,
    stable_baselines,
    take,
)

IMAGES = spaces.Dict(eye=IMAGE_LAST, other=spaces.Box(0, 255, (4, 4, 1), np.uint8), vector=VECTOR)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", HOSTS)
def test_images_of_dicts_are_transposed_and_other_parts_kept(host: str, mode: str) -> None:
    make = partial(NoisyEnv, IMAGES)

    def turned(obs: Any) -> Any:
        return {key: part.transpose(2, 0, 1) if part.ndim == 3 else part for key, part in obs.items()}

    envs = wrap(HOSTS[host](make, mode), TransposeImage())
    try:
        assert envs.single_observation_space["eye"] == spaces.Box(0, 255, (3, 6, 5), np.uint8)
        assert envs.single_observation_space["vector"] == VECTOR
        for answer, rows in follow(envs, make, 12):
            for i, row in enumerate(rows):
                assert_same(take(answer.obs, i), turned(row.obs))
                assert envs.single_observation_space.contains(take(answer.obs, i))
                if row.final_obs is not None:
                    assert_same(answer.finals[i], turned(row.final_obs))
    finally:
        envs.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("host", HOSTS)
def test_one_part_of_a_dict_stands_for_all_of_it(host: str, mode: str) -> None:
    make = partial(NoisyEnv, MANY)
    envs = wrap(HOSTS[host](make, mode), ExtractDictObs("matrix"))
    try:
        assert envs.single_observation_space == MANY["matrix"]
        for answer, rows in follow(envs, make, 12):
            for i, row in enumerate(rows):
                assert_same(answer.obs[i], row.obs["matrix"])
                if row.final_obs is not None:
                    assert_same(answer.finals[i], row.final_obs["matrix"])
    finally:
        envs.close()


def test_images_are_stacked_and_transposed_in_either_order() -> None:
    make = partial(NoisyEnv, IMAGE_LAST)
    with (
        wrap(shoal.Pool(make, 2, backend="serial"), FrameStack(3), TransposeImage()) as one,
        wrap(shoal.Pool(make, 2, backend="serial"), TransposeImage(), FrameStack(3)) as other,
    ):
        assert one.single_observation_space == other.single_observation_space == spaces.Box(0, 255, (9, 6, 5), np.uint8)
        assert_same(one.reset(seed=0).obs, other.reset(seed=0).obs)
        for turn in range(8):
            actions = np.stack([action(i, turn) for i in range(2)])
            assert_same(one.step(actions).obs, other.step(actions).obs)


@pytest.mark.parametrize("backend", ["serial", "processes"])
def test_transposed_images_are_the_callers_own(backend: str) -> None:
    """Large frames are lent by the pool, and a transposed view of one holds it."""
    make = partial(NoisyEnv, spaces.Box(0, 255, (128, 128, 3), np.uint8))
    with wrap(shoal.Pool(make, 4, backend=backend, num_workers=2, copy=True), TransposeImage()) as pool:  # type: ignore[arg-type]
        held = [(answer.obs, answer.obs.copy()) for answer in play(pool, 8)]
        for obs, kept in held:
            assert_same(obs, kept)


def test_skip_leaves_everything_alone() -> None:
    with wrap(shoal.Pool(partial(NoisyEnv, IMAGE_FIRST), 2, backend="serial"), TransposeImage(skip=True)) as pool:
        assert pool.single_observation_space == IMAGE_FIRST
        assert pool.reset(seed=0).obs.shape == (2, *IMAGE_FIRST.shape)


BAD: dict[str, tuple[Any, Any, str]] = {
    "no image": (TransposeImage, VECTOR, "TransposeImage is for images"),
    "floats": (TransposeImage, spaces.Box(0.0, 255.0, (6, 5, 3), np.float32), "TransposeImage is for images"),
    "channels first": (TransposeImage, IMAGE_FIRST, "first already"),
    "channels first in a dict": (TransposeImage, MANY, "first already"),
    "no dict": (partial(ExtractDictObs, "eye"), IMAGE_LAST, "'eye'"),
    "no such part": (partial(ExtractDictObs, "ear"), IMAGES, "'ear'.*eye"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_makes_no_sense_is_refused_with_a_reason(name: str) -> None:
    transform, space, reason = BAD[name]
    with shoal.Pool(partial(NoisyEnv, space), 1, backend="serial") as pool:
        with pytest.raises(ValueError, match=reason):
            wrap(pool, transform())


@pytest.mark.parametrize("name", ["transposed", "transposed in a dict", "extracted"])
def test_observations_are_those_of_stable_baselines(name: str) -> None:
    vec_env = stable_baselines()
    space, ours_of, theirs_of = {
        "transposed": (IMAGE_LAST, TransposeImage, vec_env.VecTransposeImage),
        "transposed in a dict": (IMAGES, TransposeImage, vec_env.VecTransposeImage),
        "extracted": (MANY, partial(ExtractDictObs, "vector"), partial(vec_env.VecExtractDictObs, key="vector")),
    }[name]
    make = partial(NoisyEnv, space)
    theirs = theirs_of(vec_env.DummyVecEnv([make] * 2))
    theirs.seed(0)
    with wrap(shoal.Pool(make, 2, backend="serial", autoreset="same_step"), ours_of()) as ours:
        assert ours.single_observation_space == theirs.observation_space
        assert_same(ours.reset(seed=0).obs, theirs.reset())
        for turn in range(12):
            actions = np.stack([action(i, turn) for i in range(2)])
            batch, (obs, _, _, infos) = ours.step(actions), theirs.step(actions)
            assert_same(batch.obs, obs)
            for env_id, final in batch.final_obs.items():
                assert_same(final, infos[env_id]["terminal_observation"])
    theirs.close()

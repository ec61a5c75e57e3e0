"""RecordVideo and the grid: files that really decode, with the right frames, size and rate."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import shoal
from shoal.support.optional_dependencies import install
from shoal.wrappers import RecordVideo, wrap
from shoal.wrappers.video import tile_images
from wrappers.kit import GYM_MODES, HOSTS, MODES, NoisyEnv, play, stable_baselines

ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="videos need the extra video")
HEIGHT, WIDTH = 16, 24  # of one env's frames


def decoded(path: Any) -> tuple[list[Any], dict[str, Any]]:
    """All frames of a file, and what it says about itself."""
    reader = ffmpeg.read_frames(str(path))
    about = next(reader)
    width, height = about["size"]
    return [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader], about


class GreyEnv(NoisyEnv):
    """Episodes do not end, so that frames go on getting lighter; it is `size` large."""

    size: tuple[int, int] = (HEIGHT, WIDTH)

    def __init__(self, **options: Any):
        super().__init__(**{"render_mode": "rgb_array", **options})

    def step(self, action: Any) -> Any:
        obs, reward, _, _, info = super().step(action)
        return obs, reward, False, False, info

    def render(self) -> Any:
        return np.full((*self.size, 3), min(10 * self.steps, 255), np.uint8)


@pytest.mark.parametrize("host", HOSTS)
def test_frames_are_those_of_the_steps(host: str, tmp_path: Path) -> None:
    record = RecordVideo(tmp_path, lambda step: step == 0, video_length=6, name_prefix="fish")
    envs = wrap(HOSTS[host](GreyEnv, "next_step"), record)
    try:
        list(play(envs, 30 if getattr(envs, "batch_size", 0) == 2 else 10))
        count = envs.num_envs
    finally:
        envs.close()
    path = tmp_path / "fish-step-0-to-step-6.mp4"
    assert record.video_path == str(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name], "nothing else is left"
    frames, _ = decoded(path)
    rows = {1: 1, 3: 2, 4: 2, 5: 3, 7: 3}[count]
    columns = -(-count // rows)
    assert len(frames) == 7, "the first, and one after each of six steps"
    assert frames[0].shape == (rows * HEIGHT, columns * WIDTH, 3)
    if getattr(envs, "batch_size", count) == count:
        seen = [float(frame[HEIGHT // 2, WIDTH // 2].mean()) for frame in frames]
        np.testing.assert_allclose(seen, [10 * step for step in range(7)], atol=4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["pool", "gymnasium"])
def test_videos_are_made_in_every_autoreset_mode(mode: str, kind: str, tmp_path: Path) -> None:
    make = partial(NoisyEnv, render_mode="rgb_array")
    record = RecordVideo(tmp_path, lambda step: step in (0, 12), video_length=5)
    raw: Any
    if kind == "pool":
        raw = shoal.Pool(make, 2, backend="serial", autoreset=mode)  # type: ignore[arg-type]
    else:
        raw = gymnasium.vector.SyncVectorEnv([make] * 2, autoreset_mode=GYM_MODES[mode])
    envs = wrap(raw, record)
    list(play(envs, 20))
    envs.close()
    names = ["rl-video-step-0-to-step-5.mp4", "rl-video-step-12-to-step-17.mp4"]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    assert [len(decoded(tmp_path / name)[0]) for name in names] == [6, 6]


@pytest.mark.parametrize("kind", ["pool", "gymnasium"])
@pytest.mark.parametrize(("fps", "expected"), [(None, 5), (12, 12)])
def test_the_rate_is_that_of_the_envs_unless_said(
    kind: str, fps: float | None, expected: float, tmp_path: Path
) -> None:
    record = RecordVideo(tmp_path, lambda step: step == 0, video_length=3, fps=fps)
    raw: Any = (
        gymnasium.vector.SyncVectorEnv([GreyEnv]) if kind == "gymnasium" else shoal.Pool(GreyEnv, 1, backend="serial")
    )
    envs = wrap(raw, record)
    list(play(envs, 5))
    envs.close()
    assert decoded(record.video_path)[1]["fps"] == expected


def test_a_video_that_is_not_full_is_finished_at_close(tmp_path: Path) -> None:
    record = RecordVideo(tmp_path, lambda step: step == 2, video_length=50)
    with wrap(shoal.Pool(GreyEnv, 2, backend="serial"), record) as pool:
        list(play(pool, 5))
        assert record.recording
    assert not record.recording
    assert len(decoded(record.video_path)[0]) == 4
    record.close()  # again, and nothing happens


def test_a_video_may_be_begun_and_ended_by_hand(tmp_path: Path) -> None:
    record = RecordVideo(tmp_path, lambda step: False, video_length=50)
    with wrap(shoal.Pool(GreyEnv, 1, backend="serial"), record) as pool:
        pool.reset(seed=0)
        still = np.zeros((1, 2), np.float32)
        pool.step(still)
        record.start()
        pool.step(still), pool.step(still)
        record.stop()
        pool.step(still)
    assert len(decoded(record.video_path)[0]) == 2


SIZES = {"odd": (15, 21), "an odd height": (17, 24), "an odd width": (16, 9), "small": (3, 5), "one pixel": (1, 1)}


@pytest.mark.parametrize("name", SIZES)
def test_odd_sizes_decode(name: str, tmp_path: Path) -> None:
    """The codec wants even ones; at most one line of pixels may be more or less."""

    class OddEnv(GreyEnv):
        size = SIZES[name]

    record = RecordVideo(tmp_path, lambda step: step == 0, video_length=3)
    with wrap(shoal.Pool(OddEnv, 1, backend="serial"), record) as pool:
        list(play(pool, 5))
    frames, _ = decoded(record.video_path)
    assert len(frames) == 4
    assert abs(frames[0].shape[0] - SIZES[name][0]) <= 1
    assert abs(frames[0].shape[1] - SIZES[name][1]) <= 1


class BlindEnv(NoisyEnv):
    """Renders nothing."""

    def render(self) -> Any:
        return None


@pytest.mark.parametrize("kind", ["pool", "gymnasium"])
def test_envs_that_render_nothing_are_refused_with_a_reason(kind: str, tmp_path: Path) -> None:
    raw: Any = (
        gymnasium.vector.SyncVectorEnv([BlindEnv] * 2)
        if kind == "gymnasium"
        else shoal.Pool(BlindEnv, 2, backend="serial")
    )
    with pytest.raises(ValueError, match=r'render_mode None.*"render_mode": "rgb_array"'):
        wrap(raw, RecordVideo(tmp_path, lambda step: step == 0))
    raw.close()
    assert list(tmp_path.iterdir()) == []


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="record_video_trigger"):
        RecordVideo(tmp_path, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="video_length"):
        RecordVideo(tmp_path, lambda step: True, video_length=0)


def test_who_has_no_encoder_is_told_where_to_find_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ImportError, match=re.escape(install("video"))):
        RecordVideo(tmp_path, lambda step: True)


@pytest.mark.parametrize(
    ("count", "shape"), [(1, (2, 3)), (2, (4, 3)), (3, (4, 6)), (4, (4, 6)), (5, (6, 6)), (7, (6, 9))]
)
def test_images_are_tiled_row_by_row_and_filled_up_with_black(count: int, shape: tuple[int, int]) -> None:
    images = [np.full((2, 3, 3), i + 1, np.uint8) for i in range(count)]
    grid = tile_images(images)
    assert grid.shape == (*shape, 3)
    assert grid.dtype == np.uint8
    columns = shape[1] // 3
    for i in range(shape[0] // 2 * columns):
        top, left = 2 * (i // columns), 3 * (i % columns)
        assert (grid[top : top + 2, left : left + 3] == (i + 1 if i < count else 0)).all()
    assert all((image == i + 1).all() for i, image in enumerate(images))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 10])
def test_tiles_are_those_of_stable_baselines(count: int) -> None:
    base = stable_baselines("common.vec_env.base_vec_env")
    images = [np.random.default_rng(i).integers(0, 256, (4, 6, 3), np.uint8) for i in range(count)]
    np.testing.assert_array_equal(tile_images(images), base.tile_images(images))

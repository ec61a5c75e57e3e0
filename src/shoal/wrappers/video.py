"""RecordVideo: mp4 files of all envs side by side. The encoder comes with `imageio-ffmpeg`; the system needs none."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space

from shoal.support.checks import whole_number
from shoal.support.optional_dependencies import require
from shoal.wrappers.base import Array, Bound, Rows, Transform


def tile_images(images: Sequence[Any]) -> Array:
    """Images [height, width, channels] as one: in a grid as square as can be, filled up with black."""
    frames = [np.asarray(image) for image in images]
    height, width, channels = frames[0].shape
    rows = math.ceil(math.sqrt(len(frames)))
    columns = math.ceil(len(frames) / rows)
    grid = np.zeros((rows, height, columns, width, channels), frames[0].dtype)
    for i, frame in enumerate(frames):
        grid[i // columns, :, i % columns] = frame
    return grid.reshape(rows * height, columns * width, channels)


class RecordVideo(Transform):
    """Records what the envs render. They must have been made with `render_mode="rgb_array"`.

    Args:
        video_folder: for the files, `<name_prefix>-step-<first>-to-step-<last>.mp4`.
        record_video_trigger: tells whether to begin a video, by the number of steps so far.
        video_length: in steps.
        fps: frames per second; by default as the envs' metadata say, or 30.
    """

    def __init__(
        self,
        video_folder: str | os.PathLike[str],
        record_video_trigger: Callable[[int], bool],
        video_length: int = 200,
        name_prefix: str = "rl-video",
        fps: float | None = None,
    ):
        if not callable(record_video_trigger):
            raise TypeError(f"record_video_trigger: expected a function of the step, found {record_video_trigger!r}")
        self.video_folder = os.path.abspath(os.fspath(video_folder))
        self.record_video_trigger, self.name_prefix, self.fps = record_video_trigger, name_prefix, fps
        self.video_length = whole_number("video_length", video_length, 1, 2**31)
        self.step_id = 0
        self.recording = False
        self.video_path = ""
        self._writer: Any = None
        self._begun_at = self._frames = 0
        self._partial = Path()
        self._last: dict[int, Any] = {}
        _get_writer()  # raises where there is no encoder, before the first video
        os.makedirs(self.video_folder, exist_ok=True)

    def bind(self, bound: Bound) -> Space[Any]:
        """The same space. Raises ValueError for envs that make no images."""
        if bound.render_mode != "rgb_array":
            raise ValueError(
                f"RecordVideo: the envs have render_mode {bound.render_mode!r}, and it needs 'rgb_array': make them "
                'with env_kwargs={"render_mode": "rgb_array"}'
            )
        return super().bind(bound)

    def apply(self, rows: Rows) -> None:
        """Take a picture of the rows' envs, if it is time."""
        if rows.stepped.any():
            self.step_id += 1
        if not self.recording and self.record_video_trigger(self.step_id):
            self.start()
        if self.recording:
            self._take(rows)

    def start(self) -> None:
        """Begin a video now."""
        self.stop()
        self.recording = True
        self._begun_at, self._frames, self._last = self.step_id, 0, {}

    def _take(self, rows: Rows) -> None:
        pictures = self.bound.images(rows.ids)
        if any(picture is None for picture in pictures):
            raise ValueError('RecordVideo: the envs render nothing; make them with render_mode="rgb_array"')
        self._last.update(zip(rows.ids.tolist(), pictures, strict=True))
        if len(self._last) < self.bound.num_envs:
            return  # not all envs have been seen yet
        self._write(tile_images([self._last[env_id] for env_id in sorted(self._last)]))
        if self._frames > self.video_length:
            self.stop()

    def _write(self, frame: Array) -> None:
        # The codec wants even sizes and three channels.
        odd = [(0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)]
        frame = np.pad(frame[:, :, :3], odd, "edge").astype(np.uint8, copy=False)
        if self._writer is None:
            self._partial = Path(self.video_folder, f".{self.name_prefix}-step-{self._begun_at}.partial.mp4")
            rate = float(self.fps or self.bound.metadata.get("render_fps") or 30)
            self._writer = _get_writer()(
                self._partial, format="FFMPEG", fps=rate, macro_block_size=2, ffmpeg_log_level="error"
            )
        self._writer.append_data(frame)
        self._frames += 1

    def stop(self) -> None:
        """End the video that is being recorded, and give it its name."""
        self.recording = False
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        writer.close()
        name = f"{self.name_prefix}-step-{self._begun_at}-to-step-{self._begun_at + self.video_length}.mp4"
        self.video_path = os.path.join(self.video_folder, name)
        os.replace(self._partial, self.video_path)

    close = stop


def _get_writer() -> Any:
    require("imageio_ffmpeg", "videos need an encoder", "video")  # imageio asks for it at the first frame only
    return require("imageio.v2", "videos need imageio", "video").get_writer


def show_image(image: Any) -> None:
    """Show an image on the screen."""
    try:
        import cv2
    except ImportError as error:
        raise ImportError('render(mode="human") shows a window by OpenCV: pip install opencv-python') from error
    cv2.imshow("vecenv", image[:, :, ::-1])
    cv2.waitKey(1)

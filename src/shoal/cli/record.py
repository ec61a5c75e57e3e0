"""Makes a video of a batch of envs, side by side: the command `shoal record`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
import pkgutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space

from shoal.cli import report, work
from shoal.errors import BadAction, ShoalError
from shoal.observe.progress import progress
from shoal.observe.words import plural
from shoal.pool import Pool
from shoal.support.checks import Ids
from shoal.support.usage import UsageError
from shoal.wrappers import Bound, MonitorEpisodes, RecordVideo, WrappedPool, wrap
from shoal.wrappers.base import Array
from shoal.wrappers.video import tile_images

Policy = Callable[[Any], Any]


def run(options: argparse.Namespace) -> int:
    """Run `shoal record`. After Ctrl-C, the video has what was recorded until then."""
    work.look_here(options.env, options.policy or "")
    with progress(_goal(options)) as notify:
        saved, interrupted = record(options, notify)
    print(saved)
    if interrupted:
        raise KeyboardInterrupt
    return 0


def _goal(options: argparse.Namespace) -> int:
    return int(options.episodes or options.steps)


class OneVideo(RecordVideo):
    """One video, from the first reset on. Raises UsageError with one sentence for pictures that make no video."""

    def __init__(self, folder: str, options: argparse.Namespace):
        super().__init__(folder, lambda step: step == 0, video_length=2**31, fps=options.fps)
        self.whole = True  # the encoder has all of every frame
        self._width, self._shape, self._divisor = options.width, (0, 0, 0), 1

    @property
    def frames(self) -> int:
        return self._frames

    def bind(self, bound: Bound) -> Space[Any]:
        """The same space; pictures are checked, and shrunk, on their way here."""
        return super().bind(replace(bound, images=functools.partial(self._pictures, bound.images)))

    def _pictures(self, images: Callable[[Ids], Sequence[Any]], ids: Ids) -> list[Array]:
        with work.refusing("the envs cannot be rendered", ShoalError):
            found = images(ids)
        pictures = [_as_colours(picture) for picture in found]
        if not self.frames:
            self._shape = pictures[0].shape
            if self._width:
                divisor = -(-tile_images(pictures).shape[1] // self._width)
                self._divisor = min(divisor, *self._shape[:2])
        for env_id, picture in zip(ids.tolist(), pictures, strict=True):
            if picture.shape != self._shape:
                raise UsageError(
                    f"all pictures must have one size, and env {env_id} renders {list(picture.shape)} where the first "
                    f"was {list(self._shape)}"
                )
        return pictures if self._divisor == 1 else [_shrunk(picture, self._divisor) for picture in pictures]

    def _write(self, frame: Array) -> None:
        self.whole = False
        super()._write(frame)
        self.whole = True


def record(options: argparse.Namespace, notify: Callable[[str], None]) -> tuple[str, bool]:
    """Step the envs, and save what they render; return what was saved, in words, and whether Ctrl-C has ended it.

    `notify` is called once at the start, and after each step, or after each episode where these are counted. At an
    error, what was recorded by then is kept.
    """
    path: Path = options.out
    report.check_file(path, "the video is an MP4")
    folder = str(path.absolute().parent)
    if not os.access(folder, os.W_OK):
        raise UsageError(f"the folder {folder!r} cannot be written to")
    with tempfile.TemporaryDirectory(prefix=".shoal-record-", dir=folder) as folder:
        try:
            video = OneVideo(folder, options)
        except ImportError as error:
            raise UsageError(str(error)) from error
        policy = None if options.policy is None else find_policy(options.policy)
        monitor = MonitorEpisodes(keep=sys.maxsize)
        envs = _open(options, monitor, video)
        interrupts, trouble = Interrupts(), None
        with interrupts.noted():
            try:
                _play(options, envs, policy, monitor, interrupts, notify)
            except UsageError as error:
                trouble = error
            except KeyboardInterrupt:
                interrupts.count += 1  # it may not have been a signal
            finally:
                # Do not raise for the next two: the encoder needs a moment to finish the file.
                interrupts.raised_from = interrupts.count + 3
                try:
                    envs.close()
                except (ShoalError, OSError) as error:
                    trouble = trouble or UsageError(f"the end went wrong: {work.first_line(str(error))}")
        kept = video.whole and video.video_path != "" and video.frames > (1 if trouble else 0)
        if kept:
            os.replace(video.video_path, path)
    if trouble:
        raise UsageError(f"{trouble}; {video.frames} frames until then are in {path}") if kept else trouble
    if not kept:
        raise KeyboardInterrupt
    returns, episodes = list(monitor.last_returns), "no episode ended"
    if returns:
        episodes = f"{plural(len(returns), 'episode')}, mean return {np.mean(returns):,.2f}"
    return f"saved {video.frames} frames of {options.num_envs} envs to {path}: {episodes}", interrupts.count > 0


def find_policy(name: str) -> Policy:
    if ":" not in name:
        raise UsageError(f"the policy must be module:function, not {name!r}")
    with work.refusing(f"there is no policy {name!r}"):
        found = pkgutil.resolve_name(name)
    if not callable(found):
        raise UsageError(f"the policy {name!r} is a {type(found).__name__}, which cannot be called")
    return found  # type: ignore[no-any-return]


def _open(options: argparse.Namespace, monitor: MonitorEpisodes, video: OneVideo) -> WrappedPool:
    env = options.env
    work.probe(env, seed=options.seed)  # says what is wrong with the env itself
    make = _rendering(work.env_fn(env))
    with work.refusing(f"{env!r} cannot be made for a video", ShoalError):
        pool = Pool(make, options.num_envs, backend=options.backend, copy=True)
    if pool.specs.render_mode != "rgb_array":
        found = pool.specs.render_mode
        pool.close()
        raise UsageError(
            f"{env!r} makes envs with render_mode {found!r}, and a video needs 'rgb_array': let it make them so, "
            "or take a parameter render_mode"
        )
    return wrap(pool, monitor, video)  # type: ignore[no-any-return]


def _rendering(make: Callable[..., Any]) -> work.EnvFn:
    """The same function, told to make envs that render, if it can be told."""
    by_id = isinstance(make, functools.partial) and make.func is gymnasium.make
    try:
        takes_it = "render_mode" in inspect.signature(make).parameters
    except (TypeError, ValueError):  # what is built in has no signature
        takes_it = False
    return functools.partial(make, render_mode="rgb_array") if by_id or takes_it else make


def _play(
    options: argparse.Namespace,
    envs: WrappedPool,
    policy: Policy | None,
    monitor: MonitorEpisodes,
    interrupts: Interrupts,
    notify: Callable[[str], None],
) -> None:
    steps, told, goal = 0, 0, _goal(options)
    notify("recording")
    envs.action_space.seed(options.seed)
    try:
        obs = envs.reset(seed=options.seed).obs
        while told < goal and not interrupts.count:
            with work.refusing(f"the policy {options.policy!r} raised in step {steps}"):
                actions = envs.action_space.sample() if policy is None else policy(obs)
            obs = envs.step(actions).obs
            steps += 1
            reached = min(steps if options.episodes is None else monitor.episode_count, goal)
            for _ in range(reached - told):
                notify("recording")
            told = reached
    except BadAction as error:
        source = "random actions" if policy is None else f"the policy {options.policy!r}"
        raise UsageError(f"{source} in step {steps}: {work.first_line(str(error))}") from error
    except ShoalError as error:
        raise UsageError(f"{options.env!r} failed in step {steps}: {work.first_line(str(error))}") from error
    except OSError as error:
        raise UsageError(f"the encoder failed: {work.first_line(str(error))}") from error


class Interrupts:
    """Notes the first Ctrl-C, and raises KeyboardInterrupt for the next.

    If it were raised while the encoder takes a frame or finishes, the encoder would end, and a file that it has not
    finished cannot be played.
    """

    def __init__(self) -> None:
        self.count, self.raised_from = 0, 2

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Handle Ctrl-C during this block, unless the program has a handler of its own."""
        ours = threading.current_thread() is threading.main_thread()
        if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, *_: Any) -> None:
        self.count += 1
        if self.count >= self.raised_from:
            raise KeyboardInterrupt


def _as_colours(picture: Any) -> Array:
    """A picture as uint8 [height, width, 3]; grey ones, and those with transparency, too."""
    array = np.asarray(picture)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, 3, 4) or not array.size:
        what = f"{array.dtype} {list(array.shape)}" if isinstance(picture, np.ndarray) else type(picture).__name__
        raise UsageError(f"the envs render {what}, and a video needs pictures as uint8 [height, width, 3]")
    return np.repeat(array, 3, axis=2) if array.shape[2] == 1 else array[:, :, :3]


def _shrunk(picture: Array, divisor: int) -> Array:
    """Each square of pixels as one, their mean."""
    from PIL import Image  # in the extra video, as the encoder is

    height, width = (size // divisor * divisor for size in picture.shape[:2])
    return np.asarray(Image.fromarray(picture).reduce(divisor, (0, 0, width, height)))

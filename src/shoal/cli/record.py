"""Makes a video of a batch of envs, side by side, for `shoal record`."""

from __future__ import annotations

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import Space

from shoal.cli import report, work
from shoal.errors import BadAction, ShoalError
from shoal.pool import Pool
from shoal.support.checks import Ids
from shoal.support.usage import UsageError
from shoal.wrappers import Bound, MonitorEpisodes, RecordVideo, WrappedPool, wrap
from shoal.wrappers.base import Array
from shoal.wrappers.video import tile_images

Policy = Callable[[Any], Any]


@dataclass(frozen=True)
class Take:
    """What is to be recorded.

    Attributes:
        env: a Gymnasium id, or module:callable that returns an env.
        path: the file, .mp4.
        steps: of each env; where `episodes` is given, that many episodes, of all envs together, instead.
        fps: frames per second; None: as the envs say, or 30.
        width: of the video at most, in pixels; None: as wide as the pictures are.
        policy: module:function from a batch of observations to a batch of actions; None: random actions.
    """

    env: str
    path: Path
    num_envs: int = 16
    steps: int = 500
    episodes: int | None = None
    seed: int = 0
    fps: float | None = None
    width: int | None = None
    policy: str | None = None
    backend: str = "auto"

    @property
    def goal(self) -> int:
        """How many steps or episodes."""
        return self.episodes or self.steps


class Recorded(NamedTuple):
    """What came of it."""

    path: Path
    num_envs: int
    frames: int
    returns: Sequence[float]
    interrupted: bool

    def __str__(self) -> str:
        episodes = "no episode ended"
        if self.returns:
            plural = "s" if len(self.returns) > 1 else ""
            episodes = f"{len(self.returns)} episode{plural}, mean return {np.mean(self.returns):,.2f}"
        return f"saved {self.frames} frames of {self.num_envs} envs to {self.path}: {episodes}"


class Film(RecordVideo):
    """One video, from the first reset on; says in one sentence what makes no video."""

    def __init__(self, folder: str, take: Take):
        super().__init__(folder, lambda step: step == 0, video_length=2**31, fps=take.fps)
        self.whole = True  # the encoder has all of every frame
        self._width, self._shape, self._divisor = take.width, (0, 0, 0), 1

    @property
    def frames(self) -> int:
        """So far."""
        return self._frames

    def bind(self, bound: Bound) -> Space[Any]:
        """The same space; pictures are checked, and shrunk, on their way here."""
        return super().bind(replace(bound, images=functools.partial(self._pictures, bound.images)))

    def _pictures(self, images: Callable[[Ids], Sequence[Any]], ids: Ids) -> list[Array]:
        try:
            found = images(ids)
        except ShoalError as error:
            raise UsageError(f"the envs cannot be rendered: {report.first_line(str(error))}") from error
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
        return [_shrunk(picture, self._divisor) for picture in pictures]

    def _write(self, frame: Array) -> None:
        self.whole = False
        super()._write(frame)
        self.whole = True


def record(take: Take, notify: Callable[[str], None]) -> Recorded:
    """Play, and save what was rendered.

    Args:
        notify: called once at the start, and after each step, or after each episode where these are counted.

    Raises:
        UsageError: one sentence; what was recorded by then is kept.
    """
    _check_path(take.path)
    with tempfile.TemporaryDirectory(prefix=".shoal-record-", dir=take.path.absolute().parent) as folder:
        try:
            film = Film(folder, take)
        except ImportError as error:
            raise UsageError(str(error)) from error
        policy = None if take.policy is None else find_policy(take.policy)
        monitor = MonitorEpisodes(keep=sys.maxsize)
        envs = _open(take, monitor, film)
        interrupts, trouble = Interrupts(), None
        with interrupts.noted():
            try:
                _play(take, envs, policy, monitor, interrupts, notify)
            except UsageError as error:
                trouble = error
            except KeyboardInterrupt:
                interrupts.count += 1  # it may not have been a signal
            finally:
                interrupts.be_patient()
                try:
                    envs.close()
                except (ShoalError, OSError) as error:
                    trouble = trouble or UsageError(f"the end went wrong: {report.first_line(str(error))}")
        kept = film.whole and film.video_path != "" and film.frames > (1 if trouble else 0)
        if kept:
            os.replace(film.video_path, take.path)
    if trouble:
        raise UsageError(f"{trouble}; {film.frames} frames until then are in {take.path}") if kept else trouble
    if not kept:
        raise KeyboardInterrupt
    return Recorded(take.path, take.num_envs, film.frames, list(monitor.last_returns), interrupts.count > 0)


def find_policy(name: str) -> Policy:
    """Return the function behind module:function."""
    if ":" not in name:
        raise UsageError(f"the policy must be module:function, not {name!r}")
    try:
        found = pkgutil.resolve_name(name)
    except Exception as error:
        what = report.first_line(f"{type(error).__name__}: {error}")
        raise UsageError(f"there is no policy {name!r}: {what}") from error
    if not callable(found):
        raise UsageError(f"the policy {name!r} is a {type(found).__name__}, which cannot be called")
    return found  # type: ignore[no-any-return]


def _check_path(path: Path) -> None:
    report.check_file(path)
    if path.suffix.lower() != ".mp4":
        raise UsageError(f"the video is an MP4, so name it .mp4 and not {path.name!r}")
    folder = path.absolute().parent
    if not os.access(folder, os.W_OK):
        raise UsageError(f"the folder {str(folder)!r} cannot be written to")


def _open(take: Take, monitor: MonitorEpisodes, film: Film) -> WrappedPool:
    work.probe(take.env, seed=take.seed)  # says what is wrong with the env itself
    make = _rendering(work.env_fn(take.env))
    try:
        pool = Pool(make, take.num_envs, backend=take.backend, copy=True)
    except ShoalError as error:
        raise UsageError(f"{take.env!r} cannot be made for a video: {report.first_line(str(error))}") from error
    if pool.specs.render_mode != "rgb_array":
        found = pool.specs.render_mode
        pool.close()
        raise UsageError(
            f"{take.env!r} makes envs with render_mode {found!r}, and a video needs 'rgb_array': let it make them so, "
            "or take a parameter render_mode"
        )
    return wrap(pool, monitor, film)  # type: ignore[no-any-return]


def _rendering(make: Callable[..., Any]) -> work.EnvFn:
    """The same function, told to make envs that render, if it can be told."""
    by_id = isinstance(make, functools.partial) and make.func is gymnasium.make
    try:
        takes_it = "render_mode" in inspect.signature(make).parameters
    except (TypeError, ValueError):  # what is built in has no signature
        takes_it = False
    return functools.partial(make, render_mode="rgb_array") if by_id or takes_it else make


def _play(
    take: Take,
    envs: WrappedPool,
    policy: Policy | None,
    monitor: MonitorEpisodes,
    interrupts: Interrupts,
    notify: Callable[[str], None],
) -> None:
    steps = told = 0
    notify("recording")
    envs.action_space.seed(take.seed)
    try:
        obs = envs.reset(seed=take.seed).obs
        while told < take.goal and not interrupts.count:
            actions = envs.action_space.sample() if policy is None else _ask(policy, obs, f"{take.policy!r}", steps)
            obs = envs.step(actions).obs
            steps += 1
            reached = min(steps if take.episodes is None else monitor.episode_count, take.goal)
            for _ in range(reached - told):
                notify("recording")
            told = reached
    except BadAction as error:
        whose = "random actions" if policy is None else f"the policy {take.policy!r}"
        raise UsageError(f"{whose} in step {steps}: {report.first_line(str(error))}") from error
    except ShoalError as error:
        raise UsageError(f"{take.env!r} failed in step {steps}: {report.first_line(str(error))}") from error
    except OSError as error:
        raise UsageError(f"the encoder failed: {report.first_line(str(error))}") from error


def _ask(policy: Policy, obs: Any, name: str, step: int) -> Any:
    try:
        return policy(obs)
    except Exception as error:
        what = report.first_line(f"{type(error).__name__}: {error}")
        raise UsageError(f"the policy {name} raised in step {step}: {what}") from error


class Interrupts:
    """Ctrl-C, which is noted at first, and raised if it is pressed again.

    One that is raised while the encoder is given a frame, or finishes, would end it, and a file that it has not
    finished cannot be played.
    """

    def __init__(self) -> None:
        self.count, self._raised_from = 0, 2

    def be_patient(self) -> None:
        """Raise none of the next two: the file is being finished, which takes a moment."""
        self._raised_from = self.count + 3

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Take them for the time of this block, unless somebody else does."""
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
        if self.count >= self._raised_from:
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
    if divisor == 1:
        return picture
    height, width = (size // divisor * divisor for size in picture.shape[:2])
    total = np.zeros((height // divisor, width // divisor, 3), np.uint32)
    for top in range(divisor):
        for left in range(divisor):
            total += picture[top:height:divisor, left:width:divisor]
    return (total // divisor**2).astype(np.uint8)

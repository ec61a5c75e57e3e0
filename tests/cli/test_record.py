"""`shoal record`: videos that really decode, what it says about them, how it refuses, and what Ctrl-C leaves."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest

from envs import CountEnv
from shoal.cli import main
from shoal.support.optional_dependencies import install

ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="videos need the extra video")

HEIGHT, WIDTH = 16, 24
MODULE = f"""
import os
import signal

import gymnasium
import numpy as np

from envs import CountEnv


class GreyEnv(CountEnv):
    "Gets lighter at each step; episodes of five."

    picture = staticmethod(lambda steps: np.full(({HEIGHT}, {WIDTH}, 3), 40 * steps, np.uint8))

    def __init__(self, length=5, render_mode=None):
        super().__init__(length, render_mode=render_mode)

    def render(self):
        return self.picture(self.steps)


class FixedEnv(GreyEnv):
    "Takes no render_mode, and renders all the same."

    def __init__(self):
        super().__init__(render_mode="rgb_array")


class HalvesEnv(FixedEnv):
    picture = staticmethod(lambda steps: np.concatenate([np.zeros(({HEIGHT}, {WIDTH // 2}, 3), np.uint8),
                                                         np.full(({HEIGHT}, {WIDTH // 2}, 3), 200, np.uint8)], axis=1))

class FlatEnv(FixedEnv):
    picture = staticmethod(lambda steps: np.full((7, 9), 100, np.uint8))

class OneChannelEnv(FixedEnv):
    picture = staticmethod(lambda steps: np.full((7, 9, 1), 100, np.uint8))

class TransparentEnv(FixedEnv):
    picture = staticmethod(lambda steps: np.full((7, 9, 4), 100, np.uint8))

class BlindEnv(FixedEnv):
    picture = staticmethod(lambda steps: None)

class FloatEnv(FixedEnv):
    picture = staticmethod(lambda steps: np.zeros((8, 8, 3)))

class GrowingEnv(FixedEnv):
    picture = staticmethod(lambda steps: np.zeros((8 + 2 * steps, 8, 3), np.uint8))

class LazyEnv(GreyEnv):
    "Cannot be told to render."

    def __init__(self):
        super().__init__()

class BreakingEnv(FixedEnv):
    "Its third step raises."

    def step(self, action):
        if self.steps == 2:
            raise ValueError("the joint is broken\\nand so is the next line")
        return super().step(action)

class TerminalEnv(FixedEnv):
    "Its third step is when somebody presses Ctrl-C: all processes of the group are told."

    def step(self, action):
        if self.steps == 2:
            os.killpg(int(os.environ["GROUP"]), signal.SIGINT)
        return super().step(action)


gymnasium.register("Grey-v0", entry_point=GreyEnv)
steps = 0


def ones(obs):
    assert obs.shape == (3, 3) and obs.dtype == np.int64
    return np.ones(len(obs), int)

def too_few(obs):
    return [0]

def broken(obs):
    raise KeyError("no weights")

def breaks_later(obs):
    global steps
    steps += 1
    return np.zeros(len(obs), int) if steps < 3 else broken(obs)

def interrupts(obs):
    if obs[0, 2] == 2:
        signal.raise_signal(signal.SIGINT)
    return np.zeros(len(obs), int)

def interrupts_twice(obs):
    if obs[0, 2] == 2:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    return np.zeros(len(obs), int)

number = 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to record to, in which a module of envs can be imported; sys.path is put back afterwards."""
    modules, here = tmp_path / "modules", tmp_path / "here"
    modules.mkdir(), here.mkdir()
    (modules / "film_envs.py").write_text(MODULE)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [*sys.path, str(modules)])
    monkeypatch.delitem(sys.modules, "film_envs", raising=False)
    yield here
    gymnasium.registry.pop("Grey-v0", None)


def decoded(path: Path) -> tuple[list[Any], dict[str, Any]]:
    """All frames of a file, and what it says about itself."""
    reader = ffmpeg.read_frames(str(path))
    about = next(reader)
    width, height = about["size"]
    return [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader], about


def run(*arguments: str) -> int:
    """Serial unless told: the other backends have a test of their own."""
    backend = [] if "--backend" in arguments else ["--backend", "serial"]
    try:
        return main.main(["record", *arguments, *backend])
    except SystemExit as stop:
        return int(stop.code or 0)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run what must be refused and return the one sentence it says."""
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    said = [line for line in err.splitlines() if line.startswith("shoal record: ")]
    assert len(said) == 1
    assert "Traceback" not in err
    return said[0]


# ---- what is recorded ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", main.BACKENDS)
def test_all_envs_are_seen_side_by_side(backend: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("film_envs:GreyEnv", "-n", "7", "--steps", "12", "out.mp4", "--backend", backend) == 0
    out = capsys.readouterr().out
    assert out.startswith("saved 13 frames of 7 envs to out.mp4: 14 episodes, mean return ")
    assert out.count("\n") == 1
    frames, about = decoded(folder / "out.mp4")
    assert [path.name for path in folder.iterdir()] == ["out.mp4"], "nothing else is left"
    assert about["fps"] == 7, "as CountEnv's metadata say"
    assert frames[0].shape == (3 * HEIGHT, 3 * WIDTH, 3)
    steps = [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0]  # the last picture of an episode is seen before the next begins
    for row, column in ((0, 0), (1, 2), (2, 0)):
        seen = [frame[row * HEIGHT + HEIGHT // 2, column * WIDTH + WIDTH // 2].mean() for frame in frames]
        np.testing.assert_allclose(seen, [40 * step for step in steps], atol=6)
    assert frames[-2][2 * HEIGHT + HEIGHT // 2, 2 * WIDTH + WIDTH // 2].mean() < 6, "black where there is no env"


@pytest.mark.parametrize("num_envs", [1, 3])
def test_what_it_says_is_what_gymnasium_gives_for_that_seed(
    num_envs: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("wrappers.kit:NoisyEnv", "-n", str(num_envs), "--steps", "30", "--seed", "5", "out.mp4")
    assert run(*arguments) == 0
    from wrappers.kit import NoisyEnv

    envs = gymnasium.vector.SyncVectorEnv([NoisyEnv] * num_envs)
    envs.action_space.seed(5)
    envs.reset(seed=5)
    total, sums = [], np.zeros(num_envs)
    for _ in range(30):
        _, reward, terminated, truncated, _ = envs.step(envs.action_space.sample())
        sums += reward
        for i in np.flatnonzero(terminated | truncated):
            total.append(sums[i])
            sums[i] = 0
    envs.close()
    said = capsys.readouterr().out
    assert f": {len(total)} episodes, mean return {np.mean(total):,.2f}\n" in said
    again = folder / "again.mp4"
    assert run(*arguments[:-1], str(again)) == 0
    assert again.read_bytes() == (folder / "out.mp4").read_bytes(), "one seed, one video"


def test_episodes_are_counted_over_all_envs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("film_envs:GreyEnv", "-n", "3", "--episodes", "4", "out.mp4") == 0
    assert "saved 12 frames of 3 envs to out.mp4: 6 episodes" in capsys.readouterr().out
    assert len(decoded(folder / "out.mp4")[0]) == 12


def test_a_video_without_an_end_of_an_episode_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("film_envs:GreyEnv", "-n", "2", "--steps", "4", "out.mp4") == 0
    assert capsys.readouterr().out == "saved 5 frames of 2 envs to out.mp4: no episode ended\n"


def test_a_policy_chooses_the_actions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("film_envs:GreyEnv", "-n", "3", "--steps", "5", "--policy", "film_envs:ones", "out.mp4") == 0
    assert "3 episodes, mean return 515.00" in capsys.readouterr().out


def test_modules_are_found_where_the_command_is_called(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "here_is_a_policy.py").write_text("def act(obs):\n    return [2] * len(obs)\n")
    try:
        assert run("CountingFish-v0", "--policy", "here_is_a_policy:act", "a.mp4") == 2
        assert "CountingFish" in capsys.readouterr().err
        assert run("envs:CountEnv", "-n", "1", "--steps", "5", "--policy", "here_is_a_policy:act", "out.mp4") == 0
    finally:
        sys.modules.pop("here_is_a_policy", None)
    assert "mean return 1,015.00" in capsys.readouterr().out


def test_ids_are_made_so_that_they_render(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("film_envs:Grey-v0", "-n", "2", "--steps", "3", "--fps", "12.5", "out.MP4") == 0
    assert "saved 4 frames of 2 envs to out.MP4" in capsys.readouterr().out
    frames, about = decoded(folder / "out.MP4")
    assert (len(frames), about["fps"]) == (4, 12.5)


@pytest.mark.parametrize("name", ["FlatEnv", "OneChannelEnv", "TransparentEnv"])
def test_grey_and_transparent_pictures_will_do(name: str, folder: Path) -> None:
    assert run(f"film_envs:{name}", "-n", "1", "--steps", "2", "out.mp4") == 0
    frames, _ = decoded(folder / "out.mp4")
    assert (len(frames), frames[0].shape) == (3, (8, 10, 3)), "the codec wants even sizes"
    np.testing.assert_allclose(frames[0], 100, atol=4)


@pytest.mark.parametrize(("limit", "size"), [(48, (32, 48)), (47, (16, 24)), (12, (8, 12)), (1, (2, 2))])
def test_a_video_is_no_wider_than_asked_for(limit: int, size: tuple[int, int], folder: Path) -> None:
    """Two by two envs; the smallest picture is one pixel, and the codec's smallest video is two."""
    assert run("film_envs:HalvesEnv", "-n", "4", "--steps", "2", "--width", str(limit), "out.mp4") == 0
    frames, _ = decoded(folder / "out.mp4")
    assert frames[0].shape[:2] == size
    if limit > 12:
        np.testing.assert_allclose(frames[0][2, [1, size[1] // 2 - 2]].mean(axis=-1), [0, 200], atol=25)


# ---- how it refuses ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["NoSuchEnv-v0", "out.mp4"], "NoSuchEnv"),
        (["no_such_module_at_all:make", "out.mp4"], "no_such_module_at_all"),
        (["film_envs:number", "out.mp4"], "number"),
        (["film_envs:LazyEnv", "out.mp4"], "render_mode None, and a video needs 'rgb_array'"),
        (["film_envs:BlindEnv", "out.mp4"], "the envs render NoneType"),
        (["film_envs:FloatEnv", "out.mp4"], "the envs render float64 [8, 8, 3]"),
        (["film_envs:GreyEnv", "out.gif"], "name it .mp4 and not 'out.gif'"),
        (["film_envs:GreyEnv", "no/such/folder/out.mp4"], "no/such/folder"),
        (["film_envs:GreyEnv", "."], "is a folder"),
        (["film_envs:GreyEnv"], "OUT.mp4"),
        (["film_envs:GreyEnv", "out.mp4", "-n", "0"], "at least 1"),
        (["film_envs:GreyEnv", "out.mp4", "--steps", "0"], "at least 1"),
        (["film_envs:GreyEnv", "out.mp4", "--steps", "5", "--episodes", "2"], "not allowed with"),
        (["film_envs:GreyEnv", "out.mp4", "--seed", "-1"], "-1"),
        (["film_envs:GreyEnv", "out.mp4", "--seed", str(2**31)], "2**31 - 1"),
        (["film_envs:GreyEnv", "out.mp4", "--fps", "nan"], "nan"),
        (["film_envs:GreyEnv", "out.mp4", "--width", "0"], "at least 1"),
        (["film_envs:GreyEnv", "out.mp4", "--backend", "magic"], "magic"),
        (["film_envs:GreyEnv", "out.mp4", "--policy", "act"], "must be module:function, not 'act'"),
        (["film_envs:GreyEnv", "out.mp4", "--policy", "film_envs:absent"], "absent"),
        (["film_envs:GreyEnv", "out.mp4", "--policy", "no_such_module_at_all:act"], "no_such_module_at_all"),
        (["film_envs:GreyEnv", "out.mp4", "--policy", "film_envs:number"], "cannot be called"),
        (["film_envs:GreyEnv", "out.mp4", "--policy", "film_envs:broken"], "raised in step 0: KeyError: 'no weights'"),
        (["film_envs:GreyEnv", "out.mp4", "--policy", "film_envs:too_few"], "the policy 'film_envs:too_few' in step 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nonsense_is_refused_in_one_sentence(
    arguments: list[str], says: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, *arguments)
    assert list(folder.iterdir()) == []


def test_who_has_no_encoder_is_told_where_to_find_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    assert install("video") in refused(capsys, "film_envs:GreyEnv", "out.mp4")
    assert list(folder.iterdir()) == []


def test_an_env_that_lacks_what_it_renders_with_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)
    said = refused(capsys, "CartPole-v1", "out.mp4")
    assert "cannot be rendered" in said
    assert 'pip install "gymnasium[classic-control]"' in said


@pytest.mark.parametrize(
    ("arguments", "says", "frames"),
    [
        (["film_envs:BreakingEnv"], "'film_envs:BreakingEnv' failed in step 2", 3),
        (["film_envs:GreyEnv", "--policy", "film_envs:breaks_later"], "raised in step 2", 3),
        (["film_envs:GrowingEnv"], None, 0),
    ],
    ids=["the env", "the policy", "the first picture"],
)
def test_what_was_recorded_before_something_broke_is_kept(
    arguments: list[str], says: str | None, frames: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "out.mp4").write_text("an older one")
    said = refused(capsys, *arguments, "-n", "2", "out.mp4")
    if says is None:
        assert "all pictures must have one size, and env 0 renders [10, 8, 3] where the first was [8, 8, 3]" in said
        assert (folder / "out.mp4").read_text() == "an older one"
    else:
        assert says in said
        assert said.endswith(f"; {frames} frames until then are in out.mp4")
        assert len(decoded(folder / "out.mp4")[0]) == frames
    assert [path.name for path in folder.iterdir()] == ["out.mp4"]


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (OSError("no space left\n\nFFMPEG COMMAND: ..."), 2, "shoal record: the encoder failed: no space left\n"),
        (KeyboardInterrupt(), 130, "shoal record: interrupted\n"),
    ],
    ids=["failed", "interrupted"],
)
def test_a_file_that_the_encoder_has_not_finished_is_not_kept(
    error: BaseException, code: int, says: str, folder: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def write_frames(path: str, *_: Any, **__: Any) -> Iterator[None]:
        Path(path).touch()
        for _ in range(4):
            yield
        raise error

    monkeypatch.setattr("shoal.wrappers.video._encoder", lambda: SimpleNamespace(write_frames=write_frames))
    assert run("film_envs:GreyEnv", "-n", "2", "out.mp4") == code
    assert capsys.readouterr().err.endswith(says)
    assert list(folder.iterdir()) == []


# ---- Ctrl-C --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "frames"), [("interrupts", 4), ("interrupts_twice", 3)])
def test_an_interrupt_keeps_what_was_recorded(
    policy: str, frames: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one waits for the step that is under way, the second does not."""
    code = run("film_envs:GreyEnv", "-n", "2", "--policy", f"film_envs:{policy}", "out.mp4")
    out, err = capsys.readouterr()
    assert code == 130
    assert out == f"saved {frames} frames of 2 envs to out.mp4: no episode ended\n"
    assert err.endswith("shoal record: interrupted\n")
    assert len(decoded(folder / "out.mp4")[0]) == frames
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "as it was before"


@pytest.mark.parametrize("backend", ["serial", "processes", "hybrid"])
def test_an_interrupt_from_the_terminal_leaves_a_video_that_plays(backend: str, folder: Path) -> None:
    script = (
        "import os, sys\n"
        "os.environ['GROUP'] = str(os.getpgrp())\n"
        f"sys.path[:0] = {[*sys.path]!r}\n"
        "from shoal.cli import main\n"
        f"sys.exit(main.main(['record', 'film_envs:TerminalEnv', '-n', '3', 'out.mp4', '--backend', {backend!r}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, start_new_session=True
    )
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    # All three envs send one: an impatient user. If the second arrives before the step is over, that is not waited for.
    frames = len(decoded(folder / "out.mp4")[0])
    assert frames in (3, 4)
    assert done.stdout == f"saved {frames} frames of 3 envs to out.mp4: no episode ended\n"
    assert [path.name for path in folder.iterdir()] == ["out.mp4"]


def test_an_interrupt_before_the_first_picture_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CountEnv, "reset", interrupted)
    assert run("film_envs:GreyEnv", "-n", "2", "out.mp4") == 130
    assert capsys.readouterr().err.endswith("shoal record: interrupted\n")
    assert list(folder.iterdir()) == []

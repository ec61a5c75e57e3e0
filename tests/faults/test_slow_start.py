"""A start that takes long says so: in which env, in which worker, and where; a close says which env has kept it."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal
from envs import CountEnv
from faults.kit import RELEASE, DeedEnv, assert_usable, eventually, open_pool
from shoal.engine import timeouts
from shoal.planning import building
from shoal.support.deadline import Deadline

pytestmark = pytest.mark.timeout(50)  # less than what hangs lasts, and enough on a busy machine

ELSEWHERE = [("threads", "forkserver"), ("processes", "forkserver"), ("processes", "spawn"), ("hybrid", "forkserver")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the env that takes long says that it rests, and is told that it may go on: when a warning was given.

    A wait for its worker takes too long as soon as it rests, however long the machine has taken until then.
    """
    resting, told = tmp_path / "resting", tmp_path / "told"

    class Impatient(timeouts.Patience):
        def wait(self, wait: Any, worker: Any, story: Any) -> Any:
            while not resting.exists():
                with contextlib.suppress(shoal.StepTimeout):
                    return wait(Deadline.after(0.05))
            if told.exists() or resting.read_text() != f"shoal-{worker.index}":
                return wait(self.deadline)  # another worker's env rests, and this one may take its time
            self._first_look = Deadline.after(0.1)
            return super().wait(wait, worker, lambda: (story(), told.touch())[0])

    monkeypatch.setattr(building, "Patience", Impatient)
    return tmp_path


class SlowToBuild(CountEnv):
    """Rests while it is built, until it is told to go on."""

    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder
        self.take_a_rest()

    def take_a_rest(self) -> None:
        thread = threading.current_thread().name
        worker = thread if thread.startswith("shoal-") else multiprocessing.current_process().name
        (self.folder / "rests").write_text(worker)
        (self.folder / "rests").rename(self.folder / "resting")
        eventually((self.folder / "told").exists, seconds=40)


class SlowFirstStep(SlowToBuild):
    def __init__(self, folder: Path):
        self.built = False
        super().__init__(folder)
        self.built = True

    def take_a_rest(self) -> None:
        if self.built:
            super().take_a_rest()

    def step(self, action: Any) -> Any:
        self.take_a_rest()
        return super().step(action)


class SlowToLoad:
    """Makes an env, and takes long to be unpickled."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self) -> CountEnv:
        return CountEnv()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        SlowToBuild.take_a_rest(self)  # type: ignore[arg-type]


def text_of(caught: Any) -> str:
    """Of the one warning there is; it points at the caller's own line."""
    [warning] = [one for one in caught if issubclass(one.category, shoal.SlowEnvWarning)]
    assert Path(warning.filename).name in ("test_slow_start.py", "kit.py"), warning
    return str(warning.message)


@pytest.mark.parametrize(("backend", "start_method"), ELSEWHERE)
def test_a_constructor_that_takes_long(backend: str, start_method: str, folder: Path) -> None:
    fns = [CountEnv, CountEnv, CountEnv, functools.partial(SlowToBuild, folder)]
    with pytest.warns(shoal.SlowEnvWarning) as caught:
        pool = open_pool(fns, None, backend, start_method=start_method)
    with pool:
        text = text_of(caught)
        assert "worker 1 is still building env 3" in text
        assert "start_timeout" in text
        assert "take_a_rest" in text, text
        assert_usable(pool)


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_an_env_function_that_takes_long_to_load(start_method: str, folder: Path) -> None:
    with pytest.warns(shoal.SlowEnvWarning) as caught:
        pool = open_pool(SlowToLoad(folder), 2, num_workers=1, start_method=start_method)
    pool.close()
    text = text_of(caught)
    assert "worker 0 (envs 0 to 1) has not begun to build envs" in text
    assert "__setstate__" in text, text


@pytest.mark.parametrize("env", [SlowToBuild, SlowFirstStep])
def test_an_env_that_takes_long_while_auto_measures_it(env: type[SlowToBuild], folder: Path) -> None:
    with pytest.warns(shoal.SlowEnvWarning) as caught:
        pool = shoal.Pool(functools.partial(env, folder), 2)
    pool.close()
    text = text_of(caught)
    assert "env 1" in text  # the last one is measured
    assert 'backend="auto"' in text
    assert "take_a_rest" in text, text


def test_a_start_with_a_limit_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "PATIENCE_NS", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", shoal.SlowEnvWarning)
        open_pool(CountEnv, 2, start_timeout=40).close()


# ---- close ---------------------------------------------------------------------------------------------------


@pytest.fixture
def release() -> Iterator[None]:
    yield
    RELEASE.set()


@pytest.mark.usefixtures("release")
@pytest.mark.parametrize("where", ["step", "close"])
@pytest.mark.parametrize(("backend", "start_method"), ELSEWHERE)
def test_a_close_says_which_env_hangs(backend: str, start_method: str, where: str) -> None:
    pool = open_pool(DeedEnv, 4, backend, start_method=start_method)
    pool.reset(seed=0)
    pool.set_attr("deeds", [{}, {}, {}, {where: "hang"}])
    if where == "step":
        pool.send([0, 0, 0, 0])
    with pytest.warns(shoal.SlowEnvWarning) as caught:
        pool.close(0.5)
    text = text_of(caught)
    assert "worker 1" in text
    assert "env 3" in text
    assert "hang" in text.partition("env 3")[2], text
    with warnings.catch_warnings():
        warnings.simplefilter("error", shoal.SlowEnvWarning)
        pool.close()


def test_a_close_that_nothing_hangs_in_says_nothing(backend: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", shoal.SlowEnvWarning)
        for deeds in ({}, {"close": "take a while"}):
            pool = open_pool(DeedEnv, 4, backend)
            pool.reset(seed=0)
            pool.set_attr("deeds", deeds)
            pool.close(20)

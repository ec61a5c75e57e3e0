"""Compiled code is kept on disk, and never where anything has changed that it depends on."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.compiled import cache
from shoal.compiled.numba_cpu import Machine

pytest.importorskip("numba", reason="compiled envs need numba")

SOURCE = """
import numpy as np
from gymnasium import spaces
from shoal import compiled
import constants

SCALE = 2.0
TABLE = np.array([1.0, 2.0])

def closed_over(value):
    @compiled.function
    def inner(x):
        return x * value
    return inner

helper = closed_over(3.0)

class Small(compiled.Env):
    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(2)
    state = {"x": float}
    factor = 1.0

    @staticmethod
    def reset(state, rng):
        state.x = constants.START

    @staticmethod
    def step(state, action, rng):
        state.x += helper(SCALE) + TABLE[action] + Small.factor
        return state.x, False

    @staticmethod
    def observe(state, obs):
        obs[0] = state.x
"""


def load(change: tuple[str, str] = ("", ""), start: float = 0.5) -> Any:
    constants = types.ModuleType("constants")
    constants.START = start  # type: ignore[attr-defined]
    sys.modules["constants"] = constants
    module = types.ModuleType("small")
    exec(compile(SOURCE.replace(*change), "small.py", "exec"), module.__dict__)
    del sys.modules["constants"]
    return module.Small


def rewards(env: Any, **options: Any) -> list[float]:
    with shoal.Pool(env, 2, num_workers=1, **options) as pool:
        pool.reset(seed=0)
        return list(pool.step(np.array([0, 1])).reward)


def test_whatever_changes_is_compiled_anew(fresh_cache: Path) -> None:
    base = load()
    assert rewards(base, backend="compiled") == [8.5 + 0.0, 9.5]
    assert len(list(fresh_cache.iterdir())) == 1
    assert rewards(load(), backend="compiled") == [8.5, 9.5]
    assert len(list(fresh_cache.iterdir())) == 1  # the same once more
    variants = [
        load(("SCALE = 2.0", "SCALE = 4.0")),
        load(("1.0, 2.0", "1.0, 5.0")),
        load(("closed_over(3.0)", "closed_over(2.0)")),
        load(("x * value", "x - value")),
        load(("factor = 1.0", "factor = 0.25")),
        load(start=7.0),
    ]
    for env in variants:
        assert rewards(env, backend="compiled") == rewards(env, backend="serial")
    assert len(list(fresh_cache.iterdir())) == 1 + len(variants)


def test_a_damaged_file_is_not_used(fresh_cache: Path) -> None:
    env = load()
    expected = rewards(env, backend="compiled")
    (file,) = fresh_cache.iterdir()
    whole = file.read_bytes()
    for damaged in (b"", b"nonsense", whole[:-1], whole.replace(b"symbol", b"simbol")):
        file.write_bytes(damaged)
        assert rewards(load(), backend="compiled") == expected
        assert len(file.read_bytes()) > len(whole) // 2  # whole again


def test_first_use_says_what_it_does(fresh_cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rewards(load(), backend="compiled")
    said = capfd.readouterr().err
    assert said.startswith("shoal: compiling Small ... ")
    assert said.endswith(f" s, cached in {fresh_cache}\n")
    rewards(load(), backend="compiled")
    assert capfd.readouterr().err == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.setenv("SHOAL_CACHE_DIR", str(tmp_path / "cache"))
    assert rewards(load(), backend="compiled") == [8.5, 9.5]
    assert "not cached: " in capfd.readouterr().err


def test_a_file_in_the_way_of_the_folder(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("SHOAL_CACHE_DIR", str(tmp_path / "cache"))
    assert rewards(load(), backend="compiled") == [8.5, 9.5]
    assert "not cached: " in capfd.readouterr().err


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import numpy as np, shoal
from compiled.envs import CartPole
with shoal.Pool(CartPole, 3, backend="compiled") as pool:
    pool.reset(seed=0)
    print(pool.step(np.zeros(3, int)).obs.tolist(), "numba" in sys.modules)
"""


def test_several_processes_at_once_and_a_second_start(fresh_cache: Path) -> None:
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]))

    def start() -> Any:
        return subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    results = [process.communicate(timeout=100) for process in [start() for _ in range(3)]]
    answers = {out.rpartition("]")[0] for out, _ in results}
    assert len(answers) == 1, results
    assert all("]" in out for out, _ in results), results
    assert len(list(fresh_cache.iterdir())) == 1
    out, err = start().communicate(timeout=100)
    assert out.rpartition("]")[0] in answers
    assert out.split()[-1] == "False"  # nothing to compile, so nobody needs Numba
    assert err == ""


ALLOCATES = SCRIPT.replace(
    "from compiled.envs import CartPole",
    """from compiled.envs import CartPole as Base

class CartPole(Base):
    @staticmethod
    def reset(state, rng):
        state.x = np.arange(3.0).sum()

    @staticmethod
    def step(state, action, rng):
        drawn = np.empty(4 + action)
        for i in range(len(drawn)):
            drawn[i] = shoal.compiled.uniform(rng)
        state.x += np.sort(drawn)[0]
        return state.x, False

import shoal.compiled""",
)


def test_an_env_that_allocates_needs_numba_and_gets_it(fresh_cache: Path) -> None:
    script = ALLOCATES.format(tests=str(Path(__file__).parents[1]))
    plain = script.replace('"compiled")', '"serial")')
    said = []
    for text in (plain, script, script):  # the last one finds it in the cache
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        said.append((done.stdout.rpartition("]")[0], done.stderr != ""))
    assert said[0][0] == said[1][0] == said[2][0] != ""
    assert [spoke for _, spoke in said] == [False, True, False]


def test_each_function_that_uses_a_module_brings_its_own_names() -> None:
    from shoal.compiled.fingerprint import fingerprint

    module: Any = types.ModuleType("numbers_of_mine")
    names: dict[str, Any] = {"module": module}
    exec("def first(): return module.a\ndef second(): return module.b", names)
    functions = {name: names[name] for name in ("first", "second")}
    module.a, module.b = 1.0, 2.0
    before = fingerprint("", functions, {}, False)
    assert fingerprint("", functions, {}, False) == before
    module.b = 3.0
    assert fingerprint("", functions, {}, False) != before


# ---- who may write there -------------------------------------------------------------------------------------


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The warnings of the cache, each of which comes once in a process otherwise."""
    found: list[str] = []
    monkeypatch.setattr(cache, "_warn", lambda path, reason, remedy: found.append(f"{path}: {reason}; {remedy}"))
    return found


def machine() -> Any:
    return Machine("symbol", False, b"code")


def test_folder_and_files_are_for_the_user_alone(tmp_path: Path, heard: list[str]) -> None:
    path = tmp_path / "deep" / "cache" / "a.kernel"
    before = os.umask(0)  # of a user who shares everything
    try:
        cache.write(path, machine())
    finally:
        os.umask(before)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    assert cache.read(path) == machine()
    assert heard == []


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_may_write_to_is_not_used(mode: int, tmp_path: Path, heard: list[str]) -> None:
    path = tmp_path / "cache" / "a.kernel"
    cache.write(path, machine())
    path.parent.chmod(mode)
    assert cache.read(path) is None
    with pytest.raises(PermissionError, match="not this user's alone"):
        cache.write(path, machine())
    assert "others may write to it" in heard[0]
    assert f"chmod go-w {path.parent}" in heard[0]


def test_a_file_that_others_may_write_to_is_not_used_and_replaced(tmp_path: Path, heard: list[str]) -> None:
    path = tmp_path / "cache" / "a.kernel"
    cache.write(path, machine())
    path.chmod(0o620)
    assert cache.read(path) is None
    assert "others may write to it (mode 620)" in heard[0]
    cache.write(path, machine())
    assert cache.read(path) == machine()


def test_what_belongs_to_another_user_is_not_used(tmp_path: Path, heard: list[str], monkeypatch: Any) -> None:
    path = tmp_path / "cache" / "a.kernel"
    cache.write(path, machine())
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert cache.read(path) is None
    with pytest.raises(PermissionError):
        cache.write(path, machine())
    assert f"belongs to the user with the number {owner}" in heard[0]


def test_a_link_to_a_file_is_not_followed(tmp_path: Path, heard: list[str]) -> None:
    path = tmp_path / "cache" / "a.kernel"
    cache.write(path, machine())
    os.rename(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.read(path) is None


def test_an_env_is_compiled_all_the_same_and_the_user_is_told(fresh_cache: Path) -> None:
    fresh_cache.mkdir()
    fresh_cache.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=rf"does not use {fresh_cache}: .*chmod go-w .*SHOAL_CACHE_DIR"):
        assert rewards(load(), backend="compiled") == [8.5, 9.5]
    assert list(fresh_cache.iterdir()) == []

"""Envs that are shared libraries: compiled here, and the same from Python and from C."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from compiled.kit import assert_same
from shoal import compiled, native

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "examples" / "c_env" / "pursuit.c"
needs_core = pytest.mark.skipif(native.core is None, reason="the C core calls libraries")
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

AGENTS = """
#include "shoal_env.h"
typedef struct { int32_t at[3]; } State; /* 12 bytes: not a multiple of 8 */
static void reset(void *s, uint64_t *rng) { ((State *)s)->at[1] = (int32_t)shoal_integer(rng, -5, 6); }
static int step(void *s, const void *a, double *reward, uint64_t *rng) {
    State *state = s;
    const int64_t *move = a;
    (void)rng;
    for (int i = 0; i < 3; i++) { state->at[i] += (int32_t)move[i] - 1; reward[i] = state->at[i]; }
    return state->at[0] == 3;
}
static void observe(const void *s, void *obs) {
    for (int i = 0; i < 3; i++) ((uint8_t *)obs)[2 * i] = (uint8_t)((const State *)s)->at[i];
}
static const shoal_env env = {
    .version = VERSION, .num_agents = 3, .name = "Three", .state_size = sizeof(State), .max_episode_steps = 9,
    .observation = {.type = TYPE, .dimensions = 1, .shape = {2}, .low = 0, .high = 255}, .action = {.discrete = 3},
    .reset = reset, .step = STEP, .observe = observe,
};
const shoal_env *shoal_env_v1(void) { return &env; }
"""


def build(folder: Path, source: Path | str, **names: str) -> Path:
    if isinstance(source, str):
        text, source = source, folder / "env.c"
        source.write_text(text)
    target = folder / f"{source.stem}.so"
    defines = [f"-D{name}={value}" for name, value in names.items()]
    command = ["cc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{compiled.include_folder()}", *defines]
    subprocess.run([*command, str(source), "-o", str(target), "-lm"], check=True)
    return target


GOOD = {"VERSION": "SHOAL_ENV_VERSION", "TYPE": "'B'", "STEP": "step"}


@pytest.fixture(scope="module")
def pursuit(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled.from_library(build(tmp_path_factory.mktemp("pursuit"), SOURCE))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled.from_library(build(tmp_path_factory.mktemp("three"), AGENTS, **GOOD))


@needs_core
@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("which", ["pursuit", "three"])
def test_c_and_python_agree(which: str, mode: Any, request: pytest.FixtureRequest) -> None:
    env = request.getfixturevalue(which)
    options: dict[str, Any] = {"num_envs": 5, "autoreset": mode, "env_kwargs": {}}
    with (
        shoal.Pool(env, backend="serial", **options) as plain,
        shoal.Pool(env, backend="compiled", num_workers=3, **options) as in_c,
    ):
        plain.action_space.seed(0)
        a, b = plain.reset(seed=1), in_c.reset(seed=1)
        for _ in range(230 if which == "pursuit" and mode == "next_step" else 40):
            assert_same(a, b)
            if mode == "disabled" and a.done.any():
                ended = np.flatnonzero(a.done)
                assert_same(plain.reset(ended), in_c.reset(ended))
            actions = plain.action_space.sample()
            a, b = plain.step(actions), in_c.step(actions)


@needs_core
def test_what_it_says_is_what_it_is(pursuit: Any) -> None:
    assert pursuit.__name__ == "Pursuit"
    assert issubclass(pursuit, compiled.Env)
    with shoal.Pool(pursuit, 6, seed=2) as pool:
        assert pool.plan.backend == "compiled"
        assert pool.single_action_space.shape == (2,)
        first = pool.rollout(lambda obs: np.clip(obs[:, :2], -1.0, 1.0), 20)
        saved = pool.snapshot()
        after = pool.step(np.zeros((6, 2), np.float32)).obs.copy()
        pool.restore(saved)
        np.testing.assert_array_equal(pool.step(np.zeros((6, 2), np.float32)).obs, after)
        assert first.reward.shape == (20, 6)


def test_other_processes_run_it(pursuit: Any) -> None:
    with shoal.Pool(pursuit, 2, backend="processes", num_workers=1) as pool:
        there = pool.reset(seed=4).obs.copy()
    with shoal.Pool(pursuit, 2, backend="serial") as pool:
        np.testing.assert_array_equal(pool.reset(seed=4).obs, there)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"VERSION": "7"}, "made for version 7 of shoal_env.h, and this is 1: compile it anew"),
        ({"TYPE": "'x'"}, "observation has the type 'x'"),
        ({"STEP": "0"}, "it has no step"),
    ],
)
def test_a_library_that_makes_no_sense(tmp_path: Path, change: dict[str, str], message: str) -> None:
    source = AGENTS.replace("static int step", "static inline int step")
    with pytest.raises(shoal.BadEnv, match=message):
        compiled.from_library(build(tmp_path, source, **(GOOD | change)))


def test_no_library_at_all(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(shoal.BadEnv, match=r"no library with a function shoal_env_v1, see shoal_env.h"):
        compiled.from_library(tmp_path / "text.so")


@needs_core
def test_the_example_runs(tmp_path: Path) -> None:
    library = build(tmp_path, SOURCE)
    script = ROOT / "examples" / "c_env" / "run.py"
    done = subprocess.run([sys.executable, str(script), str(library)], capture_output=True, text=True, timeout=60)
    assert "hares caught" in done.stdout, done.stderr


@pytest.mark.skipif(native.core is not None, reason="for where the C core is missing")
def test_without_the_core_it_says_so(pursuit: Any) -> None:
    with pytest.raises(shoal.BadEnv, match="C core was not built"):
        shoal.Pool(pursuit, 2, backend="compiled")

"""The Stable-Baselines3 face where Stable-Baselines3 is missing or broken, and the order of imports where it is not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PATH = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

BLOCKED = {
    "None in sys.modules": "import sys; sys.modules['stable_baselines3'] = None",
    "not found": """
        import sys
        class Nothing:
            def find_spec(self, name, path=None, target=None):
                if name.partition('.')[0] in ('stable_baselines3', 'torch'):
                    raise ModuleNotFoundError(f'No module named {name!r}', name=name)
        sys.meta_path.insert(0, Nothing())
    """,
    "broken: it has no torch": "import sys; sys.modules['torch'] = None",
}

EVERYTHING = """
    import pickle, tempfile, os
    import numpy as np
    from envs import CountEnv, SPACES, SpaceEnv
    from functools import partial
    from shoal.dialects.sb3 import *

    def play(venv, steps=8):
        venv.seed(3)
        venv.reset()
        for _ in range(steps):
            result = venv.step(np.zeros(venv.num_envs, np.int64))
        venv.env_is_wrapped(Monitor)
        return result

    folder = tempfile.mkdtemp()
    for venv in (DummyVecEnv([CountEnv] * 3), SubprocVecEnv([CountEnv] * 3, num_workers=2), make_vec_env(CountEnv, 3)):
        wrapped = VecMonitor(VecNormalize(VecFrameStack(VecCheckNan(venv), 2)), os.path.join(folder, 'log'))
        play(wrapped)
        normalizer = unwrap_vec_normalize(wrapped)
        normalizer.save(os.path.join(folder, 'file'))
        other = VecNormalize.load(os.path.join(folder, 'file'), VecFrameStack(DummyVecEnv([CountEnv]), 2))
        sync_envs_normalization(wrapped, other)
        assert (other.obs_rms.mean == normalizer.obs_rms.mean).all()
        pickle.loads(pickle.dumps(normalizer))
        assert is_vecenv_wrapped(wrapped, VecFrameStack)
        wrapped.close()
    play(VecTransposeImage(DummyVecEnv([partial(SpaceEnv, SPACES['image'])])))
    play(VecExtractDictObs(DummyVecEnv([partial(SpaceEnv, SPACES['dict'])]), 'a'))

    class Mine(VecEnvWrapper):
        def reset(self): return self.venv.reset()
        def step_wait(self): return self.venv.step_wait()

    play(Mine(DummyVecEnv([CountEnv])))
    print('all is well')
"""


def run(*parts: str) -> str:
    script = "\n".join(textwrap.dedent(part) for part in parts)
    environment = {**os.environ, "PYTHONPATH": PATH}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("block", BLOCKED.values(), ids=BLOCKED)
def test_without_stable_baselines(block: str) -> None:
    assert "all is well" in run(block, EVERYTHING)


def test_what_their_files_hold_is_read_without_them(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3", reason="it writes the file")
    from stable_baselines3.common import vec_env as sb3

    from envs import CountEnv

    theirs = sb3.VecNormalize(sb3.DummyVecEnv([CountEnv] * 2))
    theirs.reset()
    theirs.save(str(tmp_path / "file.pkl"))
    told = run(
        BLOCKED["None in sys.modules"],
        f"""
        from envs import CountEnv
        from shoal.dialects.sb3 import DummyVecEnv, VecNormalize
        venv = VecNormalize.load({str(tmp_path / "file.pkl")!r}, DummyVecEnv([CountEnv]))
        print(venv.obs_rms.mean.tolist() == {theirs.obs_rms.mean.tolist()!r})
        """,
    )
    assert "True" in told


def test_importing_the_face_imports_nothing_heavy() -> None:
    assert "[]" in run(
        "import sys, shoal.dialects.sb3",
        "print([name for name in ('torch', 'stable_baselines3') if name in sys.modules])",
    )


def test_a_wrapper_of_users_on_their_envs_passes_for_theirs() -> None:
    """Nothing but the wrapper is ours here: it must make itself known all the same."""
    pytest.importorskip("stable_baselines3", reason="it makes the envs")
    told = run("""
        from stable_baselines3.common import vec_env as sb3
        from envs import CountEnv
        from shoal.dialects.sb3 import VecEnvWrapper

        class Mine(VecEnvWrapper):
            def reset(self): return self.venv.reset()
            def step_wait(self): return self.venv.step_wait()

        venv = Mine(sb3.DummyVecEnv([CountEnv]))
        print(isinstance(venv, sb3.VecEnv), isinstance(venv, sb3.VecEnvWrapper))
    """)
    assert told.split() == ["True", "True"]


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    """Envs that are defined in the script itself, in processes, as SB3 cannot have them without a guard."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            from envs import CountEnv
            from shoal.dialects.sb3 import SubprocVecEnv

            class Mine(CountEnv):
                pass

            venv = SubprocVecEnv([lambda: Mine(length=n) for n in (2, 3)], num_workers=2)
            venv.reset()
            print(venv.get_attr('length'))
            venv.close()
        """)
    )
    environment = {**os.environ, "PYTHONPATH": PATH}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, env=environment, check=False
    )
    assert done.stdout == "[3, 3]\n", done.stderr

"""Files of Normalize: data alone. What others wrote is read, and nothing that is in it runs."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import shoal
from shoal.errors import DataError
from shoal.wrappers import Normalize, RunningMeanStd, wrap
from shoal.wrappers.running import write_statistics
from wrappers.kit import MANY, VECTOR, NoisyEnv, assert_same, play, stable_baselines

DATA = Path(__file__).parent / "data"
ARGUMENTS: dict[str, Any] = {
    "training": False,
    "norm_reward": False,
    "clip_obs": 3.0,
    "clip_reward": 4.0,
    "gamma": 0.5,
    "epsilon": 1e-3,
}


def trained(space: Any, **arguments: Any) -> Normalize:
    with wrap(shoal.Pool(partial(NoisyEnv, space), 2, backend="serial"), normalize := Normalize(**arguments)) as pool:
        list(play(pool, 6))
    return normalize


def assert_equal(one: Normalize, other: Normalize) -> None:
    for name in (*ARGUMENTS, "norm_obs", "norm_obs_keys"):
        assert getattr(one, name) == getattr(other, name), name
    assert_same(data_of(one.obs_rms), data_of(other.obs_rms))
    assert_same(data_of(one.ret_rms), data_of(other.ret_rms))


def data_of(statistics: Any) -> Any:
    if statistics is None:
        return {}
    if isinstance(statistics, dict):
        return {key: data_of(one) for key, one in statistics.items()}
    return {"mean": np.asarray(statistics.mean), "var": np.asarray(statistics.var), "count": float(statistics.count)}


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "box": (VECTOR, {}),
    "settings": (VECTOR, ARGUMENTS),
    "no observations": (VECTOR, {"norm_obs": False}),
    "dict": (MANY, {}),
    "one key of a dict": (MANY, {"norm_obs_keys": ["vector"]}),
    "no axes": (spaces.Box(-np.inf, np.inf, (), np.float64), {}),
    "keys named as statistics are": (spaces.Dict(mean=VECTOR, var=VECTOR, count=VECTOR), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_was_saved_is_loaded(name: str, tmp_path: Path) -> None:
    space, arguments = CASES[name]
    before = trained(space, **arguments)
    before.save(tmp_path / "a folder" / "file")
    after = Normalize.load(str(tmp_path / "a folder" / "file"))
    assert_equal(after, before)
    after.training = False
    with wrap(shoal.Pool(partial(NoisyEnv, space), 3, backend="serial"), after) as pool:
        obs = pool.reset(seed=0).obs
        assert_same(obs, before.normalize_obs(after.get_original_obs()))


def test_one_that_was_never_used_is_saved_too(tmp_path: Path) -> None:
    Normalize(gamma=0.3).save(tmp_path / "file")
    assert_equal(Normalize.load(tmp_path / "file"), Normalize(gamma=0.3))


def test_the_file_holds_data_and_no_pickle(tmp_path: Path) -> None:
    trained(spaces.Box(-np.inf, np.inf, (40, 10), np.float64)).save(tmp_path / "file")
    with zipfile.ZipFile(tmp_path / "file") as archive:
        for member in archive.namelist():
            content = archive.read(member)
            if member.endswith(".npy"):
                np.load(io.BytesIO(content), allow_pickle=False)
            else:
                json.loads(content)


def test_statistics_must_fit_the_envs(tmp_path: Path) -> None:
    trained(VECTOR).save(tmp_path / "file")
    trained(MANY).save(tmp_path / "many")
    four = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    for file, space, reason in (
        ("file", four, r"\(3,\).*\(4,\)"),
        ("file", MANY, "statistics"),
        ("many", VECTOR, "keys are for Dict|statistics"),
        ("many", spaces.Dict(vector=four), "last"),
    ):
        with shoal.Pool(partial(NoisyEnv, space), 1, backend="serial") as pool:
            with pytest.raises(ValueError, match=reason):
                wrap(pool, Normalize.load(tmp_path / file))


def test_the_file_is_one_that_numpy_reads(tmp_path: Path) -> None:
    before = trained(VECTOR, clip_reward=np.inf)
    before.save(tmp_path / "file")
    with np.load(tmp_path / "file", allow_pickle=False) as members:
        document = json.loads(bytes(members["document"]))
        content = json.loads(document["value"])
        assert (document["what"], document["version"]) == ("shoal normalization", 2)
        assert_same(members[f"array_{content['obs_rms']['mean']['array']}"], before.obs_rms.mean)
    assert (content["gamma"], content["clip_reward"]) == (0.99, np.inf)
    assert_equal(Normalize.load(tmp_path / "file"), before)


def test_a_part_may_be_called_as_arrays_are(tmp_path: Path) -> None:
    before = trained(spaces.Dict(array=VECTOR))
    before.save(tmp_path / "file")
    assert_equal(Normalize.load(tmp_path / "file"), before)


def test_files_of_format_1_are_still_loaded() -> None:
    """They hold what is in env states, a document of tagged nodes."""
    found = Normalize.load(DATA / "normalize-1.npz")
    assert (found.clip_obs, found.clip_reward, found.gamma, found.epsilon) == (3.0, np.inf, 0.5, 1e-3)
    assert (found.training, found.norm_obs, found.norm_reward, found.norm_obs_keys) == (False, True, False, None)
    np.testing.assert_allclose(found.obs_rms.mean, [6.87241692, 6.45753283, 7.70809702])
    assert (found.obs_rms.count, found.ret_rms.count) == (14.0001, 8.0001)
    assert found.ret_rms.var == 29.446700737618936
    found = Normalize.load(DATA / "normalize-1-dict.npz")
    assert (found.training, found.norm_obs_keys) == (True, ["vector", "wide"])
    np.testing.assert_allclose(found.obs_rms["vector"].mean, [7.36413276, 7.18002291, 8.49560824])
    assert found.obs_rms["wide"].var.shape == (9, 9)
    np.testing.assert_allclose(found.obs_rms["wide"].var.sum(), 653.1447873733534)


# ---- files that are none -------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [False, True], ids=["format 2", "format 1"])
def test_damaged_files_are_refused(old: bool, tmp_path: Path) -> None:
    """Cut off anywhere, or with bytes turned over: a DataError, or what was saved, never anything else."""
    path, broken = tmp_path / "file", tmp_path / "broken"
    trained(VECTOR).save(path)
    content = path.read_bytes() if not old else (DATA / "normalize-1.npz").read_bytes()
    path.write_bytes(content)
    before = Normalize.load(path)
    generator = np.random.default_rng(0)
    for _ in range(60):
        damaged = bytearray(content[: int(generator.integers(len(content)))])
        broken.write_bytes(damaged)
        with pytest.raises(DataError):
            Normalize.load(broken)
    for _ in range(150):
        damaged = bytearray(content)
        damaged[int(generator.integers(len(content)))] ^= 1 << int(generator.integers(8))
        broken.write_bytes(damaged)
        try:
            after = Normalize.load(broken)
        except DataError:
            continue
        assert_same(data_of(after.ret_rms), data_of(before.ret_rms))


NO_FILES: dict[str, bytes] = {
    "empty": b"",
    "text": b"mean,var\n0,1\n",
    "an empty archive": b"PK\x05\x06" + bytes(18),
    "a pickled number": pickle.dumps(5),
    "half a pickle": pickle.dumps({"obs_rms": [1, 2, 3]})[:-5],
    "an old pickle": pickle.dumps({}, 0),
}


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_normalization_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(NO_FILES[name])
    with pytest.raises(DataError, match="file"):
        Normalize.load(tmp_path / "file")


def test_other_files_of_shoal_are_refused(tmp_path: Path) -> None:
    with shoal.Pool("CartPole-v1", 1, backend="serial") as pool:
        pool.reset(seed=0)
        pool.snapshot(tmp_path / "file")
    with pytest.raises(DataError):
        Normalize.load(tmp_path / "file")


CONTENTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no statistics": {"obs_rms": 5, "ret_rms": {"mean": 0.0, "var": 1.0, "count": 1.0}},
    "a text for statistics": {"obs_rms": "none", "ret_rms": "none"},
    "no returns": {"obs_rms": None, "ret_rms": None},
    "a variance below zero": {"obs_rms": None, "ret_rms": {"mean": 0.0, "var": -1.0, "count": 1.0}},
    "shapes": {"obs_rms": None, "ret_rms": {"mean": np.zeros(2), "var": np.ones(3), "count": 1.0}},
    "returns of a shape": {"obs_rms": None, "ret_rms": {"mean": np.zeros(2), "var": np.ones(2), "count": 1.0}},
    "a mean that is no number": {"obs_rms": None, "ret_rms": {"mean": float("nan"), "var": 1.0, "count": 1.0}},
    "complex numbers": {"obs_rms": None, "ret_rms": {"mean": np.zeros((), complex), "var": 1.0, "count": 1.0}},
    "a switch": {"training": 5, "obs_rms": None, "ret_rms": {"mean": 0.0, "var": 1.0, "count": 1.0}},
    "keys": {"norm_obs_keys": "ab", "obs_rms": None, "ret_rms": {"mean": 0.0, "var": 1.0, "count": 1.0}},
    "other keys": {
        "norm_obs_keys": ["a"],
        "obs_rms": {"b": {"mean": 0.0, "var": 1.0, "count": 1.0}},
        "ret_rms": {"mean": 0.0, "var": 1.0, "count": 1.0},
    },
    "settings": {"gamma": [], "obs_rms": None, "ret_rms": {"mean": 0.0, "var": 1.0, "count": 1.0}},
}


@pytest.mark.parametrize("name", CONTENTS)
def test_files_with_other_contents_are_refused(name: str, tmp_path: Path) -> None:
    """Well made, by somebody else."""
    write_statistics(tmp_path / "file", CONTENTS[name])
    with pytest.raises(DataError):
        Normalize.load(tmp_path / "file")


def test_a_file_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Normalize.load(tmp_path / "none")


# ---- pickles -------------------------------------------------------------------------------------------------


class Runs:
    """Unpickled, it runs a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class VecNormalize:
    """By its name, something that such a file may hold."""


def _text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def call_by_name(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls what is found by this name, which may have dots in it."""
    return b"\x80\x04" + _text(module) + _text(name) + b"\x93" + _text(argument) + b"\x85R."


def hidden(command: str) -> bytes:
    """A call among the attributes of a VecNormalize."""
    made = VecNormalize()
    vars(made).update(obs_rms=None, ret_rms=Runs(os.system, command))
    return pickle.dumps(made)


MALICE: dict[str, Callable[[str], bytes]] = {
    "system": lambda command: pickle.dumps(Runs(os.system, command)),
    "system, hidden": hidden,
    "eval": lambda command: pickle.dumps(Runs(eval, f"__import__('os').system({command!r})")),
    "exec": lambda command: pickle.dumps(Runs(exec, f"import os; os.system({command!r})")),
    "subprocess": lambda command: call_by_name("subprocess", "getoutput", command),
    "dots of bit_generator": lambda command: call_by_name(
        "numpy.random.bit_generator", "np.testing._private.utils.os.system", command
    ),
    "dots of mtrand": lambda command: call_by_name("numpy.random.mtrand", "np.f2py.os.system", command),
    "dots of a test": lambda command: call_by_name("numpy.random.tests.test_extending", "os.system", command),
    "dots of a space": lambda command: call_by_name("gymnasium.spaces.box", "np.f2py.os.system", command),
    "dots of multiarray": lambda command: call_by_name("numpy.core.multiarray", "os.system", command),
    "runstring": lambda command: call_by_name("numpy.testing", "runstring", command),
}


@pytest.mark.parametrize("name", MALICE)
def test_nothing_in_a_pickle_runs(name: str, tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    (tmp_path / "file").write_bytes(MALICE[name](f"touch '{marker}'"))
    with pytest.raises(DataError):
        Normalize.load(tmp_path / "file")
    assert not marker.exists()


@pytest.mark.parametrize("cls", [gymnasium.spaces.Box, RunningMeanStd, np.ndarray])
def test_a_pickle_leaves_classes_as_they_are(cls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of an object may be set by a pickle, and a class is an object."""
    named = b"\x80\x04" + _text(cls.__module__) + _text(cls.__name__) + b"\x93"
    (tmp_path / "file").write_bytes(named + b"N}" + _text("harm") + b"K\x01s\x86b.")
    with pytest.raises(DataError):
        Normalize.load(tmp_path / "file")
    spoilt = hasattr(cls, "harm")
    monkeypatch.delattr(cls, "harm", raising=False)
    assert not spoilt


def bytes_of(value: Any) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def as_mean(mean: bytes) -> bytes:
    """A VecNormalize whose statistics have this mean."""
    statistics = b"cs\nRunningMeanStd\n)\x81}(" + _text("mean") + mean + _text("var") + b"K\x01"
    statistics += _text("count") + b"K\x01ub"
    return b"\x80\x04cs\nVecNormalize\n)\x81}(" + _text("obs_rms") + b"N" + _text("ret_rms") + statistics + b"ub."


TYPE_O = (
    b"cnumpy\ndtype\n" + bytes_of(("O8", False, True)) + b"R" + bytes_of((3, "|", None, None, None, -1, -1, 0)) + b"b"
)
NUMBERS = b"cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
TUPLES = b"K\x01\x85" + b"2\x86" * 60  # 2**60 parts
HARM: dict[str, bytes] = {
    "addresses as objects": as_mean(NUMBERS + b"(K\x01K\x01\x85" + TYPE_O + b"\x89C\x08AAAAAAAAtb"),
    "a place in the memo for gigabytes": b"\x80\x04Nr" + (2**31).to_bytes(4, "little") + b"0" + as_mean(b"K\x01")[2:],
    "a length of gigabytes": as_mean(b"\x96" + (2**40).to_bytes(8, "little") + b"aaaa"),
    "a shape of gigabytes": as_mean(b"cnumpy\nndarray\n" + bytes_of(((2**33,),)) + b"R"),
    "a key of 2**60 parts": as_mean(b"}" + TUPLES + b"K\x01s"),
    "a key of 2**60 parts, among others": as_mean(b"}(" + TUPLES + b"K\x01u"),
    "a key in an OrderedDict": as_mean(b"ccollections\nOrderedDict\n" + TUPLES + b"K\x01\x86\x85\x85R"),
    "a set": as_mean(b"\x8f(" + TUPLES + b"\x90"),
    "an attribute that is a method": b"\x80\x04cs\nRunningMeanStd\n)\x81}" + _text("as_data") + b"K\x01sb.",
    "statistics that hold themselves": b"\x80\x04cs\nVecNormalize\n)\x81}" + _text("obs_rms") + b"}q\x00"
    + _text("a") + b"h\x00ssb.",
}  # fmt: skip


@pytest.mark.parametrize("name", HARM)
def test_a_pickle_does_no_harm(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(HARM[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if name == "a place in the memo for gigabytes":
        Normalize.load(tmp_path / "file")  # which is all that is wrong with it
    else:
        with pytest.raises(DataError):
            Normalize.load(tmp_path / "file")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10


def test_the_pickle_above_is_one_but_for_its_mean(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(as_mean(b"K\x01"))
    assert Normalize.load(tmp_path / "file").ret_rms.mean == 1.0


# ---- Stable-Baselines3 ---------------------------------------------------------------------------------------


THEIRS: dict[str, tuple[Any, dict[str, Any]]] = {
    "box": (VECTOR, {}),
    "settings": (VECTOR, ARGUMENTS),
    "no observations": (VECTOR, {"norm_obs": False}),
    "dict": (MANY, {}),
    "one key of a dict": (MANY, {"norm_obs_keys": ["vector"]}),
}


@pytest.mark.parametrize("name", THEIRS)
def test_files_of_stable_baselines_are_loaded(name: str, tmp_path: Path) -> None:
    vec_env = stable_baselines()
    space, arguments = THEIRS[name]
    theirs = vec_env.VecNormalize(vec_env.DummyVecEnv([partial(NoisyEnv, space)] * 2), **arguments)
    theirs.observation_space.seed(3), theirs.action_space.seed(3)  # a generator in the file
    theirs.seed(0)
    theirs.reset()
    for _ in range(8):
        theirs.step(np.zeros((2, 2), np.float32))
    theirs.save(str(tmp_path / "file.pkl"))
    ours = Normalize.load(tmp_path / "file.pkl")
    assert_same(data_of(ours.ret_rms), data_of(theirs.ret_rms))
    assert_same(data_of(ours.obs_rms), data_of(getattr(theirs, "obs_rms", None)))
    for setting in (*ARGUMENTS, "norm_obs"):
        assert getattr(ours, setting) == getattr(theirs, setting), setting
    raw = theirs.get_original_obs()
    with wrap(shoal.Pool(partial(NoisyEnv, space), 2, backend="serial"), ours):
        assert_same(ours.normalize_obs(raw), theirs.normalize_obs(raw))
    ours.save(tmp_path / "again")
    assert_equal(Normalize.load(tmp_path / "again"), ours)
    theirs.close()


ACTION_SPACES: dict[str, Any] = {
    "discrete": spaces.Discrete(3),
    "multi discrete": spaces.MultiDiscrete([2, 3]),
    "multi binary": spaces.MultiBinary(3),
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
}


@pytest.mark.parametrize("name", ACTION_SPACES)
def test_files_of_stable_baselines_are_loaded_with_any_action_space(name: str, tmp_path: Path) -> None:
    """The spaces are in the file as well."""
    vec_env = stable_baselines()
    env = NoisyEnv()
    env.action_space = ACTION_SPACES[name]
    env.action_space.seed(1)
    theirs = vec_env.VecNormalize(vec_env.DummyVecEnv([lambda: env]))
    theirs.reset()
    theirs.save(str(tmp_path / "file.pkl"))
    assert_same(data_of(Normalize.load(tmp_path / "file.pkl").obs_rms), data_of(theirs.obs_rms))
    theirs.close()


def test_files_are_read_where_there_is_no_stable_baselines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vec_env = stable_baselines()
    theirs = vec_env.VecNormalize(vec_env.DummyVecEnv([NoisyEnv]), gamma=0.25)
    theirs.reset()
    theirs.save(str(tmp_path / "file.pkl"))
    theirs.close()
    for module in [name for name in sys.modules if name.startswith("stable_baselines3")]:
        monkeypatch.setitem(sys.modules, module, None)  # an import of it fails
    assert Normalize.load(tmp_path / "file.pkl").gamma == 0.25

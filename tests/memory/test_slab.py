"""The slab: fields lie apart and aligned, arrays see the same memory, and nothing gets a name in a file system."""

from __future__ import annotations

import contextlib
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from faults.kit import Traces
from shoal.errors import StartError
from shoal.memory import slab as slab_module
from shoal.memory.slab import Layout, Slab
from shoal.native.layout import FIELDS, LINE
from shoal.spaces.leaves import flatten

boxes = st.builds(
    lambda shape, dtype: spaces.Box(0, 1, tuple(shape), np.dtype(dtype).type),
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from(["f4", "f8", "u1", "i2", "i8", "?"]),
)
leaves = st.one_of(
    boxes,
    st.builds(spaces.Discrete, st.integers(1, 9)),
    st.builds(spaces.MultiBinary, st.integers(1, 9)),
    st.builds(lambda n: spaces.Text(max_length=n), st.integers(1, 9)),
    st.just(spaces.Sequence(spaces.Discrete(2))),
)
any_space = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda parts: spaces.Tuple(tuple(parts)), st.lists(inner, max_size=3)),
        st.builds(lambda parts: spaces.Dict({str(i): p for i, p in enumerate(parts)}), st.lists(inner, max_size=3)),
    ),
    max_leaves=6,
)


def plan(obs: Any, action: Any, lanes: int = 3, frames: int = 2, workers: int = 2) -> Layout:
    return Layout.plan(flatten(obs), flatten(action), lanes, frames, workers)


SMALL = plan(spaces.Box(0, 1, (3,)), spaces.Discrete(2))


@settings(max_examples=150, deadline=None)
@given(any_space, any_space, st.integers(1, 9), st.integers(2, 5), st.integers(1, 4))
def test_fields_are_aligned_and_do_not_overlap(obs: Any, action: Any, lanes: int, frames: int, workers: int) -> None:
    layout = plan(obs, action, lanes, frames, workers)
    end = 0
    for name, field in sorted(layout.fields.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        assert field.offset % LINE == 0, name
        assert field.offset >= end, name
        end = field.offset + field.nbytes
    assert layout.size >= end
    arrays = [name for name in layout.fields if name.startswith("obs.")]
    assert len(arrays) == sum(leaf.dtype != object for leaf in flatten(obs))
    for name in arrays:
        assert layout.fields[name].shape[:2] == (frames, lanes)


@settings(max_examples=40, deadline=None)
@given(any_space, any_space)
def test_a_write_to_one_field_is_seen_in_no_other(obs: Any, action: Any) -> None:
    layout = plan(obs, action)
    slab = Slab.create(layout, shared=False)
    arrays = {name: slab.array(name) for name in layout.fields}
    for name, array in arrays.items():
        array.view(np.uint8)[...] = 255
        for other, untouched in arrays.items():
            assert other == name or not untouched.view(np.uint8).any(), (name, other)
        array.view(np.uint8)[...] = 0


def test_every_field_is_there_with_its_type_and_shape() -> None:
    shapes = {("lanes",): (3,), ("frames", "lanes"): (2, 3)}
    for row in FIELDS:
        if row.shape in shapes and row.name in SMALL.fields:
            field = SMALL.fields[row.name]
            assert (field.dtype, field.shape) == (np.dtype(row.dtype), shapes[row.shape]), row.name
    assert SMALL.fields["obs.0"].shape == (2, 3, 3)
    assert SMALL.fields["action.0"].shape == (3,)


def test_each_worker_has_a_cache_line_of_its_own() -> None:
    for name in ("worker_bells", "mail", "stats", "episode_sums", "step_times"):
        assert SMALL.fields[name].nbytes // SMALL.workers >= LINE


def test_offsets_agree_with_arrays() -> None:
    slab = Slab.create(SMALL, shared=False)
    start = slab.array("header").ctypes.data
    names = [row.name for row in FIELDS if not row.name.endswith(".i")]
    for name, offset in zip(names, SMALL.offsets, strict=True):
        assert offset == (slab.array(name).ctypes.data - start if name in SMALL.fields else -1), name


def test_leaves_are_described_as_the_core_wants_them() -> None:
    space = spaces.Dict(a=spaces.Discrete(3), b=spaces.Box(0, 1, (2, 2), np.float64), c=spaces.Sequence(SPACE_OF_TWO))
    layout = plan(space, spaces.Discrete(2))
    slab = Slab.create(layout, shared=False)
    assert slab.describe("obs", flatten(space)) == (
        (layout.fields["obs.0"].offset, 8, 8, "n", (), ("a",), 8),
        (layout.fields["obs.1"].offset, 8, 32, "f", (2, 2), ("b",), 32),
        (0, 8, 8, "o", (), ("c",), 8),
    )
    assert [array is None for array in slab.leaf_arrays("obs", flatten(space))] == [False, False, True]


SPACE_OF_TWO = spaces.Discrete(2)


def test_another_mapping_sees_the_same_memory_and_no_name_is_left() -> None:
    before = Traces.of_this_process().shared
    slab = Slab.create(SMALL, shared=True)
    assert Traces.of_this_process().shared <= before
    assert slab.fd is not None
    assert not os.get_inheritable(slab.fd)
    twin_fd = os.dup(slab.fd)
    other = Slab.attach(SMALL, twin_fd)
    with pytest.raises(OSError):
        os.fstat(twin_fd)
    slab.array("reward")[1] = [1, 2, 3]
    assert other.array("reward")[1].tolist() == [1, 2, 3]
    slab.close()
    other.close()


def slabs_of_this_process() -> tuple[int, int]:
    """How many descriptors and how many mappings of slabs it has."""
    held = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            held.append(os.readlink(f"/proc/self/fd/{name}"))
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return sum("/memfd:shoal" in link for link in held), sum("/memfd:shoal" in line for line in mapped)


@pytest.mark.parametrize("shared", [False, True])
def test_close_gives_the_descriptor_back_and_leaves_the_users_arrays_alone(shared: bool) -> None:
    gc.collect()
    before = slabs_of_this_process()
    slab = Slab.create(SMALL, shared)
    fd, reward = slab.fd, slab.array("reward")
    assert fd is not None
    assert slabs_of_this_process() == (before[0] + 1, before[1] + 1)
    reward[:] = 7
    slab.close()
    slab.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    del slab
    gc.collect()
    assert slabs_of_this_process() == (before[0], before[1] + 1)
    assert (reward == 7).all()
    del reward
    gc.collect()
    assert slabs_of_this_process() == before


def test_a_slab_that_is_forgotten_leaves_nothing() -> None:
    gc.collect()
    before = slabs_of_this_process()
    Slab.create(SMALL, shared=True)
    gc.collect()
    assert slabs_of_this_process() == before


def test_without_a_descriptor_only_a_slab_that_is_to_be_shared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(slab_module.system, "shared_memory", refuse)
    slab = Slab.create(SMALL, shared=False)
    slab.array("reward")[:] = 3
    assert slab.fd is None
    slab.close()
    with pytest.raises(StartError, match="Too many open files"):
        Slab.create(SMALL, shared=True)


@pytest.mark.parametrize("shared", [False, True])
def test_too_large_a_slab_is_refused_with_what_is_needed_and_what_is_there(shared: bool) -> None:
    huge = Layout(1_000_000, 2, 1, {}, 1 << 50)
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StartError, match=r"1000000 envs in 2 frames need 1,125,899,906,842,624 bytes.* and [\d,]+ are"):
        Slab.create(huge, shared)
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_system_that_grants_no_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "ftruncate", refuse)
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StartError, match="No space left"):
        Slab.create(SMALL, shared=True)
    assert len(os.listdir("/proc/self/fd")) == fds

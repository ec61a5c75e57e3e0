"""Nested observations and actions become flat rows and come back whole: every leaf, its type, and without a copy."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from envs import SPACES, CountEnv, SpaceEnv
from shoal.emulation import ActionEmulation, ActionPart, Emulation
from shoal.errors import BadAction, BadEnv, BadObservation
from shoal.spaces.leaves import Kind, assemble, flatten, get_path

ZOO = spaces.Dict(
    camera=spaces.Box(0, 255, (5, 3, 3), np.uint8),
    speed=spaces.Box(-np.inf, np.inf, (3,), np.float64),
    gear=spaces.Discrete(6, start=-1),
    pair=spaces.Tuple((spaces.Box(-1.0, 1.0, (), np.float16), spaces.Dict(lamps=spaces.MultiBinary(3)))),
    door=spaces.Box(0, 1, (2,), np.bool_),
    nothing=spaces.Dict({}),
    blank=spaces.Box(0.0, 1.0, (2, 0), np.float32),
)
FLAT = {name: space for name, space in SPACES.items() if all(leaf.kind is Kind.ARRAY for leaf in flatten(space))}
FLAT |= {
    "zoo": ZOO,
    "empty tuple": spaces.Tuple(()),
    "two empty": spaces.Tuple((spaces.Dict({}), spaces.Tuple(()))),
    "same types": spaces.Dict(a=spaces.Box(-1.0, 1.0, (2, 2), np.float32), b=spaces.Box(0.0, 9.0, (), np.float32)),
    "integers": spaces.Tuple((spaces.Discrete(3, start=7), spaces.MultiDiscrete([[2, 3], [5, 7]]))),
    "odd bytes": spaces.Tuple((spaces.MultiBinary(3), spaces.Box(-1.0, 1.0, (), np.float64), spaces.MultiBinary(1))),
    "unsigned": spaces.Dict(u=spaces.Box(0, 2**16 - 1, (3,), np.uint16), v=spaces.Box(0, 2**32 - 1, (), np.uint32)),
    "wide discrete": spaces.Dict(n=spaces.Discrete(127, start=-100, dtype=np.int8), x=spaces.Box(0.0, 1.0, (1,))),
    "other end first": spaces.Tuple((spaces.Box(0.0, 1.0, (2,), np.dtype(">f4")), spaces.Discrete(2))),
    "uint64": spaces.Box(0, 2**60, (2,), np.uint64),
}
REFUSED = {name: space for name, space in SPACES.items() if name not in FLAT}
NATIVE = {name: space for name, space in FLAT.items() if name != "other end first"}  # PyTorch has its own end only
LEADS = [(1,), (7,), (3, 2), (0,), ()]


@pytest.fixture(params=["numpy", "torch"])
def library(request: pytest.FixtureRequest) -> Library:
    if request.param == "torch":
        return TorchLibrary(pytest.importorskip("torch"))
    return Library()


class Library:
    """Arrays of numpy, and how to tell what they share."""

    def of(self, array: Any) -> Any:
        return array

    def back(self, array: Any) -> Any:
        return array

    def shares(self, view: Any, rows: Any) -> bool:
        return np.shares_memory(view, rows)


class TorchLibrary(Library):
    """The same of PyTorch."""

    def __init__(self, torch: Any):
        self.torch = torch

    def of(self, array: Any) -> Any:
        return self.torch.from_numpy(np.array(array))

    def back(self, array: Any) -> Any:
        return array.numpy()

    def shares(self, view: Any, rows: Any) -> bool:
        first, size = rows.untyped_storage().data_ptr(), rows.untyped_storage().nbytes()
        return bool(first <= view.data_ptr() < first + size)


def samples(space: Any, lead: tuple[int, ...], seed: int = 3) -> Any:
    """A nested batch of any batch shape, as pools give them."""
    space.seed(seed)
    leaves = flatten(space)
    drawn = [space.sample() for _ in range(int(np.prod(lead)))]
    return assemble(
        space,
        [
            np.array([get_path(one, leaf.path) for one in drawn], leaf.dtype).reshape(lead + leaf.shape)
            for leaf in leaves
        ],
    )


def mapped(space: Any, change: Any, batch: Any) -> Any:
    return assemble(space, [change(get_path(batch, leaf.path)) for leaf in flatten(space)])


def assert_same(space: Any, one: Any, other: Any) -> None:
    """The same values of the same types, nested in the same way."""
    assert skeleton(one) == skeleton(other)
    for leaf in flatten(space):
        a, b = get_path(one, leaf.path), get_path(other, leaf.path)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), leaf.name
        np.testing.assert_array_equal(a, b, err_msg=leaf.name)


def skeleton(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: skeleton(part) for key, part in value.items()}
    return tuple(map(skeleton, value)) if isinstance(value, tuple) else "leaf"


# ---- observations: layout ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLAT)
def test_every_leaf_has_a_field_where_its_type_may_lie(name: str) -> None:
    emulation = Emulation(FLAT[name])
    leaves = flatten(FLAT[name])
    fields = emulation.dtype.fields or {}
    assert list(fields) == [leaf.name or "value" for leaf in leaves]
    assert emulation.dtype.itemsize == emulation.row_bytes
    end = 0
    for leaf, (kind, offset, *_) in zip(leaves, fields.values(), strict=True):
        assert (kind.base, kind.shape) == (leaf.dtype, leaf.shape)
        assert offset % leaf.dtype.itemsize == 0
        assert emulation.row_bytes % leaf.dtype.itemsize == 0
        assert offset >= end
        end = offset + kind.itemsize
    assert end <= emulation.row_bytes
    assert emulation.flat_space.shape == (emulation.size,)
    assert emulation.row_bytes == emulation.size * np.dtype(emulation.flat_space.dtype).itemsize


def test_leaves_of_one_type_make_rows_of_that_type_with_their_bounds() -> None:
    emulation = Emulation(FLAT["same types"])
    expected = spaces.Box(np.float32([-1] * 4 + [0]), np.float32([1] * 4 + [9]), dtype=np.float32)
    assert emulation.flat_space == expected
    discrete = Emulation(spaces.Discrete(5, start=-2)).flat_space
    assert discrete == spaces.Box(-2, 2, (1,), np.int64)
    assert Emulation(spaces.Box(0, 1, (3,), np.bool_)).flat_space.dtype == np.bool_


def test_leaves_of_several_types_make_rows_of_bytes() -> None:
    emulation = Emulation(spaces.Tuple((spaces.Box(0, 9, (3,), np.uint8), spaces.Discrete(4))))
    assert emulation.flat_space == spaces.Box(0, 255, (16,), np.uint8)
    assert (emulation.row_bytes, emulation.size) == (16, 16)


def test_a_space_without_leaves_has_rows_of_nothing() -> None:
    emulation = Emulation(FLAT["two empty"])
    assert emulation.flat_space.shape == (0,)
    assert emulation.flatten(({}, ())).shape == (0,)
    assert emulation.flatten(({}, ()), out=np.empty((4, 0), np.uint8)).shape == (4, 0)
    assert emulation.unflatten(np.empty((4, 0), np.uint8)) == ({}, ())


@pytest.mark.parametrize("emulate", [Emulation, ActionEmulation])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_array_is_refused_by_name(name: str, emulate: Any) -> None:
    first = next(leaf for leaf in flatten(REFUSED[name]) if leaf.kind is not Kind.ARRAY)
    with pytest.raises(BadEnv) as caught:
        emulate(REFUSED[name])
    assert f"{first.name} is a {first.kind.value}" in str(caught.value)


# ---- observations: there and back --------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("name", FLAT)
def test_observations_come_back_whole_and_without_a_copy(name: str, lead: tuple[int, ...]) -> None:
    space = FLAT[name]
    emulation = Emulation(space)
    batch = samples(space, lead)
    rows = emulation.flatten(batch, out=None if flatten(space) else np.empty((*lead, 0), np.uint8))
    assert rows.shape == (*lead, emulation.size)
    assert rows.dtype == emulation.flat_space.dtype
    nested = emulation.unflatten(rows)
    assert_same(space, nested, batch)
    for leaf in flatten(space):
        view = get_path(nested, leaf.path)
        assert np.shares_memory(view, rows) or not view.size, leaf.name


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("name", NATIVE)
def test_observations_come_back_whole_in_torch(name: str, lead: tuple[int, ...]) -> None:
    torch = TorchLibrary(pytest.importorskip("torch"))
    space = NATIVE[name]
    emulation = Emulation(space)
    batch = samples(space, lead)
    out = None if flatten(space) else torch.of(np.empty((*lead, 0), np.uint8))
    rows = emulation.flatten(mapped(space, torch.of, batch), out=out)
    assert isinstance(rows, torch.torch.Tensor)
    np.testing.assert_array_equal(rows.numpy(), emulation.flatten(batch, out=None if out is None else out.numpy()))
    nested = emulation.unflatten(rows)
    assert_same(space, mapped(space, torch.back, nested), batch)
    for leaf in flatten(space):
        view = get_path(nested, leaf.path)
        assert torch.shares(view, rows) or not view.numel(), leaf.name


@pytest.mark.parametrize("seed", [0, 1])
def test_gymnasiums_own_batches_are_taken(seed: int) -> None:
    batched = batch_space(ZOO, 5)
    batched.seed(seed)
    batch = batched.sample()
    emulation = Emulation(ZOO)
    nested = emulation.unflatten(emulation.flatten(batch))
    for leaf in flatten(ZOO):
        np.testing.assert_array_equal(get_path(nested, leaf.path), get_path(batch, leaf.path))


def test_one_observation_of_an_env_is_taken() -> None:
    emulation = Emulation(ZOO)
    ZOO.seed(1)
    one = ZOO.sample()
    row = emulation.flatten(one)
    assert row.shape == (emulation.row_bytes,)
    nested = emulation.unflatten(row)
    assert nested["gear"] == one["gear"]
    assert nested["pair"][0] == one["pair"][0]
    assert (nested["gear"].dtype, nested["pair"][0].dtype) == (np.int64, np.float16)


def test_the_observations_of_a_pool_are_taken() -> None:
    with shoal.Pool([lambda: SpaceEnv(ZOO)] * 7, backend="serial") as pool:
        obs = pool.reset(seed=3).obs
        emulation = Emulation(pool.single_observation_space)
        assert_same(ZOO, emulation.unflatten(emulation.flatten(obs)), obs)


def test_writing_to_a_leaf_writes_to_its_row(library: Library) -> None:
    emulation = Emulation(ZOO)
    batch = samples(ZOO, (3, 2))
    rows = library.of(emulation.flatten(batch))
    nested = emulation.unflatten(rows)
    nested["gear"][2, 1] = 2**40 + 1
    nested["pair"][1]["lamps"][0, 0, 2] = 7
    nested["speed"][1, 0] = library.of(np.array([np.nan, -np.inf, 1 / 3]))
    nested["pair"][0][0, 1] = 0.5
    batch["gear"][2, 1] = 2**40 + 1
    batch["pair"][1]["lamps"][0, 0, 2] = 7
    batch["speed"][1, 0] = np.nan, -np.inf, 1 / 3
    batch["pair"][0][0, 1] = 0.5
    np.testing.assert_array_equal(library.back(rows), emulation.flatten(batch))


def test_rows_are_records_of_the_dtype() -> None:
    emulation = Emulation(ZOO)
    batch = samples(ZOO, (7,))
    records = emulation.flatten(batch).view(emulation.dtype)[:, 0]
    for leaf in flatten(ZOO):
        np.testing.assert_array_equal(records[leaf.name], get_path(batch, leaf.path))
    records["['gear']"][4] = -1
    assert emulation.unflatten(records.view(np.uint8).reshape(7, -1))["gear"][4] == -1


def test_out_is_written_and_given_back_with_zeros_between_leaves(library: Library) -> None:
    space = FLAT["odd bytes"]
    emulation = Emulation(space)
    assert emulation.row_bytes == 24
    out = library.of(np.full((4, 24), 255, np.uint8))
    batch = mapped(space, library.of, samples(space, (4,)))
    assert emulation.flatten(batch, out=out) is out
    gaps = [*range(3, 8), *range(17, 24)]
    assert (library.back(out)[:, gaps] == 0).all()
    np.testing.assert_array_equal(library.back(out), library.back(emulation.flatten(batch)))


def test_out_may_be_a_part_of_a_larger_buffer(library: Library) -> None:
    emulation = Emulation(ZOO)
    buffer = library.of(np.zeros((5, 4, emulation.size), np.uint8))
    batch = samples(ZOO, (4,))
    emulation.flatten(mapped(ZOO, library.of, batch), out=buffer[2])
    assert_same(ZOO, mapped(ZOO, library.back, emulation.unflatten(buffer[2])), batch)
    assert not library.back(buffer)[[0, 1, 3, 4]].any()


def test_batch_axes_may_be_strided(library: Library) -> None:
    emulation = Emulation(ZOO)
    batch = samples(ZOO, (6, 5))
    rows = library.of(emulation.flatten(batch))
    for picked, expected in (
        (rows[::2, 1:4], mapped(ZOO, lambda leaf: leaf[::2, 1:4], batch)),
        (rows.swapaxes(0, 1), mapped(ZOO, lambda leaf: leaf.swapaxes(0, 1), batch)),
        (rows[:, 3], mapped(ZOO, lambda leaf: leaf[:, 3], batch)),
    ):
        nested = emulation.unflatten(picked)
        assert_same(ZOO, mapped(ZOO, library.back, nested), expected)
        assert library.shares(nested["gear"], rows)
        assert library.shares(nested["camera"], rows)


def test_a_row_of_bytes_in_pieces_is_refused(library: Library) -> None:
    emulation = Emulation(ZOO)
    rows = library.of(np.zeros((emulation.size, 3), np.uint8)).T
    with pytest.raises(BadObservation, match=r"observation\['.*without a copy: give contiguous ones"):
        emulation.unflatten(rows)
    with pytest.raises(BadObservation, match="without a copy"):
        emulation.flatten(mapped(ZOO, library.of, samples(ZOO, (3,))), out=rows)


def test_a_row_of_one_type_may_lie_in_pieces(library: Library) -> None:
    space = FLAT["same types"]
    emulation = Emulation(space)
    batch = samples(space, (3,))
    rows = library.of(emulation.flatten(batch).T.copy()).T
    nested = emulation.unflatten(rows)
    assert_same(space, mapped(space, library.back, nested), batch)
    assert library.shares(nested["a"], rows)


def test_rows_that_may_not_be_written_give_leaves_that_may_not() -> None:
    emulation = Emulation(ZOO)
    rows = emulation.flatten(samples(ZOO, (2,)))
    rows.flags.writeable = False
    assert not emulation.unflatten(rows)["gear"].flags.writeable


def test_bytes_that_do_not_start_where_a_type_may_lie() -> None:
    torch = pytest.importorskip("torch")
    emulation = Emulation(ZOO)
    batch = samples(ZOO, (3,))
    buffer = np.zeros((3, emulation.size + 8), np.uint8)
    odd = buffer[:, 1 : emulation.size + 1]
    emulation.flatten(batch, out=odd)
    assert_same(ZOO, emulation.unflatten(odd), batch)  # numpy copes
    with pytest.raises(BadObservation, match="without a copy"):
        emulation.unflatten(torch.from_numpy(buffer)[:, 1 : emulation.size + 1])


# ---- observations: what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((2, 3), np.uint8), r"expected rows of shape \[\.\.\., 16\].*found \(2, 3\)"),
        (np.zeros((), np.uint8), r"expected rows of shape \[\.\.\., 16\]"),
        (np.zeros((2, 16), np.float32), "expected rows of type uint8, found float32: rows must not be cast"),
        ([[0] * 16], "expected rows in a numpy array or a torch tensor, found list"),
    ],
)
def test_rows_of_another_space_are_refused(rows: Any, message: str) -> None:
    emulation = Emulation(spaces.Tuple((spaces.Box(0, 9, (3,), np.uint8), spaces.Discrete(4))))
    with pytest.raises(BadObservation, match=message):
        emulation.unflatten(rows)


def test_a_tensor_that_was_cast_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(BadObservation, match=r"expected rows of type int64, found torch\.float32"):
        Emulation(spaces.Discrete(4)).unflatten(torch.zeros(2, 1))


def test_types_that_torch_does_not_have_are_named() -> None:
    torch = pytest.importorskip("torch")
    emulation = Emulation(FLAT["other end first"])
    with pytest.raises(BadEnv, match=r"observation\[0\] is of type >f4 .*PyTorch does not have"):
        emulation.unflatten(torch.zeros(2, emulation.size, dtype=torch.uint8))


def broken(**changes: Any) -> Any:
    return {**samples(ZOO, (3,)), **changes}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, r"observation has no part \['.*'\]"),
        (broken(pair=(np.zeros(3, np.float16), {})), r"observation has no part \['pair'\]\[1\]\['lamps'\]"),
        (broken(speed=np.zeros((3, 4))), r"observation\['speed'\]: expected shape \[\.\.\., 3\], found \(3, 4\)"),
        (broken(speed=np.zeros((2, 3))), r"expected shape \(\d, .*, the batch shape \(\d,\) as in the first leaf"),
        (broken(speed=np.float64(0)), r"observation\['speed'\]: expected shape"),
        (broken(gear=np.zeros(3)), r"observation\['gear'\]: expected type int64, found float64"),
        (broken(gear=["a"] * 3), r"observation\['gear'\]: expected type int64, found <U1"),
        (broken(speed=[[1.0], [1.0, 2.0]]), r"observation\['speed'\] cannot be made into one array"),
        (broken(camera=np.full((3, 5, 3, 3), 256)), r"\['camera'\]: expected type uint8, found int64 with values that"),
        (broken(camera=np.full((3, 5, 3, 3), -1)), r"\['camera'\]: expected type uint8, found int64 with values that"),
        (broken(pair=(np.full(3, 0.1), {"lamps": np.zeros((3, 3), np.int8)})), r"\['pair'\]\[0\]: .* do not fit"),
        (broken(speed=np.full((3, 3), 2**53 + 1)), r"\['speed'\]: .* found int64 with values that do not fit"),
        (broken(speed=np.full((3, 3), 2**63 - 1)), r"\['speed'\]: .* found int64 with values that do not fit"),
    ],
)
def test_batches_that_do_not_fit_are_refused_by_leaf(batch: Any, message: str) -> None:
    with pytest.raises(BadObservation, match=message):
        Emulation(ZOO).flatten(batch)


def test_other_types_are_taken_where_they_lose_nothing() -> None:
    batch = broken(gear=[1, 2, 3], speed=np.full((3, 3), np.nan, np.float32), camera=np.full((3, 5, 3, 3), 200))
    nested = Emulation(ZOO).unflatten(Emulation(ZOO).flatten(batch))
    assert nested["gear"].tolist() == [1, 2, 3]
    assert np.isnan(nested["speed"]).all()
    assert (nested["camera"] == 200).all()
    assert (nested["camera"].dtype, nested["speed"].dtype) == (np.uint8, np.float64)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.zeros((4, 16), np.uint8), r"the batch shape \(4,\) as in out, found"),
        (np.zeros((3, 17), np.uint8), r"expected rows of shape \[\.\.\., 16\]"),
        (np.zeros((3, 16), np.int8), "expected rows of type uint8, found int8"),
        ([0] * 16, "found list"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out: Any, message: str) -> None:
    space = spaces.Tuple((spaces.Box(0, 9, (3,), np.uint8), spaces.Discrete(4)))
    with pytest.raises(BadObservation, match=message):
        Emulation(space).flatten(samples(space, (3,)), out=out)


def test_a_batch_that_does_not_fit_leaves_out_as_it_was() -> None:
    batch = broken(pair=(np.zeros(3, np.float16), {"lamps": np.full((3, 3), 500)}))
    for emulation in (Emulation(ZOO), ActionEmulation(ZOO)):
        rows = emulation.flatten(samples(ZOO, (3,), seed=1))
        before = rows.copy()
        with pytest.raises((BadObservation, BadAction), match=r"\['pair'\]\[1\]\['lamps'\]"):
            emulation.flatten(batch, out=rows)
        np.testing.assert_array_equal(rows, before)


def test_libraries_do_not_mix() -> None:
    torch = pytest.importorskip("torch")
    space = spaces.Tuple((spaces.Discrete(4), spaces.MultiBinary(2)))
    numbers, bits = np.zeros(3, np.int64), np.zeros((3, 2), np.int8)
    with pytest.raises(BadObservation, match=r"observation\[1\]: expected a torch tensor like the rest, found ndarray"):
        Emulation(space).flatten((torch.from_numpy(numbers), bits))
    with pytest.raises(BadObservation, match=r"observation\[1\]: expected a numpy array like the rest, found Tensor"):
        Emulation(space).flatten((numbers, torch.from_numpy(bits)))
    with pytest.raises(BadObservation, match=r"observation\[0\]: expected type int64, found torch.int32"):
        Emulation(space).flatten((torch.from_numpy(numbers).int(), torch.from_numpy(bits)))


def test_it_can_be_pickled_and_does_not_need_torch() -> None:
    for emulation in (Emulation(ZOO), ActionEmulation(ZOO)):
        again = pickle.loads(pickle.dumps(emulation))
        batch = samples(ZOO, (2,))
        assert_same(ZOO, again.unflatten(emulation.flatten(batch)), batch)
    script = """
import sys
from gymnasium import spaces
from shoal.emulation import ActionEmulation, Emulation
for emulation in Emulation(spaces.Discrete(3)), ActionEmulation(spaces.Discrete(3)):
    assert emulation.unflatten(emulation.flatten([1, 2])).tolist() == [1, 2]
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_compiled_policy_looks_at_rows_in_one_graph() -> None:
    torch = pytest.importorskip("torch")
    emulation, actions = Emulation(ZOO), ActionEmulation(MIXED)

    @torch.compile(fullgraph=True, backend="eager")
    def forward(rows: Any, row_of_actions: Any) -> Any:
        nested = emulation.unflatten(rows)
        acted = actions.unflatten(row_of_actions, check=False)
        return nested["speed"].sum(-1) + nested["gear"], acted["go"][0] * 2

    batch = samples(ZOO, (4,))
    done = samples(MIXED, (4,))
    summed, doubled = forward(torch.from_numpy(emulation.flatten(batch)), torch.from_numpy(actions.flatten(done)))
    np.testing.assert_array_equal(summed.numpy(), (torch.from_numpy(batch["speed"]).sum(-1)).numpy() + batch["gear"])
    np.testing.assert_array_equal(doubled.numpy(), done["go"][0] * 2)


# ---- actions -----------------------------------------------------------------------------------------------------

MIXED = spaces.Dict(
    go=spaces.Tuple((spaces.Discrete(4, start=10), spaces.Box(-2.0, 2.0, (2, 2), np.float32))),
    press=spaces.MultiBinary(3),
    pick=spaces.MultiDiscrete([2, 5], start=[0, -3]),
)


def test_discrete_leaves_make_one_multi_discrete() -> None:
    space = spaces.Dict(a=spaces.Discrete(4, start=10), b=spaces.MultiBinary(2), c=spaces.MultiDiscrete([[2], [5]]))
    emulation = ActionEmulation(space)
    assert emulation.flat_space == spaces.MultiDiscrete([4, 2, 2, 2, 5])
    int64, int8 = np.dtype(np.int64), np.dtype(np.int8)
    assert emulation.parts == [
        ActionPart(("a",), "discrete", slice(0, 1), (4,), int64),
        ActionPart(("b",), "discrete", slice(1, 3), (2, 2), int8),
        ActionPart(("c",), "discrete", slice(3, 5), (2, 5), int64),
    ]
    nested = emulation.unflatten(np.array([[3, 0, 1, 1, 4], [0, 1, 1, 0, 0]]))
    assert nested["a"].tolist() == [13, 10]
    assert nested["b"].tolist() == [[0, 1], [1, 1]]
    assert nested["c"].tolist() == [[[1], [4]], [[0], [0]]]


def test_boxes_make_one_box_with_their_bounds() -> None:
    space = spaces.Tuple((spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Box(0.0, 9.0, (), np.float64)))
    emulation = ActionEmulation(space)
    assert emulation.flat_space == spaces.Box(np.array([-1.0, -1, 0]), np.array([1.0, 1, 9]), dtype=np.float64)
    assert [(part.kind, part.columns, part.choices) for part in emulation.parts] == [
        ("continuous", slice(0, 2), ()),
        ("continuous", slice(2, 3), ()),
    ]


def test_discrete_and_continuous_share_a_row_of_floats() -> None:
    emulation = ActionEmulation(MIXED)
    flat = emulation.flat_space
    assert isinstance(flat, spaces.Box)
    assert flat.dtype == np.float32
    by_path = {part.path: part for part in emulation.parts}
    assert by_path["go", 0].choices == (4,)
    assert by_path["press",].choices == (2, 2, 2)
    assert by_path["pick",].choices == (2, 5)
    assert by_path["go", 1].kind == "continuous"
    for part in emulation.parts:
        if part.kind == "discrete":
            assert flat.low[part.columns].tolist() == [0] * len(part.choices)
            assert flat.high[part.columns].tolist() == [n - 1 for n in part.choices]
    row = np.zeros((1, emulation.size), np.float32)
    row[:, by_path["go", 0].columns] = 3
    row[:, by_path["pick",].columns] = 1, 4
    row[:, by_path["go", 1].columns] = 0.1
    nested = emulation.unflatten(row)
    assert nested["go"][0].tolist() == [13]
    assert nested["pick"].tolist() == [[1, 1]]
    assert (nested["go"][0].dtype, nested["press"].dtype, nested["go"][1].dtype) == (np.int64, np.int8, np.float32)
    assert np.shares_memory(nested["go"][1], row)


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("name", [*FLAT, "mixed"])
def test_actions_come_back_whole(name: str, lead: tuple[int, ...]) -> None:
    space = FLAT.get(name, MIXED)
    emulation = ActionEmulation(space)
    batch = samples(space, lead)
    out = None if flatten(space) else np.empty((*lead, 0), np.int64)
    rows = emulation.flatten(batch, out=out)
    assert rows.shape == (*lead, emulation.size)
    assert rows.dtype == emulation.flat_space.dtype
    if lead == (7,):
        assert all(row in emulation.flat_space for row in rows)
    assert_same(space, emulation.unflatten(rows), batch)


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize("name", [*NATIVE, "mixed"])
def test_actions_come_back_whole_in_torch(name: str, lead: tuple[int, ...]) -> None:
    torch = TorchLibrary(pytest.importorskip("torch"))
    space = NATIVE.get(name, MIXED)
    emulation = ActionEmulation(space)
    batch = samples(space, lead)
    out = None if flatten(space) else torch.of(np.empty((*lead, 0), np.int64))
    rows = emulation.flatten(mapped(space, torch.of, batch), out=out)
    assert isinstance(rows, torch.torch.Tensor)
    np.testing.assert_array_equal(rows.numpy(), emulation.flatten(batch, out=None if out is None else out.numpy()))
    assert_same(space, mapped(space, torch.back, emulation.unflatten(rows)), batch)


@pytest.mark.parametrize("name", [*FLAT, "mixed"])
def test_every_row_of_the_flat_space_is_an_action(name: str) -> None:
    space = FLAT.get(name, MIXED)
    emulation = ActionEmulation(space)
    emulation.flat_space.seed(5)
    rows = np.array([emulation.flat_space.sample() for _ in range(5)])
    for part in emulation.parts:
        if rows.dtype.kind == "f" and part.dtype.kind != "f":  # a Box of floats does not know its whole columns
            rows[:, part.columns] = np.floor(rows[:, part.columns])
    nested = emulation.unflatten(rows)
    for i in range(5):
        one = mapped(space, lambda leaf, i=i: leaf[i], nested)
        for leaf in flatten(space):
            low, high, found = leaf.low, leaf.high, get_path(one, leaf.path)
            assert found.dtype == leaf.dtype
            assert ((found >= low) & (found <= high)).all(), leaf.name


def test_leaves_of_the_rows_own_type_are_views(library: Library) -> None:
    space = spaces.Dict(a=spaces.Discrete(4), b=spaces.Discrete(4, start=1), c=spaces.MultiDiscrete([2, 3]))
    rows = library.of(np.zeros((3, 4), np.int64))
    nested = ActionEmulation(space).unflatten(rows)
    assert library.shares(nested["a"], rows)
    assert library.shares(nested["c"], rows)
    nested["b"][:] = 4
    assert not library.back(rows).any()


def test_rows_of_other_types_are_taken_where_whole_numbers_are_whole() -> None:
    emulation = ActionEmulation(MIXED)
    rows = emulation.flatten(samples(MIXED, (5,)))
    assert_same(MIXED, emulation.unflatten(rows.astype(np.float64)), emulation.unflatten(rows))
    discrete = ActionEmulation(spaces.MultiDiscrete([3, 3]))
    assert discrete.unflatten(np.array([[1.0, 2.0]], np.float32)).tolist() == [[1, 2]]
    assert discrete.unflatten(np.array([[1, 2]], np.uint8)).dtype == np.int64


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (("go", 0), 4, r"actions\['go'\]\[0\] in row 2: expected a whole number from 0 to 3, found 4\.0"),
        (("go", 0), -1, r"actions\['go'\]\[0\] in row 2: expected a whole number from 0 to 3, found -1\.0"),
        (("press",), 0.5, r"actions\['press'\]\[0\] in row 2: expected a whole number from 0 to 1, found 0\.5"),
        (("pick",), np.nan, r"actions\['pick'\]\[0\] in row 2: expected a whole number from 0 to 1, found nan"),
        (("pick",), np.inf, r"actions\['pick'\]\[0\] in row 2: expected a whole number from 0 to 1, found inf"),
        (("pick",), 1e30, r"actions\['pick'\]\[0\] in row 2: expected a whole number from 0 to 1, found"),
    ],
)
def test_numbers_out_of_bounds_name_leaf_and_row(library: Library, column: Any, value: float, message: str) -> None:
    emulation = ActionEmulation(MIXED)
    rows = emulation.flatten(samples(MIXED, (5,)))
    part = next(part for part in emulation.parts if part.path == column)
    rows[2, part.columns.start] = value
    with pytest.raises(BadAction, match=message):
        emulation.unflatten(library.of(rows))
    if np.isfinite(value):
        emulation.unflatten(library.of(rows), check=False)


def test_a_row_is_named_by_all_of_its_batch_axes(library: Library) -> None:
    emulation = ActionEmulation(spaces.Dict(a=spaces.MultiDiscrete([[2, 2], [2, 2]])))
    rows = np.zeros((3, 2, 4), np.int64)
    rows[1, 0, 2] = 9
    with pytest.raises(BadAction, match=r"actions\['a'\]\[1\]\[0\] in row \(1, 0\): .* 0 to 1, found 9$"):
        emulation.unflatten(library.of(rows))
    with pytest.raises(BadAction, match=r"actions\['a'\]\[1\]\[0\]: .* 0 to 1, found 9$"):
        emulation.unflatten(library.of(rows[1, 0]))


def test_actions_out_of_bounds_are_refused_on_the_way_there_too(library: Library) -> None:
    batch = mapped(MIXED, library.of, samples(MIXED, (4,)))
    batch["pick"][3, 1] = 2
    with pytest.raises(
        BadAction, match=r"actions\['pick'\]\[1\] in row 3: expected a whole number from -3 to 1, found"
    ):
        ActionEmulation(MIXED).flatten(batch)
    with pytest.raises(BadAction, match=r"actions has no part \['press'\]"):
        ActionEmulation(MIXED).flatten({"go": batch["go"], "pick": batch["pick"]})


def test_floats_out_of_bounds_are_left_to_the_pool() -> None:
    space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    assert ActionEmulation(space).unflatten(np.full((1, 2), 5.0, np.float32)).tolist() == [[5.0, 5.0]]


def test_a_box_of_whole_numbers_wants_whole_numbers() -> None:
    emulation = ActionEmulation(
        spaces.Tuple((spaces.Box(-5, 5, (2,), np.int8), spaces.Box(0.0, 1.0, (1,), np.float32)))
    )
    assert emulation.flat_space.dtype == np.float32
    nested = emulation.unflatten(np.array([[-5, 5, 0.25]], np.float32))
    assert (nested[0].dtype, nested[0].tolist(), nested[1].tolist()) == (np.int8, [[-5, 5]], [[0.25]])
    with pytest.raises(BadAction, match=r"actions\[0\]\[1\] in row 0: expected a whole number from -5 to 5, found 6"):
        emulation.unflatten(np.array([[-5, 6, 0.25]], np.float32))


@pytest.mark.parametrize(
    ("discrete", "expected"),
    [(spaces.Discrete(2**24), np.float32), (spaces.Discrete(2**24 + 2), np.float64), (spaces.Discrete(5), np.float32)],
)
def test_rows_are_wide_enough_for_every_choice(discrete: Any, expected: Any) -> None:
    space = spaces.Tuple((discrete, spaces.Box(-1.0, 1.0, (1,), np.float16)))
    emulation = ActionEmulation(space)
    assert emulation.flat_space.dtype == expected
    last = (np.array([discrete.n - 1]), np.zeros((1, 1), np.float16))
    assert_same(space, emulation.unflatten(emulation.flatten(last)), last)


def test_whole_numbers_too_large_for_a_row_are_refused_by_name() -> None:
    huge = spaces.Box(-(2**62), 2**62, (2,), np.int64)
    assert ActionEmulation(spaces.Tuple((huge, spaces.Discrete(3)))).flat_space.dtype == np.int64
    with pytest.raises(
        BadEnv, match=r"actions\['far'\] has whole numbers up to 4611686018427387904, and a row of float"
    ):
        ActionEmulation(spaces.Dict(far=huge, near=spaces.Box(0.0, 1.0, (1,), np.float32)))
    with pytest.raises(BadEnv, match=r"actions has whole numbers up to 18446744073709551615, and a row of int64"):
        ActionEmulation(spaces.Box(0, 2**64 - 1, (2,), np.uint64))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros(2, np.int64), r"expected rows of shape \[\.\.\., 1\].*found \(2,\)"),
        (np.zeros((2, 1), complex), "expected rows of type int64, found complex128"),
        ([[1]], "found list"),
    ],
)
def test_rows_of_other_actions_are_refused(rows: Any, message: str) -> None:
    with pytest.raises(BadAction, match=message):
        ActionEmulation(spaces.Discrete(3)).unflatten(rows)


def test_gradients_pass_through_rows_of_actions() -> None:
    torch = pytest.importorskip("torch")
    emulation = ActionEmulation(MIXED)
    rows = torch.zeros(3, emulation.size, requires_grad=True)
    emulation.unflatten(rows)["go"][1].sum().backward()
    [part] = [part for part in emulation.parts if part.kind == "continuous"]
    assert rows.grad[:, part.columns].eq(1).all()
    assert rows.grad.sum() == 3 * 4


def test_a_pool_takes_what_comes_out_of_rows(library: Library) -> None:
    with shoal.Pool([lambda: SpaceEnv(spaces.Discrete(2), MIXED)] * 3, backend="serial") as pool:
        pool.reset(seed=1)
        batch = samples(MIXED, (3,))
        emulation = ActionEmulation(pool.single_action_space)
        rewards = pool.step(emulation.unflatten(library.of(emulation.flatten(batch))))[1]
        pool.reset(seed=1)
        np.testing.assert_array_equal(rewards, pool.step(batch)[1])
    with shoal.Pool([CountEnv] * 2, backend="serial") as pool:
        pool.reset()
        rows = library.of(np.array([[1], [3]]))
        assert pool.step(ActionEmulation(pool.single_action_space).unflatten(rows))[1].tolist() == [101, 301]


# ---- any space ---------------------------------------------------------------------------------------------------

TYPES = [np.float16, np.float32, np.float64, np.uint8, np.int8, np.int32, np.int64, np.bool_]
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


def _box(shape: tuple[int, ...], dtype: Any) -> spaces.Box:
    return spaces.Box(0 if np.dtype(dtype).kind in "ub" else -3, 1 if dtype is np.bool_ else 3, shape, dtype)


LEAVES = st.one_of(
    st.builds(_box, SHAPES, st.sampled_from(TYPES)),
    st.builds(lambda n, start: spaces.Discrete(n, start=start), st.integers(1, 9), st.integers(-5, 5)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 9), min_size=1, max_size=3)),
    st.builds(spaces.MultiBinary, st.integers(1, 5)),
)
ANY = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: spaces.Tuple(tuple(parts))),
        st.dictionaries(st.text("abc", max_size=2), inner, max_size=3).map(spaces.Dict),
    ),
    max_leaves=6,
)


LEAD = st.lists(st.integers(0, 3), min_size=1, max_size=2).map(tuple)


@settings(max_examples=100, deadline=None)
@given(space=ANY, lead=LEAD, seed=st.integers(0, 99))
def test_any_space_comes_back_whole(space: Any, lead: tuple[int, ...], seed: int) -> None:
    batch = samples(space, lead, seed)
    for emulation in (Emulation(space), ActionEmulation(space)):
        rows = np.empty((*lead, emulation.size), emulation.flat_space.dtype)
        emulation.flatten(batch, out=rows)
        assert_same(space, emulation.unflatten(rows), batch)


@settings(max_examples=50, deadline=None)
@given(space=ANY, lead=LEAD, seed=st.integers(0, 99))
def test_any_space_comes_back_whole_in_torch(space: Any, lead: tuple[int, ...], seed: int) -> None:
    torch = TorchLibrary(pytest.importorskip("torch"))
    batch = samples(space, lead, seed)
    for emulation in (Emulation(space), ActionEmulation(space)):
        rows = torch.of(np.empty((*lead, emulation.size), emulation.flat_space.dtype))
        emulation.flatten(mapped(space, torch.of, batch), out=rows)
        assert_same(space, mapped(space, torch.back, emulation.unflatten(rows)), batch)

"""Running moments in C and in numpy: the same, and right."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal import native
from shoal.native import twin

KINDS = [twin] if native.core is None else [twin, native.core]
IDS = ["twin", "native"][: len(KINDS)]


@pytest.mark.parametrize("core", KINDS, ids=IDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (4, 5, 2)])
def test_merged_batches_are_one(core: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    """Against the moments of all batches taken in one go."""
    rng = np.random.default_rng(0)
    batches = [(rng.normal(7, 3, (n, *shape)) % 200).astype(dtype) for n in (1, 5, 64, 2)]
    mean, var, count = np.zeros(shape), np.ones(shape), 1e-9
    for batch in batches:
        count = core.merge(batch.dtype.kind, batch, mean, var, count)
    everything = np.concatenate(batches).astype(np.float64)
    assert count == pytest.approx(72)
    assert np.allclose(mean, everything.mean(0), atol=1e-6)
    assert np.allclose(var, everything.var(0), atol=1e-6)
    values = batches[2]
    out = np.empty(values.shape, np.float32)
    core.standardize(values.dtype.kind, values, mean, var, 1e-8, 1.5, out)
    expected = np.clip((values - mean) / np.sqrt(var + 1e-8), -1.5, 1.5)
    assert np.allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize("core", KINDS, ids=IDS)
def test_nothing_changes_nothing(core: Any) -> None:
    mean, var = np.array([1.0]), np.array([2.0])
    assert core.merge("f", np.empty((0, 1)), mean, var, 5.0) == 5.0
    assert (mean[0], var[0]) == (1.0, 2.0)


@pytest.mark.parametrize("core", KINDS, ids=IDS)
def test_large_numbers_do_not_cancel_out(core: Any) -> None:
    values = 1e8 + np.array([[0.0], [1.0], [2.0]])
    mean, var = np.zeros(1), np.zeros(1)
    core.merge("f", values, mean, var, 0.0)
    assert (mean[0], var[0]) == pytest.approx((1e8 + 1, 2 / 3))


@pytest.mark.parametrize("core", KINDS, ids=IDS)
def test_what_is_no_number_stays_so(core: Any) -> None:
    out = np.empty(3, np.float32)
    core.standardize("f", np.array([np.nan, np.inf, -np.inf]), np.zeros(()), np.ones(()), 0.0, 10.0, out)
    assert np.isnan(out[0])
    assert out[1:].tolist() == [10.0, -10.0]


@pytest.mark.skipif(native.core is None, reason="only the C core reads memory by itself")
@pytest.mark.parametrize(
    "arguments",
    [
        ("f", np.zeros((3, 3)), np.zeros(2), np.zeros(2), 1.0),
        ("f", np.zeros((2, 2)), np.zeros(2), np.zeros(3), 1.0),
        ("f", np.zeros((2, 2)), np.zeros(2, np.float32), np.zeros(2, np.float32), 1.0),
        ("i", np.zeros((2, 2), np.int64), np.zeros(2), np.zeros(2), 1.0),
        ("f", np.zeros((2, 0)), np.zeros(0), np.zeros(0), 1.0),
        ("f", np.zeros((2, 4))[:, ::2], np.zeros(2), np.zeros(2), 1.0),
    ],
)
def test_sizes_that_do_not_fit(arguments: Any) -> None:
    with pytest.raises((ValueError, BufferError)):
        native.core.merge(*arguments)
    with pytest.raises((ValueError, BufferError)):
        native.core.standardize(*arguments[:4], 0.0, 1.0, np.empty(arguments[1].shape, np.float32))


@pytest.mark.skipif(native.core is None, reason="only the C core reads memory by itself")
def test_an_out_that_does_not_fit() -> None:
    for out in (np.empty(3, np.float32), np.empty(2, np.float64)):
        with pytest.raises(ValueError, match="out must"):
            native.core.standardize("f", np.zeros(2), np.zeros(()), np.ones(()), 0.0, 1.0, out)

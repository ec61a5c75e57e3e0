"""What the tests of compiled envs share."""

from __future__ import annotations

from typing import Any

import numpy as np

import shoal


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in leaves(value[key])]
    if isinstance(value, tuple | list):
        return [leaf for one in value for leaf in leaves(one)]
    return [value]


def assert_same(one: shoal.Batch, other: shoal.Batch) -> None:
    for name, a, b in zip(one._fields, one, other, strict=True):
        for x, y in zip(leaves(a), leaves(b), strict=True):
            assert np.asarray(x).dtype == np.asarray(y).dtype, name
            np.testing.assert_array_equal(x, y, err_msg=name)

"""What the tests of envs on GPUs share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiled.kit import leaves
from shoal.compiled.cuda import missing
from shoal.compiled.cuda.build import simulated

needs_cuda = pytest.mark.skipif(
    bool(missing()), reason=f"{missing()} (make test-gpu runs these tests in Numba's simulator)"
)
needs_gpu = pytest.mark.skipif(bool(missing()) or simulated(), reason="needs a real NVIDIA GPU")


def host(value: Any) -> list[np.ndarray[Any, Any]]:
    """The leaves of a nested value, in the host's memory."""
    return [np.asarray(leaf) for leaf in leaves(value)]


def assert_close(one: Any, other: Any, precision: str = "double") -> None:
    tolerance = {"single": 1e-4, "double": 1e-9}[precision]
    for a, b in zip(host(one), host(other), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a.astype(float), b.astype(float), rtol=tolerance, atol=tolerance)

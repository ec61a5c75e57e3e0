"""What the tests of the core share."""

from __future__ import annotations

import pytest

from native.rig import KINDS, load


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The core in C and its twin in turn."""
    try:
        load(request.param)
    except ImportError as error:
        pytest.skip(f"the C extension was not built here ({error}): only the Python twin can be tested")
    return str(request.param)

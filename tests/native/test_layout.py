"""The layout table, and what is made from it."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from native.rig import load
from shoal.native import layout

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "explanation" / "architecture.md"
generate = SimpleNamespace(**runpy.run_path(str(ROOT / "tools" / "generate_layout.py")))
AGAIN = "run `python tools/generate_layout.py` and build the core again"


def test_the_header_is_that_of_the_table() -> None:
    assert generate.HEADER.read_text() == generate.c_header(), AGAIN


def test_the_docs_have_the_tables() -> None:
    page = DOCS.read_text()
    assert generate.BEGIN in page
    assert generate.END in page
    assert page == generate.documented(page), AGAIN


def test_the_core_was_built_from_the_table() -> None:
    try:
        core = load("native")
    except ImportError as error:
        pytest.skip(f"the C extension was not built here ({error})")
    assert core.LAYOUT_FINGERPRINT == layout.FINGERPRINT, AGAIN


def test_names_are_given_once() -> None:
    names = [row.name for row in layout.FIELDS]
    assert len(set(names)) == len(names)
    counters = [(row.array, row.name) for row in layout.COUNTERS]
    assert len(set(counters)) == len(counters)
    assert set(layout.COLUMNS) == {row.array for row in layout.COUNTERS} <= set(names)


def test_rows_of_counters_have_room_and_end_with_a_cache_line() -> None:
    for prefix, array in (("STAT", "stats"), ("SUM", "episode_sums"), ("POOL", "pool_stats")):
        width = layout.CONSTANTS[f"{prefix}_WIDTH"]
        assert width * 8 % layout.LINE == 0
        assert len(layout.COLUMNS[array]) <= width < len(layout.COLUMNS[array]) + 8


def test_every_axis_has_a_length() -> None:
    of_the_pool = {"lanes", "frames", "workers", "row_bytes", "..."}
    for row in layout.FIELDS:
        for axis in row.shape:
            assert axis in of_the_pool or axis in layout.CONSTANTS or axis.isdigit(), row

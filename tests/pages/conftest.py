"""Tests that build the site, run all its examples or need a browser belong to `make docs`, not to every run."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("SHOAL_SITE") else ["test_all_blocks.py", "test_in_browser.py"]

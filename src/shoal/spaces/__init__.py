"""Turns a Gymnasium space into a flat list of leaves, and nested values into flat arrays and back.

May import `errors`, `support` and `native`. Read `leaves` first; `shared` and `emulation` build on it.
"""

from shoal.spaces.leaves import flatten

__all__ = ["flatten"]

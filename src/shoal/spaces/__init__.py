"""What a Gymnasium space is to Shoal: a flat list of leaves, and the ways between nested values and flat arrays.

May import `errors`, `support` and `native`. Read `leaves` first.
"""

from shoal.spaces.leaves import flatten

__all__ = ["flatten"]

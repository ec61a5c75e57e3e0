"""Stepping inside a compiled graph: `shoal.graph.tensorflow`, `shoal.graph.jax` and `shoal.graph.torch`.

Each is imported by name, so that nobody needs the other two.
"""

from __future__ import annotations

from shoal.graph.host import own_errors

__all__ = ["own_errors"]

"""Stepping inside a compiled graph: `shoal.graph.tensorflow`, `shoal.graph.jax` and `shoal.graph.torch`.

Each is imported when it is asked for, so that nobody needs the other two.
"""

from __future__ import annotations

from shoal.graph.host import own_errors
from shoal.support.lazy_modules import modules_of

__all__ = ["own_errors"]
__getattr__ = modules_of(__name__)

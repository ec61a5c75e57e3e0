"""Steps of envs inside a compiled graph: `shoal.graph.tensorflow`, `shoal.graph.jax` and `shoal.graph.torch`.

Each of the three is imported when it is first used, so that the other two frameworks need not be installed. They may
import `shoal.pool`, `shoal.wrappers` and the packages below those. Read `host` first: it is what the three share, a
pool as flat tuples of arrays.
"""

from __future__ import annotations

from shoal.graph.host import own_errors
from shoal.support.optional_dependencies import modules_of

__all__ = ["own_errors"]
__getattr__ = modules_of(__name__)

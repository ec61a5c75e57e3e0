"""The pool in the APIs of other libraries: Gymnasium, Stable-Baselines3, EnvPool, PufferLib, TF-Agents and more.

Each module is one API, and is imported when it is asked for. May import all packages up to `wrappers`, and `graph`.
Read `base` first, which has what the dialects share, then `gymnasium`.
"""

from __future__ import annotations

from shoal.support.optional_dependencies import modules_of

__getattr__ = modules_of(__name__)

"""The pool in somebody else's words."""

from __future__ import annotations

from shoal.support.lazy_modules import modules_of

__getattr__ = modules_of(__name__)

"""Compiling in single precision by Numba: the user's functions rebuilt, and the text of a kernel around them."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from shoal.compiled.definition import Definition, single_versions
from shoal.compiled.narrow import narrow_constant
from shoal.compiled.random import VERSIONS
from shoal.compiled.rebuild import Rebuilder
from shoal.compiled.single import source
from shoal.compiled.single.arithmetic import compiler_class, operators
from shoal.compiled.single.functions import versions
from shoal.compiled.single.intrinsics import OPTIONS, Scopes, local_array, local_record
from shoal.compiled.template import row_shape, wide_type


def rebuilder(debug: bool) -> Rebuilder:
    """Return what rebuilds the user's functions for single precision."""
    options = {**OPTIONS, "forceinline": not debug, "boundscheck": debug, "pipeline_class": compiler_class()}
    operators()  # Numba looks for new functions before it compiles, not while it does
    given = versions()
    rebuilt = {function: one for function, one in VERSIONS.items() if function not in given} | single_versions
    return Rebuilder(numba.njit(**options), rebuilt, narrow_constant, given)


def local_names(definition: Definition, entry: str) -> dict[str, Any]:
    """Return the functions of the text with this entry that Numba has to make, by name."""
    scopes = Scopes()
    if entry == "policy_kernel":
        names = {"local_rng": local_array((1,), np.dtype(np.uint64))}
        for name, dtype in source.policy_arrays(definition).items():
            names.update(scopes.accessors(name, dtype))
        for i, leaf in enumerate(definition.obs_leaves):
            names[f"local_obs_{i}"] = local_array(row_shape(leaf, 1), leaf.dtype)
        for i, leaf in enumerate(definition.action_leaves):
            names[f"local_choice_{i}"] = local_array(row_shape(leaf, 1), leaf.dtype)
        return names
    names = {
        "local_state": local_record(definition.dtype),
        "local_rng": local_array((1,), np.dtype(np.uint64)),
        "list_of_lanes": local_array((source.BLOCK,), np.dtype(np.int64)),
    }
    for name, dtype in source.arrays(definition).items():
        names.update(scopes.accessors(name, dtype))
    names.update(scopes.accessors("episodes_next", np.dtype(np.int64)))
    for i, leaf in enumerate(definition.obs_leaves):
        names[f"local_obs_{i}"] = local_array(row_shape(leaf, 1), leaf.dtype)
    for i, leaf in enumerate(definition.action_leaves):
        names[f"local_action_{i}"] = local_array(leaf.shape or (1,), wide_type(leaf, True))
    return names

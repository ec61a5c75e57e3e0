"""Compiling in single precision by Numba: the user's functions rebuilt, and the text of a kernel around them."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from shoal.compiled.definition import Definition, single_versions
from shoal.compiled.narrow import narrow_constant
from shoal.compiled.random import VERSIONS
from shoal.compiled.rebuild import Rebuilder
from shoal.compiled.single import dense, rollout_source, source
from shoal.compiled.single.arithmetic import compiler_class, operators
from shoal.compiled.single.functions import uniform, versions
from shoal.compiled.single.intrinsics import OPTIONS, Scopes, local_array, local_record
from shoal.compiled.single.memory import copy, fence, keep, room
from shoal.compiled.template import row_shape, wide_type


def rebuilder(debug: bool) -> Rebuilder:
    """Return what rebuilds the user's functions for single precision."""
    options = {**OPTIONS, "forceinline": not debug, "boundscheck": debug, "pipeline_class": compiler_class()}
    operators()  # Numba looks for new functions before it compiles, not while it does
    given = versions()
    rebuilt = {function: one for function, one in VERSIONS.items() if function not in given} | single_versions
    return Rebuilder(numba.njit(**options), rebuilt, narrow_constant, given)


def local_names(definition: Definition, entry: str, widest: int) -> dict[str, Any]:
    """Return the functions of the text with this entry that Numba has to make, by name.

    Args:
        widest: the width of a network's widest layer, for a rollout with one.
    """
    scopes, rolls = Scopes(), entry == "rollout_kernel"
    names = {
        "local_state": local_record(definition.dtype),
        "local_rng": local_array((1,), np.dtype(np.uint64)),
        "list_of_lanes": local_array((max(source.BLOCK, rollout_source.LANES),), np.dtype(np.int64)),
        "copy": copy, "keep": keep, "fence": fence,
    }  # fmt: skip
    arrays = rollout_source.arrays(definition, widest) if rolls else source.arrays(definition)
    for name, dtype in {**arrays, "episodes_next": np.dtype(np.int64)}.items():
        names.update(scopes.accessors(name, dtype))
    for i, leaf in enumerate(definition.obs_leaves):
        names[f"local_obs_{i}"] = local_array(row_shape(leaf, 1), leaf.dtype)
    for i, leaf in enumerate(definition.action_leaves):
        names[f"local_action_{i}"] = local_array(leaf.shape or (1,), wide_type(leaf, True))
        names[f"local_choice_{i}"] = local_array(row_shape(leaf, 1), leaf.dtype)
    if rolls:
        names.update(dense=dense.dense, activate=dense.activate, as_gumbel=dense.as_gumbel, uniform=uniform)
        sizes = rollout_source.room_sizes(definition, widest)
        for name, dtype in rollout_source.rooms(definition, widest).items():
            names[f"room_{name}"] = room(rollout_source.LANES * sizes[name] * dtype.itemsize)
    return names

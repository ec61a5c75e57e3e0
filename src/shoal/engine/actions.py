"""Actions on their way into the slab."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.engine.lane_table import LaneTable
from shoal.spaces.leaves import Kind, Leaf, read_actions
from shoal.support.checks import Ids


class ActionWriter:
    """Checks batches of actions, and writes them into the slab.

    Args:
        leaves: those of the action space.
        check_boxes: whether Box actions must be within their bounds.
    """

    def __init__(self, table: LaneTable, leaves: Sequence[Leaf], check_boxes: bool):
        self._leaves, self._check_boxes = leaves, check_boxes
        self._arrays = table.slab.leaf_arrays("action", leaves)
        self._has_objects = any(leaf.kind is Kind.OBJECT for leaf in leaves)
        leaf = leaves[0] if len(leaves) == 1 else None
        if leaf is not None and leaf.kind is Kind.ARRAY and not leaf.path:
            # The common case: the core checks and copies one array by itself.
            bounds = (leaf.low, leaf.high) if leaf.discrete or check_boxes else (np.zeros(0), np.zeros(0))
            table.core.use_action(table.slab.describe("action", leaves)[0], *bounds)

    def write(self, actions: Any, lanes: Ids) -> list[Any]:
        """Write the actions of these lanes; returns the columns of those parts that have no array.

        Raises:
            BadAction: nothing was written.
        """
        values = read_actions(self._leaves, actions, lanes, self._check_boxes)
        for array, value in zip(self._arrays, values, strict=True):
            if array is not None:
                array[lanes] = value
        if not self._has_objects:
            return []
        return [value for value, array in zip(values, self._arrays, strict=True) if array is None]

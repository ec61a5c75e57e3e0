"""Pieces of source that the kernels for the CPU (`template`) and for GPUs (`cuda.source`) share.

In both, `given_i` is the i-th leaf of an action as `step` gets it, and `seen_i` the i-th leaf of an observation as
`observe` writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.compiled.definition import Definition
from shoal.spaces.leaves import Leaf

INDICES = "INDICES"  # where a statement of `loops` has its indices


def wide_type(leaf: Leaf) -> np.dtype[Any]:
    """Return the type in which `step` gets a leaf of the action."""
    return np.dtype({"f": np.float64, "b": np.bool_}.get(leaf.dtype.kind, np.int64))


def wide_types(definition: Definition) -> dict[str, Any]:
    """Return the types of all leaves of the action, by the names that `take_lines` has for them."""
    types = {f"T_wide_{i}": wide_type(leaf) for i, leaf in enumerate(definition.action_leaves)}
    return {**types, **{name.replace("T_wide", "wide_type"): dtype.type for name, dtype in types.items()}}


def row_shape(leaf: Leaf, agents: int) -> tuple[int, ...]:
    """Return the shape of one env's part of an observation: it has one element if the space has no shape."""
    return (agents, *leaf.shape) if agents > 1 else leaf.shape or (1,)


def action_shape(leaf: Leaf, agents: int) -> tuple[int, ...]:
    """Return the shape of one env's part of an action, which is a number if the space has no shape."""
    return (agents, *leaf.shape) if agents > 1 else leaf.shape


def take_lines(definition: Definition, array: str, row: str) -> list[str]:
    """Read the leaves of an action. `array`, with {i} and {shape} in it, is where the i-th leaf has room."""
    lines = []
    for i, leaf in enumerate(definition.action_leaves):
        shape = action_shape(leaf, definition.num_agents)
        if shape:
            each = loops(shape, f"given_{i}[{INDICES}] = action_{i}[{row}, {INDICES}]")
            lines += [f"given_{i} = {array.format(i=i, shape=_as_tuple(list(map(str, shape))))}", *each]
        else:
            lines.append(f"given_{i} = wide_type_{i}(action_{i}[{row}])")
    return lines


def step_call(definition: Definition) -> str:
    """Call `step` with the action that `take_lines` has read."""
    action = _nested([f"given_{i}" for i, _ in enumerate(definition.action_leaves)], definition.nested_action)
    return f"step(state, {action}, {'rewards, ' if definition.num_agents > 1 else ''}rng)"


def clear_lines() -> list[str]:
    """Set the fields of a state to zero, except its params."""
    return ["for i in range(CLEARED):", "    state_bytes[env, i] = 0"]


def observe_lines(definition: Definition, where: str, row: str) -> list[str]:
    """Write an observation into a row of the arrays that begin with `where`."""
    lines, values = [], [f"seen_{i}" for i, _ in enumerate(definition.obs_leaves)]
    for i, leaf in enumerate(definition.obs_leaves):
        zeros = loops(row_shape(leaf, definition.num_agents), f"seen_{i}[{INDICES}] = 0")
        lines += [f"seen_{i} = {where}_{i}[{row}]", *zeros]
    return [*lines, f"observe(state, {_nested(values, definition.nested_obs)})"]


def policy_call(
    definition: Definition, obs: Sequence[str], actions: Sequence[str], rng: str, params: Sequence[str]
) -> str:
    """Call a policy with the leaves of an observation and of an action."""
    given = [_nested(obs, definition.nested_obs), _nested(actions, definition.nested_action), rng, *params]
    return f"policy({', '.join(given)})"


def loops(shape: tuple[int, ...], statement: str) -> list[str]:
    """Repeat a statement, with INDICES in it, for each element of an array."""
    names = [f"i{axis}" for axis, _ in enumerate(shape)]
    heads = [f"for {name} in range({size}):" for name, size in zip(names, shape, strict=True)]
    lines = [*heads, statement.replace(INDICES, ", ".join(names))]
    return ["    " * depth + line for depth, line in enumerate(lines)]


def _nested(values: Sequence[str], nested: bool) -> str:
    return _as_tuple(values) if nested else values[0]


def _as_tuple(values: Sequence[str]) -> str:
    return f"({', '.join(values)}{',' if len(values) == 1 else ''})"


def indented(lines: Sequence[str], margin: str = "    ") -> list[str]:
    """Move lines to the right."""
    return [margin + line for line in lines]


def fill(source: str, parts: dict[str, list[str]]) -> str:
    """Replace each line that is a name in braces by the lines of that name, indented as it is."""
    lines = []
    for line in source.splitlines():
        name = line.strip()
        if name.startswith("{") and name.endswith("}"):
            lines += indented(parts[name[1:-1]], line[: len(line) - len(line.lstrip())])
        else:
            lines.append(line)
    return "\n".join(lines)

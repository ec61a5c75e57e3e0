"""The source of a kernel: what steps the envs of a chunk, written out for the leaves and agents of one class.

It is Python that Numba compiles, around the user's `reset`, `step` and `observe`. A kernel is a function (task, start,
stop, tally): see `shoal.compiled.task`. It leaves the returns and lengths of episodes, and all other fields that follow
from what it writes, to who calls it (`native/kernel.h`): loops that do little with few arrays are the quick ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.compiled.env import Definition
from shoal.compiled.task import BEGINS, FRAME_FIELDS, KINDS_OF_LEAVES, LEAVES, PLACES, TALLY
from shoal.memory.messages import STATUS_FINAL
from shoal.native import AUTORESET
from shoal.spaces.leaves import Leaf

__all__ = [
    "INDICES", "action_shape", "as_tuple", "constants", "fill", "kernel_source", "loops", "policy_source", "row_shape",
    "wide_type",
]  # fmt: skip

# The arrays of lanes and frames that it needs, and their types.
TYPES = {"ended": "u1", "run_length": "i8", "reward": "f8", "terminated": "b1", "status": "u1"}

INDICES = "INDICES"
# The rules of autoreset in it have their model in shoal/envs/autoreset.py.
STEP = """
    for env in range(np.uint64(start), np.uint64(stop)):
        lane = env * AGENTS
        row, at = first_row + env, first + lane
        state, rng = states[env], rngs[env]
        begins = all_begin or (mode == NEXT_STEP and ended[lane] != 0)
        tally[ENV] = env
        mark = np.uint8(0)
        if begins:
            mark = np.uint8(BEGINS)
            for i in range(AGENTS):
                reward[at + i] = 0.0
            terminated[at] = False
        else:
            {stepping}
            {step}
            terminated[at] = ends
            if mode == SAME_STEP and (ends or (limit > 0 and run_length[lane] + 1 >= limit)):
                {observing}
                {observe_final}
                mark, begins = np.uint8(FINAL), True
                tally[STATUS] |= FINAL
        if begins:
            {resetting}
            episodes[env] += 1
            {clear}
            begin_stream(rng, seeds[env], episodes[env])
            reset(state, rng)
            tally[BEGAN] += LANES_BEGUN
        {observing}
        {observe}
        status[at] = mark
"""


def constants(definition: Definition) -> dict[str, Any]:
    """The names that the source of a kernel needs beside functions."""
    return {
        "np": np, "AGENTS": np.uint64(definition.num_agents), "LANES_BEGUN": definition.num_agents,
        "NEXT_STEP": AUTORESET["next_step"],
        "SAME_STEP": AUTORESET["same_step"], "FINAL": STATUS_FINAL, "BEGINS": BEGINS,
        "STEPPING": 1, "RESETTING": 2, "OBSERVING": 3,
        "STATE": definition.dtype, "CLEARED": definition.cleared, "STATE_SIZE": definition.dtype.itemsize,
        **{name.upper(): i for i, name in enumerate(TALLY)},
        **{f"T_{name}": np.dtype(code) for name, code in TYPES.items()},
        **{f"T_obs_{i}": leaf.dtype for i, leaf in enumerate(definition.obs_leaves)},
        **{f"T_action_{i}": leaf.dtype for i, leaf in enumerate(definition.action_leaves)},
        **{f"T_wide_{i}": wide_type(leaf) for i, leaf in enumerate(definition.action_leaves)},
        **{f"wide_type_{i}": wide_type(leaf).type for i, leaf in enumerate(definition.action_leaves)},
    }  # fmt: skip


def wide_type(leaf: Leaf) -> np.dtype[Any]:
    """The type in which `step` gets a leaf of the action."""
    return np.dtype({"f": np.float64, "b": np.bool_}.get(leaf.dtype.kind, np.int64))


def kernel_source(definition: Definition, debug: bool) -> str:
    """The source of `kernel`.

    It calls reset, step, observe, begin_stream and array_at, which are to be given along with `constants`.

    Args:
        debug: with the state before each step kept, and what is being done, so that what failed can be looked at.
    """
    agents = definition.num_agents
    lines = ["def kernel(address, start, stop, tally_address):"]
    lines += ["task, tally = array_at(address, (1024,), np.int64), array_at(tally_address, (8,), np.int64)"]
    lines += [f"{name} = task[{PLACES[name]}]" for name in ("mode", "limit")]
    lines += [f"all_begin = task[{PLACES['resets']}] != 0"]
    # Without a sign, so that Numba need not ask whether an index counts from the end.
    lines += [f"slot, lanes = np.uint64(task[{PLACES['slot']}]), np.uint64(task[{PLACES['lanes']}])"]
    lines += [f"rows = np.uint64(task[{PLACES['frames']}]) * lanes", "envs = lanes // AGENTS"]
    lines += ["first, first_row = slot * lanes, slot * envs"]
    for name in TYPES:
        lines.append(f"{name} = {_array(name, '(rows,)' if name in FRAME_FIELDS else '(lanes,)', f'T_{name}')}")
    lines += [
        f"states = {_array('states', '(envs,)', 'STATE')}",
        f"state_bytes = {_array('states', '(envs, STATE_SIZE)', 'np.uint8')}",
        f"seeds, episodes = {_array('seeds', '(envs,)', 'np.uint64')}, {_array('episodes', '(envs,)', 'np.int64')}",
        f"rngs = {_array('rngs', '(envs, 1)', 'np.uint64')}",
    ]
    if debug:
        lines.append(f"saved_states = {_array('saved_states', '(envs, STATE_SIZE)', 'np.uint8')}")
        lines.append(f"saved_rngs = {_array('saved_rngs', '(envs, 1)', 'np.uint64')}")
    for i, leaf in enumerate(definition.obs_leaves):
        shape = row_shape(leaf, agents)
        for kind in ("obs", "final"):
            lines.append(f"{kind}_{i} = {_leaf_array(kind, i, ('rows', *shape), f'T_obs_{i}')}")
    for i, leaf in enumerate(definition.action_leaves):
        shape = action_shape(leaf, agents)
        lines.append(f"action_{i} = {_leaf_array('action', i, ('envs', *shape), f'T_action_{i}')}")
        if shape:
            lines.append(f"wide_{i} = {_leaf_array('wide', i, ('envs', *shape), f'T_wide_{i}')}")
    parts = {
        **{phase.lower(): [f"tally[PHASE] = {phase}"] * debug for phase in ("STEPPING", "RESETTING", "OBSERVING")},
        "step": _step_lines(definition),
        "observe": _observe_lines(definition, "obs"),
        "observe_final": _observe_lines(definition, "final"),
        "clear": ["for i in range(CLEARED):", "    state_bytes[env, i] = 0"],
    }
    if debug:
        parts["stepping"] += ["saved_states[env, :] = state_bytes[env]", "saved_rngs[env, 0] = rng[0]"]
    return fill("\n".join([lines[0], *(f"    {line}" for line in lines[1:])]) + STEP, parts)


def _step_lines(definition: Definition) -> list[str]:
    lines, values = [], []
    for i, leaf in enumerate(definition.action_leaves):
        shape = action_shape(leaf, definition.num_agents)
        values.append(f"given_{i}")
        if shape:
            each = loops(shape, f"given_{i}[{INDICES}] = action_{i}[env, {INDICES}]")
            lines += [f"given_{i} = wide_{i}[env]", *each]
        else:
            lines.append(f"given_{i} = wide_type_{i}(action_{i}[env])")
    action = as_tuple(values) if definition.nested_action else values[0]
    if definition.num_agents == 1:
        return [*lines, f"gain, ending = step(state, {action}, rng)", "reward[at], ends = float(gain), bool(ending)"]
    return [
        *lines, "rewards = reward[at : at + AGENTS]", "rewards[:] = 0.0",
        f"ends = bool(step(state, {action}, rewards, rng))",
    ]  # fmt: skip


def _observe_lines(definition: Definition, kind: str) -> list[str]:
    lines, values = [], []
    for i, leaf in enumerate(definition.obs_leaves):
        shape = row_shape(leaf, definition.num_agents)
        lines += [f"seen_{i} = {kind}_{i}[row]", *loops(shape, f"seen_{i}[{INDICES}] = 0")]
        values.append(f"seen_{i}")
    return [*lines, f"observe(state, {as_tuple(values) if definition.nested_obs else values[0]})"]


def policy_source(definition: Definition, params: Sequence[Any]) -> str:
    """The source of `policy_kernel`, which lets `policy` choose the actions of some lanes.

    It reads observations in the frame `slot` and writes actions, both as a kernel's task has them. Behind the leaves,
    the task has the address of the lanes' streams, and of each of the params.
    """
    behind = LEAVES + len(KINDS_OF_LEAVES) * max(len(definition.obs_leaves), len(definition.action_leaves))
    lines = ["task = array_at(address, (1024,), np.int64)"]
    lines += [f"slot, lanes = task[{PLACES['slot']}], task[{PLACES['lanes']}]"]
    lines += [f"rows = task[{PLACES['frames']}] * lanes", f"rngs = array_at(task[{behind}], (lanes, 1), np.uint64)"]
    for i, leaf in enumerate(definition.obs_leaves):
        lines.append(f"obs_{i} = {_leaf_array('obs', i, ('rows', *row_shape(leaf, 1)), f'T_obs_{i}')}")
    for i, leaf in enumerate(definition.action_leaves):
        lines.append(f"action_{i} = {_leaf_array('action', i, ('lanes', *row_shape(leaf, 1)), f'T_action_{i}')}")
    for i, param in enumerate(params):
        shape = ", ".join(map(str, param.shape))
        lines.append(f"param_{i} = array_at(task[{behind + 1 + i}], ({shape},), T_param_{i})")
    obs = [f"obs_{i}[slot * lanes + lane]" for i, _ in enumerate(definition.obs_leaves)]
    actions = [f"action_{i}[lane]" for i, _ in enumerate(definition.action_leaves)]
    given = [
        as_tuple(obs) if definition.nested_obs else obs[0],
        as_tuple(actions) if definition.nested_action else actions[0],
        "rngs[lane]",
        *(f"param_{i}" for i, _ in enumerate(params)),
    ]
    lines += ["for lane in range(start, stop):", f"    policy({', '.join(given)})"]
    return "\n".join(["def policy_kernel(address, start, stop, tally_address):", *(f"    {line}" for line in lines)])


def _array(name: str, shape: str, dtype: str) -> str:
    return f"array_at(task[{PLACES[name]}], {shape}, {dtype})"


def _leaf_array(kind: str, index: int, shape: Sequence[Any], dtype: str) -> str:
    place = LEAVES + len(KINDS_OF_LEAVES) * index + KINDS_OF_LEAVES.index(kind)
    return f"array_at(task[{place}], ({', '.join(map(str, shape))},), {dtype})"


def row_shape(leaf: Leaf, agents: int) -> tuple[int, ...]:
    """The shape of one env's part of an observation: of one element where the space has none."""
    return (agents, *leaf.shape) if agents > 1 else leaf.shape or (1,)


def action_shape(leaf: Leaf, agents: int) -> tuple[int, ...]:
    """The same of an action, which is a number where the space has no shape."""
    return (agents, *leaf.shape) if agents > 1 else leaf.shape


def loops(shape: tuple[int, ...], statement: str) -> list[str]:
    """A statement for each element of an array, with INDICES in it."""
    names = [f"i{axis}" for axis, _ in enumerate(shape)]
    heads = [f"for {name} in range({size}):" for name, size in zip(names, shape, strict=True)]
    lines = [*heads, statement.replace(INDICES, ", ".join(names))]
    return ["    " * depth + line for depth, line in enumerate(lines)]


def as_tuple(values: Sequence[str]) -> str:
    """These values as a tuple, in source."""
    return f"({', '.join(values)}{',' if len(values) == 1 else ''})"


def fill(source: str, parts: dict[str, list[str]]) -> str:
    """Put lines where their name stands in braces, as far in as that is."""
    lines = []
    for line in source.splitlines():
        name = line.strip()
        if name.startswith("{") and name.endswith("}"):
            margin = line[: len(line) - len(line.lstrip())]
            lines += [margin + one for one in parts[name[1:-1]]]
        else:
            lines.append(line)
    return "\n".join(lines)

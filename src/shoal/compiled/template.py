"""The source of a kernel for the CPU: it steps some envs, and is written out for the leaves and agents of one class.

The second half has the pieces of source that kernels for GPUs (`cuda.source`) have too.

It is Python that Numba compiles, around the user's `reset`, `step` and `observe`. A kernel is a function (task, start,
stop, tally): see `shoal.compiled.task`. Its caller (`native/kernel.h`) computes the returns and lengths of episodes,
and all other fields that follow from what it writes: a loop is fastest if it does little with few arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dis import get_instructions
from typing import Any

import numpy as np

from shoal.compiled.definition import Definition
from shoal.compiled.task import extras_place, place_of
from shoal.memory.messages import STATUS_FINAL
from shoal.native import AUTORESET
from shoal.native.layout import MARK_BEGINS, TALLY, TASK_FRAME_FIELDS
from shoal.spaces.leaves import Leaf

INDICES = "INDICES"  # where a statement of `loops` has its indices
# The arrays of lanes and frames that a kernel needs, and their types.
TYPES = {"ended": "u1", "run_length": "i8", "reward": "f8", "terminated": "b1", "status": "u1"}
# The rules of autoreset in the text have their model in shoal/envs/autoreset.py.
HEAD = "def {}(address, start, stop, tally_address):"
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
            for i in range(CLEARED):
                state_bytes[env, i] = 0
            begin_stream(rng, seeds[env], episodes[env])
            reset(state, rng)
            tally[BEGAN] += LANES_BEGUN
        {observing}
        {observe}
        status[at] = mark
"""


def constants(definition: Definition) -> dict[str, Any]:
    """Return the values that the source of a kernel uses, by name; functions are not among them."""
    return {
        "np": np, "AGENTS": np.uint64(definition.num_agents), "LANES_BEGUN": definition.num_agents,
        "NEXT_STEP": AUTORESET["next_step"], "SAME_STEP": AUTORESET["same_step"], "FINAL": STATUS_FINAL,
        "BEGINS": MARK_BEGINS, "STEPPING": 1, "RESETTING": 2, "OBSERVING": 3,
        "STATE": definition.dtype, "CLEARED": definition.cleared, "STATE_SIZE": definition.dtype.itemsize,
        **{name.upper(): i for i, name in enumerate(TALLY)},
        **{f"T_{name}": np.dtype(code) for name, code in TYPES.items()},
        **{f"T_obs_{i}": leaf.dtype for i, leaf in enumerate(definition.obs_leaves)},
        **{f"T_action_{i}": leaf.dtype for i, leaf in enumerate(definition.action_leaves)},
        **{f"T_wide_{i}": wide_type(leaf, definition.single).type for i, leaf in enumerate(definition.action_leaves)},
    }  # fmt: skip


def kernel_source(definition: Definition, debug: bool) -> str:
    """Write the source of `kernel`.

    It uses `constants`, and the functions reset, step, observe, begin_stream and array_at.

    Args:
        debug: whether the kernel keeps the state before each step, and says what it is doing, so that a step that
            fails can be repeated in plain Python.
    """
    agents = definition.num_agents
    lines = [
        "task, tally = array_at(address, (1024,), np.int64), array_at(tally_address, (8,), np.int64)",
        f"mode, limit = task[{place_of('mode')}], task[{place_of('limit')}]",
        f"all_begin = task[{place_of('resets')}] != 0",
        # Unsigned, so that Numba does not check whether an index counts from the end.
        f"slot, lanes = np.uint64(task[{place_of('slot')}]), np.uint64(task[{place_of('lanes')}])",
        f"rows = np.uint64(task[{place_of('frames')}]) * lanes",
        "envs = lanes // AGENTS",
        "first, first_row = slot * lanes, slot * envs",
        *(_array(name, ["rows" if name in TASK_FRAME_FIELDS else "lanes"], f"T_{name}") for name in TYPES),
        _array("states", ["envs"], "STATE"),
        _array("states", ["envs", "STATE_SIZE"], "np.uint8", "state_bytes"),
        _array("seeds", ["envs"], "np.uint64"),
        _array("episodes", ["envs"], "np.int64"),
        _array("rngs", ["envs", 1], "np.uint64"),
    ]
    if debug:
        lines.append(_array("saved_states", ["envs", "STATE_SIZE"], "np.uint8"))
        lines.append(_array("saved_rngs", ["envs", 1], "np.uint64"))
    for i, leaf in enumerate(definition.obs_leaves):
        shape = row_shape(leaf, agents)
        lines += [_array(f"{kind}.{i}", ["rows", *shape], f"T_obs_{i}") for kind in ("obs", "final")]
    for i, leaf in enumerate(definition.action_leaves):
        shape = action_shape(leaf, agents)
        kinds = ("action", "wide") if shape else ("action",)
        lines += [_array(f"{kind}.{i}", ["envs", *shape], f"T_{kind}_{i}") for kind in kinds]
    parts = {
        **{phase.lower(): [f"tally[PHASE] = {phase}"] * debug for phase in ("STEPPING", "RESETTING", "OBSERVING")},
        "step": take_lines(definition, "wide_{i}[env]", "env")
        + ["rewards = reward[at : at + AGENTS]", "rewards[:] = 0.0"] * (agents > 1)
        + call_lines(definition, "reward[at]", "float"),
        "observe": observe_lines(definition, "obs", "row"),
        "observe_final": observe_lines(definition, "final", "row"),
    }
    if debug:
        parts["stepping"] += ["saved_states[env, :] = state_bytes[env]", "saved_rngs[env, 0] = rng[0]"]
    return fill("\n".join([HEAD.format("kernel"), *indented(lines)]) + STEP, parts)


def policy_source(definition: Definition, params: Sequence[Any]) -> str:
    """Write the source of `policy_kernel`, which lets `policy` choose the actions of some lanes.

    It reads observations in the frame `slot` and writes actions, both at the addresses in a kernel's task. After the
    leaves, the task has the address of the lanes' streams, and of each of the params.
    """
    behind = extras_place(max(len(definition.obs_leaves), len(definition.action_leaves)))
    lines = [
        "task = array_at(address, (1024,), np.int64)",
        f"slot, lanes = task[{place_of('slot')}], task[{place_of('lanes')}]",
        f"rows = task[{place_of('frames')}] * lanes",
        _array(behind, ["lanes", 1], "np.uint64", "rngs"),
    ]
    for kind, rows, leaves in (("obs", "rows", definition.obs_leaves), ("action", "lanes", definition.action_leaves)):
        lines += [_array(f"{kind}.{i}", [rows, *row_shape(leaf, 1)], f"T_{kind}_{i}") for i, leaf in enumerate(leaves)]
    for i, param in enumerate(params):
        lines.append(_array(behind + 1 + i, param.shape, f"T_param_{i}", f"param_{i}"))
    obs = [f"obs_{i}[slot * lanes + lane]" for i, _ in enumerate(definition.obs_leaves)]
    actions = [f"action_{i}[lane]" for i, _ in enumerate(definition.action_leaves)]
    call = policy_call(definition, obs, actions, "rngs[lane]", [f"param_{i}" for i, _ in enumerate(params)])
    lines += ["for lane in range(start, stop):", f"    {call}"]
    return "\n".join([HEAD.format("policy_kernel"), *indented(lines)])


def _array(place: str | int, shape: Sequence[Any], dtype: str, name: str = "") -> str:
    """Make an array of the memory at an address in the task. It is called as its place, if it has no other name."""
    at = place_of(place) if isinstance(place, str) else place
    name = name or str(place).replace(".", "_")
    return f"{name} = array_at(task[{at}], ({', '.join(map(str, shape))},), {dtype})"


# ---- pieces of kernels for the CPU and for GPUs ----------------------------------------------------------------
# In both, `given_i` is the i-th leaf of an action as `step` gets it, and `seen_i` the i-th leaf of an observation as
# `observe` writes it.


def wide_type(leaf: Leaf, single: bool = False) -> np.dtype[Any]:
    """Return the type in which `step` gets a leaf of the action."""
    return np.dtype({"f": np.float32 if single else np.float64, "b": np.bool_}.get(leaf.dtype.kind, np.int64))


def row_shape(leaf: Leaf, agents: int) -> tuple[int, ...]:
    """Return the shape of one env's part of an observation: it has one element if the space has no shape."""
    return action_shape(leaf, agents) or (1,)


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
            lines.append(f"given_{i} = T_wide_{i}(action_{i}[{row}])")
    return lines


def call_lines(definition: Definition, reward: str, number: str) -> list[str]:
    """Call `step` with the action that `take_lines` has read; `reward` gets the reward, as such a number."""
    action = nested([f"given_{i}" for i, _ in enumerate(definition.action_leaves)], definition.nested_action)
    if definition.num_agents > 1:
        return [f"ends = bool(step(state, {action}, rewards, rng))"]
    return [f"value, ending = step(state, {action}, rng)", f"{reward}, ends = {number}(value), bool(ending)"]


def observe_lines(definition: Definition, where: str, row: str) -> list[str]:
    """Write an observation into a row of the arrays that begin with `where`."""
    lines, values = [], [f"seen_{i}" for i, _ in enumerate(definition.obs_leaves)]
    for i, leaf in enumerate(definition.obs_leaves):
        zeros = loops(row_shape(leaf, definition.num_agents), f"seen_{i}[{INDICES}] = 0")
        lines += [f"seen_{i} = {where}_{i}[{row}]", *zeros]
    return [*lines, f"observe(state, {nested(values, definition.nested_obs)})"]


def policy_call(
    definition: Definition, obs: Sequence[str], actions: Sequence[str], rng: str, params: Sequence[str]
) -> str:
    """Call a policy with the leaves of an observation and of an action."""
    given = [nested(obs, definition.nested_obs), nested(actions, definition.nested_action), rng, *params]
    return f"policy({', '.join(given)})"


def loops(shape: tuple[int, ...], statement: str) -> list[str]:
    """Repeat a statement, with INDICES in it, for each element of an array."""
    names = [f"i{axis}" for axis, _ in enumerate(shape)]
    heads = [f"for {name} in range({size}):" for name, size in zip(names, shape, strict=True)]
    lines = [*heads, statement.replace(INDICES, ", ".join(names))]
    return ["    " * depth + line for depth, line in enumerate(lines)]


def nested(values: Sequence[str], is_nested: bool) -> str:
    """Write a tuple of values, or the only one if the space is not nested."""
    return _as_tuple(values) if is_nested else values[0]


def uses_chance(definition: Definition) -> bool:
    """Say whether `step` draws random numbers: if not, a stream need not be kept from step to step."""
    code = definition.step.__code__
    name = code.co_varnames[code.co_argcount - 1]
    loaded = [one.argval for one in get_instructions(code)]
    # Some instructions load two at once.
    return name in code.co_cellvars or any(name in one if isinstance(one, tuple) else one == name for one in loaded)


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

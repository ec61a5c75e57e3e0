"""The source of a kernel for the CPU: it steps some envs, and is written out for the leaves and agents of one class.

It is Python that Numba compiles, around the user's `reset`, `step` and `observe`. A kernel is a function (task, start,
stop, tally): see `shoal.compiled.task`. Its caller (`native/kernel.h`) computes the returns and lengths of episodes,
and all other fields that follow from what it writes: a loop is fastest if it does little with few arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.compiled.definition import Definition
from shoal.compiled.source_parts import (
    action_shape,
    clear_lines,
    fill,
    indented,
    observe_lines,
    policy_call,
    row_shape,
    step_call,
    take_lines,
    wide_types,
)  # fmt: skip
from shoal.compiled.task import BEGINS, FRAME_FIELDS, PLACES, TALLY, extras_place, leaf_place
from shoal.memory.messages import STATUS_FINAL
from shoal.native import AUTORESET

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
            {clear}
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
        "NEXT_STEP": AUTORESET["next_step"],
        "SAME_STEP": AUTORESET["same_step"], "FINAL": STATUS_FINAL, "BEGINS": BEGINS,
        "STEPPING": 1, "RESETTING": 2, "OBSERVING": 3,
        "STATE": definition.dtype, "CLEARED": definition.cleared, "STATE_SIZE": definition.dtype.itemsize,
        **{name.upper(): i for i, name in enumerate(TALLY)},
        **{f"T_{name}": np.dtype(code) for name, code in TYPES.items()},
        **{f"T_obs_{i}": leaf.dtype for i, leaf in enumerate(definition.obs_leaves)},
        **{f"T_action_{i}": leaf.dtype for i, leaf in enumerate(definition.action_leaves)},
        **wide_types(definition),
    }  # fmt: skip


def kernel_source(definition: Definition, debug: bool) -> str:
    """Write the source of `kernel`.

    It uses `constants`, and the functions reset, step, observe, begin_stream and array_at.

    Args:
        debug: whether the kernel keeps the state before each step, and says what it is doing, so that a step that
            fails can be repeated in plain Python.
    """
    agents = definition.num_agents
    lines = ["task, tally = array_at(address, (1024,), np.int64), array_at(tally_address, (8,), np.int64)"]
    lines += [f"{name} = task[{PLACES[name]}]" for name in ("mode", "limit")]
    lines += [f"all_begin = task[{PLACES['resets']}] != 0"]
    # Unsigned, so that Numba does not check whether an index counts from the end.
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
        "observe": observe_lines(definition, "obs", "row"),
        "observe_final": observe_lines(definition, "final", "row"),
        "clear": clear_lines(),
    }
    if debug:
        parts["stepping"] += ["saved_states[env, :] = state_bytes[env]", "saved_rngs[env, 0] = rng[0]"]
    return fill("\n".join([HEAD.format("kernel"), *indented(lines)]) + STEP, parts)


def _step_lines(definition: Definition) -> list[str]:
    lines, call = take_lines(definition, "wide_{i}[env]", "env"), step_call(definition)
    if definition.num_agents == 1:
        return [*lines, f"gain, ending = {call}", "reward[at], ends = float(gain), bool(ending)"]
    return [*lines, "rewards = reward[at : at + AGENTS]", "rewards[:] = 0.0", f"ends = bool({call})"]


def policy_source(definition: Definition, params: Sequence[Any]) -> str:
    """Write the source of `policy_kernel`, which lets `policy` choose the actions of some lanes.

    It reads observations in the frame `slot` and writes actions, both at the addresses in a kernel's task. After the
    leaves, the task has the address of the lanes' streams, and of each of the params.
    """
    behind = extras_place(max(len(definition.obs_leaves), len(definition.action_leaves)))
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
    call = policy_call(definition, obs, actions, "rngs[lane]", [f"param_{i}" for i, _ in enumerate(params)])
    lines += ["for lane in range(start, stop):", f"    {call}"]
    return "\n".join([HEAD.format("policy_kernel"), *indented(lines)])


def _array(name: str, shape: str, dtype: str) -> str:
    return f"array_at(task[{PLACES[name]}], {shape}, {dtype})"


def _leaf_array(kind: str, index: int, shape: Sequence[Any], dtype: str) -> str:
    return f"array_at(task[{leaf_place(kind, index)}], ({', '.join(map(str, shape))},), {dtype})"

"""The source of a kernel for the CPU in single precision: passes over a block of lanes, each a loop of vector code.

The counterpart of `shoal.compiled.template` for classes whose state is made of numbers. Each number of a state has an
array of its own, a column. A lane's numbers are in registers during a pass, and LLVM lets one instruction work on as
many lanes as fit. Resets are few, so the lanes that need one are listed, and only these are reset.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.compiled.definition import Definition
from shoal.compiled.task import place_of
from shoal.compiled.template import (
    HEAD,
    INDICES,
    TYPES,
    call_lines,
    fill,
    indented,
    loops,
    nested,
    row_shape,
    uses_chance,
    wide_type,
)
from shoal.memory.messages import STATUS_FINAL
from shoal.native import AUTORESET
from shoal.native.layout import MARK_BEGINS, TALLY, TASK_FRAME_FIELDS

BLOCK = 128  # lanes of a pass: what they need stays in the first cache
MOST_OBSERVED = 64  # numbers of an observation that is kept in registers; a larger one is written where it belongs
COLUMNS = {"seeds": "u8", "episodes": "i8", "rngs": "u8"}

# The rules of autoreset in the text have their model in shoal/envs/autoreset.py.
PASSES = """
    for begin in range(start, stop, BLOCK):
        last = min(begin + BLOCK, stop)
        if all_begin:
            for env in range(begin, last):
                set_reward(reward_at, env, 0.0)
                set_terminated(terminated_at, env, 0)
                set_status(status_at, env, BEGINS)
        elif mode == SAME_STEP:
            for env in range(begin, last):
                {step_same}
        else:
            for env in range(begin, last):
                {step_next}
        fresh = list_of_lanes()
        count = 0
        for env in range(begin, last):
            fresh[count] = env
            count += get_status(status_at, env) != 0
        if mode == SAME_STEP and not all_begin and count > 0:
            tally[STATUS] |= FINAL
            for i in range(count):
                env = fresh[i]
                {load}
                {observe_final}
        for i in range(count):
            env = fresh[i]
            {reset}
        tally[BEGAN] += count
        for env in range(begin, last):
            {load}
            {observe}
"""


def is_small(definition: Definition) -> bool:
    """Say whether an observation is kept in registers."""
    return sum(int(np.prod(row_shape(leaf, 1))) for leaf in definition.obs_leaves) <= MOST_OBSERVED


def field_columns(definition: Definition) -> dict[str, np.dtype[Any]]:
    """Return the types of the columns, by the names of the fields."""
    return {name: definition.dtype[name] for name in definition.dtype.names or ()}


def constants(definition: Definition) -> dict[str, Any]:
    """Return the values that the source uses, by name; those that Numba has to make are in `single.build`."""
    return {
        "np": np, "BLOCK": BLOCK, "NEXT_STEP": AUTORESET["next_step"], "SAME_STEP": AUTORESET["same_step"],
        "FINAL": STATUS_FINAL, "BEGINS": np.uint8(MARK_BEGINS), "MARK_FINAL": np.uint8(STATUS_FINAL),
        "NO_MARK": np.uint8(0), "LANES": 128, "LIMIT": definition.max_episode_steps or 0,
        **{name.upper(): i for i, name in enumerate(TALLY)},
        **{f"T_obs_{i}": leaf.dtype for i, leaf in enumerate(definition.obs_leaves)},
        **{f"T_given_{i}": wide_type(leaf, True).type for i, leaf in enumerate(definition.action_leaves)},
    }  # fmt: skip


def arrays(definition: Definition) -> dict[str, np.dtype[Any]]:
    """Return the types of all arrays that the kernel reads and writes, by name. Flags are bytes."""
    found = {name: np.dtype(code.replace("b1", "u1")) for name, code in {**TYPES, **COLUMNS}.items()}
    found.update({f"field_{name}": stored(dtype) for name, dtype in field_columns(definition).items()})
    for kind, leaves in (("obs", definition.obs_leaves), ("action", definition.action_leaves)):
        found.update({f"{kind}_{i}": stored(leaf.dtype) for i, leaf in enumerate(leaves)})
    found.update({f"final_{i}": stored(leaf.dtype) for i, leaf in enumerate(definition.obs_leaves)})
    return found


def places(shape: tuple[int, ...]) -> list[str]:
    """Return the indices of all elements, in order."""
    return [", ".join(map(str, place)) for place in np.ndindex(*shape)]


def stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which numbers lie in memory: flags are bytes."""
    return np.dtype(np.uint8) if dtype.kind == "b" else dtype


def kernel_source(definition: Definition) -> str:
    """Write the source of `kernel`."""
    lines = [
        "task, tally = array_at(address, (1024,), np.int64), array_at(tally_address, (8,), np.int64)",
        f"mode, all_begin = task[{place_of('mode')}], task[{place_of('resets')}] != 0",
        f"first = task[{place_of('slot')}] * task[{place_of('lanes')}]",
        "tally[ENV] = start",
        "by_next = mode == NEXT_STEP",
        *_addresses(definition),
    ]
    keeps = uses_chance(definition)
    parts = {
        "step_next": _step_lines(definition, keeps, "next"),
        "step_same": _step_lines(definition, keeps, "same"),
        "load": load_lines(definition),
        "observe": observe_lines(definition, "obs", "env"),
        "observe_final": observe_lines(definition, "final", "env"),
        "reset": reset_lines(definition, keeps),
    }
    return fill("\n".join([HEAD.format("kernel"), *indented(lines)]) + PASSES, parts)


def _addresses(definition: Definition) -> list[str]:
    """Set NAME_at for each array; those of the frame begin at its first lane."""
    lines = []
    sizes = {name: dtype.itemsize for name, dtype in arrays(definition).items()}
    for name in (*TYPES, *COLUMNS):
        offset = f" + first * {sizes[name]}" if name in TASK_FRAME_FIELDS else ""
        lines.append(f"{name}_at = task[{place_of(name)}]{offset}")
    # The columns follow each other, in the order of the fields.
    lines.append(f"columns = array_at(task[{place_of('states')}], (64,), np.int64)")
    lines += [f"field_{name}_at = columns[{i}]" for i, name in enumerate(field_columns(definition))]
    for i, leaf in enumerate(definition.obs_leaves):
        size = int(np.prod(row_shape(leaf, 1))) * sizes[f"obs_{i}"]
        lines += [f"{kind}_{i}_at = task[{place_of(f'{kind}.{i}')}] + first * {size}" for kind in ("obs", "final")]
    lines += [f"action_{i}_at = task[{place_of(f'action.{i}')}]" for i, _ in enumerate(definition.action_leaves)]
    return lines


def load_lines(definition: Definition, params_only: bool = False) -> list[str]:
    """Put the numbers of a lane into its record; all but params are zero if `params_only`."""
    lines = ["state = local_state()"]
    for name, dtype in field_columns(definition).items():
        value = f"get_field_{name}(field_{name}_at, env)"
        if params_only and name not in definition.params:
            value = f"np.{dtype.name}(0)" if dtype.kind != "b" else "False"
        elif dtype.kind == "b":
            value += " != 0"
        lines.append(f"state.{name} = {value}")
    return lines


def store_lines(definition: Definition) -> list[str]:
    """Put the numbers of a lane back into their columns. Params do not change."""
    names = [name for name in field_columns(definition) if name not in definition.params]
    return [f"set_field_{name}(field_{name}_at, env, state.{name})" for name in names]


def _take_lines(definition: Definition, where: str, row: str) -> list[str]:
    """Read the action of a lane from a row of the arrays that begin with `where`."""
    lines = []
    for i, leaf in enumerate(definition.action_leaves):
        get = f"get_{where}_{i}({where}_{i}_at, {row}"
        if leaf.shape:
            size = int(np.prod(leaf.shape))
            lines.append(f"given_{i} = local_action_{i}()")
            lines += [f"given_{i}[{place}] = {get} * {size} + {k})" for k, place in enumerate(places(leaf.shape))]
        else:
            lines.append(f"given_{i} = T_given_{i}({get}))")
    return lines


def step_call_lines(definition: Definition, keeps: bool, where: str, row: str) -> list[str]:
    """Let a lane make its step, unless it begins an episode; the results are `gain` and `ends`."""
    lines = [*load_lines(definition), *_take_lines(definition, where, row), "rng = local_rng()"]
    lines += ["rng[0] = get_rngs(rngs_at, env)"] * keeps
    call = call_lines(definition, "gain", "np.float32")
    return [*lines, "gain, ends = np.float32(0), False", "if not begins:", *indented(call)]


def _step_lines(definition: Definition, keeps: bool, rule: str) -> list[str]:
    begins = "by_next & (get_ended(ended_at, env) != 0)" if rule == "next" else "False"
    lines = [f"begins = {begins}", *step_call_lines(definition, keeps, "action", "env")]
    lines += [*store_lines(definition), *["set_rngs(rngs_at, env, rng[0])"] * keeps]
    lines += ["set_reward(reward_at, env, np.float64(gain))", "set_terminated(terminated_at, env, np.uint8(ends))"]
    if rule == "same":
        lines.append("over = ends | ((LIMIT > 0) & (get_run_length(run_length_at, env) + 1 >= LIMIT))")
        return [*lines, "set_status(status_at, env, MARK_FINAL if over else NO_MARK)"]
    return [*lines, "set_status(status_at, env, BEGINS if begins else NO_MARK)"]


def reset_lines(definition: Definition, keeps: bool) -> list[str]:
    """Let a lane begin its next episode."""
    return [
        *load_lines(definition, params_only=True),
        "episode = get_episodes(episodes_at, env) + 1",
        "set_episodes_next(episodes_at, env, episode)",
        "rng = local_rng()",
        "begin_stream(rng, get_seeds(seeds_at, env), episode)",
        "reset(state, rng)",
        *store_lines(definition),
        *["set_rngs(rngs_at, env, rng[0])"] * keeps,
    ]


def observe_lines(definition: Definition, kind: str, row: str) -> list[str]:
    """Write the observation of a lane into a row of the arrays that begin with `kind`."""
    lines, after = [], []
    for i, leaf in enumerate(definition.obs_leaves):
        shape = row_shape(leaf, 1)
        size = int(np.prod(shape))
        if is_small(definition):
            lines.append(f"seen_{i} = local_obs_{i}()")
            for k, index in enumerate(places(shape)):
                after.append(f"set_{kind}_{i}({kind}_{i}_at, {row} * {size} + {k}, seen_{i}[{index}])")
        else:
            place = f"{kind}_{i}_at + {row} * {size * leaf.dtype.itemsize}"
            lines.append(f"seen_{i} = array_at({place}, {shape}, T_obs_{i})")
        lines += loops(shape, f"seen_{i}[{INDICES}] = 0")
    seen = nested([f"seen_{i}" for i, _ in enumerate(definition.obs_leaves)], definition.nested_obs)
    return [*lines, f"observe(state, {seen})", *after]

"""The source of a rollout on a GPU that keeps everything of an env in registers: state, observation, action, lengths.

Global memory is written, and read at the beginning alone. For envs of few numbers; `source` has the kernels of others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.compiled.cuda import source
from shoal.compiled.cuda.source import BODY, KernelKind
from shoal.compiled.cuda.wide import numbers_at_once
from shoal.compiled.definition import Definition
from shoal.compiled.narrow import has_columns
from shoal.compiled.template import (
    INDICES,
    call_lines,
    fill,
    indented,
    loops,
    nested,
    policy_call,
    row_shape,
    uses_chance,
)

MOST_NUMBERS = 16  # of an observation, and of an action

STEPS = """
for t in range(steps):
    row = np.uint64(t) * np.uint64(count) + np.uint64(env)
    seen_row = row + np.uint64(count)
    {choose}
    begins = {begins}
    ends, cut, gain = False, False, T_NUMBER(0)
    if not begins:
        length += 1
        {call}
    over = ends or cut
    reward[row], terminated[row], truncated[row] = gain, ends, cut
    {track}
    {final}
    fresh = {fresh}
    if fresh:
        {begin}
    {end}
    began[seen_row] = fresh
    {observe}
    if t == steps - 1:
        {last}
"""


def fits(definition: Definition) -> bool:
    """Say whether the rollouts of a class are made in registers."""
    sizes = [int(np.prod(leaf.shape)) for leaf in (*definition.obs_leaves, *definition.action_leaves)]
    return definition.num_agents == 1 and has_columns(definition) and max(sizes, default=0) <= MOST_NUMBERS


def arguments(definition: Definition, kind: KernelKind) -> list[str]:
    """Return the names of the kernel's arguments, in order; `now_...` are the envs' own arrays."""
    names = source.arguments(definition, kind)
    now = [f"obs_{i}" for i, _ in enumerate(definition.obs_leaves)] + ["reward", "terminated", "truncated"]
    now += [f"final_{i}" for i, _ in enumerate(definition.obs_leaves)] if kind.mode == "same_step" else []
    now += ["episode_return", "episode_length"] if kind.tracks else []
    return [*names, *(f"now_{name}" for name in now)]


def locals_of(definition: Definition) -> dict[str, Any]:
    """Return the types and sizes that the source uses, by name."""
    found: dict[str, Any] = {}
    for i, leaf in enumerate(definition.obs_leaves):
        found[f"T_seen_{i}"] = leaf.dtype.type
    for i, leaf in enumerate(definition.action_leaves):
        found[f"T_chosen_{i}"] = leaf.dtype.type
    return found


def kernel_source(definition: Definition, kind: KernelKind) -> str:
    """Write the source of `kernel`; beside what `source.kernel_source` uses it needs `locals_of` and store_N."""
    declare = ["rng = cuda.local.array(1, np.uint64)", "policy_rng = cuda.local.array(1, np.uint64)"]
    declare += ["local = cuda.local.array(1, T_STATE)"]
    for i, leaf in enumerate(definition.obs_leaves):
        declare.append(f"seen_{i} = cuda.local.array({row_shape(leaf, 1)}, T_seen_{i})")
    for i, leaf in enumerate(definition.action_leaves):
        declare.append(f"chosen_{i} = cuda.local.array({row_shape(leaf, 1)}, T_chosen_{i})")
        if leaf.shape:
            declare.append(f"given_{i} = cuda.local.array({leaf.shape}, T_wide_{i})")
    load, store = source.column_lines(definition, kind.own_params)
    keeps = uses_chance(definition)
    load += ["length = lengths[env]", *["rng[0] = rngs[env, 0]"] * keeps]
    load += ["begin_stream(policy_rng, policy_seed[0] + np.uint64(env), POLICY_STREAM)", "began[env] = length == 0"]
    for i, leaf in enumerate(definition.obs_leaves):
        shape = row_shape(leaf, 1)
        load += loops(shape, f"seen_{i}[{INDICES}] = now_obs_{i}[env, {INDICES}]")
        load += row_lines(f"obs_{i}", "np.uint64(env)", f"seen_{i}", shape, leaf.dtype)
    parts = {
        "mask": [], "declare": declare, "load": load, "act": _steps(definition, kind).splitlines(),
        "store": [*store, "lengths[env] = length", *["rngs[env, 0] = rng[0]"] * keeps],
    }  # fmt: skip
    return fill(f"def kernel({', '.join(arguments(definition, kind))}):" + BODY, parts)


def _steps(definition: Definition, kind: KernelKind) -> str:
    rules = {
        "begins": "length == ENDED" if kind.mode == "next_step" else "False",
        "fresh": "begins" if kind.mode == "next_step" else "over",
    }
    text = STEPS.strip("\n")
    for name, value in rules.items():
        text = text.replace(f"{{{name}}}", value)
    seen = [f"seen_{i}" for i, _ in enumerate(definition.obs_leaves)]
    look = f"observe(state, {nested(seen, definition.nested_obs)})"
    clear, write, final, last = (
        [],
        [],
        [],
        ["now_reward[env], now_terminated[env], now_truncated[env] = gain, ends, cut"],
    )
    for i, leaf in enumerate(definition.obs_leaves):
        shape = row_shape(leaf, 1)
        clear += loops(shape, f"seen_{i}[{INDICES}] = 0")
        write += row_lines(f"obs_{i}", "seen_row", f"seen_{i}", shape, leaf.dtype)
        final += row_lines(f"final_{i}", "row", f"seen_{i}", shape, leaf.dtype)
        last += loops(shape, f"now_obs_{i}[env, {INDICES}] = seen_{i}[{INDICES}]")
    if kind.mode == "same_step":
        final = [*clear, "if over:", f"    {look}", *final]
        for i, leaf in enumerate(definition.obs_leaves):
            final += ["if t == steps - 1:", *indented(
                loops(row_shape(leaf, 1), f"now_final_{i}[env, {INDICES}] = seen_{i}[{INDICES}]"))]  # fmt: skip
    else:
        final = []
    track = ["so_far = 0 if begins else length", "totals[env] = gain + (0 if so_far <= 1 else totals[env])",
             "episode_return[row], episode_length[row] = totals[env], so_far"]  # fmt: skip
    last += ["now_episode_length[env] = so_far"] * kind.tracks  # `totals` is the envs' own return
    parts = {
        "choose": _choose_lines(definition, kind),
        "call": [*call_lines(definition, "gain", "T_NUMBER"), "cut = LIMIT > 0 and length >= LIMIT"],
        "track": track * kind.tracks,
        "final": final,
        "begin": source.begin_lines(definition),
        "end": ["if over:", "    length = ENDED"] * (kind.mode == "next_step"),
        "observe": [*clear, look, *write],
        "last": last,
    }
    return "\n".join(line for line in fill(text, parts).splitlines() if line)


def _choose_lines(definition: Definition, kind: KernelKind) -> list[str]:
    seen = [f"seen_{i}" for i, _ in enumerate(definition.obs_leaves)]
    chosen = [f"chosen_{i}" for i, _ in enumerate(definition.action_leaves)]
    lines = [
        policy_call(definition, seen, chosen, "policy_rng", [f"policy_param_{i}" for i in range(kind.policy_params)])
    ]
    for i, leaf in enumerate(definition.action_leaves):
        if leaf.shape:
            lines += loops(leaf.shape, f"given_{i}[{INDICES}] = chosen_{i}[{INDICES}]")
            lines += loops(leaf.shape, f"action_{i}[row, {INDICES}] = chosen_{i}[{INDICES}]")
        else:
            lines += [f"given_{i} = T_wide_{i}(chosen_{i}[0])", f"action_{i}[row] = chosen_{i}[0]"]
    return lines


def row_lines(array: str, row: str, values: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[str]:
    """Write a row of an array [rows, ...], several numbers at once."""
    size, places = int(np.prod(shape)), [", ".join(map(str, place)) for place in np.ndindex(*shape)]
    at_once = numbers_at_once(size, dtype)
    if at_once == 1:
        return [f"{array}[{row}, {place}] = {values}[{place}]" for place in places]
    return [
        f"store_{at_once}({array}, {row} * np.uint64({size}) + np.uint64({first}), "
        + ", ".join(f"{values}[{place}]" for place in places[first : first + at_once]) + ")"
        for first in range(0, size, at_once)
    ]  # fmt: skip

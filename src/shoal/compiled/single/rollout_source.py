"""The source of a whole rollout in single precision: a block of lanes makes all steps, and stays in the first cache.

What a step of the block brings is kept on the stack (`now_...`) and then copied to where it belongs: past the caches,
if the arrays of the rollout are larger than these. The counterpart on a GPU is `shoal.compiled.cuda.source`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.compiled.definition import Definition
from shoal.compiled.mlp import Mlp
from shoal.compiled.narrow import narrow
from shoal.compiled.single.source import (
    COLUMNS,
    load_lines,
    observe_lines,
    places,
    reset_lines,
    step_call_lines,
    store_lines,
    stored,
)
from shoal.compiled.task import extras_place, place_of
from shoal.compiled.template import HEAD, fill, indented, policy_call, row_shape, uses_chance
from shoal.spaces.leaves import Leaf

LANES = 128  # of a block
# What is known of a lane between steps: the types that it has outside, and here. No number of the loop over lanes is
# wider than 32 bits, because the widest one says how many lanes are stepped at once.
LANE_ARRAYS = {"ended": ("u1", "u1"), "run_length": ("i8", "i4"), "run_return": ("f8", "f4")}
# What a step brings, for each lane, with the types of the arrays of a rollout.
BROUGHT = {"reward": "f4", "terminated": "u1", "truncated": "u1", "episode_return": "f4", "episode_length": "i4"}

BLOCKS = """
    for begin in range(start, stop, LANES):
        count = min(LANES, stop - begin)
        {first}
        for lane in range(count):
            {take}
        for t in range(since, until):
            {choose}
            for lane in range(count):
                env = begin + lane
                {step}
            fresh = list_of_lanes()
            found = 0
            for lane in range(count):
                fresh[found] = begin + lane
                found += get_now_began(now_began_at, lane) != 0
            if by_same and found > 0:
                for i in range(found):
                    env = fresh[i]
                    {load}
                    {observe_final}
            for i in range(found):
                env = fresh[i]
                {reset}
            tally[BEGAN] += found
            for lane in range(count):
                env = begin + lane
                {load}
                {observe}
            {keep}
        for lane in range(count):
            {give}
    if streams:
        fence()
"""


def arrays(definition: Definition, widest: int) -> dict[str, np.dtype[Any]]:
    """Return the types of all arrays that the kernel reads and writes, by name."""
    found = {name: np.dtype(code) for name, code in {**COLUMNS, "policy_rngs": "u8"}.items()}
    found.update({name: np.dtype(outside) for name, (outside, _) in LANE_ARRAYS.items()})
    found.update({f"field_{name}": stored(definition.dtype[name]) for name in definition.dtype.names or ()})
    found.update({f"final_{i}": stored(leaf.dtype) for i, leaf in enumerate(definition.obs_leaves)})
    return {**found, **rooms(definition, widest)}


def rooms(definition: Definition, widest: int) -> dict[str, np.dtype[Any]]:
    """Return the types of the arrays on the stack, by name; `widest` is that of a network's layers, 0 for none."""
    found = {f"now_{name}": np.dtype(code) for name, code in {**BROUGHT, "began": "u1"}.items()}
    found.update({f"now_{name}": np.dtype(here) for name, (_, here) in LANE_ARRAYS.items()})
    found.update({f"now_choice_{i}": choice_type(leaf) for i, leaf in enumerate(definition.action_leaves)})
    found.update({f"now_obs_{i}": stored(leaf.dtype) for i, leaf in enumerate(definition.obs_leaves)})
    found.update({f"now_action_{i}": stored(leaf.dtype) for i, leaf in enumerate(definition.action_leaves)})
    return {**found, **dict.fromkeys(("units_0", "units_1") if widest else (), np.dtype(np.float32))}


def choice_type(leaf: Leaf) -> np.dtype[Any]:
    """Return the type in which an action goes from the policy to the step."""
    if leaf.dtype.itemsize < 8 or leaf.low is None or leaf.high is None:
        return stored(leaf.dtype)
    inside = leaf.dtype.kind == "f" or (np.min(leaf.low) >= -(2**31) and np.max(leaf.high) < 2**31)
    return narrow(np.dtype(f"{leaf.dtype.kind}4")) if inside else leaf.dtype


def _kinds(definition: Definition) -> Any:
    return (("obs", definition.obs_leaves), ("action", definition.action_leaves), ("choice", definition.action_leaves))


def room_sizes(definition: Definition, widest: int) -> dict[str, int]:
    """Return how many numbers of a lane there are in each array on the stack."""
    found = {name: widest if name.startswith("units") else 1 for name in rooms(definition, widest)}
    for kind, leaves in _kinds(definition):
        found.update({f"now_{kind}_{i}": int(np.prod(row_shape(leaf, 1))) for i, leaf in enumerate(leaves)})
    return found


def widest_layer(definition: Definition, policy: Any, params: Sequence[Any]) -> int:
    """Return how many numbers the widest layer of a network has; 0 if the policy is none."""
    if not isinstance(policy, Mlp):
        return 0
    return max(policy.widths(definition.obs_leaves, definition.action_leaves, params))


def rollout_source(definition: Definition, policy: Any, params: Sequence[Any]) -> str:
    """Write the source of `rollout_kernel`.

    It makes the steps from `slot` up to `until`. Observations and `began` have a row more than the others, the first.
    """
    widest = widest_layer(definition, policy, params)
    behind = extras_place(max(len(definition.obs_leaves), len(definition.action_leaves)))
    lines = [
        "task, tally = array_at(address, (1024,), np.int64), array_at(tally_address, (8,), np.int64)",
        f"mode, lanes, streams = task[{place_of('mode')}], task[{place_of('lanes')}], task[{place_of('streams')}] != 0",
        f"since, until = task[{place_of('slot')}], task[{place_of('until')}]",
        "by_next, by_same = mode == NEXT_STEP, mode == SAME_STEP",
        *(f"{name}_at = task[{place_of(name)}]" for name in (*COLUMNS, *LANE_ARRAYS)),
        f"columns = array_at(task[{place_of('states')}], (64,), np.int64)",
        *(f"field_{name}_at = columns[{i}]" for i, name in enumerate(definition.dtype.names or ())),
        *(f"{name}_to = task[{place_of(name)}]" for name in (*BROUGHT, "began")),
        *(f"{name}_at = room_{name}()" for name in rooms(definition, widest)),
        f"policy_rngs_at = task[{behind}]",
    ]
    for i, param in enumerate(params):
        lines.append(f"param_{i}_at = task[{behind + 1 + i}]")
        lines.append(f"param_{i} = array_at(param_{i}_at, {tuple(param.shape)}, T_param_{i})")
    for kind, leaves in (("obs", definition.obs_leaves), ("action", definition.action_leaves)):
        lines += [f"{kind}_{i}_to = task[{place_of(f'{kind}.{i}')}]" for i, _ in enumerate(leaves)]
    lines += [f"final_{i}_to = task[{place_of(f'final.{i}')}]" for i, _ in enumerate(definition.obs_leaves)]
    keeps, sizes, types = uses_chance(definition), room_sizes(definition, widest), rooms(definition, widest)
    final = [f"final_{i}_at = final_{i}_to + (t + 1) * lanes * {_bytes(sizes, types, f'obs_{i}')}"
             for i, _ in enumerate(definition.obs_leaves)]  # fmt: skip
    parts = {
        "take": [f"set_now_{name}(now_{name}_at, lane, get_{name}({name}_at, begin + lane))" for name in LANE_ARRAYS],
        "give": [f"set_{name}({name}_at, begin + lane, get_now_{name}(now_{name}_at, lane))" for name in LANE_ARRAYS],
        "first": [f"copy(now_obs_{i}_at, obs_{i}_to + (since * lanes + begin) * {_bytes(sizes, types, f'obs_{i}')}, "
                  f"count * {_bytes(sizes, types, f'obs_{i}')})" for i, _ in enumerate(definition.obs_leaves)],
        "choose": policy.lines(definition, params) if isinstance(policy, Mlp) else _choose_lines(definition, params),
        "step": _step_lines(definition, keeps),
        "load": load_lines(definition),
        "observe_final": [*final, *observe_lines(definition, "final", "env")],
        "reset": reset_lines(definition, keeps),
        "observe": observe_lines(definition, "now_obs", "lane"),
        "keep": _keep_lines(definition, sizes, types),
    }  # fmt: skip
    return fill("\n".join([HEAD.format("rollout_kernel"), *indented(lines)]) + BLOCKS, parts)


def _bytes(sizes: dict[str, int], types: dict[str, Any], name: str) -> int:
    return int(sizes[f"now_{name}"] * types[f"now_{name}"].itemsize)


def _step_lines(definition: Definition, keeps: bool) -> list[str]:
    limit = definition.max_episode_steps
    cut = f"(not begins) & (length >= np.int32({limit}))" if limit else "False"
    return [
        "begins = by_next & (get_now_ended(now_ended_at, lane) != 0)",
        *step_call_lines(definition, keeps, "now_choice", "lane"),
        *store_lines(definition), *["set_rngs(rngs_at, env, rng[0])"] * keeps,
        "length = np.int32(0) if begins else np.int32(get_now_run_length(now_run_length_at, lane) + np.int32(1))",
        "total = np.float32(0) if begins else get_now_run_return(now_run_return_at, lane) + gain",
        f"cut = {cut}",
        "over = ends | cut",
        "starts = begins | (by_same & over)",
        "set_now_reward(now_reward_at, lane, gain)",
        "set_now_terminated(now_terminated_at, lane, np.uint8(ends))",
        "set_now_truncated(now_truncated_at, lane, np.uint8(cut))",
        "set_now_episode_return(now_episode_return_at, lane, total)",
        "set_now_episode_length(now_episode_length_at, lane, length)",
        "set_now_began(now_began_at, lane, np.uint8(starts))",
        "set_now_ended(now_ended_at, lane, np.uint8(over & by_next))",
        "set_now_run_length(now_run_length_at, lane, np.int32(0) if starts else length)",
        "set_now_run_return(now_run_return_at, lane, np.float32(0) if starts else total)",
    ]  # fmt: skip


def _choose_lines(definition: Definition, params: Sequence[Any]) -> list[str]:
    """Let a policy choose, lane by lane."""
    body, after = ["rng = local_rng()", "rng[0] = get_policy_rngs(policy_rngs_at, begin + lane)"], []
    for i, leaf in enumerate(definition.obs_leaves):
        shape = row_shape(leaf, 1)
        body.append(f"seen_{i} = local_obs_{i}()")
        for k, place in enumerate(places(shape)):
            source = f"get_now_obs_{i}(now_obs_{i}_at, lane * {int(np.prod(shape))} + {k})"
            body.append(f"seen_{i}[{place}] = {source}")
    for i, leaf in enumerate(definition.action_leaves):
        shape = row_shape(leaf, 1)
        body.append(f"chosen_{i} = local_choice_{i}()")
        for k, place in enumerate(places(shape)):
            body.append(f"chosen_{i}[{place}] = 0")
            at = f"lane * {int(np.prod(shape))} + {k}"
            after.append(f"set_now_choice_{i}(now_choice_{i}_at, {at}, chosen_{i}[{place}])")
    seen = [f"seen_{i}" for i, _ in enumerate(definition.obs_leaves)]
    chosen = [f"chosen_{i}" for i, _ in enumerate(definition.action_leaves)]
    call = policy_call(definition, seen, chosen, "rng", [f"param_{i}" for i, _ in enumerate(params)])
    after.append("set_policy_rngs(policy_rngs_at, begin + lane, rng[0])")
    return ["for lane in range(count):", *indented([*body, call, *after])]


def _keep_lines(definition: Definition, sizes: dict[str, int], types: dict[str, Any]) -> list[str]:
    """Copy what a step has brought to its row; the policy's choice is in row t, and what it led to in row t + 1."""
    later = ["began", *(f"obs_{i}" for i, _ in enumerate(definition.obs_leaves))]
    # Answers have no row for the beginning of the rollout; their addresses are one row before their first.
    rows = {**dict.fromkeys((*BROUGHT, *later), "t + 1")}
    rows.update({f"action_{i}": "t" for i, _ in enumerate(definition.action_leaves)})
    widen = []
    for i, _ in enumerate(definition.action_leaves):
        put = f"set_now_action_{i}(now_action_{i}_at, i, get_now_choice_{i}(now_choice_{i}_at, i))"
        widen += [f"for i in range(count * {sizes[f'now_action_{i}']}):", f"    {put}"]
    return widen + [
        f"keep({name}_to + (({row}) * lanes + begin) * {_bytes(sizes, types, name)}, now_{name}_at, "
        f"count * {_bytes(sizes, types, name)}, streams)"
        for name, row in rows.items()
    ]

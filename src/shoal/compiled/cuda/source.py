"""The source of a kernel for GPUs: each thread steps one env, written out for the leaves and agents of one class.

The counterpart of `shoal.compiled.template`. Memory is what costs time on a GPU, so kernels move few bytes, and move
those of neighbours together: each number of a state has an array of its own, and is in a register during a step; params
that are the same for all envs are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.compiled.definition import Definition, cleared_bytes
from shoal.compiled.narrow import has_columns
from shoal.compiled.policy import STREAM
from shoal.compiled.template import (
    call_lines,
    fill,
    indented,
    loops,
    observe_lines,
    policy_call,
    take_lines,
    uses_chance,
    wide_type,
)
from shoal.spaces.leaves import Leaf

BLOCK = 128  # threads of a block
WARPS = 64  # of a multiprocessor: while some wait for memory others work, and envs with few numbers need few registers
ENDED = -1  # in place of the length of an episode that has ended


@dataclass(frozen=True)
class KernelKind:
    """Names one of the kernels of a class.

    Attributes:
        does: "reset" (begin an episode), "step" or "rollout" (many steps by a policy).
        mode: how episodes follow each other.
        masked: whether only envs with a set mask take part.
        own_params: whether each env has params of its own.
        tracks: whether the returns and lengths of episodes are kept.
        policy_params: how many arrays the policy of a rollout has.
    """

    does: str
    mode: str = "disabled"
    masked: bool = False
    own_params: bool = False
    tracks: bool = False
    policy_params: int = 0


BODY = """
    env = np.uint32(cuda.grid(1))  # unsigned, so that Numba does not check whether an index counts from the end
    live = env < count
    {mask}
    {declare}
    if live:
        {load}
        {act}
        {store}
"""
# The rules of autoreset in it (`begins`, `fresh`, `final`, `end`) have their model in shoal/envs/autoreset.py.
# What both branches of an `if` would store is stored after it: if the threads of a warp take different branches, the
# warp goes through both.
STEP = """
row = {row}
seen_row = {seen_row}
{choose}
{take}
begins = {begins}
{nothing}
if not begins:
    length += 1
    {call}
over = ends or cut
{answer}
{track}
{final}
fresh = {fresh}
if fresh:
    {begin}
{end}
{observe}
"""


def launch_bounds(definition: Definition) -> tuple[int, ...]:
    """Return the threads of a block and, for kernels that mostly wait for memory, how many blocks run at once."""
    small = has_columns(definition) and len(definition.dtype.names or ()) <= 16
    return (BLOCK, WARPS * 32 // BLOCK) if small else (BLOCK,)


def length_type(definition: Definition, mode: str) -> type[np.signedinteger[Any]]:
    """Return the type of an episode's number of steps: small, because each step reads and writes it."""
    limit = definition.max_episode_steps
    return np.int16 if limit is not None and limit < 2**15 - 1 and mode != "disabled" else np.int32


def arguments(definition: Definition, kind: KernelKind) -> list[str]:
    """Return the names of a kernel's arguments, in order."""
    names = ["count", "seeds", "rngs", "lengths"]
    if kind.does != "reset":
        names += ["steps", "reward", "terminated", "truncated"]
        names += [f"action_{i}" for i, _ in enumerate(definition.action_leaves)]
        names += [f"final_{i}" for i, _ in enumerate(definition.obs_leaves)] if kind.mode == "same_step" else []
        names += ["totals", "episode_return", "episode_length"] if kind.tracks else []
    if kind.does == "rollout":
        names += ["began", "policy_seed", *(f"policy_param_{i}" for i in range(kind.policy_params))]
    names += ["mask"] if kind.masked else []
    names += [f"obs_{i}" for i, _ in enumerate(definition.obs_leaves)]
    if not has_columns(definition):
        return [*names, "states", "state_bytes"]
    return [*names, *(f"field_{name}" for name in definition.dtype.names or ())]


def constants(definition: Definition, dtype: np.dtype[Any]) -> dict[str, Any]:
    """Return the values that a kernel's source uses, by name, functions left out; `dtype` is that of a state."""
    return {
        "np": np, "ENDED": np.int32(ENDED), "POLICY_STREAM": np.int64(STREAM),
        "LIMIT": definition.max_episode_steps or 0, "CLEARED": cleared_bytes(dtype, definition.params),
        **{f"T_wide_{i}": wide_type(leaf).type for i, leaf in enumerate(definition.action_leaves)},
    }  # fmt: skip


def kernel_source(definition: Definition, kind: KernelKind) -> str:
    """Write the source of `kernel`.

    It uses `constants`, `cuda`, T_STATE, T_NUMBER, and the functions reset, step, observe, begin_stream, record_at and,
    for a rollout, policy.
    """
    keeps_stream = uses_chance(definition)
    declare = ["rng = cuda.local.array(1, np.uint64)"]
    if has_columns(definition):
        declare += ["local = cuda.local.array(1, T_STATE)"]
        load, store = column_lines(definition, kind.own_params)
    else:
        load, store = ["state = record_at(states, env)"], []
    store += ["lengths[env] = length", *["rngs[env, 0] = rng[0]"] * keeps_stream]
    if kind.does == "reset":
        act = [*begin_lines(definition), *observe_lines(definition, "obs", "env")]
    else:
        load += ["length = lengths[env]", *["rng[0] = rngs[env, 0]"] * keeps_stream]
        act = _step_lines(definition, kind)
    parts = {
        "mask": ["if live:", "    live = mask[env] != 0"] * kind.masked,
        "declare": declare,
        "load": load,
        "act": act,
        "store": store,
    }
    return fill(f"def kernel({', '.join(arguments(definition, kind))}):" + BODY, parts)


def column_lines(definition: Definition, own_params: bool) -> tuple[list[str], list[str]]:
    """Take the numbers of a state into registers, and put them back."""
    names = definition.dtype.names or ()
    own = [name for name in names if own_params or name not in definition.params]
    load = ["state = record_at(local, 0)", *(f"state.{name} = field_{name}[env]" for name in own)]
    load += [f"state.{name} = field_{name}" for name in names if name not in own]
    return load, [f"field_{name}[env] = state.{name}" for name in own if name not in definition.params]


def begin_lines(definition: Definition) -> list[str]:
    """Let an env begin its next episode."""
    clear = ["for i in range(CLEARED):", "    state_bytes[env, i] = 0"]
    if has_columns(definition):
        names = definition.dtype.names or ()
        clear = [f"state.{name} = 0" for name in names if name not in definition.params]
    return [
        *clear, "begin_stream(rng, seeds[env, 0], seeds[env, 1])", "seeds[env, 1] += np.uint64(1)",
        "reset(state, rng)", "length = 0",
    ]  # fmt: skip


def _step_lines(definition: Definition, kind: KernelKind) -> list[str]:
    """Write one step, or the loop over all steps of a rollout."""
    rolls, agents, mode = kind.does == "rollout", definition.num_agents, kind.mode
    of_agents = [f", {k}" for k in range(agents)] if agents > 1 else [""]
    began = [f"began[seen_row{k}] = fresh" for k in of_agents] if rolls else []
    nothing = ["gain = T_NUMBER(0)"]
    if agents > 1:
        nothing = ["rewards = reward[row]", *loops((agents,), "rewards[i0] = 0")]
    numbers = {
        "row": "np.uint64(t) * np.uint64(count) + np.uint64(env)" if rolls else "env",
        "seen_row": "row + np.uint64(count)" if rolls else "row",
        "begins": "length == ENDED" if mode == "next_step" else "False",
        "fresh": {"next_step": "begins", "same_step": "over", "disabled": "False"}[mode],
    }
    source = STEP
    for name, value in numbers.items():
        source = source.replace(f"{{{name}}}", value)
    track = [
        f"totals[env{k}] = reward[row{k}] + (0 if so_far <= 1 else totals[env{k}])\n"
        f"episode_return[row{k}], episode_length[row{k}] = totals[env{k}], so_far"
        for k in of_agents
    ]
    parts = {
        "choose": _choose_lines(definition, kind) if rolls else [],
        # Actions are read early, so that they arrive while other work is done.
        "take": take_lines(definition, "cuda.local.array({shape}, T_wide_{i})", "row"),
        "nothing": ["ends, cut = False, False", *nothing],
        "call": [*call_lines(definition, "gain", "T_NUMBER"), "cut = LIMIT > 0 and length >= LIMIT"],
        "answer": [
            *["reward[row] = gain"] * (agents == 1),
            *(f"terminated[row{k}], truncated[row{k}] = ends, cut" for k in of_agents),
        ],
        "track": ["so_far = 0 if begins else length", *"\n".join(track).splitlines()] * kind.tracks,
        "final": ["if over:", *indented(observe_lines(definition, "final", "row"))] * (mode == "same_step"),
        "begin": begin_lines(definition),
        "end": [*["if over:", "    length = ENDED"] * (mode == "next_step"), *began],
        "observe": observe_lines(definition, "obs", "seen_row"),
    }
    lines = [line for line in fill(source, parts).splitlines() if line]
    if not rolls:
        return lines
    first = [f"began[env{k}] = length == 0" for k in of_agents]
    make = [f"policy_rng = cuda.local.array({agents}, np.uint64)"]
    make += [f"policy_first = policy_seed[0] + np.uint64(env) * np.uint64({agents})"]
    for k in range(agents):
        make.append(f"begin_stream(policy_rng[{k}:{k + 1}], policy_first + np.uint64({k}), POLICY_STREAM)")
    return [*make, *first, "for t in range(steps):", *indented(lines)]


def _choose_lines(definition: Definition, kind: KernelKind) -> list[str]:
    """Let the policy choose for each lane of the env."""
    agents = definition.num_agents
    params = [f"policy_param_{i}" for i in range(kind.policy_params)]

    def lane(leaf: Leaf, agent: int, observed: bool) -> str:
        """Return the index of one lane's part, which is an array even if the space has no shape."""
        if agents > 1:
            return f"row, {agent}" if leaf.shape else f"row, {agent}:{agent + 1}"
        return "row" if leaf.shape or observed else "row : row + 1"

    lines = []
    for agent in range(agents):
        obs = [f"obs_{i}[{lane(leaf, agent, True)}]" for i, leaf in enumerate(definition.obs_leaves)]
        actions = [f"action_{i}[{lane(leaf, agent, False)}]" for i, leaf in enumerate(definition.action_leaves)]
        lines.append(policy_call(definition, obs, actions, f"policy_rng[{agent}:{agent + 1}]", params))
    return lines

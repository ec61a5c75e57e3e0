"""Kernels are compiled as far as a machine without a GPU can: the simulator runs plain Python, and knows no types."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

from compiled.envs import ALL
from repeats import product
from shoal.compiled import library
from shoal.compiled.cuda import registers
from shoal.compiled.cuda.build import build, driver, simulated
from shoal.compiled.cuda.source import KernelKind, arguments, length_type
from shoal.compiled.definition import Definition, define
from shoal.compiled.narrow import narrow
from shoal.compiled.policy import random_policy
from shoal.compiled.template import action_shape, row_shape

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        simulated() or any(importlib.util.find_spec(name) is None for name in ("numba_cuda", "nvidia.cu13")),
        reason='needs the compiler of pip install ".[cuda]", and no simulator',
    ),
]
KINDS = {
    "reset": KernelKind("reset"),
    "step": KernelKind("step", "next_step"),
    "tracking step": KernelKind("step", "same_step", tracks=True),
    "masked step": KernelKind("step", masked=True, own_params=True),
    "rollout": KernelKind("rollout", "same_step", tracks=True, policy_params=2),
}


class Hopper:
    """What a compiler wants to know of a GPU."""

    compute_capability = (9, 0)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    driver()
    from numba.cuda import dispatcher

    monkeypatch.setattr(dispatcher, "get_current_device", lambda: Hopper)


def types_of(definition: Definition, kind: KernelKind, precision: str) -> tuple[Any, ...]:
    """The types of a kernel's arguments, as CudaEnvs gives them."""
    from numba import from_dtype, types

    number = np.float32 if precision == "single" else np.float64
    state = narrow(definition.dtype) if precision == "single" else definition.dtype
    agents = definition.num_agents
    lanes = 1 if agents == 1 else 2

    def array(dtype: Any, dimensions: int) -> Any:
        return types.Array(from_dtype(np.dtype(dtype)), dimensions, "C")

    known = {
        "count": types.uint32, "steps": types.int32, "policy_seed": array(np.uint64, 1), "seeds": array(np.uint64, 2),
        "rngs": array(np.uint64, 2), "lengths": array(length_type(definition, kind.mode), 1),
        "mask": array(np.bool_, 1),
        "states": array(state, 1), "state_bytes": array(np.uint8, 2), "episode_length": array(np.int32, lanes),
        **{name: array(number, lanes) for name in ("reward", "episode_return", "totals")},
        **{name: array(np.bool_, lanes) for name in ("terminated", "truncated", "began")},
    }  # fmt: skip
    for i, leaf in enumerate(definition.obs_leaves):
        known[f"obs_{i}"] = known[f"final_{i}"] = array(leaf.dtype, 1 + len(row_shape(leaf, agents)))
    for i, leaf in enumerate(definition.action_leaves):
        known[f"action_{i}"] = array(leaf.dtype, 1 + len(action_shape(leaf, agents)))
    for i in range(kind.policy_params):
        known[f"policy_param_{i}"] = array(number if definition.action_leaves[0].dtype.kind == "f" else np.int64, 1)
    for name in state.names or ():
        alone = name in definition.params and not kind.own_params
        known[f"field_{name}"] = from_dtype(state[name]) if alone else array(state[name], 1)
    named = arguments
    if kind.does == "rollout" and registers.fits(definition):
        named = registers.arguments
    return tuple(known[name.removeprefix("now_")] for name in named(definition, kind))


def compile_one(definition: Definition, kind: KernelKind, precision: str) -> str:
    policy = random_policy(definition.action_leaves[0])[0] if kind.does == "rollout" else None
    kernel = build(definition, kind, precision, policy)
    types = types_of(definition, kind, precision)
    text, _ = driver().compile(kernel.py_func, types, cc=(9, 0), output="ptx", device=False, abi="numba")
    return str(text)


@product("env kind precision", ALL, KINDS, ["single", "double"])
def test_every_kind_of_kernel(env: Any, kind: str, precision: str) -> None:
    definition, wanted = define(env, {}), KINDS[kind]
    if wanted.does == "rollout" and len(definition.action_leaves) > 1:
        return  # no such policy
    assert ".visible .entry" in compile_one(definition, wanted, precision)


@pytest.mark.parametrize("name", library.ids())
def test_the_library(name: str) -> None:
    assert ".visible .entry" in compile_one(define(library.find(name), {}), KernelKind("step", "same_step"), "single")


def test_single_precision_is_single() -> None:
    """A constant of 64 bits would make everything twice as wide."""
    text = compile_one(define(library.find("CartPole-v1"), {}), KernelKind("step", "next_step"), "single")
    wide = [line for line in text.splitlines() if any(f"{op}.f64" in line for op in ("mul", "add", "fma.rn", "div.rn"))]
    assert len(wide) == 2, wide  # in the reduction of large angles, of sin and of cos

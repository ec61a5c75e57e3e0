"""A dense layer for a block of lanes: the numbers of a unit lie side by side for all lanes, LANES of them.

Four inputs and four outputs are taken together, so that their weights stay in registers while the loop goes over the
lanes, and LLVM makes one multiplication and addition of many lanes of each.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from shoal.compiled.single.intrinsics import Scopes, inlined
from shoal.compiled.single.math32 import ZERO, choose, fma, log, tanh

LANES = 128
SMALLEST = np.float32(1e-30)  # in place of 0 under a logarithm
TANH, RELU = 1, 2  # activations

_scopes = Scopes()
_names: dict[str, Any] = {}
for _name in ("weight", "bias", "source", "target"):
    _names.update(_scopes.accessors(_name, np.dtype(np.float32)))
get_weight, get_bias = _names["get_weight"], _names["get_bias"]
get_source, get_target, set_target = (_names[name] for name in ("get_source", "get_target", "set_target"))
_alone = numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


@inlined
def _tile(source: Any, target: Any, weight: Any, outputs: Any, i: Any, o: Any) -> None:
    at = i * outputs + o
    w00, w01, w02, w03 = (get_weight(weight, at), get_weight(weight, at + 1), get_weight(weight, at + 2),
                          get_weight(weight, at + 3))  # fmt: skip
    at += outputs
    w10, w11, w12, w13 = (get_weight(weight, at), get_weight(weight, at + 1), get_weight(weight, at + 2),
                          get_weight(weight, at + 3))  # fmt: skip
    at += outputs
    w20, w21, w22, w23 = (get_weight(weight, at), get_weight(weight, at + 1), get_weight(weight, at + 2),
                          get_weight(weight, at + 3))  # fmt: skip
    at += outputs
    w30, w31, w32, w33 = (get_weight(weight, at), get_weight(weight, at + 1), get_weight(weight, at + 2),
                          get_weight(weight, at + 3))  # fmt: skip
    for lane in range(LANES):
        place = i * LANES + lane
        x0, x1 = get_source(source, place), get_source(source, place + LANES)
        x2, x3 = get_source(source, place + 2 * LANES), get_source(source, place + 3 * LANES)
        into = o * LANES + lane
        y0, y1 = get_target(target, into), get_target(target, into + LANES)
        y2, y3 = get_target(target, into + 2 * LANES), get_target(target, into + 3 * LANES)
        set_target(target, into, fma(w30, x3, fma(w20, x2, fma(w10, x1, fma(w00, x0, y0)))))
        set_target(target, into + LANES, fma(w31, x3, fma(w21, x2, fma(w11, x1, fma(w01, x0, y1)))))
        set_target(target, into + 2 * LANES, fma(w32, x3, fma(w22, x2, fma(w12, x1, fma(w02, x0, y2)))))
        set_target(target, into + 3 * LANES, fma(w33, x3, fma(w23, x2, fma(w13, x1, fma(w03, x0, y3)))))


@inlined
def _one(source: Any, target: Any, weight: Any, outputs: Any, i: Any, o: Any) -> None:
    w = get_weight(weight, i * outputs + o)
    for lane in range(LANES):
        x, y = get_source(source, i * LANES + lane), get_target(target, o * LANES + lane)
        set_target(target, o * LANES + lane, fma(w, x, y))


@_alone  # type: ignore[untyped-decorator]
def dense(source: Any, target: Any, weight: Any, bias: Any, inputs: Any, outputs: Any) -> None:
    """Compute target = source * weight + bias. All are addresses; weights lie as [inputs, outputs]."""
    for o in range(outputs):
        b = get_bias(bias, o)
        for lane in range(LANES):
            set_target(target, o * LANES + lane, b)
    full_inputs, full_outputs = inputs // 4 * 4, outputs // 4 * 4
    for o in range(0, full_outputs, 4):
        for i in range(0, full_inputs, 4):
            _tile(source, target, weight, outputs, i, o)
        for i in range(full_inputs, inputs):
            for k in range(4):
                _one(source, target, weight, outputs, i, o + k)
    for o in range(full_outputs, outputs):
        for i in range(inputs):
            _one(source, target, weight, outputs, i, o)


@_alone  # type: ignore[untyped-decorator]
def activate(target: Any, outputs: Any, activation: Any) -> None:
    """Put the units of a layer through its activation."""
    if activation == TANH:
        for i in range(outputs * LANES):
            set_target(target, i, tanh(get_target(target, i)))
    elif activation == RELU:
        for i in range(outputs * LANES):
            x = get_target(target, i)
            set_target(target, i, choose(x > ZERO, x, ZERO))


@inlined
def as_gumbel(drawn: Any) -> Any:
    """Make a draw of the standard Gumbel distribution of a uniform one: the largest sum with a logit is a draw."""
    return -log(-log(choose(drawn > ZERO, drawn, SMALLEST)))

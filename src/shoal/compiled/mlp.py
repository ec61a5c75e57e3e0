"""Small neural networks as policies of rollouts: layers of weights, computed for many lanes at once.

In single precision on the CPU the text below (`lines`) is a part of the rollout's own kernel. Elsewhere the network is
an ordinary compiled policy, whose text is `function`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.compiled.definition import Definition
from shoal.compiled.random import uniform
from shoal.errors import BadCall
from shoal.spaces.leaves import Leaf

ACTIVATIONS = ("tanh", "relu")  # in the order of the numbers in single.dense
SMALLEST = 1e-30  # in place of 0 under a logarithm


class Mlp:
    """A network of dense layers that chooses actions, for `Pool.rollout` and `CudaEnvs.rollout`.

    The params of the rollout are its weights [inputs, outputs] and biases [outputs], in turns, from the first layer to
    the last. A Discrete action is drawn by the last outputs as logits; a Box is the last outputs, within its bounds.

    Args:
        activation: of all layers but the last: "tanh" or "relu".
        sample: whether a Discrete action is drawn; if not, it is the one with the largest output.

    Raises:
        ValueError: there is no such activation.
    """

    def __init__(self, activation: str = "tanh", sample: bool = True):
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {', '.join(map(repr, ACTIVATIONS))}, found {activation!r}")
        self.activation, self.sample = activation, bool(sample)
        self.__name__ = f"mlp_{activation}"

    def __hash__(self) -> int:
        return hash((Mlp, self.activation, self.sample))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mlp) and (self.activation, self.sample) == (other.activation, other.sample)

    def widths(self, obs_leaves: Sequence[Leaf], action_leaves: Sequence[Leaf], params: Sequence[Any]) -> list[int]:
        """Return how many numbers each layer has, from the observation to the last.

        Args:
            obs_leaves, action_leaves: the parts of an observation and of an action.
            params: weights and biases in turns.

        Raises:
            BadCall: the spaces or the params are not those of such a network.
        """
        if len(obs_leaves) != 1 or len(action_leaves) != 1:
            raise BadCall("rollout: an MLP is for observations and actions of one part; write a compiled.policy")
        found, outputs = [int(np.prod(obs_leaves[0].shape))], self.outputs(action_leaves[0])
        shapes = [tuple(param.shape) for param in params]
        for i in range(0, len(shapes) - 1, 2):
            if len(shapes[i]) != 2 or shapes[i][0] != found[-1] or shapes[i + 1] != (shapes[i][1],):
                break
            found.append(shapes[i][1])
        else:
            if len(shapes) >= 2 and len(shapes) % 2 == 0 and found[-1] == outputs:
                return found
        raise BadCall(
            f"rollout: the params of an MLP are weights [inputs, outputs] and biases [outputs] in turns, from "
            f"{int(np.prod(obs_leaves[0].shape))} numbers of an observation to {outputs} outputs; found shapes {shapes}"
        )

    def outputs(self, leaf: Leaf) -> int:
        """Return how many outputs an action has."""
        return self._choices(leaf) or int(np.prod(leaf.shape))

    def _choices(self, leaf: Leaf) -> int:
        """Return how many actions there are to choose from; 0 for a Box."""
        if leaf.dtype.kind == "f":
            return 0
        if leaf.shape or leaf.low is None or leaf.high is None:
            raise BadCall("rollout: an MLP is for Discrete actions, or for a Box of floats; write a compiled.policy")
        return int(leaf.high) - int(leaf.low) + 1

    # ---- as an ordinary policy ---------------------------------------------------------------------------------

    def function(
        self, obs_leaves: Sequence[Leaf], action_leaves: Sequence[Leaf], params: Sequence[Any], on_gpu: Any = None
    ) -> Any:
        """Return a function (obs, action, rng, *params) that chooses for one lane.

        Args:
            obs_leaves, action_leaves: the parts of an observation and of an action.
            params: weights and biases in turns.
            on_gpu: numba.cuda, for a function that runs there.
        """
        widths, leaf = self.widths(obs_leaves, action_leaves, params), action_leaves[0]
        low, high = (tuple(np.asarray(bound).ravel().tolist()) for bound in (leaf.low, leaf.high))
        shape = obs_leaves[0].shape, leaf.shape if leaf.dtype.kind == "f" else None
        return _function(self.activation, self.sample, tuple(widths), shape, low, high, on_gpu)

    # ---- as a part of a rollout's kernel -----------------------------------------------------------------------

    def lines(self, definition: Definition, params: Sequence[Any]) -> list[str]:
        """Write the choice of a block of lanes; the numbers of a unit lie side by side for all of them.

        Args:
            definition: of the env's class.
            params: weights and biases in turns.
        """
        widths = self.widths(definition.obs_leaves, definition.action_leaves, params)
        size = widths[0]
        lines = ["for lane in range(count):"]
        for i in range(size):
            value = f"np.float32(get_now_obs_0(now_obs_0_at, lane * {size} + {i}))"
            lines.append(f"    set_units_0(units_0_at, {i} * LANES + lane, {value})")
        for layer, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            units, after = f"units_{layer % 2}_at", f"units_{(layer + 1) % 2}_at"
            lines.append(
                f"dense({units}, {after}, param_{2 * layer}_at, param_{2 * layer + 1}_at, {inputs}, {outputs})"
            )
            if layer < len(widths) - 2:
                lines.append(f"activate({after}, {outputs}, {1 + ACTIVATIONS.index(self.activation)})")
        return [*lines, *self._choose_lines(definition.action_leaves[0], f"units_{(len(widths) - 1) % 2}")]

    def _choose_lines(self, leaf: Leaf, units: str) -> list[str]:
        choices = self._choices(leaf)
        lines = []
        if not choices:
            bounds: tuple[Any, Any] = (leaf.low, leaf.high)
            lows, highs = (np.broadcast_to(bound, leaf.shape).ravel() for bound in bounds)
            for k, (low, high) in enumerate(zip(lows, highs, strict=True)):
                value = f"get_{units}({units}_at, {k} * LANES + lane)"
                lines.append(f"value = min(max({value}, np.float32({float(low)!r})), np.float32({float(high)!r}))")
                lines.append(f"set_now_choice_0(now_choice_0_at, lane * {len(lows)} + {k}, value)")
            return ["inf = np.inf", "for lane in range(count):", *("    " + one for one in lines)]
        if self.sample:
            lines += ["rng = local_rng()", "rng[0] = get_policy_rngs(policy_rngs_at, begin + lane)"]
        lines += ["best, most = np.int32(0), np.float32(-np.inf)"]
        for k in range(choices):
            value = f"get_{units}({units}_at, {k} * LANES + lane)"
            lines.append(f"value = {value}" + " + as_gumbel(uniform(rng, np.float32(0), np.float32(1)))" * self.sample)
            lines.append(f"best, most = (np.int32({k}), value) if value > most else (best, most)")
        lines.append(f"set_now_choice_0(now_choice_0_at, lane, np.int64(best) + {int(leaf.low)})")  # type: ignore[arg-type]
        lines += ["set_policy_rngs(policy_rngs_at, begin + lane, rng[0])"] * self.sample
        return ["for lane in range(count):", *("    " + one for one in lines)]


@functools.lru_cache(maxsize=64)
def _function(
    activation: str,
    sample: bool,
    widths: tuple[int, ...],
    shapes: Any,
    low: tuple[Any, ...],
    high: tuple[Any, ...],
    on_gpu: Any,
) -> Any:
    """Write a network for one lane; `shapes` are those of the observation and of a Box, None for a Discrete action."""
    seen, box = shapes
    room = "empty({})" if on_gpu is None else "cuda.local.array({}, float32)"
    names = [f"param_{i}" for i in range(2 * len(widths) - 2)]
    lines = [f"def mlp(obs, action, rng, {', '.join(names)}):", f"    units = {room.format(widths[0])}"]
    for i, place in enumerate(np.ndindex(*(seen or (1,)))):
        lines.append(f"    units[{i}] = obs[{', '.join(map(str, place))}]")
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
        value = "math.tanh(total)" if activation == "tanh" else "max(total, zero)"
        lines += [
            f"    after = {room.format(outputs)}",
            f"    for o in range({outputs}):",
            f"        total = one * param_{2 * layer + 1}[o]",
            f"        for i in range({inputs}):",
            f"            total = total + units[i] * param_{2 * layer}[i, o]",
            f"        after[o] = {'total' if layer == len(widths) - 2 else value}",
            "    units = after",
        ]
    if box is not None:
        for k, place in enumerate(np.ndindex(*(box or (1,)))):
            index = ", ".join(map(str, place))
            lines.append(f"    action[{index}] = min(max(units[{k}], {low[k]!r}), {high[k]!r})")
    else:
        noise = " - math.log(-math.log(max(uniform(rng), smallest)))" * sample
        lines += [
            "    best, most = 0, -inf",
            f"    for o in range({widths[-1]}):",
            f"        value = units[o]{noise}",
            "        if value > most:",
            "            best, most = o, value",
            f"    action[0] = best + {low[0]}",
        ]
    values: dict[str, Any] = {
        "math": math, "uniform": uniform, "inf": math.inf, "zero": 0.0, "one": 1.0, "smallest": SMALLEST,
        "empty": np.empty, "cuda": on_gpu, "float32": np.float32,
    }  # fmt: skip
    exec("\n".join(lines), values)
    return values["mlp"]

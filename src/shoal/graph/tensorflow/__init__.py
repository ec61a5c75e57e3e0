"""Envs inside a TensorFlow graph: variables that hold their last answer, and ops that step and reset them.

    envs = InGraphBatchEnv(shoal.Pool("CartPole-v1", 64, autoreset="disabled"))

    @function
    def collect():
        envs.reset()
        for _ in tf.range(100):
            envs.step(policy(envs.observ))

A step is one callback into Python (`tf.numpy_function`), so it works in `tf.function`, `tf.while_loop` and `tf.cond`,
and eagerly, but not in what XLA compiles (`jit_compile=True`). Steps are carried out in the order in which they are
written, and none is left out, whether their results are used or not. Gradients do not flow through them.

The package may import what `shoal.graph` may, and TensorFlow. Read `envs` first.
"""

from __future__ import annotations

from shoal.support.optional_dependencies import require

require("tensorflow", "envs inside of a TensorFlow graph need TensorFlow", "tensorflow")

from shoal.graph.host import own_errors  # noqa: E402
from shoal.graph.tensorflow.envs import InGraphBatchEnv, InGraphEnv, function  # noqa: E402
from shoal.graph.tensorflow.simulation import Algorithm, Progress, SimulationSummary, simulate  # noqa: E402

__all__ = [
    "Algorithm", "InGraphBatchEnv", "InGraphEnv", "Progress", "SimulationSummary", "function", "own_errors", "simulate",
]  # fmt: skip

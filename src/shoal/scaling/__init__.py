"""Predicts how fast a pool with envs on other machines will be: bounds in closed form, a simulation, and advice.

It computes and runs no envs, so it may import `support` and `observe.words` only. Read `model` first: it describes the
way of a step through driver, network and actors. `simulation` simulates it, and `advice` finds the best way to use a
cluster.
"""

from shoal.scaling.advice import Advice, Cluster, advise, limits
from shoal.scaling.model import Costs, Setup, StepTime, bounds
from shoal.scaling.simulation import Prediction, simulate

__all__ = [
    "Advice", "Cluster", "Costs", "Prediction", "Setup", "StepTime", "advise", "bounds", "limits", "simulate",
]  # fmt: skip

"""How fast a pool whose envs live on other machines will be: bounds in closed form, a simulation, and advice."""

from shoal.scaling.advice import Advice, Cluster, advise, limits
from shoal.scaling.model import Costs, Setup, StepTime, bounds
from shoal.scaling.simulation import Prediction, simulate

__all__ = [
    "Advice", "Cluster", "Costs", "Prediction", "Setup", "StepTime", "advise", "bounds", "limits", "simulate",
]  # fmt: skip

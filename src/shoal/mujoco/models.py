"""The models of some lanes, for domain randomization: each lane has a copy of the model that may differ."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.mujoco.simulations import Simulations

Array = npt.NDArray[Any]


PREFIX, RECOMPUTED = "model.", "model_recomputed"  # in the names of saved arrays


class ModelChanges:
    """Which fields of models have been changed, so that snapshots have their values."""

    def __init__(self) -> None:
        self.fields: dict[str, None] = {}
        self.recomputed = False

    def save(self, sims: Simulations, lane: int) -> dict[str, Array]:
        """The values of one lane."""
        found = {f"{PREFIX}{field}": np.array(_read(sims.models[lane], field)) for field in self.fields}
        return {**found, RECOMPUTED: np.array(self.recomputed)}

    def load(self, sims: Simulations, lane: int, saved: dict[str, Array]) -> None:
        """The counterpart of `save`. Raises ValueError for what is no field of the model."""
        fields = {name[len(PREFIX) :]: value for name, value in saved.items() if name.startswith(PREFIX)}
        models = LaneModels(sims, np.array([lane]), self)
        for field, value in fields.items():
            if not re.fullmatch(r"(opt\.)?[a-z][a-z0-9_]*", field):
                raise ValueError(f"{field!r} is no field of a model")
            if np.shape(_read(sims.template, field)) != value.shape:
                raise ValueError(f"{field!r} of the model has another size")
            models.set(field, value[None])
        if saved.get(RECOMPUTED):
            models.recompute()


class LaneModels:
    """The models of the lanes in which episodes begin. `count` says how many these are.

    Args:
        sims: all simulations; each has a model of its own.
        rows: the lanes.
        changed: where it is noted what was changed.
    """

    def __init__(self, sims: Simulations, rows: Array, changed: ModelChanges):
        self._sims, self.rows, self.count, self._changed = sims, rows, len(rows), changed

    def get(self, field: str) -> Array:
        """The values of a field of `MjModel`, with a row for each lane; of `opt` as in "opt.gravity"."""
        return np.stack([np.array(_read(self._sims.models[row], field)) for row in self.rows.tolist()])

    def default(self, field: str) -> Array:
        """The value of a field in the model that all lanes began with."""
        return np.array(_read(self._sims.template, field))

    def set(self, field: str, values: Any) -> None:
        """Give each lane its own values of a field: an array with a row for each lane, or what NumPy makes one of."""
        shape = (self.count, *np.shape(_read(self._sims.template, field)))
        self._changed.fields[field] = None
        for row, value in zip(self.rows.tolist(), np.broadcast_to(values, shape), strict=True):
            _write(self._sims.models[row], field, value)

    def scale(self, field: str, factors: Any) -> None:
        """Set a field to its default times a factor for each lane, an array of shape [lanes] or one that fits it."""
        default, factors = self.default(field), np.asarray(factors)
        if factors.ndim == 1:
            factors = factors.reshape(-1, *[1] * default.ndim)
        self.set(field, default * factors)

    def recompute(self) -> None:
        """Compute again what MuJoCo derives from masses, inertias and lengths, after these were changed."""
        self._changed.recomputed = True
        self._sims.run(self._sims.program(("call", "mj_setConst", 1)), self.rows)


def _read(model: Any, field: str) -> Any:
    for name in field.split("."):
        model = getattr(model, name)
    return model


def _write(model: Any, field: str, value: Any) -> None:
    owner, _, name = field.rpartition(".")
    owner = _read(model, owner) if owner else model
    old = getattr(owner, name)
    if isinstance(old, np.ndarray):
        old[...] = value
    else:
        setattr(owner, name, type(old)(value))

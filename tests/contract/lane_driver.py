"""Drives a group of lanes as the engine does, without one."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.envs.pettingzoo import ParallelLanes
from shoal.group import Answers
from shoal.spaces.leaves import flatten

GARBAGE = 77  # what lies in the memory that lanes are written to


class Driver:
    """Drives the lanes as the engine does: fields come as zeros, observations as anything."""

    def __init__(self, env: Any, mode: str):
        self.lanes = ParallelLanes(env)
        self.lanes.use(mode)
        self.mode, self.rows = mode, np.arange(self.lanes.num_lanes)
        self.leaves = flatten(self.lanes.single_observation_space)

    def _fresh(self) -> Answers:
        count = self.lanes.num_lanes

        def arrays() -> list[Any]:
            return [np.full((count, *leaf.shape), GARBAGE, leaf.dtype) for leaf in self.leaves]

        no = [np.zeros(count, np.bool_) for _ in range(4)]
        finals = arrays() if self.mode == "same_step" else []
        return Answers(arrays(), np.zeros(count), no[0], no[1], no[2], np.ones(count, np.bool_), finals, no[3])

    def reset(self, seed: int | None = None, options: Any = None) -> Answers:
        self.out = self._fresh()
        seeds = [None if seed is None else seed + lane for lane in range(self.lanes.num_lanes)]
        self.infos = self.lanes.reset(self.rows, seeds, options, self.out)
        return self.out

    def step(self, actions: Any) -> Answers:
        self.out = self._fresh()
        self.infos = self.lanes.step(self.rows, actions, self.out)
        return self.out

    def obs(self, lane: int) -> Any:
        return self.lanes.observations.take(lane, [array[lane] for array in self.out.obs])

    def final(self, lane: int) -> Any:
        return self.lanes.observations.take(lane, [array[lane] for array in self.out.final])

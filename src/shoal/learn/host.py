"""Experience from any pool: groups of lanes in flight, so that workers step while the policy computes.

With `overlap` the next rollout is made while the learner learns from the last one: by the policy as it was before that.
The learner calls `poll` between minibatches. The noise of a whole rollout is drawn at its beginning, so what happens
does not depend on which group is ready first.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shoal.batch import Batch
from shoal.errors import StepTimeout
from shoal.learn.ppo import Experience, Policy
from shoal.memory.messages import RESTART_INFO


class Gathered(NamedTuple):
    """A rollout, and the episodes that ended in it.

    Attributes:
        episodes, return_sum, length_sum: of these episodes.
    """

    experience: Experience
    episodes: int
    return_sum: float
    length_sum: float


class PoolWay:
    """What all ways that have a pool share."""

    name, overlap = "", False
    pool: Any

    def close(self) -> None:
        """Close the envs."""
        self.pool.close()

    def poll(self) -> None:
        """Take answers that are there; called between minibatches."""

    def settle(self) -> None:
        """Bring the envs to rest."""

    def snapshot(self, path: Path) -> None:
        """Write the state of the envs to a file."""
        self.pool.snapshot(path)

    def restore(self, path: Path, trusted: bool) -> None:
        """Put the state of the envs back."""
        self.pool.restore(path, trusted=trusted)


class HostWay(PoolWay):
    """Makes experience with a pool.

    Args:
        groups: into how many groups of neighbouring lanes the pool's batches are cut.
        overlap: whether rollouts are made while the learner learns.
        device: where the policy is.
    """

    name = "host"

    def __init__(
        self, pool: Any, policy: Policy, seed: int, groups: int = 1, overlap: bool = False, device: Any = "cpu"
    ):
        self.pool, self.policy, self.overlap, self.device = pool, policy, overlap, torch.device(device)
        self.lanes, self.steps = int(pool.num_envs), policy.settings.steps
        self.generator = torch.Generator().manual_seed(seed)
        self._acting = copy.deepcopy(policy) if overlap else policy
        size = self.lanes // groups
        self._groups = [_Group(slice(size * i, size * (i + 1))) for i in range(groups)]
        self._ids = [np.arange(group.lanes.start, group.lanes.stop) for group in self._groups] if groups > 1 else [None]
        self._size = size
        self._looks_at_infos = pool.options.replaces_envs
        self._finals = pool.autoreset == "same_step"
        self._bounds = self.bounds_of(policy)
        pin = self.device.type == "cuda"
        self._buffers = [Experience.empty(policy, self.steps, self.lanes, pin=pin) for _ in range(1 + overlap)]
        self._views = [_numpy(buffer) for buffer in self._buffers]
        self._at = 0
        self._memory = policy.first_memory(self.lanes, self.device)
        self._sums = [0.0, 0.0, 0.0]
        self._running = False
        self._kept: Gathered | None = None
        self._last: tuple[Any, Any] | None = None  # observations and beginnings that the last rollout has ended with

    # ---- a rollout ---------------------------------------------------------------------------------------------

    def collect(self) -> Gathered:
        """Return the next rollout; with `overlap`, the one after it is begun."""
        kept, self._kept = self._kept, None
        if kept is None:
            if not self._running:
                self._begin()
            kept = self._finish()
        if self.overlap:
            self._begin()
        return kept

    def _begin(self) -> None:
        """Begin a rollout by the policy as it is now."""
        if self._last is None:
            first = self.pool.last_answer()
            self._last = (self._rows(first.obs), np.array(first.began))
        if self.overlap:
            self._at = 1 - self._at
            with torch.no_grad():
                for mine, theirs in zip(
                    self._acting.state_dict().values(), self.policy.state_dict().values(), strict=True
                ):
                    mine.copy_(theirs)
        seen, views = self._buffers[self._at], self._views[self._at]
        views["obs"][0], views["began"][0] = self._last
        seen.memory = self._memory
        seen.final_at.clear()
        seen.final_obs.clear()
        self._noise = self._acting.draw((self.steps, self.lanes), self.generator).to(self.device)
        self._began = torch.zeros(self.lanes, dtype=torch.bool, device=self.device)
        self._sums = [0.0, 0.0, 0.0]
        self._memories = self._memory.clone()
        self._running = True
        for number, group in enumerate(self._groups):
            group.t = 0
            self._act(number)

    def poll(self) -> None:
        """Take the answers that are there, without waiting: the learner calls this between minibatches."""
        while self._running and any(group.t < self.steps for group in self._groups):
            try:
                batch = self.pool.recv(timeout=0.0)
            except StepTimeout:
                return
            self._take(batch)

    def _finish(self) -> Gathered:
        while any(group.t < self.steps for group in self._groups):
            self._take(self.pool.recv())
        self._running = False
        seen, views = self._buffers[self._at], self._views[self._at]
        self._last = (views["obs"][-1], views["began"][-1])
        self._memory = self._memories
        moved = seen.to(self.device) if self.device.type != "cpu" else seen
        return Gathered(moved, int(self._sums[0]), self._sums[1], self._sums[2])

    @torch.no_grad()
    def _act(self, number: int) -> None:
        """Choose a group's actions, and send them."""
        group, seen = self._groups[number], self._buffers[self._at]
        t, lanes = group.t, group.lanes
        rows, began = seen.obs[t, lanes], seen.began[t, lanes]
        if self.device.type != "cpu":
            rows, began = rows.to(self.device, non_blocking=True), began.to(self.device, non_blocking=True)
        chosen, memory = self._acting.act(rows, self._memories[:, lanes], began, self._noise[t, lanes])
        if memory.numel():
            self._memories[:, lanes] = memory
        seen.actions[t, lanes] = chosen
        self.pool.send(self.as_actions(self._views[self._at]["actions"][t, lanes]), self._ids[number])

    @staticmethod
    def bounds_of(policy: Policy) -> tuple[Any, Any] | None:
        """Return the bounds of rows of actions; None where all are choices, which are inside of theirs."""
        space: Any = policy.actions.flat_space
        return (space.low, space.high) if policy.floats else None

    def as_actions(self, rows: Any) -> Any:
        """Return rows as the envs take them: whole numbers as they are, others inside of their bounds."""
        if self._bounds is not None:
            rows = np.clip(rows, *self._bounds)
        return self.policy.actions.unflatten(rows, check=False)

    def _rows(self, obs: Any) -> Any:
        return self.policy.encoder.emulation.flatten(obs)

    def _take(self, batch: Batch) -> None:
        """Write the answers of a group into the rollout, and send its next actions."""
        number = int(batch.env_id[0]) // self._size
        group, views = self._groups[number], self._views[self._at]
        t, lanes = group.t, group.lanes
        views["obs"][t + 1, lanes] = self._rows(batch.obs)
        done = batch.terminated | batch.truncated
        views["reward"][t, lanes], views["began"][t + 1, lanes] = batch.reward, batch.began
        views["terminated"][t, lanes], views["truncated"][t, lanes] = batch.terminated, batch.truncated
        valid = views["valid"][t, lanes]
        np.logical_and(batch.mask, ~batch.began | done, out=valid)
        if self._looks_at_infos:
            restarted = [lane for lane, info in batch.info.items() if RESTART_INFO in info]
            valid[np.array(restarted, np.int64) - lanes.start] = False
        if done.any():
            ended = done & valid
            self._sums[0] += int(ended.sum())
            self._sums[1] += float(batch.episode_return[ended].sum())
            self._sums[2] += float(batch.episode_length[ended].sum())
            if self._finals:
                self._keep_finals(batch, t)
        group.t += 1
        if group.t < self.steps:
            self._act(number)

    def _keep_finals(self, batch: Batch, t: int) -> None:
        seen = self._buffers[self._at]
        cut = set(batch.env_id[batch.truncated & ~batch.terminated].tolist())
        for lane, final in batch.final_obs.items():
            if lane in cut:
                seen.final_at.append(t * self.lanes + lane)
                seen.final_obs.append(self._rows(final))

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Finish the rollout that is under way, so that the pool is idle; `collect` returns it later."""
        if self._running:
            self._kept = self._finish()
            self._kept = self._kept._replace(experience=copy.deepcopy(self._kept.experience))

    def state(self) -> dict[str, Any]:
        """Return all that is not in the pool's snapshot."""
        kept = None if self._kept is None else (vars(self._kept.experience), *self._kept[1:])
        return {"generator": self.generator.get_state(), "memory": self._memory, "kept": kept}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state; the pool must have been restored before."""
        self.generator.set_state(state["generator"].cpu())
        self._memory = state["memory"].to(self.device)
        if state["kept"] is not None:
            fields, *sums = state["kept"]
            self._kept = Gathered(Experience(**fields), *sums)
        self._last = None


class _Group:
    """Neighbouring lanes that are asked and answered together; `t` is the step that they are at."""

    def __init__(self, lanes: slice):
        self.lanes, self.t = lanes, 0


def _numpy(seen: Experience) -> dict[str, Any]:
    """Return the same memory as arrays of numpy, which answers are written to."""
    return {name: value.numpy() for name, value in vars(seen).items() if torch.is_tensor(value) and name != "memory"}

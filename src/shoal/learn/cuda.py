"""Experience and learning on a GPU: rollout, advantages and all updates of a turn are one CUDA graph over CudaEnvs.

The host launches the graph and reads a few numbers for the log. What is captured is the algorithm of `ppo`, as it is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.compiled.cuda import CudaEnvs
from shoal.compiled.cuda.build import simulated
from shoal.errors import BadCall
from shoal.learn.ppo import LOSSES, Experience, Learner, Policy
from shoal.learn.ways import Built, Setup, Turn, settings_for

WARM_UPS = 2  # turns that are made before the capture: libraries set themselves up in their first calls


class CudaWay:
    """Envs on a GPU, and the rollout over them.

    Every operation of `roll` goes to the current stream, and none waits for the host, so it can be captured.
    """

    name, overlap = "cuda", False

    def __init__(self, envs: Any, policy: Policy, seed: int, device: Any = "cuda"):
        self.envs, self.policy, self.seed = envs, policy, seed
        self.lanes, self.steps = int(envs.num_lanes), policy.settings.steps
        envs.reset(seed=seed)
        emulation = policy.encoder.emulation
        if emulation.leaves[0].path:
            raise BadCall("envs on a GPU are trained with observations of one part: use backend='compiled' for others")
        self._obs = _tensor(envs.obs).reshape(self.lanes, -1)
        names = ("reward", "terminated", "truncated", "episode_return", "episode_length")
        self._answers = {name: _tensor(getattr(envs, name)) for name in names}
        self.experience = Experience.empty(policy, self.steps, self.lanes, device)
        flat: Any = {"device": device}
        if policy.shared:  # what the rollout computes anyway need not be computed once more
            self.experience.outputs = torch.zeros(self.steps, self.lanes, policy.outputs, **flat)
            self.experience.values = torch.zeros(self.steps + 1, self.lanes, **flat)
        self._returns = torch.zeros(self.steps, self.lanes, **flat)
        self._lengths = torch.zeros(self.steps, self.lanes, dtype=torch.int32, **flat)
        self._ended = torch.zeros(self.lanes, dtype=torch.bool, **flat)
        self._bounds: tuple[Tensor, Tensor] | None = None
        if policy.floats:
            space: Any = policy.actions.flat_space
            self._bounds = (torch.as_tensor(space.low, **flat), torch.as_tensor(space.high, **flat))
        self.tally = torch.zeros(3, dtype=torch.float64, **flat)  # episodes, and sums of their returns and lengths
        self._first = policy.first_memory(self.lanes, device)

    @torch.no_grad()
    def roll(self) -> None:
        """Make a rollout."""
        seen, policy, answers = self.experience, self.policy, self._answers
        seen.obs[0].copy_(self._obs)
        seen.began[0].copy_(seen.began[-1])
        seen.memory.copy_(self._first)
        noise = policy.draw((self.steps, self.lanes), device=self._obs.device)
        memory, ended = seen.memory, self._ended
        flags = [answers["terminated"], answers["truncated"]]
        for t in range(self.steps):
            outputs, values, memory = policy.look(seen.obs[t], memory, seen.began[t])
            if seen.outputs is not None and seen.values is not None and values is not None:
                seen.outputs[t].copy_(outputs)
                seen.values[t].copy_(values)
            rows = policy.choose(outputs, noise[t])
            seen.actions[t].copy_(rows)
            self.envs.step(self._as_actions(rows))
            seen.began[t + 1].copy_(ended)  # a step after an episode's end only begins the next one
            torch._foreach_copy_(
                [seen.obs[t + 1], seen.reward[t], self._returns[t]],
                [self._obs, answers["reward"], answers["episode_return"]],
            ) if self._obs.dtype == torch.float32 else self._copy(t)
            torch._foreach_copy_([seen.terminated[t], seen.truncated[t]], flags)
            self._lengths[t].copy_(answers["episode_length"])
            torch.logical_or(*flags, out=ended)
        self._first.copy_(memory)
        if seen.values is not None:
            seen.values[-1].copy_(policy.look(seen.obs[-1], memory, seen.began[-1])[1])  # type: ignore[arg-type]
        torch.logical_not(seen.began[1:], out=seen.valid)
        done = (seen.terminated | seen.truncated).double()
        self.tally.copy_(torch.stack([done.sum(), (self._returns * done).sum(), (self._lengths * done).sum()]))

    def _copy(self, t: int) -> None:
        seen = self.experience
        seen.obs[t + 1].copy_(self._obs)
        seen.reward[t].copy_(self._answers["reward"])
        self._returns[t].copy_(self._answers["episode_return"])

    def _as_actions(self, rows: Tensor) -> Tensor:
        """Return rows as the envs take them."""
        if self._bounds is not None:
            rows = torch.clamp(rows, *self._bounds)
        (part,) = self.policy.actions.parts
        low = np.ravel(self.policy.actions.leaves[0].low)  # type: ignore[arg-type]
        if part.choices and low.any():
            rows = rows + int(low[0])
        return rows.reshape(self.lanes, *self.policy.actions.leaves[0].shape)

    # ---- checkpoints: not bit for bit, as sums on a GPU have no fixed order ------------------------------------

    def poll(self) -> None:
        """Do nothing: all is in one stream."""

    settle = poll

    def snapshot(self, path: Path) -> None:
        """Write the state of the envs to a file."""
        with path.open("wb") as file:
            np.savez(file, **self.envs.save())

    def restore(self, path: Path, trusted: bool) -> None:
        """Put the state of the envs back."""
        with np.load(path, allow_pickle=False) as saved:
            self.envs.load(dict(saved))

    def state(self) -> dict[str, Any]:
        """Return what the next rollout begins with."""
        return {
            "obs": self._obs.clone(),
            "ended": self._ended,
            "began": self.experience.began[-1],
            "memory": self._first,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._obs.copy_(state["obs"])
        self._ended.copy_(state["ended"])
        self.experience.began[-1].copy_(state["began"])
        self._first.copy_(state["memory"])

    def begin_anew(self) -> None:
        """Forget all that was rolled."""
        self.envs.reset(seed=self.seed)
        self._ended.zero_()
        self.experience.began.zero_()
        self._first.zero_()

    def close(self) -> None:
        """Free the envs' memory."""
        self.envs.close()


def _tensor(array: Any) -> Tensor:
    """Return an array of the envs as a tensor of the same memory; that of a simulated GPU is the host's."""
    return torch.from_numpy(array.array._ary) if simulated() else torch.utils.dlpack.from_dlpack(array)


@dataclass
class CudaBuilt(Built):
    """A turn is one launch."""

    graph: Any = None

    def body(self) -> None:
        """Do all that a turn does on the GPU."""
        way, learner = self.way, self.learner
        way.roll()
        learner.scale_rewards(way.experience)
        targets = learner.targets(way.experience)
        learner.sums.zero_()
        for _ in range(learner.settings.epochs):
            # Minibatches are of whole lanes. A sort, because a captured graph has no randperm.
            lanes = torch.rand(way.lanes, device=learner.device).argsort()
            for batch in learner.minibatches(targets, lanes):
                learner.step(batch)
        learner.observe(way.experience)

    def capture(self) -> None:
        """Capture a turn, and begin anew."""
        before = {name: value.clone() for name, value in self._state().items()}
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self.body()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.body()
        with torch.no_grad():
            for name, value in self._state().items():
                value.copy_(before[name])
            for state in self.learner.optimizer.state.values():
                for value in state.values():
                    value.zero_()
        self.way.begin_anew()
        torch.cuda.manual_seed(self.way.seed)
        torch.cuda.synchronize()

    def _state(self) -> dict[str, Tensor]:
        """Return all tensors that learning changes, but those of the optimizer."""
        learner = self.learner
        stats = {f"returns.{name}": value for name, value in learner.return_stats.state_dict().items()}
        return {**self.policy.state_dict(), **stats, "running": learner.running}

    def turn(self) -> Turn:
        """Make a rollout and learn from it, by one launch."""
        began = time.perf_counter()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.body()
        sums = torch.cat([self.learner.sums.double(), self.way.tally]).tolist()
        count = max(sums[len(LOSSES)], 1.0)
        losses = {name: total / count for name, total in zip(LOSSES, sums, strict=False)}
        episodes, return_sum, length_sum = sums[-3:]
        return Turn(int(episodes), return_sum, length_sum, losses, 0.0, time.perf_counter() - began)


def build_cuda(setup: Setup, env_class: Any) -> CudaBuilt:
    """Build envs on a GPU, and capture the training's turn."""
    torch.manual_seed(setup.seed)
    options = dict(setup.options or {})
    envs = CudaEnvs(env_class, setup.num_envs, seed=setup.seed, track_episodes=True, **options)
    device = torch.device("cpu" if simulated() else "cuda")
    torch.set_float32_matmul_precision("high")
    settings = settings_for(envs.single_action_space, setup.hyperparameters, envs.num_lanes)
    policy = Policy(envs.single_observation_space, envs.single_action_space, settings).to(device)
    learner = Learner(policy, envs.num_lanes, setup.seed)
    way = CudaWay(envs, policy, setup.seed, device)
    reason = "cuda: rollout, advantages and updates are one CUDA graph"
    built = CudaBuilt(way, policy, learner, 1, reason)
    if simulated():
        built.reason = "cuda: simulated, nothing is captured"
    else:
        built.capture()
    return built

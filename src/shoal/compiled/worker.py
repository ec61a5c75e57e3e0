"""Steps compiled envs: one kernel answers all lanes.

Between a request and its answer no Python runs, unless an env has failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal import native
from shoal.compiled.plain import PlainEnv
from shoal.compiled.random import begin_stream
from shoal.compiled.source_parts import wide_type
from shoal.compiled.task import FRAME_FIELDS, LANE_FIELDS, Task
from shoal.memory.messages import STATUS_ERROR
from shoal.memory.packed_errors import PackedError, pack_error
from shoal.memory.slab import Slab
from shoal.spaces.leaves import assemble
from shoal.worker.base import EnvBlock, Stepper, WorkerChannel

Array = npt.NDArray[Any]
STEPPING, RESETTING, OBSERVING, UNKNOWN = 1, 2, 3, 4  # phases, as kernels number them
DURING = {STEPPING: "step", RESETTING: "reset", OBSERVING: "observe", UNKNOWN: "compiled code"}


class KernelStepper(Stepper):
    """Runs the compiled envs of a pool (`compiled.pool_envs`), all in one kernel.

    Attributes:
        kernel: the core's Kernel, for a full batch in one call; None if Python must look at each answer.
        task: the kernel's table of numbers and addresses.
        policies: the addresses of policies that were compiled for rollouts.
    """

    def __init__(self, block: EnvBlock, channel: WorkerChannel):
        super().__init__(block, channel)
        (self._envs,), slab = self.envs, block.slab
        self._definition, self._agents = self._envs.definition, self._envs.group_size
        self._lane = {name: slab.array("slot" if name == "slots" else name) for name in LANE_FIELDS}
        self._failed = np.zeros(self._envs.num_envs, np.uint8)
        self._rolling = False
        self.policies: dict[Any, int] = {}
        self.task = self._fill_task(slab)
        self._core = native.Kernel(
            self._envs.function, self.task.table, self._envs.num_envs, self._agents, self._envs.threads,
            self._stats, self._failed, self._report,
        )  # fmt: skip
        self.run = self._run_checked if self._check_nan else self._core.run
        # In debug mode actions must lie in the slab, because a step that has failed is run again with them.
        self.kernel = None if self._check_nan or self._envs.debug else self._core

    def _fill_task(self, slab: Slab) -> Task:
        definition, envs = self._definition, self._envs
        task = Task(max(len(self._leaves), len(definition.action_leaves)))
        task.number("lanes", envs.num_lanes)
        task.number("frames", slab.layout.frames)
        task.number("mode", self.rule.number)
        task.number("limit", definition.max_episode_steps or 0)
        task.number("env", getattr(definition.env, "library_address", 0))
        for name, array in self._lane.items():
            task.array(name, array)
        for name in FRAME_FIELDS:
            task.array(name, self._frame[name])
        # In debug mode a step that fails is run again, from the state that was saved before it.
        kept = envs.num_envs if envs.debug else 0
        self._saved_states = np.zeros((kept, definition.dtype.itemsize), np.uint8)
        self._saved_rngs = np.zeros((kept, 1), np.uint64)
        for name, array in (
            ("states", envs.states), ("seeds", envs.seeds), ("episodes", envs.episodes), ("rngs", envs.rngs),
            ("failed", self._failed), ("saved_states", self._saved_states), ("saved_rngs", self._saved_rngs),
        ):  # fmt: skip
            task.array(name, array)
        for i, _ in enumerate(self._leaves):
            task.array(f"obs.{i}", self._obs[i])
            task.array(f"final.{i}", self._finals[i])
        for i, leaf in enumerate(definition.action_leaves):
            task.array(f"action.{i}", self._actions[i])
            task.array(f"wide.{i}", np.zeros((envs.num_lanes, *leaf.shape), wide_type(leaf)))
        return task

    def rollout(self, task: Task, policy: int, steps: int, row_bytes: tuple[int, ...]) -> None:
        """Step with a policy that is a kernel itself; see native/kernel.h.

        Raises:
            EnvError: an env raised; the others may have made more steps.
        """
        self._rolling = True
        try:
            self._core.rollout(task.table, policy, steps, row_bytes)
        finally:
            self._rolling = False

    # ---- errors ------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        """Answer for the envs that have failed."""
        failed = np.flatnonzero(self._failed).tolist()
        phases = self._failed[failed].tolist()
        self._failed[:] = 0
        if self._rolling:
            raise pack_error(self._error(failed[0], UNKNOWN), "a rollout").unpack(failed[0] * self._agents, 0)
        for env, phase in zip(failed, phases, strict=True):
            self._fail(env, self._error(env, phase), DURING[phase])
        self.flush()

    def _fail(self, env: int, error: BaseException, during: str) -> None:
        lanes = np.arange(env * self._agents, (env + 1) * self._agents)
        slots = self._lane["slots"][lanes]
        for name in ("began", "status", "episode_return", "episode_length"):
            self._frame[name][slots, lanes] = 0
        for name in ("ended", "run_return", "run_length"):
            self._lane[name][lanes] = 0
        self._during = during
        self.failed(lanes, slots, error)
        self._lane["answered"][lanes] = self._lane["requested"][lanes]

    def _error(self, env: int, phase: int) -> BaseException:
        """Return what an env has raised. In debug mode plain Python runs it again, to find the line of the error."""
        name = self._definition.name
        if not self._envs.debug:
            return RuntimeError(f"{name} raised; make the pool with env_kwargs={{'debug': True}} to see what and where")
        try:
            self._again(env, phase)
        except Exception as error:
            return error
        return RuntimeError(f"{name}.{DURING[phase]} raised in compiled code, and does not in plain Python")

    def _again(self, env: int, phase: int) -> None:
        definition, rng = self._definition, self._envs.rngs[env]
        plain = PlainEnv(definition)
        record = np.asarray(self._envs.states)[env : env + 1].view(np.uint8)
        plain._bytes[:] = self._saved_states[env] if phase == STEPPING else record
        if phase == STEPPING:
            plain._rng[:] = self._saved_rngs[env]
            first = env * self._agents
            rows = slice(first, first + self._agents) if self._agents > 1 else first
            plain.step(assemble(definition.action_space, [array[rows] for array in self._actions if array is not None]))
        elif phase == RESETTING:
            begin_stream(rng, int(self._envs.seeds[env]), int(self._envs.episodes[env]))
            plain._rng[:], plain._bytes[: definition.cleared] = rng, 0
            definition.reset(plain.state, plain._rng)
        else:
            plain.observe_now()

    def _run_checked(self) -> int:
        """Answer, and refuse NaN."""
        asked = np.flatnonzero(self._lane["requested"] != self._lane["answered"])
        count = int(self._core.run())
        slots = self._lane["slots"][asked]
        fine = self._status[slots, asked] & STATUS_ERROR == 0
        asked, slots = asked[fine], slots[fine]
        written = [None if array is None else array[slots, asked] for array in self._obs]
        found: dict[int, BaseException] = {}
        for lane, error in self._nans(asked, written, self._frame["reward"][slots, asked]):
            found.setdefault(int(lane) // self._agents, error)
        for env, first in found.items():
            self._fail(env, first, "step")
        self.flush()
        return count

    def _on_reset(self, asked: Sequence[tuple[int, int | None, dict[str, Any] | None]]) -> None:
        # The seed of an env is that of its first lane. The requests of the lanes, which follow, carry it out.
        for lane, seed, _ in asked:
            if seed is not None and lane % self._agents == 0:
                self._envs.seeds[lane // self._agents] = int(seed) % 2**64
                self._envs.episodes[lane // self._agents] = -1

    def close(self) -> list[tuple[int, PackedError]]:
        """End the threads."""
        self._core.close()
        return super().close()

"""The compiled envs of a pool, and what steps them: one kernel answers all lanes.

Between a request and its answer no Python runs, unless an env has failed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal import native
from shoal.compiled import kernels
from shoal.compiled.definition import Definition, define, find_class
from shoal.compiled.mlp import Mlp
from shoal.compiled.narrow import PRECISIONS, in_columns, narrow_definition
from shoal.compiled.plain import PlainEnv
from shoal.compiled.policy import random_policy, random_policy_within
from shoal.compiled.random import begin_stream
from shoal.compiled.single.columns import Columns
from shoal.compiled.single.report import remark
from shoal.compiled.task import Task
from shoal.compiled.template import wide_type
from shoal.envs.autoreset import KERNEL_MODES
from shoal.errors import DataError
from shoal.memory.messages import STATUS_ERROR
from shoal.memory.packed_errors import PackedError, pack_error
from shoal.memory.slab import Slab
from shoal.native.layout import TASK_FRAME_FIELDS, TASK_LANE_FIELDS
from shoal.spaces.leaves import assemble
from shoal.support.checks import check_choice
from shoal.support.cores import usable_cores
from shoal.worker.base import EnvBlock, Stepper, WorkerChannel

STEPPING, RESETTING, OBSERVING, UNKNOWN = 1, 2, 3, 4  # phases, as kernels number them
MOST_BOUNDS = 64  # of random actions, as numbers in code
STREAMED = 4 << 20  # bytes of observations from which on a rollout is written past the caches
DURING = {STEPPING: "step", RESETTING: "reset", OBSERVING: "observe", UNKNOWN: "compiled code"}


def make_envs(env: Any, num_envs: int, env_kwargs: Mapping[str, Any], num_workers: int | None) -> CompiledEnvs:
    """Compile a class, or load what was compiled before, and make so many envs of it.

    Raises:
        BadEnv: it is no class for that, or cannot be compiled, for reasons in the user's own lines.
        ImportError: Numba is not installed.
    """
    kwargs = dict(env_kwargs)
    debug = bool(kwargs.pop("debug", os.environ.get("SHOAL_COMPILED_DEBUG", "") not in ("", "0")))
    precision = kwargs.pop("precision", "double")
    check_choice("precision", precision, PRECISIONS)
    env_class = find_class(env)
    definition = define(env_class, kwargs)
    if precision == "single":
        definition = narrow_definition(definition)
    function = env_class.__shoal_kernel__(definition, debug)
    return CompiledEnvs(definition, num_envs, function, num_workers or usable_cores(), debug)


class CompiledEnvs:
    """Many envs of one class, as a group; its lanes may be stepped and reset one by one.

    Attributes:
        states: one record for each env; may be looked at and changed between steps.
    """

    can_be_absent, modes = False, KERNEL_MODES

    def __init__(self, definition: Definition, num_envs: int, function: int, threads: int, debug: bool):
        self.definition, self.num_envs, self.function = definition, num_envs, function
        self.threads, self.debug = threads, debug
        self.group_size = definition.num_agents
        self.num_lanes = num_envs * self.group_size
        self.together, self.resets_alone = self.group_size > 1, self.group_size == 1
        self.lane_names = list(range(self.group_size)) if self.together else None
        self.single_observation_space, self.single_action_space = definition.observation_space, definition.action_space
        self.states: Any = definition.new_states(num_envs).view(np.recarray)
        if not debug and in_columns(definition):
            self.states = Columns(definition, num_envs)
        self.fields = (*(definition.dtype.names or ()), "state")  # what each env has for itself
        self.seeds = np.frombuffer(secrets.token_bytes(8 * num_envs), np.uint64).copy()
        self.episodes = np.full(num_envs, -1, np.int64)
        self.rngs = np.zeros((num_envs, 1), np.uint64)

    @property
    def remark(self) -> str:
        """Say how they are stepped, for the pool's plan; "" for nothing to say."""
        return remark(self.definition, kernels.lanes_at_once(self.function)) if self.definition.single else ""

    @property
    def env(self) -> CompiledEnvs:
        """The object that the caller's functions get."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the class itself, such as its metadata."""
        if name.startswith("_") or name == "definition":
            raise AttributeError(name)
        return getattr(self.definition.env, name)

    def use(self, autoreset: str) -> None:
        """See GroupEnv. The kernel gets the mode from the stepper."""

    def make_stepper(self, *args: Any) -> Any:
        return KernelStepper(*args)

    def get_wrapper_attr(self, name: str) -> Any:
        """Return an attribute of the class that the lanes share."""
        if not hasattr(self.definition.env, name):
            raise AttributeError(f"{self.definition.name} has no attribute {name!r}")
        return getattr(self.definition.env, name)

    def set_wrapper_attr(self, name: str, value: Any) -> None:
        """Refuse to set anything but fields."""
        fields = ", ".join(self.fields[:-1])
        raise AttributeError(f"{self.definition.name} has no field {name!r} to set: its fields are {fields}")

    # ---- rows: each lane is one row; the agents of an env share its state --------------------------------------

    def get_rows(self, name: str, rows: Sequence[int]) -> list[Any]:
        """Return copies of a field, or of the whole state, for these lanes."""
        column = self.states if name == "state" else self.states[name]
        values = [column[row // self.group_size] for row in rows]
        return [value.copy() if name == "state" or isinstance(value, np.ndarray) else value for value in values]

    def set_rows(self, name: str, rows: Sequence[int], values: Sequence[Any]) -> None:
        """Set a field, or the whole state, of these lanes."""
        column = self.states if name == "state" else self.states[name]
        for row, value in zip(rows, values, strict=True):
            column[row // self.group_size] = value

    def save_rows(self, rows: Sequence[int]) -> list[dict[str, Any] | None]:
        """Return the states of these lanes; None for a lane that was saved with the first lane of its env."""
        return [None if row % self.group_size else self._save(row // self.group_size) for row in rows]

    def _save(self, env: int) -> dict[str, Any]:
        return {
            "state": np.frombuffer(self.states[env].tobytes(), np.uint8).copy(), "rng": self.rngs[env].copy(),
            "seed": self.seeds[env : env + 1].copy(), "episode": self.episodes[env : env + 1].copy(),
        }  # fmt: skip

    def load_rows(self, rows: Sequence[int], states: Sequence[Any]) -> None:
        """Load what `save_rows` has returned."""
        for row, state in zip(rows, states, strict=True):
            env, agent = divmod(row, self.group_size)
            if agent:
                continue
            if _kinds(state) != _kinds(self._save(env)):
                raise DataError('the state was not saved by backend="compiled", and cannot be loaded by it')
            self.states[env] = np.frombuffer(state["state"].tobytes(), self.definition.dtype)[0]
            self.rngs[env] = state["rng"]
            self.seeds[env], self.episodes[env] = state["seed"][0], state["episode"][0]

    def close(self) -> None:
        """Do nothing: the stepper ends its threads."""


class KernelStepper(Stepper):
    """Runs the compiled envs of a pool (`compiled.pool_envs`), all in one kernel.

    Attributes:
        kernel: the core's Kernel, for a full batch in one call; None if Python must look at each answer.
        in_columns: whether the envs' states lie in columns, in single precision.
    """

    def __init__(self, block: EnvBlock, channel: WorkerChannel):
        super().__init__(block, channel)
        (self._envs,), slab = self.envs, block.slab
        self._definition, self._agents = self._envs.definition, self._envs.group_size
        self._lane = {name: slab.array("slot" if name == "slots" else name) for name in TASK_LANE_FIELDS}
        self._failed = np.zeros(self._envs.num_envs, np.uint8)
        self._rolling, self.in_columns = False, isinstance(self._envs.states, Columns)
        self._policies: dict[Any, int] = {}  # the addresses of those that were compiled for rollouts
        self._task = self._fill_task(slab)
        self._core = native.Kernel(
            self._envs.function, self._task.table, self._envs.num_envs, self._agents, self._envs.threads,
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
        for name in TASK_FRAME_FIELDS:
            task.array(name, self._frame[name])
        # In debug mode a step that fails is run again, from the state that was saved before it.
        kept = envs.num_envs if envs.debug else 0
        self._saved_states = np.zeros((kept, definition.dtype.itemsize), np.uint8)
        self._saved_rngs = np.zeros((kept, 1), np.uint64)
        for name, array in (
            ("states", getattr(envs.states, "addresses", envs.states)), ("seeds", envs.seeds),
            ("episodes", envs.episodes), ("rngs", envs.rngs), ("failed", self._failed),
            ("saved_states", self._saved_states), ("saved_rngs", self._saved_rngs),
        ):  # fmt: skip
            task.array(name, array)
        for i, _ in enumerate(self._leaves):
            task.array(f"obs.{i}", self._obs[i])
            task.array(f"final.{i}", self._finals[i])
        for i, leaf in enumerate(definition.action_leaves):
            task.array(f"action.{i}", self._actions[i])
            task.array(f"wide.{i}", np.zeros((envs.num_lanes, *leaf.shape), wide_type(leaf)))
        return task

    def roll_out(self, record: Any, policy: Any, params: Sequence[Any], rngs: Any) -> bool:
        """Fill the record of a rollout, except its first observations, which it has; return False if that cannot be.

        A policy is a kernel itself, see native/kernel.h: all steps are made without a return to Python. Kernels answer
        into frames, and the record's arrays serve as the frames. Frame 0 is the beginning of the rollout: an array that
        has no row for it gets an address one row before its first one.

        Raises:
            EnvError: an env raised; the others may have made more steps.
        """
        if policy == "random":
            if len(self._definition.action_leaves) != 1:
                return False
            leaf = self._definition.action_leaves[0]
            within = self.in_columns and np.prod(leaf.shape) <= MOST_BOUNDS
            policy, params = (random_policy_within(leaf), ()) if within else random_policy(leaf)
        if self.kernel is None or not kernels.available():
            return False
        if isinstance(policy, Mlp) and not self.in_columns:
            policy = policy.function(self._definition.obs_leaves, self._definition.action_leaves, params)
        elif isinstance(policy, Mlp):
            params = [np.ascontiguousarray(param, np.float32) for param in params]
        key = (policy, *((param.dtype, param.shape) for param in params))
        if key not in self._policies:  # a look into the cache on disk takes longer than many rollouts
            compiler = kernels.rollout_address if self.in_columns else kernels.policy_address
            self._policies[key] = compiler(self._definition, policy, params)
        task = self._task.copy((rngs, *params))
        task.number("frames", record.steps + 1)
        task.number("streams", sum(array.nbytes for array in record.obs) > STREAMED)
        late = {name: getattr(record, name) for name in TASK_FRAME_FIELDS if name not in ("began", "status")}
        if not self.in_columns:
            late["status"] = np.zeros((record.steps, record.lanes), np.uint8)
        late.update({f"final.{i}": array for i, array in enumerate(record.finals or ())})
        for name, array in late.items():
            task.array(name, array, offset=-array.strides[0])
        task.array("began", record.began)
        for kind, arrays in (("obs", record.obs), ("action", record.actions)):
            for i, array in enumerate(arrays):
                task.array(f"{kind}.{i}", array)
        self._rolling = True
        try:
            row_bytes = () if self.in_columns else tuple(array.strides[0] for array in record.actions)
            self._core.rollout(task.table, self._policies[key], record.steps, row_bytes)
        finally:
            self._rolling = False
        return True

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
            begin_stream(rng, self._envs.seeds[env], self._envs.episodes[env])
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
        self._core.close()
        return super().close()


def _kinds(state: Any) -> Any:
    """The types and shapes of the arrays of a saved state; None for what is none."""
    if not isinstance(state, dict) or not all(isinstance(part, np.ndarray) for part in state.values()):
        return None
    return {name: (part.dtype, part.shape) for name, part in state.items()}

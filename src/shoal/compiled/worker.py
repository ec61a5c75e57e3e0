"""Compiled envs as a worker's block: one kernel answers all lanes, and Python only says what it is to do.

The counterpart of `worker.single` and `worker.grouped`. Between a request and its answer no Python runs, unless an env
has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal import native
from shoal.compiled.plain import PlainEnv
from shoal.compiled.pool_envs import CompiledEnvs
from shoal.compiled.random import begin_stream
from shoal.compiled.source_parts import wide_type
from shoal.compiled.task import FRAME_FIELDS, LANE_FIELDS, Task
from shoal.errors import BadObservation
from shoal.memory.messages import NO_SEED, STATUS_ERROR, STATUS_NOTE, Note, Reply, StepperConfig
from shoal.memory.packed_errors import PackedError, pack_error
from shoal.memory.slab import Slab
from shoal.spaces.leaves import assemble
from shoal.state.env_state import EnvState

__all__ = ["CompiledStepper"]

Array = npt.NDArray[Any]
STEPPING, RESETTING, OBSERVING, UNKNOWN = 1, 2, 3, 4  # phases, as kernels number them
DURING = {STEPPING: "step", RESETTING: "reset", OBSERVING: "observe", UNKNOWN: "compiled code"}
WITH_THE_FIRST = "group"  # the kind of the state of a lane whose env was saved with its first one


class CompiledStepper:
    """The envs of a pool, all in one kernel. Has what a Stepper has, and takes the same.

    Attributes:
        kernel: what the core calls for a full batch; None where each answer must be looked at.
        task: what the kernel is told.
        policies: the addresses of policies that were compiled for rollouts.
    """

    def __init__(
        self,
        slab: Slab,
        worker: int,
        start: int,
        envs: list[CompiledEnvs],
        env_fns: Sequence[Callable[[], Any]],
        config: StepperConfig,
        post: Callable[[Any], None],
        *_: Any,
        **__: Any,
    ):
        self.envs, (self._envs,) = envs, envs
        self._post, self._check_nan = post, config.check_nan
        self._definition, self._agents = self._envs.definition, self._envs.group_size
        self._leaves = self._definition.obs_leaves
        self._frame = {name: slab.array(name) for name in FRAME_FIELDS}
        self._lane = {name: slab.array(_slab_name(name)) for name in LANE_FIELDS}
        self._obs = slab.leaf_arrays("obs", self._leaves)
        self._actions = slab.leaf_arrays("action", self._definition.action_leaves)
        self._failed = np.zeros(self._envs.num_envs, np.uint8)
        self._rolling = False
        self.policies: dict[Any, int] = {}
        self.task = self._fill_task(slab, config)
        self._core = native.Kernel(
            self._envs.function, self.task.table, self._envs.num_envs, self._agents, self._envs.threads,
            slab.array("stats")[worker], self._failed, self._report,
        )  # fmt: skip
        self.run = self._run_checked if self._check_nan else self._core.run
        # In debug mode actions must lie in the slab, to be looked at when a step has failed.
        self.kernel = None if self._check_nan or self._envs.debug else self._core

    def _fill_task(self, slab: Slab, config: StepperConfig) -> Task:
        definition, envs = self._definition, self._envs
        task = Task(max(len(self._leaves), len(definition.action_leaves)))
        task.number("lanes", envs.num_lanes)
        task.number("frames", slab.layout.frames)
        task.number("mode", native.AUTORESET[config.autoreset])
        task.number("limit", definition.max_episode_steps or 0)
        task.number("env", getattr(definition.env, "library_address", 0))
        for name, array in (*self._lane.items(), *self._frame.items()):
            task.array(name, array)
        # Where a step that fails is to be run again, there must be something to run it on.
        kept = envs.num_envs if envs.debug else 0
        self._saved_states = np.zeros((kept, definition.dtype.itemsize), np.uint8)
        self._saved_rngs = np.zeros((kept, 1), np.uint64)
        for name, array in (
            ("states", envs.states), ("seeds", envs.seeds), ("episodes", envs.episodes), ("rngs", envs.rngs),
            ("failed", self._failed), ("saved_states", self._saved_states), ("saved_rngs", self._saved_rngs),
        ):  # fmt: skip
            task.array(name, array)
        finals = slab.leaf_arrays("final", self._leaves)
        for i, _ in enumerate(self._leaves):
            task.array(f"obs.{i}", self._obs[i])
            task.array(f"final.{i}", finals[i])
        for i, leaf in enumerate(definition.action_leaves):
            task.array(f"action.{i}", self._actions[i])
            task.array(f"wide.{i}", np.zeros((envs.num_lanes, *leaf.shape), wide_type(leaf)))
        return task

    def rollout(self, task: Task, policy: int, steps: int, row_bytes: tuple[int, ...]) -> None:
        """Steps by a policy that is a kernel itself; see native/kernel.h.

        Raises:
            EnvError: an env raised; the others may have come further than it.
        """
        self._rolling = True
        try:
            self._core.rollout(task.table, policy, steps, row_bytes)
        finally:
            self._rolling = False

    # ---- what goes wrong ---------------------------------------------------------------------------------------

    def _report(self) -> None:
        """Some envs have failed: answer their lanes with the errors."""
        notes = []
        if self._rolling:
            env, phase = int(np.flatnonzero(self._failed)[0]), UNKNOWN
            self._failed[:] = 0
            raise pack_error(self._error(env, phase), "a rollout").unpack(env * self._agents, 0)
        for env in np.flatnonzero(self._failed).tolist():
            lanes = np.arange(env * self._agents, (env + 1) * self._agents)
            notes += self._fail(lanes, self._error(env, int(self._failed[env])), DURING[int(self._failed[env])])
            self._failed[env] = 0
        self._post(notes)

    def _fail(self, lanes: Array, error: BaseException, during: str) -> list[Note]:
        slots = self._lane["slots"][lanes]
        for name in ("terminated", "truncated", "began", "episode_return", "episode_length"):
            self._frame[name][slots, lanes] = 0
        self._frame["status"][slots, lanes] = STATUS_NOTE | STATUS_ERROR
        for name in ("ended", "run_return", "run_length"):
            self._lane[name][lanes] = 0
        self._lane["answered"][lanes] = self._lane["requested"][lanes]
        packed = pack_error(error, during)
        return [Note(lane, int(self._lane["requested"][lane]), {}, [], packed) for lane in lanes.tolist()]

    def _error(self, env: int, phase: int) -> BaseException:
        """What an env has raised: in debug mode it does so once more, in plain Python, which has lines."""
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
        """Answer, and refuse what is not a number."""
        asked = np.flatnonzero(self._lane["requested"] != self._lane["answered"])
        count = int(self._core.run())
        slots = self._lane["slots"][asked]
        fine = self._frame["status"][slots, asked] & STATUS_ERROR == 0
        asked, slots = asked[fine], slots[fine]
        named = [(f"observation{leaf.name}", array) for leaf, array in zip(self._leaves, self._obs, strict=True)]
        for what, array in [*named, ("its reward", self._frame["reward"])]:
            if array is None or array.dtype.kind != "f" or not len(asked):
                continue
            bad = asked[np.isnan(array[slots, asked]).reshape(len(asked), -1).any(axis=1)]
            for env in np.unique(bad // self._agents).tolist():
                lanes = np.arange(env * self._agents, (env + 1) * self._agents)
                error = BadObservation(f"env {lanes[0]}: {what} is nan, and check_nan was asked for")
                self._post(self._fail(lanes, error, "step"))
        return count

    # ---- commands ----------------------------------------------------------------------------------------------

    def handle(self, message: tuple[Any, ...]) -> None:
        """Carry out a command from the caller: (name, ...)."""
        getattr(self, f"_on_{message[0]}")(*message[1:])

    def _on_reset(self, asked: Sequence[tuple[int, int | None, dict[str, Any] | None]]) -> None:
        # The seed of an env is that of its first lane. The lanes' own requests carry it out.
        for lane, seed, _ in asked:
            if seed is not None and lane % self._agents == 0:
                self._envs.seeds[lane // self._agents] = int(seed) % 2**64
                self._envs.episodes[lane // self._agents] = -1

    def _on_call(self, ticket: int, lanes: Sequence[int], name: str, args: Any, kwargs: Any) -> None:
        def call() -> list[Any]:
            if name in self._fields():
                column = self._envs.states[name]
                values = [column[lane // self._agents] for lane in lanes]
                return [value.copy() if isinstance(value, np.ndarray) else value for value in values]
            if name == "state":
                return [self._envs.states[lane // self._agents].copy() for lane in lanes]
            if not hasattr(self._definition.env, name):
                raise AttributeError(f"{self._definition.name} has no attribute {name!r}")
            value = getattr(self._definition.env, name)
            return [value(*args, **kwargs) if callable(value) else value] * len(lanes)

        self._reply(ticket, lanes, call, f"call of {name!r}")

    def _on_apply(self, ticket: int, lanes: Sequence[int], function: Any, args: Any, kwargs: Any) -> None:
        def apply() -> list[Any]:
            return [function(self._envs, *args, **kwargs)] * len(lanes)

        self._reply(ticket, lanes, apply, f"apply of {getattr(function, '__name__', function)!r}")

    def _on_set(self, ticket: int, lanes: Sequence[int], name: str, values: Sequence[Any]) -> None:
        def assign() -> list[Any]:
            if name not in self._fields() and name != "state":
                fields = ", ".join(self._fields())
                raise AttributeError(f"{self._definition.name} has no field {name!r} to set: its fields are {fields}")
            target = self._envs.states if name == "state" else self._envs.states[name]
            for lane, value in zip(lanes, values, strict=True):
                target[lane // self._agents] = value
            return [None] * len(lanes)

        self._reply(ticket, lanes, assign, f"set_attr of {name!r}")

    def _fields(self) -> tuple[str, ...]:
        return self._definition.dtype.names or ()

    def _on_save(self, ticket: int, lanes: Sequence[int]) -> None:
        envs = self._envs
        states = np.asarray(envs.states).view(np.uint8).reshape(envs.num_envs, -1)

        def save() -> list[Any]:
            return [(self._saved(states, lane), NO_SEED) for lane in lanes]

        self._reply(ticket, lanes, save, "saving its state")

    def _saved(self, states: Array, lane: int) -> EnvState:
        env, agent = divmod(lane, self._agents)
        if agent:
            return EnvState(WITH_THE_FIRST, None)
        parts = {
            "state": states[env], "rng": self._envs.rngs[env], "seed": self._envs.seeds[env : env + 1],
            "episode": self._envs.episodes[env : env + 1],
        }  # fmt: skip
        return EnvState("own", {name: array.copy() for name, array in parts.items()})

    def _on_load(self, ticket: int, lanes: Sequence[int], saved: Sequence[tuple[EnvState, Any]]) -> None:
        envs = self._envs
        states = np.asarray(envs.states).view(np.uint8).reshape(envs.num_envs, -1)

        def load() -> list[Any]:
            for lane, (state, _) in zip(lanes, saved, strict=True):
                env, agent = divmod(lane, self._agents)
                if agent:
                    continue
                if not isinstance(state.content, dict) or set(state.content) != {"state", "rng", "seed", "episode"}:
                    raise ValueError('the state was not saved by backend="compiled", and cannot be loaded by it')
                states[env], envs.rngs[env] = state.content["state"], state.content["rng"]
                envs.seeds[env], envs.episodes[env] = state.content["seed"][0], state.content["episode"][0]
            return [None] * len(lanes)

        self._reply(ticket, lanes, load, "loading its state")

    def _reply(self, ticket: int, lanes: Sequence[int], act: Callable[[], list[Any]], during: str) -> None:
        try:
            values = act()
        except Exception as error:
            values = [pack_error(error, during)] * len(lanes)
        self._post(Reply(ticket, values))

    def close(self) -> list[tuple[int, PackedError]]:
        """End the threads."""
        self._core.close()
        self.envs.clear()
        return []


def _slab_name(name: str) -> str:
    return "slot" if name == "slots" else name

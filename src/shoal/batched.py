"""Envs that step many lanes at once, as one block: reads actions from the slab and writes answers into it, by arrays.

The counterpart of `shoal.block` for an env that is a batch already, such as one that lives on a device. Autoreset,
episode returns and seeds are done here, so that such envs behave like all others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gymnasium import Space

from shoal import native
from shoal.errors import BadObservation
from shoal.messages import NO_SEED, STATUS_ERROR, STATUS_FINAL, STATUS_NOTE, Note, Reply, StepperConfig
from shoal.native import counters
from shoal.remote import pack_error
from shoal.slab import FRAME_FIELDS, Slab
from shoal.spaces import assemble, flatten, get_path
from shoal.state import EnvState

__all__ = ["BatchedEnv", "BatchedStepper"]

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]


class BatchedEnv(Protocol):
    """Many envs in one object. Arrays have one row for each; rows where a mask is False stay as they are."""

    num_envs: int
    single_observation_space: Space[Any]
    single_action_space: Space[Any]

    def reset(self, mask: Mask, seeds: Sequence[int | None]) -> Any:
        """Begin an episode where the mask is True: observations, valid in those rows. One seed for each row."""
        ...

    def step(self, mask: Mask, actions: Any) -> tuple[Any, Array, Array, Array]:
        """Step where the mask is True: observations, rewards, terminated, truncated, valid in those rows. Never resets
        by itself."""
        ...

    def save(self) -> dict[str, Array]:
        """The state as arrays with a row for each env."""
        ...

    def load(self, saved: dict[str, Array], mask: Mask) -> None:
        """The counterpart of `save`, for the rows where the mask is True."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class BatchedStepper:
    """The lanes of one batched env. Has what the caller's own block has: `run`, `handle` and `close`.

    Args:
        post: takes a list of Notes, or a Reply, to the caller.
    """

    def __init__(
        self, slab: Slab, worker: int, start: int, env: BatchedEnv, config: StepperConfig, post: Callable[[Any], None]
    ):
        self._env, self._start, self._count, self._post = env, start, env.num_envs, post
        self._mine = slice(start, start + env.num_envs)
        self._mode, self._check_nan = config.autoreset, config.check_nan
        self._space, self._action_space = config.observation_space, config.action_space
        self._leaves = flatten(config.observation_space)
        self._obs, self._finals = slab.leaf_arrays("obs", self._leaves), slab.leaf_arrays("final", self._leaves)
        self._actions = slab.leaf_arrays("action", flatten(config.action_space))
        self._frame = {name: slab.array(name) for name in FRAME_FIELDS}
        self._requested, self._answered = slab.array("requested"), slab.array("answered")
        self._op, self._slot, self._done_ns = slab.array("op"), slab.array("slot"), slab.array("done_ns")
        self._ended, self._counters = slab.array("ended"), counters.WorkerCounters(slab, worker)
        self._stats = self._counters.stats
        self._run_return, self._run_length = slab.array("run_return"), slab.array("run_length")
        self._seeds: dict[int, int | None] = {}

    # ---- requests ----------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Answer every lane that was asked; returns how many."""
        began_ns = time.monotonic_ns()
        waking_ns = self._counters.waking(began_ns)
        asked = np.flatnonzero(self._requested[self._mine] != self._answered[self._mine]) + self._start
        if not len(asked):
            return 0
        self._stats[native.STAT_SINCE_NS], self._stats[native.STAT_AT] = began_ns, int(asked[0]) + 1
        try:
            self._answer(asked)
        except Exception as error:
            self._fail(asked, error)
        now = time.monotonic_ns()
        self._done_ns[asked] = now
        self._stats[native.STAT_AT] = 0
        self._counters.passed(len(asked), waking_ns, began_ns, now)
        if (self._op[asked] == native.OP_STEP).any():
            self._counters.step(self._start, now - began_ns)
        self._answered[asked] = self._requested[asked]
        return len(asked)

    def _answer(self, asked: Array) -> None:
        due = self._op[asked] == native.OP_RESET
        if self._mode == "next_step":
            due |= self._ended[asked] != 0
        resets, steps = asked[due], asked[~due]
        for array in self._frame.values():
            array[self._slot[asked], asked] = 0
        if len(resets):
            self._begin(resets, [self._seeds.get(lane) for lane in resets.tolist()])
            for lane in resets.tolist():
                self._seeds.pop(lane, None)
        if len(steps):
            self._step(steps)

    def _begin(self, lanes: Array, seeds: Sequence[int | None]) -> None:
        given: list[int | None] = [None] * self._count
        for lane, seed in zip(lanes.tolist(), seeds, strict=True):
            given[lane - self._start] = seed
        began_ns = time.monotonic_ns()
        self._write(self._obs, lanes, self._env.reset(self._mask(lanes), given))
        self._stats[counters.STAT_RESET_NS] += time.monotonic_ns() - began_ns
        self._frame["began"][self._slot[lanes], lanes] = True
        self._ended[lanes] = self._run_return[lanes] = self._run_length[lanes] = 0
        self._stats[counters.STAT_EPISODES] += len(lanes)

    def _step(self, lanes: Array) -> None:
        values = [array[self._mine] for array in self._actions if array is not None]
        obs, *results = self._env.step(self._mask(lanes), assemble(self._action_space, values))
        rows = lanes - self._start
        reward, terminated, truncated = (np.asarray(result)[rows] for result in results)
        if self._check_nan:
            self._refuse_nan("its reward", lanes, reward)
        self._run_return[lanes] += reward
        self._run_length[lanes] += 1
        at = self._slot[lanes], lanes
        frame = self._frame
        frame["reward"][at], frame["terminated"][at], frame["truncated"][at] = reward, terminated, truncated
        frame["episode_return"][at], frame["episode_length"][at] = self._run_return[lanes], self._run_length[lanes]
        over = lanes[terminated.astype(bool) | truncated.astype(bool)]
        self._write(self._obs, lanes, obs)
        if len(over):
            self._counters.episodes(len(over), self._run_return[over].sum(), self._run_length[over].sum())
        if self._mode == "same_step":
            if len(over):
                self._write(self._finals, over, obs)
                frame["status"][self._slot[over], over] |= STATUS_FINAL
                self._begin(over, [None] * len(over))
        else:
            self._ended[over] = 1

    def _mask(self, lanes: Array) -> Mask:
        mask = np.zeros(self._count, np.bool_)
        mask[lanes - self._start] = True
        return mask

    def _write(self, targets: Sequence[Any], lanes: Array, obs: Any) -> None:
        for leaf, target in zip(self._leaves, targets, strict=True):
            values = np.asarray(get_path(obs, leaf.path))[lanes - self._start]
            if self._check_nan and values.dtype.kind == "f":
                self._refuse_nan(f"observation{leaf.name}", lanes, values)
            target[self._slot[lanes], lanes] = values

    @staticmethod
    def _refuse_nan(what: str, lanes: Array, values: Array) -> None:
        bad = np.isnan(values).reshape(len(lanes), -1).any(axis=1)
        if bad.any():
            raise BadObservation(f"env {lanes[np.argmax(bad)]}: {what} is nan, and check_nan was asked for")

    def _fail(self, lanes: Array, error: Exception) -> None:
        """What goes wrong in a batch goes wrong for all that were asked."""
        at = self._slot[lanes], lanes
        self._frame["terminated"][at] = self._frame["truncated"][at] = False
        self._frame["status"][at] = STATUS_NOTE | STATUS_ERROR
        packed = pack_error(error, "step or reset of the whole batch")
        self._post([Note(lane, int(self._requested[lane]), {}, [], packed) for lane in lanes.tolist()])

    # ---- commands ----------------------------------------------------------------------------------------------

    def handle(self, message: tuple[Any, ...]) -> None:
        """Carry out a command from the caller: (name, ...)."""
        getattr(self, f"_on_{message[0]}")(*message[1:])

    def _on_reset(self, asked: Sequence[tuple[int, int | None, dict[str, Any] | None]]) -> None:
        for lane, seed, options in asked:
            if options:
                raise ValueError(f"options: envs that are stepped as one batch take none, found {options!r:.100}")
            self._seeds[lane] = seed

    def _on_call(self, ticket: int, lanes: Sequence[int], name: str, args: Any, kwargs: Any) -> None:
        def call(env: Any) -> Any:
            value = getattr(env, name)
            return value(*args, **kwargs) if callable(value) else value

        self._reply(ticket, lanes, lambda: [call(self._env)] * len(lanes), f"call of {name!r}")

    def _on_apply(self, ticket: int, lanes: Sequence[int], function: Any, args: Any, kwargs: Any) -> None:
        self._reply(ticket, lanes, lambda: [function(self._env, *args, **kwargs)] * len(lanes), "apply")

    def _on_set(self, ticket: int, lanes: Sequence[int], name: str, values: Sequence[Any]) -> None:
        def assign() -> list[None]:
            for value in values:
                setattr(self._env, name, value)
            return [None] * len(lanes)

        self._reply(ticket, lanes, assign, f"set_attr of {name!r}")

    def _on_save(self, ticket: int, lanes: Sequence[int]) -> None:
        def save() -> list[Any]:
            saved = self._env.save()
            rows = [{name: np.array(array[lane - self._start]) for name, array in saved.items()} for lane in lanes]
            return [(EnvState("own", row), NO_SEED) for row in rows]

        self._reply(ticket, lanes, save, "saving its state")

    def _on_load(self, ticket: int, lanes: Sequence[int], saved: Sequence[tuple[EnvState, Any]]) -> None:
        def load() -> list[None]:
            rows = np.array(lanes) - self._start
            whole = {}
            for name in saved[0][0].content:
                parts = np.stack([state.content[name] for state, _ in saved])
                whole[name] = np.zeros((self._count, *parts.shape[1:]), parts.dtype)
                whole[name][rows] = parts
            self._env.load(whole, self._mask(np.array(lanes)))
            return [None] * len(lanes)

        self._reply(ticket, lanes, load, "loading its state")

    def _reply(self, ticket: int, lanes: Sequence[int], act: Callable[[], list[Any]], during: str) -> None:
        try:
            values: list[Any] = act()
        except Exception as error:
            values = [pack_error(error, during)] * len(lanes)
        self._post(Reply(ticket, values))

"""Whole rollouts: a policy and a pool, step after step, into arrays [steps, lanes, ...]."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import Space

from shoal.batch import Batch, Rollout
from shoal.engine.lane_calls import LaneCalls
from shoal.envs.autoreset import RULES
from shoal.errors import BadCall
from shoal.memory.answers import Frames, Ready
from shoal.spaces.leaves import Leaf, array_leaves, assemble, get_path
from shoal.support.checks import whole_number

__all__ = ["RollingOut"]

Array = npt.NDArray[Any]
_alone = [np.empty(1)]
UNUSED = sys.getrefcount(_alone[0])  # references to an array that nothing but a list has, as they are counted here
WORTH_KEEPING = 1 << 16  # bytes of an array
MOST_KEPT = 16  # arrays of one shape: a rollout may have several
ANSWERS = ("reward", "terminated", "truncated", "episode_return", "episode_length")


class Memory:
    """Arrays of earlier rollouts, used again once the caller has let go of them.

    Fresh memory costs more than quick envs take to fill it: the system clears each page when it is first touched.
    """

    def __init__(self) -> None:
        self._arrays: dict[tuple[tuple[int, ...], np.dtype[Any]], list[Array]] = {}

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array that nothing else refers to; what is in it is not defined."""
        known = self._arrays.setdefault((shape, dtype), [])
        for i in range(len(known)):
            if sys.getrefcount(known[i]) == UNUSED:
                return known[i]
        made: Array = np.empty(shape, dtype)
        if made.nbytes >= WORTH_KEEPING and len(known) < MOST_KEPT:
            known.append(made)
        return made


class _Record:
    """The arrays of a rollout while they are being filled."""

    def __init__(self, pool: Any, steps: int, out: Rollout | None, memory: Memory):
        self.lanes, self.steps = pool.num_envs, steps
        self.spaces: tuple[Space[Any], Space[Any]] = (pool.single_observation_space, pool.single_action_space)
        self.obs_leaves = array_leaves("observation", self.spaces[0], "a rollout")
        self.action_leaves = array_leaves("action", self.spaces[1], "a rollout")
        self._out, self._memory = out, memory
        self.obs = self._arrays("obs", self.obs_leaves, steps + 1)
        self.actions = self._arrays("actions", self.action_leaves, steps)
        with_finals = RULES[pool.autoreset].resets_at_once
        self.finals = self._arrays("final_obs", self.obs_leaves, steps) if with_finals else None
        if out is not None and not with_finals and getattr(out, "final_obs", None) is not None:
            raise self._other_out()
        for array in self.finals or []:
            array.fill(0)
        real, whole = (np.float32, np.int32) if pool.narrow_rollouts else (np.float64, np.int64)
        self.reward, self.episode_return = self._flat("reward", real), self._flat("episode_return", real)
        self.episode_length = self._flat("episode_length", whole)
        self.terminated, self.truncated = self._flat("terminated", np.bool_), self._flat("truncated", np.bool_)
        self.began = self._array("began", (), (steps + 1, self.lanes), np.dtype(np.bool_))

    def _flat(self, name: str, dtype: Any) -> Array:
        return self._array(name, (), (self.steps, self.lanes), np.dtype(dtype))

    def _arrays(self, name: str, leaves: Sequence[Leaf], rows: int) -> list[Array]:
        return [self._array(name, leaf.path, (rows, self.lanes, *leaf.shape), leaf.dtype) for leaf in leaves]

    def _array(self, name: str, path: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        if self._out is None:
            return self._memory.take(shape, dtype)
        try:
            found = get_path(getattr(self._out, name), path)
        except (AttributeError, KeyError, IndexError, TypeError):
            found = None
        if not isinstance(found, np.ndarray) or (found.shape, found.dtype) != (shape, dtype):
            raise self._other_out()
        if not (found.flags.c_contiguous and found.flags.writeable):  # kernels write it by its address
            raise BadCall(f"rollout: out.{name} must be as the rollout has made it: contiguous, and not read-only")
        return found

    def _other_out(self) -> BadCall:
        return BadCall(f"rollout: out must be an earlier rollout of {self.steps} steps of such a pool")

    def seen(self, t: int) -> Any:
        """What the policy sees at step t."""
        return assemble(self.spaces[0], [array[t] for array in self.obs])

    def write(self, arrays: Sequence[Array], leaves: Sequence[Leaf], t: int, values: Any) -> None:
        for array, leaf in zip(arrays, leaves, strict=True):
            array[t] = get_path(values, leaf.path)

    def answer(self, t: int, batch: Any) -> None:
        """Keep what step t has brought."""
        self.write(self.obs, self.obs_leaves, t + 1, batch.obs)
        self.began[t + 1] = batch.began
        for name in ANSWERS:
            getattr(self, name)[t] = getattr(batch, name)
        if self.finals is not None:
            for lane, final in batch.final_obs.items():
                for array, leaf in zip(self.finals, self.obs_leaves, strict=True):
                    array[t, lane] = get_path(final, leaf.path)

    def last_answers(self) -> dict[str, Array]:
        """What all lanes have answered last, by the names that the slab has for it."""
        found = {name: getattr(self, name)[-1] for name in (*ANSWERS, "began")}
        return found | {f"obs.{i}": array[-1] for i, array in enumerate(self.obs)}

    def finish(self) -> Rollout:
        if self._out is not None:
            return self._out
        return Rollout(
            assemble(self.spaces[0], self.obs), assemble(self.spaces[1], self.actions), self.reward, self.terminated,
            self.truncated, self.began, self.episode_return, self.episode_length,
            None if self.finals is None else assemble(self.spaces[0], self.finals),
        )  # fmt: skip


def roll_out(pool: Any, policy: Any, steps: int, params: Any, seed: int | None, out: Rollout | None = None) -> Rollout:
    """See Pool.rollout."""
    from shoal.compiled.mlp import Mlp
    from shoal.compiled.policy import act_on_lanes, is_policy, random_policy, streams
    from shoal.compiled.policy import policy as compiled_policy

    if RULES[pool.autoreset].user_resets:
        raise BadCall(
            'rollout: episodes must begin by themselves, so make the pool with another autoreset than "disabled"'
        )
    random = isinstance(policy, str) and policy == "random"
    if not random and not callable(policy) and not is_policy(policy):
        raise BadCall(f'rollout: expected a policy(obs) -> actions, a compiled.policy or "random", found {policy!r}')
    given = [np.ascontiguousarray(np.atleast_1d(param)) for param in params]
    if given and not is_policy(policy):
        raise BadCall("rollout: params are for a compiled.policy; let any other function know them by itself")
    record = _Record(pool, steps, out, pool.rollout_memory)
    first = pool.last_answer()
    record.write(record.obs, record.obs_leaves, 0, first.obs)
    record.began[0] = first.began
    if random or is_policy(policy):
        rngs = streams(secrets.randbits(62) if seed is None else int(seed), pool.num_envs)
        if pool.roll_at_once(record, policy, given, rngs):
            return record.finish()
    if isinstance(policy, Mlp):
        policy = compiled_policy(policy.function(record.obs_leaves, record.action_leaves, given))
    for t in range(steps):
        chosen = [array[t] for array in record.actions]
        if random:
            for leaf, array in zip(record.action_leaves, chosen, strict=True):
                choose, bounds = random_policy(leaf)
                act_on_lanes(choose, [array], [array], (False, False), rngs, bounds)
        elif is_policy(policy):
            nested = (bool(record.obs_leaves[0].path), bool(record.action_leaves[0].path))
            act_on_lanes(policy, [array[t] for array in record.obs], chosen, nested, rngs, given)
        else:
            record.write(record.actions, record.action_leaves, t, policy(record.seen(t)))
        record.answer(t, pool.step(assemble(record.spaces[1], chosen)))
    return record.finish()


class RollingOut(LaneCalls):
    """The part of a pool that makes whole rollouts."""

    data: Frames

    def __init__(self) -> None:
        self.rollout_memory = Memory()

    def rollout(
        self,
        policy: Any,
        steps: int,
        *,
        params: Sequence[Any] = (),
        seed: int | None = None,
        out: Rollout | None = None,
    ) -> Rollout:
        """Step all envs so many times by a policy, and keep everything; goes on where the envs are.

        With backend="compiled" and a policy that can be compiled, or "random", no Python runs until it is over.

        Args:
            policy: a function of a batch of observations that returns a batch of actions; a `shoal.compiled.policy`; or
                "random".
            params: arrays that a `shoal.compiled.policy` gets.
            seed: for what such a policy, or "random", draws: lane i gets `seed + i`; None for anything.
            steps: how many steps of each env.
            out: an earlier rollout of as many steps, of which the arrays are written again, and which is returned. By
                default the arrays are the caller's own, in memory of earlier rollouts that the caller has let go of.

        Raises:
            EnvError: an env raised; under backend="compiled" all must be reset then.
        """
        with self.turn:
            self._check_usable()
            return roll_out(self, policy, whole_number("steps", steps, 1, 2**40), params, seed, out)

    def last_answer(self) -> Batch:
        """What all envs have answered last, none of which may be busy; those that were never reset are reset first."""
        with self.turn:
            self._check_usable()
            if self._scheduler.some_must_reset:
                return self.data.batch(self.restart(None, None, None, None))
            return self.data.batch(self.data.whole(Ready(np.arange(0), 0, -1, {})))

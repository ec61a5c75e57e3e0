"""Functional JAX envs in batches: pure functions over a state that never leaves the device.

One lane is one env. All functions of a `BatchedFunctionalEnv` are pure: they can be jitted, scanned, mapped and
differentiated. A call outside of `jit` compiles the function, once.

What an env draws depends on its lane's key, the number of the episode and that of the step, and on nothing else: not on
how many lanes there are, nor on what the others do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from shoal.errors import BadCall, CannotSnapshot
from shoal.graph.jax.protocols import Lane, key_data, named, read_leaf, restored, shaped, where, zeros
from shoal.graph.jax.random_numbers import FAST, draw, words_of
from shoal.graph.jax.records import (
    COLLECTED,
    FunctionalOptions,
    FunctionalState,
    FunctionalStep,
    RolloutSummary,
    Spare,
    Trajectory,
    check_one_of,
)  # fmt: skip
from shoal.spaces.leaves import assemble

Policy = Callable[[Any, Any, jax.Array], Any]
Tree = Any  # arrays, nested
Stepped = tuple[FunctionalState, FunctionalStep]
Begun = tuple[FunctionalState, Tree]

_TERMINATED, _TRUNCATED = 1, 2
_POLICY_STREAM = 0x7FFFFFFF  # of the first lane's key: the streams of episodes are counted from 0


class BatchedFunctionalEnv:
    """Many copies of one functional env.

    The env has one of three protocols, which Shoal recognises by its methods:

    - Gymnasium's FuncEnv: `initial`, `transition`, `observation`, `reward`, `terminal`; `observation_space` and
      `action_space`. Each of the four after `initial` gets a key of its own.
    - Brax: `reset(key) -> state` and `step(state, action) -> state`, where a state has `obs`, `reward`, `done`,
      `metrics` and `info`; `action_size`, or an `action_space`. `info["truncation"]` tells truncation from termination.
    - gymnax, and classes of your own: `reset_env(key, params) -> obs, state` and `step_env(key, state, action, params)
      -> obs, state, reward, done, info`, or `..., reward, terminated, truncated, info`; `default_params`,
      `observation_space(params)` and `action_space(params)`. Without these two, `reset` and `step` are called, which
      must not reset by themselves. `params` may be missing everywhere. With `is_truncated(state, params)`, `done` is
      termination; without, `state.time >= params.max_steps_in_episode` tells truncation from it, if there are such.

    Args:
        env: the env.
        num_envs: how many lanes.
        autoreset, options: see FunctionalOptions.

    Attributes:
        observation_space, action_space: of one env, as Gymnasium spaces.

    Raises:
        BadCall: an option has a value that it cannot have.
        BadEnv: it has none of the protocols, or a space that has no arrays.
    """

    def __init__(self, env: Any, num_envs: int, autoreset: Any = "next_step", **options: Any):
        if num_envs < 1:
            raise BadCall(f"num_envs: expected at least 1, found {num_envs}")
        self.env, self.num_envs, self.options = env, num_envs, FunctionalOptions(autoreset, **options)
        self.autoreset, self.rng = self.options.autoreset, self.options.rng
        self._impl = FAST if self.rng == "fast" else "threefry2x32"
        self._lane = Lane(env, self.options.params, jax.eval_shape(lambda: jax.random.key(0, impl=self._impl)))
        self.observation_space, self.action_space = self._lane.observation_space, self._lane.action_space
        self._compiled: dict[str, Callable[..., Any]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.env!r}, {self.num_envs}, autoreset={self.autoreset!r})"

    # ---- pure functions ----------------------------------------------------------------------------------------

    def init(self, seed: Any = 0) -> Begun:
        """Begin the first episode of all lanes.

        Args:
            seed: an int, or a key of `jax.random`; lanes get different keys from it.

        Returns:
            The state and the first observations.
        """
        whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
        return self._call("_init", words_of(seed) if whole else seed)  # type: ignore[no-any-return]

    def step(
        self, state: FunctionalState, action: Tree, mask: Any = None, last: FunctionalStep | None = None
    ) -> Stepped:
        """Step the lanes, or reset those that are due for it.

        Args:
            state: what `init` or the last call returned.
            action: [n, ...], nested as the action space is; it has no effect where a lane is reset.
            mask: bool [n], only lanes where it is True are stepped.
            last: the last answer, which the other lanes repeat. Without it they answer with their last observation,
                reward 0 and False.
        """
        return self._call("_masked_step", state, self._read(action), mask, last)  # type: ignore[no-any-return]

    def reset_rows(self, state: FunctionalState, mask: Any, seeds: Any = None, seeded: Any = None) -> Begun:
        """Begin a new episode in the lanes where `mask` is True.

        Args:
            mask: bool [n].
            seeds: ints [n], or None: the lanes go on in their own streams. The same seed gives the same episodes in
                every lane.
            seeded: bool [n], which of the seeds count; all by default.

        Returns:
            The state and the last observations of all lanes, which are first ones where `mask` is True.

        Raises:
            BadCall: there is not one seed for each lane.
        """
        words = None if seeds is None else words_of(seeds)
        if words is not None and words.shape != (self.num_envs, 2):
            raise BadCall(f"seeds: expected {self.num_envs}, one for each lane, found {len(words)}")
        return self._call("_reset_rows", state, jnp.asarray(mask, bool), words, seeded)  # type: ignore[no-any-return]

    def rollout(
        self,
        state: FunctionalState,
        policy: Policy | None,
        steps: int,
        policy_params: Any = None,
        key: jax.Array | None = None,
        collect: bool | Sequence[str] = True,
        unroll: int = 1,
    ) -> tuple[FunctionalState, Trajectory]:
        """Take some steps in one `lax.scan`.

        Args:
            policy: `policy(policy_params, obs, key) -> action`, on batches; None for random actions.
            steps: how many.
            key: for the policy, which gets another key in each step; by default it is derived from the state. The
                random actions of a lane do not depend on the number of lanes.
            collect: the names of the arrays to keep of each step, see Trajectory; False for the sums alone.
            unroll: steps in one pass of the loop.

        Raises:
            BadCall: `steps` is below 1.
        """
        if steps < 1:
            raise BadCall(f"steps: expected at least 1, found {steps}")
        names = COLLECTED if collect is True else () if collect is False else tuple(collect)
        for name in names:
            check_one_of("collect", name, COLLECTED)
        static = {"policy": policy, "steps": steps, "collect": names, "unroll": unroll}
        return self._call("_rollout", state, policy_params, key, **static)  # type: ignore[no-any-return]

    def prepare(self, state: FunctionalState) -> FunctionalState:
        """Let the state keep the starts of new episodes, for your own loops around `step`; rollouts do so themselves.

        The state takes twice the memory, and resets cost little where episodes are long: the starts of all lanes are
        computed at once, when the first lane needs one that is not there.
        """
        return state._replace(spare=self._empty_spare(look=True))

    def sample(self, key: jax.Array) -> Tree:
        """Draw random actions for all lanes, [n, ...], as the action space's own `sample` does."""
        leaves = self._lane.action_leaves
        keys = [key] if len(leaves) == 1 else [jax.random.fold_in(key, i) for i in range(len(leaves))]
        draws = [draw(k, leaf, self.num_envs) for k, leaf in zip(keys, leaves, strict=True)]
        return assemble(self.action_space, draws)

    # ---- plain data --------------------------------------------------------------------------------------------

    def save(self, state: FunctionalState) -> dict[str, npt.NDArray[Any]]:
        """Return the state as plain arrays by name, for files. `load` makes the state again, on any device."""
        saved = {name: np.asarray(key_data(leaf)) for name, leaf in named(state._replace(spare=None))}
        return {"rng": np.array(self.rng), **saved}

    def load(self, saved: dict[str, npt.NDArray[Any]]) -> FunctionalState:
        """Make a state of what `save` returned.

        Raises:
            CannotSnapshot: it was saved by other envs, another number of them, or another `rng`.
        """
        if str(saved.get("rng")) != self.rng:
            raise CannotSnapshot(f"the state does not fit: its rng is {saved.get('rng')}, and here it is {self.rng}")
        template = jax.eval_shape(self._init, shaped((2,), np.uint32))[0]
        wanted = dict(named(template))
        if set(saved) != {*wanted, "rng"}:
            raise CannotSnapshot(f"the state does not fit: it differs in {sorted({*wanted, 'rng'} ^ set(saved))[:4]}")
        leaves = [restored(name, saved[name], leaf) for name, leaf in wanted.items()]
        return jax.tree.unflatten(jax.tree.structure(template), leaves)  # type: ignore[no-any-return]

    # ---- how it is done ----------------------------------------------------------------------------------------

    def _call(self, name: str, *args: Any, **static: Any) -> Any:
        """Call a function as it is while JAX traces, and a compiled version of it, which is kept, otherwise."""
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
            return getattr(self, name)(*args, **static)
        if name not in self._compiled:
            self._compiled[name] = jax.jit(getattr(self, name), static_argnames=tuple(static))
        return self._compiled[name](*args, **static)

    def _init(self, seed: Any) -> Begun:
        n = self.num_envs
        keys = jax.vmap(jax.random.fold_in, (None, 0))(self._root(seed), jnp.arange(n, dtype=jnp.uint32))
        episode = jnp.zeros(n, jnp.int32)
        inner, obs = self._begin(keys, episode)
        none = jnp.zeros(n, jnp.int32)
        return FunctionalState(inner, obs, keys, episode, none, jnp.zeros(n, jnp.uint8), none), obs

    def _root(self, seed: Any) -> jax.Array:
        if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
            same = seed.dtype == jax.eval_shape(lambda: jax.random.key(0, impl=self._impl)).dtype
            return seed if same else self._key(jax.random.bits(seed, (2,), jnp.uint32))
        if seed.shape == (2,) and seed.dtype == jnp.uint32:  # two words, or an old key, which is the same
            return self._key(seed)
        if seed.shape == () and jnp.issubdtype(seed.dtype, jnp.integer):
            return self._key(jnp.stack([seed.astype(jnp.uint32), jnp.uint32(0)]))
        raise BadCall(f"seed: expected an int or a key of jax.random, found {seed.dtype} of shape {seed.shape}")

    def _key(self, words: Any) -> jax.Array:
        """Make a key of a seed's low and high word."""
        key = jax.random.key(words[0], impl=self._impl)
        return where(words[1] != 0, jax.random.fold_in(key, words[1]), key)  # type: ignore[no-any-return]

    def _begin(self, keys: jax.Array, episode: jax.Array) -> tuple[Tree, Tree]:
        return jax.vmap(self._lane.start)(jax.vmap(jax.random.fold_in)(keys, 2 * episode))

    def _step(self, state: FunctionalState, action: Tree, look: bool = True) -> Stepped:
        """Step all lanes; without `look`, observations are not needed, and `state` has none."""
        # JAX drops what is not used: an env without noise pays for no keys.
        keys = jax.vmap(jax.random.fold_in)(state.keys, 2 * state.episode + 1)
        keys = jax.vmap(jax.random.fold_in)(keys, state.steps)
        inner, obs, reward, terminated, truncated, info = jax.vmap(self._lane.advance)(keys, state.inner, action)
        if self.options.max_episode_steps is not None:
            truncated |= state.steps + 1 >= self.options.max_episode_steps
        obs = obs if look else None
        # The rules of autoreset have their model in shoal/envs/autoreset.py.
        stays = (state.over != 0) & (self.autoreset != "same_step")
        idle = jnp.zeros((), reward.dtype)
        reward, info = where(stays, idle, reward), where(stays, jax.tree.map(jnp.zeros_like, info), info)
        if self.autoreset == "disabled":
            inner, obs = where(stays, state.inner, inner), where(stays, state.obs, obs)
            terminated = where(stays, state.over & _TERMINATED != 0, terminated)
            truncated = where(stays, state.over & _TRUNCATED != 0, truncated)
            steps = state.steps + ~stays
            state = state._replace(inner=inner, obs=obs, steps=steps, over=_over(terminated, truncated))
            return state, FunctionalStep(obs, reward, terminated, truncated, jnp.zeros_like(stays), None, info)
        if self.autoreset == "next_step":
            terminated, truncated = terminated & ~stays, truncated & ~stays
            due, final_obs, over = stays, None, _over(terminated, truncated)
        else:
            due, final_obs, over = terminated | truncated, obs, state.over
        start, spare = self._starts(state, due, look)
        inner, obs = where(due, start[0], inner), where(due, start[1] if look else None, obs)
        episode, steps = state.episode + due, where(due, jnp.zeros((), jnp.int32), state.steps + 1)
        state = FunctionalState(inner, obs, state.keys, episode, steps, over, state.rollouts, spare)
        return state, FunctionalStep(obs, reward, terminated, truncated, due, final_obs, info)

    def _starts(self, state: FunctionalState, due: jax.Array, look: bool) -> tuple[tuple[Tree, Tree], Spare | None]:
        """Return the starts of the next episodes, valid at least where they are due, and what is spare after that."""

        def begin() -> tuple[Tree, Tree]:
            inner, obs = self._begin(state.keys, state.episode + 1)
            return inner, obs if look else None

        spare = state.spare
        if spare is None and not self.options.prepares:
            return begin(), None
        if spare is None:
            return jax.lax.cond(jnp.any(due), begin, lambda: zeros(jax.eval_shape(begin))), None
        missing = jnp.any(due & ~spare.fresh)
        inner, obs = jax.lax.cond(missing, begin, lambda: (spare.inner, spare.obs))
        return (inner, obs), Spare(inner, obs, (spare.fresh | missing) & ~due)

    def _empty_spare(self, look: bool) -> Spare:
        keys = shaped((self.num_envs,), self._lane.key.dtype)
        inner, obs = zeros(jax.eval_shape(self._begin, keys, shaped((self.num_envs,), np.int32)))
        return Spare(inner, obs if look else None, jnp.zeros(self.num_envs, bool))

    def _masked_step(self, state: FunctionalState, action: Tree, mask: Any, last: FunctionalStep | None) -> Stepped:
        after, answer = self._step(state, action)
        if mask is None:
            return after, answer
        mask = jnp.asarray(mask, bool)
        if last is None:
            final_obs = None if answer.final_obs is None else state.obs
            last = jax.tree.map(jnp.zeros_like, answer)._replace(obs=state.obs, final_obs=final_obs)
        return where(mask, after, state), where(mask, answer, last)

    def _reset_rows(self, state: FunctionalState, mask: jax.Array, words: Any, seeded: Any) -> Begun:
        keys, episode = state.keys, state.episode + mask
        if words is not None:
            anew = mask if seeded is None else mask & jnp.asarray(seeded, bool)
            keys = where(anew, jax.vmap(self._key)(words), keys)
            episode = where(anew, jnp.zeros((), jnp.int32), episode)
        inner, obs = self._begin(keys, episode)
        inner, obs = where(mask, inner, state.inner), where(mask, obs, state.obs)
        steps, over = (where(mask, jnp.zeros((), x.dtype), x) for x in (state.steps, state.over))
        spare = state.spare and state.spare._replace(fresh=state.spare.fresh & ~mask)
        return FunctionalState(inner, obs, keys, episode, steps, over, state.rollouts, spare), obs

    def _rollout(
        self,
        state: FunctionalState,
        policy_params: Any,
        key: jax.Array | None,
        *,
        policy: Policy | None,
        steps: int,
        collect: tuple[str, ...],
        unroll: int,
    ) -> tuple[FunctionalState, Trajectory]:
        before = state
        state = state._replace(rollouts=state.rollouts + 1)
        if key is None:
            key = jax.random.fold_in(state.keys[0], _POLICY_STREAM)
            key = jax.random.fold_in(jax.random.fold_in(key, state.episode[0]), state.rollouts[0])
        looks = policy is not None or bool({"obs", "final_obs"} & {*collect}) or self.autoreset == "disabled"

        def step(carry: tuple[FunctionalState, jax.Array], t: jax.Array, look: bool) -> Any:
            state, total = carry
            mine = jax.random.fold_in(key, t)
            action = self.sample(mine) if policy is None else self._read(policy(policy_params, state.obs, mine))
            saw = state.obs
            state, answer = self._step(state, action, look)
            kept = {"obs": saw, "action": action} | {k: v for k, v in answer._asdict().items() if k != "obs"}
            return (state, total + answer.reward), {name: kept[name] for name in collect}

        if state.spare is None and self.options.prepares and self.autoreset != "disabled":
            state = state._replace(spare=self._empty_spare(looks))
        if not looks:
            state = state._replace(obs=None, spare=state.spare and state.spare._replace(obs=None))
        turns = jnp.arange(steps if looks else steps - 1)
        carry = state, jnp.zeros(self.num_envs, jnp.float32)
        (state, total), kept = jax.lax.scan(lambda c, t: step(c, t, looks), carry, turns, unroll=unroll)
        if not looks:  # only the last step computes observations, for the state
            (state, total), at_last = step((state._replace(spare=None), total), jnp.asarray(steps - 1), True)
            kept = jax.tree.map(lambda many, one: jnp.concatenate([many, one[None]]), kept, at_last)
        state = state._replace(spare=None if before.spare is None else state.spare or self._empty_spare(look=True))
        fields = {name: kept.get(name) for name in COLLECTED}
        return state, Trajectory(**fields, summary=self._summary(before, state, total, steps))

    def _summary(
        self, before: FunctionalState, after: FunctionalState, reward: jax.Array, steps: int
    ) -> RolloutSummary:
        begun = after.episode - before.episode
        ended = begun + (after.over != 0) - (before.over != 0)
        taken = {"next_step": steps - begun, "same_step": jnp.full_like(begun, steps)}
        return RolloutSummary(reward, ended, taken.get(self.autoreset, after.steps - before.steps))

    def _read(self, action: Tree) -> Tree:
        """Return actions in the env's own types, nested as the space is."""
        return assemble(
            self.action_space, [read_leaf(action, leaf, self.num_envs) for leaf in self._lane.action_leaves]
        )


def functional(env: Any, num_envs: int, **options: Any) -> BatchedFunctionalEnv:
    """Make many copies of one functional env; the options are FunctionalOptions.

    Args:
        env: an env in the style of gymnax, Brax or Gymnasium's FuncEnv, or any with `reset` and `step`.
        num_envs: how many copies.
        **options: the fields of FunctionalOptions.
    """
    return BatchedFunctionalEnv(env, num_envs, **options)


def _over(terminated: jax.Array, truncated: jax.Array) -> jax.Array:
    return terminated.astype(jnp.uint8) * _TERMINATED + truncated.astype(jnp.uint8) * _TRUNCATED

"""Compiled envs on a GPU: states, observations, rewards and flags live there, and stay there."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.batch import Rollout
from shoal.compiled.cuda.arrays import DeviceArray, Streams, is_capturing, pointer_of
from shoal.compiled.cuda.build import build, check, driver, explained, simulated
from shoal.compiled.cuda.source import BLOCK, KernelKind, arguments, has_columns, length_type, narrow
from shoal.compiled.definition import Definition, define
from shoal.compiled.policy import is_policy, random_policy
from shoal.compiled.pool_envs import find_class
from shoal.compiled.source_parts import row_shape, wide_type
from shoal.envs.group import MODES
from shoal.errors import BadAction, BadCall, PoolClosed
from shoal.spaces.leaves import assemble, get_path
from shoal.support.checks import check_choice, whole_number

__all__ = ["CudaEnvs"]

Array = npt.NDArray[Any]
MOST_SEEN = 1024


@dataclass(frozen=True)
class DeviceRollout(Rollout):
    """A rollout whose arrays are on the GPU.

    Attributes:
        arrays: the same memory, as kernels write it.
    """

    arrays: dict[str, Any]
    steps: int
    envs: CudaEnvs


class CudaEnvs:
    """Many envs of one class on a GPU, stepped by one launch.

    Arrays that are handed out are the memory that the next step writes: convert them once
    (`obs = torch.from_dlpack(envs.obs)`), and look at them after each step. Everything is asynchronous, on the stream
    of the actions: PyTorch's or CuPy's current one. Actions are not checked.

    Attributes:
        obs: what is seen now, nested as the space is.
        reward, terminated, truncated: the answers to the last actions.
        final_obs: under "same_step", the last observations of episodes that have ended in the last step; else None.
        episode_return, episode_length: of the episode so far, complete where it has just ended; None without
            `track_episodes`.

    Args:
        env: a class that derives from `shoal.compiled.Env`, or the id of one in the library.
        num_envs: how many.
        autoreset: "next_step" (the step after an episode's end begins one, and ignores its action), "same_step" or
            "disabled" (call `reset` with a mask).
        seed: env i has the seed `seed + i` (counted in lanes, where envs have several agents).
        precision: "single": floats of the state are kept, and calculated with, in 32 bits; "double" as the class says.
        track_episodes: keep returns and lengths of episodes, which costs a tenth of the speed of small envs.
        debug: check for exceptions in the class's code after each launch; slow.
        env_kwargs: for the class.
    """

    def __init__(
        self,
        env: Any,
        num_envs: int,
        *,
        autoreset: str = "next_step",
        seed: int | None = None,
        precision: str = "single",
        track_episodes: bool = False,
        debug: bool = False,
        env_kwargs: Mapping[str, Any] | None = None,
    ):
        check_choice("autoreset", autoreset, MODES)
        check_choice("precision", precision, ("single", "double"))
        env_class = find_class(env)
        check()
        self.definition: Definition = define(env_class, dict(env_kwargs or {}))
        self.num_envs = whole_number("num_envs", num_envs, 1, 2**31 - BLOCK)
        self.num_agents = self.definition.num_agents
        self.num_lanes = self.num_envs * self.num_agents
        self.single_observation_space = self.definition.observation_space
        self.single_action_space = self.definition.action_space
        self.autoreset, self.precision, self.track_episodes = autoreset, precision, bool(track_episodes)
        self._debug, self._streams, self._own_params = bool(debug), Streams(), False
        self._begun = False  # whether any env was ever reset
        self._kernels: dict[Any, Any] = {}
        self._graphs: Any = None
        self._arrays = self._allocate(seed)
        if not simulated():
            driver().synchronize()  # other streams do not wait for the default one, by which all this was copied
            self._device = driver().current_context().device.id
        self._seen: set[Any] = set()  # actions that were stepped by once
        self.obs = self._nested("obs")
        self.final_obs = self._nested("final") if autoreset == "same_step" else None
        self.reward, self.terminated, self.truncated = map(self._lanes, ("reward", "terminated", "truncated"))
        self.episode_return = self._lanes("episode_return") if track_episodes else None
        self.episode_length = self._lanes("episode_length") if track_episodes else None

    # ---- memory ----------------------------------------------------------------------------------------------

    def _allocate(self, seed: int | None) -> dict[str, Any]:
        definition, count = self.definition, self.num_envs
        self._number = np.float32 if self.precision == "single" else np.float64
        self._dtype = narrow(definition.dtype) if self.precision == "single" else definition.dtype
        host: dict[str, Array] = {
            "seeds": self._first_seeds(seed), "rngs": np.zeros((count, 1), np.uint64),
            "lengths": np.zeros(count, length_type(definition, self.autoreset)),
        }  # fmt: skip
        states = definition.new_states(count).astype(self._dtype)
        if not has_columns(definition):
            host["states"] = states
        else:
            host.update({f"field_{name}": np.ascontiguousarray(states[name]) for name in self._dtype.names or ()})
        arrays = {**{name: driver().to_device(array) for name, array in host.items()}, **self._answers(1)}
        if "states" in arrays:
            arrays["state_bytes"] = _as_bytes(arrays["states"])
        if self.track_episodes:
            arrays["totals"] = arrays["episode_return"]
        return arrays

    def _first_seeds(self, seed: int | None) -> Array:
        """Of each env its seed, and the number of its next episode."""
        seeds = np.zeros((self.num_envs, 2), np.uint64)
        if seed is None:
            seeds[:, 0] = np.frombuffer(secrets.token_bytes(8 * self.num_envs), np.uint64)
        else:
            seeds[:, 0] = np.arange(self.num_envs, dtype=np.uint64) * np.uint64(self.num_agents)
            seeds[:, 0] += np.uint64(int(seed) % 2**64)
        return seeds

    def _answers(self, steps: int, seen: int = 1) -> dict[str, Any]:
        """Zeros for what so many steps answer, and for `seen` rows of observations."""
        agents, rows, leaves = self.num_agents, steps * self.num_envs, self.definition.obs_leaves
        flat = (rows,) if agents == 1 else (rows, agents)
        made: dict[str, Any] = {
            f"obs_{i}": self._streams.zeros((seen * self.num_envs, *row_shape(leaf, agents)), leaf.dtype)
            for i, leaf in enumerate(leaves)
        }
        made["reward"] = self._streams.zeros(flat, self._number)
        made["terminated"], made["truncated"] = self._streams.zeros(flat, np.bool_), self._streams.zeros(flat, np.bool_)
        if self.autoreset == "same_step":
            for i, leaf in enumerate(leaves):
                made[f"final_{i}"] = self._streams.zeros((rows, *row_shape(leaf, agents)), leaf.dtype)
        if self.track_episodes:
            made["episode_return"] = self._streams.zeros(flat, self._number)
            made["episode_length"] = self._streams.zeros(flat, np.int32)
        return made

    def _nested(self, kind: str, arrays: Mapping[str, Any] | None = None, steps: int | None = None) -> Any:
        leaves = self.definition.obs_leaves
        parts = [self._lanes(f"{kind}_{i}", arrays, steps, leaf.shape) for i, leaf in enumerate(leaves)]
        return assemble(self.single_observation_space, parts)

    def _lanes(
        self, name: str, arrays: Mapping[str, Any] | None = None, steps: int | None = None, shape: Sequence[int] = ()
    ) -> DeviceArray:
        """An array as the caller sees it: [lanes, ...], or [steps, lanes, ...]."""
        array = (self._arrays if arrays is None else arrays)[name]
        front = (self.num_lanes,) if steps is None else (steps, self.num_lanes)
        return DeviceArray(array.reshape((*front, *shape)), self._streams)

    # ---- launches --------------------------------------------------------------------------------------------

    def _kind(self, does: str, masked: bool = False, policy_params: int = 0) -> KernelKind:
        steps = does != "reset"
        mode = self.autoreset if steps and not masked else "disabled"
        return KernelKind(does, mode, masked, self._own_params, self.track_episodes and steps, policy_params)

    def _launcher(self, kind: KernelKind, given: Mapping[str, Any], policy: Any = None) -> Any:
        """A function (stream) that launches a kernel with the envs' own arrays and those given."""
        if not self._begun and kind.does != "reset":
            raise BadCall(f"{kind.does}: the envs have not begun an episode; call reset() first")
        if (kind, policy) not in self._kernels:
            self._kernels[kind, policy] = build(self.definition, kind, self.precision, policy, self._debug)
        kernel = self._kernels[kind, policy]
        values = {**self._arrays, "count": np.uint32(self.num_envs), "steps": np.int32(1), **given}
        if not self._own_params and has_columns(self.definition):
            for name in self.definition.params:
                values[f"field_{name}"] = self._dtype[name].type(self._default(name))
        args = [values[name] for name in arguments(self.definition, kind)]
        blocks = -(-self.num_envs // BLOCK)

        def launch(stream: Any) -> None:
            try:
                with warnings.catch_warnings():  # few envs do not fill a GPU, as everybody knows
                    warnings.simplefilter("ignore")
                    ready = kernel[blocks, BLOCK, stream]
                ready(*args)
            except Exception as error:
                if type(error).__module__.startswith("numba."):
                    raise explained(self.definition, error) from None
                if self._debug:  # Numba mixes up which of several functions has raised what
                    raise RuntimeError(
                        f'{self.definition.name} raised on the GPU; run it with backend="compiled" and '
                        "env_kwargs={'debug': True} to see what and where"
                    ) from None
                raise

        return launch

    def _default(self, name: str) -> Any:
        return self.definition.defaults[name]

    def reset(self, seed: int | None = None, mask: Any = None) -> Any:
        """Begin an episode in all envs, or in those where the mask [num_envs] is set; returns `obs`.

        Args:
            seed: for the streams of random numbers of all envs; as they go on by default.
        """
        self._check_open()
        if seed is not None:
            if mask is not None:
                raise BadCall("reset: a seed is for all envs, so it goes without a mask")
            self._streams.put(self._arrays["seeds"], self._first_seeds(seed))
        given = {} if mask is None else {"mask": self._mask(mask)}
        self._launcher(self._kind("reset", masked=mask is not None), given)(self._streams.last)
        self._begun = True
        return self.obs

    def reseed(self, seeds: Sequence[int | None]) -> None:
        """Give envs seeds of their own, which their next reset begins with; None for those that go on as they are."""
        self._check_open()
        at = np.array([i for i, seed in enumerate(seeds) if seed is not None], np.int64)
        if not len(at):
            return
        whole = self._streams.fetch(self._arrays["seeds"])
        whole[at] = 0
        whole[at, 0] = np.array([int(seed) % 2**64 for seed in seeds if seed is not None], np.uint64)
        self._streams.put(self._arrays["seeds"], whole)

    def step(self, actions: Any) -> tuple[Any, DeviceArray, DeviceArray, DeviceArray]:
        """Step all envs: (obs, reward, terminated, truncated), which are always the same arrays.

        Args:
            actions: a batch, nested as the space is, of arrays on the GPU (PyTorch, CuPy, JAX, Numba), which are not
                copied and must stay as they are until the step is over; or on the host.
        """
        key, handle, leaves = self._look(actions)
        if key is None or self._graphs is None or not self._graphs.launch(key, self._streams.number(handle)):
            self._launch_step(key, handle, leaves)
        return self.obs, self.reward, self.terminated, self.truncated

    def _launch_step(self, key: Any, handle: int, leaves: Sequence[Any]) -> None:
        """By Numba; and what comes for the second time is captured for the next."""
        self._check_open()
        launch = self._launcher(self._kind("step"), self._take(leaves))
        launch(self._streams.use(handle))
        if key is None or simulated() or self._debug or is_capturing(handle):
            return
        if key not in self._seen:
            if len(self._seen) > MOST_SEEN:  # somebody brings new arrays all the time
                self._seen.clear()
            self._seen.add(key)
            return
        self._seen.discard(key)
        if self._graphs is None:
            from shoal.compiled.cuda.graphs import Graphs

            self._graphs = Graphs()
        self._graphs.capture(key, launch)

    def step_rows(self, mask: Any, actions: Any) -> None:
        """Step the envs where the mask [num_envs] is set, and nothing else: no episode is begun or ended by it."""
        self._check_open()
        _, handle, leaves = self._look(actions)
        given = {**self._take(leaves), "mask": self._mask(mask)}
        self._launcher(self._kind("step", masked=True), given)(self._streams.use(handle))

    def _look(self, actions: Any) -> tuple[Any, int, Sequence[Any]]:
        """What tells these actions from others (None on the host), the stream they are ready on, and their leaves."""
        if not self.definition.nested_action:
            key, handle = pointer_of(actions)
            return key, self._streams.current if key is None else handle, (actions,)
        try:
            leaves = [get_path(actions, leaf.path) for leaf in self.definition.action_leaves]
        except (KeyError, IndexError, TypeError):
            raise BadAction(
                f"actions: expected them nested as {self.single_action_space}, found {actions!r:.100}"
            ) from None
        found = [pointer_of(value) for value in leaves]
        if not found or any(key is None for key, _ in found):
            return None, self._streams.current, leaves
        return tuple(key for key, _ in found), found[-1][1], leaves

    def _take(self, leaves: Sequence[Any]) -> dict[str, Any]:
        """Actions as a kernel gets them."""
        taken = {}
        for i, (leaf, value) in enumerate(zip(self.definition.action_leaves, leaves, strict=True)):
            expected = (self.num_lanes, *leaf.shape)
            array = self._on_device(value, wide_type(leaf) if leaf.dtype.kind != "f" else leaf.dtype)
            if tuple(array.shape) != expected:
                raise BadAction(f"actions{leaf.name}: expected shape {expected}, found {tuple(array.shape)}")
            if self.num_agents > 1:
                array = array.reshape((self.num_envs, self.num_agents, *leaf.shape))
            taken[f"action_{i}"] = array
        return taken

    def _on_device(self, value: Any, dtype: Any) -> Any:
        if isinstance(value, DeviceArray):
            return value.array
        if pointer_of(value)[0] is None:
            return driver().to_device(np.ascontiguousarray(value, dtype), stream=self._streams.last)
        if hasattr(value, "get_device") and value.get_device() != self._device:
            raise BadAction(
                f"the array lies on GPU {value.get_device()}, and the envs on GPU {self._device}: choose one GPU for "
                "both by CUDA_VISIBLE_DEVICES"
            )
        return driver().as_cuda_array(value.detach() if hasattr(value, "detach") else value, sync=False)

    def _mask(self, mask: Any) -> Any:
        array = self._on_device(mask, np.bool_)
        if tuple(array.shape) != (self.num_envs,):
            raise BadCall(f"mask: expected one for each of {self.num_envs} envs, found shape {tuple(array.shape)}")
        return array

    # ---- rollouts --------------------------------------------------------------------------------------------

    def rollout(
        self, policy: Any, steps: int, params: Sequence[Any] = (), seed: int | None = None, out: Rollout | None = None
    ) -> Rollout:
        """So many steps by a policy that is compiled too, in one launch: arrays [steps, lanes, ...] on the GPU.

        Args:
            policy: "random", or a function marked by `shoal.compiled.policy`.
            params: arrays for it.
            seed: for its random numbers.
            out: what an earlier rollout of as many steps has returned, to be written again; new arrays by default.

        Returns:
            as `Pool.rollout` does; `episode_return` and `episode_length` are None without `track_episodes`.
        """
        if self.autoreset == "disabled":
            raise BadCall("rollout: episodes must begin by themselves; make the envs with another autoreset")
        self._check_open()
        steps = whole_number("steps", steps, 1, 2**31 - 1)
        choose, values = self._policy(policy, params)
        stream = self._streams.last
        arrays = self._room(steps) if out is None else self._reused(out, steps)
        for i, _ in enumerate(self.definition.obs_leaves):  # the first row is what is seen now
            arrays[f"obs_{i}"][: self.num_envs].copy_to_device(self._arrays[f"obs_{i}"], stream=stream)
        given = {**arrays, **{f"policy_param_{i}": value for i, value in enumerate(values)}}
        given["policy_seed"] = np.uint64(secrets.randbits(62) if seed is None else int(seed) % 2**64)
        kind = self._kind("rollout", policy_params=len(values))
        self._launcher(kind, {**given, "steps": np.int32(steps)}, choose)(stream)
        self._end_rollout(arrays, steps, stream)
        return self._record(arrays, steps) if out is None else out

    def _room(self, steps: int) -> dict[str, Any]:
        """Arrays for a rollout."""
        made, agents = self._answers(steps, steps + 1), self.num_agents
        for i, leaf in enumerate(self.definition.action_leaves):
            shape = leaf.shape if agents == 1 else (agents, *leaf.shape)
            made[f"action_{i}"] = self._streams.zeros((steps * self.num_envs, *shape), leaf.dtype)
        rows = (steps + 1) * self.num_envs
        made["began"] = self._streams.zeros((rows,) if agents == 1 else (rows, agents), np.bool_)
        return made

    def _reused(self, out: Rollout, steps: int) -> dict[str, Any]:
        arrays: dict[str, Any] | None = getattr(out, "arrays", None)
        if arrays is None or getattr(out, "steps", None) != steps or getattr(out, "envs", None) is not self:
            raise BadCall(f"rollout: out must be what a rollout of {steps} steps of these very envs has returned")
        for i, _ in enumerate(self.definition.obs_leaves if self.autoreset == "same_step" else ()):
            self._streams.clear(arrays[f"final_{i}"])  # only those of episodes that end are written
        return arrays

    def _policy(self, policy: Any, params: Sequence[Any]) -> tuple[Any, list[Any]]:
        leaves = self.definition.action_leaves
        if isinstance(policy, str) and policy == "random":
            if len(leaves) != 1:
                raise BadCall('rollout: "random" is for action spaces of one part; write a compiled.policy for others')
            if len(params):
                raise BadCall('rollout: params are for a compiled.policy, and "random" takes none')
            policy, params = random_policy(leaves[0])
        elif not is_policy(policy):
            raise BadCall(f'rollout: expected a function marked by shoal.compiled.policy or "random", found {policy!r}')
        arrays = [param if hasattr(param, "shape") else np.atleast_1d(param) for param in params]
        return policy, [
            self._on_device(array, narrow(array.dtype) if self._is_host(array) else None) for array in arrays
        ]

    def _is_host(self, array: Any) -> bool:
        return self.precision == "single" and isinstance(array, np.ndarray)

    def _end_rollout(self, arrays: Mapping[str, Any], steps: int, stream: Any) -> None:
        """What was answered last is what the envs show."""
        last, rows = slice(steps * self.num_envs, None), slice((steps - 1) * self.num_envs, None)
        for i, _ in enumerate(self.definition.obs_leaves):
            self._arrays[f"obs_{i}"].copy_to_device(arrays[f"obs_{i}"][last], stream=stream)
        names = ["reward", "terminated", "truncated", *(["episode_length"] if self.track_episodes else [])]
        if self.autoreset == "same_step":
            names += [f"final_{i}" for i, _ in enumerate(self.definition.obs_leaves)]
        for name in names:
            self._arrays[name].copy_to_device(arrays[name][rows], stream=stream)

    def _record(self, arrays: Mapping[str, Any], steps: int) -> Rollout:
        leaves = self.definition.action_leaves
        actions = [self._lanes(f"action_{i}", arrays, steps, leaf.shape) for i, leaf in enumerate(leaves)]
        names = ["reward", "terminated", "truncated", *["episode_return", "episode_length"] * self.track_episodes]
        answers: dict[str, Any] = {"episode_return": None, "episode_length": None}
        answers.update({name: self._lanes(name, arrays, steps) for name in names})
        return DeviceRollout(
            obs=self._nested("obs", arrays, steps + 1),
            actions=assemble(self.single_action_space, actions),
            began=self._lanes("began", arrays, steps + 1),  # type: ignore[arg-type]
            final_obs=self._nested("final", arrays, steps) if self.autoreset == "same_step" else None,
            **answers,
            arrays=dict(arrays),
            steps=steps,
            envs=self,
        )

    # ---- state -----------------------------------------------------------------------------------------------

    def get(self, name: str) -> Array:
        """A field of the state, or a param, of all envs, in the host's memory."""
        self._check_field(name)
        if has_columns(self.definition):
            if name in self.definition.params and not self._own_params:
                return np.full(self.num_envs, self._default(name), self._dtype[name])
            return self._streams.fetch(self._arrays[f"field_{name}"])
        return self._streams.fetch(self._arrays["states"])[name]

    def set(self, name: str, values: Any) -> None:
        """Set a field or a param: one value for all envs, or one for each."""
        self._check_field(name)
        field = self._dtype[name]
        whole = np.broadcast_to(np.asarray(values, field.base), (self.num_envs, *field.shape))
        if has_columns(self.definition):
            if name in self.definition.params:
                self._own_params = True
                self._forget_graphs()
            self._streams.put(self._arrays[f"field_{name}"], np.ascontiguousarray(whole))
        else:
            states = self._streams.fetch(self._arrays["states"])
            states[name] = whole
            self._streams.put(self._arrays["states"], states)

    def _check_open(self) -> None:
        if not self._arrays:
            raise PoolClosed("the envs were closed")

    def _check_field(self, name: str) -> None:
        self._check_open()
        if name not in (self._dtype.names or ()):
            fields = ", ".join(self._dtype.names or ())
            raise AttributeError(f"{self.definition.name} has no field {name!r}: its fields are {fields}")

    def _saved_names(self) -> list[str]:
        names = ["seeds", "rngs", "lengths"]
        names += ["episode_return", "episode_length"] if self.track_episodes else []
        own = ["states"] if not has_columns(self.definition) else [f"field_{name}" for name in self._dtype.names or ()]
        return [*names, *own]

    def save(self) -> dict[str, Array]:
        """The state of all envs, as arrays in the host's memory with a row for each."""
        self._check_open()
        saved = {name: self._streams.fetch(self._arrays[name]) for name in self._saved_names()}
        if "states" in saved:  # as plain bytes, which go into any file
            saved["states"] = saved["states"].view(np.uint8).reshape(self.num_envs, -1)
        return saved

    def load(self, saved: Mapping[str, Array], mask: Any = None) -> None:
        """The counterpart of `save`; only for envs where the mask is set. `obs` is as before until the next step."""
        present = self.save()
        found = {name: np.shape(saved[name]) for name in present if name in saved}
        expected = {name: old.shape for name, old in present.items()}
        if found != expected:
            raise BadCall(f"load: expected what save() of such envs has returned, {expected}, found {found}")
        for name, old in present.items():
            new = np.asarray(saved[name])
            rows = new if mask is None else np.where(np.reshape(mask, (-1, *[1] * (old.ndim - 1))), new, old)
            whole = np.ascontiguousarray(rows, old.dtype)
            self._streams.put(self._arrays[name], whole.view(self._dtype).reshape(-1) if name == "states" else whole)
        if any(f"field_{name}" in present for name in self.definition.params):
            self._own_params = self._own_params or self._params_differ()
            self._forget_graphs()
        self._begun = True

    def _params_differ(self) -> bool:
        columns = {name: self._streams.fetch(self._arrays[f"field_{name}"]) for name in self.definition.params}
        return any((column != self._dtype[name].type(self._default(name))).any() for name, column in columns.items())

    def close(self) -> None:
        """Give the GPU's memory back, as far as nobody else holds it."""
        self._forget_graphs()
        self._arrays, self._kernels = {}, {}

    def _forget_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.close()
        self._graphs = None
        self._seen.clear()


def _as_bytes(states: Any) -> Any:
    if simulated():
        return type(states)(states._ary.view(np.uint8).reshape(len(states), -1))
    return states.view(np.uint8).reshape(len(states), states.dtype.itemsize)

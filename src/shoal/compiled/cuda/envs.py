"""Compiled envs on a GPU: states, observations, rewards and flags are there, and stay there.

`PoolEnvs` is `backend="cuda"`: a pool of such envs. Answers are copied to the host.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.batch import Rollout
from shoal.compiled.cuda import registers
from shoal.compiled.cuda.arrays import DeviceArray, bindings, is_capturing, pointer_of
from shoal.compiled.cuda.build import build, check, driver, explained, simulated
from shoal.compiled.cuda.memory import Array, CudaOptions, DeviceMemory, DeviceRollout
from shoal.compiled.cuda.source import BLOCK, KernelKind, arguments
from shoal.compiled.definition import Definition, define, find_class
from shoal.compiled.mlp import Mlp
from shoal.compiled.narrow import narrow
from shoal.compiled.policy import is_policy, random_policy, random_policy_within
from shoal.compiled.template import wide_type
from shoal.errors import BadAction, BadCall
from shoal.spaces.leaves import assemble, flatten, get_path
from shoal.support.checks import whole_number


class CudaEnvs(DeviceMemory):
    """Many envs of one class on a GPU, stepped by one launch.

    The arrays that it returns are the memory that the next step writes: convert them once
    (`obs = torch.from_dlpack(envs.obs)`), and read them after each step. Everything is asynchronous, on the stream
    of the actions: PyTorch's or CuPy's current one. Actions are not checked.

    Attributes:
        obs: the present observations, nested as the space is.
        reward, terminated, truncated: the answers to the last actions.
        final_obs: under "same_step", the last observations of episodes that have ended in the last step; else None.
        episode_return, episode_length: of the episode so far, complete where it has just ended; None without
            `track_episodes`.

    Args:
        env: a class that derives from `shoal.compiled.Env`, or the id of one in the library.
        num_envs: how many.
        options: see CudaOptions.
    """

    def __init__(self, env: Any, num_envs: int, **options: Any):
        given = CudaOptions(**options)
        env_class = find_class(env)
        check()
        definition = define(env_class, dict(given.env_kwargs or {}))
        super().__init__(definition, whole_number("num_envs", num_envs, 1, 2**31 - BLOCK), given)
        self.autoreset, self.precision = given.autoreset, given.precision
        self.track_episodes, self._debug = bool(given.track_episodes), bool(given.debug)
        self.single_observation_space, self.single_action_space = definition.observation_space, definition.action_space
        self._device = None if simulated() else driver().current_context().device.id
        self._policy_seed = self._streams.zeros((1,), np.dtype(np.uint64))
        self.obs = self._nested("obs")
        self.final_obs = self._nested("final") if self.autoreset == "same_step" else None
        self.reward, self.terminated, self.truncated = map(self._view, ("reward", "terminated", "truncated"))
        self.episode_return = self._view("episode_return") if self.track_episodes else None
        self.episode_length = self._view("episode_length") if self.track_episodes else None

    # ---- launches --------------------------------------------------------------------------------------------

    def _kind(self, does: str, masked: bool = False, policy_params: int = 0) -> KernelKind:
        steps = does != "reset"
        mode = self.autoreset if steps and not masked else "disabled"
        return KernelKind(does, mode, masked, self._own_params, self.track_episodes and steps, policy_params)

    def _launcher(self, kind: KernelKind, given: Mapping[str, Any], policy: Any = None, names: Any = arguments) -> Any:
        """Make a function (stream) that launches a kernel with the envs' own arrays and those given."""
        if not self._begun and kind.does != "reset":
            raise BadCall(f"{kind.does}: the envs have not begun an episode; call reset() first")
        if (kind, policy) not in self._kernels:
            self._kernels[kind, policy] = build(self.definition, kind, self.precision, policy, self._debug)
        kernel = self._kernels[kind, policy]
        values = {**self._arguments(), "count": np.uint32(self.num_envs), "steps": np.int32(1), **given}
        args = [values[name] for name in names(self.definition, kind)]
        blocks = -(-self.num_envs // BLOCK)

        def launch(stream: Any) -> None:
            try:
                with warnings.catch_warnings():  # Numba warns that few envs do not fill a GPU
                    warnings.simplefilter("ignore")
                    ready = kernel[blocks, BLOCK, stream]
                ready(*args)
            except Exception as error:
                if type(error).__module__.startswith("numba."):
                    raise explained(self.definition, error) from None
                if self._debug:  # Numba's own error may name the wrong one of several functions
                    raise RuntimeError(
                        f'{self.definition.name} raised on the GPU; run it with backend="compiled" and '
                        "env_kwargs={'debug': True} to see what and where"
                    ) from None
                raise

        return launch

    def reset(self, seed: int | None = None, mask: Any = None) -> Any:
        """Begin an episode in all envs, or in those where the mask [num_envs] is set; returns `obs`.

        Args:
            seed: for the random numbers of all envs; by default they go on as they are.

        Raises:
            BadCall: the mask does not fit, or there is a seed beside a mask.
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

    def step(self, actions: Any) -> tuple[Any, DeviceArray, DeviceArray, DeviceArray]:
        """Step all envs: (obs, reward, terminated, truncated), which are always the same arrays.

        Args:
            actions: a batch, nested as the space is, of arrays on the GPU (PyTorch, CuPy, JAX, Numba), which are not
                copied and must stay as they are until the step is over; or on the host.
        """
        key, handle, leaves = self._look(actions)
        if key is None or not self._graphs.launch(key, self._streams.number(handle)):
            self._check_open()
            launch = self._launcher(self._kind("step"), self._take(leaves))
            launch(self._streams.use(handle))
            if key is not None and not simulated() and not self._debug and not is_capturing(handle):
                self._graphs.capture_repeated(key, launch)
        return self.obs, self.reward, self.terminated, self.truncated

    def step_rows(self, mask: Any, actions: Any) -> None:
        """Step the envs where the mask [num_envs] is set, and nothing else: it begins and ends no episode.

        Args:
            actions: [num_envs, ...] on the GPU.
            mask: bool [num_envs].
        """
        self._check_open()
        _, handle, leaves = self._look(actions)
        given = {**self._take(leaves), "mask": self._mask(mask)}
        self._launcher(self._kind("step", masked=True), given)(self._streams.use(handle))

    def _look(self, actions: Any) -> tuple[Any, int, Sequence[Any]]:
        """Return a key of these actions' memory (None on the host), the stream they are ready on, and their leaves."""
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
        """Return actions as a kernel gets them."""
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

    def rollout(
        self, policy: Any, steps: int, params: Sequence[Any] = (), seed: int | None = None, out: Rollout | None = None
    ) -> Rollout:
        """Make so many steps by a compiled policy, in one launch: arrays [steps, lanes, ...] on the GPU.

        Args:
            policy: "random", or a function marked by `shoal.compiled.policy`.
            params: arrays for it.
            seed: for its random numbers.
            out: what an earlier rollout of as many steps has returned, to be written again; new arrays by default.

        Returns:
            what `Pool.rollout` returns; `episode_return` and `episode_length` are None without `track_episodes`.

        Raises:
            BadCall: episodes do not begin by themselves (`autoreset`), or policy, params or `out` do not fit.
        """
        if self.autoreset == "disabled":
            raise BadCall("rollout: episodes must begin by themselves; make the envs with another autoreset")
        self._check_open()
        steps = whole_number("steps", steps, 1, 2**31 - 1)
        if out is None:
            out = self._make_rollout(steps)
        elif not isinstance(out, DeviceRollout) or out.steps != steps or out.envs is not self:
            raise BadCall(f"rollout: out must be what a rollout of {steps} steps of these very envs has returned")
        self._put_policy_seed(secrets.randbits(62) if seed is None else int(seed) % 2**64)
        found = [pointer_of(param)[0] for param in params]
        key = ("rollout", out.number, policy, *found) if None not in found else None
        if key is None or not self._graphs.launch(key, self._streams.number(self._streams.current)):
            launch = self._rollout_launcher(policy, params, out)
            launch(self._streams.last)
            plain = simulated() or self._debug or is_capturing(self._streams.current)
            if key is not None and not plain and registers.fits(self.definition):
                self._graphs.capture_repeated(key, launch)
        return out

    def _rollout_launcher(self, policy: Any, params: Sequence[Any], out: DeviceRollout) -> Any:
        """Make a function (stream) that launches a rollout into the arrays of `out`."""
        choose, values = _chosen(policy, params, self.definition)
        arrays = out.arrays
        given = {**arrays, "policy_seed": self._policy_seed, "steps": np.int32(out.steps)}
        for i, value in enumerate(values):
            host = isinstance(value, np.ndarray) and self.precision == "single"
            given[f"policy_param_{i}"] = self._on_device(value, narrow(value.dtype) if host else None)
        kind = self._kind("rollout", policy_params=len(values))
        if registers.fits(self.definition):
            given.update((f"now_{name}", self._arrays[name]) for name in self._answer_names)
            return self._launcher(kind, given, choose, registers.arguments)
        launch_kernel = self._launcher(kind, given, choose)

        def launch(stream: Any) -> None:
            for i, _ in enumerate(self.definition.obs_leaves):  # the first row is the present observation
                arrays[f"obs_{i}"][: self.num_envs].copy_to_device(self._arrays[f"obs_{i}"], stream=stream)
                if f"final_{i}" in arrays:
                    self._streams.clear(arrays[f"final_{i}"])  # kernels write only those of episodes that end
            launch_kernel(stream)
            for name in self._answer_names:  # the envs show the last answers of the rollout
                last = slice(len(arrays[name]) - self.num_envs, None)
                self._arrays[name].copy_to_device(arrays[name][last], stream=stream)

        return launch

    def _put_policy_seed(self, seed: int) -> None:
        """Let the next rollout draw by this seed. It lies on the GPU, so that captured launches can have another."""
        if simulated():
            self._policy_seed.copy_to_device(np.array([seed], np.uint64))
            return
        api, handle = bindings(), self._streams.current
        self._streams.use(handle)
        address = int(self._policy_seed.__cuda_array_interface__["data"][0])
        for part in range(2):  # 32 bits each, which the driver takes by value
            api.cuMemsetD32Async(address + 4 * part, (seed >> 32 * part) & 0xFFFFFFFF, 1, api.CUstream(handle))


def _chosen(policy: Any, params: Sequence[Any], definition: Definition) -> tuple[Any, list[Any]]:
    """Return the function that chooses actions, and its params as arrays."""
    leaves = definition.action_leaves
    values = [param if hasattr(param, "shape") else np.atleast_1d(param) for param in params]
    if isinstance(policy, str) and policy == "random":
        if len(leaves) != 1:
            raise BadCall('rollout: "random" is for action spaces of one part; write a compiled.policy for others')
        if len(params):
            raise BadCall('rollout: params are for a compiled.policy, and "random" takes none')
        if registers.fits(definition):
            return random_policy_within(leaves[0]), []
        policy, bounds = random_policy(leaves[0])
        return policy, list(bounds)
    if isinstance(policy, Mlp):
        return policy.function(definition.obs_leaves, leaves, values, on_gpu=driver()), values
    if not is_policy(policy):
        raise BadCall(f'rollout: expected a function marked by shoal.compiled.policy or "random", found {policy!r}')
    return policy, values


class PoolEnvs:
    """CudaEnvs as a pool steps them, see `shoal.envs.batched.BatchedEnv`. Rows are lanes.

    Attributes:
        cuda: the envs themselves; their arrays are on the GPU.
    """

    render_mode = None

    def __init__(self, envs: CudaEnvs):
        self.cuda, self.group_size, self.num_envs = envs, envs.num_agents, envs.num_lanes
        self.single_observation_space = envs.single_observation_space
        self.single_action_space = envs.single_action_space
        self._leaves = flatten(self.single_observation_space)

    @property
    def fields(self) -> tuple[str, ...]:
        """Name what each env has for itself: the fields of its state, with its params."""
        return self.cuda.definition.dtype.names or ()

    def get_rows(self, name: str, rows: Sequence[int]) -> list[Any]:
        return list(self.cuda.get(name)[np.asarray(rows) // self.group_size])

    def set_rows(self, name: str, rows: Sequence[int], values: Sequence[Any]) -> None:
        whole = self.cuda.get(name)
        for row, value in zip(rows, values, strict=True):
            whole[row // self.group_size] = value
        self.cuda.set(name, whole)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the class itself, such as its metadata."""
        if name.startswith("_") or name == "cuda":
            raise AttributeError(name)
        return getattr(self.cuda.definition.env, name)

    def reset(self, mask: Array, seeds: Sequence[int | None]) -> Any:
        """See BatchedEnv. The seed of an env is that of its first lane."""
        self.cuda.reseed(seeds[:: self.group_size])
        self.cuda.reset(mask=mask[:: self.group_size])
        return self._obs()

    def step(self, mask: Array, actions: Any) -> tuple[Any, Array, Array, Array]:
        envs = self.cuda
        if mask.all():
            envs.step(actions)
        else:
            envs.step_rows(mask[:: self.group_size], actions)
        return self._obs(), envs.reward.numpy(), envs.terminated.numpy(), envs.truncated.numpy()

    def _obs(self) -> Any:
        leaves = [get_path(self.cuda.obs, leaf.path).numpy() for leaf in self._leaves]
        return assemble(self.single_observation_space, leaves)

    def save(self) -> dict[str, Array]:
        return {name: np.repeat(array, self.group_size, axis=0) for name, array in self.cuda.save().items()}

    def load(self, saved: dict[str, Array], mask: Array) -> None:
        rows = {name: array[:: self.group_size] for name, array in saved.items()}
        self.cuda.load(rows, mask[:: self.group_size])

    def close(self) -> None:
        self.cuda.close()


def make_envs(env: Any, num_envs: int, env_kwargs: Mapping[str, Any]) -> PoolEnvs:
    """Make the envs of a pool."""
    kwargs = dict(env_kwargs)
    options = {name: kwargs.pop(name) for name in ("precision", "debug") if name in kwargs}
    return PoolEnvs(CudaEnvs(env, num_envs, autoreset="disabled", env_kwargs=kwargs, **options))

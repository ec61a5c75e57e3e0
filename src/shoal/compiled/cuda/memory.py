"""The memory of envs on a GPU: their states, the arrays of their answers, and those of rollouts."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.batch import Rollout
from shoal.compiled.cuda.arrays import DeviceArray, Graphs, Streams
from shoal.compiled.cuda.build import driver, simulated
from shoal.compiled.cuda.source import length_type
from shoal.compiled.definition import Definition
from shoal.compiled.narrow import has_columns, narrow
from shoal.compiled.template import action_shape, row_shape
from shoal.envs.autoreset import KERNEL_MODES
from shoal.errors import BadCall, PoolClosed
from shoal.spaces.leaves import assemble
from shoal.support.checks import check_choice

Array = npt.NDArray[Any]
_rollout_numbers = itertools.count()


@dataclass(frozen=True)
class CudaOptions:
    """How envs on a GPU run.

    Attributes:
        autoreset: "next_step" (the step after an episode's end begins one, and ignores its action), "same_step" or
            "disabled" (call `reset` with a mask).
        seed: env i has the seed `seed + i` (counted in lanes, if envs have several agents).
        precision: "single": floats of the state are kept, and calculated with, in 32 bits; "double": as the class says.
        track_episodes: keep returns and lengths of episodes, which costs a tenth of the speed of small envs.
        debug: check for exceptions in the class's code after each launch; slow.
        env_kwargs: for the class.
    """

    autoreset: str = "next_step"
    seed: int | None = None
    precision: str = "single"
    track_episodes: bool = False
    debug: bool = False
    env_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_choice("autoreset", self.autoreset, KERNEL_MODES)
        check_choice("precision", self.precision, ("single", "double"))


@dataclass(frozen=True)
class DeviceRollout(Rollout):
    """A rollout with its arrays on the GPU.

    Attributes:
        arrays: the same memory, as kernels write it.
        envs: those that made it.
        number: one that no other rollout of this process has.
    """

    arrays: dict[str, Any]
    steps: int
    envs: DeviceMemory
    number: int


class DeviceMemory:
    """The memory of many envs of one class, and all that can be done without a launch: the base of `CudaEnvs`."""

    def __init__(self, definition: Definition, num_envs: int, options: CudaOptions):
        self.definition, self.num_envs, self._options = definition, num_envs, options
        self.num_agents = definition.num_agents
        self.num_lanes = num_envs * self.num_agents
        self._streams, self._graphs = Streams(), Graphs()
        self._kernels: dict[Any, Any] = {}
        self._begun = False  # whether any env was ever reset
        self._own_params = False  # whether each env has its own; if not, a kernel gets each param as one number
        single = options.precision == "single"
        self._number = np.float32 if single else np.float64
        self._dtype = narrow(definition.dtype) if single else definition.dtype
        self._columns = has_columns(definition)
        states = definition.new_states(num_envs).astype(self._dtype)
        names = self._dtype.names or ()
        host: dict[str, Array] = {
            "seeds": self._first_seeds(options.seed), "rngs": np.zeros((num_envs, 1), np.uint64),
            "lengths": np.zeros(num_envs, length_type(definition, options.autoreset)),
            **({f"field_{n}": np.ascontiguousarray(states[n]) for n in names} if self._columns else {"states": states}),
        }  # fmt: skip
        tracked = ["episode_return", "episode_length"] if options.track_episodes else []
        self._saved_names = [*host, *tracked]
        answers = self._make_answers(1)
        self._answer_names = list(answers)
        # By the names that kernels have for them; none after `close`.
        self._arrays = {**{name: driver().to_device(array) for name, array in host.items()}, **answers}
        if "states" in self._arrays:
            self._arrays["state_bytes"] = _as_bytes(self._arrays["states"])
        if options.track_episodes:
            self._arrays["totals"] = self._arrays["episode_return"]
        if not simulated():
            driver().synchronize()  # the default stream has copied all this, and other streams do not wait for it

    def _first_seeds(self, seed: int | None) -> Array:
        """Return the seed of each env, and the number of its next episode."""
        seeds = np.zeros((self.num_envs, 2), np.uint64)
        if seed is None:
            seeds[:, 0] = np.frombuffer(secrets.token_bytes(8 * self.num_envs), np.uint64)
        else:
            seeds[:, 0] = np.arange(self.num_envs, dtype=np.uint64) * np.uint64(self.num_agents)
            seeds[:, 0] += np.uint64(int(seed) % 2**64)
        return seeds

    # ---- answers ---------------------------------------------------------------------------------------------

    def _make_answers(self, steps: int, rollout: bool = False) -> dict[str, Any]:
        """Make zeros for the answers to so many steps; a rollout has actions too, and one more row of observations."""
        agents, leaves = self.num_agents, self.definition.obs_leaves
        flat = () if agents == 1 else (agents,)
        seen: dict[str, Any] = {f"obs_{i}": (row_shape(leaf, agents), leaf.dtype) for i, leaf in enumerate(leaves)}
        rows: dict[str, Any] = {"reward": (flat, self._number), "terminated": (flat, bool), "truncated": (flat, bool)}
        if self._options.autoreset == "same_step":
            rows.update({name.replace("obs", "final"): shape for name, shape in seen.items()})
        if self._options.track_episodes:
            rows.update({"episode_return": (flat, self._number), "episode_length": (flat, np.int32)})
        if rollout:
            seen["began"] = (flat, bool)
            for i, leaf in enumerate(self.definition.action_leaves):
                rows[f"action_{i}"] = (action_shape(leaf, agents), leaf.dtype)
        counted = [(seen, steps + 1 if rollout else steps), (rows, steps)]
        return {
            name: self._streams.zeros((count * self.num_envs, *shape), np.dtype(dtype))
            for arrays, count in counted
            for name, (shape, dtype) in arrays.items()
        }

    def _make_rollout(self, steps: int) -> DeviceRollout:
        """Make the record of a rollout that is still to be made."""
        arrays = self._make_answers(steps, rollout=True)
        tracked = ("episode_return", "episode_length")
        names = [name for name in ("reward", "terminated", "truncated", *tracked) if name in arrays]
        answers: dict[str, Any] = dict.fromkeys(tracked)
        answers.update({name: self._view(name, arrays, steps) for name in names})
        return DeviceRollout(
            obs=self._nested("obs", arrays, steps + 1),
            actions=self._nested("action", arrays, steps),
            began=self._view("began", arrays, steps + 1),  # type: ignore[arg-type]
            final_obs=self._nested("final", arrays, steps) if "final_0" in arrays else None,
            **answers,
            arrays=arrays,
            steps=steps,
            envs=self,
            number=next(_rollout_numbers),
        )

    def _view(
        self, name: str, arrays: Mapping[str, Any] | None = None, steps: int | None = None, shape: Sequence[int] = ()
    ) -> DeviceArray:
        """Return an array as the caller sees it: [lanes, ...], or [steps, lanes, ...]."""
        array = (self._arrays if arrays is None else arrays)[name]
        front = (self.num_lanes,) if steps is None else (steps, self.num_lanes)
        return DeviceArray(array.reshape((*front, *shape)), self._streams)

    def _nested(self, kind: str, arrays: Mapping[str, Any] | None = None, steps: int | None = None) -> Any:
        """Return the views of all leaves of "obs", "final" or "action", nested as the space is."""
        one, acts = self.definition, kind == "action"
        leaves = one.action_leaves if acts else one.obs_leaves
        parts = [self._view(f"{kind}_{i}", arrays, steps, leaf.shape) for i, leaf in enumerate(leaves)]
        return assemble(one.action_space if acts else one.observation_space, parts)

    # ---- state -----------------------------------------------------------------------------------------------

    def _arguments(self) -> dict[str, Any]:
        """Return the arrays as kernels get them, with numbers in place of params that are the same for all envs."""
        same = self.definition.params if self._columns and not self._own_params else ()
        return {**self._arrays, **{f"field_{name}": self._shared(name) for name in same}}

    def _shared(self, name: str) -> Any:
        """Return a param that is the same for all envs."""
        return self._dtype[name].type(self.definition.defaults[name])

    def reseed(self, seeds: Sequence[int | None]) -> None:
        """Give envs seeds of their own, which their next reset begins with; None for those that keep theirs."""
        self._check_open()
        at = np.array([i for i, seed in enumerate(seeds) if seed is not None], np.int64)
        if not len(at):
            return
        whole = self._streams.fetch(self._arrays["seeds"])
        whole[at] = 0
        whole[at, 0] = np.array([int(seed) % 2**64 for seed in seeds if seed is not None], np.uint64)
        self._streams.put(self._arrays["seeds"], whole)

    def get(self, name: str) -> Array:
        """Return a field of the state, or a param, of all envs, in the host's memory."""
        self._check_field(name)
        if not self._columns:
            return self._streams.fetch(self._arrays["states"])[name]
        if name in self.definition.params and not self._own_params:
            return np.full(self.num_envs, self._shared(name))
        return self._streams.fetch(self._arrays[f"field_{name}"])

    def set(self, name: str, values: Any) -> None:
        """Set a field or a param: one value for all envs, or one for each."""
        self._check_field(name)
        field = self._dtype[name]
        whole = np.broadcast_to(np.asarray(values, field.base), (self.num_envs, *field.shape))
        if self._columns:
            self._own_params = self._own_params or name in self.definition.params
            self._streams.put(self._arrays[f"field_{name}"], np.ascontiguousarray(whole))
        else:
            states = self._streams.fetch(self._arrays["states"])
            states[name] = whole
            self._streams.put(self._arrays["states"], states)
        if name in self.definition.params:
            self._graphs.close()  # they hold the params of before

    def _check_open(self) -> None:
        """Raise PoolClosed after `close`."""
        if not self._arrays:
            raise PoolClosed("the envs were closed")

    def _check_field(self, name: str) -> None:
        self._check_open()
        if name not in (self._dtype.names or ()):
            fields = ", ".join(self._dtype.names or ())
            raise AttributeError(f"{self.definition.name} has no field {name!r}: its fields are {fields}")

    def save(self) -> dict[str, Array]:
        """Return the state of all envs, as arrays in the host's memory with a row for each."""
        self._check_open()
        saved = {name: self._streams.fetch(self._arrays[name]) for name in self._saved_names}
        if "states" in saved:  # as plain bytes, which any file format can hold
            saved["states"] = saved["states"].view(np.uint8).reshape(self.num_envs, -1)
        return saved

    def load(self, saved: Mapping[str, Array], mask: Any = None) -> None:
        """Put back what `save` returned, where the mask is set. `obs` is as before until the next step."""
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
        if self._columns and not self._own_params:
            columns = {name: self._streams.fetch(self._arrays[f"field_{name}"]) for name in self.definition.params}
            self._own_params = any((column != self._shared(name)).any() for name, column in columns.items())
        if self.definition.params:
            self._graphs.close()
        self._begun = True

    def close(self) -> None:
        """Free the GPU's memory, as far as no other object holds it."""
        self._graphs.close()
        self._arrays, self._kernels = {}, {}


def _as_bytes(states: Any) -> Any:
    if simulated():
        return type(states)(states._ary.view(np.uint8).reshape(len(states), -1))
    return states.view(np.uint8).reshape(len(states), states.dtype.itemsize)

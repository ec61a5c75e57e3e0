"""The options of a pool, checked. Everything that can be checked without an env is checked here."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

from gymnasium import Space

from shoal import native
from shoal.backends import registry
from shoal.support.checks import Seed, check_choice, positive_number, whole_number
from shoal.support.system import system

__all__ = ["PoolKeywords", "PoolOptions", "refuse_unknown_options", "signature_with_options"]

ORDERS = ("ready", "fifo", "contiguous")


@dataclass(frozen=True)
class PoolOptions:
    """How a pool runs its envs. `shoal.Pool`, `shoal.make` and all dialects take these as keyword arguments.

    By topic, the most used first:

    How to run: backend, num_workers, isolate, plan, learner_threads, backend_options.
    The env: env_kwargs, seed, autoreset, infos.
    Batches: batch_size, order, batch_envs.
    Faults: on_error, step_timeout, max_restarts, restart_window, recycle_after, start_timeout, check_nan.
    Memory: copy, frames, flat_rows.
    Checks: check_actions, check_reset, observation_mode, lenient.
    Processes: start_method.

    Attributes:
        backend: "auto" measures the env and chooses; `pool.plan` says what and why. "serial" steps in the caller,
            "threads" in threads, "processes" in worker processes, "hybrid" in both: the caller steps a block itself
            beside worker processes. "compiled" steps a class that derives from `shoal.compiled.Env` by compiled code in
            threads, "cuda" such a class on a GPU (answers are copied to the host, and `shoal.compiled.cuda` leaves them
            there), "jax" one functional env for all lanes at once on a device. "batched" steps one vector env that a
            function makes, called with `num_envs`, or the batch of an id (docs/guides/simulators.md). "ray" runs blocks
            of envs in actors of a Ray cluster, "mpi" in the other ranks of an MPI job, which serve (`shoal.serve`);
            "auto" never chooses these two (docs/guides/clusters.md). It chooses "compiled" or "batched" where that can
            be, with the same results, and "processes", unmeasured, where on_error, step_timeout or recycle_after say
            that envs may crash or hang, or where the env could not be measured.
        num_workers: by default the cores that this process may use; under "ray", the actors that there is room for;
            under "mpi", the serving ranks.
        isolate: never run an env in the caller's process, not even under "auto".
        plan: a `shoal.Plan`, as `shoal.tune` finds it, or the file of one: backend, workers and, where it says so, the
            number of envs and the batch size. Options beside it must not contradict it.
        learner_threads: cores that "auto" leaves to the caller's learner; None for as many threads as torch was told to
            use (`torch.set_num_threads`), where it is loaded. Where torch computes on all cores, as it does by default,
            "auto" has workers for slow envs alone; `torch.set_num_threads(1)` or `learner_threads=0` changes that.
        backend_options: for "mpi" those of `MpiOptions` (how each rank runs its envs, and which ranks), for "ray" those
            of `RayOptions` (address, resources and placement of actors, and how each runs its envs).

        env_kwargs: keyword arguments for the env's constructor.
        seed: for the first reset of each env, where that is given none.
        autoreset: "next_step", "same_step" (last observation in the info), or "disabled"; None for "next_step", or for
            what envs do that step a whole batch and reset by themselves.
        infos: "all", "drop" to have none of the envs' infos, or a list of the keys to have.

        batch_size: how many lanes `recv` waits for; by default all.
        order: "ready" (the first lanes that are done), "fifo" (strictly in the order in which they were sent) or
            "contiguous": batches are always the same neighbours, lanes 0 up to `batch_size` and so on, those first that
            are all done, so that arrays of partial batches are views, and nothing is copied.
        batch_envs: the batch size in envs, where these have several lanes.

        on_error: "raise", or "restart": an env that raised, died with its worker or took too long is built anew, with a
            seed derived from its own and the number of its restarts. Its lane is reported once as truncated, with
            `info["shoal_restart"]`, and so are the others of its worker, if that died.
        step_timeout: seconds that one env may take for a step or a reset. It is not for envs in the caller's own
            process, so not for serial and hybrid; threads cannot be ended, and raise StepTimeout in any case.
        max_restarts: how many restarts one env (or one worker, where no env is to blame) may cause within
            `restart_window`; then the error is raised all the same. They follow each other at growing intervals.
        restart_window: the seconds in which `max_restarts` are counted.
        recycle_after: bytes that a worker process may grow by; then it is replaced when one of its episodes ends. Its
            other envs move with their state where that can be saved, and are reported as truncated where not.
        start_timeout: seconds until the envs must be built.
        check_nan: refuse observations and rewards that are not a number, as BadObservation; takes time.

        copy: True gives arrays that are the caller's own. "lend" does too; large observations are then frames of the
            slab in every autoreset mode, which are not written again while an array of them is alive. Of `frames`
            frames all but one can be lent at a time; after that there are copies.
        frames: how many time slots the slab has; arrays stay valid for `frames - 1` further sends. With just 1, envs
            that take buffers to write into (PufferLib's) write straight into the batch. Without effect where `copy`
            is True; where it is "lend", it says how many frames there are to lend from.
        flat_rows: all parts of a nested observation lie in one row, so that `shoal.emulation.Emulation.flatten` gives
            these rows without a copy; the parts are strided views of them then. For spaces of arrays only.

        check_actions: which actions must be within their bounds: "all", "discrete" to let those of a Box pass, or
            "none" to leave all of them to the envs, as Gymnasium does.
        check_reset: which envs must be reset before they are stepped: "all" that were never reset, have raised or are
            over under autoreset="disabled"; "ended", the last of these only; or "none", to leave it to the envs.
            Those that are stepped as a batch are always checked.
        observation_mode: "same": all observation spaces must be equal; "different": equal in shape and type;
            or a pair (batched space, single space).
        lenient: spaces may differ in their bounds, and actions for Boxes of integers are handed on as they are given,
            floats included. These travel as messages then, which is slower. For envs that are stepped one by one.

        start_method: "forkserver" (default), "spawn" or "fork"; a worker that is replaced is never forked from this
            process, which has threads by then.
    """

    backend: str = "auto"
    num_workers: int | None = None
    isolate: bool = False
    plan: Any = None
    learner_threads: int | None = None
    backend_options: Mapping[str, Any] | None = None
    env_kwargs: Mapping[str, Any] | None = None
    seed: Seed = None
    autoreset: Literal["next_step", "same_step", "disabled"] | None = None
    infos: Literal["all", "drop"] | Sequence[str] = "all"
    batch_size: int | None = None
    order: Literal["ready", "fifo", "contiguous"] = "ready"
    batch_envs: int | None = None
    on_error: Literal["raise", "restart"] = "raise"
    step_timeout: float | None = None
    max_restarts: int = 10
    restart_window: float = 600.0
    recycle_after: int | None = None
    start_timeout: float | None = None
    check_nan: bool = False
    copy: bool | Literal["lend"] = False
    frames: int = 2
    flat_rows: bool = False
    check_actions: Literal["all", "discrete", "none"] = "all"
    check_reset: Literal["all", "ended", "none"] = "all"
    observation_mode: str | tuple[Space[Any], Space[Any]] = "same"
    lenient: bool = False
    start_method: str = system.start_methods[0]

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, ("auto", *registry.names()))
        if self.autoreset is not None:
            check_choice("autoreset", self.autoreset, tuple(native.AUTORESET))
        check_choice("order", self.order, ORDERS)
        check_choice("check_actions", self.check_actions, ("all", "discrete", "none"))
        check_choice("check_reset", self.check_reset, ("all", "ended", "none"))
        check_choice("on_error", self.on_error, ("raise", "restart"))
        self._set("start_method", self.start_method or system.start_methods[0])
        check_choice("start_method", self.start_method, system.start_methods)
        if not isinstance(self.backend_options, Mapping | None):
            raise ValueError(f"backend_options: expected a dict, found {self.backend_options!r}")
        for name in ("copy", "flat_rows", "lenient", "check_nan"):
            if name != "copy" or self.copy != "lend":
                self._set(name, bool(getattr(self, name)))
        if isinstance(self.infos, str):
            check_choice("infos", self.infos, ("all", "drop"))
        elif not isinstance(self.infos, Iterable) or not all(isinstance(key, str) for key in self.infos):
            raise ValueError(f'infos: expected "all", "drop" or a list of keys, found {self.infos!r}')
        self._check_numbers()
        if self.batch_size is not None and self.batch_envs is not None:
            raise ValueError("batch_size and batch_envs say the same: give one of them")
        if self.backend != "auto":
            self.check_backend(self.backend)

    def _check_numbers(self) -> None:
        workers = self.num_workers
        if workers is not None and (isinstance(workers, bool | str) or int(workers) != workers or workers < 1):
            raise ValueError(f"num_workers: expected a whole number of at least 1, or None, found {workers!r}")
        if self.learner_threads is not None:
            self._set("learner_threads", whole_number("learner_threads", self.learner_threads, 0, 2**20))
        if self.step_timeout is not None:
            self._set("step_timeout", positive_number("step_timeout", self.step_timeout))
        self._set("max_restarts", whole_number("max_restarts", self.max_restarts, 1, 10**9))
        self._set("restart_window", positive_number("restart_window", self.restart_window))
        if self.recycle_after is not None:
            self._set("recycle_after", whole_number("recycle_after", self.recycle_after, 1, 2**62))
        # What the caller has seen last must outlive a torn write.
        self._set("frames", whole_number("frames", self.frames, 2 if self.replaces_envs else 1, 255))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def check_backend(self, name: str) -> None:
        """Raise ValueError for options that this backend cannot do."""
        kind = registry.find(name)
        kind.check_limits(self.on_error, self.step_timeout, self.recycle_after)
        if self.isolate and not kind.isolates:
            raise ValueError(f'isolate=True keeps envs out of this process: backend="{name}" does not')
        if self.backend_options is not None and not kind.takes_options:
            raise ValueError(f"backend_options: backend=\"{name}\" takes none, only 'ray' and 'mpi' do")

    @property
    def wanted_infos(self) -> frozenset[str] | None:
        """The keys of infos that the caller wants to have; None for all."""
        if self.infos == "all":
            return None
        return frozenset() if self.infos == "drop" else frozenset(self.infos)

    @property
    def replaces_envs(self) -> bool:
        """Whether envs may ever be replaced."""
        return self.on_error == "restart" or self.recycle_after is not None

    @property
    def survives_envs(self) -> bool:
        """Whether the caller must survive whatever its envs do, and so cannot live in one process with them."""
        return self.replaces_envs or self.step_timeout is not None


class PoolKeywords(TypedDict, total=False):
    """The options once more, for type checkers and editors: a test compares the two lists."""

    backend: str
    num_workers: int | None
    isolate: bool
    plan: Any
    learner_threads: int | None
    backend_options: Mapping[str, Any] | None
    env_kwargs: Mapping[str, Any] | None
    seed: Seed
    autoreset: Literal["next_step", "same_step", "disabled"] | None
    infos: Literal["all", "drop"] | Sequence[str]
    batch_size: int | None
    order: Literal["ready", "fifo", "contiguous"]
    batch_envs: int | None
    on_error: Literal["raise", "restart"]
    step_timeout: float | None
    max_restarts: int
    restart_window: float
    recycle_after: int | None
    start_timeout: float | None
    check_nan: bool
    copy: bool | Literal["lend"]
    frames: int
    flat_rows: bool
    check_actions: Literal["all", "discrete", "none"]
    check_reset: Literal["all", "ended", "none"]
    observation_mode: str | tuple[Space[Any], Space[Any]]
    lenient: bool
    start_method: str


def refuse_unknown_options(options: Mapping[str, Any]) -> None:
    """Raise TypeError for what is no option of a pool."""
    known = {field.name for field in fields(PoolOptions)}
    unknown = [name for name in options if name not in known]
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f": did you mean {close[0]}?" if close else ""
        raise TypeError(
            f"unknown option {', '.join(map(repr, unknown))}{hint}; what is meant for the env itself goes into "
            f"env_kwargs={{{unknown[0]!r}: ...}}"
        )


def signature_with_options(constructor: Callable[..., Any]) -> inspect.Signature:
    """The signature of a constructor that takes `**options`, with all options by name: what `help` shows."""
    own = [p for p in inspect.signature(constructor).parameters.values() if p.kind is not p.VAR_KEYWORD]
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [inspect.Parameter(f.name, keyword, default=f.default, annotation=f.type) for f in fields(PoolOptions)]
    return inspect.Signature([*own, *options])

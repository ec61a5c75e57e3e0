"""What a backend is to the engine: it makes the workers of one pool, learns of their deaths, and gives everything back.

A backend is a class with a name in `backends.registry` and one object for each pool. Class attributes say what it can
do, so that options are checked before an env is built. Methods are the hooks that `engine.workers` calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.backends.base import BlockSpec, Worker
from shoal.envs.functions import EnvFn, as_env_fns
from shoal.memory.messages import BlockSummary
from shoal.memory.slab import Slab
from shoal.support.checks import whole_number
from shoal.support.deadline import Deadline
from shoal.support.system import system

DECIDED = -1  # as the time of a spin: the core decides it while it runs


@dataclass(frozen=True)
class EnvRequest:
    """The envs that a user asks for; `num_workers` and `backend_options` as in `PoolOptions`."""

    env: Any  # an id, a class, a function, a list of functions, or what else the backend takes
    num_envs: int | None  # None where `env` says it
    kwargs: Mapping[str, Any]  # for the constructors
    num_workers: int | None = None
    backend_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batched_count(self) -> int:
        """How many envs one object is to step. Raises ValueError for what is no number of envs."""
        return whole_number("num_envs", 1 if self.num_envs is None else self.num_envs, 1, 2**40)


@dataclass(frozen=True)
class EnvSource:
    """What a backend has made of such a request."""

    request: EnvRequest
    env_fns: Sequence[EnvFn]  # a function for each env; one for all of them under a batched backend
    count: int  # how many envs there are


@dataclass(frozen=True)
class BackendSetup:
    """What a backend is opened with."""

    num_envs: int
    num_workers: int | None = None  # as asked for; None for the backend's own choice
    options: Mapping[str, Any] = field(default_factory=dict)  # those that only this backend knows (`backend_options`)
    start_method: str = system.start_methods[0]
    interrupts: bool = True  # whether Ctrl-C may come to the thread that steps the caller's own block


class Backend(ABC):
    """How the blocks of one pool are run."""

    name = ""
    batched = False  # one env object steps all lanes
    one_worker = False  # there is never more than one worker
    isolates = False  # no env runs in the caller's process
    limits_steps = True  # a step can take longer than `step_timeout`, and the caller still notices
    recycles = False  # workers that have grown too much can be replaced
    takes_options = False  # it knows `backend_options`
    closes_last = False  # at exit, its pools must be closed before the exit handlers of a package that it imports
    separate_leaves = False  # each part of an observation must lie in an array of its own
    writes_infos = True  # its workers write infos into rows of the pool's own slab

    def __init__(self, setup: BackendSetup):
        self.setup = setup
        self.num_workers = setup.num_workers

    # ---- before there is an object -----------------------------------------------------------------------------

    @classmethod
    def gather(cls, request: EnvRequest) -> EnvSource:
        """Turn what the user gave into env functions."""
        env_fns = as_env_fns(request.env, request.num_envs, request.kwargs)
        return EnvSource(request, env_fns, len(env_fns))

    @classmethod
    def default_workers(cls, count: int, cores: int) -> int:
        """The number of workers for so many envs, where the user named none."""
        return cores

    @classmethod
    def spin_times(cls) -> tuple[int, int]:
        """How long (the pool, a worker) looks for an answer before it sleeps, in ns.

        DECIDED leaves it to the core, which decides for all sides together while it runs (native/spinning.h).
        """
        return DECIDED, DECIDED

    @classmethod
    def check_limits(cls, on_error: str, step_timeout: float | None, recycle_after: int | None) -> None:
        """Raise ValueError for limits that this backend cannot keep."""
        if on_error == "restart" and cls.batched:
            raise ValueError(
                f'on_error: backend="{cls.name}" steps all envs as one, of which none can be restarted alone'
            )
        if step_timeout is not None and not cls.limits_steps:
            raise ValueError(
                f'step_timeout: backend="{cls.name}" steps envs in this very thread, which cannot be timed out; use '
                '"processes" or "threads"'
            )
        if recycle_after is not None and not cls.recycles:
            raise ValueError(f'recycle_after is for worker processes, and backend="{cls.name}" has none')

    def check_opened(self, on_error: str, step_timeout: float | None) -> None:  # noqa: B027
        """Like `check_limits`, for what is known only once the backend was opened."""

    # ---- workers -----------------------------------------------------------------------------------------------

    def env_fns_of(self, source: EnvSource) -> Sequence[EnvFn]:
        """The functions that the workers are given, each worker a block of them."""
        return source.env_fns

    def prepare(self, blocks: Sequence[BlockSpec]) -> None:  # noqa: B027
        """Make the env functions of all blocks ready to travel. Raises BadEnv where they cannot."""

    @abstractmethod
    def new_worker(self, block: BlockSpec) -> Worker:
        """The worker of a block, not launched yet."""

    def new_successor(self, block: BlockSpec) -> Worker:
        """A worker in the place of one that is gone, made in a thread beside the caller's."""
        return self.new_worker(block)

    def launch(self, worker: Worker, deadline: Deadline) -> None:
        """Let a worker begin to build its envs."""
        worker.launch(deadline)

    def check(self, summaries: Sequence[BlockSummary], first: int) -> None:  # noqa: B027
        """Compare what all workers have built. Raises BadEnv."""

    # ---- while they run ----------------------------------------------------------------------------------------

    @property
    def shares_slab(self) -> bool:
        """Whether other processes map the slab."""
        return False

    def make_bell(self) -> Any:
        """What the twin sleeps on while it waits for answers."""
        return SilentBell()

    def prompt(self, inline: Any) -> Callable[[], int] | None:
        """What to call when lanes were asked for something, before it is waited for; None where bells do. `inline` is
        the caller's own worker, or None."""
        return None if inline is None else inline.run

    def watch(self, slab: Slab, wake_pool: Callable[[], None], step_timeout: float | None) -> None:  # noqa: B027
        """Begin to look for workers that die; `wake_pool` ends the caller's wait."""

    def added(self, worker: Worker) -> None:  # noqa: B027
        """A worker is one of the pool's from now on."""

    def removed(self, worker: Worker) -> None:  # noqa: B027
        """A worker is no longer one of the pool's: its death was reported, or it was asked to leave."""

    def dead(self) -> Sequence[Worker]:
        """Workers that ended without being asked to, until they are removed."""
        return ()

    def remark(self, source: Any) -> str:
        """Say what a pool's plan should tell of its envs, in words; "" for nothing."""
        return ""

    def narrow_rollouts(self, inline: Any) -> bool:
        """Say whether rewards, returns and lengths of rollouts have 32 bits; 64 is the rule."""
        return False

    def roll_out(self, inline: Any, record: Any, policy: Any, params: Sequence[Any], rngs: Any) -> bool:
        """Fill the record of a whole rollout at once; False where the caller must step by itself."""
        return False

    # ---- end ---------------------------------------------------------------------------------------------------

    def stop_watching(self) -> None:  # noqa: B027
        """Workers are about to be asked to leave: their ends are no deaths any more."""

    def end_descendants(self, workers: Sequence[Worker]) -> None:  # noqa: B027
        """End the processes that the envs of these workers have started and not ended."""

    def close(self) -> None:  # noqa: B027
        """Give everything back, after all workers have left. May be called again."""


class SilentBell:
    """The bell of a thread that never sleeps."""

    silent = True

    def ring(self) -> None:
        """Wake no thread."""

    def sleep(self, timeout: float | None) -> None:
        """Return at once."""

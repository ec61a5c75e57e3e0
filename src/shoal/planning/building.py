"""How a pool is built: options, envs, plan, workers, memory, scheduler. Each step undoes itself when a later one fails.

Read `build` first: it names the steps in their order.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces.utils import is_space_dtype_shape_equiv
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from shoal import native
from shoal.backends import registry
from shoal.backends.backend import Backend, BackendSetup, EnvRequest, EnvSource
from shoal.backends.batch_native import NoBatch, batch_maker, is_batch_maker
from shoal.engine.lane_table import LaneGroups, LaneTable
from shoal.engine.scheduler import Scheduler
from shoal.engine.timeouts import Patience
from shoal.engine.workers import Workers
from shoal.envs.autoreset import RULES
from shoal.envs.functions import EnvFn
from shoal.envs.group import MODES
from shoal.errors import BadEnv, PoolClosed, ShoalError, SpaceMismatch
from shoal.memory.answers import Frames, frames_to_lend
from shoal.memory.messages import BlockSummary, LaneGroup, StepperConfig
from shoal.memory.slab import Layout, Slab
from shoal.options import PoolOptions
from shoal.planning.plan import Plan, contradiction, fixed_plan, measured_plan, spin_times, with_plan
from shoal.spaces.leaves import array_leaves, flatten, loosened
from shoal.support import processes
from shoal.support.checks import spread_seed, whole_number
from shoal.support.deadline import Deadline
from shoal.support.limits import limits_named
from shoal.support.system import system

__all__ = ["Shape", "build"]


@dataclass(frozen=True)
class EnvSpecs:
    """Spaces of one env and of all, and what the first env says about itself."""

    single_observation_space: Space[Any]
    observation_space: Space[Any]
    single_action_space: Space[Any]
    action_space: Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any
    name: str = ""


@dataclass(frozen=True)
class Shape:
    """What is settled about a pool once its envs are built."""

    specs: EnvSpecs
    action_space: Space[Any]  # of one env, as the slab holds it
    lanes: int  # how many there are
    batch_size: int  # how many of them `recv` waits for
    window: int  # how many neighbours are always received together; 0 for any lanes
    autoreset: str
    groups: LaneGroups
    absences: bool  # whether lanes can be without an agent
    lane_names: list[Any] | None  # of the agents of one env; None where lanes have no names
    lanes_per_env: int  # how many neighbouring lanes are one env's; 0 where envs differ in that
    frames: int  # how many time slots the slab has
    lends: bool  # whether large arrays are lent rather than copied

    def identity(self, order: str) -> dict[str, Any]:
        """What must be the same in a pool into which a snapshot of this one is put back."""
        return {
            "num_envs": self.lanes,
            "observation space": str(self.specs.single_observation_space),
            "action space": str(self.specs.single_action_space),
            "autoreset": self.autoreset,
            "order": order,
        }

    @property
    def user_resets(self) -> bool:
        """Whether the user must reset each env after its episode. A team's env knows itself when it is over."""
        return RULES[self.autoreset].user_resets and not self.absences


def build(
    env: Any, num_envs: int | None, options: PoolOptions, on_death: Callable[[ShoalError], ShoalError]
) -> tuple[Plan, Shape, Scheduler, list[int | None]]:
    """Build a pool: the parts, and the seeds of the envs' first resets.

    `on_death` closes the pool after a worker's death, and returns the error to raise.
    """
    deadline = Deadline.after(options.start_timeout)
    patience = Patience(deadline)
    with limits_named("start the pool"), contextlib.ExitStack() as undo:
        options, num_envs = with_plan(options, env, num_envs)
        name, reason = choose_backend(env, options)
        source = gather_envs(name, env, num_envs, options)
        plan = None
        if name == "auto":
            count = len(source.env_fns)
            plan = measured_plan(source.env_fns, options, _expected_batch(options, count), patience, Opened)
        setup = BackendSetup(source.count, options.num_workers, options.backend_options or {}, options.start_method)
        backend = registry.find(name if plan is None else plan.backend)(setup)  # may connect to other machines
        undo.callback(backend.close)
        backend.check_opened(options.on_error, options.step_timeout)
        plan = settle_plan(plan, backend, source, options, reason)
        env_fns = backend.env_fns_of(source)
        workers = Workers(backend, env_fns, plan.num_workers, start_timeout=options.start_timeout)
        undo.callback(lambda: workers.close(Deadline.after(1.0)))
        shape = settle_shape(workers, workers.build(deadline, patience), plan, options)
        first_seeds = spread_seed(options.seed, np.arange(shape.lanes))
        slab = make_slab(workers, shape, options)
        undo.callback(slab.close)
        spin_pool, spin_workers = spin_times(plan)
        config = StepperConfig(
            shape.specs.single_observation_space, shape.action_space, shape.autoreset,
            shape.batch_size < shape.lanes, spin_workers, options.check_nan, options.wanted_infos,
        )  # fmt: skip
        workers.attach(slab, config, deadline, patience)
        frames = Frames(
            slab, shape.specs.single_observation_space, bool(options.copy), shape.lends,
            spare=2 if options.replaces_envs else 1,
        )  # fmt: skip
        table = LaneTable(slab, workers, frames, shape.groups, shape.window)
        scheduler = Scheduler(table, options, config, shape.user_resets, spin_pool, on_death)
        slab.introduce({
            "pid": os.getpid(), "started": processes.started(os.getpid()) or 0, "began_ns": time.monotonic_ns(),
            "env": shape.specs.name[:100], "backend": plan.backend, "envs": shape.lanes, "batch_size": shape.batch_size,
        })  # fmt: skip
        undo.pop_all()
        return plan, shape, scheduler, first_seeds


class Opened:
    """A pool without a face, for a while: what "auto" measures Shoal's own work with.

    No generator, so that warnings of the build point to the user's line: its frames would be those of another module.
    """

    def __init__(self, env_fns: Sequence[EnvFn], options: PoolOptions):
        self._env_fns, self._options = env_fns, options

    def __enter__(self) -> Scheduler:
        _, _, self._scheduler, _ = build(self._env_fns, None, self._options, lambda error: error)
        return self._scheduler

    def __exit__(self, *_: object) -> None:
        table = self._scheduler.table
        table.slab.withdraw()
        self._scheduler.end(PoolClosed("it was only measured"))
        table.workers.close(Deadline.after(1.0))
        table.slab.close()


def choose_backend(env: Any, options: PoolOptions) -> tuple[str, str]:
    """The backend's name, and why it was chosen; "auto" where the env must be measured first."""
    name, reason = options.backend, ""
    if name == "auto" and options.survives_envs:
        # A caller that must survive its envs does not live with them, nor tries one out first.
        name, reason = (
            "processes",
            "not measured, because envs may crash or hang: processes keep them away from the caller",
        )
    elif name == "auto" and isinstance(env, type) and hasattr(env, "__shoal_kernel__") and not options.isolate:
        missing = env.__shoal_missing__()  # type: ignore[attr-defined]
        name, reason = "compiled", "the class can be compiled"
        if missing:
            name, reason = "auto", f"{env.__name__} runs as plain Python, because {missing}"
            warnings.warn(reason, RuntimeWarning, stacklevel=4)
    elif name == "auto" and not options.isolate and (is_batch_maker(env) or _has_batch(env, options)):
        name, reason = "batched", "one object steps all envs in threads of its own, with the same results"
    if name == "auto" and not system.has_processes:  # nor is there one to measure in
        name = "processes" if options.isolate else "serial"
        reason = f"not measured, because Shoal has no worker processes on {system.name}"
    if name != "auto":
        options.check_backend(name)
    elif options.backend_options is not None:
        raise ValueError("backend_options: backend=\"auto\" takes none, only 'ray' and 'mpi' do")
    return name, reason


def _has_batch(env: Any, options: PoolOptions) -> bool:
    if not isinstance(env, str | EnvSpec):
        return False
    try:
        batch_maker(env, options.env_kwargs or {})
    except (NoBatch, gymnasium.error.Error, ImportError):  # what is wrong with an id is said later
        return False
    return True


def gather_envs(name: str, env: Any, num_envs: int | None, options: PoolOptions) -> EnvSource:
    """What builds the envs."""
    kind = registry.find("serial" if name == "auto" else name)
    kwargs, backend_options = dict(options.env_kwargs or {}), options.backend_options or {}
    source = kind.gather(EnvRequest(env, num_envs, kwargs, options.num_workers, backend_options))
    if options.plan is not None and options.plan.num_envs not in (None, source.count):
        raise contradiction("num_envs", source.count, options.plan.num_envs)
    return source


def _expected_batch(options: PoolOptions, envs: int) -> int:
    """How many envs a batch will have at most, before it is known how many lanes each has."""
    if options.batch_envs is not None:
        return whole_number("batch_envs", options.batch_envs, 1, envs)
    # A batch_size is checked when the number of lanes is known.
    return min(max(1, options.batch_size), envs) if isinstance(options.batch_size, int) else envs


def settle_plan(measured: Plan | None, backend: Backend, source: EnvSource, options: PoolOptions, reason: str) -> Plan:
    """The plan as it is carried out: measured, given, or as asked for."""
    envs = len(backend.env_fns_of(source))
    _expected_batch(options, envs)  # which is checked here, if nothing was measured
    plan = measured or options.plan or fixed_plan(backend, envs)
    if not backend.batched:
        plan = replace(plan, num_workers=min(plan.num_workers, envs))
    remark = backend.remark(source)
    if reason:
        plan = replace(plan, reason=reason if measured is None else f"{plan.reason}; {reason}")
    return replace(plan, reason=f"{plan.reason}; {remark}" if plan.reason else remark) if remark else plan


def settle_shape(workers: Workers, summaries: Sequence[BlockSummary], plan: Plan, options: PoolOptions) -> Shape:
    """Settle what depends on the envs: lanes, batches, the autoreset mode, spaces, frames."""
    autoreset = choose_mode(options.autoreset, workers.groups)
    lanes = workers.blocks[-1][1]
    groups = LaneGroups(workers.groups, options.replaces_envs)
    batch_size = settle_batch(groups, lanes, workers.backend.batched, plan, options)
    specs = agree(summaries, lanes, options.observation_mode, options.lenient)
    loose = options.lenient and not workers.backend.batched and not workers.groups
    obs_leaves = flatten(specs.single_observation_space)
    if options.flat_rows:
        array_leaves("observation", specs.single_observation_space, "a flat row")
        if workers.backend.separate_leaves and len(obs_leaves) > 1:
            raise ValueError(
                f'flat_rows: backend="{plan.backend}" writes each part of an observation into an array of its own'
            )
    frames, wanted = options.frames, options.frames if options.copy == "lend" else None
    if options.copy:
        frames = frames_to_lend(obs_leaves, lanes, RULES[autoreset].user_resets, wanted)
    lends = bool(options.copy) and frames > 1
    if options.copy and options.replaces_envs:
        frames += 1  # what the caller has seen last must outlive a torn write
    sizes = {group.size if group.together else 1 for group in workers.groups} or {1}
    return Shape(
        specs=specs,
        action_space=loosened(specs.single_action_space) if loose else specs.single_action_space,
        lanes=lanes,
        batch_size=batch_size,
        window=_window(options.order, batch_size, lanes),
        autoreset=autoreset,
        groups=groups,
        absences=any(group.can_be_absent for group in workers.groups),
        lane_names=workers.groups[0].names if workers.groups else None,
        lanes_per_env=sizes.pop() if len(sizes) == 1 else 0,
        frames=frames,
        lends=lends,
    )


def choose_mode(asked: str | None, groups: Sequence[LaneGroup]) -> str:
    """The autoreset mode of a pool: as asked for, or one that all of its envs can do. Raises BadEnv for none."""
    common = [mode for mode in MODES if all(mode in lanes.modes for lanes in groups)]
    if not common:
        raise BadEnv("the envs reset by themselves, and not in the same way: give each kind a pool of its own")
    if asked is None:
        return common[0]
    if asked not in common:
        ways = " or ".join(f'autoreset="{mode}"' for mode in common)
        raise BadEnv(f'the envs reset by themselves, each all of its lanes: they need {ways}, found "{asked}"')
    return asked


def agree(
    summaries: Sequence[BlockSummary], num_envs: int, mode: str | tuple[Space[Any], Space[Any]], lenient: bool = False
) -> EnvSpecs:
    """Compare all envs' spaces with the first one's. Raises SpaceMismatch, which names the first that differs.

    `lenient` lets bounds differ, and takes those of the first env for all.
    """
    pairs = [pair for summary in summaries for pair in _of_lanes(summary)]
    first_obs, first_action = pairs[0]
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, Space) for space in mode):
            raise TypeError(f"observation_mode: expected a pair of spaces, found {mode!r}")
        batched, single = mode
    elif mode == "same":
        single, batched = first_obs, batch_space(first_obs, num_envs)
    elif mode == "different":
        single = first_obs
    else:
        raise ValueError(f"observation_mode: expected 'same', 'different' or a pair of spaces, found {mode!r}")
    seen: set[tuple[int, int]] = set()  # spaces take long to compare, and most envs share them
    for env_id, (obs, action) in enumerate(pairs):
        if (id(obs), id(action)) not in seen:
            if not (lenient and _equivalent(obs, single) and _equivalent(action, first_action)):
                _compare(env_id, obs, action, single, first_action, mode)
            seen.add((id(obs), id(action)))
    if mode == "different":
        batched = batch_differing_spaces([obs for obs, _ in pairs])
    about = summaries[0]
    return EnvSpecs(
        single, batched, first_action, batch_space(first_action, num_envs),
        about.metadata, about.render_mode, about.spec, about.name,
    )  # fmt: skip


def _equivalent(one: Space[Any], other: Space[Any]) -> bool:
    try:
        return one == other or bool(is_space_dtype_shape_equiv(one, other))
    except NotImplementedError:  # spaces of the user's own
        return False


def _of_lanes(summary: BlockSummary) -> list[Any]:
    """The spaces of each lane."""
    pairs = [summary.spaces[which] for which in summary.which]
    if not summary.lanes:
        return pairs
    return [pair for pair, lanes in zip(pairs, summary.lanes, strict=True) for _ in range(lanes.size)]


def _compare(env_id: int, obs: Any, action: Any, single: Any, first_action: Any, mode: Any) -> None:
    if mode == "same" and obs != single:
        hint = '; if only the bounds differ, use observation_mode="different"'
        if not is_space_dtype_shape_equiv(obs, single):
            hint = ""
        raise SpaceMismatch(
            f"env {env_id} has the observation space {obs}, and env 0 has {single}{hint}", "observation", single, obs
        )
    if mode != "same" and not is_space_dtype_shape_equiv(obs, single):
        raise SpaceMismatch(
            f"env {env_id} has the observation space {obs}, which differs from {single} in shape or type",
            "observation", single, obs,
        )  # fmt: skip
    if action != first_action:
        raise SpaceMismatch(
            f"env {env_id} has the action space {action}, and env 0 has {first_action}", "action", first_action, action
        )


def settle_batch(groups: LaneGroups, lanes: int, batched: bool, plan: Plan, options: PoolOptions) -> int:
    """How many lanes `recv` waits for."""
    batch_size = options.batch_size
    if options.batch_envs is not None:
        batch_size = groups.lanes_of(options.batch_envs, lanes)
    elif batch_size is not None and (planned := plan.envs_in_a_batch) is not None:
        planned = planned if batched else groups.lanes_of(planned, lanes)
        if batch_size != planned:
            raise contradiction("batch_size", batch_size, planned)
    batch_size = whole_number("batch_size", lanes if batch_size is None else batch_size, 1, lanes)
    groups.check_batch(batch_size, lanes)
    return batch_size


def _window(order: str, batch_size: int, lanes: int) -> int:
    if order != "contiguous" or batch_size == lanes:
        return 0
    if lanes % batch_size:
        raise ValueError(
            f'order="contiguous" cuts {lanes} lanes into batches of equal size, and batch_size={batch_size} does not '
            "divide them"
        )
    return batch_size


def make_slab(workers: Workers, shape: Shape, options: PoolOptions) -> Slab:
    """The shared region for all lanes."""
    specs = shape.specs
    layout = Layout.plan(
        flatten(specs.single_observation_space), flatten(shape.action_space), shape.lanes, shape.frames,
        len(workers), finals=RULES[shape.autoreset].resets_at_once, absences=shape.absences, rows=options.flat_rows,
        infos=workers.backend.writes_infos and native.KIND == "native",
    )  # fmt: skip
    return Slab.create(layout, workers.backend.shares_slab)

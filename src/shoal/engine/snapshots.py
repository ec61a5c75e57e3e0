"""Takes the state of a pool, and puts it back: commands to the workers, rows of the slab, the scheduler's lists."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.engine.scheduler import Scheduler
from shoal.errors import BadSnapshot, CannotSnapshot
from shoal.memory.answers import Ready
from shoal.memory.copies import own_copy
from shoal.memory.messages import STATUS_INFO, STATUS_NOTE
from shoal.memory.packed_errors import PackedError
from shoal.memory.slab import Slab
from shoal.state.snapshot import Snapshot, check_facts, check_fields, notes_of, read_fields, write_fields
from shoal.support.deadline import Deadline


def take(scheduler: Scheduler, about: dict[str, Any], first_seeds: list[int | None], deadline: Deadline) -> Snapshot:
    """The state of all envs and of the pool. Steps that are under way are waited for first."""
    table = scheduler.table
    notes = scheduler.settle(deadline)
    saved = scheduler.commands.command(table.all_ids, "save", lambda rows: (), deadline)
    _refuse_failed(saved)
    fields = read_fields(table.slab, _obs_fields(table.slab), table.slot)
    status = fields["status"]
    status &= ~np.uint8(STATUS_INFO)  # all infos are among the notes
    status[[lane for lane, note in notes.items() if note.info]] |= STATUS_NOTE
    return Snapshot(
        about, saved, fields,
        [notes[lane].objects if lane in notes else table.answers.objects_of(lane) for lane in range(table.count)],
        {lane: own_copy(note.info) for lane, note in notes.items()},
        {**scheduler.facts(), "first_seeds": list(first_seeds)},
    )  # fmt: skip


def _refuse_failed(saved: list[Any]) -> None:
    """Raise CannotSnapshot where envs cannot be saved: it says which, and why."""
    failed = {env_id: value for env_id, value in enumerate(saved) if isinstance(value, PackedError)}
    if failed:
        first: dict[str, int] = {}
        for env_id, value in failed.items():
            first.setdefault(value.summary.partition(": ")[2], env_id)
        reasons = "; ".join(f"env {env_id}: {reason}" for reason, env_id in list(first.items())[:3])
        raise CannotSnapshot(f"{len(failed)} of {len(saved)} envs cannot be saved. {reasons}", list(failed))


def check(scheduler: Scheduler, snapshot: Snapshot) -> None:
    """Raise BadSnapshot unless the snapshot fits the pool's slab and makes sense: a file may say anything."""
    table = scheduler.table
    check_fields(table.slab, _obs_fields(table.slab), snapshot.fields)
    check_facts(snapshot.scheduler, snapshot.notes, snapshot.fields)
    if len(snapshot.envs) != table.count or len(snapshot.objects) != table.count:
        raise BadSnapshot("the snapshot is damaged: it has another number of envs than it says")
    width = len(table.answers.objects_of(0))
    if any(objects and len(objects) != width for objects in snapshot.objects):
        raise BadSnapshot("the snapshot is damaged: an observation has more or fewer parts than its space")


def restore(scheduler: Scheduler, snapshot: Snapshot, deadline: Deadline) -> tuple[Ready, list[int | None]]:
    """Put a snapshot back while no lane is busy: the last answer of every env, and the seeds of their first resets."""
    table = scheduler.table
    loaded = scheduler.commands.command(
        table.all_ids, "load", lambda rows: ([snapshot.envs[row] for row in rows],), deadline
    )
    for env_id, value in enumerate(loaded):
        if isinstance(value, PackedError):
            raise value.unpack(env_id, int(table.owner[env_id]))
    slot = table.answers.free_slot() or 0
    write_fields(table.slab, snapshot.fields, slot)
    for lane, objects in enumerate(snapshot.objects):
        if objects:
            table.answers.keep_objects(lane, objects)
    facts = dict(snapshot.scheduler)
    first_seeds = list(facts.pop("first_seeds"))
    scheduler.resume(facts, notes_of(snapshot.notes, snapshot.objects, table.requested), slot)
    return Ready(np.arange(table.count), 0, slot, {}), first_seeds


def _obs_fields(slab: Slab) -> list[str]:
    return [name for name in slab.layout.fields if name.startswith(("obs.", "final.", "present"))]

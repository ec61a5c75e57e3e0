"""The messages between a pool and its workers, beside the slab."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gymnasium import Space

from shoal.memory.packed_errors import PackedError
from shoal.native.layout import STATUS_ERROR, STATUS_FINAL, STATUS_INFO, STATUS_NOTE

__all__ = [
    "NO_SEED",
    "RESTART_INFO",
    "STATUS_ERROR",
    "STATUS_FINAL",
    "STATUS_INFO",
    "STATUS_NOTE",
    "BlockSummary",
    "LaneGroup",
    "Lost",
    "Note",
    "Order",
    "Reply",
    "StepperConfig",
]  # fmt: skip

NO_SEED = "none"  # in a saved state: the env has been reset before, and its next reset needs no seed
RESTART_INFO = "shoal_restart"  # the key of the info that tells of a restart


class Note(NamedTuple):
    """The part of an answer that has no field in the slab. It travels through the side channel.

    `info` is the whole info, or, where the slab has a row of it (STATUS_INFO), what has no room there, by its name in
    the schema.
    """

    lane: int
    sequence: int
    info: dict[Any, Any]
    objects: list[Any]
    error: PackedError | None


class Reply(NamedTuple):
    """The answer to a command; `values` has one entry per lane, a PackedError where the env raised."""

    ticket: int
    values: list[Any]


class Order(NamedTuple):
    """How a lane goes on after its env was lost. The lane's next request, OP_RESTART, carries it out.

    Attributes:
        rebuild: the worker still has the old env, and must build a new one.
        begin: answer with the first observation of a new episode. Otherwise the answer ends the old one: truncated,
            with the last observation once more.
        seed, options: for the new env's first reset.
        last_slot, last_objects: the frame of the last answer that the caller has seen, and its objects.
        report: for the info.
    """

    lane: int
    rebuild: bool
    begin: bool
    seed: int | None
    options: dict[str, Any] | None
    last_slot: int
    last_objects: list[Any]
    report: dict[str, Any]


class Lost(NamedTuple):
    """A command that a worker could not load: its ticket (None if it is not replied to), its lanes, and why."""

    ticket: int | None
    lanes: list[int]
    error: Exception


class LaneGroup(NamedTuple):
    """What a worker reports about an env that has several lanes; as in `shoal.envs.group.GroupEnv`."""

    size: int
    together: bool
    resets_alone: bool
    can_be_absent: bool
    modes: tuple[str, ...]
    names: list[Any] | None


@dataclass(frozen=True)
class BlockSummary:
    """What a worker reports about its envs once they are built."""

    spaces: list[tuple[Space[Any], Space[Any]]]  # the different (observation, action) spaces found
    which: list[int]  # for each env, its place in `spaces`
    metadata: dict[str, Any]
    render_mode: str | None
    spec: Any
    identities: list[int] = field(default_factory=list)  # which objects the envs are, within their own process
    lanes: list[LaneGroup] = field(default_factory=list)  # of each env; empty if all have just one lane
    name: str = ""  # what the first env is called


@dataclass(frozen=True)
class StepperConfig:
    """How a pool wants its lanes stepped; the same for every worker."""

    observation_space: Space[Any]
    action_space: Space[Any]
    autoreset: str
    publish_each: bool
    spin_ns: int
    check_nan: bool
    infos: frozenset[str] | None = None  # the keys of infos that the caller wants to have; None for all

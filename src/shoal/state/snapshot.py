"""The state of a pool: that of every env, and what the pool knows about each lane.

The file is data (see `datafile`). Where an env can only be pickled, its state in the file is a pickle, and loading it
runs the code that it names. That is refused unless the caller trusts the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal.errors import CannotSnapshot
from shoal.memory.copies import own_copy
from shoal.memory.messages import Note
from shoal.memory.slab import FRAME_FIELDS, Slab
from shoal.state.datafile import CannotSave, read_file, write_file
from shoal.state.env_state import EnvState

LANE_FIELDS = ("ended", "run_return", "run_length", "done_ns")  # beside the rows of the frames


@dataclass(frozen=True)
class Snapshot:
    """The state of a pool between two calls. Made by `Pool.snapshot`.

    Attributes:
        about: what must be the same in the pool that restores it: number of envs, spaces, autoreset mode.
        envs: for each env its state, and the seed of its next reset if it was just rebuilt.
        fields: for each field of the slab its value in every lane: the last answers, and the running episodes.
        objects: for each lane the parts of its last observation that are not in the slab.
        notes: infos of answers that were not received yet, by lane.
        scheduler: what the scheduler knows: pending lanes, lanes that must be reset, seeds, restarts.
        trusted: whether pickles in it may be loaded.
    """

    about: dict[str, Any]
    envs: list[tuple[EnvState, Any]]
    fields: dict[str, Any]
    objects: list[list[Any]]
    notes: dict[int, dict[str, Any]]
    scheduler: dict[str, Any]
    trusted: bool = True

    def __repr__(self) -> str:
        kinds = sorted({state.kind for state, _ in self.envs})
        return f"Snapshot({len(self.envs)} envs, saved by {', '.join(kinds)})"

    @property
    def pickled(self) -> list[int]:
        """The envs that were pickled."""
        return [env_id for env_id, (state, _) in enumerate(self.envs) if state.kind == "pickle"]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, all of it or nothing.

        Raises:
            CannotSnapshot: infos or observations that wait to be received are no plain data.
        """
        content = vars(self) | {"envs": [(state.kind, state.content, first_seed) for state, first_seed in self.envs]}
        del content["trusted"]
        try:
            write_file(path, content)
        except CannotSave as error:
            raise CannotSnapshot(
                f"the snapshot cannot be written as data: {error}; receive all results first"
            ) from None

    @classmethod
    def load(cls, path: str | os.PathLike[str], trusted: bool = False) -> Snapshot:
        """Read a file. Runs no code of the file's; `trusted` lets `Pool.restore` do so where envs were pickled.

        Raises:
            CannotSnapshot: it is damaged, no snapshot, or of a newer version.
        """
        try:
            content = read_file(path)
            envs = [(EnvState(kind, state), first_seed) for kind, state, first_seed in content.pop("envs")]
            return cls(envs=envs, trusted=trusted, **content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CannotSnapshot(f"{os.fspath(path)} cannot be read: {error}") from error

    def check(self, about: dict[str, Any]) -> None:
        """Raise CannotSnapshot unless it fits a pool that is described so."""
        for what, here in about.items():
            there = self.about.get(what)
            if there != here:
                raise CannotSnapshot(f"the snapshot does not fit: its {what} is {there}, and the pool's is {here}")
        if self.pickled and not self.trusted:
            raise CannotSnapshot(
                f"the states of envs {self.pickled[:8]} are pickles, which run code when they are loaded: pass "
                "trusted=True if you trust the file, or give the env get_state() and set_state(state)",
                self.pickled,
            )


def read_fields(slab: Slab, leaves: Sequence[str], slots: Any) -> dict[str, Any]:
    """The last answer of every lane, and its running episode, from the slab; `slots` says where each lane is."""
    lanes = np.arange(slab.layout.lanes)
    rows = {name: slab.array(name)[slots, lanes] for name in (*FRAME_FIELDS, *leaves)}
    return rows | {name: slab.array(name).copy() for name in LANE_FIELDS}


def check_fields(slab: Slab, leaves: Sequence[str], fields: dict[str, Any]) -> None:
    """Raise CannotSnapshot unless these are the fields of this slab, and no others: a file may say anything."""
    names = {*FRAME_FIELDS, *LANE_FIELDS, *leaves}
    if set(fields) != names:
        raise CannotSnapshot(f"the snapshot does not fit: its fields differ in {sorted(names ^ set(fields))[:4]}")
    for name, values in fields.items():
        array = slab.array(name)
        shape = array.shape[1:] if name not in LANE_FIELDS else array.shape
        if not isinstance(values, np.ndarray) or values.dtype != array.dtype or values.shape != shape:
            raise CannotSnapshot(f"the snapshot does not fit: its field {name!r} has another shape or type")


def check_facts(facts: dict[str, Any], notes: dict[int, Any], lanes: int) -> None:
    """Raise CannotSnapshot unless the scheduler's part makes sense for so many lanes."""
    try:
        named = [*facts["pending"], *facts["must_reset"], *(loss[0] for loss in facts["due"]), *notes]
        whole = all(type(lane) is int and 0 <= lane < lanes for lane in named)
        whole &= all(len(facts[name]) == lanes for name in ("seeds", "counts", "first_seeds"))
        whole &= all(type(count) is int for count in facts["counts"])
        seeds = [*facts["seeds"], *facts["first_seeds"]]
        whole &= all(seed is None or type(seed) is int for seed in seeds)
        whole &= set(notes) <= set(facts["pending"]) and len(set(facts["pending"])) == len(facts["pending"])
    except (KeyError, TypeError, IndexError, AttributeError):
        whole = False
    if not whole:
        raise CannotSnapshot("the snapshot is damaged: what it says about its lanes makes no sense")


def write_fields(slab: Slab, fields: dict[str, Any], slot: int) -> None:
    """The counterpart of `read_fields`: write the last answers of all lanes into this frame."""
    for name, values in fields.items():
        slab.array(name)[slot if name not in LANE_FIELDS else slice(None)] = values


def notes_of(saved: dict[int, dict[str, Any]], objects: list[list[Any]], requested: Any) -> dict[int, Note]:
    """The notes of answers that were not received yet, as a worker would send them."""
    return {lane: Note(lane, int(requested[lane]), own_copy(info), objects[lane], None) for lane, info in saved.items()}

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

from shoal.errors import BadSnapshot, CannotSnapshot, DataError
from shoal.memory.copies import own_copy
from shoal.memory.messages import NO_SEED, STATUS_ERROR, STATUS_FINAL, STATUS_INFO, STATUS_NOTE, Note
from shoal.memory.slab import FRAME_FIELDS, Slab
from shoal.state.datafile import CannotSave, read_file, write_file
from shoal.state.env_state import EnvState
from shoal.state.sizes import count_parts

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
            BadSnapshot: it is damaged, no snapshot, or of a newer version.
        """
        try:
            content = _checked(read_file(path))
        except DataError as error:
            raise BadSnapshot(f"{os.fspath(path)} cannot be read: {error}") from error
        envs = [(EnvState(kind, state), first_seed) for kind, state, first_seed in content.pop("envs")]
        return cls(envs=envs, trusted=trusted, **content)

    def check(self, about: dict[str, Any]) -> None:
        """Raise BadSnapshot unless it fits a pool that is described so."""
        for what, here in about.items():
            there = self.about.get(what)
            if there != here:
                text = f"its {what} is {there!s:.200}, and the pool's is {here}"
                raise BadSnapshot(f"the snapshot does not fit: {text}")
        if self.pickled and not self.trusted:
            raise BadSnapshot(
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
    """Raise BadSnapshot unless these are the fields of this slab, and no others: a file may say anything."""
    names = {*FRAME_FIELDS, *LANE_FIELDS, *leaves}
    if set(fields) != names:
        different = sorted(map(str, names ^ set(fields)))
        raise BadSnapshot(f"the snapshot does not fit: its fields differ in {different[:4]}")
    for name, values in fields.items():
        array = slab.array(name)
        shape = array.shape[1:] if name not in LANE_FIELDS else array.shape
        if not isinstance(values, np.ndarray) or values.dtype != array.dtype or values.shape != shape:
            raise BadSnapshot(f"the snapshot does not fit: its field {name!r} has another shape or type")


def check_facts(facts: dict[str, Any], notes: dict[int, Any], fields: dict[str, Any]) -> None:
    """Raise BadSnapshot unless the scheduler's part makes sense, and its notes are those that `fields` tell of."""
    lanes, status = len(fields["status"]), fields["status"]
    try:
        pending = facts["pending"]
        named = [*pending, *facts["must_reset"], *(loss[0] for loss in facts["due"]), *notes]
        whole = all(type(lane) is int and 0 <= lane < lanes for lane in named)
        whole &= all(type(facts[name]) is list for name in ("pending", "must_reset", "due"))
        whole &= all(len(facts[name]) == lanes for name in ("seeds", "counts", "first_seeds"))
        whole &= all(type(count) is int and 0 <= count < 2**63 for count in facts["counts"])
        whole &= all(_is_seed(seed) for seed in [*facts["seeds"], *facts["first_seeds"]])
        whole &= all(tuple(map(type, loss)) == (int, str, str, bool, int) for loss in facts["due"])
        whole &= len(set(pending)) == len(pending) and int(fields["ended"].max(initial=0)) <= 1
        # An answer that tells of a note which is not there would be waited for without end.
        whole &= set(notes) == {lane for lane in pending if status[lane] & STATUS_NOTE}
        finals = any(name.startswith("final.") for name in fields)
        wrong = STATUS_ERROR | STATUS_INFO | (0 if finals else STATUS_FINAL)
        whole &= not any(status[lane] & wrong for lane in pending)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError):
        whole = False
    if not whole:
        raise BadSnapshot("the snapshot is damaged: what it says about its lanes makes no sense")


def _is_seed(seed: Any) -> bool:
    """Whether it is None or a number of a size that can be worked with."""
    return seed is None or (type(seed) is int and seed.bit_length() <= 4096)


def _checked(content: Any) -> dict[str, Any]:
    """What a file holds. Raises DataError unless it has the parts of a snapshot, and no other types in them."""
    kinds = {"about": dict, "envs": list, "fields": dict, "objects": list, "notes": dict, "scheduler": dict}
    if type(content) is not dict or {name: type(part) for name, part in content.items()} != kinds:
        raise DataError("it does not have the parts of a snapshot")
    whole = all(type(name) is str for name in [*content["about"], *content["fields"]])
    whole = whole and all(type(value) is str or _is_seed(value) for value in content["about"].values())
    for env in content["envs"]:
        whole = whole and type(env) is tuple and len(env) == 3 and type(env[0]) is str and _is_state(env[1])
        whole = whole and (_is_seed(env[2]) or (type(env[2]) is str and env[2] == NO_SEED))
    whole = whole and all(type(objects) in (list, type(None)) for objects in content["objects"])
    whole = whole and all(type(info) is dict for info in content["notes"].values())
    if not whole:
        raise DataError("it is damaged: parts of it are of types that no snapshot has")
    for name in ("objects", "notes", "scheduler"):
        count_parts(content[name])
    return content


def _is_state(content: Any) -> bool:
    """Whether this can be the content of an EnvState: bytes, nothing, or texts and arrays by name."""
    if type(content) is not dict:
        return content is None or type(content) is bytes
    parts = [part for value in content.values() for part in (value if type(value) is list else [value])]
    return all(type(name) is str for name in content) and all(type(part) in (str, np.ndarray) for part in parts)


def write_fields(slab: Slab, fields: dict[str, Any], slot: int) -> None:
    """The counterpart of `read_fields`: write the last answers of all lanes into this frame."""
    for name, values in fields.items():
        slab.array(name)[slot if name not in LANE_FIELDS else slice(None)] = values


def notes_of(saved: dict[int, dict[str, Any]], objects: list[list[Any]], requested: Any) -> dict[int, Note]:
    """The notes of answers that were not received yet, as a worker would send them."""
    return {lane: Note(lane, int(requested[lane]), own_copy(info), objects[lane], None) for lane, info in saved.items()}

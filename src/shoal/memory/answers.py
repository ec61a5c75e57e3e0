"""What lanes have answered, read from the slab: views where the lanes are one run in one frame, gathers elsewhere.

Copies of large observations cost more than all else that Shoal does, so with copy=True a frame of them is lent instead:
the caller gets a view, and the frame is not written again while that view or a part of it is alive. If the caller
keeps more of them than there are frames, it gets copies. One difference shows: a Gymnasium-style masked reset repeats
the last observations of the envs that it leaves alone, and repeats them as the caller has changed them.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import Space

from shoal.batch import Batch
from shoal.memory.infos import InfoReader, Infos, with_final
from shoal.memory.messages import STATUS_FINAL, STATUS_INFO, Note
from shoal.memory.slab import Slab
from shoal.native import layout
from shoal.spaces.leaves import Kind, Leaf, assemble, flatten
from shoal.support.checks import Ids

FIELDS = ("reward", "terminated", "truncated", "began", "episode_return", "episode_length")
MOST_RUNS = 256  # of neighbouring lanes, whose views are kept

LEND_FROM = 128 << 10  # bytes of a whole frame; less is copied in no time
LEND_FRAMES = 3  # one that is being written, the newest one, and the one before it, which most learners still hold


def frames_to_lend(leaves: Sequence[Leaf], lanes: int, user_resets: bool, wanted: int | None) -> int:
    """How many frames a pool with copy=True needs: 1 where copies are cheap.

    Without autoreset, resets of some envs are the rule, and a dialect's answer to them holds the last observations
    of the others: these must still be here as they were, whatever the caller has done to its own. With copy="lend" the
    caller has said that it does not rely on these, and how many frames are `wanted`.
    """
    if user_resets and wanted is None:
        return 1
    plain = all(leaf.kind is Kind.ARRAY for leaf in leaves)
    nbytes = lanes * sum(leaf.dtype.itemsize * int(np.prod(leaf.shape)) for leaf in leaves)
    return max(LEND_FRAMES, wanted or 0) if plain and nbytes >= LEND_FROM else 1


class Ready(NamedTuple):
    """Lanes that have answered: `ids` ascending; `slot` is -1 unless they are one run in one frame."""

    ids: Ids
    first: int
    slot: int
    infos: dict[int, dict[str, Any]]


class Frames:
    """The frames of a slab, read by lane.

    Args:
        space: the observation space of one env.
        copy: whether all arrays that are handed out are the caller's own.
        lends: whether such arrays are lent frames rather than copies.
        spare: how many frames must be free, beside the one that is lent.
    """

    def __init__(self, slab: Slab, space: Space[Any], copy: bool, lends: bool, spare: int = 1):
        self._space, self._copy, self.lends, self._spare = space, copy, lends, spare
        self._leaves = flatten(space)
        self.handed: Callable[[], None] = lambda: None  # told when answers were handed out whole
        self._count, frames = slab.layout.lanes, slab.layout.frames
        self._lent: list[list[weakref.ref[Any]]] = [[] for _ in range(frames)]
        self._slot, self._status = slab.array("slot"), slab.array("status")
        self._info_rows = InfoReader(slab) if "info_rows" in slab.layout.fields else None
        self._fields = {name: slab.array(name) for name in FIELDS}
        self._pool_stats = slab.array("pool_stats")
        if "present" in slab.layout.fields:
            self._fields["present"] = slab.array("present")
        self._obs, self._finals = slab.leaf_arrays("obs", self._leaves), slab.leaf_arrays("final", self._leaves)
        self._has_mask = "present" in self._fields
        # The same with one row for each frame and lane, which is quicker to gather from.
        self._rows = {name: field.reshape(-1) for name, field in self._fields.items()}
        rows = frames * self._count
        self._obs_rows: list[Any] = [None if a is None else a.reshape(rows, *a.shape[2:]) for a in self._obs]
        self._frame_starts = np.arange(frames) * self._count
        self._runs: dict[tuple[int, int, int], tuple[Any, ...]] = {}  # views, by slot, first lane and length
        self._objects: list[list[Any]] = [[None] * self._count for _ in self._leaves]
        self._all_ids, self._mask = np.arange(self._count), np.ones(self._count, np.bool_)
        self._all_ids.flags.writeable = self._mask.flags.writeable = copy
        # Made once: a view costs more than a small batch.
        plain = all(leaf.kind is Kind.ARRAY for leaf in self._leaves)
        self._one_array = plain and len(self._leaves) == 1 and not self._leaves[0].path
        self._frame_fields = [{name: a[slot] for name, a in self._fields.items()} for slot in range(frames)]
        self._frame_obs: list[Any] = [
            assemble(space, [a[slot] for a in self._obs if a is not None]) if plain else None for slot in range(frames)
        ]
        self._frame_steps = [
            (obs, fields["reward"], fields["terminated"], fields["truncated"])
            for obs, fields in zip(self._frame_obs, self._frame_fields, strict=True)
        ]

    def batch(self, ready: Ready) -> Batch:
        """All fields of the lanes."""
        ids = ready.ids
        if len(ids) == self._count:
            ids = self._all_ids.copy() if self._copy else self._all_ids
        obs, reward, terminated, truncated, mask, began, total, length = self._columns(ready)
        infos = dict(ready.infos) if type(ready.infos) is dict else ready.infos
        # A NamedTuple's own constructor takes three times as long.
        found: Batch = tuple.__new__(
            Batch,
            (obs, reward, terminated, truncated, infos, ids, mask, began, total, length),
        )
        self.handed()
        return found

    def _columns(self, ready: Ready) -> Sequence[Any]:
        """The arrays of a batch: observations, reward, flags, mask, began, and the episode's return and length."""
        ids, first, slot, _ = ready
        if slot < 0:
            places = self._places(ids)
            fields = [rows[places] for rows in self._rows.values()]
            mask = fields[6] if self._has_mask else self._mask[: len(ids)]
            return self._gather_obs(ids, places), *fields[:3], mask.copy() if self._copy else mask, *fields[3:6]
        views = self._runs.get((slot, first, len(ids)))
        if views is None:
            views = self._view_run(slot, first, len(ids))
        if self._copy:
            return self.take_obs(ready), *[view.copy() for view in views[1:]]
        return views if self._one_array else (self.take_obs(ready), *views[1:])

    def _view_run(self, slot: int, first: int, count: int) -> tuple[Any, ...]:
        """The columns of a run of lanes in one frame, as views. They are kept, as making them takes long."""
        whole, run = count == self._count, slice(first, first + count)
        fields = [field if whole else field[run] for field in self._frame_fields[slot].values()]
        obs = self._frame_obs[slot] if self._one_array else None
        mask = fields[6] if self._has_mask else self._mask[:count]
        views = (obs if whole or obs is None else obs[run], *fields[:3], mask, *fields[3:6])
        if len(self._runs) >= MOST_RUNS:
            self._runs.clear()
        self._runs[slot, first, count] = views
        return views

    def _places(self, ids: Ids) -> Ids:
        """Where the last answers of lanes lie in arrays that have one row for each frame and lane."""
        places: Ids = self._frame_starts.take(self._slot[ids])
        places += ids
        return places

    def take(self, ready: Ready, name: str) -> npt.NDArray[Any]:
        """One field of the lanes: a view where they are one run, else an array of its own."""
        ids, first, slot, _ = ready
        if slot < 0:
            gathered: npt.NDArray[Any] = self._rows[name][self._places(ids)]
            return gathered
        view: npt.NDArray[Any] = self._frame_fields[slot][name]
        if len(ids) != self._count:
            view = view[first : first + len(ids)]
        return view.copy() if self._copy else view

    def take_step(self, ready: Ready) -> tuple[Any, ...]:
        """What a step returns in most APIs: obs, reward, terminated, truncated. Reward and flags are always copies."""
        slot = ready.slot
        found: tuple[Any, ...]
        if slot >= 0 and self._one_array and len(ready.ids) == self._count:
            obs, reward, terminated, truncated = self._frame_steps[slot]
            own = (self._lend(slot) if self.lends else obs.copy()) if self._copy else obs
            found = own, reward.copy(), terminated.copy(), truncated.copy()
        else:
            fields = [self.take(ready, name) for name in ("reward", "terminated", "truncated")]
            found = (self.take_obs(ready), *(fields if self._copy or slot < 0 else [field.copy() for field in fields]))
        self.handed()
        return found

    def take_obs(self, ready: Ready) -> Any:
        """The observations of the lanes, nested as the space is."""
        ids, _, slot, _ = ready
        if slot >= 0 and len(ids) == self._count and self._frame_obs[slot] is not None:
            whole = self._frame_obs[slot]
            if not self._copy:
                return whole
            if self.lends:
                return self._lend(slot)
            if self._one_array:
                return whole.copy()
        if slot < 0:
            return self._gather_obs(ids, self._places(ids))
        return assemble(self._space, [self._take_leaf(i, ready) for i in range(len(self._leaves))])

    def _gather_obs(self, ids: Ids, places: Ids) -> Any:
        """The observations of lanes that are no run in one frame: arrays of their own."""
        if self._one_array:
            return self._obs_rows[0].take(places, 0)
        values = [
            self._as_nested(leaf, [kept[lane] for lane in ids.tolist()] if rows is None else rows.take(places, 0))
            for leaf, rows, kept in zip(self._leaves, self._obs_rows, self._objects, strict=True)
        ]
        return assemble(self._space, values)

    def _lend(self, slot: int) -> Any:
        """The observations of a whole frame, the caller's own for as long as it likes."""
        arrays = [array[slot] for array in self._obs if array is not None]
        if len(list(itertools.islice(self._free_slots({slot}), self._spare))) < self._spare:
            own = [array.copy() for array in arrays]
        else:
            # Views of a memoryview: a view of an array would not be kept alive by its own views, which hold the array.
            own = [np.asarray(memoryview(array)) for array in arrays]
            self._lent[slot] += [weakref.ref(array) for array in own]
        return assemble(self._space, own)

    def free_slot(self, besides: Collection[int] = ()) -> int | None:
        """A frame that no lent array is alive of."""
        return next(self._free_slots(besides), None)

    def _free_slots(self, besides: Collection[int]) -> Iterator[int]:
        """Find free frames, the first ones first: so no more memory is touched than is held at a time."""
        for slot, lent in enumerate(self._lent):
            if lent:
                lent[:] = [ref for ref in lent if ref() is not None]
            if not lent and slot not in besides:
                yield slot

    def _take_leaf(self, index: int, ready: Ready) -> Any:
        """One part of the observations of a run of lanes in one frame."""
        ids, first, slot, _ = ready
        array, leaf = self._obs[index], self._leaves[index]
        if array is None:
            return self._as_nested(leaf, [self._objects[index][lane] for lane in ids.tolist()])
        rows = array[slot, first : first + len(ids)]
        return self._as_nested(leaf, rows.copy() if self._copy else rows)

    @staticmethod
    def _as_nested(leaf: Leaf, rows: Any) -> Any:
        """Some rows of a leaf as callers see them: an array, or a tuple of texts or objects."""
        if leaf.kind is Kind.ARRAY:
            return rows
        return tuple(rows.tolist() if leaf.kind is Kind.TEXT else rows)

    def spent_on_infos(self, began_ns: int) -> None:
        """Count the time since then as that of infos; called before the answers are handed out."""
        self._pool_stats[layout.POOL_INFO_NS] += time.monotonic_ns() - began_ns

    def ended(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Bool [n]: where the lanes' last answers ended an episode."""
        slots = self._slot[ids]
        result: npt.NDArray[np.bool_] = self._fields["terminated"][slots, ids] | self._fields["truncated"][slots, ids]
        return result

    def ended_in(self, slot: int, lane: int) -> bool:
        """Whether a lane's answer in this frame ended an episode."""
        return bool(self._fields["terminated"][slot, lane] or self._fields["truncated"][slot, lane])

    def is_step(self, slot: int, lane: int) -> bool:
        """Whether a lane's answer in this frame is a step of a running episode, or its natural end."""
        return not (self._fields["began"][slot, lane] or self._fields["truncated"][slot, lane])

    def finals(self, lanes: Ids) -> list[Any]:
        """The last observations of episodes, of lanes that ended one and began the next; copies."""
        slots = self._slot[lanes]
        leaves = [array[slots, lanes] for array in self._finals if array is not None]
        if self._one_array and not self._leaves[0].scalar and self._leaves[0].shape:
            return list(leaves[0])
        rows = zip(*leaves, strict=True) if leaves else [()] * len(lanes)
        return [
            assemble(self._space, [value if leaf.scalar else np.asarray(value)
                                   for leaf, value in zip(self._leaves, row, strict=True)])
            for row in rows
        ]  # fmt: skip

    def infos(self, ready: Ready, status: int) -> dict[int, dict[str, Any]]:
        """The infos of the lanes; `ready.infos` has what came as notes, and `status` the bits of all lanes."""
        ids, first, slot, notes = ready
        reader = self._info_rows
        if slot >= 0 and reader is not None and (taken := reader.take_run(slot, first, len(ids))) is not None:
            return Infos(reader, *taken, ids, notes, {})
        flags: Any = self._status[slot, first : first + len(ids)] if slot >= 0 else self._status[self._slot[ids], ids]
        finals: dict[int, Any] = {}
        if status & STATUS_FINAL:
            ended = ids[(flags & STATUS_FINAL) != 0]
            finals = dict(zip(ended.tolist(), self.finals(ended), strict=True))
        if not status & STATUS_INFO:
            return notes | {lane: with_final(final, notes.get(lane, {})) for lane, final in finals.items()}
        assert reader is not None
        if slot >= 0 and flags.tobytes().count(STATUS_INFO) == len(ids):
            return Infos(reader, *reader.take(slice(first, first + len(ids)), slot), ids, notes, finals)
        lanes = ids[(flags & STATUS_INFO) != 0]
        return Infos(reader, *reader.take(lanes, self._slot[lanes]), lanes, notes, finals)

    def whole_notes(self, ids: Ids, notes: Sequence[Note], requested: Any) -> dict[int, Note]:
        """The notes of lanes by lane, with the infos that lie in the slab; `requested` numbers the lanes' requests."""
        found = {note.lane: note for note in notes}
        with_row = ids[(self._status[self._slot[ids], ids] & STATUS_INFO) != 0]
        if len(with_row):
            infos = self.infos(Ready(with_row, 0, -1, {lane: note.info for lane, note in found.items()}), STATUS_INFO)
            for lane in with_row.tolist():
                found[lane] = Note(lane, int(requested[lane]), infos[lane], self.objects_of(lane), None)
        return found

    def objects_of(self, lane: int) -> list[Any]:
        """What `keep_objects` was last told of a lane."""
        return [kept[lane] for leaf, kept in zip(self._leaves, self._objects, strict=True) if leaf.kind is Kind.OBJECT]

    def keep_objects(self, lane: int, objects: list[Any]) -> None:
        """Note the parts of a lane's observation that have no array."""
        values = iter(objects)
        for leaf, kept in zip(self._leaves, self._objects, strict=True):
            if leaf.kind is Kind.OBJECT:
                kept[lane] = next(values)

    def whole(self, ready: Ready) -> Ready:
        """All lanes, where only some have just answered: the others have what they had last."""
        slot = int(self._slot[0]) if (self._slot == self._slot[0]).all() else -1
        return Ready(self._all_ids, 0, slot, ready.infos)

    def can_realign(self, ids: Ids, slot: int) -> bool:
        """Whether all lanes can be brought into the frame of those that were just reset.

        Not where that would overwrite rows that must be valid for longer: a reset of some counts as one send of all.
        """
        behind = (slot - self._slot.astype(np.int64)) % len(self._frame_starts)
        if not behind.any() or behind[ids].any():
            return False
        return self.lends or bool((behind <= 1).all())  # a frame to be lent was free before

    def realign(self, slot: int) -> None:
        """Bring the last rows of all lanes, none of which is busy, into one frame.

        Lanes fall out of step when only some are reset; this brings back full batches that are views. `slot` must be
        that of the lanes that were just reset: the others' rows there are old enough to be overwritten.
        """
        others = np.flatnonzero(self._slot != slot)
        for array in [*self._fields.values(), *self._obs]:
            if array is not None:
                array[slot, others] = array[self._slot[others], others]
        self._slot[others] = slot

"""The layout table: every field of the slab, every counter, and every number that Python and C share, written once.

`memory.slab` lays the fields out in this order. `tools/generate_layout.py` makes the C header `layout.h` and the tables
in `docs/explanation/architecture.md` from it. Python reads the numbers here, as `layout.STAT_STEPS` or
`layout.OP_RESET`.

After a change run `python tools/generate_layout.py` and build the core again.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, NamedTuple

__all__ = ["AUTORESET", "COLUMNS", "CONSTANTS", "COUNTERS", "FIELDS", "CounterRow", "FieldRow"]

LINE = 64  # bytes in a cache line; every field starts on one


class FieldRow(NamedTuple):
    """One field of the slab.

    Attributes:
        name: a name that ends in ".i" stands for one field for each leaf of a space.
        shape: each axis is a number of the pool (lanes, frames, workers, row_bytes), a constant, or "..." for the
            shape of a leaf.
        dtype: in NumPy's notation; empty for that of a leaf.
        writer: the one side that writes it.
        shown: whether other processes, such as `shoal top`, may read it by the slab's header.
        c_type: the type of an item in C, where it is not the plain one for `dtype`.
    """

    name: str
    shape: tuple[str, ...]
    dtype: str
    writer: str
    meaning: str
    shown: bool = False
    c_type: str = ""


class CounterRow(NamedTuple):
    """One counter: the field that it lies in, its name, and what it counts. Times are ns of the monotonic clock."""

    array: str
    name: str
    meaning: str


FIELDS = (
    FieldRow("header", ("HEADER_BYTES",), "u1", "the pool, once", "what this region is, for other processes"),
    FieldRow("pool_bell", ("BELL_WORDS",), "u4", "see doorbell.h", "wakes the learner", c_type="Bell"),
    FieldRow("worker_bells", ("workers", "BELL_WORDS"), "u4", "see doorbell.h", "wakes each worker", c_type="Bell"),
    FieldRow("crowd", ("BELL_WORDS",), "u4", "see crowd.h", "wakes all workers at once", c_type="Crowd"),
    FieldRow("waiting", ("WAITING_WIDTH",), "i8", "the caller", "how waits of workers begin: rest, spin, awake until",
             c_type="Waiting"),
    FieldRow("mail", ("workers", "BELL_WORDS"), "u4", "the caller", "counts what was sent through each side channel"),
    FieldRow("stats", ("workers", "STAT_WIDTH"), "i8", "the worker", "counters: what it has done", shown=True),
    FieldRow("roster", ("workers", "3"), "i8", "the pool", "process id, first lane, lane after the last", shown=True),
    FieldRow("episode_sums", ("workers", "SUM_WIDTH"), "f8", "the worker", "counters: episodes that ended", shown=True),
    FieldRow("step_times", ("workers", "TIME_BUCKETS"), "i8", "the worker", "how many steps took how long, by bucket"),
    FieldRow("pool_stats", ("POOL_WIDTH",), "i8", "the caller", "counters: where the caller's time went", shown=True),
    FieldRow("lane_stats", ("lanes", "LANE_WIDTH"), "i8", "the worker", "counters: steps of an env, in its first lane"),
    FieldRow("pending", ("lanes",), "u1", "the caller", "1 from a request until its answer is received", shown=True),
    FieldRow("requested", ("lanes",), "u8", "the caller", "number of the last request", True, "_Atomic uint64_t"),
    FieldRow("answered", ("lanes",), "u8", "the worker", "number of the last answer", True, "_Atomic uint64_t"),
    FieldRow("op", ("lanes",), "u1", "the caller", "what is asked for: OP_STEP, OP_RESET, OP_RESTART or OP_BEGIN"),
    FieldRow("slot", ("lanes",), "u1", "the caller", "the frame that the answer is written into"),
    FieldRow("done_ns", ("lanes",), "i8", "the worker", "when the last answer was given"),
    FieldRow("ended", ("lanes",), "u1", "the worker", "1 where the episode has ended and the next one has not begun"),
    FieldRow("run_return", ("lanes",), "f8", "the worker", "sum of rewards of the running episode"),
    FieldRow("run_length", ("lanes",), "i8", "the worker", "steps of the running episode"),
    FieldRow("action.i", ("lanes", "..."), "", "the caller", "the action of the next step"),
    FieldRow("reward", ("frames", "lanes"), "f8", "the worker", "reward of the step"),
    FieldRow("terminated", ("frames", "lanes"), "?", "the worker", "whether the step ended the episode"),
    FieldRow("truncated", ("frames", "lanes"), "?", "the worker", "whether the step was the last one before a limit"),
    FieldRow("began", ("frames", "lanes"), "?", "the worker", "whether the observation is the first of an episode"),
    FieldRow("status", ("frames", "lanes"), "u1", "the worker", "bits: STATUS_NOTE, ERROR, FINAL, INFO"),
    FieldRow("episode_return", ("frames", "lanes"), "f8", "the worker", "sum of rewards up to this step"),
    FieldRow("episode_length", ("frames", "lanes"), "i8", "the worker", "steps up to this step"),
    FieldRow("present", ("frames", "lanes"), "?", "the worker", "whether the lane's agent is there; for groups only"),
    FieldRow("obs_rows", ("frames", "lanes", "row_bytes"), "u1", "the worker", "all leaves of an observation side by "
             "side, if the pool asks for rows; `obs.i` are then views of it"),
    FieldRow("obs.i", ("frames", "lanes", "..."), "", "the worker", "the observation"),
    FieldRow("final.i", ("frames", "lanes", "..."), "", "the worker", "under same_step, if all leaves are arrays: the "
             "last observation of the episode that the step ended"),
    FieldRow("info_rows", ("frames", "lanes", "INFO_BYTES"), "u1", "the worker", "the info of the step, if the status "
             "has STATUS_INFO: the id of its schema, a tag for each entry, the values"),
    FieldRow("info_schemas", ("workers", "SCHEMA_BYTES"), "u1", "the worker", "the schemas of its infos, one after the "
             "other, as texts; see `memory.info_schema`"),
)  # fmt: skip

COUNTERS = (
    CounterRow("stats", "steps", "answers, resets included"),
    CounterRow("stats", "busy_ns", "from the start of a pass over the block to its last answer"),
    CounterRow("stats", "episodes", "episodes that began"),
    CounterRow("stats", "at", "which env the worker is busy with: its lane + 1; 0 for none; negative for a command"),
    CounterRow("stats", "since_ns", "since when"),
    CounterRow("stats", "passes", "passes over the block in which there was something to do"),
    CounterRow("stats", "wake_ns", "from a request to the start of its pass, while there was nothing else to do"),
    CounterRow("stats", "reset_ns", "the part of busy_ns that went into resets"),
    CounterRow("stats", "sleeps", "waits for a request that ended in a sleep"),
    CounterRow("stats", "idle_ns", "no sum: how long it usually is from a pass to the next request; 0 where a worker "
               "never waits"),
    CounterRow("stats", "idle_spread_ns", "no sum: how far single times are from that"),
    CounterRow("episode_sums", "ended", "episodes that ended"),
    CounterRow("episode_sums", "return", "sum of their returns"),
    CounterRow("episode_sums", "length", "sum of their lengths"),
    CounterRow("lane_stats", "steps", "steps, autoresets included; resets that the caller asked for are none"),
    CounterRow("lane_stats", "ns", "their time"),
    CounterRow("lane_stats", "longest_ns", "the longest of them"),
    CounterRow("pool_stats", "began_ns", "when the pool was made"),
    CounterRow("pool_stats", "since_ns", "when the caller last entered or left the pool"),
    CounterRow("pool_stats", "batches", "batches that the caller took"),
    CounterRow("pool_stats", "caller_ns", "outside of the pool's calls"),
    CounterRow("pool_stats", "wait_ns", "in waits for answers, the caller's own block included"),
    CounterRow("pool_stats", "straggler_ns", "part of wait_ns: how much sooner the answers would have been there if "
               "all workers had finished together; counted where a wait takes all that is pending"),
    CounterRow("pool_stats", "wake_ns", "part of wait_ns: from the last answer to the end of the wait"),
    CounterRow("pool_stats", "copy_ns", "from the end of a wait until its answers were handed out"),
    CounterRow("pool_stats", "info_ns", "part of copy_ns: infos and what else travels beside the slab was waited for, "
               "read and joined"),
    CounterRow("pool_stats", "restarts", "envs that were replaced"),
    CounterRow("pool_stats", "sleeps", "batches for which the caller slept"),
)  # fmt: skip

AUTORESET = {"next_step": 0, "same_step": 1, "disabled": 2}

# The table of numbers and addresses that a kernel is given; see task.h. First plain numbers, then the addresses of
# fields (`slots` is the field `slot`), then those of arrays of the envs, then LEAF_PLACES for each leaf.
TASK_NUMBERS = ("resets", "slot", "now_ns", "lanes", "frames", "mode", "limit", "env", "until", "streams")
TASK_LANE_FIELDS = ("requested", "answered", "op", "slots", "done_ns", "ended", "run_return", "run_length")
TASK_FRAME_FIELDS = ("reward", "terminated", "truncated", "began", "status", "episode_return", "episode_length")
TASK_ENV_FIELDS = ("states", "seeds", "episodes", "rngs", "failed", "saved_states", "saved_rngs")
TASK = (*TASK_NUMBERS, *TASK_LANE_FIELDS, *TASK_FRAME_FIELDS, *TASK_ENV_FIELDS)
TASK_LEAF = ("action", "obs", "final", "wide")
TALLY = ("answered", "began", "status", "failed", "env", "phase")  # what a kernel counts for its caller

_PREFIXES = {"stats": "STAT", "episode_sums": "SUM", "lane_stats": "LANE", "pool_stats": "POOL"}
COLUMNS = {array: tuple(row.name for row in COUNTERS if row.array == array) for array in _PREFIXES}


def _counter_numbers() -> dict[str, int]:
    """Each counter's place in its row, and each row's width. Rows that have a writer each begin on a cache line."""
    numbers: dict[str, int] = {}
    for array, prefix in _PREFIXES.items():
        numbers |= {f"{prefix}_{name.upper()}": place for place, name in enumerate(COLUMNS[array])}
        least, line = len(COLUMNS[array]), 1 if array == "lane_stats" else LINE // 8
        numbers[f"{prefix}_WIDTH"] = -(-least // line) * line
    return numbers


CONSTANTS: dict[str, int] = {
    "HEADER_BYTES": 4096, "BELL_WORDS": LINE // 4, **_counter_numbers(),
    "WAITING_WIDTH": LINE // 8, "WAITING_REST_NS": 0, "WAITING_SPIN_NS": 1, "WAITING_AWAKE_NS": 2,  # see crowd.h
    "TIME_BUCKETS": 136,  # in a row of `step_times`: four for each power of two, up to 2**36 ns
    "OP_STEP": 0, "OP_RESET": 1, "OP_RESTART": 2, "OP_BEGIN": 3,  # what a lane is asked for
    # Bits: a note exists; the env raised; `final` is filled; `info_rows` is.
    "STATUS_NOTE": 1, "STATUS_ERROR": 2, "STATUS_FINAL": 4, "STATUS_INFO": 8,
    "INFO_BYTES": 512, "SCHEMA_BYTES": 16384,  # of a row of an info, and of the schemas of a worker
    "INFO_TAGS": 8,  # where the tags begin in a row, after the id
    # What a tag says of an entry's value: INFO_NUMBER + i is a number of the i-th type of NumPy's.
    "INFO_ABSENT": 0, "INFO_DICT": 1, "INFO_OBJECT": 2, "INFO_NONE": 3, "INFO_BOOL": 4, "INFO_INT": 5, "INFO_FLOAT": 6,
    "INFO_ARRAY": 7, "INFO_NUMBER": 8,
    # The kind of an entry that is no array: one number; only dicts; neither has room; the caller does not want it.
    "INFO_KIND_NUMBER": ord("n"), "INFO_KIND_DICT": ord("d"),
    "INFO_KIND_OBJECT": ord("o"), "INFO_KIND_SKIPPED": ord("x"),
    **{f"AUTORESET_{name.upper()}": mode for name, mode in AUTORESET.items()},
    "ACTION_SCALAR": 0, "ACTION_ROW": 1, "ACTION_CALL": 2,  # what a Block makes of the actions
    "LANE_IDLE": 0, "LANE_PENDING": 1,  # in `pending`
    "POST_OK": 0, "POST_BUSY_LANE": 1,  # what Lanes.post returns
    # What Lanes.collect and Lanes.step return in place of a count or a slot.
    "COLLECT_TIMEOUT": -1, "COLLECT_ALARM": -2, "COLLECT_RAISED": -3, "IN_USE": -4, "NOT_TAKEN": -5,
    "MIXED_SLOTS": 255,  # the slot of a step, where its lanes are not all in one frame
    **{f"TASK_{name.upper()}": place for place, name in enumerate(TASK)}, "TASK_LEAVES": len(TASK),
    **{f"LEAF_{name.upper()}": place for place, name in enumerate(TASK_LEAF)}, "LEAF_PLACES": len(TASK_LEAF),
    "TASK_MOST": 1024,  # numbers of a task
    "MARK_BEGINS": 128,  # in `status`, until a kernel's caller has seen it: an episode began, and nothing was stepped
    "PHASE_STEP": 1, "PHASE_RESET": 2, "PHASE_OBSERVE": 3, "PHASE_UNKNOWN": 4,  # what an env failed in
}  # fmt: skip
globals().update(CONSTANTS)

# The C core has this number too. A core that was built from another table has another one, and is not used.
FINGERPRINT = zlib.crc32(repr((FIELDS, CONSTANTS, TALLY)).encode()) & 0x7FFFFFFF

if TYPE_CHECKING:

    def __getattr__(name: str) -> int: ...

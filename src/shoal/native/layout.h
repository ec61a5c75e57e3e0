/* Made by `python tools/generate_layout.py` from the table in layout.py: do not edit. */
#ifndef SHOAL_LAYOUT_H
#define SHOAL_LAYOUT_H

#include "crowd.h"

#define LAYOUT_FINGERPRINT 1561338337
enum {
    HEADER_BYTES = 4096, BELL_WORDS = 16, STAT_STEPS = 0, STAT_BUSY_NS = 1, STAT_EPISODES = 2, STAT_AT = 3,
    STAT_SINCE_NS = 4, STAT_PASSES = 5, STAT_WAKE_NS = 6, STAT_RESET_NS = 7, STAT_SLEEPS = 8, STAT_IDLE_NS = 9,
    STAT_IDLE_SPREAD_NS = 10, STAT_WIDTH = 16, SUM_ENDED = 0, SUM_RETURN = 1, SUM_LENGTH = 2, SUM_WIDTH = 8,
    LANE_STEPS = 0, LANE_NS = 1, LANE_LONGEST_NS = 2, LANE_WIDTH = 3, POOL_BEGAN_NS = 0, POOL_SINCE_NS = 1,
    POOL_BATCHES = 2, POOL_CALLER_NS = 3, POOL_WAIT_NS = 4, POOL_STRAGGLER_NS = 5, POOL_WAKE_NS = 6, POOL_COPY_NS = 7,
    POOL_INFO_NS = 8, POOL_RESTARTS = 9, POOL_SLEEPS = 10, POOL_WIDTH = 16, WAITING_WIDTH = 8, WAITING_REST_NS = 0,
    WAITING_SPIN_NS = 1, WAITING_AWAKE_NS = 2, TIME_BUCKETS = 136, OP_STEP = 0, OP_RESET = 1, OP_RESTART = 2,
    OP_BEGIN = 3, STATUS_NOTE = 1, STATUS_ERROR = 2, STATUS_FINAL = 4, STATUS_INFO = 8, INFO_BYTES = 512,
    SCHEMA_BYTES = 16384, INFO_TAGS = 8, INFO_ABSENT = 0, INFO_DICT = 1, INFO_OBJECT = 2, INFO_NONE = 3,
    INFO_BOOL = 4, INFO_INT = 5, INFO_FLOAT = 6, INFO_ARRAY = 7, INFO_NUMBER = 8, INFO_KIND_NUMBER = 110,
    INFO_KIND_DICT = 100, INFO_KIND_OBJECT = 111, INFO_KIND_SKIPPED = 120, AUTORESET_NEXT_STEP = 0,
    AUTORESET_SAME_STEP = 1, AUTORESET_DISABLED = 2, ACTION_SCALAR = 0, ACTION_ROW = 1, ACTION_CALL = 2,
    LANE_IDLE = 0, LANE_PENDING = 1, POST_OK = 0, POST_BUSY_LANE = 1, COLLECT_TIMEOUT = -1, COLLECT_ALARM = -2,
    COLLECT_RAISED = -3, IN_USE = -4, NOT_TAKEN = -5, MIXED_SLOTS = 255, TASK_RESETS = 0, TASK_SLOT = 1,
    TASK_NOW_NS = 2, TASK_LANES = 3, TASK_FRAMES = 4, TASK_MODE = 5, TASK_LIMIT = 6, TASK_ENV = 7, TASK_UNTIL = 8,
    TASK_STREAMS = 9, TASK_REQUESTED = 10, TASK_ANSWERED = 11, TASK_OP = 12, TASK_SLOTS = 13, TASK_DONE_NS = 14,
    TASK_ENDED = 15, TASK_RUN_RETURN = 16, TASK_RUN_LENGTH = 17, TASK_REWARD = 18, TASK_TERMINATED = 19,
    TASK_TRUNCATED = 20, TASK_BEGAN = 21, TASK_STATUS = 22, TASK_EPISODE_RETURN = 23, TASK_EPISODE_LENGTH = 24,
    TASK_STATES = 25, TASK_SEEDS = 26, TASK_EPISODES = 27, TASK_RNGS = 28, TASK_FAILED = 29, TASK_SAVED_STATES = 30,
    TASK_SAVED_RNGS = 31, TASK_LEAVES = 32, LEAF_ACTION = 0, LEAF_OBS = 1, LEAF_FINAL = 2, LEAF_WIDE = 3,
    LEAF_PLACES = 4, TASK_MOST = 1024, MARK_BEGINS = 128, PHASE_STEP = 1, PHASE_RESET = 2, PHASE_OBSERVE = 3,
    PHASE_UNKNOWN = 4,
};

/* One pointer for each field of the slab that has a name of its own, in the order of the table. */
typedef struct {
    uint8_t *header; Bell *pool_bell; Bell *worker_bells; Crowd *crowd; Waiting *waiting; uint32_t *mail;
    int64_t *stats; int64_t *roster; double *episode_sums; int64_t *step_times; int64_t *pool_stats;
    int64_t *lane_stats; uint8_t *pending; _Atomic uint64_t *requested; _Atomic uint64_t *answered; uint8_t *op;
    uint8_t *slot; int64_t *done_ns; uint8_t *ended; double *run_return; int64_t *run_length; double *reward;
    uint8_t *terminated; uint8_t *truncated; uint8_t *began; uint8_t *status; double *episode_return;
    int64_t *episode_length; uint8_t *present; uint8_t *obs_rows; uint8_t *info_rows; uint8_t *info_schemas;
} Fields;

/* What a kernel counts for a thread, on a cache line of its own. env, phase: what it is doing; phase 0: unknown. */
typedef struct {
    int64_t answered, began, status, failed, env, phase, spare[2];
} Tally;

#endif

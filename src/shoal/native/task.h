/* Task: what a kernel is told, a table of numbers and addresses. The same in src/shoal/compiled/task.py.
 *
 * A kernel answers the envs from `start` up to `stop`: it steps or resets them, writes the frames, and counts in `tally`.
 * It returns 0, or a negative number that is not -2 where an env has failed: the tally then says which, and the caller
 * goes on behind it. (These are the numbers by which functions of Numba return: this is their calling convention.) */
#ifndef SHOAL_TASK_H
#define SHOAL_TASK_H

#include <stdint.h>

enum TaskPlace {
    TASK_WHOLE, TASK_SLOT, TASK_NOW_NS, TASK_LANES, TASK_FRAMES, TASK_MODE, TASK_LIMIT, TASK_ENV,
    TASK_REQUESTED, TASK_ANSWERED, TASK_OP, TASK_SLOTS, TASK_DONE_NS, TASK_ENDED, TASK_RUN_RETURN, TASK_RUN_LENGTH,
    TASK_REWARD, TASK_TERMINATED, TASK_TRUNCATED, TASK_BEGAN, TASK_STATUS, TASK_EPISODE_RETURN, TASK_EPISODE_LENGTH,
    TASK_STATES, TASK_SEEDS, TASK_EPISODES, TASK_RNGS, TASK_FAILED, TASK_SAVED_STATES, TASK_SAVED_RNGS,
    TASK_LEAVES, /* then four for each leaf: */
};
enum LeafPlace { LEAF_ACTION, LEAF_OBS, LEAF_FINAL, LEAF_WIDE, LEAF_PLACES };
#define TASK_MOST 1024

/* On a cache line of its own, one for each thread. env, phase: what is being done. */
typedef struct {
    int64_t answered, began, status, failed, env, phase, spare[2];
} Tally;

enum Phase { PHASE_STEP = 1, PHASE_RESET = 2, PHASE_OBSERVE = 3 };

typedef int32_t (*KernelFunction)(void **result, void **error, int64_t task, int64_t start, int64_t stop,
                                  int64_t tally);

#endif

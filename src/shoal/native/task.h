/* Task: what a kernel is told, a table of numbers and addresses; layout.py names its places.
 *
 * A kernel steps the envs from `start` up to `stop`, or resets them, into one frame. It writes observations, rewards,
 * `terminated` and `status` (the latter two in an env's first lane), and counts in `tally`; task_finish fills in all
 * other fields, which follow from these. It returns 0, or a negative number that is not -2 where an env has failed: the
 * tally then says which, and the caller goes on behind it. (By these numbers functions of Numba return.) */
#ifndef SHOAL_TASK_H
#define SHOAL_TASK_H

#include "compat.h"
#include "layout.h"

typedef int32_t (*KernelFunction)(void **result, void **error, int64_t task, int64_t start, int64_t stop,
                                  int64_t tally);

/* What follows from the step of some neighbours, in loops over few arrays of one width, which compilers turn into vector
 * code. `count` is at most FINISH_MOST. */
#define FINISH_MOST 128
VECTORIZED static void lanes_finish(int64_t count, int64_t limit, const double *restrict reward,
                                    const uint8_t *restrict terminated, uint8_t *restrict truncated,
                                    uint8_t *restrict began, uint8_t *restrict status, uint8_t *restrict ended,
                                    double *restrict run_return, int64_t *restrict run_length,
                                    double *restrict episode_return, int64_t *restrict episode_length) {
    int64_t steps[FINISH_MOST], goes_on[FINISH_MOST]; /* all bits or none */
    for (int64_t i = 0; i < count; i++) steps[i] = -(int64_t)(status[i] != MARK_BEGINS);
    for (int64_t i = 0; i < count; i++) goes_on[i] = -(int64_t)(status[i] == 0);
    for (int64_t i = 0; i < count; i++) {
        episode_length[i] = (run_length[i] + 1) & steps[i];
        run_length[i] = (run_length[i] + 1) & goes_on[i];
    }
    for (int64_t i = 0; i < count; i++) {
        double total = run_return[i] + reward[i];
        episode_return[i] = steps[i] ? total : 0.0;
        run_return[i] = goes_on[i] ? total : 0.0;
    }
    for (int64_t i = 0; i < count; i++) truncated[i] = (uint8_t)(episode_length[i] >= limit);
    for (int64_t i = 0; i < count; i++) {
        uint8_t mark = status[i];
        began[i] = mark != 0;
        ended[i] = (uint8_t)((terminated[i] | truncated[i]) & (mark == 0));
        status[i] = mark & (MARK_BEGINS - 1);
    }
}

#define TASK_ARRAY(type, name, place) type *restrict name = (type *)(intptr_t)task[place]

/* Fills in the other fields of the envs from `start` up to `stop`, which a kernel has stepped. */
static void task_finish(const int64_t *task, int64_t agents, int64_t start, int64_t stop) {
    int64_t lanes = task[TASK_LANES], first = task[TASK_SLOT] * lanes;
    int64_t limit = task[TASK_LIMIT] > 0 ? task[TASK_LIMIT] : INT64_MAX;
    TASK_ARRAY(const double, reward, TASK_REWARD);
    TASK_ARRAY(uint8_t, terminated, TASK_TERMINATED);
    TASK_ARRAY(uint8_t, truncated, TASK_TRUNCATED);
    TASK_ARRAY(uint8_t, began, TASK_BEGAN);
    TASK_ARRAY(uint8_t, status, TASK_STATUS);
    TASK_ARRAY(uint8_t, ended, TASK_ENDED);
    TASK_ARRAY(double, run_return, TASK_RUN_RETURN);
    TASK_ARRAY(int64_t, run_length, TASK_RUN_LENGTH);
    TASK_ARRAY(double, episode_return, TASK_EPISODE_RETURN);
    TASK_ARRAY(int64_t, episode_length, TASK_EPISODE_LENGTH);
    for (int64_t env = start; agents > 1 && env < stop; env++)
        for (int64_t at = first + env * agents, i = 1; i < agents; i++) {
            status[at + i] = status[at];
            terminated[at + i] = terminated[at];
        }
    for (int64_t lane = start * agents; lane < stop * agents; lane += FINISH_MOST) {
        int64_t at = first + lane, left = stop * agents - lane;
        lanes_finish(left < FINISH_MOST ? left : FINISH_MOST, limit, reward + at, terminated + at, truncated + at,
                     began + at, status + at, ended + lane, run_return + lane, run_length + lane, episode_return + at,
                     episode_length + at);
    }
}

#endif

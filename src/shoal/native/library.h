/* The kernel of envs that are shared libraries (src/shoal/compiled/shoal_env.h): the counterpart in C of what
 * src/shoal/compiled/template.py writes for a class. */
#ifndef SHOAL_LIBRARY_H
#define SHOAL_LIBRARY_H

#include "../compiled/shoal_env.h"
#include "compat.h"
#include "task.h"

static int64_t space_bytes(const shoal_space *space) {
    int64_t size = space->type == 'd' || space->type == 'q' ? 8 : space->type == 'B' ? 1 : 4;
    if (space->discrete > 0) return 8;
    for (int i = 0; i < space->dimensions; i++) size *= space->shape[i];
    return size;
}

static uint64_t mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return z ^ (z >> 31);
}

static uint64_t stream_begin(uint64_t seed, int64_t episode) {
    return mixed(mixed(seed + UINT64_C(0x9E3779B97F4A7C15)) + (uint64_t)episode * UINT64_C(0xD1342543DE82EF95));
}

static int32_t library_kernel(void **result, void **error, int64_t address, int64_t start, int64_t stop,
                              int64_t tally_address) {
    (void)result;
    (void)error;
    const int64_t *task = (const int64_t *)(intptr_t)address;
    Tally *tally = (Tally *)(intptr_t)tally_address;
    const shoal_env *about = (const shoal_env *)(intptr_t)task[TASK_ENV];
    int64_t agents = about->num_agents, lanes = task[TASK_LANES], limit = task[TASK_LIMIT];
    int64_t state_size = (about->state_size + 7) / 8 * 8;
    int64_t obs_size = space_bytes(&about->observation), action_size = space_bytes(&about->action);
    TASK_ARRAY(const uint8_t, ended, TASK_ENDED);
    TASK_ARRAY(const int64_t, run_length, TASK_RUN_LENGTH);
    TASK_ARRAY(double, reward, TASK_REWARD);
    TASK_ARRAY(uint8_t, terminated, TASK_TERMINATED);
    TASK_ARRAY(uint8_t, status, TASK_STATUS);
    TASK_ARRAY(char, states, TASK_STATES);
    TASK_ARRAY(const uint64_t, seeds, TASK_SEEDS);
    TASK_ARRAY(int64_t, episodes, TASK_EPISODES);
    TASK_ARRAY(uint64_t, rngs, TASK_RNGS);
    TASK_ARRAY(const char, actions, TASK_LEAVES + LEAF_ACTION);
    TASK_ARRAY(char, observations, TASK_LEAVES + LEAF_OBS);
    TASK_ARRAY(char, finals, TASK_LEAVES + LEAF_FINAL);
    for (int64_t env = start; env < stop; env++) {
        int64_t lane = env * agents, at = task[TASK_SLOT] * lanes + lane;
        int begins = task[TASK_RESETS] || (task[TASK_MODE] == AUTORESET_NEXT_STEP && ended[lane]);
        char *state = states + env * state_size, *obs = observations + at * obs_size;
        uint8_t mark = begins ? MARK_BEGINS : 0, ends = 0;
        memset(reward + at, 0, (size_t)agents * sizeof(double));
        if (!begins) {
            ends = about->step(state, actions + lane * action_size, reward + at, rngs + env) != 0;
            if (task[TASK_MODE] == AUTORESET_SAME_STEP && (ends || (limit > 0 && run_length[lane] + 1 >= limit))) {
                memset(finals + at * obs_size, 0, (size_t)(agents * obs_size));
                about->observe(state, finals + at * obs_size);
                mark = STATUS_FINAL;
                tally->status |= STATUS_FINAL;
                begins = 1;
            }
        }
        if (begins) {
            memset(state, 0, (size_t)state_size);
            rngs[env] = stream_begin(seeds[env], ++episodes[env]);
            about->reset(state, rngs + env);
            tally->began += agents;
        }
        memset(obs, 0, (size_t)(agents * obs_size));
        about->observe(state, obs);
        terminated[at] = ends;
        status[at] = mark;
    }
    return 0;
}

/* library_kernel() -> its address. */
static PyObject *library_kernel_address(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromVoidPtr((void *)(intptr_t)library_kernel);
}

#endif

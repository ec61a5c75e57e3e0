/* The kernel of simulations: runs a short program on each of many simulations that another library has made.
 *
 * A simulation is a pair of pointers, a model and its data, and every function of the other library is called as
 * function(model, data). The core therefore needs neither headers of that library nor to be linked with it; Python hands
 * over addresses (shoal/mujoco/simulations.py). A program is a table of numbers:
 *
 *     the address of all models, the address of all data, the address of the messages, the number of instructions,
 *     then four numbers for each instruction:
 *         CALL   function, how often, 0
 *         LOAD   addresses in the data of each simulation, an array with a row for each, bytes of a row
 *         STORE  the same: from the simulation into the array
 *
 * Threads of a Kernel run the program (kernel.h), which is why it is one of its functions. */
#ifndef SHOAL_SIMULATE_H
#define SHOAL_SIMULATE_H

#include "compat.h"
#include "task.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

#define MESSAGE_BYTES 256 /* for what the other library says when a simulation fails */

enum { PROGRAM_MODELS, PROGRAM_DATA, PROGRAM_MESSAGES, PROGRAM_COUNT, PROGRAM_FIRST };
enum { SIMULATE_CALL, SIMULATE_LOAD, SIMULATE_STORE };
typedef void (*SimulationFunction)(const void *model, void *data);
typedef void (*ErrorFunction)(const char *message);

static _Thread_local jmp_buf *simulate_trap; /* where an error of the other library goes; NULL outside of a program */
static _Thread_local char *simulate_message;
static ErrorFunction simulate_previous;

/* The other library must not go on after this: it has found that it cannot. */
static void simulate_error(const char *message) {
    if (simulate_trap != NULL) {
        snprintf(simulate_message, MESSAGE_BYTES, "%s", message);
        longjmp(*simulate_trap, 1);
    }
    if (simulate_previous != NULL) {
        simulate_previous(message);
        return;
    }
    fprintf(stderr, "ERROR: %s\n", message);
    exit(1);
}

static void simulate_one(const int64_t *program, int64_t lane) {
    const void *model = ((const void *const *)(intptr_t)program[PROGRAM_MODELS])[lane];
    void *data = ((void *const *)(intptr_t)program[PROGRAM_DATA])[lane];
    const int64_t *at = program + PROGRAM_FIRST, *end = at + 4 * program[PROGRAM_COUNT];
    for (; at < end; at += 4) {
        if (at[0] == SIMULATE_CALL) {
            SimulationFunction function = (SimulationFunction)(intptr_t)at[1];
            for (int64_t i = 0; i < at[2]; i++) function(model, data);
            continue;
        }
        void *place = ((void *const *)(intptr_t)at[1])[lane], *row = (char *)(intptr_t)at[2] + lane * at[3];
        if (at[0] == SIMULATE_LOAD) memcpy(place, row, (size_t)at[3]);
        else memcpy(row, place, (size_t)at[3]);
    }
}

/* A kernel, see task.h; the task's `states` are the program. One that fails is named in the tally. */
static int32_t simulate_kernel(void **result, void **error, int64_t address, int64_t start, int64_t stop,
                               int64_t tally_address) {
    (void)result;
    (void)error;
    const int64_t *task = (const int64_t *)(intptr_t)address;
    const int64_t *program = (const int64_t *)(intptr_t)task[TASK_STATES];
    Tally *tally = (Tally *)(intptr_t)tally_address;
    jmp_buf trap;
    volatile int64_t lane = start;
    if (_setjmp(trap) != 0) {
        simulate_trap = NULL;
        tally->env = lane;
        tally->phase = PHASE_STEP;
        return -1;
    }
    simulate_trap = &trap;
    for (; lane < stop; lane++) {
        simulate_message = (char *)(intptr_t)program[PROGRAM_MESSAGES] + lane * MESSAGE_BYTES;
        simulate_one(program, lane);
    }
    simulate_trap = NULL;
    return 0;
}

/* simulation_kernel(address of a variable that holds the function for errors) -> the kernel's address. */
static PyObject *simulate_kernel_address(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned long long hook;
    if (!PyArg_ParseTuple(args, "K", &hook)) return NULL;
    ErrorFunction *place = (ErrorFunction *)(uintptr_t)hook;
    if (place != NULL && *place != simulate_error) {
        simulate_previous = *place;
        *place = simulate_error;
    }
    return PyLong_FromVoidPtr((void *)(intptr_t)simulate_kernel);
}

#endif

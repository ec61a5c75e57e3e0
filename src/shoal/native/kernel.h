/* Kernel: envs in compiled code, stepped by threads of its own and the caller.
 *
 * The envs are cut into pieces, a few for each thread. Each thread first claims the pieces assigned to it, so that an
 * env stays with the same core, and then takes unclaimed pieces of other threads. The caller is one of the threads. It
 * waits for pieces, not for threads: a thread that wakes up late finds nothing left, and delays no one.
 *
 * A thread claims a piece by moving the piece's number up to that of the round, so one that still has the number of an
 * older round can claim nothing. The job of a round is written before its number, and stays until all are done. */
#ifndef SHOAL_KERNEL_H
#define SHOAL_KERNEL_H

#include "bounds.h"
#include "compat.h"
#include "doorbell.h"
#include "task.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#define PIECES_EACH 16       /* pieces for each thread, at most: a thread that is done first takes those of others */
#define PIECE_ENVS 256       /* envs of a piece, at least, where a kernel's maker does not say */
#define WORTH_A_THREAD 15000 /* ns of work from which on a thread is woken for it */
#define BLOCK 128            /* envs that are taken through all that is to be done together: few enough for the cache */
#define ROLLOUT_STEPS 64     /* steps until it looks for signals */
#define HELPER_SPIN_NS 300000
#define WORTH_CHECKING_TOGETHER (512 << 10) /* bytes of actions from which on the threads share the look at them */
#define KERNEL_CAPSULE "shoal.native.Kernel"

struct Kernel;
typedef struct { struct Kernel *kernel; int index; pthread_t thread; Bell bell; } Helper;

/* Actions, and the bounds that all of them must be inside of. */
typedef struct { char kind; const Py_buffer *values, *low, *high; _Atomic int outside; } Check;

typedef struct {
    Check *check;             /* NULL, or all that is to be done is to look at actions */
    int whole;                /* all envs are stepped; otherwise those that were asked */
    KernelFunction policy;    /* NULL: one step */
    int64_t from, to;         /* steps of a rollout */
    int64_t size;             /* of its task */
    int64_t leaves, row_bytes[64]; /* of its actions: how many arrays, and bytes of one step in each; 0 arrays: the
                                      policy is a kernel that makes the steps itself, up to TASK_UNTIL */
} Job;

typedef struct Kernel {
    PyObject_HEAD
    KernelFunction function;
    Py_buffer task, stats, failed_envs;
    PyObject *on_failed; /* called where envs have failed */
    int64_t *table;      /* the present task: a rollout has one of its own */
    int64_t envs, agents, cost_ns;
    int threads, running;
    _Atomic int stopping;
    pid_t owner;
    Helper *helpers;     /* threads - 1 of them */
    Tally *tallies;      /* one for each thread; 0 is the caller's */
    Job job;
    int64_t pieces, each; /* of all threads, and of one */
    _Atomic uint32_t *claimed;
    _Atomic uint32_t round;
    Bell done;
    int64_t ended;       /* when the last round did */
    Estimate gap;        /* between two rounds */
    _Atomic int64_t helpers_spin_ns; /* how long helpers spin for the next round: decided for all of them */
    int tries;           /* whether it is tried if rounds are faster where all sleep; for envs that take long */
    Trials trials;
} Kernel;

/* Steps a few envs; one that fails is noted, and the others go on. */
static void kernel_step_block(Kernel *self, const int64_t *task, int64_t start, int64_t stop, Tally *tally) {
    void *result = NULL, *error = NULL;
    while (start < stop) {
        int32_t code = self->function(&result, &error, (int64_t)(intptr_t)task, start, stop, (int64_t)(intptr_t)tally);
        if (code == 0 || code == -2) break;
        ((uint8_t *)self->failed_envs.buf)[tally->env] = (uint8_t)(tally->phase ? tally->phase : PHASE_UNKNOWN);
        tally->failed++;
        start = tally->env + 1;
    }
}

static void kernel_step(Kernel *self, const int64_t *task, int64_t start, int64_t stop, Tally *tally) {
    for (int64_t next; start < stop; start = next) {
        next = start + BLOCK < stop ? start + BLOCK : stop;
        kernel_step_block(self, task, start, next, tally);
        task_finish(task, self->agents, start, next);
    }
}

static inline int kernel_is_asked(const int64_t *task, int64_t lane) {
    return ((const uint64_t *)(intptr_t)task[TASK_REQUESTED])[lane] !=
           ((const uint64_t *)(intptr_t)task[TASK_ANSWERED])[lane];
}

/* Answers those of some envs that were asked: neighbours that do the same, into the same frame, at once. */
static void kernel_answer(Kernel *self, int64_t start, int64_t stop, Tally *tally) {
    int64_t task[TASK_MOST], agents = self->agents;
    memcpy(task, self->table, (size_t)self->task.len);
    const uint8_t *op = (const uint8_t *)(intptr_t)task[TASK_OP], *slot = (const uint8_t *)(intptr_t)task[TASK_SLOTS];
    const uint64_t *requested = (const uint64_t *)(intptr_t)task[TASK_REQUESTED];
    uint64_t *answered = (uint64_t *)(intptr_t)task[TASK_ANSWERED];
    int64_t *done_ns = (int64_t *)(intptr_t)task[TASK_DONE_NS];
    for (int64_t end; start < stop; start = end) {
        int64_t lane = start * agents;
        end = start + 1;
        if (!kernel_is_asked(task, end * agents - 1)) continue;
        while (end < stop && kernel_is_asked(task, (end + 1) * agents - 1) && op[end * agents] == op[lane] &&
               slot[end * agents] == slot[lane])
            end++;
        task[TASK_RESETS] = op[lane];
        task[TASK_SLOT] = slot[lane];
        kernel_step(self, task, start, end, tally);
        tally->answered += (end - start) * agents;
        for (; lane < end * agents; lane++) {
            done_ns[lane] = task[TASK_NOW_NS];
            answered[lane] = requested[lane];
        }
    }
}

/* A few envs through all steps of the job: the policy reads the observations of one frame and writes actions, which the
 * kernel answers in the next. */
static void kernel_roll(Kernel *self, int64_t start, int64_t stop, Tally *tally) {
    int64_t task[TASK_MOST];
    void *result = NULL, *error = NULL;
    memcpy(task, self->table, (size_t)self->job.size * sizeof(int64_t));
    if (self->job.leaves == 0) {
        task[TASK_SLOT] = self->job.from;
        task[TASK_UNTIL] = self->job.to;
        self->job.policy(&result, &error, (int64_t)(intptr_t)task, start, stop, (int64_t)(intptr_t)tally);
        return;
    }
    for (int64_t t = self->job.from; t < self->job.to; t++) {
        for (int64_t i = 0; i < self->job.leaves; i++) {
            int64_t at = TASK_LEAVES + LEAF_PLACES * i + LEAF_ACTION;
            task[at] = self->table[at] + t * self->job.row_bytes[i];
        }
        task[TASK_SLOT] = t;
        self->job.policy(&result, &error, (int64_t)(intptr_t)task, start * self->agents, stop * self->agents, 0);
        task[TASK_SLOT] = t + 1;
        kernel_step(self, task, start, stop, tally);
    }
}

static void kernel_check_piece(Kernel *self, int64_t start, int64_t stop) {
    Check *check = self->job.check;
    Py_ssize_t each = check->values->len / self->envs;
    Py_buffer part = *check->values;
    part.buf = (char *)part.buf + start * each;
    part.len = (stop - start) * each;
    if (part.len > 0 && bounds_scan(check->kind, &part, check->low, check->high) != -1)
        atomic_store_explicit(&check->outside, 1, memory_order_relaxed);
}

static void kernel_piece(Kernel *self, int64_t start, int64_t stop, Tally *tally) {
    if (self->job.check != NULL) {
        kernel_check_piece(self, start, stop);
        return;
    }
    if (self->job.policy == NULL) {
        if (self->job.whole) kernel_step(self, self->table, start, stop, tally);
        else kernel_answer(self, start, stop, tally);
        return;
    }
    if (self->job.leaves == 0) kernel_roll(self, start, stop, tally);
    else for (; start < stop; start += BLOCK)
        kernel_roll(self, start, start + BLOCK < stop ? start + BLOCK : stop, tally);
}

static int kernel_claim(Kernel *self, int64_t piece, uint32_t round) {
    uint32_t found = atomic_load_explicit(&self->claimed[piece], memory_order_relaxed);
    while ((int32_t)(round - found) > 0)
        if (atomic_compare_exchange_weak(&self->claimed[piece], &found, round)) return 1;
    return 0;
}

/* Works on the pieces of a round, from this thread's own ones on, until all are claimed. */
static void kernel_work(Kernel *self, int index, uint32_t round) {
    for (int64_t i = 0; i < self->pieces; i++) {
        int64_t piece = (index * self->each + i) % self->pieces;
        if (!kernel_claim(self, piece, round)) continue;
        kernel_piece(self, self->envs * piece / self->pieces, self->envs * (piece + 1) / self->pieces,
                     &self->tallies[index]);
        bell_ring(&self->done, 1);
    }
}

static void *kernel_helper(void *argument) {
    Helper *me = argument;
    Kernel *self = me->kernel;
    uint32_t seen = 0;
    for (;;) {
        int slept;
        Spin spin = {0, atomic_load_explicit(&self->helpers_spin_ns, memory_order_relaxed)};
        while (bell_wait(&me->bell, seen + 1, 0, -1, spin, &slept) != BELL_REACHED) {}
        seen = atomic_load(&me->bell.count);
        if (self->stopping) return NULL;
        kernel_work(self, me->index, atomic_load_explicit(&self->round, memory_order_acquire));
    }
}

/* Starts the helpers when they are needed first. Without them, all is done by the caller. */
static void kernel_start(Kernel *self) {
    self->running = 1;
    self->owner = getpid();
    int wanted = self->threads - 1;
    for (self->threads = 1; wanted > 0; wanted--, self->threads++) {
        Helper *helper = &self->helpers[self->threads - 1];
        helper->kernel = self;
        helper->index = self->threads;
        if (pthread_create(&helper->thread, NULL, kernel_helper, helper) != 0) break;
    }
}

/* A round begins: helpers may spin for the next one if rounds follow each other closely. */
static void kernel_expect(Kernel *self, int64_t began) {
    if (self->ended > 0) estimate_add(&self->gap, began - self->ended);
    int closely = is_short(self->gap, (int)(self->trials.possible & WORKERS_SPIN));
    int64_t possible = closely ? CALLER_SPINS | WORKERS_SPIN : CALLER_SPINS;
    if (possible != self->trials.possible) trials_begin(&self->trials, possible, possible);
    int64_t spin_ns = self->trials.way & WORKERS_SPIN ? HELPER_SPIN_NS : 0;
    atomic_store_explicit(&self->helpers_spin_ns, spin_ns, memory_order_relaxed);
}

/* One job over all envs; the GIL is not needed. */
static void kernel_round(Kernel *self) {
    memset(self->tallies, 0, sizeof(Tally) * (size_t)self->threads);
    int64_t began = now_ns();
    int one_step = self->job.policy == NULL && self->job.check == NULL;
    int alone = self->threads == 1 || self->envs < 2 || (one_step && self->cost_ns < 2 * WORTH_A_THREAD);
    if (!alone && !self->running) kernel_start(self);
    if (alone || self->threads == 1) {
        kernel_piece(self, 0, self->envs, &self->tallies[0]);
        if (one_step) self->cost_ns += (now_ns() - began - self->cost_ns) / 4;
        return;
    }
    kernel_expect(self, began);
    uint32_t target = atomic_load(&self->done.count) + (uint32_t)self->pieces;
    uint32_t round = atomic_load(&self->round) + 1;
    atomic_store(&self->round, round);
    int64_t worth = one_step ? 1 + self->cost_ns / WORTH_A_THREAD : self->threads;
    for (int i = 0; i < self->threads - 1 && i + 1 < worth; i++) bell_ring(&self->helpers[i].bell, 1);
    kernel_work(self, 0, round);
    int slept;
    Spin spin = {0, self->trials.way & CALLER_SPINS ? HELPER_SPIN_NS : 0};
    while (bell_wait(&self->done, target, 0, -1, spin, &slept) != BELL_REACHED) {}
    int64_t parts = worth < self->threads ? worth : self->threads;
    self->ended = now_ns();
    if (one_step) self->cost_ns += ((self->ended - began) * parts - self->cost_ns) / 4;
    if (one_step && self->tries) trials_add(&self->trials, self->ended - began);
}

/* Whether all actions are inside of their bounds, of which there is one for each item of an env's action. */
static int kernel_check(Kernel *self, char kind, const Py_buffer *values, const Py_buffer *low, const Py_buffer *high) {
    if (self->threads == 1 || values->len < WORTH_CHECKING_TOGETHER)
        return bounds_scan(kind, values, low, high) == -1;
    Check check = {.kind = kind, .values = values, .low = low, .high = high};
    self->job.check = &check;
    Py_BEGIN_ALLOW_THREADS
    kernel_round(self);
    Py_END_ALLOW_THREADS
    self->job.check = NULL;
    return !check.outside;
}

/* Sums what the threads have counted; the status bits of all answers, or -1 with an exception set. */
static int kernel_settle(Kernel *self, int64_t began_ns, int64_t steps, int64_t *answered) {
    Tally sum = {0};
    for (int i = 0; i < self->threads; i++) {
        sum.answered += self->tallies[i].answered;
        sum.began += self->tallies[i].began;
        sum.status |= self->tallies[i].status;
        sum.failed += self->tallies[i].failed;
    }
    int64_t *stats = self->stats.buf;
    stats[STAT_STEPS] += steps < 0 ? sum.answered : steps;
    stats[STAT_EPISODES] += sum.began;
    stats[STAT_BUSY_NS] += now_ns() - began_ns;
    *answered = sum.answered;
    if (sum.failed > 0) {
        PyObject *result = shoal_call(self->on_failed, NULL, 0);
        if (result == NULL) return -1;
        Py_DECREF(result);
        sum.status |= STATUS_NOTE | STATUS_ERROR;
    }
    return (int)sum.status;
}

/* Steps all envs into the frame `slot`; the status bits of all answers together, or -1 with an exception set. */
static int kernel_step_all(Kernel *self, int slot, const void *actions) {
    int64_t *table = self->table, answered, began = now_ns();
    int64_t *action = &table[TASK_LEAVES + LEAF_ACTION], own = *action;
    table[TASK_RESETS] = 0;
    table[TASK_SLOT] = slot;
    self->job.whole = 1;
    *action = (int64_t)(intptr_t)actions;
    Py_BEGIN_ALLOW_THREADS
    kernel_round(self);
    Py_END_ALLOW_THREADS
    *action = own;
    return kernel_settle(self, began, self->envs * self->agents, &answered);
}

/* run() -> how many lanes were answered: all that were asked for. */
static PyObject *kernel_run(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    Kernel *self = (Kernel *)object;
    int64_t answered, began = now_ns();
    self->table[TASK_NOW_NS] = began;
    self->job.whole = 0;
    Py_BEGIN_ALLOW_THREADS
    kernel_round(self);
    Py_END_ALLOW_THREADS
    if (kernel_settle(self, began, -1, &answered) < 0) return NULL;
    return PyLong_FromLongLong(answered);
}

/* rollout(task, policy, steps, bytes of one step's actions for each leaf): frame 0 has the first observations; actions
 * are written, and answers into the frames from 1 on. Without leaves, the policy makes the steps itself. */
static PyObject *kernel_rollout(PyObject *object, PyObject *args) {
    Kernel *self = (Kernel *)object;
    PyObject *task_object, *row_bytes;
    unsigned long long policy;
    long long steps;
    if (!PyArg_ParseTuple(args, "OKLO!", &task_object, &policy, &steps, &PyTuple_Type, &row_bytes)) return NULL;
    Py_buffer task;
    if (PyObject_GetBuffer(task_object, &task, PyBUF_WRITABLE) < 0) return NULL;
    int64_t *own = self->table, answered;
    Py_ssize_t leaves = PyTuple_Size(row_bytes);
    int outcome = 0;
    self->job.size = task.len / (int64_t)sizeof(int64_t);
    if (task.len < self->task.len || self->job.size > TASK_MOST || leaves > 64) {
        PyErr_SetString(PyExc_ValueError, "the task of a rollout is at least as long as the kernel's own");
        outcome = -1;
    }
    self->job.leaves = leaves;
    for (Py_ssize_t i = 0; outcome == 0 && i < leaves; i++)
        self->job.row_bytes[i] = PyLong_AsLongLong(PyTuple_GetItem(row_bytes, i));
    self->job.policy = (KernelFunction)(uintptr_t)policy;
    self->table = task.buf;
    self->table[TASK_RESETS] = 0;
    for (int64_t t = 0; t < steps && outcome == 0; t = self->job.to) {
        int64_t began = now_ns();
        self->job.from = t;
        self->job.to = t + ROLLOUT_STEPS < steps ? t + ROLLOUT_STEPS : steps;
        Py_BEGIN_ALLOW_THREADS
        kernel_round(self);
        Py_END_ALLOW_THREADS
        int64_t count = (self->job.to - t) * self->envs * self->agents;
        if (kernel_settle(self, began, count, &answered) < 0 || PyErr_CheckSignals() < 0) outcome = -1;
    }
    self->table = own;
    self->job.policy = NULL;
    PyBuffer_Release(&task);
    if (outcome < 0) return NULL;
    Py_RETURN_NONE;
}

static void kernel_end(Kernel *self) {
    if (!self->running) return;
    self->running = 0;
    if (self->owner != getpid()) return; /* a fork has no threads but its own */
    self->stopping = 1;
    Py_BEGIN_ALLOW_THREADS
    for (int i = 0; i < self->threads - 1; i++) bell_ring(&self->helpers[i].bell, 1);
    for (int i = 0; i < self->threads - 1; i++) pthread_join(self->helpers[i].thread, NULL);
    Py_END_ALLOW_THREADS
    self->threads = 1;
}

/* close(): end the threads. */
static PyObject *kernel_close(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    kernel_end((Kernel *)object);
    Py_RETURN_NONE;
}

static PyObject *kernel_capsule(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    return PyCapsule_New(object, KERNEL_CAPSULE, NULL);
}

static int kernel_init(Kernel *self, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *task, *stats, *failed, *on_failed;
    unsigned long long function;
    long long piece = PIECE_ENVS;
    if (!PyArg_ParseTuple(args, "KOLLiOOO|L", &function, &task, &self->envs, &self->agents, &self->threads, &stats,
                          &failed, &on_failed, &piece))
        return -1;
    if (self->threads < 1) self->threads = 1;
    self->tries = piece < PIECE_ENVS;
    self->function = (KernelFunction)(uintptr_t)function;
    Py_INCREF(on_failed);
    self->on_failed = on_failed;
    if (PyObject_GetBuffer(task, &self->task, PyBUF_WRITABLE) < 0) return -1;
    if (PyObject_GetBuffer(stats, &self->stats, PyBUF_WRITABLE) < 0) return -1;
    if (PyObject_GetBuffer(failed, &self->failed_envs, PyBUF_WRITABLE) < 0) return -1;
    if (self->task.len > TASK_MOST * (Py_ssize_t)sizeof(int64_t) || self->failed_envs.len < self->envs)
        return shoal_refuse(PyExc_ValueError, "too many leaves, or too little room for failures");
    self->table = self->task.buf;
    self->each = self->envs / ((int64_t)self->threads * (piece > 0 ? piece : 1));
    self->each = self->each < 1 ? 1 : self->each > PIECES_EACH ? PIECES_EACH : self->each;
    self->pieces = self->threads * self->each;
    self->claimed = calloc((size_t)self->pieces, sizeof *self->claimed);
    self->helpers = calloc((size_t)self->threads, sizeof *self->helpers);
    self->tallies = aligned_alloc(64, sizeof *self->tallies * (size_t)self->threads);
    if (!self->claimed || !self->helpers || !self->tallies) { PyErr_NoMemory(); return -1; }
    return 0;
}

static int kernel_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Kernel *)object)->on_failed);
    return 0;
}

static int kernel_clear(PyObject *object) {
    Py_CLEAR(((Kernel *)object)->on_failed);
    return 0;
}

static void kernel_dealloc(PyObject *object) {
    Kernel *self = (Kernel *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    kernel_end(self);
    kernel_clear(object);
    free((void *)self->claimed);
    free(self->helpers);
    free(self->tallies);
    if (self->task.obj) PyBuffer_Release(&self->task);
    if (self->stats.obj) PyBuffer_Release(&self->stats);
    if (self->failed_envs.obj) PyBuffer_Release(&self->failed_envs);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyMethodDef kernel_methods[] = {
    {"run", kernel_run, METH_NOARGS, "run() -> how many lanes were answered"},
    {"rollout", kernel_rollout, METH_VARARGS, "rollout(task, policy, steps, bytes of a step's actions for each leaf)"},
    {"capsule", kernel_capsule, METH_NOARGS, "for Lanes.use_kernel"},
    {"close", kernel_close, METH_NOARGS, "end the threads"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kernel_slots[] = {
    {Py_tp_doc, "Envs in compiled code, stepped by threads of its own and the caller."},
    {Py_tp_init, kernel_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, kernel_dealloc},
    {Py_tp_traverse, kernel_traverse},
    {Py_tp_clear, kernel_clear},
    {Py_tp_methods, kernel_methods},
    {0, NULL},
};

static PyType_Spec kernel_spec = {
    "shoal.native._core.Kernel", sizeof(Kernel), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kernel_slots,
};

#endif

/* Lanes: the learner's side of the slab. Posts requests to lanes and collects those that are done.
 *
 *     post:    lane's frame slot moves on, its op is written, requested[lane] += 1, its worker is rung
 *     collect: a lane is ready when answered[lane] == requested[lane]; waits until enough are
 *
 * requested is written here only, answered by the worker only: together they are the lane's sequence
 * number, and a late answer to an older request can never be taken for the newer one.
 * The pool's bell counts answers. It is a hint for when to look; the arrays are the truth. */
#ifndef SHOAL_LANES_H
#define SHOAL_LANES_H

#include "compat.h"
#include "doorbell.h"

#include <stdlib.h>

enum LaneState { LANE_IDLE = 0, LANE_PENDING = 1 };
enum CollectResult { COLLECT_TIMEOUT = -1, COLLECT_ALARM = -2 };
enum PostResult { POST_OK = 0, POST_BUSY_LANE = 1 };

typedef struct { int64_t done_ns, lane; } Candidate;

typedef struct {
    PyObject_HEAD
    Py_buffer slab, state, owner;
    int64_t lanes, frames, workers;
    Bell *pool_bell, *worker_bells;
    _Atomic uint64_t *requested, *answered;
    uint8_t *op, *slot;
    const uint8_t *status; /* [frames, lanes]: what an answer has beside its fields */
    int64_t *done_ns;
    uint32_t alarm_seen;
    Candidate *candidates;
    uint8_t *touched; /* workers to ring in this post */
} Lanes;

static int lanes_init(Lanes *self, PyObject *args, PyObject *kwargs) {
    (void)kwargs;
    PyObject *slab, *state, *owner;
    Py_ssize_t pool_bell, worker_bells, requested, answered, op, slot, done_ns, status;
    if (!PyArg_ParseTuple(args, "OOOLLL(nnnnnnnn)", &slab, &state, &owner, &self->lanes, &self->frames,
                          &self->workers, &pool_bell, &worker_bells, &requested, &answered, &op, &slot, &done_ns,
                          &status))
        return -1;
    if (PyObject_GetBuffer(slab, &self->slab, PyBUF_WRITABLE) < 0) return -1;
    if (PyObject_GetBuffer(state, &self->state, PyBUF_WRITABLE) < 0) return -1;
    if (PyObject_GetBuffer(owner, &self->owner, PyBUF_SIMPLE) < 0) return -1;
    if (self->state.len != self->lanes || self->owner.len != self->lanes * (Py_ssize_t)sizeof(int32_t)) {
        PyErr_SetString(PyExc_ValueError, "state and owner need one entry per lane");
        return -1;
    }
    char *base = self->slab.buf;
    self->pool_bell = (Bell *)(base + pool_bell);
    self->worker_bells = (Bell *)(base + worker_bells);
    self->requested = (_Atomic uint64_t *)(base + requested);
    self->answered = (_Atomic uint64_t *)(base + answered);
    self->op = (uint8_t *)(base + op);
    self->slot = (uint8_t *)(base + slot);
    self->done_ns = (int64_t *)(base + done_ns);
    self->status = (const uint8_t *)(base + status);
    self->candidates = malloc(sizeof(Candidate) * (size_t)(self->lanes + 1));
    self->touched = calloc((size_t)(self->workers + 1), 1);
    if (self->candidates == NULL || self->touched == NULL) { PyErr_NoMemory(); return -1; }
    return 0;
}

static void lanes_dealloc(PyObject *object) {
    Lanes *self = (Lanes *)object;
    PyTypeObject *type = Py_TYPE(object);
    free(self->candidates);
    free(self->touched);
    if (self->slab.obj) PyBuffer_Release(&self->slab);
    if (self->state.obj) PyBuffer_Release(&self->state);
    if (self->owner.obj) PyBuffer_Release(&self->owner);
    PyObject_Free(object);
    Py_DECREF(type);
}

static void lanes_request(Lanes *self, int64_t lane, uint8_t op) {
    uint8_t *state = self->state.buf;
    state[lane] = LANE_PENDING;
    self->slot[lane] = (uint8_t)((self->slot[lane] + 1) % self->frames);
    self->op[lane] = op;
    uint64_t sequence = atomic_load_explicit(&self->requested[lane], memory_order_relaxed);
    atomic_store_explicit(&self->requested[lane], sequence + 1, memory_order_release);
    self->touched[((const int32_t *)self->owner.buf)[lane]] = 1;
}

static void lanes_ring_touched(Lanes *self) {
    for (int64_t worker = 0; worker < self->workers; worker++)
        if (self->touched[worker]) {
            self->touched[worker] = 0;
            bell_ring(&self->worker_bells[worker], 1);
        }
}

/* post(ids or None for all, op): POST_OK, or POST_BUSY_LANE with nothing touched. */
static PyObject *lanes_post(PyObject *object, PyObject *args) {
    Lanes *self = (Lanes *)object;
    PyObject *ids_object;
    unsigned char op;
    if (!PyArg_ParseTuple(args, "Ob", &ids_object, &op)) return NULL;
    const uint8_t *state = self->state.buf;
    if (ids_object == Py_None) {
        if (memchr(state, LANE_PENDING, (size_t)self->lanes) != NULL) return PyLong_FromLong(POST_BUSY_LANE);
        for (int64_t lane = 0; lane < self->lanes; lane++) lanes_request(self, lane, op);
    } else {
        Py_buffer ids;
        if (PyObject_GetBuffer(ids_object, &ids, PyBUF_SIMPLE) < 0) return NULL;
        const int64_t *lane = ids.buf;
        Py_ssize_t count = ids.len / (Py_ssize_t)sizeof(int64_t);
        int refused = 0;
        for (Py_ssize_t i = 0; i < count && !refused; i++)
            refused = lane[i] < 0 || lane[i] >= self->lanes || state[lane[i]] != LANE_IDLE;
        if (!refused)
            for (Py_ssize_t i = 0; i < count; i++) lanes_request(self, lane[i], op);
        PyBuffer_Release(&ids);
        if (refused) return PyLong_FromLong(POST_BUSY_LANE);
    }
    lanes_ring_touched(self);
    return PyLong_FromLong(POST_OK);
}

static inline int lanes_is_ready(Lanes *self, int64_t lane) {
    return ((const uint8_t *)self->state.buf)[lane] == LANE_PENDING &&
           atomic_load_explicit(&self->answered[lane], memory_order_acquire) ==
               atomic_load_explicit(&self->requested[lane], memory_order_relaxed);
}

/* Fills candidates with the ready lanes: of `wanted` if given, of all otherwise. */
static int64_t lanes_scan(Lanes *self, const int64_t *wanted, int64_t wanted_count) {
    int64_t ready = 0, count = wanted ? wanted_count : self->lanes;
    for (int64_t i = 0; i < count; i++) {
        int64_t lane = wanted ? wanted[i] : i;
        if (lanes_is_ready(self, lane)) {
            self->candidates[ready].lane = lane;
            self->candidates[ready++].done_ns = self->done_ns[lane];
        }
    }
    return ready;
}

static int by_time(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    if (x->done_ns != y->done_ns) return x->done_ns < y->done_ns ? -1 : 1;
    return x->lane < y->lane ? -1 : x->lane > y->lane;
}

static int by_lane(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    return x->lane < y->lane ? -1 : x->lane > y->lane;
}

/* Waits until `need` lanes are ready. The count of ready lanes (>= need), or a CollectResult; -3: exception. */
static int64_t lanes_wait(Lanes *self, int64_t need, const int64_t *wanted, int64_t deadline, int64_t spin_ns) {
    for (;;) {
        uint32_t count = atomic_load(&self->pool_bell->count);
        uint32_t alarm = atomic_load(&self->pool_bell->alarm);
        int64_t ready = lanes_scan(self, wanted, need);
        if (ready >= need) return ready;
        if (alarm != self->alarm_seen) return COLLECT_ALARM;
        int result;
        Py_BEGIN_ALLOW_THREADS
        result = bell_wait(self->pool_bell, count + (uint32_t)(need - ready), alarm, deadline, spin_ns);
        Py_END_ALLOW_THREADS
        if (result == BELL_TIMEOUT) {
            ready = lanes_scan(self, wanted, need);
            return ready >= need ? ready : COLLECT_TIMEOUT;
        }
        if (result == BELL_SIGNAL && PyErr_CheckSignals() < 0) return -3;
    }
}

/* collect(need, wanted ids or None, deadline_ns (-1: none), spin_ns, out) -> (count, first, slot, status).
 * Takes the `need` lanes that were done first and writes their ids, ascending, to `out`. When these are one
 * contiguous run in the same frame slot, `first` and `slot` say so; otherwise slot is -1.
 * `status` is all of the lanes' status bits together: 0 means that nothing lies in the side channel. */
static PyObject *lanes_collect(PyObject *object, PyObject *args) {
    Lanes *self = (Lanes *)object;
    long long need, deadline, spin_ns;
    PyObject *wanted_object, *out_object;
    if (!PyArg_ParseTuple(args, "LOLLO", &need, &wanted_object, &deadline, &spin_ns, &out_object)) return NULL;
    Py_buffer wanted = {0}, out = {0};
    if (need < 1 || need > self->lanes) { PyErr_SetString(PyExc_ValueError, "need is out of range"); return NULL; }
    if (wanted_object != Py_None) {
        if (PyObject_GetBuffer(wanted_object, &wanted, PyBUF_SIMPLE) < 0) return NULL;
        if (wanted.len != need * (Py_ssize_t)sizeof(int64_t)) {
            PyBuffer_Release(&wanted);
            PyErr_SetString(PyExc_ValueError, "wanted must have `need` ids");
            return NULL;
        }
    }
    int64_t ready = lanes_wait(self, need, wanted.buf, deadline, spin_ns);
    if (wanted.obj) PyBuffer_Release(&wanted);
    if (ready == -3) return NULL;
    if (ready < 0) return Py_BuildValue("(LLii)", (long long)ready, 0LL, -1, 0);

    if (PyObject_GetBuffer(out_object, &out, PyBUF_WRITABLE) < 0) return NULL;
    if (out.len < need * (Py_ssize_t)sizeof(int64_t)) {
        PyBuffer_Release(&out);
        PyErr_SetString(PyExc_ValueError, "out is too small");
        return NULL;
    }
    Candidate *chosen = self->candidates;
    if (ready > need) qsort(chosen, (size_t)ready, sizeof(Candidate), by_time);
    if (ready > need || wanted_object != Py_None) qsort(chosen, (size_t)need, sizeof(Candidate), by_lane);
    uint8_t *state = self->state.buf;
    int64_t *ids = out.buf, first = chosen[0].lane;
    int slot = self->slot[first], status = 0;
    for (int64_t i = 0; i < need; i++) {
        int64_t lane = chosen[i].lane;
        ids[i] = lane;
        state[lane] = LANE_IDLE;
        status |= self->status[self->slot[lane] * self->lanes + lane];
        if (lane != first + i || self->slot[lane] != slot) slot = -1;
    }
    PyBuffer_Release(&out);
    return Py_BuildValue("(LLii)", need, (long long)first, slot, status);
}

/* The supervisor's cry: wakes whoever waits in collect, which then returns COLLECT_ALARM until heard(). */
static PyObject *lanes_alarm(PyObject *object, PyObject *ignored) {
    (void)ignored;
    bell_cry(((Lanes *)object)->pool_bell);
    Py_RETURN_NONE;
}

static PyObject *lanes_heard(PyObject *object, PyObject *ignored) {
    (void)ignored;
    Lanes *self = (Lanes *)object;
    self->alarm_seen = atomic_load(&self->pool_bell->alarm);
    Py_RETURN_NONE;
}

/* ring(worker): for a message that lies in the worker's side channel. */
static PyObject *lanes_ring(PyObject *object, PyObject *args) {
    Lanes *self = (Lanes *)object;
    long long worker;
    if (!PyArg_ParseTuple(args, "L", &worker)) return NULL;
    if (worker < 0 || worker >= self->workers) { PyErr_SetString(PyExc_IndexError, "no such worker"); return NULL; }
    bell_ring(&self->worker_bells[worker], 1);
    Py_RETURN_NONE;
}

static PyMethodDef lanes_methods[] = {
    {"post", lanes_post, METH_VARARGS, "post(ids | None, op) -> 0, or 1 when a lane was busy"},
    {"collect", lanes_collect, METH_VARARGS, "collect(need, wanted, deadline_ns, spin_ns, out) -> (count, first, slot, status)"},
    {"alarm", lanes_alarm, METH_NOARGS, "wake the waiter: something is wrong"},
    {"heard", lanes_heard, METH_NOARGS, "the alarm was dealt with"},
    {"ring", lanes_ring, METH_VARARGS, "ring one worker's bell"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot lanes_slots[] = {
    {Py_tp_doc, "The learner's side of the slab: posts requests to lanes, collects the answers."},
    {Py_tp_init, lanes_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, lanes_dealloc},
    {Py_tp_methods, lanes_methods},
    {0, NULL},
};

static PyType_Spec lanes_spec = {"shoal.native._core.Lanes", sizeof(Lanes), 0, Py_TPFLAGS_DEFAULT, lanes_slots};

#endif

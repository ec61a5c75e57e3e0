/* Lanes: the learner's side of the slab as a Python type. Posts requests to lanes and collects those that are done. */
#ifndef SHOAL_LANES_H
#define SHOAL_LANES_H

#include "bounds.h"
#include "lanes_wait.h"

static int lanes_init(Lanes *self, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *slab, *state, *owner, *offsets, *leader;
    if (!PyArg_ParseTuple(args, "OOOLLLOOL", &slab, &state, &owner, &self->lanes, &self->frames, &self->workers,
                          &offsets, &leader, &self->window))
        return -1;
    if (leader != Py_None && PyObject_GetBuffer(leader, &self->leader, PyBUF_SIMPLE) < 0) return -1;
    if (self->leader.obj && self->leader.len != self->lanes * (Py_ssize_t)sizeof(int64_t))
        return shoal_refuse(PyExc_ValueError, "leader needs one entry per lane");
    for (int64_t i = 0; self->leader.obj && i < self->lanes; i++)
        if (((const int64_t *)self->leader.buf)[i] < 0 || ((const int64_t *)self->leader.buf)[i] >= self->lanes)
            return shoal_refuse(PyExc_IndexError, "leader names no lane");
    if (PyObject_GetBuffer(slab, &self->slab, PyBUF_WRITABLE) < 0) return -1;
    if (PyObject_GetBuffer(state, &self->state, PyBUF_WRITABLE) < 0) return -1;
    if (PyObject_GetBuffer(owner, &self->owner, PyBUF_SIMPLE) < 0) return -1;
    if (self->state.len != self->lanes || self->owner.len != self->lanes * (Py_ssize_t)sizeof(int32_t))
        return shoal_refuse(PyExc_ValueError, "state and owner need one entry per lane");
    if (fields_read(&self->at, self->slab.buf, offsets) < 0) return -1;
    self->candidates = malloc(sizeof(Candidate) * (size_t)(self->lanes + 1));
    self->touched = calloc((size_t)(self->workers + 1), 1);
    self->finished = calloc((size_t)(self->workers + 1), sizeof(int64_t));
    self->last_lane = calloc((size_t)(self->workers + 1), sizeof(int64_t));
    if (self->candidates == NULL || self->touched == NULL || self->finished == NULL || self->last_lane == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int64_t worker = 0; worker < self->workers; worker++) self->last_lane[worker] = -1;
    for (int64_t lane = 0; lane < self->lanes; lane++) {
        int32_t worker = ((const int32_t *)self->owner.buf)[lane];
        if (worker < 0 || worker >= self->workers) return shoal_refuse(PyExc_IndexError, "owner names no worker");
        self->last_lane[worker] = lane;
    }
    self->at.pool_stats[POOL_BEGAN_NS] = self->at.pool_stats[POOL_SINCE_NS] = now_ns();
    return 0;
}

static void lanes_dealloc(PyObject *object) {
    Lanes *self = (Lanes *)object;
    PyTypeObject *type = Py_TYPE(object);
    free(self->candidates);
    free(self->touched);
    free(self->finished);
    free(self->last_lane);
    if (self->slab.obj) PyBuffer_Release(&self->slab);
    if (self->state.obj) PyBuffer_Release(&self->state);
    if (self->owner.obj) PyBuffer_Release(&self->owner);
    if (self->leader.obj) PyBuffer_Release(&self->leader);
    if (self->low.obj) PyBuffer_Release(&self->low);
    if (self->high.obj) PyBuffer_Release(&self->high);
    Py_XDECREF(self->action.path);
    Py_XDECREF(self->refusal);
    Py_XDECREF(self->kernel_object);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* use_action(leaf description, low, high): actions are one array; bounds of length 0 are not checked. */
static PyObject *lanes_use_action(PyObject *object, PyObject *args) {
    Lanes *self = (Lanes *)object;
    PyObject *description, *low, *high;
    if (!PyArg_ParseTuple(args, "OOO", &description, &low, &high)) return NULL;
    if (self->has_action) { PyErr_SetString(PyExc_RuntimeError, "use_action was called before"); return NULL; }
    if (leaf_read(&self->action, self->slab.buf, description) < 0) return NULL;
    if (PyObject_GetBuffer(low, &self->low, PyBUF_C_CONTIGUOUS) < 0) return NULL;
    if (PyObject_GetBuffer(high, &self->high, PyBUF_C_CONTIGUOUS) < 0) return NULL;
    self->has_action = 1;
    Py_RETURN_NONE;
}

/* use_kernel(kernel): full batches of actions that are one array go straight to it. */
static PyObject *lanes_use_kernel(PyObject *object, PyObject *kernel) {
    Lanes *self = (Lanes *)object;
    PyObject *capsule = PyObject_CallMethod(kernel, "capsule", NULL);
    if (capsule == NULL) return NULL;
    self->kernel = PyCapsule_GetPointer(capsule, KERNEL_CAPSULE);
    Py_DECREF(capsule);
    if (self->kernel == NULL) return NULL;
    Py_XDECREF(self->kernel_object);
    Py_INCREF(kernel);
    self->kernel_object = kernel;
    Py_RETURN_NONE;
}

static PyObject *lanes_arrive(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    Lanes *self = (Lanes *)object;
    if (COUNTING && !atomic_load(&self->in_use)) lanes_arrived(self, now_ns());
    Py_RETURN_NONE;
}

/* What was taken is the caller's now: it was copied, or viewed, since it was taken. */
static PyObject *lanes_handed(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    Lanes *self = (Lanes *)object;
    if (COUNTING && self->taken) {
        int64_t now = now_ns();
        self->at.pool_stats[POOL_COPY_NS] += now - self->at.pool_stats[POOL_SINCE_NS];
        self->at.pool_stats[POOL_SINCE_NS] = now;
        self->taken = 0;
    }
    Py_RETURN_NONE;
}

/* post(ids or None for all, op): POST_OK, or POST_BUSY_LANE with nothing touched. */
static PyObject *lanes_post(PyObject *object, PyObject *args) {
    Lanes *self = (Lanes *)object;
    PyObject *ids_object;
    unsigned char op;
    if (!PyArg_ParseTuple(args, "Ob", &ids_object, &op)) return NULL;
    if (atomic_load(&self->in_use)) return PyLong_FromLong(IN_USE);
    const uint8_t *state = self->state.buf;
    if (ids_object == Py_None) {
        if (memchr(state, LANE_PENDING, (size_t)self->lanes) != NULL) return PyLong_FromLong(POST_BUSY_LANE);
        lanes_request_all(self, op);
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
    int64_t now = COUNTING ? now_ns() : 0;
    crowd_ring(self->at.crowd, self->at.worker_bells, self->touched, self->workers, now);
    self->at.pool_stats[POOL_SINCE_NS] = now;
    return PyLong_FromLong(POST_OK);
}

/* collect(need, wanted ids or None, deadline_ns (-1: none), spin_ns, out, run or None) -> (count, first, slot, status).
 * Takes the `need` lanes that were done first and writes their ids, ascending, to `out`. When these are one
 * contiguous run in the same frame slot, `first` and `slot` say so; otherwise slot is -1.
 * `status` is all of the lanes' status bits together: 0 means that nothing lies in the side channel.
 * `run` steps the caller's own block. */
static PyObject *lanes_collect(PyObject *object, PyObject *args) {
    Lanes *self = (Lanes *)object;
    long long need, deadline, spin_ns;
    PyObject *wanted_object, *out_object, *run;
    if (!PyArg_ParseTuple(args, "LOLLOO", &need, &wanted_object, &deadline, &spin_ns, &out_object, &run)) return NULL;
    Py_buffer wanted = {0}, out = {0};
    if (need < 1 || need > self->lanes) { PyErr_SetString(PyExc_ValueError, "need is out of range"); return NULL; }
    if (PyObject_GetBuffer(out_object, &out, PyBUF_WRITABLE) < 0) return NULL;
    if (wanted_object != Py_None && PyObject_GetBuffer(wanted_object, &wanted, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&out);
        return NULL;
    }
    PyObject *result = NULL;
    Py_ssize_t nbytes = (Py_ssize_t)need * (Py_ssize_t)sizeof(int64_t);
    if (out.len < nbytes || (wanted.obj && wanted.len != nbytes)) {
        PyErr_SetString(PyExc_ValueError, "out and wanted must have room for `need` ids");
    } else {
        int64_t began = COUNTING ? now_ns() : 0;
        int64_t ready = lanes_run_and_wait(self, run, need, wanted.buf, deadline, spin_ns);
        int64_t now = COUNTING ? now_ns() : 0;
        if (ready != IN_USE) lanes_waited(self, began, now);
        if (ready >= 0) {
            if (ready > need) qsort(self->candidates, (size_t)ready, sizeof(Candidate), by_time);
            if (ready > need || wanted.obj) qsort(self->candidates, (size_t)need, sizeof(Candidate), by_lane);
            int status = 0, slot = lanes_take(self, need, out.buf, &status);
            lanes_count_batch(self, began, now);
            result = Py_BuildValue("(LLii)", need, (long long)self->candidates[0].lane, slot, status);
        } else if (ready != COLLECT_RAISED) {
            result = Py_BuildValue("(LLii)", (long long)ready, 0LL, -1, 0);
        }
    }
    PyBuffer_Release(&out);
    if (wanted.obj) PyBuffer_Release(&wanted);
    return result;
}

/* The buffer of a batch of actions, if it is what the space says but for their bounds: to be released then. */
static int lanes_view_actions(Lanes *self, PyObject *actions, Py_buffer *view) {
    if (!self->has_action || PyObject_GetBuffer(actions, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear();
        return 0;
    }
    int fits = leaf_fits(&self->action, view, self->lanes);
    if (!fits) PyBuffer_Release(view);
    return fits;
}

/* Copies a batch of actions into the slab, if it is exactly what the space says. */
static int lanes_accept_actions(Lanes *self, PyObject *actions) {
    Py_buffer view;
    if (!lanes_view_actions(self, actions, &view)) return 0;
    int fits = self->low.len == 0 || bounds_scan(format_kind(view.format), &view, &self->low, &self->high) == -1;
    if (fits) memcpy(self->action.base, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return fits;
}

/* All lanes by the kernel, where they stand in one frame: nothing is posted or collected, and actions are read where
 * they lie. As lanes_step otherwise. */
static PyObject *lanes_step_kernel(Lanes *self, PyObject *actions) {
    Py_buffer view;
    if (memcmp(self->at.slot, self->at.slot + 1, (size_t)self->lanes - 1) != 0 ||
        atomic_load(&self->at.pool_bell->alarm) != self->alarm_seen || !lanes_view_actions(self, actions, &view))
        return PyLong_FromLong(NOT_TAKEN);
    PyObject *result;
    if (atomic_exchange(&self->in_use, 1)) {
        result = PyLong_FromLong(IN_USE);
    } else if (self->low.len > 0 &&
               !kernel_check(self->kernel, format_kind(view.format), &view, &self->low, &self->high)) {
        atomic_store(&self->in_use, 0);
        result = PyLong_FromLong(NOT_TAKEN);
    } else {
        int slot = (int)((self->at.slot[0] + 1) % self->frames);
        memset(self->at.slot, slot, (size_t)self->lanes);
        int64_t began = COUNTING ? now_ns() : 0;
        int status = kernel_step_all(self->kernel, slot, view.buf);
        atomic_store(&self->in_use, 0);
        if (COUNTING) {
            lanes_waited(self, began, now_ns());
            self->at.pool_stats[POOL_BATCHES]++;
            self->taken = 1;
        }
        result = status < 0 ? NULL : PyLong_FromLong(slot | status << 8);
    }
    PyBuffer_Release(&view);
    return result;
}

/* step(actions, run or None, spin_ns, patience_ns (-1: none)) -> slot | status << 8, or a CollectResult.
 * post and collect of all lanes in one call, for actions that need no second look; NOT_TAKEN, with nothing touched,
 * for all others. The slot is MIXED_SLOTS when the lanes are not all in one frame. After `patience_ns` it returns
 * COLLECT_TIMEOUT, so that the caller may look around; the lanes are pending then, and can be collected. */
static PyObject *lanes_step(PyObject *object, PyObject *args) {
    Lanes *self = (Lanes *)object;
    PyObject *actions, *run;
    long long spin_ns, patience_ns;
    if (!PyArg_ParseTuple(args, "OOLL", &actions, &run, &spin_ns, &patience_ns)) return NULL;
    if (atomic_load(&self->in_use)) return PyLong_FromLong(IN_USE);
    if (COUNTING) lanes_arrived(self, now_ns());
    if (memchr(self->state.buf, LANE_PENDING, (size_t)self->lanes) != NULL) return PyLong_FromLong(NOT_TAKEN);
    if (self->kernel != NULL) return lanes_step_kernel(self, actions);
    if (!lanes_accept_actions(self, actions)) return PyLong_FromLong(NOT_TAKEN);
    lanes_request_all(self, OP_STEP);
    int64_t began = now_ns();
    crowd_ring(self->at.crowd, self->at.worker_bells, self->touched, self->workers, began);
    int64_t deadline = patience_ns < 0 ? -1 : began + patience_ns;
    int64_t ready = lanes_run_and_wait(self, run, self->lanes, NULL, deadline, spin_ns);
    int64_t now = COUNTING ? now_ns() : 0;
    if (ready != IN_USE) lanes_waited(self, began, now);
    if (ready == COLLECT_RAISED) return NULL;
    if (ready < 0) return PyLong_FromLongLong(ready);
    int status = 0, slot = lanes_take(self, self->lanes, NULL, &status);
    lanes_count_batch(self, began, now);
    return PyLong_FromLong((slot < 0 ? MIXED_SLOTS : slot) | status << 8);
}

/* The supervisor calls it: wakes the thread that waits in collect, which then returns COLLECT_ALARM until heard(). */
static PyObject *lanes_alarm(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    bell_cry(((Lanes *)object)->at.pool_bell);
    Py_RETURN_NONE;
}

static PyObject *lanes_heard(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    Lanes *self = (Lanes *)object;
    self->alarm_seen = atomic_load(&self->at.pool_bell->alarm);
    Py_RETURN_NONE;
}

/* `with lanes:` keeps other threads out, or raises what `refusal` makes. In C, because Python looks for signals
 * between the statements of an __enter__ of its own, and an interrupt there would keep all threads out for ever. */
static PyObject *lanes_enter(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    Lanes *self = (Lanes *)object;
    if (!atomic_exchange(&self->in_use, 1)) Py_RETURN_NONE;
    return shoal_refuse_thread(self->refusal);
}

static PyObject *lanes_refuse_with(PyObject *object, PyObject *refusal) {
    Lanes *self = (Lanes *)object;
    Py_INCREF(refusal);
    Py_XDECREF(self->refusal);
    self->refusal = refusal;
    Py_RETURN_NONE;
}

static PyObject *lanes_leave(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    atomic_store(&((Lanes *)object)->in_use, 0);
    Py_RETURN_NONE;
}

/* ring(worker): for a message that lies in the worker's side channel. */
static PyObject *lanes_ring(PyObject *object, PyObject *args) {
    Lanes *self = (Lanes *)object;
    long long worker;
    if (!PyArg_ParseTuple(args, "L", &worker)) return NULL;
    if (worker < 0 || worker >= self->workers) { PyErr_SetString(PyExc_IndexError, "no such worker"); return NULL; }
    crowd_ring_one(self->at.crowd, &self->at.worker_bells[worker], worker);
    Py_RETURN_NONE;
}

/* use_cores(parties, cores): waits that are given a negative spin_ns spin as is decided for so many that wait or work, on so
 * many cores. They begin by spinning: until waits are known to be long, they are expected to be short. */
static PyObject *lanes_use_cores(PyObject *object, PyObject *args) {
    Lanes *self = (Lanes *)object;
    long long parties, cores;
    if (!PyArg_ParseTuple(args, "LL", &parties, &cores)) return NULL;
    self->parties = parties;
    self->cores = cores;
    lanes_decide(self);
    Py_RETURN_NONE;
}

/* prepare(ns): the caller will ask for something soon: workers that sleep wake up, and spin for so long at most. */
static PyObject *lanes_prepare(PyObject *object, PyObject *args) {
    Lanes *self = (Lanes *)object;
    long long ns;
    if (!PyArg_ParseTuple(args, "L", &ns)) return NULL;
    crowd_prepare(self->at.crowd, self->at.waiting, self->at.worker_bells, self->workers, now_ns() + ns);
    Py_RETURN_NONE;
}

static PyMethodDef lanes_methods[] = {
    {"post", lanes_post, METH_VARARGS, "post(ids | None, op) -> 0, or 1 when a lane was busy"},
    {"collect", lanes_collect, METH_VARARGS,
     "collect(need, wanted, deadline_ns, spin_ns, out, run) -> (count, first, slot, status)"},
    {"step", lanes_step, METH_VARARGS, "step(actions, run, spin_ns, patience_ns) -> slot | status << 8, or negative"},
    {"use_cores", lanes_use_cores, METH_VARARGS, "use_cores(parties, cores): for what spin_ns < 0 is decided"},
    {"prepare", lanes_prepare, METH_VARARGS, "prepare(ns): workers wake up, and look for requests for so long"},
    {"use_action", lanes_use_action, METH_VARARGS, "use_action(leaf, low, high): actions are one array"},
    {"arrive", lanes_arrive, METH_NOARGS, "the caller has come back"},
    {"handed", lanes_handed, METH_NOARGS, "what was taken is the caller's now"},
    {"use_kernel", lanes_use_kernel, METH_O, "use_kernel(kernel): full batches go straight to it"},
    {"alarm", lanes_alarm, METH_NOARGS, "wake the waiter: something is wrong"},
    {"heard", lanes_heard, METH_NOARGS, "the alarm was dealt with"},
    {"__enter__", lanes_enter, METH_NOARGS, "keep other threads out"},
    {"__exit__", lanes_leave, METH_VARARGS, "let other threads in"},
    {"refuse_with", lanes_refuse_with, METH_O, "a function that makes the error for a second thread"},
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

/* Lanes: the learner's side of the slab as a Python type. Posts requests to lanes and collects those that are done. */
#ifndef SHOAL_LANES_H
#define SHOAL_LANES_H

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
    self->ranked = malloc(sizeof(Candidate) * (size_t)(self->lanes + 1));
    self->marked = calloc((size_t)(self->lanes + 1), 1);
    self->touched = calloc((size_t)(self->workers + 1), 1);
    self->finished = calloc((size_t)(self->workers + 1), sizeof(int64_t));
    self->last_lane = calloc((size_t)(self->workers + 1), sizeof(int64_t));
    if (!self->candidates || !self->ranked || !self->marked || !self->touched || !self->finished || !self->last_lane) {
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
    free(self->ranked);
    free(self->marked);
    free(self->oldest);
    free(self->touched);
    free(self->finished);
    free(self->last_lane);
    if (self->slab.obj) PyBuffer_Release(&self->slab);
    if (self->state.obj) PyBuffer_Release(&self->state);
    if (self->owner.obj) PyBuffer_Release(&self->owner);
    if (self->leader.obj) PyBuffer_Release(&self->leader);
    if (self->sent_at.obj) PyBuffer_Release(&self->sent_at);
    actions_free(&self->actions);
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
    if (actions_init(&self->actions, self->slab.buf, self->lanes, description, low, high) < 0) return NULL;
    Py_RETURN_NONE;
}

/* use_order(sent_at): lanes are received in the order in which they were sent to, which is kept there. */
static PyObject *lanes_use_order(PyObject *object, PyObject *sent_at) {
    Lanes *self = (Lanes *)object;
    if (self->sent_at.obj) { PyErr_SetString(PyExc_RuntimeError, "use_order was called before"); return NULL; }
    if ((self->oldest = malloc(sizeof(int64_t) * (size_t)(self->lanes + 1))) == NULL) return PyErr_NoMemory();
    if (PyObject_GetBuffer(sent_at, &self->sent_at, PyBUF_WRITABLE) == 0) {
        if (self->sent_at.len == (self->lanes + 1) * (Py_ssize_t)sizeof(int64_t)) Py_RETURN_NONE;
        PyBuffer_Release(&self->sent_at);
        PyErr_SetString(PyExc_ValueError, "sent_at needs one entry per lane, and one more");
    }
    free(self->oldest);
    self->oldest = NULL;
    return NULL;
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
            if (ready > need) lanes_keep_first(self, ready, need);
            if (wanted.obj) qsort(self->candidates, (size_t)need, sizeof(Candidate), by_lane);
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

/* All lanes by the kernel, where they stand in one frame: nothing is posted or collected, and actions are read where
 * they lie. As lanes_step otherwise. */
static PyObject *lanes_step_kernel(Lanes *self, const ActionBatch *batch) {
    const Actions *actions = &self->actions;
    if (memcmp(self->at.slot, self->at.slot + 1, (size_t)self->lanes - 1) != 0 ||
        atomic_load(&self->at.pool_bell->alarm) != self->alarm_seen)
        return PyLong_FromLong(NOT_TAKEN);
    if (atomic_exchange(&self->in_use, 1)) return PyLong_FromLong(IN_USE);
    char kind = actions->leaf.kind == 'n' ? 'i' : actions->leaf.kind;
    if (actions->low.len > 0 && !kernel_check(self->kernel, kind, &batch->values, &actions->low, &actions->high)) {
        atomic_store(&self->in_use, 0);
        return PyLong_FromLong(NOT_TAKEN);
    }
    int slot = (int)((self->at.slot[0] + 1) % self->frames);
    memset(self->at.slot, slot, (size_t)self->lanes);
    int64_t began = COUNTING ? now_ns() : 0;
    int status = kernel_step_all(self->kernel, slot, batch->values.buf);
    atomic_store(&self->in_use, 0);
    if (COUNTING) {
        lanes_waited(self, began, now_ns());
        self->at.pool_stats[POOL_BATCHES]++;
        self->taken = 1;
    }
    return status < 0 ? NULL : PyLong_FromLong(slot | status << 8);
}

/* Whether these lanes (NULL: all) are different ones, idle, and whole groups in their order. */
static int lanes_can_send(Lanes *self, const int64_t *lane, int64_t count) {
    const uint8_t *state = self->state.buf;
    const int64_t *leader = self->leader.obj ? self->leader.buf : NULL;
    if (lane == NULL) return memchr(state, LANE_PENDING, (size_t)self->lanes) == NULL;
    int64_t seen = 0;
    for (; seen < count; seen++) {
        int64_t one = lane[seen];
        if (one < 0 || one >= self->lanes || state[one] != LANE_IDLE || self->marked[one]) break;
        if (leader) {
            int goes_on = seen > 0 && leader[lane[seen - 1]] != lane[seen - 1], first = one == 0 || leader[one - 1] == one - 1;
            if (goes_on ? one != lane[seen - 1] + 1 : !first) break;
        }
        self->marked[one] = 1;
    }
    for (int64_t i = 0; i < seen; i++) self->marked[lane[i]] = 0;
    return seen == count && (!leader || leader[lane[count - 1]] == lane[count - 1]);
}

/* Writes the actions of these lanes (NULL: all), which were checked, and posts their requests. When that was. */
static int64_t lanes_begin_step(Lanes *self, const ActionBatch *batch, const int64_t *lane, int64_t count) {
    const Leaf *leaf = &self->actions.leaf;
    size_t size = (size_t)leaf->nbytes;
    const char *rows = batch->values.buf;
    if (lane == NULL) memcpy(leaf->base, rows, size * (size_t)count);
    else
        for (int64_t i = 0; i < count; i++) memcpy(leaf->base + (size_t)lane[i] * size, rows + (size_t)i * size, size);
    lanes_note_order(self, lane, count);
    if (lane == NULL) lanes_request_all(self, OP_STEP);
    else
        for (int64_t i = 0; i < count; i++) lanes_request(self, lane[i], OP_STEP);
    int64_t now = now_ns();
    crowd_ring(self->at.crowd, self->at.worker_bells, self->touched, self->workers, now);
    return now;
}

/* send(actions, ids or None for all): POST_OK; or NOT_TAKEN, with nothing touched, where anything needs a second look:
 * the ids, what the lanes are doing, the actions. */
static PyObject *lanes_send(PyObject *object, PyObject *const *args, Py_ssize_t given) {
    Lanes *self = (Lanes *)object;
    if (given != 2) { PyErr_SetString(PyExc_TypeError, "send takes actions and ids"); return NULL; }
    if (atomic_load(&self->in_use)) return PyLong_FromLong(IN_USE);
    if (COUNTING) lanes_arrived(self, now_ns());
    Py_buffer ids = {0};
    if (args[1] != Py_None && PyObject_GetBuffer(args[1], &ids, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) {
        PyErr_Clear();
        return PyLong_FromLong(NOT_TAKEN);
    }
    int64_t count = ids.obj ? ids.len / (int64_t)sizeof(int64_t) : self->lanes;
    int taken = !ids.obj || (ids.ndim == 1 && ids.itemsize == sizeof(int64_t) && format_kind(ids.format) == 'i' &&
                             count > 0 && count <= self->lanes);
    if (taken) {
        ActionBatch batch;
        taken = actions_open(&self->actions, args[0], count, &batch);
        /* What a batch becomes an array by may be anybody's code: nothing was looked at before. */
        if (taken > 0) taken = lanes_can_send(self, ids.buf, count) && actions_inside(&self->actions, &batch);
        if (taken > 0) {
            int64_t now = lanes_begin_step(self, &batch, ids.buf, count);
            if (COUNTING) self->at.pool_stats[POOL_SINCE_NS] = now;
        }
        actions_close(&batch);
    }
    if (ids.obj) PyBuffer_Release(&ids);
    return taken < 0 ? NULL : PyLong_FromLong(taken ? POST_OK : NOT_TAKEN);
}

/* Takes what a wait that began then has found: first << 16 | status << 8 | slot, or the CollectResult that it is. The
 * slot is MIXED_SLOTS unless the lanes are one run, from `first` on, in one frame. */
static PyObject *lanes_hand_over(Lanes *self, int64_t ready, int64_t need, int64_t began, int64_t *ids) {
    int64_t now = COUNTING ? now_ns() : 0;
    if (ready != IN_USE) lanes_waited(self, began, now);
    if (ready == COLLECT_RAISED) return NULL;
    if (ready < 0) return PyLong_FromLongLong(ready);
    if (ready > need) lanes_keep_first(self, ready, need);
    int status = 0, slot = lanes_take(self, need, ids, &status);
    int64_t first = self->candidates[0].lane;
    lanes_count_batch(self, began, now);
    return PyLong_FromLongLong((int64_t)(slot < 0 ? MIXED_SLOTS : slot) | (int64_t)status << 8 | first << 16);
}

/* recv(need, out or None, run or None, spin_ns, patience_ns (-1: none)) -> first << 16 | status << 8 | slot, or a
 * CollectResult. As collect, of lanes in the pool's order, whose ids, ascending, are written to `out`; None where all are
 * needed. NOT_TAKEN, with nothing touched, where fewer are pending. As in step, after `patience_ns` it returns
 * COLLECT_TIMEOUT. */
static PyObject *lanes_recv(PyObject *object, PyObject *const *args, Py_ssize_t given) {
    Lanes *self = (Lanes *)object;
    if (given != 5) { PyErr_SetString(PyExc_TypeError, "recv takes need, out, run, spin_ns, patience_ns"); return NULL; }
    int64_t need = PyLong_AsLongLong(args[0]);
    int64_t spin_ns = PyLong_AsLongLong(args[3]), patience_ns = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    if (need < 1 || need > self->lanes) { PyErr_SetString(PyExc_ValueError, "need is out of range"); return NULL; }
    Py_buffer out = {0};
    if (args[1] != Py_None && PyObject_GetBuffer(args[1], &out, PyBUF_WRITABLE) < 0) return NULL;
    PyObject *result = NULL;
    if (out.obj ? out.len != need * (Py_ssize_t)sizeof(int64_t) : need != self->lanes) {
        PyErr_SetString(PyExc_ValueError, "out must have room for `need` ids");
    } else if (atomic_load(&self->in_use)) {
        result = PyLong_FromLong(IN_USE);
    } else {
        int64_t began = now_ns();
        if (COUNTING) lanes_arrived(self, began);
        if (!lanes_enough_pending(self, need)) {
            result = PyLong_FromLong(NOT_TAKEN);
        } else {
            const int64_t *wanted = self->sent_at.obj && need < self->lanes ? lanes_oldest(self, need) : NULL;
            int64_t deadline = patience_ns < 0 ? -1 : began + patience_ns;
            int64_t ready = lanes_run_and_wait(self, args[2], need, wanted, deadline, spin_ns);
            result = lanes_hand_over(self, ready, need, began, out.buf);
        }
    }
    if (out.obj) PyBuffer_Release(&out);
    return result;
}

/* step(actions, run or None, spin_ns, patience_ns (-1: none)) -> status << 8 | slot, or a CollectResult.
 * send and recv of all lanes in one call, for actions that need no second look; NOT_TAKEN, with nothing touched,
 * for all others. The slot is MIXED_SLOTS when the lanes are not all in one frame. After `patience_ns` it returns
 * COLLECT_TIMEOUT, so that the caller may look around; the lanes are pending then, and can be collected. */
static PyObject *lanes_step(PyObject *object, PyObject *const *args, Py_ssize_t given) {
    Lanes *self = (Lanes *)object;
    if (given != 4) { PyErr_SetString(PyExc_TypeError, "step takes actions, run, spin_ns, patience_ns"); return NULL; }
    int64_t spin_ns = PyLong_AsLongLong(args[2]), patience_ns = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (atomic_load(&self->in_use)) return PyLong_FromLong(IN_USE);
    if (COUNTING) lanes_arrived(self, now_ns());
    ActionBatch batch;
    PyObject *result = NULL;
    int taken = actions_open(&self->actions, args[0], self->lanes, &batch);
    if (taken > 0) taken = lanes_can_send(self, NULL, self->lanes);
    if (taken > 0 && self->kernel != NULL) {
        result = lanes_step_kernel(self, &batch);
        actions_close(&batch);
        return result;
    }
    if (taken > 0) taken = actions_inside(&self->actions, &batch);
    int64_t began = taken > 0 ? lanes_begin_step(self, &batch, NULL, self->lanes) : 0;
    actions_close(&batch);
    if (taken <= 0) return taken < 0 ? NULL : PyLong_FromLong(NOT_TAKEN);
    int64_t deadline = patience_ns < 0 ? -1 : began + patience_ns;
    int64_t ready = lanes_run_and_wait(self, args[1], self->lanes, NULL, deadline, spin_ns);
    return lanes_hand_over(self, ready, self->lanes, began, NULL);
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

/* ways() -> (who may spin, who spins now, the best way so far, what a batch takes by each): see spinning.h. */
static PyObject *lanes_ways(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    const Trials *trials = &((Lanes *)object)->trials;
    const int64_t *cost = trials->cost;
    return Py_BuildValue("(LLL(LLLL))", (long long)trials->possible, (long long)trials->way, (long long)trials->best,
                         (long long)cost[0], (long long)cost[1], (long long)cost[2], (long long)cost[3]);
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
    {"send", (PyCFunction)(void (*)(void))lanes_send, METH_FASTCALL, "send(actions, ids | None) -> 0, or negative"},
    {"recv", (PyCFunction)(void (*)(void))lanes_recv, METH_FASTCALL,
     "recv(need, out, run, spin_ns, patience_ns) -> first << 16 | status << 8 | slot, or negative"},
    {"step", (PyCFunction)(void (*)(void))lanes_step, METH_FASTCALL,
     "step(actions, run, spin_ns, patience_ns) -> status << 8 | slot, or negative"},
    {"use_cores", lanes_use_cores, METH_VARARGS, "use_cores(parties, cores): for what spin_ns < 0 is decided"},
    {"ways", lanes_ways, METH_NOARGS, "ways() -> (who may spin, who does, the best way, ns of a batch by each way)"},
    {"prepare", lanes_prepare, METH_VARARGS, "prepare(ns): workers wake up, and look for requests for so long"},
    {"use_action", lanes_use_action, METH_VARARGS, "use_action(leaf, low, high): actions are one array"},
    {"use_order", lanes_use_order, METH_O, "use_order(sent_at): lanes are received as they were sent to"},
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

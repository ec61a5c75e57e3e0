/* Block: the worker's side of the slab. Steps the envs of a contiguous run of lanes.
 *
 *     for every lane with requested != answered:
 *         action from the slab -> env.step -> obs by the buffer protocol, reward and flags into the frame
 *         answered = requested, and the pool's bell
 *
 * Only the common path lives here: a plain step, array or integer observations, an info of numbers (infos.h).
 * Everything else (resets, odd observations, other infos, exceptions) goes to the Python callbacks of
 * shoal.worker.single.SingleStepper, which the Python twin uses as well, so there is one implementation of it.
 * The rules of autoreset have their model in shoal/envs/autoreset.py. */
#ifndef SHOAL_STEP_BLOCK_H
#define SHOAL_STEP_BLOCK_H

#include "compat.h"
#include "counters.h"
#include "doorbell.h"
#include "infos.h"
#include "leaf.h"

#include <stdlib.h>

/* What a Block holds of Python: a list of bound env.step, one for each lane; the actions, which are an array [lanes], an
 * array of the rows of its own lanes, or a callable(lane); the callbacks. LEARN and PARTS are NULL where infos have no
 * rows in the slab. COPIED is a copy of the rows during a pass in which all lanes are stepped, NULL otherwise. */
enum { STEPS, ACTIONS, SPECIAL, FINISH, NOTE, STORE, FAILED, FLUSH, LEARN, PARTS, COPIED, HELD };

typedef struct {
    PyObject_HEAD
    Py_buffer slab;
    Fields at; /* the slab's fields; those that have a row for each worker begin with this worker's */
    int64_t lanes, start, stop;
    int autoreset, publish_each, action_kind, special_leaves;
    Member member;
    int64_t idle_since; /* when the last pass ended */
    int64_t posted_seen; /* the request to all workers that was taken last: when it was posted */
    int64_t waking;     /* how long the pass that is under way was waited for; for steppers that call `publish` */
    Py_ssize_t leaf_count;
    Leaf *leaves;
    InfoSchema infos;
    PyObject *held[HELD];
    PyObject *copy_name;
    int noted;
    int was_reset; /* whether the lane that was just answered has begun an episode instead of a step */
} Block;

static int block_traverse(PyObject *object, visitproc visit, void *arg) {
    Block *self = (Block *)object;
    Py_VISIT(Py_TYPE(object));
    for (int i = 0; i < HELD; i++) Py_VISIT(self->held[i]);
    return 0;
}

static int block_clear(PyObject *object) {
    Block *self = (Block *)object;
    for (int i = 0; i < HELD; i++) Py_CLEAR(self->held[i]);
    return 0;
}

static void block_dealloc(PyObject *object) {
    Block *self = (Block *)object;
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    block_clear(object);
    Py_CLEAR(self->copy_name);
    for (Py_ssize_t i = 0; i < self->leaf_count; i++) Py_XDECREF(self->leaves[i].path);
    free(self->leaves);
    info_clear(&self->infos);
    if (self->slab.obj) PyBuffer_Release(&self->slab);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static int block_init(Block *self, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *slab, *offsets, *leaves, *callbacks, *steps, *actions;
    long long worker;
    if (!PyArg_ParseTuple(args, "OLLLLipiOO!O!OO!", &slab, &worker, &self->lanes, &self->start, &self->stop,
                          &self->autoreset, &self->publish_each, &self->action_kind, &offsets, &PyTuple_Type, &leaves,
                          &PyList_Type, &steps, &actions, &PyTuple_Type, &callbacks))
        return -1;
    PyObject *held[HELD] = {steps, actions};
    if (!PyArg_ParseTuple(callbacks, "OOOOOO", &held[SPECIAL], &held[FINISH], &held[NOTE], &held[STORE], &held[FAILED],
                          &held[FLUSH]))
        return -1;
    for (int i = 0; i < HELD; i++) {
        Py_XINCREF(held[i]);
        self->held[i] = held[i];
    }
    if (self->action_kind == ACTION_ROW) {
        PyObject *own = PySequence_GetSlice(actions, self->start, self->stop);
        if (own == NULL) return -1;
        Py_DECREF(actions);
        self->held[ACTIONS] = own;
    }
    if ((self->copy_name = PyUnicode_FromString("__copy__")) == NULL) return -1; /* quicker than `copy` */
    if (PyList_Size(steps) != self->stop - self->start)
        return shoal_refuse(PyExc_ValueError, "one step function per lane is needed");
    if (PyObject_GetBuffer(slab, &self->slab, PyBUF_WRITABLE) < 0) return -1;
    char *base = self->slab.buf;
    if (fields_read(&self->at, base, offsets) < 0) return -1;
    self->at.worker_bells += worker;
    self->at.stats += worker * STAT_WIDTH;
    self->at.episode_sums += worker * SUM_WIDTH;
    self->at.step_times += worker * TIME_BUCKETS;
    self->member = (Member){self->at.worker_bells, self->at.crowd, self->at.waiting, 0, 0, member_bit(worker), 0};
    Py_ssize_t count = PyTuple_Size(leaves);
    if ((self->leaves = calloc((size_t)count + 1, sizeof(Leaf))) == NULL) { PyErr_NoMemory(); return -1; }
    for (Py_ssize_t i = 0; i < count; i++) {
        self->leaf_count = i + 1;
        if (leaf_read(&self->leaves[i], base, PyTuple_GetItem(leaves, i)) < 0) return -1;
        if (strchr("fiubn", self->leaves[i].kind) == NULL) self->special_leaves = 1;
    }
    return 0;
}

static int store_integer(PyObject *value, char *target, Py_ssize_t itemsize) {
    PyObject *index = PyNumber_Index(value);
    if (index == NULL) return -1;
    int64_t number = PyLong_AsLongLong(index);
    Py_DECREF(index);
    if (number == -1 && PyErr_Occurred()) return -1;
    if (itemsize != sizeof(int64_t)) return -1;
    memcpy(target, &number, sizeof number);
    return 0;
}

static int store_array(PyObject *value, const Leaf *leaf, char *target) {
    Py_buffer view;
    if (PyBytes_Check(value)) return -1; /* text to numpy, though its buffer looks like uint8 */
    if (PyObject_GetBuffer(value, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) return -1;
    int fits = leaf_fits(leaf, &view, -1);
    if (fits) memcpy(target, view.buf, (size_t)leaf->nbytes);
    PyBuffer_Release(&view);
    return fits ? 0 : -1;
}

/* Writes what lies in `value` at the leaf's path; takes the reference, which may be NULL. */
static int store_leaf(const Leaf *leaf, PyObject *value, char *target) {
    Py_ssize_t depth = PyTuple_Size(leaf->path);
    for (Py_ssize_t i = 0; value != NULL && i < depth; i++) {
        PyObject *next = PyObject_GetItem(value, PyTuple_GetItem(leaf->path, i));
        Py_DECREF(value);
        value = next;
    }
    if (value == NULL) return -1;
    int result = leaf->kind == 'n' ? store_integer(value, target, leaf->itemsize) : store_array(value, leaf, target);
    Py_DECREF(value);
    return result;
}

/* callback(lane, slot, a, b); a and b may be NULL. -1 with an exception set if it raised. */
static int block_callback(PyObject *callback, int64_t lane, int64_t slot, PyObject *a, PyObject *b) {
    PyObject *args[4] = {PyLong_FromLongLong(lane), PyLong_FromLongLong(slot), a, b};
    PyObject *result = NULL;
    if (args[0] != NULL && args[1] != NULL) result = shoal_call(callback, args, a == NULL ? 2 : b == NULL ? 3 : 4);
    Py_XDECREF(args[0]);
    Py_XDECREF(args[1]);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* Fast where every leaf is as its space says; otherwise SingleStepper.store casts it or says what is wrong. */
static int block_store(Block *self, PyObject *observation, int64_t lane, int slot) {
    int result = self->special_leaves ? -1 : 0;
    for (Py_ssize_t i = 0; i < self->leaf_count && result == 0; i++) {
        const Leaf *leaf = &self->leaves[i];
        Py_INCREF(observation);
        result = store_leaf(leaf, observation, leaf->base + (slot * self->lanes + lane) * leaf->stride);
    }
    if (result == 0) return 0;
    PyErr_Clear();
    return block_callback(self->held[STORE], lane, slot, observation, NULL);
}

static PyObject *block_action(Block *self, int64_t lane) {
    if (self->action_kind == ACTION_CALL) {
        PyObject *number = PyLong_FromLongLong(lane);
        if (number == NULL) return NULL;
        PyObject *action = shoal_call(self->held[ACTIONS], &number, 1);
        Py_DECREF(number);
        return action;
    }
    if (self->action_kind == ACTION_SCALAR) return PySequence_GetItem(self->held[ACTIONS], lane);
    if (self->held[COPIED] != NULL) return PySequence_GetItem(self->held[COPIED], lane - self->start);
    PyObject *row = PySequence_GetItem(self->held[ACTIONS], lane - self->start);
    /* A copy: envs keep and change their actions, and the slab will hold the next one. */
    PyObject *own = row ? PyObject_CallMethodObjArgs(row, self->copy_name, NULL) : NULL;
    Py_XDECREF(row);
    return own;
}

/* Copies the actions of all lanes at once, if all of them wait for a step: a row of that takes a third of the time of a
 * copy of its own. A lane that is asked later may have another action by then, so it gets its own copy. */
static int block_copy_actions(Block *self) {
    if (self->action_kind != ACTION_ROW) return 0;
    for (int64_t lane = self->start; lane < self->stop; lane++)
        if (atomic_load_explicit(&self->at.requested[lane], memory_order_acquire) ==
            atomic_load_explicit(&self->at.answered[lane], memory_order_relaxed))
            return 0;
    self->held[COPIED] = PyObject_CallMethodObjArgs(self->held[ACTIONS], self->copy_name, NULL);
    return self->held[COPIED] == NULL ? -1 : 0;
}

/* A flag as an env returns it: a bool of Python or NumPy, or anything that is true or false, but for a text, of which
 * "False" would be true. -1 with an exception set. */
static int block_flag(PyObject *value, const char *name) {
    if (value == Py_False) return 0;
    if (value == Py_True) return 1;
    int truth = PyObject_IsTrue(value);
    if (truth > 0 && (PyUnicode_Check(value) || PyBytes_Check(value))) {
        PyErr_Format(PyExc_TypeError, "%s must be a bool, got %R", name, value);
        return -1;
    }
    return truth;
}

/* Asks for a schema that the info fits: 1 where there is one now, 0 where not, -1 with an exception set. */
static int block_learn_info(Block *self, PyObject *info) {
    PyObject *learnt = shoal_call(self->held[LEARN], &info, 1);
    int result = learnt == NULL ? -1 : PyObject_IsTrue(learnt);
    Py_XDECREF(learnt);
    return result;
}

/* Keeps an info: in a row of the slab where it fits a schema, as a note otherwise. -1 with an exception set. */
static int block_note(Block *self, int64_t lane, int slot, PyObject *info) {
    if (PyDict_Check(info) && PyDict_Size(info) == 0) return 0;
    int result = self->held[LEARN] && PyDict_CheckExact(info) ? INFO_UNKNOWN : INFO_FAILED;
    PyObject *objects = NULL;
    int64_t at = slot * self->lanes + lane;
    int found = 0;
    if (result == INFO_UNKNOWN) {
        char *row = (char *)self->at.info_rows + at * INFO_BYTES;
        result = info_write(&self->infos, info, row, &objects, &found);
        int learnt = result == INFO_UNKNOWN ? block_learn_info(self, info) : 0;
        if (learnt < 0) return -1;
        if (learnt) result = info_write(&self->infos, info, row, &objects, &found);
        if (result == INFO_FAILED) return -1;
    }
    if (result != INFO_WRITTEN) {
        self->noted = 1;
        return block_callback(self->held[NOTE], lane, slot, info, NULL);
    }
    if (found) self->at.status[at] |= STATUS_INFO;
    if (objects == NULL) return 0;
    self->noted = 1;
    result = block_callback(self->held[PARTS], lane, slot, objects, NULL);
    Py_DECREF(objects);
    return result;
}

/* Writes one result of env.step into the frame. -1 with an exception set: the env's fault. */
static int block_accept(Block *self, PyObject *result, int64_t lane, int slot) {
    if (!PyTuple_Check(result) || PyTuple_Size(result) != 5) {
        PyErr_Format(PyExc_TypeError,
                     "step must return a tuple (obs, reward, terminated, truncated, info), got %R", result);
        return -1;
    }
    PyObject *observation = PyTuple_GetItem(result, 0), *info = PyTuple_GetItem(result, 4);
    double reward = PyFloat_AsDouble(PyTuple_GetItem(result, 1));
    if (reward == -1.0 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError, "reward must be a number, got %R", PyTuple_GetItem(result, 1));
        }
        return -1;
    }
    int terminated = block_flag(PyTuple_GetItem(result, 2), "terminated");
    if (terminated < 0) return -1;
    int truncated = block_flag(PyTuple_GetItem(result, 3), "truncated");
    if (truncated < 0) return -1;

    int64_t at = slot * self->lanes + lane;
    self->at.reward[at] = reward;
    write_flag(&self->at.terminated[at], (uint8_t)terminated);
    write_flag(&self->at.truncated[at], (uint8_t)truncated);
    write_flag(&self->at.began[at], 0);
    write_flag(&self->at.status[at], 0);
    self->at.episode_return[at] = self->at.run_return[lane] += reward;
    self->at.episode_length[at] = self->at.run_length[lane] += 1;
    if (terminated || truncated) {
        count_episode(&self->at, self->at.run_return[lane], self->at.run_length[lane]);
        if (self->autoreset == AUTORESET_SAME_STEP) {
            self->noted = 1;
            int64_t began = COUNTING ? now_ns() : 0;
            int outcome = block_callback(self->held[FINISH], lane, slot, observation, info);
            if (COUNTING) self->at.stats[STAT_RESET_NS] += now_ns() - began;
            return outcome;
        }
        self->at.ended[lane] = 1;
    }
    if (block_store(self, observation, lane, slot) < 0) return -1;
    if (self->special_leaves) self->noted = 1;
    return block_note(self, lane, slot, info);
}

static int block_step_lane(Block *self, int64_t lane) {
    int slot = self->at.slot[lane];
    int outcome;
    self->was_reset = 0;
    if (self->at.op[lane] != OP_STEP || (self->at.ended[lane] && self->autoreset == AUTORESET_NEXT_STEP)) {
        PyObject *op = PyLong_FromLong(self->at.op[lane]);
        if (op == NULL) return -1;
        self->noted = self->was_reset = 1;
        outcome = block_callback(self->held[SPECIAL], lane, slot, op, NULL);
        Py_DECREF(op);
    } else {
        PyObject *action = block_action(self, lane);
        PyObject *step = PyList_GetItem(self->held[STEPS], lane - self->start);
        PyObject *result = action && step ? shoal_call(step, &action, 1) : NULL;
        Py_XDECREF(action);
        outcome = result == NULL ? -1 : block_accept(self, result, lane, slot);
        Py_XDECREF(result);
    }
    if (outcome == 0) return 0;
    PyObject *error = shoal_take_exception();
    self->noted = 1;
    outcome = block_callback(self->held[FAILED], lane, slot, error, NULL);
    Py_XDECREF(error);
    return outcome;
}

static int block_flush(Block *self) {
    if (!self->noted) return 0;
    PyObject *result = shoal_call(self->held[FLUSH], NULL, 0);
    if (result == NULL) return -1; /* an interrupt: next time */
    self->noted = 0;
    Py_DECREF(result);
    return 0;
}

/* Says which lane is being stepped (`lane` + 1, 0 for none) and since when: to be read by those that find it slow,
 * or its process dead. */
static inline void block_show(Block *self, int64_t lane, int64_t since) {
    __atomic_store_n(&self->at.stats[STAT_SINCE_NS], since, __ATOMIC_RELAXED);
    __atomic_store_n(&self->at.stats[STAT_AT], lane, __ATOMIC_RELEASE);
}

/* A lane is about to answer; `ns` is what it took. Resets that were asked for are no steps. */
static inline void block_count(Block *self, int64_t lane, int64_t ns) {
    if (COUNTING && self->was_reset) self->at.stats[STAT_RESET_NS] += ns;
    if (self->at.op[lane] == OP_STEP) count_step(&self->at, lane, ns);
}

/* How long a request has waited for this pass while there was nothing else to do. Asked in passes without any lane
 * too: a request that came during the last pass may have been answered by it. */
static inline int64_t block_waking(Block *self, int64_t now) {
    if (!COUNTING) return 0;
    int64_t since = 0, to_all = atomic_load_explicit(&self->at.crowd->posted_ns, memory_order_relaxed);
    if (to_all != self->posted_seen) since = self->posted_seen = to_all;
    if (atomic_load_explicit(&self->at.worker_bells->posted_ns, memory_order_relaxed) != 0)
        since = atomic_exchange(&self->at.worker_bells->posted_ns, 0);
    if (since == 0) return 0;
    if (since < self->idle_since) since = self->idle_since;
    return now > since ? now - since : 0;
}

/* A pass that had something to do is over. */
static inline void block_passed(Block *self, int64_t steps, int64_t waking, int64_t began, int64_t now) {
    block_show(self, 0, now);
    self->at.stats[STAT_STEPS] += steps;
    self->at.stats[STAT_BUSY_NS] += now - began;
    if (!COUNTING) return;
    self->at.stats[STAT_PASSES]++;
    self->at.stats[STAT_WAKE_NS] += waking;
    self->idle_since = now;
}

/* run() -> how many lanes were stepped. Raises only what `failed` raises (an interrupt in the caller's process). */
static PyObject *block_run(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    Block *self = (Block *)object;
    int64_t began = now_ns(), clock = began, stepped = 0, waking = block_waking(self, began);
    uint32_t to_ring = 0;
    int outcome = block_copy_actions(self);
    for (int64_t lane = self->start; lane < self->stop && outcome == 0; lane++) {
        uint64_t sequence = atomic_load_explicit(&self->at.requested[lane], memory_order_acquire);
        if (sequence == atomic_load_explicit(&self->at.answered[lane], memory_order_relaxed)) continue;
        block_show(self, lane + 1, clock);
        if ((outcome = block_step_lane(self, lane)) < 0) break;
        int64_t since = clock;
        self->at.done_ns[lane] = clock = now_ns();
        block_count(self, lane, clock - since);
        atomic_store_explicit(&self->at.answered[lane], sequence, memory_order_release);
        stepped++;
        to_ring++;
        if (self->publish_each) {
            int delayed = bell_ring(self->at.pool_bell, 1) || self->noted;
            to_ring = 0;
            outcome = block_flush(self);
            if (COUNTING && delayed) clock = now_ns(); /* the next env is not to blame for it */
        }
    }
    Py_CLEAR(self->held[COPIED]);
    if (stepped > 0) block_passed(self, stepped, waking, began, clock);
    if (to_ring > 0) bell_ring(self->at.pool_bell, to_ring);
    if (outcome < 0 || block_flush(self) < 0) return NULL;
    return PyLong_FromLongLong(stepped);
}

/* asked(out) -> how many lanes wait for an answer; their ids, ascending, are written to `out`. */
static PyObject *block_asked(PyObject *object, PyObject *out_object) {
    Block *self = (Block *)object;
    Py_buffer out;
    if (PyObject_GetBuffer(out_object, &out, PyBUF_WRITABLE) < 0) return NULL;
    if (out.len < (self->stop - self->start) * (Py_ssize_t)sizeof(int64_t)) {
        PyBuffer_Release(&out);
        PyErr_SetString(PyExc_ValueError, "out must have room for all lanes of the block");
        return NULL;
    }
    int64_t count = 0, *ids = out.buf;
    self->waking += block_waking(self, now_ns());
    for (int64_t lane = self->start; lane < self->stop; lane++)
        if (atomic_load_explicit(&self->at.requested[lane], memory_order_acquire) !=
            atomic_load_explicit(&self->at.answered[lane], memory_order_relaxed))
            ids[count++] = lane;
    PyBuffer_Release(&out);
    return PyLong_FromLongLong(count);
}

/* enter(lane): the env of this lane is about to be stepped, by a stepper that writes the frames itself. */
static PyObject *block_enter(PyObject *object, PyObject *args) {
    Block *self = (Block *)object;
    long long lane;
    if (!PyArg_ParseTuple(args, "L", &lane)) return NULL;
    block_show(self, lane + 1, now_ns());
    Py_RETURN_NONE;
}

/* leave(lane): the env of this lane was stepped. */
static PyObject *block_leave(PyObject *object, PyObject *args) {
    Block *self = (Block *)object;
    long long lane;
    if (!PyArg_ParseTuple(args, "L", &lane)) return NULL;
    if (lane < self->start || lane >= self->stop) return PyErr_Format(PyExc_IndexError, "no lane of this block");
    self->was_reset = self->at.op[lane] != OP_STEP;
    block_count(self, lane, now_ns() - self->at.stats[STAT_SINCE_NS]);
    Py_RETURN_NONE;
}

/* part(): in a forked child, in the middle of a pass: the pass ends with `flush`. The slab is the child's own by then, so
 * that its bells do not ring in other processes. */
static PyObject *block_part(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    ((Block *)object)->noted = 1;
    Py_RETURN_NONE;
}

/* publish(ids, began_ns): these lanes, which were asked, have answered; for steppers that write the frames themselves.
 * They answer one after the other, as given: when the last of them has answered, all have. */
static PyObject *block_publish(PyObject *object, PyObject *args) {
    Block *self = (Block *)object;
    PyObject *ids_object;
    long long began;
    if (!PyArg_ParseTuple(args, "OL", &ids_object, &began)) return NULL;
    Py_buffer ids;
    if (PyObject_GetBuffer(ids_object, &ids, PyBUF_SIMPLE) < 0) return NULL;
    const int64_t *lane = ids.buf;
    Py_ssize_t count = ids.len / (Py_ssize_t)sizeof(int64_t);
    int64_t now = now_ns();
    for (Py_ssize_t i = 0; i < count; i++) {
        if (lane[i] < self->start || lane[i] >= self->stop) continue;
        self->at.done_ns[lane[i]] = now;
        uint64_t sequence = atomic_load_explicit(&self->at.requested[lane[i]], memory_order_relaxed);
        atomic_store_explicit(&self->at.answered[lane[i]], sequence, memory_order_release);
    }
    PyBuffer_Release(&ids);
    block_passed(self, count, self->waking, began, now);
    self->waking = 0;
    bell_ring(self->at.pool_bell, (uint32_t)count);
    Py_RETURN_NONE;
}

/* plain_slot() -> the frame into which all lanes of the block are asked for a plain step; -1 if anything else is asked.
 * If all are, the frame is made ready for a stepper that writes it itself: its fields but observations are zeros. */
static PyObject *block_plain_slot(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    Block *self = (Block *)object;
    int64_t first = self->start, count = self->stop - first;
    int slot = self->at.slot[first];
    for (int64_t lane = first; lane < self->stop; lane++)
        if (self->at.op[lane] != OP_STEP || self->at.slot[lane] != slot ||
            atomic_load_explicit(&self->at.requested[lane], memory_order_acquire) ==
                atomic_load_explicit(&self->at.answered[lane], memory_order_relaxed))
            return PyLong_FromLong(-1);
    self->waking += block_waking(self, now_ns());
    int64_t at = slot * self->lanes + first;
    memset(self->at.reward + at, 0, (size_t)count * sizeof(double));
    memset(self->at.terminated + at, 0, (size_t)count);
    memset(self->at.truncated + at, 0, (size_t)count);
    memset(self->at.began + at, 0, (size_t)count);
    memset(self->at.status + at, 0, (size_t)count);
    memset(self->at.episode_return + at, 0, (size_t)count * sizeof(double));
    memset(self->at.episode_length + at, 0, (size_t)count * sizeof(int64_t));
    return PyLong_FromLong(slot);
}

/* keep_books(slot): the returns and lengths of the episodes of all lanes, after a step of all of them that another has
 * written into this frame; as GroupStepper._keep_books, for lanes that are always present. */
static PyObject *block_keep_books(PyObject *object, PyObject *slot_object) {
    Block *self = (Block *)object;
    long slot = PyLong_AsLong(slot_object);
    if (slot < 0 || slot > UINT8_MAX) return PyErr_Format(PyExc_IndexError, "no frame");
    for (int64_t lane = self->start; lane < self->stop; lane++) {
        int64_t at = slot * self->lanes + lane;
        int over = self->at.terminated[at] || self->at.truncated[at], began = self->at.began[at] != 0;
        int stepped = over || !began;
        double total = self->at.run_return[lane] + (stepped ? self->at.reward[at] : 0.0);
        int64_t length = self->at.run_length[lane] + stepped;
        self->at.episode_return[at] = stepped ? total : 0.0;
        self->at.episode_length[at] = stepped ? length : 0;
        if (over) count_episode(&self->at, total, length);
        self->at.stats[STAT_EPISODES] += began;
        self->at.run_return[lane] = began ? 0.0 : total;
        self->at.run_length[lane] = began ? 0 : length;
        self->at.ended[lane] = over && !began;
    }
    Py_RETURN_NONE;
}

/* A wait has ended: learns how long it was from the end of the last pass to the next request. */
static inline void block_learn(Block *self, int slept) {
    int64_t *stats = self->at.stats, posted = member_posted(&self->member);
    stats[STAT_SLEEPS] += slept;
    if (posted == 0 || self->idle_since == 0) return; /* a message, or the first request */
    Estimate idle = {stats[STAT_IDLE_NS], stats[STAT_IDLE_SPREAD_NS]};
    estimate_add(&idle, posted > self->idle_since ? posted - self->idle_since : 0);
    __atomic_store_n(&stats[STAT_IDLE_SPREAD_NS], idle.spread_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&stats[STAT_IDLE_NS], idle.usual_ns, __ATOMIC_RELAXED);
}

/* wait(deadline_ns or -1, spin_ns or -1) -> True when rung since the last wait, False at the deadline. It spins as the
 * caller has decided for all workers if `spin_ns` is negative. */
static PyObject *block_wait(PyObject *object, PyObject *args) {
    Block *self = (Block *)object;
    long long deadline, spin_ns;
    if (!PyArg_ParseTuple(args, "LL", &deadline, &spin_ns)) return NULL;
    for (;;) {
        int result, slept = 0;
        if (PyErr_CheckSignals() < 0) return NULL;
        Py_BEGIN_ALLOW_THREADS
        result = member_wait(&self->member, deadline, spin_ns, self->idle_since, &slept);
        Py_END_ALLOW_THREADS
        if (result == BELL_TIMEOUT) Py_RETURN_FALSE;
        if (result == BELL_REACHED) {
            member_heard(&self->member);
            if (COUNTING) block_learn(self, slept);
            Py_RETURN_TRUE;
        }
    }
}

/* begin(lane, slot, observation, info, fresh): the first observation of an episode. `fresh`: the lane was asked for
 * a reset, so that its reward and flags are none; otherwise they are those of the step that ended the last episode.
 * Raises what `store` and `note` raise. */
static PyObject *block_begin(PyObject *object, PyObject *args) {
    Block *self = (Block *)object;
    long long lane;
    int slot, fresh;
    PyObject *observation, *info;
    if (!PyArg_ParseTuple(args, "LiOOp", &lane, &slot, &observation, &info, &fresh)) return NULL;
    if (lane < self->start || lane >= self->stop || slot < 0 || slot > UINT8_MAX)
        return PyErr_Format(PyExc_IndexError, "no lane of this block");
    int64_t at = slot * self->lanes + lane;
    if (fresh) {
        self->at.reward[at] = self->at.episode_return[at] = 0.0;
        self->at.terminated[at] = self->at.truncated[at] = self->at.status[at] = 0;
        self->at.episode_length[at] = 0;
    }
    self->at.began[at] = 1;
    self->at.ended[lane] = 0;
    self->at.run_return[lane] = 0.0;
    self->at.run_length[lane] = 0;
    self->at.stats[STAT_EPISODES]++;
    if (block_store(self, observation, lane, slot) < 0 || block_note(self, lane, slot, info) < 0) return NULL;
    Py_RETURN_NONE;
}

/* note(lane, slot, info): keeps the info of an answer, for steppers that write the frames themselves. */
static PyObject *block_keep_info(PyObject *object, PyObject *args) {
    Block *self = (Block *)object;
    long long lane;
    int slot;
    PyObject *info;
    if (!PyArg_ParseTuple(args, "LiO", &lane, &slot, &info)) return NULL;
    if (lane < self->start || lane >= self->stop || slot < 0 || slot > UINT8_MAX)
        return PyErr_Format(PyExc_IndexError, "no lane of this block");
    if (block_note(self, lane, slot, info) < 0) return NULL;
    Py_RETURN_NONE;
}

/* use_infos(learn, parts): infos are written into rows of the slab. learn(info) -> whether there is a schema for it now;
 * parts(lane, slot, objects) gets what has no room in a row. */
static PyObject *block_use_infos(PyObject *object, PyObject *args) {
    Block *self = (Block *)object;
    PyObject *learn, *parts;
    if (!PyArg_ParseTuple(args, "OO", &learn, &parts)) return NULL;
    if (self->at.info_rows == NULL || self->held[LEARN] != NULL)
        return PyErr_Format(PyExc_RuntimeError, "the slab has no rows of infos, or use_infos was called before");
    Py_INCREF(learn);
    Py_INCREF(parts);
    self->held[LEARN] = learn;
    self->held[PARTS] = parts;
    Py_RETURN_NONE;
}

/* use_schema((id, entries, types, array)): infos are written by this schema from now on. */
static PyObject *block_use_schema(PyObject *object, PyObject *description) {
    if (!PyTuple_Check(description)) return PyErr_Format(PyExc_TypeError, "a schema is described by a tuple");
    Block *self = (Block *)object;
    if (info_read(&self->infos, (char *)self->at.info_rows, description) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef block_methods[] = {
    {"run", block_run, METH_NOARGS, "step every lane that was asked for; returns how many"},
    {"begin", block_begin, METH_VARARGS, "begin(lane, slot, observation, info, fresh): an episode begins"},
    {"note", block_keep_info, METH_VARARGS, "note(lane, slot, info): keep the info of an answer"},
    {"use_infos", block_use_infos, METH_VARARGS, "use_infos(learn, parts): write infos into rows of the slab"},
    {"use_schema", block_use_schema, METH_O, "use_schema((id, entries, types, array)): write infos by this schema"},
    {"asked", block_asked, METH_O, "asked(out) -> how many lanes wait for an answer, their ids in `out`"},
    {"plain_slot", block_plain_slot, METH_NOARGS, "plain_slot() -> the frame of a plain step of all lanes, or -1"},
    {"keep_books", block_keep_books, METH_O, "keep_books(slot): episodes of all lanes, after a step of all"},
    {"enter", block_enter, METH_VARARGS, "enter(lane): its env is about to be stepped"},
    {"leave", block_leave, METH_VARARGS, "leave(lane): its env was stepped"},
    {"part", block_part, METH_NOARGS, "part(): in a forked child, the pass ends with `flush`"},
    {"publish", block_publish, METH_VARARGS, "publish(ids, began_ns): these lanes have answered"},
    {"wait", block_wait, METH_VARARGS, "wait(deadline_ns, spin_ns): sleep until rung"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot block_slots[] = {
    {Py_tp_doc, "The worker's side of the slab: steps the envs of a contiguous run of lanes."},
    {Py_tp_init, block_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, block_dealloc},
    {Py_tp_traverse, block_traverse},
    {Py_tp_clear, block_clear},
    {Py_tp_methods, block_methods},
    {0, NULL},
};

static PyType_Spec block_spec = {"shoal.native._core.Block", sizeof(Block), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, block_slots};

#endif

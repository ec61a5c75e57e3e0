/* Actions: reads a batch of actions, of whatever type it comes in, as rows of the type that the space says.
 *
 *     a buffer of just that type          is read where it lies
 *     another type, or a strided buffer   is cast into a room of our own, row by row
 *     lists of lists of floats            are read number by number
 *     what else has no buffer             becomes a NumPy array first: lists, tensors of torch; JAX's arrays have one
 *
 * A cast goes over a wide type, int64 or double, so that each type needs one loop that reads it and one that writes it.
 * Integers must fit, so that 300 never becomes 44 in a uint8. Whatever is refused here is left to spaces/leaves.py, which
 * takes it after all or says what is wrong; the rules of what may be cast are written there. */
#ifndef SHOAL_ACTIONS_H
#define SHOAL_ACTIONS_H

#include "bounds.h"
#include "leaf.h"

#include <math.h>
#include <stdlib.h>

typedef struct {
    int known;            /* whether actions are one array, of which each row is: */
    Leaf leaf;
    Py_buffer low, high;  /* its bounds; len 0 for none */
    int64_t lanes;
    PyObject *as_array;   /* numpy.asarray */
    PyObject *numpy_name; /* of the method that tensors have */
    char *room;           /* for rows that are cast, one for each lane; NULL until it is needed */
} Actions;

/* A batch that is being read. `values` are the rows in the space's type, one after the other. */
typedef struct {
    Py_buffer view, values;
    PyObject *array;
} ActionBatch;

#define CHUNK 256 /* numbers that are cast at a time */

typedef union { int64_t whole[CHUNK]; double real[CHUNK]; } Wide;

/* ---- from any type to a wide one ------------------------------------------------------------------------- */

#define SHOAL_WIDEN(name, type, target)                                                                          \
    static void widen_##name(const char *from, Py_ssize_t stride, Py_ssize_t count, target *to) {                \
        for (Py_ssize_t i = 0; i < count; i++) {                                                                 \
            type value;                                                                                          \
            memcpy(&value, from + i * stride, sizeof value);                                                     \
            to[i] = (target)value;                                                                               \
        }                                                                                                        \
    }
SHOAL_WIDEN(i1, int8_t, int64_t)
SHOAL_WIDEN(i2, int16_t, int64_t)
SHOAL_WIDEN(i4, int32_t, int64_t)
SHOAL_WIDEN(i8, int64_t, int64_t)
SHOAL_WIDEN(u1, uint8_t, int64_t)
SHOAL_WIDEN(u2, uint16_t, int64_t)
SHOAL_WIDEN(u4, uint32_t, int64_t)
SHOAL_WIDEN(f4, float, double)
SHOAL_WIDEN(f8, double, double)

static void widen_f2(const char *from, Py_ssize_t stride, Py_ssize_t count, double *to) {
    for (Py_ssize_t i = 0; i < count; i++) {
        uint16_t bits;
        memcpy(&bits, from + i * stride, sizeof bits);
        int power = bits >> 10 & 31, fraction = bits & 1023;
        double value = power == 31 ? (fraction ? NAN : INFINITY)
                                   : ldexp(power ? 1024 + fraction : fraction, power ? power - 25 : -24);
        to[i] = bits >> 15 ? -value : value;
    }
}

/* Whether it could: a number above 2^63 is left to NumPy. */
static int widen_whole(char kind, Py_ssize_t size, const char *from, Py_ssize_t stride, Py_ssize_t count, int64_t *to) {
    if (kind == 'i' && size == 1) widen_i1(from, stride, count, to);
    else if (kind == 'i' && size == 2) widen_i2(from, stride, count, to);
    else if (kind == 'i' && size == 4) widen_i4(from, stride, count, to);
    else if (size == 8) widen_i8(from, stride, count, to);
    else if (size == 1) widen_u1(from, stride, count, to);
    else if (size == 2) widen_u2(from, stride, count, to);
    else widen_u4(from, stride, count, to);
    int fits = 1;
    if (kind == 'u' && size == 8)
        for (Py_ssize_t i = 0; i < count; i++) fits &= to[i] >= 0;
    return fits;
}

static void widen_real(Py_ssize_t size, const char *from, Py_ssize_t stride, Py_ssize_t count, double *to) {
    if (size == 8) widen_f8(from, stride, count, to);
    else if (size == 4) widen_f4(from, stride, count, to);
    else widen_f2(from, stride, count, to);
}

/* ---- from a wide type to that of the space --------------------------------------------------------------- */

/* Whether all of them fit. */
#define SHOAL_NARROW(code, type)                                                                                 \
    if (kind == code && size == sizeof(type)) {                                                                  \
        type *out = to;                                                                                          \
        int fits = 1;                                                                                            \
        for (Py_ssize_t i = 0; i < count; i++) {                                                                 \
            out[i] = (type)from[i];                                                                              \
            fits &= ((int64_t)out[i] == from[i]) & ((code == 'i') | (from[i] >= 0));                             \
        }                                                                                                        \
        return fits;                                                                                             \
    }

static int narrow_whole(char kind, Py_ssize_t size, const int64_t *from, Py_ssize_t count, void *to) {
    SHOAL_NARROW('i', int8_t) SHOAL_NARROW('i', int16_t) SHOAL_NARROW('i', int32_t) SHOAL_NARROW('i', int64_t)
    SHOAL_NARROW('u', uint8_t) SHOAL_NARROW('u', uint16_t) SHOAL_NARROW('u', uint32_t) SHOAL_NARROW('u', uint64_t)
    if (kind != 'f') return 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (size == sizeof(double)) ((double *)to)[i] = (double)from[i];
        else ((float *)to)[i] = (float)from[i];
    return 1;
}

/* What is too large for a float is left to NumPy, which warns. */
static int narrow_real(Py_ssize_t size, const double *from, Py_ssize_t count, void *to) {
    int fits = 1;
    if (size == sizeof(double)) {
        memcpy(to, from, sizeof(double) * (size_t)count);
        return 1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        float value = ((float *)to)[i] = (float)from[i];
        fits &= (!isinf(value)) | (!!isinf(from[i]));
    }
    return fits;
}

static int cast_line(const Leaf *leaf, char kind, const Py_buffer *view, const char *from, Py_ssize_t stride,
                     Py_ssize_t count, char *to) {
    char target = leaf->kind == 'n' ? 'i' : leaf->kind;
    Wide wide;
    for (Py_ssize_t done = 0, some; done < count; done += some) {
        some = count - done < CHUNK ? count - done : CHUNK;
        const char *at = from + done * stride;
        char *out = to + done * leaf->itemsize;
        if (kind == 'f') {
            widen_real(view->itemsize, at, stride, some, wide.real);
            if (!narrow_real(leaf->itemsize, wide.real, some, out)) return 0;
        } else if (!widen_whole(kind, view->itemsize, at, stride, some, wide.whole) ||
                   !narrow_whole(target, leaf->itemsize, wide.whole, some, out)) {
            return 0;
        }
    }
    return 1;
}

/* Casts all rows; whether it could. The last axis is a line, the others are counted through. */
static int cast_rows(const Leaf *leaf, char kind, const Py_buffer *view, char *to) {
    int last = view->ndim - 1;
    const char *from = view->buf;
    if (PyBuffer_IsContiguous(view, 'C'))
        return cast_line(leaf, kind, view, from, view->itemsize, view->len / view->itemsize, to);
    Py_ssize_t at[MAX_DIMS] = {0}, count = view->shape[last], stride = view->strides[last], lines = 1;
    for (int d = 0; d < last; d++) lines *= view->shape[d];
    for (Py_ssize_t line = 0; line < lines; line++) {
        if (!cast_line(leaf, kind, view, from, stride, count, to)) return 0;
        to += count * leaf->itemsize;
        for (int d = last - 1; d >= 0; d--) {
            from += view->strides[d];
            if (++at[d] < view->shape[d]) break;
            from -= view->strides[d] * view->shape[d];
            at[d] = 0;
        }
    }
    return 1;
}

/* Casts lists of floats, one for each row, as NumPy would make an array of them. Whether it could: Python's own lists
 * and floats only, so that no code of others runs. */
static int cast_lists(const Leaf *leaf, PyObject *lists, int64_t rows, char *to) {
    Wide wide;
    Py_ssize_t size = leaf->shape[0];
    if (!PyList_CheckExact(lists) || PyList_Size(lists) != rows || size > CHUNK) return 0;
    for (Py_ssize_t row = 0; row < rows; row++) {
        PyObject *list = PyList_GetItem(lists, row);
        if (!PyList_CheckExact(list) || PyList_Size(list) != size) return 0;
        for (Py_ssize_t i = 0; i < size; i++) {
            PyObject *value = PyList_GetItem(list, i);
            if (!PyFloat_CheckExact(value)) return 0;
            wide.real[i] = PyFloat_AsDouble(value);
        }
        if (!narrow_real(leaf->itemsize, wide.real, size, to + row * leaf->nbytes)) return 0;
    }
    return 1;
}

/* ---- batches of actions ---------------------------------------------------------------------------------- */

/* Actions are one array, as `description` says; bounds of length 0 are not checked. */
static int actions_init(Actions *self, char *slab, int64_t lanes, PyObject *description, PyObject *low, PyObject *high) {
    if (self->known) return shoal_refuse(PyExc_RuntimeError, "use_action was called before");
    PyObject *numpy = PyImport_ImportModule("numpy");
    self->as_array = numpy ? PyObject_GetAttrString(numpy, "asarray") : NULL;
    Py_XDECREF(numpy);
    if (self->as_array == NULL || (self->numpy_name = PyUnicode_FromString("numpy")) == NULL) return -1;
    if (leaf_read(&self->leaf, slab, description) < 0) return -1;
    if (PyObject_GetBuffer(low, &self->low, PyBUF_C_CONTIGUOUS) < 0) return -1;
    if (PyObject_GetBuffer(high, &self->high, PyBUF_C_CONTIGUOUS) < 0) return -1;
    self->lanes = lanes;
    self->known = 1;
    return 0;
}

static void actions_free(Actions *self) {
    if (self->low.obj) PyBuffer_Release(&self->low);
    if (self->high.obj) PyBuffer_Release(&self->high);
    Py_XDECREF(self->leaf.path);
    Py_XDECREF(self->as_array);
    Py_XDECREF(self->numpy_name);
    free(self->room);
}

static void actions_close(ActionBatch *batch) {
    if (batch->view.obj) PyBuffer_Release(&batch->view);
    Py_XDECREF(batch->array);
}

/* After a call that may have failed: 0 where it has just failed, -1 for an interrupt. */
static int actions_refused(void) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    PyErr_Clear();
    return 0;
}

/* Gets a buffer of the batch, by way of an array where it has none. 0 where it cannot be had, -1 for an interrupt.
 * For a tensor of torch its method `numpy` takes half the time of asarray, which takes half of that of DLPack. */
static int actions_view(Actions *self, PyObject *actions, ActionBatch *batch) {
    const int how = PyBUF_FORMAT | PyBUF_STRIDES;
    if (PyBytes_Check(actions)) return 0; /* text to NumPy */
    if (PyObject_CheckBuffer(actions)) {
        if (PyObject_GetBuffer(actions, &batch->view, how) == 0) return 1;
        if (actions_refused() < 0) return -1;
    } else if (!PyList_Check(actions) && !PyTuple_Check(actions)) {
        batch->array = PyObject_CallMethodObjArgs(actions, self->numpy_name, NULL);
        if (batch->array != NULL && PyObject_GetBuffer(batch->array, &batch->view, how) == 0) return 1;
        if (actions_refused() < 0) return -1;
        Py_CLEAR(batch->array);
    }
    batch->array = shoal_call(self->as_array, &actions, 1);
    if (batch->array != NULL && PyObject_GetBuffer(batch->array, &batch->view, how) == 0) return 1;
    return actions_refused();
}

/* Whether the buffer has `rows` actions, of any type. */
static int actions_shaped(const Leaf *leaf, const Py_buffer *view, int64_t rows) {
    int fits = view->ndim == leaf->ndim + 1 && view->ndim <= MAX_DIMS && view->shape[0] == rows;
    for (int d = 0; fits && d < leaf->ndim; d++) fits = view->shape[d + 1] == leaf->shape[d];
    return fits;
}

/* The room for rows that are cast; NULL with an exception set. */
static char *actions_room(Actions *self) {
    if (self->room == NULL && (self->room = malloc((size_t)(self->lanes * self->leaf.nbytes + 1))) == NULL)
        PyErr_NoMemory();
    return self->room;
}

/* Reads `rows` actions. 1: they lie in batch->values; 0: not taken; -1: raised. To be closed in any case. */
static int actions_open(Actions *self, PyObject *actions, int64_t rows, ActionBatch *batch) {
    const Leaf *leaf = &self->leaf;
    memset(batch, 0, sizeof *batch);
    if (!self->known) return 0;
    batch->values.itemsize = leaf->itemsize;
    batch->values.len = (Py_ssize_t)rows * leaf->nbytes;
    if (PyList_CheckExact(actions) && leaf->kind == 'f' && leaf->itemsize >= 4 && leaf->ndim == 1) {
        if ((batch->values.buf = actions_room(self)) == NULL) return -1;
        if (cast_lists(leaf, actions, rows, self->room)) return 1;
    }
    int got = actions_view(self, actions, batch);
    if (got != 1) return got;
    const Py_buffer *view = &batch->view;
    if (!actions_shaped(leaf, view, rows)) return 0;
    char kind = format_kind(view->format), target = leaf->kind == 'n' ? 'i' : leaf->kind;
    if (kind == target && view->itemsize == leaf->itemsize && PyBuffer_IsContiguous(view, 'C') &&
        (uintptr_t)view->buf % (uintptr_t)view->itemsize == 0) {
        batch->values.buf = view->buf;
        return 1;
    }
    int castable = target == 'f' ? leaf->itemsize >= 4 && kind != '\0' && strchr("fiub", kind) != NULL
                                 : (target == 'i' || target == 'u') && kind != '\0' && strchr("iub", kind) != NULL;
    if (!castable) return 0;
    if ((batch->values.buf = actions_room(self)) == NULL) return -1;
    return cast_rows(leaf, kind, view, self->room);
}

/* Whether all of them are within their bounds. */
static int actions_inside(const Actions *self, const ActionBatch *batch) {
    char kind = self->leaf.kind == 'n' ? 'i' : self->leaf.kind;
    return self->low.len == 0 || batch->values.len == 0 ||
           bounds_scan(kind, &batch->values, &self->low, &self->high) == -1;
}

#endif

/* Bounds: checks a batch of discrete or continuous actions against its space in one pass. */
#ifndef SHOAL_BOUNDS_H
#define SHOAL_BOUNDS_H

#include "compat.h"

/* The types of actions, each with its kind. */
#define BOUNDED_TYPES(X)                                                                                         \
    X('f', float) X('f', double) X('i', int8_t) X('i', int16_t) X('i', int32_t) X('i', int64_t)                  \
    X('u', uint8_t) X('u', uint16_t) X('u', uint32_t) X('u', uint64_t)

/* Whether all values are inside of [low, high]: the common case, many values at a time. */
#define SHOAL_ALL_INSIDE(code, type)                                                                             \
    VECTORIZED static int all_inside_##type(const type *v, Py_ssize_t count, type low, type high) {              \
        int inside = 1;                                                                                          \
        for (Py_ssize_t i = 0; i < count; i++) inside &= (v[i] >= low) & (v[i] <= high);                         \
        return inside;                                                                                           \
    }
BOUNDED_TYPES(SHOAL_ALL_INSIDE)

/* The first index at which the value is outside [low, high] (a NaN is outside); bounds repeat every `period` items. */
#define SHOAL_SCAN(code, type)                                                                  \
    if (kind == code && size == sizeof(type)) {                                                 \
        const type *v = values->buf, *lo = low->buf, *hi = high->buf;                           \
        if (period == 1 && all_inside_##type(v, count, lo[0], hi[0])) return -1;                \
        for (Py_ssize_t i = 0, j = 0; i < count; i++) {                                         \
            if (!(v[i] >= lo[j] && v[i] <= hi[j])) return i;                                    \
            if (++j == period) j = 0;                                                           \
        }                                                                                       \
        return -1;                                                                              \
    }

static Py_ssize_t bounds_scan(char kind, const Py_buffer *values, const Py_buffer *low, const Py_buffer *high) {
    Py_ssize_t size = values->itemsize, count = values->len / size, period = low->len / size;
    BOUNDED_TYPES(SHOAL_SCAN)
    return -2;
}

/* outside(kind, values, low, high) -> index of the first value out of bounds, -1: none, -2: the type is not supported, or
 * the values do not lie where their type must */
static PyObject *bounds_outside(PyObject *Py_UNUSED(module), PyObject *args) {
    int kind;
    PyObject *objects[3];
    Py_buffer views[3] = {{0}};
    if (!PyArg_ParseTuple(args, "COOO", &kind, &objects[0], &objects[1], &objects[2])) return NULL;
    Py_ssize_t result = -2;
    int held = views_get(objects, views, 3, 3);
    if (held == 3) {
        int same = views[0].itemsize == views[1].itemsize && views[1].len == views[2].len &&
                   views[1].itemsize == views[2].itemsize;
        if (same && views[0].len == 0) result = -1;
        else if (same && views[1].len > 0 && (uintptr_t)views[0].buf % (uintptr_t)views[0].itemsize == 0)
            result = bounds_scan((char)kind, &views[0], &views[1], &views[2]);
    }
    views_release(views, held);
    return held == 3 ? PyLong_FromSsize_t(result) : NULL;
}

#endif

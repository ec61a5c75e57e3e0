/* Bounds: checks a batch of discrete or continuous actions against its space in one pass. */
#ifndef SHOAL_BOUNDS_H
#define SHOAL_BOUNDS_H

#include "compat.h"

/* Whether all values are inside of [low, high]: the common case, many values at a time. */
#define SHOAL_ALL_INSIDE(type)                                                                                   \
    VECTORIZED static int all_inside_##type(const type *v, Py_ssize_t count, type low, type high) {              \
        int inside = 1;                                                                                          \
        for (Py_ssize_t i = 0; i < count; i++) inside &= (v[i] >= low) & (v[i] <= high);                         \
        return inside;                                                                                           \
    }
SHOAL_ALL_INSIDE(float)
SHOAL_ALL_INSIDE(double)
SHOAL_ALL_INSIDE(int8_t)
SHOAL_ALL_INSIDE(int16_t)
SHOAL_ALL_INSIDE(int32_t)
SHOAL_ALL_INSIDE(int64_t)
SHOAL_ALL_INSIDE(uint8_t)
SHOAL_ALL_INSIDE(uint16_t)
SHOAL_ALL_INSIDE(uint32_t)
SHOAL_ALL_INSIDE(uint64_t)

/* The first index at which the value is outside [low, high] (a NaN is outside); bounds repeat every `period` items. */
#define SHOAL_SCAN(type)                                                                        \
    {                                                                                           \
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
    if (kind == 'f' && size == 4) SHOAL_SCAN(float)
    if (kind == 'f' && size == 8) SHOAL_SCAN(double)
    if (kind == 'i' && size == 1) SHOAL_SCAN(int8_t)
    if (kind == 'i' && size == 2) SHOAL_SCAN(int16_t)
    if (kind == 'i' && size == 4) SHOAL_SCAN(int32_t)
    if (kind == 'i' && size == 8) SHOAL_SCAN(int64_t)
    if (kind == 'u' && size == 1) SHOAL_SCAN(uint8_t)
    if (kind == 'u' && size == 2) SHOAL_SCAN(uint16_t)
    if (kind == 'u' && size == 4) SHOAL_SCAN(uint32_t)
    if (kind == 'u' && size == 8) SHOAL_SCAN(uint64_t)
    return -2;
}

/* outside(kind, values, low, high) -> index of the first value out of bounds, -1: none, -2: type not supported */
static PyObject *bounds_outside(PyObject *module, PyObject *args) {
    (void)module;
    int kind;
    PyObject *objects[3];
    Py_buffer views[3] = {{0}};
    if (!PyArg_ParseTuple(args, "COOO", &kind, &objects[0], &objects[1], &objects[2])) return NULL;
    Py_ssize_t result = -2;
    int held = 0;
    while (held < 3 && PyObject_GetBuffer(objects[held], &views[held], PyBUF_C_CONTIGUOUS) == 0) held++;
    if (held == 3) {
        int same = views[0].itemsize == views[1].itemsize && views[1].len == views[2].len &&
                   views[1].itemsize == views[2].itemsize;
        if (same && views[0].len == 0) result = -1;
        else if (same && views[1].len > 0) result = bounds_scan((char)kind, &views[0], &views[1], &views[2]);
    }
    for (int i = 0; i < held; i++) PyBuffer_Release(&views[i]);
    return held == 3 ? PyLong_FromSsize_t(result) : NULL;
}

#endif

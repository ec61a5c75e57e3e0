/* Where the fields of the slab lie. Leaf: one innermost part of a space, and whether a Python array fits it. */
#ifndef SHOAL_LEAF_H
#define SHOAL_LEAF_H

#include "compat.h"
#include "layout.h"

#define MAX_DIMS 32

/* Points to the fields of a slab. `offsets` has one for each of them, in bytes; -1 for one that this slab lacks. */
static int fields_read(Fields *fields, char *slab, PyObject *offsets) {
    void *found[sizeof(Fields) / sizeof(void *)];
    Py_ssize_t count = sizeof found / sizeof *found;
    if (!PyTuple_Check(offsets) || PyTuple_Size(offsets) != count)
        return shoal_refuse(PyExc_ValueError, "one offset for each field is needed");
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t offset = PyLong_AsSsize_t(PyTuple_GetItem(offsets, i));
        found[i] = offset < 0 ? NULL : slab + offset;
    }
    if (PyErr_Occurred()) return -1;
    memcpy(fields, found, sizeof found);
    return 0;
}

typedef struct {
    char *base;          /* of frame 0, lane 0 */
    Py_ssize_t nbytes;   /* of one lane */
    Py_ssize_t stride;   /* bytes from a lane to the next: more than nbytes where leaves lie side by side in rows */
    Py_ssize_t itemsize;
    char kind;           /* 'f', 'i', 'u', 'b' arrays; 'n' one integer; anything else: by callback */
    int ndim;
    Py_ssize_t shape[MAX_DIMS];
    PyObject *path;      /* tuple of keys that leads from the observation to this leaf */
} Leaf;

/* Reads (offset, itemsize, nbytes, kind, shape, path, stride). */
static int leaf_read(Leaf *leaf, char *slab, PyObject *description) {
    Py_ssize_t offset;
    PyObject *shape;
    int kind;
    if (!PyArg_ParseTuple(description, "nnnCO!O!n", &offset, &leaf->itemsize, &leaf->nbytes, &kind,
                          &PyTuple_Type, &shape, &PyTuple_Type, &leaf->path, &leaf->stride))
        return -1;
    Py_INCREF(leaf->path);
    leaf->kind = (char)kind;
    leaf->base = slab + offset;
    leaf->ndim = (int)PyTuple_Size(shape);
    if (leaf->ndim > MAX_DIMS) leaf->kind = 'o';
    else
        for (int d = 0; d < leaf->ndim; d++) leaf->shape[d] = PyLong_AsSsize_t(PyTuple_GetItem(shape, d));
    return PyErr_Occurred() ? -1 : 0;
}

/* The class of a one-character buffer format, '\0' for what the fast path does not take. */
static char format_kind(const char *format) {
    if (format == NULL) return 'u'; /* plain bytes */
    if (format[0] == '<' || format[0] == '=' || format[0] == '@') format++;
    if (format[0] == '\0' || format[1] != '\0') return '\0';
    if (strchr("efd", format[0])) return 'f';
    if (strchr("bhilq", format[0])) return 'i';
    if (strchr("BHILQ", format[0])) return 'u';
    return format[0] == '?' ? 'b' : '\0';
}

/* Whether a buffer holds `rows` values of the leaf (rows < 0: one value, without an axis for rows). */
static int leaf_fits(const Leaf *leaf, const Py_buffer *view, int64_t rows) {
    int extra = rows >= 0;
    char kind = leaf->kind == 'n' ? 'i' : leaf->kind;
    int fits = view->itemsize == leaf->itemsize && view->ndim == leaf->ndim + extra &&
               view->len == leaf->nbytes * (extra ? rows : 1) && format_kind(view->format) == kind &&
               (!extra || view->shape[0] == rows);
    for (int d = 0; fits && d < leaf->ndim; d++) fits = view->shape[d + extra] == leaf->shape[d];
    return fits;
}

/* Flags of many workers' lanes lie on one cache line, and are nearly always what they were: to write them all the same would
 * take the line away from the other workers. */
static inline void write_flag(uint8_t *flag, uint8_t value) {
    if (*flag != value) *flag = value;
}

#endif

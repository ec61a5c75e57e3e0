/* Rows: writes what several agents of one env answer, given as dicts by agent, into the rows of a batch. */
#ifndef SHOAL_ROWS_H
#define SHOAL_ROWS_H

#include "step_block.h"

#define MAX_LEAVES 16

/* The row of a batch as a leaf: what one agent's value must be like. */
static int rows_leaf(Leaf *leaf, const Py_buffer *target, Py_ssize_t rows) {
    if (target->ndim < 1 || target->ndim - 1 > MAX_DIMS || target->shape[0] != rows || rows == 0) return -1;
    leaf->base = target->buf;
    leaf->nbytes = target->len / rows;
    leaf->itemsize = target->itemsize;
    leaf->ndim = target->ndim - 1;
    leaf->kind = format_kind(target->format);
    if (leaf->ndim == 0) leaf->kind = leaf->kind == 'i' ? 'n' : '\0';
    for (int d = 0; d < leaf->ndim; d++) leaf->shape[d] = target->shape[d + 1];
    return leaf->kind == '\0' ? -1 : 0;
}

/* A new reference to a dict's value, NULL where there is none. */
static PyObject *rows_find(PyObject *dict, PyObject *name) {
    PyObject *value = PyDict_GetItemWithError(dict, name);
    Py_XINCREF(value);
    return value;
}

static int rows_flag(PyObject *dict, PyObject *name) {
    PyObject *value = rows_find(dict, name);
    if (value == NULL) return PyErr_Occurred() ? -1 : 0;
    int is_true = value == Py_False ? 0 : PyObject_IsTrue(value);
    Py_DECREF(value);
    return is_true;
}

static int rows_reward(PyObject *rewards, PyObject *name, double *target) {
    PyObject *value = rows_find(rewards, name);
    if (value == NULL) return -1;
    *target = PyFloat_AsDouble(value);
    Py_DECREF(value);
    return *target == -1.0 && PyErr_Occurred() ? -1 : 0;
}

/* Everything of one agent; -1 where it has ended, or where anything is not exactly as the batch has it. */
static int rows_agent(PyObject *const *dicts, PyObject *name, Py_ssize_t row, double *reward, const Leaf *leaves,
                      Py_ssize_t count) {
    if (rows_flag(dicts[2], name) != 0 || rows_flag(dicts[3], name) != 0) return -1;
    if (rows_reward(dicts[1], name, &reward[row]) < 0) return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (store_leaf(&leaves[i], rows_find(dicts[0], name), leaves[i].base + row * leaves[i].nbytes) < 0) return -1;
    return 0;
}

/* write_rows(names, rows, observations, rewards, terminated, truncated, reward, targets, paths) -> whether all was written;
 * if not, some may have been. */
static PyObject *rows_write(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *names, *rows, *dicts[4], *reward_object, *targets, *paths;
    if (!PyArg_ParseTuple(args, "O!O!OOOOOO!O!", &PyTuple_Type, &names, &PyTuple_Type, &rows, &dicts[0], &dicts[1],
                          &dicts[2], &dicts[3], &reward_object, &PyTuple_Type, &targets, &PyTuple_Type, &paths))
        return NULL;
    Py_ssize_t agents = PyTuple_Size(names), count = PyTuple_Size(targets), held = 0;
    int fits = PyTuple_Size(rows) == agents && PyTuple_Size(paths) == count && count <= MAX_LEAVES;
    for (int i = 0; i < 4; i++) fits = fits && PyDict_Check(dicts[i]);
    Py_buffer reward, views[MAX_LEAVES];
    Leaf leaves[MAX_LEAVES];
    if (PyObject_GetBuffer(reward_object, &reward, PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) return NULL;
    fits = fits && reward.ndim == 1 && reward.itemsize == sizeof(double) && format_kind(reward.format) == 'f';
    Py_ssize_t most = fits ? reward.shape[0] : 0;
    for (; fits && held < count; held++) {
        if (PyObject_GetBuffer(PyTuple_GetItem(targets, held), &views[held],
                               PyBUF_WRITABLE | PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0)
            break;
        leaves[held].path = PyTuple_GetItem(paths, held);
        fits = rows_leaf(&leaves[held], &views[held], most) == 0 && PyTuple_Check(leaves[held].path);
    }
    fits = fits && held == count;
    for (Py_ssize_t i = 0; fits && i < agents; i++) {
        Py_ssize_t row = PyLong_AsSsize_t(PyTuple_GetItem(rows, i));
        fits = row >= 0 && row < most &&
               rows_agent(dicts, PyTuple_GetItem(names, i), row, reward.buf, leaves, count) == 0;
    }
    for (Py_ssize_t i = 0; i < held; i++) PyBuffer_Release(&views[i]);
    PyBuffer_Release(&reward);
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL; /* Ctrl-C */
        PyErr_Clear();
    }
    return PyBool_FromLong(fits);
}

#endif

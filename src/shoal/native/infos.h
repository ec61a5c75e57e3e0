/* Writes the info of an env into a row of the slab, by the schema that its worker has learnt.
 *
 *     a row: the schema's id, a tag for each of its entries, then the values, each at the offset of its entry
 *
 * An entry is one key; those of a nested dict follow the entry of their parent, up to its `end`. A tag says what the
 * env has returned under the key in this step: nothing, a dict, a number of which type, or something that has no room
 * in a row and travels as a note. The model of all this is shoal/memory/info_schema.py; the values of tags are in layout.py. */
#ifndef SHOAL_INFOS_H
#define SHOAL_INFOS_H

#include "leaf.h"

#include <stdlib.h>

typedef struct {
    PyObject *key;
    int end;      /* the entry after the last one below this one */
    Leaf leaf;    /* where its value goes; its kind is an INFO_KIND_ or, for an array, the kind of its items */
} InfoEntry;

typedef struct {
    int64_t id;
    int count;
    InfoEntry *entries;
    char *first_row;   /* that of frame 0 and lane 0, from which the entries' places are counted */
    PyObject *types;   /* the types of NumPy's numbers, a tuple; a number of the i-th has the tag INFO_NUMBER + i */
    PyObject *array;   /* numpy.ndarray */
} InfoSchema;

enum InfoResult { INFO_FAILED = -1, INFO_WRITTEN = 0, INFO_UNKNOWN = 1 };

static void info_clear(InfoSchema *schema) {
    for (int i = 0; i < schema->count; i++) {
        Py_CLEAR(schema->entries[i].key);
        Py_CLEAR(schema->entries[i].leaf.path);
    }
    free(schema->entries);
    schema->entries = NULL;
    schema->count = 0;
    Py_CLEAR(schema->types);
    Py_CLEAR(schema->array);
}

/* Reads (id, entries, types, array); an entry is (key, end, leaf description). */
static int info_read(InfoSchema *schema, char *first_row, PyObject *description) {
    PyObject *entries, *types, *array;
    long long id;
    if (!PyArg_ParseTuple(description, "LO!O!O", &id, &PyTuple_Type, &entries, &PyTuple_Type, &types, &array)) return -1;
    Py_ssize_t count = PyTuple_Size(entries);
    InfoEntry *read = calloc((size_t)count + 1, sizeof(InfoEntry));
    if (read == NULL) { PyErr_NoMemory(); return -1; }
    Py_INCREF(types);
    Py_INCREF(array);
    info_clear(schema);
    *schema = (InfoSchema){id, 0, read, first_row, types, array};
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *key, *leaf;
        if (!PyArg_ParseTuple(PyTuple_GetItem(entries, i), "UiO", &key, &read[i].end, &leaf)) return -1;
        if (leaf_read(&read[i].leaf, first_row, leaf) < 0) return -1;
        Py_INCREF(key);
        PyUnicode_InternInPlace(&key); /* so that keys written in the env's code are the same objects */
        read[i].key = key;
        schema->count = (int)i + 1;
    }
    return 0;
}

static inline int info_same_key(PyObject *known, PyObject *key) {
    if (known == key) return 1;
    if (!PyUnicode_CheckExact(key)) return 0;
    int order = PyUnicode_Compare(known, key);
    if (order == -1 && PyErr_Occurred()) PyErr_Clear();
    return order == 0;
}

/* The tag of a value of NumPy's numbers, written to `place`; INFO_OBJECT for any other. */
static int info_write_number(const InfoSchema *schema, PyObject *value, char *place) {
    Py_ssize_t count = PyTuple_Size(schema->types);
    for (Py_ssize_t i = 0; i < count; i++) {
        if ((PyObject *)Py_TYPE(value) != PyTuple_GetItem(schema->types, i)) continue;
        Py_buffer view;
        if (PyFloat_Check(value)) { /* NumPy's float64 */
            double number = PyFloat_AsDouble(value);
            memcpy(place, &number, sizeof number);
            return INFO_NUMBER + (int)i;
        }
        if (PyObject_GetBuffer(value, &view, PyBUF_SIMPLE) < 0) { PyErr_Clear(); return INFO_OBJECT; }
        int fits = view.len <= (Py_ssize_t)sizeof(int64_t);
        if (fits) memcpy(place, view.buf, (size_t)view.len);
        PyBuffer_Release(&view);
        return fits ? INFO_NUMBER + (int)i : INFO_OBJECT;
    }
    return INFO_OBJECT;
}

static int info_write_array(const Leaf *leaf, PyObject *value, char *place) {
    Py_buffer view;
    if (PyObject_GetBuffer(value, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) < 0) { PyErr_Clear(); return INFO_OBJECT; }
    int fits = leaf_fits(leaf, &view, -1);
    if (fits) memcpy(place, view.buf, (size_t)leaf->nbytes);
    PyBuffer_Release(&view);
    return fits ? INFO_ARRAY : INFO_OBJECT;
}

/* Writes a value that is no dict to its place in the row; its tag. */
static int info_write_value(const InfoSchema *schema, const Leaf *leaf, PyObject *value, char *row) {
    char *place = row + (leaf->base - schema->first_row);
    if (value == Py_None) return INFO_NONE;
    if ((PyObject *)Py_TYPE(value) == schema->array)
        return strchr("fiub", leaf->kind) ? info_write_array(leaf, value, place) : INFO_OBJECT;
    if (leaf->kind != INFO_KIND_NUMBER) return INFO_OBJECT;
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AsDouble(value);
        memcpy(place, &number, sizeof number);
        return INFO_FLOAT;
    }
    if (value == Py_True || value == Py_False) {
        int64_t number = value == Py_True;
        memcpy(place, &number, sizeof number);
        return INFO_BOOL;
    }
    if (PyLong_CheckExact(value)) {
        int overflow;
        int64_t number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow) return INFO_OBJECT;
        memcpy(place, &number, sizeof number);
        return INFO_INT;
    }
    return info_write_number(schema, value, place);
}

/* Keeps what has no room in a row, by the number of its entry. */
static int info_keep(PyObject **objects, int at, PyObject *value) {
    if (*objects == NULL && (*objects = PyDict_New()) == NULL) return -1;
    PyObject *number = PyLong_FromLong(at);
    int result = number == NULL ? -1 : PyDict_SetItem(*objects, number, value);
    Py_XDECREF(number);
    return result;
}

/* Writes a dict by the entries `first` up to `end`, whose keys it must have in their order; some may be missing. Runs no
 * Python code: all types but dict, str and NumPy's and Python's numbers are handed on as they are. */
static int info_write_dict(const InfoSchema *schema, PyObject *dict, int first, int end, char *row, PyObject **objects,
                           int *found) {
    uint8_t *tags = (uint8_t *)row + INFO_TAGS;
    PyObject *key, *value;
    Py_ssize_t position = 0;
    int at = first;
    while (PyDict_Next(dict, &position, &key, &value)) {
        while (at < end && !info_same_key(schema->entries[at].key, key)) {
            tags[at] = INFO_ABSENT;
            at = schema->entries[at].end;
        }
        if (at >= end) return INFO_UNKNOWN;
        const InfoEntry *entry = &schema->entries[at];
        if (entry->leaf.kind == INFO_KIND_SKIPPED) {
            tags[at] = INFO_ABSENT;
        } else if (entry->leaf.kind != INFO_KIND_OBJECT && PyDict_CheckExact(value)) {
            tags[at] = INFO_DICT;
            *found = 1;
            int result = info_write_dict(schema, value, at + 1, entry->end, row, objects, found);
            if (result != INFO_WRITTEN) return result;
        } else {
            int tag = entry->leaf.kind == INFO_KIND_OBJECT ? INFO_OBJECT
                                                            : info_write_value(schema, &entry->leaf, value, row);
            tags[at] = (uint8_t)tag;
            *found = 1;
            if (tag == INFO_OBJECT && info_keep(objects, at, value) < 0) return INFO_FAILED;
        }
        at = entry->end;
    }
    for (; at < end; at = schema->entries[at].end) tags[at] = INFO_ABSENT;
    return INFO_WRITTEN;
}

/* Writes a whole info. `objects` becomes a new dict of what has no room, by entry, or stays NULL; `found` becomes 1
 * unless nothing of the info is wanted. INFO_UNKNOWN: it has other keys, or another order of them. */
static int info_write(const InfoSchema *schema, PyObject *info, char *row, PyObject **objects, int *found) {
    if (schema->entries == NULL) return INFO_UNKNOWN;
    memcpy(row, &schema->id, sizeof schema->id);
    int result = info_write_dict(schema, info, 0, schema->count, row, objects, found);
    if (result != INFO_WRITTEN) Py_CLEAR(*objects);
    return result;
}

/* ---- the caller's side --------------------------------------------------------------------------------------- */

/* Copies rows of INFO_BYTES, each of which must begin with `head`, so that each of their words of eight bytes becomes a row
 * of `words`. Whether all lanes have such a row, and nothing beside it, as their flags say. */
static int info_transpose(const uint8_t *flags, const char *rows, const Py_buffer *head, int64_t lanes, int64_t count,
                          uint64_t *words) {
    for (int64_t lane = 0; lane < lanes; lane++, rows += INFO_BYTES) {
        if (flags[lane] != STATUS_INFO || memcmp(rows, head->buf, (size_t)head->len) != 0) return 0;
        for (int64_t word = 0; word < count; word++)
            memcpy(&words[word * lanes + lane], rows + word * (int64_t)sizeof(uint64_t), sizeof(uint64_t));
    }
    return 1;
}

/* take_infos(flags, rows, head, words) -> whether all lanes have an info that begins so; see info_transpose. */
static PyObject *info_take(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t given) {
    Py_buffer views[4] = {{0}};
    PyObject *result = NULL;
    if (given != 4) return PyErr_Format(PyExc_TypeError, "take_infos takes flags, rows, head and words");
    int held = views_get(args, views, 4, 3);
    if (held == 4) {
        Py_ssize_t lanes = views[0].len, word = (Py_ssize_t)sizeof(uint64_t);
        Py_ssize_t count = lanes > 0 ? views[3].len / word / lanes : 0;
        if (views[1].len != lanes * INFO_BYTES || views[3].len != count * lanes * word || count * word > INFO_BYTES ||
            views[2].len > INFO_BYTES)
            PyErr_SetString(PyExc_ValueError, "flags, rows, head and words do not fit each other");
        else
            result = PyBool_FromLong(info_transpose(views[0].buf, views[1].buf, &views[2], lanes, count, views[3].buf));
    }
    views_release(views, held);
    return result;
}

#endif

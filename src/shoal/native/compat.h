/* Which parts of the Python C API are used: the stable ABI where it has all we need (3.12 and later,
 * with the GIL), the version's own API elsewhere. The source calls only functions that are in both. */
#ifndef SHOAL_COMPAT_H
#define SHOAL_COMPAT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if PY_VERSION_HEX >= 0x030c0000
#define shoal_take_exception() PyErr_GetRaisedException()
#else
static PyObject *shoal_take_exception(void) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (value != NULL && trace != NULL) PyException_SetTraceback(value, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return value;
}
#endif

static inline int shoal_refuse(PyObject *type, const char *why) {
    PyErr_SetString(type, why);
    return -1;
}

/* Calls with up to four borrowed arguments; a new reference, or NULL with an exception set. */
static inline PyObject *shoal_call(PyObject *callable, PyObject *const *args, size_t count) {
    return PyObject_Vectorcall(callable, args, count, NULL);
}

/* For a thread that comes second: raises what `refusal` makes; NULL. */
static inline PyObject *shoal_refuse_thread(PyObject *refusal) {
    PyObject *error = refusal ? shoal_call(refusal, NULL, 0) : NULL;
    if (error != NULL) PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    else if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "another thread is inside");
    Py_XDECREF(error);
    return NULL;
}

/* Buffers of `count` objects, from the one numbered `writable` on to be written; how many it could get. */
static inline int views_get(PyObject *const *objects, Py_buffer *views, int count, int writable) {
    int held = 0;
    while (held < count && PyObject_GetBuffer(objects[held], &views[held],
                                              PyBUF_C_CONTIGUOUS | (held < writable ? 0 : PyBUF_WRITABLE)) == 0)
        held++;
    return held;
}

static inline void views_release(Py_buffer *views, int held) {
    for (int i = 0; i < held; i++) PyBuffer_Release(&views[i]);
}

/* Several versions where the linker can choose among them: the baseline of x86-64 cannot compare numbers of 64 bits. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORIZED __attribute__((target_clones("avx2", "default"), noinline))
#else
#define VECTORIZED
#endif

#endif

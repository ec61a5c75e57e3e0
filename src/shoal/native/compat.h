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

/* Calls with up to four borrowed arguments; a new reference, or NULL with an exception set. */
static inline PyObject *shoal_call(PyObject *callable, PyObject *const *args, size_t count) {
    return PyObject_Vectorcall(callable, args, count, NULL);
}

/* Several versions where the linker can choose among them: the baseline of x86-64 cannot compare numbers of 64 bits. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORIZED __attribute__((target_clones("avx2", "default"), noinline))
#else
#define VECTORIZED
#endif

#endif

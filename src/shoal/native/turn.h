/* Turn: whose turn it is. Lets one thread in, as often as it likes, and refuses all others until it has left. */
#ifndef SHOAL_TURN_H
#define SHOAL_TURN_H

#include "compat.h"

#include <stdatomic.h>

typedef struct {
    PyObject_HEAD
    _Atomic unsigned long holder; /* the thread that is in; 0 for none, which no thread is called */
    int64_t depth;                /* how often it has come in; its own */
    PyObject *refusal;            /* makes the error for another one */
} Turn;

static int turn_init(Turn *self, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *refusal;
    if (!PyArg_ParseTuple(args, "O", &refusal)) return -1;
    Py_INCREF(refusal);
    Py_XDECREF(self->refusal);
    self->refusal = refusal;
    return 0;
}

static void turn_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((Turn *)object)->refusal);
    PyObject_Free(object);
    Py_DECREF(type);
}

/* In C, because Python looks for signals between the statements of an __enter__ of its own, and an interrupt there would
 * keep all other threads out for ever. */
static PyObject *turn_enter(PyObject *object, PyObject *Py_UNUSED(ignored)) {
    Turn *self = (Turn *)object;
    unsigned long me = PyThread_get_thread_ident(), none = 0;
    if (atomic_load(&self->holder) != me && !atomic_compare_exchange_strong(&self->holder, &none, me))
        return shoal_refuse_thread(self->refusal);
    self->depth++;
    Py_RETURN_NONE;
}

static PyObject *turn_leave(PyObject *object, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(count)) {
    Turn *self = (Turn *)object;
    if (--self->depth == 0) atomic_store(&self->holder, 0);
    Py_RETURN_NONE;
}

static PyMethodDef turn_methods[] = {
    {"__enter__", turn_enter, METH_NOARGS, "come in, or raise what the refusal makes while another thread is in"},
    {"__exit__", (PyCFunction)(void (*)(void))turn_leave, METH_FASTCALL, "leave"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot turn_slots[] = {
    {Py_tp_doc, "Lets one thread in, as often as it likes, and refuses all others until it has left."},
    {Py_tp_init, turn_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, turn_dealloc},
    {Py_tp_methods, turn_methods},
    {0, NULL},
};

static PyType_Spec turn_spec = {"shoal.native._core.Turn", sizeof(Turn), 0, Py_TPFLAGS_DEFAULT, turn_slots};

#endif

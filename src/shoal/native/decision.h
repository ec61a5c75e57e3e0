/* What spinning.h decides, as functions for Python: for tests, and for those who ask why a pool sleeps. */
#ifndef SHOAL_DECISION_H
#define SHOAL_DECISION_H

#include "compat.h"
#include "spinning.h"

/* spin_for(usual_ns, spread_ns, spins, wake_ns, parties, cores) -> (rest_ns, spin_ns) */
static PyObject *decision_spin_for(PyObject *Py_UNUSED(module), PyObject *args) {
    long long usual, spread, wake, parties, cores;
    int spins;
    if (!PyArg_ParseTuple(args, "LLpLLL", &usual, &spread, &spins, &wake, &parties, &cores)) return NULL;
    Spin spin = spin_for((Estimate){usual, spread}, spins, wake, parties, cores);
    return Py_BuildValue("(LL)", (long long)spin.rest_ns, (long long)spin.spin_ns);
}

/* learn(usual_ns, spread_ns, ns) -> (usual_ns, spread_ns), with one more wait taken in */
static PyObject *decision_learn(PyObject *Py_UNUSED(module), PyObject *args) {
    long long usual, spread, ns;
    if (!PyArg_ParseTuple(args, "LLL", &usual, &spread, &ns)) return NULL;
    Estimate estimate = {usual, spread};
    estimate_add(&estimate, ns);
    return Py_BuildValue("(LL)", (long long)estimate.usual_ns, (long long)estimate.spread_ns);
}

/* try_way((way, trying, cost 0, cost 1, windows, patience, batches, ns), ns) -> the same after one more batch */
static PyObject *decision_try_way(PyObject *Py_UNUSED(module), PyObject *args) {
    long long way, trying, first, second, windows, patience, batches, ns, took;
    if (!PyArg_ParseTuple(args, "(LLLLLLLL)L", &way, &trying, &first, &second, &windows, &patience, &batches, &ns, &took))
        return NULL;
    if (way < 0 || way > 1) return PyErr_Format(PyExc_ValueError, "the ways are 0 and 1");
    Trials trials = {way, trying, {first, second}, windows, patience, batches, ns};
    trials_add(&trials, took);
    return Py_BuildValue("(LLLLLLLL)", (long long)trials.way, (long long)trials.trying, (long long)trials.cost[0],
                         (long long)trials.cost[1], (long long)trials.windows, (long long)trials.patience,
                         (long long)trials.batches, (long long)trials.ns);
}

#endif

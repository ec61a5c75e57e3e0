/* What spinning.h decides, as functions for Python: for tests, and for those who ask why a pool sleeps. */
#ifndef SHOAL_DECISION_H
#define SHOAL_DECISION_H

#include "compat.h"
#include "spinning.h"

/* first_way(parties, cores) -> who spins at first: 1 the caller, 2 the workers, 3 both */
static PyObject *decision_first_way(PyObject *Py_UNUSED(module), PyObject *args) {
    long long parties, cores;
    if (!PyArg_ParseTuple(args, "LL", &parties, &cores)) return NULL;
    return PyLong_FromLongLong(first_way(parties, cores));
}

/* rest_for(usual_ns, spread_ns, wake_ns) -> (rest_ns, spin_ns) of a long wait */
static PyObject *decision_rest_for(PyObject *Py_UNUSED(module), PyObject *args) {
    long long usual, spread, wake;
    if (!PyArg_ParseTuple(args, "LLL", &usual, &spread, &wake)) return NULL;
    Spin spin = rest_for((Estimate){usual, spread}, wake);
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

/* try_way((possible, way, best, tried, wins, (cost, cost, cost, cost), windows, patience, batches, ns), ns) -> the same after
 * one more batch */
static PyObject *decision_try_way(PyObject *Py_UNUSED(module), PyObject *args) {
    long long possible, way, best, tried, wins, cost[WAYS], windows, patience, batches, ns, took;
    if (!PyArg_ParseTuple(args, "(LLLLL(LLLL)LLLL)L", &possible, &way, &best, &tried, &wins, &cost[0], &cost[1], &cost[2],
                          &cost[3], &windows, &patience, &batches, &ns, &took))
        return NULL;
    if (((way | best) & ~(WAYS - 1)) != 0) return PyErr_Format(PyExc_ValueError, "the ways are 0 to 3");
    Trials trials = {possible, way, best, tried, wins, {cost[0], cost[1], cost[2], cost[3]}, windows, patience, batches, ns};
    trials_add(&trials, took);
    for (int i = 0; i < WAYS; i++) cost[i] = trials.cost[i];
    return Py_BuildValue("(LLLLL(LLLL)LLLL)", (long long)trials.possible, (long long)trials.way, (long long)trials.best,
                         (long long)trials.tried, (long long)trials.wins, cost[0], cost[1], cost[2], cost[3],
                         (long long)trials.windows, (long long)trials.patience, (long long)trials.batches,
                         (long long)trials.ns);
}

#endif

/* The module shoal.native._core: lanes, blocks, turns, rows, kernels, bounds and moments in C; twin.py is its twin. */
#if !defined(Py_GIL_DISABLED) && defined(SHOAL_STABLE_ABI)
#define Py_LIMITED_API 0x030c0000
#endif

#include "compat.h"
#include "bounds.h"
#include "decision.h"
#include "kernel.h"
#include "lanes.h"
#include "library.h"
#include "moments.h"
#include "rows.h"
#include "simulate.h"
#include "step_block.h"
#include "turn.h"

static int core_exec(PyObject *module) {
    PyType_Spec *specs[] = {&lanes_spec, &block_spec, &kernel_spec, &turn_spec};
    const char *names[] = {"Lanes", "Block", "Kernel", "Turn"};
    for (int i = 0; i < 4; i++) {
        PyObject *type = PyType_FromSpec(specs[i]);
        if (type == NULL || PyModule_AddObjectRef(module, names[i], type) < 0) {
            Py_XDECREF(type);
            return -1;
        }
        Py_DECREF(type);
    }
    if (PyModule_AddStringConstant(module, "SLEEPS", sleeps_by()) < 0) return -1;
    return PyModule_AddIntConstant(module, "LAYOUT_FINGERPRINT", LAYOUT_FINGERPRINT);
}

static PyMethodDef core_methods[] = {
    {"outside", bounds_outside, METH_VARARGS, "outside(kind, values, low, high) -> first index out of bounds or -1"},
    {"merge", moments_merge, METH_VARARGS, "merge(kind, values, mean, var, count) -> count, with the rows taken in"},
    {"standardize", moments_standardize, METH_VARARGS,
     "standardize(kind, values, mean, var, epsilon, limit, out): values brought to mean 0 and variance 1"},
    {"write_rows", rows_write, METH_VARARGS,
     "write_rows(names, rows, observations, rewards, terminated, truncated, reward, targets, paths) -> whether it could"},
    {"take_infos", (PyCFunction)(void (*)(void))info_take, METH_FASTCALL,
     "take_infos(flags, rows, head, words) -> whether all lanes have an info that begins so, with its words copied"},
    {"first_way", decision_first_way, METH_VARARGS, "first_way(parties, cores) -> who spins: 1 the caller, 2 workers, 3 both"},
    {"rest_for", decision_rest_for, METH_VARARGS, "rest_for(usual_ns, spread_ns, wake_ns) -> (rest_ns, spin_ns)"},
    {"learn", decision_learn, METH_VARARGS, "learn(usual_ns, spread_ns, ns) -> (usual_ns, spread_ns)"},
    {"try_way", decision_try_way, METH_VARARGS, "try_way(trials, ns) -> trials, after one more batch"},
    {"library_kernel", library_kernel_address, METH_NOARGS, "the address of the kernel of envs in shared libraries"},
    {"simulation_kernel", simulate_kernel_address, METH_VARARGS,
     "simulation_kernel(error hook) -> the address of the kernel of another library's simulations"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot core_slots[] = {
    {Py_mod_exec, core_exec},
/* The core needs no GIL, for three reasons. What threads share lies in the slab, where each number has one writer, and bells
 * order the rest; that is how processes share it, which have no common GIL. Each object of the core
 * has one thread at a time: a call of a pool holds its Turn, which is an atomic exchange, for as long as it uses Lanes and
 * Kernel, other threads only ring bells, and a Block belongs to the thread that steps it. And there is no state of the module beside its types. Objects of an env or the caller (infos,
 * results of step, actions) are read by the thread that was given them; an env that goes on changing an info in a thread of
 * its own has to lock it, as in Python. */
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT, "_core", "Shoal's native core.", 0, core_methods, core_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&core_module); }

/* Moments: running mean and variance of batches, and values brought to mean 0 and variance 1 by them. */
#ifndef SHOAL_MOMENTS_H
#define SHOAL_MOMENTS_H

#include "compat.h"

#include <math.h>
#include <stdlib.h>

/* Sums of the rows, then of the squares of what differs from their mean: two passes, so that nothing cancels out. */
#define SHOAL_MOMENTS(type)                                                                     \
    {                                                                                           \
        const type *v = values;                                                                 \
        for (Py_ssize_t i = 0; i < rows; i++)                                                   \
            for (Py_ssize_t j = 0; j < width; j++) mean[j] += (double)v[i * width + j];         \
        for (Py_ssize_t j = 0; j < width; j++) mean[j] /= (double)rows;                         \
        for (Py_ssize_t i = 0; i < rows; i++)                                                   \
            for (Py_ssize_t j = 0; j < width; j++) {                                            \
                double d = (double)v[i * width + j] - mean[j];                                  \
                var[j] += d * d;                                                                \
            }                                                                                   \
        for (Py_ssize_t j = 0; j < width; j++) var[j] /= (double)rows;                          \
    }

#define SHOAL_STANDARDIZE(type)                                                                 \
    {                                                                                           \
        const type *v = values;                                                                 \
        for (Py_ssize_t i = 0; i < rows; i++)                                                   \
            for (Py_ssize_t j = 0; j < width; j++) {                                            \
                double x = ((double)v[i * width + j] - mean[j]) / spread[j];                    \
                x = x > limit ? limit : x;                                                      \
                out[i * width + j] = (float)(x < -limit ? -limit : x);                          \
            }                                                                                   \
    }

static void moments_of(int kind, Py_ssize_t size, const void *values, Py_ssize_t rows, Py_ssize_t width, double *mean,
                       double *var) {
    if (kind == 'u') SHOAL_MOMENTS(uint8_t)
    else if (size == 4) SHOAL_MOMENTS(float)
    else SHOAL_MOMENTS(double)
}

static void moments_apply(int kind, Py_ssize_t size, const void *values, Py_ssize_t rows, Py_ssize_t width,
                          const double *mean, const double *spread, double limit, float *out) {
    if (kind == 'u') SHOAL_STANDARDIZE(uint8_t)
    else if (size == 4) SHOAL_STANDARDIZE(float)
    else SHOAL_STANDARDIZE(double)
}

static int moments_fits(int kind, const Py_buffer *values, const Py_buffer *mean, const Py_buffer *var) {
    int known = kind == 'u' ? values->itemsize == 1 : kind == 'f' && (values->itemsize == 4 || values->itemsize == 8);
    Py_ssize_t width = mean->len / (Py_ssize_t)sizeof(double);
    int fits = known && mean->itemsize == sizeof(double) && var->itemsize == sizeof(double) && mean->len == var->len &&
               width > 0 && values->len / values->itemsize % width == 0;
    if (!fits) PyErr_SetString(PyExc_ValueError, "values must be rows of as many float or uint8 as mean and variance");
    return fits;
}

/* merge(kind, values, mean, var, count) -> count: takes the rows of `values` into mean and variance, in place. */
static PyObject *moments_merge(PyObject *Py_UNUSED(module), PyObject *args) {
    int kind;
    double count;
    PyObject *objects[3];
    Py_buffer views[3] = {{0}};
    if (!PyArg_ParseTuple(args, "COOOd", &kind, &objects[0], &objects[1], &objects[2], &count)) return NULL;
    int held = views_get(objects, views, 3, 1), done = 0;
    if (held == 3 && moments_fits(kind, &views[0], &views[1], &views[2])) {
        Py_ssize_t width = views[1].len / (Py_ssize_t)sizeof(double), rows = views[0].len / views[0].itemsize / width;
        double *mean = views[1].buf, *var = views[2].buf, total = count + (double)rows, share = (double)rows / total;
        double *fresh = calloc((size_t)width * 2, sizeof(double));
        if (fresh == NULL) PyErr_NoMemory();
        else {
            if (rows > 0) {
                Py_BEGIN_ALLOW_THREADS
                moments_of(kind, views[0].itemsize, views[0].buf, rows, width, fresh, fresh + width);
                for (Py_ssize_t j = 0; j < width; j++) {
                    double delta = fresh[j] - mean[j];
                    var[j] = var[j] * (1.0 - share) + fresh[width + j] * share + delta * delta * (share * (1.0 - share));
                    mean[j] += delta * share;
                }
                Py_END_ALLOW_THREADS
                count = total;
            }
            free(fresh);
            done = 1;
        }
    }
    views_release(views, held);
    return done ? PyFloat_FromDouble(count) : NULL;
}

/* standardize(kind, values, mean, var, epsilon, limit, out): out, of float, becomes (values - mean) / sqrt(var + epsilon)
 * within [-limit, limit]; a NaN stays one. */
static PyObject *moments_standardize(PyObject *Py_UNUSED(module), PyObject *args) {
    int kind;
    double epsilon, limit;
    PyObject *objects[4];
    Py_buffer views[4] = {{0}};
    if (!PyArg_ParseTuple(args, "COOOddO", &kind, &objects[0], &objects[1], &objects[2], &epsilon, &limit, &objects[3]))
        return NULL;
    int held = views_get(objects, views, 4, 3), done = 0;
    if (held == 4 && moments_fits(kind, &views[0], &views[1], &views[2])) {
        Py_ssize_t width = views[1].len / (Py_ssize_t)sizeof(double), rows = views[0].len / views[0].itemsize / width;
        const double *var = views[2].buf;
        double *spread = NULL;
        if (views[3].itemsize != sizeof(float) || views[3].len != rows * width * (Py_ssize_t)sizeof(float))
            PyErr_SetString(PyExc_ValueError, "out must have as many float as there are values");
        else if ((spread = malloc((size_t)width * sizeof(double))) == NULL) PyErr_NoMemory();
        else {
            Py_BEGIN_ALLOW_THREADS
            for (Py_ssize_t j = 0; j < width; j++) spread[j] = sqrt(var[j] + epsilon);
            moments_apply(kind, views[0].itemsize, views[0].buf, rows, width, views[1].buf, spread, limit,
                          views[3].buf);
            Py_END_ALLOW_THREADS
            free(spread);
            done = 1;
        }
    }
    views_release(views, held);
    if (!done) return NULL;
    Py_RETURN_NONE;
}

#endif
